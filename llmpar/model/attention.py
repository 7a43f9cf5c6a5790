"""Attention, on one device or around a ring of devices.

It needs two ideas. First, a *tile* of queries attends to a tile of keys. The partial
result is the softmax-weighted sum of the tile's values (out), and the log of the sum of
exponentials of its scores (lse). Second, two partial results of the same queries, for
different keys, *merge* into one, in any order:

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

Blockwise attention merges the tiles of one device, a ring also merges over the blocks
of keys that arrive from other ranks, and decoding (`llmpar.serve.decode`) merges over
ranks. (Online softmax: Milakov and Gimelshein 2018; blocks and recomputation: Dao et
al. 2022, Rabe and Staats 2021; ring: Liu, Zaharia and Abbeel 2023.)

Which keys a query may see is computed from ids: the position and the segment (the
number of its document) of each query and of each key. Every rank knows the ids of all
keys. So ranks may have positions in any of several orders (`llmpar.plan.sequence_order`):
they do not change the result, only how much work and how many hops are saved.

The path of a query: `attend_by_plan` picks `ring_attention` (also for one device, a
ring of one), which cuts arrays into tiles; `ring_forward` loops over the ranks' blocks
of keys; `Tiles.attend` calls `Tiles.over_pairs`, a loop over the pairs of tiles of one
block; `attend_tile` multiplies. `ring_backward`, `Tiles.attend_grad` and
`attend_tile_grad` are their gradients. In `flash_attention` a kernel of
`llmpar.kernels.flash` takes the place of `Tiles`. `by_kernel` calls JAX's own
attention, without a ring.

Dims: b batch, s query positions, t key positions, k KV heads, r query heads per KV
head, h head width, w the width of a head's values. `ids_of` turns `Ids` into two arrays:
q_ids, `b 2 s`, and k_ids, `n b 2 t` for the keys of n ranks. Their dim of 2 has
positions, then segments. Arrays that are cut into tiles have a first dim of tiles: i
tiles of c positions for queries, j tiles of d positions for keys (in this file d is not
the model's width). Heads come before positions, which suits matmuls: `i b k r c h` and
`j b k d h`. In shapes i and j are numbers of tiles, in the code indices of a tile.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from llmpar.kernels import flash, flash_tpu
from llmpar.kernels.flash import KV, Q  # KV: b t k h; Q: b s k r h
from llmpar.parallel.collectives import after, at, hop, put, vary_alike, zeros_like
from llmpar.parallel.modes import Solo
from llmpar.parallel.remat import LSE, OUT
from llmpar.plan.backend import KERNELS_OF_JAX
from llmpar.plan.sequence_order import (
    CAUSAL,
    FEW_KEYS,
    FEW_QUERIES,
    FEW_TILES,
    Mask,
    ring_hops,
    seen_tiles,
    tile_length,
)

Out = Float[Array, "b s k r w"]
V = Float[Array, "b t k w"]
# Of latent attention: latents, which all heads share, and the matrix that expands them (`expand_latents`).
Latents = Float[Array, "b t 1 _"]
Up = Float[Array, "_ k _"]
# out in q's dtype, lse in float32
OutAndLse = tuple[Out, Float[Array, "b s k r"]]
Seen = Bool[Array, "_ s t"]
# One tile, without the dim of tiles. Its positions are written s and t, not c
# and d, since `full` calls the same functions with whole arrays. The last dim is h, or w
# for values and results.
QTile = Float[Array, "b k r s _"]
KVTile = Float[Array, "b k t _"]
LseTile = Float[Array, "b k r s"]
QTiles = Float[Array, "i b k r c _"]
KVTiles = Float[Array, "j b k d _"]
LseTiles = Float[Array, "i b k r c"]
QIds = Int[Array, "i _ 2 c"]
KIds = Int[Array, "j _ 2 d"]

# The name of what attention's backward pass reads besides `OUT` and `LSE`: queries,
# and keys and values or latents. With ``remat="none"`` at ZeRO 3 the policy saves all
# but gathered weights. It mistakes a result of an `optimization_barrier` that has no
# name for such a weight (`remat._all_but_gathered_weights`). On simulated devices
# `Manual.local` puts a barrier before attention, so these values are named.
IN = "attention_in"


class Ids(NamedTuple):
    """The ids of queries and of keys, which decide with the mask which keys a query sees. Each array may have
    batch 1. Where each row is one document, segments may be the number 0 in place of an array."""

    q_positions: Int[Array, "_ s"]
    q_segments: Int[Array, "_ s"] | int
    k_positions: Int[Array, "_ t"]
    k_segments: Int[Array, "_ t"] | int


def attend_by_plan(
    par: Solo,
    mask: Mask,
    q: Q,
    k_or_latents: KV | Latents,
    v_or_up: V | Up,
    ids: Ids,
    sinks: Float[Array, "k r"] | None = None,
) -> Out:
    """Attend as the plan asks for, with ``sinks`` if the model has any
    (`with_sinks`). For latent attention in a ring ``k_or_latents`` are latents, and ``v_or_up``
    the matrix that makes K and V of them (`expand_latents`)."""
    plan, axes, kernel = par.plan, par.axes("keys s"), par.plan.attention_kernel
    # One axis at most cuts the positions of keys. With usp sp is split in
    # two: the inner axis, ul, runs Ulysses, and cuts heads instead; the
    # outer one, still called sp, runs the ring.
    ring_args: dict[str, Any] = dict(
        axis=axes[0] if axes else None, hop=plan.hop, order=plan.sequence_order, mask=mask
    )
    args = q, k_or_latents, v_or_up, ids
    if kernel in KERNELS_OF_JAX:
        in_order, whole = plan.positions_in_order, plan.documents == "whole"
        out, lse = by_kernel(*args, kernel=kernel, in_order=in_order, whole=whole, mask=mask)
    elif kernel == "flash":
        out, lse = flash_attention(*args, platform=str(plan.platform), **ring_args)
    else:
        out, lse = ring_attention(
            *args,
            tile=plan.attention_block,
            in_order=plan.positions_in_order and not axes,
            branch=plan.platform != "gpu",
            **ring_args,
        )
    return out if sinks is None else with_sinks(out, lse, sinks)


def with_sinks(out: Out, lse: Float[Array, "b s k r"], sinks: Float[Array, "k r"]) -> Out:
    """Return attention's result with one more key for each head, whose logit is the sink and whose value is
    0: out times sigmoid(lse - sink)."""
    share = jax.nn.sigmoid(lse - sinks.astype(jnp.float32)[None, None])
    return out * share[..., None].astype(out.dtype)


def ids_are_valid(
    par: Solo, mask: Mask, positions_bs: Array, segments_bs: Array
) -> Bool[Array, " b"]:
    """Return for each row whether its ids are as this plan's attention assumes them to be.

    Any ids are valid where attention compares the ids of all tiles:

        when serving, with a cache
        in a ring that makes all n - 1 hops
        where a rank has all keys, if the kernel is flash or the plan's
        positions are not in order (`Resolved.positions_in_order`)

    Elsewhere it leaves out tiles or hops by their place in the row alone
    (`Resolved.assumes_order`). Then either positions rise along the row; or
    segments never fall, and positions rise within each segment. With
    `Plan.documents` ``whole`` cudnn gets no mask (`by_kernel`; with other
    kernels `checks.unused` resets the field): then the row must be one
    segment of rising positions, in steps of 1 if there is a window."""
    plan, step, segment_step = par.plan, jnp.diff(positions_bs), jnp.diff(segments_bs)
    if par.cache or not plan.assumes_order(mask, positions_bs.shape[1]):
        return jnp.ones(len(step), bool)
    rises = step > 0
    if plan.documents == "whole" and plan.attention_kernel in KERNELS_OF_JAX:
        steps_well = step == 1 if mask.window else rises
        return ((segment_step == 0) & steps_well).all(1)
    rises_in_segment = (segment_step > 0) | ((segment_step == 0) & rises)
    return rises.all(1) | rises_in_segment.all(1)


# ------------------------------------------------------------------------------------------ one pair of tiles


def ids_of(
    ids: Ids, mask: Mask, axis: str | None, t: int
) -> tuple[Int[Array, "_ 2 s"], Int[Array, "n _ 2 t"]]:
    """Return the ids of this rank's queries, and of the `t` keys of each of the n ranks along an axis.
    ``ids`` has those of all ranks' keys already. If the mask cuts documents into chunks, each chunk becomes a
    segment, so that a query sees only keys of its chunk."""
    n = lax.axis_size(axis) if axis else 1
    both = lambda positions, segments: jnp.stack(jnp.broadcast_arrays(positions, segments), 1)
    q_ids, k_ids = both(*ids[:2]), both(*ids[2:])
    if mask.in_chunks and (length := mask.window):  # the length of a chunk
        # an upper bound of the chunks of a document: so no two chunks of a row get the same number, and the
        # numbers rise from document to document
        most_chunks = 2 + n * t // length
        chunks = lambda x: most_chunks * x[:, 1] + x[:, 0] // length
        q_ids, k_ids = (jnp.stack((x[:, 0], chunks(x)), 1) for x in (q_ids, k_ids))
    return q_ids, jnp.moveaxis(k_ids.reshape(*k_ids.shape[:2], n, t), 2, 0)


def sees(mask: Mask, q_ids: Int[Array, "_ 2 s"], k_ids: Int[Array, "_ 2 t"]) -> Seen:
    """Return which keys each query sees: those of its document that the mask admits."""
    gap = q_ids[:, 0, :, None] - k_ids[:, 0, None]  # `admits` takes an interval; here low = high
    return mask.admits(gap, gap) & (q_ids[:, 1, :, None] == k_ids[:, 1, None])


def capped(x: Array, cap: float | None) -> Array:
    """Return cap · tanh(x / cap), or ``x`` without a cap (Gemma 2)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def attend_tile(
    q: QTile, k: KVTile, v: KVTile, seen: Seen, scale: float, cap: float | None
) -> tuple[QTile, LseTile]:
    """Attend to one tile of keys: float32 (out, lse). A query that sees no key gives 0 and -inf."""
    scores = jnp.einsum("bkrsh,bkth->bkrst", q, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(seen[:, None, None], capped(scores, cap), -jnp.inf)
    top = lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(jnp.float32).min))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    sees_any = total > 0
    # Replace 0 before the log and the division. A `where` after them would leave NaN in the gradients.
    total = jnp.where(sees_any, total, 1)
    out = jnp.einsum(
        "bkrst,bkth->bkrsh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return out / total, jnp.where(sees_any, top + jnp.log(total), -jnp.inf)[..., 0]


def attend_tile_grad(
    q: QTile,
    out_grad: QTile,
    lse: LseTile,
    delta: LseTile,
    k: KVTile,
    v: KVTile,
    seen: Seen,
    scale: float,
    cap: float | None,
) -> tuple[QTile, KVTile, KVTile]:
    """Return float32 (dq, dk, dv) of one pair of tiles (after Dao et al. 2022, appendix B):

        X = Q K'                            S = scale X, or with a cap S = cap tanh(scale X / cap)
        P = exp(S - lse)                    0 where masked; lse is over all keys, so P is exact
        dV = P' dO
        dX = slope * P * (dO V' - delta)    slope = dS/dX: scale, or with a cap scale (1 - tanh²)
        dQ = dX K,  dK = dX' Q

    ' is the transpose, and * is by element; dV, dX … are gradients of the loss. Here delta is, for each
    query, the sum of dO O over w, minus the gradient of lse.
    """
    einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)
    # scale X, which is S without a cap
    scores = einsum("bkrsh,bkth->bkrst", q, k) * scale
    slope: Any = scale
    if cap is not None:
        tanh = jnp.tanh(scores / cap)
        scores, slope = cap * tanh, scale * (1 - tanh * tanh)
    weights = jnp.exp(scores - lse[..., None])  # P
    weights = jnp.where(seen[:, None, None], weights, 0)
    weights_grad = einsum("bkrsh,bkth->bkrst", out_grad, v)
    x_grad = (weights * (weights_grad - delta[..., None]) * slope).astype(q.dtype)
    dq = einsum("bkrst,bkth->bkrsh", x_grad, k)
    dk = einsum("bkrst,bkrsh->bkth", x_grad, q)
    return dq, dk, einsum("bkrst,bkrsh->bkth", weights.astype(v.dtype), out_grad)


