"""Time one training step under several plans, interleaved in one process: `make bench` prints a table and writes JSON.

The model is `small`: 8.92M parameters, 8 layers, width 256, vocabulary 4,096; batch 16 × 256 tokens, AdamW. Plain JAX, written
for one device without this package, runs in the same rounds. CPU seconds of the whole process repeat better than wall
seconds on a busy machine; ratios are taken round by round, and their median is what counts. On an accelerator the step
is that of 124M parameters in bfloat16, and its MFU is printed.

    python tests/bench.py [--rounds 5] [--out bench/step.json] [--only one,dp8]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from llmpar import hardware, hlo, predict
from llmpar.config import preset
from llmpar.mesh import make_mesh, use_devices
from llmpar.plan import Plan
from llmpar.step import Step

devices = use_devices(8)

BATCH, SEQ = 16, 256
FAST = dict(unroll=0, attention_block=64)
PLANS = {
    "one": Plan("dp=1", zero=0, microbatches=8, **FAST),
    "dp8": Plan("dp=8", zero=0, **FAST),
    "fsdp8": Plan("fsdp=8", **FAST),
    "fsdp8 remat": Plan("fsdp=8", remat="block", attention_block=64, loss_chunks=4),
    "tp4 dp2": Plan("tp=4 dp=2", zero=0, microbatches=4, **FAST),
}


def batch_of(vocab: int, batch: int, seq: int) -> dict:
    """Random tokens, one document a row."""
    tokens = np.random.default_rng(0).integers(0, vocab, (batch, seq + 1)).astype(np.int32)
    positions = np.broadcast_to(np.arange(seq, dtype=np.int32), (batch, seq))
    ids = {"positions": np.array(positions), "segments": np.ones((batch, seq), np.int32)}
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], **ids}


def plain(config, batch):
    """The same model and optimizer in plain JAX on one device: scanned layers, full attention, full logits, one jit."""
    d, n, h, m, v = config.width, config.num_heads, config.head_width, config.ffn_width, config.vocab_size
    keys = iter(jax.random.split(jax.random.key(0), 16))
    w = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)
    num = config.num_layers
    blocks = dict(a=jnp.ones((num, d)), q=w(num, d, n, h), k=w(num, d, n, h), v=w(num, d, n, h), o=w(num, n, h, d))
    blocks |= dict(f=jnp.ones((num, d)), g=w(num, d, m), u=w(num, d, m), w=w(num, m, d))
    params = dict(embed=w(v, d), head=w(v, d), norm=jnp.ones(d), blocks=blocks)
    optimizer = optax.adamw(1e-3)
    angle = np.arange(SEQ)[:, None] * config.rope_theta ** (-np.arange(0, h, 2) / h)
    cos, sin = (jnp.asarray(f(angle), jnp.float32)[None, :, None] for f in (np.cos, np.sin))
    mask = np.tril(np.ones((SEQ, SEQ), bool))[None, None]

    def norm(x, scale):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * scale

    def rotate(x):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def loss(params):
        def block(x, p):
            y = norm(x, p["a"])
            q, k, v = (jnp.einsum("bsd,dnh->bsnh", y, p[name]) for name in "qkv")
            scores = jnp.einsum("bsnh,btnh->bnst", rotate(q), rotate(k)) * h**-0.5
            y = jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(jnp.where(mask, scores, -1e30)), v)
            x = x + jnp.einsum("bsnh,nhd->bsd", y, p["o"])
            y = norm(x, p["f"])
            return x + (jax.nn.silu(y @ p["g"]) * (y @ p["u"])) @ p["w"], None

        x, _ = jax.lax.scan(block, params["embed"][batch["tokens"]], params["blocks"])
        logits = norm(x, params["norm"]) @ params["head"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    @jax.jit
    def step(state):
        params, opt = state
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    state = params, optimizer.init(params)
    return step, state


def programs(config, only):
    """Name to (function that does one step and waits, facts about its compiled program)."""
    batch = batch_of(config.vocab_size, BATCH, SEQ)
    if not only or "plain jax" in only:
        step, state = plain(config, jax.device_put(batch))
        memory = hlo.compiled_memory(step.lower(state).compile())
        yield "plain jax", _stepper(step, state), {"temp_mib": memory["temp_bytes"] / 2**20}
    for name, plan in PLANS.items():
        if (only and name not in only) or plan.mesh.size > len(devices):
            continue
        plan.check(config, BATCH, SEQ)
        step = Step(config, plan, make_mesh(plan.mesh), optax.adamw(1e-3), clip=None)
        compiled = step.lower(BATCH, SEQ).compile()
        memory, placed = hlo.compiled_memory(compiled), jax.device_put(batch, step.batch_sharding)
        census = hlo.census_hlo(hlo.partitioned_hlo(step.lower(BATCH, SEQ)), step.mesh)
        facts = {
            "temp_mib": memory["temp_bytes"] / 2**20,
            "argument_mib": memory["argument_bytes"] / 2**20,
            "sent_mib": sum(c.bytes_sent for c in census) / 2**20,
            "results_mib": sum(_result_bytes(c) for c in census) / 2**20,
        }
        yield name, _stepper(lambda state, c=compiled, p=placed: _loss_last(c(state, p)), step.init(0)), facts


def _result_bytes(c: hlo.Collective) -> float:
    """The size of a collective's results, as tables of other projects count it, from the bytes that a ring sends."""
    factor = {"all-reduce": 2.0, "reduce-scatter": float(c.group_size)}.get(c.kind, 1.0)
    return c.bytes_sent * c.group_size / (c.group_size - 1) / factor


