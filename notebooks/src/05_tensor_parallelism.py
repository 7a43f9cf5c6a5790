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
# (*Arrow*, *region* and *reading* are explained in the README, under [Words](../README.md#words).)
#
# **Question.** Where must devices talk, how much do they send, and why does it stop paying at 8 or so?
#
# Letters: `b` rows of the batch, `s` positions, `t` positions of keys, `d` width of the model, `m` width of a
# feed-forward, `n` query heads, `k` KV heads, `h` width of a head, `v` vocabulary, `l` layers, `N` devices along the
# axis at hand, `C` FLOP/s of a device, `β` bytes/s of its links.

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
from llmpar.notation import parse_arrow, parse_layout
from llmpar.par import Manual
from llmpar.plan import Plan
from llmpar.predict import formulas, memory, traffic
from llmpar.predict.hardware import chip
from llmpar.step import Step

# Accelerators round float32 products unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
N = max(size for size in (1, 2, 4, 8) if size <= len(devices))
mesh, sizes = make_mesh(f"tp={N}"), {"tp": N}
B, S, D, M, L, STEPS = 4, 16, 32, 128, 4, 5

# %% [markdown]
# ## One picture
#
# The two weights of a feed-forward, `d m` and `m d`, as the devices hold them. The first is cut into columns, the second into rows,
# along the *same* dim `m`. Each device makes exactly the part of the hidden layer that its rows of the second matrix want to read.

# %%
scene.show(draw.layout("d m/tp", (D, M), mesh.shape, itemsize=4))
scene.show(draw.layout("m/tp d", (M, D), mesh.shape, itemsize=4))

# %% [markdown]
# ## Why column first, then row
#
# Between the two stands a function that is not linear: relu, gelu or silu. Column outputs are whole numbers of some hidden units, so
# it can be applied at once. Row outputs are parts of a sum, and relu(a) + relu(b) is not relu(a + b). What the four orders send for
# the hidden dim m = 4d, by the rules of our arrows (a device's bytes per token, in units of d · 4 bytes):

# %%
orders = {
    "column, row": ["b s d +tp -> b s d"],
    "column, column": ["b s m/tp -> b s m", "b s d/tp -> b s d"],
    "row, column": ["b s m +tp -> b s m", "b s d/tp -> b s d"],
    "row, row": ["b s m +tp -> b s m/tp", "b s d +tp -> b s d"],
}
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
# Bare `lax` inside `jax.shard_map`. Megatron calls the two ends of a pair *f* and *g*. g is the all-reduce after the row matrix; in
# the backward pass it does nothing. f does nothing in the forward pass, and in the backward pass it is an all-reduce: each device knows
# the gradient of `x` through its own columns only. In JAX f is `lax.pcast(x, "tp", to="varying")`, and autodiff knows the rest.


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
    par = Manual(plan)
    for l in range(L):
        x = par.move(x, "stream b s d -> ffn b s d")
        hidden = jax.nn.relu(x @ w1[l])
        x = par.move(hidden @ w2[l], "ffn b s d +m -> stream b s d")
    return x


rng = np.random.default_rng(0)
W1 = (rng.standard_normal((L, D, M)) * (2 / D) ** 0.5).astype(np.float32)
W2 = (rng.standard_normal((L, M, D)) * (1 / M) ** 0.5).astype(np.float32)
X, Y = (rng.standard_normal((B, S, D)).astype(np.float32) for _ in range(2))
plan = Plan(f"tp={N}")
# l d m/tp, l m/tp d, b s d
PLACES = [plan.place(text) for text in ("ffn l d m", "ffn l m d", "stream b s d", "stream b s d")]


def sgd(run):
    """One step of gradient descent on the squared error of `run`."""

    def step(w1, w2, x, y):
        loss = lambda w1, w2: ((run(w1, w2, x) - y) ** 2).mean()
        value, (g1, g2) = jax.value_and_grad(loss, argnums=(0, 1))(w1, w2)
        return w1 - 0.02 * g1, w2 - 0.02 * g2, value

    return step


def prepare(run):
    specs = [spec(place) for place in PLACES]
    spread = jax.shard_map(
        sgd(run), mesh=mesh, in_specs=tuple(specs), out_specs=(*specs[:2], spec(parse_layout("whole")))
    )
    arrays = [
        jax.device_put(a, sharding(mesh, place)) for a, place in zip((W1, W2, X, Y), PLACES, strict=True)
    ]
    lowered = jax.jit(spread).lower(*arrays)
    return arrays, lowered, lowered.compile()


