# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 25
#     needs: ["00", "02"]
#     objectives:
#     - Cut a pair of products by columns, then rows, and place the one all-reduce that
#       it needs.
#     - Say how attention, feed-forward and loss become such pairs, and what sequence
#       parallelism adds.
#     - Derive from which degree on the links are slower than the products.
# ---

# %% [markdown]
# # 05 · Tensor and sequence parallelism: can one matrix product be spread over devices?
#
# ZeRO stores a weight in pieces, but every device still computes with the whole of it. Tensor parallelism (Shoeybi et al. 2019)
# computes with the pieces: no device ever sees a whole matrix. What moves is activations, many times per step, so the links must
# be fast.
#
# | what | layout or arrow |
# |---|---|
# | column matrix: its output dim is cut | weight `d m/tp`, output `b s m/tp` |
# | row matrix: its input dim is cut | weight `m/tp d`, output `b s d +tp`, an unfinished sum |
# | the pair | one `b s d +tp -> b s d` after the row matrix, and nothing between |
# | with sequence parallelism | `b s/tp d -> b s d` before, `b s d +tp -> b s/tp d` after |
#
# **Question.** Where must devices talk, how much do they send, and why does it stop paying at 8 or so?
#
# Letters: `b` rows of the batch, `s` positions, `t` positions of keys, `d` width of the model, `m` width of a
# feed-forward, `n` query heads, `k` KV heads, `h` width of a head, `v` vocabulary, `l` layers, `N` devices along the
# axis at hand, `C` FLOP/s of a device, `β` bytes/s of its links.

# %% tags=["plumbing"]
from llmpar.mesh import use_devices

devices = use_devices()

# %% tags=["plumbing"]
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from llmpar import draw
from llmpar.config import preset
from llmpar.draw.scene import show
from llmpar.exercises import attempt, hint, met, solution
from llmpar.exercises.lesson import as_predicted, counting_text, trained, verdicts
from llmpar.inspect.census import (
    arrow_rows,
    arrow_text,
    census_hlo,
    census_table,
    compiled_memory,
    read_program,
)
from llmpar.inspect.jaxpr import census_jaxpr

# %% tags=["plumbing"]
from llmpar.mesh import make_mesh, shard_bytes, sharding, spec
from llmpar.notation import parse_arrow, parse_layout
from llmpar.par import Manual
from llmpar.plan import Plan
from llmpar.predict import formulas, traffic
from llmpar.predict.hardware import chip

# Accelerators round float32 products unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
N = max(size for size in (1, 2, 4, 8) if size <= len(devices))
mesh, sizes = make_mesh(f"tp={N}"), {"tp": N}
B, S, D, M, L, STEPS = 4, 16, 32, 128, 4, 5

# %% [markdown]
# ## Logical arrows
#
# A *layout* says how an array lies: `b s d/tp` is cut by the axis `tp` (tensor parallelism) along the dim `d`, and `b s d +tp` is
# an unfinished sum, of which each device has one addend. An *arrow*, `b s d +tp -> b s d`, is a movement.
#
# The model's text names no axis. Its arrows are *logical*: they name *regions* of the model. `stream` is the residual stream,
# `attention` and `ffn` (the feed-forward) are where heads and hidden units may be cut. The plan knows which axis cuts what in a
# region, and turns a logical arrow into one with axes. `+m` says: this was summed over the hidden units that are here. A
# *reading* carries the arrows out; `Manual` does so inside `jax.shard_map`, where one writes what a single device does. ([All words](../docs/words.md#words))

# %% tags=["nbval-check-output"]
one, eight, cut = Plan("dp=1"), Plan("tp=8"), Plan("tp=8", tp_sequence=True)
for text in ("stream b s d -> ffn b s d", "ffn b s d +m -> stream b s d"):
    print(text)
    for name, plan in {"one device": one, "tp=8": eight, "and sequence": cut}.items():
        print(f"  {name:<14} {plan.resolve().physical(text)}")

# %% tags=["plumbing"]
leaving = "ffn b s d +m -> stream b s d"
assert eight.resolve().physical(leaving) == parse_arrow("b s d +tp -> b s d")
assert cut.resolve().physical(leaving) == parse_arrow("b s d +tp -> b s/tp d")
assert one.resolve().physical(leaving) == parse_arrow("b s d -> b s d")

# %% [markdown]
# ## One picture
#
# The two weights of a feed-forward, `d m` and `m d`, as the devices hold them. The first is cut into columns, the second into rows,
# along the *same* dim `m`. Each device makes exactly the part of the hidden layer that its rows of the second matrix want to read.

# %%
show(draw.layout("d m/tp", (D, M), mesh.shape, itemsize=4))
show(draw.layout("m/tp d", (M, D), mesh.shape, itemsize=4))

