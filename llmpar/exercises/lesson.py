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
