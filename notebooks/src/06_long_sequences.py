# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 30
#     needs: ["02", "05"]
#     objectives:
#     - Merge attention to parts of the keys, and build a ring of it.
#     - Say why some ranks wait under a causal mask, and cure it by another order of
#       positions.
#     - Choose between ring, zigzag and Ulysses from heads, ranks and links.
# ---

# %% [markdown]
# # 06 · Long sequences: can attention be cut along the sequence?
#
# Data parallelism cuts the batch, tensor parallelism the heads. A single sequence of a million tokens has a batch of one, and
# in Llama 3 eight KV heads. So cut its positions: over the axis `sp`, every device holds `s/sp` of them. Norms and feed-forwards
# do not notice, since they look at one position at a time. Attention does: every query wants to see every earlier key.
#
# | variant | what moves | arrow |
# |---|---|---|
# | ring (Liu et al. 2023) | keys and values, from neighbour to neighbour | none: `b s/sp k h` travels while it is used |
# | Ulysses (Jacobs et al. 2023) | positions are exchanged for heads, and back | `b s/sp k h -> b s k/sp h` |
# | gathered keys (Llama 3, 2024) | all keys and values to everybody | `b s/sp k h -> b s k h` |
#
# (*Arrow*, *reading* and *island* are explained in the README, under [Words](../README.md#words).)
#
# **Question.** What must travel so that every query sees every key, and why do some devices wait for others?
#
# Letters: `b` rows of the batch, `s` positions, `t` positions of keys, `d` width of the model, `m` width of a
# feed-forward, `n` query heads, `k` KV heads, `r` query heads per KV head, `h` width of a head, `N` devices along the
# axis at hand, `C` FLOP/s of a device, `β` bytes/s of its links.

# %%
from llmpar.mesh import use_devices
from llmpar.predict.ring import pairs_by_step

devices = use_devices()

# %%
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from llmpar import attention, draw, sequence_order
from llmpar.config import preset
from llmpar.draw import scene
from llmpar.exercises import attempt, hint, solution
from llmpar.exercises.lesson import as_table, counting_text, train_steps
from llmpar.inspect.census import (
    arrow_rows,
    arrow_text,
    census_hlo,
    census_table,
    compiled_memory,
    partitioned_hlo,
)
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.mesh import abstract_mesh, make_mesh, sharding, spec
from llmpar.notation import parse_layout
from llmpar.plan import Plan
from llmpar.predict import formulas, memory, traffic
from llmpar.predict.hardware import chip
from llmpar.serve.decode import Decoder
from llmpar.step import Step

# Accelerators round float32 products unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
assert {preset(name).num_kv_heads for name in ("llama3-8b", "llama3-70b", "llama3.1-405b")} == {8}
N = max(size for size in (1, 2, 4, 8) if size <= len(devices))
mesh = make_mesh(f"sp={N}")
S, K, R, H = 32 * N, 2, 2, 16  # positions, KV heads, query heads per KV head, head width
OWN = S // N  # positions of one device

# %% [markdown]
# ## One picture
#
# A ring. Everybody starts with the keys of its own positions, looks at them, and hands them on. After N − 1 hops each block has
# been everywhere. Queries never move.

# %%
PAIRS = [(i, (i + 1) % N) for i in range(N)]
scene.show(draw.ring_steps(PAIRS))

# %% [markdown]
# ## Predict
#
# The toy has S positions, 2 KV heads and 4 query heads of width 16, float32. **How many bytes of keys and values does one device
# send in the forward pass?**

# %%
print(f"{N} devices, S = {S} positions, {OWN} on each")
bytes_of_keys_and_values = ...
attempt("06.ring_bytes", bytes_of_keys_and_values, devices=N, seq=S)

# %% [markdown]
# ### Exercise (core): one hop of a real model
#
# Llama 3 8B: 32 query heads, 8 KV heads, head width 128, 32 layers. A sequence of 131,072 tokens over `sp=8`, in bfloat16. How many
# bytes does a device hand on in one hop of one layer?

# %%
hop_bytes = ...
attempt("06.hop_bytes", hop_bytes)

# %% [markdown]
# ## Attention can be done in parts
#
# The softmax divides by the sum over *all* keys. So how can a device begin before it has seen them all? It keeps three things per
# query: the largest score so far, the sum of exponentials, and the weighted sum of values, both relative to that maximum. Two such
# results about different keys join into one (Milakov and Gimelshein 2018).


# %%
def look(q, k, v, seen):
    """What queries find in some of the keys: the weighted sum of values, the sum of weights, the largest
    score."""
    scores = jnp.where(seen, jnp.einsum("bskrh,btkh->bkrst", q, k) / H**0.5, -jnp.inf)
    top = jnp.maximum(scores.max(-1), -1e30)  # a query that sees none of these keys
    weights = jnp.exp(scores - top[..., None])
    return jnp.einsum("bkrst,btkh->bkrsh", weights, v), weights.sum(-1), top


