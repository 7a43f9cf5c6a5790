# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 35
#     needs: ["01", "03"]
#     objectives:
#     - Say what each ZeRO stage cuts, what it saves and what it sends.
#     - Write the four stages by hand, and read their collectives in the compiled
#       program.
#     - Explain why the stages send different amounts once there are microbatches.
# ---

# %% [markdown]
# # 04 · ZeRO and FSDP: why hold everything everywhere?
#
# Data parallelism keeps a whole copy of the weights, the gradients and the optimizer's state on every device, and most of
# the time nobody looks at most of it. ZeRO (Rajbhandari et al. 2020) cuts these three, one after the other:
#
# | stage | cut over `fsdp` | arrows |
# |---|---|---|
# | 0 | nothing (data parallelism) | gradient `d +fsdp -> d` |
# | 1 | optimizer state | gradient `d +fsdp -> d/fsdp`, updated weight `d/fsdp -> d` |
# | 2 | and gradients | the same, but the gradient is cut *as soon as it exists* |
# | 3 = FSDP | and weights | weight `d/fsdp -> d` before each use; its gradient comes back as `d/fsdp` |
#
# (*Arrow*, *region* and *reading* are explained in the README, under [Words](../README.md#words).)
#
# **Question.** How much memory does each stage save, and what does it cost to send?
#
# Letters: `b` rows of the batch, `d` width of the model, `m` width of a feed-forward, `l` layers, `u` microbatches,
# `N` devices along the axis at hand, `Ψ` parameters.

# %%
from llmpar.mesh import use_devices

devices = use_devices()

# %%
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from llmpar import draw
from llmpar import plan as plan_file
from llmpar.config import preset
from llmpar.draw import scene
from llmpar.exercises import attempt, hint, solution
from llmpar.exercises.lesson import as_table, counting_text, train_steps
from llmpar.inspect.census import (
    arrow_rows,
    arrow_text,
    census_hlo,
    census_table,
    compiled_memory,
    partitioned_hlo,
)
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.mesh import make_mesh, shard_bytes, sharding, spec
from llmpar.notation import parse_layout
from llmpar.plan import Plan
from llmpar.predict import formulas, memory, traffic
from llmpar.predict.hardware import chip
from llmpar.step import Step

# Accelerators round float32 products unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
N = max(n for n in (1, 2, 4, 8) if n <= len(devices))
LAP = (N - 1) / N  # what a ring of N devices sends of each message
mesh = make_mesh(f"fsdp={N}")

# %% [markdown]
# ## A weight's life in one step
#
# This table stands at the top of `llmpar/plan.py`: a line is a ZeRO stage, and its cells say where one weight of a feed-forward,
# `d m`, lies in the course of a step, from *stored* to its finished gradient, *graded*. Where a cell differs from its left
# neighbour something is sent, except that stages 0 to 2 leave the backward pass (after *used*) with open sums and send nothing
# for it; where *graded* differs from *stored*, the updated weight is gathered once more.

# %%
# NBVAL_CHECK_OUTPUT
table = re.search(r"zero  stored.*?(?=\n\n)", plan_file.__doc__, re.S)[0].replace("\n    ", "\n")
print(table)
PARTS = ("stored", "used", "unreduced", "accumulated", "graded")
for line in table.splitlines()[1:]:
    stage, *cells = re.split("  +", line)
    life = Plan("dp=2 fsdp=2 tp=2", zero=int(stage)).life("ffn d m")
    assert [str(getattr(life, part)) for part in PARTS] == cells
    here = Plan("fsdp=2", zero=int(stage)).life("ffn d m")  # as on this lesson's mesh, without dp and tp
    assert [str(getattr(here, part)) for part in PARTS] == [re.sub(r"/tp| \+dp", "", cell) for cell in cells]

# %% [markdown]
# ## One picture
#
# Mixed precision with Adam holds 16 bytes per parameter: 2 for the weight, 2 for its gradient, and 12 for the optimizer (a
# float32 copy of the weight and two moments). This is what a device holds of a model of 7.5 billion parameters when 64
# devices share it. The numbers are `llmpar.predict.formulas.zero_bytes`; the right ends of the bars are the paper's Table 1
# (the picture counts in GiB of 2^30 bytes, the paper in GB of 1e9). The line is what a program may use of an A100 with 80 GB: JAX
# takes three quarters unless told otherwise. In all lessons and slides a device's memory is that *usable* part.

