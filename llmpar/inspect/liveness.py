"""Tells what a training step holds at its fullest moment, from its equations, without a compiler or a device.

Inside `jax.shard_map` the shapes of a traced step are those of one device. So its temporaries follow from who
makes a value, who reads it last, and a few laws about what XLA makes of it:

    program     the equations in a row: wrappers taken apart, equal ones once, what moves nothing left out
    exists      a cheap result is computed inside its readers; it exists if a product, a loop, a collective or
                the end wants it. Until then its sources live on
    schedule    the order of the equations
    fullest     the most bytes that are alive at once; a loop adds the peak of its body

A value may take the memory of one that is read for the last time: element by element, as an update, or as
what a loop carries. `LAWS` lists what else was learned from compilers, each with its reason. A law is about a
pass of XLA; none is fitted to a plan. The closed formula is `llmpar.predict.memory.temp_bytes`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax

from llmpar.step import Step

LAWS = {
    "late": (
        "What no product and no loop waits for runs last, and its operands live until then: weights'"
        " gradients, the value of the loss. (GPU: its scheduler fills a program from its end.)"
    ),
    "loops": (
        "A loop that nothing waits for runs last, but in the body of another loop: the value of the loss,"
        " where its gradient computes it again. The vocabulary is held until then. (TPU: its scheduler;"
        " products and sums over devices stay where they are, unlike in the law ``late``.)"
    ),
    "turns": (
        "Of turns that are written out in a loop's body, all weights' gradients are made after the last one."
        " (TPU: the same scheduler; their sums over devices stand together behind all turns.)"
    ),
    "narrow": (
        "A product is written in the type to which its one reader converts it. (Fusion into the"
        " product's epilogue.)"
    ),
    "added": (
        "A product that is only added to something is written into the sum, in the place of what it is added"
        " to. (TPU: fusion into the product's epilogue.)"
    ),
    "prologue": "What only one product reads is computed inside it. (GPU: Triton's fusion of products.)",
    "operands": (
        "What only products read, element by element, is computed inside each of them. (TPU: fusion of"
        " operands, which repeats what is cheap.)"
    ),
    "prefetch": (
        "While a layer runs, the next one's weights are gathered already: they are held twice. (GPU:"
        " the collective pipeliner, which moves gathers of a loop's slices one turn ahead.)"
    ),
    "stacks": (
        "A gather along any dim but the first wants that dim outermost. A stack whose slices are gathered so"
        " in a loop is copied whole, before the loop; so is a stack of what was gathered, before the next"
        " loop reads it. (Layout assignment, then code motion out of loops.)"
    ),
    "converted": (
        "A stack of weights that a loop converts slice by slice is converted whole, before the loop, and kept"
        " for the loops to come. (TPU: code motion out of loops.)"
    ),
    "rounded": (
        "Products read float32 as bfloat16 unless a precision is asked for. What only they read is gathered,"
        " and converted before loops, so. (TPU: its units multiply bfloat16.)"
    ),
    "scatters": (
        "A reduce-scatter along any dim but the first copies what a loop gives it; a product would have"
        " written it in that order to begin with. (Layout assignment.)"
    ),
    "sums": (
        "What a loop sums over devices and then adds up is added up first: whole until the loop has ended,"
        " when one sum scatters it. (TPU: motion of all-reduces out of loops.)"
    ),
    "copies": (
        "A branch through which many values pass gives copies of those that it updates. (Copy insertion"
        " analyses live ranges within a budget; a pipeline's unrolled stage exceeds it.)"
    ),
}
"""What compilers do to memory, and which pass does it."""

TPU = {"loops", "turns", "added", "operands", "converted", "rounded", "sums"}

TARGETS = {
    "gpu": frozenset(LAWS) - TPU,
    "tpu": frozenset(LAWS) - {"late", "prologue", "prefetch", "stacks"},
    "cpu": frozenset({"narrow"}),
}
"""The laws that hold for a compiler."""

MANY = 64
"""A branch through which more values pass is copied (the law ``copies``)."""

# Equations that only wrap others.
WRAPPERS = set(
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vmap_call checkpoint remat2"
    " shard_map".split()
)
# They move nothing: the result is the operand.
SAME = set("pvary pcast name optimization_barrier stop_gradient reshape squeeze expand_dims copy_p".split())
SAME |= {"reduce_precision"}  # of what a remat policy saves, to the precision that it has
# They move or repeat elements; the other cheap ones work element by element.
MOVES = set("transpose slice concatenate pad rev dynamic_slice split broadcast_in_dim".split())
CHEAP = SAME | MOVES
CHEAP |= set(
    "add sub mul div neg exp exp2 log log1p logistic tanh max min pow integer_pow sqrt rsqrt square".split()
)
CHEAP |= set("add_any mul_any select_n convert_element_type abs sign clamp is_finite erf".split())
CHEAP |= set("eq ne lt le gt ge and or not xor rem floor ceil round sin cos tan iota axis_index copy".split())
CHEAP |= set("shift_left shift_right_logical sharding_constraint device_put full".split())
# They read what does not exist otherwise.
REDUCE = {f"reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or")} | {"argmax", "argmin"}
GATHER, SCATTER = {"all_gather", "all_gather_invariant"}, {"reduce_scatter", "psum_scatter"}
SUM = {"psum", "psum2", "psum_invariant"}
COLLECTIVE = GATHER | SCATTER | SUM | {"pmax", "pmin", "ppermute", "all_to_all", "ragged_all_to_all"}
UPDATE = SUM | {"dynamic_update_slice", "scatter", "scatter-add"}
LOOP = {"scan", "while", "cond"}


class Value:
    """A result or an input: its bytes, and what it is."""

    def __init__(self, aval: Any, name: str):
        shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
        self.bytes = math.prod(shape) * (getattr(dtype, "itemsize", 0) or 0)
        self.what = f"{dtype}[{','.join(map(str, shape))}] {name}"


@dataclasses.dataclass(eq=False)
class Op:
    """An equation: its operands (None: a literal), its results, and the programs inside it."""

    name: str
    operands: list[Value | None]
    results: list[Value]
    inner: list[Any]
    params: dict[str, Any]

    cheap = property(lambda self: self.name in CHEAP)

    @property
    def turns_at_once(self) -> int:
        """How many turns of a scan are written out in its body."""
        return max(1, min(self.params["unroll"], self.params["length"])) if self.name == "scan" else 1

    def carried(self) -> tuple[int, int]:
        """Where in a scan's or a while's operands what it carries begins, and how much that is."""
        if self.name == "scan":
            return self.params["carried"]
        return len(self.operands) - len(self.results), len(self.results)


class Program:
    """The equations of a jaxpr in a row, as XLA has them after inlining and taking equal ones together."""

    def __init__(self, jaxpr: Any, laws: frozenset[str], loop: Op | None = None):
        self.ops: list[Op] = []
        self._known: dict[tuple, list[Value | None]] = {}
        fresh = lambda variables: [Value(v.aval, "input") for v in variables]
        self.inputs = fresh(jaxpr.invars)
        given: list[Value | None] = [*self.inputs]
        carried, stacked = list[Value | None](), list[Value | None]()
        first, many = loop.carried() if loop else (0, 0)
        self.turns = loop.turns_at_once if loop else 0  # that are written out, if it is a loop's body
        for turn in range(max(1, self.turns)):
            if turn:  # of a loop that is unrolled: the same again, from where the last left off
                slices = fresh(jaxpr.invars[first + many :])
                given = [*given[:first], *carried, *slices]
                self.inputs += slices
            values = dict(zip(jaxpr.invars, given, strict=True))
            values |= {v: Value(v.aval, "constant") for v in jaxpr.constvars}
            found = self._add(jaxpr, values, "", 0)
            carried = found[:many]
            stacked += found[many:]
        self.results = carried + stacked
        self._index()
        if "narrow" in laws and self._narrow():
            self._index()
        if "added" in laws and self._add_to():
            self._index()

    def _index(self) -> None:
        self.made = {v: i for i, op in enumerate(self.ops) for v in op.results}
        self.readers: dict[Value, list[int]] = {}
        for i, op in enumerate(self.ops):
            for v in filter(None, op.operands):
                self.readers.setdefault(v, []).append(i)

    def _add(self, jaxpr: Any, values: dict, scope: str, fence: int) -> list[Value | None]:
        read = lambda v: None if hasattr(v, "val") else values[v]
        for eqn in jaxpr.eqns:
            name, where = eqn.primitive.name, f"{scope}/{eqn.source_info.name_stack}"
            operands, inner = [read(v) for v in eqn.invars], _programs(eqn)
            if name in WRAPPERS:
                (body,) = inner[:1]
                given = dict(zip(body.invars, operands[len(operands) - len(body.invars) :], strict=True))
                given |= {v: Value(v.aval, "constant") for v in body.constvars}
                # What is recomputed on purpose is not taken together with the first time.
                apart = len(self.ops) + 1 if eqn.params.get("prevent_cse") else fence
                found = self._add(body, given, where, apart)
            elif (view := _same(eqn, operands)) is not None:
                found = view
            else:
                # Zeros are made where they are read, each time again.
                alone = name in LOOP | COLLECTIVE or bool(inner) or not any(operands)
                key = () if alone else (name, fence, _names(eqn, operands), str(eqn.params))
                if key not in self._known or alone:
                    made = [Value(v.aval, f"{name} {where}") for v in eqn.outvars]
                    more = {"carried": _carried(eqn, inner[0])} if name == "scan" else {}
                    self.ops.append(Op(name, operands, made, inner, eqn.params | more))
                    self._known[key] = [*made]
                found = self._known[key]
            values.update(zip(eqn.outvars, found, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _narrow(self) -> bool:
        """Let products write what their one reader makes of them; tells whether any does."""
        gone, ends = set[int](), set(self.results)
        for op in self.ops:
            readers = self.readers.get(op.results[0], []) if op.name == "dot_general" else []
            if len(readers) != 1 or op.results[0] in ends:
                continue
            reader = self.ops[readers[0]]
            if reader.name == "convert_element_type" and reader.results[0].bytes < op.results[0].bytes:
                op.results = reader.results
                gone.add(readers[0])
        self.ops = [op for i, op in enumerate(self.ops) if i not in gone]
        return bool(gone)

    def _add_to(self) -> bool:
        """Let products add what they make to what is there; tells whether any does."""
        gone, ends = set[int](), set(self.results)
        for i, op in enumerate(self.ops):
            product = op.results[0]
            readers = self.readers.get(product, []) if op.name == "dot_general" else []
            if len(readers) != 1 or product in ends or readers[0] in gone:
                continue
            reader = self.ops[readers[0]]
            others = [v for v in reader.operands if v and v is not product]
            sums = reader.name in ("add", "add_any") and reader.results[0].bytes == product.bytes
            if sums and len(others) == 1 and self.made.get(others[0], -1) < i:
                op.operands, op.results = [*op.operands, others[0]], reader.results
                gone.add(readers[0])
        self.ops = [op for i, op in enumerate(self.ops) if i not in gone]
        return bool(gone)

    def constants(self) -> set[Value]:
        """Values that follow from nothing, such as zeros."""
        found = set[Value]()
        for op in self.ops:
            if op.cheap and all(v is None or v in found for v in op.operands):
                found.update(op.results)
        return found

    def sources(self, value: Value, real: set[Value]) -> Iterable[Value]:
        """Give the values in memory from which a cheap one follows element by element."""
        todo, seen = [value], {value}
        while todo:
            op = self.ops[self.made[todo.pop()]]
            for v in filter(None, op.operands if op.name not in MOVES else ()):
                if v not in seen:
                    seen.add(v)
                    if v not in self.made or v in real:
                        yield v
                    else:
                        todo.append(v)


def _programs(eqn: Any) -> list[Any]:
    """List the programs inside an equation."""
    leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
    return [getattr(x, "jaxpr", x) for x in leaves if hasattr(x, "eqns")]


def _same(eqn: Any, operands: list[Value | None]) -> list[Value | None] | None:
    """Give the operands of which the equation's results are no more than another view."""
    name, size = eqn.primitive.name, lambda v: math.prod(v.aval.shape)
    if name in SAME and None not in operands and len(operands) == len(eqn.outvars):
        return operands
    if name in REDUCE and operands[0] and size(eqn.invars[0]) == size(eqn.outvars[0]):
        return operands[:1]  # over a dim of one
    if name in ("slice", "dynamic_slice", "dynamic_update_slice"):  # of one piece that is the whole
        part = int(name == "dynamic_update_slice")
        if size(eqn.invars[0]) == size(eqn.invars[part]) == size(eqn.outvars[0]) and operands[part]:
            return [operands[part]]
    return None


