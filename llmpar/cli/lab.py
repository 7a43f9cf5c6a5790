"""``llmpar lab``: open JupyterLab on a learner's copies of the lessons."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from llmpar.cli.lessons import GLOSSARY, lessons
from llmpar.cli.options import installed, say

START = "start.ipynb"


@dataclass(frozen=True)
class Lab:
    """Open JupyterLab on your own copies of the lessons, with outputs cleared.

    The copies are made once and never overwritten: they hold your answers. Simulated devices are used unless
    an accelerator is found.

    Attributes:
        folder: where the lessons are.
        copies: where yours go.
        fresh: renew the copies; those that you have are moved to a folder in copies/earlier.
        port: to serve on; loopback only.
        browser: open one.
    """

    folder: str = "notebooks"
    copies: str = "lessons"
    fresh: bool = False
    port: int = 8888
    browser: bool = True

    def run(self) -> None:
        """Start JupyterLab and wait until it ends."""
        if not installed("jupyterlab"):
            raise ValueError("JupyterLab is not installed; pip install 'llmpar[lab]'")
        if not pathlib.Path(self.folder).is_dir():
            raise ValueError(
                f"there is no folder '{self.folder}' here; run this from the project's root, or give --folder"
            )
        if not 0 < self.port < 65536:
            raise ValueError(f"--port {self.port} is no port; use 1 to 65535")
        copies = pathlib.Path(self.copies)
        if copies.resolve() == pathlib.Path(self.folder).resolve():
            raise ValueError(f"--copies '{self.copies}' is where the lessons are; name another folder")
        if self.fresh:
            put_aside(copies)
        say(deal(pathlib.Path(self.folder), copies))
        command = [sys.executable, "-m", "jupyter", "lab", self.copies]
        command += [f"--port={self.port}", "--ip=127.0.0.1", f"--LabApp.default_url=/lab/tree/{START}"]
        # The settings in labconfig let a saved notebook keep its widgets, which reopen without a kernel.
        config = [os.environ.get("JUPYTER_CONFIG_PATH", ""), str(pathlib.Path(__file__).parent)]
        env = {"JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(".jax_cache").resolve())} | os.environ
        env |= {"JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, config))}
        # Most containers run as root, and the server is open to this machine only.
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        command += ["--allow-root"] * root + ["--no-browser"] * (not self.browser)
        ended = subprocess.run(command, env=env).returncode
        if ended:
            raise ValueError(f"JupyterLab ended with status {ended}; it says why above")


def put_aside(copies: pathlib.Path) -> None:
    """Move a learner's notebooks and answers to a folder that is named after the time."""
    mine = [path for path in sorted(copies.glob("*")) if path.suffix in (".ipynb", ".jsonl")]
    if mine:
        now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        earlier = copies / "earlier" / now
        earlier.mkdir(parents=True)
        for path in mine:
            path.rename(earlier / path.name)


def deal(folder: pathlib.Path, copies: pathlib.Path) -> str:
    """Copy the lessons that are not there yet, cleared, and write the start page; say what was done. The
    README comes along: lessons link to its words, and JupyterLab serves nothing above the copies."""
    found = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    copies.mkdir(parents=True, exist_ok=True)
    (copies / ".gitignore").write_text("*\n")  # answers are nobody's change to the project
    made = [path for path in found if not (copies / path.name).exists()]
    for path in made:
        (copies / path.name).write_text(cleared(path.read_text(encoding="utf-8")), encoding="utf-8")
    (copies / START).write_text(start_page(folder), encoding="utf-8")
    if (readme := folder.resolve().parent / "README.md").exists():
        (copies / readme.name).write_text(readme.read_text(encoding="utf-8"), encoding="utf-8")
    kept = len(found) - len(made)
    return (
        f"{copies}: {len(made)} lesson{'s' * (len(made) != 1)} copied, {kept} kept as you left them"
        + " (--fresh renews)" * (kept > 0)
    )


def cleared(notebook: str) -> str:
    """Take the outputs out of a notebook: they answer what a lesson asks."""
    document = json.loads(notebook)
    for cell in document["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def start_page(folder: pathlib.Path) -> str:
    """Write the page that a learner sees first: each lesson with its question, its minutes and what it
    needs."""
    rows = [
        "# Start here",
        "",
        (
            "Take the lessons in this order; each builds on those that it names. You need Python, NumPy, and"
            " an idea of what a gradient is. You need no cluster: 8 simulated devices are in your laptop."
        ),
        "",
        "| lesson | its question | minutes | with exercises | after |",
        "|---|---|--:|--:|---|",
    ]
    for lesson in lessons(folder):
        after = ", ".join(lesson.needs)
        rows.append(
            f"| [{lesson.title}]({lesson.file}) | {lesson.question} | {lesson.teaching} | {lesson.minutes} |"
            f" {after} |"
        )
    rows += [
        "",
        (
            'Replace the dots, run the cell, read the verdict. `hint("03.sent")` helps a step at a time,'
            ' `solution("03.sent")` answers after an attempt, `llmpar progress` in a terminal shows what is'
            " done. `llmpar quiz` asks a question for each lesson, before and after."
        ),
        "",
        (
            "Your copies are never overwritten; `llmpar lab --fresh` renews them and keeps the old ones in"
            " `earlier`. A lesson takes up to 1 GB of memory, lesson 17 with its two hosts 1.3 GB: shut a"
            " kernel down before you open the next lesson."
        ),
        "",
        "## Words",
        "",
        "| word | meaning |",
        "|---|---|",
        *(f"| {word} | {meaning} |" for word, meaning in GLOSSARY),
    ]
    page: dict[str, Any] = {"cell_type": "markdown", "id": "start", "metadata": {}}
    page["source"] = "\n".join(rows)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {"cells": [page], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
