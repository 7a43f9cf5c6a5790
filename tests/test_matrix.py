"""Every axis with every axis: all factorizations of 8 over the six axes, in every reading that they have,
with two pipeline orders and every way of attention.

Each is one compiled program: its loss and gradients equal one device's, and under Manual it sends what is
predicted, stage by stage. The default tests run a sample; `full_runs.md` tells when all of them ran.
Meshes of 6 to 64 devices, and primes other than 2, run in processes of their own.
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys

import conftest
import jax
import numpy as np
import optax
import pytest
from parity import BATCH, LLAMA, MOE, SEQ, arranged, batch, by_arrow, name, predicted_by_arrow, solo, weights
from test_random_plans import allowed, compare, held_back, plain

from llmpar import sequence_order
from llmpar.inspect.census import census_hlo, read_program
from llmpar.mesh import make_mesh
from llmpar.notation import AXES, MeshShape
from llmpar.plan import Plan
from llmpar.predict import traffic
from llmpar.step import Step
from llmpar.timetable import branch_shares

READINGS = "manual", "auto", "explicit"
ORDERS = "1f1b", "zb-h1"
ATTENTION = "ring", "ulysses", "gather"


def matrix():
    """(model, plan) of all that the models admit."""
    for config, sizes in itertools.product((LLAMA, MOE), itertools.product((1, 2, 4, 8), repeat=len(AXES))):
        mesh = MeshShape(*sizes)
        if mesh.size != 8 or mesh.ep > 1 and not config.experts:
            continue
        config = dataclasses.replace(config, num_layers=max(2, mesh.pp))
        orders = ORDERS if mesh.pp > 1 else ORDERS[:1]
        ways = ATTENTION if mesh.sp > 1 else ATTENTION[:1]
        readings = READINGS[:1] if mesh.pp > 1 else READINGS
        for order, way, reading in itertools.product(orders, ways, readings):
            more = {"schedule": order, "microbatches": mesh.pp} if mesh.pp > 1 else {}
            plan = Plan(mesh, reading=reading, context_parallel=way, **more)
            try:
                plan.check(config, BATCH, SEQ)
            except ValueError as refusal:
                assert "cuts the" in str(refusal) and way == "ulysses", refusal  # fewer heads than ranks
                continue
            yield config, plan


EVERY = {f"{config.name} {name(plan)}": (config, plan) for config, plan in matrix()}
SAMPLE = [*EVERY][3::37]


def check(config, plan: Plan) -> None:
    """One step, compiled once: what it computes, and what it sends."""
    step = Step(config, plan, make_mesh(plan.mesh), optax.chain(held_back(), optax.sgd(1e-3)), clip=None)
    compiled, text = read_program(step.lower(BATCH, SEQ))
    places = sequence_order.sequence_permutation(plan.sequence_order, SEQ, plan.mesh.sp)
    data = jax.device_put({k: x[:, places] for k, x in batch().items()}, step.batch_sharding)
    start = arranged(weights(config), step.layer_order)
    state = step.abstract_state._replace(params=start, step=np.int32(0))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), step.abstract_state.optimizer)
    state, metrics = compiled(jax.device_put(state._replace(optimizer=zeros), step.shardings), data)
    loss, grads = solo(config)
    assert abs(float(metrics["loss"]) - loss) <= 1e-5 * loss
    got = arranged(jax.tree.map(np.asarray, state.optimizer[0]), np.argsort(step.layer_order))
    for (path, want), found in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(got), strict=True):
        off = np.abs(found - want).max() / max(np.abs(want).max(), 1e-30)
        assert off <= 1e-5, f"{jax.tree_util.keystr(path)} is off by {off:.1e}"
    for stage in range(plan.mesh.pp) if plan.reading == "manual" else ():
        taken = branch_shares(plan.pipeline, config.num_layers, stage) if plan.pipeline else None
        want = predicted_by_arrow(traffic.step_traffic(step.plan, BATCH, SEQ, stage))
        assert by_arrow(census_hlo(text, step.mesh, taken)) == want, f"stage {stage}"


@pytest.mark.parametrize(
    "case", [case if case in SAMPLE else pytest.param(case, marks=pytest.mark.full) for case in EVERY]
)
def test_every_axis_goes_with_every_axis(case):
    check(*EVERY[case])


THREES = dict(num_heads=12, num_kv_heads=6, width=48, ffn_width=48, vocab_size=72, batch=12, seq=24)
PIPED = dict(microbatches=2, schedule="1f1b", num_layers=4)
WIDE = {
    "6 devices": dict(dp=3, tp=2, **THREES),
    "6 devices, tp=3": dict(sp=2, tp=3, tp_sequence=True, context_parallel="ring", **THREES),
    "12 devices": dict(dp=3, sp=2, tp=2, zero=1, **THREES),
    "12 devices, in stages": dict(pp=2, sp=2, tp=3, **PIPED, **THREES),
    "12 devices, experts": dict(fsdp=2, ep=3, sp=2, experts=True, num_experts=6, **THREES),
    "16 devices": dict(pp=2, fsdp=2, sp=2, tp=2, batch=16, **PIPED),
    "32 devices": dict(pp=2, dp=2, fsdp=2, sp=2, tp=2, batch=16, **PIPED),
    "32 devices, experts": dict(pp=2, fsdp=2, ep=2, sp=2, tp=2, experts=True, batch=16, **PIPED),
    "64 devices": dict(pp=2, dp=2, fsdp=2, ep=2, sp=2, tp=2, experts=True, num_experts=8, batch=16, **PIPED),
}


@pytest.mark.parametrize(
    "case", [case if int(case[:2]) < 16 else pytest.param(case, marks=pytest.mark.full) for case in WIDE]
)
def test_meshes_of_other_sizes_give_one_devices_answer(case):
    """Against the second implementation of `oracle`, two steps long."""
    more = {"LLMPAR_TEST_DEVICES": case.split()[0]}
    done = subprocess.run(
        [sys.executable, __file__, case], env=os.environ | more, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"loss", "gradients", "weights", "next loss"} <= found.keys() and "sent" not in found
    for what, off in found.items():
        assert off <= allowed({"dtype": "float32"}, what), (what, off)


if __name__ == "__main__":
    assert len(jax.devices()) == conftest.DEVICES
    print(json.dumps(compare(0, plain(**WIDE[sys.argv[1]]))))