def train(arrays, compiled):
    w1, w2, x, y = arrays
    losses = []
    for _ in range(STEPS):
        w1, w2, value = compiled(w1, w2, x, y)
        losses.append(float(value))
    return losses, w1, w2


want_losses, want_w1, want_w2 = train((W1, W2, X, Y), jax.jit(sgd(stack)))
programs = {"by hand": prepare(by_hand), "by arrows": prepare(by_arrows)}
results = {name: train(arrays, compiled) for name, (arrays, _, compiled) in programs.items()}
print("losses on one device:", " ".join(f"{x:.4f}" for x in want_losses))

# %% [markdown]
# ## Compare: four verdicts

# %%
for name, (losses, w1, w2) in results.items():
    assert np.allclose(losses, want_losses, rtol=1e-4), f"{name}: {losses}"
    assert np.allclose(w1, want_w1, atol=1e-4) and np.allclose(w2, want_w2, atol=1e-4), name
assert np.allclose(results["by hand"][1], results["by arrows"][1], atol=1e-7), (
    "hand and package should be one program"
)
print(f"value: {STEPS} losses and the weights after them equal one device's; by hand = by arrows")

for _, w1, w2 in results.values():
    for array, place in ((w1, PLACES[0]), (w2, PLACES[1])):
        assert {s.data.shape for s in array.addressable_shards} == {place.shard_shape(array.shape, sizes)}
print(f"sharding: after training a device holds {(L, D, M // N)} of w1 and {(L, M // N, D)} of w2")

message = 4 * B * S * D  # bytes of b s d
loss_free = lambda census: [c for c in census if c.shape != ()]
censuses = {
    name: loss_free(census_hlo(partitioned_hlo(lowered), mesh)) for name, (_, lowered, _) in programs.items()
}
for name, census in censuses.items():
    assert {c.kind for c in census} <= {"all-reduce"} and {c.shape for c in census} <= {(B, S, D)}, name
    assert sum(c.count for c in census) == (2 * L - 1) * (N > 1)
    assert sum(c.bytes_sent for c in census) == (2 * L - 1) * formulas.sent_bytes("all-reduce", message, N)
print(
    f"communication: {L} all-reduces forward and {L - 1} backward, 2L-1 = {2 * L - 1} of b·s·d"
    if N > 1
    else "communication: none on one device"
)

predicted = sum(
    shard_bytes(place, a.shape, 4, sizes) for a, place in zip((W1, W2, X, Y), PLACES, strict=True)
)
assert all(compiled_memory(compiled)["argument_bytes"] == predicted for _, _, compiled in programs.values())
print(
    f"memory: {predicted:,} B of arguments per device as predicted; weights are cut by {N}, activations"
    " are not"
)

# %% [markdown]
# ### Exercise (stretch): a gated pair
#
# Llama's feed-forward has two column matrices: `silu(x @ gate) * (x @ up)`, and then the row matrix `down`. Write it as one device does.
# It has all of `x` (`s d`), its own columns of `gate` and `up` (`d m/tp`) and its own rows of `down` (`m/tp d`), and returns the whole
# result. Your function is run for four devices, and what it sends is counted. `jax.nn.silu` and `lax` are there.


# %%
def gated_pair(x, gate, up, down): ...


attempt("05.gated_pair", gated_pair)

# %% [markdown]
# ## Heads
#
# Between Q, K, V and O no head looks at another one: a head is to attention what a hidden unit is to the feed-forward. So the text
# below is the same for all heads and for some of them, and one all-reduce ends it.


# %%
def attend(q, k, v, o, x):
    """Causal attention with the heads that are here."""
    q, k, v = (jnp.einsum("bsd,dnh->bsnh", x, w) for w in (q, k, v))
    scores = jnp.einsum("bsnh,btnh->bnst", q, k) / q.shape[-1] ** 0.5
    seen = jnp.tril(jnp.ones((S, S), bool))
    y = jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(jnp.where(seen, scores, -1e30)), v)
    return jnp.einsum("bsnh,nhd->bsd", y, o)


