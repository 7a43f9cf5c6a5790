"""Read a compiled program in the order in which a device runs it: what computes, what is sent meanwhile, and
the bytes that are alive. No JAX is needed, and no time is estimated: the unit is an operation."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from llmpar.inspect.hlo import Instruction, Module, group_axes, parsed, shapes, values_bytes
from llmpar.inspect.roofline import FREE, all_flops, collective_role

# How many of the largest values at the peak are named.
_MOST = 5
# Values below this share of the peak are not.
_SMALL = 0.01
# Operations that give what they take. A loop's state is changed in its place.
_SAME = "tuple bitcast while opt-barrier get-tuple-element".split()
# Fusions that may write into an operand of the same size that nothing needs after them.
_IN_PLACE = "kind=kLoop|kind=kInput"
# An array in memory: its computation, the operation that makes it, which of its results.
_Value = tuple[str, str, int]


def read_schedule(text: str, mesh: Any, line_of: Callable[[str], str]) -> dict[str, Any]:
    """Return the steps of a scheduled program, and what is alive in each; {} of another text.

    ``steps``: matmuls, collectives, and runs of other operations (``count``), each with ``lane`` ("compute",
    or the axes), ``name``, ``source``, ``begin``, ``end`` (an asynchronous collective spans what is beside
    it), ``exposed`` (a collective beside which nothing computes). ``spans``: loops and branches, whose inside
    is there once. ``live_bytes`` of a device in each step; ``peak``: ``bytes``, ``at`` (a step), and the
    largest ``values`` there. A value is alive from the operation that makes it to the last that takes it,
    arguments (``argument_bytes``) always. ``line_of`` returns the line for which a line of the text stands.
    """
    header = text[: text.find("\n")]
    if "is_scheduled=true" not in header:
        return {}
    reader = _Reader(parsed(text), mesh, line_of, header)
    reader.run(reader.module.entry)
    fullest = reader.fullest.items()
    sizes = Counter((*reader.named(comp, name), n) for (comp, name, _), n in fullest)
    largest = sorted(sizes.items(), key=lambda pair: -pair[0][2] * pair[1])[:_MOST]
    values = [
        {"name": name, "source": source, "bytes": n, "count": count}
        for (name, source, n), count in largest
        if n * count >= _SMALL * reader.most
    ]
    live = [reader.alive.get(i, 0) for i in range(reader.now)]
    return {
        "steps": reader.steps,
        "spans": reader.spans,
        "live_bytes": live,
        "argument_bytes": reader.arguments,
        "peak": {"bytes": reader.most, "at": reader.at, "values": values},
    }


class _Reader:
    """Go through a program, and keep what is alive."""

    def __init__(self, module: Module, mesh: Any, line_of: Callable, header: str):
        self.module, self.mesh, self.line_of = module, mesh, line_of
        self.flops, self.steps, self.spans = all_flops(module), list[dict](), list[dict]()
        entry = module.computations[module.entry].values()
        given = [shape for op in entry if op.opcode == "parameter" for shape in shapes(op.type)]
        self.arguments = self.bytes = values_bytes(given)
        self.live, self.fullest = dict[_Value, int](), dict[_Value, int]()
        self.now = self.most = self.at = 0
        self.edge = 0  # where a run of other operations begins at the earliest
        self.alive = dict[int, int]()
        aliases = re.search(r"input_output_alias=\{(.*?\)) \}", header)
        self.donated = {int(i or 0) for i in re.findall(r"\{(\d*)\}: \(", (aliases or [""] * 2)[1])}

    def run(self, comp: str) -> None:
        """Go through a computation. What it returns is its caller's, and has its place there."""
        made, gone = self.lives(comp)
        begun = dict[str, dict]()
        for name, op in self.module.computations[comp].items():
            sizes = [*made[name].values()]
            if re.search(_IN_PLACE, op.attrs):
                for value in gone[name]:
                    if self.live.get(value) in sizes:
                        sizes.remove(self.live[value])
                        self.free(value)
            self.live |= made[name]
            self.bytes += sum(made[name].values())
            self.step(comp, name, op, begun)
            at = max(0, self.now - 1)
            self.alive[at] = max(self.alive.get(at, 0), self.bytes)
            if self.bytes > self.most:
                self.most, self.at, self.fullest = self.bytes, at, dict(self.live)
            for value in gone[name]:
                self.free(value)

    def free(self, value: _Value) -> None:
        """Forget a value that nothing needs any more."""
        self.bytes -= self.live.pop(value, 0)

    def lives(self, comp: str) -> tuple[dict[str, dict[_Value, int]], dict[str, list[_Value]]]:
        """Return the values that each operation makes, with their bytes, and those that it is the last to
        take."""
        ops, root = self.module.computations[comp], self.module.roots[comp]
        refs, last = dict[str, list[_Value]](), dict[_Value, str]()
        made: dict[str, dict[_Value, int]] = {name: {} for name in ops}
        for name, op in ops.items():
            taken = [x for n, i in op.operands for x in _part(refs.get(n, []), i)]
            last |= dict.fromkeys(taken, name)
            if op.opcode in _SAME or op.opcode.endswith("-done"):
                at = re.search(r", index=(\d+)", op.attrs)
                refs[name] = _part(taken, int(at[1]) if at else None)
                continue
            values = op.results if op.opcode.endswith("-start") else shapes(op.type)
            refs[name] = [(comp, name, k) for k in range(len(values))]
            if op.opcode not in FREE:
                pairs = zip(refs[name], values, strict=True)
                made[name] = {place: values_bytes([value]) for place, value in pairs}
            last |= dict.fromkeys(refs[name], name)
        for k, value in enumerate(refs[root]):
            last[value] = ""
            if comp != self.module.entry or k in self.donated:
                made[value[1]] |= {value: 0} if value in made[value[1]] else {}
        gone: dict[str, list[_Value]] = {name: [] for name in ("", *ops)}
        for value, name in last.items():
            gone[name].append(value)
        return made, gone

    def step(self, comp: str, name: str, op: Instruction, begun: dict[str, dict]) -> None:
        """Add what an operation does to the steps."""
        bodies = op.called("body", "branch_computations", "true_computation", "false_computation")
        bodies += op.called("to_apply") if op.opcode == "call" else []
        for i, body in enumerate(bodies):
            begin = self.edge = self.now
            self.run(body)
            trips = self.module.trips(comp, op) if op.opcode == "while" else None
            loop = "loop, trip count unknown" if trips is None else f"loop ×{trips:,}"
            what = loop if op.opcode == "while" else f"branch {i + 1} of {len(bodies)}"
            if self.now > begin and op.opcode != "call":
                span = {"name": what, "source": self.source(op), "begin": begin, "end": self.now}
                self.spans.append(span)
            self.edge = self.now
        role, key, sends = collective_role(self.module, name, op)
        axes, group = group_axes(sends.attrs, self.mesh) if sends and sends.collective else ((), 1)
        if role == "done" and key in begun:
            row = begun.pop(key)
            beside = (one for one in self.steps if one["begin"] >= row["begin"])
            row["exposed"] = not any(one["lane"] == "compute" for one in beside)
            row["end"] = self.now = self.edge = max(self.now, row["end"])
        elif sends and group > 1:
            row = self.add(",".join(axes), sends.collective, self.source(sends) or self.source(op))
            row["exposed"] = role == "whole"
            if role == "start":  # it takes a step of its own only if nothing is beside it
                begun[key] = row
                self.now -= 1
            self.edge = self.now
        elif not bodies and not role and op.opcode not in FREE and op.opcode[-5:] != "-done":
            self.computes(comp, op)

    def computes(self, comp: str, op: Instruction) -> None:
        """Add an operation: a matmul is a step, others in a row are one."""
        if self.flops(comp, op):
            self.add("compute", "matmul", self.source(op))
            self.edge = self.now
        elif self.now == self.edge:
            self.add("compute", "other operations", self.source(op))
        else:
            self.steps[-1]["count"] += 1

    def add(self, lane: str, name: str, source: str) -> dict[str, Any]:
        """Add a step that begins now, and return it."""
        row = {"lane": lane, "name": name, "source": source, "count": 1, "exposed": False}
        self.steps.append(row | {"begin": self.now, "end": self.now + 1})
        self.now += 1
        return self.steps[-1]

    def named(self, comp: str, name: str) -> tuple[str, str]:
        """Return what makes a value, and its line, or that of what takes it."""
        ops = self.module.computations[comp]
        op = ops[name]
        near = [*self.module.users[comp, name], *(x for x, _ in ops[name].operands)]
        lines = (self.source(one) for one in (op, *(ops[x] for x in near if x in ops)))
        line = next((x for x in lines if x and not x.startswith("argument ")), "")
        last = op.scope.rpartition("/")[2].rstrip(")") if "/" in op.scope else ""
        return op.collective or last or op.opcode, line

    def source(self, op: Instruction) -> str:
        """Return an operation's line."""
        return self.line_of(self.module.source(op))


def _part(values: list[_Value], i: int | None) -> list[_Value]:
    """Return all parts of a tuple, or one."""
    return values if i is None else values[i : i + 1]
