"""Draw programs: lines of code and what each sends; what a function that runs on each rank was given, sent
and returned, in a lane per rank."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llmpar.draw.charts import byte_ticks, count_noun
from llmpar.draw.geometry import groups
from llmpar.draw.layouts import hue
from llmpar.draw.scene import (
    BODY,
    OTHERS,
    SMALL,
    Items,
    Line,
    Rect,
    Scene,
    Text,
    compose,
    fitting_text,
    legend,
    size_text,
    small_text,
    style_of,
    text_width,
)

_LONGEST, PITCH = 190, 44
"""Pixels of the longest bar, and from one line of code to the next."""
_ORDER, _EXPOSED = "In the order of the compiled program", ", exposed"
_TRACK, _CURVE, _ACROSS = 30, 120, 690
"""Pixels of a track of a schedule, of the curve below it, and of both from left to right."""
_SentBy = Mapping[int, Sequence[tuple[str, int]]]


def program(lines: Sequence[str], columns: Mapping[str, _SentBy], title: str = "") -> Scene:
    """Draw lines of code, and beside each the bytes that a device sends for it: a column of bars for each way
    to run them, all on one scale. ``columns`` by heading: what is sent, [(collective, bytes), …], by a line's
    place from 0."""
    sums = {
        name: [sum(n for _, n in sent.get(i, ())) for i in range(len(lines))]
        for name, sent in columns.items()
    }
    most, left = (
        max([n for column in sums.values() for n in column] + [1]),
        max(map(text_width, lines)) + 24,
    )
    pitch = max([_LONGEST + 36] + [text_width(f"{name}: 999 MiB") + 24 for name in columns])
    items, texts = Items(), list[str]()
    for i, line in enumerate(lines):
        y = PITCH * i
        items += [
            Line(((0, y - 4), (left + pitch * len(columns), y - 4)), "grid", 1),
            Text(0, y + 16, line),
        ]
        for k, (name, sent) in enumerate(columns.items()):
            x, n = left + pitch * k, sums[name][i]
            if sent.get(i):
                what = f"{' and '.join(dict.fromkeys(kind for kind, _ in sent[i]))} {size_text(n)}"
                items += [
                    Rect(x, y + 1, max(_LONGEST * n / most, 1.5), 16, "links", "ink", 1),
                    small_text(x, y + 28, what, "start", "ink"),
                ]
                texts.append(f"{name}, {line}: {what}")
    for k, (name, column) in enumerate(sums.items()):
        head = f"{name}: {size_text(sum(column))}" if columns[name] else name
        items.append(Text(left + pitch * k, -20, head, bold=True))
        texts.append(head)
    return compose(title, [items], "\n".join(texts or lines))


Shape = Sequence[int]
_Sent = tuple[str, Sequence[str], int, int, Shape]
"""A collective: its kind, its axes, how often in a row, all bytes a rank sends, the shape it then has."""
LANE, _WIDE, _HIGH, ROOM = 38, 54, 28, 550


def traced(
    sizes: dict[str, int], given: Sequence[Shape], sent: Sequence[_Sent], returned: Shape
) -> Scene:
    """Draw a program's collectives in its order, as bars over the ranks that take part in each, and what a
    rank holds before and after as boxes of these shapes (rows downwards); of very many the first."""
    ranks, x, hidden, items = math.prod(sizes.values()), 62.0, 0, list[Rect | Text]()
    bottom = ranks * LANE + 12
    middles = [LANE * (i + 0.5) for i in range(ranks)]
    shapes = [*given, returned, *(row[4] for row in sent)]
    sides = {tuple(shape): (1, *shape)[-max(2, len(shape)) :] for shape in shapes}
    across = _WIDE / max(math.prod(shape[1:]) for shape in sides.values())
    down = _HIGH / max(3, *(shape[0] for shape in sides.values()))

    def boxes(shape: Shape, head: str) -> None:
        nonlocal x
        rows, *columns = sides[tuple(shape)]
        w, h, text = (
            max(5.0, math.prod(columns) * across),
            max(5.0, rows * down),
            _shape_text(shape),
        )
        wide = max(w, text_width(text, SMALL), text_width(head, SMALL)) + 10
        left = x + (wide - w) / 2
        for i, y in enumerate(middles):
            items.append(
                Rect(left, y - h / 2, w, h, OTHERS[i % 4], "edge", tip=f"rank {i}: {text}")
            )
        items.extend([small_text(x + wide / 2, -14, head), small_text(x + wide / 2, bottom, text)])
        x += wide

    items += [Text(0, y, f"rank {i}", BODY) for i, y in enumerate(middles)]
    words = [f"{ranks} ranks, each given {', '.join(map(_shape_text, given))}"]
    for i, shape in enumerate(given):
        boxes(shape, "" if i else "given")
    for kind, axes, count, bytes_sent, shape in sent:
        of, times, over = (
            groups(sizes, sizes, axes),
            f" ×{count}" * (count > 1),
            f"over {','.join(axes)}",
        )
        among = " and ".join(map(str, of))
        words.append(
            f"{kind}{times} {over} among ranks {among}: {bytes_sent:,} B; then {_shape_text(shape)}"
        )
        if x > ROOM:
            hidden += 1
            continue
        name = kind.removeprefix("collective-") + times
        size = f"{size_text(bytes_sent)} each"
        wide = max(text_width(text, SMALL) for text in (name, over, size)) + 10
        items += [
            *_bars(of, x + wide / 2, middles, axes[0]),
            small_text(x + wide / 2, -30, name, fill="ink"),
            small_text(x + wide / 2, -14, over),
            small_text(x + wide / 2, bottom, size, fill="ink"),
        ]
        x += wide
        boxes(shape, "then")
    boxes(returned, "returned")
    total = sum(row[3] for row in sent)
    calls = count_noun(sum(row[2] for row in sent), "call")
    note = f"Each rank sends {total:,} B in {calls}." if sent else "Nothing is sent."
    note += f" Not drawn: {hidden} more." * bool(hidden)
    words += [f"each returns {_shape_text(returned)}", note]
    return compose("What your function sends and holds", [items], "\n".join(words), [note])


def _bars(of: list[list[int]], x: float, middles: list[float], axis: str) -> list[Rect]:
    """Return a bar with dots for each group of ranks, beside one another where they would overlap."""
    items, stroke = list[Rect](), f"{axis}-line"
    beside = [sum(a[0] < b[-1] and b[0] < a[-1] for a in of[:i]) for i, b in enumerate(of)]
    for group, before in zip(of, beside, strict=True):
        middle = x + 14 * before - 7 * max(beside)
        ys = [middles[i] for i in group]
        items.append(Rect(middle - 3, ys[0], 6, ys[-1] - ys[0], axis, stroke))
        items += [Rect(middle - 6, y - 6, 12, 12, axis, stroke, radius=6) for y in ys]
    return items


def _shape_text(shape: Shape) -> str:
    """Return a shape as people write it."""
    return " × ".join(map(str, shape)) + " numbers" * (len(shape) == 1) or "a number"


def program_order(read: Mapping[str, Any], sizes: dict[str, int], reserved_bytes: int = 0) -> Scene:
    """Draw a compiled program in its order, as `llmpar.inspect.schedule` reads it: a track of what computes
    and one for each axis of a mesh of these ``sizes``, and below them the bytes that are alive in each step,
    with their peak beside what the compiler reserves (0: not known)."""
    steps, live, peak = read["steps"], read["live_bytes"], read["peak"]
    sizes = sizes | {"other": 1}  # groups that fill no whole axes
    lanes = ["compute", *(a for a in sizes if any(a in _lanes(one) for one in steps))]
    left = max(text_width(word, SMALL) for word in (*lanes, "999 MiB")) + 12
    x_of = lambda step: left + _ACROSS * step / max(1, len(live))
    top = {lane: 24 + _TRACK * i for i, lane in enumerate(lanes)}
    items = Items()
    for lane, y in top.items():
        items += [
            small_text(left - 8, y + 11, lane, "end", "ink"),
            Line(((left, y + 22), (left + _ACROSS, y + 22)), "grid", 1),
        ]
    for span in read["spans"]:
        x = x_of(span["begin"])
        wide = x_of(span["end"]) - x_of(span["begin"])
        names = f"{span['name']}, {span['source']}", span["name"], span["name"].replace("loop ", "")
        items += [
            Line(((x + 1, 18), (x + 1, 12), (x + wide - 1, 12), (x + wide - 1, 18)), "edge", 1),
            *fitting_text(x + wide / 2, 2, wide, *names, fill="ink"),
        ]
    for one in steps:
        x, wide = x_of(one["begin"]), x_of(one["end"]) - x_of(one["begin"])
        tip = f"{one['name']} {one['source']}" + f" and {one['count'] - 1} more" * (
            one["count"] > 1
        )
        for lane in _lanes(one):
            look = "matmuls" if one["name"] == "matmul" else "elementwise", "", ""
            if lane != "compute":  # full beside computing, hatched where nothing computes
                look = style_of(hue(lane, sizes) + "/" * one["exposed"])
            fill, stroke, hatch = look
            items.append(
                Rect(x, top[lane], max(wide, 1.5), 22, fill, stroke, bool(stroke), hatch, tip=tip)
            )
    items += _alive(read, x_of, top[lanes[-1]] + _TRACK + 26, left, reserved_bytes)
    counts = Counter((_kind(one), one["lane"], one["name"]) for one in steps)
    spans = "{name}, {source}: steps {first} to {end}"
    lines = [
        *(f"{lane}{kind}: {name} ×{n}" for (kind, lane, name), n in counts.items()),
        *(spans.format(first=one["begin"] + 1, **one) for one in read["spans"]),
    ]
    times = lambda one: f" ×{one['count']}" * (one["count"] > 1)
    largest = (
        f"{size_text(one['bytes']).replace(' ', chr(160))}{times(one)} {one['name']}"  # on one line
        f" {one['source']}".rstrip()
        for one in peak["values"]
    )
    note = f"Largest in the fullest step, {peak['at'] + 1} of {len(live)}: {', '.join(largest)}."
    lines += [f"alive at most {peak['bytes']:,} B", note]
    seen = {(a, _kind(one)) for one in steps for a in _lanes(one) if a != "compute"}
    key: list[tuple] = [
        ("matmuls", "matmul"),
        ("elementwise", "other operations"),
        *((hue(axis, sizes), axis + kind, "/" * (kind == _EXPOSED)) for axis, kind in sorted(seen)),
        ("weights", "arguments"),
        ("activations", "other values"),
    ]
    column = _ACROSS + left + 48
    return compose(_ORDER, [items, legend(key, 760)], "\n".join(lines), [note], column=column)


def _kind(step: Mapping[str, Any]) -> str:
    """Say whether something computes beside a collective."""
    beside = _EXPOSED if step["exposed"] else ", beside computing"
    return beside * (step["lane"] != "compute")


def _lanes(step: Mapping[str, Any]) -> list[str]:
    """Return the tracks of a step: a collective over two axes is on both."""
    return step["lane"].split(",")


def _alive(read: Mapping[str, Any], x_of: Any, y: float, left: float, reserved: int) -> Items:
    """Draw the bytes that are alive, arguments below, and their peak with its largest values."""
    live, peak, base = read["live_bytes"], read["peak"], read["argument_bytes"]
    high = 1.05 * max(peak["bytes"], reserved, 1)
    y_of = lambda n: y + _CURVE * (1 - n / high)
    right, at = x_of(len(live)), x_of(peak["at"] + 0.5)
    items = Items()
    for level in byte_ticks(high):
        items += [
            Line(((left, y_of(level)), (right, y_of(level))), "grid", 1),
            small_text(left - 8, y_of(level), size_text(level), "end"),
        ]
    edge = [(x_of(i + end), y_of(n)) for i, n in enumerate(live) for end in (0, 1)]
    items += [
        Line(((left, y_of(0)), *edge, (right, y_of(0))), "edge", 0.5, fill="activations"),
        Rect(left, y_of(base), right - left, y_of(0) - y_of(base), "weights", "edge", 0.5),
        Line(((at, y - 5), (at, y_of(peak["bytes"]))), "ink", 1.5, head=True),
    ]
    if reserved:
        x, anchor = (left, "start") if at > (left + right) / 2 else (right, "end")
        words = f"the compiler reserves {size_text(reserved)}"
        items += [
            Line(((left, y_of(reserved)), (right, y_of(reserved))), "bad", 1.5, dash=True),
            small_text(x, y - 12, words, anchor, "bad"),
        ]
    words = f"peak {size_text(peak['bytes'])}"
    half = text_width(words, SMALL) / 2
    items.append(small_text(min(max(at, left + half), right - half), y - 12, words, fill="ink"))
    return items
