"""Draw a tensor once, cut: a block for each piece, with the number of the first device that holds it.

Rows and columns are coordinates on the mesh axes that cut the tensor's dims. Where there are more of them than
can be read, neighbours are merged into bands.
"""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llmpar.draw.geometry import coordinates, strides
from llmpar.draw.scene import (
    LIGHT,
    SHADES,
    SMALL,
    STATE,
    Items,
    Rect,
    pixels,
    small_text,
    text_color_on,
    text_width,
)
from llmpar.plan.layout import Dim
from llmpar.plan.mesh_shape import divisors

ROW, MOST_HIGH, _LEAST_ROW, _GAP = 34, 352, 14, 8
"""The height of a row, of a tensor at most, of a row at least, and what parts outer dims, in pixels."""


def axis_line(axis: str) -> str:
    """Return the role of an axis' words; of one that is no mesh axis, that of all words."""
    return f"{axis}-line" if f"{axis}-line" in LIGHT else "ink"


def bands(lengths: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return the pieces of nested axes of these ``lengths``, the outermost first, as at most ``most`` ranges:
    of as few neighbours each as can be, and none across the border of an outer axis."""
    inner = math.prod(lengths)
    out = [(0, inner)]
    for length in lengths:
        least = math.ceil(length / (most // len(out)))
        step = next((k for k in divisors(length) if least <= k <= 2 * least), least)
        inner //= length
        parts = [(i, min(i + step, length)) for i in range(0, length, step)]
        out = [(low + i * inner, low + end * inner) for low, _ in out for i, end in parts]
        if step > 1:
            break
    return out


@dataclass
class Side:
    """One side of a tensor: the pieces that ``sizes`` of axes cut it into, the outermost first, in at most
    ``most`` bands. A gap follows every ``part`` pieces, where bands are shorter than that."""

    sizes: dict[str, int]
    most: int
    part: int = 0
    start: float = 0.0
    pixels: float = 0.0
    bands: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.num, self.apart = math.prod(self.sizes.values()), strides(self.sizes, self.sizes)
        self.bands = bands([*self.sizes.values()], self.most)
        self.part = self.part if self.part > self.bands[0][1] else self.num

    def at(self, low: int, high: int) -> tuple[float, float]:
        """Return where pieces from ``low`` to ``high`` begin, and how long they are, in pixels."""
        each = (self.pixels - _GAP * (self.num // self.part - 1)) / self.num
        begin = each * low + _GAP * (low // self.part)
        end = each * high + _GAP * ((high - 1) // self.part)
        return self.start + begin, end - begin

    def ranges(self, low: int, high: int) -> dict[str, tuple[int, int]]:
        """Return the coordinates of a band's pieces on each axis: the first, and the one after the last."""
        out = {}
        for axis, apart in self.apart.items():
            first = low // apart % self.sizes[axis]
            out[axis] = first, first + max(1, min(self.sizes[axis] - first, (high - low) // apart))
        return out

    def labels(self, axis: str) -> list[tuple[str, float, float]]:
        """Return an axis' coordinates along the side: in words, where they begin, and how long they are.
        There are none where a band has all of them."""
        out = []
        for _, run in itertools.groupby(self.bands, lambda band: band[0] // self.apart[axis]):
            alike = list(run)
            first, end = self.ranges(*alike[0])[axis]
            words = f"{first}–{end - 1}" if end - first > 1 else str(first)
            if end - first < self.sizes[axis]:
                out.append((words, *self.at(alike[0][0], alike[-1][1])))
        return out


    def at_own(self, at: dict[str, int]) -> tuple[float, float]:
        """Return where the piece of a device begins, and how long it is."""
        piece = sum(at[axis] * apart for axis, apart in self.apart.items())
        return self.at(piece, piece + 1)

    def width(self, axis: str) -> float:
        """Return the width of an axis' labels beside the rows."""
        words = [f"{axis} {words}" for words, *_ in self.labels(axis)]
        return max((text_width(text, SMALL) + 10 for text in words), default=0.0)


def _labelled(down: Side, across: Side) -> list:
    """Return the names of rows and columns."""
    items, right, line = Items(), across.start - sum(map(down.width, down.sizes)), 1.3 * pixels(SMALL)
    for axis in down.sizes:
        right += down.width(axis)
        for words, y, h in down.labels(axis):
            text = f"{axis} {words}"
            items.append(small_text(right - 10, y + h / 2, text, "end", axis_line(axis)))
    y = 0.5 * line
    for axis in across.sizes:
        labels = across.labels(axis)
        fits = all(text_width(f"{axis} {words}", SMALL) <= w - 2 for words, _, w in labels)
        items += [small_text(across.start - 6, y, axis, "end", axis_line(axis))] * (not fits)
        for words, x, w in labels:
            text = f"{axis} {words}" if fits else words
            items.append(small_text(x + w / 2, y, text, fill=axis_line(axis)))
        y += line * bool(labels)
    return items


def _sides(
    rows: list[Dim], columns: list[Dim], sizes: dict[str, int], wide: float, high: float
) -> tuple[Side, Side]:
    """Return the sides of a tensor, with rows and columns that hold their texts."""
    cut = lambda dims: {axis: sizes[axis] for dim in dims for axis in dim.axes}
    most = 16 if len(rows) > 1 else MOST_HIGH // _LEAST_ROW
    down = Side(cut(rows), most, math.prod(cut(rows[-1:]).values()))
    across, last = Side(cut(columns), 1), math.prod(sizes.values()) - 1
    names = [text_width(axis, SMALL) + 10 for axis in across.sizes]
    left = max(sum(map(down.width, down.sizes)), *names, 0.0)
    for widest in (str(last), f"{last} …", f"{across.num - 1}–{across.num - 1}"):
        fit = int((wide - left) / (text_width(widest, SMALL) + 8))
        across = Side(across.sizes, min(fit, 16), 0, left, wide - left)
        if len(across.bands) == across.num:
            break
    down.start = 1.3 * pixels(SMALL) * sum(bool(across.labels(axis)) for axis in across.sizes)
    down.pixels = min(MOST_HIGH, max(high - down.start, ROW * len(down.bands)))
    return down, across


class _Cell(NamedTuple):
    """Blocks that are drawn as one: where, at which coordinates, how many, and their first owners."""

    box: tuple[float, float, float, float]
    at: dict[str, tuple[int, int]]
    num: int
    owners: list[int]

    def where(self) -> str:
        names = [f"{a} {low}" + f"–{end - 1}" * (end - low > 1) for a, (low, end) in self.at.items()]
        return f" ({', '.join(names)})" * bool(names)


def _cells(down: Side, across: Side, apart: dict[str, int]) -> list[_Cell]:
    """Return the cells row by row, each with the owners of its first five blocks at most."""
    out = []
    for row, column in itertools.product(down.bands, across.bands):
        (y, h), (x, w) = down.at(*row), across.at(*column)
        owners = []
        for i, j in itertools.islice(itertools.product(range(*row), range(*column)), 5):
            at = down.ranges(i, i + 1) | across.ranges(j, j + 1)
            owners.append(sum(apart[axis] * low for axis, (low, _) in at.items()))
        at = down.ranges(*row) | across.ranges(*column)
        num = (row[1] - row[0]) * (column[1] - column[0])
        out.append(_Cell((x, y, w, h), at, num, owners))
    return out


def _numbers(cells: list[_Cell], copies: int) -> list[str]:
    """Return what stands in the cells: the longest form that fits into all of them."""
    forms: list[list[str]] = [[], [], []]
    for cell in cells:
        first, several = str(cell.owners[0]), cell.num > 1
        listed = ", ".join(map(str, cell.owners[:4])) + ", …" * (cell.num > 4)
        forms[0].append(listed if several or copies == 1 else f"{first} × {copies}")
        forms[1].append(first + " …" * several)
        forms[2].append(first)
    wide = min(cell.box[2] for cell in cells) - 4
    fits = lambda form: max(text_width(text, SMALL) for text in form) <= wide
    return next(filter(fits, forms), forms[2])


def _shaded(fill: str, cells: list[_Cell], node: int) -> list[str]:
    """Return the role of each cell: a shade of ``fill`` for the node of its first owner."""
    at = [cell.owners[0] // node for cell in cells]
    place = {number: i for i, number in enumerate(sorted({*at}))}
    if len(place) < 2 or fill not in STATE:
        return [fill] * len(cells)
    last = min(SHADES, len(place)) - 1
    step = min(2.0, (SHADES - 1) / last)
    return [f"{fill}-{round(SHADES - step * (last - place[number] % SHADES))}" for number in at]


def one_tensor(
    rows: list[Dim], columns: list[Dim], sizes: dict[str, int], node: int, device: int, fill: str,
    wide: float, high: float, holds: Callable[[dict[str, int], dict[str, int]], str],
) -> tuple[list, str]:  # fmt: skip
    """Return a tensor's blocks with their owners, and in words what is seen.

    The dims ``rows`` go down, the outer ones first, ``columns`` across; ``sizes`` of all axes come slow links
    first. It is ``wide`` pixels with its labels, and ``high`` at least. The ``device``'s block is outlined.
    The shade, of the role ``fill``, is the node of ``node`` devices. ``holds(first, last)`` says what devices
    at coordinates from first to last hold; a click on a block chooses its first owner.
    """
    down, across = _sides(rows, columns, sizes, wide, high)
    cells = _cells(down, across, strides(sizes, sizes))
    copies = math.prod(sizes.values()) // (down.num * across.num)
    more = f" and {copies - 1} more" * (copies > 1)
    texts, shades, items = _numbers(cells, copies), _shaded(fill, cells, node), _labelled(down, across)
    own, chosen = coordinates(sizes, sizes, device), Items()
    for cell, text, shade in zip(cells, texts, shades, strict=True):
        x, y, w, h = cell.box
        first, last = ({a: ends[i] - i for a, ends in cell.at.items()} for i in (0, 1))
        tip = f"device {cell.owners[0]}{more}{cell.where()}: {holds(first, last)}"
        if cell.num > 1:
            tip = f"{cell.num} blocks, the first of {tip} each"
        words = [small_text(x + w / 2, y + h / 2, text, fill=text_color_on(shade))]
        if all(low <= own[axis] < end for axis, (low, end) in cell.at.items()):
            chosen = _outlined(cell, *down.at_own(own), *across.at_own(own), str(device), shade)
            words *= cell.num == 1
        act = json.dumps({"device": cell.owners[0]})
        items += [Rect(*cell.box, shade, "edge", 0.75), *words, Rect(*cell.box, tip=tip, act=act)]
    shown = node if len({*shades}) > 1 else 0
    return items + chosen, _seen(rows, columns, sizes, cells, copies, shown)


def _outlined(cell: _Cell, y: float, h: float, x: float, w: float, name: str, shade: str) -> list:
    """Return the outline of a block, legible on every shade; in a cell of several with its device."""
    items: Items = []
    for stroke, width in (("paper", 5.5), ("ink", 2.5)):
        items.append(Rect(x, y, max(w, 2.5), max(h, 2.5), "", stroke, width))
    if cell.num == 1:
        return items
    wide, high = text_width(name, SMALL) + 4, pixels(SMALL)
    left, top, right, bottom = Rect(*cell.box).box
    x = min(max(x + w / 2, left + wide / 2), right - wide / 2)
    y = min(max(y + h / 2, top + high / 2), bottom - high / 2)
    ground = Rect(x - wide / 2, y - high / 2, wide, high, shade)
    return [*items, ground, small_text(x, y, name, fill=text_color_on(shade))]


def _seen(
    rows: list[Dim], columns: list[Dim], sizes: dict[str, int], cells: list[_Cell], copies: int, node: int
) -> str:
    """Return in words how a tensor is cut, and what a number and a shade are."""
    cutting = {axis for dim in (*rows, *columns) for axis in dim.axes}
    sides = []
    for dims, where in ((rows, "down"), (columns, "across")):
        sides += [f"{dim.name} {where}" + f" by {','.join(dim.axes)}" * bool(dim.axes) for dim in dims]
    along = ", ".join(axis for axis, size in sizes.items() if size > 1 and axis not in cutting)
    nums, whose = sorted({cell.num for cell in cells}), f"({node} devices)"
    parts = [f"One tensor, {'cut' if cutting else 'not cut'}: {', '.join(sides)}." if sides else ""]
    if nums[-1] > 1:
        many, whose = "up to " * (len(nums) > 1) + f"{nums[-1]:,}", "of the first one"
        parts.append(f"A cell is {many} blocks, with their first devices.")
    if copies > 1:
        what = "Each block" if cutting else "All of it"
        parts.append(f"{what} is on {copies:,} devices, copies along {along}.")
    if node:
        parts.append(f"Shade: node {whose}.")
    return " ".join(filter(None, parts))
