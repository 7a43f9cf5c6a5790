"""What the mesh explorer knows: a *state* is what a reader can choose, an *answer* is all that a page shows.

Both are plain data, so a notebook's kernel and the Python inside a saved page give the same answers. A state
names a model, a machine and a mesh; a field of `Plan` that it does not set is the planner's choice. Pictures
are made by `panels`. Nothing here needs JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmpar.config import PRESETS, ModelConfig, from_dict, preset
from llmpar.draw.scene import size_text, time_text
from llmpar.explore import panels
from llmpar.files import allowed
from llmpar.notation import AXES, MeshShape, divisors, near_meshes, parse_mesh
from llmpar.plan import Plan, Resolved
from llmpar.predict import hardware, planner
from llmpar.predict.hardware import CHIPS
from llmpar.predict.planner import Candidate, Question

START: dict[str, Any] = {
    "model": "llama3-8b",
    "chip": "h100",
    "devices": 8,
    "batch_size": 16,
    "seq_len": 4096,
    "mesh": "dp=2 fsdp=2 tp=2",
    "fields": {},
    "agreed": 8,
    "own": {},
    "config": "",
    "device": 0,
    "tensor": "weight blocks.ffn.gate",
    "explain": "",
}
"""Where a reader starts. ``fields`` of the plan are set by hand; ``agreed`` is the number of devices that the
mesh was last read for: it tells which of the two was changed. ``own`` has models that are no preset, by
name: their dims, read from ``config``, the text or the path of a config.json, or the name of a downloaded
model. The last three are what is looked at."""
VIEW = ("device", "tensor", "explain")
MOST = 131_072
"""The most devices of a mesh."""
MODELS = [
    name
    for name, config in PRESETS.items()
    if not (config.latent or config.experts and config.experts.dense_layers)
]
"""Presets whose training step exists."""
SENTENCE = "Train {model} on {devices} {chip} with {batch_size} sequences of {seq_len} tokens, as {mesh}"
CONTROLS: list[dict[str, Any]] = [
    {"name": "model", "kind": "choice", "label": "model", "options": MODELS},
    {"name": "devices", "kind": "int", "label": "devices", "min": 1, "max": MOST},
    {"name": "chip", "kind": "choice", "label": "chip", "options": [c.name for c in CHIPS]},
    {"name": "batch_size", "kind": "int", "label": "sequences of a step", "min": 1},
    {"name": "seq_len", "kind": "int", "label": "tokens of a sequence", "min": 1},
    {"name": "mesh", "kind": "text", "label": "mesh; -1 is what is left of the devices"},
]
FIRST = "zero tp_sequence microbatches remat schedule context_parallel loss_chunks".split()
HIDDEN = ("mesh", "reading", "bucket_bytes", "unroll", "attention_block")
"""Fields of a plan that change nothing that is shown."""
SAME_AS_PLAN = {"dtype": "bfloat16"}
"""What `llmpar plan` takes for granted."""


# -------------------------------------------------------------------------------------------- reading a state


def settle(state: dict) -> tuple[dict, MeshShape]:
    """The state in one spelling, and its mesh: -1 is filled in; if the number of devices was changed the mesh
    follows, if the mesh was changed the number does. Raises ValueError where one cannot be read."""
    for control in CONTROLS:
        value = state[control["name"]]
        if control["kind"] == "int":
            most = control.get("max", 1 << 24)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ValueError(f"{control['label']} is {value!r}; use a whole number from 1 to {most:,}")
    if len(state["mesh"]) > 200:
        raise ValueError(f"a mesh text of {len(state['mesh'])} characters; six axes need fewer")
    if state["config"].strip():
        config = own_model(state["config"])
        own = (
            state["own"] | {config.name: dataclasses.asdict(config)}
            if config.name not in PRESETS
            else state["own"]
        )
        state = state | {"config": "", "own": own, "model": config.name}
    devices = state["devices"]
    shape = parse_mesh(state["mesh"], devices if "-1" in state["mesh"] else None)
    if shape.size != devices and devices != state["agreed"]:
        shape = next(iter(near_meshes(shape.asked, devices)))
    if shape.size > MOST:
        raise ValueError(f"mesh '{shape}' has {shape.size:,} devices; at most {MOST:,} are drawn")
    device = min(max(0, state["device"]), shape.size - 1)
    whole = {"mesh": str(shape), "devices": shape.size, "agreed": shape.size, "device": device}
    return state | whole, shape


def own_model(text: str) -> ModelConfig:
    """The model that a reader brings: the text of a Hugging Face config.json, its path, or a downloaded model's
    name."""
    if not text.lstrip().startswith("{"):
        return preset(text.strip())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "yours", "config.json")
        path.parent.mkdir()
        path.write_text(text, encoding="utf-8")
        return preset(str(path))


def asked(state: dict) -> Question:
    """The planner's question: the model, the machine, the batch, and the fields that are set by hand."""
    fixed = SAME_AS_PLAN | {name: value for name, value in state["fields"].items() if name in OFFERED}
    if unknown := sorted(set(state["fields"]) - set(OFFERED)):
        raise ValueError(f"a plan has no field {', '.join(unknown)}; it has {', '.join(OFFERED)}")
    Plan(**fixed)  # refuses values
    own = state["own"].get(state["model"])
    return Question(
        from_dict(own) if own else preset(state["model"]),
        hardware.chip(state["chip"]),
        state["devices"],
        state["batch_size"],
        state["seq_len"],
        fixed,
        state["model"],
    )