def merge(
    out_a: Float[Array, "*rows h"],
    lse_a: Float[Array, " *rows"],
    out_b: Float[Array, "*rows h"],
    lse_b: Float[Array, " *rows"],
) -> tuple[Float[Array, "*rows h"], Float[Array, " *rows"]]:
    """Merge two partial results about the same queries."""
    top = lax.stop_gradient(jnp.maximum(jnp.maximum(lse_a, lse_b), jnp.finfo(jnp.float32).min))
    weight_a, weight_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
    total = weight_a + weight_b
    sees_any = total > 0
    total = jnp.where(sees_any, total, 1)
    share_a, share_b = (weight_a / total)[..., None], (weight_b / total)[..., None]
    out = out_a.astype(jnp.float32) * share_a + out_b.astype(jnp.float32) * share_b
    return out.astype(out_a.dtype), jnp.where(sees_any, top + jnp.log(total), -jnp.inf)


# ------------------------------------------------------------------------------------------- a block of keys


@dataclass(frozen=True)
class Tiles:
    """Attention to a block of keys, tile by tile. Its methods take queries, keys and ids that are cut into
    tiles. Forward and backward pass each give `over_pairs` a function of one pair of tiles.

    Attributes:
        mask, scale: which keys a query sees, and the factor of its scores.
        pairs: the pairs (i, j) of tiles of queries and of keys that are unrolled (`few_pairs`); None: a loop
            takes all pairs.
        branch: skip pairs in which no query sees a key (`seen_tiles`), by a `lax.cond`; else compute and mask
            them. It is not for GPUs, where XLA may copy the condition to the host and wait for it.
    """

    mask: Mask
    scale: float
    pairs: tuple[tuple[int, int], ...] | None
    branch: bool

    def attend(
        self,
        q: QTiles,
        k: KVTiles,
        v: KVTiles,
        q_ids: QIds,
        k_ids: KIds,
        partials: tuple[QTiles, LseTiles] | None = None,
    ) -> tuple[QTiles, LseTiles]:
        """Merge attention to the keys into the partial results: float32 (out, lse)."""

        def merge_pair(q_i, k_j, v_j, seen, partial_i, _no_k_sum):
            out, lse = partial_i
            scale, cap = self.scale, self.mask.cap
            return merge(out, lse, *attend_tile(q_i, k_j, v_j, seen, scale, cap)), ()

        start = partials or _no_keys_yet(q, v)
        # (): the forward pass has no results for tiles of keys
        partials, _ = self.over_pairs(merge_pair, (q,), q_ids, (k, v), k_ids, start, ())
        return partials

    def attend_grad(
        self,
        q: QTiles,
        k: KVTiles,
        v: KVTiles,
        q_ids: QIds,
        k_ids: KIds,
        per_query: tuple[QTiles, LseTiles, LseTiles],
        dq: QTiles | None = None,
    ) -> tuple[QTiles, KVTiles, KVTiles]:
        """Return float32 (dq, dk, dv). dq is the ``dq`` given plus what these keys add to
        it. ``per_query`` is (dO, lse over all keys, delta) of the queries
        (`attend_tile_grad`)."""

        def add_pair(q_i, out_grad, lse, delta, k_j, v_j, seen, dq_i, dkv_j):
            given = q_i, out_grad, lse, delta, k_j, v_j, seen
            dq_part, *dkv_part = attend_tile_grad(*given, self.scale, self.mask.cap)
            return jax.tree.map(jnp.add, (dq_i, dkv_j), (dq_part, tuple(dkv_part)))

        sums = (_zeros(q) if dq is None else dq), (_zeros(k), _zeros(v))
        dq, dkv = self.over_pairs(add_pair, (q, *per_query), q_ids, (k, v), k_ids, *sums)
        return dq, *dkv

    def over_pairs(
        self,
        add_pair: Callable,
        queries: tuple[Array, ...],
        q_ids: QIds,
        keys: tuple[Array, ...],
        k_ids: KIds,
        q_sums: Any,
        k_sums: Any,
    ) -> tuple[Any, Any]:
        """Run a double loop over tiles i of queries and j of keys. For each pair (of ``pairs``, if
        given; with ``branch`` only if some query may see some key) add what it contributes to the
        results of i and of j:

            q_sums[i], k_sums[j] = add_pair(*queries[i], *keys[j], seen, q_sums[i], k_sums[j])

        ``queries`` and ``keys`` are tuples of arrays, of which a pair takes the tiles i and j. The results
        ``q_sums`` and ``k_sums`` are trees of arrays; a tree () has none. Return both."""
        # i j b: may some query of tile i see some key of tile j?
        some_seen, _ = seen_tiles(self.mask, q_ids, k_ids)
        may_see = some_seen.any(-1)  # i j, in any row

        def add(i, j, q_sum, k_sum):
            (queries_i, q_ids_i), (keys_j, k_ids_j) = at((queries, q_ids), i), at((keys, k_ids), j)
            seen = lambda: sees(self.mask, q_ids_i, k_ids_j)
            added = lambda: add_pair(*queries_i, *keys_j, seen(), q_sum, k_sum)
            unchanged = lambda: (q_sum, k_sum)
            return lax.cond(may_see[i, j], added, unchanged) if self.branch else added()

        def add_in_loop(pair, sums):
            i, j = divmod(pair, may_see.shape[1])
            q_sums, k_sums = sums
            q_sum, k_sum = add(i, j, at(q_sums, i), at(k_sums, j))
            return put(q_sums, i, q_sum), put(k_sums, j, k_sum)

        if self.pairs is None:
            return lax.fori_loop(0, may_see.size, add_in_loop, (q_sums, k_sums))
        unstack = lambda tree, n: [at(tree, i) for i in range(n)]
        stack = lambda tiles: jax.tree.map(lambda *x: jnp.stack(x), *tiles)
        num_i, num_j = may_see.shape
        by_query, by_key = unstack(q_sums, num_i), unstack(k_sums, num_j)
        for i, j in self.pairs:
            by_query[i], by_key[j] = add(i, j, by_query[i], by_key[j])
        return stack(by_query), stack(by_key)


