"""Tokens on their way to experts: one token's way through the slots, and how full the slots are."""

from itertools import pairwise
from typing import Any

from llmpar.draw.charts import count_noun
from llmpar.draw.scene import (
    OTHERS,
    SMALL,
    Items,
    Line,
    Rect,
    Scene,
    Text,
    compose,
    legend,
    small_text,
    text_width,
)

_CELL = 17
STAGES = ("tokens", "in slots", "at the experts", "back in slots", "tokens")
"""Pixels of a token and of a slot; where a token is, from left to right."""


def dispatch(chosen, slots: int | None = None, follow=(0, 0), weights=(), stages: int = 5) -> Scene:
    """Draw the path of one token to its experts and back. ``chosen[rank][token]`` are the experts that it
    visits, and rank r has expert r. A copy has the colour of the rank that it comes from.

    With ``slots`` a rank has so many for each expert, and all of them travel, full or empty; a copy that
    finds none is left out. Without, the copies travel alone. ``follow`` is the rank and the token whose way
    is drawn, ``weights`` what its results are multiplied by, ``stages`` how many of the 5 are drawn.
    """
    ranks, (home, token) = len(chosen), follow
    if any(not 0 <= e < ranks for tokens in chosen for visits in tokens for e in visits):
        raise ValueError(
            f"rank r has expert r here: experts are 0 to {ranks - 1}; for others use expert_loads"
        )
    rows = [
        [[t for t, v in enumerate(tokens) if e in v][:slots] for e in range(ranks)]
        for tokens in chosen
    ]
    most = slots or max(len(row) for sent in rows for row in sent)
    tall, label, gap = (
        _CELL * max(ranks, *map(len, chosen)) + 22,
        text_width("from 0", SMALL) + 10,
        76,
    )
    wide = [_CELL, *[most * _CELL] * 3, _CELL]
    lefts = [text_width("rank 0") + 16]
    for k, w in enumerate(wide[:-1]):
        lefts.append(lefts[-1] + w + gap + label * (k < 3))
    y_of = lambda rank, line: rank * tall + _CELL * line
    # as large at every stage
    items: list[Any] = [Rect(0, -58, lefts[4] + _CELL + 20, ranks * tall + 40)]
    for stage, x in enumerate(lefts[:stages]):
        name = STAGES[stage] if slots else STAGES[stage].replace("in slots", "by expert")
        items.append(small_text(x + wide[stage] / 2, -28, name, fill="ink"))
        for r in range(ranks):
            if stage == 0:
                items.append(Text(x - 12, y_of(r, ranks / 2), f"rank {r}", anchor="end"))
            if stage == 2:
                items.append(
                    small_text(x + wide[2] / 2, y_of(r, 0) - 10, f"expert {r}", fill="ink")
                )
            for line, (name, cells) in enumerate(_lines(stage, r, chosen, rows, slots)):
                items += [small_text(x - 7, y_of(r, line + 0.5), name, "end")] * bool(name)
                for k, (source, t) in enumerate(cells):
                    items += _cell(
                        x + _CELL * k, y_of(r, line), source, t, (source, t) == (home, token)
                    )
    names = ("router", "all-to-all", "all-to-all", "sum")
    for k, (a, b) in enumerate(pairwise(lefts[:stages])):
        items.append(Text(a + wide[k] + gap / 2, -50, names[k], SMALL, "middle", bold=True))
        for n, expert in enumerate(e for e in chosen[home][token] if token in rows[home][e]):
            places = [(home, token), (home, expert), (expert, home), (home, expert), (home, token)]
            (r, line), (r2, line2) = places[k : k + 2]
            end = b - (label - 6) * (k < 3) - 4, y_of(r2, line2 + 0.5)
            weight = f"× {weights[n]:g}" if k == 3 and weights else ""
            items += _arrow(a + wide[k] + 3, y_of(r, line + 0.5), end, weight)
    full, stay = (
        sum(len(row) for sent in rows for row in sent),
        sum(len(rows[r][r]) for r in range(ranks)),
    )
    travels = f"{full} of {ranks * ranks * most} slots are full; all travel."
    travels = f"{stay} of {full} copies stay on their rank." if slots is None else travels
    copies = count_noun(len(chosen[home][token]), "copy")
    note = f"Thick: the token that is followed, and its {copies}. {travels}"
    visits = " and ".join(f"expert {e} on rank {e}" for e in chosen[home][token])
    each = [
        f"rank {r}: " + "; ".join(" ".join(map(str, v)) for v in row)
        for r, row in enumerate(chosen)
    ]
    lines = [
        "experts chosen, by token:",
        *each,
        f"token {token} of rank {home} goes to {visits}, and back",
    ]
    title = "A token goes to its experts and back" + (
        "" if slots is None else ", in slots that all travel"
    )
    return compose(title, [items], "\n".join([*lines, note]), [note])


