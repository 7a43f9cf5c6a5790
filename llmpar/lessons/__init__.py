"""Exercises: a lesson leaves a blank, this package answers for it. Solutions are here, not in the lessons.

In a lesson, the learner replaces the dots and runs the cell again:

    bytes_sent = ...
    attempt("03.bytes_sent", bytes_sent)

`hint("03.bytes_sent")` helps a step at a time, `solution("03.bytes_sent")` answers after an attempt, and
`met("03.bytes_sent", found)` sets the first answer beside what the compiled program says. What answers a bet
stays shut until the bet is given: `if opened("03.bytes_sent"): show(…)`.

What is said stands in the page `llmpar/lessons/03.md`, under the same name: hints, why the solution is
right, wrong answers, and for each of them the sentence that helps (`pages` has the form). An exercise whose
answer is a number, a text, or a formula of what the lesson passes by keyword stands there alone. An answer
with several named parts is judged part by part.

Any other has a function of that name in `llmpar/lessons/03.py`, with the solution, and wrong answers that
are functions. `observe` turns an answer into what is compared: a function is known by what it does.
"""

import contextlib
import importlib
import inspect
import os
import pathlib
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import Any

from llmpar.lessons.judge import CORRECT, NOT_ATTEMPTED, Exercise, stated
from llmpar.lessons.pages import sentences
from llmpar.lessons.record import answers, as_text, note

__all__ = [
    "CORRECT",
    "NOT_ATTEMPTED",
    "Exercise",
    "attempt",
    "find",
    "hint",
    "met",
    "opened",
    "say",
    "solution",
]

COLUMNS = 88
"""What a lesson shows on a screen 1200 px wide, as in its code."""
GIVEN: dict[str, dict[str, Any]] = {}
"""What this notebook has passed to each exercise: its hints and its solution speak of the same numbers."""
HINTS_GIVEN: Counter[str] = Counter()
"""How many hints of each exercise this notebook has given."""
FIRST_ANSWERS: dict[str, str] = {}
"""The first answer of this notebook to each exercise, wherever the answers could not be noted."""


def lesson_numbers() -> list[str]:
    """List the numbers of the lessons that have exercises."""
    return sorted(file.stem for file in pathlib.Path(__file__).parent.glob("[0-9][0-9]*.md"))


def exercises(lesson: str) -> list[str]:
    """List the exercises of a lesson, in the order of its page."""
    return list(sentences(lesson)) if lesson in lesson_numbers() else []


def names(*chosen: str) -> list[str]:
    """List the exercises of these lessons, or of all, as `find` takes them: '03.sent'."""
    return [
        f"{lesson}.{name}" for lesson in chosen or lesson_numbers() for name in exercises(lesson)
    ]


def find(name: str, **given: Any) -> Exercise:
    """Look up an exercise by the number of its lesson and its name, as in '03.bytes_sent'."""
    lesson, _, own = name.partition(".")
    if own not in exercises(lesson):
        known = ", ".join(names(lesson)) or "none in that lesson"
        raise ValueError(f"there is no exercise {name!r}; there are {known}")
    says = sentences(lesson)[own]
    if "answer" in says:
        return stated(name, says, **given)
    return getattr(importlib.import_module(f"{__name__}.{lesson}"), own)(**given).with_sentences(
        name, says
    )


def attempt(name: str, answer: Any, **given: Any) -> None:
    """Print the verdict on the learner's answer, and note both (`llmpar progress` shows them)."""
    exercise = find(name, **given)
    GIVEN[name] = given
    verdict = exercise.judge(answer, HINTS_GIVEN[name])
    blank = verdict == NOT_ATTEMPTED
    nudged = exercise.nudge(HINTS_GIVEN[name]) in verdict
    more = f'; hint("{name}") helps' * blank + f' hint("{name}") says more.' * nudged
    say(f"{name} ({exercise.level}): {verdict}{more}")
    HINTS_GIVEN[name] += nudged
    if blank:
        return
    FIRST_ANSWERS.setdefault(name, as_text(answer))
    if problem := note(name, answer, verdict):
        say(problem)
    if getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)() is not None:
        show_devices(exercise, answer)


def show_devices(exercise: Exercise, answer: Any) -> None:
    """Show in a notebook what each device sends and holds; for an answer that fails, nothing."""
    from llmpar.draw.scene import show
    from llmpar.lessons.spread import drawn

    with contextlib.suppress(Exception):
        for given in exercise.devices(answer):
            show(drawn(*given))


