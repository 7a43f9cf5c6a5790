"""Send rows through the feed-forwards of their experts: products of groups of rows, each with its own
weights.

A device holds ``l`` experts and ``r`` rows, each of which visits up to ``k`` of them. `lay_out` gives every
visit a slot: the slots of an expert lie side by side and fill whole blocks, so that a block has one owner.
Nothing is copied into slots: a piece of them at a time is gathered, multiplied, and let go. A piece is a
few blocks of one expert (``blocks``, for CPUs), or a chunk of many blocks (`llmpar.kernels.products`); with
``slots`` of as many for every expert, all of which are multiplied, full or not. There are as many pieces as
rows have come: no token is dropped, and slots in pieces that nobody needs cost nothing but their place.

The backward pass keeps the rows, and of the first chunk, which holds an eighth more than an even share (a
quarter with ``slots``), the products with gate and up. Those of other pieces it computes again: 11 products
where 9 are useful, instead of memory for the worst routing in every layer. On CPUs that is all pieces.

Dims: r rows, k visits of a row, q slots, n blocks, d width, m an expert's width, l experts here. (Blocks of
rows of one expert: Gale et al. 2022, MegaBlocks.)
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from llmpar.block import vary_alike
from llmpar.config import ExpertConfig
from llmpar.kernels import products
from llmpar.kernels.products import count, take
from llmpar.par import HIDDEN

Weights = tuple[Float[Array, "l d m"], Float[Array, "l d m"], Float[Array, "l m d"]]

OVERFLOW = "overflow"
"""The scope of the loop over all chunks but the first: a census counts no turn of it."""
STRIDE = 4
"""On CPUs an expert's blocks are multiplied so many at a time, and the rest one by one."""


class How(NamedTuple):
    """Who multiplies, ``blocks``, ``slots``, ``ragged_dot``, ``triton`` or that ``interpreted``; how many
    blocks are in a chunk (0 for ``blocks``: expert by expert); and whether the backward pass makes the
    weights' gradients in a loop of their own, which a pipeline can put off (`llmpar.split`)."""

    way: str
    chunk: int = 0
    split: bool = False


class Layout(NamedTuple):
    """Which visit stands in which slot, and whose a block is."""

    slot_rk: Int[Array, "r k"]  # of each visit; q for one to nobody here
    visit_q: Int[Array, " q"]  # the visit in each slot, r·k in an empty one
    end_l: Int[Array, " l"]  # the block after the last one of each expert
    owner_n: Int[Array, " n"]  # the expert of each block; l after the last


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


