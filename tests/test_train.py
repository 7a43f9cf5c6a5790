"""Training: the loss falls, the log says so, and nothing that was acknowledged is lost."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import types
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from parity import LLAMA, logits_of, state_of, weights
from shared import CASES, program_text
from steps import train

from llmpar import Plan, make_mesh
from llmpar.cli.options import StepOptions
from llmpar.cli.train import ideal_step_s
from llmpar.model.weights import weights_tree
from llmpar.plan.model_config import ExpertConfig
from llmpar.predict import hardware, memory
from llmpar.training.balance import row_orders
from llmpar.training.checkpoint import Checkpoints, checksums
from llmpar.training.data import Batches, DataConfig, read_corpus
from llmpar.training.loop import OptimizerConfig
from llmpar.training.optimizer import make_optimizer
from llmpar.training.step import State, Step

SMALL = dataclasses.replace(
    LLAMA, name="small-test", num_layers=5, width=32, num_heads=8, num_kv_heads=8, ffn_width=32
)
MIXED = Plan("fsdp=2 tp=2")
BALANCED = Plan("dp=2 sp=2", microbatches=2, sequence_order="balanced", context_parallel="gather")
PIPED = Plan("pp=2", schedule="interleaved", microbatches=2)
"""Of five layers: one of its places is empty."""
ADAMW = OptimizerConfig()
pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),  # Optax's step counters: see conftest
    # Orbax closes its event loop at the first array that cannot be read; the others' readers then complain
    # from threads.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@functools.cache
def stream(seq_len: int = 16, batch_size: int = 8) -> Batches:
    """Real text: some 100 kB of the running Python's own library, as bytes."""
    config = DataConfig(seq_len=seq_len, batch_size=batch_size, limit_bytes=100_000)
    return Batches(read_corpus(config), config)


def held_out() -> Batches:
    return Batches(stream().corpus, stream().config, "held_out")


def run(plan: Plan = MIXED, steps: int = 6, config=SMALL, folder=None, every: int = 2, options=ADAMW, **more):
    keep = Checkpoints(str(folder), every) if folder else None
    text = more.pop("text", stream())
    return train(config, plan, make_mesh(plan.mesh), text, steps, options, checkpoints=keep, **more)


def same_bits(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


class Killed(FloatingPointError):
    """What ends a run at once: a step that failed saves nothing on the way out, as a kill does."""


def kill_at(step: int):
    def on_step(number, report):
        if number == step:
            raise Killed

    return on_step


def test_the_loss_falls_on_real_text_and_the_log_says_what_happened(tmp_path):
    log, seen = tmp_path / "logs" / "run.jsonl", []
    note = lambda number, report: seen.append((number, report.losses[-1]))
    options = OptimizerConfig(learning_rate=2e-2)
    _, report = run(Plan(), 25, options=options, log=str(log), on_step=note)
    assert abs(report.losses[0] - math.log(SMALL.vocab_size)) < 0.1, "fresh weights know nothing"
    assert np.mean(report.losses[-5:]) < report.losses[0] - 1.5
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(25)) == [n for n, _ in seen]
    assert [row["loss"] for row in rows] == report.losses == [loss for _, loss in seen]
    assert [row["grad_norm"] for row in rows] == report.grad_norms and all(row["seconds"] > 0 for row in rows)
    assert report.tokens_per_step == 8 * 16 and report.start == 0
    assert report.tokens_per_s == 8 * 16 / report.step_s and report.mfu is None


@pytest.mark.long
def test_experts_are_evaluated_without_their_own_loss_and_the_log_says_how_even_their_load_is(tmp_path):
    config = dataclasses.replace(SMALL, experts=ExpertConfig(4, 2, aux_loss=0.5, capacity_factor=1.0))
    more = dict(held_out=held_out(), eval_every=2, log=str(tmp_path / "run.jsonl"))
    state, report = run(Plan(), 2, config, **more)
    loss, counted = independent_loss(config, state.params, held_out().batch(0))
    assert report.eval_losses == [(2, pytest.approx(loss / counted, rel=1e-6))]
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    for row in rows[:2]:
        assert 0 < row["drop_fraction"] < 0.5 and 1 == row["rank_imbalance"] <= row["expert_imbalance"] <= 2
        assert 0 < row["router_entropy"] <= math.log(4) + 1e-5


