"""Pipelines in time: when a stage works, which order ends first, and what is called the bubble."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from llmpar.draw.charts import scale
from llmpar.draw.scene import (
    PAGE,
    SMALL,
    Group,
    Items,
    Line,
    Rect,
    Scene,
    Text,
    boxed,
    compose,
    fitting_text,
    legend,
    pixels,
    small_text,
    text_width,
    ticks,
)
from llmpar.plan.schedules import Op
from llmpar.plan.timetable import Timetable

ROW, _CELL, FLOOR, HELD = 58, 26, 48, 16
"""Pixels of a timeline: from stage to stage, an operation's height, from a stage's top to the foot of what it
holds, and the height of the most that any stage holds."""
SHORTEST, BAND_GAP = 34, 40
"""Pixels for the shortest operation, and between a part of a timeline and the one below."""


@dataclass(frozen=True)
class _Band:
    """The part of a timeline from time ``low`` to ``high``."""

    low: float
    high: float
    left: float
    wide: float

    def x(self, time: float) -> float:
        """Return the place of a time, in pixels; of one outside the part its nearest end."""
        inside = min(max(time, self.low), self.high)
        return self.left + self.wide * (inside - self.low) / (self.high - self.low)

    def live(self, stage: int, live: dict[float, float], most: float) -> Line:
        """Return what a stage holds over time, as an area: ``live`` microbatches from each time on."""
        floor = float(ROW * stage + FLOOR)
        now = max([(t, n) for t, n in live.items() if t <= self.low], default=(0, 0.0))[1]
        outline = [(self.left, floor)]
        for t, n in [
            (self.low, now),
            *((t, n) for t, n in live.items() if self.low < t < self.high),
        ]:
            outline += [(self.x(t), floor - HELD * v / most) for v in (now, n)]
            now = n
        outline += [(self.x(self.high), floor - HELD * now / most), (self.x(self.high), floor)]
        return Line(tuple(outline), "edge", 0.75, fill="activations")

    def wait(self, stage: int, other: int, starts) -> list:
        """Return an arrow from where a stage is stuck to what it waits for, at their times ``starts``."""
        if other == stage or not all(self.low <= t < self.high for t in starts):
            return []
        x, down = [self.x(t) + 0.5 * _CELL for t in starts], other > stage
        ends = (x[0], ROW * stage + _CELL * down), (x[1], ROW * other + _CELL * (not down))
        return [Line(ends, "pp-line", 2, head=True)]


def _live_over_time(row, last: str) -> dict[float, float]:
    """Return how many microbatches a stage holds, by the time from when on: from the start of F to the end of
    ``last``."""
    visits = sum(kind == "F" for _, _, kind, *_ in row) / max(1, len({u for *_, u, _ in row})) or 1
    steps = sorted(
        (s, 1) if kind == "F" else (e, -1) for s, e, kind, *_ in row if kind in ("F", last)
    )
    totals = accumulate(step for _, step in steps)
    return {t: n / visits for (t, _), n in zip(steps, totals, strict=True)}


def timeline(
    table, waiting=None, facts: bool = True, shortest: float = SHORTEST, marked=(), half: float = 1
) -> Scene:
    """Draw when each stage of a pipeline works; where there are backwards, below a stage's row the
    activations it holds.

    Of an order that gets stuck, ``waiting`` says what for: stage -> (the operations it has not run, the stage
    it waits for, what there). Operations named in ``marked``, as `Rect.op` names them, are outlined.
    Without ``facts`` the rows do not say how busy their stage is and what it holds at most; the words do. The
    ``shortest`` operation is so many pixels wide. Of a whole backward the first ``half`` is drawn as B.

    ``table`` is a :class:`~llmpar.plan.timetable.Timetable` or, per stage, rows of (start, end, kind,
    microbatch, chunk). A microbatch is held from the start of its F to the end of its B, or of its W where
    there is one.
    """
    title, stages = (
        (f"{table.schedule.name}: ", _rows(table)) if isinstance(table, Timetable) else ("", table)
    )
    waiting = waiting or {}
    done = [row[-1][1] if row else 0 for row in stages]
    kinds = {kind for row in stages for _, _, kind, *_ in row}
    last = "W" if "W" in kinds else "B"
    least = min((end - start for row in stages for start, end, *_ in row if end > start), default=1)
    left = [waiting[i][0] if i in waiting else () for i in range(len(stages))]
    cell = lambda t, k, op: (t + least * k, t + least * (k + 1), *op[:3], True)
    ahead = [
        [cell(t, k, op) for k, op in enumerate(row)] for t, row in zip(done, left, strict=True)
    ]
    span = max(row[-1][1] for row in [*stages, *ahead] if row)
    need, bottom = shortest * span / least, ROW * len(stages)
    # A long table goes on below, so that it stays legible on a slide; a tall one is made narrower instead.
    num_bands = max(1, min(round(need / 1000), 1100 // (bottom + BAND_GAP)))
    edge = text_width(f"stage {len(stages)}") + 10
    wide = min(1040, max(560, need / num_bands))
    # Without backwards no activation is ever let go, and the drawing is not about that.
    live = [_live_over_time(row, last) if "B" in kinds else {} for row in stages]
    most = max(max(h.values(), default=0) for h in live) or 1
    notes = [_busy_and_live(row, one, span) for row, one in zip(stages, live, strict=True)]
    items, whole = Items(), half if last == "B" else 1.0
    for k in range(num_bands):
        band = _Band(k * span / num_bands, (k + 1) * span / num_bands, edge, wide)
        part = _time(band.x, band.low, band.high, bottom)
        for i, row in enumerate(stages):
            part += [
                *_operations(i, [*row, *ahead[i]], band.x, ROW * i, _CELL, whole, True, marked),
                *([band.live(i, live[i], most)] if live[i] else []),
                small_text(edge - 10, ROW * i + 13, f"stage {i}", "end", "ink"),
            ]
            if i in waiting:
                _, other, what = waiting[i]
                starts = {one[2:5]: one[0] for one in ahead[other]}
                part += band.wait(i, other, (done[i], starts.get(what[:3], done[other])))
            elif k == 0 and facts and not waiting:
                x, ys = band.x(band.high) + 10, (ROW * i + 13, ROW * i + FLOOR - 8)
                part += [
                    small_text(x, *one, "start", "ink") for one in zip(ys, notes[i], strict=False)
                ]
        items.append(Group(tuple(part), 0, k * (bottom + BAND_GAP)))
    idle = 1 - sum(end - start for row in stages for start, end, *_ in row) / span / len(stages)
    circle = "; outlined: in a circle" if marked else ""
    key = [
        *_key(last == "W" or half < 1)[: None if "B" in kinds else 1],
        *[("activations", "activations held, in microbatches")] * any(live),
        *[("black", "bar: chunk 1 or later")] * any(chunk for row in stages for *_, chunk in row),
        *[("paper", f"has not run; arrow: waits for{circle}")] * bool(waiting),
    ]
    took = f"{span:g} time units, {idle:.1%} of them idle"
    title += f"stuck after {max(done):g} time units" if waiting else took
    waits = sorted((i, ops[0], other, what) for i, (ops, other, what) in waiting.items())
    lines = [
        f"stage {i} waits to run {op} for {what} on stage {other}" for i, op, other, what in waits
    ]
    lines = lines or [
        f"stage {i}: {_names(row)}; {', '.join(notes[i])}" for i, row in enumerate(stages)
    ]
    return compose(title, [items, legend(key, 900)], "\n".join(lines))


def _rows(table: Timetable) -> list[list[tuple]]:
    """Return a timetable as rows of (start, end, kind, microbatch, chunk), one for each stage."""
    each = zip(table.start, table.end, table.schedule.rows, strict=True)
    return [[(start, end, *op[:3]) for start, end, op in zip(*row, strict=True)] for row in each]


def _busy_and_live(row, live: dict[float, float], span: float) -> list[str]:
    """Return in words how busy a stage is, and how many microbatches it holds at most."""
    notes = [f"busy {sum(end - start for start, end, *_ in row) / span:.1%}"]
    return notes + [f"at most {max(live.values(), default=0):g} held"] * bool(live)


def _names(row) -> str:
    """Return the names of a stage's operations, of many the first."""
    names = [str(Op(*op)) for _, _, *op in row]
    return " ".join(names[:24]) + " …" * (len(names) > 24)


