"""The exercise of lesson 13 that is computed: where a value is to lie."""

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from llmpar.exercises import Exercise
from llmpar.mesh import axes_of


def cure() -> Exercise:
    """Ask for the constraint that leaves each device the rows that it has of a batch."""

    def solution(x):
        return jax.lax.with_sharding_constraint(x, P("X"))

    laid = lambda *cut: lambda x: jax.lax.with_sharding_constraint(x, P(*cut))
    wrong = dict(width=laid(None, None, "X"), whole=laid(), positions=laid(None, "X"), nothing=lambda x: x)
    return Exercise("core", solution, wrong, asked)


def asked(function) -> list:
    """The axes that cut each dim of x, as each constraint in a function says it."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((4,), ("X",), axis_types=(AxisType.Auto,))):
        lines = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((16, 128, 64), "float32")).eqns
    found = [line.params["sharding"].spec for line in lines if "sharding" in line.params]
    return [[cut_by(spec, dim) for dim in range(3)] for spec in found]


def cut_by(spec: P, dim: int) -> list[str]:
    """The axes that cut a dim of x. Left to the partitioner, the others stay whole where X cuts the rows."""
    cut = spec[dim] if dim < len(spec) else None
    if cut is P.UNCONSTRAINED:
        return [] if dim and spec[0] in ("X", ("X",)) else ["any"]
    return list(axes_of(cut))