def few_pairs(
    mask: Mask, in_order: bool, num_q_tiles: int, num_k_tiles: int, c: int
) -> tuple[tuple[int, int], ...] | None:
    """Return the pairs (i, j) of tiles of queries and of keys that are unrolled, or None
    if a loop takes all pairs. If ``in_order`` (queries and keys are the same positions,
    in order) and there are at most `FEW_TILES` tiles of queries, of ``c`` positions
    each, these are the pairs that the mask admits. Else, if there are at most
    `FEW_QUERIES` tiles of queries and `FEW_KEYS` of keys, they are all pairs. (Unrolled
    the loop is 20 % faster on a CPU, and each pair takes 0.03 s to compile.)"""
    pairs = itertools.product(range(num_q_tiles), range(num_k_tiles))
    if in_order and num_q_tiles <= FEW_TILES:
        admits = lambda i, j: mask.admits((i - j) * c - (c - 1), (i - j) * c + (c - 1))
        return tuple((i, j) for i, j in pairs if admits(i, j))
    return tuple(pairs) if num_q_tiles <= FEW_QUERIES and num_k_tiles <= FEW_KEYS else None


_zeros = partial(zeros_like, dtype=jnp.float32)


def _no_keys_yet(q, v):
    """Return the (out, lse) of queries that have seen no key yet."""
    out = vary_alike(jnp.zeros((*q.shape[:-1], v.shape[-1]), jnp.float32), q)
    return out, jnp.full_like(out[..., 0], -jnp.inf)


