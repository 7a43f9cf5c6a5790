"""Small live figures: a pipeline's order as a game, gradients behind a backward pass, memory by ZeRO stage,
a sum and work in a ring, a hot expert, weights on their way to another mesh.

Each is a picture and a sentence, with a control or a few, for a lesson to place where the idea is met.
"""

import contextlib
import math
import random
from dataclasses import replace
from html import escape
from typing import Any

from llmpar.draw.charts import memory_bars, overlap
from llmpar.draw.dispatch import expert_loads
from llmpar.draw.geometry import rounds
from llmpar.draw.hosts import traffic
from llmpar.draw.pipelines import timeline
from llmpar.draw.scene import OTHERS, Line, Rect, Scene, compose, small_text, time_text
from llmpar.draw.strips import hop_words, ring_sums
from llmpar.explore import look
from llmpar.explore.answers import Limits, offer, refused, unanswered
from llmpar.explore.explorer import Explorer
from llmpar.explore.words import button, html_table, table_row
from llmpar.files import Allowed
from llmpar.plan.mesh_shape import parse_mesh
from llmpar.plan.model_config import ExpertConfig
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.plan.schedules import SCHEDULES, Schedule, from_text, make
from llmpar.plan.sequence_order import sequence_permutation
from llmpar.plan.timetable import Timetable, reached, timetable
from llmpar.plan.two_meshes import two_meshes
from llmpar.planner import planner
from llmpar.planner.terms import terms
from llmpar.predict import formulas, hardware, memory
from llmpar.predict.workload import POLICIES


class Figure(Explorer):
    """What small figures share. One with a single control brings all its answers along, another those to its
    first control where that is what it ``brings``; ``only`` names a control to be left alone with, without
    what stands below the picture but words."""

    brings = ""

    def __init__(self, only: str = "", **state):
        if only:
            self.controls = [control for control in self.controls if control["name"] == only]
            self.areas = [self.areas[0], *self.areas[-1:]][: len(self.areas)]
            self.given = only
        super().__init__(**state)

    def stored(self) -> list[dict]:
        only = self.controls[0]
        if len(self.controls) > 1 and only["name"] != self.brings:
            return []
        values = only.get("options") or range(only["min"], only["max"] + 1, only.get("step", 1))
        others = [value for value in values if value != self.state[only["name"]]]
        return [self.state | {only["name"]: value} for value in others]


def captioned(scene: Scene, *words: str) -> Scene:
    """Return a drawing with a sentence below it; of several, those after the first are in its text only."""
    text = "\n".join([scene.text, *words]).partition("\n")[2]
    body = scene.items[0].items[1:]  # all but the title, which is composed anew
    return compose(scene.title, [body], text, words[:1])


def slider(name: str, label: str, low: int, high: int, **more) -> dict:
    """Return a control that offers the whole numbers of a range, or each ``step``-th."""
    return {"name": name, "kind": "slider", "label": label, "min": low, "max": high} | more


def within(most: int, *names: str) -> Limits:
    """Return limits for whole numbers, from 1 to the ``most`` that a picture is drawn of."""
    return dict.fromkeys(names, Allowed(int, 1, most))