# %% [markdown]
# ## Why column first, then row
#
# Between the two stands a function that is not linear: relu, gelu or silu. Column outputs are whole numbers of some hidden units, so
# it can be applied at once. Row outputs are parts of a sum, and relu(a) + relu(b) is not relu(a + b). What the four orders send for
# the hidden dim m = 4d (a device's bytes per token, in units of 4d bytes):

# %%
orders = {
    "column, row": ["b s d +tp -> b s d"],
    "column, column": ["b s m/tp -> b s m", "b s d/tp -> b s d"],
    "row, column": ["b s m +tp -> b s m", "b s d/tp -> b s d"],
    "row, row": ["b s m +tp -> b s m/tp", "b s d +tp -> b s d"],
}

# %% tags=["plumbing"]
for order, arrows in orders.items():
    total = 0
    for text in arrows:
        moving = parse_arrow(text)
        shape = (B, S, {"d": D, "m": M}[moving.before.letters[-1]])
        total += sum(sent for _, sent in draw.moved(moving, shape, mesh.shape, 4))
    share = total / (4 * B * S * D) / ((N - 1) / N) if N > 1 else 0
    print(f"{order:<15} {share:4.0f} (N-1)/N    " + ",   ".join(arrows))
    assert order == "column, row" or share >= (2 if N > 1 else 0)

# %% [markdown]
# ## Predict
#
# A stack of `L = 4` such pairs, `x = relu(x @ w1) @ w2`, a loss on top, and the gradients of all weights. **How many all-reduces does
# one forward and backward pass run, by the best text that you can think of?** The input of the first layer is data.

# %%
num_all_reduces = ...
attempt("05.stack_all_reduces", num_all_reduces, devices=N)

# %% [markdown]
# ### Exercise (core): attention is such a pair, too
#
# Its dims: `d` width, `n` query heads, `k` KV heads, `h` the width of a head. Q is `d n h`, K and V are `d k h`, O is `n h d`.
# Write the layout of each under tensor parallelism, as in `"d m/tp"`.

# %%
layouts = {"q": ..., "k": ..., "v": ..., "o": ...}
attempt("05.attention_layouts", layouts)

# %% [markdown]
# ## Run: a split stack by hand
#
# Bare `lax` inside `jax.shard_map`: what you read is what one device does. Megatron calls the two ends of a pair *f* and *g*. g is
# the all-reduce after the row matrix; in the backward pass it does nothing. f does nothing in the forward pass, and in the backward
# pass it is an all-reduce: each device knows the gradient of `x` through its own columns only. In JAX f is
# `lax.pcast(x, "tp", to="varying")`, and autodiff knows the rest.


# %%
def stack(w1, w2, x):  # one device; the reference
    for l in range(L):
        x = jax.nn.relu(x @ w1[l]) @ w2[l]
    return x


def by_hand(w1, w2, x):  # l d m/tp, l m/tp d, b s d
    for l in range(L):
        x = lax.pcast(x, "tp", to="varying")  # f
        hidden = jax.nn.relu(x @ w1[l])  # b s m/tp
        x = lax.psum(hidden @ w2[l], "tp")  # g: b s d +tp -> b s d
    return x


def by_arrows(w1, w2, x):  # the package: logical arrows, read by Manual
    par = Manual(plan.resolve())
    for l in range(L):
        x = par.move(x, "stream b s d -> ffn b s d")
        hidden = jax.nn.relu(x @ w1[l])
        x = par.move(hidden @ w2[l], "ffn b s d +m -> stream b s d")
    return x


# %% tags=["plumbing"]
rng = np.random.default_rng(0)
W1 = (rng.standard_normal((L, D, M)) * (2 / D) ** 0.5).astype(np.float32)
W2 = (rng.standard_normal((L, M, D)) * (1 / M) ** 0.5).astype(np.float32)
X, Y = (rng.standard_normal((B, S, D)).astype(np.float32) for _ in range(2))
plan = Plan(f"tp={N}")
# l d m/tp, l m/tp d, b s d, b s d
DIMS = ("ffn l d m", "ffn l m d", "stream b s d", "stream b s d")
PLACES = [plan.resolve().place(text) for text in DIMS]


def sgd(run):
    """One step of gradient descent on the squared error of `run`."""

    def step(w1, w2, x, y):
        loss = lambda w1, w2: ((run(w1, w2, x) - y) ** 2).mean()
        value, (g1, g2) = jax.value_and_grad(loss, argnums=(0, 1))(w1, w2)
        return w1 - 0.02 * g1, w2 - 0.02 * g2, value

    return step


# %% tags=["plumbing"]
def prepare(run):
    """Place the arrays and compile one step: the arrays, the program, its text."""
    ins = tuple(spec(place) for place in PLACES)
    outs = (*ins[:2], spec(parse_layout("whole")))
    step = jax.shard_map(sgd(run), mesh=mesh, in_specs=ins, out_specs=outs)
    given = zip((W1, W2, X, Y), PLACES, strict=True)
    arrays = [jax.device_put(a, sharding(mesh, place)) for a, place in given]
    return arrays, *read_program(jax.jit(step).lower(*arrays))


