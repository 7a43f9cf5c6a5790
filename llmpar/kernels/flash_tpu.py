"""The kernels of `llmpar.kernels.flash` as TPUs want them.

The same work on the same lists of tiles, but a program there has one *pair* of tiles, and programs of one
list run one after the other: sums stay in the chip's vector memory from the first to the last. Which tile
comes next is read from the list before it is needed (scalar prefetch), so that it is on its way while the
present one is multiplied; what lies behind a list's end is neither fetched nor computed. Lists lie in scalar
memory: 256 KiB for 131,072 queries and keys. Compiled without a TPU, and interpreted; timed on none.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from llmpar.kernels import flash


def run(name, how, tiles, given, made, interpret=False):
    """Run a kernel: ``given`` are (kind, array) as `flash` pads them, with the list and its counts last;
    ``made`` are (kind, type of the result)."""
    from jax.experimental.pallas import tpu  # late: nothing but a TPU wants it

    *given, (_, order), (_, counts) = given
    kinds, (b, _, k, r, width), of_keys = [kind for kind, _ in given], given[0][1].shape, "keys" in name
    arrays = [LAID[kind][0](x) for kind, x in given]
    blocks = (_blocks_of_keys if of_keys else _blocks_of_queries)(tiles, r, width)
    typed = [jax.eval_shape(LAID[kind][0], x) for kind, x in made]
    alike = {"manual_axis_type": jax.typeof(arrays[0]).manual_axis_type}
    heads = (k, order.shape[1], r) if of_keys else (k * r, order.shape[1])
    numbers = (tiles.q, 1)
    sums = {
        "flash_forward": [(tiles.q, width), numbers, numbers],
        "flash_queries_grad": [(tiles.q, width)],
        "flash_keys_grad": [(tiles.k, width)] * 2,
    }[name]
    spec = tpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(b, *heads, order.shape[2]),
        in_specs=[blocks[kind] for kind in kinds],
        out_specs=[blocks[kind] for kind, _ in made],
        scratch_shapes=[tpu.VMEM(shape, jnp.float32) for shape in sums],
    )
    in_turn = ("parallel",) * 3 + ("arbitrary",) * (len(spec.grid) - 3)
    results = pl.pallas_call(
        functools.partial(KERNELS[name], how.mask, how.scale),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype, **alike) for x in typed],
        grid_spec=spec,
        compiler_params=tpu.CompilerParams(dimension_semantics=in_turn),  # type: ignore[arg-type]
        name=name,
        interpret=interpret,
    )(order, counts, *arrays)
    return [LAID[kind][1](x) for (kind, _), x in zip(made, results, strict=True)]


# Kind of array -> as the kernel takes it, and back: the last two dims are tiles of vector memory.
LAID: dict[str, tuple[Any, Any]] = {
    "rows": (lambda x: x.transpose(0, 2, 3, 1, 4), lambda x: x.transpose(0, 3, 1, 2, 4)),
    "keys": (lambda x: x.transpose(0, 2, 1, 3), lambda x: x.transpose(0, 2, 1, 3)),
    "numbers": (lambda x: x[:, :, :, None], lambda x: x[:, :, :, 0]),
    "q_ids": (lambda x: x[:, :, None], None),
    "k_ids": (lambda x: x[:, :, None], None),
}


def _next(lists, b, i, j):
    """The list's tile; behind its end the last one again, which is there already."""
    order, counts = lists
    return order[b, i, jnp.minimum(j, jnp.maximum(counts[b, i, 1] - 1, 0))]


