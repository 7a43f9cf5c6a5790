"""What a training step of this package sends, to the byte, before anything is traced: the tests hold
`step_traffic` against the compiled program, exactly."""

import functools
import math
from collections import Counter
from dataclasses import dataclass, field

from llmpar.plan.layout import TRANSPOSES, Arrow
from llmpar.plan.mesh_shape import MeshShape
from llmpar.plan.model_config import ADAPTABLE, ExpertConfig, ModelConfig, Weight
from llmpar.plan.plan import BEST, CHOSEN, LOGITS, Resolved, Serving
from llmpar.plan.schedules import Schedule
from llmpar.plan.timetable import slots, timetable
from llmpar.predict.formulas import ring_bytes, visited_share

FLOAT32 = 4
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass
class Prediction:
    """What the collectives of one kind over the same axes send, per device and step.

    ``messages`` counts executions by (what was sent, the arrow that it was sent for, bytes of one message).
    """

    kind: str = ""
    group_size: int = 1
    messages: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    def sent(self, message_bytes: int) -> int:
        """Bytes that a device sends of one message."""
        return ring_bytes(self.kind, message_bytes, self.group_size)

    @property
    def count(self) -> int:
        """Executions per step."""
        return self.messages.total()

    @property
    def bytes_sent(self) -> int:
        """Bytes sent per device and step."""
        return sum(self.sent(size) * times for (_, _, size), times in self.messages.items())

    @property
    def arrows(self) -> dict[str, tuple[int, int]]:
        """The arrow's text -> (executions, bytes)."""
        found: dict[str, tuple[int, int]] = {}
        for (_, text, size), times in self.messages.items():
            count, sent = found.get(text, (0, 0))
            found[text] = count + times, sent + times * self.sent(size)
        return found


@dataclass(frozen=True)
class Sent:
    """What an arrow moves, in words: the arrow's text, the value, its gradient (where it has another name),
    and whether only the full part of each message travels."""

    text: str
    value: str
    gradient: str = ""
    ragged: bool = False


class Traffic(dict):
    """(axes, kind) -> Prediction. `carry` adds what an arrow sends, `add` a single kind of collective."""

    def __init__(self, mesh: MeshShape):
        super().__init__()
        self.mesh = mesh

    def add(
        self, kind: str, axes: tuple[str, ...], of: str, message_bytes: int, count: int = 1, text: str = ""
    ) -> None:
        """``count`` collectives over ``axes`` on messages ``of`` something, of ``message_bytes`` (the
        unscattered size), for the arrow ``text`` of the model."""
        axes = self.mesh.live(*(a for a in self.mesh.sizes if a in axes))
        if axes and count:
            row = Prediction(kind, self.mesh.along(axes))
            self.setdefault((",".join(axes), kind), row).messages[of, text, message_bytes] += count

    def carry(self, arrow: Arrow, held_bytes: int, of: Sent, forward: int, backward: int = 0) -> int:
        """An arrow on a value of which each device holds ``held_bytes``, carried out ``forward`` times; its
        gradient comes back ``backward`` times. Gives the bytes that each device holds in the end.

        Forward the collectives are those of `Arrow.moves`. Backward they are their transposes
        (`notation.TRANSPOSES`), on the same messages.
        """
        for move in arrow.moves:
            parts = self.mesh.along(move.axes)
            message = held_bytes * parts if move.kind == "all-gather" else held_bytes
            held_bytes = message // parts if move.kind in ("reduce-scatter", "slice") else message
            for kind, what, count in (
                (move.kind, of.value, forward),
                (TRANSPOSES.get(move.kind), of.gradient or of.value, backward),
            ):
                if kind not in (None, "slice"):  # a slice takes of what is there
                    self.add(of.ragged * "ragged-" + kind, move.axes, what, message, count, of.text)
        return held_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes sent per device and step, over all axes."""
        return sum(row.bytes_sent for row in self.values())


@dataclass(frozen=True)
class Runs:
    """How often a device runs each part of the model in one step. Layers are counted one by one."""

    embed: int  # the look-up, forward and backward
    loss: int  # the loss, forward and backward
    forward: int  # layers forward
    again: int  # and again for the backward pass, but for the last reduction (`Plan.remat`)
    attention: int  # of these repetitions, those that repeat attention itself and its reduction
    backward: int  # layers backward
    matrices: int  # gathers of each matrix of a layer that ZeRO-3 stores cut
    vectors: int  # of each vector: a bias is of no use backward
    attended: int  # calls of a stack of layers, each of which gathers its tokens' ids once


def runs(plan: Resolved, stage: int = 0) -> Runs:
    """Read off the plan, and of a pipeline off its schedule: F runs a chunk forward, unless the loss follows;
    B runs it forward again from what F was given, or has its residuals; then backward."""
    m, order, num_layers = plan.microbatches, plan.pipeline, plan.config.num_layers
    recomputed, attention = plan.remat != "none", plan.remat == "block"
    keeps = not plan.reshard_after_forward
    if order is None:
        n = num_layers * m
        twice = n * (1 + (recomputed and not keeps))
        return Runs(m, m, n, n * recomputed, n * attention, n, n * (2 - keeps), twice, m)
    m //= len(order.routes)  # each way through the stages has as many
    embed, loss = (m * sum(route[i][0] == stage for route in order.routes) for i in (0, -1))
    layers = order.layers(num_layers)
    n = m * sum(num for cell, num in layers.items() if cell[0] == stage)
    last = m * sum(layers[route[-1]] for route in order.routes if route[-1][0] == stage)
    cells = order.visits * plan.microbatches
    if plan.stage_saves == "residuals":
        # A layer that only some chunks have keeps its gathered weights.
        twice = n + cells * min(layers.values())
        # What B computes anew from the batch asks the ids where `attention.as_promised` does.
        asks = plan.in_order and plan.attention_kernel != "flash" and not plan.regions["keys"]["s"]
        return Runs(embed, loss, n, 0, 0, n, twice, twice, cells * (1 + asks))
    forward, attended = 2 * n - last, 2 * cells - loss
    if order.split_backward:  # layer by layer, nothing checkpointed
        return Runs(embed, loss, forward, 0, 0, n, forward, forward, attended)
    again = n * recomputed, n * attention
    return Runs(embed, loss, forward, *again, n, forward + n, forward + again[0], attended)


def most_traffic(plan: Resolved, batch_size: int, seq_len: int) -> Traffic:
    """`step_traffic` of the pipeline's stage that sends most."""
    stages = (step_traffic(plan, batch_size, seq_len, stage) for stage in range(plan.mesh.pp))
    return max(stages, key=lambda sent: sent.total_bytes)


