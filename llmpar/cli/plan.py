"""``llmpar plan``: which mesh for a model on a machine; and the model of time held against measured runs."""

from __future__ import annotations

from dataclasses import dataclass

from llmpar.cli.options import File, emit, speaks


@dataclass(frozen=True)
class Plan:
    """Hold the model of time and memory against measured runs.

    llmpar plan --against tests/measured.json

    Attributes:
        against: hold the model against the measured runs of this file, and print the errors.
        json: print one JSON document on stdout.
    """

    against: File = None
    json: bool = False

    def run(self) -> dict:
        """Plan, or hold the model against measurements."""
        if self.against is None:
            raise ValueError("give --against FILE: measured runs to hold the model against")
        return hold_against(self.against, self.json)


def hold_against(path: str, as_json: bool) -> dict:
    """Print predicted, measured and error of each run, and each sweep's rank correlation."""
    import rich

    from llmpar.predict.measured import against

    document = against(path)
    if not as_json and speaks():
        for table in tables_against(document):
            rich.print(table)
    emit(document, as_json)
    return document


def tables_against(document: dict) -> list:
    """The document as tables: single rows and short sweeps, sweeps, the worst rows, the sums."""
    from rich.table import Table

    from llmpar.predict.measured import tell_tale

    percent = lambda x: "" if x is None else f"{100 * x:+.1f} %"
    rows = Table(
        "run", "chip", "mesh", "predicted s", "measured s", "error", "GB", "measured", "error", "fits"
    )
    long = {g["id"] for g in document["groups"] if g["runs"] > 40}
    for row in document["rows"]:
        if row["id"].rpartition("/")[0] in long:
            continue
        rows.add_row(*cells_against(row, percent))
    sweeps = Table("sweep", "runs", "Spearman", "choice over best", "mean abs. error")
    for g in document["groups"]:
        choice = "" if g["choice_over_best"] is None else f"{g['choice_over_best']:.3f}"
        sweeps.add_row(
            g["id"], str(g["runs"]), f"{g['spearman']:.3f}", choice, percent(g["step_mean_abs_error"])
        )
    worst = Table("worst runs", "error", "the term that could be off")
    timed = [row for row in document["rows"] if "step_s" in row["error"]]
    for row in sorted(timed, key=lambda row: -abs(row["error"]["step_s"]))[:12]:
        worst.add_row(row["id"], percent(row["error"]["step_s"]), tell_tale(row))
    sums = Table("all runs", "")
    for key, value in document["summary"].items():
        sums.add_row(key.replace("_", " "), percent(value) if isinstance(value, float) else str(value))
    for left in document["left_out"]:
        sums.add_row(f"left out: {left['id']}", left["why"])
    return [rows, sweeps, worst, sums]


def cells_against(row: dict, percent) -> list[str]:
    """A row of the table."""
    predicted, measured, error = row["predicted"], row["measured"], row["error"]
    number = lambda found, key, form: format(found[key], form) if found.get(key) is not None else ""
    fits = "yes" if predicted["fits"] else "no"
    return [
        row["id"], row["chip"], row["mesh"],
        number(predicted, "step_s", ".3f"), number(measured, "step_s", ".3f"), percent(error.get("step_s")),
        number(predicted, "memory_gb", ".1f"), number(measured, "memory_gb", ".1f"),
        percent(error.get("memory_gb")),
        fits + (" (wrong)" if error.get("fits") else ""),
    ]  # fmt: skip
