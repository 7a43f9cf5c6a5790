# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 25
#     needs: ["00", "03"]
#     objectives:
#     - Draw the timetable of a pipeline, and compute its bubble in both conventions.
#     - Write a pipeline by hand as a scan with one permute per tick.
#     - Say what microbatches cost in memory, and why a table of cells can skip the
#       bubble.
# ---

# %% [markdown]
# # 07 · Pipelines: what does a stage wait for?
#
# Tensor parallelism cuts every layer; a pipeline cuts *between* layers. Each device, or group of devices, is a **stage**: it holds
# some layers whole, takes a stream of activations from the stage before, and hands its own on. In the forward and backward pass
# nothing else crosses. That makes `pp`, the axis of pipeline parallelism, the one for the slowest links. And it gives it a problem that no
# other axis has: a stage without input has nothing to do.
#
# | what | layout or movement |
# |---|---|
# | weights of the blocks | `l/pp d m`: every stage has `l/pp` of the layers |
# | embedding, head, last norm | whole on every stage, used on the first or the last; gradient `+pp -> whole` |
# | activations | `b s d`, from stage i to i + 1; their gradients back |
#
# A **layout** such as `l/pp d m` says which dim is cut by which axis, an **arrow** (`+pp -> whole`: finish a sum over `pp`) how it changes.
# `shard_map` runs a function on every device with its own block; a **census** counts what the compiled program sends.
# All words: [docs/words.md](../docs/words.md#words).
#
# **Question.** How much of the time do stages wait, what shortens it, and what does that cost?
#
# Letters: `b` rows of the batch, `s` positions, `d` width of the model, `m` width of a feed-forward, `l` layers, `u`
# microbatches, `p` stages, `F` forward, `B` gradient of the input.
# (Most papers write m for u. Until lesson 08 splits it, B is the whole backward pass.)
#
# The core path ends at *Further*.

# %% tags=["plumbing"]
from llmpar.mesh import use_devices

devices = use_devices()

# %% tags=["plumbing"]
import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from llmpar import draw
from llmpar.config import preset
from llmpar.draw import scene
from llmpar.exercises import attempt, hint, met, say, solution
from llmpar.exercises.lesson import as_predicted, counting_text, trained, verdicts
from llmpar.inspect.census import (
    arrow_rows,
    arrow_text,
    census_hlo,
    census_table,
    compiled_memory,
    executed_flops,
    read_program,
)
from llmpar.mesh import make_mesh, sharding, spec
from llmpar.notation import parse_layout
from llmpar.plan import Plan
from llmpar.schedules import make
from llmpar.step import Step
from llmpar.timetable import branch_shares, timetable

# Accelerators round float32 products unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
p = max(size for size in (1, 2, 4) if size <= len(devices))
mesh = make_mesh(f"pp={p}")
U = 8  # microbatches

# %% [markdown]
# ## One picture
#
# Four stages, one batch. The batch goes down the stages and its gradient comes up again. B is drawn twice as long as F, since it is
# two products where F is one: the gradient of the input, and that of the weights.

# %%
naive = timetable(make("gpipe", 4, 1))
assert naive.bubble_fraction == 3 / 4  # (p-1)/p
scene.show(draw.timeline(naive))

# %% [markdown]
# Four devices, the speed of one. The cure: cut the batch into `u` microbatches and hand each on as soon as it is done (Huang et al.
# 2018, GPipe). Gradients are summed over microbatches, as in gradient accumulation, and weights change only at the end of the step. So
# nothing changes in the result.
#
# ## Predict
#
# Four stages, eight microbatches: all forwards, then all backwards. **Which share of the total time does a stage wait?**

# %%
idle_share = ...
attempt("07.idle_share", idle_share)

