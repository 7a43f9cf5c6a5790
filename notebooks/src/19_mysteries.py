# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 15
#     needs: ["03", "04"]
#     question: The loss falls, but something is wrong. How do you find the fault?
#     objectives:
#     - Recognise three silent failures (six with *Further*) by what they change, and by
#       what they do not change.
#     - Use a clue to tell two suspects apart.
#     - Prove a cure by running it.
# ---

# %% [markdown]
# # 19 · Mysteries: the loss falls, and something is wrong
#
# A gradient norm grows with `tp`: 28.8 on one device, 54.6 on eight. Model, batch and loss are the same, and there is no error. What is wrong?
# Six failures of recent years, three here and three in *Further*. They are public; these programs and numbers are small models of them.

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
from llmpar.lessons import (
    FIRST_ANSWERS,
    HINTS_GIVEN,
    attempt,
    find,
    first_answer,
    hint,
    opened,
    say,
    solution,
)
from llmpar.parallel.mesh import make_mesh, sharding
from llmpar.plan.layout import parse_layout

rng = np.random.default_rng(0)
RANKS = (1, 2, 4, 8)
GUESSES = {}  # of each mystery: the guess that was given after so many clues


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


def run(mesh, f, given, gives, *arrays):
    return np.asarray(jax.jit(on(mesh, f, given, gives))(*arrays))


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def guess(mystery, number, suspect, buy):
    """Note a guess, the first or the second. With `buy` the clue of that number is
    bought, and the guess stays."""
    given = GUESSES.setdefault(mystery, {"bought": 0})
    if number <= given["bought"] or mystery in FIRST_ANSWERS:
        if number in given:
            say(f"{mystery}, guess {number}: {given[number]}, and it stays")
        return
    if suspect is not ...:
        given[number] = str(suspect)
        say(f"{mystery}, guess {number}: {suspect}")
    if buy is True and given["bought"] + 1 == number in given:
        given["bought"] = number
        say(f"clue {number} is bought, for one point: run the cell below it")
    elif buy is True:
        say(f"clue {number} is not bought: it needs guess {number} and the clue before")


def clue(mystery, number):
    """Tell whether a clue may be shown: if it is bought. After the last word, or with
    LLMPAR_OPEN=1, all clues are free."""
    bought = GUESSES.get(mystery, {}).get("bought", 0)
    if number <= bought or os.environ.get("LLMPAR_OPEN") or first_answer(mystery):
        return True
    say(f"shut: guess above, and set `buy = True` there, if you want clue {number}")
    return False


def points(mystery):
    """Say what the last word is worth, if it was given since the kernel's start. The
    first one counts, so a wrong one ends it."""
    if mystery in FIRST_ANSWERS:
        last = first_answer(mystery)
        given = dict(GUESSES.get(mystery, {}))
        left = max(0, 3 - given.pop("bought", 0) - HINTS_GIVEN[mystery])
        left *= find(mystery).judge(last).startswith("correct")
        way = ", ".join([*given.values(), last])
        say(f"{mystery}: {left} of 3 points; you said {way}")


def code(f):
    return inspect.getsource(f).rstrip()


def unmask(mystery, f, at, result):
    """Say who it was and why, and show the cured line with what it gave."""
    if opened(mystery):
        points(mystery)
        asked = find(mystery)
        if not asked.judge(first_answer(mystery) or "").startswith("correct"):
            say(f"It was {asked.solution}. {asked.says['because']}")
        print(f"{code(f).splitlines()[at]}  # {result}")


def place(f, checked):
    """The line of a program that `llmpar.check` names, counted from its `def`."""
    line = int(checked.findings[0]["line"].rpartition(":")[2])
    return line - f.__code__.co_firstlineno


def program(f, at=None):
    """Print a program, with an arrow at a line."""
    for i, row in enumerate(code(f).splitlines()):
        print(f"{'->' if i == at else '  '} {row}")


