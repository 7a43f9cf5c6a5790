"""Small explorers: pipelines (with an editor for one's own order), rings, experts, and memory at every ZeRO
stage."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from llmpar import moe, sequence_order
from llmpar.config import ExpertConfig, preset
from llmpar.draw.charts import live_blocks, memory_bars, timeline, token_flow
from llmpar.draw.scene import Group, Scene, compose, flatten, to_svg
from llmpar.explore.answers import MODELS, START, choices, make_plan
from llmpar.explore.explorer import Explorer
from llmpar.notation import MeshShape
from llmpar.predict import memory
from llmpar.predict.hardware import CHIPS, GIB, chip
from llmpar.predict.ring import pairs_by_step
from llmpar.schedules import SCHEDULES, Schedule, from_text, make
from llmpar.timetable import Timetable, reached, timetable


class TimelineExplorer(Explorer):
    """A pipeline's timetable with live activations and bubbles. Text in ``order`` replaces the schedule:
    one's own, judged."""

    title = "Timeline explorer"  # controls say without which other one they count
    start = {
        "schedule": "1f1b",
        "stages": 4,
        "microbatches": 8,
        "chunks": 2,
        "forward": 1,
        "backward": 1,
        "weights": 1,
        "order": "",
    }
    controls = [
        {
            "name": "schedule",
            "kind": "choice",
            "label": "schedule",
            "options": list(SCHEDULES),
            "without": "order",
        },
        {"name": "stages", "kind": "slider", "label": "stages p", "min": 2, "max": 8, "without": "order"},
        {
            "name": "microbatches",
            "kind": "slider",
            "label": "microbatches m",
            "min": 1,
            "max": 16,
            "without": "order",
        },
        {
            "name": "chunks",
            "kind": "slider",
            "label": "chunks v (interleaved, breadth-first)",
            "min": 1,
            "max": 4,
            "without": "order",
        },
        {"name": "forward", "kind": "slider", "label": "cost of F", "min": 1, "max": 4},
        {"name": "backward", "kind": "slider", "label": "cost of B", "min": 1, "max": 4},
        {"name": "weights", "kind": "slider", "label": "cost of W", "min": 0, "max": 4},
        {
            "name": "order",
            "kind": "lines",
            "label": "your own order, a line per stage (or click a cell and type)",
        },
    ]

    def order(self, state: dict) -> Schedule:
        """The written order where there is one; upper or lower case, parted by spaces or commas."""
        chunks = state["chunks"] if state["schedule"] in ("interleaved", "breadth-first") else None
        own = state["order"].upper().replace(",", " ")
        return (
            from_text(own)
            if own.strip()
            else make(state["schedule"], state["stages"], state["microbatches"], chunks)
        )

    def table(self, state: dict) -> Timetable:
        """The timetable of a state. ValueError names stage, tick and cycle."""
        return timetable(self.order(state), (state["forward"], state["backward"], state["weights"]))

    def draw_stuck(self, state: dict) -> Scene:
        """A refused order as far as it runs, and what each stage then waits for."""
        rows, waits = reached(self.order(state), (state["forward"], state["backward"], state["weights"]))
        if not waits:
            raise ValueError("it runs to its end; what is wrong is which operations it has")
        return timeline(rows, waiting=waits)

    def draw(self, state: dict) -> Scene:
        table = self.table(state)
        drawn, peak = timeline(table), max(table.peak_live())
        facts = (
            f"Bubble over ideal {table.bubble_over_ideal:.3g}, as a share of the whole"
            f" {table.bubble_fraction:.3g}; "
        )
        facts += f"a stage holds at most {peak:g} microbatches; makespan {table.makespan:g} free running, "
        facts += (
            f"{table.makespan_lockstep:g} in lockstep (time units). As the zero-bubble papers count, from a"
            " stage's "
        )
        facts += (
            f"own first start to its own last end, the bubble is {table.bubble:g}: idle corners outside do"
            " not count."
        )
        return compose(
            drawn.title, [[Group(tuple(flatten(drawn.items)[1:]))]], f"{drawn.text}\n{facts}", [facts]
        )

    def answer(self, state: dict) -> dict:
        found = super().answer(state)
        if found["refusal"]:
            found["refusal"] = (
                found["refusal"].replace("; ", ";\n").replace(". Cycle", ".\nCycle")
            )  # a wait per line
            try:
                found["svg"] = to_svg(self.draw_stuck(state))
            except ValueError:
                pass  # that is no order at all
        try:
            return found | {"fill": {"order": str(self.table(state | {"order": ""}).schedule)}}
        except ValueError:
            return found