_WIDE = 770
"""Pixels of the time that is drawn on a page; on a slide, where letters are larger, it is less."""
WAITS, CORNER = ("edge", "a stage waits", "/"), ("edge", "has not begun, or has finished", ".")


def timelines(tables: Mapping[str, Timetable], letters: bool = True, until: float = 0) -> Scene:
    """Draw pipeline orders of the same work on one scale: which ends first, and which holds least.

    What is idle before an order's end is hatched. Where an order splits the backward, one that is whole has
    the colours of both its halves. Nothing from ``until`` on is drawn; a whole order of
    chunks has no numbers, which would be too small. Without ``letters`` rows are thin.
    """
    split = any(table.schedule.split_backward for table in tables.values())
    span = until or max(table.makespan for table in tables.values())
    tall = pixels(SMALL) + 4 if letters else 9.0
    left = 1.1 * max(map(text_width, tables)) + 34
    wide = _WIDE * (PAGE[SMALL] / pixels(SMALL)) ** 2
    x_of = lambda time: left + wide * min(time, span) / span
    right = left + wide + 14
    items: Items = [small_text(left - 8, -14, "stage", "end")] * letters
    lines, y = list[str](), 0.0
    for label, table in tables.items():
        bottom = y + (tall + 1) * table.schedule.num_stages
        middle, end, rows = (y + bottom) / 2, table.makespan, _rows(table)
        named = letters and (until > 0 or table.schedule.placement == "linear")
        half = 1.0
        if split and not table.schedule.split_backward:
            half = table.costs[1] / (sum(table.costs[1:]) or 1)
        items.append(Text(left - 34, middle, label, anchor="end", bold=True))
        for i in range(table.schedule.num_stages):
            top = y + (tall + 1) * i
            items += [small_text(left - 8, top + tall / 2, f"{i}", "end")] * letters
            idle = Rect(left, top, x_of(end) - left, tall, "paper", "edge", 0.5, "/")
            items += [idle] * (not until)
            items += _operations(i, rows[i], x_of, top, tall, half, named)
            begun = sum(at < span for at in table.start[i])
            names = " ".join(map(str, table.schedule.rows[i][:begun]))
            lines += [f"{label}, stage {i} begins {names}"] * bool(until)
        if until:
            items.append(Text(right, middle, "… and then?", SMALL))
        else:
            peaks, finished = table.peak_live(), f"finished at {end:g}"
            each = (
                ", ".join(f"{n:g}" for n in peaks) if len(peaks) < 5 else f"at most {max(peaks):g}"
            )
            items += [
                Line(((x_of(end), y - 3), (x_of(end), bottom + 2)), "ink", 3),
                Text(right, middle - 0.7 * pixels(SMALL), finished, SMALL, bold=True),
                Text(right, middle + 0.7 * pixels(SMALL), f"holds {each}", SMALL),
            ]
            lines.append(
                f"{label}: {finished}, {table.bubble_fraction:.1%} of it idle; microbatches held by"
                f" stage: {each}"
            )
        y = bottom + 12
    work = {table.ideal for table in tables.values()}
    if len(work) == 1 and not until:
        (x,), says = map(x_of, work), f"the work of a stage: {min(work):g}"
        items += [
            Line(((x, -6), (x, y - 6)), "accent", 1.5, True),
            small_text(x, -14, says, fill="accent"),
        ]
        lines.append(f"{says} time units")
    chunks = any(op.chunk for table in tables.values() for row in table.schedule.rows for op in row)
    key = [
        *_key(split),
        *[WAITS] * (not until),
        *[("black", "bar: second chunk of layers")] * chunks,
    ]
    title = f"{len(tables)} orders of the same work" + f": the first {until:g} time units" * bool(
        until
    )
    drawn = [[*_time(x_of, 0, span, y - 6), *items], legend(key, 1.2 * wide)]
    return compose(title, drawn, "\n".join(lines))


