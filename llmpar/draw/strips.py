"""Draw collectives by what each device holds, before and after or hop by hop round a ring; a mesh in space.

A column is a device, with a place for each part of an array. A part has the colour (`scene.OTHERS`) and the
letter of the device whose numbers it is, a sum those of all whose numbers are in it.
"""

import math

from llmpar.draw.charts import count_noun, number_ranges
from llmpar.draw.geometry import coordinates, holders, rounds
from llmpar.draw.grid import axis_line
from llmpar.draw.scene import (
    BODY,
    OTHERS,
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
    pixels,
    small_text,
    stack,
    text_width,
)
from llmpar.plan.layout import parse_layout
from llmpar.plan.mesh_shape import MeshShape, parse_mesh

_BESIDE, _LETTERS = 400, "abcdefgh"
# [device, part]: the letters of the devices whose numbers are added up in it
Held = list[list[str]]
PATTERNS = {
    "all-gather": ("each has a part;", "all get all parts"),
    "reduce-scatter": ("numbers are", "added up; each", "keeps a part"),
    "all-reduce": ("numbers are", "added up; all", "get the sum"),
    "all-to-all": ("each sends", "every other", "its own part"),
    "permute": ("each passes its", "part to the next"),
}
"""The five collectives, and what each does."""


def pattern(kind: str, ranks: int) -> tuple[Held, Held]:
    """Return what each device holds before a collective and after it."""
    letters, each, only = _LETTERS[:ranks], range(ranks), lambda r, p, text: text if r == p else ""
    own = [[letter] * ranks for letter in letters]
    all_of = [list(letters) for _ in each]
    return {
        "all-gather": ([[only(r, p, letters[p]) for p in each] for r in each], all_of),
        "reduce-scatter": (own, [[only(r, p, letters) for p in each] for r in each]),
        "all-reduce": (own, [[letters] * ranks for _ in each]),
        "all-to-all": (own, all_of),
        "permute": ([[letter] for letter in letters], [[letters[r - 1]] for r in each]),
    }[kind]


def lettered(parts: list[list[set[int]]]) -> Held:
    """Return what devices hold (`geometry.rounds`) in the letters of the devices whose numbers it is."""
    return [["".join(_LETTERS[rank] for rank in sorted(ranks)) for ranks in row] for row in parts]


def hop_words(kind: str, hop: int, ranks: int) -> str:
    """Return in words what happens in a hop of `ring_sums`."""
    adds, lap = (
        kind != "all-gather" and hop < ranks,
        "first lap, " if hop < ranks else "second lap, ",
    )
    words = "the next device adds its own to what comes" if adds else "finished parts are handed on"
    return (
        f"{lap * (kind == 'all-reduce')}hop {hop}: {words}"
        if hop
        else "before: each has its own numbers"
    )


def column(
    rank: int, row: list[str], w: float, h: float, gap: float = 0, new=(), index=(), name: str = ""
) -> list:
    """Return a device: its ``name``, else its rank, and below it the parts, with a stripe for each device
    whose numbers are in one; dashed where there is none; what is ``new`` is outlined. An ``index`` stands
    behind its letter."""
    name, big, tint = name or f"{rank}", h > 11, OTHERS[rank % len(OTHERS)]
    items: list = [
        Rect(0, 0, w, h if big else 3, tint, "edge", 0.75, radius=2),
        *fitting_text(w / 2, h / 2, w * big, f"device {name}", name, on=tint),
    ]
    for p, letters in sorted(enumerate(row), key=lambda part: part[0] in new):  # outlines lie above
        y = (h if big else 3) + 2 + p * (h + gap)
        wide = w / max(1, len(letters))
        for i, letter in enumerate(letters):
            tint = OTHERS[_LETTERS.index(letter) % len(OTHERS)]
            text = "".join(index[p : p + 1])
            middle, adds = (i + 0.5) * wide, i > 0 and wide > 13
            items += [
                Rect(i * wide, y, wide, h, tint, "edge", 0.5),
                *fitting_text(middle, y + h / 2, wide * big, letter + text, on=tint),
                *[small_text(i * wide, y + h / 2, "+", fill="black")] * adds,
            ]
        look = ("ink", 2.5) if p in new else ("edge", 0.75)
        items.append(Rect(0, y, w, h, "" if letters else "paper", *look, dash=not letters))
    return items


def _words(row: list[str]) -> str:
    """Return in words what a device holds."""
    return " ".join("+".join(letters) or "·" for letters in row)


