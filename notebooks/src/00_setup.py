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
# | *axis* | one direction of the grid; ours are called `pp dp fsdp ep sp tp`, slow links first |
# | *shard* | the piece of an array that a device holds |
# | *replica* | one of several devices that hold the same shard |
#
# Letters: `b` rows of the batch, `d` width of the model.
#
# Words of this package (layout, arrow, region, reading, island) have a table of their own in the
# [README](../README.md#words).
#
# With fewer than two accelerators, `use_devices` asks JAX for 8 simulated devices: eight memories and eight threads in this
# one processor. Values, layouts and bytes are exact on them. Times mean nothing.

# %%
from llmpar.mesh import use_devices

devices = use_devices()

# %% [markdown]
# ## One screen
#
# A **layout** is a line of text: `b/dp d/tp` says that the dim `b` is cut by the mesh axis `dp`, and `d` by `tp`. An axis
# that the layout does not name cuts nothing: along it, devices hold copies. That is the whole notation for now.

# %%
import numpy as np

from llmpar import draw
from llmpar.draw.scene import show
from llmpar.notation import AXES, parse_arrow, parse_layout, parse_mesh

N = len(devices)
# With one device all axes have size 1, and all checks hold.
tp, fsdp = 2 if N % 2 == 0 else 1, 2 if N % 4 == 0 else 1
line = parse_mesh("dp=-1", N)  # -1: what is left
table = parse_mesh(f"dp=-1 tp={tp}", N)
cube = parse_mesh(f"dp=-1 fsdp={fsdp} tp={tp}", N)
rows, columns = 4 * N, 2 * N

show(draw.layout("b/dp d/tp", (rows, columns), cube))

# %% [markdown]
# ## Meshes
#
# The same devices make a line, a table or a cube. The order is always that of the list above: neighbours on the last axis
# are next to each other, where links are fast; partners on the first are farthest apart.

# %%
from llmpar.mesh import make_mesh

for shape in (line, table, cube):
    mesh = make_mesh(shape)
    live = [axis for axis, size in shape.sizes.items() if size > 1]
    assert mesh.size == shape.size == N and mesh.axis_names == tuple(AXES)
    print(f"mesh {str(shape):<18} {mesh.size} devices, axes in use: {' '.join(live) or 'none'}")

show(draw.mesh(cube, highlight_axis="fsdp"))

# %% [markdown]
# Devices that differ in one coordinate only form a **group**: they are the ones that talk when something moves over that
# axis. `groups` computes them from the sizes; JAX can be asked who is really there. In the program below every device
# sends its position over each axis, and what it hears must be its group.

# %%
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from llmpar.inspect.census import census_hlo, census_table, compiled_memory

mesh = make_mesh(cube)
live = [axis for axis, size in cube.sizes.items() if size > 1]


def hear(position):
    return [lax.all_gather(position, axis, tiled=True) for axis in live]


ask = jax.jit(jax.shard_map(hear, mesh=mesh, in_specs=P(tuple(AXES)), out_specs=P(tuple(AXES))))
heard = ask(jnp.arange(N))
for axis, answer in zip(live, heard, strict=True):
    told = np.asarray(answer).reshape(N, -1)  # row i: what device i hears
    groups = draw.groups(cube.sizes, AXES, [axis])
    for group in groups:
        assert (told[group] == group).all()
    print(f"groups over {axis}: {groups}, as JAX has them")

sent = census_table(census_hlo(ask.lower(jnp.arange(N)).compile().as_text(), mesh))
assert {key: row["count"] for key, row in sent.items()} == {(axis, "all-gather"): 1 for axis in live}
print(f"compiled: {len(sent)} collectives, one all-gather per axis in use")

# %% [markdown]
# ## Predict
#
# A float32 array `[rows, columns]` is placed as `b/dp,fsdp d`: two axes cut `b`, and `tp` is not named.
# How many bytes does each device hold?

# %%
print(f"{rows} x {columns} float32 on {dict(dp=cube.dp, fsdp=cube.fsdp, tp=cube.tp)}")

