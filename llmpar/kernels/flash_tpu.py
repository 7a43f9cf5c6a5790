"""The kernels of `llmpar.kernels.flash` as TPUs want them.

The same work on the same spans of tiles, but a program there has one *pair* of tiles, and programs of one
span run one after the other: sums stay in the chip's vector memory from the first to the last. Where a span
begins is known before its tiles are needed (scalar prefetch), so that the next one is on its way while the
present one is multiplied; what lies behind a span's end is neither fetched nor computed. Spans lie in scalar
memory, 16 bytes a tile. Compiled without a TPU, and interpreted; timed on none.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from llmpar.kernels import flash

_KINDS = {"rows": "bkrsh", "keys": "bkth", "numbers": "bkrus", "shares": "bkwth"}
_KINDS |= {"q_ids": "bius", "k_ids": "biut"}
"""Kinds of arrays (`flash.KINDS`) as TPUs take them: the last two dims are tiles of vector memory; u is 1."""


def run(name, how, tiles, sizes, kinds, given, dtypes, interpret=False):
    """As `flash.run`. A TPU adds up the shares of query heads itself."""
    from jax.experimental.pallas import tpu  # late: nothing but a TPU wants it

    (*kinds, _), (*given, span), of_keys = kinds, given, name == flash.OF_KEYS
    b, s, t, k, r, h = (sizes[dim] for dim in "bstkrh")
    heads, group, others = (k, r, s // tiles.q) if of_keys else (k * r, 1, t // tiles.k)

    def place(b, n, i, m, j, span):
        """Of row b, head n, tile i, query head m of a KV head and place j in the span: behind the span's end
        lies the last tile again, which is there already."""
        begin, end = span[b, 4 * i], span[b, 4 * i + 3]
        other = jnp.minimum(begin + j, jnp.maximum(end - 1, begin))
        return dict(b=b) | (
            dict(k=n, r=m, s=other, t=i) if of_keys else dict(k=n // r, r=n % r, s=i, t=other)
        )

    block, sizes = dict(s=tiles.q, t=tiles.k, h=h, i=2, u=1), sizes | dict(u=1, w=1)
    made, takes, makes = flash.layout(name, _KINDS, sizes, kinds, dtypes, span, block, place)
    sums = [h] * (1 + of_keys) + [1, 1] * (name == "flash_forward")
    grid = tpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(b, heads, sizes["j"], group, others),
        in_specs=takes,
        out_specs=makes,
        scratch_shapes=[tpu.VMEM((tiles.k if of_keys else tiles.q, n), jnp.float32) for n in sums],
    )
    in_turn = ("parallel",) * 3 + ("arbitrary",) * 2
    found = pl.pallas_call(
        functools.partial(_program, name, how),
        out_shape=made,
        grid_spec=grid,
        compiler_params=tpu.CompilerParams(dimension_semantics=in_turn),  # type: ignore[arg-type]
        name=name,
        interpret=interpret,
    )(span.reshape(b, -1), *jax.tree.map(_laid, kinds, given))
    return [_laid(kind, x, back=True) for kind, x in zip(flash.KERNELS[name].makes, found, strict=True)]


def _laid(kind, x, back=False):
    """Lay an array out for a TPU, or back."""
    usual, here = flash.KINDS[kind], _KINDS[kind].replace("u", "")
    if back:
        return jnp.einsum(f"{here}->{usual}", x[..., 0, :] if "u" in _KINDS[kind] else x)
    x = jnp.einsum(f"{usual}->{here}", x)
    return x[..., None, :] if "u" in _KINDS[kind] else x


def _program(name, how, span, keys, queries, before, *refs):
    """Start the sums before a span's first tile, add this one if it is in the span, end after the last."""
    kernel, of_keys = flash.KERNELS[name], name == flash.OF_KEYS
    results, sums = refs[: len(kernel.makes)], refs[len(kernel.makes) :]
    (*own, ids), (*others, other_ids) = (keys, queries) if of_keys else (queries, keys)
    b, _, i, m, j = map(pl.program_id, range(5))
    begin, whole, stop, end = (span[b, 4 * i + number] for number in range(4))
    tile, free = begin + j, (whole <= begin + j) & (begin + j < stop)
    tall = lambda x: x[...] if x.shape[0] > 1 else x[...].T  # numbers, of which there is one line, upright

    def put(refs, values):
        for ref, x in zip(refs, values, strict=True):
            ref[...] = x.astype(ref.dtype) if x.shape == ref.shape else x.T

    def add(masked):
        mine = [*map(tall, own), [ids[0].T, ids[1].T]]
        other = [*(x[...] for x in others), [other_ids[0], other_ids[1]]]
        put(sums, flash.visit(name, how, mine, other, masked, [x[...] for x in sums]))

    start = lambda: kernel.start(how.scale, list(map(tall, own)), list(map(tall, before)), (1,))
    pl.when((m == 0) & (j == 0))(lambda: put(sums, start()))
    pl.when(free)(lambda: add(False))
    pl.when(~free & (tile < end))(lambda: add(True))
    last = (m == pl.num_programs(3) - 1) & (j == pl.num_programs(4) - 1)
    pl.when(last)(lambda: put(results, kernel.finish(how.scale, [x[...] for x in sums])))
