# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 40
#     needs: ["07"]
#     question: Which order of a pipeline's work fits into a given memory, and how much
#       bubble is left?
#     objectives:
#     - Write 1F1B as a table, and say what each stage holds.
#     - Say what chunks and a split backward do to bubble, memory and messages.
#     - Say how the three definitions of the bubble differ, and make a schedule's bubble
#       smaller by moving W.
# ---

# %% [markdown]
# # 08 · Pipeline schedules: what fills the bubble, and what does it cost?
#
# A stage may choose what it does *next*. Here are the beginnings of three orders of the same work, on four stages with eight
# microbatches. Every stage has 24 time units of work. Which order finishes first?

# %% tags=["plumbing"]
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # simulated devices; real ones: On your cluster

from llmpar.parallel.mesh import use_devices

devices = use_devices()

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from llmpar import draw
from llmpar.draw import scene
from llmpar.explore.small import TimelineExplorer
from llmpar.inspect.census import (
    arrow_rows,
    arrow_text,
    compiled_memory,
    executed_flops,
    read_program,
)
from llmpar.lessons import attempt, hint, met, opened, say, solution
from llmpar.lessons.lesson import as_predicted, counting_text, train_on, verdicts
from llmpar.parallel.mesh import make_mesh
from llmpar.pipeline.split_backward import split_backward, trace
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.plan.schedules import from_text, make
from llmpar.plan.timetable import branch_shares, slots, timetable
from llmpar.predict.bubbles import closed_forms
from llmpar.training.step import Step

# Accelerators round float32 matmuls unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
# Stages of what is run here, and microbatches.
p, U = 4, 8
NAMES = ("GPipe", "1F1B", "interleaved", "ZB-H1", "ZB-V")
orders = {name: timetable(make(name.lower(), 4, U)) for name in NAMES}

# %%
three = {name: orders[name] for name in ("1F1B", "ZB-H1", "ZB-V")}
scene.show(draw.timelines(three, until=12))

# %% [markdown]
# Each row is a stage, each cell one microbatch. `F` is its forward pass. The backward pass has two halves (lesson 07): `B` computes
# the gradient of the input, for which the previous stage waits; `W` that of the weights. Without a line between them B and W run
# together.
#
# | order | rule |
# |---|---|
# | 1F1B | one forward, one backward, in turn |
# | ZB-H1 (*zero bubble*) | 1F1B, with W put off |
# | ZB-V | W put off, and two *chunks* of layers in each stage, down and up again (a bar marks the second) |
#
# A stage must **hold** the activations of a microbatch until its backward pass is done, `B` and `W`. Look for pauses (no cell), and count
# each stage's F before its first W (in 1F1B: the pale part behind a B). In ZB-V an F is half: one of two chunks. **Which order finishes
# first? In which do the four stages together hold the fewest microbatches?**

# %%
bets = {"first": ..., "holds least": ...}  # two of the three names
attempt("08.bets", bets)

# %% tags=["plumbing"]
gpipe, plain, chunks, zb_h1, zb_v = orders.values()
assert {table.ideal for table in orders.values()} == {24}
first = min(orders, key=lambda name: orders[name].makespan)
least = min(orders, key=lambda name: sum(orders[name].peak_live()))

# %%
if opened("08.bets"):
    scene.show(draw.timelines(three))
met("08.bets", {"first": first, "holds least": least}, "simulated")

# %% [markdown]
# "Holds" says how many microbatches stage 0, 1, 2 and 3 hold at most. The hatched time is the bubble.
#
# ## 1F1B: one forward, one backward
#
# A stage runs a backward as soon as one is ready: first some forwards, then alternately one forward and one backward (Narayanan et al.
# 2019; this variant, in which all stages wait when a step ends, is of 2020). It takes as long as GPipe, 33 units. But look at what is held,
# the yellow parts:

# %% tags=["plumbing"]
assert plain.makespan == gpipe.makespan and gpipe.peak_live() == [8] * 4
assert plain.peak_live() == [4, 3, 2, 1]

# %%
scene.show(draw.timeline(plain, half=0.5))

# %% [markdown]
# Take sixteen stages, 64 microbatches and 1F1B. **How many microbatches does stage 3 hold at most?** (Stages count from 0.)

# %%
microbatches_held = ...  # a number
attempt("08.held", microbatches_held)

