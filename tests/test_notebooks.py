"""Every lesson runs, is in step with its source and follows the rules; exercises answer as they should."""

import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
from jax import P, lax
from shared import ROOT, load, program_text

from llmpar import lessons
from llmpar.lessons import judge
from llmpar.plan.schedules import make

build, walk = load("notebooks/build.py"), load("notebooks/walk.py")

SOURCES = build.sources()
QUICK = ("00_setup",)  # what a change to the package breaks first; make test-lessons runs all
EXERCISE_FILES = sorted((ROOT / "llmpar" / "lessons").glob("[0-9][0-9]*.md"))
EXERCISES = [f"{file.stem}.{name}" for file in EXERCISE_FILES for name in lessons.exercises(file.stem)]
TOY = (ROOT / "tests" / "fixtures" / "toy_lesson.txt").read_text()
"""A lesson that follows all rules."""


def toy(tmp_path, extra=""):
    """Write a lesson that follows all rules, and what else is asked for."""
    source = tmp_path / "src" / "00_toy.py"
    source.parent.mkdir(exist_ok=True)
    source.write_text(TOY.format(extra=extra))
    return source


def hand_run(source):
    """Fill in the outputs that a run of the toy would give, without a kernel."""
    notebook = build.read_source(source)
    for number, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), 1):
        cell.execution_count = number
        if "one" in cell.source:
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="one\ntwo\n")]
    return notebook


def display(**data):
    return nbformat.v4.new_output("display_data", data)


def picture(**other):
    return display(**{"image/png": "iVBORw0KGgo=", **other})


def edit(index, **changes):
    """Make a fault: change attributes of one code cell."""

    def plant(notebook):
        cell = [cell for cell in notebook.cells if cell.cell_type == "code"][index]
        for name, value in changes.items():
            cell[name] = value(cell[name]) if callable(value) else value

    return plant


def stream(name, text):
    return nbformat.v4.new_output("stream", name=name, text=text)


FAULTS = {
    "not run": (edit(-1, execution_count=None), "execution counts"),
    "checked but empty": (edit(-1, outputs=[]), "without outputs"),
    "semicolon": (edit(-1, source=lambda s: s + ";"), "ends with ';'"),
    "stderr": (edit(0, outputs=[stream("stderr", "UserWarning: no\n")]), "text on stderr"),
    "error": (edit(0, outputs=[nbformat.v4.new_output("error", ename="OSError")]), "a stored error, OSError"),
    "widget view": (edit(0, outputs=[picture(**{build.WIDGET_VIEW: {}, "text/plain": "a"})]), "widget view"),
    "SVG only": (edit(0, outputs=[display(**{"image/svg+xml": "<svg/>"})]), "SVG without a PNG"),
    "wordless": (edit(0, outputs=[picture(**{"text/plain": "<Figure size 640x480>"})]), "without words"),
    "address": (edit(-1, outputs=[stream("stdout", "<Mesh at 0x7f00c0ffee00>")]), "differs from run to run"),
    "wide output": (edit(0, outputs=[stream("stdout", "short\n" + 89 * "-")]), "prints 89 columns"),
    "edited by hand": (edit(0, source="import jax"), "cell ids"),
    "nothing checked": (edit(-1, metadata={}), "nothing is asserted"),
    "slow start": (edit(0, source="import jax\nuse_devices()"), "use_devices()"),
    "no start": (edit(0, source="devices = 8"), "use_devices()"),
    "other kernel": (lambda nb: nb.metadata.kernelspec.update(name="julia"), "kernelspec"),
    "widget state": (lambda nb: nb.metadata.update(widgets={}), "widget state"),
}


