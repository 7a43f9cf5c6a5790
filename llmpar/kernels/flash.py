"""Attend by a kernel that keeps no scores: forward, and backward from the log of sums.

FlashAttention (Dao 2023) over *spans* of tiles. Positions and segments travel with queries and keys, as
everywhere in `llmpar.model.attention`. Before a kernel starts, the extremes of every tile of queries are
compared with those of every tile of keys, and each tile gets its span, four numbers: `begin` and `end` of the
tiles that it needs, and between them `whole` and `stop`, the part whose pairs are all seen and need no mask.
The kernel loops over its span. This covers every order of the sequence, windows and packed documents, without
an array of s x t. (Where a rank's positions do not rise, a span is longer than it must be, and still
correct.)

Written in Pallas, which makes Triton programs of the three kernels for GPUs (JAX 0.12 still does, and warns
that a later version will not). For TPUs `llmpar.kernels.flash_tpu` uses the same spans and the same tiles. On
CPUs `run_on_cpu` runs the kernels in plain JAX: slowly, for tests.

Dims: b batch, s query positions, t key positions, k KV heads, r query heads per KV head, h head width. Ids
are ``[b, 2, s]``: positions, then segments.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from llmpar.kernels.tiles import KernelTiles, kernel_tiles, padded_width
from llmpar.parallel.collectives import vary_alike
from llmpar.plan.sequence_order import Mask, seen_tiles

_LOG2_E = float(np.log2(np.e))  # GPUs have an instruction for powers of 2
# for minus infinity, of which no difference can be taken
_LEAST = float(np.finfo(np.float32).min) / 2
# of keys that an A100's or H100's second cache (40, 50 MB) holds beside other things
_L2_BYTES = 2**25
ENOUGH = 512  # programs: some for each of a GPU's 132 multiprocessors (H100), so that none waits for the last
# of padded queries; of padded keys one more: they see each other never
_NO_SEGMENT = np.iinfo(np.int32).min

Q = Float[Array, "b s k r h"]
KV = Float[Array, "b t k h"]
PerQuery = Float[Array, "b s k r"]
QueryIds = Int[Array | np.ndarray, "_ 2 s"]
KeyIds = Int[Array | np.ndarray, "_ 2 t"]

# ------------------------------------------------------------------------------------------- spans of tiles


def spans(
    mask: Mask, q_ids: QueryIds, k_ids: KeyIds, q_tile: int, k_tile: int, of_keys: bool = False
) -> Int[Array | np.ndarray, "_ tile 4"]:
    """Return begin, whole, stop and end for each tile of queries (of keys: `of_keys`): it needs the other
    side's tiles in [begin, end), and those in [whole, stop) need no mask."""
    cut = lambda ids, tile: jnp.moveaxis(ids.reshape(*ids.shape[:2], -1, tile), 2, 0)
    live, full = seen_tiles(mask, cut(q_ids, q_tile), cut(k_ids, k_tile))
    live, full = (x.transpose(2, 1, 0) if of_keys else x.transpose(2, 0, 1) for x in (live, full))
    n, j = live.shape[-1], jnp.arange(live.shape[-1])[None, None]
    first, behind = (
        (lambda x: jnp.where(x, j, n).min(-1)),
        (lambda x: jnp.where(x, j + 1, 0).max(-1)),
    )
    begin, whole, stop, end = first(live), first(full), behind(full), behind(live)
    solid = stop - whole == full.sum(-1)
    numbers = jnp.minimum(begin, end), jnp.where(solid, whole, 0), jnp.where(solid, stop, 0), end
    return jnp.stack(numbers, -1).astype(jnp.int32)


def _over_span(span, add_tile, sums):
    """Add the tiles of a span, ``add_tile(tile, masked, sums) -> sums``: first those that need no mask."""
    begin, whole, stop, end = (span[i] for i in range(4))
    sums = lax.fori_loop(whole, stop, lambda j, sums: add_tile(j, False, sums), sums)
    masked = lambda i, sums: add_tile(jnp.where(i < whole, i, i + stop - whole), True, sums)
    return lax.fori_loop(begin, end - (stop - whole), masked, sums)


