# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 30
#     needs: ["02", "04"]
#     question: What moves when a token chooses its experts, how much of it is padding,
#       and what happens when all tokens choose the same one?
#     objectives:
#     - Follow a token to its experts and back, and count what is sent.
#     - Choose between a capacity, a slot for every token and a ragged exchange, and say what
#       each drops or pads.
#     - Name two remedies if most tokens choose one expert.
# ---

# %% [markdown]
# # 09 · Experts: a token chooses. What must travel?
#
# Mixtral 8x7B has 46.7 billion weights. Each token uses 12.9 billion of them: two of eight *experts* in every layer, and everything
# outside the experts. The experts are on several devices. So a token must go to its experts and come back: follow the one with the thick
# border.

# %% tags=["plumbing"]
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # simulated devices; real ones: On your cluster

from llmpar.parallel.mesh import use_devices

devices = use_devices()

import dataclasses
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from llmpar import draw, lessons
from llmpar.draw import scene
from llmpar.explore.small import RoutingExplorer
from llmpar.inspect.census import arrow_text, census_hlo, census_table, read_program
from llmpar.lessons import attempt, hint, met, opened, say, solution
from llmpar.lessons.lesson import (
    as_predicted,
    counting_text,
    fresh_state,
    train_on,
    verdicts,
)
from llmpar.model import moe
from llmpar.parallel.mesh import make_mesh, spec
from llmpar.parallel.modes import Solo
from llmpar.plan.layout import parse_layout
from llmpar.plan.model_config import ExpertConfig
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.predict import formulas
from llmpar.predict.hardware import chip
from llmpar.training.step import Step

# Accelerators round float32 matmuls unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
N = len(devices)  # 8
mesh = make_mesh(f"ep={N}")

# Four ranks, four experts, four tokens on each rank, and what a router chooses.
FOUR = ExpertConfig(4, 2)
logits = np.random.default_rng(38).standard_normal((4, 4, 4)).astype(np.float32)
shares, visits = moe.choose_experts(FOUR, moe.affinities(FOUR, jnp.asarray(logits)))
VISITS, SHARES = np.asarray(visits).tolist(), np.asarray(shares)[0, 0].round(2).tolist()
assert np.allclose(SHARES, (0.64, 0.36))

# %%
scene.show(draw.dispatch(VISITS, weights=SHARES))

# %% [markdown]
# Four ranks (devices) have four tokens each. An **expert** is a feed-forward with weights of its own; rank 0 has expert 0, rank 1 expert 1,
# and so on. The **router**, a small matrix, scores every token against all experts and chooses the best two (*top-2*; we write `a` for this
# number, papers write k). A copy of the token goes to each of its experts; the expert computes with it, and the result comes back. The two
# results are multiplied by the router's scores (0.64 and 0.36) and added.
#
# An **all-to-all** carries the copies: a rank sends a different part to each rank. The mesh axis over which the experts are distributed
# is `ep`, *expert parallelism*.
#
# ## Predict: how much leaves a rank?
#
# Now a program. Each of N ranks has 32 tokens of width 16 in float32. There are `e` = 8 experts, the same number on each rank. The
# router chooses `a` = 2 of them for each token, and all experts are equally likely. **How many bytes does a rank send to other ranks
# before the experts compute, if it sends only the copies of tokens?**

# %%
E, A = 8, 2  # e experts, and a token visits a of them
D, M, TOKENS = 16, 32, 32  # width, an expert's width, tokens of one rank
print(f"{N} ranks, {TOKENS} tokens on each; {E} experts, {E // N} on a rank")
bytes_dispatched = ...
attempt("09.dispatch_bytes", bytes_dispatched, ranks=N)

# %% [markdown]
# ## A buffer with a fixed shape
#
# JAX's compiler, XLA, must know every shape before any token has chosen its experts. So a rank puts its copies into a buffer with `c`
# slots for each of the `e` experts. The first copy for an expert gets its slot 0, the next one slot 1: three copies for experts 2, 5, 2 get
# the slots 0, 0, 1. Here are four slots for each expert:

# %%
if opened("09.dispatch_bytes"):
    scene.show(draw.dispatch(VISITS, slots=4, weights=SHARES))

# %% [markdown]
# ## Predict: what does an exchange of buffers send?
#
# With `c` = 32, all 32 tokens of a rank may choose the same expert, and every copy has a slot. **How many times as many bytes as the copies
# does an exchange of this buffer send?**