@pytest.mark.parametrize("plant, sentence", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_seen_and_without_it_none(tmp_path, plant, sentence):
    notebook = hand_run(toy(tmp_path))
    assert build.faults(notebook) == []
    plant(notebook)
    assert any(sentence in fault for fault in build.faults(notebook)), build.faults(notebook)


@pytest.fixture
def toy_form(monkeypatch):
    """Let a toy be built: it has not the pictures of a lesson."""
    monkeypatch.setattr(build, "core_faults", lambda notebook: [])


def test_code_runs_again_only_where_it_has_changed(tmp_path, monkeypatch, toy_form):
    source = toy(tmp_path)
    build.target(source).write_text(nbformat.writes(hand_run(source)))
    monkeypatch.setattr(build, "kernel", None)  # it would fail
    source.write_text(source.read_text().replace("There is more.", "There is much more."))
    assert build.out_of_step(source) and build.build(source, force=False) == []
    assert build.problems(source) == [] and "much more" in build.target(source).read_text()
    source.write_text(source.read_text().replace("25", "30"))
    assert build.out_of_step(source), "the header is a part of the notebook"
    toy(tmp_path, extra="print('three')")
    with pytest.raises(TypeError):
        build.build(source, force=False)


def test_a_picture_gets_its_words_as_alt_text(tmp_path):
    notebook = hand_run(toy(tmp_path))
    *_, cell, able, further = notebook.cells
    assert able.source.endswith("\n- say what follows one.") and build.is_further(further)
    for made, alt in (
        (picture(**{"text/plain": "mesh dp2\n tp4"}), "mesh dp2 tp4"),
        (picture(**{"text/plain": "<Figure size 640x480 with 1 Axes>"}), "one two"),
    ):
        cell.outputs = [made, stream("stdout", "one\ntwo\n")]
        assert "code cell 2: a picture without alt text" in " ".join(build.faults(notebook))
        build.tidy(notebook)
        assert cell.outputs[0].metadata["image/png"]["alt"] == alt and build.faults(notebook) == []


def test_a_change_of_the_source_is_out_of_step(tmp_path, toy_form):
    source = toy(tmp_path)
    assert build.problems(source) == ["00_toy.ipynb has not been built"]
    build.target(source).write_text(nbformat.writes(hand_run(source)))
    assert build.problems(source) == [] == build.house_problems(tmp_path)
    toy(tmp_path, extra="print('three')")
    assert build.problems(source) == ["00_toy.ipynb is out of step with src/00_toy.py"]
    source.unlink()
    assert build.house_problems(tmp_path) == ["00_toy.ipynb has no source in src/"]


@pytest.mark.nightly
@pytest.mark.lessons
def test_a_lesson_that_takes_too_much_memory_is_not_written(tmp_path, monkeypatch, toy_form):
    source = toy(tmp_path, "hog = bytearray(300_000_000)")
    monkeypatch.setattr(build, "MAX_KERNEL_BYTES", 300_000_000)
    (found,) = build.build(source)
    assert re.search(r"the kernel took 0\.\d+ GB, more than 0\.3", found)
    assert not build.target(source).exists()


@pytest.mark.nightly
@pytest.mark.lessons
def test_two_builds_are_byte_identical(tmp_path, toy_form):
    extra = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nprint('a rising line')"
    source = toy(tmp_path, extra)
    builds = []
    for _ in range(2):
        assert build.build(source) == []
        builds.append(build.target(source).read_bytes())
    assert builds[0] == builds[1] and b"image/png" in builds[0]


@pytest.mark.lessons
def test_a_lesson_that_warns_or_fails_is_not_written(tmp_path):
    warning = build.build(toy(tmp_path, "import warnings\nwarnings.warn('careful')"))
    failure = build.build(toy(tmp_path, "assert 1 == 2, 'one is not two'"))
    assert "text on stderr" in warning[0] and "one is not two" in failure[0]
    assert not build.target(toy(tmp_path)).exists()


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_lesson_is_in_step_and_without_faults(source):
    assert build.problems(source) == []


@pytest.mark.lessons
@pytest.mark.parametrize(
    "source", [pytest.param(s, marks=[pytest.mark.quick] * (s.stem in QUICK), id=s.stem) for s in SOURCES]
)
def test_lesson_runs(source):
    """Where nothing that it imports has changed since the builder ran it, that was its run."""
    if build.has_run(source):
        pytest.skip("ran with these modules, says notebooks/runs.json")
    run_lesson(source)


@pytest.mark.nightly
@pytest.mark.lessons
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_every_lesson_runs(source):
    run_lesson(source)


def run_lesson(source):
    done, used = nbval(build.target(source))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    peak = used * (1 if sys.platform == "darwin" else 1024)
    assert peak <= build.MAX_KERNEL_BYTES, f"the kernel took {peak / 1e9:.2f} GB"


def nbval(notebook):
    """Run a notebook as a user's `pytest --nbval-lax` does; give the memory of the largest process, too."""
    options = "--nbval-lax --nbval-current-env --nbval-cell-timeout=600 -q -p no:cacheprovider".split()
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *options, str(notebook)]
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    env = os.environ | {"XLA_FLAGS": flags}  # a lesson says how many devices it wants
    command = [sys.executable, "-c", program_text("largest"), *command]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    return done, int(done.stderr.split()[-1])


