"""Read what is said of answers: a Markdown page for each lesson beside its code, one line for each sentence.

## sent                             the exercise
- given: devices=8                 of one without code: what the lesson passes by keyword, for formulas
- answer: 2 * (devices - 1)        of one without code: a formula, `8, 1`, a text, or parts, `A=none; B=2`
- level: core                      of one without code; its question, tolerance and unit, too
- nearest: 1e-3, 1e-6              of one without code: a number stands for the nearest of these
- nudge: How often does …           a first hint; a second one is a smaller case, or a picture. The next one
                                   answers what no other line foresees
- hint: A ring all-reduce is …      the last hint, which may be the formula: for those who ask
- because: Both halves of …         why the solution is right
- whole: That is the size of …      for the wrong answer that the code calls whole
- `862720`: You forgot …            for this wrong answer: a formula, a text, or parts, `A=none; B=2`
- or `754881`: It is …              for this right answer, which is another one than `answer`
- spelt: pp=yes|pipeline; no pp=no  other spellings of texts, also of wrong ones
"""

import functools
import pathlib

from llmpar.files import read_text, refuse


@functools.cache
def sentences(name: str) -> dict[str, dict[str, str]]:
    """Read a page: for each heading its sentences by key, those of a key that comes again as lines."""
    path = pathlib.Path(__file__).parent / f"{name}.md"
    headings: dict[str, dict[str, str]] = {}
    lines: dict[str, str] = {}
    for number, line in enumerate(read_text(path, "page of sentences").splitlines(), 1):
        spelt = line.startswith(("- `", "- or `"))
        key, _, sentence = line[2:].partition("`: " if spelt else ": ")
        if spelt:
            key += "`"
        if line.startswith("## "):
            lines = headings[line[3:]] = {}
        elif (
            line.startswith("- ") and headings and sentence and (key == "nudge" or key not in lines)
        ):
            lines[key] = f"{lines[key]}\n{sentence}" if key in lines else sentence
        elif line and not line.startswith("# "):
            refuse(
                path,
                "page of sentences",
                f"line {number} is no '- key: sentence' of its own: {line:.40}",
            )
    return headings
