"""The plan: which mesh axes cut which dims of activations, weights, gradients and optimizer state.

A plan is frozen data: every choice about parallelism is one of its fields. Dims are
letters, such as b for the batch (`layout.DIMS`), and mesh axes are words, such as dp
(`mesh_shape.AXES`). ``b/dp`` is a dim b cut by dp; ``+dp`` is an unfinished sum: each
device along dp has one term of it. An *arrow* leads from one such layout to another
(`llmpar.plan.layout`). The model's code writes *logical* arrows, which name a *region*
(a part of the model) and dims. The plan makes *physical* arrows of them, which name
mesh axes. A logical ``+m`` is an unfinished sum over the axes that cut m in that
region, mostly ``+tp``.

A plan decides three things, each in a table beside its code:

    `Resolved.regions`    which axes cut a value, in each region of the model
    `WeightLayouts`       the layouts of a weight, its gradient and its optimizer state: ZeRO and FSDP
    `Plan._inner_axes`    which axes are split in two: Ulysses in a ring, nodes of experts, copies of KV heads
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from llmpar.files import Allowed, check_fields
from llmpar.plan import checks, places, schedules, sequence_order
from llmpar.plan.backend import SUITS, fits_cudnn, suited
from llmpar.plan.layout import WIRES, Arrow, Dim, Layout, parse_arrow, parse_layout
from llmpar.plan.mesh_shape import AXES, INNER_AXES, MeshShape, parse_mesh
from llmpar.plan.model_config import ModelConfig, Weight, matrix_dims
from llmpar.plan.sequence_order import Mask

BATCH_AXES = ("dp", "fsdp", "ep", "near")
"""The axes that cut the batch: in dense layers ep, too, and near, its inner part (`Plan._inner_axes`)."""
GRADIENT, UPDATED, MOMENTUM, ORTHOGONAL = "gradient ", "updated ", "momentum ", "orthogonal "
"""How `Arrow.text` begins in arrows of `WeightLayouts`; the weight's dims follow: ``gradient ffn d m``."""


@dataclass(frozen=True)
class WeightLayouts:
    """The layouts of a weight, its gradient and its optimizer state.

    In one step a weight and its gradient have five layouts, and four arrows between them. An
    arrow moves nothing where its two layouts are equal:

        weight     stored -gather-> used
        gradient   unreduced -accumulate-> accumulated -finish-> reduced
        weight     reduced -restore-> stored

    The optimizer updates the ``reduced`` slice of a weight.

    The stage of ZeRO (Rajbhandari et al. 2020) decides which of these layouts fsdp cuts, always
    in one dim: ``d`` if a weight has it, else ``h`` (the width of a head), else ``e`` (of a
    router's learned bias alone: the e of experts' own weights is cut by ep). It does not cut a
    weight without these dims: ``ffn m`` is ``m/tp`` at every stage. With ``muon="layer"`` the
    gradient and the optimizer state of a matrix are cut in ``l``. ``ffn d m`` on ``dp=2 fsdp=2
    tp=2``:

        zero  stored       used    unreduced (each microbatch)  accumulated       reduced
        0     d m/tp       d m/tp  d m/tp +dp +fsdp             d m/tp +dp +fsdp  d m/tp
        1     d m/tp       d m/tp  d m/tp +dp +fsdp             d m/tp +dp +fsdp  d/fsdp m/tp
        2     d m/tp       d m/tp  d m/tp +dp +fsdp             d/fsdp m/tp +dp   d/fsdp m/tp
        3     d/fsdp m/tp  d m/tp  d/fsdp m/tp +dp              d/fsdp m/tp +dp   d/fsdp m/tp

    At the stages 0 to 2 the backward pass sends nothing over dp and fsdp: each device has its
    own term of the gradient, +dp +fsdp. (At stage 0 with ``reduce="layer"`` it all-reduces
    gradients.) Stage 3 is FSDP: weights are all-gathered for use, by `Resolved.gather_per`.
    ``block``: each block gathers its weights when it runs, and autodiff transposes the
    all-gather into a reduce-scatter. ``step``: all weights are gathered once a step, gradients
    are as at stage 1, and ``finish`` reduce-scatters them.

    Devices along sp use the same weights on different tokens, as devices along fsdp do. So do
    devices along ep, but for experts. Therefore ZeRO cuts by these axes as well
    (`Plan.zero_axes`): with ``fsdp=2 sp=4``, ``d/fsdp`` becomes ``d/fsdp,sp``, and one collective
    over both axes replaces the one over fsdp (as in Llama 3 2024, section 3.3.2). Where ZeRO
    cuts h, or the e of a router's bias, it uses fsdp alone. The e of experts is cut by ep, not by
    ZeRO: ``e/ep d/fsdp,sp m``.

    Embedding, head and last norm have no dim l, which pp cuts: every stage has a replica of them,
    and their gradients are summed over pp, too.

    Attributes:
        dims: its region and dims, such as ``ffn d m``.
        stored: the weight between steps.
        used: the weight in a matmul, without the cuts of ZeRO.
        unreduced: the gradient of one microbatch after the backward pass, with its unfinished sums.
        accumulated: the gradient summed over microbatches.
        reduced: the finished gradient, and the optimizer's state.
        whole: the layout in which Muon orthogonalises (`Plan.muon`): each matrix is whole on a device. For a
            weight that Muon leaves to Adam it equals ``reduced``.
        replica_axes: the axes along which devices have the same block of the array by which autodiff
            differentiates, and compute different terms of its gradient (for different tokens, heads or
            stages). That array is the stored shard, so at ZeRO 3 fsdp is not among them; with `gather_per`
            step it is the gathered weight. The sum over these axes is unfinished in ``unreduced``; with
            ``reduce="layer"`` the backward pass finishes it.
        gather_wire, reduce_wire: the dtypes of `WIRES` in which the weight is sent when it is gathered, and
            its gradient when it is summed; empty: the dtype in which it is computed.
    """

    dims: str
    stored: Layout
    used: Layout
    unreduced: Layout
    accumulated: Layout
    reduced: Layout
    whole: Layout
    replica_axes: tuple[str, ...]
    gather_wire: str = ""
    reduce_wire: str = ""

    gather = property(
        lambda self: Arrow(
            self.stored,
            self.used,
            text=self.dims,
            wire=self.gather_wire,
            gradient_wire=self.reduce_wire,
        ),
        doc="At ZeRO 3 an all-gather.",
    )
    accumulate = property(
        lambda self: Arrow(
            self.unreduced, self.accumulated, text=GRADIENT + self.dims, wire=self.reduce_wire
        ),
        doc="At ZeRO 2 a reduce-scatter.",
    )
    finish = property(
        lambda self: Arrow(
            self.accumulated, self.reduced, text=GRADIENT + self.dims, wire=self.reduce_wire
        ),
        doc="An all-reduce, a reduce-scatter (ZeRO 1, or `gather_per` step), or both.",
    )
    restore = property(
        lambda self: Arrow(self.reduced, self.stored, text=UPDATED + self.dims),
        doc="At ZeRO 1 and 2 an all-gather.",
    )
    assemble = property(
        lambda self: Arrow(self.reduced, self.whole, text=MOMENTUM + self.dims),
        doc="Muon only. muon='gather': an all-gather for each cut dim; else an all-to-all for each.",
    )
    take_apart = property(
        lambda self: Arrow(self.whole, self.reduced, text=ORTHOGONAL + self.dims),
        doc="The inverse of `assemble`. muon='gather': a slice; else an all-to-all for each cut dim.",
    )
    difference = property(
        lambda self: Arrow(
            Layout(self.stored.dims, ("dp",)), self.stored, text=f"difference {self.dims}"
        ),
        doc="`training.local_steps` only: an all-reduce over dp of how far each worker, a rank of dp, moved"
        " the weight since the last average.",
    )


