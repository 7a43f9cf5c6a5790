"""The states of the mesh explorer: model, machine and mesh, the planner's plan, and the meshes around it.

A *state* has everything that a reader can choose, as plain data. The planner chooses a field of `Plan` that
it does not set. Nothing here needs JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmpar.files import Allowed, allowed
from llmpar.plan.mesh_shape import MeshShape, mesh_distance, near_meshes, parse_mesh
from llmpar.plan.model_config import ModelConfig, from_dict
from llmpar.plan.plan import Plan, Resolved
from llmpar.plan.presets import PRESETS, preset
from llmpar.plan.schedules import SCHEDULES
from llmpar.planner import frameworks, planner
from llmpar.planner.advice import Change, advice
from llmpar.planner.planner import Candidate, Question
from llmpar.predict import hardware, memory, parameters
from llmpar.predict.layer import Segment, layer_segments

_MACHINE = {"node_link": 0.0, "node_size": 0, "network": 0.0, "network_times": 0, "hbm": 0.0}
_SEEN = {
    "device": 0,
    "tensor": "weight blocks.ffn.gate",
    "explain": "",
    "pinned": "",
    "launch": "",
    "launched": 0,
    "serve": "",
}
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
    "own_chips": {},
    "config": "",
    **_MACHINE,
    **_SEEN,
}
"""Where a reader starts. ``fields`` of the plan are set by hand; ``agreed`` is the number of devices that the
mesh was last read for: it tells which of the two was changed. ``own`` has models that are no preset, by
name: their dims, read from ``config``, the text or the path of a config.json, or the name of a downloaded
model; ``own_chips`` has chips that a file describes. Of the machine (`hardware.in_machine`) 0 is what the
chip has, and ``network_times`` doubles what leaves a node so often. The last seven are what is looked at;
``pinned`` is a mesh to compare with, ``launch`` a launch line or configuration of a framework, and
``launched`` the checksum of the one that the state was last set by; ``serve`` has the tokens of a
prompt and of an answer, and the bits of a weight, of requests that the model is served with."""
LIMITS = {
    "node_size": Allowed(int, 0, 1 << 20),
    "network_times": Allowed(int, -2, 2),
    **dict.fromkeys(("node_link", "network", "hbm"), Allowed(float, 0, 1e6)),
}
"""What the values of the machine may be."""
MOST_DEVICES = 131_072
"""The most devices of a mesh."""
MODELS = list(PRESETS)
"""All presets, those that are planned alone too."""
SENTENCE = (
    "Train {model} on {devices} {chip} with {batch_size} sequences of {seq_len} tokens, as {mesh}"
    ", beside {pinned}\nA device has {hbm} GiB and sends {node_link} GB/s in a node of {node_size},"
    " {network} beyond it; network {network_times}"
)
CONTROLS: list[dict[str, Any]] = [
    {"name": "model", "kind": "choice", "label": "model", "options": MODELS, "clears": ["config"]},
    {"name": "devices", "kind": "int", "label": "devices", "min": 1, "max": MOST_DEVICES},
    {"name": "chip", "kind": "choice", "label": "chip", "options": [c.name for c in hardware.CHIPS]}
    | {"clears": [*_MACHINE]},
    {"name": "batch_size", "kind": "int", "label": "sequences of a step", "min": 1},
    {"name": "seq_len", "kind": "int", "label": "tokens of a sequence", "min": 1},
    {"name": "mesh", "kind": "text", "label": "mesh; -1 is what is left of the devices"},
    {"name": "pinned", "kind": "text", "label": "a mesh to compare with"},
    {"name": "hbm", "kind": "number", "label": "GiB of a device that programs may use"},
    {"name": "node_link", "kind": "number", "label": "GB/s of one device inside a node, one way"},
    {"name": "node_size", "kind": "number", "label": "devices of a node"},
    {"name": "network", "kind": "number", "label": "GB/s of one device beyond its node, one way"},
    {"name": "network_times", "kind": "slider", "label": "the network, slower or faster"}
    | {"min": -2, "max": 2, "words": ["÷ 4", "÷ 2", "× 1", "× 2", "× 4"]},
    {"name": "config", "kind": "text", "fold": "Another model"}
    | {
        "label": "another model: a config.json, its path, a downloaded name, or llama3-8b lora_rank=16"
    },
    {"name": "launch", "kind": "lines", "rows": 4, "own": True, "fold": "Paste your launch line"}
    | {
        "label": "a launch line, script or configuration of torchtitan, Megatron-LM, NeMo, MaxText,"
        " DeepSpeed, accelerate, Axolotl, vLLM or SGLang: it sets all of the sentence that it names"
    },
    {"name": "serve", "kind": "text", "fold": "Serve it"}
    | {
        "label": "tokens of a prompt and of an answer, as 2048+256, and the bits of a weight if not 16"
    },
]
FIRST = "zero tp_sequence microbatches remat schedule context_parallel loss_chunks".split()
_HIDDEN = ("mesh", "mode", "bucket_bytes", "unroll", "attention_block")
"""Fields of a plan that change nothing that is shown."""


def settle(state: dict) -> tuple[dict, MeshShape]:
    """Return the state in one spelling, and its mesh: -1 is filled in; if the number of devices was changed
    the mesh follows, over its axes and fsdp, to one that works if any does; if the mesh was changed the
    number does. Raise ValueError where one cannot be read."""
    for control in CONTROLS:
        if control["kind"] == "int":
            sizes = Allowed(int, 1, control.get("max", 1 << 24))
            sizes.check(control["label"], state[control["name"]])
    state = _launched(state)
    if len(state["mesh"]) > 200:
        raise ValueError(f"a mesh text of {len(state['mesh'])} characters; six axes need fewer")
    if state["config"].strip():
        config = own_model(state["config"])
        own = {} if config.name in PRESETS else {config.name: dataclasses.asdict(config)}
        state = state | {"config": "", "own": state["own"] | own, "model": config.name}
    devices = state["devices"]
    shape = parse_mesh(state["mesh"], devices if "-1" in state["mesh"] else None)
    if shape.size != devices and devices != state["agreed"]:
        had = {axis: n for axis, n in shape.user_sizes.items() if n > 1 or axis == "fsdp"}
        far = lambda mesh: (
            round(mesh_distance(mesh.user_sizes, shape.user_sizes), 6),
            mesh.tp,
            mesh.sp,
            mesh.dp,
        )
        near = sorted(near_meshes(had, devices), key=far)
        legal = (mesh for mesh in near[:200] if works(state | {"mesh": str(mesh)}))
        shape = next(legal, near[0])
    if shape.size > MOST_DEVICES:
        raise ValueError(
            f"mesh '{shape}' has {shape.size:,} devices; at most {MOST_DEVICES:,} are drawn"
        )
    state = state | {"mesh": str(shape), "devices": shape.size, "agreed": shape.size}
    state["device"] = min(max(0, state["device"]), shape.size - 1)
    state["fields"] = {name: value for name, value in state["fields"].items() if value is not None}
    return state, shape


def _launched(state: dict) -> dict:
    """Return the state that its launch line or configuration sets, and the planner's choice of what this
    does not say. Raise ValueError where it cannot be read or planned."""
    had, read = state["launched"], zlib.crc32(state["launch"].encode())
    state = state | {"launched": read}
    if had == read or not state["launch"].strip():
        return state
    name, known, _ = frameworks.facts_in(state["launch"])
    devices = None if {"each", "ranks", "serves"} & known.keys() else state["devices"]
    sizes, plan = frameworks.sized(known, state["model"], devices, state["seq_len"])
    model = _preset_name(sizes.pop("model"))
    sizes |= {"config": model} if model != state["model"] else {}
    sizes |= {"serve": state["serve"] or "2048+256"} if "serves" in known else {}
    mesh = {"mesh": str(plan.mesh), "agreed": sizes["devices"], "fields": {}}
    state, _ = settle(state | sizes | mesh)
    fields = frameworks.fixed_by(name, question_of(state).resolved(plan, None))
    return state | {"fields": {x: value for x, value in fields.items() if x in OFFERED}}


def _preset_name(model: str) -> str:
    """Return the preset that a preset's name with dims behind it is, or the text as it is."""
    dims = lambda text: dataclasses.replace(preset(text), name="")
    own, names = dims(model), (x for x in (model.split()[0], *PRESETS) if x in PRESETS)
    return next((x for x in names if dims(x) == own), model)


