"""Run the schedule of a compiled program on two clocks, and estimate the time of each part of a step: a
roofline.

The compiler for GPUs and TPUs orders all operations of a device. One clock is for computing, one for
communicating. An operation takes the time of its matmuls at a share of the chip's peak, or of its bytes at a
share of the memory's rate, whichever is longer (Williams et al. 2009). A collective that is started runs
beside what follows, until its end is awaited: what is left of it then is *exposed*. Collectives run one after
the other, as XLA for GPUs has them by default.

Times are estimates, counts are exact: FLOPs and bytes are those of the program.
"""

import collections
import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmpar.inspect.census import Taken, arrow_of, call_flops, flops_in, product_flops, share_of
from llmpar.inspect.hlo import (
    CALLS,
    COLLECTIVES,
    Instruction,
    Module,
    group_axes,
    shapes,
    values_bytes,
)
from llmpar.kernels import grouped
from llmpar.predict import formulas
from llmpar.predict.hardware import Chip, guess

# Share of peak that large bf16 matmuls reach: 650 to 740 of 989 TFLOP/s on H100 (cuBLAS, by NVIDIA).
_PRODUCT_SHARE = 0.70
FUSED_SHARE = 0.60
"""Share of peak that cuDNN's attention reaches, forward and backward (Shah et al. 2024, sec. 4: H100, head
128)."""
# Assumed share of peak of this package's own kernels: FlashAttention-2, a similar kernel, reaches 35 % on
# H100 (Shah et al. 2024, section 1).
_KERNEL_SHARE = 0.40
MEASURED = Path(__file__).with_name("reached.json")
"""Shares of peak by chip that ``make device-test`` measured, with the keys of `shares`. It may be missing."""
MEMORY_SHARE = 0.80
"""Share of the memory's published rate that elementwise operations reach."""
_LAUNCH_S, START_S, _HOST_S = 2e-6, 10e-6, 15e-6
"""Assumed: the least time of a kernel, of starting a collective, and of a branch that the host decides."""
# Lanes of collectives: one for all of them, or one for those within hosts and one for those between hosts.
_LINKS = "links", "network"
# Of collectives that `formulas` knows by another name: that name.
_PRICED_AS = {
    **dict.fromkeys(("collective-permute", "collective-broadcast", "send"), "permute"),
    "ragged-all-to-all": "all-to-all",
}
# Operations that may run a collective of the computation that they call.
_CARRIERS = "fusion", "async-start", "call-start"
FREE = set(
    "parameter constant tuple get-tuple-element bitcast iota after-all partition-id replica-id opt-barrier"
    " domain add-dependency".split()
)


@dataclass
class CollectiveTime:
    """State the time of one arrow's collectives of one kind, summed over a step."""

    arrow: str
    axis: str
    kind: str
    direction: str = ""
    count: float = 0
    asynchronous: float = 0  # how many have a start and a done of their own
    hidden_flops: float = 0.0  # of matmuls between start and done
    busy_s: float = 0.0  # their time on the links
    exposed_s: float = 0.0  # the part that no computing hides


@dataclass
class _Event:
    """State one span of a lane (``compute`` or one of `_LINKS`): what ran, and when, in seconds."""

    lane: str
    name: str
    start_s: float
    end_s: float
    exposed_s: float = 0.0


@dataclass
class Loop:
    """Hold one iteration of a loop, in the order of the schedule, and the number of iterations."""

    name: str
    count: int
    events: list[_Event] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Return the seconds of one iteration."""
        return self.events[-1].end_s - self.events[0].start_s if self.events else 0.0


@dataclass
class Roofline:
    """State an estimate of a step: seconds by term, executed FLOPs, the collectives, and the events of
    loops."""

    step_s: float = 0.0
    flops: float = 0.0
    terms: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))
    sent: dict[tuple, CollectiveTime] = field(default_factory=dict)
    loops: list[Loop] = field(default_factory=list)  # the step itself, then each of its loops

    @property
    def exposed_s(self) -> float:
        """Return the seconds of communication that no computing hides."""
        return sum(row.exposed_s for row in self.sent.values())


def measured(chip: Chip) -> dict[str, float]:
    """Return the measured shares of a chip's peak; {} where there are none."""
    return json.loads(MEASURED.read_text()).get(chip.family, {}) if MEASURED.exists() else {}


