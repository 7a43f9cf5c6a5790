# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 25
#     needs: ["03", "05", "10"]
#     objectives:
#     - Run one program in several processes, and hand over each one's own rows.
#     - Predict what leaves a host, and place the axes of a mesh by it.
#     - Say what a dead process does to the others, and go on with the same bits.
# ---

# %% [markdown]
# # 17 · Many hosts: what crosses the wire?
#
# So far one process held all devices. A larger job has a process on each **host**, a machine with its own memory. All of them
# run the same program, and one mesh spans the devices of all. Inside a host devices talk over fast links; between hosts lies a
# network, here called the **wire**.
#
# Here two processes with two devices each stand for two hosts. Where this machine allows it (Linux, as root or with user
# namespaces), each gets a network of its own, and a wire of 50 Mbit/s joins them. So **this is the one lesson that measures
# time on a link**. The kernel counts what the wire carries. Elsewhere the processes talk over loopback, and a recorded run
# shows bytes and seconds.
#
# **Question.** Which axis may cross between hosts, what crosses exactly, and what happens when a host dies?
#
# Letters: `b` rows of the batch, `s` positions, `d` width of the model, `N` devices along the axis at hand, `Ψ` parameters.
#
# A **team** is the processes that a notebook starts and hands functions to; other words are in
# [Words](../docs/words.md#words). The core path ends at *Further*.

# %% tags=["plumbing"]
from llmpar.mesh import use_devices

devices = use_devices(2)  # this kernel only looks on: the devices are the team's

# %% tags=["plumbing"]
import os
import re
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from llmpar import Plan, draw, preset
from llmpar.draw import scene
from llmpar.exercises import (
    CORRECT,
    attempt,
    find,
    hint,
    hosts,
    met,
    say,
    say_command,
    solution,
)
from llmpar.launch import jobs
from llmpar.launch.team import TeamError
from llmpar.mesh import make_mesh

kept = Path(tempfile.mkdtemp())  # checkpoints, and programs that a second team needs
cache = {"JAX_COMPILATION_CACHE_DIR": str(kept / "programs")}
cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
os.environ.update(cache | os.environ)

# %% [markdown]
# ## Predict
#
# A Llama of Ψ = 740,304 parameters in float32, 2 layers, `d` = 144; `b` = 32 rows, `s` = 64 positions. The mesh is `dp=2 tp=2`
# on two hosts of two devices. Either **dp crosses** between the hosts (usual order), or **tp crosses**.
#
# An all-reduce over two devices sends the message once (lesson 02). Over `dp` travel gradients, of weights that `tp` has cut in
# two. Over `tp` travel activations of 16 rows: four sums a layer (lesson 05), and one each for embedding and head. **How many
# bytes leave a host in a step?**

# %%
dp_across, tp_across = ..., ...
attempt("17.leaves", {"dp across": dp_across, "tp across": tp_across})

# %% [markdown]
# ## Start two hosts
#
# `team.run(function, …)` runs a function in every process and gives what each returns. What it names must be in the notebook
# or in a module, as everywhere in Python. Each host takes half a gigabyte of memory.

# %%
try:
    team, wired = hosts.start("50mbit"), True
    print("two hosts, a wire of 50 Mbit/s")
except ValueError as refusal:
    team, wired = hosts.start(), False
    say(f"{refusal}.\nTwo processes on loopback; the recorded run shows the wire.")


def who():
    mine = [device.id for device in jax.local_devices()]
    return f"process {jax.process_index()}: devices {mine} of {jax.device_count()}"


print(*team.run(who), sep="\n")

# %% [markdown]
# Both see **four** devices, and each holds two of them. (Process 1 counts its devices from 2048. So a device's number is not its
# position in a mesh.) No process can read the other's memory. Values go across by collectives only.
#
# ## Each process hands over its own rows
#
# A global array is made of what each process hands over. The next program is **wrong**: each process hands over the whole
# batch.


