"""`llmpar lab` opens a learner's own copies of the lessons, without outputs, and never writes over them."""

import json
import os
import re
import subprocess
from pathlib import Path

import nbformat
import pytest

from llmpar.cli.commands import COMMANDS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def open_lab(tmp_path, monkeypatch):
    """Start the lab of the real lessons in an empty folder, with JupyterLab left out; return what it got."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    asked = []

    def run(command, **how):
        asked.append((command, how["env"]))
        return subprocess.CompletedProcess(command, 0)

    def start(**options):
        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "run", run)
            COMMANDS["lab"](folder=str(ROOT / "notebooks"), **options).run()
        return asked[-1]

    return start


def test_copies_are_the_lessons_without_outputs(open_lab, tmp_path):
    command, env = open_lab()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        copy, lesson = (nbformat.read(p, as_version=4) for p in (tmp_path / "lessons" / path.name, path))
        nbformat.validate(copy)
        assert [cell.source for cell in copy.cells] == [cell.source for cell in lesson.cells]
        code = [cell for cell in copy.cells if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in code)
    assert "lessons" in command and "--LabApp.default_url=/lab/tree/start.ipynb" in command
    assert env["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / ".jax_cache")


def test_the_words_that_lessons_link_to_are_served(open_lab, tmp_path):
    open_lab()
    copies = tmp_path / "lessons"
    assert (copies / "README.md").read_text() == (ROOT / "README.md").read_text()
    links = set()
    for path in copies.glob("[0-9]*.ipynb"):
        text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        links |= set(re.findall(r"\]\((\.\./[^)#]*)", text))
    assert links == {"../README.md"}, "JupyterLab looks for what lies above its root in the root"


def test_answers_are_never_overwritten_and_fresh_keeps_them(open_lab, tmp_path, capsys):
    open_lab()
    mine, log = tmp_path / "lessons" / "00_setup.ipynb", tmp_path / "lessons" / "answers.jsonl"
    mine.write_text("my answers")
    log.write_text("noted")
    (tmp_path / "lessons" / "03_data_parallelism.ipynb").unlink()
    open_lab()
    assert mine.read_text() == "my answers" and log.read_text() == "noted"
    assert (tmp_path / "lessons" / "03_data_parallelism.ipynb").exists(), "what is missing is copied again"
    assert "1 lesson copied, " in capsys.readouterr().err
    open_lab(fresh=True)
    assert "my answers" not in mine.read_text() and not log.exists()
    (earlier,) = (tmp_path / "lessons" / "earlier").iterdir()
    assert (earlier / mine.name).read_text() == "my answers" and (earlier / log.name).read_text() == "noted"


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
        assert (
            title.endswith(f"({name})") and question.endswith("?") and set(after.split(", ")) - {""} <= seen
        )
        assert 10 <= int(teaching) <= 40 and 20 <= int(minutes) <= 120
        seen.add(name[:2])


def test_git_sees_no_copies(tmp_path, open_lab):
    open_lab()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    done = ["git", "status", "--porcelain", "--untracked-files=all"]
    seen = subprocess.run(done, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "lessons" not in seen
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"/lessons/", "answers.jsonl"} <= set(ignored)


def test_the_news_are_not_fetched():
    settings = ROOT / "llmpar" / "cli" / "labconfig" / "default_setting_overrides.json"
    news = json.loads(settings.read_text())["@jupyterlab/apputils-extension:notification"]
    assert news == {"fetchNews": "false", "checkForUpdates": False}


def test_copies_beside_the_lessons_are_refused(open_lab):
    with pytest.raises(ValueError, match="is where the lessons are; name another folder"):
        open_lab(copies=os.path.relpath(ROOT / "notebooks"))
