"""The model's weights as trees: what they are, and how they start.

`ModelConfig.weights` describes each weight once; the trees here are nested dicts by the parts of its path.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from llmpar.model.llama import Llama, Tree
from llmpar.plan.model_config import ModelConfig, Weight


def weights_tree(
    config: ModelConfig,
    f: Callable[[Weight], Any] = lambda weight: weight,
    trainable: bool = False,
    counts: Sequence[int] | None = None,
) -> Tree:
    """Return the tree of ``f`` of every `model_config.Weight`, by default of the weight itself;
    ``trainable``: only of those that gradients change (`trainable_params`); ``counts``: with so many layers
    of each kind."""
    rows = config.weights(counts).items()
    flat = {path: f(weight) for path, weight in rows if not (trainable and weight.frozen)}
    return unflatten_dict(flat, sep=".")


def trainable_params(tree: Tree, config: ModelConfig) -> Tree:
    """Return what gradients change, of a tree like the model's or of a part: all, or with LoRA the
    adapters."""
    weights, flat = config.weights(), flatten_dict(tree, sep=".")
    trainable = {path: leaf for path, leaf in flat.items() if not weights[path].frozen}
    return unflatten_dict(trainable, sep=".")


def joined(tree: Tree, part: Tree) -> Tree:
    """Return the tree with the leaves of a part of it in place of its own."""
    return unflatten_dict(flatten_dict(tree) | flatten_dict(part))


@functools.cache
def model_graph(config: ModelConfig, model: type[Llama] = Llama) -> nnx.GraphDef:
    """Return the model without its weights: ``nnx.merge(model_graph(config), params)`` is the model."""
    return nnx.split(nnx.eval_shape(lambda: model(config, nnx.Rngs(0))))[0]


def init_params(config: ModelConfig, seed: int | jax.Array = 0) -> Tree:
    """Make fresh weights, a plain dict of arrays; under jit each device makes only its own shard."""
    return nnx.to_pure_dict(nnx.state(Llama(config, nnx.Rngs(params=seed)), nnx.Param))
