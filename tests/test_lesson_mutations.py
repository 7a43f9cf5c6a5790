"""A lesson fails where the package is wrong: an error is planted, and its own assertions must see it.

Each lesson runs in a process of its own, cell by cell, as this file's program:

    python tests/test_lesson_mutations.py 03           without an error: ends with 0
    python tests/test_lesson_mutations.py 03 mean      with one: ends with 3 and says which cell failed
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAILED = 3


def collective(kind, wrong):
    """Carry out one kind of collective in another way; `wrong` gets the right function and its arguments."""
    from llmpar import par

    right = par.send

    def planted(x, move, position, to):
        return (wrong if move.kind == kind else lambda r, *given: r(*given))(right, x, move, position, to)

    par.send = planted


def swapped_axes():
    """The mesh has its devices in another order than it says: the two last axes are exchanged."""
    from llmpar import mesh

    right = mesh.spec
    mesh.spec = lambda layout: type(right(layout))(*reversed(right(layout)))


def forgotten_moment():
    """Adam is predicted to hold one moment."""
    from llmpar.predict import memory

    right = memory.argument_bytes
    memory.argument_bytes = lambda *given, moments=2, **other: right(*given, moments=moments - 1, **other)


def whole_message():
    """A device is predicted to send its own part as well."""
    from llmpar.predict import formulas

    right = formulas.ring_share
    formulas.ring_share = lambda kind, group: right(kind, group) * group / max(group - 1, 1)


def mean():
    """A sum over devices becomes a mean."""
    from jax import lax

    collective("all-reduce", lambda right, x, move, *_: lax.pmean(x, move.axes))


def first_axis_only():
    """A sum over several axes forgets all but the first: a `+` is dropped."""
    from jax import lax

    def wrong(right, x, move, position, to):
        others = tuple(move.axes[1:])
        return right(x / lax.axis_size(others) if others else x, move, position, to)

    collective("all-reduce", wrong)


def mean_of_shards():
    """A reduce-scatter takes the mean."""
    from jax import lax

    collective(
        "reduce-scatter", lambda right, x, move, *more: right(x, move, *more) / lax.axis_size(move.axes)
    )


def turned_round():
    """A gather puts the parts together from the last to the first."""
    import jax.numpy as jnp
    from jax import lax

    def wrong(right, x, move, position, to):
        dim, size = position[move.gathers], lax.axis_size(move.axes)
        parts = jnp.split(right(x, move, position, to), size, dim)
        return jnp.concatenate(parts[::-1], dim)

    collective("all-gather", wrong)


def to_another():
    """An all-to-all gives each rank's rows to other experts."""
    import jax.numpy as jnp

    collective("all-to-all", lambda right, x, move, *more: jnp.roll(right(x, move, *more), 1, 0))


def one_hop_late():
    """A ring takes the keys that are here for those of the rank before."""
    from llmpar import attention

    right = attention._owner
    attention._owner = lambda options, hops: right(options, hops + 1)


def late_backward():
    """The first stage of GPipe turns round before its last forward."""
    from llmpar import schedules

    right = schedules._row
    schedules._row = lambda text, m: right(text.replace("F B", "B F", 1) if "F F B" in text else text, m)


def one_more_ahead():
    """1F1B runs one forward more ahead than it should."""
    from llmpar import schedules

    right = schedules._one_forward_one_backward
    schedules._one_forward_one_backward = lambda m, warmup, lag=None: right(m, warmup + 1, lag)


def forgotten_sum():
    """A layout read from a type drops its unfinished sum."""
    from llmpar import mesh
    from llmpar.notation import parse_layout

    right = mesh.from_type
    mesh.from_type = lambda value, dims: parse_layout(str(right(value, dims)).partition(" +")[0])


def in_every_process(*faults):
    """Plant errors in the processes that a lesson starts: Python runs `sitecustomize` first."""
    folder = tempfile.mkdtemp()
    calls = "".join(f"test_lesson_mutations.{name}()\n" for name in faults)
    Path(folder, "sitecustomize.py").write_text(f"import test_lesson_mutations\n{calls}")
    paths = (folder, str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def one_lap():
    """An all-reduce is predicted to go round its ring once."""
    from llmpar.predict import hosts

    right = hosts.ring_share
    hosts.ring_share = lambda kind, group: right(kind, group) / (2 if kind == "all-reduce" else 1)


def mean_everywhere():
    """A sum over devices becomes a mean, on all hosts."""
    in_every_process("mean")


def lost_moments():
    """A checkpoint is read without the optimizer's moments, on all hosts."""
    in_every_process("no_moments")


def no_moments():
    """A checkpoint is read without the optimizer's moments."""
    import jax

    from llmpar.training.checkpoint import Checkpoints

    right = Checkpoints.restore

    def restore(*given, **other):
        state = right(*given, **other)
        return state and state._replace(optimizer=jax.tree.map(lambda x: 0 * x, state.optimizer))

    Checkpoints.restore = restore


FAULTS = {
    "00": (swapped_axes,),
    "01": (forgotten_moment,),
    "02": (whole_message,),
    "03": (mean, forgotten_moment),
    "04": (mean_of_shards, turned_round),
    "05": (mean, turned_round),
    "06": (one_hop_late,),
    "07": (late_backward, mean),
    "08": (one_more_ahead,),
    "09": (to_another,),
    "10": (first_axis_only,),
    "11": (turned_round,),
    "12": (forgotten_sum, mean),
    "17": (one_lap, mean_everywhere, lost_moments),
}
"""What is planted for each lesson; the first is what the lesson is about."""


def load_builder():
    """Load notebooks/build.py, which reads the lessons."""
    spec = importlib.util.spec_from_file_location("notebooks_build", ROOT / "notebooks" / "build.py")
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    return builder


def run(lesson, fault=None):
    """Run the code of a lesson in this process, with an error planted, up to the cell that fails."""
    builder = load_builder()
    (source,) = [one for one in builder.sources() if one.stem.startswith(lesson)]
    cells = [cell.source for cell in builder.read_source(source).cells if cell.cell_type == "code"]
    here = {"__name__": "__main__"}
    exec(cells[0], here)  # the devices; JAX must not run before
    if fault:
        globals()[fault]()
    for number, cell in enumerate(cells[1:], 2):
        try:
            exec(compile(cell, f"{source.name}, code cell {number}", "exec"), here)
        except Exception:
            print(f"code cell {number} fails:\n{traceback.format_exc()}")
            return FAILED
    return 0


def in_a_process(tmp_path, *given):
    """Run this file as a program."""
    env = {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg", "LLMPAR_ANSWERS": str(tmp_path / "answers.jsonl")}
    flags = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, __file__, *given], cwd=tmp_path, env=flags | env, capture_output=True, text=True
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "lesson, fault", [(lesson, fault.__name__) for lesson, faults in FAULTS.items() for fault in faults]
)
def test_a_lesson_sees_a_planted_error(lesson, fault, tmp_path):
    done = in_a_process(tmp_path, lesson, fault)
    assert done.returncode == FAILED, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.full
@pytest.mark.parametrize("lesson", FAULTS)
def test_a_lesson_passes_without_one(lesson, tmp_path):
    done = in_a_process(tmp_path, lesson)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_each_lesson_has_a_fault():
    assert list(FAULTS) == [source.stem[:2] for source in load_builder().sources()]


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
