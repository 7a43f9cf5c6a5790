# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 30
#     needs: ["00", "02"]
#     objectives:
#     - Write data parallelism by hand, and say what replicas must agree on.
#     - Recognise the three usual faults in summing gradients.
#     - Predict what a step sends, and from how many tokens on it can hide behind the
#       backward pass.
# ---

# %% [markdown]
# # 03 · Data parallelism, then overlap
#
# **Question.** What must replicas agree on, and when can they talk?
#
# Every device has all the weights and its own part of the batch. Each computes a gradient from its part; the gradients are
# added up over the devices; every device then makes the same update. What travels is **gradients**: not weights, not
# activations, not data. Weights agree because they started equal and every update is the same.
#
# Letters: `b` rows of the batch, `d` width of the model, `m` width of a feed-forward, `u` microbatches, `N` devices
# along the axis at hand, `Ψ` parameters, `T` tokens per device and backward pass, `C` FLOP/s of a device, `β` bytes/s
# of its links.

# %%
from llmpar.mesh import use_devices

devices = use_devices()

# %% [markdown]
# ## One screen
#
# As an arrow: a gradient with dims `d m` leaves the backward pass as an unfinished sum over `dp` (each device has its part
# of it) and is finished by an all-reduce. That line is the strategy. (*Arrow*, *region*, *reading*: the README explains
# them under [Words](../README.md#words).)

# %%
from llmpar import draw
from llmpar.draw.scene import show, time_text

N = len(devices)
show(draw.arrow("d m +dp -> d m", (64, 128), f"dp={N}", 4))

# %% [markdown]
# ## Predict
#
# The Llama below has float32 gradients. How many bytes does each device send per step so that all devices have the sum of
# all gradients, by ring all-reduces?

# %%
import dataclasses

from llmpar.config import preset

config = dataclasses.replace(preset("tiny"), num_layers=2)
print(f"parameters: {config.num_params:,}; devices: {N}")

# %%
from llmpar.exercises import attempt, hint, solution

bytes_sent = ...  # your number, for the gradients alone

attempt("03.sent", bytes_sent, params=config.num_params, devices=N)

# %% [markdown]
# ## By hand, on a toy
#
# Two matrices, and rows of which not all count: as in text, where some targets are left out, and where the last batch is
# not full. One device first: the sum of the squared errors, divided by the number of rows that count.

# %%
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from llmpar.mesh import make_mesh

jax.config.update("jax_default_matmul_precision", "highest")  # accelerators round float32 products otherwise
mesh = make_mesh(f"dp={N}")
rng = np.random.default_rng(0)
rows, d, m = 4 * N, 16, 32
toy = {
    "up": rng.normal(size=(d, m)).astype(np.float32) / 4,
    "down": rng.normal(size=(m, d)).astype(np.float32) / 4,
}
x = rng.normal(size=(rows, d)).astype(np.float32)
counted = np.arange(rows) % 4 <= np.arange(rows) // 4 % 4  # of its four rows, a device counts 1, 2, 3 or all


def squares(weights, x, counted):
    """The sum, over the rows that count, of how far the toy is from reproducing its input."""
    errors = jnp.tanh(x @ weights["up"]) @ weights["down"] - x
    return jnp.sum(errors * errors * counted[:, None])


def one_device(weights, x, counted):
    return jax.value_and_grad(lambda w: squares(w, x, counted) / counted.sum())(weights)


want_loss, want = jax.jit(one_device)(toy, x, counted)
print(
    f"rows that count, per device: {counted.reshape(N, 4).sum(1).tolist()}; loss on one device"
    f" {float(want_loss):.4f}"
)

# %% [markdown]
# Now the same on all devices, in bare `lax` inside `jax.shard_map`. The count is summed *before* dividing: a mean over all
# targets is the sum of sums over the sum of counts, not the mean of the devices' means.
#
# `lax.pcast` says "from here on, a copy of each device's own". Without it `shard_map` knows that the weights are the same
# everywhere, so differentiating by them already adds up over the devices; you would have got the all-reduce unasked, as
# part of the backward pass. Both give the same sum, and both will be wanted.


