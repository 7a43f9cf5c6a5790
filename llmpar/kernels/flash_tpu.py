"""The kernels of `llmpar.kernels.flash` as TPUs want them.

The work, the spans and the tiles are the same, but a program on a TPU has one *pair* of tiles, and programs
of one span run one after the other: sums stay in the chip's vector memory from the first to the last. Where a
span begins is known before its tiles are needed (scalar prefetch), so the next tile is loaded while the
present one is multiplied; tiles behind a span's end are neither fetched nor computed. Spans are in scalar
memory, 16 bytes a tile. Compiled without a TPU, and interpreted; timed on none.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from llmpar.kernels import flash

# Kinds of arrays (`flash.ARRAY_DIMS`) as TPUs take them: the last two dims are tiles of vector memory; u: 1.
_TPU_DIMS = {
    "queries": "bkrsh",
    "keys": "bkth",
    "per_query": "bkrus",
    "key_grads": "bkwth",
    "q_ids": "bius",
    "k_ids": "biut",
}


def run_on_tpu(call: flash.Call, arrays, interpret=False):
    """Run a kernel on a TPU, as `flash.run_on_gpu`. A TPU adds up the parts of query heads itself."""
    from jax.experimental.pallas import tpu  # late: nothing but a TPU wants it

    (*kinds, _), (*arrays, span), tiles, kernel = call.kinds, arrays, call.tiles, call.kernel
    b, s, t, k, r, h = (call.sizes[dim] for dim in "bstkrh")
    heads, group, others = (k, r, s // tiles.q) if kernel.of_keys else (k * r, 1, t // tiles.k)

    def place(b, n, i, m, j, span):
        """Return the blocks of row b, head n, tile i, query head m of a KV head and place j in the span.
        Behind a span's end it is the last tile again, which is loaded already."""
        begin, end = span[b, 4 * i], span[b, 4 * i + 3]
        other = jnp.minimum(begin + j, jnp.maximum(end - 1, begin))
        return dict(b=b) | (
            dict(k=n, r=m, s=other, t=i)
            if kernel.of_keys
            else dict(k=n // r, r=n % r, s=i, t=other)
        )

    block, sizes = dict(s=tiles.q, t=tiles.k, h=h, i=2, u=1), call.sizes | dict(u=1, w=1)
    call = call._replace(kinds=tuple(kinds))
    shapes, takes, gives = flash.pallas_specs(call, _TPU_DIMS, sizes, span, block, place)
    sums = [h] * (1 + kernel.of_keys) + [1, 1] * (kernel == flash.FORWARD)
    grid = tpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(b, heads, sizes["j"], group, others),
        in_specs=takes,
        out_specs=gives,
        scratch_shapes=[
            tpu.VMEM((tiles.k if kernel.of_keys else tiles.q, n), jnp.float32) for n in sums
        ],
    )
    results = pl.pallas_call(
        functools.partial(_program, call),
        out_shape=shapes,
        grid_spec=grid,
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel",) * 3 + ("arbitrary",) * 2
        ),  # type: ignore[arg-type]
        name=kernel.name,
        interpret=interpret,
    )(span.reshape(b, -1), *jax.tree.map(_to_tpu, kinds, arrays))
    return list(map(_from_tpu, kernel.results, results))


def _to_tpu(kind, x):
    """Transpose an array to the dims that a TPU takes."""
    dims = _TPU_DIMS[kind]
    x = jnp.einsum(f"{flash.ARRAY_DIMS[kind]}->{dims.replace('u', '')}", x)
    return x[..., None, :] if "u" in dims else x


def _from_tpu(kind, x):
    """Transpose a result back."""
    dims = _TPU_DIMS[kind]
    return jnp.einsum(
        f"{dims.replace('u', '')}->{flash.ARRAY_DIMS[kind]}", x[..., 0, :] if "u" in dims else x
    )


def _program(call, span, keys, queries, partials, *refs):
    """Start the sums at a span's first tile, add this tile if it is in the span, finish after the last."""
    kernel, scale, num_results = call.kernel, call.scale, len(call.kernel.results)
    results, sums = refs[:num_results], refs[num_results:]
    (*own, ids), (*others, other_ids) = (keys, queries) if kernel.of_keys else (queries, keys)
    b, _, i, m, j = map(pl.program_id, range(5))
    begin, whole, stop, end = (span[b, 4 * i + number] for number in range(4))
    tile, free = begin + j, (whole <= begin + j) & (begin + j < stop)
    tall = lambda x: x[...] if x.shape[0] > 1 else x[...].T  # one number per query, stored as a row

    def store(refs, values):
        for ref, x in zip(refs, values, strict=True):
            ref[...] = x.astype(ref.dtype) if x.shape == ref.shape else x.T

    def add(masked):
        own_tile = [*map(tall, own), [ids[0].T, ids[1].T]]
        other = [*(x[...] for x in others), [other_ids[0], other_ids[1]]]
        store(sums, flash.add_pair(call, own_tile, other, masked, [x[...] for x in sums]))

    start = lambda: kernel.start(scale, list(map(tall, own)), list(map(tall, partials)), (1,))
    pl.when((m == 0) & (j == 0))(lambda: store(sums, start()))
    pl.when(free)(lambda: add(False))
    pl.when(~free & (tile < end))(lambda: add(True))
    last = (m == pl.num_programs(3) - 1) & (j == pl.num_programs(4) - 1)
    pl.when(last)(lambda: store(results, kernel.finish(scale, [x[...] for x in sums])))
