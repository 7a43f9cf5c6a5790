"""What several lessons share: a text that a toy learns in a few steps, those steps, and the four verdicts."""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from llmpar.inspect.census import (
    Collective,
    census_hlo,
    census_table,
    compiled_memory,
    read_program,
)
from llmpar.lessons import say
from llmpar.parallel.mesh import make_mesh, platform_of
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import Plan
from llmpar.plan.sequence_order import sequence_permutation
from llmpar.plan.timetable import branch_shares
from llmpar.predict import memory
from llmpar.predict.traffic import Traffic, step_traffic
from llmpar.training.step import State, Step

NAMED = 17
"""Columns of a verdict's line that name its plan."""


class LessonRun(NamedTuple):
    """A plan's step, compiled, and what it has learned of a batch.

    ``shape``: rows and positions; ``text``: the program after partitioning; ``state``, ``metrics``: the last.
    """

    step: Step
    shape: tuple[int, int]
    compiled: jax.stages.Compiled
    text: str
    state: State
    losses: list[float]
    metrics: dict[str, jax.Array]


def counting_text(rows: int, positions: int) -> dict[str, np.ndarray]:
    """Make a batch ``b s`` of byte tokens: row i begins at 7 i and counts in steps of i + 1."""
    row = np.arange(rows)[:, None]
    text = ((row * 7 + (row + 1) * np.arange(positions + 1)) % 256).astype(np.int32)
    places = np.tile(np.arange(positions, dtype=np.int32), (rows, 1))
    targets = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    return targets | {"positions": places, "segments": np.ones_like(places)}


@functools.cache
def fresh_state(config: ModelConfig, optimizer: optax.GradientTransformation) -> State:
    """Make the state of seed 0 once for all meshes: on each, its random numbers would be compiled again."""
    return jax.device_get(Step(config, Plan("dp=1"), make_mesh("dp=1"), optimizer).init(seed=0))


def train_on(
    config: ModelConfig, plan: Plan, batch: dict, optimizer: optax.GradientTransformation, num_steps: int,
    clip: float | None = 1.0,
) -> LessonRun:  # fmt: skip
    """Compile the step of a plan once, for running it and for reading it, and train on one batch, whose
    positions are dealt in the plan's order, from the weights of seed 0, which are the same on every mesh."""
    shape = batch["tokens"].shape
    mesh = make_mesh(plan.mesh)
    plan = plan.resolve(config, platform_of(mesh), *shape)
    order = np.array(sequence_permutation(plan.sequence_order, shape[1], plan.mesh.sp))
    batch = {name: array[:, order] for name, array in batch.items()}
    step = Step(config, plan, mesh, optimizer, clip)
    compiled, text = read_program(step.lower(*shape))
    shardings = jax.tree.map(lambda x: x.sharding, step.abstract_in_model_order)
    state = step.from_model_order(
        jax.device_put(fresh_state(step.config, step.optimizer), shardings)
    )
    batch, losses, metrics = jax.device_put(batch, step.batch_sharding), [], {}
    for _ in range(num_steps):
        state, metrics = compiled(state, batch)
        # read in each step, so that no simulated device runs ahead
        losses.append(float(metrics["loss"]))
    return LessonRun(step, shape, compiled, text, state, losses, metrics)