# %%
def by_hand(weights, x, counted):
    total = lax.psum(counted.sum(), "dp")
    own = jax.tree.map(lambda w: lax.pcast(w, "dp", to="varying"), weights)
    loss, grads = jax.value_and_grad(lambda w: squares(w, x, counted) / total)(own)
    return lax.psum(loss, "dp"), lax.psum(grads, "dp")


def unasked(weights, x, counted):
    total = lax.psum(counted.sum(), "dp")
    loss, grads = jax.value_and_grad(lambda w: squares(w, x, counted) / total)(weights)
    return lax.psum(loss, "dp"), grads


def on_mesh(function):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(P(), P("dp"), P("dp")), out_specs=P()))


# %% [markdown]
# The package does the same from the text of two arrows. Each collective carries its arrow into the compiled program, where a census
# of what is sent finds it again.

# %%
from llmpar.notation import parse_arrow
from llmpar.par import Manual, vary
from llmpar.plan import Plan

par = Manual(Plan(f"dp={N}", zero=0))
GRADIENTS = {"up": parse_arrow("d m +dp -> d m"), "down": parse_arrow("m d +dp -> m d")}
SCALAR = parse_arrow("+dp -> whole")


def by_package(weights, x, counted):
    total = par.carry_out(counted.sum(), SCALAR, "rows that count")
    own = jax.tree.map(lambda w: vary(w, ("dp",)), weights)
    loss, grads = jax.value_and_grad(lambda w: squares(w, x, counted) / total)(own)
    return par.carry_out(loss, SCALAR, "loss"), {
        name: par.carry_out(g, GRADIENTS[name]) for name, g in grads.items()
    }


# %%
from llmpar.inspect.census import (
    arrow_rows,
    arrow_text,
    census_hlo,
    census_table,
    compiled_memory,
    partitioned_hlo,
)


