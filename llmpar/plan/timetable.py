"""One timetable for any pipeline order: it proves the order legal, measures it, and lays out an executor's
buffers.

Costs (F, B, W) are those of one microbatch through everything that one stage holds for it, so that each of v
chunks costs 1/v of them; the unit is the caller's. Three bubbles are in use, and this file has all of them:
`bubble_over_ideal` and `bubble_fraction` compare the whole pipeline's makespan with the work of one stage;
`bubble_rate`, and `bubble` as a time, compare the longest *own* span of a stage with it, as the zero-bubble
papers do. Plain Python: tables are lists.
"""

import functools
import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, chain, compress, cycle
from typing import Any

from llmpar.plan import schedules
from llmpar.plan.places import Kinds, chunk_loops
from llmpar.plan.schedules import OP_KINDS, Costs, Op, Schedule

DIRECTIONS = {"right": 1, "left": -1}  # to the next stage and to the previous one


@dataclass(frozen=True)
class Timetable:
    """A legal schedule with its times: `start`, `end` and lockstep `tick` of each operation of its rows; and
    its `cells`, each a stage and what it does at once, in an order in which they can run.

    Free-running, a stage starts as soon as its needs are there, and messages to another stage take `hop`. In
    lockstep (a `lax.scan` over ticks) each stage does one operation per tick, cells or not; what one sends is
    there in the next tick; a tick takes as long as its slowest operation, plus `hop` if anything was sent."""

    schedule: Schedule
    costs: Costs
    hop: float
    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    tick: tuple[tuple[int, ...], ...]
    cells: tuple[tuple[int, tuple[Op, ...]], ...] = field(compare=False)

    @property
    def ideal(self) -> float:
        """The time without a bubble: every stage works on all m microbatches."""
        return self.schedule.num_microbatches * sum(self.costs)

    @property
    def makespan(self) -> float:
        return max(end[-1] for end in self.end)

    @property
    def span(self) -> float:
        """The zero-bubble paper's cost: the longest time from a stage's first start to its last end."""
        return max(end[-1] - start[0] for start, end in zip(self.start, self.end, strict=True))

    @property
    def bubble(self) -> float:
        """Idle time on the critical stage, as in the papers' tables: span - ideal."""
        return self.span - self.ideal

    @property
    def bubble_rate(self) -> float:
        """(span - ideal) / span, as in Qi 2023, Table 5."""
        return self.bubble / self.span

    @property
    def bubble_over_ideal(self) -> float:
        """(makespan - ideal) / ideal: (p-1)/m for GPipe and 1F1B (Narayanan 2021)."""
        return self.makespan / self.ideal - 1

    @property
    def bubble_fraction(self) -> float:
        """(makespan - ideal) / makespan: (p-1)/(m+p-1) for GPipe and 1F1B."""
        return 1 - self.ideal / self.makespan

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
            (at[source, *need[:3]], source, at[stage, *op[:3]], stage)
            for stage, row in enumerate(order)
            for op in row
            for source, need in self.schedule.needs(stage, op)
            if need.kind == op.kind
        ]

    @property
    def hops(self) -> list[list[int]]:
        """How many messages go from stage to stage: numbers in [from][to]."""
        counts = [[0] * self.schedule.num_stages for _ in self.schedule.rows]
        for _, source, _, target in self.messages:
            counts[source][target] += source != target
        return counts

    @property
    def makespan_lockstep(self) -> float:
        # the last is for idle, -1
        costs = [cost / self.schedule.visits for cost in (*self.costs, 0)]
        if not self.schedule.split_backward:
            costs[1] += costs[2]
        sent = {tick for tick, source, _, target in self.messages if source != target}
        return math.fsum(
            max(costs[cell[0]] for cell in row) for row in self.ticks
        ) + self.hop * len(sent)

    def peak_live(self) -> list[float]:
        """The most microbatches that each stage ever holds (a chunk of v counts 1/v), from F to B, or with a
        split backward to W, as in Qi 2023, Table 2."""
        change = {"F": 1, "B": 0, "W": -1} if self.schedule.split_backward else {"F": 1, "B": -1}
        kept = (accumulate(change[op.kind] for op in row) for row in self.schedule.rows)
        return [max(counts) / self.schedule.visits for counts in kept]


