"""Attention: every way gives what the definition gives, moves what its docstring says, and skips what is
masked.

The oracle is plain numpy in float64, one query at a time. Tolerances: outputs 1e-5 (values are of order 1,
float32 rounds at 6e-8 and a row sums up to 64 terms in another order), gradients 1e-4 of the largest (a
second product, and weights recomputed from lse).
"""

import json
import math
from collections import Counter
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_mesh import in_a_fresh_process

from llmpar import attention, sequence_order
from llmpar.attention import decode, full, merge, ring
from llmpar.inspect.census import executed_flops
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.par import Solo
from llmpar.plan import Plan
from llmpar.predict.ring import pairs_by_step
from llmpar.sequence_order import Mask, sequence_permutation

CAUSAL, WINDOW = Mask(), Mask(window=10)
B, S, H = 2, 32, 4


def inputs(kv_heads=2, ratio=2, packed=False, s=S, seed=0):
    """q, k, v, positions and segments. Packed: positions start again with each document."""
    rng = np.random.default_rng(seed)
    q, k, v = (
        rng.standard_normal(x).astype(np.float32)
        for x in ((B, s, kv_heads, ratio, H), *[(B, s, kv_heads, H)] * 2)
    )
    positions, segments = np.tile(np.arange(s, dtype=np.int32), (B, 1)), None
    if packed:
        starts = np.array([[0, 5, 18, 19], [0, 1, 2, 29]])
        segments = (np.arange(s)[None, None] >= starts[..., None]).sum(1).astype(np.int32) - 1
        positions = positions - np.take_along_axis(starts, segments, 1).astype(np.int32)
    return q, k, v, positions, segments


