"""The dtype on an arrow: a NumPy oracle rounds the same, and the compiled program sends what is predicted."""

import math

import jax
import ml_dtypes
import numpy as np
import plans
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec as P
from parity import BATCH, LLAMA, QWEN, SEQ, assert_sent, batch, compiled_step, first_step, predicted, weights
from shared import CASES
from test_tolerance import alone, error

from llmpar import Plan, make_mesh
from llmpar.parallel.collectives import vary
from llmpar.parallel.modes import Manual
from llmpar.plan.layout import SCALED, WIRES, parse_arrow
from llmpar.predict.tolerance import tolerance

HALF = {"gather_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
LINES = plans.by_mark(CASES["wire_plans"])
BIASES = QWEN, Plan("fsdp=4 dp=2", **HALF)  # they have heads, and are vectors
PLANS = [pytest.param(*plans.build(*one.values), id=str(one.values[0]), marks=one.marks) for one in LINES]
PLANS += [pytest.param(*BIASES, id="biases", marks=pytest.mark.long)]


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """One device's numbers after a trip in this dtype."""
    if dtype == "same":
        return x
    if dtype == "bfloat16":
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)
    blocks = x.reshape(-1, SCALED)
    scales = np.abs(blocks).max(1, keepdims=True) / np.float32(448)
    scales[scales == 0] = 1
    return ((blocks / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales).reshape(x.shape)


def cut(x: np.ndarray, counts) -> list[tuple]:
    """The slices of an array that has so many parts along each dim."""
    sizes = [n // parts for n, parts in zip(x.shape, counts, strict=True)]
    places = np.ndindex(*counts)
    return [tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, sizes, strict=True)) for place in places]


def as_gathered(config, plan):
    """The weights as the ranks of a plan multiply by them: each shard of a layer rounded by itself."""
    plan, flat = plan.resolve(config), flatten_dict(weights(config), sep=".")
    for path, (weight, layouts) in plan.layouts_by_path.items():
        if layouts.gather.moves and not weight.is_vector:
            counts = [plan.mesh.along(dim.axes) for dim in layouts.stored.dims]
            if path.startswith("blocks."):
                counts[0] = weight.shape[0]
            flat[path] = flat[path].copy()
            for block in cut(flat[path], counts):
                flat[path][block] = rounded(flat[path][block], plan.gather_dtype)
    return unflatten_dict(flat, sep=".")


@pytest.mark.parametrize("config, plan", PLANS)
def test_a_plan_sends_what_is_predicted_and_computes_with_rounded_weights(config, plan):
    step, compiled, text = compiled_step(config, plan)
    assert_sent(step, text)
    named = {arrow.rpartition(" in ")[2] for *_, arrow in predicted(config, plan)}
    assert {WIRES[plan.gather_dtype], WIRES[plan.reduce_dtype]} - {""} <= named
    _, metrics, grads = first_step(step, compiled)
    (loss, _), exact = alone(config)(as_gathered(config, plan), batch())
    if plan.dtype == "float32":
        assert abs(float(metrics["loss"]) - loss) < 1e-5 * loss
    spread = tolerance(step.plan, BATCH, SEQ, logits=0.5, loss=math.log(256))
    strict = plan.reduce_dtype == "same"
    assert error(grads, exact) < (1e-5 if strict else spread.bound("gradient"))
    (whole_loss, _), whole = alone(config)(weights(config), batch())
    assert abs(float(metrics["loss"]) - whole_loss) < spread.bound("loss") * whole_loss
    assert error(grads, whole) < spread.bound("gradient")


TERMS = np.random.default_rng(0).normal(size=(8, 16, 24)).astype(np.float32)
ARROWS = CASES["wire_arrows"]


def test_arrows_in_a_dtype_do_what_their_text_says():
    """Four arrows in one program: two gathers, sums of rounded terms, and sums that are rounded, too."""
    par, mesh = Manual(Plan("fsdp=8").resolve(LLAMA)), make_mesh("fsdp=8")

    def run(x):
        term = vary(x[0], ["fsdp"])
        inputs = [term[:, :16], term, term, term[:13]]  # 13 · 24 numbers: no multiple of 8 · 32
        out = [par.carry_out(y, parse_arrow(text)) for y, text in zip(inputs, ARROWS, strict=True)]
        return [y[None] for y in out[:3]] + out[3:]

    specs = [P("fsdp")] * 3 + [P()]
    got = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("fsdp"), out_specs=specs))(TERMS)
    gathered = [rounded(x[:, :16].copy(), "float8") for x in TERMS]
    for device in got[0]:
        np.testing.assert_allclose(device, np.concatenate(gathered), rtol=1e-6)
    np.testing.assert_array_equal(got[1][5], np.concatenate([rounded(x, "bfloat16") for x in TERMS]))
    sums = np.stack([rounded(x, "bfloat16") for x in TERMS]).astype(np.float64).sum(0)
    np.testing.assert_allclose(np.concatenate(got[2]), sums, atol=1e-5)
    np.testing.assert_allclose(got[3], sums[:13], rtol=2**-8)
    assert np.abs(got[3] - sums[:13]).max() > 1e-4, "the sums are rounded before they are sent on"
