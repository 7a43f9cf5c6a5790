"""The model's weights as trees: what they are, and how they start.

`ModelConfig.weights` describes each weight once; the trees here are nested dicts by the parts of its path.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

from llmpar.plan.model_config import ModelConfig, Weight

Tree = Any
"""A pytree of arrays, or of one description each: nested dicts like the model's."""


def of_weights(
    config: ModelConfig,
    f: Callable[[Weight], Any] = lambda weight: weight,
    learned: bool = False,
    counts: Sequence[int] | None = None,
) -> Tree:
    """Return the tree of ``f`` of every `model_config.Weight`, by default of the weight itself; ``learned``:
    only of those that gradients change (`trainable_params`); ``counts``: with so many layers of each kind."""
    rows = config.weights(counts)
    flat = {path: f(w) for path, w in rows.items() if not (learned and w.frozen)}
    return unflatten_dict(flat, sep=".")


def trainable_params(tree: Tree, config: ModelConfig) -> Tree:
    """Return what gradients change, of a tree like the model's or of a part: all, or with LoRA the
    adapters."""
    weights, flat = config.weights(), flatten_dict(tree, sep=".")
    learned = {path: leaf for path, leaf in flat.items() if not weights[path].frozen}
    return unflatten_dict(learned, sep=".")


def joined(tree: Tree, part: Tree) -> Tree:
    """Return the tree with the leaves of a part of it in place of its own."""
    flat = (flatten_dict(x, sep=".") for x in (tree, part))
    return unflatten_dict(functools.reduce(operator.or_, flat), sep=".")


def init_params(config: ModelConfig, seed: int | Array = 0) -> Tree:
    """Make fresh weights (`Weight.std`) from a seed or a key; under jit each device makes only its own shard.
    Embedding, layers and head have keys derived from it, and the weights of a layer from that of the layer.
    """
    keys = _numbered(seed if isinstance(seed, Array) else jax.random.key(seed))
    rows = config.must_run().weights()
    params = _fresh({"embedding": rows["embedding"]}, keys)
    for kind, (count, block) in enumerate(config.blocks):
        layer = lambda key, block=block: _fresh(block.block_weights(), _numbered(key))
        stack = jax.vmap(layer)(jax.random.split(next(keys), count))
        prefix = f"blocks.{kind}." if config.kinds else "blocks."
        params |= {prefix + path: w for path, w in stack.items()}
    rest = {path: row for path, row in rows.items() if path not in params}
    return unflatten_dict(params | _fresh(rest, keys), sep=".")


def _numbered(key: Array) -> Iterator[Array]:
    """Yield keys that are derived from one, without end."""
    return (jax.random.fold_in(key, i) for i in itertools.count())


def _fresh(rows: Mapping[str, Weight], keys: Iterator[Array]) -> dict[str, Array]:
    """Make initial values of weights; those that are equal everywhere take no key."""
    normal = lambda w: w.std * jax.random.normal(next(keys), w.shape)
    return {path: normal(w) if w.std else jnp.full(w.shape, w.fill) for path, w in rows.items()}
