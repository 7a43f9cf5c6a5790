"""``llmpar progress``: which exercises are answered."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

from llmpar import exercises
from llmpar.cli.options import emit, speaks
from llmpar.exercises import record

FOLDERS = (".", "lessons", "notebooks")
"""Where learners work; the first with a file of answers is taken."""


@dataclass(frozen=True)
class Progress:
    """Show which exercises of the lessons are answered, and how often each was tried.

    Attributes:
        folder: where you answered; by default this folder, lessons or notebooks.
        json: print one JSON document on stdout, as Otter-Grader and Gradescope read it (results.json).
    """

    folder: str | None = None
    json: bool = False

    def run(self) -> None:
        """Print the table."""
        if self.folder is not None and not pathlib.Path(self.folder).is_dir():
            raise ValueError(f"there is no folder '{self.folder}'; name the one in which you answered")
        folder = self.folder or next((name for name in FOLDERS if record.file(name).exists()), ".")
        levels = {name: exercises.find(name).level for name in exercises.names()}
        document = record.results(record.answers(folder), levels)
        emit(document, self.json)
        if self.json or not speaks():
            return
        for test in document["tests"]:
            tries = test["extra_data"]["tries"]
            said = "correct" if test["score"] else "not yet" if tries else ""
            times = f"{tries} {'try' if tries == 1 else 'tries'}" if tries else ""
            print(f"{test['name']:<28}{test['extra_data']['level']:<9}{times:<9}{said}".rstrip())
        left = next((test["name"] for test in document["tests"] if not test["score"]), None)
        print(
            f"{document['score']:g} of {document['max_score']:g} correct"
            + (f"; the next one is {left}" if left else ", which is all")
        )
