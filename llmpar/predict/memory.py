"""The memory of a training step, and its useful FLOPs, by formula, before anything is traced.

The tests compare `argument_bytes` with the compiled program, exactly; `temp_bytes` is an estimate.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from llmpar.plan.lockstep import lockstep, slots
from llmpar.plan.model_config import ModelConfig, kind_of, matrix_dims
from llmpar.plan.places import LayerLoop, chunk_loops
from llmpar.plan.plan import Resolved
from llmpar.plan.schedules import Schedule, make
from llmpar.plan.sequence_order import CHUNK, CHUNKS, FEW_KEYS, FEW_QUERIES, FEW_TILES, tile_length
from llmpar.predict.parameters import trained_params
from llmpar.predict.traffic import FLOAT32, ITEMSIZE, routed_width, trained_matrices

PART_NAMES = {
    "params": "weights",
    "grads": "gradients",
    "optimizer": "moments",
    "outer": "shared weights and outer momentum",
    "unreduced": "unreduced gradients",
    "copies": "weights in use",
    "activations": "activations",
    "batch": "batch",
}
"""What tables and drawings call the parts of a step's memory. Only local steps have the part ``outer``."""

KEPT, WORK, LOSS = (
    "a layer keeps for its backward pass",
    "one layer's own work and gathered weights",
    "logits, their gradient, the head",
)
CONVERTED, SUM = "converted or reordered weights", "the sum of gradients over microbatches"
"""Of what `temp_parts` lists, what is in several moments."""
SHORT_ROW = 16_384
"""Logits of a token, at most, whose softmax XLA makes a kernel of Triton on GPUs: it holds a row at once."""
BATCH = "tokens", "targets", "positions", "segments"
"""The int32 arrays of a batch, arguments of a step (`step.Step`)."""


def named(by_key: Mapping[str, float]) -> dict[str, float]:
    """Rename the parts from the keys of ``llmpar plan --json`` to the names of tables and drawings."""
    return {name: by_key[key] for key, name in PART_NAMES.items() if key in by_key}


def parts_bytes(
    plan: Resolved, batch_size: int, seq_len: int, local_steps: bool = False
) -> dict[str, int]:
    """Return a step's bytes per device, by part, and their ``total``. Of the estimate of temporaries
    (`temp_bytes`) ``activations`` are what tokens add; a step without tokens would hold all else too:
    ``grads``, sums that are kept; ``unreduced`` gradients, as the backward pass leaves them, and a copy of
    the largest where it is cut; and ``copies`` of weights that are gathered or cast. With ``local_steps``
    there is ``outer``, too (`outer_bytes`)."""
    by_name = step_bytes(plan, batch_size, seq_len, local_steps)
    weights = weights_bytes(plan)
    temporaries = by_name["temporaries"]
    fixed = min(temporaries, temp_bytes(plan, 0, seq_len))
    fresh = weights["unreduced"] + weights["largest unreduced"] * (plan.zero in (1, 2))
    if plan.pipeline:  # one chunk is differentiated at a time
        fresh = weights["blocks unreduced"] // plan.pipeline.visits
    grads = min(fixed, weights["accumulated"])
    unreduced = min(
        fixed - grads, fresh if plan.microbatches > 1 or plan.pipeline else max(0, fresh - grads)
    )
    parts = {
        "params": by_name["params"],
        "grads": grads,
        "optimizer": by_name["optimizer"],
        "unreduced": unreduced,
        "copies": fixed - grads - unreduced,
        "activations": temporaries - fixed,
        "batch": by_name["batch"] + by_name["counters"],
    }
    parts |= {"outer": by_name["outer"]} if local_steps else {}
    return parts | {"total": sum(by_name.values())}


def total_bytes(plan: Resolved, batch_size: int, seq_len: int, local_steps: bool = False) -> int:
    """Return a step's bytes per device: the total of `parts_bytes`, without the parts."""
    return sum(step_bytes(plan, batch_size, seq_len, local_steps).values())


def step_bytes(
    plan: Resolved, batch_size: int, seq_len: int, local_steps: bool = False
) -> dict[str, int]:
    """Return all that a step holds on a device: its arguments (`argument_bytes`), ``outer`` with local steps
    (`outer_bytes`), and ``temporaries`` (`temp_bytes`)."""
    by_name = argument_bytes(plan, batch_size, seq_len)
    by_name |= {"outer": outer_bytes(plan)} if local_steps else {}
    return by_name | {"temporaries": temp_bytes(plan, batch_size, seq_len)}


def outer_bytes(plan: Resolved) -> int:
    """Return the bytes per device of what local steps hold beside the worker's own state
    (`training.local_steps`): the shared weights, and a float32 momentum of the outer optimizer for each
    trained one, both cut as weights are stored."""
    stored = dataclasses.replace(plan, muon="none", zero=3 if plan.zero == 3 else 0)
    return sum(argument_bytes(stored, 0, 0, moments=1, scalars=0).values())


