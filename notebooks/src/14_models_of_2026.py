# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 15
#     needs: ["06", "09"]
#     question: Layers of models in use in 2026 keep and send different things. Which sends
#       what, and which model fits my mesh?
#     objectives:
#     - Count what a layer of full, window or latent attention, or of a recurrent state,
#       keeps of a token.
#     - Predict what each kind of layer sends over tp, sp, ep and pp, and read it in the
#       compiled program.
#     - Say which of three published models fits a machine, and why.
# ---

# %% [markdown]
# # 14 · Models in use in 2026: what do their layers keep and send?
#
# For one conversation of 131,072 tokens, Llama 3.1 70B keeps 40 GiB: keys and values of each token, in each layer. DeepSeek-V3 has more
# than nine times as many parameters and keeps a fifth of these bytes. Qwen3.5 keeps a tenth. What do their layers keep instead?

# %% tags=["plumbing"]
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # simulated devices; real ones: On your cluster

from llmpar.parallel.mesh import use_devices

devices = use_devices()

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from llmpar import draw, look
from llmpar.draw.scene import Line, Rect, Text, compose, legend, show, small_text
from llmpar.inspect.census import arrow_rows, census_table
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.lessons import attempt, hint, met, opened, say, solution
from llmpar.lessons.lesson import (
    as_predicted,
    as_table,
    counting_text,
    train_on,
    verdicts,
)
from llmpar.parallel.mesh import make_mesh
from llmpar.plan.plan import Plan
from llmpar.plan.presets import described_model, preset
from llmpar.planner import planner
from llmpar.predict import serving, traffic
from llmpar.predict.hardware import GIB, chip
from llmpar.training.step import Step

# Accelerators round float32 matmuls unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
N, TOKENS = len(devices), 131_072
NAMES = "llama3.1-70b gemma-3-27b gpt-oss-120b deepseek-v3 qwen3.5-397b-a17b".split()
MODELS = {name.removesuffix("-a17b"): preset(name) for name in NAMES}


def kind_of(block):
    """The kind of a layer, by what it keeps."""
    if block.mixer == "recurrent":
        return "recurrent state"
    if block.has_latent_attention:
        return "latent attention"
    return "window" if block.window else "full attention"


def kept(config, tokens):
    """Bytes that a conversation leaves, by kind of layer; states are float32."""
    found = {}
    for count, block in config.blocks:
        seen = min(tokens, block.window or tokens)
        size = count * (2 * seen * block.cache_width + 4 * block.state_size)
        found[kind_of(block)] = found.get(kind_of(block), 0) + size
    return found


COLOURS = {"full attention": "matmuls", "window": "elementwise"}
COLOURS |= {"latent attention": "other3", "recurrent state": "other1"}

# %% tags=["plumbing"]
rows = [(name, kept(config, TOKENS)) for name, config in MODELS.items()]
title = "Cache of one conversation of 131,072 tokens"
show(draw.memory_bars(rows, title=title, roles=COLOURS))

# %% tags=["plumbing"]
total = {name: sum(parts.values()) / GIB for name, parts in rows}
assert total["llama3.1-70b"] == 40 and 1 / 5 < total["deepseek-v3"] / 40 < 1 / 4
assert 0.09 < total["qwen3.5-397b"] / 40 < 0.11
llama = MODELS["llama3.1-70b"]
assert 9 < MODELS["deepseek-v3"].num_params / llama.num_params < 10
assert serving.cache_bytes(llama, TOKENS) == 40 * GIB  # none has a window

# %% [markdown]
# What a conversation leaves in memory is the *cache*: it is read for each new token (lesson 16). (Llama 3.1 and DeepSeek-V3 are of 2024,
# Gemma 3 and gpt-oss of 2025, Qwen3.5 of 2026.)
#
# ## The layers, one by one


