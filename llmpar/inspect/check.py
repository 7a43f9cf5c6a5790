"""Check that a parallel program computes what one device computes, and name the line where it does not."""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llmpar.inspect.census import text_columns
from llmpar.inspect.hlo import short_dtype, typed
from llmpar.inspect.twin import (
    Equation,
    Pair,
    Pieces,
    Program,
    close,
    cut_of,
    cuts_of_shape,
    draw_shard,
    hops,
    is_cut,
    is_value,
    read,
    run,
    share_draws,
    spreads,
    twins,
)
from llmpar.parallel import _jax
from llmpar.predict.tolerance import FACTOR

_LINEAR = {"add", "sub", "add_any"}
_WHOLE = {
    "argmax",
    "argmin",
    "sort",
    "top_k",
    "gather",
    "cumsum",
    "cummax",
    "cumlogsumexp",
    "reduce_prod",
}
"""Operations that need a whole dim."""
_REDUCE = {"sum": lax.psum, "mean": lax.pmean, "max": lax.pmax, "min": lax.pmin, "share": lax.psum}
_STATES = {"sum": "a term of a sum over", "mean": "each shard's own mean over"}
_STATES |= {"max": "each shard's own max over", "min": "each shard's own min over"}
_STATES |= {"share": "divided by the size of", "shard": "in another order over"}
_SEEN = {"other order", "shard for a copy", "ring one hop short"}
"""Mistakes that values show by themselves; all others are named when their cure has made results right."""
_ROWS, _SAME = (
    {"slice", "squeeze", "dynamic_slice", "gather", "reshape"},
    {"pvary", "pcast", "convert_element_type"},
)
_SCALES = {"mean for a sum", "counted", "missing mean"}
"""Mistakes of a factor."""
_SAYS = {
    "wrong axis": (
        "wrong axis",
        "wrong axis: a sum over {axes}, along which the value is {state}, and not over {rest}",
        "lax.psum(…, {right})",
    ),
    "counted": (
        "counted",
        "counted once per {axes}: a sum over {axes} of a value that is the same on all of it",
        "leave {axes} out of the sum",
    ),
    "transposed": (
        "counted",
        "counted once per {axes}: a sum over {axes}, made by jax.grad, of a value that is the same on all",
        "use check_vma=True, or jax.grad outside of shard_map: without types a psum's transpose is a psum",
    ),
    "added": (
        "counted",
        "counted once per {axes}: a value that is the same on all of {axes} is added to a term of a sum"
        " over {axes}",
        "add it after the sum over {axes}",
    ),
    "sum of means": (
        "counted",
        "counted once per {axes}: a sum over {axes} of each shard's mean",
        "lax.pmean(…, {names})",
    ),
    "sum of shards": (
        "sum of shards",
        "a sum over {axes} of shards: along {axes} the value is cut",
        "leave {axes} out of the sum",
    ),
    "mean of means": (
        "mean of means",
        "a mean of means: each rank of {axes} divides by its own sum, and these differ",
        "lax.psum(…, {names}) of both before the div",
    ),
    "missing": (
        "{lack}",
        "a {lack} over {axes}: {name} takes {state} {axes}",
        "lax.{reduce}(…, {names}) before the {name}",
    ),
    "unfinished": (
        "{lack}",
        "a {lack} over {axes}: {what} is still {state} {axes}{tail}",
        "lax.{reduce}(…, {names}) before it is returned",
    ),
    "same key": (
        "same random key",
        "the same random key on every rank of {axes}: each draws the same numbers for its shard",
        "jax.random.fold_in(key, lax.axis_index({names}))",
    ),
    "another key": (
        "different random keys",
        "a different random key on every rank of {axes}, for a value that is the same on all",
        "use one key on all of {axes}",
    ),
    "positions": (
        "positions without offset",
        "positions begin at 0 on every rank of {axes}",
        "add lax.axis_index({names}) times the size of a shard",
    ),
    "over a shard": (
        "over a shard",
        "{name} over a shard: each rank of {axes} has a part of dim {dim} alone",
        "gather dim {dim} over {axes}, or combine what the ranks find",
    ),
    "ring": (
        "ring one hop short",
        "a ring one hop short: each rank of {axes} has seen {seen} of {n} blocks",
        "send once more",
    ),
    "shard for a copy": (
        "shard for a copy",
        "{what} is cut over {axes}, but out_specs say that it is the same on all of {axes}",
        "gather it over {axes}, or name {axes} in out_specs",
    ),
    "other order": (
        "other order",
        "the shards of {what} over {axes} are in another order, or of another dim, than out_specs say",
        "",
    ),
    "unknown": (
        "unknown",
        "unknown, {place}: there values part first, and no change that was tried mends all results",
        "",
    ),
}
"""Kind, sentence and cure of each mistake."""
_NOISE = 2.0**-22
"""A second run on one device has its arguments changed by so much: how far values move is rounding, too."""
_TRIED, _ROUNDS = 6, 3
"""So many cures are tried at most for one mistake, and so many mistakes at most: each is compiled."""


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
    """
    programs = (f,) if reference is None or reference is f else (f, reference)
    leaves, names = _arguments(args, kwargs)
    case = _Case(leaves, *(_on_arrays(program, args, kwargs) for program in programs))
    rows, wrong = case.compare(case.results())
    if not wrong and case.is_scalar:
        try:
            both = _Case(leaves, *(_and_gradients(call, names) for call in case.calls))
            more, wrong = both.compare(both.results())
            rows, both.notes, case = rows + more[len(rows) :], case.notes, both
        except Exception as error:
            case.notes.append(f"gradients are not compared: {_first_line(error)}")
    findings = case.findings(wrong) if wrong else []
    name = getattr(f, "__name__", type(f).__name__)
    return Check(name, case.mesh, not wrong, rows, findings, case.notes, case.layouts)


class _Case:
    """One comparison: of a function of arrays with itself on one device, or with a reference."""

    def __init__(self, leaves: list, *calls: Callable):
        self.notes, self.leaves, self.calls = list[str](), leaves, calls
        bare = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        traced, shape = jax.make_jaxpr(calls[0], return_shape=True)(*leaves)
        self.names = [_name(path) for path, _ in jax.tree.leaves_with_path(shape)]
        results = jax.tree.leaves(shape)
        self.is_scalar = bool(results) and all(x.shape == () and _is_float(x) for x in results)
        self.is_scalar &= any(map(_is_float, leaves))
        self.many, self.one, self.why = read(traced), None, ""
        bodies = [step.body for _, step in self.many.all_steps() if step.body]
        self.mesh = {a: n for body in bodies for a, n in body.sizes.items()} or _mesh_of(
            leaves, self.many
        )
        try:
            with _jax.on_one_device(), _context():
                self.one = read(jax.make_jaxpr(calls[0])(*bare), alone=True)
        except Exception as error:
            self.why = f"the program cannot run on a mesh of ones ({_first_line(error)})"
        self.draws = self.one is not None and share_draws(self.many, self.one)
        self.base = self.one
        self.plain: Callable | None = None
        if len(calls) > 1 and not self.draws:
            try:
                with _context():
                    self.base = read(jax.make_jaxpr(calls[1])(*bare), alone=True)
            except jax.errors.JAXTypeError:  # it is a function of NumPy
                self.base, self.plain = self.many, calls[1]
        elif len(calls) > 1:
            self.notes.append("random numbers are drawn: compared with itself on one device")
        if self.base is None:
            raise ValueError(f"{self.why}; give the function for one device as reference")
        self.inputs = [[_values(x, seed) for x in leaves] for seed in (0, 1)]
        try:
            self.right, moved = self.alone(self.base), self.alone(self.base, _moved)
        except Exception as error:
            if self.base is not self.one or self.plain:
                raise
            self.why = f"the program cannot run on a mesh of ones ({_first_line(error)})"
            raise ValueError(
                f"{self.why}; give the function for one device as reference"
            ) from error
        a, b = ([x.shape for x in side] for side in (results, self.right[0]))
        if len(calls) > 1 and a != b:
            raise ValueError(
                f"results have shapes {a}, and those of the reference {b}; they must agree"
            )
        spread = spreads(self.base, math.prod(self.mesh.values()))
        far = [spread.get(x, 0.0) if is_value(x) else 0.0 for x in self.base.gives]
        sides = zip(self.right, moved, strict=True)
        self.bounds = [[_bound(*one) for one in zip(far, *side, strict=True)] for side in sides]

    def alone(self, program: Program, change: Callable = lambda x: x, see: bool = False) -> list:
        """Run a program on one device, on both sets of arguments."""
        call: Callable = jax.jit(lambda xs: run(program, xs, see)[see])
        if (plain := self.plain) and program is self.base:
            call = lambda xs: plain(*map(np.asarray, xs))
        with _context():
            each = [call([change(x) for x in xs]) for xs in self.inputs]
        return jax.device_get(each) if see else list(map(_arrays, each))

    def results(self, cures: Iterable["Finding"] = (), see: bool = False) -> list:
        """Run the program on its mesh: as it is, or step by step with cures or shared random numbers."""
        cures = list(cures)
        for one in cures:
            one.step.cures += [one.apply] if one.apply else []
        as_it_is = not (cures or see or self.draws)
        plain = lambda xs: jax.tree.leaves(self.calls[0](*xs))
        call = jax.jit(plain if as_it_is else lambda xs: run(self.many, xs, see)[see])
        put = lambda x, like: jax.device_put(x, like.sharding) if _is_spread(like) else x
        try:
            each = [call(list(map(put, xs, self.leaves))) for xs in self.inputs]
        finally:
            for one in cures:
                one.step.cures.clear()
        return jax.device_get(each) if see else list(map(_arrays, each))

    def heals(self, cures: Iterable["Finding"]) -> bool:
        """Return whether all results are right with these cures."""
        with contextlib.suppress(Exception):
            return not self.compare(self.results(cures))[1]
        return False

    def compare(self, results: list[list[np.ndarray]]) -> tuple[list[dict], list[int]]:
        """Return a row for each result, and the numbers of those that differ."""
        rows = list[dict[str, Any]]()
        for j, name in enumerate(self.names):
            sides = [
                (a[j], b[j], c[j]) for a, b, c in zip(results, self.right, self.bounds, strict=True)
            ]
            equal = all(a.shape == b.shape and close(a, b, bound) for a, b, bound in sides)
            far = [(_distance(a, b) / _scale(b), bound / _scale(b)) for a, b, bound in sides]
            difference, bound = max(far, key=lambda pair: pair[0] - pair[1])
            rows.append({"name": name, "difference": difference, "bound": bound, "equal": equal})
        return rows, [j for j, row in enumerate(rows) if not row["equal"]]

    def layouts(self) -> list[dict[str, str]]:
        return _Reading(self).rows() if self.one else []

    def findings(self, wrong: list[int]) -> list[dict[str, Any]]:
        """Name what makes these results wrong."""
        if self.one is None:
            self.notes.append(f"{self.why}, so its lines are not compared")
        elif self.base is not self.one and not self.is_twin():
            self.notes.append(
                "on a mesh of ones the program differs from the reference, too: sharding is not what makes"
                " the difference, or sizes are written as numbers; lines are not compared"
            )
        else:
            rows = _Reading(self).findings(wrong)
            if self.base is self.one and all(row["kind"] == "unknown" for row in rows):
                self.refuse_own_rows(wrong)
            return rows
        for axis, n in self.mesh.items():
            most = max(hops(self.many, self.many.gives[j], axis) for j in wrong)
            if 1 <= most == n - 2:
                self.notes.append(
                    f"if it is a ring, it is one hop short: {most + 1} of {n} blocks of {axis} are seen"
                )
        return []

    def refuse_own_rows(self, wrong: list[int]) -> None:
        """Refuse a program that is another function on a mesh of ones: results have another shape there, or
        each rank has one row of an argument, and takes it by its number."""
        ask = (
            "on one device that is another function; give the function for one device as reference"
        )
        results = self.results()[0]
        for j in wrong:
            if (a := results[j].shape) != (b := self.right[0][j].shape):
                raise ValueError(f"{self.names[j]} has shape {a}, and {b} on a mesh of ones: {ask}")
        rows = set[Any]()
        for program, step in self.many.all_steps():
            rows |= {x for x in program.takes if program.sizes}
            rows |= {*step.gives} if step.name in _SAME and step.takes[0] in rows else set()
            for x, v in zip(step.takes, step.eqn.invars if step.eqn else (), strict=False):
                if is_value(x) and x in rows and step.name in _ROWS and 1 in v.aval.shape:
                    raise ValueError(
                        f"{step.line}: each rank takes its only row of an argument: {ask}"
                    )

    def is_twin(self) -> bool:
        """Return whether the program computes on one device what its reference does."""
        with contextlib.suppress(Exception):
            return self.one is not None and not self.compare(self.alone(self.one))[1]
        return False


@dataclass(eq=False)
class Finding:
    """State what may be wrong at a step, and what would mend it: ``apply`` in the place of its call."""

    step: Equation
    kind: str
    axes: list[str]
    sentence: str
    cure: str
    apply: Callable[..., Any] | None = None
    line: str = ""
    operands: str = ""
    value: int = -1
    lacks: tuple[Callable, tuple[str, ...], int] | None = None

    def is_like(self, other: "Finding") -> bool:
        return (self.kind, self.axes) == (other.kind, other.axes)

    def row(self, tried: bool) -> dict[str, Any]:
        row = {"line": self.line or self.step.line, "kind": self.kind, "axes": self.axes}
        row |= {"sentence": self.sentence, "cure": self.cure, "operands": self.operands}
        return row | {"tried": tried}


class _Reading:
    """The layouts of all values, and what they say of wrong results."""

    def __init__(self, case: _Case):
        assert case.one
        self.case, self.pair = case, twins(case.many, case.one)
        self.steps = list(case.many.all_steps())
        self.makers, self.homes = dict[int, tuple[int, Equation]](), dict[int, Program]()
        self.outer, self.inner = dict[int, Any](), dict[int, tuple[Equation, int]]()
        self.data = set(case.many.takes)  # what is made of arguments, or of random numbers
        for n, (program, step) in enumerate(self.steps):
            self.makers |= dict.fromkeys(step.gives, (n, step))
            self.homes |= dict.fromkeys((*step.gives, *program.takes), program)
            if step.body:
                self.outer |= zip(step.body.takes, step.takes, strict=True)
                self.inner |= {x: (step, k) for k, x in enumerate(step.body.gives) if is_value(x)}
        for program, step in self.steps:
            self.data |= {i for i in program.takes if self.outer.get(i) in self.data}
            if step.name == "random_bits" or any(x in self.data for x in step.takes if is_value(x)):
                self.data |= set(step.gives)
        self.spreads = spreads(case.one, math.prod(case.mesh.values()))
        self.twins, self.moved = (
            case.alone(case.one, change, True) for change in (lambda x: x, _moved)
        )
        self.watch(())

    def watch(self, cures: Iterable[Finding]) -> None:
        """Run the program, and keep all of its values."""
        self.values = self.case.results(cures, see=True)
        self.cuts, self.doubts = dict[int, Pieces | None](), dict[tuple[int, bool], bool]()

    def cut(self, taken: Any) -> Pieces | None:
        """Return how a value is cut, None where nothing explains it; constants are the same everywhere."""
        if not is_value(taken):
            return Pieces(dict.fromkeys(self.case.mesh, "copy"))
        if taken not in self.cuts:
            sizes = self.homes[taken].sizes
            self.cuts[taken] = (
                cut_of(self.pairs(taken), sizes, True) if taken in self.pair else None
            )
        return self.cuts[taken]

    def pairs(self, i: int) -> list[Pair]:
        """Return a value beside its twin, on both sets of arguments."""
        pairs, lead, j = list[Pair](), (0,) * len(self.homes[i].sizes), self.pair[i]
        for values, right, moved in zip(self.values, self.twins, self.moved, strict=True):
            local, whole, near = map(_array, (values[i], right[j][lead], moved[j][lead]))
            pairs.append((local, whole, _bound(self.spreads.get(j, 0.0), whole, near, local)))
        return pairs

    def is_wrong(self, i: int, deep: bool) -> bool:
        """Return whether a value is no right one. Keys, and what is made of ranks, sizes and positions alone,
        are each rank's own: only a ``deep`` search doubts the latter, and what they scale."""
        key = i in self.makers and re.match("random_(?!bits)", self.makers[i][1].name)
        if i not in self.pair or key or not (deep or i in self.data):
            return False
        if (i, deep) not in self.doubts:
            self.doubts[i, deep] = self.doubt(i, deep)
        return self.doubts[i, deep]

    def doubt(self, i: int, deep: bool) -> bool:
        if (cut := self.cut(i)) is None:
            return True
        given, parts = self.before(i), set(cut.over("mean", "share"))
        known = [one for one in map(self.cut, given) if one]
        if cut.factor != 1:
            scaled = not deep and any(one.factor != 1 for one in known)
            return not scaled or any(self.is_wrong(x, deep) for x in given)
        if i in self.makers and self.makers[i][1].name.startswith(
            "psum"
        ):  # no mean comes of a term
            if known and not parts <= {a for one in known for a in one.over("mean", "share")}:
                return True
        return bool(parts) and any(self.is_wrong(x, deep) for x in given)  # it fits by chance

    def before(self, i: int) -> list[int]:
        """Return the values that a value is made of; where these have no twin, those before them."""
        seen, todo, result = {i}, [i], list[int]()
        while todo:
            if (at := todo.pop()) in self.outer:
                takes = [self.outer[at]]
            elif at not in self.makers:
                continue
            else:
                step = self.makers[at][1]
                takes = [step.body.gives[step.gives.index(at)]] if step.body else step.takes
            for x in (x for x in takes if is_value(x) and x not in seen):
                seen.add(x)
                (result if x in self.pair else todo).append(x)
        return result

    def first(self, wrong: list[int], deep: bool) -> list[int]:
        """Return the wrong values that are made of right ones alone, in the order of the program."""
        todo, seen, first = [i for i in wrong if is_value(i)], set[int](), list[int]()
        while todo:
            if (i := todo.pop()) in seen:
                continue
            seen.add(i)
            if more := [x for x in self.before(i) if self.is_wrong(x, deep)]:
                todo += more
            elif i in self.makers:
                first.append(i)
        return sorted(first, key=lambda i: self.makers[i][0])

    def findings(self, wrong: list[int]) -> list[dict[str, Any]]:
        """Try what the first wrong values suggest. Return what makes all results right; or what is seen
        without a trial; or else between which lines the mistake must be."""
        last, kept, seen = (
            [self.case.many.gives[j] for j in wrong],
            list[Finding](),
            list[Finding](),
        )
        for _ in range(_ROUNDS):
            first = self.first(last, False)
            deep = [i for i in self.first(last, True) if i not in first]
            each = [one for i in (*first, *deep) for one in self.suggestions(i)]
            first, seen = first + deep, seen or each
            able = [one for one in each if one.apply]
            alike = {one.value: one for one in reversed(able) if one.is_like(able[0])}
            groups = [
                *([one] for one in able[:1]),
                [*alike.values()][::-1],
                *([x] for x in able[1:_TRIED]),
            ]
            for tried in groups:
                if self.case.heals([*kept, *tried]):
                    rows = [x.row(True) for x in (*kept, *self.earlier(tried, kept))]
                    return [*{str(row): row for row in rows}.values()]
            if not able or able[0] in kept:
                break
            with contextlib.suppress(Exception):
                self.watch([*kept, able[0]])
            if self.is_wrong(able[0].value, True):
                break
            kept.append(able[0])
        if sure := [one for one in seen if one.kind in _SEEN]:
            return [one.row(False) for one in sure[:1]]
        self.watch(())
        first = self.first(last, False)
        lines = [self.makers[i][1].line for i in (*first, *last) if i in self.makers]
        start, end = (lines[0], lines[-1]) if lines else ("", "")
        place = f"at {start}" if start == end else f"between {start} and {end}"
        one = finding("unknown", self.steps[-1][1], [], place=place)
        return [replace(one, line=start, operands=self.operands(first)).row(False)]

    def earlier(self, tried: list[Finding], kept: list[Finding]) -> list[Finding]:
        """Return what else makes all results right, and is wrong before it: a factor may look like a mean."""
        if tried[0].kind in _SCALES:
            seen, todo = set[int](), [tried[0].value]
            while todo:
                new = [x for x in self.before(todo.pop()) if x not in seen]
                seen, todo = seen | set(new), todo + new
            wrong = [i for i in seen if (cut := self.cut(i)) is None or cut.factor != 1]
            first = [
                i
                for i in sorted(wrong)
                if i in self.makers and not set(self.before(i)) & set(wrong)
            ]
            each = [one for i in first for one in self.suggestions(i) if one.apply][:_TRIED]
            return next(([one] for one in each if self.case.heals([*kept, one])), tried)
        return tried

    def operands(self, values: list[int]) -> str:
        """Write the operands of the first of these values."""
        step = self.makers[values[0]][1] if values else None
        if not step or step.body or not step.takes:
            return ""
        return f"{step.name} of {'; '.join(map(self.text, step.takes))}"

    def rows(self) -> list[dict[str, str]]:
        """Return a row for each equation inside a shard_map."""
        inside = [(step, i) for program, step in self.steps for i in step.gives if program.sizes]
        return [{"line": s.line, "layout": self.text(i), "operation": s.name} for s, i in inside]

    def text(self, taken: Any) -> str:
        """Write a value's shape with its cuts: ``f32[8@dp,16], a partial sum over tp``."""
        if not is_value(taken):
            return "a constant"
        if taken not in self.pair:
            return "its own on each rank"
        whole, cut, axes = self.pairs(taken)[0][1], self.cut(taken), dict[Any, list[str]]()
        for axis, kind in cut.axes.items() if cut else ():
            axes.setdefault(kind, []).append(axis)
        dtype = short_dtype(np.asarray(self.values[0][taken]).dtype.name)
        words = [typed(dtype, whole.shape, axes), *["unknown"] * (cut is None)]
        words += [
            f"{text} {','.join(axes[kind])}" for kind, text in _STATES.items() if kind in axes
        ]
        return ", ".join(
            words + ([f"counted {cut.factor:g} times"] if cut and cut.factor != 1 else [])
        )

    # -------------------------------------------------------------------------------------- what it may be

    def suggestions(self, i: int) -> Iterator[Finding]:
        """Suggest mistakes that would make this value wrong, the likeliest first."""
        step, sizes = self.makers[i][1], self.homes[i].sizes
        each = list[Finding]()
        if step.body:
            each = list(self.of_result(step, step.gives.index(i)))
        elif step.name in ("random_bits", "iota"):
            each = list(self.of_source(i, step, sizes))
        else:
            cuts = [self.cut(x) or Pieces({}) for x in step.takes]
            each = [one for rule in _RULES for one in rule(step, cuts, sizes)]
        for one in each:
            one.operands, one.value = one.operands or self.operands([i]), i
            if (
                one.lacks
                and (maker := self.makers.get(step.takes[one.lacks[2]]))
                and not maker[1].body
            ):
                reduce, axes, k = one.lacks
                one.line = maker[1].line if one.kind == "mean for a sum" else step.line
                k = maker[1].gives.index(step.takes[k])
                apply = functools.partial(
                    _finished, maker[1], reduce, axes, k
                )  # for all that take it
                yield replace(one, step=maker[1], apply=apply)
            yield one
        if i in self.inner:
            yield from self.of_result(*self.inner[i])

    def of_source(self, i: int, step: Equation, sizes: dict[str, int]) -> Iterator[Finding]:
        """Random numbers, and numbers of positions, that are the same on every rank; or that are not."""
        local, whole, _ = self.pairs(i)[0]
        differs = [a for k, a in enumerate(sizes) if not close(local, np.take(local, [0], k), 0.0)]
        cuts = cuts_of_shape(local.shape[len(sizes) :], whole.shape, sizes, frozenset(differs))
        axes = [a for cut in cuts for a in cut]
        same, more = [a for a in axes if a not in differs], [a for a in differs if a not in axes]
        if step.name == "random_bits":
            apply = functools.partial(draw_shard, step.params, whole.shape, sizes, cuts, ())
            yield from (finding("another key", step, more, apply) for _ in more[:1])
            yield from (finding("same key", step, same, apply) for _ in same[:1])
        elif len(same) == 1:
            dim, dtype = next(d for d, cut in enumerate(cuts) if cut), self.values[0][i].dtype
            apply = functools.partial(_own_part, whole.astype(dtype), dim, same[0])
            yield finding("positions", step, same, apply)

    def of_result(self, step: Equation, k: int) -> Iterator[Finding]:
        """A result of shard_map that is not what its out_specs promise."""
        assert step.body
        inner, sizes, spec = step.body.gives[k], step.body.sizes, step.params["out_specs"][k]
        if (cut := self.cut(inner)) is None:
            return
        what = f"result {k}" if len(step.gives) > 1 else "the result"
        named = {a: d for d, cut_by in enumerate(spec) for a in jax.tree.leaves(cut_by)}
        maker = self.makers.get(inner, (0, step))[1]
        place: Any = {"line": maker.line, "operands": f"{what}: {self.text(inner)}", "value": inner}
        add = lambda *xs, **words: replace(finding(*xs, what=what, **words), **place)
        for axis in cut.over("sum") if cut.factor != 1 else ():
            if (
                cut.factor == sizes[axis] - 1
                and hops(self.case.many, inner, axis) == sizes[axis] - 2
            ):
                yield add("ring", step, [axis], n=sizes[axis], seen=sizes[axis] - 1)
        for kind, reduce in _REDUCE.items():
            if axes := cut.over(kind):
                apply = functools.partial(_changed, reduce, tuple(axes), k)
                tail = ", a gradient that is not all-reduced" if maker.backward else ""
                yield add("unfinished", step, axes, apply, kind=kind, tail=tail)
        for axis, state in cut.axes.items():
            if is_cut(state) and state != named.get(axis):
                yield add("other order" if axis in named else "shard for a copy", step, [axis])


