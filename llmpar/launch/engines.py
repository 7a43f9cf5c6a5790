"""Read from the environment which engine started this process, its number, and the number of processes."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
"""Ports that a job's name chooses from: below those that Linux gives to outgoing connections (32768 on)."""


@dataclass(frozen=True)
class Place:
    """State a process' place in a job, as its engine has set it.

    Attributes:
        engine: its name, for people.
        num_processes: of the whole job; 1 without an engine.
        process_id: this process' number, from 0.
        coordinator: ``host:port`` of process 0; None where others join the processes.
        local_id: this process' number on its host, from 0.
        num_local: processes on its host; 0 where the environment does not have it.
        joined_by: what joins the processes in our place: a detection method of JAX, or ``engine``.
        note: what the user may have forgotten.
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
        """Return whether all processes are known to share a host."""
        return self.num_local == self.num_processes


_OMPI = "OMPI_COMM_WORLD_"
_ENGINES = {
    "torchrun": ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"),
    "Open MPI": (
        f"{_OMPI}SIZE",
        f"{_OMPI}RANK",
        f"{_OMPI}LOCAL_RANK",
        f"{_OMPI}LOCAL_SIZE",
        f"{_OMPI}SIZE",
    ),
    "MPICH": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_RANK"),
}
"""Engine -> variables: number of processes, this process' number, both on its host, and one that is always
set together with the second."""
_OTHERS = ("JOB_COMPLETION_INDEX", "PALS_RANKID", "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK")
"""Ranks set by an indexed Job of Kubernetes, which does not set the number of pods, and by engines that have
not been tried with this package."""


def detect(environ: Mapping[str, str]) -> Place:
    """Return this process' place, from the engine that started it; from the innermost of several: an `mpirun`
    inside a SLURM job.

    A coordinator's address that the user sets (JAX_COORDINATOR_ADDRESS) always replaces the engine's.
    Processes that are all on one host use loopback, whatever the host's name.

    Raises ValueError where the variables contradict each other, or do not have process 0's host.
    """
    env = {name: value for name, value in environ.items() if value != ""}
    # from the innermost to the outermost
    rules = (_explicit, _numbered, _ray, _slurm, _tpu, _unread)
    place = next((match for rule in rules if (match := rule(env))), Place())
    if place.num_processes > 1:
        coordinator = env.get("JAX_COORDINATOR_ADDRESS", place.coordinator)
        if place.is_one_host and coordinator and not is_loopback(coordinator):
            coordinator = f"127.0.0.1:{parts_of(coordinator)[1]}"
        place = replace(place, coordinator=coordinator)
        if not coordinator and not place.joined_by:
            raise ValueError(
                f"{place.engine} on several hosts does not set the host of process 0; set"
                " JAX_COORDINATOR_ADDRESS to its host and port, as 'llmpar launch mpi' does"
            )
    if not 0 <= place.process_id < place.num_processes:
        raise ValueError(
            f"{place.engine} numbers this process {place.process_id} of {place.num_processes};"
            f" numbers count from 0, so use 0 to {max(0, place.num_processes - 1)}"
        )
    return place


def _number(env: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    """Read a variable as a number."""
    if name not in env and otherwise is not None:
        return otherwise
    if name not in env:
        raise ValueError(f"{name} is not set, beside others of the same engine; set it")
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"{name} is '{env[name]}', which is no number; set it to one") from None


def port_of(name: str) -> int:
    """Return a port that all processes of a job derive from the job's name."""
    return _FIRST_PORT + int(hashlib.sha256(name.encode()).hexdigest(), 16) % _NUM_PORTS


def first_host(hosts: str) -> str:
    """Return the first host of a SLURM list such as ``n[01-04,7],m3``."""
    first = re.match(r"(?:\[[^]]*\]|[^,\[])*", hosts)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0] if first else "")


def tasks_on(counts: str, node: int) -> int:
    """Return the tasks on a node by SLURM's list of counts, ``2(x3),1``; 0 for other texts."""
    counted = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    each = [int(n) for n, times in counted for _ in range(int(times or 1))]
    return each[node] if node < len(each) else 0


