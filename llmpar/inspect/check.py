"""Check that a parallel program computes what one device computes, and name the line where it does not."""

import contextlib
import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding

from llmpar.inspect.census import text_columns
from llmpar.inspect.explain import noted
from llmpar.inspect.hlo import short_dtype, typed
from llmpar.inspect.look import meshes_in, on_arrays
from llmpar.inspect.twin import (
    ENTER,
    RETURN,
    TYPES,
    Cures,
    Equation,
    Pieces,
    Program,
    between,
    close_hops,
    cut_of,
    cuts_of_shape,
    distance,
    draw_shard,
    equal_along,
    hops,
    on_whole,
    own_shard,
    read,
    run,
    share_draws,
    spreads,
    twins,
)
from llmpar.parallel import _jax
from llmpar.predict.tolerance import FACTOR

# A second run on one device has its arguments changed by so much: how far values move is rounding, too.
_NOISE = 2.0**-22
# So many cures are tried at most for one mistake, and so many mistakes at most: each is compiled.
_TRIED, _ROUNDS = 6, 3
_JUMPS = "round floor ceil sign argmax argmin eq ne lt le gt ge convert_element_type".split()
_ASK = "give the function for one device as reference"

# ------------------------------------------------------------------------------------------ kinds of mistakes

_REDUCE = {"sum": lax.psum, "mean": lax.pmean, "max": lax.pmax, "min": lax.pmin, "share": lax.psum}
_STATES = {
    "sum": "a term of a sum over",
    "mean": "each shard's own mean over",
    "max": "each shard's own max over",
    "min": "each shard's own min over",
    "share": "divided by the size of",
    "shard": "in another order over",
}


def _whole(x: Any, cut: Pieces, axes: Iterable[str]) -> Any:
    """Reduce or gather a value that is a part along these axes."""
    for axis in axes:
        if isinstance(kind := cut.axes[axis], int):
            x = lax.all_gather(x, axis, axis=kind, tiled=True)
        else:
            x = _REDUCE[kind](x, axis)
    return x


def _once(x: Any, cut: Pieces, axes: Iterable[str]) -> Any:
    """Let a sum count a value once: that of the first rank, and of means the n-th part."""
    for axis in axes:
        one_of = 1 / lax.axis_size(axis) if cut.axes[axis] == "mean" else lax.axis_index(axis) == 0
        x = x * jnp.asarray(one_of, x.dtype)
    return x


def _mended(mend: Any, cut: Pieces, axes: tuple, step: Equation, chosen: tuple, *xs: Any) -> Any:
    """Call an equation with its chosen operands mended."""
    return step.call(*(mend(x, cut, axes) if j in chosen else x for j, x in enumerate(xs)))


def _rest(step: Equation, cut: Pieces) -> list[str]:
    """Return the axes over which a collective should be and is not: those of terms of a sum, or of shards."""
    return [a for a in cut.over("sum") or cut.over("cut") if a not in step.axes]


def _elsewhere(mend: Any, cut: Pieces, axes: tuple, step: Equation, chosen: tuple, *xs: Any) -> Any:
    """Call a collective over the axes of the terms of a sum, or of the shards."""
    right = tuple(cut.over("sum") or _rest(step, cut))
    if "axis_name" in step.params:
        return step.eqn.primitive.bind(*xs, **(step.params | {"axis_name": right}))
    return [_whole(x, cut, cut.over("sum")) for x in xs]


# Mistakes of a factor, which may be an earlier one's.
_SCALES = {"mean for a sum", "counted", "missing mean"}


class Mistake(NamedTuple):
    """State a kind of mistake: its words; at which steps it is, as a pattern; which states of an operand it
    needs, and what else (``when``, of step, cuts, axes, operands); what is done with such operands to try
    whether that mends the program."""

    kind: str
    sentence: str
    cure: str = ""
    steps: str = "-"
    states: tuple[str, ...] = ()
    mend: Callable[..., Any] | None = None
    when: Callable[..., Any] = lambda *_: True


_SUMS, _GATHERS = "psum.*|reduce_scatter.*|unreduced.*", "all_gather.*|all_to_all"
_OTHERS = "(?!psum|ppermute|reduce_scatter|all_to_all|unreduced|enter|return).*"
_NO_PIECES = Pieces({})


def _others(step: Equation, cuts: list[Pieces], axes: tuple) -> list[str]:
    """List the axes along which a result is cut otherwise than out_specs say: with one that is not in
    ``axes`` the reading may be an accident."""
    wanted = lambda a, kind: step.params["named"].get(a, None if a in axes else kind)
    return [a for a, kind in cuts[0].axes.items() if kind != wanted(a, kind)]