class TimelineExplorer(Figure):
    """A pipeline's timetable as a game: operations are dragged, the order is judged, goals wait.

    ``order`` is an order of one's own, a line per stage; ``move`` a stage, a place in its row, and the place
    to which that operation goes. ``only``: a control to be left alone with, without the game.
    """

    title, kind = "Timeline explorer", "timeline"
    areas = [
        *Explorer.areas,
        ["goals", "Goals", "below"],
        ["score", "Beside known orders", "below"],
        ["words", "Other bubbles", "below"],
    ]
    start = {
        "schedule": "1f1b",
        "stages": 4,
        "microbatches": 8,
        "chunks": 2,
        "forward": 1,
        "backward": 1,
        "weights": 1,
        "order": "",
        "move": None,
    }
    _unwritten = {"without": "order"}  # a written order says these itself
    limits = {
        **within(64, "stages", "chunks", "forward", "backward"),
        **within(256, "microbatches"),
        "weights": Allowed(int, 0, 64),
    }
    controls = [
        {"name": "schedule", "kind": "choice", "label": "schedule", "options": list(SCHEDULES)}
        | _unwritten,
        slider("stages", "stages p", 2, 8) | _unwritten,
        slider("microbatches", "microbatches u", 1, 16) | _unwritten,
        slider("chunks", "chunks g (interleaved, breadth-first)", 1, 4) | _unwritten,
        slider("forward", "cost of F", 1, 4),
        slider("backward", "cost of B", 1, 4),
        slider("weights", "cost of W", 0, 4),
        {
            "name": "order",
            "kind": "lines",
            "label": "your order, a line per stage (or drag an operation)",
        },
    ]
    # to compare with
    known = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe")

    def order(self, state: dict) -> Schedule:
        """Return the written order where there is one, in upper or lower case, separated by spaces or commas,
        with the move."""
        chunks = state["chunks"] if state["schedule"] in ("interleaved", "breadth-first") else None
        if own := state["order"].upper().replace(",", " ").strip():
            order = from_text(own)
        else:
            order = make(state["schedule"], state["stages"], state["microbatches"], chunks)
        match state["move"]:
            case None:
                return order
            case [int(), int(), int()] as places:
                return _moved(order, *places)
        raise ValueError(
            f"move is {state['move']!r:.60}; use a stage, a place in its row, and the new place"
        )

    def table(self, state: dict, order: Schedule | None = None) -> Timetable:
        """Return the timetable of a state, or of an order at its costs. Raise ValueError with stage, tick and
        cycle."""
        costs = state["forward"], state["backward"], state["weights"]
        try:
            return timetable(order or self.order(state), costs)
        except ValueError as error:  # a wait per line
            raise ValueError(
                str(error).replace("; ", ";\n").replace(". Cycle", ".\nCycle")
            ) from error

    def draw(self, state: dict) -> Scene:
        try:
            table = self.table(state)
        except ValueError as error:
            if stuck := _stuck(self.order(state)):
                return captioned(stuck, str(error))
            raise
        sentence, more = _words(table)
        sentence += " The goals are judged for your own order." * bool(state["order"])
        return captioned(timeline(table), sentence, more)

    def move(self, state: dict) -> dict:
        """Return the answer to a state with a ``move``; where that cannot be, the answer to the state without
        it."""
        still = state | {"move": None}
        try:
            order = str(self.order(state))
        except ValueError as error:
            return self.answer(still) | {"asked": state} | refused(error, [])
        reply = self.answer(still | {"order": order}) | {"asked": state}
        if reply["refusal"]:
            reply["refusal"]["steps"] = [offer("take the move back", "apply", order=state["order"])]
        return reply

    def answer(self, state: dict) -> dict:
        if wrong := self.malformed(state):
            return unanswered(state) | wrong
        if state["move"]:
            return self.move(state)
        reply, known, own = super().answer(state), dict[str, Timetable](), None
        try:
            order = self.order(state)
            size = {"stages": order.num_stages, "microbatches": order.num_microbatches}
            reply["state"] = state | size  # those of a written order, whatever was chosen before
            own = self.table(state, order)
            more = f"<details><summary>Idle corners, and lockstep</summary><p>{_words(own)[1]}</p></details>"
            undo = button(f"back to {state['schedule']}", order="") if state["order"] else ""
            reply["panels"]["words"] = {"html": undo + more}
            reply["numbers"] = {
                "makespan": own.makespan,
                "bubble": own.bubble,
                "held": own.peak_live(),
            }
            reply["numbers"] |= (
                {"order": str(order)} if order.placement in ("linear", "looped") else {}
            )
        except ValueError as error:
            back = offer(f"back to {state['schedule']}", "apply", order="")
            reply |= refused(error, [back] * bool(state["order"]))
            if not reply["panels"]:
                return reply
        if len(self.areas) == 2:  # alone with a control
            return reply
        for name in self.known:
            # it wants other numbers of stages or microbatches
            with contextlib.suppress(ValueError):
                known[name] = self.table(
                    state, make(name, order.num_stages, order.num_microbatches)
                )
        goals = _goals(own, known)
        reply["numbers"]["goals"] = [done for done, _ in goals]
        reply["panels"] |= {
            "goals": {"html": _ladder(goals)},
            "score": {"html": _score(known, state, own)},
        }
        return reply