def join(one, other):
    (values_a, total_a, top_a), (values_b, total_b, top_b) = one, other
    top = jnp.maximum(top_a, top_b)
    a, b = jnp.exp(top_a - top), jnp.exp(top_b - top)
    return values_a * a[..., None] + values_b * b[..., None], total_a * a + total_b * b, top


def finish(values, total, top):
    return jnp.einsum("bkrsh->bskrh", values / total[..., None])


def exact(q, k, v, positions):
    """The textbook: all scores, one softmax. The reference of this lesson."""
    scores = jnp.einsum("bskrh,btkh->bkrst", q, k) / H**0.5
    seen = positions[0, :, None] >= positions[0, None, :]
    return jnp.einsum("bkrst,btkh->bskrh", jax.nn.softmax(jnp.where(seen, scores, -1e30)), v)


rng = np.random.default_rng(0)
q, out_grad = (rng.standard_normal((1, S, K, R, H)).astype(np.float32) for _ in range(2))
k, v = (rng.standard_normal((1, S, K, H)).astype(np.float32) for _ in range(2))
positions = np.arange(S, dtype=np.int32)[None]


@jax.jit
def in_halves(q, k, v, positions):
    halves = [slice(None, S // 2), slice(S // 2, None)]
    seen = positions[0, :, None] >= positions[0, None, :]
    by_hand = finish(*join(*(look(q, k[:, half], v[:, half], seen[:, half]) for half in halves)))
    parts = [
        attention.full(q, k[:, half], v[:, half], q_positions_bs=positions, k_positions_bt=positions[:, half])
        for half in halves
    ]
    return by_hand, attention.merge(*parts[0], *parts[1])[0], exact(q, k, v, positions)


by_hand, merged, want = map(np.asarray, in_halves(q, k, v, positions))
assert np.allclose(by_hand, want, atol=1e-5) and np.allclose(merged, want, atol=1e-5)
print("value: two halves of the keys, joined by hand or by attention.merge, give attention to all keys")

# %% [markdown]
# The package keeps two things instead of three: the output divided already, and `lse`, the log of the sum of exponentials
# (`top + log(total)`). It is the same information, and all that the backward pass needs: scores are computed again there, so
# nothing of size `s t` is ever stored (Dao et al. 2022).
#
# ## Run: a ring by hand
#
# What you read is what one device does. Who sees whom is decided by *positions*, which travel with the keys. The text has a look, a
# hop and a join; it also counts how many pairs its mask lets through in each step.


# %%
def ring_by_hand(q, k, v, mine):  # b s/sp k r h, b s/sp k h twice, b s/sp
    def at_home(k, v, theirs):
        seen = mine[0, :, None] >= theirs[0, None, :]
        return look(q, k, v, seen), seen.sum()

    def step(carry, _):
        held, done = carry
        held = jax.tree.map(lambda x: lax.ppermute(x, "sp", PAIRS), held)
        found, pairs = at_home(*held)
        return (held, join(done, found)), pairs

    held = k, v, mine
    done, pairs = at_home(*held)
    (_, done), later = lax.scan(step, (held, done), length=N - 1)
    return finish(*done), jnp.concatenate([pairs[None], later])[None]


QUERIES, KEYS, IDS = (parse_layout(text) for text in ("b s/sp k r h", "b s/sp k h", "b s/sp"))
GIVEN = (QUERIES, KEYS, KEYS, IDS)


def spread(function, given, made, over=mesh):
    return jax.jit(
        jax.shard_map(function, mesh=over, in_specs=tuple(map(spec, given)), out_specs=tuple(map(spec, made)))
    )


def deal(order, *arrays):
    """Lay positions onto ranks in this order: nothing but a permutation of the data, made before the step."""
    return [np.take(x, sequence_order.sequence_permutation(order, S, N), axis=1) for x in arrays]


ring = spread(ring_by_hand, GIVEN, (QUERIES, parse_layout("b/sp t")))
placed = [
    jax.device_put(x, sharding(mesh, place)) for x, place in zip((q, k, v, positions), GIVEN, strict=True)
]
ring_lowered = ring.lower(*placed)
ring_compiled = ring_lowered.compile()
live, places = {}, {}
for order in ("contiguous", "zigzag"):
    out, pairs = ring_compiled(
        *[jax.device_put(x, y.sharding) for x, y in zip(deal(order, q, k, v, positions), placed, strict=True)]
    )
    (want_dealt,) = deal(order, want)
    assert np.allclose(out, want_dealt, atol=1e-5), order
    live[order], places[order] = np.asarray(pairs), out.addressable_shards
print("value: a ring by hand gives full attention, whichever way positions are dealt to the ranks")

# %% [markdown]
# ## Compare: four verdicts
#
# The number of hops is read from the compiled program. The loop runs N − 1 times; a census that forgot to multiply would find one hop.

# %%
assert all(shard.data.shape == (1, OWN, K, R, H) for shards in places.values() for shard in shards)
print(
    f"sharding: every device holds {(1, OWN, K, R, H)} of the output {out.shape}: its own positions, all heads"
)

census = census_hlo(ring_compiled.as_text(), mesh)
moved = {dtype: [c for c in census if c.dtype == dtype] for dtype in ("f32", "s32")}
assert {c.kind for c in census} <= {"collective-permute"} and {c.shape for c in moved["f32"]} <= {
    (1, OWN, K, H)
}
hops = sum(c.count for c in moved["f32"]) // 2
hop = 2 * 4 * OWN * K * H  # bytes of K and V of one device's positions
assert hops == N - 1 == sum(c.count for c in moved["s32"])
assert (
    sum(c.bytes_sent for c in moved["f32"]) == (N - 1) * hop == 4 * formulas.ring_elements(1, S, K, H, N)[0]
)
assert sum(c.bytes_sent for c in moved["s32"]) == (N - 1) * 4 * OWN
compiled_pairs = {
    pair
    for text in re.findall(r"source_target_pairs=\{\{(.*?)\}\}", ring_compiled.as_text())
    for pair in text.split("},{")
}
assert N == 1 or compiled_pairs == {f"{source},{target}" for source, target in PAIRS}
print(
    f"communication: hops: {hops}, along the pairs of the picture; a hop is {hop:,} B of K and V, and {4 * OWN}"
    " B of positions"
)

arguments = compiled_memory(ring_compiled)["argument_bytes"]
assert arguments == 4 * OWN * (K * R * H + 2 * K * H + 1)
print(f"memory: {arguments:,} B of arguments per device, 1/{N} of everything")

# %% [markdown]
# The paper's ring makes N hops, and the last brings home what nobody uses. At N = 8 that is an eighth of the traffic.
#
# ## Who waits?
#
# A step of the ring ends when the busiest device is done. Under a causal mask a query sees no later key. So a device whose
# positions are early finds nothing in most of the blocks that come by. Drawn are the pairs that the program above let through,
# as a share of a block (a query's own key counts half, which makes a triangle exactly ½).

# %%
for order, pairs in live.items():
    assert (pairs == pairs_by_step(N, order, s=S)).all()
parts = {order: (pairs - (np.arange(N) == 0) * OWN / 2) / OWN**2 for order, pairs in live.items()}
scene.show(draw.live_blocks(parts["contiguous"].tolist()))

# %% [markdown]
# Positions in order: the last rank computes all the time, the first one at the start only. The cure costs nothing: cut the
# sequence into 2N parts and give rank i an early one and a late one, the parts i and 2N − 1 − i. This is the **zigzag** order:

# %%
scene.show(draw.live_blocks(parts["zigzag"].tolist()))

# %%
for order, expected in (("contiguous", 2 - 1 / N), ("zigzag", 1)):
    work = parts[order].sum(1)
    assert np.isclose(work.max() / work.mean(), expected)
    print(
        f"{order:<11} busiest rank / mean = {work.max() / work.mean():.3f}; the ring takes"
        f" {parts[order].max(0).sum():g} blocks of time"
    )
assert parts["contiguous"].max(0).sum() == N - 1 / 2 and np.isclose(parts["zigzag"].max(0).sum(), N / 2)

# %% [markdown]
# (The drawing has one sign for half a block. In step 0 it is a triangle. Later, either all queries see the early part of the keys,
# or the late part of the queries sees all keys.) The busiest rank has 2 − 1/N times the mean in order, and exactly the mean in
# zigzag. Brandon et al. 2023 reach nearly the same with `striped`: every N-th position.
#
# A real kernel works in tiles, and skips only those that are masked throughout. What the busiest of 8 ranks computes of 4,096
# positions, 512 on each, as a share of attention without a mask:

# %%
# NBVAL_CHECK_OUTPUT
length = 4096
shares = {}
for order in ("contiguous", "striped", "zigzag"):
    for tile in (512, 256, 64, 16):
        shares[order, tile] = pairs_by_step(8, order, s=length, block=tile).sum(1).max() / (
            length * length / 8
        )
    print(
        f"{order:<11}"
        + "".join(f"  tiles of {tile}: {shares[order, tile]:.3f}" for tile in (512, 256, 64, 16))
    )
assert shares["contiguous", 512] == shares["zigzag", 512] == 1 and shares["zigzag", 64] <= 0.51
assert all(
    shares["zigzag", tile] < shares["striped", tile] < shares["contiguous", tile] for tile in (256, 64, 16)
)

# %% [markdown]
# In order, the busiest rank computes nearly as much as if there were no mask, whatever the tile. In zigzag a tile may be as large as a
# part (256 here): the mask's edge runs through tiles in the first step only, when a rank looks at its own keys. In striped order it
# runs through tiles in *every* step, so it wants fine ones. `attention.ring` takes tiles no longer than a part unless told otherwise.
#
# ### Exercise (stretch): write the zigzag
#
# Return an array of the positions 0 … s − 1 in the order in which they lie on the ranks: first all of rank 0, then all of rank 1, … .
# The sequence `s` is a multiple of 2n. NumPy is there as `np`.


# %%
def zigzag(s, ranks): ...


attempt("06.zigzag", zigzag)

# %% [markdown]
# ## Backwards
#
# `attention.ring` is the ring of the package: the same forward pass, and a backward pass of its own. It saves the output and `lse`,
# and turns the ring again: keys and values make their N − 1 hops a second time, and the *gradients* of keys and values follow
# one hop behind them, in float32, collecting what each rank adds. K and V travel as one message, because links carry one collective
# at a time beside the work. Positions are few: all ranks learn all of them at once, before the first hop.


# %%
def with_gradients(attend):
    """The output of attention and the gradients of its three inputs."""

    def run(q, k, v, positions, out_grad):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, positions), q, k, v)
        return out, *pull(out_grad)

    return run


