# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 25
#     needs: ["00", "03"]
#     question: How much of the time do stages wait, what shortens the wait, and what
#       does that cost?
#     objectives:
#     - Draw the timetable of a pipeline, and compute its bubble in both conventions.
#     - Read a pipeline that is written as a scan with one permute per tick, and write a
#       row of its table.
#     - Say what microbatches cost in memory, and why a pipeline that runs a table
#       computes nothing in the bubble.
# ---

# %% [markdown]
# # 07 · Pipelines: what does a stage wait for?
#
# A model has too many layers for one device, so it is cut between its layers. Four devices are four **stages**: each holds a
# quarter of the layers and sends its result to the next one. Together they hold four times as much. Are they four times as
# fast?

# %% tags=["plumbing"]
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # simulated devices; real ones: On your cluster

from llmpar.parallel.mesh import use_devices

devices = use_devices()

import dataclasses
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from llmpar import draw
from llmpar.draw import scene
from llmpar.explore.small import TimelineExplorer
from llmpar.inspect.census import (
    arrow_rows,
    arrow_text,
    census_hlo,
    census_table,
    compiled_memory,
    executed_flops,
    read_program,
)
from llmpar.lessons import attempt, hint, met, opened, say, solution
from llmpar.lessons.lesson import as_predicted, counting_text, train_on, verdicts
from llmpar.parallel.mesh import make_mesh, sharding, spec
from llmpar.plan.layout import parse_layout
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.plan.schedules import make
from llmpar.plan.timetable import branch_shares, timetable
from llmpar.planner import measured
from llmpar.training.step import Step

# Accelerators round float32 matmuls unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
p = 4  # stages
mesh = make_mesh(f"pp={p}")
U = 8  # microbatches

# %%
naive = timetable(make("gpipe", 4, 1))
assert naive.bubble_fraction == 3 / 4
scene.show(draw.timeline(naive, facts=False))

# %% [markdown]
# Four devices have the speed of one. `F` is a stage's forward pass. Its backward pass has two halves, each with one matmul for each weight: `B`
# computes the gradient of the input, `W` the gradient of the weights. Here `W` always runs right after its `B`, so both are
# drawn as one long cell, `B`. (0 is the batch's number.)
#
# Yellow is what the stage must hold from `F` to `B`. The batch goes down the stages, its gradient comes back up. Three of four
# devices always wait.
#
# ## Cut the batch: microbatches
#
# Huang et al. (2018, GPipe) cut the batch into **microbatches**. A stage sends each one on as soon as it is done, and begins the next.
# Gradients are summed over the microbatches, so the result is that of the whole batch.
#
# Take four stages and eight microbatches: first all forwards, then all backwards. **For which share of the total time does a
# stage wait?**

# %%
idle_share = ...
attempt("07.idle_share", idle_share)

# %% [markdown]
# This figure uses no formula. It only knows which operation must wait for which. Drag the microbatches down to two.

# %%
start = {"schedule": "gpipe", "stages": 4, "microbatches": 8}
explorer = TimelineExplorer(only="microbatches", **start)
explorer if opened("07.idle_share") else None

# %% tags=["plumbing"]
table = explorer.table(explorer.state)
if (order := table.schedule).name in ("gpipe", "1f1b"):
    expected = (order.num_stages - 1) / order.num_microbatches
    assert np.isclose(table.bubble_over_ideal, expected)

# %%
met("07.idle_share", timetable(make("gpipe", 4, 8)).bubble_fraction, "simulated")

# %% [markdown]
# ## The bubble
#
# Take `p` stages and `u` microbatches. Look at the first stage. When it has finished its forwards, its last microbatch must still pass
# the other p − 1 stages, and then the first gradient must come back through them. This idle time, (p − 1)(F + B + W), is the
# **bubble** (here 3 · 3 = 9 units). It does not depend on `u`: more microbatches of the same size make the rest longer.
#
# Two numbers are called "the bubble", so ask which one is meant:
#
# * idle over **total** time, (p − 1)/(u + p − 1) (Huang et al. 2018), with eight microbatches 3/11 = 27 %;
# * idle over **ideal** time, which is the time without a bubble: (p − 1)/u (Narayanan et al. 2021), with eight 3/8 = 38 %.
#
# **How many microbatches do eight stages need, to be idle for at most 10 % of the total time?**