# ---------------------------------------------------------------------------------------------------- kernels

_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
_column = lambda x: x[:, None] if x.ndim == 1 else x


def _weights(seen, scores, lse):
    """Return softmax weights from scores and lse to base 2."""
    weights = jnp.exp2(scores - lse)
    return weights if seen is None else jnp.where(seen, weights, 0)


def _start_merge(scale, queries, partials, tall):
    """Return sums of values, largest scores to base 2 and sums of weights: of partial results, or zero."""
    shape = (len(queries[0]), *tall)
    if not partials:
        return jnp.zeros(queries[0].shape), jnp.full(shape, _LEAST), jnp.zeros(shape)
    out, lse = partials
    sees_any = lse > _LEAST
    return out, jnp.where(sees_any, lse * _LOG2_E, _LEAST), sees_any.astype(jnp.float32)


def _merge(scale, queries, keys, seen, sums):
    """Merge a tile of keys into a tile of queries."""
    (q,), (k, v), (values, top, total) = queries, keys, sums
    scores = _einsum("qh,kh->qk", q, k) * (scale * _LOG2_E)
    scores = scores if seen is None else jnp.where(seen, scores, _LEAST)
    new_top = jnp.maximum(top, scores.max(1, keepdims=top.ndim == 2))
    weights, shrink = _weights(seen, scores, _column(new_top)), jnp.exp2(top - new_top)
    values = values * _column(shrink) + _einsum("qk,kh->qh", weights.astype(v.dtype), v)
    return values, new_top, total * shrink + weights.sum(1, keepdims=top.ndim == 2)


def _finish_merge(scale, sums):
    """Return out and lse."""
    values, top, total = sums
    sees_any = total > 0
    total = jnp.where(sees_any, total, 1)
    return values / _column(total), jnp.where(sees_any, top / _LOG2_E + jnp.log(total), -jnp.inf)


def _queries_grad(scale, queries, keys, seen, sums):
    """Add dS K of a tile of keys, with dS = P (dO V' - delta); scaled at the end."""
    (q, out_grad, lse, delta), (k, v) = queries, keys
    weights = _weights(seen, _einsum("qh,kh->qk", q, k) * (scale * _LOG2_E), _column(lse * _LOG2_E))
    scores_grad = weights * (_einsum("qh,kh->qk", out_grad, v) - _column(delta))
    return (sums[0] + _einsum("qk,kh->qh", scores_grad.astype(k.dtype), k),)


def _keys_grad(scale, queries, keys, seen, sums):
    """Add dS' Q, scaled at the end, and P' dO of a tile of queries. Pairs are transposed: a row a key."""
    (q, out_grad, lse, delta), (k, v) = queries, keys
    weights = _weights(seen, _einsum("kh,qh->kq", k, q) * (scale * _LOG2_E), lse * _LOG2_E)
    scores_grad = weights * (_einsum("kh,qh->kq", v, out_grad) - delta)
    dk = sums[0] + _einsum("kq,qh->kh", scores_grad.astype(q.dtype), q)
    return dk, sums[1] + _einsum("kq,qh->kh", weights.astype(out_grad.dtype), out_grad)


class Kernel(NamedTuple):
    """The steps of a program, which has one tile of queries or of keys and loops over the tiles of its span.

    ``start(scale, own, partials, tall)`` gives the sums of its own tile, where `tall` ends the shape of one
    number per query; ``add(scale, queries, keys, seen, sums)`` adds a pair of tiles; ``finish(scale, sums)``
    gives the results, arrays of these kinds (`ARRAY_DIMS`).
    """

    name: str
    start: Callable
    add: Callable
    finish: Callable
    results: tuple[str, ...]
    of_keys: bool = False  # a program has a tile of keys, not of queries


_start_dq = lambda scale, own, partials, _: [
    partials[0] / scale if partials else jnp.zeros(own[0].shape)
]
_start_dkv = lambda scale, own, *_: [jnp.zeros(x.shape) for x in own]
_scale_first = lambda scale, sums: (sums[0] * scale, *sums[1:])
FORWARD = Kernel("flash_forward", _start_merge, _merge, _finish_merge, ("queries", "per_query"))
_QUERIES_GRAD = Kernel("flash_queries_grad", _start_dq, _queries_grad, _scale_first, ("queries",))
_KEYS_GRAD = Kernel(
    "flash_keys_grad", _start_dkv, _keys_grad, _scale_first, ("key_grads",) * 2, of_keys=True
)

