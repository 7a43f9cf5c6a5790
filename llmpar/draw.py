"""The drawings: values in, a :class:`~llmpar.scene.Scene` out. They draw what they are given and run nothing.

    mesh  layout  arrow              who holds what, and what moves
    collectives  ring_steps          what was sent, and how
    live_blocks                      who computes in ring attention, and who waits
    timetable  overlap               who works when
    memory_bars  time_bars           what fills the memory, and the step
    loss_curve                       whether it learns

One language in all: a colour is a mesh axis, always the same one; slanted lines are an unfinished sum
(or what was compiled, beside what was predicted), dots are copies; a cell says in words what its colour says. Every
number has its unit.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from itertools import product as every

from llmpar.notation import AXES, Arrow, Layout, MeshShape, divisors, parse_arrow, parse_layout, parse_mesh, product

# isort: off
from llmpar.scene import (
    SERIES, SMALL, Group, Line, Rect, Scene, Text, bounds, compose, fitting, legend, on, size_text, small, stack,
    text_width, ticks, time_text,
)  # fmt: skip
# isort: on

MAX_CELLS = 64
"""What a mesh or a layout shows one by one; above, it shows blocks."""


def _some(numbers, most: int = 8) -> str:
    """Numbers as text: ``0 4``, ``0–7`` where they are consecutive, with an ellipsis where they are many."""
    n = list(numbers)
    if len(n) > 2 and n == list(range(n[0], n[-1] + 1)):
        return f"{n[0]}–{n[-1]}"
    return " ".join(map(str, n if len(n) <= most else [*n[: most - 2], "…", n[-1]]))


def _many(n: int, what: str) -> str:
    """A count with its noun: ``1 copy``, ``2 copies``."""
    return f"{n} {what if n == 1 else what[:-1] + 'ies' if what.endswith('y') else what + 's'}"


# --------------------------------------------------------------------------------------------------------------- meshes


def _groups(shape: MeshShape, axis: str) -> list[list[int]]:
    """The devices that communicate over ``axis``, group by group."""
    sizes = shape.sizes
    stride = product(list(sizes.values())[list(sizes).index(axis) + 1 :])
    firsts = [i for i in range(shape.size) if i // stride % sizes[axis] == 0]
    return [[i + stride * k for k in range(sizes[axis])] for i in firsts]


Block = tuple[list, float, float]  # items, width, height


def _grid(kids: list[Block], gap: float, columns: int = 0) -> Block:
    """Blocks of one size in rows; by default as many columns as make the whole about square."""
    _, w, h = kids[0]
    n = len(kids)
    shapes = {c: abs(math.log(c * w / (-(-n // c) * h) / 1.3)) + (n % c > 0) for c in range(1, n + 1)}
    columns = columns or min(shapes, key=shapes.__getitem__)
    items = [Group(tuple(kid[0]), i % columns * (w + gap), i // columns * (h + gap)) for i, kid in enumerate(kids)]
    return items, columns * (w + gap) - gap, -(-n // columns) * (h + gap) - gap


def _frame(block: Block, name: str, color: str, dash: bool = False) -> Block:
    """A box around a block with its name on top."""
    items, w, h = block
    w = max(w, text_width(name, SMALL))
    box = Rect(0, 0, w + 16, h + 32, "", color, 1.5, radius=4, dash=dash)
    return [box, small(8, 12, name, "start", color), Group(tuple(items), 8, 24)], w + 16, h + 32


def mesh(shape: MeshShape | str, devices_per_host: int | None = None, highlight_axis: str | None = None) -> Scene:
    """The devices in link order: neighbours in a row share the fastest links. Boxes are outer axes, dashed ones hosts.

    ``highlight_axis`` fills the first group of devices that communicate over that axis, and numbers the groups. A mesh
    of more than 64 devices is drawn in blocks of consecutive ones.
    """
    shape = parse_mesh(shape)
    if highlight_axis not in (None, *AXES):
        raise ValueError(f"'{highlight_axis}' is no mesh axis to highlight; the axes are {' '.join(AXES)}")
    live = {a: n for a, n in shape.sizes.items() if n > 1} or {"dp": 1}
    levels, count = [], 1  # of each level: axis, its coordinates per block, blocks
    for axis, n in live.items():
        parts = max(q for q in divisors(n) if count * q <= MAX_CELLS)
        count *= parts
        levels += [(axis, n // parts, parts)] * (parts > 1 or n == 1)
        if parts < n:
            break
    block, host = shape.size // count, devices_per_host or shape.size
    inner = [block * product(p for *_, p in levels[i + 1 :]) for i in range(len(levels))]
    split = [i for i, size in enumerate(inner) if host % size == 0 and size * levels[i][2] % host == 0]
    boxed = split[0] if split and host < shape.size else None
    groups = _groups(shape, highlight_axis) if highlight_axis else []
    group_of = {d: g for g, group in enumerate(groups) for d in group}

    def name(depth: int, i: int) -> str:
        axis, per, _ = levels[depth]
        return f"{axis} {i}" if per == 1 else f"{axis} {i * per}–{i * per + per - 1}"

    widest = [_some(range(shape.size - block, shape.size)), name(-1, levels[-1][2] - 1), f"group {len(groups)}"]
    room = 10 + max(text_width(w) for w in widest[: 2 + bool(groups)])

    def leaf(first: int, where: str, axis: str) -> Block:
        devices = range(first, first + block)
        lit = bool(groups) and any(d in groups[0] for d in devices)
        fill = highlight_axis if highlight_axis and lit else "cell"
        items: list = [Rect(0, 0, room, 40, fill, f"{highlight_axis or axis}-line", 1.5, radius=3)]
        items += [Text(room / 2, 12, _some(devices), anchor="middle", fill=on(fill))]
        items += [small(room / 2, 28, where, fill=on(fill) if lit else f"{axis}-line")]
        if not groups or block > 1:
            return items, room, 40
        return [*items, small(room / 2, 48, f"group {group_of[first]}", fill="ink")], room, 54

    def node(depth: int, first: int, where: str = "", axis: str = "") -> Block:
        if depth == len(levels):
            return leaf(first, where, axis)
        child, _, n = levels[depth]
        kids = [node(depth + 1, first + i * inner[depth], name(depth, i), child) for i in range(n)]
        last = depth == len(levels) - 1
        if depth == boxed:
            per = host // inner[depth]
            hosts = [_grid(kids[i : i + per], 8, min(per, 16) if last else 0) for i in range(0, n, per)]
            whole = _grid([_frame(h, f"host {first // host + i}", "ink", True) for i, h in enumerate(hosts)], 10)
        else:
            whole = _grid(kids, 6 if last else 10, min(n, 16) if last else 0)
        return _frame(whole, where, f"{axis}-line") if where else whole

    by_axis = {a: _groups(shape, a) for a in live}
    apart = {a: g[0][-1] // max(1, len(g[0]) - 1) for a, g in by_axis.items()}
    facts = [(a, f"{a} = {n}: {AXES[a]}" + f", partners {apart[a]} apart" * (n > 1)) for a, n in live.items()]
    notes = [f"Each cell is a block of {block} devices."] * (block > 1)
    if devices_per_host:
        where = ", dashed." if boxed is not None else f": device i is on host i // {host}."
        notes.append(f"Hosts of {_many(host, 'device')}{where}")
    if groups:
        which = f"the first of {_many(len(groups), 'group')} over {highlight_axis}"
        notes.append(f"Filled: {which}, devices {_some(groups[0])}.")
    said = [f"groups over {a}: " + " | ".join(map(_some, g[:8])) + " | …" * (len(g) > 8) for a, g in by_axis.items()]
    text = "\n".join([*(fact for _, fact in facts), *said, *notes])
    return compose(f"mesh {shape}: {_many(shape.size, 'device')}", [node(0, 0)[0], legend(facts, 400)], text, notes)


# -------------------------------------------------------------------------------------------------------------- layouts


def holders(layout: Layout, sizes: dict[str, int]) -> dict[tuple[int, ...], list[int]]:
    """Which devices of the mesh hold each shard: a block index per dim, to device positions. As JAX places them."""
    axes = [a for a in AXES if a in sizes]
    held: dict[tuple[int, ...], list[int]] = {}
    for device, place in enumerate(every(*(range(sizes[a]) for a in axes))):
        at = dict(zip(axes, place, strict=True))
        index = [0] * len(layout.dims)
        for d, dim in enumerate(layout.dims):
            for axis in dim.axes:
                index[d] = index[d] * sizes.get(axis, 1) + at.get(axis, 0)
        held.setdefault(tuple(index), []).append(device)
    return held


def _places(axes: tuple[str, ...], sizes: dict[str, int], index: int) -> dict[str, int]:
    """The coordinates behind a block's index, outermost axis first; axes of size one left out."""
    out: dict[str, int] = {}
    for axis in reversed(axes):
        index, out[axis] = divmod(index, sizes.get(axis, 1))
    return {a: out[a] for a in axes if sizes.get(a, 1) > 1}


