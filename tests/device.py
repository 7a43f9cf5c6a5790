"""What one accelerator says of this package: right or wrong, how fast, how much memory. `make device-test`.

It writes `device.md` beside this file, and the shares of peak that estimates take (`inspect/reached.json`).
``--small --out FOLDER`` computes little of everything, also on simulated devices. A part that fails is a row.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import glob
import gzip
import json
import pathlib
import statistics
import sys
import tempfile
import time
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from bench import batch_of

from llmpar.inspect import roofline
from llmpar.inspect.census import compiled_memory
from llmpar.kernels import flash, flash_tpu, grouped
from llmpar.kernels.tiles import kernel_tiles
from llmpar.model import attention
from llmpar.parallel.mesh import make_mesh, platform_of, use_devices
from llmpar.plan.backend import able, fits_cudnn
from llmpar.plan.model_config import ExpertConfig
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.plan.sequence_order import CAUSAL, Mask
from llmpar.predict import hardware, memory, ring
from llmpar.training.step import Step
from llmpar.training.trackers import profiling

SIZES = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
LARGE, SMALL = SIZES["large"], SIZES["small"]
ROUNDED = {"float32": 2e-5, "bfloat16": 2e-2}
"""Of the largest number: float32 with other orders of sums; weights that bfloat16 rounds to 8 bits."""


class Test:
    """Rows of results, and the device that they are about."""

    def __init__(self, size: dict):
        self.size, self.rows, self.shares = size, list[tuple](), dict[str, float]()
        self.device = jax.devices()[0]
        self.chip = hardware.guess(self.device.device_kind)
        self.named = platform_of(make_mesh("fsdp=1", devices=[self.device]))
        self.platform = self.named.partition(" ")[0]
        self.kernel = "flash" in able("attention_kernel", self.named)

    def row(self, part: str, what: str, value: float, unit: str, most: float | None = None) -> None:
        """Keep a result; one above ``most``, or not a number, is a failure."""
        right = None if most is None else bool(value <= most)
        self.rows.append((part, what, value, unit, most, right))
        word = {None: "", True: "ok", False: "WRONG"}[right]
        print(f"{part:<12}{what:<64}{value:>12.4g} {unit:<8}{word}", flush=True)

    def seconds(self, run, *given) -> float:
        """The median time of a call, of four that are started one behind the other."""
        run, taken = jax.jit(run), []
        jax.block_until_ready(run(*given))
        for _ in range(self.size["rounds"]):
            begin = time.perf_counter()
            jax.block_until_ready([run(*given) for _ in range(4)])
            taken.append((time.perf_counter() - begin) / 4)
        return statistics.median(taken)

    def rate(self, what: str, flops: float, run, *given, name: str = "") -> None:
        """Time and TFLOP/s of a call, and its share of peak under a name that the roofline has."""
        reached = flops / (taken := self.seconds(run, *given))
        self.row("speed", what, 1e3 * taken, "ms")
        self.row("speed", what, reached / 1e12, "TFLOP/s")
        if self.chip:
            share = reached / self.chip.per_device().flops_per_s
            self.row("speed", f"{what}, of peak", 100 * share, "%")
            self.shares |= {name: round(share, 3)} if name else {}

    def attends(self) -> None:
        """Output and gradients of the kernel against the whole score matrix in float32."""
        s, draw = self.size["positions"], np.random.default_rng(0)
        cases = {"causal": (CAUSAL, 1, 1), "documents": (CAUSAL, 3, 1), "window": (Mask(s // 3), 1, 1)}
        cases |= {"two hops": (CAUSAL, 1, 2), "two hops, documents, window": (Mask(s // 3), 3, 2)}
        launch = {"tpu": flash_tpu.run_on_tpu, "cpu": flash.run_on_cpu}.get(self.platform, flash.run_on_gpu)
        for h in self.size["heads"]:
            arrays = [draw.standard_normal((2, s, 2, *more, h)) for more in ((2,), (), (), (2,))]
            for dtype in ROUNDED:
                q, k, v, grad = (jnp.asarray(x, dtype) for x in arrays)
                chosen = list(cases)[:: 1 if dtype == "bfloat16" else 4][-self.size["cases"] :]
                for name, (mask, documents, hops) in ((name, cases[name]) for name in chosen):
                    of = np.sort(draw.integers(0, documents, (2, s)), 1).astype(np.int32)
                    at = np.tile(np.arange(s, dtype=np.int32), (2, 1))
                    settings = dict(mask=mask, scale=h**-0.5, platform=self.platform, launch=launch)
                    run = jax.jit(functools.partial(by_hand, settings, hops))
                    whole, wide = jax.jit(functools.partial(_whole, mask)), (q, k, v, grad)
                    with jax.default_matmul_precision("highest"):
                        out, _, *grads = run(q, k, v, grad, jnp.stack([at, of], 1))
                        want = whole(*(x.astype("float32") for x in wide), at, of)
                    self.row(
                        "attention", f"{h}, {dtype}, {name}", _apart((out, *grads), want), "", ROUNDED[dtype]
                    )

    def multiplies(self) -> None:
        """Products of groups of rows against NumPy in float64."""
        rows, num, a, b = self.size["grouped"]
        draw = np.random.default_rng(0)
        for dtype in ROUNDED:
            shapes = (rows, a), (rows, b), (num, a, b)
            given, grads, w = (jnp.asarray(draw.standard_normal(x), dtype) for x in shapes)
            with jax.default_matmul_precision("highest"):
                got = [grouped.dot((given, w)), grouped.dot((grads, w), transposed=True)]
                got.append(grouped.outer(given, grads, num))
            x, y = (np.asarray(z, np.float64).reshape(num, rows // num, -1) for z in (given, grads))
            z = np.asarray(w, np.float64)
            want = [(x @ z).reshape(rows, b), (y @ z.swapaxes(1, 2)).reshape(rows, a), x.swapaxes(1, 2) @ y]
            self.row("groups", f"{num} of {rows // num} rows, {dtype}", _apart(got, want), "", ROUNDED[dtype])

    def trains(self) -> None:
        """Losses of three steps on all devices in float32, against those of one CPU."""
        n = len(jax.devices())
        for model, (layers, rows, s) in self.size["parity"].items():
            config, losses = _model(model, layers), []
            for devices in (jax.devices(), jax.devices("cpu")[:1]):
                plan = Plan(f"fsdp={len(devices)}", loss_chunks=2)
                with jax.default_matmul_precision("highest"):
                    step = Step(config, plan, make_mesh(plan.mesh, devices), optax.adamw(1e-3))
                    if devices[0] is self.device and not self.fits(f"{model}, loss", step, rows * n, s):
                        break
                    state, batch = step.init(0), _batch(config, rows * n, s, step)
                    losses.append(found := [])
                    for _ in range(3):
                        state, metrics = step.run(state, batch)
                        found.append(float(metrics["loss"]))
                    del state
            if losses:
                self.row("loss", f"{model}, three steps, against a CPU", _apart(*losses), "", 1e-4)

    def seen(self, h: int, s: int) -> float:
        """The share of the pairs of positions that our kernel computes, with the tiles of this device."""
        tiles = kernel_tiles("flash_forward", h, 2, s, s, self.platform, self.device.device_kind)
        return ring.seen_share(tiles, s)

    def multiplies_fast(self) -> None:
        """What products, attention and experts reach of peak."""
        n, draw = self.size["product"], np.random.default_rng(0)
        array = lambda *shape: jnp.asarray(draw.standard_normal(shape, np.float32), jnp.bfloat16)
        self.rate(f"a product of {n}", 2 * n**3, jnp.matmul, array(n, n), array(n, n), name="products")
        for shape in self.size["attention"]:
            self.attends_fast(array, *shape)
        rows, d, m, num = self.size["experts"]
        x, w = array(rows, d), (array(num, d, m), array(num, d, m), array(num, m, d))
        even = np.arange(rows) % num

        def experts(expert_rk, x, *w):
            blocks, share_rk = grouped.arrange(ExpertConfig(num, 1), rows, 1), jnp.ones((rows, 1))
            return grouped.feed_forward(blocks, x, share_rk, w, grouped.lay_out(blocks, expert_rk, num))

        back = lambda expert_rk, g, *given: jax.vjp(functools.partial(experts, expert_rk), *given)[1](g)
        twice = np.where(np.arange(rows) < rows // num, 0, even)
        for what, expert in (("as many rows each", even), ("one with twice its share", twice)):
            chosen = jnp.asarray(expert, jnp.int32)[:, None]
            self.rate(f"{num} experts, {what}", 18.0 * rows * d * m, back, chosen, x, x, *w)

    def attends_fast(self, array, b: int, s: int, k: int, r: int, h: int) -> None:
        """What our kernel and cuDNN's reach; the first shape stands for all."""
        q, kv, at = array(b, s, k, r, h), array(b, s, k, h), jnp.tile(jnp.arange(s), (b, 1))
        ids, given, what = attention.Ids(at, 0, at, 0), (q, kv, kv, q), f"{s}, heads of {h}"
        both = lambda attend: lambda q, k, v, g: jax.vjp(lambda *x: attend(*x, ids)[0], q, k, v)[1](g)
        is_first = [b, s, k, r, h] == self.size["attention"][0]
        if self.kernel:
            ours = functools.partial(attention.flash_attention, platform=self.platform)
            seen = self.seen(h, s)
            flops = sum(ring.kernel_flops(name, [q.shape, kv.shape], seen) for name in ring.PRODUCTS)
            self.rate(f"our attention, {what}", flops, both(ours), *given, name="attention" * is_first)
        if "cudnn" in able("attention_kernel", self.named) and fits_cudnn(h, self.named):
            theirs = functools.partial(attention.by_kernel, kernel="cudnn", in_order=True, whole=True)
            flops = 7 * 2.0 * b * s * s * k * r * h / 2
            self.rate(f"cuDNN's attention, {what}", flops, both(theirs), *given, name="cudnn" * is_first)

    def fits(self, what: str, step: Step, rows: int, s: int) -> dict[str, int]:
        """Bytes that a step is predicted to hold by kind; nothing, and a row, if it is too large."""
        found = {"argument": sum(memory.argument_bytes(step.plan, rows, s).values())}
        found["temp"] = memory.temp_bytes(step.plan, rows, s)
        need, room = sum(found.values()), (self.device.memory_stats() or {}).get("bytes_limit", 1 << 40)
        if need <= room:
            return found
        self.row("left out", f"{what}: needs {need / 2**30:.1f} GiB, and there are", room / 2**30, "GiB")
        return {}

    def steps(self) -> None:
        """Steps in bfloat16: MFU beside the estimate, memory beside the prediction, and a trace."""
        for model, (layers, rows, s) in self.size["steps"].items():
            config, n = _model(model, layers), len(jax.devices())
            plan = Plan(f"fsdp={n}", dtype="bfloat16", remat="selective", loss_chunks=8)
            step = Step(config, plan, make_mesh(plan.mesh), optax.adamw(1e-3))
            what = f"{model}, {layers or 'all'} layers, {rows} x {s}"
            if not (predicted := self.fits(what, step, rows * n, s)):
                continue
            compiled = step.lower(rows * n, s).compile()
            held, text = compiled_memory(compiled), compiled.as_text() or ""
            for (kind, guess), most in zip(predicted.items(), (1.001, None), strict=True):
                over = held[f"{kind}_bytes"] / guess
                self.row("memory", f"{what}: {kind}s over prediction", over, "x", most)
            state, batch = step.init(0), _batch(config, rows * n, s, step)
            taken = []
            for _ in range(2 + self.size["rounds"]):
                begin = time.perf_counter()
                state, metrics = compiled(state, batch)
                metrics["loss"].block_until_ready()
                taken.append(time.perf_counter() - begin)
            step_s, chip = statistics.median(taken[2:]), self.chip
            self.row("steps", what, 1e3 * step_s, "ms")
            peak = (self.device.memory_stats() or {}).get("peak_bytes_in_use")
            if peak:
                self.row("memory", f"{what}: peak of all so far", peak / 2**30, "GiB")
            if chip and not chip.simulated:
                useful = sum(memory.flops(config, rows * n, s).values()) / n / chip.per_device().flops_per_s
                guess = roofline.roofline(text, step.mesh, chip, seen=self.seen(config.head_width, s)).step_s
                self.row("steps", f"{what}: MFU", 100 * useful / step_s, "%")
                self.row("steps", f"{what}: MFU, estimated", 100 * useful / guess, "%")
            with tempfile.TemporaryDirectory() as folder:
                with profiling(folder, text, lambda _: None):
                    state, metrics = compiled(state, batch)
                    metrics["loss"].block_until_ready()
                (path,) = glob.glob(f"{folder}/plugins/profile/*/*.trace.json.gz")
                with gzip.open(path, "rt") as file:
                    names = [str(event.get("name")) for event in json.load(file)["traceEvents"]]
            arrows = sum(name.startswith("arrow[") for name in names)
            alone = "; one device sends nothing" if n == 1 else ""
            self.row("trace", f"{what}: events named by an arrow, of {len(names)}{alone}", arrows, "")
            if n > 1:
                self.row("trace", f"{what}: is there no event with an arrow?", float(arrows == 0), "", 0)
            del state


