"""Exercises of lesson 03 that are computed: means of gradients, and rows for all devices."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from llmpar.lessons import Exercise
from llmpar.lessons.spread import carried_out

CLIP = 1.0
"""The largest gradient norm in `repair`."""


def repair() -> Exercise:
    """Ask for the mean gradient over unevenly many targets, and for the same clipped by its norm.

    An answer is run for four devices; one real device is enough.
    """
    rng = np.random.default_rng(3)
    grad_sums = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32) * 9
    counts = jnp.asarray([1.0, 2.0, 4.0, 8.0], jnp.float32)

    norm = lambda g: jnp.sqrt(jnp.sum(g * g))
    limit = lambda size: jnp.minimum(jnp.float32(1), jnp.float32(CLIP) / size)
    shorten = lambda g: g * limit(norm(g))

    def mean(grad_sum, count):
        return lax.psum(grad_sum, "dp") / lax.psum(count, "dp")

    def clipped(grad_sum, count):
        return mean(grad_sum, count) * limit(norm(mean(grad_sum, count)))

    def norms_added(grad_sum, count):
        g = grad_sum / lax.psum(count, "dp")
        return lax.psum(g, "dp") * limit(jnp.sqrt(lax.psum(jnp.sum(g * g), "dp")))

    def run(answer: dict) -> dict:
        """Return each device's result for gradients longer and shorter than the limit."""
        cases = grad_sums, grad_sums * 0.002
        run = lambda function: np.array(
            [carried_out(function, "dp=4", case, counts)[0] for case in cases]
        )
        return {name: run(function) for name, function in answer.items()}

    gradients = dict(
        sum_of_means=lambda grad_sum, count: lax.psum(grad_sum / count, "dp"),
        mean_of_means=lambda grad_sum, count: lax.pmean(grad_sum / count, "dp"),
        sum_only=lambda grad_sum, count: lax.psum(grad_sum, "dp"),
        own_mean=lambda grad_sum, count: grad_sum / count,
    )
    clips = dict(
        clipped_alone=lambda grad_sum, count: lax.psum(
            shorten(grad_sum / lax.psum(count, "dp")), "dp"
        ),
        scaled_up=lambda *given: mean(*given) * jnp.float32(CLIP) / norm(mean(*given)),
        norms_added=norms_added,
        own_mean_clipped=lambda grad_sum, count: lax.pmean(shorten(grad_sum / count), "dp"),
        sum_clipped=lambda grad_sum, count: (
            shorten(lax.psum(grad_sum, "dp")) / lax.psum(count, "dp")
        ),
        unclipped=mean,
        each_element=lambda grad_sum, count: jnp.clip(mean(grad_sum, count), -CLIP, CLIP),
    )
    right = {"gradient": mean, "clipped": clipped}
    wrong = {
        **{key: right | {"gradient": g} for key, g in gradients.items()},
        **{key: right | {"clipped": c} for key, c in clips.items()},
    }
    given = lambda answer: [(function, "dp=4", grad_sums, counts) for function in answer.values()]
    return Exercise("core", right, wrong, observe=run, devices=given)


def pad() -> Exercise:
    """Ask for a function that fills up targets so that their rows divide by the number of devices."""

    def solution(targets, devices):
        missing = -len(targets) % devices
        rows = np.full((missing, *targets.shape[1:]), -1, targets.dtype)
        return np.concatenate([targets, rows])

    rows = lambda like, count, value=-1: np.full((count, *like.shape[1:]), value, like.dtype)
    counted = lambda *shape: 1 + np.arange(np.prod(shape)).reshape(shape)
    cases = [(counted(5, 3), 4), (counted(8, 3), 4), (counted(3, 1), 8)]
    wrong = dict(
        drop=lambda t, n: t[: len(t) // n * n],
        zeros=lambda t, n: np.concatenate([t, rows(t, -len(t) % n, 0)]),
        repeat=lambda t, n: np.concatenate([t, np.repeat(t[-1:], -len(t) % n, axis=0)]),
        always=lambda t, n: np.concatenate([t, rows(t, n - len(t) % n)]),
        columns=lambda t, n: np.pad(t, ((0, 0), (0, -t.shape[1] % n)), constant_values=-1),
        in_front=lambda t, n: np.concatenate([rows(t, -len(t) % n), t]),
    )
    run = lambda function: [
        np.asarray(function(targets.copy(), devices)) for targets, devices in cases
    ]
    return Exercise("expert", solution, wrong, run)
