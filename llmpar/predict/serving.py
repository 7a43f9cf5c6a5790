"""What a model costs to serve: prompts and tokens per second, latencies, the cache of keys and values, and
which mesh serves most of them on a machine.

The first token waits for a whole forward pass over the prompt, which computes; each further token reads all
weights and all of its sequences' keys and values once, for little computing (Pope et al. 2022; Austin et al.
2025, inference chapter). Both are priced with the constants of `rates` that training is. An *instance* is one
copy of the model on pp x ep x sp x tp devices; dp counts instances. Rows are cut by ep and wait in turn for
pp, tp cuts heads and widths, sp the positions of the cache.

Not modelled: queues (rates are of a machine that always has work, latencies of a request that does not wait),
experts that are hotter than others, prompts that share a beginning, tokens guessed ahead.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from llmpar.config import ModelConfig
from llmpar.notation import AXES, MeshShape, divisors
from llmpar.predict import formulas
from llmpar.predict.hardware import GIB, Chip
from llmpar.predict.planner import room_bytes
from llmpar.predict.time import Clock
from llmpar.predict.workload import Product, Run

SERVED_AXES = ("pp", "ep", "sp", "tp")
"""Axes of one instance."""
LEAST_INNER = 256
"""Terms of a sum that a core adds up by itself, where the sum of a small product is dealt to several."""
MAX_STAGES = 16
BITS = (4, 8, 16)


@dataclass(frozen=True)
class Demand:
    """What is to be served, and how fast.

    Attributes:
        prompt, output: tokens of a request.
        first_token_s, per_token_s: bounds of latency: until the first token, and for each one after it.
        batch: sequences of an instance that are decoded at once, where it is given.
        weight_bits, cache_bits: as they lie in memory. Products run in 16 bits.
        fixed: axes of the mesh that are given.
        model: how the user named it.
    """

    config: ModelConfig
    chip: Chip
    num_devices: int
    prompt: int
    output: int
    first_token_s: float = math.inf
    per_token_s: float = math.inf
    batch: int | None = None
    weight_bits: int = 16
    cache_bits: int = 16
    fixed: dict[str, int] = field(default_factory=dict, hash=False)
    model: str = ""

    @property
    def cache_token_bytes(self) -> float:
        """Bytes of one token's keys and values, on all devices together."""
        c = self.config
        return formulas.kv_cache_bytes(1, c.num_layers, c.num_kv_heads, c.head_width, self.cache_bits / 8)

    @property
    def room_bytes(self) -> float:
        """Bytes that may be held on a device."""
        return room_bytes(self.chip)


