"""What several lessons share: a text that a toy learns in a few steps, and those steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from llmpar.config import ModelConfig
from llmpar.inspect.census import Collective, census_hlo, census_table, compiled_memory, read_program
from llmpar.mesh import make_mesh
from llmpar.plan import Plan
from llmpar.predict import memory, traffic
from llmpar.predict.traffic import Traffic
from llmpar.sequence_order import sequence_permutation
from llmpar.step import State, Step
from llmpar.weights import Tree, init_params


class Run(NamedTuple):
    """A training: the step, its compiled program and that program's text just after partitioning, the rows
    and positions of its batch, the last state, and the losses."""

    step: Step
    compiled: jax.stages.Compiled
    text: str
    shape: tuple[int, int]
    state: State
    losses: list[float]


def counting_text(rows: int, positions: int) -> dict[str, np.ndarray]:
    """Make a batch ``b s`` of byte tokens: row i begins at 7 i and counts in steps of i + 1."""
    row = np.arange(rows)[:, None]
    text = ((row * 7 + (row + 1) * np.arange(positions + 1)) % 256).astype(np.int32)
    places = np.tile(np.arange(positions, dtype=np.int32), (rows, 1))
    targets = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    return targets | {"positions": places, "segments": np.ones_like(places)}


def train_steps(
    step: Step, compiled, batch: dict, num_steps: int, state: State | None = None
) -> tuple[State, list[float]]:
    """Train on one batch, from the weights of seed 0 unless a state is given, which are the same on every
    mesh: the last state, and the losses. The loss is read in each step, so that no simulated device runs
    ahead of the others."""
    state = step.init(seed=0) if state is None else state
    batch, losses = jax.device_put(batch, step.batch_sharding), []
    for _ in range(num_steps):
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@functools.cache
def fresh_weights(config: ModelConfig) -> Tree:
    """Make the weights of seed 0 on one device; a step's own `init` compiles them once for every plan."""
    return jax.jit(lambda key: init_params(config, key))(jax.random.key(0))


def train_llama(
    config: ModelConfig,
    plan: Plan,
    batch: dict,
    num_steps: int,
    optimizer: optax.GradientTransformation | None = None,
    **options: Any,
) -> Run:
    """Compile the step of a plan, once to be read and run, and train on one batch, whose positions are dealt
    in the plan's order. The optimizer is AdamW unless given; other `options` are those of `Step`."""
    step = Step(config, plan, make_mesh(plan.mesh), optimizer or optax.adamw(3e-3), **options)
    compiled, text = read_program(step.lower(*(shape := batch["tokens"].shape)))
    order = sequence_permutation(plan.sequence_order, shape[1], plan.mesh.sp)
    dealt = {name: array[:, order] for name, array in batch.items()}
    weights = jax.tree.map(np.asarray, fresh_weights(config))
    natural = State(weights, step.optimizer.init(weights), np.int32(0))
    placed = jax.device_put(natural, jax.tree.map(lambda x: x.sharding, step.abstract_natural))
    return Run(
        step, compiled, text, shape, *train_steps(step, compiled, dealt, num_steps, step.from_natural(placed))
    )


def verdicts(runs: dict[str, Run], expected: Sequence[float]) -> dict[str, list[Collective]]:
    """Print the four verdicts on some trainings, or fail: *value* against the losses of one device,
    *sharding*, *communication* and *memory* against what the plan promises. Gives what each sends."""
    found, sent, held = {}, [], []
    for name, (step, compiled, text, shape, state, losses) in runs.items():
        assert np.allclose(losses, expected, rtol=1e-4), f"{name}: {losses}, on one device {expected}"
        moments = assert_as_promised(step, state)
        found[name] = census_hlo(text, step.mesh)
        predicted, table = traffic.step_traffic(step.config, step.plan, *shape), census_table(found[name])
        assert table == as_table(predicted), f"{name}: {table}"
        kinds = [f"{row['count']} {kind}" for (_, kind), row in sorted(table.items())]
        sent.append(f"  {name:<14} {predicted.total_bytes:>11,} B: {', '.join(kinds) or 'nothing'}")
        scalars = sum(not leaf.ndim for leaf in jax.tree.leaves(state.optimizer)) + 1
        given = memory.argument_bytes(step.config, step.plan, *shape, moments=moments, scalars=scalars)
        assert compiled_memory(compiled)["argument_bytes"] == sum(given.values()), name
        held.append(f"  {name:<14} {sum(given.values()):>11,} B, of weights {given['params']:,}")
        held[-1] += f", optimizer {given['optimizer']:,}" * (moments > 0)
    print(f"value: the losses of {len(expected)} steps equal those of one device")
    print("sharding: every weight and every moment lies as its plan promises")
    print("communication: as predicted, per device and step:", *sent, sep="\n")
    print("memory: arguments as predicted, per device:", *held, sep="\n")
    return found


def assert_as_promised(step: Step, state: State) -> int:
    """Check that every device holds of a state what the layouts of the plan promise; count the moments that
    the optimizer keeps of each weight."""
    like = jax.tree.structure(state.params)
    alike = lambda tree: jax.tree.structure(tree) == like
    moments = [tree for tree in jax.tree.leaves(state.optimizer, is_leaf=alike) if alike(tree)]
    for tree, layouts in ((state.params, step.stored), *((moment, step.graded) for moment in moments)):
        promised = jax.tree.map(lambda x, at: {at.shard_shape(x.shape, step.plan.mesh.sizes)}, tree, layouts)
        assert jax.tree.map(lambda x: {s.data.shape for s in x.addressable_shards}, tree) == promised
    return len(moments)


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
