"""Draw the square of causal attention in the colours of the ranks that compute it."""

from llmpar.draw.scene import (
    OTHERS,
    SMALL,
    Group,
    Items,
    Line,
    Rect,
    Scene,
    Text,
    compose,
    small_text,
    text_color_on,
    titled,
)


def causal(
    orders, step: int | None = None, title: str = "", counts: bool = True, bars: bool = True
) -> Scene:
    """Draw which pairs of query and key each rank of a causal ring computes, and in which step of the ring.

    ``orders`` have by name, for each rank, the parts of the sequence that it holds, counted from 0, all
    equally long and as many. A row is a part of the queries, a column one of the keys; a tile has its rank's
    colour and its step's number. Below stands the work of each rank, in squares: all queries of a rank with
    all keys of one. With a ``step`` tiles up to it are filled, its own bold. Without ``counts`` there are
    neither numbers nor times nor bars of work, also not in the words; without ``bars`` only no bars.
    """
    panels, lines = list[Group](), []
    for name, dealt in orders.items():
        ranks, side = len(dealt), 240 / sum(map(len, dealt))
        last = ranks - 1 if step is None else step
        owner = {part: rank for rank, parts in enumerate(dealt) for part in parts}
        work, bold = [[0.0] * ranks for _ in dealt], Items()
        names = (
            (120, -35, "keys"),
            (-26, -35, "queries"),
            (172, 60, "later keys:"),
            (172, 76, "not seen"),
        )
        items: list = [
            Rect(0, 0, 240, 240, "paper", "grid", hatch="/"),
            Text(0, -56, name, bold=True),
            *(small_text(*one) for one in names),
        ]
        for q, rank in sorted(owner.items()):
            tint, y = OTHERS[rank], side * q
            # queries at the left, keys above
            for x, top, w, h in ((-26, y, 20, side), (y, -24, side, 18)):
                items += titled(Rect(x, top, w, h, tint, "edge", 0.75), str(rank), SMALL)
            for k in range(q + 1):
                t, x, half = (rank - owner[k]) % ranks, side * k, k == q
                work[rank][t] += (0.5 if half else 1) / len(dealt[rank]) ** 2
                corners = [(x, y), (x + side, y), (x + side, y + side), (x, y + side), (x, y)]
                corners = [corner for i, corner in enumerate(corners) if i != 1 or k < q]
                spot = (x + side / (3 if half else 2), y + side * (0.68 if half else 0.5))
                fill, look = (
                    "paper" if t > last else tint,
                    ("ink", 2.5) if t == step else ("edge", 0.75),
                )
                number = small_text(*spot, str(t), fill=text_color_on(fill))
                tile: list = [Line(tuple(corners), *look, fill=fill), *[number] * counts]
                (bold if t == step else items).extend(tile)
        took = [max(row[t] for row in work) for t in range(last + 1)]
        time = Text(236, 16, f"takes {sum(took):g} squares", anchor="end", bold=True)
        items, below = [*items, *bold, *[time] * counts], Items()
        for rank, row in enumerate(work):
            y, sums = 258 + 22 * rank, sum(row[: len(took)])
            words = f"works {sums:g}, waits {sum(took) - sums:g}"
            below += [
                small_text(-6, y + 8, f"rank {rank}", "end", "ink"),
                Rect(0, y, 48 * sums, 16, OTHERS[rank], "edge"),
                small_text(48 * sums + 8, y + 8, words, "start", "ink"),
            ]
            parts = " ".join(map(str, dealt[rank]))
            known = f"; {words}; by step {row[: len(took)]}" * counts
            lines.append(f"{name}, rank {rank}: parts {parts}{known}")
        lines += [f"{name}: takes {sum(took):g} squares"] * counts
        panels.append(Group((*items, *below * (bars and counts)), 400 * len(panels)))
    title = title or "Causal attention: who computes what" + (
        "" if step is None else f", up to step {step}"
    )
    note = "Strips: which device holds a part."
    note += (
        " Number: the ring's step. Time: in full squares (all queries of one rank × all keys of one)."
        * counts
    )
    return compose(title, [panels], "\n".join(lines), [note])