# %%
smallest_u = ...
attempt("07.microbatches", smallest_u)

# %% tags=["plumbing"]
COUNTS = (1, 2, 4, 8, 16, 32, 64)
LOOKS = {2: ("soft", "^"), 4: ("other3", "o"), 8: ("other4", "s")}
lines = []
for stages, look in LOOKS.items():
    idle = []
    for u in COUNTS:
        for costs in ((1, 1, 1), (3, 5, 2)):  # of F, and of the two halves of B
            t = timetable(make("gpipe", stages, u), costs)
            assert t.makespan == (u + stages - 1) * sum(costs)
            assert np.isclose(t.bubble_over_ideal, (stages - 1) / u)
            assert np.isclose(t.bubble_fraction, (stages - 1) / (u + stages - 1))
        idle.append(t.bubble_fraction)
    lines.append((f"{stages} stages", idle, *look, False))

few = lambda u: timetable(make("gpipe", 8, u)).bubble_fraction <= 0.1 + 1e-12
enough = next(u for u in range(1, 99) if few(u))
assert enough == 9 * (8 - 1)

# %% tags=["plumbing"]
met("07.microbatches", enough, "simulated")
levels = (0, 0.1, 0.25, 0.5, 0.75, 1)
axes = COUNTS, "microbatches u", "idle share of the total time"
look = dict(percent=True, levels=levels, title="GPipe waits")
if opened("07.microbatches"):
    scene.show(draw.curves(lines, *axes, **look))

# %% [markdown]
# ## A pipeline by hand: a scan, and one permute per tick
#
# In each **tick** a stage takes what its neighbour has sent, runs its layers, and passes the result on by one `ppermute`. A scan (JAX's
# loop) repeats that. Differentiating the scan gives a scan in reverse; each permute then sends the other way. This is the code of one
# device:

# %% tags=["plumbing"]
D, LAYERS, ROWS = 32, 8, 4
rng = np.random.default_rng(0)
weights = (rng.standard_normal((LAYERS, D, D)) / D**0.5).astype(np.float32)
# u b d: cut into microbatches
inputs = rng.standard_normal((U, ROWS, D)).astype(np.float32)


def layers(w, x):
    for one in w:
        x = jnp.tanh(x @ one)
    return x


def whole(w, xs):  # one device; the reference
    return jnp.mean(layers(w, xs) ** 2)


want_loss, want = jax.jit(jax.value_and_grad(whole))(weights, inputs)

# %%
PAIRS = [(i, i + 1) for i in range(p - 1)]  # each stage sends to the next one


def by_hand(w, xs):  # a stage's layers; all microbatches
    stage = lax.axis_index("pp")

    def tick(y, t):
        received = lax.ppermute(y, "pp", PAIRS)
        x = jnp.where(stage == 0, xs[jnp.minimum(t, U - 1)], received)
        y = layers(w, x)
        return y, y

    # pcast (lesson 03): the scan begins with zeros, but stages go on with their own
    nothing = lax.pcast(jnp.zeros((ROWS, D)), "pp", to="varying")
    _, left = lax.scan(tick, nothing, jnp.arange(U + p - 1))
    # The first microbatch leaves the last stage in tick p - 1.
    loss = jnp.mean(left[p - 1 :] ** 2)
    return lax.psum(jnp.where(stage == p - 1, loss, 0), "pp")


# %% [markdown]
# The weights of all layers are one array. Its letters: `l` layers, `d` width of a layer's input, `m` width of its output. The
# layout `l/pp d m` distributes the layers over `pp`, the mesh axis of the stages; no layer is cut:

