"""The model of time and memory against published runs, and the fit that sees chips only."""

import dataclasses
import json
import random

import fit_rates
import measured_table
import pytest
from shared import HERE

from llmpar.planner import measured

FILE = HERE / "measured.json"


@pytest.fixture(scope="module")
def document():
    return measured.against(FILE)


@pytest.fixture(scope="module")
def unseen():
    return measured.against(measured_table.UNSEEN)


def test_steps_and_memory_are_right_on_the_whole_and_every_published_run_is_accepted(document):
    summary = document["summary"]
    assert summary["runs"] == 589
    assert summary["step_mean_abs_error"] <= 0.104 and summary["step_median_abs_error"] <= 0.085
    assert summary["memory_median_abs_error"] <= 0.045 and summary["fits_wrong"] == 0


@pytest.mark.parametrize(
    "name", ["vtrain.multi.3.6B", "vtrain.multi.175B", "bloom.rampup", "bloom.02-21", "maxtext.a3.llama2-7b"]
)
def test_meshes_are_ranked_as_they_were_measured(document, name):
    group = next(g for g in document["groups"] if g["id"].startswith(name))
    assert group["spearman"] >= 0.85
    assert group["choice_over_best"] is None or group["choice_over_best"] <= 1.05


def test_runs_that_no_fit_saw_are_predicted_as_well(unseen):
    """Tables of ten sources, with BLOOM's out-of-memory: adapters, small cards, experts, pipelines, TPUs."""
    summary = unseen["summary"]
    assert summary["runs"] == 479 and not unseen["left_out"]
    assert summary["step_mean_abs_error"] <= 0.070 and summary["step_median_abs_error"] <= 0.052
    assert summary["memory_median_abs_error"] <= 0.034
    wrong = [row for row in unseen["rows"] if row["error"]["fits"]]
    refused = [row for row in unseen["rows"] if not row["measured"]["fits"]]
    assert len(refused) == 6
    assert wrong.pop(0)["id"] == "bloom.02-28.h14336.l82/0", "203B with these axes holds 67 GB"
    assert len(wrong) <= 2, "runs that fitted, and are predicted to hold a little more than there is"


def write(path, *groups):
    path.write_text(json.dumps(groups))
    return path


RUN = dict(model="llama3-8b", chip="h100", gpus=8, seq=8192, batch=8, software="llmpar")
OWN = {"id": "mine", "inputs": RUN | {"fsdp": 8}, "expected": {"step_s": 1.0, "fits": True}}


def run_of(tmp_path, **inputs):
    (case,) = measured.read_runs(write(tmp_path / "one.json", OWN | {"inputs": RUN | inputs}))[0]
    return case.run


def test_a_run_has_the_mesh_the_matrices_and_the_microbatches_that_are_given(tmp_path):
    for text in ("fsdp=4 sp=2", "fsdp=4 cp=2", "sp:2,fsdp:4", "sp=2 fsdp=-1"):
        assert str(run_of(tmp_path, mesh=text).mesh) == "fsdp=4 sp=2"
    assert str(run_of(tmp_path, dp=4, sp=2).mesh) == str(run_of(tmp_path, dp=4, cp=2).mesh) == "dp=4 sp=2"
    assert [run_of(tmp_path, fsdp=8, matrices=n).ffn_products for n in (2, 3)] == [2, 3]
    assert run_of(tmp_path, model="nemotron4-15b", fsdp=8).ffn_products == 2, "of its model"
    for given in (dict(micro_batch=2), dict(microbatches=4)):
        run = run_of(tmp_path, batch=64, fsdp=8, **given)
        assert (run.rows, run.microbatches) == (2, 4)
    assert run_of(tmp_path, batch=64, fsdp=8).rows == 8


def test_a_machines_memory_and_its_limit_of_power_are_read(tmp_path):
    """As of torchtitan's H100s. Matmuls go with the root of the watts."""
    usual, own = run_of(tmp_path, fsdp=8).chip, run_of(tmp_path, fsdp=8, power=500, hbm_rate=2400).chip
    assert own.flops_per_s == pytest.approx(usual.flops_per_s * (500 / 700) ** 0.5)
    assert own.hbm_bytes_per_s == 2.4e12 and own.usable_hbm_gib == usual.usable_hbm_gib
    assert run_of(tmp_path, fsdp=8, power=900).chip == usual, "no board has more than its own"


def test_a_users_own_run_is_compared_and_what_cannot_be_is_left_out_by_name(tmp_path):
    """What else cannot be compared is in bad_inputs.toml."""
    sweep = {"columns": ["fsdp", "tp", "ms"], "rows": [[8, 1, 900], [3, 3, 900], [4, 2, 900]]}
    sweep |= OWN | {"id": "sweep", "inputs": RUN, "expected": {}}
    other = OWN | {"id": "other", "expected": {"loss": 2}}
    found = measured.against(write(tmp_path / "runs.json", OWN, other, sweep))
    row = found["rows"][0]
    assert row["mesh"] == "fsdp=8" and 0.5 < row["predicted"]["step_s"] < 2 and not row["error"]["fits"]
    assert [row["id"] for row in found["rows"]] == ["mine", "sweep/0", "sweep/2"]
    assert [left["id"] for left in found["left_out"]] == ["other", "sweep/1"]
    assert "nothing to compare" in found["left_out"][0]["why"]


def test_the_fit_sees_chips_only():
    """Other names of groups, sources and models change nothing; and time knows a chip's row alone."""
    cases = [case for case in measured.read_runs(FILE)[0] if case.run.chip.name in ("h200", "v6e")]
    sized = {c.group: sum(d.group == c.group for d in cases) for c in cases}
    assert set(sized.values()) == {1}, "each of these is a group by itself, so that renaming keeps weights"
    names = random.Random(0)
    renamed = [
        dataclasses.replace(
            c, id=str(names.random()), group=str(names.random()), source="nobody",
            run=dataclasses.replace(c.run, config=dataclasses.replace(c.run.config, name="x")),
        )
        for c in cases
    ]  # fmt: skip
    assert fit_rates.fit_all(cases, turns=2) == fit_rates.fit_all(renamed, turns=2)
    assert set(fit_rates.fit_all(cases, turns=1)) == {"h200", "v6e", "tpu"}


def test_the_table_in_the_docs_is_current(document, unseen, monkeypatch):
    both = {measured_table.FILE: document, measured_table.UNSEEN: unseen}
    monkeypatch.setattr(measured_table, "against", both.get)
    written = measured_table.TABLE.read_text(encoding="utf-8")
    assert written == measured_table.text(measured_table.kept()), "run python tests/measured_table.py"
    assert measured_table.kept().count("\n") > 8, "the cross-validation is there"
