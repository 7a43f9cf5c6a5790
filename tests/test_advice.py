"""What the planner proposes to whoever stands on a mesh: each step is what the planner then answers."""

import dataclasses
import re

import pytest
from shared import HERE, ROOT, TABLES
from test_planner import question

from llmpar.plan.mesh_shape import AXES, parse_mesh
from llmpar.planner import planner
from llmpar.planner.advice import advice
from llmpar.planner.planner import MEMORY_ERROR, memory_verdict
from llmpar.predict.digits import about
from llmpar.predict.hardware import GIB

BY_HAND = {"tp_sequence": False, "remat": "none", "loss_chunks": 1}
LARGE = question("llama3-70b", 64, seq=4096)
STANDS = {
    "fsdp=8 tp=8": dataclasses.replace(LARGE, fixed=BY_HAND),  # does not fit
    "pp=4 fsdp=16": LARGE,
    "dp=64": question("llama3-8b", 64, seq=4096),  # replicas are too large
    "dp=3 fsdp=4": question("llama3-8b", 12, 16, 4096),  # refused
    "fsdp=2 ep=4": question("qwen3-30b-a3b", 8, 16, 4096, zero=1),
}


@pytest.mark.parametrize("mesh", STANDS)
def test_a_step_is_one_change_and_leads_to_what_it_says(mesh):
    q, shape = STANDS[mesh], parse_mesh(mesh)
    try:
        one = planner.on_mesh(q, shape)
    except ValueError:
        one = None
    found = sorted(filter(None, advice(q, shape, one)), key=lambda step: step.sequence_s)
    assert found
    for step in found:
        ((what, value),) = step.patch.items()
        there, other = shape, q
        if what == "mesh":
            there = parse_mesh(value)
            assert there.size == q.num_devices
            assert sum(there.sizes[axis] != shape.sizes[axis] for axis in AXES) == 2
        elif what == "batch_size":
            other = dataclasses.replace(q, batch_size=value)
        else:
            assert set(value) <= set(q.fixed) and set(value.values()) == {None}
            other = dataclasses.replace(q, fixed={k: v for k, v in q.fixed.items() if k not in value})
        reached = planner.on_mesh(other, there)
        assert step.candidate == reached and not reached.why_not
        assert step.text.endswith(f": {reached.total_bytes / GIB:.1f} GiB, {about(reached.time.step_s)}")
        assert step.sequence_s == reached.time.step_s / other.batch_size
        if one and not one.why_not:
            assert step.sequence_s < one.time.step_s / q.batch_size * (1 - planner.SAME)


def test_the_best_of_all_has_no_better_neighbour():
    q = LARGE
    first = planner.decide(q, keep=1).plans[0]
    assert first == planner.decide(q).plans[0]
    assert not any(advice(q, first.plan.mesh, first))


def test_the_band_is_that_of_compiled_plans():
    share = f"{MEMORY_ERROR:.0%}".replace("%", " %")
    rows = re.findall(rf"(\d+) of (\d+) within {share}", (HERE / "compiled.md").read_text())
    said = (ROOT / "llmpar/planner/planner.py").read_text()
    for some, least, words in ((rows[:3], 0.9, "plans that were compiled"), (rows, 0.85, "compiled plans")):
        inside, every = (sum(map(int, column)) for column in zip(*some, strict=True))
        assert f"{inside} of {every} {words}" in said and inside > least * every


@pytest.mark.parametrize("total, guessed, words", TABLES["sure"])
def test_a_verdict_is_as_sure_as_the_estimate(total, guessed, words):
    """``total``: percent of what a program may take, and how much of that is an estimate."""
    q = LARGE
    held = total / 100 * q.capacity_bytes
    parts = {"params": held * (1 - guessed), "grads": held * guessed / 4, "optimizer": 0.0, "total": held}
    said = memory_verdict(
        q, planner.Candidate(None, planner.UNPRICED, parts | {"activations": held * guessed * 3 / 4})
    )
    assert said.words == words and said.total_bytes == held
    assert said.high_bytes - held == pytest.approx(MEMORY_ERROR * guessed * held)
    assert held - said.low_bytes == pytest.approx(MEMORY_ERROR * guessed * held)
    assert said.capacity_bytes == q.capacity_bytes == q.capacity_bytes
    left, error = (100 - total) / 100 * q.capacity_bytes / GIB, MEMORY_ERROR * guessed * held / GIB
    near = f"{left:.1f} GiB free, and the estimate is ± {error:.1f} GiB"
    assert said.near == near * (words == "at the edge")
