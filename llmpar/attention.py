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

from llmpar.block import after, at, hop, put, scope, vary_alike
from llmpar.kernels import flash, flash_tpu
from llmpar.sequence_order import CAUSAL, Mask, tile_length

Q = Float[Array, "b s k r h"]
KV = Float[Array, "b t k h"]
Partial = tuple[Float[Array, "b s k r h"], Float[Array, "b s k r"]]  # out in q's dtype, lse in float32
QueryIds = tuple[Int[Array | np.ndarray, "_ s"], Int[Array | np.ndarray, "_ s"] | None]
KeyIds = tuple[Int[Array | np.ndarray, "_ t"], Int[Array | np.ndarray, "_ t"] | None]

IN, OUT, LSE = "attention_in", "attention_out", "attention_lse"
"""Names under which remat policies know what the backward pass of attention reads."""

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


def _cut_into_tiles(options, q, k, v, q_block, k_block, **ids):
    """Return the tiles of queries, with their ids, of keys (k, v), and of each rank's key ids, all varying
    over the same mesh axes."""
    q_ids, k_ids = _checked(options, k, **ids)

    def cut(block, x):
        x = jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)
        return jnp.moveaxis(x, 2, -2) if x.ndim > 3 else x

    by_rank = lambda x: x.reshape(_ring_size(options), -1, *x.shape[1:])
    queries = jax.tree.map(partial(cut, q_block), (q, q_ids))
    keys, k_ids = jax.tree.map(partial(cut, k_block), ((k, v), k_ids))
    return vary_alike((queries, keys, jax.tree.map(by_rank, k_ids)))


def _for_kernel(options, q, k, v, **ids):
    """Return the same as the kernel takes it: whole sequences, with ids ``b 2 s``."""

    def joined(positions, segments):
        segments = jnp.zeros_like(positions) if segments is None else segments
        return jnp.stack(jnp.broadcast_arrays(positions, segments), 1)

    q_ids, k_ids = (joined(*x) for x in _checked(options, k, **ids))
    by_rank = jnp.moveaxis(k_ids.reshape(*k_ids.shape[:2], _ring_size(options), -1), 2, 0)
    return (q, q_ids), (k, v), by_rank


def _checked(options, k, *, q_positions_bs, k_positions_bt, q_segments_bs=None, k_segments_bt=None):
    """Return (positions, segments) of queries and of all ranks' keys, which are gathered if those of one rank
    are given."""
    if (q_segments_bs is None) != (k_segments_bt is None):
        raise ValueError("segments were given for only one of queries and keys; give both or neither")
    k_ids, n = (k_positions_bt, k_segments_bt), _ring_size(options)
    if n > 1 and k_positions_bt.shape[1] == k.shape[1]:
        with scope("data b s -> ids b s"):
            k_ids = jax.tree.map(lambda x: lax.all_gather(x, options.axis, axis=1, tiled=True), k_ids)
    if (found := k_ids[0].shape[1]) != (want := k.shape[1] * n):
        raise ValueError(f"{want} keys need as many positions; found {found}")
    return (q_positions_bs, q_segments_bs), k_ids


def _join_tiles(out, lse):
    """Undo the cut: (out_bskrh, lse_bskr)."""
    out, lse = out.transpose(1, 0, 4, 2, 3, 5), lse.transpose(1, 0, 4, 2, 3)
    return tuple(x.reshape(x.shape[0], -1, *x.shape[3:]) for x in (out, lse))


def _zeros(tree):
    return jax.tree.map(lambda x: vary_alike(jnp.zeros(x.shape, jnp.float32), x), tree)


@dataclass(frozen=True)
class _Options:
    """How to attend. `contiguous`: it is known beforehand which pairs of tiles are masked. `platform`: by the
    kernel for these devices, which takes sequences as they are; else by tiles. `branch`: a pair that is not
    seen is a branch not taken, and not only masked."""

    mask: Mask
    scale: float
    contiguous: bool = False
    axis: str | None = None
    overlap: bool = True
    platform: str | None = None
    branch: bool = True
    hop: str = "permute"

    @property
    def kernel(self) -> flash.Setting:
        run = flash_tpu.run if self.platform == "tpu" else None
        return flash.Setting(self.mask, self.scale, self.platform or "cpu", run)


