"""Draw a program as it is written, and beside each line what it sends."""

from collections.abc import Mapping, Sequence

from llmpar.draw.scene import Items, Line, Rect, Scene, Text, compose, size_text, small_text, text_width

_WIDE, PITCH = 190, 44
"""Pixels of the longest bar, and from one line of code to the next."""
_Sent = Mapping[int, Sequence[tuple[str, int]]]


def program(lines: Sequence[str], columns: Mapping[str, _Sent], title: str = "") -> Scene:
    """Draw lines of code, and beside each the bytes that a device sends for it: a column of bars for each way
    to run them, all on one scale. ``columns`` by heading: what is sent, [(collective, bytes), …], by a line's
    place from 0."""
    sums = {
        name: [sum(n for _, n in sent.get(i, ())) for i in range(len(lines))]
        for name, sent in columns.items()
    }
    most, left = max([n for column in sums.values() for n in column] + [1]), max(map(text_width, lines)) + 24
    pitch = max([_WIDE + 36] + [text_width(f"{name}: 999 MiB") + 24 for name in columns])
    items, texts = Items(), list[str]()
    for i, line in enumerate(lines):
        y = PITCH * i
        items += [Line(((0, y - 4), (left + pitch * len(columns), y - 4)), "grid", 1), Text(0, y + 16, line)]
        for k, (name, sent) in enumerate(columns.items()):
            x, n = left + pitch * k, sums[name][i]
            if sent.get(i):
                what = f"{' and '.join(dict.fromkeys(kind for kind, _ in sent[i]))} {size_text(n)}"
                items.append(Rect(x, y + 1, max(_WIDE * n / most, 1.5), 16, "links", "ink", 1))
                items.append(small_text(x, y + 28, what, "start", "ink"))
                texts.append(f"{name}, {line}: {what}")
    for k, (name, column) in enumerate(sums.items()):
        head = f"{name}: {size_text(sum(column))}" if columns[name] else name
        items.append(Text(left + pitch * k, -20, head, bold=True))
        texts.append(head)
    return compose(title, [items], "\n".join(texts or lines))
