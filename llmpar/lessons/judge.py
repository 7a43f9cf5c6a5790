"""Judge an answer: right and why, or what is wrong with it, in one sentence."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import itertools
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

from llmpar.lessons.number_words import NEXT_UNIT, in_figures

NOT_ATTEMPTED = "replace the dots"
CORRECT = "correct"
BYTES = {
    "bytes": 1,
    "KiB": 2**10,
    "kB": 1e3,
    "MiB": 2**20,
    "MB": 1e6,
    "GiB": 2**30,
    "GB": 1e9,
    "TiB": 2**40,
    "TB": 1e12,
}
_UNITS = (
    BYTES,
    {"a fraction of 1": 1, "times": 1, "per cent": 0.01},
    {
        "weeks": 604800,
        "days": 86400,
        "hours": 3600,
        "minutes": 60,
        "seconds": 1,
        "ms": 1e-3,
        "µs": 1e-6,
    },
)
"""Units that people count the same thing in, and their sizes."""
SPELLINGS = {
    "B": "bytes",
    "KB": "kB",
    "%": "per cent",
    "percent": "per cent",
    "d": "days",
    "h": "hours",
    "s": "seconds",
    "hr": "hours",
    "min": "minutes",
    "mins": "minutes",
    "sec": "seconds",
    "us": "µs",
    "μs": "µs",
    "microseconds": "µs",
    "a2a": "all-to-all",
    "all to all single": "all-to-all",
    "psum": "all-reduce",
    "psum scatter": "reduce-scatter",
    "ppermute": "collective-permute",
    "col": "columns",
    "d m/tp": "columns",
    "m/tp d": "rows",
    "d/tp m": "rows",
    "equal": "the same",
    "equally many": "as many",
    "just as many": "as many",
    "as many byte": "as many",
    "grad": "gradients",
    "doe not fit": "too large",
    "unchanged": "the same",
    "no change": "the same",
    "no difference": "the same",
    "same number of": "as many",
    "fewer": "less",
    "larger": "more",
    "increase": "more",
    "much more": "more",
    "block of column": "columns",
    "block of row": "rows",
    "vertical": "columns",
    "vertically": "columns",
    "column parallel": "columns",
    "horizontal": "rows",
    "horizontally": "rows",
    "row parallel": "rows",
    "same amount": "as many",
    "same number": "as many",
    "as many as before": "as many",
    "too big": "too large",
    "doesn't fit": "too large",
    "oom": "too large",
    "correct": "right",
    "incorrect": "wrong",
    "not right": "wrong",
    "rejected": "refused",
    "error": "refused",
    "double": "twice",
    "2x": "twice",
    "2 time": "twice",
    "twice as much": "twice",
    "twice as many": "twice",
    "half as much": "half",
    "half as many": "half",
    "refuse": "refused",
    "y": "yes",
    "n": "no",
}
"""Units, collectives and cuts as others write them: JAX for one."""

# What may stand before a number that counts things, or behind it.
_COUNTED = re.compile(
    r"^((from |with )?(rank|dim|stage|device|gpu|step)?( ?number| ?no\.)?|×) *(?=\d)"
    r"|(?<=[\w.]) *(gpu|card|device|hop|collective|all-reduce|all-to-all|position|token|step|request|layer"
    r"|(micro-?)?batche?|flop|times( as long)?|x|×|psi|ψ|in all|in total)s?$"
)
_CALL = r"^(?:(?:an?|the) )?(?:\w+\.)*([\w-]+)(?:\(.*\)| over \w+)?$"
_IN_NUMBERS = {
    r"^after (?=\d+ )|[. ]+$"
    r"|^(?:(?:about|around|roughly|exactly|just|only|at (?:least|most)|max(?:imum)?|up to|the|=) ?)+": "",
    r"(?<=[A-Za-z]) ?(?:/|per|an?|each|in each) ?(?:step|token|request|device|worker|host)$": "",
    r"^(\d+)(?: and)? (?=\d+/\d+\b)": r"\1+",
    r"(?<=\d) *[x×] *(?=\d)": "*",
    r"\^": "**",
}
# What stands for yes and no: alone, in a sentence such as "no, they don't", or as the sentence alone.
_TRUTHS = {
    r"(?=\w)(?:y|yes|true)?\W*(?:(?:they|it|both) (?:do|does|is|are|can|will))?\W*": (
        "yes",
        "right",
    ),
    r"(?=\w)(?:n|no|false)?\W*(?:(?:they|it|both) (?:(?:do|does|is|are|will) not|(?:do|does|is|are)n['’]t"
    r"|cannot|can['’]t|won['’]t))?\W*": ("no", "wrong"),
}
# How people write what stands between dims and axes of a layout, and what the grammar has in its place.
_IN_LAYOUTS = {
    "=": "/",
    r"(?i)/ *(?:\[\]|\(\)|none|-)(?=[\s,;]|$)": "",
    r" +/ *|/ +(?=\w\w|[A-Z])": "/",
    r"/(?=[\s,;]|$)": "",
    r"\s*[×*;]\s*|\s(?:x|and)\s": " ",
    r",? *\+ *": " +",
    r",\s+(?=\w(?:[/,\s]|$))": " ",
    r"^[\s.[('\"`]+|[\s.\])'\"`]+$": "",
}


@dataclass(frozen=True)
class Exercise:
    """Describe one exercise. What is said of answers stands in the lesson's page (`pages`).

    Attributes:
        level: core, stretch or expert.
        solution: the answer.
        wrong: plausible wrong answers that are computed, by the key of the sentence that helps.
        observe: turns an answer into what is compared.
        tolerance: relative; answers are float32 results or numbers rounded by hand.
        unit: of numbers, one of `_UNITS` or a word that may stand behind them.
        counts: sentences in place of the hint that count for the learner: by key a function that gives the
            figures in the sentence for what was observed, or None where it does not fit.
        also: other right answers that are computed, by the key of why they are right.
        devices: of an answer that several devices run, what `spread.carried_out` is given, for each function.
        says: the sentences by key.
        given: the numbers of the lesson that formulas in the page speak of.
        spelt: other spellings of answers that are texts, each with the answer that it means.
    """

    level: Literal["core", "stretch", "expert"]
    solution: Any
    wrong: Mapping[str, Any] = field(default_factory=dict)
    observe: Callable[[Any], Any] = lambda answer: answer
    tolerance: float = 1e-5
    unit: str = ""
    counts: Mapping[str, Callable[[Any], Mapping[str, Any] | None]] = field(default_factory=dict)
    also: Mapping[str, Any] = field(default_factory=dict)
    devices: Callable[[Any], list[tuple]] = lambda answer: []
    says: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    spelt: Mapping[str, str] = field(default_factory=dict)

    def with_sentences(self, name: str, says: Mapping[str, str]) -> Exercise:
        """Return the exercise with its sentences, and with the answers that their keys spell in backticks
        (right ones behind an "or"). Refuse a key without a sentence, and a sentence with an unknown key."""
        reads = replace(self, spelt=_spellings(says.get("spelt", "")))
        says = {key: sentence for key, sentence in says.items() if key != "spelt"}
        wanted = {"because", *self.wrong, *self.also, *(self.counts or ["hint"])}
        spelt = [key for key in says if key.endswith("`")]
        planted = {
            key: as_meant(
                read_answer(key.split("`")[1], self.solution, self.given), self.solution, reads
            )
            for key in spelt
        }
        if missing := sorted(wanted - says.keys()):
            raise ValueError(f"{name} has no sentence for {', '.join(missing)}")
        unknown = says.keys() - wanted - planted.keys() - {"nudge", "in other calls"}
        unknown |= {key for key, answer in planted.items() if mismatch(answer, self.solution)}
        if unknown:
            raise ValueError(
                f"{name} has sentences for {', '.join(sorted(unknown))}, which mean nothing to it"
            )
        also = {**self.also, **{key: planted.pop(key) for key in spelt if key.startswith("or ")}}
        answers = {**self.wrong, **planted}
        wrong = {key: answers[key] for key in says if key in answers}
        return replace(reads, wrong=wrong, also=also, says=says)

    def judge(self, answer: Any, read: int = 0) -> str:
        """Return the verdict on an answer as one sentence; a learner who has ``read`` some hints gets the
        next one."""
        if is_blank(answer):
            return NOT_ATTEMPTED
        try:
            answer = as_meant(answer, self.solution, self)
            if fault := mismatch(answer, self.solution):
                return f"not yet. {fault}"
            right = self.observe(self.solution)
            seen = listed(self.observe(answer), right)
            if is_blank(seen):
                return NOT_ATTEMPTED
            if self.same(seen, right):
                return f"{CORRECT}. {self.says['because']}"
            for key, other in self.also.items():
                if self.same(seen, self.observe(other)):
                    return f"{CORRECT}. {self.says[key]}"
            advice = self.advice(seen, right, read)
            return advice if advice.startswith(CORRECT) else f"not yet. {advice}"
        # the learner's own code runs here, or a text is read
        except (Exception, SystemExit) as error:
            refused = isinstance(error, ValueError) and (
                isinstance(answer, str) or str(error).startswith("Your function")
            )
            what = "" if refused else f"Your answer raised {type(error).__name__}: "
            return f"not yet. {what}{str(error)[:600]}"

    def hints(self) -> list[str]:
        """List the hints, from the one that says least on."""
        return [line for key in ("nudge", "hint") for line in self.says.get(key, "").splitlines()]

    def nudge(self, read: int) -> str:
        """Return the hint after those that were ``read``; never the last one, which may be the formula."""
        nudges = self.says.get("nudge", self.says.get("hint", "")).splitlines() or [""]
        return nudges[min(read, len(nudges) - 1)]

    def same(self, one: Any, other: Any) -> bool:
        """Compare within the exercise's tolerance."""
        return same(one, other, self.tolerance)

    def advice(self, seen: Any, right: Any, read: int) -> str:
        """Return the sentence that helps after the answer `seen`."""
        planted = [(self.observe(wrong), self.says[key]) for key, wrong in self.wrong.items()]
        rounded = (right, "That is the right value, rounded. Here it can be exact.")
        for value, sentence in sorted(
            [rounded, *planted], key=lambda row: not self.same(seen, row[0])
        ):
            if self.meant(seen, value):
                return sentence
        if fault := turned(seen, right) or mismatch(seen, right):
            return fault
        if isinstance(right, Mapping):
            return self.part_by_part(seen, right, planted, read)
        if sentence := self.in_another_unit(seen, right):
            return sentence
        good = (
            isinstance(right, list) and self.devices(self.solution) and self.same(seen[0], right[0])
        )
        in_all = lambda run: sum(row[-1] for row in run[1])
        if good and "in other calls" in self.says and in_all(seen) == in_all(right):
            return f"{CORRECT}. {self.says['in other calls']}"
        near = _near(seen, right, "It is off by {}. ")
        prefix = "The value is right, but not what is sent. " if good else near
        return prefix + self.hinted(seen, read)

    def part_by_part(
        self, seen: Mapping, right: Mapping, planted: list[tuple[Any, str]], read: int
    ) -> str:
        """Name the parts that are right; help with others by planted answers that are wrong as they are."""
        parts = {
            name
            for name in right
            if kind(right[name]) != "a number" or right[name] or not self.same(seen[name], 0)
        }
        units = {self.unit_of(seen[name], right[name]) for name in parts}
        if len(units) == 1 and all(units):
            return (
                f"Those are the right values in {units.pop()}; they are asked for as {self.unit}."
            )
        off = [name for name in right if not self.same(seen[name], right[name])]
        good = [str(name) for name in right if name not in off]
        sentences = [f"Right: {', '.join(good)}."] if good else []
        helped: set[Any] = set()
        for value, sentence in planted:
            spoilt = {name for name in right if not self.same(value[name], right[name])}
            if not spoilt & helped and all(self.meant(seen[name], value[name]) for name in spoilt):
                sentences, helped = [*sentences, sentence], helped | spoilt
        for name in [name for name in off if name not in helped]:
            if sentence := self.in_another_unit(seen[name], right[name]):
                sentences = [*sentences, f"{name}: {sentence}"]
                helped = helped | {name}
        if left := [
            f"{name}{_near(seen[name], right[name], ' (off by {})')}"
            for name in off
            if name not in helped
        ]:
            sentences += [f"Look again at {', '.join(left)}. {self.hinted(seen, read)}"]
        return " ".join(sentences)

    def meant(self, seen: Any, value: Any) -> bool:
        """Tell whether `seen` is this wrong answer, or this number rounded to as many digits."""
        numbers = kind(seen) == kind(value) == "a number"
        digits = (
            len(f"{float(seen):g}".partition("e")[0].replace(".", "").strip("-0")) if numbers else 0
        )
        return (
            self.same(seen, value)
            or digits > 2
            and float(seen) == float(f"{float(value):.{digits}g}")
        )

    def sizes(self) -> Mapping[str, float]:
        """Return the units that an answer may be given in, relative to the exercise's unit."""
        units = next((units for units in _UNITS if self.unit in units), {self.unit: 1})
        return {name: size / units[self.unit] for name, size in units.items() if name}

    def unit_of(self, seen: Any, right: Any) -> str:
        """Return the other unit in which a number is about right, or ''."""
        # whose unit was named: `as_number`
        if isinstance(seen, Fraction) or not kind(seen) == kind(right) == "a number":
            return ""
        sizes, near = self.sizes(), max(self.tolerance, 0.01)
        return next(
            (n for n in sizes if sizes[n] != 1 and same(float(seen) * sizes[n], right, near)), ""
        )

    def in_another_unit(self, seen: Any, right: Any) -> str:
        """Recognise the right number in kilobytes, per cent and the like."""
        if isinstance(seen, Fraction) and self.unit == "bytes":
            for power, name in enumerate(("KiB", "MiB", "GiB"), 1):
                if same(float(seen) * 1.024**power, right, 1e-3):
                    return f"That is right in {name}: write the i. Without it, 1,000 are counted for 1,024."
        if not (name := self.unit_of(seen, right)):
            return ""
        shown = f"{right:,.0f}" if right > 100 else f"{right:.3g}"
        return f"That is the right value in {name}; it is asked for as {self.unit}: {shown}."

    def hinted(self, seen: Any, read: int) -> str:
        """Give the first sentence whose count fits, or the next hint."""
        counted = (
            self.says[key].format(**figures)
            for key, count in self.counts.items()
            if (figures := count(seen))
        )
        return next(counted, self.nudge(read))


