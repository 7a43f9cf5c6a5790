"""Write job files, which hand a command over to an engine. Nothing is submitted here.

Each is made from a file of the folder `templates`. ``%name`` stands for a value; a line with a missing value
is left out, so ``%{again}`` in front of a line is the condition under which it is there.

A run that gets SIGTERM saves, and ends with status 143; a run with a failed process ends with 75 or 76. The
files then start it again, three times, but not after a refusal (1, 2), which would be repeated. Between the
signal and the end are 120 s: a step and a checkpoint must fit in.
"""

import json
import re
import shlex
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from llmpar import files

TEMPLATES = Path(__file__).parent / "templates"
MARK = "# written by llmpar launch"
"""The last line of each job file: a file that ends so may be overwritten."""
SBATCH = "partition", "account", "time_limit"
"""Fields in lines that sbatch reads itself, without a shell and its quotes."""
_MEMORY = {"XLA_CLIENT_MEM_FRACTION": ".95"}
"""JAX takes 75 % of a GPU's memory otherwise."""


@dataclass(frozen=True)
class Site:
    """Describe a cluster to job files; a TOML file has these keys, all optional.

    Attributes:
        partition, account, time_limit: SLURM's partition; its account; hours:minutes:seconds.
        gpus_per_node: GPUs of a node; 0 for nodes without.
        cpus_per_node: cores that a process may use; 0 leaves it to the engine.
        processes_per_node: 1 takes all GPUs of a node into one process.
        modules: environment modules to load.
        setup: lines of shell before the run, such as 'source .venv/bin/activate'.
        interface: the network between nodes, such as 'ib0', for NCCL.
        container: an image: a .sif file runs in Apptainer, another one in Pyxis.
        hosts: names of the hosts, where no scheduler gives them.
        mpi: 'openmpi' or 'mpich'.
        image, namespace, queue, volume: of Kubernetes: the image, the namespace, Kueue's queue, the claim of
            a volume that all pods share (mounted at /shared).
        gpu_resource: what Kubernetes calls a GPU.
    """

    partition: str = ""
    account: str = ""
    time_limit: str = "01:00:00"
    gpus_per_node: Annotated[int, files.Allowed(int, 0)] = 8
    cpus_per_node: Annotated[int, files.Allowed(int, 0)] = 0
    processes_per_node: int = 1
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    interface: str = ""
    container: str = ""
    hosts: tuple[str, ...] = ()
    mpi: Literal["openmpi", "mpich"] = "openmpi"
    image: str = ""
    namespace: str = "default"
    queue: str = ""
    volume: str = ""
    gpu_resource: str = "nvidia.com/gpu"

    def __post_init__(self):
        files.check_fields(self)
        num, gpus = self.processes_per_node, self.gpus_per_node
        if gpus % num:
            raise ValueError(
                f"{num} processes per node cannot share {gpus} GPUs equally; use 1, or a divisor of"
                f" {gpus}"
            )


def read_site(path: str) -> Site:
    """Read a site file. Raises ValueError for unknown keys."""
    table = files.read_toml(path, "site file")
    usual = {field.name: field.default for field in fields(Site)}
    has = f"the site file '{path}' has"
    for name, value in table.items():
        if name not in usual:
            raise ValueError(f"{has} the unknown key '{name}'; use {', '.join(usual)}")
        items = tuple(value) if isinstance(value, list) else (value,)
        if isinstance(usual[name], tuple):
            if not isinstance(value, list) or not all(isinstance(item, str) for item in items):
                raise ValueError(f"{has} {name} = {value!r}; give a list of strings")
            table[name] = items
        if not all(str(item).isprintable() for item in items):
            raise ValueError(f"{has} a line break or a control character in '{name}'; use one line")
        if name in SBATCH and not re.fullmatch(r"[^\s-]\S*", str(value)):
            raise ValueError(
                f"{has} {name} = {value!r}; use a word without spaces, and no - in front"
            )
    try:
        return Site(**table)
    except ValueError as error:
        raise ValueError(f"the site file '{path}': {error}") from error


