"""Exercises of lesson 05 that are computed: a column-row pair by hand, KV heads, rings."""

from collections.abc import Iterable

import jax
import numpy as np
from jax import lax

from llmpar.lessons import Exercise
from llmpar.lessons.spread import carried_out

_DEVICES, POSITIONS, WIDTH, _HIDDEN = 4, 8, 8, 3
"""Of `gated_pair`: HIDDEN is what one device has of the feed-forward's width."""


def gated_pair() -> Exercise:
    """Ask for a gated feed-forward as a column-row pair, as one device writes it."""
    draw = np.random.default_rng(0).standard_normal
    x = np.broadcast_to(draw((POSITIONS, WIDTH)), (_DEVICES, POSITIONS, WIDTH)).astype(np.float32)
    shapes = (_DEVICES, WIDTH, _HIDDEN), (_DEVICES, WIDTH, _HIDDEN), (_DEVICES, _HIDDEN, WIDTH)
    gate, up, down = (draw(shape).astype(np.float32) for shape in shapes)

    hidden = lambda x, gate, up: jax.nn.silu(x @ gate) * (x @ up)

    def solution(x, gate, up, down):
        hidden_units = jax.nn.silu(x @ gate) * (x @ up)
        return lax.psum(hidden_units @ down, "tp")

    unfinished = lambda x, gate, up, down: hidden(x, gate, up) @ down

    def weights_gathered(x, gate, up, down):
        gate, up = (lax.all_gather(w, "tp", axis=1, tiled=True) for w in (gate, up))
        return hidden(x, gate, up) @ lax.all_gather(down, "tp", axis=0, tiled=True)

    def in_two_calls(*given):
        shard = lax.psum_scatter(unfinished(*given), "tp", scatter_dimension=1, tiled=True)
        return lax.all_gather(shard, "tp", axis=1, tiled=True)

    total = lambda x: lax.psum(x, "tp")
    wrong = dict(
        unfinished=unfinished,
        mean=lambda x, gate, up, down: lax.pmean(hidden(x, gate, up) @ down, "tp"),
        early=lambda x, gate, up, down: total(hidden(x, gate, up)) @ down,
        between=lambda x, gate, up, down: total(
            jax.nn.silu(total(x @ gate)) * total(x @ up) @ down
        ),
        gathered=lambda x, gate, up, down: lax.all_gather(unfinished(x, gate, up, down), "tp").sum(
            0
        ),
        scattered=lambda *given: lax.psum_scatter(
            unfinished(*given), "tp", scatter_dimension=1, tiled=True
        ),
        ungated=lambda x, gate, up, down: lax.psum(jax.nn.silu(x @ gate) @ down, "tp"),
        silu_of_up=lambda x, gate, up, down: lax.psum(hidden(x, up, gate) @ down, "tp"),
        weights_gathered=weights_gathered,
        twice=lambda x, gate, up, down: lax.psum(solution(x, gate, up, down), "tp"),
    )
    given = lambda learner: [(learner, f"tp={_DEVICES}", x, gate, up, down)]
    observe = lambda a: carried_out(*given(a)[0])
    also = dict(in_two_calls=in_two_calls)
    return Exercise("core", solution, wrong, observe, also=also, devices=given)


def kv_heads() -> Exercise:
    """Ask which KV heads a device needs, also when there are more devices than KV heads."""

    def solution(rank, tp, num_heads, num_kv_heads):
        query_heads = range(rank * num_heads // tp, (rank + 1) * num_heads // tp)
        return sorted({head * num_kv_heads // num_heads for head in query_heads})

    queries = lambda rank, tp, n: range(rank * n // tp, (rank + 1) * n // tp)

    def observe(learner):
        cases = (2, 8, 4), (8, 32, 8), (16, 32, 8), (8, 16, 2), (4, 8, 1)
        answers = [learner(rank, tp, n, k) for tp, n, k in cases for rank in range(tp)]
        return [sorted(heads) if isinstance(heads, Iterable) else heads for heads in answers]

    wrong = dict(
        round_robin=lambda rank, tp, n, k: [rank % k] if tp > k else solution(rank, tp, n, k),
        repeated=lambda rank, tp, n, k: [head * k // n for head in queries(rank, tp, n)],
        one_only=lambda rank, tp, n, k: [rank * k // tp],
        everything=lambda rank, tp, n, k: list(range(k)),
        even_blocks=lambda rank, tp, n, k: list(range(rank * k // tp, (rank + 1) * k // tp)),
        rank=lambda rank, tp, n, k: [rank],
        query_heads=lambda rank, tp, n, k: list(queries(rank, tp, n)),
        all_read_0=lambda rank, tp, n, k: [0] if tp > k else solution(rank, tp, n, k),
    )
    return Exercise("stretch", solution, wrong, observe=observe)


def ring_permutes() -> Exercise:
    """Ask how many permutes a layer's four gathers and four scatters become as ring products."""

    def solution(tp):
        return 8 * (tp - 1)

    wrong = dict(
        hop_too_many=lambda tp: 8 * tp,
        forward=lambda tp: 4 * (tp - 1),
        one_product=lambda tp: tp - 1,
        collectives=lambda tp: 8,
        one_pair=lambda tp: 2 * (tp - 1),
        forward_hop_too_many=lambda tp: 4 * tp,
        three_a_pair=lambda tp: 6 * (tp - 1),
        one_less=lambda tp: 8 * tp - 1,
        one_ring=lambda tp: tp,
    )
    return Exercise(
        "expert", solution, wrong, observe=lambda learner: [learner(tp) for tp in (2, 4, 8, 16)]
    )
