"""Run a program on its mesh and on a mesh of ones, equation by equation, and read how every value is
cut.

On a mesh of ones the same text is the program of one device: each value has a *twin* there. The values of n
devices are put together in every way that shapes allow (a copy, a shard of a dim, a term of a sum …); the way
that gives the twin is the value's layout. Nothing is read from types, so `check_vma=False` hides nothing.
"""

import functools
import itertools
import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from llmpar.inspect.jaxpr import equation_line
from llmpar.parallel import _jax
from llmpar.predict.tolerance import EIGHT_BITS, FACTOR, ROUNDING, UNIT, tree

_INLINED = set(
    "pjit jit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr"
    " remat remat2 checkpoint".split()
)
TYPES = {"pvary", "pcast", "preduced", "vary_unreduced_cast", "reduced_vary_cast"}
"""Primitives that change a value's type inside shard_map, and not the value."""
_LAYOUTS = {"sharding_constraint", "reshard", "mesh_cast"}
_OURS = r"^inspect/(check|twin)\.py.*"
_same = lambda x: x
# A scan is read iteration by iteration up to so many of them, and so many equations in all.
_UNROLLED, _EQUATIONS = 16, 2000
ENTER, RETURN = "enter", "return"
"""Steps of no equation: an argument enters a shard_map, a result leaves it."""


