"""Draw what serving reads and holds: a model's passes, requests in slots or pages, a cache cut by a mesh."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from llmpar.draw.charts import bar_part
from llmpar.draw.geometry import holders
from llmpar.draw.scene import (
    OTHERS,
    SMALL,
    Items,
    Line,
    Scene,
    Text,
    boxed,
    compose,
    fitting_text,
    legend,
    pixels,
    small_text,
    stack,
    text_width,
)
from llmpar.plan.layout import Layout


def passes(prompt: Sequence[str], answer: Sequence[str]) -> Scene:
    """Draw how a prompt goes through the model in one pass, and its answer token by token: what each pass
    takes in, reads, writes and gives. A low box is a token's keys and values."""
    wide, high, low = max(map(text_width, [*prompt, *answer, "weights"])) + 10, pixels(SMALL) + 9, 7
    left, top, items, lines = text_width("comes out") + 12, len(prompt) * high, Items(), list[str]()
    out = top + 104 + low * (len(prompt) + len(answer) - 1)
    names = (top / 2, "goes in"), (top + 46, "is read"), (out + high / 2, "comes out")
    items += [Text(left - 12, y, name, anchor="end") for y, name in names]
    for k, made in enumerate(answer):
        new, past, name = (
            (answer[k - 1 : k], len(prompt) + k - 1, "decode") if k else (prompt, 0, "prefill")
        )
        x = left + k * (wide + 20) + wide / 2
        kept = ["activations"] * past + ["paper/"] * len(new)
        boxes = [
            *(("matmuls", top + i * high, high, token) for i, token in enumerate(new, -len(new))),
            ("weights", top + 26, 40, "weights"),
            ("cell", out, high, made),
            *((role, top + 80 + low * i, low, "") for i, role in enumerate(kept)),
        ]
        for role, y, h, text in boxes:
            items += boxed(bar_part(role, x - wide / 2, y, wide, h, text), text)
        items += [
            *(Line(((x, y - 20), (x, y)), "edge", 2, head=True) for y in (top + 23, out - 3)),
            Text(x, -16, name, anchor="middle", bold=True),
        ]
        lines.append(
            f"{name}: {' '.join(new)} in, {made} out; reads all weights, {past} keys and values"
        )
    key = legend([("activations", "keys and values of a token, read"), ("paper", "written", "/")])
    return compose(
        f"{len(prompt)} tokens in one pass, then one by one", [items, key], "\n".join(lines)
    )


def slots(panels: Mapping[str, Sequence], title: str, across: bool = False) -> Scene:
    """Draw which name has which slot: under each heading rows of (name, cells). A cell is a name, or several
    as in ``0+1``; "/" where it is set aside and not used, empty where it is free. Four colours: letters tell
    names apart."""
    blocks, lines, high, wide = list[list](), list[str](), pixels(SMALL) + 9, pixels(SMALL) + 13
    names = {
        part
        for rows in panels.values()
        for _, row in rows
        for cell in row
        for part in cell.split("+")
    }
    fills = {name: OTHERS[i % 4] for i, name in enumerate(sorted(names - {"", "/"}))}
    for heading, rows in panels.items():
        items: list = [Text(0, -14, heading, bold=True)]
        for i, (name, row) in enumerate(rows):
            items += [small_text(-8, (i + 0.5) * high, name, "end")] * (not across or not blocks)
            for k, cell in enumerate(row):
                for n, part in enumerate(parts := cell.split("+")):
                    y, h = (i + n / len(parts)) * high, high / len(parts)
                    items.append(
                        bar_part(fills.get(part, f"paper{part}"), k * wide, y, wide, h, part)
                    )
                whole = cell * (cell in fills)
                items += fitting_text((k + 0.5) * wide, (i + 0.5) * high, wide, whole, fill="black")
        blocks.append(items)
        lines += [
            heading,
            *(f"{name}: {' '.join(cell or '.' for cell in row)}" for name, row in rows),
        ]
    return compose(title, [stack(blocks, 26, across)], "\n".join(lines))


def cache(
    layouts: Mapping[str, tuple[Layout, dict[str, int]]], rows=4, heads=2, positions=8
) -> Scene:
    """Draw which devices hold which keys and values: by name a layout with dims b, t and k, and the sizes of
    its axes. Position t is on rank t mod sp; where k is cut more often than there are heads, copies hold
    them."""
    panels: dict[str, list] = {name: [] for name in layouts}
    for name, (layout, sizes) in layouts.items():
        shards = holders(layout, sizes)
        has = defaultdict[tuple, list[str]](list)
        i, j, n = (layout.letters.index(dim) for dim in "bkt")
        dp, tp, sp = (1 + max(block[dim] for block in shards) for dim in (i, j, n))
        copies = max(1, tp // heads)
        for block, devices in shards.items():
            has[block[i], block[j] // copies, block[n]] += map(str, devices)
        for b, k in ((b, k) for b in range(rows) for k in range(heads)):
            where = [(b * dp // rows, k * tp // heads // copies, t % sp) for t in range(positions)]
            panels[name].append(
                (f"request {b}, KV head {k}", ["+".join(has[place]) for place in where])
            )
    return slots(panels, "Which device holds which keys and values", across=True)
