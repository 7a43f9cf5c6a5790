"""What one device computes, step after step and whatever the optimizer; test_plans.py has the plans."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parity import BATCH, LLAMA, SEQ, answer, batch, gradients_of, state_of
from shared import TABLES

from llmpar import Plan, Step, make_mesh

MIXED = "dp=2 fsdp=2 tp=2"
HEADS = dataclasses.replace(LLAMA, name="two KV heads", num_heads=8, num_kv_heads=2)


def curve(mesh: str):
    """Losses of 20 steps; the optimizer looks at whole rows and columns, and cuts by a global norm."""
    rule = optax.chain(optax.adafactor(1e-2, min_dim_size_to_factor=4), optax.clip_by_global_norm(0.1))
    step = Step(HEADS, Plan(mesh, zero=2), make_mesh(mesh), rule, clip=None)
    state, losses = state_of(step), []
    for number in range(20):
        state, metrics = step.run(state, jax.device_put(batch(number % 3), step.batch_sharding))
        losses.append(float(metrics["loss"]))
    assert jax.tree.map(lambda x: x.sharding, state) == step.shardings
    return np.array(losses)


@pytest.mark.long
def test_any_optax_optimizer_follows_the_same_curve_on_a_cut_state_with_copies_of_heads():
    """1e-4: float32 rounding, grown through 20 steps."""
    one = curve("dp=1")
    assert one[-1] < one[0] - 0.03
    np.testing.assert_allclose(curve("fsdp=2 tp=4"), one, rtol=0, atol=1e-4)


class OfOnes(Step):
    """Every gradient is 1: nothing is differentiated."""

    def gradients(self, params, batch):
        grads = jax.tree.map(jnp.ones_like, params)
        return grads, {"grad_norm": optax.tree.norm(grads)}


def test_a_gradient_longer_than_the_clip_is_cut_to_it_and_a_shorter_one_stays():
    """By plain gradient descent at a rate of 1, which moves the weights by what it is given."""
    length = LLAMA.num_params**0.5
    for clip, want in {0.5: 0.5, 2 * length: length}.items():
        step = OfOnes(LLAMA, Plan(), make_mesh("dp=1"), optax.sgd(1.0), clip)
        nothing = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), step.abstract_state)
        state, _ = step.run(jax.device_put(nothing, step.shardings), batch())
        found = math.sqrt(sum((np.asarray(w) ** 2).sum() for w in jax.tree.leaves(state.params)))
        assert found == pytest.approx(want, rel=1e-4) and state.step == 1


def test_of_no_target_there_is_no_gradient():
    """0 of 0 targets: not a mean that is no number."""
    silent = batch() | {"targets": np.full((BATCH, SEQ), -1, np.int32)}
    loss, norm, grads = answer(*gradients_of(LLAMA, Plan(MIXED)), silent)
    assert loss == norm == 0 and not any(np.any(g) for g in jax.tree.leaves(grads))


@functools.cache
def mixed_step(mesh: str = MIXED) -> Step:
    return Step(LLAMA, Plan(MIXED), make_mesh(mesh), optax.sgd(1e-3))


def changed(name: str, value) -> dict:
    """A batch with one other number, or of another kind."""
    found = batch()
    there = found[name].copy() if np.isscalar(value) else value
    if np.isscalar(value):
        there[-1, -1] = value
    return found | {name: there}


VOCAB = LLAMA.vocab_size
FOREIGN = [
    ("tokens", VOCAB, rf"tokens are int32 from \d+ to {VOCAB}, and the vocabulary has {VOCAB}; use integers"),
    ("tokens", -1, "tokens are int32 from -1 to "),
    ("targets", 99_999, "targets are int32 from .* to 99,999"),
    ("tokens", np.zeros((BATCH, SEQ)), "tokens are float"),
    ("loss_mask", np.zeros((BATCH, SEQ)), "the batch has loss_mask beside tokens"),
]


def test_tokens_of_another_vocabulary_are_refused_wherever_they_lie():
    """They would be taken for zeros; and a state that is not used up by it can be used."""
    step = mixed_step()
    state = state_of(step)
    for name, value, says in FOREIGN:
        here = changed(name, value)
        for given in (here, jax.device_put(here, step.batch_sharding)):
            for call, held in ((step.run, state), (step.evaluate, state.params)):
                with pytest.raises(ValueError, match=says):
                    call(held, given)
    kept = changed("targets", -100)  # what does not count
    assert np.isfinite(step.run(state, kept)[1]["loss"])


def test_a_state_that_a_step_used_up_is_refused_before_xla_dies_of_it():
    step = mixed_step()
    used = state_of(step)
    state, _ = step.run(used, batch())
    evaluate = lambda: step.evaluate(used.params, batch())
    reorder = lambda: step.to_model_order(used, donate=True)
    for call in (lambda: step.run(used, batch()), evaluate, reorder):
        with pytest.raises(ValueError, match="used up by the step before; keep the state that run returns"):
            call()
    assert int(step.run(state, batch())[0].step) == 2


@pytest.mark.parametrize("says, fields", TABLES["apart"], ids=str)
def test_a_step_refuses_fields_and_sizes_that_do_not_go_together(says, fields):
    """A command knows its sizes when it resolves the plan; a `Step` sees those of its batch."""
    mesh = fields.get("mesh", MIXED)
    step = Step(LLAMA, Plan(**{"mesh": mesh} | fields), make_mesh(mesh), optax.sgd(1e-3))
    odd = {name: value[:, :12] for name, value in batch().items()}
    with pytest.raises(ValueError, match=says):
        step.run.trace(step.abstract_state, odd)


def test_weights_of_64_bits_are_refused():
    with jax.enable_x64(True), pytest.raises(ValueError, match="JAX_ENABLE_X64 is on, but master weights"):
        mixed_step("!" + MIXED)  # no other has it
