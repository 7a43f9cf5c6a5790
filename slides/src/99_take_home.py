# %% [markdown] tags=["slide", "short"] minutes=3 section="Take home"
# ## Take home
#
# <footer>All lessons, from <code>notebooks/00_setup</code> on · <code>make lab</code></footer>

# %%
from deck import LETTERS, TAKE_HOME
from IPython.display import HTML, Markdown

from llmpar.plan.schedules import make
from llmpar.plan.timetable import timetable
from llmpar.predict import formulas

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
Markdown(
    "\n".join(
        [
            "| strategy | cuts | each device sends | good while |",
            "|---|---|---|---|",
            *(f"| {' | '.join((name, *row))} |" for name, row in TAKE_HOME.items()),
        ]
    )
)

# %%
HTML(f'<p style="font-size: 20px">{LETTERS}</p>')

# %% [markdown] tags=["notes"]
# Begin at the top. Go down only when you must. Ψ parameters, u microbatches, b·s tokens of width d per device (tensor parallelism: per group); a hop is one microbatch
# between two stages; of a ring s is the whole sequence, k·h the width of its KV heads; a experts per token; C FLOP/s and β bytes/s of its links, as published; factors (N-1)/N
# left out.
#
# **Ask:** everybody names the one line that their own training needs next, and the number that would show it.
#
# **Misunderstanding:** that there is one best recipe. The order of the table is the order of cost on most clusters; links, batch
# and model decide where you stop.
#
# **Source:** Rajbhandari et al. 2020; Shoeybi et al. 2019; Korthikanti et al. 2022; Narayanan et al. 2021.

# %% [markdown] tags=["slide"] minutes=1
# ## Read next
#
# Coloured: the axes that each one covers.
#
# <footer>Then the lessons, from <code>notebooks/00_setup</code> on: <code>llmpar lab</code></footer>

# %%
from deck import letters, show

from llmpar.draw.scene import Line, Rect, Text, compose, text_color_on

READ = {
    "How to Scale Your Model": ("Austin et al. 2025: rooflines, thresholds", "dp fsdp tp pp serving"),
    "The Ultra-Scale Playbook": ("Tazi et al. 2025: thousands of measured runs", "dp fsdp tp sp pp ep"),
    "Megatron-LM": ("Narayanan et al. 2021: three axes on 3,072 GPUs", "dp tp pp"),
    "ZeRO, FSDP": ("Rajbhandari et al. 2020; Zhao et al. 2023", "dp fsdp"),
    "The Llama 3 herd": ("Llama Team 2024, section 3.3: 16,384 GPUs", "fsdp tp sp pp"),
}
ABOUT = ("dp", "fsdp", "tp", "sp", "pp", "ep", "serving")
with letters():
    items = []
    for row, (name, (what, about)) in enumerate(READ.items()):
        y = 62 * row
        items += [Text(0, y + 12, name, bold=True), Text(0, y + 34, what, "small", fill="soft")]
        items.append(Line(((0, y + 51), (880, y + 51)), "grid", 1))
        for k, axis in enumerate(ABOUT):
            there = axis in about.split()
            fill = {"serving": "activations"}.get(axis, axis) if there else "paper"
            items.append(Rect(406 + 68 * k, y + 6, 62, 34, fill, "edge" if there else "grid", radius=3))
            if there:
                items.append(Text(437 + 68 * k, y + 23, axis, "small", "middle", text_color_on(fill)))
    said = "; ".join(f"{name} ({what}): {about}" for name, (what, about) in READ.items())
    table_of_axes = compose("What to read next, and on which axes", [items], said)
show(table_of_axes)

# %% [markdown] tags=["notes"]
# Give the three numbers from 1 to 5 again, and compare with the first ones.
#
# **Ask:** which number moved least? Begin with that lesson.
#
# **Misunderstanding:** that reading is enough. The lessons ask for a prediction before every run; that is where one learns.
#
# **Source:** the books and papers themselves.

# %% [markdown] tags=["slide"] minutes=2
# ## Quiz, 1
#
# <footer>Scores itself, before and after: <code>llmpar quiz</code> · lessons <code>notebooks/00_setup</code> to <code>notebooks/04_zero</code></footer>

# %%
from llmpar.lessons import quiz


