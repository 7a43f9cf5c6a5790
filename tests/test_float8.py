"""Matmuls in float8: NumPy rounds the same, meshes agree, and GPUs' programs multiply 8 bits."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import parity
import plans
import pytest
from jax.sharding import PartitionSpec as P
from parity import BATCH, LLAMA, SEQ, batch
from shared import CASES, program_text
from test_compile import DOT, H100, PRODUCTS, Devices, aside, gpu_compiler
from test_tolerance import alone, error

from llmpar.inspect import roofline
from llmpar.inspect.check import check
from llmpar.kernels import grouped
from llmpar.model.weights import trainable_params
from llmpar.parallel.float8 import matmul_in_float8
from llmpar.parallel.mesh import make_mesh
from llmpar.plan.model_config import ExpertConfig
from llmpar.plan.plan import Plan
from llmpar.planner.planner import Question
from llmpar.predict.time import step_time
from llmpar.predict.tolerance import tolerance
from llmpar.predict.traffic import MATMULS

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
EIGHT = Plan(dtype="bfloat16", matmul_dtype="float8")


def rounded(x, dtype):
    """The same in float64: one scale, a power of two."""
    scale = 2.0 ** np.frexp(np.abs(x).max() / float(ml_dtypes.finfo(dtype).max))[1]
    return (x / scale).astype(dtype).astype(np.float64) * scale


def test_operands_are_rounded_once_and_products_summed_in_float32():
    """Beside float64: exact but for that rounding, which is bounded element by element."""
    rng = np.random.default_rng(0)
    draw = lambda size, *shape: (size * rng.normal(size=shape) * rng.lognormal(size=shape)).astype("f4")
    x, w, dy = given = draw(30, 4, 16, 64), draw(0.1, 64, 2, 24), draw(1e-9, 4, 16, 2, 24)
    dims = {"bsd,dnh->bsnh": (0, 1), "bsnh,dnh->bsd": (2, 1), "bsd,bsnh->dnh": (0, 2)}
    products = lambda *given: [np.einsum(text, given[i], given[j]) for text, (i, j) in dims.items()]
    run = jax.jit(lambda x, w, dy: (matmul_in_float8(x, w), *jax.vjp(matmul_in_float8, x, w)[1](dy)))
    narrow = rounded(x, E4M3), rounded(w, E4M3), rounded(dy, E5M2)
    rows = zip(run(*given), products(*narrow), products(*given), products(*map(abs, given)), strict=True)
    for (got, oracle, exact, size), last in zip(rows, (2**-4, 2**-3, 2**-3), strict=True):
        assert np.abs(got - oracle).max() <= 1e-6 * np.abs(oracle).max()
        assert (np.abs(got - exact) <= ((1 + 2**-4) * (1 + last) - 1) * size + 1e-4 * size.max()).all()
    assert not any(np.abs(got).any() for got in run(x, 0 * w, 0 * dy)), "zeros have a scale, too"
    assert all(np.isnan(got).any() for got in run(x, w * np.inf, dy)[:2])


def test_experts_round_the_same_operands():
    """Grouped products beside those of all experts; more choose expert 0 than the first part has."""
    rng, experts, (r, k, e, d, m) = np.random.default_rng(1), ExpertConfig(8, 2), (64, 2, 8, 16, 24)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), "f4")
    x, shares, *w = given = draw(r, d), draw(r, k), draw(e, d, m), draw(e, d, m), draw(e, m, d)
    dy, chosen = draw(r, d), np.stack([rng.integers(0, 2, r), rng.integers(2, e, r)], 1)
    blocks = grouped.arrange(experts, r, 1, eight_bits=True)
    slots = grouped.lay_out(blocks, jnp.asarray(chosen), e)
    assert blocks.num_blocks > blocks.first and slots.end_l[-1] > blocks.first
    run = lambda x, shares, *w: grouped.feed_forward(blocks, x, shares, w, slots)
    y, pull = jax.vjp(jax.jit(run), *given)

    def dense(product, x, shares, gate, up, down):
        """All experts compute all rows. Shares weigh results forward, and what is multiplied backward."""
        share = jnp.einsum("rk,rke->re", shares, jax.nn.one_hot(chosen, e))
        inner, outer = (product(x[None], w.transpose(1, 0, 2)) for w in (gate, up))
        hidden = jax.nn.silu(inner) * outer
        results = jnp.concatenate([product(hidden[:, :, i], down[i]) for i in range(e)])
        return product(hidden * share[None, ..., None], down)[0], jnp.einsum("erd,re->rd", results, share)

    found = []
    for product in (matmul_in_float8, lambda x, w: jnp.tensordot(x, w, x.ndim - 2)):
        _, pull_dense, value = jax.vjp(functools.partial(dense, product), *given, has_aux=True)
        found.append((value, *pull_dense(dy)))
    for got, want, exact in zip((y, *pull(dy)), *found, strict=True):
        assert np.abs(got - want).max() < 1e-5 * np.abs(want).max() < 1e-2 * np.abs(want - exact).max()


@pytest.mark.parametrize("line", plans.by_mark(CASES["float8_plans"]))
def test_a_mesh_computes_what_one_device_does_and_sends_what_is_predicted(line):
    """Scales of parts move exponents alone. (But a value between two numbers may go to the other one.)"""
    config, plan = plans.build(line)
    step, compiled, text = parity.compiled_step(config, plan)
    if plan.mode == "manual":
        parity.assert_sent(step, text)
    _, metrics, grads = parity.first_step(step, compiled)
    (one_loss, _), one_grads = alone(config, matmul_dtype="float8")(parity.weights(config), batch())
    one_grads = jax.tree.map(np.asarray, trainable_params(one_grads, config))
    loss, exact = parity.solo(config)
    spread = tolerance(step.plan, BATCH, SEQ, logits=0.5, loss=math.log(256))
    # ranks that have terms of an incoming gradient round these, not their sum
    terms = step.plan.mesh.kv > 1 or plan.mesh.tp > 1 and config.blocks[0][1].has_latent_attention
    close = 1.5 * spread.expected("gradient") if terms else 0.03
    assert abs(metrics["loss"] / one_loss - 1) < 1e-6 and error(grads, one_grads) < close
    assert abs(metrics["loss"] / loss - 1) < spread.bound("loss")
    assert spread.expected("gradient") / 4 < error(grads, exact) < 4 * spread.expected("gradient")


def test_chips_that_multiply_8_bits_take_it_and_its_time_is_theirs():
    assert EIGHT.resolve(LLAMA, "gpu 8.9") and H100.rates.eight_bit > 1.5
    run = Question(LLAMA, H100, 1, 8, 8192).run
    times = [step_time(run(plan)).terms[MATMULS] for plan in (Plan(dtype="bfloat16"), EIGHT)]
    assert 1 < times[0] / times[1] < H100.rates.eight_bit, "bytes are read as before"
    text, devices = PRODUCTS.replace("BETWEEN", DOT), Devices("dp=2 fsdp=8")
    walk = lambda text: roofline.roofline(text, devices, H100).terms["products"]
    faster = walk(text) / walk(text.replace("bf16", "f8e4m3fn"))
    assert faster == pytest.approx(H100.rates.eight_bit, rel=1e-3)


def test_check_knows_how_far_float8_rounds(standard_promotion):
    """A scale for each rank of dp, no power of two, beside one scale."""

    def f(x, w):
        scale = jnp.abs(x).max() / 448
        return (x / scale).astype(E4M3).astype("f4") * scale @ w

    program = jax.shard_map(f, mesh=make_mesh("dp=2"), in_specs=(P("dp"), P()), out_specs=P("dp"))
    checked = check(program, f, *(jax.ShapeDtypeStruct(shape, "f4") for shape in ((8, 64), (64, 16))))
    assert checked and 1e-3 < checked.results[0]["bound"] < 1, str(checked)


@pytest.mark.compilers
@gpu_compiler
@pytest.mark.parametrize(
    "words, count",
    [(["ep=2", "tiny-moe"], 44), pytest.param(["fsdp=2", "tiny"], 26, marks=pytest.mark.nightly)],
)
def test_all_matmuls_but_those_of_the_loss_and_routers_are_in_float8_on_an_h100(words, count):
    """Forward and backward, in Triton's kernels, and in a program without these as calls of cuBLASLt."""
    found = aside(program_text("float8"), *words).splitlines()[-2:]
    assert found == [f"{count} 0 True", f"{count} {count} True"]