def _lines(stage: int, r: int, chosen, rows, slots: int | None) -> list[tuple[str, list]]:
    """Return what rank ``r`` has at a stage, line by line: a name, and copies as (rank, token or None)."""
    if STAGES[stage] == "tokens":
        return [("", [(r, t)]) for t in range(len(chosen[r]))]
    out = []
    for other in range(len(rows)):
        source, expert = (other, r) if stage == 2 else (r, other)
        copies = [(source, t) for t in rows[source][expert]]
        copies += [(source, None)] * ((slots or 0) - len(copies))
        out.append((f"{'to' if stage == 1 else 'from'} {other}", copies))
    return out


def _arrow(x: float, y: float, end: tuple[float, float], weight: str) -> list:
    """Return an arrow, behind the weight that the copy is multiplied by."""
    start = x + text_width(weight, SMALL) + 2 if weight else x
    arrow = Line(((start, y), end), "ink", 2, head=True)
    return [small_text(x, y, weight, "start", "ink"), arrow] if weight else [arrow]


def _cell(x: float, y: float, source: int, token: int | None, followed: bool) -> list:
    """Return a place with the copy in it, if there is one, in the colour of its rank."""
    empty = Rect(x + 1, y + 1, _CELL - 2, _CELL - 2, "paper", "edge", 0.75)
    inset, side, width = (0, _CELL, 3) if followed else (4, _CELL - 8, 0.75)
    copy = Rect(x + inset, y + inset, side, side, OTHERS[source % len(OTHERS)], "ink", width)
    return [empty] if token is None else [empty, copy]


def expert_loads(rows, slots: int) -> Scene:
    """Draw how full the experts are: ``rows[rank][expert]`` is a number of copies, in the colour of the rank
    that they come from. An expert has so many ``slots`` on every rank: what is full, empty and left out."""
    ranks, experts = len(rows), len(rows[0])
    load = [sum(column) for column in zip(*rows, strict=True)]
    taken = [[min(n, slots) for n in row] for row in rows]
    lost = [n - sum(row[e] for row in taken) for e, n in enumerate(load)]
    total, num_slots = sum(load), slots * ranks
    left, per, items = text_width("expert 00") + 12, 420 / max(1, num_slots + max(lost)), Items()
    for e in range(experts):
        x, y = left, 26 * e
        items.append(Text(left - 10, y + 9, f"expert {e}", anchor="end"))
        for r, row in enumerate(taken):
            w, whole = per * row[e], per * slots
            items += [Rect(x, y, w, 18, OTHERS[r % len(OTHERS)], "ink", 0.75)] * (w > 0)
            items += [Rect(x + w, y, whole - w, 18, "paper", "edge", 0.75)] * (w < whole)
            x += whole
        items += [Rect(x, y, per * lost[e], 18, "paper", "edge", 0.75, "/")] * (lost[e] > 0)
        words = count_noun(load[e], "copy") + f", {lost[e]} dropped" * (lost[e] > 0)
        items.append(small_text(left + 432, y + 9, words, "start", "ink"))
    away = sum(
        n for r, row in enumerate(rows) for e, n in enumerate(row) if e * ranks // experts != r
    )
    mean = f"{max(load) * experts / max(total, 1):.2f} × the mean"
    note = f"{away} of {total} copies change their rank; the busiest expert has {mean}."
    sent = [", ".join(f"{n} to expert {e}" for e, n in enumerate(row) if n) for row in rows]
    lines = [f"rank {r}: {words}" for r, words in enumerate(sent)]
    empty = num_slots * experts - total + sum(lost)
    full = f"{empty} of {num_slots * experts} slots empty"
    lines.append(f"load: {' '.join(map(str, load))}, dropped {sum(lost)}, {full}")
    key = [
        *((OTHERS[r % len(OTHERS)], f"from rank {r}", "") for r in range(ranks)),
        ("paper", "empty slot", ""),
        ("edge", "dropped", "/"),
    ]
    title = f"Copies that reach each expert; it has {slots} slots on every rank"
    return compose(title, [items, legend(key)], "\n".join([*lines, note]), [note])
