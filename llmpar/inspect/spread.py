"""Estimate how far loss and gradients of a step may be from those on another mesh, on JAX's devices."""

import jax
from rich.table import Table

from llmpar.inspect.tables import rich_table
from llmpar.plan.plan import Resolved
from llmpar.predict.tolerance import FACTOR, UNIT, Unit, tolerance

SPREAD_NAMES = {"loss": "loss", "grad_norm": "norm", "gradient": "gradient"}


def rounded_products(platform: str | None) -> Unit:
    """Return to what devices round a matmul's float32 operands: a GPU to TF32 and a TPU to bfloat16, unless
    ``jax_default_matmul_precision`` is set."""
    precision = getattr(jax.config, "jax_default_matmul_precision", None) or "default"
    if platform not in ("gpu", "tpu") or precision in ("highest", "float32"):
        return "float32"
    return (
        "bfloat16"
        if platform == "tpu" and precision in ("default", "bfloat16", "fastest")
        else "tf32"
    )


def spread(plan: Resolved, batch_size: int, seq_len: int) -> dict:
    """Return the expected spread as a JSON document (`Tolerance.document`), with its bounds on devices that
    round matmuls differently in ``elsewhere``."""
    own = rounded_products(plan.platform)
    of = lambda products: tolerance(plan, batch_size, seq_len, products).document()
    others = [unit for unit in UNIT if unit != own and plan.dtype == "float32"]
    return of(own) | {"elsewhere": {unit: of(unit)["bound"] for unit in others}}


def spread_table(document: dict) -> Table:
    """Return the spread as a table for a terminal: by term, the largest first, and what they come to."""
    products = f", products in {document['products']}" * (document["products"] != document["dtype"])
    title = f"spread between two meshes, {document['dtype']}{products}: relative, root mean square"
    numbers = "×", *SPREAD_NAMES.values()
    shown = lambda row: [f"{row[name]:.0e}" if row[name] else "" for name in SPREAD_NAMES]
    terms = sorted(document["terms"], key=lambda term: -max(term[name] for name in SPREAD_NAMES))
    rows = ((t["name"], t["by"], t["unit"], f"{t['length']:,.0f}", *shown(t)) for t in terms)
    made = rich_table(title, ("rounded", "cut by", "to", *numbers), numbers, rows)
    made.add_section()
    made.add_row("together, as squares", "", "", "", *shown(document["expected"]))
    made.add_row(
        f"bound: {FACTOR:g} times that", "", "", "", *shown(document["bound"]), style="bold"
    )
    for unit, bound in document["elsewhere"].items():
        made.add_row(f"bound, products in {unit}", "", "", "", *shown(bound))
    ties = document["ties"]
    if ties:
        covered = (
            "counted above" if ties >= 1 else "not counted: should one do, the bound does not hold"
        )
        made.caption = f"tokens that are expected to change an expert: {ties:.1g}, {covered}"
    return made
