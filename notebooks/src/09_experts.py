# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 30
#     needs: ["02", "04"]
#     objectives:
#     - Follow a token to its experts and back, and count what is sent.
#     - Choose between capacity, dropless and ragged exchange, knowing what each drops
#       or pads.
#     - Name two cures for a hot expert.
# ---

# %% [markdown]
# # 09 · Experts: what moves when a token chooses?
#
# A dense model uses every weight for every token. A mixture of experts has many feed-forwards in each layer, and a **router** sends a
# token to a few of them: Mixtral 8x7B has 46.7 billion parameters, and 12.9 of them work on a token (Jiang et al. 2024). Experts are
# cut by the axis `ep` (expert parallelism): each rank holds some of them, whole. Then tokens must travel to their experts and back. It is sometimes said
# that expert parallelism moves nothing; it moves the tokens, twice in each direction of each layer:
#
# | step | arrow |
# |---|---|
# | dispatch | `b/ep e c d -> b e/ep c d`, an all-to-all |
# | combine | `b e/ep c d -> b/ep e c d`, the same back |
#
# A **layout** such as `b/ep e c d` says which dim is cut by which axis, an **arrow** how that changes. `shard_map` runs a function on every
# device with its own block; a **census** counts what the compiled program sends. All words: [docs/words.md](../docs/words.md#words).
#
# **Question.** What moves, how much of it is padding, and what happens when everybody wants the same expert?
#
# Letters: `b` rows of the batch, `s` positions, `d` width of the model, `m` width of a feed-forward, `e` experts, `c`
# slots, `N` devices along the axis at hand, `a` experts that a token visits.
# (Most papers write k for a.)
#
# The core path ends at *Further*.

# %% tags=["plumbing"]
from llmpar.mesh import use_devices

devices = use_devices()

# %% tags=["plumbing"]
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from llmpar import draw, moe
from llmpar.config import ExpertConfig, preset
from llmpar.draw import scene
from llmpar.exercises import attempt, hint, met, say, solution
from llmpar.exercises.lesson import (
    as_predicted,
    counting_text,
    fresh_state,
    trained,
    verdicts,
)
from llmpar.inspect.census import arrow_text, census_hlo, census_table, read_program
from llmpar.mesh import make_mesh, spec
from llmpar.notation import parse_layout
from llmpar.par import Solo
from llmpar.plan import Plan
from llmpar.predict import formulas
from llmpar.predict.hardware import chip
from llmpar.step import Step

# Accelerators round float32 products unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
N = max(size for size in (1, 2, 4, 8) if size <= len(devices))
mesh = make_mesh(f"ep={N}")

# %% [markdown]
# ## One picture
#
# Every rank scores its own tokens against all experts, and keeps the best `a` of each token. Below is what the router of a toy really
# chose; on the right, how many rows each expert gets.

# %%
E, A = 8, 2  # experts, and how many of them a token visits
D, M, TOKENS = 16, 32, 32  # width, an expert's width, tokens of one rank
HOW = ExpertConfig(E, A)
rng = np.random.default_rng(0)
x = rng.standard_normal((N, TOKENS, D)).astype(np.float32)
router = rng.standard_normal((D, E)).astype(np.float32) / D**0.5


def routed(skew=0.0):
    """Weights and experts that the router chooses; skew makes expert 0 hotter."""
    logits = x @ router + skew * (np.arange(E) == 0)
    weights, chosen = moe.choose(HOW, moe.affinities(HOW, jnp.asarray(logits)))
    return np.asarray(weights), np.asarray(chosen)


