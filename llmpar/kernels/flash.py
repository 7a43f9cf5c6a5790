"""Attend by a kernel that keeps no scores: forward, and backward from the log of sums.

FlashAttention (Dao 2023) over *spans* of tiles. Positions and segments travel with queries and keys, as
everywhere in `llmpar.attention`. Before a kernel starts, the extremes of every tile of queries are compared
with those of every tile of keys, and each tile gets four numbers: the first tile that it meets, the first
that it meets whole (all pairs are seen, which needs no mask), where these end, and where all end. The kernel
walks along its span. This covers every order of the sequence, windows and packed documents, without an array
of s x t. (Where a rank's positions do not rise, a span is longer than it must be, and as right.)

Written in Pallas, which makes Triton programs of the three kernels for GPUs (JAX 0.12 still does, and warns
that a later version will not). For TPUs `llmpar.kernels.flash_tpu` walks the same spans with the same tiles.
On CPUs the kernels are interpreted: slowly, for tests.

Dims: b batch, s query positions, t key positions, k KV heads, r query heads per KV head, h head width. Ids
are ``[b, 2, s]``: positions, then segments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from llmpar.block import vary_alike
from llmpar.kernels.tiles import kernel_tiles, padded_width
from llmpar.sequence_order import Mask, seen_tiles

LOG2_E = float(np.log2(np.e))  # GPUs have an instruction for powers of 2
LEAST = float(np.finfo(np.float32).min) / 2  # for minus infinity, of which no difference can be taken
NOBODY = np.iinfo(np.int32).min  # the segment of padding; that of keys is one more, and equals no other

Q = Float[Array, "b s k r h"]
KV = Float[Array, "b t k h"]
Numbers = Float[Array, "b s k r"]
QueryIds = Int[Array | np.ndarray, "_ 2 s"]
KeyIds = Int[Array | np.ndarray, "_ 2 t"]

# ------------------------------------------------------------------------------------------- spans of tiles


def spans(
    mask: Mask, q_ids: QueryIds, k_ids: KeyIds, q_tile: int, k_tile: int, of_keys: bool = False
) -> Int[Array | np.ndarray, "_ tile 4"]:
    """Return for each tile of queries (of keys: `of_keys`) begin, whole, stop and end: it meets the others'
    tiles in [begin, end), and those in [whole, stop) need no mask."""
    cut = lambda ids, tile: jnp.moveaxis(ids.reshape(*ids.shape[:2], -1, tile), 2, 0)
    some, every = seen_tiles(mask, cut(q_ids, q_tile), cut(k_ids, k_tile))
    some, every = (x.transpose(2, 1, 0) if of_keys else x.transpose(2, 0, 1) for x in (some, every))
    n, j = some.shape[-1], jnp.arange(some.shape[-1])[None, None]
    first, behind = (lambda x: jnp.where(x, j, n).min(-1)), (lambda x: jnp.where(x, j + 1, 0).max(-1))
    begin, whole, stop, end = first(some), first(every), behind(every), behind(some)
    solid = stop - whole == every.sum(-1)
    spans = [jnp.minimum(begin, end), jnp.where(solid, whole, 0), jnp.where(solid, stop, 0), end]
    return jnp.stack(spans, -1).astype(jnp.int32)


def _walk(span, visit, carry):
    """Visit the tiles of a span, ``visit(tile, masked, carry) -> carry``: first those that need no mask."""
    (begin, whole, stop, end), carry = (span[i] for i in range(4)), vary_alike(carry, span[0])
    carry = lax.fori_loop(whole, stop, lambda j, carry: visit(j, False, carry), carry)
    rest = lambda i, carry: visit(jnp.where(i < whole, i, i + stop - whole), True, carry)
    return lax.fori_loop(begin, end - (stop - whole), rest, carry)


# ---------------------------------------------------------------------------------------------------- kernels


def _times(a, b, contract=((1,), (0,))):
    return lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)


_by_row = ((1,), (1,))  # a times the transpose of b


def seen_pairs(mask, q_ids, k_ids):
    """Tell which pairs are seen: ids are columns of queries, rows of keys, or the other way round."""
    gap = q_ids[0] - k_ids[0]
    seen = q_ids[1] == k_ids[1]
    return seen & mask.admits(gap, gap)


def forward_tile(scale, queries, keys, values, seen, carry):
    """Merge a tile of keys into (sums of values, largest score to base 2, sum of weights)."""
    held, top, total = carry
    scores = _times(queries, keys, _by_row) * (scale * LOG2_E)
    scores = scores if seen is None else jnp.where(seen, scores, LEAST)
    most = jnp.maximum(top, scores.max(1, keepdims=top.ndim == 2))
    weights = jnp.exp2(scores - _column(most))
    weights = weights if seen is None else jnp.where(seen, weights, 0)
    shrink = jnp.exp2(top - most)
    held = held * _column(shrink) + _times(weights.astype(values.dtype), values)
    return held, most, total * shrink + weights.sum(1, keepdims=top.ndim == 2)


def started(before, like):
    """Return the carry of `forward_tile` that stands for an (out, lse), or for nothing."""
    out, lse = like
    if not before:
        return jnp.zeros(out, jnp.float32), jnp.full(lse, LEAST), jnp.zeros(lse, jnp.float32)
    some = before[1] > LEAST
    return before[0], jnp.where(some, before[1] * LOG2_E, LEAST), some.astype(jnp.float32)


def finished(carry):
    """Return the (out, lse) that a carry stands for."""
    held, top, total = carry
    some = total > 0
    total = jnp.where(some, total, 1)
    return held / _column(total), jnp.where(some, top / LOG2_E + jnp.log(total), -jnp.inf)


def queries_grad_tile(scale, queries, keys, values, out_grad, lse, delta, seen):
    """Return dS K of a tile of keys, with dS = P (dO V' - delta), not scaled yet."""
    weights = jnp.exp2(_times(queries, keys, _by_row) * (scale * LOG2_E) - lse * LOG2_E)
    weights = weights if seen is None else jnp.where(seen, weights, 0)
    scores_grad = weights * (_times(out_grad, values, _by_row) - delta)
    return _times(scores_grad.astype(keys.dtype), keys)


def keys_grad_tile(scale, queries, keys, values, out_grad, lse, delta, seen):
    """Return dS' Q, not scaled yet, and P' dO of a tile of queries. Pairs are transposed: a row for each
    key."""
    weights = jnp.exp2(_times(keys, queries, _by_row) * (scale * LOG2_E) - lse * LOG2_E)
    weights = weights if seen is None else jnp.where(seen, weights, 0)
    scores_grad = weights * (_times(values, out_grad, _by_row) - delta)
    dv = _times(weights.astype(out_grad.dtype), out_grad)
    return _times(scores_grad.astype(queries.dtype), queries), dv


def _column(x):
    return x[:, None] if x.ndim == 1 else x


def _forward(mask, scale, k_tile, q, k, v, *refs):
    """One tile of queries: merge what came before, if any, with its span of tiles of keys."""
    *before, q_ids, k_ids, span, out, lse = refs
    queries, ids = q[...], (q_ids[0, :][:, None], q_ids[1, :][:, None])

    def visit(j, masked, carry):
        at = pl.ds(j * k_tile, k_tile)
        seen = seen_pairs(mask, ids, (k_ids[0, at][None], k_ids[1, at][None])) if masked else None
        return forward_tile(scale, queries, k[at, :], v[at, :], seen, carry)

    carry = started([x[...] for x in before], (out.shape, lse.shape))
    made, lse[...] = finished(_walk(span, visit, carry))
    out[...] = made.astype(out.dtype)


def _queries_grad(mask, scale, k_tile, q, k, v, grad, lse, delta, *refs):
    """One tile of queries: dQ, besides what came before."""
    *before, q_ids, k_ids, span, dq = refs
    queries, ids = q[...], (q_ids[0, :][:, None], q_ids[1, :][:, None])
    terms = grad[...], lse[...][:, None], delta[...][:, None]

    def visit(j, masked, held):
        at = pl.ds(j * k_tile, k_tile)
        seen = seen_pairs(mask, ids, (k_ids[0, at][None], k_ids[1, at][None])) if masked else None
        return held + queries_grad_tile(scale, queries, k[at, :], v[at, :], *terms, seen)

    held = _walk(span, visit, jnp.zeros(dq.shape, jnp.float32)) * scale
    dq[...] = held + before[0][...] if before else held


def _keys_grad(mask, scale, q_tile, q, k, v, grad, lse, delta, *refs):
    """One tile of keys: dK and dV, over all query heads that share them."""
    q_ids, k_ids, span, dk, dv = refs
    keys, values, ids = k[...], v[...], (k_ids[0, :][:, None], k_ids[1, :][:, None])

    def head(r, carry):
        def visit(i, masked, carry):
            at = pl.ds(i * q_tile, q_tile)
            seen = seen_pairs(mask, (q_ids[0, at][None], q_ids[1, at][None]), ids) if masked else None
            terms = grad[at, r, :], lse[r, at][None], delta[r, at][None]
            more = keys_grad_tile(scale, q[at, r, :], keys, values, *terms, seen)
            return carry[0] + more[0], carry[1] + more[1]

        return _walk(span, visit, carry)

    zeros = vary_alike((jnp.zeros(dk.shape, jnp.float32), jnp.zeros(dv.shape, jnp.float32)), span[0])
    sums = lax.fori_loop(0, q.shape[1], head, zeros)
    dk[...], dv[...] = sums[0] * scale, sums[1]


KERNELS = {"flash_forward": _forward, "flash_queries_grad": _queries_grad, "flash_keys_grad": _keys_grad}
# Kinds of arrays, ``rows b s k r h``, ``keys b t k h`` and ``numbers b s k r``, that a kernel makes and that
# every kernel takes, as many as it is given. What came before stands last.
MADE = {
    "flash_forward": ("rows", "numbers"),
    "flash_queries_grad": ("rows",),
    "flash_keys_grad": ("keys",) * 2,
}
GIVEN = ("rows", "keys", "keys", "rows", "numbers", "numbers", "rows")

# ---------------------------------------------------------------------------------------------------- calling


@dataclass(frozen=True)
class Setting:
    """What does not depend on the arrays. `platform`: of the devices that run it; on ``cpu`` kernels are
    interpreted. `run`: who runs them, in place of this file's `run`."""

    mask: Mask
    scale: float
    platform: str | None = None
    run: Callable | None = None


def forward(
    how: Setting, q: Q, k: KV, v: KV, q_ids: QueryIds, k_ids: KeyIds, before: tuple[Q, Numbers] | None = None
) -> tuple[Q, Numbers]:
    """Attend: (out in q's dtype, lse in float32). Merged with what came ``before``, such a pair about other
    keys with its out in float32, the new out is in float32 too."""
    dtype = jnp.float32 if before else q.dtype
    out, lse = _call("flash_forward", how, q_ids, k_ids, (q, k, v, *(before or ())), dtype)
    return out, lse


def backward(
    how: Setting, q: Q, k: KV, v: KV, q_ids: QueryIds, k_ids: KeyIds, terms: tuple, before: Q | None = None
) -> tuple[Q, KV, KV]:
    """Return float32 (dq, dk, dv), dq added to what came ``before``. The terms: dO; the lse of whole rows,
    finite; and delta, the row sum of dO O less the gradient of lse."""
    given, earlier = (q, k, v, *terms), () if before is None else (before,)
    (dq,) = _call("flash_queries_grad", how, q_ids, k_ids, given + earlier)
    dk, dv = _call("flash_keys_grad", how, q_ids, k_ids, given)
    return dq, dk, dv


def _call(name, how, q_ids, k_ids, given, dtype=jnp.float32):
    """Run a kernel on arrays of any length and width: pad them to tiles, find the spans, cut the results, of
    which the first has this dtype."""
    (b, s, k, r, h), t = given[0].shape, given[1].shape[1]
    tiles = kernel_tiles(name, h, given[0].dtype.itemsize, s, t, how.platform)
    q_ids, k_ids = _pad_ids(q_ids, b, tiles.q, NOBODY), _pad_ids(k_ids, b, tiles.k, NOBODY + 1)
    span = spans(how.mask, q_ids, k_ids, tiles.q, tiles.k, name == "flash_keys_grad")
    all_s, all_t, width = q_ids.shape[-1], k_ids.shape[-1], padded_width(h)
    ends = {"rows": (b, s, k, r, h), "keys": (b, t, k, h), "numbers": (b, k, r, s)}
    padded = {"rows": (b, all_s, k, r, width), "keys": (b, all_t, k, width), "numbers": (b, k, r, all_s)}

    def pad(kind, x):
        return jnp.pad(x, [(0, m - n) for n, m in zip(x.shape, padded[kind], strict=True)])

    kinds, results = GIVEN[: len(given)], MADE[name]
    arrays = [pad(kind, _turned(kind, x)) for kind, x in zip(kinds, given, strict=True)]
    arrays = vary_alike([*arrays, q_ids, k_ids, span])
    made = [jax.ShapeDtypeStruct(padded[kind], jnp.float32) for kind in results]
    made[0] = made[0].update(dtype=dtype)
    found = (how.run or run)(name, how, tiles, (*kinds, "q_ids", "k_ids", "span"), arrays, results, made)
    cut = lambda kind, x: x[tuple(map(slice, ends[kind]))]
    return [_turned(kind, cut(kind, x), back=True) for kind, x in zip(results, found, strict=True)]


def run(name, how, tiles, kinds, arrays, results, made):
    """Run a kernel on padded arrays of some kinds, the last one the spans, for results of some kinds and
    types.

    A program has one tile of queries of one head, or one tile of keys of one KV head, and of the others all
    that its span may name. Programs that read the same keys are neighbours.
    """
    (b, s, k, r, h), t, of_keys = arrays[0].shape, arrays[1].shape[1], name == "flash_keys_grad"
    blocks, alike = _blocks(tiles, of_keys, s, t, r, h), jax.typeof(arrays[0]).manual_axis_type
    if how.platform == "cpu":
        call = interpreted
    else:  # the import is late: nothing but a GPU wants it
        from jax.experimental.pallas import triton

        ask = triton.CompilerParams(num_warps=8, num_stages=tiles.num_stages)
        call = functools.partial(pl.pallas_call, name=name, compiler_params=ask)
    return call(
        functools.partial(KERNELS[name], how.mask, how.scale, tiles.q if of_keys else tiles.k),
        out_shape=[x.update(manual_axis_type=alike) for x in made],
        grid=(arrays[-1].shape[1], k if of_keys else k * r, b),
        in_specs=[blocks[kind] for kind in kinds],
        out_specs=[blocks[kind] for kind in results],
    )(*arrays)


def _blocks(tiles, of_keys, s, t, r, h):
    """Kind of array -> the block that program (tile i, head n, row b) sees of it."""
    if of_keys:
        blocks = {
            "rows": pl.BlockSpec((None, s, None, r, h), lambda i, n, b: (b, 0, n, 0, 0)),
            "keys": pl.BlockSpec((None, tiles.k, None, h), lambda i, n, b: (b, i, n, 0)),
            "numbers": pl.BlockSpec((None, None, r, s), lambda i, n, b: (b, n, 0, 0)),
            "q_ids": pl.BlockSpec((None, 2, s), lambda i, n, b: (b, 0, 0)),
            "k_ids": pl.BlockSpec((None, 2, tiles.k), lambda i, n, b: (b, 0, i)),
        }
    else:
        blocks = {
            "rows": pl.BlockSpec((None, tiles.q, None, None, h), lambda i, n, b: (b, i, n // r, n % r, 0)),
            "keys": pl.BlockSpec((None, t, None, h), lambda i, n, b: (b, 0, n // r, 0)),
            "numbers": pl.BlockSpec((None, None, None, tiles.q), lambda i, n, b: (b, n // r, n % r, i)),
            "q_ids": pl.BlockSpec((None, 2, tiles.q), lambda i, n, b: (b, 0, i)),
            "k_ids": pl.BlockSpec((None, 2, t), lambda i, n, b: (b, 0, 0)),
        }
    return blocks | {"span": pl.BlockSpec((None, None, 4), lambda i, n, b: (b, i, 0))}


def _turned(kind, x, back=False):
    """Positions of numbers are neighbours in a kernel: ``b k r s``."""
    return x if kind != "numbers" else x.transpose(0, 3, 1, 2) if back else x.transpose(0, 2, 3, 1)


def _pad_ids(ids, b, tile, segment):
    """Repeat the last position up to a multiple of the tile, so that its extremes stay; the segment is
    nobody's."""
    ids = jnp.broadcast_to(ids, (b, *ids.shape[1:]))
    if not (more := -ids.shape[-1] % tile):
        return ids
    behind = jnp.stack([ids[:, 0, -1:], jnp.full_like(ids[:, 0, -1:], segment)], 1)
    return jnp.concatenate([ids, jnp.repeat(behind, more, -1)], -1)


def interpreted(kernel, *, out_shape, grid, in_specs, out_specs):
    """`pl.pallas_call` in plain JAX, one program after the other: for CPUs, also inside `jax.shard_map`,
    whose varying types Pallas's own interpreter breaks (JAX 0.10)."""

    def place(spec, x, program):
        sizes = [1 if n is None else n for n in spec.block_shape]
        return [i * n for i, n in zip(spec.index_map(*program), sizes, strict=True)], sizes

    def run(*arrays):
        def program(number, made):
            at, blocks = jnp.unravel_index(number, grid), []
            for spec, x in zip([*in_specs, *out_specs], [*arrays, *made], strict=True):
                kept = [n for n in spec.block_shape if n is not None]
                blocks.append(Block(lax.dynamic_slice(x, *place(spec, x, at)).reshape(kept)))
            kernel(*blocks)
            return [
                lax.dynamic_update_slice(x, block.value.reshape(place(spec, x, at)[1]), place(spec, x, at)[0])
                for spec, x, block in zip(out_specs, made, blocks[len(arrays) :], strict=True)
            ]

        made = vary_alike([jnp.zeros(x.shape, x.dtype) for x in out_shape], arrays)
        return lax.fori_loop(0, int(np.prod(grid)), program, made)

    return run


class Block:
    """What `interpreted` gives a kernel in place of a reference: read by numbers, `pl.ds` and ``:``, written
    whole."""

    def __init__(self, value):
        self.value, self.shape, self.dtype = value, value.shape, value.dtype

    def __getitem__(self, at):
        lines = lambda i: i.start + jnp.arange(i.size) if isinstance(i, pl.Slice) else i
        return self.value[tuple(map(lines, at)) if isinstance(at, tuple) else at]

    def __setitem__(self, at, value):
        assert at is ... and value.dtype == self.dtype
        self.value = value
