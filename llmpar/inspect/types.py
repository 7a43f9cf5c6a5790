"""Reads what JAX's types say of a training step, beside the plan's layouts."""

import dataclasses
import functools

import jax
import optax
from rich.table import Table

from llmpar.inspect.tables import table
from llmpar.parallel.explicit import Explicit
from llmpar.parallel.mesh import make_mesh, platform_of
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import Plan
from llmpar.training.step import Step


def types(config: ModelConfig, plan: Plan, batch_size: int, seq_len: int) -> list[dict]:
    """Trace a step's gradients under the Explicit mode, whatever the plan's; nothing is compiled.

    One row for every region that a value was in, for every weight as it is used, and for its gradient:
    ``value`` is how the model's text calls it, ``layout`` what the plan makes of that, ``type_says`` the same
    read back from JAX's ``type``. A type that says something else is refused while tracing.
    """
    mesh = make_mesh(plan.mesh)
    plan = dataclasses.replace(plan, mode="explicit").resolve(config, platform_of(mesh), batch_size, seq_len)
    step = Step(config, plan, mesh, optax.sgd(0.0))
    par = Explicit(step.plan, step.mesh)
    trace = jax.jit(functools.partial(step._gradients, par)).trace
    trace(step.abstract_state.params, step.abstract_batch(batch_size, seq_len))
    names = "value", "layout", "type_says", "type"
    return [dict(zip(names, row, strict=True)) for row in par.seen]


def types_table(rows: list[dict]) -> Table:
    """Give the rows as a table for a terminal."""
    title = "layouts of the plan beside JAX's types (U: unreduced, R: reduced)"
    found = table(title, ("value", "layout", "", "type says", "type"))
    for row in rows:
        same = "=" if row["layout"] == row["type_says"] else "≠"
        found.add_row(row["value"], row["layout"], same, row["type_says"], row["type"])
    return found
