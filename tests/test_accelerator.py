"""What must hold on whatever devices JAX finds, and rehearsals of it on CPUs (conftest.py, rounding.py)."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import conftest
import device
import jax
import pytest
from parity import LLAMA, MOE, assert_same, name
from shared import program_text

from llmpar.cli import demo, inspect, train
from llmpar.inspect import roofline
from llmpar.plan.plan import Plan
from llmpar.predict import hardware

TESTS = Path(__file__).resolve().parent
LESSONS = sorted((TESTS.parent / "notebooks" / "src").glob("[0-9][0-9]*_*.py"))
ROUNDS = jax.default_backend() != "cpu" or bool(conftest.ROUNDING)
ROUNDED = "tf32" if jax.default_backend() == "gpu" or conftest.ROUNDING == "tf32" else "bfloat16"
"""By default a GPU rounds what it multiplies to TF32 (11 bits) and a TPU to bfloat16 (8)."""
UNITS = {"highest": "float32", "default": ROUNDED} if ROUNDS else {None: "float32"}
THERE = [] if ROUNDS else [pytest.mark.nightly]
"""On CPUs test_plans.py compares more than these, on every change."""
N = min(8, len(jax.devices()))
OF_TWO = [Plan("dp=2", zero=0), Plan("tp=2", tp_sequence=True), Plan("sp=2", sequence_order="zigzag")]
OF_TWO += [Plan("pp=2", microbatches=2), Plan("fsdp=2", mode="auto"), Plan("ep=2")]
PLANS = [Plan(f"fsdp={N}"), *OF_TWO * (N > 1)]


@pytest.mark.accelerator
@pytest.mark.parametrize("precision", [pytest.param(unit, marks=THERE) for unit in UNITS])
def test_loss_and_gradients_on_all_devices_are_those_of_one_in_float32(precision):
    with jax.default_matmul_precision(precision):
        assert_same(LLAMA, PLANS[0], UNITS[precision])


@pytest.mark.accelerator
@pytest.mark.parametrize("plan", [pytest.param(plan, marks=THERE) for plan in PLANS[1:]], ids=name)
def test_each_kind_of_parallelism_gives_what_one_device_gives(plan):
    """At full precision: with fewer bits a router may choose another expert."""
    assert_same(MOE if plan.mesh.ep > 1 else LLAMA, plan)


@pytest.mark.accelerator
def test_the_demonstration_compares_in_float32(monkeypatch, tmp_path):
    """A product is less than float32 elsewhere than on CPUs: fifty steps would part by more than 1e-3."""
    seen = []

    def run(command):
        seen.append(jax.config.jax_default_matmul_precision)
        return {"losses": [5.0, 1.0], "collectives": []}

    for command in (train.Train, inspect.Inspect):
        monkeypatch.setattr(command, "run", run)
    before = jax.config.jax_default_matmul_precision
    demo.Demo(str(tmp_path), 2).run()
    assert seen == ["highest"] * 3 and jax.config.jax_default_matmul_precision == before


@pytest.mark.nightly
def test_the_device_test_runs_in_its_small_form_and_estimates_read_what_it_writes(tmp_path, monkeypatch):
    words = [sys.executable, str(TESTS / "device.py"), "--small", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent), "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = " ".join(conftest.SIMULATED[1:])
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    table = (tmp_path / "device.md").read_text()
    for part in ("attention", "groups", "speed", "memory", "steps", "trace", "loss", "time"):
        assert f"| {part} |" in table, part
    assert table.count("| ok |") >= 7 and "**wrong**" not in table and "nan" not in table
    monkeypatch.setattr(roofline, "MEASURED", tmp_path / "reached.json")
    assert roofline.measured(hardware.chip("cpu")).keys() == {"products", "attention"}
    assert roofline.shares(hardware.chip("cpu"))["cudnn"] == roofline.FUSED_SHARE, "not measured there"


def test_a_device_that_is_wrong_is_told(monkeypatch):
    test = device.Test(device.SMALL)
    for value, right in ((1.0, True), (1.1, False), (float("nan"), False)):
        test.row("part", "what", value, "", 1.0)
        assert test.rows[-1][-1] is right
    rows = len(test.rows)
    monkeypatch.setattr(device, "ROUNDED", {"float32": 2e-5})
    backward = device.flash.kernel_backward
    wrong = lambda *args, **settings: [x * 1.001 for x in backward(*args, **settings)]
    monkeypatch.setattr(device.flash, "kernel_backward", wrong)
    test.attends()
    assert len(test.rows) > rows and not any(row[-1] for row in test.rows[rows:])


def script(file: Path, rounding: str) -> subprocess.CompletedProcess:
    """Run a script, such as a lesson, in a process of its own, with products rounded ("" leaves them)."""
    ours = conftest.SIMULATED[: 1 if conftest.PLATFORM == "cpu" else None]
    flags = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if flag not in ours)
    environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "PJRT_NPROC")}
    environment |= {"MPLBACKEND": "agg", "XLA_FLAGS": flags}
    command = [sys.executable, str(TESTS / "rounding.py"), rounding or "exact", str(file)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=850)


@pytest.mark.accelerator
@pytest.mark.full
@pytest.mark.parametrize("rounding", [conftest.ROUNDING] if ROUNDS else ["bf16", "tf32"])
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_every_lesson_holds_where_products_are_rounded(lesson, rounding):
    done = script(lesson, rounding)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_rehearsal_rounds_every_product_whose_precision_nobody_stated_and_catches_what_is_too_tight(
    tmp_path,
):
    """And no other. It says when JAX has changed the one private name that rounding.py uses."""
    (tmp_path / "tight.py").write_text(
        program_text("products") + "assert apart(products[0]()) < 1e-4, 'too tight'"
    )
    done = script(tmp_path / "tight.py", "tf32")
    errors = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    assert len(errors) == 6 and done.returncode and "too tight" in done.stderr, done.stderr
    assert all(2**-11 < default < 64 * 2**-11 and stated < 1e-4 for default, stated in errors), errors


def test_what_the_default_tests_leave_out_is_a_job_of_its_own():
    """But for what is asked for by hand or at night, which `.ci/run` leaves out, too."""
    read = lambda name: (TESTS.parent / name).read_text()
    given = tomllib.loads(read("pyproject.toml"))["tool"]["pytest"]["ini_options"]["addopts"]
    left = set(re.findall(r"\w+", given.rpartition("not (")[2])) - {"or"} | {"lessons"}
    by_hand = set(re.findall(r"\w+", re.search(r"not \((.*)\)", read(".ci/run"))[1])) - {"or"}
    assert by_hand == {"nightly", "full", "engines"}
    assert left - by_hand == set(re.findall(r"call WITH,(\w+)", read("Makefile")))
