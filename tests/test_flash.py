"""The kernel of attention gives what the definition gives, from spans of tiles, without a branch.

Interpreted on CPUs, against the oracle in float64: values 1e-5, gradients 1e-4 of the largest."""

import heapq
import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_attention
from device import by_hand
from jax.experimental import pallas as pl
from shared import program_text
from test_attention import CAUSAL, H, agree, ids_of, inputs, of_all, oracle, program, results
from test_mesh import in_a_fresh_process

from llmpar.kernels import flash, flash_tpu
from llmpar.kernels.tiles import KernelTiles, kernel_tiles
from llmpar.model.attention import Ids, flash_attention, ring_attention
from llmpar.parallel.mesh import abstract_mesh
from llmpar.plan.sequence_order import Mask
from llmpar.predict.ring import kernel_flops, seen_share
from llmpar.training.balance import row_orders


def drawn(seed):
    """A random case: odd shapes, an order of positions, documents, a mask."""
    rng = np.random.default_rng(seed)
    s, t = (int(n) for n in rng.integers(1, 200, 2))
    b, k, r, h = (int(rng.choice(n)) for n in ((1, 2), (1, 2), (1, 2, 3, 8), (8, 24, 64, 96, 128)))
    places = {"plain": np.arange(s + t), "any": rng.permutation(s + t)}[rng.choice(["plain", "any"])]
    of = np.sort(rng.integers(1, 4, (b, s + t)), 1)  # documents; a tile may lie in one or in several
    at = np.tile(np.arange(s + t), (b, 1))
    at, of = at[:, places].astype(np.int32), of[:, places].astype(np.int32)
    q_at, k_at = (slice(0, s), slice(s, s + t)) if rng.random() < 0.3 else (slice(-s, None), slice(-t, None))
    of = of if rng.random() < 0.7 else 0 * of
    ids = Ids(at[:, q_at], of[:, q_at], at[:, k_at], of[:, k_at])
    window = rng.choice([None, None, 1, 7, 90])
    mask = Mask(window and int(window))
    numbers = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    return (numbers(b, s, k, r, h), numbers(b, t, k, h), numbers(b, t, k, h)), ids, mask


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.full) for n in range(3, 40))]
)
def test_the_kernel_matches_the_definition_whatever_the_shapes_order_documents_and_mask(seed):
    qkv, ids, mask = drawn(seed)
    agree(
        results(program(flash_attention, platform="cpu", mask=mask), qkv, ids),
        oracle(qkv, ids, mask),
        least=0.1,
    )


def test_the_kernel_in_bfloat16_is_as_exact_as_the_portable_blocks():
    test_attention.bfloat16_agrees(program(flash_attention, platform="cpu"), *inputs(ratio=4, packed=True))


@pytest.fixture
def in_pallas(monkeypatch):
    """The kernels for GPUs and for TPUs, in Pallas's interpreter."""
    by_pallas = partial(flash.run_on_gpu, pallas_call=partial(pl.pallas_call, interpret=True))
    monkeypatch.setattr(flash, "run_on_gpu", by_pallas)
    monkeypatch.setattr(flash_tpu, "run_on_tpu", partial(flash_tpu.run_on_tpu, interpret=True))


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "platform, enough",
    [pytest.param("gpu", 512, marks=LONG), ("gpu", 1), pytest.param("tpu", 512, marks=LONG)],
)
@pytest.mark.parametrize("seed", [4, *(pytest.param(n, marks=pytest.mark.full) for n in (3, *range(5, 24)))])
def test_kernels_of_accelerators_match_the_definition_whatever_the_shapes_documents_and_mask(
    seed, platform, enough, in_pallas, monkeypatch
):
    """Also where one program has all query heads of a KV head, and with several tiles on a TPU."""
    monkeypatch.setattr(flash, "ENOUGH", enough)
    if platform == "tpu":
        monkeypatch.setattr(flash, "kernel_tiles", lambda *args: KernelTiles(16, 32, 2, 8))
    qkv, ids, mask = drawn(seed)
    fresh = program.__wrapped__(flash_attention, platform=platform, mask=mask)
    agree(results(fresh, qkv, ids), oracle(qkv, ids, mask), least=0.1)


@pytest.mark.parametrize("platform", ["cpu", *(pytest.param(x, marks=LONG) for x in ("gpu", "tpu"))])
def test_a_kernel_goes_on_from_earlier_keys(platform, in_pallas):
    qkv, ids = inputs(packed=True)
    launch = {"cpu": flash.run_on_cpu, "gpu": flash.run_on_gpu, "tpu": flash_tpu.run_on_tpu}[platform]
    settings = dict(mask=CAUSAL, scale=H**-0.5, platform=platform, launch=launch)
    of = np.stack(ids[:2], 1)
    two_hops = partial(by_hand, settings, 2)
    run = jax.jit(two_hops) if platform == "cpu" else two_hops  # an interpreter of kernels compiles each
    found = run(*map(jnp.asarray, (*qkv, test_attention.functional(qkv[0])[0])), of)
    agree(found, oracle(qkv, ids, of_lse=False))