def shares(chip: Chip, kernels: float | None = None) -> dict[str, float]:
    """Return the shares of peak of matmuls, and of attention in this package's kernel and in cuDNN's:
    measured, else assumed. ``kernels`` replaces all but that of matmuls."""
    reached = {
        "products": _PRODUCT_SHARE,
        "cudnn": FUSED_SHARE,
        "attention": _KERNEL_SHARE,
    } | measured(chip)
    return (
        reached
        if kernels is None
        else dict.fromkeys(reached, kernels) | {"products": reached["products"]}
    )


def roofline(
    text: str,
    mesh: Any,
    chip: Chip,
    taken: Taken | None = None,
    seen: float = 1.0,
    full: float = 1.0,
    beside: bool = False,
    kernels: float | None = None,
) -> Roofline:
    """Estimate the step of a final, scheduled program on the devices of ``mesh``, which are ``chip``s.

    ``taken`` has how often the branches of a pipeline's stage are taken. Of any other conditional the branch
    with most FLOPs counts. No program states these two: ``seen``, the share of its pairs of tiles that this
    package's attention kernel computes (`ring.seen_share`), and ``full``, the share of the slots of a ragged
    all-to-all that are sent. With ``beside`` a collective within hosts runs beside one between them.
    ``kernels``: as in `shares`.
    """
    schedule = _Schedule(Module(text), mesh, chip, taken, seen, full, beside, shares(chip, kernels))
    schedule.result.loops.append(step := Loop("step", 1))
    schedule.run(schedule.module.entry, step.events)
    schedule.result.step_s = schedule.now
    return schedule.result


def alone(module: Module, mesh: Any) -> Callable[[Instruction], dict[str, float]]:
    """Return a function that estimates ``predicted_s`` of one collective with the links to itself, and has
    ``link_bytes_per_s``, the rate of those links of a device; nan where the mesh's chip is not known."""
    chip = guess(mesh.devices.flat[0].device_kind) if hasattr(mesh, "devices") else None
    if chip is None or chip.simulated:
        return lambda op: {"predicted_s": math.nan, "link_bytes_per_s": math.nan}
    schedule = _Schedule(module, mesh, chip, None, 1.0, 1.0, True, shares(chip))
    one = chip.per_device()
    rates = dict(zip(_LINKS, (one.reached_link_bytes_per_s, one.dcn_bytes_per_s), strict=True))

    def predicted(op: Instruction) -> dict[str, float]:
        sent = schedule.collective(op)
        assert sent  # a row has more than one device
        return {"predicted_s": sent.left, "link_bytes_per_s": rates[sent.link]}

    return predicted


@dataclass(eq=False)
class _Transfer:
    """State one collective under way: the seconds that it would still take alone, its begin and its end."""

    row: CollectiveTime
    link: str
    left: float
    begin: float = math.nan
    ended: float = math.nan


class _Link:
    """Carry collectives: one after the other, or, if ``shared``, all at once, each at an even share."""

    def __init__(self, shared: bool):
        self.shared, self.now = shared, 0.0
        self.under_way: list[_Transfer] = []

    def start(self, transfer: _Transfer, now: float) -> None:
        """Add a collective."""
        self.run(now)
        self.under_way.append(transfer)

    def end(self, transfer: _Transfer, now: float) -> float:
        """Return when a collective ends if no other starts before."""
        self.run(now)
        while transfer in self.under_way:
            self.run(self.now + self.next())
        return transfer.ended

    def next(self) -> float:
        """Return the seconds until the next collective ends."""
        return min(t.left for t in self.served()) * len(self.served())

    def served(self) -> list[_Transfer]:
        """List the collectives that are carried now."""
        return self.under_way if self.shared else self.under_way[:1]

    def run(self, until: float) -> None:
        """Carry collectives until a time, or longer for those that need no time."""
        while self.under_way and (self.now < until or not self.next()):
            served, seconds = self.served(), min(self.next(), until - self.now)
            for transfer in served:
                transfer.begin = self.now if math.isnan(transfer.begin) else transfer.begin
                transfer.left -= seconds / len(served)
                transfer.ended = self.now + seconds  # the last time counts
            self.under_way = [transfer for transfer in self.under_way if transfer.left >= 1e-12]
            self.now += seconds
        self.now = max(self.now, until)