def oracle(q, k, v, positions, segments, mask):
    """The definition, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, lse = np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)
    for b, i, g, r in np.ndindex(*q.shape[:4]):
        keys = []
        for j in range(k.shape[1]):
            gap = int(positions[b, i]) - int(positions[b, j])
            hidden = gap < 0 or (mask.window is not None and gap >= mask.window)
            if not hidden and (segments is None or segments[b, i] == segments[b, j]):
                keys.append(j)
        if keys:
            exps = np.exp(k[b, keys, g] @ q[b, i, g, r] / np.sqrt(q.shape[-1]))
            out[b, i, g, r], lse[b, i, g, r] = exps @ v[b, keys, g] / exps.sum(), np.log(exps.sum())
    return out, lse


def ids_of(positions, segments):
    return {
        "q_positions_bs": positions,
        "k_positions_bt": positions,
        "q_segments_bs": segments,
        "k_segments_bt": segments,
    }


def results(attend, q, k, v):
    """(out, lse) and the gradients of a fixed random functional of both."""
    rng = np.random.default_rng(1)
    weight, lse_weight = (
        rng.standard_normal(q.shape).astype(np.float32),
        rng.standard_normal(q.shape[:-1]).astype(np.float32),
    )

    def loss(q, k, v):
        out, lse = attend(q, k, v)
        lse_term = jnp.where(jnp.isfinite(lse), lse, 0) * lse_weight
        return (out.astype(jnp.float32) * weight).sum() + lse_term.sum(), (out, lse)

    grads, partial_softmax = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*map(jnp.asarray, (q, k, v)))
    return *partial_softmax, *grads


def agree(found, expected):
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.array_equal(np.isfinite(a), np.isfinite(b)), name
        a, b = np.where(np.isfinite(a), a, 0), np.where(np.isfinite(b), b, 0)
        bound = 1e-4 * np.abs(b).max() if name.startswith("d") else 1e-5
        assert np.abs(a - b).max() <= bound, (
            f"{name} is off by {np.abs(a - b).max():.1e}, allowed {bound:.1e}"
        )


def mesh_of(**axes):
    names, sizes = tuple(axes), tuple(axes.values())
    return jax.make_mesh(
        sizes, names, axis_types=(AxisType.Auto,) * len(axes), devices=jax.devices()[: int(np.prod(sizes))]
    )


def sharded(attend, mesh, permutation, positions, segments, mask, axes=None, **options):
    """`attend` inside shard_map, laid out by the permutation, as a function of whole sequences in plain
    order.

    All axes cut positions, unless `axes` are said to: then the others cut KV heads.
    """
    heads = tuple(a for a in mesh.axis_names if axes and a not in axes)
    ids, cut = P(None, axes or mesh.axis_names), P(None, axes or mesh.axis_names, heads or None)

    def local(q, k, v, positions, segments):
        return attend(q, k, v, mask=mask, **ids_of(positions, segments), **options)

    inner = jax.shard_map(local, mesh=mesh, in_specs=(cut,) * 3 + (ids,) * 2, out_specs=cut)
    laid = lambda x: None if x is None else x[:, np.array(permutation)]
    back = np.argsort(permutation)

    def whole(q, k, v):
        return tuple(x[:, back] for x in inner(*map(laid, (q, k, v, positions, segments))))

    return whole


@lru_cache
def reference(mask, kv_heads=2, ratio=2, packed=False):
    """What `full` gives for the inputs of that name."""
    q, k, v, positions, segments = inputs(kv_heads, ratio, packed)
    return results(lambda q, k, v: full(q, k, v, mask=mask, **ids_of(positions, segments)), q, k, v)


# ------------------------------------------------------------------------------------------------- one device


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", [CAUSAL, WINDOW], ids=str)
def test_full_matches_the_definition(mask, packed):
    q, k, v, *where = inputs(packed=packed)
    agree(
        full(q=jnp.asarray(q), k=jnp.asarray(k), v=jnp.asarray(v), mask=mask, **ids_of(*where)) + (0,) * 3,
        oracle(q, k, v, *where, mask) + (0,) * 3,
    )


def test_gradients_of_full_match_finite_differences_of_the_definition():
    q, k, v, *where = inputs(packed=True)
    rng = np.random.default_rng(1)  # the functional of `results`
    weight, lse_weight = (
        rng.standard_normal(q.shape).astype(np.float32),
        rng.standard_normal(q.shape[:-1]).astype(np.float32),
    )

    def loss(q, k, v):
        out, lse = oracle(q, k, v, *where, WINDOW)
        return (out * weight).sum() + (lse * lse_weight).sum()

    _, _, *grads = reference(WINDOW, packed=True)
    for i, grad in enumerate(grads):
        direction = np.random.default_rng(2 + i).standard_normal(grad.shape)
        step = lambda eps: [
            x + eps * direction if i == j else x.astype(np.float64)  # noqa: B023
            for j, x in enumerate((q, k, v))
        ]
        slope = (loss(*step(1e-5)) - loss(*step(-1e-5))) / 2e-5
        # central differences: error 1e-10 from the step, 1e-10 from rounding; float32 gradients dominate
        assert np.vdot(grad, direction) == pytest.approx(slope, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize(
    ("block", "contiguous", "mask", "packed", "ratio"),
    [
        (1, False, CAUSAL, False, 1),
        (8, False, CAUSAL, True, 4),
        (8, False, WINDOW, False, 1),
        (S, False, WINDOW, True, 1),
        (None, False, CAUSAL, False, 4),
        (8, True, CAUSAL, False, 4),
        (8, True, WINDOW, True, 1),
        (S, True, CAUSAL, True, 1),
        (2, True, CAUSAL, True, 2),
    ],
)
def test_blocks_match_full(block, contiguous, mask, packed, ratio):
    q, k, v, *where = inputs(ratio=ratio, packed=packed)
    attend = partial(ring, block=block, contiguous=contiguous, mask=mask, **ids_of(*where))
    agree(results(attend, q, k, v), reference(mask, ratio=ratio, packed=packed))


@pytest.mark.parametrize(
    ("contiguous", "mask", "packed", "ratio"),
    [(True, CAUSAL, True, 4), (False, CAUSAL, False, 1), (True, WINDOW, True, 1), (False, WINDOW, True, 2)],
)
def test_a_kernel_matches_full(contiguous, mask, packed, ratio):
    q, k, v, *where = inputs(ratio=ratio, packed=packed)
    run = partial(attention.by_kernel, kernel="xla", contiguous=contiguous, mask=mask, **ids_of(*where))

    @partial(jax.jit, static_argnums=0)
    def out_and_grads(attend, *args):
        out, pull = jax.vjp(lambda *args: attend(*args)[0], *args)
        return out, *pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    attends = run, partial(full, mask=mask, **ids_of(*where))
    (out, *grads), (want, *expected) = (out_and_grads(attend, q, k, v) for attend in attends)
    agree((out, 0, *grads), (want, 0, *expected))


ROWS = {  # positions and segments of a row of 8
    "in order": ([0, 1, 2, 3, 4, 5, 6, 7], [1] * 8),
    "with gaps": ([0, 1, 5, 6, 20, 21, 22, 30], [1] * 8),
    "packed": ([0, 1, 2, 3, 4, 5, 6, 7], [1, 1, 1, 2, 2, 2, 2, 3]),
    "again in each": ([0, 1, 2, 0, 1, 2, 3, 0], [1, 1, 1, 2, 2, 2, 2, 3]),
    "segments fall": ([0, 1, 2, 3, 4, 5, 6, 7], [3, 3, 3, 1, 1, 1, 1, 2]),
    "backwards": ([7, 6, 5, 4, 3, 2, 1, 0], [1] * 8),
    "twice": ([0, 0, 1, 1, 2, 2, 3, 3], [1] * 8),
    "a zigzag": ([0, 1, 6, 7, 2, 3, 4, 5], [1] * 8),
    "falls in one": ([0, 1, 2, 0, 1, 0, 3, 0], [1, 1, 1, 2, 2, 2, 2, 3]),
    "a segment twice": ([5, 6, 7, 0, 1, 2, 3, 4], [1, 1, 1, 2, 2, 2, 1, 1]),
}
TRUSTED = {"in order", "with gaps", "packed", "again in each", "segments fall"}
TRUSTED_WHOLE = {"in order", "with gaps"}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("how", ["portable", "xla", "xla, whole", "flash"])
def test_what_attention_trusts_is_asked_and_what_it_must_not_take_is_wrong(how, window):
    """A row that is as promised gives what `full` gives; of the others some would not, and the kernel of
    intervals, which trusts nothing, takes all."""
    kernel, _, whole = how.partition(", ")
    plan = Plan(attention_kernel=kernel, documents=whole or "packed").resolve(platform="cpu")
    at, of = (np.array([row[i] for row in ROWS.values()], np.int32) for i in (0, 1))
    rng, mask, par = np.random.default_rng(0), Mask(window), Solo(plan)
    q, k, v = (
        jnp.asarray(rng.standard_normal((len(at), 8, *heads, 8)), jnp.float32)
        for heads in ((2, 2), (2,), (2,))
    )
    kept = attention.as_promised(par, mask, jnp.asarray(at), jnp.asarray(of))
    out = attention.choose(par, mask)(q, k, v, at, of, at, of)
    error = np.abs(np.asarray(out - full(q, k, v, mask=mask, **ids_of(at, of))[0])).max((1, 2, 3, 4))
    trusted = TRUSTED_WHOLE - ({"with gaps"} if window else set()) if whole else TRUSTED
    trusted = set(ROWS) if kernel == "flash" else trusted
    assert {name for name, right in zip(ROWS, kept, strict=True) if right} == trusted
    assert error[np.asarray(kept)].max() <= 1e-5
    assert kernel == "flash" or error[~np.asarray(kept)].max() > 0.1


def test_a_row_that_sees_no_key_gives_zero_and_finite_gradients():
    q, k, v, positions, _ = inputs()
    ids = ids_of(positions, np.ones((1, S), np.int32)) | {
        "q_segments_bs": (np.arange(S) % 8 > 0).astype(np.int32)[None]
    }
    for attend in (partial(full, **ids), partial(ring, block=4, **ids), partial(ring, platform="cpu", **ids)):
        out, lse, *grads = results(attend, q, k, v)
        assert (np.asarray(out)[:, ::8] == 0).all()
        assert (np.asarray(lse)[:, ::8] == -np.inf).all()
        assert all(np.isfinite(grad).all() for grad in grads)
        assert (np.asarray(grads[0])[:, ::8] == 0).all()


def test_merge_is_the_softmax_over_both_parts():
    q, k, v, positions, _ = inputs()
    q, k, v = map(jnp.asarray, (q, k, v))
    half = lambda keys: full(
        q, k[:, keys], v[:, keys], q_positions_bs=positions, k_positions_bt=positions[:, keys]
    )
    # the first queries see nothing of the second half: lse -inf
    a, b = half(slice(0, 16)), half(slice(16, S))
    for pair in ((a, b), (b, a)):
        agree(merge(*pair[0], *pair[1]) + (0,) * 3, oracle(q, k, v, positions, None, CAUSAL) + (0,) * 3)
    grad = jax.grad(
        lambda lse: (
            merge(a[0], lse, *b)[0].sum() + jnp.where(jnp.isfinite(lse), merge(a[0], lse, *b)[1], 0).sum()
        )
    )
    assert np.isfinite(grad(jnp.full_like(a[1], -jnp.inf))).all()


def bfloat16_agrees(attend, where):
    """Against `full` in float32, of the same rounded inputs."""
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs(ratio=4)[:3])
    out, lse, *grads = results(attend, q, k, v)
    expected = results(partial(full, **ids_of(*where)), *(np.asarray(x, np.float32) for x in (q, k, v)))
    assert {x.dtype.name for x in (out, *grads)} == {"bfloat16"}
    assert lse.dtype == jnp.float32
    for found, right in zip((out, *grads), (expected[0], *expected[2:]), strict=True):
        # weights, score gradients, out and the result are each rounded once to 8 bits (2^-9 relative); sums
        # are not
        assert np.abs(np.asarray(found, np.float32) - right).max() <= 4 * 2**-9 * np.abs(right).max()


def test_bfloat16_keeps_its_dtype_and_accumulates_in_float32():
    *_, positions, segments = inputs()
    where = positions, segments
    bfloat16_agrees(partial(ring, block=8, **ids_of(*where)), where)
    bfloat16_agrees(sharded(RING, mesh_of(sp=4), sequence_permutation("zigzag", S, 4), *where, CAUSAL), where)


# --------------------------------------------------------------------------------------- over several devices

RING = partial(ring, axis="sp")


@pytest.mark.parametrize(
    ("n", "layout", "mask", "packed", "kv_heads", "ratio", "block"),
    [
        (2, "zigzag", CAUSAL, False, 2, 4, None),
        (2, "contiguous", WINDOW, True, 2, 1, 16),
        (4, "zigzag", CAUSAL, True, 2, 1, 2),
        (4, "striped", WINDOW, False, 1, 4, None),
        (4, "contiguous", CAUSAL, False, 2, 8, 1),
        (4, "zigzag", WINDOW, True, 2, 4, None),
        (8, "striped", CAUSAL, True, 2, 1, None),
        (2, "zigzag", CAUSAL, True, 2, 4, "kernel"),
        (4, "striped", WINDOW, True, 1, 2, "kernel"),
        (8, "contiguous", CAUSAL, False, 1, 1, "kernel"),
    ],
    ids=str,
)
def test_a_ring_matches_full(n, layout, mask, packed, kv_heads, ratio, block):
    q, k, v, *where = inputs(kv_heads, ratio, packed)
    options = {"platform": "cpu"} if block == "kernel" else {"block": block}  # the kernel is interpreted
    attend = sharded(RING, mesh_of(sp=n), sequence_permutation(layout, S, n), *where, mask, **options)
    agree(results(attend, q, k, v), reference(mask, kv_heads, ratio, packed))


EVERY = [
    (sp, tp, mask, packed, ratio)
    for sp in (2, 4, 8)
    for tp in ((1, 2) if sp < 8 else (1,))
    for mask in (CAUSAL, WINDOW)
    for packed in (False, True)
    for ratio in (1, 4, 8)
]


@pytest.mark.full
@pytest.mark.parametrize(("sp", "tp", "mask", "packed", "ratio"), EVERY, ids=str)
def test_a_ring_with_everything_matches_full(sp, tp, mask, packed, ratio):
    """Heads cut by tp where it is there and positions by sp, in zigzag."""
    q, k, v, *where = inputs(2, ratio, packed)
    mesh, zigzag = mesh_of(tp=tp, sp=sp), sequence_permutation("zigzag", S, sp)
    attend = sharded(RING, mesh, zigzag, *where, mask, axes="sp")
    agree(results(attend, q, k, v), reference(mask, 2, ratio, packed))


def test_blockwise_over_contiguous_positions_writes_only_the_triangle():
    q, k, v, *where = inputs()
    attend = partial(ring, block=8, contiguous=True, **ids_of(*where))
    assert str(jax.make_jaxpr(attend)(q, k, v)).count("cond[") == 4 * 5 // 2


def test_ring_matches_full_when_heads_are_cut_and_keys_are_shared_by_another_axis():
    """K and V are alike over tp, q is not: their gradient's sum over tp is written by the varying check."""
    q, k, v, positions, _ = inputs(kv_heads=1, ratio=4)
    mesh, kv, heads = mesh_of(sp=4, tp=2), P(None, "sp"), P(None, "sp", None, "tp")

    def local(q, k, v, positions):
        return ring(q, k, v, axis="sp", **ids_of(positions, None))

    attend = jax.shard_map(local, mesh=mesh, in_specs=(heads, kv, kv, kv), out_specs=heads)
    agree(results(lambda q, k, v: attend(q, k, v, positions), q, k, v), reference(CAUSAL, 1, 4))


