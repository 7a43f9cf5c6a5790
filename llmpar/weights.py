"""The model's weights as trees: what they are, and how they start.

`ModelConfig.weights` describes each weight once; the trees here have the shape of the model's parameters.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
from flax import nnx, traverse_util

from llmpar.config import ModelConfig
from llmpar.model import Llama

Tree = Any
"""A pytree of arrays, or of what is said of each: nested dicts as the model's."""


def described(config: ModelConfig) -> Tree:
    """The tree of every weight's `config.Weight`."""
    return traverse_util.unflatten_dict(config.weights(), sep=".")


def weight_dims(config: ModelConfig) -> Tree:
    """The tree of every weight's region and dims."""
    return jax.tree.map(lambda weight: weight.dims, described(config))


def trained(tree: Tree, config: ModelConfig) -> Tree:
    """What gradients change, of a tree like the model's or a part of it: all, or with LoRA the adapters."""
    weights, flat = config.weights(), traverse_util.flatten_dict(tree, sep=".")
    learned = {path: leaf for path, leaf in flat.items() if not weights[path].frozen}
    return traverse_util.unflatten_dict(learned, sep=".")


def joined(tree: Tree, part: Tree) -> Tree:
    """The tree with the leaves of a part of it in place of its own."""
    flat = (traverse_util.flatten_dict(x, sep=".") for x in (tree, part))
    return traverse_util.unflatten_dict(functools.reduce(operator.or_, flat), sep=".")


@functools.cache
def model_graph(config: ModelConfig, kind: type[Llama] = Llama) -> nnx.GraphDef:
    """The model without its weights: ``nnx.merge(model_graph(config), params)`` is the model."""
    return nnx.split(nnx.eval_shape(lambda: kind(config, nnx.Rngs(0))))[0]


def init_params(config: ModelConfig, seed: int | jax.Array = 0) -> Tree:
    """Fresh weights as a plain dict of arrays; under jit each device makes only its own shard."""
    return nnx.to_pure_dict(nnx.state(Llama(config, nnx.Rngs(params=seed)), nnx.Param))