def log_for(rows: int):
    """A log whose disk takes so many rows."""
    left = iter(range(rows))

    def write(line: bytes) -> None:
        if next(left, None) is None:
            raise OSError(28, "No space left on device")

    return contextlib.nullcontext(types.SimpleNamespace(name="run.jsonl", write=write))


@pytest.mark.parametrize("why", [pytest.param("a full log", marks=pytest.mark.long), "a notebook's button"])
def test_every_way_out_but_a_failed_step_saves(why, tmp_path, whole, monkeypatch):
    """Not when a checkpoint is due, but where it ends; and the same bits go on."""

    def on_step(number, report):
        if number == 2 and why != "a full log":
            raise KeyboardInterrupt

    full = log_for(2 if why == "a full log" else 9)
    error = ValueError if why == "a full log" else KeyboardInterrupt
    with monkeypatch.context() as patched:
        patched.setattr("llmpar.training.loop._opened", lambda path: full)
        with pytest.raises(error, match="^$|write the log 'run.jsonl': No space left on device; free"):
            run(folder=tmp_path, every=100, on_step=on_step)
    assert Checkpoints(str(tmp_path)).latest == 4
    resumed, rest = run(folder=tmp_path, every=100)
    assert rest.start == 4 and rest.losses == whole[2].losses[4:] and same_bits(resumed, whole[1])


