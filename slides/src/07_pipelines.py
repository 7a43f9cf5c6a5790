# %% [markdown] tags=["slide", "divider"] minutes=1 section="Pipelines"
# ## Where are we: one stack, many devices
#
# <footer>Lesson <code>notebooks/07_pipelines</code></footer>

# %%
from deck import where

where("pipeline")

# %% [markdown] tags=["notes"]
# A checkpoint: who is lost says so now. **Ask:** so far every device works on every layer. What would a device have to send if it had some of the layers only?

# %% [markdown] tags=["slide", "short"] minutes=2 section="Pipelines"
# ## Pipelines: stages, and the bubble
#
# Each stage holds some layers and sends its result to the next one. With one batch, one of $p$ stages works; the others wait.
#
# <footer>Huang et al. 2018 (GPipe) · lesson <code>notebooks/07_pipelines</code> · <code>llmpar schedule gpipe --stages 4 --microbatches 1</code></footer>

# %% tags=["fragment"]
import dataclasses
import re

from deck import curves, draw, show, steps

from llmpar.draw import scene
from llmpar.plan.schedules import make
from llmpar.plan.timetable import timetable

P = 4
naive = timetable(make("gpipe", P, 1))
assert naive.bubble_fraction == (P - 1) / P
show(draw.timeline(naive, facts=False))

# %% [markdown] tags=["notes"]
# **Ask:** how much faster is this than one device? Not at all: it is the same work, one after the other. It holds a model that one
# device cannot, and that is all.
#
# **Misunderstanding:** that the forward arrow is expensive. What crosses is one activation, b·s·d numbers per hop; that is why
# pipelines get the slowest links. Waiting is what costs.
#
# **Source:** Huang et al. 2018 (GPipe), figure 2b. Papers write m for our u, the number of microbatches. B is drawn twice as long as F: two matmuls instead of one.

# %% [markdown] tags=["slide", "short"] minutes=2
# ## Microbatches shrink the bubble
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
whole = draw.timeline(filled, facts=False)


def begun(items, until):
    """What is drawn of a timetable: the operations that begin before a time, and nothing of what is held."""
    out, later = [], False
    for item in items:
        held = isinstance(item, scene.Line) and item.fill == "activations"
        if isinstance(item, scene.Group):
            item = dataclasses.replace(item, items=tuple(begun(item.items, until)))
        elif said := re.search(r": (\S+) to \S+ time units", getattr(item, "tip", "")):
            later = float(said[1]) >= until  # and the name that stands in it
            out += [dataclasses.replace(item, fill="", stroke="")] * later  # its room stays
        elif held:
            later = False
        out += [item] * (not later and not held)
    return out


def shown(until):
    words = f"The first {until} of {filled.makespan:g} time units. {whole.text}"
    return dataclasses.replace(whole, items=tuple(begun(whole.items, until)), text=words)


steps(*map(shown, (1, 2, 3, 4, 7, 12, 21)), whole)

# %% [markdown] tags=["notes"]
# **Ask:** this picture: 43 % idle, or 75 %? Both: 9 of 21 time units, and 9 on top of an ideal 12.
#
# **Misunderstanding:** that microbatches change the result. They are gradient accumulation: the same sum, in another order.
#
# **Source:** Narayanan et al. 2021. The drawing builds up with each press. The last one adds what each stage holds, in yellow: here
# every microbatch, until the backward comes.

# %% [markdown] tags=["slide"] minutes=1
# ## Poll: how many microbatches?
#
# Eight stages; each may be idle for 10 % of the time. Here are two stages and four microbatches.
#
# | A | B | C | D |
# |---|---|---|---|
# | 8 | 16 | about 30 | more than 60 |
#
# <footer>Lesson <code>notebooks/07_pipelines</code></footer>

# %%
show(draw.timeline(timetable(make("gpipe", 2, 4)), facts=False))

# %% [markdown] tags=["notes"]
# **Ask:** raise a hand. (D: 63, nine for each stage but one.)
#
# **Misunderstanding:** that as many microbatches as stages are enough. Then nearly half of the time is idle: 7 of 15.
#
# **Source:** idle over total is (p − 1)/(u + p − 1); the next slide.

