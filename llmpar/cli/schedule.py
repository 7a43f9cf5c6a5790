"""``llmpar schedule``: print a pipeline schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from llmpar import schedules
from llmpar.cli.options import check_picture, emit, say, speaks
from llmpar.schedules import Costs, make
from llmpar.timetable import Timetable, timetable

MAX_CELLS = 40_000
"""Simulating more takes minutes."""


@dataclass(frozen=True)
class Schedule:
    """Print a pipeline schedule: its timetable, bubble by every definition, makespan, live activations per
    stage.

    Attributes:
        name: gpipe, 1f1b, interleaved, zb-h1, …; a wrong name lists all.
        stages: pipeline stages p.
        microbatches: m.
        virtual_stages: model chunks per stage, for schedules that have several.
        costs: times of forward, input-gradient and weight-gradient work: F,B,W.
        hop: latency of a send between stages, in the same unit.
        svg: also draw the timetable into this SVG (or PNG).
        json: print one JSON document on stdout.
    """

    name: Annotated[str, tyro.conf.Positional] = "1f1b"
    stages: int = 4
    microbatches: int = 8
    virtual_stages: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    costs: str = "1,1,1"
    hop: float = 0.0
    svg: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    json: bool = False

    def run(self) -> None:
        """Simulate and print."""
        from llmpar import draw

        try:
            f, b, w = (float(x) for x in self.costs.split(","))
        except ValueError as error:
            raise ValueError(f"--costs '{self.costs}' is not three numbers F,B,W such as 1,1,1") from error
        if self.stages * self.microbatches * (self.virtual_stages or 1) > MAX_CELLS:
            many = f"{self.stages} stages and {self.microbatches} microbatches are too many to simulate"
            raise ValueError(f"{many}; use at most {MAX_CELLS:,} of stages x microbatches x chunks")
        check_picture(self.svg)
        made = make(self.name, self.stages, self.microbatches, self.virtual_stages)
        document = schedule_document(made, (f, b, w), self.hop)
        table = timetable(made, (f, b, w), self.hop)
        if self.svg and speaks():
            draw.timeline(table).save(self.svg)
            say(f"drew the timetable into {self.svg}")
        emit(document, self.json)
        if not self.json and speaks():
            print(text_timeline(table))
            for key in (
                "makespan",
                "makespan_lockstep",
                "bubble_over_ideal",
                "bubble_fraction",
                "bubble_rate",
                "peak_live",
            ):
                value = document[key]
                print(f"{key:<20}{value if key == 'peak_live' else f'{value:.4g}'}")


def schedule_document(schedule: schedules.Schedule, costs: Costs = (1, 1, 1), hop: float = 0.0) -> dict:
    """The document of `llmpar schedule --json`: times in the costs' unit, `peak_live` in microbatches per
    stage."""
    t = timetable(schedule, costs, hop)
    fields = "makespan makespan_lockstep ideal span bubble bubble_over_ideal bubble_fraction bubble_rate"
    return {
        "name": schedule.name,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "chunks": schedule.num_chunks,
        "placement": schedule.placement,
        "split_backward": schedule.split_backward,
        "parameter_copies": schedule.parameter_copies,
        "costs": list(costs),
        "hop": hop,
        **{field: float(getattr(t, field)) for field in fields.split()},
        "peak_live": t.peak_live(),
        "hops": t.hops.tolist(),
        "ticks": len(t.ticks),
        "table": [
            [
                {**op._asdict(), "start": start, "end": end, "tick": tick}
                for op, start, end, tick in zip(row, t.start[s], t.end[s], t.tick[s], strict=True)
            ]
            for s, row in enumerate(schedule.rows)
        ],
    }


def text_timeline(table: Timetable) -> str:
    """Draws the lockstep table in plain text, a row per stage and a column per tick."""
    cells = [["."] * len(table.ticks) for _ in table.schedule.rows]
    for stage, row in enumerate(table.schedule.rows):
        for op, tick in zip(row, table.tick[stage], strict=True):
            cells[stage][tick] = str(op)
    width = max(len(cell) for row in cells for cell in row)
    lines = (" ".join([f"stage {i}", *(cell.ljust(width) for cell in row)]) for i, row in enumerate(cells))
    return "\n".join(line.rstrip() for line in lines)