def train(arrays, compiled):
    w1, w2, x, y = arrays
    losses = []
    for _ in range(STEPS):
        w1, w2, value = compiled(w1, w2, x, y)
        losses.append(float(value))
    return losses, w1, w2


# %%
want_losses, want_w1, want_w2 = train((W1, W2, X, Y), jax.jit(sgd(stack)))
programs = {"by hand": prepare(by_hand), "by arrows": prepare(by_arrows)}
results = {name: train(program[0], program[1]) for name, program in programs.items()}
print("losses on one device:", " ".join(f"{x:.4f}" for x in want_losses))

# %% [markdown]
# ## Compare: four verdicts

# %% tags=["plumbing"]
for name, (losses, w1, w2) in results.items():
    assert np.allclose(losses, want_losses, rtol=1e-4), f"{name}: {losses}"
    assert np.allclose(w1, want_w1, atol=1e-4) and np.allclose(w2, want_w2, atol=1e-4)
    for array, place in ((w1, PLACES[0]), (w2, PLACES[1])):
        shapes = {s.data.shape for s in array.addressable_shards}
        assert shapes == {place.shard_shape(array.shape, sizes)}
one_program = np.allclose(results["by hand"][1], results["by arrows"][1], atol=1e-7)
assert one_program, "hand and package should be one program"
print(f"value: {STEPS} losses and the weights after them equal one device's")
print(f"sharding: a device holds {(L, D, M // N)} of w1 and {(L, M // N, D)} of w2")

message = formulas.sent_bytes("all-reduce", 4 * B * S * D, N)  # b s d
for name, (_, _, text) in programs.items():
    census = [c for c in census_hlo(text, mesh) if c.shape != ()]  # without the loss
    assert {c.kind for c in census} <= {"all-reduce"}, name
    assert {c.shape for c in census} <= {(B, S, D)}, name
    num_found = sum(c.count for c in census)
    assert num_found == (2 * L - 1) * (N > 1)
    assert sum(c.bytes_sent for c in census) == (2 * L - 1) * message
print(f"communication: {num_found} all-reduces of b·s·d, by hand and by arrows")

arrays = zip((W1, W2, X, Y), PLACES, strict=True)
predicted = sum(shard_bytes(place, a.shape, 4, sizes) for a, place in arrays)
for _, compiled, _ in programs.values():
    assert compiled_memory(compiled)["argument_bytes"] == predicted
print(f"memory: {predicted:,} B of arguments as predicted; weights are cut by {N},")
print("activations are not")

# %%
met("05.stack_all_reduces", num_found)

# %% [markdown]
# That is one per pair forward, and one per pair backward, except for the first, whose input is data: 2L-1.
#
# ### Exercise (stretch): a gated pair
#
# Llama's feed-forward has two column matrices: `silu(x @ gate) * (x @ up)`, and then the row matrix `down`. Write it as one device does.
# It has all of `x` (`s d`), its own columns of `gate` and `up` (`d m/tp`) and its own rows of `down` (`m/tp d`), and returns the whole
# result. Your function is run for four devices, and what it sends is counted. `jax.nn.silu` and `lax` are there.


# %%
def gated_pair(x, gate, up, down): ...


attempt("05.gated_pair", gated_pair)

# %% [markdown]
# ## A Llama under tensor parallelism, then with sequence parallelism
#
# A head is to attention what a hidden unit is to the feed-forward: between Q, K, V and O no head looks at another one. So a layer
# of a Llama is two pairs, and 4 all-reduces: two forward, two backward.
#
# Under plain tensor parallelism the norms and the residual stream are computed by every device, the same thing N times, and kept N times.
# Sequence parallelism (Korthikanti et al. 2022) cuts the stream along the sequence wherever heads and hidden units are not cut. Each
# all-reduce becomes a reduce-scatter (leaving a pair) and an all-gather (entering the next one):

# %%
show(draw.arrow("b s d +tp -> b s/tp d", (B, S, D), mesh.shape, itemsize=4))

# %%
LLAMA = dataclasses.replace(preset("tiny"), num_layers=2)
BATCH, SEQ = 4, 16
TEXT = counting_text(BATCH, SEQ)
ADAM = optax.adamw(3e-3)
learn = lambda plan: trained(LLAMA, plan, TEXT, ADAM, STEPS)
print("Three programs are compiled and run: about 15 s.")
solo = learn(Plan("dp=1"))
plans = {"tp": Plan(f"tp={N}"), "tp + sequence": Plan(f"tp={N}", tp_sequence=True)}
llamas = {name: learn(plan) for name, plan in plans.items()}
tables = verdicts(llamas, solo)

# %% [markdown]
# The all-reduces that remain with sequence parallelism are small: three numbers per token for the loss, the gradients of the norms'
# scales, and one message with the loss and the global norm.

