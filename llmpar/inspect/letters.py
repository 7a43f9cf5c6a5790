"""Follow the letters of arguments' dims through the text of a program, only as far as that is certain. No JAX
is needed.

A value's letters are one word for each dim: a letter, "" where none is known, "?" where two disagree. They go
forward, from operands to results, and into loops, branches and calls, until nothing changes.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from string import ascii_letters
from typing import Any

from llmpar.inspect.hlo import CALLS, Instruction, Module, integers, shapes
from llmpar.inspect.moves import layout_from_text
from llmpar.plan.layout import Dim, Layout

Letters = tuple[str, ...]
Known = dict[tuple[str, str], list[Letters]]
"""The letters of each array of a value, by its computation and its name."""


def given_letters(module: Module, dims: Mapping[str, Any]) -> Known:
    """Read the letters that a user gives, "b s d" by argument. Raises ValueError for an argument that the
    program has not, and for what is not one letter for each of its dims."""
    entry, known = module.computations[module.entry], Known()
    named = ((op.scope.replace("\\'", "'"), name) for name, op in entry.items() if op.scope)
    names = {argument: name for argument, name in named if entry[name].opcode == "parameter"}
    for argument, words in dims.items():
        if argument not in names:
            raise ValueError(
                f"dims names '{argument}', and the program uses no argument of that name; it has"
                f" {', '.join(names) or 'none with a name'}"
            )
        letters = str(words).split()
        rank = len(shapes(entry[names[argument]].type)[0][1])
        if len({*letters} & {*ascii_letters}) != len(letters) or len(letters) != rank:
            raise ValueError(
                f"dims gives {words!r} for '{argument}', which has {rank} dims; give a letter for each, every"
                " letter once, as 'b s d'"
            )
        known[module.entry, names[argument]] = [tuple(letters)]
    return known


def followed(module: Module, dims: Mapping[str, Any]) -> Known:
    """Return the letters of all values that follow from those of the arguments."""
    every = [(c, name, op) for c, ops in module.computations.items() for name, op in ops.items()]
    known = {(c, name): [("",) * len(x) for _, x in shapes(op.type)] for c, name, op in every}
    known |= given_letters(module, dims)
    before = Known()
    while before != known:
        before = dict(known)
        for comp, name, op in every:
            for place, rows in _follows(module, comp, name, op, known):
                if [*map(len, rows)] == [*map(len, known[place])]:
                    known[place] = [*map(_joined, known[place], rows)]
    return known


def _joined(one: Letters, other: Letters) -> Letters:
    """Return what is known of the same dims in two ways."""
    return tuple(
        a if a == b or not b else b if not a else "?" for a, b in zip(one, other, strict=True)
    )


def _follows(
    module: Module, comp: str, name: str, op: Instruction, known: Known
) -> Iterator[tuple[tuple[str, str], list[Letters]]]:
    """List the values whose letters follow from an operation: its results, and what its callees are given."""
    part = lambda rows, i: rows if i is None else rows[i : i + 1]
    operands = [part(known.get((comp, value), []), i) for value, i in op.operands]
    callees = [c for c in op.called(*CALLS.get(op.opcode, ())) if c in module.computations]
    if not callees:
        yield (comp, name), _results(module, comp, op, operands)
    # an iteration is given what the loop begins with, or what the last one returns
    if op.opcode == "while":
        yield (comp, name), operands[0]
        operands = [known[comp, name]]
    for i, callee in enumerate(callees):
        passed = operands[i + 1 : i + 2] if op.opcode == "conditional" else operands
        inside = module.computations[callee].items()
        taken = [(n, int(o.inside)) for n, o in inside if o.opcode == "parameter"]
        yield from (((callee, n), passed[k]) for n, k in taken)
        if callee not in op.called("condition"):
            yield (comp, name), known[callee, module.roots[callee]]


def _results(
    module: Module, comp: str, op: Instruction, operands: list[list[Letters]]
) -> list[Letters]:
    """Return the letters of an operation's results; none where it is not known what it does with dims."""
    rows, results = sum(operands, []), list[Letters]()
    if op.opcode in ("tuple", "opt-barrier"):
        return rows
    if op.opcode == "get-tuple-element":
        return rows[integers(op.attrs, ", index=")[0] :][:1]
    if op.opcode == "dot":
        return [_product(op, *rows)]
    if op.opcode == "gather":
        return [_looked_up(op, rows[0], rows[1], module.shape_of(comp, op, 0))]
    dims = [int(d) for d in op.called("dimensions")]
    values = shapes(op.type)
    for k, (_, shape) in enumerate(values if op.opcode in _RULES else ()):
        taken = range(len(rows)) if len(values) == 1 else [k]
        does = lambda i, to=shape: _RULES[op.opcode](
            rows[i], dims, module.shape_of(comp, op, i), to
        )
        fits = [row for row in map(does, taken) if len(row) == len(shape)]
        results.append(functools.reduce(_joined, fits, ("",) * len(shape)))
    return results


