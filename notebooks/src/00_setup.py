# ---
# jupyter:
#   llmpar:
#     teaching: 20
#     exercises: 15
#     needs: []
#     question: Which devices are there, and who holds what?
#     objectives:
#     - Name the devices of a machine, and say whether they are real or simulated.
#     - >-
#       Read a layout such as `b/dp d/tp`: which device holds which piece, how large it
#       is, and how many copies there are.
#     - Say which collective carries one layout into another, and what it sends.
# ---

# %% [markdown]
# # 00 · Who holds row 5?
#
# Eight devices stand in a cube, whose directions are called `dp`, `fsdp` and `tp`. They share an array of eight rows: `dp` cuts
# the rows into two halves, `fsdp` cuts each half in two again, and `tp` cuts nothing. Which devices hold row 5?

# %% tags=["plumbing"]
from llmpar.parallel.mesh import use_devices

devices = use_devices()

import platform

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from llmpar import draw
from llmpar.draw.scene import Group, Rect, compose, show, small_text
from llmpar.explore.explorer import MeshExplorer
from llmpar.inspect.census import census_hlo, census_table, compiled_memory
from llmpar.lessons import attempt, hint, met, solution
from llmpar.parallel.mesh import make_mesh, shard_bytes, sharding, spec
from llmpar.parallel.modes import Manual
from llmpar.plan.layout import parse_arrow, parse_layout
from llmpar.plan.mesh_shape import AXES, parse_mesh
from llmpar.plan.plan import Plan
from llmpar.predict import formulas

N = len(devices)
kind = "simulated" if devices[0].platform == "cpu" else "real"
assert float(jax.jit(lambda x: x + x)(1.0)) == 2.0
print(f"{N} {kind} devices, {jax.process_count()} process")
print(f"set-up check: OK (Python {platform.python_version()}, JAX {jax.__version__})")

# %%
show(draw.cube("dp=2 fsdp=2 tp=2", rows=8, cut=("dp", "fsdp"), row=5))

# %% [markdown]
# A **device** is something with a memory of its own that runs programs: a GPU, a TPU, or one of eight that we simulate in your
# processor. (Values and bytes are exact on simulated devices. Times mean nothing.) A **mesh** gives devices coordinates, and
# its directions are the **axes**.
#
# ## Predict: who holds row 5?

# %%
holders = [..., ...]  # two numbers, the smaller one first
attempt("00.row", holders)

# %% [markdown]
# ## What JAX says
#
# Now the same with JAX, on the devices that are here. The text `b/dp,fsdp d` is a **layout**. It says how an array is laid out: `b`
# rows of the batch, cut by `dp` and then by `fsdp`, and `d` width of the model (the numbers in each row), not cut. After the slash stand the axes that
# cut. An axis that is not named cuts nothing: devices that differ in it alone hold copies. (`b` and `d` are the array's **dims**,
# its directions. Each has one letter.)

# %%
tp, fsdp = 2 if N % 2 == 0 else 1, 2 if N % 4 == 0 else 1
cube = parse_mesh(f"dp=-1 fsdp={fsdp} tp={tp}", N)  # -1: what is left
mesh = make_mesh(cube)

layout = parse_layout("b/dp,fsdp d")
rows8 = jax.device_put(np.ones((max(8, N), 2)), sharding(mesh, layout))
where = rows8.sharding.devices_indices_map(rows8.shape)  # JAX's own answer
found = [
    place
    for place, device in enumerate(mesh.devices.flat)
    if 5 in range(len(rows8))[where[device][0]]
]
if N == 8:
    met("00.row", found, "JAX puts it on")
else:
    print(f"mesh {cube}: row 5 of {len(rows8)} is on {found}")

# %%
show(draw.cube("dp=2 fsdp=2 tp=2", 8, cut=("dp", "fsdp"), row=5, lit=True))

# %% tags=["plumbing"]
assert set(found) == {
    device
    for (block, _), who in draw.holders(layout, cube.sizes).items()
    for device in who
    if block == 5 * cube.dp * cube.fsdp // len(rows8)
}
assert found == [4, 5] or N != 8, "the picture's cube"