def keeps(words: Sequence[str]) -> bool:
    """Return whether a command finds its own checkpoint when it starts again."""
    return any(word.partition("=")[0] == "--checkpoints" for word in words)


@dataclass(frozen=True)
class Job:
    """Describe a command of `llmpar` on some nodes of a site."""

    words: tuple[str, ...]  # what follows ``llmpar`` on the command line
    nodes: int = 1
    site: Site = field(default_factory=Site)
    min_nodes: int | None = None  # with how many torchrun continues; None: with all

    def __post_init__(self):
        if self.min_nodes is not None and not 1 <= self.min_nodes <= self.nodes:
            raise ValueError(
                f"min-nodes is {self.min_nodes} of {self.nodes} nodes; use 1 to {self.nodes}"
            )

    @property
    def num_processes(self) -> int:
        """Return the processes of the whole job."""
        return self.nodes * self.site.processes_per_node

    @property
    def num_devices(self) -> int:
        """Return the GPUs of the whole job; without GPUs, one CPU device per process."""
        return self.nodes * self.site.gpus_per_node or self.num_processes

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the hosts that the site file lists, as many as there are nodes."""
        if self.nodes == 1 and not self.site.hosts:
            return ("localhost",)
        if len(self.site.hosts) < self.nodes:
            raise ValueError(
                f"the job needs {self.nodes} hosts, but the site file lists {len(self.site.hosts)};"
                " add hosts = ['n1', 'n2'], or use an engine with a scheduler (slurm)"
            )
        return self.site.hosts[: self.nodes]


def job_file(engine: str, job: Job) -> str:
    """Return the text of an engine's job file."""
    template, own, _ = ENGINES[engine]
    site = job.site
    when: dict[str, Any] = {
        "again": keeps(job.words),
        "once": not keeps(job.words),
        "gpu": site.gpus_per_node,
        "cpu": site.cpus_per_node,
        "shared": site.volume,
    }
    values: dict[str, Any] = {name: value or None for name, value in asdict(site).items()}
    values |= {name: "" if so else None for name, so in when.items()}
    values |= {
        "nodes": job.nodes,
        "num_processes": job.num_processes,
        "restarts": 3 if keeps(job.words) else 0,
        "gpus": site.gpus_per_node // site.processes_per_node or None,
        "cpus": site.cpus_per_node // site.processes_per_node or None,
        "modules": shlex.join(site.modules) or None,
        "setup": "\n".join(site.setup) or None,
        "interface": shlex.quote(site.interface) if site.interface else None,
        "command": shlex.join(["llmpar", *job.words]),
    }
    values |= own(job, values)
    lines = map(_Template, (TEMPLATES / template).read_text().splitlines())
    kept = [line for line in lines if None not in map(values.__getitem__, line.get_identifiers())]
    return "".join(f"{line.substitute(values)}\n" for line in kept) + f"{MARK}\n"


class _Template(string.Template):
    delimiter = "%"  # shells have the dollar


def _inside(site: Site, *folders: str) -> str:
    """Return the words between srun and a command that runs in the site's container and needs folders."""
    image = shlex.quote(site.container)
    if site.container and (bad := [folder for folder in folders if set(folder) & set(":,")]):
        raise ValueError(
            f"'{bad[0]}' cannot be mounted into a container: rename it, without colon or comma"
        )
    if site.container.endswith(".sif"):
        binds = "".join(f" --bind {shlex.quote(folder)}" for folder in folders)
        return f"apptainer exec --nv{binds} {image} "
    mounts = "".join(f",{shlex.quote(f'{folder}:{folder}')}" for folder in folders)
    where = f'--container-mounts="$PWD:$PWD"{mounts} --container-workdir="$PWD"'
    return f"--container-image={image} {where} " if site.container else ""