@dataclass(frozen=True)
class Plan:
    """How a training step is sharded over a mesh, as the user writes it. `resolve` returns a `Resolved`.

    Attributes:
        mesh: sizes of the six axes; a string is parsed.
        mode: what writes the collectives: ``manual``, this package, inside shard_map; ``auto``, XLA's
            partitioner, from sharding constraints; ``explicit``, the same, from JAX's sharding types.
        zero: ZeRO stage, 0 to 3. At 0 fsdp is one more replica axis.
        zero_axes: the axes over which ZeRO shards weights, gradients and optimizer state that would
            otherwise be replicated. Fewer axes: smaller groups for each gather, but more state on every
            device.
        tp_sequence: also cut the residual stream's sequence by tp (sequence parallelism, Korthikanti et al.
            2022).
        tp_comm_overlap: with tp_sequence, overlap the communication of tp with its matmuls: rings,
            with a matmul between two hops, replace the all-gather before and the reduce-scatter
            after (collective matmul, Wang et al. 2023). Experts, embedding and head keep these collectives.
        tp_dispatch: with tp_sequence, each rank of tp sends its own tokens to the ranks of ep, in place of
            all of tp sending the same. The all-to-all has tp times fewer bytes; what arrives, empty slots
            too, is gathered over tp, and its results reduce-scattered. It pays where ep has slower links.
        ep_node: how many neighbouring ranks of ep form one node. If more than 1, tokens go to their experts
            in two hops (DeepSeek-V3 2024, section 3.2.2). The first sends a token once to each node that has
            one of its experts: rank i of the sender's node sends to rank i of that node. The second sends it
            on to each rank of that node which has one of its experts. What is sent between nodes then has
            one slot for each token and node, instead of one for each token and rank.
        expert_copies: how many experts of each layer are copied to all ranks of ep: in each
            microbatch the ones that tokens of these ranks chose most often. No token is sent to a
            copied expert, only to those of its experts that are not copied. So no rank waits for
            one with a popular expert. A copy costs two all-reduces over ep: of the expert's weights
            (other ranks than its own add zeros), and of their gradient.
        reduce: when gradients are summed over the axes along which weights are replicated. ``end``: once, at
            the end of the step, for all microbatches together (but ZeRO 2 reduce-scatters over `zero_axes`
            after each microbatch). ``layer``, for ZeRO 0 and 3: layer by layer inside the backward pass.
            ``bucket``, for ZeRO 0: as ``end``, but many gradients in one flat array. XLA may send it as
            soon as all of its gradients are computed.
        bucket_bytes: a bucket takes no more gradients once it has this size.
        microbatches: the number of parts into which each device cuts its rows of the batch. Their gradients
            are summed. A pipeline needs several, so that its stages work at the same time.
        remat: what the backward pass recomputes. ``none``: nothing. ``selective``: all but attention and
            large matmuls, whose results are kept. Small ones are recomputed: a router's, that of a shared
            expert's gate, those inside a recurrent mixer. (In Korthikanti et al. 2022, section 5, it is
            attention alone that is recomputed.) ``ffn``: also
            the large matmuls of the feed-forward, whose results are most of the memory that
            ``selective`` needs. ``block``: the whole block.
        reshard_after_forward: ZeRO 3 only (the name is PyTorch's): free a block's gathered weights after its
            forward pass, and gather them again in the backward pass. False keeps them until the backward
            pass. In a pipeline False keeps them for the whole step: gradients are accumulated unsharded in
            float32, and reduce-scattered once at the end.
        dtype: of matmuls and activations. Master weights and accumulated gradients stay float32.
        gather_dtype: what ZeRO 3 gathers weights in: the ``same`` as dtype, ``bfloat16``, or ``float8``, e4m3
            with a float32 scale for each 32 numbers. Norms and other vectors are gathered in ``dtype``.
        reduce_dtype: the dtype in which gradients of matrices are sent to be summed: the ``same``
            as they are computed in, or ``bfloat16``, sent by an all-to-all and summed on arrival in
            float32. Gradients of vectors are always sent in the ``same``.
        matmul_dtype: the dtype of the operands of a block's matmuls (attention's projections, feed-forward,
            experts). ``same``: as dtype. ``float8``: e4m3, and e5m2 for incoming gradients, with one scale
            for each operand (`llmpar.parallel.float8`). Attention itself, norms, routers, embedding and head
            stay in ``dtype``.
        loss_chunks: number of pieces of the sequence whose logits are computed one after the other, so that
            only one piece's logits are in memory.
        ffn_chunks: number of pieces of the sequence that go through a feed-forward one after the other (Liu
            and Abbeel 2023), with separate collectives. With more than one the backward pass recomputes the
            hidden values instead of keeping them.
        context_parallel: how attention sees all keys where sp cuts the sequence. ``ring``: keys are passed
            from rank to rank. ``ulysses``: an all-to-all cuts heads in place of positions. ``gather``: all
            keys are all-gathered. ``usp``: groups of neighbouring ranks, as large as the number of heads
            allows, run Ulysses, and the groups form a ring (unified sequence parallelism, Fang and Zhao
            2024).
        sequence_order: which positions each rank of sp has. ``zigzag`` gives all ranks the same work under a
            causal mask if a row is one document. ``balanced`` does so for rows of several documents, by an
            order that the loader chooses for each row (`llmpar.training.balance.row_orders`). ``striped``:
            every sp-th position. ``contiguous``: neighbouring positions, most work for the last rank.
        schedule: the order in which pipeline stages work: a name of `schedules.SCHEDULES`, or an order
            written out, one line per stage (`schedules.from_text`).
        virtual_stages: pieces of the model per stage (Megatron's word), for schedules that do not
            fix it, such as interleaved 1F1B.
        stage_saves: what a pipeline stage keeps for its backward pass. ``input``: only its input, and the
            rest is recomputed. ``residuals``: everything, and nothing is recomputed. On CPUs ``input`` takes
            half the memory and no more time: copying residuals takes as long as recomputing them.
        attention_kernel: ``portable``, the tiles of :mod:`llmpar.model.attention`; ``flash``, the kernel of
            :mod:`llmpar.kernels.flash` (on CPUs plain JAX, and slow); or `jax.nn.dot_product_attention` by
            ``cudnn`` (NVIDIA GPUs, bfloat16) or ``xla``. These two do not run in a ring, and take a mask of
            queries times keys; with `documents` ``whole`` and positions in order cudnn takes none. ``auto``
            is cudnn on GPUs where no mask is needed (`Resolved.takes_cudnn`), else flash on TPUs and on GPUs
            from Ampere on; portable elsewhere, for a model that flash cannot run, or where attention_block is
            set.
        attention_block: positions of a tile of attention (in `llmpar.model.attention` a *block* is something
            else: all keys of a rank); None: `sequence_order.tile_length` chooses.
        documents: ``packed``: a row may have several documents, and attention is masked between them.
            ``whole``: the user promises that each row is one document. Then cudnn needs no mask, if positions
            are in order (`Resolved.positions_in_order`). Where attention relies on the promise
            (`attention.ids_are_valid`), a row that breaks it makes the loss NaN.
        dispatch: what the all-to-all to the ranks of ep sends. ``padded``: the whole buffer of tokens, with
            its empty slots. ``ragged``: only the full slots; XLA for CPUs cannot. ``auto``: ragged on GPUs
            and TPUs.
        hop: the collective by which a ring passes blocks from rank to rank: a ``permute``; or an
            ``exchange``, an all-to-all in which every block but one is zeros. A permute of simulated devices
            waits for all devices of the mesh, so it would deadlock inside a stage of a pipeline; an exchange
            waits for its ring alone. ``auto``: an exchange in a pipeline of simulated devices, else a
            permute.
        unroll: how many iterations of the scan over layers are unrolled; 0 unrolls all.
        muon: how Muon gets whole matrices where ZeRO and tp cut them. ``gather``: each device
            all-gathers every matrix of its stage (of experts its own) and orthogonalises it, so ranks
            repeat one another's work. ``owner``:
            all-to-alls give each device the whole matrices of some layers, and return the results.
            ``layer``, for ZeRO 1 and 2: ZeRO cuts gradients and optimizer state of matrices along the layers,
            not inside a matrix, so that only ranks of tp exchange parts of matrices. ``none``, for other
            optimizers: the plan moves no matrices. Muon also works with it, but XLA's partitioner then
            chooses its collectives, and they are not predicted.
    """

    mesh: Any = MeshShape()  # strings are parsed
    mode: Literal["manual", "auto", "explicit"] = "manual"
    zero: Literal[0, 1, 2, 3] = 3
    zero_axes: Literal["fsdp,ep,sp", "fsdp,ep", "fsdp,sp", "fsdp"] = "fsdp,ep,sp"
    tp_sequence: bool = False
    tp_comm_overlap: bool = False
    tp_dispatch: bool = False
    ep_node: Annotated[int, Allowed(int, 1)] = 1
    expert_copies: Annotated[int, Allowed(int, 0)] = 0
    reduce: Literal["end", "layer", "bucket"] = "end"
    bucket_bytes: int = 4 << 20
    microbatches: int = 1
    remat: Literal["none", "selective", "ffn", "block"] = "none"
    reshard_after_forward: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"
    gather_dtype: Literal["same", "bfloat16", "float8"] = "same"
    reduce_dtype: Literal["same", "bfloat16"] = "same"
    matmul_dtype: Literal["same", "float8"] = "same"
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
        """Check the plan, and decide every ``auto``.

        Given a model, it resets fields without effect (`Resolved.unused`). Where tp has more ranks than
        the model has KV heads, several ranks have a copy of one head (as in Megatron-LM and vLLM). With usp,
        groups of gcd(sp, heads) ranks run Ulysses, and the groups form a ring; ``heads`` is the number of
        KV heads of a rank of tp, or of query heads where tp has more ranks than there are KV heads
        (`ModelConfig.exchanged_heads`).

        Args:
            config: the model. Without one, heads are assumed to divide evenly.
            devices: ``cpu`` (the default: simulated devices), ``gpu`` (or with its compute capability,
                such as ``gpu 7.5``) or ``tpu``. None keeps every ``auto``, and predictions then assume
                accelerators.
            batch_size, seq_len: rows and positions of a step, to check that the mesh cuts them evenly.

        Raise ValueError for what the devices cannot do. With both a batch size and a sequence length, also
        raise it for sizes that cannot be cut evenly and for fields that do not go together; without them
        these checks are left out. The message has the arithmetic and what would work (`checks`)."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(Plan)}
        if config is not None:
            given["mesh"] = self._inner_axes(config)
        plan = Resolved(**given, requested=self, model=config, devices=devices)
        # Reset unused fields to their defaults, again and again: a reset may leave another field unused. One
        # that has its default is not listed.
        while config and (no_effect := checks.unused(plan)):
            defaults = {name: getattr(Plan, name) for name in no_effect}
            plan = dataclasses.replace(plan, **defaults, unused=plan.unused | no_effect)
        plan.check(batch_size, seq_len)
        return plan._decided() if devices else plan

    def _inner_axes(self, config: ModelConfig) -> MeshShape:
        """Return the mesh with ep, sp and tp each split into an outer and an inner axis, where
        `Plan.ep_node` or the model's numbers of heads ask for it. A user still writes sp=4. Layouts
        name both axes, and the outer one keeps the name. So with sp=4 split in two
        ``mesh.sizes["sp"]`` is 2, the outer part alone, and the field ``mesh.sp`` is 4.

            sp,ul    with ``usp``: sp=4 may become sp=2 ul=2. The ranks of ul run Ulysses (an all-to-all
                     from cut positions to cut heads and back), and those of sp a ring. Queries and keys
                     are ``s/sp k/tp,ul``; other regions have ``sp,ul`` in place of sp.
            ep,near  with `Plan.ep_node`: ep=8 may become ep=4 near=2, four nodes of two ranks. Regions
                     have ``ep,near`` in place of ep, except nodes. Tokens go to their experts in two
                     all-to-alls. In their arrows u and n count senders and e counts receivers:
                     tokens to nodes: ``u/ep e c d -> u e/ep c d``, u sending and e receiving nodes
                     nodes to slots: ``n/near e/ep c d -> n e/ep,near c d``, n sending ranks of a node,
                     e all receiving ranks, by node and then by rank in the node
            tp,kv    where tp has more ranks than the model has KV heads: the ranks of kv have copies of
                     one KV head, and divide the query heads that use it among them. So kv cuts no
                     KV heads. Heads, n = k r with r query heads for each KV head, are ``n/tp,kv``,
                     ``k/tp``, ``r/kv``; other regions have ``tp,kv`` in place of tp, and Ulysses
                     cuts r in place of k. The gradient of a copied weight has one more unfinished
                     sum, ``+kv``."""
        mesh = self.mesh
        copies = mesh.tp // config.num_kv_heads if mesh.tp % config.num_kv_heads == 0 else 1
        _, heads = config.exchanged_heads(mesh.tp)  # "KV" or "query", and how many
        ul = math.gcd(heads, mesh.sp) if self.context_parallel == "usp" else 1
        near = self.ep_node if mesh.ep % self.ep_node == 0 and mesh.ep > self.ep_node else 1
        return dataclasses.replace(mesh, kv=copies, ul=ul, near=near)

    def buckets(self, items: list[tuple[Any, int]]) -> list[tuple[Any, list[int]]]:
        """Group items into buckets, in order. ``items`` has the key and the
        bytes of each. Items with equal keys share a bucket, until it has
        `bucket_bytes`. Return each bucket's key and the indices of its
        items."""
        by_key: dict[Any, list[list[int]]] = {}
        for i, (key, _) in enumerate(items):
            with_key = by_key.setdefault(key, [[]])
            if sum(items[j][1] for j in with_key[-1]) >= self.bucket_bytes:
                with_key.append([])
            with_key[-1].append(i)
        return [(key, members) for key, buckets in by_key.items() for members in buckets]


@dataclass(frozen=True, kw_only=True)
class Resolved(Plan):
    """A plan after `Plan.resolve`, for one model on one platform. Running, predicting and drawing read this
    class, not `Plan`. No field is ``auto``, unless the plan was resolved without devices.

    Attributes:
        mesh: with the inner axes ``near``, ``ul`` and ``kv``.
        requested: the plan as the user wrote it.
        model, devices: what it was resolved for; None: for any.
        unused: the fields that the user set and that have no effect, with the reason.
        device_notes: notes for the user: what was decided for these devices and would not be for others.
    """

    mesh: MeshShape = MeshShape()
    requested: Plan
    model: ModelConfig | None
    devices: str | None
    unused: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)
    device_notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

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
        """The plan of one worker, which is this plan with dp=1. In `llmpar.training.local_steps` each rank of
        dp is a worker, and trains without the others."""
        mesh = dataclasses.replace(self.requested.mesh, dp=1)
        return dataclasses.replace(self.requested, mesh=mesh)

    @property
    def platform(self) -> str | None:
        """cpu, gpu or tpu; None: none in particular."""
        return self.devices and self.devices.partition(" ")[0]

    # -------------------------------------------------------------------------------------- what is cut where

    @functools.cached_property
    def regions(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """For each region and dim the mesh axes that cut it. Axes of one device are left out
        (`MeshShape.live`). The column `by tp` lists the dims that tp cuts:

            region      b             s         by tp
            data        dp,fsdp,ep    sp                    token ids, positions, losses
            stream      dp,fsdp,ep    sp[,tp]               the residual stream; tp_sequence: s by tp, too
            attention   dp,fsdp,ep    sp        n k         inside attention: n query, k KV heads, n = k r
            queries     dp,fsdp,ep    sp        k           what goes into the attention kernel: queries
            keys        dp,fsdp,ep    sp        k           keys and values
            ids         dp,fsdp,ep                          positions and documents of a row's keys
            ffn         dp,fsdp,ep    sp        m           inside the feed-forward
            tokens      dp,fsdp,ep    sp        (m)         tokens for experts, and their results
            slots       dp,fsdp       sp        (m)         what arrives at experts; ep cuts its dim e
            experts     dp,fsdp       sp        m           inside the experts; ep cuts their dim e
            copies      dp,fsdp,ep    sp        m           inside copied experts, which all of ep have
            routing     dp,fsdp       sp                    which token chose which expert; all of ep know
            nodes       dp,fsdp       sp        (m)         what arrives at a node (`Plan.ep_node`)
            balance                                         biases that a rule updates, to balance experts
            vocab       dp,fsdp,ep    sp        v           embedding look-up, logits and loss

        In every region pp cuts the layers ``l`` of a weight.

        Queries and keys depend on `Plan.context_parallel`: ``ring``, as in the table; ``gather``,
        keys are not cut along s; ``ulysses``, neither is cut along s, and their k is cut by tp,sp;
        ``usp``, a ring over an outer axis and Ulysses over an inner one (`Plan._inner_axes`).

        A token goes from stream to tokens (on its own rank), to slots (on the rank of its expert,
        after an all-to-all), to experts, and back. With (m) no value has a dim m, but ``+m`` means +tp:
        what experts return is an unfinished sum. The first two dims of a buffer that is sent, as in
        ``tokens b e c d -> slots b e c d``, count senders and receivers, ranks or nodes. In all other
        values b is the batch, and e is experts.

        Slots are cut as experts are, except with `Plan.tp_dispatch`. Then each rank of tp sends its own
        part of the tokens. In tokens, nodes and slots tp cuts s (or c, the slots of a buffer, where a
        value has c in place of s), and not m. In routing it cuts s. Experts stay cut along m, so the
        tokens that arrive are gathered over tp."""
        live = self.mesh.live
        b, s, tp = live(*BATCH_AXES), live("sp", "ul"), live("tp", "kv")
        stream = s + tp if self.tp_sequence else s
        # the axes that run Ulysses: inside attention they cut heads in place of positions
        ulysses = {"ulysses": s, "usp": live("ul")}.get(self.context_parallel, ())
        queries_s = tuple(a for a in s if a not in ulysses)
        keys_s = () if self.context_parallel == "gather" else queries_s
        if self.mesh.kv > 1:  # a device has one KV head: Ulysses cuts its query heads r
            k, r = live("tp"), live("kv") + ulysses
        else:
            k, r = tp + ulysses, ()
        tokens: dict[str, tuple[str, ...]] = {"s": s, "m": tp}
        if self.tp_dispatch:
            tokens = {"s": stream, "c": tp}
        batch_without_ep, ranks = live("dp", "fsdp"), live("ep", "near")
        # in the arrows of `moe.exchanges` u counts nodes, and n the ranks of a node
        two_hops = {"u": live("ep")} if self.mesh.near > 1 else {}
        return {
            "data": {"b": b, "s": s},
            "stream": {"b": b, "s": stream},
            "attention": {"b": b, "s": s, "n": tp, "k": live("tp"), "r": live("kv")},
            "queries": {"b": b, "s": queries_s, "k": k, "r": r},
            "keys": {"b": b, "s": keys_s, "k": k},
            "ids": {"b": b},
            "ffn": {"b": b, "s": s, "m": tp},
            "vocab": {"b": b, "s": s, "v": tp},
            "tokens": {"b": b, **tokens, **two_hops},
            "nodes": {"b": batch_without_ep, "e": live("ep"), "n": live("near"), **tokens},
            "slots": {"b": batch_without_ep, "e": ranks, **tokens},
            "experts": {"b": batch_without_ep, "s": s, "e": ranks, "m": tp},
            "copies": {"b": b, "s": s, "m": tp},
            "routing": {"b": batch_without_ep, "s": tokens["s"]},
            "balance": {},  # no gradient: a rule updates these biases, the same on all devices
        }

    def varying(self, region: str) -> tuple[str, ...]:
        """Return the axes over which `Manual` types every value of the region as varying:
        all axes that cut some dim of the region, those of slow links first. (A value may
        vary over more: what was gathered stays varying over the axes that cut it before.)
        `Manual` casts a value that enters the region to a type that varies over these axes.
        The transpose of the cast sums the gradient over those that are new. So x in
        ``ffn b s d`` is cast to vary along tp, though all ranks of tp have the same x: each
        multiplies it by its own weights, so their gradients of x are terms of a sum. For a
        physical layout, which has no region, the result is ()."""
        cuts = self.regions[region] if region else {}
        cut = {a for axes in cuts.values() for a in axes}
        return tuple(a for a in self.mesh.sizes if a in cut)

    def place(self, layout: Layout | str) -> Layout:
        """Return the physical layout of a logical one. On ``dp=2 fsdp=2 tp=2``,
        ``attention b s d +n`` becomes ``b/dp,fsdp s d +tp``.

        For a weight the result is the layout in which it is *used*: cut by tp, but not by ZeRO.
        """
        return self._place(parse_layout(layout) if isinstance(layout, str) else layout)

    def _place(self, layout: Layout) -> Layout:
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

    def physical(self, arrow: str) -> Arrow:
        """Return the physical arrow of a logical one."""
        logical = parse_arrow(arrow)
        before, after = self._place(logical.before), self._place(logical.after)
        return Arrow(before, after, self.varying(logical.after.region), arrow)

    def layouts_of(self, dims: str) -> WeightLayouts:
        """Return the layouts of a weight, its gradients and its optimizer state in one
        step. ``dims``: its region and dims, such as ``ffn d m``.

        The comments give the values for ``ffn d m`` on ``dp=2 fsdp=2 tp=2`` at ZeRO 2. ZeRO cuts only by
        axes along which the region's activations differ: along them devices compute different terms of
        the gradient."""
        used = self.place(dims)  # d m/tp
        region = parse_layout(dims).region
        varying_axes = self.varying(region)  # dp fsdp tp
        # ZeRO cuts the first of these dims that a weight has, but not the e of experts: ep cuts it
        candidates = "dh" if region == "experts" else "dhe"
        zero_dim = next((x for x in candidates if x in used.letters), "")  # d
        may_cut = self.zero_cuts(zero_dim) if zero_dim else ()
        cut_by = tuple(a for a in may_cut if a in varying_axes and a not in used.axes)  # fsdp
        sharded = _cut_more(used, zero_dim, cut_by)  # d/fsdp m/tp
        stored = sharded if self.zero == 3 else used  # d m/tp
        # muon="layer" cuts the gradient and the optimizer state of a matrix by layers, not inside
        by_layer = self.muon == "layer" and matrix_dims(dims)
        state_sharded = _cut_more(used, "l", cut_by) if by_layer else sharded  # d/fsdp m/tp
        reduced = state_sharded if self.zero else used  # d/fsdp m/tp
        # the layout of the array by which autodiff differentiates
        differentiated = used if self.gather_per == "step" else stored  # d m/tp
        axes = self.mesh.live("pp") + varying_axes
        replica_axes = tuple(a for a in axes if a not in differentiated.axes)  # dp fsdp
        sums = () if self.reduce == "layer" else replica_axes
        unreduced = Layout(differentiated.dims, sums)  # d m/tp +dp +fsdp
        accumulated = unreduced
        if self.zero == 2:
            unfinished = tuple(a for a in unreduced.sums if a not in cut_by)
            accumulated = Layout(state_sharded.dims, unfinished)  # d/fsdp m/tp +dp
        # gather_dtype and reduce_dtype apply to matrices only. `matrix_dims` knows those of attention,
        # feed-forward and experts. Embedding, head and routers are in the regions vocab and stream: there a
        # weight of two or more dims is a matrix. (Elsewhere that does not hold: biases of heads have two.)
        is_other_matrix = region in ("vocab", "stream") and len(used.letters.replace("l", "")) > 1
        is_matrix = is_other_matrix or matrix_dims(dims)
        return WeightLayouts(
            dims=dims,
            stored=stored,
            used=used,
            unreduced=unreduced,
            accumulated=accumulated,
            reduced=reduced,
            whole=self._whole(dims, reduced),
            replica_axes=replica_axes,
            gather_wire=WIRES[self.gather_dtype] if is_matrix else "",
            reduce_wire=WIRES[self.reduce_dtype] if is_matrix else "",
        )

    def _whole(self, dims: str, reduced: Layout) -> Layout:
        """Return the layout `WeightLayouts.whole`. The dims l and e count matrices, so they stay cut. With
        ``muon="gather"`` no other dim is cut. Else the axes that cut other dims cut l in place of them:
        ``l d/fsdp m/tp`` becomes ``l/fsdp,tp d m``."""
        if self.muon == "none" or not matrix_dims(dims):
            return reduced
        matrices = Layout(tuple(d if d.name in "le" else Dim(d.name) for d in reduced.dims))
        if self.muon == "gather":
            return matrices
        axes = tuple(a for a in self.mesh.sizes if a in reduced.axes and a not in matrices.axes)
        return _cut_more(matrices, "l", axes)

    def zero_cuts(self, dim: str = "d") -> tuple[str, ...]:
        """Return the axes of more than one device by which ZeRO cuts a dim: those of
        `zero_axes` for d (with ``muon="layer"`` they cut l in place of it), fsdp
        alone for h and e."""
        names = self.zero_axes.split(",")
        axes = [part for a in names for part in (a, INNER_AXES.get(a)) if part]
        return self.mesh.live(*axes) if dim == "d" else self.mesh.live("fsdp")

    @functools.cached_property
    def gather_per(self) -> Literal["", "block", "step"]:
        """When weights that are stored sharded are gathered for use: for each ``block``, as FSDP does, or
        once a ``step`` (in a pipeline that keeps them); empty if no weight is stored sharded."""
        if self.zero != 3 or not self.zero_cuts():
            return ""
        return "step" if self.mesh.pp > 1 and not self.reshard_after_forward else "block"

    def stored(self, dims: str) -> Layout:
        """A weight's layout between steps."""
        return self.layouts_of(dims).stored

    # --------------------------------------------------------------------------------- weights, layers, order

    @functools.cached_property
    def layouts_by_path(self) -> dict[str, tuple[Weight, WeightLayouts]]:
        """For the path of each weight: the weight and its layouts. Its dim l has a row for each
        layer that the stages have room for, and some rows may be empty (`places_per_stage`)."""
        layouts_of = _cached_layouts_of(self._layouts_key)
        layers = tuple(self.mesh.pp * count for count in self.places_per_stage)
        table = dict[str, tuple[Weight, WeightLayouts]]()
        for path, weight in _weights(self.config, layers).items():
            layouts = layouts_of(weight.dims)
            if not self.config.runs:
                weight = self._padded(weight, layouts)
            table[path] = weight, layouts
        return table

    @property
    def _layouts_key(self) -> Resolved:
        """The key of a cache of layouts: without the fields that a planner varies and that change no layout.
        Of the size of an axis a layout knows only whether it exceeds 1, so
        every such size becomes 2 here, and 2 times 2 with an inner axis."""
        two = lambda axis: 2 if self.mesh.sizes.get(axis, 1) > 1 else 1
        sizes: dict[str, Any] = {part: two(part) for part in INNER_AXES.values()}
        # a field of `MeshShape` holds outer times inner; without an inner axis the second is two(None), 1
        sizes |= {axis: two(axis) * two(INNER_AXES.get(axis)) for axis in AXES}
        return dataclasses.replace(
            self,
            mesh=MeshShape(**sizes),
            requested=Plan(),
            model=None,
            devices=None,
            microbatches=1,
            schedule="1f1b",
            virtual_stages=None,
            remat="none",
            loss_chunks=1,
        )

    def _padded(self, weight: Weight, layouts: WeightLayouts) -> Weight:
        """Round each dim of a weight up to a multiple of the number of devices that cut it. It is for models
        that are only planned, never run (`ModelConfig.runs`): their cost is predicted even where axes do not
        divide their sizes."""
        parts = [self.mesh.along(dim.axes) for dim in layouts.reduced.dims]
        pairs = zip(weight.shape, parts, strict=True)
        shape = tuple(-(-size // n) * n for size, n in pairs)
        return weight if shape == weight.shape else dataclasses.replace(weight, shape=shape)

    @functools.cached_property
    def places_per_stage(self) -> list[int]:
        """How many layers of each kind a stage has room for; without a pipeline how many the model has. All
        stages run one program, so every chunk has the same list of *places*, enough for the layers of any
        chunk. A chunk with fewer layers of a kind leaves places empty (the table in `llmpar.plan.places`)."""
        config, schedule = self.config, self.pipeline
        if schedule is None:
            return [count for count, _ in config.blocks]
        # `visits`: chunks of a stage, since a microbatch passes a stage once per chunk. `cells`: chunks of
        # all stages. (DualPipe's stages also borrow the chunks of the opposite stage during a step; they do
        # not store them.)
        kinds = [place.kind for place in places.chunk_places(config.layer_kinds, schedule.cells)]
        return [schedule.visits * kinds.count(kind) for kind in range(len(config.blocks))]

    @property
    def positions_in_order(self) -> bool:
        """Whether a device's queries and its own keys have the same consecutive positions, in order. That is
        so if both are cut alike (not with ``gather``, whose keys are the whole row), and if sp is 1 or
        `sequence_order` is contiguous. Without a ring, the program may then leave out the tiles that the
        causal mask hides."""
        alike = self.place("queries s").axes == self.place("keys s").axes
        return alike and (self.mesh.sp == 1 or self.sequence_order == "contiguous")

    def ring_hops(self, mask: Mask, seq_len: int) -> int:
        """Return how many hops keys make round the ring of ranks that cut a sequence of this length."""
        n = self.mesh.along(self.place("keys s").axes)
        return sequence_order.ring_hops(mask, self.sequence_order, n, seq_len // n)

    def assumes_order(self, mask: Mask, seq_len: int) -> bool:
        """Whether attention leaves out tiles or hops by their place in the row alone, so that it is right
        only if ids are in order (`attention.ids_are_valid`)."""
        n = self.mesh.along(self.place("keys s").axes)
        if n > 1:
            return self.ring_hops(mask, seq_len) < n - 1
        # flash always compares ids
        return self.positions_in_order and self.attention_kernel != "flash"

    @property
    def rings(self) -> bool:
        """Whether values hop from rank to rank in a layer: keys, recurrent states, or inputs and partial sums
        of matmuls (`tp_comm_overlap`)."""
        return any((self.tp_comm_overlap, self.passes_states, self.place("keys s").axes))

    @property
    def passes_states(self) -> bool:
        """Whether ranks of sp pass the recurrent states of some layers on."""
        return self.mesh.sp > 1 and self.model is not None and self.model.has_states

    # ------------------------------------------------------------------------------------- how it is decided

    def resolve(
        self,
        config: ModelConfig | None = None,
        devices: str | None = "cpu",
        batch_size: int | None = None,
        seq_len: int | None = None,
    ) -> Resolved:
        """Return this plan, checked, if it was resolved for this model and
        these devices; else resolve ``requested`` for them."""
        if (config, devices) != (self.model, self.devices):
            return self.requested.resolve(config, devices, batch_size, seq_len)
        self.check(batch_size, seq_len)
        return self

    def check(self, batch_size: int | None, seq_len: int | None) -> None:
        """Raise ValueError where the mesh cannot cut these sizes evenly, or where fields of the plan do not
        go together (`checks.check_plan`). If a size is None, check nothing."""
        if batch_size is not None and seq_len is not None:
            checks.check_plan(self, batch_size, seq_len)

    def _decided(self) -> Resolved:
        """Return the plan with every ``auto`` decided for its devices. Refuse what they cannot do."""
        assert self.devices
        # SUITS: the values that a field may have on each platform; the first is what ``auto`` means
        decided: dict[str, Any] = {
            name: suited(name, getattr(self, name), self.devices) for name in SUITS
        }
        no_flash = self.model is not None and checks.kernels_refused(self.model).get("flash")
        # attention_block needs portable, and so do the models that flash refuses
        if (self.attention_block or no_flash) and self.attention_kernel == "auto":
            decided["attention_kernel"] = "portable"
        if self.takes_cudnn:
            decided["attention_kernel"] = "cudnn"
        if self.platform == "cpu" and self.mesh.pp > 1:  # simulated stages could deadlock
            decided |= self._on_simulated_stages()
        return dataclasses.replace(self, **decided)

    def _on_simulated_stages(self) -> dict[str, Any]:
        """Return the fields that a pipeline needs on simulated devices. Two things could deadlock there:

        - a permute inside a stage, because it waits for every device of the mesh;
        - where the layers of a stage are unrolled (a backward pass in two parts, or
          ``stage_saves="residuals"``), gathers of experts and gathers of other weights: they run over
          different groups of devices, and nothing orders them."""
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
        order = self.pipeline
        unrolled = order and (order.split_backward or self.stage_saves == "residuals")
        # most weights are gathered over all of ``cuts``, experts over ``cuts`` without ep: other groups
        cuts = self.zero_cuts()
        groups_differ = "ep" in cuts and len(cuts) > 1
        if unrolled and groups_differ and self.gather_per == "block":
            decided["reshard_after_forward"] = False
            notes.append(
                "on simulated devices weights are gathered once a step, and kept: where a stage's layers are"
                " unrolled, nothing orders the gathers of experts and of other weights, and they could"
                " deadlock"
            )
        return decided | {"device_notes": tuple(notes)}

    @property
    def takes_cudnn(self) -> bool:
        """Whether ``auto`` means cuDNN's attention: no mask is needed here, and JAX has it for this model."""
        return (
            # the request: self.attention_kernel may be decided already
            self.requested.attention_kernel == "auto"
            and not self.attention_block
            and self.platform in (None, "gpu")  # None: planned for accelerators
            and self.dtype == "bfloat16"
            # no mask is needed: whole documents, positions in order, all keys on the device
            and self.documents == "whole"
            and self.positions_in_order
            and not self.place("keys s").axes
            # JAX offers cuDNN for these heads and layers
            and self.model is not None
            and fits_cudnn(self.model.head_width, self.devices or "gpu")
            and "cudnn" not in checks.kernels_refused(self.model)
        )

    @property
    def notes(self) -> list[str]:
        """Sentences for the user: which fields have no effect, and what the devices change."""
        return [*checks.unused_notes(self.requested, self.unused), *self.device_notes]

    @property
    def effective(self) -> Plan:
        """The requested plan, with the defaults for all fields that have no effect."""
        defaults = {name: getattr(Plan, name) for name in self.unused}
        return dataclasses.replace(self.requested, **defaults)


def _cut_more(layout: Layout, name: str, axes: tuple[str, ...]) -> Layout:
    """Return the layout with one dim cut by further axes."""
    more = lambda d: d.axes + axes if d.name == name else d.axes
    return Layout(tuple(Dim(d.name, more(d)) for d in layout.dims), layout.sums)


@functools.lru_cache(maxsize=512)  # a planner makes thousands of plans, but few `_layouts_key`
def _cached_layouts_of(plan: Resolved) -> Callable[[str], WeightLayouts]:
    """Return ``plan.layouts_of`` with a cache of its own."""
    return functools.cache(plan.layouts_of)


@functools.lru_cache(maxsize=64)
def _weights(config: ModelConfig, layers: tuple[int, ...]) -> dict[str, Weight]:
    return config.weights(layers)
