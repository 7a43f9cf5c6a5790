"""What this machine reaches: products by shape, memory, attention, and collectives by kind and size, timed on
its devices and fitted to the constants of `predict.rates`.

Each time is of a program that repeats its work, the least of several rounds. A product takes FLOPs at a share
of peak, more where its result is small, its operands' bytes, and a start; a collective takes a start (alpha)
and its bytes at a rate (1/beta). The same laws price plans (`predict.time`), so that what is measured here
can replace a data sheet.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from llmpar.predict import hardware
from llmpar.predict.hardware import Chip
from llmpar.predict.rates import Rates
from llmpar.predict.time import on_links

ROUNDS = 5


@dataclass(frozen=True)
class Sizes:
    """What is timed: shapes of products, bytes of an array that is copied, tokens of attention, bytes of a
    collective's buffer on each device; and the least seconds of a round."""

    products: tuple[tuple[int, int, int], ...]
    memory_bytes: int
    tokens: int
    buffers: tuple[int, ...]
    least_s: float


SIZES = {
    "quick": Sizes(((16, 16, 16), (64, 64, 64), (128, 256, 128), (256, 256, 256)), 1 << 22, 128,
                   (1 << 10, 1 << 14, 1 << 18), 0.002),
    "cpu": Sizes(((16, 16, 16), (128, 128, 128), (256, 1024, 256), (512, 512, 512), (1024, 1024, 1024),
                  (64, 1024, 2048)), 1 << 24, 512, (1 << 10, 1 << 14, 1 << 18, 1 << 21), 0.02),
    "accelerator": Sizes(((16, 16, 16), (256, 4096, 4096), (1024, 4096, 4096), (4096, 4096, 4096),
                          (8192, 8192, 8192), (16_384, 4096, 14_336), (8192, 1024, 8192), (4096, 8192, 1024)),
                         1 << 30, 8192, (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27), 0.05),
}  # fmt: skip


@dataclass
class Timed:
    """One measurement: what, its size in words, seconds, and what the fitted law says."""

    what: str
    size: str
    seconds: float
    law_s: float = 0.0


