"""More ranks of tp than KV heads: copies of a head, whose gradients are summed, and nothing else changes."""

import dataclasses

import jax
import numpy as np
import optax
from parity import LLAMA, batch, solo, state_of, weights

from llmpar.parallel.mesh import make_mesh
from llmpar.plan.plan import Plan
from llmpar.training.step import Step

LLAMA2 = dataclasses.replace(LLAMA, name="two KV heads", num_heads=8, num_kv_heads=2)
LLAMA4 = dataclasses.replace(LLAMA2, name="four KV heads", num_kv_heads=4)


def test_each_copy_holds_its_head_and_the_sum_of_all_copies_gradients():
    """On tp=8 with 4 KV heads: device i has head i // 2, and of its gradient what one device has."""
    plan = Plan("tp=8")
    step = Step(LLAMA4, plan, make_mesh(plan.mesh), optax.adamw(1e-3))
    params = jax.device_put(weights(LLAMA4), step.shardings.params)
    grads, _ = jax.jit(step.gradients)(params, jax.device_put(batch(), step.batch_sharding))
    for w in "kv":
        want, got = (g["blocks"]["attention"][w] for g in (solo(LLAMA4)[1], grads))
        for shard in got.addressable_shards:
            head = shard.device.id // 2
            assert shard.data.shape == (2, 64, 1, 4) and shard.index[2] == slice(head, head + 1)
            error = np.abs(np.asarray(shard.data) - want[:, :, head : head + 1]).max()
            assert error < 1e-5 * np.abs(want).max()


def test_a_checkpoint_restores_onto_meshes_with_and_without_copies(tmp_path):
    from llmpar.training.checkpoint import Checkpoints

    many, few = (Step(LLAMA2, Plan(m), make_mesh(m), optax.adamw(1e-3)) for m in ("tp=8", "fsdp=2 tp=2"))
    state = state_of(many)
    Checkpoints(str(tmp_path)).save(1, state, LLAMA2)
    found = Checkpoints(str(tmp_path)).restore(few.abstract_state, LLAMA2)
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(np.asarray, x) for x in (state, found)))
    assert jax.tree.map(lambda x: x.sharding, found) == few.shardings