# %% tags=["plumbing"]
def strips(models):
    """A column for each layer: above what mixes tokens, below its feed-forward."""
    items, lines = [], []
    for i, (name, config) in enumerate(models.items()):
        y, word = 62 * i, []
        items.append(Text(-10, y + 22, name, anchor="end"))
        for x, kind in enumerate(config.layer_kinds):
            block = config.blocks[kind][1]
            below = "ep" if block.experts else "cell"
            items.append(Rect(8 * x, y, 7, 22, COLOURS[kind_of(block)], "edge", 0.5))
            items.append(Rect(8 * x, y + 24, 7, 16, below, "edge", 0.5))
            word.append(kind_of(block) + ", experts" * bool(block.experts))
        counts = {kind: word.count(kind) for kind in dict.fromkeys(word)}
        said = "; ".join(f"{count} layers of {kind}" for kind, count in counts.items())
        lines.append(f"{name}: {said}")
    key = [(role, kind) for kind, role in COLOURS.items()]
    key += [("cell", "dense feed-forward"), ("ep", "experts")]
    title = "Five published models, layer by layer"
    return compose(title, [items, legend(key)], "\n".join(lines))


show(strips(MODELS))
deepseek = MODELS["deepseek-v3"]
assert [bool(b.experts) for _, b in deepseek.blocks] == [False, True]
assert [count for count, _ in deepseek.blocks] == [3, 58]
assert {b.window for _, b in MODELS["gpt-oss-120b"].blocks} == {128, None}
assert {b.window for _, b in MODELS["gemma-3-27b"].blocks} == {1024, None}
assert MODELS["gemma-3-27b"].period == (0, 0, 0, 0, 0, 1)
assert MODELS["qwen3.5-397b"].period == (0, 0, 0, 1)

# %% [markdown]
# - **Full attention** keeps the key and the value of each token, for each KV head.
# - A **window** looks at the last w tokens only: 1,024 in five of six layers of Gemma 3, 128 in every second layer of gpt-oss.
#   Older keys are forgotten.
# - **Latent attention** (DeepSeek's MLA) keeps one short vector for all heads: the *latent*, from which their keys and values
#   are computed, and one *rotary key*, which encodes the token's position.
# - A **recurrent state** (linear attention) keeps no tokens: one matrix for each head, which each token changes (and three inputs of a short
#   convolution).
#
# Not here: *sparse* attention (DeepSeek-V3.2): the cache stays, a small key is added, fewer keys are read.
#
# In the lower row, a layer has a *dense* feed-forward or experts. DeepSeek-V3 begins with three dense layers. In the others one
# expert is *shared*: it computes for all tokens.
#
# ## Predict: what does a token add to a layer's cache?
#
# Count numbers, not bytes. **(a)** 128 heads, each with a key and a value of 128 numbers. **(b)** Llama 3.1 70B: 8 KV heads of that size (8
# query heads share each of them). **(c)** DeepSeek-V3: a latent of 512 numbers and a rotary key of 64.

# %%
kept_numbers = {"128 heads": ..., "8 KV heads": ..., "latent": ...}
attempt("14.cache", kept_numbers)

# %% tags=["plumbing"]
counted = {"128 heads": 2 * deepseek.num_heads * deepseek.value_width}
counted |= {"8 KV heads": llama.cache_width, "latent": deepseek.cache_width}
met("14.cache", counted, "counted")
assert counted == {"128 heads": 32_768, "8 KV heads": 2_048, "latent": 576}
assert round(counted["128 heads"] / counted["latent"]) == 57

# %% [markdown]
# Full attention keeps 2·k·h numbers of a token, with k KV heads of width h. A latent with its rotary key has 1/57 of the numbers of
# (a). But all heads read it, so `tp`, which cuts heads, cannot cut this cache: each rank keeps all of it.
#
# ## Predict: how far must keys travel?
#
# A sequence of 64 positions on `sp=8`: rank 0 has the positions 0 to 7, rank 1 has 8 to 15, and so on. In ring attention keys and values hop
# from rank to rank (lesson 06). **How many hops does full attention need? And a window in which a query sees the last 8 positions, its own
# included?**