def seconds(run: Callable[[int], object], least_s: float) -> float:
    """Seconds of one turn of ``run(turns)``, a program that repeats its work: the least of several rounds of
    so many turns that a round takes ``least_s``. What else the machine does only adds."""

    def take(turns: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(run(turns))
        return time.perf_counter() - begin

    take(1)
    turns = 4  # the first one touches memory that nobody had
    while take(turns) < least_s and turns < 1 << 20:
        turns *= 2
    return min(take(turns) for _ in range(ROUNDS)) / turns


def repeat(work: Callable, x: jax.Array, turns) -> jax.Array:
    """``work(x)``, as often as asked: each turn's input has an element of the last one's output, so that none
    can be left out."""

    def turn(_, pair):
        x, y = pair
        corner = tuple(slice(0, 1) for _ in y.shape)
        x = lax.dynamic_update_slice(x, (0.5 * y[corner]).reshape((1,) * x.ndim), (0,) * x.ndim)
        return x, work(x)

    return lax.fori_loop(0, turns, turn, (x, work(x)))[1]


def time_products(device: jax.Device, sizes: Sizes, dtype) -> list[tuple[tuple[int, int, int], float]]:
    """Seconds of one product of each shape (rows, inner, out)."""
    found = []
    run = jax.jit(lambda x, w, turns: repeat(lambda x: x @ w, x, turns))
    for m, k, n in sizes.products:
        x, w = (jax.device_put(jnp.full(shape, 0.01, dtype), device) for shape in ((m, k), (k, n)))
        found.append(((m, k, n), seconds(functools.partial(run, x, w), sizes.least_s)))
    return found


def time_memory(device: jax.Device, sizes: Sizes, dtype) -> tuple[float, float]:
    """Bytes read and written by a sum of two arrays, and its seconds."""
    x = jax.device_put(jnp.ones(sizes.memory_bytes // np.dtype(dtype).itemsize, dtype), device)
    run = jax.jit(lambda x, z, turns: repeat(lambda x: x + z, x, turns))
    return 3.0 * x.nbytes, seconds(functools.partial(run, x, 2 * x), sizes.least_s)


def time_attention(device: jax.Device, sizes: Sizes, dtype) -> tuple[float, float] | None:
    """FLOPs of causal attention over the tokens, forward and backward, and its seconds: cuDNN's on GPUs,
    XLA's on CPUs. None where no fused attention is JAX's own: on TPUs, and without cuDNN."""
    if device.platform not in ("cpu", "gpu"):
        return None
    how: Any = "cudnn" if device.platform == "gpu" else "xla"
    heads, width = 8, 64 if sizes.tokens < 4096 else 128
    q = jax.device_put(jnp.ones((1, sizes.tokens, heads, width), dtype), device)

    def loss(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how).sum()

    def both_ways(q):
        return sum(jax.grad(loss, argnums=(0, 1, 2))(q, q, q))

    run = jax.jit(lambda q, turns: repeat(both_ways, q, turns))
    try:
        jax.block_until_ready(run(q, 0))
    except RuntimeError:
        return None
    flops = 3.5 * 0.5 * 4.0 * sizes.tokens**2 * heads * width
    return flops, seconds(functools.partial(run, q), sizes.least_s)


def time_collectives(devices: list[jax.Device], sizes: Sizes) -> list[tuple[str, int, int, float]]:
    """(kind, message bytes, group, seconds) of each kind, size and group, in the words of
    `predict.formulas`."""
    found = []
    for group in sorted({2, len(devices)} if len(devices) > 1 else set()):
        mesh = Mesh(np.array(devices[:group]), "x")
        cut = NamedSharding(mesh, P("x"))
        for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute"):
            work = functools.partial(repeat, functools.partial(_collective, kind, group))
            run = jax.jit(jax.shard_map(work, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")))
            for size in sizes.buffers:
                local = max(1, size // 4 // group) * group  # float32, divisible by the group
                x = jax.device_put(jnp.ones(local * group, jnp.float32), cut)
                message = 4 * local * (group if kind == "all-gather" else 1)
                found.append((kind, message, group, seconds(functools.partial(run, x), sizes.least_s)))
    return found


def _collective(kind: str, group: int, x: jax.Array) -> jax.Array:
    """One collective of a device's block over the axis x."""
    if kind == "all-reduce":
        return lax.pcast(lax.psum(x, "x"), "x", to="varying")
    if kind == "all-gather":
        return lax.all_gather(x, "x", tiled=True)
    if kind == "reduce-scatter":
        return lax.psum_scatter(x, "x", tiled=True)
    if kind == "all-to-all":
        return lax.all_to_all(x, "x", 0, 0, tiled=True)
    return lax.ppermute(x, "x", [(i, (i + 1) % group) for i in range(group)])


# ------------------------------------------------------------------------------------------------------ fits


def least_squares(columns: list[list[float]], seconds: list[float]) -> list[float]:
    """Positive factors of the columns whose sums have the least ratios to the seconds, above or below: least
    squares, each weighted by the geometric mean of its time and the sum before. A factor that would be
    negative is left out."""
    a, took = np.array(columns, float).T, np.array(seconds, float)
    factors, weights = np.zeros(a.shape[1]), 1 / took
    for _ in range(20):
        use = list(range(a.shape[1]))
        while use:
            some = np.linalg.lstsq(a[:, use] * weights[:, None], took * weights, rcond=None)[0]
            if (some > 0).all():
                break
            use.pop(int(np.argmin(some)))
        factors = np.zeros(a.shape[1])
        factors[use] = some if use else 0.0
        weights = 1 / np.sqrt(took * np.maximum(a @ factors, 0.01 * took))
    return [float(x) for x in factors]


def fit_products(
    timed: list[tuple[tuple[int, int, int], float]], bytes_per_s: float, itemsize: int
) -> tuple[float, float, float]:
    """(FLOP/s of large products, `Rates.half`, seconds of a start) from shapes and seconds. Operands that lie
    in a cache are read faster than the memory's rate says: they take half of the time at most."""
    moved = [itemsize * (m * k + k * n + m * n) / bytes_per_s for (m, k, n), _ in timed]
    flops = [2.0 * m * k * n for (m, k, n), _ in timed]
    results = [f / (m * n) for f, ((m, _, n), _) in zip(flops, timed, strict=True)]
    rest = [max(s - b, 0.5 * s) for (_, s), b in zip(timed, moved, strict=True)]
    per_flop, per_result, start = least_squares([flops, results, [1.0] * len(timed)], rest)
    best = max(f / s for f, s in zip(flops, rest, strict=True))
    rate = 1 / per_flop if per_flop else best
    return rate, max(1.0, per_result * rate), max(start, 1e-9)


def fit_links(chip: Chip, timed: list[tuple[str, int, int, float]]) -> tuple[float, float]:
    """(the share of the links' rate, seconds of a start and again for each doubling of the group)."""
    whole = dataclasses.replace(chip, link_efficiency=1.0, hop_s=1e-12)
    sent = [on_links(whole, kind, size, group, 1) for kind, size, group, _ in timed]
    starts = [(1 + math.log2(group)) * (2 if kind == "all-reduce" else 1) for kind, _, group, _ in timed]
    per_sent, start = least_squares([sent, starts], [s for *_, s in timed])
    return 1 / per_sent if per_sent else math.inf, max(start, 1e-9)


# ---------------------------------------------------------------------------------------------------- answer


@dataclass
class Calibration:
    """The chip as it is here, with what it reaches, and every measurement beside its law."""

    chip: Chip
    fields: dict[str, Any]
    reached: dict[str, float]
    rows: list[Timed]
    device_kind: str
    dtype: str
    num_devices: int


def calibrate(
    devices: list[jax.Device], name: str, sizes: Sizes | None = None, chip: Chip | None = None
) -> Calibration:
    """Time the devices and fit. ``chip``: the row that they are of, where JAX's name of them does not say.

    Simulated devices have no data sheet: their rates become the chip's own, and the shares 1. Of a real chip
    peaks stay as published, and shares are measured. What was not timed keeps its usual value: products of
    experts and of 8 bits, the network between hosts, what computing loses to a collective beside it."""
    kind, platform = devices[0].device_kind, devices[0].platform
    row = chip or hardware.guess(kind)
    if row is None:
        raise ValueError(f"'{kind}' is no chip that is known here; name the row that it is, as --chip h100")
    dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
    sizes = sizes or SIZES["cpu" if platform == "cpu" else "accelerator"]
    device, itemsize = row.per_device(), np.dtype(dtype).itemsize
    moved, took = time_memory(devices[0], sizes, dtype)
    bytes_per_s = moved / took
    products = time_products(devices[0], sizes, dtype)
    flops_per_s, half, start = fit_products(products, bytes_per_s, itemsize)
    attention = time_attention(devices[0], sizes, dtype)
    links = time_collectives(devices, sizes)
    fields: dict[str, Any] = {}
    peak, memory = device.flops_per_s, device.hbm_bytes_per_s
    if row.family == "cpu":
        many = row.devices_per_chip
        peak, memory = flops_per_s, bytes_per_s
        fields = {"flops_per_s": many * peak, "hbm_bytes_per_s": many * memory, "node_size": len(devices)}
    share = lambda x: min(1.0, max(1e-6, x))
    reached = {
        "products": share(flops_per_s / peak), "half": half, "kernel_s": start,
        "memory": share(bytes_per_s / memory),
    }  # fmt: skip
    if attention:
        reached["attention"] = share(attention[0] / attention[1] / peak)
    if links:
        rate, alpha = fit_links(row, links)
        if row.family == "cpu" and rate < math.inf:
            fields["link_bytes_per_s"] = row.link_bytes_per_s * rate
            rate = 1.0
        reached |= {"links": share(rate), "start_s": alpha}
    own = dataclasses.replace(
        row, name=name, base=row.family, reached=dataclasses.replace(row.rates, **reached), **fields
    )
    rows = _beside(own, products, itemsize, (moved, took), attention, links)
    return Calibration(own, fields, reached, rows, kind, np.dtype(dtype).name, len(devices))


def _beside(chip: Chip, products, itemsize, memory, attention, links) -> list[Timed]:
    """Every measurement beside what the fitted law says."""
    r, device, rows = chip.rates, chip.per_device(), []
    reads = device.hbm_bytes_per_s * r.memory
    for (m, k, n), took in products:
        law = 2.0 * m * k * n / (device.flops_per_s * r.products) * (1 + r.half / (m * n))
        law += itemsize * (m * k + k * n + m * n) / reads + r.kernel_s
        rows.append(Timed("product", f"{m} x {k} x {n}", took, law))
    rows.append(Timed("memory", f"{memory[0] / 2**20:.0f} MiB", memory[1], memory[0] / reads))
    if attention:
        law = attention[0] / (device.flops_per_s * r.attention)
        rows.append(Timed("attention", f"{attention[0] / 1e9:.1f} GFLOP", attention[1], law))
    here = dataclasses.replace(chip, link_efficiency=r.links)
    for kind, size, group, took in links:
        start = r.start_s * (1 + math.log2(group)) * (2 if kind == "all-reduce" else 1)
        law = start + on_links(here, kind, size, group, 1)
        rows.append(Timed(f"{kind} over {group}", f"{size / 2**10:.0f} KiB", took, law))
    return rows


def as_toml(found: Calibration, date: str) -> str:
    """The file that `hardware.chip` loads."""
    lines = [
        (
            f"# Measured by llmpar calibrate: {found.num_devices} x {found.device_kind}, JAX"
            f" {jax.__version__}, {found.dtype}."
        ),
        f'base = "{found.chip.base}"',
        f'name = "{found.chip.name}"',
        f'date = "{date}"',
        *(f"{key} = {value:.6g}" for key, value in found.fields.items()),
        "",
        "[reached]",
        *(f"{key} = {value:.4g}" for key, value in found.reached.items()),
    ]
    return "\n".join(lines) + "\n"


def unmeasured(found: Calibration) -> list[str]:
    """The constants that keep their usual values."""
    return [f.name for f in dataclasses.fields(Rates) if f.name not in found.reached]
