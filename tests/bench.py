"""Time one training step under several plans, interleaved in one process: `make bench` prints a table and
writes JSON.

The model is `small`: 8.92M parameters, 8 layers, width 256, vocabulary 4,096; batch 16 × 256 tokens (32 × 256
at 16 microbatches, "m16"; as many active parameters, 2 of 8 experts of half the width, "moe"), AdamW. Plain
JAX, written for one device without this package, runs in the same rounds. CPU seconds of the whole process
repeat better than wall seconds on a busy machine; ratios are taken round by round, and their median is what
counts. What an accelerator reaches, `make device-test` measures (device.py).

With experts the dense step of as many active products is "one". An expert's rows should be many: one device
takes two microbatches, where it takes eight without experts. AdamW updates 23M weights instead of 9M.

`attention` times attention alone, forward and backward, causal, float32: 8,192 positions, 8 heads × 64, over
8 devices: the ring here (zigzag), `jax.nn.dot_product_attention` on one device, and the ring of the
`ringattention` package (Liu et al. 2023) if it can be imported. That package is no dependency: `pip install
--no-deps --target FOLDER ringattention einops`, and `--peer FOLDER`. `long` runs 65,536 positions (2 heads ×
64) of one block of a Llama through a training step's gradients, and tells the peak of resident memory.

    python tests/bench.py [step | attention | long] [--rounds 5] [--out bench/step.json] [--only one,dp8]
    [--peer FOLDER]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import pathlib
import resource
import statistics
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
from jax.sharding import PartitionSpec as P

from llmpar import attention, sequence_order
from llmpar.config import ExpertConfig, preset
from llmpar.inspect.census import census_hlo, compiled_memory, executed_flops, partitioned_hlo
from llmpar.mesh import make_mesh, use_devices
from llmpar.plan import Plan
from llmpar.predict import memory
from llmpar.step import Step
from llmpar.timetable import branch_shares

devices = use_devices(8)

BATCH, SEQ = 16, 256
FAST = dict(unroll=0, attention_block=64)  # a stage of one layer has no loop to unroll
PLANS = {
    "one": Plan("dp=1", zero=0, microbatches=8, **FAST),
    "dp8": Plan("dp=8", zero=0, **FAST),
    "fsdp8": Plan("fsdp=8", **FAST),
    "fsdp8 remat": Plan("fsdp=8", remat="block", attention_block=64, loss_chunks=4),
    "tp4 dp2": Plan("tp=4 dp=2", zero=0, microbatches=4, **FAST),
    "sp4 dp2": Plan("sp=4 dp=2", zero=0, microbatches=4, unroll=0),
    "pp4 dp2": Plan("pp=4 dp=2", zero=0, microbatches=8, attention_block=64),
    "pp4 dp2 saved": Plan("pp=4 dp=2", zero=0, microbatches=8, stage_saves="residuals", attention_block=64),
    "one m16": Plan("dp=1", zero=0, microbatches=16, **FAST),
    "pp4 dp2 m16": Plan("pp=4 dp=2", zero=0, microbatches=16, attention_block=64),
    "pp4 dp2 m16 saved": Plan(
        "pp=4 dp=2", zero=0, microbatches=16, stage_saves="residuals", attention_block=64
    ),
    "one moe": Plan("dp=1", zero=0, microbatches=2, loss_chunks=4, **FAST),
    "ep4 dp2 moe": Plan("ep=4 dp=2", zero=0, loss_chunks=4, **FAST),
}


def alike(name: str) -> str:
    """Names alike have the rows of a batch ("m16") and the model ("moe") in common: they make a ratio."""
    return next((kind for kind in ("m16", "moe") if kind in name), "")


def batch_of(vocab: int, batch: int, seq: int) -> dict:
    """Random tokens, one document a row."""
    tokens = np.random.default_rng(0).integers(0, vocab, (batch, seq + 1)).astype(np.int32)
    positions = np.broadcast_to(np.arange(seq, dtype=np.int32), (batch, seq))
    ids = {"positions": np.array(positions), "segments": np.ones((batch, seq), np.int32)}
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], **ids}


def plain(config, batch):
    """The same model and optimizer in plain JAX on one device: the tests' oracle in float32, in one jit."""
    draw = np.random.default_rng(0)
    params = {
        path: jnp.ones(w.shape) if w.is_vector else jnp.float32(0.02 * draw.standard_normal(w.shape))
        for path, w in config.weights().items()
    }
    optimizer = optax.adamw(1e-3)
    loss = lambda params: oracle.loss(params, batch, config, None)[0]

    @jax.jit
    def step(state):
        params, opt = state
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    return step, (params, optimizer.init(params))


