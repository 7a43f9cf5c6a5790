"""Draw layouts and arrows: which device holds what, what moves, which links an axis runs over.

One language in all drawings: a colour is a mesh axis, always the same one; slanted lines are an unfinished
sum (or what was compiled, beside what was predicted), dots copies; a cell says its colour in words, too.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from llmpar.draw.charts import count_noun, number_ranges
from llmpar.draw.geometry import coordinates, holders, strides
from llmpar.draw.scene import (
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
    flatten,
    legend,
    size_text,
    small_text,
    stack,
    text_width,
)
from llmpar.plan.layout import SCALED, Arrow, Dim, Layout, parse_arrow, parse_layout
from llmpar.plan.mesh_shape import AXES, ORDER, MeshShape, parse_mesh
from llmpar.predict.formulas import whole_ring_bytes
from llmpar.predict.hardware import Chip

# the axes whose colours those of other names have, by their place
_PALETTE = ("dp", "tp", "fsdp", "sp", "ep", "pp")
_MAX_CELLS = 64
"""What a layout shows one by one; of one with more some are left out."""


_Block = tuple[list, float, float]  # items, width, height


def links(shape: MeshShape | str, chip: Chip) -> Scene:
    """Draw which links carry each axis. A bar goes from the distance of neighbours in a group to that of its
    ends, in devices; beyond the dashed edge of a node it shares the network. Rates are as one device
    reaches."""
    sizes, one = parse_mesh(shape).sizes, chip.per_device()
    apart, items, lines = strides(sizes, AXES), Items(), []
    shown = [a for a in AXES if sizes[a] > 1]
    span = max(math.prod(sizes.values()), one.node_size)
    x_of = lambda devices: 80 + 380 * math.log2(devices) / math.log2(2 * span)
    edge, bottom, right = x_of(one.node_size), 36 * len(shown), x_of(2 * span) + 12
    for i, axis in enumerate(shown):
        reach, y = apart[axis] * sizes[axis], 36 * i
        beyond = reach > one.node_size
        rate = one.dcn_bytes_per_s if beyond else one.reached_link_bytes_per_s
        words = f"{rate / 1e9:.3g} GB/s, " + (
            "network between nodes"
            if beyond
            else f"reached of {one.link_bytes_per_s / 1e9:.3g}, links of a node"
        )
        items += [
            Text(70, y + 14, f"{axis} {sizes[axis]}", anchor="end", bold=True),
            Rect(
                x_of(apart[axis]), y + 3, x_of(reach) - x_of(apart[axis]), 22, axis, f"{axis}-line"
            ),
            small_text(right, y + 14, words, "start", "ink"),
        ]
        lines.append(
            f"{axis} {sizes[axis]}: neighbours {count_noun(apart[axis], 'device')} apart, groups"
            f" reach {reach}; {words}"
        )
    steps = [2**i for i in range(0, math.floor(math.log2(span)) + 1, 1 + (span > 64))]
    items += [
        small_text(right, bottom + 14, "devices apart", "start"),
        *(small_text(x_of(n), bottom + 14, str(n)) for n in steps),
        Line(((edge, -6), (edge, bottom + 4)), "ink", 2, dash=True),
        small_text(edge, -14, f"node of {one.node_size}"),
    ]
    return compose(
        f"{parse_mesh(shape)} on {chip.name}: the links of each axis", [items], "\n".join(lines)
    )


def hue(axis: str, sizes: dict[str, int] | None) -> str:
    """Return whose colour an axis has: its own, or of another name the next of the palette."""
    others = [a for a in sizes or () if a not in ORDER]
    return (
        axis if axis in ORDER else _PALETTE[others.index(axis) % len(_PALETTE)] if others else "sp"
    )


def _places(axes: tuple[str, ...], sizes: dict[str, int], index: int) -> dict[str, int]:
    """Return the coordinates behind a block's index, outermost axis first; axes of size one left out."""
    live = {a: sizes[a] for a in axes if sizes.get(a, 1) > 1}
    at = coordinates(live, live, index)
    return {a: at[a] for a in live}


