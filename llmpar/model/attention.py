"""Attend: on one device, or around a ring of devices.

Two ideas are enough. A *tile* of queries that attends to a tile of keys gives a partial result: the
softmax-weighted sum of their values, and the log of the sum of exponentials (lse). Two partial results about
the same queries *merge* into one, in any order:

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

Blockwise attention merges the tiles of one device, a ring also merges over the blocks of keys that arrive
from other ranks, and decoding (`llmpar.serve.decode`) merges over ranks. (Online softmax: Milakov and
Gimelshein 2018; blocks and recomputation: Dao et al. 2022, Rabe and Staats 2021; ring: Liu, Zaharia and
Abbeel 2023.)

Data decides which keys a query may see: every rank knows the ids (position and segment, the number of the
document) of all keys. So the result does not depend on the order of a sequence on the ranks
(`llmpar.plan.sequence_order`), a permutation of positions; only how much work is left out does.

The path of a query: `choose_attention` picks `ring_attention`, which cuts arrays into tiles; `ring_forward`
loops over the ranks' blocks of keys; `attend_block` loops over the pairs of tiles of one block;
`attend_tile` multiplies. `ring_backward`, `attend_block_grad` and `attend_tile_grad` are their gradients. A
kernel of `llmpar.kernels.flash` may take the place of `attend_block`.

Dims: b batch, s query positions, t key positions, k KV heads, r query heads per KV head, h head width, w the
width of a head's values. Ids are `b 2 s`: positions, then segments. Queries are cut into i tiles of c
positions, keys into j tiles of d (a length here, not the model's width). Tiles have heads before positions,
as matmuls want them: `i b k r c h` and `j b k d h`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from llmpar.kernels import flash, flash_tpu
from llmpar.kernels.flash import KV, Q
from llmpar.parallel.collectives import after, at, hop, put, scope, vary_alike
from llmpar.parallel.modes import Solo
from llmpar.plan.backend import OF_JAX
from llmpar.plan.sequence_order import CAUSAL, FEW_TILES, Mask, ring_hops, seen_tiles, tile_length

Out = Float[Array, "b s k r w"]
V = Float[Array, "b t k w"]
# out in q's dtype, lse in float32
Partial = tuple[Out, Float[Array, "b s k r"]]
Seen = Bool[Array, "_ s t"]
# of tiles the last dim is h, or w of values and results
QTile = Float[Array, "b k r s _"]
KVTile = Float[Array, "b k t _"]
LseTile = Float[Array, "b k r s"]
QTiles = Float[Array, "i b k r c _"]
KVTiles = Float[Array, "j b k d _"]
LseTiles = Float[Array, "i b k r c"]
QIds = Int[Array, "i _ 2 c"]
KIds = Int[Array, "j _ 2 d"]

# Names under which remat policies know what the backward pass of attention reads.
IN, OUT, LSE = "attention_in", "attention_out", "attention_lse"

# Pairs of tiles are unrolled, not looped over, up to 2 tiles of queries by 4 of keys; in a contiguous
# sequence, where only pairs inside the mask count, up to `FEW_TILES` of queries. That is 20 % faster on a
# CPU, and costs 0.03 s of compiling a pair.
_FEW_QUERIES, _FEW_KEYS = 2, 4


class _Ids(TypedDict, total=False):
    """What decides which keys a query sees. Segments are optional; each array may have batch 1."""

    q_positions_bs: Int[Array, "_ s"]
    q_segments_bs: Int[Array, "_ s"] | None
    k_positions_bt: Int[Array, "_ t"]
    k_segments_bt: Int[Array, "_ t"] | None


def choose_attention(par: Solo, mask: Mask) -> Callable[..., Out]:
    """Return the attention that the plan asks for: a function of q, k, v, four arrays of ids (`_Ids`, in its
    order), and sinks, if the model has any."""
    plan, axes, kernel = par.plan, par.axes("keys s"), par.plan.attention_kernel
    if kernel in OF_JAX:
        run: Callable = partial(
            by_kernel, kernel=kernel, contiguous=plan.in_order, whole=plan.documents == "whole"
        )
    else:
        run = partial(
            ring_attention,
            axis=axes[0] if axes else None,  # one at most: of usp's two axes, ul cuts no keys
            block=plan.attention_block,
            contiguous=plan.in_order and not axes,
            platform=par.platform if kernel == "flash" else None,
            branch=par.platform != "gpu",
            hop=plan.hop,
            order=plan.sequence_order,
        )

    def attend_by_plan(q, k, v, *ids):
        ids, sinks = ids[:4], ids[4:]
        out, lse = run(q, k, v, mask=mask, **dict(zip(_Ids.__annotations__, ids, strict=True)))
        return with_sinks(out, lse, *sinks) if sinks else out

    return attend_by_plan


def with_sinks(out: Out, lse: Float[Array, "b s k r"], sinks: Float[Array, "k r"]) -> Out:
    """Return what attention gives where every query also sees a key with these logits and the value 0."""
    share = jax.nn.sigmoid(lse - sinks.astype(jnp.float32)[None, None])
    return out * share[..., None].astype(out.dtype)


def as_promised(
    par: Solo, mask: Mask, positions_bs: Array, segments_bs: Array
) -> Bool[Array, " b"]:
    """Return which rows keep the promises that let attention leave keys out without comparing their ids.

    Where it leaves out later positions (`Resolved.order_matters`), positions must rise, or segments must
    rise and positions rise in each. Where the plan says that documents are whole, and a kernel relies on
    it, a row must have one segment and, with a window, no gap between positions. What compares the ids of
    all keys relies on no order: a cache, a ring whose keys reach all ranks, and the kernel of `flash`."""
    plan, step, segment_step = par.plan, jnp.diff(positions_bs), jnp.diff(segments_bs)
    if par.cache or not plan.order_matters(mask, positions_bs.shape[1]):
        return jnp.ones(len(step), bool)
    rises = step > 0
    if plan.documents == "whole" and plan.attention_kernel != "portable":
        steps_well = step == 1 if mask.window else rises
        return ((segment_step == 0) & steps_well).all(1)
    rises_in_segment = (segment_step > 0) | ((segment_step == 0) & rises)
    return rises.all(1) | rises_in_segment.all(1)


# ------------------------------------------------------------------------------------------ one pair of tiles


def ids_of(
    mask: Mask,
    axis: str | None,
    t: int,
    *,
    q_positions_bs,
    k_positions_bt,
    q_segments_bs=None,
    k_segments_bt=None,
) -> tuple[Int[Array, "_ 2 s"], Int[Array, "n _ 2 t"]]:
    """Return the ids of the queries, and those of the `t` keys of each rank along an axis. Given are those of
    all ranks; or this rank's `t`, and then they are gathered. Without segments all positions belong to one
    document. Where a mask cuts documents into chunks, each chunk is a segment of its own: a query sees no
    other chunk."""
    if (q_segments_bs is None) != (k_segments_bt is None):
        raise ValueError(
            "segments were given for only one of queries and keys; give both or neither"
        )
    n, keys = lax.axis_size(axis) if axis else 1, (k_positions_bt, k_segments_bt)
    if n > 1 and k_positions_bt.shape[1] == t:
        with scope("data b s -> ids b s"):
            keys = jax.tree.map(lambda x: lax.all_gather(x, axis, axis=1, tiled=True), keys)
    q_ids, k_ids = (
        jnp.stack(
            jnp.broadcast_arrays(
                positions, jnp.zeros_like(positions) if segments is None else segments
            ),
            1,
        )
        for positions, segments in ((q_positions_bs, q_segments_bs), keys)
    )
    if mask.in_chunks and (length := mask.window):
        # more chunks than a document has: so their numbers are unique, and rise from document to document
        many = 2 + n * t // length
        chunks = lambda ids: many * ids[:, 1] + ids[:, 0] // length
        q_ids, k_ids = (jnp.stack((ids[:, 0], chunks(ids)), 1) for ids in (q_ids, k_ids))
    return q_ids, jnp.moveaxis(k_ids.reshape(*k_ids.shape[:2], n, t), 2, 0)


def sees(mask: Mask, q_ids: Int[Array, "_ 2 s"], k_ids: Int[Array, "_ 2 t"]) -> Seen:
    """Return which keys each query sees: those of its document that the mask admits."""
    gap = q_ids[:, 0, :, None] - k_ids[:, 0, None]  # an interval of one gap
    return mask.admits(gap, gap) & (q_ids[:, 1, :, None] == k_ids[:, 1, None])


def capped(x: Array, cap: float | None) -> Array:
    """Return cap · tanh(x / cap), or ``x`` without a cap (Gemma 2)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def attend_tile(
    q: QTile, k: KVTile, v: KVTile, seen: Seen, scale: float, cap: float | None = None
) -> tuple[QTile, LseTile]:
    """Attend to one tile of keys: float32 (out, lse). A query that sees no key gives 0 and -inf."""
    scores = jnp.einsum("bkrsh,bkth->bkrst", q, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(seen[:, None, None], capped(scores, cap), -jnp.inf)
    top = lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(jnp.float32).min))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    sees_any = total > 0
    # Before the log and the quotient: a where after them leaves NaN in gradients.
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
    cap: float | None = None,
) -> tuple[QTile, KVTile, KVTile]:
    """Return float32 (dq, dk, dv) of one pair. Its weights P are recomputed from the lse over all keys.

    dV = P' dO, dS = P (dO V' - delta), dQ = dS K, dK = dS' Q (Dao et al. 2022, appendix B), where delta is
    each query's sum of dO O less the gradient of lse. (In dS a factor, the scale and the cap's slope, is left
    out here.)
    """
    einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = einsum("bkrsh,bkth->bkrst", q, k) * scale
    slope: Any = scale
    if cap is not None:
        tanh = jnp.tanh(scores / cap)
        scores, slope = cap * tanh, scale * (1 - tanh * tanh)
    weights = jnp.exp(scores - lse[..., None])
    weights = jnp.where(seen[:, None, None], weights, 0)
    weights_grad = einsum("bkrsh,bkth->bkrst", out_grad, v)
    scores_grad = (weights * (weights_grad - delta[..., None]) * slope).astype(q.dtype)
    dq = einsum("bkrst,bkth->bkrsh", scores_grad, k)
    dk = einsum("bkrst,bkrsh->bkth", scores_grad, q)
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


