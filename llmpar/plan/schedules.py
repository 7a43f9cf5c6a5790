"""Pipeline orders as data: what each stage does, in which order, and where the chunks of layers live.

An operation is F (forward), B (backward) or W (weight gradient) of one microbatch through one chunk of
layers. In a schedule that splits the backward, B computes the input gradient only and W the weights'
gradient; elsewhere B is both. An order written as text has one line per stage, `F0 F1 B0 W0`; `F3.1` is chunk
1; `F3&B0&W0` is one cell, whose parts start together and whose results leave together. Letters are the
papers': p stages, m microbatches, v chunks per stage, i the stage, u a microbatch, c a chunk. `lockstep`
proves an order legal, `timetable` measures it.

Sources: GPipe (Huang 2018); 1F1B and interleaved (Narayanan 2021, sec. 2.2); breadth-first (Lamy-Poirier
2022); zero bubble (Qi 2023, arXiv 2401.10241); V shapes (Qi 2024, arXiv 2405.15362); DualPipe (DeepSeek-V3
2024, sec. 3.2.1).
"""

import difflib
import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import count, pairwise
from typing import NamedTuple

from llmpar.plan.torch_orders import from_torch

OP_KINDS = "FBW"  # in a table of integers a kind is its index in this


class Op(NamedTuple):
    """Forward, backward or weight gradient of one microbatch through one chunk of a stage."""

    kind: str
    microbatch: int
    chunk: int = 0
    joined: bool = False  # in one cell with the operation before it

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


_Row = tuple[Op, ...]

_PLACEMENTS: dict[str, Callable[[int, int], list[list[tuple[int, int]]]]] = {
    # routes through the pipeline as (stage, chunk) cells, in forward order; a microbatch follows one of them
    "linear": lambda p, v: [[(s, 0) for s in range(p)]],
    "looped": lambda p, v: [[(s, c) for c in range(v) for s in range(p)]],
    "vee": lambda p, v: [[(s, 0) for s in range(p)] + [(s, 1) for s in reversed(range(p))]],
    # two copies of the model in opposite directions; the second half of the microbatches goes the second way
    "dual": lambda p, v: [[(s, 0) for s in range(p)], [(s, 1) for s in reversed(range(p))]],
}


def deal(num_layers: int, num_cells: int) -> list[int]:
    """How many layers each cell of a route gets: the first have one more where they cannot be equal."""
    few, more = divmod(num_layers, num_cells)
    return [few + (i < more) for i in range(num_cells)]