def test_the_two_rings_of_a_step_do_not_run_side_by_side():
    """With a linear loss the backward ring needs nothing of the forward one, and simulated devices mixed up
    their hops.

    Before `_after` tied them, half of such runs were wrong.
    """
    q, k, v, positions, _ = inputs(ratio=8)
    attend = sharded(RING, mesh_of(sp=4), np.arange(S), positions, None, CAUSAL, block=1)
    step = jax.jit(
        jax.grad(lambda q, k, v: (attend(q, k, v)[0].sum(), attend(q, k, v)), (0, 1, 2), has_aux=True)
    )
    first = jax.device_get(step(q, k, v))
    assert np.abs(first[1][0] - oracle(q, k, v, positions, None, CAUSAL)[0]).max() <= 1e-5
    for _ in range(7):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(step(q, k, v)), first)


def fault_ids_stay(monkeypatch):
    monkeypatch.setattr(attention, "_owner", lambda options, hops: jax.lax.axis_index(options.axis))


def fault_average(monkeypatch):
    monkeypatch.setattr(attention, "merge", lambda a, x, b, y: ((a + b) / 2, jnp.logaddexp(x, y)))


def fault_gradients_do_not_come_home(monkeypatch):
    """Of two ranks: keys go once forward, once backward, and then their gradients go."""
    hop, calls = attention._hop, []
    stays = lambda axis, x: x if len(calls) == 3 else hop(axis, x)
    monkeypatch.setattr(attention, "_hop", lambda axis, x: calls.append(x) or stays(axis, x))