def attend_block(
    q: QTiles,
    k: KVTiles,
    v: KVTiles,
    q_ids: QIds,
    k_ids: KIds,
    partials: tuple[QTiles, LseTiles] | None = None,
    *,
    mask: Mask,
    scale: float,
    pairs: list[tuple[int, int]] | None,
    branch: bool,
) -> tuple[QTiles, LseTiles]:
    """Merge attention to a block of keys, tile by tile, into the partial results: float32 (out, lse).

    `pairs` are the pairs of tiles that are written out (`_few_pairs`); if None, a loop takes all pairs. A
    pair that `seen_tiles` rules out is a branch not taken; without `branch` it is computed and masked."""
    may_see = seen_tiles(mask, q_ids, k_ids)[0].any(-1)  # i j, in any row

    def merge_pair(i, j, partial_i, _):
        (q_i, q_ids_i), (k_j, v_j, k_ids_j) = at((q, q_ids), i), at((k, v, k_ids), j)

        def merged():
            out, lse = partial_i
            seen = sees(mask, q_ids_i, k_ids_j)
            return merge(out, lse, *attend_tile(q_i, k_j, v_j, seen, scale, mask.cap))

        return (lax.cond(may_see[i, j], merged, lambda: partial_i) if branch else merged()), ()

    start = partials or _no_keys_yet(q, v)
    of_queries, _ = _over_pairs(pairs, may_see.shape, merge_pair, start, ())  # (): nothing of keys
    return of_queries


