# %% [markdown] tags=["slide"] minutes=3 section="Choosing"
# ## Choose: legal, fits, fast
#
# Llama 3 8B on 16 H100s, 524,288 tokens a step. Every loser names the term that made it slow.
#
# <footer>Estimates with constants of published runs · <code>llmpar plan --devices 16 --batch-size 64</code> · lesson <code>notebooks/11_choose</code></footer>

# %%
from IPython.display import Markdown

from llmpar.config import preset
from llmpar.predict import planner, serving
from llmpar.predict.hardware import chip

question = planner.Question(preset("llama3-8b"), chip("h100"), 16, 64, 8192)
found = planner.document(planner.decide(question, keep=5))
assert all(row["memory_bytes"]["total"] <= question.room_bytes for row in found["plans"])
assert 12 * question.config.num_params > question.room_bytes  # replicas alone cannot be
rows = [
    f"| `{row['mesh']}` | {row['step_s']:.2f} s | {row['memory_bytes']['total'] / 2**30:.0f} GiB | {row['why']} |"
    for row in found["plans"]
]
Markdown("\n".join(["| mesh | a step | memory | why |", "|---|--:|--:|---|", *rows]))

# %% [markdown] tags=["notes"]
# **Ask:** why not `dp=16`? 90 GiB of float32 state on each device, and 69 may be used.
#
# **Misunderstanding:** that the seconds are promises. They compare plans; bytes and arguments are exact, and a compiler without the
# cluster checks memory (`llmpar compile`).
#
# **Source:** `llmpar.predict.planner`; `tests/measured.md` holds the model against 591 published runs.

# %% [markdown] tags=["slide"] minutes=2
# ## Serving is another question
#
# A prompt computes. A token reads: all weights, and its keys and values. So decode many sequences together.
#
# <footer>Llama 3 8B, 8 H100s, 1,024 tokens in, 256 out · <code>llmpar.predict.serving</code> · lesson <code>notebooks/11_choose</code></footer>

# %%
batches = (1, 16, 64, 256)  # on each GPU
took = [sum(serving.decode(preset("llama3-8b"), chip("h100"), n, 1024 + 128).values()) for n in batches]
lines = [f"| {8 * n:,} | {s * 1e3:.1f} ms | {8 * n / s:,.0f} |" for n, s in zip(batches, took, strict=True)]
assert took[-1] < 5 * took[0], "256 sequences, and a token waits less than five times as long"
Markdown("\n".join(["| sequences at once | a token each | tokens per second |", "|--:|--:|--:|", *lines]))

# %% [markdown] tags=["notes"]
# **Ask:** what stops the batch? First the bound on a token's time, then memory for keys and values; beyond the critical batch
# computing.
#
# **Misunderstanding:** that the mesh of training serves best. There, tensor parallelism is for memory; here, it is for latency.
#
# **Source:** Pope et al. 2022; Austin et al. 2025, inference chapter. No published run of serving has tested these figures: only the
# formulas are.

# %% [markdown] tags=["slide", "short"] minutes=3 section="Choosing"
# ## Rules of thumb, beside the planner
#
# *It fits a GPU: replicas. It fits a node: tensor parallelism. It needs nodes: pipelines.* Good first guesses; sharded state
# beats two of them here.
#
# <footer>H100s, estimates · <code>llmpar plan --devices 64 --model llama3-70b --batch-size 128</code> · <code>notebooks/11_choose</code></footer>

# %% tags=["fragment"]
CASES = {
    ("Llama 3.2 1B, 8 GPUs", "llama3.2-1b", 8, 64): ("fits: `dp=8`", dict(dp=8)),
    ("Llama 3 8B, 8 GPUs", "llama3-8b", 8, 64): ("node: `tp=8`", dict(tp=8)),
    ("Llama 3 70B, 64 GPUs", "llama3-70b", 64, 128): ("nodes: `pp=8 tp=8`", dict(pp=8, tp=8)),
}


def fastest(model, devices, rows, **fixed):
    """The planner's first plan, as data."""
    asked = planner.Question(preset(model), chip("h100"), devices, rows, 8192, fixed)
    return planner.document(planner.decide(asked, keep=4))["plans"][0]


lines, ratio = [], []
for (name, *asked), (rule, fixed) in CASES.items():
    by_rule, by_planner = fastest(*asked, **fixed), fastest(*asked)
    ratio.append(by_rule["step_s"] / by_planner["step_s"])
    lines.append(
        f"| {name} | {rule} | {by_rule['step_s']:.1f} s | `{by_planner['mesh']}` | {by_planner['step_s']:.1f} s |"
    )
assert ratio[0] < 1.05 < 1.1 < ratio[1] < ratio[2] < 1.5
Markdown("\n".join(["| model | the rule | a step | the planner | a step |", "|---|---|--:|---|--:|", *lines]))

# %% [markdown] tags=["fragment"]
# And the recipe: **fit** in memory first, **then** reach the batch, **then** speed. To serve: an inference engine.

# %% [markdown] tags=["notes"]
# **Ask:** the rules came from somewhere. When is the third one right? With a slow network between nodes, or so few rows per GPU that
# gathering the weights no longer hides: `llmpar plan --batch-size 16`.
#
# **Misunderstanding:** that a rule is wrong because the planner found something faster. A rule fits in the head; the planner shows
# what it costs, here 0, 15 and 35 %.
#
# **Source:** `llmpar.predict.planner`, plans of one step each; the recipe is that of the playbook of Hugging Face (2025): first fit
# a step, then the global batch, then throughput. Seconds compare plans and promise nothing.
