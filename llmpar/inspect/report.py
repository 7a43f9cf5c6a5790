"""Compare what a training step sends and holds by formula with what its compiled program does."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import optax
from rich.table import Table

from llmpar import draw
from llmpar.draw.scene import Scene, compose
from llmpar.inspect.census import (
    Collective,
    arrow_rows,
    census_hlo,
    compiled_memory,
    executed_flops,
    read_program,
)
from llmpar.inspect.hlo import parsed
from llmpar.inspect.links import axis_links, links_table
from llmpar.inspect.tables import rich_table
from llmpar.inspect.types import types_table
from llmpar.parallel.mesh import make_mesh
from llmpar.plan.plan import Resolved
from llmpar.plan.timetable import branch_shares
from llmpar.predict import memory
from llmpar.predict.muon import muon_flops
from llmpar.predict.tolerance import FACTOR, UNIT, Unit, tolerance
from llmpar.predict.traffic import Prediction, Traffic, outer_traffic, step_traffic
from llmpar.training.local_steps import LocalSteps
from llmpar.training.muon import muon
from llmpar.training.step import Step


def priced_optimizer(plan: Resolved) -> optax.GradientTransformation:
    """Make the optimizer that the memory of a plan counts, at a constant rate: AdamW, or Muon."""
    return optax.adamw(1e-3) if plan.muon == "none" else muon(1e-3, plan.config)


def inspect(plan: Resolved, batch_size: int, seq_len: int) -> dict:
    """Compile one training step of the plan's model with AdamW (nothing runs) and read it.

    Returns the document of ``llmpar inspect --json``: bytes are those that a device sends per step.
    Collectives are read from the program as XLA's partitioner left it, where their dtypes are still true;
    memory and FLOPs from the final one. Predictions are for the Manual mode; under Auto they show what the
    partitioner did differently. Of pipeline stages it shows the one that sends most, and the mean of FLOPs.
    """
    step = Step(plan.config, plan, make_mesh(str(plan.mesh)), priced_optimizer(plan))
    compiled, partitioned = read_program(step.lower(batch_size, seq_len))
    branches = branch_shares(plan.pipeline, plan.config.layer_kinds)
    # FLOPs are counted where the text shows them all: in experts' overflow and in kernels the data end the
    # loops, and TPUs write matmuls as convolutions. (`llmpar compile` estimates all of these.)
    plain = plan.attention_kernel in ("portable", "xla") and plan.platform != "tpu"
    counted = branches if plain and not plan.config.experts else []
    text = compiled.as_text() or ""
    work = [executed_flops(text, taken) for taken in counted]
    allocated = compiled_memory(compiled)
    return compare(plan, batch_size, seq_len, partitioned, step.mesh, branches) | {
        "memory": {
            "predicted_argument_bytes": sum(
                memory.argument_bytes(plan, batch_size, seq_len).values()
            ),
            "compiled_argument_bytes": allocated["argument_bytes"],
            "predicted_temp_bytes": memory.temp_bytes(plan, batch_size, seq_len),
            "compiled_temp_bytes": allocated["temp_bytes"],
        },
        "flops": {
            "predicted_per_device": sum(memory.flops(plan.config, batch_size, seq_len).values())
            / plan.mesh.size
            + muon_flops(plan),
            "executed_per_device": sum(work) / plan.mesh.pp if work else None,
        },
    }


def inspect_apart(plan: Resolved, batch_size: int, seq_len: int, every: int) -> dict:
    """Return the same document of local steps (`training.local_steps`): a worker's step, and what the outer
    step sends over dp, one in ``every`` steps."""
    local = LocalSteps(plan.config, plan, make_mesh(str(plan.mesh)), priced_optimizer(plan), every)
    document = inspect(local.steps[0].plan, batch_size // plan.mesh.dp, seq_len)
    outer = census_hlo(read_program(local.lower())[1], local.mesh)
    for name, rows in _side_by_side(outer_traffic(local.plan), outer).items():
        document[name] += rows
    words = f"over dp: of the outer step, one in {every} steps; all else: of a worker's step"
    return document | {
        "mesh": plan.mesh.named,
        "links": axis_links(local.mesh),
        "batch_size": batch_size,
        "detour": "; ".join(filter(None, (words, document["detour"]))),
        "local_steps": every,
    }


def compare(
    plan: Resolved, batch_size: int, seq_len: int, partitioned: str, mesh, branches: Sequence
) -> dict:
    """Compare the collectives of a partitioned program with the predicted ones.

    ``mesh`` is the step's, and ``branches`` its `branch_shares`. Of pipeline stages it takes the one that
    sends most.
    """
    by_stage = [step_traffic(plan, batch_size, seq_len, stage) for stage in range(plan.mesh.pp)]
    stage = max(range(plan.mesh.pp), key=lambda i: by_stage[i].total_bytes)
    return {
        "model": plan.config.must_run().name,
        "params": plan.config.num_params,
        "dispatch": plan.dispatch if plan.mesh.live("ep") else None,
        "mesh": plan.mesh.named,
        "links": axis_links(mesh),
        "mode": plan.mode,
        "attention_kernel": plan.attention_kernel,
        "detour": "; ".join([*plan.notes, *parsed(partitioned).uncounted]) or None,
        "zero": plan.zero,
        "zero_cuts": list(plan.zero_cuts()) if plan.zero else [],
        "stage": stage,
        "schedule": plan.schedule if plan.pipeline else None,
        "batch_size": batch_size,
        "seq_len": seq_len,
    } | _side_by_side(by_stage[stage], census_hlo(partitioned, mesh, branches[stage]))


def _side_by_side(predicted: Traffic, census: Sequence[Collective]) -> dict[str, list[dict]]:
    """Return predicted collectives beside compiled ones, by axes and kind; and the compiled ones by arrow."""
    compiled = defaultdict(list)
    for c in census:
        compiled[",".join(c.axes), c.kind].append(c)
    rows, arrows = list[dict[str, Any]](), arrow_rows(census)
    for key in sorted(predicted.keys() | compiled.keys()):
        guess = predicted.get(key, Prediction())
        by_source, by_arrow = Counter[str](), Counter[str]()
        for c in compiled[key]:
            by_source[c.source] += c.bytes_sent
            by_arrow[c.arrow] += c.bytes_sent
        rows.append(
            {
                "axis": key[0],
                "kind": key[1],
                "count": sum(c.count for c in compiled[key]),
                "predicted_count": guess.count,
                "predicted_bytes": guess.bytes_sent,
                "compiled_bytes": by_source.total(),
                "source": ", ".join(name for name, _ in by_source.most_common()),
                "arrow": "; ".join(name for name, _ in by_arrow.most_common() if name),
            }
        )
        for row in arrows:  # all directions of an arrow together
            if (row["axis"], row["kind"]) == key:
                row["as_predicted"] = (
                    by_arrow[row["arrow"]] == guess.arrows.get(row["arrow"], (0, 0))[1]
                )
    rows.sort(key=lambda row: -max(row["predicted_bytes"], row["compiled_bytes"]))
    return {"collectives": rows, "arrows": arrows}


def _title(document: dict) -> str:
    mesh = " ".join(f"{a}={n}" for a, n in document["mesh"].items()) or "one device"
    title = f"{document['model']} on {mesh}, {document['mode']} mode, ZeRO {document['zero']}"
    title += " with no axis to cut by" * (document["zero"] > 0 and document.get("zero_cuts") == [])
    stage = f", {document['schedule']}, stage {document['stage']}" if document["schedule"] else ""
    return f"{title}, {document['attention_kernel']} attention{stage}"


def move_tables(document: dict) -> list[Table]:
    """Return what moves as tables for a terminal: by axes and collective, by arrow, and over which links."""

    def cells(row: dict) -> tuple[str, ...]:
        same = "=" if row["predicted_bytes"] == row["compiled_bytes"] else "≠"
        sent = f"{row['count']:,}", f"{row['predicted_bytes']:,} B", f"{row['compiled_bytes']:,} B"
        return (row["axis"], row["kind"], *sent, same, _short(row["source"]))

    title = f"{_title(document)}: bytes sent per device and step"
    numbers = "count", "predicted", "compiled"
    columns = "axes", "collective", *numbers, "", "from"
    rows = map(cells, document["collectives"])
    crossed = document["links"] and links_table(document["links"], "links that the axes cross")
    return [
        rich_table(title, columns, numbers, rows, caption=document.get("detour")),
        _arrow_table(document),
        *([crossed] if crossed else []),
    ]


def step_tables(document: dict) -> list[Table]:
    """Return the document as tables for a terminal."""
    need, numbers = document["memory"], ("predicted", "compiled")
    off = off_by(need["predicted_temp_bytes"], need["compiled_temp_bytes"])
    of = lambda what: [f"{need[f'{side}_{what}_bytes']:,} B" for side in numbers]
    work = ["not counted" if n is None else f"{n:,.0f}" for n in document["flops"].values()]
    rows = [
        ("arguments", *of("argument")),
        (f"temporaries (by formula{off})", *of("temp")),
        ("matmul FLOPs (useful, executed)", *work),
    ]
    tables = [
        *move_tables(document),
        rich_table(
            "per device",
            ("", *numbers),
            numbers,
            rows,
            caption="The formula of temporaries is for GPUs and TPUs.",
        ),
    ]
    if "types" in document:
        tables.append(types_table(document["types"]))
    if "tolerance" in document:
        tables.append(spread_table(document["tolerance"]))
    return tables


def off_by(guess: float, true: float | None) -> str:
    """Describe the error of an estimate; '' where there is no compiled number."""
    return f", off by {guess / true - 1:+.0%}" if true else ""


def _arrow_table(document: dict) -> Table:
    """Return what each arrow of the model or the step sends, below the axes and the collective that carry
    it."""
    title = "by arrow of the model or the step, as compiled (=: as predicted)"
    by_arrow = rich_table(title, ("arrow", "direction", "count", "bytes", ""), ("count", "bytes"))
    for group in document["collectives"]:
        total = f"{group['count']:,}", f"{group['compiled_bytes']:,} B"
        by_arrow.add_row(f"{group['axis']} {group['kind']}", "", *total, style="bold")
        for row in document["arrows"]:
            if (row["axis"], row["kind"]) == (group["axis"], group["kind"]):
                by_arrow.add_row(
                    " " + (row["arrow"] or row["source"] or "(chosen by the partitioner)"),
                    row["direction"],
                    f"{row['count']:,}",
                    f"{row['bytes_sent']:,} B",
                    "=" if row["as_predicted"] else "≠",
                )
        by_arrow.add_section()
    return by_arrow


def step_picture(document: dict) -> Scene:
    """Draw the bytes: predicted beside compiled by axis and collective, and below by arrow."""
    charts = draw.collectives(document["collectives"]), draw.arrows_sent(document["arrows"])
    text = "\n".join(chart.text for chart in charts)
    return compose(_title(document), [list(chart.items) for chart in charts], text)


def _short(source: str) -> str:
    """Shorten 'model/llama.py:72, model/llama.py:91' to 'llama.py:72, 91', which a narrow column can fold."""
    lines: dict[str, list[str]] = {}
    for place in filter(None, source.split(", ")):
        file, _, line = place.rpartition(":")
        lines.setdefault(file.rpartition("/")[2], []).append(line)
    of = lambda numbers: ", ".join(sorted(numbers, key=lambda n: (len(n), n)))
    return "; ".join(f"{file}:{of(numbers)}".lstrip(":") for file, numbers in lines.items())


# ------------------------------------------------------------------------- how far other meshes may be

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
    others = (unit for unit in UNIT if unit != own and plan.dtype == "float32")
    return of(own) | {"elsewhere": {unit: of(unit)["bound"] for unit in others}}


def spread_table(document: dict) -> Table:
    """Return the spread as a table for a terminal: by term, the largest first, and what they come to."""
    products = f", products in {document['products']}" * (document["products"] != document["dtype"])
    title = f"spread between two meshes, {document['dtype']}{products}: relative, root mean square"
    numbers = "×", *SPREAD_NAMES.values()
    shown = lambda row: [f"{row[name]:.0e}" if row[name] else "" for name in SPREAD_NAMES]
    rows = (
        (t["name"], t["by"], t["unit"], f"{t['length']:,.0f}", *shown(t))
        for t in sorted(document["terms"], key=lambda t: -max(t[name] for name in SPREAD_NAMES))
    )
    made = rich_table(title, ("rounded", "cut by", "to", *numbers), numbers, rows)
    made.add_section()
    made.add_row("together, as squares", "", "", "", *shown(document["expected"]))
    made.add_row(
        f"bound: {FACTOR:g} times that", "", "", "", *shown(document["bound"]), style="bold"
    )
    for unit, bound in document["elsewhere"].items():
        made.add_row(f"bound, products in {unit}", "", "", "", *shown(bound))
    if ties := document["ties"]:
        made.caption = f"tokens that are expected to change an expert: {ties:.1g}, " + (
            "counted above" if ties >= 1 else "not counted: should one do, the bound does not hold"
        )
    return made
