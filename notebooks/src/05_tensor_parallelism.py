# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 25
#     needs: ["00", "02"]
#     question: How are two matmuls cut over devices, what do they send, and up to how many devices is it worth it?
#     objectives:
#     - Cut a pair of matmuls by columns, then rows, and place the one all-reduce that
#       it needs.
#     - Say how attention and the feed-forward become such pairs, and what sequence
#       parallelism adds.
#     - Explain the degree beyond which the links are slower than the matmuls.
# ---

# %% [markdown]
# # 05 · Tensor and sequence parallelism: how would you cut a matmul?
#
# ZeRO stores a weight in parts, but every device still multiplies by the whole weight. Now four devices share the *same* two matmuls.
# Between them is a relu, and the devices may exchange numbers only once. How would you cut W1 and W2?

# %% tags=["plumbing"]
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # simulated devices; real ones: On your cluster

from llmpar.parallel.mesh import use_devices

devices = use_devices()

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from llmpar import draw
from llmpar.draw.scene import show
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
from llmpar.lessons.lesson import as_predicted, counting_text, train_on, verdicts
from llmpar.parallel.mesh import make_mesh, shard_bytes, sharding, spec
from llmpar.parallel.modes import Manual
from llmpar.plan.layout import parse_arrow, parse_layout
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.planner import measured
from llmpar.predict import formulas, traffic
from llmpar.predict.hardware import chip

# Accelerators round float32 matmuls unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
N = len(devices)  # 8
mesh, sizes = make_mesh(f"tp={N}"), {"tp": N}
B, S, D, M, L, STEPS = 4, 16, 32, 128, 4, 5
rng = np.random.default_rng(0)

# %% tags=["plumbing"]
show(
    draw.matmul(
        "s d × d m = s m -relu-> s m × m d = s d",
        names=("x", "W1", "x W1", "relu(x W1)", "W2", "y"),
        title="Four devices: each holds a quarter of W1 and a quarter of W2",
    )
)

# %% [markdown]
# ## Predict: columns or rows?
#
# `x` has a row for each token. Every device has all of `x`, and needs all of `y`. Cut each matrix into four blocks of columns or of rows.

# %%
cuts = {"W1": ..., "W2": ...}  # "columns" or "rows"
attempt("05.cut", cuts)

# %% [markdown]
# In NumPy:

# %%
relu = lambda a: np.maximum(a, 0)
x, w1, w2 = (rng.standard_normal(shape) for shape in ((S, D), (D, M), (M, D)))
y = relu(x @ w1) @ w2

quarters = np.split(np.arange(M), 4)  # hidden units of each device
first = sum(relu(x @ w1[:, own]) @ w2[own] for own in quarters)
quarters = np.split(np.arange(D), 4)  # rows of W1 of each device
second = sum(relu(x[:, own] @ w1[own]) for own in quarters) @ w2

tried = {"columns, rows": first, "rows, columns": second}
for name, found in tried.items() if opened("05.cut") else ():
    print(f"{name}: off by {abs(found - y).max():.1g}", end=". ")

# %% tags=["plumbing"]
assert np.allclose(first, y) and abs(second - y).max() > 1

# %% [markdown]
# ## What can a device finish alone?
#
# (Answer above first.) Cut W1 by columns. Each device gets finished numbers for some hidden units (columns of x W1), so it may apply
# relu. Its rows of W2 belong to the same hidden units. The result is a *partial sum* for each number of `y`; one all-reduce adds them
# up. W1 and W2, cut like this, are a *pair*: a *column matrix* and a *row matrix*.

# %% tags=["plumbing"]
if opened("05.cut"):
    show(
        draw.matmul(
            "s d × d m/tp = s m/tp × m/tp d = s d +tp -> s d",
            names=("x", "W1", "relu(x W1)", "W2", "partial sums of y", "y"),
            title="W1 by columns, W2 by rows: one all-reduce",
        )
    )

