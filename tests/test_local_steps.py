"""Workers that train apart and average every H steps: data parallelism, what is sent, who has what after."""

import dataclasses
import functools
import itertools
import shutil

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from parity import BATCH, LLAMA, MOE, SEQ, batch, by_arrow, name, predicted_by_arrow
from test_train import held_out, run

from llmpar import Plan, Step, make_mesh
from llmpar.inspect.census import census_hlo, compiled_memory, read_program
from llmpar.inspect.report import inspect_apart
from llmpar.plan.model_config import LoraConfig, OptimizerConfig
from llmpar.plan.places import fragment
from llmpar.predict.memory import argument_bytes, outer_bytes, parts_bytes
from llmpar.predict.traffic import outer_traffic
from llmpar.training.local_steps import LocalSteps
from llmpar.training.muon import muon

PLAN = Plan("dp=2 fsdp=2 tp=2")
LINEAR = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.05, momentum=0.9))


def full(seed: int):
    """A batch for reinforcement learning in which every token is a target: each worker has as many."""
    waves = np.sin(batch(seed)["tokens"].astype(np.float32))
    told = {"targets": np.abs(batch(seed)["targets"]), "advantages": waves, "logprobs": waves - 5.5}
    return batch(seed) | told


@functools.cache
def workers(every: int = 1, fragments: int = 1):
    outer = optax.sgd(1.0, momentum=0.0)  # a momentum that forgets at once, and is kept
    return LocalSteps(LLAMA, PLAN, make_mesh(PLAN.mesh), LINEAR, every, outer, None, fragments)


def flat(tree):
    return {path: np.asarray(w) for path, w in flatten_dict(tree, sep=".").items()}


def outer_census(local: LocalSteps, index: int = 0):
    """What the compiled outer step of a fragment sends; it is given what is predicted, to the byte."""
    compiled, text = read_program(local.lower(index))
    worker = dataclasses.replace(local.plan.worker, muon="none").resolve(local.config, "cpu")
    worker = argument_bytes(worker, BATCH, SEQ)
    momentum = outer_bytes(local.plan) - worker["params"]  # as large as the trained weights, cut as these are
    assert compiled_memory(compiled)["argument_bytes"] == 3 * momentum, "after, shared weights, momentum"
    return by_arrow(census_hlo(text, local.mesh))


def apart(one: dict, other: dict) -> float:
    return max(np.abs(one[path] - other[path]).max() for path in one)


def test_an_average_after_each_step_of_a_linear_optimizer_is_data_parallelism():
    local, whole = workers(), Step(LLAMA, PLAN, make_mesh(PLAN.mesh), LINEAR, clip=None)
    state, other = local.init(), whole.init()
    for number in range(3):
        state, _ = local.run(state, full(number))
        other, _ = whole.run(other, jax.device_put(full(number), whole.batch_sharding))
    got, want, start = map(flat, (state.outer.params, other.params, whole.init().params))
    assert apart(got, want) < 1e-6 < 1e-3 < apart(want, start)


def test_fragments_together_send_what_all_at_once_does_and_each_is_averaged_in_its_own_step():
    """Two fragments, each every four steps, two steps apart."""
    local, plan = workers(every=4, fragments=2), PLAN.resolve(LLAMA)
    parts = [outer_traffic(plan, 2, index) for index in (0, 1)]
    assert sum(part.total_bytes for part in parts) == outer_traffic(plan).total_bytes
    for index, part in enumerate(parts):
        assert part.total_bytes > 0 and outer_census(local, index) == predicted_by_arrow(part)
    state = local.init()
    for number, due in enumerate([None, 1, None, 0]):
        before = flat(state.outer.params)
        state, _ = local.run(state, full(number))
        after, own = flat(state.outer.params), [flat(worker.params) for worker in state.workers]
        rows = {} if due is None else fragment({path: len(w) for path, w in after.items()}, 2, due)
        for path, w in after.items():
            row, other = rows.get(path, slice(0)), np.ones(len(w), bool)
            other[row] = False
            assert np.array_equal(w[other], before[path][other]), path
            assert not w[row].size or not np.array_equal(w[row], before[path][row]), path
            assert all(np.array_equal(worker[path][row], w[row]) for worker in own), path
            assert other.sum() == 0 or not np.array_equal(own[0][path][other], own[1][path][other]), path


ADAPTED = dataclasses.replace(LLAMA, lora=LoraConfig(4))