class RingExplorer(Explorer):
    """Ring attention under a causal mask: how much of each block is live, per rank and step, and who
    waits."""

    title = "Ring explorer"
    start = {"ranks": 4, "sequence_order": "zigzag", "window": 0, "tokens": 256}
    controls = [
        {"name": "ranks", "kind": "choice", "label": "ranks of sp", "options": [2, 4, 8]},
        {
            "name": "sequence_order",
            "kind": "choice",
            "label": "positions are dealt",
            "options": choices("sequence_order"),
        },
        {
            "name": "window",
            "kind": "choice",
            "label": "window (tokens, 0: none)",
            "options": [0, 64, 256, 512],
        },
        {"name": "tokens", "kind": "choice", "label": "tokens per rank", "options": [64, 256]},
    ]

    def draw(self, state: dict) -> Scene:
        n, local = state["ranks"], state["tokens"]
        mask = sequence_order.Mask(window=state["window"] or None)
        parts = pairs_by_step(n, state["sequence_order"], mask, s=n * local) / local**2
        return live_blocks([[round(float(x), 2) for x in row] for row in parts])


class RoutingExplorer(Explorer):
    """Where tokens go as an expert grows hot: the router's choices, the load of each expert, and who is over
    its capacity."""

    title = "Routing explorer"
    start = {"experts": 8, "chosen": 2, "ranks": 4, "heat": 0, "capacity_percent": 125}
    controls = [
        {"name": "experts", "kind": "choice", "label": "experts", "options": [4, 8, 16]},
        {"name": "chosen", "kind": "slider", "label": "experts a token visits", "min": 1, "max": 4},
        {"name": "ranks", "kind": "choice", "label": "ranks of ep", "options": [1, 2, 4]},
        {
            "name": "heat",
            "kind": "slider",
            "label": "how hot expert 0 is (added to its logits)",
            "min": 0,
            "max": 6,
        },
        {
            "name": "capacity_percent",
            "kind": "choice",
            "label": "capacity (% of the even share)",
            "options": [100, 125, 150, 200],
        },
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


class MemoryExplorer(Explorer):
    """What fills a device at each ZeRO stage, against the chip's memory: weights, optimizer, gradients,
    activations."""

    title = "Memory explorer"
    start = {
        "model": "llama3-8b",
        "chip": "h100",
        "devices": 8,
        "tp": 1,
        "batch_size": 8,
        "seq_len": 4096,
        "remat": "block",
    }
    controls = [
        {"name": "model", "kind": "choice", "label": "model", "options": MODELS},
        {"name": "chip", "kind": "choice", "label": "chip", "options": [c.name for c in CHIPS]},
        {"name": "devices", "kind": "choice", "label": "devices", "options": [2**i for i in range(10)]},
        {"name": "tp", "kind": "choice", "label": "of these, tp", "options": [1, 2, 4, 8]},
        {
            "name": "batch_size",
            "kind": "choice",
            "label": "batch (sequences)",
            "options": [2**i for i in range(12)],
        },
        {
            "name": "seq_len",
            "kind": "choice",
            "label": "sequence (tokens)",
            "options": [2**i for i in range(9, 18)],
        },
        {"name": "remat", "kind": "choice", "label": "recompute", "options": choices("remat")},
    ]

    def draw(self, state: dict) -> Scene:
        config, capacity = preset(state["model"]), chip(state["chip"]).usable_bytes
        if state["devices"] % state["tp"]:
            raise ValueError(
                f"{state['devices']} devices are not a multiple of tp = {state['tp']}; make tp 1 or add"
                " devices"
            )
        mesh, rows = MeshShape(fsdp=state["devices"] // state["tp"], tp=state["tp"]), []
        for zero in range(4):
            plan = make_plan(START | {"zero": zero, "remat": state["remat"]}, mesh)
            plan.check(config, state["batch_size"], state["seq_len"])
            size = plan.resolve(config, None), state["batch_size"], state["seq_len"]
            held = memory.argument_bytes(*size)
            parts = {"weights": held["params"], "optimizer": held["optimizer"]}
            rows.append(
                (f"ZeRO {zero}", parts | {"gradients, activations (estimate)": memory.temp_bytes(*size)})
            )
        title = (
            f"{state['model']} on {mesh}, batch {state['batch_size']} x {state['seq_len']} tokens: memory per"
            " device"
        )
        return memory_bars(rows, capacity, title, int(chip(state["chip"]).usable_hbm_gib * GIB))