def _slurm(job: Job, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in sbatch's file: started again after a failure, queued again at the time limit."""
    return {"command": _inside(job.site) + values["command"]}


def _vllm(job: Job, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the file of a vLLM server: on one node by itself, on several over Ray, whose driver and node
    share /tmp."""
    apptainer = job.site.container.endswith(".sif")
    folders = [word for word in job.words[1:2] if word.startswith("/")] + ["/tmp"] * (not apptainer)
    many = {"many": "" if job.nodes > 1 else None, "others": job.nodes - 1}
    return many | {
        "inside": _inside(job.site, *folders).strip(),
        "command": shlex.join(["vllm", *job.words]),
    }


def _mpi(job: Job, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the file of mpirun: the first host is passed to all processes, so that every MPI finds it."""
    site, each, first = job.site, job.site.processes_per_node, shlex.quote(job.hosts[0])
    if site.mpi == "mpich":  # it exports the whole environment
        run = (
            f"mpiexec -n {job.num_processes} -hosts {shlex.quote(','.join(job.hosts))} -ppn {each}"
        )
        return {"first": first, "command": f"{run} {values['command']}"}
    exported = ["JAX_COORDINATOR_ADDRESS", *["NCCL_SOCKET_IFNAME"] * bool(site.interface)]
    exported += _MEMORY if site.gpus_per_node else []
    hosts = shlex.quote(",".join(f"{host}:{each}" for host in job.hosts))
    run = f"mpirun -n {job.num_processes} --host {hosts} --map-by ppr:{each}:node -x {' -x '.join(exported)}"
    return {"first": first, "command": f"{run} {values['command']}"}


def _torchrun(job: Job, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the file that each node runs, or srun on all nodes: torchrun's agents restart the processes."""
    first = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    if job.site.hosts or job.nodes == 1:
        first = shlex.quote(job.hosts[0])
    return {"first": first, "nodes": f"{job.min_nodes}:{job.nodes}" if job.min_nodes else job.nodes}


def _jobset(job: Job, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the file of Kubernetes: queued by Kueue where the site has a queue, and closed to other
    pods."""
    site = job.site
    if not site.image:
        raise ValueError(
            "a JobSet needs an image; add image = 'registry/llmpar:1' to the site file"
        )
    # A JSON string is a YAML string. Kubernetes replaces $(NAME) and $$ in commands and variables.
    own = {
        name: getattr(site, name)
        for name in ("image", "namespace", "queue", "volume", "gpu_resource")
    }
    own |= {"interface": site.interface.replace("$", "$$")}
    command = [word.replace("$", "$$") for word in ("llmpar", *job.words)]
    quoted = {name: json.dumps(value) if value else None for name, value in own.items()}
    return quoted | {"command": json.dumps(command), "suspend": "true" if site.queue else None}


def _ray(job: Job, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in a Python program for JaxTrainer, which joins the workers itself."""
    gpus = {"GPU": values["gpus"]} if values["gpus"] else {}
    variables = {"NCCL_SOCKET_IFNAME": job.site.interface} if job.site.interface else {}
    return {
        "words": list(job.words),
        "use_gpu": bool(gpus),
        "resources": {"CPU": values["cpus"] or 1, **gpus},
        "variables": variables | (_MEMORY if gpus else {"JAX_PLATFORMS": "cpu"}),
    }


ENGINES: dict[str, tuple[str, Callable[[Job, Mapping[str, Any]], dict[str, Any]], list[str]]] = {
    "slurm": ("slurm.sbatch", _slurm, ["sbatch"]),
    "mpi": ("mpi.sh", _mpi, ["bash"]),
    "jobset": ("jobset.yaml", _jobset, ["kubectl", "apply", "-f"]),
    "ray": ("ray.py.txt", _ray, ["ray", "job", "submit", "--", "python"]),
    "torchrun": ("torchrun.sh", _torchrun, ["bash"]),
    "slurm vllm": ("vllm.sbatch", _vllm, ["sbatch"]),
    "ray vllm": ("vllm.sh", _vllm, ["bash"]),
}
"""Engine (and its server) -> its template, the function that fills in more, and the command that takes the
file."""


def default_path(engine: str) -> str:
    """Return the path of the job file, by default."""
    return f"llmpar-job{Path(ENGINES[engine][0].removesuffix('.txt')).suffix}"


def submit_line(engine: str, path: str) -> list[str]:
    """Return the command that hands a file over to its engine."""
    return [*ENGINES[engine][2], str(Path(path).absolute()) if engine == "ray" else path]
