"""Attend, on one device and around a ring of them.

Everything here is made of two ideas.  A *block* of queries that attends to a block of keys gives a partial result:
its softmax-weighted sum of values, and the log of the sum of its exponentials (lse).  Two partial results about
the same queries *merge* into one, in any order:

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

Blockwise attention merges along the keys of one device; a ring merges what arrives from the neighbours; decoding
merges over ranks.  (Online softmax: Milakov and Gimelshein 2018; blocks and recomputation: Dao et al. 2022;
ring: Liu, Zaharia and Abbeel 2023.)

Which keys a query may see is decided by data: the positions and the segment (document) numbers of both.  So the
order in which a sequence lies on the ranks is only a permutation of positions, and this file does not care.

Dims: b batch, s query positions, t key positions, k KV heads, r query heads per KV head, h head width.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

F32 = jnp.float32
MAX_UNROLLED_ROWS = 16  # beyond this the triangle is scanned: compile time grows with every unrolled row


@dataclass(frozen=True)
class Mask:
    """Say which keys a query may see; two of different segments never see each other.

    `causal`: no key after the query.  `window`: no key `window` or more positions before it (nor after it).
    """

    causal: bool = True
    window: int | None = None

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} hides every key, the query's own too; use 1 or more, or None")

    def admits(self, gap_low, gap_high):
        """Whether a gap (query minus key position) in [low, high] can be seen: exact when low is high.

        With the ends exchanged it says whether *every* gap in the range is seen.
        """
        allowed = gap_low == gap_low
        if self.causal:
            allowed &= gap_high >= 0
        elif self.window:
            allowed &= gap_high > -self.window
        if self.window:
            allowed &= gap_low < self.window
        return allowed


# ---------------------------------------------------------------- what is seen


def sees(mask, q_ids, k_ids):
    """Return seen_bst for (positions, segments) of queries and keys, or None where everything is seen."""
    (q_pos, q_seg), (k_pos, k_seg) = q_ids, k_ids
    seen = None
    if mask != Mask(causal=False):
        gap = q_pos[:, :, None] - k_pos[:, None, :]
        seen = mask.admits(gap, gap)
    if q_seg is not None:
        same = q_seg[:, :, None] == k_seg[:, None, :]
        seen = same if seen is None else seen & same
    return seen


def may_see(mask, q_ids, k_ids):
    """Return whether any query of one block may see any key of the other, judged by the extremes of both."""
    (q_pos, q_seg), (k_pos, k_seg) = q_ids, k_ids
    live = mask.admits(q_pos.min(1) - k_pos.max(1), q_pos.max(1) - k_pos.min(1))
    if q_seg is not None:
        live &= (q_seg.max(1) >= k_seg.min(1)) & (q_seg.min(1) <= k_seg.max(1))
    return live.any()


# ---------------------------------------------------------------- one block


def _scores(q_bkrsh, k_bkth, scale):
    return jnp.einsum("bkrsh,bkth->bkrst", q_bkrsh, k_bkth, preferred_element_type=F32) * scale


def _attend(q, k, v, seen, scale):
    """Attend to one block of keys: (out_bkrsh, lse_bkrs) in float32; a row that sees no key gives 0 and -inf."""
    scores = _scores(q, k, scale)
    if seen is not None:
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    top = lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(F32).min))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    some = total > 0
    total = jnp.where(some, total, 1)
    out = jnp.einsum("bkrst,bkth->bkrsh", weights.astype(v.dtype), v, preferred_element_type=F32) / total
    return out, jnp.where(some, top + jnp.log(total), -jnp.inf)[..., 0]


def _attend_grad(q, k, v, seen, scale, out_grad, lse, delta):
    """Return float32 (dq, dk, dv) of one block, its weights recomputed from the whole row's lse.

    With P = exp(scores - lse): dV = P' dO, dS = P (dO V' - delta), dQ = dS K, dK = dS' Q, where delta is the row
    sum of dO * O less the gradient of lse (Dao et al. 2022, appendix B).
    """
    weights = jnp.exp(_scores(q, k, scale) - lse[..., None])
    if seen is not None:
        weights = jnp.where(seen[:, None, None], weights, 0)
    weights_grad = jnp.einsum("bkrsh,bkth->bkrst", out_grad, v, preferred_element_type=F32)
    scores_grad = (weights * (weights_grad - delta[..., None]) * scale).astype(q.dtype)
    dq = jnp.einsum("bkrst,bkth->bkrsh", scores_grad, k, preferred_element_type=F32)
    dk = jnp.einsum("bkrst,bkrsh->bkth", scores_grad, q, preferred_element_type=F32)
    dv = jnp.einsum("bkrst,bkrsh->bkth", weights.astype(v.dtype), out_grad, preferred_element_type=F32)
    return dq, dk, dv


def merge(out_a, lse_a, out_b, lse_b):
    """Merge two partial results about the same queries; out has one trailing dim more than lse."""
    top = lax.stop_gradient(jnp.maximum(jnp.maximum(lse_a, lse_b), jnp.finfo(F32).min))
    weight_a, weight_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
    total = weight_a + weight_b
    some = total > 0
    total = jnp.where(some, total, 1)
    share_a, share_b = ((weight / total)[..., None] for weight in (weight_a, weight_b))
    out = (out_a.astype(F32) * share_a + out_b.astype(F32) * share_b).astype(out_a.dtype)
    return out, jnp.where(some, top + jnp.log(total), -jnp.inf)


# ---------------------------------------------------------------- full


def full(q_bskrh, k_btkh, v_btkh, *, q_positions_bs, k_positions_bt, q_segments_bs=None, k_segments_bt=None,
         mask=Mask(), scale=None):  # fmt: skip
    """Attend with the whole score matrix: (out_bskrh in q's dtype, lse_bskr in float32).

    The reference: holds b·k·r·s·t scores, differentiated by autodiff.  Positions and segments may have batch 1.
    """
    q, k, v, q_ids, k_ids = _enter(q_bskrh, k_btkh, v_btkh, q_positions_bs, k_positions_bt, q_segments_bs, k_segments_bt)
    out, lse = _attend(q, k, v, sees(mask, q_ids, k_ids), _scale(scale, q))
    return _leave(out.astype(q.dtype), lse)


def _scale(scale, q):
    return q.shape[-1] ** -0.5 if scale is None else scale


def _enter(q_bskrh, k_btkh, v_btkh, q_positions, k_positions, q_segments, k_segments):
    """Bring heads before positions (matrix products want that), and all onto the same varying mesh axes."""
    if (q_segments is None) != (k_segments is None):
        raise ValueError("segments were given for only one of queries and keys; give both, or neither")
    q, k, v = q_bskrh.transpose(0, 2, 3, 1, 4), k_btkh.transpose(0, 2, 1, 3), v_btkh.transpose(0, 2, 1, 3)
    return _vary((q, k, v, (q_positions, q_segments), (k_positions, k_segments)))


def _leave(out_bkrsh, lse_bkrs):
    return out_bkrsh.transpose(0, 3, 1, 2, 4), lse_bkrs.transpose(0, 3, 1, 2)


def _vary(tree, like=()):
    """Let every leaf vary over each mesh axis that any leaf (of `like` too) varies over: branches and loops ask it."""
    varying = lambda x: jax.typeof(x).manual_axis_type.varying
    axes = frozenset().union(*map(varying, jax.tree.leaves((tree, like))))
    missing = lambda x: tuple(sorted(axes - varying(x)))
    return jax.tree.map(lambda x: lax.pcast(x, missing(x), to="varying") if missing(x) else x, tree)


# ---------------------------------------------------------------- blockwise


@dataclass(frozen=True)
class _How:
    mask: Mask
    scale: float
    block: int
    contiguous: bool = False

    def cut(self, x, axis):
        """Cut an axis into blocks, in front."""
        block = min(self.block, x.shape[axis])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :]), axis, 0)

    def queries(self, *xs_bkrs):
        return jax.tree.map(lambda x: self.cut(x, 3 if x.ndim > 2 else 1), xs_bkrs)

    def keys(self, *xs_bkt):
        return jax.tree.map(lambda x: self.cut(x, 2 if x.ndim > 2 else 1), xs_bkt)

    def rows(self, s):
        """Yield each query block with the one range of keys that it can see, for positions 0..s-1."""
        mask, block = self.mask, min(self.block, s)
        for start in range(0, s, block):
            stop, reach = start + block, mask.window or s
            last = stop if mask.causal else min(s, stop + reach - 1)
            yield slice(start, stop), slice(max(0, start - reach + 1), last)


def _join(x, axis):
    """Undo a cut."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _at(ids, where):
    return jax.tree.map(lambda x: x[:, where], ids)


def _forward(how, q, k, v, q_ids, k_ids):
    mask, scale = how.mask, how.scale
    if how.contiguous:
        partials = [
            _attend(q[:, :, :, i], k[:, :, j], v[:, :, j], sees(mask, _at(q_ids, i), _at(k_ids, j)), scale)
            for i, j in how.rows(q.shape[3])
        ]
        return tuple(jnp.concatenate(parts, 3) for parts in zip(*partials))

    def row(_, query):
        q, q_ids = query

        def step(done, key):
            k, v, k_ids = key
            attend = lambda done: merge(*done, *_attend(q, k, v, sees(mask, q_ids, k_ids), scale))
            return lax.cond(may_see(mask, q_ids, k_ids), attend, lambda done: done, done), None

        nothing = jnp.zeros(q.shape, F32), jnp.full(q.shape[:-1], -jnp.inf)
        return None, lax.scan(step, _vary(nothing, q), how.keys(k, v, k_ids))[0]

    _, (out, lse) = lax.scan(row, None, how.queries(q, q_ids))
    return _join(out, 3), _join(lse, 3)


def _backward(how, q, k, v, q_ids, k_ids, out_grad, lse, delta):
    mask, scale = how.mask, how.scale
    if how.contiguous:
        dq, dk, dv = [], *_vary((jnp.zeros(k.shape, F32), jnp.zeros(v.shape, F32)), k)
        for i, j in how.rows(q.shape[3]):
            seen = sees(mask, _at(q_ids, i), _at(k_ids, j))
            row = (x[:, :, :, i] for x in (out_grad, lse, delta))
            dq_i, dk_i, dv_i = _attend_grad(q[:, :, :, i], k[:, :, j], v[:, :, j], seen, scale, *row)
            dq, dk, dv = [*dq, dq_i], dk.at[:, :, j].add(dk_i), dv.at[:, :, j].add(dv_i)
        return jnp.concatenate(dq, 3), dk, dv

    def column(dq, key):
        k, v, k_ids = key

        def step(dkv, query):
            dq, q, q_ids, *row = query

            def attend(grads):
                return jax.tree.map(
                    jnp.add, grads, _attend_grad(q, k, v, sees(mask, q_ids, k_ids), scale, *row)
                )

            dq, *dkv = lax.cond(may_see(mask, q_ids, k_ids), attend, lambda grads: grads, (dq, *dkv))
            return tuple(dkv), dq

        nothing = jnp.zeros(k.shape, F32), jnp.zeros(v.shape, F32)
        dkv, dq = lax.scan(step, _vary(nothing, k), (dq, *how.queries(q, q_ids, out_grad, lse, delta)))
        return dq, dkv

    (dq,) = how.queries(_vary(jnp.zeros(q.shape, F32), q))
    dq, (dk, dv) = lax.scan(column, dq, how.keys(k, v, k_ids))
    return _join(dq, 3), _join(dk, 2), _join(dv, 2)


def blockwise(q_bskrh, k_btkh, v_btkh, *, q_positions_bs, k_positions_bt, q_segments_bs=None, k_segments_bt=None,
              mask=Mask(), scale=None, block: int, contiguous: bool = False):  # fmt: skip
    """Attend block by block: what `full` gives, in memory linear in the sequence.

    Saves out and lse and recomputes scores in the backward pass.  A block pair that the extremes of positions and
    segments show to be masked is a branch not taken.  `contiguous` promises that the query and key positions are the
    same 0, 1, ... s-1 (or restart at each segment): then the triangle is static and, up to 16 rows, unrolled with one
    softmax per row of blocks.  `block` is cut to the sequence and must divide it.
    """
    s, t = q_bskrh.shape[1], k_btkh.shape[1]
    if contiguous:
        if s != t:
            raise ValueError(f"contiguous attention needs as many queries as keys; found {s} and {t}; leave it False")
        q_positions_bs = k_positions_bt = jnp.arange(s)[None]
    _check_block(block, s, t)
    args = _enter(q_bskrh, k_btkh, v_btkh, q_positions_bs, k_positions_bt, q_segments_bs, k_segments_bt)
    how = _How(mask, _scale(scale, args[0]), block, contiguous and s <= MAX_UNROLLED_ROWS * block)
    return _leave(*_blockwise(how, *args))


def _check_block(block, *lengths):
    for length in lengths:
        if block < 1 or length % min(block, length):
            fit = [n for n in range(1, length + 1) if length % n == 0]
            near = min(fit, key=lambda n: abs(n - block))
            raise ValueError(f"block={block} does not divide a sequence of {length}; use a divisor such as {near}")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(how, q, k, v, q_ids, k_ids):
    out, lse = _forward(how, q, k, v, q_ids, k_ids)
    return out.astype(q.dtype), lse


def _blockwise_fwd(how, *args):
    out, lse = _blockwise(how, *args)
    return (out, lse), (args, out, lse)


def _blockwise_bwd(how, saved, grads):
    (q, k, v, q_ids, k_ids), out, lse = saved
    dq, dk, dv = _backward(how, q, k, v, q_ids, k_ids, *_row_terms(q, out, lse, *grads))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


def _row_terms(q, out, lse, out_grad, lse_grad):
    """What the backward pass needs of each query row; a row that saw nothing has lse -inf, and any number will do."""
    delta = (out_grad.astype(F32) * out.astype(F32)).sum(-1) - lse_grad
    return out_grad.astype(q.dtype), jnp.where(jnp.isfinite(lse), lse, 0), delta


_blockwise.defvjp(_blockwise_fwd, _blockwise_bwd)
