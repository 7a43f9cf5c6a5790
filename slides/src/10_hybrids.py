# %% [markdown] tags=["slide", "divider"] minutes=1 section="Hybrids"
# ## Where are we: all of them at once
#
# <footer>Lesson <code>notebooks/10_hybrids</code></footer>

# %%
from deck import TAKE_HOME, where

where(*TAKE_HOME)

# %% [markdown] tags=["notes"]
# A checkpoint: the table is full. **Ask:** which two rows would you combine first on your own cluster, and over which links?

# %% [markdown] tags=["slide", "short"] minutes=3 section="Hybrids"
# ## 3-D: an axis for each kind of link
#
# Four nodes of four GPUs, Llama 3 8B. `tp` sends most, in every layer: **inside a node**. `dp` sends once a step, `pp` least of all: between
# nodes.
#
# <footer>Narayanan et al. 2021; Llama Team 2024, section 3.3 · lesson <code>notebooks/10_hybrids</code></footer>

# %%
from deck import draw, show

from llmpar.plan.mesh_shape import parse_mesh
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.predict import traffic

THREE = "pp=2 dp=2 tp=4"
sent = dict.fromkeys(("pp", "dp", "tp"), 0)
for (axes, _), row in traffic.step_traffic(
    Plan(THREE, microbatches=8, dtype="bfloat16").resolve(preset("llama3-8b")), 16, 8192
).items():
    if axes in sent:
        sent[axes] += row.bytes_sent
assert sent["tp"] > sent["dp"] > sent["pp"] and parse_mesh(THREE).size == 16
show(draw.mesh(THREE, devices_per_host=4))

# %% [markdown] tags=["notes"]
# Llama 3 8B, 16 rows of 8,192 tokens a step, 8 microbatches, bf16: `tp` sends several times what `dp` sends, and that is several
# times what `pp` sends. The order is asserted in this slide's source.
#
# **Ask:** which two devices exchange activations of a pipeline? Device 0 and device 8: the same place in the other half.
#
# **Misunderstanding:** that "3-D" names a method. It is a mesh with three axes; every device has a coordinate on each, and is a
# tensor, a data and a pipeline device at once.
#
# **Source:** Narayanan et al. 2021 call it PTD-P; Megatron and we nest the axes in the same order. Bytes: `llmpar.predict.traffic`.

# %% [markdown] tags=["slide"] minutes=2
# ## Which axis crosses which link?
#
# 128 H100s in nodes of 8. A bar reaches from the nearest partner to the farthest; what passes the dashed edge shares the
# **network**.
#
# <footer>Lesson <code>notebooks/10_hybrids</code> · <code>llmpar inspect --mesh "dp=2 fsdp=2 tp=2"</code></footer>

# %%
from llmpar.predict.hardware import chip

show(draw.links("pp=4 fsdp=4 tp=8", chip("h100")))

# %% [markdown] tags=["notes"]
# **Ask:** what happens if `tp` and `pp` change places? The all-reduces of every layer cross the network, at about a seventh of the rate.
#
# **Misunderstanding:** that a mesh is only a shape. The order of its axes is the wiring; `llmpar inspect` prints the link of each.
#
# **Source:** rates as reached, from the chip's constants (`llmpar.predict.hardware`).

# %% [markdown] tags=["slide"] minutes=1
# ## Poll: what does a pipeline do to fsdp?
#
# The last axis is `pp=2`: half of the layers on each device, 4 microbatches. `fsdp` (ZeRO-3) then sends …
#
# | A | B | C |
# |---|---|---|
# | half as much | the same | more |
#
# <footer>Lesson <code>notebooks/10_hybrids</code></footer>

# %% place="beside"
grown = ["dp=2 fsdp=2 tp=2", "pp=2 dp=2 fsdp=2 tp=2"]
show(draw.growing(grown, "A square is a device, a line is an axis"))

# %% [markdown] tags=["notes"]
# **Ask:** raise a hand. (C: half of the layers, gathered 12 times in place of 2.)
#
# **Misunderstanding:** that axes do not change what other axes send. `tp` halves what `fsdp` sends, a pipeline multiplies it.
#
# **Source:** the next slide.

# %% [markdown] tags=["slide"] minutes=2
# ## Hybrids: half the layers, four microbatches
#
# A mesh grows axis by axis. The last one is `pp=2`: each device has half of the layers, and gathers them for each of 4 microbatches.
#
# <footer>Llama Team 2024, section 3.3 · lesson <code>notebooks/10_hybrids</code> · <code>llmpar inspect --mesh "dp=2 fsdp=2 tp=2"</code></footer>

# %%
import dataclasses
import math

from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.predict import memory, traffic
from llmpar.predict.tolerance import tolerance