def attend_block_grad(
    q: QTiles,
    k: KVTiles,
    v: KVTiles,
    q_ids: QIds,
    k_ids: KIds,
    terms: tuple[QTiles, LseTiles, LseTiles],
    dq: QTiles | None = None,
    *,
    mask: Mask,
    scale: float,
    pairs: list[tuple[int, int]] | None,
    branch: bool,
) -> tuple[QTiles, KVTiles, KVTiles]:
    """Return float32 (dq, dk, dv): dq with the part of a block of keys added, and the gradients of its keys.
    The terms of each query are dO, its lse over all keys, and delta (`attend_tile_grad`); the other
    arguments are those of `attend_block`."""
    may_see = seen_tiles(mask, q_ids, k_ids)[0].any(-1)  # i j, in any row

    def add_pair(i, j, dq_i, dkv_j):
        (q_i, terms_i, q_ids_i), (k_j, v_j, k_ids_j) = (
            at((q, terms, q_ids), i),
            at((k, v, k_ids), j),
        )

        def added():
            (out_grad, lse, delta), seen = terms_i, sees(mask, q_ids_i, k_ids_j)
            dq, dk, dv = attend_tile_grad(
                q_i, out_grad, lse, delta, k_j, v_j, seen, scale, mask.cap
            )
            return jax.tree.map(jnp.add, (dq_i, dkv_j), (dq, (dk, dv)))

        return lax.cond(may_see[i, j], added, lambda: (dq_i, dkv_j)) if branch else added()

    sums = _zeros(q) if dq is None else dq, (_zeros(k), _zeros(v))
    dq, dkv = _over_pairs(pairs, may_see.shape, add_pair, *sums)
    return dq, *dkv