def _of_sum(step: Equation, cuts: list[Pieces], sizes: dict[str, int]) -> Iterator[Finding]:
    """A sum over the wrong axis, or of what is no term of it."""
    if (
        not step.name.startswith(("psum", "reduce_scatter", "unreduced"))
        or not cuts
        or not cuts[0].axes
    ):
        return
    cut, axes = cuts[0], [a for a in step.axes if a in sizes]
    copies, means, shards = (
        [a for a in axes if a in cut.over(kind)] for kind in ("copy", "mean", "cut")
    )
    rest, wrong = [a for a in cut.over("sum") if a not in axes], copies + shards
    scaled = lambda names: (
        lambda *xs: _scaled(step.call(*xs), 1 / math.prod(sizes[a] for a in names))
    )
    over = lambda names: lambda *xs: [lax.psum(x, names) if names else x for x in xs]
    if wrong and rest:
        right = tuple([a for a in axes if a not in wrong] + rest)
        state = "cut" if shards else "the same on all ranks"
        yield finding(
            "wrong axis", step, wrong, over(right), state=state, rest=_and(rest), right=_axes(right)
        )
    if copies:
        yield finding("transposed" if step.backward else "counted", step, copies, scaled(copies))
    if means:
        yield finding("sum of means", step, means, scaled(means))
    if shards:
        yield finding(
            "sum of shards", step, shards, over(tuple(a for a in axes if a not in shards))
        )


