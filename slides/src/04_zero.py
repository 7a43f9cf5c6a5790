# %% [markdown] tags=["slide", "divider"] minutes=1 section="ZeRO and FSDP"
# ## Where are we: the same state, cut
#
# <footer>Lesson <code>notebooks/04_zero</code></footer>

# %%
from deck import where

where("ZeRO-1", "ZeRO-3, FSDP")

# %% [markdown] tags=["notes"]
# A checkpoint: who is lost says so now. **Ask:** after a data parallel step, what is the same on all devices, and who needs all of it?

# %% [markdown] tags=["slide", "short"] minutes=3 section="ZeRO and FSDP"
# ## Sharded data parallelism: three levels
#
# A device reads most of its state once in a step. ZeRO cuts it over the replicas: **1** the optimizer, **2** also the
# gradients, **3** also the weights. Here: 7.5 billion parameters on N = 64 devices. The line: what a program may use of an
# A100 with 40 GB.
#
# <footer>Rajbhandari et al. 2020 (ZeRO), table 1 · lesson <code>notebooks/04_zero</code></footer>

# %%
import dataclasses
import json
import math
from pathlib import Path

from llmpar.parallel.mesh import make_mesh, use_devices

use_devices()

import optax
from deck import draw, show, where

from llmpar.inspect.census import census_hlo, census_table, partitioned_hlo
from llmpar.plan.layout import parse_arrow
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.predict import formulas, traffic
from llmpar.predict.hardware import chip
from llmpar.training.step import Step

PARTS = {"weights": (2, 0, 0), "gradients": (0, 2, 0), "optimizer": (0, 0, 12)}
rows = [
    (f"stage {stage}", {part: formulas.zero_bytes(7.5e9, 64, stage, *sizes) for part, sizes in PARTS.items()})
    for stage in range(4)
]
for (_, held), published_gb in zip(rows, (120, 31.4, 16.6, 1.88), strict=True):
    assert abs(sum(held.values()) / 1e9 - published_gb) <= 0.03 * published_gb
show(
    draw.memory_bars(
        rows, chip("a100-40").usable_bytes, "7.5 billion parameters on 64 devices: state per device"
    )
)

# %% [markdown] tags=["notes"]
# **Ask:** what do stages 1 to 3 tend to for very many devices? (4Ψ, 2Ψ and 0 bytes. Stage 2 can never beat 2 bytes per
# parameter.)
#
# **Misunderstanding:** that the stages are "more parallel". All are data parallelism, with the same arithmetic on the same rows;
# lesson 04 trains the four and gets one loss curve. Activations are not in these bars, and no stage cuts them.
#
# **Source:** Rajbhandari et al. 2020, table 1; the paper's GB are 1e9 bytes, the picture counts GiB. Checked within 3 %,
# which is the paper's rounding. An A100 "with 40 GB" has 39.4 GiB, of which JAX takes three quarters by default.

# %% [markdown] tags=["slide"] minutes=1
# ## What is whole, and when
#
# One of four devices over a step of three layers: forward, backward, update.
#
# <footer>Rajbhandari et al. 2020 (ZeRO), section 5 · lesson <code>notebooks/04_zero</code></footer>

# %%
show(draw.zero_strips(stages=(1, 2, 3), layers=3))

# %% [markdown] tags=["notes"]
# **Ask:** at stage 2, when is a gradient whole? For the moment between its computing and its reduce-scatter, one layer at a time.
#
# **Misunderstanding:** that stage 3 never holds a whole layer. It does, twice in a step: to go forward and to go back.
#
# **Source:** the four trainings of lesson 04, written out. Stages 1 and 2 gather the updated weights at the end.

# %% [markdown] tags=["slide"] minutes=1
# ## FSDP2, and the same here
#
# PyTorch's `fully_shard(block)` is ZeRO-3 per parameter. Here: `Plan("fsdp=8", zero=3)`. On a 2-D mesh (HSDP):
# `Plan("dp=2 fsdp=4", zero=3)`. A weight is gathered over `fsdp` only, before its use:
#
# <footer>Zhao et al. 2023 (PyTorch FSDP); PyTorch documentation of <code>fully_shard</code> · lesson <code>notebooks/04_zero</code></footer>

