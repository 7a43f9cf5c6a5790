# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 35
#     needs: ["01", "03"]
#     question: How much memory does each ZeRO stage save, and what does it cost to send?
#     objectives:
#     - Say what each ZeRO stage cuts, what it saves and what it sends.
#     - Follow stages 0, 1 and 3 written by hand, write stage 2's sum, and read their
#       collectives in the compiled program.
#     - Explain why the stages send different amounts once there are microbatches.
# ---

# %% [markdown]
# # 04 · 8B does not fit on 8 GPUs. What can be cut?
#
# To train Llama 3 8B, a GPU holds weights, gradients, Adam's state and activations: twice as much as fits. Eight GPUs do not
# help: in data parallelism each of them holds a copy of everything. Which parts can be cut, and what does a cut cost to send?

# %% tags=["plumbing"]
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # simulated devices; real ones: On your cluster

from llmpar.parallel.mesh import use_devices

devices = use_devices()

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from llmpar import draw
from llmpar.draw.scene import show
from llmpar.explore.small import MemoryExplorer
from llmpar.inspect.census import (
    arrow_rows,
    arrow_text,
    census_hlo,
    census_table,
    compiled_memory,
    read_program,
)
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.lessons import attempt, hint, met, opened, say, solution
from llmpar.lessons.lesson import (
    as_predicted,
    as_table,
    counting_text,
    train_on,
    verdicts,
)
from llmpar.parallel.mesh import make_mesh, shard_bytes, sharding, spec
from llmpar.plan.layout import parse_layout
from llmpar.plan.model_config import LoraConfig
from llmpar.plan.plan import Plan, WeightLayouts
from llmpar.plan.presets import preset
from llmpar.predict import formulas, memory, traffic
from llmpar.predict.hardware import chip
from llmpar.training.step import Step

# Accelerators round float32 matmuls unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
N = len(devices)  # 8
LAP = (N - 1) / N  # what a ring of N devices sends of each message
mesh = make_mesh(f"fsdp={N}")
BYTES = {
    "weights": dict(param_bytes=2, grad_bytes=0, optim_bytes=0),
    "gradients": dict(param_bytes=0, grad_bytes=2, optim_bytes=0),
    "optimizer": dict(param_bytes=0, grad_bytes=0, optim_bytes=12),
}


LLAMA8 = preset("llama3-8b")
PARAMS = LLAMA8.num_params


def held(stage, num_devices=8, params=PARAMS):
    """Bytes of a device at a ZeRO stage, by part."""
    size = lambda part: formulas.zero_bytes(params, num_devices, stage, **BYTES[part])
    return {part: size(part) for part in BYTES}


h100 = chip("h100")
# One sequence of 8,192 tokens; of each layer only its input is kept, in bfloat16.
ACTIVATIONS = 2 * LLAMA8.num_layers * 8192 * LLAMA8.width


# %% tags=["plumbing"]
bars = [("1 GPU", held(0, 1)), ("each of 8 GPUs", held(0, 8))]
bars = [(name, parts | {"activations": ACTIVATIONS}) for name, parts in bars]
title = "Llama 3 8B: memory of a GPU, data parallel"
show(draw.memory_bars(bars, h100.usable_bytes, title))

# %% [markdown]
# Each parameter has 16 bytes (lesson 01): 2 for the weight, 2 for its gradient, and 12 for the *optimizer* (a float32 copy of the
# weight, and two *moments*). Activations are 2 GiB: one sequence of 8,192 tokens, of which the input of each layer is kept. The
# line, 59.3 GiB, is what a program may use of an H100.
#
# ## When is each part used?
#
# The picture is one device in one step:

# %% tags=["plumbing"]
show(draw.zero_strips(stages=[0]))

# %% [markdown]
# Adam's moments are used once in a step: in the update. And Adam updates each number without looking at others, so a device can
# update a *part* of the weights.
#
# *ZeRO* (Rajbhandari et al. 2020) has three stages, along the mesh axis `fsdp`. We call plain data parallelism stage 0:
#
# - stage 0 cuts nothing;
# - stage 1 (ZeRO-1) cuts the optimizer's state: each of N devices holds 1/N of it;
# - stage 2 cuts the gradients, too;
# - stage 3 cuts the weights, too. It is also called *FSDP*, fully sharded data parallelism.
#
# ## Predict: what does each device hold?
#
# **A model of 7 billion parameters, mixed precision with Adam, four A100 of 40 GB:** how many GB (1e9 bytes) of weights, gradients and
# optimizer state does a device hold at each stage? (A program may use three quarters of each GPU, 31.7 GB.)

# %%
memory_gb = {0: ..., 1: ..., 2: ..., 3: ...}
attempt("04.memory_table", memory_gb)

# %% tags=["plumbing"]
bars = [(f"stage {stage}", held(stage)) for stage in range(4)]
bars = [(name, parts | {"activations": ACTIVATIONS}) for name, parts in bars]
title = "Llama 3 8B on eight H100s: memory of each"
four = [(f"stage {stage}", held(stage, 4, 7e9)) for stage in range(4)]
if opened("04.memory_table"):
    show(draw.memory_bars(four, chip("a100-40").usable_bytes, "7B on four A100s"))
    show(draw.memory_bars(bars, h100.usable_bytes, title))