NUM_HEADS, HEAD = 8, 4
matrices = [rng.standard_normal((D, NUM_HEADS, HEAD)).astype(np.float32) / D**0.5 for _ in "qkv"]
matrices.append(rng.standard_normal((NUM_HEADS, HEAD, D)).astype(np.float32) / D**0.5)
cut = [spec(plan.place(f"attention {dims}")) for dims in ("d n h", "d n h", "d n h", "n h d", "b s d")]
over_tp = lambda function: jax.jit(
    jax.shard_map(function, mesh=mesh, in_specs=tuple(cut), out_specs=spec(parse_layout("b s d")))
)
heads_by_hand = over_tp(
    lambda q, k, v, o, x: lax.psum(attend(q, k, v, o, lax.pcast(x, "tp", to="varying")), "tp")
)
heads_by_arrow = over_tp(lambda *args: Manual(plan).move(attend(*args), "attention b s d +n -> stream b s d"))
assert np.allclose(heads_by_hand(*matrices, X), jax.jit(attend)(*matrices, X), atol=1e-5)
assert np.allclose(heads_by_hand(*matrices, X), heads_by_arrow(*matrices, X), atol=1e-7)
heads = census_jaxpr(jax.make_jaxpr(heads_by_hand)(*matrices, X), mesh.shape)
assert [(c.kind, c.shape) for c in heads] == [("all-reduce", (B, S, D))] * (N > 1)
print(
    f"value: attention with {NUM_HEADS // N} of {NUM_HEADS} heads per device equals attention with all; by"
    " hand = by arrow"
)
print(f"communication: {len(heads)} all-reduce of b·s·d forward")

# %% [markdown]
# ## The loss: three numbers per token
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
    logit = jnp.take_along_axis(logits, jnp.where(here, local, 0)[..., None], -1)[..., 0]
    target = lax.psum(jnp.where(here, logit, 0), "tp")  # 3
    return jnp.log(total) + top - target


LLAMA = dataclasses.replace(preset("tiny"), num_layers=2)
V = LLAMA.vocab_size
HEAD_MATRIX = rng.standard_normal((V, D)).astype(np.float32)
TARGETS = rng.integers(0, V, (B, S)).astype(np.int32)
split_loss = jax.jit(
    jax.shard_map(
        vocabulary_loss, mesh=mesh, out_specs=spec(parse_layout("b s")),
        in_specs=(spec(plan.place("vocab v d")), spec(parse_layout("b s d")), spec(parse_layout("b s"))),
    )
)  # fmt: skip
whole_loss = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(X @ HEAD_MATRIX.T), TARGETS)
assert np.allclose(split_loss(HEAD_MATRIX, X, TARGETS), whole_loss, atol=1e-4)
loss_census = census_jaxpr(jax.make_jaxpr(split_loss)(HEAD_MATRIX, X, TARGETS), mesh.shape)
assert [(c.kind, c.shape) for c in loss_census] == [("all-reduce", (B, S))] * (3 * (N > 1))
assert plan.resolve("vocab b s +v -> data b s") == parse_arrow("b s +tp -> b s" if N > 1 else "b s -> b s")
print("value: the vocabulary-parallel loss of every token equals the loss from whole logits")
print(f"communication: {len(loss_census)} all-reduces of one number per token")
for name in ("tiny", "llama3-8b"):
    vocab = preset(name).vocab_size
    gather, three = (
        formulas.sent_bytes("all-gather", 4 * vocab, 8),
        3 * formulas.sent_bytes("all-reduce", 4, 8),
    )
    print(f"{name}: gathering logits over 8 devices would send {gather / three:,.0f} times as much")

# %% [markdown]
# ## A Llama under tensor parallelism, then with sequence parallelism
#
# Under plain tensor parallelism the norms and the residual stream are computed by every device, the same thing N times, and kept N times.
# Sequence parallelism (Korthikanti et al. 2022) cuts the stream along the sequence wherever heads and hidden units are not cut. Each
# all-reduce becomes a reduce-scatter (leaving a pair) and an all-gather (entering the next one):

# %%
scene.show(draw.arrow("b s d +tp -> b s/tp d", (B, S, D), mesh.shape, itemsize=4))

# %%
BATCH, SEQ = 4, 16
TEXT = counting_text(BATCH, SEQ)


def train_llama(plan):
    """Compile the step and train: the step, its lowered and its compiled program, the last state, losses."""
    step = Step(LLAMA, plan, make_mesh(plan.mesh), optax.adamw(3e-3))
    lowered = step.lower(BATCH, SEQ)
    compiled = lowered.compile()
    return step, lowered, compiled, *train_steps(step, compiled, TEXT, STEPS)


