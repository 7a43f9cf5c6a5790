"""Which plan for a model on a machine: enumerates, prices, checks, ranks, and explains why the others lost.

Every mesh that divides the devices is priced with the variants that could win: ZeRO, microbatches, schedules.
The closed form of `time` ranks them without recomputation, those that may be among the fastest
(`least_seconds`). From the first one on,
`Resolved.check` refuses what is not legal, and `memory` finds how much recomputation makes a plan fit: with
that it takes its place in the rank again, and if it is still the first, its `traffic` is priced.
"""

import contextlib
import dataclasses
import functools
import heapq
import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from llmpar.plan.backend import KERNELS_OF_JAX
from llmpar.plan.checks import why_not_run, widths_cut_by_tp
from llmpar.plan.mesh_shape import AXES, MeshShape, divisors, parse_mesh
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import Plan, Resolved
from llmpar.plan.presets import preset
from llmpar.predict import hardware, memory, parameters, workload
from llmpar.predict.digits import about
from llmpar.predict.hardware import GIB, Chip
from llmpar.predict.time import ACCUMULATION, Time, beside_flops, least_time, step_time
from llmpar.predict.traffic import WEIGHT_LINKS

FREE_SHARE = 0.08
"""Of the memory that JAX takes, what a plan must leave free: the formula of temporaries is an estimate, by
4 % off in the middle for GPUs, and a sixth too much for TPUs (`tests/compiled.md`)."""
MEMORY_ERROR = 0.15
"""What is estimated of a plan's memory is off by no more in 82 of 84 plans that were compiled for H100, v5e
and v5p, and in 209 of 237 compiled plans, other GPUs and all (`tests/compiled.md`)."""
GPU_SHARE = 0.95
"""Of a GPU's memory, what JAX takes where XLA_CLIENT_MEM_FRACTION is set to it."""
SAME = 0.005
"""Times that differ by less are the same: no model of time is that good."""
ERROR = 0.10
"""By how much a step's time is off in the mean over the published runs that its constants were fitted on."""
UNSEEN_ERROR = {"dense": 0.10, "experts": 0.14, "adapters": 0.08, "cards": 0.10}
"""The same by kind (`error_kind`), over sources that were left out of the fit, each counted once: what a
time is worth on another cluster (`tests/measured.md`). Cards have that of dense models: one framework's runs
on them are known, and are off by less."""
CARD_BYTES_PER_S = 100e9
"""Of its fast links: a GPU below it is on PCIe."""
_NEAR = 1.03
"""A plan that the closed form ranks by so much behind another may be faster when its `traffic` is priced."""
_BEHIND = (1 + SAME) * _NEAR
"""A plan whose least time is so many times the best's is behind it in `ranked`."""
_PRICED = 12
"""Of the plans of a mesh that fit, in the order of their time, how many are priced by their `traffic`."""
_REJECTED = 12
"""Of the meshes on which nothing fits, and of those that do not divide the batch, how many are listed."""
_MANY_CHUNKS = 4
"""Of a stage of an interleaved pipeline, at most."""
BAND = (0.2, 0.4, 0.6)
"""Shares of peak at which a step is estimated as well, until kernels were measured on its chip."""
UNPRICED = Time(math.inf, {})
Fields = dict[str, Any]
"""Of a plan, by name."""
PUE = 1.2
"""Power of a machine room over that of its chips: assumed."""


def error_kind(config: ModelConfig, chip: Chip) -> str:
    """Name the kind of run, each of which has an error of its own: adapters, experts, cards without fast
    links, and dense models elsewhere."""
    of_pcie = chip.link == "switch" and chip.link_bytes_per_s < CARD_BYTES_PER_S
    kinds = {
        "adapters": config.lora,
        "experts": config.experts,
        "cards": of_pcie and chip.family != "cpu",
    }
    return next((kind for kind, is_one in kinds.items() if is_one), "dense")


@dataclasses.dataclass(frozen=True)
class Question:
    """What is to be decided."""

    config: ModelConfig
    chip: Chip
    num_devices: int
    batch_size: int
    seq_len: int
    # fields of the plan and axes
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    model: str = ""  # how the user named it, for the lines that train and compile
    share: float = GPU_SHARE  # of a GPU's memory, what JAX takes
    local_steps: int = 0  # of workers, the ranks of dp, between two outer steps; 0: no workers

    def on(self, mesh: MeshShape) -> "Question":
        """Return the question of one mesh."""
        return dataclasses.replace(self, fixed=self.fixed | mesh.user_sizes)

    @property
    def taken(self) -> float:
        """Of a device's memory, what JAX takes: of a GPU's the share that is set, else all."""
        return self.share if self.platform.startswith("gpu") else 1.0

    @property
    def capacity_bytes(self) -> float:
        """Bytes that a program may take on a device, by prediction: what JAX takes, less `FREE_SHARE`."""
        return self.chip.usable_hbm_gib * GIB * self.taken * (1 - FREE_SHARE)

    @property
    def capacity_sum(self) -> str:
        """The capacity, and what it is made of."""
        source = f"{hardware.MEMORY_SHARES[0]}={self.share:g}"
        whole = self.chip.usable_hbm_gib
        source = "JAX's default" if self.share == self.chip.memory_share else source
        part = (
            f"{self.taken:.0%} of {whole:.1f} by {source}" if self.taken < 1 else f"all {whole:.1f}"
        )
        return (
            f"a program may take {self.capacity_bytes / GIB:.1f} GiB: {part}, less {FREE_SHARE:.0%}"
        )

    @property
    def platform(self) -> str:
        """JAX's name of the platform, with the maker of a GPU that is not NVIDIA's, or the compute capability
        of one that lacks something."""
        if self.chip.family == "cpu":
            return "cpu"
        card = (hardware.MAKERS | hardware.CAPABILITY).get(self.chip.family, "")
        return "tpu" if self.chip.link == "torus" else f"gpu {card}".strip()

    @property
    def time_error(self) -> float:
        """By how much a step's time is off on a cluster that no fit saw, for this kind of model."""
        return UNSEEN_ERROR[error_kind(self.config, self.chip)]

    def band(self, value: float) -> list[float]:
        """Return the limits of a predicted time or rate."""
        return [value * (1 - self.time_error), value * (1 + self.time_error)]

    def run(self, plan: Plan) -> workload.Run:
        """Return what a plan computes and moves."""
        return workload.of_plan(
            self.config, self.resolved(plan, None), self.chip, self.batch_size, self.seq_len
        )

    def resolved(self, plan: Plan, devices: str | None) -> Resolved:
        """Return the plan for the model on devices; on none in particular for what its fields decide."""
        if self.local_steps and plan.mesh.dp < 2:
            raise ValueError(
                "local steps are of as many workers as dp has ranks, and it has 1; use dp=2 or more"
            )
        return _resolved(plan, self.config, devices)


