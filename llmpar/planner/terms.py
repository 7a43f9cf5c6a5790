"""How each number of a plan comes about: the formula in words (`terms.toml`), the same with the numbers put
in, the arrow of the model's text that sends it, the lesson and the paper. What is ``filled`` in is arithmetic
that gives the value, to the digits shown.
"""

import contextlib
import dataclasses
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from llmpar.plan.layout import parse_layout
from llmpar.plan.plan import Plan, Resolved
from llmpar.planner.planner import Candidate, Question
from llmpar.predict import formulas, memory
from llmpar.predict.hardware import Rates, table
from llmpar.predict.time import OPTIMIZER_BYTES, Clock, busiest, chunks, optimizer_params, torus_axes
from llmpar.predict.traffic import FLOAT32, ITEMSIZE, most_traffic, step_traffic

TABLE = table("planner/terms.toml")
LINES: dict[str, str] = TABLE.pop("lines")
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
    """The fields of a plan for which its backward pass computes something again; empty where none does."""
    causes = ["stage_saves input"] * (plan.mesh.pp > 1 and plan.stage_saves == "input")
    causes += [f"remat {plan.remat}"] * (plan.remat != "none")
    causes += [f"ffn_chunks {plan.ffn_chunks}"] * (
        plan.ffn_chunks > 1 and plan.remat in ("none", "selective")
    )
    return ", ".join(causes)


def _term(name: str, value: float, unit: str, filled: str, key: str = "", arrow: str = "") -> Term:
    line = LINES.get(arrow, "plan/plan.py") if arrow else ""
    return Term(name, value, unit, filled, arrow=arrow, line=line, **TABLE[key or name])


def _added(name: str, value: float, unit: str, parts: list[Summand], key: str = "", times: str = "") -> Term:
    """A term that is a sum, ``times`` something."""
    filled = " + ".join(part.filled for part in parts).replace("+ -", "-") or f"0 {unit}"
    term = _term(name, value, unit, f"({filled}) × {times}" if times else filled, key)
    return dataclasses.replace(term, summands=tuple(parts), times=times)


def terms(q: Question, one: Candidate) -> list[Term]:
    """Every number of a plan: parts of memory, what each group of devices sends (as "tp all-reduce"), the
    terms of a step's time if there is one, and what follows from them."""
    plan = q.resolved(one.plan, q.platform)
    return _held(q, one, plan) + _sent(q, plan) + (_timed(q, one) if one.time.terms else [])