def _copies(layout: Layout, sizes: dict[str, int]) -> tuple[int, int, int]:
    """Shards, copies of each, and the parts of an unfinished sum."""
    shards, parts = product(sizes.get(a, 1) for a in layout.axes), product(sizes.get(a, 1) for a in layout.sums)
    return shards, product(sizes.values()) // shards // parts, parts


def _tensor(layout: Layout, shape, sizes: dict[str, int] | None) -> list:
    """A tensor of up to four dims as cells: the last dim runs across, the one before it down, and so on outwards.

    Blocks are parted by a line in the colour of the axis that cuts there. Without sizes, each axis cuts in two.
    """
    dims, num, named = layout.dims, len(layout.dims), sizes is not None
    if num > 4:
        raise ValueError(f"layout '{layout}' has {num} dims; a drawing has room for 4")
    sizes = sizes if sizes is not None else dict.fromkeys(layout.axes, 2)
    held = holders(layout, sizes)
    counts = [product(sizes.get(a, 1) for a in d.axes) for d in dims]
    for most in (8, 5, 4, 3):  # -1 stands for the blocks left out
        picked = [list(range(n)) if n <= most else [*range(most - 2), -1, n - 1] for n in counts]
        if product(map(len, picked)) <= MAX_CELLS:
            break
    sums = [a for a in layout.sums if not named or sizes.get(a, 1) > 1]
    marks = [("/", f"{a}-line" if a in AXES else "edge") for a in sums[:1]]
    marks += [(".", "edge")] * (named and _copies(layout, sizes)[1] > 1)

    def tick(d: int, i: int) -> str:
        places = _places(dims[d].axes, sizes, i)
        if not places:
            return dims[d].name + (f" = {shape[d]}" if shape else "")
        if i < 0 or not named:
            return "⋯" if i < 0 else f"{dims[d].name}/{','.join(places)}"
        return f"{dims[d].name}: " + " ".join(f"{a} {n}" for a, n in places.items())

    widths = [max(text_width(tick(d, i), SMALL) for i in picked[d]) + 12 for d in range(num)]
    w, h = max([92 if named else 40, *widths[::-1][::2]]), 44 if named else 30

    def cell(index: tuple[int, ...]) -> Block:
        tall = h + 10 * len(marks)
        if -1 in index:
            return [Text(w / 2, tall / 2, "⋯", anchor="middle", fill="soft")], w, tall
        items: list = [Rect(0, 0, w, tall, "cell", "edge")]
        items += [Rect(0, h + 10 * i, w, 10, "paper", stroke, hatch=m) for i, (m, stroke) in enumerate(marks)]
        if named:
            shard, devices = 0, held[index]
            for i, n in zip(index, counts, strict=True):
                shard = shard * n + i
            words = f"{'devices' if len(devices) > 1 else 'device'} {_some(devices, 4)}"
            items += [small(w / 2, 14, f"shard {shard}", fill="ink")]
            items += fitting(w / 2, 30, w - 4, words, _many(len(devices), "device"), fill="soft")
        return items, w, tall

    def node(index: tuple[int, ...]) -> Block:
        d = len(index)
        if d == num:
            return cell(index)
        items: list = []
        axes, across, at, other = [*_places(dims[d].axes, sizes, 0)], (num - d) % 2 == 1, 0.0, 0.0
        labelled = not across or d < num - 1 or not d or index[-1] == 0  # the columns' ticks stand above the first row
        margin, gap = (16 if across else widths[d]) * labelled, 5 if d >= num - 2 else 14
        for before, i in zip([-1, *picked[d]], picked[d], strict=False):
            kid, kw, kh = node((*index, i))
            if at:
                one, two = (_places(dims[d].axes, sizes, j) for j in (before, i))
                stroke = next((a for a in axes if -1 not in (before, i) and one[a] != two[a]), axes[0])
                ends = (at - gap / 2, margin), (at - gap / 2, margin + kh if across else margin + kw)
                items.append(Line(ends if across else tuple((y, x) for x, y in ends), f"{stroke}-line", 3))
            if labelled:
                ticks_above = 16 * (not across and d == num - 2 and i == 0)
                x, y = (at + kw / 2, 7) if across else (margin - 8, at + (kh + ticks_above) / 2)
                color = f"{axes[0]}-line" if axes else "soft"
                items.append(small(x, y, tick(d, i), "middle" if across else "end", color))
            items.append(Group(tuple(kid), *((at, margin) if across else (margin, at))))
            at += gap + (kw if across else kh)
            other = max(other, kh if across else kw)
        return (items, at - gap, other + margin) if across else (items, other + margin, at - gap)

    return node(())[0]


