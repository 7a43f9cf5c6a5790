"""The mesh explorer's panels: a picture or a table for each place of the page."""

import dataclasses
import functools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from html import escape

from llmpar.draw import columns, geometry
from llmpar.draw.charts import MEMORY, TIME, axis_colours, count_noun, role_of
from llmpar.draw.grid import layer_lanes, tensor_grid
from llmpar.draw.scene import Group, Scene, Text, attribute, compose, size_text, time_text, to_svg
from llmpar.draw.strips import ring
from llmpar.explore.look import View, model_of, planned, works
from llmpar.explore.words import (
    act,
    button,
    estimated,
    explanation,
    html_table,
    published_runs,
    signed_terms,
    table_row,
    tagged,
)
from llmpar.plan.checks import why_not_run
from llmpar.plan.layout import Layout
from llmpar.plan.mesh_shape import AXES, divisors, parse_mesh
from llmpar.planner import frameworks, service
from llmpar.planner.planner import Candidate, commands, fields_of, memory_verdict, versus
from llmpar.planner.terms import recomputed
from llmpar.predict.hardware import GIB
from llmpar.predict.memory import BATCH
from llmpar.predict.time import Clock
from llmpar.predict.traffic import ITEMSIZE, Prediction, most_traffic

_PLACES = {
    "over": {
        "launch": "Your launch line",
        "serve": "Served by an engine",
        "beside": "Side by side",
    },
    "left": {"axes": "Axes", "memory": "Memory", "step": "Step"},
    "middle": {"grid": "Devices", "layer": "One layer", "explain": "Why this number"},
    "right": {"map": "All meshes", "sent": "Sent"},
    "below": {
        "code": "Take it along: as code, or for another framework",
        "famous": "Runs that were published",
        "holds": "What the chosen device holds",
    },
}
AREAS = [
    [name, heading, place] for place, named in _PLACES.items() for name, heading in named.items()
]
"""Every panel: its name, its heading (where the picture has none), its place on the page."""
_KINDS = {
    "weight": "weights (float32)",
    "gradient": "gradients (float32)",
    "moments": "the optimizer's two moments (float32)",
    "activation": "activations of one layer and microbatch",
    "cache": "keys and values of all layers, as served (bfloat16)",
    "batch": "batch (int32)",
}
_BARS = {"a step": time_text, "memory": size_text, "sent": size_text}
DOES = {
    "pp": "pipeline",
    "dp": "data",
    "fsdp": "FSDP, ZeRO",
    "ep": "experts",
    "sp": "context",
    "tp": "tensor",
}
"""The parallelism that an axis is."""
HOLDS = "Who holds what of"
_once = functools.lru_cache(maxsize=4)  # what no other mesh changes, of the same `look.view`


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An array of a training step: ``times`` of them, with ``itemsize`` bytes an element."""

    kind: str
    path: str
    shape: tuple[int, ...]
    itemsize: int
    layout: Layout
    times: int = 1

    @property
    def name(self) -> str:
        """Return the name that it has in a state."""
        return f"{self.kind} {self.path}"

    def live(self, sizes: dict[str, int]) -> Layout:
        """Return its layout without the axes of size 1."""
        alive = lambda axes: tuple(a for a in axes if sizes[a] > 1)
        dims = tuple(dataclasses.replace(d, axes=alive(d.axes)) for d in self.layout.dims)
        return Layout(dims, alive(self.layout.sums))

    def part_on(self, sizes: dict[str, int], device: int) -> tuple[str, int]:
        """Return the slice on a device as text, and its bytes; 0 where a dim cannot be cut evenly."""
        at = geometry.coordinates(sizes, sizes, device)
        cut = geometry.slices(self.layout, self.shape, sizes, at)
        if cut is None:
            return "cannot be cut evenly", 0
        words = f"[{', '.join(f'{a:,}:{b:,}' for a, b in cut)}]"
        return words, self.itemsize * self.times * math.prod(b - a for a, b in cut)


def tensors(seen: View) -> list[Tensor]:
    """Return every array of a training step, activations of a layer and microbatch, and the cache as
    served."""
    plan, q = seen.plan, seen.question
    c, b, s = q.config, q.batch_size, q.seq_len
    states = ("weight", "stored", 1), ("gradient", "accumulated", 1), ("moments", "reduced", 2)
    rows = [
        Tensor(kind, path, weight.shape, 4, getattr(layouts, when), times)
        for kind, when, times in states
        for path, (weight, layouts) in plan.layouts_by_path.items()
    ]
    micro, item = max(1, b // plan.microbatches), ITEMSIZE[plan.dtype]
    n, k, h = c.num_heads, c.num_kv_heads, c.head_width
    attending = sum(count for count, block in c.blocks if block.mixer == "attention")
    layers = -(-attending // plan.mesh.pp)
    cache: tuple = "keys and values", "attention b s k h", (b, s, k, h), 2, 2 * layers
    if c.has_latent_attention:
        cache = "what heads share", "data b s c", (b, s, c.cache_width), 2, layers
    table = [
        ("activation", "residual stream", "stream b s d", (micro, s, c.width), item, 1),
        ("activation", "queries", "attention b s n h", (micro, s, n, h), item, 1),
        ("activation", "keys", "attention b s k h", (micro, s, k, h), item, 1),
        ("activation", "values", "attention b s k h", (micro, s, k, h), item, 1),
        ("activation", "logits", "vocab b s v", (micro, s, c.vocab_size), 4, 1),
        ("activation", "feed-forward", "ffn b s m", (micro, s, c.ffn_width), item, 1),
        ("cache", *cache),
        ("batch", ", ".join(BATCH), "data b s", (b, s), 4, len(BATCH)),
    ]
    for kind, name, dims, shape, itemsize, times in table:
        # how many rows an expert works on is up to the router
        if name != "feed-forward" or not c.experts:
            rows.append(Tensor(kind, name, shape, itemsize, plan.place(dims), times))
    return rows


def chosen(seen: View) -> Tensor:
    """Return the tensor that the state names, or where the model has none of this name its largest weight."""
    rows = tensors(seen)
    largest = max(rows, key=lambda row: (row.kind == "weight", math.prod(row.shape)))
    return next((row for row in rows if row.name == seen.state["tensor"]), largest)


def tensor_choice(seen: View) -> str:
    """Return a list to choose a tensor from, with the state's chosen."""
    now, groups = chosen(seen).name, defaultdict[str, str](str)
    for row in tensors(seen):
        mark = " selected" * (row.name == now)
        value = attribute(json.dumps(row.name))
        groups[row.kind] += f"<option value={value}{mark}>{escape(row.name)}</option>"
    options = (
        f"<optgroup label={attribute(title)}>{groups[kind]}</optgroup>"
        for kind, title in _KINDS.items()
    )
    select = f'<select data-name="tensor" data-kind="choice">{"".join(options)}</select>'
    return f"<label><b>{HOLDS}</b> {select}</label>"


