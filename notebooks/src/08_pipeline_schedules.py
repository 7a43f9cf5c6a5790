# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 40
#     needs: ["07"]
#     objectives:
#     - Write 1F1B as a table, and say what each stage holds.
#     - Say what chunks, a split backward and two directions do to bubble, memory and
#       messages.
#     - Tell the three definitions of the bubble apart, and design a schedule for costs
#       that are given.
# ---

# %% [markdown]
# # 08 · Pipeline schedules: who can fill the bubble, and who pays for it?
#
# All forwards, then all backwards: that holds something of every microbatch, and the only cure for the bubble is more microbatches
# (lesson 07). But a stage may choose *what to do next*. Every schedule below runs the same cells, F and B of each microbatch on each
# stage, in another order, and nearly all of them come from four ideas:
#
# | idea | schedule | changes |
# |---|---|---|
# | run a backward as soon as there is one | 1F1B (Narayanan et al. 2020 and 2021) | memory |
# | several smaller chunks of layers per stage | interleaved (Narayanan et al. 2021) | the bubble, for messages |
# | split the backward: only its first half is awaited | zero bubble (Qi et al. 2023) | the bubble, for nothing or for memory |
# | send microbatches in at both ends | DualPipe (DeepSeek-AI 2024) | what can overlap, for a second copy of the weights |
#
# (*Schedule*, *timetable* and *arrow* are explained in the README, under [Words](../README.md#words).)
#
# **Question.** Which of them may you use in a memory that is given, and what is left of the bubble?
#
# Letters: `u` microbatches, `p` stages, `g` chunks of layers per stage, `F` forward, `B` gradient of the input, `W`
# gradient of the weights. (Most papers write m for u, and v for g.)

# %%
from llmpar.mesh import use_devices

devices = use_devices()

# %%
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from llmpar import draw
from llmpar.config import preset
from llmpar.draw import scene
from llmpar.exercises import attempt, hint, solution
from llmpar.exercises.lesson import counting_text, train_steps
from llmpar.inspect.census import (
    arrow_rows,
    arrow_text,
    census_hlo,
    census_table,
    compiled_memory,
    executed_flops,
)
from llmpar.mesh import make_mesh
from llmpar.plan import Plan
from llmpar.predict import memory, traffic
from llmpar.predict.bubbles import closed_forms
from llmpar.schedules import from_text, make
from llmpar.split import split, trace
from llmpar.step import Step
from llmpar.timetable import branch_shares, slots, timetable

# Accelerators round float32 products unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
p = max(size for size in (1, 2, 4) if size <= len(devices))  # stages of what is run here
U = 8  # microbatches

# %% [markdown]
# ## One picture
#
# 1F1B. A stage runs some forwards ahead, then one forward and one backward in turn. Under each row, in grey: what it holds.

# %%
scene.show(draw.timeline(timetable(make("1f1b", 4, U))))

# %% [markdown]
# The idle time is that of GPipe, since the first microbatch still goes down and the last still comes up. But a stage no longer waits
# with its first backward until all forwards are through.
#
# ## Predict
#
# Sixteen stages, 64 microbatches, 1F1B. **How many microbatches does stage 3 hold at most?** (Stages count from 0.)

# %%
microbatches_held = ...
attempt("08.held", microbatches_held)

# %% [markdown]
# ### Exercise (core): write it down
#
# A schedule is text: one line per stage, `F0` the forward of microbatch 0, `B0` its backward. Write 1F1B for 3 stages and 4
# microbatches. How many forwards does each stage run before its first backward?

# %%
one_f_one_b = ...  # """F0 F1 …
attempt("08.one_f_one_b", one_f_one_b)

# %% [markdown]
# ## Chunks: interleaved 1F1B
#
# Cut the layers into 2p pieces and give stage i the pieces i and p + i. A microbatch comes by twice, each time for half of the work.
# The pipe fills in half of the time: a bubble of (p − 1)/g instead of p − 1. The price: (gp − 1)/(p − 1) times the messages, a little
# more than g, since they also go from the last stage's chunk to the first stage's next one; and more in flight.
# A black bar marks the second chunk.