def _carried(eqn: Any, body: Any) -> tuple[int, int]:
    """Where in a scan's operands its carry begins, and how much it is; told by the shapes, since versions of
    JAX name it differently: what is sliced or stacked has one dim more outside than in the body."""
    whole = lambda out, inside: [a.aval.shape == b.aval.shape for a, b in zip(out, inside, strict=True)]
    many = sum(whole(eqn.outvars, body.outvars))
    return sum(whole(eqn.invars, body.invars)) - many, many


def _names(eqn: Any, operands: list[Value | None]) -> tuple:
    pairs = zip(operands, eqn.invars, strict=True)
    return tuple(repr(getattr(x, "val", None)) if v is None else id(v) for v, x in pairs)


# ------------------------------------------------------------------------------------- what exists, and when


def existing(program: Program, laws: frozenset[str]) -> set[Value]:
    """The values that lie in memory."""
    ends, real = set(program.results), set[Value]()
    constants = program.constants()
    for op in program.ops:
        for v in op.results:
            readers = [program.ops[j] for j in program.readers.get(v, [])]
            if not op.cheap or v in ends:
                exists = True
            elif v in constants:  # made where it is read, but for what a loop or an update starts from
                exists = any(_starts(reader, v) for reader in readers)
            elif (
                "prologue" in laws and op.name != "transpose" and [r.name for r in readers] == ["dot_general"]
            ):
                exists = False
            elif "operands" in laws and {r.name for r in readers} == {"dot_general"}:
                exists = False
            else:
                exists = any(_wants(reader, v) for reader in readers)
            if exists:
                real.add(v)
    return real


