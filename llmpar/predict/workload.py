"""What a training run computes and moves, as numbers: of this package's models and plans, and of others'.

A `Run` states a model's dims and how it is cut, whichever framework runs it: so one law of time (`time`)
serves a plan of ours and the published runs of `planner.measured`.
"""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, get_args, get_type_hints

from llmpar.plan.mesh_shape import MeshShape
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import Plan, Resolved
from llmpar.plan.schedules import deal
from llmpar.predict.hardware import Chip, package_table
from llmpar.predict.parameters import end_products, trained_params

POLICIES: tuple[Any, ...] = get_args(get_type_hints(Plan)["remat"])
"""From what keeps most to what computes most again."""


CAST_BYTES = 4.0
"""Of an operand that is read in 16 bits and written in 8 twice, by rows and by columns: one of the two is for
the weight's gradient."""
KEY_TILE = {"switch": 128, "torus": 1024}
"""Keys that a fused kernel of attention takes at once: FlashAttention's on GPUs; Splash attention's in
MaxText's recipes, 512 to 2,048."""


@dataclass(frozen=True)
class Software:
    """What a training framework does, as its documentation says. Nothing here is fitted. Overhead is CUDA's
    context, NCCL's buffers, the allocator's fragments: ``nvidia-smi`` sees it, allocations have it not."""

    name: str
    # the host launches each kernel when Python comes to it; else a compiled program runs
    eager: bool = True
    fused_attention: bool = True  # else squares of scores are written, masked, normed and read
    # gradients and weights travel while others are computed; else after and before
    overlaps: bool = True
    weight_bytes: float = 2  # of the copies that matmuls read; 0: cast from the optimizer's
    grad_bytes: float = 4  # of a gradient as it is summed up
    reduced_bytes: float = 2  # of a gradient on the links
    gathered_bytes: float = 2  # of a weight on the links
    late_bytes: float = 2  # of either where it travels once, at the end of a step
    state_bytes: float = 12  # of the optimizer, with its own copy of the weights
    overhead_bytes: float = 2e9
    # what it reaches on GPUs after A100, of what the vendors' kernels do there
    later_attention: float = 1.0
    logit_bytes: float = 6  # per logit while the loss is computed
    loss_bytes: float = 24  # read and written per logit by the loss: float32, three times each way
    selective_matmuls: float = 0  # of a layer's, what ``selective`` computes again
    kept_bits: bool = False  # what 8-bit matmuls read is kept in 8 bits for the backward pass
    # of the stream's size, that a pipeline keeps for each microbatch that is alive
    messages: float = 0
    # over dp at the end of the backward pass: a loop gives all gradients there
    reduces_late: bool = False
    passes: int = 10  # of the stream, that norms and sums of a layer read or write, forward
    once_a_rank: bool = False  # a token goes to experts once for each rank that has some of its own
    # the matmul that makes a gradient adds it to those of other microbatches
    sums_in_matmuls: bool = False
    # both ways, per number that experts give and a bias is added to
    bias_bytes: float = 0
    clears: bool = False  # gradients have a buffer that a step zeroes, and their norm is clipped
    launch: float = 1.0  # a launch by its host, over one of today's
    blocking: bool = False  # the host waits for each kernel (CUDA_LAUNCH_BLOCKING=1)


PUBLICATIONS = package_table("predict/publications.toml")
SOFTWARE = {name: Software(name, **row) for name, row in PUBLICATIONS["software"].items()}
"""Frameworks by name."""


class Matmul(NamedTuple):
    """``times`` matmuls of ``rows`` by ``inner`` with ``inner`` by ``out``."""

    rows: float
    inner: float
    out: float
    times: float = 1
    thin: bool = False  # of a rank's few columns, or rows: cores share what it sums

    @property
    def flops(self) -> float:
        """2MNK each."""
        return 2.0 * self.rows * self.inner * self.out * self.times