def by_hand(settings, hops, q, k, v, grad, ids):
    """Attention, its lse and gradients by the kernel, the keys in so many parts, as a ring meets them."""
    cut = [slice(len(k[0]) * i // hops, len(k[0]) * (i + 1) // hops) for i in range(hops)]
    parts = [(k[:, at], v[:, at], ids[:, :, at]) for at in cut]
    none = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], -jnp.inf)
    done, dq, more = (none, jnp.zeros(q.shape, jnp.float32), []) if hops > 1 else (None, None, [])
    for k_part, v_part, k_ids in parts:
        done = flash.kernel_forward(q, k_part, v_part, ids, k_ids, done, **settings)
    out, lse = done
    per_query = grad, lse, (grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    for k_part, v_part, k_ids in parts:
        dq, *dkv = flash.kernel_backward(q, k_part, v_part, ids, k_ids, per_query, dq, **settings)
        more.append(dkv)
    return out, lse, dq, *(jnp.concatenate(x, 1) for x in zip(*more, strict=True))


def _whole(mask, q, k, v, grad, at, of):
    """The same with the whole score matrix."""
    ids = attention.Ids(at, of, at, of)
    out, pull = jax.vjp(lambda *given: attention.full(*given, ids, mask=mask)[0], q, k, v)
    return out, *pull(grad)


def _apart(got, want) -> float:
    """The largest difference, over the largest number of what is wanted; not a number where one is none."""
    pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in zip(got, want, strict=True)]
    return float(np.max([np.abs(x - y).max() / np.abs(y).max() for x, y in pairs]))


