# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 30
#     needs: ["02", "05"]
#     question: What must be sent so that every query sees every key, and why do some ranks wait for others?
#     objectives:
#     - Merge attention over parts of the keys, and follow ring attention that is built from
#       it.
#     - Say why some ranks wait under a causal mask, and avoid the wait by another order
#       of positions.
#     - Say what a ring, Ulysses and gathered keys send, and from which piece on a hop
#       overlaps.
# ---

# %% [markdown]
# # 06 · Long sequences: can attention be cut along the sequence?
#
# The activations of a million tokens do not fit on one device. So four devices take a quarter each. Norms and feed-forwards treat each
# position by itself. But in causal attention every query needs every earlier key.

# %% tags=["plumbing"]
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # simulated devices; real ones: On your cluster

from llmpar.parallel.mesh import use_devices

devices = use_devices()

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from llmpar import draw
from llmpar.draw.scene import show
from llmpar.explore.small import RingExplorer
from llmpar.inspect.census import (
    arrow_rows,
    arrow_text,
    census_hlo,
    census_table,
    compiled_memory,
    partitioned_hlo,
    read_program,
)
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.lessons import attempt, hint, met, opened, say, solution
from llmpar.lessons.lesson import as_predicted, counting_text, train_on, verdicts
from llmpar.model import attention
from llmpar.parallel.mesh import abstract_mesh, make_mesh, sharding, spec
from llmpar.plan import sequence_order
from llmpar.plan.layout import parse_layout
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.predict import formulas, traffic
from llmpar.predict.hardware import chip
from llmpar.predict.ring import pairs_by_step
from llmpar.serve.decode import Decoder, DecoderInput
from llmpar.training.step import Step

# Accelerators round float32 matmuls unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
llama3 = ("llama3-8b", "llama3-70b", "llama3.1-405b")
assert {preset(name).num_kv_heads for name in llama3} == {8}
N = len(devices)  # 8
mesh = make_mesh(f"sp={N}")
S, K, R, H = 32 * N, 2, 2, 16  # positions, KV heads, query heads per KV head, width
OWN = S // N  # positions of one device
RING = [(i, (i + 1) % N) for i in range(N)]  # a ring: who sends to whom


def parts_of_ranks(order):
    """Which of 8 parts of the sequence each of 4 ranks holds."""
    places = np.array(sequence_order.sequence_permutation(order, 8, 4))
    return places.reshape(4, 2).tolist()


IN_ORDER = {"in order": parts_of_ranks("contiguous")}

# %% tags=["plumbing"]
title = "Empty squares: the keys are on another device"
show(
    draw.causal(
        {"devices 0 to 3": [[0], [1], [2], [3]]}, step=0, title=title, counts=False
    )
)

# %% [markdown]
# The coloured part is what each device can compute from its own queries and keys. Cutting the positions of a sequence is called *context
# parallelism*; its mesh axis is `sp`. A device's number along the axis is its *rank*. (The pictures have four ranks, the programs eight.)
#
# ## Keys go round a ring
#
# Each rank computes with the keys and values that it has, and sends them on to the next rank: a *hop* (Liu et al. 2023). A *piece* is
# what one rank began with:

# %% tags=["plumbing"]
show(draw.ring_steps([(i, (i + 1) % 4) for i in range(4)]))

# %% [markdown]
# ## Predict: how much does a device send?
#
# Take one attention layer and one sequence: S positions, 4 query heads and 2 KV heads of width 16, in float32 (4 bytes). Two
# query heads share one head of keys and values (a KV head). Queries stay; K and V are sent. **How many bytes of keys and values does one device
# send in the forward pass?**

# %%
print(f"{N} devices, S = {S} positions, {OWN} on each")
bytes_of_keys_and_values = ...
attempt("06.ring_bytes", bytes_of_keys_and_values, devices=N, seq=S)

# %% tags=["plumbing"]
met("06.ring_bytes", 4 * formulas.ring_elements(1, S, K, H, N)[0], "computed")

# %% [markdown]
# N devices make N − 1 hops: an N-th hop would only bring each piece back. In the backward pass the pieces go round again, with their
# gradients.
#
# ## Predict: which rank waits most?
#
# A step of the ring ends when the busiest rank is done. Positions are in order (contiguous): rank 0 has the first quarter, rank
# 3 the last. **Which of the 4 ranks waits most? With even work the ring would take a time T. How many T does it take?**

# %%
waits = {"rank": ..., "times": ...}
attempt("06.ring_waits", waits)

# %% [markdown]
# ## Step by step
#
# One *square* = this rank's queries × the keys that are here in this step. The filled part passes the causal mask. Time is counted in *full
# squares*: the time for a completely filled square.

# %%
RingExplorer() if opened("06.ring_waits") else None

# %% tags=["plumbing"]
met("06.ring_waits", {"rank": 0, "times": 3.5 / 2}, "simulated")