MISTAKES = {
    "wrong axis": Mistake(
        "wrong axis",
        "wrong axis: a sum over {axes}, along which the value is {other}, and not over {rest}",
        "lax.psum(…, {right})",
        _SUMS,
        ("copy", "cut"),
        _elsewhere,
        lambda step, cuts, *_: cuts[0].over("sum") and _rest(step, cuts[0]),
    ),
    "wrong gather": Mistake(
        "wrong axis",
        "wrong axis: {name} over {axes}, along which the value is the same on all ranks, and not over {rest}",
        "{name} over {right}",
        _GATHERS,
        ("copy",),
        _elsewhere,
        lambda step, cuts, *_: len(_rest(step, cuts[0])) == 1 and not cuts[0].over("sum"),
    ),
    "transposed": Mistake(
        "counted",
        "counted once per {axes}: a sum over {axes}, made by jax.grad, of a value that is the same on all",
        "use check_vma=True, or jax.grad outside of shard_map: without types a psum's transpose is a psum",
        _SUMS,
        ("copy",),
        _once,
        lambda step, *_: step.backward,
    ),
    "counted": Mistake(
        "counted",
        "counted once per {axes}: a sum over {axes} of a value that is the same on all of it",
        "leave {axes} out of the sum",
        _SUMS,
        ("copy",),
        _once,
    ),
    "sum of means": Mistake(
        "counted",
        "counted once per {axes}: a sum over {axes} of each shard's mean",
        "lax.pmean(…, {names})",
        _SUMS,
        ("mean",),
        _once,
    ),
    "sum of copies and means": Mistake(
        "counted",
        "counted once per {axes}: a sum over {axes} of a value that is each shard's mean, or the same on all",
        "lax.pmean(…, {names})",
        _SUMS,
        ("copy mean",),
        _once,
        lambda step, cuts, axes, _: cuts[0].over("mean") and {*axes} - {*cuts[0].over("mean")},
    ),
    "sum of shards": Mistake(
        "sum of shards",
        "a sum over {axes} of shards: along {axes} the value is cut",
        "leave {axes} out of the sum",
        _SUMS,
        ("cut",),
        _elsewhere,
    ),
    "added": Mistake(
        "counted",
        "counted once per {axes}: a value that is the same on all of {axes} is added to a term of a sum"
        " over {axes}",
        "add it after the sum over {axes}",
        "add|sub|add_any",
        ("copy",),
        _once,
        lambda step, cuts, axes, _: any({*axes} <= {*cut.over("sum")} for cut in cuts),
    ),
    "mean of means": Mistake(
        "mean of means",
        "a mean of means: each rank of {axes} divides by its own sum, and these differ",
        "lax.psum(…, {names}) of both before the div",
        "div",
        ("sum",),
        _whole,
        lambda step, cuts, axes, chosen: len(chosen) == 2,
    ),
    "missing": Mistake(
        "{lack}",
        "a {lack} over {axes}: {name} takes {state} {axes}",
        "lax.{reduce}(…, {names}) before the {name}",
        _OTHERS,
        tuple(_REDUCE),
        _whole,
    ),
    "unfinished": Mistake(
        "{lack}",
        "a {lack} over {axes}: {what} is still {state} {axes}{tail}",
        "lax.{reduce}(…, {names}) before it is returned",
        RETURN,
        tuple(_REDUCE),
        _whole,
    ),
    "over a shard": Mistake(
        "over a shard",
        "{name} over a shard: each rank of {axes} has a part of dim {dim} alone",
        "gather dim {dim} over {axes}, or pass on what other ranks need, and combine what they find",
    ),
    "not handed on": Mistake(
        "state not handed on",
        "a state that is not handed on: each rank of {axes} begins the scan of its part of dim {dim} anew",
        "pass the state to the next rank of {axes} (lax.ppermute), or gather dim {dim} over {axes}",
    ),
    "shard for a copy": Mistake(
        "shard for a copy",
        "{what} is cut over {axes}, but out_specs say that it is the same on all of {axes}",
        "gather it over {axes}, or name {axes} in out_specs",
        RETURN,
        ("cut",),
        None,
        lambda step, cuts, axes, _: len(axes) == 1 and axes[0] not in step.params["named"],
    ),
    "other order": Mistake(
        "other order",
        "the shards of {what} over {axes} are in another order, or of another dim, than out_specs say",
        "",
        RETURN,
        ("cut",),
        None,
        lambda step, cuts, axes, _: len(axes) == 1 and _others(step, cuts, axes) == [*axes],
    ),
    "ring": Mistake(
        "ring one hop short",
        "a ring one hop short: each rank of {axes} has seen {seen} of {n} blocks",
        "send once more",
    ),
    "same key": Mistake(
        "same random key",
        "the same random key on every rank of {axes}: each draws the same numbers for its shard",
        "jax.random.fold_in(key, lax.axis_index({names}))",
    ),
    "shared key": Mistake(
        "same random key",
        "the same random key on several ranks of {axes}: each draws the same numbers for its own shard",
        "jax.random.fold_in(key, lax.axis_index({names}))",
    ),
    "another key": Mistake(
        "different random keys",
        "a different random key on every rank of {axes}, for a value that is the same on all",
        "use one key on all of {axes}",
    ),
    "positions": Mistake(
        "positions without offset",
        "positions begin at 0 on every rank of {axes}",
        "add lax.axis_index({names}) times the size of a shard",
    ),
    "same slice": Mistake(
        "positions without offset",
        "every rank of {axes} takes the same slice, and each needs its own",
        "begin it at lax.axis_index({names}) times the size of a shard",
    ),
    "unknown": Mistake(
        "unknown",
        "unknown, {place}: there values part first, and no change that was tried mends all results",
    ),
}
"""All kinds. Those with a mend are tried at each step, in this order; the others have rules of their own."""


def _places(
    mistake: Mistake, step: Equation, cuts: list[Pieces], sizes: dict[str, int]
) -> Iterator[tuple]:
    """List along which axes, and for which operands of a step, there may be such a mistake: for all together
    first, then for each."""
    near = {*step.axes} if mistake.steps in (_SUMS, _GATHERS) else {*sizes}
    for state in mistake.states if re.fullmatch(mistake.steps, step.name) else ():
        has = [near.intersection(cut.over(*state.split())) for cut in cuts]
        axes = tuple(a for a in sizes if any(a in x for x in has))
        for group in dict.fromkeys([axes, *((a,) for a in axes)]):
            operands = tuple(j for j, x in enumerate(has) if group and x.issuperset(group))
            for chosen in dict.fromkeys([operands, *((j,) for j in operands)]):
                if chosen and mistake.when(step, cuts, group, chosen):
                    yield group, chosen