# %%
times = ...
attempt("09.buffer", times)

# %% [markdown]
# The exchange is the arrow `b/ep e c d -> b e/ep c d`. Before it a rank has its own tokens (`b/ep`), in slots for all experts. After it
# the rank has the slots of its own experts (`e/ep`), from all ranks. (`b`: sequences, here one for each rank. In code, a capital letter is
# the size of a dim.)


# %%
C = TOKENS  # c slots for each expert: room for the worst case


def slots_of(chosen):
    """Each copy's slot: its expert's first, and one on for each earlier copy."""
    expert = chosen.reshape(-1)
    hot = jax.nn.one_hot(expert, E, dtype=jnp.int32)  # a 1 at each expert
    earlier = ((jnp.cumsum(hot, axis=0) - hot) * hot).sum(-1)
    # No slot left: an index outside the buffer, so the copy is dropped.
    return jnp.where(earlier < C, expert * C + earlier, E * C)


def rank(x, scores, chosen, gate, up, down):
    """One rank: x its tokens (1 s d), scores the router's, the last its experts'."""
    slot, copies = slots_of(chosen), jnp.repeat(x[0], A, axis=0)
    buffer = jnp.zeros((E * C, D)).at[slot].set(copies, mode="drop")
    buffer = buffer.reshape(1, E, C, D)
    # Cut along the first dim that is named, joined along the second (tiled).
    here = lax.all_to_all(buffer, "ep", 1, 0, tiled=True)  # b/ep e -> b e/ep
    out = feed_forward(here, gate, up, down)  # my experts, everybody's copies
    back = lax.all_to_all(out, "ep", 0, 1, tiled=True)  # b e/ep -> b/ep e
    back = back.reshape(E * C, D)
    results = back.at[slot].get(mode="fill", fill_value=0)
    results = results.reshape(1, TOKENS, A, D)
    return (results * scores[..., None]).sum(2)


# %% tags=["plumbing"]
HOW = ExpertConfig(E, A)
rng = np.random.default_rng(0)
x = rng.standard_normal((N, TOKENS, D)).astype(np.float32)
router = rng.standard_normal((D, E)).astype(np.float32) / D**0.5
shapes = ((E, D, M), (E, D, M), (E, M, D))
gate, up, down = (rng.standard_normal(n).astype(np.float32) / 4 for n in shapes)


def routed(skew=0.0):
    """Weights and experts that the router chooses; skew makes expert 0 hotter."""
    logits = x @ router + skew * (np.arange(E) == 0)
    weights, chosen = moe.choose_experts(HOW, moe.affinities(HOW, jnp.asarray(logits)))
    return np.asarray(weights), np.asarray(chosen)


def feed_forward(x, gate, up, down):
    """The experts' matmuls: x is b e c d, its tokens sorted by expert."""
    hidden = jnp.einsum("becd,edm->becm", x, gate)
    hidden = jax.nn.silu(hidden) * jnp.einsum("becd,edm->becm", x, up)
    return jnp.einsum("becm,emd->becd", hidden, down)


def dense(x, weights, chosen, gate, up, down):
    """All experts on all tokens: the reference of this lesson."""
    share = (jax.nn.one_hot(chosen, E) * weights[..., None]).sum(-2)
    everywhere = jnp.broadcast_to(x[:, None], (N, E, TOKENS, D))
    every = feed_forward(everywhere, gate, up, down)
    return jnp.einsum("besd,bse->bsd", every, share)


def with_gradients(layer):
    """The layer's output, and the gradients of everything but the choice."""

    def run(x, weights, chosen, *experts):
        of_floats = lambda x, weights, *experts: layer(x, weights, chosen, *experts)
        y, pull = jax.vjp(of_floats, x, weights, *experts)
        return y, *pull(jnp.cos(y))

    return jax.jit(run)


tokens, experts = spec(parse_layout("b/ep s d")), spec(parse_layout("e/ep d m"))
places = (tokens,) * 3 + (experts,) * 3
by_hand = jax.shard_map(rank, mesh=mesh, in_specs=places, out_specs=tokens)
given = *(x, *routed()), gate, up, down
want = with_gradients(dense)(*given)
program, text = read_program(with_gradients(by_hand).lower(*given))
names = ("y", "x", "weights", "gate", "up", "down")
for name, a, b in zip(names, program(*given), want, strict=True):
    assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max(), name