@dataclass(frozen=True)
class Run:
    """One training step of a model on a machine. What is also a field of `Plan` means the same."""

    config: ModelConfig
    chip: Chip
    mesh: MeshShape  # ``ep`` counts as data, as everywhere here
    seq_len: int
    rows: int = 1  # sequences of one microbatch on one data rank
    microbatches: int = 1
    software: Software = SOFTWARE["llmpar"]
    zero: int = 3
    reshard: bool = True  # `Plan.reshard_after_forward`
    schedule: str = "1f1b"
    virtual_stages: int = 1
    recompute: str = "none"  # `Plan.remat`
    # forward passes that a stage repeats besides: of ours, whose stages keep inputs alone
    again: float = 0.0
    tp_sequence: bool = False
    tp_overlap: bool = False  # matmuls run beside these exchanges
    ep_overlap: bool = False
    context_parallel: str = "ring"
    ffn_products: int = 3  # matrices of a feed-forward: 3 with a gate, 2 without
    gpt: bool = False  # layer norms with biases, dropout, learned positions
    bits: int = 16  # of what the matmuls of the blocks multiply
    expert_tp: bool = True  # tp cuts each expert (Megatron's etp = tp)
    loss_chunks: int = 1
    zero_over_sp: bool = True
    # the order of positions gives all ranks the same causal work (`imbalance`)
    balanced: bool = True
    offload: bool = False  # what layers keep waits in the host's memory (MaxText's custom policies)
    ends_as_layers: bool = False  # a pipeline is cut as if embedding and head were a layer each
    neighbours: bool = False  # each token's experts follow one another (`publications.toml`)
    document: int | None = None  # tokens of each, where a sequence is packed of several
    plan: Resolved | None = None  # of ours, whose `traffic` is then priced

    @property
    def data_ranks(self) -> int:
        """Ranks that see different sequences."""
        return self.mesh.dp * self.mesh.fsdp * self.mesh.ep

    @property
    def batch_size(self) -> int:
        """Sequences of a step."""
        return self.rows * self.microbatches * self.data_ranks

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step."""
        return self.batch_size * self.seq_len

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on a device, before tp."""
        return self.rows * self.seq_len / self.mesh.sp

    @property
    def zero_group(self) -> int:
        """Devices over which ZeRO cuts what is not an expert."""
        return self.mesh.fsdp * self.mesh.ep * (self.mesh.sp if self.zero_over_sp else 1)

    @cached_property
    def chunk_layers(self) -> list[int]:
        """Layers of each chunk of the pipeline, in the order of the model."""
        end = int(self.ends_as_layers)
        counts = deal(self.config.num_layers + 2 * end, self.mesh.pp * self.virtual_stages)
        counts[0] -= end
        counts[-1] -= end
        return counts

    @property
    def stream_tokens(self) -> float:
        """Tokens of the residual stream on a device."""
        return self.tokens / (self.mesh.tp if self.tp_sequence else 1)

    @cached_property
    def chunk_kinds(self) -> list[tuple[int, ...]]:
        """Layers of each kind (`ModelConfig.blocks`) in each chunk."""
        ends = itertools.accumulate(self.chunk_layers, initial=0)
        return [tuple(self.config.count_kinds(*pair)) for pair in itertools.pairwise(ends)]

    @property
    def blocks(self) -> list[ModelConfig]:
        """A model of each kind of layers alone."""
        return [block for _, block in self.config.blocks]

    def stage_kinds(self, stage: int) -> list[int]:
        """Count the layers of each kind on a stage of the pipeline."""
        chunks = self.chunk_kinds[stage :: self.mesh.pp]
        return [sum(counts) for counts in zip(*chunks, strict=True)]

    def kv_heads(self, block: ModelConfig) -> int:
        """Return the KV heads of all ranks of tp, which hold copies where they are more than the heads."""
        return max(block.num_kv_heads, self.mesh.tp)

    @cached_property
    def ends(self) -> dict[str, float]:
        """Parameters outside of layers: of ``embedding`` and ``head``."""
        edge = self.config.vocab_size * self.config.width
        learned_positions = self.seq_len * self.config.width if self.gpt else 0
        return {"embedding": edge + learned_positions, "head": 0 if self.config.tied else edge}

    @cached_property
    def sizes(self) -> list[dict[str, float]]:
        """Parameters of a layer of each kind, by part: ``attention``, ``copies`` (of KV heads, beyond the
        first), ``ffn`` (shared experts too), ``experts``, ``router``, ``vectors``."""
        return [self._sizes(block) for block in self.blocks]

    def _sizes(self, c: ModelConfig) -> dict[str, float]:
        d, n, k, h, experts = c.width, c.num_heads, c.num_kv_heads, c.head_width, c.experts
        if c.described:
            return self._described_sizes(c)
        each = self.ffn_products * d * c.ffn_width
        return {
            "attention": d * h * (2 * n + 2 * k),
            "copies": 2 * d * h * (self.kv_heads(c) - k),
            "ffn": each * (experts.num_shared if experts else 1),
            "experts": each * experts.num_experts if experts else 0,
            "router": d * experts.num_experts if experts else 0,
            "vectors": 13 * d if self.gpt else 2 * d,
        }

    def _described_sizes(self, c: ModelConfig) -> dict[str, float]:
        """Sum the rows of a planned block."""
        parts = dict.fromkeys(("attention", "copies", "ffn", "experts", "router", "vectors"), 0.0)
        for _, weight in c.described.rows if c.described else ():
            region = weight.dims.partition(" ")[0]
            part = "vectors" if weight.is_vector else region if region in parts else "router"
            size = math.prod(weight.shape)
            parts[part] += size
            if part == "attention" and " k " in weight.dims and not c.has_latent_attention:
                parts["copies"] += size * (self.kv_heads(c) / c.num_kv_heads - 1)
        return parts

    def flops(self) -> float:
        """Return the useful FLOPs of a step as MFU counts them: 6 per active parameter that multiplies and
        token, 4 where it is frozen, and attention, of which the causal mask takes nothing away (Chowdhery et
        al. 2022, appendix B)."""
        c, each = self.config, 4.0 if self.config.lora else 6.0
        per_token = each * end_products(c) + (6.0 * trained_params(c) if c.lora else 0.0)
        for (count, block), s in zip(c.blocks, self.sizes, strict=True):
            experts = block.experts
            visits = experts.top_k / experts.num_experts if experts else 0
            multiplied = s["attention"] + s["ffn"] + visits * s["experts"] + s["router"]
            per_token += count * (each * multiplied + 3 * self._mixed_flops(block, causal=False))
        return per_token * self.tokens_per_step

    def _mixed_flops(self, block: ModelConfig, causal: bool) -> float:
        """Return the FLOPs of a token forward, between positions: 2 for each number of a head's keys and
        values and each key that it meets; of a recurrent state 2 to update and 2 to read each number."""
        flops = 4.0 * block.state_size
        if block.mixer == "attention":
            widths = block.head_width + block.value_width
            flops += 2.0 * block.num_heads * widths * self.seen(causal, block)
        return flops

    def halved(self, block: ModelConfig) -> bool:
        """Tell whether a causal mask takes half of the keys away, as of a sequence, a document or a chunk."""
        length = self.document or self.seq_len
        return block.variant.chunked or not block.window or block.window >= length

    def seen(self, causal: bool, block: ModelConfig) -> float:
        """Return the keys that a query meets: of a window all, elsewhere half of the sequence, or of a chunk,
        where ``causal``, and then what is masked of a fused kernel's tiles (`KEY_TILE`)."""
        length = self.document or self.seq_len
        seen = min(block.window or length, length)
        if not causal:
            return seen
        masked = KEY_TILE[self.chip.link] * self.software.fused_attention
        return min(length, (seen + masked) * (0.5 if self.halved(block) else 1.0))

    # ------------------------------------------------------------------------------ what a layer computes

    def layer_matmuls(self, block: ModelConfig) -> tuple[list[Matmul], list[Matmul]]:
        """Return the matmuls of a layer, forward, of a microbatch on a device: attention's projections, and
        the feed-forward's. Experts share their visits evenly: each ep rank gets its part of the visits of all
        ep ranks' tokens, and where tp does not cut experts, tp ranks deal tokens among them."""
        c, t, tp, experts = block, self.tokens, self.mesh.tp, block.experts
        if c.described:
            return self._described_matmuls(c)
        d, n, k, h = c.width, c.num_heads / tp, self.kv_heads(c) / tp, c.head_width
        attention = [Matmul(t, d, (n + 2 * k) * h), Matmul(t, n * h, d)]

        def ffn(width: float, rows: float = t, times: float = 1) -> list[Matmul]:
            return [
                Matmul(rows, d, width * (self.ffn_products - 1), times),
                Matmul(rows, width, d, times),
            ]

        if experts is None:
            return attention, ffn(c.ffn_width / tp)
        matmuls = ffn(c.ffn_width * experts.num_shared / tp) if experts.num_shared else []
        matmuls.append(Matmul(self.stream_tokens, d, experts.num_experts))  # the router
        rows, times, cut = self._visits(c)
        return attention, matmuls + ffn(c.ffn_width / cut, rows, times)

    def _visits(self, block: ModelConfig) -> tuple[float, float, int]:
        """Return the tokens that visit each expert of a device, its experts, and into how many parts tp cuts
        one."""
        experts = block.experts
        assert experts
        local = experts.num_experts / self.mesh.ep
        cut = self.mesh.tp if self.expert_tp else 1
        return self.tokens * experts.top_k * cut / self.mesh.tp / local, local, cut

    def adapter_matmuls(self, block: ModelConfig) -> dict[str, Matmul]:
        """Return the matmuls of a layer's adapters by their paths, forward, of a microbatch on a device: x A,
        and what it gives times B. What tp cuts of a weight it cuts of the adapter beside it."""
        out = dict[str, Matmul]()
        for path, weight in block.block_weights().items() if block.lora else ():
            if ".lora." in path:
                _, *letters = weight.dims.split()
                sizes = self._cut(letters, weight.shape, self.mesh.tp)
                rank = sizes.pop("z")
                wide = math.prod(sizes.values())
                inner, width = (wide, rank) if path.endswith("_a") else (rank, wide)
                out[path] = Matmul(self.tokens, inner, width, thin=True)
        return out

    def _cut(self, letters: list[str], shape: tuple[int, ...], tp: int) -> dict[str, float]:
        """Return the sizes of a weight's dims on a rank of tp, which has a copy of a KV head at least."""
        sizes = dict(zip(letters, map(float, shape), strict=True))
        cut = {x: max(sizes[x], tp if x == "k" else 1) / tp for x in letters if x in "nkm"}
        return sizes | cut

    def _described_matmuls(self, block: ModelConfig) -> tuple[list[Matmul], list[Matmul]]:
        """Return the matmuls that rows are: those of one region with the same input are one matmul."""
        by_part: dict[tuple[str, ...], Matmul] = {}
        for path, weight in block.described.rows if block.described else ():
            if weight.is_vector:
                continue
            region, *letters = weight.dims.split()
            rows, times, tp = self.tokens, 1.0, self.mesh.tp
            if region == "stream":
                rows, tp = self.stream_tokens, 1
            if region == "experts":  # each expert has its own matmul
                rows, times, tp = self._visits(block)
            sizes = self._cut(letters, weight.shape, tp)
            if region == "experts":
                sizes["e"] = 1.0
            cut = [letter for letter in letters if letter in "nkm"]
            if len(letters) == 3 and letters[0] in "nk" and letters[-1] != "d":
                times, sizes[letters[0]] = sizes[letters[0]], 1.0  # each group of heads has its own
            apart = region == "experts" or times > 1
            split = len(letters) - 1 if letters[-1] == "d" else 1 + apart
            inner = math.prod(sizes[letter] for letter in letters[:split])
            out = math.prod(sizes[letter] for letter in letters[split:])
            # beside one another where heads or a feed-forward follow
            key = (
                region,
                *letters[:split],
                f"{inner}",
                "" if set(cut) & set(letters[split:]) else path,
            )
            merged = by_part.get(key, Matmul(rows, inner, 0, times))
            by_part[key] = merged._replace(out=merged.out + out)
        attention = [one for key, one in by_part.items() if key[0] == "attention"]
        return attention, [one for key, one in by_part.items() if key[0] != "attention"]

    def attention_flops(self, block: ModelConfig) -> float:
        """Return the FLOPs of scores and of what they weigh, forward, of a microbatch and layer on a device:
        of whole squares where attention is not fused, of the causal half where it is."""
        flops = self._mixed_flops(block, self.software.fused_attention)
        return self.tokens * flops / self.mesh.tp

    @property
    def exchanging(self) -> int:
        """Ranks of sp that exchange positions for heads: of usp as many as divide the heads of a device."""
        shared = math.gcd(max(1, self.config.exchanged_heads(self.mesh.tp)[1]), self.mesh.sp)
        return {"ulysses": self.mesh.sp, "usp": shared}.get(self.context_parallel, 1)

    def imbalance(self, block: ModelConfig) -> float:
        """Return attention of the busiest rank over the mean. Of n ranks that cut the queries' positions in
        their order the last meets 1 - 1/2n of the keys, and the mean is a half; a rank that exchanges
        positions for heads has whole rows of some heads, and of a window all queries see as many keys."""
        n = self.mesh.sp // self.exchanging
        return 2 - 1 / n if self.halved(block) and not self.balanced else 1.0

    def score_elements(self) -> float:
        """Elements of a layer's scores on a device; 0 where attention is fused."""
        if self.software.fused_attention:
            return 0.0
        return self.tokens * self.seq_len * self.config.num_heads / self.mesh.tp

    def elementwise_bytes(self, block: ModelConfig) -> float:
        """Return the bytes that a layer's elementwise work reads and writes, forward: norms, residual sums,
        rotary embedding, the nonlinearity; of a GPT dropouts and biases too; of unfused attention its
        scores; what an adapter's results are added to, once more; what adds biases to what experts give; and
        what casts operands of matmuls to fewer bits (`CAST_BYTES`): on TPUs of experts alone, into whose
        kernel XLA fuses no cast."""
        c, experts, tp = block, block.experts, self.mesh.tp
        heads = (c.num_heads + 2 * self.kv_heads(c)) * c.head_width / tp
        stream = (14 if self.gpt else self.software.passes) * self.stream_tokens * c.width
        inner = 2 * heads * self.tokens * (1 if self.gpt else 1.5)
        width = self.ffn_products * c.ffn_width / tp
        if experts:
            width *= experts.top_k + experts.num_shared
            # sorting
            stream += 4 * experts.top_k * self.tokens * c.width / (tp if self.tp_sequence else 1)
        added = sum(p.rows * p.out for p in self.adapter_matmuls(block).values())
        moved = 2.0 * (stream + inner + width * self.tokens + 6 * self.score_elements() + added)
        if self.bits < 16:
            attention, ffn = self.layer_matmuls(block)
            on_tpu = [p for p in ffn if p.times > 1]
            cast = attention + ffn if self.chip.link == "switch" else on_tpu
            moved += CAST_BYTES * sum(p.rows * p.inner * p.times for p in cast)
        elif experts and c.described and "experts.down_bias" in dict(c.described.rows):
            moved += self.software.bias_bytes / 3 * experts.top_k * self.tokens * c.width
        return moved


