"""Run a program on its mesh and on a mesh of ones, equation by equation, and read how every value is
cut.

On a mesh of ones the same text is the program of one device: each value has a *twin* there. The values of n
devices are put together in every way that shapes allow (a copy, a shard of a dim, a term of a sum …); the way
that gives the twin is the value's layout. Nothing is read from types, so `check_vma=False` hides nothing.
"""

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from llmpar.inspect.jaxpr import line_within
from llmpar.parallel import _jax
from llmpar.predict.tolerance import FACTOR, ROUNDING, UNIT, tree

_INLINED = {"pjit", "jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
_INLINED |= {"custom_vjp_call_jaxpr", "remat", "remat2", "checkpoint"}
_TYPES = {"pvary", "pcast", "preduced", "vary_unreduced_cast", "reduced_vary_cast"}
"""Primitives that change a value's type inside shard_map, and not the value."""
_LAYOUTS = {"sharding_constraint", "reshard", "mesh_cast"}
_OURS = r"^inspect/(check|twin)\.py.*"
_UNROLLED, _EQUATIONS = 16, 2000
"""A scan is read iteration by iteration up to so many of them, and so many equations in all."""
REDUCED = ("sum", "mean", "max", "min")
"""What values of several devices may be parts of, beside shards."""


@dataclass(eq=False)
class Equation:
    """State one equation, after calls are inlined and short loops unrolled.

    Attributes:
        takes: ids of values, or constants with their value as ``val``.
        body: the program inside a shard_map.
        cures: replace ``call``, or change the results of a shard_map, to try what mends a program.
    """

    name: str
    line: str
    takes: list[Any]
    gives: list[int]
    call: Callable[..., Any]
    eqn: Any = None
    body: "Program | None" = None
    cures: list[Callable[..., Any]] = field(default_factory=list)

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params if self.eqn else {}

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that a collective names."""
        named = jax.tree.leaves([self.params.get("axes", ()), self.params.get("axis_name", ())])
        return tuple(a for a in named if isinstance(a, str))

    @property
    def backward(self) -> bool:
        """Whether JAX made it as the transpose of another one."""
        return bool(self.eqn) and "transpose" in str(self.eqn.source_info.name_stack)


@dataclass(eq=False)
class Program:
    """State a program as a list of steps. ``sizes``: the axes that are manual in it."""

    takes: list[int]
    gives: list[Any]
    steps: list[Equation]
    sizes: dict[str, int] = field(default_factory=dict)

    def all_steps(self) -> Iterator[tuple["Program", Equation]]:
        """List the steps with the program that they are in, those of a shard_map before itself."""
        for step in self.steps:
            if step.body:
                yield from step.body.all_steps()
            yield self, step


@dataclass
class _Constant:
    val: Any


def is_value(taken: Any) -> bool:
    """Return whether an operand is a step's result or an argument, and no constant."""
    return isinstance(taken, int)


class _Reader:
    """Make a `Program` of a jaxpr. ``alone``: constraints on layouts are left out."""

    def __init__(self, alone: bool):
        self.alone, self.ids, self.manual = alone, itertools.count(), False

    def program(self, closed: Any, sizes: dict[str, int], place: tuple[str, str]) -> Program:
        jaxpr, consts = _jax.equations(closed)
        takes, steps = self.number(jaxpr.invars), list[Equation]()
        return Program(takes, self.inline(jaxpr, consts, takes, steps, place), steps, sizes)

    def number(self, variables: Iterable[Any]) -> list[int]:
        return [next(self.ids) for _ in variables]

    def inline(
        self, jaxpr: Any, consts: Any, takes: list, steps: list[Equation], place: Any
    ) -> list:
        """Add the steps of a jaxpr, and return the ids of its results. ``place``: `line_within`."""
        known = dict(zip(jaxpr.constvars, map(_Constant, consts), strict=True))
        known |= zip(jaxpr.invars, takes, strict=True)
        of = lambda v: v if hasattr(v, "val") else known[v]
        for eqn in jaxpr.eqns:
            xs, name = [of(v) for v in eqn.invars], eqn.primitive.name
            line = re.sub(_OURS, "", line_within(eqn, *place)) or place[1]
            inner = next((x for x in jax.tree.leaves(eqn.params) if hasattr(x, "eqns")), None)
            helper = eqn.params.get("name")
            inside = (helper, line) if isinstance(helper, str) else place
            if self.alone and name in _LAYOUTS:
                gives = xs[:1]
            elif name in _INLINED and len(_jax.equations(inner)[0].invars) == len(xs):
                gives = self.inline(*_jax.equations(inner), xs, steps, inside)
            elif name == "scan" and eqn.params["length"] <= _UNROLLED and self.is_short(eqn, inner):
                gives = self.unroll(eqn, inner, xs, steps, inside, line)
            else:
                gives = self.number(eqn.outvars)
                steps.append(Equation(name, line, xs, gives, _caller(eqn), eqn))
                if name == "shard_map" and not self.manual:
                    self.manual, mesh = True, eqn.params["mesh"]
                    names = [a for a in mesh.axis_names if a in eqn.params["newly_manual_axes"]]
                    sizes = {a: mesh.shape[a] for a in names}
                    steps[-1].body, self.manual = self.program(inner, sizes, inside), False
                    lines = [x.line for x in steps[-1].body.steps if x.line]
                    steps[-1].line = line or (lines or [""])[-1]
            known |= zip(eqn.outvars, gives, strict=True)
        return [of(v) for v in jaxpr.outvars]

    def is_short(self, eqn: Any, inner: Any) -> bool:
        return eqn.params["length"] * len(_jax.equations(inner)[0].eqns) <= _EQUATIONS

    def unroll(self, eqn: Any, inner: Any, xs: list, steps: list, place: Any, line: str) -> list:
        """Add the iterations of a scan one after another."""
        consts, carried = _jax.scan_parts(eqn)
        carry, rows = xs[consts : consts + carried], list[list]()
        order = range(eqn.params["length"])
        for i in reversed(order) if eqn.params["reverse"] else order:
            parts = self.number(xs[consts + carried :])
            for part, x in zip(parts, xs[consts + carried :], strict=True):
                at = functools.partial(lax.index_in_dim, index=i, keepdims=False)
                steps.append(Equation("slice of scan", line, [x], [part], at))
            given = [*xs[:consts], *carry, *parts]
            results = self.inline(*_jax.equations(inner), given, steps, place)
            carry = results[:carried]
            rows.insert(0 if eqn.params["reverse"] else len(rows), results[carried:])
        stacked = self.number(rows[0] if rows else [])
        for column, gives in zip(zip(*rows, strict=True), stacked, strict=True):
            stack = lambda *parts: jnp.stack(parts)
            steps.append(Equation("scan", line, list(column), [gives], stack))
        return [*carry, *stacked]


def _caller(eqn: Any) -> Callable[..., Any]:
    """Return a function that runs an equation under ``check_vma=False``, whatever it was traced under."""
    name, params = eqn.primitive.name, eqn.params
    if name in _TYPES:
        return lambda x: x
    if name in ("psum_invariant", "unreduced_psum"):
        return lambda *xs: lax.psum(xs if len(xs) > 1 else xs[0], params["axes"])
    if name in ("all_gather_invariant", "all_gather_reduced"):
        dim, tiled = params["all_gather_dimension"], params["tiled"]
        return lambda x: lax.all_gather(x, params["axis_name"], axis=dim, tiled=tiled)
    return lambda *xs: eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params(params))