def _spellings(text: str) -> dict[str, str]:
    """Read a page's line of spellings, `pp=yes|pipeline; no pp=no`, as answers by their other spellings."""
    rows = (row.rpartition("=") for row in text.split("; "))
    return {_plain(one): answer for answer, _, others in rows for one in others.split("|") if one}


def _nearest(number: Any, choices: tuple[float, ...]) -> Any:
    """Return the choice that is nearest, by ratio, to a number above 0. Without choices it stays."""
    ratio = lambda choice: abs(math.log(number / choice))
    return min(choices, key=ratio) if choices and number > 0 else number


FACTS = ("level", "question", "given", "answer", "nearest", "tolerance", "unit")
"""The entries of an exercise's page that are no sentences."""


def stated(name: str, says: Mapping[str, str], **given: Any) -> Exercise:
    """Return an exercise that its page states alone, with the lesson's numbers in place of the page's."""
    facts = {key: says[key] for key in FACTS if key in says}
    known = read_answer(facts["given"]) if "given" in facts else {}
    if unknown := given.keys() - known.keys():
        raise ValueError(
            f"{name} is not given {', '.join(unknown)} but {', '.join(known) or 'nothing'}"
        )
    given = known | given
    level: Any = facts.get("level", "core")
    tolerance = float(facts.get("tolerance", 1e-5))
    unit = facts.get("unit", "")
    solution = read_answer(facts["answer"], None, given)
    choices = read_answer(facts["nearest"]) if "nearest" in facts else ()
    exercise = Exercise(
        level, solution, {}, lambda answer: _nearest(answer, choices), tolerance, unit, given=given
    )
    return exercise.with_sentences(
        name, {key: sentence for key, sentence in says.items() if key not in facts}
    )