# %% [markdown]
# ## The other way round
#
# Cut W1 by rows. Each device has a partial sum for every hidden unit. relu(3 − 2) = 1, but relu(3) + relu(−2) = 3. This sum must be finished before
# relu, and it is four times as wide as `y`.

# %% tags=["plumbing"]
names = ("x|each uses its columns", "W1", "partial sums of x W1", "relu(x W1)", "W2")
if opened("05.cut"):
    show(
        draw.matmul(
            "s d/tp × d/tp m = s m +tp -> s m × m d/tp = s d/tp -> s d",
            names=(*names, "y", "y"),
            title="W1 by rows, W2 by columns: two messages",
        )
    )

# %% [markdown]
# ## Predict: what does the worst order send?
#
# The letters: `s` positions of tokens, `d` width of the model, `m` width of a feed-forward (4 d hidden units); `tp` is the mesh
# axis. The pair sends one arrow, `s d +tp -> s d`: the sum over tp is finished. Three other orders are right, too, but send wider
# arrays, or more of them. An all-reduce costs twice a gather of the same array. **The worst order sends how many times the
# bytes of the best?**

# %%
worst = ...  # a number
attempt("05.worst", worst)

# %% tags=["plumbing"]
orders = {
    "columns, rows": ["s d +tp -> s d"],
    "columns, columns": ["s m/tp -> s m", "s d/tp -> s d"],
    "rows, rows": ["s m +tp -> s m/tp", "s d +tp -> s d"],
    "rows, columns": ["s m +tp -> s m", "s d/tp -> s d"],
}
WORDS = {"s d +tp -> s d": "all-reduce of y", "s d/tp -> s d": "gather of y"}
WORDS |= {"s m/tp -> s m": "gather of hidden", "s m +tp -> s m": "all-reduce of hidden"}
WORDS |= {"s m +tp -> s m/tp": "reduce-scatter of hidden"}


def sent(text):
    """Bytes that a device sends for an arrow of this width."""
    moving = parse_arrow(text)
    shape = (S, {"d": D, "m": M}[moving.before.letters[-1]])
    return sum(sent for _, sent in draw.moved(moving, shape, mesh.shape, 4))


least = sum(map(sent, orders["columns, rows"]))
times = {name: round(sum(map(sent, each)) / least, 2) for name, each in orders.items()}
assert list(times.values()) == [1, 2.5, 3, 4.5]
met("05.worst", max(times.values()), "computed")
for order, arrows in list(orders.items())[1:] if opened("05.worst") else ():
    print(f"{order:<18}{times[order]} times the bytes", end=": ")
    print(", ".join(map(WORDS.get, arrows)))

# %% [markdown]
# ## Predict: how many all-reduces in training?
#
# A stack of `L = 4` pairs, `x = relu(x @ w1) @ w2`, and a loss. The input of the first pair is data. **How many all-reduces give the loss
# and the gradients of all weights?**

# %%
num_all_reduces = ...
attempt("05.stack_all_reduces", num_all_reduces, devices=N)


# %% [markdown]
# Inside `jax.shard_map` one device does this (`b` rows of a batch, `l` pairs):


# %%
def stack(w1, w2, x):  # one device has it all: the reference
    for l in range(L):
        x = jax.nn.relu(x @ w1[l]) @ w2[l]
    return x


def by_hand(w1, w2, x):  # l d m/tp, l m/tp d, b s d
    for l in range(L):
        x = lax.pcast(x, "tp", to="varying")  # backward, gradients are added up here
        hidden = jax.nn.relu(x @ w1[l])  # b s m/tp
        x = lax.psum(hidden @ w2[l], "tp")  # forward, the sum: b s d +tp -> b s d
    return x


# %% tags=["plumbing"]
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