# %% tags=["plumbing"]
log = [28.8, 33.7, 41.9, 54.6]
lines = [("the log says", log, "measured", "o", False)]
lines += [("one device", [log[0]] * 4, "soft", None, True)]
axes = dict(
    x="tp", y="gradient norm", title="The same gradient on more ranks", wide=360
)
show(draw.curves(lines, RANKS, **axes))

# %% [markdown]
# There are eight suspects, for all six mysteries. One may be guilty of several, or of none.
#
# | suspect | what happens |
# |---|---|
# | A | A collective runs over one axis, and should run over another. |
# | B | Ranks hold the terms of a sum, and nobody adds them up. |
# | C | A value that is complete is summed over ranks once more. |
# | D | Ranks compute the same value, and each should compute its own. |
# | E | Ranks draw or choose different values, and all should take the same. |
# | F | An array stays whole, since no line says that it is cut. |
# | G | An array is cut at first, and a later line gathers it. |
# | H | Ranks take means over unequal counts, and these are averaged. |
#
# Name the cause, not what follows from it. A mystery begins with three points:
#
# 1. Write a guess, and run its cell. If you want clue 1, write `buy = True`, and run that cell again, then the folded one below. This costs a point.
# 2. Guess again with what you know. Clue 2 is bought in the same way. A guess that bought a clue stays.
# 3. When you are sure, with or without clues, give your last word with `attempt`: it opens the cure. (A `hint` costs a point, too.)
#
# (A stored copy, as on GitHub, shows all clues and cures. In a running one they are shut, unless you set `os.environ["LLMPAR_OPEN"] = "1"`.)
#
# ## 1. The gradient norm that grows with tp
#
# The model has one weight and one bias, and the norm is that of both gradients.

# %%
suspect = ...  # a letter, A to H
buy = False  # True buys clue 1, for a point
guess("19.norm", 1, suspect, buy)

# %% [markdown]
# **Clue 1: an experiment.** Two more runs: in one of them the gradient of the bias is set to 0, in the other one that of the weight.


# %% tags=["plumbing"]
def norm(weight, bias):
    squares = lax.psum(jnp.sum(weight**2) + jnp.sum(bias**2), "tp")
    return jnp.sqrt(squares)


GIVEN = (P(None, "tp"), P())
weight, bias = draws(16, 32), 3 * draws(32)
right = float(np.sqrt((weight**2).sum() + (bias**2).sum()))
on_ranks = lambda f, w, b: [float(run(f"tp={n}", f, GIVEN, P(), w, b)) for n in RANKS]
assert np.allclose(on_ranks(norm, weight, bias), log, atol=0.05)
alone = on_ranks(norm, weight, 0 * bias), on_ranks(norm, 0 * weight, bias)
assert np.allclose(alone[0], alone[0][0], rtol=1e-5)
lines = [("weight alone", alone[0], "soft", "o", False)]
lines += [("bias alone", alone[1], "measured", "s", False)]
axes = dict(
    x="tp", y="gradient norm", title="Each of the two gradients alone", wide=360
)
if clue("19.norm", 1):
    show(draw.curves(lines, RANKS, **axes))

# %%
suspect = ...  # again, with what you know now
buy = False  # True buys clue 2, for a point
guess("19.norm", 2, suspect, buy)

# %% [markdown]
# **Clue 2: `llmpar.check`.** It runs a program on its mesh and on one device, and marks the line where the first value differs.

# %% tags=["plumbing"]
checked = check(on("tp=8", norm, GIVEN, P()), None, shape(16, 32), shape(32))
assert not checked and checked.findings[0]["kind"] == "counted"
assert place(norm, checked) == 1
if clue("19.norm", 2):
    program(norm, place(norm, checked))

# %%
suspect = ...  # your last word
attempt("19.norm", suspect)


# %% tags=["plumbing"]
def cured_norm(weight, bias):
    squares = lax.psum(jnp.sum(weight**2), "tp") + jnp.sum(bias**2)
    return jnp.sqrt(squares)


cured = on_ranks(cured_norm, weight, bias)
assert np.allclose(cured, right, rtol=1e-5)
unmask("19.norm", cured_norm, 1, f"{cured[-1]:.1f} on tp=8")