# %% tags=["plumbing"]
censuses = {name: as_predicted(run) for name, run in llamas.items()}
bars = []
for name, (step, *_) in llamas.items():
    predicted = traffic.step_traffic(step.plan, BATCH, SEQ)
    for (axis, kind), row in tables[name].items():
        bar = {"axis": axis, "kind": f"{kind} ({name})", "count": row["count"]}
        bar["predicted_bytes"] = predicted[axis, kind].bytes_sent
        bars.append(bar | {"compiled_bytes": row["bytes_sent"]})
if bars:
    show(draw.collectives(bars))
else:
    print("one device sends nothing, so there is nothing to draw")

# %% [markdown]
# **One block** is the difference between a model of 3 layers and one of 2:


# %% tags=["plumbing"]
def per_block(plan):
    """Count and bytes that one more layer adds, by kind."""
    deeper = dataclasses.replace(LLAMA, num_layers=3)
    by = lambda config: traffic.step_traffic(plan.resolve(config), BATCH, SEQ)
    more, less = by(deeper), by(LLAMA)
    count = lambda key: more[key].count - less[key].count
    sent = lambda key: more[key].bytes_sent - less[key].bytes_sent
    return {key[1]: (count(key), sent(key)) for key in less if count(key)}


stream = 4 * BATCH * SEQ * LLAMA.width  # bytes of b s d
blocks = {name: per_block(run.step.plan) for name, run in llamas.items()}
four = lambda kind: (4, 4 * formulas.sent_bytes(kind, stream, N))
if N > 1:
    assert blocks["tp"] == {"all-reduce": four("all-reduce")}
    kinds = ("all-gather", "reduce-scatter")
    assert blocks["tp + sequence"] == {kind: four(kind) for kind in kinds}
for name, block in blocks.items():
    in_all = sum(sent for _, sent in block.values())
    assert in_all == 4 * formulas.tp_elements(BATCH, SEQ, LLAMA.width, N)
    shown = ", ".join(f"{n} {kind}" for kind, (n, _) in block.items()) or "nothing"
    print(f"one block, {name:<14} {in_all:,.0f} B: {shown}")

# %% [markdown]
# The bytes on the wire are equal. What sequence parallelism buys is memory: of the activations that one GPT layer keeps for its
# backward pass, in units of b·s·d, plain tensor parallelism leaves 10 of 34 whole (10 + 24/N), sequence parallelism none (34/N).
#
# ## The limit, and the cliff from 8 to 16
#
# Tensor parallelism divides the work by N, but not the message: every device sends 2·(N-1)/N·b·s·d per all-reduce. With links of β bytes/s
# and C FLOP/s per chip, computing hides sending only while N < m / (C/β), where m is the feed-forward width (Austin et al. 2025).
# As in lesson 03 these are thresholds, so β is the published rate; for a TPU v5p, whose C/β is 2550 per mesh axis, the book's.

# %% tags=["plumbing", "nbval-check-output"]
v5p, h100 = chip("v5p"), chip("h100")
links = [
    ("v5p", v5p, 2 * 90e9),  # an axis, both directions, by the book
    ("H100 inside a node", h100, h100.link_bytes_per_s),
    ("H100 between nodes", h100, h100.dcn_bytes_per_s),
]
degrees = {}
for where, device, rate in links:
    ratio = device.flops_per_s / rate
    print(f"{where}, {rate / 1e9:.0f} GB/s: C/β = {ratio:,.0f}, so N may go to")
    for name in ("llama3-70b", "llama3.1-405b"):
        ffn = preset(name).ffn_width
        most = formulas.tp_max_degree(ffn, device.flops_per_s, rate)
        print(f"  {most:4.1f} for {name} (m = {ffn:,})")
        degrees[where, name] = most
    assert where != "v5p" or round(ratio) == 2550
assert int(degrees["H100 inside a node", "llama3-70b"]) == 13

# %% [markdown]
# Now a layer of Llama 70B on H100 nodes of 8, 4096 tokens, bf16: computing at the peak, and four all-reduces that nothing hides. These are
# times, so inside a node messages run at the 370 GB/s that large ones reach, and the 13 from above becomes 10.7. Beyond 8 the
# truth lies between two models: *best*, every GPU's own network port is used and the levels overlap; *worst*, one flat ring runs at the speed
# of one port.

