# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 15
#     needs: ["03", "04"]
#     question: The loss falls, but something is wrong. How do you find the fault?
#     objectives:
#     - Recognise three silent failures (ten with *Further*) by what they change, and by
#       what they do not change.
#     - Use a clue to tell two suspects apart.
#     - Prove a cure by running it.
# ---

# %% [markdown]
# # 19 · Mysteries: the loss falls, and something is wrong
#
# A gradient norm grows with `tp`: 28.8 on one device, 54.6 on eight. Model, batch and loss are the same, and there is no error. What is wrong?
# Ten failures of recent years, three here and seven in *Further*. They are public; these programs and numbers are small models of them.

# %% tags=["plumbing"]
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # simulated devices; real ones: On your cluster

from llmpar.parallel.mesh import use_devices

devices = use_devices()

import inspect

import jax
import jax.numpy as jnp
import numpy as np
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
    mysteries,
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
    sizes = {axis: int(size) for axis, size in (x.split("=") for x in mesh.split())}
    grid = np.array(devices[: np.prod([*sizes.values()])]).reshape([*sizes.values()])
    ranks = jax.sharding.Mesh(
        grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    mapped = jax.shard_map(
        f, mesh=ranks, in_specs=given, out_specs=gives, check_vma=False
    )
    mapped.__name__ = f.__name__
    return mapped


def run(mesh, f, given, gives, *arrays):
    return jax.tree.map(np.asarray, jax.jit(on(mesh, f, given, gives))(*arrays))


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def guess(mystery, number, suspect, buy=False):
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
    say(f"shut: guess above, and set `buy=True` there, if you want clue {number}")
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


def marked(checked):
    """The line of `llmpar.lessons.mysteries` that `llmpar.check` names."""
    return int(checked.findings[0]["line"].rpartition(":")[2])


def program(*functions, at=None):
    """Print a program, with an arrow at a line."""
    for f in functions:
        for number, row in enumerate(code(f).splitlines(), f.__code__.co_firstlineno):
            if '"""' not in row:
                print(f"{'->' if number == at else '  '} {row}")


def points_at(checked, kind, f, row):
    """Whether `llmpar.check` names this kind of mistake, and this row of a program."""
    place = f.__code__.co_firstlineno + row
    return (checked.findings[0]["kind"], marked(checked)) == (kind, place)


# %% tags=["plumbing"]
log = [28.8, 33.7, 41.9, 54.6]
lines = [("the log says", log, "measured", "o", False)]
lines += [("one device", [log[0]] * 4, "soft", None, True)]
axes = dict(
    x="tp", y="gradient norm", title="The same gradient on more ranks", wide=360
)
show(draw.curves(lines, RANKS, **axes))

# %% [markdown]
# There are twelve suspects, for all ten mysteries. One may be guilty of several, or of none.
#
# | suspect | what happens |
# |---|---|
# | A | An array is cut at first, and a later line gathers it. |
# | B | Ranks hold the terms of a sum, and nobody adds them up. |
# | C | A value that is complete, and the same on all ranks, is summed over them once more. |
# | D | Ranks compute the same value, and each should compute its own. |
# | E | Ranks draw or choose different values, and all should take the same. |
# | F | An array stays whole, since no line says that it is cut. |
# | G | A collective runs over the wrong group of ranks. |
# | H | Ranks take means over unequal counts, and these are averaged. |
# | I | A value is divided by the number of ranks once more than it should be. |
# | J | Ranks have unequal work. |
# | K | An array is cut, but over an axis of the mesh that has one rank. |
# | L | Ranks wait for messages, though they have work that does not need them. |
#
# Name the cause, not what follows from it. A mystery begins with three points:
#
# 1. Write a guess, as in `suspect="C"`, and run its cell. If you want clue 1, write `buy=True`, and run that cell again, then the folded one below. This costs a point.
# 2. Guess again with what you know. Clue 2 is bought in the same way. A guess that bought a clue stays.
# 3. When you are sure, with or without clues, give your last word with `attempt`: it opens the cure. (A `hint` costs a point, too.)
#
# (A stored copy, as on GitHub, shows all clues and cures. In a running one they are shut, unless you set `os.environ["LLMPAR_OPEN"] = "1"`. The programs lie in `llmpar/lessons/mysteries.py`, the last clue of all.)
#
# ## 1. The gradient norm that grows with tp
#
# The model has one weight and one bias, and the norm is that of both gradients.

# %%
guess("19.norm", 1, suspect=..., buy=False)  # a letter, A to L

# %% [markdown]
# **Clue 1: an experiment.** Two more runs: in one of them the gradient of the bias is set to 0, in the other one that of the weight.


# %% tags=["plumbing"]
norm, GIVEN = mysteries.norm, (P(None, "tp"), P())
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
guess("19.norm", 2, suspect=..., buy=False)  # again, with what you know now

# %% [markdown]
# **Clue 2: `llmpar.check`.** It runs a program on its mesh and on one device, and marks the line where the first value differs.

# %% tags=["plumbing"]
checked = check(on("tp=8", norm, GIVEN, P()), None, shape(16, 32), shape(32))
assert not checked
if clue("19.norm", 2):
    program(norm, at=marked(checked))

# %%
attempt("19.norm", ...)  # your last word


# %% tags=["plumbing"]
assert points_at(checked, "counted", norm, 2)
cured = on_ranks(mysteries.cured_norm, weight, bias)
assert np.allclose(cured, right, rtol=1e-5)
unmask("19.norm", mysteries.cured_norm, 2, f"{cured[-1]:.1f} on tp=8")

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
guess("19.router", 1, suspect=..., buy=False)  # a letter, A to L

# %% [markdown]
# **Clue 1: the numbers.** One number of the router, in the first step: its value, and its gradient on each rank.


# %% tags=["plumbing"]
step = mysteries.step
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
alone = f"{one[0][0][0, 3]:.2f}", f"{slopes[1][0]:+.2f}"
table += [("one device", [*zip(alone, ("weights", "gradients"), strict=True)])]
if clue("19.router", 1):
    show(draw.table(table, ("value", "gradient"), "One number of the router's weight"))

# %%
guess("19.router", 2, suspect=..., buy=False)  # again, with what you know now

# %% [markdown]
# **Clue 2: `llmpar.check`.** Where does the first value differ from one device?

# %% tags=["plumbing"]
shapes = [shape(*array.shape) for array in (router, *data)]
checked = check(on("tp=4", step, LAID, P()), None, *shapes)
assert not checked
if clue("19.router", 2):
    program(step, at=marked(checked))

# %%
attempt("19.router", ...)  # your last word


# %% tags=["plumbing"]
assert points_at(checked, "missing sum", step, 5)
cured = steps(mysteries.cured_step, 4)
assert np.ptp(cured[-1], 0).max() == 0 and np.allclose(cured[-1], one[-1], atol=1e-5)
unmask("19.router", mysteries.cured_step, -1, f"{slopes[1][0]:+.2f} on each")

# %% [markdown]
# ## 3. ZeRO-1 that saves nothing
#
# A team turns on ZeRO-1, by which each of eight devices keeps an eighth of Adam's moments. The option is accepted, and all values are right, to
# the last digit. But a device needs as much memory as before: 384 KiB for weights and moments, where 160 are expected.

# %%
guess("19.memory", 1, suspect=..., buy=False)  # a letter, A to L

# %% [markdown]
# **Clue 1: bytes.** How large are the moments on a device, and since when?

# %% tags=["plumbing"]
mesh = make_mesh("fsdp=8")
whole, cut = (sharding(mesh, parse_layout(text)) for text in ("d m", "d/fsdp m"))
weights = {"w": jax.device_put(draws(512, 64), whole)}


def held_by(state):
    """Bytes of the moments on each device."""
    sizes = dict.fromkeys(devices, 0)
    for x in (x for x in jax.tree.leaves(state) if x.ndim):
        for shard in x.addressable_shards:
            sizes[shard.device] += shard.data.nbytes
    return list(sizes.values())


state, one_step = mysteries.begin(weights)
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
guess("19.memory", 2, suspect=..., buy=False)  # again, with what you know now

# %% [markdown]
# **Clue 2: the program, and `llmpar.look`.** (`check` has no clue here. It compares values, and all are right.)

# %% tags=["plumbing"]
seen = str(look(one_step, weights, state, weights)).splitlines()
(moment,) = (row for row in seen if ".mu." in row)
assert "all-" not in "".join(seen)  # it gathers nothing
assert state[0].mu["w"].sharding.spec == P(None, None)  # no axis, not one of one rank
if clue("19.memory", 2):
    program(mysteries.begin)
    say(f"look: {moment} (and the same for nu)")

# %%
attempt("19.memory", ...)  # your last word


# %% tags=["plumbing"]
cured_begin, optimizer = mysteries.cured_begin, mysteries.adam
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
one_axis = jax.make_mesh((8,), ("fsdp",), (AxisType.Explicit,), devices=devices)
with jax.set_mesh(one_axis):
    typed = jax.device_put(weights, P("fsdp"))
    assert held_by(jax.jit(optimizer.init)(typed)) == sizes[1]  # an eighth each
unmask("19.memory", cured_begin, 3, f"{sizes[1][0] // 1024} KiB each")

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
# What is public about the first three, and seven more, for the same twelve suspects.
#
# ### In public
#
# 1. The norm. ROCm/TransformerEngine, pull request 715, 2026: replicated weights are counted once per rank of `tp`. A DeepSeek-V3 of six layers reports
#    12.2 in place of 9.0 at tp=8. "This is primarily a diagnostic bug": the effect on the weights is much smaller, and depends on the optimizer. Clipping scales
#    by the norm, and Adam hardly feels a scale. NVIDIA-NeMo/RL, pull request 3788, 2026, open, is a like cure: the losses of the first step agree to all reported digits.
# 2. The router. pytorch/torchtitan, issue 2387, 2026: with `tp` its weight differs between ranks right after the first step, since its gradient is not
#    reduced. Pull request 4054, 2026, on a like fault: the forward pass is untouched, "so loss curves look normal".
# 3. The memory. AI-Hypercomputer/maxtext, pull request 5104, 2026: the option for ZeRO-1 was "a silent no-op" in one training engine, which did not read it.
#    The moments are made as `zeros_like` of each weight, and inherit its layout. marin-community/marin, issue 7987, 2026, open, is a milder case: one weight,
#    the embedding, is whole on purpose, and its moments inherit that, for about 5.8 GiB per GPU.
#
# Outside `jit` an array of `zeros_like` takes the layout of its argument. Inside `jit` it does so on Explicit axes (lesson 12), where the layout is part of the
# type. On others it does not: the numbers of the argument are not used, so JAX drops it, and its layout with it (jax-ml/jax, issue 26040, open, is about devices). So `jit`
# alone is no cure: `jit` of `optimizer.init` puts *all* moments on one device here, even if the weights are cut.
#
# ### 4. More devices, but not less noise
#
# Rows are cut over `dp`, four on each rank, and what a layer makes of them is noisy. The mean is taken over all rows of all ranks. With eight times as
# many rows its noise, the standard deviation, should be √8 = 2.8 times smaller. It is 0.50 on one rank, and 0.50 on eight. The mean itself is about 1, as it should be, on both.

# %%
guess("19.noise", 1, suspect=..., buy=False)  # a letter, A to L

# %% [markdown]
# **Clue 1: the numbers.** What is the layer, and what does it make of four rows on each of four ranks?


# %% tags=["plumbing"]
dropped, ONES = mysteries.dropped, np.ones((4 * 8, 512), np.float32)


def noise(f, ranks):
    """The spread of the mean over all rows of ones, four rows on each rank."""
    rows = run(f"dp={ranks}", f, P("dp"), P("dp"), ONES[: 4 * ranks])
    return float(rows.mean(0).std())


found = [noise(dropped, n) for n in RANKS]
means = [run(f"dp={n}", dropped, P("dp"), P("dp"), ONES[: 4 * n]).mean() for n in RANKS]
assert np.allclose(means, 1, atol=0.03)
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
guess("19.noise", 2, suspect=..., buy=False)  # again, with what you know now

# %% [markdown]
# **Clue 2: `llmpar.check`.**

# %% tags=["plumbing"]
checked = check(on("dp=2", dropped, P("dp"), P("dp")), None, shape(8, 8))
assert not checked
if clue("19.noise", 2):
    program(dropped, at=marked(checked))

# %%
attempt("19.noise", ...)  # your last word


# %% tags=["plumbing"]
assert points_at(checked, "same random key", dropped, 2)
after = noise(mysteries.cured_dropped, 8)
assert 0.8 < after / (0.5 / 8**0.5) < 1.25
unmask("19.noise", mysteries.cured_dropped, 2, f"{after:.2f}")

# %% [markdown]
# `fold_in` makes a new key of a key and a number. Along `tp`, where activations are copies, the ranks must draw the *same* numbers. In public:
# huggingface/transformers, issue 31412, 2024: with a constant seed, dropout masks are identical on all devices of a DDP run.
#
# ### 5. The first loss is too high
#
# A trained model is trained further, so its loss should begin near 2. It begins at 11.4, as if it had learned nothing. One thing is new: its long
# sequences are cut over `sp`, the only axis, a part for each of four ranks. In its attention a token looks at itself and at all tokens before it.

# %%
guess("19.first_loss", 1, suspect=..., buy=False)  # a letter, A to L

# %% [markdown]
# **Clue 1: a comparison.** Each rank's own loss:


# %% tags=["plumbing"]
attention = mysteries.attention


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
guess("19.first_loss", 2, suspect=..., buy=False)  # again, with what you know now

# %% [markdown]
# **Clue 2: `llmpar.check`.**

# %% tags=["plumbing"]
checked = check(on("sp=2", attention, P("sp"), P("sp")), None, shape(8, 8))
assert not checked
if clue("19.first_loss", 2):
    program(attention, at=marked(checked))

# %%
attempt("19.first_loss", ...)  # your last word


# %% tags=["plumbing"]
assert points_at(checked, "positions without offset", attention, 2)
cured = first_losses(mysteries.cured_attention, 4).mean()
assert np.isclose(cured, 2, atol=1e-3)
unmask("19.first_loss", mysteries.cured_attention, 2, f"loss {cured:.1f}")

# %% [markdown]
# In public: thunlp/Seq1F1B, issue 6, 2025: the loss "should be around 2, while it starts with 11.4"; an offset is missing. There the parts come one after another. NVIDIA/Megatron-LM, pull
# request 5243, 2026, of packed sequences: rank 0 takes the positions 0, 3, 0, 3 in place of 0, 3, 4, 7.
#
# ### 6. A loss that depends on dp
#
# With the same 32 texts, in the same order, and the same weights, the first loss is 26.6 on one rank of `dp`, 24.9 on two, and 24.5 on four and on eight.

# %%
guess("19.answers", 1, suspect=..., buy=False)  # a letter, A to L

# %% [markdown]
# **Clue 1: an experiment.** The same with other texts:

# %% tags=["plumbing"]
x, w = draws(128, 8), draws(8, 4)
loss = mysteries.loss
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
guess("19.answers", 2, suspect=..., buy=False)  # again, with what you know now

# %% [markdown]
# **Clue 2: `llmpar.check`.**

# %% tags=["plumbing"]
checked = check(on("dp=2", loss, PLACES, P()), None, x, w, counted)
assert not checked
if clue("19.answers", 2):
    program(loss, at=marked(checked))

# %%
attempt("19.answers", ...)  # your last word


# %% tags=["plumbing"]
assert points_at(checked, "mean of means", loss, 3)
cured = of(mysteries.cured_loss, counted)
assert np.allclose(cured, found[0], rtol=1e-5)
unmask("19.answers", mysteries.cured_loss, -1, f"{cured[-1]:.2f}")

# %% [markdown]
# The answers lie in the order of their lengths. From four ranks on, all answers on one rank are equally long, and eight give the same loss as four.
#
# In public: huggingface/transformers, issue 24725, 2023, with microbatches in place of ranks. NVIDIA/Megatron-LM, pull request 7513, 2026, open, with parts of a
# sequence: if only one token counts, two ranks halve the gradient, and four leave a quarter. [Lesson 03](03_data_parallelism.ipynb) has the arithmetic.
#
# ### 7. The second loss is off
#
# Two layers: `dp` cuts the texts; `tp` cuts the positions up to the end of the first layer, then the second weight. On three meshes of eight devices the first loss is that of one
# device. From the second loss on, only `dp=1 tp=8` agrees; on the two others the loss falls more slowly.

# %% tags=["plumbing"]
first, second = 0.4 * draws(6, 8), 0.4 * draws(8, 8)
texts = draws(32, 6), draws(32, 8)
CUTS = P(), P(None, "tp"), P(("dp", "tp")), P("dp", "tp")


def log_of(f, mesh, steps=40):
    losses, weight, given = [], first, (mesh, f, CUTS, (P(), P()))
    trained = jax.jit(on(*given))
    for _ in range(steps):
        error, weight = trained(weight, second, *texts)
        losses.append(float(error))
    return losses


two_layers = mysteries.two_layers
MESHES = "dp=1 tp=8", "dp=2 tp=4", "dp=4 tp=2"
logs = [log_of(two_layers, mesh) for mesh in MESHES]
alone = log_of(two_layers, "dp=1 tp=1")
assert np.allclose(logs[0], alone, rtol=1e-4)
assert all(np.isclose(losses[0], alone[0], rtol=1e-5) for losses in logs)
assert all(losses == sorted(losses, reverse=True) for losses in logs)  # they fall
STEPS = 1, 10, 20, 30, 40
looks = ("soft", None, True), ("measured", "o", False), ("dp", "s", False)
lines = [
    (mesh, [losses[step - 1] for step in STEPS], *look_of)
    for mesh, losses, look_of in zip(MESHES, logs, looks, strict=True)
]
axes = dict(x="steps", y="loss", title="One model on three meshes", wide=360)
show(draw.curves(lines, STEPS, **axes))

# %%
guess("19.second_loss", 1, suspect=..., buy=False)  # a letter, A to L

# %% [markdown]
# **Clue 1: an experiment.** The first half of the texts stays, the second half becomes zeros. On one device zeros cannot move the first weight. What
# do they do on `dp=2 tp=4`, if their targets are changed?

# %% tags=["plumbing"]
half = (np.arange(32) < 16)[:, None]
moved = []
for mesh in ("dp=1 tp=1", "dp=2 tp=4"):
    given = (mesh, two_layers, CUTS, (P(), P()), first, second, texts[0] * half)
    after = [run(*given, texts[1] * scale)[1] for scale in (1, np.where(half, 1, 9))]
    moved.append(float(np.abs(after[0] - after[1]).max()))
assert moved[0] < 1e-6 and moved[1] > 0.01
if clue("19.second_loss", 1):
    say(
        "Other targets for the second half of the texts, which rank 1 of dp has if "
        "there are two, change a number of the first weight, after a step, by up to "
        f"{moved[0]:.2f} on one device, and by up to {moved[1]:.2f} on dp=2 tp=4."
    )

# %%
guess("19.second_loss", 2, suspect=..., buy=False)  # again, with what you know now

# %% [markdown]
# **Clue 2: `llmpar.check`.** On the way forward all values are right: it marks the line whose gradient differs first.

# %% tags=["plumbing"]
shapes = [shape(*x.shape) for x in (first, second, texts[0][:16], texts[1][:16])]
checked = check(on("dp=2 tp=2", two_layers, CUTS, (P(), P())), None, *shapes)
assert not checked
if clue("19.second_loss", 2):
    program(mysteries.total, mysteries.own_part, mysteries.gathering)
    print('   gathered_over_tp = gathering("tp")')
    program(two_layers, at=marked(checked))

# %%
attempt("19.second_loss", ...)  # your last word

# %% tags=["plumbing"]
assert points_at(checked, "sum of shards", two_layers, 4)
cured = [log_of(mysteries.cured_two_layers, mesh) for mesh in MESHES]
assert np.allclose(cured, alone, rtol=1e-4)
fourth = log_of(two_layers, "dp=8 tp=1")
assert np.argmin(fourth) == 10 and fourth[10:] == sorted(fourth[10:])
unmask(
    "19.second_loss", mysteries.cured_two_layers, 2, f"{cured[1][-1]:.0f} on dp=2 tp=4"
)

# %% [markdown]
# On the fourth mesh, `dp=8 tp=1`, the loss falls for ten steps, and then it rises.
#
# In public: EleutherAI/gpt-neox, pull request 1281, 2024, adds the
# missing group to a reduce-scatter: the fault "negatively affects convergence when the model parallel group is a subset of the available [ranks]".
#
# ### 8. Experts that are not balanced
#
# A router learns with two terms of a loss; the second one, the balance, keeps experts evenly loaded. In the first step its value is the same on any number of
# ranks of `dp`, and so is that of the first term. But the more ranks, the more tokens the busiest of four experts gets after 60 steps.

# %% tags=["plumbing"]
router, experts = 0.3 * draws(6, 4), draws(4, 5)
batch = draws(64, 6) + 0.5, 0.3 * draws(64, 5) + experts[0]
PARTS = P(), P(), P("dp"), P("dp")
route = mysteries.router_step


def busiest(f, ranks):
    weight, trained = router, jax.jit(on(f"dp={ranks}", f, PARTS, P()))
    for _ in range(60):
        weight = trained(weight, experts, *batch)
    return np.bincount((batch[0] @ np.asarray(weight)).argmax(1)).max() / 64


def logged(router, experts, x, y):
    return lax.psum(mysteries.balance(router, x), "dp")


values = [run(f"dp={n}", logged, PARTS, P(), router, experts, *batch) for n in RANKS]
assert np.allclose(values, values[0], rtol=1e-5)
shares = [busiest(route, n) for n in RANKS]
assert shares == sorted(shares) and shares[-1] > 1.3 * shares[0]
lines = [("busiest expert", shares, "measured", "o", False)]
lines += [("an even share", [0.25] * 4, "soft", None, True)]
axes = dict(x="dp", y="of all tokens", title="Tokens of the busiest expert", wide=360)
show(draw.curves(lines, RANKS, percent=True, **axes))

# %%
guess("19.balance", 1, suspect=..., buy=False)  # a letter, A to L

# %% [markdown]
# **Clue 1: an experiment.** How far does the first step move the router, if only one of the terms is used? In units of one device's step:

# %% tags=["plumbing"]
nothing = lambda router, x: 0.0 * router.sum()


def error_only(router, experts, x, y):
    return route(router, experts, x, y, term=nothing)


def by(f, ranks):
    return run(f"dp={ranks}", f, PARTS, P(), router, experts, *batch) - router


def size(change):
    return float(np.linalg.norm(change))


errors = [by(error_only, n) for n in RANKS]
terms = [by(route, n) - one for n, one in zip(RANKS, errors, strict=True)]
sizes = [[size(x) / size(xs[0]) for x in xs] for xs in (errors, terms)]
assert np.allclose(sizes[0], 1, rtol=1e-3) and np.allclose(
    sizes[1], 1 / np.array(RANKS), rtol=1e-2
)
if clue("19.balance", 1):
    for name, row in zip(("first term", "balance"), sizes, strict=True):
        print(
            f"{name:<10}",
            *(f"{x:.2f} on {n}" for x, n in zip(row, RANKS, strict=True)),
            sep="  ",
        )

# %%
guess("19.balance", 2, suspect=..., buy=False)  # again, with what you know now

# %% [markdown]
# **Clue 2: `llmpar.check`.**

# %% tags=["plumbing"]
shapes = [shape(*x.shape) for x in (router, experts, batch[0][:16], batch[1][:16])]
checked = check(on("dp=2", route, PARTS, P()), None, *shapes)
assert not checked
if clue("19.balance", 2):
    program(mysteries.balance, route, at=marked(checked))

# %%
attempt("19.balance", ...)  # your last word


# %% tags=["plumbing"]
def cured_route(router, experts, x, y):
    return route(router, experts, x, y, term=mysteries.cured_balance)


assert points_at(checked, "mean for a sum", route, 4)
cured = [busiest(cured_route, n) for n in RANKS]
assert np.ptp(cured) < 0.02 and np.isclose(cured[0], shares[0])
unmask("19.balance", mysteries.cured_balance, -1, f"{cured[-1]:.0%} on 8, as on one")

# %% [markdown]
# The balance divides by the tokens of all ranks; then `pmean` divides its gradient by the number of ranks. In public: NVIDIA/Megatron-LM, issue 3672, 2026, open:
# the loss is averaged over the *global* number of tokens, so its gradient is too small by the number of ranks. NVIDIA-NeMo/Automodel, pull request 1412, 2026, cured two
# faults: no gradient of the balance came through at all, and once it did, FSDP's mean caused "the effective aux loss coefficient to silently shrink with larger parallelism
# configs".
#
# ### 9. A loss that should be a quarter
#
# A table has a row for each of 64 texts. A text that is read moves its row half of the distance to its values, so a loss of 1 becomes ¼ when each text is read
# once. Ranks of `dp` share the texts, in random order. After one epoch the loss is:

# %% tags=["plumbing"]
facts, empty = draws(64, 4), np.zeros((64, 4), np.float32)
epoch = mysteries.epoch


def unlearned(f, ranks):
    table = run(f"dp={ranks}", f, (P(), P()), P(), empty, facts)
    return float(((table - facts) ** 2).sum() / (facts**2).sum())


left = [unlearned(epoch, n) for n in RANKS]
assert np.isclose(left[0], 0.25) and min(left[1:]) > 0.3
say(", ".join(f"{x:.2f} on {n}" for x, n in zip(left, RANKS, strict=True)))

# %%
guess("19.epoch", 1, suspect=..., buy=False)  # a letter, A to L

# %% [markdown]
# **Clue 1: the numbers.** Sixteen texts on four ranks: which of them does each rank read?


# %% tags=["plumbing"]
def reads(texts):
    return mysteries.my_texts(len(texts))[None]


if clue("19.epoch", 1):
    for rank, own in enumerate(run("dp=4", reads, P(), P("dp"), np.arange(16))):
        print(f"rank {rank} reads", *(f"{text:2}" for text in own))

# %%
guess("19.epoch", 2, suspect=..., buy=False)  # again, with what you know now

# %% [markdown]
# **Clue 2: `llmpar.check`.**

# %% tags=["plumbing"]
checked = check(on("dp=4", epoch, (P(), P()), P()), None, shape(16, 4), shape(16, 4))
assert not checked
if clue("19.epoch", 2):
    program(mysteries.rank_key, mysteries.my_texts, epoch, at=marked(checked))

# %%
attempt("19.epoch", ...)  # your last word

# %% tags=["plumbing"]
assert points_at(checked, "different random keys", mysteries.my_texts, 2)
cured = [unlearned(mysteries.cured_epoch, n) for n in RANKS]
assert np.allclose(cured, 0.25)
unmask("19.epoch", mysteries.cured_epoch, 2, f"{cured[-1]:.2f} on 8")

# %% [markdown]
# A key of each rank's own is right for dropout, and wrong for the order that ranks share. In public: sandyresearch/parcae, issue 10, 2026: at 16 ranks
# about 36 % of the texts are never read, and about 36 % of what is read are repeats, since each rank shuffles the files with its own seed before it takes its slice. huggingface/datasets, issue 5696, 2023: without a
# seed, nodes shuffle their shards differently.
#
# ### 10. A ring that is slower than a gather
#
# Attention on eight ranks of `sp` gathered all keys and values; its slowest rank had 17 units of work. Now keys and values go round in a ring, so that no rank holds them all. All values are
# right, and memory is as hoped. But a step lasts 31 units. A profile of one rank shows long waits for messages.

# %%
guess("19.ring", 1, suspect=..., buy=False)  # a letter, A to L

# %% [markdown]
# **Clue 1: `llmpar.look`.** What do the two send? (`check` has no clue here, all values are right.)

# %% tags=["plumbing"]
tokens, ring = 0.5 * draws(64, 4), mysteries.attend_in_ring
ROWS = P("sp"), P("sp")
dealt = [
    np.array(mysteries.dealt(64, 8, kind), np.int32) for kind in ("all_gather", "ring")
]


def gathers(x, at):
    return lax.all_gather((x, at), "sp", tiled=True)


sent = []
for f, gives in ((gathers, (P(), P())), (ring, ROWS)):
    rows = str(look(on("sp=8", f, ROWS, gives), tokens, dealt[1])).splitlines()
    (row,) = (row for row in rows if row.startswith("in all"))
    sent.append(row.removeprefix("in all").strip())
assert sent[0] == sent[1]
if clue("19.ring", 1):
    say(
        f"A device sends {sent[0]} with a gather, and {sent[1]} with the ring, over sp."
    )

# %%
guess("19.ring", 2, suspect=..., buy=False)  # again, with what you know now

# %% [markdown]
# **Clue 2: a trace of all ranks** (a sign for each unit of time: # works, · waits), and where the order of the tokens comes from.

# %% tags=["plumbing"]
(_, tiles), (_, even) = (
    run("sp=8", ring, ROWS, ROWS, tokens[at], at) for at in dealt[::-1]
)
assert (tiles.max(0).sum(), even.max(0).sum()) == (31, 17)
if clue("19.ring", 2):
    for rank, hops in enumerate(tiles):
        spans = (
            "#" * n + "·" * (most - n)
            for n, most in zip(hops, tiles.max(0), strict=True)
        )
        print(f"rank {rank}: {'|'.join(spans)}")
    print(f"   BALANCED = {mysteries.BALANCED}")
    program(mysteries.dealt)

# %%
attempt("19.ring", ...)  # your last word

# %% tags=["plumbing"]
at = np.array(mysteries.cured_dealt(64, 8, "ring"), np.int32)
values, tiles = run("sp=8", ring, ROWS, ROWS, tokens[at], at)
before = run("sp=8", ring, ROWS, ROWS, tokens[dealt[1]], dealt[1])[0]
assert np.allclose(values[np.argsort(at)], before[np.argsort(dealt[1])], atol=1e-5)
assert tiles.max(0).sum() == 17
unmask("19.ring", mysteries.cured_dealt, 2, f"{tiles.max(0).sum()} units")

# %% [markdown]
# A token sees what is before it, so rank 0 has work in one round, and rank 7 in all eight, 31 units together. (The trace is drawn as if each round waited for all ranks. Without that rank 7 has 31 units still. Time is counted here in tiles of scores, not measured.) In public: AI-Hypercomputer/maxtext, pull request
# 4537, 2026: the ring came first, without the balanced order that MaxText had; "At high CP, roughly half of attention compute is wasted". There the ring refused the option; here it is ignored without a word. [Lesson 06](06_long_sequences.ipynb) has the orders.
#
# ### On your cluster
#
# ```
# llmpar check my_code:program my_code:reference       the first value that one device has differently
# llmpar inspect --mesh "fsdp=8" --zero 1              what a step holds and sends
# ```