*_, solo_losses = train_llama(Plan("dp=1"))
llamas = {"tp": train_llama(Plan(f"tp={N}")), "tp + sequence": train_llama(Plan(f"tp={N}", tp_sequence=True))}
print("losses on one device:", " ".join(f"{x:.3f}" for x in solo_losses))

# %%
for name, (*_, losses) in llamas.items():
    assert np.allclose(losses, solo_losses, rtol=1e-4), f"{name}: {losses}"
print(f"value: {STEPS} losses equal those of one device, with and without sequence parallelism")

for step, _, _, state, _ in llamas.values():
    for tree in (state.params, state.optimizer[0].mu, state.optimizer[0].nu):
        promised = jax.tree.map(lambda x, layout: layout.shard_shape(x.shape, mesh.shape), tree, step.stored)
        assert jax.tree.map(lambda x: x.addressable_shards[0].data.shape, tree) == promised
print("sharding: every weight and every moment lies as the plan promises:")
for path, weight in LLAMA.weights().items():
    print(f"  {path:<28} {weight.dims:<20} -> {llamas['tp'][0].plan.stored(weight.dims)}")

# %%
tables, moved = {}, {}
for name, (step, lowered, _, _, _) in llamas.items():
    predicted = traffic.step_traffic(LLAMA, step.plan, BATCH, SEQ)
    moved[name] = census = census_hlo(partitioned_hlo(lowered), step.mesh)
    tables[name] = census_table(census)
    assert tables[name] == as_table(predicted)
    assert sum(c.count for c in census if c.shape == (BATCH, SEQ)) == len(loss_census)  # the loss: as by hand
    print(
        f"{name}:",
        "; ".join(f"{kind} ×{row.count} {row.bytes_sent:,} B" for (_, kind), row in sorted(predicted.items()))
        or "nothing",
    )
print("communication: kinds, counts and bytes per device and step are as predicted")

for step, _, compiled, _, _ in llamas.values():
    assert compiled_memory(compiled)["argument_bytes"] == sum(
        memory.argument_bytes(LLAMA, step.plan, BATCH, SEQ).values()
    )
print("memory: argument bytes per device are as predicted")

# %% [markdown]
# ## Picture of the compiled programs
#
# What each step sends. The all-reduces that remain with sequence parallelism are small: three numbers per token for the loss, the
# gradients of the norms' scales, which now see only a part of the sequence on each device, and one message with the loss and the global
# norm.

# %%
bars = []
for name, (step, *_) in llamas.items():
    predicted = traffic.step_traffic(LLAMA, step.plan, BATCH, SEQ)
    bars += [{"axis": axis, "kind": f"{kind} ({name})", "count": row["count"], "predicted_bytes": predicted[axis, kind].bytes_sent,
              "compiled_bytes": row["bytes_sent"]} for (axis, kind), row in tables[name].items()]  # fmt: skip
if bars:
    scene.show(draw.collectives(bars))
else:
    print("one device sends nothing, so there is nothing to draw")

# %% [markdown]
# **One block** is the difference between a model of 3 layers and one of 2. The census says which arrow each
# collective carries out, and whether forward or backward.


# %%
def per_block(plan):
    """Count and bytes that one more layer adds, by kind, for messages over tp."""
    deeper = dataclasses.replace(LLAMA, num_layers=3)
    more, less = (traffic.step_traffic(config, plan, BATCH, SEQ) for config in (deeper, LLAMA))
    added = {
        kind: (more[a, kind].count - less[a, kind].count, more[a, kind].bytes_sent - less[a, kind].bytes_sent)
        for a, kind in less
    }
    return {kind: row for kind, row in added.items() if row[0]}


stream = 4 * BATCH * SEQ * LLAMA.width  # bytes of b s d
plain, sequence = (per_block(step.plan) for step, *_ in llamas.values())
if N > 1:
    assert plain == {"all-reduce": (4, 4 * formulas.sent_bytes("all-reduce", stream, N))}
    assert sequence == {
        kind: (4, 4 * formulas.sent_bytes(kind, stream, N)) for kind in ("all-gather", "reduce-scatter")
    }