# %%
hops = {"full": ..., "window": ...}
attempt("14.hops", hops)


# %% tags=["plumbing"]
def band(ranks, own, window):
    """The squares of queries (rows) and keys (columns) in which something is seen."""
    panels, lines, side = [], [], 26
    for p, (name, width) in enumerate((("full", ranks * own), ("window", window))):
        x0, far = p * (ranks * side + 90), 0
        panels.append(Text(x0, -34, name, bold=True))
        for q in range(ranks):
            panels.append(small_text(x0 - 8, side * q + 13, f"{q}", "end"))
            panels.append(small_text(x0 + side * q + 13, -10, f"{q}"))
            for k in range(ranks):
                nearest = own * q - (own * k + own - 1)  # of its first query, to a key
                seen = k <= q and nearest < width
                far = max(far, q - k) if seen else far
                role = ("sp" if k == q else "other3") if seen else "paper"
                edge = "edge" if k <= q else "grid"
                panels.append(Rect(x0 + side * k, side * q, 25, 25, role, edge, 0.75))
        lines.append(f"{name}: keys come from ranks up to {far} before")
    key = [("sp", "a rank's own keys"), ("other3", "keys that must come")]
    title = "Queries of a rank (rows), keys of a rank (columns)"
    return compose(title, [panels, legend(key)], "\n".join(lines))


if opened("14.hops"):
    show(band(8, 8, 8))

# %% [markdown]
# A small model with one layer of each kind trains a step:

# %%
small = dict(vocab_size=256, hidden_size=32, num_attention_heads=8)
window = dict(num_key_value_heads=2, head_dim=8, sliding_window=8, num_hidden_layers=2)
window |= dict(intermediate_size=64, model_type="gemma3_text")
window |= dict(layer_types=["sliding_attention", "full_attention"])
gemma = described_model("small", small | window)
ring = Plan(f"sp={N}", zero=0, remat="none", sequence_order="contiguous")

text, sgd = counting_text(8, 64), optax.sgd(0.1)
alone = train_on(gemma, Plan("dp=1"), text, sgd, 1)
cut = train_on(gemma, ring, text, sgd, 1)
sent = verdicts({"sp=8": cut}, alone)


# %% tags=["plumbing"]
def of_arrow(census, start, direction):
    """How often the compiled program sends for an arrow, in a direction."""
    found = [row for row in arrow_rows(census) if row["arrow"].startswith(start)]
    return sum(row["count"] for row in found if row["direction"] == direction)


masks = {kind_of(block): block.mask for _, block in gemma.blocks}
by_kind = {kind: cut.step.plan.ring_hops(mask, 64) for kind, mask in masks.items()}
met(
    "14.hops",
    {"full": by_kind["full attention"], "window": by_kind["window"]},
    "needed",
)
forward = of_arrow(as_predicted(cut), "keys b t", "forward")
assert forward == sum(by_kind.values()) == 8 and by_kind["window"] == 1
if opened("14.hops"):
    print(f"compiled: {forward} hops of keys in the forward pass of the two layers")
del alone, cut, sent
jax.clear_caches()  # another program follows, and a small machine has 2 GB

# %% [markdown]
# ## Predict: what does a recurrent state send?
#
# This is linear attention in its simplest form. A state `S` begins at 0, each token adds `kᵀ v` to it (`h` × `h` numbers), and its query
# reads `q S`. A rank needs the sum of all earlier ranks. (In Qwen the state also decays, and each token corrects it. Still a rank hands on
# a state of the same size.)


# %%
def recurrent(q, k, v):  # s/sp h
    own = k.T @ v  # what my positions add
    before = jnp.zeros_like(own)
    for _ in range(N - 1):  # seven hops
        line = [(rank, rank + 1) for rank in range(N - 1)]
        # after j hops: the sum of the j ranks before me
        before = lax.ppermute(before + own, "sp", line)
    return q @ before + jnp.tril(q @ k.T) @ v  # earlier ranks, and mine


