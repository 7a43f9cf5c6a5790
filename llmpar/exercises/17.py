"""Exercises of lesson 17 that are computed: whose rows, a sum in two levels."""

import jax
import numpy as np
from jax import lax

from llmpar.exercises import Exercise
from llmpar.inspect.census import census_table
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.mesh import abstract_mesh, spec
from llmpar.notation import parse_layout


def _slice(batch, process, num):
    each = len(batch) // num
    return batch[process * each : (process + 1) * each]


def rows() -> Exercise:
    """Ask for the rows of a batch that a process hands over."""

    def observe(function):
        whole = lambda n: np.arange(2.0 * n).reshape(n, 2)
        calls = ((8, 0, 2), (8, 1, 2), (12, 3, 4), (6, 0, 1))
        return [np.asarray(function(whole(n), process, num)) for n, process, num in calls]

    wrong = dict(
        whole=lambda batch, process, num: batch,
        dealt=lambda batch, process, num: batch[process::num],
        first_rows=lambda batch, process, num: batch[: len(batch) // num],
        one_row=lambda batch, process, num: batch[process : process + 1],
        num_as_size=lambda batch, process, num: batch[process * num : (process + 1) * num],
        to_the_end=lambda batch, process, num: batch[process * len(batch) // num :],
        reversed=lambda batch, process, num: _slice(batch, num - 1 - process, num),
    )
    return Exercise("core", _slice, wrong, observe=observe)


def _two_level(x):
    part = lax.psum_scatter(x, "tp", tiled=True)
    return lax.all_gather(lax.psum(part, "dp"), "tp", tiled=True)


def two_level() -> Exercise:
    """Ask for an all-reduce over two hosts of two devices, of which less crosses."""
    layout = spec(parse_layout("b/dp,tp"))
    mesh = abstract_mesh("dp=2 tp=2")
    parts = np.arange(32, dtype=np.float32).reshape(2, 2, 8) ** 2

    def observe(function):
        on_mesh = jax.shard_map(function, mesh=mesh, in_specs=layout, out_specs=layout, check_vma=False)
        sent = census_table(census_jaxpr(jax.make_jaxpr(on_mesh)(parts.reshape(-1)), mesh.shape))
        across = sum(row["bytes_sent"] for (axes, _), row in sent.items() if "dp" in axes)
        inside = jax.vmap(function, axis_name="tp")
        return [jax.vmap(inside, axis_name="dp")(parts), across]

    wrong = dict(
        one_ring=lambda x: lax.psum(x, ("dp", "tp")),
        no_scatter=lambda x: lax.psum(lax.psum(x, "tp"), "dp"),
        inside_alone=lambda x: lax.psum(x, "tp"),
        across_alone=lambda x: lax.psum(x, "dp"),
        not_gathered=lambda x: lax.psum(lax.psum_scatter(x, "tp", tiled=True), "dp"),
        mean=lambda x: _two_level(x) / 2,
    )
    return Exercise("stretch", _two_level, wrong, observe=observe)
