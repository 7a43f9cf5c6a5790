"""The same command gives the same weights under engines that tests/install_engines.sh has installed (SLURM,
Ray and torchrun need root): `make engines`. Hosts are network namespaces (small_cluster.py)."""

import contextlib
import datetime
import functools
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import small_cluster
from shared import HERE
from small_cluster import Hosts, Slurm, until
from test_launch import kept

from llmpar.cli.commands import parse
from llmpar.launch import local

pytestmark = [pytest.mark.engines, pytest.mark.timeout(540)]
ROOT = Path(os.environ.get("LLMPAR_ENGINES", "nowhere")).absolute()
TRAIN = (
    "train", "--mesh", "fsdp=-1", "--batch-size", "4", "--seq-len", "32", "--limit-bytes", "65536",
    "--steps", "24", "--every", "8", "--checkpoints", "kept", "--log", "log.jsonl", "--json",
)  # fmt: skip
"""Four processes of one device; two while torchrun has lost a host."""
RECORD = HERE / "engines.json"


def environ(*programs: Path, **more: str) -> dict:
    """One device in each process; programs in front of the path."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    left = [flag for flag in flags if "device_count" not in flag]
    path = [*map(str, programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    own = {
        "PYTHONPATH": str(HERE.parent), "JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(left), "PATH": os.pathsep.join(path),
    }  # fmt: skip
    return os.environ | own | more


def job_file(engine: str, folder: Path, *words: str, site: str = "", **options: int) -> Path:
    """What `llmpar launch` writes, for nodes without GPUs."""
    (folder / "site.toml").write_text(f"gpus_per_node = 0\n{site}")
    asked = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    path = folder / f"job.{engine}"
    given = ["launch", engine, *asked, "--site", str(folder / "site.toml"), "--out", str(path)]
    parse([*given, "--", *TRAIN, *words]).run()
    return path


def steps(folder: Path) -> list[dict]:
    """What the run has logged so far: a row per step."""
    with contextlib.suppress(OSError):
        lines = (folder / "log.jsonl").read_text().splitlines()
        with contextlib.suppress(json.JSONDecodeError):  # a line that is being written
            return [row for line in lines if "step" in (row := json.loads(line))]
    return []


def resumed(folder: Path) -> int:
    """How often the run has gone on from a checkpoint, as its rows tell."""
    return sum("resumed" in row for row in steps(folder))


def saved(folder: Path, step: int) -> bool:
    """Whether a checkpoint of this step or a later one is whole."""
    found = [int(path.name) for path in (folder / "kept").glob("*") if path.name.isdigit()]
    return max(found, default=0) >= step


@functools.cache
def machine() -> str:
    """What the times were measured on."""
    python = f"Python {platform.python_version()}, JAX {jax.__version__}"
    return f"{os.cpu_count()} cores, Linux {platform.release()}, {python}"


@pytest.fixture
def record(request):
    """Keep seconds of an engine in engines.json, where this was asked for."""

    def keep(engine: str, version: str, **seconds: float) -> None:
        print(engine, version, *(f"{name} {value:.1f} s" for name, value in seconds.items()))
        if not request.config.getoption("--record-engines"):
            return
        rows = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        row = {"version": version, "date": datetime.date.today().isoformat(), "machine": machine()}
        row |= {"load": round(os.getloadavg()[0], 1)} | {k: round(v, 1) for k, v in seconds.items()}
        RECORD.write_text(json.dumps(dict(sorted((rows | {engine: row}).items())), indent=1) + "\n")

    return keep


def said(program: Path | str, *words: str, env=None) -> str:
    """The version that a program tells."""
    done = subprocess.run([str(program), *words], capture_output=True, text=True, env=env)
    return re.search(r"\d+\.\d+(\.\d+)?", done.stdout + done.stderr)[0]


def installed(name: str) -> Path:
    """The folder of an engine's programs."""
    programs = ROOT / name / "bin"
    if not programs.exists():
        pytest.skip(f"{name} is not installed: tests/install_engines.sh FOLDER, and LLMPAR_ENGINES=FOLDER")
    return programs


