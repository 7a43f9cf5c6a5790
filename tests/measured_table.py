"""Writes measured.md: every published run predicted and measured, the sweeps, and a cross-validation.

`python tests/measured_table.py` keeps the cross-validation that is there, `… cross` fits it again.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import fit_rates

from llmpar.planner.measured import SOURCES, against, read_runs
from llmpar.planner.planner import UNSEEN_ERROR, error_kind
from llmpar.predict.time import step_time

HERE = Path(__file__).parent
FILE, UNSEEN, TABLE = HERE / "measured.json", HERE / "published.json", HERE / "measured.md"
HALF = ("vTrain", "dgxc-benchmarking", "torchtitan", "SimuMax", "gpu-recipes")
"""Sources of one half; the others are the other. A chip that only one half has is predicted by the prior."""
CROSS = "## Fitted on half of the sources, tested on the other"
KINDS = tuple(UNSEEN_ERROR)
"""Of runs: each has an error of its own."""
ONE = "## Fitted on all sources but one, tested on that one"


def source_of(case) -> str:
    return next((word for word in SOURCES if word.lower() in case.source.lower()), "own")


def cross() -> str:
    """Fit on each half of the sources, predict the other; then on all but one. Only on runs of `FILE`."""
    timed = lambda file: [case for case in read_runs(file)[0] if case.measured["step_s"]]
    fitted, unseen = timed(FILE), timed(UNSEEN)
    halves = [{word for word in SOURCES if (word in HALF) == side} for side in (False, True)]
    each = [{word} for word in dict.fromkeys(map(source_of, [*fitted, *unseen]))]
    first = left_out(fitted, unseen, halves, "the other half")
    second = left_out(fitted, unseen, each, "the others")
    return f"{first}\n\n{ONE}\n\n{second.replace('| all |', '| every run |')}"


def left_out(fitted, unseen, groups: list[set[str]], others: str) -> str:
    """Predictions of each group of sources by a fit on all others."""
    errors: dict[tuple[str, str, str], list[float]] = {}
    for group in groups:
        tested = [case for case in [*fitted, *unseen] if source_of(case) in group]
        chips = {fit_rates.KIN[case.run.chip.name] for case in tested}
        kinds = {case.run.chip.link for case in tested if case.run.chip.link == "torus"}
        near = [c for c in fitted if c.run.chip.name in chips or c.run.chip.link in kinds]
        rates = fit_rates.fit_all([case for case in near if source_of(case) not in group])
        for case in tested:
            own = fit_rates.expected(case.run.chip, rates)
            error = step_time(case.run, own).step_s / case.measured["step_s"] - 1
            how = "the prior alone" if own == fit_rates.prior(case.run.chip) else "chips of its kind"
            how = others if fit_rates.KIN[case.run.chip.name] in rates else how
            how = "computed" if case.run.chip.name in fit_rates.COMPUTED else how
            how = "the source's own" if case.run.chip.reached else how
            kind = error_kind(case.run.config, case.run.chip)
            errors.setdefault((f"{source_of(case)}, {case.run.chip.name}", kind, how), []).append(error)
    lines = ["| source, chip | kind | fitted on | runs | mean abs. error | mean error |", "|---" * 6 + "|"]
    for (name, kind, how), found in errors.items():
        mean = statistics.mean(map(abs, found))
        cells = name, kind, how, str(len(found)), f"{mean:.1%}", f"{statistics.mean(found):+.1%}"
        lines.append(f"| {' | '.join(cells)} |")
    for name, kinds in (("all", KINDS), *((kind, (kind,)) for kind in KINDS)):
        each = [[abs(e) for e in found] for key, found in errors.items() if key[1] in kinds]
        every, means = sum(each, []), [statistics.mean(found) for found in each]
        for what, found in ((name, every), (f"{name}, each source once", means)):
            if not found:
                continue
            mean, middle = statistics.mean(found), statistics.median(found)
            lines.append(f"| {what} | | | {len(found)} | {mean:.1%} | median {middle:.1%} |")
    return "\n".join(lines)


def rows(file: Path) -> str:
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
        lines.append(f"| {g['id']} | {g['runs']} | {g['spearman']:.2f} | {choice} | {error} |")
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
    return TABLE.read_text(encoding="utf-8").partition(CROSS + "\n\n")[2].partition("\n\n## Every run")[0]


if __name__ == "__main__":
    TABLE.write_text(text(cross() if "cross" in sys.argv else kept()), encoding="utf-8")