# %% [markdown]
# ## Deal the parts again
#
# The ring takes 3.5 full squares; with even work it would take 2. Rank 0 waits most: most keys come after its queries. So give each rank
# two parts. Cut the sequence into 8 parts. Part i costs 2i + 1 (in halves of part × part), because its queries see all i earlier parts.
# Ranks 0 to 3 keep the parts 0 to 3. **Which second part must each rank get, so that all have equal work?**

# %%
second_part = {0: ..., 1: ..., 2: ..., 3: ...}  # one of the parts 4 to 7 for each rank
attempt("06.deal", second_part)

# %% tags=["plumbing"]
both = IN_ORDER | {"zigzag": parts_of_ranks("zigzag")}
if opened("06.deal"):
    show(draw.causal(both))
met("06.deal", {rank: parts[1] for rank, parts in enumerate(both["zigzag"])}, "dealt")

# %% [markdown]
# This order is called *zigzag*. The tokens are put into it once, before the training step.
#
# ## A softmax can begin before it has seen all keys
#
# Softmax divides by a sum over *all* keys. Take one head, and two devices with the same queries and half of the keys each: `s`
# positions of queries, `t` of keys, `h` width of a head.

# %% tags=["plumbing"]
show(
    draw.matmul(
        "s h × h t/sp = s t/sp -exp-> s t/sp × t/sp h = s h +sp",
        names=("Q", "K transposed", "scores", "exp(scores)", "V", "to be joined"),
        devices=2,
        title="Two devices look at half of the keys each",
        sheets="two partial results: rescale, then add",
    )
)

# %% [markdown]
# For each query a device keeps three things:
#
# - `top`: its own largest score. It is subtracted, so that exp cannot overflow;
# - `total`: the sum of its weights exp(score − `top`);
# - `values`: the sum of values, each times its weight.


# %%
def look(q, k, v, seen):  # s h, t h, t h, s t
    """What queries find in some of the keys."""
    scores = jnp.where(seen, q @ k.T / H**0.5, -jnp.inf)  # s t
    top = jnp.maximum(scores.max(-1), -1e30)  # s; a query may see none of these keys
    weights = jnp.exp(scores - top[:, None])
    return weights @ v, weights.sum(-1), top  # s h, s, s


# %% [markdown]
# ### Exercise (core): join two devices
#
# Device a has the scores 1 and 3: `top` 3, `total` exp(1 − 3) + 1 = 1.14. Device b has the score 2: `top` 2, `total` 1. One device with
# all three: `top` 3, `total` 1.50. To join, multiply each device's `values` and `total` by a factor, then add (Milakov and Gimelshein
# 2018). Write the two factors.


# %%
def factors(top_a, top_b): ...  # for a, and for b


attempt("06.factors", factors)


# %% tags=["plumbing"]
def join(one, other):
    (values_a, total_a, top_a), (values_b, total_b, top_b) = one, other
    top = jnp.maximum(top_a, top_b)
    a, b = jnp.exp(top_a - top), jnp.exp(top_b - top)
    values = values_a * a[..., None] + values_b * b[..., None]
    return values, total_a * a + total_b * b, top


def finish(values, total, top):
    return values / total[..., None]


# The same for all rows b, KV heads k, and query heads r of a KV head.
of_a_kv_head = jax.vmap(look, (1, None, None, None), 1)
look_at_all = jax.vmap(jax.vmap(of_a_kv_head, (1, 1, 1, None), 1), (0, 0, 0, None))


def exact(q, k, v, positions):
    """The textbook: all scores, one softmax. The reference of this lesson."""
    scores = jnp.einsum("bskrh,btkh->bkrst", q, k) / H**0.5
    seen = positions[0, :, None] >= positions[0, None, :]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
    return jnp.einsum("bkrst,btkh->bskrh", weights, v)


rng = np.random.default_rng(0)
normal = lambda *shape: rng.standard_normal((1, S, *shape)).astype(np.float32)
q, out_grad = normal(K, R, H), normal(K, R, H)
k, v = normal(K, H), normal(K, H)
positions = np.arange(S, dtype=np.int32)[None]


