# %% [markdown] tags=["slide"]
# ## Pipelines: stages, and the bubble
#
# Each stage holds some layers and hands its result on. With one batch, one of $p$ stages works; the others wait.
#
# <footer>Huang et al. 2018 (GPipe) · <code>llmpar schedule gpipe --stages 4 --microbatches 1</code></footer>

# %%
from IPython.display import Markdown

from llmpar import draw, scene
from llmpar.schedule import closed_forms, make, timetable

P = 4
naive = timetable(make("gpipe", P, 1))
assert naive.bubble_fraction == (P - 1) / P
scene.show(draw.timetable(naive))

# %% [markdown] tags=["notes"]
# **Ask:** how much faster is this than one device? Not at all: it is the same work, one after the other. It holds a model that one
# device cannot, and that is all.
#
# **Misunderstanding:** that the forward arrow is expensive. What crosses is one activation, b·s·d numbers per hop; that is why
# pipelines get the slowest links. Waiting is what costs.
#
# **Source:** Huang et al. 2018 (GPipe), figure 2b. B is drawn twice as long as F: two products instead of one.

# %% [markdown] tags=["slide"]
# ## Microbatches fill it
#
# All forwards, then all backwards (GPipe). Idle share of the total: $(p-1)/(m+p-1)$. Beware: papers also give idle over
# *ideal*: $(p-1)/m$.
#
# <footer>Huang et al. 2018 (GPipe); Narayanan et al. 2021, section 2.2.1 · <code>llmpar schedule gpipe --stages 4 --microbatches 4</code></footer>

# %%
M = 4
filled = timetable(make("gpipe", P, M))
assert filled.makespan == 3 * (M + P - 1)
assert abs(filled.bubble_fraction - (P - 1) / (M + P - 1)) < 1e-12 and abs(filled.bubble_over_ideal - (P - 1) / M) < 1e-12
scene.show(draw.timetable(filled))

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
# For at most 10 % idle: $m \ge 9\,(p-1)$. Four stages need 27 microbatches, eight need 63.
#
# <footer>Huang et al. 2018 (GPipe) · <code>llmpar schedule gpipe --stages 8 --microbatches 63</code></footer>

# %%
import base64
import io

import matplotlib.pyplot as plt
from IPython.display import display

from llmpar.scene import LIGHT

COUNTS = (1, 2, 4, 8, 16, 32, 64)
idle = {p: [timetable(make("gpipe", p, m)).bubble_fraction for m in COUNTS] for p in (2, 4, 8)}
for p, needed in {4: 27, 8: 63}.items():
    assert needed == 9 * (p - 1) == next(m for m in range(1, 100) if timetable(make("gpipe", p, m)).bubble_fraction <= 0.1 + 1e-12)
figure, axes = plt.subplots(figsize=(9.6, 3.9), dpi=150)
for (p, curve), (color, marker) in zip(idle.items(), (("fsdp", "^"), ("dp", "o"), ("s4", "s")), strict=True):
    axes.plot(range(len(COUNTS)), curve, color=LIGHT[color], marker=marker, markersize=9, linewidth=3)
    axes.text(-0.15, curve[0], f"p = {p}", fontsize=15, weight="bold", color=LIGHT[color], ha="right", va="center")
axes.axhline(0.1, color=LIGHT["soft"], linestyle="--")
axes.text(-0.15, 0.12, "10 %", fontsize=14, color=LIGHT["soft"], ha="right")
axes.set_xticks(range(len(COUNTS)), COUNTS)
axes.set(xlim=(-0.9, 6.2), ylim=(0, 1), yticks=[0, 0.25, 0.5, 0.75, 1], yticklabels=["0", "25 %", "50 %", "75 %", "100 %"])
axes.set_xlabel("microbatches m", fontsize=14)
axes.set_title("Idle share of the total, simulated", fontsize=15, loc="left", weight="bold")
axes.tick_params(labelsize=14)
axes.spines[["top", "right"]].set_visible(False)
figure.savefig(png := io.BytesIO(), format="png", bbox_inches="tight")
plt.close(figure)
said = [f"{p} stages: " + ", ".join(f"{x:.0%} at m = {m}" for m, x in zip(COUNTS, curve, strict=True)) for p, curve in idle.items()]
display({"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": "\n".join(said)}, raw=True)

# %% [markdown] tags=["notes"]
# **Ask:** what stops you from 1,000 microbatches? The global batch: at one row per microbatch, m rows per replica. And GPipe holds
# the activations of all of them.
#
# **Misunderstanding:** that a smaller microbatch is free. Below some hundreds of tokens a product no longer keeps the chip busy.
#
# **Source:** each point is a simulated timetable; the formula agrees to rounding.

# %% [markdown] tags=["slide"]
# ## 1F1B: the same bubble, less memory
#
# Start a backward as soon as one is ready. Stage $i$ holds at most $p-i$ microbatches, however many there are: here 4, 3, 2, 1,
# where GPipe would hold 5.
#
# <footer>Narayanan et al. 2021, section 2.2.1 · <code>llmpar schedule 1f1b --stages 4 --microbatches 5</code></footer>

# %%
M = 5
table, gpipe = timetable(make("1f1b", P, M)), timetable(make("gpipe", P, M))
assert table.makespan == gpipe.makespan
assert table.peak_live() == [4, 3, 2, 1] == closed_forms(P, M)["1f1b"].peak_live and gpipe.peak_live() == [5] * P
scene.show(draw.timetable(table))

