"""Exercises: a lesson leaves a blank, this package answers for it. The solutions are here and nowhere in the lessons.

In a lesson, the learner replaces the dots and runs the cell again:

    bytes_sent = ...
    attempt("03.bytes_sent", bytes_sent)

In `exercises/03.py` stands a function of that name. It takes what the lesson passes by keyword (with the lesson's own
values as defaults) and describes the exercise: the solution, and the answers that people give when one thing is not yet
clear, each with the sentence that helps. An answer may be a value or a function; `observe` turns it into what is
compared, so that a learner's function is recognised by what it does.

    def bytes_sent(devices: int = 8) -> Exercise:
        '''Ask how many bytes a device sends in a ring all-reduce of 1 MiB.'''
        size = 2**20
        return Exercise(
            level="core",
            solution=2 * size * (devices - 1) // devices,
            wrong=[(size, "That is the size of the result; …"), (2 * size, "…"), (size * (devices - 1), "…")],
            hint="A ring all-reduce is a reduce-scatter, then an all-gather.",
        )

`tests/test_notebooks.py` judges every blank, solution and wrong answer.
"""

from __future__ import annotations

import dis
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

NOT_ATTEMPTED = "not attempted yet: replace the dots and run this cell again"
CORRECT = "correct"


@dataclass(frozen=True)
class Exercise:
    """Describe one exercise: its answer, plausible wrong answers with a sentence for each, a hint for all others."""

    level: Literal["core", "stretch", "expert"]
    solution: Any
    wrong: Sequence[tuple[Any, str]]
    hint: str
    observe: Callable[[Any], Any] = lambda answer: answer
    tolerance: float = 1e-5  # relative; answers are float32 results or numbers rounded by hand

    def judge(self, answer: Any) -> str:
        """Return the verdict on an answer as one sentence."""
        if is_blank(answer):
            return NOT_ATTEMPTED
        try:
            seen = self.observe(answer)
            if is_blank(seen):
                return NOT_ATTEMPTED
            if same(seen, self.observe(self.solution), self.tolerance):
                return CORRECT
            for planted, sentence in self.wrong:
                if same(seen, self.observe(planted), self.tolerance):
                    return f"not yet. {sentence}"
        except Exception as error:  # the learner's own code runs here: whatever it raises is the learner's to read
            return f"not yet. Your answer raised {type(error).__name__}: {error}"
        return f"not yet. {self.hint}"


def is_blank(answer: Any) -> bool:
    """Tell whether an answer still has its dots: `...` itself, somewhere in a container, or a function with no body."""
    if answer is ...:
        return True
    if inspect.isfunction(answer):
        steps = [step for step in dis.get_instructions(answer) if step.opname not in ("RESUME", "NOP")]
        return all(step.opname.startswith(("LOAD_CONST", "RETURN")) and step.argval is None for step in steps)
    if isinstance(answer, Mapping):
        return any(is_blank(value) for value in answer.values())
    return isinstance(answer, list | tuple | set) and any(is_blank(value) for value in answer)


def same(one: Any, other: Any, tolerance: float) -> bool:
    """Compare two answers: texts but for spacing, numbers and arrays within a relative tolerance, the rest exactly."""
    if isinstance(one, str) and isinstance(other, str):
        return one.split() == other.split()
    if isinstance(one, bool | str) or isinstance(other, bool | str) or one is None or other is None:
        return type(one) is type(other) and one == other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key], tolerance) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if hasattr(one, "shape") and hasattr(other, "shape") and (one.shape or other.shape):
        import numpy as np

        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        scale = np.abs(other).max(initial=0)
        return one.shape == other.shape and bool(np.all(np.abs(one - other) <= tolerance * scale))
    try:
        return math.isclose(float(one), float(other), rel_tol=tolerance)
    except (TypeError, ValueError):
        return type(one) is type(other) and bool(one == other)


def exercises(lesson: str) -> dict[str, Callable[..., Exercise]]:
    """List the exercises of a lesson: the functions in its file that say they return an `Exercise`."""
    if importlib.util.find_spec(f"{__name__}.{lesson}") is None:
        return {}
    functions = inspect.getmembers(importlib.import_module(f"{__name__}.{lesson}"), inspect.isfunction)
    return {name: f for name, f in functions if inspect.signature(f).return_annotation in (Exercise, "Exercise")}


def find(name: str, **given: Any) -> Exercise:
    """Look up an exercise by the number of its lesson and its name, as in '03.bytes_sent'."""
    lesson, _, function = name.partition(".")
    known = exercises(lesson)
    if function not in known:
        there = ", ".join(f"{lesson}.{other}" for other in known) or "none in that lesson"
        raise ValueError(f"there is no exercise {name!r}; there are {there}")
    return known[function](**given)


def attempt(name: str, answer: Any, **given: Any) -> None:
    """Print the verdict on the learner's answer."""
    exercise = find(name, **given)
    print(f"{name} ({exercise.level}): {exercise.judge(answer)}")