@_once
def holds(seen: View) -> str:
    """Return a table of what the chosen device holds."""
    sizes, device, groups = seen.plan.mesh.sizes, seen.state["device"], []
    at = geometry.coordinates(sizes, sizes, device)
    where = ", ".join(f"{axis} {at[axis]}" for axis in sizes if sizes[axis] > 1)
    rows = tensors(seen)
    for kind, title in _KINDS.items():
        parts = [(row, *row.part_on(sizes, device)) for row in rows if row.kind == kind]
        total = size_text(sum(size for _, _, size in parts))
        head = f'<th scope="rowgroup">{escape(title)}</th><td>{total}</td><td></td><td></td>'
        groups.append(f"<tbody><tr>{head}</tr>")
        for row, words, size in parts:
            code = (f"<code>{escape(text)}</code>" for text in (str(row.live(sizes)), words))
            groups.append(table_row(button(row.path, tensor=row.name), [size_text(size), *code]))
        groups.append("</tbody>")
    title = f"<p>Device {device}{': ' * bool(where)}{where}.</p>"
    return title + html_table(("tensor", "bytes", "layout", "slice"), "".join(groups))


def traffic_of(seen: View) -> dict[tuple[str, str], Prediction]:
    """Return what a device sends in a step, of the stage that sends most; the largest first."""
    q = seen.question
    rows = most_traffic(seen.plan, q.batch_size, q.seq_len)
    return dict(sorted(rows.items(), key=lambda row: -row[1].bytes_sent))


