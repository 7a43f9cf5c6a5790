"""The state that a step changes: its shapes and layouts, how it begins; and what a step refuses to take."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from llmpar.model.weights import Tree, trainable_params, weights_tree
from llmpar.plan.layout import WHOLE, Layout
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import Plan, Resolved


class State(NamedTuple):
    """What a step changes: float32 master weights, the optimizer's state, and the number of steps done; and
    frozen weights, in the dtype that the plan computes in."""

    params: Tree
    optimizer: Tree
    step: Any


def initial_state(
    params: Tree, config: ModelConfig, optimizer: optax.GradientTransformation
) -> State:
    """Return the state before the first step with these weights."""
    return State(params, optimizer.init(trainable_params(params, config)), jnp.int32(0))


def state_shapes(
    config: ModelConfig,
    plan: Resolved,
    optimizer: optax.GradientTransformation,
    counts: Sequence[int],
) -> State:
    """Return the leaves by shape and dtype of a state with so many layers of each kind."""
    dtype = lambda w: plan.dtype if w.frozen else "float32"
    shape = lambda w: jax.ShapeDtypeStruct(w.shape, dtype(w))
    params = weights_tree(config, shape, counts=counts)
    return jax.eval_shape(lambda params: initial_state(params, config, optimizer), params)


def state_layouts(state: State, config: ModelConfig, plan: Resolved) -> State:
    """Lay out the state. What an optimizer keeps under a weight's path and in its shape (moments, say) is cut
    like the weight's gradient; the rest (counters, Adafactor's row and column sums) is whole."""
    paths = jax.tree_util.tree_leaves_with_path(trainable_params(state.params, config))
    learned = jax.tree.leaves(weights_tree(config, trainable=True))
    known = {
        path: (leaf.shape, plan.layouts_of(weight.dims).reduced)
        for (path, leaf), weight in zip(paths, learned, strict=True)
    }

    def layout_of(path, leaf) -> Layout:
        ends = (path[i:] for i in range(len(path)))
        shape, layout = next((known[end] for end in ends if end in known), (None, WHOLE))
        return layout if leaf.shape == shape else WHOLE

    optimizer = jax.tree_util.tree_map_with_path(layout_of, state.optimizer)
    return State(weights_tree(config, lambda weight: plan.stored(weight.dims)), optimizer, WHOLE)


def placed_weights(params: Tree, like: Tree, model: str) -> dict[str, Array]:
    """Lay out weights, all or a part, as ``like`` says, and return them by path; refuse what does not fit."""
    weights = flatten_dict(like, sep=".")
    placed = {}
    for path, given in flatten_dict(params, sep=".").items():
        if (weight := weights.get(path)) is None:
            raise ValueError(f"the model has no weight '{path}'; it has {', '.join(weights)}")
        dtype = getattr(given, "dtype", None)  # None, or a number, has none
        if dtype is None or given.shape != weight.shape or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"'{path}' of shape {list(np.shape(given))} ({dtype or type(given).__name__}) is no weight"
                f" of '{model}'; use {list(weight.shape)} ({weight.dtype}), layers in the model's order"
            )
        given = given.astype(weight.dtype)
        if not isinstance(given, jax.Array) or not given.sharding.is_equivalent_to(
            weight.sharding, given.ndim
        ):
            given = jax.device_put(given, weight.sharding, may_alias=False)
        placed[path] = given
    return placed


# -------------------------------------------------------------------------------------------- what is refused


def check_mesh(plan: Plan, mesh: Any) -> None:
    """Refuse what is no mesh, or another than the plan's, and weights that would not be float32."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh is {mesh!r:.60}, no jax.sharding.Mesh; use make_mesh(plan.mesh)")
    sizes = dict(mesh.shape)
    if sizes not in (plan.mesh.user_sizes, plan.mesh.sizes):
        has = " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"
        raise ValueError(
            f"the plan is for mesh '{plan.mesh}', and the mesh is {has}; use make_mesh(plan.mesh)"
        )
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError("JAX_ENABLE_X64 is on, but master weights are float32; switch it off")


def check_alive(tree: Tree) -> None:
    """Refuse arrays whose memory was given away. On simulated devices the process would end at them."""
    for x in jax.tree.leaves(tree):
        if not isinstance(x, jax.core.Tracer) and getattr(x, "is_deleted", bool)():
            raise ValueError(
                "this state was used up by the step before; keep the state that run returns"
            )


def check_tokens(name: str, x: Any, vocab_size: int) -> None:
    """Refuse tokens, or targets, that are none of a vocabulary. A target below 0 does not count."""
    parts = [shard.data for shard in x.addressable_shards] if isinstance(x, jax.Array) else [x]
    for part in map(np.asarray, parts):
        least, most = (int(part.min()), int(part.max())) if part.size else (0, 0)
        if (
            not np.issubdtype(part.dtype, np.integer)
            or most >= vocab_size
            or name == "tokens"
            and least < 0
        ):
            raise ValueError(
                f"{name} are {part.dtype} from {least:,} to {most:,}, and the vocabulary has"
                f" {vocab_size:,}; use integers from 0 to {vocab_size - 1:,}, of this model's tokenizer"
            )


_TOKENS, _SAMPLED = {"tokens", "targets", "positions", "segments"}, {"advantages", "logprobs"}


class Checked:
    """A compiled function of a state (or weights) and a batch that refuses tokens outside the
    vocabulary, arrays of a batch that no loss reads, and a state that is used up. It reads a batch
    back from its devices, which JAX does once for an array; ``jitted`` does not, and has no
    checks."""

    def __init__(self, jitted: Any, vocab_size: int):
        self.jitted = jitted
        self.vocab_size = vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)  # lower, trace

    def __call__(self, state: Any, batch: Any) -> Any:
        check_alive((state, batch))
        arrays = batch if isinstance(batch, dict) else {}
        if (more := arrays.keys() - _TOKENS) and more != _SAMPLED:
            raise ValueError(
                f"the batch has {', '.join(sorted(more))} beside tokens, targets, positions and segments,"
                " and no loss reads that; give both advantages and logprobs (reinforcement learning), or"
                " neither"
            )
        for name in ("tokens", "targets"):  # of another batch JAX names what is missing
            if not isinstance(arrays.get(name), jax.core.Tracer | None):
                check_tokens(name, arrays[name], self.vocab_size)
        return self.jitted(state, batch)
