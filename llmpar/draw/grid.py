"""Draw the tensor, and what moves: which block each device holds, and a collective round by round.

Up to `MOST_APART` devices, and of more while something moves, a device is a small matrix, the whole tensor,
with the block that it holds inked; rows and columns of devices are mesh axes. At rest the tensor on more
devices is drawn once (`one_tensor`). Frame 0 (`scene.Group`) is at rest; frame k shows segment k - 1 of
`layer_segments`.
"""

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmpar.draw.charts import count_noun, number_ranges, two_lanes
from llmpar.draw.geometry import coordinates, groups, slices, strides
from llmpar.draw.scene import (
    LIGHT,
    MOVING,
    SMALL,
    Group,
    Items,
    Line,
    Rect,
    Scene,
    Text,
    bounds,
    compose,
    fitting_text,
    legend,
    paragraph,
    pixels,
    size_text,
    small_text,
    stack,
    text_color_on,
    text_width,
    time_text,
)
from llmpar.plan.layout import Dim, Layout, block
from llmpar.plan.mesh_shape import AXES, USER_AXIS, MeshShape, divisors, parse_mesh
from llmpar.predict.layer import Segment

MOST_APART, MOST_CELLS = 8, 64
"""The most devices that are drawn at rest, each with its tensor, and the most cells: above, they stand for
blocks of devices."""
COLUMN, GRID_MARGIN, GAP = 560, 4, 4
"""The width of a picture, its margin, and what parts two cells, in pixels."""
_RING_WORDS = {
    "all-gather": "pieces go round the ring",
    "reduce-scatter": "sums go round the ring",
    "all-reduce": "sums go round the ring, then the result",
    "all-to-all": "each sends every other its own piece",
    "collective-permute": "each sends to the next",
}
"""What the devices of a group do, by kind of collective."""


def axis_line(axis: str) -> str:
    """Return the role of an axis' words; of one that is no mesh axis, that of all words."""
    return f"{axis}-line" if f"{axis}-line" in LIGHT else "ink"


