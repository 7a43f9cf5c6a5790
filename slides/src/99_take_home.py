# %% [markdown] tags=["slide"]
# ## Take home
#
# <footer>All lessons, from <code>notebooks/00_setup</code> on · <code>make lab</code></footer>

# %%
from IPython.display import Markdown

from llmpar.predict import formulas
from llmpar.schedules import make
from llmpar.timetable import timetable

assert [formulas.zero_elements(1, stage) for stage in range(4)] == [2, 2, 2, 3]
assert formulas.tp_elements(1, 1, 1, 2) == 4 and formulas.tp_elements(1, 1, 1, 10**9) < 8
assert formulas.pp_elements(1, 1, 1) == 2
assert abs(sum(formulas.ring_elements(1, 10**6, 1, 1, 10**6)) / 10**6 - 6) < 1e-3
assert round(2 * formulas.moe_elements(1, 1, 2, 10**9)) == 4 * 2
assert (
    formulas.gpt_activation_bytes(1, 2048, 1024, 8, 8, True)
    == formulas.gpt_activation_bytes(1, 2048, 1024, 8) / 8
)
one = timetable(make("1f1b", 4, 12))
assert abs(one.bubble_fraction - 3 / 15) < 1e-12
ROWS = [
    ("data parallel", "the batch", "2Ψ", "the state fits"),
    ("ZeRO-1", "+ optimizer", "2Ψ", "the rest fits"),
    ("ZeRO-3, FSDP", "+ gradients, weights", "3uΨ", "tokens per GPU > C/β"),
    ("tensor parallel", "each layer", "8bsd per layer", "it stays in a node"),
    ("+ sequence cut", "+ norms, residuals", "8bsd per layer", "it stays in a node"),
    ("ring attention", "the sequence", "6bskh per layer", "a part's tokens > C/β"),
    ("pipeline", "the stack of layers", "2bsd per hop", "u ≥ 9 (p - 1)"),
    ("experts", "the experts", "4a·bsd per layer", "their load is even"),
]
Markdown(
    "\n".join(
        [
            "| strategy | cuts | each device sends | good while |",
            "|---|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in ROWS),
        ]
    )
)

# %% [markdown]
# Begin at the top. Go down only when you must, and let `llmpar inspect` say what moves.

# %% [markdown] tags=["notes"]
# Ψ parameters, u microbatches, b·s tokens of width d per device (tensor parallelism: per group); a hop is one microbatch
# between two stages; of a ring s is the whole sequence, k·h the width of its KV heads; a experts per token; C FLOP/s and β bytes/s of its links, as published; factors (N-1)/N
# left out.
#
# **Ask:** everybody names the one line that their own training needs next, and the number that would show it.
#
# **Misunderstanding:** that there is one best recipe. The order of the table is the order of cost on most clusters; links, batch
# and model decide where you stop.
#
# **Source:** Rajbhandari et al. 2020; Shoeybi et al. 2019; Korthikanti et al. 2022; Narayanan et al. 2021.

# %% [markdown] tags=["slide"]
# ## Quiz
#
# <footer>Answers in the speaker's notes, key S · lessons <code>notebooks/00_setup</code> to <code>notebooks/08_pipeline_schedules</code></footer>

# %%
from llmpar.config import preset
from llmpar.predict.hardware import chip

QUESTIONS = [
    ("`d m/tp` on `dp=2 tp=4`: how many shards, how many copies of each?", "00"),
    ("8 GPUs all-reduce 8 MB. How much does each send?", "00"),
    ("4 microbatches, data parallel: how often do gradients travel?", "03"),
    ("4 microbatches, ZeRO-2: how many Ψ are sent?", "04"),
    ("How many H100s hold the training state of Llama 3 8B?", "04"),
    ("How many all-reduces per layer and step under tensor parallelism?", "05"),
    ("4 stages, 12 microbatches, 1F1B: which share of the time is idle?", "07"),
    ("16 stages, 64 microbatches, 1F1B: how many does stage 3 hold?", "08"),
]
lines = [f"| {i} | {question} | {lesson} |" for i, (question, lesson) in enumerate(QUESTIONS, 1)]
Markdown("\n".join(["| | question | lesson |", "|--:|---|---|", *lines]))

# %%
from llmpar import draw
from llmpar.notation import parse_layout

held = draw.holders(parse_layout("d m/tp"), {"dp": 2, "tp": 4})
assert len(held) == 4 and {len(devices) for devices in held.values()} == {2}
assert formulas.sent_bytes("all-reduce", 8, 8) == 14
assert (
    formulas.zero_elements(1, 0, accumulation=4) == formulas.zero_elements(1, 0)
    and formulas.zero_elements(1, 2, accumulation=4) == 5
)
assert 2 < 16 * preset("llama3-8b").num_params / chip("h100").usable_bytes <= 3
assert 16 * preset("llama3-8b").num_params < 2 * chip("h100").hbm_bytes
assert formulas.tp_elements(1, 1, 1, 8) == 4 * formulas.sent_bytes("all-reduce", 1, 8)
assert timetable(make("1f1b", 16, 64)).peak_live()[3] == 13

# %% [markdown] tags=["notes"]
# **Answers:** 1. four shards, two copies. 2. 14 MB, twice 7/8 of 8. 3. once, at the end. 4. (4 + 1)Ψ = 5Ψ. 5. three: two would do
# with all of their memory, and JAX takes three quarters. 6. four: two forward, two backward. 7. 3 of 15, 20 %.
# 8. 16 − 3 = 13.
#
# **Ask** them twice: before the first slide and after the last.
#
# **Misunderstanding** to look for: in 2, "8 MB, it is an average"; in 4, "2Ψ", which holds for one microbatch.
#
# **Source:** every answer is asserted in this slide's source.