def verdicts(
    runs: Mapping[str, LessonRun],
    solo: LessonRun,
    weights_within: float | None = None,
    details: bool = False,
) -> dict[str, dict]:
    """Assert the four verdicts on some plans of one model, and say so on a line; ``details`` prints bytes.
    Gives for each plan the table of its census (of the last stage).

    *Value*: the losses of one device, to 1e-4, the norm of its last gradient, and its weights at the end,
    where ``weights_within`` says how near (None with Adam, which divides even the smallest gradient by its
    size). *Sharding*: weights and moments have the plan's layouts. *Communication*: axes, kinds, counts and
    bytes in the program are those of the formula, for each stage of a pipeline. *Memory*: so are arguments'.
    """
    tables: dict[str, dict] = {}
    for name, run in runs.items():
        assert np.allclose(run.losses, solo.losses, rtol=1e-4), (name, run.losses, solo.losses)
        # Adam divides gradients by their size: a factor on all of them shows in their norm alone.
        norms = [float(one.metrics["grad_norm"]) for one in (run, solo)]
        assert math.isclose(*norms, rel_tol=1e-3), (name, norms)
        if weights_within is not None:
            natural = run.step.to_model_order(run.state).params
            pairs = zip(jax.tree.leaves(natural), jax.tree.leaves(solo.state.params), strict=True)
            for one, other in pairs:
                assert np.allclose(one, other, atol=weights_within), name
        assert lies_as_promised(run), name
        tables[name] = census_table(as_predicted(run))
        assert compiled_memory(run.compiled)["argument_bytes"] == sum(
            predicted_argument_bytes(run).values()
        ), name
    say(
        f"{', '.join(runs)}: 4 of 4 checks pass (losses as on one device, shards, bytes sent, memory)"
    )
    for name, run in runs.items() if details else ():
        line = "{} over {} ×{count}, {bytes_sent:,} B"
        lines = [line.format(kind, axes, **row) for (axes, kind), row in tables[name].items()]
        say(f"{name:<14} sends " + ("\n" + NAMED * " ").join(lines or ["nothing"]), NAMED)
        parts = {part: size for part, size in predicted_argument_bytes(run).items() if size}
        sizes = ", ".join(f"{part} {size:,}" for part, size in parts.items())
        say(f"{name:<14} is given {sum(parts.values()):,} B: {sizes}", NAMED)
    return tables


def lies_as_promised(run: LessonRun) -> bool:
    """Return whether each weight, and each moment of it, has the shards that the plan's layouts promise."""
    sizes = run.step.mesh.shape

    def lies(tree: Any, layouts: Any) -> bool:
        shapes = jax.tree.map(lambda x: {shard.data.shape for shard in x.addressable_shards}, tree)
        return shapes == jax.tree.map(lambda x, to: {to.shard_shape(x.shape, sizes)}, tree, layouts)

    stored = lies(run.state.params, run.step.stored)
    return stored and all(lies(moment, run.step.reduced) for moment in moments(run.state))


def moments(state: State) -> list[Any]:
    """List what an optimizer's state holds in the form of the weights: two trees for Adam, none for SGD."""
    weights: Any = jax.tree.structure(state.params)
    is_moment = lambda tree: jax.tree.structure(tree) == weights
    return [tree for tree in jax.tree.leaves(state.optimizer, is_leaf=is_moment) if is_moment(tree)]


def predicted_argument_bytes(run: LessonRun) -> dict[str, int]:
    """Predict the bytes of a step's arguments per device, whatever its optimizer keeps."""
    trees, counters = (
        moments(run.state),
        [x for x in jax.tree.leaves(run.state.optimizer) if not x.ndim],
    )
    return memory.argument_bytes(
        run.step.plan, *run.shape, moments=len(trees), scalars=1 + len(counters)
    )


def as_predicted(run: LessonRun) -> list[Collective]:
    """Take a step's census, assert that it is as predicted on every stage, and return the last stage's."""
    step, census = run.step, []
    for stage, branches in enumerate(branch_shares(step.plan.pipeline, step.config.layer_kinds)):
        census = census_hlo(run.text, step.mesh, branches)
        predicted = step_traffic(step.plan, *run.shape, stage)
        assert census_table(census) == as_table(predicted), (step.plan, stage)
    return census


def as_table(predicted: Traffic) -> dict[tuple[str, str], dict[str, int]]:
    """Write a prediction as `census_table` writes a census: executions and bytes by (axes, kind)."""
    return {
        key: {"count": row.count, "bytes_sent": row.bytes_sent} for key, row in predicted.items()
    }


def five_runs() -> dict[str, tuple[float, float, float]]:
    """Make the runs of lesson 10: relative differences in loss, gradient norm and gradient between two ranks
    and one device, of a linear model in float32, with a fault in four of five."""
    rng = np.random.default_rng(10)
    x, y = (
        rng.standard_normal((16, 8)).astype(np.float32),
        rng.standard_normal(16).astype(np.float32),
    )
    weights = rng.standard_normal(8).astype(np.float32)
    ranks = (slice(0, 12), slice(12, 16))

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
    norm = size(gradient)
    far = lambda a, n, g: (off(a, loss), off(n, norm), float(size(g - gradient) / norm))
    return {name: far(*run) for name, run in runs.items()}
