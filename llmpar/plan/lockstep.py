"""An order of pipeline stages in lockstep ticks: proved legal, or refused with stage, tick and cycle; and the
buffers of the executor that runs them. How long it takes is in `llmpar.plan.timetable`.

    legal       each stage runs each operation of its layers once, and none waits for one that never comes
    lockstep    every stage runs one operation a tick; what it sends is there in the next tick
    slots       where the executor keeps activations, residuals and messages, from what is alive

Plain Python: tables are lists.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from llmpar.plan.schedules import OP_KINDS, Op, Schedule

DIRECTIONS = {"right": 1, "left": -1}  # to the next stage and to the previous one
Cell = tuple[int, tuple[Op, ...], list[tuple[int, int]]]
"""A stage, what it does at once, and the cells that must end before, each by its number and stage."""


@dataclass(frozen=True)
class Lockstep:
    """A legal schedule, the ``tick`` of each operation of its rows, and its `cells` in an order in which they
    can run. (A tick has one operation of a stage; the operations of a cell have a tick each.)"""

    schedule: Schedule
    tick: tuple[tuple[int, ...], ...]
    cells: list[Cell] = field(compare=False)

    @cached_property
    def ticks(self) -> list[list[tuple[int, int, int]]]:
        """The lockstep table: (kind, microbatch, chunk) in [tick][stage], -1 for idle."""
        idle, num_ticks = (-1, -1, -1), 1 + max(tick[-1] for tick in self.tick)
        table = [[idle] * self.schedule.num_stages for _ in range(num_ticks)]
        for stage, row in enumerate(self.schedule.rows):
            for tick, op in zip(self.tick[stage], row, strict=True):
                table[tick][stage] = OP_KINDS.index(op.kind), op.microbatch, op.chunk
        return table

    @cached_property
    def messages(self) -> list[tuple[int, int, int, int]]:
        """Of each message the tick sent, from stage, tick used and to stage; some go to the same stage."""
        order = self.schedule.rows
        at = {
            (s, *op[:3]): t
            for s, row in enumerate(order)
            for op, t in zip(row, self.tick[s], strict=True)
        }
        return [
            (at[need], need[0], at[stage, *op[:3]], stage)
            for stage, row in enumerate(order)
            for op in row
            for need in self.schedule.needs(stage, op)
            if need[1] == op.kind
        ]


@functools.lru_cache(maxsize=256)
def lockstep(schedule: Schedule) -> Lockstep:
    """Lay a schedule out in ticks, or refuse it with stage, tick and cycle."""
    cells, stuck = run_cells(schedule, joined=False)
    refuse_order(schedule, cells, stuck)
    ticks, _ = times(schedule, cells)
    if any(op.joined for row in schedule.rows for op in row):
        cells, stuck = run_cells(schedule, joined=True)
        refuse_order(schedule, cells, stuck)  # of a legal order only a cell can be at fault
    return Lockstep(schedule, tuple(map(tuple, ticks)), cells)


def run_cells(schedule: Schedule, joined: bool) -> tuple[list[Cell], dict[int, tuple[Op, int, Op]]]:
    """Run every stage as far as it gets. Return the cells in the order in which they ran, and for each stage
    that is stuck its next operation, and the stage and operation that this waits for. Operations that the
    order writes as one cell are ``joined``, or each is a cell."""
    rows, awake = schedule.rows, list(range(schedule.num_stages))
    begins, cells = [0] * len(rows), list[Cell]()
    number = dict[tuple, int]()  # of the cell in which an operation ran
    waiting, stuck = defaultdict[tuple, list[int]](list), dict[int, tuple[Op, int, Op]]()
    while awake:
        stage = awake.pop()
        row = rows[stage]
        while (first := begins[stage]) < len(row):
            last = first + 1
            while joined and last < len(row) and row[last].joined:
                last += 1
            inside, needs = set[tuple](), list[tuple[int, int]]()
            stuck.pop(stage, None)
            for op in row[first:last]:
                for need in schedule.needs(stage, op):
                    if need in number:
                        needs.append((number[need], need[0]))
                    elif need not in inside:
                        stuck.setdefault(stage, (op, need[0], Op(*need[1:])))
                inside.add((stage, *op[:3]))
            if stage in stuck:
                _, source, missing = stuck[stage]
                waiting[source, *missing[:3]].append(stage)
                break
            number |= dict.fromkeys(inside, len(cells))
            cells.append((stage, row[first:last], needs))
            begins[stage] = last
            for key in inside:
                awake += waiting.pop(key, [])
    return cells, stuck


def times(
    schedule: Schedule,
    cells: list[Cell],
    cost: Callable[[int, Op], float] = lambda stage, op: 1,
    hop: float = 0,
) -> tuple[list[list], list[list]]:
    """Return when each operation of each stage starts and ends, if it starts as soon as the stage is free and
    its needs are there; messages to another stage take ``hop``."""
    starts: list[list] = [[] for _ in schedule.rows]
    ends: list[list] = [[] for _ in schedule.rows]
    done = list[float]()
    for stage, ops, needs in cells:
        now = ends[stage][-1] if ends[stage] else 0
        for cell, source in needs:
            now = max(now, done[cell] + (hop if source != stage else 0))
        for op in ops:
            starts[stage].append(now)
            now += cost(stage, op)
            ends[stage].append(now)
        done.append(now)
    return starts, ends


# -------------------------------------------------------------------------------------------------- refusals


def refuse_order(schedule: Schedule, cells: list[Cell], stuck: dict) -> None:
    """Raise ValueError, naming stage, tick and cycle, unless each operation stands once in its row and has
    run."""
    due, kinds = [set[Op]() for _ in schedule.rows], OP_KINDS[: 2 + schedule.split_backward]
    for u in range(schedule.num_microbatches):
        for stage, chunk in schedule.route(u):
            due[stage].update([Op(kind, u, chunk) for kind in kinds])
    rows = [[op._replace(joined=False) if op.joined else op for op in row] for row in schedule.rows]
    if not stuck and list(map(set, rows)) == due and list(map(len, rows)) == list(map(len, due)):
        return
    starts, ends = times(schedule, cells)
    stops = [f"{(row or [0])[-1]:g}" for row in ends]  # the tick at which a row ends
    waits = {
        s: f"stage {s} waits at tick {stops[s]} to run {op}, which needs {need} on stage {source}"
        for s, (op, source, need) in stuck.items()
    }
    early = lambda op: (op.microbatch, OP_KINDS.index(op.kind))
    missing = [sorted(ops - set(row), key=early) for ops, row in zip(due, rows, strict=True)]
    complaints = chain(
        _misnumbered(schedule, rows, due, missing),
        _wrong_in_rows(rows, starts, stops, due, missing, stuck, waits),
        _deadlocks(stuck, waits),
    )
    if complaint := next(complaints, ""):
        raise ValueError(f"schedule '{schedule.name}' is illegal{complaint}")


def _misnumbered(
    schedule: Schedule, rows: list[list[Op]], due: list[set[Op]], missing: list[list[Op]]
) -> Iterator[str]:
    """Name a microbatch of which most operations are missing: its number is one too many, rather than that so
    many are missing."""
    cells = len(schedule.routes[0]) * (2 + schedule.split_backward)
    right = [set(row) & ops for row, ops in zip(rows, due, strict=True)]
    for u, n in sorted(Counter(op.microbatch for ops in right for op in ops).items()):
        if 2 * n < cells:
            stages = [s for s, ops in enumerate(right) if any(op.microbatch == u for op in ops)]
            others = ((op, s) for s in stages for op in missing[s] if op.microbatch != u)
            what = next((f"{op} is missing on stage {s}" for op, s in others), "is one more there")
            yield (
                f": microbatch {u} runs on stage {' and '.join(map(str, stages))} alone, and {what};"
                " number the microbatches of all stages alike, from 0"
            )


def _wrong_in_rows(
    rows: list[list[Op]],
    starts: list[list],
    stops: list[str],
    due: list[set[Op]],
    missing: list[list[Op]],
    stuck: dict[int, tuple[Op, int, Op]],
    waits: dict[int, str],
) -> Iterator[str]:
    """Name an operation that stands twice in a stage's row, or not in the right one, or in none."""
    for stage, row in enumerate(rows):
        seen: dict[Op, str] = {}
        for k, op in enumerate(row):
            at = f"tick {starts[stage][k]:g}" if k < len(starts[stage]) else f"place {k} of its row"
            if op in seen:
                gaps = [f"write {gap} for one" for gap in missing[stage] if gap[:3:2] == op[:3:2]]
                change = gaps[0] if gaps else "delete one"
                yield f": stage {stage} runs {op} twice, at {seen[op]} and {at}; {change}"
            if op not in due[stage]:
                yield f": stage {stage} runs {op} at {at}, but does not hold its layers; delete it"
            seen[op] = at
        for op in missing[stage]:
            victims = (waits[s] for s, (_, *need) in stuck.items() if need == [stage, op])
            why = "; ".join([f"its row stops at tick {stops[stage]}", *victims])
            yield f": stage {stage} never runs {op}; {why}. Add {op} there"