def package_ring(q, k, v, positions):
    return attention.ring(q, k, v, axis="sp", q_positions_bs=positions, k_positions_bt=positions)[0]


shapes = ((K, R, H), (K, H), (K, H), (), (K, R, H))
arrays = [
    jax.ShapeDtypeStruct((1, S, *shape), jnp.float32 if shape else jnp.int32, sharding=sharding(mesh, place))
    for shape, place in zip(shapes, (*GIVEN, QUERIES), strict=True)
]
lowered = spread(with_gradients(package_ring), (*GIVEN, QUERIES), (QUERIES, QUERIES, KEYS, KEYS)).lower(
    *arrays
)
compiled = lowered.compile()
whole = jax.jit(with_gradients(exact)).lower(q, k, v, positions, out_grad).compile()
want_all = whole(q, k, v, positions, out_grad)
given = [
    jax.device_put(x, a.sharding)
    for x, a in zip(deal("zigzag", q, k, v, positions, out_grad), arrays, strict=True)
]
for name, got, wanted in zip(("out", "dq", "dk", "dv"), compiled(*given), want_all, strict=True):
    (wanted,) = deal("zigzag", np.asarray(wanted))
    error = np.abs(np.asarray(got) - wanted).max() / np.abs(wanted).max()
    assert error < 1e-5, (name, error)
