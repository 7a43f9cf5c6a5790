# %% [markdown] tags=["slide", "divider"] minutes=1 section="Data parallelism"
# ## Where are we: the same model, more rows
#
# <footer>Lesson <code>notebooks/03_data_parallelism</code></footer>

# %%
from deck import where

where("data parallel")

# %% [markdown] tags=["notes"]
# A checkpoint: who is lost says so now. **Ask:** an all-reduce of 8 MB over 8 devices: what does each send? (14 MB, twice 7/8 of 8.)

# %% [markdown] tags=["slide", "short"] minutes=2 section="Data parallelism"
# ## Data parallelism
#
# Every device holds all weights and sees its own rows. The gradient is an unfinished sum:<br>`d m +dp -> d m`.
#
# <footer>Lesson <code>notebooks/03_data_parallelism</code> · <code>llmpar train --mesh dp=4</code></footer>

# %% tags=["fragment"]
import dataclasses

from llmpar.parallel.mesh import make_mesh, use_devices

use_devices()

import optax
from deck import curves, draw, show

from llmpar.inspect.census import census_hlo, census_table, partitioned_hlo
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.plan.layout import parse_arrow
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.predict import formulas, traffic
from llmpar.predict.hardware import chip
from llmpar.training.step import Step

plan = Plan("dp=4", zero=0)
assert plan.resolve().place("data b s").shard_shape((16, 128), plan.mesh.sizes)[0] == 4  # rows of a device
assert str(plan.resolve().physical("ffn d m -> ffn d m").after) == "d m"
assert [str(move) for move in parse_arrow("d m +dp -> d m").moves] == ["all-reduce over dp"]
show(draw.replicas(devices=4, rows=4))

# %% [markdown] tags=["notes"]
# **Ask:** what must be equal on all devices after the step, and what never needs to be? (Weights and optimizer state; the rows.)
#
# **Misunderstanding:** summing losses that are means. If every device divides by its *own* number of tokens, replicas with
# padding count too much. Divide once, by the tokens of the whole batch: our step sums losses and counts, then divides.
#
# **Source:** Li et al. 2020 (PyTorch Distributed). Lesson 03 lets you repair three broken versions.

# %% [markdown] tags=["slide"] minutes=2
# ## Gradients travel, not weights
#
# A compiled step of a small Llama with `Plan("dp=8", zero=0)`. Averaging *weights* instead gives the same with plain SGD, and
# **something else** with Adam.
#
# <footer>Lesson <code>notebooks/03_data_parallelism</code> · <code>llmpar inspect --mesh dp=8 --zero 0</code></footer>

# %%
import numpy as np

LLAMA, BATCH, SEQ = dataclasses.replace(preset("tiny"), num_layers=2), 16, 32


def make_step(plan):
    return Step(LLAMA, plan, make_mesh(plan.mesh), optax.adamw(1e-3))


plan = Plan("dp=8", zero=0)
step = make_step(plan)
census = census_hlo(partitioned_hlo(step.lower(BATCH, SEQ)), step.mesh)
assert {c.kind for c in census} == {"all-reduce"} and {c.axes for c in census} == {("dp",)}
gradients, scalars = [c for c in census if c.shape != (3,)], [c for c in census if c.shape == (3,)]
assert sorted(c.shape for c in gradients) == sorted(w.shape for w in LLAMA.weights().values())
grad_bytes = sum(c.bytes_sent for c in gradients)
assert (
    grad_bytes
    == formulas.sent_bytes("all-reduce", 4 * LLAMA.num_params, 8)
    == 4 * formulas.zero_elements(LLAMA.num_params, 0, devices=8)
)
assert (
    grad_bytes + sum(c.bytes_sent for c in scalars)
    == traffic.step_traffic(plan.resolve(LLAMA), BATCH, SEQ).total_bytes
)

# One weight, the gradients of two replicas.
w, g = np.float32([1, -2, 3]), np.float32([[0.5, -0.1, 2], [-0.2, 0.4, 1]])


def updated(optimizer, gradient):
    return w + np.asarray(optimizer.update(gradient, optimizer.init(w), w)[0])


def apart(optimizer):
    """How far the mean of the updated weights is from the update by the mean gradient."""
    return np.abs(np.mean([updated(optimizer, x) for x in g], 0) - updated(optimizer, g.mean(0))).max()


