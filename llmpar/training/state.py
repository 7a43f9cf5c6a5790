"""The state that a step changes: its shapes and layouts, and how it begins."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from jaxtyping import Array

from llmpar.model.weights import Tree, described, trained, weight_dims
from llmpar.plan.layout import Layout
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import Resolved

WHOLE = Layout(())


class State(NamedTuple):
    """What a step changes: float32 master weights, the optimizer's state, and the number of steps done; and
    frozen weights, in the dtype that the plan computes in."""

    params: Tree
    optimizer: Tree
    step: Any


def initial_state(params: Tree, config: ModelConfig, optimizer: optax.GradientTransformation) -> State:
    """Return the state before the first step with these weights."""
    return State(params, optimizer.init(trained(params, config)), jnp.int32(0))


def state_shapes(config: ModelConfig, plan: Resolved, optimizer: optax.GradientTransformation) -> State:
    """Return the state's leaves by shape and dtype."""
    dtype = lambda w: plan.dtype if w.frozen else "float32"
    params = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, dtype(w)), described(config))
    return jax.eval_shape(lambda params: initial_state(params, config, optimizer), params)


def state_layouts(state: State, config: ModelConfig, plan: Resolved) -> State:
    """Lay out the state. What an optimizer keeps under a weight's path and in its shape (moments, say) is cut
    like the weight's gradient; the rest (counters, Adafactor's row and column sums) is whole."""
    dims = weight_dims(config)
    paths, _ = jax.tree_util.tree_flatten_with_path(trained(state.params, config))
    learned = zip(paths, jax.tree.leaves(trained(dims, config)), strict=True)
    known = {path: (weight.shape, plan.layouts_of(dims).reduced) for (path, weight), dims in learned}

    def layout_of(path, leaf) -> Layout:
        ends = (path[i:] for i in range(len(path)))
        shape, layout = next((known[end] for end in ends if end in known), (None, WHOLE))
        return layout if leaf.shape == shape else WHOLE

    optimizer = jax.tree_util.tree_map_with_path(layout_of, state.optimizer)
    return State(jax.tree.map(plan.stored, dims), optimizer, WHOLE)


def placed_weights(params: Tree, like: Tree, model: str) -> dict[str, Array]:
    """Lay out weights, all or a part, as ``like`` says, and return them by path; refuse what does not fit."""
    weights = flatten_dict(like, sep=".")
    placed = {}
    for path, given in flatten_dict(params, sep=".").items():
        if (weight := weights.get(path)) is None:
            raise ValueError(f"the model has no weight '{path}'; it has {', '.join(weights)}")
        dtype = getattr(given, "dtype", None)  # None, or a number, has none
        if dtype is None or given.shape != weight.shape or not jnp.issubdtype(dtype, jnp.floating):
            what = f"'{path}' of shape {list(np.shape(given))} ({dtype or type(given).__name__})"
            use = f"use {list(weight.shape)} ({weight.dtype}), layers in the model's order"
            raise ValueError(f"{what} is no weight of '{model}'; {use}")
        given = given.astype(weight.dtype)
        to = weight.sharding
        is_placed = isinstance(given, jax.Array) and given.sharding.is_equivalent_to(to, given.ndim)
        placed[path] = given if is_placed else jax.device_put(given, to, may_alias=False)
    return placed
