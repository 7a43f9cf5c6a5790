"""What the lessons say of themselves, for every page that lists them: the lab's start page and the index."""

import pathlib
from dataclasses import dataclass
from typing import Any

from llmpar.files import read_json, refuse


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
    objectives: tuple[str, ...] = ()
    keypoints: tuple[str, ...] = ()
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
        lists = (tuple(about.get(name, ())) for name in ("needs", "objectives", "keypoints"))
        facts = (about[name] for name in ("question", "teaching", "exercises"))
        lessons.append(Lesson(path.name, title, *facts, *lists))
    return lessons