def _offered() -> dict[str, dict[str, Any]]:
    """Every field of a plan that can be set by hand, as a control, those that decide most first."""
    kinds, controls = allowed(Plan), {}
    names = [field.name for field in dataclasses.fields(Plan) if field.name not in HIDDEN]
    for name in sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
        what = kinds[name]
        control: dict[str, Any] = {"name": name, "label": name.replace("_", " ")}
        if what.choices or what.kind is bool:
            control |= {"kind": "choice", "options": list(what.choices or (False, True))}
        else:
            control |= {"kind": "int", "min": 1} if what.kind is int else {"kind": "text"}
        controls[name] = control
    return controls


OFFERED = _offered()


@dataclasses.dataclass(frozen=True)
class Look:
    """What a state shows: the planner's question, its plan for this mesh, and how much is known by now."""

    state: dict
    question: Question
    one: Candidate
    plan: Resolved
    around: Around

    @property
    def timed(self) -> bool:
        """Whether seconds mean anything."""
        return not self.question.chip.simulated

    def works(self, mesh: str) -> bool:
        """Whether another mesh of as many devices is legal."""
        return works(self.state | {"mesh": mesh})

    @property
    def shape(self) -> MeshShape:
        """The mesh, with the six axes as they were asked."""
        return self.one.plan.mesh


class Around:
    """What lies around a mesh: the same question on every other one, and single changes. It is worked out in
    portions, and kept for all states that differ in the mesh alone."""

    def __init__(self, question: Question):
        self.points: dict[str, Candidate] = {}
        self.refused: dict[str, str] = {}
        self.question = question
        self.meshes = [] if question.chip.simulated else list(planner.every_mesh(question))
        self.num = len(self.meshes)
        self.work = self._meshes()
        self.done = not self.meshes

    def _meshes(self) -> Iterator[None]:
        for mesh, why in self.meshes:
            name = str(mesh)
            if why:
                self.refused[name] = why
                continue
            try:
                self.points[name] = planned(self.question, name)
            except ValueError as refusal:
                self.refused[name] = str(refusal)
            yield

    def advance(self, seconds: float) -> None:
        """Work for so many seconds of this process, or until all is known."""
        until = time.process_time() + seconds
        while not self.done and time.process_time() < until:
            self.done = next(self.work, "end") == "end"

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits, once all are known."""
        fits = [one for one in self.points.values() if not one.why_not]
        return planner.ranked(fits)[0] if self.done and fits else None


@functools.lru_cache(maxsize=16)
def _around(key: str) -> Around:
    return Around(asked(json.loads(key)))


def around(state: dict) -> Around:
    """The `Around` of a state."""
    same = {name: value for name, value in state.items() if name not in (*VIEW, "mesh", "agreed")}
    return _around(json.dumps(same, sort_keys=True))


@functools.lru_cache(maxsize=4096)
def planned(question: Question, mesh: str) -> Candidate:
    """The planner's plan for a mesh, kept. Of simulated devices, which have no times: the fields as they are."""
    if not question.chip.simulated:
        return planner.on_mesh(question, parse_mesh(mesh))
    plan = Plan(mesh, **question.fixed).effective(question.config)
    plan.check(question.config, question.batch_size, question.seq_len)
    held = planner.held_by(question, plan.resolve(question.config, question.platform))
    return Candidate(plan, planner.UNPRICED, held)