sevens = [formulas.zero_bytes(7e9, 4, stage) for stage in range(4)]
met("04.memory_table", {stage: held / 1e9 for stage, held in enumerate(sevens)}, "GB:")

# %% tags=["plumbing"]
sizes = [sum(parts.values()) for _, parts in bars]
assert sizes[0] > 1.9 * h100.usable_bytes and max(sizes[1:]) < h100.usable_bytes
assert ACTIVATIONS == 2 * 2**30
a100 = chip("a100-40")  # the first bet's: only stage 3 fits
assert sevens[3] < a100.usable_bytes < min(sevens[:3])
assert round((a100.usable_bytes - sevens[3]) / 1e9, 1) == 3.7

# %% [markdown]
# (The bars count GiB: 112 GB are 104 GiB.) On the four A100s 7B needs stage 3. On eight H100s, which are larger, stage 1 is enough for 8B.
# No stage cuts activations.
#
# ## Predict: what does each device send?
#
# We count what is sent in units of Ψ, the number of parameters. A reduce-scatter or an all-gather of the whole model sends **Ψ**
# from each device, an all-reduce **2Ψ** (lesson 02; to be exact, times (N − 1)/N). Stage 0 sums gradients by an all-reduce. At stage 3
# each layer's weights are gathered before they are used, forward and backward, and thrown away after each use. **How many Ψ does a
# device send in a step?**

# %%
sent_in_psi = {0: 2, 1: ..., 2: ..., 3: ...}
attempt("04.sent", sent_in_psi)

# %% tags=["plumbing"]
if opened("04.sent"):
    show(draw.zero_strips())

# %% [markdown]
# ## Stage 0: all-reduce, then update
#
# We write the stages with JAX's own functions. The model is four layers of `tanh(x @ w)`: 4 × 32 × 32 weights in float32. A
# function in `jax.shard_map` is what one device does. (Adam's formula, `adam`, is folded below. `pcast` gives each device its
# own copy to differentiate: [lesson 03](03_data_parallelism.ipynb) has a picture.)

# %% tags=["plumbing"]
L, D, ROWS, RATE, STEPS = 4, 32, 16, 3e-3, 5


def layer(w, x):
    return jnp.tanh(x @ w)


def error(x, y):
    return ((x - y) ** 2).sum() / (ROWS * D)  # of the whole batch: the parts add up


def loss(weights, x, y):
    # lax.scan: a loop over the layers
    return error(lax.scan(lambda x, w: (layer(w, x), None), x, weights)[0], y)


def adam(w, g, m1, m2, t):
    m1, m2 = 0.9 * m1 + 0.1 * g, 0.99 * m2 + 0.01 * g * g
    up = (m1 / (1 - 0.9**t)) / (jnp.sqrt(m2 / (1 - 0.99**t)) + 1e-8)
    return w - RATE * up, m1, m2


# %%
def own_gradient(w, x, y):
    """The loss and the gradient of this device's rows, before any sum."""
    w = lax.pcast(w, "fsdp", to="varying")
    return jax.value_and_grad(loss)(w, x, y)


def stage0(w, m1, m2, t, x, y):
    value, g = own_gradient(w, x, y)
    g = lax.psum(g, "fsdp")  # all-reduce: everybody gets the whole sum
    w, m1, m2 = adam(w, g, m1, m2, t)  # everybody updates everything
    return w, m1, m2, lax.psum(value, "fsdp")


# %% [markdown]
# ## Stage 1: reduce-scatter, update, all-gather
#
# An all-reduce *is* a reduce-scatter and then an all-gather:

# %% tags=["plumbing"]
show(draw.before_after(("reduce-scatter", "all-gather")))

# %% [markdown]
# Stage 1 puts the update between the two. After the reduce-scatter a device has the finished sum for its own rows of each
# weight (`d m`: `d` rows, `m` columns). It updates these rows, with its part of Adam's state. Then it gathers the updated weights.
# Three lines change:


