# ---
# jupyter:
#   llmpar:
#     teaching: 20
#     exercises: 15
#     needs: []
#     question: Which devices are there, and who holds what?
#     objectives:
#     - Say which devices of a mesh hold a given row.
#     - >-
#       Read a layout such as `b/dp d/tp`: which device holds which piece, how large it
#       is, and how many copies there are.
#     - Say whether a model fits, from shards and copies.
# ---

# %% [markdown]
# # 00 · Who holds row 5?
#
# Eight devices stand in a cube, whose directions are called `dp`, `fsdp` and `tp`. They share an array of eight rows: `dp` cuts
# the rows into two halves, `fsdp` cuts each half in two again, and `tp` cuts nothing. Which devices hold row 5?

# %% tags=["plumbing"]
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # simulated devices; real ones: On your cluster

from llmpar.parallel.mesh import use_devices

devices = use_devices()

import platform

import jax
import numpy as np

from llmpar import draw
from llmpar.draw.scene import (
    Group,
    Rect,
    Text,
    compose,
    show,
    small_text,
    text_color_on,
)
from llmpar.explore import look, panels
from llmpar.explore.answers import headline
from llmpar.explore.explorer import MeshExplorer
from llmpar.inspect.census import census_hlo, census_table
from llmpar.lessons import attempt, hint, met, opened, solution
from llmpar.parallel.mesh import make_mesh, shard_bytes, sharding
from llmpar.plan.layout import parse_arrow, parse_layout
from llmpar.plan.mesh_shape import parse_mesh
from llmpar.plan.presets import preset
from llmpar.predict import formulas

N = len(devices)
assert float(jax.jit(lambda x: x + x)(1.0)) == 2.0
print(f"{N} simulated devices, {jax.process_count()} process")
print(f"set-up check: OK (Python {platform.python_version()}, JAX {jax.__version__})")

# %%
show(draw.cube("dp=2 fsdp=2 tp=2", rows=8, cut=("dp", "fsdp"), row=5))

# %% [markdown]
# A **device** runs programs and has its own memory: a GPU, a TPU, or one of the eight devices that we simulate on your CPU. (On
# simulated devices values and bytes are exact, but times mean nothing.) A **mesh** gives devices coordinates, and its
# directions are the **axes**.
#
# ## Predict: who holds row 5?
#
# Replace the dots and run the cell. `attempt` judges your answer; `hint("00.row")` helps. In a running notebook a figure that shows an
# answer stays hidden until you have answered. A guess is enough.

# %%
holders = [..., ...]  # two numbers, the smaller one first
attempt("00.row", holders)

# %% [markdown]
# ## A line of text: the layout
#
# The text `b/dp,fsdp d` is a **layout**. It says how an array is laid out over the mesh. `b` and `d` are the array's **dims**
# (dimensions), one letter each: `b` is the rows of the batch, `d` the width of the model (the numbers in each row). The axes that cut
# a dim are written after a slash. So `b` is cut by `dp` and then by `fsdp`, and `d` is whole.
#
# If the layout does not name an axis, the array is not split along it: devices that differ only in that coordinate hold identical
# copies.
#
# We put an array on the devices in this layout, and ask JAX which devices have row 5. (The code is folded. `met` prints your
# first answer beside the result.)

# %% tags=["plumbing"]
cube = parse_mesh("dp=2 fsdp=2 tp=2")
mesh = make_mesh(cube)
layout = parse_layout("b/dp,fsdp d")
rows8 = jax.device_put(np.ones((8, 2)), sharding(mesh, layout))
where = rows8.sharding.devices_indices_map(rows8.shape)  # JAX's own answer
found = [
    place
    for place, device in enumerate(mesh.devices.flat)
    if 5 in range(len(rows8))[where[device][0]]
]
met("00.row", found, "JAX puts it on")
assert found == [4, 5], "the picture's cube"
assert set(found) == {
    device
    for (block, _), who in draw.holders(layout, cube.sizes).items()
    for device in who
    if block == 5 * cube.dp * cube.fsdp // len(rows8)
}
if opened("00.row"):
    show(draw.cube("dp=2 fsdp=2 tp=2", 8, cut=("dp", "fsdp"), row=5, lit=True))