def _words(table: Timetable) -> tuple[str, str]:
    """Return what a timetable shows: the sentence below it, and what stands in its text only."""
    return (
        f"Total time {table.makespan:g} units. Bubble {table.bubble:g} units: the longest idle time of a"
        " stage between its first operation and its last. A stage holds at most"
        f" {max(table.peak_live()):g} microbatches.",
        f"All idle time up to the end is {table.bubble_over_ideal:.3g} of the ideal time, and"
        f" {table.bubble_fraction:.3g} of the whole. Compiled programs go in lockstep, one operation of each"
        f" stage in a tick, which takes as long as its slowest: {table.makespan_lockstep:g} time units.",
    )


def _moved(order: Schedule, stage: int, old: int, new: int) -> Schedule:
    """Return an order whose stage runs operation ``old`` of its row at place ``new``. Operations that were
    joined are separate."""
    if order.placement not in ("linear", "looped"):
        raise ValueError(
            f"a written order cannot say where {order.name} places its chunks, so nothing can be"
            " moved in it; start from 1f1b, interleaved, zb-h1 or zb-h2"
        )
    count = len(order.rows[stage]) if 0 <= stage < order.num_stages else 0
    if not (0 <= old < count and 0 <= new < count):
        raise ValueError(
            f"stage {stage} has {count} operations, and not both {old} and {new}; count from 0"
        )
    row = [op._replace(joined=False) for op in order.rows[stage]]
    row.insert(new, row.pop(old))
    return replace(
        order, name="written", rows=(*order.rows[:stage], tuple(row), *order.rows[stage + 1 :])
    )


def _stuck(order: Schedule) -> Scene | None:
    """Draw an order as far as it runs, with what each stage waits for, and outline the circle in which they
    wait. None where no stage waits, and the operations themselves are wrong."""
    rows, waits = reached(order)
    if not waits:
        return None
    path = [min(waits)]
    while (other := waits[path[-1]][1]) in waits and other not in path:
        path.append(other)
    circle = path[path.index(other) :] if other in path else []
    places = [[op[:3] for op in row] for row in order.rows]
    cells = [cell for s in circle for cell in ((s, waits[s][0]), waits[s][1:])]
    # then that is why, and no circle
    missing = any(op[:3] not in places[stage] for stage, op in cells)
    marked = [] if missing else [f"{stage}:{places[stage].index(op[:3])}" for stage, op in cells]
    left = {s: (order.rows[s][len(rows[s]) :], *rest) for s, (_, *rest) in waits.items()}
    return timeline(rows, waiting=left, marked=marked)


GOALS = (
    "it runs to its end: no deadlock",
    "as short as GPipe, and holds less",
    "no stage holds more than 1F1B's first",
    "W apart from B: a bubble below 1F1B's",
    "no bubble at all",
)
"""What a player wants, one after another."""


def _goals(own: Timetable | None, known: dict[str, Timetable]) -> list[tuple[bool, str]]:
    """Return which of `GOALS` are reached, and how far each is."""
    if own is None:
        return [(False, "")] * len(GOALS)
    gpipe, plain, peaks, equal = known["gpipe"], known["1f1b"], own.peak_live(), 1e-9
    short = own.makespan < gpipe.makespan + equal and sum(peaks) < sum(gpipe.peak_live())
    most, split = max(plain.peak_live()), own.schedule.split_backward
    return [
        (True, ""),
        (short, f"{own.makespan:g} time units, GPipe {gpipe.makespan:g}"),
        (max(peaks) <= most, f"{max(peaks):g} microbatches, 1F1B {most:g}"),
        (split and own.bubble < plain.bubble - equal, f"{own.bubble:g}, 1F1B {plain.bubble:g}"),
        (own.bubble < equal, f"{own.bubble:g} is left"),
    ]