# ------------------------------------------------------------------------------------------------- the ring


@dataclass(frozen=True)
class _Ring:
    """What `ring_forward` and `ring_backward` need besides arrays. A *block* is what
    hops: the pair (K, V) of a rank's keys; or its latents, of which the rank that
    receives them makes K and V by `Up`. (Without latents ``up`` is None.)"""

    axis: str | None  # the mesh axis of the ring; None: one rank
    hop: str  # `Plan.hop`
    hops: int  # how often a block is sent on (`ring_hops`)
    attend: Callable  # `Tiles.attend` or a kernel, with its settings
    attend_grad: Callable
    expand: Callable  # (latents, up) -> (K, V)
    # Send the block on only after dK and dV are computed. Flash has two backward
    # kernels: while the first computes dK and dV, the block's gradient so far arrives;
    # while the second computes dQ, the block is sent. So each hop is hidden by a kernel.
    send_after_dkv: bool = False

    def keys_of(self, block: Any, up: Up | None) -> tuple[Array, Array]:
        """Return K and V of a block. It is a pair of them, or they are stacked in one array (`_message`),
        which `tuple` splits."""
        return tuple(block) if up is None else self.expand(block, up)

    def block_grad(self, block: Any, up: Up | None, dkv: list[Array]) -> tuple[Any, Array | None]:
        """Return the gradients of a block, and of ``up`` if there is one, from those of its K and V."""
        if up is None:
            return tuple(dkv), None
        kv, pull = jax.vjp(self.expand, block, up)
        grads = pull(tuple(grad.astype(x.dtype) for grad, x in zip(dkv, kv, strict=True)))
        return jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)


