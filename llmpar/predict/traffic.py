"""What a training step of this package sends, to the byte, before anything is traced: the tests hold
`step_traffic` against the compiled program, exactly."""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from llmpar.plan import places
from llmpar.plan.layout import METRICS, SCALED, Arrow, Layout, parse_arrow
from llmpar.plan.lockstep import lockstep, slots
from llmpar.plan.mesh_shape import USER_AXIS, MeshShape
from llmpar.plan.model_config import ADAPTABLE, ExpertConfig, ModelConfig, Weight, kind_of
from llmpar.plan.plan import Resolved
from llmpar.plan.schedules import Schedule
from llmpar.plan.serving import BEST, CHOSEN, LOGITS, Serving
from llmpar.predict.formulas import visited_share, whole_ring_bytes

FLOAT32 = 4
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
WEIGHT_LINKS = "weights and gradients on links"
TENSOR_LINKS = "tensor-parallel links"
SEQUENCE_LINKS = "sequence links"
EXPERT_LINKS = "expert links"
STAGE_LINKS = "pipeline sends"
LATE = "gradients at the end"
"""The terms of a step's time that messages belong to. `LATE`: what a step sends once, at its end."""
TRANSPOSES = {
    "all-gather": "reduce-scatter",
    "reduce-scatter": "all-gather",
    "all-to-all": "all-to-all",
    "slice": "all-reduce",
    "vary": "all-reduce",
}
"""What the gradient does, in the backward pass, where the forward pass has this move.

Each is the transpose of a linear map. A gathered value was used by everyone, so its gradient is
summed and cut again. From where devices may differ on (`vary`, or a slice) their gradients are
summed. An all-reduce is missing: the gradient of a sum is the same for all its terms, and every
device has it.
"""
MATMULS, ATTENTION, WHOLE_PASS = "matmuls", "attention", "the whole pass"
"""What a message may travel beside (`Transfer.hidden_by`): a term of the same pass, or all of the pass."""
NEXT_STAGE = "stream b s d -> the next stage"
PREVIOUS_STAGE = "stream b s d -> the previous stage"
OPPOSITE_STAGE = "l -> the opposite stage"
"""The arrows of a pipeline's permutes. Which ranks they pair, `hosts` says."""
_LINKS = {"tp": TENSOR_LINKS, "sp": SEQUENCE_LINKS}
"""The term of what is sent inside the model, by the axes that it goes over; else `EXPERT_LINKS`."""


class Transfer(NamedTuple):
    """What an arrow sends, and which part of a step's time that is: the key of `Prediction.messages`, where
    ``term`` and ``num_bytes`` are known."""

    value: str  # in words
    arrow: str = ""  # its text; of weights their dims
    term: str = ""  # of a step's time; "": the links of the axes that it goes over (`_LINKS`)
    hidden_by: str = ""  # what it travels beside; "": computing waits for it
    num_bytes: int = 0  # of a message
    full_bytes: float = math.inf  # of a buffer's full slots, by estimate: no more takes time
    gradient: str = ""  # what comes back, where it has another name
    ragged: bool = False  # only the full slots travel, by a ragged-all-to-all


@dataclass
class Prediction:
    """What the collectives of one kind over the same axes send, per device and step."""

    kind: str = ""
    axes: tuple[str, ...] = ()
    group_size: int = 1
    messages: Counter[Transfer] = field(default_factory=Counter)  # executions of each

    def sent(self, message_bytes: int) -> int:
        """Return the bytes that a device sends of one message (`formulas.ring_share`)."""
        return whole_ring_bytes(self.kind, message_bytes, self.group_size)

    @property
    def short_kind(self) -> str:
        """The kind as `formulas` calls it: permute for collective-permute, all-to-all for a ragged one."""
        return self.kind.removeprefix("collective-").removeprefix("ragged-")

    @property
    def user_axes(self) -> list[str]:
        """The axes as the user named them: sp for its inner part ul, tp for kv."""
        return [USER_AXIS.get(axis, axis) for axis in self.axes]

    @property
    def count(self) -> int:
        """Executions per step."""
        return self.messages.total()

    @property
    def bytes_sent(self) -> int:
        """Bytes sent per device and step."""
        return sum(self.sent(message.num_bytes) * times for message, times in self.messages.items())

    @property
    def arrows(self) -> dict[str, tuple[int, int]]:
        """The arrow's text -> (executions, bytes)."""
        totals: dict[str, tuple[int, int]] = {}
        for message, times in self.messages.items():
            count, sent = totals.get(message.arrow, (0, 0))
            totals[message.arrow] = count + times, sent + times * self.sent(message.num_bytes)
        return totals