print(
    "value: output and gradients of q, k and v equal those of full attention to 1e-5 of their largest element"
)

found = census_hlo(partitioned_hlo(lowered), mesh)
sent = {
    dtype: (
        sum(c.count for c in found if c.dtype == dtype),
        sum(c.bytes_sent for c in found if c.dtype == dtype),
    )
    for dtype in ("f32", "s32")
}
assert {c.kind for c in found if c.dtype == "f32"} <= {"collective-permute"}
assert sent["f32"] == (3 * (N - 1), 3 * (N - 1) * hop)  # K with V; K with V again; their gradients
assert sent["s32"] == (int(N > 1), (N - 1) * 4 * OWN)  # positions, gathered once
print(
    f"communication: K with V forward, the same backward, dK with dV: {sent['f32'][0]} permutes = 3 · (N-1),"
    f" {sent['f32'][1]:,} B"
)

ring_memory, whole_memory = compiled_memory(compiled), compiled_memory(whole)
assert ring_memory["argument_bytes"] == 4 * OWN * (2 * K * R * H + 2 * K * H + 1)
print(f"memory: {ring_memory['argument_bytes']:,} B of arguments per device, 1/{N} of everything")
if N > 1:
    assert ring_memory["temp_bytes"] < whole_memory["temp_bytes"] / N
    print(
        f"memory: full attention keeps its {S} x {S} scores; the ring's temporaries are less than 1/{N} of"
        " what that takes"
    )

# %% [markdown]
# That is the promise of the ring: twice the devices take twice the sequence, with the same share on each, and no scores are kept.
#
# ### Grouped queries make hops short
#
# Only KV heads travel, in the dtype in which they are computed. Read from the traced program of the forward pass, for 8 query heads
# over 8 devices (tracing needs no devices):


