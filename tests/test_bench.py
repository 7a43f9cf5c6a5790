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


def test_a_ratio_is_taken_round_by_round_and_what_fails_says_why():
    turns = {"plain JAX": iter([9.0, 2.0, 4.0]), "ours": iter([9.0, 4.0, 2.0])}
    row = "x", "CPU s", {who: turn.__next__ for who, turn in turns.items()} | {"torch": "no torch"}
    assert bench.measured(row, 2) == {
        "name": "x", "unit": "CPU s", "plain JAX": 3.0, "ours": 3.0, "torch": "no torch", "best": 1.25
    }  # fmt: skip
    assert bench.worse("tokens/s", 1.0, 2.0) == bench.worse("s", 2.0, 1.0) == 2
    assert bench.measured(("x", "s", {"ours": lambda: 1 / 0}), 2)["ours"].startswith("ZeroDivisionError")