def fault_lse_gradient_dropped(monkeypatch):
    attend_grad = attention.attend_tile_grad
    without = lambda q, out_grad, lse, delta, *key: attend_grad(q, out_grad, lse, delta * 0, *key)
    monkeypatch.setattr(attention, "attend_tile_grad", without)


def fault_live_block_skipped(monkeypatch):
    monkeypatch.setattr(attention, "seen_tiles", lambda *args: sequence_order.seen_tiles(*args)[::-1])


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (fault_ids_stay, "out"),
        (fault_average, "out"),
        (fault_gradients_do_not_come_home, "dk"),
        (fault_lse_gradient_dropped, "dq"),
        (fault_live_block_skipped, "out"),
    ],
)
def test_planted_faults_are_caught(fault, what, monkeypatch):
    fault(monkeypatch)
    q, k, v, *where = inputs()
    attend = sharded(RING, mesh_of(sp=2), sequence_permutation("zigzag", S, 2), *where, CAUSAL)
    with pytest.raises(AssertionError, match=what):
        agree(results(attend, q, k, v), reference(CAUSAL))


@pytest.mark.parametrize("packed", [False, True])
def test_decode_matches_full_and_leaves_the_cache_where_it_is(packed):
    q, k, v, positions, segments = inputs(ratio=4, packed=packed)
    now, ids = slice(20, 21), ids_of(positions, segments)
    segments = jnp.zeros((B, S), jnp.int32) if segments is None else segments
    expected, _ = oracle(q, k, v, positions, segments, WINDOW)
    # later slots hold rubbish from an older request
    unwritten = np.where(np.arange(S) > 20, np.int32(2**30), positions)
    cache = P(None, "sp")

    def local(q, k, v, at, where, one, segments):
        ids = dict(q_positions_bs=at, k_positions_bt=where, q_segments_bs=one, k_segments_bt=segments)
        return decode(q, k, v, axis="sp", mask=WINDOW, **ids)

    specs = (P(), cache, cache, P(), cache, P(), cache)
    step = jax.shard_map(local, mesh=mesh_of(sp=4), in_specs=specs, out_specs=P())
    args = q[:, now], k, v, ids["q_positions_bs"][:, now], unwritten, segments[:, now], segments
    found = jax.jit(step)(*map(jnp.asarray, args))
    assert np.abs(np.asarray(found) - expected[:, now]).max() <= 1e-5
    heads = B * 1 * 2 * 4
    sums = {("all-reduce", "f32", heads): 1, ("all-reduce", "f32", heads * (H + 1)): 1}
    assert counted(step, 4, *args) == sums, "a maximum, and a sum of values and weights"


