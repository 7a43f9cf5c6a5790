# %% [markdown] tags=["slide"] minutes=2
# ## Four readings: who chooses what is sent?
#
# One text of a model. *Solo* sends nothing, in *Manual* you write each collective, in *Auto* XLA's partitioner chooses, in
# *Explicit* JAX's types say it.
#
# <footer>lesson <code>notebooks/12_readings</code> · <code>llmpar inspect --mesh "dp=2 fsdp=2 tp=2" --reading explicit --types</code></footer>

# %%
from IPython.display import Markdown

from llmpar.config import preset
from llmpar.inspect.types import types
from llmpar.mesh import use_devices
from llmpar.plan import Plan

use_devices()
rows = types(preset("tiny"), Plan("dp=2 fsdp=2 tp=2"), 8, 32)
assert all(row["layout"] == row["type_says"] for row in rows)
CHOSEN = ("stream b s d", "ffn d m", "ffn b s d +m", "vocab b s d +v")
lines = ["| in the model's text | layout of the plan | JAX's type |", "|---|---|---|"]
for row in rows:
    if row["value"] in CHOSEN:
        lines.append(f"| `{row['value']}` | `{row['layout']}` | `{row['type']}` |")
assert len(lines) == 2 + len(CHOSEN)
Markdown("\n".join(lines))

# %% [markdown] tags=["notes"]
# **Ask:** which of these values must still be summed, and how do you see it? The ones with `+tp`, in the type `U:tp`: unreduced.
#
# **Misunderstanding:** that a shape tells where a value lives. `b s d` and `b s d +tp` have the same shape.
#
# **Source:** `llmpar inspect --types`: JAX's own types of a traced step, each asserted equal to the plan's layout.

# %% [markdown] tags=["slide"] minutes=2
# ## One mistake, three fates
#
# The sum over `tp` is forgotten; or a weight is cut along the wrong dim.
#
# | | no sum | wrong cut |
# |---|---|---|
# | Manual | refused by `shard_map`'s check | refused: shapes |
# | Manual, check off | **wrong value, silently** | refused: shapes |
# | Auto | right: adds the sum | **right, sends more, silently** |
# | Explicit | refused, at the line | refused, at the line |
#
# <footer>lesson <code>notebooks/12_readings</code> · <code>llmpar inspect --mesh fsdp=8 --reading auto</code></footer>

# %% [markdown] tags=["notes"]
# **Ask:** which cell of this table would your tests find? A test of values finds the wrong value. Nobody finds what is only slow,
# unless bytes are counted.
#
# **Misunderstanding:** that Auto is safe. It is safe for values; the traffic is whatever the partitioner finds.
#
# **Source:** each cell is run and asserted in lesson 12; `llmpar.explain` gives the missing arrow for JAX's message.