# %%
parts = {
    "weights": dict(param_bytes=2, grad_bytes=0, optim_bytes=0),
    "gradients": dict(param_bytes=0, grad_bytes=2, optim_bytes=0),
    "optimizer": dict(param_bytes=0, grad_bytes=0, optim_bytes=12),
}
rows = [
    (
        f"stage {stage}",
        {part: formulas.zero_bytes(7.5e9, 64, stage, **sizes) for part, sizes in parts.items()},
    )
    for stage in range(4)
]
scene.show(
    draw.memory_bars(
        rows,
        capacity_bytes=chip("a100-80").usable_bytes,
        title="7.5B parameters, 64 devices: model state per device",
    )
)

# %%
# NBVAL_CHECK_OUTPUT
published_gb = {
    4: (52.5, 41.3, 30.0),
    16: (35.6, 21.6, 7.5),
    64: (31.4, 16.6, 1.88),
    256: (30.4, 15.4, 0.47),
    1024: (30.1, 15.1, 0.12),
}
print("GB per device    stage 1  stage 2  stage 3   (Table 1 of the paper: 7.5B parameters)")
for num_devices, expected in published_gb.items():
    ours = [formulas.zero_bytes(7.5e9, num_devices, stage) / 1e9 for stage in (1, 2, 3)]
    assert all(abs(x - y) <= 0.03 * y for x, y in zip(ours, expected, strict=True))
    print(f"{num_devices:5} devices   " + "".join(f"{x:9.2f}" for x in ours))
print("all within 3 % of the paper, which rounds")

# %% [markdown]
# ## Predict
#
# The toy below has 4 layers of 32 × 32 weights in float32: Ψ = 4096 parameters, 16,384 bytes. On a ring of N devices a
# reduce-scatter or an all-gather sends (N-1)/N of a message, an all-reduce twice that.
#
# **How many bytes does one device send per step at stage 3?** There every layer's weight is gathered before it is used, and
# thrown away. Replace the dots by a number, or by a formula with `N`.

# %%
bytes_at_stage_3 = ...
attempt("04.stage3_bytes", bytes_at_stage_3, devices=N)

# %% [markdown]
# And the table that decides what you can train. **A model of 7 billion parameters, mixed precision with Adam, on a node with 4
# A100 of 40 GB:** how many GB (1e9 bytes) of model state does a device hold at each stage? Which stages leave room for anything
# else?

# %%
memory_gb = {0: ..., 1: ..., 2: ..., 3: ...}
attempt("04.memory_table", memory_gb)

# %% [markdown]
# ## Run: four trainings by hand
#
# No package here, only `lax` inside `jax.shard_map`: what you read is what one device does. The model is a stack of
# `tanh(x @ w)`, the optimizer is Adam. Adam looks at one element at a time. That is why a device can update its share of
# the weights without seeing the rest, and why stages 1 to 3 exist.

# %%
L, D, ROWS, RATE, STEPS = 4, 32, 16, 3e-3, 5


def layer(w, x):
    return jnp.tanh(x @ w)


def error(x, y):
    return ((x - y) ** 2).sum() / (ROWS * D)  # divided by the whole batch: the devices' parts add up


def loss(weights, x, y):
    return error(lax.scan(lambda x, w: (layer(w, x), None), x, weights)[0], y)


def adam(w, g, m, v, t):
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return w - RATE * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.99**t)) + 1e-8), m, v