# %%
def my_rows(w):
    """This device's rows of all l layers: `l d m -> l d/fsdp m`. Nothing is sent."""
    first = lax.axis_index("fsdp") * (D // N)
    return lax.dynamic_slice_in_dim(w, first, D // N, axis=1)


def stage1(w, m1, m2, t, x, y):
    value, g = own_gradient(w, x, y)
    g = lax.psum_scatter(g, "fsdp", scatter_dimension=1, tiled=True)
    rows, m1, m2 = adam(my_rows(w), g, m1, m2, t)
    # tiled: parts are joined along that dim; invarying: all devices get the same
    w = lax.all_gather(rows, "fsdp", axis=1, tiled=True, to="invarying")
    return w, m1, m2, lax.psum(value, "fsdp")


# %% [markdown]
# ## Stage 3: gather, use, forget
#
# A layer's weight is gathered, used and forgotten. `jax.checkpoint` keeps nothing that a function computed: in the backward pass
# the function runs again, and gathers again.


# %%
@jax.checkpoint
def gathered_layer(rows, x):  # d/fsdp m -> d m
    return layer(lax.all_gather(rows, "fsdp", axis=0, tiled=True), x)


def stage3(w, m1, m2, t, x, y, use=gathered_layer):
    def sharded_loss(w, x, y):
        return error(lax.scan(lambda x, rows: (use(rows, x), None), x, w)[0], y)

    value, g = jax.value_and_grad(sharded_loss)(w, x, y)  # g: my rows of the sum
    return *adam(w, g, m1, m2, t), lax.psum(value, "fsdp")


# %% [markdown]
# But for the sum of the loss, this code calls one collective, the gather. **How many reduce-scatters run in a step of the compiled program, with four layers?**

# %%
reduce_scatters = ...
attempt("04.scatters", reduce_scatters)

# %% tags=["plumbing"]
WEIGHT_AT = {0: "l d m", 1: "l d m", 2: "l d m", 3: "l d/fsdp m"}
MOMENT_AT = {0: "l d m", 1: "l d/fsdp m", 2: "l d/fsdp m", 3: "l d/fsdp m"}
rng = np.random.default_rng(0)
W = (rng.standard_normal((L, D, D)) / D**0.5).astype(np.float32)
X, Y = (rng.uniform(-1, 1, (ROWS, D)).astype(np.float32) for _ in range(2))


def prepare(function, stage):
    """Place the arrays as the stage wants them and compile one step: the arrays, the
    program, its text."""
    moment = MOMENT_AT[stage]
    texts = (WEIGHT_AT[stage], moment, moment, "whole", "b/fsdp d", "b/fsdp d")
    places = [parse_layout(text) for text in texts]
    given = zip((W, 0 * W, 0 * W, np.float32(1), X, Y), places, strict=True)
    arrays = [jax.device_put(a, sharding(mesh, place)) for a, place in given]
    ins = tuple(spec(place) for place in places)
    step = jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=ins[:4])
    return arrays, *read_program(jax.jit(step).lower(*arrays))


# %% tags=["plumbing"]
def train(arrays, compiled):
    w, m1, m2, t, x, y = arrays
    losses = []
    for number in range(1, STEPS + 1):
        now = jax.device_put(np.float32(number), t.sharding)
        w, m1, m2, value = compiled(w, m1, m2, now, x, y)
        losses.append(float(value))  # reading it keeps simulated devices together
    return losses, (w, m1, m2)


def one_device():
    @jax.jit
    def step(w, m1, m2, t):
        value, g = jax.value_and_grad(loss)(w, X, Y)
        return *adam(w, g, m1, m2, t), value

    w, m1, m2, losses = W, 0 * W, 0 * W, []
    for number in range(1, STEPS + 1):
        w, m1, m2, value = step(w, m1, m2, np.float32(number))
        losses.append(float(value))
    return losses, w


PSI_BYTES = 4 * W.size
COUNTS = {  # of the weights and gradients, without the loss
    0: {"all-reduce": 1},
    1: {"reduce-scatter": 1, "all-gather": 1},
    2: {"reduce-scatter": L, "all-gather": 1},
    3: {"reduce-scatter": L, "all-gather": 2 * L},
}


def checked(stage, function):
    """Train, and assert value, sharding, memory and communication; the program, and Ψ
    that a device sends."""
    arrays, compiled, text = prepare(function, stage)
    losses, found = train(arrays, compiled)
    assert np.allclose(losses, reference_losses, rtol=1e-5), f"stage {stage}: {losses}"
    assert np.allclose(found[0], reference_w, atol=1e-4), f"stage {stage}: weights"
    places = (WEIGHT_AT[stage], MOMENT_AT[stage], MOMENT_AT[stage])
    for array, place in zip(found, places, strict=True):
        promised = parse_layout(place).shard_shape(array.shape, mesh.shape)
        shapes = {shard.data.shape for shard in array.addressable_shards}
        assert shapes == {promised}, f"stage {stage}: {place}"
    weights, moments = (
        shard_bytes(parse_layout(place), W.shape, 4, mesh.shape) for place in places[:2]
    )
    predicted = weights + 2 * moments + 2 * X.nbytes // N + 4  # and rows, the number
    assert compiled_memory(compiled)["argument_bytes"] == predicted
    census = census_hlo(text, mesh)
    state = [c for c in census if c.shape != ()]
    kinds = sorted({c.kind for c in state})
    counts = {kind: sum(c.count for c in state if c.kind == kind) for kind in kinds}
    assert counts == COUNTS[stage], f"{stage}: {counts}"
    sent = sum(c.bytes_sent for c in state)
    assert sent == 4 * formulas.zero_elements(W.size, stage, devices=N)
    loss_bytes = formulas.sent_bytes("all-reduce", 4, N)
    assert sum(c.bytes_sent for c in census) == sent + loss_bytes
    made = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    print(f"stage {stage}: the losses of one device; sends {made}")
    return compiled, sent / (PSI_BYTES * LAP)


# %%
reference_losses, reference_w = one_device()
hand = {0: stage0, 1: stage1, 3: stage3}
programs = {stage: checked(stage, function) for stage, function in hand.items()}
found = {stage: round(psi) for stage, (_, psi) in programs.items()}
met("04.sent", {0: found[0], 1: found[1], 2: 2, 3: found[3]}, "Ψ:")
met("04.scatters", COUNTS[3]["reduce-scatter"])
if opened("04.scatters"):
    show(draw.gather_use_forget())

# %% [markdown]
# **The gradient of a gather is a reduce-scatter.** A weight was copied to all devices, so its gradient is a sum over all devices; each
# device needs only its own rows of that sum. In the picture the next layer is gathered while one is used.
#
# So stage 1 divides the optimizer's memory by N and sends what stage 0 sends. Stage 3 sends one more Ψ: the second gather, for
# the backward pass. (In stage 2, in *Further*, each layer's gradient is scattered as soon as it exists: 2Ψ too.)
#
# ## Predict: which stages send more with microbatches?
#
# A batch may be run in `u` slices, *microbatches*, whose gradients are added before one update (*accumulation*). Stage 2 keeps no whole
# gradient, and stage 3 no whole weight, from one microbatch to the next. Does a step with four microbatches send more than a step with one?

# %%
sends = {0: ..., 1: ..., 2: ..., 3: ...}  # "same" or "more"
attempt("04.accumulated", sends)

# %% tags=["plumbing"]
counts = [1, 2, 4, 8]
times = {z: [formulas.zero_elements(1, z, u) for u in counts] for z in range(4)}
assert [times[z][2] for z in range(4)] == [2, 2, 5, 12]
lines = [("stages 0 and 1: 2Ψ", times[0], "other4-line", "o", False)]
lines += [("stage 2: (u+1)Ψ", times[2], "other3-line", "s", False)]
lines += [("stage 3: 3uΨ", times[3], "fsdp-line", "^", False)]
axes = dict(x="microbatches u in a step", y="Ψ sent by a device in a step")
if opened("04.accumulated"):
    show(draw.curves(lines, counts, **axes, title="What accumulation costs"))
more = {z: "more" if times[z][2] > times[z][0] else "same" for z in range(4)}
met("04.accumulated", more, "found")

# %% [markdown]
# Stages 0 and 1 add up whole gradients and send once. Stage 2 scatters once for each microbatch, and gathers the updated weights once. Stage 3
# gathers twice and scatters once for each microbatch.
#
# ### Exercise (core): make stage 2 from stage 1
#
# Below is stage 1's sum over microbatches. `gradient(part)` is this device's whole gradient `d m` of one microbatch. Write
# stage 2's sum: return the same shard, `d/fsdp m`, but never add whole gradients.


# %%
def stage1_accumulated(gradient, parts):
    total = sum(gradient(part) for part in parts)
    return lax.psum_scatter(total, "fsdp", scatter_dimension=0, tiled=True)


def stage2_accumulated(gradient, parts): ...


attempt("04.stage2_accumulated", stage2_accumulated)

# %% [markdown]
# ## Keep: cut what a device uses only in part
#
# 1. ZeRO cuts what all replicas would hold alike: the optimizer's state (stage 1), the summed gradients (2), the weights (3).
# 2. An all-reduce is a reduce-scatter and an all-gather. Stage 1 updates between the two, and sends nothing more.
# 3. The gradient of a gather is a reduce-scatter.
# 4. A step of stage 0, 1, 2, 3 sends 2Ψ, 2Ψ, 2Ψ, 3Ψ; with `u` microbatches 2Ψ, 2Ψ, (u+1)Ψ, 3uΨ.
# 5. No stage cuts activations: recompute (lesson 01), or cut the model itself (lesson 05).

# %% [markdown]
# ## Further
#
# Next: [lesson 05](05_tensor_parallelism.ipynb). What follows is optional: stages and recipes in more detail, LoRA, offload.
#
# ### Exercise (stretch): the same in bytes
#
# The toy has 4 × 32 × 32 weights of 4 bytes: 16,384 bytes. **How many bytes does each of the `N` devices send in a step of stage 3?**
# On a ring a device sends (N − 1)/N of each message.

# %%
bytes_at_stage_3 = ...  # a number, or a formula with N
attempt("04.stage3_bytes", bytes_at_stage_3, devices=N)

# %%
met("04.stage3_bytes", round(programs[3][1] * PSI_BYTES * LAP))

# %% [markdown]
# ### Stage 2 by hand
#
# Stage 2 takes the backward pass apart, to cut each layer's gradient as soon as it exists. `jax.vjp` runs a function and returns
# its result and `pull`, its backward pass:


# %%
def stage2(w, m1, m2, t, x, y):
    mine, pulls, shards = lax.pcast(w, "fsdp", to="varying"), [], []
    for l in range(L):  # forward, keeping what the backward pass needs
        x, pull = jax.vjp(layer, mine[l], x)
        pulls.append(pull)
    value, g_x = jax.value_and_grad(error)(x, y)
    for pull in reversed(pulls):  # backward: one whole gradient at a time
        g, g_x = pull(g_x)
        # d m +fsdp -> d/fsdp m
        g = lax.psum_scatter(g, "fsdp", scatter_dimension=0, tiled=True)
        shards.append(g)
    rows, m1, m2 = adam(my_rows(w), jnp.stack(shards[::-1]), m1, m2, t)
    w = lax.all_gather(rows, "fsdp", axis=1, tiled=True, to="invarying")
    return w, m1, m2, lax.psum(value, "fsdp")


programs[2] = checked(2, stage2)
assert round(programs[2][1]) == 2

# %% [markdown]
# ### Another recipe: all in float32
#
# The core path counted mixed precision: 2 + 2 + 12 bytes per parameter. llmpar keeps weights and gradients in float32 unless told otherwise
# (`--param-dtype`): 4 + 4 + 8 bytes. That is 16 bytes too, but whole weights and whole gradients are twice as large, so stage 1 and stage 2
# save less. This explorer counts so, with activations. Its stage 2 cuts the gradients only when the backward pass of a microbatch is
# complete. Choose the number of microbatches:

# %%
explorer = MemoryExplorer(microbatches=4, dtype="float32")
explorer

# %% tags=["plumbing"]
for u in (1, 4):
    parts = explorer.bytes_by_part(explorer.state | {"microbatches": u})
    stage1, stage2 = (sum(parts[f"ZeRO-{zero}"].values()) for zero in (1, 2))
    assert stage2 == stage1 if u == 1 else stage2 < stage1

# %% [markdown]
# With this recipe and this batch 8B needs stage 3. (At stages 1 and 2 *unreduced gradients* are 36.9 GiB: the 29.9 of all gradients, and 7.0
# for a copy of the largest one while it is cut: a matrix of the feed-forward, of all 32 layers.)
#
# ### The same for a Llama
#
# Now llmpar itself: a Llama of 2 layers, trained with AdamW. Its code names no mesh axis; `Plan(mesh, zero=…)` is all that
# changes. A *census* counts what a compiled program sends.

# %%
LLAMA = dataclasses.replace(preset("tiny"), num_layers=2)
BATCH, SEQ = 16, 16
TEXT = counting_text(BATCH, SEQ)
ADAM = optax.adamw(3e-3)
learn = lambda plan: train_on(LLAMA, plan, TEXT, ADAM, STEPS)
print("Five programs are compiled and run: about 30 s.")
solo = learn(Plan("dp=1", zero=0))
llamas = {f"stage {zero}": learn(Plan(f"fsdp={N}", zero=zero)) for zero in range(4)}
tables = verdicts(llamas, solo)

# %% tags=["plumbing"]
censuses = {name: as_predicted(run) for name, run in llamas.items()}
# Adam divides by the gradient's size, so the losses do not see a wrong factor.
for name, run in llamas.items():
    norms = [float(one.metrics["grad_norm"]) for one in (run, solo)]
    assert np.isclose(*norms, rtol=1e-3), (name, norms)
for name, (step, *_) in llamas.items():
    stored, reduced = (
        tree["blocks"]["ffn"]["gate"] for tree in (step.stored, step.reduced)
    )
    print(f"{name}: blocks.ffn.gate is stored as '{stored}', its moments '{reduced}'")
big = {}
for name, run in llamas.items():
    leaves = [x for x in jax.tree.leaves(run.state.optimizer) if x.ndim]
    big[name] = sum(x.addressable_shards[0].data.nbytes for x in leaves)
assert all(big["stage 0"] == N * big[f"stage {zero}"] for zero in (1, 2, 3))
print(f"the optimizer's bytes are divided by exactly {N} from stage 1 on")
temporaries = {
    n: compiled_memory(run.compiled)["temp_bytes"] for n, run in llamas.items()
}
assert temporaries["stage 3"] < temporaries["stage 0"]
print("temporaries: stage 3 needs less than stage 0, whose gradients are whole")

# %% [markdown]
# Which line of the model sends what? In stage 3 a block's weight is gathered forward, gathered again for the backward pass (JAX counts
# that as recomputed), and its gradient is scattered backward: three times the weight's bytes under one name. The embedding and the head
# are used where the forward pass begins and ends, so they are gathered once.

# %%
print(arrow_text(censuses["stage 3"]))

# %% tags=["plumbing"]
predicted = traffic.step_traffic(llamas["stage 3"].step.plan, BATCH, SEQ)
sent = arrow_rows(censuses["stage 3"])
assert sum(row["bytes_sent"] for row in sent) == predicted.total_bytes
for name in ("ffn d m", "attention n h d"):
    passes = {c.direction for c in censuses["stage 3"] if c.arrow == name}
    assert passes == {"forward", "recomputed", "backward"}, passes

# %% [markdown]
# With microbatches it sends what the list of the core path says. (Embedding, head and norms are gathered once per microbatch, not
# twice: 2uΨ for that small part, which the assertions count separately.)

# %% tags=["plumbing"]
shapes = {path: weight.shape for path, weight in LLAMA.weights().items()}
twice = sum(
    int(np.prod(shape))
    for path, shape in shapes.items()
    if path.startswith("blocks.") and len(shape) > 2
)
once = LLAMA.num_params - twice
scalars = int(formulas.sent_bytes("all-reduce", 3 * 4, N))  # loss, tokens and norm
print(f"Ψ = {LLAMA.num_params:,}: {twice:,} in matrices of blocks, {once:,} elsewhere")
print("sent in a step   " + "".join(f"{f'u={u}':>12}" for u in (1, 2, 4)))
for zero in range(4):
    line = []
    for u in (1, 2, 4):
        plan = Plan(f"fsdp={N}", zero=zero, microbatches=u)
        step = Step(LLAMA, plan, mesh, optax.adamw(3e-3))
        predicted = traffic.step_traffic(plan.resolve(LLAMA), 4 * N, SEQ)
        if u > 1:  # a loop: the census multiplies what is inside by its length
            batch = step.abstract_batch(4 * N, SEQ)
            traced = step.run.trace(step.abstract_state, batch).jaxpr
            assert census_table(census_jaxpr(traced, mesh.shape)) == as_table(predicted)
        less = 2 * u if zero == 3 else formulas.zero_elements(1, zero, u)
        elements = formulas.zero_elements(twice, zero, u) + less * once
        assert predicted.total_bytes - scalars == 4 * LAP * elements
        line.append(formulas.zero_elements(1, zero, u))
    print(
        f"stage {zero}          " + "".join(f"{f'{factor:g}Ψ':>12}" for factor in line)
    )
print("communication: formula = prediction = traced program, in kind, count and bytes")

# %% [markdown]
# ### Gather again, or gather once and keep?
#
# FSDP may keep a gathered weight until the backward pass has used it. That saves a third of the traffic, and needs again the memory that
# stage 3 had saved. By hand it is one word, `jax.checkpoint`; in llmpar it is `Plan.reshard_after_forward`.

# %%
keeps = lambda rows, x: layer(lax.all_gather(rows, "fsdp", axis=0, tiled=True), x)
arrays, compiled, text = prepare(lambda *args: stage3(*args, use=keeps), 3)

# %% tags=["plumbing"]
kept = [c for c in census_hlo(text, mesh) if c.shape != ()]
assert np.allclose(train(arrays, compiled)[0], reference_losses, rtol=1e-5)
assert sum(c.bytes_sent for c in kept) == 2 * PSI_BYTES * LAP
assert sum(c.count for c in kept if c.kind == "all-gather") == L
print("by hand: again sends 3Ψ, keep sends 2Ψ; the losses are the same")
again, keep = (compiled_memory(c)["temp_bytes"] for c in (programs[3][0], compiled))
assert keep > again
print(f"temporaries: keep needs {(keep - again) / PSI_BYTES:.2f} Ψ more than again")

for reshard in (True, False):
    plan = Plan(f"fsdp={N}", zero=3, reshard_after_forward=reshard)
    step = Step(LLAMA, plan, mesh, optax.adamw(3e-3))
    traced = step.run.trace(step.abstract_state, step.abstract_batch(BATCH, SEQ)).jaxpr
    predicted = traffic.step_traffic(plan.resolve(LLAMA), BATCH, SEQ)
    assert census_table(census_jaxpr(traced, mesh.shape)) == as_table(predicted)
    gathers = predicted.get(("fsdp", "all-gather"), traffic.Prediction()).count
    say(
        f"the Llama with reshard_after_forward={reshard}: {gathers} all-gathers,"
        f" {predicted.total_bytes:,} B in all, as predicted"
    )

# %% [markdown]
# ### Exercise (expert): bytes against memory
#
# Ψ weights in blocks, many devices, `u = 4` microbatches in a step. Three policies: gather `again` in each backward pass; `keep` until
# the end of the microbatch; `keep all step`, until the update. For each: how many Ψ elements does a device send per step, and how many Ψ
# of gathered weights does it still hold when the forward pass ends? What does the last policy remind you of? (The verdict says why.)

# %%
policies = {"again": (..., ...), "keep": (..., ...), "keep all step": (..., ...)}
attempt("04.keep_or_gather", policies)

# %% [markdown]
# ### LoRA: train 0.2 % of the numbers. What gets cheaper?
#
# A trained model can be *tuned*: trained a little more, on examples of its task. LoRA (Hu et al. 2021) *freezes* each matrix: no
# step changes it. Beside some of them (here the four of attention) it puts two thin matrices, the *adapters* `A` and `B`. In place of
# `x W` the layer computes `x W + (x A) B · α/z`, and only `A` and `B` are trained. `A` is `d z` and `B` is `z m`. The size of `z` is the
# *rank*: 16, say, where `d` is 4096. (`α` is a constant, here 16.)

# %%
names = ("x", "W, frozen", "x W")
show(draw.matmul("s d × d m = s m", names, title="What the model computes"))
names = ("x", "A", "x A", "B", "added to x W")
show(draw.matmul("s d × d z = s z × z m = s m", names, title="What LoRA adds"))

# %% [markdown]
# `W` is stored as stage 3 stores it: `d/fsdp m`. Training all of Llama 3 8B in mixed precision takes 16 bytes
# per parameter, and stage 3 sends 3Ψ in a step. **How many of the 16 bytes, and of the 3Ψ, are left with LoRA?** Leave out
# the adapters themselves: they are 0.2 % of the parameters.

# %%
lora = {"held": ..., "sent": ...}  # bytes per parameter, of 16; Ψ in a step, of 3
attempt("04.lora", lora)

# %% [markdown]
# ### Train all, or the adapters
#
# We take two steps with the small Llama from above: once all of it is trained, once only its adapters.

# %%
ADAPTED = dataclasses.replace(LLAMA, lora=LoraConfig(rank=4))
AXES = "dp=2 fsdp=2 tp=2"
both = {
    "all is trained": train_on(LLAMA, Plan(AXES, zero=3), TEXT, ADAM, 2),
    "LoRA": train_on(ADAPTED, Plan(AXES, zero=3), TEXT, ADAM, 2),
}

# %% tags=["plumbing"]
# Memory and traffic, predicted and compiled.
given, moved, passes = {}, {}, {}
for name, run in both.items():
    parts = memory.argument_bytes(run.step.plan, BATCH, SEQ)
    assert compiled_memory(run.compiled)["argument_bytes"] == sum(parts.values())
    given[name] = {"weights": parts["params"], "moments": parts["optimizer"]}
    census = as_predicted(run)
    passes[name] = {c.direction for c in census if c.arrow == "ffn d m"}
    moved[name] = dict.fromkeys(("weights", "gradients", "activations"), 0)
    for row in traffic.step_traffic(run.step.plan, BATCH, SEQ).values():
        for message, times in row.messages.items():
            if message.value in moved[name]:  # not the loss
                moved[name][message.value] += times * row.sent(message.num_bytes)
everything, tuned = moved.values()
assert tuned["activations"] == everything["activations"]
assert everything["weights"] < tuned["weights"] < 1.2 * everything["weights"]
assert tuned["gradients"] < 0.1 * everything["gradients"]
first, second = given.values()
assert second["moments"] < 0.1 * first["moments"]
assert second["weights"] > first["weights"]
assert passes["all is trained"] == {"forward", "recomputed", "backward"}
assert passes["LoRA"] == {"forward", "recomputed"}
frozen = formulas.zero_bytes(PARAMS, 1, 0, grad_bytes=0, optim_bytes=0)
left = {"held": frozen / PARAMS, "sent": len(passes["LoRA"])}
assert both["LoRA"].losses[1] < both["LoRA"].losses[0]

# %%
if opened("04.lora"):
    show(draw.memory_bars(moved.items(), title=f"{AXES}: sent per device and step"))
    show(draw.memory_bars(given.items(), title=f"{AXES}: what a step is given"))
met("04.lora", left)

# %% [markdown]
# **Gradients and moments go, gathers stay.** `W` has no gradient, so Adam keeps no moments of it. The arrow `d m +dp +fsdp -> d/fsdp m` is gone: no reduce-scatter over `fsdp`, no
# all-reduce over `dp`. But the layer still multiplies by `W` forward. Backward it needs `W` again, for the gradient of `x`, which the
# adapters of earlier layers need. So both gathers `d/fsdp m -> d m` stay. Tensor parallelism sends as much as before, because `x` is
# as large as before.
#
# ### With LoRA 8B fits on one GPU
#
# A frozen weight needs no float32 copy, only the 2 bytes that the matmuls read. A parameter of an adapter takes 16 bytes.

# %%
fine = dataclasses.replace(preset("llama3-8b"), lora=LoraConfig(rank=16))
thin = held(0, params=fine.num_params - PARAMS)
bars = [
    ("all is trained", held(0)),
    ("LoRA", thin | {"weights": thin["weights"] + 2 * PARAMS}),
]
title = "Llama 3 8B on one GPU: model state"
show(draw.memory_bars(bars, h100.usable_bytes, title))

# %% tags=["plumbing"]
assert sum(bars[1][1].values()) < h100.usable_bytes < sum(bars[0][1].values())
assert 0.001 < thin["weights"] / (2 * PARAMS) < 0.0025

# %% [markdown]
# Activations come on top, and LoRA saves none of them. `llmpar train --lora-rank 16` does all this. In the end `W + A B · α/z` is one
# matrix again: `llmpar export` adds them up.

# %% [markdown]
# ### A weight's layouts in one step
#
# This table is in `WeightLayouts` of `llmpar/plan/plan.py`: the layouts of one weight of a feed-forward, `d m`, during a step, from *stored* to
# its finished gradient, *reduced*. A line below the cells marks with `^` where something is sent to get from the cell at the left to this one.
# Not marked is the last message: if *reduced* differs from *stored* (stages 1 and 2), the updated weight is gathered.

# %% tags=["plumbing", "nbval-check-output"]
table = re.search(r"zero  stored.*?(?=\n\n)", WeightLayouts.__doc__, re.S)[0]
table = table.replace("\n        ", "\n")
PARTS = ("stored", "used", "unreduced", "accumulated", "reduced")
header, *lines = table.splitlines()
print(header)
for line in lines:
    stage, *cells = re.split("  +", line)
    # stages 0 to 2 leave the sums of the backward pass open: nothing is sent for them
    sends = [a != b for a, b in zip(cells, cells[1:], strict=False)]
    sends[1] &= stage == "3"
    _, *starts = (found.start() for found in re.finditer(r"(?<=  )\S", line))
    marks = dict(zip(starts, sends, strict=True))
    below = "".join("^" if marks.get(x) else " " for x in range(len(line)))
    print(line, below.rstrip(), sep="\n")
    layouts = Plan("dp=2 fsdp=2 tp=2", zero=int(stage)).resolve().layouts_of("ffn d m")
    assert [str(getattr(layouts, part)) for part in PARTS] == cells
    here = (
        Plan("fsdp=2", zero=int(stage)).resolve().layouts_of("ffn d m")
    )  # without dp and tp
    alone = [re.sub(r"/tp| \+dp", "", cell) for cell in cells]
    assert [str(getattr(here, part)) for part in PARTS] == alone

# %% [markdown]
# ### The paper's table
#
# GB (1e9 bytes) per device for 7.5 billion parameters, by the formula of the pictures above. It agrees with Table 1 of the paper,
# which rounds, to 3 %.

# %% tags=["plumbing", "nbval-check-output"]
published_gb = {
    4: (52.5, 41.3, 30.0),
    16: (35.6, 21.6, 7.5),
    64: (31.4, 16.6, 1.88),
    256: (30.4, 15.4, 0.47),
    1024: (30.1, 15.1, 0.12),
}
print("GB per device    stage 1  stage 2  stage 3")
for num, expected in published_gb.items():
    ours = [formulas.zero_bytes(7.5e9, num, stage) / 1e9 for stage in (1, 2, 3)]
    assert all(abs(x - y) <= 0.03 * y for x, y in zip(ours, expected, strict=True))
    print(f"{num:5} devices   " + "".join(f"{x:9.2f}" for x in ours))

# %% [markdown]
# ### Offload: the host's memory as one more place
#
# The optimizer's state is touched once per step. ZeRO-Offload (Ren et al. 2021) keeps it in the host's memory: each step,
# gradients go down and updated weights come up, 2 + 2 bytes per parameter of a device's share, over PCIe. Simulated devices
# have no PCIe, so here it is a cost and not a run. An A100 "of 40 GB" has 39.4 GiB, which are 42.3 GB; three quarters of them are
# 31.7 GB. PCIe 4.0 × 16 carries 16 GT/s × 16 lanes × 128/130 = 252 Gbit/s = 31.5 GB/s each way;
# the two ways can overlap, which we do not count on.

# %% tags=["plumbing", "nbval-check-output"]
params, num_devices = 7e9, 4
pcie_bytes_per_s = 16e9 * 16 * 128 / 130 / 8
moved = (2 + 2) * params / num_devices
stay = formulas.zero_bytes(params, 4, 2, optim_bytes=0)
state = formulas.zero_bytes(params, 4, 2)
assert stay < a100.usable_bytes < state
print(f"7B on 4 A100-40 at stage 2: {state / 1e9:.1f} GB of state,", end=" ")
print(f"and a program may use {a100.usable_bytes / 1e9:.1f} GB")
print(f"optimizer on the host: {stay / 1e9:.1f} GB stay,", end=" ")
print(f"{12 * params / num_devices / 1e9:.0f} GB per device go to the host")
pcie_s = moved / pcie_bytes_per_s
print(
    f"price: {moved / 1e9:.0f} GB per step over PCIe, at least {pcie_s:.2f} s,", end=" "
)
print("and Adam runs on the host's processor")
for tokens in (16_384, 131_072):
    rate = 0.5 * a100.flops_per_s
    compute_s = formulas.train_seconds(params, tokens, num_devices, rate)
    print(
        f"{tokens:,} tokens at half of the peak: {compute_s:.1f} s of computing,",
        end=" ",
    )
    print(f"PCIe is {pcie_s / compute_s:.0%} of that")

# %% [markdown]
# The batch decides, as so often: the traffic of a step does not depend on it.
#
# ### Where the partitioner of XLA, JAX's compiler, differs
#
# We wrote the collectives. The other way (`mode="auto"`, or `jax.jit` with shardings) is to say only where arrays live; XLA's
# partitioner chooses the collectives. The value is the same, the memory is the same. What is sent is another matter.

# %% tags=["plumbing"]
auto = learn(Plan(f"fsdp={N}", zero=3, mode="auto"))
assert np.allclose(auto.losses, solo.losses, rtol=1e-4)
arguments = lambda run: compiled_memory(run.compiled)["argument_bytes"]
assert arguments(auto) == arguments(llamas["stage 3"])
print("value and memory: Auto equals Manual")
manual_table = tables["stage 3"]
auto_table = census_table(census_hlo(auto.text, mesh))
for name, table in (("manual", manual_table), ("auto", auto_table)):
    for (_, kind), row in sorted(table.items(), key=lambda i: -i[1]["bytes_sent"]):
        print(f"{name:>7}: {kind:<15} ×{row['count']:<4}{row['bytes_sent']:>12,} B")
assert not any(kind == "reduce-scatter" for _, kind in auto_table)
in_all = lambda table: sum(row["bytes_sent"] for row in table.values())
assert in_all(auto_table) > in_all(manual_table)
print("communication: on simulated devices Auto never forms a reduce-scatter,")
print("and it sends more than stage 3 needs")

# %% [markdown]
# The partitioner for CPUs sums whole gradients (an all-reduce), then cuts them. In other shapes it may even move
# activations instead of weights. The GPU compiler does form reduce-scatters. So read the program of *your* back end before you
# believe a table, this one included.
#
# ### On your cluster
#
# Ask before you train. `inspect` compiles the step and runs nothing:
#
#     llmpar inspect --mesh "fsdp=-1" --zero 2 --microbatches 2
#     llmpar inspect --mesh "fsdp=-1" --zero 3 --no-reshard-after-forward
#     llmpar inspect --mesh "fsdp=-1" --zero 3 --mode auto
#     llmpar train --model llama3.2-1b --mesh "fsdp=-1" --remat block --dtype bfloat16 \
#         --batch-size 16 --seq-len 2048 --data "corpus/*.jsonl" --tokenizer tokenizer.json
#
# With several nodes, `dp` between the nodes and `fsdp` inside: `--mesh "dp=4 fsdp=4"`. Gradients are then reduce-scattered on the
# fast links first, and only a shard is all-reduced on the slow ones.
