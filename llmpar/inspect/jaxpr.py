"""Counts the collectives that a traced function names: the census before any compiler."""

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from llmpar.inspect.census import KINDS, Collective, Taken, Work, arrow_of, counted, repeat, ring_bytes, weigh
from llmpar.inspect.hlo import innermost

_KINDS = {kind.replace("-", "_"): kind for kind in KINDS}
_KINDS |= {"ppermute": "collective-permute"} | dict.fromkeys(("psum", "psum2", "pmax", "pmin"), "all-reduce")
_DTYPES = {"bfloat": "bf", "float": "f", "uint": "u", "int": "s", "complex": "c", "bool": "pred", "_": ""}


def census_jaxpr(jaxpr: Any, axis_sizes: dict[str, int], taken: Taken | None = None) -> list[Collective]:
    """Counts the collectives that a jaxpr names. A scan multiplies by its length; of a cond the dearest
    branch counts, unless it is named and `taken` says how often it is true; of a `while` one turn.

    `axis_sizes` is `mesh.shape`, in mesh order."""
    return counted(_work(jaxpr, axis_sizes, taken))


def _work(jaxpr: Any, axis_sizes: dict[str, int], taken: Taken | None, outer: str = "") -> Work:
    """Counts the collectives of a jaxpr that stands in the named scopes ``outer``."""
    work: Work = []
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        kind = _KINDS.get(re.sub("^unreduced_|_invariant|_reduced|_start", "", name))  # of many variants
        scope = f"{outer}/{eqn.source_info.name_stack}"
        inner = [x for x in jax.tree.leaves(params) if hasattr(x, "eqns")]
        inside = [_work(x, axis_sizes, taken, scope) for x in inner]
        if not kind and not any(inside):
            continue
        frames = getattr(eqn.source_info.traceback, "frames", ())
        source = innermost((frame.file_name, frame.line_num) for frame in frames)
        if kind:
            found = _named_collectives(kind, eqn, axis_sizes, source)
            work += [(replace(one, **arrow_of(scope)), Fraction(1)) for one in found]
        elif name == "cond":
            work += weigh(inside, scope, taken)
        else:
            times = params["length"] if name == "scan" else None if name == "while" else 1
            work += repeat(sum(inside, []), times, source)
    return work


def _named_collectives(kind: str, eqn: Any, sizes: dict[str, int], source: str) -> Iterable[Collective]:
    """Gives one collective per result: the psum of a tree is several all-reduces, as when partitioned."""
    named = jax.tree.leaves(eqn.params.get("axes", eqn.params.get("axis_name")))
    if unknown := [a for a in named if isinstance(a, str) and a not in sizes]:
        given = f"the sizes given are those of {list(sizes)}"
        raise ValueError(f"a {kind} runs over axis {unknown[0]!r}, but {given}")
    axes = tuple(a for a in sizes if a in named and sizes[a] > 1)
    if perm := eqn.params.get("perm"):  # along the axes on which the ends of a pair differ
        places = np.unravel_index(np.array(perm).T, [sizes[a] for a in axes]) if axes else ()
        axes = tuple(a for a, (one, other) in zip(axes, places, strict=True) if (one != other).any())
    group_size = math.prod(sizes[a] for a in axes)
    if groups := eqn.params.get("axis_index_groups"):
        axes, group_size = ("other",), len(groups[0])
    if group_size == 1:
        return
    for result in eqn.outvars:
        aval = getattr(result.aval, "inner_aval", result.aval)  # psum_start and the like give futures
        dtype = re.sub("|".join(_DTYPES), lambda word: _DTYPES[word[0]], aval.dtype.name)
        sent = ring_bytes(kind, group_size, aval.size * aval.dtype.itemsize)
        yield Collective(kind, axes, group_size, 1, sent, dtype, aval.shape, source)