def _of_operation(step: Equation, cuts: list[Pieces], sizes: dict[str, int]) -> Iterator[Finding]:
    """An operation on a value that still lacks its sum, mean, max or min."""
    if step.axes and not step.name.startswith(("pmax", "pmin", "all_gather")):
        return
    for axis, n in sizes.items():
        of = lambda kind, axis=axis: [j for j, cut in enumerate(cuts) if cut.axes.get(axis) == kind]
        if step.name in _LINEAR and of("sum") and of("copy"):
            less = lambda x, n=n: _scaled(x, 1 / n)[0]
            changes = dict.fromkeys(of("copy"), less)
            yield finding("added", step, [axis], functools.partial(_with, step, changes))
    for kind, reduce in _REDUCE.items():
        lacking = [a for a in sizes if any(cut.axes.get(a) == kind for cut in cuts)]
        for axes in [*([lacking] if len(lacking) > 1 else []), *([a] for a in lacking)]:
            parts = [j for j, cut in enumerate(cuts) if {*axes} <= {*cut.over(kind)}]
            key = (
                "mean of means"
                if step.name == "div" and parts == [0, 1] and kind == "sum"
                else "missing"
            )
            change = functools.partial(_reduced, reduce, tuple(axes))
            for chosen in dict.fromkeys((tuple(parts), *((j,) for j in parts))) if parts else ():
                apply = functools.partial(_with, step, dict.fromkeys(chosen, change))
                one = finding(key, step, axes, apply, kind=kind)
                lacks = (reduce, tuple(axes), chosen[0])
                yield replace(one, lacks=lacks) if len(chosen) == 1 else one


