"""``llmpar schedule``: print a pipeline schedule."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from llmpar import draw
from llmpar.cli.options import (
    File,
    Number,
    Output,
    changed,
    check_picture,
    give,
    read_order,
    save_picture,
)
from llmpar.plan.schedules import Schedule, from_text, make
from llmpar.plan.timetable import Timetable, timetable

_MAX_CELLS = 40_000
"""Simulating more takes minutes."""


@dataclass(frozen=True)
class ScheduleCommand(Output):
    """Print a pipeline schedule: its timetable, bubble by every definition, makespan, live activations per
    stage.

    Attributes:
        name: gpipe, 1f1b, interleaved, interleaved-zb, zb-h1, …; a wrong name lists all. Or an order of your
            own, one line per stage such as 'F0 F1 B0 B1': with line breaks, or as the path of a file; also
            the CSV of torch's pipelines.
        stages: pipeline stages p; of an own order those that it has.
        microbatches: m; of an own order those that it has.
        virtual_stages: model chunks per stage, for schedules that have several.
        costs: times of forward, input-gradient and weight-gradient work: F,B,W.
        hop: latency of a send between stages, in the same unit.
        svg: also draw the timetable into this SVG (or PNG).
    """

    name: Annotated[str, tyro.conf.Positional] = "1f1b"
    stages: int = 4
    microbatches: int = 8
    virtual_stages: Number = None
    costs: str = "1,1,1"
    hop: float = 0.0
    svg: File = None

    def run(self) -> None:
        try:
            f, b, w = (float(x) for x in self.costs.split(","))
        except ValueError as error:
            raise ValueError(
                f"--costs '{self.costs}' is not three numbers F,B,W such as 1,1,1"
            ) from error
        if self.stages * self.microbatches * (self.virtual_stages or 1) > _MAX_CELLS:
            raise ValueError(
                f"{self.stages} stages and {self.microbatches} microbatches are too many to simulate;"
                f" use at most {_MAX_CELLS:,} of stages x microbatches x chunks"
            )
        check_picture(self.svg)
        table = timetable(self.made(), (f, b, w), self.hop)
        save_picture(self.svg, "the timetable", lambda: draw.timeline(table))
        document = schedule_document(table)
        numbers = "makespan makespan_lockstep bubble_over_ideal bubble_fraction bubble_rate".split()
        lines = [f"{name:<20}{document[name]:.4g}" for name in numbers]
        give(
            document,
            self.json,
            [text_timeline(table), *lines, f"{'peak_live':<20}{document['peak_live']}"],
        )

    def made(self) -> Schedule:
        """Return the schedule of that name, or the written order; refuse sizes that the order does not
        have."""
        order = read_order(self.name)
        if "\n" not in order.strip():
            return make(order, self.stages, self.microbatches, self.virtual_stages)
        order_of_file = from_text(order)
        has = {
            "stages": order_of_file.num_stages,
            "microbatches": order_of_file.num_microbatches,
            "virtual_stages": order_of_file.num_chunks,
        }
        for name, number in has.items():
            if getattr(self, name) != number and (flag := "".join(changed(self, [name]))):
                was = getattr(self, name)
                raise ValueError(f"the order has {number} {name}, not {was}; leave {flag} out")
        return order_of_file


def schedule_document(t: Timetable) -> dict:
    """Return what `llmpar schedule --json` prints: times in the costs' unit, `peak_live` in microbatches per
    stage."""
    cell = lambda op, start, end, tick: {**op._asdict(), "start": start, "end": end, "tick": tick}
    rows = zip(t.schedule.rows, t.start, t.end, t.tick, strict=True)
    fields = (
        "makespan makespan_lockstep ideal span bubble bubble_over_ideal bubble_fraction bubble_rate"
    )
    return {
        "name": t.schedule.name,
        "stages": t.schedule.num_stages,
        "microbatches": t.schedule.num_microbatches,
        "chunks": t.schedule.num_chunks,
        "placement": t.schedule.placement,
        "split_backward": t.schedule.split_backward,
        "parameter_copies": t.schedule.parameter_copies,
        "costs": list(t.costs),
        "hop": t.hop,
        **{field: float(getattr(t, field)) for field in fields.split()},
        "peak_live": t.peak_live(),
        "hops": t.hops,
        "ticks": len(t.ticks),
        "table": [[cell(*entry) for entry in zip(*row, strict=True)] for row in rows],
    }


def text_timeline(table: Timetable) -> str:
    """Draw the lockstep table in plain text, a row per stage and a column per tick."""
    rows = zip(table.tick, table.schedule.rows, strict=True)
    at = [dict(zip(ticks, row, strict=True)) for ticks, row in rows]
    cells = [[str(own.get(t, ".")) for t in range(len(table.ticks))] for own in at]
    width = max(len(cell) for row in cells for cell in row)
    lines = (
        " ".join([f"stage {i}", *(cell.ljust(width) for cell in row)])
        for i, row in enumerate(cells)
    )
    return "\n".join(line.rstrip() for line in lines)
