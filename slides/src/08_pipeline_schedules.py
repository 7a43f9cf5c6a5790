# %% [markdown] tags=["slide"] minutes=1
# ## Poll: which order finishes first?
#
# Five orders of one work begin so. Which ends first? Which holds least until its backward is done?
#
# <footer>Lesson <code>notebooks/08_pipeline_schedules</code></footer>

# %% place="tall"
from deck import draw, show

from llmpar.plan.schedules import make
from llmpar.plan.timetable import timetable

FIVE = ("GPipe", "1F1B", "interleaved", "ZB-H1", "ZB-V")
begun = {name: timetable(make(name.lower(), 4, 8)) for name in FIVE}
show(draw.timelines(begun, until=12, letters=False))

# %% [markdown] tags=["notes"]
# A stage holds a microbatch from its forward to the end of its backward, both halves of it.
#
# **Ask:** two hands for each: first, and holds least. (ZB-V finishes first, 1F1B holds least. "What each order saves and costs" shows all of it.)
#
# **Misunderstanding:** that 1F1B is faster than GPipe. It holds less, in the same time.
#
# **Source:** the simulator, F = B = W = 1.

# %% [markdown] tags=["slide", "short"] minutes=3
# ## 1F1B: the same bubble, less memory
#
# Start a backward as soon as one is ready. Stage $i$ holds at most $p-i$ microbatches, however many there are: here 4, 3, 2, 1,
# where GPipe would hold 5.
#
# <footer>Narayanan et al. 2021, section 2.2.1 · lesson <code>notebooks/08_pipeline_schedules</code> · <code>llmpar schedule 1f1b --stages 4 --microbatches 5</code></footer>

# %%
from deck import draw, show

from llmpar.plan.schedules import make
from llmpar.plan.timetable import timetable
from llmpar.predict.bubbles import closed_forms

P, U = 4, 5
table, gpipe = timetable(make("1f1b", P, U)), timetable(make("gpipe", P, U))
assert table.makespan == gpipe.makespan
assert (
    table.peak_live() == [4, 3, 2, 1] == closed_forms(P, U)["1f1b"].peak_live and gpipe.peak_live() == [5] * P
)
show(draw.timeline(table, facts=False, shortest=28))

# %% [markdown] tags=["notes"]
# **Ask:** which stage needs the most memory for activations? The first: it waits longest for its backward. Give it fewer layers, or the embedding to another stage.
#
# **Misunderstanding:** that 1F1B is faster. Same order of dependencies, same makespan; it allows more microbatches in the same
# memory, and *those* shrink the bubble.
#
# **Source:** Narayanan et al. 2021; the schedule is PipeDream-Flush (Narayanan et al. 2020).

# %% [markdown] tags=["slide"] minutes=2
# ## Interleaved: smaller pieces, smaller bubble
#
# Each stage holds $g$ chunks of layers, so the pipeline fills in $1/g$ of the time. Bubble over ideal: $(p-1)/(gu)$. The
# price: $(gp-1)/(p-1)$ times the messages.
#
# <footer>Narayanan et al. 2021 · <code>notebooks/08_pipeline_schedules</code> · <code>llmpar schedule interleaved --stages 4 --microbatches 4 --costs 1,1,0</code></footer>

# %%
U, G, COSTS = 4, 2, (1, 1, 0)  # B as long as F: narrower, and the bubble over ideal is the same
table, plain = timetable(make("interleaved", P, U, G), COSTS), timetable(make("1f1b", P, U), COSTS)
assert table.bubble_over_ideal == (P - 1) / U / G and plain.bubble_over_ideal == (P - 1) / U
# More than G: also from the last stage to the first.
assert sum(map(sum, table.hops)) * (P - 1) == sum(map(sum, plain.hops)) * (G * P - 1)
assert table.bubble_over_ideal == timetable(make("interleaved", P, U, G)).bubble_over_ideal
show(draw.timeline(table, facts=False))

# %% [markdown] tags=["notes"]
# For once F and B are drawn equally long, so that the halves are wide enough to read. A bar marks chunk 1.
#
# **Ask:** stage 0 holds the first layers. What else? The first layers of the second half: 0, 4 of 8 chunks, not 0, 1.
#
# **Misunderstanding:** that interleaving saves memory. It holds more than 1F1B: a factor of 1 + (p-1)/(gp) on the first stage when
# there are enough microbatches (Korthikanti et al. 2022).
#
# **Source:** Narayanan et al. 2021. Rounds have p microbatches, or a few more where p does not divide them (PyTorch).

# %% [markdown] tags=["slide"] minutes=2
# ## Zero bubble: split the backward
#
# Another stage waits only for **B**, the inputs' gradient. **W**, the weights' gradient, can fill the gaps: a third of 1F1B's
# bubble at the same peak of memory.
#
# <footer>Qi et al. 2023 (Zero Bubble), table 2 · lesson <code>notebooks/08_pipeline_schedules</code> · <code>llmpar schedule zb-h1 --stages 4 --microbatches 4</code></footer>