# %%
def feed(take):
    """The mean of a batch of 8 rows, and how many rows the devices hold together."""
    rows = np.arange(8, dtype=np.float32)
    mine = take(rows, jax.process_index(), jax.process_count())
    cut = NamedSharding(make_mesh("dp=4"), PartitionSpec("dp"))
    batch = jax.make_array_from_process_local_data(cut, mine)
    return batch.shape[0], float(jax.jit(lambda x: x.mean())(batch))


def everything(rows, process, num):
    return rows


num_rows, mean = team.run(feed, everything)[0]
print(f"{num_rows} rows, mean {mean}: the mean of the 8 rows is {np.arange(8).mean()}")

# %% [markdown]
# Sixteen rows, and the right mean: every row is there twice. Nothing fails, the loss falls as it should, and half of the work
# is wasted. Watch the *number of rows*, not the loss.
#
# ### Exercise (core): whose rows?
#
# Give the rows of `batch` that process number `process` of `num` hands over. `dp` cuts the batch in blocks, and devices count
# process by process.


# %%
def my_rows(batch, process, num): ...


attempt("17.rows", my_rows)

# %%
if find("17.rows").judge(my_rows).startswith(CORRECT):
    print("rows on all devices: {}, mean {}".format(*team.run(feed, my_rows)[0]))

# %% [markdown]
# ## Run: one step, two placements
#
# The plan is the same, and so is the program. Only the order of the devices differs: `[0, 1, 2, 3]`, or one of each host in
# turn. What a device sends is the same, too. What *crosses* is not.

# %%
print("Each host compiles two programs and runs them: about 30 s.")
found = {name: team.run(hosts.measure, name, 2) for name in ("dp across", "tp across")}
for name, (one, other) in found.items():
    assert one["losses"] == other["losses"], "a loss is the same number everywhere"
    losses = " ".join(f"{loss:.6f}" for loss in one["losses"])
    print(f"{name}: losses {losses}, a step {min(one['seconds']):.2f} s")
leaves = {name: hosts.leaving(name)[0] for name in found}
met("17.leaves", leaves, "predicted")

# %% [markdown]
# **Value**: the losses agree, with one another and with those of the recorded run's other plans. **Communication**: bytes of the
# kernel's counter beside the prediction, which adds up who sends what to whom in each collective (`llmpar/predict/hosts.py`).
# Headers come on top: less than 2 %.

# %%
recorded = hosts.recorded()
runs = {run["placement"]: run for run in recorded["runs"] if run["rate"] == "20mbit"}
for name, ranks in found.items():
    for run in runs.values():
        assert np.allclose(ranks[0]["losses"], run["losses"][:3], rtol=1e-4)
    rows = {"recorded": runs[name]["sent"]}
    if wired:
        rows["here"] = [rank["sent"] for rank in ranks]
    for where, counted in rows.items():
        for host, (sent, told) in enumerate(
            zip(counted, hosts.leaving(name), strict=True)
        ):
            assert 0 <= sent / told - 1 < 0.02, (name, where, sent, told)
            print(f"{name}, {where}, host {host}: ", end="")
            print(f"{told:,} B predicted, {sent / told - 1:+.1%} counted")

# %% [markdown]
# And the seconds, by placement, on 20 Mbit/s: the part that a fast wire takes as well, and what the slow one adds. `pp` and
# `fsdp` are there too.

# %%
fast = {r["placement"]: r["step_s"] for r in recorded["runs"] if r["rate"] == "10gbit"}
bars = []
for name, run in sorted(runs.items(), key=lambda item: item[1]["step_s"]):
    slow = max(0.0, run["step_s"] - fast[name])
    bars.append((name, {"on a fast wire": fast[name], "slow wire": slow}))
print(f"recorded {recorded['date']}, {recorded['machine']}")
scene.show(draw.time_bars(bars, title="A step on two hosts, 20 Mbit/s"))

# %% [markdown]
# `dp`, `pp` and `fsdp` send once per weight or per stage; `tp` sends activations in every layer, and the next product waits for
# them. So `tp` belongs inside a host. `llmpar` orders the axes so by itself (lesson 10).
#
# When is it so? A layer of this Llama has 16 d² weights. dp sends each of them once; tp sends 4 T d numbers for a batch of
# T = b · s tokens. Their ratio is **T/(4 d)**.

