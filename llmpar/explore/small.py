"""Small explorers: pipelines (with an editor for one's own order) and experts."""

from __future__ import annotations

import contextlib

import jax.numpy as jnp
import numpy as np

from llmpar import moe
from llmpar.config import ExpertConfig
from llmpar.draw.charts import timeline, token_flow
from llmpar.draw.scene import Group, Scene, compose, flatten, to_svg
from llmpar.explore.answers import choice, slider
from llmpar.explore.explorer import Explorer
from llmpar.schedules import SCHEDULES, Schedule, from_text, make
from llmpar.timetable import Timetable, reached, timetable


class TimelineExplorer(Explorer):
    """A pipeline's timetable with live activations and bubbles. ``order`` is a schedule of one's own."""

    title = "Timeline explorer"  # controls say without which other one they count
    start = {"schedule": "1f1b", "stages": 4, "microbatches": 8, "chunks": 2}
    start |= {"forward": 1, "backward": 1, "weights": 1, "order": ""}
    controls = [
        choice("schedule", "schedule", list(SCHEDULES), without="order"),
        slider("stages", "stages p", 2, 8, without="order"),
        slider("microbatches", "microbatches m", 1, 16, without="order"),
        slider("chunks", "chunks v (interleaved, breadth-first)", 1, 4, without="order"),
        slider("forward", "cost of F", 1, 4),
        slider("backward", "cost of B", 1, 4),
        slider("weights", "cost of W", 0, 4),
        {
            "name": "order",
            "kind": "lines",
            "label": "your own order, a line per stage (or click a cell and type)",
        },
    ]

    def order(self, state: dict) -> Schedule:
        """The written order where there is one; upper or lower case, parted by spaces or commas."""
        if own := state["order"].upper().replace(",", " ").strip():
            return from_text(own)
        chunks = state["chunks"] if state["schedule"] in ("interleaved", "breadth-first") else None
        return make(state["schedule"], state["stages"], state["microbatches"], chunks)

    def table(self, state: dict) -> Timetable:
        """The timetable of a state. ValueError names stage, tick and cycle."""
        return timetable(self.order(state), (state["forward"], state["backward"], state["weights"]))

    def draw_stuck(self, state: dict) -> Scene:
        """A refused order as far as it runs, and what each stage then waits for."""
        order = self.order(state)
        rows, waits = reached(order, (state["forward"], state["backward"], state["weights"]))
        if not waits:
            raise ValueError("it runs to its end; what is wrong is which operations it has")
        left = {stage: (order.rows[stage][len(rows[stage]) :], *rest) for stage, (_, *rest) in waits.items()}
        return timeline(rows, waiting=left)

    def draw(self, state: dict) -> Scene:
        table = self.table(state)
        drawn, peak = timeline(table), max(table.peak_live())
        facts = (
            f"Bubble over ideal {table.bubble_over_ideal:.3g}, as a share of the whole"
            f" {table.bubble_fraction:.3g}; a stage holds at most {peak:g} microbatches; makespan"
            f" {table.makespan:g} free running, {table.makespan_lockstep:g} in lockstep (time units). As the"
            " zero-bubble papers count, from a stage's own first start to its own last end, the bubble is"
            f" {table.bubble:g}: idle corners outside do not count."
        )
        blocks = [[Group(tuple(flatten(drawn.items)[1:]))]]
        return compose(drawn.title, blocks, f"{drawn.text}\n{facts}", [facts])

    def answer(self, state: dict) -> dict:
        found = super().answer(state)
        if found["refusal"]:
            waits = found["refusal"].replace("; ", ";\n").replace(". Cycle", ".\nCycle")  # one per line
            found["refusal"] = waits
            with contextlib.suppress(ValueError):  # that is no order at all
                found["svg"] = to_svg(self.draw_stuck(state))
        try:
            return found | {"fill": {"order": str(self.table(state | {"order": ""}).schedule)}}
        except ValueError:
            return found


class RoutingExplorer(Explorer):
    """Where tokens go as an expert grows hot: each expert's load, and who is over its capacity."""

    title = "Routing explorer"
    start = {"experts": 8, "chosen": 2, "ranks": 4, "heat": 0, "capacity_percent": 125}
    controls = [
        choice("experts", "experts", [4, 8, 16]),
        slider("chosen", "experts a token visits", 1, 4),
        choice("ranks", "ranks of ep", [1, 2, 4]),
        slider("heat", "how hot expert 0 is (added to its logits)", 0, 6),
        choice("capacity_percent", "capacity (% of the even share)", [100, 125, 150, 200]),
    ]
    tokens = 64  # of each rank

    def draw(self, state: dict) -> Scene:
        experts, ranks = ExpertConfig(state["experts"], state["chosen"]), state["ranks"]
        logits = np.random.default_rng(0).standard_normal(
            (ranks, self.tokens, experts.num_experts), np.float32
        )
        logits[..., 0] += state["heat"]
        _, chosen = moe.choose(experts, moe.affinities(experts, jnp.asarray(logits)))
        rows = [np.bincount(np.ravel(mine), minlength=experts.num_experts).tolist() for mine in chosen]
        room = state["capacity_percent"] / 100 * ranks * self.tokens * experts.top_k / experts.num_experts
        return token_flow(rows, experts.num_experts // ranks, room)
