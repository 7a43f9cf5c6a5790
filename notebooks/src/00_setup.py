# ---
# jupyter:
#   llmpar:
#     teaching: 20
#     exercises: 15
#     needs: []
#     objectives:
#     - Name the devices of a machine, and say whether they are real or simulated.
#     - >-
#       Read a layout such as `b/dp d/tp`: which device holds which piece, how large it
#       is, and how many copies there are.
#     - Say which collective carries one layout into another, and what it sends.
# ---

# %% [markdown]
# # 00 · Devices, meshes, and who holds what
#
# **Question.** Which devices are there, and who holds what?
#
# Everything that follows in these lessons is about placing arrays on several devices and moving them between devices.
# So first the words:
#
# | word | meaning |
# |---|---|
# | *device* | one accelerator, or one simulated accelerator: something with memory of its own that runs programs |
# | *process* | a running Python; on a cluster each host runs one or more, and each sees all devices but owns only some |
# | *mesh* | the devices in a grid, so that they can be named by coordinates |
# | *axis* | one direction of the grid |
# | *dim* | one direction of an array; ours have a letter each |
# | *shard* | the piece of an array that a device holds |
# | *replica* | one of several devices that hold the same shard |
#
# Letters: `b` rows of the batch, `d` width of the model.
#
# Words of this package (layout, arrow, region, reading, island, census) have a table of their own:
# [docs/words.md](../docs/words.md#words).
#
# ## Which devices?
#
# With fewer than two accelerators, `use_devices` asks JAX for 8 simulated devices: eight memories and eight threads in this
# one processor. Values, layouts and bytes are exact on them. Times mean nothing. The last line is the set-up check: before
# a course, run this cell and send it.

# %%
from llmpar.mesh import use_devices

devices = use_devices()

# %%
import platform

import jax

for one in devices:
    print(f"device {one.id}: {one.device_kind}, of process {one.process_index}")
real = devices[0].platform != "cpu"
kind = "real" if real else "simulated"
assert float(jax.jit(lambda x: x + x)(1.0)) == 2.0
print(f"{len(devices)} {kind} devices, {jax.process_count()} process")
print(f"set-up check: OK (Python {platform.python_version()}, JAX {jax.__version__})")

# %% [markdown]
# ## Six axes
#
# A mesh of this package has up to six axes. Each stands for one way to share the work of training, and has a lesson:
#
# | axis | name | what its devices share | lesson |
# |---|---|---|---|
# | `pp` | pipeline parallelism | the layers | 07, 08 |
# | `dp` | data parallelism | the batch; each holds all weights | 03 |
# | `fsdp` | fully sharded data parallelism (ZeRO) | the batch, and the storage of the weights | 04 |
# | `ep` | expert parallelism | the experts of a layer | 09 |
# | `sp` | sequence parallelism (elsewhere: context parallelism) | the positions of a sequence | 06 |
# | `tp` | tensor parallelism | each product of matrices | 05 |
#
# They stand in this order because neighbours on the last axis are next to each other, where links are fast; partners on
# the first are farthest apart. The order of the devices is that of the list above.

# %% tags=["plumbing"]
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from llmpar import draw
from llmpar.draw.scene import Group, Rect, compose, show, small_text
from llmpar.exercises import attempt, hint, met, solution
from llmpar.inspect.census import census_hlo, census_table, compiled_memory
from llmpar.mesh import make_mesh, shard_bytes, sharding, spec
from llmpar.notation import AXES, parse_arrow, parse_layout, parse_mesh
from llmpar.par import Manual
from llmpar.plan import Plan
from llmpar.predict import formulas

# %% [markdown]
# The same devices make a line, a table or a cube:

# %%
N = len(devices)
# With one device all axes have size 1, and all checks hold.
tp, fsdp = 2 if N % 2 == 0 else 1, 2 if N % 4 == 0 else 1
line = parse_mesh("dp=-1", N)  # -1: what is left
table = parse_mesh(f"dp=-1 tp={tp}", N)
cube = parse_mesh(f"dp=-1 fsdp={fsdp} tp={tp}", N)
for shape in (line, table, cube):
    mesh = make_mesh(shape)
    live = [axis for axis, size in shape.sizes.items() if size > 1]
    assert mesh.size == shape.size == N and mesh.axis_names == tuple(AXES)
    print(f"mesh {shape!s:<18} axes in use: {' '.join(live) or 'none'}")

show(draw.mesh(cube, highlight_axis="fsdp"))

# %% [markdown]
# ## Layouts
#
# A **layout** is a line of text: `b/dp d/tp` says that the dim `b` is cut by the mesh axis `dp`, and `d` by `tp`. An axis
# that the layout does not name cuts nothing: along it, devices hold copies. That is the whole notation for now.

# %%
rows, columns = 4 * N, 2 * N
show(draw.layout("b/dp d/tp", (rows, columns), cube))

# %% [markdown]
# ## Predict
#
# A float32 array `[rows, columns]` is placed as `b/dp,fsdp d`: two axes cut `b`, and `tp` is not named.
# How many bytes does each device hold?