def of_tiles(mask, q_ids, k_ids, q_tile, k_tile):
    """Of all tiles of ids ``2 s`` and ``2 t``: whether some pair is seen, and whether all are."""
    gap = q_ids[0, :, None] - k_ids[0]
    seen = (gap >= 0) & (gap < (mask.window or len(gap) ** 2)) & (q_ids[1, :, None] == k_ids[1])
    tiles = seen.reshape(len(seen) // q_tile, q_tile, -1, k_tile)
    return tiles.any((1, 3)), tiles.all((1, 3))


def inside(spans, first, last, num):
    """Which of so many tiles lie between two numbers of a span."""
    return (spans[:, first, None] <= np.arange(num)) & (np.arange(num) < spans[:, last, None])


@pytest.mark.parametrize("documents", [1, 5])
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped", "balanced"])
def test_a_span_is_what_is_seen_between_any_two_ranks_in_every_order(order, documents, monkeypatch):
    """It holds all tiles that are seen, and says which whole. Of one document it holds no other."""
    monkeypatch.setattr(flash, "jnp", np)  # 1,500 small cases: no compiler
    rng = np.random.default_rng(documents)
    cases = itertools.product((1, 2, 4), (24, 96), ((1, 1), (2, 3), (6, 3), (12, 12)), (None, 5, 30))
    for n, s, (q_tile, k_tile), window in cases:
        if s // n % q_tile:
            continue
        segments = np.sort(rng.integers(0, documents, s))
        ids = np.stack([np.arange(s) - np.searchsorted(segments, segments), segments])
        ranks = ids[:, row_orders(order, segments[None], n, window)[0]].reshape(2, n, -1).swapaxes(0, 1)
        for q_ids, k_ids, of_keys in itertools.product(ranks, ranks, (False, True)):
            some, every = of_tiles(Mask(window), q_ids, k_ids, q_tile, k_tile)
            some, every = (some.T, every.T) if of_keys else (some, every)
            (spans,) = flash.spans(Mask(window), q_ids[None], k_ids[None], q_tile, k_tile, of_keys)
            met, num = inside(spans, 0, 3, len(some[0])), len(some[0])
            assert (met >= some).all() and (met == some).all() >= (documents == 1 and not window)
            np.testing.assert_array_equal(inside(spans, 1, 2, num), every)


def test_in_an_order_that_no_rank_has_a_span_is_longer_and_masks_every_tile_that_is_not_seen_whole(
    monkeypatch,
):
    monkeypatch.setattr(flash, "jnp", np)
    for seed in range(10):
        rng, mask = np.random.default_rng(seed), Mask((None, 5, 9)[seed % 3])
        order = lambda rng=rng: np.arange(24).reshape(6, 4)[rng.permutation(6)].ravel()  # of six tiles
        q_ids, k_ids = (np.stack([order(), np.sort(rng.integers(0, 1 + seed % 2, 24))]) for _ in range(2))
        some, every = of_tiles(mask, q_ids, k_ids, 4, 4)
        (spans,) = np.asarray(flash.spans(mask, q_ids[None], k_ids[None], 4, 4))
        assert (inside(spans, 0, 3, 6) >= some).all() and (inside(spans, 1, 2, 6) <= every).all()


def test_blocks_on_a_gpu_are_masked_and_never_a_branch():
    """A branch of a compiled GPU program asks the host which way to go."""
    data, options = inputs(packed=True), dict(tile=8, branch=False)
    agree(results(program(ring_attention, **options), *data), oracle(*data))
    assert "cond[" not in str(jax.make_jaxpr(partial(ring_attention, **options))(*data[0], data[1]))


def on_a_gpu(s, **options):
    """The text of a ring of 4 and its gradients, lowered for an H100."""
    n, shapes = 4, ((1, s, 2, 4, 128), (1, s, 2, 128), (1, s, 2, 128))
    cut = jax.sharding.PartitionSpec(None, "sp")

    def local(q, k, v, at, of):
        ids = of_all(ids_of(at, of))
        out, _ = flash_attention(q, k, v, ids, axis="sp", platform="gpu", **options)
        return out.astype(jnp.float32)

    card = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=None, platform="cuda")
    mesh = abstract_mesh(f"sp={n}").update(abstract_device=card)
    attend = jax.shard_map(local, mesh=mesh, in_specs=(cut,) * 5, out_specs=cut)
    loss = lambda *args: attend(*args).sum()
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    given += [jax.ShapeDtypeStruct((1, s), jnp.int32)] * 2
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*given)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def busy(k, r, s, monkeypatch):
    """The share of an H100's 132 multiprocessors that works if a program takes as long as its span."""
    found = {}

    def call(kernel, *, out_shape, grid, in_specs, out_specs, name):
        def run(*given):
            length, place = np.diff(np.asarray(given[-1])[..., [0, 3]])[..., 0], in_specs[-1].index_map
            programs = [place(*program[::-1]) for program in np.ndindex(*grid[::-1])]
            ends, lengths = [0] * 132, [int(length[row, tile]) for row, tile, _ in programs]
            for turns in lengths:
                heapq.heappush(ends, heapq.heappop(ends) + turns)
            found[name] = sum(lengths) / 132 / max(ends)
            return [jnp.zeros(x.shape, x.dtype) for x in out_shape]

        return run

    monkeypatch.setattr(
        pl, "pallas_call", lambda kernel, *, name, compiler_params, **more: call(kernel, name=name, **more)
    )
    settings = dict(mask=CAUSAL, scale=1.0, platform="gpu", launch=flash.run_on_gpu)
    zeros = lambda *shape: jnp.zeros(shape, jnp.bfloat16)
    ids = np.stack([np.arange(s), np.ones(s, int)]).astype(np.int32)[None]
    q, keys, numbers = zeros(1, s, k, r, 128), zeros(1, s, k, 128), jnp.zeros((1, s, k, r))
    flash.kernel_forward(q, keys, keys, ids, ids, **settings)
    flash.kernel_backward(q, keys, keys, ids, ids, (q, numbers, numbers), **settings)
    return found


