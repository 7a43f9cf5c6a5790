"""Draw hosts and the wire between them, a mesh that grows axis by axis, tables with cells in colour, and what
one mesh sends to another."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from llmpar.draw.charts import count_noun
from llmpar.draw.geometry import coordinates
from llmpar.draw.scene import (
    OTHERS,
    SMALL,
    Items,
    Line,
    Rect,
    Scene,
    Text,
    bounds,
    compose,
    legend,
    size_text,
    small_text,
    stack,
    text_color_on,
    text_width,
    titled,
)
from llmpar.plan.mesh_shape import AXES, parse_mesh
from llmpar.plan.two_meshes import TwoMeshes
from llmpar.predict.two_meshes import link_loads

_WAYS = (0, 46), (46, 0), (20, -20), (120, 28)
"""Where the next device lies along the first axis of a growing mesh, the second …, in pixels."""
Pairs = Mapping[str, Iterable[tuple[int, int]]]


def wired(
    hosts: Sequence, wire: Sequence[str], pairs: Pairs | None = None, title: str = ""
) -> Scene:
    """Draw hosts beside one another with their devices, and a wire with its words between them.

    ``hosts[host][device]`` are short texts, a cell for each. ``pairs`` are, per axis, the devices that talk:
    neighbours in a host, or at the same place of two. Without pairs, what another device has is red.
    """
    cell = max(text_width(text, SMALL) for host in hosts for own in host for text in own) + 16
    wide = max(cell * max(len(own) for host in hosts for own in host), text_width("device 00")) + 16
    between, tall, seen = max(map(text_width, wire)) + 16, 100 * max(map(len, hosts)), set[str]()
    items, lines, at = Items(), list[str](), list[tuple[float, float]]()
    for h, host in enumerate(hosts):
        left = h * (wide + 32 + between)
        items += [
            Text(left + wide / 2 + 16, -12, f"host {h}", anchor="middle", bold=True),
            Rect(left, 0, wide + 32, tall + 8, "", "edge", 1.5, dash=True, radius=6),
        ]
        for i, text in enumerate(wire if h else ()):
            items += [Rect(left - between, 30, between, tall - 48, "grid", "network")] * (not i)
            y = tall / 2 + 6 + 20 * (i - (len(wire) - 1) / 2)
            items.append(Text(left - between / 2, y, text, anchor="middle"))
        for y, own in zip(itertools.count(16, 100), host, strict=False):
            x, fill = left + 16, OTHERS[len(at) % len(OTHERS)]
            items += [
                Rect(x, y, wide, 76, "cell", "edge"),
                Rect(x, y, wide, 26, fill, "edge"),
                Text(x + 8, y + 13, f"device {len(at)}", fill=text_color_on(fill)),
            ]
            for i, text in enumerate(own):
                tone = (
                    ("bad-ground", "bad", 2) if text in seen and not pairs else ("paper", "edge", 1)
                )
                items += titled(Rect(x + 10 + cell * i, y + 38, cell - 4, 26, *tone), text, SMALL)
            seen.update(own)
            lines.append(f"host {h}, device {len(at)}: {', '.join(own)}")
            at.append((x, y))
    for axis, linked in (pairs or {}).items():
        for (x0, y0), (x1, y1) in ((at[one], at[two]) for one, two in linked):
            inside = (x0 + wide / 2, y0 + 76), (x1 + wide / 2, y1)
            across = (x0 + wide, y0 + 38), (x1, y1 + 38)
            items.append(Line(inside if x0 == x1 else across, f"{axis}-line", 4))
        lines.append(f"{axis}: " + ", ".join(f"{one} with {two}" for one, two in linked))
    key = legend([(f"{axis}-line", f"{axis}: {AXES[axis]}") for axis in pairs or ()])
    return compose(title, [items, *[key] * bool(key)], "\n".join([*lines, *wire]))


def growing(meshes: Iterable[str], title: str) -> Scene:
    """Draw meshes of up to four axes, each with one more: squares are devices, lines join neighbours."""
    blocks, lines, order = list[list](), list[str](), list[str]()
    for mesh in map(parse_mesh, meshes):
        sizes, items = mesh.named, Items()
        order += [axis for axis in sizes if axis not in order]
        at = [coordinates(sizes, sizes, device) for device in range(mesh.size)]
        spots = [
            [sum(_WAYS[order.index(a)][i] * n for a, n in one.items()) for i in (0, 1)]
            for one in at
        ]
        for (one, p), (two, q) in itertools.combinations(zip(at, spots, strict=True), 2):
            apart = [axis for axis in sizes if one[axis] != two[axis]]
            if len(apart) == 1 and two[apart[0]] == one[apart[0]] + 1:
                items.append(
                    Line(((p[0] + 8, p[1] + 8), (q[0] + 8, q[1] + 8)), f"{apart[0]}-line", 3)
                )
        items += [Rect(x, y, 16, 16, "cell", "edge", 1.5, radius=3) for x, y in spots]
        left, _, right, bottom = bounds(items)
        lines.append(f"{mesh}: {count_noun(mesh.size, 'device')}")
        items.append(
            small_text((left + right) / 2, bottom + 18, lines[-1].rpartition(": ")[2], fill="ink")
        )
        blocks.append(items)
    key = legend([(f"{axis}-line", f"{axis}: {AXES[axis]}") for axis in order], 240)
    return compose(title, [stack(blocks, 44, across=True), key], "\n".join(lines))


def table(rows, columns: Sequence[str] = (), title: str = "", notes: Sequence[str] = ()) -> Scene:
    """Draw a table in colour: ``rows`` are (name, [(text, role of its ground), …]), as long as they like."""
    left = max(text_width(name) for name, _ in rows) + 12
    num = max(len(cells) for _, cells in rows)
    texts = [
        [*columns[i : i + 1], *(cells[i][0] for _, cells in rows if i < len(cells))]
        for i in range(num)
    ]
    wides = [max(map(text_width, column)) * 1.1 + 16 for column in texts]
    edges = [left + sum(wides[:i]) for i in range(num)]
    lines = [", ".join(columns)] * bool(columns)
    items: list = [Text(x, -14, text, bold=True) for x, text in zip(edges, columns, strict=False)]
    for y, (name, cells) in zip(itertools.count(0, 34), rows, strict=False):
        items.append(Text(left - 10, y + 15, name, anchor="end"))
        for (text, role), x, wide in zip(cells, edges, wides, strict=False):
            items += titled(Rect(x, y, wide - 4, 30, role, "edge" if role else ""), text)
        lines += [f"{name}: " + ", ".join(text for text, _ in cells if text)] if cells else []
    return compose(title, [items], "\n".join([*lines, *notes]), notes)


def traffic(plan: TwoMeshes) -> Scene:
    """Draw what each device of the first mesh sends to each of the second; below, round by round, from which
    device each of them receives. Meshes of up to 32 devices are drawn."""
    senders, receivers = (sorted(side.node_of) for side in plan.sides)
    if max(len(senders), len(receivers)) > 32:
        raise ValueError(
            f"meshes of {len(senders)} and {len(receivers)} devices cannot be drawn one by one, which needs"
            " up to 32; read plan.matrix and plan.rounds"
        )
    loads, nothing = link_loads(plan), ("·", "")
    load = lambda device, verb: (size_text(loads.get((device, verb), 0)), "")
    cell = lambda text, pair: (f"{text}*", "network") if plan.is_far(pair) else (text, "links")
    cells = {pair: cell(size_text(sent), pair) for pair, sent in plan.matrix.items()}
    rows = [
        (f"from {i}", [*(cells.get((i, j), nothing) for j in receivers), load(i, "sends")])
        for i in senders
    ]
    total = size_text(plan.bound), ""
    rows += [("receives", [*(load(j, "receives") for j in receivers), total]), ("", [])]
    for number, one in enumerate(plan.rounds, 1):
        comes = {j: cell(f"{i}", (i, j)) for i, j in one}
        together = size_text(sum(one.values())), ""
        rows.append((f"round {number}", [*(comes.get(j, nothing) for j in receivers), together]))
    device, verb = next(iter(loads), (senders[0], "sends"))
    notes = [
        "Each device gets what it lacks, and no more. A cell of a round names the sender."
        + " *: between nodes." * any(map(plan.is_far, plan.matrix))
        + f" A device sends or receives at most {load(device, verb)[0]}."
    ]
    return table(rows, [*(f"to {j}" for j in receivers), "in all"], str(plan), notes)
