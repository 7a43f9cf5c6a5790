"""Fits `predict.hardware.Rates` of each chip on measured runs; `python tests/fit_rates.py FILE` prints them.

Gauss-Newton on logarithms of step times, from a prior that holds what few runs cannot say; it sees shapes
and seconds, no name of a model or a source. Sweeps count by the root of their length.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import sys

import numpy as np

from llmpar.planner.measured import read_runs
from llmpar.predict.hardware import Rates, package_table
from llmpar.predict.time import step_time

PRIOR = Rates()
KIN = {name: row.get("rates", name) for name, row in package_table("predict/chips.toml")["chip"].items()}
"""The chip whose row a chip has."""
LARGEST = 0.90
"""Of a TPU's peak (v6e: tpu-recipes, microbenchmarks/README.md). Training has 0.84 of it on A100 and H100."""


def prior(chip) -> Rates:
    """What is expected of a chip before a run: the general row, with what its data sheet says."""
    matmuls = 0.84 * LARGEST if chip.link == "torus" else PRIOR.matmuls
    return dataclasses.replace(PRIOR, softmax=chip.rates.softmax, matmuls=matmuls)


SPREAD = {  # how far from the prior, in logarithms, a constant may be expected
    "matmuls": 0.25, "grouped": 0.5, "attention": 0.15, "memory": 0.10, "links": 0.08,
    "network": 0.3, "kernel_s": 0.1, "host_s": 0.7, "start_s": 0.5, "shared": 0.7, "eight_bit": 0.15,
}  # fmt: skip
"""Of attention it is the deviation between the rows of chips that 0.35 gave. With that, attention, a small
part of most runs, went to 0.9 of an H100's peak where it had to explain something else. So did memory, to 0.6
of an A100's rate: copies reach 0.8 to 0.9 of it on each generation."""
MOST = dict.fromkeys(("matmuls", "memory"), 0.95) | dict.fromkeys(("grouped", "attention"), 0.9)
MOST |= {"links": 1.0, "network": 1.0, "eight_bit": 1.9}
MANY = 240
"""Runs of a sweep that are fitted on, evenly spaced, and not many more."""
COMPUTED = "b200", "b300", "gb300", "l40s", "rtx-4090", "rtx-6000-ada", "rtx-pro-6000"
"""Chips whose rows are computed from data sheets, and no fit moves."""
FAR, NOISE = 0.15, 0.05
"""In logarithms: an error that counts less and less, and what two honest runs of a step differ by."""


def fit(runs, prior: Rates = PRIOR, turns: int = 12) -> Rates:
    names = list(SPREAD)
    start = np.log([getattr(prior, n) for n in names])
    spread = np.array([SPREAD[n] for n in names])
    top = np.log([MOST.get(n, 1e9) for n in names])
    weights = np.array([w for _, _, w in runs]) ** 0.5 / NOISE

    def row(x):
        return dataclasses.replace(prior, **dict(zip(names, map(float, np.exp(x)), strict=True)))

    def residuals(x):
        own = row(x)
        errors = np.array([math.log(step_time(run, own).step_s / s) for run, s, _ in runs])
        far = np.abs(errors) > FAR  # what no constant explains must not bend those that do (Huber 1964)
        errors = np.where(far, np.sign(errors) * np.sqrt(FAR * np.abs(2 * np.abs(errors) - FAR)), errors)
        return np.concatenate([weights * errors, (x - start) / spread, 30 * np.maximum(x - top, 0)])

    x, damp = start.copy(), 1e-2
    best = residuals(x)
    for _ in range(turns):
        step = 1e-3
        slope = np.stack([(residuals(x + step * np.eye(len(x))[i]) - best) / step for i in range(len(x))], 1)
        for _ in range(12):
            move = np.linalg.solve(slope.T @ slope + damp * np.eye(len(x)), -slope.T @ best)
            new = x + np.clip(move, -0.5, 0.5)
            found = residuals(new)
            if found @ found < best @ best:
                x, best, damp = new, found, damp / 5
                break
            damp *= 5
        else:
            break
    return row(np.minimum(x, top))


def fit_all(cases, turns: int = 12) -> dict[str, Rates]:
    sizes = collections.Counter(case.group for case in cases if case.measured["step_s"])
    by_chip, seen = collections.defaultdict(list), collections.Counter()
    for case in cases:
        seen[case.group] += 1
        if seen[case.group] % max(1, sizes[case.group] // MANY):
            continue
        if case.measured["step_s"] and not case.run.chip.reached:
            by_chip[case.run.chip.name].append((case.run, case.measured["step_s"], sizes[case.group] ** -0.5))
    found = {name: fit(runs, prior(runs[0][0].chip), turns) for name, runs in sorted(by_chip.items())}
    tpus = {name: runs[0][0].chip for name, runs in by_chip.items() if runs[0][0].chip.link == "torus"}
    near = [*map(prior, list(tpus.values())[:1]), *(found[name] for name in tpus)]
    return found | ({"tpu": middle(near)} if tpus else {})


def middle(rows: list[Rates]) -> Rates:
    """The geometric mean of rows, the prior among them: what a chip is like of whose kind others were run."""
    mean = lambda name: math.exp(sum(math.log(getattr(row, name)) for row in rows) / len(rows))
    return dataclasses.replace(rows[-1], **{name: mean(name) for name in SPREAD})


def expected(chip, rates: dict[str, Rates]) -> Rates:
    """A chip's row, by the source's own measurements or the fit, or that of its kind."""
    if chip.reached or chip.name in COMPUTED:
        return chip.rates
    kind = "tpu" if chip.link == "torus" else ""
    own = rates.get(KIN[chip.name]) or rates.get(kind) or prior(chip)
    return dataclasses.replace(own, softmax=chip.rates.softmax)


if __name__ == "__main__":
    cases, _ = read_runs(sys.argv[1])
    for name, found in fit_all(cases).items():
        said = {field.name: f"{getattr(found, field.name):.3g}" for field in dataclasses.fields(Rates)}
        own = [f"{k} = {v}" for k, v in said.items() if v != f"{getattr(PRIOR, k):.3g}"]
        print(f"[{name}]", *own, "", sep="\n")
