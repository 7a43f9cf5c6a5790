"""Run what a learner has written for one device on several, and count what it sends."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from llmpar.inspect.census import census_table
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.mesh import abstract_mesh


def carried_out(function: Callable, axis: str, size: int, *arrays, untiled: str = "") -> list | str:
    """Give what each of ``size`` devices returns, and what it sends: ``[values, [[kind, axis, count], …]]``.

    Each array has the devices' parts along its first dim. The devices are made by `jax.vmap`, so one real
    device is enough; what is sent is read from the program traced for a mesh. A fault in the trace is the
    learner's to read, but for the one with the words ``untiled``: then give 'not tiled'.
    """
    across = PartitionSpec(axis)
    on_mesh = jax.shard_map(
        lambda *parts: jnp.asarray(function(*(part[0] for part in parts)))[None],
        mesh=abstract_mesh(f"{axis}={size}"),
        in_specs=across,
        out_specs=across,
        check_vma=False,
    )
    try:
        traced = jax.make_jaxpr(on_mesh)(*arrays)
    except ValueError as error:
        if untiled and untiled in str(error):
            return "not tiled"
        raise
    sent = census_table(census_jaxpr(traced, {axis: size}))
    values = jax.vmap(function, axis_name=axis)(*arrays)
    return [values, sorted([kind, axes, row["count"]] for (axes, kind), row in sent.items())]
