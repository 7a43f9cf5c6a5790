"""A file that compiles more programs than is recorded is named; a run of a part of it is not."""

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
    rows = {"moe": (Cost(40, 100, 98.2, 101.5), "")}
    assert costs.grown(rows, {"moe": Cost(40, 320), "new": Cost(1, 999)}) == []
    (sentence,) = costs.grown(rows, {"moe": Cost(44, 321)})
    assert sentence == "moe compiles 321 programs; recorded are 100"
    assert costs.grown(rows, {"moe": Cost(39, 321)}) == []