def _few_pairs(
    mask: Mask, contiguous: bool, num_queries: int, num_keys: int, c: int
) -> list[tuple[int, int]] | None:
    """Return the pairs (i, j) of tiles of queries and of keys that the program writes out one by one, or None
    if they are many. Of a contiguous sequence it writes out only the pairs that the mask admits."""
    pairs = list(np.ndindex(num_queries, num_keys))
    if contiguous and num_queries <= FEW_TILES:
        return [
            (i, j) for i, j in pairs if mask.admits((i - j) * c - (c - 1), (i - j) * c + (c - 1))
        ]
    return pairs if num_queries <= _FEW_QUERIES and num_keys <= _FEW_KEYS else None


def _over_pairs(pairs, shape, add_pair, of_queries, of_keys):
    """Return the results after ``of_queries[i], of_keys[j] = add_pair(i, j, of_queries[i], of_keys[j])`` for
    each pair of tiles. ``of_queries`` are sums for each tile of queries, ``of_keys`` for each tile of keys:
    (), for none, in the forward pass. ``pairs`` are written out; if None, a loop takes all of this shape."""

    def add_in_loop(pair, sums):
        (i, j), (of_queries, of_keys) = divmod(pair, shape[1]), sums
        of_i, of_j = add_pair(i, j, at(of_queries, i), at(of_keys, j))
        return put(of_queries, i, of_i), put(of_keys, j, of_j)

    if pairs is None:
        return lax.fori_loop(0, shape[0] * shape[1], add_in_loop, (of_queries, of_keys))
    queries, keys = (
        [at(x, i) for i in range(n)] for x, n in zip((of_queries, of_keys), shape, strict=True)
    )
    for i, j in pairs:
        queries[i], keys[j] = add_pair(i, j, queries[i], keys[j])
    return tuple(jax.tree.map(lambda *tiles: jnp.stack(tiles), *sums) for sums in (queries, keys))


def _zeros(x):
    return vary_alike(jnp.zeros(x.shape, jnp.float32), x)


