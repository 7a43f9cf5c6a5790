"""``llmpar quiz``: fourteen questions and three self-ratings, before a workshop and after it."""

from __future__ import annotations

import json
import pathlib
import sys
from dataclasses import dataclass

from llmpar.cli.options import emit, say
from llmpar.exercises import quiz
from llmpar.exercises.judge import CORRECT


@dataclass(frozen=True)
class Quiz:
    """Take the quiz that scores itself: one question for each lesson, and three self-ratings.

    Answers are read line by line; an empty line leaves a question out. Before, only the number of right ones
    is told, so that the same questions serve again; after, what is right and why.

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
        """Ask, judge and note; or compare."""
        path = pathlib.Path(self.file)
        if self.effect:
            self.compare(path)
            return
        say("Numbers only; an empty line leaves a question out.\n")
        ratings: dict[str, int] = {}
        for name, words in quiz.RATINGS.items():
            rating = asked(f"From 1 (not at all) to 5 (I could teach it): I can {words}.")
            if rating is not None:
                ratings[name] = int(rating) if rating in range(1, 6) else 0
                if not ratings[name]:
                    raise ValueError(f"a rating is 1 to 5, not {rating:g}; start again")
        answers = {lesson: asked(f"{lesson}. {question}") for lesson, (question, _) in quiz.QUESTIONS.items()}
        given = {lesson: answer for lesson, answer in answers.items() if answer is not None}
        result = quiz.score("after" if self.after else "before", given, ratings)
        with path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(result) + "\n")
        emit(result, self.json)
        if self.after:
            for item in result["items"]:
                mark = "right" if item["correct"] else "     "
                say(f"{item['lesson']} {mark} {item['verdict'].removeprefix(CORRECT + '. ')}")
        say(f"{result['score']} of {result['max_score']} right; noted in {path}")

    def compare(self, path: pathlib.Path) -> None:
        """Print the means before and after."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            found = quiz.effect([json.loads(line) for line in lines if line])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"cannot read results from '{path}': {error}") from error
        emit(found, self.json)
        if not self.json:
            for name, means in found.items():
                shown = (
                    "-" if value is None else f"{value:.2f}" if name != "num" else str(value)
                    for value in means.values()
                )
                print(f"{name:<10}{' -> '.join(shown)}")


def asked(question: str) -> float | None:
    """Ask for a number; an empty line is None."""
    say(question)
    line = sys.stdin.readline().strip().replace(",", "")
    try:
        return float(line.removesuffix("%")) / (100 if line.endswith("%") else 1) if line else None
    except ValueError:
        say("That is no number, so it is left out.")
        return None
