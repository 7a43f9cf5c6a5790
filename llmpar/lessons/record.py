"""Note what a learner has answered, in one file beside the notebooks, and sum it up.

The file `answers.jsonl` has one JSON object per answer, in the folder in which the notebook runs;
LLMPAR_ANSWERS names another one. It stays on this machine. The same answer twice in a row is noted once.
"""

import datetime
import inspect
import json
import os
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_type_hints

from llmpar.files import read_json_lines
from llmpar.lessons.judge import CORRECT

FILE = "answers.jsonl"
MAX_ANSWER = 2_000  # characters of an answer that are kept


@dataclass(frozen=True)
class Attempt:
    """One answer to one exercise, and its verdict."""

    exercise: str
    answer: str
    verdict: str
    correct: bool
    at: str = ""  # UTC, ISO 8601


def now() -> str:
    """Return the time in UTC, as notes have it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def as_text(answer: Any) -> str:
    """Write an answer as text: a function by its source where there is one."""
    if isinstance(answer, Mapping):
        return "\n".join(f"{name}: {as_text(part)}" for name, part in answer.items())
    if callable(answer):
        try:
            return textwrap.dedent(inspect.getsource(answer)).strip()
        except (OSError, TypeError):
            return getattr(answer, "__name__", "a function")
    return str(answer)


def file(folder: str = ".") -> pathlib.Path:
    """Name the file of answers."""
    return pathlib.Path(os.environ.get("LLMPAR_ANSWERS") or pathlib.Path(folder) / FILE)


def answers(folder: str = ".") -> list[Attempt]:
    """Read all answers, the oldest first; refuse a file that is something else."""
    path = file(folder)
    if not os.path.lexists(path):
        return []
    try:
        rows = read_json_lines(path, "file of answers")
        for number, row in enumerate(rows, 1):
            kinds = {name: type(value) for name, value in ({"at": ""} | row).items()}
            if kinds != (fields := get_type_hints(Attempt)):
                wanted = ", ".join(f"{name} ({kind.__name__})" for name, kind in fields.items())
                raise ValueError(f"object {number} is no answer, which has {wanted}")
    except ValueError as error:
        raise ValueError(
            f"'{path}' is no file of answers ({error}); move it away, or set LLMPAR_ANSWERS to another name"
        ) from error
    return [Attempt(**row) for row in rows]


def note(exercise: str, answer: Any, verdict: str) -> str:
    """Add an answer to the file; return a sentence where that cannot be."""
    given = Attempt(
        exercise, as_text(answer)[:MAX_ANSWER], verdict, verdict.startswith(CORRECT), now()
    )
    try:
        last = next((a for a in reversed(answers()) if a.exercise == exercise), None)
        if last is None or (last.answer, last.correct) != (given.answer, given.correct):
            with file().open("a", encoding="utf-8") as out:
                out.write(json.dumps(asdict(given)) + "\n")
    except (OSError, ValueError) as error:
        return f"(This answer was not noted: {error})"
    return ""


def results(given: Sequence[Attempt], levels: Mapping[str, str]) -> dict[str, Any]:
    """Sum answers up as course platforms read it: the results.json of Otter-Grader and Gradescope.

    An exercise has one point, if it was ever right. ``levels`` names all exercises with their level. Nothing
    is judged again: these are notes for learners and teachers, and no examination.
    """
    tests = []
    for name, level in levels.items():
        tries = [answer for answer in given if answer.exercise == name]
        right = any(answer.correct for answer in tries)
        tests.append(
            {
                "name": name,
                "score": float(right),
                "max_score": 1.0,
                "status": "passed" if right else "failed",
                "output": tries[-1].verdict if tries else "not attempted",
                "extra_data": {
                    "level": level,
                    "tries": len(tries),
                    "first_correct": bool(tries) and tries[0].correct,
                    "answers": [asdict(answer) for answer in tries],
                },
            }
        )
    return {
        "score": sum(test["score"] for test in tests),
        "max_score": float(len(tests)),
        "tests": tests,
    }