# %%
CUT, WHOLE = parse_layout("l/pp d m"), parse_layout("u b d")
spread = jax.shard_map(
    jax.value_and_grad(by_hand),
    mesh=mesh,
    in_specs=(spec(CUT), spec(WHOLE)),
    out_specs=(spec(parse_layout("")), spec(CUT)),
)
placed = (
    jax.device_put(weights, sharding(mesh, CUT)),
    jax.device_put(inputs, sharding(mesh, WHOLE)),
)
hand = jax.jit(spread).lower(*placed).compile()
loss, grads = hand(*placed)
scene.show(draw.layout(CUT, weights.shape, mesh.shape, itemsize=4))

# %% [markdown]
# ## Predict: what does a stage compute in the bubble?
#
# In the first ticks the last stage has no input yet. Four stages, eight microbatches, a scan of 11 ticks. **How many times the useful
# matmuls does the compiled program run?**

# %%
matmuls = ...  # a number, or a fraction
attempt("07.masked", matmuls)

# %% tags=["plumbing"]
assert np.allclose(loss, want_loss, rtol=1e-5)
assert np.abs(grads - want).max() < 1e-5 * np.abs(want).max()
share, ticks, one_matmul = LAYERS // p, U + p - 1, 2 * ROWS * D * D
assert {shard.data.shape for shard in grads.addressable_shards} == {(share, D, D)}

# %%
print("loss and gradients equal those of one device")
# Elsewhere matmuls are library calls, which cannot be counted.
executed, useful = executed_flops(hand.as_text()), 3 * U * share * one_matmul
assert Fraction(executed, useful) == 1 + Fraction(p - 1, U)
met("07.masked", executed / useful)

# %% [markdown]
# This scan has no branch, so it runs its body in every tick: 1 + (p − 1)/u. In the bubble a stage computes on zeros, or on a microbatch that it has already
# had, and throws the result away. Pipelines that are left to XLA's partitioner work like this (GSPMD, Xu et al. 2021).
#
# ## With a table a stage computes nothing in the bubble
#
# In llmpar, the library of these lessons, a table says what each stage does in each tick: an `F`, a `B`, or nothing (`·`). It is data,
# and is called a **schedule**.
#
# ### Exercise (core): write a row
#
# GPipe, two stages, three microbatches. Stage 0 has the row `F0 F1 F2 · · B0 B1 B2`, a cell for each tick: its last microbatch goes down,
# and the first gradient comes up. Write the row of stage 1. (The next cell then shows four stages and four microbatches.)

# %%
row_of_stage_1 = ...  # "· …"
attempt("07.row", row_of_stage_1)

# %% tags=["plumbing"]
met("07.row", "· F0 F1 F2 B0 B1 B2 ·", "simulated")
ticks_of_all = timetable(make("gpipe", 4, 4)).ticks
for stage in range(4 if opened("07.row") else 0):
    cells = [tick[stage] for tick in ticks_of_all]
    words = ["·" if kind < 0 else f"{'FBW'[kind]}{u}" for kind, u, _ in cells]
    print(f"stage {stage}: " + " ".join(f"{word:<2}" for word in words))

# %% [markdown]
# llmpar proves that such a table is legal before anything is compiled. One executor runs any table. Train a Llama of 4 layers with it:
# the schedule is one field of the plan, and the model's code does not change.

# %%
LLAMA, SEQ, STEPS = dataclasses.replace(preset("tiny"), num_layers=4), 16, 3
ROWS_EACH = 2  # of a microbatch
TEXT, SGD = counting_text(ROWS_EACH * U, SEQ), optax.sgd(0.5)
plan = Plan(f"pp={p}", schedule="gpipe", stage_saves="residuals", microbatches=U)

print("Two programs are compiled and run: about 15 s.")
solo = train_on(LLAMA, Plan("dp=1", microbatches=U), TEXT, SGD, STEPS)
runs = {"residuals": train_on(LLAMA, plan, TEXT, SGD, STEPS)}
print("losses on one device:", " ".join(f"{x:.3f}" for x in solo.losses))
sent = verdicts(runs, solo, weights_within=1e-4)