def test_all_devices_share_the_ideal_step(monkeypatch):
    """The useful FLOPs of a step at the peak of four H100s, and of one."""
    monkeypatch.setattr("llmpar.predict.hardware.guess", lambda kind: hardware.chip("h100"))
    step = StepOptions(batch_size=8, seq_len=16)
    many, one = (ideal_step_s(SMALL, step, make_mesh(plan.mesh)) for plan in (MIXED, Plan()))
    useful = sum(memory.flops(SMALL, 8, 16).values())
    assert one == 4 * many and math.isclose(one * hardware.chip("h100").flops_per_s, useful)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six steps that nothing interrupted, with checkpoints of steps 2, 4 and 6 (of which two are kept)."""
    folder = tmp_path_factory.mktemp("whole")
    with jax.numpy_dtype_promotion("standard"):
        state, report = run(folder=folder)
    yield folder, state, report
    gc.collect()  # what readers of damaged arrays complain of is ignored in this file's tests alone


def test_a_killed_run_resumes_to_the_bit(tmp_path, whole):
    """Killed in the report of step 5, after the checkpoint of step 4: the same losses and final state."""
    _, state, report = whole
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 0}\n{"st')  # torn by another kill
    with pytest.raises(Killed):
        run(folder=tmp_path, on_step=kill_at(4), log=str(log))
    assert Checkpoints(str(tmp_path)).latest == 4
    resumed, rest = run(folder=tmp_path, log=str(log))
    first, torn, *lines = log.read_text().splitlines()
    assert (first, torn) == ('{"step": 0}', '{"st')
    rows = [json.loads(line) for line in lines]
    assert [(row["step"], row.get("resumed")) for row in rows][4:] == [(4, None), (4, 4), (5, None)]
    assert rest.start == 4 and rest.losses == report.losses[4:] and rest.grad_norms == report.grad_norms[4:]
    assert same_bits(resumed, state) and int(resumed.step) == 6
    again, nothing = run(folder=tmp_path)
    assert nothing.start == 6 and nothing.losses == [] and same_bits(again, state)


@pytest.mark.parametrize(
    "plan", [BALANCED, pytest.param(PIPED, marks=pytest.mark.long)], ids=lambda p: str(p.mesh)
)
def test_a_run_resumes_on_another_mesh(tmp_path, whole, plan):
    """1e-4: two steps of float32 rounding in another order of summing; 1e-5 is seen."""
    folder, state, report = whole
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "6")
    order = functools.partial(row_orders, plan.sequence_order, n=plan.mesh.sp)
    text = Batches(stream().corpus, stream().config, order=order)
    resumed, rest = run(plan, folder=tmp_path / "copy", text=text)
    assert rest.start == 4 and rest.losses != []
    np.testing.assert_allclose(rest.losses, report.losses[4:], rtol=0, atol=1e-4)
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(state), strict=True):
        assert a.sharding.mesh.size == plan.mesh.size
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


@pytest.mark.long
def test_a_checkpoint_restores_onto_meshes_with_and_without_copies_of_kv_heads(tmp_path):
    config = dataclasses.replace(LLAMA, num_heads=8, num_kv_heads=2)
    many, few = (Step(config, Plan(m), make_mesh(m), optax.adamw(1e-3)) for m in ("tp=8", "fsdp=2 tp=2"))
    state = state_of(many)
    Checkpoints(str(tmp_path)).save(1, state, config)
    found = Checkpoints(str(tmp_path)).restore(few.abstract_state, config)
    assert same_bits(found, state) and jax.tree.map(lambda x: x.sharding, found) == few.shardings


def scored(folder, losses, of="x", every=2):
    """Save a tiny state for each held-out loss, by step; give the steps that stay, and the best."""
    keep = Checkpoints(str(folder), every)
    with keep.writing():
        for step, loss in losses.items():
            score = None if loss is None else {"loss": loss, "of": of}
            params = {"norm": {"scale": np.full(SMALL.width, step, np.float32)}}
            keep.save(step, State(params, {}, np.int32(step)), SMALL, {}, score)
    again = Checkpoints(str(folder))  # what another process sees
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()), again.best()


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path):
    """By its loss, of those evaluated alike, whoever looks; one that is no number is not the best."""
    cases = [
        ({1: 3.0, 2: 2.0, 3: 2.5, 4: 2.6, 5: 2.7}, ([2, 4, 5], 2)),
        ({1: 3.0, 2: None, 3: None, 4: None}, ([1, 3, 4], 1)),
        ({1: math.nan, 2: 5.0, 3: math.inf, 4: None}, ([2, 3, 4], 2)),
        ({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}, ([1, 3, 4], 1)),
        ({1: None, 2: None, 3: None}, ([2, 3], None)),
    ]
    for n, (losses, want) in enumerate(cases):
        assert scored(tmp_path / str(n), losses) == want
    assert scored(tmp_path / "0", {6: 9.0, 7: 9.5}, of="other text") == ([6, 7], 6)
    (tmp_path / "1" / "1" / "about" / "metadata").write_text("{")
    assert Checkpoints(str(tmp_path / "1")).best() is None
    with pytest.raises(ValueError, match="none of the checkpoints in .* was evaluated, so none is the best"):
        Checkpoints(str(tmp_path / "1"), take_best=True).about()
    best = Checkpoints(str(tmp_path / "2"), take_best=True)
    assert best.chosen == 2 and best.latest == 4 and best.about()["score"]["loss"] == 5.0
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    found = best.params({"norm": {"scale": place}}, SMALL)
    assert found["norm"]["scale"].tolist() == [2.0] * SMALL.width


def test_no_checkpoint_goes_while_it_cannot_be_read_which_is_the_best(tmp_path, monkeypatch):
    scored(tmp_path, {1: 1.0, 2: 2.0})
    refused = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    keep, params = Checkpoints(str(tmp_path)), {"norm": {"scale": np.ones(SMALL.width, np.float32)}}
    with keep.writing(), monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.read_text", refused)
        keep.save(3, State(params, {}, np.int32(3)), SMALL)
    assert scored(tmp_path, {4: 3.0}) == ([1, 3, 4], 1)


@pytest.mark.long
def test_an_evaluation_that_is_the_best_so_far_is_kept_also_by_a_run_that_was_killed(tmp_path):
    """At a rate that ruins what was learned, and between the steps at which a checkpoint is due."""
    wild = OptimizerConfig("sgd", learning_rate=2.0, warmup=9, decay="constant")
    more = dict(plan=Plan(), held_out=held_out(), eval_every=1, options=wild, every=4, steps=9)
    _, report = run(folder=tmp_path / "whole", **more)
    best, lowest = min(report.eval_losses, key=lambda x: x[1])
    assert best not in (4, 8, 9) and report.eval_losses[-1][1] > lowest + 0.1
    assert report.perplexity == pytest.approx(math.exp(report.eval_losses[-1][1]))
    for folder, stop in [("whole", None), *((f"killed {n}", n) for n in (best - 1, best))]:
        if stop is not None:
            with pytest.raises(Killed):
                run(folder=tmp_path / folder, **more, on_step=kill_at(stop))
            run(folder=tmp_path / folder, **more)
        keep = Checkpoints(str(tmp_path / folder), take_best=True)
        assert keep.chosen == best and sorted(keep._manager.all_steps()) == [best, 8, 9]
        assert keep.about()["score"]["loss"] == lowest


def files(folder):
    """The files that hold arrays. (Some are leftovers of writing, which nobody reads: so all are damaged.)"""
    return [f for f in (folder / "6" / "state").rglob("d/*") if f.is_file() and f.stat().st_size > 10_000]


def each_file(change):
    return lambda folder: [file.write_bytes(change(file.read_bytes())) for file in files(folder)]


def description(folder):
    return folder / "6" / "about" / "metadata"


def change_a_sum(folder):
    about = json.loads(description(folder).read_text())
    about["checksums"]["['params']['head']"] += 1
    description(folder).write_text(json.dumps(about))


DAMAGE = {
    "truncated": each_file(lambda x: x[: len(x) // 2]),
    "a bit": each_file(lambda x: x[: len(x) // 2] + bytes([x[len(x) // 2] ^ 4]) + x[len(x) // 2 + 1 :]),
    "a sum": change_a_sum,
    "no state": lambda folder: shutil.rmtree(folder / "6" / "state"),
    "no description": lambda folder: shutil.rmtree(folder / "6" / "about"),
    "half a description": lambda folder: description(folder).write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_in_one_sentence_and_the_advice_works(tmp_path, whole, damage):
    folder, state, report = whole
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    DAMAGE[damage](copy)
    sentence = "['params']['head'] is not what was written" if damage == "a sum" else ""
    begin = "the checkpoint of step 6 in .*copy cannot be used: "
    with pytest.raises(ValueError, match=begin + re.escape(sentence)) as caught:
        run(folder=copy)
    assert "\n" not in str(caught.value) and "delete the folder 6" in str(caught.value)
    if damage == "truncated":
        shutil.rmtree(copy / "6")
        resumed, rest = run(folder=copy)
        assert rest.start == 4 and same_bits(resumed, state)


def test_a_checksum_is_of_every_bit(whole):
    state, head = whole[1], np.array(whole[1].params["head"])
    head[0, 0] = np.nextafter(head[0, 0], np.float32(9))
    sums, changed = checksums(state), checksums(state._replace(params=state.params | {"head": head}))
    assert [name for name in sums if changed[name] != sums[name]] == ["['params']['head']"]


MACHINE = [
    PermissionError(13, "Permission denied"),
    ValueError("Error opening zarr: Too many open files"),
    OSError(5, "Input/output error"),
]


@pytest.mark.parametrize("error", MACHINE, ids=str)
def test_what_a_machine_refuses_is_no_damage(whole, monkeypatch, error):
    """The advice never is to delete what is good."""
    keep = Checkpoints(str(whole[0]))
    made = RuntimeError("Individual parameter subdirectory not found")
    made.__cause__ = error
    monkeypatch.setattr(keep._manager, "restore", mock.Mock(side_effect=made))
    with pytest.raises(ValueError, match="step 6 in .* cannot be read now: .*run the same command") as caught:
        keep.about()
    assert "delete" not in str(caught.value) and "damaged" not in str(caught.value)


def test_a_reader_beside_a_training_takes_the_newest_and_keeps_it_there(tmp_path):
    """The first that it chose was taken away; the one that it reads is not, and no other is read later."""
    scored(tmp_path, {1: None, 2: None})
    reader = Checkpoints(str(tmp_path))
    assert reader.latest == 2
    scored(tmp_path, {3: None, 4: None, 5: None})
    assert reader.about()["config"] == SMALL and reader.chosen == 5
    assert scored(tmp_path, {6: None, 7: None, 8: None})[0] == [5, 7, 8]
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for _ in range(2):
        assert reader.params({"norm": {"scale": place}}, SMALL)["norm"]["scale"][0] == 5
    del reader
    assert scored(tmp_path, {9: None})[0] == [8, 9]
    gone = Checkpoints(str(tmp_path))
    assert gone.about() and gone.chosen == 9
    shutil.rmtree(tmp_path / "9")
    with pytest.raises(ValueError, match="step 9 in .* cannot be read now: it was taken away meanwhile"):
        gone.params({"norm": {"scale": place}}, SMALL)


def test_another_optimizers_state_is_refused(whole):
    """The advice never is to delete what is good."""
    sgd = Step(SMALL, Plan(), make_mesh("dp=1"), optax.sgd(1e-3)).abstract_in_model_order
    with pytest.raises(ValueError, match="holds another optimizer's state .*; give") as caught:
        Checkpoints(str(whole[0])).restore(sgd, SMALL)
    assert "\n" not in str(caught.value)


def other_text(**changes) -> Batches:
    config = dataclasses.replace(stream().config, **changes)
    return Batches(read_corpus(config), config)


WITH = r"was made with {} .*\(asked: .*\); ask for that, .*--anyway"
SGD = dict(options=OptimizerConfig("sgd"))
NO_SGD = r"was made with optimizer adamw \(asked: sgd\); ask .* or give another folder$"
OTHERS = {
    "data": (dict(text=dict(limit_bytes=90_000)), WITH.format("data")),
    "two": (dict(seed=7, text=dict(batch_size=16)), r"seed 0 \(asked: 7\), .*batch_size 8 \(asked: 16\)"),
    "optimizer": (SGD, NO_SGD),
    "optimizer, anyway": (SGD | dict(anyway=True), NO_SGD),
    "unknown": (dict(about={"made": {}}), r"with data None .*optimizer None \(asked: adamw\)"),
    "model": (
        dict(config=dataclasses.replace(SMALL, ffn_width=64)),
        r"is of another model: it has .*ffn_width 32 \(asked: 64\); give that model, or another folder",
    ),
}


def described(whole, folder, change):
    """A copy of the checkpoint of step 6 with another description."""
    shutil.copytree(whole[0] / "6", folder / "6")
    about = json.loads(description(folder).read_text())
    change(about)
    description(folder).write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize("change, sentence", OTHERS.values(), ids=OTHERS)
def test_another_run_does_not_go_on_from_a_checkpoint_without_a_word(whole, tmp_path, change, sentence):
    change = change | ({"text": other_text(**change["text"])} if "text" in change else {})
    folder = described(whole, tmp_path, lambda about: about.update(change.pop("about", {})))
    with pytest.raises(ValueError, match=sentence) as caught:
        run(folder=folder, **change)
    assert "\n" not in str(caught.value)


SLOW = OptimizerConfig(learning_rate=1e-4)
CURVES = {
    "steps 6 (asked: 5), learning_rate 0.003 (asked: 0.0001)": dict(steps=5, options=SLOW),
    "dtype float32 (asked: bfloat16)": dict(plan=dataclasses.replace(MIXED, dtype="bfloat16")),
    "reduce_dtype same (asked: bfloat16)": dict(plan=dataclasses.replace(MIXED, reduce_dtype="bfloat16")),
    "dtype None (asked: float32), flavour float32 (asked: None)": {},  # known to one alone
    "seed 0 (asked: 7)": dict(seed=7, anyway=True),
}


@pytest.mark.parametrize("had", CURVES)
def test_what_makes_another_curve_or_run_that_is_asked_for_goes_on_and_is_said(whole, tmp_path, had):
    rename = lambda made: made.update(flavour=made.pop("dtype")) if "flavour" in had else None
    messages, folder = [], described(whole, tmp_path, lambda about: rename(about["made"]))
    resumed, report = run(folder=folder, tell=messages.append, **CURVES[had])
    assert same_bits(resumed, whole[1]) and report.start == 6 and report.losses == []
    assert messages == [
        f"from step 6 on this is another {'run' if 'seed' in had else 'curve'} than was begun: it had {had}",
        "goes on from the checkpoint of step 6; nothing is left to do",
    ]


@pytest.mark.parametrize("change, said", CASES["descriptions_refused"])
def test_a_description_that_cannot_be_read_is_refused_whoever_reads_it(whole, tmp_path, change, said):
    part, name, *value = json.loads(change)

    def changed(about):
        there = about if part is None else about[part]
        there.pop(name, None)
        there.update(zip([name], value, strict=False))

    keep = Checkpoints(str(described(whole, tmp_path, changed)))
    restore = lambda: keep.restore(State(None, None, None), SMALL)
    for read in (keep.about, restore, lambda: keep.params(None, SMALL)):
        with pytest.raises(ValueError, match=f"the checkpoint of step 6 in .*{said}") as caught:
            read()
        assert "\n" not in str(caught.value)


MOVED = {
    "renamed": lambda folder: os.rename(folder, folder.with_name("elsewhere")),
    "unlocked": lambda folder: (folder / "lock").unlink(),
}


@pytest.mark.parametrize("move", MOVED)
def test_a_folder_that_is_no_longer_the_one_that_was_locked_gets_nothing(tmp_path, move, whole):
    """Another training may have it by now. The last state is kept beside it, and it is said where."""
    folder = tmp_path / "kept"

    def on_step(number, report):
        if number == 2:
            MOVED[move](folder)

    with pytest.raises(ValueError, match="is not the folder that this training began with: ") as caught:
        run(folder=folder, on_step=on_step)
    aside = tmp_path / f"kept-4-{os.getpid()}"
    assert f"step 4 is kept in {aside}" in str(caught.value)
    left = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    assert left == (["2"] if move == "unlocked" else [])
    resumed, rest = run(folder=aside)
    assert rest.start == 4 and same_bits(resumed, whole[1])


def test_the_lock_of_a_killed_process_is_no_lock(tmp_path):
    """And what it left half written goes."""
    command = [sys.executable, "-c", program_text("locks"), str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        keep = Checkpoints(str(tmp_path))
        with pytest.raises(ValueError, match="process 1 on x is writing checkpoints to .*; wait for it"):
            run(folder=tmp_path)
        process.kill()
    (tmp_path / "4.orbax-checkpoint-tmp").mkdir()
    assert keep.latest is None
    with keep.writing():
        assert [p.name for p in tmp_path.iterdir()] == ["lock"]


def test_folders_that_can_take_no_checkpoint_are_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="cannot write checkpoints to .*: Not a directory; give a folder"):
        run(folder=tmp_path / "file" / "x")
    assert Checkpoints(str(tmp_path / "none")).latest is None
    assert not (tmp_path / "none").exists(), "looking makes nothing"


def test_a_full_disk_is_called_that_and_the_checkpoint_before_is_intact(whole, tmp_path, monkeypatch):
    shutil.copytree(whole[0], tmp_path / "copy")
    keep = Checkpoints(str(tmp_path / "copy"))
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(keep._manager, "save", mock.Mock(side_effect=full))
    sentence = r"the checkpoint of step 8 could not be .*step 6 is intact\): the disk is full; free"
    with pytest.raises(ValueError, match=sentence):
        keep.save(8, whole[1], SMALL)


def test_a_run_that_is_asked_to_stop_finishes_its_step_saves_and_goes_on_later(tmp_path, whole):
    """Evaluating on the way changes no loss."""
    _, state, report = whole
    seen, log = [], tmp_path / "log.jsonl"
    more = dict(held_out=held_out(), eval_every=2, eval_batches=2)
    more |= dict(folder=tmp_path / "kept", every=100, log=str(log))
    _, first = run(**more, on_step=lambda n, r: seen.append(n), stop=lambda: 2 in seen)
    assert first.losses == report.losses[:4], "one step was under way"
    assert Checkpoints(str(tmp_path / "kept")).latest == 4
    resumed, second = run(**more)
    assert second.start == 4 and first.losses + second.losses == report.losses and same_bits(resumed, state)
    evaluated = first.eval_losses + second.eval_losses
    assert [n for n, _ in evaluated] == [2, 4, 6]
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(row["steps_done"], row["eval_loss"]) for row in rows if "eval_loss" in row] == evaluated
    found = [independent_loss(SMALL, state.params, held_out().batch(i)) for i in range(2)]
    assert abs(evaluated[-1][1] - sum(loss for loss, _ in found) / sum(n for _, n in found)) < 1e-5


def independent_loss(config, params, batch) -> tuple[float, int]:
    """Cross-entropy from the gathered logits of one device, in float64; and the number of targets."""
    logits = np.asarray(logits_of(config)(jax.device_get(params), batch), np.float64)
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    picked = np.take_along_axis(logits, np.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    counts = batch["targets"] >= 0
    return float((log_z - picked)[counts].sum()), int(counts.sum())


@pytest.mark.parametrize("plan", [PIPED, Plan("fsdp=2 tp=2", tp_sequence=True, mode="explicit")])
def test_evaluation_is_the_cross_entropy_whatever_the_plan(plan):
    """Others are evaluated where they train."""
    step, batch = Step(SMALL, plan, make_mesh(plan.mesh), optax.sgd(1e-3)), stream().batch(3)
    there = jax.tree.map(lambda x: x.sharding, step.abstract_in_model_order.params)
    params = jax.device_put(weights(SMALL), there)
    loss, tokens = step.evaluate(params, jax.device_put(batch, step.batch_sharding))
    want, counted = independent_loss(SMALL, weights(SMALL), batch)
    assert int(tokens) == counted and abs(float(loss) / want - 1) < 1e-6  # float32 sums of some 100 losses


def test_a_held_out_part_without_an_answer_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "aaa bbb ccc", "answer": "abc"}\n' * 90)
    config = DataConfig((str(tmp_path / "x.jsonl"),), seq_len=16, batch_size=1, held_out=4)
    corpus = read_corpus(config)
    begin, counted = Batches(corpus, config, "held_out")._bounds[0], corpus.counted.copy()
    counted[begin : begin + 33] = False  # two rows
    evaluated = Batches(dataclasses.replace(corpus, counted=counted), config, "held_out")
    with pytest.raises(ValueError, match="no answer is in the first 2 held-out batches; use"):
        run(text=Batches(corpus, config), held_out=evaluated, eval_every=1, eval_batches=2, plan=Plan())


def test_a_loss_that_is_not_finite_stops_and_names_the_step_and_the_intact_checkpoint(tmp_path):
    """The update of step 1 overflows the loss of step 2; a checkpoint that holds those weights is dropped."""
    wild = OptimizerConfig("sgd", learning_rate=1e30, warmup=1)
    none = "the loss of step 2 is (nan|inf).*: stopped; no checkpoint was taken; try a lower"
    for more in {"folder": tmp_path, "every": 2}, {}:
        with pytest.raises(FloatingPointError, match=none):
            run(Plan(), options=wild, **more)
    assert Checkpoints(str(tmp_path)).latest is None
    kept = "the loss of step 2 is .* the checkpoint of step 1 is intact; try a lower learning"
    with pytest.raises(FloatingPointError, match=kept):
        run(Plan(), options=wild, folder=tmp_path, every=1)
    assert Checkpoints(str(tmp_path)).latest == 1


def rates(steps, warmup, count, decay="cosine"):
    """A schedule's first rates, at most 0.5: the updates of plain descent on constant gradients."""
    options = OptimizerConfig("sgd", learning_rate=0.5, warmup=warmup, decay=decay)
    optimizer = make_optimizer(options, steps, SMALL)
    state, found, trace = optimizer.init(np.float32(0)), [], 0.0
    for _ in range(count):
        trace = 0.9 * trace + 1.0
        update, state = optimizer.update(np.float32(1), state, np.float32(0))
        found.append(-float(update) / trace)
    return found