# %% [markdown] tags=["slide"] minutes=2
# ## How many microbatches are enough?
#
# For at most 10 % idle: $u \ge 9\,(p-1)$. Four stages need 27 microbatches, eight need 63.
#
# <footer>Huang et al. 2018 (GPipe) · lesson <code>notebooks/07_pipelines</code> · <code>llmpar schedule gpipe --stages 8 --microbatches 63</code></footer>

# %%
COUNTS = (1, 2, 4, 8, 16, 32, 64)
idle = {p: [timetable(make("gpipe", p, m)).bubble_fraction for m in COUNTS] for p in (2, 4, 8)}
for p, needed in {4: 27, 8: 63}.items():
    assert (
        needed
        == 9 * (p - 1)
        == next(m for m in range(1, 100) if timetable(make("gpipe", p, m)).bubble_fraction <= 0.1 + 1e-12)
    )
LOOKS = {2: ("soft", "^"), 4: ("other3", "o"), 8: ("other4", "s")}
curves(
    [(f"p = {p}", curve, *LOOKS[p], False) for p, curve in idle.items()],
    COUNTS, "microbatches u", "idle share", high=1, percent=True, levels=(0, 0.1, 0.25, 0.5, 0.75, 1),
)  # fmt: skip

# %% [markdown] tags=["notes"]
# **Ask:** what stops you from 1,000 microbatches? The global batch: at one row per microbatch, u rows per pipeline. And GPipe holds
# the activations of all of them.
#
# **Misunderstanding:** that a smaller microbatch is free. Below some hundreds of tokens a matmul no longer keeps the chip busy.
#
# **Source:** each point is a simulated timetable; the formula agrees to rounding.

# %% [markdown] tags=["slide"] minutes=2
# ## Measured: with a small batch stages wait more
# Before its training the BLOOM project timed twelve stages on 384 A100s. The work per row is the same: with 32 microbatches a row
# takes **a third more** time than with 128.
#
# <footer>Measured: BigScience, chronicles of BLOOM, in <code>tests/measured.json</code> · lesson <code>notebooks/07_pipelines</code></footer>

# %%
from pathlib import Path

from llmpar.planner import measured
from llmpar.predict.time import step_time

runs = [c for c in measured.read_runs(Path("../tests/measured.json"))[0] if c.group == "bloom.rampup"]
counts, stages = [c.run.microbatches for c in runs], runs[0].run.mesh.pp
assert counts == [32, 64, 96, 128] and stages == 12
seen = [c.measured["step_s"] / u for c, u in zip(runs, counts, strict=True)]
ours = [step_time(c.run).step_s / u for c, u in zip(runs, counts, strict=True)]
formula = [1 + (stages - 1) / u for u in counts]
assert 1.3 < seen[0] / seen[-1] < 1.4 and all(abs(a / b - 1) < 0.07 for a, b in zip(ours, seen, strict=True))
seen, ours, formula = ([cost / costs[-1] - 1 for cost in costs] for costs in (seen, ours, formula))
assert all(a <= b for a, b in zip(formula, seen, strict=True))
curves(
    [
        ("measured", seen, "measured", "s", False),
        ("our model", ours, "ink", "o", True),
        ("the bubble alone", formula, "soft", "^", True),
    ],
    counts, "microbatches u of a step", "extra time of a row, versus 128", high=0.4, percent=True,
)  # fmt: skip

# %% [markdown] tags=["notes"]
# **Ask:** the bubble alone would explain a quarter more. What else is paid once per step? The sum of the gradients over the data
# parallel replicas, and the optimizer.
#
# **Misunderstanding:** that a run starts at its final speed. The training of BLOOM itself began with a
# batch of 192 rows and raised it to 2,048. These four points are a trial before it.
#
# **Source:** BigScience's chronicles of 2021 and 2022; `tests/measured.json` names file and commit. GPT of 78 layers, tp 4, pp 12, dp 8.