# %% [markdown]
# Two devices hold it, because `tp` cuts nothing: they are copies of each other.
#
# ## Predict: how many bytes does a device hold?
#
# An array of 32 × 16 numbers in float32 (4 bytes each) has the same layout, `b/dp,fsdp d`, on the same mesh. How many bytes does each device
# hold?

# %%
rows, columns, sizes = 32, 16, dict(dp=2, fsdp=2, tp=2)
bytes_held = ...  # your number
attempt("00.held", bytes_held, rows=rows, columns=columns, **sizes)

# %% [markdown]
# ## Shards × copies = devices
#
# A **shard** is the piece that a device holds. Here is one array in six layouts. Each colour is one shard; the numbers in it
# are the devices that hold this shard:


# %% tags=["plumbing"]
def by_notation(layout):
    """Which devices hold which rectangle, from the text of the layout."""
    r, c = layout.shard_shape(whole.shape, cube.sizes)
    return {
        ((i * r, i * r + r), (j * c, j * c + c)): who
        for (i, j), who in draw.holders(layout, cube.sizes).items()
    }


def by_jax(array):
    """The same, asked of JAX."""
    where, held = array.sharding.devices_indices_map(array.shape), {}
    for position, device in enumerate(mesh.devices.flat):
        cuts = zip(where[device], array.shape, strict=True)
        rectangle = tuple(cut.indices(size)[:2] for cut, size in cuts)
        held.setdefault(rectangle, []).append(position)
    return held


def right(array):
    """Whether each device's shard is its part of the whole."""
    return all(np.array_equal(s.data, whole[s.index]) for s in array.addressable_shards)


PIECES = "activations gradients moments weights again elementwise attention matmuls"


def square(text, caption, wide=190, tall=150):
    """One array in a layout: a colour for each piece, with the devices that hold it."""
    items = [Text(0, -16, text, bold=True), small_text(0, tall + 14, caption, "start")]
    fills = PIECES.split()
    for k, (((r0, r1), (c0, c1)), who) in enumerate(
        by_notation(parse_layout(text)).items()
    ):
        box = [c0 * wide / columns, r0 * tall / rows]
        box += [(c1 - c0) * wide / columns, (r1 - r0) * tall / rows]
        items.append(Rect(*box, fills[k], "edge"))
        middle, ink = box[0] + box[2] / 2, text_color_on(fills[k])
        lines = [who] if box[2] > 90 or len(who) < 3 else [who[:2], who[2:]]
        for i, some in enumerate(lines):
            y = box[1] + box[3] / 2 + 16 * (i - (len(lines) - 1) / 2)
            items.append(small_text(middle, y, " ".join(map(str, some)), fill=ink))
    return items, f"{text}: {caption}; " + ", ".join(
        f"rows {r0} to {r1 - 1} and columns {c0} to {c1 - 1} on {who}"
        for ((r0, r1), (c0, c1)), who in by_notation(parse_layout(text)).items()
    )


# %%
LAYOUTS = ("b d", "b/dp d", "b/dp,fsdp d", "b/dp d/tp", "b d/fsdp,tp", "b/dp,fsdp d/tp")
whole = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
captions = {}
for text in LAYOUTS:
    array = jax.device_put(whole, sharding(mesh, parse_layout(text)))
    pieces, held = len(by_jax(array)), array.addressable_shards[0].data.nbytes
    copies = N // pieces
    shards = f"{pieces} shard{'s' * (pieces > 1)}"
    copied = f"{copies} cop{'ies' if copies > 1 else 'y'}"
    captions[text] = f"{shards} × {copied}, {held:,} B each"