# %% [markdown]
# ## Two numbers are called "the bubble"
#
# The idle time is the same, (p − 1)(F + B): the last stage starts p − 1 forwards late, and the first waits p − 1 backwards for the
# last to come back. But it is divided by different things, so ask which one is meant before you compare:
#
# * over the **ideal** time u(F + B): (p − 1)/u (Narayanan et al. 2021);
# * over the **total** time: (p − 1)/(u + p − 1) (Huang et al. 2018).
#
# No formula is built into the simulator: it only knows who must wait for whom. Drag the microbatches. (In the stored page this is a
# picture.)

# %%
from llmpar.explore.small import TimelineExplorer

explorer = TimelineExplorer(only="microbatches", schedule="gpipe", stages=4)
explorer

# %%
table = explorer.table(explorer.state)
ideal, total = table.bubble_over_ideal, table.bubble_fraction
if table.schedule.name in ("gpipe", "1f1b"):
    waiting = table.schedule.num_stages - 1
    assert np.isclose(ideal, waiting / table.schedule.num_microbatches)
print(f"idle over ideal {ideal:.1%}, idle over total {total:.1%}")
met("07.idle_share", timetable(make("gpipe", 4, 8)).bubble_fraction, "simulated")

# %% tags=["nbval-check-output"]
COUNTS = (1, 2, 4, 8, 16, 32, 64)
print("idle over total   " + "".join(f"{f'u = {u}':>9}" for u in COUNTS))
for stages in (2, 4, 8):
    line = []
    for u in COUNTS:
        for costs in ((1, 1, 1), (3, 5, 2)):  # of F, and of the two halves of B
            t = timetable(make("gpipe", stages, u), costs)
            assert t.makespan == (u + stages - 1) * sum(costs)
            assert np.isclose(t.bubble_over_ideal, (stages - 1) / u)
            assert np.isclose(t.bubble_fraction, (stages - 1) / (u + stages - 1))
        line.append(t.bubble_fraction)
    print(f"{stages} stages          " + "".join(f"{share:9.1%}" for share in line))

# %% [markdown]
# ### Exercise (core): how many microbatches?
#
# We want eight stages to be idle at most 10 % of the total time. What is the smallest number of microbatches?

# %%
smallest_m = ...
attempt("07.microbatches", smallest_m)

# %% [markdown]
# ## Run: a pipeline by hand
#
# The shortest pipeline in JAX: a scan over ticks. In each tick every stage takes what its neighbour has sent, runs its layers, and
# passes the result on by one `ppermute`. Autodiff turns the scan round, and the permutes with it. What you read is one device's work.

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


def by_hand(w, xs):  # l/pp d m, u b d
    stage = lax.axis_index("pp")

    def tick(y, t):
        received = lax.ppermute(y, "pp", PAIRS)
        x = jnp.where(stage == 0, xs[jnp.minimum(t, U - 1)], received)
        y = layers(w, x)
        return y, y

    nothing = lax.pcast(jnp.zeros((ROWS, D)), "pp", to="varying")
    _, left = lax.scan(tick, nothing, jnp.arange(U + p - 1))
    # The first microbatch leaves the last stage in tick p - 1.
    loss = jnp.mean(left[p - 1 :] ** 2)
    return lax.psum(jnp.where(stage == p - 1, loss, 0), "pp")


# %% [markdown]
# `lax.pcast(…, to="varying")` tells JAX that the zeros of the first tick will differ from stage to stage. Layers lie on the stages as
# drawn, and every stage is given all microbatches (only the first one reads them):

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
# ## Compare: four verdicts
#
# And a fifth number, the FLOPs of the matrix products, counted in the compiled program with its loops multiplied.

# %% tags=["plumbing"]
assert np.allclose(loss, want_loss, rtol=1e-5)
assert np.abs(grads - want).max() < 1e-5 * np.abs(want).max()
print("value: loss and gradients equal those of one device")
share = LAYERS // p
assert {shard.data.shape for shard in grads.addressable_shards} == {(share, D, D)}
print(
    f"sharding: {share} of {LAYERS} layers, and their gradients, on each of {p} stages"
)
sent = census_table(c for c in census_hlo(hand.as_text(), mesh) if c.shape != ())
ticks = U + p - 1
if p > 1:
    permutes = {"count": 2 * ticks, "bytes_sent": 2 * ticks * ROWS * D * 4}
    assert sent == {("pp", "collective-permute"): permutes}