# %%
# Sixteen stages are too many to draw here; the simulator counts.
met("08.held", timetable(make("1f1b", 16, 64)).peak_live()[3], "simulated")

# %% [markdown]
# ### Exercise (core): write 1F1B as text
#
# A schedule is text, with one line per stage: `F0` is the forward of microbatch 0, `B0` its backward. Write 1F1B for 3 stages and 4
# microbatches.

# %%
one_f_one_b = ...  # """F0 F1 …
attempt("08.one_f_one_b", one_f_one_b)

# %% [markdown]
# ## Chunks: half of the bubble, more than twice the messages
#
# Interleaved 1F1B cuts the layers of `p` stages into `g` chunks per stage; with g = 2 stage i has the chunks i and p + i. A microbatch
# passes each stage twice, each time for half of the work. So the pipeline fills in half of the time, and the bubble is divided by g.
#
# The price is (gp − 1)/(p − 1) times the messages, since they also go from the last stage back to the first. And stages hold more.

# %% tags=["plumbing"]
scene.show(draw.timeline(chunks, facts=False))
assert chunks.bubble == plain.bubble / 2
# 1 + (p-1)/(gp), Korthikanti et al. 2022.
assert chunks.peak_live()[0] == plain.peak_live()[0] * (1 + 3 / (4 * 2))
more, fewer = (int(np.sum(table.hops)) for table in (chunks, plain))
assert more * (4 - 1) == fewer * (2 * 4 - 1)
print(f"messages: {more}, where 1F1B has {fewer}: {more / fewer:.2f} times as many")

# %% [markdown]
# ## No stage waits for W
#
# The previous stage waits only for B. No stage waits for W before the end of the step, so W can run where the bubble was (Qi et al.
# 2023). Below is 1F1B with each W right after its B. Its bubble is 6 and not 9, because the previous stage goes on after B.
#
# ## Try: how small a bubble do you reach?
#
# Drag an operation to another place of its row. The bubble is 6 now. **How small does it get, if no stage holds more than 4 microbatches?**
# (It cannot become 0: stage 0 has four F for the seven units before B0 comes back. A running figure lists five goals; four are reached.) Begin with
# the W of the last stage.

# %% tags=["plumbing"]
SCHEDULE = """
F0 F1 F2 F3 B0 W0 B1 W1 B2 W2 B3 W3
F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3
F0 F1 B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3
"""
SCHEDULE = "\n".join(SCHEDULE.split("\n")[-p - 1 :])  # a line per device

# %%
game = TimelineExplorer(stages=p, microbatches=4, order=SCHEDULE)
game

# %%
your_order = ...  # game.state["order"]
attempt("08.game", your_order)

# %% tags=["plumbing"]
before = game.state | {"order": SCHEDULE}
assert game.answer(before)["numbers"]["goals"] == [True] * 4 + [False]
stuck = game.answer(before | {"move": [p - 1, 1, 0]})  # B0 before F0
assert "a deadlock" in stuck["refusal"]["why"]
assert zb_h1.bubble == plain.bubble / 3 and zb_h1.peak_live() == [4] * 4

# %% [markdown]
# ZB-H1 delays W by i microbatches on stage i. A third of 1F1B's bubble is left, 3 of 9. The worst stage holds 4, as before. But now all
# stages do; in 1F1B they held 4, 3, 2 and 1.
#
# ## ZB-V: three things are called the bubble
#
# ZB-V gives chunks of layers to the stages going down and then up again, in the shape of a V. So the first stage has the first layers
# and the *last* ones. Its authors say that it has no bubble (Qi et al. 2023). Yet above it ends at 25.5, not at 24. Both are true:

# %% tags=["plumbing"]
for starts, ends in zip(zb_v.start, zb_v.end, strict=True):
    corners = starts[0] + zb_v.makespan - ends[-1]  # not begun, and through
    assert np.isclose(corners, zb_v.makespan - zb_v.ideal)  # that is all that is idle
assert zb_v.bubble == 0 < zb_v.bubble_fraction
assert max(zb_v.peak_live()) == max(plain.peak_live())

# %%
scene.show(draw.bubbles(zb_v))

