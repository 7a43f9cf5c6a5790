"""Send rows through the feed-forwards of their experts: products of groups of rows, each with its own
weights.

A device holds ``l`` experts and ``r`` rows, each of which visits up to ``k`` of them. `lay_out` gives every
visit a slot: the slots of an expert lie side by side and fill whole blocks, so that a block has one owner.
Nothing is copied into slots: a piece of them at a time is gathered, multiplied, and let go. A piece is a
few blocks of one expert (``blocks``, for CPUs), or a chunk of many blocks, which `jax.lax.ragged_dot` (TPUs)
or our kernel in Triton (GPUs) multiplies. There are as many pieces as rows have come: no token is dropped,
and slots that nobody needs cost nothing but their place.

The backward pass keeps the rows, and of the first chunk, which holds an eighth more than an even share,
the products with gate and up. Those of other pieces it computes again: 11 products where 9 are useful,
instead of memory for the worst routing in every layer. On CPUs that is all pieces.

Dims: r rows, k visits of a row, q slots, n blocks, d width, m an expert's width, l experts here. (Blocks of
rows of one expert: Gale et al. 2022, MegaBlocks.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from llmpar.par import HIDDEN, vary_alike

Weights = tuple[Float[Array, "l d m"], Float[Array, "l d m"], Float[Array, "l m d"]]


BLOCK_ROWS = {"blocks": (4, 32), "ragged_dot": (8, 128), "triton": (16, 128), "interpreted": (16, 128)}
"""The fewest and the most rows of a block for each way of multiplying."""
OVERFLOW = "overflow"
"""The scope of the loop over chunks that hold more than a rank's usual share: a census counts no turn of
it."""
KERNELS = "triton", "interpreted"
STRIDE = 4
"""On CPUs an expert's blocks are multiplied so many at a time, and the rest one by one."""


class How(NamedTuple):
    """Who multiplies, ``blocks``, ``ragged_dot``, ``triton`` or that ``interpreted``; how many blocks are in
    a chunk (0 for ``blocks``: expert by expert); and whether the backward pass makes the weights' gradients
    in a loop of their own, which a pipeline can put off (`llmpar.split`)."""

    way: str
    chunk: int = 0
    split: bool = False


class Layout(NamedTuple):
    """Which visit stands in which slot, and whose a block is."""

    slot_rk: Int[Array, "r k"]  # of each visit; q for one to nobody here
    visit_q: Int[Array, " q"]  # the visit in each slot, r·k in an empty one
    end_l: Int[Array, " l"]  # the block after the last one of each expert
    owner_n: Int[Array, " n"]  # the expert of each block; l after the last


def count(key: Int[Array, ...], num_keys: int) -> Int[Array, " i"]:
    """How many items have each key."""
    return (key.reshape(-1, 1) == jnp.arange(num_keys)[None]).sum(0, dtype=jnp.int32)


def arrange(
    key_p: Int[Array, " p"], start_i: Int[Array, " i"], num_slots: int
) -> tuple[Int[Array, " p"], Int[Array, " q"]]:
    """Slots for items, those of key i side by side from slot ``start[i]`` on, in their order.

    Gives (the slot of each item, the item in each slot). Past the end: a key past the last gets no slot, and
    an empty slot has no item.
    """
    num_items, num_keys = len(key_p), len(start_i)
    counts_i = count(key_p, num_keys)
    order_p = jnp.argsort(key_p, stable=True)
    line_p = jnp.zeros_like(order_p).at[order_p].set(jnp.arange(num_items))
    shift_i = start_i - (jnp.cumsum(counts_i) - counts_i)
    slot_p = jnp.where(key_p < num_keys, shift_i[jnp.minimum(key_p, num_keys - 1)] + line_p, num_slots)
    empty_q = jnp.full_like(slot_p, num_items, shape=num_slots)
    return slot_p, empty_q.at[slot_p].set(jnp.arange(num_items), mode="drop")