print(f"communication: {2 * ticks * (p > 1)} permutes of {ROWS * D * 4} B,", end=" ")
print("one per tick forward and one per tick back")
held = compiled_memory(hand)["argument_bytes"]
assert held == 4 * (share * D * D + U * ROWS * D)
print(f"memory: arguments are 1/{p} of the weights, and the microbatches")

# %%
product = 2 * ROWS * D * D
# Elsewhere products are library calls, which cannot be counted.
if devices[0].platform == "cpu" and p > 1:
    executed, useful = executed_flops(hand.as_text()), 3 * U * share * product
    assert executed == 3 * ticks * share * product
    assert Fraction(executed, useful) == 1 + Fraction(p - 1, U)
    print(f"work: {executed / useful:.3f} of what is useful = 1 + (p-1)/u")

# %% [markdown]
# So this pipeline never waits! In the ticks of the bubble it computes on zeros and on microbatches that it has already had, and
# throws the result away. Time is lost just the same, and so is energy. GSPMD pipelines (Xu et al. 2021) work like this, by scan and
# autodiff: every schedule that they can express is "all forwards, then all backwards". (Alpa and JaxPP, which bring a runtime of their
# own, run 1F1B.)
#
# ## A schedule is a table
#
# This package goes another way. *What each stage does in which order* is data, one line per stage. It is proved legal before anything
# is compiled, and measured, and drawn; and one executor (`llmpar/pipeline.py`) walks whichever table it is given. In each tick a stage
# runs the cell that the table has for it, **or nothing**.

# %%
gpipe = make("gpipe", 4, 4)
print(gpipe)
print("stage 0 in each tick, as kind, microbatch, chunk (-1 is idle):")
ticks = [row[0] for row in timetable(gpipe).ticks]
say("  ".join("-1" if tick[0] < 0 else ",".join(map(str, tick)) for tick in ticks))

# %% [markdown]
# Now a Llama: 4 layers on p stages, 8 microbatches of 2 rows, trained by `llmpar.step.Step`. The schedule is one field of the plan,
# and the model's text does not know about it. `stage_saves` says what a stage keeps of a forward pass until the backward: `input`, the
# activation that came in, from which B computes the forward pass again; or `residuals`, all that B will need.

# %%
LLAMA, SEQ, STEPS = dataclasses.replace(preset("tiny"), num_layers=4), 16, 3
ROWS_EACH = 2  # of a microbatch
TEXT, SGD = counting_text(ROWS_EACH * U, SEQ), optax.sgd(0.5)

print("Three programs are compiled and run: about 20 s.")
solo = trained(LLAMA, Plan("dp=1", microbatches=U), TEXT, SGD, STEPS)
runs = {}
for saves in ("input", "residuals"):
    plan = Plan(f"pp={p}", schedule="gpipe", stage_saves=saves, microbatches=U)
    runs[saves] = trained(LLAMA, plan, TEXT, SGD, STEPS)
print("losses on one device:", " ".join(f"{x:.3f}" for x in solo.losses))
sent = verdicts(runs, solo, weights_within=1e-4)

# %% [markdown]
# A permute takes part in the program of every stage, so it costs a tick in which *anybody* sends: u + p − 2 each way, where the
# pipeline by hand has u + p − 1. The all-reduces finish the gradients of embedding, head and last norm, which every stage holds, and
# make one loss and one norm of the parts. By arrow: activations go to the next stage, their gradients to the previous one.

# %%
stream = ROWS_EACH * SEQ * LLAMA.width * 4
if p > 1:
    hops = 2 * (U + p - 2)
    permutes = {"count": hops, "bytes_sent": hops * stream}
    assert sent["input"]["pp", "collective-permute"] == permutes
census = as_predicted(runs["input"])
print(arrow_text(census))
assert sum(row["bytes_sent"] for row in arrow_rows(census)) == sum(
    row["bytes_sent"] for row in sent["input"].values()
)

