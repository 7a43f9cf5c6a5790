"""Exercises of lesson 08 that are computed: orders written by hand."""

import re

from llmpar.lessons import Exercise
from llmpar.plan.schedules import from_text, make
from llmpar.plan.timetable import timetable


def _rows(text: str, stages: int, microbatches: int) -> list:
    """Return an order as lists of operations; refuse an illegal one, or another size."""
    if re.search(r"\bF\d", text) and not re.search(r"\bF0\b", text):
        raise ValueError("Microbatches count from 0, as stages do: F0 is missing.")
    order = from_text(text)
    if (order.num_stages, order.num_microbatches) != (stages, microbatches):
        raise ValueError(
            f"{stages} stages and {microbatches} microbatches were asked for, but there are"
            f" {order.num_stages} lines and {order.num_microbatches} microbatches"
        )
    timetable(order)
    return [[str(op) for op in row] for row in order.rows]


def one_f_one_b() -> Exercise:
    """Ask for 1F1B as text."""

    def observe(text):
        whole = re.sub(r"\bB(\d+) +W\1\b", r"B\1", text)  # B0 W0 is one backward, in two parts
        return _rows(text if "W" in whole else whole, 3, 4)

    return Exercise("core", str(make("1f1b", 3, 4)), observe=observe)


def game() -> Exercise:
    """Ask for the order that a player has reached: 4 stages, 4 microbatches, right with ZB-H1's bubble."""

    def observe(text):
        _rows(text, 4, 4)
        return max(timetable(from_text(text)).bubble, 3.0)

    return Exercise(
        "core",
        str(make("zb-h1", 4, 4)),
        observe=observe,
        counts=dict(reached=lambda bubble: dict(bubble=f"{bubble:g}")),
    )


def _better(level, best: str, limit: int, costs: tuple[float, float, float]) -> Exercise:
    """Judge an order of 3 stages and 5 microbatches: right is a bubble of at most 2 within the limit."""

    def observe(text):
        _rows(text, 3, 5)
        table = timetable(from_text(text), costs)
        return {"bubble": max(table.bubble, 2.0), "held": max(*table.peak_live(), limit)}

    return Exercise(level, best, observe=observe)


def third_of_the_bubble() -> Exercise:
    """Ask for an order with a third of 1F1B's bubble in its memory: ZB-H1, for one."""
    return _better("stretch", str(make("zb-h1", 3, 5)), 3, (1, 1, 1))


def between_h1_and_h2() -> Exercise:
    """Ask for an order with unequal costs and one more microbatch than 1F1B holds."""
    best = (
        "F0 F1 F2 F3 B0 W0 F4 B1 W1 B2 B3 W2 W3 B4 W4\n"
        "F0 F1 F2 B0 F3 B1 W0 F4 B2 B3 W1 W2 B4 W3 W4\n"
        "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 W2 W3 W4"
    )
    return _better("expert", best, 4, (1, 1.2, 0.8))