@dataclass(frozen=True)
class Schedule:
    """An order and its placement. Nothing is proved before `lockstep.lockstep`."""

    name: str
    rows: tuple[_Row, ...]  # the operations of each stage, in order
    num_microbatches: int
    num_chunks: int = 1
    placement: str = "linear"
    split_backward: bool = False

    @property
    def num_stages(self) -> int:
        return len(self.rows)

    @cached_property
    def routes(self) -> list[list[tuple[int, int]]]:
        return _PLACEMENTS[self.placement](self.num_stages, self.num_chunks)

    def route(self, microbatch: int) -> list[tuple[int, int]]:
        """The (stage, chunk) cells that hold this microbatch's layers, first to last."""
        return self.routes[microbatch * len(self.routes) // self.num_microbatches]

    @property
    def cells(self) -> int:
        """The chunks that a model's layers are dealt to."""
        return len(self.routes[0])

    @property
    def visits(self) -> int:
        """How often one microbatch comes through one stage."""
        return self.cells // self.num_stages

    @property
    def parameter_copies(self) -> int:
        return len(self.routes)

    def needs(self, stage: int, op: Op) -> list[tuple[int, str, int, int]]:
        """Return what must be done first: stages, and the kind, microbatch and chunk of an operation."""
        kind, u, c = op[:3]
        own = [] if kind == "F" else [(stage, "B" if kind == "W" else "F", u, c)]
        cell = self.before[kind].get((stage, c))
        return [*own, (cell[0], kind, u, cell[1])] if cell else own

    @cached_property
    def before(self) -> dict[str, dict[tuple[int, int], tuple[int, int]]]:
        """From a (stage, chunk) cell to the one that each kind comes from; W stays."""
        pairs = [pair for route in self.routes for pair in pairwise(route)]
        return {"F": {b: a for a, b in pairs}, "B": dict(pairs), "W": {}}

    def __str__(self) -> str:
        return "\n".join(
            "".join("& "[not op.joined] + str(op) for op in row)[1:] for row in self.rows
        )


# ----------------------------------------------------------------------------------------------------- orders


def _row(text: str, num_microbatches: int) -> _Row:
    """Numbers `F0 F0 B0&W0 W`: the k-th `F0` is microbatch k of chunk 0; a bare `W` is owed to the oldest B.

    Microbatches past the last are dropped. What is left of a legal order is legal, so an order that needs
    many microbatches also gives one for few.
    """
    row, seen, owed = list[Op](), Counter[tuple[str, int]](), list[int]()
    for token in text.split():
        cell = list[Op]()
        for part in token.split("&"):
            kind, chunk = part[0], int(part[1:] or (owed[0] if part == "W" else 0))
            if seen[kind, chunk] < num_microbatches:
                cell.append(Op(kind, seen[kind, chunk], chunk, bool(cell)))
            seen[kind, chunk] += 1
            if kind == "B":
                owed.append(chunk)
            if kind == "W":
                owed.remove(chunk)
        row += cell
    return tuple(row)


def _in_turn(units: list[tuple[int, int]], ahead: int, lag: int | None = None) -> _Row:
    """Run `ahead` forwards, then F and B in turn: of (microbatch, chunk) `units`, whose backwards go through
    the chunks the other way. With a lag, W follows `lag` operations behind its B."""
    last = max(chunk for _, chunk in units)
    back = [(u, last - chunk) for u, chunk in units]
    row = [Op("F", *unit) for unit in units[:ahead]]
    for k, unit in enumerate(back):
        row += [Op("F", *unit) for unit in units[ahead + k : ahead + k + 1]] + [Op("B", *unit)]
        if lag is not None and k >= lag:
            row.append(Op("W", *back[k - lag]))
    return (*row, *(Op("W", *unit) for unit in back[max(0, len(back) - (lag or 0)) :]))


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards."""
    return Schedule("gpipe", (_row("F " * m + "B " * m, m),) * p, m)


def one_f_one_b(
    p: int, m: int, name: str = "1f1b", times: int = 1, split: bool = False
) -> Schedule:
    """Stage i runs p-i-1 forwards ahead, then one forward and one backward in turn.

    Split: W follows i microbatches behind B, and fills the bubble (ZB-H1). With 2 ``times`` as many forwards
    ahead and twice that lag there is no bubble when F = B = W, for twice the memory (ZB-H2)."""
    units = [(u, 0) for u in range(m)]
    lags = [times * i if split else None for i in range(p)]
    rows = (_in_turn(units, times * (p - i - 1), lags[i]) for i in range(p))
    return Schedule(name, tuple(rows), m, split_backward=split)


def interleaved(p: int, m: int, v: int = 2, split: bool = False) -> Schedule:
    """1F1B over v chunks per stage, in rounds of p microbatches (Megatron's order), or of so many more that
    m // p rounds are equal (torch's). Split: ZB-H1 over chunks, W i operations behind B (torch's
    InterleavedZeroBubble)."""
    name, takes = "interleaved-zb" if split else "interleaved", lambda m: not m % max(1, m // p)
    if not takes(m):
        fits = f"{next(filter(takes, range(m, 0, -1)))} or {next(filter(takes, count(m)))}"
        raise ValueError(
            f"{name} runs microbatches in m // p = {m // p} equal rounds;"
            f" {m} is no multiple of {m // p}, use {fits}"
        )
    size = m // max(1, m // p)
    units = [(g + u, c) for g in range(0, m, size) for c in range(v) for u in range(size)]
    ahead = [(2 - split) * (p - i - 1) + (v - 1) * size for i in range(p)]
    rows = (_in_turn(units, ahead[i], i if split else None) for i in range(p))
    return Schedule(name, tuple(rows), m, v, "looped", split)


def breadth_first(p: int, m: int, v: int = 2) -> Schedule:
    """All microbatches through chunk 0, then chunk 1, …, and back: the looped or circular pipeline."""
    forward = tuple(Op("F", u, c) for c in range(v) for u in range(m))
    backward = tuple(Op("B", u, c) for c in reversed(range(v)) for u in range(m))
    return Schedule("breadth-first", (forward + backward,) * p, m, v, "looped")


def zb_v(p: int, m: int) -> Schedule:
    """Two chunks per stage in a V: no bubble when F = B = W and m >= 2p-1, in 1F1B's memory."""
    n = max(m, 2 * p - 1)
    rows = (
        "F0 " * (2 * (p - i) - 1)
        + "F1 F0 " * i
        + "F1 B1 W1 " * (p - i)
        + "F0 B0 W0 F1 B1 W1 " * (n - 2 * p + i + 1)
        + "B0 W0 F1 B1 W1 " * (p - i - 1)
        + "B0 B1 " * i
        + "B0 W0 " * (p - i)
        + "W1 " * i
        + "W0 " * i
        for i in range(p)
    )
    return Schedule("zb-v", tuple(_row(row, m) for row in rows), m, 2, "vee", True)


def _dualpipe_rows(p: int, half: int) -> list[_Row]:
    """DualPipe's eight steps, microbatches numbered per direction. Chunk 0 enters nearest to stage 0."""
    h, n = p // 2, max(half, p)

    def stage(i: int) -> _Row:
        r = min(i, p - 1 - i)  # stages i and p-1-i do the same, with the directions exchanged
        main = "F0&B1&W1 F1&B0&W0 " * (n - p + r + 1)
        if r == h - 1:  # the middle pair turns its first microbatch round at once
            main = main.replace("&", " ", 1)
        ends = ("B1 B0 " * (r + 1)).split()
        text = (
            "F0 " * 2 * (h - r - 1)
            + "F0 F1 " * (r + 1)
            + "B1 W1 F1 " * (h - r - 1)
            + main
            + "B1&W1 F1&B0&W0 " * (h - r - 1)
            + " ".join(b + f"&W{b[1]}" * (k <= r) for k, b in enumerate(ends))
            + " W B0" * (h - r - 1)
            + " W" * (r + 1)
        )
        return _row(text if i < h else text.translate(str.maketrans("01", "10")), half)

    return [stage(i) for i in range(p)]


def dualpipe(p: int, m: int) -> Schedule:
    """Two copies of the model in opposite directions, a forward of one beside a full backward of the other.

    The paper overlaps the two inside a cell; here a cell `F&B&W` costs their sum, F&B = F+B+W, and nothing is
    gained by the overlap of communication that it is made for. The published bubble holds for m >= 2p.
    """
    if p % 2 or m % 2:
        even = " and ".join(f"{name} = {n + 1}" for name, n in {"p": p, "m": m}.items() if n % 2)
        raise ValueError(
            f"dualpipe sends half of the microbatches in at each end of pairs of stages: p = {p} and m = {m}"
            f" must be even; use {even}, or dualpipev"
        )
    number = lambda op: op._replace(microbatch=op.microbatch + m // 2 * op.chunk)
    rows = (tuple(map(number, row)) for row in _dualpipe_rows(p, m // 2))
    return Schedule("dualpipe", tuple(rows), m, 2, "dual", True)


def dualpipev(p: int, m: int) -> Schedule:
    """Half of DualPipe over 2p stages: by its symmetry the other half is the way back up a V. One copy."""
    return Schedule("dualpipev", tuple(_dualpipe_rows(2 * p, m)[:p]), m, 2, "vee", True)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "interleaved-zb": functools.partial(interleaved, split=True),
    "breadth-first": breadth_first,
    "circular": breadth_first,
    "zb-h1": functools.partial(one_f_one_b, name="zb-h1", split=True),
    "zb-h2": functools.partial(one_f_one_b, name="zb-h2", times=2, split=True),
    "zb-v": zb_v,
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
}


@functools.lru_cache(maxsize=256)  # plans by the thousand ask for the same few
def make(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int | None = None
) -> Schedule:
    """Makes a schedule by its name in `SCHEDULES`."""
    if name not in SCHEDULES:
        if re.match(r"\s*([FBW]\d|\W*\d+[FIBW]\d+,)", name):
            raise ValueError(f"'{name:.40}' is an order of one stage; write one line per stage")
        close = [f"'{like}', or " for like in difflib.get_close_matches(name, SCHEDULES, 1)]
        raise ValueError(
            f"no schedule is called '{name}'; try {''.join(close)}one of {', '.join(SCHEDULES)}"
        )
    chunks = 1 if num_chunks is None else num_chunks
    if min(num_stages, num_microbatches, chunks) < 1:
        raise ValueError(
            f"{num_stages} stages, {num_microbatches} microbatches, {chunks} chunks:"
            " a pipeline needs at least 1 of each"
        )
    looped = name in ("interleaved", "interleaved-zb", "breadth-first", "circular")
    made = SCHEDULES[name](
        num_stages, num_microbatches, *([num_chunks] if looped and num_chunks else [])
    )
    if num_chunks not in (None, made.num_chunks):
        raise ValueError(
            f"{name} has {made.num_chunks} chunk(s), not {num_chunks};"
            " try interleaved, interleaved-zb or breadth-first"
        )
    return made


def from_text(text: str, name: str = "written") -> Schedule:
    """Read an order written by hand, one line per stage; `.` is an idle cell (ignored), `#` starts a comment.
    An order that names chunks is looped and any other linear. A W anywhere splits every backward. Or read
    torch's file of an order (`from_torch`)."""
    rows, lines = [], [line for raw in text.splitlines() if (line := raw.split("#")[0].rstrip())]
    vee = False
    if any(re.match(r"\W*\d+[A-Z]", line) for line in lines):
        lines, vee = from_torch(lines)
    for stage, line in enumerate(lines):
        row = []
        for token in re.finditer(r"[^\s&]+", line):
            op = re.fullmatch(r"([FBW])(\d+)(?:\.(\d+))?", token[0])
            if op:
                joined = line[: token.start()].endswith("&")
                row.append(Op(op[1], int(op[2]), int(op[3] or 0), joined))
            elif token[0].strip("."):
                caret = " " * token.start() + "^" * len(token[0])
                raise ValueError(
                    f"stage {stage}: '{token[0]}' is no operation; write F0, B0 or W0, or F0.1 for chunk 1"
                    f"\n{line}\n{caret}"
                )
        rows.append(tuple(row))
    ops = [op for row in rows for op in row]
    if not ops:
        raise ValueError("the order is empty; write one line per stage, such as 'F0 F1 B0 B1'")
    m, v = 1 + max(op.microbatch for op in ops), 1 + max(op.chunk for op in ops)
    if max(m, v) > len(ops):
        raise ValueError(
            f"{len(ops)} operations cannot cover {m} microbatches and {v} chunks; number both from 0"
        )
    placement = "vee" if vee else "looped" if v > 1 else "linear"
    return Schedule(
        name, tuple(rows), m, v, placement, split_backward=any(op.kind == "W" for op in ops)
    )