def _no_keys_yet(q, v):
    """Return the (out, lse) of queries that have seen no key yet."""
    out = vary_alike(jnp.zeros((*q.shape[:-1], v.shape[-1]), jnp.float32), q)
    return out, jnp.full_like(out[..., 0], -jnp.inf)


# ------------------------------------------------------------------------------------------------- the ring


@dataclass(frozen=True)
class _Ring:
    """What `ring_forward` and `ring_backward` need besides arrays."""

    axis: str | None  # of the mesh; None: one rank
    hop: str  # as in a `Plan`
    hops: int  # that keys make (`ring_hops`)
    attend: Callable  # `attend_block` or a kernel, with its settings
    attend_grad: Callable
    # Whether K and V hop on only when dK and dV of their block are there. Flash computes these in a first
    # kernel, while the sums of the block before travel, and dQ in a second one, while K and V do.
    kv_hop_waits: bool = False


def ring_attention(
    q: Q,
    k: KV,
    v: V,
    *,
    axis: str | None = None,
    block: int | None = None,
    contiguous: bool = False,
    platform: str | None = None,
    branch: bool = True,
    hop: str = "permute",
    order: str = "",
    mask: Mask = CAUSAL,
    **ids: Unpack[_Ids],
) -> Partial:
    """Attend to the keys of all n ranks along an axis, in `jax.shard_map`. Without an axis there is one rank:
    the result of `full`, in memory linear in the sequence.

    Args:
        ids: of queries, this rank's; of keys, those of all ranks, or this rank's, which are then gathered.
        block: length of a tile; None: `tile_length` chooses. (Elsewhere a *block* is all keys of a rank.)
        contiguous: promises of one rank that its queries and keys are the same positions, in order
            (`as_promised`): then up to `FEW_TILES` tiles are written out, without pairs outside the mask.
        order: `Plan.sequence_order`; in contiguous order a window needs fewer hops (`ring_hops`).
        hop: `Plan.hop`.
        branch: skip a pair of tiles that `seen_tiles` rules out, by `lax.cond`; else compute and mask it.
        platform: attend by its kernel (`llmpar.kernels.flash`; interpreted if ``cpu``); None: by
            `attend_block`.
    """
    s, t = q.shape[1], k.shape[1]
    assert s == t or not contiguous
    q_ids, k_ids = ids_of(mask, axis, t, **ids)
    hops = ring_hops(mask, order, len(k_ids), t)
    # In zigzag order a tile of all positions would have both parts of a rank. Its result would be right, but
    # no rank would ever skip it.
    block = None if axis and block and block >= s else block
    c, d = tile_length(block, s), tile_length(block, t)
    scale = q.shape[-1] ** -0.5
    if platform:
        return _ring_of_kernels(axis, hop, hops, mask, scale, platform, (q, k, v, q_ids, k_ids))
    pairs = _few_pairs(mask, contiguous, s // c, t // d, c)
    settings = dict(mask=mask, scale=scale, pairs=pairs, branch=branch)
    attend, attend_grad = partial(attend_block, **settings), partial(attend_block_grad, **settings)
    ring = _Ring(axis, hop, hops, attend, attend_grad)
    # b (i c) … h -> i b … c h, and of ids _ 2 (i c) -> i _ 2 c, of all ranks' keys n j _ 2 d.
    cut = lambda x, size: jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), (1, 2), (0, -2))
    cut_ids = lambda ids, size: jnp.moveaxis(ids.reshape(*ids.shape[:-1], -1, size), -2, -4)
    arrays = cut(q, c), cut(k, d), cut(v, d), cut_ids(q_ids, c), cut_ids(k_ids, d)
    out, lse = ring_forward(ring, *vary_alike(arrays))
    out, lse = jnp.moveaxis(out, (0, -2), (1, 2)), jnp.moveaxis(lse, (0, -1), (1, 2))
    return out.reshape(*q.shape[:-1], -1), lse.reshape(q.shape[:-1])