@jax.jit
def in_halves(q, k, v, positions):
    halves = [slice(None, S // 2), slice(S // 2, None)]
    seen = positions[0, :, None] >= positions[0, None, :]
    looks = (look_at_all(q, k[:, half], v[:, half], seen[:, half]) for half in halves)
    ids = lambda half: attention.Ids(positions, 0, positions[:, half], 0)
    parts = [attention.full(q, k[:, half], v[:, half], ids(half)) for half in halves]
    merged = attention.merge(*parts[0], *parts[1])[0]
    return finish(*join(*looks)), merged, exact(q, k, v, positions)


joined, merged, want = map(np.asarray, in_halves(q, k, v, positions))
assert np.allclose(joined, want, atol=1e-5) and np.allclose(merged, want, atol=1e-5)
print("two halves of the keys, joined, give attention to all keys")

# %% [markdown]
# ## Each step of the ring: look, hop, join
#
# The code of one device. A query uses only keys at its own or an earlier position; `pairs` counts them. `look_at_all` runs `look`
# for every head.


# %%
# b rows, s positions, k KV heads, r query heads of each, h width of a head
def ring_by_hand(q, k, v, mine):  # b s/sp k r h, b s/sp k h twice, b s/sp
    def at_home(k, v, theirs):
        seen = mine[0, :, None] >= theirs[0, None, :]
        return look_at_all(q, k, v, seen), seen.sum()

    def step(carry, _):
        held, done = carry
        held = jax.tree.map(lambda x: lax.ppermute(x, "sp", RING), held)
        found, pairs = at_home(*held)
        return (held, join(done, found)), pairs

    held = k, v, mine
    done, pairs = at_home(*held)
    # lax.scan is a loop over the steps
    (_, done), later = lax.scan(step, (held, done), length=N - 1)
    return finish(*done), jnp.concatenate([pairs[None], later])[None]


# %% tags=["plumbing"]
TEXTS = ("b s/sp k r h", "b s/sp k h", "b s/sp")
QUERIES, KEYS, IDS = map(parse_layout, TEXTS)
GIVEN = (QUERIES, KEYS, KEYS, IDS)


def spread(function, given, made, over=mesh):
    ins, outs = tuple(map(spec, given)), tuple(map(spec, made))
    return jax.jit(jax.shard_map(function, mesh=over, in_specs=ins, out_specs=outs))


def deal(order, *arrays):
    """Lay positions onto ranks in this order, before the step."""
    places = sequence_order.sequence_permutation(order, S, N)
    return [np.take(x, places, axis=1) for x in arrays]


def put(order, *arrays):
    dealt = zip(deal(order, *arrays), (*GIVEN, QUERIES), strict=False)
    return [jax.device_put(x, sharding(mesh, place)) for x, place in dealt]


ring = spread(ring_by_hand, GIVEN, (QUERIES, parse_layout("b/sp t")))
ring_compiled = ring.lower(*put("contiguous", q, k, v, positions)).compile()
live = {}
for order in ("contiguous", "zigzag"):
    out, pairs = ring_compiled(*put(order, q, k, v, positions))
    (want_dealt,) = deal(order, want)
    assert np.allclose(out, want_dealt, atol=1e-5), order
    assert {s.data.shape for s in out.addressable_shards} == {(1, OWN, K, R, H)}
    live[order] = np.asarray(pairs)

# The loop runs N - 1 times; a census that forgot to multiply would find one hop.
census = census_hlo(ring_compiled.as_text(), mesh)
moved = {kind: [c for c in census if c.dtype == kind] for kind in ("f32", "s32")}
assert {c.kind for c in census} <= {"collective-permute"}
assert {c.shape for c in moved["f32"]} <= {(1, OWN, K, H)}
hops = sum(c.count for c in moved["f32"]) // 2
hop = 2 * 4 * OWN * K * H  # bytes of K and V of one device's positions
kv_bytes = sum(c.bytes_sent for c in moved["f32"])
assert hops == N - 1 == sum(c.count for c in moved["s32"])
assert kv_bytes == (N - 1) * hop == 4 * formulas.ring_elements(1, S, K, H, N)[0]
assert sum(c.bytes_sent for c in moved["s32"]) == (N - 1) * 4 * OWN
listed = re.findall(r"source_target_pairs=\{\{(.*?)\}\}", ring_compiled.as_text())
compiled_pairs = {pair for text in listed for pair in text.split("},{")}
assert compiled_pairs == {f"{source},{target}" for source, target in RING}
arguments = compiled_memory(ring_compiled)["argument_bytes"]
assert arguments == 4 * OWN * (K * R * H + 2 * K * H + 1)
print("the ring by hand equals full attention, in any order of positions;")
print(f"the compiled program makes {hops} hops, each with {hop:,} B of keys and values")

# %% tags=["plumbing"]
for order, pairs in live.items():
    assert (pairs == pairs_by_step(N, order, s=S)).all()
own_key = (np.arange(N) == 0) * OWN / 2  # a query's own key counts half
parts = {order: (pairs - own_key) / OWN**2 for order, pairs in live.items()}
for order, expected in (("contiguous", 2 - 1 / N), ("zigzag", 1)):
    work = parts[order].sum(1)
    busiest, squares = work.max() / work.mean(), parts[order].max(0).sum()
    assert np.isclose(busiest, expected)
    print(f"our {N} devices, {order}: busiest rank / mean = {busiest:.3f},", end=" ")
    print(f"{squares:g} squares")
assert parts["contiguous"].max(0).sum() == N - 1 / 2
assert np.isclose(parts["zigzag"].max(0).sum(), N / 2)

# %% [markdown]
# ## Ulysses trades positions for heads
#
# In Ulysses (Jacobs et al. 2023), before attention, devices exchange parts by an all-to-all, so that each has *all* positions
# of some heads. After attention they exchange back.

# %% tags=["plumbing"]
show(
    draw.matmul(
        "s/sp n h -> s n/sp h -attention-> s n/sp h -> s/sp n h",
        names=("Q, K, V", "Q, K, V", "output", "output"),
        title="Ulysses: an all-to-all before attention, and one after it",
    )
)

# %% [markdown]
# A device needs whole heads. So in this package N must divide the number of KV heads; other libraries copy KV heads.
#
# ### Exercise (core): write the exchange
#
# The exchange before attention, on one device: `x` has all heads of its own positions, `s/sp k h`. Return all positions of its share
# of the heads, `s k/sp h`. (No batch dim.)


# %%
def to_heads(x): ...


attempt("06.to_heads", to_heads)

# %% [markdown]
# ## Llama 3 just gathers the keys
#
# With 8 KV heads for 32 or more query heads, keys and values are small. So Llama 3 (2024), whose mask of documents is simple then,
# gathers all of them on every device:

# %% tags=["plumbing"]
show(
    draw.matmul(
        "s/sp k h -> s k h",
        names=("K and V before", "K and V in attention"),
        title="Gathered keys: one all-gather before attention, so nothing overlaps",
    )
)

# %% [markdown]
# ## When does a hop overlap with computing?
#
# While a device computes with one piece, the next one is sent. With `n` query heads, `k` KV heads, `C` FLOP/s and `β` bytes/s, in bfloat16,
# a hop of the forward pass costs no time if
#
# $$ \frac{4\,(s/N)^2\,n\,h}{C} \ge \frac{4\,(s/N)\,k\,h}{\beta} \quad\Longleftrightarrow\quad \frac{s}{N} \ge \frac{C}{\beta}\cdot\frac{k}{n} $$
#
# Left: a full square's two matmuls; right: sending a piece. With a causal mask, zigzag computes half of each square, so a piece must
# be twice as long. The shortest such pieces, in positions, by published rates:

# %% tags=["plumbing", "nbval-check-output"]
a100, h100 = chip("a100-80"), chip("h100")
block = formulas.ring_min_block(a100.flops_per_s, a100.link_bytes_per_s)
# Liu et al. 2023, table 2
assert abs(block / 1e3 - 1.0) < 0.06 and abs(6 * block / 1e3 - 6.2) < 0.15
print(f"A100 in a node, if queries saw all keys: {block:.0f} (published 1.0k)")
links = (("in a node", a100.link_bytes_per_s), ("between nodes", a100.dcn_bytes_per_s))
for where, rate in links:
    one, four = (
        2 * formulas.ring_min_block(a100.flops_per_s, rate, ratio)
        for ratio in (1, 1 / 4)
    )
    print(f"A100 {where}, causal zigzag: {one:.0f},", end=" ")
    print(f"{four:.0f} with 4 query heads per KV head")

# %% [markdown]
# ## Keep: keys make N − 1 hops, and each rank gets an early and a late part
#
# 1. Attention to parts of the keys merges exactly: keep the weighted sum, the sum of weights, the largest score.
# 2. A ring makes N − 1 hops of K and V.
# 3. In order (contiguous), the busiest rank has 2 − 1/N times the mean; in zigzag all have the same.
# 4. Forward, in bfloat16, a hop overlaps if a piece has C/β · k/n positions, twice as many with a causal mask and zigzag. Gathering all
#    keys does not: attention waits.

# %% [markdown]
# ## Further
#
# ### Exercise (stretch): one hop of a real model
#
# Llama 3.1 8B: 32 query heads, 8 KV heads, head width 128; 131,072 tokens over `sp=8`, in bfloat16 (2 bytes). How many bytes does a device
# send in one hop of one layer?

# %%
hop_bytes = ...
attempt("06.hop_bytes", hop_bytes)

# %% [markdown]
# ### Exercise (stretch): write the zigzag
#
# Return an array of the positions 0 … s − 1 in the order in which the ranks have them: first all of rank 0, then all of rank 1, … . The
# sequence `s` is a multiple of 2N. NumPy is there as `np`.


# %%
def zigzag(s, ranks): ...


attempt("06.zigzag", zigzag)

# %% [markdown]
# ### Tiles
#
# Brandon et al. 2023 reach nearly the same balance with `striped`: every N-th position. But a real kernel works in tiles, and skips only
# those that are masked throughout. What the busiest of 8 ranks computes of 4,096 positions, as a share of attention without a mask:

# %% tags=["plumbing", "nbval-check-output"]
length, tiles, shares = 4096, (512, 256, 64, 16), {}
print("tiles of   " + "".join(f"{tile:>8}" for tile in tiles))
for order in ("contiguous", "striped", "zigzag"):
    for tile in tiles:
        pairs = max(map(sum, pairs_by_step(8, order, s=length, block=tile)))
        shares[order, tile] = pairs / (length * length / 8)
    row = "".join(f"{shares[order, tile]:8.3f}" for tile in tiles)
    print(f"{order:<11}{row}")
assert shares["contiguous", 512] == shares["zigzag", 512] == 1
assert shares["zigzag", 64] <= 0.51
for tile in tiles[1:]:
    of = {order: shares[order, tile] for order in ("zigzag", "striped", "contiguous")}
    assert of["zigzag"] < of["striped"] < of["contiguous"]

# %% [markdown]
# In zigzag a tile may be as large as a part (256 here): the mask's edge runs through tiles in the first step only, when a rank looks at
# its own keys. In striped order it runs through tiles in *every* step, so it needs small ones.
#
# ### Backwards
#
# `attention.ring_attention` is llmpar's ring: the same forward pass, and a backward pass of its own. It saves the output and, for each
# query, the logarithm of its sum of weights (`lse`). Scores are computed again, so nothing of size `s t` is ever stored (Dao et al. 2022).
#
# | pass | what goes round the ring | hops |
# |---|---|---|
# | forward | K and V, in one message | N − 1 |
# | backward | K and V again | N − 1 |
# | backward | the gradients of K and V, one hop behind them, in float32; each rank adds its part | N − 1 |
#
# Positions are few: all ranks learn all of them before the first hop.


# %%
def package_ring(q, k, v, positions):
    everywhere = lax.all_gather(positions, "sp", axis=1, tiled=True)
    ids = attention.Ids(positions, 0, everywhere, 0)  # one document, number 0
    return attention.ring_attention(q, k, v, ids, axis="sp")[0]


# %% tags=["plumbing"]
def with_gradients(attend):
    """The output of attention and the gradients of its three inputs."""

    def run(q, k, v, positions, out_grad):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, positions), q, k, v)
        return out, *pull(out_grad)

    return run


