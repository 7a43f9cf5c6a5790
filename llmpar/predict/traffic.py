"""What a training step sends, by formula, before anything is traced.

`formulas` has the published ones; this file applies their reasoning to the model and the step of this
package, to the byte. The tests hold `step_traffic` against the compiled program, exactly.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from llmpar.config import ExpertConfig, ModelConfig, is_vector
from llmpar.notation import AXES, parse_layout, ring_bytes
from llmpar.plan import Plan
from llmpar.timetable import slots, timetable

FLOAT32 = 4
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass
class Prediction:
    """Executions per step and bytes sent per device and step, by (mesh axes, kind of collective).

    ``of`` says what was sent: name -> bytes that one collective sends -> how many such.
    """

    count: int = 0
    bytes_sent: int = 0
    of: dict[str, Counter[int]] = field(default_factory=dict, compare=False)


class Traffic(dict):
    """(axes, kind) -> Prediction. `add` does the ring arithmetic (`notation.ring_bytes`)."""

    def __init__(self, sizes: dict[str, int]):
        super().__init__()
        self.sizes = sizes

    def add(self, kind: str, axes: tuple[str, ...], of: str, message_bytes: int, count: int = 1) -> None:
        """``count`` collectives over ``axes`` on messages ``of`` something, of ``message_bytes`` (the
        unscattered size)."""
        axes = tuple(a for a in self.sizes if a in axes and self.sizes[a] > 1)
        if not axes or not count:
            return
        group = math.prod(self.sizes[a] for a in axes)
        row = self.setdefault((",".join(axes), kind), Prediction())
        row.count += count
        one = ring_bytes(kind, message_bytes, group)
        row.bytes_sent += count * one
        row.of.setdefault(of, Counter())[one] += count

    @property
    def total_bytes(self) -> int:
        """Bytes sent per device and step, over all axes."""
        return sum(row.bytes_sent for row in self.values())


@dataclass
class Runs:
    """How often a device runs each part of the model in one step. Layers are counted one by one.

    Attributes:
        embed, loss: the look-up and the loss, forward and backward.
        forward, again: layers forward; and again for the backward pass, but for the last reduction
            (`Plan.remat`).
        backward: layers backward.
        matrices, vectors: gathers of each weight of a layer that ZeRO-3 stores cut; a bias is of no use
            backward.
        attended: calls of a stack of layers, each of which gathers its tokens' ids once.
    """

    embed: int
    loss: int
    forward: int
    again: int
    backward: int
    matrices: int
    vectors: int
    attended: int


def runs(config: ModelConfig, plan: Plan, stage: int = 0) -> Runs:
    """Read off the plan, and of a pipeline off its schedule: F runs a chunk forward, unless the loss follows;
    B runs it forward again from what F was given, or has its residuals; then backward."""
    m, order, recomputed = plan.microbatches, plan.pipeline, plan.remat == "block"
    keeps = not plan.reshard_after_forward
    if order is None:
        n = config.num_layers * m
        return Runs(m, m, n, n * recomputed, n, n * (2 - keeps), n * (1 + (recomputed and not keeps)), m)
    m //= len(order.routes)  # each way through the stages has as many
    embed, loss = (m * sum(route[i][0] == stage for route in order.routes) for i in (0, -1))
    layers = order.layers(config.num_layers)
    n = m * sum(num for cell, num in layers.items() if cell[0] == stage)
    last = m * sum(layers[route[-1]] for route in order.routes if route[-1][0] == stage)
    cells = order.visits * plan.microbatches
    if plan.stage_saves == "residuals":
        twice = n + cells * min(
            layers.values()
        )  # a layer that only some chunks have keeps its gathered weights
        return Runs(embed, loss, n, 0, n, twice, twice, cells)
    forward, attended = 2 * n - last, 2 * cells - loss
    if order.split_backward:  # layer by layer, nothing checkpointed
        return Runs(embed, loss, forward, 0, n, forward, forward, attended)
    again = n * (not keeps)
    return Runs(
        embed, loss, forward, n * recomputed, n, forward + again, forward + again * recomputed, attended
    )


def step_traffic(config: ModelConfig, plan: Plan, batch_size: int, seq_len: int, stage: int = 0) -> Traffic:
    """Everything that a device of a pipeline's stage (of the only one, where there is none) sends in one
    training step, under the Manual reading. All stages take part in each permute between them, whether they
    have something to send or not.
    """
    traffic, run = Traffic(plan.mesh.sizes), runs(config, plan, stage)
    _weights(traffic, config, plan, run)
    _activations(traffic, config, plan, batch_size, seq_len, run)
    tally = (
        config.num_layers * (config.experts.num_experts + 2) if config.experts and not plan.pipeline else 0
    )
    small = "the loss, the tokens and the gradients' norm" + ", the tally of tokens per expert" * bool(tally)
    traffic.add("all-reduce", plan.live(*AXES), small, FLOAT32 * (3 + tally))
    return traffic


def _weights(traffic: Traffic, config: ModelConfig, plan: Plan, run: Runs) -> None:
    """Gather weights, reduce gradients, gather updates. Per device and parameter, with N = fsdp and a
    microbatches (Rajbhandari et al. 2020, section 7): ZeRO 0 and 1 move 2, ZeRO 2 a + 1, ZeRO 3 up to 3a
    times (N-1)/N."""
    sizes, micro, item = plan.mesh.sizes, plan.microbatches, ITEMSIZE[plan.dtype]
    buckets: dict[tuple, list[int]] = {}
    for path, (dims, shape) in sorted(
        plan.padded(config).param_shapes().items(), key=lambda item: item[0].split(".")
    ):
        stacked = path.startswith("blocks.")
        layers = shape[0] // plan.mesh.pp if stacked else 1
        elements = math.prod(plan.place(dims).shard_shape(shape, sizes))  # of the leaf, whole over fsdp
        one = elements // layers
        shard = math.prod(plan.graded(dims).shard_shape(shape, sizes))
        fsdp = plan.live("fsdp")
        region = parse_layout(dims).region
        rest = tuple(a for a in plan.live("pp") + plan.varying(region) if a not in plan.stored(dims).axes)
        vector = is_vector(parse_layout(dims))
        learned = path != "blocks.experts.bias"  # that one follows a rule, and no gradient flows to it
        twice = (
            config.tied and plan.pipeline is not None
        )  # on its first stage and on its last; else one value is used twice
        used = run.embed * (path == "embedding") + run.loss * (path != "embedding" or twice)
        if plan.zero == 3:
            gathers = used if not stacked else run.vectors if vector else run.matrices
            if vector and "bias" in path and plan.stage_saves == "residuals":
                gathers = run.forward
            traffic.add("all-gather", fsdp, "weights", one * item, gathers)
            traffic.add(
                "reduce-scatter", fsdp, "gradients", one * item, learned * (run.backward if stacked else used)
            )
        if (
            stacked and plan.pipeline and plan.pipeline.parameter_copies > 1
        ):  # borrowed, and their gradients returned
            for place, of in (
                (plan.stored, "weights of the other direction"),
                (plan.accumulated, "their gradients"),
            ):
                traffic.add(
                    "collective-permute",
                    ("pp",),
                    of,
                    FLOAT32 * math.prod(place(dims).shard_shape(shape, sizes)),
                )
        if plan.zero in (1, 2):
            visits = (
                plan.pipeline.visits if plan.pipeline and stacked else 1
            )  # a chunk's gradients are cut by themselves
            times = 1 if plan.zero == 1 else micro * visits if stacked or not plan.pipeline else used
            traffic.add(
                "reduce-scatter",
                fsdp,
                "gradients",
                elements * FLOAT32 // (visits if plan.zero == 2 else 1),
                times,
            )
            traffic.add("all-gather", fsdp, "updated weights", elements * FLOAT32)
            rest = tuple(a for a in rest if a != "fsdp")
        if plan.reduce == "layer":
            message = (shard if plan.zero else elements) // layers * FLOAT32
            traffic.add("all-reduce", rest, "gradients", message, learned * layers * micro)
        elif plan.reduce == "bucket":
            buckets.setdefault((rest, plan.stored(dims).axes), []).append(elements * FLOAT32)
        else:
            traffic.add("all-reduce", rest, "gradients", (shard if plan.zero else elements) * FLOAT32)
    for (axes, _), leaves in buckets.items():
        filled = 0
        for size in leaves:
            filled += size
            if filled >= plan.bucket_bytes:
                traffic.add("all-reduce", axes, "gradients", filled)
                filled = 0
        if filled:
            traffic.add("all-reduce", axes, "gradients", filled)


def _activations(
    traffic: Traffic, config: ModelConfig, plan: Plan, batch_size: int, seq_len: int, run: Runs
) -> None:
    """Tensor parallelism, per microbatch (Shoeybi et al. 2019, section 3): two all-reduces of b·s·d forward
    and two backward per layer, one forward for the embedding, one backward for the logits; three numbers per
    token for the loss. With sequence parallelism each all-reduce is a reduce-scatter and an all-gather of the
    same bytes (Korthikanti et al. 2022).
    """
    sizes, tp = plan.mesh.sizes, plan.live("tp")
    tokens = math.prod(plan.place("data b s").shard_shape((batch_size // plan.microbatches, seq_len), sizes))
    stream = tokens * config.width * ITEMSIZE[plan.dtype]
    both, ends = 2 * (run.forward + run.backward), run.embed + run.loss
    if plan.tp_sequence:
        traffic.add("all-gather", tp, "activations", stream, both + 2 * run.again + ends)
        traffic.add("reduce-scatter", tp, "activations", stream, both + run.again + ends)
    else:
        traffic.add("all-reduce", tp, "activations", stream, both + run.again + ends)
    chunk, chunks = tokens * FLOAT32 // plan.loss_chunks, run.loss * plan.loss_chunks
    traffic.add("all-reduce", tp, "three numbers per token for the loss", chunk, 3 * chunks)
    if config.experts:
        rows = math.prod(plan.place("data b").shard_shape((batch_size // plan.microbatches,), sizes))
        _experts(traffic, config, config.experts, plan, tokens, rows, run)
    if plan.live("sp"):
        _attention(traffic, config, plan, tokens, run)
    if plan.pipeline:
        send = slots(timetable(plan.pipeline)).send
        here = stream // (plan.mesh.tp if plan.tp_sequence else 1)
        times = sum(int((send == way).any(1).sum()) for way in (1, -1))
        traffic.add("collective-permute", ("pp",), "activations and their gradients", here, times)


def _experts(
    traffic: Traffic, config: ModelConfig, how: ExpertConfig, plan: Plan, tokens: int, rows: int, run: Runs
) -> None:
    """Two all-to-alls forward and two backward per layer, of a buffer with the same number of slots for each
    rank of ep; the tokens per expert, gathered; what tp must know of the routing: weights, experts, and the
    weights' gradient; for the balance loss the tokens per expert of each row that is cut; and once per step
    the tally."""
    ep, tp = plan.live("ep"), plan.live("tp")
    blocks, block = how.slots(tokens, rows * (plan.mesh.tp if plan.tp_sequence else 1), plan.mesh.ep)
    buffer = plan.mesh.ep * blocks * block * config.width * ITEMSIZE[plan.dtype]
    forward = run.forward + run.again
    filled = tokens * how.top_k / (plan.mesh.ep * blocks * block)
    slots = f"slots for tokens on their way to their experts and back, {filled:.0%} of them filled"
    kind = (
        "ragged-all-to-all" if plan.dispatch == "ragged" else "all-to-all"
    )  # ragged: this is the most that can be sent
    traffic.add(kind, ep, slots, buffer, 2 * (forward + run.backward))
    traffic.add("all-gather", ep, "tokens per expert", plan.mesh.ep * how.num_experts * FLOAT32, forward)
    cells = plan.pipeline and plan.pipeline.visits * plan.microbatches  # each adds its routers' losses, in B
    if how.aux_loss:
        shared = run.backward + run.again if cells else forward
        traffic.add(
            "all-reduce",
            plan.place("stream s").axes,
            "tokens per expert and row",
            rows * how.num_experts * FLOAT32,
            shared,
        )
    choices = tokens * how.top_k * FLOAT32
    if plan.tp_sequence:
        traffic.add("all-gather", tp, "the routers' choices", choices, 2 * forward)
        traffic.add("reduce-scatter", tp, "gradients of the routers' choices", choices, run.backward)
        traffic.add("all-reduce", tp, "the routers' losses", rows * FLOAT32, cells or run.loss)
    else:
        traffic.add("all-reduce", tp, "gradients of the routers' choices", choices, run.backward)


def _attention(traffic: Traffic, config: ModelConfig, plan: Plan, tokens: int, run: Runs) -> None:
    """Attention over a sequence cut by sp. A ring of n makes n - 1 hops of K, V and two id arrays forward,
    and again backward with the float32 gradients of K and V n - 1 hops behind them (Liu et al. 2023, whose
    ring makes n).
    """
    sp, n, tp = plan.live("sp"), plan.mesh.sp, plan.mesh.tp
    head = tokens * config.head_width // tp * ITEMSIZE[plan.dtype]
    ids, k, q = 4 * tokens, head * config.num_kv_heads, head * config.num_heads
    forward, times, ids_of = run.forward + run.again, run.backward, "ids of positions and documents"
    if plan.context_parallel == "ring":
        hops = (n - 1) * (forward + times)
        traffic.add("collective-permute", sp, "keys and values", k, 2 * hops)
        traffic.add("collective-permute", sp, ids_of, ids, 2 * hops)
        back = k * FLOAT32 // ITEMSIZE[plan.dtype]
        traffic.add("collective-permute", sp, "gradients of keys and values", back, 2 * (n - 1) * times)
    elif plan.context_parallel == "ulysses":
        traffic.add("all-to-all", sp, "queries and what attention gives", q, 2 * (forward + times))
        traffic.add("all-to-all", sp, "keys and values", k, 2 * (forward + times))
    else:
        traffic.add("all-gather", sp, "keys and values", n * k, 2 * forward)
        traffic.add("reduce-scatter", sp, "gradients of keys and values", n * k, 2 * times)
    if plan.context_parallel != "ring":
        traffic.add("all-gather", sp, ids_of, n * ids, 2 * run.attended)
