"""Attend: on one device, around a ring of devices, or with heads in place of positions.

Everything here is made of two ideas. A *block* of queries that attends to a block of keys gives a partial
result: its softmax-weighted sum of values, and the log of the sum of its exponentials (lse). Two partial
results about the same queries *merge* into one, in any order:

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

Blockwise attention merges along the keys of one device; a ring merges what its neighbours hand on; decoding
merges over ranks. (Online softmax: Milakov and Gimelshein 2018; blocks and recomputation: Dao et al. 2022,
Rabe and Staats 2021; ring: Liu, Zaharia and Abbeel 2023.)

Which keys a query may see is decided by data: positions and segment (document) numbers travel with queries
and keys. So the order in which a sequence lies on the ranks is a permutation of positions, and none of the
code below knows it.

Dims: b batch, s query positions, t key positions, k KV heads, r query heads per KV head, h head width.
    Inside, a sequence
is cut into tiles, `[i, b, ..., c, h]`: tile i of c positions, heads before positions, as matrix products want
them.
"""

import math
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from llmpar.par import scope, vary, varying

Q = Float[Array, "b s k r h"]
KV = Float[Array, "b t k h"]
Partial = tuple[Float[Array, "b s k r h"], Float[Array, "b s k r"]]  # out in q's dtype, lse in float32

# Loops over tiles up to these lengths are unrolled: 20 % faster on a CPU, 0.03 s of compiling for each pair
# of tiles.
FEW_ROWS, FEW_KEYS, FEW_IN_TRIANGLE = 2, 4, 8


class Ids(TypedDict, total=False):
    """What decides who sees whom. Positions are needed, segments optional; each may have batch 1."""

    q_positions_bs: Int[Array, "_ s"]
    k_positions_bt: Int[Array, "_ t"]
    q_segments_bs: Int[Array, "_ s"] | None
    k_segments_bt: Int[Array, "_ t"] | None


@dataclass(frozen=True)
class Mask:
    """Say which keys a query may see, whatever the positions; two of different segments never see each other.

    `causal`: no key after the query. `window`: none `window` or more positions before it (nor after it, if
    not causal).
    """

    causal: bool = True
    window: int | None = None

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window={self.window} hides every key, the query's own too; use 1 or more, or None"
            )

    def admits(self, low, high):
        """Tell whether a gap (query minus key position) somewhere in [low, high] can be seen; exact if low is
        high."""
        seen = low <= high
        if self.causal:
            seen &= high >= 0
        elif self.window:
            seen &= high > -self.window
        return seen & (low < self.window) if self.window else seen


# ------------------------------------------------------------------------------------------ one block of each


def sees(mask, q_ids, k_ids):
    """Return seen_bst for the (positions, segments) of queries and of keys, or None if everything is seen."""
    (q_positions, q_segments), (k_positions, k_segments) = q_ids, k_ids
    gap = q_positions[:, :, None] - k_positions[:, None, :]
    seen = mask.admits(gap, gap) if mask.causal or mask.window else None
    if q_segments is None:
        return seen
    same = q_segments[:, :, None] == k_segments[:, None, :]
    return same if seen is None else seen & same


def may_see(mask, q_ids, k_ids):
    """Tell from the extremes of both blocks whether any of these queries may see any of these keys."""
    (q_positions, q_segments), (k_positions, k_segments) = q_ids, k_ids
    live = mask.admits(q_positions.min(1) - k_positions.max(1), q_positions.max(1) - k_positions.min(1))
    if q_segments is not None:
        live &= (q_segments.max(1) >= k_segments.min(1)) & (q_segments.min(1) <= k_segments.max(1))
    return live.any()


def _scores(q_bkrsh, k_bkth, scale):
    return jnp.einsum("bkrsh,bkth->bkrst", q_bkrsh, k_bkth, preferred_element_type=jnp.float32) * scale