def read(closed: Any, alone: bool = False) -> Program:
    """Read a traced function as a list of steps. ``alone``: for one device, without layouts."""
    return _Reader(alone).program(closed, {}, ("", ""))


_Values = dict[int, Any]


def run(program: Program, args: Iterable[Any], see: bool = False) -> tuple[list, _Values]:
    """Run a program, and with ``see`` return every value by its id: whole outside shard_map; inside one row
    for each device, with the axes of the mesh as first dims."""
    values, seen = dict(zip(program.takes, args, strict=True)), dict[int, Any]()
    of = lambda x: values[x] if is_value(x) else x.val
    for step in program.steps:
        xs = [of(x) for x in step.takes]
        if step.body:
            results, inside = _run_mapped(step, xs, see)
            seen |= inside
        else:
            results = [step.call, *step.cures][-1](*xs)
            results = results if isinstance(results, list | tuple) else [results]
        values |= zip(step.gives, results, strict=True)
    if see:
        seen |= {i: _plain(x) for i, x in values.items()}
    return [of(x) for x in program.gives], seen


def _run_mapped(step: Equation, xs: list, see: bool) -> tuple[list, _Values]:
    params, body = step.params, step.body
    assert body
    rows = PartitionSpec(*body.sizes)

    def local(*args: Any) -> tuple[list, _Values]:
        results, seen = run(body, args, see)
        for cure in step.cures:
            results = list(cure(*results))
        return results, {i: x[(None,) * len(body.sizes)] for i, x in seen.items()}

    mapped = jax.shard_map(
        local,
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=(list(params["out_specs"]), rows),
        axis_names=set(body.sizes),
        check_vma=False,
    )
    return mapped(*xs)


