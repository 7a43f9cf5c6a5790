"""Find the cheapest moves between two layouts of a value, and beside them what a program sends.

XLA does not always take them: from ``P('X', None)`` to ``P(None, 'Y')`` it gathers whole columns and slices
them; to slice first, and then to gather, sends half. A layout is, for each dim, the axes that cut it.
"""

import functools
from collections import Counter
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from llmpar.inspect.census import census_hlo, partitioned_hlo, summed
from llmpar.inspect.moves import MOST_AXES, Cuts, cheapest_moves, local_elements
from llmpar.inspect.twin import read
from llmpar.parallel.mesh import axes_of

_CALLS = {
    "reshard": "jax.sharding.reshard",
    "sharding_constraint": "jax.lax.with_sharding_constraint",
}
_MOVERS = "all-gather", "all-to-all", "collective-permute"


def cheaper(
    jaxpr: Any, arguments: list[Any], mesh: Mesh, rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """List the reshards of a program that could send less: ``source``, ``count``, ``bytes_sent`` and
    ``instead_of`` as both are compiled, ``expression``.

    Those outside shard_map of which both layouts are known, by the types of explicit axes, or as constraints
    on arguments and on one another; on up to `_MOST` axes. ``arguments`` are the shardings of a traced
    function's, ``rows`` those of a look at it.
    """
    program, counts = read(jaxpr, first=0), Counter[tuple]()
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
    routes = list[tuple]()
    for key, count in counts.items():
        line, _, before, after, shape, dtype = key
        sent = sum(
            r["bytes_sent"] for r in rows if r["source"] == line and r["collective"] in _MOVERS
        )
        used = {*sum(before + after, ())}
        sizes = {a: n for a, n in mesh.shape.items() if n > 1 or a in used}
        local = [local_elements(shape, cuts, sizes) for cuts in (before, after)]
        if len(sizes) > MOST_AXES or None in local:
            continue
        steps = cheapest_moves(before, after, shape, dtype.itemsize, (*sizes.items(),))
        path = tuple(step.cuts for step in steps)
        if count * sum(step.bytes_sent for step in steps) < sent:
            routes += [(*key, count, sent, path[-1:]), (*key, count, sent, path)]
    each = _compiled(mesh, routes) if routes else {}
    result = list[dict[str, Any]]()
    for i, (line, name, *_, count, sent, path) in enumerate(routes[1::2]):
        now, then = (count * each.get(k, 0) for k in (2 * i, 2 * i + 1))
        if then < now <= sent:
            write = lambda code, cuts, name=name: f"{_CALLS[name]}({code}, {_spec(cuts)})"
            code = functools.reduce(write, path, "x").replace("PartitionSpec", "P")
            row = {"source": line, "count": count, "bytes_sent": then, "instead_of": now}
            result.append(row | {"expression": code})
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


def _compiled(mesh: Mesh, routes: list[tuple]) -> dict[int, int]:
    """Compile one program in which a value takes each route, and return what a device sends in each."""
    on = lambda cuts: NamedSharding(mesh, _spec(cuts))

    def moved(values: list[Any]) -> list[Any]:
        for i, (_, name, before, *_, path) in enumerate(routes):
            move = jax.sharding.reshard if name == "reshard" else jax.lax.with_sharding_constraint
            with jax.named_scope(f"arrow[{i}]"):
                x = jax.lax.optimization_barrier(values[i])  # arguments have no scope
                values[i] = functools.reduce(move, map(on, (before, *path)), x)
        return values

    values = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=on(before))
        for _, _, before, _, shape, dtype, *_ in routes
    ]
    moves = census_hlo(partitioned_hlo(jax.jit(moved).lower(values)), mesh)
    return {
        row["arrow"]: row["bytes_sent"]
        for row in summed(({"arrow": int(c.arrow)}, c) for c in moves)
    }
