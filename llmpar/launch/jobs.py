"""Job files: text that hands a command over to an engine. Nothing is submitted here.

A run that is asked to stop saves, and ends with status 143; one of whose processes failed ends with 75 or 76.
The files start it again then, and not after a refusal (1, 2), which would be repeated.
"""

from __future__ import annotations

import dataclasses
import shlex
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmpar.launch.engines import KUBERNETES_PORT

RETRIES = 3
MEMORY_SHARE = "XLA_CLIENT_MEM_FRACTION"
"""JAX takes 75 % of a GPU's memory otherwise."""
GRACE_S = 120
"""Seconds between the request to stop and the end: a step and a checkpoint must fit in."""


@dataclass(frozen=True)
class Site:
    """What job files must know of a cluster; a TOML file has these keys, all optional.

    Attributes:
        partition, account, time_limit: SLURM's partition, or the queue of PBS; who pays;
            hours:minutes:seconds.
        gpus_per_node: GPUs of a node; 0 for nodes without.
        cpus_per_node: cores that a process may use; 0 leaves it to the engine.
        processes_per_node: 1 takes all GPUs of a node into one process.
        modules: environment modules to load.
        setup: lines of shell before the run, such as 'source .venv/bin/activate'.
        interface: the network between nodes, such as 'ib0', for NCCL.
        container: an image: a .sif file runs in Apptainer, another one in Pyxis.
        hosts: names of the hosts, where no scheduler gives them.
        mpi: 'openmpi' or 'mpich' (Cray's too).
        scheduler: 'none', or 'pbs' around mpirun.
        image, namespace, queue, volume: of Kubernetes: the image, the namespace, Kueue's queue, the claim of
            a volume that all pods share (mounted at /shared).
        gpu_resource: what Kubernetes calls a GPU.
    """

    partition: str = ""
    account: str = ""
    time_limit: str = "01:00:00"
    gpus_per_node: int = 8
    cpus_per_node: int = 0
    processes_per_node: int = 1
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    interface: str = ""
    container: str = ""
    hosts: tuple[str, ...] = ()
    mpi: str = "openmpi"
    scheduler: str = "none"
    image: str = ""
    namespace: str = "default"
    queue: str = ""
    volume: str = ""
    gpu_resource: str = "nvidia.com/gpu"

    def __post_init__(self):
        for name in ("gpus_per_node", "cpus_per_node"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use 0 or more")
        num, gpus = self.processes_per_node, self.gpus_per_node
        if num < 1 or gpus % num:
            raise ValueError(
                f"{num} processes per node cannot share {gpus} GPUs equally; use 1, or a divisor of {gpus}"
            )
        for name, known in {"mpi": ("openmpi", "mpich"), "scheduler": ("none", "pbs")}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is '{getattr(self, name)}'; use {' or '.join(known)}")


def read_site(path: str) -> Site:
    """Read a site file. Refuses keys that nobody reads."""
    try:
        found = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"cannot read the site file '{path}': {error.strerror}; give a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the site file '{path}' is no TOML: {error}; mend it") from error
    known = {f.name: f for f in dataclasses.fields(Site)}
    for name, value in found.items():
        if name not in known:
            raise ValueError(
                f"the site file '{path}' has '{name}', which nobody reads; use {', '.join(known)}"
            )
        kind = type(getattr(Site(), name))
        if kind is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
            found[name] = tuple(value)
        elif not isinstance(value, kind) or isinstance(value, bool):
            want = {tuple: "a list of strings", int: "a whole number", str: "a string"}[kind]
            raise ValueError(f"the site file '{path}' has {name} = {value!r}; give {want}")
        if not all(str(item).isprintable() for item in (value if isinstance(value, list) else [value])):
            raise ValueError(
                f"the site file '{path}' has a line break or a control character in '{name}'; use one line"
            )
    return Site(**found)


@dataclass(frozen=True)
class Job:
    """A command of `llmpar` on some nodes of a site.

    Attributes:
        words: what follows ``llmpar`` on the command line.
        nodes: of the cluster.
        min_nodes: with how many torchrun goes on; None: with all.
    """

    words: tuple[str, ...]
    nodes: int = 1
    site: Site = field(default_factory=Site)
    name: str = "llmpar"
    min_nodes: int | None = None

    @property
    def num_processes(self) -> int:
        """Of the whole job."""
        return self.nodes * self.site.processes_per_node

    @property
    def num_devices(self) -> int:
        """GPUs of the whole job; one CPU device a process where there are none."""
        return self.nodes * self.site.gpus_per_node or self.num_processes

    @property
    def goes_on(self) -> bool:
        """Whether the command finds its own checkpoint when it starts again."""
        return any(word == "--checkpoints" or word.startswith("--checkpoints=") for word in self.words)

    @property
    def command(self) -> str:
        """As a shell reads it."""
        return shlex.join(["llmpar", *self.words])