class Server(Clock):
    """Prices forward passes of an instance: of a prompt, and of the next token of many sequences."""

    def __init__(self, q: Demand, mesh: MeshShape, tokens: int):
        self.demand = q
        run = Run(
            q.config,
            q.chip,
            mesh,
            seq_len=1,
            rows=tokens * mesh.sp,  # every rank of sp computes all of them
            zero=0,
        )
        super().__init__(run)
        self.layers = math.ceil(q.config.num_layers / mesh.pp)

    def products(self, found: list[Product], bits: int = 16) -> float:
        """Seconds of products that stream their weights: computing or reading weights, whichever is longer,
        and moving the activations. The sums of a small result are dealt to several cores and joined."""
        seconds = 0.0
        for p in found:
            share = self.rates.products if p.times == 1 else self.rates.grouped
            dealt = max(1.0, min(self.rates.half / (p.rows * p.out), p.inner / LEAST_INNER))
            waves = 1 + self.rates.half / (p.rows * p.out * dealt)
            computing = p.flops / (self.device.flops_per_s * share) * waves
            weights = p.times * p.inner * p.out * self.demand.weight_bits / 8
            besides = 2.0 * p.times * p.rows * (p.inner + p.out)
            besides += 8.0 * p.times * p.rows * p.out * (dealt - 1)
            seconds += max(computing, weights / self.bytes_per_s) + besides / self.bytes_per_s
            seconds += self.rates.kernel_s * min(p.times, 8)
        return seconds

    def layer_terms(self) -> dict[str, float]:
        """Seconds of one layer by term, but for attention's core."""
        run, c, mesh = self.run, self.run.config, self.run.mesh
        attention, ffn = run.layer_products()
        terms = {
            "products": self.products(attention) + self.products([self.touched(p) for p in ffn]),
            "elementwise": run.elementwise_bytes() / self.bytes_per_s + 6 * self.rates.kernel_s,
        }
        if mesh.tp > 1:
            one = self.collective("all-reduce", 2.0 * run.tokens * c.width, mesh.tp, 1)
            terms["tensor-parallel links"] = 2 * one
        if c.experts and mesh.ep > 1:
            terms["expert links"] = 2 * self.exchange(2.0 * run.stream_tokens * c.width)
        return terms

    def touched(self, p: Product) -> Product:
        """A product of experts without those that no token chose, if all are equally likely."""
        how = self.run.config.experts
        if not how or p.times == 1:
            return p
        missed = (1 - how.top_k / how.num_experts) ** (self.run.tokens * self.run.mesh.ep)
        some = max(1.0, p.times * (1 - missed))
        return Product(p.rows * p.times / some, p.inner, p.out, some)

    def head_s(self, rows: float) -> float:
        """Seconds of the logits of ``rows`` tokens, gathered on every rank of tp."""
        c, tp = self.run.config, self.run.mesh.tp
        logits = 4.0 * rows * c.vocab_size
        product = self.products([Product(rows, c.width, c.vocab_size / tp)])
        return product + self.collective("all-gather", logits, tp, 1) + logits / tp / self.bytes_per_s


@dataclass
class Phase:
    """One forward pass of an instance.

    Attributes:
        seconds: from its start until its tokens are there, through all stages.
        terms: of them.
        busy_s: of the busiest stage: the next pass can start so much later.
    """

    seconds: float
    terms: dict[str, float]
    busy_s: float


def _through(clock: Server, layer: dict[str, float], head: float, times: float = 1.0) -> Phase:
    """A pass through all stages, ``times`` over where rows take turns."""
    pp, config = clock.run.mesh.pp, clock.run.config
    terms = {name: config.num_layers * s * times for name, s in layer.items()}
    terms["head"] = head * times
    if pp > 1:
        terms["pipeline sends"] = pp * clock.hop()
    busiest = clock.layers * sum(layer.values()) + head + (clock.hop() if pp > 1 else 0.0)
    return Phase(sum(terms.values()), {k: s for k, s in terms.items() if s}, busiest)


@functools.lru_cache(maxsize=4096)
def prefill(q: Demand, mesh: MeshShape) -> Phase:
    """Take a prompt in, one for each rank of ep."""
    clock, c = Server(q, mesh, q.prompt), q.config
    layer = clock.layer_terms()
    seen = min(c.window or q.prompt, q.prompt)
    flops = 4.0 * q.prompt * seen * c.num_heads * c.head_width / mesh.tp * (0.5 if seen == q.prompt else 1.0)
    share = clock.device.flops_per_s * clock.rates.attention
    layer["attention"] = flops / share + clock.rates.kernel_s
    return _through(clock, layer, clock.head_s(1))


@functools.lru_cache(maxsize=65_536)
def decode(q: Demand, mesh: MeshShape, batch: int, context: float) -> Phase:
    """The next token of ``batch`` sequences, each with ``context`` tokens behind it. Stages of a pipeline
    take parts of the batch in turn, so that each is busy: one token takes as long as all parts do."""
    c, rows = q.config, batch // (mesh.ep * mesh.pp)
    clock = Server(q, mesh, rows)
    layer = clock.layer_terms()
    seen = min(c.window or context, context)
    keys = rows * seen * cache_bytes(q, mesh)
    layer["keys and values read"] = keys / clock.bytes_per_s + clock.rates.kernel_s
    if mesh.sp > 1:
        found = 4.0 * rows * c.num_heads / mesh.tp * (c.head_width + 2)
        layer["sequence links"] = clock.collective("all-reduce", found, mesh.sp, clock.inner["sp"])
    head = clock.head_s(rows)
    one = _through(clock, layer, head)
    if mesh.pp == 1:
        return one
    turn = max(one.seconds, mesh.pp * one.busy_s)
    waits = {"unequal stages": turn - one.seconds} if turn > one.seconds else {}
    return Phase(turn, one.terms | waits, one.busy_s)