def listening(told: str, among: set[int] | None = None) -> dict[str, set[str]]:
    """Addresses on which programs listen, as `ss -ltnpH` told; a socket is that of its eldest process."""
    found: dict[str, set[str]] = {}
    for line in told.splitlines():
        holders = [(int(pid), name) for name, pid in re.findall(r'"([^"]+)",pid=(\d+)', line)]
        if holders and (among is None or min(holders)[0] in among):
            address = line.split()[3].rpartition(":")[0].strip("[]").removeprefix("::ffff:")
            found.setdefault(min(holders)[1], set()).add(address)
    return found


def listens_here(process: subprocess.Popen) -> dict[str, set[str]]:
    """On which addresses the programs that a process has started listen."""
    family, new = set(), {process.pid}
    while new:
        family |= new
        kin = [Path(f"/proc/{pid}/task/{pid}/children") for pid in new]
        new = {int(pid) for path in kin if path.exists() for pid in path.read_text().split()}
    told = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    return listening(told, family)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of a run that nothing interrupted: four processes that `llmpar launch local` starts."""
    folder = tmp_path_factory.mktemp("alone")
    with contextlib.chdir(folder), local.Processes(["llmpar", *TRAIN], 4, 1, environ()) as processes:
        ended = processes.wait(400)
    assert ended.status == 0, ended.words
    return folder


def test_launch_local_starts_it(tmp_path, alone, record):
    command = ["llmpar", "launch", "local", "--processes", "4", "--devices", "1", "--", *TRAIN]
    with running(command, tmp_path) as process:
        first = until(lambda: steps(tmp_path) or process.poll(), "first step", 300)
        open_on = listens_here(process)
        assert process.wait(300) == 0
    assert set().union(*open_on.values()) == {"127.0.0.1"}
    assert kept(tmp_path / "kept") == kept(alone / "kept")
    record("llmpar launch local", said("llmpar", "--version", env=environ()), start_s=first)


@contextlib.contextmanager
def running(command, folder: Path, **options):
    """A command whose output goes to a file of the folder; it ends with the block."""
    with open(folder / "out.txt", "wb") as file:
        given = {"env": environ(), "cwd": folder, "stdin": subprocess.DEVNULL, "start_new_session": True}
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **(given | options))
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_mpi_runs_its_job_file(mpi, alone, tmp_path, record):
    programs = installed(mpi)
    path = job_file("mpi", tmp_path, site=f"processes_per_node = 4\nmpi = '{mpi}'\n")
    # Open MPI wants to be told that root may, and that four processes may share two cores.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env = environ(programs, PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe", **root)
    with running(["bash", str(path)], tmp_path, env=env) as process:
        first = until(lambda: steps(tmp_path) or process.poll() is not None, "first step", 300)
        open_on = listens_here(process)
        assert process.wait(300) == 0, (tmp_path / "out.txt").read_text()[-3000:]
    assert open_on.pop("llmpar") == {"127.0.0.1"}
    assert set(open_on) <= {"prterun", "mpiexec"}, "what docs/hosts.md says of them"
    assert kept(tmp_path / "kept") == kept(alone / "kept")
    version = said(programs / "mpirun", "--version", env=env)
    record({"openmpi": "Open MPI", "mpich": "MPICH"}[mpi], version, start_s=first)


@pytest.fixture
def hosts(tmp_path):
    """Two hosts in a box, and a head."""
    if why := small_cluster.missing():
        pytest.skip(f"hosts in a box: {why}")
    with Hosts(2, tmp_path / "box") as found:
        yield found


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A SLURM with four nodes."""
    if not shutil.which("slurmctld") or not shutil.which("munged"):
        pytest.skip("SLURM is not installed: tests/install_engines.sh FOLDER")
    if why := small_cluster.missing():
        pytest.skip(f"hosts in a box: {why}")
    folder = tmp_path_factory.mktemp("slurm")
    with Hosts(4, folder / "box") as hosts, Slurm(hosts, folder / "slurm") as found:
        yield found


