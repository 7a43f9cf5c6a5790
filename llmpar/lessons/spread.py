"""Run what a learner has written for one device on several, and count what it sends."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from llmpar import draw
from llmpar.draw.scene import Scene
from llmpar.inspect.census import census_table
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.parallel.mesh import abstract_mesh
from llmpar.plan.mesh_shape import parse_mesh


def trace_program(function: Callable, mesh: str, *arrays: Any) -> Any:
    """Trace one device's program for all of a mesh, as in 'dp=2 tp=2'; arrays have parts along dim 0."""
    across = PartitionSpec(tuple(parse_mesh(mesh).named))
    one = lambda *parts: jnp.asarray(function(*(part[0] for part in parts)))[None]
    settings: dict[str, Any] = {
        "mesh": abstract_mesh(mesh),
        "in_specs": across,
        "out_specs": across,
    }
    return jax.make_jaxpr(jax.shard_map(one, check_vma=False, **settings))(*arrays)


def drawn(function: Callable, mesh: str, *arrays: Any) -> Scene:
    """Draw what each device receives, sends, holds and returns."""
    program = trace_program(function, mesh, *arrays)
    sizes = parse_mesh(mesh).named
    collectives = census_jaxpr(program, sizes)
    sent = [(one.kind, one.axes, one.count, one.bytes_sent, one.shape) for one in collectives]
    return draw.traced(sizes, [x.shape[1:] for x in arrays], sent, program.out_avals[0].shape[1:])


def carried_out(function: Callable, mesh: str, *arrays: Any, untiled: str = "") -> Any:
    """Return what each device returns, and what it sends: ``[values, [[kind, axes, count, bytes], …]]``.

    One real device is enough: the program is traced for the mesh, under `jax.shard_map` as in the lessons,
    where `pcast` has nothing to do; the trace is then run for all devices at once, by `jax.vmap`. An error in
    the trace is raised for the learner, except the one with the words ``untiled``: that returns 'not tiled'.
    """
    try:
        program = trace_program(function, mesh, *arrays)
    except ValueError as error:
        if untiled and untiled in str(error):
            return "not tiled"
        raise
    table = census_table(census_jaxpr(program, parse_mesh(mesh).named))
    sent = [[kind, axes, *row.values()] for (axes, kind), row in table.items()]
    return [values(program, mesh, *arrays), sorted(sent)]


def values(program: Any, mesh: str, *arrays: Any) -> list[Any]:
    """Run a traced program for all devices; return each result."""
    axes, line = parse_mesh(mesh).named, program.eqns[-1]
    known = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    given = [x.reshape(*axes.values(), 1, *x.shape[1:]) for x in arrays]
    known |= dict(zip(program.jaxpr.invars, given, strict=True))
    run = lambda *parts: jax.core.eval_jaxpr(line.params["jaxpr"], (), *parts)[0][0]
    in_axes = tuple(0 if var in program.jaxpr.invars else None for var in line.invars)
    for axis in reversed(axes):
        run = jax.vmap(run, in_axes, axis_name=axis)
    try:
        results = run(*(known[var] for var in line.invars))
    except AssertionError as error:
        if "ermutation" not in str(error):
            raise ValueError(str(error)) from error
        raise ValueError(
            f"{error} In a ring each device sends to one, and each receives."
        ) from error
    return list(results.reshape(-1, *results.shape[len(axes) :]))
