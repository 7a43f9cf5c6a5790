"""Charts and timelines: what was sent, what works when, how much there is."""

import itertools
import math
from collections import Counter
from dataclasses import replace

from llmpar.draw.scene import (
    COLOURS,
    LIGHT,
    OTHERS,
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
    size_text,
    small_text,
    style_of,
    text_width,
    ticks,
    time_text,
)
from llmpar.plan.mesh_shape import AXES


def number_ranges(numbers, most: int = 8) -> str:
    """Return numbers as text: ``0 4``, ``0–7`` where they are consecutive, with an ellipsis where they are
    many."""
    n = list(numbers)
    if len(n) > 2 and n == list(range(n[0], n[-1] + 1)):
        return f"{n[0]}–{n[-1]}"
    return " ".join(map(str, n if len(n) <= most else [*n[: most - 2], "…", n[-1]]))


def count_noun(n: int, what: str) -> str:
    """Return a count with its noun: ``1 copy``, ``2 copies``."""
    return f"{n:,} {what if n == 1 else what[:-1] + 'ies' if what.endswith('y') else what + 's'}"


MEMORY: dict[str, str] = COLOURS["memory"]
TIME: dict[str, str] = COLOURS["time"]
"""The roles of the words of charts, where they are no roles themselves."""


def collectives(rows) -> Scene:
    """Draw the bytes that a device sends per step, predicted beside compiled, a pair of bars per mesh axis
    and kind.

    Rows are those of ``llmpar inspect --json``; either of ``predicted_bytes``, ``compiled_bytes`` may lack.
    """
    names = [f"{r['axis']} {r['kind']} ×{r['count']}" for r in rows]
    left, wide = max(map(text_width, names), default=0) + 12, 420
    pairs = [(r.get("predicted_bytes"), r.get("compiled_bytes")) for r in rows]
    items, lines, most = Items(), [], max([n or 0 for pair in pairs for n in pair] + [1])
    for i, (row, name, (predicted, compiled)) in enumerate(zip(rows, names, pairs, strict=True)):
        y, verdict = 44 * i, ""
        if None not in (predicted, compiled) and predicted == compiled:
            verdict = ", equal"
        elif predicted and compiled is not None:
            verdict = f", {compiled / predicted - 1:+.1%}"
        color = axis_colours(row["axis"])[1]
        items.append(Text(left - 10, y + 16, name, anchor="end"))
        both = ("predicted", predicted, "", ""), ("compiled", compiled, "/", verdict)
        texts = [
            f"{word} {'unknown' if n is None else size_text(n)}{more}" for word, n, _, more in both
        ]
        for top, text, (_, n, hatch, _) in zip((y, y + 16), texts, both, strict=True):
            if n:
                items.append(Rect(left, top, wide * n / most, 14, "paper", color, 1.5, hatch))
            items.append(small_text(left + wide + 10, top + 7, text, "start", "ink"))
        lines.append(f"{name}: {'; '.join(texts)}")
    key = legend([("paper", "predicted"), ("edge", "compiled", "/")])
    return compose("Bytes sent per device and step", [items, key], "\n".join(lines))


def axis_colours(axes: str) -> tuple[str, str]:
    """Return the fill and the stroke of what is sent over ``axes``: those of the first axis; grey where it is
    no mesh axis."""
    axis = axes.split(",")[0]
    return style_of(axis if axis in AXES else "links")[:2]


ARROWS_DRAWN = 24
"""The most bars of `arrows_sent`; a Llama has fewer on every mesh of two axes."""