# ------------------------------------------------------------------------------------ what moves, what is run


def counted(f, n, *args):
    """Count (collective, dtype, elements of its result) over n ranks of sp."""
    counts = Counter()
    for c in census_jaxpr(jax.make_jaxpr(f)(*args).jaxpr, {"sp": n}):
        counts[c.kind, c.dtype, math.prod(c.shape)] += c.count
    return counts


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_ring_hops_are_n_minus_1_each_way(n, dtype):
    s = 2 * n * 4
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(x).astype(dtype) for x in ((1, s, 2, 4, H), (1, s, 2, H), (1, s, 2, H)))
    positions = np.arange(s, dtype=np.int32)[None]
    attend = sharded(RING, mesh_of(sp=n), sequence_permutation("zigzag", s, n), positions, None, CAUSAL)
    loss = lambda q, k, v: attend(q, k, v)[0].astype(jnp.float32).sum()
    local = s // n
    hops = lambda kind: Counter({("collective-permute", kind, 2 * local * 2 * H): n - 1})
    keys, ids = hops({"bfloat16": "bf16", "float32": "f32"}[dtype]), Counter({("all-gather", "s32", s): 1})
    assert counted(loss, n, q, k, v) == keys + ids
    assert counted(jax.grad(loss, (0, 1, 2)), n, q, k, v) == keys + keys + hops("f32") + ids, "ids are known"