@dataclass(eq=False)
class Equation:
    """State one equation, after calls are inlined and short loops unrolled: the numbers of the values that it
    takes and gives, and what computes them. ``body``: the program inside a shard_map; ``parts``: those of a
    loop or of branches, each with the numbers that it takes of these."""

    name: str
    line: str
    takes: list[int]
    gives: list[int]
    call: Callable[..., Any]
    params: dict[str, Any]
    eqn: Any = None
    body: "Program | None" = None
    parts: "list[tuple[Program, list[int]]]" = field(default_factory=list)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that a collective names."""
        named = [self.params.get("axes", ()), self.params.get("axis_name", ())]
        return tuple(a for a in jax.tree.leaves(named) if isinstance(a, str))

    @property
    def backward(self) -> bool:
        """Whether JAX made it as the transpose of another one."""
        return bool(self.eqn) and "transpose" in str(self.eqn.source_info.name_stack)


@dataclass(eq=False)
class Program:
    """State a program as a list of steps. ``consts`` has the values of constants by number, ``sizes`` the
    axes that are manual in it, ``lengths`` those of the scans by line."""

    takes: list[int]
    gives: list[int]
    steps: list[Equation]
    consts: dict[int, Any]
    sizes: dict[str, int]
    lengths: dict[str, int]

    def all_steps(self) -> Iterator[tuple["Program", Equation]]:
        """List the steps with the program of their results: in the place of a shard_map its arguments'
        entry, its body's steps, and its results' return."""
        for step in self.steps:
            if body := step.body:
                for x, inner in zip(step.takes, body.takes, strict=True):
                    yield body, Equation(ENTER, "", [x], [inner], _same, {})
                yield from ((self if s.name == RETURN else body, s) for s in body.steps)
            else:
                yield self, step

    def inner_steps(self) -> Iterator[Equation]:
        """List the steps with those in loops and branches."""
        for _, step in self.all_steps():
            yield from (step, *(x for part, _ in step.parts for x in part.inner_steps()))


class _Reader:
    """Make a `Program` of a jaxpr. ``alone``: constraints on layouts are left out. Loops on the lines
    ``kept`` are not unrolled; of other long ones the ``first`` iterations are."""

    def __init__(self, alone: bool, kept: Iterable[str], first: int):
        self.alone, self.kept, self.first = alone, kept, first
        self.ids, self.consts = itertools.count(), dict[int, Any]()
        self.sizes, self.lengths = dict[str, int](), dict[str, int]()
        line = lambda eqn, place: re.sub(_OURS, "", equation_line(eqn, *place)) or place[1]
        self.line = functools.cache(line)  # of an unrolled loop's equation once

    def program(self, closed: Any, sizes: dict[str, int], place: tuple[str, str]) -> Program:
        takes = self.number(_jax.equations(closed)[0].invars)
        steps = list[Equation]()
        gives = self.inline(closed, takes, steps, place)
        return Program(takes, gives, steps, self.consts, sizes, self.lengths)

    def number(self, variables: Iterable[Any]) -> list[int]:
        return [next(self.ids) for _ in variables]

    def constants(self, values: list[Any]) -> list[int]:
        """Number constants. Those of one device are of no mesh, as numbers of NumPy are."""
        is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.extended)
        is_plain = lambda x: not self.alone or not hasattr(x, "dtype") or is_key(x)
        plain = [x if is_plain(x) else np.asarray(x, x.dtype) for x in values]
        self.consts |= zip(ids := self.number(values), plain, strict=True)
        return ids

    def inline(self, closed: Any, takes: list, steps: list[Equation], place: Any) -> list[int]:
        """Add the steps of a jaxpr, and return the numbers of its results. ``place``: `equation_line`."""
        jaxpr, consts = _jax.equations(closed)
        variables = [*jaxpr.constvars, *jaxpr.invars]
        known = dict(zip(variables, [*self.constants(consts), *takes], strict=True))
        of = lambda v: self.constants([v.val])[0] if hasattr(v, "val") else known[v]
        for eqn in jaxpr.eqns:
            xs, name, params = [of(v) for v in eqn.invars], eqn.primitive.name, eqn.params
            line = self.line(eqn, place)
            inner = next((x for x in jax.tree.leaves(params) if hasattr(x, "eqns")), None)
            inside = (params["name"], line) if isinstance(params.get("name"), str) else place
            if self.alone and name in _LAYOUTS:
                gives = xs[:1]
            elif name in _INLINED and len(_jax.equations(inner)[0].invars) == len(xs):
                gives = self.inline(inner, xs, steps, inside)
            elif name == "scan" and (times := self.unrolled(line, params["length"], inner)):
                gives = self.unroll(eqn, times, inner, xs, steps, (inside[0], line))
            elif name == "cond" and (platforms := params.get("branches_platforms")):
                own = [not x or jax.default_backend() in x for x in platforms].index(True)
                gives = self.inline(params["branches"][own], xs[1:], steps, inside)
            elif (
                name in ("while", "cond")
                and (parts := _parts(eqn, xs) if self.first else [])
                # no while is run where it might not end
                and not any(" while[" in str(closed) for closed, _ in parts)
            ):
                gives = getattr(self, f"inline_{name}")(eqn, parts, xs, steps, (inside[0], line))
            else:
                gives = self.step(eqn, xs, steps, (inside[0], line))
                if name == "shard_map" and not self.sizes:
                    steps[-1].body = self.body(steps[-1], inner, inside)
            known |= zip(eqn.outvars, gives, strict=True)
        return [of(v) for v in jaxpr.outvars]

    def step(self, eqn: Any, xs: list, steps: list, place: Any, **more: Any) -> list[int]:
        """Add an equation as one step. What loops or branches do is run step by step, too: their types may
        name axes."""
        name, gives = eqn.primitive.name, self.number(eqn.outvars)
        steps.append(step := Equation(name, place[1], xs, gives, _caller(eqn), eqn.params, eqn))
        step.parts = [(self.program(x, self.sizes, place), at) for x, at in _parts(eqn, xs)]
        if step.parts:
            programs = [program for program, _ in step.parts]
            step.call = functools.partial(_RUNS[name], eqn, *programs, **more)
        return gives

    def inline_while(
        self, eqn: Any, parts: list[tuple], xs: list, steps: list, place: Any
    ) -> list[int]:
        """Add the first iterations of a while, each value that or the one before it, and the others."""
        fixed = len(xs) - len(eqn.outvars)
        for _ in range(self.first):
            which, new = (self.inline(x, takes, steps, place) for x, takes in parts)
            xs = [*xs[:fixed], *self.select(which, [xs[fixed:], new], steps, place)]
            parts = _parts(eqn, xs)
        return self.step(eqn, xs, steps, place)

    def inline_cond(self, eqn: Any, parts: list, xs: list, steps: list, place: Any) -> list[int]:
        """Add all branches, and take the results of one."""
        results = [self.inline(branch, takes, steps, place) for branch, takes in parts]
        return self.select(xs[:1], results, steps, place)

    def select(self, which: list, cases: list, steps: list, place: Any) -> list[int]:
        """Add a choice between lists of values."""
        for xs, i in zip(zip(*cases, strict=True), gives := self.number(cases[0]), strict=True):
            steps.append(Equation("select", place[1], [*which, *xs], [i], _select, {}))
        return gives

    def body(self, step: Equation, inner: Any, place: Any) -> Program:
        """Read what is inside a shard_map. Its results are those of the steps that return them."""
        mesh = step.params["mesh"]
        manual = [a for a in mesh.axis_names if a in step.params["newly_manual_axes"]]
        self.sizes = {a: mesh.shape[a] for a in manual}
        body = self.program(inner, self.sizes, place)
        lines = {i: one.line for one in body.steps for i in one.gives}
        for k, (x, gives) in enumerate(zip(body.gives, step.gives, strict=True)):
            cuts = enumerate(step.params["out_specs"][k])
            more: dict[str, Any] = {
                "named": {a: d for d, cut in cuts for a in jax.tree.leaves(cut)},
                "what": f"result {k}" if len(step.gives) > 1 else "the result",
            }
            body.steps.append(Equation(RETURN, lines.get(x, step.line), [x], [gives], _same, more))
        self.sizes, body.gives = {}, step.gives
        return body

    def unrolled(self, line: str, length: int, inner: Any) -> int:
        """Return how many iterations of a loop are read one by one."""
        self.lengths[line], equations = length, len(_jax.equations(inner)[0].eqns) or 1
        most = min(_UNROLLED, _EQUATIONS // equations)
        if line in self.kept:
            return 0
        return length if length <= most else min(self.first, most)

    def unroll(
        self, eqn: Any, times: int, inner: Any, xs: list, steps: list, place: Any
    ) -> list[int]:
        """Add the first iterations of a scan one after another, and the others as one step."""
        consts, carried = _jax.scan_parts(eqn)
        fixed, carry, rows = xs[:consts], xs[consts : consts + carried], list[list[int]]()
        direction = -1 if eqn.params["reverse"] else 1
        order = [*range(eqn.params["length"])][::direction]
        add = lambda name, xs, ys, call: steps.append(Equation(name, place[1], xs, ys, call, {}))
        for group in filter(len, [*([i] for i in order[:times]), order[times:]]):
            parts = self.number(xs[consts + carried :])
            is_one = group[0] in order[:times]
            at = group[0] if is_one else slice(min(group), max(group) + 1)
            for x, i in zip(xs[consts + carried :], parts, strict=True):
                add("slice of scan", [x], [i], operator.itemgetter(at))
            takes = [*fixed, *carry, *parts]
            if is_one:
                results = self.inline(inner, takes, steps, place)
            else:
                results = self.step(eqn, takes, steps, place, length=len(group))
            carry, ends = results[:carried], results[carried:]
            rows.append(ends)
        stacked = self.number(eqn.outvars[carried:])
        for column, gives in zip(zip(*rows, strict=True), stacked, strict=True):
            add("scan", [*column], [gives], functools.partial(_stack, times, direction))
        return [*carry, *stacked]


def _stack(times: int, direction: int, *parts: Any) -> Any:
    """Put rows together with what other iterations gave, which is rows already."""
    rows = [*(x[None] for x in parts[:times]), *parts[times:]]
    return jnp.concatenate(rows[::direction])


def _parts(eqn: Any, xs: list) -> list[tuple[Any, list]]:
    """Return what is inside a loop or branches, each with the operands that it takes."""
    params, name = eqn.params, eqn.primitive.name
    if name == "while":
        first, last = params["cond_nconsts"], len(xs) - len(eqn.outvars)
        return [
            (params["cond_jaxpr"], [*xs[:first], *xs[last:]]),
            (params["body_jaxpr"], xs[first:]),
        ]
    if name == "cond":
        return [(branch, xs[1:]) for branch in params["branches"]]
    return [(params["jaxpr"], xs)] if name == "scan" else []


def _select(which: Any, *cases: Any) -> Any:
    """Take one of several values; by leading dims where `jax.vmap` made a condition of many elements."""
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x, x.dtype) for x in (which, *cases)]
    which, shape = arrays[0], arrays[1].shape
    rows = which.reshape(which.shape + (1,) * (len(shape) - which.ndim))
    return lax.select_n(jnp.broadcast_to(rows, shape), *arrays[1:])


def _scan(
    eqn: Any, body: Program, *xs: Any, length: int | None = None, cures: Mapping[Equation, Any] = {}
) -> list:
    """Run a scan over rows of any number, whatever axes its types name."""
    consts, carried = _jax.scan_parts(eqn)
    length, fixed, rows = length or eqn.params["length"], xs[:consts], xs[consts + carried :]

    def iterate(carry: list, parts: tuple) -> tuple[list, list]:
        results, _ = run(body, [*fixed, *carry, *parts], False, cures)
        return results[:carried], results[carried:]

    given = [*xs[consts : consts + carried]], rows, None if rows else length
    carry, stacked = lax.scan(iterate, *given, reverse=eqn.params["reverse"])
    return [*carry, *stacked]


def _while(
    eqn: Any, goes: Program, body: Program, *xs: Any, cures: Mapping[Equation, Any] = {}
) -> list:
    """Run a while, until the condition holds of no element."""
    first, last = eqn.params["cond_nconsts"], len(xs) - len(eqn.outvars)
    which = lambda carry: run(goes, [*xs[:first], *carry], False, cures)[0][0]

    def again(carry: list) -> list:
        results, _ = run(body, [*xs[first:last], *carry], False, cures)
        return [*map(functools.partial(_select, which(carry)), carry, results)]

    return lax.while_loop(lambda carry: which(carry).any(), again, [*xs[last:]])


def _cond(eqn: Any, *parts: Any, cures: Mapping[Equation, Any] = {}) -> list:
    """Run one of several branches."""
    branches, (which, *xs) = parts[: (n := len(eqn.params["branches"]))], parts[n:]
    return lax.switch(which, [lambda *xs, p=p: run(p, xs, False, cures)[0] for p in branches], *xs)


_RUNS: dict[str, Callable[..., list]] = {"scan": _scan, "while": _while, "cond": _cond}


def _caller(eqn: Any) -> Callable[..., Any]:
    """Return a function that runs an equation under ``check_vma=False``, whatever it was traced under."""
    name, params = eqn.primitive.name, eqn.params
    if name in TYPES:
        return _same
    if name in ("psum_invariant", "unreduced_psum"):
        return lambda *xs: [lax.psum(x, params["axes"]) for x in xs]
    if name in ("all_gather_invariant", "all_gather_reduced"):
        dim, tiled = params["all_gather_dimension"], params["tiled"]
        return lambda x: lax.all_gather(x, params["axis_name"], axis=dim, tiled=tiled)
    call = lambda *xs: eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params(params))
    # a shard_map in another one gives a tree of JAX's own
    return (lambda *xs: [*call(*xs)]) if eqn.primitive.multiple_results else call


def read(closed: Any, alone: bool = False, kept: Iterable[str] = (), first: int = 2) -> Program:
    """Read a traced function as a list of steps. ``alone``: for one device, without layouts. The loops on
    the lines ``kept`` are one step each; of other long ones the ``first`` iterations are read alone."""
    return _Reader(alone, kept, first).program(closed, {}, ("", ""))


_Values = dict[int, Any]
Cures = Mapping[Equation, tuple[list[int], Callable[..., Any]]]
"""What is called in the place of a step's own call, and the values that it takes."""