def arrows_sent(rows) -> Scene:
    """Draw the bytes that a device sends per step for each arrow of the model or the step: which line sends
    what.

    Rows are those of `llmpar.inspect.census.arrow_rows`: ``arrow``, ``direction``, ``axis``, ``kind``,
    ``count``, ``bytes_sent``. A bar is one arrow, in parts by axis; the smallest arrows share the last bar.
    """
    by_arrow: dict[str, list] = {}
    for row in rows:
        by_arrow.setdefault(row["arrow"] or row.get("source") or "(the partitioner's)", []).append(
            row
        )
    total = lambda parts: sum(row["bytes_sent"] for row in parts)
    ordered: list[tuple[str, list]] = sorted(by_arrow.items(), key=lambda bar: -total(bar[1]))
    if rest := ordered[ARROWS_DRAWN:]:
        ordered[ARROWS_DRAWN:] = [
            (f"{len(rest)} more", [row for _, parts in rest for row in parts])
        ]
    drawn, lines, right, roles = [], [], [], dict[str, str]()
    for name, parts in ordered:
        sizes = Counter[str]()
        for row in parts:
            what = f"{row['axis']} {row['kind']}"
            roles[what], sizes[what] = axis_colours(row["axis"])[0], sizes[what] + row["bytes_sent"]
        drawn.append((name, sizes))
        right.append(", ".join(f"{what} {size_text(n)}" for what, n in sizes.items()))
        passes = (f"{r['direction']} {r['axis']} {r['kind']} ×{r['count']}".strip() for r in parts)
        lines.append(f"{name}: {size_text(total(parts))} ({', '.join(passes)})")
    text = "\n".join([*lines, f"In all {size_text(total(rows))}."])
    title = "Bytes sent per device and step, by arrow"
    bars = _bars(title, drawn, size_text, byte_ticks, roles, wide=300, pitch=26, right=right)
    return replace(bars, text=f"{title}\n{text}")


def ring_steps(pairs, num_steps: int | None = None, axis: str = "sp") -> Scene:
    """Draw what each rank holds after every step of a permutation, ``pairs`` of (source, target) as in
    compiled HLO. Rank r starts with piece r."""
    ranks = 1 + max(max(pair) for pair in pairs)
    steps = num_steps or ranks
    came_from = {target: source for source, target in pairs}
    w, h, left = 64, 62, text_width(f"step {steps}", SMALL) + 14
    middle = [left + w * (r + 0.4) for r in range(ranks)]
    items: list = [small_text(x, -14, f"rank {r}") for r, x in enumerate(middle)]
    lines, pieces = [], list(range(ranks))
    for t in range(steps):
        items.append(small_text(left - 12, h * t + 14, f"step {t}", "end"))
        for r, piece in enumerate(pieces):
            look = OTHERS[piece % len(OTHERS)], f"{axis}-line"
            box = Rect(left + w * r, h * t, w * 0.8, 28, *look, radius=3)
            items += boxed(box, f"piece {piece}", str(piece))
        for source, target in pairs if t + 1 < steps else ():
            ends = ((middle[source], h * t + 29), (middle[target], h * (t + 1) - 2))
            items.append(Line(ends, f"{axis}-line", 1.5, head=True))
        lines.append(
            f"step {t}: " + ", ".join(f"rank {r} holds piece {b}" for r, b in enumerate(pieces))
        )
        pieces = [pieces[came_from.get(r, r)] for r in range(ranks)]
    note = (
        "A piece has the colour of its first rank. Between two steps each rank sends what it holds,"
        f" over {axis}."
    )
    title = f"Ring over {axis}: {count_noun(ranks, 'rank')}, {count_noun(steps, 'step')}"
    return compose(title, [items], "\n".join([*lines, note]), [note])


def scale(x_of, values, y: float, text, up: float = 0) -> list:
    """Return ticks with their labels below ``y``, and grid lines from there ``up``."""
    lines = [Line(((x_of(v), y - up), (x_of(v), y + 4)), "grid", 1) for v in values]
    return [*lines, *(small_text(x_of(v), y + 13, text(v)) for v in values)]


def memory_bars(
    rows, capacity_bytes=None, title="Memory per device", whole_bytes=None, wide=480.0, roles=None
) -> Scene:
    """Draw what fills a device's memory: ``rows`` of (label, {part: bytes}), beside the chip's capacity;
    where a program may use less than all of the memory, a second mark at its ``whole_bytes``. The longest bar
    is ``wide`` pixels. ``roles`` are those of parts that colours.toml does not know by name."""
    whole = whole_bytes if whole_bytes != capacity_bytes else None
    return _bars(
        title, rows, size_text, byte_ticks, MEMORY | (roles or {}), capacity_bytes, whole, wide
    )