# %% tags=["plumbing"]
for text in LAYOUTS:  # value, sharding and memory are as the notation says
    layout = parse_layout(text)
    array = jax.device_put(whole, sharding(mesh, layout))
    predicted = shard_bytes(layout, whole.shape, 4, cube.sizes)
    assert right(array) and by_jax(array) == by_notation(layout)
    assert all(shard.data.nbytes == predicted for shard in array.addressable_shards)
    copies = formulas.copies(cube.sizes, layout.axes)
    assert predicted * N == copies * whole.nbytes
    assert len(by_jax(array)) * copies == N
drawn = [square(text, captions[text]) for text in LAYOUTS]
placed = [
    Group(tuple(items), 240 * (k % 3), 220 * (k // 3))
    for k, (items, _) in enumerate(drawn)
]
words = "\n".join(line for _, line in drawn)
if opened("00.held"):
    show(compose(f"One array in six layouts on {cube}", [placed], words))
held = shard_bytes(parse_layout("b/dp,fsdp d"), whole.shape, 4, cube.sizes)
met("00.held", held, "a device of JAX holds")

# %% [markdown]
# Shards times copies is 8 in all six, the number of devices. With half as many shards there are twice as many copies, and each device
# holds twice as much.
#
# ### Exercise (core): which layout is this?
#
# The mesh is `dp=2 fsdp=2 tp=2`, the array `b d`; rows run down. Each colour is one shard, with the devices that hold it. Write
# the layout.

# %% tags=["plumbing"]
quarters = {(0, 0): "0 2", (0, 1): "4 6", (1, 0): "1 3", (1, 1): "5 7"}
grid = []
for k, ((r, c), who) in enumerate(quarters.items()):
    grid.append(Rect(130 * c, 60 * r, 130, 60, PIECES.split()[k], "edge"))
    ink = text_color_on(PIECES.split()[k])
    grid.append(small_text(130 * c + 65, 60 * r + 30, f"devices {who}", fill=ink))
words = [f"row {r}, column {c}: devices {who}" for (r, c), who in quarters.items()]
show(compose("Which layout is this?", [grid], "\n".join(words)))

# %%
layout_seen = ...  # a text such as "b/dp d"

attempt("00.layout_of", layout_seen)

# %% [markdown]
# ## Predict: do eight billion weights fit?
#
# Imagine a larger cluster: 16 H100s (GPUs for data centres) train Llama 3 8B, a model of 8.03e9 weights. Training holds 16 bytes for each:
# the weight, its gradient and two numbers of the optimizer, 4 bytes each. The mesh `dp=16` cuts none of this. The mesh `dp=2 fsdp=4 tp=2`
# cuts all of it by `fsdp` and `tp`. **How many GiB (2³⁰ bytes) does each GPU hold?** An H100 has 79.1 GiB, of which JAX takes 59.3 GiB by
# default (lesson 01).

# %%
gib = {"dp=16": ..., "dp=2 fsdp=4 tp=2": ...}
attempt("00.fits", gib)

# %% tags=["plumbing"]
LLAMA8 = preset("llama3-8b").num_params
state_gib = {"dp=16": 16 * LLAMA8 / 2**30, "dp=2 fsdp=4 tp=2": 2 * LLAMA8 / 2**30}
met("00.fits", state_gib, "computed")


class Fits(MeshExplorer):
    """The explorer of a mesh, of which only axes and memory are shown, and whether it
    fits."""

    areas = [area for area in MeshExplorer.areas if area[0] in ("axes", "memory")]

    @staticmethod
    def short(verdict):
        return verdict and verdict | {"rest": "", "line": "", "steps": []}

    def answer(self, state):
        reply = super().answer(state)
        return reply | {"verdict": self.short(reply["verdict"])}

    def more(self, state):
        reply = super().more(state)
        return reply and reply | {"verdict": self.short(reply["verdict"])}

    def draw(self, state):
        seen = look.view(look.settle(state)[0])
        return panels.scene(seen, self.short(headline(seen)), self.areas)


start = dict(model="llama3-8b", chip="h100", batch_size=32, remat="block")
start |= dict(memory_share=0.75)
explorer = Fits(**start, mesh="dp=2 fsdp=4 tp=2")
assert explorer.answer(explorer.state)["verdict"]["tone"] == "good", "16 are enough"
copies_only = Fits(**start, mesh="dp=16")
reply = copies_only.answer(copies_only.state)
assert reply["verdict"]["tone"] == "bad", "16 whole copies are too large"

# %%
explorer if opened("00.fits") else None

# %% [markdown]
# The bar shows what one device holds. Your 15 GiB are its first three parts: weights, gradients and moments (the optimizer's two numbers).
# The rest is what a step needs at its fullest moment. *Weights in use* do not depend on the tokens: weights gathered from other devices (lesson 04), or copies of weights in 16 bits. *Activations* are what tokens add: what the forward pass keeps for the
# backward pass (lesson 01). Together these are 30.4 GiB, with a batch of 32 sequences of 4,096 tokens: they fit.
#
# The sum is an estimate; the box with thick lines, at its end, shows how far it may be off. So the explorer keeps 8 % of the memory free:
# its limit is 54.6 GiB.
#
# In a running notebook + and − change the axes; a square is a factor of 2. Axes of size 1 cut nothing. Give all 16 devices to `dp`:
# does the model still fit?
#
# ## Keep: a line of text says who holds what
#
# 1. A mesh gives devices coordinates; its directions are the axes.
# 2. A layout says which axes cut which dim. Along an axis that it does not name, devices hold copies.
# 3. Shards times copies is the number of devices.
# 4. With fewer copies each device needs less memory. That is why a model is cut.

# %% [markdown]
# ## Further
#
# You know PyTorch? [Lesson 00b](00b_from_pytorch.ipynb) sets DDP, FSDP2, DTensor and NCCL beside JAX and arrows.
#
# All words are on [one page](../docs/words.md#words).
#
# ### Six axes, six ways to share the work
#
# A mesh has up to six axes. Each is one way to share the work of training, and has a lesson:
#
# | axis | name | what its devices share | lesson |
# |---|---|---|---|
# | `pp` | pipeline parallelism | the layers | 07, 08 |
# | `dp` | data parallelism | the batch; each holds all weights | 03 |
# | `fsdp` | fully sharded data parallelism (ZeRO) | the batch, and the storage of the weights | 04 |
# | `ep` | expert parallelism | the experts of a layer | 09 |
# | `sp` | context parallelism | the positions of a sequence | 06 |
# | `tp` | tensor parallelism | each matmul | 05 |
#
# They always stand in this order, those for slow links first. (A *link* is a connection between two devices.) Devices are numbered along the last
# axis first, so neighbours on it have consecutive numbers. They are usually in one machine, where links are fast.
#
# ### Try it
#
# In a running notebook: type any layout and choose a mesh. What cannot work is refused in one sentence, with the arithmetic: type `b/tp d/tp`. (In
# the stored page this is a picture.)

# %% tags=["plumbing"]
import base64
import html

import ipywidgets as widgets
from IPython.display import display

from llmpar.draw.scene import to_svg

MESHES = ["dp=8", "dp=4 tp=2", "dp=2 fsdp=2 tp=2", "fsdp=4 tp=2", "tp=8"]
text = widgets.Text("b/fsdp,tp d", description="layout")
choice = widgets.Dropdown(options=MESHES, description="mesh")
picture = widgets.HTML()


def drawing():
    return draw.layout(text.value, (32, 16), choice.value, itemsize=4)


def redraw(_=None):
    try:
        picture.value = to_svg(drawing())
    except ValueError as error:
        picture.value = f"<pre>{html.escape(str(error))}</pre>"


text.observe(redraw, "value")
choice.observe(redraw, "value")
choice.value = "dp=2 fsdp=2 tp=2"
png = base64.b64encode(drawing()._repr_png_()).decode()
words = {"image/svg+xml": picture.value, "image/png": png, "text/plain": drawing().text}
size = {"image/png": {"width": drawing().width}}
widget = widgets.VBox([text, choice, picture])._repr_mimebundle_()
display(widget | words, raw=True, metadata=size)

# %% [markdown]
# ### Of an array that exists
#
# `MeshExplorer.of` asks JAX where the shards are. A whole state of training, a compiled program, a sharding or a bare mesh may
# stand in the array's place.

# %%
layout = parse_layout("b/dp,fsdp d/tp")
live = MeshExplorer.of(jax.device_put(whole, sharding(mesh, layout)))
(row,) = live.given["tensors"]
shards = {tuple(map(tuple, shard)) for shard in row["shards"]}
assert shards == set(by_notation(layout)), "JAX's shards are those of the notation"
live

# %% [markdown]
# ### Exercise (stretch): two layouts of the same size
#
# (After [lesson 02](02_collectives.ipynb).) On 8 devices (`dp=8`), `b/dp d` and `b d/dp` of a float32 array `[1024, 256]` take the same memory. Which one collective
# turns the first into the second, and how many bytes does each device send for it? (The table of arrows is
# [here](../docs/words.md#layouts-and-arrows).)

# %%
collective = ...  # "all-gather", "reduce-scatter", "all-reduce" or "all-to-all"
bytes_sent = ...

attempt("00.swap", {"collective": collective, "bytes_sent": bytes_sent})

# %% [markdown]
# ### Exercise (expert): when the order of the axes matters
#
# Devices that differ in only one coordinate form a *group* of that axis: they exchange data over it. Two hosts have four devices each: 0 to 3
# and 4 to 7. Fast links join the devices of a host; a slow one joins the hosts. With `tp` innermost (as here) every `tp` group stays on one host.
# With `tp` outermost, none would. That is why the axes have a fixed order, slow links first.

# %%
show(draw.mesh("dp=2 tp=4", devices_per_host=4, highlight_axis="tp"))

# %% [markdown]
# Write a function that counts the groups of `axis` that cross from one host to another.
# `sizes` lists the axes from the outermost to the innermost, as in `{"dp": 2, "tp": 4}`.


# %%
def groups_across_hosts(sizes, axis, devices_per_host): ...  # replace the dots


attempt("00.groups_across_hosts", groups_across_hosts)

# %% [markdown]
# ### Where XLA's partitioner differs
#
# JAX can also be given only the two layouts. Then the partitioner of XLA, JAX's compiler, chooses what to send. (The arrows and their
# collectives are explained in [lesson 02](02_collectives.ipynb).) For `b/tp d -> b d/tp` it finds the one all-to-all that is needed. For
# `b/dp d -> b d/tp` the plan that XLA makes here (for CPUs) is not the cheapest, and neither is one arrow. Two arrows are: slice first,
# which sends nothing, then gather the smaller piece.


# %%
def sends(*arrows):
    """Bytes that a device sends for some arrows of the whole array, one by one."""
    steps = [draw.moved(parse_arrow(a), whole.shape, cube.sizes, 4) for a in arrows]
    return sum(sent for step in steps for _, sent in step)


one = sends("b/dp d -> b d/tp")
two = sends("b/dp d -> b/dp d/tp", "b/dp d/tp -> b d/tp")
start, end = (sharding(mesh, parse_layout(text)) for text in ("b/dp d", "b d/tp"))
relay, there = jax.jit(lambda x: x, out_shardings=end), jax.device_put(whole, start)
chosen = census_table(census_hlo(relay.lower(there).compile().as_text(), mesh))
assert right(relay(there)) and two <= one
print(f"two arrows, cut first: {two} bytes per device")
print(f"one arrow:             {one} bytes per device")
total = sum(row["bytes_sent"] for row in chosen.values())
print(f"XLA's choice:          {total} bytes per device")
for (axes, kind), row in chosen.items():
    print(f"    {kind} over {axes}: {row['bytes_sent']}")

# %% [markdown]
# ### On your cluster
#
# ```
# llmpar doctor                                      which devices, which versions, what is missing
# llmpar doctor --json                               the same for a script
# llmpar inspect --mesh "dp=2 fsdp=-1 tp=4"          -1: all devices that are left. If that is no whole number, one sentence says why
# llmpar inspect --mesh-dim 2,-1,4                   the same sizes as EasyLM writes them: dp, fsdp, mp
# llmpar lab                                         these notebooks
# ```