def run(program: Program, args: Iterable[Any], see: bool, cures: Cures) -> tuple[list, _Values]:
    """Run a program, and with ``see`` return every value by its number: whole outside shard_map; inside one
    row for each device, with the axes of the mesh as first dims."""
    values = program.consts | dict(zip(program.takes, args, strict=True))
    seen = dict[int, Any]()
    for step in program.steps:
        takes, call = cures.get(step, (step.takes, step.call))
        xs = [values[x] for x in takes]
        if step.body:
            results, inside = _run_mapped(step, xs, see, cures)
            seen |= inside
        elif step.parts and step not in cures:
            results = call(*xs, cures=cures)
        else:
            results = call(*xs)
        results = results if isinstance(results, list | tuple) else [results]
        values |= zip(step.gives, results, strict=True)
    if see:
        seen |= {i: x for i, x in values.items() if i not in program.consts}
    return [values[x] for x in program.gives], seen


def _run_mapped(step: Equation, xs: list, see: bool, cures: Cures) -> tuple[list, _Values]:
    params, body = step.params, step.body
    assert body
    lead = (None,) * len(body.sizes)

    def local(*args: Any) -> tuple[list, _Values]:
        results, seen = run(body, args, see, cures)
        return results, {i: jnp.asarray(x)[lead] for i, x in seen.items()}

    specs = list(params["out_specs"]), PartitionSpec(*body.sizes)
    mapped = jax.shard_map(
        local,
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=specs,
        axis_names={*body.sizes},
        check_vma=False,
    )
    return mapped(*xs)