def before_after(kinds=tuple(PATTERNS), ranks: int = 4, icon: bool = False) -> Scene:
    """Draw what each of 2 to 5 devices holds before a collective and after it: a strip for each of ``kinds``,
    one below the other; as an ``icon`` small and without words."""
    if unknown := [kind for kind in kinds if kind not in PATTERNS]:
        raise ValueError(f"'{unknown[0]}' is no collective; there are {', '.join(PATTERNS)}")
    w, h, gap, between = 1.15 * text_width("device 0", SMALL), pixels(SMALL) + 6, 5.0, 50.0
    if icon:
        w, h, gap, between = 8.0, 6.0, 2.0, 14.0
    left = max(
        max(1.1 * text_width(kind), *(text_width(t, SMALL) for t in PATTERNS[kind]))
        for kind in kinds
    )
    left = 0 if icon else left + 12
    side, drawn, lines = ranks * (w + gap) - gap, Items(), list[str]()
    for kind in kinds:
        both, items = pattern(kind, ranks), Items()
        for end, rows in enumerate(both):
            for r, row in enumerate(rows):
                index = [str(r if end else p) for p in range(ranks)] if kind == "all-to-all" else ()
                x = left + end * (side + between) + r * (w + gap)
                items.append(Group(tuple(column(r, row, w, h, index=index)), x))
        middle = bounds(items)[3] / 2
        ends = (left + side + between * 0.14, middle), (left + side + between * 0.86, middle)
        items.append(Line(ends, "ink", 1 if icon else 2.5, head=True))
        if not icon:
            items.append(Text(0, h / 2, kind, BODY, bold=True))
            placed = (
                (1.35 * pixels(SMALL) * (i + 1.7), line) for i, line in enumerate(PATTERNS[kind])
            )
            items += [small_text(0, y, line, "start") for y, line in placed]
        drawn.append(items)
        before, after = (
            ", ".join(f"device {r}: {_words(row)}" for r, row in enumerate(rows)) for rows in both
        )
        lines.append(f"{kind} ({' '.join(PATTERNS[kind])}): before {before}; after {after}")
    title = "What each device holds before and after" + f": {kinds[0]}" * (len(kinds) == 1)
    if icon:
        block = Group(tuple(stack(drawn, 6)), 2, 2)
        wide, high = bounds([block])[2:]
        return Scene(
            math.ceil(wide + 6), math.ceil(high + 2), title, "\n".join([title, *lines]), (block,)
        )
    middles = ((left + side / 2, "before"), (left + 1.5 * side + between, "after"))
    head = [Rect(0, 0, 1, 1), *(Text(x, 0, text, BODY, "middle", bold=True) for x, text in middles)]
    note = "A column is a device, a row a part of the array. Letters and colours: whose numbers these are."
    return compose(title, [stack([head, *drawn], 14)], "\n".join([*lines, note]), [note])


def _hop(hop: dict, w: float, h: float, gap: float, wide: float, names=()) -> list:
    """Return what devices hold after a hop (`geometry.rounds`), with arrows for what has come in."""
    sends, rows, items = hop["sends"], lettered(hop["held"]), Items()
    items.append(Rect(-gap, 0, len(rows) * (w + gap) + gap, 1))  # as wide as with arrows
    for r, row in enumerate(rows):
        new = [part for _, target, part in sends if target == r]
        name = "".join(names[r : r + 1])
        items.append(Group(tuple(column(r, row, w, h, 2, new, name=name)), r * (w + gap)))
    for source, target, part in sends:
        y = h + 2 + part * (h + 2) + h / 2
        lefts = {source * (w + gap) + w, target * (w + gap) - gap}
        items += [Line(((x + 2, y), (x + gap - 2, y)), "ink", wide, head=True) for x in lefts]
    return items


def _held(hop: dict) -> str:
    """Return in words what each device holds after a hop."""
    return " | ".join(map(_words, lettered(hop["held"])))


_NOTE = (
    "A row is a part of the array. Outlined: what has just come in; what leaves right enters left."
)


def ring_sums(kind: str = "all-reduce", ranks: int = 4, moving: bool = False) -> Scene:
    """Draw what each of 2 to 5 devices holds after every hop of a ring, all in small or, ``moving``, in
    frames."""
    hops, panels, lines = rounds(kind, ranks), list[list](), list[str]()
    sizes = text_width(_LETTERS[:ranks], SMALL) + 6, pixels(SMALL) + 4, 14.0, 1.5
    if moving:
        sizes = 1.2 * text_width("device 0", SMALL), pixels(SMALL) + 12, 34.0, 2.5
    for k, hop in enumerate(hops):
        items, words = _hop(hop, *sizes), hop_words(kind, k, ranks)
        if not moving:
            items.append(small_text(0, -12, words.partition(":")[0], "start", "ink"))
        panels.append(items)
        lines.append(f"{words}: {_held(hop)}")
    if moving:
        panels = [[Group(tuple(items), frame=k) for k, items in enumerate(panels)]]
    drawn = [stack(row, 22, across=True) for row in (panels[:ranks], panels[ranks:]) if row]
    title = f"{kind} round a ring of {ranks}: {count_noun(len(hops) - 1, 'hop')}"
    return compose(title, [stack(drawn, 18)], "\n".join([*lines, _NOTE]), [_NOTE])