assert sum(sent for _, sent in plain.values()) == sum(sent for _, sent in sequence.values())
assert sum(sent for _, sent in plain.values()) == 4 * formulas.tp_elements(BATCH, SEQ, LLAMA.width, N)
print(
    "one block, plain:        ",
    "; ".join(f"{n} {kind}, {sent:,.0f} B" for kind, (n, sent) in plain.items()) or "nothing",
)
print(
    "one block, with sequence:",
    "; ".join(f"{n} {kind}, {sent:,.0f} B" for kind, (n, sent) in sequence.items()) or "nothing",
)
print(
    "communication: each all-reduce became a reduce-scatter and an all-gather; the bytes on the wire are"
    " equal"
)
for name, census in moved.items():
    print(f"{name}, by the arrows of the model:\n{arrow_text(census)}")
    for key, row in tables[name].items():
        of_key = [r for r in arrow_rows(census) if (r["axis"], r["kind"]) == key]
        assert sum(r["bytes_sent"] for r in of_key) == row["bytes_sent"]

# %% [markdown]
# ## What sequence parallelism buys: 10 + 24/N becomes 34/N
#
# Bytes of activations that one GPT layer keeps for its backward pass, in units of b·s·d, 16 bits, with attention recomputed (Korthikanti
# et al. 2022, table 2). Plain tensor parallelism leaves 10 of them whole: the two norms' inputs, the inputs of the pairs, the
# dropout masks. For GPT-3 (d = 12,288, 96 heads, s = 2048, one sequence):

# %%
# NBVAL_CHECK_OUTPUT
gpt3 = dict(b=1, s=2048, h=12_288, heads=96, recompute="selective")
unit = gpt3["b"] * gpt3["s"] * gpt3["h"]
print(" N    10 + 24/N   34/N    MiB per layer: tp   tp + sequence")
for size in (1, 2, 4, 8, 16):
    alone = formulas.gpt_activation_bytes(**gpt3, tp=size)
    both = formulas.gpt_activation_bytes(**gpt3, tp=size, sequence_parallel=True)
    assert abs(alone / unit - (10 + 24 / size)) < 1e-9 and abs(both / unit - 34 / size) < 1e-9
    print(
        f"{size:2}   {alone / unit:9.2f}  {both / unit:6.2f}   {alone / 2**20:18.0f}   {both / 2**20:13.0f}"
    )
assert (
    formulas.gpt_activation_bytes(**gpt3, tp=8) == 327_155_712
    and formulas.gpt_activation_bytes(**gpt3, tp=8, sequence_parallel=True) == 106_954_752
)

# %% [markdown]
# Our block is not that GPT block (RMSNorm, SwiGLU, no dropout), so its factors differ, but not the reason.

# %%
temporaries = {
    name: compiled_memory(compiled)["temp_bytes"] for name, (_, _, compiled, _, _) in llamas.items()
}
if devices[0].platform == "cpu" and N > 1:
    assert temporaries["tp + sequence"] < temporaries["tp"]
    print(
        f"memory: the compiler plans {temporaries['tp + sequence'] / temporaries['tp']:.2f} times the"
        " temporaries for our toy with sequence parallelism"
    )

# %% [markdown]
# ## The limit, and the cliff from 8 to 16
#
# Tensor parallelism divides the work by N, but not the message: every device sends 2·(N-1)/N·b·s·d per all-reduce. With links of β bytes/s
# and C FLOP/s per chip, computing hides sending only while N < m / (C/β), where m is the feed-forward width (Austin et al. 2025).
# As in lesson 03 these are thresholds, so β is the published rate; for a TPU v5p, whose C/β is 2550 per mesh axis, the book's.

# %%
# NBVAL_CHECK_OUTPUT
v5p, h100 = chip("v5p"), chip("h100")
book = 2 * 90e9  # an axis of a v5p, both directions
links = [
    ("v5p", v5p, book),
    ("H100 inside a node", h100, h100.link_bytes_per_s),
    ("H100 between nodes", h100, h100.dcn_bytes_per_s),
]
degrees = {}
for where, device, rate in links:
    ratio = device.flops_per_s / rate
    print(f"{where}, {rate / 1e9:.0f} GB/s: C/β = {ratio:,.0f}, so N may go to", end=" ")
    for name in ("llama3-70b", "llama3.1-405b"):
        ffn = preset(name).ffn_width
        degrees[where, name] = formulas.tp_max_degree(ffn, device.flops_per_s, rate)
        print(
            f"{degrees[where, name]:.1f} for {name} (m = {ffn:,})", end="; " if name == "llama3-70b" else "\n"
        )
    assert where != "v5p" or round(ratio) == 2550