@pytest.mark.parametrize(
    "config, plan, fragments",
    [
        (LLAMA, Plan("dp=8"), 2),
        (LLAMA, Plan("dp=4 sp=2", zero=1), 2),
        (LLAMA, Plan("pp=2 dp=2 fsdp=2", microbatches=2), 1),
        (LLAMA, Plan("dp=2 fsdp=2 tp=2", zero=2, muon="owner"), 2),
        (dataclasses.replace(LLAMA, num_kv_heads=2), Plan("dp=2 tp=4"), 1),
        (MOE, Plan("dp=2 ep=2 tp=2"), 2),
        (MOE, Plan("dp=2 fsdp=2 ep=2", zero=1), 1),
        (ADAPTED, Plan("dp=2 fsdp=4"), 2),
    ],
    ids=lambda x: str(getattr(x, "mesh", getattr(x, "name", x))),
)
def test_every_plan_sends_in_its_outer_steps_what_is_predicted(config, plan, fragments):
    rule = muon(1e-3, config) if plan.muon != "none" else LINEAR
    local = LocalSteps(config, plan, make_mesh(plan.mesh), rule, 2, fragments=fragments)
    for index in range(fragments):
        sent = outer_traffic(local.plan, fragments, index)
        assert sent.total_bytes > 0 and outer_census(local, index) == predicted_by_arrow(sent)


def test_inspect_shows_the_step_of_a_worker_and_over_dp_the_outer_step():
    shown = inspect_apart(Plan("dp=2 tp=2").resolve(LLAMA, "cpu", BATCH, SEQ), BATCH, SEQ, 4)
    of_dp = [row["arrow"] for row in shown["arrows"] if row["axis"] == "dp" and row["as_predicted"]]
    assert "difference ffn l d m" in of_dp and "one in 4 steps" in shown["detour"]
    assert all(row["predicted_bytes"] == row["compiled_bytes"] for row in shown["collectives"])


def train_to(stop: int, mesh: str, folder=None, tell=print, **more):
    """Train six steps, or to an earlier stop: loss by loss, of held-out text after six, and the weights."""
    given = OptimizerConfig(**dict(local_steps=4, fragments=2, warmup=1, learning_rate=1e-2) | more)
    steps, asked = itertools.count(1), dict(held_out=held_out(), eval_every=6, tell=tell)
    asked["stop"] = lambda: next(steps) == stop
    state, report = run(Plan(mesh), config=LLAMA, folder=folder, every=100, options=given, **asked)
    return report.losses, report.eval_losses, flat(state.params)


@pytest.mark.long
@pytest.mark.usefixtures("standard_promotion")
def test_a_run_goes_on_inside_a_period_and_on_another_mesh(tmp_path):
    """Momentum, moves since the last outer step and own optimizers come back, from the midst of a period."""
    losses, scores, params = train_to(0, "dp=2 tp=2", tell=(told := []).append)
    assert "after the last outer step of some layers workers learn for 2 of 6 steps more" in told[0]
    first, none, _ = train_to(3, "dp=2 tp=2", tmp_path)
    assert first == losses[:3] and not none
    shutil.copytree(tmp_path, other := tmp_path.with_name("other"))
    same, same_scores, same_params = train_to(0, "dp=2 tp=2", tmp_path)
    assert same == losses[3:] and same_scores == scores
    assert all(np.array_equal(same_params[path], w) for path, w in params.items())
    moved, _, moved_params = train_to(0, "dp=2 fsdp=4", other)
    np.testing.assert_allclose(moved, losses[3:], rtol=1e-5)
    assert apart(moved_params, params) < 1e-4 * max(np.abs(w).max() for w in params.values())
    with pytest.raises(ValueError, match=r"was made with workers 2 \(asked: 4\); ask for that"):
        train_to(0, "dp=4", other)
    with pytest.raises(ValueError, match="fragments, outer_rate of an outer optimizer, and local_steps is 0"):
        train_to(0, "dp=2", local_steps=0, outer_rate=0.5)


FEW = [PLAN, Plan("dp=4 sp=2", zero=1), Plan("pp=2 dp=2 fsdp=2", microbatches=2)]


@pytest.mark.parametrize("plan", [*FEW, Plan("dp=8", zero=2, microbatches=2, remat="block")], ids=name)
def test_what_a_worker_holds_is_what_the_plan_holds_and_the_outer_part(plan):
    """Part by part: sums over dp have no place of their own, so a worker's step is as large as the plan's."""
    plan = plan.resolve(LLAMA)
    worker = parts_bytes(plan.worker.resolve(LLAMA), BATCH // plan.mesh.dp, SEQ)
    outer = {"outer": outer_bytes(plan), "total": worker["total"] + outer_bytes(plan)}
    assert parts_bytes(plan, BATCH, SEQ, local_steps=True) == worker | outer and outer["outer"] > 0
