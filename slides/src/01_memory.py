# %% [markdown] tags=["slide", "short"] minutes=3 section="Memory and messages"
# ## Why one GPU is not enough
#
# Adam in mixed precision holds **16 bytes per parameter**, before any activation. And at 40 % of its peak, one H100 needs
# **58 years** to train an 8B model on 15 trillion tokens.
#
# <footer>Rajbhandari et al. 2020 (ZeRO), section 3.1 · <code>llmpar models llama3-8b</code> · lesson <code>notebooks/01_memory_and_flops</code></footer>

# %% tags=["fragment"]
import math

from deck import draw, letters, show

from llmpar.draw.scene import Group, Rect, Text, compose, legend
from llmpar.plan.presets import preset
from llmpar.predict import formulas
from llmpar.predict.hardware import chip

h100 = chip("h100")
PARTS = {"weights": (2, "weights"), "gradients": (2, "gradients"), "optimizer": (12, "moments")}
MODELS = {
    "Llama 3.2 1B": "llama3.2-1b",
    "Llama 3 8B": "llama3-8b",
    "Llama 3 70B": "llama3-70b",
    "Llama 3.1 405B": "llama3.1-405b",
}
SIDE, ACROSS = 16, 24


def squares(params):
    """One square per H100, filled from the left with the bytes of each part."""
    total = math.ceil(params * 16 / h100.usable_bytes)
    edges, at = [], 0.0
    for num_bytes, fill in PARTS.values():
        edges.append((at, at := at + params * num_bytes / h100.usable_bytes, fill))
    items = []
    for k in range(total):
        x, y = k % ACROSS * (SIDE + 4), k // ACROSS * (SIDE + 4)
        items.append(Rect(x, y, SIDE, SIDE, "paper", "edge"))
        for low, high, fill in edges:
            a, b = max(low, k), min(high, k + 1)
            items += [Rect(x + (a - k) * SIDE, y, (b - a) * SIDE, SIDE, fill)] * (b > a)
        items.append(Rect(x, y, SIDE, SIDE, "", "ink", 0.75))
    return items, total


@letters()
def picture():
    """Four models, each with the H100s that hold its state; and that in words."""
    rows, words, top = [], [], 0
    for name, key in MODELS.items():
        params = preset(key).num_params
        assert formulas.zero_bytes(params, 1, 0) == 16 * params
        items, total = squares(params)
        said = f"{16 * params / 1e9:,.0f} GB"
        rows += [Text(0, top + 9, name), Group(tuple(items), 142, top)]
        at = 142 + (SIDE + 4) * min(total, ACROSS) + 10
        rows.append(Text(at, top + 9, f"{said}: {total} H100" + "s" * (total > 1), bold=True))
        words.append(f"{name}: {said}, {total} H100")
        top += (SIDE + 4) * math.ceil(total / ACROSS) + 18
    key = legend([(fill, f"{part}, {n} bytes") for part, (n, fill) in PARTS.items()])
    title = "How many H100s hold the state and nothing else, with the 59 GiB of each that JAX takes"
    return compose(title, [rows, key], "\n".join(words)), words


drawn, words = picture()
years = formulas.train_seconds(preset("llama3-8b").num_params, 15e12, 1, 0.4 * h100.flops_per_s) / (
    365.25 * 86400
)
assert round(years) == 58
assert [words[0].endswith(", 1 H100"), words[3].endswith(", 102 H100")] == [True, True]
assert round(h100.usable_bytes / 2**30, 1) == 59.3 and words[2].endswith(", 18 H100")
assert [
    math.ceil(16 * preset(key).num_params / h100.hbm_bytes) for key in ("llama3-70b", "llama3.1-405b")
] == [14, 77]
show(drawn, "Each square is an H100, with the 59 GiB that JAX takes")

