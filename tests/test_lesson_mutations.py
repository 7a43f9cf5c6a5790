"""A lesson fails where the package is wrong: an error is planted, and its own assertions must see it.

Each lesson runs in a process of its own, cell by cell, as this file's program:

    python tests/test_lesson_mutations.py 03                            without an error: ends with 0
    python tests/test_lesson_mutations.py 03 "a sum becomes a mean"     with one: ends with 3, names the cell
"""

import linecache
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from shared import load

from llmpar.plan.layout import parse_layout

ROOT = Path(__file__).resolve().parent.parent
FAILED = 3


def carries_out(kind, wrong):
    """Carry out one kind of collective in another way; `wrong` gets the right function and its arguments."""

    def planted(right, x, move, position, to):
        return (wrong if move.kind == kind else lambda r, *given: r(*given))(right, x, move, position, to)

    return "parallel.modes.send", planted


def first_axis_only(right, x, move, position, to):
    others = tuple(move.axes[1:])
    return right(x / lax.axis_size(others) if others else x, move, position, to)


def turned_round(right, x, move, position, to):
    parts = jnp.split(right(x, move, position, to), lax.axis_size(move.axes), position[move.gathers])
    return jnp.concatenate(parts[::-1], position[move.gathers])


def late_backward(right, text, m):
    return right(text.replace("F B", "B F", 1) if "F F B" in text else text, m)


def fixed_batch(right, engine):
    waiting = engine._waiting
    if not engine._running:
        return right(engine)
    engine._waiting = type(waiting)()
    told, engine._waiting = right(engine), waiting
    return told


def no_moments(right, *given, **other):
    state = right(*given, **other)
    return state and state._replace(optimizer=jax.tree.map(lambda x: 0 * x, state.optimizer))


PLANTED = {  # what goes wrong: where, and the function that takes the place of the right one, which it gets
    "two axes of the mesh exchanged": (
        "parallel.mesh.spec",
        lambda right, layout: type(right(layout))(*reversed(right(layout))),
    ),
    "Adam holds one moment": (
        "predict.memory.argument_bytes",
        lambda right, *given, moments=2, **other: right(*given, moments=moments - 1, **other),
    ),
    "a device sends its own part as well": (
        "predict.formulas.ring_share",
        lambda right, kind, group: right(kind, group) * group / max(group - 1, 1),
    ),
    "a sum becomes a mean": carries_out("all-reduce", lambda _, x, move, *more: lax.pmean(x, move.axes)),
    "a sum forgets all axes but the first": carries_out("all-reduce", first_axis_only),
    "a reduce-scatter takes the mean": carries_out(
        "reduce-scatter", lambda right, x, move, *more: right(x, move, *more) / lax.axis_size(move.axes)
    ),
    "a gather is turned round": carries_out("all-gather", turned_round),
    "rows go to other experts": carries_out(
        "all-to-all", lambda right, x, move, *more: jnp.roll(right(x, move, *more), 1, 0)
    ),
    "a ring is one hop late": ("model.attention._owner", lambda right, ring, hops: right(ring, hops + 1)),
    "the first stage of GPipe turns round early": ("plan.schedules._row", late_backward),
    "1F1B runs one forward more ahead": (
        "plan.schedules._in_turn",
        lambda right, units, ahead, lag=None: right(units, ahead + 1, lag),
    ),
    "a type drops its unfinished sum": (
        "parallel.mesh.from_type",
        lambda right, value, dims: parse_layout(str(right(value, dims)).partition(" +")[0]),
    ),
    "an all-reduce goes round once": (
        "predict.hosts.ring_share",
        lambda right, kind, group: right(kind, group) / (2 if kind == "all-reduce" else 1),
    ),
    "the network costs nothing": (
        "predict.formulas.level_seconds",
        lambda right, *given, **other: right(*given, **other)[:1],
    ),
    "a batch is fixed once it runs": ("serve.engine.Engine.step", fixed_batch),
    "a checkpoint has no moments": ("training.checkpoint.Checkpoints.restore", no_moments),
}
EVERYWHERE = {"17": ("a sum becomes a mean", "a checkpoint has no moments")}
"""What is planted in the processes that a lesson starts."""


