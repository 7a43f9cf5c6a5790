"""The model's weights as trees: what they are, how they start, where they lie.

`ModelConfig.weights` describes each weight once; the trees here have the shape of the model's parameters.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx, traverse_util
from jax.sharding import AbstractMesh, Mesh

from llmpar.config import ModelConfig
from llmpar.mesh import sharding
from llmpar.model import Llama
from llmpar.plan import Resolved

Tree = Any
"""A pytree of arrays, or of what is said of each: nested dicts as the model's."""


def described(config: ModelConfig) -> Tree:
    """The tree of every weight's `config.Weight`."""
    return traverse_util.unflatten_dict(config.weights(), sep=".")


def weight_dims(config: ModelConfig) -> Tree:
    """The tree of every weight's region and dims."""
    return jax.tree.map(lambda weight: weight.dims, described(config))


@functools.cache
def model_graph(config: ModelConfig, kind: type[Llama] = Llama) -> nnx.GraphDef:
    """The model without its weights: ``nnx.merge(model_graph(config), params)`` is the model."""
    return nnx.split(nnx.eval_shape(lambda: kind(config, nnx.Rngs(0))))[0]


def init_params(config: ModelConfig, seed: int | jax.Array = 0) -> Tree:
    """Fresh weights as a plain dict of arrays; under jit each device makes only its own shard."""
    return nnx.to_pure_dict(nnx.state(Llama(config, nnx.Rngs(params=seed)), nnx.Param))


def abstract_params(config: ModelConfig, plan: Resolved, mesh: Mesh | AbstractMesh) -> Tree:
    """Shapes and shardings of the float32 weights as a plan stores them."""

    place = lambda weight: sharding(mesh, plan.stored(weight.dims))
    abstract = lambda weight: jax.ShapeDtypeStruct(weight.shape, "float32", sharding=place(weight))
    return jax.tree.map(abstract, described(config))
