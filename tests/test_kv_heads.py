"""More ranks of tp than KV heads: copies of a head, whose gradients are summed, and nothing else changes."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from parity import BATCH, LLAMA, MOE, QWEN, SEQ, assert_same, batch, weights

from llmpar.mesh import make_mesh
from llmpar.plan import Plan
from llmpar.step import Step

LLAMA2 = dataclasses.replace(LLAMA, name="two KV heads", num_heads=8, num_kv_heads=2)
LLAMA1 = dataclasses.replace(LLAMA2, name="one KV head", num_kv_heads=1)
LLAMA4 = dataclasses.replace(LLAMA2, name="four KV heads", num_kv_heads=4)
QWEN2 = dataclasses.replace(QWEN, name="two KV heads, biases, norms", num_heads=8, num_kv_heads=2)
MOE2 = dataclasses.replace(MOE, name="experts, two KV heads", num_heads=8, num_kv_heads=2)


def test_each_copy_holds_its_head_and_the_sum_of_all_copies_gradients():
    """On tp=8 with 4 KV heads: device i has head i // 2, and of its gradient what one device has."""
    from parity import solo

    plan = Plan("tp=8")
    step = Step(LLAMA4, plan, make_mesh(plan.mesh), optax.adamw(1e-3))
    params = jax.device_put(weights(LLAMA4), step.shardings.params)
    grads, _ = jax.jit(step.gradients)(params, jax.device_put(batch(), step.batch_sharding))
    for w in "kv":
        want, got = (g["blocks"]["attention"][w] for g in (solo(LLAMA4)[1], grads))
        for shard in got.addressable_shards:
            head = shard.device.id // 2
            assert shard.data.shape == (2, 64, 1, 4) and shard.index[2] == slice(head, head + 1)
            assert np.abs(shard.data - want[:, :, head : head + 1]).max() < 1e-5 * np.abs(want).max()


def test_a_copy_that_is_left_out_of_the_sum_is_noticed():
    """The planted fault: the gradients of the second copy's query heads are lost. (To leave the sum out is no
    program: shard_map's types refuse it.)"""

    class Forgetful(Step):
        def _reduce(self, par, grads):
            first = jax.lax.axis_index("kv") == 0
            attention = grads["blocks"]["attention"]
            lost = {w: jax.numpy.where(first, attention[w], 0) for w in "kv"}
            blocks = grads["blocks"] | {"attention": attention | lost}
            return super()._reduce(par, grads | {"blocks": blocks})

    with pytest.raises(AssertionError, match="gradient of .*'attention'.*'k'"):
        assert_same(LLAMA4, Plan("tp=8"), step_class=Forgetful)


def refusal(config, plan, **sizes):
    with pytest.raises(ValueError) as raised:
        plan.check(config, BATCH, SEQ)
    return str(raised.value)


def test_what_cannot_be_is_refused_in_a_sentence():
    three = dataclasses.replace(LLAMA, num_heads=24, num_kv_heads=3)
    assert refusal(three, Plan("tp=4")) == (
        "KV heads 3 is not a multiple of tp = 4, nor tp of KV heads; make tp one of 1"
    )
    assert refusal(dataclasses.replace(LLAMA, num_heads=4, num_kv_heads=2), Plan("tp=8")).startswith(
        "heads 4 is not a multiple of tp = 8; make tp one of 1, 2"
    )
    said = refusal(LLAMA4, Plan("tp=8", reading="explicit"))
    assert said.startswith("reading='explicit' does not go with tp = 8 on 4 KV heads") and "manual" in said
    said = refusal(LLAMA2, Plan("tp=8 sp=2", context_parallel="ulysses"))
    assert said.startswith("context_parallel='ulysses' cuts the 1 query heads of a device by sp = 2")


def test_a_plan_for_a_model_is_told_in_the_notation():
    plan = Plan("dp=2 tp=8", tp_sequence=True).resolve(LLAMA4)
    assert str(plan.mesh) == "dp=2 tp=8" and plan.mesh.sizes["tp"] == 4 and plan.mesh.sizes["kv"] == 2
    assert str(plan.place("attention d k h")) == "d k/tp h"
    assert str(plan.place("attention d n h")) == "d n/tp,kv h"
    assert str(plan.life("attention d k h").finish) == "d k/tp h +dp +kv -> d k/tp h"
    assert str(plan.physical("attention b s d +n -> stream b s d")) == "b/dp s d +tp +kv -> b/dp s/tp,kv d"
    assert plan.resolve(LLAMA4) is plan and plan.resolve(LLAMA).mesh == Plan("dp=2 tp=8").mesh
    alone = Plan("tp=8", context_parallel="ulysses").resolve(LLAMA1)
    assert str(alone.place("attention b s k r h")) == "b s k r/kv h", "one head: all of tp are its copies"
    both = Plan("sp=2 tp=4", context_parallel="ulysses").resolve(LLAMA2)
    assert (
        str(both.physical("attention b s k r h -> queries b s k r h"))
        == "b s/sp k/tp r/kv h -> b s k/tp r/kv,sp h"
    )
    assert str(both.physical("attention b s k h -> keys b s k h").moves[0]) == "all-gather over sp on s"


@pytest.mark.parametrize("mesh", ["tp=8", "sp=2 tp=4"])
def test_a_cache_holds_each_copys_head(mesh):
    from test_decode import MORE, B, S, decoder, whole

    tokens = np.random.default_rng(4).integers(0, 256, (B, S + MORE)).astype(np.int32)
    for config in (LLAMA2, QWEN2):
        want, run = whole(config, tokens), decoder(config, Plan(mesh, zero=3 if "fsdp" in mesh else 0))
        for start, end in [(0, S), *((i, i + 1) for i in range(S, S + MORE))]:
            found = np.asarray(run(tokens[:, start:end]))
            assert np.abs(found - want[:, end - 1]).max() <= 1e-5 * np.abs(want).max()
        assert run.cache[0].addressable_shards[0].data.shape[3] == 1, "one head, and one copy of it"


def test_a_checkpoint_restores_onto_meshes_with_and_without_copies(tmp_path):
    from llmpar.training.checkpoint import Checkpoints

    steps = [
        Step(LLAMA2, Plan(m), make_mesh(m), optax.adamw(1e-3)) for m in ("tp=8", "fsdp=2 tp=2", "tp=4 dp=2")
    ]
    state = steps[0].init(3)
    state, _ = steps[0].run(state, jax.device_put(batch(), steps[0].batch_sharding))
    kept = jax.tree.map(np.asarray, state)
    Checkpoints(str(tmp_path)).save(1, state, LLAMA2)
    for step in steps[1:]:
        found = Checkpoints(str(tmp_path)).restore(step.abstract_state, LLAMA2)
        jax.tree.map(np.testing.assert_array_equal, kept, jax.tree.map(np.asarray, found))
        step.run(found, jax.device_put(batch(), step.batch_sharding))


@pytest.mark.parametrize("kind", ["adafactor", "clipped"])
def test_an_optimizer_counts_each_head_once(kind):
    make = {
        "adafactor": lambda: optax.adafactor(3e-3, min_dim_size_to_factor=4),
        "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(3e-3)),
    }[kind]
    losses = []
    for mesh in ("dp=1", "tp=8"):
        step = Step(LLAMA2, Plan(mesh, zero=0), make_mesh(mesh), make())
        state, told = step.init(0), []
        for i in range(4):
            state, metrics = step.run(state, jax.device_put(batch(i), step.batch_sharding))
            told.append(float(metrics["loss"]))
        losses.append(told)
    np.testing.assert_allclose(*losses, rtol=0, atol=2e-5)