def bubbles(table: Timetable) -> Scene:
    """Draw the three things that are called a bubble, as areas of one timetable: idle time over a stage's
    work, over the whole, and the time that the critical stage waits between its first operation and its
    last."""
    end, work, spans = table.makespan, table.ideal, list(zip(table.start, table.end, strict=True))
    own = [row[1][-1] - row[0][0] for row in spans]
    critical = own.index(max(own))
    left, tall = text_width("critical stage") + 20, pixels(SMALL) + 4
    wide = _WIDE * (PAGE[SMALL] / pixels(SMALL)) ** 2
    x_of = lambda time: left + wide * time / end
    items, y, rows = Items(), 0.0, _rows(table)
    for i, (starts, ends) in enumerate(spans):
        first, last = x_of(starts[0]), x_of(ends[-1])
        for x, to, hatch in ((left, first, "."), (first, last, "/"), (last, x_of(end), ".")):
            items += [Rect(x, y, to - x, tall, "paper", "edge", 0.5, hatch)] * (to > x)
        items += [
            small_text(left - 10, y + tall / 2, f"stage {i}", "end", "ink"),
            *_operations(i, rows[i], x_of, y, tall, 1.0, letters=False),
        ]
        y += tall + 1
    items = [*_time(x_of, 0, end, y + 4), *items]
    idle, own_idle, begin = end - work, table.bubble, table.start[critical][0]
    lines, y = [], y + 44
    inside = f"stage {critical}, from its first operation to its last: {own_idle:g} idle"
    for name, start, over, waits, says in (
        ("over work", 0, work, idle, f"idle {idle:g} ÷ work {work:g} = {100 * idle / work:.3g}%"),
        ("over total", 0, end, idle, f"idle {idle:g} ÷ total {end:g} = {100 * idle / end:.3g}%"),
        ("critical stage", begin, 0, own_idle, inside),
    ):
        x, w = x_of(start), x_of(work) - left
        idle_part = Rect(x + w, y, x_of(waits) - left, 18, "paper", "edge", 0.75, "/")
        items += [
            small_text(left - 10, y + 9, name, "end", "ink"),
            *boxed(Rect(x, y, w, 18, "cell", "edge", 0.75), says),
            *([idle_part] if waits > 0 else []),
        ]
        if over:
            corners = ((x, y + 22), (x, y + 27), (x_of(over), y + 27), (x_of(over), y + 22))
            items.append(Line(corners, "ink", 1.5))
        lines.append(f"{name}: {says}")
        y += 44
    key = legend([*_key(table.schedule.split_backward), WAITS, CORNER], 1.2 * wide)
    return compose(f"Three bubbles of {table.schedule.name}", [items, key], "\n".join(lines))