def _copies(layout: Layout, sizes: dict[str, int]) -> tuple[int, int, int]:
    """Return the number of shards, of copies of each, and of the partial sums of an unfinished sum."""
    along = lambda axes: math.prod(sizes.get(a, 1) for a in axes)
    shards, parts = along(layout.axes), along(layout.sums)
    return shards, math.prod(sizes.values()) // shards // parts, parts


def _tensor(
    layout: Layout, shape, sizes: dict[str, int] | None, beside: Iterable[Layout] = ()
) -> list:
    """Return a tensor of up to four dims as cells, on the same scale as the layouts ``beside`` it. An
    unfinished sum has a sheet for each partial sum, since no two devices along its axes hold the same
    numbers."""
    items, wide, high = _cells(layout, shape, sizes)
    others = [_cells(other, shape, sizes)[1:] for other in beside]
    if others:
        w, h = map(max, zip(*others, strict=True))
        more = max(0, w - wide), max(0, h - high)
        items, wide, high = _cells(layout, shape, sizes, more)
    x, y, *_ = bounds([item for item in flatten(items) if isinstance(item, Rect)])
    sums = [a for a in layout.sums if sizes is None or sizes.get(a, 1) > 1]
    num = 2 ** len(sums) if sizes is None else math.prod(sizes[a] for a in sums)
    shown = list(range(num)) if num < 6 else [0, 1, 2, -1, num - 1]
    stroke = f"{hue(sums[0], sizes)}-line" if sums else "edge"
    sheets: list = []
    for i, k in reversed(list(enumerate(shown))[1:]):
        places = _places(tuple(sums), sizes, k).items() if sizes is not None else ()
        words = "+ ⋯" if k < 0 else "+ " + " ".join(f"{a} {n}" for a, n in places)
        left, low = x + 8 * i, y + 17 * i + high
        sheets += [
            Rect(left + wide - 8, y + 17 * i, 8, high - 17, "paper", stroke, hatch="/"),
            Rect(left, low - 17, wide, 17, "cell", stroke),
            *fitting_text(left + wide / 2, low - 8, wide - 4, words, words[:3], "+"),
        ]
    return sheets + items


def _picked(counts: list[int]) -> list[list[int]]:
    """Return the blocks of each dim that are drawn, at most `_MAX_CELLS` in all; -1 stands for those left
    out."""
    for most in (8, 5, 4, 3):
        picked = [list(range(n)) if n <= most else [*range(most - 2), -1, n - 1] for n in counts]
        if math.prod(map(len, picked)) <= _MAX_CELLS:
            break
    return picked


