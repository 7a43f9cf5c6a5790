# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 25
#     needs: ["03", "05", "10"]
#     question: Which axis may cross between hosts, what is sent exactly, and what happens
#       when a host dies?
#     objectives:
#     - Run one program in several processes, and give JAX each process's own rows.
#     - Predict what leaves a host, and place the axes of a mesh accordingly.
#     - Say what a dead process does to the others, and continue with the same bits.
# ---

# %% [markdown]
# # 17 · Many hosts: 8 rows go in, 16 are trained on
#
# Two machines, called **hosts**, train together. Both run the same program, and both give JAX the batch of 8 rows. Nothing fails. The
# mean of the batch is right. Here is what their devices hold.

# %% tags=["plumbing"]
from llmpar.parallel.mesh import use_devices

devices = use_devices(2)  # this kernel only looks on: the devices are the team's

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
from llmpar.launch import jobs
from llmpar.launch.team import TeamError
from llmpar.lessons import (
    CORRECT,
    attempt,
    find,
    hint,
    hosts,
    met,
    opened,
    say,
    say_command,
    solution,
)
from llmpar.parallel.mesh import make_mesh
from llmpar.predict.hosts import leaving_bytes

kept = Path(tempfile.mkdtemp())  # checkpoints, and programs that a second team needs
cache = {"JAX_COMPILATION_CACHE_DIR": str(kept / "programs")}
cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
os.environ.update(cache | os.environ)

try:
    team, wired = hosts.start("50mbit"), True
    print("two hosts of two devices, a wire of 50 Mbit/s between them")
except ValueError as refusal:
    team, wired = hosts.start(), False
    say(f"{refusal}.\nTwo processes without a wire; a recorded run shows the wire.")


def shown(found):
    """Draw which rows the devices of each host hold."""
    held = [[[str(row) for row in rows] for rows in host] for host, *_ in found]
    _, num, mean = found[0]
    title = f"Rows on the devices: {num} rows, mean {mean}"
    return draw.wired(held, ["the wire"], title=title)


# %%
def feed(take):
    """The rows that this host's devices hold, how many there are in all, their mean."""
    rows, process = np.arange(8, dtype=np.float32), jax.process_index()
    mine = take(rows, process, jax.process_count())
    cut = NamedSharding(make_mesh("dp=4"), PartitionSpec("dp"))
    batch = jax.make_array_from_process_local_data(cut, mine)
    held = [np.asarray(x.data, int).tolist() for x in batch.addressable_shards]
    return held, batch.shape[0], float(jax.jit(lambda x: x.mean())(batch))


def everything(rows, process, num):
    return rows


scene.show(shown(team.run(feed, everything)))

# %% [markdown]
# ## Every row is there twice
#
# Every row is on two devices (red: the second time). The mean stays 3.5, the loss falls as it should, and half of the work is wasted. **Count rows; the
# loss does not show it.**
#
# Two processes on this machine stand for the hosts. Each host runs a **process** of its own, which sees only its own memory. Only collectives
# carry values over the network, here called the **wire**. `team.run(function, …)` runs a function in all processes and returns all
# results. The **mesh** spans the devices of all hosts, numbered host by host.
#
# ### Exercise (core): whose rows?
#
# Return the rows of `batch` that process number `process` of `num` should give to JAX. `dp` cuts the batch in blocks, in the order of the
# devices.


# %%
def my_rows(batch, process, num): ...


attempt("17.rows", my_rows)

# %% tags=["plumbing"]
if find("17.rows").judge(my_rows).startswith(CORRECT):
    scene.show(shown(team.run(feed, my_rows)))

# %% [markdown]
# ## One plan, two placements
#
# A small Llama has 740,304 parameters in float32, 2 layers and a width `d` of 144. A batch has `b` = 32 rows of `s` = 64 positions. The
# plan is `dp=2 tp=2`: `dp` cuts the batch, and `tp` cuts the weights in two halves. Each axis has pairs of devices that exchange data.
# Which pairs cross the wire depends on where each device is placed:

