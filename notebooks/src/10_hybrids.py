# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 25
#     needs: ["03", "04", "05", "07"]
#     objectives:
#     - Say what each axis of a mesh adds to the traffic, and what it takes from the
#       memory.
#     - Order axes by the links that they need.
#     - Tell rounding from a bug by a derived tolerance.
# ---

# %% [markdown]
# # 10 · Hybrids: what does each axis add?
#
# The lessons before took one axis at a time. Large models are trained on all of them at once: Llama 3 405B used tensor,
# pipeline, context and data parallelism together (Llama Team 2024, section 3.3). Here we build a **4-D mesh** axis by axis.
# After each step we ask what the new axis adds to the traffic, what it takes from the memory, and whether the answer stays
# the same.
#
# | axis | name | cuts | must send |
# |---|---|---|---|
# | `dp` | data parallelism | the batch | gradients, once per step |
# | `fsdp` | sharded data parallelism (ZeRO-3) | the batch, and what replicas hold in common | weights before use, gradients after |
# | `tp` | tensor parallelism | each product | activations, in every layer |
# | `pp` | pipeline | the layers | activations between stages |
#
# A **layout** such as `b/dp s d +tp` says where a value lives; an **arrow** is a movement between two layouts, and a
# **census** counts what a compiled program sends ([Words](../docs/words.md#words)). **State** is weights and the optimizer's
# moments, in float32 here.
#
# **Question.** What does each axis cost, what does it save, and why do two meshes differ in the last digits?
#
# Letters: `b` rows, `s` positions, `d` width, `m` hidden width, `l` layers, `v` vocabulary.
#
# The core path ends at *Further*.

# %% tags=["plumbing"]
from llmpar.mesh import use_devices

devices = use_devices(16)  # four axes of two

# %% tags=["plumbing"]
import dataclasses
import math

import jax
import numpy as np
import optax

from llmpar import draw
from llmpar.config import preset
from llmpar.draw import scene
from llmpar.exercises import attempt, hint, met, solution
from llmpar.exercises.lesson import argument_bytes, counting_text, five_runs, trained
from llmpar.inspect.census import compiled_memory
from llmpar.inspect.report import compare
from llmpar.plan import Plan
from llmpar.predict.tolerance import tolerance
from llmpar.timetable import branch_shares

# Accelerators round float32 products unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")

# %% [markdown]
# ## Predict
#
# A device of `dp=2 fsdp=2` holds half of the state. Now add `tp=2` and `pp=2`. **Which share of a feed-forward's weight,
# `l d m`, does one of the sixteen devices hold between steps?** Its layout is `l/pp d/fsdp m/tp`.

# %%
share_held = ...
attempt("10.share", share_held)

# %% [markdown]
# ## Run: axis by axis
#
# One model, one batch, the same weights. Only the mesh grows. With fewer devices the list is shorter.

# %%
LLAMA = dataclasses.replace(preset("tiny"), num_layers=2)
ROWS, SEQ, STEPS = 16, 32, 2
TEXT, ADAM = counting_text(ROWS, SEQ), optax.adamw(3e-3)
MESHES = ["dp=1", "dp=2", "dp=2 fsdp=2", "dp=2 fsdp=2 tp=2", "pp=2 dp=2 fsdp=2 tp=2"]
MESHES = [text for number, text in enumerate(MESHES) if 2**number <= len(devices)]
PLANS = [Plan(text, microbatches=4 if "pp" in text else 1) for text in MESHES]

print("Five programs are compiled and run: about 30 s.")
runs = {
    text: trained(LLAMA, plan, TEXT, ADAM, STEPS)
    for text, plan in zip(MESHES, PLANS, strict=True)
}
solo_losses = runs["dp=1"].losses
print("losses on one device:", " ".join(f"{x:.5f}" for x in solo_losses))
gate = runs[MESHES[-1]].state.params["blocks"]["ffn"]["gate"]
met("10.share", gate.addressable_shards[0].data.size / gate.size, "held")

# %% [markdown]
# ## Compare: what each axis adds
#
# **Communication.** Below, for each mesh, the arrows that the mesh before it did not have. Bytes are those that a device
# sends per step. Each line was predicted by a formula, and is asserted against the compiled program.


# %%
def lines(document):
    """Bytes by axes, collective and arrow, there and back together."""
    found = {}
    for row in document["arrows"]:
        key = row["axis"], row["kind"], row["arrow"]
        found[key] = found.get(key, 0) + row["bytes_sent"]
    return found