@dataclass
class Cells:
    """Devices from ``first`` on as ``num`` cells, of ``block`` each, in rows and columns that are mesh axes.

    ``sizes`` has the slow links' axes first; ``node`` counts the devices of a node. Cells may also be blocks
    of a tensor, in so many ``columns`` without gaps: a cell is ``steps`` coordinates of an axis, and ``part``
    cells are those of one index of an outer dim.
    """

    sizes: dict[str, int]
    node: int
    num: int
    block: int = 1
    first: int = 0
    high: float = 360
    tall: float = 46.0  # at most, a cell
    size: tuple[float, float] | None = None  # of a cell, else what there is room for
    columns: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    part: int = 0

    def __post_init__(self) -> None:
        # an axis, its stride and length in cells
        lengths = {a: math.ceil(size / self.steps.get(a, 1)) for a, size in self.sizes.items()}
        self.apart, levels, self.gap = strides(lengths, lengths), [], 0 if self.columns else GAP
        for axis, size in lengths.items():
            stride = max(1, self.apart[axis] // self.block)
            length = min(size * self.apart[axis] // (stride * self.block), self.num // stride)
            levels += [(axis, stride, length)] * (length > 1)
        whole = {1, *(stride * length for _, stride, length in levels)}
        nested = whole | {stride * k for _, stride, length in levels for k in divisors(length)}
        if len(levels) == 1 and self.num > 8:
            nested.add(8)  # of a prime number the last row is short
        square = lambda c: abs(math.log(c * c / self.num / 2)) + 9 * (max(c, self.num / c) > 16)
        self.columns = c = self.columns or min(
            sorted(nested), key=lambda c: square(c) + 2 * (c not in whole)
        )
        self.side = [
            (axis, max(c, stride)) for axis, stride, length in levels if stride * length > c
        ]
        self.top = [(axis, stride) for axis, stride, _ in levels if stride < c]
        per = self.node // self.block  # cells of a node
        fits = self.node % self.block == self.first % self.node == 0 and 1 < per < self.num
        self.per = per if fits and (c % per == 0 or per % c == 0) else 0
        steps = {stride: 6.0 for _, stride in (*self.side, *self.top)} | {self.per: 9.0}
        steps = steps if self.gap else {self.part: 8.0} if self.part > c else {}
        self.gaps = [(s, gap) for s, gap in steps.items() if s > 1]
        self.left = sum(self.label_width(axis) for axis, _ in self.side)
        self.w = self.h = 0.0
        (x, _), (_, y) = self.at(c - 1), self.at(self.num - 1)
        limit = (104.0, 0.66) if self.gap else (COLUMN, self.high)
        self.w = min(limit[0], (COLUMN - 2 * GRID_MARGIN - 5 * bool(self.per) - x) / c)
        self.h = max(11.0, min(limit[1] * self.w, self.tall, (self.high - y) * c / self.num))
        self.w, self.h = self.size or (self.w, self.h)

    def label_width(self, axis: str) -> float:
        """Return the width of an axis' labels beside the rows."""
        ends = 0, self.num - self.columns
        return 10 + max(text_width(self.name(axis, cell, self.columns), SMALL) for cell in ends)

    def ranges(self, cell: int, cells: int = 1) -> dict[str, tuple[int, int]]:
        """Return which coordinates the devices of some cells have, which are an aligned block."""
        first, block, out = self.first + cell * self.block, cells * self.block, {}
        for axis, apart in self.apart.items():
            step, size = self.steps.get(axis, 1), self.sizes[axis]
            low = first // apart * step % (math.ceil(size / step) * step)
            out[axis] = low, min(size, low + step * max(1, block // apart))
        return out

    def name(self, axis: str, cell: int, cells: int = 1) -> str:
        """Return the coordinates of some cells on an axis: ``dp 0–7``."""
        low, high = self.ranges(cell, cells)[axis]
        return f"{axis} {low}" + f"–{high - 1}" * (high - low > 1)

    def where(self, cell: int) -> str:
        """Return the coordinates of a cell."""
        inside = lambda axis: self.ranges(cell)[axis] == (0, self.sizes[axis])
        return (
            ", ".join(self.name(axis, cell) for axis in self.sizes if not inside(axis)) or "alone"
        )

    def at(self, cell: int) -> tuple[float, float]:
        """Return the upper left corner of a cell."""
        (row, column), c = divmod(cell, self.columns), self.columns
        x = (
            self.left
            + column * (self.w + self.gap)
            + sum(gap * (column // s) for s, gap in self.gaps if s < c)
        )
        y = row * (self.h + self.gap) + sum(gap * (row * c // s) for s, gap in self.gaps if s >= c)
        return x, y + 1.3 * pixels(SMALL) * len(self.top) + 5 * bool(self.per)

    def around(self) -> list:
        """Return the axes' names with indices, beside the rows and above the columns, and dashed boxes around
        nodes."""
        items, right, sides = Items(), 0.0, {axis for axis, _ in self.side}
        for axis, stride in self.side:
            right += self.label_width(axis)
            for cell in range(0, self.num, stride):
                y = (self.at(cell)[1] + self.at(cell + stride - 1)[1] + self.h) / 2
                text = self.name(axis, cell, stride if (axis, 1) in self.top else 1)
                items.append(small_text(right - 10, y, text, "end", axis_line(axis)))
        for line, (axis, stride) in enumerate(self.top):
            cells = range(0, self.columns, stride)
            y = 1.3 * pixels(SMALL) * (line + 0.4)
            lows = [self.ranges(cell)[axis][0] for cell in cells]
            names = [self.name(axis, cell) for cell in cells]
            if axis in sides:  # from the row's first one on
                names = [f"+{low - lows[0]}" for low in lows]
            forms = names, [name.split()[-1] for name in names], list(map(str, lows))
            wide = stride * (self.w + GAP) - 6
            fits = lambda *texts, wide=wide: all(text_width(text, SMALL) <= wide for text in texts)
            short = next((form for form in forms if fits(*form)), forms[-1])
            first = names[0] if fits(names[0]) else short[0]
            for cell, name in zip(cells, [first, *short[1:]], strict=True):
                x = (self.at(cell)[0] + self.at(cell + stride - 1)[0] + self.w) / 2
                items.append(small_text(x, y, name, fill=axis_line(axis)))
        for cell in range(0, self.num, self.per) if self.per else ():
            (x, y), (end, bottom) = self.at(cell), self.at(cell + self.per - 1)
            box = x - 4, y - 4, end + self.w - x + 8, bottom + self.h - y + 8
            items.append(Rect(*box, "", "edge", 1, dash=True, radius=4))
        return items

    def alike(self, device: int, axes) -> list[int]:
        """Return the cells with a device that differs from this one along ``axes`` alone, or not at all."""
        at, others = (
            coordinates(self.sizes, self.sizes, device),
            [a for a in self.sizes if a not in axes],
        )
        within = lambda ranges: all(ranges[a][0] <= at[a] < ranges[a][1] for a in others)
        return [cell for cell in range(self.num) if within(self.ranges(cell))]

    def moving(self, device: int, axes: tuple[str, ...], kind: str) -> list:
        """Return the outlines of a device's group over ``axes``, and the arrows of the first round."""
        team, own, color = (
            self.alike(device, axes),
            (device - self.first) // self.block,
            f"{axes[0]}-line",
        )
        items: list = [
            Rect(*self.at(i), self.w, self.h, "", color, 2.5, radius=2) for i in team if i != own
        ]
        if not 1 < len(team) <= 16 or own not in team:
            return items
        pairs = zip(team, team[1:] + team[:1], strict=True)  # round the ring
        if kind.endswith("all-to-all"):
            pairs = zip([own] * len(team), team, strict=True)
        paths = [self.arrow(a, b) for a, b in pairs if a != b]
        for paint, wide in (("paper", 4), (color, 2)):  # a halo below all arrows
            items += [Line(path, paint, wide, head=True) for path in paths]
        return items

    def arrow(self, source: int, target: int) -> tuple[tuple[float, float], ...]:
        """Return the line of an arrow from cell to cell; the arrow back has another line."""
        ends = (self.at(source), self.at(target))
        forth = 0.2 if target > source else -0.2
        (x0, y0), (x1, y1) = ((x + self.w / 2, y + self.h / 2) for x, y in ends)
        if y0 == y1:
            y = y0 + forth * self.h
            return (x0 + forth * self.w, y), (x1 - forth * self.w, y)
        if x0 == x1:
            x = x0 + forth * self.w / 2
            return (x, y0 + forth * self.h), (x, y1 - forth * self.h)
        return (x0, y0), (x1, y1)


def mesh(
    shape: MeshShape | str, devices_per_host: int | None = None, highlight_axis: str | None = None
) -> Scene:
    """Draw the devices in link order: neighbours in a row share the fastest links. Rows and columns are mesh
    axes, dashed boxes hosts. ``highlight_axis`` numbers the groups that talk over it, and fills the first."""
    shape = parse_mesh(shape)
    if highlight_axis not in (None, *AXES):
        raise ValueError(
            f"'{highlight_axis}' is no mesh axis to highlight; the axes are {' '.join(AXES)}"
        )
    if shape.size > MOST_CELLS:
        raise ValueError(
            f"mesh '{shape}' has {shape.size} devices, and a drawing shows {MOST_CELLS} at most;"
            " use llmpar.MeshExplorer, which draws blocks of them"
        )
    live = shape.named or {"dp": 1}
    apart, host = strides(live, live), devices_per_host or shape.size
    teams = groups(shape.user_sizes, AXES, [highlight_axis]) if highlight_axis else []
    team_of = {device: i for i, team in enumerate(teams) for device in team}
    widest = max(map(text_width, [str(shape.size), *[f"group {len(teams)}"] * bool(teams)])) + 10
    size = max(46.0, widest), 54.0 if teams else 34.0
    cells = Cells(live, host, shape.size, size=size)
    items = cells.around()
    for device in range(shape.size):
        (x, y), lit = cells.at(device), team_of.get(device) == 0
        fill = highlight_axis if highlight_axis and lit else "cell"
        color, middle = text_color_on(fill), x + size[0] / 2
        items += [
            Rect(x, y, *size, fill, f"{highlight_axis}-line" if teams else "edge", 1.5, radius=3),
            Text(middle, y + 17, str(device), anchor="middle", fill=color),
            *(
                [small_text(middle, y + 38, f"group {team_of[device]}", fill=color)]
                if teams
                else []
            ),
        ]
    facts, lines, notes = list[tuple[str, str]](), list[str](), list[str]()
    for a, n in live.items():
        facts.append((a, f"{a} = {n}: {AXES[a]}" + f", partners {apart[a]} apart" * (n > 1)))
        texts = list(map(number_ranges, groups(live, live, [a])))
        lines.append(f"groups over {a}: {' | '.join(texts[:8])}" + " | …" * (len(texts) > 8))
    if devices_per_host:
        where = ", dashed." if cells.per else f": device i is on host i // {host}."
        notes.append(f"Hosts of {count_noun(host, 'device')}{where}")
    if teams:
        notes.append(
            f"Filled: the first of {count_noun(len(teams), 'group')} over {highlight_axis}, devices"
            f" {number_ranges(teams[0])}."
        )
    text = "\n".join([*(fact for _, fact in facts), *lines, *notes])
    title = f"mesh {shape}: {count_noun(shape.size, 'device')}"
    return compose(title, [items, legend(facts, 400)], text, notes)


def stretches(
    dims: list[Dim], sizes: dict[str, int], ranges, side: float
) -> list[tuple[float, float]]:
    """Return what the devices at ``ranges`` of coordinates hold of a dim, on a ``side`` of so many pixels:
    stretches that can be seen. Without a dim all of the side."""
    runs, parts = [(0, 1)], 1
    for axis in (axis for dim in dims for axis in dim.axes):
        (low, high), size = ranges[axis], sizes[axis]
        if high - low < size and sum(b - a for a, b in runs) <= 64:
            runs = [(i * size + low, i * size + high) for a, b in runs for i in range(a, b)]
        else:  # all, or so many that they could not be told apart
            runs = [(a * size, b * size) for a, b in runs]
        parts *= size
    return visible(runs, parts, side)


def visible(runs: Iterable[Sequence[int]], parts: int, side: float) -> list[tuple[float, float]]:
    """Return runs of the ``parts`` of a ``side``, wide enough to be seen, joined where they touch."""
    out = list[tuple[float, float]]()
    for a, b in runs:
        wide = max(2.5, side * (b - a) / parts)
        low = min(side * a / parts, side - wide)
        if out and low <= out[-1][1] + 0.01:
            low = out.pop()[0]
        out.append((low, min(side, side * a / parts + wide)))
    return out


def shown_cells(sizes: dict[str, int], node: int, device: int, flat: bool) -> list[Cells]:
    """Return the cells of all devices one by one; above `MOST_CELLS` blocks, and those near a device.

    Cells of one dim are ``flat``."""
    n, tall = math.prod(sizes.values()), 22.0 if flat else 46.0
    if n <= MOST_CELLS:
        return [Cells(sizes, node, n, tall=tall)]
    steps = strides(sizes, sizes)
    nested = sorted({step * k for a, step in steps.items() for k in divisors(sizes[a])})
    whole_axes = [b for b in sorted({*steps.values()}) if 16 <= n // b <= MOST_CELLS]
    block = next(b for b in [*whole_axes, *nested] if n // b <= MOST_CELLS)
    close = [b for b in nested if b <= MOST_CELLS and block % b == 0]
    inner = node if node in close else max(b for b in close if b <= 16)
    around = Cells(sizes, node, inner, 1, device // inner * inner, high=100, tall=tall)
    return [Cells(sizes, node, n // block, block, high=250, tall=tall), around]


def apart_words(parts: list[Cells]) -> list[str]:
    """Return in words what the two parts of a large mesh show."""
    above, below = parts[0], parts[-1]
    last = below.first + below.num - 1
    says = f"One above stands for {above.block} devices; below, devices {below.first}–{last} one by one."
    return [says] * (len(parts) > 1)


def inked(part: Cells, device: int, same: Collection[int], ink, tip) -> list:
    """Return the cells of a part, each with what ``ink(part, cell, width, height)`` draws in it. The chosen
    device is outlined, and thinly the cells that hold the ``same``; ``tip(device)`` says what one holds."""
    items = part.around()
    for cell in range(part.num):
        (x, y), first = part.at(cell), part.first + cell * part.block
        box = x, y, part.w, part.h
        items += [
            Rect(*box, "paper", "edge", 1, radius=2),
            Group(tuple(ink(part, cell, *box[2:])), x, y),
        ]
        last, one = first + part.block - 1, part.block == 1
        text = f"device {first}" if one else f"devices {first}–{last}"
        text += f": {part.where(cell)}" + (f"; {tip(first)}" if one else "")
        stroke = ("ink", 2.5) if first <= device <= last else ("ink", 1.25 * (cell in same))
        act = json.dumps({"device": first + device % part.block})
        items.append(Rect(*box, "", *stroke, radius=2, tip=text, act=act))
    return items


def tensor_grid(
    layout: Layout, shape, sizes: dict[str, int], node: int, device: int = 0, itemsize: int = 4,
    name: str = "", fill: str = "weights", segments: list[Segment] | None = None,
) -> Scene:  # fmt: skip
    """Draw which block of a tensor each device of a mesh holds, `COLUMN` pixels wide.

    Up to `MOST_APART` devices each is the whole tensor with its block inked in the colour of the role
    ``fill``. The tensor on more is drawn once (`one_tensor`), unless it cannot be cut evenly; the devices are
    drawn while something moves, above `MOST_CELLS` a cell for a block of them, and those near the chosen
    ``device`` below. ``sizes`` of the mesh axes come slow links first, as `MeshShape.sizes` has them;
    ``node`` counts the devices of a node. A click on a cell sets ``device``. With ``segments`` of a layer
    there is a frame for each (`frames`). Bytes are those of elements of ``itemsize``.
    """
    n = math.prod(sizes.values())
    dims = [Dim(dim.name, tuple(a for a in dim.axes if sizes.get(a, 1) > 1)) for dim in layout.dims]
    counts = [math.prod(sizes[a] for a in dim.axes) for dim in dims]
    cut = [i for i, count in enumerate(counts) if count > 1]
    plain = [i for i, count in enumerate(counts) if count == 1 and shape[i] > 1]
    shown = sorted([*cut[-2:], *plain[len(plain) - max(0, 2 - len(cut)) :]][-2:])
    aside, odd = cut[:-2], [i for i in cut if shape[i] % counts[i]]
    cutting, whole = [a for dim in dims for a in dim.axes], math.prod(shape) * itemsize

    def holds(first: dict[str, int], last: dict[str, int]) -> str:
        if odd:
            return f"no even part: {dims[odd[0]].name} = {shape[odd[0]]} cannot be cut into {counts[odd[0]]}"
        low, high = (slices(Layout(tuple(dims)), shape, sizes, at) or [] for at in (first, last))
        words = ", ".join(f"{dims[i].name} {low[i][0]}:{high[i][1]}" for i in cut) or "all of it"
        return f"{words}; {size_text(whole // math.prod(counts))} of {size_text(whole)}"

    def ink(part: Cells, cell: int, w: float, h: float) -> list:
        ranges, left, items = part.ranges(cell), 6.0 * bool(aside), Items()
        span = lambda which, side: stretches([dims[i] for i in which], sizes, ranges, side)
        for i in aside[:1]:
            items += [Rect(0, a, 5, b - a, dims[i].axes[0]) for a, b in span([i], h)]
        down, across = span(shown[-2:-1], h), span(shown[-1:], w - left)
        boxes = [(left + c, a, d - c, b - a) for a, b in down for c, d in across]
        return [] if odd else items + [Rect(*box, fill, "edge", 0.75) for box in boxes]

    parts = shown_cells(sizes, node, device, len(shown) < 2)
    at = coordinates(sizes, sizes, device)
    copies = n // math.prod(counts)
    sides = " down, ".join(dims[i].name for i in shown)
    notes = [
        f"Device {device} ({parts[-1].where(device - parts[-1].first)}) holds {holds(at, at)}.",
        f"{count_noun(copies, 'device')} hold the same." if copies > 1 else "",
        f"Each cell is the whole tensor, {sides} across." if shown else "",
        *(f"The bar at its left is {dims[i].name}." for i in aside[:1]),
        *apart_words(parts),
        f"Dashed: nodes of {node} devices." if any(part.per for part in parts) else "",
    ]
    text, title = " ".join(filter(None, notes)), f"{name or layout}: who holds what"
    once, segments = n > MOST_APART and not odd, segments or []
    tip = lambda device: holds(*[coordinates(sizes, sizes, device)] * 2)
    drawn = [
        inked(part, device, part.alike(device, sizes.keys() - {*cutting}), ink, tip)
        for part in parts
        if segments or not once
    ]
    placed = stack(drawn, 16)
    moving = _moving(placed, parts, sizes, device, segments)
    if not once:
        return compose(
            title, [[*placed, *moving], _captions(segments)], text, [text], GRID_MARGIN, COLUMN
        )
    rows = [dims[i] for i in (*aside, *shown[:-1])]
    columns = [dims[i] for i in shown[-1:]]
    tensor, seen = one_tensor(
        rows, columns, sizes, node, device, fill, bounds(placed)[3] or 160.0, holds
    )
    pictures = [Group(tuple(placed), frame=MOVING), *moving, Group(tuple(tensor), frame=0)]
    captions, rest = _captions(segments)[1:], f"{seen} {notes[0]}"
    below = _lines(text * bool(segments), "soft", MOVING, bounds(captions)[3] + 12)
    words = [*captions, _lines(rest, "soft", 0), below]
    return compose(title, [pictures, words], rest, (), GRID_MARGIN, COLUMN)


def _merged(sizes: dict[str, int], most: int) -> dict[str, int]:
    """Return how many coordinates of each axis, the outermost first, a band of a tensor's side has, where
    there are to be ``most`` bands: as few as can be, and all of an axis inside one that is merged."""
    out = {}
    for axis, size in sizes.items():
        least = math.ceil(size / most)
        out[axis] = next((k for k in divisors(size) if least <= k <= 2 * least), least)
        most = 1 if out[axis] > 1 else most // size
    return out


def one_tensor(
    rows: list[Dim], columns: list[Dim], sizes: dict[str, int], node: int, device: int, fill: str,
    high: float, holds,
) -> tuple[list, str]:  # fmt: skip
    """Return the blocks of a tensor that the dims ``rows``, the outer ones first, cut downwards and
    ``columns`` across, each with its owner: the first device that holds it; and in words what is seen.

    The shade, of the role ``fill``, is the owner's node. Neighbours are merged where texts would not fit. It
    is ``high`` pixels at least. ``holds(first, last)`` says what the devices at coordinates from first to
    last hold; a click chooses the owner. The block of the ``device`` that is chosen has an outline."""
    down, across, inner = (
        {axis: sizes[axis] for dim in dims for axis in dim.axes}
        for dims in (rows, columns, rows[-1:])
    )
    n, cut, apart = math.prod(sizes.values()), down | across, strides(sizes, sizes)
    most = 16 if len(rows) > 1 else 25, min(16, int(450 / (text_width(str(n - 1), SMALL) + 8)))
    steps = _merged(down, most[0]) | _merged(across, most[1])
    count = lambda axes: math.prod(math.ceil(cut[axis] / steps[axis]) for axis in axes)
    c, tall = count(across), min(352.0, max(high, 34.0 * count(down)))
    cells = Cells(cut, 1, count(cut), 1, 0, tall, tall, None, c, steps, c * count(inner))
    several = math.prod(steps.values())
    copies = n // math.prod(cut.values())
    uneven = " or fewer" * any(cut[axis] % steps[axis] for axis in cut)
    forms = ["{0}, {1}" if several == 2 else "{0} … {1}", "{0} …"]
    forms = forms if several > 1 else ["{0} × {2}"] * (copies > 1)
    fits = lambda form: text_width(form.format(n - 1, n - 1, copies), SMALL) <= cells.w - 4
    form = next(filter(fits, forms), "{0}")
    owner = lambda at: sum(apart[axis] * i for axis, i in at.items())
    ends = [
        [{a: span[k] - k for a, span in cells.ranges(i).items()} for k in (0, 1)]
        for i in range(cells.num)
    ]
    nodes = sorted({owner(first) // node for first, _ in ends})
    shades = min(8, len(nodes)) - 1
    at, items, own = coordinates(sizes, sizes, device), cells.around(), Items()
    for i, (first, last) in enumerate(ends):
        before = shades - nodes.index(owner(first) // node) % 8
        shade = f"{fill}-{8 - round(before * min(2, 7 / max(1, shades)))}"
        shade = shade if shade in LIGHT else fill
        box = (*cells.at(i), cells.w, cells.h)
        lengths = {a: last[a] - first[a] + 1 for a in cut}
        inside, num = {a: at[a] - first[a] for a in cut}, math.prod(lengths.values())
        text = form.format(owner(first), owner(last), copies)
        if all(0 <= inside[a] < lengths[a] for a in cut):
            name = text if num == 1 else str(device)
            own = _outlined(box, across, down, lengths, inside, name, shade)
            text = ""
        who = f"device {owner(first)}" + f" and {copies - 1} more" * (copies > 1)
        tip = who + f" ({cells.where(i)})" * bool(cut) + f": {holds(first, last)}"
        tip = f"{num} blocks, the first of {tip} each" if num > 1 else tip
        items += [
            Rect(*box, shade, "edge", 0.75),
            *fitting_text(box[0] + cells.w / 2, box[1] + cells.h / 2, cells.w, text, on=shade),
            Rect(*box, tip=tip, act=json.dumps({"device": owner(first)})),
        ]
    sides = [*((dim, "down") for dim in rows), *((dim, "across") for dim in columns)]
    words = [
        f"{dim.name} {side}" + f" by {','.join(dim.axes)}" * bool(dim.axes) for dim, side in sides
    ]
    whole, along = (
        "Each block" if cut else "All of it",
        [a for a in sizes if a not in cut and sizes[a] > 1],
    )
    seen = [
        f"One tensor, {'cut' if cut else 'not cut'}: {', '.join(words)}." * bool(words),
        f"A cell is {several} blocks{uneven}, with their first devices." * (several > 1),
        f"{whole} is on {copies:,} devices, copies along {', '.join(along)}." * (copies > 1),
        f"Shade: node {'of the first one' if several > 1 else f'({node} devices)'}." * (shades > 0),
    ]
    return items + own, " ".join(filter(None, seen))


def _outlined(
    box, across, down, lengths: dict[str, int], inside: dict[str, int], name: str, shade: str
) -> list:
    """Return the outline of one of the blocks in a box, which is seen on every shade, and its name."""
    spans, places = [], Layout((Dim("", (*across,)), Dim("", (*down,))))
    for axes, i, k in zip((across, down), block(places, lengths, inside), (0, 1), strict=True):
        num = math.prod(lengths[axis] for axis in axes)
        spans.append((box[k] + box[k + 2] * i / num, max(2.5, box[k + 2] / num)))
    (x, w), (y, h) = spans
    return [
        *(Rect(x, y, w, h, "", *line) for line in (("paper", 5.5), ("ink", 2.5))),
        *fitting_text(x + w / 2, y + h / 2, w * (h >= 10), name, on=shade),
    ]


def _moving(
    placed, parts: list[Cells], sizes: dict[str, int], device: int, segments
) -> list[Group]:
    """Return for each segment a frame with the arrows of its first round, over all parts of the mesh."""
    out = []
    for k, segment in enumerate(segments, 1):
        axes = tuple(a if a in sizes else USER_AXIS.get(a, a) for a in segment.axes)
        for spot, part in zip(placed, parts, strict=True) if axes else ():
            out.append(Group(tuple(part.moving(device, axes, segment.kind)), spot.dx, spot.dy, k))
    return out


def _captions(segments: list[Segment]) -> list[Group]:
    """Return what each frame shows, in words."""
    return [_lines(frame["text"], "ink", k) for k, frame in enumerate(frames(segments))]


def _lines(text: str, fill: str, frame: int, top: float = 0) -> Group:
    """Return a text of a frame in lines as wide as the column."""
    return Group(tuple(paragraph([text], COLUMN - 16, SMALL, fill)), dy=top, frame=frame)


def segment_words(segment: Segment) -> str:
    """Return in words what happens in a segment."""
    took, waits = segment.end_s - segment.start_s, segment.exposed_s
    if not segment.axes:
        slower = f", {time_text(waits)} of it for what travels beside" if waits else ""
        return f"All devices compute: {segment.name}, {time_text(took)}{slower}."
    messages = f" in {segment.times} messages" if segment.times > 1 else ""
    text = (
        f"{segment.name.capitalize()}: {segment.kind} over {','.join(segment.axes)}, "
        f"{segment.group} devices; {_RING_WORDS[segment.kind.removeprefix('ragged-')]}. "
        f"Each sends {size_text(segment.bytes_sent)}{messages}"
    )
    beside = "computing waits" if waits > 0.999 * took else "beside computing"
    if 0 < waits <= 0.999 * took:
        beside = f"computing waits for {time_text(waits)} of it"
    return f"{text}: {time_text(took)}, {beside}."


def frames(segments: list[Segment]) -> list[dict[str, Any]]:
    """Return frame 0, at rest, and one for each segment: how long it is shown, of 8 seconds in all, and its
    words."""
    total = sum(one.end_s - one.start_s for one in segments) or 1.0
    shown = [max(0.5, 8 * (one.end_s - one.start_s) / total) for one in segments]
    each = [
        {"seconds": round(t, 2), "text": segment_words(one)}
        for one, t in zip(segments, shown, strict=True)
    ]
    return [{"seconds": 1.0, "text": "At rest: who holds what."}, *each] if each else []


def layer_lanes(segments: list[Segment], count: int = 1) -> Scene:
    """Draw a layer in time: above what computes, below what is sent, in its axis' colour; hatched where
    computing waits for it. A step runs it forward ``count`` times. A frame outlines each segment
    (`frames`)."""
    layer = {"name": "a layer forward", "count": count, "events": [vars(one) for one in segments]}
    return two_lanes([layer], "One layer in time", COLUMN)