assert apart(optax.sgd(0.1)) < 1e-6 < 1e-3 < apart(optax.adam(0.1))
sent = {"weights": [], "gradients": gradients, "loss, tokens, norm": scalars}
show(
    draw.messages([(name, [c.bytes_sent for c in found]) for name, found in sent.items()]),
    "What a device sends in one step, message by message",
)

# %% [markdown]
# $$ 2\,\Psi\,\frac{N-1}{N} \text{ numbers per device and step} $$

# %% [markdown] tags=["notes"]
# **Ask:** a popular explanation says "the replicas synchronise their weights after each step". Where are the weights in this list?
# Nowhere: equal weights and equal gradients give equal updates.
#
# **Misunderstanding:** that averaging weights is the same thing. For SGD it is; Adam divides by the root of the squared
# gradient, and the mean of quotients is not the quotient of means. (Done seldom and on purpose it is called local SGD.)
#
# **Source:** the rows are read from the partitioned HLO of this deck's own step. 2Ψ: Rajbhandari et al. 2020, section 7.1.

# %% [markdown] tags=["slide", "short"] minutes=3
# ## Overlap: send while you compute
#
# The last layers' gradients are ready first. They are sent while the backward pass goes on, and are hidden above $C/\beta$
# tokens per GPU: about **2,200** in an H100 node.
#
# <footer>Austin et al. 2025 (How to Scale Your Model), GPU chapter · a model, not a measurement · lesson <code>notebooks/03_data_parallelism</code></footer>

# %%
h100, llama, TOKENS = chip("h100"), preset("llama3.2-1b"), 4096
block = (
    sum(int(np.prod(w.shape)) for path, w in llama.weights().items() if path.startswith("blocks."))
    // llama.num_layers
)
compute_s = [
    4 * 4 * block * TOKENS / h100.flops_per_s
] * 4  # backward: 4 FLOPs per parameter and token, 4 layers a piece
comm_s = [formulas.collective_seconds(h100, "all-reduce", 2 * 4 * block, 8)] * 4  # bf16
labels = [f"{i}–{i + 3}" for i in (12, 8, 4, 0)]  # layers
# A threshold: published rates.
assert round(formulas.dp_min_tokens(h100.flops_per_s, h100.link_bytes_per_s), -2) == 2200 < TOKENS
assert comm_s[0] < compute_s[0]
show(draw.overlap(compute_s, comm_s, labels))

# %% [markdown] tags=["notes"]
# Llama 3.2 1B, 4,096 tokens per GPU, 8 H100s, bf16 gradients, computing at peak speed, links at the rate large messages reach.
#
# **Ask:** which piece can never hide? The last one: the first layers' gradients are ready when there is nothing left to compute.
#
# **Misunderstanding:** that more GPUs need a larger batch *per GPU* to hide. The threshold is per GPU and stays; it is the global
# batch that grows, until it passes the critical batch size and the extra rows teach little.
#
# **Source:** C FLOP/s, β bytes/s of its links. Threshold C/β at published rates: Austin et al. 2025. With 8 ports of 400 Gb/s per node it is 2,500 between nodes.

# %%
assert round(formulas.dp_min_tokens(h100.flops_per_s, 8 * h100.dcn_bytes_per_s), -2) == 2500

# %% [markdown] tags=["slide"] minutes=2
# ## Measured: replicas over more nodes
#
# Llama 2 7B on 8 to 128 H100s, FSDP in a node and replicas over nodes. Each GPU has four sequences of 4,096. The second node
# costs most; later ones cost less.
#
# <footer>Measured: MaxText, configs of A3 (Apache-2.0), in <code>tests/measured.json</code> · lesson <code>notebooks/03_data_parallelism</code></footer>

# %%
from pathlib import Path

from llmpar.planner import measured
from llmpar.predict.time import step_time

RUNS = [
    case
    for case in measured.read_runs(Path("../tests/measured.json"))[0]
    if case.group == "maxtext.a3.llama2-7b"
]
GPUS = [case.run.mesh.size for case in RUNS]
seconds = {
    "measured": [case.measured["step_s"] for case in RUNS],
    "model": [step_time(case.run).step_s for case in RUNS],
}
assert GPUS == [8, 16, 32, 64, 128]
for ours, theirs in zip(seconds["model"], seconds["measured"], strict=True):
    assert abs(ours / theirs - 1) < 0.11