def _held(q: Question, one: Candidate, plan: Resolved) -> list[Term]:
    """The parts of memory. Weights that are cut alike are summed."""
    found, parts = list[Term](), one.parts
    for name, value in parts.items():
        if name == "activations":
            found.append(_added(name, value, "B", _of_tokens(q, plan)))
            continue
        if name == "weights in use":
            others = parts["gradients"] + parts["unreduced gradients"]
            found.append(_added(name, value, "B", _without_tokens(q, plan, others)))
            continue
        filled = f"{value:,} B"
        if name in _KEPT:
            cut = Counter[int]()
            for weight, layouts in plan.weight_layouts.values():
                held = math.prod(getattr(layouts, _KEPT[name]).shard_shape(weight.shape, plan.mesh.sizes))
                cut[math.prod(weight.shape) // held] += math.prod(weight.shape)
            filled = " + ".join(f"{n:,} × 4 B / {parts}" for parts, n in cut.most_common())
            filled = f"2 × ({filled})" if name == "moments" else filled
        if name == "batch":
            tokens = math.prod(plan.tokens.shard_shape((q.batch_size, q.seq_len), plan.mesh.sizes))
            filled = f"{len(memory.BATCH)} × 4 B × {tokens:,} + 8 B"
        found.append(_term(name, value, "B", filled))
    return [*found, _term("total", one.total_bytes, "B", " + ".join(f"{x.value:,} B" for x in found))]


def _summands(rows: list[tuple[str, int, int]], less: str, elsewhere: float) -> list[Summand]:
    """Rows of `memory.temp_parts`, and what is counted ``elsewhere``."""
    count = lambda times: f"{times:,} × " * (times > 1)
    found = [Summand(what, f"{count(n)}{size:,} B", n * size) for what, n, size in rows if n * size]
    return found + [Summand(less, f"-{elsewhere:,} B", -elsewhere)] * bool(elsewhere)


def _of_tokens(q: Question, plan: Resolved) -> list[Summand]:
    """What tokens add to what a step holds: row by row where a step without tokens has the same rows."""
    rows, empty = memory.temp_parts(plan, q.batch_size, q.seq_len), memory.temp_parts(plan, 0, q.seq_len)
    if [row[:2] for row in rows] == [row[:2] for row in empty]:
        pairs = zip(rows, empty, strict=True)
        return _summands([(what, n, size - other[2]) for (what, n, size), other in pairs], "", 0)
    fixed = sum(n * size for _, n, size in empty)
    return _summands(rows, "less what a step without tokens would hold", fixed)


def _without_tokens(q: Question, plan: Resolved, elsewhere: float) -> list[Summand]:
    """What a step without tokens would hold, but for the gradients."""
    rows = memory.temp_parts(plan, 0, q.seq_len)
    return _summands(rows, "less the gradients, parts of their own", elsewhere)


def _sent(q: Question, plan: Resolved) -> list[Term]:
    """The rows of traffic, each with its three largest messages written out."""
    c, found = q.config, []
    sizes = {"b": q.batch_size // plan.microbatches, "s": q.seq_len, "d": c.width, "m": c.ffn_width}
    sizes |= {"v": c.vocab_size, "n": c.num_heads, "k": c.num_kv_heads, "h": c.head_width}
    sizes |= {"r": c.num_heads // c.num_kv_heads, "e": c.experts.num_experts if c.experts else 1}
    for (axes, kind), row in most_traffic(plan, q.batch_size, q.seq_len).items():
        n, part, alike = row.group_size, "", dict[int, Counter[str]]()
        short = kind.removeprefix("collective-").removeprefix("ragged-")
        if short != "permute":
            part = "2 × " * (short == "all-reduce") + f"{n - 1}/{n} × "
        for (_, text, size), times in row.messages.items():
            alike.setdefault(size, Counter())[text] += times
        rows = sorted(alike.items(), key=lambda row: -row[0] * row[1].total())
        arrows = [max(texts, key=lambda text: texts[text]) for _, texts in rows]
        largest = zip(arrows[:3], rows, strict=False)
        words = [f"{w.total():,} × {part}{_message(plan, arrow, n, sizes)}" for arrow, (n, w) in largest]
        if rest := sum(size * texts.total() for size, texts in rows[3:]):
            words.append(f"{part}{rest:,} B")
        found.append(_term(f"{axes} {kind}", row.bytes_sent, "B", " + ".join(words), short, arrows[0]))
    return found


def _message(plan: Resolved, text: str, size: int, sizes: dict[str, int]) -> str:
    """A message as the product of a layout's dims on a device, where one has as many bytes."""
    for item in (ITEMSIZE[plan.dtype], FLOAT32):
        for layout in text.removeprefix("gradient ").removeprefix("updated ").split(" -> "):
            with contextlib.suppress(ValueError, KeyError):
                shape = tuple(sizes[letter] for letter in parse_layout(layout).letters)
                held = plan.place(layout).shard_shape(shape, plan.mesh.sizes)
                if held and math.prod(held) * item == size:
                    return " × ".join(f"{n:,}" for n in held) + f" × {item} B"
    return f"{size:,} B"


def _timed(q: Question, one: Candidate) -> list[Term]:
    """The terms of a step's time, of the busiest stage, and what follows from it."""
    run, found = q.run(one.plan), []
    clock, step_s = Clock(run), one.time.step_s
    stages = chunks(clock)[0]
    stage = busiest(stages)
    layers, m = sum(run.chunk_layers[stage :: run.mesh.pp]), run.microbatches
    sent, peak = clock.sent(clock.alike(stage)), clock.device.flops_per_s
    flops = 3 * sum(p.flops for part in run.layer_products() for p in part)
    for name, value in one.time.terms.items():
        key, filled = name if name in TABLE else "other", f"{value / m:.6g} s × {m}"
        if name in ("attention", "elementwise", "recomputation"):
            filled = f"{layers} × {m} × {value / layers / m:.6g} s"
        if name == "products":
            reached = layers * m * flops / peak / value
            filled = f"{layers} × {m} × {flops:.6g} FLOP / ({peak:.6g} FLOP/s × {reached:.6g})"
        if name == "optimizer":
            found.append(_added(name, value, "s", _optimizer(clock, *optimizer_params(run, stages))))
            continue
        if name == "bubble":
            filled = f"{step_s:.6g} s × {value / step_s:.6g}"
        if on_links := sum(sent.get(name, ())):
            share = value / on_links
            term = _added(name, value, "s", _links(clock, stage, name), "links", f"{share:.6g}")
            found.append(dataclasses.replace(term, formula=f"{term.formula}; {_shown(clock, share)}"))
            continue
        term = _term(name, value, "s", filled, key)
        if name == "recomputation":
            term = dataclasses.replace(term, formula=f"{term.formula}: {recomputed(one.plan)}")
        found.append(term)
    used = f"{run.flops():.6g} FLOP / ({run.mesh.size:,} × {peak:.6g} FLOP/s × {step_s:.6g} s)"
    found.append(_term("a step", step_s, "s", " + ".join(f"{x.value:.6g} s" for x in found)))
    found.append(_term("MFU", one.time.mfu(run), "1", used))
    rate = f"{q.batch_size:,} × {q.seq_len:,} / {step_s:.6g} s"
    return [*found, _term("tokens per second", run.tokens_per_step / step_s, "1/s", rate)]


def _optimizer(clock: Clock, own: float, whole: float) -> list[Summand]:
    """What the update of a device's own parameters reads and writes, and gradients of its whole tp share."""
    rate = f"({clock.device.hbm_bytes_per_s:.6g} B/s × {clock.rates.memory:g})"
    each = clock.run.software.reduced_bytes
    state, sums = f"{OPTIMIZER_BYTES} B × {own:,.0f}", f"2 × {each:g} B × {whole:,.0f}"
    return [
        Summand(UPDATED, f"{state} / {rate}", OPTIMIZER_BYTES * own / clock.bytes_per_s),
        Summand(UNCUT, f"{sums} / {rate}", 2 * each * whole / clock.bytes_per_s),
    ]


UPDATED = (
    "weights that a device updates: 4 B of a gradient read, 8 of the weight and 16 of two moments read and"
    " written, 2 of a 16-bit copy written"
)
UNCUT = "gradients of all weights of a tp share, before they are cut, written and read"


def _links(clock: Clock, stage: int, term: str) -> list[Summand]:
    """The messages of a term by the collective, with the links that decide how long it takes."""
    rows, rates = Counter[tuple](), clock.rates
    traffic = step_traffic(clock.plan, clock.run.batch_size, clock.run.seq_len, clock.alike(stage))
    for (names, kind), row in traffic.items():
        axes, short = names.split(","), kind.removeprefix("collective-").removeprefix("ragged-")
        start = rates.start_s * (1 + math.log2(row.group_size)) * (2 if short == "all-reduce" else 1)
        inner = min(clock.inner[{"kv": "tp", "ul": "sp"}.get(axis, axis)] for axis in axes)
        place = row.group_size, inner, torus_axes(clock.links, row.group_size, inner)
        for (_, text, size), times in row.messages.items():
            of, _, took = clock.message(axes, row, text, size)
            if of != term or not took or text.startswith("stream") and text.endswith(" stage"):
                continue
            levels = formulas.level_seconds(clock.links, short, size, *place)
            where, rate, _ = max(levels, key=lambda level: level.seconds)
            rows[names, kind, start, where, rate, took - start] += times
    parts = defaultdict[tuple, list[float]](lambda: [0.0, 0.0])
    for (*key, seconds), times in rows.items():
        parts[tuple(key)][0] += times
        parts[tuple(key)][1] += times * seconds
    return sorted((_link(rates, *key, *sums) for key, sums in parts.items()), key=lambda part: -part.value)


def _link(
    rates: Rates, names: str, kind: str, start: float, where: str, rate: float, times: float, s: float
) -> Summand:
    """A collective ``times`` over, that takes ``s`` seconds besides its starts."""
    share = 1.0 if where == "inside a chip" else rates.network if "between" in where else rates.links
    peak = rate / share / 1e9
    words = f"{names} {kind}, {times:,.0f} times, {where}: {100 * share:.0f} % of {peak:.4g} GB/s"
    filled = f"{times:,.0f} × {start:.6g} s + {s * rate / 1e9:.6g} GB / ({peak:.6g} GB/s × {share:.6g})"
    return Summand(words, filled, times * start + s)


def _shown(clock: Clock, share: float) -> str:
    """Why a share of the seconds on links is waited for."""
    lost = clock.rates.shared
    if share > 0.9999:
        return "1: nothing of it hides"
    if abs(share / lost - 1) < 1e-4:
        return f"{lost:g}: all of it hides behind computing, which loses that share of it (rates.toml)"
    return f"{share:.3g}: a part is waited for, and of what hides computing loses {lost:g} (rates.toml)"
