"""What each test file costs: tests, compiled programs, seconds, and seconds of processors.

`costs.txt` keeps them as one run on an idle machine with an empty cache found them; the next runs start the
longest files first. A file that compiles a fifth more programs than recorded, and 200, fails the run: programs
can be counted, seconds differ from machine to machine. A growth is recorded with its reason:

    make clean; make test WHY="experts have a new dispatch"
"""

import collections
import os
import time
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

FILE = Path(__file__).with_suffix(".txt")
HEAD = "file and kind                   tests programs  seconds      CPU  why it grew\n"
KINDS = "full", "engines", "nightly", "lessons", "browser", "compilers", "processes"
COMPILED = "/jax/core/compile/backend_compile_duration"
MORE, SLACK = 1.2, 200
"""A file may compile this many times the recorded programs, and so many more: who runs first in a process compiles
what others find in its caches."""


class Cost(NamedTuple):
    tests: int = 0
    programs: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0

    def __add__(self, other) -> "Cost":
        return Cost(*map(sum, zip(self, other, strict=True)))


def read(text: str) -> dict[str, tuple[Cost, str]]:
    """The recorded costs and reasons by name."""
    rows = {}
    for line in text.splitlines()[1:]:
        name, tests, programs, seconds, cpu_s, *why = line.split(maxsplit=5)
        rows[name] = Cost(int(tests), int(programs), float(seconds), float(cpu_s)), "".join(why)
    return rows


def write(rows: dict[str, tuple[Cost, str]]) -> str:
    lines = [
        f"{name:31} {cost.tests:5} {cost.programs:8} {cost.seconds:8.1f} {cost.cpu_s:8.1f}  {why}".rstrip()
        for name, (cost, why) in sorted(rows.items())
    ]
    return HEAD + "\n".join(lines) + "\n"


def grown(rows: dict[str, tuple[Cost, str]], now: dict[str, Cost]) -> list[str]:
    """What compiles a fifth more than is recorded, in sentences. A run of a part of a file says nothing."""
    sentences = []
    for name, cost in now.items():
        recorded = rows[name][0] if name in rows else cost
        if cost.tests >= recorded.tests and cost.programs > MORE * recorded.programs + SLACK:
            sentences.append(f"{name} compiles {cost.programs} programs; recorded are {recorded.programs}")
    return sentences


def name_of(item) -> str:
    """The file, and the kind of test where it is not an ordinary one."""
    kind = next((kind for kind in KINDS if item.get_closest_marker(kind)), "")
    return item.path.stem.removeprefix("test_") + (f":{kind}" if kind else "")


def spent() -> tuple[float, float]:
    """Seconds, and those of this process's processors and of the processes that it has waited for."""
    return time.monotonic(), sum(os.times()[:4])


class Costs:
    """A plugin of pytest: workers measure, and who started them adds up."""

    def __init__(self, config):
        self.config, self.reason = config, config.getoption("--record-costs")
        self.programs, self.sentences = 0, []
        self.now: dict[str, Cost] = collections.defaultdict(Cost)
        cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
        if self.reason is not None and not hasattr(config, "workerinput") and any(cache.glob("*")):
            raise pytest.UsageError(f"costs are those of an empty cache; remove {cache} first")
        jax.monitoring.register_event_duration_secs_listener(self.count)

    def count(self, event: str, seconds: float, **_) -> None:
        self.programs += event == COMPILED

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.begin = self.programs, *spent()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "teardown":
            used = (now - then for now, then in zip((self.programs, *spent()), self.begin, strict=True))
            report.user_properties.append(("cost", [name_of(item), 1, *used]))
        return report

    def pytest_runtest_logreport(self, report):
        for key, value in report.user_properties:
            if key == "cost" and report.when == "teardown":
                self.now[value[0]] += Cost(*value[1:])

    def pytest_sessionfinish(self, session):
        if hasattr(self.config, "workerinput") or not self.now:
            return
        rows = read(FILE.read_text()) if FILE.exists() else {}
        self.sentences = grown(rows, self.now)
        if self.reason is None:
            session.exitstatus = session.exitstatus or int(bool(self.sentences))
            return
        reasons = {sentence.split()[0]: self.reason for sentence in self.sentences}
        for name, cost in self.now.items():
            _, why = rows.get(name, (cost, ""))
            rows[name] = cost, reasons.get(name, why)
        FILE.write_text(write(rows))

    def pytest_terminal_summary(self, terminalreporter):
        total = sum(self.now.values(), Cost())
        terminalreporter.write_line(f"{total.cpu_s / 60:.1f} CPU minutes, {total.programs} programs compiled")
        for sentence in getattr(self, "sentences", ()):
            terminalreporter.write_line(
                f"{sentence}; ask one program by data, or see tests/costs.py", red=True
            )
