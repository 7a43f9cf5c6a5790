# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 25
#     needs: ["00", "02", "12"]
#     question: What does your own JAX function send, and which messages do you not want?
#     objectives:
#     - Read what any JAX program sends, line by line, before it runs.
#     - Find the line where a value loses the cut that it should keep, and repair it by one constraint.
#     - Say what explicit axes refuse, and name the arrow that is missing.
# ---

# %% [markdown]
# # 13 · Your own code is right. What does it send?
#
# Here is plain JAX. Its weights are cut over the devices of an axis `X`, as FSDP cuts them. Its loss is right to the last digits. There
# is no collective in the code. So what do the devices send, and is it what you want?

# %% tags=["plumbing"]
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # simulated devices; real ones: On your cluster

from llmpar.parallel.mesh import use_devices

devices = use_devices()

import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from llmpar import MeshExplorer, check, draw, explain, from_type, look
from llmpar.draw.scene import show
from llmpar.lessons import attempt, find, hint, met, opened, say, solution

N = 4  # of the eight
mesh = jax.make_mesh((N,), ("X",), axis_types=(AxisType.Auto,), devices=devices[:N])
jax.set_mesh(mesh)  # a P(…) below speaks of this mesh

rng = np.random.default_rng(0)
SHAPES = {"embed": (512, 64), "up": (64, 256), "down": (256, 64), "out": (64, 512)}
BATCH, SEQ = 16, 128
draws = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
weights = {name: np.float32(w / len(w) ** 0.5) for name, w in draws.items()}
text = rng.integers(0, 512, (BATCH, SEQ))


def total(seen):
    """All bytes that a device sends."""
    return sum(row["bytes_sent"] for row in seen.rows)


def body(f):
    """The lines of a function, and the number of the first."""
    lines, first = inspect.getsourcelines(f)
    return [line.partition("#")[0].strip() for line in lines[1:]], first + 1


def drawn(programs):
    """The lines of the last program; what each sends for a line of the same text."""
    lines, columns = body([*programs.values()][-1][0])[0], {}
    for name, (f, seen) in programs.items():
        own, first = body(f)
        for row in seen.rows:
            number = row["source"].rpartition(":")[2]
            at = int(number) - first if number.isdigit() else -1
            line = own[at] if 0 <= at < len(own) else "(no line is named)"
            lines += [line] * (line not in lines)
            sent = columns.setdefault(name, {}).setdefault(lines.index(line), [])
            sent.append((row["collective"], row["bytes_sent"]))
    return draw.program(lines, columns, "What a device sends for each line")


# %%
CUTS = {"embed": P(None, "X"), "up": P("X"), "down": P("X"), "out": P("X")}
params = {name: jax.device_put(weights[name], CUTS[name]) for name in weights}
tokens = jax.device_put(text, P("X"))  # the rows of a batch are dealt out
MeshExplorer.of(params | {"tokens": tokens})

# %% [markdown]
# Each stripe is what one device holds of `embed`, a row of 64 numbers for each of 512 words: 16 columns of all rows. The other weights are cut
# along their rows. Of the tokens each device has some rows. (You can choose another array in the picture.) The function predicts the next
# token; its letters are `b` rows, `s` positions, `d` width:


# %%
def loss(params, tokens):
    x = params["embed"][tokens]  # b s d
    h = jax.nn.gelu(x @ params["up"])
    y = x + h @ params["down"]
    logits = y @ params["out"]
    scores = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()


# %% tags=["plumbing"]
right = float(loss(weights, text))  # on one device
value = float(jax.jit(loss)(params, tokens))
assert np.isclose(value, right, rtol=1e-5)

# %% [markdown]
# ## Predict: what should it send?
#
# In a forward pass FSDP gathers each weight once, when it is needed, and does not keep it ([lesson 04](04_zero.ipynb)). The four
# weights have 98,304 numbers of 4 bytes. **How many bytes would a device send, if the program sent only these gathers?**

# %%
bytes_sent = ...
attempt("13.sent", bytes_sent, devices=N)

# %% [markdown]
# `llmpar.look` compiles a function for its arguments, and does not run it. It reads from the compiled program what a device sends for
# each line:

# %%
before = look(loss, params, tokens)
met("13.sent", total(before), "this program sends")
if opened("13.sent"):
    show(drawn({"sent": (loss, before)}))

# %% tags=["plumbing"]
gathered = sum(w.nbytes for w in weights.values()) * (N - 1) // N
sums = [row for row in before.rows if row["collective"] == "all-reduce"]
numbers = BATCH * SEQ * (256 + 64 + 512)  # of h, y and logits
assert round(total(before) / gathered) == 35
assert {row["axes"] for row in sums} == {("X",)}
sent = sum(row["bytes_sent"] for row in sums if row["bytes_sent"] > 100)
assert sent == 2 * 4 * numbers * (N - 1) // N, (sent, numbers)

