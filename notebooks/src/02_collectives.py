# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 25
#     needs: ["00"]
#     question: How can all devices get one sum, and what do they send for it?
#     objectives:
#     - Choose the collective that carries out an arrow, and compute what each device
#       sends.
#     - Explain how an all-reduce is made of a ring of permutes.
#     - Compute the time of a collective from its starts, its bytes and the slowest
#       link that it crosses.
# ---

# %% [markdown]
# # 02 · How do eight devices add up their numbers?
#
# Each device has 1 MiB of numbers of its own, its buffer, and each wants the sum of all eight. If every device sent its buffer to
# every other one, each would send 7 MiB. With 1,024 devices each would send nearly a GiB. There must be a better way.

# %% tags=["plumbing"]
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # simulated devices; real ones: On your cluster

from llmpar.parallel.mesh import use_devices

devices = use_devices()

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from llmpar import draw
from llmpar.draw.scene import show, time_text
from llmpar.explore.small import SumExplorer
from llmpar.inspect.census import (
    census_hlo,
    census_table,
    compiled_memory,
    partitioned_hlo,
)
from llmpar.lessons import attempt, hint, met, opened, solution
from llmpar.parallel.mesh import make_mesh, shard_bytes, sharding, spec
from llmpar.parallel.modes import Manual
from llmpar.plan.layout import parse_arrow
from llmpar.plan.mesh_shape import AXES, parse_mesh
from llmpar.plan.plan import Plan
from llmpar.predict import formulas
from llmpar.predict.hardware import chip

N = len(devices)  # 8
mesh = make_mesh(f"tp={N}")
RING = [(i, (i + 1) % N) for i in range(N)]  # to the next device, the last to the first
CUT = P("tp")  # the first dim, along tp


def on_each(function, cut_out=CUT):
    """One device's program, on all of them."""
    run = jax.shard_map(function, mesh=mesh, in_specs=CUT, out_specs=cut_out)
    return jax.jit(run)


def sent_by(program, *given):
    """Kind, executions and bytes sent by a device, of each collective."""
    found = census_hlo(partitioned_hlo(program.lower(*given)), mesh)
    return [(c.kind.removeprefix("collective-"), c.count, c.bytes_sent) for c in found]


# %%
show(draw.before_after())

# %% [markdown]
# The programs of these lessons send in five patterns. In such a **collective** all devices of a group take part. Our eight devices need the
# third one, the all-reduce. We begin with the second, the reduce-scatter, because an all-reduce begins with it.
#
# ## Predict: what does a reduce-scatter send?
#
# Each of eight devices has a buffer of 1 MiB. The buffers are added up, and each device gets its part of the sum.
# **How many bytes must a device send?**

# %%
bytes_sent = ...  # 1 MiB is 2**20 bytes
attempt("02.scattered", bytes_sent, devices=N)

# %% [markdown]
# ## Measured: a program for each pattern
#
# `jax.shard_map` runs one function on every device; inside, the function sees this device's own piece, here its buffer `x`. (`on_each`, folded
# above, calls it.) A collective is a call inside that function. It names a mesh axis. Ours is called `"tp"`, and is just a line of eight
# devices. `sent_by` reads the compiled program and adds up what one device sends.