def table(lessons, answers=False):
    """Questions, or answers with their reasons, as a table."""
    head = "| lesson | answer | because |" if answers else "| lesson | question |"
    lines = [head, "|---|--:|---|" if answers else "|---|---|"]
    for lesson in lessons:
        question, exercise = quiz.QUESTIONS[lesson]
        lines.append(
            f"| {lesson} | {exercise.solution:g} | {exercise.says['because']} |"
            if answers
            else f"| {lesson} | {question} |"
        )
    return Markdown("\n".join(lines))


LESSONS = list(quiz.QUESTIONS)
FIRST, SECOND, THIRD, FOURTH = LESSONS[:5], LESSONS[5:10], LESSONS[10:15], LESSONS[15:]
table(FIRST)

# %% [markdown] tags=["notes"]
# **Ask** them twice: before the first slide and after the last. `llmpar quiz` notes answers and self-ratings; `llmpar quiz
# --effect` compares.
#
# **Misunderstanding** to look for: in 02, "8 MB, it is an average"; in 04, "2Ψ", which holds for one microbatch.
#
# **Source:** `llmpar.lessons.quiz`; the tests hold each answer against the package.

# %% [markdown] tags=["slide"] minutes=2
# ## Quiz, 2
#
# <footer>Scores itself, before and after: <code>llmpar quiz</code> · lessons <code>notebooks/05_tensor_parallelism</code> to <code>notebooks/09_experts</code></footer>

# %%
table(SECOND)

# %% [markdown] tags=["notes"]
# **Ask:** which question would you have got right this morning?
#
# **Misunderstanding** to look for: in 07, a quarter: that is idle over ideal.
#
# **Source:** `llmpar.lessons.quiz`.

# %% [markdown] tags=["slide"] minutes=2
# ## Quiz, 3
#
# <footer>Scores itself, before and after: <code>llmpar quiz</code> · lessons <code>notebooks/10_hybrids</code> to <code>notebooks/14_models_of_2026</code></footer>

# %%
table(THIRD)

# %% [markdown] tags=["notes"]
# **Ask:** which of these can you answer without paper?
#
# **Misunderstanding** to look for: in 11, dividing the activations as well.
#
# **Source:** `llmpar.lessons.quiz`.

# %% [markdown] tags=["slide"] minutes=1
# ## Quiz, 4
#
# <footer>Scores itself, before and after: <code>llmpar quiz</code> · lessons <code>notebooks/15_machines_of_2026</code> to <code>notebooks/19_mysteries</code></footer>

# %%
table(FOURTH)

# %% [markdown] tags=["notes"]
# **Ask:** which of these would you ask a colleague?
#
# **Misunderstanding** to look for: in 15, 5,000 tokens: links are faster, too.
#
# **Source:** `llmpar.lessons.quiz`.

# %% [markdown] tags=["subslide"] minutes=0.5
# ## Answers, 1
#
# <footer>After the quiz: <code>llmpar quiz --after</code></footer>

# %%
table(FIRST, answers=True)

# %% [markdown] tags=["notes"]
# **Ask:** which one surprised you?
#
# **Misunderstanding:** see the sentence that `llmpar quiz --after` gives to each wrong answer.
#
# **Source:** `llmpar.lessons.quiz`.

# %% [markdown] tags=["subslide"] minutes=0.5
# ## Answers, 2
#
# <footer>After the quiz: <code>llmpar quiz --after</code></footer>

# %%
table(SECOND, answers=True)

# %% [markdown] tags=["notes"]
# **Ask:** which answer would you now explain to your neighbour?
#
# **Misunderstanding:** see the sentence that `llmpar quiz --after` gives to each wrong answer.
#
# **Source:** `llmpar.lessons.quiz`.

# %% [markdown] tags=["subslide"] minutes=0.5
# ## Answers, 3
#
# <footer>After the quiz: <code>llmpar quiz --after</code></footer>

# %%
table(THIRD, answers=True)

# %% [markdown] tags=["notes"]
# **Ask:** which lesson do you take next?
#
# **Misunderstanding:** see the sentence that `llmpar quiz --after` gives to each wrong answer.
#
# **Source:** `llmpar.lessons.quiz`.

# %% [markdown] tags=["subslide"] minutes=0.5
# ## Answers, 4
#
# <footer>After the quiz: <code>llmpar quiz --after</code></footer>

# %%
table(FOURTH, answers=True)

# %% [markdown] tags=["notes"]
# **Ask:** which lesson do you give to somebody else?
#
# **Misunderstanding:** see the sentence that `llmpar quiz --after` gives to each wrong answer.
#
# **Source:** `llmpar.lessons.quiz`.
