"""The command line: documents that are a contract, exit statuses, and refusals before any work."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from shared import TABLES, program_text
from steps import SHARED

import llmpar.cli.demo
import llmpar.inspect.report
import llmpar.training.loop
from llmpar.cli.commands import COMMANDS, GROUPS, parse
from llmpar.cli.models import Models
from llmpar.cli.options import start_jax
from llmpar.cli.train import Stopper, progress
from llmpar.plan.model_config import OptimizerConfig
from llmpar.plan.plan import Plan
from llmpar.plan.presets import PRESETS
from llmpar.predict.parameters import notes_on
from llmpar.training.data import DataConfig

CARD = {"model_type": "llama", "vocab_size": 264, "num_hidden_layers": 1, "rms_norm_eps": 1e-5}
CARD |= {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.fixture(autouse=True)
def _shared_steps(monkeypatch):
    for name, made in SHARED.items():
        monkeypatch.setattr(llmpar.training.loop, name, made)


@pytest.mark.parametrize("process", [0, 1])
def test_only_the_first_of_several_processes_prints_and_draws(call, tmp_path, monkeypatch, process):
    """But every process says why it ended. (No cluster here: JAX is made to say that this is process 1.)"""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    report = llmpar.training.loop.Report(losses=[2.0, 1.0])
    monkeypatch.setattr(llmpar.training.loop, "train", lambda *_, **__: (None, report))
    (tmp_path / "text").write_text("abc " * 1000)
    plot = tmp_path / "loss.svg"
    status, out, err = call("train", "--data", str(tmp_path / "text"), "--plot", str(plot), "--json")
    assert (status, plot.exists(), bool(out), "loss 2.0000" in err) == (0, *[process == 0] * 3)
    assert process == 0 or err == ""
    status, out, err = call("train", "--mesh", "dp=3")
    assert status == 1 and not out and err.count("llmpar: ") == 1
    picture, folder = tmp_path / "table.svg", tmp_path / "demo"
    for words in (["doctor"], ["models"], ["schedule", "1f1b", "--svg", str(picture)]):
        for more in [], ["--json"]:
            status, out, err = call(*words, *more)
            assert status == 0 and bool(out) == (process == 0), (words, out)
            assert process == 0 or not err
    assert picture.exists() == (process == 0)
    for command in (llmpar.cli.demo.Train, llmpar.cli.demo.Inspect):
        monkeypatch.setattr(command, "run", lambda _: {"losses": [5.0, 1.0], "collectives": []})
    for kind in ("svg", "png"):  # what is there is its own, and may be drawn anew
        monkeypatch.setattr("llmpar.cli.demo.installed", lambda _, kind=kind: kind == "png")
        for _ in range(2):
            status, out, err = call("demo", "--out", str(folder / kind), "--json")
            assert status == 0 and bool(out) == bool(err) == (process == 0)
        names = [path.name for path in sorted((folder / kind).iterdir())]
        assert names == [f"loss.{kind}", f"mesh.{kind}"] * (process == 0)


def test_weights_that_lie_beside_a_configuration_are_not_taken_and_that_is_said(call, tmp_path, monkeypatch):
    report = llmpar.training.loop.Report(losses=[2.0])
    monkeypatch.setattr(llmpar.training.loop, "train", lambda *_, **__: (None, report))
    (tmp_path / "text").write_text("abc " * 1000)
    (tmp_path / "config.json").write_text(json.dumps(CARD))
    for has_weights in False, True:
        for model in (tmp_path, tmp_path / "config.json"):
            status, _, err = call("train", "--data", str(tmp_path / "text"), "--model", str(model))
            assert status == 0 and ("to load those in " in err) == has_weights, err
        (tmp_path / "model.safetensors").write_text("")


@pytest.fixture
def model(tmp_path):
    def model(**changes) -> str:
        folder = tmp_path / ("-".join(f"{k}{v}" for k, v in changes.items()) or "little")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CARD | changes))
        return str(folder / "config.json")

    return model


def run(*words: str, code: str = "", at: Path | None = None, **variables: str) -> subprocess.CompletedProcess:
    """Run the command, or code, in a process of its own, in the folder ``at``."""
    command = [sys.executable, *(("-c", code) if code else ("-m", "llmpar")), *words]
    environment = {k: v for k, v in (os.environ | variables).items() if v or k not in variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=at)


def test_models_lists_every_preset_and_describes_one_by_name_or_path(document, call, model):
    assert [m["params"] for m in document("models", "qwen3-0.6b")["models"]] == [596_049_920]
    [little] = document("models", model())["models"]
    assert little["name"] == "little" and little["num_layers"] == 1 and little["vocab_size"] == 264
    models = document("models")["models"]
    assert [m["name"] for m in models] == list(PRESETS)
    assert all((m["active_params"] < m["params"]) == bool(m["experts"]) for m in models)
    assert [bool(m["notes"]) for m in models] == [bool(notes_on(PRESETS[m["name"]])) for m in models]
    status, out, _ = call("models")
    makers = {m["maker"] for m in models}
    assert status == 0 and len(out.splitlines()) == len(PRESETS) + len(makers)
    assert out.count(", planned") == sum(not config.runs for config in PRESETS.values())


def test_schedule_document(document):
    """GPipe on p=4, m=8 with equal costs: idle 2(p-1) of 2(m+p-1) slots, bubble over ideal (p-1)/m."""
    found = document("schedule", "gpipe", "--stages", "4", "--microbatches", "8", "--costs", "1,1,0")
    assert set("makespan_lockstep bubble_over_ideal bubble_rate table".split()) <= found.keys()
    assert found["makespan"] == 22 and abs(found["bubble_over_ideal"] - 3 / 8) < 1e-9
    assert abs(found["bubble_fraction"] - 3 / 11) < 1e-9 and len(found["peak_live"]) == 4


def test_doctor_says_what_is_here_and_the_extra_of_what_is_missing(document, call, monkeypatch):
    found = document("doctor")
    assert found["simulated"] is True
    assert (found["devices"], found["platform"], found["hosts"]) == (8, "cpu", 1)
    assert found["versions"]["jax"] == jax.__version__ and found["jax_backend"] == "cpu"
    status, out, _ = call("doctor")
    assert status == 0 and "8 simulated CPU devices on 1 host" in out
    assert found["links"]["fsdp=-1"]["fsdp"]["link"] == "simulated: shared memory" and found["flags"] == []
    for name, extra in found["missing"].items():
        assert f"{name} is missing: pip install 'llmpar[{extra}]'" in out
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    extras = {"lab": "jupyterlab ipywidgets anywidget matplotlib cloudpickle", "serve": "starlette uvicorn"}
    extras |= {"hf": "tokenizers safetensors jinja2"}
    wanted = {name: extra for extra, names in extras.items() for name in names.split()}
    assert document("doctor")["missing"] == wanted


TINY_STEP = ("--batch-size", "8", "--seq-len", "16")
EIGHT = ("--mesh", "dp=2 fsdp=2 tp=2")


def test_train_document_log_plot_and_resumption(call, document, model, tmp_path):
    log, plot, text = tmp_path / "log.jsonl", tmp_path / "loss.svg", tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 200)
    words = f"train --model {model()} --steps 4 --data {text} --every 3 --checkpoints {tmp_path}/kept".split()
    words += [*EIGHT, *TINY_STEP, "--log", str(log), "--plot", str(plot)]
    status, out, err = call(*words, "--json")
    assert status == 0 and out.count("\n") == 1, err
    assert "\ncompiling …\n" in err and "step 4/4: loss " in err
    found = json.loads(out)
    assert found["mesh"] == {"pp": 1, "dp": 2, "fsdp": 2, "ep": 1, "sp": 1, "tp": 2}
    assert len(found["losses"]) == 4 == len(found["grad_norms"])
    assert found["devices"] == 8 and found["params"] == 2 * 264 * 32 + 4 * 32 * 32 + 3 * 32 * 32 + 3 * 32
    assert found["tokens_per_s"] > 0 and found["step_s"] > 0 and found["start"] == 0 and found["mfu"] is None
    assert [json.loads(line)["loss"] for line in log.read_text().splitlines()] == found["losses"]
    assert "<svg" in plot.read_text()
    status, out, _ = call(*words[:-2])  # people get words, on stderr
    assert (status, out) == (0, "")
    done = document(*words[:-2])
    assert done["start"] == 4 and done["losses"] == [] and done["tokens_per_s"] is None is done["step_s"]


def test_inspect_document(without_lab):
    """Of a process of its own: here a type checker stands between the model's lines and what they call."""
    found = without_lab[2]
    rows = found["collectives"]
    pairs = {(row["axis"], row["kind"]) for row in rows}
    assert {("fsdp", "all-gather"), ("fsdp", "reduce-scatter"), ("tp", "all-reduce")} <= pairs
    for row in rows:
        assert row["predicted_bytes"] == row["compiled_bytes"] > 0 and row["source"] and row["arrow"]
    arrows = found["arrows"]
    assert all(row["arrow"] and row["as_predicted"] for row in arrows)
    for row in rows:
        parts = [r for r in arrows if (r["axis"], r["kind"]) == (row["axis"], row["kind"])]
        assert sum(r["bytes_sent"] for r in parts) == row["compiled_bytes"]
        assert sum(r["count"] for r in parts) == row["count"]
    memory = found["memory"]
    assert memory["predicted_argument_bytes"] == memory["compiled_argument_bytes"] > 0
    assert memory["predicted_temp_bytes"] > 0 < memory["compiled_temp_bytes"]
    assert found["flops"]["executed_per_device"] > found["flops"]["predicted_per_device"] > 0