# %%
rows = 512  # of 512 float32: a buffer of 1 MiB on each device
x = np.random.default_rng(0).standard_normal((N * rows, 512)).astype(np.float32)
# tiled=True: parts are joined along that dim
programs = {
    "all-gather": on_each(lambda x: lax.all_gather(x[: rows // N], "tp", tiled=True)),
    "reduce-scatter": on_each(lambda x: lax.psum_scatter(x, "tp", tiled=True)),
    # P(): the result is whole on every device
    "all-reduce": on_each(lambda x: lax.psum(x, "tp"), cut_out=P()),
    "all-to-all": on_each(lambda x: lax.all_to_all(x, "tp", 1, 0, tiled=True)),
    "permute": on_each(lambda x: lax.ppermute(x, "tp", RING)),
}
sent = {kind: sent_by(program, x) for kind, program in programs.items()}
met("02.scattered", sent["reduce-scatter"][0][2])

# %% tags=["plumbing"]
shown = opened("02.scattered")
for kind, found in sent.items():
    assert found == [(kind, 1, formulas.sent_bytes(kind, 2**20, N))]
    if shown:
        print(f"{kind:<15} {found[0][2]:>9,} bytes sent by each device")
blocks = x.reshape(N, rows, 512)
total = blocks.sum(0)
close = dict(rtol=1e-4, atol=1e-4)  # sums of N numbers in another order
assert np.allclose(programs["all-reduce"](x), total, **close)
assert np.allclose(programs["reduce-scatter"](x), total, **close)
shifted = np.asarray(programs["permute"](x)).reshape(N, rows, 512)
assert np.array_equal(shifted, np.roll(blocks, 1, axis=0))

# %% [markdown]
# Cut the message into `N` parts, one for each device. A device sends `N - 1` of them: `(N - 1)/N` of the message. (For an all-gather the
# message is the gathered result.) A permute sends the whole buffer.
#
# An all-reduce sends nearly twice the buffer, because it consists of two collectives: after a reduce-scatter each device has a
# part of the sum, then an all-gather collects these parts.
#
# ## And with a thousand devices?
#
# Twice `(N - 1)/N` stays below 2, however many devices take part. This is the better way that we looked for:

# %% tags=["plumbing"]
counts = [2**k for k in range(1, 11)]
ring = [formulas.sent_bytes("all-reduce", 1.0, n) for n in counts]
assert max(ring) < 2
lines = [
    ("everybody to everybody", [n - 1 for n in counts], "ink", "o", True),
    ("all-reduce", ring, "tp-line", "o", False),
]
axes = dict(x="devices", y="buffers that a device sends", log=True)
axes |= dict(levels=[1, 2, 10, 100, 1000], text="{:.4g}".format)
show(draw.curves(lines, counts, **axes, title="What one sum costs each device"))

# %% [markdown]
# ### Exercise (core): four kinds
#
# Four devices exchange a message of 8 MB. For an all-gather it is the gathered result; for the others it is the buffer of each
# device. How many **MB** does a device send?

# %%
all_gather, reduce_scatter, all_reduce, all_to_all = ..., ..., ..., ...
answer = {"all-gather": all_gather, "reduce-scatter": reduce_scatter}
attempt("02.sent", answer | {"all-reduce": all_reduce, "all-to-all": all_to_all})

# %% [markdown]
# ## The sum goes round a ring twice
#
# The devices form a ring, and each sends to the next one only. In the **first lap** the sum of a part travels, and each device adds its own
# numbers to what comes in: a reduce-scatter. In the **second lap** the finished parts travel: an all-gather. Step through it:

# %%
SumExplorer(collective="all-reduce")

# %% [markdown]
# Here is the same in code. `lax.ppermute` is one hop: it sends a value along `RING`, which lists pairs (from, to).


# %%
def ring_all_reduce(x):
    """psum, out of 2 (N - 1) permutes. x is one device's buffer."""
    me, parts = lax.axis_index("tp"), x.reshape(N, -1)
    part = parts[(me - 1) % N]
    for hop in range(2, N + 1):  # first lap: add own numbers to what comes
        part = lax.ppermute(part, "tp", RING) + parts[(me - hop) % N]
    done = [part]  # the sum of part me
    for _ in range(N - 1):  # second lap: hand on what is finished
        done.append(lax.ppermute(done[-1], "tp", RING))
    order = (me - jnp.arange(N)) % N  # after j hops: the part of device me - j
    return jnp.stack(done)[order].reshape(x.shape)


by_hand = on_each(ring_all_reduce)
found = sent_by(by_hand, x)
hops, sent = sum(count for _, count, _ in found), sum(size for *_, size in found)
print(f"{hops} hops, {sent:,} bytes sent by each device")

# %% tags=["plumbing"]
got = np.asarray(by_hand(x)).reshape(N, rows, 512)
assert all(np.allclose(one, total, **close) for one in got), "as psum"
assert hops == 2 * (N - 1) and sent == formulas.sent_bytes("all-reduce", 2**20, N)

# %% [markdown]

# ## On a mesh, a collective runs in groups
#
# A collective over one axis runs in **groups**: a group is the devices that differ in that coordinate only. Here each device of
# a cube gathers the device numbers of its groups:

# %%
show(draw.mesh("dp=2 fsdp=2 tp=2", highlight_axis="fsdp"))

# %% tags=["plumbing"]
cube = parse_mesh("dp=2 fsdp=2 tp=2")
cubic = make_mesh(cube)
live = [axis for axis, size in cube.sizes.items() if size > 1]
ALL = P(tuple(AXES))  # JAX's own layout: the first dim, cut by all axes

# %%
hear = lambda number: [lax.all_gather(number, axis, tiled=True) for axis in live]
ask = jax.jit(jax.shard_map(hear, mesh=cubic, in_specs=ALL, out_specs=ALL))
heard = [np.asarray(row).reshape(N, -1) for row in ask(jnp.arange(N))]
for axis, row in zip(live, heard, strict=True):
    groups = sorted({tuple(map(int, numbers)) for numbers in row})
    print(f"groups over {axis}:", *(" ".join(map(str, g)) for g in groups), sep="  ")

# %% tags=["plumbing"]
for axis, row in zip(live, heard, strict=True):
    for group in draw.groups(cube.sizes, AXES, [axis]):
        assert (row[group] == group).all(), "the groups of the notation"
compiled = ask.lower(jnp.arange(N)).compile()
table = census_table(census_hlo(compiled.as_text(), cubic))
counts = {key: row["count"] for key, row in table.items()}
assert counts == {(axis, "all-gather"): 1 for axis in live}

# %% [markdown]
# ## An arrow says which collective it is
#
# The lessons write a movement as an **arrow** between two layouts. Take an array, `s` positions down and `d` width across.
# `s/tp d`: positions are cut along `tp`. `s d +tp`: each device has numbers for the whole array, partial sums that must
# still be added up over `tp`. The plus is an unfinished sum, drawn hatched:

# %%
show(draw.arrow("s d +tp -> s/tp d", (512, 512), {"tp": 4}, itemsize=4))

# %% [markdown]
# | arrow | what happens to the slash or the plus | collective |
# |---|---|---|
# | `s/tp d -> s d` | the cut goes away | all-gather |
# | `s d +tp -> s/tp d` | the sum becomes a cut | reduce-scatter |
# | `s d +tp -> s d` | the sum is finished | all-reduce |
# | `s/tp d -> s d/tp` | the cut moves to another dim | all-to-all |
#
# A permute has no arrow: the layout stays the same. It is one step of a ring.
#
# ## Is a small message faster?
#
# To start a message costs α seconds (its latency). Then sending its bytes takes time, too, at β bytes a second. (Many texts write β
# for the inverse.)
#
# $$ \text{time} = \alpha \cdot \text{starts} + \frac{\text{bytes sent}}{\beta} $$
#
# Simulated devices have no links. This is a model of H100s: 370 GB/s leave a GPU inside a node (one machine with 8 GPUs) and 50 GB/s
# between nodes. The ring above makes 14 hops one after the other: 14 starts. A **tree** makes fewer: a sum goes up through log₂ 8 = 3
# levels and its result down again. (NCCL, the GPUs' library, chooses by size and machine.) Our model counts a tree: 3 starts up, 3 down,
# 2 for launching the call (one before each way): 8, of 4 µs each.
#
# **In this model an all-reduce of 1 kB takes 33 µs on 8 H100s of a node. How many µs does one of 100 kB take?**

# %%
microseconds = ...  # 33, 330 or 3300
attempt("02.small", microseconds)

# %%
h100, sizes = chip("h100"), [10**k for k in range(3, 10)]
alpha = h100.rates.start_s
starts_s = 2 * (1 + np.log2(8)) * alpha  # up the tree, and down


def bytes_s(size, inner):
    """Seconds that the bytes of an all-reduce over 8 GPUs take, every inner-th GPU."""
    return formulas.collective_seconds(h100, "all-reduce", size, 8, inner)


apart = [starts_s + bytes_s(size, 8) for size in sizes]
near = [starts_s + bytes_s(size, 1) for size in sizes]
alone = [bytes_s(size, 1) for size in sizes]
knee = starts_s / bytes_s(1.0, 1)  # where starts and bytes take equally long
print(
    f"8 starts of α = {alpha * 1e6:.1f} µs: {starts_s * 1e6:.1f} µs. The bytes of",
    end=" ",
)
print(f"2 · 7/8 · {knee / 1e6:.2f} MB at 370 GB/s: {bytes_s(knee, 1) * 1e6:.1f} µs")

# %% tags=["plumbing"]
assert f"{knee / 1e6:.1f}" == "6.9" and round(apart[-1] / near[-1]) == 7
assert near[2] < 1.02 * near[0], "100 kB as 1 kB"
assert round(near[0] * 1e6) == round(near[2] * 1e6) == 33, "as the bet says"
met("02.small", round(near[2] * 1e6, 1), "computed")
lines = [
    ("8 nodes, one GPU of each", apart, "network", "o", False),
    ("8 GPUs of one node", near, "tp-line", "o", False),
    ("one node, without the starts", alone, "tp-line", None, True),
]
axes = dict(x="bytes in the buffer of a GPU", y="time of an all-reduce", log=True)
marks = [(np.log10(knee) - 3, f"{knee / 1e6:.1f} MB")]
ticks = ["1 kB", "10 kB", "100 kB", "1 MB", "10 MB", "100 MB", "1 GB"]
look = dict(marks=marks, text=time_text, title="8 H100s")
if opened("02.small"):
    show(draw.curves(lines, ticks, **axes, **look))

# %% [markdown]
# Far left of the mark nearly all of the time is starts. At the mark starts and bytes take equally long. That is why gradients are sent in
# **buckets** of many megabytes, not one by one. Right of the mark the link decides. For large messages the same sum takes seven times as
# long between nodes, because a network port carries 50 GB/s, not 370. So axes that send much stay inside a node.
#
# (The model takes one α for both links; between nodes it is larger.)
#
# ## Keep: a sum costs less than two buffers
#
# 1. Five patterns: all-gather, reduce-scatter, all-reduce, all-to-all, permute.
# 2. A device sends (N - 1)/N of the message (all-to-all: directly; gather, scatter: round a ring); all-reduce twice that; permute all.
# 3. An all-reduce is a reduce-scatter and then an all-gather: less than two buffers, however many devices.
# 4. Time: starts, plus bytes over the slowest link crossed.
# 5. Few large messages beat many small ones; groups inside a node are fast.

# %% [markdown]
# ## Further
#
# ### Exercise (stretch): gather in a ring
#
# Write the all-gather of one device: `block` is its part (a vector), `n` the number of devices, `axis` their axis. Return all
# parts, that of rank 0 first. `lax.ppermute(value, axis, pairs)` sends to the second of each pair.


# %%
def ring_gather(block, n, axis): ...


attempt("02.ring_gather", ring_gather)

# %% [markdown]
# ### Exercise (expert): the size at which bytes matter
#
# No tree now: a *ring* all-reduce over 8 devices. Each of its 14 hops starts in 5 µs, and 450 GB/s leave a device. For which
# message, in **bytes**, do starts and bytes take equally long?

# %%
size = ...
attempt("02.half_size", size)

# %% [markdown]
# ### An all-to-all by hand
#
# `b/tp d -> b d/tp` (`b` rows of the batch): the cut moves from `b` to `d`. Each device cuts its shard into pieces, keeps one and sends the
# others: on our cube, 0 and 1 exchange halves, so do 2 and 3, 4 and 5, 6 and 7.

# %%
arrow, whole = parse_arrow("b/tp d -> b d/tp"), np.arange(512.0, dtype=np.float32)
whole = whole.reshape(32, 16)
before = jax.device_put(whole, sharding(cubic, arrow.before))


def swapped(x):
    # tiled: the pieces are joined along dim 0
    return lax.all_to_all(x, "tp", split_axis=1, concat_axis=0, tiled=True)


def on_mesh(function):
    places = dict(in_specs=spec(arrow.before), out_specs=spec(arrow.after))
    return jax.jit(jax.shard_map(function, mesh=cubic, **places))


moved = on_mesh(swapped)(before)
show(draw.arrow(arrow, whole.shape, cube, 4))

# %% tags=["plumbing"]
# The same from the text of the arrow: value, sharding, communication and memory.
right = lambda y: all(
    np.array_equal(s.data, whole[s.index]) for s in y.addressable_shards
)
after = sharding(cubic, arrow.after)
assert right(moved) and moved.sharding.is_equivalent_to(after, 2)
resolved = Plan(cube, zero=0).resolve()
by_arrow = on_mesh(lambda x: Manual(resolved).carry_out(x, arrow))
package, compiled = by_arrow(before), by_arrow.lower(before).compile()
table = census_table(census_hlo(compiled.as_text(), cubic))
moves = draw.moved(arrow, whole.shape, cube.sizes, 4)
predicted = {
    (",".join(move.axes), move.kind): {"count": 1, "bytes_sent": sent}
    for move, sent in moves
    if sent
}
assert right(package) and table == predicted
assert package.sharding.is_equivalent_to(after, 2)
given = shard_bytes(arrow.before, whole.shape, 4, cube.sizes)
assert compiled_memory(compiled)["argument_bytes"] == given
assert [sent for _, sent in moves if sent] == [whole.nbytes // 4]

# %% [markdown]
# A shard is 1 KiB (1,024 B). Half of it leaves: 512 B. llmpar, the library of these lessons, can also carry out an arrow by itself: it
# sends the same 512 B.
#
# ### How sure are these times?
#
# 370 GB/s is the most that the scaling book (Austin et al. 2025) saw on H100s if the switches do not add the numbers themselves; NVIDIA
# promises 450. α was fitted to published training runs. Our times of whole training steps are off by 10 % on average on the runs that they
# were fitted to, as much on other runs of dense models, and by 14 % on those of experts. Two machines that differ by less cannot be ranked;
# of two plans for one machine the order is better known, because they share most of the error. Starts are also why a chatbot whose
# model is spread over GPUs, and which writes one token at a time, needs more time than its bytes alone.
#
# ### A profile prints the result, not what was sent
#
# Profiles and dumps of a compiler print the size of the *result*. For a reduce-scatter that is a part, for an all-gather the
# whole, and both send the same. Our **census** of a compiled program computes what is sent from it.

# %%
for kind in ("all-gather", "reduce-scatter", "all-reduce"):
    result = 2**20 // (N if kind == "reduce-scatter" else 1)
    sent = formulas.sent_bytes_of_result(kind, result, N)
    assert sent == formulas.sent_bytes(kind, 2**20, N)
    print(f"{kind:<15} result {result:>9,} B   sent {sent:>11,.0f} B")

# %% [markdown]
# ### Whole nodes share the work
#
# Each of a node's 8 GPUs has a network port. If whole nodes take part, each port carries an eighth of the message. Together the ports carry
# 400 GB/s, more than the 370 of NVLink: then NVLink is the limit. If a group has one GPU in each node, one port carries all of it. This is
# the time of the bytes, without the starts.

# %%
for what, rate in (
    ("NVLink in a node, as published", h100.link_bytes_per_s),
    ("as large messages reach it", h100.reached_link_bytes_per_s),
    ("a network port", h100.dcn_bytes_per_s),
):
    print(f"{what:<32} {rate / 1e9:4.0f} GB/s")
for where, group, inner in (  # every inner-th GPU belongs to the group
    ("8 GPUs of one node", 8, 1),
    ("2 whole nodes", 16, 1),
    ("8 GPUs, each in another node", 8, 8),
):
    seconds = formulas.collective_seconds(h100, "all-reduce", 1e9, group, inner)
    print(f"all-reduce of 1 GB, {where:<28} {seconds * 1e3:5.1f} ms of bytes")

# %% [markdown]
# ### Measure your own
#
# Time all five over sizes and groups on your cluster and fit α and β. A TOML file with `base = "h100"` and a table
# `[reached]` (`start_s`, α in seconds; `links`, the share of the published rate that you saw) prices plans with them.
# Simulated devices show only how threads of one processor meet.
#
# ### Where XLA's partitioner differs
#
# You may write no collective at all: then the partitioner of XLA, JAX's compiler, chooses. It finds the all-reduce of a matmul that is cut along
# the summed dim. Where the result is asked for in parts, XLA for CPUs keeps the all-reduce and cuts afterwards: twice the
# bytes. So look at what was compiled.

# %%
a, w = np.ones((64, 64), np.float32), np.ones((64, 64), np.float32)
cut = lambda *dims: jax.sharding.NamedSharding(mesh, P(*dims))
for name, out in (("whole", P()), ("in parts", P("tp"))):
    program = jax.jit(
        jnp.matmul,
        in_shardings=(cut(None, "tp"), cut("tp")),
        out_shardings=jax.sharding.NamedSharding(mesh, out),
    )
    print(f"result {name}: {sent_by(program, a, w)}")

# %% [markdown]
# ### On your cluster
#
# ```
# llmpar doctor                                  which link each axis crosses
# llmpar plan --chip ours.toml --devices 8       plans priced with your figures
# ```
