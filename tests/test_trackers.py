"""Where figures go besides the log: to trackers, and into a profile whose names are arrows."""

import collections
import glob
import gzip
import json
import sys
import types
from unittest import mock

import jax
import pytest
from shared import TABLES
from test_train import Killed, held_out, kill_at, run, stream

from llmpar.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("standard_promotion")


def fake(monkeypatch, name):
    """A package of that name, which remembers how it was called."""
    calls, module = [], types.ModuleType(name)

    def remember(what):
        return lambda *args, **more: calls.append((what, args, more)) or module

    for what in "init log finish start_run log_params log_metrics end_run SummaryWriter".split():
        setattr(module, what, remember(what))
    module.add_scalar, module.close = remember("add_scalar"), remember("close")
    monkeypatch.setitem(sys.modules, name, module)
    return calls


def rows_of(name, calls):
    """What was handed on: a row for each step."""
    if name != "tensorboard":
        return [(more["step"], args[0]) for what, args, more in calls if what in ("log", "log_metrics")]
    rows = collections.defaultdict(dict)
    for key, value, step in (args for what, args, _ in calls if what == "add_scalar"):
        rows[step, key == "eval_loss" or key == "perplexity" or key == "steps_done"][key] = value
    return [(step, row) for (step, _), row in rows.items()]


@pytest.mark.parametrize("name", TABLES["tracker_ends"])
def test_a_tracker_is_given_the_rows_of_the_log_and_closed_also_when_the_run_fails(
    name, tmp_path, monkeypatch
):
    calls = fake(monkeypatch, "tensorboardX" if name == "tensorboard" else name)
    log = tmp_path / "log.jsonl"
    more = dict(tracker=name, log=str(log), held_out=held_out(), eval_every=2, ideal_step_s=1e-6)
    run(Plan(), 2, **more)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    want = [(row["step"] if "step" in row else row["steps_done"], dict(row)) for row in rows]
    for _, row in want:
        row.pop("step", None)  # given apart
    assert rows_of(name, calls) == want and [step for step, _ in want] == [0, 1, 2]
    first = rows[0]
    assert first["tokens_per_s"] == 8 * 16 / first["seconds"] and first["mfu"] == 1e-6 / first["seconds"]
    assert first["targets"] == (stream().batch(0)["targets"] >= 0).sum()
    if name != "tensorboard":
        _, args, given = next(call for call in calls if call[0] in ("init", "log_params"))
        about = args[0] if args else given["config"]
        assert about["model"] == "small-test" and about["learning_rate"] == 3e-3 and "peak" in about["mfu"]
    with pytest.raises(Killed):
        run(Plan(), 2, **more, on_step=kill_at(0))
    ends = [[what, more] for what, _, more in calls if what in ("finish", "end_run", "close")]
    assert ends == TABLES["tracker_ends"][name]


def test_a_tracker_that_is_not_installed_or_refuses_its_settings_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    says = r"tracker 'wandb' cannot begin \(ModuleNotFoundError: .*\); pip install wandb, or use --log alone"
    with pytest.raises(ValueError, match=says):
        run(Plan(), 2, tracker="wandb")
    fake(monkeypatch, "mlflow")
    monkeypatch.setattr(sys.modules["mlflow"], "start_run", lambda: 1 / 0)
    says = r"tracker 'mlflow' cannot begin \(ZeroDivisionError: division by zero\); see to its settings, or"
    with pytest.raises(ValueError, match=says):
        run(Plan(), 2, tracker="mlflow")


def test_other_processes_than_the_first_hand_nothing_on(monkeypatch):
    calls = fake(monkeypatch, "wandb")
    from llmpar.training import trackers

    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with trackers.tracking("wandb", {}, print) as send:
        send(0, {"loss": 1.0})
    assert calls == []


@pytest.mark.parametrize("what", ["log", "finish"])
def test_a_tracker_that_fails_on_the_way_is_told_of_and_left(what, monkeypatch):
    fake(monkeypatch, "wandb")
    fails = mock.Mock(side_effect=ConnectionError("no network"))
    monkeypatch.setattr(sys.modules["wandb"], what, fails, raising=False)
    said = []
    _, report = run(Plan(), 2, tracker="wandb", tell=said.append)
    assert len(report.losses) == 2
    assert said == ["tracker 'wandb' gets no more rows: ConnectionError: no network"]


def test_a_profile_names_operations_by_their_arrows(tmp_path, monkeypatch):
    """Steps 2 and 3 of five on four devices: a layer's collectives once a device and step."""
    monkeypatch.chdir(tmp_path)
    said = []
    plan = Plan("fsdp=2 tp=2")
    _, report = run(plan, 5, profile=(2, 3), tell=said.append)
    assert len(report.losses) == 5 and said[0].endswith("or run 'xprof --logdir profile'")
    (path,) = glob.glob("profile/plugins/profile/*/*.trace.json.gz")
    assert f"the profile is {path}: open it at ui.perfetto.dev" in said[0]
    with gzip.open(path, "rt") as file:
        events = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    counts = collections.Counter(name for name in events if name.startswith("arrow["))
    for arrow in ("attention b s d +n -> stream b s d", "ffn b s d +m -> stream b s d", "attention n h d"):
        found = [n for name, n in counts.items() if name.startswith(f"arrow[{arrow}] ")]
        assert found and all(n % (4 * 2) == 0 for n in found), (arrow, counts)
    assert not [name for name in events if name.startswith(("all-", "reduce-scatter", "psum", "all_gather"))]
