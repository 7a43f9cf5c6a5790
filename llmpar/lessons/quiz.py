"""The quiz before and after a workshop: one question for each lesson, judged as exercises are, and three
self-ratings from 1 (not at all) to 5 (I could teach it). Both stand in `quiz.md`.

Results are plain data, so that the effect of a workshop can be computed: `effect`.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from llmpar.lessons.judge import CORRECT, Exercise, stated
from llmpar.lessons.pages import sentences
from llmpar.lessons.record import now


def _question(lesson: str, says: Mapping[str, str]) -> tuple[str, Exercise]:
    """Return a question, and the exercise that judges it. There is no second try: the hint is the reason."""
    says = {"tolerance": "0.01", "hint": says["because"], **says}
    return says["question"], stated(f"question {lesson}", says)


RATINGS = sentences("quiz")["ratings"]
"""What learners rate, by name."""
QUESTIONS = {
    name: _question(name, says) for name, says in sentences("quiz").items() if name != "ratings"
}
"""The number of a lesson: its question, and the exercise that judges the answer."""


def score(when: str, answers: Mapping[str, Any], ratings: Mapping[str, int]) -> dict[str, Any]:
    """Judge a quiz, taken before or after: answers by lesson, ratings by name; gives plain data."""
    if when not in ("before", "after"):
        raise ValueError(f"a quiz is taken before or after, not '{when}'")
    for name, rating in ratings.items():
        if name not in RATINGS or rating not in range(1, 6):
            raise ValueError(f"{name}={rating} is no rating; use 1 to 5 for {', '.join(RATINGS)}")
    if unknown := sorted(set(answers) - set(QUESTIONS)):
        raise ValueError(f"there is no question {unknown[0]!r}; they are {', '.join(QUESTIONS)}")
    items: list[dict[str, Any]] = []
    for lesson, (question, exercise) in QUESTIONS.items():
        given = answers.get(lesson)
        left_out = f"left out. {exercise.says['because']}"
        verdict = left_out if given is None else exercise.judge(given)
        items.append(
            {
                "lesson": lesson,
                "question": question,
                "answer": given,
                "correct": verdict.startswith(CORRECT),
                "verdict": verdict,
            }
        )
    return {
        "when": when,
        "at": now(),
        "score": sum(item["correct"] for item in items),
        "max_score": len(items),
        "ratings": dict(ratings),
        "items": items,
    }


def effect(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare before and after over all results: how many there are, the mean score as a fraction, and the
    mean of each rating; None without any answer."""
    both = ("before", "after")
    for number, result in enumerate(results, 1):
        score, most, ratings = (result.get(name) for name in ("score", "max_score", "ratings"))
        if result.get("when") not in both:
            raise ValueError(
                f"result {number} is of when={result.get('when')!r}, neither before nor after"
            )
        known = isinstance(ratings, dict) and all(
            rating in range(1, 6) for rating in ratings.values()
        )
        if not (type(score) is type(most) is int and 0 <= score <= most > 0 and known):
            raise ValueError(
                f"result {number} is none of this quiz: it needs score, max_score, ratings of 1 to 5"
            )
    out: dict[str, dict[str, Any]] = {name: {} for name in ("num", "score", *RATINGS)}
    for when in both:
        taken = [result for result in results if result["when"] == when]
        values = {
            name: [r["ratings"][name] for r in taken if name in r["ratings"]] for name in RATINGS
        }
        values |= {"score": [r["score"] / r["max_score"] for r in taken]}
        out["num"][when] = len(taken)
        for name, numbers in values.items():
            out[name][when] = statistics.fmean(numbers) if numbers else None
    return out