def as_one_device(program):
    """Assert that a program's losses, pieces and messages are right; count these."""
    losses, *weights = train(program[0], program[1])
    assert np.allclose(losses, wanted[0], rtol=1e-4), losses
    for array, right, place in zip(weights, wanted[1:], PLACES, strict=False):
        assert np.allclose(array, right, atol=1e-4)
        shapes = {s.data.shape for s in array.addressable_shards}
        assert shapes == {place.shard_shape(array.shape, sizes)}
    census = [c for c in census_hlo(program[2], mesh) if c.shape != ()]  # but the loss
    assert {(c.kind, c.shape) for c in census} <= {("all-reduce", (B, S, D))}
    message = formulas.sent_bytes("all-reduce", 4 * B * S * D, N)
    assert sum(c.bytes_sent for c in census) == (2 * L - 1) * message
    arrays = zip((W1, W2, X, Y), PLACES, strict=True)
    given = sum(shard_bytes(place, a.shape, 4, sizes) for a, place in arrays)
    assert compiled_memory(program[1])["argument_bytes"] == given
    return sum(c.count for c in census)


wanted = train((W1, W2, X, Y), jax.jit(sgd(stack)))

# %%
program = prepare(by_hand)
num_found = as_one_device(program)  # asserts losses, pieces, messages and memory
assert num_found == 2 * L - 1
met("05.stack_all_reduces", num_found)

# %% [markdown]
# ## Backward, the sum is at the other end of the pair
#
# Forward, the end of a pair adds up. Backward, its beginning does: each device knows the gradient of `x` through its own columns only. That
# is `lax.pcast`: an all-reduce backward ([picture](03_data_parallelism.ipynb)). Here we want the gradient of `x` *before* `pcast`; lesson
# 03 wanted it *after*. The first pair's `x` needs no gradient: 2L − 1.
#
# ## Attention has four matrices: what would you cut?
#
# Wq makes `n` query heads of width `h` from `d` numbers: `d n h`. Wk and Wv make `k` heads each (several query heads may share one,
# then k < n): `d k h`. Wo goes back: `n h d`. Write each layout under tensor parallelism, as in `"d m/tp"`.

# %%
layouts = {"q": ..., "k": ..., "v": ..., "o": ...}
attempt("05.attention_layouts", layouts)

# %% tags=["plumbing"]
attention = draw.matmul(
    "s d × d n/tp h, d k/tp h, d k/tp h = s n/tp h, s k/tp h, s k/tp h"
    " -attention-> s n/tp h × n/tp h d = s d +tp -> s d",
    names=(
        "x",
        "Wq, Wk, Wv",
        "Q, K, V",
        "result of each head",
        "Wo",
        "partial sums",
        "y",
    ),
    title="Attention: columns are heads, and again one all-reduce",
)
if opened("05.attention_layouts"):
    show(attention)

# %% [markdown]
# ## Heads are the columns
#
# Columns of Wq, Wk and Wv are heads, so cut `n` and `k`. Wo is the row matrix that reads the same heads: cut its `n`. Between Wq and Wo no
# head needs another one, so a device computes its heads alone, and one all-reduce adds up.
#
# ### Exercise (core): a gated pair
#
# Llama's feed-forward is `(silu(x @ gate) * (x @ up)) @ down`; silu acts on each number by itself. Write what one device does with
# its parts; it returns the whole result.


# %%
def gated_pair(x, gate, up, down): ...  # s d, d m/tp, d m/tp, m/tp d -> s d


attempt("05.gated_pair", gated_pair)

# %% [markdown]
# ## A layer of a Llama needs four all-reduces
#
# Attention is one pair, the feed-forward another: two all-reduces forward, two backward. Between pairs stand *norms* (normalization), which
# every device computes alike.
#
# **Sequence parallelism** (Korthikanti et al. 2022) gives each device a part of the tokens for the norms (over `tp`, not `sp`).
#
# Where a pair ends, a reduce-scatter adds up; where the next pair begins, an all-gather gives all tokens to all devices:

# %%
show(
    draw.matmul(
        "s d +tp -> s/tp d -norm-> s/tp d -> s d",
        names=("partial sums", "a part of the tokens", "normed", "into the next pair"),
        title="Sequence parallelism: each device normalizes a part of the tokens",
    )
)

# %% [markdown]
# ## Predict: does sequence parallelism send more?
#
# Compared with all-reduces, does this send `"more"` bytes, `"fewer"` or `"as many"`?

# %%
bytes_sent = ...
attempt("05.sequence_bytes", bytes_sent)

# %%
LLAMA = dataclasses.replace(preset("tiny"), num_layers=2)
BATCH, SEQ = 4, 16
TEXT = counting_text(BATCH, SEQ)
ADAM = optax.adamw(3e-3)
learn = lambda plan: train_on(LLAMA, plan, TEXT, ADAM, STEPS)
solo = learn(Plan("dp=1"))  # about 15 s for these three
plans = {"tp": Plan(f"tp={N}"), "tp + sequence": Plan(f"tp={N}", tp_sequence=True)}
llamas = {name: learn(plan) for name, plan in plans.items()}
tables = verdicts(llamas, solo)


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
assert blocks["tp"] == {"all-reduce": four("all-reduce")}
kinds = ("all-gather", "reduce-scatter")
assert blocks["tp + sequence"] == {kind: four(kind) for kind in kinds}
shown = opened("05.sequence_bytes")
for name, block in blocks.items():
    in_all = sum(sent for _, sent in block.values())
    assert in_all == 4 * formulas.tp_elements(BATCH, SEQ, LLAMA.width, N)
    made = ", ".join(f"{n} {kind}s" for kind, (n, _) in block.items()) or "nothing"
    if shown:
        print(f"one layer, {name:<14} {in_all:,.0f} B: {made}")
met("05.sequence_bytes", "as many", "counted")

# %% [markdown]
# It sends the same bytes, as an all-reduce *is* these two, and devices keep less: of a layer of GPT-3 186 MiB in place of 312, at N = 8. With
# one more backward gather for each pair (a quarter more bytes) they keep least, 102 MiB. The bars show that:

# %% tags=["plumbing"]
gpt3 = dict(b=1, s=2048, h=12_288, heads=96, recompute="selective")
same, unit = "the same on every device", gpt3["b"] * gpt3["s"] * gpt3["h"]
kept = lambda size, **more: formulas.gpt_activation_bytes(**gpt3, tp=size, **more)
rows = []
for size in (1, 4, 8):
    alone, both = kept(size), kept(size, sequence_parallel=True)
    assert abs(alone / unit - (10 + 24 / size)) < 1e-9
    assert abs(both / unit - 34 / size) < 1e-9
    bar = {"cut by tp": alone - 10 * unit, same: 10 * unit}
    rows.append((f"N = {size}", bar))
    rows += [(f"N = {size}, sequence cut", {"cut by tp": both})] * (size > 1)
assert kept(8) == 327_155_712 and kept(8, sequence_parallel=True) == 106_954_752
assert round((4 + 30 / 8) * unit / 2**20) == 186  # inputs of pairs whole: the text
title = "Activations of a layer of GPT-3 (175B), 2,048 tokens, per device"
roles = {"cut by tp": "tp", same: "activations"}
show(draw.memory_bars(rows, title=title, roles=roles, wide=640))

# %% [markdown]
# ## From 8 to 16 devices
#
# And the time? A GPT of 3.6 billion weights trains on 64 A100s, 8 in each node. `N` devices along tp share each layer. **From N = 8 to
# N = 16, how many times as long does a step take?**

# %%
times_as_long = ...  # a number, such as 3
attempt("05.beyond_node", times_as_long)

# %% tags=["plumbing"]
seconds = {1: 3.5665, 2: 3.9375, 4: 4.4921, 8: 4.9723, 16: 10.5806}  # vTrain, measured
if (file := Path("../tests/measured.json")).is_file():  # the best run of each degree
    runs = [c for c in measured.read_runs(file)[0] if c.group == "vtrain.multi.3.6B"]
    of = lambda tp: [c for c in runs if (c.run.mesh.tp, c.run.mesh.pp) == (tp, 1)]
    best = {tp: min(c.measured["step_s"] for c in of(tp)) for tp in seconds}
    assert np.allclose([*best.values()], [*seconds.values()], rtol=1e-4)
