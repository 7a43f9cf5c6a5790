"""Every timetable runs: loss and gradients of one device, what is sent, what is held; and the tables that are refused."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from parity import BATCH, LLAMA, QWEN, SEQ, batch, solo, weights

from llmpar import pipeline
from llmpar.mesh import make_mesh
from llmpar.notation import Arrow, Dim, Layout
from llmpar.plan import Plan
from llmpar.schedule import from_text, make
from llmpar.step import WHOLE, Step


class Piped(Plan):
    def place(self, layout):
        placed = super().place(layout)
        return Layout(tuple(Dim(d.name, self.live("pp")) if d.name == "l" else d for d in placed.dims), placed.sums)

    def unreduced(self, dims):
        layout = super().unreduced(dims)
        return Layout(layout.dims, tuple(a for a in self.live("pp") if a not in layout.axes) + layout.sums)


class PipedStep(Step):
    def __init__(self, config, plan, mesh, optimizer, schedule):
        self.schedule = schedule
        super().__init__(config, plan, mesh, optimizer)

    def _accumulate(self, par, params, batch, total):
        loss, grads = pipeline.gradients(self.config, self.plan, self.schedule, par, params, batch, total)
        return par.carry_out(loss, Arrow(Layout((), ("pp",)), WHOLE), "loss"), grads


def check_piped(config, plan, schedule, tolerance=1e-5):
    pipeline.check(config, plan, schedule, BATCH)
    order = pipeline.layer_order(schedule, config.num_layers)
    step = PipedStep(config, plan, make_mesh(plan.mesh), optax.sgd(1.0), schedule)
    params = jax.device_put(pipeline.arrange(weights(config), order), step.shardings.params)
    grads, metrics = jax.jit(step.gradients)(params, jax.device_put(batch(), step.batch_sharding))
    got = pipeline.arrange(jax.tree.map(np.asarray, grads), np.argsort(order))
    want_loss, want = solo(config)
    assert abs(float(metrics["loss"]) - want_loss) < tolerance
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        error = np.abs(g - w).max() / np.abs(w).max()
        assert error < tolerance, f"gradient of {jax.tree_util.keystr(path)} is off by {error:.1e}"


DEEP = dataclasses.replace(LLAMA, num_layers=4)


def test_1f1b():
    check_piped(LLAMA, Piped("pp=2"), make("1f1b", 2, 4))
