# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 20
#     needs: ["00"]
#     question: How much memory and how much computing does a model need, before anything
#       is parallel?
#     objectives:
#     - Count the training state and the FLOPs of a model from its parameters.
#     - Say what grows with the parameters, what grows with the tokens, and what
#       recomputation saves.
#     - Compute how many devices the memory requires, and how long a training takes.
# ---

# %% [markdown]
# # 01 · An 8B model is 16 GB. Why does it not fit on 80 GB?
#
# Llama 3 8B has 8 billion weights of 2 bytes each: 16 GB. An H100 has 80 GB. If you train it there, memory runs out before the
# first token is processed.

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
from llmpar.inspect.census import compiled_memory, executed_flops
from llmpar.lessons import attempt, hint, met, opened, solution
from llmpar.lessons.lesson import (
    counting_text,
    predicted_argument_bytes,
    train_on,
    verdicts,
)
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.predict import formulas, memory
from llmpar.predict.hardware import chip

# Accelerators round float32 matmuls unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
h100 = chip("h100")
usable, whole = h100.usable_bytes, h100.usable_hbm_gib * 2**30
MODELS = ("llama3.2-1b", "llama3.2-3b", "llama3-8b", "llama2-13b")


def bars(parts, title, bet=""):
    """Bytes of each model, for so many bytes a parameter, beside one H100."""
    each = {name: preset(name).num_params for name in MODELS}
    held = {
        name: {part: n * size for part, n in parts.items()}
        for name, size in each.items()
    }
    if not bet or opened(bet):
        scene.show(draw.memory_bars(held.items(), usable, title, whole))
    return held


# %%
held = bars({"weights": 2}, "Weights alone, beside one H100")

# %% [markdown]
# All four models' weights fit. The dashed line, 59.3 GiB, is what a program may use here: unless told otherwise, JAX takes three quarters
# of the card's 79 GiB. (1 GB is 1e9 bytes, 1 GiB is 2**30. A card "of 80 GB" has 79 GiB, which are 85 GB.)
#
# ## Predict: what else does training hold?
#
# For each weight there is a **gradient**, which says how to change it. Adam, the usual **optimizer**, keeps two running means for each
# weight, its **moments**. In mixed precision, as it is counted here, a weight and its gradient have 16 bits. The two moments have 32 bits
# each. The optimizer also updates a precise copy of the weight, with 32 bits.
#
# **How many GB is all that for Llama 3 8B, with its 8.03 billion parameters?**

# %%
gigabytes = ...
attempt("01.state_gb", gigabytes)

# %% [markdown]
# ## Weights, gradients and optimizer, beside one H100

# %%
title = "What training holds"
held = bars({"weights": 2, "gradients": 2, "optimizer": 12}, title, "01.state_gb")
met("01.state_gb", sum(held["llama3-8b"].values()) / 1e9, "counted")

# %% [markdown]
# 2 + 2 + 12: **16 bytes for each parameter**. Two of the four models are too large now.
#
# ### Exercise (core): what fits?
#
# `least` is the smallest number of A100s with 40 GB that together can hold this state of Llama 3 8B, cut evenly. (Count all 40
# GB of each card.) `left on 8` is how many GB are left on each GPU if there are eight.

# %%
least, left_on_8 = ..., ...
attempt("01.fits", {"least": least, "left on 8": left_on_8})

# %% [markdown]
# ## The compiler reserves exactly what was counted
#
# Does this count hold for a program? We train a small model with weights and moments of 32 bits. So the arguments of a step are 4 and
# 8 bytes for each parameter, and the tokens of a batch. The compiler says how many bytes it reserves for arguments. (The loop over `remat`
# makes three programs; the next section says what they differ in.)

# %%
CONFIG = dataclasses.replace(preset("tiny"), num_layers=8)
TEXT, ADAM = counting_text(8, 128), optax.adamw(1e-2)
print("Three programs are compiled and run: about 20 s.")
runs = {
    remat: train_on(CONFIG, Plan("dp=1", remat=remat), TEXT, ADAM, 2)
    for remat in ("none", "selective", "block")
}
predicted = predicted_argument_bytes(runs["none"])
reserved = compiled_memory(runs["none"].compiled)["argument_bytes"]
print(f"{CONFIG.num_params:,} parameters: predicted {sum(predicted.values()):,} B,")
print(f"reserved {reserved:,} B")
assert reserved == sum(predicted.values())