def test_a_gpu_is_busy_to_the_end_since_the_longest_spans_come_first(monkeypatch):
    """llama3-70b cut by tp=8. With a program for each KV head, dK and dV kept 13 % of it busy."""
    assert min(busy(1, 8, 4096, monkeypatch).values()) > 0.96


@pytest.mark.long
def test_a_gpu_gets_three_kernels_no_branch_and_no_array_of_queries_times_keys():
    s = 4096
    text = on_a_gpu(s)
    kernels = set(re.findall(r'name = "(flash_\w+)"', text))
    assert kernels == {"flash_forward", "flash_queries_grad", "flash_keys_grad"}
    assert "stablehlo.case" not in text and "stablehlo.if" not in text
    local = s // 4
    sizes = {tuple(map(int, x.split("x"))) for x in re.findall(r"tensor<(\d+(?:x\d+)*)x[a-z]\w*>", text)}
    assert not [shape for shape in sizes if shape.count(local) > 1 or s in shape and local in shape]


def test_the_work_of_a_kernel_is_its_products_on_the_tiles_of_its_spans(monkeypatch):
    monkeypatch.setattr(flash, "jnp", np)
    b, s, k, r, h = 2, 512, 2, 4, 64
    shapes = [(b, s, k, h), (b, s, k, h), (b, 2, s), (b, s, k, r, h)]
    pairs = 2 * b * s * s * k * r * h
    assert kernel_flops("flash_forward", shapes) == 2 * pairs
    assert kernel_flops("flash_queries_grad", shapes) == 3 * pairs
    on_tpus = [(b, 16), (b, k, s, h), (b, k, s, h), (b, 2, 1, s), (b, k, r, s, h)]
    assert kernel_flops("flash_forward", on_tpus) == 2 * pairs
    assert kernel_flops("flash_keys_grad", shapes, share=0.5) == 2 * pairs
    ids, shares = np.stack([np.arange(s), np.ones(s, int)]).astype(np.int32)[None], []
    for chip in (("gpu", "H100"), ("gpu", "L4"), ("tpu", "V5E")):
        tiles = kernel_tiles("flash_forward", h, 2, s, s, *chip)
        met = np.diff(np.asarray(flash.spans(CAUSAL, ids, ids, tiles.q, tiles.k))[..., [0, 3]]).sum()
        shares.append(seen_share(tiles, s, mask=CAUSAL))
        assert shares[-1] == met * tiles.q * tiles.k / s**2
    assert shares == [0.5625, 0.5625, 1], "the longer side of a tile decides; a TPU's is as long as the row"
    assert tiles.q == 512
    assert seen_share(tiles, 2400, 4, "contiguous") == 36 / 64, "two a rank, a triangle of 8"


@pytest.mark.long
def test_every_file_can_be_imported_where_jax_has_none_of_its_dialects_for_kernels():
    """Triton's is deprecated: a laptop must not need what only an accelerator runs."""
    assert in_a_fresh_process(program_text("without_dialects")).stdout == "True True\n"