# %% tags=["plumbing", "nbval-check-output"]
config, num_tokens = preset("llama3-70b"), 4096
ends = 2 * config.vocab_size * config.width
layer_params = (config.num_params - ends) / config.num_layers
layer_message = 2 * num_tokens * config.width
assert h100.reached_link_bytes_per_s == 370e9
reached = formulas.tp_max_degree(config.ffn_width, h100.flops_per_s, 370e9)
assert f"{reached:.1f}" == "10.7"
bars, efficiency = [], {}
print(" N   computing   sending: best    worst   tokens/s per device: best   worst")
for size in (1, 2, 4, 8, 16, 32):
    work_s = formulas.train_seconds(layer_params, num_tokens, size, h100.flops_per_s)
    best_s = 4 * formulas.collective_seconds(h100, "all-reduce", layer_message, size)
    flat = 4 * formulas.sent_bytes("all-reduce", layer_message, size)
    worst_s = best_s if size <= h100.node_size else flat / h100.dcn_bytes_per_s
    efficiency[size] = best, worst = [work_s / (work_s + s) for s in (best_s, worst_s)]
    print(f"{size:2}  {1e3 * work_s:7.2f} ms  {1e3 * best_s:11.2f} ms", end=" ")
    print(f"{1e3 * worst_s:5.1f} ms  {best:24.0%} {worst:7.0%}")
    bar = {"computing": work_s, "sending, at best": best_s}
    bars.append((f"N = {size}", bar | {"more, at worst": worst_s - best_s}))
assert efficiency[16][0] < efficiency[8][0]
assert efficiency[16][1] < efficiency[8][1] / 4
title = "One layer of Llama 70B, 4096 tokens, H100 nodes of 8"
show(draw.time_bars(bars, title=title))

# %% [markdown]
# Inside the node the loss is gentle. At 16 even the best case computes half as long for the same message, and the worst case is a cliff.
# Measured curves fall there too (Ultra-Scale Playbook 2025). Where nodes have 4 GPUs and share one port, the cliff stands between 4
# and 8. This is arithmetic about links; simulated devices have none, and nothing was timed here.
#
# ## Five lines
#
# 1. Column, then row, along the same dim: nothing moves between them, and one all-reduce ends the pair.
# 2. Attention is a pair (heads), the feed-forward is a pair (hidden units), the loss needs three numbers per token.
# 3. Each layer runs 4 all-reduces of b·s·d, two forward and two backward; a stack of plain pairs 2L-1.
# 4. Sequence parallelism makes each a reduce-scatter and an all-gather: the same bytes, and activations fall from 10 + 24/N to 34/N.
# 5. Work is divided by N, messages are not: stay below m / (C/β), which means inside the fast links.
#
# **One number to remember: 4 all-reduces of b·s·d per layer,** however many devices share the work.

# %% [markdown]
# ## Further
#
# ### Heads
#
# The text below is the same for all heads and for some of them, and one all-reduce ends it.


# %%
def attend(q, k, v, o, x):
    """Causal attention with the heads that are here."""
    q, k, v = (jnp.einsum("bsd,dnh->bsnh", x, w) for w in (q, k, v))
    scores = jnp.einsum("bsnh,btnh->bnst", q, k) / q.shape[-1] ** 0.5
    seen = jnp.tril(jnp.ones((S, S), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
    return jnp.einsum("bsnh,nhd->bsd", jnp.einsum("bnst,btnh->bsnh", weights, v), o)


def heads_by_hand(q, k, v, o, x):
    x = lax.pcast(x, "tp", to="varying")  # f
    return lax.psum(attend(q, k, v, o, x), "tp")  # g


# %% tags=["plumbing"]
NUM_HEADS, HEAD = 8, 4
shapes = [(D, NUM_HEADS, HEAD)] * 3 + [(NUM_HEADS, HEAD, D)]
matrices = [rng.standard_normal(s).astype(np.float32) / D**0.5 for s in shapes]
dims = ("d n h", "d n h", "d n h", "n h d", "b s d")
ins = tuple(spec(plan.resolve().place(f"attention {text}")) for text in dims)
whole = spec(parse_layout("b s d"))
over_tp = lambda f: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=whole))
arrow = "attention b s d +n -> stream b s d"
by_arrow = over_tp(lambda *args: Manual(plan.resolve()).move(attend(*args), arrow))
got = over_tp(heads_by_hand)(*matrices, X)
assert np.allclose(got, jax.jit(attend)(*matrices, X), atol=1e-5)
assert np.allclose(got, by_arrow(*matrices, X), atol=1e-7)
heads = census_jaxpr(jax.make_jaxpr(over_tp(heads_by_hand))(*matrices, X), mesh.shape)
assert [(c.kind, c.shape) for c in heads] == [("all-reduce", (B, S, D))] * (N > 1)
print(f"value: as with all {NUM_HEADS} heads; each device has {NUM_HEADS // N} of them")
print(f"communication: {len(heads)} all-reduce of b·s·d forward")

# %% [markdown]
# ### The loss: three numbers per token
#
# The output head is a column matrix, `v/tp d`, so the logits `b s v/tp` are cut along the vocabulary. Gathering them would be the largest
# message of the whole step. The loss needs only three numbers per token from everybody: the largest logit, the sum of exponentials, and
# the logit of the target.