def _over_pairs(options, visit, rows, keys, row_sums, key_sums=()):
    """Call `visit(seen, row, key, row_sum, key_sum)` for the pairs of tiles that see one another, row by row.

    It returns the new sums of the row's tile and of the keys' tile. A `row` starts with (q, ids), a `key` is
    (k, v, ids).
    """
    (num_rows, *_, c, _), num_keys, mask = rows[0][0].shape, keys[0].shape[0], options.mask

    def meet(i, j, *sums):
        row, key = at(rows, i), at(keys, j)
        ids = row[0][1], key[2]
        if not options.branch:
            return visit(sees(mask, *ids), row, key, *sums)
        return lax.cond(may_see(mask, *ids), lambda: visit(sees(mask, *ids), row, key, *sums), lambda: sums)

    def step(pair, sums):
        places = pair // num_keys, pair % num_keys
        found = meet(*places, *map(at, sums, places))
        return tuple(map(put, sums, places, found))

    if not options.contiguous and (num_rows > FEW_ROWS or num_keys > FEW_KEYS):
        return lax.fori_loop(0, num_rows * num_keys, step, (row_sums, key_sums))
    row_sums = [at(row_sums, i) for i in range(num_rows)]
    key_sums = [at(key_sums, j) for j in range(num_keys)]
    for i, j in np.ndindex(num_rows, num_keys):
        if not options.contiguous or mask.admits((i - j) * c - (c - 1), (i - j) * c + (c - 1)):
            row_sums[i], key_sums[j] = meet(i, j, row_sums[i], key_sums[j])
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
    platform: str | None = None,
    branch: bool = True,
    hop: str = "permute",
    mask: Mask = CAUSAL,
    scale: float | None = None,
    **ids: Unpack[Ids],
) -> Partial:
    """Attend to the keys of all n ranks along `axis`, each of which holds s/n positions; call it in
    `jax.shard_map`. The ids of keys are those of all ranks, in their order, which are few and never travel;
    or of this rank, and then they are gathered.

        forward                                        backward
        out, lse = 0, -inf                             keys = the previous rank's; dq = 0
        repeat n times:                                repeat n times, with my own keys last:
            merge attention to the keys into out, lse      add their part to dq, dk, dv
            keys = the previous rank's (n-1 times)         keys, dk, dv = the previous rank's

    Forward, n-1 hops: K and V travel together, in their own dtype, KV heads only: n-1 times 2 b t k h
    elements sent per rank.

    Backward: K and V make their n-1 hops again. The gradient of a rank's keys sets out one hop behind them,
    from the first neighbour that looked at them, gathers what each rank adds, and needs n-1 hops to come
    home, where the rank's own share is waiting: n-1 times 2 b t k h float32 besides.

    With `overlap` a hop may run while the present keys are looked at, and a second copy of K and V is held;
    without, it waits. Tiles have `block` positions, and two of which none may see the other are a branch not
    taken; with a `platform`, its kernel attends (`llmpar.kernels.flash`). `hop` is that of a `Plan`.
    """
    blocks = tile_length(block, q.shape[1]), tile_length(block, k.shape[1])
    options = _Options(
        mask, _scale(scale, q), axis=axis, overlap=overlap, platform=platform, branch=branch, hop=hop
    )
    return _attend(options, q, k, v, blocks, **ids)