# %% [markdown]
# ## 2. Copies that drift apart
#
# A layer of experts has a router. Each of the four ranks of `tp`, the only axis, holds a copy of the router's weight, and all have the same tokens.
# After the first step the copies are not equal any more. The loss falls.

# %% tags=["plumbing"]
apart = [0.0, 0.063, 0.115, 0.163, 0.223, 0.284]
lines = [("largest difference", apart, "measured", "o", False)]
lines += [("wanted", [0.0] * 6, "soft", None, True)]
axes = dict(
    x="steps",
    y="between two copies",
    title="The router's weight on four ranks",
    wide=360,
)
show(draw.curves(lines, range(6), **axes))

# %%
suspect = ...  # a letter, A to H
buy = False  # True buys clue 1, for a point
guess("19.router", 1, suspect, buy)

# %% [markdown]
# **Clue 1: the numbers.** One number of the router, in the first step: its value, and its gradient on each rank.


# %% tags=["plumbing"]
def step(router, experts, own, x, y):
    outputs = lambda r: jax.nn.softmax(x @ r) @ own @ experts  # of my experts
    mine, back = jax.vjp(outputs, router)
    error = lax.psum(mine, "tp") - y
    return router - 0.01 * back(error)[0]


LAID = P(), P("tp"), P(None, "tp"), P(), P()
router, data = draws(6, 8), (draws(8, 5), np.eye(8, dtype=np.float32))
data += draws(16, 6), draws(16, 5)


def steps(f, ranks):
    """The router's copies after each step."""
    of_a_rank = lambda copies, *more: f(copies[0], *more)[None]
    held, given = [np.stack([router] * ranks)], (P("tp"), *LAID[1:])
    for _ in range(5):
        held += [run(f"tp={ranks}", of_a_rank, given, P("tp"), held[-1], *data)]
    return held


held, one = steps(step, 4), steps(step, 1)
assert np.allclose([np.ptp(copies, 0).max() for copies in held], apart, atol=0.001)
experts, mine, x, y = (np.split(data[0], 4), np.split(data[1], 4, 1), *data[2:])
parts = [
    [
        jax.nn.softmax(x @ r) @ m @ e
        for r, m, e in zip(copies, mine, experts, strict=True)
    ]
    for copies in held
]
losses = [float(((sum(part) - y) ** 2).mean()) for part in parts]
assert losses == sorted(losses, reverse=True)  # it falls
slopes = [(copies[0] - copies[1])[:, 0, 3] / 0.01 for copies in (held, one)]
assert np.isclose(slopes[0].sum(), slopes[1][0], rtol=1e-3)
assert np.isclose(slopes[0].round(2).sum(), slopes[1][0], atol=0.0051)  # as shown
table = [
    (f"rank {i}", [(f"{router[0, 3]:.2f}", "weights"), (f"{slope:+.2f}", "gradients")])
    for i, slope in enumerate(slopes[0])
]
if clue("19.router", 1):
    show(draw.table(table, ("value", "gradient"), "One number of the router's weight"))

# %%
suspect = ...  # again, with what you know now
buy = False  # True buys clue 2, for a point
guess("19.router", 2, suspect, buy)

# %% [markdown]
# **Clue 2: `llmpar.check`.** Where does the first value differ from one device?

# %% tags=["plumbing"]
shapes = [shape(*array.shape) for array in (router, *data)]
checked = check(on("tp=4", step, LAID, P()), None, *shapes)
assert not checked and checked.findings[0]["kind"] == "missing sum"
assert place(step, checked) == 4
if clue("19.router", 2):
    program(step, place(step, checked))

# %%
suspect = ...  # your last word
attempt("19.router", suspect)


# %% tags=["plumbing"]
def cured_step(router, experts, own, x, y):
    outputs = lambda r: jax.nn.softmax(x @ r) @ own @ experts
    mine, back = jax.vjp(outputs, router)
    error = lax.psum(mine, "tp") - y
    return router - 0.01 * lax.psum(back(error)[0], "tp")