# %% tags=["plumbing"]
def executed_by_stage(run):
    text, step = run.compiled.as_text(), run.step
    return [
        executed_flops(text, branches)
        for branches in branch_shares(step.plan.pipeline, LLAMA.layer_kinds)
    ]


one_device = executed_flops(solo.compiled.as_text())
together = sum(executed_by_stage(runs["residuals"]))
assert together == one_device
print(f"matmuls: {together / one_device:.3f} of those of one device")

# %% [markdown]
# It runs exactly as many matmuls as one device. In the bubble a stage still waits, but it computes nothing.

# %% [markdown]
# ## Keep: more microbatches, a smaller bubble, more memory
#
# 1. A pipeline cuts between layers. For each microbatch one activation goes from stage to stage, and its gradient comes back. `pp` is
#    an axis for slow links, because it sends no weights, and no sums in each layer.
# 2. The bubble is (p − 1)(F + B + W), whatever `u` is (stages and microbatches of one size): (p − 1)/(u + p − 1) of the total time, (p −
#    1)/u of the ideal one.
# 3. **u ≥ 9(p − 1)** microbatches make it 10 % of the total time at most.
# 4. A pipeline written as a scan without branches computes garbage in the bubble; one that runs a table only waits there.
# 5. All forwards before all backwards: a stage must hold activations of every microbatch. Other orders hold fewer (lesson 08).

# %% [markdown]
# ## Further
#
# What is sent, what the executor skips, what a stage holds, what every stage has, and two more exercises.

# %% [markdown]
# ### Measured: with a small batch stages wait more
#
# Before its training the BLOOM project timed a model of 78 layers on 384 A100s in 12 stages, with 32 to 128 microbatches in a step. The
# picture shows how much more time a sequence of the batch took with fewer microbatches:

# %% tags=["plumbing"]
# BigScience, a trial of 2022-02-26 (chronicles-prequel.md): microbatches and seconds.
MEASURED = {32: 35.77, 64: 59.65, 96: 83.11, 128: 107.12}
if (file := Path("../tests/measured.json")).is_file():
    cases = [
        case for case in measured.read_runs(file)[0] if case.group == "bloom.rampup"
    ]
    assert MEASURED == {
        case.run.microbatches: case.measured["step_s"] for case in cases
    }
    trial = cases[0].run  # as the text says
    assert (trial.config.num_layers, trial.mesh.size, trial.mesh.pp) == (78, 384, 12)
seen = [seconds / u / (MEASURED[128] / 128) - 1 for u, seconds in MEASURED.items()]
bubble = [(1 + 11 / u) / (1 + 11 / 128) - 1 for u in MEASURED]
assert 0.335 < seen[0] < 0.345 and 0.235 < bubble[0] < 0.245
assert all(a >= b for a, b in zip(seen, bubble, strict=True))

# %% tags=["plumbing"]
lines = [
    ("measured", seen, "measured", "o", False),
    ("the bubble alone", bubble, "ink", "^", True),
]
axes = list(MEASURED), "microbatches of a step", "extra time per sequence, against 128"
title = "A trial before BLOOM's training, measured"
scene.show(draw.curves(lines, *axes, percent=True, high=0.4, title=title))

# %% [markdown]
# With 32 microbatches a sequence took 34 % more time. The bubble of equal stages explains 24 %. The rest fits time that a step takes once,
# however many sequences it has, such as the sum of gradients over replicas and the optimizer's update.

# %% [markdown]
# ### What is sent
#
# The pipeline by hand sends one message per tick and way, bubble or not. (A **census** counts what a compiled program sends.)

# %%
found = census_table(c for c in census_hlo(hand.as_text(), mesh) if c.shape != ())
permutes = {"count": 2 * ticks, "bytes_sent": 2 * ticks * ROWS * D * 4}
assert found == {("pp", "collective-permute"): permutes}
print(f"by hand: {2 * ticks} permutes of {ROWS * D * 4} B,", end=" ")
print("one per tick forward and one per tick back")
held = compiled_memory(hand)["argument_bytes"]
assert held == 4 * (share * D * D + U * ROWS * D)
print(f"its arguments are 1/{p} of the weights, and the microbatches")

