"""What a pipeline order costs in time, and how often its stages take the branches of their program.

Costs (F, B, W) are those of one microbatch through everything that one stage holds for it, so that each of v
chunks costs 1/v of them; the unit is the caller's. Three bubbles are in use, and this file has all of them:
`bubble_over_ideal` and `bubble_fraction` compare the whole pipeline's makespan with the work of one stage;
`bubble_rate`, and `bubble` as a time, compare the longest *own* span of a stage with it, as the zero-bubble
papers do. Nothing that runs needs it: `llmpar.plan.lockstep` has the order that the executor follows.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, chain, compress, cycle
from typing import Any

from llmpar.plan.lockstep import DIRECTIONS, Lockstep, lockstep, run_cells, slots, times
from llmpar.plan.places import Kinds, chunk_loops
from llmpar.plan.schedules import OP_KINDS, Op, Schedule

Costs = tuple[float, float, float]


@dataclass(frozen=True)
class Timetable(Lockstep):
    """A legal schedule with its times: `start`, `end` and lockstep `tick` of each operation of its rows.

    Free-running, a stage starts as soon as its needs are there, and messages to another stage take `hop`. In
    lockstep (a `lax.scan` over ticks) each stage does one operation per tick, cells or not; what one sends is
    there in the next tick; a tick takes as long as its slowest operation, plus `hop` if anything was sent."""

    costs: Costs
    hop: float
    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]

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


@functools.lru_cache(maxsize=64)
def timetable(schedule: Schedule, costs: Costs = (1, 1, 1), hop: float = 0.0) -> Timetable:
    """Simulate a schedule, free-running and in lockstep, or refuse it with stage, tick and cycle."""
    if len(costs) != 3 or not (
        min(*costs, hop) >= 0 and 0 < sum(costs) + hop < math.inf and any(costs)
    ):
        raise ValueError(
            f"costs {costs} and hop {hop}: give finite durations F, B, W (not all 0) and hop, none negative"
        )
    order = lockstep(schedule)
    both = times(schedule, order.cells, _each(schedule, costs), hop)
    start, end = (tuple(map(tuple, rows)) for rows in both)
    return Timetable(schedule, order.tick, order.cells, costs, hop, start, end)


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
    _, ends = times(schedule, lockstep(schedule).cells, cost, hop)
    return max(end[-1] for end in ends)


def reached(schedule: Schedule) -> tuple[list[list[tuple]], dict[int, tuple[Op, int, Op]]]:
    """How far an order runs that may be illegal: per stage rows of (start, end, kind, microbatch, chunk), and
    of each stage that is stuck its next operation, and the stage and operation that it waits for."""
    cells, stuck = run_cells(schedule, joined=True)
    both = times(schedule, cells, _each(schedule, (1, 1, 1)))
    done = []
    for row, start, end in zip(schedule.rows, *both, strict=True):
        done.append([(a, b, *op[:3]) for op, a, b in zip(row, start, end, strict=False)])
    return done, stuck


def branch_shares(schedule: Schedule | None, layers: Kinds) -> list[dict[str, Fraction] | None]:
    """How often each stage takes the named branches of the program of a model with layers of these
    kinds, of the times that it comes to them; [None] without a pipeline."""
    if schedule is None:
        return [None]
    table, shares, loops = lockstep(schedule), list[Any](), chunk_loops(layers, schedule.cells)
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
