# %% [markdown] tags=["slide", "short"] minutes=2 section="Running"
# ## One program, started on every host
#
# Each process must learn **three things**: where the first one listens, how many there are, and which one it is.
#
# <footer>JAX documentation, <code>jax.distributed</code> · <code>llmpar launch slurm --nodes 2 -- train</code></footer>

# %%
from deck import steps
from running import processes

from llmpar.launch.engines import detect

told = {"MASTER_ADDR": "node0", "MASTER_PORT": "29400", "WORLD_SIZE": "3", "RANK": "1"}
place = detect(told)
assert (place.coordinator, place.num_processes, place.process_id) == ("node0:29401", 3, 1)
steps(*(processes(step, place.coordinator) for step in range(3)))

# %% [markdown] tags=["notes"]
# `llmpar train` makes that call itself (`llmpar.launch`). After it `jax.devices()` lists the devices of all hosts, and one mesh spans
# them. The training program does not change.
#
# **Ask:** one process per host or one per GPU? JAX takes all devices of its process: one per host is usual. SLURM and MPI tasks get one
# GPU each, unless told otherwise.
#
# **Misunderstanding:** that process 0 does more than others. It keeps the meeting point; all run the same program, and all must call
# the same collectives in the same order. One that stops leaves the others waiting.
#
# **Source:** JAX's `jax.distributed.initialize`; the address is what `llmpar.launch.engines` reads from torchrun's variables.

# %% [markdown] tags=["slide"] minutes=1
# ## Who tells a process the three things
#
# <footer>JAX documentation, <code>jax.distributed</code> · <code>llmpar launch mpi --nodes 2 -- train</code></footer>

# %%
from deck import show
from IPython.display import Markdown
from running import chains

LAUNCHERS = [
    ("srun (SLURM)", "SLURM_PROCID, the list of nodes", "initialize() finds all"),
    ("mpirun (MPI)", "its own communicator", "initialize(…) by mpi4py"),
    ("torchrun", "RANK, WORLD_SIZE, MASTER_ADDR", "initialize(address, size, rank)"),
    ("Ray", "an actor on each host", "each actor calls initialize(…)"),
    ("Kubernetes", "JOB_COMPLETION_INDEX, a service", "initialize() finds all"),
]
show(chains(["who starts it", "what it tells a process", "jax.distributed."], LAUNCHERS))

# %% [markdown]
# ```python
# jax.distributed.initialize("node0:29401", num_processes=3, process_id=1)
# mesh = llmpar.make_mesh("dp=3 tp=4")  # of the 12 devices of all three hosts
# ```

# %% [markdown] tags=["notes"]
# **Ask:** which of these starts your jobs today?
#
# **Misunderstanding:** that the choice changes the speed of a step. It decides how processes start, are watched and start again;
# what travels between devices is the same. All but Kubernetes were tried with `llmpar` (`tests/engines.md`).
#
# **Source:** JAX's cluster detection (SLURM, Open MPI, mpi4py, TPU pods; Kubernetes if Python's `kubernetes` is installed). Open MPI 5 and
# MPICH it finds by `initialize(cluster_detection_method="mpi4py")` alone; `llmpar` reads their variables instead.

# %% [markdown] tags=["slide"] minutes=2
# ## MPI and Horovod: what they were for
#
# MPI gave ranks and collectives; Horovod put one all-reduce of gradients behind an optimizer. A **compiler** now writes these
# messages.
#
# <footer>Sergeev and Del Balso 2018 (Horovod) · lesson <code>notebooks/03_data_parallelism</code> · <code>llmpar train --mesh dp=8 --zero 0</code></footer>

# %%
from running import ranks

show(ranks())

# %%
from llmpar.plan.layout import parse_arrow
from llmpar.plan.plan import Plan