def _model(name: str, layers: int):
    config = preset(name)
    return dataclasses.replace(config, num_layers=layers) if layers else config


def _batch(config, rows: int, s: int, step: Step) -> dict:
    return jax.device_put(batch_of(config.vocab_size, rows, s), step.batch_sharding)


def write(test: Test, folder: pathlib.Path, shares: pathlib.Path) -> None:
    """Write the rows as a table, and the shares of a known chip beside those of others."""
    about = f"{len(jax.devices())} x {test.device.device_kind}, jax {jax.__version__}"
    lines = ["# What an accelerator says", "", f"Made by `make device-test`: {about}.", ""]
    lines += ["| part | what | value | at most | verdict |", "|---|---|---|---|---|"]
    for part, what, value, unit, most, right in test.rows:
        limit, word = "" if most is None else f"{most:g}", {None: "", True: "ok", False: "**wrong**"}[right]
        lines.append(f"| {part} | {what} | {value:.4g} {unit} | {limit} | {word} |")
    (folder / "device.md").write_text("\n".join(lines) + "\n")
    if test.chip and test.shares:
        known = json.loads(shares.read_text()) if shares.exists() else {}
        shares.write_text(json.dumps(known | {test.chip.family: test.shares}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    little = "little of everything, also on simulated devices"
    parser.add_argument("--small", action="store_true", help=little)
    parser.add_argument("--out", type=pathlib.Path, default=None, help="a folder for both files")
    args = parser.parse_args()
    use_devices(2, at_least=1)
    if jax.default_backend() == "cpu" and not args.small:
        parser.error("JAX finds no accelerator here; --small computes little on simulated devices")
    if args.small and args.out is None:
        parser.error("--small is no measurement: give --out FOLDER, where its files do no harm")
    test = Test(SMALL if args.small else LARGE)
    folder = args.out or pathlib.Path(__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    shares = args.out / "reached.json" if args.out else roofline.MEASURED
    for part in (test.attends, test.multiplies, test.multiplies_fast, test.steps, test.trains):
        begin = time.perf_counter()
        try:
            part()
        except Exception as error:  # whatever a compiler or a driver says
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}".replace("|", "/")
            test.row(part.__name__, said, float("nan"), "", 0)
        test.row("time", part.__name__, time.perf_counter() - begin, "s")
        write(test, folder, shares)
    wrong = [row for row in test.rows if row[-1] is False]
    judged = sum(row[-1] is not None for row in test.rows)
    print(f"{len(wrong)} wrong of {judged}; wrote {folder / 'device.md'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
