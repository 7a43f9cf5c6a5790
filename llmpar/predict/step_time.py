"""How long a training step takes, by terms: computing at peak rate, waiting in a pipeline's bubble,
communicating.

What is hidden behind what nobody knows here: a step takes between the longest term and the sum of them.
"""

from __future__ import annotations

from llmpar.config import ModelConfig
from llmpar.plan import Plan
from llmpar.predict import formulas, memory, traffic
from llmpar.predict.hardware import Chip
from llmpar.timetable import timetable


def communicating(chip: Chip, row: traffic.Prediction, stride: int) -> float:
    """Seconds that the collectives of one kind over the same axes take, one after the other, at the rate of
    the links between devices that are ``stride`` apart (`formulas.collective_seconds`)."""
    kind = {"collective-permute": "permute"}.get(row.kind, row.kind)
    return sum(
        times * formulas.collective_seconds(chip, kind, size, row.group_size, stride)
        for (_, _, size), times in row.messages.items()
    )


def computing(
    chip: Chip, config: ModelConfig, plan: Plan, batch_size: int, seq_len: int
) -> tuple[float, float]:
    """Seconds that the busiest stage computes at peak rate, and that it idles in the schedule's bubble.

    A layer costs 1 forward and 2 backward, and is run as often as `traffic.runs` counts, recomputation
    included (of a `ffn` the first two products, of `selective` nothing that counts); the loss is with the
    last stage. In the bubble's costs (F, B, W) it is B that recomputes.
    """
    useful = sum(memory.flops(config, batch_size, seq_len).values())
    unembedding = 6.0 * config.vocab_size * config.width * batch_size * seq_len
    layer = (useful - unembedding) / 3 / config.num_layers / plan.microbatches  # forward, one microbatch
    loss, rate = (
        unembedding / plan.microbatches,
        plan.mesh.size // plan.mesh.pp * chip.per_device().flops_per_s,
    )
    share = _again(config, plan, batch_size * seq_len / plan.microbatches / layer)
    stages = [traffic.runs(config, plan, stage) for stage in range(plan.mesh.pp)]
    busiest = (
        max((run.forward + share * run.again + 2 * run.backward) * layer + run.loss * loss for run in stages)
        / rate
    )
    if plan.pipeline is None:
        return busiest, 0.0
    again = max((run.forward + share * run.again) / run.backward - 1 for run in stages)
    return busiest, busiest * timetable(plan.pipeline, (1, 1 + again, 1)).bubble_over_ideal


def _again(config: ModelConfig, plan: Plan, tokens_per_flop: float) -> float:
    """The share of a layer's forward FLOPs that `Plan.remat` computes again, if it does."""
    how = config.experts
    if plan.remat in ("none", "block"):
        return 1.0
    if plan.remat == "selective" and not how and plan.ffn_chunks == 1:
        return 0.0
    visits = how.top_k + how.num_shared if how else 1
    return 4 * config.width * config.ffn_width * visits * tokens_per_flop