def byte_ticks(high: float) -> list[float]:
    """Return round numbers of bytes up to ``high``."""
    unit = 1024.0 ** min(5, int(math.log(max(high, 1), 1024)))
    return [unit * t for t in ticks(0, high / unit)]


def time_bars(
    rows,
    title: str = "Time per step",
    roles: dict[str, str] | None = None,
    error: float = 0.0,
    measured=(),
) -> Scene:
    """Draw where a step's time goes: ``rows`` of (label, {part: seconds}); ``roles`` as in `memory_bars`.
    Below a bar stands its ``error``, the share by which an estimate may be off; a dot: ``measured``, {label:
    s}."""
    marks, roles = (lambda high: ticks(0, high)), TIME | (roles or {})
    return _bars(title, rows, time_text, marks, roles, error=error, measured=dict(measured))


def role_of(part: str, words: dict[str, str]) -> str:
    """Return the role of a part of a bar, by its name."""
    role = words.get(part, part)
    if role.rstrip("/.") not in LIGHT:
        raise ValueError(
            f"part '{part}' has no colour of its own in draw/colours.toml; say whose it has:"
            f" roles={{'{part}': 'weights'}}, or 'other1' to 'other5'"
        )
    return role


def _bars(
    title: str, rows, text, marks, words, limit=None, whole=None, wide: float = 480, pitch=42, right=(),
    error: float = 0.0, measured: dict[str, float] | None = None,
) -> Scene:  # fmt: skip
    """Draw bars of parts, each ``pitch`` below the last; beside it ``right``, or its sum and what is free."""
    rows, dots = [(str(name), row) for name, row in rows], measured or {}
    meanings: dict[str, list[str]] = {}
    for part in dict.fromkeys(part for _, row in rows for part in row):
        meanings.setdefault(role_of(part, words), []).append(part)
    left = max([text_width(name) for name, _ in rows] + [0]) + 12
    bottom = pitch * len(rows) - 8
    highest = [(1 + error) * sum(row.values()) for _, row in rows]
    high, tall = max([*highest, limit or 0, whole or 0, 1e-12, *dots.values()]), 2 * pitch // 3
    x_of = lambda value: left + wide * value / high
    items, lines = scale(x_of, marks(high), bottom, text, bottom), []
    for i, (name, row) in enumerate(rows):
        y, total, done = pitch * i, sum(row.values()), 0.0
        for part, value in row.items():
            tip, w = f"{part} {text(value)}", x_of(value) - left
            box = bar_part(role_of(part, words), x_of(done), y, w, tall, tip)
            items += _with_number(box, text(value), None if limit is None else x_of(limit))
            done += value
        over = limit is not None and total > limit
        spare = (
            ""
            if limit is None
            else f"; {text(abs(limit - total))} {'too much' if over else 'free'}"
        )
        items.append(Text(left - 10, y + tall / 2, name, anchor="end"))
        if error:
            spare += f" ± {text(error * total)}"
            items += _spread(x_of((1 - error) * total), x_of((1 + error) * total), y + tall + 6)
        if name in dots:
            spare += f"; measured {text(dots[name])}"
            items.append(
                Rect(x_of(dots[name]) - 4, y + tall + 2, 8, 8, "measured", "paper", radius=4)
            )
        beside = right[i] if right else text(total) + spare
        items.append(Text(left + wide + 12, y + tall / 2, beside, SMALL, bold=over))
        each = ", ".join(f"{part} {text(value)}" for part, value in row.items())
        lines.append(f"{name}: {text(total)}{spare} ({each})")
    if limit is not None:
        x, side = x_of(limit), "end" if whole else "middle"
        edge = (x, -8), (x, bottom + 4)
        items += [
            Line(edge, "paper", 5),
            Line(edge, "ink", 2, dash=True),
            small_text(x, -16, f"usable {text(limit)}", side),
        ]
        lines.append(f"usable: {text(limit)}")
    if whole is not None:
        x = x_of(whole)
        items += [
            Line(((x, -10), (x, -1)), "edge", 2),
            small_text(x, -16, f"whole {text(whole)}", "start"),
        ]
        lines.append(f"whole memory: {text(whole)}")
    key = legend([(role, ", ".join(parts)) for role, parts in meanings.items()])
    note = f"Below each bar: by how much such an estimate is off on average, {error:.0%}." * bool(
        error
    )
    note += " Dot: measured and published." * bool(dots)
    return compose(title, [items, key], "\n".join(lines), [note] * bool(note))


