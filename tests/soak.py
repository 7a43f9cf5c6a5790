"""Runs a loop of collectives with others beside it again and again; counts what crashes, hangs or errs.

    python tests/soak.py --runs 20 [--without]     without the channels of `llmpar.parallel._jax`

A run is a fork, before JAX starts."""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from llmpar.parallel import _jax
from llmpar.parallel.mesh import use_devices

TURNS, SUMS = 2, 6


def local_mesh():
    return jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


def over_devices(f, mesh):
    """A program of every device's rows, and of weights that all have."""
    rows = P(mesh.axis_names)
    inside = jax.shard_map(f, mesh=mesh, in_specs=(rows, P()), out_specs=rows, check_vma=False)
    return jax.jit(inside), NamedSharding(mesh, rows)


def beside_a_loop(x, weights):
    """A loop of matmuls and a sum, and a chain of sums beside it."""
    rows, small = x

    def body(c, _):
        return lax.psum(sum(jnp.tanh(c @ w) for w in weights) / len(weights), ("b", "c")) / 4, None

    out = [lax.scan(body, rows, None, length=TURNS)[0]]
    for _ in range(SUMS):
        one = jnp.sin(small)
        small = lax.psum(one, ("b", "c"))
        out += [one, small]
    return out


def reproducer(steps: int) -> int:
    """Steps of `beside_a_loop` whose values are not those of NumPy."""
    mesh, noise = local_mesh(), np.random.default_rng(0)
    program, rows = over_devices(beside_a_loop, mesh)
    x, y = noise.normal(size=(8 * 64, 64)), noise.normal(size=(8, 16))
    weights = noise.normal(size=(12, 64, 64)) / 8
    total = lambda v: np.broadcast_to(v.sum(1, keepdims=True), v.shape)
    v, z = x.reshape(2, 4, 64, 64), y.reshape(2, 4, 16)
    for _ in range(TURNS):
        v = total(sum(np.tanh(v @ w) for w in weights) / 12) / 4
    want = [v.reshape(x.shape)]
    for _ in range(SUMS):
        want += [np.sin(z).reshape(y.shape), total(np.sin(z)).reshape(y.shape)]
        z = total(np.sin(z))
    arrays = jax.device_put([a.astype(np.float32) for a in (x, y)], rows)
    weights = jax.device_put(weights.astype(np.float32), NamedSharding(mesh, P()))
    alike = lambda got: all(np.allclose(a, b, atol=1e-3) for a, b in zip(got, want, strict=True))
    return sum(not alike(jax.device_get(program(arrays, weights))) for _ in range(steps))


def child(asked, pipe: int) -> None:
    """One run: its answer goes into the pipe; its status says whether it ended well, or hung."""
    signal.alarm(asked.limit_s)
    try:
        if asked.without:
            _jax.install_channels = lambda: False
        use_devices(8)
        os.write(pipe, f"{reproducer(asked.steps)} wrong".encode())
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
        os._exit(1)


def soak(asked) -> dict:
    """Run children; count how they ended and what they answered."""
    ends, answers = collections.Counter(), collections.Counter()
    for _ in range(asked.runs):
        read, write = os.pipe()
        if not (pid := os.fork()):
            child(asked, write)
        os.close(write)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        ends[{0: "ended", 1: "failed", -signal.SIGALRM: "hung"}.get(code, f"signal {-code}")] += 1
        with os.fdopen(read) as answer:
            answers += {answer.read(): code == 0}
    about = {"jax": jax.__version__, "channels": not asked.without, "runs": asked.runs}
    return about | {"ends": dict(ends), "answers": dict(answers)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit-s", type=int, default=120, help="a run that takes longer hangs")
    parser.add_argument("--without", action="store_true", help="leave out the channels")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    print(json.dumps(soak(asked)), flush=True)