def _setup(job: Job) -> list[str]:
    """Lines of shell before the run."""
    site = job.site
    lines = [f"module load {shlex.join(site.modules)}"] if site.modules else []
    lines += site.setup
    if site.gpus_per_node:
        lines.append(f"export {MEMORY_SHARE}=${{{MEMORY_SHARE}:-.95}}")
    if site.interface:
        name = shlex.quote(site.interface)
        lines.append(f"export NCCL_SOCKET_IFNAME={name}")
    return lines


def _again(job: Job, run: str, requeue: Sequence[str] = ()) -> list[str]:
    """Run, and run again after a failure that another attempt may mend."""
    if not job.goes_on:
        return [run]
    return [
        f"for attempt in $(seq {RETRIES}); do",
        f"  {run}",
        "  status=$?",
        "  case $status in",
        "    0) exit 0 ;;",
        "    1 | 2) exit $status ;;  # a refusal: it would be the same again",
        f"    143) {'break' if requeue else 'exit 143'} ;;  # asked to stop: saved",
        "  esac",
        "done",
        *requeue,
        "exit $status",
    ]


def slurm(job: Job) -> str:
    """A script for sbatch: started again after a failure, queued again at the time limit."""
    site = job.site
    heads = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": site.processes_per_node,
        "gpus-per-node": site.gpus_per_node,
        "cpus-per-task": site.cpus_per_node // site.processes_per_node,
        "time": site.time_limit,
        "partition": site.partition,
        "account": site.account,
        "output": f"{job.name}-%j.log",
        "open-mode": "append",
        "signal": f"TERM@{GRACE_S}",
    }
    lines = ["#!/bin/bash", *(f"#SBATCH --{name}={value}" for name, value in heads.items() if value)]
    lines += ["#SBATCH --requeue"] * job.goes_on + ["", *_setup(job)]
    if site.cpus_per_node:
        lines.append("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it from sbatch")
    inside = job.command
    flags = "--kill-on-bad-exit=1 --wait=60"
    if site.container.endswith(".sif"):
        inside = f"apptainer exec --nv {shlex.quote(site.container)} {inside}"
    elif site.container:
        flags += f' --container-image={shlex.quote(site.container)} --container-mounts="$PWD:$PWD"'
        flags += ' --container-workdir="$PWD"'
    requeue = [
        f"if [ $status -eq 143 ] || [ ${{SLURM_RESTART_COUNT:-0}} -lt {RETRIES} ]; then",
        "  scontrol requeue $SLURM_JOB_ID",
        "fi",
    ]
    return _text([*lines, *_again(job, f"srun {flags} {inside}", requeue)])


def mpi(job: Job) -> str:
    """A script around mpirun: the first host is told to all, so that every MPI finds it."""
    site, lines = job.site, ["#!/bin/bash"]
    if site.scheduler == "pbs":
        gpus = f":ngpus={site.gpus_per_node}" if site.gpus_per_node else ""
        cpus = f":ncpus={site.cpus_per_node}" if site.cpus_per_node else ""
        lines += [
            f"#PBS -N {job.name}",
            f"#PBS -l select={job.nodes}{cpus}{gpus}:mpiprocs={site.processes_per_node}",
        ]
        lines += [f"#PBS -l walltime={site.time_limit}"]
        lines += [f"#PBS -q {site.partition}"] * bool(site.partition) + [f"#PBS -A {site.account}"] * bool(
            site.account
        )
        lines += ["#PBS -r y"] * job.goes_on + [
            "",
            'cd "$PBS_O_WORKDIR"',
            'first=$(head -n 1 "$PBS_NODEFILE")',
        ]
        where = ""
    else:
        hosts = _hosts(job)
        lines += ["", f"first={shlex.quote(hosts[0])}"]
        each = site.processes_per_node
        many = ",".join(f"{host}:{each}" for host in hosts)
        where = (
            f"--host {shlex.quote(many)} "
            if site.mpi == "openmpi"
            else f"-hosts {shlex.quote(','.join(hosts))} "
        )
    lines += [*_setup(job), 'export JAX_COORDINATOR_ADDRESS="$first:20480"']
    if site.mpi == "openmpi":
        names = ["JAX_COORDINATOR_ADDRESS", *["NCCL_SOCKET_IFNAME"] * bool(site.interface)]
        names += [MEMORY_SHARE] * bool(site.gpus_per_node)
        tell = " ".join(f"-x {name}" for name in names)
        run = (
            f"mpirun -n {job.num_processes} {where}--map-by ppr:{site.processes_per_node}:node {tell}"
            f" {job.command}"
        )
    else:  # it exports the whole environment
        run = f"mpiexec -n {job.num_processes} {where}-ppn {site.processes_per_node} {job.command}"
    return _text([*lines, *_again(job, run)])