first, second, *_, last = seconds["measured"]
assert second - first > last - second > 0
curves(
    [("measured", seconds["measured"], "measured", "o", False), ("our model", seconds["model"], "ink", "s", True)],
    GPUS, "H100s", "seconds a step", high=2.2,
)  # fmt: skip

# %% [markdown] tags=["notes"]
# **Ask:** the rows per GPU stay the same. Why does the step grow at all from 8 to 16? Gradients now cross the network between
# hosts, 800 Gb/s a node, and what does not overlap is waited for.
#
# **Misunderstanding:** that each doubling costs the same. A ring sends 2Ψ(N−1)/N: half of it with two nodes, all but a sixteenth
# with sixteen.
#
# **Source:** MaxText's README for Llama 2 7B on A3 (`tests/measured.json` names the file and commit). The model is
# `llmpar.predict.time`, whose constants were fitted on such runs (`tests/measured.md`): from 11 % too fast to 2 % too slow here.

# %% [markdown] tags=["slide"] minutes=2
# ## Buckets and accumulation
#
# `reduce=` sends the same bytes in fewer messages; each message costs its latency. With $u$ microbatches gradients are sent
# **once per step**, if they wait for the end of the step.
#
# <footer>Li et al. 2020 (PyTorch Distributed) · lesson <code>notebooks/03_data_parallelism</code></footer>

# %%
VARIANTS = {
    "layer": dict(reduce="layer"),
    "end": dict(reduce="end"),
    "bucket": dict(reduce="bucket", bucket_bytes=1 << 18),
    "end, u = 2": dict(reduce="end", microbatches=2),
}
pieces, SMALL = (
    {},
    int(formulas.sent_bytes("all-reduce", 3 * 4, 8)),
)  # the loss, the number of tokens, the norm
for name, options in VARIANTS.items():
    step = make_step(Plan("dp=8", zero=0, **options))
    jaxpr = step.run.trace(step.abstract_state, step.abstract_batch(BATCH, SEQ)).jaxpr
    census = census_jaxpr(jaxpr, step.mesh.shape)
    ((key, row),) = census_table(census).items()
    predicted = traffic.step_traffic(step.plan, BATCH, SEQ)[key]
    assert key == ("dp", "all-reduce") and row == {
        "count": predicted.count,
        "bytes_sent": predicted.bytes_sent,
    }
    gradients = [c for c in census if c.shape != (3,)]
    pieces[name] = [c.bytes_sent / c.count for c in gradients for _ in range(c.count)]
    assert sum(pieces[name]) + SMALL == row["bytes_sent"] and len(pieces[name]) + 1 == row["count"]
assert len({sum(sizes) for sizes in pieces.values()}) == 1
assert [len(sizes) for sizes in pieces.values()] == [3 + 9 * LLAMA.num_layers, 12, 2, 12]
every_time = Plan("dp=8", zero=0, reduce="layer", microbatches=2)
assert (
    traffic.step_traffic(every_time.resolve(LLAMA), BATCH, SEQ).total_bytes
    == 2 * sum(pieces["layer"]) + SMALL
)
try:
    every_time.resolve(LLAMA, batch_size=BATCH, seq_len=SEQ)
    raise AssertionError("layer by layer with microbatches should be refused")
except ValueError as refusal:
    assert "once per microbatch" in str(refusal)
show(draw.messages(pieces.items()))

# %% [markdown] tags=["notes"]
# **Ask:** the first row overlaps best, the third has the fewest messages. What would you measure to choose? (Latency against
# bandwidth: time per message is latency + bytes/β. PyTorch's default bucket is 25 MiB.)
#
# **Misunderstanding:** that accumulation saves bytes per step. It saves bytes per *token*: the same gradient carries twice the
# rows. In PyTorch one has to ask for it (`no_sync`); without it, every microbatch communicates. Here `reduce="layer"` with
# microbatches would do that, and is refused. And only the last microbatch's backward pass can hide what is sent.
#
# **Source:** counted in the traced programs of this deck, equal to `llmpar.predict.traffic`. Li et al. 2020, section 3.2.
