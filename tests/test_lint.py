"""What `make lint` asks, each question a test: they run beside the others."""

import subprocess
import sys

import pytest
from shared import ROOT

QUESTIONS = {
    "rules": ["-m", "ruff", "check", "."],
    "format": ["-m", "ruff", "format", "--check", "."],
    "types": ["-m", "mypy"],
}


@pytest.mark.long
@pytest.mark.parametrize("words", QUESTIONS.values(), ids=QUESTIONS)
def test_nothing_is_wrong(words):
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