MODEL, ROWS, SEQ = dataclasses.replace(preset("tiny"), num_layers=2), 16, 32
MESHES = ("dp=2", "dp=2 fsdp=2", "dp=2 fsdp=2 tp=2", "pp=2 dp=2 fsdp=2 tp=2")
plans = {text: Plan(text, microbatches=4 if "pp" in text else 1) for text in MESHES}
rows = []
for text, plan in plans.items():
    sent = traffic.step_traffic(plan.resolve(MODEL), ROWS, SEQ)
    by_axis = dict.fromkeys(("dp", "fsdp", "tp", "pp", "several axes"), 0)
    for (axes, _), row in sent.items():
        by_axis[axes if axes in by_axis else "several axes"] += row.bytes_sent
    assert sum(by_axis.values()) == sent.total_bytes
    rows.append((text, {axis: size for axis, size in by_axis.items() if size > 100}))

# %% tags=["fragment"]
assert rows[-1][1]["fsdp"] > 2 * rows[-2][1]["fsdp"]
how = {"title": "Bytes that a device sends in a step, by axis", "roles": {"several axes": "links"}}
show(draw.memory_bars(rows, wide=440, **how))

# %% [markdown] tags=["notes"]
# **Ask** before the bars: less, the same, or more? More: 283 KiB become 711. A stage has half of the layers, but gathers them again for each of 4 microbatches. And why does `fsdp` send less when `tp` joins? `tp` halves each weight.
#
# **Misunderstanding:** that bytes of axes add up to a time. Axes use different links, and some messages hide behind matmuls.
#
# **Source:** the package's prediction, which the lesson holds against the compiled programs, arrow by arrow. Grey are the sums of
# embedding and head over `pp` and `dp`: every stage holds these.

# %% [markdown] tags=["slide"] minutes=2
# ## And what each axis saves
#
# State of a device: weights and Adam's moments, float32. `dp` saves nothing. `fsdp` and `tp` halve the state; `pp` halves
# only the blocks.
#
# <footer>lesson <code>notebooks/10_hybrids</code> · <code>llmpar inspect --mesh "pp=2 fsdp=2 tp=2" --microbatches 4</code></footer>

# %%
held = [
    (text, {"weights": given["params"], "optimizer": given["optimizer"]})
    for text, plan in plans.items()
    for given in [memory.argument_bytes(plan.resolve(MODEL), ROWS, SEQ)]
]
state = [sum(parts.values()) for _, parts in held]
assert state[1] == state[0] / 2 and state[3] > state[2] / 2
show(draw.memory_bars(held, title="State per device", wide=440))

# %% [markdown] tags=["notes"]
# **Ask:** which axis would you add next, if memory were short? `fsdp`: it takes all of the state. If activations were short: `tp` with
# `--tp-sequence`, or `sp`.
#
# **Misunderstanding:** that `pp=2` halves everything. In this package embedding and head are on every stage.
#
# **Source:** `llmpar.predict.memory`; the lesson asserts that the compiled arguments are equal to the byte.

# %% [markdown] tags=["slide"] minutes=2
# ## Why the losses of two meshes differ in the seventh digit
#
# Sums in another order round differently. A sum of $k$ terms is off by about $\sqrt{k}\,u$, not by $k\,u$.
#
# <footer>Higham 2002; Higham &amp; Mary 2019 · lesson <code>notebooks/10_hybrids</code> · <code>llmpar inspect --mesh "dp=2 fsdp=2 tp=2" --tolerance</code></footer>

# %%
from deck import curves

PLAN = Plan("dp=2 fsdp=2 tp=2")
fresh = {"logits": 0.5, "loss": math.log(MODEL.vocab_size)}
KINDS = {
    "float32": ("float32", "float32"),
    "float32, matmuls in TF32": ("float32", "tf32"),
    "bfloat16": ("bfloat16", "float32"),
}
within = {"loss": {}, "grad_norm": {}}  # dots without a line: there is nothing between two dtypes
for place, (dtype, matmuls) in enumerate(KINDS.values()):
    told = tolerance(dataclasses.replace(PLAN, dtype=dtype).resolve(MODEL), ROWS, SEQ, matmuls, **fresh)
    for what, bounds in within.items():
        bounds |= {place: told.bound(what), place + 0.5: None}
LOOKS = ("gradient norm", "grad_norm", "dp-line", "s"), ("loss", "loss", "tp-line", "o")
for bounds in within.values():
    bounds.pop(len(KINDS) - 0.5)
lines = [(name, within[what], color, marker, False) for name, what, color, marker in LOOKS]
assert within["loss"][2] > 1e-4 > within["loss"][0]
curves(lines, list(KINDS), "computed in", "differs by at most", log=True, text="{:.0e}".format)

# %% [markdown] tags=["notes"]
# **Ask:** your loss is 2.3417 on 8 GPUs and 2.3419 on 16. A bug? In bfloat16, no: see the last line. In float32, yes: look for a sum
# that is missing or made twice.
#
# **Misunderstanding:** that more devices round more. Splitting a sum makes its parts shorter; what grows is the number of roundings
# that tensor parallelism adds in bfloat16.
#
# **Source:** `llmpar.predict.tolerance`. The bound is eight times the expected root mean square; the tests hold it against runs.
