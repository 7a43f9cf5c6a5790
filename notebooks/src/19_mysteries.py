# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 15
#     needs: ["03", "04"]
#     question: The loss falls, but something is wrong. How do you find the fault?
#     objectives:
#     - Recognise three silent failures (five with *Further*) by what they change, and by
#       what they do not change.
#     - Use a clue to tell two suspects apart.
#     - Prove a cure by running it.
# ---

# %% [markdown]
# # 19 · Mysteries: the loss falls, and something is wrong
#
# A gradient norm grows with `tp`: 28.8 on one device, 54.6 on eight. The model, the batch and the loss are the same, but clipping begins
# earlier. What is wrong? This is the first of five real failures of recent years, all without an error: three here, two in *Further*.

# %% tags=["plumbing"]
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # simulated devices; real ones: On your cluster

from llmpar.parallel.mesh import use_devices

devices = use_devices()

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from llmpar import check, draw, look
from llmpar.draw.scene import show
from llmpar.lessons import attempt, find, hint, met, opened, say, solution
from llmpar.parallel.mesh import make_mesh, sharding
from llmpar.plan.layout import parse_layout

rng = np.random.default_rng(0)


def draws(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def on(mesh, f, given, gives):
    """A program of the ranks of a mesh, without JAX's check of layouts, as published
    code often is."""
    axis, size = mesh.split("=")
    line = jax.make_mesh(
        (int(size),), (axis,), (AxisType.Auto,), devices=devices[: int(size)]
    )
    mapped = jax.shard_map(
        f, mesh=line, in_specs=given, out_specs=gives, check_vma=False
    )
    mapped.__name__ = f.__name__
    return mapped


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def finding(checked):
    """What `llmpar.check` says, without the line numbers of this notebook."""
    return f"check: {checked.findings[0]['sentence']}"


def code(f):
    return inspect.getsource(f).rstrip()


# %%
def norm(weight, bias):
    squares = jnp.sum(weight**2) + jnp.sum(bias**2)
    return jnp.sqrt(lax.psum(squares, "tp"))


# %% tags=["plumbing"]
GIVEN = (P(None, "tp"), P())
weight, bias = draws(16, 32), 3 * draws(32)
right = float(np.sqrt((weight**2).sum() + (bias**2).sum()))
norms = [
    float(jax.jit(on(f"tp={n}", norm, GIVEN, P()))(weight, bias)) for n in (1, 2, 4, 8)
]
assert np.isclose(norms[0], right, rtol=1e-5) and norms == sorted(norms)
assert f"{norms[0]:.1f}, {norms[-1]:.1f}" == "28.8, 54.6"
lines = [("the log says", norms, "measured", "o", False)]
lines += [("one device", [right] * 4, "soft", None, True)]
axes = dict(x="tp", y="gradient norm", title="The same gradient on more ranks")
show(draw.curves(lines, [1, 2, 4, 8], **axes))

# %% [markdown]
# `weight` and `bias` are gradients; that of the weight is cut over `tp`. There are six suspects:
#
# | suspect | what it does |
# |---|---|
# | missing sum | one rank's partial sum is used as the whole sum |
# | counted twice | a sum over ranks counts a value once for each rank, but all ranks hold the same value |
# | mean of means | each rank divides by its own count, and then a mean is taken |
# | same key | each rank draws the same random numbers |
# | positions | each rank counts its positions from 0 |
# | copies | each rank holds all of a value |
#
# The rules: read the program, then name a suspect. Your first guess is noted, and opens the clues and the cure. Each clue has a price, a
# look, a line or a run: on a real cluster you would need it to get the clue. To guess again, change the line `suspect = …` above the clues,
# and run its cell again. (The stored copy shows all clues.)
#
# ## 1. The gradient norm that grows with tp

# %%
suspect = ...  # one of the six, such as "same key"
attempt("19.norm", suspect)

# %% [markdown]
# Two clues. One costs a second look at the program. The other costs one run: `llmpar.check` runs a program on its mesh and on one device,
# and names the first value that differs.

# %%
checked = check(on("tp=8", norm, GIVEN, P()), None, shape(16, 32), shape(32))
if opened("19.norm"):
    say("look: each rank has its own columns of weight, and all of bias")
    say(finding(checked))


# %% tags=["plumbing"]
def cured_norm(weight, bias):
    squares = lax.psum(jnp.sum(weight**2), "tp") + jnp.sum(bias**2)
    return jnp.sqrt(squares)


if opened("19.norm"):
    print(code(cured_norm))
assert not checked and checked.findings[0]["kind"] == "counted"
cured = float(jax.jit(on("tp=8", cured_norm, GIVEN, P()))(weight, bias))
assert np.isclose(cured, right, rtol=1e-5)
met("19.norm", "counted twice", "it was")
print(f"norm on tp=8: {norms[-1]:.2f}, cured {cured:.2f}, on one device {right:.2f}")

# %% [markdown]
# ## 2. More devices, but not less noise
#
# Dropout sets half of the numbers to 0, at random, and divides by the share that is kept. So the mean of a column over all rows is noisy. With eight
# times as many rows this noise should be √8 = 2.8 times smaller. But it does not get smaller. The rows are cut over `dp`:


# %%
def dropped(x):
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return x * kept / lax.pmean(kept.mean(), "dp")


# %% tags=["plumbing"]
def noise(f, ranks):
    """The spread of the mean over all rows of ones, four rows on each rank."""
    ones = np.ones((4 * ranks, 512), np.float32)
    return float(
        np.std(
            np.asarray(jax.jit(on(f"dp={ranks}", f, P("dp"), P("dp")))(ones)).mean(0)
        )
    )


found = [noise(dropped, n) for n in (1, 2, 4, 8)]
want = [found[0] / n**0.5 for n in (1, 2, 4, 8)]
assert np.allclose(found, found[0])
lines = [("measured", found, "measured", "o", False)]
lines += [("expected", want, "soft", None, True)]
axes = dict(x="devices, four rows on each", y="noise of the mean", title="Dropout")
show(draw.curves(lines, [1, 2, 4, 8], **axes))

# %%
suspect = ...  # one of the six
attempt("19.noise", suspect)

# %% [markdown]
# A clue (cost: one run): look at the numbers themselves. The coloured ones were kept:

# %% tags=["plumbing"]
ones = np.ones((16, 6), np.float32)
kept = np.asarray(jax.jit(on("dp=4", dropped, P("dp"), P("dp")))(ones)) > 0
assert all((kept[:4] == kept[4 * r : 4 * r + 4]).all() for r in range(4))
coloured = lambda row: [("", "weights" if on_ else "cell") for on_ in row]
table = []
for left in (0, 8):  # two ranks beside each other
    for i in range(left, left + 4):
        name = f"ranks {i // 4} and {i // 4 + 1}" if i == left else ""
        table.append((name, [*coloured(kept[i]), ("", ""), *coloured(kept[i + 4])]))
    table.append(("", []))
table.pop()
if opened("19.noise"):
    show(draw.table(table, title="Which numbers four ranks keep"))


# %% tags=["plumbing"]
def cured_dropped(x):
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index("dp"))
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return x * kept / lax.pmean(kept.mean(), "dp")


