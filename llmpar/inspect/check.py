"""Check that a parallel program computes what one device computes, and name the line where it does not."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llmpar.inspect.census import text_columns
from llmpar.inspect.twin import (
    Cut,
    Pair,
    Step,
    close,
    cut_of,
    draw,
    is_cut,
    is_value,
    number_of_times,
    read,
    run,
    share_draws,
    spreads,
    twins,
)
from llmpar.parallel import _jax
from llmpar.predict.tolerance import FACTOR

_LINEAR = {"add", "sub", "add_any"}
_OVER_A_SHARD = {
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
_NOISE = 2.0**-22
"""A second run on one device has its arguments changed by so much: how far a value moves is rounding, too."""
_REDUCE = {"sum": lax.psum, "mean": lax.pmean, "max": lax.pmax, "min": lax.pmin}
_NAMES = {"sum": "psum", "mean": "pmean", "max": "pmax", "min": "pmin"}
_TRIED = 6
"""So many candidates are tried at most: each is compiled."""


@dataclass(frozen=True, repr=False)
class Check:
    """State whether a parallel program computes what one device computes. It is true where it does.

    Attributes:
        results: of each result, and of each gradient of a scalar: ``name``, ``difference`` and ``bound``, both
            relative to its largest element, ``equal``. The bound is what rounding explains.
        findings: ``line``, ``kind``, ``axes``, ``sentence`` and ``cure``. With ``tried`` the results are right
            when the cure is applied; without it the kind is "unknown", and ``guess`` says what it may be.
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
        numbers = f"{worst['name']} differs by {worst['difference']:.1e}, rounding explains {worst['bound']:.1e}"
        words = [
            f"{self.name} on {on} {'equals' if self.equal else 'is NOT'} the program of one device: {numbers}"
        ]
        for row in self.findings:
            words.append(f"{row['line']}: {row['sentence']}")
            words += [f"    operands: {row['operands']}"] if row["operands"] else []
            tried = " (tried: all results are right then)" if row["tried"] else ""
            words += [f"    cure: {row['cure']}{tried}"] if row["cure"] else []
        return "\n".join(words + [f"note: {text}" for text in self.notes])

    __repr__ = __str__

    def layouts(self) -> list[dict[str, str]]:
        """Run the program once more and return how every value is cut: ``line``, ``operation``, ``layout``."""
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
        reference: the same function for one device. None: f itself, with every `jax.shard_map` in it on a mesh
            of ones, and without constraints on layouts.
        args: f's arguments: arrays, whose values are used and, once more, shuffled; or
            `jax.ShapeDtypeStruct`s, for random ones. Take small shapes. What has no dtype is static.
        kwargs: f's keyword arguments.

    Raises:
        ValueError: there is no reference and f cannot run on a mesh of ones, or results have other shapes.
    """
    case = _Case(f, None if reference is f else reference, args, kwargs)
    rows, wrong = case.compare(case.many_results())
    findings = list[dict[str, Any]]()
    if wrong:
        findings = case.findings(wrong)
    name = getattr(f, "__name__", type(f).__name__)
    return Check(name, case.mesh, not wrong, rows, findings, case.notes, case.layouts)


class _Case:
    """One comparison: the programs, their arguments and their results."""

    def __init__(self, f: Callable, reference: Callable | None, args: tuple, kwargs: dict):
        self.notes = list[str]()
        leaves, tree = jax.tree.flatten((args, kwargs))
        self.leaves, places = (
            [x for x in leaves if hasattr(x, "dtype")],
            [hasattr(x, "dtype") for x in leaves],
        )

        def on_arrays(g: Callable) -> Callable:
            def call(*arrays: Any) -> Any:
                rest = iter(arrays)
                xs = [
                    next(rest) if is_array else x
                    for x, is_array in zip(leaves, places, strict=True)
                ]
                given, named = jax.tree.unflatten(tree, xs)
                return g(*given, **named)

            return call

        self.call = self.with_gradients(on_arrays(f))
        traced, shape = jax.make_jaxpr(self.call, return_shape=True)(*self.leaves)
        self.names = [_name(path) for path, _ in jax.tree.leaves_with_path(shape)]
        self.many, self.one, self.why = read(traced), None, ""
        bodies = [step.body for _, step in self.many.all_steps() if step.body]
        self.mesh = {a: n for body in bodies for a, n in body.sizes.items()} or _mesh_of(
            self.leaves
        )
        try:
            with _jax.on_one_device(), _context():
                self.one = read(jax.make_jaxpr(self.call)(*map(_bare, self.leaves)), alone=True)
        except Exception as error:
            self.why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        self.base = self.one
        if reference is not None:
            call = (
                _and_gradients(on_arrays(reference)) if self.has_gradients else on_arrays(reference)
            )
            with _context():
                traced, others = jax.make_jaxpr(call, return_shape=True)(*map(_bare, self.leaves))
            self.base = read(traced, alone=True)
            if (a := jax.tree.map(np.shape, shape)) != (b := jax.tree.map(np.shape, others)):
                raise ValueError(
                    f"results have shapes {a}, and those of the reference {b}; they must agree"
                )
        if self.base is None:
            raise ValueError(
                f"the program cannot be traced on a mesh of ones ({self.why}); give the function for one device as"
                " reference"
            )
        self.draws = bool(self.one) and share_draws(self.many, self.one)
        if self.draws and self.base is not self.one:
            self.base = self.one
            self.notes.append(
                "it draws random numbers: compared with itself on one device, which draws them, too"
            )
        self.one_run = jax.jit(functools.partial(run, self.base))
        self.inputs = [[_values(x, seed) for x in self.leaves] for seed in (0, 1)]
        with _context():
            self.right = [_arrays(self.one_run(xs)[0]) for xs in self.inputs]
            moved = [_arrays(self.one_run(list(map(_moved, xs)))[0]) for xs in self.inputs]
        self.spreads = spreads(self.base, math.prod(self.mesh.values()))
        of = lambda x: self.spreads.get(x, 0.0) if is_value(x) else 0.0
        self.bounds = [
            [_bound(of(i), a, b) for i, a, b in zip(self.base.gives, *side, strict=True)]
            for side in zip(self.right, moved, strict=True)
        ]

    def with_gradients(self, call: Callable) -> Callable:
        """Add the gradients to a function of scalar results, if it has any."""
        shape = jax.eval_shape(call, *self.leaves)
        scalars = [
            x.shape == () and jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(shape)
        ]
        self.has_gradients = bool(scalars) and all(scalars) and any(map(_is_float, self.leaves))
        if self.has_gradients:
            try:
                jax.eval_shape(_and_gradients(call), *self.leaves)
                return _and_gradients(call)
            except Exception as error:
                self.has_gradients = False
                self.notes.append(
                    f"gradients cannot be taken: {str(error).partition(chr(10))[0][:200]}"
                )
        return call

    def placed(self, values: list) -> list:
        """Put values where the arguments are."""
        where = [getattr(x, "sharding", None) for x in self.leaves]
        return [
            x if s is None else jax.device_put(x, s) for x, s in zip(values, where, strict=True)
        ]

    def many_results(self) -> list[list[np.ndarray]]:
        """Run the program as it is; with shared random numbers, if it draws any."""
        body = (
            (lambda *xs: run(self.many, xs)[0])
            if self.draws
            else (lambda *xs: jax.tree.leaves(self.call(*xs)))
        )
        call = jax.jit(body)
        return [_arrays(call(*self.placed(xs))) for xs in self.inputs]

    def compare(self, results: list[list[np.ndarray]]) -> tuple[list[dict], list[int]]:
        """Return a row for each result, and the numbers of those that differ."""
        rows = list[dict[str, Any]]()
        for j, name in enumerate(self.names):
            sides = [
                (a[j], b[j], c[j]) for a, b, c in zip(results, self.right, self.bounds, strict=True)
            ]
            equal = all(a.shape == b.shape and close(a, b, c) for a, b, c in sides)
            far = [(_distance(a, b) / _scale(b), c / _scale(b)) for a, b, c in sides]
            difference, bound = max(far, key=lambda pair: pair[0] - pair[1])
            rows.append({"name": name, "difference": difference, "bound": bound, "equal": equal})
        return rows, [j for j, row in enumerate(rows) if not row["equal"]]

    @functools.cached_property
    def reading(self) -> "_Reading":
        return _Reading(self)

    def layouts(self) -> list[dict[str, str]]:
        return self.reading.rows() if self.one else []

    def findings(self, wrong: list[int]) -> list[dict[str, Any]]:
        """Name what makes these results wrong."""
        if self.one is None:
            self.notes.append(
                f"its lines cannot be compared: on a mesh of ones it is no program ({self.why})"
            )
            return []
        alone = [_arrays(jax.jit(functools.partial(run, self.one))(xs)[0]) for xs in self.inputs]
        if self.base is not self.one and self.compare(alone)[1]:
            self.notes.append(
                "on a mesh of ones the program differs from the reference, too: the difference is no"
                " matter of sharding, or sizes are written as numbers; lines are not compared"
            )
            return []
        return self.reading.findings(wrong)

    def heals(self, cures: list["Finding"]) -> bool:
        """Return whether all results are right with these cures."""
        for one in cures:
            one.step.cure = one.apply
        try:
            call = jax.jit(lambda *xs: run(self.many, xs)[0])
            return not self.compare([_arrays(call(*self.placed(xs))) for xs in self.inputs])[1]
        except Exception:
            return False
        finally:
            for one in cures:
                one.step.cure = None


@dataclass(eq=False)
class Finding:
    """State what may be wrong at a step, and what would mend it: ``apply`` in the place of its call."""

    step: Step
    kind: str
    axes: list[str]
    sentence: str
    cure: str
    apply: Callable[..., Any] | None = None
    operands: str = ""

    def row(self, tried: bool) -> dict[str, Any]:
        row = {
            "line": self.step.line,
            "kind": self.kind,
            "axes": self.axes,
            "sentence": self.sentence,
        }
        return row | {"cure": self.cure, "operands": self.operands, "tried": tried}


class _Reading:
    """The layouts of all values, and what they say of wrong results."""

    def __init__(self, case: _Case):
        self.case, many, one = case, case.many, case.one
        self.pair, self.cuts = twins(many, one), dict[int, Cut | None]()
        self.steps = [(program, step) for program, step in many.all_steps()]
        self.makers = {
            i: (n, *self.steps[n]) for n in range(len(self.steps)) for i in self.steps[n][1].gives
        }
        self.homes = {
            i: program for program, step in self.steps for i in (*step.gives, *program.takes)
        }
        self.outer = dict[int, Any]()  # of arguments of a shard_map's body
        for _, step in self.steps:
            self.outer |= zip(step.body.takes, step.takes, strict=True) if step.body else ()
        self.spreads = spreads(one, math.prod(case.mesh.values()))
        watch = jax.jit(lambda xs: run(many, xs, see=True)[1])
        twin = jax.jit(lambda xs: run(one, xs, see=True)[1])
        self.values = [watch(case.placed(xs)) for xs in case.inputs]
        with _context():
            self.twins = [twin(xs) for xs in case.inputs]
            self.moved = [twin(list(map(_moved, xs))) for xs in case.inputs]

    def cut(self, taken: Any) -> Cut | None:
        """Return how a value is cut, None where nothing explains it; constants are the same everywhere."""
        if not is_value(taken):
            return Cut(dict.fromkeys(self.case.mesh, "copy"))
        if taken not in self.cuts:
            sizes = self.homes[taken].sizes
            self.cuts[taken] = (
                cut_of(self.pairs(taken), sizes, True) if taken in self.pair else None
            )
        return self.cuts[taken]

    def pairs(self, i: int) -> list[Pair]:
        pairs, lead = list[Pair](), (0,) * len(self.homes[i].sizes)
        for values, right, moved in zip(self.values, self.twins, self.moved, strict=True):
            local, whole, near = (
                _array(x) for x in (values[i], right[self.pair[i]][lead], moved[self.pair[i]][lead])
            )
            bound = _bound(self.spreads.get(self.pair[i], 0.0), whole, near, local)
            pairs.append((local, whole, bound))
        return pairs

    def is_wrong(self, i: int) -> bool:
        return i in self.pair and ((cut := self.cut(i)) is None or cut.factor != 1)

    def before(self, i: int) -> list[int]:
        """Return the values that a value is made of; where these have no twin, those before them."""
        seen, todo, result = {i}, [i], list[int]()
        while todo:
            at = todo.pop()
            if at in self.outer:
                takes = [self.outer[at]]
            elif at not in self.makers:
                continue
            else:
                _, _, step = self.makers[at]
                takes = [step.body.gives[step.gives.index(at)]] if step.body else step.takes
            for x in (x for x in takes if is_value(x) and x not in seen):
                seen.add(x)
                (result if x in self.pair else todo).append(x)
        return result

    def first(self, wrong: list[int]) -> list[int]:
        """Return the wrong values that are made of right ones alone, in the order of the program."""
        todo, seen, first = list(wrong), set[int](), list[int]()
        while todo:
            if (i := todo.pop()) in seen:
                continue
            seen.add(i)
            if more := [x for x in self.before(i) if self.is_wrong(x)]:
                todo += more
            elif i in self.makers:
                first.append(i)
        return sorted(first, key=lambda i: self.makers[i][0])

    def findings(self, wrong: list[int]) -> list[dict[str, Any]]:
        """Try what the first wrong values suggest, and return what makes all results right, or else where the
        mistake must be."""
        last = [self.case.many.gives[j] for j in wrong]
        first = self.first([i for i in last if is_value(i)])
        groups = [list(self.suggestions(i)) for i in first]
        each = [one for group in groups for one in group]
        for one in (one for one in each[:_TRIED] if one.apply):
            if self.case.heals([one]):
                return [one.row(True)]
        best = [next((one for one in group if one.apply), None) for group in groups]
        if len(together := [one for one in best if one]) > 1 and self.case.heals(together):
            return [one.row(True) for one in together]
        if sure := [
            one for one in each if one.kind in ("order", "shard for a copy", "ring one hop short")
        ]:
            return [one.row(False) for one in sure[:1]]
        lines = [self.makers[i][2].line for i in (*first, *last) if i in self.makers]
        start, end = (lines[0], lines[-1]) if lines else ("", "")
        place = f"at {start}" if start == end else f"between {start} and {end}"
        row = {
            "line": start,
            "kind": "unknown",
            "axes": [],
            "operands": "",
            "cure": "",
            "tried": False,
        }
        row["sentence"] = (
            f"unknown, {place}: there values part first, and no single change mends it"
        )
        if each:
            row |= {"guess": each[0].kind, "operands": each[0].operands}
        return [row]

    def rows(self) -> list[dict[str, str]]:
        """Return a row for each equation inside a shard_map."""
        rows = list[dict[str, str]]()
        for program, step in self.steps:
            for i in step.gives if program.sizes else ():
                rows.append({"line": step.line, "operation": step.name, "layout": self.text(i)})
        return rows

    def text(self, taken: Any) -> str:
        """Write a value's shape with its cuts: ``f32[8@dp,16], a partial sum over tp``."""
        if not is_value(taken):
            return "a constant"
        if taken not in self.pair:
            return "its own on each rank"
        (_, whole, _), cut = self.pairs(taken)[0], self.cut(taken)
        dtype = str(np.asarray(self.values[0][taken]).dtype)
        dtype = dtype.replace("bfloat", "bf").replace("float", "f").replace("int", "i")
        if cut is None:
            return f"{dtype}{list(whole.shape)}, unknown".replace(" ", "", whole.ndim - 1)
        at = lambda d: ",".join(a for a, kind in cut.axes.items() if kind == d)
        dims = ",".join(f"{n}@{at(d)}" if at(d) else str(n) for d, n in enumerate(whole.shape))
        words = [f"{dtype}[{dims}]"]
        texts = {
            "sum": "a partial sum over",
            "mean": "each shard's mean over",
            "max": "each shard's max over",
        }
        texts |= {"min": "each shard's min over", "shard": "in another order over"}
        words += [
            f"{text} {','.join(cut.over(kind))}" for kind, text in texts.items() if cut.over(kind)
        ]
        words += [f"counted {number_of_times(cut.factor)}"] if cut.factor != 1 else []
        return ", ".join(words)

    # ------------------------------------------------------------------------------------- what it may be

    def suggestions(self, i: int) -> Iterator[Finding]:
        """Suggest mistakes that would make this value wrong, the likeliest first."""
        _, program, step = self.makers[i]
        if step.body:
            yield from self.of_result(step, step.gives.index(i))
            return
        cuts = [self.cut(x) for x in step.takes]
        operands = f"{step.name} of " + "; ".join(map(self.text, step.takes)) if step.takes else ""
        rules = (_of_collective, _of_division, _of_operation, _of_shard)
        each = [one for rule in rules for one in rule(step, cuts, program.sizes)]
        if step.name in ("random_bits", "iota"):
            each = list(self.of_source(i, step, program.sizes))
        for one in each:
            one.operands = operands
            yield one

    def of_source(self, i: int, step: Step, sizes: dict[str, int]) -> Iterator[Finding]:
        """Random numbers, and numbers of positions, that are the same on every rank."""
        (local, whole, _), *_ = self.pairs(i)
        n = len(sizes)
        same = [a for k, a in enumerate(sizes) if close(local, np.take(local, [0], k), 0.0)]
        dims = [d for d in range(whole.ndim) if local.shape[n + d] < whole.shape[d]]
        ratio = [whole.shape[d] // local.shape[n + d] for d in dims]
        if step.name == "random_bits" and not dims:
            axes = [a for a in sizes if a not in same]
            say = f"a different random key on every rank of {_and(axes)}, for a value that is the same on all of them"
            apply = functools.partial(draw, step.params, whole.shape, sizes, [[]] * whole.ndim, ())
            yield Finding(
                step,
                "different random keys",
                axes,
                say,
                f"use one key on all of {_and(axes)}",
                apply,
            )
        fits = [a for a in same if [sizes[a]] == ratio]
        for axis in fits:
            if step.name == "iota":
                say = f"positions begin at 0 on every rank of {axis}"
                yield Finding(
                    step, "positions without offset", [axis], say, f"add lax.axis_index('{axis}') * the shard's size",
                    lambda axis=axis: _own_part(jnp.asarray(whole), dims[0], local.shape[n + dims[0]], axis),
                )  # fmt: skip
            else:
                cuts = [[axis] if d in dims else [] for d in range(whole.ndim)]
                apply = functools.partial(draw, step.params, whole.shape, sizes, cuts, ())
                say = f"the same random key on every rank of {axis}: each draws the same numbers for its own shard"
                cure = f"key = jax.random.fold_in(key, lax.axis_index('{axis}'))"
                yield Finding(step, "same random key", [axis], say, cure, apply)

    def of_result(self, step: Step, k: int) -> Iterator[Finding]:
        """A result of shard_map that is not what its out_specs promise."""
        assert step.body
        inner, spec, sizes = step.body.gives[k], step.params["out_specs"][k], step.body.sizes
        cut, n = self.cut(inner), len(step.body.gives)
        what = f"result {k} of the shard_map" if n > 1 else "the result"
        named = {a: d for d, cut_by in enumerate(spec) for a in jax.tree.leaves(cut_by)}
        line = self.makers[inner][2].line if inner in self.makers else step.line
        at = Step(step.name, line, step.takes, step.gives, step.call, step.eqn, step.body)
        if cut is None:
            return
        short = [
            a
            for a in cut.over("sum")
            if cut.factor == sizes[a] - 1 and self.hops(inner, a) == sizes[a] - 2
        ]
        for axis in short if cut.factor != 1 else ():
            say = f"a ring one hop short: each rank of {axis} has seen {sizes[axis] - 1} of {sizes[axis]} blocks"
            yield Finding(
                at, "ring one hop short", [axis], say, "send once more", None, self.text(inner)
            )
        for kind, reduce in _REDUCE.items():
            if axes := cut.over(kind):
                one = {"sum": "a missing sum", "mean": "a missing mean"}.get(
                    kind, f"a missing {kind}"
                )
                state = {"sum": "a term of a sum", "mean": "each rank's own mean"}.get(
                    kind, f"each rank's own {kind}"
                )
                gradient = (
                    self.case.has_gradients or self.makers.get(inner, (0, 0, step))[2].backward
                )
                say = f"{one} over {_and(axes)}: {what} is still {state} over {_and(axes)}"
                say += ", a gradient that is not all-reduced" * gradient
                yield Finding(
                    step, one[2:], axes, say, f"lax.{_NAMES[kind]}(…, {_axes(axes)}) before it is returned",
                    lambda *xs, axes=axes, reduce=reduce: [reduce(x, axes) if j == k else x for j, x in enumerate(xs)],
                    self.text(inner),
                )  # fmt: skip
        for axis, kind in cut.axes.items():
            if is_cut(kind) and axis not in named:
                say = f"{what} is cut over {axis}, but out_specs say that it is the same on all of {axis}"
                cure = f"gather it over {axis}, or name {axis} in out_specs"
                yield Finding(at, "shard for a copy", [axis], say, cure, None, self.text(inner))
            elif is_cut(kind) and kind != named[axis]:
                say = f"the shards of {what} over {axis} are in another order or of another dim than out_specs say"
                yield Finding(at, "order", [axis], say, "", None, self.text(inner))

    def hops(self, i: Any, axis: str) -> int:
        """Return how many ppermutes over an axis are on the longest path to a value."""
        depth = dict[Any, int]()
        for _, step in self.steps:
            most = max((depth.get(x, 0) for x in step.takes if is_value(x)), default=0)
            depth |= dict.fromkeys(
                step.gives, most + (step.name == "ppermute" and axis in step.axes)
            )
        return depth.get(i, 0)


def _of_collective(step: Step, cuts: list, sizes: dict[str, int]) -> Iterator[Finding]:
    """A sum over the wrong axis, or of what is no term of it."""
    sums = step.name.startswith(("psum", "reduce_scatter", "unreduced"))
    if not sums or not cuts or (cut := cuts[0]) is None:
        return
    axes = [a for a in step.axes if a in sizes]
    rest = [a for a in cut.over("sum") if a not in axes]
    wrong = [a for a in axes if cut.axes[a] != "sum"]
    scaled = lambda names: (
        lambda *xs: _scaled(step.call(*xs), 1 / math.prod(sizes[a] for a in names))
    )
    if wrong and rest:
        right = [a for a in axes if a not in wrong] + rest
        state = (
            "cut" if cut.over("cut") and wrong[0] in cut.over("cut") else "the same on every rank"
        )
        say = f"wrong axis: a sum over {_and(wrong)}, along which the value is {state}; it is a term of a sum over"
        yield Finding(
            step, "wrong axis", wrong, f"{say} {_and(rest)}", f"sum over {_and(right)}",
            lambda *xs: lax.psum(xs if len(xs) > 1 else xs[0], tuple(right)),
        )  # fmt: skip
    if copies := [a for a in axes if cut.axes[a] == "copy"]:
        say = f"counted once per {_and(copies)}: a sum over {_and(copies)} of a value that is the same on all of it"
        cure = f"leave {_and(copies)} out of the sum"
        if step.backward:
            cure = "use check_vma=True, or take the gradient outside of shard_map: without types the transpose of a"
            cure += " psum is a psum"
        yield Finding(step, "counted", copies, say, cure, scaled(copies))
    if means := [a for a in axes if cut.axes[a] == "mean"]:
        say = f"counted once per {_and(means)}: a sum over {_and(means)} of each shard's mean"
        yield Finding(step, "sum of means", means, say, "use lax.pmean", scaled(means))
    if shards := [a for a in axes if is_cut(cut.axes[a])]:
        say = f"a sum over {_and(shards)} of shards: along {_and(shards)} the value is cut"
        keep = tuple(a for a in axes if a not in shards)
        yield Finding(
            step, "sum of shards", shards, say, f"leave {_and(shards)} out of the sum",
            lambda *xs: [lax.psum(x, keep) if keep else x for x in xs],
        )  # fmt: skip


def _of_division(step: Step, cuts: list, sizes: dict[str, int]) -> Iterator[Finding]:
    """A mean where a sum is meant."""
    value = np.asarray(getattr(step.takes[-1], "val", np.nan)) if step.takes else np.asarray(np.nan)
    if step.name in ("div", "mul") and value.size == 1 and np.isreal(value) and value not in (0, 1):
        number = float(value) if step.name == "div" else 1 / float(value)
        axes = [a for a in sizes if sizes[a] == number]
        if len(axes) == 1 or axes and math.prod(sizes.values()) == number:
            say = f"divided by {number:g}, the size of {axes[0]}: a mean over {axes[0]} where the sum is meant"
            apply = functools.partial(lambda number, *xs: _scaled(step.call(*xs), number), number)
            yield Finding(step, "mean for a sum", axes[:1], say, "lax.psum for lax.pmean", apply)


def _of_operation(step: Step, cuts: list, sizes: dict[str, int]) -> Iterator[Finding]:
    """An operation on a value that still lacks its sum, mean, max or min."""
    if step.axes and not step.name.startswith(("pmax", "pmin", "all_gather")):
        return
    known = [cut or Cut({}) for cut in cuts]
    sums = [set(cut.over("sum")) for cut in known]
    for axis in sizes:
        terms = [j for j, axes in enumerate(sums) if axis in axes]
        copies = [j for j, cut in enumerate(known) if cut.axes.get(axis) == "copy"]
        if step.name in _LINEAR and len(terms) == 1 and copies:
            say = f"counted once per {axis}: a value that is the same on all of {axis} is added to a term of a sum"
            yield Finding(
                step, "counted", [axis], f"{say} over {axis}", f"add it after the sum over {axis}",
                functools.partial(_with, step, dict.fromkeys(copies, _times(1 / sizes[axis]))),
            )  # fmt: skip
        for kind, reduce in _REDUCE.items():
            parts = [j for j, cut in enumerate(known) if cut.axes.get(axis) == kind]
            means = kind == "sum" and step.name == "div" and parts[-1:] == [1]
            if means:
                say = f"a mean of means: each rank of {axis} divides by its own sum; such means have other weights"
            else:
                say = f"a missing {kind} over {axis}: {step.name} takes {_part(kind)} {kind} over {axis}"
            name, call = (
                "mean of means" if means else f"missing {kind}",
                f"lax.{_NAMES[kind]}(…, '{axis}')",
            )
            for chosen in dict.fromkeys((tuple(parts), *((j,) for j in parts))) if parts else ():
                change = functools.partial(
                    lambda x, reduce, axis: reduce(x, axis), reduce=reduce, axis=axis
                )
                apply = functools.partial(_with, step, dict.fromkeys(chosen, change))
                yield Finding(step, name, [axis], say, f"{call} before the {step.name}", apply)


def _of_shard(step: Step, cuts: list, sizes: dict[str, int]) -> Iterator[Finding]:
    """An operation that needs a whole dim, on a shard of it."""
    cut = cuts[0] if cuts else None
    for axis, dim in cut.axes.items() if cut and step.name in _OVER_A_SHARD else ():
        if isinstance(dim, int):
            say = f"{step.name} over a shard: each rank of {axis} has a part of dim {dim} alone"
            cure = f"gather dim {dim} over {axis}, or combine what the ranks find"
            change = functools.partial(lax.all_gather, axis_name=axis, axis=dim, tiled=True)
            yield Finding(
                step, "over a shard", [axis], say, cure, functools.partial(_with, step, {0: change})
            )


def _part(kind: str) -> str:
    return "a term of a" if kind == "sum" else "each shard's own"


def _and(axes: list[str]) -> str:
    return " and ".join(axes)


def _axes(axes: list[str]) -> str:
    return repr(axes[0] if len(axes) == 1 else tuple(axes))


def _with(step: Step, changes: dict[int, Callable], *xs: Any) -> Any:
    """Call a step with some operands changed."""
    return step.call(*(changes[j](x) if j in changes else x for j, x in enumerate(xs)))


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda x: _scaled(x, factor)[0]


def _scaled(results: Any, factor: float) -> list:
    """Multiply results, and keep their dtypes."""
    results = results if isinstance(results, list | tuple) else [results]
    return [
        (x * jnp.asarray(factor, jnp.float32)).astype(x.dtype) for x in map(jnp.asarray, results)
    ]


def _own_part(whole: Any, dim: int, size: int, axis: str) -> Any:
    """Return this rank's shard of a whole value."""
    return lax.dynamic_slice_in_dim(whole, lax.axis_index(axis) * size, size, dim)


# ------------------------------------------------------------------------------------------------- numbers


def _and_gradients(call: Callable) -> Callable:
    """Return results, and the gradients of the first one by every array of floats."""

    def both(*arrays: Any) -> Any:
        by = [i for i, x in enumerate(arrays) if _is_float(x)]

        def loss(floats: list) -> tuple[Any, Any]:
            given = dict(zip(by, floats, strict=True))
            results = call(*(given.get(i, x) for i, x in enumerate(arrays)))
            return jax.tree.leaves(results)[0], results

        grads, results = jax.grad(loss, has_aux=True)([arrays[i] for i in by])
        return {"result": results, "gradient of argument": dict(zip(by, grads, strict=True))}

    return both


def _name(path: Any) -> str:
    text = jax.tree_util.keystr(path)
    return (
        text.replace("['result']", "result", 1).replace(
            "['gradient of argument']", "gradient of argument ", 1
        )
        or "result"
    )


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _bare(x: Any) -> Any:
    """Return an array's shape and dtype without its sharding; a random key as it is."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@contextlib.contextmanager
def _context() -> Iterator[None]:
    """Work on one device also where the caller's mesh is in context."""
    mesh = jax.sharding.get_mesh()
    with contextlib.nullcontext() if mesh.empty else jax.set_mesh(_jax.mesh_of_ones(mesh)):
        yield


def _mesh_of(leaves: list) -> dict[str, int]:
    meshes = [getattr(getattr(x, "sharding", None), "mesh", None) for x in leaves]
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
    """Return how far rounding may move a value: by the sums on its path, and as it moves with the arguments."""
    noise = _distance(whole, moved)
    return spread * max(map(_scale, (whole, *more))) + FACTOR * (
        noise if math.isfinite(noise) else 0.0
    )