# %%
from llmpar.exercises import attempt, hint, solution

bytes_held = ...  # your number

attempt("00.held", bytes_held, rows=rows, columns=columns, dp=cube.dp, fsdp=cube.fsdp, tp=cube.tp)

# %% [markdown]
# ## Run: one array, six ways
#
# The same array is placed six ways on the cube. For each, three things are compared with JAX: every shard holds the right
# numbers (*value*), the devices that the notation names hold it (*sharding*), and it has as many bytes as predicted
# (*memory*). The fourth verdict, communication, needs something that moves; it follows below.

# %%
from llmpar.mesh import shard_bytes, sharding
from llmpar.predict import formulas

LAYOUTS = ("b d", "b/dp d", "b/dp,fsdp d", "b/dp,fsdp d/tp", "b/dp d/tp", "b d/fsdp,tp")
whole = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)


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
        rectangle = tuple(cut.indices(size)[:2] for cut, size in zip(where[device], array.shape, strict=True))
        held.setdefault(rectangle, []).append(position)
    return held


print("layout           shards  copies  a device holds   bytes   values  holders  memory")
for text in LAYOUTS:
    layout = parse_layout(text)
    array = jax.device_put(whole, sharding(mesh, layout))
    copies, predicted = (
        formulas.copies(cube.sizes, layout.axes),
        shard_bytes(layout, whole.shape, 4, cube.sizes),
    )
    value = all(np.array_equal(shard.data, whole[shard.index]) for shard in array.addressable_shards)
    who = by_jax(array) == by_notation(layout)
    memory = all(shard.data.nbytes == predicted for shard in array.addressable_shards)
    assert value and who and memory and copies * len(by_jax(array)) == N
    held = "x".join(map(str, layout.shard_shape(whole.shape, cube.sizes)))
    print(f"{text:<16} {N // copies:>6} {copies:>7} {held:>15} {predicted:>7}   equal   equal    equal")

# %% [markdown]
# Shards times copies is the number of devices, in every row. The six as pictures, drawn from the layouts that were just
# compared with JAX:

# %%
from llmpar.draw.scene import Group, compose

drawn, placed, y = [draw.layout(text, (rows, columns), cube, itemsize=4) for text in LAYOUTS], [], 0
for left, right in zip(drawn[::2], drawn[1::2], strict=True):
    placed += [Group(left.items, 0, y), Group(right.items, max(s.width for s in drawn[::2]) + 20, y)]
    y += max(left.height, right.height)
show(compose(f"One array, six ways on {cube}", [placed], "\n".join(s.text for s in drawn)))

# %% [markdown]
# ## Run: something moves
#
# An **arrow** says how a layout changes. `b/tp d -> b d/tp` moves the cut from `b` to `d`: each device cuts its shard into
# pieces, keeps one and sends the others, an all-to-all. Here it is written by hand in bare `lax`, and by the package from
# the text of the arrow, with the four verdicts.

# %%
from llmpar.mesh import spec
from llmpar.par import Manual
from llmpar.plan import Plan

arrow = parse_arrow("b/tp d -> b d/tp")
before = jax.device_put(whole, sharding(mesh, arrow.before))


def by_hand(x):
    return lax.all_to_all(x, "tp", split_axis=1, concat_axis=0, tiled=True) if tp > 1 else x


def by_arrow(x):
    return Manual(Plan(cube, zero=0)).carry_out(x, arrow)


def on_mesh(function):
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=spec(arrow.before), out_specs=spec(arrow.after))
    )


hand, package = on_mesh(by_hand)(before), on_mesh(by_arrow)(before)
compiled = on_mesh(by_arrow).lower(before).compile()
found = census_table(census_hlo(compiled.as_text(), mesh))
predicted = {
    (",".join(move.axes), move.kind): {"count": 1, "bytes_sent": sent}
    for move, sent in draw.moved(arrow, whole.shape, cube.sizes, 4)
    if sent
}

