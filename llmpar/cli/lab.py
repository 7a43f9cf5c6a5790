"""``llmpar lab``: open JupyterLab on a learner's copies of the lessons."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from llmpar.cli.lessons import lessons, notebook
from llmpar.cli.options import installed, say

PACKAGE = pathlib.Path(__file__).parent.parent
START, WORDS = "start.ipynb", "docs/words.md"
PAGES = ("README.md", WORDS)
"""What lessons link to: JupyterLab serves nothing above the copies, and looks there for what lies above."""
TITLE = "# Start here"
"""The first line of the start page: a folder whose page begins so was made by this command."""
OURS = "<!-- llmpar lab renews this page; remove this line to keep your own -->"


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
    port: int = 8888
    browser: Annotated[
        bool, tyro.conf.arg(help="open no browser.", help_behavior_hint="(without this flag one opens)")
    ] = True

    def run(self) -> None:
        """Become JupyterLab: the process is replaced, so a signal to it reaches the server."""
        if not installed("jupyterlab"):
            raise ValueError("JupyterLab is not installed; pip install 'llmpar[lab]'")
        if not 0 < self.port < 65536:
            raise ValueError(f"--port {self.port} is no port; use 1 to 65535")
        if not self.copies:
            raise ValueError("--copies '' names no folder; leave it out for 'lessons'")
        here = os.path.isdir(self.folder) or self.folder != Lab.folder
        say(
            deal(
                pathlib.Path(self.folder) if here else PACKAGE / "notebooks",
                pathlib.Path(self.copies),
                self.fresh,
            )
        )
        command = [sys.executable, "-m", "jupyter", "lab", self.copies]
        command += [f"--port={self.port}", "--ip=127.0.0.1", f"--LabApp.default_url=/lab/tree/{START}"]
        # The settings in labconfig let a saved notebook keep its widgets, which reopen without a kernel.
        config = [os.environ.get("JUPYTER_CONFIG_PATH", ""), str(PACKAGE / "cli")]
        env = {"JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(".jax_cache").resolve())} | os.environ
        env |= {"JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, config))}
        # Most containers run as root, and the server is open to this machine only.
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        command += ["--allow-root"] * root + ["--no-browser"] * (not self.browser)
        os.execve(sys.executable, command, env)


def deal(folder: pathlib.Path, copies: pathlib.Path, fresh: bool = False) -> str:
    """Copy the lessons that are not there yet, cleared, and write the start page; say what was done.

    Refuses a folder of something else, and writes over nothing but its own pages.
    """
    if not (found := sorted(folder.glob("[0-9][0-9]_*.ipynb"))):
        raise ValueError(
            f"there are no lessons in '{folder}'; run this from the project's root, or give --folder"
        )
    if copies.resolve() == folder.resolve():
        raise ValueError(f"--copies '{copies}' is where the lessons are; name another folder")
    start = start_page(folder)
    try:
        if copies.is_dir() and any(copies.iterdir()) and not begun(copies / START):
            raise ValueError(
                f"'{copies}' has files, and no {START} of ours; give --copies a new or empty folder"
            )
        copies.mkdir(parents=True, exist_ok=True)
        if fresh:
            put_aside(copies)
        made = [path for path in found if not (copies / path.name).exists()]
        for path in made:
            (copies / path.name).write_text(cleared(path), encoding="utf-8")
        (copies / START).write_text(start, encoding="utf-8")
        if not (ignored := copies / ".gitignore").exists():
            ignored.write_text("*\n")  # answers are nobody's change to the project
        for name in PAGES:
            page, mine = folder.resolve().parent / name, copies / name
            if page.exists() and (not mine.exists() or OURS in mine.read_text(encoding="utf-8")):
                mine.parent.mkdir(exist_ok=True)
                mine.write_text(f"{page.read_text(encoding='utf-8')}\n{OURS}\n", encoding="utf-8")
    except OSError as error:
        what = f"cannot write '{error.filename}' ({error.strerror})"
        raise ValueError(f"{what}; give --copies a folder that you may write to") from error
    kept = len(found) - len(made)
    return (
        f"{copies}: {len(made)} lesson{'s' * (len(made) != 1)} copied, {kept} kept as you left them"
        + " (--fresh renews)" * (kept > 0)
    )


def begun(page: pathlib.Path) -> bool:
    """Tell whether this is a start page that this command has written."""
    return page.is_file() and TITLE in page.read_text(encoding="utf-8", errors="replace")


def put_aside(copies: pathlib.Path) -> None:
    """Move a learner's notebooks and answers to a folder that is named after the time."""
    mine = [path for path in sorted(copies.glob("*")) if path.suffix in (".ipynb", ".jsonl")]
    earlier = copies / "earlier" / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")
    for path in mine:
        if path.name != START:
            earlier.mkdir(parents=True, exist_ok=True)
            path.rename(earlier / path.name)


def cleared(path: pathlib.Path) -> str:
    """Take the outputs out of a lesson: they answer what it asks."""
    document = notebook(path)
    for cell in document["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def start_page(folder: pathlib.Path) -> str:
    """Write the page that a learner sees first: each lesson with its question, its minutes and what it
    needs."""
    rows = [
        f"| [{lesson.title}]({lesson.file}) | {lesson.question} | {lesson.teaching} | {lesson.minutes} |"
        f" {', '.join(lesson.needs)} |"
        for lesson in lessons(folder)
    ]
    page: dict[str, Any] = {"cell_type": "markdown", "id": "start", "metadata": {}}
    page["source"] = ABOUT.format(rows="\n".join(rows))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {"cells": [page], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


ABOUT = f"""{TITLE}

Take the lessons in this order; each builds on those that it names. You need Python, NumPy, and an idea of
what a gradient is. You need no cluster: 8 simulated devices are in your laptop.

| lesson | its question | minutes | with exercises | after |
|---|---|--:|--:|---|
{{rows}}

Replace the dots, run the cell, read the verdict. `hint("03.sent")` helps a step at a time,
`solution("03.sent")` answers after an attempt, `llmpar progress` in a terminal shows what is done.
`llmpar quiz` asks a question for each lesson, before and after. All words are in [{WORDS}]({WORDS}).

Your copies are never overwritten; `llmpar lab --fresh` renews them and keeps the old ones in `earlier`. A
lesson takes up to 1 GB of memory, lesson 17 with its two hosts 1.3 GB: shut a kernel down before you open the
next lesson.
"""