# %% [markdown]
# The Llama sends more. Every stage has embedding, head and last norm, which are used on the first or the last stage only, so their
# gradients are unfinished sums over `pp`. In arrows:
#
# | what | layout or movement |
# |---|---|
# | weights of the blocks | `l/pp d m`: every stage has `l/pp` of the layers |
# | embedding, head, last norm | whole on every stage; gradient `+pp -> whole` |
# | activations, `b` rows of `s` positions | `b s d`, from stage i to i + 1; their gradients back |
#
# `stage_saves` says what a stage keeps of a forward pass until the backward: `residuals`, all that B will need (as above), or
# `input`, the activation that came in, from which B computes the forward pass again.

# %%
print("One program more is compiled and run: about 8 s.")
plan = Plan(f"pp={p}", schedule="gpipe", stage_saves="input", microbatches=U)
runs["input"] = train_on(LLAMA, plan, TEXT, SGD, STEPS)
sent = verdicts(runs, solo, weights_within=1e-4, details=True)

# %% [markdown]
# All stages run the same permute. So there is one in each tick in which at least one stage sends: u + p − 2 each way, where the
# pipeline by hand has u + p − 1. The all-reduces finish the gradients of what every stage holds, and make one loss and one norm of the
# parts.

# %%
stream = ROWS_EACH * SEQ * LLAMA.width * 4
hops = 2 * (U + p - 2)
permutes = {"count": hops, "bytes_sent": hops * stream}
assert sent["input"]["pp", "collective-permute"] == permutes
census = as_predicted(runs["input"])
print(arrow_text(census))
assert sum(row["bytes_sent"] for row in arrow_rows(census)) == sum(
    row["bytes_sent"] for row in sent["input"].values()
)

# %% [markdown]
# ### Bubbles are skipped, stage by stage
#
# The compiled program has a branch per kind of work, and the table says how often a stage takes it. With both, the executed matmuls
# can be counted for each stage:

# %% tags=["nbval-check-output"]
for saves, run in runs.items():
    stages = executed_by_stage(run)
    each = "".join(f"{flops / 1e6:8.1f}" for flops in stages)
    together = sum(stages) / one_device
    print(f"{saves:<10}{each} MFLOP; together {together:.3f} of one device's")
assert one_device <= sum(executed_by_stage(runs["input"])) < 4 / 3 * one_device

# %% [markdown]
# With residuals saved, all stages together run exactly the matmuls of one device, not one more. With the input saved, B runs F again: 4
# instead of 3. The last stage is better off, because no other stage needs the output of its F: there F only keeps its input, and B computes
# the forward pass, once. (Its number is larger all the same, for it also has the head.)
#
# ### What waits must be held
#
# In this order every microbatch goes forward before any comes back. So a stage holds something of all of them: an input each, or all
# residuals. Compiled memory, from 8 to 32 microbatches of the same size:

# %%
more = Plan(f"pp={p}", schedule="gpipe", microbatches=4 * U)
larger = Step(LLAMA, more, make_mesh(more.mesh), SGD).lower(4 * U * ROWS_EACH, SEQ)
bars = {
    f"u = {U}, input": runs["input"].compiled,
    f"u = {4 * U}, input": read_program(larger)[0],
    f"u = {U}, residuals": runs["residuals"].compiled,
}
temp = {name: compiled_memory(one)["temp_bytes"] for name, one in bars.items()}
rows = [(name, {"temporaries": size}) for name, size in temp.items()]
scene.show(draw.memory_bars(rows, title="Compiled memory of GPipe, per device"))
few, many, saved = temp.values()
each = (many - few) / (3 * U)
assert abs(each / stream - 1) < 0.05 and saved > 2 * few
print(f"memory grows by {each:,.0f} B per microbatch:", end=" ")
print(f"its input, {stream:,} B, and some bookkeeping")