assert all(
    np.array_equal(s.data, whole[s.index]) for array in (hand, package) for s in array.addressable_shards
)
print("value: the package's array, the hand-written one and the original are equal")
assert package.sharding.is_equivalent_to(sharding(mesh, arrow.after), 2)
print(f"sharding: {arrow.after}, as the arrow ends")
assert found == predicted
print(f"communication: compiled = predicted = {predicted or 'nothing, there is one device'}")
assert compiled_memory(compiled)["argument_bytes"] == shard_bytes(arrow.before, whole.shape, 4, cube.sizes)
print(f"memory: {shard_bytes(arrow.before, whole.shape, 4, cube.sizes)} bytes per device go in, as predicted")

show(draw.arrow(arrow, (rows, columns), cube, 4))

# %% [markdown]
# ## Refusals
#
# What cannot work is refused in one sentence that holds the arithmetic and, where there is one, a way out. These are
# about a mesh of 8 devices, whatever is here.


# %%
# NBVAL_CHECK_OUTPUT
def refusal(ask):
    try:
        ask()
    except ValueError as error:
        return str(error)
    raise AssertionError("this should have been refused")


eight = parse_mesh("dp=4 tp=2", 8)
said = [
    refusal(lambda: parse_layout("b/dp d").shard_shape((6, 16), eight.sizes)),
    refusal(lambda: parse_layout("b/tp d/tp")),
    refusal(lambda: parse_layout("b/dp d/xp")),
    refusal(lambda: parse_mesh("dp=4 tp=4", 8)),
    refusal(lambda: parse_mesh("dp=-1 tp=-1", 8)),
]
print("\n\n".join(said))
assert "6" in said[0] and "dp = 4" in said[0]
assert all("^" in text for text in (said[1], said[2], said[4])), "a caret stands under the bad word"
assert "8 are present" in said[3]

# %% [markdown]
# ## Try it
#
# In a running notebook: type any layout and choose a mesh. A layout that cannot be shows its refusal. (In the stored page
# this is a picture.)

# %%
import base64
import html

import ipywidgets as widgets
from IPython.display import display

from llmpar.draw.scene import to_svg

text = widgets.Text("b/fsdp,tp d", description="layout")
sizes = widgets.Dropdown(
    options=["dp=8", "dp=4 tp=2", "dp=2 fsdp=2 tp=2", "fsdp=4 tp=2", "tp=8"], description="mesh"
)
picture = widgets.HTML()


def look(_=None):
    try:
        picture.value = to_svg(draw.layout(text.value, (32, 16), sizes.value, itemsize=4))
    except ValueError as error:
        picture.value = f"<pre>{html.escape(str(error))}</pre>"


text.observe(look, "value")
sizes.observe(look, "value")
sizes.value = "dp=2 fsdp=2 tp=2"
still = draw.layout(text.value, (32, 16), sizes.value, itemsize=4)
words = {"image/png": base64.b64encode(still._repr_png_()).decode(), "text/plain": still.text}
display(widgets.VBox([text, sizes, picture])._repr_mimebundle_() | words, raw=True)

# %% [markdown]
# ## The mesh explorer
#
# The same question for a whole model and a cluster that you do not have: who holds what, who talks with whom, and what
# moves in a step. Drag an axis, click a device, choose *groups* and step through a collective. `save HTML` writes a page
# that works without Python. (In the stored page this is a picture; `MeshExplorer("plain", …)` needs core ipywidgets only.)

# %%
from llmpar.explore.explorer import MeshExplorer

explorer = MeshExplorer(
    mesh="dp=2 fsdp=4 tp=2", model="llama3-8b", chip="h100", batch_size=32, axis="fsdp", step=1
)
explorer

# %% [markdown]
# What it draws of an array that exists is no formula: it asks JAX where the shards are.

# %%
layout = parse_layout("b/dp,fsdp d/tp")
live = MeshExplorer.of(jax.device_put(whole, sharding(mesh, layout)))
(row,) = live.document()["tensors"]
assert {tuple(map(tuple, shard)) for shard in row["shards"]} == set(by_notation(layout)), (
    "JAX's shards are those of the notation"
)
print(live)

