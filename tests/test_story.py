"""The README's story, line by line: a model is made, tuned, handed on, served and asked."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import jax
import pytest
from shared import started
from test_docs import ROOT, STORY

from llmpar.cli import main

pytest.importorskip("uvicorn")


def commands() -> list[str]:
    """The story's commands, without what stands beside them."""
    lines = re.findall(r"^    ((?:llmpar|curl) .*)", re.sub(r"\\\n +", "", STORY), re.M)
    return [re.split(r" {3,}", line)[0] for line in lines]


def write_examples(folder) -> None:
    """Run the story's Python."""
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
