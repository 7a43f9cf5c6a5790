"""The spread between meshes: its laws against sums of numbers, its bounds against runs of the model."""

import dataclasses
import functools
import io
import json
import math
import re

import jax
import numpy as np
import optax
import parity
import pytest
import rich.console
from flax import nnx
from parity import BATCH, LLAMA, MOE, SEQ, batch, compare_leaves, name, natural, padded, state_of, weights

from llmpar import Plan, Step, make_mesh
from llmpar.inspect.report import SPREAD_NAMES, rounded_products, spread, spread_table
from llmpar.model.weights import model_graph
from llmpar.parallel.modes import Solo
from llmpar.plan import sequence_order
from llmpar.predict.tolerance import FACTOR, tolerance

QUANTITIES = tuple(SPREAD_NAMES)
MIXED = Plan("dp=2 fsdp=2 tp=2", zero=2, tp_sequence=True, microbatches=2)
PLANS = [(LLAMA, MIXED), (LLAMA, dataclasses.replace(MIXED, dtype="bfloat16"))]


@functools.cache
def trained(config):
    """Weights after 60 steps on two batches."""
    step = Step(config, Plan(), make_mesh("dp=1"), optax.adamw(3e-3))
    state = state_of(step)
    for number in range(60):
        state, _ = step.run(state, jax.device_put(batch(number % 2), step.batch_sharding))
    return jax.tree.map(np.asarray, state.params)


@functools.cache
def alone(config, **fields):
    """Loss and gradients of one device, divided at the end as a step does; root mean square of its logits."""
    par = Solo(Plan(**fields).resolve())

    def loss(params, batch):
        model = nnx.merge(model_graph(config), params)
        x, head, _ = model.hidden_and_head(batch, par)
        logits = jax.numpy.einsum("bsd,vd->bsv", x, head)
        return model.loss(batch, par)[0], jax.numpy.sqrt((logits.astype("float32") ** 2).mean())

    def run(params, batch):
        (total, logits), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        count = (batch["targets"] >= 0).sum().astype(jax.numpy.float32)
        return (total / count, logits), jax.tree.map(lambda grad: grad / count, grads)

    return jax.jit(run)


