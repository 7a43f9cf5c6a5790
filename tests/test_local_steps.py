"""Workers that train apart and average every H steps: when that is data parallelism, what it sends, and who
has what after an outer step."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from parity import BATCH, LLAMA, SEQ, batch, by_arrow, predicted_by_arrow

from llmpar.inspect.census import census_hlo, read_program
from llmpar.parallel.mesh import make_mesh
from llmpar.plan.plan import Plan
from llmpar.predict.traffic import outer_traffic, step_traffic
from llmpar.training.local_steps import LocalSteps
from llmpar.training.step import Step

PLAN = Plan("dp=2 fsdp=2 tp=2")
LINEAR = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.05, momentum=0.9))


def full(seed: int):
    """A batch in which every token is a target: each worker has as many."""
    return {**batch(seed), "targets": np.abs(batch(seed)["targets"])}


@functools.cache
def workers(rule=LINEAR, every: int = 1, plan: Plan = PLAN):
    return LocalSteps(LLAMA, plan, make_mesh(plan.mesh), rule, every, optax.sgd(1.0), clip=None)


def flat(tree):
    return {path: np.asarray(w) for path, w in flatten_dict(tree, sep=".").items()}


def after_three(local: LocalSteps):
    """The shared weights after three steps, and those of data parallelism."""
    rule, plan = local.steps[0].optimizer, local.plan.requested
    whole = Step(LLAMA, plan, make_mesh(plan.mesh), rule, clip=None)
    state, other = local.init(), whole.init()
    for number in range(3):
        state, _ = local.run(state, full(number), number)
        other, _ = whole.run(other, jax.device_put(full(number), whole.batch_sharding))
    return flat(state.shared), flat(other.params), flat(whole.init().params)


def apart(one: dict, other: dict) -> float:
    return max(np.abs(one[path] - other[path]).max() for path in one)


def test_an_average_after_each_step_of_a_linear_optimizer_is_data_parallelism():
    got, want, start = after_three(workers())
    assert apart(got, want) < 1e-6 < 1e-3 < apart(want, start)


@pytest.mark.long
def test_of_adam_it_is_not():
    got, want, _ = after_three(workers(optax.adam(1e-3), plan=Plan("dp=2")))
    assert apart(got, want) > 1e-3


def test_the_workers_send_what_is_predicted_and_nothing_over_dp_between_outer_steps():
    """Two programs. The bytes over dp, of a step in the mean, fall by the number of steps between."""
    local = workers()
    step, state = local.steps[1], local.init()
    found = by_arrow(census_hlo(read_program(step.lower(BATCH // 2, SEQ))[1], step.mesh))
    worker = PLAN.resolve(LLAMA).worker.resolve(LLAMA)
    assert found == predicted_by_arrow(step_traffic(worker, BATCH // 2, SEQ))
    assert not any("dp" in axes.split(",") for axes, *_ in found)
    outer = local.outer_step.lower(local.stack(state), state.shared, state.outer)
    plan = PLAN.resolve(LLAMA)
    sent = predicted_by_arrow(outer_traffic(plan))
    assert by_arrow(census_hlo(read_program(outer)[1], local.mesh)) == sent
    block = sum(w.size for w in jax.tree.leaves(state.shared)) / 4  # fsdp and tp cut most
    assert 4 * block < outer_traffic(plan).total_bytes < 1.2 * 4 * block


@pytest.mark.parametrize(
    "plan, every, says",
    [
        (Plan("fsdp=2"), 10, "dp=1 workers in the mode manual, .*; use dp=2 or more"),
        (Plan("dp=2", mode="auto"), 10, "dp=2 workers in the mode auto, .* mode='manual'"),
        (Plan("dp=2"), 0, "joined every 0 steps; use .* 1 step or more"),
    ],
)
def test_what_are_no_workers_is_refused(plan, every, says):
    with pytest.raises(ValueError, match=says):
        LocalSteps(LLAMA, plan, make_mesh(plan.mesh), LINEAR, every)


def test_a_worker_has_the_plan_without_its_axis():
    assert PLAN.resolve(LLAMA).worker == dataclasses.replace(PLAN, mesh=Plan("fsdp=2 tp=2").mesh)
