# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 25
#     needs: ["00"]
#     objectives:
#     - Choose the collective that carries out an arrow, and compute what each device
#       sends.
#     - Build an all-reduce out of a ring of permutes.
#     - Price a collective by its starts, its bytes and the slowest link that it
#       crosses.
# ---

# %% [markdown]
# # 02 · Collectives: what travels, and how long does it take?
#
# Devices share no memory. Whatever one needs of another must be sent, and programs send in five patterns, the
# **collectives**. Every strategy of the lessons to come is made of them.
#
# | collective | each device has | each device gets | as an arrow |
# |---|---|---|---|
# | all-gather | a part | the whole | `s/tp d -> s d` |
# | reduce-scatter | addends of the whole | its part of the sum | `s d +tp -> s/tp d` |
# | all-reduce | addends of the whole | the whole sum | `s d +tp -> s d` |
# | all-to-all | a cut along one dim | a cut along another | `s/tp n -> s n/tp` |
# | permute | a block | its neighbour's block | one step of a ring |
#
# An **arrow** has the layout before and after: `s/tp` is cut by the devices along `tp`, `+tp` is a sum over them that nobody
# has finished ([Words](../docs/words.md#words)).
#
# **Question.** How many bytes does each send, and when do they cost time?
#
# Letters: `s` positions, `d` width, `n` heads, `N` devices along the axis at hand, `β` bytes/s of the links. α: seconds to
# start.
#
# Here the axis is `tp` (any axis would do). The core path ends at *Further*.

# %% tags=["plumbing"]
from llmpar.mesh import use_devices

devices = use_devices()

# %% tags=["plumbing"]
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from llmpar import draw
from llmpar.draw import scene
from llmpar.exercises import attempt, hint, met, solution
from llmpar.inspect.census import census_hlo, partitioned_hlo
from llmpar.mesh import make_mesh
from llmpar.predict import formulas
from llmpar.predict.hardware import chip

N = max(n for n in (1, 2, 4, 8) if n <= len(devices))
mesh = make_mesh(f"tp={N}")
RING = [(i, (i + 1) % N) for i in range(N)]  # to the next device, the last to the first

# %% [markdown]
# `jax.shard_map` runs a function on every device, each with its block: inside, shapes are those of one device, and
# collectives are calls that name the axis. `lower` writes the program; the **census** of it counts what it sends.


# %%
CUT = P("tp")  # the first dim, along tp


def on_each(function, cut_out=CUT):
    """One device's program, on all of them."""
    run = jax.shard_map(function, mesh=mesh, in_specs=CUT, out_specs=cut_out)
    return jax.jit(run)


def sent_by(program, *given):
    """Kind, executions and bytes sent by a device, of each collective."""
    found = census_hlo(partitioned_hlo(program.lower(*given)), mesh)
    return [(c.kind.removeprefix("collective-"), c.count, c.bytes_sent) for c in found]


# %% [markdown]
# ## One picture
#
# The arrow `s d +tp -> s/tp d`, a reduce-scatter on four devices. Before, each device has numbers for the whole matrix, and
# they are addends only (slanted lines). After, each has a quarter, and it is right.

# %%
scene.show(draw.arrow("s d +tp -> s/tp d", (512, 512), {"tp": 4}, itemsize=4))

# %% [markdown]
# ## Predict
#
# Each device has a float32 buffer of 1 MiB. The buffers are summed, and each device keeps its part of the sum.
# **How many bytes does a device send?**

# %%
print(f"{N} devices")
bytes_sent = ...
attempt("02.scattered", bytes_sent, devices=N)

# %% [markdown]
# ## Run: all five
#
# Each in a program of its own, with a message of 1 MiB: for an all-gather that is the result, for the others a device's buffer.