# %% [markdown]
# ## What each line sends
#
# Your number is what FSDP would send. This program sends 35 times as many bytes. Here is all that `look` says. `In[3]:5` is line 5 of the
# cell that ran as `In[3]`, `logits = …`. `{U:X}` is an unfinished sum over `X`: each device has a partial sum, and the all-reduce adds them
# up.

# %% tags=["plumbing"]
before if opened("13.sent") else None

# %% [markdown]
# It makes all-reduces of `h`, of `y` and of the logits, which are activations of the whole batch. XLA's *partitioner*, which
# splits the program over the devices, chose these. It keeps every value right ([lesson 12](12_readings.ipynb)), so no test of
# the loss can find it. Which line is the cause?
#
# ## Predict: what is the layout of `x`?
#
# A *layout* writes after each dim the axis that cuts it. `tokens` are `b/X s`: their rows are cut. `embed` is `v d/X`, with `v`
# for the vocabulary: its columns are cut. The first line looks up rows of `embed`, so `x` has the dims `b s d`. **Is `x` then
# `b/X s d`, `b s d/X` or `b s d`?**

# %%
layout_of_x = ...
attempt("13.lookup", layout_of_x)

# %%
x = jax.jit(lambda params, tokens: params["embed"][tokens])(params, tokens)
met("13.lookup", from_type(x, "bsd"))
shown = opened("13.lookup")
AT_FIRST = "x[:, 0]"  # at the first position: rows b down, width d across
MeshExplorer.of({AT_FIRST: x[:, 0]}) if shown else None

# %% tags=["plumbing"]
assert str(from_type(x, "bsd")) == "b s d/X"

# %% [markdown]
# ## One axis, two dims
#
# Every device has *all* rows of the batch, and a quarter of the numbers of each. One axis can cut only one dim of a value, and here two
# dims could have `X`: `b` from the tokens and `d` from `embed`. No line says which one, and the partitioner chose `d`. The next lines
# follow from that: `x @ up` sums over `d`, each device has only a partial sum, so `h` of the whole batch must be summed over the devices.
#
# ### Exercise (core): say it in one line
#
# `jax.lax.with_sharding_constraint(x, P(…))` sets the layout of a value inside a program. `P` has an entry for each dim, in
# order: an axis, or None. Write the function that returns `x` with each row on the device that has the tokens of this row.


# %%
def by_rows(x): ...


attempt("13.cure", by_rows)

# %% tags=["plumbing"]
by_rows = find("13.cure").solution  # goes on with the right one, whatever stands above

# %% [markdown]
# Here is the same function with that line:


# %%
def cured(params, tokens):
    x = params["embed"][tokens]  # b s d
    x = by_rows(x)
    h = jax.nn.gelu(x @ params["up"])
    y = x + h @ params["down"]
    logits = y @ params["out"]
    scores = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()


after = look(cured, params, tokens)
show(drawn({"as it was": (loss, before), "with one line more": (cured, after)}))

# %% tags=["plumbing"]
value = float(jax.jit(cured)(params, tokens))
assert np.isclose(value, right, rtol=1e-5)
assert total(after) < 1.1 * gathered and total(before) > 30 * total(after)
kept = [row["shape"] for row in after.rows if row["collective"] == "all-gather"]
assert {SHAPES["up"], SHAPES["down"], SHAPES["out"]} <= set(kept)
print(f"sent: {total(before):,} B, now {total(after):,} B;", end=" ")
print(f"loss: {right:.5f} on one device, {value:.5f} on {N}")

# %% [markdown]
# ## Now it sends weights
#
# It sends nearly what FSDP should send. In place of the table `embed` the partitioner sends the rows that were looked up: here as many
# bytes, 96 KiB, and 6 KiB of tokens. The loss is the same. And `x` is cut as the tokens are:

# %% tags=["plumbing"]
x = jax.jit(lambda params, tokens: by_rows(params["embed"][tokens]))(params, tokens)
MeshExplorer.of({AT_FIRST: x[:, 0]})

# %% [markdown]
# ## And a whole training step?
#
# The loss alone sends a 34th of what it sent before. `look` also takes `jax.value_and_grad` of a function. Here are both, by collective: a
# step sends an eighteenth.

# %% tags=["plumbing"]
bars = []
for name, f in {"as it was": loss, "with one line more": cured}.items():
    parts = {}
    for row in look(jax.value_and_grad(f), params, tokens).rows:
        kind = row["collective"]
        parts[kind] = parts.get(kind, 0) + row["bytes_sent"]
    bars.append((name, parts))
roles = {"all-reduce": "network", "all-gather": "links", "all-to-all": "grid"}
show(draw.memory_bars(bars, title="Bytes that a device sends in a step", roles=roles))