before, documents = {}, {}
for text, run in runs.items():
    step = run.step
    # What was predicted beside what is compiled.
    branches = branch_shares(step.plan.pipeline, LLAMA.num_layers)
    document = compare(step.plan, ROWS, SEQ, run.text, step.mesh, branches)
    documents[text], now = document, lines(document)
    assert all(row["as_predicted"] for row in document["arrows"])
    for row in document["collectives"]:
        assert row["predicted_bytes"] == row["compiled_bytes"]
    new = {key: sent for key, sent in now.items() if key not in before}
    print(f"{text}: {sum(now.values()):,} B, {len(new)} new arrows, {len(now)} in all")
    for (axes, kind, arrow), sent in sorted(new.items(), key=lambda x: -x[1])[:4]:
        print(f"    {axes:<8} {kind:<18} {sent:>8,} B   {arrow}")
    before = now

# %% [markdown]
# Read it from the top:
#
# * `dp` adds one all-reduce per gradient: `+dp -> whole`.
# * `fsdp` gathers each weight (twice: forward and backward) and reduce-scatters its gradient. The all-reduce over `dp`
#   stays, but on *shards*: half of the bytes.
# * `tp` adds two sums of activations per layer and direction. Weights are halved again, and with them what `fsdp` sends.
# * `pp` adds two small arrows: the stream to the next stage, its gradient back. But weights are gathered once per
#   microbatch, so `fsdp` sends more. A pipeline and ZeRO-3 pull in opposite directions.
#
# The last point is seen best by axis:

# %%
AXES = ("dp", "fsdp", "tp", "pp", "mixed")
print(f"{'':<24}" + "".join(f"{axis:>12}" for axis in AXES))
for text, document in documents.items():
    total = dict.fromkeys(AXES, 0)
    for row in document["collectives"]:
        total[row["axis"] if row["axis"] in total else "mixed"] += row["compiled_bytes"]
    print(f"{text:<24}" + "".join(f"{sent:>12,}" for sent in total.values()))
scene.show(draw.collectives(document["collectives"]))

# %% [markdown]
# "Mixed" are sums over several axes at once: embedding and head, which every stage holds, and the loss.
#
# **Memory.** What a device is given: weights, moments, its rows.

# %%
bars = []
for text, run in runs.items():
    given = argument_bytes(run)
    held = compiled_memory(run.compiled)["argument_bytes"]
    assert sum(given.values()) == held
    bars.append((text, {part: given[part] for part in ("params", "optimizer")}))
    print(f"{text:<24} state {sum(bars[-1][1].values()):>9,} B, as compiled")
scene.show(draw.memory_bars(bars, title="State per device, predicted = compiled"))

# %% [markdown]
# `dp` saves nothing here: it is bought for speed. `fsdp` and `tp` halve. `pp` halves the blocks, but not embedding and
# head, which in this package every stage holds; with 2 layers these are a large part.
#
# **Value.** The losses of two steps, and the distance from one device that rounding explains (see "Tolerances"). The norm
# of the gradient is compared too: Adam hides a factor that all gradients have.

# %%
fresh = {"logits": 0.5, "loss": math.log(LLAMA.vocab_size)}
for plan, (text, run) in zip(PLANS, runs.items(), strict=True):
    bound = tolerance(plan.resolve(LLAMA), ROWS, SEQ, **fresh).bound("loss")
    off = abs(run.losses[0] / solo_losses[0] - 1)
    assert off <= bound and np.allclose(run.losses, solo_losses, rtol=1e-4), text
    norms = [float(one.metrics["grad_norm"]) for one in (run, runs["dp=1"])]
    assert math.isclose(*norms, rel_tol=1e-3), (text, norms)
    shown = " ".join(f"{x:.5f}" for x in run.losses)
    print(f"{text:<24} {shown}   off {off:.0e} of {bound:.0e}")

# %% [markdown]
# ## The order of the axes
#
# `pp dp fsdp ep sp tp` is the order on the links: neighbours along the *last* axis are neighbours in the machine. `fsdp` has
# the most messages, but a weight can be gathered ahead of its use. The product behind a sum over `tp` must wait for it. So
# `tp` stands last, on the fastest links; `pp` and `dp`, with few messages, stand first.

# %%
print("messages per step, by axis:")
for row in sorted(document["collectives"], key=lambda row: -row["count"]):
    print(f"    {row['axis']:<14} {row['kind']:<20} ×{row['count']}")
scene.show(draw.mesh(MESHES[-1]))

