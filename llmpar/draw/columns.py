"""The charts of an explorer's columns: axes, a device's memory, a step's time, what is sent, all meshes.

Plain values in, a `Scene` as wide as its column out. An ``act`` is what a click asks for: see `Rect.act`.
"""

import math
from collections import namedtuple
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from llmpar.draw.charts import MEMORY, TIME, axis_colours, bar_part, count_noun, role_of
from llmpar.draw.scene import (
    SMALL,
    Line,
    Rect,
    Scene,
    Text,
    boxed,
    compose,
    on_paper,
    size_text,
    small_text,
    style_of,
    text_width,
    time_text,
)
from llmpar.plan.mesh_shape import AXES

LEFT, RIGHT, COLUMN_MARGIN = 330, 400, 2
"""The widths of the columns and the margin of what is in them, in pixels."""
COMPUTING = ("matmuls", "attention", "elementwise", "again", "rest")
IDLE = "paper/"  # the role of a bubble
MOST_PARTS, MOST_SENT = 9, 6
MAP_NAMES = 10  # of the fastest that fit
MAP_CAPACITIES = 1.6  # how far beyond a device's memory, and what is ringed, a map goes
_ROUND = [float(f"{digit}e{power}") for power in range(-9, 6) for digit in (1, 2, 5)]
ROUND_BYTES = [n * 1024.0**power for power in range(6) for n in _ROUND if 1 <= n < 1000]
ROUND_SECONDS = [
    *(s for s in _ROUND if s < 600),
    *(60 * s for s in _ROUND if 600 <= 60 * s < 7200),
    *(3600 * s for s in _ROUND if 7200 <= 3600 * s),
]
"""What stands beside the axes of a map: round as `time_text` says it, in seconds, minutes or hours."""


Part = namedtuple("Part", "name value note act role", defaults=("", "", ""))
"""Part of a bar, bytes or seconds, in the colour of its ``role``, else its name; ``note``: how it comes."""
SentBar = namedtuple("SentBar", "axes what bytes hidden_s waits_s note act", defaults=("", ""))
"""What a device sends in a step over ``axes``, and its seconds on links: behind computing, and waited for."""
MeshPoint = namedtuple("MeshPoint", "mesh bytes seconds axis note act", defaults=("", "", ""))
"""A mesh on the map: bytes of a device, seconds of a step, its largest axis, and why it loses."""


def axis_squares(sizes: dict[str, int], notes=None, acts=None, note: str = "", words=None) -> Scene:
    """Draw how the devices are cut: a row per mesh axis, with a square for each prime factor of its size.

    ``notes`` say what an axis does, in two words. ``acts`` are, per axis, what its − and its + ask for: each
    (act, what it does), or None where there is no such mesh. ``words`` are what a click on its name asks for.
    """
    notes, acts, num = notes or {}, acts or {}, math.prod(sizes.values())
    pitch = min(17, 112 / max(1, len(_primes(num))))
    items, lines = list[Rect | Text](), list[str]()
    for i, axis in enumerate(AXES):
        n, y = sizes.get(axis, 1), 26 * i
        live, factors, says = n > 1, _primes(n), notes.get(axis, "")
        if words:
            items.append(Rect(0, y + 1, 36, 20, "paper", tip=f"what {axis} is", act=words[axis]))
        items.append(Text(0, y + 11, axis, fill=f"{axis}-line" if live else "soft", bold=live))
        for sign, x, given in zip("−+", (40, 178), acts.get(axis, (None, None)), strict=True):
            act, tip = given or ("", "")
            fill, stroke, ink = ("cell", "edge", "ink") if act else ("", "grid", "edge")
            items += [
                Rect(x, y + 1, 20, 20, fill, stroke, radius=3, tip=tip, act=act, live=True),
                Text(x + 10, y + 11, sign, anchor="middle", fill=ink, live=True),
            ]
        for k, factor in enumerate(factors + [0] * (len(_primes(num)) - len(factors))):
            fill, stroke = (axis, f"{axis}-line") if factor else ("", "grid")
            box = Rect(66 + pitch * k, y + 4, pitch - 3, 14, fill, stroke, radius=2)
            items += boxed(box, str(factor) if factor > 2 else "", margin=-3)
        items += [
            Text(238, y + 11, str(n), SMALL, "end", bold=live),
            small_text(246, y + 11, says, "start", "ink" if live else "soft"),
        ]
        lines.append(f"{axis} {n}" + f": {says}" * bool(says))
    return _column(f"{count_noun(num, 'device')}, cut", "", items, lines, [note] * bool(note), LEFT)