def plant(fault, everywhere=False):
    """Put an error into this process, or into all that it starts: Python runs `sitecustomize` first."""
    if everywhere:
        folder = tempfile.mkdtemp()
        Path(folder, "sitecustomize.py").write_text(
            f"import {Path(__file__).stem} as m\nm.plant({fault!r})\n"
        )
        paths = (folder, str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return
    path, wrong = PLANTED[fault]
    owner, name = pkgutil.resolve_name(f"llmpar.{path.rpartition('.')[0]}"), path.rpartition(".")[2]
    right = getattr(owner, name)
    setattr(owner, name, lambda *given, **other: wrong(right, *given, **other))


FAULTS = {
    "00": ("two axes of the mesh exchanged",),
    "00b": ("two axes of the mesh exchanged",),
    "01": ("Adam holds one moment",),
    "02": ("a device sends its own part as well",),
    "03": ("a sum becomes a mean", "Adam holds one moment"),
    "04": ("a reduce-scatter takes the mean", "a gather is turned round"),
    "05": ("a sum becomes a mean", "a gather is turned round"),
    "06": ("a ring is one hop late",),
    "07": ("the first stage of GPipe turns round early", "a sum becomes a mean"),
    "08": ("1F1B runs one forward more ahead",),
    "09": ("rows go to other experts",),
    "10": ("a sum forgets all axes but the first",),
    "11": ("a gather is turned round",),
    "12": ("a type drops its unfinished sum", "a sum becomes a mean"),
    "13": ("a device sends its own part as well",),
    "14": ("a ring is one hop late", "a device sends its own part as well"),
    "15": ("the network costs nothing",),
    "16": ("a batch is fixed once it runs",),
    "17": ("an all-reduce goes round once", *EVERYWHERE["17"]),
    "18": ("a device sends its own part as well",),
    "19": ("two axes of the mesh exchanged",),
}
"""What is planted for each lesson; the first is what the lesson is about."""


def run(lesson, fault=None):
    """Run the code of a lesson in this process, with an error planted, up to the cell that fails."""
    builder = load("notebooks/build.py")
    (source,) = [one for one in builder.sources() if one.stem.startswith(f"{lesson}_")]
    cells = [cell.source for cell in builder.read_source(source).cells if cell.cell_type == "code"]
    here = {"__name__": "__main__"}
    devices, call, imports = re.split(r"^(.*use_devices\(.*\n?)", cells[0], maxsplit=1, flags=re.M)
    exec(devices + call, here)  # JAX must not run before, and what is imported later has the fault
    if fault:
        plant(fault, fault in EVERYWHERE.get(lesson, ()))
    for number, cell in enumerate([imports, *cells[1:]], 1):
        name = f"{source.name}, code cell {number}"
        linecache.cache[name] = len(cell), None, cell.splitlines(True), name  # a lesson may show its code
        try:
            exec(compile(cell, name, "exec"), here)
        except Exception:
            print(f"code cell {number} fails:\n{traceback.format_exc()}")
            return FAILED
    return 0


def in_a_process(tmp_path, *given, **more):
    """Run this file as a program."""
    env = {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg", "LLMPAR_ANSWERS": str(tmp_path / "answers.jsonl")}
    flags = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, __file__, *given]
    return subprocess.run(command, cwd=tmp_path, env=flags | env | more, capture_output=True, text=True)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "lesson, fault", [(lesson, fault) for lesson, faults in FAULTS.items() for fault in faults]
)
def test_a_lesson_sees_a_planted_error(lesson, fault, tmp_path):
    done = in_a_process(tmp_path, lesson, fault)
    assert done.returncode == FAILED, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.nightly
@pytest.mark.parametrize("lesson", FAULTS)
def test_a_lesson_passes_without_one(lesson, tmp_path):
    done = in_a_process(tmp_path, lesson)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_each_lesson_has_a_fault_and_each_fault_a_place():
    assert list(FAULTS) == [source.stem.partition("_")[0] for source in load("notebooks/build.py").sources()]
    assert set(PLANTED) == {fault for faults in FAULTS.values() for fault in faults}
    assert all(callable(pkgutil.resolve_name(f"llmpar.{path}")) for path, _ in PLANTED.values())


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
