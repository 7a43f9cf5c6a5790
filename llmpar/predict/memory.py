"""What a training step holds, and how many of its FLOPs are useful, by formula, before anything is traced.

The tests hold `argument_bytes` against the compiled program, exactly; `temp_bytes` is an estimate.
"""

from __future__ import annotations

import math
from collections import Counter

from llmpar.config import ModelConfig
from llmpar.plan import Plan
from llmpar.predict.traffic import FLOAT32, ITEMSIZE
from llmpar.timetable import slots, timetable


def _local(config: ModelConfig, plan: Plan, batch_size: int, seq_len: int) -> tuple[int, Counter[str]]:
    """What lies on each device: tokens of a batch, and bytes of one float32 copy of the weights ``stored``,
    ``used``, ``graded`` and ``accumulated`` (`plan.Life`); of the blocks' alone as ``blocks stored`` …"""
    sizes, held = plan.mesh.sizes, Counter[str]()
    for path, weight in plan.padded(config).weights().items():
        life = plan.life(weight.dims)
        for name in ("stored", "used", "graded", "accumulated"):
            size = FLOAT32 * math.prod(getattr(life, name).shard_shape(weight.shape, sizes))
            held.update({name: size, f"blocks {name}": size * path.startswith("blocks.")})
    return math.prod(plan.place("data b s").shard_shape((batch_size, seq_len), sizes)), held


def argument_bytes(
    config: ModelConfig, plan: Plan, batch_size: int, seq_len: int, moments: int = 2, scalars: int = 2
) -> dict[str, int]:
    """Bytes per device that a step is given: float32 weights, ``moments`` float32 copies of them in the
    optimizer's state (AdamW has 2), four int32 arrays of tokens, and ``scalars`` int32 counters (the step's,
    and AdamW's one).
    """
    tokens, held = _local(config, plan, batch_size, seq_len)
    return {
        "params": held["stored"],
        "optimizer": moments * held["graded"],
        "batch": 4 * 4 * tokens,
        "counters": 4 * scalars,
    }


def temp_bytes(config: ModelConfig, plan: Plan, batch_size: int, seq_len: int) -> int:
    """An estimate of the bytes per device that a step holds besides its arguments: gradients, what the
    backward pass needs of the forward pass, one block being differentiated, and the logits. Not exact: the
    compiler fuses and reuses.
    """
    tokens, weights = _local(config, plan, batch_size // plan.microbatches, seq_len)
    tp, ep, item = plan.mesh.tp, plan.mesh.ep, ITEMSIZE[plan.dtype]
    stream = tokens * config.width * item // (tp if plan.tp_sequence else 1)
    heads = tokens * config.head_width * (2 * config.num_heads + 2 * config.num_kv_heads) * item // tp
    ffn = 4 * tokens * config.ffn_width * item // tp // plan.ffn_chunks
    if config.experts:  # the slots of the buffer there and back, and what comes out of all visits
        blocks, rows = config.experts.blocks(tokens, 1, ep)
        ffn = (2 * ep * config.experts.slots(tokens, 1, ep) + blocks * rows) * config.width * item
    # What autodiff keeps of one block: inputs of products, of norms and of nonlinearities.
    block = 8 * stream + heads + ffn
    kept = block - ffn * (plan.ffn_chunks > 1)  # chunks are computed again
    layers, held = config.num_layers, 0
    # One chunk is differentiated at a time; of the others that are alive, what F saved is held.
    if order := plan.pipeline:
        layers, alive = max(order.layers(layers).values()), slots(timetable(order))
        counts = alive.num_saved, alive.num_messages, alive.num_residual
        saved, messages, residual = (int(max(n)) for n in counts)
        one = stream if plan.stage_saves == "input" else layers * kept
        held = saved * one + messages * stream + residual * layers * kept
        lent, way = order.parameter_copies - 1, "used" if plan.gathers == "step" else "stored"
        held += lent * (weights[f"blocks {way}"] + weights["blocks accumulated"])
        held += weights["used"] * item // FLOAT32 * (plan.gathers == "step")
    hidden = ffn // 2 if plan.ffn_chunks == 1 and not config.experts else 0  # gate and up
    once = {
        "none": kept,
        "selective": 2 * stream + heads + hidden,
        "ffn": 2 * stream + heads,
        "block": stream,
    }
    held += layers * once[plan.remat]
    logits = 2 * FLOAT32 * tokens * config.vocab_size // tp // plan.loss_chunks
    return weights["accumulated"] + held + 2 * block + logits


def flops(config: ModelConfig, batch_size: int, seq_len: int) -> dict[str, float]:
    """Useful matrix-product FLOPs of one step, whole batch, forward and backward without recomputation: 6 per
    token and weight that is active for it (the embedding is looked up, not multiplied), and 12·L·n·h·s per
    token of attention, halved by causality (Chowdhery et al. 2022, appendix B, whose convention does not
    halve it)."""
    tokens = batch_size * seq_len
    multiplied = config.active_params - config.vocab_size * config.width * (not config.tied)
    vectors = sum(math.prod(w.shape) for w in config.weights().values() if w.is_vector)
    attention = 12 * config.num_layers * config.num_heads * config.head_width * seq_len * tokens / 2
    return {"weights": 6.0 * (multiplied - vectors) * tokens, "attention": attention}
