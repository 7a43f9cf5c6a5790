"""Read what travels between two meshes: by a `Mover`, or by `jax.device_put` of a function's arguments.

A compiled program has one mesh, so no HLO shows these. They are planned: each device gets what it lacks, once
(`llmpar.plan.two_meshes`), as `Mover` sends it.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding

from llmpar.inspect.jaxpr import equation_line
from llmpar.inspect.sent import Look
from llmpar.parallel.mesh import from_type
from llmpar.plan.two_meshes import TwoMeshes, two_meshes
from llmpar.predict.two_meshes import link_loads

NOTE = (
    "no program runs on both meshes: bytes are what receivers lack, of the busiest device's link."
    " llmpar.serve.two_meshes.Mover sends these; jax.device_put may copy more, through the host. What else a"
    " function sends and holds is not read: look at each part"
)


def transfers(program: Any, args: Any) -> Look | None:
    """Return what a mover, or a traced function, sends from one mesh to another; None of a program that sends
    nothing so. A function is read where it puts its arguments on other devices as they come."""
    jaxpr: Any = getattr(getattr(program, "jaxpr", None), "jaxpr", None)
    given = [x for x in jax.tree.leaves(args) if isinstance(_at(x), NamedSharding)]
    known = jaxpr is not None and len(given) == len(jaxpr.invars)
    array_of = dict(zip(map(id, jaxpr.invars), given, strict=True)) if known else {}
    plans = [
        (equation_line(eqn), _planned(array_of[id(var)], to))
        for eqn in (jaxpr.eqns if known else ())
        if eqn.primitive.name == "device_put"
        for var, to in zip(eqn.invars, eqn.params["devices"], strict=True)
        if id(var) in array_of and isinstance(to, NamedSharding)
        if _at(array_of[id(var)]).device_set != to.device_set
    ]
    if isinstance(plan := getattr(program, "plan", None), TwoMeshes):
        plans = [("Mover", plan)]
    rows = [_as_row(plan, line) for line, plan in plans]
    notes = [*(_in_words(plan) for _, plan in plans), NOTE]
    sizes = plans[0][1].sides[0].sizes if plans else {}
    return Look("a transfer", sizes, rows, {}, 0, [], [], {}, notes) if plans else None


_at: Any = lambda x: getattr(x, "sharding", None)


def _planned(x: Any, to: NamedSharding) -> TwoMeshes:
    """Plan an array's way to another mesh. Meshes have no names in JAX."""
    after = from_type(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to))
    arrow = f"{from_type(x)} @first -> {after} @second"
    meshes = {"first": _at(x).mesh, "second": to.mesh}
    return two_meshes(arrow, meshes, x.shape, x.dtype.itemsize, uneven=True)


def _in_words(plan: TwoMeshes) -> str:
    """Say what is sent in all, in how many rounds, from where to where, and by which device most."""
    devices = (str([*side.node_of]) for side in plan.sides)
    sends = [(n, device) for (device, end), n in link_loads(plan).items() if end == "sends"]
    most, device = max(sends, default=(0, "none"))
    return (
        f"{plan}: {plan.bound:,} B from devices {' to '.join(devices)}, no less is possible, in"
        f" {len(plan.rounds)} rounds; device {device} sends most, {most:,} B"
    )


def _as_row(plan: TwoMeshes, source: str) -> dict[str, Any]:
    """Write a plan as a row of `llmpar.look`, with the bytes on the busiest device's link."""
    most = max(link_loads(plan).values(), default=0)
    return {
        "source": source,
        "arrow": str(plan),
        "collective": "transfer",
        "axes": (),
        "count": 1,
        "bytes_sent": most,
        "conditional": False,
        **dict.fromkeys(("letters", "per_turn", "link", "dtype", "shape", "direction"), ""),
    }