# %% [markdown]
# Two devices hold it, because `tp` cuts nothing.
#
# ## The same question for eight billion weights
#
# This is a cluster that you do not have: 16 H100s, GPUs for data centres, that train a Llama with 8 billion weights, of 4 bytes each. Look
# at the devices (a cell is a matrix of all 32 layers; green is the part that a device holds) and at the memory bar of one device. All
# other words come in later lessons. An H100 has 79.1 GiB. JAX takes 75 % of it unless told (59.3 GiB); here it is told to take 95 %, that
# is 75.2 GiB.

# %%
explorer = MeshExplorer(
    model="llama3-8b", chip="h100", batch_size=32, mesh="dp=2 fsdp=4 tp=2"
)
shown = ("axes", "memory", "grid")  # the panels; there are more
explorer.areas = [area for area in explorer.areas if area[0] in shown]
explorer

# %% tags=["plumbing"]
reply = explorer.answer(explorer.state)
assert reply["verdict"]["tone"] == "good", "16 devices are enough"
whole_weights = explorer.answer(explorer.state | {"mesh": "dp=16"})
assert whole_weights["verdict"]["tone"] == "bad", "16 whole copies are too large"

# %% [markdown]
# Now give all 16 devices to `dp`, which cuts no weight. (In a running notebook: with + and −. A coloured square doubles an axis.)
# Does the model still fit?

# %% tags=["plumbing"]
copies_only = MeshExplorer(model="llama3-8b", chip="h100", batch_size=32, mesh="dp=16")
copies_only.areas = [area for area in copies_only.areas if area[0] == "memory"]
show(copies_only.scene)

# %% [markdown]
# It does not: with nothing cut, each device holds all weights, all gradients and all that the optimizer keeps (moments). (Its plan, short
# of memory, keeps few activations and computes the rest again: lesson 01.)
#
# ## Six axes, six ways to share the work
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
# They always stand in this order. A *link* is the cable between two devices. Device numbers run fastest along the last axis, so
# its devices sit side by side, usually in one machine, where links are fast.
#
# ## Predict: how many bytes does a device hold?
#
# A float32 array is placed as `b/dp,fsdp d`. How many bytes does each device hold?

# %%
rows, columns = 4 * N, 2 * N
print(f"{rows} x {columns} float32 on dp={cube.dp} fsdp={cube.fsdp} tp={cube.tp}")
bytes_held = ...  # your number

sizes = dict(dp=cube.dp, fsdp=cube.fsdp, tp=cube.tp)
attempt("00.held", bytes_held, rows=rows, columns=columns, **sizes)

# %% [markdown]
# ## Shards times copies is the number of devices
#
# A **shard** is the piece that a device holds. Here is one array in six layouts:


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


def beside(scenes, title):
    """Drawings in two columns."""
    placed, y, x = [], 0, max(scene.width for scene in scenes[::2]) + 20
    for left, other in zip(scenes[::2], scenes[1::2], strict=True):
        placed += [Group(left.items, 0, y), Group(other.items, x, y)]
        y += max(left.height, other.height)
    return compose(title, [placed], "\n".join(scene.text for scene in scenes))


# %%
LAYOUTS = ("b d", "b/dp d", "b/dp,fsdp d", "b/dp,fsdp d/tp", "b/dp d/tp", "b d/fsdp,tp")
whole = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
for text in LAYOUTS:
    layout = parse_layout(text)
    array = jax.device_put(whole, sharding(mesh, layout))
    shards, held = len(by_jax(array)), array.addressable_shards[0].data
    copies = formulas.copies(cube.sizes, layout.axes)
    assert shards * copies == N
    print(f"{text:<15} {shards} shards x {copies} copies, {held.nbytes} bytes each")
    if text == "b/dp,fsdp d":
        met("00.held", held.nbytes, "a device of JAX holds")

# %% tags=["plumbing"]
for text in LAYOUTS:  # value, sharding and memory are as the notation says
    layout = parse_layout(text)
    array = jax.device_put(whole, sharding(mesh, layout))
    predicted = shard_bytes(layout, whole.shape, 4, cube.sizes)
    assert right(array) and by_jax(array) == by_notation(layout)
    assert all(shard.data.nbytes == predicted for shard in array.addressable_shards)
    assert predicted * N == formulas.copies(cube.sizes, layout.axes) * whole.nbytes
drawn = [draw.layout(text, (rows, columns), cube, itemsize=4) for text in LAYOUTS]
show(beside(drawn, f"One array, six ways on {cube}"))

