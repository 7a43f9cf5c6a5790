"""What lesson 17 runs in every process of a team: training steps whose mesh lies on the hosts in one way or
another, with the bytes that leave a host, as the kernel counts them, beside the predicted ones."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from llmpar.launch.team import Team
from llmpar.launch.wire import card_sent_bytes
from llmpar.lessons.lesson import counting_text
from llmpar.parallel.mesh import make_mesh, ordered_devices, platform_of
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.predict.hosts import leaving_bytes
from llmpar.training.step import Step

RECORDED = Path(__file__).parent / "two_hosts.json"
HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 4, "head_width": 36}
TOY = replace(preset("tiny"), width=144, num_layers=2, ffn_width=576, **HEADS)
"""2 layers of width 144: few weights, so that a step is short where links are fast."""
ROWS, SEQ = 32, 64
"""2,048 tokens: more than 4 × width, as at scale; else activations are no larger than gradients."""
REPLICAS = Plan("!dp=2 tp=2", zero=0, reduce="bucket")
HOST_PLANS = {
    "dp across": (REPLICAS, True),
    "tp across": (REPLICAS, False),
    "dp over all": (Plan("!dp=4", zero=0, reduce="bucket"), True),
    "fsdp over all": (Plan("!fsdp=4"), True),
    "pp across": (Plan("!pp=2 tp=2", zero=0, microbatches=4), True),
    "tp over all": (Plan("!tp=4"), True),
}
"""Name -> plan, and whether the mesh's outer axis crosses hosts (else the inner one does)."""
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""XLA's flags for programs that run a few times: half of the time to compile, the same values."""


def start(rate: str | None = None) -> Team:
    """Start two processes of two devices; each is a host where a wire's rate is given."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"
    return Team(2, 2, rate, os.environ | {"XLA_FLAGS": flags})


def recorded() -> dict[str, Any]:
    """Return the run of `notebooks/record_hosts.py`: placements on wires of several rates."""
    return json.loads(RECORDED.read_text())


def devices_of(outer_across: bool) -> list[jax.Device]:
    """Return all devices, host by host; or alternating, so that neighbours are on different hosts."""
    grid = np.array(ordered_devices()).reshape(jax.process_count(), -1)
    return list((grid if outer_across else grid.T).flat)


def put_everywhere(whole: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Return an array on the devices; each process hands over the shards of its own."""
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def sent_so_far() -> int:
    """Wait for all processes; return what this host has sent, which has also arrived."""
    multihost_utils.sync_global_devices("llmpar: count")
    return card_sent_bytes()


def leaving(name: str) -> list[int]:
    """Predict the bytes that leave each of two hosts of two devices in a step of a placement."""
    plan, outer = HOST_PLANS[name]
    by_axis = leaving_bytes(plan.resolve(TOY), ROWS, SEQ, [0, 0, 1, 1] if outer else [0, 1, 0, 1])
    return [sum(sent[host] for sent in by_axis.values()) for host in range(2)]


def measure(name: str, num_steps: int) -> dict[str, Any]:
    """Train on a placement; return losses, seconds of each step after the first, and the bytes that left this
    host per step. The weights are NumPy's, the same on every mesh: nothing is compiled for them."""
    plan, outer = HOST_PLANS[name]
    mesh = make_mesh(plan.mesh, devices_of(outer))
    step = Step(TOY, plan.resolve(TOY, platform_of(mesh), ROWS, SEQ), mesh, optax.adamw(3e-3))
    run, rng = step.lower(ROWS, SEQ).compile(), np.random.default_rng(17)
    draw = lambda like: (
        0.02 * rng.standard_normal(like.shape) if like.ndim > 1 else np.ones(like.shape)
    )
    params = jax.tree.map(draw, step.abstract_in_model_order.params)
    whole = jax.tree.map(lambda like: np.zeros(like.shape), step.abstract_in_model_order)._replace(
        params=params
    )
    on_devices = lambda like, x: put_everywhere(x.astype(like.dtype), like.sharding)
    state = step.from_model_order(jax.tree.map(on_devices, step.abstract_in_model_order, whole))
    batch = {
        name: put_everywhere(x, step.batch_sharding) for name, x in counting_text(ROWS, SEQ).items()
    }
    losses, seconds = [], []
    for number in range(num_steps + 1):
        if number == 1:  # the first one makes the connections
            before = sent_so_far()
        begin = time.perf_counter()
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - begin)
    sent = (sent_so_far() - before) / num_steps
    return {"losses": losses, "seconds": seconds[1:], "sent": sent}
