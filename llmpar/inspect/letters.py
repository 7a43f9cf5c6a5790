"""Follow the letters of arguments' dims through the text of a program, only as far as that is certain. No JAX
is needed.

A value's letters are one word for each dim: a letter, "" where none is known, "?" where two disagree. They go
forward, from operands to results, and into loops, branches and calls, until nothing changes.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmpar.inspect.hlo import CALLS, Instruction, Module, Ref, integers, shapes
from llmpar.inspect.moves import layout_from_text
from llmpar.plan.layout import Dim, Layout

Letters = tuple[str, ...]
Place = tuple[str, str]
"""A value: its computation and its name."""
_Known = dict[Place, list[Letters]]
_COLLECTIVES = set(
    "all-reduce all-gather reduce-scatter collective-permute collective-broadcast".split()
)
_SLICES = set(
    "slice dynamic-slice dynamic-update-slice pad concatenate reverse sort copy opt-barrier".split()
)
_ELEMENTWISE = set(
    "abs add and atan2 cbrt ceil clamp compare complex convert cosine divide erf exponential"
    " exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum multiply negate"
    " not or popcnt power real reduce-precision remainder round-nearest-afz round-nearest-even rsqrt select"
    " shift-left shift-right-arithmetic shift-right-logical sign sine sqrt subtract tan tanh xor".split()
)
_IN_PLACE = _COLLECTIVES | _SLICES | _ELEMENTWISE
"""Operations whose results have the dims of their operands, at the same places."""


def arguments(module: Module) -> dict[str, str]:
    """Return the arguments of a program by the names that JAX gives them, with their names in the text."""
    entry = module.computations[module.entry].items()
    named = {op.scope.replace("\\'", "'"): name for name, op in entry if op.opcode == "parameter"}
    return {argument: name for argument, name in named.items() if argument}


def given(module: Module, dims: Mapping[str, Any]) -> _Known:
    """Read the letters that a user gives, "b s d" by argument. Raises ValueError for an argument that the
    program has not, for another number of letters than it has dims, and for what are no letters."""
    names, known = arguments(module), _Known()
    for argument, words in dims.items():
        if argument not in names:
            has = ", ".join(names) or "no argument with a name"
            raise ValueError(
                f"dims names '{argument}', and the program uses no argument of that name; it has {has}"
            )
        letters = tuple(str(words).split())
        distinct = len({*letters}) == len(letters)
        if not distinct or not all(re.fullmatch("[A-Za-z]", letter) for letter in letters):
            raise ValueError(
                f"dims gives {words!r} for '{argument}'; give one letter for each dim, each once, as 'b s d'"
            )
        (_, shape), *_ = shapes(module.computations[module.entry][names[argument]].type)
        if len(letters) != len(shape):
            raise ValueError(
                f"dims gives {len(letters)} letters, '{words}', for '{argument}', which has {len(shape)} dims"
            )
        known[module.entry, names[argument]] = [letters]
    return known


def followed(module: Module, dims: Mapping[str, Any]) -> _Known:
    """Return the letters of every array of every value that follow from those of the arguments."""
    known = {
        (comp, name): [("",) * len(shape) for _, shape in shapes(op.type)]
        for comp, ops in module.computations.items()
        for name, op in ops.items()
    }
    known |= given(module, dims)
    before: _Known = {}
    while before != known:
        before = dict(known)
        for comp, ops in module.computations.items():
            for name, op in ops.items():
                for place, rows in _follows(module, comp, name, op, known):
                    if [*map(len, rows)] == [*map(len, known[place])]:
                        known[place] = [*map(_joined, known[place], rows)]
    return known


def _joined(one: Letters, other: Letters) -> Letters:
    """Join what is known of the same dims in two ways."""
    return tuple(
        a if a == b or not b else b if not a else "?" for a, b in zip(one, other, strict=True)
    )


def _follows(
    module: Module, comp: str, name: str, op: Instruction, known: _Known
) -> Iterator[tuple[Place, list[Letters]]]:
    """List the values whose letters follow from an operation: its results, and what its callees are given."""
    operands = [_of(known, comp, ref) for ref in op.operands]
    if op.opcode not in CALLS:
        yield (comp, name), _results(module, comp, op, operands)
        return
    if (
        op.opcode == "while"
    ):  # given to an iteration: what the loop begins with, or the last one returns
        yield (comp, name), operands[0]
        operands = [known[comp, name]]
    for i, callee in enumerate(c for c in op.called(*CALLS[op.opcode]) if c in module.computations):
        inside = module.computations[callee].items()
        passed = operands[i + 1 : i + 2] if op.opcode == "conditional" else operands
        yield from (
            ((callee, n), passed[int(o.inside)]) for n, o in inside if o.opcode == "parameter"
        )
        if callee not in op.called("condition"):
            yield (comp, name), known[callee, module.roots[callee]]


def _of(known: _Known, comp: str, ref: Ref) -> list[Letters]:
    """Return the letters of a value's arrays, or of one part of a tuple."""
    rows = known.get((comp, ref[0]), [])
    return rows if ref[1] is None else rows[ref[1] : ref[1] + 1]


