"""What the lessons say of themselves, for every page that lists them: the lab's start page and the index."""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Lesson:
    """One notebook, as its header describes it.

    Attributes:
        file: the notebook's name.
        teaching: minutes along the core path.
        exercises: minutes with all exercises.
        needs: numbers of the lessons that come before.
    """

    file: str
    title: str
    question: str
    teaching: int
    exercises: int
    needs: tuple[str, ...] = ()
    objectives: tuple[str, ...] = ()
    keypoints: tuple[str, ...] = ()

    @property
    def number(self) -> str:
        """The two digits in front of its name."""
        return self.file[:2]

    @property
    def minutes(self) -> int:
        """All of it."""
        return self.teaching + self.exercises


def read(path: pathlib.Path) -> Lesson:
    """Read one lesson; refuse a notebook that does not say what a course needs to know."""
    document = json.loads(path.read_text(encoding="utf-8"))
    about = document["metadata"].get("llmpar", {})
    headings = (
        "".join(cell["source"]).lstrip() for cell in document["cells"] if cell["cell_type"] == "markdown"
    )
    title = next((text.partition("\n")[0][2:] for text in headings if text.startswith("# ")), path.stem)
    if missing := [name for name in ("question", "teaching", "exercises") if not about.get(name)]:
        raise ValueError(f"{path.name} does not say its {', '.join(missing)}; build it: make notebooks")
    lists = (tuple(about.get(name, ())) for name in ("needs", "objectives", "keypoints"))
    return Lesson(path.name, title, about["question"], about["teaching"], about["exercises"], *lists)


def lessons(folder: pathlib.Path) -> list[Lesson]:
    """Read the lessons of a folder, in their order."""
    return [read(path) for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))]


GLOSSARY = (
    ("device", "one memory, one program; real, or one of eight that your processor simulates"),
    ("mesh", "devices with coordinates; its axes are pp dp fsdp ep sp tp, slow links first"),
    (
        "shard, replica",
        "the piece of a value that a device holds; one of the devices that hold the same piece",
    ),
    (
        "layout",
        "one line that says where a value lives: b/dp s d +tp is cut by dp, and an unfinished sum over tp",
    ),
    ("arrow", "two layouts and ->: a movement; for each axis one collective, a local slice, or nothing"),
    ("collective", "messages of a whole group: all-gather, reduce-scatter, all-reduce, all-to-all, permute"),
    (
        "region",
        "a named part of the model (stream, attention, ffn); the plan says which axes cut which dims there",
    ),
    ("reading", "who carries the arrows out: Solo, Manual, Auto or Explicit"),
    ("census", "what a compiled program sends, counted"),
    ("microbatch", "a part of the batch that goes through the model by itself; gradients are added up"),
    ("bubble", "the time in which a pipeline's stage waits"),
    (
        "host, process",
        "a machine with its own memory; the program that runs on it, one of several with one mesh",
    ),
)
"""The words that a newcomer needs first; the README's Words and Letters have all of them."""