class _Schedule:
    """Run a program's schedule: two clocks, and the counts so far."""

    def __init__(self, module: Module, mesh: Any, chip: Chip, taken, seen, full, beside, shares):
        self.seen, self.full, self.beside, self.shares = seen, full, beside, shares
        self.module, self.mesh, self.taken, self.result = module, mesh, taken, Roofline()
        self.flops = all_flops(module)
        self.chip, device = chip, chip.per_device()
        self.peak, self.rate = device.flops_per_s, device.hbm_bytes_per_s * MEMORY_SHARE
        self.gpu = chip.link == "switch"
        self.now, self.links = 0.0, {name: _Link(beside) for name in _LINKS}
        self.times = 1.0  # how often a step runs the current computation

    def run(self, comp: str, events: list[_Event]) -> float:
        """Run a computation once, and return the FLOPs of its matmuls."""
        pending: dict[str, tuple[_Transfer, float]] = {}
        flops = 0.0
        for name, op in self.module.computations[comp].items():
            if op.opcode == "while":
                flops += self.loop(comp, op, events)
            elif op.opcode == "conditional":
                flops += self.branch(op, events)
            elif op.opcode == "call":
                flops += self.run(op.called("to_apply", "calls")[0], events)
            else:
                role, key, sends = collective_role(self.module, name, op)
                sent = self.collective(sends) if sends and role != "done" else None
                if role == "done" and key in pending:
                    sent, before = pending.pop(key)
                    sent.row.hidden_flops += self.times * (flops - before)
                    self.wait(sent, events)
                elif sent:
                    self.links[sent.link].start(sent, self.now)
                    sent.row.count += self.times
                    sent.row.busy_s += self.times * sent.left
                    if role == "start":
                        sent.row.asynchronous += self.times
                        pending[key] = sent, flops
                    else:
                        self.wait(sent, events)
                if not (role in ("start", "done") or op.opcode in COLLECTIVES):
                    flops += self.compute(comp, op, events)
        return flops

    def wait(self, sent: _Transfer, events: list[_Event]) -> None:
        """Wait until a collective is done."""
        end = self.links[sent.link].end(sent, self.now)
        exposed = max(0.0, end - self.now)
        sent.row.exposed_s += self.times * exposed
        self.result.terms["exposed communication"] += self.times * exposed
        events.append(_Event(sent.link, sent.row.arrow or sent.row.kind, sent.begin, end, exposed))
        self.now = max(self.now, end)

    def loop(self, comp: str, op: Instruction, events: list[_Event]) -> float:
        """Run a loop's body once, and count it for all iterations."""
        if not (trips := _iterations(self.module, comp, op)):
            return 0.0
        body, begin = op.called("body")[0], self.now
        self.times *= trips
        outermost = events is self.result.loops[0].events
        loop = Loop(
            f"{arrow_of(op.scope)['direction']} loop".strip(), trips, [] if outermost else events
        )
        flops = self.run(body, loop.events)
        self.times /= trips
        self.now = begin + trips * (self.now - begin)
        if outermost:
            self.result.loops.append(loop)
            events.append(_Event("compute", f"loop of {trips}", begin, self.now))
        return trips * flops

    def branch(self, op: Instruction, events: list[_Event]) -> float:
        """Run the branches, each as often as it is taken; where that is unknown, the one with most FLOPs."""
        branches = op.called(*CALLS["conditional"])
        share = share_of(op.scope, self.taken)
        if share is None:
            size = lambda b: (self.flops(b, None), len(self.module.computations[b]))
            shares = {max(branches, key=size): 1.0}
        else:
            shares = dict(zip(branches, (1 - float(share), float(share)), strict=True))
        flops, times = 0.0, self.times
        if self.gpu:
            self.now += _HOST_S
            self.result.terms["host decides a branch"] += times * _HOST_S
        for branch, part in shares.items():
            if part:
                begin, self.times = self.now, times * part
                flops += part * self.run(branch, events)
                self.now, self.times = begin + part * (self.now - begin), times
                for link in self.links.values():
                    link.now = min(link.now, self.now)
        return flops

    def collective(self, op: Instruction) -> _Transfer | None:
        """Return the row of a collective, its link and its seconds on it; None for a group of one."""
        kind = op.opcode.removesuffix("-start")
        axes, group = group_axes(op.attrs, self.mesh)
        if group == 1:
            return None
        result_bytes = values_bytes(op.results)
        message: float = result_bytes * group if kind == "reduce-scatter" else result_bytes
        # the compiler may merge several
        merged = dict.fromkeys(re.findall(r"arrow\[(.*?)\]", op.scope))
        key = ("; ".join(merged), ",".join(axes), kind, arrow_of(op.scope)["direction"])
        row = self.result.sent.setdefault(key, CollectiveTime(*key))
        message *= self.full if kind == "ragged-all-to-all" else 1.0
        seconds = self.link_seconds(_PRICED_AS.get(kind, kind), message, axes, group)
        across = self.beside and group * self.apart(axes) > self.chip.per_device().node_size
        return _Transfer(row, _LINKS[across], seconds + (START_S if self.gpu else 0.0))

    def apart(self, axes: tuple[str, ...]) -> int:
        """Return the distance of a group's members along mesh axes, in devices."""
        if axes == ("other",):
            return 1
        innermost = max(map(list(self.mesh.axis_names).index, axes))
        return math.prod(self.mesh.devices.shape[innermost + 1 :])

    @functools.cache  # noqa: B019 - a schedule lives as long as its program
    def link_seconds(self, kind: str, message: float, axes: tuple[str, ...], group: int) -> float:
        """Return the seconds of a collective over mesh axes, from their devices' positions on the links."""
        devices, names = self.mesh.devices, list(self.mesh.axis_names)
        if (
            axes == ("other",)
            or self.chip.link == "switch"
            or not getattr(devices.flat[0], "coords", None)
        ):
            return formulas.collective_seconds(self.chip, kind, message, group, self.apart(axes))
        at = tuple(slice(None) if name in axes else 0 for name in names)
        coords = {tuple(d.coords) for d in devices[at].flat}
        extents = [len({c[i] for c in coords}) for i in range(len(next(iter(coords))))]
        box = tuple(n for n in extents if n > 1) or (1,)
        if math.prod(box) != len(coords):
            box = (len(coords),)
        slices = len({getattr(d, "slice_index", 0) for d in devices[at].flat})
        one = self.chip.per_device()
        whole = message * (group if kind == "all-to-all" else 1)
        closed = all(map(self.chip.wraps, box))
        rate, hop_s = one.reached_link_bytes_per_s, self.chip.hop_s
        seconds = formulas.torus_seconds(kind, whole, box, rate, closed, hop_s)
        # each device sends its part of what leaves a slice over the data centre's network
        if slices > 1:
            across = formulas.sent_bytes(kind, message, slices) * slices / group
            seconds = max(seconds, across / one.dcn_bytes_per_s)
        return seconds

    def compute(self, comp: str, op: Instruction, events: list[_Event]) -> float:
        """Run an operation on the computing clock, and return its FLOPs."""
        waits = op.opcode.endswith(("-start", "-done"))
        if op.opcode in FREE or waits or '"AllocateBuffer"' in op.attrs:
            return 0.0
        flops, share, term = self.product(comp, op)
        least = _LAUNCH_S if self.gpu else 0.0
        seconds = max(flops / (share * self.peak), self.traffic(comp, op) / self.rate, least)
        self.result.flops += self.times * flops
        self.result.terms[term if flops else "elementwise"] += self.times * seconds
        begin, self.now = self.now, self.now + seconds
        events.append(_Event("compute", _short(op, term if flops else ""), begin, self.now))
        return flops

    def product(self, comp: str, op: Instruction) -> tuple[float, float, str]:
        """Return an operation's FLOPs, the share of peak that they reach, and their term."""
        if flops := call_flops(self.module, comp, op, self.seen):
            own = "xla.gpu.triton" in op.attrs or "tpu_custom_call" in op.attrs
            return flops, self.shares["attention" if own else "cudnn"], "attention"
        faster = self.faster(comp, op) if self.gpu else 1.0
        return self.flops(comp, op), self.shares["products"] * faster, "products"

    def faster(self, comp: str, op: Instruction) -> float:
        """Return how much faster than in 16 bits a GPU runs an operation's matmuls: TF32 at half the rate."""
        if op.opcode == "fusion":
            body = op.called("calls", "to_apply")[0]
            dots = [
                o
                for o in self.module.computations[body].values()
                if o.opcode in ("dot", "convolution")
            ]
            return min((self.faster(body, o) for o in dots), default=1.0)
        if op.opcode not in ("dot", "custom-call", "convolution") or not op.operands:
            return 1.0
        operand = shapes(self.module.computations[comp][op.operands[0][0]].type)
        dtype = operand[0][0] if operand else ""
        if dtype.startswith("f8"):
            return self.chip.rates.eight_bit
        return 0.5 if dtype == "f32" else 1.0

    def traffic(self, comp: str, op: Instruction) -> float:
        """Return the bytes that an operation reads and writes. A fusion reads only the slices that it takes
        of an operand, no gathered row twice, and writes only the slice that it updates in place."""
        ops, operands = self.module.computations[comp], op.operands

        def size(name: str, index: int | None) -> int:
            values = shapes(ops[name].type) if name in ops else []
            return values_bytes(values if index is None else values[index : index + 1])

        written = values_bytes(shapes(op.type))
        if op.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * written
        if op.opcode == "dynamic-update-slice":
            return 2 * size(*operands[1])
        if op.opcode != "fusion":
            return written + sum(size(*operand) for operand in operands)
        callee = op.called("calls", "to_apply")[0]
        body = self.module.computations[callee]

        def uses(name: str) -> list[tuple[str, Instruction]]:
            """List the operations that use a value or its renamed copies, each with the name that it uses."""
            operations = []
            for user in self.module.users[callee, name]:
                renamed = body[user].opcode in ("bitcast", "convert", "copy", "reshape")
                operations += uses(user) if renamed else [(name, body[user])]
            return operations

        moved = 0
        for name, inner in body.items():
            if inner.opcode != "parameter":
                continue
            users = uses(name)
            first = [o for via, o in users if o.operands[0][0] == via]
            updated = [o for o in first if o.opcode == "dynamic-update-slice"]
            cut = [o for o in first if o.opcode in ("dynamic-slice", "gather", "slice")]
            if users and len(updated) + len(cut) == len(users):
                taken = sum(values_bytes(shapes(o.type)) for o in cut)
                moved += min(taken, values_bytes(shapes(inner.type)))
                for o in updated:
                    part = body.get(o.operands[1][0])
                    moved += values_bytes(shapes(part.type)) if part else 0
                    moved -= values_bytes(shapes(o.type))
            elif (place := int(inner.inside)) < len(operands):
                moved += size(*operands[place])
        return max(0, moved + written)


