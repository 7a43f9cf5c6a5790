"""Attention gives what the definition gives (NumPy in float64), moves what it says, and skips what is masked.

Outputs to 1e-5, gradients to 1e-4 of the largest: sums in another order, weights recomputed from lse."""

import itertools
import math
from collections import Counter
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from shared import TABLES

from llmpar.inspect.census import executed_flops
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.model import attention
from llmpar.model.attention import Ids, flash_attention, full, merge, ring_attention
from llmpar.parallel.modes import Solo
from llmpar.plan.plan import Plan
from llmpar.plan.sequence_order import Mask, ring_hops, sequence_permutation
from llmpar.predict.ring import pairs_by_step

CAUSAL, WINDOW = Mask(), Mask(window=10)
B, S, H = 2, 32, 4


def inputs(kv_heads=2, ratio=2, packed=False, s=S):
    """(q, k, v) and ids. Packed: positions start again with each document."""
    rng = np.random.default_rng(0)
    shapes = (B, s, kv_heads, ratio, H), *[(B, s, kv_heads, H)] * 2
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    positions, segments = np.tile(np.arange(s, dtype=np.int32), (B, 1)), np.zeros((B, s), np.int32)
    if packed:
        starts = np.array([[0, 5, 18, 19], [0, 1, 2, 29]])
        segments = (np.arange(s)[None, None] >= starts[..., None]).sum(1).astype(np.int32) - 1
        positions = positions - np.take_along_axis(starts, segments, 1).astype(np.int32)
    return (q, k, v), ids_of(positions, segments)


def ids_of(positions, segments):
    return Ids(positions, segments, positions, segments)


def functional(q):
    """The weights of a fixed random functional of (out, lse)."""
    rng = np.random.default_rng(1)
    return [rng.standard_normal(shape).astype(np.float32) for shape in (q.shape, q.shape[:-1])]


def oracle(qkv, ids, mask=CAUSAL, of_lse=True):
    """The definition, in float64: (out, lse), and the functional's gradients by the rules of calculus."""
    q, k, v, out_grad, lse_grad = (np.asarray(x, np.float64) for x in (*qkv, *functional(qkv[0])))
    gap = ids.q_positions[:, :, None] - ids.k_positions[:, None]
    seen = (gap >= 0) & (gap < (mask.window or np.inf))
    seen &= ids.q_segments[:, :, None] == ids.k_segments[:, None]
    scale, some = q.shape[-1] ** -0.5, seen.any(-1)[:, :, None, None]
    exps = np.exp(np.einsum("bskrh,btkh->bskrt", q, k) * scale) * seen[:, :, None, None]
    total = exps.sum(-1) + ~some
    weights = exps / total[..., None]
    out = np.einsum("bskrt,btkh->bskrh", weights, v)
    scores_grad = np.einsum("bskrh,btkh->bskrt", out_grad, v) + lse_grad[..., None] * of_lse
    scores_grad = weights * (scores_grad - (out_grad * out).sum(-1, keepdims=True)) * scale
    dq, dk = np.einsum("bskrt,btkh->bskrh", scores_grad, k), np.einsum("bskrt,bskrh->btkh", scores_grad, q)
    dv = np.einsum("bskrt,bskrh->btkh", weights, out_grad)
    return out, np.where(some, np.log(total), -np.inf), dq, dk, dv


AT = P(None, "sp")


def of_all(ids):
    gather = lambda x: jax.lax.all_gather(x, "sp", axis=1, tiled=True)
    return Ids(*ids[:2], *map(gather, ids[2:]))