def my_block(w):
    """This device's rows of every layer: `l d m -> l d/fsdp m`. Nothing moves."""
    return lax.dynamic_slice_in_dim(w, lax.axis_index("fsdp") * (D // N), D // N, axis=1)


# %% [markdown]
# `lax.pcast(w, "fsdp", to="varying")` says: from here on, treat the weight as this device's own. Without it, `jax.grad` would
# sum the gradient over devices by itself, and we want to see who does that, and how.


# %%
def stage0(w, m, v, t, x, y):
    mine = lax.pcast(w, "fsdp", to="varying")
    value, g = jax.value_and_grad(loss)(mine, x, y)
    g = lax.psum(g, "fsdp")  # l d m +fsdp -> l d m
    return *adam(w, g, m, v, t), lax.psum(value, "fsdp")


def stage1(w, m, v, t, x, y):
    mine = lax.pcast(w, "fsdp", to="varying")
    value, g = jax.value_and_grad(loss)(mine, x, y)
    g = lax.psum_scatter(g, "fsdp", scatter_dimension=1, tiled=True)  # l d m +fsdp -> l d/fsdp m
    block, m, v = adam(my_block(w), g, m, v, t)  # a share of the work, a share of the state
    w = lax.all_gather(block, "fsdp", axis=1, tiled=True, to="invarying")  # l d/fsdp m -> l d m
    return w, m, v, lax.psum(value, "fsdp")


def stage2(w, m, v, t, x, y):
    mine, pulls, shards = lax.pcast(w, "fsdp", to="varying"), [], []
    for l in range(L):  # forward, keeping what the backward pass needs
        x, pull = jax.vjp(layer, mine[l], x)
        pulls.append(pull)
    value, g_x = jax.value_and_grad(error)(x, y)
    for pull in reversed(pulls):  # backward: a layer's whole gradient lives for one line
        g, g_x = pull(g_x)
        shards.append(lax.psum_scatter(g, "fsdp", scatter_dimension=0, tiled=True))  # d m +fsdp -> d/fsdp m
    block, m, v = adam(my_block(w), jnp.stack(shards[::-1]), m, v, t)
    w = lax.all_gather(block, "fsdp", axis=1, tiled=True, to="invarying")
    return w, m, v, lax.psum(value, "fsdp")


def stage3(w, m, v, t, x, y, gather_again=True):
    def gathered_layer(shard, x):
        return layer(lax.all_gather(shard, "fsdp", axis=0, tiled=True), x)  # d/fsdp m -> d m

    # Keep nothing: gather again in the backward.
    use = jax.checkpoint(gathered_layer) if gather_again else gathered_layer

    def sharded_loss(shards, x, y):
        return error(lax.scan(lambda x, shard: (use(shard, x), None), x, shards)[0], y)

    # `g` is a shard: no reduce-scatter is written anywhere.
    value, g = jax.value_and_grad(sharded_loss)(w, x, y)
    return *adam(w, g, m, v, t), lax.psum(value, "fsdp")


# %% [markdown]
# Stage 3 has no reduce-scatter in its text, and yet there will be one in its program: **the gradient of a gather is a
# reduce-scatter.** A weight was copied to everybody, so its gradient is the sum of what everybody has to say, and each
# device needs that sum for its own block alone.
#
# %%
scene.show(draw.arrow("d m +fsdp -> d/fsdp m", (D, D), mesh.shape, itemsize=4))

# %% [markdown]
# Every device has computed a whole gradient from its own rows of the batch (hatched: the sum over devices is not done yet). After
# the reduce-scatter each has one block, finished.
#
# Now the programs. A layout says where each array lives; the rest is the same for all four.

# %%
HAND = {0: stage0, 1: stage1, 2: stage2, 3: stage3}
WEIGHT_AT = {0: "l d m", 1: "l d m", 2: "l d m", 3: "l d/fsdp m"}
MOMENT_AT = {0: "l d m", 1: "l d/fsdp m", 2: "l d/fsdp m", 3: "l d/fsdp m"}

rng = np.random.default_rng(0)
W = (rng.standard_normal((L, D, D)) / D**0.5).astype(np.float32)
X, Y = (rng.uniform(-1, 1, (ROWS, D)).astype(np.float32) for _ in range(2))


def prepare(function, stage):
    """Place the arrays as the stage wants them; compile one step; return the lowered and the compiled
    program."""
    places = [
        parse_layout(text)
        for text in (WEIGHT_AT[stage], MOMENT_AT[stage], MOMENT_AT[stage], "whole", "b/fsdp d", "b/fsdp d")
    ]
    arrays = [
        jax.device_put(a, sharding(mesh, p))
        for a, p in zip((W, 0 * W, 0 * W, np.float32(1), X, Y), places, strict=True)
    ]
    specs = [spec(p) for p in places]
    step = jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=(*specs[:3], specs[3]))
    )
    lowered = step.lower(*arrays)
    return arrays, lowered, lowered.compile()


def train(arrays, compiled):
    w, m, v, t, x, y = arrays
    losses = []
    for number in range(1, STEPS + 1):
        w, m, v, value = compiled(w, m, v, jax.device_put(np.float32(number), t.sharding), x, y)
        losses.append(float(value))  # reading the loss each step also keeps simulated devices together
    return losses, (w, m, v)