THEN = {
    "rank, `MPI_Comm_split`": "coordinates in the mesh, an axis of it",
    "`hvd.DistributedOptimizer`, its fusion buffer": '`Plan("dp=8", zero=0, reduce="bucket")`',
}
assert [str(move) for move in parse_arrow("d m +dp -> d m").moves] == ["all-reduce over dp"]
assert Plan("dp=8", zero=0, reduce="bucket").reduce == "bucket"
Markdown("\n".join(["| MPI, Horovod | here |", "|---|---|", *(f"| {a} | {b} |" for a, b in THEN.items())]))

# %% [markdown] tags=["notes"]
# **Ask:** Horovod knew one strategy. Which? Data parallelism: gradients all-reduced, everything else on every GPU.
#
# `hvd.broadcast_parameters` has no counterpart: state is made in place, from one seed. `horovodrun` and `mpirun` are launchers, as
# before.
#
# **Misunderstanding:** that MPI is gone. It still starts processes on many clusters, and NCCL's collectives are MPI's. What went is
# calling them by hand for each tensor.
#
# **Source:** Sergeev and Del Balso 2018. Horovod's last release, 0.28.1, is of 2023; it never supported JAX.

# %% [markdown] tags=["slide"] minutes=2
# ## `torchrun`, and the same in JAX
#
# PyTorch's launcher starts processes together, and again when some are lost.
#
# <footer>PyTorch documentation, <code>torchrun</code> · <code>llmpar launch torchrun --nodes 2 -- train</code></footer>


# %%
from running import elastic

show(elastic())

# %%
told = {"MASTER_ADDR": "node1", "MASTER_PORT": "29400", "WORLD_SIZE": "2", "RANK": "1"}
place = detect(told)
assert (place.engine, place.coordinator) == ("torchrun", "node1:29401")
assert (place.num_processes, place.process_id) == (2, 1)
ROWS = {
    "`MASTER_ADDR`, `MASTER_PORT` + 1; `WORLD_SIZE`; `RANK`": "the three things",
    "`--max-restarts=3`": "a checkpoint, and the same command again",
    "`--nnodes=1:2` (elastic)": "a checkpoint for any mesh, and `--mesh fsdp=-1`",
}
Markdown("\n".join(["| torchrun | JAX |", "|---|---|", *(f"| {a} | {b} |" for a, b in ROWS.items())]))

# %% [markdown] tags=["notes"]
# **Ask:** why port + 1? torchrun's own store listens on `MASTER_PORT`.
#
# The two commands, one on each host: `torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=node1:29400
# --no-python -- llmpar train`, or on SLURM `srun --nodes=2 --ntasks-per-node=1 llmpar train`.
#
# **Misunderstanding:** that a launcher knows the model. It starts, watches and restarts processes. What is cut how is in the program.
#
# **Elastic, tried:** two hosts, one loses power, the other goes on with half of the devices from the last checkpoint; the host comes
# back, all save when they are asked to, and go on with both (`tests/engines.md`: torchrun needs most of that time to agree on who is left).
#
# **Source:** torchrun's documented environment; the mapping is `llmpar.launch.engines.detect`, run in this slide's source.

# %% [markdown] tags=["slide"] minutes=2
# ## Ray: Python objects on other machines
#
# Ray keeps a pool of machines. An **actor** is an object that lives on one of them; calling a method runs it there.
#
# <footer>Moritz et al. 2018 (Ray) · <code>llmpar launch ray --nodes 2 -- train</code></footer>

# %%
from running import pool

steps(*map(pool, range(3)))

# %% [markdown] tags=["notes"]
# **Ask:** who needs it? Those who mix kinds of work: training beside sampling, tuning many runs, serving. For one training job a
# scheduler and `srun` do.
#
# `ray start --head` on the first host, `ray start --address=…` on each other one. `JaxTrainer` asks for the placement group, starts the
# actors and calls `jax.distributed.initialize` in each; `FailureConfig` says how often it starts new ones after a loss, from a checkpoint.
#
# **Misunderstanding:** that Ray moves gradients. It starts actors and hands them work; tensors travel by NCCL, as always.
#
# **Source:** Moritz et al. 2018; Ray's documentation of Ray Train.