def _loss_last(result):
    state, metrics = result
    return state, metrics["loss"]


def _stepper(step, state):
    held = [state]

    def run() -> float:
        held[0], loss = step(held[0])
        return float(loss)

    return run


def simulated(rounds: int, only: list[str]) -> dict:
    """The table of plans on simulated devices."""
    config = preset("small")
    made = {name: (run, facts) for name, run, facts in programs(config, only)}
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
        row = {"cpu_s": statistics.median(c for c, _ in times[name]), "wall_s": statistics.median(w for _, w in times[name])}
        for base in ("plain jax", "one"):
            if base in times:
                pairs = zip(times[name], times[base], strict=True)
                row[f"cpu_over_{base.replace(' ', '_')}"] = statistics.median(a[0] / b[0] for a, b in pairs)
        rows[name] = row | facts
    return {"model": config.name, "params": config.num_params, "batch": BATCH, "seq": SEQ, "rounds": rounds, "rows": rows}


def accelerated(rounds: int) -> dict:
    """124M parameters in bfloat16 on the accelerators that are here: seconds per step and MFU."""
    config, batch, seq, n = preset("gpt2-scale"), 16 * len(devices), 1024, len(devices)
    chip, rows = hardware.guess(devices[0].device_kind), {}
    for name, plan in {
        "fsdp": Plan(f"fsdp={n}", dtype="bfloat16", loss_chunks=4, attention_block=512),
        "fsdp unrolled": Plan(f"fsdp={n}", dtype="bfloat16", loss_chunks=4, attention_block=1024, unroll=0),
        "fsdp, blocks recomputed": Plan(f"fsdp={n}", dtype="bfloat16", remat="block", loss_chunks=4, attention_block=512),
    }.items():
        step = Step(config, plan, make_mesh(plan.mesh), optax.adamw(1e-3))
        state, placed = step.init(0), jax.device_put(batch_of(config.vocab_size, batch, seq), step.batch_sharding)
        run = _stepper(lambda state, s=step, p=placed: _loss_last(s.run(state, p)), state)
        first = [run() for _ in range(3)]
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            last = run()
            seconds.append(time.perf_counter() - start)
        step_s = statistics.median(seconds)
        work = sum(predict.flops(config, batch, seq).values())
        peak = chip.flops_per_s * n if chip else 0.0
        rows[name] = {
            "step_s": step_s, "tokens_per_s": batch * seq / step_s, "mfu": work / step_s / peak if peak else None,
            "first_loss": first[0], "last_loss": last,
            "peak_gib": (devices[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30,
        }  # fmt: skip
    about = {"model": config.name, "params": config.num_params, "batch": batch, "seq": seq}
    return about | {"device": devices[0].device_kind, "rows": rows}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="bench/step.json")
    parser.add_argument("--only", default="", help="names of programs, separated by commas")
    args = parser.parse_args()
    only = [name for name in args.only.split(",") if name]
    document = simulated(args.rounds, only) if devices[0].platform == "cpu" else accelerated(max(args.rounds, 10))
    path = pathlib.Path(args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1))
    for name, row in document["rows"].items():
        print(f"{name:<26}" + "  ".join(f"{k} {v:.3g}" for k, v in row.items() if v is not None))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