def _primes(n: int) -> list[int]:
    """Return the prime factors of ``n``, the largest first."""
    d = next((d for d in range(2, math.isqrt(n) + 1) if n % d == 0), n)
    return [*_primes(n // d), d] if n > 1 else []


def memory_bar(parts: Iterable[Part], limits=(), band=None, total: float | None = None) -> Scene:
    """Draw what fills a device: one bar of parts in bytes, and their list.

    ``limits`` are (bytes, what they are), the one that counts first; ``band`` is from where to where the sum
    may lie, and hatched. What the parts lack of a ``total`` is drawn as "rest".
    """
    parts, total = _whole(parts, total, MEMORY, size_text)
    over = total - limits[0][0] if limits else 0.0
    spare = [f"{size_text(abs(over))} {'too much' if over > 0 else 'free'}."] * bool(limits)
    return _bar(
        "Memory of a device", parts, size_text, limits, band, spare, "bad" if over > 0 else "ink"
    )


def time_bar(parts: Iterable[Part], band=None, total: float | None = None) -> Scene:
    """Draw what a step takes: a bar of parts in seconds, and their list; the rest as in `memory_bar`."""
    parts, total = _whole(parts, total, TIME, time_text)
    order = {role: i for i, role in enumerate((*COMPUTING[:-1], "link", IDLE, "rest"))}
    parts.sort(key=lambda part: order.get(part.role, order["link"]))
    sums = {"computing": 0.0, "waiting for links": 0.0, "idle": 0.0}
    for part in parts:
        waits = "idle" if part.role == IDLE else "waiting for links"
        sums["computing" if part.role in COMPUTING else waits] += part.value
    says = [" · ".join(f"{name} {time_text(s)}" for name, s in sums.items() if s) + "."]
    return _bar("One step", parts, time_text, (), band, says)


def _whole(
    parts: Iterable[Part], total: float | None, words: dict, text
) -> tuple[list[Part], float]:
    """Return the parts with their roles; the smallest of many, and what is missing to the ``total``, are one
    part."""
    given = [p._replace(role=p.role or role_of(p.name, words)) for p in parts if p.value]
    added = sum(p.value for p in given)
    total = added if total is None else total
    if added > 1.005 * total:
        raise ValueError(f"the parts add up to {text(added)} of {text(total)}; count nothing twice")
    ordered = sorted(given, key=lambda p: (p.role != "rest", p.value))
    few = sum(p.role == "rest" for p in given)
    few = max(few if few > 1 else 0, len(given) + 1 - MOST_PARTS if len(given) > MOST_PARTS else 0)
    small = ordered[:few]
    rest = total - added + sum(p.value for p in ordered[:few])
    names = ", ".join(f"{p.name} {text(p.value)}" for p in small)
    shown = [p for p in given if p not in small]
    return [*shown, *[Part("rest", rest, names, role="rest")] * (rest > 1e-6 * total)], total


def _bar(
    title: str, parts: list[Part], text, limits, band, notes: list[str], tone: str = "ink"
) -> Scene:
    """Return a bar of parts below its limits and above its list."""
    wide, total = LEFT - 2 * COLUMN_MARGIN, sum(p.value for p in parts)
    per = wide / max([total, *(limit for limit, _ in limits), *(band or ()), 1e-12])
    items, bars, lines, x, top = (
        list[Rect | Text | Line](),
        list[Rect](),
        list[str](),
        0.0,
        16 * len(limits),
    )
    for k, (limit, why) in enumerate(limits):  # each label has a line of its own, so none meet
        at, y, words = per * limit, top - 16 * k - 8, f"{why} {text(limit)}"
        side, off = ("end", -6) if at > text_width(words, SMALL) + 6 else ("start", 6)
        stroke, width = ("edge", 1) if k else ("ink", 2)
        upright = Line(((at, y - 6), (at, top + 32)), stroke, width, dash=True)
        items += [upright, small_text(at + off, y, words, side, "ink")]
        lines.append(words)
    for y, part in enumerate(parts):
        y, value, (fill, stroke, hatch) = top + 48 + 18 * y, text(part.value), style_of(part.role)
        tip = f"{part.name}: {value}" + f", {part.note}" * bool(part.note)
        bars.append(bar_part(part.role, x, top + 2, per * part.value, 26, tip, part.act))
        items += [
            Rect(0, y - 9, wide, 18, "paper", tip=tip, act=part.act),
            Rect(0, y - 6, 12, 12, fill, stroke, hatch=hatch),
            small_text(18, y, part.name, "start", "ink"),
            small_text(wide, y, value, "end", "ink"),
        ]
        if text_width(part.name + part.note, SMALL) + 96 < wide:
            items.append(small_text(wide - 70, y, part.note, "end"))
        lines.append(tip)
        x += per * part.value
    if band:
        low, high = band
        for a, b, stroke in ((low, min(total, high), "black"), (max(total, low), high, "ink")):
            bars += [Rect(per * a, top + 6, per * (b - a), 18, "", stroke, 1, "/")] * (b > a)
        notes = [
            *notes,
            f"Box with thick lines: the true value may lie between {text(low)} and {text(high)}.",
        ]
    return _column(title, text(total), [*bars, *items], lines, notes, LEFT, tone)


def _column(title: str, number: str, items, lines, notes, wide: float, tone: str = "ink") -> Scene:
    """Return a chart under its title and its number."""
    end = Text(wide - 2 * COLUMN_MARGIN, 0, number, anchor="end", fill=tone, bold=True)
    whole = f"{title}: {number}" if number else title
    text = "\n".join([*lines, *notes])
    blocks = [[Text(0, 0, title, bold=True), end], items]
    below = [" ".join(notes)] * bool(notes)
    return compose(whole, blocks, text, below, COLUMN_MARGIN, wide)


def sent_bars(rows: Iterable[SentBar]) -> Scene:
    """Draw what a device sends in a step: a bar for each, as long as it takes on links; filled in its axis'
    colour is what computing waits for, as in `time_bar`, and hollow what hides behind computing."""
    rows, wide = (
        sorted(rows, key=lambda row: -row.hidden_s - row.waits_s),
        RIGHT - 2 * COLUMN_MARGIN,
    )
    if len(rows) > MOST_SENT:
        few = rows[MOST_SENT - 1 :]
        names = ", ".join(f"{row.axes} {row.what}" for row in few)
        size, hidden, waits = (sum(row[i] for row in few) for i in (2, 3, 4))
        rows[MOST_SENT - 1 :] = [SentBar("", f"{len(few)} more", size, hidden, waits, names)]
    left = max([text_width(row.axes) * 1.1 for row in rows] + [30]) + 10
    per = (wide - left) / max([row.hidden_s + row.waits_s for row in rows] + [1e-12])
    items, lines = list[Rect | Text](), list[str]()
    for i, row in enumerate(rows):
        y, (fill, stroke) = 40 * i, axis_colours(row.axes)
        shares = [("hidden", "paper", row.hidden_s), ("exposed", fill, row.waits_s)]
        says = (
            " · ".join(f"{time_text(s)} {word}" for word, _, s in shares if s) or "no time on links"
        )
        size, x = f" {size_text(row.bytes)}", left
        most = int((wide - left - text_width(says, SMALL) - 12) / text_width(".", SMALL))
        most -= len(size)  # the number is never cut
        cut = (row.what if len(row.what) <= most else row.what[: most - 1] + "…") + size
        named = f"{row.axes}: {row.what}" if row.axes else row.what
        tip = f"{named}{size}, {says}" + f"; {row.note}" * bool(row.note)
        items += [
            Rect(0, y - 8, wide, 36, "paper", tip=tip, act=row.act),
            Text(0, y + 16, row.axes, bold=True, fill="ink" if fill == "links" else stroke),
            small_text(left, y, cut, "start", "ink"),
            small_text(wide, y, says, "end"),
        ]
        for _, color, seconds in shares:
            bar = x, y + 9, max(2, per * seconds), 15, color, stroke
            items += [Rect(*bar, tip=tip, act=row.act)] * (seconds > 0)
            x += per * seconds
        lines.append(tip)
    note = "As long as it takes on links. Filled: exposed, the step waits; hollow: hidden."
    if not any(row.hidden_s + row.waits_s for row in rows):
        note = "What it takes on links is not predicted."
    number = size_text(sum(row.bytes for row in rows))
    return _column("Sent by a device in a step", number, items, lines, [note], RIGHT)


def mesh_map(
    points: Iterable[MeshPoint],
    current: MeshPoint | None = None,
    best: MeshPoint | None = None,
    capacity: float = 0.0,
    refused: int = 0,
    num: int = 0,
    pinned: MeshPoint | None = None,
    tie: float = 0.0,
) -> Scene:
    """Draw all meshes of as many devices: a dot for each, its memory to the right and its time upwards, both
    logarithmic; beyond ``capacity`` bytes it does not fit, and far beyond it is counted alone. ``current``,
    ``best`` and ``pinned`` are ringed; a band has the times that are above the best's by a share of ``tie``.
    Of ``num`` meshes ``refused`` cannot be built, and others may not be known yet."""
    points = list(points)
    named = {"you": current, "best": best, "pinned": pinned}
    rings = {name: point for name, point in named.items() if point}
    if current and best and current[:3] == best[:3]:
        rings = {"you, the best": current} | ({"pinned": pinned} if pinned else {})
    widest = max([capacity, *(point.bytes for point in rings.values())])
    most = MAP_CAPACITIES * widest if capacity else math.inf
    near = [point for point in points if point.bytes <= most]
    shown = [*dict.fromkeys([*near, *rings.values()])] or [MeshPoint("", 2**30, 1.0)]
    right, bottom = RIGHT - 2 * COLUMN_MARGIN - 4, 270
    y_of, times = _log([point.seconds for point in shown], bottom, 0, ROUND_SECONDS)
    left = max([text_width(time_text(v), SMALL) for v in times] + [33]) + 10
    x_of, sizes = _log(
        [point.bytes for point in shown] + [capacity] * bool(capacity), left, right, ROUND_BYTES
    )
    at = lambda point: (x_of(point.bytes), y_of(point.seconds))
    area = (left, 0, right, bottom)
    fits = x_of(capacity) if capacity else right
    items = list[Any]([Rect(fits, 0, right - fits, bottom, "bad-ground")])
    if tie and best:
        top, low = y_of(best.seconds * (1 + tie)), y_of(best.seconds)
        what = f"as fast as the best within {tie:.0%}: a tie"
        items.append(Rect(left, top, fits - left, low - top, "good-ground", tip=what))
    items += _map_axes(
        area, {x_of(v): size_text(v) for v in sizes}, {y_of(v): time_text(v) for v in times}
    )
    if capacity:
        words = f"does not fit in {size_text(capacity)}"
        side = "start" if fits + text_width(words, SMALL) < right else "end"
        items += [
            Line(((fits, -4), (fits, bottom)), "ink", 2, dash=True),
            small_text(fits, -12, words, side, "bad"),
        ]
    lines = list[str]()
    for point in sorted(shown, key=lambda point: -point.seconds):
        (x, y), (fill, stroke, _) = at(point), style_of(point.axis or "links")
        why = f"; {point.note}" * bool(point.note)
        lines.append(f"{point.mesh}: {size_text(point.bytes)}, {time_text(point.seconds)}{why}")
        items.append(Rect(x - 4, y - 4, 8, 8, fill, stroke, radius=4, tip=lines[-1], act=point.act))
    fit = [point for point in shown if point.mesh and not point.note]
    first = sorted(fit, key=lambda point: (point != best, point.seconds))[:MAP_NAMES]
    places = {name: at(point) for name, point in rings.items()}
    items += _labels(places, list(map(at, first)), list(map(at, shown)), fits, area)
    items += _ranking(first, bottom + 48)
    ringed = [f"{name}: {point.mesh}" for name, point in rings.items()]
    done, count = len(points) + refused, num or len(points) + refused
    notes = [
        f"{done:,} of {num:,} so far." if done < num else "",
        f"{refused:,} of {count:,} are left out." if refused else "",
        f"Beyond {size_text(most)}: {len(points) - len(near):,}."
        if len(near) < len(points)
        else "",
        "Colour: the largest axis.",
        "Band: a tie with the best." * bool(tie and best),
    ]
    title = f"{count:,} mesh{'es' * (count != 1)}: memory and time"
    return _column(title, "", items, [*ringed, *lines[::-1]], list(filter(None, notes)), RIGHT)


def _labels(rings: dict[str, tuple[float, float]], first, dots, fits: float, area) -> list:
    """Return rings with their names, and beside the ``first`` dots their ranks."""
    items: list[Any] = [
        Rect(x - 7, y - 7, 14, 14, "", "ink", 2, radius=7) for x, y in rings.values()
    ]
    taken = [(x - 8, y - 8, x + 8, y + 8) for x, y in rings.values()]
    taken.append((fits - 1, 0, fits + 1, area[3]))
    ranks = {str(rank): place for rank, place in enumerate(first, 1)}
    for label, (x, y) in (rings | ranks).items():
        text = _beside(x, y, label, taken, dots, area, _BESIDE[label in rings])
        taken.append(text.box)
        to = text.x + (x - text.x) / 3, text.y + (y - text.y) / 3
        is_far = label in ranks and math.dist((x, y), to) > 12
        items += [Line(((x, y), to), "soft", 0.75)] * is_far
        items += on_paper(text) if label in rings else [text]
    return items


def _map_axes(area, sizes: dict[float, str], times: dict[float, str]) -> list:
    """Return the grid and the labels of a map, by their places; of those below as many as do not overlap."""
    left, _, right, bottom = area
    items, last = list[Line | Text](), 0.0
    for x, text in sizes.items():
        label = small_text(x, bottom + 12, text)
        items.append(Line(((x, 0), (x, bottom + 4)), "grid", 1))
        if last + 4 < label.box[0] and label.box[2] < RIGHT - 2 * COLUMN_MARGIN:
            last = label.box[2]
            items.append(label)
    for y, text in times.items():
        items += [
            Line(((left - 4, y), (right, y)), "grid", 1),
            small_text(left - 7, y, text, "end"),
        ]
    items.append(Line(((left, 0), (left, bottom), (right, bottom)), "edge", 1))
    names = (
        small_text(right, bottom + 28, "memory of a device", "end"),
        small_text(0, -12, "a step", "start"),
    )
    return [*items, *names]


def _log(values: list[float], start: float, end: float, round_numbers):
    """Return a logarithmic scale from ``start`` to ``end`` pixels, and the ``round_numbers`` on it."""
    low, high = min(values) / 1.25, max(values) * 1.25
    spare = max(1.0, math.sqrt(6 * low / high))
    low, high = low / spare, high * spare
    of = lambda v: start + (end - start) * math.log(v / low) / math.log(high / low)
    return of, [v for v in round_numbers if low <= v <= high]


def _ranking(points: list[MeshPoint], top: float) -> list:
    """Return the names of the fastest that fit as a list, in two columns where they are short."""
    names = [f"{point.mesh}, {time_text(point.seconds)}" for point in points]
    half = RIGHT / 2 - COLUMN_MARGIN
    columns = 2 if all(text_width(name, SMALL) < half - 28 for name in names) else 1
    deep, items = math.ceil(len(names) / columns), list[Any]()
    for i, (point, name) in enumerate(zip(points, names, strict=True)):
        x, y = half * (i // deep), top + 17 * (i % deep)
        box = x - 2, y - 8, half * (3 - columns) - 4, 16
        items += [
            Rect(*box, "paper", radius=3, tip=name, act=point.act),
            small_text(x + 14, y, f"{i + 1}", "end"),
            small_text(x + 20, y, name, "start", "ink"),
        ]
    return items


_BESIDE = (
    [
        (far * math.sin(angle), far * math.cos(angle), "middle")
        for far in (12, 22, 32, 44)
        for angle in (i * math.pi / 6 for i in range(12))
    ],
    [
        *((12, 0, "start"), (-12, 0, "end"), (0, -17, "middle"), (0, 17, "middle")),
        *(
            (s * 8, dy, side)
            for dy in (-17, 17, -32, 32)
            for s, side in ((1, "start"), (-1, "end"))
        ),
    ],
)
"""Where a label may be: from a dot its rank, from a ring its name."""


def _beside(x: float, y: float, label: str, taken, dots, area, places) -> Text:
    """Return a label beside (x, y), inside the area, where it overlaps no other and the fewest dots."""

    def cost(text: Text) -> float:
        x0, y0, x1, y1 = text.box
        out = max(0, area[0] - x0, x1 - area[2]) + max(0, area[1] - y0, y1 - area[3])
        meets = sum(x0 < r and left < x1 and y0 < b and top < y1 for left, top, r, b in taken)
        return 1000 * (out + meets) + sum(
            x0 - 4 < u < x1 + 4 and y0 - 4 < v < y1 + 4 for u, v in dots
        )

    best = min(
        (Text(x + dx, y + dy, label, SMALL, side, bold=True) for dx, dy, side in places), key=cost
    )
    x0, _, x1, _ = best.box  # a long name may need all of the column
    return replace(best, x=best.x + max(0, -x0) - max(0, x1 - RIGHT + 2 * COLUMN_MARGIN))
