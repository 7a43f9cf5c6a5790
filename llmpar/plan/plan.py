"""The plan: where each dim is cut in each region. It turns the model's logical arrows into physical ones.

A plan is frozen data. Everything about parallelism that is decided rather than computed is a field of it. Its
mesh axes, such as dp and tp, cut the dims of values, such as b and m (`layout.DIMS` lists the letters). Two
tables say which axes cut which dim: this one of values, by the part of the model in which they are, and one
of weights below.

    region      b             s         by tp
    data        dp,fsdp,ep    sp                    token ids, positions, losses
    stream      dp,fsdp,ep    sp[,tp]               the residual stream; tp_sequence cuts its s by tp, too
    attention   dp,fsdp,ep    sp        n k         inside attention: n query heads, r for each of k KV heads
    queries     dp,fsdp,ep    sp        k           where queries meet keys
    keys        dp,fsdp,ep    sp        k           the same for keys
    ids         dp,fsdp,ep                          positions and documents of all keys
    ffn         dp,fsdp,ep    sp        m           inside the feed-forward
    experts     dp,fsdp       sp        m           where tokens meet experts: e is cut by ep
    routing     dp,fsdp       sp                    which token chose which expert, known to all of ep
    vocab       dp,fsdp,ep    sp        v           embedding look-up, logits and loss

`Plan.context_parallel` changes two rows. Ring: none. Gather: the keys' s is whole. Ulysses: in queries and
keys s is whole, and k is cut by tp,sp. The layers ``l`` of a weight are cut by pp in every region. Embedding,
head and last norm have no l: they are whole on every stage, and their gradients are summed over pp, too.

In one step a weight and its gradient have five layouts. Four arrows lead from one to the next, and move
something where the two differ; the optimizer updates the weight's ``reduced`` slice:

    weight     stored -gather-> used
    gradient   unreduced -accumulate-> accumulated -finish-> reduced
    weight     reduced -restore-> stored

The stage of ZeRO (Rajbhandari et al. 2020) decides which of these layouts are cut by fsdp. ZeRO cuts the dim
``d``, else ``h``, else ``e``; a weight with none of them stays whole. ``ffn d m`` on ``dp=2 fsdp=2 tp=2``:

    zero  stored       used    unreduced (each microbatch)  accumulated       reduced
    0     d m/tp       d m/tp  d m/tp +dp +fsdp             d m/tp +dp +fsdp  d m/tp
    1     d m/tp       d m/tp  d m/tp +dp +fsdp             d m/tp +dp +fsdp  d/fsdp m/tp
    2     d m/tp       d m/tp  d m/tp +dp +fsdp             d/fsdp m/tp +dp   d/fsdp m/tp
    3     d/fsdp m/tp  d m/tp  d/fsdp m/tp +dp              d/fsdp m/tp +dp   d/fsdp m/tp

At the stages 0 to 2 the backward pass leaves each device its own term of the sums +dp +fsdp, and has sent
nothing of it. Stage 3 is FSDP: its weights are gathered for use, and autodiff makes a reduce-scatter of that
gather in the backward pass.

Like the devices along fsdp, those along sp, and along ep except for experts, use the same weights on
different tokens. So ZeRO cuts by these axes as well (`Plan.zero_axes`): with ``fsdp=2 sp=4``, ``d/fsdp``
becomes ``d/fsdp,sp``, and one collective over both axes takes the place of one over fsdp (Llama 3 2024,
section 3.3.2, does so). A dim other than ``d`` is cut by fsdp alone. An expert is cut by ep already: ``e/ep
d/fsdp,sp m``.

Two axes may be split in an outer and an inner part, which `Plan.resolve` decides by the model's heads. A user
writes sp=4 all the same; layouts name the parts, ``sp`` being the outer one (`MeshShape.sizes`):

    sp,ul   with ``usp``, of sp=4 such as sp=2 ul=2: the ranks of ul exchange positions for heads, as Ulysses
            does, and those of sp form a ring. Queries and keys are ``s/sp k/tp,ul``; in the other rows of the
            table read ``sp,ul`` for sp.
    tp,kv   where tp has more ranks than the model has KV heads: the ranks of kv have copies of one KV head,
            and share the query heads that use it. Heads are ``n/tp,kv``, ``k/tp``, ``r/kv``; in the other
            rows read ``tp,kv`` for tp. The gradient of a copied weight is one more sum, ``+kv``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from llmpar.files import Allowed, check_fields
from llmpar.plan import checks, places, schedules
from llmpar.plan.backend import SUITS, fits_cudnn, suited
from llmpar.plan.layout import WIRES, Arrow, Dim, Layout, parse_arrow, parse_layout
from llmpar.plan.mesh_shape import MeshShape, parse_mesh
from llmpar.plan.model_config import ModelConfig, Weight, matrix_dims
from llmpar.plan.sequence_order import Mask, ring_hops

BATCH_AXES = ("dp", "fsdp", "ep")
"""The axes that cut the batch. ``ep`` counts as batch for dense layers."""


@dataclass(frozen=True)
class WeightLayouts:
    """The layouts of a weight, its gradient and its optimizer state in one step (the table above).

    Attributes:
        stored: the weight between steps.
        used: the weight in a matmul: whole over the axes of ZeRO.
        unreduced: its gradient as the backward pass leaves it, with the sums that are still open.
        accumulated: what is added up over microbatches.
        reduced: the finished gradient, and the optimizer's state.
        whole: where Muon has whole matrices (`Plan.muon`), from reduced and back; of what is none of its
            matrices, as reduced.
        replica_axes: the axes along which devices hold the same block in the backward pass, and compute
            different terms of its gradient (of other tokens, heads or stages). The sum over them is open in
            ``unreduced``; with ``reduce="layer"`` the backward pass itself finishes it.
        gather_wire, reduce_wire: the dtypes in which it is gathered for use, and its gradient summed.
    """

    stored: Layout
    used: Layout
    unreduced: Layout
    accumulated: Layout
    reduced: Layout
    whole: Layout
    replica_axes: tuple[str, ...]
    gather_wire: str = ""
    reduce_wire: str = ""

    # at ZeRO 3 an all-gather
    gather = property(
        lambda self: Arrow(
            self.stored, self.used, wire=self.gather_wire, gradient_wire=self.reduce_wire
        )
    )
    # at ZeRO 2 a reduce-scatter
    accumulate = property(
        lambda self: Arrow(self.unreduced, self.accumulated, wire=self.reduce_wire)
    )
    # all sums that are still open
    finish = property(lambda self: Arrow(self.accumulated, self.reduced, wire=self.reduce_wire))
    # at ZeRO 1 and 2 an all-gather
    restore = property(lambda self: Arrow(self.reduced, self.stored))
    # of Muon alone: an all-gather and a slice, or two all-to-alls
    assemble = property(lambda self: Arrow(self.reduced, self.whole))
    take_apart = property(lambda self: Arrow(self.whole, self.reduced))
    # of workers that train apart: how far they moved the weight
    difference = property(lambda self: Arrow(Layout(self.stored.dims, ("dp",)), self.stored))


@dataclass(frozen=True)
class Plan:
    """How one training step is spread over a mesh: what a user asks for. `resolve` makes a `Resolved` of it.

    Attributes:
        mesh: sizes of the six axes; a string is parsed.
        mode: what writes the collectives: ``manual``, the package, inside shard_map; ``auto``, XLA's
            partitioner; ``explicit``, XLA by JAX's types, which the package gives to every value.
        zero: ZeRO stage, 0 to 3. At 0 fsdp is one more replica axis.
        zero_axes: the axes over which ZeRO shards weights, gradients and optimizer state that would else be
            replicated. Fewer axes: smaller groups for each gather, but more state on every device.
        tp_sequence: also cut the residual stream's sequence by tp (sequence parallelism, Korthikanti et al.
            2022).
        tp_comm_overlap: with tp_sequence, let activations travel in rings of permutes with the matmuls
            between their hops, in place of all-gather before them and reduce-scatter behind (collective
            matmul, Wang et al. 2023). Experts, the embedding and the head keep theirs.
        reduce: when gradients are summed over the axes along which devices have equal weights: once, at the
            ``end`` of the step, however many microbatches there are (at ZeRO 2 over the axes by which it cuts
            after each microbatch); ``layer`` by layer inside the backward pass; or at the end in flat
            ``bucket``s.
        bucket_bytes: a bucket is closed when it has reached this size.
        microbatches: per step and device; their gradients are summed. In a pipeline they fill it.
        remat: what the backward pass recomputes: ``none``; ``selective``, everything but matmuls and
            attention (Korthikanti et al. 2022, section 5); ``ffn``, also the feed-forward's matmuls, whose
            results are most of the bytes; or the whole ``block``. On CPUs every choice but ``none``
            recomputes the matmuls of experts.
        reshard_after_forward: ZeRO-3 only, PyTorch's word: let a block's gathered weights go after its
            forward pass and gather them again in the backward pass. False keeps them in between; in a
            pipeline, where each microbatch uses them, for the whole step, with gradients added up whole in
            float32 and reduce-scattered at its end.
        dtype: what weights and activations are computed in. Master weights and gradients' sums stay float32.
        gather_dtype: what ZeRO 3 gathers weights in: the ``same`` as dtype, ``bfloat16``, or ``float8``, e4m3
            with a float32 scale for each 32 numbers. Norms and other vectors are gathered as they are.
        reduce_dtype: what gradients' sums travel in: the ``same`` as they are computed in, or ``bfloat16``,
            added up in float32 where they arrive.
        loss_chunks: pieces of the sequence whose logits exist one after the other.
        ffn_chunks: pieces of the sequence that go through a feed-forward one after the other (Liu and Abbeel
            2023), each moving by itself; with more than one the backward pass computes its hidden values
            again instead of keeping them.
        context_parallel: what attention does where the sequence is cut by sp: pass keys around a ``ring``,
            exchange positions for heads (``ulysses``), ``gather`` all keys, or both of the first two
            (``usp``): heads as far as there are any, among neighbours, and a ring of those groups (Fang and
            Zhao 2024, unified sequence parallelism).
        sequence_order: how positions are dealt to the ranks of sp. ``zigzag`` gives each the same causal
            work where a row is one document; ``balanced`` does for rows of several, by an order that the
            loader chooses for each row (`llmpar.training.balance.row_orders`).
        schedule: the order in which pipeline stages work: a name of `schedules.SCHEDULES`, or an order
            written out, one line per stage (`schedules.from_text`).
        virtual_stages: pieces of the model per stage (Megatron's word), for schedules that let one choose.
        stage_saves: what a stage keeps of a forward pass: its ``input``, from which the backward pass
            recomputes, or the ``residuals``, so that nothing is computed twice. On CPUs ``input`` takes half
            the memory and no more time: to copy residuals takes as long as to compute them again.
        attention_kernel: ``portable``, the blocks of :mod:`llmpar.model.attention`; ``flash``, the kernel of
            :mod:`llmpar.kernels.flash` (on CPUs interpreted, and slow); or `jax.nn.dot_product_attention` by
            ``cudnn`` (NVIDIA GPUs, bfloat16) or ``xla``: both take a mask of queries times keys, and neither
            runs in a ring. ``auto`` is cudnn on GPUs where no mask is needed (`Resolved.takes_cudnn`), else
            flash on TPUs and on GPUs from Ampere on, and portable elsewhere or where attention_block asks for
            blocks.
        attention_block: positions per tile of blockwise attention; None: `sequence_order.tile_length`
            chooses.
        documents: ``whole`` promises that each row is one document: cudnn then needs no mask. A row that
            breaks the promise gives NaN there.
        dispatch: how tokens reach the ranks of ep: in all slots of a buffer (``padded``), or in the full ones
            only (``ragged``, which CPUs lack). ``auto``: ragged on GPUs and TPUs.
        hop: how a ring passes blocks from rank to rank: by a ``permute``; or by an ``exchange``, an
            all-to-all of which all blocks but one are empty, for which no other stage of a pipeline must
            wait. ``auto``: an exchange in a pipeline of simulated devices, a permute elsewhere.
        unroll: how many blocks the scan over layers unrolls at a time; 0 unrolls all.
        muon: how Muon gets whole matrices of what ZeRO and tp cut: ``gather`` gives all to every device, each
            of which orthogonalises them; ``owner`` gives each device those of some layers, by an all-to-all,
            and takes them back by another; by ``layer`` ZeRO cuts gradients and the optimizer's state of
            matrices along layers, so that at stages 1 and 2 only tp exchanges them. ``none``: the optimizer
            is another, or XLA's partitioner chooses what moves, which nothing predicts.
    """

    mesh: Any = MeshShape()  # strings are parsed
    mode: Literal["manual", "auto", "explicit"] = "manual"
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
    gather_dtype: Literal["same", "bfloat16", "float8"] = "same"
    reduce_dtype: Literal["same", "bfloat16"] = "same"
    loss_chunks: int = 1
    ffn_chunks: int = 1
    context_parallel: Literal["ring", "ulysses", "gather", "usp"] = "ring"
    sequence_order: Literal["zigzag", "balanced", "striped", "contiguous"] = "zigzag"
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    stage_saves: Literal["input", "residuals"] = "input"
    attention_kernel: Literal["auto", "portable", "flash", "cudnn", "xla"] = "auto"
    attention_block: int | None = None
    documents: Literal["packed", "whole"] = "packed"
    dispatch: Literal["auto", "padded", "ragged"] = "auto"
    hop: Literal["auto", "permute", "exchange"] = "auto"
    unroll: Annotated[int, Allowed(int, 0)] = 1
    muon: Literal["none", "gather", "owner", "layer"] = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", parse_mesh(self.mesh))
        check_fields(self)

    @functools.cached_property
    def pipeline(self) -> schedules.Schedule | None:
        """What each stage does and in which order; None where there is one stage."""
        if self.mesh.pp == 1:
            return None
        if "\n" in self.schedule.strip():
            return schedules.from_text(self.schedule)
        return schedules.make(self.schedule, self.mesh.pp, self.microbatches, self.virtual_stages)

    def resolve(
        self,
        config: ModelConfig | None = None,
        devices: str | None = "cpu",
        batch_size: int | None = None,
        seq_len: int | None = None,
    ) -> Resolved:
        """Check the plan, and decide what it leaves open. A command does so once, where it begins.

        Fields without effect get their defaults, and `Resolved.notes` says so. Where tp has more ranks than
        the model has KV heads, several ranks have a copy of one head (as in Megatron-LM and vLLM). With usp,
        groups of gcd(sp, a tp rank's heads) ranks exchange heads; the groups form a ring.

        Args:
            config: the model. Without one, heads are assumed to divide evenly.
            devices: ``cpu``, ``gpu`` (of compute capability 7.5: ``gpu 7.5``) or ``tpu``. Without them every
                ``auto`` stays, and a prediction reads it as on accelerators.
            batch_size, seq_len: rows and positions of a step, to check that the mesh cuts them evenly.

        Raise ValueError for what the devices cannot do and, with a batch size and a sequence length, for what
        cannot be cut evenly: with the arithmetic and what would work (`checks`)."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(Plan)}
        if config is not None:
            given["mesh"] = self._inner_axes(config)
        plan = Resolved(**given, requested=self, model=config, devices=devices)
        # resetting an unused field may make another one unused
        while config and (unused := checks.unused(plan)):
            defaults = {name: getattr(Plan, name) for name in unused}
            plan = dataclasses.replace(plan, **defaults, unused=plan.unused | unused)
        plan.check(batch_size, seq_len)
        return plan._on(devices) if devices else plan

    def _inner_axes(self, config: ModelConfig) -> MeshShape:
        """The mesh with the inner parts of tp (``kv``) and of sp (``ul``) that a model's heads need."""
        mesh = self.mesh
        copies = mesh.tp // config.num_kv_heads if mesh.tp % config.num_kv_heads == 0 else 1
        _, heads = config.exchanged_heads(mesh.tp)
        ul = math.gcd(heads, mesh.sp) if self.context_parallel == "usp" else mesh.ul
        return dataclasses.replace(mesh, kv=copies, ul=ul)

    def buckets(self, sizes: list[tuple[Any, int]]) -> list[tuple[Any, list[int]]]:
        """Put the indices of items, each a key and its bytes, into buckets in order: a bucket has items of
        one key, and is closed when it has reached `bucket_bytes`."""
        dealt: dict[Any, list[list[int]]] = {}
        for i, (key, _) in enumerate(sizes):
            alike = dealt.setdefault(key, [[]])
            if sum(sizes[j][1] for j in alike[-1]) >= self.bucket_bytes:
                alike.append([])
            alike[-1].append(i)
        return [(key, members) for key, alike in dealt.items() for members in alike]


@dataclass(frozen=True, kw_only=True)
class Resolved(Plan):
    """A plan for one model on one platform: what runs, what is predicted and what is drawn read this one. Its
    fields are a plan's, decided; without devices each ``auto`` stays.

    Attributes:
        mesh: with the inner parts of its axes.
        requested: the plan as the user wrote it.
        model, devices: what it was resolved for; None: for any.
        unused: the fields that were set and decide nothing, with the reason.
        on_devices: sentences on what these devices do otherwise than others.
    """

    mesh: MeshShape = MeshShape()
    requested: Plan
    model: ModelConfig | None
    devices: str | None
    unused: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)
    on_devices: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        """Check nothing: the requested plan is checked."""

    @property
    def config(self) -> ModelConfig:
        """The model. Refuses where the plan was resolved without one."""
        if self.model is None:
            raise ValueError(
                f"the plan '{self.mesh}' was resolved for no model; use plan.resolve(config)"
            )
        return self.model

    @property
    def worker(self) -> Plan:
        """The plan of one rank of dp, where these train apart (`llmpar.training.local_steps`)."""
        mesh = dataclasses.replace(self.requested.mesh, dp=1)
        return dataclasses.replace(self.requested, mesh=mesh)

    @property
    def platform(self) -> str | None:
        """cpu, gpu or tpu; None: none in particular."""
        return self.devices and self.devices.partition(" ")[0]

    # -------------------------------------------------------------------------------------- what is cut where

    @functools.cached_property
    def regions(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Region to dim to the axes that cut it."""
        live = self.mesh.live
        b, s, tp = live(*BATCH_AXES), live("sp", "ul"), live("tp", "kv")
        stream = s + tp if self.tp_sequence else s
        # the axes of sp that exchange positions for heads
        exchanging = {"ulysses": s, "usp": live("ul")}.get(self.context_parallel, ())
        ring = tuple(a for a in s if a not in exchanging)
        keys = () if self.context_parallel == "gather" else ring
        if self.mesh.kv > 1:  # a device has one KV head: Ulysses cuts the query heads that use it
            k, r = live("tp"), live("kv") + exchanging
        else:
            k, r = tp + exchanging, ()
        return {
            "data": {"b": b, "s": s},
            "stream": {"b": b, "s": stream},
            "attention": {"b": b, "s": s, "n": tp, "k": live("tp"), "r": live("kv")},
            "queries": {"b": b, "s": ring, "k": k, "r": r},
            "keys": {"b": b, "s": keys, "k": k},
            "ids": {"b": b},
            "ffn": {"b": b, "s": s, "m": tp},
            "vocab": {"b": b, "s": s, "v": tp},
            "experts": {"b": live("dp", "fsdp"), "s": s, "e": live("ep"), "m": tp},
            "routing": {"b": live("dp", "fsdp"), "s": s},
        }

    def varying(self, region: str) -> tuple[str, ...]:
        """The axes that cut a dim of the region, in link order: the ranks along them have other values, or
        other terms of a sum. No axes for the empty name, the region of a physical layout."""
        cuts = self.regions[region] if region else {}
        cut = {a for axes in cuts.values() for a in axes}
        return tuple(a for a in self.mesh.sizes if a in cut)

    def place(self, layout: Layout | str) -> Layout:
        """The physical layout of a logical one (``'attention b s d +n'`` becomes ``'b/dp,fsdp s d +tp'``).

        A weight is placed as it is *used*: cut by tp where its dims are, whole over the axes of ZeRO.
        """
        layout = parse_layout(layout) if isinstance(layout, str) else layout
        if layout.mesh:
            raise ValueError(
                f"layout '{layout}' names a mesh, and a plan has one; leave out '@{layout.mesh}'"
            )
        if not layout.region:
            return layout
        cuts = self.regions.get(layout.region)
        if cuts is None:
            known = ", ".join(self.regions)
            raise ValueError(f"layout '{layout}' names an unknown region; the regions are {known}")
        sums = tuple(a for d in layout.sums for a in cuts.get(d, ()))
        cuts = cuts | {"l": self.mesh.live("pp")}
        return Layout(tuple(Dim(d.name, cuts.get(d.name, ())) for d in layout.dims), sums)

    @functools.cached_property
    def _arrows(self) -> dict[str, Arrow]:
        """The physical arrows that `physical` has made."""
        return {}

    def physical(self, arrow: str) -> Arrow:
        """Return the physical arrow of a logical one, which is made once."""
        if arrow not in self._arrows:
            logical = parse_arrow(arrow)
            physical = Arrow(self.place(logical.before), self.place(logical.after))
            after = self.varying(logical.after.region)
            summed = {a for move in physical.moves if move.kind == "all-reduce" for a in move.axes}
            # For shard_map, whose types say over which axes a value varies (`parallel.collectives`). Behind
            # the collectives that is over the axes of the region that it comes from, but for those of a
            # finished all-reduce. Over the other axes of the new region it is to vary from then on.
            varies = set(self.varying(logical.before.region)) - summed
            begin = tuple(a for a in after if a not in varies)
            self._arrows[arrow] = dataclasses.replace(physical, varying=after, begin=begin)
        return self._arrows[arrow]

    def layouts_of(self, dims: str) -> WeightLayouts:
        """Return the layouts of a weight, its gradients and its optimizer state in one step. ``dims``: its
        region and dims, such as ``ffn d m``.

        The comments give the values of ``ffn d m`` on ``dp=2 fsdp=2 tp=2`` at ZeRO 2. ZeRO cuts only
        by axes over which the region's values differ: there devices compute different terms of the
        gradient."""
        used = self.place(dims)  # d m/tp
        differ = self.varying(parse_layout(dims).region)  # dp fsdp tp
        # ZeRO cuts the first of these that a weight has; ep cuts the e of experts
        may_cut = "dh" if dims.startswith("experts") else "dhe"
        target = next((x for x in may_cut if x in used.letters), "")  # d
        zero_axes = self.zero_cuts(target) if target else ()
        zero_axes = tuple(a for a in zero_axes if a in differ and a not in used.axes)  # fsdp
        cut = _cut_more(used, target, zero_axes)  # d/fsdp m/tp
        stored = cut if self.zero == 3 else used  # d m/tp
        if self.muon == "layer" and matrix_dims(dims):
            cut = _cut_more(used, "l", zero_axes)
        reduced = cut if self.zero else used  # d/fsdp m/tp
        in_backward = used if self.gathers == "step" else stored  # what is differentiated: d m/tp
        axes = self.mesh.live("pp") + differ
        replica_axes = tuple(a for a in axes if a not in in_backward.axes)  # dp fsdp
        open_sums = () if self.reduce == "layer" else replica_axes
        unreduced = Layout(in_backward.dims, open_sums)  # d m/tp +dp +fsdp
        accumulated = unreduced
        if self.zero == 2:
            later = tuple(a for a in unreduced.sums if a not in zero_axes)
            accumulated = Layout(cut.dims, later)  # d/fsdp m/tp +dp
        whole = self._whole(dims, reduced)
        # embedding, head and routers too, but no biases of heads or experts, which have as many dims
        others = parse_layout(dims).region in ("vocab", "stream")
        is_matrix = matrix_dims(dims) or others and len(used.letters.replace("l", "")) > 1
        names = (self.gather_dtype, self.reduce_dtype) if is_matrix else ("same", "same")
        wires = (WIRES[name] for name in names)
        return WeightLayouts(
            stored, used, unreduced, accumulated, reduced, whole, replica_axes, *wires
        )

    def _whole(self, dims: str, reduced: Layout) -> Layout:
        """Return where Muon has whole matrices: l and e count them, so what cuts these stays."""
        if self.muon == "none" or not matrix_dims(dims):
            return reduced
        matrices = Layout(tuple(d if d.name in "le" else Dim(d.name) for d in reduced.dims))
        if self.muon == "gather":
            return matrices
        axes = tuple(a for a in self.mesh.sizes if a in reduced.axes and a not in matrices.axes)
        return _cut_more(matrices, "l", axes)

    def zero_cuts(self, target: str = "d") -> tuple[str, ...]:
        """The live axes by which ZeRO cuts the dim ``target``; fsdp alone where that is not d."""
        axes = self.zero_axes.replace("sp", "sp,ul").split(",")
        return self.mesh.live(*axes) if target == "d" else self.mesh.live("fsdp")

    @property
    def gathers(self) -> Literal["", "block", "step"]:
        """When weights that are stored in pieces are gathered for use: for each ``block``, as FSDP does, or
        in a pipeline once a ``step``; empty where they are not."""
        if self.zero != 3 or not self.zero_cuts():
            return ""
        return "step" if self.mesh.pp > 1 and not self.reshard_after_forward else "block"

    def stored(self, dims: str) -> Layout:
        """A weight's layout between steps."""
        return self.layouts_of(dims).stored

    # ---------------------------------------------------------------------------------- what else a step asks

    @functools.cached_property
    def weight_layouts(self) -> dict[str, tuple[Weight, WeightLayouts]]:
        """Every weight of the model by its path, with the layers that a pipeline pads to, and its layouts."""
        layouts_of = functools.cache(self.layouts_of)
        layers = [self.mesh.pp * count for count in self.places]
        table = dict[str, tuple[Weight, WeightLayouts]]()
        for path, weight in self.config.weights(layers).items():
            layouts = layouts_of(weight.dims)
            table[path] = weight if self.config.runs else self._padded(weight, layouts), layouts
        return table

    def _padded(self, weight: Weight, layouts: WeightLayouts) -> Weight:
        """Round each dim of a weight up to a multiple of the devices that cut it. Models that are planned and
        do not run are priced so, whatever their sizes."""
        parts = [self.mesh.along(dim.axes) for dim in layouts.reduced.dims]
        pairs = zip(weight.shape, parts, strict=True)
        shape = tuple(-(-size // n) * n for size, n in pairs)
        return weight if shape == weight.shape else dataclasses.replace(weight, shape=shape)

    @functools.cached_property
    def places(self) -> list[int]:
        """The number of layers of each kind that the stack of a stage has places for, some of which may stay
        empty (`llmpar.plan.places`); without a pipeline, the number that the model has."""
        config, schedule = self.config, self.pipeline
        if schedule is None:
            return [count for count, _ in config.blocks]
        # Each cell, a chunk of a stage, has these places, and a stage has `visits` cells.
        kinds = [place.kind for place in places.places(config.layer_kinds, schedule.cells)]
        return [schedule.visits * kinds.count(kind) for kind in range(len(config.blocks))]

    @property
    def in_order(self) -> bool:
        """Whether a device's queries and keys are at the same positions, in rising order. Then the program
        leaves out the tiles that causality masks, unless keys travel in a ring. (It is not so where keys are
        gathered: they are those of the whole row, and the queries are a part of it.)"""
        alike = self.regions["queries"]["s"] == self.regions["keys"]["s"]
        return alike and (self.mesh.sp == 1 or self.sequence_order == "contiguous")

    def ring_hops(self, mask: Mask, seq_len: int) -> int:
        """Return how many hops keys make round the ring of ranks that cut a sequence of this length."""
        n = self.mesh.along(self.regions["keys"]["s"])
        return ring_hops(mask, self.sequence_order, n, seq_len // n)

    def order_matters(self, mask: Mask, seq_len: int) -> bool:
        """Whether the program relies on an order of positions: it leaves out masked blocks, or keys make
        fewer hops than the n - 1 of a whole ring."""
        n = self.mesh.along(self.regions["keys"]["s"])
        if n > 1:
            return self.ring_hops(mask, seq_len) < n - 1
        return self.in_order and self.attention_kernel != "flash"

    @property
    def rings(self) -> bool:
        """Whether blocks travel round a ring of ranks inside a layer."""
        return self.tp_comm_overlap or bool(self.regions["keys"].get("s"))

    # ------------------------------------------------------------------------------------- how it was decided

    def resolve(
        self,
        config: ModelConfig | None = None,
        devices: str | None = "cpu",
        batch_size: int | None = None,
        seq_len: int | None = None,
    ) -> Resolved:
        """Return itself, checked, for the same model and devices; for others resolve the requested plan."""
        if (config, devices) != (self.model, self.devices):
            return self.requested.resolve(config, devices, batch_size, seq_len)
        self.check(batch_size, seq_len)
        return self

    def check(self, batch_size: int | None, seq_len: int | None) -> None:
        """Refuse what cannot be cut evenly; nothing where a size is not known."""
        if batch_size is not None and seq_len is not None:
            checks.check_plan(self, batch_size, seq_len)

    def _on(self, devices: str) -> Resolved:
        """Decide what is left to the devices."""
        decided: dict[str, Any] = {
            name: suited(name, getattr(self, name), devices) for name in SUITS
        }
        no_flash = self.model is not None and checks.kernels_refused(self.model).get("flash")
        # portable has tiles that can be chosen, and computes what flash refuses
        if (self.attention_block or no_flash) and self.attention_kernel == "auto":
            decided["attention_kernel"] = "portable"
        if self.takes_cudnn:
            decided["attention_kernel"] = "cudnn"
        if self.hop == "auto":
            decided["hop"] = "permute"
        if self.platform == "cpu" and self.mesh.pp > 1:
            decided |= self._on_simulated_stages()
        return dataclasses.replace(self, **decided)

    def _on_simulated_stages(self) -> dict[str, Any]:
        """Return the fields that a pipeline needs on simulated devices, where two things could deadlock. A
        permute waits for every device of the mesh. And where the backward pass of a stage is cut in two,
        nothing orders the gathers of experts and those of other weights."""
        if self.rings and self.hop == "permute":
            raise ValueError(
                f"hop='permute' does not go with pp={self.mesh.pp} on simulated devices: a permute blocks"
                " all of them, so it deadlocks inside a pipeline; use hop='exchange'"
            )
        decided, notes = dict[str, Any](), list[str]()
        if self.hop == "auto":
            decided["hop"] = "exchange"
        if self.hop == "auto" and self.rings:
            notes.append(
                "on simulated devices the hop of a ring is an all-to-all with one full block: their permutes"
                " wait for all devices of the mesh, and so would deadlock inside a pipeline"
            )
        split = self.pipeline and (self.pipeline.split_backward or self.stage_saves == "residuals")
        cuts = (
            self.zero_cuts()
        )  # experts are gathered over these less ep: over another group of devices
        if split and "ep" in cuts and len(cuts) > 1 and self.gathers == "block":
            decided["reshard_after_forward"] = False
            notes.append(
                "on simulated devices weights are gathered once a step, and kept: in a backward pass that is"
                " cut, nothing orders the gathers of experts and of other weights, which could deadlock"
            )
        return decided | {"on_devices": tuple(notes)}

    @property
    def takes_cudnn(self) -> bool:
        """Whether ``auto`` is cuDNN's attention on these GPUs: it needs no mask, and JAX has it for this."""
        return (
            self.requested.attention_kernel == "auto"
            and not self.attention_block
            and self.platform in (None, "gpu")
            and self.dtype == "bfloat16"
            # no mask is needed: whole documents, in order, and their keys in one place
            and self.documents == "whole"
            and self.in_order
            and not self.regions["keys"].get("s")
            # JAX has it for such heads and layers
            and self.model is not None
            and fits_cudnn(self.model.head_width, self.devices or "gpu")
            and "cudnn" not in checks.kernels_refused(self.model)
        )

    @property
    def notes(self) -> list[str]:
        """What a user should know, in sentences."""
        return [*checks.unused_notes(self.requested, self.unused), *self.on_devices]

    def unused_of(self, given: Iterable[str]) -> list[str]:
        """Return a sentence on each ``given`` field that decides nothing and is at its default. `unused` has
        only fields that were changed."""
        own = {k: why for k, why in checks.unused(self, given).items() if k not in self.unused}
        return checks.unused_notes(self.requested, own)

    @property
    def effective(self) -> Plan:
        """The requested plan without the fields that decide nothing."""
        defaults = {name: getattr(Plan, name) for name in self.unused}
        return dataclasses.replace(self.requested, **defaults)


def _cut_more(layout: Layout, name: str, axes: tuple[str, ...]) -> Layout:
    """Return the layout with one dim cut by further axes."""
    more = lambda d: d.axes + axes if d.name == name else d.axes
    return Layout(tuple(Dim(d.name, more(d)) for d in layout.dims), layout.sums)