def one_device():
    @jax.jit
    def step(w, m, v, t):
        value, g = jax.value_and_grad(loss)(w, X, Y)
        return *adam(w, g, m, v, t), value

    w, m, v, losses = W, 0 * W, 0 * W, []
    for number in range(1, STEPS + 1):
        w, m, v, value = step(w, m, v, np.float32(number))
        losses.append(float(value))
    return losses, w


reference_losses, reference_w = one_device()
programs = {stage: prepare(function, stage) for stage, function in HAND.items()}
results = {stage: train(arrays, compiled) for stage, (arrays, _, compiled) in programs.items()}
print("losses on one device:", " ".join(f"{x:.4f}" for x in reference_losses))

# %% [markdown]
# ## Compare: four verdicts
#
# **Value.** The four trainings are the same training.

# %%
for stage, (losses, (w, _, _)) in results.items():
    assert np.allclose(losses, reference_losses, rtol=1e-5), f"stage {stage}: {losses}"
    assert np.allclose(w, reference_w, atol=1e-4), f"stage {stage}: the weights after {STEPS} steps differ"
print(f"value: {STEPS} losses and the weights after them equal those of one device, at stages 0, 1, 2 and 3")

# %% [markdown]
# **Sharding.** Each array still lies where its layout says, after five steps.

# %%
for stage, (_, arrays) in results.items():
    for array, text in zip(arrays, (WEIGHT_AT[stage], MOMENT_AT[stage], MOMENT_AT[stage]), strict=True):
        promised = parse_layout(text).shard_shape(array.shape, mesh.shape)
        assert {shard.data.shape for shard in array.addressable_shards} == {promised}, (
            f"stage {stage}: {text}"
        )
print(
    f"sharding: of {W.shape} a device holds {(L, D // N, D)} of the moments from stage 1 on, of the weights"
    " at stage 3"
)

# %% [markdown]
# **Communication.** We predict kinds, counts and bytes, then read them out of the program that XLA's partitioner hands on.
# `formulas.zero_elements` is the formula of the ZeRO paper, section 7: 2Ψ, 2Ψ, 2Ψ, 3Ψ.

# %%
PSI_BYTES = 4 * W.size
expected_counts = {
    0: {"all-reduce": 1},
    1: {"reduce-scatter": 1, "all-gather": 1},
    2: {"reduce-scatter": L, "all-gather": 1},
    3: {"reduce-scatter": L, "all-gather": 2 * L},
}
# Everybody learns the loss: one more all-reduce, of 4 bytes.
loss_bytes = formulas.sent_bytes("all-reduce", 4, N)
found = {stage: census_hlo(partitioned_hlo(lowered), mesh) for stage, (_, lowered, _) in programs.items()}
for stage, census in found.items():
    state = [c for c in census if c.shape != ()]
    counts = {kind: sum(c.count for c in state if c.kind == kind) for kind in {c.kind for c in state}}
    assert counts == (expected_counts[stage] if N > 1 else {}), f"stage {stage}: {counts}"
    assert sum(c.bytes_sent for c in state) == 4 * formulas.zero_elements(W.size, stage, devices=N)
    assert (
        sum(c.bytes_sent for c in census) == 4 * formulas.zero_elements(W.size, stage, devices=N) + loss_bytes
    )
    volume = sum(c.bytes_sent for c in state) / (PSI_BYTES * LAP) if N > 1 else 0
    print(
        f"stage {stage}: {volume:.0f}Ψ sent as",
        ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "nothing: one device",
    )
print(
    "communication: kinds, counts and bytes are as predicted; there is no all-reduce of gradients from stage"
    " 1 on"
)

# %% [markdown]
# An all-reduce *is* a reduce-scatter followed by an all-gather. Stage 1 puts the update between the two halves; that is why it
# costs nothing to send. Stage 3 pays one gather more, since the backward pass needs the weights a second time.
#
# Stages 1 and 2 send the same here. They differ in when: stage 1 holds all gradients of all layers until the end, stage 2 one
# layer's. We shall see below when that becomes a difference in bytes.
#
# **Memory.** What a device is given: weights, two moments, its rows of the batch, the step's number.