def _attend(q, k, v, seen, scale):
    """Attend to one block of keys: float32 (out_bkrsh, lse_bkrs). A row that sees no key gives 0 and -inf."""
    scores = _scores(q, k, scale)
    if seen is not None:
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    top = lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(jnp.float32).min))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    some = total > 0
    total = jnp.where(
        some, total, 1
    )  # before the log and the quotient: a where after them leaves NaN in gradients
    out = (
        jnp.einsum("bkrst,bkth->bkrsh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        / total
    )
    return out, jnp.where(some, top + jnp.log(total), -jnp.inf)[..., 0]


def _attend_grad(q, k, v, seen, scale, out_grad, lse, delta):
    """Return float32 (dq, dk, dv) of one block, its weights P recomputed from the lse of the whole row.

    dV = P' dO, dS = P (dO V' - delta), dQ = dS K, dK = dS' Q (Dao et al. 2022, appendix B), where delta is
    the row sum of dO O less the gradient of lse.
    """
    weights = jnp.exp(_scores(q, k, scale) - lse[..., None])
    if seen is not None:
        weights = jnp.where(seen[:, None, None], weights, 0)
    weights_grad = jnp.einsum("bkrsh,bkth->bkrst", out_grad, v, preferred_element_type=jnp.float32)
    scores_grad = (weights * (weights_grad - delta[..., None]) * scale).astype(q.dtype)
    dq = jnp.einsum("bkrst,bkth->bkrsh", scores_grad, k, preferred_element_type=jnp.float32)
    dk = jnp.einsum("bkrst,bkrsh->bkth", scores_grad, q, preferred_element_type=jnp.float32)
    dv = jnp.einsum(
        "bkrst,bkrsh->bkth", weights.astype(v.dtype), out_grad, preferred_element_type=jnp.float32
    )
    return dq, dk, dv


def merge(out_a, lse_a, out_b, lse_b):
    """Merge two partial results about the same queries; out has one trailing dim more than lse."""
    top = lax.stop_gradient(jnp.maximum(jnp.maximum(lse_a, lse_b), jnp.finfo(jnp.float32).min))
    weight_a, weight_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
    total = weight_a + weight_b
    some = total > 0
    total = jnp.where(some, total, 1)
    share_a, share_b = (weight_a / total)[..., None], (weight_b / total)[..., None]
    out = out_a.astype(jnp.float32) * share_a + out_b.astype(jnp.float32) * share_b
    return out.astype(out_a.dtype), jnp.where(some, top + jnp.log(total), -jnp.inf)


# ------------------------------------------------------------------------------------------------- one device


def full(
    q: Q, k: KV, v: KV, *, mask: Mask = Mask(), scale: float | None = None, **ids: Unpack[Ids]
) -> Partial:
    """Attend with the whole score matrix, which autodiff keeps: b k r s t numbers. The reference for all the
    others."""
    tiles = _enter(q, k, v, q.shape[1], k.shape[1], **ids)
    (q, q_ids), (k, v, k_ids) = jax.tree.map(lambda tile: tile[0], tiles)
    out, lse = _attend(q, k, v, sees(mask, q_ids, k_ids), _scale(scale, q))
    return _leave(out.astype(q.dtype)[None], lse[None])


def blockwise(
    q: Q,
    k: KV,
    v: KV,
    *,
    block: int | None = None,
    contiguous: bool = False,
    mask: Mask = Mask(),
    scale: float | None = None,
    **ids: Unpack[Ids],
) -> Partial:
    """Attend block by block: what `full` gives, in memory linear in the sequence.

    Saves out and lse; the backward pass recomputes scores. A pair of tiles of `block` positions that the
    extremes of positions and segments show to be masked is a branch not taken. `contiguous` promises that
    queries and keys are the same positions in rising order, without gaps (they may start again with each
    segment): then up to 8 tiles are written out, and pairs outside the mask not at all. Pass positions as
    arguments of the compiled function: what remains is fastest while it is branches, which XLA runs one after
    the other in the same memory.
    """
    s, t = q.shape[1], k.shape[1]
    q_block, k_block = _fit(block, s), _fit(block, t)
    if contiguous and s != t:
        raise ValueError(
            f"contiguous attention has queries and keys at the same positions; found {s} and {t} of them"
        )
    how = _How(mask, _scale(scale, q), contiguous=contiguous and s <= FEW_IN_TRIANGLE * q_block)
    return _leave(*_softmax_of(how, *_enter(q, k, v, q_block, k_block, **ids)))


def by_kernel(
    q: Q,
    k: KV,
    v: KV,
    *,
    kernel: Literal["cudnn", "xla"],
    contiguous: bool = False,
    mask: Mask = Mask(),
    **ids: Unpack[Ids],
):
    """Attend with `jax.nn.dot_product_attention`, 'cudnn' (NVIDIA GPUs, 16 bits) or 'xla', which keeps all
    scores.

    The mask is an array of b s t, one for all heads; with `contiguous` a kernel may skip what is later. No
    lse: the kernel rounds it to q's dtype, too coarse to merge by, and drops its gradient (JAX 0.10).
    """
    queries, keys = (
        (ids["q_positions_bs"], ids.get("q_segments_bs")),
        (ids["k_positions_bt"], ids.get("k_segments_bt")),
    )
    seen, heads = sees(mask, queries, keys), q.reshape(*q.shape[:2], -1, q.shape[-1])
    seen, causal = None if seen is None else seen[:, None], contiguous and mask.causal
    out = jax.nn.dot_product_attention(heads, k, v, mask=seen, is_causal=causal, implementation=kernel)
    return out.reshape(q.shape), None


def _scale(scale, q):
    return q.shape[-1] ** -0.5 if scale is None else scale


def _fit(block, length):
    """Return the tile length: as asked; else a half (which tells a zigzag's two parts apart), halved again
    down to 256."""
    if block is None:
        block = length
        while block % 2 == 0 and (block > 256 or block == length):
            block //= 2
    if block < 1 or length % min(block, length):
        near = min((n for n in range(1, length + 1) if length % n == 0), key=lambda n: abs(n - block))
        raise ValueError(
            f"block={block} does not divide the {length} positions held here; use a divisor, such as {near}"
        )
    return min(block, length)


def _enter(
    q, k, v, q_block, k_block, *, q_positions_bs, k_positions_bt, q_segments_bs=None, k_segments_bt=None
):
    """Cut into tiles: queries (q, ids) and keys (k, v, ids), all varying over the same mesh axes."""
    if (q_segments_bs is None) != (k_segments_bt is None):
        raise ValueError("segments were given for only one of queries and keys; give both or neither")

    def cut(block, x):
        x = jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)
        return jnp.moveaxis(x, 2, -2) if x.ndim > 3 else x

    queries, keys = (q, (q_positions_bs, q_segments_bs)), (k, v, (k_positions_bt, k_segments_bt))
    return _vary((jax.tree.map(partial(cut, q_block), queries), jax.tree.map(partial(cut, k_block), keys)))