def test_a_run_is_that_of_the_modules_that_it_imported(tmp_path, monkeypatch):
    """Another statement of an imported module is another run; one of another module, or a comment, is not."""
    package, source = tmp_path / "llmpar", toy(tmp_path)
    monkeypatch.setattr(build, "PACKAGE", package)
    (package / "plan").mkdir(parents=True)
    for name in ("__init__.py", "draw.py", "plan/__init__.py", "plan/plan.py"):
        (package / name).write_text("x = 1\n")
    build.target(source).write_text(nbformat.writes(hand_run(source)))
    build.note_run(source, ["llmpar", "llmpar.plan", "llmpar.plan.plan"])
    steps = [("draw.py", "x = 2", True), ("plan/plan.py", "x = 1  # one", True)]
    steps += [("plan/plan.py", "x = 2", False)]
    steps += [("plan/plan.py", '"One."\nx = 1', True), ("plan/chips.toml", "[a]", False)]
    for name, text, same in steps:
        (package / name).write_text(text + "\n")
        assert build.has_run(source) == same, name
    toy(tmp_path, "import subprocess")
    build.target(source).write_text(nbformat.writes(hand_run(source)))
    build.note_run(source, ["llmpar"])
    assert build.has_run(source) and build.runs(tmp_path)["00_toy"]["modules"] == ["llmpar.*"]
    (package / "draw.py").write_text("x = 3\n")
    assert not build.has_run(source)


def test_the_newcomers_walk_answers_each_exercise_of_the_core_paths():
    core, every = {}, {}
    for source in SOURCES:
        for cell in build.read_source(source).cells:
            if name := walk.ATTEMPT.search(cell.source):
                (core if "core" in cell.metadata.tags else every)[name[1]] = cell.source
    assert sorted(core) == sorted(walk.ANSWERS)
    for name, answers in [*walk.ANSWERS.items(), *walk.MORE.items()]:
        assert all((core | every)[name].count(blank) == 1 for blank, *_ in answers), name


@pytest.mark.parametrize(
    "name, answer, must", [(name, *row[1:]) for name in walk.MORE for row in walk.MORE[name]]
)
def test_what_the_walk_types_is_judged_as_it_expects(name, answer, must):
    """What lessons teach is right, and what was once taken for right, or explained wrongly, is not."""
    exercise, known = lessons.find(name), {"jax": jax, "jnp": jnp, "lax": lax, "np": np}
    if answer.startswith("def "):
        exec(answer, known)
        value = known[re.match(r"def (\w+)", answer)[1]]
    else:
        value = eval(answer.rpartition(" = ")[2].removeprefix("= "))
        if isinstance(value, tuple):
            value = dict(zip(exercise.solution, value, strict=True))
    verdict = f": {exercise.judge(value)}"
    assert re.search(must.removesuffix(".*DRAWN"), verdict), verdict