def _run(
    schedule: Schedule, cost: Callable[[int, Op], float], hop: float, cells: bool
) -> tuple[list[list], list[list], dict, list]:
    """Run every stage as far as it gets: starts, ends, what each stuck stage waits for, and the cells in the
    order in which they ran."""
    rows, awake = schedule.rows, list(range(schedule.num_stages))
    starts: list[list] = [[] for _ in rows]
    ends: list[list] = [[] for _ in rows]
    sent, waiting, stuck = (
        dict[tuple, float](),
        defaultdict[tuple, list[int]](list),
        dict[int, tuple](),
    )
    order = list[tuple[int, tuple[Op, ...]]]()
    while awake:
        stage = awake.pop()
        row, start, end = rows[stage], starts[stage], ends[stage]
        while (first := len(start)) < len(row):
            last = first + 1
            while cells and last < len(row) and row[last].joined:
                last += 1
            inside, now = set(), end[-1] if end else 0
            stuck.pop(stage, None)
            for op in row[first:last]:
                for source, need in schedule.needs(stage, op):
                    key = (source, *need[:3])
                    if key in sent:
                        now = max(now, sent[key] + (hop if source != stage else 0))
                    elif key not in inside:
                        stuck.setdefault(stage, (op, source, need))
                inside.add((stage, *op[:3]))
            if stage in stuck:
                _, source, need = stuck[stage]
                waiting[source, *need[:3]].append(stage)
                break
            order.append((stage, row[first:last]))
            for op in row[first:last]:
                start.append(now)
                now += cost(stage, op)
                end.append(now)
            for key in inside:
                sent[key] = now
                awake += waiting.pop(key, [])
    return starts, ends, stuck, order


def _refuse(schedule: Schedule, starts: list[list], ends: list[list], stuck: dict) -> None:
    """Raise ValueError, naming stage, tick and cycle, unless each operation stands once in its row and has
    run."""
    name, due = f"schedule '{schedule.name}' is illegal", [set[Op]() for _ in schedule.rows]
    for u in range(schedule.num_microbatches):
        for stage, chunk in schedule.route(u):
            due[stage] |= {Op(kind, u, chunk) for kind in OP_KINDS[: 2 + schedule.split_backward]}
    stops = [f"{(row or [0])[-1]:g}" for row in ends]  # the tick at which a row ends
    waits, victims = dict[int, str](), defaultdict[tuple[int, Op], list[str]](list)
    for s, (op, source, need) in stuck.items():
        waits[s] = (
            f"stage {s} waits at tick {stops[s]} to run {op}, which needs {need} on stage {source}"
        )
        victims[source, need].append(waits[s])
    rows = [[op._replace(joined=False) for op in row] for row in schedule.rows]
    early = lambda op: (op.microbatch, OP_KINDS.index(op.kind))
    missing = [sorted(ops - set(row), key=early) for ops, row in zip(due, rows, strict=True)]
    complaints = chain(
        _misnumbered(schedule, rows, due, missing),
        _wrong_in_rows(rows, starts, stops, due, missing, victims),
        _deadlocks(stuck, waits),
    )
    if complaint := next(complaints, ""):
        raise ValueError(f"{name}{complaint}")


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
    victims: dict[tuple[int, Op], list[str]],
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
            why = "; ".join([f"its row stops at tick {stops[stage]}", *victims[stage, op]])
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


@functools.lru_cache(maxsize=64)
def timetable(schedule: Schedule, costs: Costs = (1, 1, 1), hop: float = 0.0) -> Timetable:
    """Simulate a schedule, free-running and in lockstep, or refuse it with stage, tick and cycle."""
    if len(costs) != 3 or not (
        min(*costs, hop) >= 0 and 0 < sum(costs) + hop < math.inf and any(costs)
    ):
        raise ValueError(
            f"costs {costs} and hop {hop}: give finite durations F, B, W (not all 0) and hop, none negative"
        )
    ticks, ends, stuck, _ = _run(schedule, lambda *_: 1, 0, False)
    _refuse(schedule, ticks, ends, stuck)
    starts, ends, stuck, cells = _run(schedule, _each(schedule, costs), hop, True)
    if stuck:  # only a cell can be at fault now
        _refuse(schedule, starts, ends, stuck)
    start, end, tick = (tuple(map(tuple, rows)) for rows in (starts, ends, ticks))
    return Timetable(schedule, costs, hop, start, end, tick, tuple(cells))


def _each(schedule: Schedule, costs: Costs) -> Callable[[int, Op], float]:
    """The time of one operation on a chunk; of B with the weights' gradient where no W has it."""
    forward, backward, weights = (cost / schedule.visits for cost in costs)
    each = {
        "F": forward,
        "B": backward if schedule.split_backward else backward + weights,
        "W": weights,
    }
    return lambda _, op: each[op.kind]