def _ladder(goals: list[tuple[bool, str]]) -> str:
    """Return the goals as a list: ticked where they are reached, and the next one bold."""
    following = next((k for k, (done, _) in enumerate(goals) if not done), -1)
    rows = ""
    for k, (goal, (done, detail)) in enumerate(zip(GOALS, goals, strict=True)):
        words = f"{'✓' if done else '○'} {goal}" + f" ({detail})" * bool(detail)
        rows += f"<li>{f'<b>{words}</b>' if k == following else words}</li>"
    return f"<ol>{rows}</ol>"


def _score(known: dict[str, Timetable], state: dict, own: Timetable | None) -> str:
    """Return the known orders of as many stages and microbatches as a table, each a click away, and one's
    own."""
    rows = ""
    head = ("order", "makespan", "bubble", "microbatches held, by stage")
    shown = known | ({"yours": own} if own and state["order"] else {})
    most = max(max(table.peak_live()) for table in shown.values())
    now = "yours" if state["order"] else state["schedule"]
    look = "display:inline-block;height:9px;background:var(--activations);outline:1px solid var(--edge)"
    for name, table in shown.items():
        bars = [
            f"<span style='{look};width:{40 * n / most:.0f}px'></span> {n:g}"
            for n in table.peak_live()
        ]
        label = button(name, schedule=name, order="") if name in known else name
        label = f"<b>{label}</b>" if name == now else label
        rows += table_row(label, (f"{table.makespan:g}", f"{table.bubble:g}", " ".join(bars)))
    return html_table(head, rows)


class OverlapExplorer(Figure):
    """How much of the sums of gradients hides behind the backward pass, as each replica gets more tokens."""

    title, kind = "Overlap explorer", "overlap"
    start = {"model": "llama3-8b", "chip": "h100", "devices": 8, "pieces": 8, "tokens": 1024}
    limits = within(1 << 20, "devices", "tokens") | within(128, "pieces")
    controls = [slider("tokens", "tokens per device", 512, 4096, step=256)]

    def seconds(self, state: dict, tokens: int) -> tuple[float, float]:
        """Return how long a piece's backward computes (4 FLOPs per parameter and token), and its bfloat16 sum
        travels."""
        config, chip = preset(state["model"]), hardware.chip(state["chip"])
        blocks = [w.shape for path, w in config.weights().items() if path.startswith("blocks.")]
        params = sum(map(math.prod, blocks)) / state["pieces"]
        sends = formulas.collective_seconds(chip, "all-reduce", 2 * params, state["devices"])
        return 4 * params * tokens / chip.flops_per_s, sends

    def draw(self, state: dict) -> Scene:
        tokens, pieces, model = state["tokens"], state["pieces"], state["model"]
        computes, sends = self.seconds(state, tokens)
        # one scale, whatever is chosen
        longest = pieces * sum(self.seconds(state, self.controls[0]["max"]))
        each = preset(model).num_layers // pieces
        names = [f"{each * i}+" for i in reversed(range(pieces))]
        picture = overlap([computes] * pieces, [sends] * pieces, names, longest)
        title = f"{model} on {state['devices']} {state['chip']}: the backward pass, {each} layers a piece"
        why = "sending falls behind" if computes < sends else "only the last piece's are waited for"
        says = f"With {tokens:,} tokens a piece computes for {time_text(computes)}, its gradients travel for"
        more = f"From {math.ceil(tokens * sends / computes):,} tokens on a piece computes at least as long."
        return captioned(replace(picture, title=title), f"{says} {time_text(sends)}: {why}.", more)


