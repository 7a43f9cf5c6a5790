"""Exercises of lesson 02 that are computed: a ring by hand."""

import re

import jax.numpy as jnp
import numpy as np
from jax import lax

from llmpar.lessons import Exercise
from llmpar.lessons.spread import carried_out, trace_program


def ring_gather() -> Exercise:
    """Ask for an all-gather out of permutes, as one device's program."""
    x = np.arange(8, dtype=np.float32).reshape(4, 2)

    def passed_on(block, step=1, hops=3):
        out, to = [block], [(i, (i + step) % 4) for i in range(4)]
        for _ in range(hops):
            out.append(lax.ppermute(out[-1], "tp", to))
        return out

    places = lambda sign: (lax.axis_index("tp") + sign * jnp.arange(4)) % 4
    placed = lambda blocks, sign=-1: jnp.stack(blocks)[places(sign)].ravel()

    def solution(block, n, axis):
        blocks = [block]
        for _ in range(n - 1):
            block = lax.ppermute(block, axis, [(i, (i + 1) % n) for i in range(n)])
            blocks.append(block)
        places = (lax.axis_index(axis) - jnp.arange(n)) % n
        return jnp.stack(blocks)[places].ravel()

    def with_its_number(block, n, axis):
        blocks, ranks = zip(*passed_on((block, lax.axis_index(axis))), strict=True)
        return jnp.stack(blocks)[jnp.argsort(jnp.stack(ranks))].ravel()

    wrong = dict(
        unrolled=lambda block, n, axis: jnp.concatenate(passed_on(block)),
        backwards=lambda block, n, axis: placed(passed_on(block), 1),
        own=lambda block, n, axis: jnp.tile(block, n),
        sent_again=lambda block, n, axis: jnp.concatenate([block] + [passed_on(block)[1]] * 3),
        unrolled_other_way=lambda block, n, axis: jnp.concatenate(passed_on(block, -1)),
        wrong_way=lambda block, n, axis: placed(passed_on(block, -1)),
        one_hop_more=lambda block, n, axis: placed(passed_on(block, hops=4)),
        straight=lambda block, n, axis: placed(
            [block, *(passed_on(block, k, 1)[1] for k in (1, 2, 3))]
        ),
        not_by_hand=lambda block, n, axis: lax.all_gather(block, axis, tiled=True),
    )
    given = lambda answer: [(lambda block: answer(block, 4, "tp"), "tp=4", x)]

    def observe(answer):
        ways = set(re.findall(r"perm=(\(\(.*?\)\))", str(trace_program(*given(answer)[0]))))
        return [*carried_out(*given(answer)[0]), len(ways) > 2]

    return Exercise(
        "stretch",
        solution,
        wrong,
        observe,
        also=dict(with_its_number=with_its_number),
        devices=given,
    )