# %%
print(f"{rows} x {columns} float32 on dp={cube.dp} fsdp={cube.fsdp} tp={cube.tp}")

# %%
bytes_held = ...  # your number

sizes = dict(dp=cube.dp, fsdp=cube.fsdp, tp=cube.tp)
attempt("00.held", bytes_held, rows=rows, columns=columns, **sizes)

# %% [markdown]
# ## Run: one array, six ways
#
# The same array is placed six ways on the cube. For each, three things are compared with JAX: every shard holds the right
# numbers (*value*), the devices that the notation names hold it (*sharding*), and it has as many bytes as predicted
# (*memory*). The fourth verdict, communication, needs something that moves; it follows below.


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


# %%
LAYOUTS = ("b d", "b/dp d", "b/dp,fsdp d", "b/dp,fsdp d/tp", "b/dp d/tp", "b d/fsdp,tp")
whole = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)

print(
    "layout           shards  copies  a device holds   bytes   value, sharding, memory"
)
for text in LAYOUTS:
    layout = parse_layout(text)
    array = jax.device_put(whole, sharding(mesh, layout))
    copies = formulas.copies(cube.sizes, layout.axes)
    predicted = shard_bytes(layout, whole.shape, 4, cube.sizes)
    assert right(array) and by_jax(array) == by_notation(layout)
    assert all(shard.data.nbytes == predicted for shard in array.addressable_shards)
    assert copies * len(by_jax(array)) == N
    held = "x".join(map(str, layout.shard_shape(whole.shape, cube.sizes)))
    print(f"{text:<16} {N // copies:>6} {copies:>7} {held:>15} {predicted:>7}", end="")
    print("   equal, equal, equal")
asked = jax.device_put(whole, sharding(mesh, parse_layout("b/dp,fsdp d")))
met("00.held", asked.addressable_shards[0].data.nbytes, "a device of JAX holds")

# %% [markdown]
# Shards times copies is the number of devices, in every row. The six as pictures, drawn from the layouts that were just
# compared with JAX:

# %% tags=["plumbing"]
drawn = [draw.layout(text, (rows, columns), cube, itemsize=4) for text in LAYOUTS]
placed, y = [], 0
for left, beside in zip(drawn[::2], drawn[1::2], strict=True):
    x = max(scene.width for scene in drawn[::2]) + 20
    placed += [Group(left.items, 0, y), Group(beside.items, x, y)]
    y += max(left.height, beside.height)
words = "\n".join(scene.text for scene in drawn)
show(compose(f"One array, six ways on {cube}", [placed], words))

# %% [markdown]
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
# ## Groups, and a program for every device
#
# Devices that differ in one coordinate only form a **group**: they are the ones that talk when something moves over that
# axis. `draw.groups` computes them from the sizes; JAX can be asked who is really there.
#
# `jax.shard_map` runs one function on every device. `in_specs` says how the argument is cut; inside, the function sees its
# own piece, and may call **collectives**, which name an axis: `lax.all_gather` collects the pieces of a group. Below every
# device sends its position over each axis, and what it hears must be its group. (Later lessons also use `lax.pcast`. It
# changes no number: it tells JAX that from here on each device has a value of its own.)

# %%
live = [axis for axis, size in cube.sizes.items() if size > 1]


def hear(position):
    return [lax.all_gather(position, axis, tiled=True) for axis in live]


CUT = P(tuple(AXES))  # the first dim, cut by all axes
ask = jax.jit(jax.shard_map(hear, mesh=mesh, in_specs=CUT, out_specs=CUT))
heard = ask(jnp.arange(N))
for axis, answer in zip(live, heard, strict=True):
    told = np.asarray(answer).reshape(N, -1)  # row i: what device i hears
    groups = draw.groups(cube.sizes, AXES, [axis])
    for group in groups:
        assert (told[group] == group).all()
    print(f"groups over {axis}: {groups}, as JAX has them")

# %% [markdown]
# JAX compiles a program before it runs (`lower`, then `compile`), and the compiled text can be read. Our **census** counts
# the collectives in it, with their bytes:

# %%
compiled = ask.lower(jnp.arange(N)).compile()
sent = census_table(census_hlo(compiled.as_text(), mesh))
counts = {key: row["count"] for key, row in sent.items()}
assert counts == {(axis, "all-gather"): 1 for axis in live}
print(f"compiled: {len(sent)} collectives, one all-gather per axis in use")

# %% [markdown]
# ## Run: something moves
#
# An **arrow** says how a layout changes. `b/tp d -> b d/tp` moves the cut from `b` to `d`: each device cuts its shard into
# pieces, keeps one and sends the others, an all-to-all. Here it is written by hand in bare `lax`, and by the package from
# the text of the arrow.

# %%
arrow = parse_arrow("b/tp d -> b d/tp")
before = jax.device_put(whole, sharding(mesh, arrow.before))


