"""What exists: which device holds which block of live arrays, of a program's arguments or of a sharding.

All is in the document that `inspect.shardings.shardings` made; nothing here needs JAX.
"""

import math
from html import escape
from typing import Any

from llmpar.draw.charts import count_noun, number_ranges
from llmpar.draw.geometry import coordinates
from llmpar.draw.grid import COLUMN, GRID_MARGIN, Cells, apart_words, inked, shown_cells, visible
from llmpar.draw.scene import Rect, Scene, compose, fitting_text, size_text, stack
from llmpar.explore.explorer import Explorer
from llmpar.explore.words import button, html_table, table_row

NONE: dict[str, Any] = {"shape": [], "shards": [], "unfinished": ""}
HEAD = "array", "shape", "dtype", "layout", "blocks", "copies", "on the device", "bytes"


class GivenExplorer(Explorer):
    """Which device holds which block of what exists, from a document of `shardings`. The state is a
    ``device``, by its place in the mesh, and a ``tensor``, at first the largest."""

    kind = "given"
    areas = [
        ["grid", "Who holds which block", "middle"],
        ["holds", "What the chosen device holds", "below"],
    ]

    def __init__(self, given: dict[str, Any], **state):
        self.given, self.title, self.sizes = given, given["title"], given["sizes"]
        self.rows = {r["name"]: NONE | {"blocks": len(r["shards"])} | r for r in given["tensors"]}
        size = lambda name: math.prod(self.rows[name]["shape"])
        self.start = {"device": 0, "tensor": max(self.rows, key=size, default="")}
        super().__init__(**state)

    def where(self, device: int) -> str:
        """Return a device and its coordinates on the mesh; JAX's number if it is another, and the process if
        there are several."""
        own, hosts = self.given["devices"][device], self.given["hosts"]
        at = coordinates(self.sizes, self.sizes, device)
        words = [
            *(f"{axis} {at[axis]}" for axis, size in self.sizes.items() if size > 1),
            *([f"JAX's {own}"] if own != device else []),
            *([f"process {hosts[device]}"] if len({*hosts}) > 1 else []),
        ]
        return f"Device {device} ({', '.join(words)})" if words else f"Device {device}"

    def part_on(self, row: dict, device: int) -> tuple[str, int]:
        """Return the part of an array that a device holds, in words, and its bytes."""
        if row["holds"][device] is None:
            return "nothing", 0
        block = row["shards"][row["holds"][device]]
        bare = row["dtype"] is None
        words = ", ".join(f"{a:,}" if bare else f"{a:,}:{b:,}" for a, b in block)
        words = f"{'block ' * bare}[{words}]" if row["blocks"] > 1 else "all"
        words = f"one term of the {row['unfinished']}: {words}" if row["unfinished"] else words
        return words, math.ceil(row["itemsize"] * math.prod(b - a for a, b in block))

    def draw(self, state: dict) -> Scene:
        given, device, name, n = (
            self.given,
            state["device"],
            state["tensor"],
            len(self.given["devices"]),
        )
        if not isinstance(device, int) or not 0 <= device < n:
            raise ValueError(
                f"device is {device!r}, and there are {n:,}; use a number from 0 to {n - 1}"
            )
        if self.rows and name not in self.rows:
            raise ValueError(f"no array is named '{name}'; there are {', '.join([*self.rows][:9])}")
        row = self.rows.get(name, NONE | {"holds": [None] * n})
        shape, holds, shards, hosts = row["shape"], row["holds"], row["shards"], given["hosts"]
        cut = [i for i in range(len(shape)) if len({tuple(block[i]) for block in shards}) > 1]
        shown = sorted(
            [*(i for i, size in enumerate(shape) if i not in cut and size > 1), *cut][-2:]
        )
        aside, down, across = cut[:-2][:1], shown[-2:-1], shown[-1:]
        edge = ("ink", 0.75, "/") if row["unfinished"] else ("edge", 0.75)
        inside = lambda part, i: slice(
            part.first + i * part.block, part.first + (i + 1) * part.block
        )

        def side(block: list, dims: list[int], length: float) -> tuple[float, float]:
            return next((visible([block[i]], shape[i], length)[0] for i in dims), (0.0, length))

        def ink(part: Cells, cell: int, w: float, h: float) -> list:
            ids, left, items = given["devices"][inside(part, cell)], 6.0 * bool(aside), list[Any]()
            for block in (shards[i] for i in {*holds[inside(part, cell)]} - {None}):
                (top, low), (x, right) = side(block, down, h), side(block, across, w - left)
                items.append(Rect(left + x, top, right - x, low - top, "weights", *edge))
                top, low = side(block, aside, h)
                items += [Rect(0, top, 5, low - top, "links")] * bool(aside)
            return (
                items
                if self.rows
                else fitting_text(w / 2, h / 2, w, number_ranges(ids), f"{ids[0]} …")
            )

        node = n // len({*hosts})
        node = node if all(host == hosts[i // node * node] for i, host in enumerate(hosts)) else n
        parts = shown_cells(self.sizes, node, device, len(shown) < 2)
        placed = []
        tip = lambda at: self.part_on(row, at)[0] if self.rows else self.where(at)
        for part in parts:
            same = [
                i for i in range(part.num) if self.rows and holds[device] in holds[inside(part, i)]
            ]
            placed.append(inked(part, device, same, ink, tip))
        notes = [f"{self.where(device)} is chosen; the numbers are JAX's."]
        if self.rows:
            sides = f", {' down, '.join(f'dim {i}' for i in shown)} across" if shown else ""
            num = holds.count(holds[device])
            notes = [
                f"{self.where(device)} holds {self.part_on(row, device)[0]} of {name}.",
                "Hatched: a term only; no device has the value yet." if row["unfinished"] else "",
                f"{num} devices hold the same." if num > 1 else "",
                f"A cell is the whole array{sides}.",
                *(f"The bar at its left is dim {i}." for i in aside),
                *(f"Dim {i} is cut too, and not drawn." for i in cut[1:-2]),
            ]
        notes += [
            *apart_words(parts),
            "Dashed: a process." if any(part.per for part in parts) else "",
            f"Left out: {', '.join(given['skipped'])}." if given["skipped"] else "",
        ]
        notes = list(filter(None, notes))
        mesh = (
            " ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1)
            or "one device"
        )
        title = f"{f'Who holds which block of {name}' if self.rows else self.title}, {mesh}"
        return compose(
            title, [stack(placed, 16)], "\n".join(notes), [" ".join(notes)], GRID_MARGIN, COLUMN
        )

    def completed(self, state: dict, reply: dict) -> dict:
        device, lines, says, parts = state["device"], "", reply["says"], dict[str, dict]()
        for name, row in self.rows.items():
            blocks, (words, size) = row["blocks"], self.part_on(row, device)
            copies = sum(block is not None for block in row["holds"]) // len(row["shards"])
            parts[name] = {"blocks": blocks, "copies": copies, "holds": words, "bytes": size}
            shape = " × ".join(f"{n:,}" for n in row["shape"]) or "one number"
            terms = f" of {len(row['shards']) // blocks} terms" if row["unfinished"] else ""
            about = [shape, row["dtype"]] if row["dtype"] else ["not given", ""]
            cells = [
                *about,
                row["layout"],
                count_noun(blocks, "block") + terms,
                count_noun(copies, "copy"),
                words,
                size_text(size) if row["dtype"] else "",
            ]
            says += f"\n{name}: {'; '.join(filter(None, cells))}"
            lines += table_row(button(name, tensor=name), map(escape, cells))
        known = f"{size_text(sum(one['bytes'] for one in parts.values()))} in all"
        known = known if any(row["dtype"] for row in self.rows.values()) else "no shape is given"
        panels = {"grid": reply["panels"]["picture"] | {"title": reply["says"].splitlines()[0]}}
        if parts:
            rows = html_table(HEAD, f"<tbody>{lines}</tbody>")
            panels["holds"] = {"html": f"<p>{self.where(device)}: {known}.</p>{rows}"}
        return reply | {
            "panels": panels,
            "says": says,
            "numbers": {"device": device, "held": parts},
        }
