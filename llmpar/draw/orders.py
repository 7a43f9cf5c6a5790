"""Pipeline orders compared: who is through first, and what is called the bubble. :mod:`llmpar.draw` offers
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmpar.draw import scene
from llmpar.draw.scene import PAGE, SMALL, Line, Rect, Scene, Text, compose, fitting, pixels, small_text
from llmpar.timetable import Timetable

WIDE = 770
"""Pixels of the time that is drawn on a page; on a slide, where letters are larger, it is less."""
WAITS, CORNER = ("edge", "a stage waits", "/"), ("edge", "has not begun, or is through", ".")


def timelines(tables: Mapping[str, Timetable], letters: bool = True, until: float = 0) -> Scene:
    """Pipeline orders of the same work on one scale: who is through first, and who holds least.

    What is idle before an order's end is hatched. Where an order splits the backward, one that is whole has
    the colours of both its halves. With ``until`` only what begins before that time is drawn, and nothing is
    said of the end. Rows without ``letters`` are thin.
    """
    split = any(table.schedule.split_backward for table in tables.values())
    span = until or max(table.makespan for table in tables.values())
    tall, left = pixels(SMALL) + 4 if letters else 9.0, 1.1 * max(map(scene.text_width, tables)) + 34
    wide = WIDE * (PAGE[SMALL] / pixels(SMALL)) ** 2
    x_of, right = (lambda time: left + wide * min(time, span) / span), left + wide + 14
    items, lines, y = list[Any](), list[str](), 0.0
    items += [small_text(left - 8, -14, "stage", "end")] * letters
    for label, table in tables.items():
        bottom = y + (tall + 1) * table.schedule.num_stages
        middle, end = (y + bottom) / 2, table.makespan
        items.append(Text(left - 34, middle, label, anchor="end", bold=True))
        for i in range(table.schedule.num_stages):
            top = y + (tall + 1) * i
            items += [small_text(left - 8, top + tall / 2, f"{i}", "end")] * letters
            idle = Rect(left, top, x_of(end) - left, tall, "paper", "edge", 0.5, "/")
            items += [idle] * (not until) + _cells(table, i, x_of, top, tall, split, letters)
            begun = sum(at < span for at in table.start[i])
            names = " ".join(map(str, table.schedule.rows[i][:begun]))
            lines += [f"{label}, stage {i} begins {names}"] * bool(until)
        if until:
            items.append(Text(right, middle, "… and then?", SMALL))
        else:
            held = table.peak_live()
            each = ", ".join(f"{n:g}" for n in held) if len(held) < 5 else f"at most {max(held):g}"
            said, holds = f"through at {end:g}", f"holds {each}"
            items.append(Line(((x_of(end), y - 3), (x_of(end), bottom + 2)), "ink", 3))
            items.append(Text(right, middle - 0.7 * pixels(SMALL), said, SMALL, bold=True))
            items.append(Text(right, middle + 0.7 * pixels(SMALL), holds, SMALL))
            idle_share = f"{table.bubble_fraction:.1%} of it idle"
            lines.append(f"{label}: {said}, {idle_share}; microbatches held by stage: {each}")
        y = bottom + 12
    work = {table.ideal for table in tables.values()}
    if len(work) == 1 and not until:
        (x,), says = map(x_of, work), f"the work of a stage: {min(work):g}"
        items += [Line(((x, -6), (x, y - 6)), "accent", 1.5, True), small_text(x, -14, says, fill="accent")]
        lines.append(f"{says} time units")
    chunks = any(op.chunk for table in tables.values() for row in table.schedule.rows for op in row)
    key = [*_key(split), *[WAITS] * (not until), *[("black", "bar: second chunk of layers")] * chunks]
    title = f"{len(tables)} orders of the same work" + f": the first {until:g} time units" * bool(until)
    drawn = [[*_time(x_of, span, y - 6), *items], scene.legend(key, 1.2 * wide)]
    return compose(title, drawn, "\n".join(lines))


def bubbles(table: Timetable) -> Scene:
    """The three things that are called a bubble, as areas of one timetable.

    Idle time over a stage's work, idle time over the whole, and what the critical stage waits between its
    first operation and its last.
    """
    end, work, spans = table.makespan, table.ideal, list(zip(table.start, table.end, strict=True))
    own = [row[1][-1] - row[0][0] for row in spans]
    critical = own.index(max(own))
    left, tall = scene.text_width("critical stage") + 20, pixels(SMALL) + 4
    wide = WIDE * (PAGE[SMALL] / pixels(SMALL)) ** 2
    x_of = lambda time: left + wide * time / end
    items, y = list[Any](), 0.0
    for i, (starts, ends) in enumerate(spans):
        first, last = x_of(starts[0]), x_of(ends[-1])
        for x, to, hatch in ((left, first, "."), (first, last, "/"), (last, x_of(end), ".")):
            items += [Rect(x, y, to - x, tall, "paper", "edge", 0.5, hatch)] * (to > x)
        items.append(small_text(left - 10, y + tall / 2, f"stage {i}", "end", "ink"))
        items += _cells(table, i, x_of, y, tall, table.schedule.split_backward, False)
        y += tall + 1
    items = [*_time(x_of, end, y + 4), *items]
    idle, own_idle, begin = end - work, table.bubble, table.start[critical][0]
    lines, y = [], y + 44
    inside = f"stage {critical}, from its first operation to its last: {own_idle:g} idle"
    for name, start, over, waits, says in (
        ("over work", 0, work, idle, f"idle {idle:g} ÷ work {work:g} = {100 * idle / work:.3g}%"),
        ("over total", 0, end, idle, f"idle {idle:g} ÷ total {end:g} = {100 * idle / end:.3g}%"),
        ("critical stage", begin, 0, own_idle, inside),
    ):
        x, w = x_of(start), x_of(work) - left
        items.append(small_text(left - 10, y + 9, name, "end", "ink"))
        items.append(Rect(x, y, w, 18, "cell", "edge", 0.75))
        items += fitting(x + w / 2, y + 9, w, says)
        items += [Rect(x + w, y, x_of(waits) - left, 18, "paper", "edge", 0.75, "/")] * (waits > 0)
        if over:
            corners = ((x, y + 22), (x, y + 27), (x_of(over), y + 27), (x_of(over), y + 22))
            items.append(Line(corners, "ink", 1.5))
        lines.append(f"{name}: {says}")
        y += 44
    key = scene.legend([*_key(table.schedule.split_backward), WAITS, CORNER], 1.2 * wide)
    return compose(f"Three bubbles of {table.schedule.name}", [items, key], "\n".join(lines))


def _cells(
    table: Timetable, stage: int, x_of: Callable[[float], float], y: float, tall: float, split: bool, letters
) -> list:
    """A stage's operations as far as they are drawn; a whole backward in the colours of both halves where
    others are ``split``."""
    items: list[Any] = []
    whole = split and not table.schedule.split_backward
    share = table.costs[1] / ((table.costs[1] + table.costs[2]) or 1) if whole else 1.0
    row = zip(table.schedule.rows[stage], table.start[stage], table.end[stage], strict=True)
    for op, start, end in row:
        x, w = x_of(start), x_of(end) - x_of(start)
        if w <= 0:
            continue
        part = share if op.kind == "B" else 1.0
        tip = f"stage {stage}, {op}: {start:g} to {end:g} time units"
        items.append(Rect(x, y, w, tall, op.kind, "edge", 0.5, tip=tip))
        if part < 1:  # no line between the halves: the cell is one
            top, low, middle, to = y + 0.5, y + tall - 0.5, x + part * w, x + w - 0.5
            items.append(Line(((middle, top), (to, top), (to, low), (middle, low)), "W", 0.25, fill="W"))
        items += [Rect(x, y + tall - 2.5, w, 2.5, "black")] * (op.chunk > 0)
        names = (f"{op.kind}{op.microbatch}", f"{op.microbatch}") if letters else ()
        items += fitting(x + part * w / 2, y + tall / 2, part * w - 1, *names, on=op.kind)
    return items


def _time(x_of: Callable[[float], float], span: float, y: float) -> list:
    """Ticks of the time below ``y``, and grid lines."""
    lines = [Line(((x_of(t), -4), (x_of(t), y + 4)), "grid", 1) for t in scene.ticks(0, span, 8)]
    labels = [small_text(x_of(t), y + 13, f"{t:g}") for t in scene.ticks(0, span, 8)]
    return [*lines, *labels, small_text(x_of(0) - 12, y + 13, "time units", "end")]


def _key(split: bool) -> list[tuple[str, str]]:
    """What the colours of operations mean."""
    halves = [("B", "B gradients of inputs"), ("W", "W gradients of weights")]
    return [("F", "F forward"), *(halves if split else [("B", "B backward")])]