# %% tags=["plumbing"]
assert predicted["params"] == 4 * CONFIG.num_params
assert predicted["optimizer"] == 8 * CONFIG.num_params

# %% [markdown]
# ## Activations: what the backward pass needs again
#
# The backward pass of `y = x @ w` needs `x` again. So the forward pass keeps results of each layer, its
# **activations**. The backward pass uses them, last layer first. They grow with the tokens of the batch; weights, gradients and
# moments do not.
#
# **Recomputation** (JAX calls it *remat*) keeps fewer of them, and computes the others again in the backward pass. llmpar, the library of
# these lessons, has three policies. Of Llama 3 8B, with 8,192 tokens in bfloat16 (2 bytes), they keep this many arrays of 64 MiB each:
#
# | policy | keeps | arrays of a layer |
# |---|---|---|
# | `none` | all that the backward pass reads | more than 30 |
# | `selective` | results of matmuls and of attention | about 12 |
# | `block` | the layer's input | 1 |
#
# ## Predict: which policies fit?
#
# From here on, as above: weights and moments in 32 bits, 12 bytes a parameter; the gradient comes only in the backward pass.
# That is 11.2 GiB of each of eight H100s. 32 layers, 8,192 tokens on each GPU. **Which policies fit into 59.3 GiB, and which are too large?**

# %%
policies = {"none": ..., "selective": ..., "block": ...}  # "fits" or "too large"
attempt("01.policies", policies)

# %% tags=["plumbing"]
LLAMA, TOKENS = preset("llama3-8b"), 8192


def over_a_step(remat):
    """Bytes by part after each layer, forward and then backward, on each of 8 GPUs."""
    plan = Plan("fsdp=8", dtype="bfloat16", remat=remat).resolve(LLAMA, "gpu")
    shape, layers = (8, TOKENS), LLAMA.num_layers
    given, kept = memory.argument_bytes(plan, *shape), memory.kept_bytes(plan, *shape)
    kept, grads = kept[remat], memory.weights_bytes(plan)["unreduced"]
    work = memory.temp_bytes(plan, *shape) - layers * kept - grads
    state = {"weights": given["params"], "moments": given["optimizer"]}
    forward = [state | {"activations": n * kept} for n in range(layers + 1)]
    backward = [
        state
        | {"activations": (layers - n) * kept, "gradients": grads * n / layers}
        | {"at work": work}
        for n in range(layers + 1)
    ]
    return kept, forward + backward


KEPT, rows = {}, {}
for policy in runs:
    KEPT[policy], rows[policy] = over_a_step(policy)
most = {name: max(sum(now.values()) for now in row) for name, row in rows.items()}
assert most["none"] > usable > most["selective"] > most["block"]
assert KEPT["selective"] == 736 * 2**20
fits = {name: "fits" if size < usable else "too large" for name, size in most.items()}
met("01.policies", fits, "predicted")

# %%
phases = [("forward", 33), ("backward", 32)]
title = "Llama 3 8B on eight H100s: one of them, over a step"
if opened("01.policies"):
    scene.show(
        draw.step_memory(rows, phases, usable, title, roles={"at work": "again"})
    )

# %% tags=["nbval-check-output"]
for policy, size in KEPT.items():
    print(f"{policy:<10} keeps {size / 2**20:>5,.0f} MiB of each layer", end="")
    print(f", {32 * size / 2**30:4.1f} GiB of all 32")

# %% [markdown]
# *At work*: temporary memory of the one layer (or the loss) that is running. Without recomputation the step needs more than a program may
# use; `block` needs about a quarter of that.
#
# ## The compiler agrees, and the losses stay the same
#
# The small model again. The bars are the temporary memory that the compiler reserves: activations and gradients.

# %%
temporaries = {
    policy: {"temporaries": compiled_memory(run.compiled)["temp_bytes"]}
    for policy, run in runs.items()
}
scene.show(draw.memory_bars(temporaries.items(), title="Temporary memory, compiled"))

