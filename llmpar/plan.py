"""The plan: where each dim is cut in each region. It turns the model's logical arrows into physical ones.

A plan is frozen data. Everything about parallelism that is decided rather than computed is a field of it, and
the table in :meth:`Plan.regions` is the whole of tensor, sequence and data parallelism:

    region      b             s          d  n k m v
    data        dp,fsdp,ep    sp                         token ids, positions, losses
    stream      dp,fsdp,ep    sp[,tp]                    the residual stream; tp_sequence cuts its s by tp
    attention   dp,fsdp,ep    sp            tp (n, k)    inside attention; n is k·r
    queries     dp,fsdp,ep    sp            tp (k)       where queries meet keys; Ulysses: s whole, k by tp,sp
    keys        dp,fsdp,ep    sp            tp (k)       the same for keys; gathered keys: s whole
    ids         dp,fsdp,ep                               positions and documents of all keys
    ffn         dp,fsdp,ep    sp            tp (m)       inside the feed-forward
    experts     dp,fsdp       sp            tp (m)       where tokens meet experts, e cut by ep
    routing     dp,fsdp       sp                         who chose which expert, known to all of ep
    vocab       dp,fsdp,ep    sp            tp (v)       embedding look-up, logits and loss

Where sp is `usp`'s, its inner part is an axis of its own, ``ul``, whose ranks exchange positions for heads as
Ulysses does, while the others form a ring: ``s/sp k/tp,ul`` where queries meet keys, and ``sp,ul`` wherever
the table has sp (`Plan.of`). Where tp has more ranks than the model has KV heads, its inner part is an axis
of its own, ``kv``, whose ranks hold copies of one KV head and share the query heads that use it (`Plan.of`):
``n/tp,kv``, ``k/tp``, ``r/kv``, and ``tp,kv`` wherever the table has tp. A gradient of the copied weights is
one more sum, ``+kv``.

The layers ``l`` of a weight are cut by pp in every region. What is not cut by pp (embedding, head, last norm)
is whole on every stage, and its gradient is one more sum to finish.

A weight's life in one step is five layouts and four arrows; only the update itself moves nothing:

    stored -gather-> used -backward-> unreduced -accumulate-> accumulated -finish-> graded -update-> graded
                                                                                    graded -restore-> stored

ZeRO (Rajbhandari et al. 2020) decides which of them are cut by fsdp: a weight's width ``d`` (else its ``h``,
else its ``e``). Of ``ffn d m`` on ``fsdp=2 tp=2``, with dp besides:

    zero  stored       used    unreduced (each microbatch)  accumulated       graded
    0     d m/tp       d m/tp  d m/tp +dp +fsdp             d m/tp +dp +fsdp  d m/tp
    1     d m/tp       d m/tp  d m/tp +dp +fsdp             d m/tp +dp +fsdp  d/fsdp m/tp
    2     d m/tp       d m/tp  d m/tp +dp +fsdp             d/fsdp m/tp +dp   d/fsdp m/tp
    3     d/fsdp m/tp  d m/tp  d/fsdp m/tp +dp              d/fsdp m/tp +dp   d/fsdp m/tp

Each cell that differs from its neighbour is a collective (`Life`). Stage
3 is FSDP: its weights are gathered for use, and autodiff makes a reduce-scatter of that on the way back.

Devices along sp, and along ep where no expert is concerned, hold the same weights too and use them on other
tokens. So ZeRO cuts by these axes as well (`Plan.zero_axes`): with ``fsdp=2 sp=4``, ``d/fsdp`` becomes
``d/fsdp,sp``, and one collective over both axes takes the place of one over fsdp (Llama 3 2024, section
3.3.2, shards over its data and context parallel ranks alike). A weight without ``d`` is a small vector and
stays with fsdp. An expert is cut by ep already: ``e/ep d/fsdp,sp m``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from llmpar import schedules
from llmpar.notation import Arrow, Dim, Layout, MeshShape, divisors, parse_arrow, parse_layout, parse_mesh
from llmpar.timetable import timetable

BATCH_AXES = ("dp", "fsdp", "ep")
"""The axes that cut the batch. ``ep`` counts as batch for dense layers."""
MAX_MASK_BYTES = 64 << 20
"""A mask of queries times keys, in 16 bits, above which it costs more than the scores that it spares: cuDNN
reads it whole, and computes its gradient too. 5,792 positions."""


SUITS = {
    "attention_kernel": {
        "cpu": ("portable", "xla", "flash"),
        "gpu": ("flash", "cudnn", "portable", "xla"),
        "tpu": ("flash", "portable", "xla"),
    },
    "dispatch": {"cpu": ("padded",), "gpu": ("ragged", "padded"), "tpu": ("ragged", "padded")},
    "grouped": {"cpu": ("blocks", "ragged_dot"), "gpu": ("triton",), "tpu": ("ragged_dot", "blocks")},
}
"""What the devices of a platform can do, or not absurdly slowly; first what ``auto`` stands for."""
UNSUITED = {
    "cudnn": "it is for NVIDIA GPUs",
    "ragged": "XLA has no ragged all-to-all for CPUs",
    "ragged_dot": "XLA for GPUs multiplies every row by every expert",
    "blocks": "a GPU's host would wait for every turn of the loop",
    "triton": "its compiler writes programs for GPUs",
}


@dataclass(frozen=True)
class Life:
    """Where a weight, its gradient and its optimizer state lie in the course of a step (see the table above).

    Attributes:
        stored: the weight between steps.
        used: the weight in a matrix product: whole over the axes of ZeRO.
        unreduced: its gradient as the backward pass leaves it, with the sums that are still open.
        accumulated: what is added up over microbatches.
        graded: the finished gradient, and the optimizer's state.
        copied: the axes whose devices store the same block and use it on different values: over them the
            gradient is a sum. With ``reduce="layer"`` the backward pass itself finishes it.
    """

    stored: Layout
    used: Layout
    unreduced: Layout
    accumulated: Layout
    graded: Layout
    copied: tuple[str, ...]

    gather = property(lambda self: Arrow(self.stored, self.used), doc="At ZeRO 3 an all-gather.")
    accumulate = property(
        lambda self: Arrow(self.unreduced, self.accumulated), doc="At ZeRO 2 a reduce-scatter."
    )
    finish = property(lambda self: Arrow(self.accumulated, self.graded), doc="Finishes every sum still open.")
    restore = property(lambda self: Arrow(self.graded, self.stored), doc="At ZeRO 1 and 2 an all-gather.")


@dataclass(frozen=True)
class Plan:
    """How one training step is spread over a mesh.

    Attributes:
        mesh: sizes of the six axes; a string is parsed.
        reading: who writes the collectives: ``manual`` (we do, inside shard_map), ``auto`` (XLA's partitioner
            does), ``explicit`` (we say each one in JAX's types, and XLA writes it).
        zero: ZeRO stage, 0 to 3. At 0 fsdp is one more replica axis.
        zero_axes: the axes by which ZeRO cuts what a device would hold as others do. Fewer axes are smaller
            groups for each gather, and more state on every device.
        tp_sequence: also cut the residual stream's sequence by tp (Korthikanti et al. 2022, sequence
            parallelism).
        tp_comm_overlap: with tp_sequence, let activations travel in rings of permutes with the products
            between their hops, in place of all-gather before them and reduce-scatter behind (collective
            matmul, Wang et al. 2023). Experts, the embedding and the head keep theirs: no product goes with
            them, or one per step.
        reduce: when gradients are summed over the axes that keep equal weights: at the ``end`` of the step,
            once however many microbatches there are; ``layer`` by layer inside the backward pass; or at the
            end in flat ``bucket``s.
        bucket_bytes: a bucket is closed when it has reached this size.
        microbatches: per step and device; their gradients are summed before the update. In a pipeline, what
            fills it.
        remat: what the backward pass recomputes: ``none``; ``selective``, what is cheap, all but the results
            of matrix products and of attention, which are kept (Korthikanti et al. 2022, section 5, has the
            reasoning: FLOPs per byte); ``ffn``, the feed-forward's products too, whose results are most of
            the bytes; or the whole ``block``. The loop that multiplies experts on CPUs keeps nothing.
        reshard_after_forward: ZeRO-3 only, PyTorch's word: let a block's gathered weights go after its
            forward pass and gather them again in the backward pass; else they are kept in between. In a
            pipeline, where a layer is used by each microbatch, they are then gathered once and kept for the
            step: gradients are added up whole, float32, and reduce-scattered when it ends.
        dtype: what weights and activations are computed in. Master weights and gradients' sums stay float32.
        unroll: how many blocks the scan over layers unrolls at a time; 0 unrolls all.
        loss_chunks: pieces of the sequence whose logits exist one after the other.
        ffn_chunks: pieces of the sequence that go through a feed-forward one after the other (Liu and Abbeel
            2023), each moving by itself; with more than one the backward pass computes its hidden values
            again instead of keeping them.
        attention_block: queries and keys per block of blockwise attention; None: halves of what is here, down
            to 256.
        attention_kernel: ``portable``, the blocks of :mod:`llmpar.attention`; ``flash``, the kernel of
            :mod:`llmpar.kernels.flash` (on CPUs interpreted, and slow); or `jax.nn.dot_product_attention` by
            ``cudnn`` (NVIDIA GPUs, bfloat16) or ``xla``, with a mask of queries times keys, and not in a
            ring. ``auto`` is flash on GPUs and TPUs, and portable on CPUs or where attention_block asks for
            blocks.
        documents: ``whole`` promises that each row is one document: cudnn then needs no mask. A row that
            breaks the promise gives NaN.
        context_parallel: what attention does where the sequence is cut by sp: pass keys around a ``ring``,
            exchange positions for heads (``ulysses``), ``gather`` all keys, or both of the first two
            (``usp``): heads as far as there are any, among neighbours, and a ring of those groups (Fang and
            Zhao 2024, unified sequence parallelism).
        hop: how the ranks of a ring hand on what they hold: by a ``permute``; or in an ``exchange``, an
            all-to-all of which all blocks but one are empty, for which no other stage of a pipeline must
            wait. ``auto``: an exchange in a pipeline of simulated devices, where a permute waits for every
            device of the mesh, and a permute elsewhere.
        dispatch: how tokens reach the ranks of ep: in all slots of a buffer (``padded``), or in the full ones
            only (``ragged``, which CPUs lack). ``auto``: ragged on GPUs and TPUs.
        grouped: how rows are multiplied by their experts (Megatron's grouped GEMM): in a loop over
            ``blocks`` (CPUs), by `jax.lax.ragged_dot` (TPUs; a CPU multiplies every row by every expert), or
            by :mod:`llmpar.kernels.products` in ``triton`` (GPUs). ``auto``: what suits the devices.
        sequence_order: how positions are dealt to the ranks of sp. ``zigzag`` gives each the same causal
            work where a row is one document; ``balanced`` does for rows of several, by an order that the
            loader chooses for each row (`llmpar.sequence_order.row_orders`).
        schedule: the order in which pipeline stages work: a name of `schedules.SCHEDULES`, or an order
            written out, one line per stage (`schedules.from_text`).
        virtual_stages: pieces of the model per stage (Megatron's word), for schedules that let one choose.
        stage_saves: what a stage keeps of a forward pass: its ``input``, from which the backward pass
            recomputes, or the ``residuals``, so that nothing is computed twice. The first is no slower on
            CPUs, where copying residuals to their slots and back costs as much as a fifth more products, and
            takes half of the memory.
    """

    mesh: Any = MeshShape()  # a MeshShape from here on: strings are parsed
    reading: Literal["manual", "auto", "explicit"] = "manual"
    zero: Literal[0, 1, 2, 3] = 3
    zero_axes: Literal["fsdp,ep,sp", "fsdp,ep", "fsdp,sp", "fsdp"] = "fsdp,ep,sp"
    tp_sequence: bool = False
    tp_comm_overlap: bool = False
    reduce: Literal["end", "layer", "bucket"] = "end"
    bucket_bytes: int = 4 << 20
    microbatches: int = 1
    remat: Literal["none", "selective", "ffn", "block"] = "none"
    reshard_after_forward: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"
    unroll: int = 1
    loss_chunks: int = 1
    ffn_chunks: int = 1
    attention_block: int | None = None
    attention_kernel: Literal["auto", "portable", "flash", "cudnn", "xla"] = "auto"
    documents: Literal["packed", "whole"] = "packed"
    context_parallel: Literal["ring", "ulysses", "gather", "usp"] = "ring"
    hop: Literal["auto", "permute", "exchange"] = "auto"
    dispatch: Literal["auto", "padded", "ragged"] = "auto"
    grouped: Literal["auto", "blocks", "ragged_dot", "triton"] = "auto"
    sequence_order: Literal["zigzag", "balanced", "striped", "contiguous"] = "zigzag"
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    stage_saves: Literal["input", "residuals"] = "input"

    def __post_init__(self):
        object.__setattr__(self, "mesh", parse_mesh(self.mesh))
        for name, hint in _kinds().items():
            _check_value(name, hint, getattr(self, name))

    # --------------------------------------------------------------------------------------- who is cut where

    def live(self, *axes: str) -> tuple[str, ...]:
        """Those of ``axes`` that have more than one device: the others must leave no trace in the program."""
        return tuple(a for a in axes if self.mesh.sizes.get(a, 1) > 1)

    @functools.cached_property
    def regions(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Region to dim to the axes that cut it."""
        b, s, tp = self.live(*BATCH_AXES), self.live("sp", "ul"), self.live("tp", "kv")
        heads = {"ulysses": s, "usp": self.live("ul")}.get(self.context_parallel, ())
        ring = tuple(a for a in s if a not in heads)
        # A KV head with copies is one to a device: Ulysses then cuts the query heads that use it.
        k, r = (self.live("tp"), self.live("kv") + heads) if self.mesh.kv > 1 else (tp + heads, ())
        return {
            "data": {"b": b, "s": s},
            "stream": {"b": b, "s": s + tp * self.tp_sequence},
            "attention": {"b": b, "s": s, "n": tp, "k": self.live("tp"), "r": self.live("kv")},
            "queries": {"b": b, "s": ring, "k": k, "r": r},
            "keys": {"b": b, "s": () if self.context_parallel == "gather" else ring, "k": k},
            "ids": {"b": b},
            "ffn": {"b": b, "s": s, "m": tp},
            "vocab": {"b": b, "s": s, "v": tp},
            "experts": {"b": self.live("dp", "fsdp"), "s": s, "e": self.live("ep"), "m": tp},
            "routing": {"b": self.live("dp", "fsdp"), "s": s},
        }

    def varying(self, region: str) -> tuple[str, ...]:
        """The axes over which values in ``region`` differ, or are being summed, in link order."""
        cut = {a for axes in self.regions[region].values() for a in axes}
        return tuple(a for a in self.mesh.sizes if a in cut)

    @property
    def in_order(self) -> bool:
        """Whether a device's queries and keys are at the same positions, in rising order: attention may then
        skip masked blocks while compiling. (Gathered keys are those of the whole row, beside queries of a
        part of it.)"""
        alike = self.regions["queries"]["s"] == self.regions["keys"]["s"]
        return alike and (self.mesh.sp == 1 or self.sequence_order == "contiguous")

    @property
    def rings(self) -> bool:
        """Whether the ranks of an axis hand on what they hold, neighbour by neighbour, inside a layer."""
        return bool(self.regions["keys"].get("s")) or self.tp_comm_overlap

    def detour(self, platform: str) -> str:
        """What simulated devices make the plan do otherwise than others would (`on`), in one line; '' for
        nothing."""
        decided = self.on(platform)
        said = {
            "a ring's hop is an all-to-all here, with one full block: in a permute, simulated devices would"
            " wait for every stage of the pipeline": decided.hop == "exchange" and self.rings,
            "weights are gathered once a step here, and kept: nothing orders gathers of experts and of other"
            " weights in a backward pass that is cut, and simulated devices might wait for one another for"
            " ever": decided.gathers != self.gathers,
        }
        return "; ".join(text for text, holds in said.items() if holds)

    @functools.cached_property
    def pipeline(self) -> schedules.Schedule | None:
        """What each stage does and in which order; None where there is one stage."""
        if self.mesh.pp == 1:
            return None
        return (
            schedules.from_text(self.schedule)
            if "\n" in self.schedule.strip()
            else schedules.make(self.schedule, self.mesh.pp, self.microbatches, self.virtual_stages)
        )

    def of(self, config) -> Plan:
        """The plan for a model: ranks of tp that its KV heads cannot cut hold copies of them (Megatron-LM's
        and vLLM's way with grouped queries), and as many ranks of sp exchange heads as divide them."""
        copies, rest = divmod(self.mesh.tp, config.num_kv_heads)
        shape = dataclasses.replace(self.mesh, kv=1 if rest else max(1, copies))
        if self.context_parallel == "usp":
            heads = (config.num_heads if shape.kv > 1 else config.num_kv_heads) // shape.tp
            shape = dataclasses.replace(shape, ul=math.gcd(heads, shape.sp))
        return self if shape == self.mesh else dataclasses.replace(self, mesh=shape)

    def padded(self, config):
        """The model with as many layers as a pipeline's state has places: the same number for every chunk of
        every stage."""
        if self.pipeline is None:
            return config
        most = max(self.pipeline.layers(config.num_layers).values())
        return dataclasses.replace(config, num_layers=most * len(self.pipeline.routes[0]))

    # ------------------------------------------------------------------------------------ logical to physical

    def place(self, layout: Layout | str) -> Layout:
        """The physical layout of a logical one (``'attention b s d +n'`` becomes ``'b/dp,fsdp s d +tp'``).

        A weight is placed as it is *used*: cut by tp where its dims are, whole over the axes of ZeRO.
        """
        layout = parse_layout(layout) if isinstance(layout, str) else layout
        if not layout.region:
            return layout
        cuts = self.regions.get(layout.region)
        if cuts is None:
            raise ValueError(
                f"layout '{layout}' names an unknown region; the regions are {', '.join(self.regions)}"
            )
        sums = tuple(a for d in layout.sums for a in cuts.get(d, ()))
        cuts = cuts | {"l": self.live("pp")}
        return Layout(tuple(Dim(d.name, cuts.get(d.name, ())) for d in layout.dims), sums)

    def resolve(self, arrow: str) -> Arrow:
        """The physical arrow of a logical one."""
        logical = parse_arrow(arrow)
        return Arrow(self.place(logical.before), self.place(logical.after))

    def life(self, dims: str) -> Life:
        """The layouts of a weight, its gradients and its optimizer state in one step, and the arrows between
        them. Raises ValueError for an unknown region."""
        used, differ = self.place(dims), self.varying(parse_layout(dims).region)
        target = next(x for x in "dhe" if x in used.letters)
        # Copies that are used on equal values have no sum to share: a `serve.decode.Serving` cuts no s.
        over = tuple(a for a in self._zero_axes(target) if a in differ and a not in used.axes)
        cut = Layout(tuple(Dim(d.name, d.axes + over * (d.name == target)) for d in used.dims))
        stored, graded = cut if self.zero == 3 else used, cut if self.zero else used
        kept = used if self.gathers == "step" else stored
        copied = tuple(a for a in self.live("pp") + differ if a not in kept.axes)
        unreduced = Layout(kept.dims, () if self.reduce == "layer" else copied)
        shard = Layout(cut.dims, tuple(a for a in unreduced.sums if a not in over))
        return Life(stored, used, unreduced, shard if self.zero == 2 else unreduced, graded, copied)

    def _zero_axes(self, target: str = "d") -> tuple[str, ...]:
        """The live axes by which ZeRO cuts the dim ``target``: vectors, which have no width d, by fsdp
        alone."""
        axes = self.zero_axes.replace("sp", "sp,ul").split(",")
        return self.live(*axes) if target == "d" else self.live("fsdp")

    @property
    def gathers(self) -> Literal["", "block", "step"]:
        """When weights that are stored in pieces are gathered for use: for each ``block``, as FSDP does, or
        in a pipeline once a ``step``; empty where they are not."""
        if self.zero != 3 or not self._zero_axes():
            return ""
        return "step" if self.mesh.pp > 1 and not self.reshard_after_forward else "block"

    def stored(self, dims: str) -> Layout:
        """A weight's layout between steps."""
        return self.life(dims).stored

    def spread(self, arrow: str) -> tuple[str, ...]:
        """The axes over which a value begins to differ where a logical ``arrow`` ends: no communication then,
        an all-reduce of the gradient in the backward pass."""
        summed = {a for move in self.resolve(arrow).moves if move.kind == "all-reduce" for a in move.axes}
        logical = parse_arrow(arrow)
        differ = set(self.varying(logical.before.region)) - summed
        return tuple(a for a in self.varying(logical.after.region) if a not in differ)

    # ----------------------------------------------------------------------------------------------- refusals

    def check(self, config, batch_size: int, seq_len: int) -> None:
        """Refuse what cannot be cut evenly, with the arithmetic and something that would work. Before any
        compilation."""
        if (fitted := self.of(config)) != self:
            return fitted.check(config, batch_size, seq_len)
        config.weights()  # refuses what cannot run at all
        self._refuse_idle(self.idle(config))
        _refuse(
            self.mesh.ep > 1 and not config.experts,
            f"mesh '{self.mesh}' has ep={self.mesh.ep}, but no experts in '{config.name}' here; use pp, dp,"
            " fsdp, sp, tp",
        )
        for name, size in {"batch": batch_size, "sequence": seq_len}.items():
            _refuse(size < 1, f"{name} {size} holds no token; use 1 or more")
        self._divides("batch", batch_size, BATCH_AXES, "microbatches")
        cut_by_tp = {
            "heads": config.num_heads,
            "feed-forward width": config.ffn_width,
            "vocabulary": config.vocab_size,
        }
        tp_suits = math.gcd(config.num_kv_heads, *cut_by_tp.values())
        for name, size in cut_by_tp.items():
            self._divides(name, size, ("tp",), suits=tp_suits, fixed=True)
        self._check_kv_heads(config)
        if config.experts:
            self._divides("experts", config.experts.num_experts, ("ep",), fixed=True)
        if self.tp_sequence:
            self._divides("sequence", seq_len, ("sp", "tp"), suits=math.gcd(seq_len, tp_suits))
        self._divides("sequence", seq_len, ("sp",), "loss_chunks")
        # Each piece is gathered by itself; experts need all at once.
        pieces = self.tp_sequence and not config.experts
        cuts, fits = (("sp", "tp"), math.gcd(seq_len, tp_suits)) if pieces else (("sp",), 0)
        self._divides("sequence", seq_len, cuts, "ffn_chunks", suits=fits)
        self._check_context_parallel(config, seq_len)
        for what in ("queries", "keys"):
            local = seq_len // self.mesh.along(self.regions[what].get("s", ()))
            if self.attention_block and local > self.attention_block and local % self.attention_block:
                self._divides(f"each device's number of {what}", local, (), "attention_block", fixed=True)
        self._check_kernel(seq_len)
        if self.zero:
            self._check_zero(config, batch_size // (self.mesh.dp * self.mesh.ep * self.microbatches))
        _refuse(
            self.reduce != "end" and self.zero in (1, 2) or self.reduce == "bucket" and self.zero,
            f"reduce='{self.reduce}' does not go with ZeRO {self.zero}, whose gradients are reduce-scattered;"
            " use 'end'",
        )
        _refuse(
            self.reduce == "bucket" and self.reading == "explicit",
            "reduce='bucket' joins gradients that are cut in different ways, and a type has one way; use"
            " reduce='end', or reading='manual'",
        )
        _refuse(
            self.reading == "explicit" and 1 < self.unroll < config.num_layers,
            f"unroll={self.unroll} does not go with reading='explicit': JAX 0.10 cannot cut a loop over"
            " unfinished sums in pieces; use unroll=1 or unroll=0",
        )
        _refuse(
            self.reduce == "layer" and self.microbatches > 1,
            "reduce='layer' would communicate once per microbatch; use reduce='end' with microbatches > 1",
        )
        self._check_pipeline(config)

    def _check_context_parallel(self, config, seq_len: int) -> None:
        """Refuse a sequence that zigzag cannot deal, and heads that cannot be exchanged as asked."""
        sp, ul = self.mesh.sp, self.mesh.ul
        which, heads = ("query", config.num_heads) if self.mesh.kv > 1 else ("KV", config.num_kv_heads)
        here, near = heads // self.mesh.tp, 2 * sp * max(1, seq_len // (2 * sp))
        parts, way = ("all", "ulysses") if ul > 1 else ("no part", "ring")
        _refuse(
            sp > 1 and self.sequence_order == "zigzag" and seq_len % (2 * sp),
            f"sequence_order='zigzag' cuts a sequence into 2·sp = {2 * sp} parts, and {seq_len} is no"
            f" multiple; use {near}, or sequence_order='balanced' or 'striped'",
        )
        _refuse(
            self.context_parallel == "ulysses" and here % sp,
            f"context_parallel='ulysses' cuts the {here} {which} heads of a device by sp = {sp}; use"
            " context_parallel='ring', which needs no heads",
        )
        _refuse(
            self.context_parallel == "usp" and ul in (1, sp),
            f"context_parallel='usp' exchanges the {here} {which} heads of a device among ranks of sp ="
            f" {sp}, and {parts} of these divide them; use context_parallel='{way}'",
        )

    def _check_kv_heads(self, config) -> None:
        """Refuse a tp that neither cuts the KV heads evenly nor gives each equally many copies, and copies
        that a reading does not know."""
        heads, tp = config.num_kv_heads, self.mesh.tp
        if heads % tp and self.mesh.kv == 1:
            cut = divisors(math.gcd(config.num_heads, config.ffn_width, config.vocab_size))
            raise ValueError(
                f"KV heads {heads} is not a multiple of tp = {tp}, nor tp of KV heads; make tp one of"
                f" {', '.join(str(n) for n in cut if n <= 4 * tp and 0 in (heads % n, n % heads))}"
            )
        _refuse(
            self.mesh.kv > 1 and self.reading == "explicit",
            f"reading='explicit' does not go with tp = {tp} on {heads} KV heads: a type has no sum over the"
            " part of tp that holds copies of a head beside one over all of it; use reading='manual', or a tp"
            f" that divides {heads}",
        )

    def _check_zero(self, config, rows: int) -> None:
        """Refuse dims that ZeRO cannot cut evenly. With fsdp as many ``rows`` of the batch are cut too."""
        cut = {"model width": (config.width, self._zero_axes("d"))}
        if config.qkv_bias or config.qk_norm:
            cut["head width"] = config.head_width, self._zero_axes("h")
        if config.experts and config.experts.bias_rate is not None:
            cut["experts"] = config.experts.num_experts, self._zero_axes("e")
        suits = math.gcd(rows, *(size for size, _ in cut.values()))
        for name, (size, axes) in cut.items():
            fewer = len(axes) > 1 or axes != self.live("fsdp")
            ways = ", or use zero_axes='fsdp'" * (fewer and size % self.mesh.fsdp == 0)
            self._divides(name, size, axes, suits=suits, fixed=True, ways=ways)

    def idle(self, config) -> dict[str, str]:
        """The fields that are set and decide nothing for this mesh and model, with the reason: `check`
        refuses them."""
        mesh, life = self.mesh, self.of(config).life
        one = lambda axis: f"mesh '{mesh}' has {axis}=1"
        rules = [
            ("schedule virtual_stages stage_saves", mesh.pp == 1, one("pp")),
            ("context_parallel sequence_order", mesh.sp == 1, one("sp")),
            ("hop", not self.rings, "no ring hands anything on"),
            ("tp_sequence", mesh.tp == 1, one("tp")),
            ("tp_comm_overlap", not self.tp_sequence, "without tp_sequence nothing is gathered over tp"),
            (
                "tp_comm_overlap",
                self.reading != "manual",
                f"under reading='{self.reading}' XLA chooses how activations travel",
            ),
            ("dispatch", mesh.ep == 1, one("ep")),
            (
                "zero",
                not self._zero_axes() and self.zero in (1, 2),
                f"mesh '{mesh}' has no axis by which ZeRO cuts state; those are {self.zero_axes}",
            ),
            ("zero_axes", not self.zero, "ZeRO 0 cuts nothing"),
            (
                "zero_axes",
                self._zero_axes() == self.live("fsdp", "ep", "sp", "ul"),
                f"mesh '{mesh}' has no others",
            ),
            ("reshard_after_forward", not self.gathers, "only ZeRO 3 gathers weights for use"),
            ("grouped", config.experts is None, f"'{config.name}' has no experts"),
            (
                "documents",
                self.attention_kernel != "cudnn" or not self.in_order,
                "only attention_kernel='cudnn' reads it, on whole sequences in contiguous order",
            ),
            (
                "ffn_chunks",
                config.experts is not None and not config.experts.num_shared,
                f"'{config.name}' has experts in place of a feed-forward",
            ),
            ("unroll", config.num_layers == 1, "a loop over one layer is no loop"),
            (
                "reduce",
                (self.reduce == "layer" or not self.zero)  # a bucket is refused with ZeRO anyway
                and not any(life(weight.dims).copied for weight in config.weights().values()),
                "no weight is kept by two devices, so no sum is left for `reduce`",
            ),
            ("bucket_bytes", self.reduce != "bucket", f"reduce is '{self.reduce}'"),
            (
                "reduce bucket_bytes",
                self.reading == "auto",
                "under reading='auto' XLA decides when gradients are summed",
            ),
            ("virtual_stages", "\n" in self.schedule.strip(), "the order is written out"),
        ]
        return {
            name: why for names, holds, why in rules if holds for name in names.split() if self._is_set(name)
        }

    def _is_set(self, name: str) -> bool:
        return getattr(self, name) != type(self).__dataclass_fields__[name].default

    def _refuse_idle(self, reasons: dict[str, str]) -> None:
        for name, why in reasons.items():
            found = f"{name}={getattr(self, name)!r}"
            _refuse(self._is_set(name), f"{found} would change nothing: {why}; leave {name} out")

    def effective(self, config) -> Plan:
        """The same plan, with the defaults in fields that decide nothing: for tools whose controls are always
        there."""
        defaults: dict[str, Any] = {
            name: type(self).__dataclass_fields__[name].default for name in self.idle(config)
        }
        return dataclasses.replace(self, **defaults)

    def _check_kernel(self, seq_len: int) -> None:
        """Refuse what a kernel cannot do, and a mask of all queries and keys that is too large."""
        kernel, why, s = self.attention_kernel, "", self.regions["queries"].get("s", ())
        masked = kernel == "xla" or kernel == "cudnn" and self.documents == "packed"
        mask_bytes = 2 * seq_len**2 // self.mesh.along(s)
        if masked and mask_bytes > MAX_MASK_BYTES:
            why = (
                f"holds a mask of queries times keys, {mask_bytes >> 20} MiB a row at {seq_len} positions;"
                " use attention_kernel='flash'"
            )
            if kernel == "cudnn" and self.in_order:
                why += ", or documents='whole'"
        if kernel in ("cudnn", "xla") and self.regions["keys"].get("s"):
            why = (
                "gives no log of sums in float32 to merge by, which a ring needs; use"
                " context_parallel='ulysses' or 'gather'"
            )
        if self.attention_block and kernel not in ("auto", "portable"):
            why = "chooses its own blocks; leave attention_block out"
        if kernel == "cudnn" and self.dtype == "float32":
            why = "computes in 16 bits; use dtype='bfloat16'"
        _refuse(why, f"attention_kernel='{kernel}' {why}, or attention_kernel='portable'")

    def on(self, platform: str) -> Plan:
        """The plan with what it leaves to the platform decided (``cpu``, ``gpu`` or ``tpu``). Refuses what
        its devices cannot do, or only absurdly slowly."""
        decided: dict[str, Any] = {}
        for name, suits in SUITS.items():
            value, first = getattr(self, name), suits[platform][0]
            if name == "attention_kernel" and self.attention_block:
                first = "portable"  # the one whose tiles can be chosen
            if value not in ("auto", *suits[platform]):
                raise ValueError(
                    f"{name}='{value}' does not suit the {platform.upper()}s of this mesh:"
                    f" {UNSUITED[value]}; use {name}='{first}', or 'auto'"
                )
            decided |= {name: first} if value == "auto" else {}
        waits = platform == "cpu" and self.mesh.pp > 1  # a permute, for what other stages do not take part in
        _refuse(
            waits and self.hop == "permute" and self.rings,
            f"hop='permute' does not go with pp={self.mesh.pp} on simulated devices: a permute waits there"
            " for every device of the mesh, and other stages do other work; use hop='exchange', or 'auto'",
        )
        cut = self.pipeline and (self.pipeline.split_backward or self.stage_saves == "residuals")
        apart = "ep" in self._zero_axes() and self.live("fsdp", "sp")  # experts are gathered without ep
        decided |= (
            {"reshard_after_forward": False} if platform == "cpu" and cut and apart and self.gathers else {}
        )
        decided |= {"hop": "exchange" if waits else "permute"} if self.hop == "auto" else {}
        return dataclasses.replace(self, **decided)

    def _check_pipeline(self, config) -> None:
        """Refuse a pipeline that the executor cannot walk. Simulating the order proves it legal, or names the
        deadlock."""
        if self.pipeline is None:
            return
        order, name = self.pipeline, f"schedule '{self.pipeline.name}'"
        if order.split_backward or self.stage_saves == "residuals":
            who = name if order.split_backward else "stage_saves=residuals"
            why = f"{who} cuts a stage's backward pass, with its layers written out and none checkpointed"
            self._refuse_idle({"remat": why, "unroll": why})
        if min(order.layers(config.num_layers).values(), default=0) == 1:
            self._refuse_idle({"unroll": f"{name} has a chunk of one layer, and a loop over that is no loop"})
        timetable(order)
        p, m, cells = order.num_stages, order.num_microbatches, len(order.routes[0])
        _refuse(
            p != self.mesh.pp,
            f"{name} has {p} stages but mesh '{self.mesh}' has pp={self.mesh.pp}; use pp={p}",
        )
        _refuse(
            m != self.microbatches,
            f"{name} has {m} microbatches but the plan has {self.microbatches}; use microbatches={m}",
        )
        _refuse(
            config.num_layers < cells,
            f"{config.num_layers} layers cannot fill stages·chunks = {cells}; use {cells} layers or fewer"
            " cells",
        )
        for field, value in {"reading": "manual", "reduce": "end"}.items():
            asked = getattr(self, field)
            why = f"{field}={asked!r} does not go with pp={self.mesh.pp}; use {field}={value!r}"
            _refuse(asked != value, why)

    def _divides(
        self,
        what: str,
        size: int,
        axes: tuple[str, ...],
        times: str = "",
        suits: int = 0,
        fixed: bool = False,
        ways: str = "",
    ):
        """Refuse a ``size`` that is no multiple of the axes' sizes and of the field ``times``, multiplied.
        The advice keeps to divisors of ``suits``, which whatever else these axes cut has too, and does not
        change a ``fixed`` size. Other ``ways`` follow.
        """
        pieces = getattr(self, times) if times else 1
        parts = pieces * math.prod(getattr(self.mesh, a) for a in axes)
        if size % parts == 0:
            return
        name = "·".join((*axes, times) if pieces > 1 else axes)
        fits = [n for n in divisors(suits or size) if n <= 4 * parts]
        near = sorted({max(parts, size // parts * parts), -(-size // parts) * parts})
        change = "" if fixed else f"use {' or '.join(map(str, near))}, or "
        ways = f"{change}make {name} one of {', '.join(map(str, fits))}{ways}"
        raise ValueError(f"{what} {size} is not a multiple of {name} = {parts}; {ways}")


def _refuse(holds: Any, why: str) -> None:
    """Raise ValueError with the reason, where this holds."""
    if holds:
        raise ValueError(why)


@functools.cache
def _kinds() -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(Plan).items() if name != "mesh"}


def _check_value(name: str, hint: Any, value: Any) -> None:
    """Refuse a value that a field's type does not have: a misspelt choice would silently be another
    strategy."""
    kinds, least = get_args(hint) or (hint,), 0 if name == "unroll" else 1
    if get_origin(hint) is Literal:
        fits, ways = any(type(value) is type(c) and value == c for c in kinds), list(map(repr, kinds))
    else:
        fits = type(value) in kinds and (type(value) is not int or value >= least)
        words = {
            int: f"a whole number of {least} or more",
            bool: "True or False",
            str: "a text",
            type(None): "None",
        }
        ways = [words[kind] for kind in kinds]
    if not fits:
        raise ValueError(f"{name}={value!r} is not a value of a plan; use {' or '.join(ways)}")