@pytest.mark.long
def test_inspect_prints_types_beside_layouts_and_how_far_meshes_may_be_apart(call, model):
    small = ["inspect", "--model", model(), "--mesh_dim", "2,1,1,1", *TINY_STEP, "--types", "--tolerance"]
    status, out, err = call(*small, "--json", "--mode", "explicit")
    assert status == 0, err
    found = json.loads(out)
    assert found["mode"] == "explicit" and all(r["layout"] == r["type_says"] for r in found["types"])
    assert 0 < found["tolerance"]["bound"]["loss"] < found["tolerance"]["bound"]["gradient"] < 1e-4
    keys = {"name", "by", "unit", "length", "loss", "grad_norm", "gradient"}
    assert keys == found["tolerance"]["terms"][0].keys()
    status, out, _ = call(*small, "--mode", "auto")  # types are those of the explicit one all the same
    words = "bytes sent per device and step|type says|auto mode|arguments|spread between two meshes"
    assert status == 0 and all(word in " ".join(out.split()) for word in words.split("|"))


def test_a_process_has_the_same_statuses_and_needs_no_jax_for_what_computes_nothing():
    code = "import sys; from llmpar.cli import main\n"
    code += "one, two = main(['--version']), main(['models', 'llama9'])\n"
    done = run(code=f"{code}sys.exit(10 * two + one + 100 * ('jax' in sys.modules))")
    assert done.returncode == 10 and done.stdout.startswith("llmpar 0.") and done.stderr.count("\n") == 1
    assert done.stderr.startswith("llmpar: unknown model 'llama9'")
    bad = run("models", "a", "b")
    assert (bad.returncode, bad.stdout) == (2, "") and "Traceback" not in bad.stderr


