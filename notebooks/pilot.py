"""Walk the core paths by a driver that reads at 200 words a minute and answers wrong twice, then right.

    python notebooks/pilot.py [NN…]     all lessons, or those named; writes their rows of INSTRUCTOR.md

The driver reads the text, the code in view and all that is printed, verdicts among it. At each exercise it
gives the first two of the planted wrong answers, then the solution. Its minutes are those words at 200 a
minute, and the seconds of the kernel. It looks at no picture, thinks about nothing, and hears no teacher: its
minutes are the least that a lesson takes. No person was timed.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import nbformat

from llmpar import lessons

sys.path.insert(0, str(Path(__file__).resolve().parent))
import build

GUIDE = build.HERE.parent / "INSTRUCTOR.md"
WORDS_A_MINUTE, WRONG = 200, 2
ATTEMPT = re.compile(r'attempt\(\s*"(\d\d\w?\.\w+)"')
ANSWERS = """
from llmpar import lessons as _lessons
_given = _lessons.GIVEN.get("{name}", {{}})
_asked = _lessons.find("{name}", **_given)
for _answer in [*[*_asked.wrong.values()][:{wrong}], _asked.solution]:
    _lessons.attempt("{name}", _answer, **_given)
"""
HEAD = "| lesson | words | exercises | machine s | driver, minutes | claimed: lesson |"


def count_words(text: str) -> int:
    """Count what is read in a text: what has a letter or a digit."""
    return sum(any(c.isalnum() for c in word) for word in text.split())


def core_of(source: Path) -> tuple[nbformat.NotebookNode, int]:
    """Return the core path of a lesson with the driver's answers in it, and the words in view."""
    notebook, words = build.read_source(source), 0
    notebook.cells = [cell for cell in notebook.cells if "core" in cell.metadata["tags"]]
    for cell in notebook.cells:
        words += count_words(cell.source) * ("plumbing" not in cell.metadata["tags"])
        name = ATTEMPT.search(cell.source) if cell.cell_type == "code" else None
        if name:
            cell.source += ANSWERS.format(name=name[1], wrong=WRONG)
    return notebook, words


def walk(source: Path) -> str:
    """Walk a core path; return its row. A verdict that is not as planted is an error."""
    notebook, words = core_of(source)
    with build.kernel(source.parent.parent) as execute:
        began = time.monotonic()
        done = execute(notebook)
        seconds = time.monotonic() - began
    outputs = [output for cell in done.cells for output in cell.get("outputs", [])]
    printed = " ".join(output.text for output in outputs if output.output_type == "stream")
    names = [found[1] for cell in notebook.cells if (found := ATTEMPT.search(cell.source))]
    verdicts = {name: re.findall(rf"{name} \(\w+\): (correct|not\s+yet)", printed) for name in names}
    for name, given in verdicts.items():
        planted = min(WRONG, len(lessons.find(name).wrong))
        if [verdict[0] for verdict in given] != ["n"] * planted + ["c"]:
            raise ValueError(f"{name}: the verdicts of the planted answers are {given}")
    words += count_words(printed)
    number, minutes = source.stem.partition("_")[0], words / WORDS_A_MINUTE + seconds / 60
    claimed = notebook.metadata["llmpar"]["teaching"]
    return f"| {number} | {words:,} | {len(names)} | {seconds:.0f} | {minutes:.0f} | {claimed} |"


def main(chosen: list[str]) -> int:
    """Walk, and write the rows into the table of INSTRUCTOR.md."""
    text = GUIDE.read_text(encoding="utf-8")
    before, _, rest = text.partition(HEAD + "\n")
    rule, *rows = rest.partition("\n\n")[0].splitlines()
    after = rest[rest.index("\n\n") :]
    table = {row.split(" | ")[0]: row for row in rows}
    for source in build.sources():
        number = source.stem.partition("_")[0]
        if not chosen or number in chosen:
            table[f"| {number}"] = walk(source)
            print(table[f"| {number}"], flush=True)
    GUIDE.write_text(before + "\n".join([HEAD, rule, *(table[key] for key in sorted(table))]) + after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
