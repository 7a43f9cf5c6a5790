"""Curves: measured points and what a model says of them. :mod:`llmpar.draw` offers them."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

from llmpar.draw.scene import (
    BODY,
    LIGHT,
    Items,
    Line,
    Rect,
    Scene,
    Text,
    compose,
    on_paper,
    pixels,
    small_text,
    text_width,
)
from llmpar.draw.scene import ticks as round_numbers
from llmpar.predict.goodput import FailingRun, best_interval, goodput

_WIDE, TALL, DOT = 500, 240, 4.5
"""Pixels of the plot, and half of a dot."""


def curves(
    lines, ticks, x: str, y: str, *, low: float = 0, high: float | None = None, percent: bool = False,
    levels=None, marks=(), title: str = "", log: bool = False, text=None, wide: float = _WIDE,
) -> Scene:  # fmt: skip
    """Draw curves over equally spaced ``ticks``; each one's name stands at its end, in its colour.

    A line is (name, values, role of its colour, marker, dashed). ``values`` are one for each tick, or a dict
    of place: value, where 0 is the first tick and 1 the second; at None or nan the line is broken. Markers
    are ``o``, ``s``, ``^`` or None. ``marks`` are (place, text) of dashed uprights. The axis goes from
    ``low`` to ``high``, by powers of ten if ``log``, with labels at ``levels``; ``text`` says a value. The
    plot is ``wide`` pixels, or as many as its ticks need.
    """
    say = text or ("{:.0%}" if percent else "{:.3g}").format
    by_place = lambda values: dict(values if isinstance(values, Mapping) else enumerate(values))
    ink = lambda role: f"{role}-line" if f"{role}-line" in LIGHT else role
    rows = [
        (name, sorted(by_place(values).items()), ink(color), *look)
        for name, values, color, *look in lines
    ]
    known = lambda value: value is not None and math.isfinite(value)
    places = [place for _, row, *_ in rows for place, _ in row] + [len(ticks) - 1, 1]
    values = [value for _, row, *_ in rows for _, value in row if known(value)] or [1.0]
    low = (low or min(values)) if log else low
    high = high or max([*values, *(levels or ())]) + (not log) * 0.05 * (max(values) - low) or 1.0
    if levels is None and log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        low, high, levels = 10.0 ** powers[0], 10.0 ** powers[-1], [10.0**power for power in powers]
    levels = round_numbers(low, high) if levels is None else levels
    wide = max(wide, (len(ticks) - 1) * (max(text_width(f"{t}", "small") for t in ticks) + 12))
    x_of = lambda place: wide * place / max(places)
    height = math.log10 if log else float
    y_of = lambda value: TALL * (height(high) - height(value)) / (height(high) - height(low))
    items: list[Any] = []
    for level in levels:
        items += [
            Line(((-4, y_of(level)), (wide, y_of(level))), "grid", 1),
            small_text(-8, y_of(level), say(level), "end"),
        ]
    for i, tick in enumerate(ticks):
        items += [
            Line(((x_of(i), TALL), (x_of(i), TALL + 4)), "edge", 1),
            small_text(x_of(i), TALL + 14, f"{tick}"),
        ]
    items += [Line(((0, 0), (0, TALL), (wide, TALL)), "edge", 1.5), *_uprights(marks, x_of)]
    top = min(item.box[1] for item in items) - 12
    items += [
        small_text(-8, top, y, "start", "ink"),
        small_text(wide / 2, TALL + 36, x, fill="ink"),
    ]
    ends, texts = [], []
    for name, row, color, marker, dashed in rows:
        points = [(x_of(place), y_of(value)) if known(value) else None for place, value in row]
        items += _curve(points, color, marker, dashed)
        ends += [(up, right, name, color) for right, up in list(filter(None, points))[-1:]]
        seen = [(place, value) for place, value in row if known(value)]
        at = [
            (f"{ticks[int(place)]}: ", v) for place, v in seen if place == int(place) < len(ticks)
        ]
        at = at or [("", value) for _, value in seen]
        texts.append(
            f"{name}: " * bool(name) + ", ".join(f"{tick}{say(value)}" for tick, value in at[:12])
        )
    lowest = math.inf
    # names that end together stand apart
    for end, right, name, color in sorted(ends, reverse=True):
        lowest = min(end, lowest - 1.3 * pixels(BODY))
        label = Text(right + 12, lowest, name, fill=color, bold=True)
        items += on_paper(label) if right < wide else [label]
    texts += [f"marked: {what}" for _, what in marks]
    return compose(title or f"{y} over {x}", [items], "\n".join([f"{y} over {x}", *texts]))


def _uprights(marks, x_of) -> list:
    """Return dashed uprights with their texts above the plot, in as many rows as they need."""
    items, free, up = Items(), -math.inf, 0.0
    for place, what in sorted(marks):
        x, wide = x_of(place), text_width(what, "small")
        up = up + pixels("small") + 3 if x - wide / 2 < free else 0.0
        free = x + wide / 2 + 8
        items += [
            Line(((x, -3), (x, TALL)), "soft", 1.5, dash=True),
            small_text(x, -12 - up, what, fill="ink"),
        ]
    return items


def _curve(points, color: str, marker: str | None, dashed: bool) -> list:
    """Return a curve through points, broken at None, with a marker at each; a point alone is a dot."""
    items = Items()
    for known, part in itertools.groupby(points, lambda point: point is not None):
        piece = list(part) if known else []
        if len(piece) > 1:
            items.append(Line(tuple(piece), color, 2.5, dashed))
        for x, y in piece if marker or len(piece) == 1 else ():
            corners = (x - 6, y + 5), (x + 6, y + 5), (x, y - 6)
            round_off = 0 if marker == "s" else DOT
            dot = Rect(x - DOT, y - DOT, 2 * DOT, 2 * DOT, color, radius=round_off)
            items.append(Line(corners, color, 1, fill=color) if marker == "^" else dot)
    return items


def loss_curve(losses, reference=None) -> Scene:
    """Draw the loss per step, in nats per token; ``reference`` is another curve, drawn dashed."""
    each = {"loss": list(losses)} | (
        {"reference": list(reference)} if reference is not None else {}
    )
    finite = [x for curve in each.values() for x in curve if math.isfinite(x)] or [0.0]
    last = max(2, *map(len, each.values())) - 1
    steps = [int(t) for t in round_numbers(0, last, 6) if t == int(t)]
    apart = steps[1] - steps[0]
    pad = 0.05 * (max(finite) - min(finite)) or 0.5
    rows, lines = [], []
    for name, curve in each.items():
        look = ("ink", None, True) if name == "reference" else ("measured", None, False)
        rows.append((name, {i / apart: loss for i, loss in enumerate(curve)}, *look))
        ends = dict.fromkeys(f"{loss:.3f}" for loss in curve if math.isfinite(loss))
        course = " to ".join([*ends][:: max(1, len(ends) - 1)]) or "nan"
        lost = [i for i, loss in enumerate(curve) if not math.isfinite(loss)]
        lines.append(
            f"{name}: {course} nats/token over {len(curve):,} step{'s' * (len(curve) != 1)}"
        )
        lines[-1] += f"; not finite at step {' '.join(map(str, lost))}" * bool(lost)
    drawn = curves(
        rows, steps, "step", "loss (nats/token)", low=min(finite) - pad, high=max(finite) + pad
    )
    return compose("Training loss", [[drawn.items[0].items[1]]], "\n".join(lines), lines)


def failures(jobs: Mapping[str, FailingRun]) -> Scene:
    """Draw the `goodput` of each job over the interval, from 1 minute on and twice as long from tick to tick;
    the dashed curve connects the best intervals."""
    lines, best = list[Any](), dict[float, float]()
    colors = itertools.cycle(f"{axis}-line" for axis in ("dp", "fsdp", "sp", "tp", "ep", "pp"))
    for (name, job), color in zip(jobs.items(), colors, strict=False):
        places = [n / 4 for n in range(4 * 9 + 1) if 60 * 2 ** (n / 4) >= job.write_s]
        shares = {place: goodput(job, 60 * 2**place) for place in places}
        lines.append((name, shares, color, None, False))
        best[max(0.0, math.log2(best_interval(job) / 60))] = goodput(job, best_interval(job))
    lines.append(("best", best, "ink", "o", True))
    axes = [2**i for i in range(10)], "minutes between checkpoints", "goodput"
    return curves(lines, *axes, high=1, percent=True, title="What failures leave of a run")