def _wants(reader: Op, value: Value) -> bool:
    """Whether an equation reads a value from memory. (What an update puts in place is written there.)"""
    if reader.name == "dynamic_update_slice":
        return value is not reader.operands[1]
    return not reader.cheap and reader.name not in REDUCE


def _starts(reader: Op, value: Value) -> bool:
    if reader.name in ("scan", "while"):
        first, many = reader.carried()
        return value in reader.operands[first : first + many]
    return not reader.cheap and reader.name not in REDUCE | {"cond"}


def schedule(program: Program, laws: frozenset[str]) -> list[int]:
    """The order in which the equations run."""
    ops, many = program.ops, len(program.ops)
    place = [float(i) for i in range(many)]
    after = lambda i: [j for v in ops[i].results for j in program.readers.get(v, [])]
    everything = "late" in laws or "turns" in laws and program.turns > 1
    if everything or "loops" in laws and not program.turns:
        waited = [False] * many
        for i in reversed(range(many)):
            waited[i] = any(waited[j] or ops[j].name not in CHEAP | COLLECTIVE | REDUCE for j in after(i))
            late = not ops[i].cheap and ops[i].name not in REDUCE if everything else ops[i].name in LOOP
            if late and not waited[i]:
                place[i] += many
    constants = program.constants()
    for i in reversed(range(many)):
        if constants.issuperset(ops[i].results):
            place[i] = min([place[j] for j in after(i)], default=place[i])
    for i in range(many):
        known = [place[program.made[v]] for v in ops[i].operands if v in program.made]
        place[i] = max([place[i], *known])
    return sorted(range(many), key=lambda i: (place[i], i))


