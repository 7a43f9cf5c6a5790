"""Draw programs: lines of code and what each sends; what a function that runs on each rank was given, sent
and returned, in a lane per rank."""

import math
from collections.abc import Mapping, Sequence

from llmpar.draw.charts import count_noun
from llmpar.draw.geometry import groups
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
    size_text,
    small_text,
    text_width,
)

_LONGEST, PITCH = 190, 44
"""Pixels of the longest bar, and from one line of code to the next."""
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
    bottom, middles = ranks * LANE + 12, [LANE * (i + 0.5) for i in range(ranks)]
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
        name, size = kind.removeprefix("collective-") + times, f"{size_text(bytes_sent)} each"
        wide = max(text_width(text, SMALL) for text in (name, over, size)) + 10
        items += _bars(of, x + wide / 2, middles, axes[0])
        items += [
            small_text(x + wide / 2, -30, name, fill="ink"),
            small_text(x + wide / 2, -14, over),
            small_text(x + wide / 2, bottom, size, fill="ink"),
        ]
        x += wide
        boxes(shape, "then")
    boxes(returned, "returned")
    total, calls = sum(row[3] for row in sent), count_noun(sum(row[2] for row in sent), "call")
    note = f"Each rank sends {total:,} B in {calls}." if sent else "Nothing is sent."
    note += f" Not drawn: {hidden} more." * bool(hidden)
    words += [f"each returns {_shape_text(returned)}", note]
    return compose("What your function sends and holds", [items], "\n".join(words), [note])


def _bars(of: list[list[int]], x: float, middles: list[float], axis: str) -> list[Rect]:
    """Return a bar with dots for each group of ranks, beside one another where they would overlap."""
    items, stroke = list[Rect](), f"{axis}-line"
    beside = [sum(a[0] < b[-1] and b[0] < a[-1] for a in of[:i]) for i, b in enumerate(of)]
    for group, before in zip(of, beside, strict=True):
        middle, ys = x + 14 * before - 7 * max(beside), [middles[i] for i in group]
        items.append(Rect(middle - 3, ys[0], 6, ys[-1] - ys[0], axis, stroke))
        items += [Rect(middle - 6, y - 6, 12, 12, axis, stroke, radius=6) for y in ys]
    return items


def _shape_text(shape: Shape) -> str:
    """Return a shape as people write it."""
    return " × ".join(map(str, shape)) + " numbers" * (len(shape) == 1) or "a number"