def message_width(block: ModelConfig, tp: int) -> float:
    """Return the numbers of a token's keys and values on a rank of tp: a copy of a head where there are more
    ranks than heads; what heads share, whole."""
    if block.has_latent_attention:
        return block.cache_width
    copies = max(block.num_kv_heads, tp) / block.num_kv_heads
    return copies * block.cache_width / tp


def of_plan(config: ModelConfig, plan: Plan, chip: Chip, batch_size: int, seq_len: int) -> Run:
    """Return the run that a plan of ours is: what its fields decide, not those that decide nothing."""
    plan = plan.resolve(config, None)
    ranks = plan.mesh.dp * plan.mesh.fsdp * plan.mesh.ep
    order = plan.pipeline
    # TPUs read float32 as 16 bits
    bits = 32 if plan.dtype == "float32" and chip.link == "switch" else 16
    alike = "mesh microbatches zero schedule tp_sequence context_parallel loss_chunks"
    fields: dict[str, Any] = {name: getattr(plan, name) for name in alike.split()}
    return Run(
        config,
        chip,
        seq_len=seq_len,
        rows=max(1, batch_size // ranks // plan.microbatches),
        reshard=plan.reshard_after_forward,
        virtual_stages=order.visits if order else 1,
        recompute=plan.remat,
        again=1.0 if order and plan.stage_saves == "input" else 0.0,
        tp_overlap=plan.tp_comm_overlap,
        zero_over_sp="sp" in plan.zero_axes,
        balanced=plan.sequence_order != "contiguous",
        bits=8 if plan.matmul_dtype == "float8" else bits,
        plan=plan,
        **fields,
    )
