"""How each number of a plan comes about: the formula in words (`terms.toml`), the same with the numbers put
in, the arrow of the model's text that sends it, the lesson and the paper. What is ``filled`` in is arithmetic
that gives the value, to the digits shown.
"""

import contextlib
import math
from collections import Counter
from dataclasses import dataclass

from llmpar.notation import parse_layout
from llmpar.plan import Resolved
from llmpar.predict import memory
from llmpar.predict.hardware import table
from llmpar.predict.planner import Candidate, Question
from llmpar.predict.time import Clock, busiest
from llmpar.predict.traffic import FLOAT32, ITEMSIZE, most_traffic

TABLE = table("terms.toml")
LINES: dict[str, str] = TABLE.pop("lines")
"""Arrow to the file of the package that it is written in; the moves of weights are those of `plan.Life`."""
KEPT = {"weights": "stored", "gradients": "accumulated", "moments": "graded"}
"""Which layout of a weight's life each part of memory has."""


@dataclass(frozen=True)
class Term:
    """A number and where it comes from. ``unit``: B, s, 1/s or 1; ``arrow``: of the model's text, the one
    that sends most, or a weight's dims; ``line``: the file that it is in; ``estimate``: whether the number is
    one, or exactly what the compiled program has."""

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


def _term(name: str, value: float, unit: str, filled: str, key: str = "", arrow: str = "") -> Term:
    line = LINES.get(arrow, "plan.py") if arrow else ""
    return Term(name, value, unit, filled, arrow=arrow, line=line, **TABLE[key or name])


def terms(q: Question, one: Candidate) -> list[Term]:
    """Every number of a plan: parts of memory, what each group of devices sends (as "tp all-reduce"), the
    terms of a step's time if there is one, and what follows from them."""
    plan = one.plan.resolve(q.config, q.platform)
    return _held(q, one, plan) + _sent(q, plan) + (_timed(q, one) if one.time.terms else [])


def _held(q: Question, one: Candidate, plan: Resolved) -> list[Term]:
    """The parts of memory. Weights that are cut alike are summed."""
    found, besides = [], memory.temp_bytes(plan, q.batch_size, q.seq_len)
    for name, value in one.parts.items():
        filled = f"{besides:,} B - {besides - value:,} B"
        if name in KEPT and value != besides:
            cut = Counter[int]()
            for weight, life in plan.lives.values():
                held = math.prod(getattr(life, KEPT[name]).shard_shape(weight.shape, plan.mesh.sizes))
                cut[math.prod(weight.shape) // held] += math.prod(weight.shape)
            filled = " + ".join(f"{n:,} × 4 B / {parts}" for parts, n in cut.most_common())
            filled = f"2 × ({filled})" if name == "moments" else filled
        if name == "batch":
            tokens = math.prod(plan.tokens.shard_shape((q.batch_size, q.seq_len), plan.mesh.sizes))
            filled = f"4 × 4 B × {tokens:,} + 8 B"
        found.append(_term(name, value, "B", filled))
    return [*found, _term("total", one.total_bytes, "B", " + ".join(f"{x.value:,} B" for x in found))]


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
    stage = busiest(clock)
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
            filled = f"{value * clock.bytes_per_s:.6g} B / {clock.bytes_per_s:.6g} B/s"
        if name == "bubble":
            filled = f"{step_s:.6g} s × {value / step_s:.6g}"
        if sum(sent.get(name, ())):
            key, on_links = "links", sum(sent[name])
            filled = f"{on_links:.6g} s × {value / on_links:.6g}"
        found.append(_term(name, value, "s", filled, key))
    used = f"{run.flops():.6g} FLOP / ({run.mesh.size:,} × {peak:.6g} FLOP/s × {step_s:.6g} s)"
    found.append(_term("a step", step_s, "s", " + ".join(f"{x.value:.6g} s" for x in found)))
    found.append(_term("MFU", one.time.mfu(run), "1", used))
    rate = f"{q.batch_size:,} × {q.seq_len:,} / {step_s:.6g} s"
    return [*found, _term("tokens per second", run.tokens_per_step / step_s, "1/s", rate)]