assert seconds[16] > 2 * seconds[8] and seconds[8] < 1.15 * seconds[4]
lines = [
    ("measured", [*seconds.values()], "measured", "o", False),
    ("if sending were free", [seconds[1]] * 5, "ink", None, True),
]
names = "N devices share each layer; there are 64/N such groups", "seconds a step"
look = dict(high=12, marks=((3.5, "beyond the node"),))
look |= dict(title="A GPT of 3.6B on 64 A100s, measured (Bang et al. 2024)")
if opened("05.beyond_node"):
    show(draw.curves(lines, [*seconds], *names, **look))
met("05.beyond_node", seconds[16] / seconds[8], "measured")

# %% [markdown]
# ## The work is divided by N, the message is not
#
# Beyond the node it takes twice as long. Take `C` FLOP/s of a device and `β` bytes/s of its links. A pair is two matmuls: 4·b·s·d·m/N
# FLOPs. One all-reduce sends about 4·b·s·d bytes, at 2 bytes a number. Compute one part of the tokens while the sum of another is sent: for
# large N, and with enough parts, all bytes overlap if
#
# $$ \frac{4\,b\,s\,d\,m}{N\,C} > \frac{4\,b\,s\,d}{\beta} \quad\Longleftrightarrow\quad N < \frac{m}{C/\beta} $$
#
# (Austin et al. 2025). With m = 28,672 and peak rates, Llama 3 70B gets:

# %% tags=["plumbing", "nbval-check-output"]
v5p, h100 = chip("v5p"), chip("h100")
places = [
    ("TPU v5p", v5p, 2 * 90e9),  # an axis, both directions, by the book
    ("H100 inside a node", h100, h100.link_bytes_per_s),
    ("H100, two whole nodes", h100, h100.node_size * h100.dcn_bytes_per_s),
    ("H100, one in each node", h100, h100.dcn_bytes_per_s),
]
degrees = {}
for where, device, rate in places:
    for name in ("llama3-70b", "llama3.1-405b"):
        ffn = preset(name).ffn_width
        degrees[where, name] = formulas.tp_max_degree(ffn, device.flops_per_s, rate)
    most = degrees[where, "llama3-70b"]
    if device is h100:
        print(f"{where}, {rate / 1e9:.0f} GB/s: Llama 3 70B up to N = {most:.1f}")
    assert where != "TPU v5p" or round(device.flops_per_s / rate) == 2550
assert int(degrees["H100 inside a node", "llama3-70b"]) == 13
assert int(degrees["H100, two whole nodes", "llama3-70b"]) == 11 < 16
c = preset("llama3-70b")  # all weights of a layer over its two all-reduces
weights = 2 * c.width * c.head_width * (c.num_heads + c.num_kv_heads)
weights += 3 * c.width * c.ffn_width
whole = weights / (4 * c.width) / (h100.flops_per_s / h100.link_bytes_per_s)
assert round(whole, 1) == 11.9

# %% [markdown]
# Two whole nodes use all their ports. But 16 > 11.6: beyond the node 70B's sums no longer hide.
#
# ## Keep: columns, then rows, inside the fast links
#
# 1. Columns, then rows, along the same dim: one all-reduce ends the pair.
# 2. Attention (heads) and feed-forward (hidden units) are such pairs: 4 all-reduces a layer, two backward.
# 3. Sequence parallelism makes each a reduce-scatter and an all-gather: same bytes, less kept.
# 4. Work is divided by N, messages are not: they can hide while N < m / (C/β).

