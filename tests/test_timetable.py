"""Pipeline schedules: published bubbles and peaks, legality, and buffers that an executor can trust."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch_orders
from make_hf_fixtures import FIXTURES
from shared import CASES, TABLES
from shared import NUMBERS as ROWS

from llmpar.plan.lockstep import slots
from llmpar.plan.schedules import SCHEDULES, Op, from_text, make
from llmpar.plan.timetable import timetable
from llmpar.predict.bubbles import closed_forms
from llmpar.predict.memory import STEADY, most_slots

GRID = [(2, 2), (2, 8), (4, 4), (4, 8), (8, 8), (8, 32)]
COSTS = [(1, 1, 1), (1, 1.2, 0.8), (3, 5, 2), (1, 1, 0.5)]
EXACT = 1e-9  # sums of a few hundred float64 costs


def chunkings(name):
    return (2, 4) if name in ("interleaved", "interleaved-zb", "breadth-first", "circular") else (None,)


EVERY = [(name, p, m, v) for name in SCHEDULES for p, m in GRID for v in chunkings(name)]


@pytest.mark.parametrize("row", [i for i in ROWS if i.startswith("zb.t5.")])
@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZB-H2"])
def test_bubble_rate_is_that_of_the_zero_bubble_paper(row, name):
    given = ROWS[row]["inputs"]
    costs = given["T_F"], given["T_B"], given["T_W"]
    rate = timetable(make(name.lower(), given["p"], given["m"]), costs, given["T_comm"]).bubble_rate
    assert rate == pytest.approx(ROWS[row]["expected"][name], abs=ROWS[row]["tolerance"]["abs"])


def test_published_forms_hold_for_every_p_m_v():
    assumes = {  # what stands behind the sources in `closed_forms`
        "zb-v": lambda F, B, W: F == B == W,
        "dualpipe": lambda F, B, W: F == B,
        "dualpipev": lambda F, B, W: F == B,
        "zb-h1": lambda F, B, W: W <= F,
        "interleaved-zb": lambda F, B, W: W <= F,
        "zb-h2": lambda F, B, W: W <= F and 2 * W <= F + B,
    }
    checked = set()
    for name, p, m, v in EVERY:
        if name == "circular":
            continue
        for costs in COSTS:
            form = closed_forms(p, m, v or 1, costs)[name]
            if m < form.from_m or not assumes.get(name, lambda *_: True)(*costs):
                continue
            table = timetable(make(name, p, m, v), costs)
            assert table.bubble == pytest.approx(form.bubble, abs=EXACT), (name, p, m, v, costs)
            assert table.peak_live() == pytest.approx(form.peak_live), (name, p, m, v)
            checked.add(name)
    assert checked == set(SCHEDULES) - {"circular"}


@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith(("zb.t2.", "dualpipe."))])
def test_symbolic_rows_of_the_papers(row):
    # each expression as printed; DualPipe's B is the whole backward, and F&B is the sum without overlap
    printed = {
        "(p-1)(F+B+W)": lambda p, F, B, W: (p - 1) * (F + B + W),
        "(p-1)(F+B-W)": lambda p, F, B, W: (p - 1) * (F + B - W),
        "(p-1)(F+B-2W)": lambda p, F, B, W: (p - 1) * (F + B - 2 * W),
        "(PP-1)(F+B)": lambda p, F, B, W: (p - 1) * (F + (B + W)),
        "(PP/2-1)(F&B+B-3W)": lambda p, F, B, W: (p / 2 - 1) * ((F + B + W) + (B + W) - 3 * W),
        "p M_B": lambda p: p, "(2p-1) M_B": lambda p: 2 * p - 1, "PP": lambda p: p, "PP+1": lambda p: p + 1,
    }  # fmt: skip
    answer, name = ROWS[row]["expected"], ROWS[row]["inputs"]["schedule"].lower()
    for p, costs in ((4, (1, 1, 1)), (8, (2, 2, 1)), (8, (1, 1, 0.5))):
        table = timetable(make(name, p, 4 * p), costs)
        assert table.bubble == pytest.approx(printed[answer["bubble"]](p, *costs), abs=EXACT)
        assert max(table.peak_live()) == printed[answer.get("peak", answer.get("activations"))](p)
        assert f"{table.schedule.parameter_copies}x" == answer.get("params", "1x")


@pytest.mark.parametrize(("text", "said"), TABLES["orders_refused"])
def test_an_order_that_cannot_run_is_refused(text, said):
    with pytest.raises(ValueError, match="(?s)" + said) as error:
        timetable(from_text(text))
    assert str(error.value).count("Cycle") < 2
    assert timetable(from_text("F0 F1 B0 B1\nF0 B0 F1 B1")).makespan == 9


MUTILATIONS = ("drop", "twice", "swap", "number", "beyond")


@pytest.mark.parametrize("kind", MUTILATIONS)
def test_the_sentence_names_the_stage_and_the_cell_that_were_mutilated(kind):
    """Orders of any name and size with one operation lost, doubled, exchanged or numbered wrong."""
    rng = np.random.default_rng(MUTILATIONS.index(kind))
    refused = 0
    while refused < 25:
        name = str(rng.choice([n for n in SCHEDULES if n != "dualpipe"]))
        p, m = int(rng.integers(2, 5)), int(rng.integers(2, 5))
        schedule, stage = make(name, p, m), int(rng.integers(p))
        row = list(schedule.rows[stage])
        k, j = (int(i) for i in rng.integers(len(row), size=2))
        op, where = row[k]._replace(joined=False), f"stage {stage}"
        other = op._replace(microbatch=(op.microbatch + int(rng.integers(1, m))) % m)
        if kind == "drop":
            said = f"{where} never runs {row.pop(k)._replace(joined=False)};"
        elif kind == "twice":
            row, said = row[: k + 1] + row[k:], f"{where} runs {op} twice"
        elif kind == "swap":
            row[k], row[j], said = row[j], row[k], f" on {where}"
        elif kind == "number":
            row[k], said = other, f"{where} runs {other} twice"
        else:
            row[k] = op._replace(microbatch=m)
            said = f"microbatch {m} runs on {where} alone, and {op} is missing on {where}"
        rows = schedule.rows[:stage] + (tuple(row),) + schedule.rows[stage + 1 :]
        try:
            timetable(replace(schedule, rows=rows, num_microbatches=m + (kind == "beyond")))
            assert kind == "swap", "not every exchange is wrong"
        except ValueError as error:
            assert said in str(error) and (kind != "number" or f"write {op} for one" in str(error))
            refused += 1


TORCH = json.loads((FIXTURES / "torch_orders.json").read_text())["orders"]


@pytest.mark.parametrize("key", TORCH)
def test_torch_s_file_of_an_order_is_read_and_is_ours_cell_by_cell(key):
    """Or both refuse the sizes."""
    name, *sizes = key.removeprefix("lowered ").split()
    (p, m, v), text = map(int, sizes), TORCH[key]
    chunks = v if name in torch_orders.INTERLEAVED else None
    if text == torch_orders.REFUSED:
        with pytest.raises(ValueError, match=f"{m} is no multiple of {m // p}, use") as error:
            make(torch_orders.OURS[name], p, m, chunks)
        for size in map(int, re.findall(r"use (\d+) or (\d+)", str(error.value))[0]):
            timetable(make(torch_orders.OURS[name], p, size, chunks))
        return
    read = from_text(text)
    assert (read.num_stages, read.num_microbatches, read.num_chunks) == (p, m + (name == "1F1B"), v)
    if name == "1F1B":  # torch 2.13's table for 1F1B has no F0 on the last stage, and one microbatch more
        with pytest.raises(ValueError, match=f"{m} runs on .*{p - 1} alone, and F0 is missing"):
            timetable(read)
    elif name in torch_orders.OURS:
        ours = make(torch_orders.OURS[name], p, m, chunks)
        assert (read.rows, read.split_backward, read.routes) == (ours.rows, ours.split_backward, ours.routes)
        timetable(read)
    else:  # torch's LoopedBFS takes the microbatches of a backward in the opposite order
        assert timetable(read).makespan == timetable(make("breadth-first", p, m, v)).makespan


@pytest.mark.parametrize("text, said", CASES["torch_files_refused"])
def test_a_torch_file_that_is_wrong_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        timetable(from_text(text))


def test_text_and_order_are_the_same_thing():
    for schedule in (make(name, 4, 8) for name in SCHEDULES):
        assert replace(from_text(str(schedule), schedule.name), placement=schedule.placement) == schedule
    assert from_text("F0 . B0 # one stage").rows == ((Op("F", 0), Op("B", 0)),)
    with pytest.raises(ValueError, match=r"stage 1: 'X1' is no operation(.|\n)*F0 X1\n   \^\^"):
        from_text("F0 B0\nF0 X1")
    for text in ("", "F0 F999999999 B0", "F0 F1.999999999 B0"):
        with pytest.raises(ValueError, match="empty|cannot cover"):
            from_text(text)


def walk(table, buffers):
    """An executor in miniature: values are names, so that a slot misread or overwritten early is seen."""
    schedule, p = table.schedule, table.schedule.num_stages
    saved, residual, messages = ([{} for _ in range(p)] for _ in range(3))
    ran = 0
    for t, row in enumerate(table.ticks):
        out = [None] * p
        for s, (kind, u, c) in enumerate(row):
            if kind < 0:
                assert buffers.saved[t][s] == buffers.residual[t][s] == buffers.read[t][s] == -1
                continue
            route = schedule.route(u)
            k, read, ran = route.index((s, c)), buffers.read[t][s], ran + 1
            first, last = (k == 0 and kind == 0), (k == len(route) - 1 and kind == 1)
            x = messages[s][read] if read >= 0 else None
            here, left = buffers.saved[t][s], buffers.residual[t][s]
            if kind == 0:
                assert x == (None if first else ("F", u, k - 1))
                saved[s][here], out[s] = (u, k), ("F", u, k)
            elif kind == 1:
                assert x == (None if last else ("B", u, k + 1)) and saved[s][here] == (u, k)
                out[s] = ("B", u, k)
                if schedule.split_backward:
                    residual[s][left] = (u, k)
            else:
                assert saved[s][here] == residual[s][left] == (u, k)
        way = buffers.send[t]
        for s in range(p):
            inboxes = (s - 1, buffers.left, 1), (s + 1, buffers.right, -1), (s, buffers.keep, 0)
            for source, inbox, sign in inboxes:
                if inbox[t][s] >= 0:
                    assert way[source % p] == sign
                    messages[s][inbox[t][s]] = out[source % p]
    assert ran == sum(map(len, schedule.rows))
    held = [[len(slot) for slot in slots] for slots in (saved, residual, messages)]
    assert held == [buffers.num_saved, buffers.num_residual, buffers.num_messages]


OTHER_SIZES = [(name, p, 6, None) for name in SCHEDULES for p in (1, 2, 6) if (name, p) != ("dualpipe", 1)]


@pytest.mark.parametrize(("name", "p", "m", "v"), EVERY + OTHER_SIZES)
def test_an_executor_finds_every_value_in_its_slot(name, p, m, v):
    table = timetable(make(name, p, m, v))
    walk(table, slots(table))


@pytest.mark.parametrize("name", STEADY)
def test_orders_that_repeat_themselves_need_no_more_slots_for_more_microbatches(name):
    for p, v in (2, 2), (3, 4), (4, 3):
        many = make(name, p, 7 * p, v if "interleaved" in name else None)
        table = slots(timetable(many))
        assert most_slots(many) == tuple(map(max, (table.num_saved, table.num_residual, table.num_messages)))
