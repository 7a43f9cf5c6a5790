"""Refusals of plans, in sentences: what was requested, the arithmetic, and what would work.

A size that mesh axes must cut evenly is a row (`Cut`); whatever else does not go together is a sentence. What
is set and decides nothing is no error: `unused` says why.
"""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from llmpar.plan.backend import KERNELS_OF_JAX, fits_cudnn
from llmpar.plan.layout import SCALED
from llmpar.plan.lockstep import lockstep
from llmpar.plan.mesh_shape import USER_AXIS, divisors
from llmpar.plan.schedules import SCHEDULES

if TYPE_CHECKING:
    from llmpar.plan.model_config import ModelConfig
    from llmpar.plan.plan import Plan, Resolved

MAX_MASK_BYTES = 64 << 20
"""A mask of queries times keys, in 16 bits, above which it costs more than the scores that it spares: cuDNN
reads it whole, and computes its gradient too. 5,792 positions."""


class Cut(NamedTuple):
    """A size that axes of the mesh cut, and a field of the plan that counts pieces: their product must divide
    it.

    Attributes:
        name, size, axes: what, how large, cut by which axes.
        field: of the plan, what cuts further, such as ``microbatches``.
        common: a divisor of the size and of whatever else these axes cut: the advice keeps to its divisors;
            0: to those of the size.
        of_model: whether the size is the model's, so that no other is advised.
        advice: what else would work.
    """

    name: str
    size: int
    axes: tuple[str, ...]
    field: str = ""
    common: int = 0
    of_model: bool = False
    advice: str = ""

    def check(self, plan: "Resolved") -> None:
        """Raise ValueError where the parts do not divide the size."""
        pieces = getattr(plan, self.field) if self.field else 1
        axes = [*dict.fromkeys(USER_AXIS.get(axis, axis) for axis in self.axes)]
        parts = pieces * math.prod(getattr(plan.mesh, axis) for axis in axes)
        if self.size % parts == 0:
            return
        name = "·".join((*axes, self.field) if pieces > 1 else axes)
        fits = [n for n in divisors(self.common or self.size) if n <= 4 * parts]
        near = sorted({max(parts, self.size // parts * parts), -(-self.size // parts) * parts})
        change = "" if self.of_model else f"use {' or '.join(map(str, near))}, or "
        advice = f"{change}make {name} one of {', '.join(map(str, fits))}{self.advice}"
        raise ValueError(f"{self.name} {self.size} is not a multiple of {name} = {parts}; {advice}")


Row = Cut | tuple[object, str]
"""Of a table of refusals: a size to cut, or a condition and the sentence to refuse with where it holds."""


def check_plan(plan: "Resolved", batch_size: int, seq_len: int) -> None:
    """Raise ValueError for the first row that refuses."""
    tables = (
        _shapes,
        _heads_and_experts,
        _sequences,
        _kernels,
        _zero,
        _reductions,
        _pipelines,
        _adapters,
        _dtypes,
        _muon,
    )
    for table in tables:
        for row in table(plan, batch_size, seq_len):
            if isinstance(row, Cut):
                row.check(plan)
            elif row[0]:
                raise ValueError(row[1])


def _shapes(plan: "Resolved", batch_size: int, seq_len: int) -> list[Row]:
    mesh, config = plan.mesh, plan.config
    by_tp = list[Row]()
    for _, block in config.blocks:
        sizes = widths_cut_by_tp(block)
        common = math.gcd(block.num_kv_heads, *sizes.values())
        by_tp += [Cut(x, n, ("tp",), common=common, of_model=True) for x, n in sizes.items()]
    return [
        (
            mesh.ep > 1 and not config.experts,
            f"mesh '{mesh}' has ep={mesh.ep}, but no experts in '{config.name}' here;"
            " use pp, dp, fsdp, sp, tp",
        ),
        (batch_size < 1, f"batch {batch_size} has no token; use 1 or more"),
        (seq_len < 1, f"sequence {seq_len} has no token; use 1 or more"),
        Cut("batch", batch_size, ("dp", "fsdp", "ep"), "microbatches"),
        *by_tp,
    ]


def widths_cut_by_tp(block: "ModelConfig") -> dict[str, int]:
    """Return the sizes of a layer that tp must divide. A recurrent mixer of one head is not cut."""
    has_heads = block.mixer == "attention" or block.mixer == "recurrent" and block.num_heads > 1
    keys = block.block_weights().get("mixer.q_conv")
    sizes = {
        "heads": block.num_heads * has_heads,
        "heads of keys": keys.shape[0] if keys else 0,
        "feed-forward width": block.ffn_width,
        "vocabulary": block.vocab_size,
    }
    return {name: size for name, size in sizes.items() if size}


def _heads_and_experts(plan: "Resolved", batch_size: int, seq_len: int) -> list[Row]:
    """Heads that tp neither cuts evenly nor copies; experts that ep, nodes and copies cannot divide."""
    config, heads, tp = plan.config, plan.config.num_kv_heads, plan.mesh.tp
    explicit = plan.mode == "explicit"
    cuts = divisors(math.gcd(config.num_heads, config.ffn_width, config.vocab_size))
    fits = ", ".join(str(n) for n in cuts if n <= 4 * tp and 0 in (heads % n, n % heads))
    num_experts, copies = config.experts.num_experts if config.experts else 0, plan.expert_copies
    return [
        (
            copies and copies >= num_experts,
            f"expert_copies={copies} of {num_experts} experts; use fewer than all, or ep=1",
        ),
        (
            plan.ep_node > 1 and plan.mesh.near == 1,
            f"ep_node={plan.ep_node} does not cut ep={plan.mesh.ep} into two or more nodes; use a divisor of"
            f" {plan.mesh.ep} below it, or ep_node=1",
        ),
        (
            plan.ep_node > 1 and plan.tp_dispatch,
            f"ep_node={plan.ep_node} does not go with tp_dispatch={plan.tp_dispatch}: tp does not divide the"
            " slots of a node; leave ep_node out",
        ),
        (
            copies and plan.tp_dispatch,
            "expert_copies does not go with tp_dispatch: a copy is cut by tp, and so needs the tokens of all"
            " of tp; leave one of them out",
        ),
        (
            heads % tp and plan.mesh.kv == 1,
            f"KV heads {heads} is not a multiple of tp = {tp}, nor tp of KV heads; make tp one of {fits}",
        ),
        (
            plan.mesh.kv > 1 and explicit,
            f"mode='explicit' does not go with tp = {tp} on {heads} KV heads: a type has no sum over the"
            " part of tp that holds copies of a head beside one over all of it; use mode='manual', or a tp"
            f" that divides {heads}",
        ),
        (
            explicit and tp > 1 and config.variant.qk_norm == "all",
            f"mode='explicit' does not go with tp = {tp} and a norm over all heads: a type has no value that"
            " is a sum over tp and varies over it; use mode='manual'",
        ),
        Cut("experts", num_experts, ("ep",), of_model=True),
    ]


def _sequences(plan: "Resolved", batch_size: int, seq_len: int) -> list[Row]:
    config, mesh, sp, ul = plan.config, plan.mesh, plan.mesh.sp, plan.mesh.ul
    method, block = plan.context_parallel, plan.attention_block
    sizes = config.num_kv_heads, config.num_heads, config.ffn_width, config.vocab_size
    common = math.gcd(*sizes, seq_len)
    # Each piece is gathered by itself; experts need all at once.
    by_pieces = plan.tp_sequence and not config.experts
    ffn = (("sp", "tp"), "ffn_chunks", common) if by_pieces else (("sp",), "ffn_chunks", 0)
    which, heads = config.exchanged_heads(mesh.tp)
    what = f"the {heads} {which} heads of a device"
    parts, instead = ("all", "ulysses") if ul > 1 else ("no part", "ring")
    local = {x: seq_len // mesh.along(plan.place(f"{x} s").axes) for x in ("queries", "keys")}
    before = max(block.positions_before for _, block in config.blocks)
    most = max((n for n in divisors(seq_len) if seq_len // n >= before), default=1)
    return [
        Cut("sequence", seq_len, ("sp", "tp") if plan.tp_sequence else (), common=common),
        Cut("sequence", seq_len, ("sp",), "loss_chunks"),
        Cut("sequence", seq_len, *ffn),
        (
            sp > 1 and seq_len // sp < before,
            f"sp = {sp} leaves a rank {seq_len // sp} positions of {seq_len}, and a convolution reads"
            f" {before} before each; use sp = {most}",
        ),
        (
            sp > 1 and plan.sequence_order == "zigzag" and seq_len % (2 * sp),
            f"sequence_order='zigzag' cuts a sequence into 2·sp = {2 * sp} parts, and {seq_len} is no"
            f" multiple; use {2 * sp * max(1, seq_len // (2 * sp))},"
            " or sequence_order='balanced' or 'striped'",
        ),
        (
            method == "ulysses" and heads % sp,
            f"context_parallel='ulysses' cuts {what} by sp = {sp};"
            " use context_parallel='ring', which needs no heads",
        ),
        (
            method == "usp" and sp > 1 and ul in (1, sp),
            f"context_parallel='usp' exchanges {what} among ranks of sp = {sp},"
            f" and {parts} of these divide them; use context_parallel='{instead}'",
        ),
        *(
            Cut(f"each device's number of {x}", n, (), "attention_block", of_model=True)
            for x, n in local.items()
            if block and n > block
        ),
    ]


def _kernels(plan: "Resolved", batch_size: int, seq_len: int) -> list[Row]:
    """What a kernel cannot do, and a mask of all queries and keys that is too large."""
    kernel = plan.requested.attention_kernel
    cudnn = kernel == "cudnn"
    gpu = plan.devices if plan.devices and plan.platform == "gpu" else "gpu"
    masked = kernel == "xla" or cudnn and plan.documents == "packed"
    mask_bytes = 2 * seq_len**2 // plan.mesh.along(plan.place("queries s").axes)
    whole = ", or documents='whole'" if cudnn and plan.positions_in_order else ""
    lacks = kernels_refused(plan.config).get(kernel, "")
    rows = [
        (cudnn and plan.dtype == "float32", "computes in 16 bits; use dtype='bfloat16'"),
        (
            plan.attention_block and kernel not in ("auto", "portable"),
            "chooses its own blocks; leave attention_block out",
        ),
        (
            kernel in KERNELS_OF_JAX and plan.place("keys s").axes,
            "gives no log of sums in float32 to merge by, which a ring needs;"
            " use context_parallel='ulysses' or 'gather'",
        ),
        (
            masked and mask_bytes > MAX_MASK_BYTES,
            f"holds a mask of queries times keys, {mask_bytes >> 20} MiB a row at {seq_len} positions;"
            f" use attention_kernel='flash'{whole}",
        ),
        (lacks, lacks),
        (
            cudnn and not fits_cudnn(plan.config.head_width, gpu),
            "has heads of a multiple of 8 up to 128, since Hopper up to 256; use 'flash'",
        ),
    ]
    return [
        (holds, f"attention_kernel='{kernel}' {why}, or attention_kernel='portable'")
        for holds, why in rows
    ]


def why_not_run(plan: "Resolved") -> str:
    """Return why a plan that can be priced does not run here; empty if it runs."""
    config, method = plan.config, plan.context_parallel
    latent = any(block.has_latent_attention for _, block in config.blocks)
    explicit = plan.mode == "explicit"
    rows = [
        (not config.runs, f"'{config.name}' is planned alone: {config.why_planned}"),
        (
            explicit and config.has_states,
            "mode='explicit' does not run with a recurrent state: JAX has no type for it; use mode='manual'",
        ),
        (
            explicit and latent and plan.mesh.tp * plan.mesh.sp > 1,
            "mode='explicit' does not run with latent attention and tp or sp: JAX has no type for gradients"
            " of what heads share; use mode='manual'",
        ),
        (
            explicit and not latent and config.kinds and config.experts,
            "mode='explicit' does not run with experts in layers of several kinds: JAX has no type for it;"
            " use mode='manual'",
        ),
        (
            latent and plan.mesh.sp > 1 and method in ("ulysses", "usp"),
            f"context_parallel='{method}' does not run with latent attention: ranks of sp exchange heads for"
            " positions, and a latent has none; use context_parallel='ring' or 'gather'",
        ),
        (
            plan.passes_states and plan.sequence_order != "contiguous",
            f"sequence_order='{plan.sequence_order}' does not run with a recurrent state, which a rank of sp"
            " hands on to the rank with the next positions; use sequence_order='contiguous'",
        ),
        (
            latent and plan.tp_comm_overlap,
            "tp_comm_overlap does not run with latent attention; leave it out",
        ),
    ]
    return next((why for holds, why in rows if holds), "")


def kernels_refused(config: "ModelConfig") -> dict[str, str]:
    """Return the kernels of attention that cannot do what a layer of a model needs, with the reason."""
    blocks = [block for _, block in config.blocks if block.mixer == "attention"]
    narrow = lambda block: block.value_width != block.head_width
    rules: list[tuple[Callable[[ModelConfig], object], tuple[str, ...], str]] = [
        (
            lambda block: "attention.sinks" in block.block_weights(),
            KERNELS_OF_JAX,
            "gives no log of sums, which sinks need; use 'flash'",
        ),
        (
            lambda block: block.variant.chunked,
            KERNELS_OF_JAX,
            "sees keys in windows, not in chunks (attention_chunk_size); use 'flash'",
        ),
        (narrow, KERNELS_OF_JAX, "needs values as wide as keys; use 'flash'"),
        (
            lambda block: block.value_width > block.head_width,
            ("flash",),
            "needs values as wide as keys or narrower",
        ),
        (
            lambda block: block.variant.score_cap,
            ("flash", *KERNELS_OF_JAX),
            "does not cap scores (attn_logit_softcapping)",
        ),
    ]
    return {x: why for asks, names, why in rules if any(map(asks, blocks)) for x in names}


def _zero(plan: "Resolved", batch_size: int, seq_len: int) -> list[Row]:
    """Dims that ZeRO cannot cut evenly. With fsdp as many rows of the batch are cut too."""
    if not plan.zero:
        return []
    mesh, names = plan.mesh, {"d": "model width", "h": "head width", "e": "experts"}
    cut = [("model width", plan.config.width, plan.zero_cuts("d"))]
    for weight, layouts in plan.layouts_by_path.values() if plan.config.runs else ():
        pairs = zip(layouts.used.dims, layouts.reduced.dims, strict=True)
        for (used, reduced), size in zip(pairs, weight.shape, strict=True):
            if used != reduced and used.name in names:
                cut.append((names[used.name], size, reduced.axes[len(used.axes) :]))
    num_rows = batch_size // (mesh.dp * mesh.ep * plan.microbatches)
    common = math.gcd(num_rows, *(size for _, size, _ in cut))
    cuts = list[Row]()
    for name, size, axes in dict.fromkeys(cut):
        fewer = len(axes) > 1 or axes != mesh.live("fsdp")
        advice = ", or use zero_axes='fsdp'" if fewer and size % mesh.fsdp == 0 else ""
        cuts.append(Cut(name, size, axes, common=common, of_model=True, advice=advice))
    return cuts


def _reductions(plan: "Resolved", batch_size: int, seq_len: int) -> list[Row]:
    """When gradients are summed, and in which mode."""
    reduce, explicit = plan.reduce, plan.mode == "explicit"
    in_pieces = plan.ffn_chunks > 1 and plan.config.experts and plan.mesh.tp > 1
    return [
        (
            reduce != "end" and plan.zero in (1, 2) or reduce == "bucket" and plan.zero,
            f"reduce='{reduce}' does not go with ZeRO {plan.zero}, whose gradients are reduce-scattered;"
            " use 'end'",
        ),
        (
            reduce == "bucket" and explicit,
            "reduce='bucket' joins gradients that are cut in different ways, and a type has one way;"
            " use reduce='end', or mode='manual'",
        ),
        (
            explicit and 1 < plan.unroll < plan.config.num_layers,
            f"unroll={plan.unroll} does not go with mode='explicit': JAX cannot cut a loop over unfinished"
            " sums in pieces; use unroll=1 or unroll=0",
        ),
        (
            explicit and in_pieces,
            f"ffn_chunks={plan.ffn_chunks} of a shared expert does not go with mode='explicit' and tp ="
            f" {plan.mesh.tp}: JAX cannot join pieces of unfinished sums; use ffn_chunks=1, or mode='manual'",
        ),
        (
            reduce == "layer" and plan.microbatches > 1,
            "reduce='layer' would communicate once per microbatch; use reduce='end' with microbatches > 1",
        ),
    ]


def _pipelines(plan: "Resolved", batch_size: int, seq_len: int) -> list[Row]:
    """What the executor cannot run. Simulating an order that a user wrote proves it legal, or names the
    deadlock; those that have names are legal (test_timetable)."""
    if (order := plan.pipeline) is None:
        return []
    if order.name not in SCHEDULES:
        lockstep(order)
    name, pp, layers = f"schedule '{order.name}'", plan.mesh.pp, plan.config.num_layers
    p, m, cells = order.num_stages, order.num_microbatches, order.cells
    no_pp = lambda field, value: (
        getattr(plan, field) != value,
        f"{field}={getattr(plan, field)!r} does not go with pp={pp}; use {field}={value!r}",
    )
    return [
        (p != pp, f"{name} has {p} stages but mesh '{plan.mesh}' has pp={pp}; use pp={p}"),
        (
            m != plan.microbatches,
            f"{name} has {m} microbatches but the plan has {plan.microbatches}; use microbatches={m}",
        ),
        (
            layers < cells,
            f"{layers} layers cannot fill stages·chunks = {cells}; use {cells} layers or fewer cells",
        ),
        no_pp("mode", "manual"),
        no_pp("reduce", "end"),
    ]


def _muon(plan: "Resolved", batch_size: int, seq_len: int) -> list[Row]:
    """Layers that Muon cannot deal evenly to the devices that share a matrix."""
    if plan.muon == "none":
        return []
    stored = (
        plan.zero == 3 and plan.zero_cuts() and plan.muon == "layer",
        "muon='layer' cuts the optimizer's state along layers, and ZeRO 3 stores weights cut along their"
        " width: gradients, weights and new weights would take an all-to-all each, where muon='owner' takes"
        " two; use muon='owner', or zero=1 or 2",
    )
    rows, num_stages = list[Row]([stored]), plan.mesh.pp
    for path, (weight, layouts) in plan.layouts_by_path.items():
        axes = tuple(a for a in layouts.whole.cut("l") if a != "pp")
        parts, layers = plan.mesh.along(axes), weight.shape[0] // num_stages
        names = dict.fromkeys(USER_AXIS.get(axis, axis) for axis in axes)
        lacks = (
            f"muon='{plan.muon}' deals the layers of a stage to {'·'.join(names)} = {parts} devices, and"
            f" '{path}' has {layers}; use a multiple of {parts}, fewer of these devices (as dp), or"
            " muon='gather'"
        )
        rows.append((axes and layers % parts, lacks))
    return rows


def _adapters(plan: "Resolved", batch_size: int, seq_len: int) -> list[Row]:
    """LoRA where JAX's types forbid it, and where no formula has what the compiler leaves out."""
    layers, unroll, alone = plan.config.num_layers, plan.unroll, plan.pipeline is None
    why = "no formula has what a first layer's backward pass leaves out then"
    rows: list[Row] = [
        (
            plan.mode == "explicit" and plan.mesh.tp > 1,
            f"mode='explicit' does not go with LoRA and tp = {plan.mesh.tp}: x A, or its gradient,"
            " is an unfinished sum, and JAX multiplies none; use mode='manual'",
        ),
        (alone and layers == 1, f"LoRA of 1 layer: without a loop over layers {why}; use 2 layers"),
        (
            alone and not 0 < unroll < layers,
            f"unroll={unroll} with LoRA and {layers} layers is no loop, and {why}; use unroll=1",
        ),
    ]
    return rows if plan.config.lora else []


def _dtypes(plan: "Resolved", batch_size: int, seq_len: int) -> list[Row]:
    """Dtypes in which weights and gradients travel, and blocks that share a scale; and those of matmuls,
    where a matmul is no part of it, or its operands' layout is not that of a region."""
    asks = f"matmul_dtype='{plan.matmul_dtype}' does not go with"
    has_latents = any(block.has_latent_attention for _, block in plan.config.blocks)
    in_float8 = has_latents and plan.matmul_dtype == "float8"
    rows: list[Row] = [
        (
            plan.mode != "manual" and (plan.gather_dtype, plan.reduce_dtype) != ("same", "same"),
            f"gather_dtype='{plan.gather_dtype}' reduce_dtype='{plan.reduce_dtype}' does not go with"
            f" mode='{plan.mode}', in which XLA sends what it computes; use mode='manual'",
        ),
        (
            plan.reduce_dtype != "same" and plan.reduce != "end",
            f"reduce_dtype='bfloat16' does not go with reduce='{plan.reduce}', which adds up in float32;"
            " use reduce='end'",
        ),
        (
            in_float8 and plan.regions["keys"].get("s"),
            f"{asks} latent attention and context_parallel='{plan.context_parallel}', whose ring expands"
            f" latents in dtype='{plan.dtype}'; use context_parallel='gather' or matmul_dtype='same'",
        ),
        (
            in_float8 and plan.mode != "manual" and plan.mesh.sp > 1,
            f"{asks} latent attention, sp = {plan.mesh.sp} and mode='{plan.mode}': latents are expanded where"
            " all positions are, and no island has that layout; use mode='manual' or matmul_dtype='same'",
        ),
    ]
    for path, (weight, layouts) in (
        plan.layouts_by_path if plan.gather_dtype == "float8" else {}
    ).items():
        sizes = layouts.stored.shard_shape(weight.shape, plan.mesh.sizes)
        size = math.prod(sizes[1:] if path.startswith("blocks.") else sizes)
        rows.append(
            (
                layouts.gather_wire and layouts.gather.moves and size % SCALED,
                f"gather_dtype='float8' has a scale for each {SCALED} numbers, and {size} of {path} on a"
                " device are no multiple; use gather_dtype='bfloat16', or fewer of"
                f" {', '.join(plan.zero_cuts())}",
            )
        )
    return rows


def unused(plan: "Resolved", given: Iterable[str] = ()) -> dict[str, str]:
    """The fields that were set and decide nothing for this mesh and model, with the reason: those that have
    not their defaults, and those ``given``, whatever they have."""
    mesh, config, order = plan.mesh, plan.config, plan.pipeline
    cudnn = (
        plan.requested.attention_kernel == "cudnn" and plan.positions_in_order or plan.takes_cudnn
    )
    text = f"mesh '{mesh}'"
    one = {axis: f"{text} has {axis}=1" for axis in ("pp", "sp", "tp", "ep")}
    unrolled = order is not None and (order.split_backward or plan.stage_saves == "residuals")
    cutter = (
        f"schedule '{order.name}'" if order and order.split_backward else "stage_saves=residuals"
    )
    lone_layer = order is not None and config.num_layers // order.cells == 1  # in the last chunk
    xla, auto = plan.mode != "manual", plan.mode == "auto"
    no_ffn = config.experts is not None and not config.experts.num_shared
    cuts, all_cuts = plan.zero_cuts(), mesh.live("fsdp", "ep", "near", "sp", "ul")

    def was_set(name: str) -> bool:
        default = getattr(type(plan), name)
        return name in given or default not in (getattr(plan.requested, name), getattr(plan, name))

    # Whether a sum over replicas may be left for `reduce`. The layouts of all weights tell; they are made
    # only if `reduce` was set, and not with ZeRO, which refuses ``bucket`` (`_reductions`).
    shared = (
        plan.reduce != "layer"
        and plan.zero
        or not was_set("reduce")
        or any(layouts.replica_axes for _, layouts in plan.layouts_by_path.values())
    )
    rules = [
        ("schedule virtual_stages stage_saves", mesh.pp == 1, one["pp"]),
        ("context_parallel sequence_order", mesh.sp == 1, one["sp"]),
        ("tp_sequence", mesh.tp == 1, one["tp"]),
        (
            "tp_comm_overlap",
            not plan.tp_sequence,
            "without tp_sequence nothing is gathered over tp",
        ),
        ("tp_comm_overlap", xla, f"under mode='{plan.mode}' XLA chooses how activations travel"),
        ("dispatch tp_dispatch ep_node expert_copies", mesh.ep == 1, one["ep"]),
        ("tp_dispatch", not plan.tp_sequence, "without tp_sequence all of tp has the same tokens"),
        ("hop", not plan.rings, "no rank passes anything round a ring"),
        (
            "zero",
            plan.zero and not cuts,
            f"{text} has none of {plan.zero_axes}, the axes by which ZeRO cuts",
        ),
        ("zero_axes", not plan.zero, "ZeRO 0 cuts nothing"),
        ("zero_axes", cuts == all_cuts, f"{text} has no others"),
        (
            "reshard_after_forward gather_dtype",
            not plan.gather_per,
            "only ZeRO 3 gathers weights for use",
        ),
        ("gather_dtype", plan.gather_dtype == plan.dtype, f"dtype is '{plan.dtype}' already"),
        ("reduce_dtype", mesh.size == 1, "one device sends nothing"),
        ("documents", not cudnn, "only cudnn reads it, on whole sequences in order, in bfloat16"),
        ("ffn_chunks", no_ffn, f"'{config.name}' has experts in place of a feed-forward"),
        ("unroll", config.num_layers == 1, "a loop over one layer is no loop"),
        ("unroll", lone_layer, "a stage has a chunk of one layer, and a loop over that is no loop"),
        ("remat unroll", unrolled, f"with {cutter} the layers of a stage are unrolled"),
        (
            "reduce",
            not shared,
            "no two devices keep the same weight, so no sum is left for `reduce`",
        ),
        ("bucket_bytes", plan.reduce != "bucket", f"reduce is '{plan.reduce}'"),
        ("reduce bucket_bytes", auto, "under mode='auto' XLA decides when gradients are summed"),
        ("virtual_stages", "\n" in plan.schedule.strip(), "the order is written out"),
    ]
    return {
        name: why for names, holds, why in rules if holds for name in names.split() if was_set(name)
    }


def unused_notes(plan: "Plan", why: dict[str, str]) -> list[str]:
    """A sentence on each field that decides nothing."""
    return [
        f"{name}={getattr(plan, name)!r} changes nothing: {reason}" for name, reason in why.items()
    ]