# %% [markdown]
# The first two are those of lesson 07. The zero-bubble papers take each stage's own time, from its first operation to its last.
# The stage with the longest such time is the **critical stage**; its idle time in between is their bubble. The dotted corners
# do not count: the next step can begin in them, if the stages do not wait for one another at the end of this step. (Clipping by the
# global norm makes them wait.)
#
# ## One executor runs them all
#
# Train a Llama of 8 layers under four orders. The programs differ only in their table.

# %%
LLAMA, SEQ, STEPS = dataclasses.replace(preset("tiny"), num_layers=8), 16, 2
TEXT, SGD = counting_text(2 * U, SEQ), optax.sgd(0.5)


def train(schedule):
    plan = Plan(f"pp={p}", schedule=schedule, microbatches=U)
    return train_on(LLAMA, plan, TEXT, SGD, STEPS)


print("Five programs are compiled and run: about 40 s.")
solo = train_on(LLAMA, Plan(microbatches=U), TEXT, SGD, STEPS)
runs = {name: train(name) for name in ("1f1b", "interleaved", "zb-h1", "zb-v")}
sent = verdicts(runs, solo, weights_within=1e-5)

# %% [markdown]
# The order changes neither losses nor weights. It changes time, memory and messages.

# %% [markdown]
# ## Keep: 1F1B holds p − i, and W fills the bubble
#
# 1. 1F1B has the bubble of GPipe, but **stage i holds p − i microbatches**, however many there are.
# 2. Interleaving divides the bubble by g. It costs (gp − 1)/(p − 1) times the messages and 1 + (p − 1)/(gp) times the memory of the first
#    stage, which holds most.
# 3. No stage waits for W, so it can fill the bubble: with F = B = W a third is left at the same peak of memory (ZB-H1).
# 4. A schedule is a table, which llmpar proves legal before anything is compiled. One executor runs them all.
# 5. "Bubble" has three definitions. "No bubble" counts only the time between a stage's first and last operation.

# %% [markdown]
# ## Further
#
# Two directions, what is sent, how a backward is split, the published formulas, what a stage keeps, and schedules of your own.
#
# ### DualPipe sends microbatches in at both ends
#
# DualPipe (DeepSeek-AI 2024) goes through the layers in both directions, with two copies of the weights. It is made for something that
# this drawing does not show: a forward of one direction computes while the experts of the other exchange their tokens. Lesson 09 has a
# real trace of it (*A real trace*).

# %%
scene.show(draw.timeline(timetable(make("dualpipe", 4, U))))

# %% [markdown]
# ### What is sent, and what is computed
#
# A **census** counts what the compiled program sends along `pp`, the axis of the pipeline. The all-reduces finish the gradients of
# embedding, head and norm, which every stage has.

# %%
verdicts(runs, solo, weights_within=1e-5, details=True)
for name, run in runs.items():
    order = run.step.layer_orders[0].reshape(p, -1).tolist()
    print(f"layers of each stage, {name:<12} {order}")

# %% [markdown]
# In each tick a stage takes a message, runs the cell of the table (or nothing), and passes the result on by a permute to the right or
# to the left. So every number of permutes follows from the table: one for each tick in which anybody sends to the right, and one for each
# in which anybody sends to the left.

# %% tags=["nbval-check-output"]
stream = 2 * SEQ * LLAMA.width * 4  # the bytes of one microbatch's activation
for name, run in runs.items():
    table, row = (
        timetable(run.step.plan.pipeline),
        sent[name]["pp", "collective-permute"],
    )
    send = np.asarray(slots(table).send)
    hops = sum((send == way).any(1).sum() for way in (1, -1))
    assert row == {"count": hops, "bytes_sent": hops * stream}
    print(f"{name:<12}{len(table.ticks):3} ticks, {hops:3} permutes of {stream:,} B")
    permutes = [c for c in as_predicted(run) if c.kind == "collective-permute"]
    assert sum(one["bytes_sent"] for one in arrow_rows(permutes)) == row["bytes_sent"]
    print(
        arrow_text(permutes)
    )  # forward to the next stage, backward to the previous one

# %% [markdown]
# Bubbles compute nothing. What exceeds 1 is the forward pass: B runs it again, by choice (`stage_saves="input"`). The last
# chunk of layers repeats none: there B follows F at once.