def _held_bytes(layout: Layout, shape: tuple[int, ...], sizes: dict[str, int], itemsize: int) -> int:
    return itemsize * product(layout.shard_shape(shape, sizes) if layout.dims else shape)


def _facts(layout: Layout, shape, sizes, itemsize) -> list[str]:
    """What a layout's picture says, in words."""
    if sizes is None:
        cuts = [f"{d.name} is {'cut by ' + ', '.join(d.axes) if d.axes else 'whole'}" for d in layout.dims]
        return cuts + [f"an unfinished sum over {s}" for s in layout.sums]
    shards, copies, parts = _copies(layout, sizes)
    facts = [f"{_many(shards, 'shard')} in {_many(copies, 'copy')}"]
    facts += [f"unfinished sum over {','.join(layout.sums)}: {parts} parts still to be added"] * (parts > 1)
    if shape and layout.dims:
        held, whole = ("×".join(map(str, x)) for x in (layout.shard_shape(shape, sizes), shape))
        facts.append(f"a device holds {held} of {whole}")
    if shape is not None and itemsize:
        facts.append(f"{size_text(_held_bytes(layout, shape, sizes, itemsize))} per device")
    return facts


def _key(layouts: list[Layout], sizes: dict[str, int] | None) -> list:
    used = [a for a in AXES if (not sizes or sizes[a] > 1) and any(a in x.axes + x.sums for x in layouts)]
    key: list = [(a, f"{a} = {sizes[a]}" if sizes else a) for a in used]
    key += [(a, f"unfinished sum over {a}", "/") for a in used if any(a in x.sums for x in layouts)]
    return legend(key + [("edge", "copies", ".")] * any(sizes and _copies(x, sizes)[1] > 1 for x in layouts), 480)