def _ring_of_kernels(axis, hop, hops, mask, scale, platform, arrays):
    """Attend as `ring_attention` does, by a platform's kernel, which cuts tiles itself."""
    q, k, v, *ids = arrays
    narrow, width = v.shape[-1], k.shape[-1]  # these kernels take values as wide as keys
    v = jnp.pad(v, [(0, 0)] * 3 + [(0, width - narrow)]) if narrow < width else v
    launches = {"tpu": flash_tpu.run_on_tpu, "cpu": flash.run_on_cpu, "gpu": flash.run_on_gpu}
    settings = dict(mask=mask, scale=scale, platform=platform, launch=launches[platform])
    forward, backward = (
        partial(f, **settings) for f in (flash.kernel_forward, flash.kernel_backward)
    )
    ring = _Ring(axis, hop, hops, forward, backward, kv_hop_waits=True)
    out, lse = ring_forward(ring, *vary_alike((q, k, v, *ids)))
    return (out[..., :narrow] if narrow < width else out), lse


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_forward(ring, q, k, v, q_ids, k_ids):
    """Return (out, lse) of this rank's queries. `k_ids` are the ids of every rank's keys.

        out, lse = 0, -inf
        repeat n times:
            merge attention to the keys into out, lse
            keys = the previous rank's (n-1 times; or m times, if a window ends there)

    K and V hop in one message, in their own dtype, KV heads only: each rank sends n-1 times 2 b t k h
    elements. A hop may run while a rank attends to the keys that it has. Saves out and lse."""

    def attend_and_hop(carry, hops):
        kv, partials = carry
        partials = ring.attend(q, *kv, q_ids, at(k_ids, _owner(ring, hops)), partials)
        return (_hop(ring, kv), partials), None

    carry: Any = (k, v), None
    if ring.hops:  # K and V in one array hop as one message
        start = jnp.stack((k, v)), _no_keys_yet(q, v)
        carry, _ = lax.scan(attend_and_hop, start, jnp.arange(ring.hops))
    kv, partials = carry
    out, lse = ring.attend(q, *kv, q_ids, at(k_ids, _owner(ring, ring.hops)), partials)
    return out.astype(q.dtype), lse


def _ring_forward_saving(ring, q, k, v, q_ids, k_ids):
    """Run `ring_forward`, and name what `ring_backward` reads for remat policies."""
    q, k, v = (checkpoint_name(x, IN) for x in (q, k, v))
    out, lse = ring_forward(ring, q, k, v, q_ids, k_ids)
    out, lse = checkpoint_name(out, OUT), checkpoint_name(lse, LSE)
    return (out, lse), (q, k, v, q_ids, k_ids, out, lse)