# %% [markdown]
# ## Further
#
# To read first: *The loss: three numbers per token*; *A layer of Llama 70B, in time*; *For experts: overlap the gather with the matmul*.
#
# ### The model's code names no axis
#
# An arrow such as `b s d +tp -> b s d` names the mesh axis. The model of llmpar, the library of these lessons, is written once for all meshes, so its arrows are
# *logical*: they name *regions* of the model. `stream` is the residual stream, `attention` and `ffn` (the feed-forward) are where heads
# and hidden units may be cut. `+m` says: this was summed over the hidden units that are here. The plan knows which axis cuts what in a
# region, and makes a logical arrow a physical one. A *mode* carries it out; `Manual` does so inside `jax.shard_map`.
# ([All words](../docs/words.md#words))

# %% tags=["nbval-check-output"]
one, eight, cut = Plan("dp=1"), Plan("tp=8"), Plan("tp=8", tp_sequence=True)
for text in ("stream b s d -> ffn b s d", "ffn b s d +m -> stream b s d"):
    print(text)
    for name, where in {"one device": one, "tp=8": eight, "and sequence": cut}.items():
        print(f"  {name:<14} {where.resolve().physical(text)}")


# %%
def by_arrows(w1, w2, x):  # the stack again: logical arrows, read by Manual
    par = Manual(plan.resolve())
    for l in range(L):
        x = par.move(x, "stream b s d -> ffn b s d")
        hidden = jax.nn.relu(x @ w1[l])
        x = par.move(hidden @ w2[l], "ffn b s d +m -> stream b s d")
    return x


# %% tags=["plumbing"]
leaving = "ffn b s d +m -> stream b s d"
assert eight.resolve().physical(leaving) == parse_arrow("b s d +tp -> b s d")
assert cut.resolve().physical(leaving) == parse_arrow("b s d +tp -> b s/tp d")
assert one.resolve().physical(leaving) == parse_arrow("b s d -> b s d")
other = prepare(by_arrows)
assert as_one_device(other) == num_found
results = [train(both[0], both[1])[1] for both in (program, other)]
assert np.allclose(*results, atol=1e-7), "hand and package should be one program"
print(f"by hand and by arrows: the same losses, pieces and {num_found} all-reduces")

# %% [markdown]
# ### Heads
#
# The code below is the same for all heads and for some of them, and one all-reduce ends it.


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
assert [(c.kind, c.shape) for c in heads] == [("all-reduce", (B, S, D))]
print(f"value: as with all {NUM_HEADS} heads; each device has {NUM_HEADS // N} of them")
print(f"communication: {len(heads)} all-reduce of b·s·d forward")

# %% [markdown]
# ### The loss: three numbers per token
#
# The output head is a column matrix, `v/tp d`, cut along its `v` vocabulary entries. So the logits `b s v/tp` are cut along the
# vocabulary. Gathering them would be the largest message of the whole step. The loss needs only three numbers per token from each device:
# the largest logit, the sum of exponentials, and the logit of the target.


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
assert [(c.kind, c.shape) for c in three] == [("all-reduce", (B, S))] * 3
censuses = {name: as_predicted(run) for name, run in llamas.items()}
for census in censuses.values():  # the Llama's loss sends what this one sends
    assert sum(c.count for c in census if c.shape == (BATCH, SEQ)) == len(three)
finished = parse_arrow("b s +tp -> b s")
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
# The layout of each weight, and the arrow that each collective carries out, forward and backward. The all-reduces that remain with
# sequence parallelism are small: three numbers per token for the loss, the gradients of the norms' scales, and one message with the loss
# and the global norm.

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
# ### To keep only a part, gather once more
#
# A column matrix needs its whole input again for its weight's gradient. A device that keeps only its part gathers it once more in the
# backward pass: a layer's 8 collectives become 10, a quarter more. The layer above has 4 + 4, so it keeps the gathered input.
#
# (Counted over whole layers, the 13.0 of an H100 inside a node becomes 11.9: with the gate, a third matmul that sends nothing more, and with
# attention.)
#
# ### What the bars of activations count
#
# In units of b·s·d bytes a GPT layer keeps 10 + 24/N under plain tensor parallelism, and 34/N with its sequence cut (Korthikanti et al.
# 2022, table 2; 16 bits, attention's scores computed again). The 10 are the two norms' inputs (4), the inputs of the pairs (4), the dropout
# masks (2). Without the second gather the inputs of the pairs stay whole: 4 + 30/N, which is 186 MiB at N = 8. Our block is not that block
# (RMSNorm, SwiGLU, no dropout), so its factors differ, but not the reason.