def last_reads(program: Program, order: list[int], real: set[Value]) -> dict[Value, int]:
    """The place in the order at which each value is read last; behind the end if it is a result."""
    place = {i: n for n, i in enumerate(order)}
    ends, last = set(program.results), dict[Value, int]()

    def until(v: Value, made: int) -> int:
        reads = [made] + [place[j] for j in program.readers.get(v, [])]
        for j in program.readers.get(v, []):  # what does not exist is read where it is wanted
            reads += [last[r] for r in program.ops[j].results if program.ops[j].cheap and r not in real]
        return len(order) if v in ends else max(reads)

    for i in reversed(order):
        for v in program.ops[i].results:
            last[v] = until(v, place[i])
    return last | {v: until(v, -1) for v in program.inputs}


# ---------------------------------------------------------------------------------------- the fullest moment


@dataclasses.dataclass(frozen=True)
class Peak:
    """The most bytes that a program holds at once besides what it is given.

    ``held`` lists what is alive then, the largest first, as (bytes, what). ``reused`` tells of each result in
    which input's memory it lies, or None.
    """

    bytes: int
    held: tuple[tuple[int, str], ...] = ()
    reused: tuple[int | None, ...] = ()


@dataclasses.dataclass(eq=False)
class _Buffer:
    bytes: int
    end: int
    what: str