# %% [markdown]
# ## Exercise, core: which layout is this?
#
# The mesh is `dp=2 fsdp=2 tp=2`, the array `b d`, rows run down. Each rectangle names the devices that hold it. Write the
# layout.

# %%
from llmpar.draw.scene import Rect, small_text

puzzle = {(0, 0): "devices 0 2", (0, 1): "devices 4 6", (1, 0): "devices 1 3", (1, 1): "devices 5 7"}
grid = [Rect(120 * c, 50 * r, 116, 46, "cell", "edge") for r, c in puzzle]
grid += [small_text(120 * c + 58, 50 * r + 23, who, fill="ink") for (r, c), who in puzzle.items()]
show(
    compose(
        "Which layout is this?",
        [grid],
        "\n".join(f"row {r}, column {c}: {who}" for (r, c), who in puzzle.items()),
    )
)

# %%
layout_seen = ...  # a text such as "b/dp d"

attempt("00.layout_of", layout_seen)

# %% [markdown]
# ## Exercise, stretch: two layouts of the same size
#
# On 8 devices (`dp=8`), `b/dp d` and `b d/dp` of a float32 array `[1024, 256]` take the same memory. Which one collective
# turns the first into the second, and how many bytes does each device send for it? (The table of arrows is in the
# [README](../README.md).)

# %%
collective = ...  # "all-gather", "reduce-scatter", "all-reduce" or "all-to-all"
bytes_sent = ...

attempt("00.swap", {"collective": collective, "bytes_sent": bytes_sent})

# %% [markdown]
# ## Exercise, expert: when the order of the axes matters
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
# ## Five lines
#
# 1. A mesh names devices by coordinates; `pp dp fsdp ep sp tp` run from slow links to fast ones.
# 2. A layout says which axes cut which dim; an axis that it does not name means copies.
# 3. A device holds the array's bytes over the product of the cutting axes; the rest of the mesh are copies.
# 4. An arrow between two layouts is a collective, and its bytes follow from the text alone.
# 5. Devices that differ in one coordinate form the group that talks over that axis.
#
# ## Where XLA's partitioner differs
#
# JAX can also be given only the two layouts, and XLA's partitioner chooses what to send. For `b/tp d -> b d/tp` it finds
# the same all-to-all. For `b/dp d -> b d/tp` there are several roads, and the shortest is neither its own nor the one
# that a single arrow takes: cut first (free), then gather the smaller piece. Two arrows say exactly that.

# %%
start, end = parse_layout("b/dp d"), parse_layout("b d/tp")
single = sum(sent for _, sent in draw.moved(parse_arrow(f"{start} -> {end}"), whole.shape, cube.sizes, 4))
two = sum(
    sent
    for text in ("b/dp d -> b/dp d/tp", "b/dp d/tp -> b d/tp")
    for _, sent in draw.moved(parse_arrow(text), whole.shape, cube.sizes, 4)
)
relay = jax.jit(lambda x: x, out_shardings=sharding(mesh, end))
there = jax.device_put(whole, sharding(mesh, start))
chosen = census_table(census_hlo(relay.lower(there).compile().as_text(), mesh))
assert all(np.array_equal(s.data, whole[s.index]) for s in relay(there).addressable_shards)
assert two <= single
print(f"two arrows, cut first: {two} bytes per device")
print(f"one arrow:             {single} bytes per device")
print(f"XLA's choice:          {sum(row['bytes_sent'] for row in chosen.values())} bytes per device")
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
#
# **One number to remember: shards × copies = devices**, so 8 here. Twice the copies, half the shards, twice the memory on each device.

# %%
for text in LAYOUTS:
    layout = parse_layout(text)
    copies, held = formulas.copies(cube.sizes, layout.axes), shard_bytes(layout, whole.shape, 4, cube.sizes)
    assert held * N == copies * whole.nbytes, "as many times the memory as there are copies"
print(f"{N} devices = shards x copies, for each of the {len(LAYOUTS)} layouts above")
