"""The pages for people: commands and Python examples run, links lead somewhere, the README's story holds."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from unittest.mock import create_autospec

import jax
import numpy as np
import pytest
from flax import nnx
from shared import ROOT, TABLES, started

import llmpar
from llmpar import MeshExplorer
from llmpar.cli import main
from llmpar.cli.commands import parse
from llmpar.lessons import find
from llmpar.model.llama import FeedForward, param
from llmpar.parallel.mesh import make_mesh
from llmpar.parallel.modes import Solo
from llmpar.plan.plan import Plan
from llmpar.plan.presets import PRESETS

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
BESIDE = [ROOT / x for x in ("INSTRUCTOR.md", "CONTRIBUTING.md", "binder/postBuild")]
BESIDE.append(ROOT / ".devcontainer" / "devcontainer.json")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)

NOT_RUN = TABLES["lines_not_run"]
SLOW = TABLES["lines_slow"]
"""What takes long: the full tests run it."""
COMMAND = r"(?:llmpar|make|pip|python) [^`\n]+"
(STORY,) = re.findall(r"^## Bring a model, tune it, serve it\n.*?(?=^## )", README.read_text(), re.M | re.S)
"""What takes minutes and a server: its tests stand at the end of this file."""


def written(page: Path) -> list[str]:
    """List a page's commands: its indented lines, and those in text."""
    text = page.read_text().replace(STORY, "")
    lines = re.findall(rf"^    (?:\$ )?({COMMAND})$", text, re.M)
    lines = [re.split(r" {3,}| +# ", line)[0].strip() for line in lines]
    return list(dict.fromkeys(lines + re.findall(rf"`({COMMAND})`", text)))


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)


def test_what_is_not_run_is_listed_with_a_reason_and_exists():
    lines = {line for page in PAGES for line in written(page)}
    assert set(NOT_RUN) <= lines, "no page has this line any more"
    assert {line for line in lines if line.startswith("python ")} <= set(NOT_RUN)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    text = " ".join(page.read_text() for page in PAGES + BESIDE)
    named = {line.split()[1] for line in lines if line.startswith("make ")}
    assert named.union(re.findall(r"`make ([\w-]+)", text)) <= set(targets)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r"(?:llmpar|\.)\[([\w,-]+)\]", text)
    assert {extra for found in asked for extra in found.split(",")} <= set(extras)


@pytest.fixture
def outcome(call):
    """Run a line here, as `call` does."""
    return lambda line: call(*shlex.split(line.replace("tests/", f"{ROOT}/tests/"))[1:])


@each_page
def test_every_command_of_a_page_is_understood(page, tmp_path, monkeypatch, outcome):
    """What compiles a program is checked up to there, and reads a folder that one before it wrote."""
    monkeypatch.chdir(tmp_path)
    kept, text = set(), page.read_text()
    known = {*NOT_RUN, *SLOW}.union(*map(written, PAGES[: PAGES.index(page)]))
    if torch := re.search(r"^(?:    [0-9FBWI,]+\n)+", text, re.M):  # the file that a line below it reads
        (tmp_path / "torch.csv").write_text(textwrap.dedent(torch[0]))
    assert text.count("```") == 2 * len(examples(page)), "every fenced block is a Python example"
    refused = dict(re.findall(r"^    \$ (.*)\n    (llmpar: .*)$", text, re.M))
    for line in [line for line in written(page) if line.startswith("llmpar ")]:
        command, name = parse(shlex.split(line)[1:]), line.split()[1]
        if name in ("generate", "export"):
            assert (getattr(command, "from_", None) or command.checkpoints) in kept - {None}
        kept |= {command.checkpoints} if name == "train" else {command.folder} if name == "export" else set()
        if line in known:
            continue
        if line in refused:
            status, out, err = outcome(line)
            assert (status, out, err.splitlines()[-1]) == (1, "", refused.pop(line)), line
        elif re.search("^llmpar (compile|serve|check)|--(program|hlo) ", line):  # tests of their own
            continue
        elif hasattr(command, "step"):
            command.step.settle(8)
        elif name in ("generate", "export"):
            assert getattr(command, "model", None) is None, "the model of the checkpoint"
        else:
            status, out, err = outcome(line)
            assert status == 0 and (out or "nats per token" in err), (line, err)
    assert not refused, "a refusal that no command of this page showed"


WHEN = [pytest.mark.nightly if page == README else pytest.mark.full for page in PAGES]
RUN = [pytest.param(page, marks=mark, id=page.stem) for page, mark in zip(PAGES, WHEN, strict=True)]