def _full(sizes: dict[str, int] | MeshShape | str | None) -> dict[str, int] | None:
    sizes = parse_mesh(sizes).sizes if isinstance(sizes, str | MeshShape) else sizes
    return sizes if sizes is None else dict.fromkeys(AXES, 1) | sizes


def layout(layout: Layout | str, shape=None, sizes=None, itemsize: int | None = None) -> Scene:
    """Which device holds which shard of a tensor of 0 to 4 dims; without a mesh (``sizes``), only where the cuts are.

    Bytes per device need ``shape`` and ``itemsize``. A shard with copies is dotted, an unfinished sum hatched.
    """
    layout, sizes = parse_layout(layout) if isinstance(layout, str) else layout, _full(sizes)
    facts = _facts(layout, shape, sizes, itemsize)
    held = holders(layout, sizes).values() if sizes else []
    text = [*facts, *(f"shard {i}: devices {_some(d)}" for i, d in enumerate(held))][:MAX_CELLS]
    title = f"{layout}" + (f" on {MeshShape(**sizes)}" if sizes else "")
    return compose(title, [_tensor(layout, shape, sizes), _key([layout], sizes)], "\n".join(text), facts)


def layout_svg(value: Layout) -> str:
    """A layout without a mesh: where it is cut."""
    return layout(value)._repr_svg_()