# %% tags=["nbval-check-output"]
tokens, width = hosts.ROWS * hosts.SEQ, hosts.TOY.width
print(f"T/(4 d) = {tokens / (4 * width):.1f}; bytes: ", end="")
print(f"{leaves['tp across'] / leaves['dp across']:.1f} times as many")

# %% [markdown]
# ## When a process dies
#
# A run of 12 steps keeps a checkpoint after every 4. Process 1 is killed (`kill -9`) after step 7. The same command is started
# again. **With which step does it go on?**

# %%
first_step = ...
attempt("17.goes_on", first_step)


# %% tags=["plumbing"]
def learn(folder, dies_after=0):
    """12 steps of `llmpar train`; process 1 may end as by `kill -9` after one."""
    from llmpar.training.checkpoint import Checkpoints
    from llmpar.training.data import DataConfig, Stream, read_corpus
    from llmpar.training.train import train

    plan, done = Plan("fsdp=2 tp=2"), iter(range(1, 13))

    def stop():
        if next(done) == dies_after and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    text = DataConfig(seq_len=32, batch_size=4, limit_bytes=1 << 16)
    keep, stream = Checkpoints(folder, every=4), Stream(read_corpus(text), text)
    small, mesh = replace(preset("tiny"), num_layers=1), make_mesh(plan.mesh)
    _, report = train(small, plan, mesh, stream, 12, checkpoints=keep, stop=stop)
    multihost_utils.sync_global_devices("kept")
    bits = keep.about()["checksums"]  # of all weights and moments
    return {"start": report.start, "losses": report.losses, "bits": bits}


# %%
print("Two runs, one of them to its end: about 20 s.")
whole = team.run(learn, str(kept / "whole"))[0]
try:
    team.run(learn, str(kept / "killed"), 7)
except TeamError as error:
    say(error)

# %% [markdown]
# Process 0 did not wait: its collective broke at once. It cannot go on either, because half of the weights are gone. So all
# end, whoever started them starts them again, and they read the checkpoint:

# %%
print("Two hosts start again and train on: about 10 s.")
team = hosts.start("50mbit" if wired else None)
again = team.run(learn, str(kept / "killed"))[0]
met("17.goes_on", again["start"], "went on with")
assert again["losses"] == whole["losses"][again["start"] :]
assert again["bits"] == whole["bits"]
print(f"losses of steps {again['start']} to 11: the same numbers")
print("weights and moments: the same bits as without the kill")

# %% [markdown]
# ## Five lines
#
# 1. One program runs in every process; one mesh spans all devices; each process hands over its own rows.
# 2. One plan, two placements: the same loss, and four times the bytes across.
# 3. `dp`, `pp` and `fsdp` may cross a slow wire; `tp` stays inside a host.
# 4. One dead process ends all; the same command goes on from the newest checkpoint, with the same bits.
# 5. Neither a wrong placement nor doubled rows show in the loss: count rows and bytes.
#
# **One number to remember: T/(4 d).** So many times more does tp send across hosts than dp.

# %% [markdown]
# ## Further
#
# A sum that spares the wire, who sends what to whom, a process that does not come, and your cluster.
#
# ### Exercise (stretch): a sum in two levels
#
# An all-reduce over all four devices is a ring: 3/2 of the message leaves each host. Less is enough. Write a sum of `x` over
# both axes, `"dp"` across the hosts and `"tp"` inside, of which each host sends only 1 · x. It runs on every device.


# %%
def two_level(x): ...


attempt("17.two_level", two_level)

# %% [markdown]
# Yours runs on the team, between the hosts, and the sum in one ring beside it:


