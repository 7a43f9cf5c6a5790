# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 20
#     needs: ["00"]
#     objectives:
#     - Count the parameters, the training state and the FLOPs of a Llama from its dims.
#     - Tell what grows with the parameters from what grows with the tokens, and what
#       recomputation buys.
#     - Decide how many devices memory demands, and how many a deadline demands.
# ---

# %% [markdown]
# # 01 · Memory and FLOPs: why is one device not enough?
#
# Training holds four things. **Parameters** are the numbers that are learned. **Gradients** say how to change them. The
# **optimizer state** is what Adam remembers of earlier steps: two moments, and a float32 copy of the weights. **Activations**
# are results of the forward pass that the backward pass needs again. A **FLOP** is one addition or multiplication.
#
# **Question.** How much memory and how much computing does a model want, before anything is parallel?
#
# Letters: `b` rows of the batch, `s` positions, `d` width, `m` width of a feed-forward, `n` query heads, `k` KV heads, `h` width
# of a head, `l` layers, `v` vocabulary, `Ψ` parameters, `T` tokens per device.
#
# All words: [docs/words.md](../docs/words.md#words). The core path ends at *Further*.

# %% tags=["plumbing"]
from llmpar.mesh import use_devices

devices = use_devices()

# %% tags=["plumbing"]
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from llmpar import draw
from llmpar.config import preset
from llmpar.draw import scene
from llmpar.exercises import attempt, hint, met, solution
from llmpar.exercises.lesson import argument_bytes, counting_text, trained, verdicts
from llmpar.inspect.census import compiled_memory
from llmpar.plan import Plan
from llmpar.predict import formulas
from llmpar.predict.hardware import chip

# Accelerators round float32 products unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")

# %% [markdown]
# ## Parameters, counted
#
# A Llama layer has four matrices for attention (queries `d n h`, keys and values `d k h`, output `n h d`), three for the
# feed-forward (`d m` twice, `m d`), and two vectors of width `d`. Around the layers stand the embedding `v d`, the head `d v`
# and one more vector.


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
# These are the published numbers, to the last one.
#
# ## Predict
#
# Adam in mixed precision holds a weight and its gradient in 16 bits, and in 32 bits a copy of the weight and two moments.
# **How many GB (1e9 bytes) is that for Llama 3 8B?**

# %%
gigabytes = ...
attempt("01.state_gb", gigabytes)

# %% [markdown]
# ## One picture
#
# The state alone, against one H100 (the dashed line is what JAX takes of it when it starts). No activation is counted yet.

# %%
PARTS = {"weights": 2, "gradients": 2, "optimizer": 12}
MODELS = ("llama3.2-1b", "llama3.2-3b", "llama3-8b", "llama2-13b")
held = {
    name: {part: size * preset(name).num_params for part, size in PARTS.items()}
    for name in MODELS
}
capacity = chip("h100").usable_bytes
title = "Training state on one device"
scene.show(draw.memory_bars(held.items(), capacity_bytes=capacity, title=title))
met("01.state_gb", sum(held["llama3-8b"].values()) / 1e9, "counted")

# %% [markdown]
# ## Run: what a compiled step holds
#
# Our small model is trained with float32 weights and two float32 moments: 12 bytes per parameter are *arguments* of the
# step, and so is the batch. The compiler says what it reserves. The prediction is exact.

# %%
CONFIG = dataclasses.replace(preset("tiny"), num_layers=8)
TEXT, ADAM = counting_text(8, 128), optax.adamw(1e-2)
REMAT = ("none", "selective", "block")  # policies of recomputation, see below
print("Three programs are compiled and run: about 20 s.")
runs = {
    remat: trained(CONFIG, Plan("dp=1", remat=remat), TEXT, ADAM, 2) for remat in REMAT
}
predicted = argument_bytes(runs["none"])
held = compiled_memory(runs["none"].compiled)["argument_bytes"]
for part, size in predicted.items():
    print(f"{part:<10} {size:>10,} B")
print(f"compiled   {held:>10,} B in all")
assert held == sum(predicted.values())
assert predicted["params"] == 4 * CONFIG.num_params

# %% [markdown]
# ## Activations
#
# The backward pass of `y = x w` needs `x`. So every layer keeps its inputs, and the bytes grow with the tokens and not with
# the parameters. **Recomputation** (remat) keeps less and computes the rest again: `selective` keeps results of products,
# `block` keeps a layer's input only. For Llama 3 8B and 8,192 tokens in 16 bits:

# %% tags=["nbval-check-output"]
big = preset("llama3-8b")
heads = (big.num_heads, big.num_kv_heads, big.head_width)
for policy in ("none", "selective", "full"):
    dims = (8192, big.width, *heads, big.ffn_width)
    layer = formulas.llama_activation_bytes(*dims, recompute=policy)
    mib, gib = layer / 2**20, 32 * layer / 2**30
    print(f"{policy:<10} {mib:>7,.0f} MiB a layer, {gib:5.1f} GiB")

# %% [markdown]
# And what the compiler reserves for our model, besides its arguments. The value does not change: the same numbers are
# computed, some of them twice.

