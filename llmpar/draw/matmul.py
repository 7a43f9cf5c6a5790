"""Draw matrices in the colours of the devices that hold them: what is multiplied, summed up, and sent."""

import re

from llmpar.draw.geometry import holders
from llmpar.draw.scene import (
    OTHERS,
    SMALL,
    Group,
    Items,
    Line,
    Rect,
    Scene,
    Text,
    bounds,
    compose,
    legend,
    small_text,
    stack,
    text_color_on,
    text_width,
)
from llmpar.plan.layout import Arrow, Dim, Layout, parse_layout

LENGTH = {"s": 84, "d": 72, "m": 136, "n": 112, "k": 112, "t": 84, "h": 48, "z": 16}
"""Pixels of a dim in a drawing of many matrices."""
# not drawn where there are more dims: a batch is more rows, a head's width lies in a head
_BESIDE = "bh"
SHEETS = "an unfinished sum: add its sheets"
SIGN = re.compile(r" (×|=|->|-[\w ]+->) ")


def matmul(
    chain: str, names=(), devices: int = 4, title: str = "", notes=(), sheets: str = SHEETS
) -> Scene:
    """Draw matrices that are multiplied and sent, in the colours of the ``devices`` along one axis that hold
    them.

    ``chain`` has layouts with signs between them: ``×`` and ``=``; ``->`` for what is sent, by the collective
    that its layouts say; ``-word->`` for what each device does by itself. Layouts parted by commas stand
    below one another. ``names`` stand above matrices in place of their layouts, and what is after a ``|`` in
    place of how devices hold them; ``sheets`` says what an unfinished sum is. ValueError where the layout
    after ``=`` is not what devices have that multiply what they hold.

        matmul("s d × d m/tp = s m/tp × m/tp d = s d +tp -> s d")
    """
    texts, signs = SIGN.split(chain)[::2], ["", *SIGN.split(chain)[1::2]]
    places = [[parse_layout(text.strip()) for text in place.split(",")] for place in texts]
    cut = list(dict.fromkeys(a for one in sum(places, []) for a in (*one.axes, *one.sums)))
    if len(cut) > 1 or not 1 < devices <= len(OTHERS):
        raise ValueError(
            f"one axis and 2 to {len(OTHERS)} devices can be drawn, not {chain!r} on {devices}"
        )
    for i in [i for i, sign in enumerate(signs) if sign == "="]:
        made = [
            multiplied(x, w) for x in places[i - 2] for w in places[i - 1] if signs[i - 1] == "×"
        ]
        if made != places[i]:
            right = ", ".join(map(str, made)) or "not multiplied"
            raise ValueError(
                f"{' × '.join(texts[i - 2 : i])} is {right} on the devices, not {texts[i]}"
            )
    scale = {2: 1.5, 3: 1.5, 4: 1.2, 5: 1.1, 6: 1.0}.get(len(texts), 0.9)
    line, lines, at = Items(), list[str](), 0.0
    for i, place in enumerate(places):
        if i:
            pairs = zip(places[i - 1], place, strict=True) if signs[i] == "->" else ()
            sends = [move.kind for pair in pairs for move in Arrow(*pair).moves]
            drawn, wide = _sign(signs[i], sends[:1], *cut)
            line.append(Group(tuple(drawn), at))
            lines.append(f"{sends[0]} over {cut[0]}" if sends else signs[i])
            at += wide
        name = (
            names[i] if i < len(names) and names[i] else ", ".join(dict.fromkeys(map(str, place)))
        )
        name, _, word = name.partition("|")  # of our own in place of how it is held
        words = [word or _held(place[0], devices)] * bool(cut)
        size = scale * (1 if len(place) == 1 else 0.65)
        blocks: list = stack([_matrix(one, cut, devices, size) for one in place], 8)
        x0, top, x1, bottom = bounds(blocks)
        blocks += [
            *(small_text((x0 + x1) / 2, top - 13, word) for word in words),
            Text((x0 + x1) / 2, top - 13 - 20 * len(words), name, anchor="middle", bold=True),
        ]
        x0, _, x1, _ = bounds(blocks)
        line.append(Group(tuple(blocks), at - x0, -(top + bottom) / 2))
        lines.append(": ".join([name if name == texts[i] else f"{name} ({texts[i]})", *words]))
        at += x1 - x0
    key: list = [
        *((tint, f"device {i}") for i, tint in enumerate(OTHERS[:devices])),
        *((axis, sheets, "/") for axis in cut if f" +{axis}" in chain),
    ]
    blocks = [line, legend(key if cut else [], 760)]
    return compose(title or chain, blocks, "\n".join(lines), notes)