@_once
def code(seen: View) -> str:
    """Return the plan as Python, as the commands that train and compile it, and folded, in the keys of other
    frameworks."""
    q, plan, folds = seen.question, seen.one.plan, list[str]()
    words = ", ".join([f'"{plan.mesh}"', *(f"{n}={v!r}" for n, v in fields_of(plan).items())])
    lines = [f"Plan({words})"]
    if not q.config.runs:
        lines.append(f"# {q.config.name} is planned, and does not run here")
    elif why := why_not_run(q.resolved(plan, None)):
        lines.append(f"# it is priced, and does not run here: {why}")
    elif seen.timed:
        made = commands(q, plan)
        lines += [line for line in (made["train"], made["compile"]) if line]
    for name in frameworks.EXPORTS:
        text = escape(frameworks.export(q, plan, name))
        title = f"for {escape(frameworks.FRAMEWORKS[name]['name'])}"
        folds.append(
            f"<details name='export'><summary>{title}</summary><pre>{text}</pre></details>"
        )
    return f"<pre>{escape(chr(10).join(lines))}</pre><div class='folds'>{''.join(folds)}</div>"


def launched(seen: View) -> str:
    """Return what was read of a launch line or configuration, and what of the plan it does not say."""
    name, known, unread = frameworks.facts_in(seen.state["launch"])
    row = frameworks.FRAMEWORKS[name]
    own = {x: y for x, y in known.items() if row["implies"].get(x) != y and x != "preset"}
    read = " ".join(f"<code>{escape(f'{x}={y}')}</code>" for x, y in own.items())
    lines = frameworks.assumptions(name, known, unread, seen.question, seen.one.plan)
    rest = (escape(x.replace(" (see --model, --seq-len, --devices)", "")) for x in lines)
    return f"<p><b>Read as {escape(row['name'])}</b>: {read}</p><ul>{tagged('li', rest)}</ul>"


@_once
def serving(seen: View) -> str:
    """Return which meshes serve the requests that the state has, as ``llmpar plan --serve`` does."""
    q, text = seen.question, seen.state["serve"]
    read = re.fullmatch(r"\s*(\d{1,8})\+(\d{1,8})(?:\s+(\d+))?\s*", text)
    if not read:
        return f"<p>to serve, '{escape(text)}' is not read; write tokens of both and bits, as 2048+256 8</p>"
    sizes = (q.num_devices, *(int(x or 16) for x in read.groups()))
    try:
        document = service.serve(service.Service(model_of(seen.state), q.chip, *sizes))
    except ValueError as error:
        return f"<p><b>Served by an engine</b>: {escape(str(error))}</p>"
    rows = "".join(f"<tr>{tagged('td', service.cells(x))}</tr>" for x in document["plans"])
    words = escape(service.explained(document)).splitlines()
    return (
        f"<p><b>Served by an engine</b>, not trained: {sizes[1]:,} tokens of a prompt,"
        f" {sizes[2]:,} of an answer, weights in {sizes[3]} bits</p>"
        + html_table(service.SERVING, rows)
        + tagged("p", words)
    )


@_once
def grid(seen: View) -> Scene:
    """Draw which block of the chosen tensor each device holds, and what moves between them in a layer."""
    row, sizes, node = chosen(seen), seen.plan.mesh.sizes, seen.question.chip.per_device().node_size
    fills = {"weight": "weights", "gradient": "gradients", "moments": "moments", "batch": "batch"}
    return tensor_grid(
        row.live(sizes),
        row.shape,
        sizes,
        node,
        seen.state["device"],
        row.itemsize * row.times,
        row.path,
        fills.get(row.kind, "activations"),
        seen.segments,
    )


def film(seen: View) -> str:
    """Return the rounds of the collective that is explained, in the chosen device's group where that is
    small."""
    names, _, kind = seen.state["explain"].partition(" ")
    sizes, over = seen.plan.mesh.sizes, tuple(names.split(","))
    if (names, kind) not in traffic_of(seen) or not sizes.keys() >= {*over} or over == ("pp",):
        return ""  # a pipeline is no ring
    (team,) = [team for team in geometry.groups(sizes, sizes, over) if seen.state["device"] in team]
    return to_svg(ring(kind.removeprefix("ragged-"), team, over[0])) if len(team) <= 8 else ""