# %% [markdown]
# Twice the copies, half the shards, twice the memory on each device.
#
# ### Exercise (core): which layout is this?
#
# The mesh is `dp=2 fsdp=2 tp=2`, the array `b d`, rows run down. Each rectangle names the devices that hold it. Write the
# layout.

# %% tags=["plumbing"]
held = {(0, 0): "0 2", (0, 1): "4 6", (1, 0): "1 3", (1, 1): "5 7"}
grid = [Rect(120 * c, 50 * r, 116, 46, "cell", "edge") for r, c in held]
for (r, c), who in held.items():
    at = 120 * c + 58, 50 * r + 23
    grid.append(small_text(*at, f"devices {who}", fill="ink"))
words = [f"row {r}, column {c}: devices {who}" for (r, c), who in held.items()]
show(compose("Which layout is this?", [grid], "\n".join(words)))

# %%
layout_seen = ...  # a text such as "b/dp d"

attempt("00.layout_of", layout_seen)

# %% [markdown]
# ## Devices that differ in one coordinate talk to each other
#
# Such devices form a **group**. In the cube, each edge joins the two of a group.
#
# `jax.shard_map` runs one function on every device. `in_specs` says how the argument is cut, and inside, the function sees its
# own piece. There it may call a **collective**, in which all devices of a group take part. `lax.all_gather` collects their
# pieces. Below every device sends its number over each axis, and we print whom each hears:

# %%
live = [axis for axis, size in cube.sizes.items() if size > 1]


def hear(position):
    # tiled: the pieces are joined along the first dim
    return [lax.all_gather(position, axis, tiled=True) for axis in live]


CUT = P(tuple(AXES))  # JAX's own layout: the first dim, cut by all axes
ask = jax.jit(jax.shard_map(hear, mesh=mesh, in_specs=CUT, out_specs=CUT))
heard = ask(jnp.arange(N))
for axis, answer in zip(live, heard, strict=True):
    told = np.asarray(answer).reshape(N, -1)  # row i: what device i hears
    groups = sorted({tuple(map(int, row)) for row in told})
    print(
        f"groups over {axis}:",
        *(" ".join(map(str, group)) for group in groups),
        sep="  ",
    )

# %% tags=["plumbing"]
for axis, answer in zip(live, heard, strict=True):
    told = np.asarray(answer).reshape(N, -1)
    for group in draw.groups(cube.sizes, AXES, [axis]):
        assert (told[group] == group).all(), "the groups of the notation"
compiled = ask.lower(jnp.arange(N)).compile()
sent = census_table(census_hlo(compiled.as_text(), mesh))
counts = {key: row["count"] for key, row in sent.items()}
assert counts == {(axis, "all-gather"): 1 for axis in live}

# %% [markdown]
# ## A cut moves from rows to columns, and each device sends half of its shard
#
# An **arrow** says how a layout changes. `b/tp d -> b d/tp`: the cut moves from `b` to `d`. Each device cuts its shard into
# pieces, keeps one and sends the others. That is an all-to-all, in each group over `tp`: 0 and 1 exchange halves, so do 2 and 3,
# 4 and 5, 6 and 7. Written by hand:

# %%
arrow = parse_arrow("b/tp d -> b d/tp")
before = jax.device_put(whole, sharding(mesh, arrow.before))


def by_hand(x):
    # tiled: the pieces are joined along dim 0
    return lax.all_to_all(x, "tp", split_axis=1, concat_axis=0, tiled=True)


def on_mesh(function):
    places = dict(in_specs=spec(arrow.before), out_specs=spec(arrow.after))
    return jax.jit(jax.shard_map(function, mesh=mesh, **places))


moved = on_mesh(by_hand)(before)
assert right(moved) and moved.sharding.is_equivalent_to(sharding(mesh, arrow.after), 2)
show(draw.arrow(arrow, (rows, columns), cube, 4))