# --------------------------------------------------------------------------------------------- what is a twin


def twins(many: Program, one: Program) -> dict[int, int]:
    """Return for each value the one that the same equation has on one device. Of a line that has more
    equations there, or fewer (a loop over the ranks), none has a twin."""
    sides: list[dict[Any, list[Equation]]] = [defaultdict(list), defaultdict(list)]
    pairs = dict(zip([*many.takes, *many.gives], [*one.takes, *one.gives], strict=True))
    for side, program in zip(sides, (many, one), strict=True):
        for _, step in program.all_steps():
            side[step.name, step.line * bool(step.name != RETURN)].append(step)
    for key, steps in sides[0].items():
        if len(others := sides[1][key]) == len(steps):
            for step, other in zip(steps, others, strict=True):
                pairs |= zip(step.gives, other.gives, strict=True)
                if step.name == RETURN:
                    pairs |= zip(step.takes, other.takes, strict=True)
    return {a: b for a, b in pairs.items() if a not in many.consts and b not in one.consts}


def between(
    makers: Mapping[int, Equation], wanted: Iterable[int], given: Callable[[int], bool]
) -> tuple[list[Equation], list[int]]:
    """Return the steps that make values of such as are given, in order, and those that they take."""
    steps, takes, todo = set[Equation](), list[int](), [*wanted]
    for step in (makers[x] for x in todo if x in makers):
        steps.add(step)
        for x in step.takes:
            if x not in takes and x not in todo:
                (takes if given(x) else todo).append(x)
    return [step for step in dict.fromkeys(makers.values()) if step in steps], takes