made = (QUERIES, QUERIES, KEYS, KEYS)
given = put("zigzag", q, k, v, positions, out_grad)
trained_ring = spread(with_gradients(package_ring), (*GIVEN, QUERIES), made)
compiled, text = read_program(trained_ring.lower(*given))
whole = jax.jit(with_gradients(exact)).lower(q, k, v, positions, out_grad).compile()
wanted = deal("zigzag", *map(np.asarray, whole(q, k, v, positions, out_grad)))
for name, got, right in zip(
    ("out", "dq", "dk", "dv"), compiled(*given), wanted, strict=True
):
    error = np.abs(np.asarray(got) - right).max() / np.abs(right).max()
    assert error < 1e-5, (name, error)
print("value: output and gradients of q, k and v equal those of full attention")

# %% tags=["plumbing"]
found = census_hlo(text, mesh)
by = {kind: [c for c in found if c.dtype == kind] for kind in ("f32", "s32")}
sent = lambda cs: (sum(c.count for c in cs), sum(c.bytes_sent for c in cs))
assert {c.kind for c in by["f32"]} <= {"collective-permute"}
# K with V; K with V again; their gradients
assert sent(by["f32"]) == (3 * (N - 1), 3 * (N - 1) * hop)
assert sent(by["s32"]) == (1, (N - 1) * 4 * OWN)  # positions, gathered once
told = "communication: K with V forward, the same backward, dK with dV: "
say(told + "{} permutes = 3 · (N-1), {:,} B".format(*sent(by["f32"])))
ring_memory, whole_memory = compiled_memory(compiled), compiled_memory(whole)
assert ring_memory["argument_bytes"] == 4 * OWN * (2 * K * R * H + 2 * K * H + 1)
print(f"memory: {ring_memory['argument_bytes']:,} B of arguments per device", end=", ")
print(f"1/{N} of everything")
assert ring_memory["temp_bytes"] < whole_memory["temp_bytes"] / N
say(
    f"full attention keeps its {S} x {S} scores; the ring's temporaries are less"
    f" than 1/{N} of that"
)