# %% [markdown]
# ### Exercise (core): which axis on which link?
#
# 16 nodes of 4 A100 each. NVLink joins the four GPUs of a node, a network joins the nodes. The mesh is
# `pp=2 dp=8 tp=4`, its axes in the usual order. Say for each axis whether its groups use `"NVLink"` or the `"network"`.

# %%
links = {"pp": ..., "dp": ..., "tp": ...}
attempt("10.links", links)

# %% [markdown]
# ## Five lines
#
# 1. Each axis adds its own arrows, and shrinks the messages of the others.
# 2. `dp` buys speed. `fsdp`, `tp` and `pp` buy memory, and pay with weights, activations and waiting.
# 3. A pipeline multiplies ZeRO-3's gathers by its microbatches.
# 4. The axis whose messages nothing can hide belongs on the fastest links: `tp` last.
# 5. A difference below the derived bound is rounding. Above it there is a bug: look for a missing or doubled sum.
#
# **One number to remember: √k.** A sum of k terms in another order differs by √k roundings, and not by k.

# %% [markdown]
# ## Further
#
# Which difference is a bug, five runs to diagnose, and the cheapest mesh that fits.
#
# ## Tolerances: which difference is a bug?
#
# `(a + b) + c` is not `a + (b + c)` in floats. A mesh adds the same terms in another order. A sum of *k* rounded terms is
# off by about √k roundings, each of at most *u*: 6e-8 in float32, 4e-3 in bfloat16 (Higham 2002; Higham & Mary 2019).
# `tolerance` lists the sums that a plan cuts. Expected differences of the loss, relative:

# %%
plan = PLANS[-1]
for dtype in ("float32", "bfloat16"):
    told = tolerance(
        dataclasses.replace(plan, dtype=dtype).resolve(LLAMA), ROWS, SEQ, **fresh
    )
    loss, norm = told.bound("loss"), told.bound("grad_norm")
    print(f"{dtype}: loss within {loss:.0e}, norm within {norm:.0e}")
    for term in sorted(told.terms, key=lambda term: -term.loss)[:3]:
        cut = term.by or "nothing"
        print(f"    {term.loss:.0e}  {term.name}, ×{term.length:.0f}, cut by {cut}")

# %% [markdown]
# In float32 the sum of the losses itself is the largest term, in the seventh digit. In bfloat16 it is the hidden values of
# each token, in the fourth or fifth digit: there is nothing to find. `llmpar inspect --tolerance` says it for your own plan.
#
# ### Exercise (stretch): five runs
#
# Five runs of one step on `dp=2`, in float32, differ from one device as below. The toy is a linear model whose two ranks have
# 12 and 4 targets. Four have a bug. Assign to each: `"mean of means"` (each rank divides by its own targets),
# `"not summed"` (gradients stay local), `"summed twice"`, `"norm of one shard"` (only half of the squares), or `"rounding"`.

# %%
print("run      loss     norm  gradient   (relative differences from one device)")
for name, (loss, norm, gradient) in five_runs().items():
    print(f"{name}  {loss:9.1e} {norm:8.1e} {gradient:9.1e}")

causes = {"A": ..., "B": ..., "C": ..., "D": ..., "E": ...}
attempt("10.causes", causes)

# %% [markdown]
# ### Exercise (expert): the least traffic that fits
#
# 16 devices, this lesson's model, 16 rows of 32 positions, one microbatch, ZeRO-3. A device may hold 240,000 B of arguments.
# Which mesh of `dp`, `fsdp` and `tp` sends the fewest bytes per device and step? Write it as text: `"dp=4 fsdp=2 tp=2"`, say.

# %%
cheapest = ...
attempt("10.cheapest", cheapest)

# %% [markdown]
# ## Where XLA's partitioner differs
#
# Under `reading="auto"` the partitioner chooses the collectives. Pipelines are beyond it: an order of messages is no
# sharding. On `dp=2 fsdp=2 tp=2` it gives the same loss, and other bytes; lesson 12 looks at that.
#
# ## Going on
#
# `sp` cuts the positions and adds keys that travel (lesson 06); `ep` cuts experts and adds two all-to-alls each way
# (lesson 09). They join in the same way: try `llmpar inspect --mesh "fsdp=2 sp=2 tp=2"` and read the new arrows.
#
# ## On your cluster
#
#     llmpar inspect --mesh "dp=2 fsdp=2 tp=2" --tolerance
#     llmpar inspect --mesh "pp=2 fsdp=2 tp=2" --microbatches 4
#     llmpar plan --model llama3-8b --chip h100 --devices 64