@functools.lru_cache(maxsize=1024)
def weights_bytes(plan: Resolved) -> Counter[str]:
    """Return the bytes on each device of one float32 copy of the weights ``stored``, ``used``, ``unreduced``,
    ``accumulated`` and ``reduced`` (`plan.WeightLayouts`), the last three without frozen ones; of a step's
    ``params``, frozen ones in the plan's dtype; of the blocks' weights alone as ``blocks stored`` …, and of
    one layer's as ``layer used``; of the output head as ``head used``; of the largest weight as ``largest
    unreduced``; and as ``reordered`` of those that a loop gathers along a dim that is not their first."""
    few = min(plan.microbatches, 2)
    if plan.pipeline:  # an order that a user wrote has its own number
        few = plan.mesh.pp if plan.microbatches % plan.mesh.pp == 0 else plan.microbatches
    alike: dict[str, Any] = {
        "mesh": dataclasses.replace(plan.mesh, dp=1),  # of which each rank has the same
        "requested": None,
        "devices": None,
        "attention_kernel": "auto",
        "dispatch": "auto",
        "hop": "auto",
        "remat": "none",
        "context_parallel": "ring",
        "sequence_order": "zigzag",
        "loss_chunks": 1,
        "microbatches": few,
    }
    # the same for all that these fields decide
    return _weights_bytes(dataclasses.replace(plan, **alike))


_LAYOUTS = "stored", "used", "unreduced", "accumulated", "reduced"
"""Of a weight (`plan.WeightLayouts`); a frozen one, without gradients, has the first two."""


@functools.lru_cache(maxsize=8192)
def _weights_bytes(plan: Resolved) -> Counter[str]:
    config, sizes, total = plan.config, plan.mesh.sizes, Counter[str]()
    layers = Counter[tuple[str, int]]()
    per_block = plan.gather_per == "block"
    known = dict[tuple[str, tuple[int, ...]], dict[str, int]]()  # many rows of kinds are alike
    for path, (weight, layouts) in plan.layouts_by_path.items():
        in_blocks, kind = path.startswith("blocks."), kind_of(path)
        if (alike := (weight.dims, weight.shape)) not in known:
            local = ((x, getattr(layouts, x).shard_shape(weight.shape, sizes)) for x in _LAYOUTS)
            known[alike] = {name: FLOAT32 * math.prod(shape) for name, shape in local}
        own = known[alike]
        narrow = ITEMSIZE[plan.dtype] if weight.frozen else FLOAT32
        total["params"] += own["stored"] * narrow // FLOAT32
        for name in _LAYOUTS[:2] if weight.frozen else _LAYOUTS:
            size = own[name]
            total[name] += size
            if in_blocks:
                total[f"blocks {name}"] += size
                layers[f"layer {name}", kind] += size // (weight.shape[0] // plan.mesh.pp)
            total[f"largest {name}"] = max(total[f"largest {name}"], size)
            if path == ("embedding" if config.tied else "head"):
                total[f"head {name}"] = size
        if plan.muon != "none" and matrix_dims(weight.dims) and not weight.frozen:
            total["one moment"] += own["reduced"]
            total["whole matrices"] += FLOAT32 * math.prod(
                layouts.whole.shard_shape(weight.shape, sizes)
            )
        if per_block and (in_blocks or plan.microbatches > 1):
            pairs = zip(layouts.stored.dims, layouts.used.dims, strict=True)
            cut = [dim != whole for dim, whole in pairs if dim.name != "l"]
            total["reordered"] += own["stored"] * any(cut[1:]) * narrow // FLOAT32
    for (name, _), size in layers.items():  # of the largest kind
        total[name] = max(total[name], size)
    return total


def _tokens(plan: Resolved, batch_size: int, seq_len: int) -> int:
    """Return the tokens of a batch on each device."""
    return math.prod(plan.place("data b s").shard_shape((batch_size, seq_len), plan.mesh.sizes))


def argument_bytes(
    plan: Resolved, batch_size: int, seq_len: int, moments: int = 2, scalars: int | None = None
) -> dict[str, int]:
    """Return the bytes per device of a step's arguments: float32 weights (frozen ones in the plan's dtype),
    ``moments`` float32 copies of the trained ones in the optimizer's state (AdamW has 2, Muon of matrices 1),
    the int32 arrays of `BATCH`, and ``scalars`` counters of 4 bytes: the step's and AdamW's; with Muon its
    own and three coefficients, too.
    """
    weights = weights_bytes(plan)
    own = 2 if plan.muon == "none" else 6
    return {
        "params": weights["params"],
        "optimizer": moments * weights["reduced"] - (moments - 1) * weights["one moment"],
        "batch": 4 * len(BATCH) * _tokens(plan, batch_size, seq_len),
        "counters": 4 * (own if scalars is None else scalars),
    }


