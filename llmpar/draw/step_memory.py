"""What a device holds while a step goes forward and backward."""

from __future__ import annotations

from llmpar.draw import scene
from llmpar.draw.charts import MEMORY, _byte_ticks, role_of
from llmpar.draw.scene import SMALL, Line, Scene, Text, compose, legend, size_text, small_text, text_width

WIDE, TALL, GAP = 196, 220, 22
"""Pixels of a panel, and between two of them."""


def step_memory(
    rows, phases, capacity_bytes: float, title: str = "Memory of a device over one step", roles=None
) -> Scene:
    """Memory over a step, a panel for each way to run it, all on one scale beside the chip's capacity.

    ``rows`` are {name: moments}, and a moment is {part: bytes}; parts lie on one another in the order of the
    first moment that has them. ``phases`` are (name, number of moments), and follow one another: a phase ends
    where the next one begins. ``roles`` are those of parts that colours.toml does not know by name.
    """
    roles, named = MEMORY | (roles or {}), dict.fromkeys(p for ms in rows.values() for m in ms for p in m)
    most = {name: max(sum(moment.values()) for moment in moments) for name, moments in rows.items()}
    high = 1.08 * max([*most.values(), capacity_bytes])
    levels = _byte_ticks(high)
    left = max(text_width(size_text(v), SMALL) for v in levels) + 8
    right, y_of = left + len(rows) * (WIDE + GAP) - GAP, lambda v: TALL * (1 - v / high)
    items: list = [Line(((left, y_of(v)), (right, y_of(v))), "grid", 1) for v in levels]
    items += [small_text(left - 6, y_of(v), size_text(v), "end") for v in levels]
    lines, limit, said = [f"capacity: {size_text(capacity_bytes)}"], y_of(capacity_bytes), []
    for k, (name, moments) in enumerate(rows.items()):
        x0, count, floor = left + k * (WIDE + GAP), len(moments) - 1, [0.0] * len(moments)
        for part in named:
            top = [low + moment.get(part, 0) for low, moment in zip(floor, moments, strict=True)]
            edge = [(x0 + WIDE * i / count, y_of(v)) for i, v in enumerate(top)]
            base = [(x0 + WIDE * i / count, y_of(v)) for i, v in enumerate(floor)]
            fill = scene.look(role_of(part, roles))[0]
            items += [Line((*edge, *base[::-1]), "ink", 0.5, fill=fill)] * (top != floor)
            floor = top
        at = max(range(count + 1), key=floor.__getitem__)
        x, over = x0 + WIDE * at / count, floor[at] > capacity_bytes
        words = f"{size_text(most[name])}" + ": too much" * over
        half = text_width(words, SMALL) * 0.55
        middle = min(max(x, x0 + half), x0 + WIDE - half)
        above = y_of(floor[at]) - 10
        above -= 18 * (limit - 8 < above + 8 and above - 8 < limit + 8)  # the limit's line
        said.append(Text(middle, above, words, SMALL, "middle", "bad" if over else "ink", True))
        items.append(Text(x0 + WIDE / 2, -14, name, anchor="middle", bold=True))
        x = x0
        for phase, moments_of in phases:
            w = WIDE * moments_of / count
            items += [Line(((x, TALL), (x, TALL + 6)), "edge", 1)]
            items += [small_text(x + w / 2, TALL + 14, phase)] * (text_width(phase, SMALL) < w)
            x += w
        fullest = ", ".join(f"{part} {size_text(v)}" for part, v in moments[at].items() if v)
        verdict = "more than the capacity" if over else f"{size_text(capacity_bytes - most[name])} free"
        begins = f"{name}: from {size_text(sum(moments[0].values()))}"
        lines.append(f"{begins} to {size_text(most[name])}, {verdict} ({fullest})")
    across = (left, limit), (right, limit)
    items += [Line(across, "paper", 4), Line(across, dash=True), *said]
    items += [small_text(right + 8, limit, f"usable {size_text(capacity_bytes)}", "start", "ink")]
    key = legend([(role_of(part, roles), part) for part in named])
    return compose(title, [items, key], "\n".join(lines))