class Traffic(dict[tuple[str, str], Prediction]):
    """(axes, kind) -> Prediction. `carry` adds what an arrow sends, `add` a single kind of collective."""

    def __init__(self, mesh: MeshShape):
        super().__init__()
        self.mesh = mesh

    def add(
        self,
        kind: str,
        axes: tuple[str, ...],
        of: Transfer,
        num_bytes: int,
        count: int = 1,
        value: str = "",
    ) -> None:
        """Add ``count`` collectives over ``axes`` on messages of ``num_bytes`` (the unscattered size).
        ``value``: what they send in place of ``of.value``."""
        axes = self.mesh.live(*(a for a in self.mesh.sizes if a in axes))
        if axes and count:
            row = self.setdefault(
                (",".join(axes), kind), Prediction(kind, axes, self.mesh.along(axes))
            )
            term = of.term or next(
                (_LINKS[axis] for axis in _LINKS if axis in row.user_axes), EXPERT_LINKS
            )
            row.messages[of._replace(value=value or of.value, term=term, num_bytes=num_bytes)] += (
                count
            )

    def carry(
        self,
        arrow: Arrow,
        local_bytes: int,
        of: Transfer,
        forward: int,
        backward: int = 0,
        itemsize: int = FLOAT32,
    ) -> int:
        """Add an arrow on a value of ``local_bytes`` on each device, carried out ``forward`` times; its
        gradient comes back ``backward`` times. Return the bytes that each device has of it in the end.

        Forward the collectives are those of `Arrow.moves`. Backward they are their transposes
        (`TRANSPOSES`), on the same messages. ``itemsize`` is read for arrows with a dtype.
        """
        if arrow.wire or arrow.gradient_wire:
            return self._carry_narrow(
                arrow, local_bytes // itemsize, itemsize, of, forward, backward
            )
        for move in arrow.moves:
            parts = self.mesh.along(move.axes)
            message = local_bytes * parts if move.kind == "all-gather" else local_bytes
            local_bytes = message // parts if move.kind in ("reduce-scatter", "slice") else message
            for kind, value, count in (
                (move.kind, of.value, forward),
                (TRANSPOSES.get(move.kind), of.gradient or of.value, backward),
            ):
                if kind not in (None, "slice"):  # a slice sends nothing
                    self.add(of.ragged * "ragged-" + kind, move.axes, of, message, count, value)
        return local_bytes

    def _carry_narrow(
        self, arrow: Arrow, size: int, itemsize: int, of: Transfer, forward: int, backward: int
    ) -> int:
        """Add an arrow with a dtype (`llmpar.parallel.wire`) on ``size`` numbers of each device, and return
        the bytes in the end. A sum in a dtype is an all-to-all; an all-reduce is an all-gather, too."""
        arrow = replace(arrow, text=of.arrow)
        back = of._replace(arrow=arrow.name(backward=True), value=of.gradient or of.value)
        of = of._replace(arrow=arrow.name())
        bytes_of = {"": itemsize, "bf16": 2, "e4m3": 1 + FLOAT32 / SCALED}
        for move in arrow.moves:
            n, is_gather = self.mesh.along(move.axes), move.kind == "all-gather"
            whole = size * n if is_gather else size + -size % n
            message = int(whole * bytes_of[arrow.wire])
            self.add(move.kind if is_gather else "all-to-all", move.axes, of, message, forward)
            if is_gather:
                kind = "all-to-all" if arrow.gradient_wire else "reduce-scatter"
                self.add(
                    kind, move.axes, back, int(whole * bytes_of[arrow.gradient_wire]), backward
                )
            elif move.kind == "all-reduce":
                self.add("all-gather", move.axes, of, message, forward)
            size = {"all-gather": whole, "reduce-scatter": whole // n}.get(move.kind, size)
        return itemsize * size

    @property
    def total_bytes(self) -> int:
        """Bytes sent per device and step, over all axes."""
        return sum(row.bytes_sent for row in self.values())


@dataclass(frozen=True)
class Runs:
    """How often a device runs each part of the model in one step. Layers are counted one by one."""

    embed: int = 0  # the look-up, forward and backward
    loss: int = 0  # the loss, forward and backward
    forward: int = 0  # layers forward
    again: int = 0  # and again for the backward pass, but for the last reduction (`Plan.remat`)
    attention: int = 0  # of these repetitions, those that repeat attention itself and its reduction
    backward: int = 0  # layers backward
    matrices: int = 0  # gathers of each matrix of a layer that ZeRO-3 stores cut
    vectors: int = 0  # of each vector: a bias is of no use backward
    ids: int = 0  # gathers of ids: of positions and of documents, for each call of a stack


def trained_matrices(config: ModelConfig) -> set[str]:
    """Return those of `ADAPTABLE` that are trained, or whose adapters are.

    Gradients of them read what they multiply.
    """
    return set(config.lora.targets if config.lora else ADAPTABLE)


def routed_width(config: ModelConfig) -> int:
    """Return the width of a token on its way to experts: the model's, or that of their own latent (Nemotron
    3)."""
    rows = config.described.rows if config.described else ()
    widths = (row.shape[1] for _, row in rows if row.dims == "experts e d m")
    return next(widths, config.width)


def full_share(experts: ExpertConfig, tokens: int, ranks: int) -> float:
    """Return the share of its slots for a rank (`ExpertConfig.slots`) that a device fills where all choices
    of experts are equally likely: a token needs none if all of its experts are on other ranks."""
    visited = visited_share(experts.num_experts, experts.top_k, ranks)
    return min(1.0, visited * tokens / experts.slots(tokens, 1, ranks))


def runs(plan: Resolved, seq_len: int, stage: int = 0) -> list[Runs]:
    """Count how often a stage runs each part of the model in a step of ``plan`` on sequences of this length,
    layers by their kind; what layers share is with the first kind.

    Without a pipeline each microbatch runs everything once, and what `Plan.remat` recomputes again. With one
    the schedule's F runs the stage's chunk forward. B keeps F's residuals (``stage_saves="residuals"``), or
    runs the chunk forward a second time from the input that F kept, and then backward. The chunk that the
    loss follows has no F: its B runs it forward, once.
    """
    counts = [count for count, _ in plan.config.blocks]
    each = [_runs(plan, seq_len, stage, kind, count) for kind, count in enumerate(counts)]
    return [each[0], *(replace(run, embed=0, loss=0, ids=0) for run in each[1:])]


def _runs(plan: Resolved, seq_len: int, stage: int, kind: int, num_layers: int) -> Runs:
    """Count how often a stage runs layers of one kind, and what is outside of layers."""
    m, order, ends = plan.microbatches, plan.pipeline, 1 + plan.config.num_further
    recomputed, attention = plan.remat != "none", plan.remat == "block"
    keeps = not plan.reshard_after_forward
    if order is None:
        n = num_layers * m
        return Runs(
            embed=m * ends,
            loss=m * ends,
            forward=n,
            again=n * recomputed,
            attention=n * attention,
            backward=n,
            matrices=n * (2 - keeps),
            vectors=n * (1 + (recomputed and not keeps)),
            ids=2 * m,
        )
    m //= len(order.routes)  # each direction through the stages has as many
    loops = places.chunk_loops(plan.config.layer_kinds, order.cells)
    own = [(loop, loop.times * loop.kinds.count(kind)) for loop in loops]
    layers = [sum(count for loop, count in own if loop.filled[i]) for i in range(order.cells)]
    n = m * sum(layers[i] for i in places.positions(order)[stage])
    cells = order.visits * plan.microbatches
    embed, loss = (m * sum(route[i][0] == stage for route in order.routes) for i in (0, -1))
    every = Runs(embed=embed * ends, loss=loss * ends, backward=n)
    if plan.stage_saves == "residuals":
        # A layer that only some chunks have keeps its gathered weights.
        twice = n + cells * sum(count for loop, count in own if all(loop.filled))
        # B computes anew what comes from the batch alone. For that it gathers the ids again where
        # `attention.ids_are_valid` reads them, and positions where LongRoPE asks for the longest row.
        kinds = [block for _, block in plan.config.blocks]
        again = 2 * any(plan.assumes_order(block.mask, seq_len) for block in kinds)
        again = again or any(block.has_long_rope for block in kinds)
        return replace(every, forward=n, matrices=twice, vectors=twice, ids=cells * (2 + again))
    last = m * layers[-1] * sum(route[-1][0] == stage for route in order.routes)
    forward = 2 * n - last
    every = replace(every, forward=forward, ids=2 * (2 * cells - loss))
    if order.split_backward:  # layer by layer, nothing checkpointed
        return replace(every, matrices=forward, vectors=forward)
    again = n * recomputed
    return replace(
        every, again=again, attention=n * attention, matrices=forward + n, vectors=forward + again
    )


def most_traffic(plan: Resolved, batch_size: int, seq_len: int) -> Traffic:
    """Return the `step_traffic` of the pipeline's stage that sends most."""
    stages = (step_traffic(plan, batch_size, seq_len, stage) for stage in range(plan.mesh.pp))
    return max(stages, key=lambda sent: sent.total_bytes)


@functools.lru_cache(maxsize=256)
def step_traffic(
    plan: Resolved, batch_size: int, seq_len: int, stage: int = 0, run: Runs | None = None
) -> Traffic:
    """Predict everything that a device of a pipeline's stage (of the only one, without a pipeline) sends in
    one training step, under the Manual mode. All stages take part in each permute between them, also those
    that have nothing to send. ``run``: how often each part runs, if not as `runs` counts it."""
    config, traffic = plan.config, Traffic(plan.mesh)
    by_kind = runs(plan, seq_len, stage)
    if run:  # of one layer: of a kind that most are
        main = max(range(len(by_kind)), key=lambda i: config.blocks[i][0])
        by_kind = [run if i == main else Runs() for i in range(len(by_kind))]
    run = run or by_kind[0]
    _weights(traffic, plan, by_kind)
    values = Values(traffic, plan, batch_size // plan.microbatches, seq_len)
    for (_, block), own in zip(config.blocks, by_kind, strict=True):
        _activations(values, block, own)
        if block.experts:
            _experts(values, block, block.experts, own)
        if plan.mesh.sp > 1:
            if block.mixer == "attention":
                _attention(values, block, own)
            else:
                _ids(values, own)
        if plan.mesh.sp > 1 and block.state_size:
            _states(values, block, own)
    if plan.pipeline:
        _stages(values, config, plan.pipeline)
    if config.experts:
        losses = Transfer("the routers' losses", "stream b +s -> data b +s")
        values.carry(losses, (values.b,), _cells(plan) or run.loss, itemsize=FLOAT32)
    value, numbers = "the loss, the tokens and the gradients' norm", 3
    routed = sum(count for count, block in config.blocks if block.experts)
    if config.experts:
        value += ", the tally of tokens per expert"
        numbers += routed * (config.experts.num_experts + 2)
    small = Transfer(value, METRICS, LATE)
    traffic.add("all-reduce", plan.mesh.live(*plan.mesh.sizes), small, FLOAT32 * numbers)
    return traffic


def outer_traffic(plan: Resolved, fragments: int = 1, index: int = 0) -> Traffic:
    """Predict what a device sends in the outer step of `llmpar.training.local_steps`: an all-reduce over dp
    of its block of each trained weight, in float32, or of the rows in one of so many fragments. It is one of
    every H steps; inner steps are those of `Resolved.worker`."""
    traffic = Traffic(plan.mesh)
    worker = plan.worker.resolve(plan.config, None)
    learned = {path: pair for path, pair in worker.layouts_by_path.items() if not pair[0].frozen}
    sizes = {path: weight.shape[0] for path, (weight, _) in learned.items()}
    rows = places.fragment(sizes, fragments, index)
    for path, (weight, layouts) in learned.items():
        shape = rows[path].stop - (rows[path].start or 0), *weight.shape[1:]
        block = math.prod(layouts.stored.shard_shape(shape, plan.mesh.sizes))
        of = Transfer("what workers moved a weight", layouts.difference.text, LATE)
        traffic.carry(layouts.difference, FLOAT32 * block, of, block > 0)
    return traffic


def serving_traffic(plan: Serving, num_rows: int, width: int = 1, echo: bool = False) -> Traffic:
    """Predict what a device sends in a step of `llmpar.serve` that takes up to ``width`` tokens of each row:
    what the model's arrows send forward, two small sums of each layer over sp, over tp the logits of the next
    tokens (with ``echo`` behind every token), and to all devices the chosen tokens with their
    log-probabilities."""
    config, traffic = plan.config, Traffic(plan.mesh)
    values = Values(traffic, plan, num_rows, width)
    counts = [n for n, _ in config.blocks]
    for path, (weight, layouts) in plan.layouts_by_path.items():
        times = counts[max(0, kind_of(path))] if path.startswith("blocks.") else 1
        stored = ITEMSIZE[plan.dtype] * math.prod(
            layouts.stored.shard_shape(weight.shape, plan.mesh.sizes)
        )
        of = Transfer("weights", weight.dims.replace(" l ", " "), WEIGHT_LINKS, WHOLE_PASS)
        traffic.carry(layouts.gather, stored // times, of, times)
    text = "cache b s k r +t -> attention b s k r"
    sp = plan.regions["cache"]["t"]
    for kind, (count, block) in enumerate(config.blocks):
        own = Runs(forward=count)
        _activations(values, block, own if kind else replace(own, embed=1, ids=2))
        if block.experts:
            _experts(values, block, block.experts, own)
        if block.mixer != "attention":
            continue
        h = block.cache_width if block.has_latent_attention else block.head_width
        scores = FLOAT32 * values.local_size("attention b s n", num_rows, width, block.num_heads)
        sums = {"maxima of scores": scores, "sums over the cache": scores * (h + 1)}
        for value, size in sums.items():
            traffic.add("all-reduce", sp, Transfer(value, text), size, count)
    places = width if echo else 1
    numbers = 2 * (2 + min(BEST, config.vocab_size))
    values.carry(
        Transfer("logits", LOGITS), (num_rows, config.vocab_size), places, itemsize=FLOAT32
    )
    chosen = FLOAT32 * values.local_size("data s b n", places, num_rows, numbers)
    traffic.carry(
        plan.physical(CHOSEN), chosen, Transfer("chosen tokens, and log-probabilities", CHOSEN), 1
    )
    return traffic


# ---------------------------------------------------------------------------------------------------- weights


def _weights(traffic: Traffic, plan: Resolved, by_kind: Sequence[Runs]) -> None:
    """Add the arrows of each weight's `WeightLayouts`. Per device and parameter, with N = fsdp and a
    microbatches, they send (Rajbhandari et al. 2020, section 7): ZeRO 0 and 1 2, ZeRO 2 a + 1, ZeRO 3 up to
    3a times (N-1)/N."""
    local_size = lambda layout, shape: math.prod(layout.shard_shape(shape, traffic.mesh.sizes))
    bucketed: list[tuple[tuple, int]] = []
    item = ITEMSIZE[plan.dtype]
    table = sorted(plan.layouts_by_path.items(), key=lambda row: row[0].split("."))
    for path, (weight, layouts) in table:
        dims, shape, stacked = weight.dims, weight.shape, path.startswith("blocks.")
        run = by_kind[max(0, kind_of(path))]
        gathers, gradients, pieces = _uses(plan, run, path, weight)
        layers, visits = (shape[0] // plan.mesh.pp, _visits(plan)) if stacked else (1, 1)
        stored = local_size(layouts.stored, shape) // layers
        of = Transfer(
            "weights", dims.replace(" l ", " "), WEIGHT_LINKS, WHOLE_PASS, gradient="gradients"
        )
        copies = plan.pipeline.parameter_copies if stacked and plan.pipeline else 1
        # all layers at once, those that are lent too; no gradient comes back here
        if plan.gather_per == "step":
            of = Transfer("weights", dims, LATE)
            stored = copies * layers * stored
            gathers, gradients = 1, 0
        traffic.carry(layouts.gather, item * stored, of, gathers, gradients, item)
        if copies > 1:
            lent = Transfer("weights of the other direction", OPPOSITE_STAGE, LATE)
            traffic.add(
                "collective-permute",
                ("pp",),
                lent,
                (item if weight.frozen else FLOAT32) * local_size(layouts.stored, shape),
            )
        if weight.frozen:
            continue
        added = FLOAT32 * local_size(layouts.accumulated, shape)
        if copies > 1:
            traffic.add("collective-permute", ("pp",), lent, added, value="their gradients")
        # summed where its values begin to differ: inside the backward pass
        if plan.reduce == "layer":
            traffic.add(
                "all-reduce", layouts.replica_axes, of, FLOAT32 * stored, gradients, "gradients"
            )
        of = Transfer("gradients", layouts.finish.text, LATE)
        unreduced = FLOAT32 * local_size(layouts.unreduced, shape)
        traffic.carry(layouts.accumulate, unreduced // visits, of, pieces)
        if plan.reduce == "bucket":
            bucketed.append(((layouts.replica_axes, layouts.stored.axes), added))
        else:
            traffic.carry(layouts.finish, added, of, 1)
        reduced = FLOAT32 * local_size(layouts.reduced, shape)
        of = Transfer("whole matrices of momentum", layouts.assemble.text, LATE)
        whole = traffic.carry(layouts.assemble, reduced, of, 1)
        of = Transfer("orthogonal matrices", layouts.take_apart.text, LATE)
        traffic.carry(layouts.take_apart, whole, of, 1)
        of = Transfer("updated weights", layouts.restore.text, LATE, WHOLE_PASS)
        traffic.carry(layouts.restore, reduced, of, 1)
    for (axes, _), members in plan.buckets(bucketed):
        bucket = Transfer("gradients", f"bucket of {len(members)} gradients", LATE)
        traffic.add("all-reduce", axes, bucket, sum(bucketed[j][1] for j in members))


def _uses(plan: Resolved, run: Runs, path: str, weight: Weight) -> tuple[int, int, int]:
    """Return how often a weight is gathered for use, its gradient comes back, and is added up."""
    if path.startswith("blocks."):
        routed = weight.dims.startswith("experts ")  # whose backward pass reads biases
        gathers = run.vectors if weight.is_vector and not routed else run.matrices
        # F keeps what a barrier joins with values (`Manual.local`)
        apart = plan.pipeline and plan.stage_saves == "residuals" and plan.platform == "cpu"
        joined = apart and (routed or path.endswith("_conv"))
        # biases of queries, keys and values are in those that are kept; a router's is in logits, which only
        # a stage keeps
        kept = plan.remat in ("selective", "ffn") and not path.endswith("router_bias")
        own = path.endswith("_bias") and not routed
        if joined or (own and (kept or plan.stage_saves == "residuals")):
            gathers = run.forward
        return gathers, (not weight.frozen) * run.backward, plan.microbatches * _visits(plan)
    # as the head too, a pipeline uses it on its first stage and its last
    embedding = path == "embedding"
    in_loss = not embedding or plan.config.tied and plan.pipeline is not None
    times = run.embed * embedding + run.loss * in_loss
    return times, (not weight.frozen) * times, times if plan.pipeline else plan.microbatches


def _cells(plan: Resolved) -> int:
    """Count the cells of a stage that run backward: each adds its routers' losses; 0 without a pipeline."""
    return plan.pipeline.visits * plan.microbatches if plan.pipeline else 0


def _visits(plan: Resolved) -> int:
    """Count the chunks of the model that a stage adds gradients to one by one."""
    return plan.pipeline.visits if plan.pipeline and plan.zero == 2 else 1


# ----------------------------------------------------------------------------------------------------- values


@dataclass
class Values:
    """The values of one microbatch, ``b`` sequences of ``s`` tokens, and what their arrows send."""

    traffic: Traffic
    plan: Resolved
    b: int
    s: int

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.plan.dtype]

    def local_size(self, layout: Layout | str, *shape: int) -> int:
        """Return the elements of a value of ``shape`` on each device."""
        return math.prod(self.plan.place(layout).shard_shape(shape, self.plan.mesh.sizes))

    def carry(
        self,
        of: Transfer,
        shape: tuple[int, ...],
        forward: int,
        backward: int = 0,
        itemsize: int = 0,
    ) -> None:
        """Add an arrow of the model's text (`Traffic.carry`), then the all-reduce of the gradient over the
        axes over which values begin to vary where it ends. (A value varies over the axes of its old
        region, until an all-reduce removes some; after the move, over all axes of its new region.)"""
        physical = self.plan.physical(of.arrow)
        before = (itemsize or self.itemsize) * self.local_size(physical.before, *shape)
        after = self.traffic.carry(physical, before, of, forward, backward)
        summed = {a for move in physical.moves if move.kind == "all-reduce" for a in move.axes}
        varied = set(self.plan.varying(parse_arrow(of.arrow).before.region)) - summed
        begin = tuple(a for a in physical.varying if a not in varied)
        self.traffic.add("all-reduce", begin, of, after, backward, of.gradient)

    def carry_by_ring(
        self, of: Transfer, shape: tuple[int, ...], forward: int, backward: int, merged: int = 0
    ) -> None:
        """Add an arrow that matmuls go with (`par.move_matmul` and `matmul_move`). A ring of n makes n - 1
        hops of a block forward, n - 1 backward, and so sends what the one collective would (Wang et al.
        2023). ``merged`` of the forward ones XLA joins with equal ones, of a ring its first hop."""
        if not self.plan.tp_comm_overlap:
            return self.carry(of, shape, forward - merged, backward)
        (axes,) = (move.axes for move in self.plan.physical(of.arrow).moves)
        block = self.itemsize * self.local_size("stream b s d", *shape)
        hops = (self.traffic.mesh.along(axes) - 1) * (forward + backward) - merged
        self.ring(axes, of._replace(hidden_by=MATMULS), block, hops)

    def ring(self, axes: tuple[str, ...], of: Transfer, block_bytes: int, hops: int) -> None:
        """Add hops of each rank's block round a ring (`collectives.hop`): n - 1 reach all ranks."""
        n = self.traffic.mesh.along(axes)
        kind, pieces = (
            ("all-to-all", n) if self.plan.hop == "exchange" else ("collective-permute", 1)
        )
        self.traffic.add(kind, axes, of, pieces * block_bytes, hops)


def _is_merged(plan: Resolved, config: ModelConfig) -> bool:
    """Say whether XLA joins messages of attention and of a feed-forward that read one norm: both gather it
    over tp, and backward both gather the gradient of their sum. Whose arrow the message then has is XLA's
    choice in stages that save residuals, and the feed-forward's here."""
    whole = plan.ffn_chunks == 1 and not config.experts
    return config.reads_one_norm and plan.tp_sequence and whole and config.mixer != "none"


def _activations(values: Values, config: ModelConfig, run: Runs) -> None:
    """Add the arrows of `model`, without those inside attention and between experts.

    Tensor parallelism makes of them two all-reduces of b·s·d forward and two backward per layer, one forward
    for the embedding and one backward for the logits (Shoeybi et al. 2019, section 3). With sequence
    parallelism each is a reduce-scatter and an all-gather of the same bytes (Korthikanti et al. 2022). What
    is computed again repeats all but its last reduction; attention's unless the stream after it is kept."""
    stream, plan = (values.b, values.s, config.width), values.plan
    of = functools.partial(Transfer, "activations")
    # Where a policy keeps the matmuls' results, their inputs are needed again for gradients of weights alone.
    attention = plan.remat not in ("selective", "ffn") or trained_matrices(config) & set("qkv")
    ffn = (
        plan.remat != "selective"
        or plan.ffn_chunks > 1
        or config.experts
        or trained_matrices(config) & {"gate", "up"}
    )
    values.carry(
        of("vocab b s d +v -> stream b s d"), stream, run.embed, 0 if config.lora else run.embed
    )
    merges = _is_merged(plan, config)
    if config.mixer != "none":
        again = run.again * bool(attention)
        layers = run.forward + again
        merged = again * (merges and plan.remat != "selective")
        read = of("stream b s d -> attention b s d")
        values.carry_by_ring(read, stream, layers, run.backward, merged)
        # of two results side by side nothing is computed but their sum
        reduced = run.forward + run.attention * (not config.reads_one_norm)
        back = run.backward * (not merges or plan.tp_comm_overlap)
        values.carry_by_ring(of("attention b s d +n -> stream b s d"), stream, reduced, back)
    if config.variant.qk_norm == "all":  # a mean over the heads of all ranks
        for x in "nk":
            arrow = f"attention b s +{x} -> attention b s"
            norms = Transfer("means of queries and keys over all heads", arrow)
            repeated = run.forward + run.again
            values.carry(norms, stream[:2], repeated, run.backward, FLOAT32)
    # Experts must see all positions before one travels on: their two arrows are never a ring.
    inside = "tokens" if config.experts else "ffn"
    carry, pieces = (values.carry, 1) if config.experts else (values.carry_by_ring, plan.ffn_chunks)
    piece = values.b, values.s // pieces, config.width
    again = run.again * bool(ffn)
    layers = run.forward + again
    joined = run.forward + again * (plan.remat == "selective")
    stages = plan.pipeline
    if (
        plan.tp_comm_overlap
        and stages
        and not stages.split_backward
        and plan.stage_saves == "input"
    ):
        joined -= run.backward  # what B computes again
    more = {"merged": joined} if merges else {}
    if config.ffn_width:
        read = of(f"stream b s d -> {inside} b s d")
        carry(read, piece, layers * pieces, run.backward * pieces, **more)
        normed = "ffn_post_norm.scale" in config.block_weights() and plan.remat == "block"
        forward = (run.forward + run.again * normed) * pieces
        carry(of(f"{inside} b s d +m -> stream b s d"), piece, forward, run.backward * pieces)
    values.carry(of("stream b s d -> vocab b s d"), stream, run.loss, run.loss)
    sums = Transfer("three numbers per token for the loss", "vocab b s +v -> data b s")
    tokens = values.b, values.s // plan.loss_chunks
    values.carry(sums, tokens, 3 * run.loss * plan.loss_chunks, itemsize=FLOAT32)


def _experts(values: Values, config: ModelConfig, experts: ExpertConfig, run: Runs) -> None:
    """Add the arrows of `moe`: the routers' choices, to all ranks of experts; tokens to their ranks and back,
    in a buffer with the same number of slots for each (`_exchanges`); the routing, to tp; with
    `Plan.tp_dispatch` what arrived, to tp, and what shared experts read; copies of hot experts; and the
    routers' losses. A block that is computed again sends its tokens again, and nothing back."""
    plan, b, s, ranks = values.plan, values.b, values.s, values.plan.mesh.ep
    tokens = values.local_size("tokens b s", b, s)
    pieces = values.local_size("data b", b)
    cut, tp = plan.mesh.along(plan.place("tokens c").axes), plan.mesh.tp
    pieces *= tp // cut if plan.tp_sequence else 1
    slots = experts.slots(tokens, pieces, ranks)
    layers, small = run.forward + run.again, FLOAT32
    _exchanges(values, config, run, tokens, pieces)
    arrived, k = ranks * cut * slots, experts.top_k
    moved: dict[str, tuple[tuple[int, ...], int]] = {
        "slots c d -> experts c d": ((arrived, routed_width(config)), layers),
        "experts c d +m -> slots c d +m": ((arrived, routed_width(config)), run.forward),
    }
    if experts.num_shared:
        moved |= {
            "tokens b s d -> ffn b s d": ((b, s, config.width), layers),
            "ffn b s d +m -> tokens b s d +m": ((b, s, config.width), run.forward),
        }
    for arrow, (shape, forward) in moved.items():
        values.carry(Transfer("tokens that all of tp reads", arrow), shape, forward, run.backward)
    for arrow, shape in {
        "stream b s e -> tokens b s e": (b, s, k),
        **_routing(values, experts, tokens, pieces),
        "slots c d -> experts c d": (arrived, k),
    }.items():
        of = Transfer("the routers' choices", arrow, gradient="gradients of the routers' choices")
        values.carry(of, shape, layers, run.backward, small)
        values.carry(of, shape, layers, 0, small)  # which experts: no gradient
    e, copies = experts.num_experts, plan.expert_copies
    of = Transfer("copies of experts", "experts c +e -> copies c", gradient="gradients of copies")
    values.carry(of, (e,), layers * (copies > 0), 0, small)
    rows = (
        w for w in config.block_weights().values() if copies and w.dims.startswith("experts e ")
    )
    for weight in rows:
        dims = weight.dims.removeprefix("experts e ")
        back = run.backward * (not weight.frozen)
        of = of._replace(arrow=f"experts c {dims} +e -> copies c {dims}")
        values.carry(of, (copies, *weight.shape[1:]), layers, back)
    if experts.aux_loss:
        times = run.backward + run.again if _cells(plan) else layers
        of = Transfer("tokens per expert and row", "stream b e +s -> stream b e")
        values.carry(of, (b, e), times, 0, small)


def _exchanges(values: Values, config: ModelConfig, run: Runs, tokens: int, pieces: int) -> None:
    """Add the exchanges of a device's ``tokens``, which routers see in so many ``pieces``: one between all
    ranks of ep; or one between nodes, and one between the ranks of a node (`moe.exchanges`)."""
    plan, ranks, near = values.plan, values.plan.mesh.ep, values.plan.mesh.near
    experts: Any = config.experts
    width, e, k = routed_width(config), experts.num_experts, experts.top_k
    slots = experts.slots(tokens, pieces, ranks)
    copies = ranks * visited_share(e, k, ranks)
    groups = plan.mesh.along(plan.place("tokens b").axes)
    cut = plan.mesh.along(plan.place("tokens c").axes)
    nodes = ranks // near
    # by arrow a buffer, and how often a token is in it
    buffers = {"tokens b e c d -> slots b e c d": ((groups, ranks, cut * slots), copies)}
    if near > 1:
        to_node = nodes, nodes, experts.slots(tokens, pieces, nodes)
        buffers = {
            "tokens u e c d -> nodes u e c d": (to_node, nodes * visited_share(e, k, nodes)),
            "nodes n e c d -> slots n e c d": ((near, ranks, nodes * slots), copies),
        }
    for arrow, (shape, times) in buffers.items():
        before, after = arrow.split(" -> ")
        size = values.local_size(before, *shape, width) // width
        value = "slots for tokens on their way to their experts and back"
        value += f", {min(1, times * tokens / size):.0%} of them filled"
        # Only full slots travel, unless the buffer is padded.
        full_bytes = math.inf if plan.dispatch == "padded" else 2.0 * tokens * width * times
        of = Transfer(value, ragged=plan.dispatch == "ragged", full_bytes=full_bytes)
        layers = run.forward + run.again
        values.carry(of._replace(arrow=arrow), (*shape, width), layers, run.backward)
        back = of._replace(arrow=f"{after} +m -> {before} +m")
        values.carry(back, (*shape, width), run.forward, run.backward)


def _routing(
    values: Values, experts: ExpertConfig, tokens: int, pieces: int
) -> dict[str, tuple[int, ...]]:
    """Return the arrows by which ranks of ep learn the choices of tokens, with the shapes of these."""
    k, ranks, near = experts.top_k, values.plan.mesh.ep, values.plan.mesh.near
    if near == 1:
        return {"tokens b s e -> routing b s e": (values.b, values.s, k)}
    nodes = ranks // near
    arrived = nodes * experts.slots(tokens, pieces, nodes)
    return {
        "tokens u c k -> nodes u c k": (nodes, tokens, k),
        "nodes n c k -> slots n c k": (near, arrived, k),
    }


def _attention(values: Values, config: ModelConfig, run: Runs) -> None:
    """Add the arrows of attention over a sequence that sp cuts, and the hops of a ring.

    A ring of n makes n - 1 hops of K and V, in one message, and again backward, with the float32 gradients of
    both n - 1 hops behind them (Liu et al. 2023, whose ring makes n). A window may ask for fewer.
    """
    plan, b, s = values.plan, values.b, values.s
    layers, again = run.forward + run.again, run.backward
    k, h = config.num_kv_heads, config.head_width
    if plan.config.kinds:  # ranks that are more than the heads of this kind hold copies
        ranks = plan.mesh.along(plan.regions["queries"]["k"])
        k = -(-k // ranks) * ranks
    queries = b, s, k, max(1, config.num_heads // k), h
    results = (*queries[:-1], config.value_width)
    # The result is moved back again for the stream behind it, where this is not kept, or for what reads it
    # backward: gradients of ``o`` and of a gate, and a ring, which keeps what it multiplies.
    gated = "attention.gate" in config.block_weights()
    reads = "o" in trained_matrices(config) or gated or plan.tp_comm_overlap
    repeated = run.again if reads else run.attention * (not config.reads_one_norm)
    of = Transfer("queries and what attention gives", "attention b s k r h -> queries b s k r h")
    values.carry(of, queries, layers, again)
    of = of._replace(arrow="queries b s k r h -> attention b s k r h")
    values.carry(of, results, run.forward + repeated, again)
    gradients = "gradients of keys and values"
    of = Transfer("keys and values", "attention b s k h -> keys b s k h", gradient=gradients)
    if config.has_latent_attention:  # instead of each head's keys and values
        latents = b, s, config.cache_width
        of = of._replace(arrow="attention b s c -> keys b s c")
        values.carry(of, latents, layers, again)
        both = values.local_size("keys b s c", *latents)
    else:
        both = 0
        for width in (h, config.value_width):
            values.carry(of, (b, s, k, width), layers, again)
            both += values.local_size("keys b s k h", b, s, k, width)
    _ids(values, run)
    if ring := plan.regions["keys"]["s"]:
        hops = plan.ring_hops(config.mask, s)
        of = Transfer(of.value, "keys b t -> the next rank", hidden_by=ATTENTION)
        forward = hops * (run.forward + run.attention + again)
        values.ring(ring, of, both * values.itemsize, forward)
        values.ring(ring, of._replace(value=gradients), both * FLOAT32, hops * again)


def _ids(values: Values, run: Runs) -> None:
    """Add the ids of tokens."""
    ids = Transfer("ids of positions and documents", "data b s -> ids b s")
    values.carry(ids, (values.b, values.s), run.ids, itemsize=4)


def _states(values: Values, config: ModelConfig, run: Runs) -> None:
    """Add the hops of a recurrent state, in float32, from each rank of sp to the next, and of its gradient
    back (Sun et al. 2024, LASP); and one of the last positions that a short convolution reads."""
    plan, axes = values.plan, values.plan.mesh.live("sp", "ul")
    rows, tp = values.local_size("data b", values.b), plan.mesh.tp
    times = run.forward + run.again + run.backward
    of = Transfer("recurrent states", "state b -> the next rank")
    message = FLOAT32 * rows * math.ceil(config.state_size / tp)
    values.ring(axes, of, message, (plan.mesh.sp - 1) * times)
    numbers = config.positions_before * config.convolved // tp
    of = Transfer("positions before a convolution", "halo b s -> the next rank")
    values.ring(axes, of, values.itemsize * rows * numbers, times * bool(numbers))


def _stages(values: Values, config: ModelConfig, schedule: Schedule) -> None:
    """Add what goes to the next stage of a pipeline, activations, and to the previous one, gradients."""
    send = slots(lockstep(schedule)).send
    size = values.itemsize * values.local_size("stream b s d", values.b, values.s, config.width)
    for direction, arrow in {1: NEXT_STAGE, -1: PREVIOUS_STAGE}.items():
        of = Transfer("activations and their gradients", arrow, STAGE_LINKS)
        times = sum(direction in row for row in send)
        values.traffic.add("collective-permute", ("pp",), of, size, times)