if opened("19.noise"):
    print(code(cured_dropped))
wrong = check(on("dp=2", dropped, P("dp"), P("dp")), None, shape(8, 8))
assert not wrong and wrong.findings[0]["kind"] == "same random key"
after = noise(cured_dropped, 8)
assert 0.8 < after / want[-1] < 1.25
met("19.noise", "same key", "it was")
if opened("19.noise"):
    say(finding(wrong))
print(
    f"noise on 8 devices: {found[-1]:.2f}, cured {after:.2f}, expected {want[-1]:.2f}"
)

# %% [markdown]
# ## 3. ZeRO-1 that saves nothing
#
# A team turns on ZeRO-1 on eight devices. The run is right, to the last digit. But each device needs as much memory as before. (ZeRO-1
# leaves the weights whole, and cuts the moments.) Read how the state is made:

# %%
mesh = make_mesh("fsdp=8")
whole, cut = (sharding(mesh, parse_layout(text)) for text in ("d m", "d/fsdp m"))
weights = {"w": jax.device_put(draws(512, 64), whole)}
optimizer = optax.adam(1e-3)
state = optimizer.init(weights)  # Adam's moments

# %%
suspect = ...  # one of the six
attempt("19.memory", suspect)

# %% [markdown]
# A clue (cost: one line): how many bytes of moments has each device? (`check` has no clue here: all values are right.)