def hint(name: str) -> None:
    """Print the next hint for an exercise; each says a little more, and the last one stays."""
    hints = find(name, **GIVEN.get(name, {})).hints() or [
        "this one has none; a wrong answer helps."
    ]
    number = min(HINTS_GIVEN[name], len(hints) - 1)
    HINTS_GIVEN[name] += 1
    say(f"{name}, hint {number + 1} of {len(hints)}: {hints[number]}")
    if number == len(hints) - 1:
        say(f'That was the last one. solution("{name}") answers, once you have tried.')


def solution(name: str) -> None:
    """Print the solution of an exercise and why it is right, after an attempt."""
    text = solved(name, **GIVEN.get(name, {}))
    if first_answer(name) is None:
        text = f"{name}: answer first, even by a guess; then ask again."
        text += f' hint("{name}") helps a step at a time.'
    say(text)


def solved(name: str, **given: Any) -> str:
    """Return the solution of an exercise, and why it is right."""
    exercise = find(name, **given)
    return f"{name}: {spelt_out(exercise.solution)}\nWhy: {exercise.says['because']}"


def met(name: str, result: Any, what: str = "compiled") -> None:
    """Print the learner's first answer beside the result. Before an answer, ask for one; with LLMPAR_OPEN=1,
    as in stored pages, print the result alone."""
    find(name, **GIVEN.get(name, {}))
    first = first_answer(name)
    if first is None and os.environ.get("LLMPAR_OPEN"):
        say(f"{what} {in_short(result)} (a running copy asks first)")
    elif first is None:
        say(
            f"answer {name} first, then run this cell again: it compares your answer with the result"
        )
    else:
        say(f"you said {in_short(first)}; {what} {in_short(result)}")


def opened(name: str) -> bool:
    """Tell whether what answers a bet may be shown: once it is given, or with LLMPAR_OPEN=1. Else print
    that."""
    if os.environ.get("LLMPAR_OPEN") or first_answer(name) is not None:
        return True
    say(
        f"shut until {name} is answered: a guess will do, then run this cell again\n"
        "(to open everything: import os; os.environ['LLMPAR_OPEN'] = '1')"
    )
    return False


def say(text: object, hanging: int = 0) -> None:
    """Print sentences on lines that a notebook shows whole; JupyterLab breaks longer ones inside words.
    Broken lines are indented by ``hanging`` columns."""
    for line in str(text).splitlines():
        print("\n".join(_broken(line, COLUMNS, hanging)))


def say_command(line: str) -> None:
    """Print a command of the shell on such lines, broken before its options only."""
    words = " ".join(option.replace(" ", "\0") for option in re.split(" (?=-)", line))
    print(" \\\n".join(part.replace("\0", " ") for part in _broken(words, COLUMNS - 2, 2)))


def _broken(line: str, columns: int, hanging: int) -> list[str]:
    """Break a line between words."""
    return textwrap.wrap(
        line,
        columns,
        subsequent_indent=" " * hanging,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [line]


def first_answer(name: str) -> str | None:
    """Return the learner's first answer to an exercise as text, from the file or from this notebook."""
    with contextlib.suppress(OSError, ValueError):
        return next(
            (answer.answer for answer in answers() if answer.exercise == name),
            FIRST_ANSWERS.get(name),
        )
    return FIRST_ANSWERS.get(name)


def in_short(value: Any) -> str:
    """Write an answer on one line, its parts in a row; whole numbers with commas, others in four digits."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {in_short(part)}" for name, part in value.items())
    lines = as_text(value).splitlines()
    if len(lines) > 1:
        return ", ".join(in_short(line.strip()) for line in lines)
    text = "".join(lines)
    name, colon, rest = text.rpartition(": ")
    with contextlib.suppress(ValueError):
        number = float(rest)
        shown = f"{number:,.0f}" if number.is_integer() else f"{number:.4g}"
        return f"{name} {shown}" if colon else shown
    return text


def spelt_out(value: Any) -> str:
    """Write a solution for people: numbers as they are said, functions as their source."""
    if callable(value):
        return "\n" + textwrap.dedent(inspect.getsource(value)).rstrip()
    if isinstance(value, Mapping):
        return "".join(f"\n  {name}: {spelt_out(part).lstrip()}" for name, part in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(spelt_out, value))
    if isinstance(value, str):
        return "\n" + value if "\n" in value else value
    whole = value is not None and not isinstance(value, bool) and float(value) == int(value)
    return (
        f"{int(value):,}" if whole else f"{value:.4g}" if isinstance(value, float) else str(value)
    )