cured = steps(cured_step, 4)
assert np.ptp(cured[-1], 0).max() == 0 and np.allclose(cured[-1], one[-1], atol=1e-5)
unmask("19.router", cured_step, -1, f"{slopes[1][0]:+.2f} on each")

# %% [markdown]
# ## 3. ZeRO-1 that saves nothing
#
# A team turns on ZeRO-1, by which each of eight devices keeps an eighth of Adam's moments. The option is accepted, and all values are right, to
# the last digit. But a device needs as much memory as before: 384 KiB for weights and moments, where 160 are expected.

# %%
suspect = ...  # a letter, A to H
buy = False  # True buys clue 1, for a point
guess("19.memory", 1, suspect, buy)

# %% [markdown]
# **Clue 1: bytes.** How large are the moments on a device, and since when?

# %% tags=["plumbing"]
mesh = make_mesh("fsdp=8")
whole, cut = (sharding(mesh, parse_layout(text)) for text in ("d m", "d/fsdp m"))
weights = {"w": jax.device_put(draws(512, 64), whole)}
optimizer = optax.adam(1e-3)


def update(weights, state, grads):
    change, state = optimizer.update(grads, state)
    return optax.apply_updates(weights, change), state


def lying(arrays):
    """The layouts of arrays, as they lie; the step's number has none."""
    return jax.tree.map(lambda x: x.sharding if x.ndim else None, arrays)


def begin(weights, zero=1):
    state = optimizer.init(weights)
    return state, jax.jit(update, out_shardings=lying((weights, state)))


def held_by(state):
    """Bytes of the moments on each device."""
    sizes = dict.fromkeys(devices, 0)
    for x in (x for x in jax.tree.leaves(state) if x.ndim):
        for shard in x.addressable_shards:
            sizes[shard.device] += shard.data.nbytes
    return list(sizes.values())