# %%
plan = Plan("dp=2 fsdp=4", zero=3, reshard_after_forward=True, dtype="bfloat16")
assert str(plan.resolve().stored("ffn d m")) == "d/fsdp m" and str(plan.resolve().place("ffn d m")) == "d m"
assert Plan("fsdp=8").zero == 3 and Plan("fsdp=8").reshard_after_forward
# hybrid: the gradient is reduce-scattered over fsdp first, then all-reduced on the shard
assert [str(m) for m in parse_arrow("d m +dp +fsdp -> d/fsdp m").moves] == [
    "reduce-scatter over fsdp on d",
    "all-reduce over dp",
]
gathered = parse_arrow("d/fsdp m -> d m")
assert [str(move) for move in gathered.moves] == ["all-gather over fsdp on d"]
show(draw.arrow(gathered, (4096, 14336), {"fsdp": 4}, itemsize=2))

# %% [markdown] tags=["notes"]
# **Ask:** what does the optimizer see under `fully_shard`? Shards, as here; elementwise optimizers need nothing else. One that
# looks at whole matrices (Muon, Adafactor) has to communicate.
#
# **Misunderstanding:** that FSDP splits the *computation* of a layer. It splits storage. Each device gathers whole weights and
# computes on its own rows; tensor parallelism is what splits the product.
#
# **Names:** `reshard_after_forward` has the same one here; `MixedPrecisionPolicy(param_dtype=…)` is `dtype="bfloat16"`; a DTensor's
# `Shard(0)` is what is stored as `d/fsdp m`. The picture: a feed-forward weight of Llama 3 8B in bfloat16, on four GPUs.
#
# **Source:** Zhao et al. 2023. `Shard(0)` cuts a parameter's first dim, we cut the model width d. FSDP1 flattened many
# parameters into one buffer; FSDP2 shards each.

# %% [markdown] tags=["slide", "short"] minutes=3
# ## Gather a layer, use it, forget it
#
# The next layer's weights arrive while this one computes. In the compiled program each matrix is gathered **twice** and its
# gradient scattered **once**.
#
# <footer>Lesson <code>notebooks/04_zero</code> · <code>llmpar inspect --mesh fsdp=8 --zero 3</code></footer>

# %% tags=["fragment"]
LLAMA, BATCH, SEQ = dataclasses.replace(preset("tiny"), num_layers=2), 16, 32
plan = Plan("fsdp=8", zero=3)
step = Step(LLAMA, plan, make_mesh(plan.mesh), optax.adamw(1e-3))
found = census_table(census_hlo(partitioned_hlo(step.lower(BATCH, SEQ)), step.mesh))
predicted = traffic.step_traffic(plan.resolve(LLAMA), BATCH, SEQ)
assert found == {key: {"count": row.count, "bytes_sent": row.bytes_sent} for key, row in predicted.items()}
# a block has 7 matrices and 2 norms; a norm's scale is gathered once; embedding, head and last norm too
assert found["fsdp", "all-gather"]["count"] == LLAMA.num_layers * (2 * 7 + 2) + 3
assert found["fsdp", "reduce-scatter"]["count"] == LLAMA.num_layers * (7 + 2) + 3

h100, llama, TOKENS = chip("h100"), preset("llama3-8b"), 2560
block = (
    sum(math.prod(w.shape) for path, w in llama.weights().items() if path.startswith("blocks."))
    // llama.num_layers
)
gather_s = formulas.collective_seconds(h100, "all-gather", 2 * block, 8)
forward_s = 2 * block * TOKENS / h100.flops_per_s
assert gather_s < forward_s  # so a gather hides behind the layer before it
show(draw.gather_use_forget(takes=(1.3, 1.3, 2.6)))

# %% [markdown] tags=["notes"]
# Picture: three layers, lengths for the eye; on 8 H100s a gather of Llama 3 8B's layers hides from 2,400 tokens or so on. Counts:
# read from the partitioned HLO of a small Llama, with a norm's scale and whatever lies outside the blocks gathered once.
#
# **Ask:** the reduce-scatter is not in the code. Where does it come from? The gradient of an all-gather *is* a reduce-scatter.
#
# **Misunderstanding:** that the gathered weights cost nothing. Two whole layers live at a time: the one in use and the next.
# Gathering all layers at once is a common accident (a scan whose weights are gathered outside of it).
#
# **Source:** Zhao et al. 2023, section 3.3; Rajbhandari et al. 2020, section 7.2.