def own_model(text: str) -> ModelConfig:
    """Return the model that a reader brings: a config.json's text or path, or a downloaded model's name."""
    if not text.lstrip().startswith("{"):
        return preset(text.strip())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "yours", "config.json")
        path.parent.mkdir()
        path.write_text(text, encoding="utf-8")
        try:
            return preset(str(path))
        except ValueError as error:
            raise ValueError(str(error).replace(f"'{path}'", "'config.json'")) from None


def question_of(state: dict) -> Question:
    """Return the planner's question: the model, the machine, the batch, and the fields that are set by
    hand."""
    fixed = dict(state["fields"])
    share = fixed.pop("memory_share", planner.GPU_SHARE)
    Allowed(float, 0.001, 1).check("memory_share", share)
    if unknown := sorted(set(state["fields"]) - set(OFFERED)):
        raise ValueError(f"a plan has no field {', '.join(unknown)}; it has {', '.join(OFFERED)}")
    Plan(**fixed)  # refuses values
    numbers = state["devices"], state["batch_size"], state["seq_len"]
    return Question(
        parameters.with_further(model_of(state)),
        own_machine(state)[1],
        *numbers,
        fixed,
        state["model"],
        share,
    )


def model_of(state: dict) -> ModelConfig:
    """Return a state's model."""
    own = state["own"].get(state["model"])
    return from_dict(own) if own else preset(state["model"])