def read_answer(text: str, right: Any = None, given: Mapping[str, Any] | None = None) -> Any:
    """Read an answer as a page spells it: a number such as 4 or 3/16 or a formula of what is given, several
    as in `8, 1`, None, parts as in `A=rounding; B=4`, or a text. Beside the ``right`` answer it may also be
    `* 8`, for eight times that, or some of its parts."""
    parts = {name: part for name, _, part in (part.rpartition("=") for part in text.split("; "))}
    if right is None and "=" in text:
        named = {int(name) if name.isdigit() else name: part for name, part in parts.items()}
        return {name: read_answer(part, None, given) for name, part in named.items()}
    if isinstance(right, Mapping):
        if text.startswith("* "):
            return {name: read_answer(text, value) for name, value in right.items()}
        names = {str(name): name for name in right}
        if parts.keys() <= names.keys():
            changed = {names[name]: part for name, part in parts.items()}
            return {
                **right,
                **{name: read_answer(part, right[name]) for name, part in changed.items()},
            }
    if text == "None":
        return None
    if ", " in text and (right is None or isinstance(right, tuple)):
        values = right or [None] * len(text.split(", "))
        return tuple(
            read_answer(part, value, given)
            for part, value in zip(text.split(", "), values, strict=True)
        )
    if right is None or kind(right) == "a number":
        with contextlib.suppress(SyntaxError, NameError, TypeError, ZeroDivisionError):
            # A formula of our own page, or of digits, names and arithmetic alone (`as_number`).
            number = eval(text.removeprefix("* "), {"__builtins__": {}}, {**(given or {})})
            return float(number) * (right if text.startswith("* ") else 1)
    return text


