"""Engines: which one started this process, as which of how many, told by the environment alone."""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

FIRST_PORT, NUM_PORTS = 20_000, 12_000
"""Ports that a job's name chooses from: below those that Linux gives to outgoing connections (32768 on)."""
KUBERNETES_PORT = 55527
"""The port of JAX's own detection there."""


@dataclass(frozen=True)
class Place:
    """What an engine told a process.

    Attributes:
        engine: its name, for people.
        num_processes: of the whole job; 1 where nobody started several.
        process_id: this one's number, from 0.
        coordinator: ``host:port`` of process 0; None where the environment does not tell.
        local_id: this one's number on its host, from 0.
        num_local: processes on its host; 0 where the environment does not tell.
        joined_by: who joins the processes if not we: a detection method of JAX, or ``engine``.
        note: what the user may have meant otherwise.
    """

    engine: str = "none"
    num_processes: int = 1
    process_id: int = 0
    coordinator: str | None = None
    local_id: int = 0
    num_local: int = 0
    joined_by: str | None = None
    note: str = ""

    @property
    def is_one_host(self) -> bool:
        """Whether all processes are known to share a host."""
        return self.num_local == self.num_processes


def detect(environ: Mapping[str, str], read: Callable[[str], str] = lambda path: "") -> Place:
    """Tell which engine started this process. The innermost one counts: an `mpirun` inside a SLURM job.

    ``read`` gives the text of a file that a variable names (PBS has one with the hosts). A coordinator's
    address that the user gives (JAX_COORDINATOR_ADDRESS) replaces the engine's in every case. Processes that
    are all on one host meet on loopback, whatever that host is called.

    Raises ValueError where the variables contradict each other.
    """
    env = {name: value for name, value in environ.items() if value != ""}
    place = next((found for rule in RULES if (found := rule(env, read))), Place())
    if (given := env.get("JAX_COORDINATOR_ADDRESS")) and place.num_processes > 1:
        place = replace(place, coordinator=_with_port(given, env, env.get("SLURM_JOB_ID", "llmpar")))
    if place.is_one_host and place.coordinator and not is_loopback(place.coordinator):
        place = replace(place, coordinator=f"127.0.0.1:{place.coordinator.rpartition(':')[2]}")
    if not 0 <= place.process_id < place.num_processes:
        raise ValueError(
            f"{place.engine} numbers this process {place.process_id} of {place.num_processes}; numbers count"
            f" from 0, so use 0 to {max(0, place.num_processes - 1)}"
        )
    return place


def _number(env: Mapping[str, str], *names: str, otherwise: int | None = None) -> int:
    """The first of these variables that is set, as a number."""
    name = next((name for name in names if name in env), None)
    if name is None and otherwise is not None:
        return otherwise
    if name is None:
        raise ValueError(f"none of {', '.join(names)} is set, beside others of the same engine; set one")
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"{name} is '{env[name]}', which is no number; set it to one") from None


def port_of(name: str) -> int:
    """A port that all processes of a job derive from what they all know of it."""
    return FIRST_PORT + int(hashlib.sha256(name.encode()).hexdigest(), 16) % NUM_PORTS


def _with_port(host: str, env: Mapping[str, str], name: str) -> str:
    if re.search(r"[^:]:\d+$|\]:\d+$", host):
        return host
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{host}:{_number(env, 'JAX_COORDINATOR_PORT', otherwise=port_of(name))}"


def first_host(hosts: str) -> str:
    """The first host of a SLURM list such as ``n[01-04,7],m3``."""
    first = re.match(r"(?:\[[^]]*\]|[^,\[])*", hosts)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0] if first else "")