def parts_of(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[::1]:port``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"coordinator '{address}' is no host:port; set JAX_COORDINATOR_ADDRESS, as n1:20000"
        )
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Return whether a host, or ``host:port``, can be reached from this machine alone."""
    return re.match(r"(127\.|localhost\b|\[?::1\b)", address) is not None


def _explicit(env: Mapping[str, str]) -> Place | None:
    """Read the variables set by hand, by `llmpar launch local` and in our JobSet. JAX reads the address
    alone."""
    names = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    if "JAX_NUM_PROCESSES" in env and "JOB_COMPLETION_INDEX" in env:  # our JobSet's
        env = {"JAX_PROCESS_ID": env["JOB_COMPLETION_INDEX"], **env}
    given = [name for name in names if name in env]
    if not given:
        return None
    if len(given) == 1:
        raise ValueError(
            f"{given[0]} is set without {(set(names) - set(given)).pop()}; set both, or neither"
        )
    num, number = _number(env, "JAX_NUM_PROCESSES"), _number(env, "JAX_PROCESS_ID")
    if num > 1 and "JAX_COORDINATOR_ADDRESS" not in env:
        raise ValueError(
            f"JAX_NUM_PROCESSES is {num} without JAX_COORDINATOR_ADDRESS; set it to the host and"
            " port of process 0, such as n1:20000"
        )
    alone = num > 1 and is_loopback(env["JAX_COORDINATOR_ADDRESS"])
    engine = "Kubernetes" if "KUBERNETES_SERVICE_HOST" in env else "JAX_* variables"
    return Place(engine, num, number, None, number if alone else 0, num if alone else 0)


def _numbered(env: Mapping[str, str]) -> Place | None:
    """Read the variables of an engine of the table. MPI's coordinator is on this host if all processes are,
    else on SLURM's first host, else on mpirun's host, which is in the job name of Open MPI 5."""
    by_slurm = [env.get(name) for name in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")]
    for engine, (num, number, local, num_local, sign) in _ENGINES.items():
        if not {number, sign} <= env.keys():
            continue
        if (
            engine == "MPICH"
            and "SLURM_STEP_NODELIST" in env
            and by_slurm == [env.get(num), env[number]]
        ):
            continue  # `srun --mpi=pmi2` sets PMI, too
        where = _number(env, local, 0), _number(env, num_local, 0)
        place = Place(engine, _number(env, num), _number(env, number), None, *where)
        if engine == "torchrun":  # MASTER_PORT is the store of torchrun itself
            host = f"[{env['MASTER_ADDR']}]" if ":" in env["MASTER_ADDR"] else env["MASTER_ADDR"]
            return replace(place, coordinator=f"{host}:{_number(env, 'MASTER_PORT', 29500) + 1}")
        name = env.get("PMIX_NAMESPACE", env.get("PWD", engine))
        launcher = re.match(r"prte(?:run)?-(.+)-\d+@", name)
        host = first_host(env.get("SLURM_JOB_NODELIST", "")) or (launcher[1] if launcher else "")
        host = "127.0.0.1" if place.is_one_host else host
        under = f"{engine} under SLURM" if "SLURM_JOB_ID" in env else engine
        return replace(place, engine=under, coordinator=f"{host}:{port_of(name)}" if host else None)
    return None


def _ray(env: Mapping[str, str]) -> Place | None:
    """Recognize a worker of Ray: its trainer joins the processes before our code runs."""
    return (
        Place("Ray", joined_by="engine") if "RAY_RAYLET_PID" in env or "RAY_JOB_ID" in env else None
    )


def _slurm(env: Mapping[str, str]) -> Place | None:
    if "SLURM_JOB_ID" not in env:
        return None
    tasks = _number(env, "SLURM_NTASKS", _number(env, "SLURM_NPROCS", 1))
    if not {"SLURM_STEP_NODELIST", "SLURM_PROCID"} <= env.keys():
        note = f"the job has {tasks} tasks; this is its batch script, which runs once: write 'srun llmpar …'"
        return Place("SLURM (batch script)", note=note if tasks > 1 else "")
    num = _number(env, "SLURM_STEP_NUM_TASKS", tasks)
    name = f"slurm {env['SLURM_JOB_ID']} {env.get('SLURM_STEP_ID', '')} {env.get('SLURM_RESTART_COUNT', '')}"
    counts = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", ""))
    local = _number(env, "SLURM_LOCALID", 0), tasks_on(counts, _number(env, "SLURM_NODEID", 0))
    coordinator = f"{first_host(env['SLURM_STEP_NODELIST'])}:{port_of(name)}" if num > 1 else None
    return Place("SLURM", num, _number(env, "SLURM_PROCID"), coordinator, *local)


def _tpu(env: Mapping[str, str]) -> Place | None:
    """Recognize a TPU slice of several hosts: JAX reads the place from the machine's own service."""
    hosts = [host for host in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if len(hosts) < 2:
        return None
    return Place(
        "TPU slice", len(hosts), _number(env, "TPU_WORKER_ID"), None, 0, 1, joined_by="tpu"
    )


def _unread(env: Mapping[str, str]) -> Place | None:
    """Note an engine that is unknown, or does not set the number of processes."""
    note = (
        "is set, but not how many processes there are, so this one runs alone; set"
        " JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, as 'llmpar launch jobset' does"
    )
    return next((Place(note=f"{name} {note}") for name in _OTHERS if name in env), None)
