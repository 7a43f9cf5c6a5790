"""Facts of facts.txt, an expression and its value; what cannot be, refused in a sentence (refusals.txt).

A part begins with the statements that give its names; a line is an expression, and its value or what the
refusal says. Comments say what the lines below them are about.
"""

import pytest
from shared import HERE

from llmpar.plan.mesh_shape import NotationError


def rows(name):
    """Each line with the statements of its part."""
    for part in (HERE / name).read_text().rstrip().split("\n\n"):
        names, *lines = (line for line in part.splitlines() if not line.startswith("# "))
        yield from (pytest.param(names, *line.split(" ; "), id=line.split(" ; ")[0]) for line in lines)


@pytest.mark.parametrize("names, expression, value", rows("facts.txt"))
def test_a_fact_is_what_is_computed(names, expression, value):
    exec(names, space := {})
    found, want = eval(expression, space), eval(value, space)
    assert found == (pytest.approx(want) if isinstance(want, float) else want)


@pytest.mark.parametrize("names, expression, says", rows("refusals.txt"))
def test_what_cannot_be_is_refused_in_a_sentence(names, expression, says):
    exec(names, space := {})
    with pytest.raises(ValueError, match=says) as error:
        eval(expression, space)
    assert "\n" not in str(error.value) or isinstance(error.value, NotationError)