# %% tags=["plumbing"]
# The same from the text of the arrow: value, sharding, communication and memory.
resolved = Plan(cube, zero=0).resolve()
by_arrow = on_mesh(lambda x: Manual(resolved).carry_out(x, arrow))
package, compiled = by_arrow(before), by_arrow.lower(before).compile()
found = census_table(census_hlo(compiled.as_text(), mesh))
moves = draw.moved(arrow, whole.shape, cube.sizes, 4)
predicted = {
    (",".join(move.axes), move.kind): {"count": 1, "bytes_sent": sent}
    for move, sent in moves
    if sent
}
assert right(package) and found == predicted
assert package.sharding.is_equivalent_to(sharding(mesh, arrow.after), 2)
given = shard_bytes(arrow.before, whole.shape, 4, cube.sizes)
assert compiled_memory(compiled)["argument_bytes"] == given
assert [sent for _, sent in moves if sent] == [whole.nbytes // 4] * (tp == 2)

# %% [markdown]
# A shard is 1 KiB (1,024 B). Half of it leaves: 512 B. llmpar, the library of these lessons, can also carry out an arrow by itself: it
# sends the same 512 B.
#
# ## Keep: a line of text says who holds what
#
# 1. A mesh names devices by coordinates; `pp dp fsdp ep sp tp` run from slow links to fast ones.
# 2. A layout says which axes cut which dim; an axis that it does not name means copies.
# 3. Shards times copies is the number of devices.
# 4. Devices that differ in one coordinate form the group that talks over that axis.
# 5. An arrow between two layouts is a collective, or a cut that sends nothing. Its bytes follow from the two layouts.

# %% [markdown]
# ## Further
#
# You know PyTorch? [Lesson 00b](00b_from_pytorch.ipynb) sets DDP, FSDP2, DTensor and NCCL beside JAX and arrows.
#
# What cannot work is refused in one sentence, with the arithmetic: type `b/tp d/tp` below. All words are on
# [one page](../docs/words.md#words).
#
# ## Try it
#
# In a running notebook: type any layout and choose a mesh. A layout that cannot be shows its refusal. (In the stored page
# this is a picture.)

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


def look(_=None):
    try:
        picture.value = to_svg(drawing())
    except ValueError as error:
        picture.value = f"<pre>{html.escape(str(error))}</pre>"


text.observe(look, "value")
choice.observe(look, "value")
choice.value = "dp=2 fsdp=2 tp=2"
png = base64.b64encode(drawing()._repr_png_()).decode()
words = {"image/png": png, "text/plain": drawing().text}
size = {"image/png": {"width": drawing().width}}
widget = widgets.VBox([text, choice, picture])._repr_mimebundle_()
display(widget | words, raw=True, metadata=size)

# %% [markdown]
# ## Of an array that exists
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
# On 8 devices (`dp=8`), `b/dp d` and `b d/dp` of a float32 array `[1024, 256]` take the same memory. Which one collective
# turns the first into the second, and how many bytes does each device send for it? (The table of arrows is
# [here](../docs/words.md#layouts-and-arrows).)

# %%
collective = ...  # "all-gather", "reduce-scatter", "all-reduce" or "all-to-all"
bytes_sent = ...

attempt("00.swap", {"collective": collective, "bytes_sent": bytes_sent})

# %% [markdown]
# ### Exercise (expert): when the order of the axes matters
#
# Two hosts have four devices each: 0 to 3 and 4 to 7. Fast links join the devices of a host; a slow one joins the hosts.
# With `tp` innermost (as here) every `tp` group stays on one host. With `tp` outermost, none would. That is why the axes
# have a fixed order, slow links first, and why you rarely think about it.

# %%
show(draw.mesh("dp=2 tp=4", devices_per_host=4, highlight_axis="tp"))

# %% [markdown]
# Count the trouble: write a function that returns the number of groups of `axis` whose devices are not all on one host.
# `sizes` lists the axes from the outermost to the innermost, as in `{"dp": 2, "tp": 4}`.


# %%
def groups_across_hosts(sizes, axis, devices_per_host): ...  # replace the dots


attempt("00.groups_across_hosts", groups_across_hosts)

# %% [markdown]
# ## Where XLA's partitioner differs
#
# JAX can also be given only the two layouts. Then the partitioner of XLA, JAX's compiler, chooses what to send. For `b/tp d -> b d/tp` it finds
# the same all-to-all. For `b/dp d -> b d/tp` there are several roads, and the shortest is neither its own nor the one
# that a single arrow takes: cut first (free), then gather the smaller piece. Two arrows say exactly that.


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
# ## On your cluster
#
# ```
# llmpar doctor                                      which devices, which versions, what is missing
# llmpar doctor --json                               the same for a script
# llmpar inspect --mesh "dp=2 fsdp=-1 tp=4"          -1 is what is left; refused in one sentence if it cannot be
# llmpar inspect --mesh-dim 1,-1,4                   the same sizes as EasyLM writes them: dp, fsdp, mp
# llmpar lab                                         these notebooks
# ```
