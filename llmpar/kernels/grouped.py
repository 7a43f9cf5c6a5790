"""Send rows through the feed-forwards of their experts: products of groups of rows, each with its own
weights.

A device has ``l`` experts and ``r`` rows, each of which chooses up to ``k`` of them. `lay_out` gives every
choice a slot. The slots of an expert fill whole blocks, so a block has one owner. In the first part every
expert has slots for about an eighth more than its even share, and one batched product multiplies them all,
full or not. The rows beyond that come a few blocks at a time, each block with its owner's weights; if there
are fewer choices than experts, all rows do. Rows are not copied into slots for the worst routing: one part of
the slots is gathered, multiplied and added to the results before the next.

No token is dropped, and empty parts are not multiplied. The backward pass keeps the rows, and of the first
part the products with gate and up. Those of later parts it computes again, once for the gradients of rows and
once for those of weights: 14 products where 9 are useful, instead of memory for the worst routing in every
layer. (Where a pipeline puts off the gradients of weights: 11, and three arrays of it.)

On an H100 this is 1.5 to 1.6 times as fast as kernels in Triton that multiply every expert's own rows, when
experts get as many, and as fast when one gets four times its share (docs/accelerators.md).

Dims: r rows, k choices of a row, p choices of all rows, q slots, n blocks, l local experts, d width, m an
expert's width. (Slots: Lepikhin et al. 2020, GShard, which drops the rows beyond them; blocks of rows of one
expert: Gale et al. 2022, MegaBlocks.)
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from llmpar.parallel.collectives import vary_alike
from llmpar.parallel.float8 import E4M3, E5M2, narrowed, scaled_product
from llmpar.parallel.remat import HIDDEN
from llmpar.plan.model_config import LLAMA, ExpertConfig, Variant

Weights = tuple[Array, ...]
"""Gate and up, ``l d m`` each, and down, ``l m d``; then their biases, if any: ``l m``, ``l m``, ``l d``."""

# the scope of the loops over all parts but the first: a census counts no iteration
OVERFLOW = "overflow"
FEW = 2048  # rows beyond the first part, multiplied together: fewer leave most of a large GPU idle


class BlockSizes(NamedTuple):
    """How slots are cut into blocks, and blocks into parts, from `arrange`."""

    num_blocks: int  # in all, for the worst routing
    block: int  # rows of a block
    own: int  # blocks that every expert has in the first part; 0: there are fewer choices than experts
    first: int  # blocks of the first part
    more: int  # blocks of each part that follows
    split: bool = False  # weights' gradients in a loop of their own, which a pipeline can put off
    eight_bits: bool = False  # products in float8


class SlotMap(NamedTuple):
    """Which choice has which slot, and which expert owns which block."""

    slot_rk: Int[Array, "r k"]  # of each choice; q if it is of no local expert
    choice_q: Int[Array, " q"]  # the choice in each slot, r·k in an empty one
    end_l: Int[Array, " l"]  # the block after the last of each expert, of those beyond its own
    owner_n: Int[Array, " n"]  # the expert of each block beyond experts' own; l after the last


def arrange(
    experts: ExpertConfig,
    tokens: int,
    num_pieces: int,
    ranks: int = 1,
    split: bool = False,
    copies: int = 0,
    eight_bits: bool = False,
) -> BlockSizes:
    """Choose the blocks on one of ``ranks`` devices, each with so many tokens, which routers see in a number
    of pieces (`ExpertConfig.expert_tokens`): enough for the worst routing. ``copies``: of so many experts,
    for the tokens of one device.

    A block is three eighths of an expert's even share, a multiple of 8 rows. A part after the first has `FEW`
    rows or more, but weights of at most an eighth of the experts."""
    local, choices = copies or experts.num_experts // ranks, ranks * tokens * experts.top_k
    of_one = ranks * experts.expert_tokens(tokens, num_pieces)  # choices at most
    of_all = min(ranks * tokens * min(experts.top_k, local), of_one * local)
    block = 8 * -(-3 * choices // (64 * experts.num_experts))
    own = min(-(-9 * choices // (8 * experts.num_experts * block)), -(-of_one // block))
    own = own if choices >= experts.num_experts else 0
    # At worst a last block holds one row: of one expert, where each has blocks of its own, else of every one.
    spread = (1 if own else local) * (block - 1)
    beyond = min(
        local * (-(-of_one // block) - own), max(0, of_all + spread - own * block) // block, of_all
    )
    more = max(1, min(beyond, -(-local // 8), -(-FEW // block)))
    first = local * own or more
    num_more = -(-max(local * own + beyond - first, 0) // more)
    return BlockSizes(first + num_more * more, block, own, first, more, split, eight_bits)


def count(key: Int[Array, "..."], num_keys: int) -> Int[Array, " i"]:
    """Count the items of each key."""
    return (key.reshape(-1, 1) == jnp.arange(num_keys)[None]).sum(0, dtype=jnp.int32)


def number(key_p: Int[Array, " p"], num_keys: int) -> Int[Array, " p"]:
    """Number the items of each key from 0 on, in their order. (Any number for a key past the last.)"""
    order_p, counts_i = jnp.argsort(key_p, stable=True), count(key_p, num_keys)
    line_p = jnp.zeros_like(order_p).at[order_p].set(jnp.arange(len(key_p)))
    return line_p - (jnp.cumsum(counts_i) - counts_i)[jnp.minimum(key_p, num_keys - 1)]


def item_in(slot_p: Int[Array, " p"], num_slots: int) -> Int[Array, " q"]:
    """Return the item in each slot, from the slot of each item; the number of items in an empty one."""
    none_q = jnp.full_like(slot_p, len(slot_p), shape=num_slots)
    return none_q.at[slot_p].set(jnp.arange(len(slot_p)), mode="drop")


def take_rows(z: Array, index: Int[Array, "..."]) -> Array:
    """Return the rows ``z[index]``, zeros where an index is past the end."""
    return z.at[index].get(mode="fill", fill_value=0)


def lay_out(blocks: BlockSizes, expert_rk: Int[Array, "r k"], num_experts: int) -> SlotMap:
    """Give choices slots in order of their experts (``num_experts`` for none that is local): first in the
    blocks that are an expert's own, then from a new block on."""
    num_slots, own = blocks.num_blocks * blocks.block, blocks.own * blocks.block
    n = jnp.arange(blocks.num_blocks)
    expert_p = expert_rk.reshape(-1)
    more_l = jnp.maximum(-(-count(expert_p, num_experts) // blocks.block) - blocks.own, 0)
    end_l = num_experts * blocks.own + jnp.cumsum(more_l)
    begin_p, place_p = (
        take_rows(end_l - more_l, expert_p) * blocks.block,
        number(expert_p, num_experts),
    )
    own_p = place_p < own
    slot_p = place_p + jnp.where(own_p, expert_p * own, begin_p - own)
    slot_p = jnp.where(expert_p < num_experts, slot_p, num_slots)
    owner_n = (n[:, None] >= end_l[None]).sum(1, dtype=jnp.int32)
    return SlotMap(slot_p.reshape(expert_rk.shape), item_in(slot_p, num_slots), end_l, owner_n)


# -------------------------------------------------------------------------------------------------- products


def dot(*pairs, transposed: bool = False, eight_bits: bool = False):
    """Multiply rows, cut evenly among weights, by these, or by these transposed, which takes gradients; sum
    over several pairs. ``eight_bits``: in float8 (`llmpar.parallel.float8`), one scale for the weights of
    all owners."""

    def one(rows, w):
        rows_lqx = rows.reshape(len(w), -1, rows.shape[1])
        if eight_bits:
            operands = narrowed(rows_lqx, E5M2 if transposed else E4M3), narrowed(w, E4M3)
            return scaled_product(*operands, (2,), (2 if transposed else 1,), batch=(0,))
        return jnp.einsum("lqb,lab->lqa" if transposed else "lqa,lab->lqb", rows_lqx, w)

    products = (one(rows, w).reshape(len(rows), -1).astype(rows.dtype) for rows, w in pairs)
    return functools.reduce(jnp.add, products)


def plus_bias(z, bias):
    """Add to rows, cut evenly among owners, the bias of each; none where there is none."""
    if bias is None:
        return z
    rows = z.reshape(len(bias), -1, z.shape[1])
    return (rows + bias[:, None].astype(z.dtype)).reshape(z.shape)


def gated(variant: Variant, gate: Array, up: Array) -> Array:
    """Return what a feed-forward multiplies by its last matrix (`Variant.activation`)."""
    if variant.activation == "clamped":
        gate, up = jnp.minimum(gate, variant.clamp), jnp.clip(up, -variant.clamp, variant.clamp)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    if variant.activation == "silu":
        return jax.nn.silu(gate) * up
    return jax.nn.gelu(gate, approximate=variant.activation == "gelu_tanh") * up


def outer(rows, grads, num_owners: int, eight_bits: bool = False):
    """Return for each owner the sum over its rows of their outer products with gradients, float32."""
    rows, grads = (z.reshape(num_owners, -1, z.shape[1]) for z in (rows, grads))
    if eight_bits:
        operands = narrowed(rows, E4M3), narrowed(grads, E5M2)
        return scaled_product(*operands, (1,), (1,), batch=(0,), dtype=jnp.float32)
    return jnp.einsum("lqa,lqb->lab", rows, grads, preferred_element_type=jnp.float32)


# --------------------------------------------------------------------------------------------- feed-forwards


def feed_forward(
    blocks: BlockSizes,
    x: Float[Array, "r d"],
    shares: Float[Array, "r k"],
    weights: Weights,
    slots: SlotMap,
    variant: Variant = LLAMA,
) -> Float[Array, "r d"]:
    """Return for each row the sum of its experts' results, weighed by its shares: in float32 within a part,
    and rounded once for each."""
    return _feed_forward(blocks, variant, *vary_alike((x, shares, weights, slots)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _feed_forward(blocks, variant, *args):
    return _forward(blocks, variant, *args)[0]


def _forward(blocks, variant, x, shares, weights, slots):
    """Return the result; and what the backward pass reads: the arguments, and the products with gate and up
    of the first part."""
    product = functools.partial(dot, eight_bits=blocks.eight_bits)

    def run_part(part, out, kept, gate, up, down, *biases):
        of_gate, of_up, of_down = biases or (None,) * 3
        rows = take_rows(x, part.row_q)
        inner = plus_bias(product((rows, gate)), of_gate), plus_bias(product((rows, up)), of_up)
        result = plus_bias(product((gated(variant, *inner), down)), of_down)
        return part.to_rows(out, result, shares), inner if part.is_first else kept

    y, kept = _run_parts(blocks, slots, weights, None, (), run_part)
    kept = tuple(checkpoint_name(z, HIDDEN) for z in kept)
    return y, (x, shares, weights, slots, kept)


def _backward(blocks, variant, saved, grad):
    """Return the gradients of rows and shares, and those of weights: together, or in a second loop where a
    pipeline puts that off."""
    x, shares, weights, slots, kept = saved
    product = functools.partial(dot, eight_bits=blocks.eight_bits)

    def run_part(part, of_rows, sums, gate, up, down, *biases):
        of_gate, of_up, of_down = biases or (None,) * 3
        rows, dout = take_rows(x, part.row_q), take_rows(grad, part.row_q)
        inner = kept
        if not part.is_first:
            inner = plus_bias(product((rows, gate)), of_gate), plus_bias(product((rows, up)), of_up)
        products = *inner, product((dout, down), transposed=True)
        *inner, dhidden = (z.astype(jnp.float32) for z in products)
        hidden, pull = jax.vjp(functools.partial(gated, variant), *inner)
        share = take_rows(shares.reshape(-1), part.choice_q)[:, None]
        dshare = (hidden * dhidden).sum(-1)
        if biases:
            added = plus_bias(jnp.zeros_like(dout), of_down).astype(jnp.float32)
            dshare += (added * dout.astype(jnp.float32)).sum(-1)
        inner = [(z * share).astype(x.dtype) for z in (hidden, *pull(dhidden))]
        drows = product((inner[1], gate), (inner[2], up), transposed=True)
        dshares = part.to_choices(of_rows[1], dshare.astype(shares.dtype))
        of_rows = part.to_rows(of_rows[0], drows), dshares, *map(part.put, of_rows[2:], inner)
        return of_rows, () if blocks.split else add(part, sums, rows, dout, *inner)

    def add(part, sums, rows, dout, hidden, dgate, dup):
        num_owners = part.num_picked or len(sums[0])
        products = functools.partial(outer, num_owners=num_owners, eight_bits=blocks.eight_bits)
        more = [products(rows, dgate), products(rows, dup), products(hidden, dout)]
        if len(weights) > len(more):  # of biases
            share = take_rows(shares.reshape(-1), part.choice_q)[:, None]
            ones = jnp.ones_like(rows[:, :1])
            shared = share.astype(x.dtype) * dout
            more += [outer(ones, z, num_owners)[:, 0] for z in (dgate, dup, shared)]
        return tuple(map(part.add, sums, more))

    def add_later(part, _, sums):
        return (), add(
            part, sums, take_rows(x, part.row_q), take_rows(grad, part.row_q), *map(part.of, inner)
        )

    sums = tuple(vary_alike(jnp.zeros(w.shape), like=x) for w in weights)
    # Written before they are read: XLA would write zeros when a step begins, and keep them for all layers.
    shape = len(slots.choice_q), weights[0].shape[2]
    buffers = (jnp.broadcast_to(grad[:1, 0].astype(x.dtype), shape),) * 3 if blocks.split else ()
    start = (None, None, *buffers), () if blocks.split else sums
    (drows, dshare, *inner), dw = _run_parts(blocks, slots, weights, *start, run_part)
    if blocks.split:
        dw = _run_parts(blocks, slots, (), (), sums, add_later)[1]
    return drows, dshare, tuple(z.astype(w.dtype) for z, w in zip(dw, weights, strict=True)), None


_feed_forward.defvjp(_forward, _backward)


class _Part(NamedTuple):
    """Some blocks of slots."""

    blocks: BlockSizes
    slots: SlotMap
    begin: Int[Array, ""]
    num_blocks: int
    is_first: bool

    @property
    def num_picked(self) -> int:
        """Blocks that are each multiplied with the weights of its owner, copied from those of all; or 0."""
        return 0 if self.is_first and self.blocks.own else self.num_blocks

    @property
    def owners(self) -> Int[Array, " n"]:
        return lax.dynamic_slice_in_dim(self.slots.owner_n, self.begin, self.num_blocks)

    @property
    def choice_q(self) -> Int[Array, " q"]:
        return self.of(self.slots.choice_q)

    @property
    def row_q(self) -> Int[Array, " q"]:
        """The row in each slot, past the end in an empty one."""
        return self.choice_q // self.slots.slot_rk.shape[1]

    def of(self, z: Array) -> Array:
        """Return this part of an array of slots."""
        block = self.blocks.block
        return lax.dynamic_slice_in_dim(z, self.begin * block, self.num_blocks * block)

    def put(self, z: Array, value: Array) -> Array:
        """Return an array of slots with a value in this part."""
        return lax.dynamic_update_slice_in_dim(
            z, value.astype(z.dtype), self.begin * self.blocks.block, 0
        )

    def weights(self, w: Array) -> Array:
        """Return the weights of this part's owners."""
        return w.at[self.owners].get(mode="clip") if self.num_picked else w

    def add(self, sums: Array, value: Array) -> Array:
        """Add values of this part's owners to the sums of all owners, one after the other: the blocks of an
        owner are added in their order."""
        for i in range(self.num_picked):
            # a block without an owner gives zeros
            owner = jnp.minimum(self.owners[i], len(sums) - 1)
            sum_ = lax.dynamic_index_in_dim(sums, owner) + value[i : i + 1]
            sums = lax.dynamic_update_index_in_dim(sums, sum_, owner, 0)
        return sums if self.num_picked else value

    def to_choices(self, numbers: Array | None, value: Array) -> Array:
        """Write values of this part's slots into the numbers of all choices."""
        if numbers is None:
            return take_rows(value, self.slots.slot_rk)
        return numbers.reshape(-1).at[self.choice_q].set(value, mode="drop").reshape(numbers.shape)

    def to_rows(self, sums: Array | None, value: Array, shares: Array | None = None) -> Array:
        """Add values of this part's slots, weighed if there are shares, to the sums of their rows. Slots of
        the first part are gathered choice by choice: the rows of one are never side by side."""
        if sums is None:
            each = (take_rows(value, slot_r).astype(jnp.float32) for slot_r in self.slots.slot_rk.T)
            each = (z if shares is None else z * shares[:, i, None] for i, z in enumerate(each))
            return functools.reduce(jnp.add, each).astype(value.dtype)
        if shares is not None:
            value = (
                value.astype(jnp.float32) * take_rows(shares.reshape(-1), self.choice_q)[:, None]
            )
        pairs = (jnp.split(z, self.num_blocks) for z in (self.row_q, value.astype(sums.dtype)))
        for row_q, value_q in zip(*pairs, strict=True):  # a block has a row at most once
            sums = sums.at[row_q].add(value_q, mode="drop")
        return sums


def _run_parts(blocks: BlockSizes, slots: SlotMap, weights, of_rows, sums, run_part):
    """Do ``of_rows, sums = run_part(part, of_rows, sums, *weights)`` for all parts that have rows, the first
    one before the loops. Results of rows and sums of weights have a loop each: rows can travel back while
    gradients of weights are still added up."""

    def run(begin, num_blocks, is_first, state):
        part = _Part(blocks, slots, begin, num_blocks, is_first)
        return run_part(part, *state, *map(part.weights, weights))

    zero, num_more = (
        jnp.zeros_like(slots.end_l[0]),
        -((blocks.first - slots.end_l[-1]) // blocks.more),
    )
    first = run(zero, blocks.first, True, (of_rows, sums))
    if blocks.num_blocks == blocks.first:
        return first

    def later_parts(which):
        def body(i, value):
            state = [value if j == which else z for j, z in enumerate(first)]
            return run(blocks.first + i * blocks.more, blocks.more, False, state)[which]

        return lax.fori_loop(zero, num_more, body, first[which])

    with jax.named_scope(OVERFLOW):
        needed = bool(jax.tree.leaves(first[0])), bool(sums)
        return tuple(later_parts(which) if needed[which] else first[which] for which in (0, 1))