def by_hand(x):
    if tp == 1:
        return x
    return lax.all_to_all(x, "tp", split_axis=1, concat_axis=0, tiled=True)


def by_arrow(x):
    return Manual(Plan(cube, zero=0).resolve()).carry_out(x, arrow)


def on_mesh(function):
    places = dict(in_specs=spec(arrow.before), out_specs=spec(arrow.after))
    return jax.jit(jax.shard_map(function, mesh=mesh, **places))


hand, package = on_mesh(by_hand)(before), on_mesh(by_arrow)(before)
show(draw.arrow(arrow, (rows, columns), cube, 4))

# %% [markdown]
# ## Compare: four verdicts

# %% tags=["plumbing"]
compiled = on_mesh(by_arrow).lower(before).compile()
found = census_table(census_hlo(compiled.as_text(), mesh))
moved = draw.moved(arrow, whole.shape, cube.sizes, 4)
predicted = {
    (",".join(move.axes), move.kind): {"count": 1, "bytes_sent": sent}
    for move, sent in moved
    if sent
}
assert right(hand) and right(package)
print("value: the package's array, the hand-written one and the original are equal")
assert package.sharding.is_equivalent_to(sharding(mesh, arrow.after), 2)
print(f"sharding: {arrow.after}, as the arrow ends")
assert found == predicted
for (axes, kind), row in predicted.items():
    print(f"communication: {row['count']} {kind} over {axes},", end=" ")
    print(f"{row['bytes_sent']} bytes sent per device, as predicted")
given = shard_bytes(arrow.before, whole.shape, 4, cube.sizes)
assert compiled_memory(compiled)["argument_bytes"] == given
print(f"memory: {given} bytes per device go in, as predicted")

# %% [markdown]
# ## Refusals
#
# What cannot work is refused in one sentence that holds the arithmetic and, where there is one, a way out. These are
# about a mesh of 8 devices, whatever is here.

# %% tags=["nbval-check-output"]
eight = parse_mesh("dp=4 tp=2", 8)
CANNOT = {
    "6 rows over dp=4": lambda: parse_layout("b/dp d").shard_shape(
        (6, 16), eight.sizes
    ),
    "tp twice": lambda: parse_layout("b/tp d/tp"),
    "an axis xp": lambda: parse_layout("b/dp d/xp"),
    "16 devices": lambda: parse_mesh("dp=4 tp=4", 8),
    "what is left, twice": lambda: parse_mesh("dp=-1 tp=-1", 8),
}
said = []
for what, ask_for in CANNOT.items():
    try:
        ask_for()
        raise AssertionError(f"{what} should have been refused")
    except ValueError as error:
        said.append(str(error))
print("\n\n".join(said))
assert "6" in said[0] and "dp = 4" in said[0] and "8 are present" in said[3]
assert all("^" in said[i] for i in (1, 2, 4)), "a caret stands under the bad word"

# %% [markdown]
# ## Five lines
#
# 1. A mesh names devices by coordinates; `pp dp fsdp ep sp tp` run from slow links to fast ones.
# 2. A layout says which axes cut which dim; an axis that it does not name means copies.
# 3. A device holds the array's bytes over the product of the cutting axes; the rest of the mesh are copies.
# 4. An arrow between two layouts is a collective, and its bytes follow from the text alone.
# 5. Devices that differ in one coordinate form the group that talks over that axis.
#
# **One number to remember: shards × copies = devices**, so 8 here. Twice the copies, half the shards, twice the memory on each device.

# %%
for text in LAYOUTS:
    layout = parse_layout(text)
    copies = formulas.copies(cube.sizes, layout.axes)
    held = shard_bytes(layout, whole.shape, 4, cube.sizes)
    # As many times the memory as there are copies.
    assert held * N == copies * whole.nbytes
print(f"{N} devices = shards x copies, for each of the {len(LAYOUTS)} layouts above")

# %% [markdown]
# ## Further
#
# Two things to play with, two more exercises, and what XLA chooses by itself.
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
# ## The mesh explorer
#
# The same question for a whole model and a cluster that you do not have: does it fit, how long does a step take, who holds
# what, what moves, and what would be better? Change a word of the sentence, give an axis a square, click a device, a bar or
# a dot of the map. What you do not set, the planner chooses. *Save* writes one page that answers without a kernel and
# without a network. (In the stored page this is a picture.)

# %%
from llmpar.explore.explorer import MeshExplorer

explorer = MeshExplorer(
    model="llama3-8b", chip="h100", batch_size=32, mesh="dp=2 fsdp=4 tp=2"
)
reply = explorer.answer(explorer.state)
assert reply["verdict"]["tone"] == "good", "16 devices are enough"
explorer

# %% [markdown]
# What it draws of an array that exists is no formula: it asks JAX where the shards are. A whole state of training, a
# compiled program, a sharding or a bare mesh may stand in the array's place.

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
# JAX can also be given only the two layouts, and XLA's partitioner chooses what to send. For `b/tp d -> b d/tp` it finds
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
