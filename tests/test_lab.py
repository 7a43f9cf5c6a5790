"""`llmpar lab` opens a learner's own copies of the lessons, without outputs, and never writes over them."""

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest
from shared import ROOT

from llmpar.cli.commands import command_class


@pytest.fixture
def open_lab(tmp_path, monkeypatch):
    """Start the lab of the real lessons in an empty folder, with JupyterLab left out; return what it got."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    asked = []

    def become(program, command, env):
        asked.append((command, env))

    def start(**options):
        with monkeypatch.context() as patched:
            patched.setattr(os, "execve", become)
            command_class("lab")(**{"folder": str(ROOT / "notebooks")} | options).run()
        return asked[-1]

    return start


def test_copies_are_the_lessons_without_outputs_and_git_sees_none(open_lab, tmp_path):
    command, env = open_lab()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        copy, lesson = (nbformat.read(p, as_version=4) for p in (tmp_path / "lessons" / path.name, path))
        nbformat.validate(copy)
        assert [cell.source for cell in copy.cells] == [cell.source for cell in lesson.cells]
        code = [cell for cell in copy.cells if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in code)
    assert "lessons" in command and "--LabApp.default_url=/lab/tree/start.ipynb" in command
    assert env["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / ".jax_cache")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    status = ["git", "status", "--porcelain", "--untracked-files=all"]
    assert b"lessons" not in subprocess.run(status, cwd=tmp_path, capture_output=True, check=True).stdout
    # Saved notebooks keep their widgets: else one that is opened again says "model not found".
    settings = Path(env["JUPYTER_CONFIG_PATH"].split(os.pathsep)[-1]) / "labconfig"
    kept = json.loads((settings / "default_setting_overrides.json").read_text())
    assert kept["@jupyter-widgets/jupyterlab-manager:plugin"] == {"saveState": True}


def test_the_words_that_lessons_link_to_are_served(open_lab, tmp_path):
    open_lab()
    copies = tmp_path / "lessons"
    words = (ROOT / "docs" / "words.md").read_text()
    assert (copies / "docs" / "words.md").read_text().startswith(words)
    assert set(re.findall(r"\]\(([^#)]+)", words)) == set()
    links = set()
    for path in copies.glob("[0-9]*.ipynb"):
        text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        links |= set(re.findall(r"\]\((\.\./[^)#]*)", text))
    assert links == {"../docs/words.md"}


def test_answers_are_never_overwritten_and_fresh_keeps_them(open_lab, tmp_path, capsys):
    open_lab()
    mine, log = tmp_path / "lessons" / "00_setup.ipynb", tmp_path / "lessons" / "answers.jsonl"
    mine.write_text("my answers")
    log.write_text("noted")
    (tmp_path / "lessons" / "03_data_parallelism.ipynb").unlink()
    open_lab()
    assert mine.read_text() == "my answers" and log.read_text() == "noted"
    assert (tmp_path / "lessons" / "03_data_parallelism.ipynb").exists()
    assert "1 lesson copied, " in capsys.readouterr().err
    open_lab(fresh=True)
    assert "my answers" not in mine.read_text() and not log.exists()
    (earlier,) = (tmp_path / "lessons" / "earlier").iterdir()
    assert (earlier / mine.name).read_text() == "my answers" and (earlier / log.name).read_text() == "noted"
    open_lab(fresh=True)  # within the same second
    assert len(list(earlier.parent.iterdir())) == 2 and mine.exists()


def test_the_start_page_names_each_lesson_with_its_question_and_minutes(open_lab, tmp_path):
    open_lab()
    page = nbformat.read(tmp_path / "lessons" / "start.ipynb", as_version=4)
    nbformat.validate(page)
    rows = [line for line in page.cells[0].source.splitlines() if line.startswith("| [")]
    lessons = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert len(rows) == len(lessons)
    seen = set()  # a lesson needs only what comes before it
    for row, name in zip(rows, lessons, strict=True):
        title, question, teaching, minutes, after = (cell.strip() for cell in row.strip("|").split(" | "))
        assert title.endswith(f"({name})") and question.endswith("?")
        assert set(after.split(", ")) - {""} <= seen
        assert 10 <= int(teaching) <= 40 and 20 <= int(minutes) <= 120
        seen.add(name[:2])


REFUSED = [  # options, files that are there (not even root writes into a file), and what is said
    ({"copies": str(ROOT / "notebooks")}, {}, "is where the lessons are; name another"),
    ({"copies": "."}, {"README.md": "mine", ".gitignore": "*.log"}, "has files, and no start.ipynb of ours"),
    ({"copies": "notes"}, {"notes": "mine"}, r"cannot write 'notes' \(.*\); give --copies a folder that you"),
    ({"folder": "."}, {}, "there are no lessons in"),
]


@pytest.mark.parametrize("options, files, sentence", REFUSED)
def test_what_cannot_be_is_refused_and_nothing_is_written(options, files, sentence, open_lab, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=sentence):
        open_lab(**options)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_page_of_the_learner_s_is_kept_and_ours_is_renewed(open_lab, tmp_path):
    open_lab()
    copies = tmp_path / "lessons"
    words, ours = copies / "docs" / "words.md", (ROOT / "docs" / "words.md").read_text()
    (copies / ".gitignore").write_text("*.log\n")
    words.write_text(words.read_text().replace("layout", "an older word"))
    open_lab()
    assert (copies / ".gitignore").read_text() == "*.log\n" and words.read_text().startswith(ours)
    words.write_text("my notes")
    open_lab()
    assert words.read_text() == "my notes"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no execve")
def test_the_server_takes_the_place_of_the_command(tmp_path):
    """A signal to the command is one to the server: here a program that says its number and waits."""
    (tmp_path / "jupyter.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "llmpar", "lab", "--folder", str(ROOT / "notebooks")]
    how = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": paths}}
    with subprocess.Popen(command, **how, stdout=subprocess.PIPE) as lab:
        assert int(lab.stdout.readline()) == lab.pid
        lab.terminate()
        assert lab.wait() == -signal.SIGTERM


def test_a_wheel_has_the_lessons_and_what_they_link_to(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling is not installed (extra dev)")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("llmpar-")}
    assert all(name.startswith("llmpar/") for name in inside)
    lessons = {f"llmpar/notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {name for name in inside if name.startswith("llmpar/notebooks/")} == lessons
    data = [path for path in (ROOT / "llmpar").rglob("*") if path.suffix in (".json", ".md", ".js", ".toml")]
    assert {"llmpar/docs/words.md"} | {str(path.relative_to(ROOT)) for path in data} <= inside