@functools.lru_cache(maxsize=4096)
def _resolved(plan: Plan, config: ModelConfig, devices: str | None) -> Resolved:
    """Keep what was decided of the plans that are asked about again."""
    return plan.resolve(config, devices)


@dataclasses.dataclass
class Candidate:
    """One plan for the step, priced."""

    plan: Plan
    time: Time
    # by part: `memory.parts_bytes`
    memory_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    why_not: str = ""
    # slower ones, left out unless it is refused
    instead: list["Candidate"] = dataclasses.field(default_factory=list, compare=False)

    @property
    def mesh(self) -> MeshShape:
        return self.plan.mesh

    @property
    def total_bytes(self) -> float:
        """Bytes on a device."""
        return self.memory_bytes.get("total", math.inf)

    @property
    def estimated_bytes(self) -> float:
        """Of these, what `memory.temp_bytes` estimates."""
        return sum(
            self.memory_bytes.get(x, 0.0) for x in ("grads", "unreduced", "copies", "activations")
        )

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by part, as `memory.named` calls them."""
        return memory.named(self.memory_bytes)


class Verdict(NamedTuple):
    """Whether a plan fits, and the bytes that decide it. ``near``: at the edge, by how little."""

    words: str  # fits, at the edge, does not fit
    near: str
    low_bytes: float  # the total, were the estimate `MEMORY_ERROR` too high
    total_bytes: float
    high_bytes: float
    capacity_bytes: float


def memory_verdict(q: Question, one: Candidate) -> Verdict:
    """Say whether a plan fits; at the edge: by less than its estimated part may be off (`MEMORY_ERROR`)."""
    total, error, capacity = one.total_bytes, MEMORY_ERROR * one.estimated_bytes, q.capacity_bytes
    if total > capacity:
        words, near = "does not fit", ""
    elif total + error <= capacity:
        words, near = "fits", ""
    else:
        free = f"{(capacity - total) / GIB:.1f} GiB free"
        words = "at the edge"
        near = f"{free}, and the estimate is ± {error / GIB:.1f} GiB"
    return Verdict(words, near, total - error, total, total + error, capacity)


def published_runs() -> list[tuple[dict[str, Any], Question, MeshShape]]:
    """List published runs that people know: what was measured and by whom, as a question, and the mesh."""
    sizes = lambda row: (row["devices"], row["batch_size"], row["seq_len"])
    what = lambda row: (preset(row["model"]), hardware.chip(row["chip"]), *sizes(row))
    rows = hardware.package_table("planner/published_runs.toml")["run"]
    return [
        (row, Question(*what(row), model=row["model"]), parse_mesh(row["mesh"])) for row in rows
    ]


# ------------------------------------------------------------------------------------------- candidates


def meshes(q: Question) -> Iterator[MeshShape]:
    """Enumerate the meshes of all devices whose axes the model's dims and the machine's links allow
    (`unsuited`); axes that are given are what they are, but for more stages than layers."""
    fixed = {a: v for a, v in q.fixed.items() if a in AXES}
    all_sizes = divisors(q.num_devices)
    sizes = {
        a: [v for v in all_sizes if not unsuited(q, a, v)] for a in ("tp", "pp", "ep", "sp", "dp")
    }
    sizes |= {a: [v] for a, v in fixed.items() if a in sizes}
    sizes["pp"] = [p for p in sizes["pp"] if p <= q.config.num_layers]
    return (mesh for mesh in _cuts(q, sizes) if fixed.get("fsdp", mesh.fsdp) == mesh.fsdp)


def _cuts(q: Question, sizes: dict[str, list[int]]) -> Iterator[MeshShape]:
    """Enumerate the meshes of all devices with one of these sizes on each axis; fsdp gets the rest."""
    for numbers in itertools.product(*sizes.values()):
        fsdp, rest = divmod(q.num_devices, math.prod(numbers))
        if not rest:
            yield MeshShape(fsdp=fsdp, **dict(zip(sizes, numbers, strict=True)))  # type: ignore[arg-type]


def unsuited(q: Question, axis: str, n: int) -> str:
    """Say why no mesh that is searched has ``n`` ranks along an axis; "" where one may. tp stays within a
    node or along one axis of a torus, and a rank of sp has no less than 4,096 positions: `on_mesh` answers
    such a mesh all the same."""
    c = q.config
    if axis == "tp":
        node = q.chip.per_device().node_size if q.chip.link == "switch" else 16
        for what, size in [x for _, block in c.blocks for x in widths_cut_by_tp(block).items()]:
            if size % n:
                return f"tp={n} does not divide {what} {size}"
        for heads in {block.num_kv_heads for _, block in c.blocks if block.mixer == "attention"}:
            if heads % n and n % heads:
                return f"tp={n} neither divides {heads} KV heads nor is a multiple of them"
        if n > node:
            return f"tp={n} is more than the {node} devices with fast links"
    if axis == "pp" and n > min(c.num_layers, 64):
        return f"pp={n} is more than " + (
            f"{c.num_layers} layers" if n > c.num_layers else "64 stages"
        )
    if axis == "ep" and (c.experts.num_experts if c.experts else 1) % n:
        return f"ep={n} does not divide the experts"
    if axis == "sp" and n > 1 and q.seq_len // n < 4096:
        return f"sp={n} leaves a rank less than 4,096 positions"
    return ""


def every_mesh(q: Question) -> Iterator[tuple[MeshShape, str]]:
    """Enumerate the splits of the devices over the axes that the model has, whatever axes are given: each
    with why it is left out of the search or cannot be, in one clause, or with "": `on_mesh` answers it."""
    axes = [axis for axis in AXES if axis != "fsdp" and (axis != "ep" or q.config.experts)]
    sizes = dict.fromkeys(axes, divisors(q.num_devices))
    reason = {(axis, size): unsuited(q, axis, size) for axis in axes for size in sizes[axis]}
    for mesh in _cuts(q, sizes):
        why = next((reason[one] for one in mesh.user_sizes.items() if reason.get(one)), "")
        yield mesh, why or _illegal(q, mesh).partition(";")[0]


def _illegal(q: Question, mesh: MeshShape) -> str:
    """Say why a mesh cannot be, in the words of `Resolved.check`; "" where it can."""
    refusals, own = (
        list[str](),
        {name: value for name, value in q.fixed.items() if name not in AXES},
    )
    q = dataclasses.replace(q, fixed=own | mesh.user_sizes)
    for fields in itertools.chain([{"mesh": mesh} | own], itertools.islice(variants(q, mesh), 2)):
        try:
            q.resolved(Plan(**fields), None).check(q.batch_size, q.seq_len)
            return ""
        except ValueError as refusal:
            refusals.append(str(refusal))
    return refusals[0]


def variants(q: Question, mesh: MeshShape) -> Iterator[Fields]:
    """Enumerate the fields of plans on a mesh that could win, those of recomputation left out."""
    given = {k: v for k, v in q.fixed.items() if k not in AXES}
    base: Fields = {"mesh": mesh, "dtype": "bfloat16"}
    # of latent attention that runs, what `checks.why_not_run` lets through
    latent = q.config.runs and any(block.has_latent_attention for _, block in q.config.blocks)
    if mesh.tp > 1 and q.seq_len % (mesh.sp * mesh.tp) == 0:
        base |= {"tp_sequence": True, "tp_comm_overlap": not latent}
    states: list[Fields] = [{}]
    if mesh.fsdp * mesh.ep * mesh.sp > 1:
        states += [{"zero": 1}, {"reshard_after_forward": False}]
    sequences: list[Fields] = [{}]
    if mesh.sp > 1:
        apart = 1 if latent else math.gcd(q.config.exchanged_heads(mesh.tp)[1], mesh.sp)
        sequences += [{"context_parallel": "gather"}]
        # balanced in every order, and in this one most tiles are whole or empty
        if apart == mesh.sp:
            sequences += [{"context_parallel": "ulysses", "sequence_order": "contiguous"}]
        elif apart > 1:
            sequences += [{"context_parallel": "usp"}]
        if any(block.window for _, block in q.config.blocks):  # its keys make fewer hops
            sequences += [{"sequence_order": "contiguous"}]
    if q.config.runs and q.config.has_states and mesh.sp > 1:
        sequences = [one | {"sequence_order": "contiguous"} for one in sequences]
    if given.get("attention_kernel") in KERNELS_OF_JAX:  # no log of sums, which a ring needs
        rings = "ring", "usp"
        sequences = [x for x in sequences if x.get("context_parallel", "ring") not in rings] or [{}]
    if strategy := given.get("context_parallel"):
        sequences = [
            one for one in sequences if one.get("context_parallel", "ring") == strategy
        ] or [{}]
    orders: list[Fields] = [{}]
    if mesh.pp > 1 and not {"schedule", "virtual_stages"} & set(given):
        many = [v for v in (2, _MANY_CHUNKS) if q.config.num_layers >= v * mesh.pp]
        orders = [
            {"schedule": "1f1b"},
            *({"schedule": "interleaved", "virtual_stages": v} for v in many),
        ]
    rows = q.batch_size // (mesh.dp * mesh.fsdp * mesh.ep)
    counts = [m for m in divisors(rows) if m <= 512 and (mesh.pp == 1 or m >= mesh.pp // 2)]
    if "microbatches" in given:
        counts = [m for m in (given["microbatches"],) if rows % m == 0]
    if not counts and set(AXES) <= q.fixed.keys():  # a mesh that is asked for
        counts = divisors(rows)[-1:]
    counts = sorted(counts, reverse=mesh.pp > 1)[:6]
    for m, order, state, sequence in itertools.product(counts, orders, states, sequences):
        if "virtual_stages" not in order or m % mesh.pp == 0:
            yield base | state | sequence | order | {"microbatches": m} | given


_OF_ZERO = WEIGHT_LINKS, ACCUMULATION
"""Terms that depend on what ZeRO cuts."""


@dataclasses.dataclass
class VariantGroup:
    """The variants of a mesh, or of these those with one number of microbatches, or of these those that ZeRO
    cuts alike.

    Attributes:
        alike: how many of the two all share.
        least_s: seconds that no variant beats.
        cannot: of the mesh, by ZeRO stage and strategy along the sequence, whether weights and optimizer
            cannot be cut so, or alone are larger than the memory.
        runs: of the mesh, of plans that differ in microbatches alone.
    """

    mesh: MeshShape
    variants: list[Fields]
    alike: int = 0
    least_s: float = 0.0
    cannot: dict[tuple[Any, Any], bool] = dataclasses.field(default_factory=dict)
    runs: dict[Any, workload.Run] = dataclasses.field(default_factory=dict)

    def run(self, q: Question, fields: Fields, count: int = 0, **own: Any) -> workload.Run:
        """Return the run of a variant, or of one that differs in the ``count`` of microbatches and its
        ``own``. Raises ValueError where an order that is given, or Muon's layers, do not suit the mesh."""
        alone = () if "schedule" in q.fixed else ("microbatches",)
        alike = tuple(item for item in fields.items() if item[0] not in alone)
        run = self.runs[alike] = self.runs.get(alike) or q.run(Plan(**fields))
        own["microbatches"] = m = count or fields["microbatches"]
        return dataclasses.replace(run, rows=max(1, q.batch_size // run.data_ranks // m), **own)

    def is_out(self, q: Question, fields: Fields) -> bool:
        """Tell whether a variant is left out: an order that is given, or Muon's layers, do not suit the mesh,
        or it is cut as another whose weights and optimizer alone do not fit, and which will say why."""
        if (cut := (fields.get("zero"), fields.get("context_parallel"))) in self.cannot:
            return self.cannot[cut]
        try:
            run: Any = self.run(q, fields)
        except ValueError:
            return True
        self.cannot[cut] = True
        with contextlib.suppress(ValueError):  # `least_recompute` says why
            self.cannot[cut] = q.capacity_bytes < sum(
                memory.argument_bytes(run.plan, q.batch_size, q.seq_len).values()
            )
        return False

    def bounded(self, q: Question) -> "VariantGroup":
        """Return the group with its least time (`time.least_time`): of ZeRO's variants together without what
        they send beside layers, and of a mesh with the batch computed at once."""
        many = 1 if self.alike else max(x["microbatches"] for x in self.variants)
        layers = q.config.num_layers
        apart = _OF_ZERO if self.alike < 2 else ()
        with contextlib.suppress(ValueError):  # an order that is given does not suit this mesh
            # the busiest rank of sp takes no less than the mean
            run = self.run(q, self.variants[0], int(not self.alike), balanced=True)
            last = q.config.count_kinds(layers - run.chunk_layers[-1], layers)
            chunks = max(x.get("virtual_stages") or run.virtual_stages for x in self.variants)
            most = dataclasses.replace(run, virtual_stages=chunks)
            self.least_s = least_time(most, last, apart, many)
        return self

    def parts(self, q: Question) -> "list[VariantGroup]":
        """Return the variants by what not all share yet, each part with its least time; by what ZeRO cuts
        those that are not left out."""
        names = ("zero", "reshard_after_forward") if self.alike else ("microbatches",)
        parts = dict[Any, list[Fields]]()
        for fields in self.variants:
            if not self.alike or not self.is_out(q, fields):
                parts.setdefault(tuple(map(fields.get, names)), []).append(fields)
        part = functools.partial(dataclasses.replace, self, alike=self.alike + 1, least_s=0.0)
        return [part(variants=variants).bounded(q) for variants in parts.values()]


def of_mesh(q: Question, mesh: MeshShape) -> list[VariantGroup]:
    """Return the variants of a mesh with their least time; none where too few rows fill its pipeline."""
    every = list(variants(q, mesh))
    return [VariantGroup(mesh, every).bounded(q)] if every else []


def priced(q: Question, group: VariantGroup) -> list[Candidate]:
    """Price the variants of a group, by the closed form of their time and without recomputation. Gathered
    keys take more memory than a ring's, so where they are no faster than the ring before them they wait for
    it to be refused."""
    candidates = list[Candidate]()
    for fields in group.variants:
        plan = Plan(**fields)
        try:
            one = Candidate(plan, step_time(group.run(q, fields), simulate=False))
        except ValueError:  # what is given, an order or Muon's layers, does not suit this mesh
            continue
        rings = (x for x in reversed(candidates) if x.plan.context_parallel == "ring")
        ring = next(rings, None) if plan.context_parallel == "gather" else None
        waits = ring and one.time.step_s >= ring.time.step_s
        (ring.instead if ring and waits else candidates).append(one)
    return candidates


def least_recompute(q: Question, plan: Plan, than: float = math.inf) -> Candidate:
    """Return the plan with the least recomputation, from its own on, with which its program fits: of a layer
    first, then of the loss, whose pieces are computed again. Where none fits, what it holds by part, unless
    that is no less ``than`` another's."""
    policies, num_pieces = workload.POLICIES, [plan.loss_chunks]
    if "loss_chunks" not in q.fixed and q.seq_len // plan.mesh.sp % 8 == 0:
        num_pieces = [1, 8]
    later = policies[policies.index(plan.remat) :] if "remat" not in q.fixed else (plan.remat,)

    @functools.cache  # the last policy is asked about twice
    def total(remat: Any, pieces: int) -> int:
        return memory.total_bytes(
            dataclasses.replace(runs, remat=remat, loss_chunks=pieces), *sizes
        )

    sizes = q.batch_size, q.seq_len, q.local_steps > 0
    try:
        q.resolved(plan, None).check(q.batch_size, q.seq_len)
        runs = q.resolved(dataclasses.replace(plan, remat=later[-1]), q.platform)
        if runs.remat != later[-1]:  # of some pipelines it decides nothing
            later = (runs.remat,)
        least = min(((later[-1], n) for n in num_pieces), key=lambda x: total(*x))
        if fits := total(*least) <= q.capacity_bytes:
            each = itertools.product(later, num_pieces)
            least = next(x for x in each if total(*x) <= q.capacity_bytes)
        elif total(*least) >= than:
            return Candidate(plan, UNPRICED, {"total": total(*least)}, "holds more")
        own = dict(zip(("remat", "loss_chunks"), least, strict=True))
        parts = memory.parts_bytes(dataclasses.replace(runs, **own), *sizes)
    except ValueError as refusal:
        return Candidate(plan, UNPRICED, why_not=str(refusal))
    one = Candidate(dataclasses.replace(plan, **own), UNPRICED, parts)
    largest, size = max(one.parts.items(), key=lambda part: part[1])
    if not fits:
        one.why_not = f"holds {one.total_bytes / GIB:.1f} GiB > {q.capacity_bytes / GIB:.1f} GiB"
        one.why_not += f", of which {largest} {size / GIB:.1f}"
    return one


# ----------------------------------------------------------------------------------------------- the answer


class NoMeshFits(ValueError):
    """The model is too large for these devices on every mesh."""


@dataclasses.dataclass
class Answer:
    """What was decided: the best plan of each mesh in order, and why other meshes cannot be."""

    question: Question
    plans: list[Candidate]
    rejected: list[dict[str, str]]  # the mesh, why, and the one change with which it can be
    num_priced: int


def decide(q: Question, keep: int = 5) -> Answer:
    """Answer the question. Raises ValueError with a number of devices that would do where nothing fits."""
    _refuse(q)
    groups, impossible = list[VariantGroup](), list[dict[str, str]]()
    for mesh in meshes(q):
        ranks = mesh.dp * mesh.fsdp * mesh.ep
        if q.batch_size % ranks:
            row = {
                "mesh": str(mesh),
                "why": f"batch {q.batch_size} is no multiple of dp·fsdp·ep = {ranks}",
                "change": f"batch_size={math.ceil(q.batch_size / ranks) * ranks}",
            }
            impossible.append(row)
            continue
        groups += of_mesh(q, mesh)
    search = Search(q, groups, keep).run()
    plans = ranked(search.best.values())[:keep]
    if not plans:
        raise NoMeshFits(nowhere(q, search.failed))
    losers = [one for mesh, one in search.failed.items() if mesh not in search.best][:_REJECTED]
    rejected = [
        {"mesh": str(x.plan.mesh), "why": x.why_not, "change": rescue(q, x)} for x in losers
    ]
    return Answer(q, plans, rejected + impossible[:_REJECTED], search.num_priced)


def fastest(candidates: Collection[Candidate]) -> list[Candidate]:
    """Return those that are as fast as the fastest, but for `SAME`."""
    least = min((one.time.step_s for one in candidates), default=0.0)
    return [one for one in candidates if one.time.step_s <= least * (1 + SAME)]


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort by time, the simpler mesh first where it is as fast as the fastest, but for `SAME`, and no other
    is both faster and smaller in memory."""
    candidates = list(candidates)
    same = fastest(candidates)

    def order(one: Candidate) -> tuple[float, bool, int, float]:
        if one not in same:
            return one.time.step_s, False, 0, 0.0
        fuller = [one.total_bytes > x.total_bytes for x in same if x.time.step_s < one.time.step_s]
        axes = sum(n > 1 for n in one.plan.mesh.sizes.values())
        return 0.0, any(fuller), axes, one.time.step_s

    return sorted(candidates, key=order)


def on_mesh(q: Question, mesh: MeshShape) -> Candidate:
    """Return the fastest plan of one mesh, with the other fields of ``q.fixed`` and the planner's choice of
    the rest: what `decide` answers where all axes are given. Where none fits, the one with the least memory,
    with its ``why_not``, priced all the same. `Resolved.check`'s ValueError where the mesh cannot be."""
    if mesh.size != q.num_devices:
        raise ValueError(f"mesh '{mesh}' has {mesh.size} devices, and the question {q.num_devices}")
    _known(q)
    q = q.on(mesh)
    search = Search(q, of_mesh(q, mesh)).run()
    if search.best:
        return search.best[mesh]
    if refusal := _illegal(q, mesh):
        raise ValueError(refusal)
    tried = list(search.failed.values())
    q = dataclasses.replace(q, fixed={"remat": "block"} | q.fixed)
    if all(one.total_bytes - one.estimated_bytes > q.capacity_bytes for one in tried):
        # of those whose weights and moments are too large, one was tried
        fields = list(variants(q, mesh))
        ends = {end(one["microbatches"] for one in fields) for end in (min, max)}
        tried += [least_recompute(q, Plan(**one)) for one in fields if one["microbatches"] in ends]
    one = min(tried, key=lambda one: one.total_bytes)
    if not one.memory_bytes:  # whatever it would hold, these devices do not run it
        raise ValueError(one.why_not)
    plan = q.resolved(one.plan, None).effective
    return Candidate(plan, step_time(q.run(plan)), one.memory_bytes, one.why_not)


@dataclasses.dataclass
class Search:
    """Looks for the fastest plan of each mesh that is among the fastest.

    Attributes:
        groups: of all meshes: those whose least time is among the fastest are priced.
        enough: of meshes whose fastest plan is wanted, the fastest of all first.
        best: of each mesh the fastest plan of those that were priced by their `traffic`.
        failed: of each mesh of which no plan fits, the one that takes the least memory of those tried.
        num_priced: plans that were priced by the closed form.
    """

    q: Question
    groups: list[VariantGroup]
    enough: int = 1
    best: dict[MeshShape, Candidate] = dataclasses.field(default_factory=dict)
    failed: dict[MeshShape, Candidate] = dataclasses.field(default_factory=dict)
    num_priced: int = 0

    def __post_init__(self) -> None:
        self.queue: list[tuple[float, int, VariantGroup | Candidate]] = []
        self.number, self.exact = itertools.count(), Counter[MeshShape]()
        for group in self.groups:
            self._wait(group.least_s, group)

    def run(self) -> "Search":
        """Search to the end."""
        for _ in self.steps():
            pass
        return self

    def steps(self) -> Iterator[None]:
        """Search in portions: the plan, or the group of plans, of the least time first."""
        limit = math.inf
        while self.queue:
            least_s, _, one = heapq.heappop(self.queue)
            if limit * _BEHIND <= least_s:
                # not checked: these may fit
                for other in (one, *(left for _, _, left in self.queue)):
                    self.failed.pop(other.mesh, None)
                break
            if isinstance(one, VariantGroup):
                self._divide(one)
            elif not self._is_behind(one) and (one.memory_bytes or self._fits(one)):
                self._price(one)
                times = sorted(other.time.step_s for other in self.best.values())
                limit = times[self.enough - 1] if len(times) >= self.enough else math.inf
            yield

    def _wait(self, least_s: float, one: VariantGroup | Candidate) -> None:
        heapq.heappush(self.queue, (least_s, next(self.number), one))

    def _divide(self, group: VariantGroup) -> None:
        """Put a group's parts, or its plans, in its place."""
        if group.alike < 2:
            for part in group.parts(self.q):
                self._wait(part.least_s, part)
            return
        for plan in (plans := priced(self.q, group)):
            self._wait(plan.time.step_s, plan)
        self.num_priced += len(plans)

    def _is_behind(self, one: Candidate) -> bool:
        """Tell whether a plan is not among the first of its mesh."""
        best = self.best.get(one.mesh)
        too_slow = best is not None and best.time.step_s * _NEAR <= one.time.step_s
        return too_slow or self.exact[one.mesh] == _PRICED

    def _fits(self, one: Candidate) -> bool:
        """Tell whether a plan fits as it is. Where it fits with more recomputation, that plan waits for its
        time; where it does not, those that waited for it (`Candidate.instead`) do."""
        before = self.failed.get(one.mesh, Candidate(one.plan, UNPRICED))
        plan = least_recompute(self.q, one.plan, before.total_bytes)
        if not plan.why_not:
            one.memory_bytes = plan.memory_bytes
            if plan.plan == one.plan:
                return True
            plan.time = step_time(self.q.run(plan.plan), simulate=False)
            self._wait(plan.time.step_s, plan)
            return False
        for other in () if plan.memory_bytes else one.instead:
            self._wait(other.time.step_s, other)
        if one.mesh not in self.failed or plan.total_bytes < before.total_bytes:
            self.failed[one.mesh] = plan
        return False

    def _price(self, one: Candidate) -> None:
        """Price a plan that fits by its `traffic`."""
        self.exact[one.mesh] += 1
        plan = self.q.resolved(one.plan, None).effective
        one = Candidate(plan, step_time(self.q.run(plan)), one.memory_bytes)
        if one.mesh not in self.best or one.time.step_s < self.best[one.mesh].time.step_s:
            self.best[one.mesh] = one


def _known(q: Question) -> None:
    """Refuse fields that no plan has."""
    if unknown := sorted(set(q.fixed) - {*AXES, *(f.name for f in dataclasses.fields(Plan))}):
        raise ValueError(f"a plan has no field {', '.join(unknown)}")


def _refuse(q: Question) -> None:
    """Refuse questions that no mesh answers."""
    c, axes = q.config, {a: v for a, v in q.fixed.items() if a in AXES}
    cut, text = (
        math.prod(axes.values()),
        " ".join(f"{a}={v}" for a, v in axes.items()) or "free axes",
    )
    if q.num_devices % cut:
        why = f"{q.num_devices} devices cannot be cut by '{text}', {cut} devices"
        raise ValueError(f"{why}; use a multiple of {cut}, or fix fewer axes")
    _known(q)
    # refuses one worker
    q.resolved(Plan(MeshShape(dp=axes.get("dp", 2))), None)
    if not c.experts and axes.get("ep", 1) > 1:
        raise ValueError(
            f"ep={axes['ep']} deals out experts, and '{c.name}' has none; leave ep out"
        )
    ranks = {mesh.dp * mesh.fsdp * mesh.ep for mesh in meshes(q)}
    if not ranks:
        why = next(why for mesh, why in every_mesh(q) if axes.items() <= mesh.user_sizes.items())
        raise ValueError(
            f"no mesh of {q.num_devices} {q.chip.name} with {text} suits '{c.name}': {why}"
        )
    rows = {q.batch_size // n for n in ranks if q.batch_size % n == 0}
    if (m := q.fixed.get("microbatches", 1)) and rows and all(n % m for n in rows):
        counts = " ".join(map(str, sorted({d for n in rows for d in divisors(n)})[:12]))
        why = f"microbatches={m} divides the sequences of a data rank on no mesh"
        raise ValueError(
            f"{why}: of a batch of {q.batch_size} it gets at most {max(rows)}; use one of {counts}"
        )


def rescue(q: Question, one: Candidate) -> str:
    """Name the single change that would make a plan fit, or the memory that is missing; "" where the plan is
    not legal."""
    if not one.memory_bytes:
        return ""
    changes = single_changes(q, one.plan)
    if fit := first_fit(q, one.plan, changes):
        ((name, value),), total = fit[0].items(), fit[1]
        return f"{name}={value} would hold {total / GIB:.1f} GiB"
    return (
        "none of "
        + ", ".join({name: 0 for change in changes for name in change})
        + (f" alone: it wants {one.total_bytes / q.capacity_bytes:.1f} times the memory")
    )


def single_changes(q: Question, plan: Plan) -> list[Fields]:
    """List fields with which a plan takes less memory, each by itself."""
    rows = q.batch_size // (plan.mesh.dp * plan.mesh.fsdp * plan.mesh.ep)
    fields: Fields = {"remat": "block", "loss_chunks": 8, "zero": 3, "reshard_after_forward": True}
    fields |= {"tp_sequence": True, "stage_saves": "input", "schedule": "1f1b", "ffn_chunks": 8}
    return [
        *({name: value} for name, value in fields.items()),
        *({"microbatches": m} for m in divisors(rows) if m > plan.microbatches),
    ]


def first_fit(q: Question, plan: Plan, changes: list[Fields]) -> tuple[Fields, float] | None:
    """Return the first of these changes with which a plan is legal and fits, and its bytes then."""
    for change in changes:
        if all(getattr(plan, k) == v for k, v in change.items()):
            continue
        try:
            other = q.resolved(dataclasses.replace(plan, **change), None)
            other.check(q.batch_size, q.seq_len)
            runs = q.resolved(other.effective, q.platform)
            total = memory.total_bytes(runs, q.batch_size, q.seq_len, q.local_steps > 0)
        except ValueError:
            continue
        if total <= q.capacity_bytes:
            return change, total
    return None


def nowhere(q: Question, failed: dict[MeshShape, Candidate]) -> str:
    """Word the refusal of a model that fits on no mesh: the least memory that one takes, and the first number
    of devices, of those that were tried, on which one fits."""
    least = min(failed.values(), key=lambda one: one.total_bytes, default=None)
    wants = f"; of those tried {least.plan.mesh} holds least: it {least.why_not}" if least else ""
    if least and not least.memory_bytes:
        wants = f"; {least.plan.mesh} cannot be: {least.why_not}"
    given = " ".join(f"{name}={value}" for name, value in q.fixed.items())
    head = f"'{q.config.name}' fits on no mesh of {q.num_devices} {q.chip.name}" + (
        f" with {given}" * bool(given) + wants
    )
    if given and smallest_fits(dataclasses.replace(q, fixed={})):
        return f"{head}; without {given} it does"
    numbers = list(larger(q))
    for i, many in enumerate(numbers):
        batch = max(q.batch_size, many)
        if smallest_fits(dataclasses.replace(q, num_devices=many, batch_size=batch, fixed={})):
            does = f"without {given} " * bool(given) + f"it does on {many}"
            does += f", with a batch of {batch}" * (batch > q.batch_size)
            return f"{head}; {does}: the first of {', '.join(map(str, numbers[: i + 1]))} that were tried"
    return f"{head}, nor on any number of them that was tried up to {numbers[-1]}"


def larger(q: Question) -> Iterator[int]:
    """Yield numbers of devices to try where those of the question are too few, from the first whose memory
    suffices for the state, cut evenly: four in each octave, and beyond the second doublings."""
    # weights, gradients and two moments in float32; of frozen weights 16 bits
    state = 2.0 * q.config.num_params + 14.0 * parameters.trained_params(q.config)
    many = max(q.num_devices + 1, math.ceil(state / q.capacity_bytes))
    for _ in range(8):
        step = max(1, 2 ** (many.bit_length() - 3))
        many = math.ceil(many / step) * step
        yield many
        many += step
    yield from (2 ** (many.bit_length() + i) for i in range(8))


def smallest_fits(q: Question) -> bool:
    """Tell whether a mesh of fully cut state fits, a sequence at a time and with all recomputed."""
    for mesh in meshes(q):
        rows, rest = divmod(q.batch_size, mesh.fsdp * mesh.ep)
        if mesh.dp == 1 and not rest:
            # none where there are too few rows to fill a pipeline
            for fields in itertools.islice(variants(q, mesh), 1):
                fields |= {"microbatches": rows, "remat": "block"}
                if not least_recompute(q, Plan(**fields)).why_not:
                    return True
    return False


# ------------------------------------------------------------------------------------------------- in words


def document(
    answer: Answer, tokens: float | None = None, price: float | None = None
) -> dict[str, Any]:
    """Return the document of ``llmpar plan --json``. ``tokens``: to train on; ``price``: of a chip and
    hour."""
    q, best = answer.question, answer.plans[0]
    result: dict[str, Any] = {
        "model": q.config.name,
        "chip": q.chip.name,
        "devices": q.num_devices,
        "device": q.chip.device_words,
        "devices_per_chip": q.chip.devices_per_chip,
        "device_gib": q.chip.usable_hbm_gib,
        "machine": machine(q.chip),
        "batch_size": q.batch_size,
        "seq_len": q.seq_len,
        "tokens_per_step": q.batch_size * q.seq_len,
        "room_bytes": q.capacity_bytes,
        "margin": FREE_SHARE,
        "room_is": f"{q.capacity_sum}, since temporaries are an estimate",
        "time_error": q.time_error,
        "mfu_is": f"6N + 12LHQT per token{', 4 for each frozen one of the N' * bool(q.config.lora)},"
        " attention's whole square (Chowdhery et al. 2022)",
        "priced": answer.num_priced,
        "plans": [_row(q, one, answer.plans) for one in answer.plans],
        "rejected": answer.rejected,
        "sensitivity": sensitivity(q, best),
    }
    if tokens:
        result["budget"] = budget(q, best, tokens, price)
    return result


def machine(chip: Chip) -> dict[str, Any]:
    """Return what one device sends, in GB/s one way, inside a node (of a torus on ``each`` link) and beyond
    it, a node's devices, the GiB of a device, and which shares of the two rates a step reaches."""
    one, each = chip.per_device(), " a link" * (chip.link == "torus")
    sizes = {"node_link": one.link_bytes_per_s, "network": one.dcn_bytes_per_s}
    rates = {name: rate / 1e9 for name, rate in sizes.items()}
    reached = {"links_reached": chip.rates.links, "network_reached": chip.rates.network}
    return rates | {"each": each, "node_size": one.node_size, "hbm": chip.usable_hbm_gib} | reached


def _row(q: Question, one: Candidate, plans: list[Candidate]) -> dict[str, Any]:
    run, runs, fit = q.run(one.plan), q.resolved(one.plan, q.platform), memory_verdict(q, one)
    return {
        "mesh": str(one.plan.mesh),
        "attention_kernel": runs.attention_kernel,
        "plan": fields_of(one.plan),
        "fits": fit.words != "does not fit",
        "verdict": fit.words,
        "near": fit.near,
        "memory_bytes": one.memory_bytes,
        "step_s": one.time.step_s,
        "step_s_band": q.band(one.time.step_s),
        "terms": one.time.terms,
        "mfu": one.time.mfu(run),
        "tokens_per_s": run.tokens_per_step / one.time.step_s,
        "bubble_fraction": one.time.terms.get("bubble", 0.0) / one.time.step_s,
        "why": why(one, plans),
        "change": change(one, plans),
        **commands(q, one.plan),
    }


def versus(q: Question, one: Candidate, other: Candidate) -> dict[str, Any]:
    """Compare two plans: signed seconds by term, the largest first, that add up to the difference of their
    steps. Steps that differ by less than the error of this kind (`Question.time_error`) are a tie. What
    breaks it: memory, where that differs by as much, then the fewer axes, then the estimates as they are."""
    names = {*one.time.terms, *other.time.terms}
    more = {x: one.time.terms.get(x, 0.0) - other.time.terms.get(x, 0.0) for x in names}
    lost = one.time.step_s - other.time.step_s
    band = q.time_error
    tie = abs(lost) <= band * min(one.time.step_s, other.time.step_s)
    small, full = sorted(x.total_bytes for x in (one, other))
    alike = full - small <= band * small
    axes = lambda x: sum(n > 1 for n in x.plan.mesh.sizes.values())
    fits = lambda x: memory_verdict(q, x).words != "does not fit"
    ranks = {
        "it fits, and the other does not": lambda x: not fits(x),
        "it is faster": lambda x: 0.0 if tie else x.time.step_s,
        "it holds less": lambda x: 0 if alike else x.total_bytes,
        "it has fewer axes": axes,
        "it may be a little faster": lambda x: x.time.step_s,
    }
    because = next((why for why, rank in ranks.items() if rank(one) != rank(other)), "")
    reason = because or "it is alike"
    better = min((one, other), key=lambda x: [rank(x) for rank in ranks.values()])
    return {
        "plans": [
            {k: value for k, value in _row(q, x, [x]).items() if k not in ("why", "change")}
            for x in (one, other)
        ],
        "difference_s": lost,
        "terms": dict(sorted(more.items(), key=lambda item: (-abs(item[1]), item[0]))),
        "tie": tie,
        "tie_band": band,
        "better": str(better.plan.mesh),
        "because": because,
        "says": "neither fits; " * (not fits(better))
        + (
            f"a tie within {band:.0%}; {better.plan.mesh} {reason.removeprefix('it ')}"
            if tie
            else f"better is {better.plan.mesh}: {because}"
        ),
    }


def commands(q: Question, plan: Plan) -> dict[str, str | None]:
    """Return the commands that train with a plan; None for each that would be refused."""
    if why_not_run(q.resolved(plan, None)):
        return dict.fromkeys(("train", "compile", "launch"))
    whole_chips = q.num_devices % q.chip.devices_per_chip == 0
    # programs of workers are others, in one process
    return {
        "train": None if q.local_steps and launch(q, plan) else command(q, plan, "train"),
        "compile": command(q, plan, "compile") if whole_chips and not q.local_steps else None,
        "launch": None if q.local_steps else launch(q, plan),
    }


def why(one: Candidate, plans: list[Candidate]) -> str:
    """Say why a plan is slower than the first: the term that grew most, in seconds."""
    if one is (best := plans[0]):
        first = all(other.time.step_s >= one.time.step_s for other in plans)
        best_of = (
            "the fastest that fits" if first else f"as fast as any but for {SAME:.1%}, and simpler"
        )
        what = one.why_not or best_of
        name, seconds = max(one.time.terms.items(), key=lambda item: item[1])
        most = f"{what}; most of it is {name}, {about(seconds)} of {about(one.time.step_s)}"
        beside = beside_flops(one.time.terms)
        return f"{most}; no useful FLOPs: {beside}" if beside else most
    lost = one.time.step_s - best.time.step_s
    grown = {k: v - best.time.terms.get(k, 0.0) for k, v in one.time.terms.items()}
    if abs(lost) <= SAME * best.time.step_s:
        return f"as fast as the first: {lost:+.2g} s"
    name = max(grown, key=lambda k: grown[k])
    return f"{lost:+.2g} s: {name} {grown[name]:+.2g} s"


def change(one: Candidate, plans: list[Candidate]) -> str:
    """Name the fastest plan that is faster and one step away, a factor moved between two axes; "": none."""
    for other in plans[: plans.index(one)]:
        a, b = one.plan.mesh.sizes, other.plan.mesh.sizes
        moved = [f"{axis}={b[axis]}" for axis in AXES if a[axis] != b[axis]]
        if len(moved) <= 2:
            return f"{' '.join(moved)} takes {about(other.time.step_s)}"
    return ""


def fields_of(plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan that are not defaults, without the mesh."""
    usual = {f.name: f.default for f in dataclasses.fields(Plan) if f.name != "mesh"}
    return {name: getattr(plan, name) for name in usual if getattr(plan, name) != usual[name]}


def command(q: Question, plan: Plan, name: str) -> str:
    """Write the exact command that trains, or compiles, under a plan."""
    model, *adapters = re.split(r"\s+(?=lora_)", q.model or q.config.name)
    words = [
        "llmpar",
        name,
        "--model",
        shlex.quote(model),
        "--mesh",
        f'"{plan.mesh}"',
        "--batch-size",
        str(q.batch_size),
        "--seq-len",
        str(q.seq_len),
    ]
    fields = fields_of(plan)
    for dim in adapters:
        key, _, value = dim.partition("=")
        words += [f"--{key.replace('_', '-')}", *value.split(",")]
    if name == "compile":
        words[2:2] = ["--target", target(q)]
        usual: Fields = {"dtype": "bfloat16", "remat": "selective", "loss_chunks": 8}
        fields |= {key: getattr(plan, key) for key in usual}
        fields = {key: value for key, value in fields.items() if usual.get(key) != value}
    for key, value in fields.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    if name == "train" and plan.muon != "none":
        words += ["--optimizer", "muon"]
    words += ["--local-steps", str(q.local_steps)] * (name == "train" and q.local_steps > 0)
    if q.platform != "tpu":
        words.insert(0, f"{hardware.MEMORY_SHARES[0]}={q.share:g}")
    return " ".join(words)


def launch(q: Question, plan: Plan) -> str | None:
    """Write the command that writes a job for SLURM; None where one node is enough, or chips have no
    nodes."""
    each = q.chip.node_size * q.chip.devices_per_chip
    if q.chip.link != "switch" or q.num_devices <= each or q.num_devices % each:
        return None
    words = command(q, plan, "train").partition("llmpar ")[2]  # job files set the variables
    nodes = f"{q.num_devices // each}" + f" --gpus-per-node {each}" * (each != 8)
    return f"llmpar launch slurm --nodes {nodes} -- {words} --checkpoints kept"


def target(q: Question) -> str:
    """Name the machine as ``llmpar compile --target`` does."""
    chips = q.num_devices // q.chip.devices_per_chip
    if q.chip.link == "switch":
        near = math.gcd(chips, q.chip.node_size)
        return f"{q.chip.name}:{chips // near}x{near}"
    slices = next(n for n in divisors(chips) if chips // n <= q.chip.node_size)
    sides, left = [], chips // slices
    for axes in range(q.chip.num_axes, 0, -1):
        side = max(d for d in divisors(left) if d <= max(1, round(left ** (1 / axes))))
        sides.append(side)
        left //= side
    return f"{slices}*" * (slices > 1) + f"{q.chip.name}:{'x'.join(map(str, sorted(sides)))}"


def budget(q: Question, best: Candidate, tokens: float, price: float | None) -> dict[str, float]:
    """Return days, energy (chips' power times `PUE`) and cost of training on so many tokens."""
    steps = tokens / (q.batch_size * q.seq_len)
    chips = q.num_devices / q.chip.devices_per_chip
    seconds = steps * best.time.step_s
    result = {"tokens": tokens, "days": seconds / 86_400, "chip_hours": chips * seconds / 3600}
    if watts := hardware.POWER_W.get(q.chip.family):
        result["energy_mwh"] = chips * watts * PUE * seconds / 3600 / 1e6
    return result | ({"cost": price * result["chip_hours"]} if price else {})


def sensitivity(q: Question, best: Candidate) -> list[dict[str, Any]]:
    """Return tokens per second of the same plan if one thing were different."""
    chip, run, different = q.chip, q.run(best.plan), dataclasses.replace
    twice = lambda rate: different(run, chip=different(chip, **{rate: 2 * getattr(chip, rate)}))
    more = different(best.plan, microbatches=2 * best.plan.microbatches)
    cases = {
        "twice the fast links": twice("link_bytes_per_s"),
        "twice the network": twice("dcn_bytes_per_s"),
        "twice the memory's rate": twice("hbm_bytes_per_s"),
        "twice the batch": different(q, batch_size=2 * q.batch_size).run(more),
        "twice the sequence": different(run, seq_len=2 * run.seq_len),
    }
    row, own = (
        hardware.chip(hardware.NEXT_CHIP.get(chip.family, chip.family)),
        hardware.chip(chip.family),
    )
    machine = {name: getattr(chip, name) for name in ("dcn_bytes_per_s", "node_size")}
    row = different(row, **{name: x for name, x in machine.items() if x != getattr(own, name)})
    if row.name != chip.family and row.devices_per_chip == chip.devices_per_chip:
        cases[f"on {row.name}"] = different(run, chip=row)
    for share in BAND if chip.reached is None else ():  # no device has run the kernel that would
        rates_then = different(chip.rates, attention=share)
        cases[f"attention at {share:.0%} of peak"] = different(
            run, chip=different(chip, reached=rates_then)
        )
    rates = {what: other.tokens_per_step / step_time(other).step_s for what, other in cases.items()}
    base = run.tokens_per_step / best.time.step_s
    return [
        {"what": what, "tokens_per_s": rate, "ratio": rate / base} for what, rate in rates.items()
    ]