# %% tags=["plumbing"]
held = {policy: row["temporaries"] for policy, row in temporaries.items()}
assert held["block"] < held["selective"] < held["none"]
small = memory.kept_bytes(runs["block"].step.plan, *runs["block"].shape)
more = CONFIG.num_layers * (small["selective"] - small["block"])
assert abs((held["selective"] - held["block"]) / more - 1) < 0.04
sent = verdicts(runs, runs["none"])
assert not any(sent.values()), "one device sends nothing"
assert np.allclose(runs["block"].losses, runs["none"].losses, rtol=1e-5)

# %% [markdown]
# All three give the same losses; `selective` and `block` compute some numbers twice. Most lessons that train check these four things. (One
# device sends nothing.)
#
# ## Each weight costs 6 FLOPs a token
#
# A **FLOP** (floating-point operation) is one addition or multiplication. A matmul multiplies each weight by one number of each token, and
# adds the result to a sum: 2 FLOPs. The backward pass has two matmuls of the same size, for the gradient of the input and for that of the
# weight: 4 more.

# %%
T, D, M = 256, 64, 128  # tokens, width in, width out
x, w = jnp.ones((T, D)), jnp.ones((D, M))


def loss(x, w):
    return jnp.sum((x @ w) ** 2)


def flops_of(function):
    return jax.jit(function).lower(x, w).compile().cost_analysis()["flops"]


forward = flops_of(lambda x, w: x @ w)
both = flops_of(jax.value_and_grad(loss, argnums=(0, 1)))
per = T * D * M  # tokens times weights
print(f"forward {forward / per:g} FLOPs a weight and token,", end=" ")
print(f"forward and backward {both / per:.2f} (with the loss's square)")
assert forward == 2 * per and 6 <= both / per < 6.2

# %% [markdown]
# ## Predict: what does recomputation cost?
#
# `block` runs the forward pass of each layer a second time. **How many times the FLOPs of `none` does a step take?**

# %%
times_the_flops = ...  # matmuls with weights
attempt("01.again", times_the_flops)

# %% tags=["plumbing"]
met("01.again", 8 / 6, "counted")
executed = {name: executed_flops(run.compiled.as_text()) for name, run in runs.items()}
small_model = executed["block"] / executed["none"]
assert 1.25 < small_model < 4 / 3 and executed["selective"] == executed["none"]
if opened("01.again"):
    print(f"the small model's program: {small_model:.2f}", end=" ")
    print("(its head and each layer's last matmul run once)")

# %% [markdown]
# ### Exercise (core): how long?
#
# 1,024 H100s (989.4e12 FLOPs a second each) reach 40 % of that rate. How many **days** does Llama 3 8B take for 15e12 tokens?
# Attention is not counted.

# %%
num_days = ...
attempt("01.days", num_days)

# %% [markdown]
# ## Predict: when does attention cost more than all weights?
#
# Attention has matmuls without weights: they multiply every token with every other token. Forward and backward, each token of a
# sequence of `s` costs `12 l n h s` FLOPs, with `l` layers, `n` heads and head width `h`. Llama 3 8B has 32 layers, 32 heads and
# h = 128. Its weights cost 6 FLOPs each, apart from the embedding's, `v d` = 128,256 × 4,096, which are looked up and not multiplied.
#
# **From which `s` on does attention cost more?**

# %%
length = ...
attempt("01.crossover", length)

# %% [markdown]
# ## Attention's share, by length

# %% tags=["plumbing"]
LENGTHS = [2**n for n in range(11, 21)]


def costs(name):
    """FLOPs of a token's weights, and of attention for each position."""
    c = preset(name)
    multiplied = c.num_params - c.vocab_size * c.width
    return 6 * multiplied, 12 * c.num_layers * c.num_heads * c.head_width


LINES = [("llama3-8b", "other4"), ("llama3-70b", "other3"), ("llama3.1-405b", "other5")]
shares = [
    (name, [a * s / (weights + a * s) for s in LENGTHS], color, "o", False)
    for name, color in LINES
    for weights, a in [costs(name)]
]
weights, a = costs("llama3-8b")
equal = weights / a
place = np.log2(equal / LENGTHS[0])
assert round(equal) == 28_629