# %% tags=["plumbing"]
recorded = hosts.recorded()
on_wire = {
    rate: {run["placement"]: run for run in recorded["runs"] if run["rate"] == rate}
    for rate in ("10gbit", "20mbit")
}


def placed(name, *words):
    """Draw a placement of dp=2 tp=2, with words on the wire."""
    rows, halves = ("rows 0–15", "rows 16–31"), ("left half", "right half")
    outer, inner = [(0, 2), (1, 3)], [(0, 1), (2, 3)]
    if name == "dp across":
        held = [[(row, half) for half in halves] for row in rows]
        pairs = {"dp": outer, "tp": inner}
    else:
        held = [[(row, half) for row in rows] for half in halves]
        pairs = {"dp": inner, "tp": outer}
    return draw.wired(held, words, pairs, name)


# %%
for name in ("dp across", "tp across"):
    scene.show(placed(name, "the wire", "? bytes a step"))

# %% [markdown]
# ## Predict: how many bytes leave a host in a step?
#
# An all-reduce over two devices sends the message once (lesson 02).
#
# * **dp across**: the gradients of all weights cross the wire. Each device has half of them.
# * **tp across**: activations cross the wire. One sum is `b s d` numbers for a device's 16 rows. There are four sums a layer
#   (lesson 05), and one each for embedding and head.

# %%
# 740,304 parameters, d = 144, 2 layers; 32 rows of 64 positions; float32
dp_across, tp_across = ..., ...
attempt("17.leaves", {"dp across": dp_across, "tp across": tp_across})

# %%
print("Each host compiles two programs and runs them: about 30 s.")
found = {name: team.run(hosts.measure, name, 2) for name in ("dp across", "tp across")}
leaves = {name: hosts.leaving(name)[0] for name in found}
met("17.leaves", leaves, "predicted")

# %% tags=["plumbing"]
took = {name: f"{on_wire['20mbit'][name]['step_s']:.1f} s" for name in found}
assert took == {"dp across": "1.9 s", "tp across": "5.0 s"}  # the text has these
for name, ranks in found.items():
    assert ranks[0]["losses"] == ranks[1]["losses"], (
        "a loss is the same number everywhere"
    )
    for run in on_wire["20mbit"].values():
        assert np.allclose(ranks[0]["losses"], run["losses"][:3], rtol=1e-4)
    rows = {"recorded": on_wire["20mbit"][name]["sent"]}
    if wired:
        rows["here"] = [rank["sent"] for rank in ranks]
    for where, counted in rows.items():
        for sent, told in zip(counted, hosts.leaving(name), strict=True):
            assert 0 <= sent / told - 1 < 0.02, (name, where, sent, told)
    losses = " ".join(f"{loss:.6f}" for loss in ranks[0]["losses"])
    print(f"{name}: losses {losses}, bytes as predicted within 2 % (headers)")

# %% [markdown]
# ## What Linux counted on the wire
#
# All losses agree in the printed digits: both placements compute the same step. The bytes on the wire are not equal. These
# pictures are from a run that we recorded on a slower wire, on which seconds show the difference: 20 Mbit/s.

# %%
for name in found:
    run = on_wire["20mbit"][name]
    size, seconds = (
        f"{run['sent'][0] / 1e6:.1f} MB a step",
        f"{run['step_s']:.1f} s a step",
    )
    scene.show(placed(name, "20 Mbit/s", size, seconds))

# %% [markdown]
# ## Predict: how slow does a plan become on the slow wire?
#
# Here are six plans for four devices: `dp across`, `pp across`, `tp across`, `dp over all`, `fsdp over all`, `tp over all`. *Across*: pairs
# along this axis are on two hosts, the other axis stays inside. *Over all*: one axis has all four devices.
#
# Between pairs an all-reduce puts 2 · 1/2 of its message on the wire, round a ring of four 2 · 3/4. The two pairs of `tp across` sum 16 rows
# each, the ring of `tp over all` sums 32 rows once. `tp across` took 5.0 s, `dp across` 1.9 s. **How many times as long as `dp across` does
# `tp over all` take: 2.6, 4 or 6 times?**