# %% [markdown] tags=["slide"] minutes=2
# ## Ray on SLURM, in a container
#
# SLURM gives the nodes, Apptainer the software, Ray the pool.
#
# ```bash
# #SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4
# head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# inside="apptainer exec --nv llmpar.sif"
# srun -N1 -n1 -w "$head" $inside ray start --head --port=6379 --block & sleep 20
# srun -N1 -n1 -x "$head" $inside ray start --address="$head:6379" --block & sleep 20
# srun --overlap -N1 -n1 -w "$head" $inside python train_with_ray.py
# ```
#
# <footer>Ray documentation, deploying on SLURM; Kurtzer et al. 2017 (Singularity) · lesson <code>notebooks/17_many_hosts</code></footer>

# %%
from running import nested

show(nested())

# %%
import re
import subprocess
from pathlib import Path

listing = re.search(r"^# ```bash\n(.*?)^# ```", Path("src/13_run.py").read_text(), re.S | re.M)[1]
script = "#!/bin/bash\n" + re.sub(r"^# ", "", listing, flags=re.M)
assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).returncode == 0

# %% [markdown] tags=["notes"]
# Line by line: the first node's name; how to run inside the image; a head there; a worker on the others; then the program, beside the
# head. Without Ray the last line alone is enough, on all nodes at once.
#
# **Ask:** why `--nv`? It lends the host's driver and its libraries to the container.
#
# **Misunderstanding:** that the container brings the driver. It brings CUDA's libraries; the driver is the host's, and must be new
# enough.
#
# **Tried:** `tests/test_real_engines.py` runs this very listing, without container and GPUs, on a SLURM whose nodes are network
# namespaces of one machine. `train_with_ray.py` is what `llmpar launch ray` writes.
#
# **Source:** Ray's guide for SLURM.

# %% [markdown] tags=["slide", "short"] minutes=2
# ## Training frameworks: the same strategies, other names
#
# <footer>Each project's documentation, as of 2025 · lesson <code>notebooks/12_readings</code></footer>

# %%
from deck import draw

from llmpar.plan.mesh_shape import AXES

PARTS = {"shards": "fsdp", "tensor": "tp", "sequence": "sp", "pipeline": "pp", "experts": "ep"}
assert set(PARTS.values()) < set(AXES)
FRAMEWORKS = {
    "PyTorch": ("DDP, FSDP2", "DTensor", "CP", "pipelining", "torchtitan"),
    "DeepSpeed": ("ZeRO 1–3", "AutoTP", "Ulysses", "yes", "MoE"),
    "Megatron": ("ZeRO-1, FSDP", "yes, + sp", "CP, a ring", "1F1B, VPP", "yes"),
    "Colossal-AI": ("Gemini, ZeRO", "1-D to 3-D", "both", "1F1B, ZB", "yes"),
    "MaxText": ("data, fsdp", "tensor", "context", "circular", "expert"),
    "llmpar": ("dp, fsdp", "tp", "sp", "pp, any", "ep"),
}
grounds = {name: ["cell"] * len(PARTS) for name in FRAMEWORKS} | {"llmpar": [*PARTS.values()]}
rows = [(name, [*zip(words, grounds[name], strict=True)]) for name, words in FRAMEWORKS.items()]
show(draw.table(rows, tuple(PARTS), "The same strategies, other names"))

# %% [markdown] tags=["notes"]
# *Megatron* is Megatron Core, with NeMo on it; *VPP* its interleaved order, *ZB* a zero-bubble one; *both* are a ring and Ulysses;
# *pipelining* is `torch.distributed.pipelining`, *torchtitan* and *MoE* (DeepSpeed-MoE) are libraries for experts.
#
# Learn the arrow once; the name of the switch is in a manual.
#
# **Ask:** which one do you use, and which word in its column is new to you?
#
# **Misunderstanding:** that frameworks differ in what they compute. They differ in what you write, in kernels, and in what is tested
# together.
#
# **Source:** the documentation of each; NeMo runs on Megatron Core. A cell says what exists, not how well it works with its
# neighbours: ask that of the project.