def _of_shard(step: Equation, cuts: list[Pieces], sizes: dict[str, int]) -> Iterator[Finding]:
    """An operation that needs a whole dim, on a shard of it."""
    for axis, dim in cuts[0].axes.items() if cuts and step.name in _WHOLE else ():
        if isinstance(dim, int):
            change = functools.partial(lax.all_gather, axis_name=axis, axis=dim, tiled=True)
            yield finding(
                "over a shard", step, [axis], functools.partial(_with, step, {0: change}), dim=dim
            )


_RULES = (_of_sum, _of_operation, _of_shard)


def finding(
    key: str, step: Equation, axes: list[str], apply: Callable | None = None, **words: Any
) -> Finding:
    """Make a finding with the words of `_SAYS`."""
    if "kind" in words:
        reduce, state = _REDUCE[words["kind"]], _STATES[words["kind"]]
        lack = "mean for a sum" if words["kind"] == "share" else f"missing {words['kind']}"
        words |= {"state": state, "reduce": reduce.__name__, "lack": lack}
    words |= {"axes": _and(axes), "names": _axes(axes), "name": step.name}
    kind, sentence, cure = (text.format(**words) for text in _SAYS[key])
    return Finding(step, kind, axes, sentence, cure, apply)


def _and(axes: Iterable[str]) -> str:
    return " and ".join(axes)