class _Memory:
    """What is alive, and the most there ever was."""

    def __init__(self):
        self.live: list[_Buffer] = []
        self.of: dict[Value, _Buffer] = {}
        self.total, self.peak = 0, Peak(0)

    def add(self, size: int, end: int, what: str) -> _Buffer:
        self.live.append(buffer := _Buffer(size, end, what))
        self.total += size
        return buffer

    def watch(self, inside: Peak) -> None:
        """Note what is alive now, and for the moment ``inside``."""
        if self.total + inside.bytes > self.peak.bytes:
            held = (*((b.bytes, b.what) for b in self.live), *inside.held)
            self.peak = Peak(self.total + inside.bytes, held)

    def drop(self, now: int) -> None:
        self.total -= sum(b.bytes for b in self.live if b.end <= now)
        self.live = [b for b in self.live if b.end > now]


class Liveness:
    """Measures programs under some laws."""

    def __init__(self, laws: frozenset[str]):
        self.laws = laws
        self._known: dict[tuple, Peak] = {}
        self._wanted: dict[tuple, bool] = {}
        self._programs: dict[
            tuple, tuple[Program, Any]
        ] = {}  # with their jaxprs, so that no other has the id

    def program(self, jaxpr: Any, loop: Op | None = None) -> Program:
        """The program of a jaxpr, read once."""
        key = id(jaxpr), loop is not None and loop.turns_at_once > 1
        if key not in self._programs:
            self._programs[key] = program, _ = Program(jaxpr, self.laws, loop), jaxpr
            if "rounded" in self.laws:
                self._round(program)
        return self._programs[key][0]

    def _round(self, program: Program) -> None:
        """Let what is gathered have the bytes in which all its readers want it."""
        for v in (v for op in program.ops if op.name in GATHER for v in op.results):
            shares = [self._share(program.ops[i], v) for i in program.readers.get(v, [])]
            if shares and all(shares):
                v.bytes = int(v.bytes * max(shares))

    def fullest(self, jaxpr: Any, donated: frozenset[int] = frozenset(), loop: Op | None = None) -> Peak:
        """The peak of a program, which may write over its ``donated`` inputs; the body of a scan if ``loop``
        is one."""
        key = id(jaxpr), donated
        if key not in self._known:
            self._known[key] = self._measure(self.program(jaxpr, loop), donated, loop)
        return self._known[key]

    def whole(self, jaxpr: Any) -> Peak:
        """The peak of a step. What its loops convert is held all through it."""
        peak, program, copies = self.fullest(jaxpr), self.program(jaxpr), list[tuple[int, str]]()
        for v in program.inputs if "converted" in self.laws else ():
            share = max([self._converted(program.ops[i], v) for i in program.readers.get(v, [])], default=0)
            copies += [(int(share * v.bytes), f"converted {v.what}")] * bool(share)
        held = sorted([*peak.held, *copies], key=lambda row: -row[0])
        return Peak(peak.bytes + sum(size for size, _ in copies), tuple(held), peak.reused)

    def _measure(self, program: Program, donated: frozenset[int], loop: Op | None) -> Peak:
        memory = _Memory()
        real = existing(program, self.laws)
        order = schedule(program, self.laws)
        last, end = last_reads(program, order, real), len(order)
        for i in donated:  # the caller counts it
            memory.of[program.inputs[i]] = _Buffer(0, last[program.inputs[i]], "")
        stacked = set[Value]()
        if loop:
            first, many = loop.carried()
            carried = dict(zip(program.results[:many], program.inputs[first : first + many], strict=True))
            stacked = {v for v in program.results[many:] if v and v not in carried and v in program.made}
            stacked = {v for v in stacked if not program.ops[program.made[v]].cheap}
            for v in self._ahead(program, loop):
                memory.add(v.bytes, end, f"next turn's {v.what}")
        elif "stacks" in self.laws:
            for v in program.inputs:
                if any(self._wants_outermost(program.ops[i], v) for i in program.readers.get(v, [])):
                    memory.add(v.bytes, end, f"copy of {v.what}")
        for now, i in enumerate(order):
            op = program.ops[i]
            new = [v for v in op.results if v in real]
            taken, inside = self._takes(program, op, new, real, memory, now)
            for v in new:
                over = now if v in stacked else last[v]  # what is stacked goes to its place at once
                if loop and v in carried and v not in taken:  # its new value is written where the old one was
                    old = memory.of.get(carried[v])
                    if old and (old.end < now or op.cheap and old.end == now):
                        taken[v] = old
                if v in taken:
                    memory.of[v] = taken[v]
                    taken[v].end = max(taken[v].end, over)
                else:
                    memory.of[v] = memory.add(v.bytes, over, v.what)
            memory.watch(inside)
            memory.drop(now)
            if copied := self._copied(program, op):
                memory.watch(Peak(copied[0].bytes, ((copied[0].bytes, f"copy of {copied[0].what}"),)))
        given = {id(memory.of[program.inputs[i]]): i for i in donated}
        reused = tuple(given.get(id(memory.of.get(v))) if v else None for v in program.results)
        held = tuple(sorted(memory.peak.held, key=lambda row: -row[0]))
        return Peak(memory.peak.bytes, held, reused)

    def _takes(self, program, op: Op, new: list[Value], real, memory: _Memory, now: int):
        """Whose memory the results of an equation take, and what it holds while it runs."""
        taken: dict[Value, _Buffer] = {}

        def free(v: Value | None) -> bool:
            buffer = memory.of.get(v) if v else None
            return buffer is not None and buffer.end == now and buffer not in taken.values()

        def take(pairs: Iterable[tuple[Value, Value | None]]) -> None:
            taken.update({result: memory.of[v] for result, v in pairs if v and free(v)})

        inside = Peak(0)
        if op.name in ("scan", "while"):
            first, many = op.carried()
            for pair in zip(op.results[:many], op.operands[first : first + many], strict=True):
                take([pair])
            inside = self.fullest(op.inner[-1], frozenset(range(first, first + many)), _as_scan(op))
            whole = self._summed(op) if "sums" in self.laws else []
            inside = Peak(inside.bytes + sum(size for size, _ in whole), (*inside.held, *whole))
            turned = [v for v in op.operands if v and v in program.made and self._stacks_turned(program, v)]
            if "stacks" in self.laws and turned:
                most = max(turned, key=lambda v: v.bytes)
                held = (*inside.held, (most.bytes, f"copy of {most.what}"))
                inside = dataclasses.replace(inside, bytes=inside.bytes + most.bytes, held=held)
        elif op.name == "cond":
            donated = frozenset(i for i, v in enumerate(op.operands[1:]) if free(v))
            branches = [self.fullest(branch, donated) for branch in op.inner]
            for result, *sources in zip(op.results, *(b.reused for b in branches), strict=True):
                if len({*sources}) == 1 and sources[0] is not None:
                    if "copies" not in self.laws or len(op.results) <= MANY:
                        take([(result, op.operands[1 + sources[0]])])
            inside = max(branches, key=lambda b: b.bytes)
            own = sum(v.bytes for v in new if v not in taken)  # a branch makes the results
            inside = dataclasses.replace(inside, bytes=max(0, inside.bytes - own))
        elif op.name == "dot_general":  # with what it is added to
            take(zip(op.results, op.operands[2:], strict=False))
        elif op.name in UPDATE:
            for pair in zip(op.results, op.operands, strict=False):
                take([pair])
        elif op.cheap:
            for v in new:
                fits = (s for s in program.sources(v, real) if s.bytes == v.bytes and free(s))
                take([(v, next(fits, None))])
        return taken, inside

    def _summed(self, loop: Op) -> list[tuple[int, str]]:
        """What a loop adds up before it is scattered: its bytes above those of the carry, and its name."""
        body, found = self.program(loop.inner[-1], _as_scan(loop)), list[tuple[int, str]]()
        first, many = loop.carried()
        maker = lambda v: body.ops[body.made[v]] if v in body.made else None
        size = lambda v: v.bytes if v else 0
        for result, carry in zip(body.results[:many], body.inputs[first : first + many], strict=True):
            total = maker(result)
            if total is None or total.name not in ("add", "add_any") or carry not in total.operands:
                continue
            op = next((maker(v) for v in total.operands if v is not carry), None)
            while op and op.name in SUM | {"convert_element_type"}:
                op = maker(op.operands[0])
            if op and op.name in SCATTER:
                times = size(op.operands[0]) // size(op.results[0])
                found.append(((times - 1) * carry.bytes, f"whole {carry.what}"))
        return found

    def _copied(self, program: Program, op: Op) -> list[Value]:
        """What a loop gives and a reduce-scatter wants in another order, the largest first: copies take the
        places of the originals one by one."""
        if op.name not in LOOP or "scatters" not in self.laws:
            return []
        readers = lambda v: [program.ops[i] for i in program.readers.get(v, [])]
        turned = lambda v: any(r.name in SCATTER and r.params["scatter_dimension"] for r in readers(v))
        return sorted(filter(turned, op.results), key=lambda v: -v.bytes)

    def _ahead(self, program: Program, loop: Op) -> list[Value]:
        """What a turn of a loop gathers for the next one: weights that are sliced by the turn's number."""
        if "prefetch" not in self.laws or loop.params["length"] < 2:
            return []
        sliced, found = set(program.inputs[sum(loop.carried()) :]), []
        for op in program.ops:
            if sliced.intersection(filter(None, op.operands)):
                if op.name in MOVES | {"convert_element_type"}:
                    sliced.update(op.results)
                elif op.name in GATHER:
                    found += op.results
        return found

    def _wants_outermost(self, op: Op, value: Value) -> bool:
        """Whether a gather inside a loop wants another dim of this operand outermost."""
        if op.name not in LOOP:
            return False
        places = [i - len(op.operands) for i, v in enumerate(op.operands) if v is value]
        return any(self._gathered(body, len(body.invars) + i) for body in op.inner for i in places)

    def _converted(self, op: Op, value: Value) -> float:
        """The share of a stack's bytes that is left when a loop has converted its slices; 0: none does."""
        if op.name not in LOOP:
            return 0
        places = [i - len(op.operands) for i, v in enumerate(op.operands) if v is value]
        return max([self._narrowed(b, len(b.invars) + i) for b in op.inner for i in places], default=0)

    def _share(self, op: Op, value: Value) -> float:
        """The share of a value's bytes that an equation reads in a narrower type; 0: it reads them all."""
        if op.name == "dot_general" and "rounded" in self.laws and value.what.startswith("float32"):
            return 0.5 * (op.params["precision"] is None)
        return self._converted(op, value)

    def _narrowed(self, jaxpr: Any, place: int) -> float:
        if place < 0:
            return 0
        program = self.program(jaxpr)
        reached = {program.inputs[place]}
        for op in program.ops:
            for v in reached.intersection(filter(None, op.operands)):
                if op.name == "convert_element_type" and op.results[0].bytes < v.bytes:
                    return op.results[0].bytes / v.bytes
                if op.name in MOVES | GATHER:
                    reached.update(op.results)
                if share := self._share(op, v):
                    return share
        return 0

    def _stacks_turned(self, program: Program, value: Value) -> bool:
        """Whether a loop stacked what it gathered along another dim than the first."""
        op = program.ops[program.made[value]]
        if op.name != "scan":
            return False
        body = self.program(op.inner[0])
        result = body.results[op.results.index(value)]
        maker = body.ops[body.made[result]] if result in body.made else op
        return maker.name in GATHER and bool(maker.params["all_gather_dimension"])

    def _gathered(self, jaxpr: Any, place: int) -> bool:
        if place < 0:
            return False
        program, key = self.program(jaxpr), (id(jaxpr), place)
        if key not in self._wanted:
            reached, found = {program.inputs[place]}, False
            for op in program.ops:
                read = reached.intersection(filter(None, op.operands))
                if read and op.name in GATHER:
                    found |= bool(op.params["all_gather_dimension"])
                elif read and op.cheap:
                    reached.update(op.results)
                found |= any(self._wants_outermost(op, v) for v in read)
            self._wanted[key] = found
        return self._wanted[key]


