"""Exercises of lesson 02 that are computed: a ring by hand."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from llmpar.exercises import Exercise
from llmpar.exercises.spread import carried_out


def ring_gather() -> Exercise:
    """Ask for an all-gather out of permutes, as one device's program."""
    x = np.arange(8, dtype=np.float32).reshape(4, 2)

    def hops(block, n, step=1, more=0):
        found = [block]
        for _ in range(n - 1 + more):
            found.append(lax.ppermute(found[-1], "tp", [(i, (i + step) % n) for i in range(n)]))
        return found

    def counted(sign, step, more=0):
        def gather(block, n, axis):
            found = jnp.stack(hops(block, n, step, more))
            return found[(lax.axis_index(axis) + sign * jnp.arange(n)) % n].reshape(n * block.shape[0])

        return gather

    def solution(block, n, axis):
        found = [block]
        for _ in range(n - 1):
            block = lax.ppermute(block, axis, [(i, (i + 1) % n) for i in range(n)])
            found.append(block)
        place = (lax.axis_index(axis) - jnp.arange(n)) % n
        return jnp.stack(found)[place].reshape(n * block.shape[0])

    wrong = dict(
        unrolled=lambda block, n, axis: jnp.concatenate(hops(block, n)),
        backwards=counted(1, step=1),
        own=lambda block, n, axis: jnp.tile(block, n),
        sent_again=lambda block, n, axis: jnp.concatenate([block] + [hops(block, n)[1]] * (n - 1)),
        unrolled_other_way=lambda block, n, axis: jnp.concatenate(hops(block, n, step=-1)),
        wrong_way=counted(-1, step=-1),
        one_hop_more=counted(-1, step=1, more=1),
        not_by_hand=lambda block, n, axis: lax.all_gather(block, axis, tiled=True),
    )
    given = lambda answer: [(lambda block: answer(block, 4, "tp"), "tp=4", x)]
    return Exercise("stretch", solution, wrong, lambda a: carried_out(*given(a)[0]), devices=given)
