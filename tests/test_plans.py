"""Each plan of a covering array, compiled once: one device's gradients; sends and holds what is predicted."""

import dataclasses
import itertools
import math
import random
import typing

import jax
import plans
import pytest
from parity import BATCH, LLAMA, MOE, SEQ, all_plans, check, name

from llmpar.plan import schedules
from llmpar.plan.mesh_shape import AXES, MeshShape
from llmpar.plan.plan import Plan


def array():
    """Each choice once by default, and each two of them on the gate."""
    few = plans.few()
    for line in plans.lines():
        marks = [pytest.mark.nightly] * (line in plans.AT_NIGHT) or [pytest.mark.long] * (line not in few)
        yield pytest.param(*plans.build(line), id=line, marks=marks)


@pytest.mark.accelerator
@pytest.mark.parametrize("config, plan", array())
def test_a_plan_gives_one_devices_answer_and_sends_and_holds_what_is_predicted(config, plan):
    # CPUs interpret accelerators' kernels, and of LoRA's temporaries no program is recorded.
    planned = plan.dtype == "float32" and plan.attention_kernel != "flash" and not config.lora
    check(config, plan, 2.5 if planned and jax.default_backend() == "cpu" else math.inf)


def every():
    """All meshes of eight devices in every mode, order and way of attention; ZeRO stages; all pipelines."""
    sizes = itertools.product((1, 2, 4, 8), repeat=len(AXES))
    for config, mesh in itertools.product((LLAMA, MOE), (MeshShape(*size) for size in sizes)):
        if mesh.size == 8 and (mesh.ep == 1 or config.experts):
            ways = ("ring", "ulysses", "gather") if mesh.sp > 1 else ("ring",)
            orders = ("1f1b", "zb-h1") if mesh.pp > 1 else ("",)
            modes = ("manual",) if mesh.pp > 1 else ("manual", "auto", "explicit")
            for order, way, mode in itertools.product(orders, ways, modes):
                more = {"schedule": order, "microbatches": mesh.pp} if order else {}
                plan = Plan(mesh, mode=mode, context_parallel=way, tp_sequence=mesh.tp > 1, **more)
                yield dataclasses.replace(config, num_layers=max(2, mesh.pp)), plan
    for plan, mode in itertools.product(all_plans(), ("manual", "auto", "explicit")):
        yield LLAMA, dataclasses.replace(plan, mode=mode)
    inside = "dp=2", "fsdp=2", "tp=2", "sp=2"
    for how in itertools.product(schedules.SCHEDULES, (2, 4), (1, 2, 4), inside, ("input", "residuals")):
        schedule, p, times, axis, saves = how
        if times * p * (axis in inside[:2]) <= 8:  # of 16 rows
            more = {"reshard_after_forward": False} if axis == "fsdp=2" and times == 1 else {}
            more |= {"context_parallel": "ulysses"} if axis == "sp=2" else {}
            mesh = f"pp={p} {axis}"
            plan = Plan(mesh, schedule=schedule, microbatches=times * p, stage_saves=saves, **more)
            yield dataclasses.replace(LLAMA, num_layers=8), plan
    for schedule, times in itertools.product(schedules.SCHEDULES, (1, 2)):
        yield (
            dataclasses.replace(LLAMA, num_layers=16),
            Plan("pp=8", schedule=schedule, microbatches=times * 8),
        )


def of(case):
    config, plan = case
    return f"{config.name} {name(plan)}"


@pytest.mark.full
@pytest.mark.parametrize("case", every(), ids=of)
def test_every_plan_does(case):
    config, plan = case
    try:
        plan.resolve(config, None, BATCH, SEQ)
    except ValueError as refusal:
        assert "cuts the" in str(refusal) and plan.context_parallel == "ulysses", refusal  # fewer heads
        return
    check(config, plan)


def test_every_field_has_a_row_and_every_choice_a_plan():
    met = [plans.parse(line) for line in plans.lines()]
    hints = typing.get_type_hints(Plan)
    for field in dataclasses.fields(Plan):
        if field.name == "mesh":
            continue
        found = {asked.get(field.name, field.default) for asked in met}
        choices = set(typing.get_args(hints[field.name])) if "Literal" in str(hints[field.name]) else set()
        missing = choices - found - plans.NOT_HERE.get(field.name, set())
        assert not missing and (len(found) > 1 or field.name in plans.NOT_HERE), f"{field.name} {missing}"
    assert set(plans.FIELDS) - {"model", "layers", *plans.AXES} <= {f.name for f in dataclasses.fields(Plan)}


def test_choices_of_random_plans_meet_in_the_array():
    """All but rare ones and the last few, two by two."""
    rng = random.Random(1)
    met = set.union(*(plans.pairs(plans.parse(line)) for line in set(plans.lines()) - plans.AT_NIGHT))
    some = set.union(*(plans.pairs(plans.parse(line)) for _ in range(15) if (line := plans.drawn(rng))))
    assert len(some) > 800 and len(some & met) > 0.97 * len(some)