_KINDS: dict[Any, str] = {
    type(None): "None",
    str: "text",
    bool: "True or False",
    Mapping: "a dict",
    list | tuple | set: "a list",
    Callable: "a function",
}


def kind(value: Any) -> str:
    """Name the kind of an answer."""
    named = (name for what, name in _KINDS.items() if isinstance(value, what))
    other = "a number" if hasattr(value, "__float__") else f"a value of type {type(value).__name__}"
    return next(named, "an array" if getattr(value, "shape", ()) else other)


def takes(function: Any, count: int) -> bool:
    """Tell whether a function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # a builtin that does not say
    return True


def not_asked(answer: Any, right: Any) -> str:
    """Say which kind of answer is needed."""
    of = f" of {', '.join(inspect.signature(right).parameters)}" if callable(right) else ""
    alone = (
        " Write the number alone, without its unit."
        if (kind(right), kind(answer)) == ("a number", "text")
        else ""
    )
    silent = "None", "a dict", "a list", "a function", "an array"
    shown = f": {answer!r:.80}" if kind(answer) not in silent else ""
    return f"{kind(right).capitalize()}{of} is asked for, and this is {kind(answer)}{shown}.{alone}"


def as_meant(answer: Any, right: Any, exercise: Exercise) -> Any:
    """Read an answer in its only meaning: an array as a list, numbers and names given as text, or in JAX's
    spelling."""
    if isinstance(answer, str) and isinstance(right, list | tuple):
        parts = re.split(r" *(?:[,;&]| and | ) *", re.sub(r"^\w+s:? ", "", answer.strip("()[]{} ")))
        answer = parts if len(parts) > 1 else answer
    answer = (
        None
        if right is None and str(answer).lower() in ("none", "never")
        else listed(answer, right)
    )
    if kind(answer) == kind(right) == "a dict":
        names = {_plain(str(name)): name for name in right}
        meant = {_name_of(name, names): part for name, part in answer.items()}
        return {name: as_meant(part, right.get(name), exercise) for name, part in meant.items()}
    if (
        isinstance(answer, list | tuple)
        and isinstance(right, list | tuple)
        and len(answer) == len(right)
    ):
        return [as_meant(part, other, exercise) for part, other in zip(answer, right, strict=True)]
    if kind(right) == "a number":
        (answer,) = answer if kind(answer) == "a list" and len(answer) == 1 else (answer,)
        answer = getattr(answer, "id", answer)  # of a device
        return as_number(answer, right, exercise) if isinstance(answer, str) else answer
    if callable(answer) and callable(right):
        # of a jit: the function in it
        own = getattr(answer, "__wrapped__", answer) if hasattr(answer, "lower") else answer
        return functools.update_wrapper(lambda *given: _result(own(*given)), answer)
    return _as_text(answer, right, exercise.spelt) if isinstance(right, str) else answer


def _name_of(name: Any, names: Mapping[str, Any]) -> Any:
    """Return which of the names a name means: it spells it, ends with it as `Wq` and `stage 0`, or begins it
    as `tp` does `tp=4`. One that means none, or several, stays."""
    plain = _plain(SPELLINGS.get(_plain(str(name)), str(name)))
    plain = re.sub(r",? +", " ", re.sub(r" *= *", "=", plain)) if "=" in plain else plain
    near = [x for x in names if plain.endswith(x) or x.startswith(f"{plain}=")]
    return names.get(plain, names[near[0]] if len(near) == 1 else name)


def _result(value: Any) -> Any:
    """Return what a learner's function returned, unless that is None."""
    if value is None:
        raise ValueError("Your function returns None: does its last line begin with `return`?")
    return value