ANSWERS = dict(jax=jax, jnp=jnp, lax=lax, np=np, P=P, lessons=lessons, make=make, math=math, re=re, sys=sys)
exec((ROOT / "tests" / "fixtures" / "answers.txt").read_text(), ANSWERS)
TEXTS, CODE = (
    [line.split(" | ") for line in (ROOT / "tests" / name).read_text().splitlines()]
    for name in ("verdicts.txt", "verdicts_of_code.txt")
)
"""What someone answered, as text or as Python, what the verdict says, and what it does not."""


@pytest.mark.parametrize("row", [*TEXTS, *CODE], ids=lambda row: f"{row[0]}, {row[2]}")
def test_a_verdict_fits_what_was_done(row):
    name, answer, says, *never = row
    exercise = lessons.find(name)
    given = eval(answer, ANSWERS) if row in CODE else judge.read_answer(answer, exercise.solution)
    verdict = exercise.judge(given)
    never += ["NameError"]  # of what stands in verdicts_of_code.txt
    assert re.search(says, verdict) and not any(words in verdict for words in never), verdict


def attempts(notebook):
    """Find the exercises of a notebook, with what their cells printed."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for name in re.findall(r"\battempt\(\s*['\"](\d\d\w?\.\w+)['\"]", cell.source):
                printed = " ".join(output.get("text", "") for output in cell.outputs)
                yield name, " ".join(printed.split())  # wherever lines are broken


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_lesson_leaves_its_exercises_blank(source):
    found = dict(attempts(nbformat.read(build.target(source), as_version=4)))
    number = source.stem.partition("_")[0]
    assert sorted(found) == sorted(name for name in EXERCISES if name.startswith(f"{number}."))
    for name, printed in found.items():
        assert f"{name} ({lessons.find(name).level}): {lessons.NOT_ATTEMPTED}" in printed
    assert {lessons.find(name).level for name in found} >= {"core"}


def test_lessons_have_sources_and_are_small_and_every_exercise_file_has_a_lesson():
    assert build.house_problems() == []
    assert {file.stem for file in EXERCISE_FILES} <= {source.stem.partition("_")[0] for source in SOURCES}


def test_the_page_s_table_of_orders_is_what_the_simulator_finds():
    from llmpar.plan.timetable import timetable

    def value(formula, **letters):
        spelt_out = re.sub(r"(?<=[0-9giu)])(?=[pgiu(])", "*", formula.replace(" ", ""))
        return eval(spelt_out, {}, letters)  # our own page

    table = r"^\| (GPipe|1F1B|interleaved-zb|interleaved|ZB-H1|ZB-H2, ZB-V)[^|]*\|(.*)\|$"
    rows = dict(re.findall(table, (ROOT / "docs" / "schedules.md").read_text(), re.M))
    assert len(rows) == 6
    for titles, row in rows.items():
        for i, title in enumerate(titles.split(", ")):
            cells = [[part.strip() for part in re.split("[;,]", cell)] for cell in row.split("|")]
            bubble, held, price = cells
            for p, m, v in ((2, 4, 2), (4, 16, 4)):
                name, letters = title.lower(), {"p": p, "u": m, "g": v}
                chunks = v if name.startswith("interleaved") else None
                table, plain = timetable(make(name, p, m, chunks)), timetable(make("1f1b", p, m))
                assert table.bubble == pytest.approx(value(bubble[-1], **letters)), (title, p, m, v)
                peaks = [min(m, value(held[min(i, len(held) - 1)], i=stage, **letters)) for stage in range(p)]
                assert table.peak_live() == pytest.approx(peaks), (title, p, m, v)
                said = re.search(r"(.*) times the messages|twice the messages", price[min(i, len(price) - 1)])
                times = 1 if not said else value(said[1], **letters) if said[1] else 2
                messages = [sum(map(sum, one.hops)) for one in (table, plain)]
                assert messages[0] == pytest.approx(times * messages[1]), (title, p, m, v)