def tasks_on(counts: str, node: int) -> int:
    """Tasks on a node by SLURM's list of counts, ``2(x3),1``; 0 where it is no such list."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    each = [int(n) for n, times in found for _ in range(int(times or 1))]
    return each[node] if node < len(each) else 0


def is_loopback(address: str) -> bool:
    """Whether a host, or ``host:port``, can be reached from this machine alone."""
    return re.match(r"(127\.|localhost\b|\[?::1\b)", address) is not None


def _explicit(env, read) -> Place | None:
    """By hand, and Kubeflow's JAX runtime. JAX itself reads the address alone."""
    names = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = [name for name in names if name in env]
    old = {"NUM_PROCESSES", "PROCESS_ID", "COORDINATOR_ADDRESS"}  # Kubeflow's JAXJob, version 1
    if not given and old <= env.keys():
        env = env | {f"JAX_{name}": env[name] for name in old}
        env |= {"JAX_COORDINATOR_PORT": env.get("COORDINATOR_PORT", str(KUBERNETES_PORT))}
    elif "JAX_NUM_PROCESSES" in given and "JOB_COMPLETION_INDEX" in env and len(given) == 1:
        env = env | {"JAX_PROCESS_ID": env["JOB_COMPLETION_INDEX"]}  # our JobSet's
    elif not given:
        return None
    elif len(given) == 1:
        raise ValueError(f"{given[0]} is set without {(set(names) - set(given)).pop()}; set both, or neither")
    num, number = _number(env, "JAX_NUM_PROCESSES"), _number(env, "JAX_PROCESS_ID")
    if num > 1 and "JAX_COORDINATOR_ADDRESS" not in env:
        raise ValueError(
            f"JAX_NUM_PROCESSES is {num} without JAX_COORDINATOR_ADDRESS; set it to the host and port of"
            " process 0, such as n1:20000"
        )
    told = _with_port(env["JAX_COORDINATOR_ADDRESS"], env, "llmpar") if num > 1 else None
    engine = "Kubernetes" if "KUBERNETES_SERVICE_HOST" in env else "JAX_* variables"
    alone = told is not None and is_loopback(told)
    return Place(engine, num, number, told, number if alone else 0, num if alone else 0)


def _ray(env, read) -> Place | None:
    """A worker of Ray: its trainer joins the processes before our code runs."""
    return Place("Ray", joined_by="engine") if "RAY_RAYLET_PID" in env or "RAY_JOB_ID" in env else None


def _torchrun(env, read) -> Place | None:
    if "TORCHELASTIC_RUN_ID" not in env and not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= env.keys():
        return None
    # MASTER_PORT is the store of torchrun itself.
    host, port = env.get("MASTER_ADDR", "127.0.0.1"), _number(env, "MASTER_PORT", otherwise=29500) + 1
    host = f"[{host}]" if ":" in host else host
    local = _number(env, "LOCAL_RANK", otherwise=0), _number(env, "LOCAL_WORLD_SIZE", otherwise=0)
    return Place("torchrun", _number(env, "WORLD_SIZE"), _number(env, "RANK"), f"{host}:{port}", *local)


def _open_mpi(env, read) -> Place | None:
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    uri = env.get("OMPI_MCA_orte_hnp_uri", "")
    name = env.get("PMIX_NAMESPACE", uri or env.get("OMPI_MCA_ess_base_jobid", "open mpi"))
    place = Place(
        "Open MPI 4" if uri else "Open MPI 5",
        _number(env, "OMPI_COMM_WORLD_SIZE"),
        _number(env, "OMPI_COMM_WORLD_RANK"),
        None,
        _number(env, "OMPI_COMM_WORLD_LOCAL_RANK", otherwise=0),
        _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", otherwise=0),
    )
    # Open MPI 5 names its jobs after the host where mpirun runs, 4 lists that host's addresses.
    launcher = re.search(r"tcp6?://\[?([^,:\]]+)", uri) or re.match(r"prte(?:run)?-(.+)-\d+@", name)
    return _mpi(place, env, read, name, launcher[1] if launcher else None)


def _mpich(env, read) -> Place | None:
    """MPICH and its kin by PMI; Cray's launcher PALS. `srun --mpi=pmi2` sets PMI too: there SLURM counts."""
    size = next((name for name in ("PMI_SIZE", "PALS_SIZE") if name in env), None)
    rank = next((name for name in ("PMI_RANK", "PALS_RANKID") if name in env), None)
    if rank is None:
        return None
    num = _number(env, size) if size else 0
    if not num and "SLURM_STEP_NUM_TASKS" not in env:
        raise ValueError(f"{rank} is set without PMI_SIZE; set it to the number of processes")
    slurm = env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS")), env.get("SLURM_PROCID")
    if "SLURM_STEP_NODELIST" in env and slurm == (str(num or slurm[0]), env[rank]):
        return None
    cray = any(name.startswith("PALS_") for name in env)
    local = ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK")
    many = ("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")
    place = Place(
        "Cray MPICH" if cray else "MPICH",
        num,
        _number(env, rank),
        None,
        _number(env, *local, otherwise=0),
        _number(env, *many, otherwise=0),
    )
    name = env.get("PALS_APID") or env.get("PBS_JOBID") or env.get("SLURM_JOB_ID") or env.get("PWD", "mpich")
    return _mpi(place, env, read, name, None)