# %%
interleaved, plain = timetable(make("interleaved", 4, U, 2)), timetable(make("1f1b", 4, U))
assert interleaved.bubble == plain.bubble / 2
# 1 + (p-1)/(gp), Korthikanti et al. 2022.
assert interleaved.peak_live()[0] == plain.peak_live()[0] * (1 + 3 / (4 * 2))
assert interleaved.hops.sum() * (4 - 1) == plain.hops.sum() * (2 * 4 - 1)
print(
    f"messages: {interleaved.hops.sum()}, and {plain.hops.sum()} in 1F1B, which is"
    f" {interleaved.hops.sum() / plain.hops.sum():.2f} times as many"
)
scene.show(draw.timeline(interleaved))

# %% [markdown]
# ## Split the backward
#
# Of the two products of a backward, the stage before waits for one only: the gradient of the *input* (B). The gradient of the
# *weights* (W) is awaited by nobody before the end of the step. So W can be put where the bubble was. ZB-H1 keeps 1F1B's order of F and
# B, and puts W off by i microbatches on stage i:

# %%
zb_h1 = timetable(make("zb-h1", 4, U))
assert zb_h1.bubble == plain.bubble / 3 and zb_h1.peak_live() == [4] * 4 and plain.peak_live() == [4, 3, 2, 1]
scene.show(draw.timeline(zb_h1))

# %% [markdown]
# A third of the bubble, at the same *peak* of memory: every stage holds 4 now, where those of 1F1B held 4, 3, 2 and 1. Autodiff gives both halves in one piece. How can they be parted, for any stage? A traced
# function is a list of equations. Keep those that lead to the input's gradient: that is B. Those that are left are W, and what they
# need of the others must be kept for them. `llmpar.split` does that. Here, for two layers, it cuts twice, between F and B, and between
# B and W:


# %%
def cell(w0, w1, x, dy):
    """All that a stage of two layers does with a microbatch: its output, its input's gradient, its weights'
    gradients."""
    y, pull = jax.vjp(lambda w0, w1, x: jnp.tanh(x @ w0) @ w1, w0, w1, x)
    dw0, dw1, dx = pull(dy)
    return y, (dx, (dw0, dw1))


rng = np.random.default_rng(0)
w0, w1, x, dy = (rng.standard_normal(n).astype(np.float32) for n in ((16, 64), (64, 16), (8, 16), (8, 16)))
F, backward, saved = split(cell, known=(w0, w1), given=(x,), later=(dy,))  # dy is not there when F runs
B, W, residual = split(backward, known=(w0, w1, saved), given=(dy,))
for name, part in {"F": F, "B": B, "W": W}.items():
    print(f"{name}: {' '.join(eqn.primitive.name for eqn in part.jaxpr.eqns)}")
print(
    "F leaves for later:",
    [aval.shape for aval in saved],
    " B leaves for W:",
    [aval.shape for aval in residual],
)

# %%
products = lambda part: sum(eqn.primitive.name == "dot_general" for eqn in part.jaxpr.eqns)
assert (products(F), products(B), products(W)) == (2, 2, 2), "nothing runs twice"
assert products(trace(cell, w0, w1, x, dy)) == 6
y, kept = F(w0, w1, x)
dx, left = B(w0, w1, kept, dy)
jax.tree.map(np.testing.assert_array_equal, (y, (dx, W(w0, w1, kept, left))), cell(w0, w1, x, dy))
print("value: F, then B, then W give the same bits as the whole")

# %% [markdown]
# Two products each, six in all. (That is the rule F = B = W of the papers. Attention has products without weights, so its W is
# smaller; then B is larger than W.)
#
# Beware: from here on there is a third definition of "the bubble". The zero-bubble papers look at each stage's *own* time, from its first
# cell to its last, and call the idle time of the longest one the bubble (of the **critical stage**). Before its first cell a stage has not
# begun, after its last it is through: corners of the **whole drawing**, in which nobody works. They can be used if the optimizer's steps
# of different stages need not wait for one another, as those of the next step then begin earlier on the stages that are through.
#
# By that definition the bubble goes away with more memory: ZB-H2 runs twice as many forwards ahead. And ZB-V has none with the peak of
# 1F1B: it has two chunks in the shape of a V, so the first stage also has the *last* layers and can turn round at once. What is still
# idle below are the white corners:

# %%
zb_v = timetable(make("zb-v", 4, U))
scene.show(draw.timeline(zb_v))
for stage, (starts, ends) in enumerate(zip(zb_v.start, zb_v.end, strict=True)):
    not_begun, through = starts[0], zb_v.makespan - ends[-1]
    assert np.isclose(not_begun + through, zb_v.makespan - zb_v.ideal), "all that is idle"
    print(f"stage {stage}: not begun for {not_begun:g}, through {through:g} before the end, idle between: 0")
assert zb_v.bubble == 0 < zb_v.bubble_fraction and max(zb_v.peak_live()) == max(plain.peak_live())
print(
    f"bubble of the critical stage {zb_v.bubble:g}; of the whole drawing {zb_v.bubble_fraction:.1%} are idle"
)

# %% [markdown]
# DualPipe goes through the layers in both directions, with two copies of the weights. It is made for something that this drawing
# does not show: a forward of one direction computes while the experts of the other exchange their tokens.

# %%
scene.show(draw.timeline(timetable(make("dualpipe", 4, U))))

# %% [markdown]
# ## The published formulas
#
# They were derived on paper; the simulator knows only who waits for whom. Both must agree for every number of stages, microbatches
# and chunks, and for unequal costs where a formula allows them. Below, for 8 stages and 32 microbatches: the bubble of the critical
# stage, in units of F = B = W, and what is idle in the whole drawing, over the ideal and over the total time.

# %%
# NBVAL_CHECK_OUTPUT
checked = 0
for stages in (2, 4, 8):
    for u in (stages, 2 * stages, 4 * stages):
        for chunks in (2, 4):
            for costs in ((1, 1, 1), (3, 5, 2)):
                for name, form in closed_forms(stages, u, chunks, costs).items():
                    simple = (
                        name in ("gpipe", "1f1b", "interleaved", "breadth-first")
                        or name == "zb-h1"
                        and costs[2] <= costs[0]
                    )
                    if u < form.from_m or not (simple or costs == (1, 1, 1)):
                        continue
                    g = chunks if name in ("interleaved", "breadth-first") else None
                    t = timetable(make(name, stages, u, g), costs)
                    assert np.isclose(t.bubble, form.bubble) and np.allclose(t.peak_live(), form.peak_live), (
                        name,
                        stages,
                        u,
                    )
                    checked += 1
print(f"{checked} timetables have the bubble and the memory of their formulas\n")

print("                critical stage   whole drawing, idle")
print("schedule                bubble   over ideal   over total   held  messages  copies of the weights")
for name in closed_forms(8, 32):
    t = timetable(make(name, 8, 32))
    print(
        f"{name:<13}{t.bubble:17g}{t.bubble_over_ideal:13.1%}{t.bubble_fraction:13.1%}"
        f"{max(t.peak_live()):7g}{t.hops.sum():10}{t.schedule.parameter_copies:5}"
    )
h1, h2 = (timetable(make(name, 8, 32)) for name in ("zb-h1", "zb-h2"))
assert h2.bubble == 0 < h1.bubble and h1.makespan == h2.makespan

# %% [markdown]
# So ZB-H2, whose bubble is 0, ends no earlier than ZB-H1 as long as the stages wait for one another at the end of a step.
#
# Measured times make an even harder test: eight stages of a model of 1.5B parameters, times in milliseconds, and messages that take
# 0.6 to 0.8 ms. The paper's rates, (time − u(F + B + W)) / time, are reproduced to their last digit:

# %%
# NBVAL_CHECK_OUTPUT
# Qi et al. 2023, table 5, with the times of table 6: u -> (F, B, W), hop, rates of 1F1B, ZB-H1, ZB-H2
PUBLISHED = {
    24: ((18.522, 18.086, 9.337), 0.601, (0.2431, 0.1585, 0.1083)),
    32: ((18.513, 18.086, 9.331), 0.626, (0.1985, 0.1242, 0.0837)),
    64: ((18.546, 18.097, 9.321), 0.762, (0.1240, 0.0674, 0.0444)),
}
for u, (costs, hop, rates) in PUBLISHED.items():
    found = [timetable(make(name, 8, u), costs, hop).bubble_rate for name in ("1f1b", "zb-h1", "zb-h2")]
    assert np.allclose(found, rates, atol=1e-4)
    print(
        f"u = {u}: "
        + "  ".join(
            f"{name} {rate:.4f}" for name, rate in zip(("1F1B", "ZB-H1", "ZB-H2"), found, strict=True)
        )
    )

