"""``llmpar solutions``: what is right in the lessons' exercises, for those who teach them."""

from __future__ import annotations

from dataclasses import dataclass

from llmpar import exercises
from llmpar.cli.options import emit, speaks


@dataclass(frozen=True)
class Solutions:
    """Print the solutions of exercises, and why they are right. For teachers: learners have `solution(...)`
    in the lesson, after an attempt.

    Attributes:
        lesson: its number, such as 03; None: all lessons.
        json: print one JSON document on stdout.
    """

    lesson: str | None = None
    json: bool = False

    def run(self) -> None:
        """Print them in the order of the lessons."""
        known = exercises.lessons()
        if self.lesson not in (None, *known):
            raise ValueError(f"lesson {self.lesson!r} has no exercises; there are {', '.join(known)}")
        names = exercises.names(self.lesson) if self.lesson else exercises.names()
        found = {name: exercises.solved(name) for name in names}
        emit({"solutions": found}, self.json)
        if not self.json and speaks():
            exercises.say("\n\n".join(found.values()))