# %%
def vocabulary_loss(head, x, targets):  # v/tp d, b s d, b s
    x = lax.pcast(x, "tp", to="varying")  # f
    logits = jnp.einsum("bsd,vd->bsv", x, head)  # b s v/tp
    top = lax.pmax(logits.max(-1), "tp")  # 1
    total = lax.psum(jnp.exp(logits - top[..., None]).sum(-1), "tp")  # 2
    local = targets - lax.axis_index("tp") * head.shape[0]
    here = (0 <= local) & (local < head.shape[0])
    place = jnp.where(here, local, 0)[..., None]
    logit = jnp.take_along_axis(logits, place, -1)[..., 0]
    target = lax.psum(jnp.where(here, logit, 0), "tp")  # 3
    return jnp.log(total) + top - target


# %% tags=["plumbing"]
V = LLAMA.vocab_size
HEAD_MATRIX = rng.standard_normal((V, D)).astype(np.float32)
TARGETS = rng.integers(0, V, (B, S)).astype(np.int32)
places = (plan.resolve().place("vocab v d"), parse_layout("b s d"), parse_layout("b s"))
ins, outs = tuple(map(spec, places)), spec(parse_layout("b s"))
split = jax.jit(jax.shard_map(vocabulary_loss, mesh=mesh, in_specs=ins, out_specs=outs))
logits = jnp.asarray(X @ HEAD_MATRIX.T)
whole_loss = optax.softmax_cross_entropy_with_integer_labels(logits, TARGETS)
assert np.allclose(split(HEAD_MATRIX, X, TARGETS), whole_loss, atol=1e-4)
traced = jax.make_jaxpr(split)(HEAD_MATRIX, X, TARGETS)
three = census_jaxpr(traced, mesh.shape)
assert [(c.kind, c.shape) for c in three] == [("all-reduce", (B, S))] * (3 * (N > 1))
for census in censuses.values():  # the Llama's loss sends what this one sends
    assert sum(c.count for c in census if c.shape == (BATCH, SEQ)) == len(three)
finished = parse_arrow("b s +tp -> b s" if N > 1 else "b s -> b s")
assert plan.resolve().physical("vocab b s +v -> data b s") == finished
print("value: the loss of every token equals the loss from whole logits")
print(f"communication: {len(three)} all-reduces of one number per token")
for name in ("tiny", "llama3-8b"):
    gather = formulas.sent_bytes("all-gather", 4 * preset(name).vocab_size, 8)
    ratio = gather / (3 * formulas.sent_bytes("all-reduce", 4, 8))
    print(
        f"{name}: gathering logits over 8 devices would send {ratio:,.0f} times as much"
    )

# %% [markdown]
# ### What the Llama's arrows send
#
# Where each weight lies, and which arrow each collective carries out, forward and backward:

# %%
for path, weight in LLAMA.weights().items():
    print(f"{path:<28} {weight.dims:<20} -> {plan.resolve().stored(weight.dims)}")
for name, census in censuses.items():
    print(f"\n{name}:\n{arrow_text(census)}")

# %% tags=["plumbing"]
for name, census in censuses.items():
    for key, row in tables[name].items():
        of_key = [r for r in arrow_rows(census) if (r["axis"], r["kind"]) == key]
        assert sum(r["bytes_sent"] for r in of_key) == row["bytes_sent"]

# %% [markdown]
# ### Activations: 10 + 24/N becomes 34/N
#
# Bytes of activations that one GPT layer keeps, 16 bits, with attention recomputed (Korthikanti et al. 2022, table 2). The 10 are the
# two norms' inputs, the inputs of the pairs, the dropout masks. For GPT-3 (d = 12,288, 96 heads, s = 2048, one sequence):

# %% tags=["plumbing", "nbval-check-output"]
gpt3 = dict(b=1, s=2048, h=12_288, heads=96, recompute="selective")
unit = gpt3["b"] * gpt3["s"] * gpt3["h"]
kept = lambda size, **more: formulas.gpt_activation_bytes(**gpt3, tp=size, **more)
print(" N    10 + 24/N   34/N    MiB per layer: tp   tp + sequence")
for size in (1, 2, 4, 8, 16):
    alone, both = kept(size), kept(size, sequence_parallel=True)
    assert abs(alone / unit - (10 + 24 / size)) < 1e-9
    assert abs(both / unit - 34 / size) < 1e-9
    print(f"{size:2}   {alone / unit:9.2f}  {both / unit:6.2f}", end="   ")
    print(f"{alone / 2**20:18.0f}   {both / 2**20:13.0f}")
assert kept(8) == 327_155_712 and kept(8, sequence_parallel=True) == 106_954_752

# %% [markdown]
# Our block is not that GPT block (RMSNorm, SwiGLU, no dropout), so its factors differ, but not the reason.

# %% tags=["plumbing"]
temporary = {
    n: compiled_memory(run.compiled)["temp_bytes"] for n, run in llamas.items()
}
if devices[0].platform == "cpu" and N > 1:
    assert temporary["tp + sequence"] < temporary["tp"]
    ratio = temporary["tp + sequence"] / temporary["tp"]
    print(f"our toy with sequence parallelism: {ratio:.2f} times the temporaries")