def _deadlocks(stuck: dict[int, tuple], waits: dict[int, str]) -> Iterator[str]:
    """Tell the cycle of stages that wait for one another, if any is stuck."""
    if not stuck:
        return
    cycle = [min(stuck)]
    while (source := stuck[cycle[-1]][1]) not in cycle:
        cycle.append(source)
    story, steps = [], []
    for s in cycle[cycle.index(source) :]:
        op, source, need = stuck[s]
        # that stage is stuck on the same, or on something before it in its row
        ahead = stuck[source][0]
        story.append(
            waits[s] if ahead[:3] == need[:3] else f"{waits[s]}, where it comes after {ahead}"
        )
        steps += [f"{op} on stage {s}", f"{need} on stage {source}"]
    arrows = " -> ".join([*dict.fromkeys(steps), steps[0]])
    yield f", a deadlock: {'; '.join(story)}. Cycle: {arrows}; reorder one of these stages"


# ------------------------------------------------------------------------------------------ slots of buffers


@dataclass(frozen=True)
class Slots:
    """Where an executor of the lockstep table keeps things: numbers in [tick][stage], -1 for nothing.

    At tick t stage s takes `x = messages[read]` (where `read` is -1, a first F takes its microbatch from the
    batch and a last B the gradient of the loss) and runs `ticks[t][s]`: F keeps what its backward needs in
    `saved`, B reads it and, where the backward is split, leaves in `residual` what W reads beside `saved`.
    The result y goes one stage on (`send` +1), one back (-1), or to neither (0). At the end of the tick what
    came from stage s-1 is written to message slot `left`, what came from s+1 to `right`, one's own y to
    `keep`; stages count modulo p. A slot is free in the tick after its last reader; `num_*` count them."""

    saved: list[list[int]]
    residual: list[list[int]]
    read: list[list[int]]
    send: list[list[int]]
    left: list[list[int]]
    right: list[list[int]]
    keep: list[list[int]]
    num_saved: list[int]
    num_residual: list[int]
    num_messages: list[int]