@pytest.mark.parametrize("page", RUN)
def test_every_command_of_a_page_runs(page, tmp_path, monkeypatch, outcome):
    """In its order and in one folder: a later one reads what an earlier one wrote."""
    monkeypatch.chdir(tmp_path)
    of_mine = re.compile("--(program|hlo) |llmpar check")  # test_look.py, test_check.py
    for line in [line for line in written(page) if not of_mine.search(line)]:
        if line.startswith("llmpar ") and line.split()[1] not in ("compile", "serve") and line not in NOT_RUN:
            assert outcome(line)[0] == (f"    $ {line}\n" in page.read_text()), line
    if (log := tmp_path / "run.jsonl").exists():
        assert any("eval_loss" in line for line in log.read_text().splitlines())


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", head).lower()).replace(" ", "-") for head in heads}


HEADS = "# Layouts are JAX's types\n\n## `fsdp`, and more\n```python\n# no heading\n```\n"
LINKED = [*PAGES, *sorted(ROOT.glob("[A-Z]*.md")), ROOT / "notebooks" / "walk.md"]
LINKED += sorted((ROOT / "notebooks" / "src").glob("*.py"))


@pytest.mark.parametrize("page", dict.fromkeys(LINKED), ids=lambda page: page.stem)
def test_no_link_is_dead_and_no_column_without_a_name(page):
    assert anchors(HEADS) == {"layouts-are-jaxs-types", "fsdp-and-more"}, "a dead anchor would be seen"
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    if page.suffix == ".py":
        text = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    assert not re.search(r"^(?:# )?\|(?:.*\|)? *\|.*\n(?:# )?\|[-:|]+$", text, re.M), "a nameless column"
    folder = ROOT / "notebooks" if page.suffix == ".py" else page.parent
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if path.startswith(("http:", "https:", "mailto:", "attachment:")):
            continue
        there = folder / path if path else page
        assert there.exists(), target
        assert not anchor or there.suffix != ".md" or anchor in anchors(there.read_text()), target
    for exercise in re.findall(r"`(\d\d\w?\.\w+)`", text):
        find(exercise)  # or it is refused
    for path in re.findall(r"`((?:notebooks|slides|tests|llmpar)/[\w./]+)`", text):
        assert (ROOT / path).exists() or "/_" in path, path  # what is built


def test_the_first_page_is_short_and_every_page_is_reached_from_it():
    lines = README.read_text().splitlines()
    assert len(lines) <= 217 and max(map(len, lines)) <= 130
    assert "float32[" not in README.read_text(), "types are for docs/words.md"
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)", README.read_text()))
    assert linked == {f"docs/{page.name}" for page in PAGES[1:]}


def test_the_readme_and_the_page_of_words_say_the_same():
    words = (ROOT / "docs" / "words.md").read_text()
    table = re.compile(r"^\| in the layout before \|.*?\n\n", re.M | re.S)
    assert table.search(words)[0] == table.search(README.read_text())[0]


def test_the_tree_is_printed_with_a_line_for_each_folder():
    package = ROOT / "llmpar"
    folders = [path.parent.name for path in sorted(package.glob("*/__init__.py"))]
    row = re.compile(r"^ *(\w+)/  +(\S.*)$", re.M)
    printed = dict(row.findall((ROOT / "docs" / "architecture.md").read_text()))
    assert sorted(printed) == folders
    assert printed == dict(row.findall(README.read_text())) == dict(row.findall(llmpar.__doc__))


def test_the_table_of_files_names_every_file_and_no_other():
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Files")[2]
    rows = dict(re.findall(r"^\| `(\w+)/` \| (.*) \|$", table, re.M))
    named = {folder: sorted(re.findall(r"`(\w+)`", row)) for folder, row in rows.items()}
    files = {}
    for path in sorted((ROOT / "llmpar").glob("*/*.py")):
        if path.stem != "__init__" and path.parent.name not in ("lessons", "cli"):
            files.setdefault(path.parent.name, []).append(path.stem)
    assert named == files


EXAMPLES = [text for page in PAGES for text in examples(page) if "from train" not in text]
EXAMPLES = [pytest.param(x, marks=[pytest.mark.long] * ("LocalSteps(" in x)) for x in EXAMPLES]
"""Workers that train apart compile for seconds: test_local_steps has them, too."""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: text.strip().splitlines()[-1][:40])
def test_every_python_example_runs(example, tmp_path, monkeypatch, capsys):
    """But for what saves a whole page, as test_page.py does: it is called as it may be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MeshExplorer, "save", create_autospec(MeshExplorer.save))
    cut = jax.NamedSharding(make_mesh(Plan("dp=2 fsdp=2 tp=2").mesh), jax.P("dp", "tp"))
    array = jax.device_put(np.zeros((8, 8), np.float32), cut)
    with jax.numpy_dtype_promotion("standard"):
        (tmp_path / "example.py").write_text(example)  # whose lines errors can show
        exec(compile(example, str(tmp_path / "example.py"), "exec"), {"array": array})
    losses = [float(x) for x in re.findall(r"^\d (\S+)$", capsys.readouterr().out, re.M)]
    assert "print(i, float" not in example or (len(losses) == 3 and round(losses[0], 2) == 5.58 > losses[2])
    assert MeshExplorer.save.called == ("mesh.html" in example)


def test_what_the_readme_shows_of_a_program_is_what_look_prints(capsys, monkeypatch):
    """But for what the version of XLA decides: the temporaries."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "fixtures" / "mine")
    exec(examples(README)[0], {})
    shown = examples(README)[0] + re.findall(r"```\n\n((?:    .*\n)+)", README.read_text())[0]
    decided = lambda text: re.sub(r"(temp|peak) [\d.]+ \w+", r"\1", text)
    out = capsys.readouterr().out
    assert decided(shown).endswith(decided("".join(f"    {line}\n" for line in out.splitlines())))
    assert out.count("\n") > 8 and max(map(len, out.splitlines())) <= 110