def on_ranks(attend, n=1, **options):
    if n == 1:
        return lambda q, k, v, ids: attend(q, k, v, ids, **options)
    local = lambda q, k, v, ids: attend(q, k, v, of_all(ids), **options)
    mesh = jax.make_mesh((n,), ("sp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])
    return jax.shard_map(local, mesh=mesh, in_specs=(AT, AT, AT, AT), out_specs=AT)


@lru_cache(None)
def program(attend, *ranks, grads=True, **options):
    """A program of (out, lse) and the functional's gradients; inputs are data."""
    run = on_ranks(attend, *ranks, **options)

    def loss(qkv, ids, out_grad, lse_grad):
        out, lse = run(*qkv, ids)
        lse = jnp.zeros(lse_grad.shape) if lse is None else lse
        lse_term = jnp.where(jnp.isfinite(lse), lse, 0) * lse_grad
        return (out.astype(jnp.float32) * out_grad).sum() + lse_term.sum(), (out, lse)

    if not grads:
        return jax.jit(lambda *given: ((), loss(*given)[1]))
    return jax.jit(jax.grad(loss, has_aux=True))


def results(run, qkv, ids, order=None):
    """(out, lse) and gradients of a program, in plain order."""
    lay = lambda tree: tree if order is None else jax.tree.map(lambda x: np.asarray(x)[:, order], tree)
    grads, partial_softmax = jax.device_get(run(*map(lay, (qkv, ids, *functional(qkv[0])))))
    order = None if order is None else np.argsort(order)
    return lay((*partial_softmax, *grads))


def agree(found, expected, least=0.0):
    """Gradients to 1e-4 of their largest element, or of ``least``: of those of one key all are rounding."""
    names = ("out", "lse", "dq", "dk", "dv")[: len(found)]
    for name, a, b in zip(names, found, expected, strict=False):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.array_equal(np.isfinite(a), np.isfinite(b)), name
        a, b = np.where(np.isfinite(a), a, 0), np.where(np.isfinite(b), b, 0)
        bound = 1e-4 * max(np.abs(b).max(), least) if name.startswith("d") else 1e-5
        assert np.abs(a - b).max() <= bound, f"{name} is off by {np.abs(a - b).max():.1e}"


ON_ONE = [
    (full, 2, dict(mask=WINDOW)),
    (ring_attention, 1, dict(tile=1, in_order=False, mask=CAUSAL)),
    (ring_attention, 4, dict(tile=8, in_order=False, mask=WINDOW)),
    (ring_attention, 2, dict(tile=2, in_order=True, mask=CAUSAL)),
]


@pytest.mark.parametrize(("attend", "ratio", "options"), ON_ONE, ids=lambda x: getattr(x, "__name__", str(x)))
def test_blocks_and_gradients_are_those_of_the_definition(attend, ratio, options):
    run = program(attend, **options)
    for packed in (False, True):
        data = inputs(ratio=ratio, packed=packed)
        agree(results(run, *data), oracle(*data, options["mask"]))


ROWS = TABLES["rows_of_8"]
TRUSTED = {"in order", "with gaps", "packed", "again in each", "segments fall"}
TRUSTED_WHOLE = {"in order", "with gaps"}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("how", ["portable", "xla", "xla, whole", "flash"])
def test_what_attention_trusts_is_asked_and_what_it_must_not_take_is_wrong(how, window):
    """A row as promised gives what `full` gives; the kernel of intervals, which trusts nothing, takes all."""
    kernel, _, whole = how.partition(", ")
    plan = Plan(attention_kernel=kernel, documents=whole or "packed").resolve(devices="cpu")
    at, of = (np.array([row[i] for row in ROWS.values()], np.int32) for i in (0, 1))
    rng, mask, par = np.random.default_rng(0), Mask(window), Solo(plan)
    draw = lambda *heads: rng.standard_normal((len(at), 8, *heads, 8)).astype(np.float32)
    q, k, v = draw(2, 2), draw(2), draw(2)
    attend = partial(attention.attend_by_plan, par, mask)
    run = lambda at, of, *qkv: (attention.ids_are_valid(par, mask, at, of), attend(*qkv, ids_of(at, of)))
    kept, out = map(np.asarray, jax.jit(run)(at, of, q, k, v))
    error = np.abs(out - oracle((q, k, v), ids_of(at, of), mask)[0]).max((1, 2, 3, 4))
    trusted = TRUSTED_WHOLE - ({"with gaps"} if window else set()) if whole else TRUSTED
    trusted = set(ROWS) if kernel == "flash" else trusted
    assert {name for name, right in zip(ROWS, kept, strict=True) if right} == trusted
    assert error[kept].max() <= 1e-5
    assert kernel == "flash" or error[~kept].max() > 0.1


def test_a_row_that_sees_no_key_gives_zero_and_finite_gradients():
    qkv, ids = inputs()
    ids = ids._replace(q_segments=np.tile((np.arange(S) % 8 == 0).astype(np.int32), (B, 1)))
    tiles = program(ring_attention, tile=None, in_order=False, mask=CAUSAL)
    for run in (tiles, program(flash_attention, platform="cpu")):
        out, lse, dq, *_ = found = results(run, qkv, ids)
        agree(found, oracle(qkv, ids))
        assert (out[:, ::8] == 0).all() and (lse[:, ::8] == -np.inf).all() and (dq[:, ::8] == 0).all()


def test_merge_is_the_softmax_over_both_parts():
    qkv, ids = inputs()
    # the first queries see nothing of the second half: lse -inf
    a, b = (
        [jnp.asarray(x, jnp.float32) for x in oracle((qkv[0], qkv[1][:, at], qkv[2][:, at]), half)[:2]]
        for at in (slice(0, 16), slice(16, S))
        for half in [Ids(*ids[:2], *(x[:, at] for x in ids[2:]))]
    )
    for pair in ((a, b), (b, a)):
        agree(merge(*pair[0], *pair[1]), oracle(qkv, ids))
    total = lambda out, lse: out.sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()
    grad = jax.grad(lambda lse: total(*merge(a[0], lse, *b)))
    assert np.isfinite(grad(jnp.full_like(a[1], -jnp.inf))).all()


def bfloat16_agrees(run, qkv, ids, order=None):
    """Against the definition, of the same rounded inputs."""
    qkv = [np.asarray(x.astype(jnp.bfloat16)) for x in qkv]
    out, lse, *grads = results(run, qkv, ids, order)
    expected = oracle(qkv, ids)
    assert {x.dtype.name for x in (out, *grads)} == {"bfloat16"}
    assert lse.dtype == jnp.float32
    for found, right in zip((out, *grads), (expected[0], *expected[2:]), strict=True):
        # weights, score gradients, out and the result are each rounded once to 8 bits (2^-9 relative); sums
        # are not
        assert np.abs(np.asarray(found, np.float32) - right).max() <= 4 * 2**-9 * np.abs(right).max()


def test_bfloat16_keeps_its_dtype_and_accumulates_in_float32():
    zigzag = sequence_permutation("zigzag", S, 2)
    bfloat16_agrees(program(RING, 2, tile=8), *inputs(ratio=4), zigzag)


RING = partial(ring_attention, axis="sp")
FLASH = partial(flash_attention, axis="sp", platform="cpu")
LAYOUTS = ("contiguous", "zigzag", "striped")


@pytest.mark.parametrize(
    ("attend", "mask", "kv_heads", "ratio", "options"),
    [
        pytest.param(RING, CAUSAL, 2, 2, dict(tile=2), id="tiles of 2"),
        pytest.param(RING, WINDOW, 1, 4, {}, id="window"),
        # the kernel is interpreted
        pytest.param(FLASH, WINDOW, 1, 2, {}, marks=pytest.mark.long, id="flash"),
    ],
)
def test_a_ring_matches_the_definition(attend, mask, kv_heads, ratio, options):
    """In every order, packed or not; eight times the same bits, since hops of two rings could be mixed up."""
    run = program(attend, 4, mask=mask, **options)
    for layout, packed in itertools.product(LAYOUTS, (False, True)):
        data = inputs(kv_heads, ratio, packed)
        agree(results(run, *data, sequence_permutation(layout, S, 4)), oracle(*data, mask))
    data = inputs(kv_heads, ratio)
    first = results(run, *data)
    for _ in range(7):
        jax.tree.map(np.testing.assert_array_equal, results(run, *data), first)


def test_blockwise_over_contiguous_positions_writes_only_the_triangle():
    qkv, ids = inputs()
    attend = partial(ring_attention, tile=8, in_order=True)
    assert str(jax.make_jaxpr(attend)(*qkv, ids)).count("cond[") == 4 * 5 // 2


def counted(f, n, *args):
    """Count (collective, dtype, elements of its result) over n ranks of sp."""
    counts = Counter()
    for c in census_jaxpr(jax.make_jaxpr(f)(*args).jaxpr, {"sp": n}):
        counts[c.kind, c.dtype, math.prod(c.shape)] += c.count
    return counts


@pytest.mark.parametrize(("window", "hops"), [(1, 0), (10, 2), pytest.param(9, 1, marks=pytest.mark.long)])
def test_a_windows_keys_go_as_far_as_it_reaches_in_contiguous_order(window, hops):
    """The answer is one device's, packed or not; a row in which order says nothing is not trusted."""
    n, mask = 4, Mask(window, cap=3.0)
    ring, one = program(RING, n, mask=mask, order="contiguous"), program(attention.full, mask=mask)
    for packed in (False, True):
        data = inputs(packed=packed)
        agree(results(ring, *data), results(one, *data))
    assert ring_hops(mask, "contiguous", n, S // n) == hops
    (q, k, v), ids = inputs()
    attend = on_ranks(RING, n, mask=mask, order="contiguous")
    loss = lambda q, k, v, ids: attend(q, k, v, ids)[0].sum()
    counts = counted(jax.grad(loss, (0, 1, 2)), n, q, k, v, ids)
    assert sum(times for (kind, *_), times in counts.items() if kind == "collective-permute") == 3 * hops
    plan = Plan(f"sp={n}", sequence_order="contiguous").resolve(devices="cpu")
    at, of = (np.tile([row[i] for row in ROWS.values()], (1, S // 8)) for i in (0, 1))
    assert not jax.jit(partial(attention.ids_are_valid, Solo(plan), mask))(at, of).all()


def test_masked_blocks_are_not_executed(monkeypatch):
    n, block, mask, ran = 4, 4, Mask(window=4), Counter()
    for name in ("attend_tile", "attend_tile_grad"):
        compute = getattr(attention, name)

        def counting(*args, name=name, compute=compute):
            jax.debug.callback(lambda rank: ran.update([(name, int(rank))]), jax.lax.axis_index("sp"))
            return compute(*args)

        monkeypatch.setattr(attention, name, counting)
    run = program.__wrapped__(RING, n, mask=mask, tile=block)
    for layout in ("zigzag", "contiguous"):
        results(run, *inputs(), sequence_permutation(layout, S, n))
        jax.effects_barrier()
        pairs = np.sum(pairs_by_step(n, layout, mask, s=S, block=block), 1) // block**2
        assert [ran["attend_tile", rank] for rank in range(n)] == pairs.tolist()
        assert [ran["attend_tile_grad", rank] for rank in range(n)] == pairs.tolist()
        assert pairs.sum() < n * (S // block) ** 2 / n * 0.6
        ran.clear()


def test_a_rings_program_has_two_products_forward_and_five_backward_in_each_block_that_runs():
    """The FLOPs of a program that takes every branch. Backward, scores are recomputed."""
    qkv, ids = inputs()
    text = program(RING, 2, tile=8).lower(qkv, ids, *functional(qkv[0])).compile().as_text()
    assert executed_flops(text) == 7 * (2 * B * S * S * 2 * 2 * H) / 2


def temp_bytes(n, local):
    """The compiler's figure for one device; no array is made."""
    attend = on_ranks(RING, n)
    loss = lambda q, k, v, at: attend(q, k, v, ids_of(at, jnp.zeros_like(at)))[0].sum()
    given = [
        jax.ShapeDtypeStruct((1, n * local, *heads), jnp.float32) for heads in ((1, 2, 8), (1, 8), (1, 8))
    ]
    given += [jax.ShapeDtypeStruct((1, n * local), jnp.int32)]
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*given).compile()
    # Less the positions and segments of all ranks, which each of them knows.
    return compiled.memory_analysis().temp_size_in_bytes - 8 * n * local


@pytest.mark.long
def test_temporary_memory_of_a_rank_depends_on_its_share_alone():
    short, long = temp_bytes(8, 1024), temp_bytes(8, 2048)
    assert temp_bytes(5, 1024) == short, "from 5 ranks on every loop is a loop"
    assert long <= 1.5 * short, "scores of all pairs would be four times as many"


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
