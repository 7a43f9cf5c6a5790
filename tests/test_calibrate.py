"""`plan --measured`: rates fitted to a few steps of a machine."""

import dataclasses
import itertools
import statistics
from pathlib import Path

import pytest

from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.planner import calibrate, measured, planner
from llmpar.predict.hardware import Rates, chip
from llmpar.predict.time import step_time

MEASURED = Path(__file__).with_name("measured.json")


def on(run, rates):
    return dataclasses.replace(run, chip=dataclasses.replace(run.chip, reached=rates))


def test_the_factors_of_a_slower_machine_are_found():
    config, h100 = preset("llama3-8b"), chip("h100")
    asked = planner.Question(config, h100, 64, 64, 8192)
    runs = [asked.run(Plan(mesh, remat="block")) for mesh in ("fsdp=64", "fsdp=8 tp=8", "dp=2 fsdp=16 tp=2")]
    slow = calibrate._scaled(h100, 0.8, 0.6).reached
    *known, last = [(run, step_time(on(run, slow)).step_s) for run in runs]
    found = calibrate.calibrate(h100, known, 1.0)
    assert found.alone == pytest.approx(0.8, rel=0.02) and found.links == pytest.approx(0.6, rel=0.05)
    assert step_time(on(last[0], found.chip.reached)).step_s == pytest.approx(last[1], rel=0.01)


def test_two_steps_halve_the_error_on_machines_whose_rates_are_not_known():
    cases = [case for case in measured.read_runs(MEASURED)[0] if "step_s" in case.measured]
    by_source, errors = itertools.groupby(cases, lambda case: (case.source, case.run.chip.name)), []
    for _, group in by_source:
        runs = [(on(case.run, Rates()), case.measured["step_s"]) for case in group]
        if not 5 <= len(runs) <= 60:
            continue
        found = calibrate.calibrate(runs[0][0].chip, [runs[0], runs[-1]], 0.16)
        rest = runs[1:-1]
        for rates in (Rates(), found.chip.reached):
            off = (abs(step_time(on(run, rates)).step_s / seconds - 1) for run, seconds in rest)
            errors.append(statistics.mean(off))
    before, after = statistics.mean(errors[::2]), statistics.mean(errors[1::2])
    assert len(errors) >= 12 and before > 0.14 and after < 0.6 * before, (errors, before, after)


def test_the_command_says_what_the_steps_changed(tmp_path, document):
    path, own = tmp_path / "steps.toml", ("plan", "--devices", "8", "--mesh", "fsdp=8")
    path.write_text(
        '[[step]]\nmesh = "fsdp=8"\nbatch_size = 8\nseq_len = 8192\nfix = "remat=block"\nseconds = 2.4'
    )
    found, plain = document(*own, "--measured", str(path)), document(*own)
    step = found["measured"]["steps"][0]
    assert step["predicted_s"] < 0.8 * step["measured_s"] and found["measured"]["alone"] < 0.85
    assert step["calibrated_s"] == pytest.approx(2.4, rel=0.08)
    assert found["plans"][0]["step_s"] > 1.2 * plain["plans"][0]["step_s"]
    assert any("by 1 measured step a chip reaches" in note for note in found["notes"])
