"""A run that compiles more programs than is recorded fails; a run of a part does not."""

import costs
from costs import Cost


def test_a_table_is_read_as_it_was_written():
    rows = {
        "moe": (Cost(41, 60, 98.2, 101.5), "a new dispatch"),
        "server:browser": (Cost(1, 0, 9.0, 4.5), ""),
    }
    assert costs.read(costs.write(rows)) == rows
    kept = costs.FILE.read_text()
    assert costs.write(costs.read(kept)) == kept


def test_a_fifth_more_programs_is_seen():
    rows = {"moe": (Cost(40, 2000, 98.2, 101.5), ""), "few": (Cost(9, 100), "")}
    assert costs.grown(rows, {"moe": Cost(40, 2300), "few": Cost(9, 220), "new": Cost(1, 999)}) == []
    one, two = costs.grown(rows, {"moe": Cost(44, 2001), "few": Cost(9, 520)})
    assert one == "few compiles 520 programs, 420 more" and two == "moe compiles 2001 programs, 1 more"
    assert costs.grown(rows, {"moe": Cost(39, 9999), "few": Cost(9, 520)}) == [], "a part of a file"