# %% tags=["plumbing"]
temporary = {
    n: compiled_memory(run.compiled)["temp_bytes"] for n, run in llamas.items()
}
assert temporary["tp + sequence"] < temporary["tp"]
ratio = temporary["tp + sequence"] / temporary["tp"]
print(f"our toy with sequence parallelism: {ratio:.2f} times the temporaries")

# %% [markdown]
# ### A layer of Llama 70B, in time
#
# On H100 nodes of 8, 4096 tokens, bf16: computing at the peak, and four all-reduces that overlap with nothing. These are times, so inside
# a node messages run at the 370 GB/s that large ones reach, and the 13.0 from above becomes 10.7. Beyond 8 the truth is between two
# models: *best*, every GPU's own network port is used and the levels overlap; *worst*, one flat ring runs at the speed of one port.

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

# %% tags=["plumbing"]
title = "One layer of Llama 70B, 4096 tokens, H100 nodes of 8"
show(draw.time_bars(bars, title=title))

# %% [markdown]
# Inside the node a device loses up to a third of its speed. With 16 it loses half at best, and seven eighths at worst. Where nodes have 4
# GPUs and share one port, the cliff stands between 4 and 8. This is arithmetic about links; simulated devices have none, and nothing was
# timed here.
#
# ### Exercise (stretch): more devices than KV heads
#
# Llama 3 8B has 32 query heads and 8 KV heads. Over `tp=16` every KV head must be on two devices. llmpar splits the axis for that: an
# outer part, which cuts the KV heads, and an inner one, `kv`, whose devices hold copies of the same head:

# %%
sixteen = Plan("tp=16").resolve(preset("llama3-8b"))
parts = {axis: sixteen.mesh.sizes[axis] for axis in ("tp", "kv")}
assert parts == {"tp": 8, "kv": 2}
for matrix in ("d n h", "d k h"):
    stored = sixteen.stored(f"attention {matrix}")
    print(f"{parts}: '{matrix}' is stored as '{stored}'")

# %% [markdown]
# vLLM, for one, shares heads in the same way. Write the list of KV heads that device `rank` of `tp` needs, for any numbers of query heads
# and KV heads, so that its own block of query heads (block `rank` of `tp`, in order) finds its keys. What must then happen to the
# gradients of K and V? (The verdict says why.)


# %%
def kv_heads(rank, tp, num_heads, num_kv_heads): ...


attempt("05.kv_heads", kv_heads)

# %% [markdown]
# ### For experts: overlap the gather with the matmul
#
# Before a pair, sequence parallelism gathers `x` and then multiplies: the matmul waits for the last byte. But block `i` of the result
# needs only block `i` of `x`. So send blocks around a ring, and multiply one while the next one is being sent (Wang et al. 2023).


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
print("value: the ring of matmuls equals gather, then multiply")
print(f"communication: {N - 1} permutes = N-1, with the bytes of the one all-gather")
listed = r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}"
found = re.search(listed, texts["ring_matmul"])
pairs = re.findall(r"(\d+),(\d+)", found[1]) if found else [(0, 0)]
pairs = [(int(source), int(target)) for source, target in pairs]
show(draw.ring_steps(pairs, num_steps=N, axis="tp"))

