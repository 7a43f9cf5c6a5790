"""What each test file costs: tests, compiled programs, seconds, and seconds of processors.

`costs.txt` keeps them, of an idle machine and an empty cache. A run with a fifth more programs fails;
a growth is recorded with its reason: make clean; make test WHY="experts have a new dispatch"
"""

import collections
import functools
import os
import time
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

FILE = Path(__file__).with_suffix(".txt")
HEAD = "file and kind                   tests programs  seconds      CPU  why it grew\n"
KINDS = "full", "engines", "nightly", "lessons", "browser", "compilers", "processes", "long"
COMPILED = "/jax/core/compile/backend_compile_duration"
MORE, WHOLE_RUN = 0.2, 2000
"""By which part of the recorded programs a run may compile more, and of how many programs a run is whole."""


class Cost(NamedTuple):
    tests: int = 0
    programs: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0

    def __add__(self, other) -> "Cost":
        return Cost(*map(sum, zip(self, other, strict=True)))


def read(text: str) -> dict[str, tuple[Cost, str]]:
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
    """The files that compile most beyond what is recorded, where a whole run compiles a fifth more in all."""
    whole = {name: cost for name, cost in now.items() if name in rows and cost.tests >= rows[name][0].tests}
    more = {name: cost.programs - rows[name][0].programs for name, cost in whole.items()}
    recorded = sum(rows[name][0].programs for name in whole)
    if recorded < WHOLE_RUN or sum(more.values()) <= MORE * recorded:
        return []
    largest = sorted(more, key=lambda name: -more[name])[:3]
    return [f"{name} compiles {whole[name].programs} programs, {more[name]} more" for name in largest]


@functools.cache
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
        rows = read(FILE.read_text())
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
        for sentence in self.sentences:
            terminalreporter.write_line(f"{sentence}; ask one program by data (tests/costs.py)", red=True)