# %% [markdown] tags=["slide"] minutes=1
# ## The schedule that the compiler for H100s makes
#
# You need no H100 to see the schedule: its compiler runs anywhere. **Filled:** computing waits. The picture shows the
# beginning of a layer's forward pass, and the sending of its gradients.
#
# <footer><code>llmpar compile --target h100:8x8 --model llama3-8b --mesh fsdp=64 --svg schedule.svg</code></footer>

# %%
compiled = json.loads((Path("recorded") / "llama3-8b_h100.json").read_text())
rows, roofline = compiled["collectives"], compiled["roofline"]
assert all(row["predicted_bytes"] == row["compiled_bytes"] for row in rows)  # the H100's program, to the byte
assert roofline["exposed_s"] < 0.05 * roofline["step_s"]  # nearly all of it overlaps with matmuls
backward, forward = (turn["events"] for turn in compiled["turns"][:2])
GATHERED = {
    "stream d; attention d k h": "k",
    "attention d n h": "q",
    "attention n h d": "gather o",
    "ffn d m": "gather gate",
}
COMPUTED = {"feed_forward": "feed-forward", "bsd,dnh->bsnh": "attention", "bsnh,nhd->bsd": "attention"}


def zoomed(events, begin_s, end_s, said):
    """The events between two instants: what waits for nearly all of a message is drawn as waiting for all."""
    out = []
    for event in events:
        start, end = max(event["start_s"], begin_s) - begin_s, min(event["end_s"], end_s) - begin_s
        if end - start <= 0:
            continue
        links, waits = (
            event["lane"] == "links",
            event["exposed_s"] > 0.9 * (event["end_s"] - event["start_s"]),
        )
        name = (
            GATHERED.get(event["name"], "reduce-scatter of all its gradients")
            if links
            else COMPUTED.get(event["name"], "")
        )
        more = {"lane": "links", "axes": ("fsdp",)} if links else {"lane": "compute"}
        out.append(more | {"name": name, "start_s": start, "end_s": end, "exposed_s": (end - start) * waits})
    return {"name": said, "count": 0, "events": out}


whole_s = max(event["end_s"] for event in forward)
waits_s = sum(event["exposed_s"] for event in forward)
assert [event["name"] for event in forward if event["exposed_s"]] == list(GATHERED)[
    :2
] and waits_s < 0.02 * whole_s
(leaving,) = (event for event in backward if event["name"].count(";") == 5)
assert leaving["exposed_s"] == 0
pictures = [
    zoomed(
        forward,
        0,
        0.8e-3,
        f"forward, the first 0.8 of {1e3 * whole_s:.1f} ms: computing waits for q and k, {1e6 * waits_s:.0f} µs",
    ),
    zoomed(
        backward,
        leaving["start_s"],
        leaving["start_s"] + 2e-3,
        "backward, 2 ms of it: behind feed-forward and attention",
    ),
]
show(draw.two_lanes(pictures, f"One layer on {compiled['target']}, estimated from its compiled schedule"))

# %% [markdown] tags=["notes"]
# Picture: two pieces of one turn of the loop over layers, 8,192 tokens per GPU, bf16. The order and the pairs of start and done
# are the compiler's; the lengths are a roofline (matmuls at 70 % of peak, links as reached), not a measurement.
#
# **Ask:** which gathers wait, and why those? The first ones of a layer: nothing stands before their first product but a norm.
#
# **Misunderstanding:** that overlap is luck. It can be read: FLOPs between a collective's start and its end.
#
# **Source:** the program, compiled without a device; Williams et al. 2009 for the roofline.

# %% [markdown] tags=["slide"] minutes=1
# ## Poll: which stages send more than stage 0?
#
# One microbatch. Stage 0 sends an all-reduce of all gradients.
#
# | A | B | C | D |
# |---|---|---|---|
# | none | stages 1, 2, 3 | stages 2, 3 | stage 3 |
#
# <footer>Lesson <code>notebooks/04_zero</code></footer>

# %%
show(draw.zero_strips(stages=[0, 3]))