# %% tags=["nbval-check-output"]
# Elsewhere matmuls are library calls, which cannot be counted.
work, one_device = {}, executed_flops(solo.compiled.as_text())
for name, run in runs.items():
    text, stages = (
        run.compiled.as_text(),
        branch_shares(run.step.plan.pipeline, LLAMA.layer_kinds),
    )
    work[name] = sum(executed_flops(text, branches) for branches in stages)
    print(f"{name:<12} {work[name] / one_device:.3f} of one device's matmuls")
assert work["1f1b"] == work["zb-h1"], "to split costs nothing"
assert work["interleaved"] == work["zb-v"]

# %% [markdown]
# ### How a backward is split
#
# Autodiff gives both halves in one piece. How can they be parted, for any stage? A traced
# function is a list of equations. Keep those that lead to the input's gradient: that is B. Those that are left are W, and what they
# need of the others must be kept for them. `llmpar.pipeline.split_backward` does that. Here, for two layers, it cuts twice, between F and B, and between
# B and W:


# %%
def cell(w0, w1, x, dy):
    """A stage of two layers: its output; the gradients of its input and weights."""
    y, pull = jax.vjp(lambda w0, w1, x: jnp.tanh(x @ w0) @ w1, w0, w1, x)
    dw0, dw1, dx = pull(dy)
    return y, (dx, (dw0, dw1))


rng = np.random.default_rng(0)
shapes = ((16, 64), (64, 16), (8, 16), (8, 16))
w0, w1, x, dy = (rng.standard_normal(n).astype(np.float32) for n in shapes)
# dy is not there when F runs.
F, backward, saved = split_backward(
    cell, shared=(w0, w1), first_args=(x,), second_args=(dy,)
)
B, W, residual = split_backward(backward, shared=(w0, w1, saved), first_args=(dy,))
for name, part in {"F": F, "B": B, "W": W}.items():
    print(f"{name}: {' '.join(eqn.primitive.name for eqn in part.jaxpr.eqns)}")
print("F leaves for later:", [aval.shape for aval in saved])
print("B leaves for W:", [aval.shape for aval in residual])


# %%
def matmuls(part):
    return sum(eqn.primitive.name == "dot_general" for eqn in part.jaxpr.eqns)


assert (matmuls(F), matmuls(B), matmuls(W)) == (2, 2, 2), "nothing runs twice"
assert matmuls(trace(cell, w0, w1, x, dy)) == 6
y, kept = F(w0, w1, x)
dx, left = B(w0, w1, kept, dy)
parts = (y, (dx, W(w0, w1, kept, left)))
jax.tree.map(np.testing.assert_array_equal, parts, cell(w0, w1, x, dy))
print("value: F, then B, then W give the same bits as the whole")

# %% [markdown]
# Two matmuls each, six in all. (That is the rule F = B = W of the papers. Attention has matmuls without weights, so its W is
# smaller; then B is larger than W.)
#
# ### The published formulas
#
# They were derived on paper; the simulator knows only who waits for whom. Both must agree for every number of stages, microbatches
# and chunks, and for unequal costs where a formula allows them. Below, for 8 stages and 32 microbatches: the bubble of the critical
# stage, in units of F = B = W, and what is idle in the whole drawing, over the ideal and over the total time.

# %% tags=["nbval-check-output"]
SIMPLE = ("gpipe", "1f1b", "interleaved", "breadth-first")  # hold for any costs
CHUNKED = ("interleaved", "interleaved-zb", "breadth-first")
ZB = ("zb-h1", "interleaved-zb")
CASES = [
    (stages, u, chunks, costs)
    for stages in (2, 4, 8)
    for u in (stages, 2 * stages, 4 * stages)
    for chunks in (2, 4)
    for costs in ((1, 1, 1), (3, 5, 2))
]
checked = 0
for stages, u, chunks, costs in CASES:
    for name, form in closed_forms(stages, u, chunks, costs).items():
        any_costs = name in SIMPLE or (name in ZB and costs[2] <= costs[0])
        if u >= form.from_m and (any_costs or costs == (1, 1, 1)):
            g = chunks if name in CHUNKED else None
            t = timetable(make(name, stages, u, g), costs)
            assert np.isclose(t.bubble, form.bubble), (name, stages, u)
            assert np.allclose(t.peak_live(), form.peak_live), (name, stages, u)
            checked += 1
print(f"{checked} timetables have the bubble and the memory of their formulas")