# Kinds of arrays and their dims. Besides the letters above, w: query heads, each with its own part of a KV
# head's gradient; i: position and segment; j: tiles; n: the numbers of a span.
ARRAY_DIMS = {
    "queries": "bskrh",
    "keys": "btkh",
    "per_query": "bkrs",
    "key_grads": "btkwh",
    "q_ids": "bis",
    "k_ids": "bit",
    "span": "bjn",
}


class Call(NamedTuple):
    """One call of a kernel, without its arrays."""

    kernel: Kernel
    mask: Mask
    scale: float
    tiles: KernelTiles
    sizes: dict[str, int]  # of dims, padded to whole tiles
    kinds: tuple  # of the arguments, nested as they are
    dtypes: tuple  # of the results


def add_pair(call: Call, own, other, masked, sums):
    """Add a pair of tiles, each given by its arrays with the ids last: a program's own tile (ids in columns)
    and one of the other side (ids in rows)."""
    (*queries, q_ids), (*keys, k_ids) = (other, own) if call.kernel.of_keys else (own, other)
    gap = q_ids[0] - k_ids[0] if masked else None
    seen = call.mask.admits(gap, gap) & (q_ids[1] == k_ids[1]) if masked else None
    return tuple(call.kernel.add(call.scale, queries, keys, seen, sums))


def _program(
    call, keys, queries, partials, span, own_at, other_at, read=lambda x, at, _: x[at], heads=1
):
    """Return the results of one tile, at the index `own_at` of its arrays: start from the partial results, if
    there are any, and add its span for each of so many `heads`. The other side's tile j has the index
    ``other_at(j)``."""
    (*own, ids), (*others, other_ids) = (keys, queries) if call.kernel.of_keys else (queries, keys)
    own = [*(x[own_at] for x in own), [ids[n, own_at][:, None] for n in (0, 1)]]

    def add_tile(head, j, masked, sums):
        at = other_at(j)
        other = [x if x.ndim > 1 else x[None] for x in (read(x, at, head) for x in others)]
        return add_pair(call, own, [*other, [other_ids[n, at][None] for n in (0, 1)]], masked, sums)

    add_head = lambda head, sums: _over_span(span, functools.partial(add_tile, head), sums)
    sums = vary_alike(
        tuple(call.kernel.start(call.scale, own[:-1], [x[own_at] for x in partials], ())), span[0]
    )
    return call.kernel.finish(
        call.scale, add_head(0, sums) if heads == 1 else lax.fori_loop(0, heads, add_head, sums)
    )


# ---------------------------------------------------------------------------------------------------- calling

_heads_first = lambda x: x.transpose(0, 2, 3, 1)  # b k r s: in a kernel positions are neighbours


def kernel_forward(
    q: Q,
    k: KV,
    v: KV,
    q_ids: QueryIds,
    k_ids: KeyIds,
    partials: tuple[Q, PerQuery] | None = None,
    **settings: Any,
) -> tuple[Q, PerQuery]:
    """Attend: (out in q's dtype, lse in float32). With partial results about other keys, whose out is in
    float32, return both merged, and out in float32. The settings are those of `_call`."""
    dtype = jnp.float32 if partials else q.dtype
    before = (partials[0], _heads_first(partials[1])) if partials else ()
    out, lse = _call(FORWARD, (k, v), (q,), before, q_ids, k_ids, dtype, **settings)
    return out, lse.transpose(0, 3, 1, 2)