def submitted(slurm: Slurm, folder: Path) -> str:
    """The number of a job of four nodes."""
    path = job_file("slurm", folder, nodes=4, site="time_limit = '00:20:00'\n")
    return slurm.ask("sbatch", "--parsable", path.name, folder=folder, **environ()).strip()


def state(slurm: Slurm, job: str) -> str:
    """PENDING, RUNNING …; '' when it has left the queue."""
    return slurm.ask("squeue", "-h", "-j", job, "-o", "%T").strip()


def output(folder: Path) -> str:
    """What the job's processes wrote."""
    return "\n".join(path.read_text()[-3000:] for path in folder.glob("llmpar-*.log"))


def over(slurm: Slurm, job: str):
    """Whether it has ended, well or not."""
    return re.search("COMPLETED|FAILED", slurm.ask("scontrol", "show", "job", job))


def ended(slurm: Slurm, job: str, folder: Path, alone: Path) -> None:
    """Wait for the end of a job, whose weights must be those of the run that nothing interrupted."""
    until(lambda: over(slurm, job), "the job's end", 300, lambda: output(folder))
    assert "JobState=COMPLETED" in slurm.ask("scontrol", "show", "job", job), output(folder)
    assert resumed(folder), output(folder)
    assert kept(folder / "kept") == kept(alone / "kept")


def test_slurm_starts_again_after_a_kill(slurm, alone, tmp_path, record):
    """A task that is killed ends the step, and the job's next attempt goes on."""
    job = submitted(slurm, tmp_path)
    first = until(lambda: steps(tmp_path), "first step", 300, lambda: output(tmp_path))
    open_on = listening(slurm.hosts.run("n1", ["ss", "-ltnpH"]).stdout)
    assert open_on["llmpar"] == {slurm.hosts.address("n1")}
    until(lambda: saved(tmp_path, 8), "a checkpoint", 100, lambda: output(tmp_path))
    kill = "kill -9 $(scontrol listpids $0 | awk '$3 ~ /^[0-9]+$/ && $4 ~ /^[0-9]+$/ {print $1}')"
    done = slurm.hosts.run("n3", ["sh", "-c", kill, job], env=os.environ | slurm.environ)
    assert done.returncode == 0, done
    again = until(lambda: resumed(tmp_path), "the next attempt", 200, lambda: output(tmp_path))
    ended(slurm, job, tmp_path, alone)
    record("SLURM, four nodes", said("slurmctld", "-V"), start_s=first, again_s=again)


def test_slurm_requeues_a_job_that_is_asked_to_stop(slurm, alone, tmp_path, record):
    """SLURM asks with SIGTERM before the time limit: all save, and the job waits in the queue again."""
    job = submitted(slurm, tmp_path)
    until(lambda: len(steps(tmp_path)) > 3, "four steps", 300, lambda: output(tmp_path))
    slurm.ask("scancel", "--signal=TERM", job)
    queued = until(lambda: "PENDING" in state(slurm, job), "the queue", 100, lambda: output(tmp_path))
    again = queued + until(lambda: resumed(tmp_path), "the next attempt", 300, lambda: output(tmp_path))
    assert next(row for row in steps(tmp_path) if "resumed" in row)["resumed"] >= 3, "saved when it was asked"
    ended(slurm, job, tmp_path, alone)
    record("SLURM, requeued", said("slurmctld", "-V"), queued_s=queued, again_s=again)


def test_slurm_requeues_a_job_whose_node_fails(slurm, alone, tmp_path, record):
    """The job waits until four nodes are there again."""
    job = submitted(slurm, tmp_path)
    until(lambda: saved(tmp_path, 8), "a checkpoint", 300, lambda: output(tmp_path))
    begin = time.monotonic()
    slurm.hosts.fail("n3")
    until(lambda: "PENDING" in state(slurm, job), "the queue", 200, slurm.said)
    slurm.hosts.start("n3")
    slurm.start("n3")
    until(lambda: resumed(tmp_path), "the next attempt", 300, lambda: output(tmp_path) + slurm.said())
    again = time.monotonic() - begin
    ended(slurm, job, tmp_path, alone)
    record("SLURM, a node lost", said("slurmctld", "-V"), again_s=again)