@dataclass(frozen=True)
class _Grid:
    """A tensor to be drawn as cells. Without a mesh (not ``named``) each axis cuts in two."""

    dims: tuple[Dim, ...]
    sizes: dict[str, int]
    named: bool
    shape: Any
    picked: list[list[int]]
    marks: list[tuple[str, str]]  # hatch and stroke of the strips at the foot of a cell
    devices: dict[tuple[int, ...], list[int]]  # of the front sheet, by block

    def tick(self, d: int, i: int) -> str:
        """Return the label of block ``i`` of dim ``d``."""
        dim = self.dims[d]
        places = _places(dim.axes, self.sizes, i)
        if not places:
            return dim.name + (f" = {self.shape[d]}" if self.shape else "")
        if i < 0 or not self.named:
            return "⋯" if i < 0 else f"{dim.name}/{','.join(places)}"
        return f"{dim.name}: " + " ".join(f"{a} {n}" for a, n in places.items())

    def tick_width(self, d: int) -> float:
        """Return the width of the labels of dim ``d``."""
        return max(text_width(self.tick(d, i), SMALL) for i in self.picked[d]) + 12

    def cell(self, index: tuple[int, ...], w: float, h: float) -> _Block:
        """Return one block: its shard, the devices that hold it, and the strips of `marks`."""
        tall = h + 10 * len(self.marks)
        if -1 in index:
            return [Text(w / 2, tall / 2, "⋯", anchor="middle", fill="soft")], w, tall
        items: list = [Rect(0, 0, w, tall, "cell", "edge")]
        for i, (hatch, stroke) in enumerate(self.marks):
            items.append(Rect(0, h + 10 * i, w, 10, "paper", stroke, hatch=hatch))
        if self.named:
            shard, devices = 0, self.devices[index]
            for i, dim in zip(index, self.dims, strict=True):
                shard = shard * math.prod(self.sizes.get(a, 1) for a in dim.axes) + i
            words = f"{'devices' if len(devices) > 1 else 'device'} {number_ranges(devices, 4)}"
            names = words, count_noun(len(devices), "device")
            items += [
                small_text(w / 2, h / 2 - 8, f"shard {shard}", fill="ink"),
                *fitting_text(w / 2, h / 2 + 8, w - 4, *names, fill="soft"),
            ]
        return items, w, tall

    def border(self, d: int, before: int, i: int, points) -> Line:
        """Return the line between two neighbouring blocks, in the colour of the outermost axis that cuts
        there."""
        one, two = (_places(self.dims[d].axes, self.sizes, j) for j in (before, i))
        axes = [*_places(self.dims[d].axes, self.sizes, 0)]
        axis = next((a for a in axes if -1 not in (before, i) and one[a] != two[a]), axes[0])
        return Line(points, f"{hue(axis, self.sizes)}-line", 3)

    def block(self, index: tuple[int, ...], w: float, h: float) -> _Block:
        """Return the cells of all blocks that begin with ``index``, with the ticks of the dims inside."""
        d, num = len(index), len(self.dims)
        if d == num:
            return self.cell(index, w, h)
        items: list = []
        axes = [*_places(self.dims[d].axes, self.sizes, 0)]
        across = (num - d) % 2 == 1
        offset, other = 0.0, 0.0
        # columns: above the first row
        labelled = not across or d < num - 1 or not d or index[-1] == 0
        margin = (16 if across else self.tick_width(d)) * labelled
        gap = 5 if d >= num - 2 else 14
        for before, i in zip([-1, *self.picked[d]], self.picked[d], strict=False):
            kid, kw, kh = self.block((*index, i), w, h)
            if offset:
                ends = (
                    (offset - gap / 2, margin),
                    (offset - gap / 2, margin + kh if across else margin + kw),
                )
                items.append(
                    self.border(d, before, i, ends if across else tuple((y, x) for x, y in ends))
                )
            if labelled:
                ticks_above = 16 * (not across and d == num - 2 and i == 0)
                x, y = (
                    (offset + kw / 2, 7)
                    if across
                    else (margin - 8, offset + (kh + ticks_above) / 2)
                )
                color = f"{hue(axes[0], self.sizes)}-line" if axes else "soft"
                items.append(
                    small_text(x, y, self.tick(d, i), "middle" if across else "end", color)
                )
            items.append(Group(tuple(kid), *((offset, margin) if across else (margin, offset))))
            offset += gap + (kw if across else kh)
            other = max(other, kh if across else kw)
        return (
            (items, offset - gap, other + margin)
            if across
            else (items, other + margin, offset - gap)
        )


def _cells(
    layout: Layout, shape, sizes: dict[str, int] | None, more: tuple[float, float] = (0, 0)
) -> _Block:
    """Return a tensor as cells with their ticks, and how wide and high they are without ticks, which can be
    ``more``: the last dim runs across, the one before it down, and so on outwards. Blocks are parted by a
    line in the colour of the axis that cuts there. Without sizes, each axis cuts in two."""
    num, named = len(layout.dims), sizes is not None
    if num > 4:
        raise ValueError(f"layout '{layout}' has {num} dims; a drawing has room for 4")
    sizes = sizes if sizes is not None else dict.fromkeys(layout.axes, 2)
    # a sum's first partial sum, in front
    first = set(holders(Layout((Dim("sum", layout.sums),)), sizes)[0,])
    devices = {
        index: [d for d in owners if d in first] for index, owners in holders(layout, sizes).items()
    }
    sums = [a for a in layout.sums if not named or sizes.get(a, 1) > 1]
    copied = named and _copies(layout, sizes)[1] > 1
    marks = [*(("/", f"{hue(a, sizes)}-line") for a in sums[:1]), *[(".", "edge")] * copied]
    picked = _picked([math.prod(sizes.get(a, 1) for a in dim.axes) for dim in layout.dims])
    grid = _Grid(layout.dims, sizes, named, shape, picked, marks, devices)
    across, down = (math.prod(len(blocks) for blocks in picked[::-1][i::2]) for i in (0, 1))
    w = (
        max(
            [
                116 if {*sizes} - {*ORDER} else 92 if named else 40,
                *(grid.tick_width(d) for d in range(num)[::-1][::2]),
            ]
        )
        + more[0] / across
    )
    h = (44 if named else 30) + more[1] / down
    items = grid.block((), w, h)[0]
    left, top, right, bottom = bounds([item for item in flatten(items) if isinstance(item, Rect)])
    return items, right - left, bottom - top


