"""What each of several processes does in test_launch.py; process 0 prints a JSON document last."""

# ruff: noqa: E402 -- processes join before anything else uses JAX
import contextlib
import glob
import io
import json
import os
import signal
import sys
import time
import traceback

import jax
import numpy as np

from llmpar.launch import joined

PLACE = joined.initialize(wait_s=60, heartbeat_s=int(os.environ.get("HEARTBEAT_S", "20")), shutdown_s=20)

import optax
import parity
from jax.experimental import multihost_utils
from plans import build
from test_launch import MOVES, PLANS

from llmpar.cli import main
from llmpar.inspect.shardings import shardings
from llmpar.parallel.mesh import make_mesh, ordered_devices, use_devices
from llmpar.plan.plan import Plan
from llmpar.plan.two_meshes import two_meshes
from llmpar.serve.two_meshes import Mover
from llmpar.training import hugging_face as hf
from llmpar.training import loop as train
from llmpar.training.checkpoint import checksums
from llmpar.training.data import Batches, DataConfig, read_corpus
from llmpar.training.step import State, Step

use_devices()


def gathered(value: np.ndarray) -> list:
    return np.asarray(multihost_utils.process_allgather(value)).tolist()


def plans(which: str) -> dict:
    """Parity of every plan with one device: process 0 compares, the others take part."""
    found = {}
    for text in PLANS[which]:
        config, plan = build(text)
        try:
            if jax.process_index():
                parity.spread(config, plan)
            else:
                parity.assert_same(config, plan)
            found[text] = "same"
        except Exception as error:
            traceback.print_exc()
            found[text] = f"{type(error).__name__}: {error}"
    return {"plans": found}


def arrow_of(words: list) -> tuple:
    """The plan of an arrow between two meshes, its dtype and shapes."""
    dtype, source, senders, target, receivers, *given = words
    devices, arrows, shapes = ordered_devices(), given[::2], given[1::2]
    pairs = {"a": (source, senders), "b": (target, receivers)}
    meshes = {name: make_mesh("!" + text, [devices[n] for n in of]) for name, (text, of) in pairs.items()}
    named = [arrow.replace(" ->", " @a ->") + " @b" for arrow in arrows]
    dtype = jax.numpy.dtype(dtype)
    return two_meshes(named, meshes, shapes, dtype.itemsize), dtype, shapes


def moved() -> dict:
    """Values that go from a mesh to another: whether the bits are the same, the bytes sent, refusals."""
    found, rng = {}, np.random.default_rng(0)
    for name, words in MOVES.items():
        plan, dtype, shapes = arrow_of(words)
        move = Mover(plan)
        numbers = [rng.integers(256, size=(*s[:-1], s[-1] * dtype.itemsize), dtype=np.uint8) for s in shapes]
        bits = [x.view(f"u{dtype.itemsize}") for x in numbers]
        values = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        if move.senders:
            put = zip([x.view(dtype) for x in bits], move.given, strict=True)
            values = [jax.make_array_from_callback(x.shape, to, x.__getitem__) for x, to in put]
        same = True
        for _ in "ab":
            shards = [x.addressable_shards for x in move(values)]
            for x, of in zip(bits, shards, strict=True):
                same &= all(np.array_equal(np.asarray(s.data).view(x.dtype), x[s.index]) for s in of)
            same &= len(shards[0]) == len(move.receivers)
        own = [sum(n for (i, _), n in plan.matrix.items() if i in move.senders), move.sent_bytes]
        found[name] = [gathered(np.int32(same)), gathered(np.array(own)), plan.bound]
    words, few = MOVES["to another process"], [*range(jax.local_device_count())]
    refused = {
        "idle": lambda: Mover(arrow_of(["int8", "tp=2", few[:2], "tp=2", few[-2:], "d/tp -> d", [8]])[0]),
        "another plan": lambda: Mover(arrow_of([*words[:-1], [8, 16 << jax.process_index()]])[0])._send(
            {}, dtype
        ),
    }
    for name, call in refused.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return {"moved": found}


