"""Muon on cut state: the numbers of Optax, the same on every mesh; bytes, memory and FLOPs as predicted."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import plans
import pytest
from flax.traverse_util import flatten_dict
from parity import BATCH, LLAMA, MOE, SEQ, assert_sent, batch, compiled_step, dealt, put, state_of, weights
from shared import CASES

from llmpar import Plan, Step
from llmpar.inspect.census import compiled_memory, executed_flops
from llmpar.model.weights import weights_tree
from llmpar.plan.layout import parse_layout
from llmpar.plan.model_config import matrix_dims
from llmpar.predict import memory
from llmpar.predict.muon import newton_schulz_flops
from llmpar.training.muon import muon, newton_schulz

FOUR, ROUTED = (dataclasses.replace(config, num_layers=4) for config in (LLAMA, MOE))
RATE = 0.01
"""Two steps at it move each weight by 300 times the 1e-5 that meshes may differ."""


def numbers(dims: str):
    """How Optax is given the matrices of a leaf."""
    if pair := matrix_dims(dims):
        letters = parse_layout(dims).letters
        return optax.contrib.MuonDimensionNumbers(*(tuple(letters.index(x) for x in part) for part in pair))
    return None


def test_on_one_device_it_is_muon_of_optax_in_updates_and_state():
    """Two updates, with weight decay, of all weights of a model with experts; 1e-5 of the largest update."""
    config = ROUTED
    dims, params = weights_tree(config, lambda w: w.dims, trainable=True), weights(config)
    given = dict(weight_decay=0.1, muon_weight_dimension_numbers=jax.tree.map(numbers, dims))
    rate = optax.linear_schedule(0.0, 1e-2, 1)
    rules = muon(rate, config, 0.1), optax.contrib.muon(rate, **given)

    def twice(rule):
        state, after, update = rule.init(params), params, jax.jit(rule.update)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            for wave in (np.sin, np.cos):
                grads = jax.tree.map(lambda w, wave=wave: wave(40 * w), params)
                updates, state = update(grads, state, after)
                after = jax.tree.map(np.add, after, updates)
        return after, state

    ours, theirs = map(twice, rules)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs), "a checkpoint of one is one of the other"
    for got, want in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(1, np.abs(want).max()))
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), ours[0], params)
    assert min(jax.tree.leaves(moved)) > 1e-4


def after_two_steps(step: Step, compiled):
    """All weights, and the optimizer's sums of gradients, in the model's order after two steps."""
    state = state_of(step)
    for seed in (0, 1):
        state, _ = compiled(state, put(dealt(batch(seed), step.plan), step.batch_sharding))
    state = jax.tree.map(np.asarray, step.to_model_order(state))
    return state.params, state.optimizer


@functools.cache
def one_device(config):
    step, compiled, _ = compiled_step(config, Plan(muon="gather"), muon(RATE, config), 1.0)
    return after_two_steps(step, compiled)


@pytest.mark.parametrize("line", plans.by_mark(CASES["muon_plans"]))
def test_on_every_mesh_it_sends_and_holds_what_is_predicted_and_is_what_one_device_does(line):
    config, plan = plans.build(line)
    step, compiled, text = compiled_step(config, plan, muon(RATE, config), 1.0)
    want = memory.argument_bytes(step.plan, BATCH, SEQ)
    assert compiled_memory(compiled)["argument_bytes"] == sum(want.values())
    if plan.mode == "manual":
        assert_sent(step, text)
    (got, moments), (one, theirs) = after_two_steps(step, compiled), one_device(config)
    for x, y in zip(jax.tree.leaves(moments), jax.tree.leaves(theirs), strict=True):
        assert np.abs(x - y).max() <= 1e-3 * np.abs(y).max()
    moved = jax.tree.map(lambda w, start: np.abs(w - start).max(), one, weights(step.config))
    assert min(jax.tree.leaves(moved)) > 0.003
    like = flatten_dict(one, sep=".")
    for path, w in flatten_dict(got, sep=".").items():
        error = np.abs(w - like[path])
        # Adam divides a gradient by itself: where that is nearly 0, rounding is not. One of 16,896 it is.
        strays = 0 if matrix_dims(step.config.weights()[path].dims) else error.size // 10_000
        assert (error > 1e-5).sum() <= strays and error.max() < 1e-4, f"{path} is off by {error.max():.1e}"


def test_an_orthogonalisation_has_the_flops_of_the_formula_and_singular_values_near_1():
    x = np.random.default_rng(0).normal(size=(3, 24, 40)).astype(np.float32)
    program = jax.jit(newton_schulz).lower(x).compile()
    assert executed_flops(program.as_text()) == 3 * newton_schulz_flops(24, 40)
    values = np.linalg.svd(np.asarray(program(x)), compute_uv=False)
    assert 0.6 < values.min() and values.max() < 1.3