def test_the_readme_s_feed_forward_is_the_model_s():
    names: dict = {"jax": jax}
    exec(examples(README)[1], names)
    config, par = PRESETS["tiny"], Solo()
    rows = config.block_weights()
    layer = FeedForward(config, {path: param(nnx.Rngs(0), row) for path, row in rows.items()}, "ffn")
    x = jax.random.normal(jax.random.key(0), (2, 8, config.width))
    np.testing.assert_array_equal(names["__call__"](layer, x, par), layer(x, par))


def test_what_agents_read_names_commands_keys_and_pages_that_exist():
    page = ROOT / "docs" / "site" / "llms.txt"
    text = page.read_text()
    lines = written(page)
    for line in lines:
        parse(shlex.split(line)[1:])
    assert len(lines) > 8 and max(map(len, text.splitlines())) <= 160
    for name in re.findall(r"`llmpar\.(\w+)", text):
        assert getattr(llmpar, name)
    for target in re.findall(r"\]\((\S+)\.html\)", text):
        assert (ROOT / f"{target}.md").exists()


def commands() -> list[str]:
    """The story's commands, without what stands beside them."""
    lines = re.findall(r"^    ((?:llmpar|curl) .*)", re.sub(r"\\\n +", "", STORY), re.M)
    return [re.split(r" {3,}", line)[0] for line in lines]


def write_examples(folder) -> None:
    pytest.importorskip("uvicorn")
    (example,) = re.findall(r"^```python\n(.*?)^```$", STORY, re.M | re.S)
    subprocess.run([sys.executable, "-c", example], cwd=folder, check=True)
    assert len((folder / "tune.jsonl").read_text().splitlines()) == 200


@pytest.mark.long
def test_each_command_of_the_story_takes_what_an_earlier_one_wrote(tmp_path, monkeypatch, capsys):
    """Two steps of each training, in this process; `generate` reads the folder that the story serves."""
    monkeypatch.chdir(tmp_path)
    write_examples(tmp_path)
    *trained, serve, _ = commands()
    for line in (*trained, serve.replace("serve", "generate 'What'") + " --tokens 2"):
        words = re.sub(r"--eval-every \d+", "--eval-every 1", re.sub(r"--steps \d+", "--steps 2", line))
        with jax.numpy_dtype_promotion("standard"):
            assert not main(shlex.split(words)[1:]), capsys.readouterr().err
    assert capsys.readouterr().out.splitlines()[-1].startswith("What")


@pytest.mark.nightly  # whether it learns what the story promises: the commands are run above
@pytest.mark.processes
@pytest.mark.skipif(not shutil.which("curl"), reason="the README asks with curl")
def test_a_model_is_tuned_and_answers_what_it_could_not_know(tmp_path):
    """Only ports and the path of llmpar differ from what the README says."""
    binary = tmp_path / "llmpar"
    binary.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llmpar "$@"\n')
    binary.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "LLMPAR_KEY"):
        env.pop(name, None)

    write_examples(tmp_path)
    *trained, serve, ask = commands()
    assert [line.split()[1] for line in (*trained, serve)] == "train export train export serve".split()
    for line in trained:
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found = [float(x) for x in re.findall(r"perplexity (\S+)\)", done.stderr)]
        assert bool(found) == ("--eval-every" in line)
        assert not found or found[-1] < 6, "of the held-out answers"

    def answers(line, numbers):
        command = shlex.split(f"{line} --port 0")
        with started(command, r"answers at http://(\S+),", cwd=tmp_path, env=env) as found:
            for n in numbers:
                asked = ask.replace("777", str(n)).replace("localhost:8000", found[1])
                done = subprocess.run(asked, shell=True, cwd=tmp_path, capture_output=True, check=True)
                yield json.loads(done.stdout)["choices"][0]["message"]["content"]

    assert list(answers(serve, [777, 1000, 314, 2025])) == ["blue", "red", "red", "blue"]
    assert "It answers *blue*" in STORY
    assert not {"blue", "red"} & set(answers(serve.replace("mine", "small"), [777, 1000]))
