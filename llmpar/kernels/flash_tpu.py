"""The kernels of `llmpar.kernels.flash` as TPUs want them.

The same work on the same spans of tiles, but a program there has one *pair* of tiles, and programs of one
span run one after the other: sums stay in the chip's vector memory from the first to the last. Where a span
begins is known before its tiles are needed (scalar prefetch), so that the next one is on its way while the
present one is multiplied; what lies behind a span's end is neither fetched nor computed. Spans lie in scalar
memory, 16 bytes a tile. Compiled without a TPU, and interpreted; timed on none.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from llmpar.kernels import flash


def run(name, how, tiles, kinds, arrays, results, made, interpret=False):
    """As `flash.run`."""
    from jax.experimental.pallas import tpu  # late: nothing but a TPU wants it

    (*kinds, _), (*arrays, span), of_keys = kinds, arrays, name == "flash_keys_grad"
    (b, s, k, r, width), t = arrays[0].shape, arrays[1].shape[1]
    arrays = [LAID[kind][0](x) for kind, x in zip(kinds, arrays, strict=True)]
    blocks, (q_tiles, k_tiles) = _blocks(tiles, r, width, of_keys), (s // tiles.q, t // tiles.k)
    typed = [jax.eval_shape(LAID[kind][0], x) for kind, x in zip(results, made, strict=True)]
    alike = jax.typeof(arrays[0]).manual_axis_type
    sums = [(tiles.q, width), (tiles.q, 1), (tiles.q, 1)] if name == "flash_forward" else []
    spec = tpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(b, k, k_tiles, r, q_tiles) if of_keys else (b, k * r, q_tiles, k_tiles),
        in_specs=[blocks[kind] for kind in kinds],
        out_specs=[blocks[kind] for kind in results],
        scratch_shapes=[tpu.VMEM(shape, jnp.float32) for shape in sums],
    )
    in_turn = ("parallel",) * 3 + ("arbitrary",) * (len(spec.grid) - 3)
    found = pl.pallas_call(
        functools.partial(KERNELS[name], how.mask, how.scale),
        out_shape=[x.update(manual_axis_type=alike) for x in typed],
        grid_spec=spec,
        compiler_params=tpu.CompilerParams(dimension_semantics=in_turn),  # type: ignore[arg-type]
        name=name,
        interpret=interpret,
    )(span, *arrays)
    return [LAID[kind][1](x) for kind, x in zip(results, found, strict=True)]


# Kind of array -> as the kernel takes it, and back: the last two dims are tiles of vector memory.
LAID: dict[str, tuple[Any, Any]] = {
    "rows": (lambda x: x.transpose(0, 2, 3, 1, 4), lambda x: x.transpose(0, 3, 1, 2, 4)),
    "keys": (lambda x: x.transpose(0, 2, 1, 3), lambda x: x.transpose(0, 2, 1, 3)),
    "numbers": (lambda x: x[:, :, :, None], lambda x: x[:, :, :, 0]),
    "q_ids": (lambda x: x[:, :, None], None),
    "k_ids": (lambda x: x[:, :, None], None),
}


def _blocks(tiles, r, width, of_keys):
    """Kind of array -> the block that a program sees of it: (row b, head n, tile i of queries, place j in its
    span); or (row b, KV head n, tile i of keys, query head m, place j in the span)."""

    def other(span, b, i, j):
        """The tile at a place of a span; behind its end the last one again, which is there already."""
        begin, end = span[b, i, 0], span[b, i, 3]
        return jnp.minimum(begin + j, jnp.maximum(end - 1, begin))

    q_at: Any
    k_at: Any
    if of_keys:
        q_at = lambda b, n, i, m, j, span: (b, n, m, other(span, b, i, j))
        k_at = lambda b, n, i, m, j, span: (b, n, i)
    else:
        q_at = lambda b, n, i, j, span: (b, n // r, n % r, i)
        k_at = lambda b, n, i, j, span: (b, n // r, other(span, b, i, j))

    return {
        "rows": pl.BlockSpec((None, None, None, tiles.q, width), lambda *at: (*q_at(*at), 0)),
        "numbers": pl.BlockSpec(
            (None, None, None, 1, tiles.q), lambda *at: (*q_at(*at)[:3], 0, q_at(*at)[3])
        ),
        "keys": pl.BlockSpec((None, None, tiles.k, width), lambda *at: (*k_at(*at), 0)),
        "q_ids": pl.BlockSpec((None, 2, 1, tiles.q), lambda *at: (at[0], 0, 0, q_at(*at)[3])),
        "k_ids": pl.BlockSpec((None, 2, 1, tiles.k), lambda *at: (at[0], 0, 0, k_at(*at)[2])),
    }


def _in_turn(mask, axes, span, ids, sums, start, visit, end):
    """Start the sums before a span's first tile, add this one if it is in the span, end after the last. Spans
    run along these axes of the grid."""
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(axes[-1])
    begin, whole, stop, behind = (span[b, i, number] for number in range(4))
    tile = begin + j
    free = (whole <= tile) & (tile < stop)
    first = functools.reduce(jnp.logical_and, [pl.program_id(a) == 0 for a in axes])
    last = functools.reduce(jnp.logical_and, [pl.program_id(a) == pl.num_programs(a) - 1 for a in axes])

    def put(values):
        for ref, x in zip(sums, values, strict=True):
            ref[...] = x

    read = lambda: tuple(ref[...] for ref in sums)
    pl.when(first)(lambda: put(start()))
    pl.when(free)(lambda: put(visit(None, *read())))
    pl.when(~free & (tile < behind))(lambda: put(visit(flash.seen_pairs(mask, *ids()), *read())))
    pl.when(last)(lambda: end(*read()))


def _columns(ids):
    return ids[0].T, ids[1].T


def _forward(mask, scale, span, q, k, v, *refs):
    *before, q_ids, k_ids, out, lse, held, top, total = refs

    def start():
        earlier = (before[0][...], before[1][...].T) if before else ()
        return flash.started(earlier, (held.shape, top.shape))

    def visit(seen, *sums):
        return flash.forward_tile(scale, q[...], k[...], v[...], seen, sums)

    def end(*sums):
        made, log_total = flash.finished(sums)
        out[...], lse[...] = made.astype(out.dtype), log_total.T

    ids = lambda: (_columns(q_ids), k_ids)
    _in_turn(mask, (3,), span, ids, (held, top, total), start, visit, end)


def _queries_grad(mask, scale, span, q, k, v, grad, lse, delta, *refs):
    *before, q_ids, k_ids, dq = refs

    def visit(seen, held):
        terms = grad[...], lse[...].T, delta[...].T
        return (held + flash.queries_grad_tile(scale, q[...], k[...], v[...], *terms, seen),)

    def end(held):
        dq[...] = held * scale + before[0][...] if before else held * scale

    ids = lambda: (_columns(q_ids), k_ids)
    _in_turn(mask, (3,), span, ids, (dq,), lambda: (jnp.zeros(dq.shape),), visit, end)


def _keys_grad(mask, scale, span, q, k, v, grad, lse, delta, q_ids, k_ids, dk, dv):
    def visit(seen, *sums):
        terms = grad[...], lse[...], delta[...]
        more = flash.keys_grad_tile(scale, q[...], k[...], v[...], *terms, seen)
        return sums[0] + more[0], sums[1] + more[1]

    def end(held, _):
        dk[...] = held * scale

    ids = lambda: (q_ids, _columns(k_ids))
    start = lambda: (jnp.zeros(dk.shape), jnp.zeros(dv.shape))
    _in_turn(mask, (3, 4), span, ids, (dk, dv), start, visit, end)


KERNELS = {"flash_forward": _forward, "flash_queries_grad": _queries_grad, "flash_keys_grad": _keys_grad}