table = census_table(census_hlo(text, mesh))
sent = 4 * E * TOKENS * D * 4 * (N - 1) // N  # four times the buffer
exchanges = {("ep", "all-to-all"): {"count": 4, "bytes_sent": sent}}
assert table == exchanges
print("Same output and gradients as one device that runs every expert on every token")
print("and adds up the chosen ones.")

# %% [markdown]
# In the backward pass each all-to-all runs the other way: gradients travel to the experts and back. That makes four exchanges, two
# forward and two backward.
#
# ## What the program sends

# %%
met("09.dispatch_bytes", A * TOKENS * D * 4 * (N - 1) // N, "copies alone")
met("09.buffer", E / A, "times the copies' bytes:")
if opened("09.buffer"):
    print(f"an exchange sends {sent // 4:,} B: copies fill {A * TOKENS} of", end=" ")
    print(f"{E * TOKENS} slots, and empty slots travel, too")

# %% [markdown]
# The factor is e/a. There are three remedies.
#
# * **Capacity** (GShard, Switch): fewer slots. A token that finds no free slot at an expert is *dropped* there.
# * **Ragged** exchange: send only the full slots. First ranks tell each other how many slots are full. GPUs and TPUs can do
#   this; our simulated devices cannot.
# * **Pack by rank**: a token is sent to a rank only once, even if several of its experts are there, and the sum of their
#   results comes back. llmpar, the library of these lessons, does this ([Further](#Further)).
#
# ## Predict: how many choices are dropped?
#
# Now 4 ranks have 64 tokens each: 512 choices. Each rank has 20 slots for each of eight experts, 1.25 times the even share. The ranks
# chose expert 0 35, 38, 36 and 31 times, and no other expert more than 20 times. **How many choices are dropped, and how many of the
# 640 slots stay empty?** (Where a choice is dropped, the token's result lacks one expert's part.)

# %%
lost = {"dropped": ..., "empty": ...}
attempt("09.dropped", lost)

# %%
figure = RoutingExplorer(only="capacity_percent", heat=1, capacity_percent=125)
figure if opened("09.dropped") else None

# %% [markdown]
# Both at once. In a running notebook you can choose the number of slots. Below are fewer and more; 1 is the even share.

# %% tags=["plumbing"]
popular = np.array(RoutingExplorer(heat=1).logits(figure.state | {"heat": 1}))  # r s e
chosen = np.argsort(-popular)[..., :A]
load = np.bincount(chosen.ravel(), minlength=E)
assert load[0] > 2 * load[1:].max()
ranks, each = popular.shape[:2]
FACTORS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
dropped, empty = [], []
for factor in (*FACTORS, None):
    how = dataclasses.replace(HOW, capacity_factor=factor)
    _, kept, aux = moe.route(how, Solo(), jnp.asarray(popular, jnp.float32))
    counts = (np.asarray(kept)[..., None] == np.arange(E)).sum(2)  # r s e
    dropped.append(float(aux["tally"][-2]) / (ranks * each * A))
    assert counts.sum(1).max() <= how.capacity(each)
    assert dropped[-1] == 1 - counts.sum() / (ranks * each * A)
    empty.append(1 - counts.sum() / (ranks * E * how.capacity(each)))
assert dropped[-1] == 0 and dropped[0] > dropped[1] > dropped[3]
assert empty == sorted(empty) and empty[-1] == 1 - A / E
ours = np.array([np.bincount(row.ravel(), minlength=E) for row in chosen])  # r e
over = np.maximum(ours - 20, 0)
assert list(ours[:, 0]) == [35, 38, 36, 31] and over[:, 1:].sum() == 0
lost_here = {"dropped": over.sum(), "empty": np.maximum(20 - ours, 0).sum()}
met("09.dropped", {name: int(n) for name, n in lost_here.items()}, "counted")
assert list(lost_here.values()) == [60, 188]

# %%
lines = [("slots empty", empty[:-1], "other5", "s", False)]
lines += [("choices dropped", dropped[:-1], "other4", "o", False)]
options = dict(percent=True, high=1, title="What a capacity costs")
factors = [f"{factor:g}" for factor in FACTORS]
scene.show(draw.curves(lines, factors, "slots ÷ even share", "share", **options))

# %% [markdown]
# ### Exercise (core): how many slots?
#
# One rank has 512 tokens. With `a` = 2 they chose eight experts 260, 190, 150, 120, 100, 84, 70 and 50 times. What is the smallest
# number of slots for each expert at which at most 1 % of all choices are dropped?

# %%
slots_per_expert = ...
attempt("09.capacity", slots_per_expert)

# %% [markdown]
# ## A Llama with experts learns as on one device
#
# `tiny-moe`, a small mixture of experts, has 8 experts in each layer, and a token visits 2. We run the same training step on
# one device, and with the experts distributed over `ep`, together with ZeRO-3 (lesson 04).

# %% tags=["plumbing"]
jax.clear_caches()  # the toys' programs: a lesson stays below 1 GB

# %%
CONFIG = dataclasses.replace(preset("tiny-moe"), num_layers=2)
ep = min(N, 4)
PLAN = Plan(f"ep={ep} fsdp={N // ep}")
TEXT, ADAM, STEPS = counting_text(N, 32), optax.adamw(1e-2), 3
print("Two programs are compiled and run: about 20 s.")
run = train_on(CONFIG, PLAN, TEXT, ADAM, STEPS)
solo = train_on(CONFIG, Plan("dp=1"), TEXT, ADAM, STEPS)
found = verdicts({"experts": run}, solo)["experts"]
assert found["ep", "all-to-all"]["count"] == 4 * CONFIG.num_layers

# %% [markdown]
# ## Keep: tokens go to experts, and empty slots are sent too
#
# 1. A layer of experts has two all-to-alls forward and two backward. Each sends `a` copies per token, or a buffer for the worst case.
# 2. With a slot for every token at every expert, most slots are sent empty. With a capacity, what goes beyond it is dropped. A ragged
#    exchange has neither fault; but receivers need room for the worst case.
# 3. e/a says two things. The layer holds e/a times the expert weights that a token uses. And with a slot for every token at every expert
#    it sends e/a times the bytes of the copies.
# 4. The busiest expert decides the time: it may have up to e/a times the mean load. Two remedies: a *balance loss*, a second loss that
#    grows when few experts get most tokens; or a *bias*, a number that is added to the score of an expert with few tokens when experts are
#    chosen.

# %% [markdown]
# ## Further
#
# Who multiplies, what routers report, a hot expert and its cures, and what all this costs on real links.
#
# ### Packed by rank, a token has N places and not e
#
# `llmpar.model.moe` gives slots to ranks, not to experts. All ranks first receive the choices of all tokens, `a` numbers for each token.
# Then a token has a place on each of N ranks, and not one at each of `e` experts. That helps where N < e, and very much with many experts
# on a rank:

# %%
for how in (HOW, ExpertConfig(128, 8)):
    for ranks in (1, 2, 4, 8):
        places = ranks * how.slots(4096, 1, ranks) / 4096
        assert places == ranks <= how.num_experts
        print(f"e = {how.num_experts}, a = {how.top_k}, ep={ranks}: a token", end=" ")
        print(f"has {places:g} of {how.num_experts} places")

# %% [markdown]
# ### On which rank is an expert, and which ranks sum its gradient?
#
# The gradient of a dense weight is summed over `dp`, `fsdp` and `ep`, because all three cut the batch. ZeRO cuts its state by `fsdp` and
# `ep`. An expert's gradient is summed over `dp` and `fsdp` only: no other rank of `ep` has this expert. (Below no axis is left to sum over:
# the mesh has no `dp`, and over `fsdp` the reduce-scatter is a part of the backward pass.)

# %%
gate_held = run.state.params["blocks"]["experts"]["gate"].addressable_shards[0].data
assert gate_held.shape == (2, E // ep, CONFIG.width // (N // ep), CONFIG.ffn_width)
layout = PLAN.resolve().stored("experts l e d m")
print("an expert's gate is stored as", layout, gate_held.shape)
sums = PLAN.resolve().layouts_of("experts l e d m").unreduced.sums
print("and its gradient waits for a sum over:", sums or "no axis")
exchanges = [c for c in as_predicted(run) if c.kind == "all-to-all"]
print(arrow_text(exchanges))  # there and back, twice
model = preset("tiny-moe")
print(f"{model.num_params:,} parameters, {model.active_params:,} at work on a token")

# %% [markdown]
# ### Which slots are multiplied?
#
# Empty slots are sent, but most of them are not multiplied. After the exchange a rank copies each expert's tokens into a second buffer, with
# fewer slots. If experts were equally popular, each would get an even share of the tokens; the buffer has room for this share and an eighth
# more. One batched matmul multiplies all its slots, full or not. If an expert gets more tokens, the rest is multiplied block by block with
# this expert's weights, as Gale et al. 2022 do with all rows. So no token is dropped, and a hot expert costs what it gets. JAX has a matmul for groups of unequal size, `jax.lax.ragged_dot`, but in the JAX of this
# lesson XLA has a kernel for it only on TPUs, and elsewhere multiplies every copy by every expert.

# %% [markdown]
# ### Exercise (stretch): combine
#
# Write the last step. `rows`, the experts' results, is `[slots, d]`; `slot` says for each token and choice in which row its
# result lies (`len(rows)`: it was dropped), `weights` are the router's. Both are `[tokens, a]`. Return `[tokens, d]`; NumPy is there as `np`.


# %%
def combine(rows, slot, weights): ...


attempt("09.combine", combine)

# %% [markdown]
# ### All wait for the busiest expert
#
# The router of this lesson, with expert 0 made more and more attractive:

# %% tags=["nbval-check-output"]
for skew in (0.0, 1.0, 2.0, 4.0):
    load = np.bincount(routed(skew)[1].ravel(), minlength=E)
    assert load.sum() == N * TOKENS * A
    most = load.max() / load.mean()
    print(f"skew {skew:g}: the busiest expert has {most:.2f} times the mean,", end=" ")
    print(f"of at most {E / A:g}")

# %% [markdown]
# The slowest rank sets the pace. Two cures are in use. A **balance loss** e/a · Σ f P multiplies each expert's share of the tokens with its mean affinity: its value is 1
# where all are equal, and its gradient lowers the affinities of the busy. Here it is taken sequence by sequence (DeepSeek-V3 2024, section 2.1.2),
# so no device must know another's sequences. Or **a bias without a loss** (Wang et al. 2024): it takes part in choosing, not in
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
    picked = moe.choose_experts(biased, favour, jnp.asarray(bias, jnp.float32))[1]
    load = np.bincount(np.asarray(picked).ravel(), minlength=E)
    seen.append(load.max() / load.mean())
    bias += biased.bias_rate * np.sign(load.mean() - load)
assert seen[-1] < 1.3 < seen[0]
course = {(n + 1) / 10: load for n, load in enumerate(seen)}
line = ("busiest / mean", course, "ep-line", "o", False)
title = "A bias that follows the load"
scene.show(draw.curves([line], range(0, 41, 10), "step", "load", low=1, title=title))

# %% [markdown]
# ### What routers report
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
# ### What it costs on real links
#
# In each layer and direction (forward, backward) a rank sends 2·a·d·(N − 1)/N numbers for each of its tokens: there and back.
#
# An expert gets only a/e of the tokens. But its weights are read, and its gradients are summed, as those of a dense layer. So a batch must be
# e/a times as large before computing takes longer than reading the weights, or than summing their gradients. For reading, a dense model needs the 295 tokens of lesson 16 (the *balance batch* of an
# H100, by its data sheet), and experts e/a times as many (the **experts' balance batch**):

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
    print(f"4,096 tokens send {sent / 1e6:.0f} MB forward;")
    share = how.num_experts / how.top_k
    print(f"{'':<14} e/a = {share:g}: experts' balance batch {batch:,.0f} tokens")
    assert round(batch / share) == 295
assert formulas.dp_min_tokens(990e12, 400e9, experts=128, topk=4) == 79_200
print("published: 128 experts, a = 4, H100 nodes on 400 GB/s: 79,200 tokens per GPU")
print("before data parallelism hides (Scaling book)")

# %% [markdown]
# ### A real trace: the exchange of 64 H800, hidden
#
# DeepSeek published a profile of its training (H800, `ep=64`, sequences of 4,096 tokens; the source is in the data file). Four layers of one
# microbatch run forward while the same four layers of another run backward. The profile's authors made all experts equally popular.
#
# Below is one of these layers. The exchanges run on a stream of their own, and so beside the matmuls of the *other* microbatch: while
# `dispatch F` sends tokens to their experts, `FFN B` computes gradients. The backward pass is split as in lesson 08 (B by the
# input, W by the weights).

# %%
file = Path(lessons.__file__).with_name("h800_trace.toml")
rows = tomllib.loads(file.read_text())["rows"]
keys = ("lane", "name", "start_s", "end_s", "exposed_s")
events = [
    dict(zip(keys, (lane, name, begin / 1e6, end / 1e6, 0.0), strict=True))
    for lane, name, begin, end in rows
]
computing = [event for event in events if event["lane"] == "compute"]
sending = [event for event in events if event["lane"] == "network"]


def alone_s(event):
    """Return the seconds of an exchange in which nothing is computed."""
    shared_s = 0.0
    for other in computing:
        end_s = min(event["end_s"], other["end_s"])
        shared_s += max(0.0, end_s - max(event["start_s"], other["start_s"]))
    return event["end_s"] - event["start_s"] - shared_s


# %%
LAYER_S = 29.9e-3, 61.3e-3  # the second of the four layers
begin_s, end_s = LAYER_S
layer = [
    event | {"start_s": event["start_s"] - begin_s, "end_s": event["end_s"] - begin_s}
    for event in events
    if begin_s <= event["start_s"] and event["end_s"] <= end_s
]
assert all(alone_s(e) < 50e-6 for e in sending if begin_s <= e["start_s"] < end_s)
head = "one microbatch forward, another backward"
picture = {"name": head, "count": 0, "events": layer}
scene.show(draw.two_lanes([picture], "One layer on H800, ep=64"))

# %% [markdown]
# Over all four layers the exchanges take almost as long as the computing. How much of that does the step wait for?

# %%
lanes = (computing, sending)
computing_s, sending_s = (
    sum(e["end_s"] - e["start_s"] for e in lane) for lane in lanes
)
total_s = max(event["end_s"] for event in events)
exposed_s = sum(map(alone_s, sending))
print(
    f"computing {computing_s * 1e3:.0f} ms, exchanges {sending_s * 1e3:.0f} ms,",
    end=" ",
)
print(f"both in {total_s * 1e3:.0f} ms;")
print(f"exposed {exposed_s * 1e3:.1f} ms, {exposed_s / sending_s:.0%} of the exchanges")
assert sending_s > 0.9 * computing_s and exposed_s < 0.03 * sending_s
assert total_s < 1.03 * computing_s

# %% [markdown]
# ### Exercise (expert): nodes that stay closed
#
# DeepSeek-V3 has 256 experts on 8 nodes and chooses 8 of them. A token is sent to a node once, however many of its experts are there. If
# all choices were equally likely: on how many nodes are its experts on average, with all nodes open (`free`), and with only 4 of them
# (`limited`, as its router does)?

# %%
free, limited = ..., ...
attempt("09.nodes", {"free": free, "limited": limited})

# %% [markdown]
# ### Where XLA's partitioner differs
#
# The dispatch is an island: a part of the model that is written by hand, in `shard_map`, under every mode. Inside it, both modes write
# the same two all-to-alls. Around it, Auto is free. The forward pass shows it:

# %%
auto = Step(CONFIG, dataclasses.replace(PLAN, mode="auto"), run.step.mesh, ADAM)
places = jax.tree.map(lambda x: x.sharding, auto.abstract_in_model_order.params)
start = jax.device_put(fresh_state(CONFIG, ADAM).params, places)
text = jax.device_put(TEXT, auto.batch_sharding)
forward, program = read_program(auto.evaluate.lower(start, text))
first = jax.device_get(start), TEXT
assert np.allclose(forward(start, text), solo.step.evaluate(*first), rtol=1e-4)
table = census_table(census_hlo(program, auto.mesh))
exchanges = {key: row["count"] for key, row in table.items() if key[1] == "all-to-all"}
assert exchanges == {("ep", "all-to-all"): 2 * CONFIG.num_layers}
print("value: Auto's first loss is that of one device;", end=" ")
print(f"its forward pass has {sum(exchanges.values())} all-to-alls")

# %% [markdown]
# ### On your cluster
#
# ```
# llmpar train --model tiny-moe --mesh "ep=4 fsdp=2"                        experts on 4 ranks, ZeRO-3 beside them
# llmpar inspect --model tiny-moe --mesh "ep=8"                             what is sent and held, predicted and compiled
# llmpar compile --target h100:8x8 --model qwen3-30b-a3b --mesh "fsdp=8 ep=8"        full slots alone, one product for all
# llmpar models qwen3-30b-a3b                                               total and active parameters
# ```