def test_every_field_of_a_plan_an_optimizer_and_a_text_is_a_flag_with_its_default():
    for kind, given in [(Plan, "step.plan"), (OptimizerConfig, "optimizer"), (DataConfig, "text")]:
        filled = functools.reduce(getattr, given.split("."), parse(["train"]))
        own = {"mesh", "seq_len", "batch_size", "seed"}  # the command's: they serve more than one of these
        fields = {f.name: f.default for f in dataclasses.fields(kind) if f.name not in own}
        assert vars(filled) == fields and len(fields) >= 5
    words = ("--zero", "1", "--no-reshard-after-forward", "--attention_block", "8", "--schedule", "gpipe")
    plan = parse(["inspect", *words]).step.plan
    found = plan.zero, plan.reshard_after_forward, plan.attention_block, plan.schedule
    assert found == (1, False, 8, "gpipe")


@pytest.mark.long
def test_jax_that_has_started_already_is_refused_and_the_advice_works():
    code = "import sys, jax; jax.devices(); from llmpar.cli import main; sys.exit(main(['doctor', '--json']))"
    late = run(code=code, XLA_FLAGS="", JAX_NUM_CPU_DEVICES="")
    assert (late.returncode, late.stdout) == (1, "")
    assert "llmpar: 8 simulated devices were asked for but JAX has started with 1" in late.stderr
    assert "Traceback" not in late.stderr
    name, _, flag = late.stderr.strip().rpartition("or set ")[2].partition("=")
    heeded = run(code=code, **{name: flag})
    assert heeded.returncode == 0 and json.loads(heeded.stdout)["devices"] == 8