def _with_number(box: Rect, number: str, line: float | None) -> list:
    """Return a part of a bar and its number, where it fits, beside an upright line that crosses the part."""
    x, end = box.x, box.x + box.w
    if line is not None and x < line < end:
        x, end = (line, end) if 2 * line < x + end else (x, line)
    if box.hatch:
        return [box]
    middle = (x + end) / 2, box.y + box.h / 2
    return [box, *fitting_text(*middle, end - x - 8, number, on=box.fill)]


def _spread(low: float, high: float, y: float) -> list:
    """Return a range from ``low`` to ``high`` pixels, with an upright at each end."""
    strokes = ((low, 0), (high, 0)), ((low, -3), (low, 3)), ((high, -3), (high, 3))
    return [Line(tuple((x, y + dy) for x, dy in stroke), "ink", 2) for stroke in strokes]


def bar_part(role: str, x: float, y: float, w: float, h: float, tip: str, act: str = "") -> Rect:
    """Return a part of a bar: its role's colour in an outline of ink, so that a pale one is seen on paper."""
    fill, stroke, hatch = style_of(role)
    return Rect(x, y, w, h, fill, stroke if hatch else "ink", 0.75, hatch, tip=tip, act=act)


PANEL, _HIGH, _APART = 196, 220, 22
"""Pixels of a panel of `step_memory`, and between two of them."""


def step_memory(
    rows, phases, capacity_bytes: float, title: str = "Memory of a device over one step", roles=None
) -> Scene:
    """Draw memory over a step, a panel for each method to run it, all on one scale beside the chip's
    capacity.

    ``rows`` are {name: moments}, a moment is {part: bytes}; parts lie on one another in the order in which
    they first come. ``phases`` are (name, number of moments) in turn. ``roles`` are as in `memory_bars`.
    """
    roles, named = (
        MEMORY | (roles or {}),
        dict.fromkeys(p for ms in rows.values() for m in ms for p in m),
    )
    most = {name: max(sum(moment.values()) for moment in moments) for name, moments in rows.items()}
    high = 1.08 * max([*most.values(), capacity_bytes])
    levels = byte_ticks(high)
    left = max(text_width(size_text(v), SMALL) for v in levels) + 8
    right = left + len(rows) * (PANEL + _APART) - _APART
    y_of = lambda v: _HIGH * (1 - v / high)
    items: list = [
        *(Line(((left, y_of(v)), (right, y_of(v))), "grid", 1) for v in levels),
        *(small_text(left - 6, y_of(v), size_text(v), "end") for v in levels),
    ]
    lines, limit, labels = [f"usable: {size_text(capacity_bytes)}"], y_of(capacity_bytes), []
    for k, (name, moments) in enumerate(rows.items()):
        x0, count, floor = left + k * (PANEL + _APART), len(moments) - 1, [0.0] * len(moments)
        for part in named:
            top = [low + moment.get(part, 0) for low, moment in zip(floor, moments, strict=True)]
            edge, base = (
                [(x0 + PANEL * i / count, y_of(v)) for i, v in enumerate(side)]
                for side in (top, floor)
            )
            fill = style_of(role_of(part, roles))[0]
            items += [Line((*edge, *base[::-1]), "ink", 0.5, fill=fill)] * (top != floor)
            floor = top
        at = max(range(count + 1), key=floor.__getitem__)
        x, over = x0 + PANEL * at / count, floor[at] > capacity_bytes
        words = size_text(most[name]) + ": too much" * over
        half = text_width(words, SMALL) * 0.55
        middle = min(max(x, x0 + half), x0 + PANEL - half)
        above = y_of(floor[at]) - 10
        above -= 18 * (limit - 8 < above + 8 and above - 8 < limit + 8)  # the limit's line
        labels.append(Text(middle, above, words, SMALL, "middle", "bad" if over else "ink", True))
        items.append(Text(x0 + PANEL / 2, -14, name, anchor="middle", bold=True))
        x = x0
        for phase, moments_of in phases:
            w = PANEL * moments_of / count
            items.append(Line(((x, _HIGH), (x, _HIGH + 6)), "edge", 1))
            if text_width(phase, SMALL) < w:
                items.append(small_text(x + w / 2, _HIGH + 14, phase))
            x += w
        fullest = ", ".join(f"{part} {size_text(v)}" for part, v in moments[at].items() if v)
        verdict = (
            "more than is usable" if over else f"{size_text(capacity_bytes - most[name])} free"
        )
        begins = f"{name}: from {size_text(sum(moments[0].values()))}"
        lines.append(f"{begins} to {size_text(most[name])}, {verdict} ({fullest})")
    across = (left, limit), (right, limit)
    usable = small_text(right + 8, limit, f"usable {size_text(capacity_bytes)}", "start", "ink")
    items += [Line(across, "paper", 4), Line(across, dash=True), *labels, usable]
    key = legend([(role_of(part, roles), part) for part in named])
    return compose(title, [items, key], "\n".join(lines))