def _leave(out, lse):
    """Undo the cut: (out_bskrh, lse_bskr)."""
    out, lse = out.transpose(1, 0, 4, 2, 3, 5), lse.transpose(1, 0, 4, 2, 3)
    return tuple(x.reshape(x.shape[0], -1, *x.shape[3:]) for x in (out, lse))


def _vary(tree, like=()):
    """Let every leaf vary over each mesh axis over which any leaf, of `like` too, does: loops and branches
    insist."""
    axes = sorted(frozenset().union(*map(varying, jax.tree.leaves((tree, like)))))
    return jax.tree.map(lambda x: vary(x, axes), tree)


@dataclass(frozen=True)
class _How:
    mask: Mask
    scale: float
    contiguous: bool = False
    axis: str | None = None
    overlap: bool = True


def _each(how, f, carry, xs, few):
    """Scan f(carry, (i, x)) over tiles, unrolled if few; written out, with i an int, where the triangle is
    known."""
    length = len(jax.tree.leaves(xs)[0])
    if not how.contiguous:
        return lax.scan(f, carry, (jnp.arange(length), xs), unroll=length <= few)
    ys = [None] * length
    for i in range(length):
        carry, ys[i] = f(carry, (i, jax.tree.map(itemgetter(i), xs)))
    return carry, jax.tree.map(lambda *y: jnp.stack(y), *ys)