def _local_bytes(
    layout: Layout, shape: tuple[int, ...], sizes: dict[str, int], itemsize: int
) -> int:
    return itemsize * math.prod(layout.shard_shape(shape, sizes) if layout.dims else shape)


def _facts(layout: Layout, shape, sizes, itemsize) -> list[str]:
    """Return in words what a layout's picture shows."""
    if sizes is None:
        cuts = [
            f"{d.name} is {'cut by ' + ', '.join(d.axes) if d.axes else 'whole'}"
            for d in layout.dims
        ]
        return cuts + [f"an unfinished sum over {s}" for s in layout.sums]
    shards, copies, parts = _copies(layout, sizes)
    facts = [f"{count_noun(shards, 'shard')} in {count_noun(copies, 'copy')}"]
    facts += [f"unfinished sum over {','.join(layout.sums)}: {parts} parts still to be added"] * (
        parts > 1
    )
    if shape and layout.dims:
        shard, whole = ("×".join(map(str, x)) for x in (layout.shard_shape(shape, sizes), shape))
        facts.append(f"a device holds {shard} of {whole}")
    if shape is not None and itemsize:
        facts.append(f"{size_text(_local_bytes(layout, shape, sizes, itemsize))} per device")
    return facts


def _key(layouts: list[Layout], sizes: dict[str, int] | None) -> list:
    named = {a for x in layouts for a in x.axes + x.sums}
    every = [*ORDER, *(a for a in sizes or () if a not in ORDER)]
    used = [a for a in every if a in named and (not sizes or sizes.get(a, 1) > 1)]
    copied = any(sizes and _copies(x, sizes)[1] > 1 for x in layouts)
    key: list = [
        *((hue(a, sizes), f"{a} = {sizes[a]}" if sizes else a) for a in used),
        *(
            (hue(a, sizes), f"unfinished sum over {a}", "/")
            for a in used
            if any(a in x.sums for x in layouts)
        ),
        *([("edge", "copies", ".")] if copied else []),
    ]
    return legend(key, 480)


def _full(sizes: dict[str, int] | MeshShape | str | None) -> dict[str, int] | None:
    sizes = parse_mesh(sizes).sizes if isinstance(sizes, str | MeshShape) else sizes
    return sizes if sizes is None else dict.fromkeys(AXES, 1) | sizes


def layout(layout: Layout | str, shape=None, sizes=None, itemsize: int | None = None) -> Scene:
    """Draw which device holds which shard of a tensor of 0 to 4 dims; without a mesh (``sizes``), where it is
    cut.

    Bytes need ``shape`` and ``itemsize``. Copies are dotted, an unfinished sum hatched, with a sheet for each
    partial sum.
    """
    layout = parse_layout(layout) if isinstance(layout, str) else layout
    sizes = _full(sizes)
    facts = _facts(layout, shape, sizes, itemsize)
    owners = holders(layout, sizes).values() if sizes else []
    text = [*facts, *(f"shard {i}: devices {number_ranges(d)}" for i, d in enumerate(owners))][
        :_MAX_CELLS
    ]
    title = f"{layout}" + (f" on {MeshShape(**sizes)}" if sizes else "")
    return compose(
        title, [_tensor(layout, shape, sizes), _key([layout], sizes)], "\n".join(text), facts
    )