# %%
for stage, (_, _, compiled) in programs.items():
    weights, moments = (
        shard_bytes(parse_layout(place[stage]), W.shape, 4, mesh.shape) for place in (WEIGHT_AT, MOMENT_AT)
    )
    predicted = weights + 2 * moments + 2 * X.nbytes // N + 4
    assert compiled_memory(compiled)["argument_bytes"] == predicted
    print(
        f"stage {stage}: {weights:6,} B of weights + {2 * moments:6,} B of moments, {predicted:6,} B of"
        " arguments in all"
    )
print(
    f"memory: argument bytes per device are as predicted; the moments take 1/{N} of stage 0's from stage 1 on"
)

# %% [markdown]
# ## Picture of the compiled programs
#
# Drawn from what was read above: predicted beside compiled.

# %%
bars = [
    {
        "axis": "fsdp",
        "kind": f"{kind} (stage {stage})",
        "count": counts[kind],
        "predicted_bytes": round(
            formulas.sent_bytes(kind, PSI_BYTES, N) * (2 if stage == 3 and kind == "all-gather" else 1)
        ),
        "compiled_bytes": sum(c.bytes_sent for c in found[stage] if c.kind == kind and c.shape != ()),
    }
    for stage, counts in expected_counts.items()
    for kind in counts
]
scene.show(draw.collectives(bars))

# %% [markdown]
# ## The same for a Llama
#
# Now the package: a Llama of 2 layers, trained by `llmpar.step.Step` with AdamW. Its model text names no mesh axis;
# `Plan(mesh, zero=…)` is all that changes.

# %%
LLAMA = dataclasses.replace(preset("tiny"), num_layers=2)
BATCH, SEQ = 16, 16
TEXT = counting_text(BATCH, SEQ)


def train_llama(plan):
    """Compile the step and train: the step, its lowered and its compiled program, the last state, losses."""
    step = Step(LLAMA, plan, make_mesh(plan.mesh), optax.adamw(3e-3))
    lowered = step.lower(BATCH, SEQ)
    compiled = lowered.compile()
    return step, lowered, compiled, *train_steps(step, compiled, TEXT, STEPS)


*_, solo_losses = train_llama(Plan("dp=1", zero=0))
llamas = {zero: train_llama(Plan(f"fsdp={N}", zero=zero)) for zero in range(4)}
print("losses on one device:", " ".join(f"{x:.3f}" for x in solo_losses))

# %%
for zero, (*_, losses) in llamas.items():
    assert np.allclose(losses, solo_losses, rtol=1e-4), f"stage {zero}: {losses}"
print(f"value: {STEPS} losses equal those of one device, at stages 0, 1, 2 and 3")

for step, _, _, state, _ in llamas.values():
    adam_state = state.optimizer[0]
    for tree, places in (
        (state.params, step.stored),
        (adam_state.mu, step.graded),
        (adam_state.nu, step.graded),
    ):
        promised = jax.tree.map(lambda x, layout: layout.shard_shape(x.shape, mesh.shape), tree, places)
        held = jax.tree.map(lambda x: x.addressable_shards[0].data.shape, tree)
        assert held == promised
print(
    "sharding: every weight and every moment lies as the plan promises; for instance blocks.ffn.gate is"
    " stored"
)
for zero, (step, *_) in llamas.items():
    print(
        f"  stage {zero}: weight '{step.stored['blocks']['ffn']['gate']}', moments"
        f" '{step.graded['blocks']['ffn']['gate']}'"
    )

# %%
for zero, (step, lowered, _, _, _) in llamas.items():
    predicted = traffic.step_traffic(LLAMA, step.plan, BATCH, SEQ)
    census = census_hlo(partitioned_hlo(lowered), step.mesh)
    compiled_table = census_table(census)
    assert compiled_table == as_table(predicted)
    print(
        f"stage {zero}:",
        "; ".join(f"{kind} ×{row.count} {row.bytes_sent:,} B" for (_, kind), row in sorted(predicted.items()))
        or "nothing",
    )
print("communication: kinds, counts and bytes per device and step are as predicted")

# %% [markdown]
# Which line of the model sends what? In stage 3 a block's weight is gathered forward, gathered again for the backward pass (JAX counts that
# as recomputed), and its gradient is scattered backward: three times the weight's bytes under one name. The embedding and the head are
# used where the forward pass begins and ends, so nobody gathers them twice.