# %%
times_as_long = ...
attempt("17.slowest", times_as_long)

# %%
bars = []
for name, run in sorted(on_wire["20mbit"].items(), key=lambda item: item[1]["step_s"]):
    fast = on_wire["10gbit"][name]["step_s"]
    slow = max(0.0, run["step_s"] - fast)
    bars.append((name, {"on a fast wire": fast, "added by the slow wire": slow}))
print(f"recorded {recorded['date']}, {recorded['machine']}")
if opened("17.slowest"):
    scene.show(draw.time_bars(bars, title="A step on two hosts, 20 Mbit/s"))
slow = on_wire["20mbit"]
ratio = slow["tp over all"]["step_s"] / slow["dp across"]["step_s"]
assert {name.split()[0] for name, _ in bars[-2:]} == {"tp"}
met("17.slowest", round(ratio, 1), "recorded:")

# %% [markdown]
# `tp` sends activations in every layer, and they are the hardest to overlap (lessons 05, 10). So keep `tp` on fast links: here inside a
# host (lesson 15 has larger groups).
#
# ## Predict: at how many tokens do both send the same?
#
# A layer of this Llama has about 16 d² weights. `dp` sends each of them once, however large the batch is. `tp` sends 4 T d numbers for a
# batch of T = b · s tokens. **At how many tokens do they send the same?** (`d` is 144.)

# %%
equal_tokens = ...
attempt("17.equal", equal_tokens)