# %% tags=["plumbing"]
def held(state):
    """Bytes of the moments on each device."""
    leaves = [x for x in jax.tree.leaves(state) if x.ndim]
    sizes = dict.fromkeys(devices, 0)
    for shard in (shard for x in leaves for shard in x.addressable_shards):
        sizes[shard.device] += shard.data.nbytes
    return list(sizes.values())


def init_cut():
    """The state, cut as ZeRO-1 cuts it; the step's number cannot be cut."""
    shapes = jax.eval_shape(optimizer.init, weights)
    places = jax.tree.map(
        lambda x: cut if x.ndim else sharding(mesh, parse_layout("")), shapes
    )
    return jax.jit(optimizer.init, out_shardings=places)(weights)


cured_state = init_cut()
before, after = held(state), held(cured_state)
assert before == [2 * 4 * 512 * 64] * 8 and after == [2 * 4 * 64 * 64] * 8
bars = [("as it was", {"moments": before[0]}), ("cured", {"moments": after[0]})]
if opened("19.memory"):
    show(draw.memory_bars(bars, title="Adam's moments on each of eight devices"))
under_jit = held(jax.jit(optimizer.init)(weights))
assert under_jit == [before[0]] + [0] * 7  # all of it on the first device
assert held(jax.jit(optimizer.init)(jax.device_put(weights, cut))) == under_jit
first = cured_state[0].mu["w"].addressable_shards[0].data
assert first.shape == (64, 64)
both = zip(jax.tree.leaves(state), jax.tree.leaves(cured_state), strict=True)
assert all(np.array_equal(a, b) for a, b in both)
met("19.memory", "copies", "it was")
if opened("19.memory"):
    say(f"why: {find('19.memory').says['because']}")
    say("cure: jax.jit(optimizer.init, out_shardings=…) says where each moment is")

# %% [markdown]
# (In *Further*: where these three were found, and what else they did.)
#
# ## Keep: a falling loss proves little
#
# 1. Wrong values and wasted memory need different clues: `check`, and bytes on a device. (For wasted messages: `look`, lesson 13.)
# 2. Ask about each sum over ranks: does each rank add a different value? If not, the sum counts copies.
# 3. Ask about each random number: should it be the same on all ranks of this axis, or different?
# 4. Ask about each array: which line says that it is cut?
# 5. A cure is proved when the program is run again and the numbers agree.

# %% [markdown]
# ## Further
#
# What is public about the first three, and two more cases.
#
# ### In public
#
# 1. The norm: NVIDIA-NeMo/RL, pull request 3788, 2026, proposed; ROCm/TransformerEngine, pull request 715, 2026: 12.2 in place of 9.0 at tp=8.
#    The loss of that step is right. But the gradient is clipped more, so the *next* weights differ.
# 2. The noise: huggingface/transformers, issue 31412, 2024. A key fixes the random numbers; `fold_in` makes a new key of a key and a number.
#    Along `tp`, where activations are copies, the ranks must draw the *same* numbers.
# 3. The memory: marin-community/marin, issue 7987, 2026: 5.8 GiB of moments, whole on each GPU. `jit` alone is no cure. Inside it
#    `zeros_like` depends on no input, so it takes no layout from the weights: *all* moments are put on one device, even if the weights are
#    cut (jax-ml/jax, issue 26040, open).
#
# ### 4. The first loss is 11.4 in place of 2
#
# A trained model is trained further, so its loss should begin near 2. It begins at 11.4, as if it had learned nothing. Its long sequences
# are cut into parts. Each rank has its part of the positions, and rotates queries and keys by position:


# %%
def rotated(x):  # s/sp d
    at = jnp.arange(x.shape[0])[:, None]
    return x * jnp.cos(at * 0.1) + jnp.roll(x, 1, 1) * jnp.sin(at * 0.1)


# %%
suspect = ...  # one of the six
attempt("19.rotation", suspect)


# %% tags=["plumbing"]
def cured_rotated(x):
    first = lax.axis_index("sp") * x.shape[0]
    at = (first + jnp.arange(x.shape[0]))[:, None]
    return x * jnp.cos(at * 0.1) + jnp.roll(x, 1, 1) * jnp.sin(at * 0.1)


# %% tags=["plumbing"]
wrong = check(on("sp=2", rotated, P("sp"), P("sp")), None, shape(8, 8))
assert not wrong and wrong.findings[0]["kind"] == "positions without offset"
x = draws(16, 8)
right = rotated(jnp.asarray(x))  # one device has all positions
cured = jax.jit(on("sp=4", cured_rotated, P("sp"), P("sp")))(x)
assert np.allclose(cured, right, atol=1e-5)
met("19.rotation", "positions", "it was")
if opened("19.rotation"):
    say("look: the first row of rank 1 has at = 0; on one device it has 4")
    say(finding(wrong))
    print(code(cured_rotated))

# %% [markdown]
# (thunlp/Seq1F1B, issue 6, 2025: there the parts come one after another; NVIDIA/Megatron-LM, pull request 5243, 2026, where with packed documents a rank took the positions 0, 3, 0, 3 in
# place of 0, 3, 4, 7.)
#
# ### 5. The same answers, another loss
#
# A model is tuned on answers of different lengths. The same answers give another gradient if the batch is split into parts.
# `counted` is 1 for each token that counts:


# %%
def loss(x, w, counted):  # rows of a rank
    errors = ((x @ w) ** 2).sum(1) * counted
    return lax.pmean(errors.sum() / counted.sum(), "dp")


# %%
suspect = ...  # one of the six
attempt("19.lengths", suspect)


# %% tags=["plumbing"]
def cured_loss(x, w, counted):
    errors = ((x @ w) ** 2).sum(1) * counted
    return lax.psum(errors.sum(), "dp") / lax.psum(counted.sum(), "dp")


# %% tags=["plumbing"]
PLACES = P("dp"), P(), P("dp")
x, w = draws(32, 8), draws(8, 4)
counted = (np.arange(32) % 4 <= np.arange(32) // 4 % 4).astype(np.float32)
wrong = check(on("dp=2", loss, PLACES, P()), None, x, w, counted)
assert not wrong and wrong.findings[0]["kind"] == "mean of means"
assert list(counted.reshape(8, 4).sum(1)[[0, 3]]) == [1, 4]
right = ((((x @ w) ** 2).sum(1) * counted).sum() / counted.sum()).item()
cured = float(jax.jit(on("dp=8", cured_loss, PLACES, P()))(x, w, counted))
assert np.isclose(cured, right, rtol=1e-5)
met("19.lengths", "mean of means", "it was")
if opened("19.lengths"):
    say("look: on dp=8 rank 0 divides by 1, and rank 3 by 4")
    say(finding(wrong))
    print(code(cured_loss))
seen = look(on("dp=8", cured_loss, PLACES, P()), x, w, counted)
assert {row["collective"] for row in seen.rows} == {"all-reduce"}

# %% [markdown]
# (huggingface/transformers, issue 24725, 2023, and pull request 34191, 2024, with microbatches in place of ranks; ml-explore/mlx-lm, pull request
# 1413, 2026. [Lesson 03](03_data_parallelism.ipynb) has the arithmetic.)
#
# ### On your cluster
#
# ```
# llmpar check my_code:program my_code:reference       the first value that one device has differently
# llmpar inspect --mesh "fsdp=8" --zero 1              what a step holds and sends
# ```
