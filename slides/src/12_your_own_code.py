# %% [markdown] tags=["slide"] minutes=1 section="Your own code"
# ## The loss is right. What does it send?
#
# On four devices `X` cuts weights as FSDP does, and rows of `tokens`. **Bet:** which line sends most?
#
# <footer>lesson <code>notebooks/13_your_own_code</code></footer>

# %%
import inspect

import jax
import jax.numpy as jnp
import numpy as np
from deck import draw, show, steps
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from llmpar import MeshExplorer, explain, look
from llmpar.parallel.mesh import use_devices

devices = use_devices()[:4]
mesh = jax.make_mesh((4,), ("X",), axis_types=(AxisType.Auto,), devices=devices)
SHAPES = {"embed": (512, 64), "up": (64, 256), "down": (256, 64), "out": (64, 512)}
CUTS = {"embed": P(None, "X")} | dict.fromkeys(("up", "down", "out"), P("X"))


def loss(params, tokens):
    x = params["embed"][tokens]
    h = jax.nn.gelu(x @ params["up"])
    y = x + h @ params["down"]
    logits = y @ params["out"]
    logp = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(logp, tokens[:, 1:, None], 2).mean()


def cured(params, tokens):
    x = params["embed"][tokens]
    x = jax.lax.with_sharding_constraint(x, P("X"))
    h = jax.nn.gelu(x @ params["up"])
    y = x + h @ params["down"]
    logits = y @ params["out"]
    logp = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(logp, tokens[:, 1:, None], 2).mean()


def body(f):
    """The lines of a function, and the number of the first."""
    lines, first = inspect.getsourcelines(f)
    return [line.strip() for line in lines[1:]], first + 1


def sent(f, seen, lines):
    """What is sent for each of the lines."""
    own, first = body(f)
    rows = {}
    for row in seen.rows:
        line = own[int(row["source"].rpartition(":")[2]) - first]
        rows.setdefault(lines.index(line), []).append((row["collective"], row["bytes_sent"]))
    return rows


with jax.set_mesh(mesh):
    params = {name: jax.device_put(np.ones(SHAPES[name], np.float32), CUTS[name]) for name in SHAPES}
    tokens = jax.device_put(np.ones((16, 128), np.int32), P("X"))
    before, after = look(loss, params, tokens), look(cured, params, tokens)
    lies = [jax.jit(lambda e, t: e[t])(params["embed"], tokens)]
    lies += [jax.device_put(lies[0], P("X"))]
show(draw.program(body(loss)[0], {}), "The loss of a next token")

# %% [markdown] tags=["notes"]
# **Ask:** how many bytes should a device send? Each weight is gathered once: three quarters of 98,304 numbers, 295 kB.
#
# **Misunderstanding:** that a program without a collective sends nothing. XLA's partitioner adds what the cuts make necessary.
#
# **Source:** lesson 13. The batch has 16 rows of 128 tokens, width 64, 512 words.

# %% [markdown] tags=["slide"] minutes=1
# ## 35 times as much, and no weight
#
# `llmpar.look(loss, params, tokens)` reads the compiled program: three all-reduces of **activations of the whole batch**.
#
# <footer>lesson <code>notebooks/13_your_own_code</code> · <code>llmpar.look</code></footer>

# %%
WANTED = sum(4 * rows * columns for rows, columns in SHAPES.values()) * 3 // 4
total = lambda seen: sum(row["bytes_sent"] for row in seen.rows)
assert 34 < total(before) / WANTED < 35.5
lines = body(loss)[0]
show(draw.program(lines, {"sent": sent(loss, before, lines)}))

# %% [markdown] tags=["notes"]
# **Ask:** which of these lines is to blame? The largest bar is the logits' line, and it only inherits.
#
# **Misunderstanding:** that a test would find it. Every value is right: it is only slow, and there is no error.
#
# **Source:** compiled here, for this slide; JAX 0.10 and 0.12 send the same.

# %% [markdown] tags=["slide"] minutes=2
# ## One axis, and two dims that could have it
#
# `tokens` are `b/X s`, `embed` is `v d/X`. Is `x = embed[tokens]` then cut along `b`, or along `d`? One axis cuts one dim.
#
# <footer>lesson <code>notebooks/13_your_own_code</code> · <code>MeshExplorer.of(x)</code></footer>

# %%
assert [str(x.sharding.spec) for x in lies] == ["P(None, None, 'X')", "P('X',)"]
titles = ("The partitioner's choice: b s d/X", "What you meant: b/X s d")
pictures = [MeshExplorer.of({"x": x}).scene for x in lies]
for picture, title in zip(pictures, titles, strict=True):
    show(picture, title)

# %% [markdown] tags=["notes"]
# Above, columns are cut: each device has all rows and a quarter of each. Below, rows are cut, and each row is whole.
#
# **Ask:** what happens to `x @ up` in the upper case? It sums over `d`, so each device has terms of the whole batch.
#
# **Misunderstanding:** that the later lines are wrong. They inherit what one lookup decided.
#
# **Source:** `MeshExplorer.of` draws what JAX says of real arrays.

# %% [markdown] tags=["slide"] minutes=2
# ## One more line, and it sends 1/34
#
# The constraint sets the layout of `x`. Weights are sent again, once each; **the loss is the same**.
#
# <footer>lesson <code>notebooks/13_your_own_code</code> · <code>jax.lax.with_sharding_constraint</code></footer>

# %%
assert 33 < total(before) / total(after) < 35
lines = body(cured)[0]
show(draw.program(lines, {"one line more": sent(cured, after, lines)}))

