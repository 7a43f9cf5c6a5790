# %% [markdown] tags=["slide", "short"] minutes=3
# ## A movement is an arrow
#
# `/tp`: a dim is cut over `tp`. `+tp`: a sum over `tp` that nobody has finished. The collective follows from the two sides.
#
# <footer>Lesson <code>notebooks/00_setup</code> · the table of all arrows is in <code>README.md</code></footer>

# %%
from deck import draw, show

from llmpar.mesh import make_mesh, use_devices
from llmpar.notation import parse_arrow

use_devices()
arrow = parse_arrow("s d +tp -> s/tp d")
assert [str(move) for move in arrow.moves] == ["reduce-scatter over tp on s"]
((_, sent),) = draw.moved(arrow, (4096, 4096), {"tp": 4}, 2)
assert sent == 4096 * 4096 * 2 * 3 // 4 == 24 * 2**20
picture = draw.arrow(arrow, (4096, 4096), {"tp": 4}, itemsize=2)
show(picture)

# %% [markdown] tags=["notes"]
# **Ask:** on the left every device has numbers for the whole matrix. Are they right? No: each has its own addends, the slanted
# lines say so. Only the sum of the four is the result.
#
# **Misunderstanding:** that left and right hold the same values in other places. A value with `+tp` is not a copy; using it
# without finishing the sum is the classic silent bug. In our package the arrow has to say it, and a test plants the fault.
#
# **Source:** `llmpar.notation`. The idea of one letter per dim is einops'.

# %% [markdown] tags=["slide", "short"] minutes=3
# ## Five collectives, and what they send
#
# <footer>Read from a compiled program and equal to <code>llmpar.predict.formulas</code> · lesson <code>notebooks/02_collectives</code></footer>

# %%
import re

import jax
import jax.numpy as jnp
from IPython.display import Markdown
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
assert compiled == {kind: formulas.sent_bytes(kind, 2**20, N) for kind in formulas.KINDS}
written = {
    "all-gather": "d/tp -> d",
    "reduce-scatter": "d +tp -> d/tp",
    "all-reduce": "d +tp -> d",
    "all-to-all": "s/tp n -> s n/tp",
}
assert all([move.kind for move in parse_arrow(arrow).moves] == [kind] for kind, arrow in written.items())
assert compiled["all-reduce"] == compiled["reduce-scatter"] + compiled["all-gather"]
ends_with = {
    "all-gather": "the whole", "reduce-scatter": "its part of the sum", "all-reduce": "the whole sum",
    "all-to-all": "another cut of the same", "permute": "its neighbour's piece",
}  # fmt: skip
lines = [
    f"| {kind} | {f'`{written[kind]}`' if kind in written else 'one step of a ring'} | {end} |"
    f" {compiled[kind] / 2**20:.2f} MiB |"
    for kind, end in ends_with.items()
]
Markdown(
    "\n".join(
        [
            "| collective | arrow | each device ends with | sent of 1 MiB, 4 devices |",
            "|---|---|---|---|",
            *lines,
        ]
    )
)

# %% [markdown]
# An all-reduce **is** a reduce-scatter, then an all-gather.

# %% [markdown] tags=["notes"]
# **Ask:** which of these does data parallelism use? Which one is FSDP made of? (All-reduce; all-gather and reduce-scatter.)
#
# **Misunderstanding:** that the size printed in a profile or in HLO is what is sent. It is the size of the *result*, which for
# a reduce-scatter is a quarter here, and for an all-gather everything. Sent bytes follow from kind, size and group.
#
# **Source:** the ring algorithms of NCCL and of Patarasuk and Yuan 2009. Five collectives in one `shard_map` were compiled for
# this slide; `llmpar.inspect.census` counted them.

# %% [markdown] tags=["slide"] minutes=2
# ## A ring of four
#
# After $N - 1$ steps everybody has seen every block. That is an all-gather; each device has sent
#
# $$ V\,\frac{N-1}{N} \text{ of } V \text{ bytes} $$
#
# An all-reduce is two laps. Without a switch that adds, no algorithm sends less.
#
# <footer>Patarasuk and Yuan 2009 · lesson <code>notebooks/02_collectives</code></footer>

# %% place="beside"
pairs = [
    tuple(map(int, pair))
    for pair in re.findall(r"\{(\d+),(\d+)\}", re.search(r"source_target_pairs=\{(.*?\})\}", text)[1])
]
assert pairs == RING
assert (
    formulas.sent_bytes("all-gather", 1, N) == (N - 1) / N
    and formulas.sent_bytes("all-reduce", 1, N) == 2 * (N - 1) / N
)
assert 1 < formulas.sent_bytes("all-reduce", 1, 8) == 1.75 and formulas.sent_bytes("all-reduce", 1, 1024) < 2
picture = draw.ring_steps(pairs, axis="tp")
show(picture)

# %% [markdown] tags=["notes"]
# The pairs of the picture are the source-target pairs of the compiled program. Switches of H100 nodes can add (NVLink SHARP): then a
# GPU sends its buffer once, V in place of 1.75 V among 8.
#
# **Ask:** with twice the devices, does each one send twice as much? No: it stays below 2V for an all-reduce, however many.
#
# **Misunderstanding:** "so it costs nothing to add devices." The number of steps grows, and with it the latency; and the slowest
# link of the ring sets the pace.
#
# **Source:** Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".

# %% [markdown] tags=["slide"] minutes=2
# ## Starts and bytes
#
# $$ T = \alpha \cdot \text{starts} + \frac{\text{bytes sent}}{\beta} $$
#
# β: the slowest link that the group crosses.
#
# <footer>Constants fitted on published runs, <code>llmpar.predict.hardware</code>; yours: a table <code>[reached]</code> in a TOML file · lesson <code>notebooks/02_collectives</code></footer>

# %%
import math

from llmpar.predict.hardware import chip

h100 = chip("h100")
start = 2 * h100.rates.start_s * (1 + math.log2(8))
groups = {"8 GPUs of one node": (8, 1), "8 GPUs, each in another node": (8, 8)}
sizes = {"100 kB": 1e5, "10 MB": 1e7, "1 GB": 1e9}
rows = []
for where, (group, apart) in groups.items():
    times = [
        start + formulas.collective_seconds(h100, "all-reduce", size, group, apart) for size in sizes.values()
    ]
    rows.append(f"| {where} | " + " | ".join(f"{t * 1e3:.2g} ms" for t in times) + " |")
    assert times[0] < 1.5 * start and times[2] > 50 * start
Markdown("\n".join([f"| all-reduce of | {' | '.join(sizes)} |", "|---|---|---|---|", *rows]))

# %% [markdown] tags=["notes"]
# **Ask:** which axis belongs inside a node: the one that sends often, or the one that sends much? Both; and the one that sends
# often cannot hide.
#
# **Misunderstanding:** that a faster link makes every message faster. Below a megabyte the start is all.
#
# **Source:** alpha-beta model, as in Thakur et al. 2005, "Optimization of collective communication operations in MPICH". The start is
# fitted on published H100 runs.
