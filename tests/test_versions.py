"""The versions that pyproject.toml admits: the oldest ones work, and what does not fit is said."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib

import pytest
from shared import CASES, ROOT

from llmpar.cli import doctor

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLDEST = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints-min.txt").read_text(), re.M))


def test_the_oldest_versions_are_the_lower_bounds():
    """jaxlib is JAX's own; a bound may leave out the last zeros."""
    extras = PROJECT["optional-dependencies"]
    listed = PROJECT["dependencies"] + extras["lab"] + extras["serve"]
    bounds = dict(re.match(r"([\w-]+)>=([\d.]+)", text).groups() for text in listed)
    assert OLDEST.keys() - bounds == {"jaxlib"} and OLDEST["jax"] == OLDEST["jaxlib"]
    for name, bound in bounds.items():
        assert re.fullmatch(rf"{re.escape(bound)}(\.0)*", OLDEST[name]), name


@pytest.mark.full
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="constraints-min.txt is for Python 3.11")
def test_the_oldest_versions_run_the_commands(tmp_path):
    """Installed into an environment of their own, which takes the network and minutes."""

    def run(*words, **how):
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, **how)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    run(sys.executable, "-m", "venv", "old")
    python = tmp_path / "old" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints-min.txt", f"{ROOT}[lab,serve]")
    plain = {"PATH": str(python.parent), "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)}
    llmpar = lambda *words: run(python, "-m", "llmpar", *words, env=plain)
    assert f"jax {OLDEST['jax']}, " in llmpar("doctor")
    assert "all-gather" in llmpar("inspect", "--mesh", "fsdp=2 tp=2", "--seq-len", "32")
    llmpar("train", "--mesh", "dp=2 tp=2", "--steps", "2", "--seq-len", "32", "--checkpoints", "kept")
    assert llmpar("generate", "--checkpoints", "kept", "--tokens", "4", "--mesh", "tp=2")
    see = "from llmpar import MeshExplorer; print(len(MeshExplorer(mesh='fsdp=2 tp=2')._repr_mimebundle_()))"
    assert run(python, "-c", see, env=plain)


@pytest.mark.parametrize("installed, said", CASES["jax_versions"])
def test_doctor_compares_versions_with_the_declared_bounds(monkeypatch, installed, said):
    """And names nothing of an extra that nobody asked for."""
    needs = ["jax<0.13,>=0.10.2", "pytest<1; extra == 'dev'", "matplotlib>=3.8.4; extra == 'lab'", "gone>=1"]
    version = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needs)
    here = lambda name: installed if name == "jax" else version(name)
    monkeypatch.setattr("importlib.metadata.version", here)
    assert doctor.misfits() == [said] * bool(said)


def test_doctor_refuses_a_flax_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax.nnx", None)
    said = r"^flax.nnx cannot be imported \(ModuleNotFoundError: .*\); if versions are the reason, python -m"
    with pytest.raises(ValueError, match=said):
        doctor.Doctor(json=True).run()