# %% [markdown] tags=["notes"]
# **Ask:** could you cure it without the constraint? Cut `embed` by words, `v/X d`: then nothing but `tokens` wants `X`.
#
# **Misunderstanding:** that constraints cost something. They say where a value lies; here that saves 97 %.
#
# **Source:** compiled here. A whole training step falls from 15.5 MiB to 870 KiB (lesson 13).

# %% [markdown] tags=["slide"] minutes=2
# ## Which of these lines send?
#
# `x` is `b s d/X`, 512 KiB. **Bet** nothing, little or much for each.
#
# <footer>lesson <code>notebooks/13_your_own_code</code>, exercise <code>13.harmless</code></footer>

# %%
HARMLESS = {
    "jax.nn.softmax(x)": jax.nn.softmax,
    "jax.lax.top_k(x, 2)": lambda x: jax.lax.top_k(x, 2)[0],
    "x[..., :32] * x[..., 32:]": lambda x: x[..., :32] * x[..., 32:],
    "x[..., ::2] * x[..., 1::2]": lambda x: x[..., ::2] * x[..., 1::2],
    "jnp.cumsum(x, 1)": lambda x: jnp.cumsum(x, 1),
}
with jax.set_mesh(mesh):
    found = [look(f, lies[0]).rows for f in HARMLESS.values()]
assert [sum(row["bytes_sent"] for row in rows) > 2e5 for rows in found] == [False, True, True, False, False]
rows = {i: [(row["collective"], row["bytes_sent"]) for row in rows] for i, rows in enumerate(found) if rows}
steps(draw.program([*HARMLESS], {"sent": {}}), draw.program([*HARMLESS], {"sent": rows}))

# %% [markdown] tags=["notes"]
# **Ask:** why do halves send, and every second one does not? Columns 0 and 32 lie on two devices, 0 and 1 on one.
#
# **Misunderstanding:** that slices are free. Within a device they are.
#
# **Source:** compiled here. Halves are how fused gates and rotary positions are often written.

# %% [markdown] tags=["slide"] minutes=2
# ## Explicit axes refuse instead of choosing
#
# `jax.make_mesh` makes them by default now, so published code stops: the first example of the scaling book's chapter 10, in its first
# version. `llmpar.explain` names the arrow that is missing:
#
# <footer>Austin et al. 2025, chapter 10: code of that kind · lesson <code>notebooks/13_your_own_code</code></footer>

# %%
from IPython.display import Markdown

with jax.set_mesh(jax.make_mesh((4,), ("X",), devices=devices)):
    a, w = jax.device_put(jnp.ones((8, 16)), P(None, "X")), jax.device_put(jnp.ones((16, 4)), P("X"))
    try:
        jnp.einsum("bd,df->bf", a * a, w)
        said = ""
    except Exception as error:
        said = explain(error)
assert "(all-reduce over X)" in said
Markdown(f'```python\njnp.einsum("bd,df->bf", x * x, w)  # both cut by X along d\n```\n\n> {said}')

# %% [markdown] tags=["notes"]
# **Ask:** and our lookup on explicit axes? JAX refuses it at that line: `P('X', None, 'X')` has duplicate entries.
#
# **Misunderstanding:** that an error is worse than a program that runs. It comes before the bill.
#
# **Source:** Austin et al. 2025, *How to Scale Your Model*; later versions ask for `AxisType.Auto`.

# %% [markdown] tags=["slide"] minutes=1
# ## Mystery: the norm that grows with tp
#
# Gradients `w`, cut over `tp`, and `b`, which is not. Which line is wrong?
#
# ```python
# s = sum(w**2)
# s += sum(b**2)
# n = sqrt(psum(s, "tp"))
# ```
#
# <footer>lesson <code>notebooks/19_mysteries</code></footer>

# %% place="beside"
weight_sq, bias_sq = 512.0, 288.0
logged = [(weight_sq + n * bias_sq) ** 0.5 for n in (1, 2, 4, 8)]
assert logged[0] < 0.6 * logged[-1]
names = [("the log says", logged, "measured", "o", False)]
names += [("one device", [logged[0]] * 4, "soft", None, True)]
show(draw.curves(names, [1, 2, 4, 8], "tp", "gradient norm", wide=320))

# %% [markdown] tags=["notes"]
# **Ask:** raise a hand: a missing sum, something counted twice, or a mean of means? (Counted: each rank adds the whole bias.)
#
# **Misunderstanding:** that the loss would show it. The loss is the same; only clipping begins earlier.
#
# **Source:** NVIDIA-NeMo/RL, pull request 3788, and ROCm/TransformerEngine, pull request 715, both 2026. `llmpar check` names the line.

# %% [markdown] tags=["slide"] minutes=0
# ## Twelve suspects, and what tells them apart
#
# | what happens | what shows it |
# |---|---|
# | a sum is missing, or a complete value is summed again | `llmpar.check` |
# | ranks compute the same value, or draw different ones, and should not | `llmpar.check` |
# | a mean of means, a division too many, a wrong group of ranks | `llmpar.check` |
# | an array stays whole, is cut over one rank, or is gathered again | its layout, its bytes on a device |
# | ranks have unequal work, or wait for messages while they have work | a trace of all ranks |
#
# <footer>lesson <code>notebooks/19_mysteries</code> · <code>llmpar check my_code:program my_code:reference</code></footer>

# %% [markdown] tags=["notes"]
# **Ask:** which of these would your tests find? Those of values find the first three rows only, and only if they run on several devices.
#
# **Misunderstanding:** that a falling loss proves that a program is right. All ten cases of the lesson have a plausible one.
#
# **Source:** lesson 19: ten programs with public sources, each with its cure, run and asserted.
