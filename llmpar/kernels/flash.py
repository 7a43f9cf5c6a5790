"""Attend by a kernel that keeps no scores: forward, and backward from the log of sums.

FlashAttention (Dao 2023) over *spans* of tiles. Positions and segments travel with queries and keys, as
everywhere in `llmpar.model.attention`. Before a kernel starts, the extremes of every tile of queries are
compared with those of every tile of keys, and each tile gets four numbers: the first tile that it meets,
the first that it meets whole (all pairs are seen, which needs no mask), where these end, and where all end.
The kernel walks along its span. This covers every order of the sequence, windows and packed documents,
without an array of s x t. (Where a rank's positions do not rise, a span is longer than it must be, and as
right.)

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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from llmpar.kernels.tiles import kernel_tiles, padded_width
from llmpar.parallel.collectives import vary_alike
from llmpar.plan.sequence_order import Mask, seen_tiles

LOG2_E = float(np.log2(np.e))  # GPUs have an instruction for powers of 2
LEAST = float(np.finfo(np.float32).min) / 2  # for minus infinity, of which no difference can be taken
CACHE = 2**25  # bytes of keys that an A100's or H100's second cache (40, 50 MB) holds beside other things
ENOUGH = 512  # programs: some for each of a GPU's 132 multiprocessors (H100), so that none waits for the last
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
    begin, whole, stop, end = (span[i] for i in range(4))
    carry = lax.fori_loop(whole, stop, lambda j, carry: visit(j, False, carry), carry)
    rest = lambda i, carry: visit(jnp.where(i < whole, i, i + stop - whole), True, carry)
    return lax.fori_loop(begin, end - (stop - whole), rest, carry)


# ---------------------------------------------------------------------------------------------------- kernels

_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
_column = lambda x: x[:, None] if x.ndim == 1 else x


def _weights(seen, scores, lse):
    """Softmax weights from scores and lse to base 2."""
    weights = jnp.exp2(scores - lse)
    return weights if seen is None else jnp.where(seen, weights, 0)


def _nothing_merged(scale, queries, before, tall):
    """Sums of values, largest scores to base 2 and sums of weights, of what came before or of nothing."""
    lse = (len(queries[0]), *tall)
    if not before:
        return jnp.zeros(queries[0].shape), jnp.full(lse, LEAST), jnp.zeros(lse)
    some = before[1] > LEAST
    return before[0], jnp.where(some, before[1] * LOG2_E, LEAST), some.astype(jnp.float32)


def _merge(scale, queries, keys, seen, sums):
    """Merge a tile of keys into a tile of queries."""
    (q,), (k, v), (held, top, total) = queries, keys, sums
    scores = _product("qh,kh->qk", q, k) * (scale * LOG2_E)
    scores = scores if seen is None else jnp.where(seen, scores, LEAST)
    most = jnp.maximum(top, scores.max(1, keepdims=top.ndim == 2))
    weights, shrink = _weights(seen, scores, _column(most)), jnp.exp2(top - most)
    held = held * _column(shrink) + _product("qk,kh->qh", weights.astype(v.dtype), v)
    return held, most, total * shrink + weights.sum(1, keepdims=top.ndim == 2)


def _merged(scale, sums):
    """Out and lse."""
    held, top, total = sums
    some = total > 0
    total = jnp.where(some, total, 1)
    return held / _column(total), jnp.where(some, top / LOG2_E + jnp.log(total), -jnp.inf)


def _queries_grad(scale, queries, keys, seen, sums):
    """Add dS K of a tile of keys, with dS = P (dO V' - delta); scaled at the end."""
    (q, out_grad, lse, delta), (k, v) = queries, keys
    weights = _weights(seen, _product("qh,kh->qk", q, k) * (scale * LOG2_E), _column(lse * LOG2_E))
    scores_grad = weights * (_product("qh,kh->qk", out_grad, v) - _column(delta))
    return (sums[0] + _product("qk,kh->qh", scores_grad.astype(k.dtype), k),)


def _keys_grad(scale, queries, keys, seen, sums):
    """Add dS' Q, scaled at the end, and P' dO of a tile of queries. Pairs are transposed: a row a key."""
    (q, out_grad, lse, delta), (k, v) = queries, keys
    weights = _weights(seen, _product("kh,qh->kq", k, q) * (scale * LOG2_E), lse * LOG2_E)
    scores_grad = weights * (_product("kh,qh->kq", v, out_grad) - delta)
    dk = sums[0] + _product("kq,qh->kh", scores_grad.astype(q.dtype), q)
    return dk, sums[1] + _product("kq,qh->kh", weights.astype(out_grad.dtype), out_grad)


class Kernel(NamedTuple):
    """What a program does with its own tile, of queries or of keys, and those that its span names.

    ``start(scale, own, before, tall)`` gives its sums, where `tall` ends the shape of one number a query;
    ``visit(scale, queries, keys, seen, sums)`` adds a pair of tiles; ``finish(scale, sums)`` gives the
    results, of the `KINDS` that it `makes`.
    """

    start: Callable
    visit: Callable
    finish: Callable
    makes: tuple[str, ...]


OF_KEYS = "flash_keys_grad"  # the kernel of which a program has a tile of keys, not of queries
_of_queries = lambda scale, own, before, _: [before[0] / scale if before else jnp.zeros(own[0].shape)]
_of_keys = lambda scale, own, *_: [jnp.zeros(x.shape) for x in own]
_scaled = lambda scale, sums: (sums[0] * scale, *sums[1:])
KERNELS = {
    "flash_forward": Kernel(_nothing_merged, _merge, _merged, ("rows", "numbers")),
    "flash_queries_grad": Kernel(_of_queries, _queries_grad, _scaled, ("rows",)),
    OF_KEYS: Kernel(_of_keys, _keys_grad, _scaled, ("shares", "shares")),
}
KINDS = {"rows": "bskrh", "keys": "btkh", "numbers": "bkrs", "shares": "btkwh"}
KINDS |= {"q_ids": "bis", "k_ids": "bit", "span": "bjn"}
"""Kinds of arrays, and their dims as above; w query heads that each have a share of a KV head's gradient."""


def visit(name, how, own, other, masked, sums):
    """Add a pair of tiles, each its arrays and last its ids: of a program's own columns, of the other's
    rows."""
    (*queries, q_ids), (*keys, k_ids) = (other, own) if name == OF_KEYS else (own, other)
    gap = q_ids[0] - k_ids[0] if masked else None
    seen = how.mask.admits(gap, gap) & (q_ids[1] == k_ids[1]) if masked else None
    return tuple(KERNELS[name].visit(how.scale, queries, keys, seen, sums))


def program(name, how, keys, queries, before, span, mine, theirs, read=lambda x, at, _: x[at], heads=1):
    """Return the results of one tile, which lies at `mine`: begin with what came before, if anything, and
    walk along its span, for each of so many `heads`. The others' tile j lies at ``theirs(j)``."""
    (*own, ids), (*others, other_ids) = (keys, queries) if name == OF_KEYS else (queries, keys)
    own = [*(x[mine] for x in own), [ids[n, mine][:, None] for n in (0, 1)]]
    start, _, finish, _ = KERNELS[name]

    def add(head, j, masked, sums):
        at = theirs(j)
        other = [x if x.ndim > 1 else x[None] for x in (read(x, at, head) for x in others)]
        return visit(name, how, own, [*other, [other_ids[n, at][None] for n in (0, 1)]], masked, sums)

    walk = lambda head, sums: _walk(span, functools.partial(add, head), sums)
    sums = vary_alike(tuple(start(how.scale, own[:-1], [x[mine] for x in before], ())), span[0])
    return finish(how.scale, walk(0, sums) if heads == 1 else lax.fori_loop(0, heads, walk, sums))


# ---------------------------------------------------------------------------------------------------- calling


@dataclass(frozen=True)
class Setting:
    """What does not depend on the arrays. `platform`: of the devices; `run`: who runs the kernels there."""

    mask: Mask
    scale: float
    platform: str | None = None
    run: Callable | None = None


_numbers = lambda x: x.transpose(0, 2, 3, 1)  # b k r s: positions of numbers are neighbours in a kernel


def forward(
    how: Setting, q: Q, k: KV, v: KV, q_ids: QueryIds, k_ids: KeyIds, before: tuple[Q, Numbers] | None = None
) -> tuple[Q, Numbers]:
    """Attend: (out in q's dtype, lse in float32). Merged with what came ``before``, such a pair about other
    keys with its out in float32, the new out is in float32 too."""
    dtype = jnp.float32 if before else q.dtype
    before = before and (before[0], _numbers(before[1]))
    out, lse = _call("flash_forward", how, (k, v), (q,), before or (), q_ids, k_ids, dtype)
    return out, lse.transpose(0, 3, 1, 2)


def backward(
    how: Setting, q: Q, k: KV, v: KV, q_ids: QueryIds, k_ids: KeyIds, terms: tuple, before: Q | None = None
) -> tuple[Q, KV, KV]:
    """Return float32 (dq, dk, dv), dq added to what came ``before``. The terms: dO; the lse of whole rows,
    finite; and delta, the row sum of dO O less the gradient of lse.

    Where a device has few KV heads, query heads make shares of dK and dV, which are summed here: more
    programs keep a GPU busy."""
    out_grad, *numbers = terms
    given = (k, v), (q, out_grad, *map(_numbers, numbers))
    (dq,) = _call("flash_queries_grad", how, *given, () if before is None else (before,), q_ids, k_ids)
    dk, dv = _call(OF_KEYS, how, *given, (), q_ids, k_ids)
    return dq, dk.sum(3), dv.sum(3)


def _call(name, how, keys, queries, before, q_ids, k_ids, dtype=jnp.float32):
    """Run a kernel on arrays of any length and width: pad them to tiles, find the spans, cut the results, of
    which the first has this dtype."""
    (b, s, k, r, h), t, makes = queries[0].shape, keys[0].shape[1], KERNELS[name].makes
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    tiles = kernel_tiles(name, h, queries[0].dtype.itemsize, s, t, how.platform, device.device_kind)
    q_ids, k_ids = _pad_ids(q_ids, b, tiles.q, NOBODY), _pad_ids(k_ids, b, tiles.k, NOBODY + 1)
    span = spans(how.mask, q_ids, k_ids, tiles.q, tiles.k, name == OF_KEYS)
    sizes = dict(b=b, s=s, t=t, k=k, r=r, w=r, h=h, i=2, j=span.shape[1], n=4)
    shape = lambda kind: [sizes[dim] for dim in KINDS[kind]]
    cuts = [tuple(map(slice, shape(kind))) for kind in makes]
    sizes |= dict(s=q_ids.shape[-1], t=k_ids.shape[-1], h=padded_width(h))
    pad = lambda kind, x: jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, shape(kind), strict=True)])
    of_queries = lambda arrays: [{5: "rows", 4: "numbers", 3: "q_ids"}[x.ndim] for x in arrays]
    given = [*keys, k_ids], [*queries, q_ids], list(before), span
    kinds = ["keys", "keys", "k_ids"], of_queries(given[1]), of_queries(before), "span"
    dtypes = dtype, *[jnp.float32] * (len(makes) - 1)
    found = how.run(name, how, tiles, sizes, kinds, vary_alike(jax.tree.map(pad, kinds, given)), dtypes)
    return [x[cut] for x, cut in zip(found, cuts, strict=True)]