class Odd(RuntimeError):
    pass


FAULT, SHOWN = "llmpar: this is a fault of llmpar, at ", "; LLMPAR_TRACEBACK=1 shows the stack\n"
FULL = r"llmpar: the memory of a device is full \(.*\); use a smaller model .*\n"
FAULTS = [
    (KeyError("x"), 1, rf"{FAULT}cli/__init__.py:\d+: KeyError: 'x'{SHOWN}"),
    (json.JSONDecodeError("no refusal", "", 0), 1, f"{FAULT}.*: JSONDecodeError.*{SHOWN}"),
    (Odd("first\nsecond"), 1, f"{FAULT}.*: Odd: first{SHOWN}"),
    (RuntimeError("RESOURCE_EXHAUSTED: 9 GiB"), 1, FULL),
    (FloatingPointError("the loss is nan; try it"), 1, r"llmpar: the loss is nan; try it\n"),
    (MemoryError(), 1, r"llmpar: the memory of this machine is full; use a smaller model, batch or text\n"),
    (KeyboardInterrupt(), 130, r"llmpar: interrupted\n"),
    (BrokenPipeError(32, "Broken pipe"), 141, ""),
    (OSError(28, "No space left on device"), 1, r"llmpar: No space left on device\n"),
    (FileExistsError(17, "File exists", "demo"), 1, r"llmpar: File exists: 'demo'\n"),
]


@pytest.mark.parametrize(
    "error, status, sentence", FAULTS, ids=lambda x: type(x).__name__ if isinstance(x, BaseException) else ""
)
def test_whatever_happens_is_a_status_and_at_most_one_line(call, monkeypatch, error, status, sentence):
    monkeypatch.setattr(Models, "run", lambda self: (_ for _ in ()).throw(error))
    found, out, err = call("models")
    assert found == status and out == "" and re.fullmatch(sentence, err), err


def test_those_that_wait_for_this_process_hear_why_it_does_not_come(call, monkeypatch):
    from llmpar.launch import joined

    heard = []
    monkeypatch.setattr(joined, "decline", lambda environ, sentence: heard.append(sentence))
    assert call("train", "--stepz", "1")[0] == 2 and call("models", "llama9")[0] == 1
    assert heard[0] == "it cannot read its command 'llmpar train --stepz 1'"
    assert len(heard) == 2 and heard[1].startswith("unknown model 'llama9'")
    for error in (KeyboardInterrupt(), BrokenPipeError(32, "Broken pipe")):
        monkeypatch.setattr(Models, "run", lambda self, error=error: (_ for _ in ()).throw(error))
        call("models")
    assert len(heard) == 2


@pytest.mark.long
def test_an_error_while_another_package_is_imported_is_no_fault_of_llmpar(tmp_path):
    """And the sentence comes, whatever is broken: nothing is imported to say it."""
    (tmp_path / "x-packages").mkdir()
    (tmp_path / "x-packages" / "optax.py").write_text("from jax import gone")
    where = os.pathsep.join((str(tmp_path / "x-packages"), os.environ.get("PYTHONPATH", "")))
    broken = run("train", "--steps", "1", PYTHONPATH=where)
    assert broken.returncode == 1 and broken.stderr.count("\n") == 1
    assert "another package cannot be imported: ImportError: cannot import name 'gone'" in broken.stderr


SURROUNDINGS = [*TABLES["surroundings"].items()]
SURROUNDINGS[2:] = [pytest.param(*row, marks=pytest.mark.long) for row in SURROUNDINGS[2:]]


@pytest.mark.parametrize("variable, says", SURROUNDINGS)
def test_what_is_around_a_command_and_cannot_be_is_refused_in_a_sentence(variable, says):
    """Before XLA ends the process."""
    name, _, value = variable.partition("=")
    done = run("train", "--steps", "1", **{name: value})
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "fault" not in done.stderr
    assert done.stderr.startswith("llmpar: ") and re.search(says, done.stderr), done.stderr


