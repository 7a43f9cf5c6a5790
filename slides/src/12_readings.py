# %% [markdown] tags=["slide"] minutes=1
# ## A sum is forgotten. Which program is refused?
#
# Two weights are cut over four devices; the line with the sum is missing. The program runs, every shape is right, and this is its result.
#
# <footer>lesson <code>notebooks/12_readings</code></footer>

# %%
import numpy as np
from deck import draw, scene, show

rng = np.random.default_rng(0)
x, up = rng.standard_normal((1, 16)), rng.standard_normal((16, 32)) / 4
down, h = rng.standard_normal((32, 16)) / 4, np.maximum(x @ up, 0)
terms = [(h[:, 8 * r : 8 * r + 8] @ down[8 * r : 8 * r + 8])[0, :5] for r in range(4)]
assert np.allclose(sum(terms), (h @ down)[0, :5])
lines = [(f"device {r}", part, scene.OTHERS[r]) for r, part in enumerate(terms)]
lines += [("their sum, which is right", sum(terms), "good-ground")]
lines += [("the program's answer", terms[0], "bad-ground")]
cells = [(name, [(f"{n:.2f}", role) for n in numbers]) for name, numbers, role in lines]
show(draw.table(cells, title="The result, as each device has it"))

# %% [markdown] tags=["notes"]
# **Ask:** which of four ways to write this program is refused? The poll comes after the next slide: `shard_map`, `shard_map` with its check off, `jit` with shardings, `jit` with explicit types.
#
# **Misunderstanding:** that a wrong result has a wrong shape. A partial sum has the shape of the sum.
#
# **Source:** computed here with NumPy; the lesson shows the same of a program in JAX.

# %% [markdown] tags=["slide"] minutes=1
# ## Who chooses what is sent?
#
# For one model: *Solo* sends nothing, in *Manual* you write each collective, in *Auto* XLA's partitioner chooses, in
# *Explicit* JAX's types decide.
#
# <footer>lesson <code>notebooks/12_readings</code> · <code>llmpar inspect --mesh "dp=2 fsdp=2 tp=2" --mode explicit --types</code></footer>

# %%
from deck import draw, show

from llmpar.inspect.types import types
from llmpar.parallel.mesh import use_devices
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset

use_devices()
rows = types(preset("tiny"), Plan("dp=2 fsdp=2 tp=2"), 8, 32)
assert all(row["layout"] == row["type_says"] for row in rows)
CHOSEN = ("stream b s d", "ffn d m", "ffn b s d +m", "vocab b s d +v")
shown = {row["value"]: row for row in rows if row["value"] in CHOSEN}
assert set(shown) == set(CHOSEN)
cells = [
    (value, [(row["layout"], "cell"), (row["type"], "tp" if "U:" in row["type"] else "cell")])
    for value, row in shown.items()
]
show(draw.table(cells, ("layout of the plan", "JAX's type; coloured: still to be added up"), "Types"))

# %% [markdown]
# `U:tp`, unreduced: an unfinished sum over `tp`, our `+tp`. `R:(dp,fsdp)`, reduced: a whole value, whose *gradient* will be
# such a sum.

# %% [markdown] tags=["notes"]
# **Ask:** which of these values must still be summed, and how do you see it? The ones with `+tp`, in the type `U:tp`: unreduced.
#
# **Misunderstanding:** that a shape tells where a value lives. `b s d` and `b s d +tp` have the same shape.
#
# **Source:** `llmpar inspect --types`: JAX's own types of a traced step, each asserted equal to the plan's layout.

# %% [markdown] tags=["slide"] minutes=1
# ## Poll: refused, right or wrong?
#
# The sum over `tp` is forgotten in four programs. For each: refused, right or wrong?
#
# <footer>Lesson <code>notebooks/12_readings</code></footer>

# %%
OPEN = {
    "Manual: shard_map": [("?", "cell")],
    "Manual, check off": [("?", "cell")],
    "Auto: jit and shardings": [("?", "cell")],
    "Explicit: jit and types": [("?", "cell")],
}
show(draw.table([*OPEN.items()], ("the sum is forgotten",), "Refused, right or wrong?"))

# %% [markdown] tags=["notes"]
# **Ask:** three hands for each row. (Refused, wrong, right, refused.)
#
# **Misunderstanding:** that all four mean the same program. Auto sees the whole computation and adds the sum; the others do what is written.
#
# **Source:** lesson 12 runs all four.

# %% [markdown] tags=["slide"] minutes=1
# ## One mistake, three results
#
# The sum over `tp` is forgotten; or a weight is cut along the wrong dim.
#
# <footer>lesson <code>notebooks/12_readings</code> · <code>llmpar inspect --mesh fsdp=8 --mode auto</code></footer>

# %%
FATES = {
    "Manual": [("refused: shard_map's check", "good-ground"), ("refused: shapes", "good-ground")],
    "Manual, check off": [("WRONG, no error", "bad-ground"), ("refused: shapes", "good-ground")],
    "Auto": [("right: adds the sum", "good-ground"), ("right, sends more, no error", "unsure-ground")],
    "Explicit": [("refused, at the line", "good-ground")] * 2,
}
show(draw.table([*FATES.items()], ("the sum is forgotten", "a wrong cut"), "Two mistakes"))

# %% [markdown] tags=["notes"]
# **Ask:** which cell of this table would your tests find? A test of values finds the wrong value. No test finds what is only slow, unless it counts bytes.
#
# **Misunderstanding:** that Auto is safe. It is safe for values; the traffic is whatever the partitioner finds.
#
# **Source:** each cell is run and asserted in lesson 12; `llmpar.explain` gives the missing arrow for JAX's message.
