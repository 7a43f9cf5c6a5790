"""Geometry of a mesh for pictures: who is where, who talks with whom, who holds which slice, and a
collective's rounds.

Plain numbers in, plain numbers out. static/explorer.js does the same in a browser; the tests hold the two,
and JAX, against each other.
"""

from __future__ import annotations

import itertools
import math

from llmpar.notation import ORDER, Layout, divisors


def strides(sizes: dict[str, int], order) -> dict[str, int]:
    """How far apart neighbours on each axis are in the list of devices; the last axis of ``order`` is
    innermost."""
    out, stride = {}, 1
    for axis in reversed(tuple(order)):
        out[axis], stride = stride, stride * sizes[axis]
    return out


def parted(sizes: dict[str, int], order, heads: int) -> tuple[dict[str, int], list[str]]:
    """Sizes and order with tp as two axes: tp, and inside it kv, whose ranks hold copies of one of the
    model's KV ``heads``."""
    copies = max(1, sizes["tp"] // heads) if sizes["tp"] % heads == 0 else 1
    parts = [part for axis in order for part in (("tp", "kv") if axis == "tp" else (axis,))]
    return sizes | {"tp": sizes["tp"] // copies, "kv": copies}, parts


def coordinates(sizes: dict[str, int], order, device: int) -> dict[str, int]:
    """A device's place on every axis."""
    return {axis: device // stride % sizes[axis] for axis, stride in strides(sizes, order).items()}


def groups(sizes: dict[str, int], order, axes) -> list[list[int]]:
    """The devices that talk over ``axes`` (outermost first), group by group; groups by their first device."""
    apart, found = strides(sizes, order), dict[int, list[tuple[int, int]]]()
    for device in range(math.prod(sizes.values())):
        first, rank = device, 0
        for a in axes:
            at = device // apart[a] % sizes[a]
            first, rank = first - at * apart[a], rank * sizes[a] + at
        found.setdefault(first, []).append((rank, device))
    return [[device for _, device in sorted(found[first])] for first in sorted(found)]


def block(layout: Layout, sizes: dict[str, int], at: dict[str, int]) -> tuple[int, ...]:
    """Which block of every dim the device at ``at`` holds, counted from 0."""
    index = []
    for dim in layout.dims:
        index.append(0)
        for axis in dim.axes:
            index[-1] = index[-1] * sizes[axis] + at[axis]
    return tuple(index)


def slices(layout: Layout, shape, sizes: dict[str, int], at: dict[str, int]) -> list[tuple[int, int]] | None:
    """First and last-plus-one index of every dim that the device at ``at`` holds; None where a dim is not
    divisible."""
    out = []
    for dim, size, index in zip(layout.dims, shape, block(layout, sizes, at), strict=True):
        step, rest = divmod(size, math.prod(sizes[axis] for axis in dim.axes))
        if rest:
            return None
        out.append((index * step, (index + 1) * step))
    return out


def holders(layout: Layout, sizes: dict[str, int], order=ORDER) -> dict[tuple[int, ...], list[int]]:
    """Which devices of the mesh hold each shard: a block index per dim, to positions in the list of devices.

    An axis without a size has size 1. Shards come in the order of their first device.
    """
    sizes = dict.fromkeys(layout.axes, 1) | sizes
    apart = dict.fromkeys(layout.axes, 1) | strides(sizes, [a for a in order if a in sizes])
    held: dict[tuple[int, ...], list[int]] = {}
    for device in range(math.prod(sizes.values())):
        at = {a: device // apart[a] % sizes[a] for a in layout.axes}
        held.setdefault(block(layout, sizes, at), []).append(device)
    return held


def places(sizes: dict[str, int], order, node: int) -> dict:
    """Where devices are drawn, in link order: cells [x, y] of one size in a few columns, and the frames of
    whole nodes.

    A gap parts the blocks of every axis, so that nesting shows. Above 512 devices a cell stands for ``block``
    of them.
    """
    n, apart = math.prod(sizes.values()), strides(sizes, order)
    # Block sizes that part no axis badly.
    nested = sorted({apart[a] * k for a in order for k in divisors(sizes[a])})
    block = next(b for b in nested if n // b <= 512)
    num, held = n // block, node // block
    # Rows leave room for arrows there and back.
    w, h, rise, most = (72, 46, 14, 8) if num <= 64 else (44, 20, 10, 16)
    limit = min(most, math.ceil(2 * num**0.5))
    columns = max(b // block for b in nested if b % block == 0 and b // block <= limit)
    if 3 * columns < limit:  # a long axis without small divisors wraps where it must
        columns = limit
    in_line = lambda count: columns % count == 0 or count % columns == 0
    steps = [apart[a] // block for a in order if sizes[a] > 1]
    gaps = [(step, 6) for step in steps if step > 1 and in_line(step)]
    framed = node < n and node % block == 0 and num % held == 0 and in_line(held)
    gaps += [(held, 10)] * framed + [(columns, 6)] * (framed and held < columns)
    cells, frames = [], []
    for i in range(num):
        row, col = divmod(i, columns)
        x = col * (w + 4) + sum(gap * (col // s) for s, gap in gaps if s < columns)
        y = row * (h + rise) + sum(gap * (row // (s // columns)) for s, gap in gaps if s >= columns)
        cells.append([x, y])
    for first in range(0, num, held) if framed else ():
        (x0, y0), (x1, y1) = cells[first], cells[first + held - 1]
        frames.append([x0 - 3, y0 - 3, x1 - x0 + w + 6, y1 - y0 + h + 6])
    return dict(block=block, columns=columns, w=w, h=h, rise=rise, cells=cells, frames=frames)


def rounds(kind: str, g: int, pairs=None) -> list[dict]:
    """A collective among g ranks, round by round, by rings: what goes from whom to whom, and what each then
    holds.

    ``sends`` are [from, to, block]; ``held[rank][block]`` counts what a rank has of a block: of the g addends
    of a sum; of the g pieces for rank ``block`` (all-to-all, a transpose: g pieces before, g after); else 0
    or 1. Round 0 is the start. Reduce-scatter leaves block r with rank r, as `lax.psum_scatter` does. A
    permute is one hop, between ``pairs`` of ranks or round the ring; who is sent nothing is left with
    nothing.
    """
    reduced, exchanged = kind in ("reduce-scatter", "all-reduce"), kind.endswith("all-to-all")
    held = [[int(reduced or exchanged or rank == b) for b in range(g)] for rank in range(g)]
    out = [{"sends": [], "held": [row[:] for row in held]}]
    if kind == "collective-permute" and g > 1:
        sends = [[source, target, source] for source, target in pairs or [(r, (r + 1) % g) for r in range(g)]]
        held = [[int([b, rank, b] in sends) for b in range(g)] for rank in range(g)]
        return [*out, {"sends": sends, "held": held}]
    parts = ("reduce-scatter", "all-gather") if kind == "all-reduce" else (kind,)
    for part, t in itertools.product(parts, range(g - 1)):
        hop = t + 1 if exchanged else 1
        shift = {"reduce-scatter": t + 1, "all-gather": t}.get(part, -hop)
        sends = [[r, (r + hop) % g, (r - shift) % g] for r in range(g)]
        before = [row[:] for row in held]
        for source, target, b in sends:
            moved = 1 if exchanged else before[source][b]
            held[target][b] = moved + held[target][b] * (part != "all-gather")
            held[source][b] -= moved * (part != "all-gather")
        out.append({"sends": sends, "held": [row[:] for row in held]})
    return out
