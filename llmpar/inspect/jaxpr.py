"""Count the collectives in a jaxpr: the census before any compiler."""

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from llmpar.inspect.census import (
    Collective,
    Taken,
    Work,
    all_runs,
    arrow_of,
    collective_bytes,
    repeat,
    weigh,
)
from llmpar.inspect.hlo import COLLECTIVES, innermost
from llmpar.inspect.sent import LOOPS

_OF_PRIMITIVE = {
    **{kind.replace("-", "_"): kind for kind in COLLECTIVES},
    **dict.fromkeys(("psum", "psum2", "pmax", "pmin"), "all-reduce"),
    "ppermute": "collective-permute",
    "psend": "send",
    "pbroadcast": "collective-broadcast",
}
_DTYPES = {
    "bfloat": "bf",
    "float": "f",
    "uint": "u",
    "int": "s",
    "complex": "c",
    "bool": "pred",
    "_": "",
}


def census_jaxpr(
    jaxpr: Any, axis_sizes: dict[str, int], taken: Taken | None = None
) -> list[Collective]:
    """Count the collectives of a jaxpr. A scan multiplies by its length; of a cond the branch that sends most
    counts, unless it is named and `taken` has how often it is true; of a `while` one iteration.

    `axis_sizes` is `mesh.shape`, in mesh order."""
    return all_runs(_work(jaxpr, axis_sizes, taken))


def _work(jaxpr: Any, axis_sizes: dict[str, int], taken: Taken | None, outer: str = "") -> Work:
    """Count the collectives of a jaxpr inside the named scopes ``outer``."""
    work: Work = []
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        # of many variants
        kind = _OF_PRIMITIVE.get(re.sub("^unreduced_|_invariant|_reduced|_start", "", name))
        scope = f"{outer}/{eqn.source_info.name_stack}"
        inside = [_work(x, axis_sizes, taken, scope) for x in _inner(eqn)]
        if not kind and not any(inside):
            continue
        source = equation_line(eqn)
        if kind:
            named = _named_collectives(kind, eqn, axis_sizes, source)
            work += [(replace(one, **arrow_of(scope)), Fraction(1)) for one in named]
        elif name == "cond":
            work += weigh(inside, scope, taken)
        else:
            times = params["length"] if name == "scan" else None if name == "while" else 1
            work += repeat(sum(inside, []), times, source)
    return work


def _named_collectives(
    kind: str, eqn: Any, sizes: dict[str, int], source: str
) -> Iterable[Collective]:
    """Return one collective per result: the psum of a tree is several all-reduces, as when partitioned."""
    named = jax.tree.leaves(eqn.params.get("axes", eqn.params.get("axis_name")))
    if unknown := [a for a in named if isinstance(a, str) and a not in sizes]:
        raise ValueError(
            f"the {kind} runs over axis {unknown[0]!r}, but the mesh has {', '.join(sizes)}"
        )
    axes = tuple(a for a in sizes if a in named and sizes[a] > 1)
    if perm := eqn.params.get("perm"):  # along the axes on which the ends of a pair differ
        places = np.unravel_index(np.array(perm).T, [sizes[a] for a in axes]) if axes else ()
        axes = tuple(
            a for a, (one, other) in zip(axes, places, strict=True) if (one != other).any()
        )
    group_size = math.prod(sizes[a] for a in axes)
    if groups := eqn.params.get("axis_index_groups"):
        axes, group_size = ("other",), len(groups[0])
    if group_size == 1:
        return
    for result in eqn.invars if kind == "send" else eqn.outvars:  # which gives a token
        # psum_start and the like give futures
        aval = getattr(result.aval, "inner_aval", result.aval)
        dtype = re.sub("|".join(_DTYPES), lambda word: _DTYPES[word[0]], aval.dtype.name)
        sent = collective_bytes(kind, group_size, aval.size * aval.dtype.itemsize)
        yield Collective(kind, axes, group_size, 1, sent, dtype, aval.shape, source)