state, one_step = begin(weights)
later = one_step(weights, state, weights)
sizes = held_by(state), held_by(later[1])
assert sizes[0] == sizes[1] == [2 * 4 * 512 * 64] * 8
bars = [("when they are made", {"moments": sizes[0][0]})]
bars += [("after a step", {"moments": sizes[1][0]})]
bars += [("an eighth", {"moments": sizes[0][0] // 8})]
if clue("19.memory", 1):
    show(
        draw.memory_bars(
            bars, title="Adam's moments on each of eight devices", wide=360
        )
    )

# %%
suspect = ...  # again, with what you know now
buy = False  # True buys clue 2, for a point
guess("19.memory", 2, suspect, buy)

# %% [markdown]
# **Clue 2: the program, and `llmpar.look`.** (`check` has no clue here. It compares values, and all are right.)

# %% tags=["plumbing"]
seen = str(look(one_step, weights, state, weights)).splitlines()
(moment,) = (row for row in seen if ".mu." in row)
assert "all-" not in "".join(seen)  # it gathers nothing
if clue("19.memory", 2):
    program(begin)
    say(f"look: {moment} (and the same for nu)")

# %%
suspect = ...  # your last word
attempt("19.memory", suspect)


# %% tags=["plumbing"]
def cured_begin(weights, zero=1):
    places = laid_out(weights, cut if zero else whole)
    state = jax.jit(optimizer.init, out_shardings=places)(weights)
    return state, jax.jit(update, out_shardings=(lying(weights), places))


def laid_out(weights, moment):
    """Layouts of Adam's state; the step's number cannot be cut."""
    uncut, state = (
        sharding(mesh, parse_layout("")),
        jax.eval_shape(optimizer.init, weights),
    )
    return jax.tree.map(lambda x: moment if x.ndim else uncut, state)


state, cured_step = cured_begin(weights)
cured = cured_step(weights, state, weights)
sizes = held_by(state), held_by(cured[1])
assert sizes[0] == sizes[1] == [2 * 4 * 64 * 64] * 8
assert held_by(cured_begin(weights, zero=0)[0]) == held_by(later[1])
both = zip(*(jax.tree.leaves(after) for after in (later, cured)), strict=True)
assert all(np.allclose(a, b, atol=1e-7) for a, b in both)
under_jit = held_by(jax.jit(optimizer.init)(weights))
assert under_jit == [2 * 4 * 512 * 64] + [0] * 7  # all of it on the first device
assert held_by(jax.jit(optimizer.init)(jax.device_put(weights, cut))) == under_jit
unmask("19.memory", cured_begin, 1, f"{sizes[1][0] // 1024} KiB each")

# %% [markdown]
# (*Further* says where these three were found.)
#
# ## Keep: a falling loss proves little
#
# 1. A symptom fits several causes. Look for the run that tells two of them apart, then for the line.
# 2. `check` names the line where the first value differs from one device. It is blind where all values are right. For memory count the bytes on a
#    device, for messages use `look` (lesson 13), for time a trace.
# 3. Ask about each sum over ranks: does each rank add its own part, and does somebody add the parts?
# 4. Ask about each array: which line says that it is cut?
# 5. A cure is proved when the program is run again and the numbers agree.

# %% [markdown]
# ## Further
#
# What is public about the first three, and three more, for the same eight suspects.
#
# ### In public
#
# 1. The norm. ROCm/TransformerEngine, pull request 715, 2026: replicated weights are counted once per rank of `tp`. A DeepSeek-V3 of six layers reports
#    12.2 in place of 9.0 at tp=8. "This is primarily a diagnostic bug": the effect on the weights is much smaller, and depends entirely on the optimizer.
#    NVIDIA-NeMo/RL, pull request 3788, 2026, open, counts them once as well: the losses of the first step agree to all reported digits.
# 2. The router. pytorch/torchtitan, issue 2387, 2026: with `tp` its weight differs between ranks right after the first step, since its gradient is not
#    reduced. Pull request 4054, 2026, on a like fault: the forward pass is untouched, "so loss curves look normal".
# 3. The memory. AI-Hypercomputer/maxtext, pull request 5104, 2026: the option for ZeRO-1 was "a silent no-op" in one training engine, which did not read it.
#    The moments are made as `zeros_like` of each weight, and inherit its layout. marin-community/marin, issue 7987, 2026, open, is a milder case: one weight,
#    the embedding, is whole on purpose, and its moments inherit that, for about 5.8 GiB per GPU.
#
# Outside `jit` an array of `zeros_like` has the layout of its argument. Inside it has not (jax-ml/jax, issue 26040, open), so `jit` alone is no cure:
# `jit` of `optimizer.init` puts *all* moments on one device here, even if the weights are cut.
#
# ### 4. More devices, but not less noise
#
# Rows are cut over `dp`, four on each rank, and what a layer makes of them is noisy. The mean is taken over all rows of all ranks. With eight times as
# many rows its noise, the standard deviation, should be √8 = 2.8 times smaller. It is 0.50 on one rank, and 0.50 on eight.

# %%
suspect = ...  # a letter, A to H
buy = False  # True buys clue 1, for a point
guess("19.noise", 1, suspect, buy)

# %% [markdown]
# **Clue 1: the numbers.** What is the layer, and what does it make of four rows on each of four ranks?


# %% tags=["plumbing"]
def dropped(x):
    kept = jax.random.bernoulli(jax.random.key(31), 0.5, x.shape)
    return 2 * x * kept


def noise(f, ranks):
    """The spread of the mean over all rows of ones, four rows on each rank."""
    ones = np.ones((4 * ranks, 512), np.float32)
    return float(run(f"dp={ranks}", f, P("dp"), P("dp"), ones).mean(0).std())


found = [noise(dropped, n) for n in RANKS]
assert np.allclose(found, 0.5, atol=0.005)
ones = np.ones((16, 6), np.float32)
kept = run("dp=4", dropped, P("dp"), P("dp"), ones) > 0
assert all((kept[:4] == kept[4 * r : 4 * r + 4]).all() for r in range(4))
if clue("19.noise", 1):
    say(
        "Dropout: each number becomes 0 (here a dot) with a chance of one half, and "
        "else it is doubled."
    )
    for rank, rows in enumerate(np.split(kept, 4)):
        drawn = "  ".join("".join(".1"[int(one)] for one in row) for row in rows)
        print(f"rank {rank}: {drawn}")

# %%
suspect = ...  # again, with what you know now
buy = False  # True buys clue 2, for a point
guess("19.noise", 2, suspect, buy)

# %% [markdown]
# **Clue 2: `llmpar.check`.**

# %% tags=["plumbing"]
checked = check(on("dp=2", dropped, P("dp"), P("dp")), None, shape(8, 8))
assert not checked and checked.findings[0]["kind"] == "same random key"
assert place(dropped, checked) == 1
if clue("19.noise", 2):
    program(dropped, place(dropped, checked))

# %%
suspect = ...  # your last word
attempt("19.noise", suspect)


# %% tags=["plumbing"]
def cured_dropped(x):
    key = jax.random.fold_in(jax.random.key(31), lax.axis_index("dp"))
    return 2 * x * jax.random.bernoulli(key, 0.5, x.shape)


after = noise(cured_dropped, 8)
assert 0.8 < after / (0.5 / 8**0.5) < 1.25
unmask("19.noise", cured_dropped, 1, f"{after:.2f}")

# %% [markdown]
# `fold_in` makes a new key of a key and a number. Along `tp`, where activations are copies, the ranks must draw the *same* numbers. In public:
# huggingface/transformers, issue 31412, 2024: with a constant seed, dropout masks are identical on all devices of a DDP run.
#
# ### 5. The first loss is too high
#
# A trained model is trained further, so its loss should begin near 2. It begins at 11.4, as if it had learned nothing. One thing is new: its long
# sequences are cut over `sp`, the only axis, a part for each of four ranks. In its attention a token looks at itself and at all tokens before it.

# %%
suspect = ...  # a letter, A to H
buy = False  # True buys clue 1, for a point
guess("19.first_loss", 1, suspect, buy)

# %% [markdown]
# **Clue 1: a comparison.** Each rank's own loss:


# %% tags=["plumbing"]
def attention(x):  # s/sp d
    at = jnp.arange(len(x))
    keys, values = lax.all_gather((turned(x, at), x), "sp", tiled=True)
    before = at[:, None] >= jnp.arange(len(keys))
    scores = jnp.where(before, turned(x, at) @ keys.T, -jnp.inf)
    return jax.nn.softmax(scores) @ values


def turned(x, at):
    """Turn pairs of numbers by an angle for each position, as RoPE does."""
    (a, b), angle = jnp.split(x, 2, 1), at[:, None] * 0.1
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], 1)


def first_losses(f, ranks):
    return ((run(f"sp={ranks}", f, P("sp"), P("sp"), x) - y) ** 2).reshape(ranks, -1)


x = 3.174 * draws(16, 8)  # as large as the loss of the public case
y = run("sp=1", attention, P("sp"), P("sp"), x) + 2**0.5  # so its loss is 2
first, own = first_losses(attention, 1).mean(), first_losses(attention, 4).mean(1)
assert np.allclose([first, own[0], own.mean()], [2, 2, 11.4], atol=0.05)
assert own[1:].min() > 5
if clue("19.first_loss", 1):
    for rank, loss_there in enumerate(own):
        print(f"rank {rank}: {loss_there:.1f}")

# %%
suspect = ...  # again, with what you know now
buy = False  # True buys clue 2, for a point
guess("19.first_loss", 2, suspect, buy)

# %% [markdown]
# **Clue 2: `llmpar.check`.**

# %% tags=["plumbing"]
checked = check(on("sp=2", attention, P("sp"), P("sp")), None, shape(8, 8))
assert not checked and checked.findings[0]["kind"] == "positions without offset"
assert place(attention, checked) == 1
if clue("19.first_loss", 2):
    program(attention, place(attention, checked))

# %%
suspect = ...  # your last word
attempt("19.first_loss", suspect)


# %% tags=["plumbing"]
def cured_attention(x):
    at = jnp.arange(len(x)) + lax.axis_index("sp") * len(x)
    keys, values = lax.all_gather((turned(x, at), x), "sp", tiled=True)
    before = at[:, None] >= jnp.arange(len(keys))
    scores = jnp.where(before, turned(x, at) @ keys.T, -jnp.inf)
    return jax.nn.softmax(scores) @ values


cured = first_losses(cured_attention, 4).mean()
assert np.isclose(cured, 2, atol=1e-3)
unmask("19.first_loss", cured_attention, 1, f"loss {cured:.1f}")

# %% [markdown]
# In public: thunlp/Seq1F1B, issue 6, 2025: the loss "should be around 2, while it starts with 11.4"; an offset is missing. There the parts come one after another. NVIDIA/Megatron-LM, pull
# request 5243, 2026, of packed sequences: rank 0 takes the positions 0, 3, 0, 3 in place of 0, 3, 4, 7.
#
# ### 6. A loss that depends on dp
#
# With the same 32 texts, in the same order, and the same weights, the first loss is 26.6 on one rank of `dp`, 24.9 on two, and 24.5 on four and on eight.

# %%
suspect = ...  # a letter, A to H
buy = False  # True buys clue 1, for a point
guess("19.answers", 1, suspect, buy)

# %% [markdown]
# **Clue 1: an experiment.** The same with other texts:

# %% tags=["plumbing"]
x, w = draws(128, 8), draws(8, 4)


def loss(x, w, counted):  # counted: 1 for a token of an answer, 0 for padding
    errors = ((x @ w) ** 2).sum(1) * counted
    return lax.pmean(errors.sum() / counted.sum(), "dp")


PLACES = P("dp"), P(), P("dp")
places, answers = np.arange(128) % 4, np.arange(128) // 4
counted = (places <= answers // 8).astype(np.float32)  # short answers first
equal = (places < 2).astype(np.float32)
of = lambda f, tokens: [
    float(run(f"dp={n}", f, PLACES, P(), x, w, tokens)) for n in RANKS
]
found, alike = of(loss, counted), of(loss, equal)
assert np.allclose(found, [26.6, 24.9, 24.5, 24.5], atol=0.05) and np.allclose(
    alike, alike[0]
)
if clue("19.answers", 1):
    by_ranks = ", ".join(f"{one:.1f}" for one in alike)
    say(
        "The texts are answers of one to four tokens, filled up to four. With answers "
        f"of two tokens each the loss on 1, 2, 4 and 8 ranks is {by_ranks}."
    )

# %%
suspect = ...  # again, with what you know now
buy = False  # True buys clue 2, for a point
guess("19.answers", 2, suspect, buy)

# %% [markdown]
# **Clue 2: `llmpar.check`.**

# %% tags=["plumbing"]
checked = check(on("dp=2", loss, PLACES, P()), None, x, w, counted)
assert not checked and checked.findings[0]["kind"] == "mean of means"
assert place(loss, checked) == 2
if clue("19.answers", 2):
    program(loss, place(loss, checked))

# %%
suspect = ...  # your last word
attempt("19.answers", suspect)


# %% tags=["plumbing"]
def cured_loss(x, w, counted):
    errors = ((x @ w) ** 2).sum(1) * counted
    return lax.psum(errors.sum(), "dp") / lax.psum(counted.sum(), "dp")


cured = of(cured_loss, counted)
assert np.allclose(cured, found[0], rtol=1e-5)
unmask("19.answers", cured_loss, -1, f"{cured[-1]:.2f}")

# %% [markdown]
# The answers lie in the order of their lengths. From four ranks on all of a rank are equally long, and eight give the same loss as four.
#
# In public: huggingface/transformers, issue 24725, 2023, with microbatches in place of ranks. NVIDIA/Megatron-LM, pull request 7513, 2026, open, with parts of a
# sequence: if only one token counts, two ranks halve the gradient, and four leave a quarter. [Lesson 03](03_data_parallelism.ipynb) has the arithmetic.
#
# ### On your cluster
#
# ```
# llmpar check my_code:program my_code:reference       the first value that one device has differently
# llmpar inspect --mesh "fsdp=8" --zero 1              what a step holds and sends
# ```