def own_machine(state: dict) -> tuple[hardware.Chip, hardware.Chip]:
    """Return a state's chip as its row or file has it, and as it is in the reader's machine."""
    name, source = state["chip"], f"own_chips, {state['chip']}"
    row = state["own_chips"].get(name)
    Allowed(dict, none=True).check(source, row)
    chip = hardware.from_table({**row}, source, name) if row else hardware.chip(name)
    figures = {name: state[name] for name in hardware.MACHINE}
    if times := state["network_times"]:
        figures["network"] = (figures["network"] or planner.machine(chip)["network"]) * 2.0**times
    return chip, hardware.in_machine(chip, **figures)


def _offered() -> dict[str, dict[str, Any]]:
    """Return every field of a plan that can be set by hand, as a control, those that decide most first."""
    kinds, controls = allowed(Plan), {}
    names = [field.name for field in dataclasses.fields(Plan) if field.name not in _HIDDEN]
    for name in sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
        what = kinds[name]
        control: dict[str, Any] = {"name": name, "label": name.replace("_", " ")}
        if what.kind is int and not what.choices:
            control |= {"kind": "int", "min": 1}
        else:
            options = what.choices or (SCHEDULES if name == "schedule" else (False, True))
            control |= {"kind": "choice", "options": list(options)}
        controls[name] = control
    share: dict[str, Any] = {
        "name": "memory_share",
        "label": "JAX's share of a GPU's memory",
        "kind": "choice",
        "options": [planner.GPU_SHARE, 0.75],
    }
    return controls | {"memory_share": share}


OFFERED = _offered()


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """A state's planner's question, its plan for this mesh, and as much of the rest as is known by now."""

    state: dict
    question: Question
    one: Candidate
    plan: Resolved
    around: Around

    @functools.cached_property
    def segments(self) -> list[Segment]:
        """Return one layer, forward, in time; nothing where times are not predicted."""
        return layer_segments(self.question.run(self.one.plan)) if self.timed else []

    @property
    def timed(self) -> bool:
        """Return whether times are predicted: simulated devices have none."""
        return not self.question.chip.simulated

    @property
    def shape(self) -> MeshShape:
        """Return the mesh, with its six axes as the user wrote them."""
        return self.one.plan.mesh