def ring_backward(ring, saved, grads):
    """Return the gradients of q, k and v.

        dq = 0; keys = the previous rank's
        repeat n-1 times:
            add the part of these keys to dq, dk, dv
            keys, dk, dv = the previous rank's
        add the part of this rank's own keys

    Scores are recomputed, and K and V make their hops again. The sum of a rank's dK and dV follows its keys,
    one hop behind: the first neighbour starts it, each rank adds its part, and after n-1 hops it arrives at
    the rank of the keys: n-1 times 2 b t k h float32 elements more. Where a window ends after m hops, the
    sum makes m as well: m-1 behind the keys, and one straight back to their rank."""
    (q, k, v, q_ids, k_ids, out, lse), (out_grad, lse_grad) = saved, grads
    dq, dkv = None, None
    delta = (out_grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - lse_grad
    # Of a query that saw no key any finite number will do: `attend_tile_grad` masks its weights to 0.
    terms = out_grad, jnp.where(jnp.isfinite(lse), lse, 0), delta

    def add_and_hop(carry, hops, last=False):
        """Add the part of keys that made so many hops. Their sum arrives now; None at their first rank."""
        kv, dq, dkv = carry
        dkv = None if dkv is None else _hop(ring, dkv)
        dq, *dkv_part = ring.attend_grad(q, *kv, q_ids, at(k_ids, _owner(ring, hops)), terms, dq)
        if ring.kv_hop_waits:
            kv, dkv_part = lax.optimization_barrier((kv, dkv_part))
        if not last:
            kv = _hop(ring, kv)
        return (kv, dq, jnp.stack(dkv_part) if dkv is None else dkv + jnp.stack(dkv_part)), None

    if ring.hops:
        # `after` lets these hops start only when delta, so the forward result, is there. Else they may run
        # beside the forward ring's, and simulated devices confuse two permutes of one shape, one of them in a
        # loop: wrong numbers or a deadlock in half of the runs (JAX 0.10.2).
        kv = _hop(ring, after(delta, jnp.stack((k, v))))
        carry, _ = add_and_hop((kv, _zeros(q), None), 1, last=ring.hops == 1)
        if ring.hops > 1:
            carry, _ = lax.scan(add_and_hop, carry, jnp.arange(2, ring.hops))
            carry, _ = add_and_hop(carry, ring.hops, last=True)
        _, dq, dkv = carry
    dq, dk, dv = ring.attend_grad(q, k, v, q_ids, at(k_ids, _owner(ring, 0)), terms, dq)
    if ring.hops:
        dk, dv = _hop(ring, dkv, len(k_ids) - ring.hops) + jnp.stack((dk, dv))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


ring_forward.defvjp(_ring_forward_saving, ring_backward)


def _owner(ring, hops):
    """Return the rank whose keys this rank has after so many hops."""
    return (lax.axis_index(ring.axis) - hops) % lax.axis_size(ring.axis) if ring.axis else 0


def _hop(ring, arrays, by=1):
    """Send arrays to the next rank, or to the rank ``by`` places further on, as one message."""
    with scope("keys b t -> the next rank"):
        return hop(arrays, ring.axis, ring.hop, by)


# --------------------------------------------------------------------------------------------- other methods


def full(q: Q, k: KV, v: V, *, mask: Mask = CAUSAL, **ids: Unpack[_Ids]) -> Partial:
    """Attend with the whole score matrix, b k r s t, which autodiff keeps: the reference of all tests."""
    q_ids, (k_ids,) = ids_of(mask, None, k.shape[1], **ids)
    q, k, v = (jnp.moveaxis(x, 1, -2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    out, lse = attend_tile(q, k, v, sees(mask, q_ids, k_ids), scale, mask.cap)
    return jnp.moveaxis(out.astype(q.dtype), -2, 1), jnp.moveaxis(lse, -1, 1)


def by_kernel(
    q: Q,
    k: KV,
    v: V,
    *,
    kernel: str,  # cudnn or xla
    contiguous: bool = False,
    whole: bool = False,
    mask: Mask = CAUSAL,
    **ids: Unpack[_Ids],
) -> tuple[Q, None]:
    """Attend with `jax.nn.dot_product_attention` by 'cudnn' (NVIDIA GPUs, 16 bits) or 'xla' (all scores).

    The mask is an array of b s t, one for all heads; with `contiguous` a kernel may skip later positions. No
    mask is built if rows are promised to be `whole`, one document each (`as_promised`). There is no lse: the
    kernel rounds it to q's dtype, too coarse to merge by, and drops its gradient (JAX 0.10 and 0.12).
    """
    attend = partial(jax.nn.dot_product_attention, implementation=kernel, is_causal=contiguous)
    if whole and contiguous:
        attend = partial(attend, local_window_size=mask.window and (mask.window - 1, 0))
    else:
        q_ids, (k_ids,) = ids_of(mask, None, k.shape[1], **ids)
        attend = partial(attend, mask=sees(mask, q_ids, k_ids)[:, None])
    out = attend(q.reshape(*q.shape[:2], -1, q.shape[-1]), k, v).reshape(q.shape)
    return checkpoint_name(out, OUT), None