def expand_latents(
    latents: Array, up: Up, *, width: int, padded: bool = False
) -> tuple[Array, Array]:
    """Return K and V of all heads from latents (`llama.LatentAttention`), whose last dim
    has a latent, then the token's rotary key. The dim of heads is axis 2 both in whole
    arrays, ``b t 1 _``, and in tiles, ``j b 1 d _``; in the results it counts all heads.
    K has the ``width`` of queries; V is narrower, or ``padded`` with zeros."""
    latent, shared = jnp.split(latents, [len(up)], -1)
    kv = jnp.moveaxis(jnp.einsum("...c,cnh->...nh", latent.squeeze(2), up), -2, 2)
    k, v = keys_and_values(kv, shared, width)
    return k, padded_to(v, width) if padded else v


def keys_and_values(kv: Array, shared: Array, width: int) -> tuple[Array, Array]:
    """Return keys, ``width`` wide, and values of all heads. A key is the head's
    own part, then the rotary part, which all heads share. ``kv`` has for each
    head its own part of the key, then its value; ``shared`` has the rotary
    part, as one head."""
    own = width - shared.shape[-1]
    shared = jnp.broadcast_to(shared, (*kv.shape[:-1], shared.shape[-1]))
    return jnp.concatenate([kv[..., :own], shared], -1), kv[..., own:]