# %% tags=["plumbing"]
tokens, lines = [256, 512, 1024, 2048, 4096], []
for name, color in (("tp across", "tp-line"), ("dp across", "dp-line")):
    plan, outer = hosts.HOST_PLANS[name]
    plan, where = plan.resolve(hosts.TOY), [0, 0, 1, 1] if outer else [0, 1, 0, 1]
    sent = [leaving_bytes(plan, T // hosts.SEQ, hosts.SEQ, where) for T in tokens]
    sizes = [sum(of[0] for of in axes.values()) / 1e6 for axes in sent]
    lines.append((name, sizes, color, "o", False))
equal = 4 * hosts.TOY.width
marks = [(np.log2(equal / tokens[0]), f"4 d = {equal}")]
labels = [f"{T:,}" for T in tokens]

# %%
how = {"marks": marks, "title": "What leaves a host in a step"}
if opened("17.equal"):
    scene.show(draw.curves(lines, labels, "tokens in a batch", "MB", **how))
met("17.equal", equal, "computed")

# %% [markdown]
# Counted over layers alone they send the same at T = 4 d = 576. With embedding and head it is at 514 tokens, where the lines cross.
# With T tokens `tp` sends T/(4 d) times as much in the layers. Large trainings have far more tokens, so tp stays inside a host.
#
# ## Predict: a process dies. Where does the run continue?
#
# A run of 12 steps, numbered 0 to 11, keeps a checkpoint after every 4 steps. Process 1 is killed (`kill -9`) after 7 steps.
# The same command is started again. **With which step does it continue?**

# %%
first_step = ...
attempt("17.goes_on", first_step)


# %% tags=["plumbing"]
def learn(folder, dies_after=0):
    """12 steps of `llmpar train`; process 1 may end as by `kill -9` after one."""
    from llmpar.training.checkpoint import Checkpoints
    from llmpar.training.data import Batches, DataConfig, read_corpus
    from llmpar.training.loop import Callbacks, train

    plan, done = Plan("fsdp=2 tp=2"), iter(range(1, 13))

    def stop():
        if next(done) == dies_after and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    text = DataConfig(seq_len=32, batch_size=4, limit_bytes=1 << 16)
    keep, stream = Checkpoints(folder, every=4), Batches(read_corpus(text), text)
    small, mesh = replace(preset("tiny"), num_layers=1), make_mesh(plan.mesh)
    _, report = train(
        small, plan, mesh, stream, 12, checkpoints=keep, callbacks=Callbacks(stop=stop)
    )
    multihost_utils.sync_global_devices("kept")
    bits = keep.about()["checksums"]  # of all weights and moments
    return {"start": report.start, "losses": report.losses, "bits": bits}


def steps_of(start):
    """Draw the steps of the killed run, and of the one that goes on with `start`."""
    tone = lambda step, colour: colour if start <= step < 7 else "cell"
    first = [(str(i), tone(i, "bad-ground")) for i in range(7)]
    second = [(str(i), tone(i, "good-ground")) for i in range(start, 12)]
    rows = [("process 1 is killed", first)]
    rows += [("started again", [("", "")] * start + second)]
    note = "Red: lost with the memory of process 1. Green: done again."
    return draw.table(rows, title="Steps of two runs", notes=[note])


# %%
print("Two runs, one of them to its end: about 20 s.")
whole = team.run(learn, str(kept / "whole"))[0]
try:
    team.run(learn, str(kept / "killed"), 7)
except TeamError as error:
    for process, words in error.ends.items():
        print(f"process {process} {words.partition(':')[0]}")

# %% [markdown]
# ## One dead process stops all processes
#
# Process 0 did not wait: its collective failed at once. (So it is here, on CPUs. On GPUs, with NCCL, it may wait until JAX misses the
# other's heartbeat: 100 s by JAX's default, within a minute in llmpar's own runs.) It cannot go on either, because half of the weights are lost. So all processes
# end, the launcher starts them again, and they read the newest checkpoint:

# %%
print("Two hosts start again and train on: about 10 s.")
team = hosts.start("50mbit" if wired else None)
again = team.run(learn, str(kept / "killed"))[0]
met("17.goes_on", again["start"], "went on with")
if opened("17.goes_on"):
    scene.show(steps_of(again["start"]))

# %% tags=["plumbing"]
assert again["losses"] == whole["losses"][again["start"] :]
assert again["bits"] == whole["bits"]
print("losses of the steps after the start: the same numbers")
print("weights and moments: the same bits as without the kill")

# %% [markdown]
# ## Keep: count rows and bytes, not losses
#
# 1. One program runs in every process; one mesh spans all devices; each process gives JAX its own rows.
# 2. Two placements of one plan have the same loss. Here one sends four times the bytes over the wire.
# 3. `dp`, `pp` and `fsdp` may cross a slow wire; `tp` stays on fast links: in the layers it sends T/(4 d) times as much as `dp` here.
# 4. One dead process stops all; the same command continues from the newest checkpoint, here with the same bits.

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
    x = hosts.put_everywhere(whole, NamedSharding(mesh, cut))
    run(x).block_until_ready()  # the first one makes the connections
    before = hosts.sent_so_far()
    shards = [np.asarray(shard.data) for shard in run(x).addressable_shards]
    right = all((shard == whole.reshape(4, -1).sum(0)).all() for shard in shards)
    return right, (hosts.sent_so_far() - before) / x.addressable_data(0).nbytes


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
# Which bytes cross depends on the algorithm. NCCL, which NVIDIA's GPUs use, sums long messages round a **ring**, unless a switch adds them
# up itself (SHARP): each device sends to the next one. Shorter ones it sums along **two trees**, each with half of the message: sums go up to the root,
# the result comes down ([NCCL 2.4](https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/), 2019). One edge of
# each tree lies between the hosts, and the two roots are on different hosts. An all-to-all goes directly, a piece to each device.
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
# Here is another program with a mistake on purpose: process 1 returns before the collective. No error, no heartbeat missed: process 0
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
# ### Where XLA's partitioner differs
#
# It does not know hosts. Under `--mode auto` it chooses other collectives, and other bytes cross.
#
# ### On your cluster
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