def test_the_stack_of_a_fault_is_shown_when_it_is_asked_for(call, monkeypatch):
    monkeypatch.setattr(Models, "run", lambda self: json.loads("{"))
    monkeypatch.setenv("LLMPAR_TRACEBACK", "1")
    _, _, err = call("models")
    assert err.startswith("Traceback") and err.count("\n") > 5 and "llmpar: this is a fault" in err


def test_what_a_terminal_cannot_show_is_replaced_and_a_closed_pipe_is_silent():
    ascii = run("models", "llama9…", PYTHONIOENCODING="ascii")
    assert ascii.returncode == 1 and "unknown model 'llama9?'" in ascii.stderr
    closed = run(code=program_text("closed_pipe"))
    assert closed.returncode == 141 and closed.stderr == "", closed.stderr
    none = run("train", "--help", code=program_text("no_stdout"))
    assert (none.returncode, none.stderr) == (0, ""), none.stderr


@pytest.mark.parametrize("where", ["full", "closed"])
def test_words_that_cannot_be_written_are_lost_and_the_answer_is_given(where):
    done = run(where, code=program_text("words_lost"))
    assert done.returncode == 0 and json.loads(done.stdout)["plans"], done.stderr


def test_ctrl_c_ends_a_command_that_waits_in_native_code_and_takes_its_folder_along():
    command = [sys.executable, "-c", program_text("waits")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        folder = Path(process.stdout.readline().strip())
        assert folder.is_dir()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert (process.returncode, err, folder.exists()) == (130, "llmpar: interrupted\n", False)


def test_the_first_signal_asks_and_the_second_ends(monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", sys.exit)
    before = signal.getsignal(signal.SIGTERM)
    of_run = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a test run under nohup ignores it
    with Stopper() as stopper:
        assert not stopper.requested(), "a step was done"
        os.kill(os.getpid(), signal.SIGHUP)
        assert stopper.requested() and stopper.number == signal.SIGHUP
        with pytest.raises(SystemExit, match="130"):
            stopper(signal.SIGINT)
    with Stopper() as stopper, pytest.raises(SystemExit, match="143"):
        stopper(signal.SIGTERM)  # no step was done: nothing to finish
    with Stopper() as stopper, pytest.raises(SystemExit, match="130"):
        stopper.to_all(signal.SIGINT)  # nor has one of several processes anything to finish
    with Stopper() as stopper:
        stopper.requested()
        signal.set_wakeup_fd(-1)  # as event loops leave it
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopper.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    signal.signal(signal.SIGHUP, of_run)
    ended = "llmpar: ended at once; checkpoints taken before are intact"
    after = "llmpar: ends after this step; once more ends at once"
    assert capfd.readouterr().err.splitlines() == [after, ended, ended, ended, after]


def test_an_interrupted_training_says_what_is_kept_and_its_command_goes_on(
    call, document, model, tmp_path, monkeypatch
):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 200)
    words = ["train", "--model", model(), *EIGHT, *TINY_STEP, "--steps", "4"]
    words += ["--data", str(text), "--checkpoints", str(tmp_path / "kept")]

    @contextlib.contextmanager
    def interrupting(total):
        yield lambda done, words: os.kill(os.getpid(), signal.SIGTERM) if done == 2 else None

    with monkeypatch.context() as patched:
        patched.setattr("llmpar.cli.train.progress", interrupting)
        status, out, err = call(*words)
    assert status == 143 and out == "", err
    why = f"llmpar: stopped after step 3; saved in {tmp_path / 'kept'}: run the same command again to resume"
    assert why in err, "the loss of step 2 is read while step 3 runs"
    found = document(*words)
    assert found["start"] == 3 and len(found["losses"]) == 1


def test_without_a_terminal_progress_is_a_line_every_few_seconds(capsys, monkeypatch):
    clock = iter(range(0, 100, 4))
    monkeypatch.setattr("llmpar.cli.train.time.monotonic", lambda: next(clock))
    with progress(9) as show:
        for done in range(1, 10):
            show(done, "loss 1")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "compiling …" and lines[1] == "step 1/9: loss 1" and lines[-1] == "step 9/9: loss 1"
    assert 3 < len(lines) < 7


WITHOUT_LAB = program_text("without_lab")


@pytest.fixture(scope="module")
def without_lab(tmp_path_factory):
    """A rank without the extra lab trains, inspects and asks the doctor: its folder, documents and lines."""
    folder = tmp_path_factory.mktemp("rank")
    (folder / "config.json").write_text(json.dumps(CARD))
    done = run(code=WITHOUT_LAB + program_text("rank"), at=folder)
    assert done.returncode == 0, done.stderr
    train, inspect, *lines = done.stdout.splitlines()
    return folder, json.loads(train), json.loads(inspect), lines


def test_a_rank_without_the_extra_lab_trains_inspects_and_draws_an_svg(without_lab):
    folder, train, inspect, lines = without_lab
    assert len(train["losses"]) == 2 and inspect["collectives"]
    assert all("<svg" in (folder / name).read_text() for name in ("loss.svg", "bytes.svg"))
    assert "jupyterlab is missing: pip install 'llmpar[lab]'" in lines


def test_what_needs_the_extra_lab_names_it_in_a_sentence(tmp_path):
    done = run(code=WITHOUT_LAB + program_text("needs_lab"), at=tmp_path)
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and len(lines) == 5, done.stderr
    assert all(x.startswith("llmpar: ") and x.endswith("pip install 'llmpar[lab]'") for x in lines), lines
    named = ("JupyterLab", "loss.svg", "table.svg", "anywidget", "SVG")
    assert all(word in line for line, word in zip(lines, named, strict=True))


def test_help_is_one_page_of_groups_and_the_examples_are_apart(call):
    status, out, _ = call("--help")
    lines = out.splitlines()
    assert status == 0 and len(lines) <= 40 and max(map(len, lines)) <= 80
    shown = [line.split()[0] for line in lines if re.match(r"  \w", line) and not line.startswith("  llmpar")]
    assert shown == list(COMMANDS) and re.findall(r"^(\w[\w ]*)$", out, re.M) == [*GROUPS, "examples"]
    status, out, err = call("trian")
    assert (status, out) == (2, "") and "no command 'trian' (did you mean train?)" in err
    status, _, err = call("train", "--stepz", "5")
    assert status == 2 and "llmpar train --help" in err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_says_what_it_does_and_every_example_stands_alone(call, name):
    status, out, _ = call(name, "--help")
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", out).split())
    assert status == 0 and "{None}" not in text and "--no-json" not in text
    if name == "train":
        groups = re.findall(r"^\W+(\S* ?options) ", out, re.M)
        assert groups[:2] == ["options", "step options"] and "text options" in groups
        assert "--zero-axes {fsdp,ep,sp|fsdp,ep|fsdp,sp|fsdp}" in out, "choices can be told apart"
    if name == "inspect":  # whose flags have the docstrings of a plan's fields
        assert "which positions each rank of sp has. 'zigzag' gives all ranks the same" in text
        assert "`" not in text and ":mod:" not in text and "--mesh STR" in text and "--pp" not in text
    assert re.findall(r"--[a-z-]+(?: [A-Z]+| {\S+)? \(default", text) == [], "a flag without a word"
    assert re.findall(r"--no-[a-z-]+ (?:(?!--).)*\(default: True", text) == [], "it switches off, and says on"
    assert all(line.count("llmpar ") == 1 for line in out.splitlines() if line.startswith("    llmpar"))


def test_what_jax_is_told_that_would_only_wait_is_said(capsys, monkeypatch, tmp_path, request):
    """And where compiled programs are kept is done without, where that cannot be."""
    before = jax.config.jax_compilation_cache_dir
    request.addfinalizer(lambda: jax.config.update("jax_compilation_cache_dir", before))
    with jax.disable_jit(), pytest.raises(ValueError, match="JAX_DISABLE_JIT is on: .*; unset it"):
        start_jax()
    (tmp_path / "file").write_text("")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "file" / "x"))
    start_jax()
    assert jax.config.jax_compilation_cache_dir is None
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # there is no home
    start_jax()
    assert jax.config.jax_compilation_cache_dir is None
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "/file/x' cannot be written (Not a directory)" in err