def _axes(axes: Iterable[str]) -> str:
    names = tuple(axes)
    return repr(names[0] if len(names) == 1 else names)


def _reduced(reduce: Callable, axes: tuple[str, ...], x: Any) -> Any:
    return reduce(x, axes)


def _with(step: Equation, changes: dict[int, Callable], *xs: Any) -> Any:
    """Call a step with some operands changed."""
    return step.call(*(changes[j](x) if j in changes else x for j, x in enumerate(xs)))


def _finished(step: Equation, reduce: Callable, axes: tuple[str, ...], k: int, *xs: Any) -> list:
    """Call a step, and reduce its k-th result."""
    results = step.call(*xs)
    return _changed(reduce, axes, k, *(results if isinstance(results, list | tuple) else [results]))


def _changed(reduce: Callable, axes: tuple[str, ...], k: int, *results: Any) -> list:
    return [reduce(x, axes) if j == k else x for j, x in enumerate(results)]


def _scaled(results: Any, factor: float) -> list:
    """Multiply results, and keep their dtypes."""
    results = results if isinstance(results, list | tuple) else [results]
    return [
        (x * jnp.asarray(factor, jnp.float32)).astype(x.dtype) for x in map(jnp.asarray, results)
    ]


def _own_part(whole: np.ndarray, dim: int, axis: str) -> Any:
    """Return this rank's shard of a whole value."""
    size = whole.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(jnp.asarray(whole), lax.axis_index(axis) * size, size, dim)