def multiplied(x: Layout, w: Layout) -> Layout:
    """Return the layout of the result when each device multiplies what it holds: dims of both are summed
    over, and where an axis cuts them the sum is unfinished. Raise ValueError where the two are not cut alike
    along such a dim."""
    both = [dim for dim in x.dims if dim.name in w.letters]
    if not both or any(w.cut(dim.name) != dim.axes for dim in both):
        raise ValueError(
            f"'{x}' and '{w}' cannot be multiplied as they are held; send one of them first"
        )
    kept = [
        dim for dim in (*x.dims, *w.dims) if not (dim.name in x.letters and dim.name in w.letters)
    ]
    return Layout(tuple(kept), tuple(a for dim in both for a in dim.axes))


def _drawn(layout: Layout) -> list[tuple[int, Dim]]:
    """Return the two dims of a layout that are drawn, and their places."""
    dims = [
        (i, dim)
        for i, dim in enumerate(layout.dims)
        if len(layout.dims) == 2 or dim.name not in _BESIDE
    ]
    if len(dims) != 2:
        raise ValueError(
            f"'{layout}' is no matrix: two dims are drawn, beside {' and '.join(_BESIDE)}"
        )
    return dims


def _held(layout: Layout, devices: int) -> str:
    """Return in a word or two how the devices hold a matrix."""
    if layout.sums:
        return f"{devices} sheets"
    sides = zip([dim for _, dim in _drawn(layout)], ("rows", "columns"), strict=True)
    special = {"n": "heads", "k": "heads", "s": "positions", "t": "positions"}
    return next(
        (f"by {special.get(dim.name, side)}" for dim, side in sides if dim.axes),
        f"on all {devices}",
    )


def _matrix(layout: Layout, cut: list[str], devices: int, scale: float) -> list:
    """Return a matrix as the blocks that its layout makes of it; of an unfinished sum a sheet for each
    partial sum; with a swatch for each device where all hold the same."""
    (down, rows), (across, columns) = _drawn(layout)
    high, wide = (scale * LENGTH.get(dim.name, 100) for dim in (rows, columns))
    if not (layout.axes or layout.sums):
        side = min(16, 0.8 * wide / devices - 3)
        left = wide / 2 + 1.5 - (side + 3) * devices / 2
        top = (high - side) / 2
        tints = enumerate(OTHERS[: devices * len(cut)])
        swatches = (
            Rect(left + (side + 3) * i, top, side, side, tint, "ink", 0.75) for i, tint in tints
        )
        return [Rect(0, 0, wide, high, "cell", "ink"), *swatches]
    items, w, h = (
        Items(),
        wide / (devices if columns.axes else 1),
        high / (devices if rows.axes else 1),
    )
    for index, owners in holders(layout, dict.fromkeys(cut, devices)).items():
        for k, device in reversed(list(enumerate(owners))):
            tint, x, y = OTHERS[device], w * index[across] + 15 * k, h * index[down] + 20 * k
            middle = y + (h - 10 if k else h / 2)
            words = "+ " * (k > 0) + str(device)
            items.append(Rect(x, y, w, h, tint, "ink"))
            if layout.sums:
                items += [
                    Rect(x, y, w, h, "", f"{layout.sums[0]}-line", hatch="/"),
                    Rect(x + w / 2 - 15, middle - 9, 30, 18, tint, "ink", 0.5),
                ]
            items.append(Text(x + w / 2, middle, words, anchor="middle", fill=text_color_on(tint)))
    return items


def _sign(sign: str, sends, axis: str = "") -> tuple[list, float]:
    """Return a sign, or an arrow below its word, and how wide it is."""
    if sign in "×=":
        return [Text(21, 0, sign, 22, "middle", bold=True)], 42
    label = "".join(sends) or sign.strip("->")
    color = f"{axis}-line" if sends else "ink"
    wide = text_width(label, SMALL) * 1.1 + 20
    arrow = Line(((7, 0), (wide - 6, 0)), color, 4 if sends else 2, head=True)
    return [arrow, Text(wide / 2, -16, label, SMALL, "middle", color, bool(sends))], wide