def ring(kind: str, members: list[int], axis: str, most: int = 8) -> Scene:
    """Draw a collective over an axis among 2 to 8 devices as a film of at most ``most`` rounds
    (`geometry.rounds`): what each device holds, as in `ring_sums`, in a column of a page."""
    g, hops = len(members), rounds(kind, len(members))
    if not 2 <= g <= len(_LETTERS):
        raise ValueError(
            f"a ring of {count_noun(g, 'device')}; it is drawn with 2 to {len(_LETTERS)}"
        )
    last = len(hops) - 1
    wide = 14.0 if g > 4 else text_width(_LETTERS[:g], SMALL) + 4
    shown = sorted({round(i * last / min(last, most - 1)) for i in range(min(last + 1, most))})
    names, film, lines = list(map(str, members)), list[list](), list[str]()
    for t in shown:
        head = small_text(0, -12, f"round {t} of {last}" if t else "before", "start", "ink")
        film.append([head, *_hop(hops[t], wide, 14.0, 8.0, 1.25, names)])
        lines.append(f"round {t}: {_held(hops[t])}")
    across = max(1, int(_BESIDE // (g * (wide + 8) + 22)))
    rows = [stack(film[i : i + across], 16, across=True) for i in range(0, len(film), across)]
    title = f"{kind} over {axis}, devices {number_ranges(members)}: {count_noun(last, 'round')}"
    return compose(title, [stack(rows, 14)], "\n".join(lines), [f"{title}. {_NOTE}"], 4, _BESIDE)


CORNERS = ((1, 0, 26, 0, 14, "middle"), (2, 22, 12, 12, 0, "start"), (0, -28, 0, -8, 0, "end"))
"""Of a cube's innermost axis, and the next: the edge of its arrow, how far off it and its names stand."""


def cube(mesh: MeshShape | str, rows: int, cut=(), row: int = 0, lit: bool = False) -> Scene:
    """Draw the devices of a mesh of up to three axes of 2, in space, beside an array of so many ``rows`` that
    axes ``cut``, outermost first: which devices hold this ``row``? They are ``lit`` in the answer."""
    shape = parse_mesh(mesh)
    live = list(shape.named)
    if shape.size != 2 ** len(live) or len(live) > 3:
        raise ValueError(f"mesh '{shape}' is no cube: up to three axes of 2; use draw.mesh")
    steps = dict(zip(live[::-1], ((100.0, 0.0), (50.0, -44.0), (0.0, 100.0)), strict=False))
    spot = lambda at: tuple(sum(n * steps[a][k] for a, n in at.items()) for k in (0, 1))
    sizes, cuts = dict.fromkeys(live, 2), [a for a in cut if a in live]
    places = [coordinates(sizes, live, device) for device in range(shape.size)]
    shards = holders(parse_layout(f"b/{','.join(cuts)}" if cuts else "b"), sizes)
    holding = shards.get((row * 2 ** len(cuts) // rows,), [0])
    space, array, left = Items(), Items(), 0.0
    # what is in front comes last
    for at in sorted(places, key=lambda at: [-at[a] for a in live[-2:-1]]):
        for a in (a for a in live if not at[a]):
            ends = (spot(at), spot(at | {a: 1}))
            space += [Line(ends, "paper", 9), Line(ends, axis_line(a), 3)]
    for device, at in enumerate(places):
        (x, y), on = spot(at), lit and device in holding
        space += [
            Rect(x - 15, y - 15, 30, 30, "ink" if on else "cell", "ink", 1.5, radius=15),
            Text(x, y, str(device), BODY, "middle", "paper" if on else "ink", bold=on),
        ]
    for a, (ones, dx, dy, *away, anchor) in zip(live[::-1], CORNERS, strict=False):
        corner = dict.fromkeys([*live[:1] * (ones > 0), *live[-1:] * (ones > 1)], 1)
        arrow = [(x + dx, y + dy) for x, y in (spot(corner | {a: i}) for i in (0, 1))]
        labels = [(x + away[0], y + away[1], f"{a} {i}") for i, (x, y) in enumerate(arrow)]
        space += [
            Line(tuple(arrow), axis_line(a), 1.5, head=True),
            *(small_text(*label, anchor, axis_line(a)) for label in labels),
        ]
    h = 1.8 * pixels(SMALL)
    for k, a in enumerate(cuts, 1):
        tall, right = rows * h / 2**k, left + 8
        for i in range(2**k):
            y, end = i * tall + 3, (i + 1) * tall - 3
            array += [
                Line(((right, y), (left, y), (left, end), (right, end)), axis_line(a), 3),
                small_text(left + 6, (y + end) / 2, f"{a} {i % 2}", "start", axis_line(a)),
            ]
        left += text_width(f"{a} 0", SMALL) + 22
    for i in range(rows):
        fill, color = ("ink", "paper") if i == row else ("cell", "ink")
        array += [
            Rect(left, i * h, 120, h, fill, "edge"),
            small_text(left + 60, (i + 0.5) * h, f"row {i}", fill=color),
        ]
    names = f"device{'s' * (len(holding) > 1)} {' and '.join(map(str, holding))}"
    title = f"Row {row} is on {names}" if lit else f"Who holds row {row}?"
    where = [", ".join(f"{a} {at[a]}" for a in live) or "alone" for at in places]
    lines = [f"device {i}: {place}" for i, place in enumerate(where)]
    lines.append(f"{rows} rows, cut by {', '.join(cuts) or 'nothing'}")
    return compose(title, [stack([space, array], 60, across=True)], "\n".join(lines))