# %% [markdown]
# ## Run: one executor, five tables
#
# A Llama of 8 layers under four schedules; the fifth will be yours, further down. The programs differ in their table and in their slots, and in nothing else. In each tick:
# take a message, run the cell of the table (or nothing), pass the result on by a permute to the right or to the left.

# %%
LLAMA, SEQ, STEPS = dataclasses.replace(preset("tiny"), num_layers=8), 16, 2
TEXT = counting_text(2 * U, SEQ)


def compile_step(plan, rows=2 * U):
    plan.check(LLAMA, rows, SEQ)
    step = Step(LLAMA, plan, make_mesh(plan.mesh), optax.sgd(0.5))
    return step, step.lower(rows, SEQ).compile()


def train(step, compiled):
    """Losses, and the weights after them, layers in the model's order again."""
    state, losses = train_steps(step, compiled, TEXT, STEPS)
    return jax.device_get(step.to_natural(state).params), losses


solo_step, solo = compile_step(Plan(microbatches=U))
solo_params, solo_losses = train(solo_step, solo)
NAMES = ("1f1b", "interleaved", "zb-h1", "zb-v")
programs = {name: compile_step(Plan(f"pp={p}", schedule=name, microbatches=U)) for name in NAMES}
trained = {name: train(*program) for name, program in programs.items()}
print("losses on one device:", " ".join(f"{x:.3f}" for x in solo_losses))


# %%
def same(params, losses):
    assert np.allclose(losses, solo_losses, rtol=1e-4), losses
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(solo_params), strict=True):
        assert np.abs(one - other).max() < 1e-5 * max(1, np.abs(other).max())


for params, losses in trained.values():
    same(params, losses)
print(f"value: {STEPS} losses and the weights after them equal those of one device, under {', '.join(NAMES)}")