def moved(arrow: Arrow, shape: tuple[int, ...], sizes: dict[str, int], itemsize: int) -> list[tuple]:
    """The moves of an arrow and the bytes that each device sends for them, by ring algorithms.

    Of a group of g and a local value of V bytes: all-gather V(g-1); reduce-scatter and all-to-all V(g-1)/g; all-reduce
    twice that; a slice nothing.
    """
    held, out = _held_bytes(arrow.before, shape, sizes, itemsize), []
    for move in arrow.moves:
        g = product(sizes[a] for a in move.axes)
        share = held * (g - 1) // g
        out.append((move, {"all-gather": held * (g - 1), "all-reduce": 2 * share, "slice": 0}.get(move.kind, share)))
        held = {"all-gather": held * g, "reduce-scatter": held // g, "slice": held // g}.get(move.kind, held)
    return out


def arrow(arrow: Arrow | str, shape=None, sizes=None, itemsize: int | None = None) -> Scene:
    """A movement: the layout before, the collectives with the bytes that each device sends, the layout after."""
    arrow, sizes = parse_arrow(arrow) if isinstance(arrow, str) else arrow, _full(sizes)
    known = moved(arrow, shape, sizes, itemsize) if shape is not None and sizes and itemsize else []
    steps = [[str(m), f"{size_text(n)} sent per device"] for m, n in known] or [[str(m)] for m in arrow.moves]
    before, after = (_tensor(x, shape, sizes) for x in (arrow.before, arrow.after))
    color = f"{arrow.moves[0].axes[0]}-line" if steps else "edge"
    words = [word for step in steps for word in step] or ["nothing moves"]
    room, tall = max(text_width(w, SMALL) for w in words) + 10, 18 * len(words)
    down = bounds(before)[2] + bounds(after)[2] + room > 1000
    link = Line(((0, -10), (0, tall)) if down else ((0, tall), (room, tall)), color, 2.5, head=True)
    x, anchor = (14, "start") if down else (room / 2, "middle")
    middle = [link, *(small(x, 18 * i, word, anchor, color) for i, word in enumerate(words))]
    ends = (("before", arrow.before), ("after", arrow.after))
    facts = [f"{when}: {'; '.join(_facts(held, shape, sizes, itemsize))}" for when, held in ends]
    text = "\n".join([facts[0], *map(": ".join, steps), facts[1]])
    blocks = stack([before, middle, after], 14, across=not down)
    return compose(str(arrow), [blocks, _key([arrow.before, arrow.after], sizes)], text, facts)


# -------------------------------------------------------------------------------------------------------- what was sent


def collectives(rows) -> Scene:
    """Bytes that a device sends per step, predicted beside compiled, a pair of bars per mesh axis and kind.

    Rows are those of ``llmpar inspect --json``: ``axis``, ``kind``, ``count``, ``predicted_bytes``, ``compiled_bytes``;
    either of the last two may be missing.
    """
    names = [f"{r['axis']} {r['kind']} ×{r['count']}" for r in rows]
    left, wide = max(map(text_width, names)) + 12, 420
    pairs = [(r.get("predicted_bytes"), r.get("compiled_bytes")) for r in rows]
    items: list = []
    most, said = max([n or 0 for pair in pairs for n in pair] + [1]), []
    for i, (row, name, (predicted, compiled)) in enumerate(zip(rows, names, pairs, strict=True)):
        axis, y, verdict = row["axis"].split(",")[0], 44 * i, ""
        if None not in (predicted, compiled):
            verdict = ", equal" if predicted == compiled else f", {compiled / predicted - 1:+.1%}" if predicted else ""
        axis, color = (axis, f"{axis}-line") if axis in AXES else ("s2", "edge")
        items.append(Text(left - 10, y + 16, name, anchor="end"))
        words = [f"{w} {size_text(n)}" if n is not None else f"{w} unknown" for w, n in
                 (("predicted", predicted), ("compiled", compiled))]  # fmt: skip
        for k, n in enumerate((predicted, compiled)):
            bar = Rect(left, y + 16 * k, wide * (n or 0) / most, 14, "cell" if k else axis, color, hatch="/" * k)
            items += [bar] * bool(n) + [small(left + wide + 10, y + 16 * k + 7, words[k] + verdict * k, "start", "ink")]
        said.append(f"{name}: {words[0]}; {words[1]}{verdict}")
    key = legend([("s2", "predicted"), ("edge", "compiled", "/")])
    return compose("Bytes sent per device and step", [items, key], "\n".join(said))


def live_blocks(matrix, axis: str = "sp") -> Scene:
    """The attention blocks of a ring: ``matrix[rank][step]`` is the part of a block that must be computed, 0, 0.5 or 1.

    A step takes as long as its busiest rank; the last row adds these up.
    """
    ranks, steps = len(matrix), len(matrix[0])
    busiest = [max(row[t] for row in matrix) for t in range(steps)]
    w, h, left = max(46, text_width(f"step {steps - 1}", SMALL) + 8), 32, text_width(f"rank {ranks}", SMALL) + 14
    items: list = [small(left + w * (t + 0.5), -12, f"step {t}") for t in range(steps)]
    for r, row in enumerate([*matrix, busiest]):
        last, y = r == ranks, h * r + 14 * (r == ranks)
        items.append(small(left - 10, y + h / 2, "busiest" if last else f"rank {r}", "end"))
        for t, part in enumerate(row):
            x, half, filled = left + w * t, 0 < part < 1 and not last, part > 0 and not last
            items.append(Rect(x, y, w, h, axis if filled and not half else "paper", "edge"))
            items += [Line(((x, y), (x, y + h), (x + w, y + h)), "edge", 1, fill=axis)] * half
            spot = (x + w * 0.26, y + h * 0.7) if half else (x + w / 2, y + h / 2)
            color = on(axis) if filled else "ink" if part else "soft"
            items.append(small(*spot, {0.5: "½"}.get(part, f"{part:g}"), fill=color))
        total = f"{sum(row):g} blocks" + " of time" * last
        items.append(Text(left + w * steps + 12, y + h / 2, total, SMALL, bold=last))
    time, ideal = sum(busiest), sum(map(sum, matrix)) / ranks
    note = f"The ring takes {time:g} blocks of time; evenly spread over the ranks it would be {ideal:g} blocks."
    said = [f"rank {r}: {' '.join(f'{x:g}' for x in row)} = {sum(row):g} blocks" for r, row in enumerate(matrix)]
    title = f"Live attention blocks: {_many(ranks, 'rank')}, {_many(steps, 'ring step')}"
    return compose(title, [items], "\n".join([*said, note]), [note])


def ring_steps(pairs, num_steps: int | None = None, axis: str = "sp") -> Scene:
    """What each rank holds after every step of a permutation: ``pairs`` of (source, target), as compiled HLO has them.

    Rank r starts with block r. At most 16 ranks are drawn.
    """
    ranks = 1 + max(max(pair) for pair in pairs)
    drawn, steps, came_from = min(ranks, 16), num_steps or ranks, {target: source for source, target in pairs}
    w, h, left = 64, 62, text_width(f"step {steps}", SMALL) + 14
    middle = [left + w * (r + 0.4) for r in range(drawn)]
    items: list = [small(x, -14, f"rank {r}") for r, x in enumerate(middle)]
    said, held = [], list(range(ranks))
    for t in range(steps):
        items.append(small(left - 12, h * t + 14, f"step {t}", "end"))
        for r, (x, block) in enumerate(zip(middle, held, strict=False)):
            fill = axis if block == r else "cell"
            items.append(Rect(left + w * r, h * t, w * 0.8, 28, fill, f"{axis}-line", radius=3))
            items += fitting(x, h * t + 14, w * 0.8, f"block {block}", str(block), fill=on(fill))
        for source, target in pairs if t + 1 < steps else ():
            if max(source, target) < drawn:
                ends = ((middle[source], h * t + 29), (middle[target], h * (t + 1) - 2))
                items.append(Line(ends, f"{axis}-line", 1.5, head=True))
        said.append(f"step {t}: " + ", ".join(f"rank {r} holds block {b}" for r, b in enumerate(held[:drawn])))
        held = [held[came_from.get(r, r)] for r in range(ranks)]
    note = f"Filled: a rank holds its own block. After a step each sends what it holds over {axis}."
    note += f" Ranks {drawn} to {ranks - 1} are not drawn." * (ranks > drawn)
    title = f"Ring over {axis}: {_many(ranks, 'rank')}, {_many(steps, 'step')}"
    return compose(title, [items], "\n".join([*said, note]), [note])


# -------------------------------------------------------------------------------------------------- when, and how much


def _scale(at, values, y: float, text, up: float = 0) -> list:
    """Ticks with their labels below ``y``, and grid lines from there ``up``."""
    lines = [Line(((at(v), y - up), (at(v), y + 4)), "grid", 1) for v in values]
    return [*lines, *(small(at(v), y + 13, text(v)) for v in values)]


def memory_bars(rows, capacity_bytes: float | None = None, title: str = "Memory per device") -> Scene:
    """What fills a device's memory: ``rows`` of (label, {part: bytes}), beside the chip's capacity."""

    def marks(high: float) -> list[float]:
        unit = 1024.0 ** min(5, int(math.log(max(high, 1), 1024)))
        return [unit * t for t in ticks(0, high / unit)]

    return _bars(title, rows, capacity_bytes, size_text, marks, ("capacity", "free", "too much"))


def time_bars(rows, target_s: float | None = None, title: str = "Time per step") -> Scene:
    """Where a step's time goes: ``rows`` of (label, {part: seconds})."""
    return _bars(title, rows, target_s, time_text, lambda high: ticks(0, high), ("target", "to spare", "too slow"))


def _bars(title: str, rows, limit: float | None, text, marks, words: tuple[str, str, str]) -> Scene:
    rows = [(str(name), row) for name, row in rows]
    parts = list(dict.fromkeys(part for _, row in rows for part in row))
    fills = {p: (SERIES[i % 5], "/" * (i >= 5)) for i, p in enumerate(parts)}
    left, wide, bottom = max(text_width(name) for name, _ in rows) + 12, 480, 42 * len(rows) - 8
    high = max([sum(row.values()) for _, row in rows] + [limit or 0, 1e-12])
    items, said = _scale(lambda v: left + wide * v / high, marks(high), bottom, text, bottom), []
    for i, (name, row) in enumerate(rows):
        x, y, total = left, 42 * i, sum(row.values())
        for part, value in row.items():
            (fill, hatch), w = fills[part], wide * value / high
            items.append(Rect(x, y, w, 28, fill, "ink", 0.75, hatch, tip=f"{part} {text(value)}"))
            items += [] if hatch else fitting(x + w / 2, y + 14, w - 6, text(value), fill=on(fill))
            x += w
        over = limit is not None and total > limit
        spare = "" if limit is None else f"; {text(abs(limit - total))} {words[1 + over]}"
        items.append(Text(left - 10, y + 14, name, anchor="end"))
        items.append(Text(left + wide + 12, y + 14, text(total) + spare, SMALL, bold=over))
        said.append(f"{name}: {text(total)}{spare} (" + ", ".join(f"{p} {text(v)}" for p, v in row.items()) + ")")
    if limit is not None:
        x, said = left + wide * limit / high, [*said, f"{words[0]}: {text(limit)}"]
        items += [Line(((x, -8), (x, bottom + 4)), "ink", 2, dash=True), small(x, -16, f"{words[0]} {text(limit)}")]
    key = legend([(fill, part, hatch) if hatch else (fill, part) for part, (fill, hatch) in fills.items()])
    return compose(title, [items, key], "\n".join(said))


KINDS = {"F": "s1", "B": "s3", "W": "s4"}
"""Colours of forward, backward and weight gradient."""


def timetable(table, unit: str = "time units") -> Scene:
    """Who works when in a pipeline, and under each stage's row the activations that it holds.

    ``table`` is a :class:`~llmpar.schedule.Timetable` or, per stage, rows of (start, end, kind, microbatch, chunk).
    A microbatch is held from the start of its F to the end of its B, or of its W where there is one.
    """
    title, stages = "", table
    if hasattr(table, "schedule"):
        title, each = f"{table.schedule.name}: ", zip(table.start, table.end, table.schedule.order, strict=True)
        stages = [[(s, e, *op[:3]) for s, e, op in zip(*row, strict=True)] for row in each]
    span = max(end for row in stages for _, end, *_ in row)
    last = "W" if any(kind == "W" for row in stages for _, _, kind, *_ in row) else "B"
    shortest = min(end - start for row in stages for start, end, *_ in row if end > start)
    left, wide = text_width(f"stage {len(stages)}") + 10, min(1200, max(560, 34 * span / shortest))
    held = []  # per stage: from when on, how many
    for row in stages:
        visits = sum(kind == "F" for _, _, kind, *_ in row) / len({u for *_, u, _ in row})
        steps = sorted((s, 1) if kind == "F" else (e, -1) for s, e, kind, *_ in row if kind in ("F", last))
        totals = accumulate(step for _, step in steps)
        held.append({t: n / visits for (t, _), n in zip(steps, totals, strict=True)})
    most, bottom = max(max(h.values()) for h in held), 58 * len(stages)
    at = lambda t: left + wide * t / span
    items, said = _scale(at, ticks(0, span), bottom, lambda v: f"{v:g}", bottom), []
    items.append(small(left - 10, bottom + 13, unit, "end"))
    for i, row in enumerate(stages):
        y, floor, names = 58 * i, 58 * i + 48, [f"{kind}{u}" + f".{c}" * (c > 0) for _, _, kind, u, c in row]
        for (start, end, kind, u, chunk), name in zip(row, names, strict=True):
            x, w, fill = at(start), at(end) - at(start), KINDS[kind]
            items.append(Rect(x, y, w, 26, fill, "edge", 0.75, tip=f"{name}: {start:g} to {end:g} {unit}"))
            items += fitting(x + w / 2, y + 12, w - 2, name, f"{kind}{u}", str(u), fill=on(fill))
            items += [Rect(x + 1, y + 22, w - 2, 3, "black")] * (chunk > 0)
        outline, now = [(left, floor)], 0.0
        for t, n in held[i].items():
            outline += [(at(t), floor - 16 * v / most) for v in (now, n)]
            now = n
        items.append(Line((*outline, (at(span), floor)), "edge", 0.75, fill="s2"))
        busy, peak = sum(end - start for start, end, *_ in row) / span, f"at most {max(held[i].values()):g} held"
        items += [small(left - 10, y + 13, f"stage {i}", "end", "ink")]
        items += [small(at(span) + 10, y + 13, f"busy {busy:.1%}", "start", "ink")]
        items += [small(at(span) + 10, floor - 8, peak, "start", "ink")]
        said.append(f"stage {i}: {' '.join(names[:24])}{' …' * (len(names) > 24)}; busy {busy:.1%}, {peak}")
    idle = 1 - sum(end - start for row in stages for start, end, *_ in row) / span / len(stages)
    key = [("s1", "F forward"), ("s3", "B backward" + " of inputs" * (last == "W"))]
    key += [("s4", "W weights' gradients")] * (last == "W") + [("s2", "activations held, in microbatches")]
    key += [("black", "bar: chunk 1 or later")] * any(chunk for row in stages for *_, chunk in row)
    title += f"{span:g} {unit}, {idle:.1%} of them idle"
    return compose(title, [items, legend(key, 900)], "\n".join(said))


def overlap(compute_s, comm_s, labels=None, first: str = "compute", axis: str = "fsdp") -> Scene:
    """Computing and communicating in turn, and side by side; seconds per piece.

    ``first`` says what waits for what: ``compute`` when a piece's result is sent (gradient buckets), ``comm`` when a
    piece must arrive before it is used (gathered weights). Each of the two lanes works in order.
    """
    labels = [str(i) for i in range(len(compute_s))] if labels is None else labels
    if first not in ("compute", "comm") or not len(compute_s) == len(comm_s) == len(labels):
        found = f"{len(compute_s)} computing, {len(comm_s)} communicating and {len(labels)} labels, first='{first}'"
        raise ValueError(f"overlap got {found}; give as many of each, and first='compute' or 'comm'")

    def lanes(together: bool) -> list[list[tuple[float, float]]]:
        out: list[list[tuple[float, float]]] = [[], []]
        free = [0.0, 0.0]
        for a, b in zip(*((compute_s, comm_s) if first == "compute" else (comm_s, compute_s)), strict=True):
            start = free[0] if together else max(free)
            free = [start + a, max(start + a, free[1]) + b]
            out[0].append((start, free[0]))
            out[1].append((free[1] - b, free[1]))
        return out if first == "compute" else out[::-1]

    span, left, wide = sum(compute_s) + sum(comm_s), text_width("communicate", SMALL) + 12, 640
    at = lambda t: left + wide * t / span
    items, said = _scale(at, ticks(0, span), 196, time_text, 184), []
    for k, name in enumerate(("in turn", "side by side")):
        both, y = lanes(bool(k)), 108 * k
        total = max(both[0][-1][1], both[1][-1][1])
        said.append(f"{name}: {time_text(total)}, {time_text(total - sum(compute_s))} of it without computing")
        items.append(Text(left, y, said[-1], bold=True))
        for j, (lane, word, fill) in enumerate(zip(both, ("compute", "communicate"), ("s1", axis), strict=True)):
            top = y + 16 + 34 * j
            items.append(small(left - 10, top + 14, word, "end"))
            for (start, end), label in zip(lane, labels, strict=True):
                w, full = at(end) - at(start), f"{label}: {time_text(end - start)}"
                items.append(Rect(at(start), top, w, 28, fill, "ink", 0.75, tip=f"{word} {full}"))
                items += fitting(at(start) + w / 2, top + 14, w - 4, full, label, fill=on(fill))
    key = legend([("s1", "computing"), (axis, f"communicating over {axis}")])
    return compose("Communication behind computing", [items, key], "\n".join(said))


def loss_curve(losses, reference=None, title: str = "Training loss") -> Scene:
    """The loss per step, in nats per token; ``reference`` is another curve, or one number, drawn dashed."""
    level = isinstance(reference, int | float)
    other = [reference] * max(2, len(losses)) if level else [] if reference is None else reference
    curves = {n: [float(x) for x in c] for n, c in (("loss", losses), ("reference", other)) if len(c)}
    finite = [x for c in curves.values() for x in c if math.isfinite(x)] or [0.0]
    pad = 0.05 * (max(finite) - min(finite)) or 0.5
    low, high, wide, tall = min(finite) - pad, max(finite) + pad, 560, 260
    last = max(2, *map(len, curves.values())) - 1
    at, up = (lambda step: wide * step / last), (lambda loss: tall * (high - loss) / (high - low))
    steps = [t for t in ticks(0, last, 6) if t == int(t)]
    items = _scale(at, steps, tall, lambda v: f"{v:g}", tall)
    items += [Line(((-4, up(v)), (wide, up(v))), "grid", 1) for v in ticks(low, high)]
    items += [small(-8, up(v), f"{v:g}", "end") for v in ticks(low, high)]
    items += [Line(((0, 0), (0, tall), (wide, tall)), "edge", 1.5)]
    items += [small(-4, -18, "loss (nats/token)", "start", "ink"), small(wide / 2, tall + 34, "step", fill="ink")]
    said, ends = [], []
    for name, curve in curves.items():
        dash, points = name == "reference", [(at(i), up(x)) if math.isfinite(x) else None for i, x in enumerate(curve)]
        items += [Line((a, b), "ink" if dash else "dp-line", 2, dash) for a, b in pairwise(points) if a and b]
        items += [Rect(p[0] - 3, p[1] - 3, 6, 6, "ink", radius=3) for p in points[-1:] if p]
        lost, known = [i for i, p in enumerate(points) if not p], [x for x in curve if math.isfinite(x)]
        ends += [(up(x), f"{name} {x:.3f} nats/token") for x in known[-1:]]
        course = f"{x:.3f}" if (x := (known or [math.nan])[0]) == (known or [0])[-1] else f"{x:.3f} to {known[-1]:.3f}"
        said.append(f"{name}: {course} nats/token over {_many(len(curve), 'step')}")
        said[-1] += f"; not finite at step {_some(lost)}" * bool(lost)
    for k, (y, words) in enumerate(sorted(ends)):  # curves that end together are named below one another
        items.append(small(wide + 10, max(y, min(ends)[0] + 16 * k), words, "start", "ink"))
    return compose(title, [items], "\n".join(said), said)
