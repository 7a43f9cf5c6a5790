"""Exercises of lesson 08: what 1F1B holds, and orders written by hand."""

import re

from llmpar.exercises import Exercise
from llmpar.schedules import from_text, make
from llmpar.timetable import timetable


def held(stages: int = 16, microbatches: int = 64, stage: int = 3) -> Exercise:
    """Ask how many microbatches a stage of 1F1B holds at most."""
    wrong = dict(
        all_of_them=microbatches,
        first_stage=stages,
        before_the_pair=stages - stage - 1,
        other_end=stage + 1,
        stages_before=stage,
        one_more=stages - stage + 1,
    )
    return Exercise("core", min(microbatches, stages - stage), wrong)


def _rows(text: str, stages: int, microbatches: int) -> list | str:
    """An order as lists of operations, refused if it is illegal or has another size."""
    if re.search(r"\bF\d", text) and not re.search(r"\bF0\b", text):
        raise ValueError("Microbatches count from 0, as stages do: F0 is missing.")
    order = from_text(text)
    found = order.num_stages, order.num_microbatches
    if found != (stages, microbatches):
        asked = f"{stages} stages and {microbatches} microbatches"
        raise ValueError(
            f"{asked} were asked for, but there are {found[0]} lines and {found[1]} microbatches"
        )
    timetable(order)
    return [[str(op) for op in row] for row in order.rows]


def _ahead(stages: int, microbatches: int, more: int = 0, all_alike: int = 0) -> str:
    """1F1B with other numbers of forwards before the first pair."""
    rows = []
    for i in range(stages):
        ahead = min(all_alike or stages - i - 1 + more, microbatches)
        row = [f"F{u}" for u in range(ahead)]
        for u in range(microbatches):
            row += [f"F{ahead + u}"] * (ahead + u < microbatches) + [f"B{u}"]
        rows.append(" ".join(row))
    return "\n".join(rows)


def one_f_one_b(stages: int = 3, microbatches: int = 4) -> Exercise:
    """Ask for 1F1B as text."""
    solution = str(make("1f1b", stages, microbatches))
    serial = "\n".join([" ".join(f"F{u} B{u}" for u in range(microbatches))] * stages)
    wrong = dict(
        gpipe=str(make("gpipe", stages, microbatches)),
        serial=serial,
        one_more_ahead=_ahead(stages, microbatches, more=1),
        all_alike=_ahead(stages, microbatches, all_alike=stages - 1),
    )
    return Exercise("core", solution, wrong, observe=lambda text: _rows(text, stages, microbatches))


def _eager(stages: int, microbatches: int) -> str:
    """1F1B in which each W follows its B at once."""
    rows = make("1f1b", stages, microbatches).rows
    return "\n".join(
        " ".join(f"{op} W{op.microbatch}" if op.kind == "B" else str(op) for op in row) for row in rows
    )


def _better(level, best: str, limit: int, costs: tuple[float, float, float], **wrong: str):
    """An order is judged by its bubble and what it holds; whoever has a bubble of at most 2 within the limit
    is right."""

    def observe(text):
        _rows(text, 3, 5)
        table = timetable(from_text(text), costs)
        return {"bubble": max(table.bubble, 2.0), "held": max(*table.peak_live(), limit)}

    return Exercise(level, best, wrong, observe=observe)


SERIAL = "\n".join([" ".join(f"F{u} B{u} W{u}" for u in range(5))] * 3)


def third_of_the_bubble() -> Exercise:
    """Ask for an order with a third of 1F1B's bubble in its memory: ZB-H1, for one."""
    return _better(
        "stretch",
        str(make("zb-h1", 3, 5)),
        3,
        (1, 1, 1),
        whole_backward=str(make("1f1b", 3, 5)),
        w_at_once=_eager(3, 5),
        too_much_held=str(make("zb-h2", 3, 5)),
        gpipe=str(make("gpipe", 3, 5)),
        serial=SERIAL,
    )


def between_h1_and_h2() -> Exercise:
    """Ask for an order with unequal costs and one more microbatch than 1F1B holds."""
    best = (
        "F0 F1 F2 F3 B0 W0 F4 B1 W1 B2 B3 W2 W3 B4 W4\n"
        "F0 F1 F2 B0 F3 B1 W0 F4 B2 B3 W1 W2 B4 W3 W4\n"
        "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 W2 W3 W4"
    )
    return _better(
        "expert",
        best,
        4,
        (1, 1.2, 0.8),
        too_little_held=str(make("zb-h1", 3, 5)),
        too_much_held=str(make("zb-h2", 3, 5)),
        w_at_once=_eager(3, 5),
        whole_backward=str(make("1f1b", 3, 5)),
        serial=SERIAL,
    )
