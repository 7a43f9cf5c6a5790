"""Attend: on one device, around a ring of devices, or to a cache that is cut over devices.

Everything here is made of two ideas. A *tile* of queries that attends to a tile of keys gives a partial
result: its softmax-weighted sum of values, and the log of the sum of its exponentials (lse). Two partial
results about the same queries *merge* into one, in any order:

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

Blockwise attention merges along the keys of one device; a ring merges what its neighbours hand on; decoding
merges over ranks. (Online softmax: Milakov and Gimelshein 2018; blocks and recomputation: Dao et al. 2022,
Rabe and Staats 2021; ring: Liu, Zaharia and Abbeel 2023.)

Which keys a query may see is decided by data: positions and segment (document) numbers travel with queries
and keys. So the order of a sequence on the ranks (`llmpar.plan.sequence_order`) is a permutation of
positions, and none of the code below knows it.

A model asks `choose` for its attention. By default that is `ring`, which cuts sequences into tiles and walks
from rank to rank (`_ring`). At each, `blockwise` meets the pairs of tiles, and `attend_tile` multiplies.

Dims: b batch, s query positions, t key positions, k KV heads, r query heads per KV head, h head width. Ids
are `b 2 s`: positions, then segments. Tiles, i of c queries and j of d keys, have heads before positions, as
matrix products want them: `i b k r c h`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from llmpar.kernels import flash, flash_tpu
from llmpar.parallel.collectives import after, at, hop, put, scope, vary_alike
from llmpar.parallel.modes import Solo
from llmpar.plan.sequence_order import CAUSAL, Mask, seen_tiles, tile_length

Q = Float[Array, "b s k r h"]
KV = Float[Array, "b t k h"]
Partial = tuple[Float[Array, "b s k r h"], Float[Array, "b s k r"]]  # out in q's dtype, lse in float32
Seen = Bool[Array, "_ s t"]
QTile = Float[Array, "b k r s h"]
KVTile = Float[Array, "b k t h"]
Row = Float[Array, "b k r s"]
QTiles = Float[Array, "i b k r c h"]
KVTiles = Float[Array, "j b k d h"]
Rows = Float[Array, "i b k r c"]
QIds = Int[Array, "i _ 2 c"]
KIds = Int[Array, "j _ 2 d"]

IN, OUT, LSE = "attention_in", "attention_out", "attention_lse"
"""Names under which remat policies know what the backward pass of attention reads."""

# So many tiles are written out, not looped over: 20 % faster on a CPU, 0.03 s of compiling for each pair.
FEW_ROWS, FEW_KEYS, FEW_IN_TRIANGLE = 2, 4, 8


class Ids(TypedDict, total=False):
    """What decides who sees whom. Positions are needed, segments optional; each may have batch 1."""

    q_positions_bs: Int[Array, "_ s"]
    q_segments_bs: Int[Array, "_ s"] | None
    k_positions_bt: Int[Array, "_ t"]
    k_segments_bt: Int[Array, "_ t"] | None


def choose(par: Solo, mask: Mask) -> Callable[..., Q]:
    """Return what the plan wants, as a function of q, k, v and the `Ids` in their order."""
    plan, axes = par.plan, par.axes("keys s")
    run: Callable
    if (kernel := plan.attention_kernel) in ("cudnn", "xla"):
        run = partial(by_kernel, kernel=kernel, contiguous=plan.in_order, whole=plan.documents == "whole")
    else:
        run = partial(
            ring,
            axis=axes[0] if axes else None,
            block=plan.attention_block,
            contiguous=plan.in_order and not axes,
            platform=par.platform if kernel == "flash" else None,
            branch=par.platform != "gpu",
            hop=plan.hop,
        )
    named = lambda ids: dict(zip(Ids.__annotations__, ids, strict=True))
    return lambda q, k, v, *ids: run(q, k, v, mask=mask, **named(ids))[0]


def as_promised(par: Solo, mask: Mask, positions_bs: Array, segments_bs: Array) -> Bool[Array, " b"]:
    """Tell of each row whether what `choose` returns may leave out what is later in it: positions rise, or
    segments do and positions in each. A row that is promised to be whole has one segment and, for a window,
    no gap. (A cache, a ring and the kernel of `flash` ask the ids, and trust nothing.)"""
    plan, step, turn = par.plan, jnp.diff(positions_bs), jnp.diff(segments_bs)
    if par.cache or plan.attention_kernel == "flash" or not plan.in_order or par.axes("keys s"):
        return jnp.ones(len(step), bool)
    if plan.documents == "whole" and plan.attention_kernel != "portable":
        return ((turn == 0) & ((step == 1) if mask.window else (step > 0))).all(1)
    return (step > 0).all(1) | ((turn > 0) | (turn == 0) & (step > 0)).all(1)


# ------------------------------------------------------------------------------------------ one pair of tiles


def ids_of(
    axis: str | None, t: int, *, q_positions_bs, k_positions_bt, q_segments_bs=None, k_segments_bt=None
) -> tuple[Int[Array, "_ 2 s"], Int[Array, "n _ 2 t"]]:
    """Return the ids of queries, and of the `t` keys of each rank along an axis, which are gathered if those
    of one rank are given. Without segments all are of one document."""
    if (q_segments_bs is None) != (k_segments_bt is None):
        raise ValueError("segments were given for only one of queries and keys; give both or neither")
    n, keys = lax.axis_size(axis) if axis else 1, (k_positions_bt, k_segments_bt)
    if n > 1 and k_positions_bt.shape[1] == t:
        with scope("data b s -> ids b s"):
            keys = jax.tree.map(lambda x: lax.all_gather(x, axis, axis=1, tiled=True), keys)
    q_ids, k_ids = (
        jnp.stack(jnp.broadcast_arrays(at, jnp.zeros_like(at) if of is None else of), 1)
        for at, of in ((q_positions_bs, q_segments_bs), keys)
    )
    return q_ids, jnp.moveaxis(k_ids.reshape(*k_ids.shape[:2], n, t), 2, 0)


def sees(mask: Mask, q_ids: Int[Array, "_ 2 s"], k_ids: Int[Array, "_ 2 t"]) -> Seen:
    """Return which queries see which keys: those of their document that the mask admits."""
    gap = q_ids[:, 0, :, None] - k_ids[:, 0, None]
    return mask.admits(gap, gap) & (q_ids[:, 1, :, None] == k_ids[:, 1, None])


def attend_tile(q: QTile, k: KVTile, v: KVTile, seen: Seen, scale: float) -> tuple[QTile, Row]:
    """Attend to one tile of keys: float32 (out, lse). A row that sees no key gives 0 and -inf."""
    scores = jnp.einsum("bkrsh,bkth->bkrst", q, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    top = lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(jnp.float32).min))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    some = total > 0
    # Before the log and the quotient: a where after them leaves NaN in gradients.
    total = jnp.where(some, total, 1)
    out = jnp.einsum("bkrst,bkth->bkrsh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out / total, jnp.where(some, top + jnp.log(total), -jnp.inf)[..., 0]


def attend_tile_grad(
    q: QTile, out_grad: QTile, lse: Row, delta: Row, k: KVTile, v: KVTile, seen: Seen, scale: float
) -> tuple[QTile, KVTile, KVTile]:
    """Return float32 (dq, dk, dv) of one pair, its weights P recomputed from the lse of the whole row.

    dV = P' dO, dS = P (dO V' - delta), dQ = dS K, dK = dS' Q (Dao et al. 2022, appendix B), where delta is
    the row sum of dO O less the gradient of lse.
    """
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    weights = jnp.exp(product("bkrsh,bkth->bkrst", q, k) * scale - lse[..., None])
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


# -------------------------------------------------------------------------------------- all tiles of a device


@dataclass(frozen=True)
class _How(flash.Setting):
    """How to attend: by the kernel for a `platform`, or by tiles if there is none; the rest as in `ring`."""

    axis: str | None = None
    contiguous: bool = False
    branch: bool = True
    hop: str = "permute"


def over_pairs(
    how: _How, meet: Callable, q_ids: QIds, k_ids: KIds, rows: Any, keys: Any, row_sums: Any, key_sums: Any
) -> tuple[Any, Any]:
    """Add up over the pairs of tiles that see one another, row by row: `meet(seen, row, key, row_sum,
    key_sum)` gives the new sums of a row's tile and of a keys' tile. A pair that is not seen is a branch not
    taken; without `how.branch` it is masked."""
    (num_rows, _, _, c), num_keys = q_ids.shape, len(k_ids)
    some = seen_tiles(how.mask, q_ids, k_ids)[0].any(-1)

    def step(i, j, *sums):
        row, key, ids = at(rows, i), at(keys, j), (at(q_ids, i), at(k_ids, j))
        visit = lambda: meet(sees(how.mask, *ids), row, key, *sums)
        return lax.cond(some[i, j], visit, lambda: sums) if how.branch else visit()

    def turn(pair, sums):
        places = pair // num_keys, pair % num_keys
        return tuple(map(put, sums, places, step(*places, *map(at, sums, places))))

    if not how.contiguous and (num_rows > FEW_ROWS or num_keys > FEW_KEYS):
        return lax.fori_loop(0, num_rows * num_keys, turn, (row_sums, key_sums))
    row_sums = [at(row_sums, i) for i in range(num_rows)]
    key_sums = [at(key_sums, j) for j in range(num_keys)]
    for i, j in np.ndindex(num_rows, num_keys):
        if not how.contiguous or how.mask.admits((i - j) * c - (c - 1), (i - j) * c + (c - 1)):
            row_sums[i], key_sums[j] = step(i, j, row_sums[i], key_sums[j])
    return tuple(jax.tree.map(lambda *tiles: jnp.stack(tiles), *sums) for sums in (row_sums, key_sums))


def blockwise(
    how: _How, q: QTiles, k: KVTiles, v: KVTiles, q_ids: QIds, k_ids: KIds, done: tuple | None = None
) -> tuple[QTiles, Rows]:
    """Merge attention to some keys into what is done, tile by tile: float32 (out, lse)."""

    def meet(seen, row, key, done, _):
        (q,), (k, v), (out, lse) = row, key, done
        return merge(out, lse, *attend_tile(q, k, v, seen, how.scale)), ()

    return over_pairs(how, meet, q_ids, k_ids, (q,), (k, v), done or _nothing(q), ())[0]


def blockwise_grad(
    how: _How, q: QTiles, k: KVTiles, v: KVTiles, q_ids: QIds, k_ids: KIds, terms: tuple, dq: QTiles | None
) -> tuple[QTiles, KVTiles, KVTiles]:
    """Add what some keys give to dq, and return it with the float32 gradients of these keys. Of each query
    the terms are dO, the lse of its whole row, and delta (`attend_tile_grad`)."""

    def meet(seen, row, key, *sums):
        (q, out_grad, lse, delta), (k, v) = row, key
        dq, dk, dv = attend_tile_grad(q, out_grad, lse, delta, k, v, seen, how.scale)
        return jax.tree.map(jnp.add, sums, (dq, (dk, dv)))

    sums = _zeros(q) if dq is None else dq, (_zeros(k), _zeros(v))
    dq, (dk, dv) = over_pairs(how, meet, q_ids, k_ids, (q, *terms), (k, v), *sums)
    return dq, dk, dv


def _zeros(x):
    return vary_alike(jnp.zeros(x.shape, jnp.float32), x)


def _nothing(q):
    """The (out, lse) of queries that have seen no key yet."""
    out = _zeros(q)
    return out, jnp.full_like(out[..., 0], -jnp.inf)


# ------------------------------------------------------------------------------------------------- the ring


def ring(
    q: Q,
    k: KV,
    v: KV,
    *,
    axis: str | None = None,
    block: int | None = None,
    contiguous: bool = False,
    platform: str | None = None,
    branch: bool = True,
    hop: str = "permute",
    mask: Mask = CAUSAL,
    **ids: Unpack[Ids],
) -> Partial:
    """Attend to the keys of all n ranks along `axis`, each of which holds s/n positions, in `jax.shard_map`.
    Without an axis there is one rank: what `full` gives, in memory linear in the sequence. The ids of keys
    are those of all ranks, in their order; or of this rank, and then they are gathered.

        forward                                        backward
        out, lse = 0, -inf                             keys = the previous rank's; dq = 0
        repeat n times:                                repeat n times, with my own keys last:
            merge attention to the keys into out, lse      add their part to dq, dk, dv
            keys = the previous rank's (n-1 times)         keys, dk, dv = the previous rank's

    Forward, n-1 hops: K and V travel together, in their own dtype, KV heads only: n-1 times 2 b t k h
    elements sent per rank. A hop may run while the present keys are looked at. Saves out and lse.

    Backward: scores are recomputed, and K and V make their n-1 hops again. The gradient of a rank's keys sets
    out one hop behind them, from the first neighbour that looked at them, gathers what each rank adds, and
    needs n-1 hops to come home, where the rank's own share is waiting: n-1 times 2 b t k h float32 besides.

    Tiles have `block` positions. Two of which the extremes of positions and segments show that none may see
    the other are a branch not taken (masked, without `branch`). `contiguous` promises that queries and keys
    are the same, in order (`as_promised`): then up to 8 tiles are written out, and pairs outside the mask not
    at all. With a `platform`, its kernel attends (`llmpar.kernels.flash`; interpreted where that is ``cpu``).
    `hop` is that of a `Plan`.
    """
    s, t = q.shape[1], k.shape[1]
    assert s == t or not contiguous
    q_ids, k_ids = ids_of(axis, t, **ids)
    # A tile must not join the two parts that zigzag deals to a rank.
    block = None if axis and block and block >= s else block
    c, d = tile_length(block, s), tile_length(block, t)
    few = contiguous and s <= FEW_IN_TRIANGLE * c
    run = {"tpu": flash_tpu.run, "cpu": flash.plain}.get(platform or "", flash.run)
    how = _How(mask, q.shape[-1] ** -0.5, platform, run, axis, few, branch, hop)
    if platform:
        return _ring(how, *vary_alike((q, k, v, q_ids, k_ids)))

    cut = lambda x, size: jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), (1, 2), (0, -2))
    cut_ids = lambda ids, size: jnp.moveaxis(ids.reshape(*ids.shape[:-1], -1, size), -2, -4)
    tiles = cut(q, c), cut(k, d), cut(v, d), cut_ids(q_ids, c), cut_ids(k_ids, d)
    out, lse = _ring(how, *vary_alike(tiles))
    out, lse = jnp.moveaxis(out, (0, -2), (1, 2)), jnp.moveaxis(lse, (0, -1), (1, 2))
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(how, q, k, v, q_ids, k_ids):
    """Walk from rank to rank: (out, lse) of the queries. `k_ids` are those of every rank's keys."""
    attend: Callable = flash.forward if how.platform else blockwise

    def turn(carry, hops):
        keys, done = carry
        done = attend(how, q, *keys, q_ids, at(k_ids, _owner(how, hops)), done)
        return (_hop(how, keys), done), None

    n = len(k_ids)
    carry: Any = (k, v), None
    if n > 1:
        carry, _ = lax.scan(turn, (jnp.stack((k, v)), _nothing(q)), jnp.arange(n - 1))
    keys, done = carry
    out, lse = attend(how, q, *keys, q_ids, at(k_ids, _owner(how, n - 1)), done)
    return out.astype(q.dtype), lse