def _as_scan(op: Op) -> Op | None:
    return op if op.name == "scan" else None


def traced_peak(
    step: Step, batch_size: int, seq_len: int, target: str | frozenset[str] = "gpu"
) -> Peak | None:
    """The temporaries of a step's fullest moment on one device, traced and not compiled; ``target`` is one of
    `TARGETS`, or the laws themselves.

    None where XLA's partitioner writes the collectives: what it will make of a program is not in its
    equations.
    """
    if step.plan.reading != "manual":
        return None
    traced = step.run.trace(step.abstract_state, step.abstract_batch(batch_size, seq_len)).jaxpr.jaxpr
    laws = TARGETS[{"cuda": "gpu", "rocm": "gpu"}.get(target, target)] if isinstance(target, str) else target
    liveness = Liveness(laws)
    peaks = [liveness.whole(body) for body in _mapped(traced)]
    return max(peaks, key=lambda peak: peak.bytes)


def _mapped(jaxpr: Any) -> Iterable[Any]:
    """Give the programs inside shard_map: there shapes are those of one device."""
    for eqn in jaxpr.eqns:
        for body in _programs(eqn):
            if eqn.primitive.name == "shard_map":
                yield body
            elif eqn.primitive.name in WRAPPERS:
                yield from _mapped(body)
