"""What cannot be is refused in one sentence that says what would work: the expressions of refusals.txt.

A part begins with the imports of its names; a line is an expression, and what its refusal says.
"""

import pytest
from shared import HERE

from llmpar.plan.mesh_shape import NotationError

PARTS = [part.splitlines() for part in (HERE / "refusals.txt").read_text().split("\n\n")]
ROWS = [(names, *line.split(" ; ")) for names, *lines in PARTS for line in lines]


@pytest.mark.parametrize("names, expression, says", ROWS, ids=[row[1] for row in ROWS])
def test_what_cannot_be_is_refused_in_a_sentence(names, expression, says):
    exec(names, space := {})
    with pytest.raises(ValueError, match=says) as error:
        eval(expression, space)
    assert "\n" not in str(error.value) or isinstance(error.value, NotationError)