# %% [markdown]
# More microbatches make the bubble smaller, and need more memory. The schedules of lesson 08 do something about it.
#
# ### What every stage has
#
# That every stage holds embedding and head is a choice of *this package* (each stage runs the same program): others put them on the end
# stages. It is not free:

# %%
print("parameters on each of 4 stages:")
for name in ("llama3.2-1b", "llama3-8b", "llama3-70b"):
    described, stored = preset(name).weights().values(), Plan("pp=4").resolve().stored
    common = [w.shape for w in described if "pp" not in stored(w.dims).axes]
    everywhere = sum(int(np.prod(shape)) for shape in common)
    cut = (preset(name).num_params - everywhere) // 4
    print(f"{name:<12} {everywhere / 1e9:.2f}e9 of embedding, head and norm,", end=" ")
    print(f"{cut / 1e9:5.2f}e9 of blocks")
    assert name != "llama3-8b" or round(everywhere / 1e9, 2) == 1.05

# %% [markdown]
# ### Exercise (stretch): uneven stages
#
# Layers rarely divide evenly, and the head's matmul with the vocabulary may cost as much as two or three layers. Here is a simulation
# of the forward pass: stage i takes `costs[i]` for each microbatch. Find the closed form, `forward_time(costs, u)`, and compare the
# two splits below. The total work is the same in both.


# %%
def simulate(costs, u):
    """(start, end, kind, microbatch, chunk) of each cell, by stage."""
    rows, above = [], [0] * u
    for cost in costs:
        now, row = 0, []
        for one in range(u):
            begin = max(
                now, above[one]
            )  # it waits for the stage before, and for itself
            now = begin + cost
            row.append((begin, now, "F", one, 0))
        rows.append(row)
        above = [end for _, end, *_ in row]
    return rows


# 8 layers, and a head that costs as much as 2 of them
for costs in ([2, 2, 2, 2 + 2], [3, 3, 2, 0 + 2]):
    scene.show(draw.timeline(simulate(costs, 6)))


# %%
def forward_time(costs, u): ...


attempt("07.uneven", forward_time)

# %% [markdown]
# (Where layers do not divide evenly this package gives the first stages one more, so the last one, which has the head, has one
# less. Llama 3 405B has 126 layers instead of 128 for this very reason: one less on the first stage, and one less on the last. Llama
# team 2024, section 3.3.2.)
#
# ### Exercise (expert): one embedding on two stages
#
# Llama 3.2 1B ties its head to its embedding: 128,256 × 2,048 numbers, used on the first stage and on the last. The gradients of the
# two uses must be added, in float32, once per step. Over 4 stages, how many bytes does a device of the *first* stage send for that
#
# * if all stages take part, as they do here (a ring all-reduce over pp);
# * if only the first and the last stage form a group, as in Megatron-LM?
#
# And how many bytes does a stage in the middle send in the second case?

# %%
answer = {"all stages": ..., "first and last": ..., "a middle stage": ...}
attempt("07.tied", answer)

# %% [markdown]
# ### Where XLA's partitioner differs
#
# It places values and inserts what must be sent between them. It has no notion of *when*, so there is no layout that says "stage 1
# works on microbatch 3 while stage 0 works on 4". Under `jit` a pipeline must be written as a program that shifts a buffer, which is
# the masked one from above. The package refuses instead of pretending:

# %%
try:
    Plan("pp=4", mode="auto", microbatches=8).resolve(LLAMA, batch_size=16, seq_len=SEQ)
except ValueError as refusal:
    say(refusal)
    assert "use mode='manual'" in str(refusal)

# %% [markdown]
# ### On your cluster
#
# ```
# llmpar schedule gpipe --stages 4 --microbatches 8                            the timetable, both bubbles, what is held
# llmpar inspect --mesh "pp=2 dp=2 tp=2" --schedule gpipe --microbatches 8     bytes per axis and memory, before you train
# llmpar train --mesh "pp=2 dp=2 tp=2" --schedule gpipe --microbatches 8       and training
# ```
#
# Put `pp` on the slowest links: between nodes, or between pods. It multiplies with dp, fsdp and tp inside each stage.