def lay_out(expert_rk: Int[Array, "r k"], num_experts: int, num_blocks: int, block: int) -> Layout:
    """Lay visits out in order of their experts (``num_experts`` for a visit to nobody here), each expert
    from a new block on."""
    blocks_l = -(-count(expert_rk, num_experts) // block)
    end_l = jnp.cumsum(blocks_l)
    slot_p, visit_q = arrange(expert_rk.reshape(-1), block * (end_l - blocks_l), num_blocks * block)
    owner_n = (jnp.arange(num_blocks)[:, None] >= end_l[None]).sum(1, dtype=jnp.int32)
    return Layout(slot_p.reshape(expert_rk.shape), visit_q, end_l, owner_n)


# --------------------------------------------------------------------------------------------- feed-forwards


def feed_forward(
    how: How, x: Float[Array, "r d"], shares: Float[Array, "r k"], weights: Weights, where: Layout
) -> Float[Array, "r d"]:
    """For each row the sum of what its experts give, weighed by its shares, in float32."""
    return _feed_forward(how, *vary_alike((x, shares, weights, where)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _feed_forward(how, *args):
    return _run(how, *args)[0]


def _run(how, x, shares, weights, where):
    """The result, and the products with gate and up of the first chunk."""

    def piece(here, out, kept, gate, up, down):
        dot = functools.partial(_dot, how.way, owners=here(where.owner_n, 1))
        rows = _gather(how.way, x, here(row_q))
        gated, upped = dot((rows, gate)), dot((rows, up))
        out = here.take_up(out, dot((jax.nn.silu(gated) * upped, down)), where.slot_rk, shares)
        return out, (gated, upped) if here.first else kept

    row_q = where.visit_q // shares.shape[1]
    out, kept = _walk(how, where, weights, _room(x, x.dtype, len(row_q), x.shape[1]), (), piece)
    return (out if how.chunk else _sum_visits(out, where.slot_rk, shares)), kept


def _forward(how, *args):
    y, kept = _run(how, *args)
    return y, (*args, tuple(checkpoint_name(z, HIDDEN) for z in kept))


def _backward(how, saved, grad):
    """The gradients of rows and shares, and those of weights: together, or in a second loop where a pipeline
    puts that off."""
    x, shares, weights, where, kept = saved
    row_q, share_q = where.visit_q // shares.shape[1], _get(shares.reshape(-1), where.visit_q)

    def piece(here, made, sums, gate, up, down):
        dot = functools.partial(_dot, how.way, owners=here(where.owner_n, 1))
        rows, dout = (_gather(how.way, z, here(row_q)) for z in (x, grad))
        products = (
            *(kept if here.first else (dot((rows, gate)), dot((rows, up)))),
            dot((dout, down), transposed=True),
        )
        gated, upped, dhidden = (z.astype(jnp.float32) for z in products)
        slope, share = jax.nn.sigmoid(gated), here(share_q)[:, None]
        hidden, dshare = gated * slope * upped, (gated * slope * upped * dhidden).sum(-1)
        dup, dgate = dhidden * gated * slope, dhidden * upped * slope * (1 + gated * (1 - slope))
        inner = [(z * share).astype(x.dtype) for z in (hidden, dgate, dup)]
        drows = dot((inner[1], gate), (inner[2], up), transposed=True)
        pairs = zip(made[:2], (drows, dshare), strict=True)
        made = *(here.take_up(*pair, where.slot_rk) for pair in pairs), *map(here.put, made[2:], inner)
        return made, () if how.split else add(here, sums, rows, dout, *inner)

    def add(here, sums, rows, dout, hidden, dgate, dup):
        outer = functools.partial(_outer, how.way, owners=here(where.owner_n, 1), num_owners=len(sums[0]))
        more = outer(rows, dgate), outer(rows, dup), outer(hidden, dout)
        return more if here.first else tuple(map(jnp.add, sums, more))

    def later(here, _, sums):
        return (), add(here, sums, *(_gather(how.way, z, here(row_q)) for z in (x, grad)), *map(here, inner))

    num_slots, (_, d, m) = len(row_q), weights[0].shape
    sums = tuple(vary_alike(jnp.zeros(w.shape), like=x) for w in weights)
    made: tuple[Array, ...] = _room(grad, x.dtype, num_slots, d), _room(grad, shares.dtype, num_slots)
    made += (_room(grad, x.dtype, num_slots, m),) * 3 if how.split else ()
    (drows, dshare, *inner), dw = _walk(how, where, weights, made, () if how.split else sums, piece)
    if how.split:
        dw = _walk(how, where, (), (), sums, later)[1]
    dw = tuple(z.astype(w.dtype) for z, w in zip(dw, weights, strict=True))
    if how.chunk:
        return drows, dshare, dw, None
    return _sum_visits(drows, where.slot_rk), _get(dshare, where.slot_rk), dw, None


_feed_forward.defvjp(_forward, _backward)


class _Piece(NamedTuple):
    """Some blocks of slots."""

    begin: Int[Array, ""]
    num_blocks: int
    block: int
    chunk: int
    first: bool = False

    def __call__(self, z: Array, block: int = 0) -> Array:
        """What an array of slots (of blocks: ``block=1``) has here."""
        block = block or self.block
        return lax.dynamic_slice_in_dim(z, self.begin * block, self.num_blocks * block)

    def put(self, z: Array, value: Array) -> Array:
        """The array of slots with a value here."""
        return lax.dynamic_update_slice_in_dim(z, value.astype(z.dtype), self.begin * self.block, 0)

    def take_up(self, so_far: Array, value: Array, slot_rk, shares=None) -> Array:
        """What the slots here give: for all slots until every row's visits are added up; of a chunk the sums
        over each row's visits in it, added to those of other chunks. Of numbers no sum: each visit's own."""
        if not self.chunk:
            return self.put(so_far, value)
        slot_rk = slot_rk - self.begin * self.block
        slot_rk = jnp.where(slot_rk >= 0, slot_rk, len(value))
        value = _sum_visits(value, slot_rk, shares) if value.ndim > 1 else _get(value, slot_rk)
        return value if self.first else so_far + value


def _walk(how: How, where: Layout, weights, made, sums, piece):
    """Do ``made, sums = piece(here, made, sums, *weights)`` for all pieces that hold rows: expert by expert,
    each with its own weights and sums, or a chunk at a time, with all. The first chunk stands before the
    loops: it is the usual case that there is no other. What is made and the sums have a loop each: then what
    is made can leave while sums are added up."""
    zero, block = jnp.zeros_like(where.end_l[0]), len(where.visit_q) // len(where.owner_n)

    if how.chunk:
        first = piece(_Piece(zero, how.chunk, block, how.chunk, True), made, sums, *weights)
        turns = (where.end_l[-1] - 1) // how.chunk  # more than the first one

        def rest(kind):
            def turn(i, mine):
                here = _Piece((i + 1) * how.chunk, how.chunk, block, how.chunk)
                return piece(here, *(mine if j == kind else z for j, z in enumerate(first)), *weights)[kind]

            return lax.fori_loop(zero, turns, turn, first[kind])

        with jax.named_scope(OVERFLOW):
            given = (bool(jax.tree.leaves(z)) for z in (made, sums))
            return tuple(rest(kind) if needed else first[kind] for kind, needed in enumerate(given))

    def steps(begin, num, state, weights, turns):
        turn = lambda i, state: piece(_Piece(begin + i * num, num, block, how.chunk), *state, *weights)
        return lax.fori_loop(zero, turns, turn, state)

    stride = min(STRIDE, len(where.owner_n))

    def expert(carry, here):
        (begin, made), (end, matrices) = carry, here
        state, turns = (made, tuple(z[0] for z in sums)), (end - begin) // stride
        state = steps(begin, stride, state, matrices, turns)
        begin = begin + turns * stride
        made, mine = steps(begin, 1, state, matrices, end - begin)
        return (end, made), mine

    (_, made), sums = lax.scan(expert, (zero, made), (where.end_l, weights))
    return made, sums


def _sum_visits(out: Float[Array, "q d"], slot_rk, shares=None) -> Float[Array, "r d"]:
    """Each row's visits added up, weighed if there are shares, in float32. Visit by visit: their rows never
    lie side by side."""
    visits = (_get(out, slot_rk[:, i]).astype(jnp.float32) for i in range(slot_rk.shape[1]))
    weighed = (y if shares is None else y * shares[:, i, None] for i, y in enumerate(visits))
    return functools.reduce(jnp.add, weighed).astype(out.dtype)


def _get(z: Array, index: Array) -> Array:
    return z.at[index].get(mode="fill", fill_value=0)


def _room(like: Array, dtype, *shape: int) -> Array:
    """Room for what is written before it is read. It holds a number of ``like``, not zeros: those XLA would
    write when a step begins, and hold for all layers."""
    return jnp.broadcast_to(like[:1, 0].astype(dtype), shape)


# ------------------------------------------------------------------------------------------------- products


class Lines(NamedTuple):
    """The rows ``whole[line_q]``, zeros where a line is past the end: a kernel gathers them as it goes."""

    whole: Any  # r a
    line_q: Any  # q, integers

    @property
    def shape(self) -> tuple[int, int]:
        """As if they were gathered."""
        return len(self.line_q), self.whole.shape[1]


Rows = Lines | Float[Array, "q _"]


def _gather(way: str, z: Array, line_q: Int[Array, " q"]) -> Rows:
    """The rows ``z[line_q]`` as this way of multiplying wants them."""
    return Lines(z, line_q) if way in KERNELS else _get(z, line_q)


def _dot(way: str, *pairs, owners, transposed: bool = False):
    """Rows with the weights of their owners (or these transposed): of one owner, or of all. Of several pairs
    of rows and weights the sum."""
    if way in KERNELS:
        return kernel_dot(pairs, owners, transposed, way == "interpreted")
    dims = ((1,), (1 if transposed else 0,)), ((), ())
    if way == "ragged_dot":
        dims = ((1,), (2 if transposed else 1,)), ((), ())
        dot = lambda rows, w: _ragged_dot(rows, w, owners, len(w), dims, [0])
    else:
        dot = lambda rows, w: lax.dot_general(rows, w, dims, preferred_element_type=jnp.float32)
    return functools.reduce(jnp.add, (dot(rows, w).astype(rows.dtype) for rows, w in pairs))


def _outer(way: str, rows, grads, owners, num_owners: int):
    """For each owner the sum over its rows of their outer products with gradients, float32; of one owner
    alone where all rows have the same."""
    if way in KERNELS:
        return kernel_outer(rows, grads, owners, num_owners, way == "interpreted")
    dims = ((0,), (0,)), ((), ())
    if way == "ragged_dot":
        return _ragged_dot(rows, grads, owners, num_owners, dims, [])
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
        "grouped_dot",
        (len(owner_n), outer // tile),
        [_whole(owner_n), [spec(*pair) for pair in pairs]],
        pl.BlockSpec((block, tile), lambda i, j: (i, j)),
        jax.ShapeDtypeStruct((num_rows, outer), w.dtype),
    )(owner_n, list(pairs))


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
        "grouped_outer",
        (num_owners, a // tile_a, b // tile_b),
        [_whole(end_l), _whole(end_l), spec(rows, tile_a, 0), spec(grads, tile_b, 1)],
        pl.BlockSpec((None, tile_a, tile_b), lambda l, i, j: (l, i, j)),
        jax.ShapeDtypeStruct((num_owners, a, b), jnp.float32),
    )(end_l - steps_l, end_l, rows, grads)


def _read(rows: Any, lines: Any, columns: Any) -> Array:
    """Some lines and columns of what a kernel was given."""
    if not isinstance(rows, Lines):
        return rows[lines, columns]
    line = rows.line_q[lines][:, None]
    at = line, columns.start + lax.broadcasted_iota(jnp.int32, (1, columns.size), 1)
    return triton.load(rows.whole.at[at], mask=line < rows.whole.shape[0], other=0)


def _whole(z: Array) -> pl.BlockSpec:
    """An operand as it is, for every program of a kernel."""
    return pl.BlockSpec(z.shape, lambda *_: (0,) * z.ndim)


def _call(kernel, interpret: bool, name: str, grid, in_specs, out_specs, out: jax.ShapeDtypeStruct):
    """A Pallas call whose result varies over the mesh axes over which an operand does."""

    def call(*operands):
        operands = vary_alike(operands)
        kind = jax.typeof(operands[0]).manual_axis_type
        shape = jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=kind)
        how = dict(interpret=True) if interpret else dict(compiler_params=_PARAMS)
        return pl.pallas_call(
            kernel, name=name, grid=grid, in_specs=in_specs, out_specs=out_specs, out_shape=shape, **how
        )(*operands)

    return call


_PARAMS = triton.CompilerParams(num_warps=8, num_stages=4)


def _tile(size: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides ``size``. Tensor cores want 16."""
    if size % 16:
        raise ValueError(
            f"grouped='triton' multiplies tiles of 16 columns or more, and a width of {size} is no multiple"
            " of 16; use widths, of the model and of each device's part of an expert, that are"
        )
    return min(most, size & -size)


def chunks(way: str, blocks: int, block: int, num_rows: int, num_experts: int) -> tuple[int, int]:
    """(blocks in all, blocks in a chunk, of which a device has whole ones). A chunk has blocks for
    ``num_rows``, a rank's even share, and an eighth more, with half a block of padding for each expert;
    ``blocks`` goes expert by expert and has none."""
    if way == "blocks":
        return blocks, 0
    chunk = min(blocks, -(-9 * num_rows // (8 * block)) + num_experts // 2)
    return -(-blocks // chunk) * chunk, chunk


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