# --------------------------------------------------------------------------------------------------- memory


def cache_bytes(q: Demand, mesh: MeshShape) -> float:
    """Bytes of a token's keys and values in one layer on a device. Ranks of tp that are more than the KV
    heads hold copies."""
    heads = max(q.config.num_kv_heads, mesh.tp) / q.config.num_kv_heads
    return q.cache_token_bytes / q.config.num_layers * heads / mesh.tp / mesh.sp


def held_bytes(q: Demand, mesh: MeshShape, batch: int) -> dict[str, float]:
    """Bytes on the fullest device: weights, the cache of whole sequences, and what the larger of the two
    passes works with. A window does not shorten the cache (`llmpar.serve.decode`)."""
    c, how = q.config, q.config.experts
    run = Run(c, q.chip, mesh, seq_len=1)
    s, layers = run.sizes, math.ceil(c.num_layers / mesh.pp)
    shared = layers * (s["attention"] + s["copies"] + s["ffn"] + s["router"] + s["vectors"])
    end = max(s["embedding"], s["head"]) if mesh.pp > 1 else s["embedding"] + s["head"]
    experts = layers * s["experts"] / mesh.ep
    length = q.prompt + q.output
    slots = math.ceil(length / mesh.sp) * mesh.sp * cache_bytes(q, mesh)
    rows = math.ceil(batch / mesh.ep)
    visits = how.top_k + how.num_shared if how else 1
    heads = (c.num_heads + 2 * run.kv_heads) * c.head_width / mesh.tp
    tokens = max(q.prompt, rows / mesh.pp)
    working = 2.0 * tokens * (3 * c.width + heads + run.ffn_products * c.ffn_width / mesh.tp * visits)
    return {
        "weights": (shared + experts + end) / mesh.tp * q.weight_bits / 8,
        "cache": rows * layers * slots,
        "working set": working + 4.0 * math.ceil(rows / mesh.pp) * c.vocab_size,
    }


def _fits(q: Demand, mesh: MeshShape, batch: int) -> bool:
    return sum(held_bytes(q, mesh, batch).values()) <= q.room_bytes


# ------------------------------------------------------------------------------------------------ the answer


@dataclass
class Instance:
    """One way to serve: a mesh without dp, and the batch that it decodes.

    Attributes:
        per_token_s: mean, with prompts taken in between where it does both.
        requests_per_s: of one instance.
    """

    mesh: MeshShape
    batch: int
    prefill: Phase
    decode: Phase
    per_token_s: float
    requests_per_s: float
    memory_bytes: dict[str, float]


@dataclass
class Apart:
    """Prompts taken in by some instances, and tokens made by others."""

    prefill: Instance
    decode: Instance
    num_prefill: int
    num_decode: int
    handover_s: float
    requests_per_s: float

    @property
    def first_token_s(self) -> float:
        """Until the first token: the prompt, and its cache's way."""
        return self.prefill.prefill.seconds + self.handover_s


@dataclass
class Served:
    """The answer: instances that do both, best first; both phases apart; and what cannot be."""

    demand: Demand
    together: list[Instance]
    apart: Apart | None
    why_not_apart: str
    rejected: list[tuple[MeshShape, str]]