for name, (step, _) in programs.items():
    order = step.layer_order.reshape(p, -1).tolist()
    shapes = {
        x.sharding.shard_shape(x.shape)[0] for x in jax.tree.leaves(step.abstract_state.params["blocks"])
    }
    assert shapes == {LLAMA.num_layers // p}
    print(f"sharding: {name:<12} layers of each stage: {order}")

# %%
# NBVAL_CHECK_OUTPUT
stream = 2 * SEQ * LLAMA.width * 4  # the bytes of one microbatch's activation
executed = {}  # FLOPs of all stages
for name, (step, compiled) in programs.items() if p > 1 else ():
    order = step.plan.pipeline
    send, ticks, executed[name] = slots(timetable(order)).send, len(timetable(order).ticks), 0
    for stage in range(p):
        taken = branch_shares(order, LLAMA.num_layers, stage)
        found = census_hlo(compiled.as_text(), step.mesh, taken)
        predicted = traffic.step_traffic(LLAMA, step.plan, 2 * U, SEQ, stage)
        rows = census_table(found)["pp", "collective-permute"]
        hops = predicted["pp", "collective-permute"]
        assert rows == {"count": hops.count, "bytes_sent": hops.bytes_sent}
        assert sum(c.bytes_sent for c in found) == predicted.total_bytes
        executed[name] += executed_flops(compiled.as_text(), taken)
    assert (
        rows["count"] == sum((send == way).any(1).sum() for way in (1, -1))
        and rows["bytes_sent"] == rows["count"] * stream
    )
    print(
        f"communication: {name:<12}{ticks:3} ticks, {rows['count']:3} permutes of {stream:,} B, as the table"
        " says"
    )
    permutes = [c for c in found if c.kind == "collective-permute"]
    assert sum(row["bytes_sent"] for row in arrow_rows(permutes)) == rows["bytes_sent"]
    print(arrow_text(permutes))  # by arrow: forward to the next stage, backward to the previous one
if executed and devices[0].platform == "cpu":  # elsewhere products are library calls, which cannot be counted
    one_device = executed_flops(solo.as_text())
    assert executed["1f1b"] == executed["zb-h1"] and executed["interleaved"] == executed["zb-v"], (
        "to split costs nothing"
    )
    print(
        "work: "
        + ", ".join(f"{name} {flops / one_device:.3f}" for name, flops in executed.items())
        + " of one device's products"
    )

# %% [markdown]
# The work above one device's is the forward pass that B repeats, by choice (`stage_saves="input"`): all of it but that of the last
# chunk of layers, whose B follows at once. Bubbles compute nothing.
#
# ## What a stage keeps
#
# The executor gives an activation a slot from its F to its last reader. So the number of slots is what the table holds at once, and
# the compiled memory follows it. With `zb-h1` and `zb-v` there are also slots for what B leaves to W.

# %%
print("gpipe        slots for inputs per stage", slots(timetable(make("gpipe", 4, U))).num_saved.tolist())
for name, (step, compiled) in programs.items():
    held = compiled_memory(compiled)
    given = memory.argument_bytes(LLAMA, step.plan, 2 * U, SEQ, moments=0, scalars=1)
    assert held["argument_bytes"] == sum(given.values())
    if p > 1:
        table, found = timetable(step.plan.pipeline), slots(timetable(step.plan.pipeline))
        if step.plan.pipeline.num_chunks == 1:
            assert max(found.num_saved) == p == max(table.peak_live())
        print(
            f"{name:<12} slots for inputs per stage {found.num_saved.tolist()}, for W"
            f" {found.num_residual.tolist()}"
        )
print(f"memory: {sum(given.values()):,} B of arguments per device as predicted, whatever the schedule")

# %% [markdown]
# For 1F1B it does not depend on the number of microbatches. Compiled for 8 and for 32 of them:

# %%
more, compiled_more = compile_step(Plan(f"pp={p}", schedule="1f1b", microbatches=4 * U), rows=8 * U)
few, many = (compiled_memory(program)["temp_bytes"] for program in (programs["1f1b"][1], compiled_more))
lines_few, lines_many = (program.as_text().count("\n") for program in (programs["1f1b"][1], compiled_more))
if p > 1:
    assert slots(timetable(more.plan.pipeline)).num_saved.tolist() == [p - i for i in range(p)]
    assert abs(many / few - 1) < 0.05 and abs(lines_many / lines_few - 1) < 0.05
    print(f"memory: 1F1B has {many / few:.3f} times the temporaries with 4 times the microbatches")
    print(
        f"and {lines_many / lines_few:.3f} times the lines of compiled program: the table is data, the"
        " program does not grow with it"
    )

# %% [markdown]
# ## A wrong table is refused
#
# Before anything is compiled, the timetable is simulated. If stages wait for one another in a circle, the sentence names the stage, the
# tick and the circle. Here stage 1 wants its second microbatch first, and stage 0 wants the first one back before it sends the second:

# %%
# NBVAL_CHECK_OUTPUT
crossed = "F0 B0 F1 B1\nF1 B1 F0 B0"
try:
    Plan("pp=2", schedule=crossed, microbatches=2).check(LLAMA, 4, SEQ)
    raise AssertionError("this table must not run")
except ValueError as refusal:
    print(refusal)
    assert "a deadlock" in str(refusal) and "Cycle: " in str(refusal)

# %% [markdown]
# ## Write your own
#
# Below is a schedule for p stages and 4 microbatches: 1F1B, in which each W follows its B at once. Change it, and run the cell again. You
# are told whether it is legal; what is left of the bubble; what each stage holds; and you see it. With `TRAIN = True` it is
# compiled, and its losses and weights are compared with those of one device. (`TimelineExplorer(order=SCHEDULE)` of
# `llmpar.explore.small` draws while you type.)

# %%
TRAIN = True
SCHEDULE = {
    4: (
        """
F0 F1 F2 F3 B0 W0 B1 W1 B2 W2 B3 W3
F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3
F0 F1 B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3
"""
    ),
    2: (
        """
F0 F1 B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3
"""
    ),
    1: "F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3",
}[p]


def examine(text, costs=(1, 1, 1)):
    """Legality, bubble, memory and picture of an order written as text; None if it is refused."""
    try:
        table = timetable(from_text(text), costs)
    except ValueError as refusal:
        print("refused:", refusal)
        return None
    order = table.schedule
    known = timetable(make("1f1b", order.num_stages, order.num_microbatches), costs)
    print(
        f"legal: {order.num_stages} stages, {order.num_microbatches} microbatches, backward split:"
        f" {order.split_backward}"
    )
    print(f"bubble {table.bubble:g}, 1F1B's {known.bubble:g}; {table.bubble_fraction:.1%} of the total idle")
    print(
        f"microbatches held per stage {table.peak_live()}, 1F1B's {known.peak_live()}; {table.hops.sum()}"
        " messages"
    )
    scene.show(draw.timeline(table))
    return order


order = examine(SCHEDULE)
if TRAIN and order and order.num_stages == p > 1:
    written = Plan(f"pp={p}", schedule=SCHEDULE, microbatches=order.num_microbatches)
    same(*train(*compile_step(written)))
    print("value: losses and weights equal those of one device")

# %% [markdown]
# ### Exercise (stretch): a third of the bubble
#
# 3 stages, 5 microbatches, F = B = W. 1F1B has a bubble of 6 and holds 3 microbatches. Write an order with a bubble of **2** that holds
# no more. `examine(text)` tells you how far you are.

# %%
third_of_the_bubble = ...  # """F0 F1 …
attempt("08.third_of_the_bubble", third_of_the_bubble)

# %% [markdown]
# ### Exercise (expert): other costs, and one microbatch more
#
# In a model with long sequences attention makes W cheaper than B: F : B : W = 1 : 1.2 : 0.8. 3 stages, 5 microbatches, and memory for
# **4** of them on each stage, between ZB-H1 (3) and ZB-H2 (5). Write an order with a bubble of at most **2.0**.
# `examine(text, costs=(1, 1.2, 0.8))` knows the costs.

# %%
between_h1_and_h2 = ...  # """F0 F1 …
attempt("08.between_h1_and_h2", between_h1_and_h2)

# %% [markdown]
# ## Where XLA's partitioner differs
#
# It has no schedule at all (lesson 07), and pipelines written for it alone (GSPMD pipelines) are scans turned round by autodiff: GPipe, or
# breadth-first over looped chunks, the last of the orders that need no backward before the end of all forwards. Early backwards need the
# backward pass *in* the loop, as an operation that the table can place. That is why the executor differentiates one cell, and not the
# loop.
#
# ## Five lines
#
# 1. 1F1B: the bubble of GPipe, but stage i holds p − i microbatches, however many there are.
# 2. Interleaved: the bubble divided by g, for (gp − 1)/(p − 1) times the messages and 1 + (p − 1)/(gp) of the memory.
# 3. Split the backward: nobody waits for W, so it fills the bubble. A third is left at the same peak of memory, none for twice the peak.
# 4. A schedule is a table. Proved legal, measured and drawn before it is compiled; one executor runs them all, with one device's result.
# 5. "Bubble" has three definitions. "A third" and "none" hold for that of the critical stage; the whole drawing keeps idle corners.
#
# ## On your cluster
#
# ```
# llmpar schedule zb-h1 --stages 8 --microbatches 32 --costs 1,1.2,0.8        bubble and memory with your costs
# llmpar train --mesh "pp=2 dp=2 tp=2" --schedule zb-h1 --microbatches 8      and training
# llmpar train --mesh "pp=2 dp=2" --schedule interleaved --virtual-stages 2 --microbatches 4 --stage-saves residuals
# ```
#
# Measure F, B and W of one stage first: a schedule that is best with equal costs need not be best with yours. If memory allows,
# `--stage-saves residuals` computes nothing twice.
#
# **One number to remember: p − i.** What 1F1B's stage i holds, however many microbatches there are.

# %%
print(
    f"{p} stages: 1F1B holds {[p - i for i in range(p)]} microbatches, all-forwards-first holds all of them"
)