# %% tags=["fragment"]
table, plain = timetable(make("zb-h1", P, U)), timetable(make("1f1b", P, U))
form = closed_forms(P, U)["zb-h1"]
assert table.bubble == form.bubble == (P - 1) * (1 + 1 - 1) == plain.bubble / 3
assert table.peak_live() == [P] * P and plain.peak_live() == list(range(P, 0, -1))
show(draw.timeline(table, facts=False))

# %% [markdown] tags=["notes"]
# Every stage holds 4 here; 1F1B's stages held 4, 3, 2 and 1. The peak is the same, the sum is not.
#
# **Ask:** why was B drawn twice as long before? It was B and W in one, which is how autodiff gives it.
#
# **Misunderstanding:** "a third" of what? Of the bubble as a time, with F = B = W. As a rate it is another number, since the total
# shrinks too. And the optimizer must not wait for all stages to agree on a norm, or the end is not parallel.
#
# **Source:** Qi et al. 2023: (p-1)(F+B-W). Its published rates are reproduced by our simulator to four decimals.

# %% [markdown] tags=["slide"] minutes=1
# ## What each order saves and costs
#
# Four stages, eight microbatches, F = B = W = 1. Which order finishes first? Which holds least?
#
# <footer>Lesson <code>notebooks/08_pipeline_schedules</code> · <code>llmpar schedule zb-v --stages 4 --microbatches 8</code></footer>

# %% place="tall"
P8, U8 = 8, 32
SHOWN = ("GPipe", "1F1B", "interleaved", "ZB-H1", "ZB-V")
ORDERS = {name.lower(): name for name in (*SHOWN, "ZB-H2", "DualPipe")}
forms, tables = closed_forms(P8, U8), {name: timetable(make(name, P8, U8)) for name in ORDERS}
for name, table in tables.items():
    assert abs(table.bubble - forms[name].bubble) < 1e-9 and U8 >= forms[name].from_m
    assert all(abs(a - b) < 1e-9 for a, b in zip(table.peak_live(), forms[name].peak_live, strict=True)), name
assert tables["zb-h2"].bubble == tables["zb-v"].bubble == 0 < tables["dualpipe"].bubble
assert tables["zb-h1"].makespan == tables["zb-h2"].makespan
small = {title: timetable(make(name, 4, 8)) for name, title in ORDERS.items() if title in SHOWN}
ends = [table.makespan for table in small.values()]
assert ends == sorted(ends, reverse=True) == [33, 33, 28.5, 27, 25.5]
show(draw.timelines(small, letters=False))

# %% [markdown] tags=["notes"]
# The answer to the poll before 1F1B. "Holds" says how many microbatches stages 0 to 3 hold at most. The pale half of a backward is W; in
# the first three orders it is one piece with B.
#
# **Ask:** ZB-V wins the race and holds no more than 1F1B's first stage. Why does not everybody use it? Its zero needs F = B = W; real
# layers have other ratios, and attention's W is small. And each stage runs two chunks, with twice the messages.
#
# **Misunderstanding:** that DualPipe is a candidate for the smallest bubble. It sends microbatches from both ends through two copies of
# the model, so that one's forward computes while the other's backward exchanges the tokens of its experts.
#
# **Source:** all orders are simulated, and equal to their closed forms for eight stages and 32 microbatches: Narayanan et al. 2021,
# section 2.2; Qi et al. 2023, table 2 and section 6; DeepSeek-V3 2024, table 2.

# %% [markdown] tags=["slide"] minutes=1
# ## Three things are called the bubble
#
# ZB-V is published with a bubble of **zero**. But it ends at 25.5, not at 24. Ask which bubble is meant.
#
# <footer>Huang et al. 2018 · Narayanan et al. 2021 · Qi et al. 2023 · lesson <code>notebooks/08_pipeline_schedules</code></footer>

# %%
assert small["ZB-V"].bubble == 0 and small["ZB-V"].makespan - small["ZB-V"].ideal == 1.5
show(draw.bubbles(small["ZB-V"]))

# %% [markdown] tags=["notes"]
# Over the work: Narayanan. Over the total: Huang. The critical stage: the zero-bubble papers take each stage's own time, from its first
# operation to its last; what the longest idles in between is their bubble.
#
# **Ask:** of what use are the dotted corners? The next step can begin in them, if stages need not wait for one another at the end of
# this one: no norm that all must agree on.
#
# **Misunderstanding:** that a smaller bubble ends earlier. ZB-H2 has none either, and ends when ZB-H1 does.
#
# **Source:** simulated; the definitions are those of the papers.
