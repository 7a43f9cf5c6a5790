"""How long a training step takes, by named terms, from shapes, bytes and what a chip reaches (`Rates`).

A matmul takes its FLOPs at a share of peak, and its operands' bytes at a share of the memory's rate. A
collective takes its bytes at the rate of the slowest level of links that it crosses, and a start. Of a plan
of ours `traffic` lists the collectives, message by message, each with its term; other frameworks' runs, and
thousands of plans that are ranked, have closed forms. Each chunk of a stage gets its own times, and the
schedule's timetable is played with them: what the busiest stage waits is the bubble.
"""

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

from llmpar.plan import schedules
from llmpar.plan.mesh_shape import AXES
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.sequence_order import ring_hops
from llmpar.plan.timetable import makespan
from llmpar.predict import formulas
from llmpar.predict.digits import rounded
from llmpar.predict.hardware import Chip, Rates
from llmpar.predict.muon import muon_flops
from llmpar.predict.traffic import (
    ATTENTION,
    EXPERT_LINKS,
    LATE,
    MATMULS,
    SEQUENCE_LINKS,
    STAGE_LINKS,
    TENSOR_LINKS,
    WEIGHT_LINKS,
    WHOLE_PASS,
    Prediction,
    Transfer,
    routed_width,
    step_traffic,
)
from llmpar.predict.workload import Matmul, Run, Software, message_width

FORWARD_KERNELS, BACKWARD_KERNELS = 35, 60
"""Kernels of a layer of an eager framework, and of its share of the backward pass: counted in Megatron's."""
GRADIENT_AND_COPY_BYTES = 6
"""Of Adam per parameter, besides the state that it reads and writes (`Software.state_bytes`): a gradient in
float32 and a 16-bit copy; where the state has no copy of the weights, both in 16 bits, and the weight."""
CLIPPED_BYTES = 12
"""Read for the norm of float32 gradients, and read and written to scale them."""
LATER = ("h100", "h200", "gh200", "b200", "gb200", "gb300")
"""GPUs after A100, whose matmuls older kernels do not feed (`Software.later_attention`)."""
ROUTED_KERNELS = 40, 45
"""More of them where experts are: router, counts, sorting, and back; backward these, and the matmul twice."""
CAST_KERNELS = 3
"""Kernels that make the 8 bits of a matmul's operand: maximum, scale and cast, or cast and the layout of its
scales. Counted with `ROUTED_KERNELS` in Megatron-Core's layer of experts and Transformer Engine's grouped
linear layer, which launches them, and each matmul, for each expert."""
ADAPTER_KERNELS = 2, 3
"""More of them for each of the two matrices of an adapter: its matmul, and the scale or the sum; backward
two matmuls. Counted in torchtune's `LoRALinear`."""
LAUNCH_S = 20e-6
"""From a launch to the start of its kernel, and from its end back to the host, which only a host that waits
for each kernel sees. NVIDIA shows 20 us for the first (blog on latency in Nsight Systems, 2020) with the
launch's call, which `Rates.host_s` has. Half of it is assumed, and as much to return; not fitted."""
ALIGNED, SCALAR = 8, 1 / 32
"""Elements of 16 bits that the rows of a batched matmul must be a multiple of to run on tensor cores, and
the share of their peak that it reaches elsewhere: half of what CUDA cores do in float32, a sixteenth on A100
(NVIDIA, data sheet; the half is from BigScience's runs with heads of 108)."""
TILES = {False: ((128, 256),), True: ((128, 256), (128, 128))}
"""Rows and columns of a result that one core of a GPU makes at once: of Ampere, and after it."""
SHARED_TILE = {False: 2.0, True: 1.5}
"""The most that dealing them out costs: cores that have no tile share what one sums. With the memory's time
beside the cores' (root of the sum of squares) matmuls are within 7 % of XLA's table of an H100, of 256 to
4,096 rows (openxla/xla, matmul_interpolator_data.h)."""
ACCUMULATED_BYTES = 8
"""Read and written per parameter when a microbatch's gradient is added to a sum in float32."""
SENT_AGAIN = {"none": (0.0, 0.0), "selective": (0.5, 0.0), "ffn": (0.5, 0.0), "block": (0.75, 0.5)}
"""Of what a forward pass moves inside a layer, what our backward pass moves again, with `tp_sequence` (and
to experts) and without: all that enters a part, and with `block` what leaves attention (`traffic.runs`)."""
HEAD_AND_LOSS = "head and loss"
ACCUMULATION = "accumulation"
"""Terms of a step's time."""


@dataclass
class Pass:
    """Seconds of one direction of a layer, by term, and its kernels."""

    terms: dict[str, float] = field(default_factory=dict)
    kernels: float = 0
    apart: Collection[str] = ()  # terms that are left out

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())

    def add(self, name: str, seconds: float) -> None:
        if seconds and name not in self.apart:
            self.terms[name] = self.terms.get(name, 0.0) + seconds

    def take(self, other: "Pass", times: float = 1.0) -> "Pass":
        """Add another's, ``times`` over."""
        for name, seconds in other.terms.items():
            self.add(name, times * seconds)
        self.kernels += times * other.kernels
        return self