# %%
labels = [f"{s // 1024}k" if s < 2**20 else "1M" for s in LENGTHS]
lines, marks = shares, [(place, f"llama3-8b: half at {equal:,.0f}")]
options = dict(percent=True, high=1, marks=marks, title="Attention's share of a step")
if opened("01.crossover"):
    axes = "positions s", "share of FLOPs"
    scene.show(draw.curves(lines, labels, *axes, **options))
met("01.crossover", round(equal), "counted")

# %% [markdown]
# ## Keep: 16 bytes a parameter, 6 FLOPs a parameter and token
#
# 1. Training with Adam in mixed precision holds 16 bytes per parameter, activations not counted.
# 2. Activations grow with the tokens (and with layers and width); recomputation trades them for FLOPs, `block` for a third more.
# 3. 6 FLOPs per parameter and token: 2 forward, 4 backward.
# 4. Attention adds `12 l n h s` per token: in Llama 3 8B a fifth of the FLOPs at 8,192 positions (all pairs counted), most at a million.
# 5. Memory says how many devices you must have; FLOPs say how many you want.

# %% tags=["plumbing"]
assert formulas.zero_bytes(LLAMA.num_params, 1, 0) == 16 * LLAMA.num_params

# %% [markdown]
# ## Further
#
# ### Parameters, counted
#
# A Llama layer has four matrices for attention and three for the feed-forward, and two vectors of width `d`. With `k` heads for
# keys and values and `m` the width of the feed-forward they are: queries `d n h`, keys and values `d k h`, output `n h d`; `d m`
# twice and `m d`. Around the layers stand the embedding `v d`, the head `d v` and one more vector.


# %%
def count(c):
    """Parameters of a dense Llama, from its dims."""
    attention = c.width * c.head_width * (2 * c.num_heads + 2 * c.num_kv_heads)
    feed_forward = 3 * c.width * c.ffn_width
    layer = attention + feed_forward + 2 * c.width
    return c.num_layers * layer + 2 * c.vocab_size * c.width + c.width


# %% tags=["nbval-check-output"]
for name in ("llama2-7b", "llama2-70b", "llama3-8b", "llama3-70b", "llama3.1-405b"):
    config = preset(name)
    assert count(config) == config.num_params
    print(f"{name:<14} {config.num_params:>15,} parameters")

# %% [markdown]
# These are the published numbers, to the last digit.
#
# ### One GPU would train for 58 years
#
# **MFU** (model FLOPs utilisation) is the number of useful FLOPs per second, divided by the peak. FLOPs that are computed again do
# not count. At an MFU of 40 %, for 15e12 tokens:

# %% tags=["nbval-check-output"]
for name, _ in LINES:
    c = preset(name)
    seconds = formulas.train_seconds(c.num_params, 15e12, 1, 0.4 * h100.flops_per_s)
    print(f"{name:<14} {seconds / 86400 / 365.25:5,.0f} years on one H100")

# %% [markdown]
# ### What `selective` keeps
#
# Its 736 MiB of a layer, in arrays of 64 MiB: the input 1, queries 1, keys and values ¼ each, attention's result 1, the sum after it 1,
# the two wide matmuls of the feed-forward 3.5 each. Together 11.5.
#
# ### How attention is counted
#
# `12 l n h s` is the count of the PaLM paper (appendix B): all pairs of positions. A kernel that skips what the causal mask hides does half
# of it: an eighth of the FLOPs at 8,192 positions, and as much as the weights at 57,258.
#
# ### Other words for recomputation
#
# torchtitan's selective checkpointing by operations (`op`) keeps every *second* matmul: less than `selective` here. It calls `block`
# *full*. PyTorch calls the whole idea activation checkpointing.
#
# ### Exercise (expert): which inputs to keep?
#
# Chen et al. (2016) keep some layers' inputs only, one of each group, and compute a group of layers again when its backward pass comes.
# A layer's activations are `ratio` times its input. Return the size of a group that holds least at the worst moment.


# %%
def keep_every(layers, ratio): ...


attempt("01.keep_every", keep_every)

# %% [markdown]
# ### On your cluster
#
# ```
# llmpar models llama3-8b                                   exact parameters
# llmpar inspect --mesh dp=1 --devices 1 --remat block      predicted beside compiled: memory, FLOPs
# llmpar plan --devices 8 --tokens 15T                      days, energy, and what fits
# ```