assert int(degrees["H100 inside a node", "llama3-70b"]) == 13

# %% [markdown]
# Now a layer of Llama 70B on H100 nodes of 8, 4096 tokens, bf16: computing at the peak, and four all-reduces that nothing hides. These are
# times, so inside a node messages run at the 370 GB/s that large ones reach, and the 13 from above becomes 10.7. Beyond 8 the
# truth lies between two models: *best*, every GPU's own network port is used and the levels overlap; *worst*, one flat ring runs at the speed
# of one port.

# %%
# NBVAL_CHECK_OUTPUT
config, num_tokens = preset("llama3-70b"), 4096
layer_params = (config.num_params - 2 * config.vocab_size * config.width) / config.num_layers
layer_message = 2 * num_tokens * config.width
bars, efficiency = [], {}
assert (
    f"{formulas.tp_max_degree(config.ffn_width, h100.flops_per_s, 370e9):.1f}" == "10.7"
    and h100.reached_link_bytes_per_s == 370e9
)
print(" N   computing   sending: best    worst   tokens/s per device, of N = 1: best   worst")
for size in (1, 2, 4, 8, 16, 32):
    compute_s = formulas.train_seconds(layer_params, num_tokens, size, h100.flops_per_s)
    best_s = 4 * formulas.collective_seconds(h100, "all-reduce", layer_message, size)
    worst_s = (
        best_s
        if size <= h100.node_size
        else 4 * formulas.sent_bytes("all-reduce", layer_message, size) / h100.dcn_bytes_per_s
    )
    efficiency[size] = [compute_s / (compute_s + send_s) for send_s in (best_s, worst_s)]
    print(
        f"{size:2}  {1e3 * compute_s:7.2f} ms  {1e3 * best_s:11.2f} ms {1e3 * worst_s:5.1f} ms "
        f" {efficiency[size][0]:37.0%} {efficiency[size][1]:7.0%}"
    )
    bars.append(
        (
            f"N = {size}",
            {"computing": compute_s, "sending, at best": best_s, "more, at worst": worst_s - best_s},
        )
    )
assert efficiency[16][0] < efficiency[8][0] and efficiency[16][1] < efficiency[8][1] / 4
scene.show(draw.time_bars(bars, title="One layer of Llama 70B, 4096 tokens, H100 nodes of 8"))

# %% [markdown]
# Inside the node the loss is gentle. At 16 even the best case computes half as long for the same message, and the worst case is a cliff.
# Measured curves fall there too (Ultra-Scale Playbook 2025). Where nodes have 4 GPUs and share one port, the cliff stands between 4
# and 8. This is arithmetic about links; simulated devices have none, and nothing was timed here.
#
# ### Exercise (stretch): more devices than KV heads
#
# Llama 3 8B has 32 query heads and 8 KV heads. Over `tp=16` every KV head must lie on two devices. The package splits the axis for that:
# an outer part, which cuts the KV heads, and an inner one, `kv`, whose devices hold copies of the same head:

# %%
sixteen = Plan("tp=16").of(preset("llama3-8b"))
parts = {axis: sixteen.mesh.sizes[axis] for axis in ("tp", "kv")}
assert parts == {"tp": 8, "kv": 2}
for matrix in ("d n h", "d k h"):
    print(f"{parts}: '{matrix}' is stored as '{sixteen.stored(f'attention {matrix}')}'")

# %% [markdown]
# vLLM, for one, shares heads in the same way. Write the list of KV heads that device `rank` of `tp` needs, for any
# numbers of query heads and KV heads, so that its own block of query heads (block `rank` of `tp`, in order) finds its keys. What must then
# happen to the gradients of K and V?


# %%
def kv_heads(rank, tp, num_heads, num_kv_heads): ...


attempt("05.kv_heads", kv_heads)

# %% [markdown]
# ## For experts: hide the gather inside the product
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