# %% [markdown]
# ### Grouped queries make hops short
#
# Only KV heads are sent, in the dtype in which they are computed. Read from the traced program of the forward pass, for 8 query heads
# over 8 devices (tracing needs no devices):


# %% tags=["plumbing", "nbval-check-output"]
def forward_bytes(kv_heads, dtype, heads=8, size=8, length=1024):
    shapes = ((kv_heads, heads // kv_heads, H), (kv_heads, H), (kv_heads, H), ())
    abstract = [
        jax.ShapeDtypeStruct((1, length, *shape), dtype if shape else jnp.int32)
        for shape in shapes
    ]
    run = lambda *args: (package_ring(*args),)
    over = spread(run, GIVEN, (QUERIES,), abstract_mesh(f"sp={size}"))
    found = census_jaxpr(jax.make_jaxpr(over)(*abstract), {"sp": size})
    return sum(c.bytes_sent for c in found if c.dtype != "s32")


base, half = forward_bytes(8, jnp.float32), jnp.bfloat16
for kv_heads, dtype in ((8, jnp.float32), (8, half), (2, half), (1, half)):
    size = forward_bytes(kv_heads, dtype)
    assert base == size * (8 // kv_heads) * (4 // jnp.dtype(dtype).itemsize)
    print(f"{kv_heads} KV heads in {jnp.dtype(dtype).name:<9} {size:>9,} B", end=" ")
    print(f"sent forward, 1/{base // size} of the first line")

# %% [markdown]
# ### A Llama with its sequence cut
#
# Now llmpar: 2 layers and two documents in each row. The three variants are one field of the plan, `context_parallel`. The model's
# code has one arrow for each, from `b` rows of `s` positions, cut over sp, to what attention wants; it is empty where nothing moves:
#
# | variant | what moves | arrow |
# |---|---|---|
# | ring | keys and values, from neighbour to neighbour | none: `b s/sp k h` travels while it is used |
# | Ulysses | positions are exchanged for heads, and back | `b s/sp k h -> b s k/sp h` |
# | gathered keys | all keys and values to everybody | `b s/sp k h -> b s k h` |
#
# Tokens, targets, positions and document numbers are dealt in zigzag; RoPE turns by true positions, so nothing else knows about it.
# `zero=0` keeps the weights whole: what moves is then attention's, and the gradients'. (By default ZeRO cuts them by `sp` too, as
# torchtitan does: its ranks hold the same weights.)

# %%
SP = min(N, 4)
LLAMA, BATCH, SEQ, STEPS = dataclasses.replace(preset("tiny"), num_layers=2), 2, 32, 3
TEXT = counting_text(BATCH, SEQ)
TEXT["segments"] = 1 + (TEXT["positions"] >= np.array([[20], [9]]))  # two documents
SGD = optax.sgd(0.5)
learn = lambda plan: train_on(LLAMA, plan, TEXT, SGD, STEPS)
print("Four programs are compiled and run: about 30 s.")
solo = learn(Plan("dp=1"))
plan = Plan(f"sp={SP}", zero=0)
variants = ("ring", "ulysses", "gather")
llamas = {
    variant: learn(dataclasses.replace(plan, context_parallel=variant))
    for variant in variants
}
tables = verdicts(llamas, solo, weights_within=1e-4)

# %% [markdown]
# Every device has its share of the positions of every row. By the arrows of the model, without the all-reduces of gradients:

# %% tags=["plumbing"]
for name, run in llamas.items():
    shape = run.step.batch_sharding.shard_shape((BATCH, SEQ))
    assert shape == (BATCH, SEQ // SP)
    shards = lambda x: {s.data.shape for s in x.addressable_shards}
    assert all(shards(x) == {x.shape} for x in jax.tree.leaves(run.state.params))
    census = as_predicted(run)
    predicted = traffic.step_traffic(run.step.plan, BATCH, SEQ)
    in_all = sum(row["bytes_sent"] for row in arrow_rows(census))
    assert in_all == predicted.total_bytes
    attends = [c for c in census if c.kind != "all-reduce"]
    print(f"{name}:\n{arrow_text(attends, most=8)}")
ids = [tables[name].get(("sp", "all-gather")) for name in ("ring", "ulysses")]
assert ids[0] == ids[1], "positions and document numbers, and no activation"

# %% tags=["plumbing"]
rows = []
for name, table in tables.items():
    predicted = traffic.step_traffic(llamas[name].step.plan, BATCH, SEQ)
    for (axis, kind), row in table.items():
        if kind != "all-reduce":
            bar = {"axis": axis, "kind": f"{kind} ({name})", "count": row["count"]}
            bar["predicted_bytes"] = predicted[axis, kind].bytes_sent
            rows.append(bar | {"compiled_bytes": row["bytes_sent"]})
if rows:
    show(draw.collectives(rows))
else:
    print("one device sends nothing, so there is nothing to draw")

# %% [markdown]
# The ring sends the most here. (The small all-gathers are of positions and document numbers, once for all layers.) Which variant is best
# depends on the heads, the degree and the links. How many numbers of 2 bytes a device sends, for each layer and each position that it holds,
# in bfloat16 (n = k·r query heads):
#
# | variant | forward | in a training step | limit | waits for |
# |---|---|---|---|---|
# | ring | 2 k h (N − 1) | 8 k h (N − 1): K, V twice, dK, dV in float32 | none | hops longer than the work on a piece |
# | Ulysses | (2 n + 2 k) h (N − 1)/N | twice as much | here N divides k | four all-to-alls, with nothing to do meanwhile |
# | gather | 2 k h (N − 1) | twice as much | holds all K and V | an all-gather |
#
# What is true of the forward pass need not be true of training. The middle column is what llmpar predicts:


# %% tags=["plumbing", "nbval-check-output"]
EXCHANGE = {
    "ring": ["collective-permute"],
    "ulysses": ["all-to-all"],
    "gather": ["all-gather", "reduce-scatter"],
}


def sent_in_step(config, variant, size, length=4096):
    """Numbers of head width that a step sends per layer and position held (and the few
    bytes of positions)."""
    plan = Plan(f"sp={size}", zero=0, context_parallel=variant, dtype="bfloat16")
    predicted = traffic.step_traffic(plan.resolve(config), 1, length)
    total = sum(predicted["sp", kind].bytes_sent for kind in EXCHANGE[variant])
    return total / (2 * config.head_width * config.num_layers * length // size)


for name in ("llama2-7b", *llama3):
    config = preset(name)
    heads, kv_heads = config.num_heads, config.num_kv_heads
    for size in (2, 4, 8):
        ring = 2 * kv_heads * (size - 1)
        ulysses = (2 * heads + 2 * kv_heads) * (size - 1) / size
        in_step = {"ring": 4 * ring, "ulysses": 2 * ulysses, "gather": 2 * ring}
        for variant, formula in in_step.items():
            found = sent_in_step(config, variant, size)
            assert np.isclose(found, formula, rtol=2e-3), (name, variant, size)
        if name == "llama3.1-405b":
            shown = ", ".join(f"{way} {units:.0f}" for way, units in in_step.items())
            print(f"{name}, N = {size}: {shown} head widths")

# %% [markdown]
# ### Time
#
# The paper's 6.2k positions per device are six pieces of the threshold above: it counts six that a device holds together (queries, keys
# and values in use, keys and values on their way, the output). Below: the forward pass of Llama 2 7B's attention (one KV head per query
# head) on 8 A100 of a node, per layer, with links as large messages reach them (247 of 300 GB/s). It is computed and not measured,
# because simulated devices have no links.

# %% tags=["plumbing"]
llama = preset("llama2-7b")
assert round(a100.reached_link_bytes_per_s / 1e9) == 247


def step_times(length, size, node):
    """Seconds of one step of a zigzag causal ring in bfloat16: the work on what is live
    of a square, and the hop beside it."""
    block = length // size
    work = 4 * block * block * llama.num_heads * llama.head_width / 2
    moved = 4 * block * llama.num_kv_heads * llama.head_width
    return work / node.flops_per_s, moved / node.reached_link_bytes_per_s


bars, threshold = [], 2 * block / a100.link_efficiency
for length in (4096, 8192, 16_384, 32_768):
    work_s, hop_s = step_times(length, 8, a100)
    assert (hop_s <= work_s) == (length / 8 >= threshold)
    bar = {"work": 8 * work_s, "waiting for hops": 7 * max(0.0, hop_s - work_s)}
    bars.append((f"{length:,} positions", bar))
title = "Ring over 8 A100 in a node: attention of one layer, forward"
show(draw.time_bars(bars, title=title))

# %% [markdown]
# Work grows with the square of a piece's length, a hop with the length.
#
# ### Exercise (expert): when does Ulysses beat the ring?
#
# Take the table above. For each model: over how many ranks, at least, does Ulysses send *less* than the ring, in the forward pass
# (`forward`), and in a whole training step (`step`)? Give a power of two, or `None` where llmpar's Ulysses cannot be cut that far
# (N must divide the KV heads; others repeat them). (Llama 2 7B has
# 32 query and 32 KV heads, Llama 3 8B 32 and 8, Llama 3 70B 64 and 8.)
#
# Fewer bytes are not less time: the ring's hops overlap with computing, the all-to-alls of Ulysses do not. From how many positions per
# device on does the ring of Llama 3 8B, causal and in zigzag, overlap its hops forward in an H100 node (989.4 TFLOP/s, 450 GB/s as
# published)?

# %%
answer = {
    "llama2-7b forward": ...,
    "llama3-8b forward": ...,
    "llama3-70b forward": ...,
    "llama2-7b step": ...,
    "llama3-8b step": ...,
    "llama3-70b step": ...,
    "hidden_from": ...,
}
attempt("06.rivals", answer)

# %% [markdown]
# ### Where XLA's partitioner differs
#
# `mode="auto"` says only where values live. The ring itself is an *island* of ours (code on one device's part) in either mode,
# because no layout says "keep it moving". Ulysses can be said in layouts: positions cut before, heads cut after, and XLA, JAX's compiler, finds the
# collectives.

# %% tags=["plumbing"]
by_xla = Plan(f"sp={SP}", zero=0, context_parallel="ulysses", mode="auto")
auto, manual = learn(by_xla), llamas["ulysses"]
assert np.allclose(auto.losses, solo.losses, rtol=1e-4)
arguments = [compiled_memory(run.compiled)["argument_bytes"] for run in (auto, manual)]
assert arguments[0] == arguments[1]
print("value and memory: Auto equals Manual")
auto_table = census_table(census_hlo(auto.text, manual.step.mesh))
for name, table in (("manual", tables["ulysses"]), ("auto", auto_table)):
    for (_, kind), row in sorted(table.items(), key=lambda i: -i[1]["bytes_sent"]):
        print(f"{name:>7}: {kind:<11} ×{row['count']:<4}{row['bytes_sent']:>10,} B")
if devices[0].platform == "cpu" and SP > 1:
    gathered = [
        t["sp", "all-gather"]["bytes_sent"] for t in (auto_table, tables["ulysses"])
    ]
    assert gathered[0] > gathered[1]
    print("communication: on simulated devices Auto forms some of the all-to-alls,")
    print("and gathers activations elsewhere")

# %% [markdown]
# And one letter can cost a collective per layer (`d` width of the model, `m` width of a feed-forward). A constraint on the hidden values of a feed-forward that forgets `s` says "whole
# along s", and the partitioner obeys. The values stay right and no error is raised:


# %%
def feed_forward(hidden):
    """The collectives of a feed-forward whose hidden values have a layout."""
    at = lambda text: sharding(mesh, parse_layout(text))

    def run(x, up, down):
        y = lax.with_sharding_constraint(jax.nn.silu(x @ up), at(hidden))
        return x + y @ down

    dims = {"b s/sp d": (BATCH, S, 32), "d m": (32, 64), "m d": (64, 32)}
    given = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=at(text))
        for text, shape in dims.items()
    ]
    lowered = jax.jit(run, out_shardings=at("b s/sp d")).lower(*given)
    return census_hlo(partitioned_hlo(lowered), mesh)


right, wrong = feed_forward("b s/sp m"), feed_forward("b s m")

# %% tags=["plumbing"]
assert right == []
forgotten = [("all-gather", ("sp",), (BATCH, S, 64))]
assert [(c.kind, c.axes, c.shape) for c in wrong] == forgotten
for text, census in (("b s/sp m", right), ("b s m", wrong)):
    sent = ", ".join(f"{c.kind} over {c.axes[0]}, {c.bytes_sent:,} B" for c in census)
    print(f"hidden values '{text}': {sent or 'nothing is sent'}")

# %% [markdown]
# ### What is left to hold
#
# With no scores kept, the widest values of a layer are those inside its feed-forward: `b s m`, three of them, in every layer. A
# feed-forward looks at one position at a time, so it can take the positions in pieces, and compute its hidden values again in the
# backward pass instead of keeping them (Liu and Abbeel 2023). Nothing is sent for it. Compiled here: one device's share of a step, in one
# piece and in eight.

# %% tags=["plumbing"]
share, wide = 1024, dataclasses.replace(LLAMA, ffn_width=8 * LLAMA.width)
temporaries = {}
for pieces in (1, 8):
    plan = Plan("dp=1", ffn_chunks=pieces, loss_chunks=8)
    step = Step(wide, plan, make_mesh("dp=1"), optax.sgd(0.5))
    temp = compiled_memory(read_program(step.lower(1, share))[0])["temp_bytes"]
    temporaries[pieces] = temp
    print(f"{pieces} piece{'s' * (pieces > 1)}: {temp / 2**20:.1f} MiB of temporaries")
hidden_bytes = 4 * share * wide.ffn_width
if devices[0].platform == "cpu":
    assert temporaries[1] - temporaries[8] > 3 * hidden_bytes
print(f"one array of hidden values has {hidden_bytes / 2**20:.1f} MiB")

# %% [markdown]
# ### When tokens come one at a time
#
# Generating has one query per layer, and the keys of everything before it: a cache. Cut its positions over `sp` too, `b t/sp k h`. The
# query goes to all ranks, which costs nothing (they all computed it); each looks at its own share, and the partial results merge in two
# small sums. To send the cache round the ring instead would take more than a thousand times the bytes.

# %% tags=["plumbing"]
POSITIONS, weights = 4096, llamas["ring"].state.params
over, plan = make_mesh(f"sp={SP}"), Plan(f"sp={SP}", zero=0)
decoder = Decoder(LLAMA, plan, over, weights, 1, POSITIONS)
traced = decoder.run.trace(decoder.params, decoder.cache, DecoderInput.idle(1), False)
sent = census_table(census_jaxpr(traced.jaxpr, {"sp": SP}))
held = {shard.data.nbytes for shard in decoder.cache[0].addressable_shards}
per_position = 4 * LLAMA.num_layers * LLAMA.num_kv_heads * LLAMA.head_width
assert held == {per_position * POSITIONS // SP}
if SP > 1:
    # The largest score; the weighted values and their weight.
    small = 4 * LLAMA.num_heads * (1 + LLAMA.head_width + 1)
    assert set(sent) == {("sp", "all-reduce")}
    a_token = sent["sp", "all-reduce"]["bytes_sent"]
    assert a_token == LLAMA.num_layers * 2 * small * (SP - 1) // SP
    turned = 2 * held.pop() * (SP - 1)
    print(f"a token sends {a_token:,} B; the cache, round the ring, {turned:,} B")

# %% [markdown]
# ### On your cluster
#
# ```
# llmpar train --mesh "sp=8" --sequence-order zigzag --seq-len 32768 --batch-size 1        a ring over 8 devices
# llmpar train --mesh "fsdp=2 sp=4" --context-parallel ulysses --seq-len 32768             heads for positions, and ZeRO-3
# llmpar inspect --mesh "sp=8" --seq-len 32768 --dtype bfloat16                            hops, bytes and memory
# llmpar inspect --mesh "sp=8" --context-parallel gather --seq-len 32768                   the same for gathered keys
# llmpar train --mesh "sp=8" --seq-len 131072 --batch-size 1 --remat block --ffn-chunks 16 --loss-chunks 16
# ```
#
# On TPUs, and GPUs since Ampere, all three run on a kernel of ours, which keeps no scores and returns its log of sums in float32: a ring
# needs that to merge. The blocks of this lesson, `--attention-kernel portable`, are slower there.
#
# `sp` needs fast links when pieces are short; with long ones slow links are enough, as the threshold says. It multiplies with every other
# axis, in generation too: `llmpar generate "def " --checkpoints FOLDER --mesh "sp=4 tp=2"`.