# %% tags=["plumbing"]
def summed(function):
    """Sum 1 MB, dp across: whether it is right here, and which share has left."""
    cut, mesh = (
        PartitionSpec(("dp", "tp")),
        make_mesh("!dp=2 tp=2", hosts.devices_of(True)),
    )
    share = jax.shard_map(
        function, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False
    )
    whole, run = np.arange(1 << 20, dtype=np.float32) % 251, jax.jit(share)
    x = hosts.put(whole, NamedSharding(mesh, cut))
    run(x).block_until_ready()  # the first one makes the connections
    before = hosts.meet().sent_bytes
    shards = [np.asarray(shard.data) for shard in run(x).addressable_shards]
    right = all((shard == whole.reshape(4, -1).sum(0)).all() for shard in shards)
    return right, (hosts.meet().sent_bytes - before) / x.addressable_data(0).nbytes


# %%
def one_ring(x):
    return lax.psum(x, ("dp", "tp"))


right = find("17.two_level").judge(two_level).startswith(CORRECT)
for function in (one_ring, two_level) if right else (one_ring,):
    sums = team.run(summed, function)
    assert all(ok for ok, _ in sums)
    sent = " and ".join(f"{sent:.2f} x" for _, sent in sums)
    counted = f"; {sent} left the hosts" if wired else "; no wire here to count at"
    print(f"{function.__name__}: right on all devices{counted}")

# %% [markdown]
# ### Who sends what to whom
#
# Which bytes cross depends on the algorithm. NCCL, by which NVIDIA's GPUs talk, sums long messages round a **ring**: each device sends
# to the next one. Shorter ones it sums along **two trees**, each with half of the message: sums go up to the root, the result comes
# down (Jeaugey 2019). One edge of each tree lies between the hosts, and the two roots are on different hosts. An all-to-all goes
# directly, a piece to each device.
#
# ### Exercise (expert): the law
#
# Two hosts of four devices, devices 0 to 7 in order. **Which share of the message leaves each host?** (Of an all-to-all: of the
# buffer that each device holds.)

# %%
shares = {"ring": ..., "tree": ..., "all-to-all": ...}
attempt("17.law", shares)

# %% [markdown]
# ### A process that does not come
#
# The second program that is wrong by design: process 1 leaves before a collective. No error, no heartbeat missed: process 0
# waits. `llmpar train` ends such a run after `--stuck-after` seconds, with every process's stack; the team does so after 4.


# %%
def leaves_early():
    if jax.process_index() == 1:
        return "done"
    return multihost_utils.process_allgather(np.float32(1))


try:
    team.run(leaves_early, timeout_s=4)
except TeamError as error:
    say(error)
    assert "has come back" in error.ends[1]

# %% [markdown]
# ## Where XLA's partitioner differs
#
# It does not know hosts. Under `--reading auto` it chooses other collectives, and other bytes cross.
#
# ## On your cluster
#
# Three ways to start the same thing. Each prints the job file of its engine; `--submit` hands it over. `site.toml` says what the
# cluster is: partition, account, hosts, image.
#
#     llmpar launch slurm  --nodes 2 --site site.toml -- train --mesh "dp=2 fsdp=8" --checkpoints kept
#     llmpar launch mpi    --nodes 2 --site site.toml -- train --mesh "dp=2 fsdp=8" --checkpoints kept
#     llmpar launch jobset --nodes 2 --site site.toml -- train --mesh "dp=2 fsdp=8" --checkpoints kept
#
# What they write, without comments:

# %%
words = ("train", "--mesh", "dp=2 fsdp=8", "--checkpoints", "kept")
site = jobs.Site(hosts=("n1", "n2"), image="registry/llmpar:1")
job = jobs.Job(words, nodes=2, site=site)
for engine in ("slurm", "mpi", "jobset"):
    text = jobs.job_file(engine, job)
    told = [line for line in text.splitlines() if not re.match(r" *# ", line)]
    print(f"--- {engine}: {len(told)} lines")
    for line in told[:22]:
        say_command(line)

# %% [markdown]
# And on this machine, over a wire (Linux):
#
#     llmpar launch local --processes 2 --devices 2 --wire 100mbit -- train --mesh "dp=2 tp=2" --steps 5
#     llmpar launch local --processes 4 --devices 2 -- train --mesh "fsdp=8" --checkpoints kept
