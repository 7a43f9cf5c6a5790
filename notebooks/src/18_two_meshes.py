# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 15
#     needs: ["04", "05", "10"]
#     question: What does a trainer send to its sampler, what does Muon send, and what do
#       islands send that train apart?
#     objectives:
#     - Compute the fewest bytes, and the fewest rounds, that bring weights from one mesh
#       to another, and plan a round.
#     - Say what each of three ways sends that give Muon whole matrices, and what share of
#       FSDP's bytes that is.
#     - Compute what islands send if they average their weights every H steps, and say
#       when that is data parallelism.
# ---

# %% [markdown]
# # 18 · Who lacks what, and how often? Two meshes, Muon, islands
#
# A trainer's weight is cut over four devices. A *sampler*, which writes the answers that the trainer learns from, wants it on two others,
# cut otherwise. How few bytes must travel? Then the same question for Muon, an optimizer, and for *islands*, groups of devices on slow
# links.

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
from jax import lax
from jax.sharding import PartitionSpec as P

from llmpar import draw, two_meshes
from llmpar.draw.scene import Line, Rect, Text, compose, show, small_text
from llmpar.inspect.census import census_hlo, partitioned_hlo
from llmpar.lessons import attempt, hint, met, opened, say, solution
from llmpar.parallel.mesh import make_mesh
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.predict.muon import muon_and_fsdp_bytes, newton_schulz_flops
from llmpar.predict.traffic import outer_traffic
from llmpar.serve.two_meshes import Mover

TRAINER = "other1", "other3", "other4", "dp"