@functools.lru_cache(maxsize=256)
def step_traffic(
    plan: Resolved, batch_size: int, seq_len: int, stage: int = 0, run: Runs | None = None
) -> Traffic:
    """Everything that a device of a pipeline's stage (of the only one, where there is none) sends in one
    training step, under the Manual mode. All stages take part in each permute between them, whether they
    have something to send or not. ``run`` says how often each part runs, if not as the plan has it."""
    config, traffic = plan.config, Traffic(plan.mesh)
    run = run or runs(plan, stage)
    _weights(traffic, plan, run)
    values = Values(traffic, plan, batch_size // plan.microbatches, seq_len)
    _activations(values, config, run)
    if config.experts:
        _experts(values, config, config.experts, run)
    if plan.mesh.sp > 1:
        _attention(values, config, run)
    if plan.pipeline:
        _stages(values, config, plan.pipeline)
    tally = config.num_layers * (config.experts.num_experts + 2) if config.experts else 0
    small = "the loss, the tokens and the gradients' norm" + ", the tally of tokens per expert" * bool(tally)
    axes, text = plan.mesh.live(*plan.mesh.sizes), "loss, tokens and norm"
    traffic.add("all-reduce", axes, small, FLOAT32 * (3 + tally), text=text)
    return traffic


def serving_traffic(plan: Serving, num_rows: int, width: int = 1, echo: bool = False) -> Traffic:
    """What a device sends in a step of `llmpar.serve` that takes up to ``width`` tokens of each row: what the
    model's arrows send forward, two small sums of each layer over sp, over tp the logits of the next tokens
    (with ``echo`` behind every token), and what is told of these, to all devices."""
    config, traffic = plan.config, Traffic(plan.mesh)
    values, layers = Values(traffic, plan, num_rows, width), config.num_layers
    run = Runs(1, 0, layers, 0, 0, 0, 0, 0, 1)
    for path, (weight, layouts) in plan.weight_layouts.items():
        times = layers if path.startswith("blocks.") else 1
        held = ITEMSIZE[plan.dtype] * math.prod(layouts.stored.shard_shape(weight.shape, plan.mesh.sizes))
        traffic.carry(layouts.gather, held // times, Sent(weight.dims.replace(" l ", " "), "weights"), times)
    _activations(values, config, run)
    if config.experts:
        _experts(values, config, config.experts, run)
    k, h = config.num_kv_heads, config.head_width
    scores = FLOAT32 * values.held("attention b s k r", num_rows, width, k, config.num_heads // k)
    text, sp = "cache b s k r +t -> attention b s k r", plan.regions["cache"]["t"]
    for of, size in {"maxima of scores": scores, "sums over the cache": scores * (h + 1)}.items():
        traffic.add("all-reduce", sp, of, size, layers, text)
    places, numbers = width if echo else 1, 2 * (2 + min(BEST, config.vocab_size))
    values.carry(LOGITS, (num_rows, config.vocab_size), "logits", places, itemsize=FLOAT32)
    told = FLOAT32 * values.held("data s b n", places, num_rows, numbers)
    traffic.carry(plan.physical(CHOSEN), told, Sent(CHOSEN, "chosen tokens, and log-probabilities"), 1)
    return traffic


# ---------------------------------------------------------------------------------------------------- weights


def _weights(traffic: Traffic, plan: Resolved, run: Runs) -> None:
    """The arrows of each weight's life. Per device and parameter, with N = fsdp and a microbatches, they send
    (Rajbhandari et al. 2020, section 7): ZeRO 0 and 1 2, ZeRO 2 a + 1, ZeRO 3 up to 3a times (N-1)/N."""
    held = lambda layout, shape: math.prod(layout.shard_shape(shape, traffic.mesh.sizes))
    bucketed: list[tuple[tuple, int]] = []
    for path, (weight, layouts) in sorted(plan.weight_layouts.items(), key=lambda item: item[0].split(".")):
        dims, shape, stacked = weight.dims, weight.shape, path.startswith("blocks.")
        gathers, gradients, pieces = _uses(plan, run, path, weight)
        layers, visits = (shape[0] // plan.mesh.pp, _visits(plan)) if stacked else (1, 1)
        stored = held(layouts.stored, shape) // layers
        of = Sent(dims.replace(" l ", " "), "weights", "gradients")
        copies = plan.pipeline.parameter_copies if stacked and plan.pipeline else 1
        if plan.gathers == "step":  # all layers at once, those that are lent too; no gradient comes back here
            of, stored, gathers, gradients = Sent(dims, "weights"), copies * layers * stored, 1, 0
        traffic.carry(layouts.gather, ITEMSIZE[plan.dtype] * stored, of, gathers, gradients)
        item = ITEMSIZE[plan.dtype] if weight.frozen else FLOAT32
        lend = functools.partial(traffic.add, "collective-permute", ("pp",), text="l -> the opposite stage")
        lend("weights of the other direction", item * held(layouts.stored, shape), int(copies > 1))
        if weight.frozen:
            continue
        lend("their gradients", FLOAT32 * held(layouts.accumulated, shape), int(copies > 1))
        if plan.reduce == "layer":  # summed where its values begin to differ: inside the backward pass
            traffic.add("all-reduce", layouts.replica_axes, "gradients", FLOAT32 * stored, gradients, of.text)
        of, added = Sent(f"gradient {dims}", "gradients"), FLOAT32 * held(layouts.accumulated, shape)
        traffic.carry(layouts.accumulate, FLOAT32 * held(layouts.unreduced, shape) // visits, of, pieces)
        if plan.reduce == "bucket":
            bucketed.append(((layouts.replica_axes, layouts.stored.axes), added))
        else:
            traffic.carry(layouts.finish, added, of, 1)
        of = Sent(f"updated {dims}", "updated weights")
        traffic.carry(layouts.restore, FLOAT32 * held(layouts.reduced, shape), of, 1)
    for (axes, _), members in plan.buckets(bucketed):
        text, sent = f"bucket of {len(members)} gradients", sum(bucketed[j][1] for j in members)
        traffic.add("all-reduce", axes, "gradients", sent, text=text)


def _uses(plan: Resolved, run: Runs, path: str, weight: Weight) -> tuple[int, int, int]:
    """How often a weight is gathered for use, its gradient comes back, and is added up."""
    if path.startswith("blocks."):
        gathers = run.vectors if weight.is_vector else run.matrices
        kept = plan.stage_saves == "residuals" or plan.remat in ("selective", "ffn")
        if path.endswith("_bias") and kept:  # in the queries, keys and values that are kept
            gathers = run.forward
        learned = not weight.frozen and path != "blocks.experts.bias"  # which follows a rule
        return gathers, learned * run.backward, plan.microbatches * _visits(plan)
    embedding = path == "embedding"  # as the head too, a pipeline uses it on its first stage and its last
    in_loss = not embedding or plan.config.tied and plan.pipeline is not None
    times = run.embed * embedding + run.loss * in_loss
    return times, (not weight.frozen) * times, times if plan.pipeline else plan.microbatches


def _visits(plan: Resolved) -> int:
    """Chunks of the model that a stage adds gradients to one by one."""
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

    def held(self, layout: str, *shape: int) -> int:
        """Elements of a value of ``shape`` that each device holds."""
        return math.prod(self.plan.place(layout).shard_shape(shape, self.plan.mesh.sizes))

    def ring(self, arrow: str, shape, of: str, forward: int, backward: int) -> None:
        """An arrow that products go with (`par.Manual.enter` and `leave`). A ring of n makes n - 1 hops of a
        block forward, n - 1 backward, and so sends what the one collective would (Wang et al. 2023)."""
        if not self.plan.tp_comm_overlap:
            return self.carry(arrow, shape, of, forward, backward)
        (axes,) = (move.axes for move in self.plan.physical(arrow).moves)
        block = self.itemsize * self.held("stream b s d", *shape)
        self.round(axes, of, block, forward + backward, arrow)

    def round(self, axes: tuple[str, ...], of: str, held_bytes: int, times: int, text: str) -> None:
        """What ranks of a ring hold goes round it, so many times: n - 1 hops each (`par.hop`)."""
        n = self.traffic.mesh.along(axes)
        kind, pieces = ("all-to-all", n) if self.plan.hop == "exchange" else ("collective-permute", 1)
        self.traffic.add(kind, axes, of, pieces * held_bytes, (n - 1) * times, text)

    def carry(
        self, arrow: str, shape, of: str, forward: int, backward: int = 0, itemsize: int = 0, **names
    ) -> None:
        """`Traffic.carry` for an arrow of the model's text, then the all-reduce of the gradient over the axes
        along which values begin to differ where it ends (`Arrow.begin`)."""
        sent = Sent(arrow, of, **names)
        held = (itemsize or self.itemsize) * self.held(arrow.partition(" ->")[0], *shape)
        physical = self.plan.physical(arrow)
        held = self.traffic.carry(physical, held, sent, forward, backward)
        self.traffic.add("all-reduce", physical.begin, sent.gradient or of, held, backward, arrow)


def _activations(values: Values, config: ModelConfig, run: Runs) -> None:
    """The arrows of `model`, without those inside attention and between experts.

    Tensor parallelism makes of them two all-reduces of b·s·d forward and two backward per layer, one forward
    for the embedding and one backward for the logits (Shoeybi et al. 2019, section 3). With sequence
    parallelism each is a reduce-scatter and an all-gather of the same bytes (Korthikanti et al. 2022). What
    is computed again repeats all but its last reduction; attention's unless the stream after it is kept."""
    stream, of, plan = (values.b, values.s, config.width), "activations", values.plan
    # Where a policy keeps the products, what entered them is needed again for gradients of weights alone.
    targets = set(config.lora.targets if config.lora else ADAPTABLE)
    attention = plan.remat not in ("selective", "ffn") or targets & set("qkv")
    ffn = plan.remat != "selective" or plan.ffn_chunks > 1 or config.experts or targets & {"gate", "up"}
    values.carry("vocab b s d +v -> stream b s d", stream, of, run.embed, 0 if config.lora else run.embed)
    layers = run.forward + run.again * bool(attention)
    values.ring("stream b s d -> attention b s d", stream, of, layers, run.backward)
    reduced = run.forward + run.attention
    values.ring("attention b s d +n -> stream b s d", stream, of, reduced, run.backward)
    # Experts must see all positions before one travels on: their two arrows are never a ring.
    carry, pieces = (values.carry, 1) if config.experts else (values.ring, plan.ffn_chunks)
    stream = values.b, values.s // pieces, config.width
    layers = run.forward + run.again * bool(ffn)
    carry("stream b s d -> ffn b s d", stream, of, layers * pieces, run.backward * pieces)
    carry("ffn b s d +m -> stream b s d", stream, of, run.forward * pieces, run.backward * pieces)
    values.carry("stream b s d -> vocab b s d", (values.b, values.s, config.width), of, run.loss, run.loss)
    chunks, of = plan.loss_chunks, "three numbers per token for the loss"
    piece = values.b, values.s // chunks
    values.carry("vocab b s +v -> data b s", piece, of, 3 * run.loss * chunks, itemsize=FLOAT32)


def _experts(values: Values, config: ModelConfig, experts: ExpertConfig, run: Runs) -> None:
    """The arrows of `moe`: who chose which expert, told to all ranks of experts; tokens to their ranks and
    back, in a buffer with the same number of slots for each; what tp must know of the routing; and the
    routers' losses. A block that is computed again sends its tokens again, and nothing back."""
    plan, b, s, ranks = values.plan, values.b, values.s, values.plan.mesh.ep
    tokens, pieces = values.held("data b s", b, s), values.held("data b", b)
    slots = experts.slots(tokens, pieces * (plan.mesh.tp if plan.tp_sequence else 1), ranks)
    layers, choices, small = run.forward + run.again, (b, s, experts.top_k), FLOAT32
    groups = plan.mesh.along(plan.place("ffn b").axes)
    filled = min(1, visited_share(experts.num_experts, experts.top_k, ranks) * tokens / slots)
    of = f"slots for tokens on their way to their experts and back, {filled:.0%} of them filled"
    buffer, ragged = (groups, ranks, slots, config.width), plan.dispatch == "ragged"  # then at most so much
    there, back = "ffn b e c d -> experts b e c d", "experts b e c d +m -> ffn b e c d +m"
    values.carry(there, buffer, of, layers, run.backward, ragged=ragged)
    values.carry(back, buffer, of, run.forward, run.backward, ragged=ragged)
    of, gradients = "the routers' choices", "gradients of the routers' choices"
    for arrow in ("stream b s e -> ffn b s e", "ffn b s e -> routing b s e"):
        values.carry(arrow, choices, of, layers, run.backward, small, gradient=gradients)
        values.carry(arrow, choices, of, layers, 0, small)  # which experts: no gradient
    e = experts.num_experts
    cells = plan.pipeline and plan.pipeline.visits * plan.microbatches  # each adds its routers' losses, in B
    if experts.aux_loss:
        times = run.backward + run.again if cells else layers
        values.carry("stream b e +s -> stream b e", (b, e), "tokens per expert and row", times, 0, small)
    values.carry("stream b +s -> data b +s", (b,), "the routers' losses", cells or run.loss, itemsize=small)


def _attention(values: Values, config: ModelConfig, run: Runs) -> None:
    """The arrows of attention over a sequence that sp cuts, and the hops of a ring.

    A ring of n makes n - 1 hops of K and V, in one message, and again backward, with the float32 gradients of
    both n - 1 hops behind them (Liu et al. 2023, whose ring makes n).
    """
    plan, b, s, layers, again = values.plan, values.b, values.s, run.forward + run.again, run.backward
    k, h = config.num_kv_heads, config.head_width
    of, gradients, met = "keys and values", "gradients of keys and values", "queries and what attention gives"
    queries, keys = (b, s, k, config.num_heads // k, h), (b, s, k, h)
    values.carry("attention b s k r h -> queries b s k r h", queries, met, layers, again)
    values.carry("queries b s k r h -> attention b s k r h", queries, met, layers, again)
    values.carry("attention b s k h -> keys b s k h", keys, of, 2 * layers, 2 * again, gradient=gradients)
    ids = "ids of positions and documents"
    values.carry("data b s -> ids b s", (b, s), ids, 2 * run.attended, itemsize=4)
    if ring := plan.regions["keys"]["s"]:
        both = 2 * values.held("keys b s k h", *keys)
        turns, text = run.forward + run.attention + again, "keys b t -> the next rank"
        for name, item, times in ((of, values.itemsize, turns), (gradients, FLOAT32, again)):
            values.round(ring, name, both * item, times, text)


def _stages(values: Values, config: ModelConfig, schedule: Schedule) -> None:
    """Activations go to the next stage of a pipeline, their gradients to the previous one."""
    send = slots(timetable(schedule)).send
    held = values.itemsize * values.held("stream b s d", values.b, values.s, config.width)
    for way, where in {1: "next", -1: "previous"}.items():
        text, times = f"stream b s d -> the {where} stage", sum(way in row for row in send)
        of = "activations and their gradients"
        values.traffic.add("collective-permute", ("pp",), of, held, times, text)