def distance(got, want):
    """The largest difference of any leaf, over that leaf's largest element."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(
        float(np.abs(np.asarray(g) - np.asarray(w)).max() / np.abs(np.asarray(w)).max()) for g, w in pairs
    )


ways = {"by hand": on_mesh(by_hand), "unasked": on_mesh(unasked), "by the package": on_mesh(by_package)}
results = {name: way(toy, x, counted) for name, way in ways.items()}
for name, (loss, grads) in results.items():
    assert abs(float(loss) - float(want_loss)) < 1e-5 * float(want_loss) and distance(grads, want) < 1e-5
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(grads))
    print(
        f"{name:<15} loss {float(loss):.4f} and gradients equal those of one device; every device has all of"
        " them"
    )

texts = {name: partitioned_hlo(way.lower(toy, x, counted)) for name, way in ways.items()}
sent = {name: census_table(census_hlo(text, mesh)) for name, text in texts.items()}
assert sent["by hand"] == sent["unasked"] == sent["by the package"]
arrows = {c.arrow: c.bytes_sent for c in census_hlo(texts["by the package"], mesh)}
assert N == 1 or arrows.keys() == {"rows that count", "loss", *map(str, GRADIENTS.values())}
assert sum(arrows.values()) == sum(row["bytes_sent"] for row in sent["by hand"].values())
print(f"communication: each compiles to {sent['by hand'] or 'nothing'}")
print("its arrows:    " + "; ".join(f"{arrow}: {sent_bytes} B" for arrow, sent_bytes in arrows.items()))

# %% [markdown]
# ## Three that are broken
#
# Each looks right. Each gets the gradient of a device's *sum* and its own count. On one device all three are correct: that
# is why they are written. The second was in Hugging Face Transformers until October 2024, over microbatches in place of
# devices: each was divided by its own number of targets, and then the mean was taken.


# %%
def norm(tree):
    return jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(tree)))


def scaled(tree, factor):
    return jax.tree.map(lambda g: g * factor, tree)


def broken_sum(grads, count):
    return lax.psum(scaled(grads, 1 / count), "dp")


def broken_mean(grads, count):
    return lax.pmean(scaled(grads, 1 / count), "dp")


def broken_norm(grads, count):
    grads = scaled(grads, 1 / lax.psum(count, "dp"))
    return lax.psum(scaled(grads, jnp.minimum(1, 1 / norm(grads))), "dp")  # clip to a norm of 1


BROKEN = (broken_sum, broken_mean, broken_norm)


def all_three(weights, x, counted):
    own = jax.tree.map(lambda w: lax.pcast(w, "dp", to="varying"), weights)
    grads, count = jax.grad(squares)(own, x, counted), counted.sum().astype(jnp.float32)
    return [broken(grads, count) for broken in BROKEN]


clipped = scaled(want, jnp.minimum(1, 1 / norm(want)))
assert norm(want) > 1, "the clip must bite, or it hides the fault"
for broken, got, right in zip(
    BROKEN, on_mesh(all_three)(toy, x, counted), (want, want, clipped), strict=True
):
    error = distance(got, right)
    assert (error > 1e-2) == (N > 1)
    print(f"{broken.__name__}: off by {error:.0%} of the largest gradient on {N} devices")

# %% [markdown]
# A fourth fault, adding twice, cannot be written in arrows: a sum that is finished on all devices is not an unfinished one.
# The refusal comes while the program is traced, before anything is compiled.


# %%
def added_twice(weights, x, counted):
    once = par.carry_out(counted.sum(), SCALAR, "rows that count")
    return par.carry_out(once, SCALAR, "rows that count")


try:
    on_mesh(added_twice).lower(toy, x, counted)
    raise AssertionError("this should have been refused")
except ValueError as refusal:
    print(refusal)

# %% [markdown]
# ## Run: a Llama, four ways
#
# `Plan.reduce` says when gradients are added up, `Plan.microbatches` how often a device computes before that:
#
# | plan | gradients are summed |
# |---|---|
# | `reduce="end"` | after the backward pass, one all-reduce per stacked weight |
# | `reduce="layer"` | inside the backward pass, layer by layer (the *unasked* way above); in *every* backward pass |
# | `reduce="bucket"` | after it, concatenated into flat buckets |
# | `microbatches=2` | after two microbatches, whose gradients are first added on the device |
#
# The batch is uneven on purpose: a fifth of the targets are left out, and the last device has none at all, like the padding
# of an epoch's last batch. (Divided by its own count, that device's mean would be 0/0.) The reference is `Solo`, the same
# model text on one device, with the update written out.

# %%
import optax
from flax import nnx

from llmpar.exercises.lesson import as_table
from llmpar.par import Solo
from llmpar.step import State, Step
from llmpar.weights import init_params, model_graph

BATCH, SEQ, RATE, MOMENTUM, STEPS = 2 * N, 16, 0.05, 0.9, 4
RHYME = b"one device adds, and two devices add, and eight devices add what each of them had. "


def make_batch(seed):
    rng = np.random.default_rng(seed)
    start = rng.integers(0, len(RHYME), (BATCH, 1)) + np.arange(SEQ + 1)
    text = np.frombuffer(RHYME, np.uint8)[start % len(RHYME)].astype(np.int32)  # a byte is a token
    targets = np.where(rng.random((BATCH, SEQ)) < 0.2, -1, text[:, 1:]).astype(np.int32)
    targets[BATCH - 2 if N > 1 else BATCH :] = -1
    positions = np.tile(np.arange(SEQ, dtype=np.int32), (BATCH, 1))
    return {
        "tokens": text[:, :-1],
        "targets": targets,
        "positions": positions,
        "segments": np.ones_like(positions),
    }


batches = [make_batch(seed) for seed in range(STEPS)]
fresh = jax.tree.map(np.asarray, jax.jit(lambda key: init_params(config, key))(jax.random.key(0)))


@jax.jit
def solo_step(params, velocity, batch):
    def loss(params):
        count = (batch["targets"] >= 0).sum().astype(jnp.float32)
        return nnx.merge(model_graph(config), params).cross_entropies(batch, Solo(Plan()))[0].sum() / count

    value, grads = jax.value_and_grad(loss)(params)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    return value, jax.tree.map(lambda w, v: w - RATE * v, params, velocity), velocity


solo_losses, params, velocity = [], fresh, jax.tree.map(np.zeros_like, fresh)
for batch in batches:
    loss, params, velocity = solo_step(params, velocity, batch)
    solo_losses.append(float(loss))
assert solo_losses[-1] < solo_losses[0] - 0.5, "it learns"
print("one device:", " ".join(f"{loss:.3f}" for loss in solo_losses), "nats per target")

# %% [markdown]
# Four verdicts for each plan. *Value*: four steps give the losses of one device, and the momentum (all gradients so far) of
# every weight is the same. *Sharding*: every weight is whole on every device, the batch is cut. *Communication*: kinds, counts and bytes in the
# partitioned program are those of the formula. *Memory*: the bytes that a step is given, per device.

# %%
from llmpar.predict import formulas, memory, traffic


def verdicts(plan):
    """Compile a step under the plan, run it, and compare. Returns what it sends, collective by collective."""
    step = Step(config, plan, make_mesh(plan.mesh), optax.sgd(RATE, MOMENTUM), clip=None)
    lowered = step.lower(BATCH, SEQ)
    compiled = lowered.compile()
    state = State(jax.device_put(fresh, step.shardings.params), step.optimizer.init(fresh), jnp.int32(0))
    state, losses = jax.device_put(state, step.shardings), []
    for batch in batches:
        state, metrics = compiled(state, jax.device_put(batch, step.batch_sharding))
        losses.append(float(metrics["loss"]))  # read every step: a device must not run ahead of the others

    gap, drift = np.abs(np.subtract(losses, solo_losses)).max(), distance(state.optimizer, velocity)
    assert gap < 1e-4 and drift < 1e-4, (gap, drift)
    print(
        f"  value: {STEPS} losses within 1e-4 of one device, momentum of all {len(jax.tree.leaves(fresh))}"
        " weights too"
    )

    whole = all(s.data.shape == w.shape for w in jax.tree.leaves(state.params) for s in w.addressable_shards)
    assert whole and step.batch_sharding.shard_shape((BATCH, SEQ)) == (BATCH // N, SEQ)
    print(f"  sharding: every weight whole on every device, the batch cut into {N}")

    census = census_hlo(partitioned_hlo(lowered), step.mesh)
    formula = traffic.step_traffic(config, plan, BATCH, SEQ)
    found = census_table(census)
    assert found == as_table(formula)
    total = {key: sum(row[key] for row in found.values()) for key in ("count", "bytes_sent")}
    print(f"  communication: {total['count']} all-reduces, {total['bytes_sent']:,} bytes, as predicted")

    held = memory.argument_bytes(config, plan, BATCH, SEQ, moments=1, scalars=1)  # momentum
    assert compiled_memory(compiled)["argument_bytes"] == sum(held.values())
    print(f"  memory: {sum(held.values()):,} bytes per device go in, as predicted")
    final = census_table(census_hlo(compiled.as_text(), step.mesh))
    return census, formula, sum(row["count"] for row in final.values())


plans = {
    "end": Plan(f"dp={N}", zero=0),
    "layer": Plan(f"dp={N}", zero=0, reduce="layer"),
    "bucket": Plan(f"dp={N}", zero=0, reduce="bucket", bucket_bytes=128 * 1024),
    "microbatches": Plan(f"dp={N}", zero=0, microbatches=2),
}
read = {}
for name, plan in plans.items():
    print(name)
    read[name] = verdicts(plan)

# %% [markdown]
# ## Compare
#
# The bytes are those of the parameters, twice (N − 1)/N times, and one small message (the loss, the number of targets, the
# gradients' squared norm), whichever way they are packed. Accumulation sends the same per *step*, and so half per microbatch, if the sums wait for
# the last one.

# %%
small = 4 * 3  # bytes of loss, number of targets and squared norm
bound = 2 * (4 * config.num_params + small) * (N - 1) / N
rows = []
print("plan        partitioned  final program        bytes  bytes / 4-byte parameter")
for name, (census, formula, final) in read.items():
    count, size = sum(c.count for c in census), sum(c.bytes_sent for c in census)
    # A ring that does not divide rounds each message.
    assert size == formula.total_bytes and abs(size - bound) <= count
    print(f"{name:<12}{count:>11}{final:>15}{size:>13,}{size / (4 * config.num_params):>12.3f}")
    rows.append(
        {
            "axis": "dp",
            "kind": f"all-reduce, {name}",
            "count": count,
            "predicted_bytes": formula.total_bytes,
            "compiled_bytes": size,
        }
    )
counts = {name: row["count"] for name, row in zip(read, rows, strict=True)}
leaves = len(jax.tree.leaves(fresh))
if N > 1:
    stacked = len(jax.tree.leaves(fresh["blocks"]))
    assert counts["end"] == counts["microbatches"] == leaves + 1
    assert counts["layer"] == (leaves - stacked) + config.num_layers * stacked + 1
    assert 1 < counts["bucket"] < counts["end"]
    layered = read["layer"][0]
    inside = [c for c in layered if c.count == config.num_layers]
    assert len(inside) == stacked
    print(
        f"layer by layer: {len(inside)} all-reduces in the loop over {config.num_layers} layers,"
        f" {len(layered) - len(inside)} outside it"
    )
show(draw.collectives(rows))

# %% [markdown]
# A sum keeps the text of its arrow through the compiler. So the census can say which weight's gradient sends which bytes; the rows add
# up to the whole. Here for sums within the backward pass, layer by layer:

# %%
census, formula, _ = read["layer"]
print(arrow_text(census))
assert sum(row["bytes_sent"] for row in arrow_rows(census)) == formula.total_bytes

# %% [markdown]
# `partitioned` counts what we asked for. The final program may merge: XLA's combiner joins all-reduces that nothing keeps
# apart, which is its own way of making buckets. Those inside the loop over layers stay there, once per layer.
#
# Sums inside the backward pass cannot wait: each microbatch has a backward pass of its own. Here is what that would send.
# The package refuses to run it.

# %%
print("microbatches   end         layer, if it ran")
for u in (1, 2, 4):
    at_end, by_layer = (Plan(f"dp={N}", zero=0, reduce=when, microbatches=u) for when in ("end", "layer"))
    sent_at_end, sent_by_layer = (
        traffic.step_traffic(config, plan, BATCH * u, SEQ).total_bytes for plan in (at_end, by_layer)
    )
    assert sent_at_end == read["end"][1].total_bytes
    # The small message is sent once.
    assert sent_by_layer == u * sent_at_end - (u - 1) * int(formulas.sent_bytes("all-reduce", small, N))
    print(f"{u:>12}   {sent_at_end:<9,}   {sent_by_layer:,} bytes per step")
try:
    by_layer.check(config, BATCH * u, SEQ)
    raise AssertionError("this should have been refused")
except ValueError as refusal:
    print(refusal)

# %% [markdown]
# ## When can they talk?
#
# The gradient of the last layer is ready first. Sending it while the layers below are still being differentiated hides the
# communication, if there is as much to compute as to send. A backward pass costs 4 FLOPs per parameter and token, an
# all-reduce moves 4 bytes per parameter in bfloat16 (2 bytes, twice), so for a chip with C FLOP/s and links of β bytes/s:
#
# $$ \frac{4\,\Psi\,T}{C} \ge \frac{4\,\Psi}{\beta} \quad\Longleftrightarrow\quad T \ge \frac{C}{\beta} $$
#
# The size of the model drops out. T is tokens **per device and backward pass**, and the thresholds are properties of the
# hardware (Austin et al. 2025). In all lessons a *threshold* takes published rates (450 GB/s of an H100's NVLink; for a TPU
# v5p the book's 90 GB/s per link and direction), and a *time* takes what large messages reach (370 GB/s on H100):

# %%
# NBVAL_CHECK_OUTPUT
from llmpar.predict.hardware import chip

h100, v5p = chip("h100"), chip("v5p")
axis = 2 * 90e9  # both directions of a ring, at the book's rate
assert axis == v5p.axis_bytes_per_s * v5p.link_efficiency
thresholds = {
    "H100, inside a node of 8": (h100, h100.link_bytes_per_s, 2200),
    "H100, across nodes": (h100, h100.node_size * h100.dcn_bytes_per_s, 2475),
    "TPU v5p, three axes": (v5p, 3 * axis, 850),
    "TPU v5p, one axis": (v5p, axis, 2550),
}
for where, (device, rate, published) in thresholds.items():
    tokens = formulas.dp_min_tokens(device.flops_per_s, rate)
    assert abs(tokens / published - 1) < 1e-3
    print(f"{where:<26}{rate / 1e9:4.0f} GB/s: {tokens:5.0f} tokens per device (published {published})")

# %% [markdown]
# Across nodes each device exchanges an eighth of the gradients over its own port, so together a node's 8 ports count.
# Gradients reduced in float32, as this package does, double the bytes and every threshold; a program that reaches only half
# of C halves them.
#
# The timeline below is computed, not measured (simulated devices have no links): Llama 3 8B on 8 H100, the backward pass in
# pieces of four layers (`28+` is layers 28 to 31), each sent as one bucket. Computing at the peak rate, links as reached.


# %%
def end(compute_s, comm_s):
    """When the last bucket has arrived, if each is sent as soon as it is complete and the links are free."""
    computed = sent = 0.0
    for compute, comm in zip(compute_s, comm_s, strict=True):
        computed += compute
        sent = max(computed, sent) + comm
    return sent


llama = preset("llama3-8b")
layer = sum(
    np.prod(weight.shape) // weight.shape[0]
    for path, weight in llama.weights().items()
    if path.startswith("blocks.")
)
pieces, per_piece = 8, 4 * int(layer)
comm_s = [formulas.collective_seconds(h100, "all-reduce", 2 * per_piece, 8)] * pieces
print("tokens per device   computing   with communication   communication waited for")
for tokens in (512, 1024, 2048, 4096, 8192):
    compute_s = [4 * per_piece * tokens / h100.flops_per_s] * pieces
    total = end(compute_s, comm_s)
    waited = total - sum(compute_s)
    assert waited >= comm_s[-1] * (1 - 1e-9), "the last bucket has nothing left to hide behind"
    print(f"{tokens:>17}{1e3 * sum(compute_s):>9.1f} ms{1e3 * total:>18.1f} ms{waited / sum(comm_s):>19.0%}")

compute_s = [4 * per_piece * 4096 / h100.flops_per_s] * pieces
timeline = draw.overlap(compute_s, comm_s, [f"{4 * i}+" for i in reversed(range(pieces))], axis="dp")
assert f"side by side: {time_text(end(compute_s, comm_s))}" in timeline.text
show(timeline)

print("\nmicrobatches   waited for   of the step's backward passes")
for u in (1, 2, 4):
    earlier = compute_s * (u - 1)  # their gradients are not final: there is nothing to send yet
    waited = end(earlier + compute_s, [0.0] * len(earlier) + comm_s) - u * sum(compute_s)
    assert np.isclose(waited, end(compute_s, comm_s) - sum(compute_s))
    print(f"{u:>12}   {time_text(waited):>10}   {waited / (u * sum(compute_s)):.1%}")

# %% [markdown]
# Above the threshold only the last bucket is waited for (an eighth here): it is complete when the backward pass ends. Smaller
# buckets shorten that wait, until their number costs more than it saves, because every all-reduce also has a latency.
# Accumulation does *not* move the threshold: a gradient is final only in the last microbatch's backward pass, so only the tokens
# of that one hide it. It is the wait's *share* of the step that becomes `u` times smaller. And in this package `end` and
# `bucket` send after the backward pass and hide nothing: what is hidden here is `layer`, with one microbatch.
#
# More replicas mean more tokens per step, and that is not free either: beyond the *critical batch* more tokens make a
# step's gradient hardly better (McCandlish et al. 2018). That limit is about learning and is not computed here.
#
# ## Exercise, core: repair the three
#
# Two cures are enough for the three broken ones above. Both functions get a device's gradient of its *sum* (one array) and
# its own count (a float), and return what every device uses: first the mean over all targets, then the same clipped to a
# norm of 1. `lax.psum(x, "dp")` adds over the devices.


# %%
def gradient(grad_sum, count): ...  # cures broken_sum and broken_mean


def clipped(grad_sum, count): ...  # cures broken_norm


attempt("03.repair", {"gradient": gradient, "clipped": clipped})

# %% [markdown]
# ## Exercise, stretch: choose the bucket
#
# Another cluster: the backward pass of 32 equal layers takes 80 ms, all gradients in one all-reduce 60 ms, and each
# all-reduce costs 1 ms of latency on top. Of 1, 2, 4, 8, 16 or 32 layers per bucket, with which is the step over soonest?
# Use `end`.

# %%
layers_per_bucket = ...

attempt("03.bucket", layers_per_bucket)

# %% [markdown]
# ## Exercise, expert: the last batch
#
# An epoch ends with a batch whose rows do not divide by the number of devices. Write a function that returns targets
# (`[rows, positions]`, NumPy, -1: not counted) with enough rows added, so that the mean over all targets stays what it was.


# %%
def pad(targets, devices): ...


attempt("03.pad", pad)

# %% [markdown]
# ## Five lines
#
# 1. Replicas agree on gradients: one arrow, `+dp -> whole`, per weight.
# 2. The mean is the sum of sums over the sum of counts; a mean of means, a sum of means and a local norm are wrong.
# 3. Bytes are twice the gradients' times (N − 1)/N, however they are packed: end, layer, bucket.
# 4. Accumulating microbatches sends the same once, for more tokens, if the sums wait for the last one; layer by layer they do not.
# 5. It hides behind *one* backward pass of at least C/β tokens per device; the last bucket never does.
#
# ## Where XLA's partitioner differs
#
# Under `jax.jit` with the batch cut and the weights whole, no collective is written: the partitioner finds out that the
# gradients are unfinished sums. It gives the same numbers. When it sums and what it merges is its choice; to hold it to a
# bucket size or to the end of an accumulation, the sums must be written, as above.

# %%
from llmpar.mesh import sharding
from llmpar.notation import parse_layout

cut, uncut = sharding(mesh, parse_layout("b/dp")), sharding(mesh, parse_layout("whole"))
auto = jax.jit(one_device, in_shardings=(uncut, cut, cut), out_shardings=uncut)
auto_loss, auto_grads = auto(toy, x, counted)
assert (
    abs(float(auto_loss) - float(want_loss)) < 1e-5 * float(want_loss) and distance(auto_grads, want) < 1e-5
)
lowered = auto.lower(toy, x, counted)
asked = census_hlo(partitioned_hlo(lowered), mesh)
final = census_hlo(lowered.compile().as_text(), mesh)
print(
    f"by hand:     {sum(row['count'] for row in sent['by hand'].values())} all-reduces,"
    f" {sum(arrows.values())} bytes"
)
print(
    f"partitioner: {len(asked)} {', '.join(sorted({c.kind for c in asked}))},"
    f" {sum(c.bytes_sent for c in asked)} bytes"
)
print(
    f"final:       {len(final)} {', '.join(sorted({c.kind for c in final}))},"
    f" {sum(c.bytes_sent for c in final)} bytes"
)

# %% [markdown]
# ## On your cluster
#
# ```
# llmpar train --mesh dp=-1 --batch-size 32 --microbatches 2      replicas on every device, gradients summed once per step
# llmpar train --mesh dp=-1 --reduce layer                      layer by layer, behind the backward pass
# llmpar inspect --mesh dp=-1 --zero 0 --reduce bucket          count the all-reduces and their bytes, with source lines
# llmpar inspect --mesh dp=-1 --reading auto                    what the partitioner does instead
# ```
#
# **One number to remember: 2.** Data parallelism sends two bytes per byte of gradient and step, on any number of devices.

# %%
print(f"2 x (N - 1) / N = {2 * (N - 1) / N:g} for N = {N}, below 2 for any N")
