"""Attend: on one device, around a ring of devices, or to a cache that is cut over devices.

Everything here is made of two ideas. A *tile* of queries that attends to a tile of keys gives a partial
result: its softmax-weighted sum of values, and the log of the sum of its exponentials (lse). Two partial
results about the same queries *merge* into one, in any order:

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

Blockwise attention merges along the keys of one device; a ring merges what its neighbours hand on; decoding
merges over ranks. (Online softmax: Milakov and Gimelshein 2018; blocks and recomputation: Dao et al. 2022,
Rabe and Staats 2021; ring: Liu, Zaharia and Abbeel 2023.)

Which keys a query may see is decided by data: positions and segment (document) numbers travel with queries
and keys. So the order in which a sequence lies on the ranks (`llmpar.sequence_order`) is a permutation of
positions, and none of the code below knows it.

Dims: b batch, s query positions, t key positions, k KV heads, r query heads per KV head, h head width.
Inside, a sequence is cut into tiles, `[i, b, ..., c, h]`: tile i of c positions, heads before positions, as
matrix products want them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from llmpar.par import scope, vary_alike
from llmpar.sequence_order import CAUSAL, Mask, tile_length

Q = Float[Array, "b s k r h"]
KV = Float[Array, "b t k h"]
Partial = tuple[Float[Array, "b s k r h"], Float[Array, "b s k r"]]  # out in q's dtype, lse in float32
QueryIds = tuple[Int[Array | np.ndarray, "_ s"], Int[Array | np.ndarray, "_ s"] | None]
KeyIds = tuple[Int[Array | np.ndarray, "_ t"], Int[Array | np.ndarray, "_ t"] | None]

# Up to so many tiles are written out instead of looped over: 20 % faster on a CPU, 0.03 s of compiling for
# each pair of tiles.
FEW_ROWS, FEW_KEYS, FEW_IN_TRIANGLE = 2, 4, 8


class Ids(TypedDict, total=False):
    """What decides who sees whom. Positions are needed, segments optional; each may have batch 1."""

    q_positions_bs: Int[Array, "_ s"]
    k_positions_bt: Int[Array, "_ t"]
    q_segments_bs: Int[Array, "_ s"] | None
    k_segments_bt: Int[Array, "_ t"] | None


# ------------------------------------------------------------------------------------------ one pair of tiles


def sees(mask: Mask, q_ids: QueryIds, k_ids: KeyIds) -> Bool[Array | np.ndarray, "_ s t"] | None:
    """Return seen_bst for the (positions, segments) of queries and of keys, or None if everything is seen."""
    (q_positions, q_segments), (k_positions, k_segments) = q_ids, k_ids
    gap = q_positions[:, :, None] - k_positions[:, None, :]
    seen = mask.admits(gap, gap) if mask.causal or mask.window else None
    if q_segments is None or k_segments is None:
        return seen
    same = q_segments[:, :, None] == k_segments[:, None, :]
    return same if seen is None else seen & same


def may_see(mask: Mask, q_ids: QueryIds, k_ids: KeyIds) -> Bool[Array, ""]:
    """Tell from the extremes of both tiles whether any of these queries may see any of these keys."""
    (q_positions, q_segments), (k_positions, k_segments) = q_ids, k_ids
    live = mask.admits(q_positions.min(1) - k_positions.max(1), q_positions.max(1) - k_positions.min(1))
    if q_segments is not None and k_segments is not None:
        live &= (q_segments.max(1) >= k_segments.min(1)) & (q_segments.min(1) <= k_segments.max(1))
    return live.any()


def _attend_tiles(q, k, v, seen, scale):
    """Attend to one tile of keys: float32 (out_bkrsh, lse_bkrs). A row that sees no key gives 0 and -inf."""
    scores = jnp.einsum("bkrsh,bkth->bkrst", q, k, preferred_element_type=jnp.float32) * scale
    if seen is not None:
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    top = lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(jnp.float32).min))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    some = total > 0
    # Before the log and the quotient: a where after them leaves NaN in gradients.
    total = jnp.where(some, total, 1)
    out = jnp.einsum("bkrst,bkth->bkrsh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out / total, jnp.where(some, top + jnp.log(total), -jnp.inf)[..., 0]


def _attend_tiles_grad(q, k, v, seen, scale, out_grad, lse, delta):
    """Return float32 (dq, dk, dv) of one pair, its weights P recomputed from the lse of the whole row.

    dV = P' dO, dS = P (dO V' - delta), dQ = dS K, dK = dS' Q (Dao et al. 2022, appendix B), where delta is
    the row sum of dO O less the gradient of lse.
    """
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    weights = jnp.exp(product("bkrsh,bkth->bkrst", q, k) * scale - lse[..., None])
    if seen is not None:
        weights = jnp.where(seen[:, None, None], weights, 0)
    weights_grad = product("bkrsh,bkth->bkrst", out_grad, v)
    scores_grad = (weights * (weights_grad - delta[..., None]) * scale).astype(q.dtype)
    dq = product("bkrst,bkth->bkrsh", scores_grad, k)
    dk = product("bkrst,bkrsh->bkth", scores_grad, q)
    return dq, dk, product("bkrst,bkrsh->bkth", weights.astype(v.dtype), out_grad)


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
    some = total > 0
    total = jnp.where(some, total, 1)
    share_a, share_b = (weight_a / total)[..., None], (weight_b / total)[..., None]
    out = out_a.astype(jnp.float32) * share_a + out_b.astype(jnp.float32) * share_b
    return out.astype(out_a.dtype), jnp.where(some, top + jnp.log(total), -jnp.inf)


# ------------------------------------------------------------------------------------------------------ tiles


def _cut_into_tiles(
    q, k, v, q_block, k_block, *, q_positions_bs, k_positions_bt, q_segments_bs=None, k_segments_bt=None
):
    """Return the tiles of queries (q, ids) and of keys (k, v, ids), all varying over the same mesh axes."""
    if (q_segments_bs is None) != (k_segments_bt is None):
        raise ValueError("segments were given for only one of queries and keys; give both or neither")

    def cut(block, x):
        x = jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)
        return jnp.moveaxis(x, 2, -2) if x.ndim > 3 else x

    queries, keys = (q, (q_positions_bs, q_segments_bs)), (k, v, (k_positions_bt, k_segments_bt))
    return vary_alike(
        (jax.tree.map(partial(cut, q_block), queries), jax.tree.map(partial(cut, k_block), keys))
    )


def _join_tiles(out, lse):
    """Undo the cut: (out_bskrh, lse_bskr)."""
    out, lse = out.transpose(1, 0, 4, 2, 3, 5), lse.transpose(1, 0, 4, 2, 3)
    return tuple(x.reshape(x.shape[0], -1, *x.shape[3:]) for x in (out, lse))


def _tile(tree, i):
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _put_tile(tree, i, tile):
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0), tree, tile)


def _zeros(tree):
    return jax.tree.map(lambda x: vary_alike(jnp.zeros(x.shape, jnp.float32), x), tree)


@dataclass(frozen=True)
class _Options:
    """How to attend to every pair of tiles. `contiguous`: it is known beforehand which pairs are masked."""

    mask: Mask
    scale: float
    contiguous: bool = False
    axis: str | None = None
    overlap: bool = True


def _over_pairs(options, visit, rows, keys, row_sums, key_sums=()):
    """Call `visit(seen, row, key, row_sum, key_sum)` for the pairs of tiles that see one another, row by row.

    It returns the new sums of the row's tile and of the keys' tile. A `row` starts with (q, ids), a `key` is
    (k, v, ids).
    """
    (num_rows, *_, c, _), num_keys, mask = rows[0][0].shape, keys[0].shape[0], options.mask

    def at(i, j, *sums):
        row, key = _tile(rows, i), _tile(keys, j)
        ids = row[0][1], key[2]
        return lax.cond(may_see(mask, *ids), lambda: visit(sees(mask, *ids), row, key, *sums), lambda: sums)

    def step(pair, sums):
        places = pair // num_keys, pair % num_keys
        found = at(*places, *map(_tile, sums, places))
        return tuple(map(_put_tile, sums, places, found))

    if not options.contiguous and (num_rows > FEW_ROWS or num_keys > FEW_KEYS):
        return lax.fori_loop(0, num_rows * num_keys, step, (row_sums, key_sums))
    row_sums = [_tile(row_sums, i) for i in range(num_rows)]
    key_sums = [_tile(key_sums, j) for j in range(num_keys)]
    for i, j in np.ndindex(num_rows, num_keys):
        if not options.contiguous or mask.admits((i - j) * c - (c - 1), (i - j) * c + (c - 1)):
            row_sums[i], key_sums[j] = at(i, j, row_sums[i], key_sums[j])
    return tuple(jax.tree.map(lambda *tiles: jnp.stack(tiles), *sums) for sums in (row_sums, key_sums))


# ------------------------------------------------------------------------------------------------- the ring


def ring(
    q: Q,
    k: KV,
    v: KV,
    *,
    axis: str,
    overlap: bool = True,
    block: int | None = None,
    mask: Mask = CAUSAL,
    scale: float | None = None,
    **ids: Unpack[Ids],
) -> Partial:
    """Attend to the keys of all n ranks along `axis`, each of which holds s/n positions; call it in
    `jax.shard_map`.

        forward                                        backward
        out, lse = 0, -inf                             keys = the previous rank's; dq = 0
        repeat n times:                                repeat n times, with my own keys last:
            for each tile of queries, tile of keys:        for each tile of queries, tile of keys:
                if any query may see any key:                  if any query may see any key:
                    merge attention to it into out, lse            add its part to dq, dk, dv
            keys = the previous rank's (n-1 times)         keys, dk, dv = the previous rank's

    Forward, n-1 hops: K, V travel in their own dtype, KV heads only, with their ids: n-1 times 2 b t k h
    elements sent per rank.

    Backward: K and V make their n-1 hops again. The gradient of a rank's keys sets out one hop behind them,
    from the first neighbour that looked at them, gathers what each rank adds, and needs n-1 hops to come
    home, where the rank's own share is waiting: n-1 times 2 b t k h float32 besides.

    With `overlap` a hop may run while the present keys are looked at, and a second copy of K and V is held;
    without, it waits. Two tiles of `block` positions of which none may see the other are a branch not taken.
    """
    blocks = tile_length(block, q.shape[1]), tile_length(block, k.shape[1])
    options = _Options(mask, _scale(scale, q), axis=axis, overlap=overlap)
    return _join_tiles(*_ring_forward(options, *_cut_into_tiles(q, k, v, *blocks, **ids)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_forward(options, queries, keys):
    """Walk over hops and pairs of tiles: (out, lse) of the tiles of queries. Without an axis there is no
    hop."""

    def merge_pair(seen, row, key, done, _):
        ((q, _),), (k, v, _) = row, key
        return merge(*done, *_attend_tiles(q, k, v, seen, options.scale)), ()

    def hop(carry, _):
        keys, done = carry
        done, _ = _over_pairs(options, merge_pair, (queries,), keys, done)
        return (_hop(options.axis, keys if options.overlap else _after(done[1], keys)), done), None

    out = _zeros(queries[0])
    done = out, jnp.full_like(out[..., 0], -jnp.inf)
    if (n := _ring_size(options)) > 1:
        (keys, done), _ = lax.scan(hop, (keys, done), length=n - 1)
    (out, lse), _ = _over_pairs(options, merge_pair, (queries,), keys, done)
    return out.astype(queries[0].dtype), lse


def _ring_saving(options, queries, keys):
    out, lse = _ring_forward(options, queries, keys)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (out, lse), (queries, keys, out, lse)


def _ring_backward(options, saved, grads):
    """Walk the same way with recomputed weights: the gradients of `queries` and `keys`."""
    (queries, own, out, lse), (out_grad, lse_grad) = saved, grads
    delta = (out_grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - lse_grad
    # A row that saw nothing: any number, its weights are masked again.
    rows = queries, out_grad, jnp.where(jnp.isfinite(lse), lse, 0), delta

    def add_pair(seen, row, key, dq, dkv):
        ((q, _), *terms), (k, v, _) = row, key
        dq_more, *dkv_more = _attend_tiles_grad(q, k, v, seen, options.scale, *terms)
        return dq + dq_more, jax.tree.map(jnp.add, dkv, tuple(dkv_more))

    def step(carry, last=False):
        keys, dq, dkv = carry
        dkv = dkv and _hop(options.axis, dkv)
        dq, more = _over_pairs(options, add_pair, rows, keys, dq, _zeros(keys[:2]))
        if not last:
            keys = _hop(options.axis, keys if options.overlap else _after(dq[..., 0], keys))
        return keys, dq, jax.tree.map(jnp.add, dkv, more) if dkv else more

    carry = own, _zeros(queries[0]), None
    if (n := _ring_size(options)) > 1:
        # Nothing else would keep these hops from running beside the forward ring's, and simulated devices
        # confuse two permutes of one shape, one of them in a loop: wrong numbers or a deadlock in half of the
        # runs (JAX 0.10.2).
        first = _hop(options.axis, _after(delta, own))
        carry = step((first, *carry[1:]), last=n == 2)
        if n > 2:
            carry, _ = lax.scan(lambda carry, _: (step(carry), None), carry, length=n - 3)
            carry = step(carry, last=True)
    _, dq, (dk, dv) = step((own, *carry[1:]), last=True)
    return (dq.astype(queries[0].dtype), None), (dk.astype(own[0].dtype), dv.astype(own[1].dtype), None)


_ring_forward.defvjp(_ring_saving, _ring_backward)


def _ring_size(options):
    return lax.axis_size(options.axis) if options.axis else 1


def _hop(axis, held):
    n = lax.axis_size(axis)
    with scope("keys b t -> the next rank"):
        return jax.tree.map(lambda x: lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]), held)


def _after(known, held):
    """Return what is held, but not before `known` is. (A true dependence, because XLA for CPUs drops
    optimization barriers.)"""
    sane = known.max() <= jnp.inf  # a NaN, which shows anyway, makes zeros of what is held
    return jax.tree.map(lambda x: jnp.where(sane, x, jnp.zeros((), x.dtype)), held)


# ------------------------------------------------------------------------------------------------- one device


def full(
    q: Q, k: KV, v: KV, *, mask: Mask = CAUSAL, scale: float | None = None, **ids: Unpack[Ids]
) -> Partial:
    """Attend with the whole score matrix, which autodiff keeps: b k r s t numbers. The reference for all the
    others."""
    tiles = _cut_into_tiles(q, k, v, q.shape[1], k.shape[1], **ids)
    (q_tile, q_ids), (k_tile, v_tile, k_ids) = _tile(tiles, 0)
    out, lse = _attend_tiles(q_tile, k_tile, v_tile, sees(mask, q_ids, k_ids), _scale(scale, q))
    return _join_tiles(out.astype(q.dtype)[None], lse[None])


def blockwise(
    q: Q,
    k: KV,
    v: KV,
    *,
    block: int | None = None,
    contiguous: bool = False,
    mask: Mask = CAUSAL,
    scale: float | None = None,
    **ids: Unpack[Ids],
) -> Partial:
    """Attend tile by tile, as a ring of one rank: what `full` gives, in memory linear in the sequence.

    Saves out and lse; the backward pass recomputes scores. A pair of tiles of `block` positions that the
    extremes of positions and segments show to be masked is a branch not taken. `contiguous` promises that
    queries and keys are the same positions in rising order, without gaps (they may start again with each
    segment): then up to 8 tiles are written out, and pairs outside the mask not at all. Pass positions as
    arguments of the compiled function: what remains is fastest while it is branches, which XLA runs one after
    the other in the same memory.
    """
    s, t = q.shape[1], k.shape[1]
    q_block, k_block = tile_length(block, s), tile_length(block, t)
    if contiguous and s != t:
        raise ValueError(
            f"contiguous attention has queries and keys at the same positions; found {s} and {t} of them"
        )
    options = _Options(mask, _scale(scale, q), contiguous=contiguous and s <= FEW_IN_TRIANGLE * q_block)
    return _join_tiles(*_ring_forward(options, *_cut_into_tiles(q, k, v, q_block, k_block, **ids)))


def by_kernel(
    q: Q,
    k: KV,
    v: KV,
    *,
    kernel: Literal["cudnn", "xla"],
    contiguous: bool = False,
    mask: Mask = CAUSAL,
    **ids: Unpack[Ids],
) -> tuple[Q, None]:
    """Attend with `jax.nn.dot_product_attention`, 'cudnn' (NVIDIA GPUs, 16 bits) or 'xla', which keeps all
    scores.

    The mask is an array of b s t, one for all heads; with `contiguous` a kernel may skip what is later. No
    lse: the kernel rounds it to q's dtype, too coarse to merge by, and drops its gradient (JAX 0.10).
    """
    queries = ids["q_positions_bs"], ids.get("q_segments_bs")
    keys = ids["k_positions_bt"], ids.get("k_segments_bt")
    seen, q_bsnh = sees(mask, queries, keys), q.reshape(*q.shape[:2], -1, q.shape[-1])
    seen, causal = None if seen is None else seen[:, None], contiguous and mask.causal
    out = jax.nn.dot_product_attention(q_bsnh, k, v, mask=seen, is_causal=causal, implementation=kernel)
    return checkpoint_name(out.reshape(q.shape), "attention_out"), None


def _scale(scale, q):
    return q.shape[-1] ** -0.5 if scale is None else scale


# ---------------------------------------------------------------------------------------------------- a cache


def decode(q: Q, k_cache: KV, v_cache: KV, *, axis: str | tuple[str, ...], **options: Any) -> Q:
    """Attend from every rank's same few queries to a cache cut along `axis`; the cache stays where it is.

    One maximum of b s k r numbers and one sum of b s k r (h+1) for each call. A slot of the cache that is not
    written yet must have a position after every query's. No gradient: a maximum over ranks has none.
    `options`: those of `full` (mask, scale, ids).
    """
    out, lse = full(q, k_cache, v_cache, **options)
    if not axis:
        return out
    top = jnp.maximum(lax.pmax(lse, axis), jnp.finfo(jnp.float32).min)
    weight = jnp.exp(lse - top)[..., None]
    sums = lax.psum(jnp.concatenate([out.astype(jnp.float32) * weight, weight], -1), axis)
    out, total = sums[..., :-1], sums[..., -1:]
    return (out / jnp.where(total > 0, total, 1)).astype(q.dtype)
