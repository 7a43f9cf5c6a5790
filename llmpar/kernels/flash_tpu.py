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


def run(name, how, tiles, kinds, given, made, interpret=False):
    """As `flash.run`. A TPU adds up the shares of query heads itself."""
    from jax.experimental.pallas import tpu  # late: nothing but a TPU wants it

    given, (_, (q, *_), _, span) = jax.tree.map(lambda kind, x: LAID[kind][0](x), kinds, given), given
    (b, s, k, r, width), t, of_keys = q.shape, given[0][0].shape[2], name == flash.OF_KEYS
    makes, tile = flash.KERNELS[name].makes, tiles.k if of_keys else tiles.q
    heads, group, others = (k, r, s // tiles.q) if of_keys else (k * r, 1, t // tiles.k)
    made = [x.update(shape=x.shape[:3] + (1,) + x.shape[4:]) if of_keys else x for x in made]
    typed = [jax.eval_shape(LAID[kind][0], x) for kind, x in zip(makes, made, strict=True)]
    alike = jax.typeof(given[-1]).manual_axis_type
    blocks, numbers = _blocks(tiles, r, width, of_keys), [(tile, 1)] * 2 if name == "flash_forward" else []
    spec = tpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(b, heads, span.shape[1], group, others),
        in_specs=[jax.tree.map(blocks.get, kind) for kind in kinds[:3]],
        out_specs=[blocks[kind] for kind in makes],
        scratch_shapes=[tpu.VMEM(x, jnp.float32) for x in [(tile, width)] * (1 + of_keys) + numbers],
    )
    in_turn = ("parallel",) * 3 + ("arbitrary",) * 2
    found = pl.pallas_call(
        functools.partial(_program, name, how),
        out_shape=[x.update(manual_axis_type=alike) for x in typed],
        grid_spec=spec,
        compiler_params=tpu.CompilerParams(dimension_semantics=in_turn),  # type: ignore[arg-type]
        name=name,
        interpret=interpret,
    )(span, *given[:3])
    return [LAID[kind][1](x) for kind, x in zip(makes, found, strict=True)]


# Kind of array -> as the kernel takes it, and back: the last two dims are tiles of vector memory.
LAID: dict[str, tuple[Any, Any]] = {
    "rows": (lambda x: x.transpose(0, 2, 3, 1, 4), lambda x: x.transpose(0, 3, 1, 2, 4)),
    "keys": (lambda x: x.transpose(0, 2, 1, 3), None),
    "numbers": (lambda x: x[:, :, :, None], lambda x: x[:, :, :, 0]),
    "q_ids": (lambda x: x[:, :, None], None),
    "k_ids": (lambda x: x[:, :, None], None),
    "span": (lambda x: x, None),
}
LAID["shares"] = LAID["rows"]


def _blocks(tiles, r, width, of_keys):
    """Kind of array -> the block that a program sees of it: row b, head n, tile i, query head m of a KV head,
    place j in the span."""

    def block(shape, where):
        def place(b, n, i, m, j, span):
            """Behind a span's end the last tile again, which is there already."""
            begin, end = span[b, i, 0], span[b, i, 3]
            other = jnp.minimum(begin + j, jnp.maximum(end - 1, begin))
            return where(b, *((other, i, n, m) if of_keys else (i, other, n // r, n % r)))

        return pl.BlockSpec(shape, place)

    return {
        "rows": block((None, None, None, tiles.q, width), lambda b, i, j, n, m: (b, n, m, i, 0)),
        "keys": block((None, None, tiles.k, width), lambda b, i, j, n, m: (b, n, j, 0)),
        "numbers": block((None, None, None, 1, tiles.q), lambda b, i, j, n, m: (b, n, m, 0, i)),
        "shares": block((None, None, None, tiles.k, width), lambda b, i, j, n, m: (b, n, 0, j, 0)),
        "q_ids": block((None, 2, 1, tiles.q), lambda b, i, j, n, m: (b, 0, 0, i)),
        "k_ids": block((None, 2, 1, tiles.k), lambda b, i, j, n, m: (b, 0, 0, j)),
    }


def _program(name, how, span, keys, queries, before, *refs):
    """Start the sums before a span's first tile, add this one if it is in the span, end after the last."""
    kernel, of_keys = flash.KERNELS[name], name == flash.OF_KEYS
    results, sums = refs[: len(kernel.makes)], refs[len(kernel.makes) :]
    (*own, ids), (*others, other_ids) = (keys, queries) if of_keys else (queries, keys)
    b, _, i, m, j = map(pl.program_id, range(5))
    begin, whole, stop, end = (span[b, i, number] for number in range(4))
    tile, free = begin + j, (whole <= begin + j) & (begin + j < stop)
    tall = lambda x: x[...] if x.shape[0] > 1 else x[...].T  # numbers, of which there is one line, upright

    def put(refs, values):
        for ref, x in zip(refs, values, strict=True):
            ref[...] = x.astype(ref.dtype) if x.shape == ref.shape else x.T

    def add(masked):
        mine = [*map(tall, own), [ids[0].T, ids[1].T]]
        other = [*(x[...] for x in others), [other_ids[0], other_ids[1]]]
        put(sums, flash.visit(name, how, mine, other, masked, [x[...] for x in sums]))

    @pl.when((m == 0) & (j == 0))
    def _():
        put(sums, kernel.start(how.scale, [tall(x) for x in own], [tall(x) for x in before], (1,)))

    pl.when(free)(lambda: add(False))
    pl.when(~free & (tile < end))(lambda: add(True))

    @pl.when((m == pl.num_programs(3) - 1) & (j == pl.num_programs(4) - 1))
    def _():
        put(results, kernel.finish(how.scale, [x[...] for x in sums]))
