"""Find the cheapest moves between two layouts of a value, and beside them what a program sends.

XLA does not always take them: from ``P('X', None)`` to ``P(None, 'Y')`` it gathers whole columns and slices
them; to slice first, and then to gather, sends half. A layout is, for each dim, the axes that cut it.
"""

import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from llmpar.inspect.census import census_hlo, collective_bytes, partitioned_hlo
from llmpar.inspect.twin import read
from llmpar.parallel.mesh import axes_of

Cuts = tuple[tuple[str, ...], ...]
Sizes = tuple[tuple[str, int], ...]
"""The axes of a mesh with their sizes."""
_CALLS = {
    "reshard": "jax.sharding.reshard",
    "sharding_constraint": "jax.lax.with_sharding_constraint",
}
_MOST = 4
"""Axes: the layouts on more of them are too many to search."""
_MOVERS = "all-gather", "all-to-all", "collective-permute"


@functools.cache
def cheapest_moves(
    before: Cuts, after: Cuts, shape: tuple[int, ...], itemsize: float, sizes: Sizes
) -> tuple[int, tuple[Cuts, ...]]:
    """Return the fewest bytes that a device can send from one layout to another, and the layouts on the
    way to the last one."""
    queue: list[tuple[int, int, Cuts, tuple[Cuts, ...]]] = [(0, 0, before, ())]
    done = set[Cuts]()
    while queue:
        sent, steps, cuts, path = heapq.heappop(queue)
        if cuts == after:
            return sent, path
        for kind, axes, more in _moves(cuts, dict(sizes)) if cuts not in done else ():
            if (part := _part(shape, more, dict(sizes))) is not None:
                group = math.prod(dict(sizes)[a] for a in axes)
                cost = collective_bytes(kind, group, int(part * itemsize)) if kind else 0
                heapq.heappush(queue, (sent + cost, steps + 1, more, (*path, more)))
        done.add(cuts)
    raise ValueError(f"the layouts {before} and {after} do not divide {shape} evenly")


def _part(shape: tuple[int, ...], cuts: Cuts, sizes: dict[str, int]) -> int | None:
    """Return the elements of a device, None where dims are not divided evenly."""
    tiles = [math.prod(sizes[a] for a in axes) for axes in cuts]
    even = all(n % m == 0 for n, m in zip(shape, tiles, strict=True))
    return math.prod(shape) // math.prod(tiles) if even else None


def _moves(cuts: Cuts, sizes: dict[str, int]) -> Iterator[tuple[str, tuple[str, ...], Cuts]]:
    """List each single move from a layout: its collective ('' of a slice), its axes, the layout after it."""
    put = lambda cuts, d, axes: (*cuts[:d], axes, *cuts[d + 1 :])
    flat = sum(cuts, ())
    for d, axes in enumerate(cuts):
        for a in sizes.keys() - flat:
            yield "", (a,), put(cuts, d, (*axes, a))
        for k in range(len(axes)):
            rest, inner = put(cuts, d, axes[:k]), axes[k:]
            yield "all-gather", inner, rest
            for e in (e for e in range(len(cuts)) if e != d):
                yield "all-to-all", inner, put(rest, e, (*cuts[e], *inner))
    tiles = [math.prod(sizes[a] for a in axes) for axes in cuts]
    for other in itertools.permutations(sizes):
        more, names = list[tuple[str, ...]](), [*other]
        for tile in tiles:
            more.append(())
            while math.prod(sizes[a] for a in more[-1]) < tile and names:
                more[-1] += (names.pop(0),)
        if tiles == [math.prod(sizes[a] for a in axes) for axes in more] and tuple(more) != cuts:
            yield "collective-permute", other[:1], tuple(more)


def cheaper(
    jaxpr: Any, arguments: list[Any], mesh: Mesh, rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """List the reshards of a program that could send less: ``source``, ``count``, ``bytes_sent`` and
    ``instead_of`` as both are compiled, ``expression``.

    Those outside shard_map of which both layouts are known, by the types of explicit axes, or as constraints
    on arguments and on one another; on up to `_MOST` axes. ``arguments`` are the shardings of a traced
    function's, ``rows`` those of a look at it.
    """
    program, counts = read(jaxpr), Counter[tuple]()
    known = dict(zip(program.takes, arguments, strict=False))
    for home, step in program.all_steps():
        if step.name in _CALLS and not home.sizes:
            given, result = step.eqn.invars[0].aval, step.eqn.outvars[0].aval
            after = step.params.get("sharding") or result.sharding
            before = known.get(step.takes[0]) or given.sharding
            known[step.gives[0]] = after
            pair = _cuts(before, given.ndim), _cuts(after, given.ndim)
            if None not in pair and not step.backward:
                counts[step.line, step.name, *pair, given.shape, given.dtype] += 1
    result = []
    for (line, name, before, after, shape, dtype), count in counts.items():
        sent = sum(
            r["bytes_sent"] for r in rows if r["source"] == line and r["collective"] in _MOVERS
        )
        used = {*sum(before + after, ())}
        sizes = {a: n for a, n in mesh.shape.items() if n > 1 or a in used}
        if len(sizes) > _MOST or None in (_part(shape, cuts, sizes) for cuts in (before, after)):
            continue
        fewest, path = cheapest_moves(before, after, shape, dtype.itemsize, (*sizes.items(),))
        if count * fewest >= sent:
            continue
        of = functools.partial(_compiled, mesh, name, before, shape, dtype)
        now, then = count * of(path[-1:]), count * of(path)
        if then < now <= sent:
            code = "x"
            for cuts in path:
                code = f"{_CALLS[name]}({code}, {_spec(cuts)})"
            row = {"source": line, "count": count, "bytes_sent": then, "instead_of": now}
            result.append(row | {"expression": code.replace("PartitionSpec", "P")})
    return result


def _cuts(sharding: Any, ndim: int) -> Cuts | None:
    """Return which axes cut each dim; None where that is not known."""
    spec = getattr(sharding, "spec", None)
    if spec is None or spec.unreduced or spec.reduced or PartitionSpec.UNCONSTRAINED in spec:
        return None
    explicit = {*sharding.mesh.axis_types} == {AxisType.Explicit}
    known = explicit or isinstance(sharding.mesh, Mesh)
    return tuple(map(axes_of, spec)) + ((),) * (ndim - len(spec)) if known else None


def _spec(cuts: Cuts) -> PartitionSpec:
    return PartitionSpec(*(axes if len(axes) > 1 else next(iter(axes), None) for axes in cuts))


def _compiled(
    mesh: Mesh, name: str, before: Cuts, shape: Any, dtype: Any, route: Iterable[Cuts]
) -> int:
    """Return the bytes that a device sends when a value takes this path, as compiled."""
    on = [NamedSharding(mesh, _spec(cuts)) for cuts in (before, *route)]
    move = jax.sharding.reshard if name == "reshard" else jax.lax.with_sharding_constraint
    moved = lambda x: functools.reduce(move, on[1:], x)
    lowered = jax.jit(moved).lower(jax.ShapeDtypeStruct(shape, dtype, sharding=on[0]))
    return sum(c.bytes_sent for c in census_hlo(partitioned_hlo(lowered), mesh))