rows, weight = rng.standard_normal((64, D)).astype(np.float32), W1[0]
ring_specs = dict(
    mesh=mesh,
    in_specs=(spec(parse_layout("s/tp d")), spec(parse_layout("d m/tp"))),
    out_specs=spec(parse_layout("s m/tp")),
)
lowered = {
    f.__name__: jax.jit(jax.shard_map(f, **ring_specs)).lower(rows, weight)
    for f in (gather_then_multiply, ring_matmul)
}
texts = {name: partitioned_hlo(program) for name, program in lowered.items()}
blocks = [
    jax.device_put(a, sharding(mesh, parse_layout(place)))
    for a, place in ((rows, "s/tp d"), (weight, "d m/tp"))
]
for program in lowered.values():
    assert np.allclose(program.compile()(*blocks), rows @ weight, atol=1e-4)
ring, gathered = (census_hlo(texts[name], mesh) for name in ("ring_matmul", "gather_then_multiply"))
assert sum(c.count for c in ring) == N - 1 and {c.kind for c in ring} <= {"collective-permute"}
assert sum(c.bytes_sent for c in ring) == sum(c.bytes_sent for c in gathered)
print(
    f"value: the ring product equals gather, then multiply. communication: {N - 1} permutes = N-1, with the"
    " bytes of the one all-gather"
)
found = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}", texts["ring_matmul"])
pairs = [tuple(map(int, pair)) for pair in re.findall(r"(\d+),(\d+)", found[1])] if found else [(0, 0)]
scene.show(draw.ring_steps(pairs, num_steps=N, axis="tp"))

# %% [markdown]
# ### The same in a whole step
#
# The package does this for a Llama with `Plan(tp_sequence=True, tp_comm_overlap=True)`. The model's text stays as it is: `par.enter` and
# `par.leave` say which products go with an arrow, and the reading chooses how it travels. One ring serves all products of a
# value: Q, K and V share one, and so do the two column matrices of the feed-forward. Where a sum leaves, the ring turns
# around: the sum of one block travels while this device's part of the next one is multiplied. Each is the other's backward pass.
#
# The layers' gathers and scatters become permutes, and no arrow sends a byte more. What no product goes with stays: the embedding's
# scatter and the head's gather, one of each per step.

# %%
llamas["rings"] = train_llama(Plan(f"tp={N}", tp_sequence=N > 1, tp_comm_overlap=N > 1))
step, program, _, _, ring_losses = llamas["rings"]
assert np.allclose(ring_losses, solo_losses, rtol=1e-4)
print(f"value: {STEPS} losses equal those of one device")

census = census_hlo(partitioned_hlo(program), step.mesh)
assert census_table(census) == as_table(traffic.step_traffic(LLAMA, step.plan, BATCH, SEQ))


def by_arrow(census):
    """Bytes of each arrow, whatever it travels by."""
    sent = {}
    for row in arrow_rows(census):
        sent[row["arrow"]] = sent.get(row["arrow"], 0) + row["bytes_sent"]
    return sent


assert by_arrow(census) == by_arrow(moved["tp + sequence"])
print("communication: as predicted, and every arrow sends the bytes that it sent before")
hops = {}
for row in arrow_rows(census):
    if row["kind"] == "collective-permute":
        hops[row["arrow"]] = hops.get(row["arrow"], 0) + row["count"]
for arrow, count in hops.items():
    assert count == 2 * LLAMA.num_layers * (N - 1)  # forward and backward, N-1 hops each
    print(f"  {arrow:<36} {count} permutes: 2 layers, forward and backward, N-1 = {N - 1} hops each")
assert len(hops) == 4 * (N > 1)

# %% [markdown]
# Does it help? That is a question for links, and ours are simulated. A compiler for GPUs starts a permute, runs the product, and
# then waits for the rest; `llmpar compile` shows what is left to wait for on a cluster that is not here. A hop that takes longer
# than its product is hidden only in part. For Llama 3 8B over 8 H100s, bf16, blocks of 8,192 tokens, products at the peak rate:

# %%
# NBVAL_CHECK_OUTPUT
config, block = preset("llama3-8b"), 8192
hop_s = 2 * block * config.width / h100.reached_link_bytes_per_s
heads, kv_heads = config.num_heads * config.head_width, config.num_kv_heads * config.head_width
widths = {
    "Q, K, V": heads + 2 * kv_heads,
    "O": heads,
    "gate, up": 2 * config.ffn_width,
    "down": config.ffn_width,
}
print(f"a hop of {2 * block * config.width / 2**20:.0f} MiB takes {hop_s * 1e6:.0f} µs")
for which, width in widths.items():
    product_s = 2 * block * config.width * width / 8 / h100.flops_per_s
    print(f"  {which:<9} {product_s * 1e6:4.0f} µs, which hides {min(1, product_s / hop_s):4.0%} of a hop")