# %% [markdown]
# ### Exercise (stretch): more devices than KV heads
#
# Llama 3 8B has 32 query heads and 8 KV heads. Over `tp=16` every KV head must lie on two devices. The package splits the axis for that:
# an outer part, which cuts the KV heads, and an inner one, `kv`, whose devices hold copies of the same head:

# %%
sixteen = Plan("tp=16").resolve(preset("llama3-8b"))
parts = {axis: sixteen.mesh.sizes[axis] for axis in ("tp", "kv")}
assert parts == {"tp": 8, "kv": 2}
for matrix in ("d n h", "d k h"):
    stored = sixteen.stored(f"attention {matrix}")
    print(f"{parts}: '{matrix}' is stored as '{stored}'")

# %% [markdown]
# vLLM, for one, shares heads in the same way. Write the list of KV heads that device `rank` of `tp` needs, for any numbers of query
# heads and KV heads, so that its own block of query heads (block `rank` of `tp`, in order) finds its keys. What must then happen to
# the gradients of K and V? (The verdict's *why* tells.)


# %%
def kv_heads(rank, tp, num_heads, num_kv_heads): ...


attempt("05.kv_heads", kv_heads)

# %% [markdown]
# ### For experts: hide the gather inside the product
#
# Before a pair, sequence parallelism gathers `x` and then multiplies: the product waits for the last byte. But block `i` of the result needs
# only block `i` of `x`. So pass blocks around a ring, and multiply the one that is here while the next one travels (Wang et al. 2023).


# %%
def gather_then_multiply(x, w):  # s/tp d, d m/tp -> s m/tp
    return lax.all_gather(x, "tp", axis=0, tiled=True) @ w


def ring_matmul(x, w):
    rank, rows = lax.axis_index("tp"), x.shape[0]
    y = lax.pcast(jnp.zeros((N * rows, w.shape[1])), "tp", to="varying")
    for hop in range(N):
        owner = (rank - hop) % N  # whose block is here now
        y = lax.dynamic_update_slice_in_dim(y, x @ w, owner * rows, axis=0)
        if hop < N - 1:  # after N-1 hops every block has been everywhere
            x = lax.ppermute(x, "tp", [(i, (i + 1) % N) for i in range(N)])
    return y


# %% tags=["plumbing"]
rows, weight = rng.standard_normal((64, D)).astype(np.float32), W1[0]
places = [parse_layout(text) for text in ("s/tp d", "d m/tp", "s m/tp")]
ins, outs = tuple(map(spec, places[:2])), spec(places[2])
blocks = [
    jax.device_put(array, sharding(mesh, place))
    for array, place in zip((rows, weight), places, strict=False)
]
texts = {}
for f in (gather_then_multiply, ring_matmul):
    over_tp = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs))
    compiled, texts[f.__name__] = read_program(over_tp.lower(rows, weight))
    assert np.allclose(compiled(*blocks), rows @ weight, atol=1e-4)
gathered, ring = (census_hlo(text, mesh) for text in texts.values())
assert sum(c.count for c in ring) == N - 1
assert {c.kind for c in ring} <= {"collective-permute"}
assert sum(c.bytes_sent for c in ring) == sum(c.bytes_sent for c in gathered)
print("value: the ring product equals gather, then multiply")
print(f"communication: {N - 1} permutes = N-1, with the bytes of the one all-gather")
listed = r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}"
found = re.search(listed, texts["ring_matmul"])
pairs = re.findall(r"(\d+),(\d+)", found[1]) if found else [(0, 0)]
pairs = [(int(source), int(target)) for source, target in pairs]
show(draw.ring_steps(pairs, num_steps=N, axis="tp"))

# %% [markdown]
# The package does this for a whole Llama with `tp_comm_overlap=True`. The model's text stays as it is: `par.enter` and `par.leave` say
# which products go with an arrow. One ring serves all products of a value: Q, K and V share one, and so do the two column matrices of
# the feed-forward. Where a sum leaves, the ring turns around: the sum of one block travels while this device's part of the next one is
# multiplied. Each is the other's backward pass. The layers' gathers and scatters become permutes (those of embedding and head
# stay), and no arrow sends a byte more.

# %%
overlapped = Plan(f"tp={N}", tp_sequence=N > 1, tp_comm_overlap=N > 1)
rings = learn(overlapped)
tables |= verdicts({"rings": rings}, solo)


# %% tags=["plumbing"]
def by_arrow(census):
    """Bytes of each arrow, whatever it travels by."""
    sent = {}
    for row in arrow_rows(census):
        sent[row["arrow"]] = sent.get(row["arrow"], 0) + row["bytes_sent"]
    return sent


census = as_predicted(rings)
assert by_arrow(census) == by_arrow(censuses["tp + sequence"])
print("every arrow sends the bytes that it sent before")
hops = {}
for row in arrow_rows(census):
    if row["kind"] == "collective-permute":
        hops[row["arrow"]] = hops.get(row["arrow"], 0) + row["count"]