def listed(value: Any, right: Any) -> Any:
    """Make a list of an array, a range or the like where a list is right, and of its parts likewise."""
    if not isinstance(right, list | tuple) or isinstance(value, str | Mapping | set):
        return value
    value = value.tolist() if kind(value) == "an array" else value
    value = list(value) if isinstance(value, Iterable) and not callable(value) else value
    return (
        list(map(listed, value, right))
        if kind(value) == "a list" and len(value) == len(right)
        else value
    )


def _as_text(answer: Any, right: str, spelt: Mapping[str, str]) -> Any:
    """Read what stands for a text: another spelling of it, a collective's function, a mesh as a dict, a
    layout as JAX writes it."""
    laid_out = {"columns": "d m/tp", "rows": "d/tp m"}.get(right, right)
    answer = as_spec(answer) if "/" in laid_out else answer
    if hasattr(answer, "partitions") and "/" in laid_out:
        dims = [part.partition("/")[0] for part in laid_out.split() if "+" not in part]
        cuts = [
            ",".join(cut) if isinstance(cut, tuple) else str(cut or "") for cut in answer.partitions
        ]
        laid = [
            f"{dim}/{cut}".strip("/")
            for dim, cut in itertools.zip_longest(dims, cuts, fillvalue="")
        ]
        answer = " ".join([*laid, *(f"+{axis}" for axis in sorted(answer.unreduced))])
    if isinstance(answer, Mapping) and ("=" in right or "/" in laid_out):
        answer = " ".join(f"{name}={part}" for name, part in answer.items())
    answer = _order(answer) if "\n" in right and isinstance(answer, str | list | tuple) else answer
    meant = next(
        (row for form, row in _TRUTHS.items() if re.fullmatch(form, str(answer).lower())), ()
    )
    answer = right if right in meant else meant[0] if meant else answer
    answer = spelt.get(_plain(str(answer)), answer)
    if (getattr(answer, "__module__", "") or "").startswith("jax."):
        answer = getattr(answer, "__name__", answer)
    if isinstance(answer, str) and len(right) > 1:  # a lone letter is no unit
        answer = re.sub(r" *= *", "=", re.sub("[,×]", " ", answer)) if "=" in right else answer
        forms = _IN_LAYOUTS if "/" in laid_out and re.search("[/=]", answer) else {_CALL: r"\1"}
        called = _respelled(answer, forms)
        answer = called if "/" in right else SPELLINGS.get(_plain(called), called)
        answer = (
            answer.lower() if right.islower() else answer.upper() if right.isupper() else answer
        )
    return answer