def _ring_saving(how, q, k, v, q_ids, k_ids):
    q, k, v = (checkpoint_name(x, IN) for x in (q, k, v))
    out, lse = _ring(how, q, k, v, q_ids, k_ids)
    out, lse = checkpoint_name(out, OUT), checkpoint_name(lse, LSE)
    return (out, lse), (q, k, v, q_ids, k_ids, out, lse)


def _ring_grad(how, saved, grads):
    """Walk the same way with recomputed weights: the gradients of q, k and v."""
    (q, k, v, q_ids, k_ids, out, lse), (out_grad, lse_grad) = saved, grads
    delta = (out_grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - lse_grad
    # A row that saw nothing: any number, its weights are masked again.
    terms = out_grad, jnp.where(jnp.isfinite(lse), lse, 0), delta
    attend_grad: Callable = flash.backward if how.platform else blockwise_grad

    def turn(carry, hops, last=False):
        keys, dq, dkv = carry
        dkv = dkv if dkv is None else _hop(how, dkv)
        dq, *more = attend_grad(how, q, *keys, q_ids, at(k_ids, _owner(how, hops)), terms, dq)
        if how.platform:  # one hop beside each of its two kernels: a GPU has one on its way at a time
            keys, more = lax.optimization_barrier((keys, more))
        if not last:
            keys = _hop(how, keys)
        return keys, dq, jnp.stack(more) if dkv is None else dkv + jnp.stack(more)

    n, dq, dkv = len(k_ids), None, None
    if n > 1:
        # Nothing else would keep these hops from running beside the forward ring's, and simulated devices
        # confuse two permutes of one shape, one of them in a loop: wrong numbers or a deadlock in half of the
        # runs (JAX 0.10.2).
        first = _hop(how, after(delta, jnp.stack((k, v))))
        carry = turn((first, _zeros(q), None), 1, last=n == 2)
        if n > 2:
            carry, _ = lax.scan(lambda carry, hops: (turn(carry, hops), None), carry, jnp.arange(2, n - 1))
            carry = turn(carry, n - 1, last=True)
        _, dq, dkv = carry
    dq, dk, dv = attend_grad(how, q, k, v, q_ids, at(k_ids, _owner(how, 0)), terms, dq)
    if dkv is not None:
        dk, dv = _hop(how, dkv) + jnp.stack((dk, dv))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_ring.defvjp(_ring_saving, _ring_grad)


def _owner(how, hops):
    """The rank whose keys are here after so many hops."""
    return (lax.axis_index(how.axis) - hops) % lax.axis_size(how.axis) if how.axis else 0


def _hop(how, held):
    """Hand everything on in one message: XLA for GPUs overlaps one collective at a time with work."""
    with scope("keys b t -> the next rank"):
        return hop(held, how.axis, how.hop)


# ------------------------------------------------------------------------------------------------- other ways


def full(q: Q, k: KV, v: KV, *, mask: Mask = CAUSAL, **ids: Unpack[Ids]) -> Partial:
    """Attend with the whole score matrix, b k r s t, which autodiff keeps: the reference for all others."""
    q_ids, (k_ids,) = ids_of(None, k.shape[1], **ids)
    q, k, v = (jnp.moveaxis(x, 1, -2) for x in (q, k, v))
    out, lse = attend_tile(q, k, v, sees(mask, q_ids, k_ids), q.shape[-1] ** -0.5)
    return jnp.moveaxis(out.astype(q.dtype), -2, 1), jnp.moveaxis(lse, -1, 1)


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
    """Attend with `jax.nn.dot_product_attention` by 'cudnn' (NVIDIA GPUs, 16 bits) or 'xla' (all scores).

    The mask is an array of b s t, one for all heads; with `contiguous` a kernel may skip what is later. There
    is none where rows are promised to be `whole`, one document each (`as_promised`). No lse: the kernel
    rounds it to q's dtype, too coarse to merge by, and drops its gradient (JAX 0.10 and 0.12).
    """
    attend = partial(jax.nn.dot_product_attention, implementation=kernel, is_causal=contiguous)
    if whole and contiguous:
        attend = partial(attend, local_window_size=mask.window and (mask.window - 1, 0))
    else:
        q_ids, (k_ids,) = ids_of(None, k.shape[1], **ids)
        attend = partial(attend, mask=sees(mask, q_ids, k_ids)[:, None])
    out = attend(q.reshape(*q.shape[:2], -1, q.shape[-1]), k, v).reshape(q.shape)
    return checkpoint_name(out, OUT), None


def decode(q: Q, k_cache: KV, v_cache: KV, *, axis: str | tuple[str, ...], **options: Any) -> Q:
    """Attend from every rank's same few queries to a cache cut along `axis`; the cache stays where it is.

    One maximum of b s k r numbers and one sum of b s k r (h+1) for each call. A slot of the cache that is not
    written yet must have a position after every query's. No gradient: a maximum over ranks has none.
    `options` are those of `full`.
    """
    out, lse = full(q, k_cache, v_cache, **options)
    if not axis:
        return out
    with scope("cache b s k r +t -> attention b s k r"):
        top = jnp.maximum(lax.pmax(lse, axis), jnp.finfo(jnp.float32).min)
        weight = jnp.exp(lse - top)[..., None]
        sums = lax.psum(jnp.concatenate([out.astype(jnp.float32) * weight, weight], -1), axis)
    out, total = sums[..., :-1], sums[..., -1:]
    return (out / jnp.where(total > 0, total, 1)).astype(q.dtype)