# ------------------------------------------------------------------------------------------------- numbers


def _arguments(args: tuple, kwargs: dict) -> tuple[list, list[str]]:
    """Return the arguments that are arrays, and their names."""
    pairs = [
        (path, x) for path, x in jax.tree.leaves_with_path((args, kwargs)) if hasattr(x, "dtype")
    ]
    return [x for _, x in pairs], [jax.tree_util.keystr(path[1:]) for path, _ in pairs]


def _on_arrays(f: Callable, args: tuple, kwargs: dict) -> Callable:
    """Return f as a function of the arrays among its arguments."""
    leaves, tree = jax.tree.flatten((args, kwargs))

    def call(*arrays: Any) -> Any:
        rest = iter(arrays)
        xs = [next(rest) if hasattr(x, "dtype") else x for x in leaves]
        given, named = jax.tree.unflatten(tree, xs)
        return f(*given, **named)

    return call


def _and_gradients(call: Callable, names: list[str]) -> Callable:
    """Return results, and the gradients of the first one by every array of floats."""

    def both(*arrays: Any) -> Any:
        by = [i for i, x in enumerate(arrays) if _is_float(x)]

        def loss(floats: list) -> tuple[Any, Any]:
            given = dict(zip(by, floats, strict=True))
            results = call(*(given.get(i, x) for i, x in enumerate(arrays)))
            return jax.tree.leaves(results)[0], results

        grads, results = jax.grad(loss, has_aux=True)([arrays[i] for i in by])
        return results, {f"gradient of {names[i]}": x for i, x in zip(by, grads, strict=True)}

    return both