# %% [markdown] tags=["notes"]
# **Ask:** raise a hand. (D. Stages 1 and 2 put the update between the two halves of the all-reduce; stage 3 gathers once more.) Then: and
# with four microbatches? (C.)
#
# **Misunderstanding:** that what is cut must cost messages. An all-reduce is already a reduce-scatter and an all-gather.
#
# **Source:** the next slide; lesson 04 runs the stages.

# %% [markdown] tags=["slide", "short"] minutes=2
# ## What sharding costs
#
# Numbers sent per device and step, for $\Psi$ parameters and $u$ microbatches:
#
# <footer>Rajbhandari et al. 2020 (ZeRO), section 7 · lesson <code>notebooks/04_zero</code></footer>

# %%
CONFIG, N, U = preset("llama3-8b"), 64, 4
FORMULA, psi = {0: "2Ψ", 1: "2Ψ", 2: "(u+1)Ψ", 3: "3uΨ"}, CONFIG.num_params
sent = {
    stage: [round(formulas.zero_elements(1, stage, accumulation=u), 6) for u in (1, U)] for stage in range(4)
}
assert sent == {0: [2, 2], 1: [2, 2], 2: [2, 5], 3: [3, 12]}
for stage in range(4):  # our own step, counted: weights and gradients alone move
    for u, formula in zip((1, U), sent[stage], strict=True):
        ours = (
            traffic.step_traffic(
                Plan(f"fsdp={N}", zero=stage, microbatches=u).resolve(CONFIG), N * U, 1
            ).total_bytes
            / 4
            / psi
            * N
            / (N - 1)
        )
        # The embedding is gathered once.
        assert abs(ours - formula) < 1e-3 if stage < 3 else 0.94 * formula < ours < formula
assert (
    formulas.sent_bytes("all-reduce", 1, N)
    == 2 * formulas.sent_bytes("reduce-scatter", 1, N)
    == 2 * formulas.sent_bytes("all-gather", 1, N)
)
# Gradients: an all-reduce counts twice. Weights are gathered once in the update, or twice in each microbatch.
PARTS_SENT = {0: (2, 0), 1: (1, 1), 2: (U, 1), 3: (U, 2 * U)}
assert {stage: sum(parts) for stage, parts in PARTS_SENT.items()} == {s: row[1] for s, row in sent.items()}
names = ("gradients", "weights")
bars = [
    (f"stage {s}: {FORMULA[s]}", {name: 2 * psi * n for name, n in zip(names, PARTS_SENT[s], strict=True)})
    for s in range(4)
]
show(draw.memory_bars(bars), f"Llama 3 8B in bfloat16, u = {U}: what a GPU sends in a step")

# %% [markdown]
# Stage 1 sends no more. Stage 2 sends more when you accumulate, stage 3 for every microbatch (3Ψ if $u = 1$).

# %% [markdown] tags=["notes"]
# **Ask:** why is stage 1 free? An all-reduce is a reduce-scatter and an all-gather; the update goes between the two halves.
#
# **Misunderstanding:** "ZeRO-2 is the balance of memory and communication." With accumulation it scatters every microbatch's
# gradients: u + 1 instead of 2. Stage 1 is the better companion of accumulation, and of pipelines.
#
# **Source:** Rajbhandari et al. 2020, section 7, for u = 1; the counts over microbatches follow from *when* each stage
# communicates, and the package's tests hold them against compiled programs. Ψ times (N-1)/N on a ring.

# %% [markdown] tags=["slide"] minutes=1
# ## Offload: the optimizer on the CPU
#
# Gradients go to the CPU, weights come back: $4\Psi$ bytes cross PCIe per step, 0.8 s for 13B. That hides behind **10,500
# tokens** per GPU and step, if the CPU's Adam keeps up.
#
# <footer>Ren et al. 2021 (ZeRO-Offload), section 3 · a model, not a measurement · lesson <code>notebooks/04_zero</code></footer>