class MemoryExplorer(Figure):
    """What a device holds at each ZeRO stage, as the number of microbatches grows."""

    one = "With one microbatch ZeRO-1 and ZeRO-2 hold the same: both make whole gradients, then cut them."
    several = (
        "Beside one microbatch's whole gradients, ZeRO-1 keeps the whole sum over microbatches,"
        " ZeRO-2 a device's part of that sum; ZeRO-3 has parts only."
    )
    title, kind, brings = "ZeRO explorer", "memory", "microbatches"
    sentence = (
        "In {microbatches} microbatches, train {model} on {batch_size} sequences of {seq_len} tokens,"
        " as {mesh} of {chip}, recomputing {remat}, in {dtype}"
    )
    start = {
        "model": "llama3-8b",
        "mesh": "fsdp=8",
        "batch_size": 64,
        "seq_len": 4096,
        "chip": "h100",
        "microbatches": 4,
        "remat": "block",
        "dtype": "bfloat16",
    }
    limits = {
        **within(1 << 20, "batch_size", "seq_len", "microbatches"),
        **dict.fromkeys(("model", "chip"), Allowed(str)),  # `preset` names those that are near
    }
    controls = [
        {
            "name": "microbatches",
            "kind": "choice",
            "label": "microbatches",
            "options": [1, 2, 4, 8],
        },
        {"name": "model", "kind": "choice", "label": "model", "options": look.MODELS},
        {"name": "batch_size", "kind": "int", "label": "sequences of a step", "min": 1},
        {"name": "seq_len", "kind": "int", "label": "tokens of a sequence", "min": 1},
        {"name": "mesh", "kind": "text", "label": "mesh"},
        {"name": "remat", "kind": "choice", "label": "what is computed again"}
        | {"options": [*POLICIES]},
        {"name": "dtype", "kind": "choice", "label": "dtype of matmuls"}
        | {"options": ["bfloat16", "float32"]},
        {"name": "chip", "kind": "choice", "label": "chip"}
        | {"options": [chip.name for chip in hardware.CHIPS]},
    ]

    areas = [
        ["picture", "By ZeRO stage", "middle"],
        ["formulas", "Where each part comes from", "below"],
    ]

    def question(self, state: dict) -> planner.Question:
        """Return the planner's question about as many devices as the mesh has."""
        return planner.Question(
            preset(state["model"]),
            hardware.chip(state["chip"]),
            parse_mesh(state["mesh"]).size,
            state["batch_size"],
            state["seq_len"],
            model=state["model"],
        )

    def stages(self, state: dict) -> dict[str, planner.Candidate]:
        """Return a plan of each ZeRO stage with its bytes by part."""
        q = self.question(state)
        fields = {name: state[name] for name in ("mesh", "microbatches", "remat", "dtype")}
        plans = {f"ZeRO-{zero}": Plan(**fields | {"zero": zero}) for zero in range(4)}
        priced = lambda plan: planner.Candidate(
            plan,
            planner.UNPRICED,
            memory.parts_bytes(plan.resolve(q.config, "gpu"), q.batch_size, q.seq_len),
        )
        return {name: priced(plan) for name, plan in plans.items()}

    def bytes_by_part(self, state: dict) -> dict[str, dict[str, float]]:
        """Return bytes of a device by part, at each stage."""
        return {name: one.parts for name, one in self.stages(state).items()}

    def draw(self, state: dict) -> Scene:
        q, says = self.question(state), self.several if state["microbatches"] > 1 else self.one
        title = "{model}, {mesh}, {batch_size} × {seq_len} tokens, microbatches: {microbatches}, {dtype}"
        bars = memory_bars(
            self.bytes_by_part(state).items(),
            q.capacity_bytes,
            title.format(**state),
            q.chip.usable_hbm_gib * hardware.GIB,
            wide=420,
        )
        return captioned(bars, f"{says} On {q.chip.name} {q.capacity_sum}.")

    def completed(self, state: dict, reply: dict) -> dict:
        stages, rows = self.stages(state), ""
        each = [terms(self.question(state), one) for one in stages.values()]
        for part, *same in zip(stages["ZeRO-0"].parts, *each, strict=False):  # they come first
            filled = (one.filled if one.value else "0 B" for one in same)
            rows += table_row(part, [escape(same[0].formula), *filled])
        table = html_table(("part", "formula", *stages), rows)
        return reply | {"panels": reply["panels"] | {"formulas": {"html": table}}}