def lay_out(expert_rk: Int[Array, "r k"], num_experts: int, num_blocks: int, block: int, first=0) -> Layout:
    """Lay visits out in order of their experts (``num_experts`` for a visit to nobody here), each expert
    from a new block on. With ``first`` every expert has so many blocks in the first chunk, and one in each
    that follows, needed or not."""
    blocks_l = -(-count(expert_rk, num_experts) // block)
    end_l, each = jnp.cumsum(blocks_l), num_blocks // num_experts
    begin_l = each * jnp.arange(num_experts) if first else end_l - blocks_l
    slot_p, visit_q = arrange(expert_rk.reshape(-1), block * begin_l, num_blocks * block)
    if first:  # so far all of an expert's blocks lie side by side
        expert_p, i_p = slot_p // block // each, slot_p // block % each
        block_p = jnp.where(i_p < first, expert_p * first + i_p, i_p * num_experts + expert_p)
        slot_p = jnp.where(expert_p < num_experts, block_p * block + slot_p % block, slot_p)
        visit_q = jnp.full_like(visit_q, slot_p.size).at[slot_p].set(jnp.arange(slot_p.size), mode="drop")
        end_l = num_experts * jnp.broadcast_to(blocks_l.max(), end_l.shape)
    owner_n = (jnp.arange(num_blocks)[:, None] >= end_l[None]).sum(1, dtype=jnp.int32)
    return Layout(slot_p.reshape(expert_rk.shape), visit_q, end_l, owner_n)


def cut(experts: ExpertConfig, way: str, tokens: int, pieces: int, ranks: int) -> tuple[int, int, int]:
    """(blocks in all, rows of a block, blocks of a chunk) in which one of ``ranks``, each with so many tokens
    in ``pieces`` pieces, lays out what its experts get at most.

    An expert's rows fill whole blocks (`products.BLOCK_ROWS`) of an eighth of an even share or less, so that
    about a sixteenth is padding, and less where rows are many. A device has whole chunks: each has blocks for
    an even share of rows and an eighth more, with half a block of padding for each expert. ``blocks`` goes
    expert by expert and has none. Of ``slots`` a block is a quarter of an expert's even share, and each
    expert has five in the first chunk (fewer where that is enough) and one in each chunk that follows."""
    k, local, most = experts.top_k, experts.num_experts // ranks, ranks * experts.most(tokens, pieces)
    block, largest = products.BLOCK_ROWS[way]
    while block < largest and 16 * block * experts.num_experts <= ranks * tokens * k:
        block *= 2
    if way == "slots":
        quarter = -(-ranks * tokens * k // (4 * experts.num_experts))
        block = -(-quarter // block) * block
        first = min(-(-5 * quarter // block), -(-most // block))
        return local * -(-most // block), block, local * first
    rows = min(ranks * tokens * min(k, local), most * local)
    blocks = min((rows + local * (block - 1)) // block, local * -(-most // block))
    if way == "blocks":
        return blocks, block, 0
    chunk = min(blocks, -(-9 * tokens * k // (8 * block)) + local // 2)
    return -(-blocks // chunk) * chunk, block, chunk


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
        dot = functools.partial(products.dot, how.way, owners=here(where.owner_n, 1))
        rows = products.gather(how.way, x, here(row_q))
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
    row_q, share_q = where.visit_q // shares.shape[1], take(shares.reshape(-1), where.visit_q)

    def gathered(here):
        return [products.gather(how.way, z, here(row_q)) for z in (x, grad)]

    def piece(here, made, sums, gate, up, down):
        dot = functools.partial(products.dot, how.way, owners=here(where.owner_n, 1))
        rows, dout = gathered(here)
        three = (
            *(kept if here.first else (dot((rows, gate)), dot((rows, up)))),
            dot((dout, down), transposed=True),
        )
        gated, upped, dhidden = (z.astype(jnp.float32) for z in three)
        slope, share = jax.nn.sigmoid(gated), here(share_q)[:, None]
        hidden, dshare = gated * slope * upped, (gated * slope * upped * dhidden).sum(-1)
        dup, dgate = dhidden * gated * slope, dhidden * upped * slope * (1 + gated * (1 - slope))
        inner = [(z * share).astype(x.dtype) for z in (hidden, dgate, dup)]
        drows = dot((inner[1], gate), (inner[2], up), transposed=True)
        pairs = zip(made[:2], (drows, dshare), strict=True)
        made = *(here.take_up(*pair, where.slot_rk) for pair in pairs), *map(here.put, made[2:], inner)
        return made, () if how.split else add(here, sums, rows, dout, *inner)

    def add(here, sums, rows, dout, hidden, dgate, dup):
        owners = here(where.owner_n, 1)
        outer = functools.partial(products.outer, how.way, owners=owners, num_owners=len(sums[0]))
        more = outer(rows, dgate), outer(rows, dup), outer(hidden, dout)
        return more if here.first else tuple(map(jnp.add, sums, more))

    def later(here, _, sums):
        return (), add(here, sums, *gathered(here), *map(here, inner))

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
    return _sum_visits(drows, where.slot_rk), take(dshare, where.slot_rk), dw, None


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
        value = _sum_visits(value, slot_rk, shares) if value.ndim > 1 else take(value, slot_rk)
        return value if self.first else so_far + value


def _walk(how: How, where: Layout, weights, made, sums, piece):
    """Do ``made, sums = piece(here, made, sums, *weights)`` for all pieces that hold rows: expert by expert,
    each with its own weights and sums, or a chunk at a time, with all. The first chunk stands before the
    loops: it is the usual case that there is no other. What is made and the sums have a loop each: then what
    is made can leave while sums are added up."""
    zero, block = jnp.zeros_like(where.end_l[0]), len(where.visit_q) // len(where.owner_n)

    if how.chunk:
        first = piece(_Piece(zero, how.chunk, block, how.chunk, True), made, sums, *weights)
        more = len(where.end_l) if how.way == "slots" else how.chunk
        turns = -((how.chunk - where.end_l[-1]) // more)  # more than the first one

        def rest(kind):
            def turn(i, mine):
                here = _Piece(how.chunk + i * more, more, block, how.chunk)
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
    visits = (take(out, slot_rk[:, i]).astype(jnp.float32) for i in range(slot_rk.shape[1]))
    weighed = (y if shares is None else y * shares[:, i, None] for i, y in enumerate(visits))
    return functools.reduce(jnp.add, weighed).astype(out.dtype)


def _room(like: Array, dtype, *shape: int) -> Array:
    """Room for what is written before it is read. It holds a number of ``like``, not zeros: those XLA would
    write when a step begins, and hold for all layers."""
    return jnp.broadcast_to(like[:1, 0].astype(dtype), shape)