def moved(
    arrow: Arrow, shape: tuple[int, ...], sizes: dict[str, int], itemsize: int
) -> list[tuple]:
    """Return the moves of an arrow, and the bytes that a device of g sends for them on a ring
    (`whole_ring_bytes`): for V local ones all-gather V(g-1); reduce-scatter, all-to-all V(g-1)/g; all-reduce
    twice that; a slice none. With a dtype on the arrow they are those of that dtype, scales too."""
    each = {"bf16": 2.0, "e4m3": 1 + 4 / SCALED}.get(arrow.wire, float(itemsize))
    size = _local_bytes(arrow.before, shape, sizes, 1)
    out = list[tuple]()
    for move in arrow.moves:
        g = math.prod(sizes[a] for a in move.axes)
        size *= g if move.kind == "all-gather" else 1
        message = 0 if move.kind == "slice" else math.ceil(size * each)
        out.append((move, whole_ring_bytes(move.kind, message, g)))
        size //= g if move.kind in ("reduce-scatter", "slice") else 1
    return out


def arrow(arrow: Arrow | str, shape=None, sizes=None, itemsize: int | None = None) -> Scene:
    """Draw a movement to scale: the layout before, collectives with bytes sent per device, the layout
    after."""
    arrow = parse_arrow(arrow) if isinstance(arrow, str) else arrow
    sizes = _full(sizes)
    known = moved(arrow, shape, sizes, itemsize) if shape is not None and sizes and itemsize else []
    steps = [[str(m), f"{size_text(n)} sent per device"] for m, n in known]
    steps = steps or [[str(move)] for move in arrow.moves]
    both = [arrow.before, arrow.after]
    words = [word for step in steps for word in step] or ["nothing moves"]
    color = f"{arrow.moves[0].axes[0]}-line" if steps else "edge"
    facts = [
        f"{when}: {'; '.join(_facts(one, shape, sizes, itemsize))}"
        for when, one in zip(("before", "after"), both, strict=True)
    ]
    text = "\n".join([facts[0], *map(": ".join, steps), facts[1]])
    return compose(
        str(arrow), [_chain(both, [words], [color], shape, sizes), _key(both, sizes)], text, facts
    )


def _chain(layouts: list[Layout], words: list[list[str]], colors: list[str], shape, sizes) -> list:
    """Return layouts on one scale with an arrow between each two, its words above; below one another where
    they are wide."""
    parts = [_tensor(x, shape, sizes, layouts) for x in layouts]
    wide = [max(text_width(word, SMALL) for word in texts) + 10 for texts in words]
    down = sum(bounds(part)[2] for part in parts) + sum(wide) > 1000
    blocks = parts[:1]
    for lines, color, width, part in zip(words, colors, wide, parts[1:], strict=True):
        tall = 18 * len(lines)
        ends = ((0, -10), (0, tall)) if down else ((0, tall), (width, tall))
        x, anchor = (14.0, "start") if down else (width / 2, "middle")
        texts = (small_text(x, 18 * i, word, anchor, color) for i, word in enumerate(lines))
        blocks += [[Line(ends, color, 2.5, head=True), *texts], part]
    return stack(blocks, 14, across=not down)


def resharded(
    route: list[Layout],
    steps: list[tuple[str, str, int]],
    shape,
    sizes,
    itemsize: int,
    title: str = "",
) -> Scene:
    """Draw a value on its way through layouts, with the words of each step, an axis (its colour), and the
    bytes that a device sends. ``sizes`` are those of axes of any names, in the mesh's order."""
    words = [[does, f"{size_text(n)} sent per device"] if n else [does] for does, _, n in steps]
    colors = [f"{hue(axis, sizes)}-line" for _, axis, _ in steps]
    facts = ["; ".join(_facts(one, shape, sizes, itemsize)) for one in route]
    lines = [
        facts[0],
        *(f"{': '.join(does)}\n{fact}" for does, fact in zip(words, facts[1:], strict=True)),
    ]
    for when, one in {"before": route[0], "after": route[-1]}.items():
        owners = enumerate(holders(one, sizes).values())
        lines += [f"{when}, shard {i}: devices {number_ranges(d)}" for i, d in owners][:_MAX_CELLS]
    title = title or " -> ".join(map(str, dict.fromkeys((route[0], route[-1]))))
    blocks = [_chain(route, words, colors, shape, sizes), _key(route, sizes)]
    return compose(title, blocks, "\n".join(lines))