def kept_lines(jaxpr: Any) -> dict[str, set[str]]:
    """Return for each line of a jaxpr the lines for which it stands: itself, or this program's calls. JAX
    reuses the jaxpr of a jitted helper, with the lines of the program that called it first. It also reuses
    the lowering of a loop, which no jaxpr shows: `LOOPS` has the lines of all loops."""
    lines: dict[str, set[str]] = {LOOPS: set()}

    def collect(jaxpr: Any, helper: str, call: str) -> None:
        for eqn in jaxpr.eqns:
            line = equation_line(eqn)
            lines.setdefault(line, set()).add(line := equation_line(eqn, helper, call))
            if eqn.primitive.name in ("scan", "while"):
                lines[LOOPS].add(line)
            name = eqn.params.get("name")
            inside = (name, line) if isinstance(name, str) else (helper, call)
            for inner in _inner(eqn):
                collect(inner, *inside)

    collect(jaxpr, "", "")
    return lines


def equation_line(eqn: Any, helper: str = "", call: str = "") -> str:
    """Return the line of Python of an equation; '' where JAX does not know it. Inside a jitted ``helper`` of
    a library it is the line of the ``call``, for there JAX keeps the line of the first caller."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    places = [(frame.file_name, frame.line_num) for frame in frames]
    names = [frame.function_name.rpartition(".")[2] for frame in frames]
    kept = helper in names and not innermost(places[: names.index(helper) + 1])
    return call if kept and innermost(places) else innermost(places)


Axes = frozenset[str]
# Primitives whose results are equal on all devices along an axis.
_SHARED = ("psum", "psum2", "pmax", "pmin", "all_gather")


def unchecked(jaxpr: Any) -> list[str]:
    """Note results of `shard_map(check_vma=False)` that are equal along an axis by out_specs, though nothing
    in the program makes them equal. (A ring that passes all values on makes them equal, and is noted too.)"""
    notes = list[str]()
    for eqn in jaxpr.eqns:
        notes += [note for x in _inner(eqn) for note in unchecked(x)]
        if eqn.primitive.name == "shard_map" and not eqn.params.get("check_vma", True):
            inner = _inner(eqn)[0]
            makers = {id(v): one for one in inner.eqns for v in one.outvars}
            differ = _varying(inner, [_axes(*spec) for spec in eqn.params["in_specs"]])
            rest = [
                axes - _axes(*spec)
                for axes, spec in zip(differ, eqn.params["out_specs"], strict=True)
            ]
            for i, axes in ((i, ",".join(sorted(axes))) for i, axes in enumerate(rest) if axes):
                near = [eqn, *filter(None, [makers.get(id(inner.outvars[i]))]), *inner.eqns]
                at = next(filter(None, map(equation_line, near)), "no line")
                notes.append(
                    f"nothing ensures that result {i} of the shard_map at {at} is equal on all"
                    f" devices along {axes}, as out_specs say; check_vma=True checks it"
                )
    return notes


def _varying(jaxpr: Any, given: list[Axes]) -> list[Axes]:
    """Return the axes along which the results of a jaxpr may differ, if its arguments differ along ``given``.
    Of a loop one iteration is followed."""
    known = dict[int, Axes](zip(map(id, jaxpr.invars), given, strict=True))
    of = lambda values: [known.get(id(v), Axes()) for v in values]
    for eqn in jaxpr.eqns:
        takes, gives = of(eqn.invars), len(eqn.outvars)
        named = _axes(*(eqn.params.get(name, ()) for name in ("axes", "axis_name")))
        bodies = [x for x in _inner(eqn) if len(x.outvars) == gives and len(x.invars) <= len(takes)]
        each = [_varying(x, takes[len(takes) - len(x.invars) :]) for x in bodies]
        if re.sub("_invariant|_reduced", "", eqn.primitive.name) in _SHARED:
            each = [[axes - named for axes in takes]]
        each = each or [[named.union(*takes)] * gives]
        known |= zip(
            map(id, eqn.outvars),
            (Axes().union(*axes) for axes in zip(*each, strict=True)),
            strict=True,
        )
    return of(jaxpr.outvars)


def _inner(eqn: Any) -> list[Any]:
    """Return the jaxprs inside an equation, without their constants."""
    return [getattr(x, "jaxpr", x) for x in jax.tree.leaves(eqn.params) if hasattr(x, "eqns")]


def _axes(*cuts: Any) -> Axes:
    """Return the axes that cuts or parameters name."""
    return frozenset(a for a in jax.tree.leaves(list(cuts)) if isinstance(a, str))