def blocks_run(monkeypatch, attend, q, k, v):
    """Run output and gradients; count the blocks that each rank of sp computes: (name, rank) -> blocks."""
    ran = Counter()
    for name in ("attend_tile", "attend_tile_grad"):
        compute = getattr(attention, name)

        def counting(*args, name=name, compute=compute):
            jax.debug.callback(lambda rank: ran.update([(name, int(rank))]), jax.lax.axis_index("sp"))
            return compute(*args)

        monkeypatch.setattr(attention, name, counting)
    jax.block_until_ready(results(attend, q, k, v))
    jax.effects_barrier()
    monkeypatch.undo()
    return ran


@pytest.mark.parametrize("mask", [CAUSAL, Mask(window=4)], ids=str)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_masked_blocks_are_not_executed(layout, mask, monkeypatch):
    """Count the blocks that each rank computes while it runs, and compare with what pairs_by_step says."""
    n, block = 4, 4
    q, k, v, *where = inputs()
    attend = sharded(RING, mesh_of(sp=n), sequence_permutation(layout, S, n), *where, mask, block=block)
    ran = blocks_run(monkeypatch, attend, q, k, v)
    pairs = np.sum(pairs_by_step(n, layout, mask, s=S, block=block), 1) // block**2
    assert [ran["attend_tile", rank] for rank in range(n)] == pairs.tolist()
    assert [ran["attend_tile_grad", rank] for rank in range(n)] == pairs.tolist()
    assert pairs.sum() < n * (S // block) ** 2 / n * 0.6


def flops(f, *args):
    return executed_flops(jax.jit(f).lower(*args).compile().as_text())


def test_a_causal_zigzag_ring_executes_at_most_0_55_of_the_flops_of_full_attention(monkeypatch):
    """In 16 blocks over 8 ranks, the same on each: (16 + 1) / 2 / 16 = 0.53 of all pairs.

    The compiler's text gives the FLOPs of a program that takes every branch; they are all in the blocks, so
    what runs is the share of blocks that run. Forward it is held against `full`, whose gradients keep scores
    where a ring's recompute them: backward (5 products for 4) of the same pairs.
    """
    n, block = 8, S // 16
    q, k, v, positions, _ = inputs()
    program = lambda mask: sharded(
        RING, mesh_of(sp=n), sequence_permutation("zigzag", S, n), positions, None, mask, block=block
    )
    loss = lambda mask: lambda q, k, v: program(mask)(q, k, v)[0].sum()
    ran = blocks_run(monkeypatch, program(CAUSAL), q, k, v)
    every = (S // block) ** 2 // n  # pairs of blocks on one rank
    shares = {
        name: [ran[name, rank] / every for rank in range(n)] for name in ("attend_tile", "attend_tile_grad")
    }
    assert shares == dict.fromkeys(shares, [17 / 32] * n)
    forward = flops(program(CAUSAL), q, k, v)
    both = flops(jax.grad(loss(CAUSAL), (0, 1, 2)), q, k, v)
    whole = flops(lambda q, k, v: full(q, k, v, **ids_of(positions, None)), q, k, v)
    # with every branch taken: 2 products forward, 5 backward
    assert forward == whole / n and both == 7 * whole / 2 / n
    assert 17 / 32 * forward <= 0.55 * whole / n


MEMORY = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from llmpar import attention
from llmpar.mesh import make_mesh, use_devices
use_devices(64)

def temp_bytes(n, local):
    cut, s = P(None, "sp"), n * local
    ring = lambda q, k, v, at: attention.ring(q, k, v, axis="sp", q_positions_bs=at, k_positions_bt=at)[0]
    mesh = make_mesh(f"!sp={n}", jax.devices()[:n])
    attend = jax.shard_map(ring, mesh=mesh, in_specs=(cut,) * 4, out_specs=cut)
    given = [jax.ShapeDtypeStruct((1, s, *heads), jnp.float32) for heads in ((1, 2, 8), (1, 8), (1, 8))]
    given += [jax.ShapeDtypeStruct((1, s), jnp.int32)]
    step = jax.jit(jax.grad(lambda *args: attend(*args).sum(), (0, 1, 2)))
    return step.lower(*given).compile().memory_analysis().temp_size_in_bytes

"""


def test_temporary_memory_of_a_rank_depends_on_its_share_alone():
    """The compiler's figure for one device of up to 64; no array is made: a million positions are quick."""
    cases = [(n, 512) for n in (2, 5, 8)] + [(8, 4096), (8, 8192), (8, 16_384), (64, 16_384)]
    done = in_a_fresh_process(f"{MEMORY}print([temp_bytes(*case) for case in {cases}])")
    # Less the positions and segments of all ranks, which each of them knows.
    found = zip(cases, json.loads(done.stdout), strict=True)
    temp = {case: size - 8 * math.prod(case) for case, size in found}
    assert temp[2, 512] == pytest.approx(temp[8, 512], rel=0.1)
    assert temp[5, 512] == temp[8, 512]  # from 5 ranks on every loop is a loop
    short, middle, long = (temp[8, local] for local in (4096, 8192, 16_384))
    assert long - middle == pytest.approx(2 * (middle - short), rel=0.01)  # linear in a rank's positions
    assert long <= 4 * short
    # A million positions over 64 ranks: 16,384 each, too; at most one more copy of all that they know.
    assert long <= temp[64, 16_384] <= long + 8 * 2**20


# ----------------------------------------------------------------------------------------------------- orders


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_orders_are_permutations_and_argsort_undoes_them(name, n):
    laid = np.array(sequence_permutation(name, 16, n))
    assert (laid[np.argsort(laid)] == np.arange(16)).all()
    assert sorted(laid) == list(range(16))


def test_orders_as_written():
    assert sequence_permutation("zigzag", 8, 2) == [0, 1, 6, 7, 2, 3, 4, 5]
    assert sequence_permutation("striped", 8, 2) == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize("mask", [CAUSAL, WINDOW], ids=str)
@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_live_blocks_count_the_pairs_that_are_seen(name, mask):
    laid = np.reshape(sequence_permutation(name, S, 4), (4, -1))
    gap = laid[:, :, None, None] - laid
    seen = gap >= 0
    if mask.window:
        seen &= gap < mask.window
    assert (mask.admits(gap, gap) == seen).all()
    pairs = pairs_by_step(4, name, mask, s=S)
    for rank, step in np.ndindex(4, 4):
        assert pairs[rank][step] == seen[rank, :, (rank - step) % 4].sum()


@pytest.mark.parametrize("n", [2, 4, 8])
def test_zigzag_balances_what_contiguous_does_not(n):
    chunk = 16
    work = np.sum(pairs_by_step(n, "contiguous", s=n * chunk), 1)
    # 2 - 1/n for long chunks
    assert work.max() / work.mean() == pytest.approx(2 - (chunk + 1) / (n * chunk + 1))
    zigzag = np.array(pairs_by_step(n, "zigzag", s=n * chunk))
    assert (zigzag == zigzag[0]).all()
    assert zigzag.sum() == work.sum()
    assert np.ptp(np.max(pairs_by_step(n, "striped", s=n * chunk), 0)) <= chunk


def test_the_busiest_rank_of_a_zigzag_ring_does_half_the_work():
    """Summed over the steps of a lockstep ring of 8, in whole tiles of half a chunk, as run."""
    makespan = lambda name, block: np.max(pairs_by_step(8, name, s=128, block=block), 0).sum()
    assert makespan("zigzag", 8) <= 0.55 * makespan("contiguous", 16)


# --------------------------------------------------------------------------------------------------- refusals


def test_refusals_say_what_would_work():
    q, k, v, positions, _ = inputs(kv_heads=2)
    ids = ids_of(positions, None)
    with pytest.raises(ValueError, match="cuts 12 positions into 8 parts for 4 ranks; use a multiple of 8"):
        sequence_permutation("zigzag", 12, 4)
    with pytest.raises(ValueError, match="'zig' is not known; use contiguous"):
        sequence_permutation("zig", 12, 4)
    with pytest.raises(
        ValueError, match="block=12 does not divide the 32 positions held here; use a divisor"
    ):
        ring(*map(jnp.asarray, (q, k, v)), block=12, **ids)
    with pytest.raises(ValueError, match="only one of queries and keys"):
        full(*map(jnp.asarray, (q, k, v)), **ids | {"q_segments_bs": jnp.zeros((B, S), jnp.int32)})
