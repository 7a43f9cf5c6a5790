"""Exercises of lesson 04 that are computed: stage 2 by hand."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from llmpar.lessons import Exercise
from llmpar.lessons.spread import carried_out

_DEVICES, _PARTS, _ROWS, _COLUMNS = 4, 3, 8, 2


def stage2_accumulated() -> Exercise:
    """Ask for stage 2's sum over microbatches: reduce-scatter each gradient, add up the shards."""
    scatter = lambda g, dim=0: lax.psum_scatter(g, "fsdp", scatter_dimension=dim, tiled=True)

    def solution(gradient, parts):
        cut = lambda g: lax.psum_scatter(g, "fsdp", scatter_dimension=0, tiled=True)
        return sum(cut(gradient(part)) for part in parts)

    def all_reduced(gradient, parts):
        total = sum(lax.psum(gradient(part), "fsdp") for part in parts)
        own = total.shape[0] // lax.axis_size("fsdp")
        return lax.dynamic_slice_in_dim(total, lax.axis_index("fsdp") * own, own, 0)

    def exchanged(gradient, parts):
        swap = lambda g: lax.all_to_all(g, "fsdp", split_axis=0, concat_axis=0, tiled=True)
        return sum(swap(gradient(part)).reshape(_DEVICES, -1, _COLUMNS).sum(0) for part in parts)

    gradients = (
        np.random.default_rng(0)
        .standard_normal((_DEVICES, _PARTS, _ROWS, _COLUMNS))
        .astype(np.float32)
    )

    def given(learner):
        run = lambda parts: learner(lambda part: 2 * part, list(parts))
        return [(run, f"fsdp={_DEVICES}", gradients)]

    wrong = dict(
        stage1=lambda gradient, parts: scatter(sum(gradient(part) for part in parts)),
        all_held=lambda gradient, parts: scatter(
            jnp.stack([gradient(part) for part in parts]), 1
        ).sum(0),
        all_reduced=all_reduced,
        never_asked=lambda gradient, parts: sum(scatter(part) for part in parts),
        untiled=lambda gradient, parts: sum(
            lax.psum_scatter(gradient(part), "fsdp") for part in parts
        ),
        only_last=lambda gradient, parts: [scatter(gradient(part)) for part in parts][-1],
        mean=lambda gradient, parts: solution(gradient, parts) / len(parts),
        gathered=lambda *given: lax.all_gather(solution(*given), "fsdp", axis=0, tiled=True),
        only_first=lambda gradient, parts: scatter(gradient(parts[0])),
    )
    observe = lambda learner: carried_out(*given(learner)[0], untiled="must match shard count")
    return Exercise("core", solution, wrong, observe, also=dict(exchanged=exchanged), devices=given)