def kept_bytes(plan: Resolved, batch_size: int, seq_len: int) -> dict[str, int]:
    """Return the bytes per device that a block's forward pass saves of a microbatch for the backward one, by
    `Plan.remat`. Of attention's sums for its softmax, 4 bytes for each token and head, nothing is counted."""
    tokens = _tokens(plan, batch_size // plan.microbatches, seq_len)
    saves, *_ = _block(plan, tokens, seq_len, _item(plan))
    return {remat: sum(sizes.values()) for remat, sizes in saves.items()}


def temp_bytes(plan: Resolved, batch_size: int, seq_len: int) -> int:
    """Return the sum of `temp_parts`: an estimate of a step's bytes per device besides its arguments."""
    return sum(times * size for _, times, size in temp_parts(plan, batch_size, seq_len))


def temp_parts(plan: Resolved, batch_size: int, seq_len: int) -> list[tuple[str, int, int]]:
    """List what a step holds besides its arguments: what it is, how many of it, and bytes of one. It is an
    estimate, for choosing among many plans: half of the recorded ones within 5 %, nine of ten within 15 %
    (`tests/compiled.md`).

    It is the fullest of three moments: in the loss; in the backward pass of a block, with what was kept for
    the others; where whole gradients are cut. What a block and the loss hold is counted from the model's
    text, and follows what compilers do with it. For GPUs: weights are gathered for the next block while one
    runs, and the logits' gradient, in the dtype of matmuls, or with pieces of the loss the gathered head and
    its gradient, stays until the blocks are done. Of blocks that are unrolled in an iteration of their loop,
    what their weights' gradients read waits for the last (GPUs, TPUs). For TPUs: weights are converted in all
    layers at once, to bfloat16 even for float32; of the loss the head's gradient stays, and with pieces of
    the loss, outside of microbatches, the gathered head; what a block holds for attention and for its
    feed-forward does not add up; gradients outside the blocks are summed over microbatches whole.
    With LoRA the head has no gradient, and no logits wait for it; of such steps none is recorded.
    With Muon a fourth moment is its update: all whole matrices of a device, and the orthogonal ones, since
    XLA gathers the next while it works on one.
    """
    weights = weights_bytes(plan)
    parts = _model_parts(plan, weights, batch_size, seq_len)
    whole = weights["whole matrices"]
    # each device cuts what it needs from an orthogonal one at once where all have all of them
    both = whole * 3 // 2 if plan.muon == "gather" else 2 * whole
    if both > sum(times * size for _, times, size in parts):
        return [("whole matrices of Muon, and orthogonal ones", 1, both)]
    return parts


def _model_parts(
    plan: Resolved, weights: Counter[str], batch_size: int, seq_len: int
) -> list[tuple[str, int, int]]:
    """List the parts of `temp_parts` without the optimizer's."""
    tokens = _tokens(plan, batch_size // plan.microbatches, seq_len)
    block = _block(plan, tokens, seq_len, _item(plan))
    kept, work, loss, after_loss, converted = moment = _moment(plan, weights, tokens, block)
    if plan.pipeline:  # what is in slots is not widened
        narrow = ITEMSIZE[plan.dtype]
        in_slots = block if narrow == _item(plan) else _block(plan, tokens, seq_len, narrow)
        return _staged_parts(plan, weights, plan.pipeline, moment, in_slots)
    layers = plan.config.num_layers
    blocks = after_loss + weights["blocks unreduced"] + work
    cutting = weights["unreduced"] + weights["largest unreduced"] * (plan.zero in (1, 2))
    # scattered after a loop
    sums = weights["blocks accumulated"] + weights["used"] - weights["blocks used"]
    more = (
        (sums if plan.platform == "tpu" else weights["accumulated"]) if plan.microbatches > 1 else 0
    )
    parts = [(SUM, 1, more)]
    if cutting > converted + layers * sum(kept.values()) + max(loss, blocks):
        return [*parts, ("whole gradients, as they are cut", 1, cutting)]
    parts += [(CONVERTED, 1, converted)] + [
        (f"{KEPT}: {what}", layers, size) for what, size in kept.items()
    ]
    if loss > blocks:
        return [*parts, (LOSS, 1, loss)]
    parts += [(WORK, 1, work), ("what the loss leaves until the blocks are done", 1, after_loss)]
    return [
        *parts,
        ("gradients of all blocks, before they are summed", 1, weights["blocks unreduced"]),
    ]


_Block = tuple[dict[str, dict[str, int]], int, int, int]
"""Bytes of a block and a microbatch: what autodiff saves by `Plan.remat` and what it is, what the input's
gradient leaves for those of the weights, what the backward pass works with at once, and the stream."""
_Moment = tuple[dict[str, int], int, int, int, int]
"""Bytes of a microbatch: what a layer keeps, by what it is; what one layer works with; the loss; what it
leaves until the blocks are done; and converted or reordered weights."""


def _moment(plan: Resolved, weights: Counter[str], tokens: int, block: _Block) -> _Moment:
    config, tpu = plan.config, plan.platform == "tpu"
    item = _item(plan)
    saves, crossing, work, _ = block
    layer = _narrow(plan, weights["layer used"])
    kept = dict(saves[plan.remat])
    # without a loop XLA's of CPUs find what is computed twice, and compute it once
    if written := _is_written_out(plan):
        hidden = 6 if config.experts else 5 if plan.remat == "none" else 4
        kept = saves["none"] | {"feed-forward": saves["none"]["feed-forward"] * hidden // 6}
    # blocks of an iteration, of several kinds or unrolled; without a loop one follows the other
    sizes = [len(loop.kinds) * plan.unroll for loop in _looped(plan)]
    unrolled = 1 if written else max(sizes, default=1)
    # gathers run ahead, in what travels; frozen weights lie as GPUs read them
    wire = {"same": item, "bfloat16": 2, "float8": 1}[plan.gather_dtype]
    runs_ahead = (unrolled if plan.reshard_after_forward else 1) * (
        plan.gather_per == "block" and not tpu
    )
    # so do float32 ones where each kind has one layer, and XLA slices nothing
    in_place = (
        (config.lora or item == FLOAT32 and max(plan.places_per_stage) == 1 and not plan.pipeline)
        and not plan.gather_per
        and plan.platform == "gpu"
    )
    # of the blocks of an iteration half wait for the others', but experts' rows never do
    work += (
        layer * (not in_place)
        + runs_ahead * layer * wire // item
        + (not config.experts) * (unrolled // 2) * crossing
    )
    logits = FLOAT32 * tokens * config.vocab_size // plan.mesh.tp // plan.loss_chunks
    head = _narrow(plan, weights["head used"]) * (not in_place)
    grad = 0 if config.lora else weights["head used"] * item // FLOAT32
    late = plan.loss_chunks > 1 and not (tpu and plan.microbatches > 1)  # is the loss's value
    rounded = 0 if tpu or item == FLOAT32 else logits * item // FLOAT32  # the gradient of logits
    # the logits of further tokens (MTP) wait, too
    more = 0 if late or tpu or config.lora else config.num_further * (rounded or logits)
    after_loss = head + grad if late else grad if tpu or config.lora else rounded or logits
    # XLA for GPUs reduces short rows of logits by a kernel, and the loss's value reads them after the blocks
    whole_rows = plan.platform == "gpu" and plan.mesh.tp == plan.loss_chunks == 1
    if whole_rows and config.vocab_size <= SHORT_ROW and not config.lora:
        after_loss = logits + rounded
    after_loss += more
    loss = more + logits + rounded + grad + (2 if tpu and plan.loss_chunks > 1 else 1) * head
    # a loop over pieces adds up the head's gradient in float32, and holds two pieces of logits
    if plan.loss_chunks > 1 and plan.platform == "gpu":
        loss = 2 * logits + head + weights["head used"] * (not config.lora)
    converted = weights["reordered"]
    if tpu:
        converted = _narrow(plan, weights["blocks stored"]) * (plan.gather_per != "step")
    if not plan.reshard_after_forward:  # and a reordered copy of the largest
        kept |= {
            "gathered weights": (plan.mesh.pp == 1)
            * _narrow(plan, weights["blocks used"])
            // config.num_layers
        }
        work += _narrow(plan, weights["largest used"]) * (plan.mesh.pp == 1 and not tpu)
    # autodiff copies what a layer reads: on CPUs, in `auto`, and of frozen weights what is not gathered
    elif plan.remat == "none" and _copies_weights(plan):
        kept |= {"weights in use": layer}
    return kept, work, loss, after_loss, converted


def _staged_parts(
    plan: Resolved, weights: Counter[str], order: Schedule, moment: _Moment, in_slots: _Block
) -> list[tuple[str, int, int]]:
    """List the parts of `temp_parts` of a pipeline, which differentiates one chunk at a time."""
    one = _layers(plan)
    (kept, work, loss, _, converted), (saves, crossing, _, stream) = moment, in_slots
    chunk = one * sum(saves[plan.remat].values())
    repeats = plan.stage_saves == "input"
    # a branch keeps the weights of layers that not all chunks have; on CPUs layers with experts do
    every = plan.config.experts is not None and plan.platform == "cpu"
    branches = [loop for loop in _loops(plan) if not all(loop.filled)]
    num_branched = sum(len(loop.kinds) * loop.times for loop in branches)
    num_kept = one if every else num_branched
    # and has the gradients of their weights when it ends: nothing waits for W but these
    waiting = (one - num_branched) * crossing + num_branched * weights["layer unreduced"]
    chunk += num_kept * weights["layer used"] * ITEMSIZE[plan.dtype] // FLOAT32
    running = weights["blocks unreduced"] // order.visits + work
    saved = stream if repeats else chunk
    layout = "used" if plan.gather_per == "step" else "stored"
    whole = _narrow(plan, weights["used"]) * (layout == "used")
    gpu = plan.platform == "gpu"
    # stages of both ways have one array of both ways' weights, which XLA for GPUs makes anew
    others = order.parameter_copies - 1
    lent = (
        others * weights["blocks accumulated"]
        + (others + (gpu and others > 0)) * weights[f"blocks {layout}"]
    )
    # XLA for GPUs copies the sums once where one of a stage's chunks is added to them, but not where its
    # weights are gathered there, or the backward pass is cut
    added = order.visits > 1 and plan.gather_per != "block" and gpu
    copies = 1 + (added and not order.split_backward)
    # B works with what it leaves; of what it computes again that is a part, but experts' rows are not
    fresh = not repeats or plan.config.experts is not None
    # what F and B left of microbatches on their way lies in slots
    num_saved, num_left, num_messages = most_slots(order)
    parts = [
        (CONVERTED, 1, converted),
        ("all weights, gathered once", 1, whole),
        ("weights and gradients of the other way", 1, lent),
        (SUM, copies, weights["accumulated"]),
        # and the one that a branch works with
        ("what a stage keeps of a microbatch on its way", num_saved + (not repeats), saved),
        ("a message between stages, and the one in work", num_messages + 1, stream),
        ("what weights' gradients wait for", num_left + fresh * (num_left > 0), waiting),
    ]
    # F, in a branch of a branch, is given a copy of its chunk, of which XLA cuts layers that are unrolled
    sliced = weights["blocks stored"] // order.visits * (order.visits > 1 and repeats)
    sliced += (1 if _looped(plan) else one) * _narrow(plan, weights["layer used"])
    # B, in a branch, keeps a copy of the weights that a loop over pieces of a feed-forward reads
    if gpu and repeats and plan.remat == "none" and plan.ffn_chunks > 1:
        kept = kept | {"weights in use": _narrow(plan, weights["layer used"])}
    if sliced > one * sum(kept.values()) * repeats + max(loss, running):
        return [*parts, ("weights of a chunk in its forward pass", 1, sliced)]
    parts += [(f"{KEPT}: {what}", one, size) for what, size in kept.items() if repeats]
    return [*parts, (LOSS, 1, loss) if loss > running else (WORK, 1, running)]


STEADY = "1f1b", "interleaved", "interleaved-zb", "zb-h1", "zb-h2", "zb-v"
"""Orders whose stages hold no more for more microbatches."""
STEADY_ROUNDS = 4
"""Microbatches for each stage after which an order of `STEADY` repeats itself: its buffers are all
in use by then (test_timetable)."""


@functools.lru_cache(maxsize=512)
def most_slots(schedule: Schedule) -> tuple[int, int, int]:
    """Return the most slots of any stage for microbatches, for what W reads and for messages (`Slots`). Of
    orders that repeat themselves, from as few microbatches as show it."""
    p, m, chunks = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    if schedule.name in STEADY and m > STEADY_ROUNDS * p and m % p == 0:
        schedule = make(schedule.name, p, STEADY_ROUNDS * p, chunks)
    table = slots(lockstep(schedule))
    return max(table.num_saved), max(table.num_residual), max(table.num_messages)


def _layers(plan: Resolved) -> int:
    """Return the layers of a loop: of the model, or the places of a chunk, whose room is there also where it
    has no layer."""
    return sum(plan.places_per_stage) // (plan.pipeline.visits if plan.pipeline else 1)


def _stacks(plan: Resolved) -> bool:
    """Tell whether a loop over layers, or a slot, stacks what their forward passes save. Elsewhere XLA keeps
    what matmuls read and make, and computes the rest again where it reads that."""
    order = plan.pipeline
    if order and plan.stage_saves == "residuals" or plan.platform != "gpu":
        return True
    return bool(_looped(plan)) and not (order and order.split_backward)


def _loops(plan: Resolved) -> tuple[LayerLoop, ...]:
    """Return the runs of layers of the model, or of a chunk."""
    if plan.pipeline is None:
        return tuple(plan.config.loops)
    return chunk_loops(plan.config.layer_kinds, plan.pipeline.cells)


def _looped(plan: Resolved) -> list[LayerLoop]:
    """Return those that a loop runs: the others are unrolled."""
    return [loop for loop in _loops(plan) if loop.times > plan.unroll > 0]


def _copies_weights(plan: Resolved) -> bool:
    """Tell whether a loop over layers keeps copies of the weights that it reads, for its backward pass."""
    gathers = plan.gather_per == "block"
    if plan.platform == "cpu":
        return not _is_written_out(plan) and not gathers
    frozen = plan.config.lora and not gathers and not plan.pipeline
    return bool(plan.platform == "gpu" and _looped(plan) and (plan.mode == "auto" or frozen))


def _is_written_out(plan: Resolved) -> bool:
    """Tell whether XLA's of CPUs meet a loop over layers that has one iteration: they write it out."""
    return plan.platform == "cpu" and not 0 < plan.unroll < _layers(plan)


def _item(plan: Resolved) -> int:
    """Return the bytes of a number that matmuls read: XLA's of CPUs read bfloat16 as float32, and hold
    both."""
    return FLOAT32 if plan.platform == "cpu" else ITEMSIZE[plan.dtype]


def _narrow(plan: Resolved, num_bytes: int) -> int:
    """Return the bytes of float32 weights as matmuls read them: those on TPUs read them as bfloat16."""
    return num_bytes * (2 if plan.platform == "tpu" else _item(plan)) // FLOAT32


def _block(plan: Resolved, tokens: int, seq_len: int, item: int) -> _Block:
    """Count a block's bytes of so many tokens on a device, in numbers of ``item`` bytes. Where kinds of
    layers differ: the mean of what they keep, and the most that one works with."""
    counts = plan.places_per_stage
    blocks = [_one_block(plan, block, tokens, seq_len, item) for _, block in plan.config.blocks]
    if len(blocks) == 1:
        return blocks[0]
    mean = lambda sizes: sum(n * size for n, size in zip(counts, sizes, strict=True)) // sum(counts)
    saves = {
        remat: {what: mean([one[0][remat][what] for one in blocks]) for what in kept}
        for remat, kept in blocks[0][0].items()
    }
    works = [one[2] for one, count in zip(blocks, counts, strict=True) if count]
    return saves, mean([one[1] for one in blocks]), max(works), blocks[0][3]


def _scores(
    plan: Resolved, config: ModelConfig, tokens: int, seq_len: int, item: int
) -> tuple[int, int]:
    """Count the bytes of scores with which a layer's attention works, in float32 and as the matmuls read
    them, with their gradient but on TPUs; and of what it keeps of all scores, which is `xla`'s alone."""
    rows = max(tokens * plan.mesh.sp // seq_len, 1)
    apart = plan.mesh.along(plan.regions["queries"]["s"])
    dense = seq_len // apart * seq_len
    heads = config.num_heads // plan.mesh.tp // (plan.mesh.sp // apart)
    copies = 1 if plan.platform == "tpu" else 2
    of_numbers = rows * heads * copies * (FLOAT32 + item)
    if plan.attention_kernel == "cudnn":  # a mask for all heads, as a bias, and its gradient
        return 3 * rows * dense * item * (plan.documents == "packed"), 0
    if plan.attention_kernel == "xla":
        if not _stacks(plan):  # scores, and the softmax as matmuls read it
            return rows * heads * FLOAT32 * dense, rows * heads * (FLOAT32 + item) * dense
        # the softmax, that in float32 once more, and the mask
        return of_numbers * dense, rows * heads * (2 * FLOAT32 + 1) * dense
    local = max(seq_len // apart, 1)
    length = min(plan.attention_block or tile_length(None, local), local)
    num_tiles = local // length
    # of pairs that are unrolled, XLA for GPUs has the scores of about half at once, of all where no pair
    # is left out
    unrolled = plan.attention_kernel == "portable" and plan.platform == "gpu"
    if unrolled and apart == 1 and plan.positions_in_order and num_tiles <= FEW_TILES:
        return of_numbers * length**2 * max(num_tiles * (num_tiles + 1) // 4, 1), 0
    num_keys = seq_len // tile_length(plan.attention_block, seq_len)
    if unrolled and plan.context_parallel == "gather" and apart > 1:
        few = num_tiles <= FEW_QUERIES and num_keys <= FEW_KEYS
        return of_numbers * length**2 * (num_tiles * num_keys if few else 1), 0
    # a ring of few tiles has no loop either: two arrays of all pairs, as matmuls read them
    if plan.context_parallel == "ring" and num_tiles <= 2 and apart > 1 and plan.platform == "gpu":
        of_numbers = max(of_numbers, 2 * rows * heads * item * num_tiles**2 * apart)
    return of_numbers * length**2, 0


def _exchanged(plan: Resolved, numbers: int, item: int) -> int:
    """Count the bytes of a ring's hops as all-to-alls, with so many numbers of keys and values: messages to
    all ranks, and what arrives from all, of float32 gradients; and where there are several hops, so that
    keys and values travel meanwhile, of these too, with zeros and their mask."""
    ranks = plan.mesh.along(plan.regions["queries"]["s"])
    hops = plan.hop == "exchange" and plan.context_parallel in ("ring", "usp") and ranks > 1
    return hops * ranks * numbers * (2 * FLOAT32 + (ranks > 2) * (3 * item + 1))


def _trained_groups(config: ModelConfig) -> list[bool]:
    """Tell whether queries, keys or values, what attention returns, what enters a feed-forward, and its
    hidden values multiply weights whose gradients read them."""
    groups, trained = ("qkv", "o", ("gate", "up"), ("down",)), trained_matrices(config)
    return [bool(trained & {*group}) for group in groups]


def _waiting(
    plan: Resolved,
    config: ModelConfig,
    rows: int,
    whole: int,
    entering: int,
    of_norms: int,
    of_heads: list[int],
) -> int:
    """Count the bytes that a block's input gradient leaves for those of its trained weights: what goes
    into matmuls and norms, and its gradient. In W most of what goes in lies in what F saved. ``rows`` are of
    hidden values, or where a loop over pieces has them, of gradients of a feed-forward's weights;
    ``entering`` of what a feed-forward reads, ``of_heads`` of queries and of keys."""
    again, trained = plan.stage_saves == "input", trained_matrices(config)
    attends, leaves, enters, falls = _trained_groups(config)
    in_ffn = rows
    if plan.ffn_chunks == 1 or config.experts:
        in_ffn *= len(trained & {"gate", "up"}) + falls * (again or bool(config.experts))
        in_ffn += falls * (not config.experts) * whole + again * enters * entering
    of_queries = len(trained & {"q", "o"} if again else trained & {"q"})
    return (
        in_ffn
        + (leaves + again * attends) * whole
        + (1 + again) * (not config.lora) * of_norms
        + of_queries * of_heads[0]
        + len(trained & {"k", "v"}) * of_heads[1]
    )


def _rows_of_weights(
    plan: Resolved, config: ModelConfig, tokens: int, ffn: int, item: int
) -> tuple[int, int]:
    """Count what waits for the gradients of a feed-forward's weights: the bytes of one of three arrays, and
    of what is kept besides. Without experts the array is ``ffn``; but a loop over pieces has the weights'
    gradients themselves, which wait in a pipeline alone.

    With experts (`grouped.arrange`) a pipeline keeps rows of shared experts and of all slots, an eighth more
    than the even share and what the worst routing needs beyond; and besides, where no loop is over slots
    beyond, hidden values in float32; from other ranks, what arrived and its gradient."""
    experts, ep, waits = config.experts, plan.mesh.ep, plan.pipeline and not config.lora
    if experts is None and plan.ffn_chunks > 1:
        return (3 * config.width * config.ffn_width * item // plan.mesh.tp if waits else 0), 0
    if experts is None or not waits:
        return ffn, 0
    first = tokens * experts.top_k * 9 // 8
    local = experts.num_experts // ep
    of_one = ep * experts.expert_tokens(tokens, 1)
    of_all = min(ep * tokens * min(experts.top_k, local), of_one * local)
    beyond = max(0, min(local * of_one - first, of_all - first // local))
    width = config.ffn_width // plan.mesh.tp
    wider = (beyond == 0) * first * width * (FLOAT32 - item)
    arrived = (ep > 1) * ep * experts.slots(tokens, 1, ep) * routed_width(config) * item
    rows = tokens * experts.num_shared + first + beyond
    return rows * width * item, wider + (1 + (plan.stage_saves == "input")) * arrived


def _extras(config: ModelConfig) -> tuple[int, int, bool]:
    """Count a block's norms of what it adds to the stream (Gemma), and the numbers of its latents; say
    whether it has norms of queries and keys."""
    described = config.described.rows if config.described else ()
    behind = sum("post_norm" in name for name, _ in described)
    latents = sum(
        w.shape[-1] for name, w in described if name in ("attention.q_down", "attention.kv_down")
    )
    return behind, latents, config.qk_norm or any("k_norm" in name for name, _ in described)


def _slots(plan: Resolved, experts: Any, tokens: int) -> int:
    """Count the slots of the buffers in which a device's tokens go to their experts (`moe.exchanges`)."""
    ranks, nodes = plan.mesh.ep, plan.mesh.ep // plan.mesh.near
    to_nodes = nodes * experts.slots(tokens, 1, nodes) if nodes < ranks else 0
    return ranks * experts.slots(tokens, 1, ranks) + to_nodes


def _of_state(plan: Resolved, config: ModelConfig, tokens: int, length: int) -> tuple[int, ...]:
    """Count a gated delta net's convolved numbers of all tokens, ``length`` positions of each row; and bytes
    of float32 that it keeps besides and that it works with: copies of these numbers, and matrices of
    positions times positions. The counts are of XLA for CPUs. Of GPUs and TPUs no program is recorded: they
    are assumed to fuse five copies."""
    numbers = tokens * config.convolved // plan.mesh.tp
    at_once = tokens * min(length, CHUNK * CHUNKS) // max(length, 1)
    squares = (
        at_once * config.num_heads * min(length, CHUNK) // plan.mesh.tp * bool(config.convolved)
    )
    fused = 1 if plan.platform == "cpu" else 5
    kept, work = 8 * numbers, 45 * numbers + 40 * squares
    return numbers, FLOAT32 * kept // fused, FLOAT32 * work // fused


def _one_block(plan: Resolved, config: ModelConfig, tokens: int, seq_len: int, item: int) -> _Block:
    """Count the bytes of a block of one kind (`_block`)."""
    tp, tpu = plan.mesh.tp, plan.platform == "tpu"
    whole = tokens * config.width * item
    stream = whole // (tp if plan.tp_sequence else 1)
    mixed = tokens if config.mixer != "none" else 0
    queries = mixed * config.head_width * config.num_heads * item // tp
    keys = mixed * config.head_width * max(config.num_kv_heads // tp, 1) * item
    numbers, of_state, work_of_state = _of_state(plan, config, tokens, seq_len // plan.mesh.sp)
    ffn = hidden = tokens * config.ffn_width * item // tp
    shared = ffn * (config.experts.num_shared if config.experts else 0)
    # what a feed-forward reads, or is sent to experts
    entering = stream if plan.tp_dispatch and config.experts and not shared else whole
    # the slots of the buffer, and of a rank's visits nine eighths of an even share
    if config.experts:
        num_slots = _slots(plan, config.experts, tokens)
        visits = tokens * config.experts.top_k * 9 // 8
        # and of copies their even share
        visits += visits * plan.expert_copies // config.experts.num_experts
        hidden = visits * config.ffn_width * item // tp
        ffn = hidden + shared + (num_slots + visits) * routed_width(config) * item
    copied = plan.expert_copies * 3 * routed_width(config) * config.ffn_width * item // tp
    scores, squares = _scores(plan, config, tokens, seq_len, item)
    # Inputs of matmuls; of norms, in float32; of nonlinearities. A feed-forward's pieces run again.
    behind, latents, qk_norm = _extras(config)
    # Only gradients of weights that are trained read them.
    attends, leaves, enters, falls = _trained_groups(config)
    rows, arrived = _rows_of_weights(plan, config, tokens, ffn, item)
    crossing = arrived + _waiting(
        plan,
        config,
        rows,
        whole,
        entering,
        of_norms=(2 + behind) * stream + qk_norm * (queries + keys) + 2 * tokens * latents * item,
        of_heads=[queries, keys],
    )
    stacks = _stacks(plan) or bool(plan.pipeline and plan.pipeline.split_backward)  # for W
    # Where no gradient waits, what the feed-forward works with is gone before attention works, with its
    # float32 sums forward and backward.
    hidden_arrays = 6 if config.variant.activation.startswith("gelu") else 4
    in_pieces = shared if config.experts else ffn  # rows of routed experts are in none
    at_once = ffn - in_pieces + in_pieces // plan.ffn_chunks
    parts = hidden_arrays * at_once, queries + 2 * queries * FLOAT32 // item + scores
    work = (
        3 * whole
        + copied
        + 3 * stream
        + 2 * queries
        + 2 * keys
        + work_of_state
        + _exchanged(plan, 2 * keys // item, item)
        + (max(parts) if tpu or not (enters or falls) else sum(parts) + 2 * whole)
    )
    if _is_written_out(plan) and not config.experts and plan.ffn_chunks == 1:
        work = parts[0] if squares else max(parts)
    # What lets gathered weights go keeps pieces too. Of experts rows, and their matmuls with gate and up.
    pieces = plan.ffn_chunks == 1
    keeps = (
        pieces or plan.gather_per == "block" and plan.reshard_after_forward and not plan.pipeline
    )
    of_experts = (
        2 * hidden + (plan.mesh.ep > 1) * num_slots * routed_width(config) * item
        if config.experts
        else 0
    )
    normed = 3 * bool(plan.pipeline and qk_norm)  # in float32, and its result
    kept = {
        "feed-forward": ((5 if stacks else 2) + falls) * in_pieces * keeps + of_experts + copied,
        "norms in float32": (2 + behind) * stream * FLOAT32 // item * stacks,
        "stream": (2 + behind) * stream + attends * whole + enters * entering,
        "queries and attention's result": (2 + leaves + normed) * queries + of_state,
        # of other ranks too, where they are gathered
        "keys and values": 2 * keys * (plan.mesh.sp if plan.context_parallel == "gather" else 1)
        + normed * keys,
        "attention's softmax": squares,
    }
    # Of matmuls and of attention.
    results = {
        "stream": 2 * stream,
        "queries and attention's result": 2 * queries + numbers * item,
        "keys and values": 2 * keys,
    }
    return (
        {
            "none": kept,
            "selective": results
            | {"feed-forward": 2 * (in_pieces * pieces + hidden * bool(config.experts))},
            "ffn": results,
            "block": {"stream": stream},
        },
        crossing,
        work,
        stream,
    )


def flops(config: ModelConfig, batch_size: int, seq_len: int) -> dict[str, float]:
    """Return the useful matmul FLOPs of one step, forward and backward without recomputation: 6 per
    token and weight that is active for it (the embedding is looked up, not multiplied), 4 where it is frozen,
    and 12·L·n·h·s per token of attention (Chowdhery et al. 2022, appendix B), halved by causality."""
    tokens = batch_size * seq_len
    edge = config.vocab_size * config.width
    multiplied = config.active_params - edge * (not config.tied) + edge * config.num_further
    multiplied -= sum(math.prod(w.shape) for w in config.weights().values() if w.is_vector)
    constant = multiplied - trained_params(config) if config.lora else 0
    attention = 0.0
    for count, block in config.blocks:
        heads = block.num_heads * (block.head_width + block.value_width)
        mixed = 2 * block.state_size + heads * seq_len / 2 * (block.mixer == "attention")
        attention += 6 * count * mixed * tokens
    return {"weights": (6.0 * multiplied - 2.0 * constant) * tokens, "attention": attention}