def _if_live(how, q, q_ids, k_ids, tiles_apart, look, skip):
    c = q.shape[-2]
    if how.contiguous and not how.mask.admits(tiles_apart * c - (c - 1), tiles_apart * c + (c - 1)):
        return skip()
    return lax.cond(may_see(how.mask, q_ids, k_ids), look, skip)


def _sweep(how, done, queries, keys):
    """Merge into `done` what each tile of queries finds in each tile of keys that it may see."""

    def row(_, query):
        i, ((q, q_ids), done) = query

        def step(done, key):
            j, (k, v, k_ids) = key

            def look():
                return merge(*done, *_attend(q, k, v, sees(how.mask, q_ids, k_ids), how.scale))

            return _if_live(how, q, q_ids, k_ids, i - j, look, lambda: done), None

        return None, _each(how, step, done, keys, FEW_KEYS)[0]

    return _each(how, row, None, (queries, done), FEW_ROWS)[1]


def _sweep_back(how, dq, rows, keys):
    """Add to dq, and return dk and dv, for each tile of keys over each row of queries that may see it."""

    def column(dq, key):
        j, (k, v, k_ids) = key

        def step(dkv, row):
            i, (dq, (q, q_ids), *terms) = row

            def look():
                grads = _attend_grad(q, k, v, sees(how.mask, q_ids, k_ids), how.scale, *terms)
                return jax.tree.map(jnp.add, (dq, *dkv), grads)

            dq, *dkv = _if_live(how, q, q_ids, k_ids, i - j, look, lambda: (dq, *dkv))
            return tuple(dkv), dq

        return _each(how, step, _zeros((k, v)), (dq, *rows), FEW_KEYS)[::-1]

    return _each(how, column, dq, keys, FEW_ROWS)


def _zeros(tree):
    return jax.tree.map(lambda x: _vary(jnp.zeros(x.shape, jnp.float32), x), tree)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmax_of(how, queries, keys):
    out, lse = _turn(how, queries, keys)
    return out.astype(queries[0].dtype), lse


def _softmax_of_fwd(how, queries, keys):
    out, lse = _softmax_of(how, queries, keys)
    return (out, lse), (queries, keys, out, lse)