def _blocks_of_queries(tiles, r, width):
    """Program (row b, head n, tile i, place j in its list) -> its blocks."""
    own = lambda b, n, i, j, *lists: (b, n // r, n % r, i, 0)
    return {
        "rows": pl.BlockSpec((None, None, None, tiles.q, width), own),
        "numbers": pl.BlockSpec(
            (None, None, None, 1, tiles.q), lambda b, n, i, j, *lists: (b, n // r, n % r, 0, i)
        ),
        "keys": pl.BlockSpec(
            (None, None, tiles.k, width), lambda b, n, i, j, *lists: (b, n // r, _next(lists, b, i, j), 0)
        ),
        "q_ids": pl.BlockSpec((None, 2, 1, tiles.q), lambda b, n, i, j, *lists: (b, 0, 0, i)),
        "k_ids": pl.BlockSpec(
            (None, 2, 1, tiles.k), lambda b, n, i, j, *lists: (b, 0, 0, _next(lists, b, i, j))
        ),
    }


def _blocks_of_keys(tiles, r, width):
    """Program (row b, KV head n, tile i, query head m, place j in the list) -> its blocks."""
    del r
    next_of = lambda lists, b, i, j: _next(lists, b, i, j)
    return {
        "rows": pl.BlockSpec(
            (None, None, None, tiles.q, width),
            lambda b, n, i, m, j, *lists: (b, n, m, next_of(lists, b, i, j), 0),
        ),
        "numbers": pl.BlockSpec(
            (None, None, None, 1, tiles.q),
            lambda b, n, i, m, j, *lists: (b, n, m, 0, next_of(lists, b, i, j)),
        ),
        "keys": pl.BlockSpec((None, None, tiles.k, width), lambda b, n, i, m, j, *lists: (b, n, i, 0)),
        "q_ids": pl.BlockSpec(
            (None, 2, 1, tiles.q), lambda b, n, i, m, j, *lists: (b, 0, 0, next_of(lists, b, i, j))
        ),
        "k_ids": pl.BlockSpec((None, 2, 1, tiles.k), lambda b, n, i, m, j, *lists: (b, 0, 0, i)),
    }


def _in_turn(mask, axes, counts, ids, start, visit, end):
    """Start before a list's first tile, visit this one if it is in the list, end after the last. Lists run
    along these axes of the grid."""
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(axes[-1])
    whole, some = counts[b, i, 0], counts[b, i, 1]
    first = functools.reduce(jnp.logical_and, [pl.program_id(a) == 0 for a in axes])
    last = functools.reduce(jnp.logical_and, [pl.program_id(a) == pl.num_programs(a) - 1 for a in axes])
    pl.when(first)(start)
    pl.when(j < whole)(lambda: visit(None))
    pl.when((whole <= j) & (j < some))(lambda: visit(flash.seen_pairs(mask, *ids())))
    pl.when(last)(end)


def _forward(mask, scale, order, counts, q, k, v, *refs):
    *before, q_ids, k_ids, out, lse, held, top, total = refs
    sums = held, top, total

    def put(carry):
        for ref, x in zip(sums, carry, strict=True):
            ref[...] = x

    def end():
        made, log_total = flash.finished(read())
        out[...], lse[...] = made.astype(out.dtype), log_total.T

    earlier = lambda: [before[0][...], before[1][...].T] if before else []
    start = lambda: put(flash.started(earlier(), (held.shape, top.shape)))
    read = lambda: tuple(x[...] for x in sums)
    visit = lambda seen: put(flash.forward_tile(scale, q[...], k[...], v[...], seen, read()))
    ids = lambda: ((q_ids[0].T, q_ids[1].T), (k_ids[0], k_ids[1]))
    _in_turn(mask, (3,), counts, ids, start, visit, end)


def _queries_grad(mask, scale, order, counts, q, k, v, grad, lse, delta, *refs):
    *before, q_ids, k_ids, dq, held = refs

    def start():
        held[...] = jnp.zeros(held.shape, jnp.float32)

    def visit(seen):
        terms = grad[...], lse[...].T, delta[...].T
        held[...] += flash.queries_grad_tile(scale, q[...], k[...], v[...], *terms, seen)

    def end():
        dq[...] = held[...] * scale + before[0][...] if before else held[...] * scale

    ids = lambda: ((q_ids[0].T, q_ids[1].T), (k_ids[0], k_ids[1]))
    _in_turn(mask, (3,), counts, ids, start, visit, end)


def _keys_grad(mask, scale, order, counts, q, k, v, grad, lse, delta, q_ids, k_ids, dk, dv, *sums):
    def start():
        for ref in sums:
            ref[...] = jnp.zeros(ref.shape, jnp.float32)

    def visit(seen):
        terms = grad[...], lse[...], delta[...]
        more = flash.keys_grad_tile(scale, q[...], k[...], v[...], *terms, seen)
        for ref, x in zip(sums, more, strict=True):
            ref[...] += x

    def end():
        dk[...], dv[...] = sums[0][...] * scale, sums[1][...]

    ids = lambda: ((q_ids[0], q_ids[1]), (k_ids[0].T, k_ids[1].T))
    _in_turn(mask, (3, 4), counts, ids, start, visit, end)


KERNELS = {"flash_forward": _forward, "flash_queries_grad": _queries_grad, "flash_keys_grad": _keys_grad}
