"""Code inside `jax.shard_map`, where a device sees its own blocks: `send` runs a move of an arrow, `hop` and
`ragged` run what is no such move; and the types that tell where devices differ.

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
"""Names by which remat policies know gathered weights and the results of communication."""


def scope(text: str) -> AbstractContextManager:
    """Name collectives by the arrow that they carry out, for a census of the compiled program."""
    return jax.named_scope(f"arrow[{text}]")


def dim_of(letter: str, letters: str) -> int:
    """Return the dim of a value with these letters; 0 for "": a move that names no dim needs none."""
    return letters.index(letter) if letter else 0


def send(x: Array, move: Move, letters: str, to: Literal["varying", "invarying"]) -> Array:
    """Run a move: one lax call. ``letters`` are the dims of ``x``; ``to`` tells whether results of a gather
    may differ or are equal on all devices."""
    cuts, gathers = dim_of(move.cuts, letters), dim_of(move.gathers, letters)
    match move.kind:
        case "all-reduce":
            return lax.psum(x, move.axes)
        case "reduce-scatter":
            return lax.psum_scatter(x, move.axes, scatter_dimension=cuts, tiled=True)
        case "all-gather":
            return lax.all_gather(x, move.axes, axis=gathers, tiled=True, to=to)
        case "all-to-all":
            return lax.all_to_all(x, move.axes, cuts, gathers, tiled=True)
    # a slice: each device keeps its own block
    size = x.shape[cuts] // lax.axis_size(move.axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(move.axes) * size, size, cuts)


def hop(x: Array, axis: str | tuple[str, ...], method: str, text: str, by: int = 1) -> Array:
    """Return the value of the rank before on a ring, or ``by`` ranks before, sent by the method `Plan.hop`,
    in the `scope` of a text."""
    with scope(text):
        n, me = lax.axis_size(axis), lax.axis_index(axis)
        if method != "exchange":
            return lax.ppermute(x, axis, [(i, (i + by) % n) for i in range(n)])
        to_next = (jnp.arange(n) == (me + by) % n).reshape(-1, *[1] * x.ndim)
        arrived = lax.all_to_all(jnp.where(to_next, x, jnp.zeros_like(x)), axis, 0, 0)
        return lax.dynamic_index_in_dim(arrived, (me - by) % n, keepdims=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def ragged(
    rows: Float[Array, "gc ..."], send: Int[Array, " g"], receive: Int[Array, " g"], axis: str
) -> Float[Array, "gc ..."]:
    """Exchange the full rows of blocks: rank j of ``axis`` gets the first ``send[j]`` rows of this rank's
    block for it, and this rank gets ``receive[j]`` rows of rank j's. The gradient goes the same way back,
    with ``send`` and ``receive`` swapped; JAX's own transpose would first exchange offsets that every rank
    knows."""
    slots = rows.shape[0] // len(send)
    begin = slots * jnp.arange(len(send), dtype=jnp.int32)
    own = jnp.full_like(begin, slots * lax.axis_index(axis).astype(jnp.int32))
    return lax.ragged_all_to_all(rows, unwritten(rows), begin, send, own, receive, axis_name=axis)


# An array like its argument, with undefined values. Zeros would cost a pass over memory for each exchange.
# It is made in a custom call, because autodiff would otherwise hoist it out of the loop over layers, where
# XLA copies it for each layer.
unwritten = jax.custom_batching.custom_vmap(lambda x: vary(lax.empty(x.shape, x.dtype), varying(x)))
unwritten.def_vmap(lambda size, mapped, x: (unwritten(x), True))
ragged.defvjp(
    lambda rows, send, receive, axis: (ragged(rows, send, receive, axis), (send, receive)),
    lambda axis, sizes, grad: (ragged(grad, *sizes[::-1], axis), None, None),
)


def after(known: Array, value: Array) -> Array:
    """Return ``value``, computed after ``known``: a data dependence, because XLA for CPUs drops optimization
    barriers. Where ``known`` has a NaN, zeros are returned; the NaN shows anyway."""
    return jnp.where(known.max() <= jnp.inf, value, jnp.zeros((), value.dtype))


def at(tree: Any, index: Any) -> Any:
    """Return the part of every leaf at one index of its leading dim."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def put(tree: Any, index: Any, values: Any) -> Any:
    """Return the tree with ``values`` written at one index of its leading dim."""
    return jax.tree.map(
        lambda x, new: lax.dynamic_update_index_in_dim(x, new, index, 0), tree, values
    )


def varying(x: Any) -> frozenset[str]:
    """Return the mesh axes over which ``x`` may differ by shard_map's type of it, or by this type."""
    axis_type = (jax.typeof(x) if isinstance(x, jax.Array) else x).manual_axis_type
    return axis_type.varying if axis_type else frozenset()


def vary(x: Array, axes: Iterable[str]) -> Array:
    """Type ``x`` as varying over ``axes`` too. The transpose sums over those that are new."""
    missing = tuple(a for a in axes if a not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def zeros_like(tree: Any, *lead: int, dtype: Any = None) -> Any:
    """Return zeros of the types of a tree, or of a ``dtype``, behind leading dims of these sizes, which may
    differ along the same axes."""
    zeros = lambda x: vary(jnp.zeros((*lead, *x.shape), dtype or x.dtype), varying(x))
    return jax.tree.map(zeros, tree)


def vary_alike(tree: Any, like: Any = ()) -> Any:
    """Type all leaves as varying over what any leaf of ``tree`` or ``like`` does: loops need equal types."""
    axes = sorted(frozenset().union(*map(varying, jax.tree.leaves((tree, like)))))
    return jax.tree.map(lambda x: vary(x, axes), tree)
