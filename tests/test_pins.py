"""Pins of what a program sends, and assertions on it: each is seen to fail."""

import dataclasses
import functools
import os
import re
import subprocess
import sys

import jax
import pytest
from jax import P, lax
from jax.sharding import NamedSharding
from shared import HERE, ROOT
from test_cures import MESH, on

from llmpar import look
from llmpar.inspect.pins import unused_pins


def step(w, x, wanted=True):
    """A matmul whose result is kept cut by rows, or is not: then it is gathered for what follows."""
    h = x @ w
    if wanted:
        return jax.lax.with_sharding_constraint(h, NamedSharding(MESH, P("data", "model")))
    return jax.lax.with_sharding_constraint(h, NamedSharding(MESH, P()))


@functools.cache
def shown(wanted=True, width=32):
    return look(step, on((64, width), None, "model"), on((16, 64), "data"), wanted)


@pytest.fixture
def quiet(monkeypatch):
    for name in ("CI", "LLMPAR_UPDATE_PINS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_pin_is_written_once_and_a_change_is_refused_by_its_line(tmp_path, quiet):
    file = tmp_path / "pins" / "step.comm"
    both = shown(False)
    assert both.pin(file) is both and both.pin(file)
    text = file.read_text()
    assert text.startswith("# step on data=4 model=2 sends, per device and run\n")
    lines = [line.split()[0].rpartition(":") for line in text.splitlines()[1:]]
    assert lines and all(name == "tests/test_pins.py" and line.isdigit() for name, _, line in lines)
    file.write_text(text.replace("test_pins.py:", "test_pins.py:9"))
    both.pin(file)  # lines move with every edit above them
    with pytest.raises(AssertionError, match=r"step sends otherwise than '.*step.comm' says:\n- ") as error:
        shown().pin(file)
    assert "all-gather data" in str(error.value) and "gone\n" in str(error.value)
    with pytest.raises(AssertionError, match=r"~ .* was ×1 [\d,]+ B\n|\+ .* new") as error:
        shown(False, 64).pin(file)
    quiet.setenv("LLMPAR_UPDATE_PINS", "1")
    shown(False, 64).pin(file)
    quiet.delenv("LLMPAR_UPDATE_PINS")
    shown(False, 64).pin(file)
    quiet.setenv("CI", "true")
    with pytest.raises(AssertionError, match="CI writes no pins"):
        shown().pin(tmp_path / "new.comm")
    assert not (tmp_path / "new.comm").exists()


def test_a_file_that_is_no_pin_of_this_is_refused(tmp_path, quiet):
    other = "# step on data=8 sends, per device and run\n"
    for text in ("", "a b\n", "# step on data=4 model=2 sends\nx  y\n", other):
        (tmp_path / "a.comm").write_text(text)
        with pytest.raises(ValueError, match="use a file for each mesh" if text == other else "is no pin"):
            shown().pin(tmp_path / "a.comm")
    file, gone = tmp_path / "renamed.comm", tmp_path / "gone.comm"
    for path in file, gone:
        path.write_text("# other on data=4 model=2 sends, per device and run\n")
    with pytest.raises(ValueError, match="for each function, or if that was renamed, pytest --update-pins"):
        shown().pin(file)
    quiet.setenv("LLMPAR_UPDATE_PINS", "1")
    shown().pin(file)
    assert "# step on" in file.read_text() and gone in unused_pins() and file not in unused_pins()
    with pytest.raises(ValueError, match="use a file for each function"):  # in the same run
        dataclasses.replace(shown(), name="third").pin(file)


def test_assertions_hold_fail_and_show_that_they_can():
    right, wrong = shown(), shown(False)
    assert right.forbids("all-gather", fails_on=wrong) is right
    assert wrong.sends("all-gather", "model", fails_on=right) is wrong
    sent = wrong.bytes_of("all-gather")
    assert sent == sum(row["bytes_sent"] for row in wrong.rows) > 0
    wrong.sends("all-gather", at_most=sent).sends(wrong.rows[0]["arrow"])
    with pytest.raises(AssertionError, match=rf"sends\('all-gather'\) fails: step sends {sent:,} B"):
        wrong.sends("all-gather", at_most=sent - 1)
    with pytest.raises(AssertionError, match=r"step sends 0 B by all-gather over data\nstep on"):
        right.sends("all-gather", "data")
    with pytest.raises(AssertionError, match=f"sends {sent:,} B by all-gather"):
        wrong.forbids("all-gather")
    with pytest.raises(AssertionError, match="holds of fails_on too"):
        right.forbids("all-gather", fails_on=right)
    with pytest.raises(AssertionError, match="holds of fails_on too"):
        wrong.sends("all-gather", fails_on=wrong)
    moves = "f32[8@modle] -> f32[8]", "b/modle s -> b s", "f32[8]->f32[8]", "f32[8 -> f32[8]"
    for misprint in ("all-gathers", "->", "nonsense -> nonsense", *moves):
        with pytest.raises(ValueError, match="is no collective; use all-reduce"):
            right.forbids(misprint)
    with pytest.raises(ValueError, match="no axis 'rows'; it has data, model"):
        right.forbids("all-gather", "rows")


def seen(f):
    """A look at a function of the blocks of an array that is cut over data."""
    run = jax.shard_map(f, mesh=MESH, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    return look(run, on((64, 8), "data"))


def test_what_is_forbidden_is_in_no_branch_and_in_no_part_of_an_axis():
    pairs = [[0, 1], [2, 3]]
    part = seen(lambda x: lax.all_gather(x, "data", axis_index_groups=pairs, tiled=True))
    with pytest.raises(AssertionError, match="sends 0 B by all-gather over data"):
        part.forbids("all-gather", "data")
    summed, gathered = lambda x: lax.psum(x, "data"), lambda x: lax.all_gather(x, "data", tiled=True)[:16]
    branches = seen(lambda x: lax.cond(x.sum() > 0, summed, gathered, x))
    assert "in another branch" in str(branches)
    for kind in ("all-reduce", "all-gather"):
        with pytest.raises(AssertionError, match="forbids"):
            branches.forbids(kind)
    branches.forbids("all-to-all")


def test_bytes_of_one_iteration_are_not_those_of_a_run():
    body = lambda x: lax.psum(x, "data") * 0.1
    loop = seen(lambda x: lax.while_loop(lambda x: x.sum() > 1e-3, body, x))
    loop.sends("all-reduce", "data")
    with pytest.raises(ValueError, match="loop of unknown trip count"):
        loop.sends("all-reduce", "data", at_most=1e6)


STORY = (HERE / "fixtures" / "pin_story.txt").read_text()
RUNS = (HERE / "fixtures" / "pin_runs.txt").read_text()


@pytest.mark.processes
def test_a_users_test_names_the_line_of_a_dropped_constraint(tmp_path):
    """Pinned; a commit drops the constraint; the test names the line; pinned anew it passes."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    env = {k: v for k, v in env.items() if k not in ("CI", "PYTEST_ADDOPTS", "XLA_FLAGS")}
    (tmp_path / "test_step.py").write_text(STORY)
    command = [sys.executable, "-c", RUNS]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert re.findall(r"status (\d)", done.stdout) == ["0", "0", "1", "0", "0"], done.stdout + done.stderr
    line = 1 + STORY[: STORY.index("h = jnp.tanh")].count("\n")  # where the value is made that is moved
    assert f"test_step.py:{line}  f32[16@data,64] -> f32[16,64]" in done.stdout
    assert "check_pin" not in done.stdout
