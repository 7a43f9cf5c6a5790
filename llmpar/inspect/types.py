"""Read what JAX's types say of a training step, beside the plan's layouts."""

import dataclasses

import jax
import optax
from rich.table import Table

from llmpar.inspect.tables import rich_table
from llmpar.parallel.mesh import make_mesh, platform_of
from llmpar.parallel.partitioned import Explicit
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import Plan
from llmpar.training.step import Step


def types(config: ModelConfig, plan: Plan, batch_size: int, seq_len: int) -> list[dict]:
    """Trace a step's gradients in the Explicit mode, whatever the plan's mode; nothing is compiled.

    There is a row for every region that a value was in, for every weight as it is used, and for its gradient:
    ``value`` is its name in the model's text, ``layout`` the plan's layout of it, ``type_says`` the layout
    read back from JAX's ``type``. Tracing raises ValueError where the two differ.
    """
    mesh = make_mesh(plan.mesh)
    plan = dataclasses.replace(plan, mode="explicit").resolve(
        config, platform_of(mesh), batch_size, seq_len
    )
    step = Step(config, plan, mesh, optax.sgd(0.0))
    trace = jax.jit(step.gradients).trace
    trace(step.abstract_state.params, step.abstract_batch(batch_size, seq_len))
    names = "value", "layout", "type_says", "type"
    assert isinstance(step.par, Explicit)
    return [dict(zip(names, row, strict=True)) for row in step.par.seen]


def types_table(rows: list[dict]) -> Table:
    """Return the rows as a table for a terminal."""
    title = "layouts of the plan beside JAX's types (U: unreduced, R: reduced)"
    same = lambda row: "=" if row["layout"] == row["type_says"] else "≠"
    cells = (
        (row["value"], row["layout"], same(row), row["type_says"], row["type"]) for row in rows
    )
    return rich_table(title, ("value", "layout", "", "type says", "type"), rows=cells)