# %% [markdown]
# Take 1,024 positions on `sp=8`, `h` = 16, float32. **How many bytes does a rank send in seven hops of the state? And in seven
# hops of its keys and values, as in a ring?**

# %%
moved = {"state": ..., "keys and values": ...}
attempt("14.state", moved)

# %% tags=["plumbing"]
line = jax.make_mesh((N,), ("sp",), (AxisType.Auto,), devices=devices)
program = jax.shard_map(
    recurrent, mesh=line, in_specs=P("sp"), out_specs=P("sp"), check_vma=False
)
rng, LENGTHS = np.random.default_rng(0), (128, 256, 512, 1024, 2048)


def given(s):
    return [rng.standard_normal((s, 16)).astype(np.float32) for _ in range(3)]


def sends(s):
    rows = look(program, *(jax.ShapeDtypeStruct((s, 16), jnp.float32),) * 3).rows
    assert {row["collective"] for row in rows} == {"collective-permute"}
    return sum(row["bytes_sent"] for row in rows)


# %%
found = {s: sends(s) for s in (128, 1024)}
if opened("14.state"):
    print("compiled, bytes of the state by positions:", found)

# %% tags=["plumbing"]
q, k, v = given(128)
whole = np.tril(q @ k.T) @ v  # one device
assert np.allclose(jax.jit(program)(q, k, v), whole, rtol=1e-4, atol=1e-3)
state_bytes, keys_bytes = 7 * 4 * 16 * 16, lambda s: 7 * 4 * (s // 8) * 2 * 16
assert set(found.values()) == {state_bytes} == {7168} and keys_bytes(1024) == 114_688
met("14.state", {"state": state_bytes, "keys and values": keys_bytes(1024)}, "computed")
kib = lambda values: [x / 1024 for x in values]
lines = [("keys and values", kib(map(keys_bytes, LENGTHS)), "sp-line", "s", False)]
lines += [("state", kib([state_bytes] * len(LENGTHS)), "measured", "o", False)]
axes = dict(x="positions on eight ranks", y="KiB that a rank sends")
title = "A ring sends more for a longer sequence, a state does not"
if opened("14.state"):
    show(draw.curves(lines, LENGTHS, **axes, title=title))
qwen = MODELS["qwen3.5-397b"]
state, attention = (block for _, block in qwen.blocks)
assert 4 * state.state_size == 4 * 2**20 and attention.cache_width == 1024
assert 4 * state.state_size // (2 * attention.cache_width) == 2048

# %% [markdown]
# In Qwen3.5 the state of a layer takes 4 MiB. A full layer keeps 2 KiB of each token: more from 2,049 tokens on.
#
# ## Predict: how often do tokens travel to experts?
#
# A small model of DeepSeek's family has three layers. The first is dense; the others have eight experts, and a shared one that every token
# goes to. **How many all-to-alls has a training step on `ep=4` (nothing is recomputed), and how many of them are for the shared experts?**
# (Lesson 09.)

# %%
exchanges = {"in all": ..., "shared": ...}
attempt("14.exchanges", exchanges)

# %%
latent = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8)
latent |= dict(v_head_dim=8, num_hidden_layers=3, first_k_dense_replace=1)
latent |= dict(intermediate_size=64, moe_intermediate_size=16, n_routed_experts=8)
latent |= dict(n_shared_experts=1, num_experts_per_tok=2, model_type="deepseek_v3")
small_v3 = described_model("small", small | latent)
both = Plan(f"sp={N // 4} ep=4", zero=0, remat="none", context_parallel="gather")

step = Step(small_v3, both, make_mesh(both.mesh), sgd)
batch = step.abstract_batch(8, 64)
traced = step.run.trace(step.abstract_state, batch).jaxpr  # read, not run