def error(got, want) -> float:
    """The largest difference of a leaf, by its largest element."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(np.abs(g - w).max() / (np.abs(w).max() or 1)) for g, w in pairs)


def length(tree) -> float:
    return math.sqrt(sum(float((np.asarray(x, np.float64) ** 2).sum()) for x in jax.tree.leaves(tree)))


def observed(config, plan: Plan):
    """Yield how far the plan is from one device, with fresh and with trained weights, beside the bounds."""
    step = Step(config, plan, make_mesh(plan.mesh), optax.adamw(1e-3))
    run = jax.jit(step.gradients)
    places = np.array(sequence_order.sequence_permutation(plan.sequence_order, SEQ, plan.mesh.sp))
    for kind, params in {"fresh": weights(config), "trained": trained(config)}.items():
        placed = jax.device_put(padded(step, params), step.shardings.params)
        for seed in range(2):
            data = {k: x[:, places] for k, x in batch(seed).items()}
            grads, metrics = run(placed, jax.device_put(data, step.batch_sharding))
            grads = natural(step, jax.tree.map(np.asarray, grads))
            (want_loss, logits), want = alone(config, dtype=plan.dtype)(params, batch(seed))
            want, want_loss = jax.tree.map(np.asarray, want), float(want_loss)
            off = {
                "loss": abs(float(metrics["loss"]) / want_loss - 1),
                "grad_norm": abs(float(metrics["grad_norm"]) / length(want) - 1),
                "gradient": error(grads, want),
            }
            told = tolerance(plan.resolve(config), BATCH, SEQ, logits=float(logits), loss=want_loss)
            yield kind, off, {what: told.bound(what) for what in QUANTITIES}


@pytest.mark.long
@pytest.mark.parametrize("config, plan", PLANS, ids=lambda x: getattr(x, "name", None) or name(x))
def test_what_is_seen_lies_below_the_bound_and_not_far_below(config, plan):
    """Not far: a hundredth at least; elements with fresh weights only: training balances their sums."""
    share = dict.fromkeys(QUANTITIES, 0.0)
    for kind, off, bound in observed(config, plan):
        print(kind, {what: f"{off[what]:.1e} of {bound[what]:.1e}" for what in QUANTITIES})
        for what in QUANTITIES[: 3 - (kind == "trained")]:
            assert off[what] <= bound[what], (what, off, bound)
            share[what] = max(share[what], off[what] / bound[what])
    assert min(share["gradient"], max(share["loss"], share["grad_norm"])) > 0.01, share


def test_a_wrong_scale_of_one_part_in_ten_thousand_is_caught():
    """And less: of 2e-5 of the gradient, and 1e-5 of the loss."""

    loss, norm, grads = parity.spread(LLAMA, Plan("dp=2"))

    def compare(of_loss, of_gradient):
        scaled = jax.tree.map(lambda g: g * np.float32(of_gradient), grads)
        compare_leaves(LLAMA, Plan("dp=2"), loss * of_loss, norm * of_gradient, scaled)

    compare(1.0, 1.0)
    for of_loss, of_gradient, said in ((1.0, 1 + 2e-5, "^gradient"), (1 + 1e-5, 1.0, "^loss")):
        with pytest.raises(AssertionError, match=said):
            compare(of_loss, of_gradient)


def test_each_cut_has_its_term():
    """And no other: what a plan does not cut stands without an axis."""

    def cuts(text, config=LLAMA, **more):
        return {t.name: t.by for t in tolerance(Plan(text, **more).resolve(config), 16, 16).terms if t.by}

    assert cuts("dp=1") == {}
    both = "branches' sums over tp", "noise that one lacks", "sum of squares"
    assert cuts("tp=2") == dict.fromkeys(both, "tp")
    assert cuts("sp=2")["sums over keys"] == "sp" == cuts("sp=2")["sum of losses"]
    assert cuts("dp=2", microbatches=4, loss_chunks=2)["sum of losses"] == "dp,microbatches,loss_chunks"
    assert cuts("dp=2", microbatches=4)["gradients' sums"] == "dp,microbatches"
    assert cuts("ep=2", MOE)["sums over experts"] == "ep"
    sums = "sum of losses", "gradients' sums", "sums of scales' gradients"
    assert cuts("pp=2", microbatches=2) == dict.fromkeys(sums, "microbatches") | {"sum of squares": "pp"}


def test_the_report_tells_every_term_and_what_other_devices_round():
    document = spread(Plan("dp=2 tp=2").resolve(LLAMA), 16, 16)
    assert json.loads(json.dumps(document)) == document
    exact, rounded = (Plan("ep=2", dtype=dtype).resolve(MOE) for dtype in ("float32", "bfloat16"))
    assert 0 < tolerance(exact, 16, 16).ties < 1 < tolerance(rounded, 16, 16).ties
    for what in QUANTITIES:
        together = math.sqrt(sum(term[what] ** 2 for term in document["terms"]))
        assert document["expected"][what] == pytest.approx(together)
        assert document["bound"][what] == pytest.approx(min(1, FACTOR * together))
        assert document["bound"][what] < document["elsewhere"]["tf32"][what]
    console = rich.console.Console(width=80, record=True, file=io.StringIO())
    console.print(spread_table(document))
    console.print(spread_table(spread(Plan("ep=2").resolve(MOE), 16, 16)))
    text = " ".join(console.export_text().split())
    assert "bound: 8 times" in text and "not counted" in text and "sum of losses" in text


ROUNDED = [("cpu", None, "float32"), ("gpu", None, "tf32"), ("gpu", "highest", "float32")]
ROUNDED += [("tpu", "default", "bfloat16"), ("tpu", "high", "tf32")]


@pytest.mark.parametrize("platform, precision, unit", ROUNDED)
def test_products_are_rounded_as_the_devices_do_and_jax_is_told(platform, precision, unit):
    with jax.default_matmul_precision(precision):
        assert rounded_products(platform) == unit


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_gradients_of_logits_are_rounded_before_they_are_multiplied_but_on_tpus(platform):
    """A GPU would take more than twice as long for products of the float32 gradients of float32 logits."""
    par = Solo(Plan(dtype="bfloat16", attention_kernel="portable").resolve(LLAMA, platform))
    params = weights(LLAMA)
    loss = lambda params, batch: nnx.merge(model_graph(LLAMA), params).loss(batch, par)[0]
    program = jax.jit(jax.grad(loss)).lower(params, batch()).as_text()
    v = LLAMA.vocab_size
    dots = re.findall(r"dot_general .*: \((.*)\) -> tensor<(\S+)>", program)
    assert [result for _, result in dots if f"x{v}x" in result] == [f"{BATCH}x{SEQ}x{v}xf32"], "logits"
    dots = [(operands, result) for operands, result in dots if f"x{v}x" in operands]
    assert len(dots) == 2, "of x and of the head"
    for operands, result in dots:
        assert (f"x{v}xf32" in operands) == (platform == "tpu")
        assert platform == "tpu" or result.endswith("bf16") and "f32" not in operands.replace("bf16", "")
