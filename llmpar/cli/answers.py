"""``llmpar progress``, ``solutions`` and ``quiz``: what learners have answered, and what is right."""

import contextlib
import json
import math
import os
import pathlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from llmpar import lessons
from llmpar.cli.options import File, Folder, OptionalText, Output, give, inform
from llmpar.files import check_ordinary, read_json_lines
from llmpar.lessons import quiz, record
from llmpar.lessons.judge import CORRECT, Exercise, as_number

_FOLDERS = (".", "lessons", "notebooks")
"""Where learners work; the first with a file of answers is taken."""


def _names(lesson: str | None) -> list[str]:
    """List the exercises of a lesson, or of all."""
    known = lessons.lesson_numbers()
    if lesson not in (None, *known):
        raise ValueError(f"lesson {lesson!r} has no exercises; there are {', '.join(known)}")
    return lessons.names(*filter(None, [lesson]))


@dataclass(frozen=True)
class Progress(Output):
    """Show which exercises of the lessons are answered, and how often each was tried.

    With --report, write one page for a teacher: your answers, when you gave and changed them, and whether
    they are right. It holds no solution. Of a folder of such pages, print a table.

    Attributes:
        folder: where you answered; by default this folder, lessons or notebooks.
        lesson: its number, such as 03; None: all lessons.
        report: write an HTML page of this name, as anna.html; a file that exists is left as it is. If it is a
            folder, print a row for each page in it.
        json: print one JSON document on stdout: what the pages of --report say, else what Otter-Grader and
            Gradescope read (results.json).
    """

    folder: Folder = None
    lesson: OptionalText = None
    report: File = None

    def run(self) -> None:
        if self.folder is not None and not os.path.isdir(self.folder):
            raise ValueError(
                f"there is no folder '{self.folder}'; name the one in which you answered"
            )
        folder = self.folder or next((name for name in _FOLDERS if record.file(name).exists()), ".")
        levels = {name: lessons.find(name).level for name in _names(self.lesson)}
        given = record.answers(folder)
        if self.report is not None:
            return self.hand_in(pathlib.Path(self.report), given, levels)
        document, lines = record.results(given, levels), []
        for test in document["tests"]:
            tries = test["extra_data"]["tries"]
            verdict = "correct" if test["score"] else "not yet" if tries else ""
            times = f"{tries} {'try' if tries == 1 else 'tries'}" if tries else ""
            lines += [
                f"{test['name']:<28}{test['extra_data']['level']:<9}{times:<9}{verdict}".rstrip()
            ]
        left = next((test["name"] for test in document["tests"] if not test["score"]), None)
        whole = f"; the next one is {left}" if left else ", which is all"
        lines += [f"{document['score']:g} of {document['max_score']:g} correct{whole}"]
        give(document, self.json, lines)

    def hand_in(self, path: pathlib.Path, given, levels: Mapping[str, str]) -> None:
        """Write the page, or read a folder of pages; print a row for each."""
        pages = [record.document(given, levels, path.stem)]
        try:
            if path.is_dir():
                pages = [record.read_page(page) for page in sorted(path.glob("*.html"))]
            else:
                with path.with_suffix(".html").open("x", encoding="utf-8") as file:
                    file.write(record.page(pages[0]))
                inform(f"wrote {file.name}")
        except OSError as error:
            raise ValueError(
                f"cannot write the report '{path}' ({error.strerror}); give another name"
            ) from error
        if not pages:
            raise ValueError(f"'{path}' has no page of a report; give a folder of such pages")
        row = "{learner:<24}{num_given:>4} answered{num_correct:>4} correct".format
        give({"reports": pages}, self.json, [row(**page) for page in pages])


@dataclass(frozen=True)
class Solutions(Output):
    """Print the solutions of exercises, and why they are right: for teachers. Learners ask in the lesson.

    Attributes:
        lesson: its number, such as 03; None: all lessons.
    """

    lesson: OptionalText = None

    def run(self) -> None:
        solutions = {name: lessons.solved(name) for name in _names(self.lesson)}
        give({"solutions": solutions}, self.json)
        if not self.json:
            lessons.say("\n\n".join(solutions.values()))


@dataclass(frozen=True)
class Quiz:
    """Take the quiz that scores itself: one question for each lesson, and three self-ratings.

    Answers are read line by line; an empty line leaves a question out. Before the workshop only the score is
    printed, so that the same questions serve again; after it, the right answers and why.

    Attributes:
        after: the workshop is over.
        file: where the results are kept, one JSON object a line.
        effect: compare before and after over the results in FILE, and ask nothing.
        json: print the results as one JSON document on stdout.
    """

    after: bool = False
    file: str = "quiz.jsonl"
    effect: bool = False
    json: bool = False

    def run(self) -> None:
        path = pathlib.Path(self.file)
        if self.effect:
            return self.compare(path)
        if path.exists():
            check_ordinary(path, "file of results")
        try:
            results = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"cannot note results in '{path}' ({error.strerror}); give --file"
            ) from error
        with results:
            result = self.ask()
            results.write(json.dumps(result) + "\n")
        give(result, self.json)
        if self.after:
            for item in result["items"]:
                mark = "right" if item["correct"] else "     "
                inform(f"{item['lesson']} {mark} {item['verdict'].removeprefix(CORRECT + '. ')}")
        inform(f"{result['score']} of {result['max_score']} right; noted in {path}")

    def ask(self) -> dict:
        """Ask for ratings and answers, and judge them."""
        inform("Numbers only, as 120, 0.75 or 2/9; an empty line leaves a question out.\n")
        ratings = {}
        for name, words in quiz.RATINGS.items():
            rating = _asked(f"From 1 (not at all) to 5 (I could teach it): I can {words}.")
            if rating not in (None, *range(1, 6)):
                raise ValueError(f"a rating is 1 to 5, not {rating:g}; start again")
            if rating is not None:
                ratings[name] = int(rating)
        answers = {
            lesson: _asked(f"{lesson}. {question}", exercise)
            for lesson, (question, exercise) in quiz.QUESTIONS.items()
        }
        given = {lesson: answer for lesson, answer in answers.items() if answer is not None}
        return quiz.score("after" if self.after else "before", given, ratings)

    def compare(self, path: pathlib.Path) -> None:
        try:
            effect = quiz.effect(read_json_lines(path, "file of results"))
        except ValueError as error:
            raise ValueError(f"cannot read results from '{path}': {error}") from error
        lines = []
        for name, means in effect.items():
            form = "{}" if name == "num" else "{:.2f}"
            shown = ("-" if value is None else form.format(value) for value in means.values())
            lines += [f"{name:<10}{' -> '.join(shown)}"]
        give(effect, self.json, lines)


def _asked(question: str, exercise: Exercise | None = None) -> float | None:
    """Ask for a number, which may be written as answers of an exercise are; an empty line is None. At a
    terminal, what is no number is asked for again."""
    inform(question)
    while line := sys.stdin.readline():
        # a decimal comma: 0,2 is 0.2, and 309,000 stays
        if not (line := re.sub(r"(?<=\d),(?=(?:\d\d?|\d{4,})\b)", ".", line.strip())):
            return None
        with contextlib.suppress(ValueError):
            number = as_number(line, exercise.solution, exercise) if exercise else line
            if math.isfinite(float(number)):
                return float(number)
        if not sys.stdin.isatty():
            inform("That is no number, so it is left out.")
            return None
        inform("That is no number. Write it alone, or leave the line empty.")
    raise ValueError("the input ended before the last question, so nothing is noted; start again")
