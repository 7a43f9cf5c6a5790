"""What lesson 17 runs in every process of a team: training steps whose mesh lies on the hosts in one way or
another, with the bytes that leave a host, as the kernel counts them, beside the predicted ones."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from llmpar.config import preset
from llmpar.exercises.lesson import counting_text
from llmpar.launch.team import Team
from llmpar.launch.wire import Count, counted
from llmpar.mesh import make_mesh, ordered_devices
from llmpar.plan import Plan
from llmpar.predict.hosts import leaving_bytes
from llmpar.step import State, Step

RECORDED = Path(__file__).parent / "two_hosts.json"
TOY = replace(
    preset("tiny"), width=144, num_layers=2, num_heads=4, num_kv_heads=4, head_width=36, ffn_width=576
)
"""2 layers of width 144: few weights, so that a step is short where links are fast."""
ROWS, SEQ = 32, 64
"""2,048 tokens: more than 4 × width, as in training at scale; else activations are no larger than
gradients."""
REPLICAS = Plan("!dp=2 tp=2", zero=0, reduce="bucket")
PLACEMENTS = {"dp across": (REPLICAS, True), "tp across": (REPLICAS, False)}
"""Name -> plan, and whether the mesh's outer axis crosses hosts (else the inner one does)."""
MORE = {
    "dp over all": (Plan("!dp=4", zero=0, reduce="bucket"), True),
    "fsdp over all": (Plan("!fsdp=4"), True),
    "pp across": (Plan("!pp=2 tp=2", zero=0, microbatches=4), True),
    "tp over all": (Plan("!tp=4"), True),
}
"""Placements of the recorded run besides."""
X_BYTES = 1 << 20
"""Of the message that `summed` adds up."""
STEPS, EVERY = 12, 4
"""Of a run that is killed: steps, and after how many of them a checkpoint is kept."""


QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""XLA's flags for programs that run a few times: half of the time to compile, the same values."""


def start(rate: str | None = None, num: int = 2, devices: int = 2) -> Team:
    """Start a team for the functions here; each process is a host where a wire's rate is given."""
    flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), QUICK)))
    return Team(num, devices, rate, os.environ | {"XLA_FLAGS": flags})


def recorded() -> dict[str, Any]:
    """The run of `notebooks/record_hosts.py`: placements on wires of several rates, on one machine, once."""
    return json.loads(RECORDED.read_text())


def devices_of(outer_across: bool) -> list[jax.Device]:
    """All devices, host by host; or one of each host in turn, so that neighbours are on different hosts."""
    devices = ordered_devices()
    hosts = jax.process_count()
    grid = np.array(devices).reshape(hosts, -1)
    return list((grid if outer_across else grid.T).flat)


@functools.cache
def built(name: str) -> tuple[Step, Any]:
    """The step of a placement, and what runs it: compiled once."""
    plan, outer = (PLACEMENTS | MORE)[name]
    plan.check(TOY, ROWS, SEQ)
    step = Step(TOY, plan, make_mesh(plan.mesh, devices_of(outer)), optax.adamw(3e-3))
    return step, step.lower(ROWS, SEQ).compile()


def fresh_state(step: Step) -> State:
    """The same weights on every mesh, of NumPy: nothing is compiled for them."""
    rng = np.random.default_rng(17)

    def put(like, make):
        whole = np.asarray(make(like.shape), like.dtype)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: whole[index])

    natural = step.abstract_natural
    draw = lambda shape: 0.02 * rng.standard_normal(shape) if len(shape) > 1 else np.ones(shape)
    params = jax.tree.map(lambda like: put(like, draw), natural.params)
    zeros = jax.tree.map(lambda like: put(like, np.zeros), natural)
    return step.from_natural(zeros._replace(params=params))


def on_devices(step: Step, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """A batch on the devices; each process hands over the rows of its own."""
    put = lambda x: jax.make_array_from_callback(x.shape, step.batch_sharding, lambda index: x[index])
    return {name: put(array) for name, array in batch.items()}


def meet() -> Count:
    """Wait until all processes are here; what this host has sent by then. What was sent has also arrived:
    the others have gone on with it."""
    multihost_utils.sync_global_devices("llmpar: count")
    return counted()


def leaving(name: str) -> list[int]:
    """Predict what leaves each of two hosts of two devices in a step of a placement."""
    plan, outer = (PLACEMENTS | MORE)[name]
    found = leaving_bytes(TOY, plan, ROWS, SEQ, [0, 0, 1, 1] if outer else [0, 1, 0, 1])
    return [sum(sent[host] for sent in found.values()) for host in range(2)]


def measure(name: str, num_steps: int) -> dict[str, Any]:
    """Train on a placement: losses, seconds of each step after the first, and what left this host in such a
    step."""
    step, run = built(name)
    state, batch = fresh_state(step), on_devices(step, counting_text(ROWS, SEQ))
    losses, seconds = [], []
    for number in range(num_steps + 1):
        if number == 1:  # the first one makes the connections
            before = meet()
        begin = time.perf_counter()
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - begin)
    sent = (meet().sent_bytes - before.sent_bytes) / num_steps
    return {"losses": losses, "seconds": seconds[1:], "sent": sent}


def learn(folder: str, dies_after: int = 0) -> dict[str, Any]:
    """`llmpar train` with checkpoints, on the mesh fsdp=2 tp=2; process 1 ends as by ``kill -9`` after a
    step, if one is named. Gives the step that it began at, the losses, and the checkpoint's sums over all
    bits."""
    # The notebook's own process needs none of it: 0.2 GB.
    from llmpar.training.checkpoint import Checkpoints
    from llmpar.training.data import DataConfig, Stream, read_corpus
    from llmpar.training.train import train

    text = DataConfig(seq_len=32, batch_size=4, limit_bytes=1 << 16)
    plan, done = Plan("fsdp=2 tp=2"), iter(range(1, STEPS + 1))

    def stop() -> bool:
        if next(done) == dies_after and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    keep, stream = Checkpoints(folder, EVERY), Stream(read_corpus(text), text)
    small = replace(preset("tiny"), num_layers=1)
    _, report = train(small, plan, make_mesh(plan.mesh), stream, STEPS, checkpoints=keep, stop=stop)
    multihost_utils.sync_global_devices("llmpar: kept")
    return {"start": report.start, "losses": report.losses, "bits": keep.about()["checksums"]}


def summed(function: Callable[[jax.Array], jax.Array]) -> tuple[bool, int]:
    """Carry out a sum over both axes of dp=2 tp=2, dp across: whether each device here has the right one, and
    what left this host."""
    mesh = make_mesh("!dp=2 tp=2", devices_of(True))
    cut = PartitionSpec(("dp", "tp"))
    run = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False))
    whole = np.arange(X_BYTES, dtype=np.float32) % 251  # 4 bytes each, a quarter for each device
    x = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, cut), lambda index: whole[index])
    run(x).block_until_ready()  # the first one makes the connections
    before = meet()
    shards = [np.asarray(shard.data) for shard in run(x).addressable_shards]
    sent = meet().sent_bytes - before.sent_bytes
    return all(np.array_equal(shard, whole.reshape(4, -1).sum(0)) for shard in shards), sent