for arrow, count in hops.items():
    assert count == 2 * LLAMA.num_layers * (N - 1)  # forward and backward, N-1 hops
    print(f"  {arrow:<36} {count} permutes: 2 layers, 2 passes, {N - 1} hops")
assert len(hops) == 4 * (N > 1)

# %% [markdown]
# Does it help? That is a question for links, and ours are simulated. A hop that takes longer than its product is hidden only in part.
# For Llama 3 8B over 8 H100s, bf16, blocks of 8,192 tokens, products at the peak rate (`llmpar compile` shows what a GPU's program
# waits for):

# %% tags=["plumbing", "nbval-check-output"]
config, block = preset("llama3-8b"), 8192
size = 2 * block * config.width
hop_s = size / h100.reached_link_bytes_per_s
heads = config.num_heads * config.head_width
kv_width = config.num_kv_heads * config.head_width
widths = {"Q, K, V": heads + 2 * kv_width, "O": heads}
widths |= {"gate, up": 2 * config.ffn_width, "down": config.ffn_width}
print(f"a hop of {size / 2**20:.0f} MiB takes {hop_s * 1e6:.0f} µs")
product_s = {
    name: size * width / 8 / h100.flops_per_s for name, width in widths.items()
}
for name, seconds in product_s.items():
    hidden = min(1, seconds / hop_s)
    print(f"  {name:<9} {seconds * 1e6:4.0f} µs, which hides {hidden:4.0%} of a hop")
assert product_s["gate, up"] > hop_s

# %% [markdown]
# ### Exercise (expert): count the hops
#
# Take one Llama layer with sequence parallelism, forward and backward, and turn each of its gathers and each of its scatters (see "one
# block" above) into such a ring. How many permutes does a device run? Return it as a function of `tp`.


# %%
def ring_permutes(tp): ...


attempt("05.ring_permutes", ring_permutes)

# %% [markdown]
# ### Where XLA's partitioner differs
#
# For the plain stack, hardly at all: say where the weights are, and the partitioner finds the same 2L-1 all-reduces. For a whole Llama
# it goes its own ways.

# %% tags=["plumbing"]
put = [sharding(mesh, place) for place in PLACES]
stack_by_jit = jax.jit(sgd(stack), in_shardings=put, out_shardings=(*put[:2], None))
compiled, text = read_program(stack_by_jit.lower(W1, W2, X, Y))
found = [c for c in census_hlo(text, mesh) if c.shape == (B, S, D)]
losses = train(programs["by hand"][0], compiled)[0]
assert np.allclose(losses, want_losses, rtol=1e-4)
kinds = "all-reduces of b·s·d" if N > 1 else "collectives"
print(f"the stack by jit: {sum(c.count for c in found)} {kinds}, and the same losses")
if devices[0].platform == "cpu":
    num_found = sum(c.count for c in found if c.kind == "all-reduce")
    assert num_found == (2 * L - 1) * (N > 1)

by_xla = Plan(f"tp={N}", tp_sequence=True, reading="auto")
auto = learn(by_xla)
assert np.allclose(auto.losses, solo.losses, rtol=1e-4)
arguments = lambda run: compiled_memory(run.compiled)["argument_bytes"]
assert arguments(auto) == arguments(llamas["tp + sequence"])
print("the Llama: value and memory: Auto equals Manual")
auto_table = census_table(census_hlo(auto.text, mesh))
for name, table in (("manual", tables["tp + sequence"]), ("auto", auto_table)):
    for (_, kind), row in sorted(table.items(), key=lambda i: -i[1]["bytes_sent"]):
        print(f"{name:>7}: {kind:<18} ×{row['count']:<4}{row['bytes_sent']:>12,} B")
if devices[0].platform == "cpu" and N > 1:
    assert not any(kind == "reduce-scatter" for _, kind in auto_table)
    print("communication: on simulated devices Auto never forms a reduce-scatter;")
    print("it sends whole all-reduces and cuts their results")

# %% [markdown]
# ### On your cluster
#
#     llmpar inspect --mesh "tp=-1" --tp-sequence
#     llmpar inspect --mesh "dp=2 tp=4" --tp-sequence --tp-comm-overlap
#     llmpar inspect --mesh "dp=2 tp=4" --tp-sequence --reading auto
#     llmpar inspect --mesh "fsdp=2 tp=4" --tp-sequence --svg bytes.svg
#     llmpar train --model llama3.2-1b --mesh "fsdp=-1 tp=4" --tp-sequence --remat block --dtype bfloat16 \
#         --batch-size 16 --seq-len 2048 --data "corpus/*.jsonl" --tokenizer tokenizer.json
#
# `tp` is the innermost axis of every mesh here: its partners are neighbours, on one node if tp divides the node. Look at the picture of
# lesson 00 before you choose a size that does not.