def overlap(compute_s, comm_s, labels=None, span_s: float = 0) -> Scene:
    """Draw how gradients are computed and summed up, one after the other and side by side: seconds for each
    piece, whose gradients are sent once they are computed. Each of the two lanes works in order. A scale has
    ``span_s`` at least."""
    labels = [str(i) for i in range(len(compute_s))] if labels is None else labels
    if not len(compute_s) == len(comm_s) == len(labels):
        raise ValueError(
            f"overlap got {len(compute_s)} computing, {len(comm_s)} communicating and {len(labels)}"
            " labels; give as many of each"
        )
    schedules = []
    for name in ("in turn", "side by side"):
        free, computing, sending = [0.0, 0.0], [], []
        for label, a, b in zip(labels, compute_s, comm_s, strict=True):
            start = max(free) if name == "in turn" else free[0]
            free = [start + a, max(start + a, free[1]) + b]
            computing.append(_span("compute", label, start, free[0]))
            sending.append(_span("communicate", label, free[1] - b, free[1]) | {"axes": ("dp",)})
        for event in sending:
            beside = sum(_shared_s(event, other) for other in computing)
            took = event["end_s"] - event["start_s"]
            event["exposed_s"] = took - beside if beside < 0.999 * took else 0.0
        waits = time_text(max(free) - sum(compute_s))
        head = f"{name}: {time_text(max(free))}, {waits} of it without computing"
        schedules.append({"name": head, "count": 0, "events": computing + sending})
    span_s = max(span_s, sum(compute_s) + sum(comm_s))
    return two_lanes(schedules, "Communication behind computing", 0, span_s)


def _span(lane: str, name: str, start_s: float, end_s: float) -> dict:
    """Return an event of `two_lanes` that nothing waits for."""
    return {"lane": lane, "name": name, "start_s": start_s, "end_s": end_s, "exposed_s": 0.0}


LANES = {"compute": "matmuls", "links": "links", "network": "network"}