# %% tags=["nbval-check-output"]
print(
    "              critical stage   whole drawing, idle                      copies of"
)
print("schedule              bubble   over ideal  over total   held  messages  weights")
for name in closed_forms(8, 32):
    t = timetable(make(name, 8, 32))
    print(
        f"{name:<15}{t.bubble:13g}{t.bubble_over_ideal:13.1%}{t.bubble_fraction:12.1%}"
        f"{max(t.peak_live()):7g}{np.sum(t.hops):10}{t.schedule.parameter_copies:9}"
    )
h1, h2 = (timetable(make(name, 8, 32)) for name in ("zb-h1", "zb-h2"))
assert h2.bubble == 0 < h1.bubble and h1.makespan == h2.makespan

# %% [markdown]
# `interleaved-zb` is ZB-H1 over chunks: its bubble is divided by g, too. And ZB-H2, whose bubble is 0, ends no earlier than ZB-H1 as long
# as the stages wait for one another at the end of a step.
#
# Measured times make an even harder test: eight stages of a model of 1.5B parameters, times in milliseconds, and messages that take
# 0.6 to 0.8 ms. The paper's rates, (time − u(F + B + W)) / time, are reproduced to their last digit:

# %% tags=["nbval-check-output"]
# Qi et al. 2023, table 5, with the times of table 6:
# u -> (F, B, W), hop, rates of 1F1B, ZB-H1, ZB-H2
PUBLISHED = {
    24: ((18.522, 18.086, 9.337), 0.601, (0.2431, 0.1585, 0.1083)),
    32: ((18.513, 18.086, 9.331), 0.626, (0.1985, 0.1242, 0.0837)),
    64: ((18.546, 18.097, 9.321), 0.762, (0.1240, 0.0674, 0.0444)),
}
for u, (costs, hop, rates) in PUBLISHED.items():
    orders = {name: make(name, 8, u) for name in ("1f1b", "zb-h1", "zb-h2")}
    found = {name: timetable(one, costs, hop) for name, one in orders.items()}
    assert np.allclose([t.bubble_rate for t in found.values()], rates, atol=1e-4)
    rows = (f"{name} {t.bubble_rate:.4f}" for name, t in found.items())
    print(f"u = {u}: " + "  ".join(rows))

# %% [markdown]
# ### A table of your own, or of another program
#
# PyTorch's pipelines are tables too, and `llmpar schedule FILE.csv` reads what they write. A number in front is the stage, and `B` is a
# whole backward. This is how `Schedule1F1B` of torch 2.13 describes itself, for 3 stages and 5 microbatches. What is wrong?

# %% tags=["nbval-check-output"]
TORCH = """
0F0,0F1,0F2,0B0,0F3,0B1,0F4,0B2,0B3,0B4
1F0,1F1,1B0,1F2,1B1,1F3,1B2,1F4,1B3,1B4
2F1,2B0,2F2,2B1,2F3,2B2,2F4,2B3,2F5,2B4
"""
try:
    timetable(from_text(TORCH))
except ValueError as error:
    say(str(error))
mended = TORCH
for u in range(1, 6):
    mended = mended.replace(f"2F{u}", f"2F{u - 1}")
assert from_text(mended).rows == make("1f1b", 3, 5).rows

# %% [markdown]
# The last stage counts its forwards from 1. PyTorch's training does not suffer: its `step` of 1F1B does not walk this table. But a tool
# that reads it would be misled, so let an order be proved before you trust it. With F0 to F4 there it is our 1F1B, cell by cell.

# %% [markdown]
# ### What a stage keeps
#
# The executor gives an activation a slot from its F to its last reader. So the number of slots is what the table holds at once, and
# the compiled memory follows it. With `zb-h1` and `zb-v` there are also slots for what B leaves to W.

# %%
kept = slots(timetable(make("gpipe", 4, U))).num_saved
print("gpipe        slots for inputs per stage", kept)
for name, run in runs.items():
    table = timetable(run.step.plan.pipeline)
    found = slots(table)
    if run.step.plan.pipeline.num_chunks == 1:
        assert max(found.num_saved) == p == max(table.peak_live())
    print(f"{name:<12} slots for inputs per stage {found.num_saved},", end=" ")
    print(f"for W {found.num_residual}")

# %% [markdown]
# For 1F1B it does not depend on the number of microbatches. Compiled for 8 and for 32 of them:

# %%
more = Plan(f"pp={p}", schedule="1f1b", microbatches=4 * U)
longer = Step(LLAMA, more, make_mesh(more.mesh), SGD)
compiled, _ = read_program(longer.lower(8 * U, SEQ))
pair = (runs["1f1b"].compiled, compiled)
few, many = (compiled_memory(program)["temp_bytes"] for program in pair)
short, long = (program.as_text().count("\n") for program in pair)
kept = slots(timetable(longer.plan.pipeline)).num_saved
assert kept == [p - i for i in range(p)]
assert abs(many / few - 1) < 0.05 and abs(long / short - 1) < 0.05
say(
    f"4 times the microbatches: {many / few:.3f} times the temporaries,"
    f" {long / short:.3f} times the lines of compiled program"
)

# %% [markdown]
# The table is data, so the program does not grow with it.
#
# ### A wrong table is refused
#
# Before anything is compiled, the timetable is simulated. If stages wait for one another in a circle, the sentence names the stage, the
# tick and the circle. Here stage 1 runs its second microbatch first, and stage 0 needs the first one back before it sends the second:

# %% tags=["nbval-check-output"]
crossed = "F0 B0 F1 B1\nF1 B1 F0 B0"
try:
    Plan("pp=2", schedule=crossed, microbatches=2).resolve(LLAMA, "cpu", 4, SEQ)
    raise AssertionError("this table must not run")
except ValueError as refusal:
    say(refusal)
    assert "a deadlock" in str(refusal) and "Cycle: " in str(refusal)

# %% [markdown]
# ### Train what you have dragged
#
# The game above has your order. `examine` says whether one is legal, what is left of the bubble, and what each stage holds.


# %% tags=["plumbing"]
def examine(text, costs=(1, 1, 1)):
    """Say whether an order is legal, its bubble and memory; None if refused."""
    try:
        table = timetable(from_text(text), costs)
    except ValueError as refusal:
        say(f"refused: {refusal}")
        return None
    order = table.schedule
    u = order.num_microbatches
    known = timetable(make("1f1b", order.num_stages, u), costs)
    print(f"legal: {order.num_stages} stages, {u} microbatches,", end=" ")
    print(f"backward split: {order.split_backward}")
    print(f"bubble {table.bubble:g}, 1F1B's {known.bubble:g};", end=" ")
    print(f"{table.bubble_fraction:.1%} of the total idle")
    say(
        f"microbatches held per stage {table.peak_live()},"
        f" 1F1B's {known.peak_live()}; {np.sum(table.hops)} messages"
    )
    return order


# %% [markdown]
# The order of the game is compiled, and its losses and weights are compared with those of one device. Drag, and run the cell again.

# %%
TRAIN = True
YOURS = game.state["order"]
order = examine(YOURS)
if TRAIN and order and order.num_stages == p:
    plan = Plan(f"pp={p}", schedule=YOURS, microbatches=order.num_microbatches)
    yours = train_on(LLAMA, plan, TEXT, SGD, STEPS)
    verdicts({"yours": yours}, solo, weights_within=1e-5)

# %% [markdown]
# ### Exercise (stretch): a third of the bubble
#
# 3 stages, 5 microbatches, F = B = W. 1F1B has a bubble of 6 and holds 3 microbatches. Write an order with a bubble of **2** that holds
# no more. `examine(text)` shows how far you are, and `TimelineExplorer(order=text)` lets you drag; `.state["order"]` is then your text.

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
# ### Where XLA's partitioner differs
#
# It has no schedule at all (lesson 07). Pipelines written for it alone (GSPMD pipelines) are loops (scans) that autodiff runs backwards, so all
# backwards come after all forwards: GPipe, or breadth-first over looped chunks. Early backwards need the backward pass *in* the loop, as an
# operation that the table can place. That is why the executor differentiates one cell, and not the loop.
#
# ### On your cluster
#
# ```
# llmpar schedule zb-h1 --stages 8 --microbatches 32 --costs 1,1.2,0.8        bubble and memory with your costs
# llmpar train --mesh "pp=2 dp=2 tp=2" --schedule zb-h1 --microbatches 8      and training
# llmpar train --mesh "pp=2 dp=2" --schedule interleaved --virtual-stages 2 --microbatches 4 --stage-saves residuals
# ```
#
# Measure F, B and W of one stage first: a schedule that is best with equal costs need not be best with yours. If memory allows,
# `--stage-saves residuals` computes nothing twice.