def longest(program: Program, cost: Callable[[Equation], float]) -> dict[int, float]:
    """Return what the steps on the longest path to each value cost; arguments cost nothing."""
    far = defaultdict[int, float](float)
    for _, step in program.all_steps():
        before = max((far[x] for x in step.takes), default=0.0)
        far |= dict.fromkeys(step.gives, before + cost(step))
    return far


def hops(program: Program, value: int, axis: str) -> float:
    """Return how many ppermutes over an axis are on the longest path to a value."""
    is_hop = lambda step: float(step.name == "ppermute" and axis in step.axes)
    return longest(program, is_hop)[value]


def share_draws(many: Program, one: Program, given: Mapping[int, frozenset[str]] = {}) -> bool:
    """Let ranks draw the random numbers of one device, each its shard of them, where their keys differ: a
    program that folds its rank into a key is right, though its numbers are others. ``given``: along which
    axes arguments differ. Return whether any keys may differ."""
    pair = twins(many, one)
    makers = {i: step for _, step in one.all_steps() for i in step.gives}
    differs = defaultdict[int, frozenset[str]](frozenset, given)  # along which axes a value may
    may_differ = False
    for program, step in many.all_steps():
        axes = frozenset(step.axes) if step.name == "axis_index" else frozenset()
        axes = axes.union(*(differs[x] for x in step.takes))
        differs |= dict.fromkeys(step.gives, axes)
        other = makers.get(pair.get(step.gives[0], -1)) if step.gives else None
        for (part, takes), (twin, _) in zip(step.parts, other.parts if other else (), strict=False):
            inside = {i: differs[x] for i, x in zip(part.takes, takes, strict=True)}
            may_differ |= share_draws(part, twin, inside)
        is_own = step.name == "random_bits" and bool(axes)
        may_differ |= is_own
        if is_own and other:
            local, whole = (x.eqn.outvars[0].aval.shape for x in (step, other))
            if cuts := cuts_of_shape(local, whole, program.sizes, axes):
                own = [[a for a in cut if a in axes] for cut in cuts]
                rest = axes.difference(*cuts)
                share = draw_shard(step.params, whole, program.sizes, own, rest)
                step.call = functools.partial(_draw, step.call, share, sum(own, []))
                other.call = draw_shard(other.params, whole, {}, [()] * len(whole))
    return may_differ


