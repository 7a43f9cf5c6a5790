"""What calibration measures, fits and writes. Times on a busy machine are noise: only laws are held to
numbers."""

import dataclasses
import json
import math

import jax
import pytest

from llmpar.cli.commands import parse
from llmpar.inspect import calibrate
from llmpar.predict import hardware
from llmpar.predict.hardware import chip
from llmpar.predict.measured import against
from llmpar.predict.rates import RATES
from llmpar.predict.time import on_links

TINY = calibrate.Sizes(((8, 8, 8), (32, 32, 32), (64, 32, 64)), 1 << 14, 32, (1 << 10, 1 << 12), 1e-4)


def test_a_fit_finds_what_made_the_times():
    shapes = [(m, k, n) for m in (16, 256, 4096) for k in (512, 8192) for n in (128, 4096)]
    rate, half, start, reads = 7e14, 3e6, 4e-6, 3e12

    def law(m, k, n):
        moved = 2 * (m * k + k * n + m * n) / reads
        return 2.0 * m * k * n / rate * (1 + half / (m * n)) + moved + start

    found = calibrate.fit_products([(shape, law(*shape)) for shape in shapes], reads, 2)
    assert found == pytest.approx((rate, half, start), rel=0.1)


@pytest.mark.parametrize("name", ["h100", "v5p"])
def test_a_fit_of_links_finds_alpha_and_beta(name):
    row = dataclasses.replace(chip(name), link_efficiency=0.7, hop_s=1e-12)
    timed = []
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute"):
        for group in (2, 8):
            for size in (1 << 12, 1 << 20, 1 << 27):
                start = 5e-6 * (1 + math.log2(group)) * (2 if kind == "all-reduce" else 1)
                timed.append((kind, size, group, start + on_links(row, kind, size, group, 1)))
    assert calibrate.fit_links(chip(name), timed) == pytest.approx((0.7, 5e-6), rel=1e-3)


def test_a_factor_that_would_be_negative_is_left_out():
    assert calibrate.least_squares([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]], [0.5, 1.5, 2.5])[1] == 0


def test_what_is_repeated_is_not_left_out():
    """The program holds the product inside its loop, and a turn changes what the next one multiplies."""
    x, w = jax.numpy.full((4, 4), 0.25), jax.numpy.full((4, 4), 0.375)
    run = jax.jit(lambda x, w, turns: calibrate.repeat(lambda x: x @ w, x, turns))
    assert float(run(x, w, 0)[0, 0]) == 0.375
    assert float(run(x, w, 3)[0, 0]) != 0.375
    assert "while" in run.lower(x, w, 3).compile().as_text()


@pytest.fixture(scope="module")
def measured():
    return calibrate.calibrate(jax.devices(), "ours", TINY)


def test_every_kind_is_timed_and_stands_beside_its_law(measured):
    what = {row.what.split(" over ")[0] for row in measured.rows}
    kinds = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute"}
    assert what == kinds | {"product", "memory", "attention"}
    assert all(row.seconds > 0 and row.law_s > 0 for row in measured.rows)
    assert len(measured.rows) == 3 + 2 + 5 * 2 * len({2, jax.device_count()})
    timed = set(measured.reached) | set(calibrate.unmeasured(measured))
    assert timed == {f.name for f in dataclasses.fields(hardware.Rates)}


def test_the_file_says_the_same_and_prices_a_plan(measured, tmp_path, capsys):
    path = tmp_path / "ours.toml"
    path.write_text(calibrate.as_toml(measured, "2026-01-01"))
    row = chip(path)
    assert (row.name, row.base, row.simulated) == ("ours", "cpu", False)
    for name, value in measured.reached.items():
        assert getattr(row.rates, name) == pytest.approx(value, rel=1e-3)
    for name, value in measured.fields.items():
        assert getattr(row, name) == pytest.approx(value, rel=1e-3)
    parse(f"plan --chip {path} --model tiny --devices 8 --seq-len 128 --json".split()).run()
    found = json.loads(capsys.readouterr().out)
    assert (
        found["chip"] == "ours" and found["plans"][0]["step_s"] > 0 and found["plans"][0]["compile"] is None
    )
    parse(f"plan --serve --chip {path} --model tiny --devices 8 --prompt 64 --output 16 --json".split()).run()
    assert json.loads(capsys.readouterr().out)["plans"]


def test_measured_rates_replace_the_fitted_ones(tmp_path):
    path = tmp_path / "slow.toml"
    half = RATES["a100-80"].products / 2
    path.write_text(f'base = "a100-80"\n[reached]\nproducts = {half}\n')
    row = chip(path)
    assert row.rates == dataclasses.replace(RATES["a100-80"], products=half)
    assert chip("a100-80").rates == RATES["a100-80"]
    usual = tmp_path / "usual.toml"
    usual.write_text('base = "a100-80"\nnode_size = 4\n')
    assert chip(usual).rates == RATES["a100-80"], "a file without measured rates keeps its row's"


def test_a_shared_file_is_held_against_runs(tmp_path, capsys):
    runs = "tests/measured.json"
    path = tmp_path / "slow.toml"
    path.write_text('base = "a100-80"\n[reached]\nproducts = 0.3\n')
    parse(["plan", "--against", runs, "--chip", str(path), "--json"]).run()
    slow = json.loads(capsys.readouterr().out)
    usual = against(runs)
    slower = 0
    for a, b in zip(slow["rows"], usual["rows"], strict=True):
        ratio = a["predicted"]["step_s"] / b["predicted"]["step_s"]
        # Some wait for their host; where products take longer, more is hidden behind them.
        assert ratio > 0.98 if a["chip"] == "a100-80" else ratio == 1, (a["id"], ratio)
        slower += ratio > 1.2
    assert slower > 250


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("[reached]\nproducts = 1.5\n", "reached.products = 1.5 is not a share"),
        ("[reached]\nspeed = 1\n", "unknown field speed; a table"),
        ("[reached]\nhalf = -1\n", "reached.half = -1 is not a positive number"),
        ("reached = 3\n", "value of reached"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, text, sentence):
    path = tmp_path / "wrong.toml"
    path.write_text('base = "h100"\n' + text)
    with pytest.raises(ValueError, match=sentence):
        chip(path)


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--out", "here.txt"], "is no name of a chip file"),
        (["--out", "no/such/folder.toml"], "a folder that is there"),
        (["--chip", "h100", "--out", "h100.toml"], "'h100' is a chip's name already"),
        (["--chip", "h100", "--out", "x.toml"], "the devices here are cpu, not h100"),
        (["--chip", "h7"], "chip 'h7' is not known"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        parse(["calibrate", *words]).run()


def test_against_wants_a_file_with_measured_rates(tmp_path):
    with pytest.raises(ValueError, match="has no measured rates"):
        parse(["plan", "--against", "tests/measured.json", "--chip", "h100"]).run()
    path = tmp_path / "ours.toml"
    path.write_text('base = "v5e"\n[reached]\nproducts = 0.5\n')
    with pytest.raises(ValueError, match="has no run on v5e"):
        parse(["plan", "--against", "tests/measured.json", "--chip", str(path)]).run()