# %% tags=["plumbing"]
census = census_jaxpr(traced, step.mesh.shape)
predicted = traffic.step_traffic(step.plan, 8, 64)
table = census_table(census)
assert table == as_table(predicted)
found = sum(row["count"] for (_, kind), row in table.items() if kind == "all-to-all")
assert found == 4 * 2 == sum(b.experts is not None for _, b in small_v3.blocks) * 4 * 2
met("14.exchanges", {"in all": found, "shared": 0}, "traced")
latents = predicted["sp", "all-gather"].arrows["attention b s c -> keys b s c"][0]
assert latents == 3 and small_v3.cache_width == 24  # each layer gathers 16 + 8 numbers
rows_of_rank, share = 8 // 4, 1 / 2
_, gathered = predicted["sp", "all-gather"].arrows["attention b s c -> keys b s c"]
assert gathered == 3 * rows_of_rank * 64 * 24 * 4 * share == 18_432

# %% [markdown]
# ## What each kind of layer sends
#
# (The *stream* is what a layer passes to the next layer: d numbers for each token. `tp` adds up parts of it, twice in a layer forward,
# and twice backward: lesson 05.)

# %% tags=["plumbing"]
assert small_v3.num_heads * (16 + 8) == 192
SENDS = {
    "full attention": (
        "sums of the stream",
        "keys and values, n - 1 hops",
        "",
        "2·k·h of each token",
    ),
    "window": (
        "sums of the stream",
        "keys and values, few hops",
        "",
        "2·k·h of the last w",
    ),
    "latent attention": (
        "sums of the stream",
        "latents: a gather or a ring",
        "",
        "a latent of each token",
    ),
    "recurrent state": ("sums of the stream", "a state, n - 1 hops", "", "one state"),
    "dense or shared": ("sums of the stream", "", "", ""),
    "experts": ("sums of the stream", "", "tokens, both ways", ""),
}
AXES = "tp", "sp", "ep"
table = [
    (
        kind,
        [
            (text, (*AXES, "activations")[i] if text else "")
            for i, text in enumerate(cells)
        ],
    )
    for kind, cells in SENDS.items()
]
note = "pp: whatever the layer, a stage hands on the stream: b·s·d numbers a microbatch"
show(
    draw.table(table, (*AXES, "kept"), "What a layer sends, and what it keeps", [note])
)

# %% [markdown]
# ## Predict: how many GiB of state does each GPU hold?
#
# Take 64 GPUs of one rack (GB200, 184 GiB each). `llmpar plan` lets JAX take 95 % and keeps 8 % of that free, for errors of its estimate:
# a plan may use 161 GiB. Training in float32 with Adam holds 16 bytes for each parameter, all cut over 64 devices. gpt-oss has 116.8e9
# parameters, Qwen3.5 396.3e9, DeepSeek-V3 671.0e9. **How many GiB of this does each GPU hold for each model? Which will fit?**

# %%
state_gib = {"gpt-oss-120b": ..., "qwen3.5-397b": ..., "deepseek-v3": ...}
attempt("14.fits", state_gib)

# %%
gb200 = chip("gb200")
answers = {}
for name in state_gib:
    asked = planner.Question(MODELS[name], gb200, 64, 128, 8192)  # all axes are free
    try:
        answers[name] = planner.decide(asked, keep=1).plans[0]
    except ValueError as refusal:
        answers[name] = refusal