def rows() -> dict:
    """The rows of a batch that this process made, under a plan that cuts them over all; who holds which."""
    text = DataConfig(seq_len=32, batch_size=16, limit_bytes=1 << 16)
    stream, made = Batches(read_corpus(text), text), []
    batch = stream.batch
    stream.batch = lambda step, rows: (made.extend(range(16)[rows]), batch(step, rows))[1]
    plan = Plan("dp=4 tp=2")
    step = Step(parity.LLAMA, plan, make_mesh(plan.mesh), optax.sgd(1e-3))
    placed = train._place(step, stream, 3)
    whole = {name: parity.whole(x) for name, x in placed.items()}
    same = all(np.array_equal(whole[name], x) for name, x in batch(3).items())
    each = np.array(sorted(made), np.int32)
    return {"same rows": same, "made": gathered(each), "shardings": shardings(placed)}


def handed() -> dict:
    """A model cut over all processes, layers and experts too, written in shards and read again."""
    found, hf.SHARD_BYTES = {}, 200_000
    for text in ("ep=2 fsdp=2 tp=2", "pp=2 ep=2 tp=2"):
        plan = Plan(text, microbatches=2) if "pp" in text else Plan(text)
        step = Step(parity.MOE, plan, make_mesh(plan.mesh), optax.sgd(1e-3))
        where = jax.tree.map(lambda x: x.sharding, step.abstract_in_model_order.params)
        params = parity.put(parity.weights(parity.MOE), where)
        folder = os.path.join(os.environ["HANDED"], text)
        hf.save(folder, params, parity.MOE)
        multihost_utils.sync_global_devices("written")
        again = hf.load(folder, parity.MOE, where)
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True)
        shards = [zip(a.addressable_shards, b.addressable_shards, strict=True) for a, b in pairs]
        same = all(np.array_equal(a.data, b.data) for shard in shards for a, b in shard)
        state = step.to_model_order(step.init(params=again))
        mine = checksums(state._replace(optimizer=None, step=None))
        same &= mine == checksums(State(params, None, None))
        found[text] = [gathered(np.int32(same)), len(glob.glob(folder + "/*.safetensors"))]
    return {"handed on": found}


def listens() -> dict:
    """Everything that this process and its children listen on, after a collective has met."""
    multihost_utils.sync_global_devices("here")
    files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    mine = {os.readlink(file) for file in files if os.path.exists(file)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.append(fields[1].split(":")[0])
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    beyond = np.int32(len(set(found) - loopback))
    return {"sockets": gathered(np.int32(len(found))), "beyond loopback": gathered(beyond)}


def stopped() -> dict:
    """Process 1 is asked to stop: all learn it at the same step."""
    for step in range(1, 400):
        if jax.process_index() == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        if joined.asked_to_stop(step):
            break
        time.sleep(0.05)
    return {"steps": gathered(np.int32(step))}


def doctor() -> dict:
    """What `llmpar doctor` says where several processes run it."""
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())) as words:
        assert main(["doctor"]) == 0
    words.seek(0)
    return {"doctor": words.read()}


def sleeps() -> dict:
    """Wait to be killed, as a process does that takes a long step."""
    multihost_utils.sync_global_devices("ready")
    with joined.Watchdog(0) as watchdog:
        watchdog.feed()
        while len(beats := dict(joined._client().key_value_dir_get(joined._BEATS))) < 2 or (
            joined._QUIET in beats.values()
        ):
            time.sleep(0.2)
        print("ready", file=sys.stderr, flush=True)
        time.sleep(600)
    return {}


def smaller() -> dict:
    """A mesh that leaves a process without devices."""
    try:
        make_mesh("dp=2")
    except ValueError as error:
        return {"refusal": str(error)}
    return {}


if __name__ == "__main__":
    document = {}
    for words in sys.argv[1].split("+"):
        job, _, which = words.partition(":")
        document |= globals()[job](*filter(None, [which]))
    if jax.process_index() == 0:
        print(json.dumps(document), flush=True)