class SumExplorer(Figure):
    """A sum round a ring, hop by hop: what travels, what each then holds. Its still picture has all hops."""

    title, kind = "Ring stepper", "sum"
    start = {"collective": "all-reduce", "ranks": 4}
    limits = within(5, "ranks")  # each has a letter
    known = ["all-reduce", "reduce-scatter", "all-gather"]
    controls = [{"name": "collective", "kind": "choice", "label": "collective", "options": known}]

    def draw(self, state: dict) -> Scene:
        return ring_sums(state["collective"], state["ranks"], moving=True)

    def completed(self, state: dict, reply: dict) -> dict:
        kind, n = state["collective"], state["ranks"]
        texts = (hop_words(kind, hop, n) for hop in range(len(rounds(kind, n))))
        shown = [{"seconds": 1.0, "text": f"{text.capitalize()}."} for text in texts]
        return reply | {"frames": shown, "says": ring_sums(kind, n).text}

    @property
    def scene(self) -> Scene:
        return ring_sums(self.state["collective"], self.state["ranks"])


class RingExplorer(Figure):
    """Which ranks compute and wait in a causal ring, by the order in which positions are dealt to ranks."""

    title, kind = "Ring explorer", "ring"
    start = {"order": "contiguous", "ranks": 4}
    why = {
        "contiguous": "Rank 0 has the first positions: it may see nothing of what comes by, and waits.",
        "zigzag": "Each rank has an early and a late part: half a square at every step, in whole rectangles.",
        "striped": "Each rank has every n-th position: a triangle at every step, whose edge cuts many tiles.",
    }
    controls = [
        {"name": "order", "kind": "choice", "label": "order of positions", "options": list(why)}
    ]
    limits = within(16, "ranks")
    own = 16  # positions of a rank

    def draw(self, state: dict) -> Scene:
        n, name, own, side, items, lines = (
            state["ranks"],
            state["order"],
            self.own,
            56,
            list[Any](),
            [],
        )
        dealt = [int(place) for place in sequence_permutation(name, own * n, n)]
        ranks = [dealt[own * r : own * (r + 1)] for r in range(n)]
        # A query's own key counts half, so that a triangle is half of a square.
        sees = lambda query, keys: sum((key < query) + (key == query) / 2 for key in keys) / own
        live = [
            [[sees(query, ranks[r - t]) for query in ranks[r]] for t in range(n)] for r in range(n)
        ]
        work = [[sum(queries) / own for queries in row] for row in live]
        busiest = [max(row[t] for row in work) for t in range(n)]
        for r, row in enumerate(live):
            y, wide, tint = 64 * r, 170 / (own * n), OTHERS[r] if n <= len(OTHERS) else "sp"
            items += [
                small_text(50, y + 28, f"rank {r}", "end"),
                Rect(60, y + 18, 170, 20, "paper", "edge", 0.75),
                # no seams
                *(Rect(60 + wide * place, y + 18, wide + 0.5, 20, tint) for place in ranks[r]),
            ]
            for t, queries in enumerate(row):
                x, most, high = 250 + 64 * t, work[r][t] == busiest[t], side / own
                items += [small_text(x + side / 2, -12, f"step {t}")] * (r == 0)
                items.append(
                    Rect(x, y, side, side, "paper", "ink" if most else "edge", 3 if most else 0.75)
                )
                stairs = [
                    (x + side * s, y + high * (i + k))
                    for i, s in enumerate(queries)
                    for k in (0, 1)
                ]
                items += [Line(((x, y), *stairs, (x, y + side)), "ink", 0.5, fill=tint)] * any(
                    queries
                )
            words = f"computes {sum(work[r]):.3g}, waits {sum(busiest) - sum(work[r]):.3g}"
            items.append(small_text(258 + 64 * n, y + 28, words, "start", "ink"))
            lines.append(f"rank {r}: {' '.join(f'{x:.2g}' for x in work[r])}; {words}")
        items.append(small_text(60, -12, f"its positions, of {own * n}", "start"))
        says = (
            f"{self.why[name]} The ring takes as long as {sum(busiest):.3g} full squares, with even"
            f" work {sum(map(sum, work)) / n:.3g}."
        )
        drawn = compose(f"{name}: which keys of a piece the queries see", [items], "\n".join(lines))
        return captioned(drawn, says)