assert 2 * block * config.width * widths["gate, up"] / 8 / h100.flops_per_s > hop_s

# %% [markdown]
# ### Exercise (expert): count the hops
#
# Take one Llama layer with sequence parallelism, forward and backward, and turn each of its gathers and each of its scatters (see "one block"
# above) into such a ring. How many permutes does a device run? Return it as a function of `tp`.


# %%
def ring_permutes(tp): ...


attempt("05.ring_permutes", ring_permutes)

# %% [markdown]
# ## Where XLA's partitioner differs
#
# For the plain stack, hardly at all: say where the weights are, and the partitioner finds the same 2L-1 all-reduces.

# %%
auto_stack = jax.jit(
    sgd(stack),
    in_shardings=[sharding(mesh, place) for place in PLACES],
    out_shardings=(*[sharding(mesh, p) for p in PLACES[:2]], None),
)
auto_lowered = auto_stack.lower(W1, W2, X, Y)
found_auto = [c for c in census_hlo(partitioned_hlo(auto_lowered), mesh) if c.shape == (B, S, D)]
assert np.allclose(train(programs["by hand"][0], auto_lowered.compile())[0], want_losses, rtol=1e-4)
print(
    f"the stack by jit: {sum(c.count for c in found_auto)} {'all-reduces' if N > 1 else 'collectives'} of"
    " b·s·d, and the same losses"
)
if devices[0].platform == "cpu":
    assert sum(c.count for c in found_auto if c.kind == "all-reduce") == (2 * L - 1) * (N > 1)

# %% [markdown]
# For a whole Llama it goes its own ways.

# %%
auto_step, auto_lowered, auto_compiled, _, auto_losses = train_llama(
    Plan(f"tp={N}", tp_sequence=True, reading="auto")
)
assert np.allclose(auto_losses, solo_losses, rtol=1e-4)
assert (
    compiled_memory(auto_compiled)["argument_bytes"]
    == compiled_memory(llamas["tp + sequence"][2])["argument_bytes"]
)
print("value and memory: Auto equals Manual")
auto = census_table(census_hlo(partitioned_hlo(auto_lowered), mesh))
for name, table in (("manual", tables["tp + sequence"]), ("auto", auto)):
    for (_, kind), row in sorted(table.items(), key=lambda item: -item[1]["bytes_sent"]):
        print(f"{name:>7}: {kind:<18} ×{row['count']:<4}{row['bytes_sent']:>12,} B")
if devices[0].platform == "cpu" and N > 1:
    assert not any(kind == "reduce-scatter" for _, kind in auto)
    print(
        "communication: on simulated devices Auto never forms a reduce-scatter; it sends whole all-reduces"
        " and cuts their results"
    )

# %% [markdown]
# ## Summary
#
# 1. Column, then row, along the same dim: nothing moves between them, and one all-reduce ends the pair.
# 2. Attention is a pair (heads), the feed-forward is a pair (hidden units), the loss needs three numbers per token.
# 3. Each layer runs 4 all-reduces of b·s·d, two forward and two backward; a stack of plain pairs 2L-1.
# 4. Sequence parallelism makes each a reduce-scatter and an all-gather: the same bytes, and activations fall from 10 + 24/N to 34/N.
# 5. Work is divided by N, messages are not: stay below m / (C/β), which means inside the fast links.
#
# ## On your cluster
#
#     llmpar inspect --mesh "tp=-1" --tp-sequence
#     llmpar inspect --mesh "dp=2 tp=4" --tp-sequence --tp-comm-overlap
#     llmpar inspect --mesh "dp=2 tp=4" --tp-sequence --reading auto
#     llmpar inspect --mesh "fsdp=2 tp=4" --tp-sequence --svg bytes.svg
#     llmpar train --model llama3.2-1b --mesh "fsdp=-1 tp=4" --tp-sequence --remat block --dtype bfloat16 --batch-size 16 --seq-len 2048 --data "corpus/*.jsonl" --tokenizer tokenizer.json
#
# `tp` is the innermost axis of every mesh here: its partners are neighbours, on one node if tp divides the node. Look at the picture of lesson
# 00 before you choose a size that does not.
#
# **One number to remember: 4 all-reduces of b·s·d per layer,** however many devices share the work.
