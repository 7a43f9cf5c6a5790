# %% [markdown] tags=["slide"] minutes=0 section="Appendix: the executor"
# ## Where to cut the backward
#
# A traced stage is a list of equations. Those that lead to the input's gradient are **B**; what is left is **W**. It works
# for any layer, with the same bits. For two layers:
#
# <footer>Qi et al. 2023 (Zero Bubble) · lesson <code>notebooks/08_pipeline_schedules</code> · <code>llmpar train --mesh pp=2 --schedule zb-h1 --microbatches 4</code></footer>

# %%
from llmpar.parallel.mesh import use_devices

use_devices()

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from IPython.display import Markdown

from llmpar.inspect.census import census_table
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.parallel.mesh import abstract_mesh
from llmpar.pipeline.split_backward import split_backward
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.plan.timetable import branch_shares, slots, timetable
from llmpar.predict import traffic
from llmpar.training.step import Step


def cell(w0, w1, x, dy):
    """What a stage of two layers does with one microbatch."""
    y, pull = jax.vjp(lambda w0, w1, x: jnp.tanh(x @ w0) @ w1, w0, w1, x)
    dw0, dw1, dx = pull(dy)
    return y, (dx, (dw0, dw1))


w0, w1, x, dy = (
    np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for shape in ((16, 64), (64, 16), (8, 16), (8, 16))
)
forward, both, saved = split_backward(cell, shared=(w0, w1), first_args=(x,), second_args=(dy,))
backward, weights, left = split_backward(both, shared=(w0, w1, saved), first_args=(dy,))
y, kept = forward(w0, w1, x)
dx, rest = backward(w0, w1, kept, dy)
jax.tree.map(np.testing.assert_array_equal, (y, (dx, weights(w0, w1, kept, rest))), cell(w0, w1, x, dy))
parts = {"F": forward, "B": backward, "W": weights}
names = {name: [eqn.primitive.name for eqn in part.jaxpr.eqns] for name, part in parts.items()}
assert [found.count("dot_general") for found in names.values()] == [2, 2, 2]
keeps = {"F": len(saved), "B": len(left), "W": 0}
lines = [
    f"| {name} | {found.count('dot_general')} | {', '.join(n for n in found if n != 'dot_general')} |"
    f" {keeps[name]} |"
    for name, found in names.items()
]
Markdown(
    "\n".join(["| part | matmuls | other equations | arrays kept for later |", "|---|--:|---|--:|", *lines])
)

# %% [markdown] tags=["notes"]
# **Ask:** which equations can be in neither? Those that no result needs: tracing drops them. And none is in both: six matmuls, as in
# the whole.
#
# **Misunderstanding:** that the split is free. What B leaves for W must be held until W runs; the more it is put off, the more is
# held.
#
# **Source:** computed here with `llmpar.pipeline.split_backward`, and compared with the uncut function bit by bit. The idea: Qi et al. 2023,
# section 2.

# %% [markdown] tags=["slide"] minutes=0
# ## A schedule is a table; one program runs it
#
# In each tick a stage runs its cell **or nothing**: no work on garbage. The code has two permutes, whatever the table is. A
# Llama of 8 layers, 4 stages, 8 microbatches:
#
# <footer>Executor: <code>llmpar/pipeline/executor.py</code> · lesson <code>notebooks/08_pipeline_schedules</code></footer>

# %%
LLAMA, lines = dataclasses.replace(preset("tiny"), num_layers=8), []
for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"):
    plan = Plan("pp=4", schedule=name, microbatches=8)
    plan.resolve(LLAMA, batch_size=16, seq_len=16)
    step, order = Step(LLAMA, plan, abstract_mesh("pp=4"), optax.sgd(1.0)), timetable(plan.pipeline)
    traced = jax.jit(step.gradients).trace(step.abstract_state.params, step.abstract_batch(16, 16)).jaxpr
    for stage in range(4):
        rows = census_table(
            census_jaxpr(traced, {"pp": 4}, branch_shares(plan.pipeline, LLAMA.layer_kinds)[stage])
        )
        predicted = traffic.step_traffic(plan.resolve(LLAMA), 16, 16, stage)
        assert rows == {
            key: {"count": row.count, "bytes_sent": row.bytes_sent} for key, row in predicted.items()
        }
    sent = rows["pp", "collective-permute"]
    held = slots(order).num_saved
    lines.append(
        f"| {name} | {len(order.ticks)} | {sent['count']} | {sent['bytes_sent'] / 2**10:.0f} KiB |"
        f" {', '.join(map(str, held))} |"
    )
Markdown(
    "\n".join(
        [
            "| order | ticks | permutes | sent per device | inputs held, stage 0 to 3 |",
            "|---|--:|--:|--:|---|",
            *lines,
        ]
    )
)

# %% [markdown] tags=["notes"]
# With g = 2 chunks (interleaved, zb-v) a cell is half as much work, so ticks are shorter and there are more of them.
#
# **Ask:** why do stages run in step at all? They need not for the result; but a permute waits for all who take part in it, so in
# a compiled loop over ticks they do. `llmpar schedule` gives the makespan both ways.
#
# **Misunderstanding:** that a schedule needs a program of its own. GSPMD pipelines turn a scan round by autodiff, which fixes
# "all forwards first" (Alpa and JaxPP do not). Here the backward is a cell of the table like any other.
#
# **Source:** ticks and slots from the table, permutes and bytes read from the traced program, equal to the prediction for each stage.
