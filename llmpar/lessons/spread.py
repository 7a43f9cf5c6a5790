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


def traced(function: Callable, mesh: str, *arrays: Any) -> Any:
    """Trace what one device runs for all of a mesh, as in 'dp=2 tp=2'; arrays have parts along dim 0."""
    across = PartitionSpec(tuple(parse_mesh(mesh).named))
    one = lambda *parts: jnp.asarray(function(*(part[0] for part in parts)))[None]
    how: dict[str, Any] = {"mesh": abstract_mesh(mesh), "in_specs": across, "out_specs": across}
    return jax.make_jaxpr(jax.shard_map(one, check_vma=False, **how))(*arrays)


def drawn(function: Callable, mesh: str, *arrays: Any) -> Scene:
    """Draw what each device is given, sends, holds and returns."""
    program, sizes = traced(function, mesh, *arrays), parse_mesh(mesh).named
    found = census_jaxpr(program, sizes)
    sent = [(one.kind, one.axes, one.count, one.bytes_sent, one.shape) for one in found]
    return draw.traced(sizes, [x.shape[1:] for x in arrays], sent, program.out_avals[0].shape[1:])


def carried_out(function: Callable, mesh: str, *arrays: Any, untiled: str = "") -> Any:
    """Give what each device returns, and what it sends: ``[values, [[kind, axes, count, bytes], …]]``.

    One real device is enough: the program is traced for the mesh, under `jax.shard_map` as in the lessons,
    where `pcast` has nothing to do; the trace is then run for all devices at once, by `jax.vmap`. A fault in
    the trace is the learner's to read, but for the one with the words ``untiled``: then give 'not tiled'.
    """
    try:
        program = traced(function, mesh, *arrays)
    except ValueError as error:
        if untiled and untiled in str(error):
            return "not tiled"
        raise
    found = census_table(census_jaxpr(program, parse_mesh(mesh).named))
    sent = [[kind, axes, *row.values()] for (axes, kind), row in found.items()]
    return [values(program, mesh, *arrays), sorted(sent)]


def values(program: Any, mesh: str, *arrays: Any) -> list[Any]:
    """Run a traced program for all devices; gives what each returns."""
    axes, line = parse_mesh(mesh).named, program.eqns[-1]
    held = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    given = [x.reshape(*axes.values(), 1, *x.shape[1:]) for x in arrays]
    held |= dict(zip(program.jaxpr.invars, given, strict=True))
    run = lambda *parts: jax.core.eval_jaxpr(line.params["jaxpr"], (), *parts)[0][0]
    in_axes = tuple(0 if var in program.jaxpr.invars else None for var in line.invars)
    for axis in reversed(axes):
        run = jax.vmap(run, in_axes, axis_name=axis)
    try:
        found = run(*(held[var] for var in line.invars))
    except AssertionError as error:
        ring = " In a ring each device sends to one, and each receives." * ("ermutation" in str(error))
        raise ValueError(f"{error}{ring}") from error
    return list(found.reshape(-1, *found.shape[len(axes) :]))