def _plain(x: Any) -> Any:
    """Return random keys as their numbers."""
    is_key = jnp.issubdtype(getattr(x, "dtype", float), jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else jnp.asarray(x)


# --------------------------------------------------------------------------------------------- what is a twin


def twins(many: Program, one: Program) -> dict[int, int]:
    """Return for each value the one that the same equation has on one device. Of a line that has more
    equations there, or fewer (a loop over the ranks), none has a twin."""
    sides: list[dict[Any, list[Equation]]] = [defaultdict(list), defaultdict(list)]
    pairs = dict[int, int]()
    for side, program in zip(sides, (many, one), strict=True):
        for _, step in program.all_steps():
            side[step.name, "" if step.body else step.line].append(step)
    for key, steps in sides[0].items():
        if len(others := sides[1].get(key, [])) == len(steps):
            for step, other in zip(steps, others, strict=True):
                pairs |= zip(step.gives, other.gives, strict=True)
                if step.body and other.body:
                    pairs |= zip(step.body.takes, other.body.takes, strict=True)
                    pairs |= _values(zip(step.body.gives, other.body.gives, strict=True))
    pairs |= zip(many.takes, one.takes, strict=True)
    return pairs | _values(zip(many.gives, one.gives, strict=True))


def _values(pairs: Iterable[tuple[Any, Any]]) -> dict[int, int]:
    return {a: b for a, b in pairs if is_value(a) and is_value(b)}


def hops(program: Program, value: Any, axis: str) -> int:
    """Return how many ppermutes over an axis are on the longest path to a value."""
    is_hop = lambda step: float(step.name == "ppermute" and axis in step.axes)
    return int(_longest(program, is_hop)[value]) if is_value(value) else 0


def _longest(program: Program, cost: Callable[[Equation], float]) -> dict[Any, float]:
    """Return what the steps on the longest path to each value cost; arguments cost nothing."""
    far = defaultdict[Any, float](float)

    def follow(program: Program) -> None:
        for step in program.steps:
            if body := step.body:
                far.update(
                    {i: far[x] for i, x in zip(body.takes, step.takes, strict=True) if is_value(x)}
                )
                follow(body)
                after = [far[x] if is_value(x) else 0.0 for x in body.gives]
                far.update(zip(step.gives, after, strict=True))
            else:
                before = max((far[x] for x in step.takes if is_value(x)), default=0.0)
                far.update(dict.fromkeys(step.gives, before + cost(step)))

    follow(program)
    return far


def _shapes(program: Program) -> dict[int, tuple[int, ...]]:
    """Return the shapes of the results of equations."""
    steps = [step for _, step in program.all_steps() if step.eqn]
    pairs = [(i, v.aval) for s in steps for i, v in zip(s.gives, s.eqn.outvars, strict=True)]
    return {i: aval.shape for i, aval in pairs if hasattr(aval, "shape")}


def share_draws(many: Program, one: Program) -> bool:
    """Let ranks draw the random numbers of one device, each its shard of them, where their keys differ: a
    program that folds its rank into a key is right, though its numbers are others. Return whether any are
    drawn."""
    pair, whole, any_drawn = twins(many, one), _shapes(one), False
    differs = defaultdict[Any, frozenset[str]](frozenset)  # along which axes a value may
    for program, step in many.all_steps():
        if step.body is None and program.sizes:
            own = frozenset(step.axes) if step.name == "axis_index" else frozenset()
            axes = own.union(*(differs[x] for x in step.takes if is_value(x)))
            differs |= dict.fromkeys(step.gives, axes)
        if step.name == "random_bits":
            any_drawn = True
            if program.sizes and (shape := whole.get(pair.get(step.gives[0], -1))):
                cuts = cuts_of_shape(
                    step.params["shape"], shape, program.sizes, differs[step.takes[0]]
                )
                rest = differs[step.takes[0]].difference(*cuts)
                by_rank = [[a for a in cut if a in differs[step.takes[0]]] for cut in cuts]
                if len(cuts) == len(shape):
                    step.call = functools.partial(
                        draw_shard, step.params, shape, program.sizes, by_rank, rest
                    )
    return any_drawn


def cuts_of_shape(
    part: tuple[int, ...], whole: tuple[int, ...], sizes: dict[str, int], first: frozenset[str]
) -> list[tuple[str, ...]]:
    """Return the axes that cut each dim, by the sizes alone; those in ``first`` if there is a choice."""
    left, cuts = sorted(sizes, key=lambda a: a not in first), list[tuple[str, ...]]()
    for m, n in zip(part, whole, strict=False):
        groups = (g for k in range(len(left) + 1) for g in itertools.combinations(left, k))
        fits = [g for g in groups if m * math.prod(sizes[a] for a in g) == n]
        if not fits or len(part) != len(whole):
            return []
        cuts.append(tuple(sorted(fits[0], key=list(sizes).index)))
        left = [a for a in left if a not in cuts[-1]]
    return cuts


def draw_shard(
    params: dict, whole: tuple, sizes: dict, cuts: list, rest: Iterable[str], key: Any
) -> Any:
    """Draw as the first rank does, in the shape of one device, and take this rank's shard along ``cuts``.
    Along the axes ``rest`` each rank draws other numbers for the same values."""
    first = lambda x, a: lax.all_gather(x, a)[0]
    data = functools.reduce(first, sizes, jax.random.key_data(key))
    key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
    for axis in sorted(rest):
        key = jax.random.fold_in(key, lax.axis_index(axis))
    bits = jax.random.bits(key, whole, f"uint{params['bit_width']}")
    for dim, (axes, size) in enumerate(zip(cuts, params["shape"], strict=True)):
        start = lax.axis_index(tuple(axes)) * size if axes else 0
        bits = lax.dynamic_slice_in_dim(bits, start, size, dim)
    return bits


# -------------------------------------------------------------------------------------- how a value is cut


@dataclass(frozen=True)
class Pieces:
    """State how the values of all devices make up the one of one device.

    Attributes:
        axes: for each axis "copy", a dim's number (a shard of that dim), "shard" (a shard in another order),
            "share" (the n-th part of the value, the same on all n), or one of `REDUCED`.
        factor: how often the value is counted; 1 where it is right.
    """

    axes: dict[str, str | int]
    factor: float = 1.0

    def over(self, *kinds: str) -> list[str]:
        """Return the axes over which it is one of these; "cut" stands for a shard of any dim."""
        return [
            a for a, kind in self.axes.items() if kind in kinds or "cut" in kinds and is_cut(kind)
        ]


def is_cut(kind: str | int) -> bool:
    """Return whether a device has a shard along an axis."""
    return isinstance(kind, int) or kind == "shard"


Pair = tuple[np.ndarray, np.ndarray, float]
"""A value of all devices, with the axes of the mesh as first dims; its twin; how far they may be apart."""


def close(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    """Return whether two arrays are equal but for a tolerance, NaNs and infinities in the same places."""
    with np.errstate(invalid="ignore"):
        near = (abs(a - b) <= tolerance) | (a == b) | ((a != a) & (b != b))
    return bool(near.all())


def cut_of(pairs: list[Pair], sizes: dict[str, int], counted: bool = False) -> Pieces | None:
    """Return the first layout that makes the twin of a value, for all pairs; None if there is none. With
    ``counted`` also sums that are counted several times."""
    local, whole, _ = pairs[0]
    shape, n = local.shape[len(sizes) :], len(sizes)
    same = [all(_is_copy(a, i, tol) for a, _, tol in pairs) for i in range(n)]
    dims = [d for d in range(whole.ndim) if len(shape) == whole.ndim and shape[d] < whole.shape[d]]
    kinds: list[list] = [["copy", "share", *dims] if copy else [*dims, *REDUCED] for copy in same]
    choices = [c for c in itertools.product(*kinds) if _fits(c, shape, whole.shape, sizes)]
    choices = [c for c in choices if not {"mean", "share"} <= {*c}]  # by the sizes alone
    for choice in choices:
        for order in _orders(choice):
            if all(
                close(_joined(a, choice, order).reshape(b.shape), b, tol) for a, b, tol in pairs
            ):
                return Pieces(dict(zip(sizes, choice, strict=True)))
    kinds = [["copy"] if copy else ["shard", "sum", "mean"] for copy in same]
    for choice in itertools.product(*kinds):
        if "shard" in choice and all(_same_elements(a, b, tol, choice) for a, b, tol in pairs):
            return Pieces(dict(zip(sizes, choice, strict=True)))
    for choice in (c for c in choices if not {"mean", "max", "min"} & {*c}) if counted else ():
        for order in _orders(choice):
            joined = [(_joined(a, choice, order), b, tol) for a, b, tol in pairs]
            if factor := _factor(joined, sizes):
                return Pieces(dict(zip(sizes, choice, strict=True)), factor)
    return None


def _is_copy(local: np.ndarray, axis: int, tolerance: float) -> bool:
    return close(local, np.take(local, [0], axis), tolerance)


def _fits(choice: tuple, shape: tuple, whole: tuple, sizes: dict[str, int]) -> bool:
    """Return whether shards of these dims have the shape of the whole. Without such dims sizes may agree."""
    grown = list(shape)
    for kind, size in zip(choice, sizes.values(), strict=True):
        if isinstance(kind, int):
            grown[kind] *= size
    return tuple(grown) == whole or grown == list(shape) and math.prod(shape) == math.prod(whole)


def _orders(choice: tuple) -> list[tuple[int, ...]]:
    """Return the orders in which to join axes: the last one first, and all where two axes cut one dim."""
    cuts = [kind for kind in choice if isinstance(kind, int)]
    usual = tuple(reversed(range(len(choice))))
    if len({*cuts}) == len(cuts):
        return [usual]
    return [usual, *(o for o in itertools.permutations(usual) if o != usual)]


def _joined(local: np.ndarray, choice: tuple, order: Iterable[int]) -> np.ndarray:
    """Put the values of all devices together."""
    left, value = list(range(len(choice))), local
    for axis in order:
        at, kind = left.index(axis), choice[axis]
        left.remove(axis)
        if isinstance(kind, int):
            value = np.concatenate(list(np.moveaxis(value, at, 0)), axis=len(left) + kind)
        else:
            reduce = getattr(np, "sum" if kind == "share" else str(kind), None)
            value = reduce(value, axis=at) if reduce and kind != "copy" else value.take(0, at)
    return value


def _same_elements(local: np.ndarray, whole: np.ndarray, tolerance: float, choice: tuple) -> bool:
    """Return whether shards have the elements of the whole in some order. Few numbers tell nothing."""
    joined = local
    for axis, kind in reversed([*enumerate(choice)]):
        if kind != "shard":
            joined = (
                joined.take(0, axis) if kind == "copy" else getattr(np, kind)(joined, axis=axis)
            )
    if joined.size != whole.size or whole.size < 4 or len(np.unique(whole)) * 2 < whole.size:
        return False
    return close(np.sort(joined, axis=None), np.sort(whole, axis=None), tolerance)


def _factor(pairs: list[Pair], sizes: dict[str, int]) -> float:
    """Return the number by which values are too large, if it is one that a mesh can make; 0.0 if not."""
    groups = [
        g for k in range(1, len(sizes) + 1) for g in itertools.combinations(sizes.values(), k)
    ]
    products = {math.prod(group) for group in groups} - {1}
    factors = [
        x for p in products for x in (p, 1 / p, p - 1, (p - 1) / p, p * p) if x not in (0, 1)
    ]
    for factor in factors:
        near = [close(a.reshape(b.shape), factor * b, max(1, factor) * tol) for a, b, tol in pairs]
        if all(near) and all(
            abs(b).max(initial=0) * abs(1 - factor) > 4 * tol for _, b, tol in pairs
        ):
            return float(factor)
    return 0.0


# ------------------------------------------------------------------------------------------------- rounding


def spreads(program: Program, ranks: int) -> dict[int, float]:
    """Return how far rounding may move each value of two programs apart, relative to its largest element: the
    square root of the roundings on the longest path, as `llmpar.predict.tolerance` counts them."""
    variance = _longest(program, functools.partial(_roundings, ranks=ranks))
    return {i: FACTOR * ROUNDING * math.sqrt(x) for i, x in variance.items() if is_value(i)}


def _roundings(step: Equation, ranks: int) -> float:
    """Return the squared unit roundoff of a step, times the roundings in a row that it makes."""
    if step.eqn is None or not step.eqn.outvars:
        return 0.0
    before, after = ([v.aval for v in side] for side in (step.eqn.invars, step.eqn.outvars))
    size = lambda aval: float(math.prod(getattr(aval, "shape", ())) or 1)
    terms = max(map(size, before), default=1.0) / size(after[0])
    if step.name == "dot_general":
        (dims, _), _ = step.params["dimension_numbers"]
        terms = math.prod(before[0].shape[d] for d in dims)
    inner = [x for x in jax.tree.leaves(step.params) if hasattr(x, "eqns")]
    loops = sum(len(x.eqns) for x in inner) * step.params.get("length", 8)
    length = tree(max(terms, 1.0)) / 2 + ranks * bool(step.axes) + loops
    return UNIT["bfloat16" if "16" in str(after[0].dtype) else "float32"] ** 2 * length
