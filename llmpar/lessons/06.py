"""Exercises of lesson 06 that are computed: the positions and heads of each device."""

import numpy as np
from jax import lax

from llmpar.lessons import Exercise
from llmpar.lessons.spread import carried_out


def zigzag() -> Exercise:
    """Ask for the permutation that deals s positions to ranks so that causal work is even."""

    def solution(s, ranks):
        cut = np.arange(s).reshape(2 * ranks, -1)
        pairs = [[cut[i], cut[2 * ranks - 1 - i]] for i in range(ranks)]
        return np.concatenate([np.concatenate(pair) for pair in pairs])

    def dealt(s, n, pair):
        cut = np.arange(s).reshape(2 * n, -1)
        return np.concatenate([np.concatenate(pair(cut, i)) for i in range(n)])

    wrong = dict(
        contiguous=lambda s, n: np.arange(s),
        striped=lambda s, n: np.arange(s).reshape(-1, n).T.ravel(),
        not_mirrored=lambda s, n: dealt(s, n, lambda cut, i: [cut[i], cut[n + i]]),
        read_backwards=lambda s, n: dealt(s, n, lambda cut, i: [cut[i], cut[2 * n - 1 - i][::-1]]),
        inverse=lambda s, n: np.argsort(solution(s, n)),
        late_first=lambda s, n: dealt(s, n, lambda cut, i: [cut[2 * n - 1 - i], cut[i]]),
        backwards=lambda s, ranks: np.arange(s)[::-1],
        single_positions=lambda s, ranks: np.concatenate(
            [np.arange(s)[::2], np.arange(s)[1::2][::-1]]
        ),
    )
    run = lambda function: [np.asarray([*function(s, n)]) for s, n in ((24, 4), (24, 2), (18, 3))]
    return Exercise("stretch", solution, wrong, run)


def factors() -> Exercise:
    """Ask for what two partial softmaxes are multiplied with before they are added."""

    def solution(top_a, top_b):
        top = np.maximum(top_a, top_b)
        return np.exp(top_a - top), np.exp(top_b - top)

    wrong = dict(
        upside_down=lambda a, b: tuple(1 / x for x in solution(a, b)),
        exchanged=lambda a, b: solution(b, a),
        ones=lambda a, b: (1.0, 1.0),
        smaller=lambda a, b: (np.exp(a - min(a, b)), np.exp(b - min(a, b))),
        no_top=lambda a, b: (np.exp(a), np.exp(b)),
        no_exp=lambda a, b: (a - max(a, b), b - max(a, b)),
        shares=lambda a, b: (
            np.exp(a) / (np.exp(a) + np.exp(b)),
            np.exp(b) / (np.exp(a) + np.exp(b)),
        ),
    )
    return Exercise(
        "core",
        solution,
        wrong,
        lambda function: [[*map(float, function(*tops))] for tops in ((3.0, 2.0), (-1.0, 0.5))],
    )


def to_heads() -> Exercise:
    """Ask for the exchange of Ulysses, positions for heads, as one of four devices writes it."""
    of_devices = (4, 4, 8, 4)  # device, position, head, width
    x = np.random.default_rng(0).standard_normal(of_devices).astype(np.float32)

    def solution(x):
        return lax.all_to_all(x, "sp", split_axis=1, concat_axis=0, tiled=True)

    def gathered(x):
        num_heads = x.shape[1] // lax.axis_size("sp")
        everything = lax.all_gather(x, "sp", axis=0, tiled=True)
        return lax.dynamic_slice_in_dim(everything, lax.axis_index("sp") * num_heads, num_heads, 1)

    wrong = dict(
        gathered=gathered,
        reshaped=lambda x: x.reshape(-1, x.shape[1] // 4, x.shape[2]),
        unmoved=lambda x: x,
        all_heads=lambda x: lax.all_gather(x, "sp", axis=0, tiled=True),
        untiled=lambda x: lax.all_to_all(x, "sp", split_axis=1, concat_axis=0),
        exchanged=lambda x: lax.all_to_all(x, "sp", split_axis=0, concat_axis=1, tiled=True),
        widths=lambda x: lax.all_to_all(x, "sp", split_axis=2, concat_axis=0, tiled=True),
    )
    given = lambda learner: [(learner, "sp=4", x)]
    observe = lambda learner: carried_out(*given(learner)[0], untiled="all_to_all")
    return Exercise("core", solution, wrong, observe, devices=given)