def kernel_backward(
    q: Q,
    k: KV,
    v: KV,
    q_ids: QueryIds,
    k_ids: KeyIds,
    per_query: tuple,
    dq: Q | None = None,
    **settings: Any,
) -> tuple[Q, KV, KV]:
    """Return float32 (dq, dk, dv), where dq is added to the one given. ``per_query``: dO; the lse of whole
    rows, finite; and delta, the row sum of dO O less the gradient of lse.

    Where a device has few KV heads, query heads have parts of dK and dV, which are summed here: more programs
    keep a GPU busy."""
    out_grad, *rows = per_query
    arrays = (k, v), (q, out_grad, *map(_heads_first, rows))
    (dq,) = _call(_QUERIES_GRAD, *arrays, () if dq is None else (dq,), q_ids, k_ids, **settings)
    dk, dv = _call(_KEYS_GRAD, *arrays, (), q_ids, k_ids, **settings)
    return dq, dk.sum(3), dv.sum(3)


def _call(
    kernel: Kernel,
    keys,
    queries,
    partials,
    q_ids,
    k_ids,
    dtype=jnp.float32,
    *,
    mask: Mask,
    scale: float,
    platform: str,
    launch: Callable,
):
    """Run a kernel on arrays of any length and width: pad them to whole tiles, find the spans, and cut the
    results, of which the first has this dtype. ``launch(call, arrays)`` runs kernels on the platform."""
    (b, s, k, r, h), t = queries[0].shape, keys[0].shape[1]
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    tiles = kernel_tiles(
        kernel.name, h, queries[0].dtype.itemsize, s, t, platform, device.device_kind
    )
    q_ids, k_ids = (
        _pad_ids(q_ids, b, tiles.q, _NO_SEGMENT),
        _pad_ids(k_ids, b, tiles.k, _NO_SEGMENT + 1),
    )
    span = spans(mask, q_ids, k_ids, tiles.q, tiles.k, kernel.of_keys)
    sizes = dict(b=b, s=s, t=t, k=k, r=r, w=r, h=h, i=2, j=span.shape[1], n=4)
    padded = sizes | dict(s=q_ids.shape[-1], t=k_ids.shape[-1], h=padded_width(h))

    def pad(kind, x):
        return jnp.pad(
            x, [(0, padded[dim] - n) for dim, n in zip(ARRAY_DIMS[kind], x.shape, strict=True)]
        )

    kinds_of = lambda arrays: [{5: "queries", 4: "per_query", 3: "q_ids"}[x.ndim] for x in arrays]
    arrays = [*keys, k_ids], [*queries, q_ids], list(partials), span
    kinds = ["keys", "keys", "k_ids"], kinds_of(arrays[1]), kinds_of(partials), "span"
    call = Call(
        kernel, mask, scale, tiles, padded, kinds, (dtype, jnp.float32)[: len(kernel.results)]
    )
    results = launch(call, vary_alike(jax.tree.map(pad, kinds, arrays)))
    cut = lambda kind, x: x[tuple(slice(sizes[dim]) for dim in ARRAY_DIMS[kind])]
    return list(map(cut, kernel.results, results))


def pallas_specs(call: Call, dims, sizes, like, block, place):
    """Return what Pallas wants: shapes of results, blocks of arguments and blocks of results. ``dims`` are as
    `ARRAY_DIMS`, with these sizes in an array and in a ``block``; ``place(*program)`` gives the index of a
    program's block in each dim."""

    def spec(kind):
        index = lambda *program: [place(*program).get(dim, 0) for dim in dims[kind]]
        return pl.BlockSpec([block.get(dim) for dim in dims[kind]], index)

    kinds, varying = call.kernel.results, jax.typeof(like).manual_axis_type
    shapes = [tuple(sizes[dim] for dim in dims[kind]) for kind in kinds]
    results = [
        jax.ShapeDtypeStruct(*x, manual_axis_type=varying)
        for x in zip(shapes, call.dtypes, strict=True)
    ]
    return results, list(jax.tree.map(spec, call.kinds)), list(map(spec, kinds))


