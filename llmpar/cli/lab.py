"""``llmpar lab``: open JupyterLab on a learner's copies of the lessons."""

import datetime
import json
import os
import pathlib
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from llmpar.cli.options import inform, installed
from llmpar.files import Allowed, read_json, refuse

_PACKAGE = pathlib.Path(__file__).parent.parent
_START = "start.ipynb"
_WORDS = pathlib.Path("docs", "words.md")
"""What lessons link to: JupyterLab serves nothing above the copies, and looks there for what lies above."""
_OURS = "<!-- llmpar lab renews this page; remove this line to keep your own -->"


@dataclass(frozen=True)
class Lesson:
    """One notebook, as its header describes it: the minutes along the core path, those of its exercises, and
    the numbers of the lessons that come before."""

    file: str
    title: str
    question: str
    teaching: int
    exercises: int
    needs: tuple[str, ...] = ()
    number = property(lambda self: self.file.partition("_")[0])
    minutes = property(lambda self: self.teaching + self.exercises)


def notebook(path: pathlib.Path) -> dict[str, Any]:
    """Read a notebook; refuse any other file."""
    document = read_json(path, "lesson")
    cells, about = document.get("cells"), document.get("metadata")
    good = isinstance(cells, list) and all(
        isinstance(cell, dict) and {"cell_type", "source"} <= cell.keys() for cell in cells
    )
    if not good or not isinstance(about, dict) or not isinstance(about.get("llmpar", {}), dict):
        refuse(
            path, "lesson", "it is no notebook with cells and metadata; build it: make notebooks"
        )
    return document


def read_lessons(folder: pathlib.Path) -> list[Lesson]:
    """Read the lessons of a folder in order; refuse one that lacks what a course needs."""
    lessons = []
    for path in sorted(folder.glob("[0-9][0-9]*_*.ipynb")):
        document = notebook(path)
        about = document["metadata"].get("llmpar", {})
        texts = (
            "".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "markdown"
        )
        title = next(
            (text[2:].partition("\n")[0] for text in texts if text.startswith("# ")), path.stem
        )
        if missing := [
            name for name in ("question", "teaching", "exercises") if not about.get(name)
        ]:
            raise ValueError(
                f"{path.name} does not say its {', '.join(missing)}; build it: make notebooks"
            )
        facts = {name: about[name] for name in ("question", "teaching", "exercises")}
        lessons.append(Lesson(path.name, title, needs=tuple(about.get("needs", ())), **facts))
    return lessons


@dataclass(frozen=True)
class Lab:
    """Open JupyterLab on your own copies of the lessons, with outputs cleared.

    The copies are made once and never overwritten: they hold your answers. Simulated devices are used unless
    an accelerator is found.

    Attributes:
        folder: where the lessons are; where there are none, those that were installed are taken.
        copies: where yours go.
        fresh: renew the copies; those that you have are moved to a folder in copies/earlier.
        port: to serve on; loopback only.
    """

    folder: str = "notebooks"
    copies: str = "lessons"
    fresh: bool = False
    port: Annotated[int, Allowed(int, 1, 65535)] = 8888
    browser: Annotated[
        bool,
        tyro.conf.arg(help="open no browser.", help_behavior_hint="(without this flag one opens)"),
    ] = True

    def run(self) -> None:
        """Become JupyterLab: the process is replaced, so a signal to it reaches the server."""
        if not installed("jupyterlab"):
            raise ValueError("JupyterLab is not installed; pip install 'llmpar[lab]'")
        own = os.path.isdir(self.folder) or self.folder != Lab.folder
        folder = pathlib.Path(self.folder) if own else _PACKAGE / "notebooks"
        inform(copy_lessons(folder, pathlib.Path(self.copies), self.fresh))
        command = [
            sys.executable,
            "-m",
            "jupyter",
            "lab",
            self.copies,
            f"--port={self.port}",
            "--ip=127.0.0.1",
            f"--LabApp.default_url=/lab/tree/{_START}",
            # containers run as root, and only this machine is served
            "--allow-root",
        ]
        # The settings in labconfig let a saved notebook keep its widgets, which reopen without a kernel.
        config = [os.environ.get("JUPYTER_CONFIG_PATH", ""), str(_PACKAGE / "cli")]
        env = {
            "JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(".jax_cache").resolve()),
            **os.environ,
            "JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, config)),
        }
        if not self.browser:
            command.append("--no-browser")
        os.execve(sys.executable, command, env)


def copy_lessons(folder: pathlib.Path, copies: pathlib.Path, fresh: bool = False) -> str:
    """Copy the lessons that are missing, without outputs, and write the start page; return a sentence about
    it.

    Refuse a folder of something else, and write over nothing but pages of ours.
    """
    if not (lessons := read_lessons(folder)):
        raise ValueError(
            f"there are no lessons in '{folder}'; run this in the project's root, or give --folder"
        )
    if copies.resolve() == folder.resolve():
        raise ValueError(f"--copies '{copies}' is where the lessons are; name another folder")
    page = copies / _START
    try:
        begun = page.is_file() and "# Start here" in page.read_text(
            encoding="utf-8", errors="replace"
        )
        if copies.is_dir() and any(copies.iterdir()) and not begun:
            raise ValueError(
                f"'{copies}' has files, and no {_START} of ours; give --copies a new or empty"
                " folder"
            )
        copies.mkdir(parents=True, exist_ok=True)
        if fresh:
            put_aside(copies)
        made = [lesson.file for lesson in lessons if not (copies / lesson.file).exists()]
        for name in made:
            _write(cleared(notebook(folder / name)), copies / name)
        _write(start_page(lessons), page)
        if not (ignored := copies / ".gitignore").exists():
            ignored.write_text("*\n")  # git ignores the answers
        theirs, copy = folder.resolve().parent / _WORDS, copies / _WORDS
        if theirs.exists() and (not copy.exists() or _OURS in copy.read_text(encoding="utf-8")):
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(f"{theirs.read_text(encoding='utf-8')}\n{_OURS}\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"cannot write '{error.filename}' ({error.strerror}); give --copies a folder that you may"
            " write to"
        ) from error
    kept = len(lessons) - len(made)
    renews = " (--fresh renews)" if kept else ""
    word = "lesson" if len(made) == 1 else "lessons"
    return f"{copies}: {len(made)} {word} copied, {kept} kept as you left them{renews}"


def put_aside(copies: pathlib.Path) -> None:
    """Move a learner's notebooks and answers to a folder that is named by the time."""
    earlier = copies / "earlier" / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")
    for path in sorted(copies.glob("*")):
        if path.suffix in (".ipynb", ".jsonl") and path.name != _START:
            earlier.mkdir(parents=True, exist_ok=True)
            path.rename(earlier / path.name)


def cleared(document: dict) -> dict:
    """Remove the outputs of a lesson: they answer its questions."""
    for cell in document["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    return document


def start_page(lessons: list[Lesson]) -> dict:
    """Make the page that a learner sees first: each lesson with its question and its minutes."""
    rows = [
        f"| [{x.title}]({x.file}) | {x.question} | {x.teaching} | {x.minutes} | {', '.join(x.needs)} |"
        for x in lessons
    ]
    text = (_PACKAGE / "cli" / "start.md").read_text(encoding="utf-8").format(rows="\n".join(rows))
    page = {"cell_type": "markdown", "id": "start", "metadata": {}, "source": text}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": [page], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _write(document: dict, path: pathlib.Path) -> None:
    """Write a notebook."""
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
