"""Note what a learner has answered, in one file beside the notebooks, and sum it up: for course platforms,
and as a page, which learners hand in and teachers collect.

The file `answers.jsonl` has one JSON object per answer, in the folder in which the notebook runs;
LLMPAR_ANSWERS names another one. It stays on this machine. The same answer twice in a row is noted once.

The page repeats the learner's own answers with their times and whether they are right. It has no verdict's
words, no hint and no solution. Its document stands in it as JSON (`read_page`), so that it can be collected.
"""

import datetime
import html
import inspect
import json
import os
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_type_hints

from llmpar.files import read_json_lines, read_text, refuse
from llmpar.lessons.judge import CORRECT
from llmpar.lessons.pages import sentences

FILE = "answers.jsonl"
MAX_ANSWER = 2_000  # characters of an answer that are kept
_OPEN, _CLOSE = '<script type="application/json" id="report">', "</script>"
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Lessons: {learner}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.4 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; vertical-align: top; padding: .5em; border-bottom: 1px solid GrayText }}
pre {{ margin: 0; font-size: 14px; white-space: pre-wrap; overflow-wrap: anywhere }}
td:first-child {{ width: 32% }}
small {{ font-size: 14px }}
ol {{ margin: 0; padding-left: 1.5em }}
</style></head><body>
<h1>{learner}</h1>
<p>{num_given} of {num} exercises are answered, {num_correct} are correct. Times are UTC.</p>
<table><thead><tr><th>exercise</th><th>answers, the first one is the bet</th><th>tries</th>
<th>now</th></tr></thead><tbody>
{rows}</tbody></table>
{data}
</body></html>
"""


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


def document(given: Sequence[Attempt], levels: Mapping[str, str], name: str) -> dict[str, Any]:
    """Sum up what the learner ``name`` answered to the exercises in ``levels``, by name with their level: the
    answers with their times, oldest first, and whether one was right."""
    rows = []
    for exercise, level in levels.items():
        number, _, own = exercise.partition(".")
        question = sentences(number)[own].get("question", "")
        answers = [
            {"at": a.at, "answer": a.answer, "correct": a.correct}
            for a in given
            if a.exercise == exercise
        ]
        facts = {"exercise": exercise, "level": level, "question": question, "tries": len(answers)}
        right = any(one["correct"] for one in answers)
        rows.append(facts | {"correct": right, "answers": answers})
    return {
        "learner": name,
        "num_given": sum(bool(row["tries"]) for row in rows),
        "num_correct": sum(row["correct"] for row in rows),
        "exercises": rows,
    }


def page(report: Mapping[str, Any]) -> str:
    """Write a report as one HTML page, which fetches nothing."""
    shown = {key: html.escape(f"{value}") for key, value in report.items()}
    rows = "".join(_row(row) for row in report["exercises"])
    data = json.dumps(report).replace("</", "<\\/")  # "</" would end the script
    return _PAGE.format(
        num=len(report["exercises"]), rows=rows, data=_OPEN + data + _CLOSE, **shown
    )


def _row(row: Mapping[str, Any]) -> str:
    """Write the row of an exercise."""
    words = {True: "correct", False: "not yet"}
    answers = "".join(
        f"<li><pre>{html.escape(one['answer'])}</pre>"
        f"<small>{one['at'][:16].replace('T', ' ')}, {words[one['correct']]}</small></li>"
        for one in row["answers"]
    )
    state = words[row["correct"]] if row["tries"] else "not given"
    name = f"{row['exercise']} ({row['level']})<br><small>{html.escape(row['question'])}</small>"
    cells = name, f"<ol>{answers}</ol>", row["tries"], state
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"


def read_page(path: str | pathlib.Path) -> dict[str, Any]:
    """Read a report back from its page; ValueError for another file."""
    data = read_text(path, "report").partition(_OPEN)[2].partition(_CLOSE)[0]
    return json.loads(data or refuse(path, "report", "llmpar progress --report has not written it"))
