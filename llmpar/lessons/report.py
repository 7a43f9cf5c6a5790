"""Write what a learner has answered as one page, which learners hand in and teachers collect.

The page repeats the learner's own answers with their times and whether they are right. It has no verdict's
words, no hint and no solution. Its document stands in it as JSON (`read_page`), so that it can be collected.
"""

import html
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from llmpar.files import read_text, refuse
from llmpar.lessons.pages import sentences
from llmpar.lessons.record import Attempt

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