def collective_role(
    module: Module, name: str, op: Instruction
) -> tuple[str, str, Instruction | None]:
    """Return whether an operation starts a collective, awaits one (``done``), or runs one to its end
    (``whole``); a key that start and done share; and the collective.

    On GPUs these are operations of their own. A TPU starts and ends a collective in fusions, and
    continues it in the fusions between, where matmuls run; or it calls a computation that its SparseCores
    run (``call-start``).
    """
    if op.opcode.removesuffix("-start") in COLLECTIVES:
        return "start" if op.opcode.endswith("-start") else "whole", name, op
    if op.opcode.endswith("-done"):
        return "done", op.operands[0][0], None
    body = op.called("calls", "to_apply")[0] if op.opcode in _CARRIERS else ""
    inner = next(
        (o for o in module.computations.get(body, {}).values() if o.opcode in COLLECTIVES), None
    )
    if inner is None:
        return "", name, None
    if op.opcode != "fusion":
        return "start", name, inner
    channel = "".join(re.findall(r"channel_id=\d+", inner.attrs))
    root = module.computations[body][module.roots[body]].attrs
    if "AsyncCollectiveStart" in root:
        return "start", channel, inner
    if "AsyncCollectiveDone" in root:
        return "done", channel, None
    return ("", name, None) if body in module.echoes else ("whole", name, inner)


def _short(op: Instruction, term: str) -> str:
    """Name an operation for a picture, by its named scope."""
    unnamed = re.compile(r"[()\[\]]|body|closed_call|checkpoint")
    parts = [p for p in op.scope.split("/") if p and not unnamed.search(p)]
    return parts[-2] if term and len(parts) > 1 else (parts[-1] if parts else op.opcode)


def _iterations(module: Module, comp: str, loop: Instruction) -> int:
    """Return a loop's trip count; where only data decide, 1, and 0 for the loop over experts' overflow."""
    trips = module.trips(comp, loop)
    return int(f"/{grouped.OVERFLOW}/" not in loop.scope) if trips is None else trips or 1


def all_flops(module: Module) -> Callable[[str, Instruction | None], float]:
    """Return `flops_in` for all matmuls of a program, in kernels too."""
    return flops_in(
        module, functools.partial(product_flops, module), functools.partial(_iterations, module)
    )