def _order(answer: Any) -> str:
    """Write the rows of an order one a line: of a list of rows or of their operations, or of a text with
    other marks between them, or with the number of its stage before each."""
    rows = re.split(r"[;|\n]\s*", answer.strip()) if isinstance(answer, str) else answer
    texts = (row if isinstance(row, str) else " ".join(map(str, row)) for row in rows)
    return "\n".join(
        re.sub(rf"(?i)^(?:stage *)?{i} *:|,", " ", text) for i, text in enumerate(texts)
    )


def as_spec(answer: Any) -> Any:
    """Read a layout that is spelled as a sharding, as a call of P, or as a list of its entries or dims. Any
    other answer stays."""
    answer = getattr(answer, "spec", answer)
    if isinstance(answer, list | tuple):
        answer = " ".join(map(str, answer)) if "/" in str(answer) else str(tuple(answer))
    called = re.fullmatch(r"(?:[\w.]*\b(?:P|PartitionSpec))?(\(.*\))", str(answer).strip(), re.S)
    with contextlib.suppress(ValueError, SyntaxError):
        if called and isinstance(answer, str):
            call: Any = ast.parse(f"P{called[1]}", mode="eval").body
            open_sums = [word.value for word in call.keywords if word.arg == "unreduced"]
            return types.SimpleNamespace(
                partitions=tuple(map(ast.literal_eval, call.args)),
                unreduced=[axis for axes in open_sums for axis in ast.literal_eval(axes)],
            )
    return answer