def _draw(draw: Callable, share: Callable, axes: list[str], key: Any) -> Any:
    """Draw this rank's share of one device's numbers; what its key gives, where another rank along these axes
    has the same key: the numbers of two shards are then equal."""
    data = jax.random.key_data(key)
    equal = lax.all_gather(data, tuple(axes)) == data if axes else jnp.ones((1, 1), bool)
    return jnp.where(equal.all(range(1, equal.ndim)).sum() > 1, draw(key), share(key))


def close_hops(one: Program) -> None:
    """Give every ppermute on one device pairs of that device: where all ranks receive, the value stays, and
    at the ends of an open chain it is zeros."""
    for step in one.inner_steps():
        pairs = step.params.get("perm", ())
        if max(map(max, pairs), default=0) > 0:  # written for a number of ranks
            sends, receives = map(set, zip(*pairs, strict=True))
            step.call = _same if sends == receives else jnp.zeros_like


def cuts_of_shape(
    part: tuple[int, ...], whole: tuple[int, ...], sizes: dict[str, int], first: Iterable[str]
) -> list[tuple[str, ...]]:
    """Return the axes that cut each dim, by the sizes alone; those in ``first`` if there is a choice. []:
    none do."""
    left = sorted(sizes, key=lambda a: a not in first)
    cuts = list[tuple[str, ...]]()
    for m, n in zip(part, whole, strict=True):
        groups = (g for k in range(len(left) + 1) for g in itertools.combinations(left, k))
        fits = [g for g in groups if m * math.prod(sizes[a] for a in g) == n]
        cuts += [tuple(sorted(g, key=list(sizes).index)) for g in fits[:1]]
        left = [a for a in left if not fits or a not in fits[0]]
    return cuts if len(cuts) == len(whole) else []


def draw_shard(
    params: dict, whole: tuple, sizes: dict, cuts: list, rest: Iterable[str] = ()
) -> Callable[..., Any]:
    """Return what draws as the first rank does, in the shape of one device, and takes this rank's shard along
    ``cuts``. Of several keys the first draws for all. Along the axes ``rest`` each rank draws other numbers
    for the same values."""

    def draw(keys: Any) -> Any:
        data = functools.reduce(
            lambda x, a: lax.all_gather(x, a)[0], sizes, jax.random.key_data(keys.ravel()[0])
        )
        key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))
        for axis in sorted(rest):
            key = jax.random.fold_in(key, lax.axis_index(axis))
        bits = jax.random.bits(key, whole, f"uint{params['bit_width']}")
        return own_shard(bits, (*keys.shape, *params["shape"]), cuts)

    return draw


def on_whole(
    many: tuple[list[int], list["Pieces"], tuple[str, ...], dict[str, int]],
    alone: tuple[list[int], list[Equation], dict[int, Any]],
    wanted: dict[int, tuple[int, ...]],
) -> tuple[list[int], Callable[..., list]]:
    """Return what computes values from gathered operands, and takes this rank's shards of them: as `Cures`.

    Args:
        many: the operands' numbers, their cuts, the axes along which they are gathered, all axes' sizes.
        alone: the operands' numbers where they are whole, the steps, and the constants' values there.
        wanted: the results' numbers there, and their shapes on one rank.
    """
    takes, cuts, over, sizes = many
    known, steps, consts = alone
    inner = Program(known, [*wanted], steps, consts, {}, {})

    def gathered(x: Any, cut: "Pieces") -> Any:
        for dim in {kind for kind in cut.axes.values() if isinstance(kind, int)}:
            axes = tuple(a for a in over if cut.axes[a] == dim)
            x = lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x
        return x

    def call(*xs: Any) -> list:
        results, _ = run(inner, map(gathered, xs, cuts), False, {})
        own = lambda x, shape: own_shard(x, shape, cuts_of_shape(shape, x.shape, sizes, over))
        return [*map(own, results, wanted.values())]

    return takes, call