# %%
print(arrow_text(census))
scene.show(draw.arrows_sent(arrow_rows(census)))
assert sum(row["bytes_sent"] for row in arrow_rows(census)) == predicted.total_bytes
for name in ("ffn d m", "attention n h d"):
    passes = {c.direction: c.bytes_sent for c in census if c.arrow == name}
    assert N == 1 or set(passes) == {"forward", "recomputed", "backward"}, passes

# %%
optimizer_bytes = {}
for zero, (step, _, compiled, state, _) in llamas.items():
    predicted = memory.argument_bytes(LLAMA, step.plan, BATCH, SEQ)
    assert compiled_memory(compiled)["argument_bytes"] == sum(predicted.values())
    optimizer_bytes[zero] = sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.optimizer) if x.ndim
    )
    assert optimizer_bytes[zero] == predicted["optimizer"]
    print(
        f"stage {zero}: weights {predicted['params']:7,} B, optimizer {predicted['optimizer']:7,} B, all"
        f" arguments {sum(predicted.values()):9,} B"
    )
assert all(optimizer_bytes[0] == N * optimizer_bytes[zero] for zero in (1, 2, 3))
print(
    f"memory: argument bytes per device are as predicted; the optimizer's bytes are divided by exactly {N}"
    " from stage 1 on"
)
if devices[0].platform == "cpu" and N > 1:
    temporaries = [compiled_memory(compiled)["temp_bytes"] for _, _, compiled, _, _ in llamas.values()]
    assert temporaries[3] < temporaries[0]
    print("temporaries: stage 3 needs less than stage 0, whose gradients are whole")

# %% [markdown]
# ## With microbatches the stages part
#
# Accumulation runs `u` microbatches before one update. Now *when* a gradient is cut matters:
#
# * stages 0 and 1 add up whole gradients and communicate once: **2Ψ**;
# * stage 2 holds only shards, so each microbatch's gradient is reduce-scattered before it is added: **(u+1)Ψ**;
# * stage 3 gathers twice and scatters once for each microbatch: **3uΨ**.
#
# Stage 2 is often called the balance of memory and communication. With accumulation it is the balance of a price, too.
#
# One honest detail. In our step the embedding, the output head and the last norm are gathered once per microbatch, not twice: the
# forward pass ends where the backward pass begins, so they are still there; and of a block's norms only what their scales were
# broadcast to is kept, so these are not gathered twice either. They cost 2uΨ at stage 3. The assertions count the two parts
# separately. (`llmpar/predict/traffic.py` counts so too; in a large model the blocks are nearly everything.)

# %%
twice = sum(
    int(np.prod(weight.shape))
    for path, weight in LLAMA.weights().items()
    if path.startswith("blocks.") and len(weight.shape) > 2
)
once = LLAMA.num_params - twice
print(f"Ψ = {LLAMA.num_params:,} parameters: {twice:,} in matrices of blocks, {once:,} elsewhere")
print("sent in a step   " + "".join(f"{f'u={u}':>12}" for u in (1, 2, 4)))
for zero in range(4):
    line = []
    for u in (1, 2, 4):
        plan = Plan(f"fsdp={N}", zero=zero, microbatches=u)
        step = Step(LLAMA, plan, mesh, optax.adamw(3e-3))
        predicted = traffic.step_traffic(LLAMA, plan, 4 * N, SEQ)
        if u > 1:  # a loop over microbatches: the census multiplies what is inside by its length
            traced = step.run.trace(step.abstract_state, step.abstract_batch(4 * N, SEQ)).jaxpr
            read = census_table(census_jaxpr(traced, mesh.shape))
            assert read == as_table(predicted)
        scalars = int(formulas.sent_bytes("all-reduce", 3 * 4, N))  # loss, tokens and norm, in one message
        less = 2 * u if zero == 3 else formulas.zero_elements(1, zero, u)
        assert predicted.total_bytes - scalars == 4 * LAP * (
            formulas.zero_elements(twice, zero, u) + less * once
        )
        line.append(formulas.zero_elements(1, zero, u))
    print(f"stage {zero}          " + "".join(f"{f'{factor:g}Ψ':>12}" for factor in line))
print(
    "communication: formula = prediction for every u = traced program where u > 1, in kind, count and bytes"
)

