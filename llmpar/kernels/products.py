"""Products of groups of rows, each group with the weights of its owner.

Rows lie in blocks, and a block has one owner, such as an expert. Four ways of multiplying: `lax.dot_general`
where all rows have the same owner (``blocks``, for CPUs), or where each owner has one block of them
(``slots``), `jax.lax.ragged_dot` (TPUs), and our own kernels in Triton (GPUs), which can gather their rows
from where they are: a copy of all rows, in order of their owners, is never written. ``interpreted`` are these
kernels on any platform, for tests.

Dims: r rows, q slots for rows, n blocks, l owners, a and b the two widths of a weight. (Blocks of one owner:
Gale et al. 2022, MegaBlocks; gathering inside the product: Tan et al. 2024, ScatterMoE.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from llmpar.block import vary_alike

KERNELS = "triton", "interpreted"
BLOCK_ROWS = {"blocks": (4, 32), "slots": (8, 128), "ragged_dot": (8, 128)}
BLOCK_ROWS |= dict.fromkeys(KERNELS, (16, 128))
"""The fewest and the most rows of a block for each way of multiplying; of slots, what they are rounded to."""


def count(key: Int[Array, ...], num_keys: int) -> Int[Array, " i"]:
    """How many items have each key."""
    return (key.reshape(-1, 1) == jnp.arange(num_keys)[None]).sum(0, dtype=jnp.int32)


def take(z: Array, index: Int[Array, ...]) -> Array:
    """The rows ``z[index]``, zeros where an index is past the end."""
    return z.at[index].get(mode="fill", fill_value=0)


class Lines(NamedTuple):
    """The rows ``whole[line_q]``, zeros where a line is past the end: a kernel gathers them as it goes."""

    whole: Any  # r a
    line_q: Any  # q, integers

    @property
    def shape(self) -> tuple[int, int]:
        """As if they were gathered."""
        return len(self.line_q), self.whole.shape[1]


Rows = Lines | Float[Array, "q _"]


def gather(way: str, z: Array, line_q: Int[Array, " q"]) -> Rows:
    """The rows ``z[line_q]`` as this way of multiplying wants them."""
    return Lines(z, line_q) if way in KERNELS else take(z, line_q)


def dot(way: str, *pairs, owners, transposed: bool = False):
    """Rows with the weights of their owners (or these transposed): of one owner, or of all. Of several pairs
    of rows and weights the sum."""
    if way in KERNELS:
        return kernel_dot(pairs, owners, transposed, way == "interpreted")
    dims = ((1,), (1 if transposed else 0,)), ((), ())
    if way == "ragged_dot":
        dims = ((1,), (2 if transposed else 1,)), ((), ())
        one = lambda rows, w: _ragged_dot(rows, w, owners, len(w), dims, [0])
    elif way == "slots":
        product = functools.partial(jnp.einsum, "lqb,lab->lqa" if transposed else "lqa,lab->lqb")
        one = lambda rows, w: product(rows.reshape(len(w), -1, rows.shape[1]), w).reshape(len(rows), -1)
    else:
        one = lambda rows, w: lax.dot_general(rows, w, dims, preferred_element_type=jnp.float32)
    return functools.reduce(jnp.add, (one(rows, w).astype(rows.dtype) for rows, w in pairs))


def outer(way: str, rows, grads, owners, num_owners: int):
    """For each owner the sum over its rows of their outer products with gradients, float32; of one owner
    alone where all rows have the same."""
    if way in KERNELS:
        return kernel_outer(rows, grads, owners, num_owners, way == "interpreted")
    dims = ((0,), (0,)), ((), ())
    if way == "ragged_dot":
        return _ragged_dot(rows, grads, owners, num_owners, dims, [])
    if way == "slots":
        rows, grads = (z.reshape(num_owners, -1, z.shape[1]) for z in (rows, grads))
        return jnp.einsum("lqa,lqb->lab", rows, grads, preferred_element_type=jnp.float32)
    return lax.dot_general(rows, grads, dims, preferred_element_type=jnp.float32)


def _ragged_dot(a, b, owners, num_owners: int, dims, groups: list[int]):
    """`jax.lax.ragged_dot`, for which TPUs have a kernel. GPUs and CPUs multiply every row by every owner's
    weights, and mask."""
    sizes = count(owners, num_owners) * (len(a) // len(owners))
    dims = lax.RaggedDotDimensionNumbers(dims, lhs_ragged_dimensions=[0], rhs_group_dimensions=groups)
    return lax.ragged_dot_general(a, b, sizes, dims, preferred_element_type=jnp.float32)


def kernel_dot(
    pairs: Sequence[tuple[Rows, Float[Array, "l _ _"]]],
    owner_n: Int[Array, " n"],
    transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "q _"]:
    """Each block of rows times the weights of its owner (or these transposed), added up over the pairs: a
    kernel in Triton that sums in float32. A block that nobody owns gives zeros and multiplies nothing."""
    (num_rows, inner), w = pairs[0][0].shape, pairs[0][1]
    block, outer = num_rows // len(owner_n), w.shape[1 if transposed else 2]
    tile, step = _tile(outer, 128), _tile(inner, 128 // w.itemsize)

    def kernel(owner_ref, pairs, out_ref):
        owner, columns = owner_ref[pl.program_id(0)], pl.ds(pl.program_id(1) * tile, tile)
        mine, num_steps = jnp.minimum(owner, len(w) - 1), (owner < len(w)).astype(jnp.int32) * (inner // step)

        def add(rows, w_ref, i, total):
            terms = pl.ds(i * step, step)
            matrix = w_ref[mine, columns, terms].T if transposed else w_ref[mine, terms, columns]
            lines = _read(rows, pl.ds(0, block), terms)
            return total + jnp.dot(lines, matrix, preferred_element_type=jnp.float32)

        total = jnp.zeros(out_ref.shape, jnp.float32)
        for pair in pairs:
            total = lax.fori_loop(0, num_steps, functools.partial(add, *pair), total)
        out_ref[...] = total.astype(out_ref.dtype)

    def spec(rows, w):
        laid, line = pl.BlockSpec((block, inner), lambda i, j: (i, 0)), pl.BlockSpec((block,), lambda i, j: i)
        return Lines(_whole(rows.whole), line) if isinstance(rows, Lines) else laid, _whole(w)

    return _call(
        kernel,
        interpret,
        (owner_n, list(pairs)),
        (num_rows, outer),
        w.dtype,
        name="grouped_dot",
        grid=(len(owner_n), outer // tile),
        in_specs=[_whole(owner_n), [spec(*pair) for pair in pairs]],
        out_specs=pl.BlockSpec((block, tile), lambda i, j: (i, j)),
    )


def kernel_outer(
    rows: Rows, grads: Rows, owner_n: Int[Array, " n"], num_owners: int, interpret: bool = False
) -> Float[Array, "l a b"]:
    """For each owner the sum over its blocks of rows' outer products with gradients, float32, by a kernel in
    Triton. The blocks of an owner lie side by side."""
    (num_rows, a), b = rows.shape, grads.shape[1]
    block, tile_a, tile_b = num_rows // len(owner_n), _tile(a, 128), _tile(b, 128)
    step = _tile(block, 128 // jax.tree.leaves(rows)[0].itemsize)
    steps_l = count(owner_n, num_owners) * (block // step)
    end_l = jnp.cumsum(steps_l)

    def kernel(begin_ref, end_ref, rows, grads, out_ref):
        def add(i, total):
            here = pl.ds(i * step, step)
            x, y = _read(rows, here, pl.ds(0, tile_a)), _read(grads, here, pl.ds(0, tile_b))
            return total + jnp.dot(x.T, y, preferred_element_type=jnp.float32)

        owner, none = pl.program_id(0), jnp.zeros(out_ref.shape, jnp.float32)
        out_ref[...] = lax.fori_loop(begin_ref[owner], end_ref[owner], add, none)

    def spec(z, tile, place):
        column = pl.BlockSpec((len(jax.tree.leaves(z)[0]), tile), lambda l, i, j: (0, (i, j)[place]))
        return Lines(column, _whole(z.line_q)) if isinstance(z, Lines) else column

    return _call(
        kernel,
        interpret,
        (end_l - steps_l, end_l, rows, grads),
        (num_owners, a, b),
        jnp.float32,
        name="grouped_outer",
        grid=(num_owners, a // tile_a, b // tile_b),
        in_specs=[_whole(end_l), _whole(end_l), spec(rows, tile_a, 0), spec(grads, tile_b, 1)],
        out_specs=pl.BlockSpec((None, tile_a, tile_b), lambda l, i, j: (l, i, j)),
    )


def _read(rows: Any, lines: Any, columns: Any) -> Array:
    """Some lines and columns of what a kernel was given."""
    if not isinstance(rows, Lines):
        return rows[lines, columns]
    line = rows.line_q[lines][:, None]
    at = line, columns.start + lax.broadcasted_iota(jnp.int32, (1, columns.size), 1)
    return _triton().load(rows.whole.at[at], mask=line < rows.whole.shape[0], other=0)


def _triton() -> Any:
    """Pallas for Triton, which JAX gives up some day: only who runs these kernels asks for it."""
    from jax.experimental.pallas import triton

    return triton


def _whole(z: Array) -> pl.BlockSpec:
    """An operand as it is, for every program of a kernel."""
    return pl.BlockSpec(z.shape, lambda *_: (0,) * z.ndim)


def _call(kernel, interpret: bool, operands: tuple, shape: tuple[int, ...], dtype: Any, **how: Any) -> Array:
    """A Pallas call whose result varies over the mesh axes over which an operand does."""
    operands = vary_alike(operands)
    like = jax.typeof(jax.tree.leaves(operands)[0]).manual_axis_type
    asked = None if interpret else _triton().CompilerParams(num_warps=8, num_stages=4)
    out = jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=like)
    return pl.pallas_call(kernel, out_shape=out, interpret=interpret, compiler_params=asked, **how)(*operands)


def _tile(size: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides ``size``. Tensor cores want 16."""
    if size % 16:
        raise ValueError(
            f"grouped='triton' multiplies tiles of 16 columns or more, and a width of {size} is no multiple"
            " of 16; use widths, of the model and of each device's part of an expert, that are"
        )
    return min(most, size & -size)


def kernel_flops(name: str, *shapes: tuple[int, ...]) -> float | None:
    """The FLOPs that a call of a kernel here executes on a rank's even share of tokens, by the shapes of its
    operands; None for another kernel. Blocks that nobody owns, a ninth of a chunk then, are skipped."""
    of = lambda dims: [shape for shape in shapes if len(shape) == dims]
    if "grouped_dot" in name:
        num_rows, *_ = (of(1)[1:] or of(2))[0]  # lines to gather, or rows as they lie
        return 8 / 9 * 2.0 * num_rows * sum(a * b for _, a, b in of(3))
    if "grouped_outer" in name:
        num_rows, *_ = (of(1)[2:] or of(2))[0]
        return 8 / 9 * 2.0 * num_rows * of(2)[0][1] * of(2)[1][1]
    return None
