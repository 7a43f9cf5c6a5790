"""Cut a traced function between its two results, by its equations: what the first needs, and what is left for
the second.

A pipeline cuts the backward pass of a stage so: the gradient of its input first, for which another stage
waits, the weights' gradients when there is nothing better to do (Qi et al. 2023, section 2). It works for
whatever JAX can trace. Of the backward pass of ``y = x @ w``, early result dx, late result dw:

    dx = dy @ w.T      first:     what dx needs
    dw = x.T @ dy      second:    what is left
    x, dy              crossing:  what the second reads of the first's arguments and values
    w, w.T             known:     a weight is there in both, and what follows from it is computed again
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from llmpar.parallel._jax import equations, part_of

_is_var = lambda v: not hasattr(v, "val")  # an operand of an equation is a variable or a literal


@dataclass(frozen=True)
class Traced:
    """A function of pytrees as its equations; `args` and `result` are pytrees of the variables in them."""

    jaxpr: Any
    consts: list
    args: tuple
    result: Any

    def __call__(self, *args: Any) -> Any:
        out = jax.core.eval_jaxpr(self.jaxpr, self.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.result), out)

    def part(self, result: Any, args: tuple, skip: Callable = lambda eqn: False) -> tuple[Traced, set]:
        """The function from ``args`` to ``result``, pytrees of variables: the equations that lead there, less
        those to skip, and all variables that they read."""
        read, eqns = set(filter(_is_var, jax.tree.leaves(result))), []
        for eqn in reversed(self.jaxpr.eqns):
            if read & set(eqn.outvars) and not skip(eqn):
                eqns.append(eqn)
                read.update(filter(_is_var, eqn.invars))
        jaxpr = part_of(self.jaxpr, eqns[::-1], jax.tree.leaves(args), jax.tree.leaves(result))
        return Traced(jaxpr, self.consts, args, result), read


def trace(f: Callable, *args: Any) -> Traced:
    """``f`` as its equations, without those whose results are not used."""
    closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
    variables = lambda tree, flat: jax.tree.unflatten(jax.tree.structure(tree), flat)
    jaxpr, consts = equations(closed)
    args, result = variables(args, jaxpr.invars), variables(shape, jaxpr.outvars)
    return Traced(jaxpr, consts, args, result).part(result, args)[0]


def split(f: Callable, known: tuple, given: tuple, later: tuple = ()) -> tuple[Traced, Traced, list]:
    """Cut ``f(*known, *given, *later) -> (early, late)`` in two, by example arguments or their types.

    ``first(*known, *given) -> (early, crossing)`` and ``second(*known, crossing, *later) -> late``. The third
    result is the types of ``crossing``, a list. No equation runs in both, except those that follow from the
    known arguments (weights and tokens of a stage) and need not be kept: casts, gathers over fsdp, masks. The
    finer the equations, the more work is left for the second; it is right in any case.
    """
    whole = f if isinstance(f, Traced) else trace(f, *known, *given, *later)
    there = len(known) + len(given)
    known, given, later = whole.args[: len(known)], whole.args[:there], whole.args[there:]
    follows = {*whole.jaxpr.constvars, *jax.tree.leaves(known)}  # values that depend on known ones alone
    for eqn in whole.jaxpr.eqns:
        if follows.issuperset(filter(_is_var, eqn.invars)):
            follows.update(eqn.outvars)
    early, late = whole.result
    first, _ = whole.part(early, given)
    made = dict.fromkeys(jax.tree.leaves(given) + [v for eqn in first.jaxpr.eqns for v in eqn.outvars])
    skip = lambda eqn: eqn.outvars[0] in made and not follows.issuperset(eqn.outvars)
    _, read = whole.part(late, (), skip)
    crossing = [v for v in made if v in read - follows]
    first, _ = whole.part((early, crossing), given)
    second, _ = whole.part(late, (*known, crossing, *later), skip)
    return first, second, [v.aval for v in crossing]