# %% [markdown] tags=["notes"]
# **Ask:** which stage needs the most memory for activations? The first: it waits longest for its backward. Give it fewer layers,
# or the embedding to somebody else.
#
# **Misunderstanding:** that 1F1B is faster. Same order of dependencies, same makespan; it allows more microbatches in the same
# memory, and *those* shrink the bubble.
#
# **Source:** Narayanan et al. 2021; the schedule is PipeDream-Flush (Narayanan et al. 2020).

# %% [markdown] tags=["slide"]
# ## Interleaved: smaller pieces, smaller bubble
#
# Each stage holds $v$ chunks of layers, so the pipe fills in $1/v$ of the time. Bubble over ideal: $(p-1)/(vm)$. The
# price is $v$ times the messages.
#
# <footer>Narayanan et al. 2021, section 2.2.2 · <code>llmpar schedule interleaved --stages 4 --microbatches 4 --chunks 2</code></footer>

# %%
M, V, COSTS = 4, 2, (1, 1, 0)  # B as long as F: narrower, and the bubble over ideal is the same
table, plain = timetable(make("interleaved", P, M, V), COSTS), timetable(make("1f1b", P, M), COSTS)
assert table.bubble_over_ideal == (P - 1) / M / V and plain.bubble_over_ideal == (P - 1) / M
assert table.hops.sum() > V * plain.hops.sum()  # and one more between the chunks
assert table.bubble_over_ideal == timetable(make("interleaved", P, M, V)).bubble_over_ideal
scene.show(draw.timetable(table))

# %% [markdown] tags=["notes"]
# For once F and B are drawn equally long, so that the halves are wide enough to read. A black bar marks chunk 1.
#
# **Ask:** stage 0 holds the first layers. What else? The first layers of the second half: 0, 4 of 8 chunks, not 0, 1.
#
# **Misunderstanding:** that interleaving saves memory. It holds more than 1F1B: a factor of 1 + (p-1)/(pv) on the first stage when
# there are enough microbatches (Korthikanti et al. 2022).
#
# **Source:** Narayanan et al. 2021. Microbatches must be a multiple of p.

# %% [markdown] tags=["slide"]
# ## Zero bubble: split the backward
#
# Only the inputs' gradient **B** is awaited by another stage. The weights' gradient **W** can fill the gaps: a third of 1F1B's
# bubble in the same memory.
#
# <footer>Qi et al. 2023 (Zero Bubble), table 2 · <code>llmpar schedule zb-h1 --stages 4 --microbatches 4</code></footer>

# %%
table, plain = timetable(make("zb-h1", P, M)), timetable(make("1f1b", P, M))
form = closed_forms(P, M)["zb-h1"]
assert table.bubble == form.bubble == (P - 1) * (1 + 1 - 1) == plain.bubble / 3
assert max(table.peak_live()) == max(plain.peak_live()) == P
scene.show(draw.timetable(table))

# %% [markdown] tags=["notes"]
# **Ask:** why was B drawn twice as long before? It was B and W in one, which is how autodiff gives it.
#
# **Misunderstanding:** "a third" of what? Of the bubble as a time, with F = B = W. As a rate it is another number, since the total
# shrinks too. And the optimizer must not wait for all stages to agree on a norm, or the end is not parallel.
#
# **Source:** Qi et al. 2023: (p-1)(F+B-W). Its published rates are reproduced by our simulator to four decimals.

# %% [markdown] tags=["slide"]
# ## What each order buys
#
# Eight stages, 32 microbatches, simulated with F = B = W = 1 time unit:
#
# <footer>Narayanan et al. 2021; Qi et al. 2023; DeepSeek-V3 2024, table 2 · <code>llmpar schedule dualpipe --stages 8 --microbatches 32</code></footer>

# %%
P8, M8 = 8, 32
ORDERS = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved, v = 2", "zb-h1": "ZB-H1", "zb-h2": "ZB-H2", "zb-v": "ZB-V",
    "dualpipe": "DualPipe",
}  # fmt: skip
forms, lines, bubbles = closed_forms(P8, M8), [], {}
for name, title in ORDERS.items():
    table = timetable(make(name, P8, M8))
    assert abs(table.bubble - forms[name].bubble) < 1e-9 and M8 >= forms[name].from_m
    assert all(abs(a - b) < 1e-9 for a, b in zip(table.peak_live(), forms[name].peak_live, strict=True)), name
    bubbles[name] = table.bubble
    lines.append(f"| {title} | {table.bubble:g} | {max(table.peak_live()):g} | {table.schedule.parameter_copies} |")
assert bubbles["zb-h2"] == bubbles["zb-v"] == 0 < bubbles["dualpipe"]
Markdown("\n".join(["| order | bubble | microbatches held | weight copies |", "|---|--:|--:|--:|", *lines]))

# %% [markdown]
# DualPipe's aim is not in this table: it hides the experts' all-to-alls.

# %% [markdown] tags=["notes"]
# **Ask:** ZB-V wins in every column. Why does not everybody use it? Its zero needs F = B = W; real layers have other ratios, and
# attention's W is small. And each stage runs two chunks, with twice the messages.
#
# **Misunderstanding:** that DualPipe is the best bubble. It sends microbatches from both ends through two copies of the model, so
# that one's forward computes while the other's backward communicates.
#
# **Source:** bubbles as the papers define them, idle time on the critical stage; every entry is simulated and equal to its closed
# form: Narayanan et al. 2021, section 2.2; Qi et al. 2023, table 2 and section 6; DeepSeek-V3 2024, table 2.
