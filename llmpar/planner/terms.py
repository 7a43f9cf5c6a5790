"""How each number of a plan comes about: the formula in words (`terms.toml`), the formula with the numbers
filled in, the arrow of the model's text that sends it, the lesson and the paper. The arithmetic that is
``filled`` in gives the value, to the digits shown.
"""

import contextlib
import math
import operator
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

from llmpar.plan.layout import parse_layout
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import GRADIENT, UPDATED, Plan, Resolved
from llmpar.planner.planner import Candidate, Question
from llmpar.predict import formulas, memory
from llmpar.predict.hardware import Rates, package_table
from llmpar.predict.muon import muon_flops
from llmpar.predict.time import Clock, busiest, chunks, optimizer_params, torus_axes, update_bytes
from llmpar.predict.traffic import FLOAT32, ITEMSIZE, MATMULS, most_traffic, step_traffic
from llmpar.predict.workload import Run

FORMULAS = package_table("planner/terms.toml")
LINES: dict[str, str] = FORMULAS.pop("lines")
"""Arrow to the file of the package that it is written in; the moves of weights are those of
`plan.WeightLayouts`."""
_KEPT = {"weights": "stored", "gradients": "accumulated", "moments": "reduced"}
"""Which of a weight's layouts each part of memory has."""


class Summand(NamedTuple):
    """A part of a number: what it is, its arithmetic, its value."""

    what: str
    filled: str
    value: float


@dataclass(frozen=True)
class Term:
    """A number and where it comes from. ``unit``: B, s, 1/s or 1; ``arrow``: of the model's text, the one
    that sends most, or a weight's dims; ``line``: the file that it is in; ``estimate``: whether the number is
    one, or exactly what the compiled program has; ``summands``: what is filled in, one by one, and
    how many ``times`` their sum is taken."""

    name: str
    value: float
    unit: str
    filled: str
    formula: str
    lesson: str
    paper: str
    arrow: str = ""
    line: str = ""
    estimate: bool = False
    summands: tuple["Summand", ...] = ()
    times: str = ""


def recomputed(plan: Plan) -> str:
    """Name the fields of a plan for which its backward pass computes something again; "" where none does."""
    causes = {
        "stage_saves input": plan.mesh.pp > 1 and plan.stage_saves == "input",
        f"remat {plan.remat}": plan.remat != "none",
        f"ffn_chunks {plan.ffn_chunks}": plan.ffn_chunks > 1
        and plan.remat in ("none", "selective"),
    }
    return ", ".join(name for name, holds in causes.items() if holds)


def _term(name: str, value: float, unit: str, filled: str, key: str = "", arrow: str = "") -> Term:
    line = LINES.get(arrow, "plan/plan.py") if arrow else ""
    return Term(name, value, unit, filled, arrow=arrow, line=line, **FORMULAS[key or name])


def _added(
    name: str, value: float, unit: str, parts: list[Summand], key: str = "", times: str = ""
) -> Term:
    """Return a term that is a sum, ``times`` something."""
    filled = " + ".join(part.filled for part in parts).replace("+ -", "-") or f"0 {unit}"
    term = _term(name, value, unit, f"({filled}) × {times}" if times else filled, key)
    return replace(term, summands=tuple(parts), times=times)


def terms(q: Question, one: Candidate) -> list[Term]:
    """Explain every number of a plan: parts of memory, what each group of devices sends (as "tp all-reduce"),
    the terms of a step's time if there is one, and what follows from them."""
    plan = q.resolved(one.plan, q.platform)
    return _memory(q, one, plan) + _sent(q, plan) + (_timed(q, one) if one.time.terms else [])


