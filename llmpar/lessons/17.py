"""Exercises of lesson 17 that are computed: whose rows, a sum in two levels."""

import numpy as np
from jax import lax

from llmpar.lessons import Exercise
from llmpar.lessons.spread import carried_out


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
    parts = np.arange(32, dtype=np.float32).reshape(4, 8) ** 2

    given = lambda function: [(function, "dp=2 tp=2", parts)]

    def observe(function):
        values, sent = carried_out(*given(function)[0])
        return [values, sum(bytes_sent for _, axes, _, bytes_sent in sent if "dp" in axes)]

    wrong = dict(
        one_ring=lambda x: lax.psum(x, ("dp", "tp")),
        no_scatter=lambda x: lax.psum(lax.psum(x, "tp"), "dp"),
        inside_alone=lambda x: lax.psum(x, "tp"),
        across_alone=lambda x: lax.psum(x, "dp"),
        not_gathered=lambda x: lax.psum(lax.psum_scatter(x, "tp", tiled=True), "dp"),
        mean=lambda x: _two_level(x) / 2,
    )
    return Exercise("stretch", _two_level, wrong, observe=observe, devices=given)