@dataclass(frozen=True, repr=False)
class Check:
    """State whether a parallel program computes what one device computes. It is true where it does.

    Attributes:
        results: of each result, and of each gradient of a scalar: ``name``, ``difference`` and ``bound``,
            both relative to its largest element, ``equal``. The bound is what rounding explains.
        findings: ``line``, ``kind``, ``axes``, ``sentence``, ``cure``, ``operands``. With ``tried`` all
            results are right when the cure is applied; other kinds are "unknown", or seen in the results.
        notes: what could not be compared, and why.
    """

    name: str
    mesh: dict[str, int]
    equal: bool
    results: list[dict[str, Any]]
    findings: list[dict[str, Any]]
    notes: list[str]
    _read: Callable[[], list[dict[str, str]]] = field(compare=False)

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        on = " ".join(f"{a}={n}" for a, n in self.mesh.items()) or "one device"
        worst = max(
            self.results,
            key=lambda row: (not row["equal"], row["difference"] / max(row["bound"], 1e-30)),
        )
        far, bound = worst["difference"], worst["bound"]
        state = "equals" if self.equal else "is NOT"
        numbers = f"{worst['name']} differs by {far:.1e}, rounding explains {bound:.1e}"
        if far == math.inf:
            numbers = f"{worst['name']} has another shape, or other infinities or NaNs"
        words = [f"{self.name} on {on} {state} the program of one device: {numbers}"]
        for row in self.findings:
            words.append(f"{row['line']}: {row['sentence']}")
            words += [f"    operands: {row['operands']}"] if row["operands"] else []
            tried = " (tried: all results are right then)" if row["tried"] else ""
            words += [f"    cure: {row['cure']}{tried}"] if row["cure"] else []
        return "\n".join(words + [f"note: {text}" for text in self.notes])

    __repr__ = __str__

    def layouts(self) -> list[dict[str, str]]:
        """Run the program once more and list how values are cut: ``line``, ``layout``, ``operation``."""
        return self._read()

    def table(self) -> str:
        """Write the layouts as aligned text, each line and layout once."""
        rows = dict.fromkeys(tuple(row.values()) for row in self.layouts())
        return text_columns(list(rows)) if rows else ""

    def document(self) -> dict[str, Any]:
        """Return the check as plain data, for JSON."""
        return {name: x for name, x in vars(self).items() if name != "_read"}

    def raise_if_different(self) -> None:
        """Raise AssertionError with the report if the results differ: for tests."""
        if not self.equal:
            raise AssertionError(str(self))

    def _repr_html_(self) -> str:
        return f'<pre style="font-family: monospace; line-height: 1.3">{escape(str(self))}</pre>'


@noted()
def check(f: Callable, reference: Callable | None = None, /, *args: Any, **kwargs: Any) -> Check:
    """Run a parallel program on its mesh and on one device, and compare results and gradients.

    Args:
        f: the program, for `jax.shard_map`, `jax.jit` or explicit axes; it has its mesh.
        reference: the same function for one device. None: f itself, with every `jax.shard_map` in it on a
            mesh of ones, and without constraints on layouts.
        args: f's arguments: arrays, whose values are used and, once more, shuffled; or
            `jax.ShapeDtypeStruct`s, for random ones. Take small shapes. What has no dtype is static.
        kwargs: f's keyword arguments.

    Raises:
        ValueError: there is no reference and f cannot run on a mesh of ones, or results have other shapes.
            JAX's own errors carry the sentence of `llmpar.explain` as a note.
    """
    named = jax.tree.leaves_with_path((args, kwargs))
    leaves = [x for _, x in named if hasattr(x, "dtype")]
    names = [jax.tree_util.keystr(path[1:]) for path, x in named if hasattr(x, "dtype")]
    programs = (f,) if reference is None or reference is f else (f, reference)
    calls = [on_arrays(program, args, kwargs) for program in programs]
    case = _Case(leaves, *calls)
    rows, wrong = case.compare(case.results())
    if not wrong and case.has_gradients:
        try:
            both = _Case(leaves, *map(_and_gradients, calls))
            more, wrong = both.compare(both.results())
            floats = [name for name, x in zip(names, leaves, strict=True) if _is_float(x)]
            pairs = zip(more[len(rows) :], floats, strict=True)
            rows += [row | {"name": f"gradient of {name}"} for row, name in pairs]
            both.notes, case = case.notes, both
        except Exception as error:
            case.notes.append(f"gradients are not compared: {_first_line(error)}")
    findings = case.findings(wrong) if wrong else []
    case.notes += _limits(case, rows, names, leaves)
    name = getattr(f, "__name__", type(f).__name__)
    layouts = lambda: _Reading(case).rows() if case.one else []
    return Check(name, case.mesh, not wrong, rows, findings, case.notes, layouts)


def _limits(
    case: "_Case", rows: list[dict[str, Any]], names: list[str], leaves: list
) -> Iterator[str]:
    """Say which results tell little, and which arguments show little."""
    for row, x in zip(rows, case.right[0], strict=True):
        if not np.isfinite(x).all():
            yield f"{row['name']} has infinities or NaNs on one device, too: they tell nothing"
        # more than float32 needs for any sum of ours, and bfloat16 for a short one
        if row["bound"] > 0.05:
            yield f"rounding may move {row['name']} by {row['bound']:.0%}: no smaller mistake is seen"
    for name, x in zip(names, leaves, strict=True):
        if isinstance(x, jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jnp.integer):
            yield f"{name}, a shape of integers, is tried with 0 and 1 alone: give an array for others"