def makespan(schedule: Schedule, cost: Callable[[int, Op], float], hop: float = 0.0) -> float:
    """When a legal schedule ends whose operations take ``cost(stage, operation)`` each."""
    ends, free = list[float](), [0.0] * schedule.num_stages
    for stage, ops, needs in _cells(schedule):
        now = free[stage]
        for cell, source in needs:
            now = max(now, ends[cell] + (hop if source != stage else 0))
        for op in ops:
            now += cost(stage, op)
        free[stage] = now
        ends.append(now)
    return max(free)


@functools.lru_cache(maxsize=256)
def _cells(schedule: Schedule) -> list[tuple[int, tuple[Op, ...], list[tuple[int, int]]]]:
    """The `cells` of a legal schedule, each with the numbers and stages of those that it needs."""
    order = timetable(schedule).cells
    number = {(stage, *op[:3]): i for i, (stage, ops) in enumerate(order) for op in ops}
    cells = []
    for i, (stage, ops) in enumerate(order):
        needs = ((number[s, *need[:3]], s) for op in ops for s, need in schedule.needs(stage, op))
        cells.append((stage, ops, [need for need in needs if need[0] != i]))
    return cells


def reached(schedule: Schedule) -> tuple[list[list[tuple]], dict[int, tuple[Op, int, Op]]]:
    """How far an order runs that may be illegal: per stage rows of (start, end, kind, microbatch, chunk), and
    of each stage that is stuck its next operation, and the stage and operation that it waits for."""
    starts, ends, stuck, _ = _run(schedule, _each(schedule, (1, 1, 1)), 0, True)
    done = []
    for row, start, end in zip(schedule.rows, starts, ends, strict=True):
        done.append([(a, b, *op[:3]) for op, a, b in zip(row, start, end, strict=False)])
    return done, stuck


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
    slot, free, busy, count = [0] * len(spans), list[int](), list[tuple[int, int]](), 0
    for k in sorted(range(len(spans)), key=spans.__getitem__):
        while busy and busy[0][0] <= spans[k][0]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot[k] = heapq.heappop(free) if free else (count := count + 1) - 1
        heapq.heappush(busy, (spans[k][1], slot[k]))
    return slot


@functools.lru_cache(maxsize=64)
def slots(table: Timetable) -> Slots:
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


STEADY = 4
"""Microbatches for each stage after which an order of `schedules.STEADY` repeats itself: its buffers are all
in use by then (test_timetable)."""


@functools.lru_cache(maxsize=512)
def most_slots(schedule: Schedule) -> tuple[int, int, int]:
    """Return the most slots of any stage for microbatches, for what W reads and for messages (`Slots`). Of
    orders that repeat themselves, from as few microbatches as show it."""
    p, m, chunks = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    if schedule.name in schedules.STEADY and m > STEADY * p and m % p == 0:
        schedule = schedules.make(schedule.name, p, STEADY * p, chunks)
    table = slots(timetable(schedule))
    return max(table.num_saved), max(table.num_residual), max(table.num_messages)


def branch_shares(schedule: Schedule | None, layers: Kinds) -> list[dict[str, Fraction] | None]:
    """How often each stage takes the named branches of the program of a model with layers of these
    kinds, of the times that it comes to them; [None] without a pipeline."""
    if schedule is None:
        return [None]
    table, shares, loops = timetable(schedule), list[Any](), chunk_loops(layers, schedule.cells)
    sends = {name: [to in row for row in slots(table).send] for name, to in DIRECTIONS.items()}
    first, last = ({route[i] for route in schedule.routes} for i in (0, -1))
    share = lambda taking, cells: Fraction(len(taking & cells), max(1, len(cells)))
    for stage in range(schedule.num_stages):
        kinds = {
            kind: [row[stage][0] == i for row in table.ticks] for i, kind in enumerate(OP_KINDS)
        }
        cells = {cell for route in schedule.routes for cell in route if cell[0] == stage}
        of_cells = {"enters": share(first, cells), "leaves": share(last, cells)}
        for i, loop in enumerate(loops):
            has = set(compress(chain(*schedule.routes), cycle(loop.filled)))
            of_cells |= {f"loop{i}B": share(has, cells), f"loop{i}F": share(has, cells - last)}
        of_ticks = {name: Fraction(sum(runs), len(runs)) for name, runs in (kinds | sends).items()}
        shares.append(of_ticks | of_cells)
    return shares
