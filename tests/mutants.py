"""Errors planted in the package one at a time, and the tests that must see each.

    python tests/mutants.py                 all of them, about a quarter of an hour on two cores
    python tests/mutants.py attention moe   those of some files, or by their numbers

A line of mutants.txt names a test, or words of a plan: the shortest line of plans.py that has them.
"""

import collections
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PLANS = "test_plans.py::test_a_plan_gives_one_devices_answer_and_sends_and_holds_what_is_predicted"

NO_TESTS = 5  # the exit status of pytest


def selection(what: str) -> list[str]:
    """The words for pytest of a test or of a plan's words."""
    if what.startswith("test_"):
        file, *more = what.split(" ", 1)
        return [str(TESTS / file), *(more[0].split(" ", 1) if more else ())]
    sys.path.insert(0, str(TESTS))
    import plans

    first = {name: values[0] for name, values in plans.FIELDS.items()}
    model, words = (what.split()[0], what.split()[1:]) if "=" not in what.split()[0] else ("", what.split())
    wanted = plans.parse(" ".join(["any", *words])) | ({"model": model} if model else {})
    wanted = {name: value for name, value in wanted.items() if (name, value) != ("model", "any")}
    fits = lambda asked: all((first | asked).get(name) == value for name, value in wanted.items())
    shortest = sorted(plans.lines(), key=lambda line: (line in plans.AT_NIGHT, len(line)))  # the gate's first
    line = next(line for line in shortest if fits(plans.parse(line)))
    return [f"{TESTS / PLANS}[{line}]"]


def seen(folder: str, what: str) -> str:
    """When the named test sees the error in this copy of the package; '' where it does not."""
    given = ["-c", str(TESTS.parent / "pyproject.toml"), "-x", "-q", "-n0", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": folder}  # and there, since Python looks first where it starts
    for when, marks in (("gate", "not (nightly or full or engines)"), ("nightly", "nightly")):
        command = [sys.executable, "-m", "pytest", *given, "-m", marks, *selection(what)]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if done.returncode != NO_TESTS:
            assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
            return when if done.returncode else ""
    raise ValueError(f"{what} names no test")


if __name__ == "__main__":
    asked, wrong, when = sys.argv[1:], [], collections.Counter()
    for number, line in enumerate((TESTS / "mutants.txt").read_text().splitlines()[1:], 1):
        old, new, what = line.split(" ; ")
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(TESTS.parent / "llmpar", Path(folder, "llmpar"))
            shutil.copytree(TESTS.parent / "docs", Path(folder, "docs"))  # pages read their words
            places = [path for path in Path(folder).rglob("*.py") if old in path.read_text()]
            name = places[0].stem if places else "?"
            if asked and name not in asked and str(number) not in asked:
                continue
            if len(places) != 1 or (text := places[0].read_text()).count(old) != 1:
                verdict = f"stands in {len(places)} files"
            else:
                places[0].write_text(text.replace(old, new))
                verdict = seen(folder, what) or "LIVES"
        when[verdict] += 1
        wrong += [number] * (verdict not in ("gate", "nightly"))
        print(f"{number:2} {name}: {new}: {verdict}, {what}", flush=True)
    print(f"{when['gate']} seen on the gate, {when['nightly']} at night; not seen: {wrong or 'none'}")
    sys.exit(bool(wrong))