@_once
def axes(seen: View) -> Scene:
    """Draw how the devices are cut, with what moves a factor from one axis to another."""
    acts = {axis: tuple(_moved(seen, axis, up) for up in (False, True)) for axis in AXES}
    note = (
        f"All {seen.shape.size:,} stay in use: a square that one axis gets is taken from another."
    )
    words = {axis: act(explain=f"word {axis}") for axis in AXES}
    return columns.axis_squares(seen.shape.user_sizes, DOES, acts, note, words)


def _moved(seen: View, axis: str, up: bool) -> tuple[str, str] | None:
    """Return the patch that gives an axis a factor more, or less, and its name; None where no such mesh
    works. The other axis is fsdp if that works, else the largest that does."""
    sizes = seen.shape.user_sizes
    others = sorted((a for a in AXES if a != axis), key=lambda a: (a != "fsdp", -sizes[a]))
    for other in others:
        giver, taker = (other, axis) if up else (axis, other)
        if sizes[giver] == 1:
            continue
        factor = divisors(sizes[giver])[1]
        cut = {giver: sizes[giver] // factor, taker: sizes[taker] * factor}
        mesh = str(parse_mesh(" ".join(f"{a}={n}" for a, n in (sizes | cut).items())))
        if works(seen.state | {"mesh": mesh}):
            return act(mesh=mesh), f"{giver} {cut[giver]}, {taker} {cut[taker]}"
    return None


def memory(seen: View) -> Scene:
    """Draw a device's memory by part, against what a program may take, and how far the estimate may be
    off."""
    q, fit = seen.question, memory_verdict(seen.question, seen.one)
    parts = [
        columns.Part(name, size, "", act(explain=name)) for name, size in seen.one.parts.items()
    ]
    limits = [(fit.capacity_bytes, "may take"), (q.chip.usable_hbm_gib * GIB, "all")]
    several = limits[0][0] != limits[1][0]
    return columns.memory_bar(
        parts, limits[: 1 + several], (fit.low_bytes, fit.high_bytes), fit.total_bytes
    )


def step_times(seen: View) -> Scene:
    """Draw a step's seconds by term."""
    time, shape = seen.one.time, seen.shape
    # then it is dp's links that gradients take
    uncut = shape.size == shape.dp * shape.pp * shape.tp
    own = {"gradients at the end": "dp"} if uncut else {}
    terms = time.terms.items()
    notes = {"recomputation": recomputed(seen.one.plan)}
    parts = [columns.Part(n, s, notes.get(n, ""), act(explain=n), own.get(n, "")) for n, s in terms]
    return columns.time_bar(parts, seen.question.band(time.step_s), time.step_s)


def sent(seen: View) -> Scene:
    """Draw what a device sends in a step, and how much of its time on links the step waits for."""
    rows, bars = traffic_of(seen), []
    clock = Clock(seen.question.run(seen.one.plan)) if seen.timed else None
    on_links = (
        {}
        if clock is None
        else {
            key: _summed(row, "term", functools.partial(clock.message, row))
            for key, row in rows.items()
        }
    )
    total_s = defaultdict[str, float](float)
    for term, s in (pair for seconds in on_links.values() for pair in seconds.items()):
        total_s[term] += s
    # Of a term as much is waited for as the step has of it; sums have noise.
    terms_s = seen.one.time.terms
    share = {t: min(1.0, round(terms_s.get(t, 0.0) / s, 9)) for t, s in total_s.items() if s}
    bytes_of = lambda row: _summed(row, "value", lambda message: row.sent(message.num_bytes))
    largest = lambda sums: max(sums, key=sums.__getitem__)
    most_of = [(names, largest(bytes_of(row))) for (names, _), row in rows.items()]
    named = Counter(most_of)
    for ((names, kind), row), most in zip(rows.items(), most_of, strict=True):
        what = most[1] if named[most] == 1 else kind.removeprefix("collective-")
        seconds = on_links.get((names, kind), {})
        waits = sum(s * share[term] for term, s in seconds.items() if s)
        values = ", ".join(sorted({message.value for message in row.messages}))
        note = f"{kind}, {row.count:,} times: {values}"
        sizes = row.bytes_sent, sum(seconds.values()) - waits, waits
        bars.append(columns.SentBar(names, what, *sizes, note, act(explain=f"{names} {kind}")))
    return columns.sent_bars(bars)


def _summed(row: Prediction, by: str, amount: Callable[..., float]) -> dict[str, float]:
    """Return the sums of an amount over a row's messages, by their term of the step or by their value."""
    sums = defaultdict[str, float](float)
    for message, times in row.messages.items():
        sums[getattr(message, by)] += times * amount(message)
    return sums


def others(seen: View) -> dict[str, Candidate | str]:
    """Return what a mesh is compared with: the best so far, and the pinned one or why it is refused."""
    around, pinned = seen.around, seen.state["pinned"].strip()
    shown: dict[str, Candidate | str] = {"best": around.best} if around.best else {}
    try:
        mesh = pinned and str(parse_mesh(pinned, seen.shape.size if "-1" in pinned else None))
        return shown | ({"pinned": planned(seen.question, mesh)} if mesh else {})
    except ValueError as error:
        return shown | {"pinned": str(error)}


def compared(seen: View) -> dict[str, dict]:
    """Return how the plan compares with each of the others, as ``llmpar plan --versus`` does."""
    pairs = ((name, one) for name, one in others(seen).items() if isinstance(one, Candidate))
    return {
        name: versus(seen.question, seen.one, one)
        for name, one in pairs
        if one.plan.mesh != seen.shape
    }


def side_by_side(seen: View) -> str:
    """Return You, the best mesh and the pinned one on one scale, each with why it and You differ."""
    shown: dict[str, Candidate | str] = {"you": seen.one, **others(seen)}
    bars = {name: _bars(seen, x) for name, x in shown.items() if isinstance(x, Candidate)}
    most = [max(sum(s for _, s in rows[i]) for rows in bars.values()) for i in range(len(_BARS))]
    best = f"Best of {len(seen.around.meshes):,} meshes" if seen.around.settled else "Best so far"
    cards = list[str]()
    names = {"you": "You", "best": best, "pinned": "Pinned"}
    why = {name: signed_terms(row) for name, row in compared(seen).items()}
    for name, one in shown.items():
        mesh = one if isinstance(one, str) else str(one.plan.mesh)
        pin = ("unpin", "") if name == "pinned" else ("pin", mesh)
        acts = [button("open", mesh=mesh)] * (name in why) + [button(pin[0], pinned=pin[1])]
        lines = [f"<p><b>{names[name]}</b> <code>{escape(mesh)}</code> {' '.join(acts)}</p>"]
        rows = zip(_BARS.items(), bars.get(name, []), most, strict=name in bars)
        with estimated(seen):
            cells = [table_row(what, _bar(parts, top, text)) for (what, text), parts, top in rows]
        lines += [f"<table>{''.join(cells)}</table>"] * (name in bars)
        cards.append(f"<div class='card'>{''.join(lines)}{why.get(name, '')}</div>")
    return f"<div class='cards'>{''.join(cards)}</div>"


def _bars(seen: View, one: Candidate) -> list[list[tuple[str, float]]]:
    """Return the parts of a plan's time, memory and what is sent, each with the role of its colour."""
    plan = seen.question.resolved(one.plan, seen.question.platform)
    rows = traffic_of(dataclasses.replace(seen, one=one, plan=plan))
    roles = lambda parts, words: [(role_of(x, words).rstrip("/."), v) for x, v in parts.items()]
    moved = [(axis_colours(axes)[0], row.bytes_sent) for (axes, _), row in rows.items()]
    return [roles(one.time.terms, TIME), roles(one.parts, MEMORY), moved]


def _bar(parts: list[tuple[str, float]], most: float, text: Callable[[float], str]) -> list[str]:
    """Return a bar of parts, as wide as they are of the most, and its number."""
    total = sum(size for _, size in parts)
    style = "width:{:.2f}%;background:var(--{})"
    inner = "".join(
        f"<i style='{style.format(100 * s / (most or 1), role)}'></i>" for role, s in parts
    )
    return [f"<span class='bar' aria-hidden='true'>{inner}</span>", text(total)]


def _mesh_map(seen: View) -> Scene:
    """Draw all meshes of as many devices, as far as they are known."""
    around, capacity = seen.around, seen.question.capacity_bytes
    rings = {name: _point(x) for name, x in others(seen).items() if isinstance(x, Candidate)}
    counts = len(around.refused), len(around.meshes), rings.get("pinned")
    points = map(_point, around.points.values())
    band = seen.question.time_error
    return columns.mesh_map(points, _point(seen.one), rings.get("best"), capacity, *counts, band)


def _point(one: Candidate) -> columns.MeshPoint:
    mesh = one.plan.mesh
    largest = max(AXES, key=lambda axis: mesh.user_sizes[axis])
    return columns.MeshPoint(
        str(mesh), one.total_bytes, one.time.step_s, largest, one.why_not, act(mesh=str(mesh))
    )


def layer(seen: View) -> Scene:
    """Draw one layer in time, and how often a step runs it."""
    count = seen.plan.microbatches * seen.question.config.num_layers // seen.shape.pp
    return layer_lanes(seen.segments, count)


_MADE: dict[str, Callable[[View], Scene | str]] = {
    "axes": axes,
    "memory": memory,
    "grid": grid,
    "step": step_times,
    "layer": layer,
    "sent": sent,
    "explain": lambda seen: explanation(seen) + film(seen),
    "holds": holds,
    "code": code,
    "famous": published_runs,
    "launch": launched,
    "serve": serving,
    "map": _mesh_map,
    "beside": side_by_side,
}
"""What makes each panel, in the order of the text that says them."""


def panels(seen: View) -> dict[str, Scene | str]:
    """Return every panel that a state has, with the digits that its error leaves."""
    has = dict.fromkeys(("step", "layer", "map", "beside"), seen.timed)
    has |= {name: bool(seen.state[name].strip()) for name in ("launch", "serve")}
    with estimated(seen):
        return {name: make(seen) for name, make in _MADE.items() if has.get(name, True)}


def says(seen: View, verdict: dict, drawn: dict[str, Scene | str]) -> str:
    """Return the answer as text."""
    q, state = seen.question, seen.state
    what = f"{state['model']} on {seen.shape} = {count_noun(seen.shape.size, 'device')} of {state['chip']}"
    lines = [
        f"{what}, {q.batch_size} sequences of {q.seq_len:,} tokens",
        " ".join(filter(None, (verdict["head"], verdict["rest"]))),
        verdict["line"],
        *(f"{step['do']}: {step['text']}" for step in verdict["steps"]),
        *(panel.text for panel in drawn.values() if isinstance(panel, Scene)),
        *(f"beside {name}: {row['says']}" for name, row in compared(seen).items()),
    ]
    return "\n".join(lines)


def scene(seen: View, verdict: dict, areas=AREAS) -> Scene:
    """Draw the first screen as one picture: the answer in words, and the panels in their columns."""
    every = panels(seen)
    drawn = {name: every[name] for name, *_ in areas if name in every}
    placed, x = list[Group](), 0.0
    for place in ("left", "middle", "right"):
        y, wide = 0.0, 0.0
        for name, _, where in areas:
            panel = drawn.get(name)
            if where == place and isinstance(panel, Scene):
                if name == "grid":
                    placed.append(
                        Group(
                            (Text(columns.COLUMN_MARGIN, 0, f"{HOLDS} {chosen(seen).name}"),), x, y
                        )
                    )
                    y += 16
                placed.append(Group(panel.items, x, y))
                y, wide = y + panel.height, max(wide, panel.width)
        x += wide
    title, _, text = says(seen, verdict, drawn).partition("\n")
    written = [Text(0, 0, f"{verdict['head']} {verdict['rest']}", bold=True, fill=verdict["tone"])]
    below = [verdict["line"], *(step["text"] for step in verdict["steps"])]
    written += [Text(0, 22 * i, line) for i, line in enumerate(below, 1)]
    return compose(title, [written, placed], text)