@dataclass
class Time:
    """A step's seconds, and the busiest stage's by term, the bubble among them."""

    step_s: float
    terms: dict[str, float]

    def mfu(self, run: Run) -> float:
        """Model FLOPs utilisation, by PaLM's convention (Chowdhery et al. 2022)."""
        peak = run.chip.per_device().flops_per_s * run.mesh.size
        return run.flops() / self.step_s / peak


@functools.lru_cache(maxsize=64)
def _reached(chip: Chip, rates: Rates, num_devices: int) -> tuple[Chip, Chip]:
    """Return a device of the chip, and the chip with the links that large collectives reach, in nodes of as
    many chips as a job takes of each: the most that divide all of its chips."""
    links = chip.reaching(rates)
    chips = max(1, num_devices // chip.devices_per_chip)
    if chip.link == "switch":
        node = next(n for n in range(chip.node_size, 0, -1) if chips % n == 0)
        links = replace(links, node_size=node)
    return chip.per_device(), links


_OF_LAYERS = attrgetter(
    *(
        one.name
        for one in fields(Run)
        if one.name
        not in "mesh microbatches zero reshard schedule virtual_stages again plan".split()
    ),
    *(f"mesh.{axis}" for axis in ("ep", "near", "sp", "ul", "tp", "kv")),
)
"""Of a run, all that its layers depend on, and the ends of its model: not the axes pp, dp and fsdp."""


@functools.lru_cache(maxsize=4096)
def _known(*alike: Any) -> dict[str, Any]:
    """Keep the prices of layers and ends that are alike: plans by the thousand have the same few."""
    return {}


class Clock:
    """Prices what a run does on its chip."""

    def __init__(self, run: Run, own: Rates | None = None, exact: bool = True):
        self.run, self.rates = run, own or run.chip.rates
        self.device, self.links = _reached(run.chip, self.rates, run.mesh.size)
        self.bytes_per_s = self.device.hbm_bytes_per_s * self.rates.memory
        self.inner, apart, sizes = dict[str, int](), 1, run.mesh.user_sizes
        for axis in reversed(AXES):  # neighbours on the last are the nearest
            self.inner[axis], apart = apart, apart * sizes[axis]
        self.ours, self.exact = run.software.name == "llmpar", exact and run.plan is not None
        self.plan: Any = run.plan if exact else None
        # How far apart neighbours are in the groups over which ZeRO cuts.
        self.zero_apart = min(self.inner[a] for a in ("sp", "ep", "fsdp")[not run.zero_over_sp :])
        # Experts are cut over the same without ep, whose ranks are nearer; of others over dp.
        far = "fsdp" if self.ours or run.mesh.fsdp > 1 else "dp"
        self.experts_apart = self.inner["sp" if run.zero_over_sp and run.mesh.sp > 1 else far]
        self.gathers_once = run.zero == 3 and run.mesh.pp > 1 and not run.reshard  # in a step
        pieces = run.plan.ffn_chunks if run.plan else 1
        known = _known(_OF_LAYERS(run), self.rates, self.links, self.exact, pieces)
        if not known:
            prices = self._layer, self._ends, self._layer_weights
            known |= {price.__name__: functools.cache(price) for price in prices}
        self.layer, self.ends, self.layer_weights = known.values()

    # ------------------------------------------------------------------------------------------- prices

    def matmuls(self, shapes: list[Matmul], bits: int = 16) -> float:
        """Return the seconds of matmuls. Fewer bits of an operand make them faster."""
        seconds = 0.0
        faster = self.rates.eight_bit ** math.log2(16 / max(bits, 8))
        faster *= self.rates.four_bit if bits < 8 else 1.0
        for p in shapes:
            share = self.rates.matmuls if p.times == 1 else self.rates.grouped
            rate = self.device.flops_per_s * share * faster
            moved = 2.0 * p.times * (p.rows * p.inner + p.inner * p.out + p.rows * p.out)
            waves = in_waves(self.device.cores, p.rows, p.out, p.times, self.device.date > "2022")
            seconds += math.hypot(p.flops / rate * waves, moved / self.bytes_per_s)
            seconds += self.rates.kernel_s * min(p.times, 8)  # grouped matmuls start together
        return seconds

    def collective(self, kind: str, message: float, group: float, inner: float) -> float:
        """Return the seconds of a collective over ``group`` devices, ``inner`` apart: a start for each
        doubling of the group, and the bytes of ``message`` on the slowest links."""
        if group <= 1 or not message:
            return 0.0
        start = self.rates.start_s * (1 + math.log2(group)) * (2 if kind == "all-reduce" else 1)
        return start + on_links(self.links, kind, message, round(group), round(inner))

    def exposed(self, links_s: float, behind_s: float, overlaps: bool) -> float:
        """Return what of a collective costs time: all of it, or where it runs beside ``behind_s`` of
        computing what is left over, and the share `Rates.shared` that computing loses to it."""
        if not overlaps:
            return links_s
        return max(0.0, links_s - behind_s) + self.rates.shared * min(links_s, behind_s)

    # -------------------------------------------------------------------------------------------- a layer

    def gradients(self, shapes: list[Matmul], bits: int = 16) -> float:
        """Return the seconds of their backward pass: the matmuls of inputs' gradients, and of weights' but
        beside adapters, where only what is thin is trained."""
        inputs = [p._replace(inner=p.out, out=p.inner) for p in shapes]
        return self.matmuls(inputs, bits) + self.learning(shapes, bits)

    def learning(self, shapes: list[Matmul], bits: int = 16) -> float:
        """Return the seconds of the matmuls of weights' gradients."""
        trained = [p for p in shapes if p.thin or not self.run.config.lora]
        return self.matmuls([p._replace(rows=p.inner, inner=p.rows) for p in trained], bits)

    def _layer(self, kind: int, again: float) -> tuple[Pass, Pass]:
        """Price one layer of a kind (`Run.blocks`), of a microbatch, forward and backward, with the exchanges
        inside it; the backward pass begins with ``again`` forward passes, besides what is recomputed."""
        run, rates, fused = self.run, self.rates, self.run.software.fused_attention
        block = run.blocks[kind]
        projections, ffn = run.layer_matmuls(block)
        ffn_s = self.matmuls(ffn, run.bits)
        if fused:
            # a score's exponentials take as long for any width, and so does a TPU's matrix unit
            widths = max(1, block.head_width + block.value_width)
            share = rates.attention * (1 + rates.softmax) / (1 + rates.softmax * 256 / widths)
            share *= run.software.later_attention if run.chip.family in LATER else 1.0
        else:
            share = SCALAR if block.head_width % ALIGNED else rates.matmuls
        scores = run.attention_flops(block) * run.imbalance(block)
        attention = scores / (self.device.flops_per_s * share) + rates.kernel_s * (
            1 if fused else 2
        )
        elementwise = run.elementwise_bytes(block) / self.bytes_per_s + 6 * rates.kernel_s
        adapters = [*run.adapter_matmuls(block).values()]
        matmuls = self.matmuls(projections + adapters, run.bits) + ffn_s
        plain = {MATMULS: matmuls, ATTENTION: attention, "elementwise": elementwise}
        once = sum(plain.values())
        more = [each * len(adapters) for each in ADAPTER_KERNELS]
        routed = self.expert_kernels(block)
        forward = Pass(dict(plain), FORWARD_KERNELS + more[0] + routed[0])
        twice = {name: 2 * seconds for name, seconds in plain.items()}
        backward = Pass(twice, BACKWARD_KERNELS + more[1] + routed[1])
        backward.terms[MATMULS] = self.gradients(projections + ffn + adapters, run.bits)
        if fused:  # five matmuls where forward there are two
            backward.terms[ATTENTION] = 2.5 * attention
        recomputed = {
            "none": 0.0,
            "selective": elementwise / 2
            + (0.0 if fused else attention)
            + run.software.selective_matmuls * matmuls,
            "ffn": elementwise / 2 + ffn_s,
            "block": once,
        }[run.recompute]
        if run.plan and run.plan.ffn_chunks > 1 and run.recompute in ("none", "selective"):
            recomputed += ffn_s  # pieces keep no hidden values
        backward.add("recomputation", recomputed + again * once)
        backward.kernels += forward.kernels * (run.recompute == "block")
        links = {} if self.exact else self.inside(kind, attention)
        repeated = (
            SENT_AGAIN[run.recompute] if self.ours else (float(run.recompute == "block"),) * 2
        )
        for name, (ahead, behind) in links.items():
            sent = again + repeated[not run.tp_sequence and name != EXPERT_LINKS]
            overlaps = {TENSOR_LINKS: run.tp_overlap, EXPERT_LINKS: run.ep_overlap}.get(name, False)
            forward.add(name, self.exposed(ahead, forward.terms[MATMULS], overlaps))
            once_more = sent * ahead  # of ours it travels beside matmuls, too
            beside = behind + once_more * self.ours
            hidden = self.exposed(beside, backward.terms[MATMULS], overlaps)
            backward.add(name, hidden + once_more * (not self.ours))
        return forward, backward

    def inside(self, kind: int, attention: float) -> dict[str, tuple[float, float]]:
        """Return the seconds on links inside a layer, forward and backward, by term, in closed form; a ring's
        beside ``attention``."""
        run, c, mesh = self.run, self.run.blocks[kind], self.run.mesh
        links = dict[str, tuple[float, float]]()
        if mesh.tp > 1:
            one = self.collective(
                "all-reduce", 2.0 * run.tokens * c.width, mesh.tp, self.inner["tp"]
            )
            parts = (c.mixer != "none") + (c.ffn_width > 0)
            links[TENSOR_LINKS] = (parts * one, parts * one)
        if mesh.sp > 1:
            links[SEQUENCE_LINKS] = self.along_sequence(c, attention)
        if c.experts and mesh.ep > 1:
            once = 2 * self.exchange(
                2.0 * (run.tokens if self.ours else run.stream_tokens) * routed_width(c)
            )
            links[EXPERT_LINKS] = (once, once)
        return links

    def expert_kernels(self, block: ModelConfig) -> tuple[float, float]:
        """Return the kernels of a layer's experts, forward and backward: each has its own for each of two
        matmuls, backward for twice as many, and for each operand's cast."""
        if not block.experts:
            return 0.0, 0.0
        own = 2 * block.experts.num_experts / self.run.mesh.ep
        casts = CAST_KERNELS * (self.run.bits < 16)
        return ROUTED_KERNELS[0] + own * (1 + casts), ROUTED_KERNELS[1] + own * (2 + casts)

    def along_sequence(self, block: ModelConfig, attention: float) -> tuple[float, float]:
        """Return the seconds on sp's links of a layer, forward and backward: of keys and values by the plan's
        strategy, a ring's beside ``attention``, and of a recurrent state from rank to rank, in float32."""
        run, mesh, inner, near = self.run, self.run.mesh, self.inner["sp"], self.run.exchanging
        once, hop = 0.0, 0.0
        if block.mixer == "attention":
            keys = 2.0 * run.tokens * message_width(block, mesh.tp)
            queries = 2.0 * run.tokens * 2 * block.num_heads * block.head_width / mesh.tp
            if run.context_parallel == "gather":
                once = self.collective("all-gather", keys * mesh.sp, mesh.sp, inner)
            elif near > 1:
                once = self.collective("all-to-all", keys + queries, near, inner)
                once += 3 * self.rates.start_s
            if run.context_parallel in ("ring", "usp") and (ring := mesh.sp // near) > 1:
                order = "zigzag" if run.balanced else "contiguous"
                hops = ring_hops(block.mask, order, ring, run.seq_len // ring)
                hop = self.collective("permute", keys, ring, inner * near) * hops
        state = 4.0 * run.rows * block.state_size / mesh.tp
        once += self.collective("permute", state, mesh.sp, inner) * (mesh.sp - 1)
        backward = self.exposed(3 * hop, 2.5 * attention, True)
        return once + self.exposed(hop, attention, True), once + backward

    def exchange(self, tokens_bytes: float) -> float:
        """Return the seconds to send a microbatch's tokens to their experts: ours, in one all-to-all. Others
        with `Software.once_a_rank`: a token once to each node, and inside it once to each rank (DeepSeek-V3
        2024, section 3.2.2); else each of its copies apart. No ring waits for its slowest link, so the
        network is near its rate (DeepEP, README: 43 to 58 GB/s of 50)."""
        run, ep = self.run, self.run.mesh.ep
        # where tp cuts no expert, Megatron deals experts over tp's ranks first
        inner = self.inner["ep"] if run.expert_tp else 1
        device, experts = self.links.per_device(), run.config.experts
        near = max(1, device.node_size // inner)
        if run.chip.link == "torus" or near >= ep or self.ours:
            return self.collective("all-to-all", tokens_bytes * self.copies(), ep, inner)
        nodes, start = ep / near, self.rates.start_s * (1 + math.log2(ep))
        assert experts
        reached, inside = float(experts.top_k), experts.top_k / nodes
        if run.software.once_a_rank:
            reached = nodes * (1 - (1 - 1 / nodes) ** experts.top_k)
            inside = self.copies()
            if run.neighbours:
                reached = max(1.0, inside / near)
            elif experts.num_groups > 1:
                reached = min(reached, experts.top_groups)
        across_s = tokens_bytes * reached * (1 - 1 / nodes) / self.device.dcn_bytes_per_s
        inside_s = tokens_bytes * inside * (1 - 1 / near) / device.reached_link_bytes_per_s
        return start + max(across_s, inside_s)

    def copies(self) -> float:
        """Return how often a token travels: ours, and where `Software.once_a_rank`, to each rank that has
        some of its experts, else to each of its experts."""
        experts, ep = self.run.config.experts, self.run.mesh.ep
        assert experts
        ranks = ep * formulas.visited_share(experts.num_experts, experts.top_k, ep)
        if self.run.neighbours:
            ranks = max(1.0, experts.top_k * ep / experts.num_experts)
        return ranks if self.ours or self.run.software.once_a_rank else experts.top_k

    def alike(self, stage: int) -> int:
        """Return the first stage that sends what this one does: the same layers and none of the ends."""
        order, p, counts = self.plan.pipeline, self.run.mesh.pp, self.run.chunk_kinds
        ends = {route[i][0] for route in order.routes for i in (0, -1)} if order else {0}
        layers = [sorted(counts[i::p]) for i in range(p)]
        others = (i for i in range(p) if i not in ends and layers[i] == layers[stage])
        return stage if stage in ends else next(others)

    def sent(self, stage: int) -> dict[tuple[str, str], float]:
        """Return the seconds of a step's collectives on a stage, by term and by what they travel beside
        (`traffic.Transfer`), without those between stages: `hop` prices these, in the timetable."""
        totals = defaultdict[tuple[str, str], float](float)
        for row in step_traffic(self.plan, self.run.batch_size, self.run.seq_len, stage).values():
            for message, times in row.messages.items():
                if message.term != STAGE_LINKS:
                    totals[message.term, message.hidden_by] += times * self.message(row, message)
        return totals

    def message(self, row: Prediction, message: Transfer) -> float:
        """Return the seconds of one message of a row of `traffic`, on the nearest links of its axes."""
        inner = min(self.inner[axis] for axis in row.user_axes)
        inner *= self.plan.mesh.near if row.axes == ("ep",) else 1  # from node to node
        return self.collective(
            row.short_kind, min(message.num_bytes, message.full_bytes), row.group_size, inner
        )

    def hop(self) -> float:
        """Return the seconds to send a microbatch's activations to the next stage. Others: each tp rank sends
        its part, and the next stage gathers what was whole (Narayanan et al. 2021, section 4.1)."""
        run = self.run
        whole, tp = 2.0 * run.tokens * run.config.width, run.mesh.tp
        if self.exact:
            return self.collective(
                "permute", 2.0 * run.stream_tokens * run.config.width, 2, self.inner["pp"]
            )
        again = self.collective("all-gather", whole, tp, self.inner["tp"]) * (not run.tp_sequence)
        return self.collective("permute", whole / tp, 2, self.inner["pp"]) + again

    def _ends(self) -> dict[str, tuple[Pass, Pass]]:
        """Price the embedding and the loss of a microbatch, forward and backward each."""
        run, c = self.run, self.run.config
        moved = 8.0 * run.stream_tokens * c.width / self.bytes_per_s
        logits_matmul = [Matmul(run.tokens, c.width, c.vocab_size / run.mesh.tp)]
        matmul, back = self.matmuls(logits_matmul), self.gradients(logits_matmul)
        logits = run.tokens * c.vocab_size / run.mesh.tp
        loss = run.software.loss_bytes / 2 * logits / self.bytes_per_s
        tp = 1 if self.exact else run.mesh.tp
        reduced = self.collective("all-reduce", 2.0 * run.tokens * c.width, tp, self.inner["tp"])
        back += matmul * (run.loss_chunks > 1) + loss + reduced  # pieces are computed again
        heads = 1 + c.num_further
        joins = [Matmul(run.stream_tokens, 2 * c.width, c.width)]
        joined = c.num_further * self.matmuls(joins), c.num_further * self.gradients(joins)
        ahead = {HEAD_AND_LOSS: heads * (matmul + loss) + joined[0]}
        behind = {HEAD_AND_LOSS: heads * back + joined[1]}
        return {
            "embedding": (
                Pass({"embedding": heads * (moved + reduced)}, 6),
                Pass({"embedding": heads * 2 * moved * (not c.lora)}, 6),
            ),
            "head": (Pass(ahead, 12 * heads), Pass(behind, 16 * heads)),
        }

    # ------------------------------------------------------------------------------------ weights on links

    def _layer_weights(self, kind: int) -> tuple["RankParams", "RankParams"]:
        """Return a layer's parameters on a tp rank: all, and those that are trained."""
        s, run, mesh = self.run.sizes[kind], self.run, self.run.mesh
        body = (s["attention"] + s["copies"] + s["ffn"] + s["router"]) / mesh.tp
        experts = s["experts"] / mesh.ep / (mesh.tp if run.expert_tp else 1)
        if run.config.lora:
            matrices = run.adapter_matmuls(run.blocks[kind]).values()
            adapters = sum(p.inner * p.out for p in matrices)
            return RankParams(body + adapters, experts), RankParams(adapters)
        return RankParams(body, experts), RankParams(body, experts)

    def params(
        self, layers: Sequence[float], ends: Mapping[str, float]
    ) -> tuple["RankParams", "RankParams"]:
        """Return the parameters of so many layers of each kind and of ends of the model: all, and those that
        are trained."""
        edge = sum(times * self.run.ends[name] for name, times in ends.items()) / self.run.mesh.tp
        used = RankParams(edge)
        trained = RankParams(edge * (not self.run.config.lora))
        for kind, times in enumerate(layers):
            own, learned = self.layer_weights(kind)
            used, trained = used.plus(own, times), trained.plus(learned, times)
        return used, trained

    def gathers(self, used: "RankParams", trained: "RankParams") -> tuple[float, float]:
        """Return the seconds to gather weights that ZeRO-3 cuts, and to reduce-scatter their gradients."""
        run, soft, gather, scatter = self.run, self.run.software, 0.0, 0.0
        groups = (
            (run.zero_group, self.zero_apart),
            (run.zero_group / run.mesh.ep, self.experts_apart),
        )
        for params, learned, (group, inner) in zip(used, trained, groups, strict=True):
            gather += self.collective("all-gather", soft.gathered_bytes * params, group, inner)
            scatter += self.collective("reduce-scatter", soft.reduced_bytes * learned, group, inner)
        return gather, scatter

    def at_the_end(self, used: "RankParams", trained: "RankParams") -> tuple[float, float]:
        """Return the seconds that gradients still take when the last microbatch is done, and those of
        gathering the updated weights, which a framework that overlaps does beside the next step. Ours cuts
        over ZeRO's group and sums over its replicas; others deal ZeRO 1 and 2 out over all data ranks."""
        run, soft, mesh = self.run, self.run.software, self.run.mesh
        reduced, updated = 0.0, 0.0
        groups = (1, self.zero_apart), (mesh.ep, self.experts_apart)
        for params, (apart, inner) in zip(trained, groups, strict=True):
            late = soft.late_bytes * params
            ranks = run.data_ranks * mesh.sp / apart
            group = run.zero_group / apart if self.ours or run.zero == 3 else ranks
            cut = group if run.zero else 1
            if run.zero in (1, 2):
                reduced += self.collective("reduce-scatter", late, cut, inner)
                updated += self.collective("all-gather", late, cut, inner)
            beyond = self.inner["dp" if mesh.dp > 1 else "sp"] if cut > 1 else inner
            reduced += self.collective("all-reduce", late / cut, ranks / cut, beyond)
        if self.gathers_once:
            gather, scatter = self.gathers(used, trained)
            reduced, updated = reduced + scatter, updated + gather
        return reduced, updated

    # ------------------------------------------------------------------------------------------- a chunk

    def chunk(
        self, layers: tuple[int, ...], first: bool, last: bool, sent: dict[tuple[str, str], float]
    ) -> "Chunk":
        """Price so many layers of each kind, with the embedding where they are the first and the head where
        they are the last; and what is around them (`around`)."""
        # where the loss follows, the chunk has not run forward yet
        again = 0.0 if last else self.run.again
        parts = [(self.layer(kind, again), times) for kind, times in enumerate(layers) if times]
        return self.around(parts, layers, {"embedding": first, "head": last}, sent)

    def around(
        self,
        parts: Sequence[tuple[tuple[Pass, Pass], float]],
        layers: Sequence[float],
        ends: Mapping[str, float],
        sent: Mapping[tuple[str, str], float],
        apart: Collection[str] = (),
    ) -> "Chunk":
        """Add up priced layers, so many of each kind, and ends of the model, with what is around them:
        gathering weights, scattering and adding up gradients, sending activations, launching. Of a plan of
        ours ``sent`` are the seconds of its messages (`sent`). ``apart``: terms that are left out."""
        run, soft = self.run, self.run.software
        forward, backward = Pass(apart=apart), Pass(apart=apart)
        used, trained = self.params(layers, ends)
        outside = [(self.ends()[name], times) for name, times in ends.items() if times]
        for (ahead, back), times in (*parts, *outside):
            forward.take(ahead, times)
            backward.take(back, times)
        learning = sum(backward.terms.get(name, 0.0) for name in (MATMULS, HEAD_AND_LOSS)) / 2
        if run.config.lora:  # of adapters alone
            adapters = [[*run.adapter_matmuls(block).values()] for block in run.blocks]
            learning = sum(
                n * self.learning(adapters[kind], run.bits) for kind, n in enumerate(layers)
            )
        passes = forward, backward
        computing = [part.seconds for part in passes]
        # of a plan of ours, as they compute
        for part, seconds in zip(passes, computing, strict=True):
            for (term, hidden_by), links_s in sorted(sent.items()):  # weights last: beside all
                if term != LATE:
                    beside = part.terms.get(hidden_by, part.seconds)
                    own = links_s * seconds / sum(computing)
                    part.add(term, self.exposed(own, beside, hidden_by != ""))
        cut = run.zero_group if run.zero == 3 else 1
        if cut > 1 and not (self.exact or self.gathers_once):
            gather, scatter = self.gathers(used, trained)
            forward.add(WEIGHT_LINKS, self.exposed(gather, forward.seconds, soft.overlaps))
            scattered = scatter + gather * run.reshard
            backward.add(WEIGHT_LINKS, self.exposed(scattered, backward.seconds, soft.overlaps))
        if run.microbatches > 1:
            added = ACCUMULATED_BYTES / 4 * soft.grad_bytes * sum(trained) / cut / self.bytes_per_s
            if soft.sums_in_matmuls:
                added = math.hypot(added, learning) - learning
            backward.add(ACCUMULATION, added)
        for part in passes:
            if run.mesh.pp > 1 and not soft.overlaps:  # a stage waits for what it sends
                part.add(STAGE_LINKS, self.hop())
            if soft.eager:
                hidden = 0.0 if soft.blocking else part.seconds
                each = self.rates.host_s * soft.launch + LAUNCH_S * soft.blocking
                part.add("launching", max(0.0, part.kernels * each - hidden))
        return Chunk(forward, backward, used, trained, learning)


@functools.lru_cache(maxsize=200_000)
def in_waves(cores: int, rows: float, out: float, times: float, later: bool = True) -> float:
    """Return the time of a matmul over that of full cores: its result is dealt to them in tiles, and they
    wait for the last wave. A library takes the better of `TILES`; where that leaves cores idle they share
    what a tile sums (`SHARED_TILE`)."""
    waves = lambda tiles: math.ceil(times * tiles / cores) * cores / times
    dealt = [
        waves(math.ceil(rows / high) * math.ceil(out / wide)) * high * wide / (rows * out)
        for high, wide in TILES[later]
        if cores
    ]
    return min(SHARED_TILE[later], *dealt) if cores else 1.0


@functools.lru_cache(maxsize=200_000)
def on_links(chip: Chip, kind: str, message: float, group: int, inner: int) -> float:
    """Return the seconds on the links: of a torus over as many axes as the group may have, of switches by
    levels (`formulas.collective_seconds`)."""
    return formulas.collective_seconds(
        chip, kind, message, group, inner, torus_axes(chip, group, inner)
    )


def torus_axes(chip: Chip, group: int, inner: int) -> int:
    """Return how many axes of a torus a group may have."""
    cores = chip.devices_per_chip
    chips = max(1, group // max(1, min(group, cores // max(1, inner))))
    return min(chip.num_axes - (inner // cores > 1), max(1, math.floor(math.log2(chips) / 2)))


# ----------------------------------------------------------------------------------------------------- a step


class RankParams(NamedTuple):
    """Parameters on a rank of tp: those that all data ranks share, and those of its experts."""

    shared: float = 0.0
    experts: float = 0.0

    def plus(self, other: "RankParams", times: float = 1.0) -> "RankParams":
        """Add another's, ``times`` over."""
        return RankParams(self.shared + times * other.shared, self.experts + times * other.experts)


@dataclass
class Chunk:
    """A chunk of a stage: its passes over one microbatch, the parameters that they use, those of them that
    are trained, and what of the backward pass are the trained ones' gradients."""

    forward: Pass
    backward: Pass
    used: RankParams
    trained: RankParams
    learning_s: float

    @functools.cached_property
    def seconds(self) -> tuple[float, float]:
        """Forward and backward."""
        return self.forward.seconds, self.backward.seconds


def beside_flops(terms: Mapping[str, float]) -> str:
    """Name what of a step is no useful FLOPs, the largest first: what MFU is lost to. Terms of less than a
    twentieth of the step are left out."""
    least = sum(terms.values()) / 20
    useful = (MATMULS, ATTENTION, HEAD_AND_LOSS)
    rest = sorted(((s, name) for name, s in terms.items() if name not in useful), reverse=True)
    return ", ".join(f"{name} {rounded(s, 0.1):g} s" for s, name in rest if s >= least)


def step_time(run: Run, own: Rates | None = None, simulate: bool = True) -> Time:
    """Return the seconds of a step by term. Without ``simulate`` the bubble and what is sent are closed
    forms: quick."""
    clock = Clock(run, own, exact=simulate)
    return _time(clock, *chunks(clock), simulate)


def least_time(run: Run, last: Sequence[int], apart: tuple[str, ...] = (), many: int = 1) -> float:
    """Return seconds that no plan beats that differs from a run in its schedule, whose chunks are no more
    and whose ``last`` has no more layers, which run forward once, and in its strategy along the sequence:
    every stage has an even share, since the busiest decides and collectives of parts take no less than one of
    all, sp sends nothing, and terms that are ``apart`` take no time. Of a run of one microbatch, plans too
    that cut it into as ``many`` at most: parts take no less than all at once, and the bubble is of one."""
    clock, p = Clock(run, exact=False), run.mesh.pp
    layers = [count / p for count, _ in run.config.blocks]
    parts = [
        (clock.layer(kind, again), times)
        for kind, once in enumerate(last)
        for again, times in ((run.again, layers[kind] - once / p), (0.0, once / p))
    ]
    ends = {"embedding": 1 / p, "head": 1 / p}
    apart = (SEQUENCE_LINKS, *apart)
    chunk = clock.around(parts, layers, ends, {}, apart)
    late = [clock.at_the_end(chunk.used, chunk.trained)] * p
    time = _time(clock, [[chunk]] * p, late, False)
    return time.step_s - time.terms.get("bubble", 0.0) * (1 - 1 / many)


def _time(
    clock: "Clock", stages: list[list["Chunk"]], late: list[tuple[float, float]], simulate: bool
) -> Time:
    """Return the seconds of a step with these chunks of each stage, and seconds at its end."""
    run, m, p, soft = clock.run, clock.run.microbatches, clock.run.mesh.pp, clock.run.software
    loads = [m * sum(sum(chunk.seconds) for chunk in stage) for stage in stages]
    total = max(loads)
    busiest, terms = stages[loads.index(total)], Pass()
    for chunk in busiest:
        terms.take(chunk.forward, m).take(chunk.backward, m)
    if p > 1:
        hop = clock.hop() if soft.overlaps else 0.0
        span = _played(run, stages, hop) if simulate else None
        if span is None:  # one microbatch goes through, and the busiest stage does the others
            through = (sum(loads) - total) / m
            span = total + through / run.virtual_stages + 2 * (p - 1) * hop
        terms.add("bubble", max(0.0, span - total))
    reduced, updated = map(max, zip(*late, strict=True))
    ahead, behind = map(sum, zip(*(chunk.seconds for chunk in busiest), strict=True))
    left = clock.exposed(reduced, behind, soft.overlaps and not soft.reduces_late)
    left += clock.exposed(updated, ahead, soft.overlaps)
    # the embedding is on the first stage and on the last
    if run.config.tied and p > 1 and not (clock.exact or run.config.lora):
        shared_bytes = soft.reduced_bytes * run.ends["embedding"] / run.mesh.tp
        left += clock.collective("all-reduce", shared_bytes, 2, clock.inner["pp"])
    terms.add(LATE, left)
    updated_params, whole = optimizer_params(run, stages)
    terms.add(
        "optimizer",
        (
            (update_bytes(soft) + soft.clears * CLIPPED_BYTES) * updated_params
            + (2 * soft.reduced_bytes + soft.clears * soft.grad_bytes) * whole
        )
        / clock.bytes_per_s,
    )
    if run.plan and run.plan.muon != "none":  # in float32, which TPUs multiply as 16 bits
        slower = clock.rates.eight_bit if run.chip.link == "switch" else 1.0
        rate = clock.device.flops_per_s * clock.rates.matmuls / slower
        terms.add("orthogonalising", muon_flops(run.plan) / rate)
    return Time(terms.seconds, terms.terms)


def update_bytes(soft: Software) -> float:
    """Return what Adam reads and writes per parameter."""
    return 2 * soft.state_bytes + GRADIENT_AND_COPY_BYTES


def optimizer_params(run: Run, stages: list[list[Chunk]]) -> tuple[float, float]:
    """Return the most parameters that a device updates, and those of its share of tp, whose gradients it has
    before they are cut."""
    # over which others deal out the state of ZeRO 1 and 2, dp too
    ranks = run.data_ranks * run.mesh.sp
    by_group = run.zero == 3 or run.software.name == "llmpar"
    cut = (run.zero_group if by_group else ranks) if run.zero else 1
    params = [_summed(tuple(c.trained for c in stage)) for stage in stages]
    return (
        max((shared + experts * run.mesh.ep) / cut for shared, experts in params),
        max(shared + experts for shared, experts in params),
    )


@functools.lru_cache(maxsize=256)
def _summed(params: tuple[RankParams, ...]) -> RankParams:
    return functools.reduce(RankParams.plus, params, RankParams())


def busiest(stages: list[list[Chunk]]) -> int:
    """Return the stage that computes longest."""
    loads = [sum(sum(chunk.seconds) for chunk in stage) for stage in stages]
    return loads.index(max(loads))


def chunks(clock: Clock) -> tuple[list[list[Chunk]], list[tuple[float, float]]]:
    """Return the chunks of each stage, and its seconds at the end of a step: in the open, and beside the next
    step (`Clock.at_the_end`). Chunks that are alike are priced once."""
    run, counts = clock.run, clock.run.chunk_kinds
    at_the_end, sent = functools.cache(clock.at_the_end), functools.cache(clock.sent)
    p, alike = run.mesh.pp, dict[Any, Chunk]()
    stages: list[list[Chunk]] = [[] for _ in range(p)]
    for i, layers in enumerate(counts):
        stage = clock.alike(i % p) if clock.exact else 0
        key = layers, i == 0, i == len(counts) - 1, stage
        if key not in alike:
            share = sum(layers) / max(1, sum(map(sum, counts[i % p :: p]))) / run.microbatches
            links = sent(stage) if clock.exact else {}
            parts = {what: seconds * share for what, seconds in links.items()}
            alike[key] = clock.chunk(*key[:3], parts)
        stages[i % p].append(alike[key])
    if clock.exact:
        ends = [sent(clock.alike(stage)) for stage in range(p)]
        return stages, [
            (one.get((LATE, ""), 0.0), one.get((LATE, WHOLE_PASS), 0.0)) for one in ends
        ]
    sums = lambda one: (_summed(tuple(c.used for c in one)), _summed(tuple(c.trained for c in one)))
    return stages, [at_the_end(*sums(one)) for one in stages]


def _played(run: Run, stages: list[list[Chunk]], hop: float) -> float | None:
    """Return the schedule's makespan with these times. Of many microbatches few are played, and the rest
    added at the busiest stage's pace: the steady state repeats. None where there is no such order."""
    m, p = run.microbatches, run.mesh.pp
    few, order = min(m, 4 * p), None
    visits = run.virtual_stages if run.virtual_stages > 1 else None
    for count in dict.fromkeys((few, m)):
        with contextlib.suppress(ValueError):
            few, order = count, schedules.make(run.schedule, p, count, visits)
            break
    if order is None:
        return None

    def cost(stage: int, op) -> float:
        own = stages[stage]
        # two directions: chunks are placed otherwise
        chunk = own[op.chunk if op.chunk < len(own) else 0]
        forward, backward = chunk.seconds
        if op.kind == "F":
            return forward
        weights = chunk.learning_s
        return weights if op.kind == "W" else backward - weights * order.split_backward

    pace = max(sum(sum(chunk.seconds) for chunk in stage) for stage in stages)
    return makespan(order, cost, hop) + (m - few) * pace