def _attend(options, q, k, v, blocks, **ids):
    """Lay sequences out as the kernel or as tiles take them, and walk around the ring."""
    if options.platform:
        return _ring_forward(options, *vary_alike(_for_kernel(options, q, k, v, **ids)))
    return _join_tiles(*_ring_forward(options, *_cut_into_tiles(options, q, k, v, *blocks, **ids)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_forward(options, queries, keys, ids):
    """Walk over hops: (out, lse) of the queries, which come with their ids. `keys` are (k, v), `ids` those of
    every rank's. Without an axis there is no hop."""

    def turn(carry, i):
        held, done = carry
        done = _look(options, queries, tuple(held), at(ids, _owner(options, i)), done)
        return (_hop(options, held if options.overlap else after(done[1], held)), done), None

    n, done = _ring_size(options), None
    if n > 1 or not options.platform:
        out = _zeros(queries[0])
        done = out, jnp.full_like(out[..., 0], -jnp.inf)
    if n > 1:
        (held, done), _ = lax.scan(turn, (jnp.stack(keys), done), jnp.arange(n - 1))
        keys = tuple(held)
    out, lse = _look(options, queries, keys, at(ids, _owner(options, n - 1)), done)
    return out.astype(queries[0].dtype), lse


def _look(options, queries, keys, ids, done):
    """Merge attention to some keys into what is done."""
    if options.platform:
        (q, q_ids), (k, v) = queries, keys
        return flash.forward(options.kernel, q, k, v, q_ids, ids, done)

    def merge_pair(seen, row, key, done, _):
        ((q, _),), (k, v, _) = row, key
        return merge(*done, *_attend_tiles(q, k, v, seen, options.scale)), ()

    return _over_pairs(options, merge_pair, (queries,), (*keys, ids), done)[0]


def _ring_saving(options, queries, keys, ids):
    q, k, v = (checkpoint_name(x, IN) for x in (queries[0], *keys))
    out, lse = _ring_forward(options, (q, queries[1]), (k, v), ids)
    out, lse = checkpoint_name(out, OUT), checkpoint_name(lse, LSE)
    return (out, lse), ((q, queries[1]), (k, v), ids, out, lse)


def _ring_backward(options, saved, grads):
    """Walk the same way with recomputed weights: the gradients of `queries` and `keys`."""
    (queries, own, ids, out, lse), (out_grad, lse_grad) = saved, grads
    delta = (out_grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - lse_grad
    # A row that saw nothing: any number, its weights are masked again.
    rows = queries, out_grad, jnp.where(jnp.isfinite(lse), lse, 0), delta

    def step(carry, i, last=False):
        held, dq, dkv = carry
        dkv = dkv if dkv is None else _hop(options, dkv)
        dq, more = _look_back(options, rows, tuple(held), at(ids, _owner(options, i)), dq)
        if options.platform:  # one hop beside each of its two kernels: a GPU has one on its way at a time
            held, more = lax.optimization_barrier((held, more))
        if not last:
            held = _hop(options, held if options.overlap else after(dq[..., 0], held))
        return held, dq, jnp.stack(more) if dkv is None else dkv + jnp.stack(more)

    n, dq, dkv = _ring_size(options), None if options.platform else _zeros(queries[0]), None
    if n > 1:
        # Nothing else would keep these hops from running beside the forward ring's, and simulated devices
        # confuse two permutes of one shape, one of them in a loop: wrong numbers or a deadlock in half of the
        # runs (JAX 0.10.2).
        first = _hop(options, after(delta, jnp.stack(own)))
        carry = step((first, _zeros(queries[0]), None), 1, last=n == 2)
        if n > 2:
            carry, _ = lax.scan(lambda carry, i: (step(carry, i), None), carry, jnp.arange(2, n - 1))
            carry = step(carry, n - 1, last=True)
        _, dq, dkv = carry
    dq, more = _look_back(options, rows, own, at(ids, _owner(options, 0)), dq)
    dk, dv = more if dkv is None else _hop(options, dkv) + jnp.stack(more)
    grads = dq.astype(queries[0].dtype), dk.astype(own[0].dtype), dv.astype(own[1].dtype)
    return (grads[0], None), grads[1:], None


def _look_back(options, rows, keys, ids, dq):
    """Add what some keys give to dq, and return it with the float32 gradients of these keys."""
    if options.platform:
        ((q, q_ids), *terms), (k, v) = rows, keys
        dq, *more = flash.backward(options.kernel, q, k, v, q_ids, ids, tuple(terms), dq)
        return dq, tuple(more)

    def add_pair(seen, row, key, dq, dkv):
        ((q, _), *terms), (k, v, _) = row, key
        dq_more, *dkv_more = _attend_tiles_grad(q, k, v, seen, options.scale, *terms)
        return dq + dq_more, jax.tree.map(jnp.add, dkv, tuple(dkv_more))

    return _over_pairs(options, add_pair, rows, (*keys, ids), dq, _zeros(keys))


_ring_forward.defvjp(_ring_saving, _ring_backward)


def _ring_size(options):
    return lax.axis_size(options.axis) if options.axis else 1


def _owner(options, hops):
    """The rank whose keys are here after so many hops."""
    return (lax.axis_index(options.axis) - hops) % _ring_size(options) if options.axis else 0


def _hop(options, held):
    """Hand everything on in one message: XLA for GPUs overlaps one collective at a time with work."""
    with scope("keys b t -> the next rank"):
        return hop(held, options.axis, options.hop)


# ------------------------------------------------------------------------------------------------- one device


def full(
    q: Q, k: KV, v: KV, *, mask: Mask = CAUSAL, scale: float | None = None, **ids: Unpack[Ids]
) -> Partial:
    """Attend with the whole score matrix, which autodiff keeps: b k r s t numbers. The reference for all the
    others."""
    options = _Options(mask, _scale(scale, q))
    queries, keys, ids_by_rank = _cut_into_tiles(options, q, k, v, q.shape[1], k.shape[1], **ids)
    (q_tile, q_ids), (k_tile, v_tile), k_ids = at((queries, keys, at(ids_by_rank, 0)), 0)
    out, lse = _attend_tiles(q_tile, k_tile, v_tile, sees(mask, q_ids, k_ids), options.scale)
    return _join_tiles(out.astype(q.dtype)[None], lse[None])


def blockwise(
    q: Q,
    k: KV,
    v: KV,
    *,
    block: int | None = None,
    contiguous: bool = False,
    branch: bool = True,
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
    few = s <= FEW_IN_TRIANGLE * q_block
    options = _Options(mask, _scale(scale, q), contiguous=contiguous and few, branch=branch)
    return _attend(options, q, k, v, (q_block, k_block), **ids)


def fused(
    q: Q, k: KV, v: KV, *, platform: str, mask: Mask = CAUSAL, scale: float | None = None, **ids: Unpack[Ids]
) -> Partial:
    """Attend by the kernel of `llmpar.kernels.flash` for a platform: what `full` gives, and what
    `blockwise` saves. Interpreted where the platform is ``cpu``."""
    return _attend(_Options(mask, _scale(scale, q), platform=platform), q, k, v, (), **ids)


def by_kernel(
    q: Q,
    k: KV,
    v: KV,
    *,
    kernel: Literal["cudnn", "xla"],
    contiguous: bool = False,
    whole: bool = False,
    mask: Mask = CAUSAL,
    **ids: Unpack[Ids],
) -> tuple[Q, None]:
    """Attend with `jax.nn.dot_product_attention`, 'cudnn' (NVIDIA GPUs, 16 bits) or 'xla', which keeps all
    scores.

    The mask is an array of b s t, one for all heads; with `contiguous` a kernel may skip what is later. There
    is none where rows are promised to be `whole`, one document each, and causal: a row that is not gives NaN.
    No lse: the kernel rounds it to q's dtype, too coarse to merge by, and drops its gradient (JAX 0.10).
    """
    queries = ids["q_positions_bs"], ids.get("q_segments_bs")
    keys = ids["k_positions_bt"], ids.get("k_segments_bt")
    attend = partial(jax.nn.dot_product_attention, implementation=kernel)
    if whole and contiguous and mask.causal:
        if keys[1] is not None:
            kept = (keys[1] == keys[1][:, :1]).all(1)
            q = q * jnp.where(kept, 1, jnp.nan).astype(q.dtype)[:, None, None, None, None]
        window = mask.window and (mask.window - 1, 0)
        attend = partial(attend, is_causal=True, local_window_size=window)
    else:
        seen = sees(mask, queries, keys)
        mask_b1st = None if seen is None else seen[:, None]
        attend = partial(attend, mask=mask_b1st, is_causal=contiguous and mask.causal)
    out = attend(q.reshape(*q.shape[:2], -1, q.shape[-1]), k, v).reshape(q.shape)
    return checkpoint_name(out, OUT), None


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