weights, chosen = routed()
rows = [[int((mine == e).sum()) for e in range(E)] for mine in chosen]  # rank, expert
scene.show(draw.token_flow(rows, E // N))

# %% [markdown]
# ## Predict
#
# A rank has 32 tokens of width 16 in float32, `a` = 2, and all experts are equally likely. **How many bytes does it send to other ranks in
# the dispatch, if only the rows themselves travel?**

# %%
print(f"{N} ranks, {TOKENS} tokens on each; {E} experts, {E // N} on a rank")
bytes_dispatched = ...
attempt("09.dispatch_bytes", bytes_dispatched, ranks=N)

# %% [markdown]
# ## Run: a dispatch by hand
#
# The reference is dense: all tokens through all experts, and most results get weight 0. That is right, and E/a times too much work.


# %%
shapes = ((E, D, M), (E, D, M), (E, M, D))
gate, up, down = (rng.standard_normal(n).astype(np.float32) / 4 for n in shapes)


def feed_forward(x, gate, up, down):
    """The experts' products: x is b e c d, its rows sorted by expert."""
    hidden = jnp.einsum("becd,edm->becm", x, gate)
    hidden = jax.nn.silu(hidden) * jnp.einsum("becd,edm->becm", x, up)
    return jnp.einsum("becm,emd->becd", hidden, down)


def dense(x, weights, chosen, gate, up, down):
    """All experts on all tokens: the reference of this lesson."""
    share = (jax.nn.one_hot(chosen, E) * weights[..., None]).sum(-2)
    everywhere = jnp.broadcast_to(x[:, None], (N, E, TOKENS, D))
    every = feed_forward(everywhere, gate, up, down)
    return jnp.einsum("besd,bse->bsd", every, share)


# %% [markdown]
# By hand, as one rank sees it:
#
# 1. Place: a row's slot is how many earlier rows of this rank chose the same expert.
# 2. Lay the rows into a buffer `e c d`, with `c` slots for each expert.
# 3. One all-to-all: `b/ep e c d -> b e/ep c d`.
# 4. My experts multiply what has come from everybody.
# 5. The same all-to-all back: `b e/ep c d -> b/ep e c d`.
# 6. Read the rows at their slots and add them up, weighed.
#
# XLA's shapes are fixed before anybody has chosen, so `c` must be too: with `c` = all tokens of a rank, nothing can be dropped.


# %%
SLOTS = TOKENS  # c


def rank(x, weights, chosen, gate, up, down):  # b/ep s d, b/ep s a twice, e/ep d m …
    expert = chosen.reshape(-1)
    hot = jax.nn.one_hot(expert, E, dtype=jnp.int32)
    place = ((jnp.cumsum(hot, axis=0) - hot) * hot).sum(-1)  # 1
    slot = jnp.where(place < SLOTS, expert * SLOTS + place, E * SLOTS)  # else: dropped
    buffer = jnp.zeros((E * SLOTS, D))
    buffer = buffer.at[slot].set(jnp.repeat(x[0], A, axis=0), mode="drop")  # 2
    buffer = buffer.reshape(1, E, SLOTS, D)
    here = lax.all_to_all(buffer, "ep", split_axis=1, concat_axis=0, tiled=True)  # 3
    out = feed_forward(here, gate, up, down)  # 4
    back = lax.all_to_all(out, "ep", split_axis=0, concat_axis=1, tiled=True)  # 5
    back = back.reshape(E * SLOTS, D)
    rows = back.at[slot].get(mode="fill", fill_value=0).reshape(1, TOKENS, A, D)
    return (rows * weights[..., None]).sum(2)  # 6


tokens, experts = spec(parse_layout("b/ep s d")), spec(parse_layout("e/ep d m"))
places = (tokens,) * 3 + (experts,) * 3
by_hand = jax.shard_map(rank, mesh=mesh, in_specs=places, out_specs=tokens)


# %% tags=["plumbing"]
def with_gradients(layer):
    """The layer's output, and the gradients of everything but the choice."""

    def run(x, weights, chosen, *experts):
        of_floats = lambda x, weights, *experts: layer(x, weights, chosen, *experts)
        y, pull = jax.vjp(of_floats, x, weights, *experts)
        return y, *pull(jnp.cos(y))

    return jax.jit(run)


given = x, weights, chosen, gate, up, down
want = with_gradients(dense)(*given)
program, text = read_program(with_gradients(by_hand).lower(*given))
names = ("y", "x", "weights", "gate", "up", "down")
for name, a, b in zip(names, program(*given), want, strict=True):
    assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max(), name
say(
    "value: output and all gradients equal the dense evaluation; the router's weights"
    " have a gradient too"
)

# %% [markdown]
# Autodiff turned each all-to-all around: the gradients of the rows travel to the experts, and come back. Two forward, two backward.

# %%
table = census_table(census_hlo(text, mesh))
buffer_bytes = E * TOKENS * D * 4
if N > 1:
    sent = 4 * buffer_bytes * (N - 1) // N
    assert table == {("ep", "all-to-all"): {"count": 4, "bytes_sent": sent}}
    print(f"communication: 4 all-to-alls of a buffer of {buffer_bytes:,} B")
    met("09.dispatch_bytes", sent // 4)
    print(f"rows fill {A * TOKENS} of {E * TOKENS} slots:", end=" ")
    print(f"{E / A:g} times as much travels as is needed")

# %% [markdown]
# That is the honest price of "dropless" in fixed shapes. There are three ways out:
#
# * **Capacity** (GShard, Switch): fewer slots, and who finds none is left out.
# * **Ragged** exchange: send the full slots only, which XLA can do on GPUs and TPUs (`Plan.dispatch`).
# * **Pack by rank, not by expert**: a token travels to a rank once, however many of its experts are there, and comes
#   back as their sum.
#
# So `llmpar.moe` gives slots to N ranks, and not to E experts; who chose what is told to all ranks beforehand, `a` numbers for each token. That
# helps where N < E, and very much with many experts on a rank:

# %%
for how in (HOW, ExpertConfig(128, 8)):
    by_expert = how.num_experts / how.top_k
    for ranks in (1, 2, 4, 8):
        slots = ranks * how.slots(4096, 1, ranks) / 4096 / how.top_k
        helps = ranks < how.num_experts
        assert slots == ranks / how.top_k and (slots < by_expert) == helps
        print(f"E = {how.num_experts}, a = {how.top_k}, ep={ranks}:", end=" ")
        print(f"{slots:.2f} slots for each choice, in place of {by_expert:g}", end="")
        print("" if helps else ": no gain")

# %% [markdown]
# ## Capacity: who is left out
#
# An expert takes `factor` times its even share, the first to come. The others keep their residual stream as it was.

# %% tags=["nbval-check-output"]
draws = np.random.default_rng(1)
# Affinities of 8 rows of 256 tokens, expert 0 the hottest.
popular = draws.standard_normal((8, 256, E)) + np.linspace(1, -1, E)
print("capacity factor   dropped")
dropped = {}
for factor in (0.5, 1.0, 1.25, 1.5, 2.0, None):
    how = dataclasses.replace(HOW, capacity_factor=factor)
    _, kept, aux = moe.route(how, Solo(), jnp.asarray(popular, jnp.float32))
    counts = (np.asarray(kept)[..., None] == np.arange(E)).sum(2)  # b s e
    dropped[factor] = float(aux["tally"][-2]) / (8 * 256 * A)
    assert counts.sum(1).max() <= how.capacity(256)
    assert dropped[factor] == 1 - counts.sum() / (8 * 256 * A)
    print(f"{factor or 'none':>15}   {dropped[factor]:.1%}")
assert dropped[None] == 0 and dropped[0.5] > dropped[1.0] > dropped[2.0]

# %% [markdown]
# ### Exercise (core): how much room?
#
# 512 tokens with `a` = 2 chose eight experts 260, 190, 150, 120, 100, 84, 70 and 50 times. What is the smallest capacity, in rows, at which
# at most 1 % of all choices are dropped?

# %%
rows_per_expert = ...
attempt("09.capacity", rows_per_expert)

# %% [markdown]
# ## Compare: four verdicts on a Llama with experts
#
# `tiny-moe` has 8 experts with `a` = 2 in each layer. The same step, on one device and with experts cut by `ep`, beside ZeRO-3.

# %% tags=["plumbing"]
jax.clear_caches()  # the toys' programs: a lesson stays below 1 GB

# %%
CONFIG = dataclasses.replace(preset("tiny-moe"), num_layers=2)
ep = min(N, 4)
PLAN = Plan(f"ep={ep} fsdp={N // ep}")
TEXT, ADAM, STEPS = counting_text(N, 32), optax.adamw(1e-2), 3

print("Two programs are compiled and run: about 20 s.")
run = trained(CONFIG, PLAN, TEXT, ADAM, STEPS)
solo = trained(CONFIG, Plan("dp=1"), TEXT, ADAM, STEPS)
found = verdicts({"experts": run}, solo)["experts"]

# %%
gate_held = run.state.params["blocks"]["experts"]["gate"].addressable_shards[0].data
assert gate_held.shape == (2, E // ep, CONFIG.width // (N // ep), CONFIG.ffn_width)
print(
    "an expert's gate is stored as",
    PLAN.resolve().stored("experts l e d m"),
    gate_held.shape,
)
sums = PLAN.resolve().life("experts l e d m").unreduced.sums
print("and its gradient waits for a sum over:", sums or "nobody")
if N > 1:
    assert found["ep", "all-to-all"]["count"] == 4 * CONFIG.num_layers
    exchanges = [c for c in as_predicted(run) if c.kind == "all-to-all"]
    print(arrow_text(exchanges))  # there and back, twice

# %% [markdown]
# A dense weight is summed over `ep` as over any axis of the batch, and ZeRO cuts its state by `ep` too; an expert is neither, since
# no other rank of `ep` has it.
#
# ## Five lines
#
# 1. A layer of experts moves tokens: two all-to-alls forward, two backward, up to `a` rows per token each.
# 2. Static shapes need room for the worst case. Dropless sends padding; a capacity drops; ragged exchange does neither.
# 3. Only full blocks are multiplied: a/E of the work of all experts. What would be kept for the worst case is computed again.
# 4. Experts' gradients are summed over `dp` and `fsdp`, everything else over `ep` too.
# 5. The slowest rank sets the pace: balance by a loss, or by a bias that follows the load.
#
# **One number to remember: E/a.** The parameters that you get for the work of one, and the batch that you need to feed them.

# %%
model = preset("tiny-moe")
print(f"tiny-moe: E/a = {E / A:g};", end=" ")
print(f"{model.num_params:,} parameters, {model.active_params:,} active")

# %% [markdown]
# ## Further
#
# Who multiplies, what routers report, a hot expert and its cures, and what all this costs on real links.
#
# ## Blocks that hold something
#
# Empty slots travel, but are never multiplied: on its rank the rows of an expert fill whole blocks, and only blocks that hold something
# are worked on. (Gale et al. 2022 do the same with blocks of a sparse matrix.) Who multiplies depends on the devices (`Plan.grouped`):
# on CPUs a loop over each expert's blocks; on TPUs `jax.lax.ragged_dot`, for which XLA has a kernel there; on GPUs two kernels of
# `llmpar.kernels.products` in Triton, for XLA has none: it would multiply every row by every expert.

# %% [markdown]
# ### Exercise (stretch): combine
#
# Write step 6. `rows` is `[slots, d]`, `slot` says for each token and choice where its row lies (`len(rows)`: it was dropped), `weights`
# are the router's. Both are `[tokens, a]`. Return `[tokens, d]`; NumPy is there as `np`.


# %%
def combine(rows, slot, weights): ...


attempt("09.combine", combine)

# %% [markdown]
# ## A hot expert
#
# Drag the heat: all ranks wait for the one that has the busiest expert. Hatched is what a capacity would drop; without one, nothing is
# dropped. (In the stored page this is a picture.)

# %%
from llmpar.explore.small import RoutingExplorer

RoutingExplorer(experts=8, chosen=A, ranks=4, heat=2, capacity_percent=125)

# %% [markdown]
# And with this lesson's router:

# %% tags=["nbval-check-output"]
for skew in (0.0, 1.0, 2.0, 4.0):
    load = np.bincount(routed(skew)[1].ravel(), minlength=E)
    assert load.sum() == N * TOKENS * A
    most = load.max() / load.mean()
    print(f"skew {skew:g}: the busiest expert has {most:.2f} times the mean,", end=" ")
    print(f"of at most {E / A:g}")

# %% [markdown]
# Two cures are in use. A **balance loss** E/a · Σ f P multiplies each expert's share of the tokens with its mean affinity: its value is 1
# where all are equal, and its gradient lowers the affinities of the busy. Here it is taken row by row (DeepSeek-V3 2024, section 2.1.2),
# so no device must know another's rows. Or **a bias without a loss** (Wang et al. 2024): it takes part in choosing, not in
# weighing, and after each step it goes up for experts with less than the mean load, and down for the others.

# %%
balance, token = dataclasses.replace(HOW, aux_loss=1.0), np.arange(64)
even = 1e-3 * (np.eye(E)[token % E] + np.eye(E)[(token + 1) % E])
two = 50.0 * (np.zeros((64, 1)) + (np.arange(E) < 2))
cases = {"all equal": (even, 1), "expert 0 and 1 only": (two, E / A)}
for name, (logits, expected) in cases.items():
    aux = moe.route(balance, Solo(), jnp.asarray(logits[None], jnp.float32))[2]
    loss = float(aux["loss"].mean())
    print(f"balance loss, {name}: {loss:.3f}")
    assert abs(loss - expected) < 0.01

# %%
biased, bias, seen = dataclasses.replace(HOW, bias_rate=0.02), np.zeros(E), []
favour = moe.affinities(HOW, jnp.asarray(x @ router + 1.0 * (np.arange(E) == 0)))
for _ in range(40):
    picked = moe.choose(biased, favour, jnp.asarray(bias, jnp.float32))[1]
    load = np.bincount(np.asarray(picked).ravel(), minlength=E)
    seen.append(load.max() / load.mean())
    bias += biased.bias_rate * np.sign(load.mean() - load)
print(f"busiest over mean: {seen[0]:.2f} at first, {seen[-1]:.2f} after 40 steps")
print(f"the bias is {np.round(bias, 2)}")
assert seen[-1] < 1.3 < seen[0]

# %% [markdown]
# ## What routers report
#
# It comes with the metrics of each step:

# %%
for name, value in moe.summary(CONFIG.experts, run.metrics, ep).items():
    print(f"{name:<17} {value:.3f}")
assert np.allclose(run.metrics["load"], solo.metrics["load"], atol=2)
assert float(run.metrics["dropped"].sum()) == 0
print(
    f"{'(at most':<17} {np.log(E):.3f} nats of entropy, where the router does not care)"
)

# %% [markdown]
# ## What it costs on real links
#
# Per layer and direction, 2·a·tokens·d elements (EP−1)/EP: dispatch and combine. And an expert sees only `a` of E of the tokens. So two
# things that hide behind the work of a batch now need a batch E/a times as large: the sums of data parallelism (over the gradients of all
# experts), and the reading of weights from memory.

# %%
h100 = chip("h100")
for name in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"):
    config = preset(name)
    how = config.experts
    counts = dict(experts=how.num_experts, topk=how.top_k)
    sent = 2 * formulas.moe_elements(4096, config.width, how.top_k, 8)  # bfloat16
    batch = formulas.critical_batch(h100.flops_per_s, h100.hbm_bytes_per_s, **counts)
    print(f"{name:<14} {config.num_params / 1e9:6.1f} B parameters,", end=" ")
    print(f"{config.active_params / 1e9:5.1f} B active;", end=" ")
    print(f"4,096 tokens send {sent / 1e6:5.0f} MB a layer;")
    share = how.num_experts / how.top_k
    print(f"{'':<14} E/a = {share:g}: {batch:,.0f} tokens to fill a product")
assert formulas.dp_min_tokens(990e12, 400e9, experts=128, topk=4) == 79_200
print("published: 128 experts, a = 4, H100 nodes on 400 GB/s: 79,200 tokens per GPU")
print("before data parallelism hides (Scaling book)")

# %% [markdown]
# ### Exercise (expert): nodes that stay closed
#
# DeepSeek-V3 has 256 experts on 8 nodes and chooses 8 of them. A token is sent to a node once, however many of its experts are there. If
# all choices were equally likely: on how many nodes do its experts lie on average, with all nodes open (`free`), and with only
# 4 of them (`limited`, as its router does)?

# %%
free, limited = ..., ...
attempt("09.nodes", {"free": free, "limited": limited})

# %% [markdown]
# ## Where XLA's partitioner differs
#
# The dispatch is an island: a part of the model that is written by hand, in `shard_map`, under every reading. Inside it, both readings write
# the same two all-to-alls. Around it, Auto is free. The forward pass shows it:

# %%
auto = Step(CONFIG, dataclasses.replace(PLAN, reading="auto"), run.step.mesh, ADAM)
places = jax.tree.map(lambda x: x.sharding, auto.abstract_natural.params)
start = jax.device_put(fresh_state(CONFIG, ADAM).params, places)
text = jax.device_put(TEXT, auto.batch_sharding)
forward, program = read_program(auto.evaluate.lower(start, text))
first = jax.device_get(start), TEXT
assert np.allclose(forward(start, text), solo.step.evaluate(*first), rtol=1e-4)
table = census_table(census_hlo(program, auto.mesh))
exchanges = {key: row["count"] for key, row in table.items() if key[1] == "all-to-all"}
assert exchanges == ({("ep", "all-to-all"): 2 * CONFIG.num_layers} if N > 1 else {})
print("value: Auto's first loss is that of one device;", end=" ")
print(f"its forward pass has {sum(exchanges.values())} all-to-alls")

# %% [markdown]
# ## On your cluster
#
# ```
# llmpar train --model tiny-moe --mesh "ep=4 fsdp=2"                        experts on 4 ranks, ZeRO-3 beside them
# llmpar inspect --model tiny-moe --mesh "ep=8"                             what is sent and held, predicted and compiled
# llmpar compile --target h100:8x8 --model qwen3-30b-a3b --mesh "fsdp=8 ep=8"        full slots alone, and products by a kernel
# llmpar models qwen3-30b-a3b                                               total and active parameters
# ```