def _results(
    module: Module, comp: str, op: Instruction, operands: list[list[Letters]]
) -> list[Letters]:
    """Return the letters of an operation's results; none where it is not known what it does with dims."""
    shape = (shapes(op.type) or [("", ())])[0][1]
    dims = [int(d) for d in op.called("dimensions")]
    first: Letters = operands[0][0] if operands and operands[0] else ()
    match op.opcode:
        case "tuple":
            return sum(operands, [])
        case "get-tuple-element":
            i = integers(op.attrs, ", index=")[0]
            return operands[0][i : i + 1]
        case "transpose":
            return [tuple(first[d] for d in dims)]
        case "broadcast":
            return [tuple(first[dims.index(d)] if d in dims else "" for d in range(len(shape)))]
        case "reduce":
            rows = sum(operands[: len(operands) // 2], [])
            return [tuple(x for d, x in enumerate(row) if d not in dims) for row in rows]
        case "reshape" | "bitcast":
            return [_reshaped(first, module.shape_of(comp, op, 0), shape)]
        case "dot":
            return [_product(op, *sum(operands, []))]
        case "gather":
            return [_looked_up(op, *sum(operands, []), module.shape_of(comp, op, 0), len(shape))]
        case "all-to-all":
            return [tuple("" if d in dims else x for d, x in enumerate(first))]
    if op.opcode not in _IN_PLACE:
        return []
    if len(shapes(op.type)) > 1:  # each of its own operand
        return sum(operands, [])
    rows, whole = [("",) * len(shape)], op.opcode in _COLLECTIVES
    for i, row in enumerate(sum(operands, [])):
        if len(row) == len(shape):
            same = zip(row, module.shape_of(comp, op, i), shape, strict=True)
            rows.append(tuple(x if whole or n == m else "" for x, n, m in same))
    return [functools.reduce(_joined, rows)]


def _reshaped(row: Letters, before: Sequence[int], after: Sequence[int]) -> Letters:
    """Return the letters of a reshaped value. A dim stays itself if as many elements as before are outside of
    it and in it; behind a dim of 1, which may be a whole dim's shard, it may be a part of another one."""
    if before == after:
        return row
    alone = lambda shape: {
        (math.prod(shape[:i]), n): i
        for i, n in enumerate(shape)
        if n > 1 and 1 not in shape[max(i - 1, 0) : i]
    }
    was, now = alone(before), {i: key for key, i in alone(after).items()}
    return tuple(row[was[now[i]]] if now.get(i) in was else "" for i in range(len(after)))


def _product(op: Instruction, left: Letters, right: Letters) -> Letters:
    """Return the letters of a matmul: those of both factors' batch dims, and of the left and the right dims
    that are not summed over."""
    sides = [
        [[int(d) for d in op.called(f"{side}_{kind}_dims")] for kind in ("batch", "contracting")]
        for side in ("lhs", "rhs")
    ]
    batch = zip(sides[0][0], sides[1][0], strict=True)
    both = [_joined((left[i],), (right[j],))[0] for i, j in batch]
    free = lambda row, used: [x for d, x in enumerate(row) if d not in sum(used, [])]
    return (*both, *free(left, sides[0]), *free(right, sides[1]))


def _looked_up(
    op: Instruction, table: Letters, places: Letters, shape: Sequence[int], rank: int
) -> Letters:
    """Return the letters of rows that are looked up in a table: those of the places, and of the table's dims
    that are taken whole."""
    of = lambda key: [int(d) for d in op.called(key)]
    gone = of("collapsed_slice_dims") + of("operand_batching_dims")
    taken = enumerate(zip(table, shape, of("slice_sizes"), strict=True))
    inner = iter([x if n == m else "" for d, (x, n, m) in taken if d not in gone])
    outer = iter([x for d, x in enumerate(places) if [d] != of("index_vector_dim")])
    return tuple(next(inner if d in of("offset_dims") else outer, "") for d in range(rank))


def spelled(module: Module, known: _Known, place: Place, arrow: str) -> str:
    """Write a collective's types (`hlo.operand_arrow`) with its operand's letters, ``d/X m -> d m``; '' where
    one of them is not known."""
    comp, name = place
    ops = module.computations[comp]
    sides = [layout_from_text(side) for side in arrow.split(" -> ") if "[" in side]
    ref = ops[name].operands[0]
    row = _of(known, comp, ref)[0] if sides else ()
    if sides and len(row) != len(sides[0].dims):  # blocks of an all-to-all
        row = (*_of(known, comp, ops[ref[0]].operands[0]), ())[0]
    distinct = len({*row}) == len(row)
    if not row or not distinct or len(row) != len(sides[0].dims) or {"", "?"} & {*row}:
        return ""
    renamed = lambda side: tuple(Dim(x, dim.axes) for x, dim in zip(row, side.dims, strict=True))
    return " -> ".join(str(Layout(renamed(side), side.sums)) for side in sides)
