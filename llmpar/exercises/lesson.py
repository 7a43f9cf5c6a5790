"""What several lessons share: a text that a toy learns in a few steps, and those steps."""

from __future__ import annotations

import jax
import numpy as np

from llmpar.predict.traffic import Traffic
from llmpar.step import State, Step


def counting_text(rows: int, positions: int) -> dict[str, np.ndarray]:
    """Make a batch ``b s`` of byte tokens: row i begins at 7 i and counts in steps of i + 1."""
    row = np.arange(rows)[:, None]
    text = ((row * 7 + (row + 1) * np.arange(positions + 1)) % 256).astype(np.int32)
    places = np.tile(np.arange(positions, dtype=np.int32), (rows, 1))
    targets = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    return targets | {"positions": places, "segments": np.ones_like(places)}


def train_steps(step: Step, compiled, batch: dict, num_steps: int) -> tuple[State, list[float]]:
    """Train on one batch from the weights of seed 0, which are the same on every mesh: the last state, and
    the losses. The loss is read in each step, so that no simulated device runs ahead of the others."""
    state, batch, losses = step.init(seed=0), jax.device_put(batch, step.batch_sharding), []
    for _ in range(num_steps):
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def as_table(predicted: Traffic) -> dict[tuple[str, str], dict[str, int]]:
    """Write a prediction as `census_table` writes what was found: by (axes, kind), executions and bytes."""
    return {key: {"count": row.count, "bytes_sent": row.bytes_sent} for key, row in predicted.items()}


def five_runs() -> dict[str, tuple[float, float, float]]:
    """Make the runs of lesson 10: relative differences in loss, gradient norm and gradient between two ranks
    and one device, of a linear model in float32, with a fault in four of five."""
    rng = np.random.default_rng(10)
    x, y = rng.standard_normal((16, 8)).astype(np.float32), rng.standard_normal(16).astype(np.float32)
    weights, ranks = rng.standard_normal(8).astype(np.float32), (slice(0, 12), slice(12, 16))

    def of(rows):  # the sum of the losses, its gradient, and the targets
        error = x[rows] @ weights - y[rows]
        return float(error @ error), 2 * x[rows].T @ error, len(error)

    whole, (first, second) = of(slice(0, 16)), map(of, ranks)
    loss, gradient = whole[0] / 16, whole[1] / 16
    right = (first[0] + second[0]) / 16, (first[1] + second[1]) / 16
    means = (first[0] / 12 + second[0] / 4) / 2, (first[1] / 12 + second[1] / 4) / 2
    size = np.linalg.norm
    runs = {
        "A": (right[0], size(2 * right[1]), 2 * right[1]),
        "B": (right[0], size(right[1][:4]), right[1]),
        "C": (right[0], size(right[1]), right[1]),
        "D": (means[0], size(means[1]), means[1]),
        "E": (right[0], size(first[1] / 16), first[1] / 16),
    }
    off = lambda a, b: float(abs(a - b) / b)
    return {
        name: (off(a, loss), off(n, size(gradient)), float(size(g - gradient) / size(gradient)))
        for name, (a, n, g) in runs.items()
    }