def _memory(q: Question, one: Candidate, plan: Resolved) -> list[Term]:
    """Explain the parts of memory. Weights that are cut alike are summed."""
    out, parts = list[Term](), one.parts
    for name, value in parts.items():
        if name == "activations":
            out.append(_added(name, value, "B", _of_tokens(q, plan)))
            continue
        if name == "weights in use":
            others = parts["gradients"] + parts["unreduced gradients"]
            rows = memory.temp_parts(plan, 0, q.seq_len)  # of a step without tokens
            summands = _summands(rows, "less the gradients, parts of their own", others)
            out.append(_added(name, value, "B", summands))
            continue
        filled = f"{value:,} B"
        if name in _KEPT:
            cut = Counter[tuple[int, int]]()
            for weight, layouts in plan.layouts_by_path.values():
                size = math.prod(
                    getattr(layouts, _KEPT[name]).shard_shape(weight.shape, plan.mesh.sizes)
                )
                item = ITEMSIZE[plan.dtype] if weight.frozen else FLOAT32
                if name == "weights" or not weight.frozen:
                    cut[math.prod(weight.shape) // size, item] += math.prod(weight.shape)
            alike = cut.most_common()
            filled = " + ".join(f"{n:,} × {item} B / {ranks}" for (ranks, item), n in alike)
            filled = f"2 × ({filled})" if name == "moments" else filled
        if name == "batch":
            tokens = math.prod(
                plan.place("data b s").shard_shape((q.batch_size, q.seq_len), plan.mesh.sizes)
            )
            filled = f"{len(memory.BATCH)} × 4 B × {tokens:,} + 8 B"
        out.append(_term(name, value, "B", filled))
    return [*out, _term("total", one.total_bytes, "B", " + ".join(f"{x.value:,} B" for x in out))]


def _summands(
    rows: list[tuple[str, int, int]], less: str = "", elsewhere: float = 0
) -> list[Summand]:
    """Fill in rows of `memory.temp_parts`, less what is counted ``elsewhere``."""
    count = lambda times: f"{times:,} × " * (times > 1)
    out = [Summand(what, f"{count(n)}{size:,} B", n * size) for what, n, size in rows if n * size]
    if elsewhere:
        out.append(Summand(less, f"-{elsewhere:,} B", -elsewhere))
    return out


def _of_tokens(q: Question, plan: Resolved) -> list[Summand]:
    """Return what tokens add to a step's memory: row by row where a step without tokens has the same rows."""
    rows, empty = (
        memory.temp_parts(plan, q.batch_size, q.seq_len),
        memory.temp_parts(plan, 0, q.seq_len),
    )
    if [row[:2] for row in rows] == [row[:2] for row in empty]:
        pairs = zip(rows, empty, strict=True)
        return _summands([(what, n, size - other[2]) for (what, n, size), other in pairs])
    fixed = sum(n * size for _, n, size in empty)
    return _summands(rows, "less what a step without tokens would hold", fixed)


def _sent(q: Question, plan: Resolved) -> list[Term]:
    """Explain the rows of traffic, each with its three largest messages written out."""
    c, out = q.config, list[Term]()
    sizes = {
        "b": q.batch_size // plan.microbatches,
        "s": q.seq_len,
        "d": c.width,
        "m": c.ffn_width,
        "v": c.vocab_size,
        "n": c.num_heads,
        "k": c.num_kv_heads,
        "h": c.head_width,
        "r": c.num_heads // c.num_kv_heads,
        "e": c.experts.num_experts if c.experts else 1,
        "z": c.lora.rank if c.lora else 1,
    }
    for (axes, kind), row in most_traffic(plan, q.batch_size, q.seq_len).items():
        n, part, by_size = row.group_size, "", dict[int, Counter[str]]()
        if row.short_kind != "permute":
            part = "2 × " * (row.short_kind == "all-reduce") + f"{n - 1}/{n} × "
        for message, times in row.messages.items():
            by_size.setdefault(message.num_bytes, Counter())[message.arrow] += times
        rows = sorted(by_size.items(), key=lambda row: -row[0] * row[1].total())
        arrows = [max(counts, key=lambda arrow: counts[arrow]) for _, counts in rows]
        largest = zip(arrows[:3], rows, strict=False)
        words = [
            f"{w.total():,} × {part}{_message(plan, arrow, n, sizes)}" for arrow, (n, w) in largest
        ]
        if rest := sum(size * counts.total() for size, counts in rows[3:]):
            words.append(f"{part}{rest:,} B")
        filled = " + ".join(words)
        out.append(_term(f"{axes} {kind}", row.bytes_sent, "B", filled, row.short_kind, arrows[0]))
    return out


def _message(plan: Resolved, arrow: str, num_bytes: int, sizes: dict[str, int]) -> str:
    """Write a message as the product of a layout's dims on a device, where one has as many bytes."""
    layouts = arrow.removeprefix(GRADIENT).removeprefix(UPDATED).split(" -> ")
    for item in (ITEMSIZE[plan.dtype], FLOAT32):
        for layout in layouts:
            with contextlib.suppress(ValueError, KeyError):
                shape = tuple(sizes[letter] for letter in parse_layout(layout).letters)
                local = plan.place(layout).shard_shape(shape, plan.mesh.sizes)
                if local and math.prod(local) * item == num_bytes:
                    return " × ".join(f"{n:,}" for n in local) + f" × {item} B"
    return f"{num_bytes:,} B"


def _timed(q: Question, one: Candidate) -> list[Term]:
    """Explain the terms of a step's time, of the busiest stage, and what follows from it."""
    run, out = q.run(one.plan), list[Term]()
    clock, step_s = Clock(run), one.time.step_s
    stages = chunks(clock)[0]
    stage = busiest(stages)
    kinds, m = run.stage_kinds(stage), run.microbatches
    layers = sum(kinds)
    sent, peak = clock.sent(clock.alike(stage)), clock.device.flops_per_s
    each = [_layer_flops(run, block) for block in run.blocks]
    flops = sum(map(operator.mul, kinds, each)) / layers  # of a layer in the mean
    for name, value in one.time.terms.items():
        key = name if name in FORMULAS else "other"
        filled = f"{value / m:.6g} s × {m}"
        if name in ("attention", "elementwise", "recomputation"):
            filled = f"{layers} × {m} × {value / layers / m:.6g} s"
        if name == MATMULS:
            reached = layers * m * flops / peak / value
            filled = f"{layers} × {m} × {flops:.6g} FLOP / ({peak:.6g} FLOP/s × {reached:.6g})"
        if name == "optimizer":
            out.append(_added(name, value, "s", _optimizer(clock, *optimizer_params(run, stages))))
            continue
        if name == "orthogonalising":
            assert run.plan
            flops_of_it = muon_flops(run.plan)
            filled = f"{flops_of_it:.6g} FLOP / {flops_of_it / value:.6g} FLOP/s"
        if name == "bubble":
            filled = f"{step_s:.6g} s × {value / step_s:.6g}"
        if on_links := sum(seconds for (term, _), seconds in sent.items() if term == name):
            share = value / on_links
            explained = _added(
                name, value, "s", _links(clock, stage, name), "links", f"{share:.6g}"
            )
            out.append(replace(explained, formula=f"{explained.formula}; {_shown(clock, share)}"))
            continue
        explained = _term(name, value, "s", filled, key)
        if name == "recomputation":
            explained = replace(explained, formula=f"{explained.formula}: {recomputed(one.plan)}")
        out.append(explained)
    used = f"{run.flops():.6g} FLOP / ({run.mesh.size:,} × {peak:.6g} FLOP/s × {step_s:.6g} s)"
    out.append(_term("a step", step_s, "s", " + ".join(f"{x.value:.6g} s" for x in out)))
    out.append(_term("MFU", one.time.mfu(run), "1", used))
    rate = f"{q.batch_size:,} × {q.seq_len:,} / {step_s:.6g} s"
    return [*out, _term("tokens per second", run.tokens_per_step / step_s, "1/s", rate)]


def _layer_flops(run: Run, block: ModelConfig) -> float:
    """Return the FLOPs of a layer's matmuls, both ways: backward twice those of a weight that is trained."""
    own = sum(p.flops for part in run.layer_matmuls(block) for p in part)
    return (2 if block.lora else 3) * own + 3 * sum(
        p.flops for p in run.adapter_matmuls(block).values()
    )


def _optimizer(clock: Clock, own: float, whole: float) -> list[Summand]:
    """Fill in what the update of a device's own parameters reads and writes, and gradients of its whole tp
    share."""
    rate = f"({clock.device.hbm_bytes_per_s:.6g} B/s × {clock.rates.memory:g})"
    each, state_bytes = clock.run.software.reduced_bytes, update_bytes(clock.run.software)
    state = f"{state_bytes:g} B × {own:,.0f}"
    sums = f"2 × {each:g} B × {whole:,.0f}"
    return [
        Summand(UPDATE, f"{state} / {rate}", state_bytes * own / clock.bytes_per_s),
        Summand(_UNCUT, f"{sums} / {rate}", 2 * each * whole / clock.bytes_per_s),
    ]


UPDATE = (
    "weights that a device updates: 4 B of a gradient read, 8 of the weight and 16 of two moments read and"
    " written, 2 of a 16-bit copy written"
)
_UNCUT = "gradients of all weights of a tp share, before they are cut, written and read"


def _links(clock: Clock, stage: int, term: str) -> list[Summand]:
    """Fill in the messages of a term by the collective, with the links that decide how long it takes."""
    rows, rates = Counter[tuple](), clock.rates
    traffic = step_traffic(clock.plan, clock.run.batch_size, clock.run.seq_len, clock.alike(stage))
    for (names, kind), row in traffic.items():
        doublings = 1 + math.log2(row.group_size)
        start = rates.start_s * doublings * (2 if row.short_kind == "all-reduce" else 1)
        inner = min(clock.inner[axis] for axis in row.user_axes)
        place = row.group_size, inner, torus_axes(clock.links, row.group_size, inner)
        for message, times in row.messages.items():
            took = clock.message(row, message)
            if message.term != term or not took:
                continue
            levels = formulas.level_seconds(clock.links, row.short_kind, message.num_bytes, *place)
            slowest = max(levels, key=lambda level: level.seconds)
            rows[names, kind, start, slowest.where, slowest.bytes_per_s, took - start] += times
    parts = defaultdict[tuple, list[float]](lambda: [0.0, 0.0])
    for (*key, seconds), times in rows.items():
        parts[tuple(key)][0] += times
        parts[tuple(key)][1] += times * seconds
    return sorted(
        (_link(rates, *key, *sums) for key, sums in parts.items()), key=lambda part: -part.value
    )


def _link(
    rates: Rates,
    names: str,
    kind: str,
    start: float,
    where: str,
    rate: float,
    times: float,
    s: float,
) -> Summand:
    """Fill in a collective ``times`` over, that takes ``s`` seconds besides its starts."""
    share = (
        1.0 if where == "inside a chip" else rates.network if "between" in where else rates.links
    )
    peak = rate / share / 1e9
    words = f"{names} {kind}, {times:,.0f} times, {where}: {100 * share:.0f} % of {peak:.4g} GB/s"
    filled = (
        f"{times:,.0f} × {start:.6g} s + {s * rate / 1e9:.6g} GB / ({peak:.6g} GB/s × {share:.6g})"
    )
    return Summand(words, filled, times * start + s)


def _shown(clock: Clock, share: float) -> str:
    """Say why a share of the seconds on links is waited for."""
    lost = clock.rates.shared
    if share > 0.9999:
        return "1: nothing of it hides"
    if abs(share / lost - 1) < 1e-4:
        return (
            f"{lost:g}: all of it hides behind computing, which loses that share of it (rates.toml)"
        )
    return f"{share:.3g}: a part is waited for, and of what hides computing loses {lost:g} (rates.toml)"
