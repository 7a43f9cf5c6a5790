"""Code inside `jax.shard_map`, where a device sees its own blocks: one function for each move, and the types
that say where devices differ.

JAX's type of a value there says over which mesh axes it may *vary*. `vary` adds axes, free in the forward
pass; its transpose is an all-reduce of the gradient (Shoeybi et al. 2019, section 3, call it f).
"""

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from llmpar.plan.layout import Move

WEIGHT, MOVED = "weight", "moved"
"""Names under which remat policies know gathered weights and the results of communication."""


def scope(text: str) -> AbstractContextManager:
    """Name collectives by the arrow that they carry out, for a census of the compiled program."""
    return jax.named_scope(f"arrow[{text}]")


def send(x: Array, move: Move, position: dict[str, int], to: Literal["varying", "invarying"]) -> Array:
    """The one lax call that a move is. ``position`` has the place of each dim in ``x``; ``to`` says whether
    gathered results may differ or are equal on all devices."""
    if move.kind == "all-reduce":
        return lax.psum(x, move.axes)
    if move.kind == "reduce-scatter":
        return lax.psum_scatter(x, move.axes, scatter_dimension=position[move.cuts], tiled=True)
    if move.kind == "all-gather":
        return lax.all_gather(x, move.axes, axis=position[move.gathers], tiled=True, to=to)
    if move.kind == "all-to-all":
        return lax.all_to_all(x, move.axes, position[move.cuts], position[move.gathers], tiled=True)
    dim = position[move.cuts]  # a slice: each device keeps its own block
    size = x.shape[dim] // lax.axis_size(move.axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(move.axes) * size, size, dim)


def hop(x: Array, axis: str | tuple[str, ...], way: str) -> Array:
    """What the rank before on a ring holds, sent as `Plan.hop` says."""
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    if way != "exchange":
        return lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])
    to_next = (jnp.arange(n) == (me + 1) % n).reshape(-1, *[1] * x.ndim)
    arrived = lax.all_to_all(jnp.where(to_next, x, jnp.zeros_like(x)), axis, 0, 0)
    return lax.dynamic_index_in_dim(arrived, (me - 1) % n, keepdims=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def ragged(
    rows: Float[Array, "gc ..."], send: Int[Array, " g"], come: Int[Array, " g"], axis: str
) -> Float[Array, "gc ..."]:
    """Exchange the full rows of blocks: rank j of ``axis`` gets the first ``send[j]`` rows of this rank's
    block for it, and this rank gets ``come[j]`` rows of rank j's. The gradient goes the same way back, with
    ``send`` and ``come`` swapped; JAX's own transpose would first exchange offsets that every rank knows."""
    slots = rows.shape[0] // len(send)
    begin = slots * jnp.arange(len(send), dtype=jnp.int32)
    mine = jnp.full_like(begin, slots * lax.axis_index(axis).astype(jnp.int32))
    return lax.ragged_all_to_all(rows, room(rows), begin, send, mine, come, axis_name=axis)


# An array like its argument that nobody has written. Zeros would cost a pass over memory for each exchange.
# It is made in a custom call, because autodiff would otherwise hoist it out of the loop over layers, where
# XLA copies it for each layer.
room = jax.custom_batching.custom_vmap(lambda x: vary(lax.empty(x.shape, x.dtype), varying(x)))
room.def_vmap(lambda size, mapped, x: (room(x), True))
ragged.defvjp(
    lambda rows, send, come, axis: (ragged(rows, send, come, axis), (send, come)),
    lambda axis, sizes, grad: (ragged(grad, *sizes[::-1], axis), None, None),
)


def after(known: Array, held: Array) -> Array:
    """Return ``held``, computed after ``known``: a data dependence, because XLA for CPUs drops optimization
    barriers. Where ``known`` holds a NaN, zeros are returned; the NaN shows anyway."""
    return jnp.where(known.max() <= jnp.inf, held, jnp.zeros((), held.dtype))


def at(tree: Any, index: Any) -> Any:
    """The part of every leaf that lies at one place of its leading dim."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def put(tree: Any, index: Any, values: Any) -> Any:
    """The tree with ``values`` written at one place of its leading dim."""
    return jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, index, 0), tree, values)


def varying(x: Any) -> frozenset[str]:
    """The mesh axes over which ``x`` may differ, as shard_map's type of it (or this type) says."""
    kind = (jax.typeof(x) if isinstance(x, jax.Array) else x).manual_axis_type
    return kind.varying if kind else frozenset()


def vary(x: Array, axes: Iterable[str]) -> Array:
    """``x`` typed as varying over ``axes`` too. Its transpose sums over those that are new."""
    missing = tuple(a for a in axes if a not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(tree: Any, like: Any = ()) -> Any:
    """Type all leaves as varying over what any leaf of ``tree`` or ``like`` does: loops need equal types."""
    axes = sorted(frozenset().union(*map(varying, jax.tree.leaves((tree, like)))))
    return jax.tree.map(lambda x: vary(x, axes), tree)


def together(values: Any) -> Any:
    """The values, none of which is used before all are computed. So XLA does not hoist a value that no layer
    changes, with the collectives that an island makes of it, out of the loop over layers. (On simulated
    devices JAX 0.10.2 crashes when collectives that were hoisted run beside a loop with others: a rendezvous
    counts too many participants.)"""
    return lax.optimization_barrier(values)
