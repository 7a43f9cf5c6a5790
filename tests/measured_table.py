"""Writes measured.md: every published run predicted, measured and the error, the sweeps, and a
cross-validation.

    python tests/measured_table.py            rows and sweeps; keeps the cross-validation that is there
    python tests/measured_table.py cross      fits again on halves of the sources first: minutes
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import fit_rates

from llmpar.planner.measured import SOURCES, against, read_runs
from llmpar.predict.hardware import Rates
from llmpar.predict.time import step_time

HERE = Path(__file__).parent
FILE, UNSEEN, TABLE = HERE / "measured.json", HERE / "published.json", HERE / "measured.md"
HALF = ("vTrain", "dgxc-benchmarking", "torchtitan", "SimuMax", "gpu-recipes")
"""Sources of one half; the others are the other. A chip that only one half has is predicted by the prior."""
CROSS = "## Fitted on half of the sources, tested on the other"


def source_of(case) -> str:
    """The source's word."""
    return next((word for word in SOURCES if word.lower() in case.source.lower()), "own")


def cross() -> str:
    """Fit on each half of the sources, predict the other."""
    cases = [case for case in read_runs(FILE)[0] if case.measured["step_s"]]
    halves = [[c for c in cases if (source_of(c) in HALF) == side] for side in (True, False)]
    errors: dict[tuple[str, str], list[float]] = {}
    for fitted, tested in (halves, halves[::-1]):
        rates = fit_rates.fit_all(fitted)
        for case in tested:
            own = rates.get(case.run.chip.name)
            error = step_time(case.run, own or Rates()).step_s / case.measured["step_s"] - 1
            how = "the other half" if own else "the prior alone"
            errors.setdefault((f"{source_of(case)}, {case.run.chip.name}", how), []).append(error)
    lines = ["| source, chip | fitted on | runs | mean abs. error | mean error |", "|---|---|---|---|---|"]
    for (name, how), found in errors.items():
        mean = statistics.mean(map(abs, found))
        lines.append(f"| {name} | {how} | {len(found)} | {mean:.1%} | {statistics.mean(found):+.1%} |")
    every = [abs(e) for found in errors.values() for e in found]
    lines.append(
        f"| all | | {len(every)} | {statistics.mean(every):.1%} | median {statistics.median(every):.1%} |"
    )
    return "\n".join(lines)


def rows(file: Path) -> str:
    """The tables of one comparison."""
    document = against(file)
    percent = lambda x: "" if x is None else f"{x:+.0%}"
    number = lambda found, key, form: format(found[key], form) if found.get(key) is not None else ""
    summary = document["summary"]
    lines = [
        f"{summary['runs']} runs: step time {summary['step_mean_abs_error']:.1%} mean and"
        f" {summary['step_median_abs_error']:.1%} median absolute error; memory"
        f" {summary['memory_median_abs_error']:.1%} median; {summary['fits_wrong']} wrong about what fits.",
        "",
        "| sweep | runs | Spearman | first choice over the best | mean abs. error |",
        "|---|---|---|---|---|",
    ]
    for g in document["groups"]:
        choice = "" if g["choice_over_best"] is None else f"{g['choice_over_best']:.3f}"
        error = f"{g['step_mean_abs_error']:.1%}"
        lines.append(f"| {g['id']} | {g['runs']} | {g['spearman']:.3f} | {choice} | {error} |")
    lines += ["", "| run | chip | mesh | recompute | predicted | measured | error | GB | measured | error |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for row in document["rows"]:
        p, m, e = row["predicted"], row["measured"], row["error"]
        cells = [row["id"], row["chip"], row["mesh"], row["recompute"]]
        cells += [number(p, "step_s", ".3g"), number(m, "step_s", ".3g"), percent(e.get("step_s"))]
        cells += [number(p, "memory_gb", ".0f"), number(m, "memory_gb", ".0f"), percent(e.get("memory_gb"))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def text(crossed: str) -> str:
    """The whole file: its words are written there."""
    head, seen, unseen = TABLE.read_text(encoding="utf-8").partition(CROSS)[0], rows(FILE), rows(UNSEEN)
    return f"{head}{CROSS}\n\n{crossed}\n\n## Every run\n\n{seen}\n\n## Runs that no fit saw\n\n{unseen}\n"


def kept() -> str:
    """The cross-validation that is in the file."""
    return TABLE.read_text(encoding="utf-8").partition(CROSS + "\n\n")[2].partition("\n\n## Every run")[0]


if __name__ == "__main__":
    TABLE.write_text(text(cross() if "cross" in sys.argv else kept()), encoding="utf-8")
