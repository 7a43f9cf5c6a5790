# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 30
#     needs: ["00", "02"]
#     question: What must replicas exchange, and when?
#     objectives:
#     - Write data parallelism by hand, and say what replicas must agree on.
#     - Recognise the three usual faults in summing gradients.
#     - Predict what a step sends, and how many tokens hide it behind the backward
#       pass.
# ---

# %% [markdown]
# # 03 · What must replicas exchange?
#
# Four devices hold the same model. Each computes a gradient from its own rows of the batch, and updates its weights. After one
# step there are four different models. What must the devices send, so that there is one model again?

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
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from llmpar import draw
from llmpar.draw.scene import Line, Rect, Text, compose, show, small_text, time_text
from llmpar.explore.small import OverlapExplorer
from llmpar.inspect.census import (
    arrow_rows,
    arrow_text,
    census_hlo,
    census_table,
    partitioned_hlo,
)
from llmpar.lessons import attempt, hint, met, opened, say, solution
from llmpar.lessons.lesson import (
    as_predicted,
    counting_text,
    fresh_state,
    train_on,
    verdicts,
)
from llmpar.model.weights import model_graph
from llmpar.parallel.collectives import vary
from llmpar.parallel.mesh import make_mesh, sharding
from llmpar.parallel.modes import Manual, Solo
from llmpar.plan.layout import parse_arrow, parse_layout
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.predict import formulas, traffic
from llmpar.predict.hardware import chip
from llmpar.training.step import State

# Accelerators round float32 matmuls unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
N = len(devices)
mesh = make_mesh(f"dp={N}")
LLAMA = dataclasses.replace(preset("tiny"), num_layers=2)

# %%
show(draw.replicas(together=False))

# %% [markdown]
# ## Predict: what must they exchange?

# %%
exchanged = ...  # "rows", "activations", "gradients" or "weights"
attempt("03.exchanged", exchanged)

# %% tags=["plumbing"]
if opened("03.exchanged"):
    show(draw.replicas())

# %% [markdown]
# ## What replicas exchange
#
# All replicas begin with equal weights. If all subtract the *same* gradient, they stay equal. Each has computed one part of it,
# from its rows. An all-reduce (lesson 02) adds the parts and gives the sum to all. This is *data parallelism*, over the mesh
# axis `dp`. For a weight the arrow is `d m +dp -> d m` (`d` width of the model, `m` width of a feed-forward). On the left each
# device has a partial sum; on the right the sum is finished.
#
# ## Three candidates for the sum
#
# Take a toy model of two matrices. Not all rows count, as in a padded text. On one device the loss is the sum of squared
# errors, divided by the number of rows that count:


# %%
def squares(weights, x, counted):
    """The sum, over the rows that count, of how far the toy is from its input."""
    errors = jnp.tanh(x @ weights["up"]) @ weights["down"] - x
    return jnp.sum(errors * errors * counted[:, None])


def one_device(weights, x, counted):
    mean = lambda w: squares(w, x, counted) / counted.sum()
    return jax.value_and_grad(mean)(weights)


# %% tags=["plumbing"]
rng = np.random.default_rng(0)
rows, d, m = 4 * N, 16, 32
toy = {
    "up": rng.normal(size=(d, m)).astype(np.float32) / 4,
    "down": rng.normal(size=(m, d)).astype(np.float32) / 4,
}
x = rng.normal(size=(rows, d)).astype(np.float32)
# Of its four rows, a device counts 1, 2, 3 or all.
counted = np.arange(rows) % 4 <= np.arange(rows) // 4 % 4
want_loss, want = jax.jit(one_device)(toy, x, counted)