def _respelled(text: str, rules: Mapping[Any, Any]) -> str:
    """Rewrite a text by rules in their order, each a pattern and what stands for it."""
    for pattern, usual in rules.items():
        text = re.sub(pattern, usual, text.strip())
    return text


def as_number(text: str, right: Any, exercise: Exercise) -> Any:
    """Read a number as people write it: with commas, with its unit, or as a formula of what is given. In
    another unit than the one asked for it may be rounded. What cannot be read stays text."""
    counts = isinstance(exercise.solution, Mapping) or exercise.unit not in BYTES
    text = _respelled(in_figures(_respelled(text, _IN_NUMBERS)), _IN_NUMBERS)
    bare = _COUNTED.sub("", text.lower()) if counts else text.lower()
    text = bare if re.fullmatch(r"[\d.,]+k?", bare) else text
    parts = [as_number(part, right, exercise) for part in re.split(NEXT_UNIT, text) if part != text]
    if parts and all(kind(part) == "a number" for part in parts):
        return sum(parts)
    unit = re.sub(r"^[-+~≈\d,._/' \u202f]*(e[-+]?\d+)? *", "", text.strip())
    number = text.strip().removesuffix(unit).strip(" ~≈")
    if re.fullmatch(r"[-+]?[1-9]\d{0,2}([,' \u202f]\d{3})+(\.\d*)?", number):
        number = re.sub("[,' \u202f]", "", number)
    unit, sizes = (
        SPELLINGS.get(unit, unit.lower() if len(unit) > 3 else unit),
        {
            "": 1,
            "k": 1000,
            f"k {exercise.unit}": 1000,
            "million": 1e6,
            "bits": exercise.sizes().get("bytes", math.nan) / 8,
            **exercise.sizes(),
        },
    )
    with contextlib.suppress(ValueError, ArithmeticError, KeyError):
        size = sizes[unit if unit in sizes else unit + "s"]
        given = float(Fraction(number) if "/" in number else number) * size
        stated = Fraction(given) if unit else given
        return right if size != 1 and same(given, right, 0.01) else stated
    formula = r"(?!.*\b(?:and|or|if|in|is|not|for)\b)(?:[\w *+/()-]|\.(?=\d)|(?<=\d)\.){1,200}"
    text = re.sub(rf"(?<=[\d)]) *{re.escape(exercise.unit or '$')}$", "", text)
    if re.fullmatch(formula, text) and re.search(r"\w *[*+/-]", text):
        devices = [exercise.given[name] for name in ("devices", "ranks") if name in exercise.given]
        names = {**exercise.given, **dict.fromkeys("nN" * bool(devices), *devices)}
        names = {
            name: float(number) for name, number in names.items() if kind(number) == "a number"
        }
        # which end, where 9**9**9 would not
        floats = re.sub(r"(?<![\w.])(?<!\de[-+])\d+(?![\w.])", r"\g<0>.0", text)
        with contextlib.suppress(OverflowError):
            value = read_answer(floats, right, names)
            return value if kind(value) == "a number" else text
    return text


def _plain(text: str) -> str:
    """Write words small, blanks between them, in the singular, and without what may stand around them."""
    return re.sub(
        r"^(?:(?:an?|the|their|by|in|into|along|exactly|cut|split|it|they|is|are|sends?|suspect) )+"
        r"|(?<=\w\w)s\b| ?wise$| (?:cut|split|bytes?|gpus?)$",
        "",
        re.sub(r"[-_\s]+", " ", text.strip(" \n\"'`.!").lower()),
    )