def _name(path: Any) -> str:
    """Name a result, or a gradient."""
    last = str(getattr(path[-1], "key", "")) if path else ""
    return last if last.startswith("gradient of ") else f"result{jax.tree_util.keystr(path)}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def _is_spread(x: Any) -> bool:
    """Return whether an argument is on several devices."""
    return len(getattr(getattr(x, "sharding", None), "device_set", ())) > 1


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


@contextlib.contextmanager
def _context() -> Iterator[None]:
    """Work on one device also where the caller's mesh is in context."""
    mesh = jax.sharding.get_mesh()
    with contextlib.nullcontext() if mesh.empty else jax.set_mesh(_jax.mesh_of_ones(mesh)):
        yield


def _mesh_of(leaves: list, program: Program) -> dict[str, int]:
    """Return the mesh of arguments, or of constraints."""
    shardings = [getattr(x, "sharding", None) for x in leaves]
    shardings += [step.params.get("sharding") for _, step in program.all_steps()]
    meshes = [getattr(sharding, "mesh", None) for sharding in shardings]
    return next((dict(mesh.shape) for mesh in meshes if mesh is not None), {})


def _values(x: Any, seed: int) -> Any:
    """Return an argument's values: its own, and with seed 1 floats in another order, or a little larger where
    all are equal. A shape gets random ones."""
    rng = np.random.default_rng(seed)
    if isinstance(x, jax.ShapeDtypeStruct):
        is_float = jnp.issubdtype(x.dtype, jnp.inexact)
        return (rng.standard_normal(x.shape) if is_float else rng.integers(0, 2, x.shape)).astype(
            x.dtype
        )
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    values = np.asarray(x)
    if seed == 0 or not _is_float(x) or not x.size:
        return values
    if (values == values.flat[0]).all():
        return (values + 0.1 * abs(rng.standard_normal(x.shape))).astype(x.dtype)
    return rng.permutation(values.ravel()).reshape(x.shape)