def _mpi(place: Place, env, read, name: str, launcher: str | None) -> Place:
    """The coordinator of an MPI job: here if all are here, else a scheduler's first host, else the
    launcher's host, else what mpi4py agrees on."""
    host = launcher
    if "SLURM_JOB_NODELIST" in env:
        host = first_host(env["SLURM_JOB_NODELIST"])
    elif "PBS_NODEFILE" in env:
        host = next(iter(read(env["PBS_NODEFILE"]).split()), launcher)
    host = "127.0.0.1" if place.is_one_host else host
    if place.num_processes > 1 and host is None:
        return replace(place, joined_by="mpi4py")
    scheduler = " under PBS" * ("PBS_JOBID" in env) + " under SLURM" * ("SLURM_JOB_ID" in env)
    told = f"{host}:{port_of(name)}" if host and place.num_processes > 1 else None
    return replace(place, engine=place.engine + scheduler, coordinator=told)


def _slurm(env, read) -> Place | None:
    if "SLURM_JOB_ID" not in env:
        return None
    if not {"SLURM_STEP_NODELIST", "SLURM_PROCID"} <= env.keys():
        tasks = _number(env, "SLURM_NTASKS", "SLURM_NPROCS", otherwise=1)
        note = (
            f"the job has {tasks} tasks, and this is its batch script, which runs once: write 'srun llmpar …'"
        )
        return Place("SLURM (batch script)", note=note if tasks > 1 else "")
    num = _number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    name = f"slurm {env['SLURM_JOB_ID']} {env.get('SLURM_STEP_ID', '')} {env.get('SLURM_RESTART_COUNT', '')}"
    counts = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", ""))
    num_local = tasks_on(counts, _number(env, "SLURM_NODEID", otherwise=0))
    host = "127.0.0.1" if num_local == num else first_host(env["SLURM_STEP_NODELIST"])
    told = f"{host}:{port_of(name)}" if num > 1 else None
    return Place(
        "SLURM",
        num,
        _number(env, "SLURM_PROCID"),
        told,
        _number(env, "SLURM_LOCALID", otherwise=0),
        num_local,
    )


def _kubernetes(env, read) -> Place | None:
    if "KUBERNETES_SERVICE_HOST" not in env or "JOB_COMPLETION_INDEX" not in env:
        return None
    note = (
        "an indexed Job does not say how many pods it has: set JAX_NUM_PROCESSES and JAX_COORDINATOR_ADDRESS"
        " in its template, as 'llmpar launch jobset' does; JAX_PROCESS_ID is then JOB_COMPLETION_INDEX"
    )
    return Place("Kubernetes", note=note)


def _tpu(env, read) -> Place | None:
    """A slice of several hosts: JAX asks the machine's own service."""
    hosts = [host for host in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if len(hosts) < 2:
        return None
    return Place("TPU slice", len(hosts), _number(env, "TPU_WORKER_ID"), None, 0, 1, joined_by="tpu")


def _pbs(env, read) -> Place | None:
    if "PBS_JOBID" not in env:
        return None
    hosts = read(env.get("PBS_NODEFILE", "")).split()
    note = (
        f"the job has {len(set(hosts))} hosts, and this is its script, which runs once: write 'mpiexec"
        " llmpar …'"
    )
    return Place("PBS (script)", note=note if len(set(hosts)) > 1 else "")


RULES = (_explicit, _torchrun, _open_mpi, _mpich, _ray, _slurm, _tpu, _kubernetes, _pbs)
"""From the inside to the outside: what was started last is asked first."""


def read_file(path: str) -> str:
    """The text of a file; empty where there is none."""
    with contextlib.suppress(OSError):
        return pathlib.Path(path).read_text()
    return ""