# %% tags=["plumbing"]
room = asked.capacity_bytes / GIB
assert asked.share == planner.GPU_SHARE == 0.95  # the text has these
assert (round(gb200.usable_hbm_gib), round(room)) == (184, 161)
sizes = {name: 16 * MODELS[name].num_params / 64 / GIB for name in state_gib}
met("14.fits", sizes, "GiB:")
is_open = opened("14.fits")
for name, one in answers.items():
    fits = not isinstance(one, ValueError)
    assert fits == (name != "deepseek-v3") and sizes[name] < room, name
    if fits and is_open:
        took = f"{one.time.step_s:.1f} s a step, {one.total_bytes / GIB:.0f} GiB"
        print(f"{name:<13} {str(one.plan.mesh):<12} {took}, {sizes[name]:.0f} of state")
    elif is_open:
        least = float(re.search(r"holds ([\d.]+) GiB", str(one))[1])
        assert least > room
        told = f"at least {least:.0f} GiB, {sizes[name]:.0f} of state"
        print(f"{name:<13} fits on no mesh of 64: {told}")

# %% [markdown]
# DeepSeek-V3's state would fit, but leaves 5 GiB for everything else. For gpt-oss the planner fills the memory with activations, rather than
# compute them again.
#
# ## Keep: ask each kind of layer two questions
#
# 1. What does a token add to the cache? 2·k·h numbers (full), the same for the last w tokens (window), one latent for all
#    heads, or nothing (a recurrent layer has one state).
# 2. What travels along `sp`? Keys, n − 1 hops on n ranks; a window's, in order, only as many hops as the window reaches back. Latents, in place of keys.
#    A state, of the same size for any length.
# 3. `tp` cuts heads. It cuts no latent: each rank keeps it whole.
# 4. Only layers with experts send tokens over `ep`; dense layers and shared experts do not.
# 5. Check the state first: all its bytes, divided by the devices. If it does not fit, or leaves no room for activations, you need more
#    devices, or fewer bytes per parameter, not another mesh.

# %% [markdown]
# ## Further
#
# ### A sink sends nothing
#
# gpt-oss adds an *attention sink*: one learned number for each head, beside the scores. It is a weight: it leaves nothing in the cache, and
# no activation is sent for it.
#
# ### What the small model of DeepSeek's family gathers
#
# Its plan says `context_parallel="gather"`: over `sp` latents are gathered, not keys: 24 numbers for each token and layer, where its eight
# heads would have 192. These are 3 layers × 2 rows (8 over `ep`) × 64 positions × 24 numbers × 4 bytes. Each of two ranks sends half of
# them: 18,432 bytes, as in the traced program.
#
# ### Zigzag and a window
#
# Zigzag gives each rank an early and a late part of the sequence, so that all have equal work in full attention (lesson 06). Then a window's keys are
# on ranks that are far away:

# %%
for order in ("contiguous", "zigzag"):
    plan = Plan(f"sp={N}", sequence_order=order).resolve(gemma)
    hops = {kind: plan.ring_hops(mask, 64) for kind, mask in masks.items()}
    print(f"{order:<11} {hops}")
    assert hops["window"] == {"contiguous": 1, "zigzag": 7}[order]

# %% [markdown]
# One order cannot be best for both kinds of layers.
#
# ### tp cuts no latent
#
# Which share of a conversation's cache does a rank of `tp=8` keep? Eight KV heads are one for each rank. A latent has no heads, so each
# rank keeps all of it. So engines often give each device other requests of DeepSeek, and cut its heads little or not at all.

# %%
cuts = {n: serving.cache_cuts(MODELS[n], 8) for n in ("llama3.1-70b", "deepseek-v3")}
for name, parts in cuts.items():
    print(f"{name:<12} 1/{parts} of the cache on each rank")
assert [*cuts.values()] == [8, 1]

# %% [markdown]
# ### Where XLA's partitioner differs
#
# All programs of this lesson have their collectives written. Under `--mode auto` the partitioner chooses them: `llmpar inspect --mode auto`
# shows both.
#
# ### On your cluster
#
# ```
# llmpar models                                                             all presets; "planned" ones do not run here
# llmpar plan --model qwen3.5-397b-a17b --chip gb200 --devices 64           which mesh, and why
# llmpar inspect --model gpt-oss-20b --mesh "ep=8"                          what a step holds and sends
# ```