# %%
temporaries = {}
for remat, run in runs.items():
    temporaries[remat] = compiled_memory(run.compiled)["temp_bytes"]
    print(f"{remat:<10} {temporaries[remat] / 2**20:5.1f} MiB of temporaries")
assert temporaries["block"] < temporaries["selective"] < temporaries["none"]
assert np.allclose(runs["block"].losses, runs["none"].losses, rtol=1e-5)

# %% [markdown]
# ### Exercise (core): what fits?
#
# `least`: the smallest number of A100s with 40 GB whose memory together holds the state of Llama 3 8B (all of it cut evenly).
# `left on 8`: how many GB are left on each of eight.

# %%
least, left_on_8 = ..., ...
attempt("01.fits", {"least": least, "left on 8": left_on_8})

# %% [markdown]
# ## FLOPs
#
# A product of T rows, `d` wide, with a matrix `d m` has T·m sums of d terms: 2·T·d·m FLOPs. Its backward pass has two products of the same size:
# one for the gradient of its input, and one for that of the weight. So: 2 per parameter and token forward, 4 backward, 6 in
# all. The compiler counts the same.

# %%
T, D, M = 256, 64, 128
x, w = jnp.ones((T, D)), jnp.ones((D, M))


def loss(x, w):
    return jnp.sum((x @ w) ** 2)


def flops_of(function):
    return jax.jit(function).lower(x, w).compile().cost_analysis()["flops"]


forward = flops_of(lambda x, w: x @ w)
both = flops_of(jax.value_and_grad(loss, argnums=(0, 1)))
print(f"forward {forward:,.0f} = 2 T d m; both ways {both / forward:.2f} times as much")
assert forward == 2 * T * D * M and 3 <= both / forward < 3.1

# %% [markdown]
# Attention adds products without parameters: scores and their use, `4 s n h` per token and layer forward, so `12 l n h s`
# both ways (half of it under a causal mask; the whole square is the convention of the PaLM paper, appendix B).
#
# Whoever quotes **MFU** (model FLOPs utilisation) divides these useful FLOPs per second by the peak. Recomputed FLOPs do not
# count.

# %% tags=["nbval-check-output"]
h100 = chip("h100")
print("15T tokens on one H100 at 40 %, and attention's share at 8,192 positions:")
for name in ("llama3-8b", "llama3-70b", "llama3.1-405b"):
    c = preset(name)
    attention = 12 * c.num_layers * c.num_heads * c.head_width * 8192
    seconds = formulas.train_seconds(c.num_params, 15e12, 1, 0.4 * h100.flops_per_s)
    share = attention / (6 * c.num_params + attention)
    years = seconds / 86400 / 365.25
    print(f"{name:<14} {years:5,.0f} years; {share:.0%}")

# %% [markdown]
# ### Exercise (core): how long?
#
# 1,024 H100s (989.4 TFLOP/s each) reach 40 % of their peak. How many **days** does Llama 3 8B take for 15T tokens?
# Attention is not counted.

# %%
num_days = ...
attempt("01.days", num_days)

# %% [markdown]
# ## Four verdicts
#
# They return in every lesson. Here one device holds all.

# %%
sent = verdicts(runs, runs["none"], weights_within=None)
assert not any(sent.values()), "one device sends nothing"

# %% [markdown]
# ## Five lines
#
# 1. Training holds 16 bytes per parameter before the first token.
# 2. Activations grow with tokens; recomputation trades them for FLOPs.
# 3. 6 FLOPs per parameter and token: 2 forward, 4 backward.
# 4. Attention adds `12 l n h s` per token: little at 8,192 positions, most of it at a million.
# 5. Memory says how many devices you must have; FLOPs say how many you want.
#
# **Two numbers to remember: 16 bytes per parameter, 6 FLOPs per parameter and token.**

# %%
state = formulas.zero_bytes(preset("llama3-8b").num_params, 1, 0)
assert state == 16 * preset("llama3-8b").num_params
room = h100.usable_hbm_gib
print(f"Llama 3 8B: {state / 2**30:.0f} GiB of state; an H100 has {room:.0f} GiB")

# %% [markdown]
# ## Further
#
# ### Exercise (stretch): where attention overtakes
#
# From which sequence length `s` on does attention (the whole square) compute more than all weights of Llama 3 8B that
# multiply? Reading the embedding is no product; the head is one.

# %%
length = ...
attempt("01.crossover", length)

# %% [markdown]
# ### Exercise (expert): which inputs to keep?
#
# Chen et al. (2016) keep some layers' inputs only, one of each group, and compute a group of layers again when its backward pass comes.
# A layer's activations are `ratio` times its input. Return the size of a group that holds least at the worst moment.


# %%
def keep_every(layers, ratio): ...


attempt("01.keep_every", keep_every)

# %% [markdown]
# ## On your cluster
#
# ```
# llmpar models llama3-8b                                   exact parameters
# llmpar inspect --mesh dp=1 --devices 1 --remat block      predicted beside compiled: memory, FLOPs
# llmpar plan --devices 8 --tokens 15T                      days, energy, and what fits
# ```
