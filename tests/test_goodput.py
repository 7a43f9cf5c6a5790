"""Goodput: the exact expectation against simulated runs, its best interval against the published ones."""

import math

import pytest
from shared import TABLES

from llmpar.predict.goodput import FailingRun, best_interval, goodput, simulate, young_interval

RUNS = {name: FailingRun(**fields) for name, fields in TABLES["failing_runs"].items()}
LLAMA_3 = 54 * 86_400 / 466  # seconds between interruptions (arXiv 2407.21783, section 3.3.4)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("share", [0.5, 1, 2])
def test_a_simulation_agrees_within_its_standard_error(name, share):
    """Of 15 seeded simulations none is off by three standard errors."""
    run = RUNS[name]
    interval_s = share * best_interval(run)
    mean, error = simulate(run, interval_s, failures=1500)
    assert abs(mean - goodput(run, interval_s)) < 3 * error < 0.03


@pytest.mark.parametrize("name", RUNS)
def test_no_interval_is_better_than_the_best_and_daly_is_nearer_than_young(name):
    run = RUNS[name]
    best = best_interval(run)
    top = goodput(run, best)
    assert all(goodput(run, best * factor) < top for factor in (0.7, 0.98, 1.02, 1.4))
    ratio = run.stall_s / (2 * run.mtbf_s)
    daly = young_interval(run) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - run.stall_s  # Daly 2006, eq. 37
    assert abs(daly - best) < 1e-3 * best < abs(young_interval(run) - best)


def test_the_best_interval_is_one_for_rare_failures_and_for_writes_that_leave_no_other():
    rare = FailingRun(2e14, 1e-6, 0)
    assert best_interval(rare) == pytest.approx(young_interval(rare), rel=1e-6)
    for i in range(1000):  # write_s - stall_s is rounded
        run = FailingRun(2.0, 51.3 + i / 7, 0, 318.4 + i / 3)
        assert 0 <= goodput(run, best_interval(run)) < 1


def test_the_command_prints_the_same_numbers_and_refuses_in_a_sentence(call, document):
    found = document("goodput", "--devices", "1024", "--stall-s", "10")
    run = FailingRun(found["mtbf_s"], 10, 600)
    assert found["mtbf_s"] == pytest.approx(LLAMA_3 * 16)
    assert found["goodput"] == goodput(run, found["best_interval_s"]) == found["sizes"][2]["goodput"]
    assert abs(found["simulated"]["goodput"] - found["goodput"]) < 3 * found["simulated"]["standard_error"]
    status, _, err = call("goodput", "--write-s", "1e4", "--interval-s", "10")
    assert status == 1 and "use an interval above 9970 s" in err