# %% [markdown]
# llmpar does this for a whole Llama with `tp_comm_overlap=True`. The model's code stays as it is: `par.move_matmul` and
# `par.matmul_move` name the matmuls that go with an arrow. One ring serves all matmuls of a value: Q, K and V share one, and so do
# the two column matrices of the feed-forward. After a row matrix the ring carries sums and not inputs: one block's sum is sent
# while the next block is multiplied. Each is the other's backward pass. The layers' gathers and scatters become permutes
# (those of embedding and head stay), and no arrow sends a byte more.

# %%
overlapped = Plan(f"tp={N}", tp_sequence=True, tp_comm_overlap=True)
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
    print(f"  {arrow:<36} {count} permutes")
assert len(hops) == 4

# %% [markdown]
# Does it help? That is a question for links, and ours are simulated. A hop that takes longer than its matmul is hidden only in part.
# For Llama 3 8B over 8 H100s, bf16, blocks of 8,192 tokens, matmuls at the peak rate (`llmpar compile` shows what a GPU's program
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
# layer" above) into such a ring. How many permutes does a device run? Return it as a function of `tp`.


# %%
def ring_permutes(tp): ...


attempt("05.ring_permutes", ring_permutes)

# %% [markdown]
# ### Where the partitioner of XLA, JAX's compiler, differs
#
# For the plain stack, hardly at all: say where the weights are, and the partitioner finds the same 2L-1 all-reduces. For a whole Llama
# it goes its own ways.

# %% tags=["plumbing"]
put = [sharding(mesh, place) for place in PLACES]
stack_by_jit = jax.jit(sgd(stack), in_shardings=put, out_shardings=(*put[:2], None))
compiled, text = read_program(stack_by_jit.lower(W1, W2, X, Y))
found = [c for c in census_hlo(text, mesh) if c.shape == (B, S, D)]
losses = train(program[0], compiled)[0]
assert np.allclose(losses, wanted[0], rtol=1e-4)
kinds = "all-reduces of b·s·d"
print(f"the stack by jit: {sum(c.count for c in found)} {kinds}, and the same losses")
if devices[0].platform == "cpu":
    num_found = sum(c.count for c in found if c.kind == "all-reduce")
    assert num_found == 2 * L - 1

by_xla = Plan(f"tp={N}", tp_sequence=True, mode="auto")
auto = learn(by_xla)
assert np.allclose(auto.losses, solo.losses, rtol=1e-4)
arguments = lambda run: compiled_memory(run.compiled)["argument_bytes"]
assert arguments(auto) == arguments(llamas["tp + sequence"])
print("the Llama: value and memory: Auto equals Manual")
auto_table = census_table(census_hlo(auto.text, mesh))
for name, table in (("manual", tables["tp + sequence"]), ("auto", auto_table)):
    for (_, kind), row in sorted(table.items(), key=lambda i: -i[1]["bytes_sent"]):
        print(f"{name:>7}: {kind:<18} ×{row['count']:<4}{row['bytes_sent']:>12,} B")
assert not any(kind == "reduce-scatter" for _, kind in auto_table)
print("communication: on simulated devices Auto never forms a reduce-scatter;")
print("it sends whole all-reduces and cuts their results")

# %% [markdown]
# ### On your cluster
#
#     llmpar inspect --mesh "tp=-1" --tp-sequence
#     llmpar inspect --mesh "dp=2 tp=4" --tp-sequence --tp-comm-overlap
#     llmpar inspect --mesh "dp=2 tp=4" --tp-sequence --mode auto
#     llmpar inspect --mesh "fsdp=2 tp=4" --tp-sequence --svg bytes.svg
#     llmpar train --model llama3.2-1b --mesh "fsdp=-1 tp=4" --tp-sequence --remat block --dtype bfloat16 \
#         --batch-size 16 --seq-len 2048 --data "corpus/*.jsonl" --tokenizer tokenizer.json
#
# `tp` is the innermost axis of every mesh here: its partners are neighbours, on one node if tp divides the node. Look at the picture of
# lesson 00 before you choose a size that does not.