class _Case:
    """One comparison: of a function of arrays with itself on one device, or with a reference."""

    def __init__(self, leaves: list, call: Callable, reference: Callable | None = None):
        self.notes, flat = list[str](), lambda f: f and (lambda *xs: jax.tree.leaves(f(*xs)))
        self.call, self.reference = flat(call), flat(reference)
        traced, shape = jax.make_jaxpr(call, return_shape=True)(*leaves)
        named = jax.tree.leaves_with_path(shape)
        self.shapes = [x.shape for _, x in named]
        self.names = [f"result{jax.tree_util.keystr(path)}" for path, _ in named]
        self.has_gradients = (
            all(x.shape == () for _, x in named)
            and any(_is_float(x) for _, x in named)
            and any(map(_is_float, leaves))
        )
        self.many, self.draws = read(traced), False
        self.one: Program | None = None
        self.mesh = dict(next((mesh.shape for _, mesh in meshes_in("", traced, leaves)), {}))
        self.inputs = [[_values(x, s, i) for i, x in enumerate(leaves)] for s in range(4)]
        spread = lambda x: len(getattr(getattr(x, "sharding", None), "device_set", ())) > 1
        self.places = [x.sharding if spread(x) else None for x in leaves]
        try:
            try:
                alone = self.on_ones(call, leaves, [None] * len(leaves))
            except ValueError:  # perhaps a jax.shard_map asks for the types of explicit axes
                alone = self.on_ones(call, leaves, [*map(_on_ones, leaves)])
            self.one = read(alone, not any(self.ones))
            ours, longer = self.many.lengths, self.one.lengths.items()
            # those over a dim that is cut
            if cut := {line for line, n in longer if n > ours.get(line, n)}:
                self.many, self.one = read(traced, kept=cut), read(alone, not any(self.ones), cut)
            self.draws = share_draws(self.many, self.one)
            if self.draws or not reference:
                self.right = self.alone(self.run_one)
        except Exception as error:
            self.one, self.draws = None, False
            self.why = f"the program cannot run on a mesh of ones ({_first_line(error)})"
            if not reference:
                raise ValueError(f"{self.why}; {_ASK}") from error
        if reference and self.draws:
            self.refuse_shapes("itself on a mesh of ones, as its random keys may differ by rank,")
            self.notes.append(
                "random keys may differ by rank: it is compared with itself on one device, and not"
                " with the reference"
            )
        elif reference:
            if self.one:
                close_hops(self.one)
            self.right = self.alone(self.reference)
            self.refuse_shapes("the reference")
        self.spreads = spreads(self.many, math.prod(self.mesh.values()))

    def on_ones(self, call: Callable, leaves: list, places: list) -> Any:
        """Trace the program on a mesh of ones."""
        self.ones = places
        pairs = zip(leaves, places, strict=True)
        with _jax.on_one_device(), _context():
            return jax.make_jaxpr(call)(
                *(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in pairs)
            )

    def refuse_shapes(self, other: str) -> None:
        """Refuse results of other shapes."""
        a, b = self.shapes, [np.shape(x) for x in self.right[0]]
        if a != b:
            raise ValueError(f"f has shape {a} of results, {other} {b}; they must agree: {_ASK}")

    def run_one(self, *xs: Any, see: bool = False) -> Any:
        """Run the program of one device; with ``see`` return all values."""
        assert self.one
        placed = [
            x if s is None else jax.sharding.reshard(x, s)
            for x, s in zip(xs, self.ones, strict=True)
        ]
        return run(self.one, placed, see, {})[see]

    def alone(self, call: Callable, get: Callable = jax.device_get) -> list:
        """Run a function on one device on all arguments."""
        with _context():
            try:
                return _runs(call, self.inputs, get)
            except jax.errors.JAXTypeError:  # it is a function of NumPy
                return [call(*map(np.asarray, xs)) for xs in self.inputs]

    def results(self, cures: Cures | None = None, see: bool = False) -> list:
        """Run the program on its mesh: as it is, or step by step with cures or shared random numbers. Results
        come as `_shards`, values that are seen whole."""
        as_it_is = not (cures or see or self.draws)
        steps = lambda *xs: run(self.many, xs, see, cures or {})[see]
        placed = [[*map(jax.device_put, xs, self.places)] for xs in self.inputs[:2]]
        return _runs(self.call if as_it_is else steps, placed, jax.device_get if see else _shards)

    def agrees(self, results: Callable[[], list]) -> bool:
        """Return whether results can be had, and are right."""
        with contextlib.suppress(Exception):
            return not self.compare(results())[1]
        return False

    def compare(self, results: list[list[np.ndarray]]) -> tuple[list[dict], list[int]]:
        """Return a row for each result, and the numbers of those that differ."""
        rows = list[dict[str, Any]]()
        for j, name in enumerate(self.names):
            sides = zip(results, self.right, self.right[2:], strict=False)
            each = [(ours[j], _array(one[j]), _array(moved[j])) for ours, one, moved in sides]
            spread = self.spreads.get(self.many.gives[j], 0.0)
            far = [
                (
                    max(distance(_array(x), whole[part]) for part, x in shards),
                    _bound(spread, whole, moved),
                    _scale(whole),
                )
                for shards, whole, moved in each
            ]
            difference, bound, scale = max(far, key=lambda one: (one[0] - one[1]) / one[2])
            row = {"name": name, "difference": difference / scale, "bound": bound / scale}
            rows.append(row | {"equal": difference <= bound})
        return rows, [j for j, row in enumerate(rows) if not row["equal"]]

    def findings(self, wrong: list[int]) -> list[dict[str, Any]]:
        """Name what makes these results wrong."""
        rows = list[dict[str, Any]]()
        if self.one is None:
            self.notes.append(f"{self.why}, so its lines are not compared")
        elif (
            self.reference
            and not self.draws
            and not self.agrees(lambda: self.alone(self.run_one, _shards))
        ):
            self.notes.append(
                "on a mesh of ones the program differs from the reference, too: sharding is not what makes"
                " the difference, or sizes are written as numbers; lines are not compared"
            )
        else:
            rows = _Reading(self).findings(wrong)
            if not self.reference and all(
                row["kind"] in ("unknown", "over a shard") for row in rows
            ):
                self.refuse_own_rows()
        if any(row["kind"] != "unknown" for row in rows):
            return rows
        for axis, n in self.mesh.items():
            most = max(hops(self.many, self.many.gives[j], axis) for j in wrong)
            if 1 <= most == n - 2:
                self.notes.append(
                    f"if it is a ring, it is one hop short: {n - 1} of {n} blocks of {axis} are"
                    " seen"
                )
        return rows

    def refuse_own_rows(self) -> None:
        """Refuse a program that is another function on a mesh of ones: results have another shape there, or
        each rank has one row of an argument, and takes it by its number."""
        self.refuse_shapes("a mesh of ones")
        rows = {i for _, step in self.many.all_steps() if step.name == ENTER for i in step.gives}
        for _, step in self.many.all_steps():
            if step.name in TYPES and rows.intersection(step.takes):
                rows.update(step.gives)
            for x, v in zip(step.takes, step.eqn.invars if step.eqn else (), strict=False):
                # without a line it is what jax.grad keeps for its transpose
                if x in rows and step.name in _ROWS and 1 in v.aval.shape and step.line:
                    raise ValueError(
                        f"{step.line}: each rank takes its only row of an argument: on one device that is"
                        f" another function; {_ASK}"
                    )


