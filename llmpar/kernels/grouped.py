"""Send rows through the feed-forwards of their experts: products of groups of rows, each with its own
weights.

A device holds ``l`` experts and ``r`` rows, each of which visits up to ``k`` of them. `lay_out` gives every
visit a slot. The slots of an expert fill whole blocks, so a block has one owner. In the first part every
expert has slots for about an eighth more than its even share, and one batched product multiplies them all,
full or not. What experts get beyond that comes a few blocks at a time, each with its owner's weights; with
fewer visits than experts all does. Rows are not copied into slots for the worst routing: one part of the
slots is gathered, multiplied and handed back before the next.

No token is dropped, and parts that nobody needs are not multiplied. The backward pass keeps the rows, and of
the first part the products with gate and up. Those of later parts it computes again, once for the gradients
of rows and once for those of weights: 14 products where 9 are useful, instead of memory for the worst
routing in every layer. (Where a pipeline puts off the gradients of weights: 11, and three arrays of it.)

On an H100 this is 1.5 to 1.6 times as fast as kernels in Triton that multiply every expert's own rows, when
experts get as many, and as fast when one gets four times its share (docs/accelerators.md).

Dims: r rows, k visits of a row, p visits of all rows, q slots, n blocks, l experts here, d width, m an
expert's width. (Slots: Lepikhin et al. 2020, GShard, which drops what is beyond; blocks of rows of one
expert: Gale et al. 2022, MegaBlocks.)
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from llmpar.parallel.collectives import vary_alike
from llmpar.parallel.modes import HIDDEN
from llmpar.plan.model_config import ExpertConfig

Weights = tuple[Float[Array, "l d m"], Float[Array, "l d m"], Float[Array, "l m d"]]

OVERFLOW = "overflow"  # the scope of the loops over all parts but the first: a census counts no turn of them
FEW = 2048
"""Rows beyond the first part that are multiplied together: fewer leave most of a large GPU idle."""


class How(NamedTuple):
    """How rows are laid out and multiplied, from `arrange`."""

    num_blocks: int  # in all, for the worst routing
    block: int  # rows of a block
    own: int  # blocks that every expert has in the first part; 0: there are fewer visits than experts
    first: int  # blocks of the first part
    more: int  # blocks of each part that follows
    split: bool = False  # weights' gradients in a loop of their own, which a pipeline can put off


class _Layout(NamedTuple):
    """Which visit stands in which slot, and whose a block is."""

    slot_rk: Int[Array, "r k"]  # of each visit; q for one to nobody here
    visit_q: Int[Array, " q"]  # the visit in each slot, r·k in an empty one
    end_l: Int[Array, " l"]  # the block after the last of each expert, of those beyond its own
    owner_n: Int[Array, " n"]  # the expert of each block beyond experts' own; l after the last


def arrange(experts: ExpertConfig, tokens: int, num_pieces: int, ranks: int = 1, split: bool = False) -> How:
    """Decide the layout on one of ``ranks`` devices, each with so many tokens, of which routers see a number
    of pieces (`ExpertConfig.most`): blocks for the worst routing.

    A block is three eighths of an expert's even share, a multiple of 8 rows. Beyond the first part come `FEW`
    rows or more at a time, but weights of at most an eighth of the experts."""
    local, visits = experts.num_experts // ranks, ranks * tokens * experts.top_k
    of_one = ranks * experts.expert_tokens(tokens, num_pieces)  # visits at most
    of_all = min(ranks * tokens * min(experts.top_k, local), of_one * local)
    block = 8 * -(-3 * visits // (64 * experts.num_experts))
    own = min(-(-9 * visits // (8 * experts.num_experts * block)), -(-of_one // block))
    own = own if visits >= experts.num_experts else 0
    # At worst a last block holds one row: of one expert, where each has blocks of its own, else of every one.
    spread = (1 if own else local) * (block - 1)
    beyond = min(local * (-(-of_one // block) - own), max(0, of_all + spread - own * block) // block, of_all)
    more = max(1, min(beyond, -(-local // 8), -(-FEW // block)))
    first = local * own or more
    turns = -(-max(local * own + beyond - first, 0) // more)
    return How(first + turns * more, block, own, first, more, split)


def count(key: Int[Array, ...], num_keys: int) -> Int[Array, " i"]:
    """How many items have each key."""
    return (key.reshape(-1, 1) == jnp.arange(num_keys)[None]).sum(0, dtype=jnp.int32)


def number(key_p: Int[Array, " p"], num_keys: int) -> Int[Array, " p"]:
    """Number the items of each key from 0 on, in their order. (Any number for a key past the last.)"""
    order_p, counts_i = jnp.argsort(key_p, stable=True), count(key_p, num_keys)
    line_p = jnp.zeros_like(order_p).at[order_p].set(jnp.arange(len(key_p)))
    return line_p - (jnp.cumsum(counts_i) - counts_i)[jnp.minimum(key_p, num_keys - 1)]


def item_in(slot_p: Int[Array, " p"], num_slots: int) -> Int[Array, " q"]:
    """The item in each slot, from the slot of each item; the number of items where there is none."""
    none_q = jnp.full_like(slot_p, len(slot_p), shape=num_slots)
    return none_q.at[slot_p].set(jnp.arange(len(slot_p)), mode="drop")


def take(z: Array, index: Int[Array, ...]) -> Array:
    """The rows ``z[index]``, zeros where an index is past the end."""
    return z.at[index].get(mode="fill", fill_value=0)


def lay_out(how: How, expert_rk: Int[Array, "r k"], num_experts: int) -> _Layout:
    """Lay visits out in order of their experts (``num_experts`` for a visit to nobody here): first in the
    blocks that are an expert's own, then from a new block on."""
    num_slots, own, n = how.num_blocks * how.block, how.own * how.block, jnp.arange(how.num_blocks)
    expert_p = expert_rk.reshape(-1)
    more_l = jnp.maximum(-(-count(expert_p, num_experts) // how.block) - how.own, 0)
    end_l = num_experts * how.own + jnp.cumsum(more_l)
    begin_p, place_p = take(end_l - more_l, expert_p) * how.block, number(expert_p, num_experts)
    own_p = place_p < own
    slot_p = place_p + jnp.where(own_p, expert_p * own, begin_p - own)
    slot_p = jnp.where(expert_p < num_experts, slot_p, num_slots)
    owner_n = (n[:, None] >= end_l[None]).sum(1, dtype=jnp.int32)
    return _Layout(slot_p.reshape(expert_rk.shape), item_in(slot_p, num_slots), end_l, owner_n)


# -------------------------------------------------------------------------------------------------- products


def dot(*pairs, transposed: bool = False):
    """Rows, cut evenly among weights, with these (or these transposed), of several pairs the sum."""
    product = functools.partial(jnp.einsum, "lqb,lab->lqa" if transposed else "lqa,lab->lqb")
    one = lambda rows, w: product(rows.reshape(len(w), -1, rows.shape[1]), w).reshape(len(rows), -1)
    return functools.reduce(jnp.add, (one(rows, w).astype(rows.dtype) for rows, w in pairs))


def outer(rows, grads, num_owners: int):
    """For each owner the sum over its rows of their outer products with gradients, float32."""
    rows, grads = (z.reshape(num_owners, -1, z.shape[1]) for z in (rows, grads))
    return jnp.einsum("lqa,lqb->lab", rows, grads, preferred_element_type=jnp.float32)


# --------------------------------------------------------------------------------------------- feed-forwards


def feed_forward(
    how: How, x: Float[Array, "r d"], shares: Float[Array, "r k"], weights: Weights, where: _Layout
) -> Float[Array, "r d"]:
    """For each row the sum of what its experts give, weighed by its shares: in float32 within a part, and
    rounded once for each."""
    return _feed_forward(how, *vary_alike((x, shares, weights, where)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _feed_forward(how, *args):
    return _run(how, *args)[0]


def _run(how, x, shares, weights, where):
    """The result, and the products with gate and up of the first part."""

    def do(here, out, kept, gate, up, down):
        rows = take(x, here.row_q)
        gated, upped = dot((rows, gate)), dot((rows, up))
        out = here.to_rows(out, dot((jax.nn.silu(gated) * upped, down)), shares)
        return out, (gated, upped) if here.is_first else kept

    return _walk(how, where, weights, None, (), do)


def _forward(how, *args):
    y, kept = _run(how, *args)
    return y, (*args, tuple(checkpoint_name(z, HIDDEN) for z in kept))


def _backward(how, saved, grad):
    """The gradients of rows and shares, and those of weights: together, or in a second loop where a pipeline
    puts that off."""
    x, shares, weights, where, kept = saved

    def do(here, made, sums, gate, up, down):
        rows, dout = take(x, here.row_q), take(grad, here.row_q)
        three = (
            *(kept if here.is_first else (dot((rows, gate)), dot((rows, up)))),
            dot((dout, down), transposed=True),
        )
        gated, upped, dhidden = (z.astype(jnp.float32) for z in three)
        slope, share = jax.nn.sigmoid(gated), take(shares.reshape(-1), here.visit_q)[:, None]
        hidden, dshare = gated * slope * upped, (gated * slope * upped * dhidden).sum(-1)
        dup, dgate = dhidden * gated * slope, dhidden * upped * slope * (1 + gated * (1 - slope))
        inner = [(z * share).astype(x.dtype) for z in (hidden, dgate, dup)]
        drows = dot((inner[1], gate), (inner[2], up), transposed=True)
        numbers = here.to_visits(made[1], dshare.astype(shares.dtype))
        made = here.to_rows(made[0], drows), numbers, *map(here.put, made[2:], inner)
        return made, () if how.split else add(here, sums, rows, dout, *inner)

    def add(here, sums, rows, dout, hidden, dgate, dup):
        found = functools.partial(outer, num_owners=here.num_picked or len(sums[0]))
        more = found(rows, dgate), found(rows, dup), found(hidden, dout)
        return tuple(map(here.add, sums, more))

    def later(here, _, sums):
        return (), add(here, sums, take(x, here.row_q), take(grad, here.row_q), *map(here.part, inner))

    sums = tuple(vary_alike(jnp.zeros(w.shape), like=x) for w in weights)
    room = (_room(grad, x.dtype, len(where.visit_q), weights[0].shape[2]),) * 3 if how.split else ()
    made, begun = (None, None, *room), () if how.split else sums
    (drows, dshare, *inner), dw = _walk(how, where, weights, made, begun, do)
    if how.split:
        dw = _walk(how, where, (), (), sums, later)[1]
    return drows, dshare, tuple(z.astype(w.dtype) for z, w in zip(dw, weights, strict=True)), None


_feed_forward.defvjp(_forward, _backward)


class _Part(NamedTuple):
    """Some blocks of slots."""

    how: How
    where: _Layout
    begin: Int[Array, ""]
    num_blocks: int
    is_first: bool

    @property
    def num_picked(self) -> int:
        """Blocks that are each multiplied with the weights of its owner, copied from those of all; or 0."""
        return 0 if self.is_first and self.how.own else self.num_blocks

    @property
    def owners(self) -> Int[Array, " n"]:
        return lax.dynamic_slice_in_dim(self.where.owner_n, self.begin, self.num_blocks)

    @property
    def visit_q(self) -> Int[Array, " q"]:
        return self.part(self.where.visit_q)

    @property
    def row_q(self) -> Int[Array, " q"]:
        """The row in each slot here, past the end in an empty one."""
        return self.visit_q // self.where.slot_rk.shape[1]

    def part(self, z: Array) -> Array:
        """What an array of slots has here."""
        return lax.dynamic_slice_in_dim(z, self.begin * self.how.block, self.num_blocks * self.how.block)

    def put(self, z: Array, value: Array) -> Array:
        """The array of slots with a value here."""
        return lax.dynamic_update_slice_in_dim(z, value.astype(z.dtype), self.begin * self.how.block, 0)

    def weights(self, w: Array) -> Array:
        """Of weights of all owners those of the owners here."""
        return w.at[self.owners].get(mode="clip") if self.num_picked else w

    def add(self, so_far: Array, value: Array) -> Array:
        """The sums for all owners with those for the owners here, one after the other: what several blocks of
        an owner give is added in their order."""
        for i in range(self.num_picked):
            owner = jnp.minimum(self.owners[i], len(so_far) - 1)  # nobody's block gives zeros
            sum_ = lax.dynamic_index_in_dim(so_far, owner) + value[i : i + 1]
            so_far = lax.dynamic_update_index_in_dim(so_far, sum_, owner, 0)
        return so_far if self.num_picked else value

    def to_visits(self, so_far: Array | None, value: Array) -> Array:
        """Numbers of visits, with those of the visits here."""
        if so_far is None:
            return take(value, self.where.slot_rk)
        return so_far.reshape(-1).at[self.visit_q].set(value, mode="drop").reshape(so_far.shape)

    def to_rows(self, so_far: Array | None, value: Array, shares: Array | None = None) -> Array:
        """Sums over the visits of each row, with those of the visits here, weighed if there are shares. Slots
        of the first part are gathered visit by visit: the rows of one never lie side by side."""
        if so_far is None:
            each = (take(value, slot_r).astype(jnp.float32) for slot_r in self.where.slot_rk.T)
            each = (z if shares is None else z * shares[:, i, None] for i, z in enumerate(each))
            return functools.reduce(jnp.add, each).astype(value.dtype)
        if shares is not None:
            value = value.astype(jnp.float32) * take(shares.reshape(-1), self.visit_q)[:, None]
        pairs = (jnp.split(z, self.num_blocks) for z in (self.row_q, value.astype(so_far.dtype)))
        for row_q, value_q in zip(*pairs, strict=True):  # a row stands once in a block
            so_far = so_far.at[row_q].add(value_q, mode="drop")
        return so_far


def _walk(how: How, where: _Layout, weights, made, sums, do):
    """Do ``made, sums = do(here, made, sums, *weights)`` for all parts that hold rows, the first before the
    loops. What is made for rows and the sums for weights have a loop each: rows can travel back while
    gradients of weights are still added up."""

    def part(begin, num_blocks, is_first, state):
        here = _Part(how, where, begin, num_blocks, is_first)
        return do(here, *state, *map(here.weights, weights))

    zero, turns = jnp.zeros_like(where.end_l[0]), -((how.first - where.end_l[-1]) // how.more)
    first = part(zero, how.first, True, (made, sums))
    if how.num_blocks == how.first:
        return first

    def rest(kind):
        def turn(i, mine):
            state = [mine if j == kind else z for j, z in enumerate(first)]
            return part(how.first + i * how.more, how.more, False, state)[kind]

        return lax.fori_loop(zero, turns, turn, first[kind])

    with jax.named_scope(OVERFLOW):
        needed = bool(jax.tree.leaves(first[0])), bool(sums)
        return tuple(rest(kind) if needed[kind] else first[kind] for kind in (0, 1))


def _room(like: Array, dtype, *shape: int) -> Array:
    """Room for what is written before it is read. It holds a number of ``like``, not zeros: those XLA would
    write when a step begins, and hold for all layers."""
    return jnp.broadcast_to(like[:1, 0].astype(dtype), shape)