# %%
rows = 512  # of 512 float32: 1 MiB on each device
x = np.random.default_rng(0).standard_normal((N * rows, 512)).astype(np.float32)
programs = {
    "all-gather": on_each(lambda x: lax.all_gather(x[: rows // N], "tp", tiled=True)),
    "reduce-scatter": on_each(lambda x: lax.psum_scatter(x, "tp", tiled=True)),
    "all-reduce": on_each(lambda x: lax.psum(x, "tp"), cut_out=P()),
    "all-to-all": on_each(lambda x: lax.all_to_all(x, "tp", 1, 0, tiled=True)),
    "permute": on_each(lambda x: lax.ppermute(x, "tp", RING)),
}
for kind, program in programs.items():
    found = sent_by(program, x)
    if N > 1:
        assert found == [(kind, 1, formulas.sent_bytes(kind, 2**20, N))]
        print(f"{kind:<15} one collective, {found[0][2]:>9,} B sent")
        if kind == "reduce-scatter":
            met("02.scattered", found[0][2])

# %% [markdown]
# A device of N sends (N - 1)/N of the message: its own part stays. An all-reduce is a reduce-scatter and then an all-gather, so it sends
# twice as much. A permute sends its whole block.
#
# The values are what the table says:

# %%
blocks = x.reshape(N, rows, 512)
total = blocks.sum(0)
close = dict(rtol=1e-4, atol=1e-4)  # sums of N numbers in another order
assert np.allclose(programs["all-reduce"](x), total, **close)
assert np.allclose(programs["reduce-scatter"](x), total, **close)
shifted = np.asarray(programs["permute"](x)).reshape(N, rows, 512)
assert np.array_equal(shifted, np.roll(blocks, 1, axis=0))
print("value: sums equal NumPy's, blocks lie where the arrows say")

# %% [markdown]
# Beware of profiles and compiler dumps: they print the size of the *result*. For a reduce-scatter the result is a part, for an
# all-gather the whole, and both send the same.

# %%
for kind in ("all-gather", "reduce-scatter", "all-reduce"):
    result = 2**20 // (N if kind == "reduce-scatter" else 1)
    sent = formulas.sent_bytes_of_result(kind, result, N)
    assert sent == formulas.sent_bytes(kind, 2**20, N)
    print(f"{kind:<15} result {result:>9,} B   sent {sent:>11,.0f} B")

# %% [markdown]
# ### Exercise (core): four kinds
#
# Four devices, and a message of 8 MB: the gathered result of an all-gather, the buffer of a device for the others. How many
# **MB** does a device send?

# %%
all_gather, reduce_scatter, all_reduce, all_to_all = ..., ..., ..., ...
answer = {"all-gather": all_gather, "reduce-scatter": reduce_scatter}
attempt("02.sent", answer | {"all-reduce": all_reduce, "all-to-all": all_to_all})

# %% [markdown]
# ## A ring by hand
#
# How can everybody get a sum, and send less than two buffers? In a ring. **First lap**: a part's sum travels, and each device
# adds its own addends. After N - 1 hops each device has one finished part. **Second lap**: the finished parts travel.


# %%
def ring_all_reduce(x):
    """psum, out of 2 (N - 1) permutes. x is one device's buffer."""
    me, parts = lax.axis_index("tp"), x.reshape(N, -1)
    part = parts[(me - 1) % N]
    for hop in range(2, N + 1):  # first lap: add mine to what comes
        part = lax.ppermute(part, "tp", RING) + parts[(me - hop) % N]
    done = [part]  # the sum of part me
    for _ in range(N - 1):  # second lap: hand on what is finished
        done.append(lax.ppermute(done[-1], "tp", RING))
    order = (me - jnp.arange(N)) % N  # after j hops: the part of rank me - j
    return jnp.stack(done)[order].reshape(x.shape)


# %%
by_hand = on_each(ring_all_reduce)
got = np.asarray(by_hand(x)).reshape(N, rows, 512)
assert all(np.allclose(one, total, **close) for one in got)
found = sent_by(by_hand, x)
hops = sum(count for _, count, _ in found)
sent = sum(size for *_, size in found)
assert hops == 2 * (N - 1) and sent == formulas.sent_bytes("all-reduce", 2**20, N)
print(f"value: equal to psum; {hops} permutes, {sent:,} B sent, as one all-reduce")

# %% [markdown]
# Hop by hop, who sends to whom:

# %%
scene.show(draw.ring_steps(RING, axis="tp"))

# %% [markdown]
# ## Time
#
# The α–β model: a collective takes its starts, and its bytes at the rate β of the slowest link that it crosses.
#
# $$ T = \alpha \cdot \text{starts} + \frac{\text{bytes sent}}{\beta} $$
#
# Simulated devices have no links, so nothing is timed here. These are an H100's: 8 GPUs in a node on NVLink, and a network
# port for each between nodes. `links` is the rate that large messages reach.

# %%
h100 = chip("h100")
for what, rate in (
    ("NVLink in a node, as published", h100.link_bytes_per_s),
    ("as large messages reach it", h100.reached_link_bytes_per_s),
    ("a network port", h100.dcn_bytes_per_s),
):
    print(f"{what:<32} {rate / 1e9:4.0f} GB/s")
for where, group, apart in (
    ("8 GPUs of one node", 8, 1),
    ("2 whole nodes", 16, 1),
    ("8 GPUs, each in another node", 8, 8),
):
    seconds = formulas.collective_seconds(h100, "all-reduce", 1e9, group, apart)
    print(f"all-reduce of 1 GB, {where:<28} {seconds * 1e3:5.1f} ms of bytes")

# %% [markdown]
# Whole nodes share the work: each of a node's 8 ports carries an eighth of the message. A group with one GPU per node has one
# port, and takes many times as long for the same bytes. Therefore meshes put talkative axes inside nodes.
#
# And α? On H100s a collective of the published runs starts in about 4 µs, and again for each doubling of the group.

# %% tags=["nbval-check-output"]
rates = h100.rates
print("bytes      start    bytes    (all-reduce over 8 GPUs, µs)")
for size in (1e3, 1e5, 1e7, 1e9):
    start = 2 * rates.start_s * (1 + np.log2(8))
    travel = formulas.collective_seconds(h100, "all-reduce", size, 8)
    print(f"{size:7.0e} {start * 1e6:8.1f} {travel * 1e6:8.1f}")

# %% [markdown]
# Small messages cost their start, whatever they hold. That is why gradients are sent in **buckets**, and why decoding one
# token under tensor parallelism waits for starts.

# %% [markdown]
# ## Four verdicts
#
# - **value**: five collectives and a ring by hand equal NumPy.
# - **sharding**: every result lies as its arrow says.
# - **communication**: kinds, counts and bytes equal the formula.
# - **memory**: a ring holds one part in flight; a gathered result is whole on every device.
#
# ## Five lines
#
# 1. Five patterns: all-gather, reduce-scatter, all-reduce, all-to-all, permute.
# 2. (N - 1)/N of the message each; an all-reduce is two of them; a permute sends its block.
# 3. A result's size is not what was sent.
# 4. Time is starts plus bytes over the slowest link crossed.
# 5. Groups inside a node are fast; few large messages beat many small ones.
#
# **One number to remember: 2.** However many devices take part, an all-reduce sends less than twice its buffer.

# %%
for group in (2, 8, 1024):
    share = formulas.sent_bytes("all-reduce", 1.0, group)
    assert share < 2
    print(f"{group:>5} devices: {share:.3f} buffers sent by each")

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
# A ring all-reduce over 8 devices: each of its hops starts in 5 µs, and 450 GB/s leave a device. For which message, in
# **bytes**, do starts and bytes take equally long?

# %%
size = ...
attempt("02.half_size", size)

# %% [markdown]
# ## Measure your own
#
# Time all five over sizes and groups on your cluster and fit α and β. A TOML file with `base = "h100"` and a table
# `[reached]` (`start_s`, α in seconds; `links`, the share of the published rate that you saw) prices plans with them.
# Simulated devices show only how threads of one processor meet.
#
# ## Where XLA's partitioner differs
#
# You may write no collective at all: then the partitioner chooses. It finds the all-reduce of a product that is cut along
# the summed dim. Where the result is asked for in parts, XLA for CPUs keeps the all-reduce and cuts afterwards: twice the
# bytes. So look at the census.

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
# ## On your cluster
#
# ```
# llmpar doctor                                  which link each axis crosses
# llmpar plan --chip ours.toml --devices 8       plans priced with your figures
# ```
