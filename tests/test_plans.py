"""Each plan of a covering array, compiled once: one device's gradients; sends and holds what is predicted."""

import dataclasses
import math
import random
import typing

import jax
import plans
import pytest
from parity import check

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


def by_lot(num=400):
    """Plans from all choices of the table: what the array has two by two meets in threes and fours."""
    rng = random.Random(2)
    yield from sorted({line for _ in range(num) if (line := plans.drawn(rng))})


@pytest.mark.full
@pytest.mark.parametrize("line", by_lot(), ids=str)
def test_so_does_a_plan_by_lot(line):
    check(*plans.build(line))


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