def distance(got, want):
    """The largest difference of any leaf, over that leaf's largest element."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    off = lambda g, w: np.abs(np.asarray(g) - np.asarray(w)).max() / np.abs(w).max()
    return max(float(off(g, np.asarray(w))) for g, w in pairs)


def on_mesh(function):  # rows are cut, weights are not
    places = (P(), P("dp"), P("dp"))
    on_devices = jax.shard_map(function, mesh=mesh, in_specs=places, out_specs=P())
    return jax.jit(on_devices)


def norm(tree):
    return jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(tree)))


def scaled(tree, factor):
    return jax.tree.map(lambda g: g * factor, tree)


# %% [markdown]
# On several devices each device has the gradient of its *own* sum, and its *own* count. `lax.psum(…, "dp")` adds over the
# devices, `lax.pmean` takes the mean. Here are three ways to make one gradient; the third also clips it to a norm of 1:


# %%
def mean_then_sum(grads, count):
    return lax.psum(scaled(grads, 1 / count), "dp")


def mean_then_mean(grads, count):
    return lax.pmean(scaled(grads, 1 / count), "dp")


def clip_then_sum(grads, count):
    grads = scaled(grads, 1 / lax.psum(count, "dp"))
    return lax.psum(scaled(grads, jnp.minimum(1, 1 / norm(grads))), "dp")


# %% [markdown]
# On one device all three are right. **Which are right on several devices, if these count different numbers of rows?**

# %%
right = {"mean_then_sum": ..., "mean_then_mean": ..., "clip_then_sum": ...}
attempt("03.three_sums", right)  # each "right" or "wrong"

# %% tags=["plumbing"]
WAYS = (mean_then_sum, mean_then_mean, clip_then_sum)


def all_three(weights, x, counted):
    own = jax.tree.map(lambda w: lax.pcast(w, "dp", to="varying"), weights)
    grads, count = jax.grad(squares)(own, x, counted), counted.sum().astype(jnp.float32)
    return [way(grads, count) for way in WAYS]


assert norm(want) > 1, "the clip must bite, or it hides the fault"
wanted = (want, want, scaled(want, jnp.minimum(1, 1 / norm(want))))
given = on_mesh(all_three)(toy, x, counted)
shown = opened("03.three_sums")
for way, got, right in zip(WAYS, given, wanted, strict=True):
    error = distance(got, right)
    assert error > 1e-2
    if shown:
        print(f"{way.__name__:<15} off by {error:.0%} of the largest gradient")

# %% [markdown]
# All three are wrong, but people write them, because they are right on one device. Hugging Face Transformers had the second
# until October 2024, with microbatches in place of devices. Divide **the total sum by the total count**, and take the norm only
# after the sum.
#
# ### Exercise (core): one gradient for all devices
#
# Both functions run on every device. They get this device's gradient of the *sum* (one array) and its count (a float). `gradient` returns the
# mean over all rows of all devices; `clipped` returns the same, clipped to a norm of 1.


# %%
def gradient(grad_sum, count): ...  # cures mean_then_sum and mean_then_mean


def clipped(grad_sum, count): ...  # cures clip_then_sum


attempt("03.repair", {"gradient": gradient, "clipped": clipped})

# %% [markdown]
# ## Data parallelism is three lines more
#
# One call needs a picture: `lax.pcast(w, "dp", to="varying")`. It changes no number. It marks the weights as each device's own copy.

# %% tags=["plumbing"]
fills = ("other1", "other3", "ep", "tp")
items = [Rect(0, 40, 110, 56, "weights", "edge")]
items.append(Text(55, 68, "w, shared", anchor="middle", fill="white"))
items += [Rect(190, 48, 70, 40, "cell", "edge", radius=6)]
items.append(Text(225, 68, "pcast", anchor="middle", bold=True))
for k, fill in enumerate(fills):
    left, top = 350 + 5 * k, 32 + 8 * k
    items += [
        Rect(left, top, 110, 44, fill, "edge"),
        Rect(left + 220, top, 110, 44, fill, "edge"),
    ]
items.append(Text(420, 80, "own w", anchor="middle", fill="black"))
items.append(Text(640, 80, "own loss", anchor="middle", fill="black"))
for a, b in ((112, 188), (262, 346), (478, 566)):
    items.append(Line(((a, 68), (b, 68)), "ink", 2.5, head=True))
items.append(small_text(530, 52, "own rows", fill="ink"))
for a, b in ((600, 440), (400, 60)):
    items.append(
        Line(((a, 118), (a, 150), (b, 150), (b, 118)), "dp-line", 2.5, head=True)
    )
items.append(small_text(520, 166, "backward to pcast's output:", fill="dp-line"))
items.append(small_text(520, 184, "this device's own gradient", fill="dp-line"))
items.append(small_text(230, 166, "on to pcast's input:", fill="dp-line"))
items.append(small_text(230, 184, "all-reduce, the sum", fill="dp-line"))
words = (
    "forward: w, shared by all, goes through pcast, which changes no number, to each"
    " device's own w and own loss\nbackward to the output of pcast: each device's own"
    " gradient\nfurther back to its input: an all-reduce, the sum of all"
)
show(compose("pcast: nothing forward, an all-reduce backward", [items], words))

# %% [markdown]
# The backward pass of `pcast` is an all-reduce. If you differentiate with respect to the marked copy (as below), you get this device's
# own gradient, and write the sum yourself. With respect to the shared weight, before `pcast`, you get the sum.


# %%
def by_hand(weights, x, counted):  # one device's rows of x and counted
    total = lax.psum(counted.sum(), "dp")
    own = jax.tree.map(lambda w: lax.pcast(w, "dp", to="varying"), weights)
    part = lambda w: squares(w, x, counted) / total
    loss, grads = jax.value_and_grad(part)(own)
    return lax.psum(loss, "dp"), lax.psum(grads, "dp")  # d m +dp -> d m, m d +dp -> m d


# %% tags=["plumbing"]
def as_on_one_device(loss, grads):
    assert abs(float(loss) - float(want_loss)) < 1e-5 * float(want_loss)
    assert distance(grads, want) < 1e-5
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(grads))


as_on_one_device(*on_mesh(by_hand)(toy, x, counted))
text = partitioned_hlo(on_mesh(by_hand).lower(toy, x, counted))
sent_by_hand = census_table(census_hlo(text, mesh))
for (_, kind), row in sent_by_hand.items():
    print(f"as on one device; {row['count']} {kind}s: row count, loss, 2 gradients")
assert sent_by_hand.keys() == {("dp", "all-reduce")}
assert sent_by_hand["dp", "all-reduce"]["count"] == 4

# %% [markdown]
# ## Predict: what does each device send?
#
# A small Llama has gradients in float32. **How many bytes does each device send per step**, by ring all-reduces, so that
# all have the sum of all gradients?

# %%
print(f"parameters: {LLAMA.num_params:,}; devices: {N}")
bytes_sent = ...  # bytes, for the float32 gradients alone

attempt("03.sent", bytes_sent, params=LLAMA.num_params, devices=N)

# %% [markdown]
# Below are four plans of one training. They send the gradients in four ways:

# %%
plans = {
    # after the backward pass: a message per weight (the layers' are stacked)
    "end": Plan(f"dp={N}", zero=0),
    # inside the backward pass, layer by layer
    "layer": Plan(f"dp={N}", zero=0, reduce="layer"),
    # after it, joined into flat buckets
    "bucket": Plan(f"dp={N}", zero=0, reduce="bucket", bucket_bytes=128 * 1024),
    # after two microbatches, whose gradients a device first adds by itself
    "microbatches": Plan(f"dp={N}", zero=0, microbatches=2),
}

# %% [markdown]
# The batch is uneven: a fifth of the targets does not count; on the last device no target does. (Its own mean would be
# 0/0.)

# %% tags=["plumbing"]
BATCH, SEQ, RATE, MOMENTUM, STEPS = 2 * N, 16, 0.3, 0.9, 4
batch = counting_text(BATCH, SEQ)
left_out = rng.random((BATCH, SEQ)) < 0.2
left_out[BATCH - 2 :] = True
batch["targets"] = np.where(left_out, -1, batch["targets"])


@jax.jit
def solo_step(params, velocity):  # one device, with the update written out
    def loss(params):
        count = (batch["targets"] >= 0).sum().astype(jnp.float32)
        model = nnx.merge(model_graph(LLAMA), params)
        return model.cross_entropies(batch, Solo())[0].sum() / count

    value, grads = jax.value_and_grad(loss)(params)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    return value, jax.tree.map(lambda w, v: w - RATE * v, params, velocity), velocity


print("One device first: about 10 s.")
optimizer = optax.sgd(RATE, MOMENTUM)
params = fresh_state(LLAMA, optimizer).params
solo_losses, velocity = [], jax.tree.map(jnp.zeros_like, params)
for _ in range(STEPS):
    loss, params, velocity = solo_step(params, velocity)
    solo_losses.append(float(loss))
assert solo_losses[-1] < solo_losses[0] - 0.5, "it learns"
print("losses on one device:", " ".join(f"{loss:.3f}" for loss in solo_losses))

# %%
print("Four programs are compiled and run: about 15 s.")
runs = {
    name: train_on(LLAMA, plan, batch, optimizer, STEPS, clip=None)
    for name, plan in plans.items()
}

# %% tags=["plumbing"]
last = State(params, velocity, STEPS)
solo = runs["end"]._replace(state=last, losses=solo_losses)  # the same, of one device
tables = verdicts(runs, solo, weights_within=1e-4)
censuses = {name: as_predicted(run) for name, run in runs.items()}
for run in runs.values():
    assert distance(run.state.optimizer, velocity) < 1e-4  # all gradients so far
    shards = lambda w: {s.data.shape for s in w.addressable_shards}
    assert all(shards(w) == {w.shape} for w in jax.tree.leaves(run.state.params))
    assert run.step.batch_sharding.shard_shape((BATCH, SEQ)) == (BATCH // N, SEQ)
small = 4 * 3  # loss, number of targets, squared norm: one message
scalars = 2 * small * (N - 1) // N
of_gradients = sum(c.bytes_sent for c in censuses["end"]) - scalars

# %%
met("03.sent", of_gradients)
packed = {
    name: [c.bytes_sent / c.count for c in found for _ in range(c.count)]
    for name, found in censuses.items()
}
if opened("03.sent"):
    show(draw.messages(packed.items()))

# %% tags=["plumbing"]
bound = 2 * (4 * LLAMA.num_params + small) * (N - 1) / N
counts = {name: sum(c.count for c in census) for name, census in censuses.items()}
for name, census in censuses.items():
    size = sum(c.bytes_sent for c in census)
    assert size == traffic.step_traffic(runs[name].step.plan, BATCH, SEQ).total_bytes
    # A ring that does not divide rounds each message.
    assert abs(size - bound) <= counts[name]
leaves, stacked = (len(jax.tree.leaves(t)) for t in (params, params["blocks"]))
assert counts["end"] == counts["microbatches"] == leaves + 1
by_layer = (leaves - stacked) + LLAMA.num_layers * stacked + 1
assert counts["layer"] == by_layer and 1 < counts["bucket"] < counts["end"]

# %% [markdown]
# ## What the four plans send
#
# All four send the same: each of `N` devices sends 2(N − 1)/N times the gradients' bytes, and one small message (the loss, the number of
# targets, the norm). Three of them differ in the *number* of messages, and each message costs its starts (lesson 02). `microbatches` sends
# as `end`, once for two backward passes.
#
# ## From how many tokens on is sending hidden?
#
# The gradient of the last layer is ready first. It can be sent while earlier layers compute. Take Llama 3 8B on 8 H100s,
# with gradients in bfloat16. An H100 computes 989.4e12 FLOPs per second, and 370 GB/s leave it. **With how many tokens per
# device does computing take as long as sending?** Within 15 % counts as right.

# %%
tokens_needed = ...
attempt("03.hide", tokens_needed)

# %%
explorer = OverlapExplorer(tokens=1024)
explorer if opened("03.hide") else None

# %% tags=["plumbing"]
computes, sends = explorer.seconds(explorer.state, 1024)
balance = round(1024 * sends / computes)
assert balance == 2340  # the text below
met("03.hide", balance, "computed")

# %% [markdown]
# (`28+`: layers 28 to 31.) Times are computed from C and β, not measured. Real matmuls reach less.
#
# A backward pass costs 4 FLOPs per parameter and token. An all-reduce moves 4 bytes per parameter in bfloat16: 2 bytes, twice. With
# `Ψ` parameters, `T` tokens per device and backward pass, `C` FLOP/s of a device and `β` bytes/s of its links:
#
# $$ \frac{4\,\Psi\,T}{C} \ge \frac{4\,\Psi}{\beta} \quad\Longleftrightarrow\quad T \ge \frac{C}{\beta} $$
#
# The size of the model drops out: the threshold belongs to the hardware. At 370 GB/s it is 2,674 tokens; the ring sends only 7/8: 2,340. By
# *published* rates:

# %% tags=["plumbing", "nbval-check-output"]
h100, v5p = chip("h100"), chip("v5p")
axis = 2 * 90e9  # both directions of a ring, at the book's rate
assert axis == 2 * v5p.link_bytes_per_s * v5p.link_efficiency
thresholds = {
    "H100, inside a node of 8": (h100, h100.link_bytes_per_s, 2200),
    "H100, across nodes": (h100, h100.node_size * h100.dcn_bytes_per_s, 2475),
    "TPU v5p, three axes": (v5p, 3 * axis, 850),
    "TPU v5p, one axis": (v5p, axis, 2550),
}
for where, (device, rate, published) in thresholds.items():
    tokens = formulas.dp_min_tokens(device.flops_per_s, rate)
    assert abs(tokens / published - 1) < 1e-3
    at_rate = f"{where}, {rate / 1e9:.0f} GB/s:"
    print(f"{at_rate:<36} {tokens:4.0f} tokens, published {published}")

# %% [markdown]
# (Published: Austin et al. 2025.) 400 GB/s is the rate of a whole node, whose GPUs first add up inside. With more tokens a step
# waits only for the last piece. But hidden is not free: messages slow matmuls (lesson 11).
#
# ## Measured: replicas on more nodes
#
# Llama 2 7B was trained on 1 to 16 nodes of 8 H100s, with a replica on each node and the same tokens per GPU:

# %%
NODES, TFLOPS = [1, 2, 4, 8, 16], [492, 422, 407, 409, 375]  # MaxText, each GPU
kept = ("measured", [one / TFLOPS[0] for one in TFLOPS], "measured", "o", False)
ideal = ("nothing lost", [1] * 5, "soft", None, True)
axes = "nodes of 8 H100s", "share of one node's speed"
look = dict(high=1.1, percent=True, title="On 16 nodes a GPU keeps 76 % of its speed")
show(draw.curves([ideal, kept], NODES, *axes, **look))

# %% [markdown]
# (MaxText, README of its A3 configurations; FSDP inside a node, lesson 04.) With two nodes, gradients cross the network. From 2 to 8
# nodes 2(N − 1)/N grows only from 1 to 1.75. The step to 16 costs more than this explains; the source does not say why.
#
# ## Keep: replicas sum their gradients
#
# 1. Replicas exchange gradients: one arrow, `d m +dp -> d m`, for each weight.
# 2. Divide the total sum by the total count. Means of means are wrong if counts differ, norms of partial sums always.
# 3. Each device sends 2(N − 1)/N times the gradients' bytes, in one message or in many messages.
# 4. Gradients in bfloat16, sent by layers, hide behind C/β tokens per device; the last piece never.
# 5. With microbatches a device adds its gradients first, and sends their sum once.

# %% [markdown]
# ## Further
#
# ### What the package sends, to the byte
#
# The line of verdicts above, in full. The *final* program may hold fewer messages than we asked for: XLA joins all-reduces that
# nothing keeps apart, which is its own way of making buckets.

# %% tags=["plumbing"]
verdicts(runs, solo, weights_within=1e-4, details=True)
print("plan           asked for   final program   bytes per byte of gradients")
for name, census in censuses.items():
    step, compiled = runs[name].step, runs[name].compiled
    final = sum(c.count for c in census_hlo(compiled.as_text(), step.mesh))
    share = sum(c.bytes_sent for c in census) / (4 * LLAMA.num_params)
    print(f"{name:<12}{counts[name]:>12}{final:>16}{share:>30.3f}")
print(f"2 x (N - 1) / N = {2 * (N - 1) / N:g} for N = {N}, below 2 for any N")

# %% [markdown]
# ### When the last bucket arrives
#
# This is the live figure's arithmetic. Thresholds in the tables use published rates (450 GB/s). The bet, the figure and all times use the
# 370 GB/s that large messages reach. In this package `layer` sends like this; `end` and `bucket` send after the backward pass, so nothing
# overlaps. Across nodes each device exchanges an eighth of the gradients over its own port, so together a node's 8 ports count. Gradients
# summed in float32, as here, double the bytes and so every threshold. A program that reaches only half of C has half the threshold (not half
# the bytes).
#
# Not in this arithmetic: a collective takes cores and memory rate of a GPU from the matmuls beside it. In llmpar's estimates these lose
# between a fifth and a third of the message's time on most GPUs, so a hidden message costs that much.


# %%
def end(compute_s, comm_s):
    """When the last bucket has arrived; each waits for its gradients and the links."""
    computed = sent = 0.0
    for compute, comm in zip(compute_s, comm_s, strict=True):
        computed += compute
        sent = max(computed, sent) + comm
    return sent


# %% tags=["plumbing"]
figure = OverlapExplorer(tokens=4096)


def computing(tokens):
    return [figure.seconds(figure.state, tokens)[0]] * 8


compute_s, comm_s = computing(4096), [figure.seconds(figure.state, 4096)[1]] * 8
assert f"side by side: {time_text(end(compute_s, comm_s))}" in figure.scene.text
turns = 4096 * comm_s[0] / compute_s[0]
reached = h100.flops_per_s / h100.reached_link_bytes_per_s
assert abs(turns / (reached * 7 / 8) - 1) < 1e-3 and round(turns) == 2340
print("tokens per device   computing   until all is sent   of sending, waited for")
for tokens in (512, 1024, 2048, 4096, 8192):
    total, alone = end(computing(tokens), comm_s), sum(computing(tokens))
    share = (total - alone) / sum(comm_s)
    assert total - alone >= comm_s[-1] * (1 - 1e-9), "nothing hides the last bucket"
    print(f"{tokens:>17}{1e3 * alone:>9.1f} ms{1e3 * total:>17.1f} ms{share:>25.1%}")

# %% [markdown]
# Smaller buckets shorten the last wait, until their number costs more than it saves, because every all-reduce has a latency.
#
# ### Two other ways to write the sum
#
# Leave out `pcast`, and the all-reduce comes unasked, as part of the backward pass: this is what `reduce="layer"` does. Or write
# the two arrows, as the package does. Each collective then carries its arrow into the compiled program. A *census*, the count of
# what a compiled program sends, finds it there again.


# %%
def unasked(weights, x, counted):
    total = lax.psum(counted.sum(), "dp")
    loss, grads = jax.value_and_grad(lambda w: squares(w, x, counted) / total)(weights)
    return lax.psum(loss, "dp"), grads


par = Manual(Plan(f"dp={N}", zero=0).resolve())
SCALAR = parse_arrow("+dp -> whole")
ROWS = dataclasses.replace(SCALAR, text="rows that count")
LOSS = dataclasses.replace(SCALAR, text="loss")
GRADS = {"up": parse_arrow("d m +dp -> d m"), "down": parse_arrow("m d +dp -> m d")}


def by_package(weights, x, counted):
    total = par.carry_out(counted.sum(), ROWS)
    own = jax.tree.map(lambda w: vary(w, ("dp",)), weights)
    loss, grads = jax.value_and_grad(lambda w: squares(w, x, counted) / total)(own)
    grads = {name: par.carry_out(g, GRADS[name]) for name, g in grads.items()}
    return par.carry_out(loss, LOSS), grads


# %% tags=["plumbing"]
for way in (unasked, by_package):
    as_on_one_device(*on_mesh(way)(toy, x, counted))
    census = census_hlo(partitioned_hlo(on_mesh(way).lower(toy, x, counted)), mesh)
    assert census_table(census) == sent_by_hand
arrows = {c.arrow: c.bytes_sent for c in census}
assert arrows.keys() == {"rows that count", "loss", *map(str, GRADS.values())}
assert sum(arrows.values()) == sum(row["bytes_sent"] for row in sent_by_hand.values())
print("both compile to what by_hand compiles to, and give the same")
say("by arrows: " + "; ".join(f"{arrow}: {size} B" for arrow, size in arrows.items()))

# %% [markdown]
# A fourth fault, adding twice, cannot be written in arrows: a sum that is finished on all devices is not an unfinished one.
# The refusal comes while the program is traced, before anything is compiled.


# %%
def added_twice(weights, x, counted):
    once = par.carry_out(counted.sum(), ROWS)
    return par.carry_out(once, ROWS)


try:
    on_mesh(added_twice).lower(toy, x, counted)
    raise AssertionError("this should have been refused")
except ValueError as refusal:
    say(refusal)

# %% [markdown]
# ### Which weight sends what
#
# The Llama's sums carry their arrows, too. Here are those of `reduce="layer"`. What is sent inside the loop over the layers is
# sent once per layer; XLA cannot join it. ([The letters](../docs/words.md#words))

# %%
print(arrow_text(censuses["layer"]))

# %% tags=["plumbing"]
layered = censuses["layer"]
sent_by_layer = sum(row["bytes_sent"] for row in arrow_rows(layered))
assert sent_by_layer == sum(c.bytes_sent for c in layered)
inside = [c for c in layered if c.count == LLAMA.num_layers]
assert len(inside) == stacked
print(f"{len(inside)} all-reduces in the loop over {LLAMA.num_layers} layers,", end=" ")
print(f"{len(layered) - len(inside)} outside it")

# %% [markdown]
# ### Accumulation does not move the threshold
#
# Sums inside the backward pass cannot wait: each microbatch has a backward pass of its own, so they would be sent `u` times.
# The package refuses to run that.

# %% tags=["plumbing"]
print("microbatches   end         layer, if it ran")
for u in (1, 2, 4):
    at_end, by_layer = (
        Plan(f"dp={N}", zero=0, reduce=when, microbatches=u)
        for when in ("end", "layer")
    )
    sent = lambda plan, u=u: (
        traffic.step_traffic(plan.resolve(LLAMA), BATCH * u, SEQ).total_bytes
    )
    assert sent(at_end) == sum(c.bytes_sent for c in censuses["end"])
    assert sent(by_layer) == u * sent(at_end) - (u - 1) * scalars  # those are sent once
    print(f"{u:>12}   {sent(at_end):<9,}   {sent(by_layer):,} bytes per step")
try:
    by_layer.resolve(LLAMA, batch_size=BATCH * u, seq_len=SEQ)
    raise AssertionError("this should have been refused")
except ValueError as refusal:
    say(refusal)

# %% [markdown]
# A gradient is final only in the last microbatch's backward pass, so it can overlap with the tokens of that one only. The wait stays the
# same; the step gets `u` times longer, so it matters less. Of the timeline above, in buckets:

# %% tags=["plumbing"]
print("microbatches   waited for   of the step's backward passes")
for u in (1, 2, 4):
    earlier = compute_s * (
        u - 1
    )  # gradients are not final: there is nothing to send yet
    until = end(earlier + compute_s, [0.0] * len(earlier) + comm_s)
    waited = until - u * sum(compute_s)
    assert np.isclose(waited, end(compute_s, comm_s) - sum(compute_s))
    print(f"{u:>12}   {time_text(waited):>10}   {waited / (u * sum(compute_s)):.1%}")

# %% [markdown]
# More replicas mean more tokens per step, and that is not free either: beyond the *critical batch size* more tokens make a
# step's gradient hardly better (McCandlish et al. 2018). That limit depends on how the model learns; we do not compute it.
#
# ### Exercise (stretch): choose the bucket
#
# Another cluster: the backward pass of 32 equal layers takes 80 ms, all gradients in one all-reduce 60 ms, and each
# all-reduce costs 1 ms of latency on top. Of 1, 2, 4, 8, 16 or 32 layers per bucket, with which is the step over soonest?
# Use `end`.

# %%
layers_per_bucket = ...

attempt("03.bucket", layers_per_bucket)

# %% [markdown]
# ### Exercise (expert): the last batch
#
# An epoch ends with a batch whose rows do not divide by the number of devices. Write a function that returns targets
# (`[rows, positions]`, NumPy, -1: not counted) with enough rows added, so that the mean over all targets stays what it was.


# %%
def pad(targets, devices): ...


attempt("03.pad", pad)

# %% [markdown]
# ### Where XLA's partitioner differs
#
# Under `jax.jit` with the batch cut and the weights whole, no collective is written: the partitioner finds out that the
# gradients are unfinished sums. It gives the same numbers. When it sums and what it merges is its choice; to hold it to a
# bucket size or to the end of an accumulation, the sums must be written, as above.

# %%
cut, whole = sharding(mesh, parse_layout("b/dp")), sharding(mesh, parse_layout("whole"))
auto = jax.jit(one_device, in_shardings=(whole, cut, cut), out_shardings=whole)

# %% tags=["plumbing"]
as_on_one_device(*auto(toy, x, counted))
lowered = auto.lower(toy, x, counted)
asked = census_hlo(partitioned_hlo(lowered), mesh)
final = census_hlo(lowered.compile().as_text(), mesh)
print(f"by hand:     {sum(row['count'] for row in sent_by_hand.values())} all-reduces")
for where, census in (("partitioner", asked), ("final", final)):
    kinds = ", ".join(sorted({c.kind for c in census}))
    print(f"{where + ':':<12} {len(census)} {kinds},", end=" ")
    print(f"{sum(c.bytes_sent for c in census)} B")

# %% [markdown]
# ### On your cluster
#
# ```
# llmpar train --mesh dp=-1 --batch-size 32 --microbatches 2      gradients summed once per step
# llmpar train --mesh dp=-1 --reduce layer                      layer by layer, behind the backward pass
# llmpar inspect --mesh dp=-1 --zero 0 --reduce bucket          all-reduces, bytes and source lines
# llmpar inspect --mesh dp=-1 --mode auto                    what the partitioner does instead
# ```