def run_on_gpu(call: Call, arrays, pallas_call=None):
    """Run a kernel on a GPU (or by another `pallas_call`) on padded arrays.

    A program has one tile of queries of a head, or one of keys and as many query heads as leave `ENOUGH`
    programs, and all tiles of the other side that its span may name. Late queries see most, and early keys
    are seen by most: these programs come first, so that none is left over at the end. As many heads run side
    by side as a GPU's second cache can store the keys (or the queries) of.
    """
    tiles, sizes, of_keys = call.tiles, call.sizes, call.kernel.of_keys
    if pallas_call is None:  # the import is late: nothing but a GPU wants it
        from jax.experimental.pallas import triton

        params = triton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages)
        pallas_call = functools.partial(
            pl.pallas_call, name=call.kernel.name, compiler_params=params
        )
    b, s, t, k, r, h, num_tiles = (sizes[dim] for dim in "bstkrhj")
    w = next(
        n for n in range(1, r + 1) if r % n == 0 and (n == r or b * k * n * num_tiles >= ENOUGH)
    )
    w, heads = (w, r // w) if of_keys else (r, 1)  # programs of a KV head, and query heads of each
    cached = (
        _L2_BYTES * w * heads // (2 * arrays[0][0].dtype.itemsize * h * (s * r if of_keys else t))
    )
    side = max(n for n in range(1, k * w + 1) if k * w % n == 0 and n <= max(1, cached))
    groups = k * w // side

    def place(x, i, z):
        """Return the block of head x of those side by side, of tile i, and of group z of all rows' heads."""
        head, i = z % groups * side + x, i if of_keys else num_tiles - 1 - i
        return dict(b=z // groups, k=head // w, r=head % w, w=head % w, j=i) | {
            "t" if of_keys else "s": i
        }

    def body(keys, queries, partials, span, *refs):
        size = tiles.q if of_keys else tiles.k
        other_at = lambda j: pl.ds(j * size, size)
        read = lambda x, at, head: (
            x[at] if not of_keys else x[at, head] if len(x.shape) == 3 else x[head, at]
        )
        results = _program(call, keys, queries, partials, span, slice(None), other_at, read, heads)
        for ref, x in zip(refs, results, strict=True):
            ref[...] = x.astype(ref.dtype)

    block = dict(s=s, t=tiles.k, r=heads) if of_keys else dict(s=tiles.q, t=t)
    block, sizes = block | dict(h=h, i=2, n=4), sizes | dict(w=w)
    shapes, takes, gives = pallas_specs(call, ARRAY_DIMS, sizes, arrays[-1], block, place)
    grid = side, num_tiles, b * groups
    return pallas_call(body, out_shape=shapes, grid=grid, in_specs=takes, out_specs=gives)(*arrays)


def run_on_cpu(call: Call, arrays):
    """Run a kernel in plain JAX, as `run_on_gpu`: also inside `jax.shard_map`, whose varying types Pallas's
    own interpreter breaks (JAX 0.10 and 0.12)."""

    def cut(x, tile):
        return x.reshape(2, -1, tile) if x.dtype == jnp.int32 else x.reshape(-1, tile, *x.shape[1:])

    def run(keys, queries, partials, span):
        """Run all tiles of one head of one row."""
        keys, queries = (
            [cut(x, call.tiles.k) for x in keys],
            [cut(x, call.tiles.q) for x in queries],
        )
        given = call, keys, queries, [cut(x, call.tiles.q) for x in partials]
        results = lax.map(
            lambda i: _program(*given, span[i], i, lambda j: j), jnp.arange(len(span))
        )
        return [
            x.reshape(-1, *x.shape[2:]).astype(dtype)
            for x, dtype in zip(results, call.dtypes, strict=True)
        ]

    # The axis of query heads in the arrays of a KV head, then that of KV heads in those of a row.
    axes = {"queries": 1, "per_query": 0, "key_grads": 1}
    for axis in (axes, axes | {"keys": 1}):
        run = jax.vmap(
            run, tuple(jax.tree.map(axis.get, call.kinds)), list(map(axis.get, call.kernel.results))
        )
    return jax.vmap(run)(*arrays)


def _pad_ids(ids, b, tile, segment):
    """Pad ids to a multiple of the tile: with the last position, so that its extremes stay, and a segment
    that no position has."""
    ids, more = jnp.broadcast_to(ids, (b, *ids.shape[1:])), -ids.shape[-1] % tile
    padding = jnp.repeat(ids[:, :, -1:].at[:, 1].set(segment), more, -1)
    return jnp.concatenate([ids, padding], -1) if more else ids