class Around:
    """The plans around a mesh: single changes, and the same question on every other mesh. They are computed
    in portions, and kept for all states that differ in the mesh alone."""

    def __init__(self, question: Question):
        self.question = question
        self.points: dict[str, Candidate] = {}
        self.refused: dict[str, str] = {}
        self.steps: dict[str, list[Change]] = {}
        self.runs: dict[str, Candidate] = {}  # ours of the published ones
        self.meshes = [] if question.chip.simulated else list(planner.every_mesh(question))
        self.settled = not self.meshes  # no mesh that is not known yet can be the best
        self.map = self._map()
        self.works: dict[str, Iterator[None]] = {}
        self.done = set[str]()

    def _map(self) -> Iterator[None]:
        groups = dict[str, list[planner.VariantGroup]]()
        for mesh, why in self.meshes:
            if why:
                self.refused[str(mesh)] = why
            else:
                groups[str(mesh)] = planner.of_mesh(self.question.on(mesh), mesh)
            yield
        every = [group for of_mesh in groups.values() for group in of_mesh]
        search = planner.Search(self.question, every)
        yield from search.steps()
        self.points = {str(one.mesh): one for one in planner.fastest(search.best.values())}
        self.settled = True
        least = {name: [group.least_s for group in of_mesh] for name, of_mesh in groups.items()}
        for name in sorted(least.keys() - self.points.keys(), key=lambda name: (least[name], name)):
            try:
                self.points[name] = planned(self.question, name)
            except ValueError as refusal:
                self.refused[name] = str(refusal)
            yield

    def _work(self, mesh: str, one: Candidate) -> Iterator[None]:
        """Work out what is missing for a mesh: its single changes, and then the map of all."""
        self.steps[mesh] = []
        if self.meshes:
            price = lambda question, shape: planned(question, str(shape))
            for step in advice(self.question, one.plan.mesh, one, price):
                self.steps[mesh] += [step] if step else []
                yield
        yield from self.map
        for run, q, where in planner.published_runs():
            self.runs[run["name"]] = planned(q, str(where))
            yield

    def advance(self, mesh: str, one: Candidate, seconds: float) -> bool:
        """Work for a mesh for so many seconds of this process; gives whether all is known."""
        work, until = (
            self.works.setdefault(mesh, self._work(mesh, one)),
            time.process_time() + seconds,
        )
        while mesh not in self.done and time.process_time() < until:
            if next(work, "end") == "end":
                self.done.add(mesh)
        return mesh in self.done

    @property
    def complete(self) -> bool:
        """Return whether all meshes are known."""
        return len(self.points) + len(self.refused) == len(self.meshes)

    @property
    def best(self) -> Candidate | None:
        """Return the fastest mesh that fits, of those that are known."""
        return next(iter(planner.ranked(x for x in self.points.values() if not x.why_not)), None)


@functools.lru_cache(maxsize=16)
def _around(key: str) -> Around:
    return Around(question_of(json.loads(key)))


def around(state: dict) -> Around:
    """Return the `Around` of a state."""
    same = {name: value for name, value in state.items() if name not in (*_SEEN, "mesh", "agreed")}
    return _around(json.dumps(same, sort_keys=True))


@functools.lru_cache(maxsize=4096)
def planned(question: Question, mesh: str) -> Candidate:
    """Return the planner's plan for a mesh, cached. Simulated devices have no times: there the fields are as
    given."""
    if not question.chip.simulated:
        return planner.on_mesh(question, parse_mesh(mesh))
    sizes = question.batch_size, question.seq_len
    plan = Plan(mesh, **{"dtype": "bfloat16"} | question.fixed)
    resolved = plan.resolve(question.config, question.platform, *sizes)
    return Candidate(resolved.effective, planner.UNPRICED, memory.parts_bytes(resolved, *sizes))


def view(state: dict) -> View:
    """Return everything that a settled state shows, the same of the same state. Raise ValueError where it is
    refused."""
    return _view(json.dumps(state, sort_keys=True))


@functools.lru_cache(maxsize=4)
def _view(key: str) -> View:
    state = json.loads(key)
    question = question_of(state)
    one = planned(question, state["mesh"])
    return View(state, question, one, question.resolved(one.plan, question.platform), around(state))


def works(state: dict) -> bool:
    """Return whether a plan of these fields is legal."""
    try:
        state, shape = settle(state | {"agreed": state["devices"]})
        question = question_of(state)
        plan = question.resolved(Plan(shape, **question.fixed), None)
        plan.check(question.batch_size, question.seq_len)
        return True
    except ValueError:
        return False
