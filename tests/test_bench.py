"""`make bench`: each group's rows can be measured, here at the smallest sizes. No test looks at a time."""

import json

import bench
import jax
import pytest

JAX = [pytest.mark.nightly]
BROWSER = [pytest.mark.browser, pytest.mark.nightly]
MARKS = dict.fromkeys(bench.GROUPS, JAX) | {"page": BROWSER, "attention": []}


@pytest.mark.parametrize("group", [pytest.param(group, marks=MARKS[group]) for group in bench.GROUPS])
def test_a_groups_rows_are_measured(group):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        rows = [bench.measured(row, 1) for row in bench.GROUPS[group](bench.LEAST)]
    for row in rows:
        values = {who: row[who] for who in bench.COLUMNS if who in row}
        numbers = {who: value for who, value in values.items() if not isinstance(value, str)}
        assert all(value > 0 for value in numbers.values()) and "ours" in values, row
        reasons = [value for value in values.values() if isinstance(value, str)]
        assert all(why.startswith("no ") for why in reasons), row
    assert len({row["name"] for row in rows}) == len(rows) and json.dumps(rows)