# %% [markdown]
# ## Five lines
#
# 1. A pipeline cuts between layers: one activation crosses per microbatch and stage, and its gradient comes back.
# 2. Idle time is (p − 1)(F + B): (p − 1)/u of the ideal, (p − 1)/(u + p − 1) of the total. Say which you mean.
# 3. Microbatches are gradient accumulation. The result is that of one device.
# 4. A masked pipeline computes on garbage in the bubble; one that walks a table skips it.
# 5. All forwards before all backwards holds something of every microbatch.
#
# **One number to remember: u ≥ 9(p − 1)** microbatches for at most 10 % of idle time, in this order.

# %%
waits, enough = (p - 1) / (U + p - 1), 9 * (p - 1)
print(f"{p} stages, {U} microbatches: {waits:.1%} idle; 10 % from u = {enough} on")

# %% [markdown]
# ## Further
#
# What the executor skips, what a stage holds, what lies on every stage, and three more exercises.
#
# ## Bubbles are skipped
#
# The compiled program has a branch per kind of work, and the table says how often a stage takes it. With both, the executed products
# can be counted stage by stage:


# %% tags=["nbval-check-output"]
def executed_by_stage(run):
    text, step = run.compiled.as_text(), run.step
    return [
        executed_flops(text, branches)
        for branches in branch_shares(step.plan.pipeline, LLAMA.num_layers)
    ]


if devices[0].platform == "cpu":
    one_device = executed_flops(solo.compiled.as_text())
    for saves, run in runs.items():
        stages = executed_by_stage(run)
        each = "".join(f"{flops / 1e6:8.1f}" for flops in stages)
        together = sum(stages) / one_device
        print(f"{saves:<10}{each} MFLOP; together {together:.3f} of one device's")
    assert sum(executed_by_stage(runs["residuals"])) == one_device
    assert one_device <= sum(executed_by_stage(runs["input"])) < 4 / 3 * one_device

# %% [markdown]
# With residuals saved, all stages together run exactly the products of one device, not one more. With the input saved, B runs F
# again: 4 instead of 3. The last stage is better off, because its B follows its F at once: there F computes nothing and B
# does it all. (Its number is larger all the same, for it also has the head.)
#
# ## What waits must be held
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
if p > 1:
    each = (many - few) / (3 * U)
    assert abs(each / stream - 1) < 0.05 and saved > 2 * few
    print(f"memory grows by {each:,.0f} B per microbatch:", end=" ")
    print(f"its input, {stream:,} B, and some bookkeeping")

# %% [markdown]
# Microbatches shrink the bubble and fill the memory. That tension is what the schedules of lesson 08 resolve.
#
# ## What lies on every stage
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
# Layers rarely divide evenly, and the head's product with the vocabulary may cost as much as two or three layers. Here is a simulation
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
# ## Where XLA's partitioner differs
#
# It places values and inserts what must be sent between them. It has no notion of *when*, so there is no layout that says "stage 1
# works on microbatch 3 while stage 0 works on 4". Under `jit` a pipeline must be written as a program that shifts a buffer, which is
# the masked one from above. The package refuses instead of pretending:

# %%
try:
    Plan("pp=4", reading="auto", microbatches=8).check(LLAMA, 16, SEQ)
except ValueError as refusal:
    say(refusal)
    assert "use reading='manual'" in str(refusal)

# %% [markdown]
# ## On your cluster
#
# ```
# llmpar schedule gpipe --stages 4 --microbatches 8                            the timetable, both bubbles, what is held
# llmpar inspect --mesh "pp=2 dp=2 tp=2" --schedule gpipe --microbatches 8     bytes per axis and memory, before you train
# llmpar train --mesh "pp=2 dp=2 tp=2" --schedule gpipe --microbatches 8       and training
# ```
#
# Put `pp` on the slowest links: between nodes, or between pods. It multiplies with dp, fsdp and tp inside each stage.