def _operations(
    stage: int, row, x_of: Callable[[float], float], y: float, tall: float, half: float,
    letters: bool = True, marked=None,
) -> list:  # fmt: skip
    """Return a stage's operations as cells, as far as drawn; a bar is chunk 1 or later. Dashed are those that
    have not run. What of a whole backward is beyond the first ``half`` has W's colour. With ``marked``, the
    names of those to be outlined, operations have names by which they are dragged."""
    items = Items()
    for place, (start, end, kind, u, chunk, *unrun) in enumerate(row):
        x, w = x_of(start), x_of(end) - x_of(start)
        if w <= 0:
            continue
        op, name, fill = f"{stage}:{place}", str(Op(kind, u, chunk)), "paper" if unrun else kind
        did = "has not run" if unrun else f"{start:g} to {end:g} time units"
        look = ("ink", 2.5) if op in (marked or ()) else ("edge", 0.75)
        drag = "" if marked is None else op
        tip = f"stage {stage}, {name}: {did}"
        cell = Rect(x, y, w, tall, fill, *look, dash=bool(unrun), tip=tip, op=drag)
        items.append(cell)
        first = x_of(start + half * (end - start)) - x if fill == "B" else w
        if w - first > 0.5:
            left, right, top, low = x + first, x + w - 0.5, y + 0.5, y + tall - 0.5
            corners = (left, top), (right, top), (right, low), (left, low)
            items.append(Line(corners, "W", 0.25, fill="W"))
        names = (name, f"{kind}{u}", f"{u}") if letters else ()
        items += fitting_text(x + first / 2, y + tall / 2, first - 2, *names, on=fill)
        items += [Rect(x + 1, y + tall - 3, w - 2, 3, "black")] * (chunk > 0)
    return items


def _time(x_of: Callable[[float], float], low: float, high: float, y: float) -> list:
    """Return ticks of the time below ``y``, and grid lines."""
    drawn = scale(x_of, ticks(low, high, 8), y, "{:g}".format, y + 4)
    return [*drawn, small_text(x_of(low) - 12, y + 13, "time units", "end")]


def _key(split: bool) -> list[tuple[str, str]]:
    """Return what the colours of operations mean."""
    halves = [("B", "B gradients of inputs"), ("W", "W gradients of weights")]
    return [("F", "F forward"), *(halves if split else [("B", "B backward")])]