def look(state: dict) -> Look:
    """What a settled state shows. Raises ValueError where it is refused."""
    question = asked(state)
    one = planned(question, state["mesh"])
    return Look(state, question, one, one.plan.resolve(question.config, None), around(state))


# ------------------------------------------------------------------------------------------------- the answer


def answer(state: dict, seconds: float = 0.0) -> dict:
    """All that a page shows of a state. ``seconds``: of work on what lies around it, first."""
    out: dict[str, Any] = {"asked": state, "state": state, "refusal": None, "verdict": None, "more": False}
    out |= {"fields": [], "panels": {}, "numbers": {}, "frames": []}
    try:
        state, _ = settle(state)
        out["state"] = state
        seen = look(state)
    except ValueError as error:
        steps = remedies(state)
        out |= {"refusal": {"why": str(error), "steps": steps}, "fields": fields(state, None)}
        out["says"] = "\n".join([f"refused: {error}", *(step["text"] for step in steps)])
        return out
    seen.around.advance(seconds)
    drawn = panels.panels(seen)
    out["panels"] = {name: panels.shown(panel) for name, panel in drawn.items()}
    out |= {"verdict": verdict(seen), "fields": fields(state, seen.one.plan), "numbers": numbers(seen)}
    out |= {"frames": panels.frames(seen), "more": not seen.around.done}
    out["says"] = panels.says(seen, out["verdict"], drawn)
    return out


def more(state: dict) -> dict | None:
    """The same answer with more of what lies around it; None where nothing is missing."""
    try:
        done = around(settle(state)[0]).done
    except ValueError:
        return None
    return None if done else answer(state, 0.15)


def fields(state: dict, plan: Plan | None) -> list[dict]:
    """The plan's other fields as controls: the planner's choices, and those that were set by hand."""
    own = state["fields"]
    values = {name: own.get(name) if plan is None else getattr(plan, name) for name in OFFERED}
    return [
        control | {"value": values[name], "yours": name in own}
        for name, control in OFFERED.items()
        if plan is None or matters(plan, name) or name in own
    ]


def matters(plan: Plan, name: str) -> bool:
    """Whether a field can change anything on this mesh."""
    axis = {"context_parallel": "sp", "sequence_order": "sp", "schedule": "pp", "virtual_stages": "pp"}
    axis |= {"stage_saves": "pp", "tp_sequence": "tp", "tp_comm_overlap": "tp", "dispatch": "ep"}
    return plan.mesh.sizes[axis[name]] > 1 if name in axis else True


def numbers(seen: Look) -> dict[str, Any]:
    """What is shown, as plain numbers."""
    q, one = seen.question, seen.one
    held = {"memory_bytes": one.memory_bytes, "room_bytes": q.room_bytes}
    found: dict[str, Any] = {"plan": planner.fields_of(one.plan) | {"mesh": str(one.plan.mesh)}} | held
    found["traffic"] = [
        {"axes": names, "kind": kind, "count": row.count, "bytes": row.bytes_sent}
        for (names, kind), row in panels.traffic_of(seen).items()
    ]
    if seen.timed:
        run = q.run(one.plan)
        found |= {"step_s": one.time.step_s, "terms": one.time.terms, "mfu": one.time.mfu(run)}
        found["tokens_per_s"] = run.tokens_per_step / one.time.step_s
    return found