def programs(config, only):
    """Name to (function that does one step and waits, facts about its compiled program)."""
    batch = batch_of(config.vocab_size, BATCH, SEQ)
    if not only or "plain jax" in only:
        step, state = plain(config, jax.device_put(batch))
        held = compiled_memory(step.lower(state).compile())
        yield "plain jax", _stepper(step, state), {"temp_mib": held["temp_bytes"] / 2**20}
    for name, plan in PLANS.items():
        if (only and name not in only) or plan.mesh.size > len(devices):
            continue
        rows = max(BATCH, 2 * plan.microbatches)  # a row is the least that dp=2 can have of a microbatch
        experts = (
            dict(experts=ExpertConfig(8, 2), ffn_width=config.ffn_width // 2) if alike(name) == "moe" else {}
        )
        model = dataclasses.replace(config, **experts)
        plan.check(model, rows, SEQ)
        step = Step(model, plan, make_mesh(plan.mesh), optax.adamw(1e-3), clip=None)
        compiled = step.lower(rows, SEQ).compile()
        placed = jax.device_put(batch_of(model.vocab_size, rows, SEQ), step.batch_sharding)
        held, text = compiled_memory(compiled), partitioned_hlo(step.lower(rows, SEQ))
        stages = branch_shares(plan.pipeline, model.num_layers)
        census = census_hlo(text, step.mesh, stages[0])
        facts = {
            "temp_mib": held["temp_bytes"] / 2**20,
            "argument_mib": held["argument_bytes"] / 2**20,
            "sent_mib": sum(c.bytes_sent for c in census) / 2**20,
        }
        if not model.experts:  # whose products depend on the routing
            executed = statistics.mean(executed_flops(compiled.as_text(), t) for t in stages) * plan.mesh.size
            facts["executed_over_useful"] = executed / sum(memory.flops(model, rows, SEQ).values())
        yield name, _stepper(lambda state, c=compiled, p=placed: _loss_last(c(state, p)), step.init(0)), facts


def _loss_last(result):
    state, metrics = result
    return state, metrics["loss"]


def _stepper(step, state):
    held = [state]

    def run() -> float:
        held[0], loss = step(held[0])
        return float(loss)

    return run


def interleaved(made: dict, rounds: int, bases: tuple[str, ...]) -> dict:
    """Run each program once to warm up, then all in turn. Medians of seconds, and of ratios to the bases."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for run, _ in made.values():
        run()
    for _ in range(rounds):
        for name, (run, _) in made.items():
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    rows = {}
    for name, (_, facts) in made.items():
        row = {
            "cpu_s": statistics.median(c for c, _ in times[name]),
            "wall_s": statistics.median(w for _, w in times[name]),
        }
        for base in bases:
            if base in times and (alike(name) == alike(base) or (name, base) == ("one moe", "one")):
                pairs = zip(times[name], times[base], strict=True)
                row[f"cpu_over_{base.replace(' ', '_')}"] = statistics.median(a[0] / b[0] for a, b in pairs)
        rows[name] = row | facts
    return rows


def simulated(rounds: int, only: list[str]) -> dict:
    """The table of plans on simulated devices."""
    config = preset("small")
    made = {name: (run, facts) for name, run, facts in programs(config, only)}
    rows = interleaved(made, rounds, ("plain jax", "one", "one m16", "one moe"))
    return {
        "model": config.name,
        "params": config.num_params,
        "batch": BATCH,
        "seq": SEQ,
        "rounds": rounds,
        "rows": rows,
    }


def peer_ring():
    """The `ringattention` package's ring, without its chunks of feed-forward, or None and a sentence if it is
    not here.

    Under JAX 0.10 it wants `jax.lib.xla_bridge.get_backend` back, and shard_map's varying-axes check off.
    """
    if not hasattr(jax.lib, "xla_bridge"):
        jax.lib.xla_bridge = types.SimpleNamespace(get_backend=lambda: jax.devices()[0].client)
    try:
        ring = importlib.import_module("ringattention").ringattention_jax
    except ImportError as error:
        print(f"the ringattention package is left out: {error}; see --peer")
        return None
    chunks = dict(
        causal_block_size=1,
        deterministic=True,
        dropout_rng=None,
        attn_pdrop=0.0,
        query_chunk_size=512,
        key_chunk_size=512,
        dtype=jnp.float32,
        policy=jax.checkpoint_policies.nothing_saveable,
        precision=None,
        prevent_cse=False,
    )
    return lambda q, k, v, _: ring(q, k, v, None, None, None, "sp", True, chunks)


def attentions(n: int = 8, s: int = 8192, heads: int = 8, width: int = 64):
    """Name to (function that runs output and gradients and waits, facts); values are compared."""
    mesh, cut = make_mesh(f"sp={n}"), P(None, "sp")
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, s, heads, width)).astype(np.float32) for _ in range(4)]

    def ours(q, k, v, at):
        return attention.ring(q[..., None, :], k, v, axis="sp", q_positions_bs=at, k_positions_bt=at)[0][
            ..., 0, :
        ]

    def one(q, k, v, _):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    def over(f, check):
        return jax.shard_map(f, mesh=mesh, in_specs=(cut,) * 4, out_specs=cut, check_vma=check)

    kinds = {"dot_product_attention": (one, "contiguous"), "ring, zigzag": (over(ours, True), "zigzag")}
    if peer := peer_ring():
        kinds["ringattention package"] = over(peer, False), "contiguous"
    made, want = {}, None
    for name, (f, order) in kinds.items():
        places = np.array(sequence_order.sequence_permutation(order, s, n))
        given = [x[:, places] for x in arrays] + [places[None].astype(np.int32)]
        given = jax.device_put(given, None if f is one else jax.NamedSharding(mesh, cut))

        def both(q, k, v, grad, at, f=f):
            out, pull = jax.vjp(lambda q, k, v: f(q, k, v, at), q, k, v)
            return out, *pull(grad)

        lowered = jax.jit(both).lower(*given)
        compiled = lowered.compile()
        found = [np.asarray(x)[:, np.argsort(places)] for x in compiled(*given)]
        want = want or found
        error = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, want, strict=True))
        text = partitioned_hlo(lowered)
        sent = sum(c.bytes_sent for c in census_hlo(text, mesh)) if f is not one else 0
        facts = {
            "temp_mib": compiled_memory(compiled)["temp_bytes"] / 2**20,
            "sent_mib": sent / 2**20,
            "error": error,
        }
        made[name] = (lambda c=compiled, g=given: jax.block_until_ready(c(*g))), facts
    return made


def long_block(s: int = 65_536) -> dict:
    """Gradients of one block over s positions on 8 devices: seconds, temporaries, peak resident memory."""
    config = dataclasses.replace(
        preset("tiny"), num_layers=1, width=128, num_heads=2, num_kv_heads=2, head_width=64, ffn_width=384
    )
    plan = Plan(f"sp={len(devices)}", loss_chunks=16, attention_block=512)
    plan.check(config, 1, s)
    step = Step(config, plan, make_mesh(plan.mesh), optax.sgd(1e-3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    compiled = step.lower(1, s).compile()
    places = np.array(sequence_order.sequence_permutation(plan.sequence_order, s, len(devices)))
    batch = {name: x[:, places] for name, x in batch_of(config.vocab_size, 1, s).items()}
    state, batch = step.init(0), jax.device_put(batch, step.batch_sharding)
    cpu, wall = time.process_time(), time.perf_counter()
    _, metrics = compiled(state, batch)
    row = {
        "loss": float(metrics["loss"]),
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
    }
    row |= {"temp_mib": compiled_memory(compiled)["temp_bytes"] / 2**20, "before_gib": before / 2**20}
    row["peak_rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seq": s, "rows": {f"one block, {s:,} positions": row}}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", default="step", choices=("step", "attention", "long"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=None, help="default: bench/WHAT.json")
    parser.add_argument("--only", default="", help="names of programs, separated by commas")
    parser.add_argument("--peer", default=None, help="folder with the ringattention package")
    args = parser.parse_args()
    only = [name for name in args.only.split(",") if name]
    if args.peer:
        sys.path.append(args.peer)
    if args.what == "attention":
        rows = interleaved(attentions(), args.rounds, ("dot_product_attention", "ringattention package"))
        document = {"positions": 8192, "devices": 8, "rounds": args.rounds, "rows": rows}
    elif args.what == "long":
        document = long_block()
    else:
        document = simulated(args.rounds, only)
    path = pathlib.Path(args.out or f"bench/{args.what}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1))
    for name, row in document["rows"].items():
        print(f"{name:<26}" + "  ".join(f"{k} {v:.3g}" for k, v in row.items() if v is not None))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
