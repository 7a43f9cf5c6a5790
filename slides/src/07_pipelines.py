# %% [markdown] tags=["slide"]
# ## Pipelines: stages, and the bubble
#
# Each stage holds some layers and hands its result on. With one batch, one of $p$ stages works; the others wait.
#
# <footer>Huang et al. 2018 (GPipe) · lesson <code>notebooks/07_pipelines</code> · <code>llmpar schedule gpipe --stages 4 --microbatches 1</code></footer>

# %%
from llmpar import draw
from llmpar.draw import scene
from llmpar.schedules import make
from llmpar.timetable import timetable

P = 4
naive = timetable(make("gpipe", P, 1))
assert naive.bubble_fraction == (P - 1) / P
scene.show(draw.timeline(naive))

# %% [markdown] tags=["notes"]
# **Ask:** how much faster is this than one device? Not at all: it is the same work, one after the other. It holds a model that one
# device cannot, and that is all.
#
# **Misunderstanding:** that the forward arrow is expensive. What crosses is one activation, b·s·d numbers per hop; that is why
# pipelines get the slowest links. Waiting is what costs.
#
# **Source:** Huang et al. 2018 (GPipe), figure 2b. Papers write m for our u, the number of microbatches. B is drawn twice as long as F: two products instead of one.

# %% [markdown] tags=["slide"]
# ## Microbatches fill it
#
# All forwards, then all backwards (GPipe). Idle share of the total: $(p-1)/(u+p-1)$. Beware: papers also give idle over
# *ideal*: $(p-1)/u$.
#
# <footer>Huang et al. 2018; Narayanan et al. 2021 · <code>notebooks/07_pipelines</code> · <code>llmpar schedule gpipe --stages 4 --microbatches 4</code></footer>

# %%
U = 4
filled = timetable(make("gpipe", P, U))
assert filled.makespan == 3 * (U + P - 1)
assert (
    abs(filled.bubble_fraction - (P - 1) / (U + P - 1)) < 1e-12
    and abs(filled.bubble_over_ideal - (P - 1) / U) < 1e-12
)
scene.show(draw.timeline(filled))

# %% [markdown] tags=["notes"]
# **Ask:** this picture: 43 % idle, or 75 %? Both: 9 of 21 time units, and 9 on top of an ideal 12.
#
# **Misunderstanding:** that microbatches change the result. They are gradient accumulation: the same sum, in another order.
#
# **Source:** Narayanan et al. 2021. The grey area under a row is what the stage holds: here every microbatch, until the backward
# comes.

# %% [markdown] tags=["slide"]
# ## How many microbatches are enough?
#
# For at most 10 % idle: $u \ge 9\,(p-1)$. Four stages need 27 microbatches, eight need 63.
#
# <footer>Huang et al. 2018 (GPipe) · lesson <code>notebooks/07_pipelines</code> · <code>llmpar schedule gpipe --stages 8 --microbatches 63</code></footer>

# %%
import base64
import io

import matplotlib.pyplot as plt
from IPython.display import display

from llmpar.draw.scene import LIGHT

COUNTS = (1, 2, 4, 8, 16, 32, 64)
idle = {p: [timetable(make("gpipe", p, m)).bubble_fraction for m in COUNTS] for p in (2, 4, 8)}
for p, needed in {4: 27, 8: 63}.items():
    assert (
        needed
        == 9 * (p - 1)
        == next(m for m in range(1, 100) if timetable(make("gpipe", p, m)).bubble_fraction <= 0.1 + 1e-12)
    )
figure, axes = plt.subplots(figsize=(9.6, 3.9), dpi=150)
for (p, curve), (color, marker) in zip(idle.items(), (("fsdp", "^"), ("dp", "o"), ("s4", "s")), strict=True):
    axes.plot(range(len(COUNTS)), curve, color=LIGHT[color], marker=marker, markersize=9, linewidth=3)
    axes.text(
        -0.15, curve[0], f"p = {p}", fontsize=15, weight="bold", color=LIGHT[color], ha="right", va="center"
    )
axes.axhline(0.1, color=LIGHT["soft"], linestyle="--")
axes.text(-0.15, 0.12, "10 %", fontsize=14, color=LIGHT["soft"], ha="right")
axes.set_xticks(range(len(COUNTS)), COUNTS)
axes.set(
    xlim=(-0.9, 6.2),
    ylim=(0, 1),
    yticks=[0, 0.25, 0.5, 0.75, 1],
    yticklabels=["0", "25 %", "50 %", "75 %", "100 %"],
)
axes.set_xlabel("microbatches u", fontsize=14)
axes.set_title("Idle share of the total, simulated", fontsize=15, loc="left", weight="bold")
axes.tick_params(labelsize=14)
axes.spines[["top", "right"]].set_visible(False)
figure.savefig(png := io.BytesIO(), format="png", bbox_inches="tight")
plt.close(figure)
said = [
    f"{p} stages: " + ", ".join(f"{x:.0%} at u = {m}" for m, x in zip(COUNTS, curve, strict=True))
    for p, curve in idle.items()
]
display({"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": "\n".join(said)}, raw=True)

# %% [markdown] tags=["notes"]
# **Ask:** what stops you from 1,000 microbatches? The global batch: at one row per microbatch, u rows per pipeline. And GPipe holds
# the activations of all of them.
#
# **Misunderstanding:** that a smaller microbatch is free. Below some hundreds of tokens a product no longer keeps the chip busy.
#
# **Source:** each point is a simulated timetable; the formula agrees to rounding.