class RoutingExplorer(Figure):
    """Where tokens go as an expert grows hot, and what a capacity would drop."""

    title, kind = "Routing explorer", "routing"
    start = {"experts": 8, "chosen": 2, "ranks": 4, "heat": 1, "capacity_percent": 125}
    controls = [
        slider("heat", "how hot expert 0 is (added to its logits)", 0, 6),
        {
            "name": "capacity_percent",
            "kind": "choice",
            "label": "slots, in per cent of the even share",
        }
        | {"options": [50, 75, 100, 125, 150, 200, 400]},
    ]
    limits = {
        **within(64, "experts", "chosen", "ranks"),
        **within(10_000, "capacity_percent"),
        "heat": Allowed(int, 0, 64),
    }
    tokens = 64  # of each rank

    def logits(self, state: dict) -> list[list[list[float]]]:
        """Return the router's logits, [rank, token, expert]: normal, and the same for every heat."""
        normal = random.Random(0)
        heats = [state["heat"]] + [0] * (state["experts"] - 1)
        token = lambda: [normal.gauss() + heat for heat in heats]
        return [[token() for _ in range(self.tokens)] for _ in range(state["ranks"])]

    def draw(self, state: dict) -> Scene:
        factor, numbers, ranks = (
            state["capacity_percent"] / 100,
            range(state["experts"]),
            state["ranks"],
        )
        if len(numbers) % ranks:
            raise ValueError(
                f"{len(numbers)} experts do not lie evenly on {ranks} ranks; use a divisor"
            )
        router = ExpertConfig(state["experts"], state["chosen"], capacity_factor=factor)
        # Affinities rise with logits, by softmax and by sigmoid; of equal ones the first is chosen.
        best = lambda logits: sorted(numbers, key=lambda e: -logits[e])[: router.top_k]
        chosen = [
            [expert for token in rank for expert in best(token)] for rank in self.logits(state)
        ]
        rows = [[experts.count(e) for e in numbers] for experts in chosen]
        limit = router.capacity(self.tokens)
        dropped = [sum(max(0, row[e] - limit) for row in rows) for e in numbers]
        total, slots = sum(map(sum, rows)), limit * ranks * len(numbers)
        says = (
            f"{limit} slots for each expert on every rank, {factor:g} times the even share: {sum(dropped)}"
            f" of {total} choices are dropped, {dropped[0]} of them by expert 0, and"
            f" {slots - total + sum(dropped)} of {slots} slots travel empty."
        )
        more = f"Each rank counts by itself: an expert takes {limit} of its {self.tokens} tokens, first come."
        return captioned(expert_loads(rows, limit), says, more)


class TransferExplorer(Figure):
    """What travels from a trainer's mesh to a sampler's, by the layouts of a value on both."""

    title, kind = "Transfer explorer", "transfer"
    start = {
        "trainer": "fsdp=2 tp=2",
        "sampler": "tp=4",
        "before": "d/fsdp m/tp",
        "after": "d m/tp",
        "d": 64,
        "m": 128,
    }
    layouts = ["d m", "d/fsdp m/tp", "d/fsdp,tp m", "d m/fsdp,tp"]
    controls = [
        {"name": "before", "kind": "choice", "label": "on the trainer", "options": layouts},
        {"name": "after", "kind": "choice", "label": "on the sampler"}
        | {"options": ["d m", "d m/tp", "d/tp m"]},
    ]
    limits = within(1 << 16, "d", "m")

    def draw(self, state: dict) -> Scene:
        arrow = "{before} @train -> {after} @serve".format(**state)
        meshes = {"train": state["trainer"], "serve": state["sampler"]}
        plan = two_meshes(arrow, meshes, (state["d"], state["m"]))
        says = (
            f"{plan.bound:,} B, rounds: {len(plan.rounds)}. It is what receivers lack, and no more."
        )
        return captioned(traffic(plan), says)
