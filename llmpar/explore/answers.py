"""What the explorers know: who holds what, who talks with whom, bytes and seconds, as plain data.

Pure Python, without Jupyter. A *state* is a dict of what a reader can choose. `tensors` and `answer` turn it
into JSON, which is all that a front end draws, together with `geometry`, which a browser does itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any, get_args, get_type_hints

from llmpar.config import PRESETS, ModelConfig, preset
from llmpar.draw import geometry, layouts
from llmpar.draw.charts import count_noun, memory_bars
from llmpar.draw.scene import Group, Scene, compose, flatten, size_text, small_text, time_text
from llmpar.notation import (
    AXES,
    Layout,
    MeshShape,
    NotationError,
    divisors,
    mesh_distance,
    near_meshes,
    parse_layout,
    parse_mesh,
)
from llmpar.plan import Plan, Resolved
from llmpar.predict import formulas, hardware, hosts, memory, traffic, workload
from llmpar.predict.hardware import CHIPS, GIB, Chip
from llmpar.predict.planner import fields_of
from llmpar.predict.time import step_time
from llmpar.schedules import SCHEDULES, deal, make

PLAN = {f.name: f.default for f in dataclasses.fields(Plan)}
"""The fields of a plan with their defaults."""


def choices(field: str) -> list:
    """List the values that a field of `Plan` may have."""
    return list(get_args(get_type_hints(Plan)[field]))


START: dict[str, Any] = {
    "mesh": "dp=2 fsdp=2 tp=2",
    "order": " ".join(AXES),
    "model": "llama3-8b",
    "chip": "h100",
    "batch_size": 16,
    "seq_len": 4096,
    **{name: PLAN[name] for name in ("zero", "tp_sequence")},
    "remat": "block",
    **{name: PLAN[name] for name in ("microbatches", "schedule", "context_parallel")},
    "device": 0,
    "tensor": "weight blocks.ffn.gate",
    "axis": "",
    "row": 0,
    "step": 0,
}
"""Where a reader starts. The last five are what is looked at; the others change the answer."""

MOST = 131_072
"""The most devices of a mesh. Up to 512 are drawn one by one."""

MODELS = [
    name
    for name, config in PRESETS.items()
    if not (config.latent or config.experts and config.experts.dense_layers)
]
"""Presets whose training step exists; the others are refused by name."""

VIEW = ("device", "tensor", "axis", "row", "step")
SHAPES = ("model", "batch_size", "seq_len", "microbatches")
"""What the tensors of a step depend on: each row says of which (``of``), so that none is mistaken."""


def choice(name: str, label: str, options: list, **more) -> dict:
    """A control that offers some values."""
    return {"name": name, "kind": "choice", "label": label, "options": options} | more


def slider(name: str, label: str, low: int, high: int, **more) -> dict:
    """A control that offers the whole numbers of a range."""
    return {"name": name, "kind": "slider", "label": label, "min": low, "max": high} | more


CONTROLS: list[dict] = [  # free: what a page without Python can follow by itself
    {"name": "mesh", "kind": "text", "label": "mesh", "free": True},
    {"name": "order", "kind": "text", "label": "order of axes, slow links first (for study)", "free": True},
    choice("model", "model", MODELS),
    choice("chip", "chip", [c.name for c in CHIPS]),
    {"name": "batch_size", "kind": "int", "label": "batch (sequences)", "min": 1},
    {"name": "seq_len", "kind": "int", "label": "sequence (tokens)", "min": 1},
    {"name": "microbatches", "kind": "int", "label": "microbatches", "min": 1},
    choice("zero", "ZeRO stage", choices("zero")),
    choice("schedule", "pipeline schedule", list(SCHEDULES)),
    # usp is two axes in one
    choice("context_parallel", "attention over sp", [w for w in choices("context_parallel") if w != "usp"]),
    choice("remat", "recompute", choices("remat")),
    {"name": "tp_sequence", "kind": "flag", "label": "sequence parallelism (tp_sequence)"},
]
CHUNKS = {name: make(name, 2, 4).visits for name in SCHEDULES}
"""Pieces of the model that a stage holds, by schedule. Each has room for equally many layers."""

# -------------------------------------------------------------------------------------- what is held and sent


def canonical(state: dict) -> dict:
    """The state with its mesh and its order of axes in one spelling, where they can be read."""
    try:
        mesh = str(read_mesh(state["mesh"]))
    except ValueError:
        mesh = state["mesh"]
    return state | {"mesh": mesh, "order": " ".join(state["order"].replace(",", " ").split())}


def key(state: dict) -> str:
    """What an answer belongs to: the state in one spelling, without what is only looked at."""
    return "|".join(str(value) for name, value in canonical(state).items() if name not in VIEW)


def read_mesh(text: str) -> MeshShape:
    """A mesh that can be drawn. A browser refuses the same texts in the same words."""
    if len(text) > 200:
        why = f"a mesh text of {len(text)} characters"
        raise ValueError(f"{why}; six axes need fewer, for instance '{START['mesh']}'")
    try:
        shape = parse_mesh(text)
    except NotationError:
        raise
    except ValueError as error:
        raise ValueError(f"{error}; write its size") from None
    if shape.size > MOST:
        raise ValueError(f"mesh '{shape}' has {shape.size} devices; at most {MOST} are drawn")
    return shape


def read(state: dict) -> tuple[ModelConfig, Chip, MeshShape, tuple[str, ...]]:
    """The model, the chip, the mesh and the order of axes that a state names, or what would work."""
    order = tuple(state["order"].replace(",", " ").split())
    if sorted(order) != sorted(AXES):
        why = f"the order '{state['order']}' must name each axis once"
        raise ValueError(f"{why}; for instance '{' '.join(AXES)}'")
    for control in CONTROLS:
        value, name = state[control["name"]], control["label"]
        if control["kind"] == "int" and (not isinstance(value, int) or value < control["min"]):
            raise ValueError(f"{name} is {value!r}; use a whole number from {control['min']} on")
        if "options" in control and name not in ("model", "chip") and value not in control["options"]:
            raise ValueError(f"{name} is {value!r}; use one of {', '.join(map(str, control['options']))}")
    return preset(state["model"]), hardware.chip(state["chip"]), read_mesh(state["mesh"]), order


def make_plan(state: dict, mesh) -> Plan:
    """Make the state's plan on a mesh, in bfloat16. Controls that change nothing there keep their default."""
    fields = {control["name"] for control in CONTROLS} & PLAN.keys() - {"mesh"}
    plan = Plan(mesh, dtype="bfloat16", **{name: state[name] for name in fields})
    return plan.effective(preset(state["model"]))