# %% [markdown]
# ### Exercise (stretch): make stage 2 from stage 1
#
# Here is the sum over microbatches of stage 1. `gradient(part)` is this device's whole gradient `d m` of one microbatch. Write
# stage 2's: it must return the same shard, `d/fsdp m`, and never add up anything whole. Your function is run for four devices,
# and what it sends is counted.


# %%
def stage1_accumulated(gradient, parts):
    total = sum(gradient(part) for part in parts)
    return lax.psum_scatter(total, "fsdp", scatter_dimension=0, tiled=True)


def stage2_accumulated(gradient, parts): ...


attempt("04.stage2_accumulated", stage2_accumulated)

# %% [markdown]
# ## Gather again, or gather once and keep?
#
# FSDP may keep a gathered weight until the backward pass has used it. That saves a third of the traffic and gives back the
# memory that stage 3 had saved. By hand it is one word, `jax.checkpoint`; in the package it is `Plan.reshard_after_forward`.

# %%
keep_arrays, keep_lowered, keep_compiled = prepare(lambda *args: stage3(*args, gather_again=False), 3)
again_temp, keep_temp = (compiled_memory(c)["temp_bytes"] for c in (programs[3][2], keep_compiled))
kept = [c for c in census_hlo(partitioned_hlo(keep_lowered), mesh) if c.shape != ()]
assert np.allclose(train(keep_arrays, keep_compiled)[0], reference_losses, rtol=1e-5)
assert sum(c.bytes_sent for c in kept) == 2 * PSI_BYTES * LAP
assert sum(c.count for c in kept if c.kind == "all-gather") == (L if N > 1 else 0)
print("by hand: again sends 3Ψ, keep sends 2Ψ; the losses are the same")
if N > 1:
    assert keep_temp > again_temp
    print(
        f"temporaries: keep needs more than again, by {(keep_temp - again_temp) / PSI_BYTES:.2f} Ψ (the"
        " compiler's plan for this device)"
    )

for reshard in (True, False):
    plan = Plan(f"fsdp={N}", zero=3, reshard_after_forward=reshard)
    step = Step(LLAMA, plan, mesh, optax.adamw(3e-3))
    traced = step.run.trace(step.abstract_state, step.abstract_batch(BATCH, SEQ)).jaxpr
    predicted = traffic.step_traffic(LLAMA, plan, BATCH, SEQ)
    assert census_table(census_jaxpr(traced, mesh.shape)) == as_table(predicted)
    gathers = predicted.get(("fsdp", "all-gather"), traffic.Prediction()).count
    print(
        f"the Llama with reshard_after_forward={reshard}: {gathers} all-gathers, {predicted.total_bytes:,} B in all, as"
        " predicted"
    )

# %% [markdown]
# ### Exercise (expert): bytes against memory
#
# Ψ weights in blocks, many devices, `u = 4` microbatches in a step. Three policies: gather `again` in each backward pass; `keep`
# until the end of the microbatch; `keep all step`, until the update. For each: how many Ψ elements does a device send per step,
# and how many Ψ of gathered weights does it still hold when the forward pass ends? What does the last policy remind you of?

# %%
policies = {"again": (..., ...), "keep": (..., ...), "keep all step": (..., ...)}
attempt("04.keep_or_gather", policies)

# %% [markdown]
# ## Offload: the host's memory as one more place
#
# The optimizer's state is touched once per step. ZeRO-Offload (Ren et al. 2021) keeps it in the host's memory: each step,
# gradients go down and updated weights come up, 2 + 2 bytes per parameter of a device's share, over PCIe. Simulated devices
# have no PCIe, so here it is a cost and not a run. PCIe 4.0 × 16 carries 16 GT/s × 16 lanes × 128/130 = 31.5 GB/s each way;
# the two ways can overlap, which we do not count on.