def layout(name, dims, sizes, kinds, dtypes, like, block, place):
    """Return what Pallas asks: shapes of results, blocks of arguments and of results. ``dims`` as `KINDS`,
    which have these sizes in an array and in a ``block``; ``place(*program)`` says where the blocks lie."""
    alike, makes = jax.typeof(like).manual_axis_type, KERNELS[name].makes

    def spec(kind):
        at = lambda *program: [place(*program).get(dim, 0) for dim in dims[kind]]
        return pl.BlockSpec([block.get(dim) for dim in dims[kind]], at)

    shapes = [tuple(sizes[dim] for dim in dims[kind]) for kind in makes]
    made = [jax.ShapeDtypeStruct(*x, manual_axis_type=alike) for x in zip(shapes, dtypes, strict=True)]
    return made, list(jax.tree.map(spec, kinds)), list(map(spec, makes))


def run(name, how, tiles, sizes, kinds, given, dtypes, call=None):
    """Run a kernel on a GPU (or by a `call` of Pallas) on arrays of some kinds, whose dims have these padded
    sizes, for results of these dtypes.

    A program has one tile of queries of a head, or one of keys and as many query heads as leave `ENOUGH`
    programs, and of the others all that its span may name. Late queries see most, and early keys are seen by
    most: these programs come first, so that none is left over at the end. As many heads stand side by side as
    a GPU's second cache holds the keys (or the queries) of.
    """
    if call is None:  # the import is late: nothing but a GPU wants it
        from jax.experimental.pallas import triton

        ask = triton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages)
        call = functools.partial(pl.pallas_call, name=name, compiler_params=ask)
    b, s, t, k, r, h, num_tiles = (sizes[dim] for dim in "bstkrhj")
    of_keys, size = name == OF_KEYS, tiles.q if name == OF_KEYS else tiles.k
    w = next(n for n in range(1, r + 1) if r % n == 0 and (n == r or b * k * n * num_tiles >= ENOUGH))
    w, heads = (w, r // w) if of_keys else (r, 1)  # programs of a KV head, and query heads of each
    room = CACHE * w * heads // (2 * given[0][0].dtype.itemsize * h * (s * r if of_keys else t))
    side = max(n for n in range(1, k * w + 1) if k * w % n == 0 and n <= max(1, room))
    turns = k * w // side

    def place(x, i, z):
        """Of head x of those side by side, tile i, and z of their turns in all rows."""
        head, i = z % turns * side + x, i if of_keys else num_tiles - 1 - i
        return dict(b=z // turns, k=head // w, r=head % w, w=head % w, j=i) | {"t" if of_keys else "s": i}

    def body(*refs):
        read = lambda x, at, head: x[at] if not of_keys else x[at, head] if len(x.shape) == 3 else x[head, at]
        tile: dict = dict(mine=slice(None), theirs=lambda j: pl.ds(j * size, size), read=read, heads=heads)
        for ref, x in zip(refs[4:], program(name, how, *refs[:4], **tile), strict=True):
            ref[...] = x.astype(ref.dtype)

    block = dict(s=s, t=tiles.k, r=heads) if of_keys else dict(s=tiles.q, t=t)
    block, sizes = block | dict(h=h, i=2, n=4), sizes | dict(w=w)
    made, takes, makes = layout(name, KINDS, sizes, kinds, dtypes, given[-1], block, place)
    grid = side, num_tiles, b * turns
    return call(body, out_shape=made, grid=grid, in_specs=takes, out_specs=makes)(*given)


def plain(name, how, tiles, sizes, kinds, given, dtypes):
    """As `run`, in plain JAX: for CPUs, also inside `jax.shard_map`, whose varying types Pallas's own
    interpreter breaks (JAX 0.10 and 0.12)."""

    def one(keys, queries, before, span):
        """One head of one row."""
        cut = lambda x, tile: (
            x.reshape(2, -1, tile) if x.dtype == jnp.int32 else x.reshape(-1, tile, *x.shape[1:])
        )
        keys, queries = [cut(x, tiles.k) for x in keys], [cut(x, tiles.q) for x in queries]
        given = name, how, keys, queries, [cut(x, tiles.q) for x in before]
        found = lax.map(lambda i: program(*given, span[i], i, lambda j: j), jnp.arange(len(span)))
        return [x.reshape(-1, *x.shape[2:]).astype(dtype) for x, dtype in zip(found, dtypes, strict=True)]

    for gone, dims in ("bk", "rw"), ("b", "k"), ("", "b"):
        left = {kind: [dim for dim in KINDS[kind] if dim not in gone] for kind in KINDS}
        at = {kind: next((n for n, dim in enumerate(left[kind]) if dim in dims), None) for kind in KINDS}
        one = jax.vmap(one, tuple(jax.tree.map(at.get, kinds)), [at[kind] for kind in KERNELS[name].makes])
    return one(*given)


def _pad_ids(ids, b, tile, segment):
    """Repeat the last position up to a multiple of the tile, so that its extremes stay; the segment is
    nobody's."""
    ids, more = jnp.broadcast_to(ids, (b, *ids.shape[1:])), -ids.shape[-1] % tile
    behind = jnp.repeat(ids[:, :, -1:].at[:, 1].set(segment), more, -1)
    return jnp.concatenate([ids, behind], -1) if more else ids
