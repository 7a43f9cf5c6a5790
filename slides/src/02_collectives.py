# %% [markdown] tags=["slide", "short"] minutes=3
# ## A movement is an arrow
#
# `/tp`: a dim is cut over `tp`. `+tp`: an unfinished sum over `tp`. The two sides of the arrow give the collective.
#
# <footer>Lesson <code>notebooks/00_setup</code> · the table of all arrows is in <code>README.md</code></footer>

# %%
from deck import curves, draw, show, steps

from llmpar.parallel.mesh import make_mesh, use_devices
from llmpar.plan.layout import parse_arrow

use_devices()
arrow = parse_arrow("s d +tp -> s/tp d")
assert [str(move) for move in arrow.moves] == ["reduce-scatter over tp on s"]
((_, sent),) = draw.moved(arrow, (4096, 4096), {"tp": 4}, 2)
assert sent == 4096 * 4096 * 2 * 3 // 4 == 24 * 2**20
picture = draw.arrow(arrow, (4096, 4096), {"tp": 4}, itemsize=2)
show(picture)

# %% [markdown] tags=["notes"]
# **Ask:** on the left every device has numbers for the whole matrix. Are they right? No: each has its own partial sums, the slanted
# lines say so. Only the sum of the four is the result.
#
# **Misunderstanding:** that left and right hold the same values in other places. A value with `+tp` is not a copy; using it
# without finishing the sum is the classic silent bug. In our package the arrow has to say it, and a test plants the fault.
#
# **Source:** `llmpar.plan.layout`. The idea of one letter per dim is einops'.

# %% [markdown] tags=["slide", "short"] minutes=2
# ## An all-reduce is these two
#
# Each column is a device, each row a part of the array. The colour says which device's numbers these are.
#
# <footer>Bytes read from a compiled program and equal to <code>llmpar.predict.formulas</code> · lesson <code>notebooks/02_collectives</code></footer>

# %%
import re

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from llmpar.inspect.census import census_hlo, partitioned_hlo
from llmpar.predict import formulas

N = 4
RING = [(i, (i + 1) % N) for i in range(N)]
mesh = make_mesh(f"tp={N}")


def five(x):
    """All five on one device's buffer of 1 MiB; what is gathered is a quarter of it."""
    return (
        lax.all_gather(x[:128], "tp", tiled=True),
        lax.psum_scatter(x, "tp", tiled=True),
        lax.psum(x, "tp"),
        lax.all_to_all(x, "tp", 1, 0, tiled=True),
        lax.ppermute(x, "tp", RING),
    )


program = jax.jit(
    jax.shard_map(five, mesh=mesh, in_specs=P("tp"), out_specs=(P("tp"), P("tp"), P(), P("tp"), P("tp")))
)
text = partitioned_hlo(program.lower(jnp.zeros((N * 512, 512))))
compiled = {c.kind.removeprefix("collective-"): c.bytes_sent for c in census_hlo(text, mesh)}
assert compiled == {kind: formulas.sent_bytes(kind, 2**20, N) for kind in formulas.COLLECTIVES}
written = {
    "all-gather": "d/tp -> d",
    "reduce-scatter": "d +tp -> d/tp",
    "all-reduce": "d +tp -> d",
    "all-to-all": "s/tp n -> s n/tp",
}
assert all([move.kind for move in parse_arrow(arrow).moves] == [kind] for kind, arrow in written.items())
assert compiled["all-reduce"] == compiled["reduce-scatter"] + compiled["all-gather"]


def sent(*kinds):
    """What each of four devices sends of 1 MiB."""
    return "Sent of 1 MiB: " + ", ".join(f"{kind} {compiled[kind] / 2**20:.2f}" for kind in kinds)


kinds = "reduce-scatter", "all-gather"
show(draw.before_after(kinds), sent(*kinds, "all-reduce"))

# %% [markdown] tags=["notes"]
# An all-reduce **is** a reduce-scatter, and then an all-gather of the sums: add up what is sent. As arrows: `d +tp -> d/tp`,
# `d/tp -> d`, and both in one `d +tp -> d`.
#
# **Ask:** which of these does data parallelism use? Which one is FSDP made of? (All-reduce; all-gather and reduce-scatter.)
#
# **Misunderstanding:** that the size printed in a profile or in HLO is what is sent. It is the size of the *result*, which for
# a reduce-scatter is a quarter here, and for an all-gather everything. Sent bytes follow from kind, size and group.
#
# **Source:** the ring algorithms of NCCL and of Patarasuk and Yuan 2009. Five collectives in one `shard_map` were compiled for
# this slide; `llmpar.inspect.census` counted them.

# %% [markdown] tags=["slide", "short"] minutes=1
# ## Two that move blocks
#
# Nothing is added. `s/tp n -> s n/tp`: a cut moves from one dim to another, an all-to-all.
#
# <footer>Lesson <code>notebooks/02_collectives</code></footer>

# %%
kinds = "all-to-all", "permute"
show(draw.before_after(kinds), sent(*kinds))

# %% [markdown] tags=["notes"]
# **Ask:** which of the two do experts need, and which a pipeline? (All-to-all: any token may go to any expert. Permute: a
# stage sends to the next one.)
#
# **Misunderstanding:** that an all-to-all gives everybody everything. Each device ends with as much as it had, of other parts.
#
# **Source:** as on the slide before.