def two_cuts():
    """The same weight on both meshes. A cell has the colour of the trainer's device."""
    items, side = [], 17
    titles = "trainer, fsdp=4: d/fsdp m", "sampler, tp=2: d m/tp"
    for left, title in zip((0, 290), titles, strict=True):
        items.append(Text(left + 4 * side, -14, title, anchor="middle", bold=True))
        for d, m in np.ndindex(8, 8):
            x = left + side * m + 14 * (m > 3) * (left > 0)
            y = side * d + 8 * (d // 2) * (left == 0)
            items.append(Rect(x, y, side, side, TRAINER[d // 2], "edge", 0.5))
    items += [small_text(-8, 17 + 42 * i, f"device {i}", "end") for i in range(4)]
    items += [
        small_text(290 + 34 + 82 * i, 8 * side + 16, f"device {4 + i}")
        for i in range(2)
    ]
    items.append(Line(((170, 80), (240, 80)), "ink", 2, head=True))
    words = "A weight of 8 × 8 numbers. The trainer's devices have two rows each, the"
    words += " sampler's two devices want four columns each."
    return compose("A weight on two meshes", [items], words, [words])


def sent_by(f, x, before, after, mesh):
    """What a device sends in the compiled program of a function: kind and bytes."""
    program = jax.shard_map(
        f, mesh=mesh, in_specs=before, out_specs=after, check_vma=False
    )
    found = census_hlo(partitioned_hlo(jax.jit(program).lower(x)), mesh)
    return [(one.kind, one.bytes_sent) for one in found]


# %% tags=["plumbing"]
show(two_cuts())

# %% [markdown]
# ## Part 1: from a trainer's mesh to a sampler's
#
# After an update the sampler needs the new weights, cut in another way. A collective works on one mesh; here are two. We write an arrow whose
# layouts name their meshes: `d/fsdp m @train -> d m/tp @serve` (`d` rows, `m` columns).
#
# ## Predict: how many bytes must travel?
#
# A number has 2 bytes. A device of the sampler must receive what it lacks, once. The sum over receivers is a *lower bound*. **How many
# bytes is that, if the sampler is on other devices (`apart`, as drawn)? And if it is on devices 0 and 1 of the trainer (`shared`)?**

# %%
lacking = {"apart": ..., "shared": ...}
attempt("18.bytes", lacking)

# %%
ARROW = "d/fsdp m @train -> d m/tp @serve"
serve = {"apart": range(4, 6), "shared": range(2)}
plans = {}
for name, numbers in serve.items():
    meshes = {"train": make_mesh("fsdp=4", devices[:4])}
    meshes["serve"] = make_mesh("tp=2", [devices[i] for i in numbers])
    plans[name] = two_meshes(ARROW, meshes, (8, 8), itemsize=2)
move = Mover(plans["apart"])
weight = jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8)
(served,) = move([jax.device_put(weight, move.given[0])])

# %% tags=["plumbing"]
assert (np.asarray(served) == np.asarray(weight)).all()
assert move.sent_bytes == plans["apart"].bound == 128
needed = {name: plan.bound for name, plan in plans.items()}
assert needed == {name: sum(plan.matrix.values()) for name, plan in plans.items()}
assert needed == {"apart": 128, "shared": 96}
assert 4 * 128 * 3 / 4 == 384  # an all-gather on four devices, 3/4 of the weight each
met("18.bytes", needed, "sent")


def who_to_whom(plan, title):
    """A row for each sender, a column for each receiver, in bytes."""
    receivers = sorted(plan.sides[1].node_of)
    rows = []
    for i, colour in enumerate(TRAINER):
        sent = [plan.matrix.get((i, j)) for j in receivers]
        cells = [(f"{size} B", colour) if size else ("has it", "") for size in sent]
        rows.append((f"from {i}", cells))
    return draw.table(rows, [f"to {j}" for j in receivers], title)


if opened("18.bytes"):
    show(who_to_whom(plans["apart"], "Apart: bytes from each device to each"))
    show(who_to_whom(plans["shared"], "Shared: bytes from each device to each"))

# %% [markdown]
# `Mover` carried the plan out: it sent 128 bytes, the bound. Shared, each receiver already has a quarter of what it wants.
#
# ## Predict: how many rounds?
#
# In a *round* a device sends at most one message and receives at most one. Three pairs of meshes, all apart, with eight messages each:
#
# - `a`: `fsdp=4` to `tp=2`, as drawn.
# - `b`: `fsdp=2` to `tp=4`: each trainer device has something for each of four receivers.
# - `c`: `fsdp=2 tp=2` to `tp=4`, `d/fsdp m/tp @train -> d m/tp @serve`: each receiver wants parts of two trainer devices.
#
# **How many rounds does each need at least?**

# %%
rounds = {"a": ..., "b": ..., "c": ...}
attempt("18.rounds", rounds)

# %% tags=["plumbing"]
CUT = "d/fsdp m/tp @train -> d m/tp @serve"
three = {
    "a": plans["apart"],
    "b": two_meshes(ARROW, {"train": "fsdp=2", "serve": "tp=4"}, (8, 8), 2),
    "c": two_meshes(CUT, {"train": "fsdp=2 tp=2", "serve": "tp=4"}, (8, 8), 2),
}
assert {len(plan.matrix) for plan in three.values()} == {8}
fewest = {name: len(plan.rounds) for name, plan in three.items()}
assert fewest == {"a": 4, "b": 4, "c": 2}
met("18.rounds", fewest, "planned")

# %% [markdown]
# The busiest device decides: its messages go one by one. That many rounds are always enough (König 1916).
#
# ### Exercise (core): plan a round
#
# In `c` trainer devices 0 and 2 have the left half of the columns, 1 and 3 the right. Receivers 4 to 7 want a quarter each, in order.
# **Write the first of two rounds: who sends to each?**

# %%
first_round = {"to 4": ..., "to 5": ..., "to 6": ..., "to 7": ...}  # a device each
attempt("18.plan", first_round)

# %% tags=["plumbing"]
halves = {4: {0, 2}, 5: {0, 2}, 6: {1, 3}, 7: {1, 3}}  # llmpar/lessons/18.md has it
senders = {j: {i for i, k in three["c"].matrix if k == j} for j in halves}
assert senders == halves
if opened("18.plan"):
    show(draw.traffic(three["c"]))

# %% [markdown]
# ## Part 2: Muon takes whole matrices
#
# Again: who lacks what? The optimizer **Muon** makes each matrix of the momentum nearly orthogonal. That is simplest if a device has the
# whole matrix. But FSDP has cut it. After one all-to-all a device has all rows of one layer's matrix, not some rows of every layer's matrix:

# %%
show(draw.arrow("l d/fsdp m -> l/fsdp d m", (4, 8, 6), "fsdp=4", 4))

# %% [markdown]
# ## Predict: what does Muon send?
#
# Eight layers with one matrix each, eight devices (`fsdp=8`). There are three ways:
#
# - `gather`: each device gets all eight matrices.
# - `owner`: each device gets all rows of one matrix, and computes. Then it sends the rows back. (Two all-to-alls.)
# - `layer` (ZeRO-1): the reduce-scatter of the gradients gives each device one whole layer of them, not some rows of each.
#
# A matrix has 1 MiB (float32). An all-gather sends 7/8 of the result, an all-to-all 7/8 of what a device has. **How many MiB does a device
# send in addition?**

# %%
sends = {"gather": ..., "owner": ..., "layer": ...}
attempt("18.muon", sends)

# %%
mesh, rows, layers = make_mesh("fsdp=8"), P(None, "fsdp"), P("fsdp")
matrices = jnp.ones((8, 512, 512))  # l d m, 1 MiB for each layer
gather = lambda x: lax.all_gather(x, "fsdp", axis=1, tiled=True)
to_owner = lambda x: lax.all_to_all(x, "fsdp", 0, 1, tiled=True)
back = lambda x: lax.all_to_all(x, "fsdp", 1, 0, tiled=True)
by_rows = lambda g: lax.psum_scatter(g, "fsdp", scatter_dimension=1, tiled=True)
by_layers = lambda g: lax.psum_scatter(g, "fsdp", scatter_dimension=0, tiled=True)
found = {
    "gather": sent_by(gather, matrices, rows, P(), mesh),
    "owner": sent_by(lambda x: back(2 * to_owner(x)), matrices, rows, rows, mesh),
    "sum by rows": sent_by(by_rows, matrices, P(), rows, mesh),
    "sum by layers": sent_by(by_layers, matrices, P(), layers, mesh),
}

# %% tags=["plumbing"]
MIB = 1 << 20
total = {way: sum(size for _, size in sent) / MIB for way, sent in found.items()}
compiled = {way: total[way] for way in ("gather", "owner")}
compiled["layer"] = total["sum by layers"] - total["sum by rows"]
assert total["sum by rows"] == 7
assert compiled == {"gather": 7, "owner": 1.75, "layer": 0}
assert [kind for kind, _ in found["owner"]] == ["all-to-all"] * 2
met("18.muon", compiled)
EIGHT = dataclasses.replace(preset("tiny"), num_layers=8)


def muon_bytes(way, zero=1, microbatches=1):
    """What a device of fsdp=8 sends for Muon and for FSDP in a step of a model."""
    own = dict(zero=zero, muon=way, dtype="bfloat16", microbatches=microbatches)
    return muon_and_fsdp_bytes(Plan("fsdp=8", **own).resolve(EIGHT, "cpu"), 128, 64)


small = {way: muon_bytes(way)[0] for way in compiled}
assert small["gather"] == 4 * small["owner"] > 0 == small["layer"]
if opened("18.muon"):
    bars = [(way, {"sent": size * MIB}) for way, size in compiled.items()]
    title = "What a device sends so that Muon has whole matrices"
    show(draw.memory_bars(bars, title=title, roles={"sent": "fsdp"}))

# %% [markdown]
# On n devices `gather` sends n/2 times as much as `owner`, and computes all on each device.
#
# ## Predict: does Muon send much, compared with FSDP?
#
# FSDP (ZeRO 3) moves weights and gradients in bfloat16 for *each* microbatch: two gathers and one reduce-scatter. Muon moves float32, *once* a step. A step has 4 microbatches on `fsdp=8`.
# **What share of FSDP's bytes does Muon send by `gather`, and by `owner`?**

# %%
share = {"gather": ..., "owner": ...}
attempt("18.share", share)

# %% tags=["plumbing"]
COUNTS = (1, 2, 4, 8, 16)
lines, shares = [], {}
for way, look in (("gather", ("fsdp-line", "s")), ("owner", ("measured", "o"))):
    pairs = [muon_bytes(way, 3, n) for n in COUNTS]
    values = [muon / fsdp for muon, fsdp in pairs]
    lines.append((way, values, *look, False))
    shares[way] = values[2]
r, T = 4096, 1 << 22
more_flops = newton_schulz_flops(r, r) / (6 * r * r * T)
assert newton_schulz_flops(r, r) == 30 * r**3 and more_flops == 5 * r / T
assert abs(shares["gather"] - 1 / 6) < 1e-9 and abs(shares["owner"] - 1 / 24) < 1e-9
assert 0.038 < 8 * more_flops < 0.04
assert lines[0][1][0] < 0.7  # less than FSDP from the first microbatch on
met("18.share", shares, "predicted")
if opened("18.share"):
    axes = dict(x="microbatches of a step", y="Muon's bytes / FSDP's", high=0.7)
    show(draw.curves(lines, COUNTS, **axes, percent=True, title="Muon beside FSDP"))

# %% [markdown]
# Even with one microbatch Muon sends less.
#
# ## Predict: does it compute much?
#
# Muon has five iterations of three matmuls of r × r matrices, once a step. The model multiplies each matrix by all T tokens, forward and
# backward. **Which share of the model's FLOPs are Muon's, for r = 4,096 and T = 4,194,304: 0.05 %, 0.5 %, 5 % or 50 %?**

# %%
flops = ...
attempt("18.flops", flops)

# %% tags=["plumbing"]
met("18.flops", more_flops, "computed")

# %% [markdown]
# Muon has 5 · 3 · 2·r³ = 30·r³ FLOPs, the model 6·r²·T: 5·r/T.
#
# ## Part 3: islands
#
# Now: how often? Slow links join groups of devices with fast links inside: *islands*. Each island can train alone, as a *worker*, and every
# H steps all average their weights: *local steps*. (DiLoCo, Douillard et al. 2023, adds momentum on the averaged update.)
#
# ## Predict: what do islands send?
#
# Four workers, 100 MB of weights in float32. Data parallelism sends 2 · 3/4 · 100 = 150 MB of gradients in each step. The workers
# average their weights every 10 steps. **(a) How many MB does a worker send in a step, on average? (b) If they average after *every*
# step, do they then have the same weights as with data parallelism, with SGD? With Adam?** Write `"yes"` or `"no"`.

# %%
islands = {"every 10": ..., "SGD": ..., "Adam": ...}
attempt("18.islands", islands)

# %%
grads = [1.0, -3.0]  # of one weight; two workers are enough to see it


def moved(rule, gradient):
    """How far one step moves a weight."""
    weight = jnp.zeros(())
    update, _ = rule.update(jnp.asarray(gradient), rule.init(weight), weight)
    return float(update)


rules = {"SGD": optax.sgd(0.1), "Adam": optax.adam(0.1)}
apart = {name: np.mean([moved(rule, g) for g in grads]) for name, rule in rules.items()}
joint = {name: moved(rule, np.mean(grads)) for name, rule in rules.items()}

# %% tags=["plumbing"]
equal = {n: "yes" if abs(apart[n] - joint[n]) < 1e-6 else "no" for n in rules}
four = make_mesh("dp=4", devices[:4])
average = lambda new, old: old + lax.psum(new[0] - old, "dp") / 4
MB = jnp.ones((4, 500, 500))  # four workers, each with 1 MB
program = jax.shard_map(
    average, mesh=four, in_specs=(P("dp"), P()), out_specs=P(), check_vma=False
)
sent = census_hlo(partitioned_hlo(jax.jit(program).lower(MB, MB[0])), four)
a_round = sum(one.bytes_sent for one in sent)
assert a_round == 1.5e6  # 150 MB for 100 MB
tiny = Plan("dp=4").resolve(preset("tiny"), "cpu")
assert outer_traffic(tiny).total_bytes == 1.5 * 4 * preset("tiny").num_params
every_10 = 100 * a_round / 1e6 / 10
met("18.islands", {"every 10": every_10} | equal, "compiled, and computed,")
assert equal == {"SGD": "yes", "Adam": "no"} and abs(apart["Adam"]) < 1e-6
assert abs(joint["Adam"] - 0.1) < 1e-6 and abs(joint["SGD"] - 0.1) < 1e-6
rows = [
    ("SGD", [(f"{apart['SGD']:.1f}", ""), (f"{joint['SGD']:.1f}", "")]),
    ("Adam", [(f"{apart['Adam']:.1f}", "links"), (f"{joint['Adam']:.1f}", "links")]),
]
heads = ["two workers, then the average", "data parallelism"]
if opened("18.islands"):
    EVERY = (1, 2, 5, 10, 20, 50)
    line = [("workers", [150 / h for h in EVERY], "measured", "o", False)]
    line += [("data parallelism", [150] * len(EVERY), "dp-line", None, True)]
    axes = dict(x="H, steps between two averages", y="MB a step, on average")
    show(draw.curves(line, EVERY, **axes, title="Four workers, 100 MB of weights"))
    show(draw.table(rows, heads, "Gradients 1 and -3: how far the weight moves"))

# %% [markdown]
# SGD is linear in the gradient: the average of two updates is the update by the average gradient. Adam divides by the size of the gradient:
# one worker moves by -0.1, the other by +0.1, and their average is 0. So islands with Adam are another algorithm: compare its loss.
#
# ## Keep: count what is lacking, and how often it travels
#
# 1. Between two meshes: each receiver gets what it lacks, once. That sum is the fewest bytes.
# 2. The fewest rounds are the messages of the busiest device.
# 3. Here Muon takes whole matrices. `owner` sends 2/n of what `gather` sends; `layer` sends nothing in addition.
# 4. Muon moves once a step, FSDP in every microbatch. For a matrix r × r and T tokens in a step its FLOPs are 5·r/T of the model's, by
#    `gather` n times as many.
# 5. If workers average every H steps, they send 1/H as much. With H = 1 that is data parallelism for SGD (unclipped, with equal token
#    counts), not for Adam.

# %% [markdown]
# ## Further
#
# ### A trainer and a sampler
#
# `llmpar rl` trains as in part 1: a sampler on four devices, a trainer on four, and a *reward* (how good is an answer?) that one line of
# code computes. Before every second step the trainer sends its weights to the sampler.

# %% tags=["plumbing"]
# Recorded: `llmpar rl` with seed 0, the mean reward of each 20 of its 240 steps.
REWARDS = (0.11, 0.21, 0.35, 0.53, 0.75, 0.94)
REWARDS += (0.98, 0.99, 0.99, 0.99, 1.0, 1.0)
assert REWARDS[0] < 0.2 and REWARDS[-1] > 0.95
learned = [("reward", REWARDS, "measured", "o", False)]
axes = dict(x="steps of the trainer", y="mean reward; 1 is best", high=1)
title = "llmpar rl, recorded: two digits are to be written in reverse"
show(draw.curves(learned, range(20, 241, 20), **axes, title=title))

# %% [markdown]
# ### All weights of a model at once
#
# Many values can take arrows together; then a pair of devices has one message for all of them. The plan stays at the bound, and on meshes that do not divide each other too: three devices to four.

# %%
many = two_meshes(
    ["d/fsdp m @train -> d m/tp @serve", "v/fsdp d @train -> v/tp d @serve"],
    {"train": "fsdp=3", "serve": "tp=4"},
    [(12, 24), (24, 12)],
)
print(f"{len(many.matrix)} messages, {len(many.rounds)} rounds, {many.bound:,} B")
assert sum(many.matrix.values()) == many.bound == 2 * 4 * 12 * 24

# %% [markdown]
# ### The node of a sender
#
# Of several copies of a block, one on the receiver's node sends. Below, copies are on both nodes: no message goes between nodes.

# %%
sides = {"train": ("dp=2 fsdp=2", [0, 1, 8, 9]), "serve": ("dp=2 tp=2", [2, 3, 10, 11])}
near = two_meshes(ARROW, sides, (8, 8), 2, node_size=8)
print(f"between nodes: {sum(map(near.is_far, near.matrix))} of {len(near.matrix)}")
assert not any(map(near.is_far, near.matrix))

# %% [markdown]
# ### Islands and loss
#
# `docs/training.md`, *Local steps*, has a small run of 300 steps of AdamW with four workers: at H = 10 and at H = 50 the loss is clearly above that of data parallelism. DiLoCo
# was published with runs of tens of thousands of steps; measure yours with `llmpar.training.local_steps.LocalSteps`.
#
# ### On your cluster
#
# ```
# llmpar rl --trainer "fsdp=2 tp=2" --sampler tp=4
# llmpar train --optimizer muon --muon owner --mesh "dp=2 fsdp=2 tp=2" --steps 20
# llmpar inspect --muon layer --zero 1 --mesh "dp=2 fsdp=4"
# ```
