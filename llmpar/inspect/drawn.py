"""Write what programs send as HTML tables, each move with its drawing. No JAX is needed."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import Any

from llmpar import draw
from llmpar.draw.layouts import resharded
from llmpar.draw.page import page_table
from llmpar.draw.scene import Scene, scaled, size_text, time_text
from llmpar.inspect.hlo import integers
from llmpar.inspect.moves import layout_from_text
from llmpar.inspect.pins import TITLES, words_of
from llmpar.plan.layout import LETTERS

_KINDS = "line", "wide", "", "number", "number"
_NUMBERS = itertools.count()
# Dims of a value that is drawn.
_MOST_DIMS = 4


def moves_html(rows: list[dict[str, Any]], sizes: Mapping[str, int]) -> str:
    """Write rows of a look as a table, on a mesh of these ``sizes``; the largest are drawn."""
    cells = list[tuple[str, ...]]()
    for i, (row, words) in enumerate(zip(rows, words_of(rows), strict=True)):
        line, arrow, sent, _, times, num_bytes = map(escape, words)
        icon, scene = _drawings(row, sizes) if i < draw.charts.ARROWS_DRAWN else ("", None)
        move = f"{icon}<code>{arrow}</code>"
        if scene:
            is_open = " open" * (i == 0)
            summary = f"<summary>{icon}{arrow}</summary>"
            move = f"<details{is_open}>{summary}{_svg(scene)}</details>"
        if row.get("measured"):
            move += f"<p>{', '.join(filter(None, words_of_time(row)))}</p>"
        cells.append((f"<code>{line}</code>", move, sent, times, num_bytes))
    return page_table((*TITLES[:3], *TITLES[4:]), cells, _KINDS)


def schedule_html(read: dict[str, Any], sizes: Mapping[str, int], memory: Mapping[str, int]) -> str:
    """Write a program's schedule and its memory as a drawing, and how far the curve can be trusted."""
    most, reserved = read["peak"]["bytes"], memory.get("peak_bytes", 0)
    apart = most / reserved - 1 if reserved else 0.0
    than = f"{abs(apart):.0%} {'more' if apart > 0 else 'less'} than" * (abs(apart) >= 0.005)
    words = [
        "From left to right operations as a device runs them, the inside of a loop once. Widths are no times."
        " Hatched is a collective beside which nothing computes; how much of another one computing hides, a"
        " profile shows. A value is counted from the operation that makes it to the last that takes it.",
        f"So at most {size_text(most)} are alive, {than or 'equal to'} the {size_text(reserved)} that the"
        " compiler reserves for arguments, results and temporaries." * bool(reserved),
    ]
    svg = _svg(draw.program_order(read, dict(sizes), reserved))
    title = "<h2>In the order of the compiled program</h2>"
    return f'{title}<div class="scroll">{svg}</div><p>{escape(" ".join(words))}</p>'


def facts_html(facts: list[tuple[str, str]]) -> str:
    """Write what follows the rows as a table: a name once, and what is known of it."""
    cells, last = list[tuple[str, str]](), ""
    for name, text in ((name or "note", text) for name, text in facts):
        cells.append((f"<b>{escape(name)}</b>" if name != last else "", escape(text)))
        last = name
    return f"<h2>Each device</h2>{page_table((), cells, ('line', ''))}"


def words_of_time(row: dict[str, Any]) -> tuple[str, ...]:
    """Write what was measured of a row as words: executions, seconds, waiting, rates, the prediction."""
    if not (it := row["measured"]):
        return ("-",) * 5
    rate = lambda n: scaled(n, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"), 1000)
    link, predicted = it["link_bytes_per_s"], it["predicted_s"]
    return (
        f"×{it['executions']:,} measured",
        time_text(it["seconds"]),
        "waiting -" if it["waiting_s"] is None else f"waiting {time_text(it['waiting_s'])}",
        rate(it["bytes_per_s"] or 0) + (f" of {rate(link)}" if link else ""),
        f"predicted {time_text(predicted)}" if predicted else "",
    )


def _svg(scene: Scene) -> str:
    """Return a drawing whose hatches have names of its own: one is looked up by its name, and not seen where
    the first of that name is hidden."""
    return re.sub("llmpar-(?=dots|lines)", f"llmpar{next(_NUMBERS)}-", scene._repr_svg_())


def _drawings(row: dict[str, Any], sizes: Mapping[str, int]) -> tuple[str, Scene | None]:
    """Return the icon of a row's collective, and its move drawn if its types show it; a type is whole along
    the axes of the collective alone, so those are the mesh of the drawing."""
    kind = row["collective"].removeprefix("collective-")
    over = ",".join(row["axes"])
    icon = draw.before_after([kind], 4, icon=True) if kind in draw.strips.PATTERNS else None
    types = row["arrow"].split(" -> ")
    along = {a: sizes[a] for a in row["axes"] if a in sizes}
    route = [layout_from_text(text) for text in types if "[" in text]
    scene = None
    if len(route) == 2 and along and len(route[0].dims) <= _MOST_DIMS:
        shape = tuple(integers(re.sub(r"@(\w+|\([^)]*\))", "", types[0].partition("[")[2])))
        each = row["bytes_sent"] // max(row["count"], 1)
        itemsize = max(1, integers(types[0])[0] // 8)
        step = f"{row['collective']} over {over}", row["axes"][0], each
        names = re.findall(r"(?<![\w/,+])\w", row["letters"]) or (
            f"dim {i}" for i in range(_MOST_DIMS)
        )
        # letters that a type has are none of the user's
        renamed = dict(zip(LETTERS, names, strict=False))
        for i, side in enumerate(route):
            route[i] = replace(
                side, dims=tuple(replace(d, name=renamed[d.name]) for d in side.dims)
            )
        title = row["letters"] or row["arrow"]
        scene = resharded(route, [step], shape[: len(route[0].dims)], along, itemsize, title)
    return icon._repr_svg_() if icon else "", scene
