"""Facts of facts.txt, an expression and its value; what cannot be, refused in a sentence (refusals.txt).

A part begins with the statements that give its names; a line is an expression, and its value or what the
refusal says; ``for names in TABLE:`` before it asks it of each row. Comments are about the lines below."""

import functools
import re

import pytest
from shared import CASES, HERE, TABLES  # noqa: F401 - the tables by their names

from llmpar.plan.mesh_shape import NotationError


def rows(name):
    """Each line with the statements of its part, once for each row of its table."""
    for part in (HERE / name).read_text().rstrip().split("\n\n"):
        names, *lines = (line for line in part.splitlines() if not line.startswith("# "))
        for line in lines:
            each = re.fullmatch(r"for (.*?) in (\S+): (.*)", line)
            expression, value = (each[3] if each else line).split(" ; ")
            if not each:
                yield pytest.param(names, "", expression, value, id=expression)
            for row in eval(each[2]) if each else ():
                given = f"{each[1]} = {row!r}"
                yield pytest.param(names, given, expression, value, id=f"{each[2]} {row}"[:120])


@functools.cache
def of(names):
    """What the statements of a part give."""
    exec(names, space := {})
    return space


@pytest.mark.parametrize("names, given, expression, value", rows("facts.txt"))
def test_a_fact_is_what_is_computed(names, given, expression, value):
    exec(given, space := of(names).copy())
    found, want = eval(expression, space), eval(value, space)
    assert found == (pytest.approx(want) if isinstance(want, float) else want)


@pytest.mark.parametrize("names, given, expression, says", rows("refusals.txt"))
def test_what_cannot_be_is_refused_in_a_sentence(names, given, expression, says):
    exec(given, space := of(names).copy())
    with pytest.raises(ValueError, match=says) as error:
        eval(expression, space)
    assert "\n" not in str(error.value) or isinstance(error.value, NotationError)