def _colour(spans: list[tuple[int, int]]) -> list[int]:
    """Give each half-open span of ticks a slot of its own: as many as are alive together."""
    numbers, ends = [0] * len(spans), list[int]()  # of each slot, where its last span ends
    for k in sorted(range(len(spans)), key=spans.__getitem__):
        begin, end = spans[k]
        numbers[k] = next((i for i, free in enumerate(ends) if free <= begin), len(ends))
        ends[numbers[k] : numbers[k] + 1] = [end]
    return numbers


@functools.lru_cache(maxsize=64)
def slots(table: Lockstep) -> Slots:
    """Allocate the buffers of an executor from what is alive in the lockstep table."""
    p, split = table.schedule.num_stages, table.schedule.split_backward
    names = ("saved", "residual", "read", "left", "right", "keep", "send")
    grid = {name: [[-(name != "send")] * p for _ in table.ticks] for name in names}
    inboxes, counts = [list[tuple]() for _ in range(p)], list[list[int]]()
    for message in table.messages:
        inboxes[message[3]].append(message)
    for s, row in enumerate(table.schedule.rows):
        at = {op[:3]: t for op, t in zip(row, table.tick[s], strict=True)}
        runs = [
            [at[kind, *op[1:3]] for kind in OP_KINDS[: 2 + split]] for op in row if op.kind == "F"
        ]
        saved = _colour([(ticks[0], ticks[-1] + 1) for ticks in runs])
        residual = _colour([(ticks[1], ticks[2] + 1) for ticks in runs]) if split else []
        letters = _colour([(sent + 1, used + 1) for sent, _, used, _ in inboxes[s]])
        for name, places, first in (("saved", saved, 0), ("residual", residual, 1)):
            # no residual where the backward is whole
            for ticks, slot in zip(runs, places, strict=False):
                for tick in ticks[first:]:
                    grid[name][tick][s] = slot
        for (sent, source, used, _), slot in zip(inboxes[s], letters, strict=True):
            direction = s - source
            if abs(direction) > 1:  # from the last stage to the first is one on
                direction = 1 if s < source else -1
            grid["send"][sent][source] = direction
            grid["read"][used][s] = grid[("keep", "left", "right")[direction]][sent][s] = slot
        counts.append([1 + max(numbers, default=-1) for numbers in (saved, residual, letters)])
    num_saved, num_residual, num_messages = map(list, zip(*counts, strict=True))
    return Slots(**grid, num_saved=num_saved, num_residual=num_residual, num_messages=num_messages)