# Steps whose result is a part of their operand: of keys these are keys.
_PARTS = "dynamic_slice|slice|gather|squeeze|reshape|broadcast_in_dim|transpose"
# Steps whose result has the numbers of their operand.
_SAME = "broadcast_in_dim|reshape|squeeze|stop_gradient|select_n|convert_element_type|copy"
_ROWS = {"slice", "squeeze", "dynamic_slice", "gather", "reshape"}


@dataclass(eq=False)
class Finding:
    """State what may be wrong at a value, in words, and what would mend it."""

    value: int
    row: dict[str, Any]
    cures: Cures


class _Reading:
    """The layouts of all values, and what they say of wrong results."""

    def __init__(self, case: _Case):
        assert case.one
        self.case, self.twin_of = case, twins(case.many, case.one)
        self.makers, self.before = dict[int, Equation](), dict[int, list[int]]()
        self.sizes = dict.fromkeys(case.many.takes, dict[str, int]())
        self.takers = defaultdict[int, list[Equation]](list)
        self.data = {*case.many.takes}  # what is made of arguments, or of random numbers
        self.keys = set[int]()  # random keys, and parts of them
        for program, step in case.many.all_steps():
            # what it is made of; where that has no twin, what is before it
            known = [[x] if x in self.twin_of else self.before.get(x, []) for x in step.takes]
            self.makers |= dict.fromkeys(step.gives, step)
            for x in step.takes:
                self.takers[x].append(step)
            self.before |= dict.fromkeys(step.gives, [*dict.fromkeys(sum(known, []))])
            self.sizes |= dict.fromkeys(step.gives, program.sizes)
            if step.name == "random_bits" or self.data & {*step.takes}:
                self.data |= {*step.gives}
            is_part = re.fullmatch(_PARTS, step.name) and self.keys & {*step.takes}
            if is_part or re.match("random_(?!bits|gamma)", step.name):
                self.keys |= {*step.gives}
        self.one = case.one
        self.twin_makers = {i: step for _, step in self.one.all_steps() for i in step.gives}
        self.alike = defaultdict[tuple, list[Equation]](list)  # iterations of one equation
        for step in case.many.inner_steps():
            self.alike[id(step.eqn), step.line].append(step)
        self.twins = case.alone(functools.partial(case.run_one, see=True))
        self.watch([])

    def watch(self, kept: list[Finding]) -> None:
        """Run the program, and keep all of its values."""
        self.values = self.case.results(_cures(kept), see=True)
        self.cut, self.is_wrong = functools.cache(self._cut), functools.cache(self._is_wrong)

    def beside(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a value and its twin, on both sets of arguments, in units of what rounding explains."""
        sides, lead, j = list[Any](), (0,) * len(self.sizes[i]), self.twin_of[i]
        for values, right, moved in zip(self.values, self.twins, self.twins[2:], strict=False):
            local, whole, near = map(_array, (values[i], right[j][lead], moved[j][lead]))
            unit = _bound(self.case.spreads.get(i, 0.0), whole, near, local)
            sides.append([x / max(unit, 1e-9 * _scale(whole)) for x in (local, whole)])
        local, whole = map(np.stack, zip(*sides, strict=True))
        return local, whole

    def _cut(self, i: int) -> Pieces | None:
        """Return how a value is cut, None where nothing explains it; constants are the same everywhere."""
        if i in self.case.many.consts:
            return Pieces(dict.fromkeys(self.case.mesh, "copy"))
        return cut_of(*self.beside(i), self.sizes[i]) if i in self.twin_of else None

    def _is_wrong(self, i: int, deep: bool) -> bool:
        """Return whether a value is no right one. Keys, and what is made of ranks, sizes and positions alone,
        are each rank's own: only a ``deep`` search doubts the latter."""
        if i not in self.twin_of or i in self.keys or not (deep or i in self.data):
            return False
        return (cut := self.cut(i)) is None or cut.factor != 1

    def first(self, wrong: list[int], deep: bool) -> list[int]:
        """Return the wrong values that are made of right ones alone, in the order of the program."""
        todo, first = [*wrong], set[int]()
        for i in todo:
            before = self.before.get(i, [])
            more = [x for x in before if self.is_wrong(x, deep)]
            todo += [x for x in (before if deep else more) if x not in todo]
            own = i in self.makers and self.makers[i].name != ENTER
            if own and not more and (i in wrong or self.is_wrong(i, deep)):
                first.add(i)
        return [i for i in self.makers if i in first]

    def jumps(self) -> list[int]:
        """Return the results of collectives that are counted more often, or less, than what they take: by a
        number that may have been counted before, as a shard's mean is."""
        factor = lambda i: getattr(self.cut(i), "factor", None)
        sums = [(i, s.takes[0]) for i, s in self.makers.items() if s.axes and s.takes]
        pairs = [(i, factor(i), factor(x)) for i, x in sums]
        return [i for i, after, before in pairs if before != after and 1 not in (before, after)]

    def findings(self, wrong: list[int]) -> list[dict[str, Any]]:
        """Try what the first wrong values suggest. Return what makes all results right; or what is seen
        without a trial; or else between which lines the mistake must be."""
        last = [self.case.many.gives[j] for j in wrong]
        kept, seen = list[Finding](), list[Finding]()
        for _ in range(_ROUNDS):
            first = self.first(last, False)
            each = [one for i in first for one in self.suggestions(i)]
            best = self.healing(self.together(each), kept) or self.healing(each, kept)
            if not best or best.row["kind"] in _SCALES:
                deep = [i for i in self.first(last, True) if i not in first] + self.jumps()
                more = [one for i in deep for one in self.suggestions(i)]
                best, each = self.healing(more, kept) or best, each + more
            if not best:
                more = [one for i in (*first, *deep) for one in self.regathered(i)]
                best = self.healing(more, kept)
            if best:
                for x in [*kept]:
                    fewer = [y for y in kept if y is not x]
                    kept = fewer if self.healing([best], fewer) else kept
                rows = [x.row | {"tried": True} for x in (best, *kept[::-1])]
                each_line = {(row["line"], row["kind"], *row["axes"]): row for row in rows}
                return [*each_line.values()][::-1]
            seen, able = seen or each, [one for one in each if one.cures]
            if not able:
                break
            kept.append(able[0])
            with contextlib.suppress(Exception):
                self.watch(kept)
            if self.is_wrong(able[0].value, True):
                break
        sure = next((one.row for one in seen if not one.cures), None)
        return [(sure or self.unknown(last)) | {"tried": False}]

    def together(self, each: list[Finding]) -> list[Finding]:
        """Return the same mistake at several values as one finding, as of all gradients that lack a sum."""
        groups = defaultdict[tuple, dict[int, Finding]](dict)
        for one in each if len({one.value for one in each}) > 1 else []:
            if one.cures:
                groups[one.row["kind"], *one.row["axes"]].setdefault(one.value, one)
        several = [[*group.values()] for group in groups.values() if len(group) > 1]
        return [Finding(group[0].value, group[0].row, _cures(group)) for group in several]

    def healing(self, each: list[Finding], kept: list[Finding]) -> Finding | None:
        """Return the first one whose cure makes all results right, with the cures of those that are kept."""
        right = lambda one: self.case.agrees(lambda: self.case.results(_cures([*kept, one])))
        return next(filter(right, [one for one in each if one.cures][:_TRIED]), None)

    def unknown(self, last: list[int]) -> dict[str, Any]:
        """Return between which lines values part."""
        self.watch([])
        first = self.first(last, False)
        lines = [self.makers[i].line for i in (*first, *last) if i in self.makers] or [""]
        place = f"at {lines[0]}" if lines[0] == lines[-1] else f"between {lines[0]} and {lines[-1]}"
        step = self.makers[first[0] if first else [*self.makers][-1]]
        if not {*step.takes} <= self.twin_of.keys() | self.case.many.consts.keys():
            place = f"{place} or before, where ranks have values that one device has not"
        if step.name in _JUMPS and any(_is_float(x.aval) for x in step.eqn.invars):
            place = f"{place}, {step.name}, where a rounding of what it takes may make values jump"
        one = self.finding("unknown", step, -1, (), place=place)
        return one.row | {"line": lines[0], "operands": one.row["operands"] if first else ""}

    def rows(self) -> list[dict[str, str]]:
        """Return a row for each equation inside a shard_map."""
        inside = [(i, s) for i, s in self.makers.items() if self.sizes[i] and s.name != ENTER]
        return [{"line": s.line, "layout": self.text(i), "operation": s.name} for i, s in inside]

    def text(self, taken: int) -> str:
        """Write a value's shape with its cuts: ``f32[8@dp,16], a partial sum over tp``."""
        if taken not in self.twin_of:
            return "a constant" if taken in self.case.many.consts else "its own on each rank"
        (_, whole), cut = self.beside(taken), self.cut(taken)
        dtype = short_dtype(np.asarray(self.values[0][taken]).dtype.name)
        if cut is None:
            return f"{typed(dtype, whole.shape[1:], {})}, unknown"
        axes: dict[Any, list[str]] = {kind: cut.over(kind) for kind in cut.axes.values()}
        states = [f"{text} {','.join(axes[x])}" for x, text in _STATES.items() if x in axes]
        times = [f"counted {cut.factor:g} times"] * (cut.factor != 1)
        return ", ".join([typed(dtype, whole.shape[1:], axes), *states, *times])

    def suggestions(self, i: int) -> Iterator[Finding]:
        """Suggest mistakes that would make this value wrong, the likeliest first."""
        step, own = self.makers[i], self.cut(i)
        cuts = [self.operand(x) for x in step.takes]
        sizes = self.sizes[next((x for x in step.takes if x in self.sizes), i)]
        for axis in own.over("sum") if own else ():
            n = sizes.get(axis, 0)
            if own and own.factor == n - 1 and hops(self.case.many, i, axis) == n - 2:
                yield self.finding("ring", step, i, (axis,), n=n, seen=n - 1)
        if step.name in ("random_bits", "iota", "slice", "dynamic_slice"):
            yield from self.of_source(i, step, sizes)
        forward = any(
            s.line == step.line and s.axes for s in self.makers.values() if not s.backward
        )
        for key, mistake in MISTAKES.items():
            if key == "transposed" and not forward:  # one that the program's own rule wrote
                continue
            for axes, chosen in _places(mistake, step, cuts, sizes):
                x, cut = step.takes[chosen[0]], cuts[chosen[0]]
                tries = [self.everywhere({step: chosen})]
                tries += [{step: chosen}] if len(tries[0]) > 1 else []
                if mistake.mend is _whole and len(chosen) == 1:  # at first for all that take it
                    begin = self.origin(x, axes)
                    takers = {s: (s.takes.index(begin),) for s in self.takers[begin]}
                    tries.insert(0, self.everywhere(takers))
                for each in tries if mistake.mend else [{}]:
                    of = mistake.mend, cut, axes
                    call = _elsewhere if mistake.mend is _elsewhere else _mended
                    mend = {
                        s: (s.takes, functools.partial(call, *of, s, js)) for s, js in each.items()
                    }
                    yield self.finding(key, step, i, axes, mend, cut, x)

    def everywhere(self, mended: dict[Equation, Any]) -> dict[Equation, Any]:
        """Mend the same steps in all iterations of a loop."""
        same = lambda s: self.alike[id(s.eqn), s.line] if s.eqn else [s]
        return {one: mend for step, mend in mended.items() for one in same(step)}

    def is_plain(self, i: int) -> bool:
        """Return whether a value is a copy, or shards in order, along each axis."""
        cut = self.cut(i)
        kinds = cut.axes.values() if cut and cut.factor == 1 else [""]
        return all(kind == "copy" or isinstance(kind, int) for kind in kinds)

    def regathered(self, i: int) -> Iterator[Finding]:
        """Suggest that what makes a value from right ones, without a collective, needs whole dims."""
        if self.makers[i].name == RETURN:
            i = self.makers[i].takes[0]
        i = i if self.is_cuttable(i) else self.meeting(i)
        wanted, sizes, consts = self.makers[i].gives, self.sizes[i], self.case.many.consts
        steps, given = between(self.makers, wanted, lambda x: x not in consts and self.is_plain(x))
        cuts = [self.cut(x) or _NO_PIECES for x in given]
        axes = tuple(a for a in sizes if any(a in cut.over("cut") for cut in cuts))
        parts = {x for x, cut in zip(given, cuts, strict=True) if cut.over("cut")}
        takers = [step for step in steps if parts.intersection(step.takes)]
        wrong = [step for step in takers if not all(map(self.is_plain, step.gives))]
        if any(step.axes or step.name.startswith("random_") for step in steps) or not wrong:
            return
        key = "not handed on" if wrong[0].name == "scan" else "over a shard"
        shapes = [self.values[0][x].shape[len(sizes) :] for x in wanted]
        for over in dict.fromkeys([*((a,) for a in axes), axes] if axes else ()):
            twins, known, inner = wanted, given, steps
            if over == axes:  # on whole values the program of one device
                twins, known = ([self.twin_of.get(x, x) for x in each] for each in (wanted, given))
                inner, _ = between(self.twin_makers, twins, known.__contains__)
            local = dict(zip(twins, shapes, strict=True))
            cure = on_whole((given, cuts, over, sizes), (known, inner, self.one.consts), local)
            pairs = zip(given, cuts, strict=True)
            x, cut = next((x, cut) for x, cut in pairs if over[0] in cut.over("cut"))
            yield self.finding(key, wrong[0], i, over, {self.makers[i]: cure}, cut, x)

    def is_cuttable(self, i: int) -> bool:
        """Return whether a value's shape is one that the axes cut from that of one device, or has no twin."""
        sizes = self.sizes[i]
        whole = self.twins[0].get(self.twin_of.get(i, -1))
        shape = self.values[0][i].shape[len(sizes) :]
        alone = shape if whole is None else whole.shape[len(sizes) :]
        return shape == alone or bool(cuts_of_shape(shape, alone, sizes, ()))

    def meeting(self, i: int) -> int:
        """Return the first value through which goes all that is made of this one, and that is a shard: the
        slices of a roll are none alone."""
        made, paths = {i}, len(self.takers[i])
        for step in dict.fromkeys(self.makers.values()):
            if takes := [x for x in step.takes if x in made and step.name != RETURN]:
                made.update(step.gives)
                paths += (more := sum(len(self.takers[x]) for x in step.gives)) - len(takes)
                if paths == more and self.is_cuttable(step.gives[0]):
                    return step.gives[0]
        return i

    def origin(self, i: int, axes: Iterable[str]) -> int:
        """Return the value that this one repeats or chooses, where it is the same part along these axes."""
        kinds = lambda x: [(self.cut(x) or _NO_PIECES).axes.get(a) for a in axes]
        parts = kinds(i)
        while i in self.makers and re.fullmatch(_SAME, self.makers[i].name):
            before = [x for x in self.makers[i].takes if x in self.data and kinds(x) == parts]
            if len(before) != 1 or not {*parts} <= {*_REDUCE}:
                break
            i = before[0]
        return i

    def shared(self, i: int) -> int:
        """Return the first value on the way to this one that is divided by the size of an axis."""
        is_share = lambda x: "share" in (self.cut(x) or _NO_PIECES).axes.values()
        while before := [x for x in self.makers[i].takes if x in self.makers and is_share(x)]:
            i = before[0]
        return i

    def operand(self, i: int) -> Pieces:
        """Return how an operand is cut. What is made of ranks alone is each rank's own, and no part."""
        cut = self.cut(i) or _NO_PIECES
        is_own = i not in self.data and cut.over("sum", "mean", "max", "min", "share")
        return _NO_PIECES if is_own else cut

    def of_source(self, i: int, step: Equation, sizes: dict[str, int]) -> Iterator[Finding]:
        """Random numbers, positions, and slices that are the same on every rank; or that are not."""
        local, whole = self.beside(i)
        shape, over = local.shape[1 + len(sizes) :], whole.shape[1:]
        differs = [a for k, a in enumerate(sizes, 1) if not equal_along(local, k)]
        cuts = cuts_of_shape(shape, over, sizes, differs)
        same = [a for cut in cuts for a in cut if a not in differs]
        if step.name == "iota":
            positions = self.twins[0][self.twin_of[i]][(0,) * len(self.sizes[i])]
            mend: Callable = lambda *_: own_shard(positions, shape, cuts)
            each = {"positions": same[:1]}
        elif step.name in ("slice", "dynamic_slice"):
            first = step.params.get("start_indices", ())
            taken = lambda x, *begin: lax.dynamic_slice(x, begin or first, over)
            mend = lambda *xs: own_shard(taken(*xs), shape, cuts)
            each = {"same slice": same[:1]}
        else:
            mend = draw_shard(step.params, over, sizes, cuts)
            cut = [*sum(cuts, ())]
            each = {"another key": [a for a in differs if a not in cut][:1], "same key": same[:1]}
            # the ranks of no axis have all one key, but some ranks of several have
            each = each if any(each.values()) else {"shared key": cut}
        cures = {s: (s.takes, mend) for s in self.everywhere({step: mend})}
        yield from (self.finding(key, step, i, axes, cures) for key, axes in each.items() if axes)

    def finding(
        self,
        key: str,
        step: Equation,
        value: int,
        axes: Iterable[str],
        cures: Cures | None = None,
        cut: Pieces = _NO_PIECES,
        operand: int = -1,
        **more: Any,
    ) -> Finding:
        """Put a mistake into words, for an operand with a cut."""
        maker, what = self.makers.get(operand), step.params.get("what", "")
        state: Any = next((cut.axes[a] for a in axes if a in cut.axes), "")
        rest = _rest(step, cut)
        words = {
            "axes": " and ".join(axes),
            "names": _names(axes),
            "rest": " and ".join(rest),
            "right": _names([a for a in step.axes if a not in axes] + rest),
            "name": step.name,
            "what": what,
            "dim": state,
            "state": _STATES.get(state),
            "reduce": getattr(_REDUCE.get(state), "__name__", ""),
            "lack": "mean for a sum" if state == "share" else f"missing {state}",
            "other": "the same on all ranks" if state == "copy" else "cut",
            "tail": ", a gradient that is not all-reduced" * bool(maker and maker.backward),
        }
        kind, sentence, cure = (text.format(**words | more) for text in MISTAKES[key][:3])
        taken = "; ".join(map(self.text, step.takes))
        row = {
            "line": self.makers[self.shared(operand)].line if state == "share" else step.line,
            "kind": kind,
            "axes": [*axes],
            "sentence": sentence,
            "cure": cure,
            "operands": taken and (f"{what}: {taken}" if what else f"{step.name} of {taken}"),
        }
        return Finding(value, row, cures or {})


def _cures(findings: Iterable[Finding]) -> Cures:
    return {step: call for one in findings for step, call in one.cures.items()}


def _names(axes: Iterable[str]) -> str:
    """Write axes as an argument of a collective."""
    names = tuple(axes)
    return repr(names[0] if len(names) == 1 else names)


# ------------------------------------------------------------------------------------------------- numbers


def _and_gradients(call: Callable) -> Callable:
    """Return a list of results, and of the gradients by every array of floats: of their sum, the second taken
    twice, the third three times …"""

    def total(*arrays: Any) -> tuple[Any, list]:
        results = jax.tree.leaves(call(*arrays))
        return sum(k * x.astype(jnp.float32) for k, x in enumerate(results, 1)), results

    def both(*arrays: Any) -> list:
        by = [i for i, x in enumerate(arrays) if _is_float(x)]
        grads, results = jax.grad(total, by, has_aux=True)(*arrays)
        return [*results, *grads]

    return both


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _on_ones(x: Any) -> Any:
    """Return an array's sharding on a mesh of ones, None if its type has no axes."""
    where = getattr(x, "sharding", None)
    if isinstance(where, NamedSharding) and AxisType.Explicit in where.mesh.axis_types:
        return NamedSharding(_jax.mesh_of_ones(where.mesh), where.spec)
    return None


@contextlib.contextmanager
def _context() -> Iterator[None]:
    """Work on one device also where the caller's mesh is in context."""
    mesh = jax.sharding.get_mesh()
    with contextlib.nullcontext() if mesh.empty else jax.set_mesh(_jax.mesh_of_ones(mesh)):
        yield


def _values(x: Any, seed: int, place: int) -> Any:
    """Return an argument's values: its own, and with seed 1 floats in another order, or a little larger where
    all are equal. A shape gets random ones, others at each place: two arguments of one shape are not equal.
    Seeds 2 and 3: the same, moved by about a rounding."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.asarray(jax.random.key_data(x)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    rng = np.random.default_rng(seed % 2 + 2 * place)
    is_float = _is_float(x)
    if isinstance(x, jax.ShapeDtypeStruct):
        values = rng.standard_normal(x.shape) if is_float else rng.integers(0, 2, x.shape)
    else:
        values = np.asarray(x)
    if seed % 2 and is_float and x.size:
        more = 0.1 * (values == values.flat[0]).all() * abs(rng.standard_normal(x.shape))
        values = rng.permutation(values.ravel()).reshape(x.shape) + more
    values = values.astype(x.dtype)
    if seed > 1 and is_float:
        step = _NOISE * 2.0**16 if x.dtype.itemsize == 2 else _NOISE
        values = values.astype(float) * (
            1 + step * np.random.default_rng(2).standard_normal(x.shape)
        )
    return values.astype(x.dtype)


def _runs(call: Callable, inputs: list[list], get: Callable = jax.device_get) -> list:
    """Run a function on each list of arguments, compiled once; random keys come back as their numbers."""
    jitted = jax.jit(lambda *xs: jax.tree.map(_plain, call(*xs)))
    return [jax.tree.map(get, jitted(*xs)) for xs in inputs]


def _shards(x: jax.Array) -> list[tuple[Any, np.ndarray]]:
    """Return what each device has of a result, and of which part it is. With ``check_vma=False`` ranks may
    differ where out_specs say that they have the same; what is printed is the first one's."""
    return [(shard.index, np.asarray(shard.data)) for shard in x.addressable_shards]


def _plain(x: Any) -> Any:
    is_key = jnp.issubdtype(getattr(x, "dtype", float), jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else jnp.asarray(x)


def _array(x: Any) -> np.ndarray:
    """Return numbers in double precision."""
    return np.asarray(x).astype(complex if np.iscomplexobj(x) else float)


def _scale(x: np.ndarray) -> float:
    return float(abs(x[np.isfinite(x)]).max(initial=0.0)) or 1.0


def _bound(spread: float, whole: np.ndarray, moved: np.ndarray, *more: np.ndarray) -> float:
    """Return how far rounding may move a value: by the sums on its path, and as it moves with arguments."""
    noise = distance(whole, moved)
    noise = noise if math.isfinite(noise) else 0.0
    return spread * max(map(_scale, (whole, *more))) + FACTOR * noise