def turned(seen: Any, right: Any) -> str:
    """Recognise the right arrays, all with their dims exchanged or in another shape."""

    def fault(one: Any, other: Any) -> str:
        if one.size != other.size or same(one, other, 1e-5):
            return ""
        orders = itertools.permutations(range(one.ndim)) if one.ndim == other.ndim else ()
        if any(same(one.transpose(order), other, 1e-5) for order in orders):
            return "The numbers are right, with dims exchanged: transpose it. "
        return (
            "The numbers are right: reshape it. " if same(one.ravel(), other.ravel(), 1e-5) else ""
        )

    faults = {fault(one, other) for one, other in zip(arrays(seen), arrays(right), strict=False)}
    return (
        (faults.pop() + mismatch(seen, right)).rstrip() if len(faults) == 1 and all(faults) else ""
    )


def arrays(value: Any) -> list[Any]:
    """Return the arrays in a value."""
    inside = (
        [array for part in value for array in arrays(part)]
        if isinstance(value, list | tuple)
        else []
    )
    return [value] if kind(value) == "an array" else inside


def mismatch(seen: Any, right: Any) -> str:
    """Say how an answer is of another kind than the right one: text for a number, other names or shapes."""
    if kind(seen) != kind(right):
        return not_asked(seen, right)
    if callable(right) and not takes(seen, len(wanted := inspect.signature(right).parameters)):
        own = ", ".join(inspect.signature(seen).parameters) or "nothing"
        return f"A function of {', '.join(wanted)} is asked for, and yours is one of {own}."
    if isinstance(right, Mapping):
        if seen.keys() != right.keys():
            yours = ", ".join(map(str, seen)) or "none"
            return f"The names asked for are {', '.join(map(str, right))}; yours are {yours}."
        pairs = [(seen[name], right[name]) for name in right]
        pairs = [(a, b) for a, b in pairs if callable(b) or not (a is None or b is None)]
    elif kind(right) == "an array" and seen.shape != right.shape:
        return (
            f"An array of shape {list(right.shape)} is asked for, and yours has {list(seen.shape)}."
        )
    else:
        pairs = list(zip(seen, right, strict=False)) if isinstance(right, list | tuple) else []
    return next(filter(None, (mismatch(one, other) for one, other in pairs)), "")


def _near(seen: Any, right: Any, words: str) -> str:
    """Say in these words by how much a number is off that is nearly right."""
    if kind(seen) != "a number" or kind(right) != "a number" or not right:
        return ""
    error = abs(float(seen) / float(right) - 1)
    return words.format(f"{float(f'{100 * error:.1g}'):g}%") if error < 0.1 else ""


def is_blank(answer: Any) -> bool:
    """Tell whether an answer still has its dots: `...`, also in a container, or a function with no body."""
    if answer is ...:
        return True
    if inspect.isfunction(answer):
        steps = [
            step for step in dis.get_instructions(answer) if step.opname not in ("RESUME", "NOP")
        ]
        return all(
            step.opname.startswith(("LOAD_CONST", "RETURN")) and step.argval is None
            for step in steps
        )
    if isinstance(answer, Mapping):
        return any(is_blank(value) for value in answer.values())
    return isinstance(answer, list | tuple | set) and any(is_blank(value) for value in answer)


def same(one: Any, other: Any, tolerance: float) -> bool:
    """Compare answers: texts by words, numbers and arrays within a relative tolerance, the rest exactly."""
    if isinstance(one, str) and isinstance(other, str):
        words, others = _plain(one), _plain(other)
        # layouts, arrows and orders: blanks part their words
        if re.search(r"[/+>\d]", words + others):
            return words == others
        return words.replace(" ", "") == others.replace(" ", "")
    if isinstance(one, bool | str) or isinstance(other, bool | str) or one is None or other is None:
        return type(one) is type(other) and one == other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(
            same(one[key], other[key], tolerance) for key in one
        )
    one, other = (sorted(value) if isinstance(value, set) else value for value in (one, other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(
            same(a, b, tolerance) for a, b in zip(one, other, strict=True)
        )
    if hasattr(one, "shape") and hasattr(other, "shape") and (one.shape or other.shape):
        import numpy as np

        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        scale = np.abs(other).max(initial=0)
        return one.shape == other.shape and bool(np.all(np.abs(one - other) <= tolerance * scale))
    try:
        return math.isclose(float(one), float(other), rel_tol=tolerance)
    except (TypeError, ValueError):
        return type(one) is type(other) and bool(one == other)
