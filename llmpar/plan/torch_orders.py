"""Pipeline orders as torch writes them to a file."""

import re


def from_torch(lines: list[str]) -> tuple[list[str], bool]:
    """Return the lines of torch's `_dump_csv` (torch 2.13, distributed/pipelining/schedules.py) in our words,
    and whether its stages lie in a V.

    There a line is a rank, a stage a chunk, I the input's gradient and B both:
    `0F0,,2I0,(0F1;2B0)OVERLAP_F_B`. What a lowered file sends is left out: it follows from the order."""
    p, sends = len(lines), r"\b\d+(UNSHARD|RESHARD|RECV_[FB]|(WAIT_)?(SEND_[FB]|REDUCE_GRAD))\d*\b"
    lines = [
        re.sub(r"\(([^()]*)\)OVERLAP_F_B", lambda x: x[1].replace(";", "&"), line) for line in lines
    ]
    lines = [re.sub(sends, "", line).replace(",", " ") for line in lines]
    action, split = (
        re.compile(r"\b(\d+)([FIBW])(\d+)\b"),
        any(re.search(r"\d[IW]\d", x) for x in lines),
    )
    cells = [
        (int(match[1]), rank) for rank, line in enumerate(lines) for match in action.finditer(line)
    ]
    loop = [cell for cell in cells if cell[0] % p != cell[1]]
    if loop and not all(stage in (rank, 2 * p - 1 - rank) for stage, rank in cells):
        what = "stage {} on rank {}".format(*loop[0])
        raise ValueError(
            f"{what}: this is no loop (stage s on rank s % {p}) and no V of 2 stages per rank"
        )

    def ours(match: re.Match) -> str:
        kind, unit = match[2], f"{match[3]}.{int(match[1]) // p}"
        return f"B{unit}&W{unit}" if kind == "B" and split else kind.replace("I", "B") + unit

    return [action.sub(ours, line) for line in lines], bool(loop)