def meshes(q: Demand) -> Iterator[MeshShape]:
    """Every mesh of an instance that the dims allow, with as many instances (dp) as the devices hold."""
    c, n = q.config, q.num_devices
    widths, heads = math.gcd(c.num_heads, c.ffn_width, c.vocab_size), c.num_kv_heads
    legal = [t for t in divisors(widths) if heads % t == 0 or t % heads == 0]
    node = q.chip.per_device().node_size if q.chip.link == "switch" else 16
    choices = {
        "tp": [t for t in legal if t <= node],
        "pp": [p for p in divisors(n) if p <= min(c.num_layers, MAX_STAGES)],
        "ep": divisors(c.experts.num_experts) if c.experts else [1],
        "sp": [s for s in divisors(n) if s == 1 or s <= node and (q.prompt + q.output) // s >= 1024],
    }
    given = {"tp": legal, "pp": divisors(n), "ep": choices["ep"], "sp": divisors(n)}
    for axis in SERVED_AXES:
        if axis in q.fixed:
            choices[axis] = [v for v in given[axis] if v == q.fixed[axis]]
    for tp in choices["tp"]:
        for pp in choices["pp"]:
            for ep in choices["ep"]:
                for sp in choices["sp"]:
                    size = tp * pp * ep * sp
                    if n % size == 0 and q.fixed.get("dp", n // size) == n // size:
                        yield MeshShape(pp=pp, dp=n // size, ep=ep, sp=sp, tp=tp)


def request_s(q: Demand, mesh: MeshShape) -> float:
    """Seconds of an instance's time that a request's prompt takes."""
    return prefill(q, mesh).busy_s / mesh.ep


def per_token(q: Demand, mesh: MeshShape, batch: int, both: bool) -> float:
    """Mean seconds between tokens of a sequence. An instance that does ``both`` stops for each prompt; it
    takes ``batch`` of them in while it makes ``output`` tokens of each sequence."""
    step = decode(q, mesh, batch, q.prompt + q.output / 2).seconds
    return step + (batch / q.output * request_s(q, mesh) if both else 0.0)


def largest_batch(q: Demand, mesh: MeshShape, both: bool) -> tuple[int, str]:
    """The most sequences that an instance may decode at once, in whole rows of ep and pp: by memory, and by
    the bound of latency. 0 where it is none, and why."""
    unit = mesh.ep * mesh.pp
    if q.batch is not None and q.batch % unit:
        return 0, f"batch {q.batch} is no multiple of ep·pp = {unit}"

    def legal(batch: int) -> str:
        parts, many = held_bytes(q, mesh, batch), f"{batch} sequence{'s' * (batch > 1)}"
        one = "s" * (batch == 1)
        if (held := sum(parts.values())) > q.room_bytes:
            most = max(parts, key=lambda name: parts[name])
            return (
                f"{many} hold{one} {held / GIB:.1f} GiB > {q.room_bytes / GIB:.1f} GiB, of which"
                f" {most} {parts[most] / GIB:.1f}"
            )
        if (took := per_token(q, mesh, batch, both)) > q.per_token_s:
            return f"{many} take{one} {took * 1e3:.3g} ms > {q.per_token_s * 1e3:.3g} ms a token"
        return ""

    if q.batch is not None:
        why = legal(q.batch)
        return (0, why) if why else (q.batch, "")
    if why := legal(unit):
        return 0, why
    low, high = 1, 2
    while not legal(high * unit):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if legal(middle * unit) else (middle, high)
    return low * unit, ""


def instance(q: Demand, mesh: MeshShape, both: bool) -> Instance | str:
    """The mesh with its largest batch, or why it cannot serve."""
    first = prefill(q, mesh)
    if both and first.seconds > q.first_token_s:
        return f"the first token takes {first.seconds * 1e3:.3g} ms > {q.first_token_s * 1e3:.3g} ms"
    batch, why = largest_batch(q, mesh, both)
    if not batch:
        return why
    step = decode(q, mesh, batch, q.prompt + q.output / 2)
    took = per_token(q, mesh, batch, both)
    return Instance(mesh, batch, first, step, took, batch / (took * q.output), held_bytes(q, mesh, batch))


def answer(q: Demand, keep: int = 8, most_rejected: int = 12) -> Served:
    """The meshes that serve most requests per second within the bounds. Raises ValueError where none does,
    with what would."""
    _refuse(q)
    together, alone, prompts, rejected = [], [], [], []
    for mesh in meshes(q):
        found = instance(q, mesh, True)
        if isinstance(found, str):
            rejected.append((mesh, found))
        else:
            together.append(found)
        if isinstance(found := instance(q, mesh, False), Instance):
            alone.append(found)
        one = _prompts(q, mesh)
        if one and mesh.sp == 1:
            prompts.append(one)
    together.sort(key=lambda one: (-one.mesh.dp * one.requests_per_s, one.mesh.size // one.mesh.dp))
    best = _apart(q, prompts, alone) if "dp" not in q.fixed else None
    if not together and not best:
        raise ValueError(_nothing(q, rejected))
    why = "" if best else "no instance for prompts and another for tokens meet the bounds on these devices"
    return Served(q, together[:keep], best, why, rejected[:most_rejected])


def _prompts(q: Demand, mesh: MeshShape) -> Instance | None:
    """An instance that only takes prompts in; None where it is too slow or too small."""
    one = dataclasses.replace(q, output=0, batch=None)
    first, unit = prefill(q, mesh), mesh.ep * mesh.pp
    if first.seconds > q.first_token_s or not _fits(one, mesh, unit):
        return None
    rate = 1 / request_s(q, mesh)
    return Instance(mesh, unit, first, Phase(0.0, {}, 0.0), 0.0, rate, held_bytes(one, mesh, unit))


def handover_s(q: Demand, mesh: MeshShape) -> float:
    """Seconds that a prompt's cache takes over the network: each device of the instance that made it sends
    its part."""
    device = q.chip.per_device()
    reached = device.dcn_bytes_per_s * q.chip.rates.network
    return q.prompt * q.cache_token_bytes / (mesh.tp * mesh.pp) / reached


def _apart(q: Demand, prompts: list[Instance], tokens: list[Instance]) -> Apart | None:
    """The pair of instances and their numbers that serve most requests on the devices."""
    best: Apart | None = None
    size = lambda one: one.mesh.size // one.mesh.dp
    for a in prompts:
        moved = handover_s(q, a.mesh)
        if a.prefill.seconds + moved > q.first_token_s:
            continue
        for b in tokens:
            whole = q.num_devices * b.requests_per_s
            ideal = whole / (size(a) * b.requests_per_s + size(b) * a.requests_per_s)
            for many in {max(1, math.floor(ideal)), math.ceil(ideal)}:
                others = (q.num_devices - many * size(a)) // size(b)
                if others < 1:
                    continue
                rate = min(many * a.requests_per_s, others * b.requests_per_s)
                if best is None or rate > best.requests_per_s * (1 + 1e-9):
                    best = Apart(a, b, many, others, moved, rate)
    return best


def _refuse(q: Demand) -> None:
    """Refuse what nothing serves."""
    q.config.weights()
    unknown = sorted(set(q.fixed) - {*SERVED_AXES, "dp"})
    if unknown:
        axes = ", ".join(axis for axis in AXES if axis in (*SERVED_AXES, "dp"))
        raise ValueError(f"weights are not gathered while tokens wait: no {', '.join(unknown)}; use {axes}")
    for name in ("weight_bits", "cache_bits"):
        if getattr(q, name) not in BITS:
            raise ValueError(f"{name} is {getattr(q, name)}; use one of {', '.join(map(str, BITS))}")
    for name in ("prompt", "output"):
        if not 1 <= getattr(q, name) <= 1 << 24:
            raise ValueError(f"{name} is {getattr(q, name)} tokens; use 1 to {1 << 24:,}")
    for name in ("first_token_s", "per_token_s"):
        if not getattr(q, name) > 0:
            raise ValueError(f"{name} is {getattr(q, name)}; a bound is positive")
    if q.batch is not None and not 1 <= q.batch <= 1 << 20:
        raise ValueError(f"batch is {q.batch} sequences; use 1 to {1 << 20:,}")
    if not any(True for _ in meshes(q)):
        c = q.config
        widths = math.gcd(c.num_heads, c.ffn_width, c.vocab_size)
        text = " ".join(f"{a}={v}" for a, v in q.fixed.items())
        heads = f"its {c.num_kv_heads} KV heads"
        raise ValueError(
            f"no instance on {q.num_devices} {q.chip.name} with {text} suits '{c.name}': tp divides"
            f" {widths}, and divides {heads} or is a multiple of them; ep divides its experts, pp is at most"
            f" its {c.num_layers} layers, and all of them divide the devices"
        )


def _nothing(q: Demand, rejected: list[tuple[MeshShape, str]]) -> str:
    """The sentence for a demand that no mesh meets: what comes nearest, or the smallest machine that would
    do."""
    what = f"'{q.config.name}' with {q.prompt:,} tokens in and {q.output:,} out"
    least = min(meshes(q), key=lambda mesh: sum(held_bytes(q, mesh, mesh.ep * mesh.pp).values()))
    batch = q.batch or least.ep * least.pp
    if _fits(q, least, batch):
        free = dataclasses.replace(q, first_token_s=math.inf, per_token_s=math.inf)
        able = [m for m in meshes(q) if _fits(q, m, q.batch or m.ep * m.pp)]
        first = min(able, key=lambda mesh: prefill(free, mesh).seconds)
        step = min(able, key=lambda mesh: per_token(free, mesh, q.batch or mesh.ep * mesh.pp, False))
        ms = 1e3 * prefill(free, first).seconds
        each = 1e3 * per_token(free, step, q.batch or step.ep * step.pp, False)
        return (
            f"{what}: no mesh of {q.num_devices} {q.chip.name} meets the bounds; the quickest first token"
            f" takes {ms:.3g} ms on '{first}', the quickest of the others {each:.3g} ms on '{step}'"
        )
    held = sum(held_bytes(q, least, batch).values())
    head = (
        f"{what} fits on no mesh of {q.num_devices} {q.chip.name}: the least is {held / GIB:.1f} GiB >"
        f" {q.room_bytes / GIB:.1f} GiB on '{least}'"
    )
    for factor in (2, 3, 4, 6, 8, 12, 16, 24, 32, 64):
        bigger = dataclasses.replace(q, num_devices=factor * q.num_devices, fixed={})
        if any(_fits(bigger, mesh, q.batch or mesh.ep * mesh.pp) for mesh in meshes(bigger)):
            return f"{head}; {bigger.num_devices} of them are enough"
    return f"{head}; more of them do not help"


# ------------------------------------------------------------------------------------------------- in words


def critical_batches(q: Demand) -> dict[str, float]:
    """Sequences at which products compute as long as they read their weights, by the data sheet and by what
    the chip reaches (Book, rooflines; with k of E experts, E/k times as many)."""
    reached, device, how = q.chip.rates, q.chip.per_device(), q.config.experts
    few = (how.num_experts, how.top_k) if how else (1, 1)
    at = functools.partial(
        formulas.critical_batch, weight_bytes=q.weight_bits / 8, experts=few[0], topk=few[1]
    )
    share = reached.grouped if how else reached.products
    return {
        "data_sheet": at(device.flops_per_s, device.hbm_bytes_per_s),
        "reached": at(device.flops_per_s * share, device.hbm_bytes_per_s * reached.memory),
    }


def document(found: Served, price: float | None = None) -> dict[str, Any]:
    """The document of ``llmpar plan --serve --json``. ``price``: of a chip and hour."""
    q = found.demand
    total: dict[str, Any] = {
        "model": q.config.name,
        "chip": q.chip.name,
        "devices": q.num_devices,
        "prompt": q.prompt,
        "output": q.output,
        "weight_bits": q.weight_bits,
        "cache_bits": q.cache_bits,
        "bounds": {
            name: value
            for name, value in (("first_token_s", q.first_token_s), ("per_token_s", q.per_token_s))
            if value < math.inf
        },
        "room_bytes": q.room_bytes,
        "cache_bytes": {
            "token": q.cache_token_bytes, "sequence": (q.prompt + q.output) * q.cache_token_bytes
        },
        "critical_batch": critical_batches(q),
        "plans": [_row(q, one, found.together[0], price) for one in found.together],
        "apart": _apart_row(q, found.apart, price) if found.apart else None,
        "why_not_apart": found.why_not_apart,
        "rejected": [{"mesh": str(mesh), "why": why} for mesh, why in found.rejected],
    }  # fmt: skip
    return total | {"curve": curve(q, found.together[0].mesh if found.together else found.apart.decode.mesh)}  # type: ignore[union-attr]


def _row(q: Demand, one: Instance, best: Instance, price: float | None) -> dict[str, Any]:
    rate = one.mesh.dp * one.requests_per_s
    row = _phase_row(q, one) | {
        "mesh": str(one.mesh),
        "instances": one.mesh.dp,
        "first_token_s": one.prefill.seconds,
        "per_token_s": one.per_token_s,
        "requests_per_s": rate,
        "tokens_per_s": rate * q.output,
        "why": _why(one, best),
        "generate": command(q, one.mesh),
    }
    return row | _cost(q, rate, price)


def _phase_row(q: Demand, one: Instance) -> dict[str, Any]:
    parts = one.memory_bytes
    return {
        "batch": one.batch,
        "prefill_s": one.prefill.seconds,
        "prefill_terms": one.prefill.terms,
        "decode_s": one.decode.seconds,
        "decode_terms": one.decode.terms,
        "memory_bytes": parts | {"total": sum(parts.values())},
    }


def _cost(q: Demand, rate: float, price: float | None) -> dict[str, float]:
    chips = q.num_devices / q.chip.devices_per_chip
    return {"cost_per_million_tokens": price * chips / 3600 / (rate * q.output) * 1e6} if price else {}


def _apart_row(q: Demand, pair: Apart, price: float | None) -> dict[str, Any]:
    of = lambda one, many: {"mesh": str(dataclasses.replace(one.mesh, dp=1)), "instances": many}
    a, b = _phase_row(q, pair.prefill), _phase_row(q, pair.decode)
    keep = lambda row, *names: {name: row[name] for name in names}
    used = sum(
        many * one.mesh.size // one.mesh.dp
        for one, many in ((pair.prefill, pair.num_prefill), (pair.decode, pair.num_decode))
    )
    return {
        "prefill": of(pair.prefill, pair.num_prefill) | keep(a, "prefill_s", "prefill_terms", "memory_bytes"),
        "decode": of(pair.decode, pair.num_decode)
        | keep(b, "batch", "decode_s", "decode_terms", "memory_bytes"),
        "ratio": pair.num_prefill / pair.num_decode,
        "balanced_ratio": pair.decode.requests_per_s / pair.prefill.requests_per_s,
        "devices_used": used,
        "handover_s": pair.handover_s,
        "first_token_s": pair.first_token_s,
        "per_token_s": pair.decode.per_token_s,
        "requests_per_s": pair.requests_per_s,
        "tokens_per_s": pair.requests_per_s * q.output,
    } | _cost(q, pair.requests_per_s, price)


def _why(one: Instance, best: Instance) -> str:
    """Why an instance serves fewer: what takes most of a token's time, against the best's."""
    name, seconds = max(one.decode.terms.items(), key=lambda item: item[1])
    whole = one.decode.seconds
    says = f"of {whole * 1e3:.3g} ms a step, {name} {seconds * 1e3:.3g}"
    if one is best:
        return f"serves most; {says}"
    ratio = one.mesh.dp * one.requests_per_s / (best.mesh.dp * best.requests_per_s)
    return f"x {ratio:.2f}: {says}"


def curve(q: Demand, mesh: MeshShape) -> list[dict[str, float]]:
    """Latency and throughput of an instance that decodes, from its smallest batch to its largest by
    memory."""
    rows, batch = [], mesh.ep * mesh.pp
    while _fits(q, mesh, batch):
        step = decode(q, mesh, batch, q.prompt + q.output / 2).seconds
        rows.append({"batch": batch, "decode_s": step, "tokens_per_s": batch / step * mesh.dp})
        batch *= 2
    return rows


def command(q: Demand, mesh: MeshShape) -> str | None:
    """The line that generates on one instance's mesh; None where this package's `generate` has no such
    mesh: pipelines, rows dealt to experts' ranks, weights of fewer bits."""
    if mesh.pp > 1 or mesh.ep > 1 or (q.weight_bits, q.cache_bits) != (16, 16):
        return None
    one = dataclasses.replace(mesh, dp=1)
    return (
        f'llmpar generate --model {q.model or q.config.name} --mesh "{one}" --dtype bfloat16'
        f" --tokens {q.output}"
    )
