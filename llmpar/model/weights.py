"""The model's weights as trees: what they are, and how they start.

`ModelConfig.weights` describes each weight once; the trees here have the shape of the model's parameters.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from llmpar.model.llama import Llama
from llmpar.plan.layout import parse_layout
from llmpar.plan.model_config import ModelConfig

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


def adapters_of(path: str, config: ModelConfig) -> list[str]:
    """The paths of the weight's adapters, A and B; none where it has none."""
    (part, _, name), weights = path.rpartition("."), config.weights()
    return [x for x in (f"{part}.lora.{name}_a", f"{part}.lora.{name}_b") if x in weights]


def merged(params: Tree, config: ModelConfig) -> Tree:
    """Weights, or a part of them, without adapters: W + A B · alpha / rank (Hu et al. 2021, section 4.1),
    added up in float32 where W lies, one matrix of all layers after the other."""
    flat, rows = traverse_util.flatten_dict(params, sep="."), config.weights()
    for path in list(flat):
        if (lora := config.lora) and (pair := adapters_of(path, config)):
            w, a, b = (parse_layout(rows[name].dims).letters for name in (path, *pair))
            add = functools.partial(_add_product, f"{a},{b}->{w}", lora.scale)
            there = getattr(flat[path], "sharding", None)
            flat[path] = jax.jit(add, out_shardings=there)(flat[path], *(flat.pop(name) for name in pair))
    return traverse_util.unflatten_dict(flat, sep=".")


def _add_product(equation: str, scale: float, w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    w, a, b = (x.astype("float32") for x in (w, a, b))
    return w + scale * jnp.einsum(equation, a, b, precision="highest")


@functools.cache
def model_graph(config: ModelConfig, kind: type[Llama] = Llama) -> nnx.GraphDef:
    """The model without its weights: ``nnx.merge(model_graph(config), params)`` is the model."""
    return nnx.split(nnx.eval_shape(lambda: kind(config, nnx.Rngs(0))))[0]


def init_params(config: ModelConfig, seed: int | jax.Array = 0) -> Tree:
    """Fresh weights as a plain dict of arrays; under jit each device makes only its own shard."""
    return nnx.to_pure_dict(nnx.state(Llama(config, nnx.Rngs(params=seed)), nnx.Param))