def own_shard(whole: Any, shape: tuple, cuts: list) -> Any:
    """Return this rank's shard of a whole value."""
    starts = [lax.axis_index(tuple(c)) * n if c else 0 for c, n in zip(cuts, shape, strict=True)]
    return lax.dynamic_slice(whole, starts, shape)


# -------------------------------------------------------------------------------------- how a value is cut


@dataclass(frozen=True)
class Pieces:
    """State how the values of all devices make up the one of one device.

    Attributes:
        axes: for each axis "copy", a dim's number (a shard of that dim), "shard" (a shard in another order),
            "share" (the n-th part of the value, the same on all n), "sum", "mean", "max" or "min".
        factor: how often the value is counted; 1 where it is right.
    """

    axes: dict[str, str | int]
    factor: float = 1.0

    def over(self, *kinds: str | int) -> list[str]:
        """Return the axes over which it is one of these; "cut" stands for a shard of any dim."""
        is_cut = lambda kind: "cut" in kinds and (kind == "shard" or isinstance(kind, int))
        return [a for a, kind in self.axes.items() if kind in kinds or is_cut(kind)]


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference, infinite where shapes, NaNs or infinities differ."""
    if a.shape != b.shape:
        return math.inf
    with np.errstate(invalid="ignore"):
        apart = np.where((a == b) | (a != a) & (b != b), 0.0, abs(a - b))
    return float(np.nan_to_num(apart, nan=math.inf).max(initial=0.0))


def cut_of(local: np.ndarray, whole: np.ndarray, sizes: dict[str, int]) -> Pieces | None:
    """Return the first layout that makes the twin of a value; else one that makes it in another order; else
    one that makes it counted several times; None if there is none.

    Both arrays have the sets of arguments as first dim, and are in units of what rounding may move them by;
    the second dims of ``local`` are the axes of the mesh."""
    for parts, factor_of in _READINGS:
        for axes, joined in _joined(local, whole, [*sizes], parts):
            kinds = {*axes.values()}
            if ("shard" in parts) != ("shard" in kinds) or {"mean", "share"} <= kinds:
                continue
            joined = joined.reshape(whole.shape) if joined.size == whole.size else joined
            if factor := factor_of(joined, whole, sizes):
                return Pieces({a: axes[a] for a in sizes}, factor)
    return None


def _joined(
    local: np.ndarray, whole: np.ndarray, names: list[str], parts: tuple[str, ...]
) -> Iterator[tuple[dict[str, str | int], np.ndarray]]:
    """Put the values of all devices together in every way, one axis after another: the last one first, and
    the others also before it where they cut a dim."""
    if not names:
        yield {}, local
    rest = local.shape[len(names) + 1 :]
    dims = [d for d, n in enumerate(whole.shape[1:]) if len(rest) == whole.ndim - 1 and rest[d] < n]
    # dims are made whole one after the other: any order of them gives the same
    if "shard" not in parts:
        dims = dims[:1]
    for at in reversed(range(len(names))):
        kinds: list[str | int] = [*dims]
        if at == len(names) - 1:
            kinds = ["copy", "share", *dims] if equal_along(local, at + 1) else [*dims, *parts]
            if _is_by_rank(local, at + 1):
                kinds = [kind for kind in kinds if kind not in ("max", "min")]
        for kind in kinds:
            if isinstance(kind, int):
                value = np.concatenate([*np.moveaxis(local, at + 1, 0)], axis=len(names) + kind)
            elif kind == "shard":  # its elements come last
                value = np.moveaxis(local, at + 1, -1)
            else:  # any of the copies will do
                reduce = {"copy": "max", "share": "sum"}.get(kind, kind)
                value = getattr(np, reduce)(local, axis=at + 1)
            for more, joined in _joined(value, whole, names[:at] + names[at + 1 :], parts):
                yield more | {names[at]: kind}, joined


def equal_along(local: np.ndarray, axis: int) -> bool:
    """Return whether all devices along an axis have the same value."""
    return distance(local, np.broadcast_to(local.take([0], axis), local.shape)) <= 1


def _is_by_rank(local: np.ndarray, axis: int) -> bool:
    """Return whether values differ along an axis by a number of each rank alone, as positions do: then one
    rank has all of the smallest elements. One element tells nothing."""
    with np.errstate(invalid="ignore"):  # of infinities
        apart = np.moveaxis(local - local.take([0], axis), axis, 1)
    apart = apart.reshape(*apart.shape[:2], -1)
    return apart.shape[2] > 1 and float(abs(np.ptp(apart, axis=2)).max()) <= 1


def _reordered(joined: np.ndarray, whole: np.ndarray, sizes: dict[str, int]) -> float:
    """Return 1 for the elements of the whole in another order. Few numbers tell nothing."""
    few = whole.size < 8 or len(np.unique(whole)) * 2 < whole.size
    a, b = (np.sort(x.reshape(len(x), -1), axis=1) for x in (joined, whole))
    return float(not few and distance(a, b) <= 1)


def _counted(joined: np.ndarray, whole: np.ndarray, sizes: dict[str, int]) -> float:
    """Return the number by which values are too large, if it is one that a mesh can make; 0 if not."""
    groups = (
        g for k in range(1, len(sizes) + 1) for g in itertools.combinations(sizes.values(), k)
    )
    factors = (x for p in map(math.prod, groups) for x in (p, 1 / p, p - 1, (p - 1) / p, p * p))
    for factor in (x for x in factors if x not in (0, 1)):
        far = abs(whole).reshape(len(whole), -1).max(axis=1, initial=0) * abs(1 - factor) > 4
        if far.all() and distance(joined, factor * whole) <= max(1, factor):
            return float(factor)
    return 0.0


def _equals(joined: np.ndarray, whole: np.ndarray, sizes: dict[str, int]) -> float:
    """Return 1 for the whole itself."""
    return float(distance(joined, whole) <= 1)


# What a value that differs along an axis may be a part of, and what the values of all devices must make.
_READINGS: list[tuple[tuple[str, ...], Callable[..., float]]] = [
    ((), _equals),  # most values are copies and shards, and these are few to try
    (("sum", "mean", "max", "min"), _equals),
    (("shard", "sum", "mean"), _reordered),
    (("sum",), _counted),
]


# ------------------------------------------------------------------------------------------------- rounding


def spreads(program: Program, ranks: int) -> dict[int, float]:
    """Return how far rounding may move each value of two programs apart, relative to its largest element: the
    square root of the roundings on the longest path, as `llmpar.predict.tolerance` counts them."""
    variance = longest(program, functools.partial(_roundings, ranks=ranks))
    return {i: FACTOR * ROUNDING * math.sqrt(x) for i, x in variance.items()}


def _roundings(step: Equation, ranks: int) -> float:
    """Return the squared unit roundoff of a step, times the roundings in a row that it makes."""
    after = [v.aval for v in step.eqn.outvars] if step.eqn else []
    # integers are not rounded, nor are random keys
    dtypes = [str(v.dtype) for v in after if jnp.issubdtype(v.dtype, jnp.inexact)]
    if not dtypes:
        return 0.0
    before = [v.aval for v in step.eqn.invars]
    size = lambda aval: float(math.prod(getattr(aval, "shape", ())) or 1)
    terms = max(map(size, before), default=1.0) / size(after[0])
    if step.name == "dot_general":
        dims, _ = step.params["dimension_numbers"][0]
        terms = math.prod(before[0].shape[d] for d in dims)
    inner = sum(len(x.eqns) for x in jax.tree.leaves(step.params) if hasattr(x, "eqns"))
    loops = inner * step.params.get("length", 8)
    length = tree(max(terms, 1.0)) / 2 + ranks * bool(step.axes) + loops
    unit = EIGHT_BITS.get(dtypes[0]) or UNIT["bfloat16" if "16" in str(dtypes) else "float32"]
    return unit**2 * length