def whole(folder: Path) -> dict:
    """The weights of the newest checkpoint, as no device holds them."""
    found = [path for path in (folder / "kept").glob("*") if path.name.isdigit()]
    newest = max(found, key=lambda path: int(path.name)) / "state"
    with ocp.PyTreeCheckpointer() as reader:
        shapes = reader.metadata(newest).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        return reader.restore(newest, restore_args=as_numpy)["params"]


def test_torchrun_goes_on_with_one_host_and_again_with_two(hosts, alone, tmp_path, record):
    """Host 2 fails; host 1 takes over its processes' work, and gives it back when it returns."""
    programs = installed("torch")
    # Evaluations change no weight: they give the second host time to come back.
    slow = ("--eval-every", "1", "--eval-batches", "30")
    site = "processes_per_node = 2\nhosts = ['n1', 'n2']\n"
    path = job_file("torchrun", tmp_path, *slow, site=site, nodes=2, min_nodes=1)
    said_by = lambda: (tmp_path / "n1.txt").read_text()[-5000:]

    def start(name):
        hosts.background(name, ["bash", path.name], tmp_path / f"{name}.txt", tmp_path, env=environ(programs))

    agent = hosts.background("n1", ["bash", path.name], tmp_path / "n1.txt", tmp_path, env=environ(programs))
    start("n2")
    first = until(lambda: steps(tmp_path), "first step", 200, said_by)
    assert listening(hosts.run("n1", ["ss", "-ltnpH"]).stdout)["llmpar"] == {hosts.address("n1")}
    until(lambda: saved(tmp_path, 8), "a checkpoint", 200, said_by)
    hosts.fail("n2")
    less = until(lambda: resumed(tmp_path) == 1, "one host goes on", 200, said_by)
    hosts.start("n2")
    start("n2")
    more = until(lambda: resumed(tmp_path) == 2, "two hosts go on", 200, said_by)
    assert agent.wait(300) == 0, said_by()
    sizes = re.findall(r"on fsdp=(\d)", (tmp_path / "n1.txt").read_text())
    assert sizes == ["4", "2", "4"], said_by()
    same = lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    jax.tree.map(same, whole(tmp_path), whole(alone))
    version = said(programs / "python", "-c", "import torch; print(torch.__version__)")
    record("torchrun, two hosts", version, start_s=first, less_s=less, more_s=more)