def _moved(x: Any) -> Any:
    """Return an argument that differs by about a rounding."""
    if not _is_float(x):
        return x
    step = _NOISE * 2.0**16 if x.dtype.itemsize == 2 else _NOISE
    noise = np.random.default_rng(2).standard_normal(x.shape)
    return (np.asarray(x).astype(np.float64) * (1 + step * noise)).astype(x.dtype)


def _array(x: Any) -> np.ndarray:
    """Return numbers in double precision."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x.astype(complex if np.iscomplexobj(x) else float)


def _arrays(results: Any) -> list[np.ndarray]:
    return [_array(x) for x in jax.tree.leaves(results)]


def _scale(x: np.ndarray) -> float:
    return float(abs(x[np.isfinite(x)]).max(initial=0.0)) or 1.0


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference, infinite where shapes, NaNs or infinities differ."""
    if a.shape != b.shape or not close(a, b, math.inf):
        return math.inf
    both = np.isfinite(a) & np.isfinite(b)
    return float(abs(a[both] - b[both]).max(initial=0.0))


def _bound(spread: float, whole: np.ndarray, moved: np.ndarray, *more: np.ndarray) -> float:
    """Return how far rounding may move a value: by the sums on its path, and as it moves with arguments."""
    noise = _distance(whole, moved)
    return spread * max(map(_scale, (whole, *more))) + FACTOR * (
        noise if math.isfinite(noise) else 0.0
    )