def two_lanes(iterations, title: str, column: float = 0, span_s: float = 0) -> Scene:
    """Draw schedules: for each iteration of a loop what computes, and below what is on the links (and on the
    network between hosts, where an event names it): filled where computing waits for it, else hollow.

    An iteration is ``{"name", "count", "events"}``; an event ``{"lane": "compute", "links" or "network",
    "name", "start_s", "end_s", "exposed_s"}`` in seconds from its begin. An event that names ``axes`` has
    their colour, and a lane of any name. In a ``column`` of so many pixels each event has a frame, from 1 on.
    A scale is of ``span_s`` at least. An iteration of count 0 says all in its name.
    """
    names = {event["lane"]: event.get("axes") for one in iterations for event in one["events"]}
    fills = LANES | {lane: axes[0] for lane, axes in names.items() if axes}
    lanes = {lane: fill for lane, fill in fills.items() if lane in names or lane == "compute"}
    left = max(text_width(lane, SMALL) for lane in lanes) + 12
    bottom = 16 + 40 * len(lanes)
    blocks, lines, wide = [], [], column - left - 40 if column else 760
    for one in iterations:
        span = max([event["end_s"] for event in one["events"]] + [span_s, 1e-9])
        x_of = lambda t, span=span: left + wide * t / span
        waits = sum(event["exposed_s"] for event in one["events"] if event["lane"] != "compute")
        head = f"{one['name']}, {one['count']:,} × {time_text(span)}"
        head = f"{head}, {time_text(waits)} of it exposed" if one["count"] else one["name"]
        items: list = [
            Text(0 if column else left, 0, head, bold=True),
            *scale(x_of, ticks(0, span), bottom + 8, time_text, bottom),
        ]
        # What waits lies on top.
        ordered = sorted(enumerate(one["events"], 1), key=lambda event: event[1]["exposed_s"] > 0)
        for top, (lane, fill) in zip(itertools.count(14, 40), lanes.items(), strict=False):
            items.append(small_text(left - 10, top + 16, lane, "end"))
            own = [(frame, event) for frame, event in ordered if event["lane"] == lane]
            for frame, event in own:
                others = (other for _, other in own if other is not event)
                box = Rect(
                    x_of(event["start_s"]), top, x_of(event["end_s"]) - x_of(event["start_s"]), 32
                )
                w_open = wide * event["exposed_s"] / span
                items += _event(
                    event, box, w_open, fill, any(_shared_s(event, other) for other in others)
                )
                if column:
                    outline = Rect(box.x - 1, top - 3, box.w + 2, 38, "", "ink", 3)
                    now = Line(((box.x, 8), (box.x, bottom)))
                    items.append(Group((outline, now), frame=frame))
        blocks.append(items)
        lines.append(head)
        for event in one["events"]:
            if event["lane"] != "compute":
                times = time_text(event["end_s"] - event["start_s"]), time_text(event["exposed_s"])
                lines.append(f"  {event['name']}: {times[0]}, {times[1]} exposed")
    sends = [(fill, f"{lane}: exposed, computing waits") for lane, fill in [*lanes.items()][1:]]
    key = [*sends, *[("paper", "hollow: hidden behind computing")] * bool(sends)]
    drawn = [*blocks, legend(key, column - 40 if column else 640)]
    return compose(title, drawn, "\n".join(lines), column=column)


def _shared_s(one: dict, other: dict) -> float:
    """Return how long two events go on at the same time."""
    return max(0.0, min(one["end_s"], other["end_s"]) - max(one["start_s"], other["start_s"]))


def _event(event: dict, box: Rect, w_open: float, lane_fill: str, crowded: bool) -> list:
    """Return an event in its box, and its name. What is sent is hollow beside computing, and filled in the
    last ``w_open`` pixels, where computing waits. Of ``crowded`` events names would lie on one another."""
    full = f"{event['name']}: {time_text(event['end_s'] - event['start_s'])}"
    fill = event["name"] if event["name"] in LIGHT else lane_fill
    stroke = "ink"
    if axes := event.get("axes"):
        fill, stroke = axis_colours(axes[0])
    sent, width = event["lane"] != "compute", 0.75 if box.w > 3 else 0.25
    hollow = sent and w_open < 0.99 * box.w
    box = replace(box, fill="paper" if hollow else fill, stroke=stroke, width=width, tip=full)
    items: list = [box]
    if sent and event["exposed_s"] > 0:
        x = box.x + box.w - w_open
        items.append(Rect(x, box.y, w_open, box.h, fill, stroke, 0.75, tip=f"waits {full}"))
    if box.w > 24 and not crowded:
        w = box.w - w_open * hollow
        items += fitting_text(box.x + w / 2, box.y + 16, w - 4, full, event["name"], on=box.fill)
    return items