def padded_to(x: Array, width: int) -> Array:
    """Return ``x`` with zeros appended along its last dim, up to a width."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def ring_attention(
    q: Q,
    k_or_latents: KV | Latents,
    v_or_up: V | Up,
    ids: Ids,
    *,
    axis: str | None = None,
    tile: int | None = None,
    in_order: bool = False,
    branch: bool = True,
    hop: str = "permute",
    order: str = "",
    mask: Mask = CAUSAL,
) -> OutAndLse:
    """Attend, tile by tile, to the keys of all n ranks along an axis, in
    `jax.shard_map`. Without an axis n is 1, and no key is sent: the result
    is that of `full`, in memory linear in the sequence.

    Args:
        k_or_latents, v_or_up: keys and values; or latents, and the matrix
            that makes keys and values of them (`expand_latents`).
        ids: those of this rank's queries, and those of the keys of all ranks.
        tile: the length of tiles; None: `tile_length` chooses. (A *block* is all keys of a rank.)
        in_order: there is one rank, and its queries and keys are the same positions, in order (not checked
            here, but by `ids_are_valid`). Then up to `FEW_TILES` tiles are unrolled, without pairs outside
            the mask.
        order: `Plan.sequence_order`; in contiguous order a window needs fewer hops (`ring_hops`).
        hop: `Plan.hop`.
        branch: as in `Tiles`.
    """
    s, t = q.shape[1], k_or_latents.shape[1]
    assert s == t or not in_order
    q_ids, k_ids = ids_of(ids, mask, axis, t)
    hops = ring_hops(mask, order, len(k_ids), t)
    # In zigzag order a rank has two distant parts of the sequence, and a tile with both
    # could never be skipped. So in a ring a tile must not have all positions of a rank.
    # Where it would, ``tile`` is ignored and `tile_length` chooses: at most half of them,
    # if their number is even.
    if axis and tile and tile >= s:
        tile = None
    c, d = tile_length(tile, s), tile_length(tile, t)
    pairs = few_pairs(mask, in_order, s // c, t // d, c)
    tiles = Tiles(mask, q.shape[-1] ** -0.5, pairs, branch)
    expand = partial(expand_latents, width=q.shape[-1])
    ring = _Ring(axis, hop, hops, tiles.attend, tiles.attend_grad, expand)
    # cut:      b (i c) … h -> i b … c h
    # cut_ids:  _ 2 (i c) -> i _ 2 c, and for the keys of all ranks n _ 2 (j d) -> n j _ 2 d:
    #           the dim of tiles goes before the dims _ 2
    cut = lambda x, size: jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), (1, 2), (0, -2))
    cut_ids = lambda ids, size: jnp.moveaxis(ids.reshape(*ids.shape[:-1], -1, size), -2, -4)
    keys = cut(k_or_latents, d)
    has_latents = v_or_up.ndim == 3  # `up` has 3 dims, V has 4
    block, up = (keys, v_or_up) if has_latents else ((keys, cut(v_or_up, d)), None)
    arrays = cut(q, c), block, up, cut_ids(q_ids, c), cut_ids(k_ids, d)
    # In shard_map the type of a value says along which mesh axes it may
    # differ between devices. Loops and custom gradients need equal types:
    # `vary_alike` gives each array the axes of all. No value changes.
    out, lse = ring_forward(ring, *vary_alike(arrays))
    out, lse = jnp.moveaxis(out, (0, -2), (1, 2)), jnp.moveaxis(lse, (0, -1), (1, 2))
    return out.reshape(*q.shape[:-1], -1), lse.reshape(q.shape[:-1])


def flash_attention(
    q: Q,
    k_or_latents: KV | Latents,
    v_or_up: V | Up,
    ids: Ids,
    *,
    platform: str,
    axis: str | None = None,
    hop: str = "permute",
    order: str = "",
    mask: Mask = CAUSAL,
) -> OutAndLse:
    """Attend as `ring_attention` does, by the flash kernel of a platform (`llmpar.kernels.flash`; on ``cpu``
    plain JAX), which cuts tiles itself."""
    q_ids, k_ids = ids_of(ids, mask, axis, k_or_latents.shape[1])
    hops, width = ring_hops(mask, order, len(k_ids), k_or_latents.shape[1]), q.shape[-1]
    block: Any = k_or_latents
    if v_or_up.ndim == 3:  # of latents; V has 4 dims
        up = v_or_up
        # a key without the rotary part, which all heads share
        own_key_width = width - (k_or_latents.shape[-1] - len(v_or_up))
        # the last dim of `up`: a head's own part of the key, then its value
        value_width = v_or_up.shape[-1] - own_key_width
    else:
        # the kernels need values as wide as keys: narrower ones are padded
        block, up = (k_or_latents, padded_to(v_or_up, width)), None
        value_width = v_or_up.shape[-1]
    launches = {"tpu": flash_tpu.run_on_tpu, "cpu": flash.run_on_cpu, "gpu": flash.run_on_gpu}
    settings = dict(mask=mask, scale=width**-0.5, platform=platform, launch=launches[platform])
    forward, backward = (
        partial(f, **settings) for f in (flash.kernel_forward, flash.kernel_backward)
    )
    expand = partial(expand_latents, width=width, padded=True)
    ring = _Ring(axis, hop, hops, forward, backward, expand, send_after_dkv=True)
    out, lse = ring_forward(ring, *vary_alike((q, block, up, q_ids, k_ids)))
    return (out[..., :value_width] if value_width < width else out), lse


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_forward(ring, q, block, up, q_ids, k_ids):
    """Return (out, lse) of this rank's queries. ``block`` and ``up`` are as in `_Ring`, and ``k_ids`` the ids
    of every rank's keys.

        out, lse = 0, -inf
        repeat hops times:
            merge attention to the keys into out, lse
            keys = the previous rank's
        merge attention to the keys into out, lse

    ``hops`` is n-1; with a window it may be less (`ring_hops`). K and V hop in one message, in their own
    dtype, KV heads only: each rank sends hops times 2 b t k h elements. (With ``exchange`` as `Plan.hop` a
    hop is an all-to-all: the next rank gets the message, each other rank as many zeros.) Latents hop in place
    of K and V: b t vectors, each a latent and its rotary key. A hop may run while a rank attends to its keys.
    The backward pass needs q, block, up, ids, out and lse."""

    def attend_and_hop(carry, done):
        block, partials = carry
        kv = ring.keys_of(block, up)
        partials = ring.attend(q, *kv, q_ids, at(k_ids, _owner(ring, done)), partials)
        return (_hop(ring, block), partials), None

    partials: Any = None
    if ring.hops:
        _, v = ring.keys_of(block, up)  # only its width is read
        # from here on the block is one array, K and V stacked; `keys_of` takes it apart
        start = _message(block), _no_keys_yet(q, v)
        (block, partials), _ = lax.scan(attend_and_hop, start, jnp.arange(ring.hops))
    kv = ring.keys_of(block, up)
    out, lse = ring.attend(q, *kv, q_ids, at(k_ids, _owner(ring, ring.hops)), partials)
    return out.astype(q.dtype), lse


def _ring_forward_saving(ring, q, block, up, q_ids, k_ids):
    """Run `ring_forward`, and give names, for remat policies, to what `ring_backward` reads."""
    q, block = jax.tree.map(lambda x: checkpoint_name(x, IN), (q, block))
    out, lse = ring_forward(ring, q, block, up, q_ids, k_ids)
    out, lse = checkpoint_name(out, OUT), checkpoint_name(lse, LSE)
    return (out, lse), (q, block, up, q_ids, k_ids, out, lse)


def ring_backward(ring, saved, grads):
    """Return the gradients of q, block and up.

        dq, dk, dv = 0
        repeat hops times:
            keys, dk, dv = the previous rank's
            add what these keys contribute to dq, dk, dv
        keys = this rank's own; dk, dv = what the other ranks have added for these keys
        add what these keys contribute to dq, dk, dv

    (In the code keys are sent on at the end of an iteration, and their dk and dv at the start of the next, so
    that both travel while a rank computes.)
    Scores are recomputed, and K and V make the same hops again. A rank takes
    its own keys last, when their dK and dV come home. The keys of rank a
    visit the ranks a+1 … a+hops. Rank a+1 starts their dK and dV, each
    further rank adds its part, and rank a+hops sends them home to a. That is
    n - hops ranks further on: the next rank, unless a window shortens the
    ring. So the gradient makes ``hops`` hops, too, each of 2 b t k h float32
    elements. Where latents hop, their gradient travels instead: b t float32
    vectors as wide as these latents."""
    (q, block, up, q_ids, k_ids, out, lse), (out_grad, lse_grad) = saved, grads
    dq: Any = None
    # the block's gradient, a message that hops after the block; and the gradient of ``up``, which stays
    sums: Any = None
    delta = (out_grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - lse_grad
    # For a query that saw no key any finite lse will do: `attend_tile_grad` masks its weights to 0.
    per_query = out_grad, jnp.where(jnp.isfinite(lse), lse, 0), delta

    def add_and_hop(carry, done, last=False):
        """Take the block that is here after ``done`` hops. Add its keys' part to
        dq, and this rank's part to ``sums``: the gradients of the block and of
        ``up``. The block was sent here at the end of the previous call. Its
        gradient is sent at the start of this one, so it may arrive while dK
        and dV are computed. That of ``up`` stays on its rank. In the first
        call ``sums`` is None. In the ``last`` call do not send the block on."""
        block, dq, sums = carry
        if sums is not None:
            sums = _hop(ring, sums[0]), sums[1]
        kv = ring.keys_of(block, up)
        dq, *dkv = ring.attend_grad(q, *kv, q_ids, at(k_ids, _owner(ring, done)), per_query, dq)
        if ring.send_after_dkv:
            block, dkv = lax.optimization_barrier((block, dkv))
        grad, up_grad = ring.block_grad(block, up, dkv)
        parts = _message(grad), up_grad
        if not last:
            block = _hop(ring, block)
        return (block, dq, jax.tree.map(jnp.add, sums, parts) if sums else parts), None

    if ring.hops:
        # `after` delays this hop until delta is computed, so until the forward ring has ended. Else it may
        # run at the same time as a hop of that ring, and simulated devices confuse two permutes of one shape,
        # one of them in a loop: wrong numbers or a deadlock in half of the runs (JAX 0.10.2).
        first = _hop(ring, after(delta, _message(block)))
        carry, _ = add_and_hop((first, _zeros(q), None), 1, last=ring.hops == 1)
        if ring.hops > 1:
            carry, _ = lax.scan(add_and_hop, carry, jnp.arange(2, ring.hops))
            carry, _ = add_and_hop(carry, ring.hops, last=True)
        _, dq, sums = carry
    kv = ring.keys_of(block, up)
    dq, *dkv = ring.attend_grad(q, *kv, q_ids, at(k_ids, _owner(ring, 0)), per_query, dq)
    grad, up_grad = ring.block_grad(block, up, dkv)
    if ring.hops:
        grad = _hop(ring, sums[0], len(k_ids) - ring.hops) + _message(grad)
        up_grad = jax.tree.map(jnp.add, up_grad, sums[1])
    grad = tuple(grad) if up is None else grad  # K and V come in one message
    cast = lambda grad, x: grad.astype(x.dtype)
    return *jax.tree.map(cast, (dq, grad, up_grad), (q, block, up)), None, None


ring_forward.defvjp(_ring_forward_saving, ring_backward)


def _owner(ring, hops):
    """Return the rank whose keys this rank has after ``hops`` hops."""
    return (lax.axis_index(ring.axis) - hops) % lax.axis_size(ring.axis) if ring.axis else 0


def _message(block):
    """Return a block in one array: K and V hop as one message."""
    return jnp.stack(block) if isinstance(block, tuple) else block


def _hop(ring, message, by=1):
    """Send a message to the next rank, or to the rank ``by`` places further on."""
    return hop(message, ring.axis, ring.hop, "keys b t -> the next rank", by)


# --------------------------------------------------------------------------------------------- other methods


def full(q: Q, k: KV, v: V, ids: Ids, *, mask: Mask = CAUSAL) -> OutAndLse:
    """Attend with the whole score matrix, b k r s t, which autodiff keeps: the reference of tests, and the
    attention of `llmpar.serve.decode`."""
    q_ids, (k_ids,) = ids_of(ids, mask, None, k.shape[1])
    q, k, v = (jnp.moveaxis(x, 1, -2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    out, lse = attend_tile(q, k, v, sees(mask, q_ids, k_ids), scale, mask.cap)
    return jnp.moveaxis(out.astype(q.dtype), -2, 1), jnp.moveaxis(lse, -1, 1)


def by_kernel(
    q: Q,
    k: KV,
    v: V,
    ids: Ids,
    *,
    kernel: Any,  # cudnn or xla
    in_order: bool,
    whole: bool,
    mask: Mask = CAUSAL,
) -> tuple[Out, Any]:
    """Attend with `jax.nn.dot_product_attention` by 'cudnn' (NVIDIA GPUs, 16 bits) or 'xla' (which keeps the
    whole score matrix).

    The mask is an array of b s t, one for all heads. With `in_order` a kernel may skip later
    positions. With `in_order` and `whole` (one document a row, `ids_are_valid`; a model's plan has
    it with cudnn alone) no mask is needed, and none is built. There is no lse: the kernel rounds it
    to q's dtype, too coarse to merge by, and drops its gradient (JAX 0.10 and 0.12). `checks`
    refuses these kernels for models with sinks."""
    if whole and in_order:
        window = (mask.window - 1, 0) if mask.window else None
        options: dict[str, Any] = dict(local_window_size=window)
    else:
        q_ids, (k_ids,) = ids_of(ids, mask, None, k.shape[1])
        options = dict(mask=sees(mask, q_ids, k_ids)[:, None])
    q_bsnh = q.reshape(*q.shape[:2], -1, q.shape[-1])
    out = jax.nn.dot_product_attention(
        q_bsnh, k, v, implementation=kernel, is_causal=in_order, **options
    )
    return checkpoint_name(out.reshape(q.shape), OUT), None