@pytest.fixture
def short_folder():
    """Ray's sockets lie below it, and the name of a socket has 107 letters at most."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield name


def test_ray_runs_its_program_and_starts_again_after_a_kill(hosts, alone, tmp_path, short_folder, record):
    programs = installed("ray")
    path = job_file("ray", tmp_path, nodes=2, site="processes_per_node = 2\n")
    env = environ(programs, RAY_worker_niceness="0")
    begin = time.monotonic()
    for name in ("n1", "n2"):
        to = ["--head", "--port=6379", f"--temp-dir={short_folder}", "--include-dashboard=false"]
        to = to if name == "n1" else [f"--address={hosts.address('n1')}:6379"]
        start = ["ray", "start", "--block", "--num-cpus=2", f"--node-ip-address={hosts.address(name)}"]
        start += ["--disable-usage-stats", *to]
        node = hosts.background(name, start, tmp_path / f"{name}.txt", tmp_path, env=env)
        told = lambda name=name: (tmp_path / f"{name}.txt").read_text()
        up = lambda told=told, node=node: "Ray runtime started" in told() or node.poll() is not None
        until(up, f"ray on {name}", 120, told)
        assert node.poll() is None, told()
    cluster = time.monotonic() - begin
    env |= {"RAY_ADDRESS": f"{hosts.address('n1')}:6379"}
    driver = hosts.background("n1", ["python", path.name], tmp_path / "out.txt", tmp_path, env=env)
    said_by = lambda: (tmp_path / "out.txt").read_text()[-5000:]
    first = until(lambda: steps(tmp_path) or driver.poll() is not None, "first step", 200, said_by)
    until(lambda: saved(tmp_path, 8) or driver.poll() is not None, "a checkpoint", 200, said_by)
    kill = "grep -l ray::[R]ayTrainWorker /proc/[0-9]*/cmdline | head -n 1 | cut -d/ -f3 | xargs kill -9"
    assert hosts.run("n2", ["sh", "-c", kill]).returncode == 0
    again = until(lambda: resumed(tmp_path), "the next attempt", 200, said_by)
    assert driver.wait(300) == 0, said_by()
    assert kept(tmp_path / "kept") == kept(alone / "kept")
    version = said(programs / "ray", "--version", env=env)
    record("Ray JaxTrainer, two hosts", version, cluster_s=cluster, start_s=first, again_s=again)


def test_ray_on_slurm_as_the_slide_lists_it(slurm, alone, tmp_path, short_folder, record):
    """Without the container and the GPUs that there are none of here."""
    programs = installed("ray")
    deck = (HERE.parent / "slides" / "src" / "13_run.py").read_text()
    listing = re.search(r"^# ```bash\n(.*?--overlap.*?)^# ```", deck, re.S | re.M)[1]
    script = "#!/bin/bash\n" + re.sub("^# ?", "", listing, flags=re.M)
    script = re.sub('inside=".*"', 'inside=""', script.replace(" --gpus-per-node=4", ""))
    (tmp_path / "job.sbatch").write_text(script)
    written = job_file("ray", tmp_path, nodes=2, site="processes_per_node = 2\n")
    written.rename(tmp_path / "train_with_ray.py")
    env = environ(programs, RAY_worker_niceness="0", RAY_TMPDIR=short_folder)
    asked = ("sbatch", "--parsable", "--output=llmpar-ray.log", "job.sbatch")
    job = slurm.ask(*asked, folder=tmp_path, **env).strip()
    first = until(lambda: steps(tmp_path) or over(slurm, job), "first step", 300, lambda: output(tmp_path))
    until(lambda: over(slurm, job), "the job's end", 200, lambda: output(tmp_path))
    assert kept(tmp_path / "kept") == kept(alone / "kept"), output(tmp_path)
    version = said(programs / "ray", "--version", env=env)
    record("Ray JaxTrainer on SLURM", version, start_s=first)


VLLM = (HERE / "fixtures" / "engine_vllm.txt").read_text()


def test_a_server_s_job_file_joins_two_nodes_by_ray(slurm, tmp_path, short_folder):
    """Without the container, the GPUs and vLLM that there are none of here: in its place, what asks Ray."""
    programs, mine = installed("ray"), tmp_path / "mine"
    mine.mkdir()
    (mine / "vllm").write_text(VLLM.replace("{python}", str(programs / "python")))
    (mine / "vllm").chmod(0o755)
    path = tmp_path / "job.sbatch"
    asked = ("slurm", "--nodes", "2", "--serve", "vllm", "--weights", "llama3.1-405b", "--out", str(path))
    parse(["launch", *asked]).run()
    path.write_text(path.read_text().replace("#SBATCH --gpus-per-node=8\n", ""))
    env = environ(mine, programs, RAY_worker_niceness="0", RAY_TMPDIR=short_folder, VLLM_API_KEY="k e'y")
    job = slurm.ask("sbatch", "--parsable", path.name, folder=tmp_path, **env).strip()
    until(lambda: over(slurm, job), "the job's end", 200, lambda: output(tmp_path))
    words, nodes, key, mode = json.loads((tmp_path / "served.json").read_text())
    assert "JobState=COMPLETED" in slurm.ask("scontrol", "show", "job", job), output(tmp_path)
    assert (nodes, key, mode) == (2, "k e'y", "token")
    assert words[:2] == ["serve", "llama3.1-405b"] and words[-4:] == ["--host", "127.0.0.1", "--port", "8000"]