def _hosts(job: Job) -> tuple[str, ...]:
    """The hosts that the site file lists, as many as there are nodes."""
    if job.nodes == 1 and not job.site.hosts:
        return ("localhost",)
    if len(job.site.hosts) < job.nodes:
        raise ValueError(
            f"{job.nodes} nodes were asked for, and the site file lists {len(job.site.hosts)} hosts; add"
            " hosts = ['n1', 'n2'], or use an engine with a scheduler (slurm, or scheduler = 'pbs')"
        )
    return job.site.hosts[: job.nodes]


def torchrun(job: Job) -> str:
    """A script that each node runs, or that runs on all by srun: torchrun's agents restart the processes."""
    site, nodes = job.site, str(job.nodes)
    if job.min_nodes is not None:
        if not 1 <= job.min_nodes <= job.nodes:
            raise ValueError(f"min-nodes is {job.min_nodes} of {job.nodes} nodes; use 1 to {job.nodes}")
        nodes = f"{job.min_nodes}:{job.nodes}"
    first = _hosts(job)[0] if site.hosts or job.nodes == 1 else None
    lines = [
        "#!/bin/bash",
        "# On each node: bash FILE. In a SLURM job: srun --ntasks-per-node=1 bash FILE",
        *_setup(job),
    ]
    if first is None:
        lines.append('first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
    else:
        lines.append(f"first={shlex.quote(first)}")
    lines += [
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # without it nodes that come back find no address",
        f"exec torchrun --nnodes={nodes} --nproc-per-node={site.processes_per_node}"
        f" --max-restarts={RETRIES if job.goes_on else 0} --rdzv-backend=c10d"
        f' --rdzv-endpoint="$first:29400" --rdzv-id=${{SLURM_JOB_ID:-{job.name}}}'
        f" --no-python -- {job.command}",
    ]
    return _text(lines)


def jobset(job: Job) -> str:
    """A JobSet of Kubernetes, queued by Kueue where the site has a queue, and a policy that lets nobody else
    reach its pods."""
    site = job.site
    if not site.image:
        raise ValueError(
            "a JobSet needs an image, and the site file has none; add image = 'registry/llmpar:1'"
        )
    import json

    # A JSON string is a YAML string. Kubernetes reads $(NAME) and $$ in commands and variables.
    quote = json.dumps
    plain = lambda text: quote(text.replace("$", "$$"))
    many = job.num_processes
    meta = [f"  name: {job.name}", f"  namespace: {quote(site.namespace)}"]
    if site.queue:
        meta += ["  labels:", f"    kueue.x-k8s.io/queue-name: {quote(site.queue)}"]
    gpus = site.gpus_per_node // site.processes_per_node
    container = [
        "- name: llmpar",
        f"  image: {quote(site.image)}",
        f"  command: [{', '.join(map(plain, ('llmpar', *job.words)))}]",
        f"  ports: [{{containerPort: {KUBERNETES_PORT}}}]",
        "  env:",
        "  - name: JAX_COORDINATOR_ADDRESS",
        f"    value: {job.name}-workers-0-0.{job.name}:{KUBERNETES_PORT}",
        "  - name: JAX_NUM_PROCESSES",
        f"    value: {quote(str(many))}",
    ]
    if site.interface:
        container += ["  - name: NCCL_SOCKET_IFNAME", f"    value: {plain(site.interface)}"]
    if gpus:
        container += [f"  - name: {MEMORY_SHARE}", '    value: ".95"']
    container += [f"  resources: {{limits: {{{quote(site.gpu_resource)}: {gpus}}}}}"] * bool(gpus)
    volumes = []
    if site.volume:
        container += ["  volumeMounts: [{name: shared, mountPath: /shared}]"]
        volumes = [f"volumes: [{{name: shared, persistentVolumeClaim: {{claimName: {quote(site.volume)}}}}}]"]
    pod = [
        "restartPolicy: Never",
        f"terminationGracePeriodSeconds: {GRACE_S}",
        "containers:",
        *container,
        *volumes,
    ]
    indexed = ["completionMode: Indexed", f"parallelism: {many}", f"completions: {many}", "backoffLimit: 0"]
    lines = [
        "apiVersion: jobset.x-k8s.io/v1alpha2", "kind: JobSet", "metadata:", *meta, "spec:",
        *["  suspend: true  # until Kueue has room"] * bool(site.queue),
        f"  failurePolicy: {{maxRestarts: {RETRIES if job.goes_on else 0}}}",
        f"  network: {{enableDNSHostnames: true, subdomain: {job.name}}}",
        "  replicatedJobs:", "  - name: workers", "    replicas: 1", "    template:", "      spec:",
        *(f"        {line}" for line in indexed),
        "        template:", "          spec:",
        *(f"            {line}" for line in pod),
        "---",
        "# Whoever reaches the coordinator's port may join or stop the job: only its own pods do.",
        "apiVersion: networking.k8s.io/v1", "kind: NetworkPolicy", "metadata:",
        f"  name: {job.name}", f"  namespace: {quote(site.namespace)}", "spec:",
        f"  podSelector: {{matchLabels: {{jobset.sigs.k8s.io/jobset-name: {job.name}}}}}",
        "  policyTypes: [Ingress]", "  ingress:",
        f"  - from: [{{podSelector: {{matchLabels: {{jobset.sigs.k8s.io/jobset-name: {job.name}}}}}}}]",
    ]  # fmt: skip
    return _text(lines)


def ray(job: Job) -> str:
    """A Python program for Ray's JaxTrainer, which joins the workers itself."""
    site = job.site
    each: dict[str, float] = {"CPU": max(1, site.cpus_per_node // site.processes_per_node)}
    gpus = site.gpus_per_node // site.processes_per_node
    if gpus:
        each["GPU"] = gpus
    environment = {"NCCL_SOCKET_IFNAME": site.interface} if site.interface else {}
    environment |= {MEMORY_SHARE: ".95"} if gpus else {"JAX_PLATFORMS": "cpu"}
    retries = RETRIES if job.goes_on else 0
    return _text(
        [
            '"""Runs a command of llmpar on the workers of a Ray cluster, in the folder of this file, which',
            'all nodes share."""',
            "",
            "import os",
            "",
            "from ray.train import FailureConfig, RunConfig, ScalingConfig",
            "from ray.train.v2.jax import JaxTrainer",
            "from ray.train.v2.jax.config import JaxConfig",
            "",
            f"WORDS = {list(job.words)!r}",
            "",
            "",
            "def run(config):",
            "    from llmpar.cli import main",
            "",
            '    os.chdir(config["folder"])  # Ray gives each worker a folder of its own',
            "    if status := main(WORDS):",
            '        raise SystemExit(f"llmpar ended with status {status}")',
            "",
            "",
            'if __name__ == "__main__":',
            "    JaxTrainer(",
            "        run,",
            '        train_loop_config={"folder": os.path.dirname(os.path.abspath(__file__))},',
            "        # Without use_gpu Ray joins no workers; where it is set on CPUs, they meet by Gloo.",
            "        jax_config=JaxConfig(use_gpu=True),",
            (
                f"        scaling_config=ScalingConfig(num_workers={job.num_processes}, use_gpu={bool(gpus)},"
                f" resources_per_worker={each}),"
            ),
            (
                f"        run_config=RunConfig(name={job.name!r},"
                f" failure_config=FailureConfig(max_failures={retries}), worker_runtime_env={{'env_vars':"
                f" {environment}}}),"
            ),
            "    ).fit()",
        ]
    )


def _text(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"


ENGINES: dict[str, Callable[[Job], str]] = {
    "slurm": slurm, "mpi": mpi, "jobset": jobset, "ray": ray, "torchrun": torchrun
}  # fmt: skip
SUFFIX = {"slurm": ".sbatch", "mpi": ".sh", "jobset": ".yaml", "ray": ".py", "torchrun": ".sh"}


def submit_line(engine: str, path: str, site: Site) -> list[str]:
    """The command that hands a file over to its engine."""
    if engine == "mpi" and site.scheduler == "pbs":
        return ["qsub", path]
    return {
        "slurm": ["sbatch", path],
        "mpi": ["bash", path],
        "torchrun": ["bash", path],
        "jobset": ["kubectl", "apply", "-f", path],
        "ray": ["ray", "job", "submit", "--", "python", str(Path(path).absolute())],
    }[engine]
