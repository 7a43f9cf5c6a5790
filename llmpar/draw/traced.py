"""Draw what a function that runs on each rank was given, sent, held and returned, in a lane per rank."""

import math
from collections.abc import Sequence

from llmpar.draw.charts import count_noun
from llmpar.draw.geometry import groups
from llmpar.draw.scene import (
    BODY,
    OTHERS,
    SMALL,
    Rect,
    Scene,
    Text,
    compose,
    size_text,
    small_text,
    text_width,
)

Shape = Sequence[int]
_Sent = tuple[str, Sequence[str], int, int, Shape]
"""A collective: its kind, its axes, how often in a row, all bytes a rank sends, the shape it then has."""
LANE, _WIDE, _HIGH, ROOM = 38, 54, 28, 550


def traced(sizes: dict[str, int], given: Sequence[Shape], sent: Sequence[_Sent], returned: Shape) -> Scene:
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
        w, h, text = max(5.0, math.prod(columns) * across), max(5.0, rows * down), _shape_text(shape)
        wide = max(w, text_width(text, SMALL), text_width(head, SMALL)) + 10
        left = x + (wide - w) / 2
        for i, y in enumerate(middles):
            items.append(Rect(left, y - h / 2, w, h, OTHERS[i % 4], "edge", tip=f"rank {i}: {text}"))
        items.extend([small_text(x + wide / 2, -14, head), small_text(x + wide / 2, bottom, text)])
        x += wide

    items += [Text(0, y, f"rank {i}", BODY) for i, y in enumerate(middles)]
    words = [f"{ranks} ranks, each given {', '.join(map(_shape_text, given))}"]
    for i, shape in enumerate(given):
        boxes(shape, "" if i else "given")
    for kind, axes, count, bytes_sent, shape in sent:
        of, times, over = groups(sizes, sizes, axes), f" ×{count}" * (count > 1), f"over {','.join(axes)}"
        among = " and ".join(map(str, of))
        words.append(f"{kind}{times} {over} among ranks {among}: {bytes_sent:,} B; then {_shape_text(shape)}")
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