def test_short_runs_reach_the_full_rate_and_no_more():
    """However long the warm-up that was asked for: it ends with the run."""
    for steps, warmup in itertools.product((0, 1, 2, 10), (0, 1, 10, 100)):
        found = rates(steps, warmup, max(steps, 1))
        assert min(found) >= 0 and max(found) == pytest.approx(0.5, rel=1e-5)
        assert (found[0] == 0) == (steps > 1 and warmup > 0)


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_the_rate_may_fall_along_a_line_or_stay(decay):
    """After the same warm-up; at the end, as a cosine, at a tenth."""
    found, line = rates(20, 4, 21, decay), np.linspace(0, 1, 17)
    np.testing.assert_allclose(found[:5], [0, 0.125, 0.25, 0.375, 0.5], atol=1e-6)
    fallen = {"cosine": (1 - np.cos(np.pi * line)) / 2, "linear": line, "constant": 0 * line}[decay]
    np.testing.assert_allclose(found[4:], 0.5 - 0.45 * fallen, atol=1e-6)


def test_weight_decay_is_for_matrices():
    """With zero gradients AdamW's update is its decay."""
    params = weights_tree(SMALL, lambda _: np.ones(1, np.float32))
    options = OptimizerConfig(learning_rate=1.0, warmup=0, weight_decay=0.5)
    optimizer = make_optimizer(options, 5, SMALL)
    updates, _ = optimizer.update(jax.tree.map(np.zeros_like, params), optimizer.init(params), params)
    decayed = {path: float(u[0]) for path, u in flatten_dict(updates, sep=".").items()}
    norms = {"norm.scale", "blocks.attention_norm.scale", "blocks.ffn_norm.scale"}
    assert decayed == {path: 0 if path in norms else -0.5 for path in decayed}