def _reshaped(row: Letters, _: Any, before: Sequence[int], after: Sequence[int]) -> Letters:
    """Return the letters of a reshaped value. A dim stays itself if as many elements as before are outside of
    it and in it; behind a dim of 1, which may be a whole dim's shard, it may be a part of another one."""
    if before == after:
        return row
    outside = lambda shape, i: (math.prod(shape[:i]), shape[i])
    alone = lambda shape, i: shape[i] > 1 and (i == 0 or shape[i - 1] != 1)
    was = {outside(before, i): x for i, x in enumerate(row) if alone(before, i)}
    now = lambda i: was.get(outside(after, i), "") if alone(after, i) else ""
    return tuple(map(now, range(len(after))))


def _product(op: Instruction, left: Letters, right: Letters) -> Letters:
    """Return the letters of a matmul: those of both factors' batch dims, and of the left and the right dims
    that are not summed over."""
    of = lambda key: [int(d) for d in op.called(f"{key}_dims")]
    batch = zip(of("lhs_batch"), of("rhs_batch"), strict=True)
    used = {side: of(f"{side}_batch") + of(f"{side}_contracting") for side in ("lhs", "rhs")}
    free = lambda row, side: [x for d, x in enumerate(row) if d not in used[side]]
    both = [_joined((left[i],), (right[j],))[0] for i, j in batch]
    return (*both, *free(left, "lhs"), *free(right, "rhs"))


def _looked_up(op: Instruction, table: Letters, places: Letters, shape: Sequence[int]) -> Letters:
    """Return the letters of rows of a table: those of the places, and of the dims that are taken whole."""
    of = lambda key: [int(d) for d in op.called(key)]
    gone = of("collapsed_slice_dims") + of("operand_batching_dims")
    last = of("index_vector_dim")
    taken = enumerate(zip(table, shape, of("slice_sizes"), strict=True))
    inner = iter([x if n == m else "" for d, (x, n, m) in taken if d not in gone])
    outer = iter([x for d, x in enumerate(places) if [d] != last])
    rank = len(shapes(op.type)[0][1])
    return tuple(next(inner if d in of("offset_dims") else outer) for d in range(rank))


def _by_size(row: Letters, _: Any, before: Sequence[int], after: Sequence[int]) -> Letters:
    """Return the letters of the dims that keep their sizes."""
    return tuple(x if n == m else "" for x, n, m in zip(row, before, after, strict=False))


# What an operation does with one operand's letters: given are these, the dims that its attributes name, and
# the shapes of operand and result. Operands with another number of dims than the result tell nothing.
_RULES: dict[str, Callable[..., Letters]] = {
    **dict.fromkeys(
        "all-reduce all-gather reduce-scatter collective-permute collective-broadcast".split(),
        lambda row, dims, before, after: row,
    ),
    **dict.fromkeys(
        "slice dynamic-slice dynamic-update-slice pad concatenate reverse sort copy abs add and atan2 cbrt"
        " ceil clamp compare complex convert cosine divide erf exponential exponential-minus-one floor imag"
        " is-finite log log-plus-one logistic maximum minimum multiply negate not or popcnt power real"
        " reduce-precision remainder round-nearest-afz round-nearest-even rsqrt select shift-left"
        " shift-right-arithmetic shift-right-logical sign sine sqrt subtract tan tanh xor".split(),
        _by_size,
    ),
    "transpose": lambda row, dims, before, after: tuple(row[d] for d in dims),
    "broadcast": lambda row, dims, before, after: tuple(
        row[dims.index(d)] if d in dims else "" for d in range(len(after))
    ),
    "reduce": lambda row, dims, before, after: tuple(x for d, x in enumerate(row) if d not in dims),
    **dict.fromkeys(("reshape", "bitcast"), _reshaped),
}


def in_letters(module: Module, known: Known, place: tuple[str, str], arrow: str) -> str:
    """Write a collective's types (`hlo.operand_arrow`) with its operand's letters, ``d/X m -> d m``; '' where
    one of them is not known."""
    ops = module.computations[place[0]]
    sides = [layout_from_text(side) for side in arrow.split(" -> ") if "[" in side]
    name = ops[place[1]].operands[0][0]
    # blocks of an all-to-all are reshaped before it
    near = [name, *(value for value, _ in ops[name].operands)]
    rows = [row for value in near for row in known[place[0], value][:1]]
    row = next((row for row in rows if sides and len(row) == len(sides[0].dims)), ())
    if not row or len({*row} - {"", "?"}) < len(row):
        return ""
    names = lambda side: tuple(Dim(x, dim.axes) for x, dim in zip(row, side.dims, strict=True))
    return " -> ".join(str(Layout(names(side), side.sums)) for side in sides)