def _softmax_of_bwd(how, saved, grads):
    (queries, keys, out, lse), (out_grad, lse_grad) = saved, grads
    delta = (out_grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - lse_grad
    lse = jnp.where(
        jnp.isfinite(lse), lse, 0
    )  # a row that saw nothing: any number, its weights are masked again
    dq, (dk, dv) = _turn_back(how, (queries, out_grad, lse, delta), keys)
    return (dq.astype(queries[0].dtype), None), (dk.astype(keys[0].dtype), dv.astype(keys[1].dtype), None)


_softmax_of.defvjp(_softmax_of_fwd, _softmax_of_bwd)


# -------------------------------------------------------------------------------------------- around the ring


def ring(
    q: Q,
    k: KV,
    v: KV,
    *,
    axis: str,
    overlap: bool = True,
    block: int | None = None,
    mask: Mask = Mask(),
    scale: float | None = None,
    **ids: Unpack[Ids],
) -> Partial:
    """Attend to the keys of all n ranks along `axis`, each of which holds s/n positions; call it in
    `jax.shard_map`.

    Forward, n-1 hops: a rank merges what it finds in the keys it holds and hands them to the next rank. K, V
    travel in their own dtype, KV heads only, with their ids: n-1 times 2 b t k h elements sent per rank.

    Backward: K and V make their n-1 hops again. The gradient of a rank's keys sets out one hop behind them,
    from the first neighbour that looked at them, gathers what each rank adds, and needs n-1 hops to come
    home, where the rank's
    own share is waiting: n-1 times 2 b t k h float32 besides.

    With `overlap` a hop may run while the present keys are looked at, and a second copy of K and V is held;
    without, it waits. Two tiles of `block` positions of which none may see the other are a branch not taken.
    """
    how = _How(mask, _scale(scale, q), axis=axis, overlap=overlap)
    return _leave(
        *_softmax_of(how, *_enter(q, k, v, _fit(block, q.shape[1]), _fit(block, k.shape[1]), **ids))
    )


def _ring_size(how):
    return lax.axis_size(how.axis) if how.axis else 1


def _hop(how, held):
    n = _ring_size(how)
    with scope("keys b t -> the next rank"):
        return jax.tree.map(lambda x: lax.ppermute(x, how.axis, [(i, (i + 1) % n) for i in range(n)]), held)


def _after(known, held):
    """What is held, but not before `known` is. (A true dependence, because XLA for CPUs drops optimization
    barriers.)"""
    sane = known.max() <= jnp.inf  # a NaN, which shows anyway, makes zeros of what is held
    return jax.tree.map(lambda x: jnp.where(sane, x, jnp.zeros((), x.dtype)), held)


def _turn(how, queries, held):
    out = _zeros(queries[0])
    done = out, jnp.full_like(out[..., 0], -jnp.inf)

    def step(carry, _):
        held, done = carry
        found = _sweep(how, done, queries, held)
        return (_hop(how, held if how.overlap else _after(found[1], held)), found), None

    if (n := _ring_size(how)) > 1:
        (held, done), _ = lax.scan(step, (held, done), length=n - 1)
    return _sweep(how, done, queries, held)


def _turn_back(how, rows, own):
    def step(carry, last=False):
        held, dq, dkv = carry
        dkv = dkv and _hop(how, dkv)
        dq, more = _sweep_back(how, dq, rows, held)
        if not last:
            held = _hop(how, held if how.overlap else _after(dq[..., 0], held))
        return held, dq, jax.tree.map(jnp.add, dkv, more) if dkv else more

    carry = own, _zeros(rows[0][0]), None
    if (n := _ring_size(how)) > 1:
        # Nothing else would keep these hops from running beside the forward ring's, and simulated devices
        # confuse two permutes of one shape, one of them in a loop: wrong numbers or a deadlock in half of the
        # runs (JAX 0.10.2).
        first = _hop(how, _after(rows[-1], own))
        carry = step((first, *carry[1:]), last=n == 2)
        if n > 2:
            carry, _ = lax.scan(lambda carry, _: (step(carry), None), carry, length=n - 3)
            carry = step(carry, last=True)
    return step((own, *carry[1:]), last=True)[1:]


# ---------------------------------------------------------------------------------------------- ring's rivals


def ulysses(q: Q, k: KV, v: KV, *, axis: str, attend=blockwise, **how) -> Partial:
    """Exchange positions for heads along `axis`, attend to the whole sequence with some heads, and exchange
    back.

    `s/sp k -> s k/sp` for q, k and v and the inverse for out: four all-to-alls (Jacobs et al. 2023), and a
    fifth, h times smaller, for lse if it is used. Degree at most KV heads. `how` goes to `attend`: block,
    contiguous, mask, scale, ids.
    """
    n, kv_heads = lax.axis_size(axis), k.shape[2]
    if kv_heads % n:
        heads = math.gcd(n, kv_heads)
        other = f", or usp with {heads} ranks for heads and {n // heads} for a ring" if heads > 1 else ""
        raise ValueError(
            f"ulysses over {axis}={n} cuts KV heads by {n}, but there are {kv_heads} here; use ring{other}"
        )
    q, k, v = (lax.all_to_all(x, axis, 2, 1, tiled=True) for x in (q, k, v))
    out, lse = attend(q, k, v, **how | _gather_ids(axis, how, Ids.__annotations__))
    return lax.all_to_all(out, axis, 1, 2, tiled=True), lax.all_to_all(lse, axis, 1, 2, tiled=True)


def all_gather_kv(q: Q, k: KV, v: KV, *, axis: str, **how) -> Partial:
    """Gather all keys and values along `axis`, and attend to them with the rank's own queries (Llama 3,
    section 3.3.2).

    Two all-gathers forward, two reduce-scatters backward, in the dtype of K and V. Holds K and V of the whole
    sequence.
    """
    k, v = (lax.all_gather(x, axis, axis=1, tiled=True) for x in (k, v))
    return blockwise(q, k, v, **how | _gather_ids(axis, how, ("k_positions_bt", "k_segments_bt")))


def _gather_ids(axis, how, names):
    ids = {name: how[name] for name in names if how.get(name) is not None}
    return {name: lax.all_gather(x, axis, axis=1, tiled=True) for name, x in ids.items()}


def usp(q: Q, k: KV, v: KV, *, axes: tuple[str, str], **how) -> Partial:
    """Cut positions by two axes: Ulysses over the first, a ring over the second (Fang and Zhao 2024)."""
    heads_axis, ring_axis = axes
    return ulysses(q, k, v, axis=heads_axis, attend=partial(ring, axis=ring_axis), **how)


def decode(
    q: Q, k_cache: KV, v_cache: KV, *, axis: str | tuple[str, ...], **how
) -> Float[Array, "b s k r h"]:
    """Attend from every rank's same few queries to a cache cut along `axis`; the cache stays where it is.

    One maximum of b s k r numbers and one sum of b s k r (h+1) for each call. A slot of the cache that is not
    written yet must have a position after every query's. No gradient: a maximum over ranks has none. `how`:
    mask, scale, ids.
    """
    out, lse = full(q, k_cache, v_cache, **how)
    if not axis:
        return out
    top = jnp.maximum(lax.pmax(lse, axis), jnp.finfo(jnp.float32).min)
    weight = jnp.exp(lse - top)[..., None]
    sums = lax.psum(jnp.concatenate([out.astype(jnp.float32) * weight, weight], -1), axis)
    out, total = sums[..., :-1], sums[..., -1:]
    return (out / jnp.where(total > 0, total, 1)).astype(q.dtype)


# ---------------------------------------------------------------------------------- who holds which positions


def sequence_permutation(name: str, s: int, n: int) -> np.ndarray:
    """Return the permutation that lays s positions onto n ranks, s/n to each in turn; np.argsort undoes it.

    'contiguous' gives the last rank of a causal ring most of the work; 'zigzag' gives rank i the parts i and
    2n-1-i of 2n; 'striped' gives it every n-th position from i on (Brandon et al. 2023).
    """
    parts = {"contiguous": n, "zigzag": 2 * n, "striped": n}.get(name)
    if parts is None:
        raise ValueError(f"order '{name}' is not known; use contiguous, zigzag or striped")
    if n == 1:
        return np.arange(s)  # one rank has them all, of whatever number
    if s % parts:
        near = [str(m) for m in (s // parts * parts, -(-s // parts) * parts) if m]
        other = f"; orders contiguous and striped would take {s}" if s % n == 0 else ""
        raise ValueError(
            f"{name} order over {n} ranks cuts the sequence into {parts} parts, but {s} is not a multiple of"
            f" {parts}; use a sequence of {' or '.join(near)}{other}"
        )
    cut = np.arange(s).reshape(parts, -1)
    if name == "zigzag":
        cut = np.concatenate([cut[:n], cut[: n - 1 : -1]], axis=1)
    return np.arange(s).reshape(-1, n).T.ravel() if name == "striped" else cut.ravel()


def live_blocks(
    n: int, name: str = "zigzag", mask: Mask = Mask(), *, s: int = 0, block: int = 1
) -> np.ndarray:
    """Return pairs[rank, step]: how many query-key pairs a ring of n computes, whole tiles of `block`
    positions counted.

    At step j rank i holds the keys of rank i-j. With block 1 these are the pairs that are seen. By default s
    is 16 n.
    """
    s = s or 16 * n
    tiles = sequence_permutation(name, s, n).reshape(-1, _fit(block, s // n))
    low, high = tiles.min(1), tiles.max(1)
    live = mask.admits(low[:, None] - high, high[:, None] - low) * tiles.shape[1] ** 2
    pairs = live.reshape(n, len(tiles) // n, n, -1).sum((1, 3))
    return np.stack([np.roll(row[::-1], rank + 1) for rank, row in enumerate(pairs)])
