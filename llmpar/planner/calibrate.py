"""Fit a chip's rates to a few steps that were measured on the machine at hand.

Two factors are fitted: one of all that a device reaches alone (`_ALONE`), and one of what its links reach
(`_LINKS`). Of the rest, such as the delays of kernels, a few steps say too little. Each logarithm has a
normal prior around 0, as wide as the model's error on clusters that no fit has seen; so what the steps do not
show, such as links when all ran on one device, stays as it was. A measured step has the width `_NOISE`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from llmpar.files import Allowed, read_toml, refuse
from llmpar.predict.hardware import Chip, checked, lacking
from llmpar.predict.time import step_time
from llmpar.predict.workload import Run

_ALONE = "matmuls", "grouped", "attention", "memory"
_LINKS = "links", "network"
"""The shares of `Rates` that a factor is of."""
_NOISE = 0.06
"""Assumed: by how much a measured step differs from another one of the same plan, and from any such model."""
_MOST = 4.0
"""A step that is so many times as long or short as predicted is of another plan or unit."""


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was measured: a table ``[[step]]`` of the file.

    Attributes:
        mesh: its mesh, with all axes.
        seconds: of a step, without the first ones, which compile.
        batch_size, seq_len: its sequences, and the tokens of each.
        fix: fields of the plan that were not the defaults of `Plan`: "remat=block zero=1".
        model: a preset or a configuration's file; without one it is the command's.
    """

    mesh: Annotated[str, Allowed(str)]
    seconds: Annotated[float, Allowed(float, 1e-6, 1e6)]
    batch_size: Annotated[int, Allowed(int, 1, 1 << 24)]
    seq_len: Annotated[int, Allowed(int, 1, 1 << 24)]
    fix: Annotated[str, Allowed(str)] = ""
    model: Annotated[str, Allowed(str)] = ""


def read_steps(file: str) -> list[MeasuredStep]:
    """Return the steps of a TOML file; ValueError where it is something else."""
    path, what = Path(file), "measured steps"
    table = read_toml(path, what)
    rows = table.pop("step", None)
    if table or not rows or not isinstance(rows, list):
        refuse(path, what, "write a table [[step]] for each, and nothing else")
    for row in rows:
        Allowed(dict).check(f"{path}: [[step]]", row)
        checked(MeasuredStep, row, f"{path}: [[step]]")
        if missing := lacking(MeasuredStep, row):
            refuse(path, what, f"a step has no {missing}")
    return [MeasuredStep(**row) for row in rows]


@dataclass(frozen=True)
class Calibration:
    """A chip with fitted rates, the two factors, and of each step the seconds measured and predicted, before
    and after."""

    chip: Chip
    alone: float
    links: float
    steps: list[dict[str, Any]]

    def document(self) -> dict[str, Any]:
        """Return what ``plan --json`` has of it."""
        return {"alone": self.alone, "links": self.links, "steps": self.steps}

    def __str__(self) -> str:
        misses = (abs(row["calibrated_s"] / row["measured_s"] - 1) for row in self.steps)
        steps = f"{len(self.steps)} measured step{'s' * (len(self.steps) > 1)}"
        return (
            f"by {steps} a chip reaches {self.alone:.2f} times what is assumed of"
            f" its kind, and its links {self.links:.2f} times; predicted so, measured steps are off by"
            f" {max(misses):.0%} at most"
        )


def calibrate(chip: Chip, runs: Sequence[tuple[Run, float]], error: float) -> Calibration:
    """Fit the rates of a chip.

    Args:
        chip: as it is assumed without the steps.
        runs: what was run, on any chip, and the seconds that a step took.
        error: the width of the prior (`Question.time_error`).

    Raises:
        ValueError: a step is `_MOST` times as long as predicted, or as short.
    """
    from scipy.optimize import least_squares

    seconds = lambda on: [step_time(replace(run, chip=on)).step_s for run, _ in runs]
    before = seconds(chip)
    for predicted, (run, measured) in zip(before, runs, strict=True):
        if not 1 / _MOST < measured / predicted < _MOST:
            raise ValueError(
                f"a step on '{run.mesh}' took {measured:g} s, and {predicted:.3g} s are predicted; check its"
                " mesh, batch, seq_len and model, and that these are seconds of one step"
            )

    def residuals(logs: Sequence[float]) -> list[float]:
        pairs = zip(seconds(_scaled(chip, *map(math.exp, logs))), runs, strict=True)
        misses = [math.log(predicted / measured) / _NOISE for predicted, (_, measured) in pairs]
        return [*misses, *(log / error for log in logs)]

    alone, links = map(math.exp, least_squares(residuals, (0.0, 0.0)).x)
    fitted = _scaled(chip, alone, links)
    rows = [
        {"mesh": str(run.mesh), "measured_s": measured, "predicted_s": old, "calibrated_s": new}
        for (run, measured), old, new in zip(runs, before, seconds(fitted), strict=True)
    ]
    return Calibration(fitted, alone, links, rows)


def _scaled(chip: Chip, alone: float, links: float) -> Chip:
    """Return the chip whose software reaches so many times as much."""
    factors = dict.fromkeys(_ALONE, alone) | dict.fromkeys(_LINKS, links)
    shares = {name: factor * getattr(chip.rates, name) for name, factor in factors.items()}
    return replace(chip, reached=replace(chip.rates, **shares))