# %% [markdown] tags=["notes"]
# **Ask:** how many GPUs does it take to train a 70B model? Take bids before you show the squares: 18, and that is without
# one activation, one buffer, one batch.
#
# **Misunderstanding:** "8B parameters in bf16 are 16 GB, that fits." The weights do. The optimizer does not: a float32 copy
# of the weights and two moments are 12 of the 16 bytes.
#
# **Source:** 2 + 2 + 12 bytes: Rajbhandari et al. 2020. The years: 6 FLOPs per parameter and token (Narayanan et al. 2021,
# eq. 4, without recomputation), attention not counted. Of an H100's 79 GiB JAX takes three quarters unless told otherwise
# (XLA_PYTHON_CLIENT_MEM_FRACTION): `llmpar.predict.hardware`. With all of it, 70B would need 14, and 405B 77.

# %% [markdown] tags=["slide", "short"] minutes=2
# ## Five words
#
# | word | meaning |
# |---|---|
# | device | one memory, one program |
# | mesh | devices with coordinates |
# | axis | a coordinate with a name |
# | shard | the piece a device holds |
# | replica | one of the devices that hold the same shard |
#
# <footer>Lesson <code>notebooks/00_setup</code></footer>

# %% place="beside"
from llmpar.plan.layout import parse_layout
from llmpar.plan.mesh_shape import AXES

picture = draw.mesh("dp=2 tp=4", devices_per_host=4, highlight_axis="tp")
held = draw.holders(parse_layout("d m/tp"), {"dp": 2, "tp": 4})
assert held == {(0, i): [i, i + 4] for i in range(4)}  # four shards, each on two replicas, four devices apart
assert list(AXES)[0] == "pp" and list(AXES)[-1] == "tp"
show(picture)

# %% [markdown] tags=["notes"]
# **Ask:** a matrix is cut by tp. Which device holds the same piece as device 1? (Device 5: same tp, other dp.)
#
# **Misunderstanding:** that a device *is* a tensor-parallel or a data-parallel device. Every device has a coordinate on every
# axis; on each axis it has other partners. Groups over tp are neighbours, groups over dp are four apart: the last axis
# gets the fastest links. Our axes, slow links first: pp dp fsdp ep sp tp.
#
# **Source:** `llmpar.plan.mesh_shape.AXES`. The order is Megatron's and MaxText's.

# %% [markdown] tags=["slide"] minutes=3
# ## Look at any mesh
#
# Take a model, on a cluster that you do not have. Does it fit? How long is a step? Which device holds what? What would be
# better?
#
# <footer>Lesson <code>notebooks/00_setup</code> · <code>llmpar.explore.explorer</code> · <code>make site</code></footer>

# %% alt="Sixteen H100s: the answer in a line, and a weight cut into its blocks, each with the number of the device that holds it"
from llmpar.explore.explorer import MeshExplorer
from llmpar.plan.plan import Plan

explorer = MeshExplorer(model="llama3-8b", chip="h100", batch_size=32, mesh="dp=2 fsdp=4 tp=2")
reply = explorer.answer(explorer.state)
assert reply["refusal"] is None and reply["verdict"]["tone"] == "good"
made, node = Plan("dp=2 fsdp=4 tp=2").resolve(preset("llama3-8b"), None), chip("h100").node_size
(weight, layouts), sizes = made.layouts_by_path["blocks.ffn.gate"], made.mesh.sizes
with letters():
    held = draw.tensor_grid(layouts.stored, weight.shape, sizes, node, 5, name="blocks.ffn.gate")
usual = chip("h100").usable_bytes / 2**30
show(held, f"{reply['verdict']['head'].rstrip('.')}: 95 % of the card, set by hand; {usual:.0f} by default")

# %% [markdown] tags=["notes"]
# Open lesson 00 and do it live; `MeshExplorer().save("mesh.html")` makes a page that answers without a network. **Ask:** give
# tp one more square. Which row of "sent" grows, and why does the step not become shorter?
#
# **Misunderstanding:** that the time shown is a measurement. It is the planner's, by constants fitted to published
# runs; bytes and layouts are exact.
#
# **Source:** `llmpar.predict.traffic`, `llmpar.predict.formulas`; slices are tested equal to JAX's `devices_indices_map`.
