"""The exercise of lesson 13 that is computed: where a value is to lie."""

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from llmpar.lessons import Exercise
from llmpar.parallel.mesh import axes_of


def cure() -> Exercise:
    """Ask for the constraint that leaves each device the rows that it has of a batch."""

    def solution(x):
        return jax.lax.with_sharding_constraint(x, P("X"))

    laid = lambda *cut: lambda x: jax.lax.with_sharding_constraint(x, P(*cut))
    wrong = dict(
        width=laid(None, None, "X"), whole=laid(), positions=laid(None, "X"), nothing=lambda x: x
    )
    return Exercise("core", solution, wrong, _constraints)


def _constraints(function) -> list:
    """Return the axes that cut each dim of x in each constraint of a function; where there is none, what it
    does instead."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((4,), ("X",), axis_types=(AxisType.Auto,))):
        program = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((16, 128, 64), "float32"))
    # of a constraint, or of a device_put; one that is repeated changes nothing
    places = [
        line.params.get("sharding") or line.params.get("devices", [None])[0]
        for line in program.eqns
    ]
    specs = dict.fromkeys(place.spec for place in places if hasattr(place, "spec"))
    # whole, as the partitioner leaves it beside X
    free = lambda spec: [] if spec[0] == "X" else ["any"]
    axes = lambda cut, spec: free(spec) if cut is P.UNCONSTRAINED else list(axes_of(cut))
    cuts = [[axes(cut, spec) for cut in (*spec, None, None)][:3] for spec in specs]
    if program.jaxpr.outvars == program.jaxpr.invars:
        return []
    return (
        cuts
        if cuts and program.out_avals[0].shape == (16, 128, 64)
        else [[[str(line.primitive)]] for line in program.eqns]
    )