# %%
# NBVAL_CHECK_OUTPUT
params, num_devices, a100 = 7e9, 4, chip("a100-40")
pcie_bytes_per_s = 16e9 * 16 * 128 / 130 / 8
moved = (2 + 2) * params / num_devices
assert (
    formulas.zero_bytes(params, 4, 2, optim_bytes=0) < a100.usable_bytes < formulas.zero_bytes(params, 4, 2)
)
freed = 12 * params / num_devices
print(
    f"7B on 4 A100-40 at stage 2: {formulas.zero_bytes(params, 4, 2) / 1e9:.1f} GB of state, of"
    f" {a100.hbm_bytes / 1e9:.0f} GB a program may use {a100.usable_bytes / 1e9:.0f}"
)
print(
    f"optimizer on the host: {formulas.zero_bytes(params, 4, 2, optim_bytes=0) / 1e9:.1f} GB stay,"
    f" {freed / 1e9:.0f} GB per device go to the host"
)
print(
    f"price: {moved / 1e9:.0f} GB per step over PCIe, at least {moved / pcie_bytes_per_s:.2f} s, and Adam"
    " runs on the host's processor"
)
for batch_tokens in (16_384, 131_072):
    compute_s = formulas.train_seconds(params, batch_tokens, num_devices, 0.5 * a100.flops_per_s)
    print(
        f"a step of {batch_tokens:,} tokens at half of the peak: {compute_s:.1f} s of computing, PCIe is"
        f" {moved / pcie_bytes_per_s / compute_s:.0%} of that"
    )

# %% [markdown]
# The batch decides, as so often: the traffic of a step does not depend on it.
#
# ## Where XLA's partitioner differs
#
# We wrote the collectives. The other way is to say only where arrays live and let XLA's partitioner choose: `reading="auto"`, or
# `jax.jit` with shardings. The value is the same, the memory is the same. What is sent is another matter.

# %%
auto_step, auto_lowered, auto_compiled, auto_state, auto_losses = train_llama(
    Plan(f"fsdp={N}", zero=3, reading="auto")
)
assert np.allclose(auto_losses, solo_losses, rtol=1e-4)
assert compiled_memory(auto_compiled)["argument_bytes"] == compiled_memory(llamas[3][2])["argument_bytes"]
print("value and memory: Auto equals Manual")
auto = census_table(census_hlo(partitioned_hlo(auto_lowered), mesh))
manual = traffic.step_traffic(LLAMA, llamas[3][0].plan, BATCH, SEQ)
for name, table in (("manual", as_table(manual)), ("auto", auto)):
    for (_, kind), row in sorted(table.items(), key=lambda item: -item[1]["bytes_sent"]):
        print(f"{name:>7}: {kind:<15} ×{row['count']:<4}{row['bytes_sent']:>12,} B")
if devices[0].platform == "cpu" and N > 1:
    assert not any(kind == "reduce-scatter" for _, kind in auto)
    assert sum(row["bytes_sent"] for row in auto.values()) > manual.total_bytes
    print(
        "communication: on simulated devices Auto never forms a reduce-scatter, and it sends more than stage"
        " 3 needs"
    )

# %% [markdown]
# The partitioner for CPUs sums whole gradients (an all-reduce), then cuts them. In other shapes it may even move
# activations instead of weights. The GPU compiler does form reduce-scatters. So read the program of *your* back end before you
# believe a table, this one included.
#
# ## Summary
#
# 1. ZeRO cuts what replicas hold in common: the optimizer's state (1), gradients (2), weights (3).
# 2. An all-reduce is a reduce-scatter and an all-gather. Stage 1 updates between the two, for free.
# 3. The gradient of a gather is a reduce-scatter: stage 3 needs no communication code in its backward pass.
# 4. A step sends 2Ψ, 2Ψ, 2Ψ, 3Ψ; with `u` microbatches 2Ψ, 2Ψ, (u+1)Ψ, 3uΨ.
# 5. Activations are not touched by any stage. For these: recompute (lesson 01), or cut the model itself (lesson 05).
#
# ## On your cluster
#
# Ask before you train. `inspect` compiles the step and runs nothing:
#
#     llmpar inspect --mesh "fsdp=-1" --zero 2 --microbatches 2
#     llmpar inspect --mesh "fsdp=-1" --zero 3 --no-reshard-after-forward
#     llmpar inspect --mesh "fsdp=-1" --zero 3 --reading auto
#     llmpar train --model llama3.2-1b --mesh "fsdp=-1" --remat block --dtype bfloat16 --batch-size 16 --seq-len 2048 --data "corpus/*.jsonl" --tokenizer tokenizer.json
#
# With several nodes, `dp` between the nodes and `fsdp` inside: `--mesh "dp=4 fsdp=4"`. Gradients are then reduce-scattered on the
# fast links first, and only a shard is all-reduced on the slow ones.
#
# **One number to remember: 16 bytes per parameter,** and 3Ψ elements per step to hold only 16/N of them.