def mode(state: dict) -> str:
    """Which of a tensor's layouts a state asks for: the ZeRO stage, ``s`` for sequence parallelism."""
    return f"{state['zero']}{'s' * state['tp_sequence']}"


def tensors(state: dict) -> list[dict]:
    """Every array of a training step: name, kind, shape, bytes per element, layout at each ZeRO stage.

    A layout names all axes that could cut; those of size 1 cut nothing. Weights and the optimizer's moments
    are float32. Activations are one layer's, of one microbatch. Keys of ``layout``: the stage, with an ``s``
    for sequence parallelism.
    """
    config, *_ = read(state | {name: START[name] for name in ("mesh", "order")})  # the same on every mesh
    all_axes = dataclasses.replace(parse_mesh(" ".join(f"{a}=4" for a in AXES)), kv=2)
    both = ({"zero": zero, "tp_sequence": cut} for zero in range(4) for cut in (False, True))
    plans = {mode(s): make_plan(s, all_axes).resolve(None, None) for s in (state | one for one in both)}
    rows, b, s, of = [], state["batch_size"], state["seq_len"], [state[name] for name in SHAPES]

    def row(kind: str, name: str, shape, itemsize: int, place, times: int = 1) -> None:
        layouts = {k: str(place(plan)) for k, plan in plans.items()}
        entry = {"name": f"{kind} {name}", "kind": kind, "shape": list(shape), "itemsize": itemsize}
        entry |= {"times": times, "of": of, "heads": config.num_kv_heads}  # which ranks of tp may copy
        stacked = {"chunks": {s: n for s, n in CHUNKS.items() if n > 1}} if name.startswith("blocks.") else {}
        rows.append(entry | stacked | {"layout": layouts})

    weights = ("weight", "stored", 1), ("moments", "graded", 2), ("gradient", "accumulated", 1)
    for kind, name, times in weights:
        for path, weight in config.weights().items():
            place = lambda plan, dims=weight.dims, name=name: getattr(plan.life(dims), name)
            row(kind, path, weight.shape, 4, place, times)
    micro = max(1, b // state["microbatches"])
    n, k, h = config.num_heads, config.num_kv_heads, config.head_width
    acts = {
        "residual stream": ("stream b s d", (micro, s, config.width), 2),
        "queries": ("attention b s n h", (micro, s, n, h), 2),
        "keys": ("attention b s k h", (micro, s, k, h), 2),
        "values": ("attention b s k h", (micro, s, k, h), 2),
        "feed-forward": ("ffn b s m", (micro, s, config.ffn_width), 2),
        "logits": ("vocab b s v", (micro, s, config.vocab_size), 4),
    }
    if config.experts:
        del acts["feed-forward"]  # how many rows an expert works on is up to the router
    for name, (dims, shape, itemsize) in acts.items():
        row("activation", name, shape, itemsize, lambda plan, dims=dims: plan.place(dims))
    row("batch", "tokens, targets, positions, weights", (b, s), 4, lambda plan: plan.place("data b s"), 4)
    return rows


def shape_of(row: dict, state: dict, sizes: dict[str, int]) -> list[int]:
    """A tensor's shape on a mesh: a pipeline pads the layers to as many for every chunk of every stage."""
    if "chunks" not in row or sizes["pp"] == 1:
        return row["shape"]
    cells = sizes["pp"] * row["chunks"].get(state["schedule"], 1)
    return [cells * max(deal(row["shape"][0], cells)), *row["shape"][1:]]


def answer(state: dict, plan: Plan | None = None) -> dict:
    """Everything that needs more than geometry: refusal, memory, what is sent, seconds, the code, and all of
    it in words. ``plan``: one with more fields than a state has."""
    out: dict[str, Any] = {"key": key(state), "refusal": None, "time": None, "code": ""}
    out |= {"memory": [], "traffic": []}
    try:
        config, chip, shape, order = read(state)
        plan = plan or make_plan(state, shape)
        out |= {"node": chip.per_device().node_size, "capacity": chip.usable_bytes}
        out["whole"] = int(chip.usable_hbm_gib * GIB)
        plan.check(config, state["batch_size"], state["seq_len"])
    except ValueError as error:
        out["refusal"] = remedy(state) | {"why": str(error)}
        out["says"] = f"mesh {state['mesh'][:200]}: refused\n{error}\n{out['refusal']['text']}".strip()
        return out
    decided = plan.resolve(config, None)
    size = decided, state["batch_size"], state["seq_len"]
    held = memory.argument_bytes(*size)
    parts = {"weights": held["params"], "optimizer": held["optimizer"]}
    parts |= {"batch": held["batch"] + held["counters"]}
    parts["gradients, activations (estimate)"] = memory.temp_bytes(*size)
    out["memory"] = [[name, value] for name, value in parts.items()]
    out["traffic"] = sent(chip, order, *size)
    out["time"] = {"simulated": chip.simulated}
    if not chip.simulated:
        run = workload.of_plan(config, plan, chip, state["batch_size"], state["seq_len"])
        time = step_time(dataclasses.replace(run, order=order))
        out["time"] |= {"step_s": time.step_s, "mfu": time.mfu(run), "terms": time.terms}
    out["links"] = assumed(chip)
    words = ", ".join([f'"{shape}"', *(f"{name}={value!r}" for name, value in fields_of(plan).items())])
    out["code"] = f'--mesh "{shape}"\nPlan({words})'
    if order != tuple(AXES):
        out["code"] += f"\n# the order '{' '.join(order)}' is for study:"
        out["code"] += f" a Plan lays its devices out as {' '.join(AXES)}"
    out["says"] = _says(state, out, shape)
    return out


def sent(chip: Chip, order, plan: Resolved, batch_size: int, seq_len: int) -> list[dict]:
    """The rows of `traffic.step_traffic`, the largest first: what of, the largest collective, seconds."""
    sizes, rows = plan.mesh.asked, []
    apart = geometry.strides(*geometry.parted(sizes, order, plan.config.num_kv_heads))
    for (names, kind), row in traffic.step_traffic(plan, batch_size, seq_len).items():
        axes, short = names.split(","), kind.replace("collective-", "")
        parts, each, seconds = Counter[str](), set[int](), 0.0
        stride = min(apart[a] for a in axes)  # one after the other, over links so far apart
        for (what, _, size), times in row.messages.items():
            parts[what] += times * row.sent(size)
            each.add(row.sent(size))
            seconds += times * formulas.collective_seconds(chip, short, size, row.group_size, stride)
        words = [f"{name} {size_text(n)}" if len(parts) > 1 else name for name, n in parts.most_common()]
        found = {"axes": axes, "kind": kind, "count": row.count, "bytes": row.bytes_sent}
        found |= {"what": ", ".join(words), "largest": max(each), "sizes": len(each), "seconds": seconds}
        rows.append(found)
        if plan.pipeline and names == "pp" and kind == "collective-permute":
            there = hosts.pairs_of(plan, "-> the next stage")  # gradients go back on the same pairs
            rows[-1]["pairs"] = [list(pair) for pair in there]
    return sorted(rows, key=lambda row: -row["bytes"])


def assumed(chip: Chip) -> str:
    """Which links the seconds assume, in words; nothing where no time is predicted."""
    one = chip.per_device()
    if chip.simulated:
        return ""
    if chip.link == "torus":
        return f"Seconds assume that each mesh axis has one axis of the torus of {chip.name} chips to itself."
    rate = f"{one.dcn_bytes_per_s / 1e9:.3g} GB/s"
    return f"Seconds assume nodes of {one.node_size} devices, and {rate} per device between nodes."


def _says(state: dict, out: dict, shape: MeshShape) -> str:
    total, room = sum(value for _, value in out["memory"]), out["capacity"]
    held = ", ".join(f"{name} {size_text(value)}" for name, value in out["memory"])
    fit = f"about {size_text(abs(room - total))} {'free' if total <= room else 'too much'}"
    devices = f"{count_noun(shape.size, 'device')} of {state['chip']}"
    lines = [f"{state['model']} on {shape} = {devices}, ZeRO {state['zero']}"]
    lines.append(f"memory per device: {size_text(total)} of {size_text(room)} usable, {fit} ({held})")
    for row in out["traffic"]:
        sent = f"{size_text(row['bytes'])} sent per device and step" + " (first stage)" * (shape.pp > 1)
        lines.append(f"{','.join(row['axes'])} {row['kind']} x{row['count']}: {sent} ({row['what']})")
    lines += [out["links"]] * bool(out["links"]) + [f"time per step: {time_words(out['time'])}"]
    return "\n".join(lines)


def time_words(time: dict) -> str:
    """A step's time in words, as ``llmpar plan`` tells it: by term, the largest first."""
    if time["simulated"]:
        return "not predicted: simulated devices share one processor and have no links"
    terms = sorted(time["terms"].items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {time_text(seconds)}" for name, seconds in terms if seconds)
    return f"{time_text(time['step_s'])}, {time['mfu']:.1%} MFU ({parts})"


def remedy(state: dict) -> dict:
    """What would work instead: the ``nearest`` mesh, a ``batch_size`` for the asked one, and a ``text``."""
    try:
        shape = read_mesh(state["mesh"])
    except ValueError:
        near = nearest(state | {"mesh": START["mesh"]})
        return {"nearest": near, "batch_size": None, "text": f"a mesh that works is '{near}'" * bool(near)}
    near, batch, now, parts = nearest(state), None, state["batch_size"], state["microbatches"]
    near = None if near == str(shape) else near  # then something else is wrong
    if isinstance(now, int) and isinstance(parts, int) and parts > 0:
        step = shape.dp * shape.fsdp * shape.ep * parts
        more = -(-now // step) * step
        batch = more if more != now and _works(state | {"batch_size": more}, state["mesh"]) else None
    options = [f"the nearest mesh that works is '{near}'"] * bool(near)
    options += [f"this mesh works with batch {batch}"] * bool(batch)
    return {"nearest": near, "batch_size": batch, "text": "; ".join(options)}


def _works(state: dict, mesh: str) -> bool:
    try:
        config, _, shape, _ = read(state | {"mesh": mesh, "order": START["order"]})
        make_plan(state, shape).check(config, state["batch_size"], state["seq_len"])
        return True
    except ValueError:
        return False


def nearest(state: dict) -> str | None:
    """The mesh that works and changes the asked one least: over the axes that it names, of as many devices or
    fewer (a divisor or a power of two); over other axes only where those allow nothing but one device, and
    over more stages only with two microbatches for each. None where what is wrong is not the mesh.
    """
    if not _works(state, "dp=1"):
        return None
    asked = parse_mesh(state["mesh"])
    named = [a for a, n in asked.sizes.items() if n > 1]
    others = [a for a in AXES if a not in named]
    for axes, most in ((named, asked.size), (others + named, min(asked.size, 1024))):
        counts = {most, *divisors(most), *(2**i for i in range(most.bit_length()))}
        for n in sorted(counts - {1}, reverse=True) if axes else ():
            for near in near_meshes({a: asked.sizes[a] for a in axes}, n):
                if near.pp <= asked.pp or state["microbatches"] >= 2 * near.pp:
                    if _works(state, str(near)):
                        return str(near)
    return "dp=1"


def neighbours(state: dict, most: int = 600) -> list[dict]:
    """The state, and those of the meshes and ZeRO stages nearest to it, for an export without Python. Of a
    state that is refused whatever the mesh (or that names none) only itself."""
    refused = answer(state)["refusal"]
    try:
        shape = read_mesh(state["mesh"])
    except ValueError:
        return [state]
    if refused and not refused["nearest"]:
        return [state]
    near = [
        (mesh_distance(mesh.sizes, shape.sizes), str(mesh))
        for n in divisors(shape.size)
        for mesh in near_meshes(shape.sizes, n)
    ]
    stages = sorted(range(4), key=lambda z: z != state["zero"])
    asked = itertools.product([mesh for _, mesh in sorted(near)], stages)
    found = [state | {"mesh": mesh, "zero": zero} for mesh, zero in itertools.islice(asked, most)]
    return [state, *(one for one in found if key(one) != key(state))][:most]


def device_rows(state: dict, rows: list[dict], sizes: dict[str, int], order) -> list[list[str]]:
    """What the chosen device holds: (tensor, layout, slice, bytes) as text."""
    (cut, inside), out = geometry.parted(sizes, order, rows[0]["heads"] if rows else 1), []
    at = geometry.coordinates(cut, inside, state["device"])
    for row in rows:
        layout = parse_layout(row["layout"][mode(state)])
        alive = lambda axes: tuple(a for a in axes if cut[a] > 1)
        dims = tuple(dataclasses.replace(d, axes=alive(d.axes)) for d in layout.dims)
        live = Layout(dims, alive(layout.sums))
        held = geometry.slices(live, shape_of(row, state, cut), cut, at)
        words, bytes_held = "cannot be cut evenly", 0
        if held is not None:
            words = f"[{', '.join(f'{a}:{b}' for a, b in held)}]"
            bytes_held = math.prod(b - a for a, b in held) * row["itemsize"] * row["times"]
        out.append([row["name"], str(live), words, size_text(bytes_held)])
    return out


# --------------------------------------------------------------------------------------------------- pictures


def scene(state: dict) -> Scene:
    """The state as one picture: devices in link order, the chosen ones filled, a round, the memory."""
    reply = answer(state)
    try:
        config, chip, shape, order = read(state)
        rows = tensors(state)
    except ValueError:
        return compose("refused", [], reply["says"], reply["says"].splitlines())
    sizes, node, device = shape.sizes, chip.per_device().node_size, min(state["device"], shape.size - 1)
    place, notes = geometry.places(sizes, order, node), list[str]()
    cut, inside = geometry.parted(sizes, order, config.num_kv_heads)
    asked = {state["axis"], "kv" if state["axis"] == "tp" else ""}  # a part of tp
    sent = [row for row in reply["traffic"] if asked & {*row["axes"]}]
    row = sent[min(state["row"], len(sent) - 1)] if sent else None
    axes = tuple(a for a in inside if a in (row["axes"] if row else asked) and cut[a] > 1)
    if axes:
        teams = geometry.groups(cut, inside, axes)
        number = [i for _, i in sorted((d, i) for i, team in enumerate(teams) for d in team)]
        what = f"{count_noun(len(teams), 'group')} over {','.join(axes)}"
        what += f"; filled: the group of device {device}"
        word, color = "group", axes[0]
    else:
        chosen = next((r for r in rows if r["name"] == state["tensor"]), rows[0])
        layout = parse_layout(chosen["layout"][mode(state)])
        shards = geometry.shard_numbers(layout, shape_of(chosen, state, cut), cut, inside)
        number = shards or list(range(shape.size))
        word, color, name = "shard" if shards else "device", "s1", chosen["name"]
        filled = f"filled: same shard of {name} as device {device}"
        what = f"{count_noun(shape.size, 'device')} in link order; "
        what += filled if shards else f"{name} cannot be cut evenly"
    items = layouts.cells(place, number, device, word, color)
    if row and len(teams[0]) <= 64:
        team, steps = teams[number[device]], geometry.rounds(row["kind"], len(teams[0]), row.get("pairs"))
        at = min(state["step"], len(steps) - 1)
        ends = [(team[s] // place["block"], team[t] // place["block"]) for s, t, _ in steps[at]["sends"]]
        items += layouts.arrows([geometry.lane(place, a, b) for a, b in ends if a != b])
        last = len(steps) - 1
        each = size_text(row["largest"] / max(1, last))
        which = f"One {row['kind']}" + f", the largest of {row['count']}," * (row["sizes"] > 1)
        notes.append(f"{which} over {','.join(row['axes'])}: round {at} of {last}, {each} a device.")
    notes += [f"Dashed: nodes of {node} devices."] * bool(place["frames"])
    notes += [f"Each cell stands for {place['block']} devices."] * (place["block"] > 1)
    blocks = [[small_text(0, 0, what, "start")], items]
    if reply["memory"]:
        rows_held = [("a device", dict(reply["memory"]))]
        bars = memory_bars(rows_held, reply["capacity"], whole_bytes=reply["whole"])
        blocks.append([Group(tuple(flatten(bars.items)[1:]))])
    at = geometry.coordinates(sizes, order, device)
    weights = [row for row in rows if row["kind"] == "weight"]
    held = [" ".join(cells) for cells in device_rows(state, weights, sizes, order)]
    where = ", ".join(f"{a} {at[a]}" for a in order if sizes[a] > 1)
    details = "\n".join([what, f"device {device}: {where}", *held])
    lines = reply["says"].splitlines()[1 if reply["refusal"] else -1 :]
    return compose(f"mesh {shape}", blocks, f"{reply['says']}\n{details}", [*notes, *lines])