# %% [markdown] tags=["slide"] minutes=2
# ## The sum goes round a ring, twice
#
# Each device sends one part to the next. In all, it sends twice $(N-1)/N$ of its buffer; no algorithm sends less, unless a
# switch adds.
#
# <footer>Patarasuk and Yuan 2009 · lesson <code>notebooks/02_collectives</code></footer>

# %%
pairs = [
    tuple(map(int, pair))
    for pair in re.findall(r"\{(\d+),(\d+)\}", re.search(r"source_target_pairs=\{(.*?\})\}", text)[1])
]
assert pairs == RING
assert formulas.sent_bytes("all-reduce", 1, N) == 2 * (N - 1) / N
assert 1 < formulas.sent_bytes("all-reduce", 1, 8) == 1.75 and formulas.sent_bytes("all-reduce", 1, 1024) < 2
ring = draw.ring_sums(moving=True)
assert ring.text.count(" lap, hop ") == 2 * (N - 1) and "6 hops" in ring.title
steps(ring)

# %% [markdown] tags=["notes"]
# Press on: three hops add, three hops hand on. The first lap is a reduce-scatter, the second an all-gather. The pairs are the
# source-target pairs of the compiled program. Switches of H100 nodes can add (NVLink SHARP): then a GPU sends its buffer once, V in
# place of 1.75 V among 8.
#
# **Ask:** with twice the devices, does each one send twice as much? No: it stays below 2V for an all-reduce, however many.
#
# **Misunderstanding:** "so it costs nothing to add devices." The number of hops grows, and with it the latency; and the slowest
# link of the ring sets the pace.
#
# **Source:** Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".

# %% [markdown] tags=["slide"] minutes=1
# ## Poll: how much faster is a small sum?
#
# Eight H100s of a node sum 100 kB. How long does 1 kB take, compared with that?
#
# | A | B | C |
# |---|---|---|
# | as long | a tenth | a hundredth |
#
# <footer>Lesson <code>notebooks/02_collectives</code></footer>

# %%
show(draw.before_after(("all-reduce",)))

# %% [markdown] tags=["notes"]
# **Ask:** raise a hand for A, B or C, and write the numbers down. (A: both wait for their start. The next slide shows it.)
#
# **Misunderstanding:** that time follows bytes. Below a few megabytes it follows the number of starts.
#
# **Source:** the model of the next slide.

# %% [markdown] tags=["slide"] minutes=1
# ## Small messages wait for their start
#
# $$ \text{time} = \alpha \cdot \text{starts} + \text{bytes sent} / \beta $$
#
# <footer>A model of 8 H100s, not a measurement (<code>llmpar.predict.hardware</code>) · lesson <code>notebooks/02_collectives</code></footer>

# %%
import math

from llmpar.draw.scene import time_text
from llmpar.predict.hardware import chip

h100, sizes = chip("h100"), [10.0**k for k in range(3, 10)]
start = 2 * h100.rates.start_s * (1 + math.log2(8))
travel = lambda size, nodes: formulas.collective_seconds(h100, "all-reduce", size, 8, nodes)
knee = start / travel(1.0, 1)
assert round(h100.rates.start_s * 1e6, 1) == 4.1 and round(start * 1e6, 1) == 32.6
assert round(knee / 1e6, 1) == 6.9 and start + travel(1e5, 1) < 1.02 * start + travel(1e3, 1)
assert round((start + travel(1e9, 8)) / (start + travel(1e9, 1))) == 7
curves(
    [
        ("one GPU of each of 8 nodes", [start + travel(size, 8) for size in sizes], "network", "s", False),
        ("8 GPUs of one node", [start + travel(size, 1) for size in sizes], "tp-line", "o", False),
        ("its bytes alone", [None] * 3 + [travel(size, 1) for size in sizes[3:]], "tp-line", None, True),
    ],
    ["1 kB", "10 kB", "100 kB", "1 MB", "10 MB", "100 MB", "1 GB"], "buffer of a GPU", "time of an all-reduce",
    low=1e-6, high=0.1, log=True, levels=[10.0**k for k in range(-6, 0)],
    marks=((math.log10(knee) - 3, "6.9 MB"),), text=time_text,
)  # fmt: skip

# %% [markdown] tags=["notes"]
# **Ask:** which axis belongs inside a node: the one that sends often, or the one that sends much? Both; and the one that sends
# often cannot hide.
#
# **Misunderstanding:** that a faster link makes every message faster. Below a megabyte nearly all of the time is starts.
#
# **On the board:** a ring of 8 would start 14 times, a tree has log₂ 8 = 3 levels. (NCCL chooses by size and machine.) Our model counts a
# tree: one start for the call and one for each level, up and down: 8 of 4.1 µs.
# At 6.9 MB the bytes, 2 · 7/8 · 6.9 MB at 370 GB/s, take as long: 32.6 µs.
#
# **Source:** alpha-beta model, as in Thakur et al. 2005, "Optimization of collective communication operations in MPICH" (there β is
# seconds per byte). The start is fitted on published H100 runs.