def verdict(seen: Look) -> dict:
    """The answer first: whether it fits, how fast it is, what limits it, and what to do next."""
    q, one, found = seen.question, seen.one, numbers(seen)
    tone, words = planner.verdict(q, one)
    head = f"{words}: {size_text(one.total_bytes)} of {size_text(q.capacity_bytes)} a device."
    if not seen.timed:
        rest, line = "", "Time is not predicted: simulated devices share one processor and have no links."
    else:
        rate = f"{found['tokens_per_s']:,.0f} tokens/s · {found['mfu']:.1%} MFU"
        rest = f"{time_text(found['step_s'])} a step · {rate}"
        most = sorted(found["terms"].items(), key=lambda term: -term[1])[:2]
        names = [f"{name} ({time_text(seconds)})" for name, seconds in most]
        line = f"Most time goes to {', then to '.join(names)}. {q.capacity_words}."
    return {"tone": tone, "head": head, "rest": rest, "line": line, "steps": steps(seen)}


def steps(seen: Look) -> list[dict]:
    """What to do next: the best single change, and the best mesh of all once they are known."""
    if not seen.timed:
        return []
    found = []
    for change in itertools.islice(planner.advice(seen.question, seen.one), 2):
        found.append({"text": change.text, "do": "apply", "set": patch_of(change, seen)})
    best = seen.around.best
    if best and best.plan.mesh != seen.shape:
        many = len(seen.around.points) + len(seen.around.refused)
        words = f"{best.plan.mesh}: {size_text(best.total_bytes)}, {time_text(best.time.step_s)}"
        found.append({"text": f"Best of {many}: {words}", "do": "open", "set": {"mesh": str(best.plan.mesh)}})
    return found


def remedies(state: dict) -> list[dict]:
    """What would work in place of what was refused: the nearest mesh of as many devices, another batch."""
    found = []
    try:
        state, shape = settle(state)
    except ValueError:
        shape = parse_mesh(START["mesh"])
        if works(state | {"mesh": START["mesh"], "devices": shape.size}):
            found.append(
                {"text": f"a mesh that works is {shape}", "do": "use it", "set": {"mesh": str(shape)}}
            )
        return found
    if near := nearest(state, shape):
        found.append(
            {"text": f"the nearest mesh that works is {near}", "do": "use it", "set": {"mesh": near}}
        )
    step = shape.dp * shape.fsdp * shape.ep * max(1, state["fields"].get("microbatches") or 1)
    batch = -(-state["batch_size"] // step) * step
    if batch != state["batch_size"] and works(state | {"batch_size": batch}):
        words = f"this mesh works with {batch} sequences"
        found.append({"text": words, "do": "use it", "set": {"batch_size": batch}})
    return found


def nearest(state: dict, shape: MeshShape) -> str | None:
    """The mesh that works and changes the asked one least: of as many devices or else fewer, over the axes that
    it names or else over all. None where what is wrong is not the mesh."""
    named = {axis: n for axis, n in shape.asked.items() if n > 1}
    every = named | {axis: 1 for axis in AXES if axis not in named}
    counts = {*divisors(shape.size), *(2**i for i in range(shape.size.bit_length()))}
    if not works(state | {"mesh": "dp=1", "devices": 1}):
        return None
    for axes, n in itertools.product((named, every), sorted(counts, reverse=True)):
        for mesh in near_meshes(axes, n)[:200] if axes else ():
            if mesh != shape and works(state | {"mesh": str(mesh), "devices": n}):
                return str(mesh)
    return None


def works(state: dict) -> bool:
    """Whether a plan of these fields is legal."""
    try:
        state, shape = settle(state | {"agreed": state["devices"]})
        question = asked(state)
        Plan(shape, **question.fixed).check(question.config, question.batch_size, question.seq_len)
        return True
    except ValueError:
        return False