# %%
PCIE_BYTES_PER_S = 16 * 32e9 / 8 * 128 / 130  # one way: 16 lanes of PCIe 5.0, 32 GT/s each, 128b/130b coded
psi = preset("llama2-13b").num_params
state = {part: formulas.zero_bytes(psi, 1, 0, *sizes) for part, sizes in PARTS.items()}
crossing_s = 4 * psi / PCIE_BYTES_PER_S
hidden_tokens = crossing_s * h100.flops_per_s / (6 * psi)
assert round(crossing_s, 1) == 0.8 and round(hidden_tokens, -2) == 10_500
assert state["weights"] < h100.usable_bytes < sum(state.values())
quarters = {part: held / 4 for part, held in state.items()}
assert sum(quarters.values()) == formulas.zero_bytes(psi, 4, 3)
bars = [
    ("all on one GPU", state),
    ("ZeRO-3 over 4 GPUs", quarters),
    ("offloaded, one GPU", {"weights": state["weights"]}),
]
show(draw.memory_bars(bars, h100.usable_bytes, "Llama 2 13B on H100: state in GPU memory", wide=340))

# %% [markdown] tags=["notes"]
# **Ask:** when would you rather buy a second GPU? When the batch is small: the crossing takes as long for one token as for
# ten thousand.
#
# **Misunderstanding:** that offload adds memory for activations. It moves the state that is used once per step; activations are
# used at once, and moving them costs far more per byte saved.
#
# **Source:** Ren et al. 2021: of all ways to cut the work between GPU and CPU, 4 bytes per parameter and step (2 of gradients,
# 2 of weights) is the least. 63 GB/s per direction is PCIe 5.0 x16 without protocol; the GPU is taken at its peak, and
# its memory as what a program may use.

# %% [markdown] tags=["slide"] minutes=1
# ## Tuning with LoRA: gradients go, gathers stay
#
# `x W` becomes `x W + (x A) B · α/z`; `W` is frozen. It has no gradient and no moments, but layers still multiply by it: gathered
# forward, and backward for the gradient of `x`. Llama 3 8B, rank 16 (an H100's 59.3 GiB can hold only one of the two):
#
# <footer>Hu et al. 2021 (LoRA) · lesson <code>notebooks/04_zero</code> · <code>llmpar train --lora-rank 16</code></footer>

# %%
from collections import Counter

from llmpar.plan.model_config import LoraConfig

base = preset("llama3-8b")
fine = dataclasses.replace(base, lora=LoraConfig(rank=16))
thin = fine.num_params - base.num_params
assert 0.001 < thin / base.num_params < 0.002
state = {part: formulas.zero_bytes(base.num_params, 1, 0, *sizes) for part, sizes in PARTS.items()}
tuned = {part: formulas.zero_bytes(thin, 1, 0, *sizes) for part, sizes in PARTS.items()}
tuned["weights"] += state["weights"]
assert (
    sum(tuned.values()) < h100.usable_bytes < sum(state.values())
    and round(h100.usable_bytes / 2**30, 1) == 59.3
)
rows = [("all trained: one GPU holds", state), ("LoRA: one GPU holds", tuned)]
for name, config in (("all trained", base), ("LoRA", fine)):  # ZeRO-3, 8 GPUs
    found = Counter()
    plan = Plan("fsdp=8", zero=3, dtype="bfloat16").resolve(config)
    for row in traffic.step_traffic(plan, 8, 4096).values():
        for message, times in row.messages.items():
            found[message.value] += times * row.sent(message.num_bytes)
    rows.append((f"{name}: each of 8 sends", {what: found[what] for what in ("weights", "gradients")}))
before, after = (sent for _, sent in rows[2:])
assert before["weights"] < after["weights"] < 1.01 * before["weights"]
assert 0 < after["gradients"] < 0.01 * before["gradients"]
show(draw.memory_bars(rows, title="Llama 3 8B, mixed precision: model state, and ZeRO-3 in a step", wide=380))

# %% [markdown] tags=["notes"]
# **Ask:** what of 3Ψ is left at stage 3? 2Ψ: who multiplies by `W` needs it whole, forward and backward. Only its reduce-scatter
# goes.
#
# **Misunderstanding:** that LoRA makes a step as cheap as its few parameters. Forward is as dear as before, backward half; activations
# are all kept. What goes is state: 2 of 16 bytes are left, and 8B fits on one GPU.
#
# **Source:** Hu et al. 2021, sections 4.1 and 4.2; bytes by the formulas that lesson 04 holds against the compiled program. In
# bfloat16 gathers carry 2 bytes per number.