# %%
# NBVAL_CHECK_OUTPUT
def forward_bytes(kv_heads, dtype, heads=8, size=8, length=1024):
    shapes = ((kv_heads, heads // kv_heads, H), (kv_heads, H), (kv_heads, H), ())
    abstract = [jax.ShapeDtypeStruct((1, length, *shape), dtype if shape else jnp.int32) for shape in shapes]
    traced = jax.make_jaxpr(
        spread(lambda *args: (package_ring(*args),), GIVEN, (QUERIES,), abstract_mesh(f"sp={size}"))
    )(*abstract)
    return sum(c.bytes_sent for c in census_jaxpr(traced, {"sp": size}) if c.dtype != "s32")


base = forward_bytes(8, jnp.float32)
for kv_heads, dtype in ((8, jnp.float32), (8, jnp.bfloat16), (2, jnp.bfloat16), (1, jnp.bfloat16)):
    size = forward_bytes(kv_heads, dtype)
    assert base == size * (8 // kv_heads) * (4 // jnp.dtype(dtype).itemsize)
    print(
        f"{kv_heads} KV heads in {jnp.dtype(dtype).name:<9} {size:>9,} B sent forward, 1/{base // size} of"
        " the first line"
    )

# %% [markdown]
# ## A Llama with its sequence cut
#
# Now the package: 2 layers, trained by `llmpar.step.Step`. The three variants are one field of the plan, `context_parallel`; the model's
# text has one arrow for each, which is empty where nothing moves. Tokens, targets, positions and document numbers are dealt in
# zigzag; RoPE turns by true positions, so nothing else knows about it. `zero=0` keeps the weights whole: what moves is then
# attention's, and the gradients'. (By default ZeRO cuts them by `sp` too, as Llama 3 does: its ranks hold the same weights.)

# %%
SP = min(N, 4)
LLAMA, BATCH, SEQ, STEPS = dataclasses.replace(preset("tiny"), num_layers=2), 2, 32, 3
TEXT = counting_text(BATCH, SEQ)
TEXT["segments"] = 1 + (TEXT["positions"] >= np.array([[20], [9]]))  # two documents in each row


def train_llama(plan):
    """Compile the step and train: the step, its lowered and its compiled program, the last state, losses."""
    step = Step(LLAMA, plan, make_mesh(plan.mesh), optax.sgd(0.5))
    lowered = step.lower(BATCH, SEQ)
    compiled = lowered.compile()
    order = sequence_order.sequence_permutation(plan.sequence_order, SEQ, plan.mesh.sp)
    dealt = {name: x[:, order] for name, x in TEXT.items()}
    return step, lowered, compiled, *train_steps(step, compiled, dealt, STEPS)


*_, solo_state, solo_losses = train_llama(Plan("dp=1"))
llamas = {
    variant: train_llama(Plan(f"sp={SP}", zero=0, context_parallel=variant))
    for variant in ("ring", "ulysses", "gather")
}
print("losses on one device:", " ".join(f"{x:.3f}" for x in solo_losses))

# %%
for name, (*_, state, losses) in llamas.items():
    assert np.allclose(losses, solo_losses, rtol=1e-4), f"{name}: {losses}"
    for one, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(solo_state.params), strict=True):
        assert np.allclose(one, other, atol=1e-4), name
print(
    f"value: {STEPS} losses and the weights after them equal those of one device, for ring, ulysses and"
    " gather"
)

for step, _, _, state, _ in llamas.values():
    shards = jax.tree.map(lambda x: {s.data.shape for s in x.addressable_shards}, state.params)
    promised = jax.tree.map(
        lambda x, layout: {layout.shard_shape(x.shape, {"sp": SP})}, state.params, step.stored
    )
    assert shards == promised and step.batch_sharding.shard_shape((BATCH, SEQ)) == (BATCH, SEQ // SP)
print(
    f"sharding: {SEQ // SP} of {SEQ} positions of every row on each device; weights are whole, sp does not"
    " cut them"
)

# %%
tables = {}
for name, (step, lowered, _, _, _) in llamas.items():
    predicted = traffic.step_traffic(LLAMA, step.plan, BATCH, SEQ)
    census = census_hlo(partitioned_hlo(lowered), step.mesh)
    tables[name] = census_table(census)
    assert tables[name] == as_table(predicted)
    attends = {kind: row for (_, kind), row in tables[name].items() if kind != "all-reduce"}
    print(
        f"{name:<8}",
        "; ".join(f"{kind} ×{row['count']} {row['bytes_sent']:,} B" for kind, row in attends.items())
        or "nothing",
    )
    assert sum(row["bytes_sent"] for row in arrow_rows(census)) == predicted.total_bytes
    print(arrow_text((c for c in census if c.kind != "all-reduce"), most=8))  # by the arrows of the model
ids = tables["ring"].get(("sp", "all-gather")), tables["ulysses"].get(("sp", "all-gather"))
assert ids[0] == ids[1], "positions and document numbers are gathered over sp, and no activation"
print(
    "communication: kinds, counts and bytes per device and step are as predicted (and the all-reduces of"
    " gradients)"
)

for step, _, compiled, _, _ in llamas.values():
    given = memory.argument_bytes(LLAMA, step.plan, BATCH, SEQ, moments=0, scalars=1)
    assert compiled_memory(compiled)["argument_bytes"] == sum(given.values())
print(
    f"memory: {sum(given.values()):,} B of arguments per device as predicted: weights {given['params']:,},"
    f" batch {given['batch']:,}"
)

# %%
rows = [
    {
        "axis": axis,
        "kind": f"{kind} ({name})",
        "count": row["count"],
        "compiled_bytes": row["bytes_sent"],
        "predicted_bytes": (
            traffic.step_traffic(LLAMA, llamas[name][0].plan, BATCH, SEQ)[axis, kind].bytes_sent
        ),
    }
    for name, table in tables.items()
    for (axis, kind), row in table.items()
    if kind != "all-reduce"
]
if rows:
    scene.show(draw.collectives(rows))

# %% [markdown]
# The ring sends the most here: K and V twice, and float32 gradients behind them. The small all-gathers are of positions and document
# numbers, once for all layers. Which variant is best depends on the heads, the degree and the links. Numbers of 2 bytes sent per layer and
# position held, in bfloat16, with n = k r query heads:
#
# | | forward | in a training step | limit | waits for |
# |---|---|---|---|---|
# | ring | 2 k h (N − 1) | 8 k h (N − 1): K, V twice, dK, dV in float32 | none | hops, where they are longer than the work on a block |
# | Ulysses | (2 n + 2 k) h (N − 1)/N | twice as much | N divides k | four all-to-alls, with nothing to do meanwhile |
# | gather | 2 k h (N − 1) | twice as much | holds K and V of the whole sequence | an all-gather |
#
# The ring's backward pass sends three times what its forward pass sends, the others' just as much: so what is true of the forward pass
# need not be true of training. Is the middle column what the package predicts?


# %%
# NBVAL_CHECK_OUTPUT
EXCHANGE = {
    "ring": ["collective-permute"],
    "ulysses": ["all-to-all"],
    "gather": ["all-gather", "reduce-scatter"],
}


def sent_in_step(config, variant, size, length=4096):
    """Numbers of head width that a step sends per layer and position held; the few bytes of positions are
    left in."""
    predicted = traffic.step_traffic(
        config, Plan(f"sp={size}", zero=0, context_parallel=variant, dtype="bfloat16"), 1, length
    )
    total = sum(predicted["sp", kind].bytes_sent for kind in EXCHANGE[variant])
    return total / (2 * config.head_width * config.num_layers * length // size)


for name in ("llama2-7b", "llama3-8b", "llama3-70b", "llama3.1-405b"):
    config = preset(name)
    heads, kv_heads = config.num_heads, config.num_kv_heads
    for size in (2, 4, 8):
        forward = {
            "ring": 2 * kv_heads * (size - 1),
            "ulysses": (2 * heads + 2 * kv_heads) * (size - 1) / size,
        }
        in_step = {
            "ring": 4 * forward["ring"],
            "ulysses": 2 * forward["ulysses"],
            "gather": 2 * forward["ring"],
        }
        for variant, formula in in_step.items():
            assert np.isclose(sent_in_step(config, variant, size), formula, rtol=2e-3), (name, variant, size)
        if name == "llama3.1-405b":
            print(
                f"{name}, N = {size}: ring {in_step['ring']:.0f}, Ulysses {in_step['ulysses']:.0f}, gather"
                f" {in_step['gather']:.0f} head widths"
            )

# %% [markdown]
# ### Exercise (stretch): positions for heads
#
# Ulysses before attention, as one device writes it: `x` has all heads of its own positions, `s/sp k h`. Return its share of the heads,
# of all positions, `s k/sp h`. (No batch here; dims count from 0.) Your function is run for four devices, and what it sends is counted.


# %%
def to_heads(x): ...


attempt("06.to_heads", to_heads)

# %% [markdown]
# ## When does a hop cost no time?
#
# While a device computes on one block, the next is on its way. A block has s/N positions. It takes 4 (s/N)² h FLOPs per query
# head (two products), and its K and V are 4 (s/N) h bytes per KV head in bfloat16. With C FLOP/s and links of β bytes/s (published
# rates, as in all thresholds of these lessons) the hop is hidden if
#
# $$ \frac{4\,(s/N)^2\,n\,h}{C} \ge \frac{4\,(s/N)\,k\,h}{\beta} \quad\Longleftrightarrow\quad \frac{s}{N} \ge \frac{C}{\beta}\cdot\frac{k}{n} $$
#
# A zigzag causal ring has half of the work for the same hops, so it needs twice the block.

# %%
# NBVAL_CHECK_OUTPUT
a100, h100 = chip("a100-80"), chip("h100")
block = formulas.ring_min_block(a100.flops_per_s, a100.link_bytes_per_s)
assert abs(block / 1e3 - 1.0) < 0.06 and abs(6 * block / 1e3 - 6.2) < 0.15  # Liu et al. 2023, table 2
print(
    f"A100 in a node, {a100.link_bytes_per_s / 1e9:.0f} GB/s: blocks of {block:.0f} positions hide a hop,"
    f" sequences of {6 * block:.0f} per device (published 1.0k and 6.2k)"
)
for where, rate in (("in a node", a100.link_bytes_per_s), ("between nodes", a100.dcn_bytes_per_s)):
    causal = [2 * formulas.ring_min_block(a100.flops_per_s, rate, ratio) for ratio in (1, 1 / 4)]
    print(
        f"A100 {where}, {rate / 1e9:.0f} GB/s, causal zigzag: {causal[0]:6.0f} positions, {causal[1]:6.0f}"
        " with 4 query heads per KV head"
    )

# %% [markdown]
# The published 6.2k are six blocks: the paper counts six that a device holds at once (queries, keys and values in use, keys and
# values on their way, the output). Below: the forward pass of Llama 2 7B's attention (one KV head per query head) on 8 A100 of a
# node, per layer, with links as large messages reach them (247 of 300 GB/s). It is computed and not measured, because simulated
# devices have no links.

# %%
llama = preset("llama2-7b")


def step_times(length, size, node):
    """Seconds of one step of a zigzag causal ring in bfloat16: the work on what is live of a block, and the
    hop beside it."""
    block = length // size
    work = 4 * block * block * llama.num_heads * llama.head_width / 2
    return (
        work / node.flops_per_s,
        4 * block * llama.num_kv_heads * llama.head_width / node.reached_link_bytes_per_s,
    )


bars, threshold = [], 2 * block / a100.link_efficiency
assert round(a100.reached_link_bytes_per_s / 1e9) == 247
for length in (4096, 8192, 16_384, 32_768):
    work_s, hop_s = step_times(length, 8, a100)
    assert (hop_s <= work_s) == (length / 8 >= threshold)
    bars.append(
        (f"{length:,} positions", {"work": 8 * work_s, "waiting for hops": 7 * max(0.0, hop_s - work_s)})
    )
scene.show(draw.time_bars(bars, title="Ring over 8 A100 in a node: attention of one layer, forward"))

# %% [markdown]
# Work grows with the square of the block, a hop with the block. The longer the sequence, the less there is to wait for.
#
# ### Exercise (expert): when does Ulysses beat the ring?
#
# Take the table above. For each model: over how many ranks, at least, does Ulysses send *less* than the ring, in the forward pass
# (`forward`), and in a whole training step (`step`)? Give a power of two, or `None` where Ulysses cannot be cut that far. (Llama 2 7B has
# 32 query and 32 KV heads, Llama 3 8B 32 and 8, Llama 3 70B 64 and 8.)
#
# Fewer bytes are not less time: the ring's hide behind work, the all-to-alls of Ulysses do not. From how many positions per device on
# does the ring of Llama 3 8B, causal and in zigzag, hide its hops forward in an H100 node (989.4 TFLOP/s, 450 GB/s as published)?

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
# ## Where XLA's partitioner differs
#
# `reading="auto"` says only where values live. The ring itself is an island of ours in either reading, because no layout says "keep it
# moving". Ulysses can be said in layouts: positions cut before, heads cut after, and XLA finds the collectives.

# %%
*_, auto_lowered, auto_compiled, _, auto_losses = train_llama(
    Plan(f"sp={SP}", zero=0, context_parallel="ulysses", reading="auto")
)
assert np.allclose(auto_losses, solo_losses, rtol=1e-4)
assert (
    compiled_memory(auto_compiled)["argument_bytes"]
    == compiled_memory(llamas["ulysses"][2])["argument_bytes"]
)
print("value and memory: Auto equals Manual")
auto = census_table(census_hlo(partitioned_hlo(auto_lowered), llamas["ulysses"][0].mesh))
for name, table in (("manual", tables["ulysses"]), ("auto", auto)):
    for (_, kind), row in sorted(table.items(), key=lambda item: -item[1]["bytes_sent"]):
        print(f"{name:>7}: {kind:<11} ×{row['count']:<4}{row['bytes_sent']:>10,} B")
if devices[0].platform == "cpu" and SP > 1:
    assert auto["sp", "all-gather"]["bytes_sent"] > tables["ulysses"]["sp", "all-gather"]["bytes_sent"]
    print(
        "communication: on simulated devices Auto forms some of the all-to-alls, and gathers activations"
        " elsewhere"
    )

# %% [markdown]
# And one letter can cost a collective per layer. A constraint on the hidden values of a feed-forward that forgets `s` says "whole
# along s", and the partitioner obeys. The values stay right and no error is raised:


# %%
def feed_forward(hidden):
    """The collectives of a feed-forward whose hidden values are constrained to a layout."""
    stream, weights = sharding(mesh, parse_layout("b s/sp d")), sharding(mesh, parse_layout("d m"))

    def run(x, up, down):
        y = lax.with_sharding_constraint(jax.nn.silu(x @ up), sharding(mesh, parse_layout(hidden)))
        return x + y @ down

    shapes = ((BATCH, S, 32), stream), ((32, 64), weights), ((64, 32), weights)
    given = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place) for shape, place in shapes]
    return census_hlo(partitioned_hlo(jax.jit(run, out_shardings=stream).lower(*given)), mesh)


right, wrong = feed_forward("b s/sp m"), feed_forward("b s m")
assert right == []
if N > 1:
    assert [(c.kind, c.axes, c.shape) for c in wrong] == [("all-gather", ("sp",), (BATCH, S, 64))]
print("hidden values 'b s/sp m':", ", ".join(c.kind for c in right) or "nothing is sent")
print(
    "hidden values 'b s m':   ",
    ", ".join(f"{c.kind} over {c.axes[0]}, {c.bytes_sent:,} B" for c in wrong) or "nothing is sent",
)

# %% [markdown]
# ## What is left to hold
#
# With no scores kept, the widest values of a block are those inside its feed-forward: `b s m`, three of them, in every layer. A
# feed-forward looks at one position at a time, so it can take the positions in pieces, and compute its hidden values again in the
# backward pass instead of keeping them (Liu and Abbeel 2023). Nothing is sent for it: gathers and sums stand before and after. Compiled
# here: one device's share of a step, in one piece and in eight.

# %%
share, wide = 1024, dataclasses.replace(LLAMA, ffn_width=8 * LLAMA.width)
temporaries = {}
for pieces in (1, 8):
    program = (
        Step(wide, Plan("dp=1", ffn_chunks=pieces, loss_chunks=8), make_mesh("dp=1"), optax.sgd(0.5))
        .lower(1, share)
        .compile()
    )
    temporaries[pieces] = compiled_memory(program)["temp_bytes"]
    print(f"{pieces} piece{'s' * (pieces > 1)}: {temporaries[pieces] / 2**20:.1f} MiB of temporaries")
hidden_bytes = 4 * share * wide.ffn_width
if devices[0].platform == "cpu":
    assert temporaries[1] - temporaries[8] > 3 * hidden_bytes
print(f"one array of hidden values has {hidden_bytes / 2**20:.1f} MiB")

# %% [markdown]
# ## When tokens come one at a time
#
# Generating has one query per layer, and the keys of everything before it: a cache. Cut its positions over `sp` too, `b t/sp k h`. To
# rotate it for every token would be absurd. The query goes to all ranks, which costs nothing (they all computed it); each looks at its
# own share, and the partial results merge in two small sums.

# %%
POSITIONS = 4096
weights = llamas["ring"][3].params
decoder = Decoder(LLAMA, Plan(f"sp={SP}", zero=0), make_mesh(f"sp={SP}"), weights, 1, POSITIONS)
token = np.zeros((1, 1), np.int32)
jaxpr = decoder.run.trace(decoder.params, decoder.cache, token, np.int32(0)).jaxpr
sent = census_table(census_jaxpr(jaxpr, {"sp": SP}))
share = {shard.data.nbytes for shard in decoder.cache[0].addressable_shards}
assert share == {4 * LLAMA.num_layers * POSITIONS // SP * LLAMA.num_kv_heads * LLAMA.head_width}
if SP > 1:
    # The largest score; the weighted values and their weight.
    small = 4 * LLAMA.num_heads * (1 + LLAMA.head_width + 1)
    assert set(sent) == {("sp", "all-reduce")}
    assert sent["sp", "all-reduce"]["bytes_sent"] == LLAMA.num_layers * 2 * small * (SP - 1) // SP
    turned = 2 * share.pop() * (SP - 1)
    print(
        f"a token sends {sent['sp', 'all-reduce']['bytes_sent']:,} B; turning the cache around a ring would"
        f" send {turned:,} B"
    )

# %% [markdown]
# ## Five lines
#
# 1. Attention to parts of the keys merges exactly: keep the output and the log of the sum of exponentials.
# 2. A ring needs N − 1 hops of K and V, twice in a training step, and the gradients of K and V follow: 3 · (N − 1) permutes.
# 3. In order, the busiest rank has 2 − 1/N times the mean; in zigzag everybody has the same, for a permutation of the data.
# 4. Only KV heads travel. A hop hides behind a block of C/β · k/n positions, twice that under a causal mask.
# 5. Forward, Ulysses sends less from N > 1 + n/k on; in a training step from half of that on, since the ring's gradients
#    travel in float32. N must divide the KV heads. The ring has no such limit, and can hide.
#
# ## On your cluster
#
# ```
# llmpar train --mesh "sp=8" --sequence-order zigzag --seq-len 32768 --batch-size 1        a ring over 8 devices
# llmpar train --mesh "fsdp=2 sp=4" --context-parallel ulysses --seq-len 32768             heads for positions, and ZeRO-3 beside it
# llmpar inspect --mesh "sp=8" --seq-len 32768 --dtype bfloat16                    hops, bytes and memory, before you train
# llmpar inspect --mesh "sp=8" --context-parallel gather --seq-len 32768                   the same for gathered keys
# llmpar train --mesh "sp=8" --seq-len 131072 --batch-size 1 --remat block --ffn-chunks 16 --loss-chunks 16
# ```
#
# On GPUs and TPUs all three run on a kernel of ours (`--attention-kernel auto` is `flash` there): it keeps no scores, takes documents and any
# order, and returns its log of sums in float32, which a ring needs to merge. Where a device sees whole sequences in contiguous order and
# each row is one document, `--attention-kernel cudnn --documents whole --dtype bfloat16` gives the work to cuDNN. Not in a ring: the
# public function returns its log of sums rounded to 16 bits, too coarse to merge by.
#
# `sp` wants fast links when blocks are short; with long ones it is content with slow ones, as the threshold says. It multiplies with
# every other axis, in generation too: `llmpar generate "def " --checkpoints FOLDER --mesh "sp=4 tp=2"`.
#
# **One number to remember: N − 1.** Twice the devices take twice the sequence, with the same memory on each.

# %%
print(f"{N} devices: {N - 1} hops, and a sequence {N} times as long as one device's")