# %% tags=["plumbing"]
steps = [sum(parts.values()) for _, parts in bars]
assert round(steps[0] / steps[1]) == 18, steps

# %% [markdown]
# ## Explicit axes stop at that line
#
# The mesh above has `AxisType.Auto`: the partitioner chooses. Since JAX 0.9 `jax.make_mesh` makes *explicit* axes by default: where a layout
# is ambiguous, JAX refuses the line. Here are the same function and the same cuts:


# %%
def stopped(f, *args):
    """The error that ends a program."""
    try:
        jax.jit(f)(*args)
    except Exception as error:
        return error


typed = jax.make_mesh((N,), ("X",), devices=devices[:N])
with jax.set_mesh(typed):
    typed_params = {name: jax.device_put(weights[name], CUTS[name]) for name in weights}
    typed_tokens = jax.device_put(text, P("X"))
    error = stopped(loss, typed_params, typed_tokens)
say(f"{type(error).__name__}: {error}")

# %% [markdown]
# `P('X', None, 'X')`: two dims of `x` would be cut by `X`, and JAX refuses that before anything runs. Unless the line names the result's
# sharding, explicit axes also refuse a matmul of two matrices that are both cut along the dim that is summed, such as the next one.


# %%
def squares(x, w):
    return jnp.einsum("bd,df->bf", x * x, w)


with jax.set_mesh(typed):
    a = jax.device_put(draws["up"], P(None, "X"))
    w = jax.device_put(draws["down"], P("X"))
    error = stopped(squares, a, w)

# %% [markdown]
# JAX stops it. **Which collective is missing** after this matmul, if each device needs the whole result?

# %%
missing = ...
attempt("13.missing", missing)

# %% [markdown]
# `llmpar.explain` turns JAX's long message into the arrow that is missing, and what to write (it calls the dims of the result `b s`):

# %%
say(explain(error))


# %%
def finished(x, w):
    return jnp.einsum("bd,df->bf", x * x, w, out_sharding=P(None, None))


with jax.set_mesh(typed):
    value, seen = jax.jit(finished)(a, w), look(finished, a, w)
print("sent:", *(f"{row['collective']}, {row['bytes_sent']:,} B" for row in seen.rows))

# %% tags=["plumbing"]
assert np.allclose(value, draws["up"] ** 2 @ draws["down"], rtol=1e-3, atol=1e-3)
assert "(all-reduce over X)" in explain(error)
assert [row["collective"] for row in seen.rows] == ["all-reduce"]
assert total(seen) == 2 * value.nbytes * (N - 1) // N

# %% [markdown]
# It runs, and sends one sum: `out_sharding` sets the layout of the result, here whole on each device, so JAX finishes the sum.
#
# ## Keep: count before you trust
#
# 1. Right values do not show what was sent. `llmpar.look(f, *args)` shows it for each line, before anything runs.
# 2. One axis cuts one dim of a value. Where two dims could have it, the partitioner chooses, and later lines follow.
# 3. Look first for activations of the whole batch. One `with_sharding_constraint` at the line that loses the cut restores it.
# 4. With explicit axes JAX refuses a line where a layout is ambiguous. `llmpar.explain` names the arrow that is missing.

# %% [markdown]
# ## Further
#
# Bring your own function, cure this one without a constraint, and find out which harmless lines send.
#
# ### Your own function
#
# Arguments can be arrays, or shapes with shardings as here. Put your own function in its place; with `cure=True` `look` searches for a line such as the one in `by_rows`.
# The page `docs/your-own-code.md` has the terminal, GPUs and TPUs that are not here, and what `look` cannot read.

# %%
shape = jax.ShapeDtypeStruct((BATCH, SEQ, 64), "bfloat16", sharding=x.sharding)
look(lambda x: (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).mean(), shape)

# %% [markdown]
# ### Exercise (stretch): one cut in place of a constraint
#
# Take the constraint away again. **Which array would you cut along which dim** (0 is the first) so that `x` keeps its rows?

# %%
other_cut = {"array": ..., "dim": ...}
attempt("13.one_p", other_cut)

# %% tags=["plumbing"]
answer = find("13.one_p").solution
cut = [None] * int(answer["dim"]) + ["X"]
moved = {answer["array"]: jax.device_put(weights[answer["array"]], P(*cut))}
least = look(loss, params | moved, tokens)
rest = [row for row in least.rows if row["collective"] != "all-gather"]
assert total(least) - sum(row["bytes_sent"] for row in rest) == gathered

# %% [markdown]
# ### Explicit axes, followed
#
# (The first example in chapter 10 of *How to Scale Your Model*, Austin et al. 2025, in its first version, was stopped like `squares`. Later
# versions ask for `AxisType.Auto`.) The function from above, on explicit axes. Its first line now has the layout of `x`, and it sends what
# the cured one sends:


# %%
def in_types(params, tokens):
    x = params["embed"].at[tokens].get(out_sharding=P("X"))
    h = jax.nn.gelu(x @ params["up"])
    y = x + h @ params["down"]
    logits = y @ params["out"]
    scores = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()


with jax.set_mesh(typed):
    same = look(in_types, typed_params, typed_tokens)
    value = float(jax.jit(in_types)(typed_params, typed_tokens))
assert np.isclose(value, right, rtol=1e-5) and total(same) == total(after)
print(f"loss: {value:.5f}; sent: {total(same):,} B, as in the cured one")

# %% [markdown]
# ### Exercise (stretch): harmless lines
#
# Here `x` is `b s d/X`, with `d` of 64. **Does each of these lines send `"nothing"`, `"little"` or `"much"`?**
#
# | name | line |
# |---|---|
# | softmax | `jax.nn.softmax(x)` over `d` |
# | top_k | `jax.lax.top_k(x, 2)` over `d` |
# | halves | `x[..., :32] * x[..., 32:]` |
# | every second | `x[..., ::2] * x[..., 1::2]` |
# | cumsum | `jnp.cumsum(x, 1)` over `s` |

# %%
sends = {
    "softmax": ...,
    "top_k": ...,
    "halves": ...,
    "every second": ...,
    "cumsum": ...,
}
attempt("13.harmless", sends)

# %%
HARMLESS = {
    "softmax": jax.nn.softmax,
    "top_k": lambda x: jax.lax.top_k(x, 2)[0],
    "halves": lambda x: x[..., :32] * x[..., 32:],
    "every second": lambda x: x[..., ::2] * x[..., 1::2],
    "cumsum": lambda x: jnp.cumsum(x, 1),
}
x = jax.device_put(np.ones((BATCH, SEQ, 64), np.float32), P(None, None, "X"))
found = {name: look(f, x) for name, f in HARMLESS.items()}
size = x.nbytes * (N - 1) // N  # to gather x
words = {}
for name, seen in found.items():
    much = sum(total(seen) > size * share for share in (0, 0.5))
    words[name] = ("nothing", "little", "much")[much]
met("13.harmless", words)
rows = [
    [(row["collective"], row["bytes_sent"]) for row in v.rows] for v in found.values()
]
sent = {"sent": {place: row for place, row in enumerate(rows) if row}}
show(draw.program([*found], sent, f"Lines on x, which has {x.nbytes:,} bytes"))

# %% tags=["plumbing"]
assert find("13.harmless").solution == words

# %% [markdown]
# Fused gates and rotary positions are often written with halves. With neighbours as pairs nothing is sent.

# %% [markdown]
# ### Keep it in a test
#
# The cure is one line, and the next commit may lose it. Is it still the same function? `check` compares the program on its mesh with one
# device, and names the line where they part.

# %%
same = check(cured, loss, params, tokens)
assert same
say(same)

# %% [markdown]
# And does it still send the same? An assertion says what must not be sent. Give `fails_on` a program that does send it: then you see
# that the assertion can fail. `pin` keeps every line in a small file: the first run writes it, and later runs compare.

# %% tags=["plumbing"]
import tempfile
from pathlib import Path

os.environ.pop("CI", None)  # where it is set, pin writes no file
file = Path(tempfile.mkdtemp()) / "hidden.comm"


def refusal(act):
    """What an assertion says that fails."""
    try:
        act()
    except AssertionError as error:
        return str(error)


# %%
after.forbids(before.rows[0]["arrow"], fails_on=before)


def hidden(params, tokens, keep=by_rows):
    x = keep(params["embed"][tokens])
    return jax.nn.gelu(x @ params["up"]).mean()


few = jax.device_put(text[:4, :64], P("X"))
kept = look(hidden, params, few).pin(file)  # written
look(hidden, params, few).pin(file)  # compared
lost = look(hidden, params, few, keep=lambda x: x)  # a commit later
failure = refusal(lambda: lost.pin(file))
assert "sends otherwise than" in failure
lost - kept

# %% tags=["plumbing"]
assert [line[0] for line in (lost - kept).lines].count("+") > 0
assert all(line[1] in failure for line in (lost - kept).lines)
sums = [row for row in lost.rows if row["collective"] == "all-reduce"]
assert sums[0]["source"] in failure and total(lost) > 5 * total(kept)

# %% [markdown]
# The test fails, and names the line: without the constraint `hidden` has an all-reduce of the whole batch again. In a test of yours it is one
# line, `look(step, params, batch).pin("tests/step.comm")`.
#
# ### On your cluster
#
#     llmpar inspect --program my_model:step              what look says, from the terminal
#     llmpar inspect --program my_model:step --json       the same as data, to compare in a test
#     llmpar inspect --hlo step.txt --mesh "X=4 Y=2"      a text that a compiler wrote
