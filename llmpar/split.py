"""Cut a traced function between its outputs, by its equations: what the first need, and what is left for the
others.

A pipeline cuts the backward pass of a stage so: the gradient of its input first, for which another stage
waits, the weights' gradients when there is nothing better to do (Qi et al. 2023, section 2). It works for
whatever JAX can trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

_is_var = lambda v: not hasattr(v, "val")  # an input of an equation is a variable or a literal


@dataclass
class Traced:
    """A function of flat inputs as its equations."""

    jaxpr: Any
    consts: list

    def __call__(self, *inputs):
        return jax.core.eval_jaxpr(self.jaxpr, self.consts, *inputs)

    def part(self, outs, ins, skip=lambda eqn: False) -> tuple[Traced, set]:
        """What it takes to get ``outs`` from ``ins``, less the equations to skip, and all variables that this
        reads."""
        read, eqns = {v for v in outs if _is_var(v)}, []
        for eqn in reversed(self.jaxpr.eqns):
            if read & set(eqn.outvars) and not skip(eqn):
                eqns.append(eqn)
                read.update(filter(_is_var, eqn.invars))
        ends = dict(
            invars=list(ins), outvars=list(outs), debug_info=self.jaxpr.debug_info.with_unknown_names()
        )
        return Traced(self.jaxpr.replace(eqns=eqns[::-1], **ends), self.consts), read


def trace(f, *args) -> tuple[Traced, Any]:
    """``f`` as its equations, without those whose results nobody takes, and the shape of its result."""
    closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
    jaxpr = getattr(closed, "jaxpr", closed)
    return Traced(jaxpr, closed.consts).part(jaxpr.outvars, jaxpr.invars)[0], shape


def split(whole: Traced, num_early: int, num_known: int, num_given: int) -> tuple[Traced, Traced, list]:
    """Cut a traced function between its outputs: `first` gives the early ones, and what `second` needs for
    the others.

    Of inputs i and outputs o, `first(*i[:num_given]) -> (*o[:num_early], *crossing)` and
    `second(*i[:num_known], *crossing, *i[num_given:]) -> o[num_early:]`; the third result is the types of
    what crosses. No equation runs in both, except those that follow from the known inputs (weights and tokens
    here) and need not be kept: casts, gathers over fsdp, masks. The finer the equations, the more work is
    left for the second; it is right in any case.
    """
    jaxpr = whole.jaxpr
    known, given = {*jaxpr.constvars, *jaxpr.invars[:num_known]}, jaxpr.invars[:num_given]
    for eqn in jaxpr.eqns:
        if known.issuperset(filter(_is_var, eqn.invars)):
            known.update(eqn.outvars)
    early, late = jaxpr.outvars[:num_early], jaxpr.outvars[num_early:]
    first, _ = whole.part(early, given)
    made = dict.fromkeys([*given, *(v for eqn in first.jaxpr.eqns for v in eqn.outvars)])
    skip = lambda eqn: eqn.outvars[0] in made and not known.issuperset(eqn.outvars)
    _, read = whole.part(late, (), skip)
    crossing = [v for v in made if v in read - known]
    first, _ = whole.part([*early, *crossing], given)
    second, _ = whole.part(late, [*given[:num_known], *crossing, *jaxpr.invars[num_given:]], skip)
    return first, second, [v.aval for v in crossing]
