"""Bad inputs (bad_inputs.toml): each command ends at once, in one sentence, and starts nothing."""

import os
import shlex
import signal
import subprocess
import tomllib
from pathlib import Path

import jax
import pytest

import llmpar.inspect.report
import llmpar.planner.aot
import llmpar.training.hugging_face  # which decorates with jax.jit as it is imported
import llmpar.training.loop
from llmpar.cli import main
from llmpar.parallel.mesh import ordered_devices

TABLE = tomllib.loads((Path(__file__).parent / "bad_inputs.toml").read_text())


def cases():
    """Each command of a row with its share of the values, and (nightly) with all others."""
    for row in TABLE["case"]:
        values, commands = row.get("of", [""]), row["run"]
        for i, command in enumerate(commands):
            own = values[i :: len(commands)] or [values[i % len(values)]]
            name = f"{command} {row['says']}"[:70]
            yield pytest.param(row, command, own, id=name)
            if others := [value for value in values if value not in own]:
                yield pytest.param(row, command, others, id=f"{name} too", marks=pytest.mark.nightly)


HUB = "config.json", "a.safetensors"
RECIPES = {
    "missing": lambda file: None,
    "folder": lambda file: file.mkdir(),
    "dangling": lambda file: file.symlink_to(file.with_name("gone")),
    "fifo": lambda file: os.mkfifo(file),
    "empty": lambda file: file.write_text(""),
    "binary": lambda file: file.write_bytes(bytes(range(256))),
    "latin1": lambda file: file.write_bytes('name = "München"'.encode("latin-1")),
    "utf16": lambda file: file.write_text('{"a": 1}', encoding="utf-16"),
    "deep": lambda file: file.write_text("a = " * (file.suffix == ".toml") + "[" * 100_000),
    "digits": lambda file: file.write_text(("a = " if file.suffix == ".toml" else "") + "9" * 5000),
    "list": lambda file: file.write_text("[1, 2]"),
    "big": lambda file: file.write_bytes(b" " * (17 << 20)),
    "text": lambda file: file.write_text("words and more words\n" * 2000),
    "drawn": lambda file: [
        file.mkdir(),
        (file / "loss.png").write_text("mine"),
        (file / "loss.svg").write_text("mine"),
    ],
    "hub": lambda file: [file.mkdir(), *((file / x).write_text("{}") for x in HUB)],
}
"""Files by the names that the table calls them: ``@fifo.json`` is a pipe with that suffix."""


class Started(BaseException):
    """A command went to work, or did not end."""


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch, tmp_path):
    def start(*words, **_):
        raise Started(f"it starts {words[:1]}")

    monkeypatch.chdir(tmp_path)
    ordered_devices()  # which asks another process once whether XLA knows its flags
    for place, name in (
        (llmpar.training.loop, "Step"),
        (llmpar.inspect.report, "Step"),
        (llmpar.planner.aot, "compile_step"),
        (jax, "jit"),
        (os, "execve"),
        (subprocess, "Popen"),
    ):
        monkeypatch.setattr(place, name, start)
    before = signal.signal(signal.SIGALRM, lambda *_: start("nothing, and does not end"))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def words_of(row, command, value, folder):
    """The command line with a text or a file in its hole."""
    if "file" in row:
        (folder / row["file"]).write_text(row.get("before", "") + value)
        value = str(folder / row["file"])
    elif value.startswith("@"):
        made = folder / Path(value[1:]).parts[0]
        if not os.path.lexists(made):
            RECIPES[made.stem](made)
        value = str(folder / value[1:])
    text = folder / "text.txt"
    if not text.exists():
        RECIPES["text"](text)
    words = shlex.split(command.replace("%", value))
    return [word.replace("{}", value).replace("{text}", str(text)) for word in words]


@pytest.mark.parametrize("row, command, values", cases())
def test_each_is_refused_in_a_sentence(row, command, values, tmp_path, capsys):
    assert row.get("status", 1) or row["why"], "what is taken in silence says why"
    found = []
    for given in values:
        value, says = (given, row["says"]) if isinstance(given, str) else given
        words = words_of(row, command, value, tmp_path)
        signal.alarm(120)
        try:
            with jax.numpy_dtype_promotion("standard"):
                status = main(words)
        except SystemExit as usage:  # how tyro leaves
            status = usage.code
        except Started as started:
            status = str(started)
        out, err = capsys.readouterr()
        *_, sentence = [line for line in err.splitlines() if line.strip()] or [""]
        if status != row.get("status", 1):
            found.append((value, f"status {status}", err[-300:] or out[-100:]))
        elif "fault of llmpar" in err or "Traceback" in err or (out and status):
            found.append((value, "fault or output", err[-400:] + out[-100:]))
        elif says not in err:
            found.append((value, f"says {sentence[:200]}"))
        elif status == 1 and not sentence.startswith(("llmpar: ", "  ", "F", "B", "stage", "^")):
            found.append((value, f"ends with {sentence[:200]}"))
    assert not found, "\n" + "\n".join(map(str, found))
