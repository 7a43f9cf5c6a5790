"""Model sizes: the configuration of a Llama-family model, its weights, and its exact number of parameters."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from llmpar.files import Allowed, CheckedFields, check_fields, refuse_first
from llmpar.plan import families, running
from llmpar.plan.layout import parse_layout
from llmpar.plan.places import LayerLoop, loops
from llmpar.plan.sequence_order import Mask

Size = Annotated[int, Allowed(int, 1, 1 << 24)]
Count = Annotated[int, Allowed(int, 0, 1 << 24)]
Length = Annotated[int | None, Allowed(int, 1, none=True)]
Rate = Annotated[float, Allowed(float, 0, 1e9)]
_Positive = Annotated[float, Allowed(float, 1e-9, 1e300)]
_Factor = Annotated[float | None, Allowed(float, 1e-9, 1e300, none=True)]
Share = Annotated[float, Allowed(float, 0, 1)]


@dataclass(frozen=True)
class RopeScaling:
    """The stretching of low rotary frequencies, by a ``factor``: of ``linear`` all frequencies, of
    ``llama3`` (Llama 3.1) and ``yarn`` (Peng et al. 2023) those with few turns in the ``original_context``.
    ``longrope`` (Ding et al. 2024) divides the frequency of each pair by a factor of its own.

    Attributes:
        low_freq_factor, high_freq_factor: numbers of turns up to which a pair is stretched, and from which it
            is not; YaRN calls them beta_slow and beta_fast.
        attention_factor: what YaRN and LongRoPE multiply rotated queries and keys by.
        truncate: YaRN's range begins and ends at whole pairs.
        short_factors, long_factors: LongRoPE's, for each pair: long ones in a row with a position from
            ``original_context`` on, short ones in others.
    """

    factor: Annotated[float, Allowed(float, 1, 1e9)] = 8.0
    low_freq_factor: Rate = 1.0
    high_freq_factor: Rate = 4.0
    original_context: Annotated[int, Allowed(int, 1)] = 8192
    kind: Literal["llama3", "linear", "yarn", "longrope"] = "llama3"
    attention_factor: Rate = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self):
        check_fields(self)
        low, high = self.low_freq_factor, self.high_freq_factor
        if low >= high and self.kind == "llama3" and (low, high) != (1, 1):  # Llama 4 has a step
            raise ValueError(
                f"low_freq_factor {low} is not below high_freq_factor {high}; Llama 3.1 has 1 and 4"
            )


@dataclass(frozen=True)
class ExpertConfig:
    """A mixture of experts, in every layer of a kind. `ModelConfig.ffn_width` is the width of one expert.

    Attributes:
        num_experts, top_k: experts of a layer, and how many of them a token visits (the field's E and k).
        num_shared: experts that every token visits besides.
        score: how the router's logits become affinities: a ``softmax`` over all experts, or a ``sigmoid`` of
            each (DeepSeek-V3).
        renormalise: the chosen experts' weights add up to one (Mixtral: a softmax over the chosen logits).
        scale: factor on the weights of the chosen.
        weighs: a weight multiplies its expert's ``result``, or the ``input`` (Llama 4, with a top_k of 1).
        bias_rate: None, or the step of a bias that takes part in choosing, not in weighing, and rises for
            experts with less than the mean load and falls for others (Wang et al. 2024).
        num_groups, top_groups: node-limited routing: only the best groups of experts are open to a token, a
            group being worth the sum of its two best affinities (DeepSeek-V3 2024, section 2.1.2), or with
            ``group_score`` ``best`` its best one (DeepSeek-V2).
        aux_loss, z_loss: coefficients of the load-balancing loss (`moe.route`) and of the router's z loss.
        capacity_factor: None drops no token; else an expert takes the first k·tokens·factor/E, rounded up, of
            each piece of a row that a device holds, and the others go without it.
    """

    num_experts: Size
    top_k: Size
    num_shared: Count = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    scale: Rate = 1.0
    weighs: Literal["result", "input"] = "result"
    bias_rate: Annotated[float | None, Allowed(float, 0, 1e9, none=True)] = None
    num_groups: Size = 1
    top_groups: Size = 1
    group_score: Literal["two", "best"] = "two"
    aux_loss: Rate = 0.0
    z_loss: Rate = 0.0
    capacity_factor: Annotated[float | None, Allowed(float, 1e-9, 1e9, none=True)] = None

    def __post_init__(self):
        check_fields(self)
        k, experts, groups = self.top_k, self.num_experts, f"{self.top_groups} of {self.num_groups}"
        open_experts = experts // self.num_groups * self.top_groups
        refuse_first(
            (
                not 1 <= k <= experts,
                f"a token cannot visit {k} of {experts} experts; choose from 1 to {experts}",
            ),
            (
                self.weighs == "input" and k > 1,
                f"weights of {k} experts multiply no one input; choose from 1 to 1",
            ),
            (
                experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups,
                f"{experts} experts cannot be routed in {groups} equal groups",
            ),
            (
                k > open_experts,
                f"{groups} groups hold {open_experts} experts, fewer than the {k} that a token visits;"
                " choose more groups",
            ),
        )

    def capacity(self, tokens: int) -> int:
        """Return ⌈k·tokens·factor/E⌉, the most of a piece's ``tokens`` that an expert takes (Fedus et al.
        2021, eq. 3)."""
        if self.capacity_factor is None:
            return tokens
        return min(
            tokens,
            math.ceil(round(self.top_k * tokens * self.capacity_factor / self.num_experts, 9)),
        )

    def slots(self, tokens: int, pieces: int, ranks: int) -> int:
        """Return min(tokens, expert_tokens·E/ranks): the slots that a device with ``tokens`` tokens in
        ``pieces`` pieces keeps for each of ``ranks``. A token travels to a rank once, however many of its
        experts that rank has."""
        return min(tokens, self.expert_tokens(tokens, pieces) * (self.num_experts // ranks))

    def expert_tokens(self, tokens: int, pieces: int) -> int:
        """Return pieces · capacity(tokens/pieces): the most of a device's tokens that one expert takes."""
        return pieces * self.capacity(tokens // pieces)


_PARTS = dict.fromkeys("qkvo", "attention") | dict.fromkeys(("gate", "up", "down"), "ffn")
ADAPTABLE = tuple(_PARTS)
"""The matrices of a block that may have adapters: attention's, and those of its feed-forward."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, section 4.1): beside the matrix W of every block that ``targets``
    names, x W becomes x W + (x A) B · alpha / rank. A and B are trained, and nothing else is.

    Attributes:
        rank: columns of A and rows of B, the dim ``z``.
        alpha: the adapters' weight, by `peft`'s convention times 1 / rank.
        targets: of `ADAPTABLE`. Experts have none; their model's attention may.
    """

    rank: Size = 8
    alpha: _Positive = 16.0
    targets: tuple[str, ...] = ("q", "k", "v", "o")

    def __post_init__(self):
        check_fields(self)
        object.__setattr__(self, "targets", tuple(self.targets))  # JSON has lists
        if not self.targets or set(self.targets) - set(ADAPTABLE):
            named, known = " ".join(self.targets), " ".join(ADAPTABLE)
            raise ValueError(f"LoRA's targets are '{named}'; use some of {known}")

    @property
    def scale(self) -> float:
        """What (x A) B is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Weight:
    """One weight of the model: its region and dims, its shape, and how it starts: normally distributed with
    standard deviation ``std``, or where that is 0 equal to ``fill`` everywhere. ``is_vector``: a norm's scale
    or a bias, which multiplies no matrix. ``frozen``: no gradient changes it."""

    dims: str
    shape: tuple[int, ...]
    std: float = 0.0
    fill: float = 1.0
    is_vector: bool = False
    frozen: bool = False


@functools.cache
def matrix_dims(dims: str) -> tuple[str, str] | None:
    """Return the letters that a matrix of a block sums over and those that it makes: of ``ffn l d m`` d and
    m, of ``attention l n h d`` n h and d. Layers and experts are stacked matrices. None: for embedding, head
    and routers, which Muon leaves to Adam (Jordan et al. 2024), and for vectors."""
    layout = parse_layout(dims)
    letters = layout.letters.replace("l", "").replace("e", "")
    if layout.region not in ("attention", "ffn", "experts"):
        return None
    cut = 1 if letters[0] in "dcz" else -1
    into, made = letters[:cut], letters[cut:]
    is_matrix = into and made and not (into == "z" and made in "ht") and {*letters} & {*"dcz"}
    return (into, made) if is_matrix else None


_OWN_PARTS = """first_norm gqa second_norm qkv_bias?qkv_bias qk_norm?qk_norm swiglu?!e
    router?e router_bias?rate experts?e shared?u"""
_OWN_SIZES = {
    "d": "width", "n": "num_heads", "k": "num_kv_heads", "h": "head_width", "m": "ffn_width",
    "e": "experts.num_experts", "u": "experts.num_shared * m", "rate": "experts.bias_rate + 1",
}  # fmt: skip
"""The sizes of dims, of a block that its fields describe, as `families` has them."""


@dataclass(frozen=True)
class Variant(CheckedFields):
    """What a layer computes otherwise than Llama's; its matrices, and where it has norms, its rows say.

    Attributes:
        norm: by the root mean square, or ``layer``: by the deviation from the mean (Ba et al. 2016).
        norm_offset: is added to each norm's scale (Gemma: 1).
        qk_norm: whether a norm of q and k is over each ``head``, or over ``all`` heads together (OLMo 2), or
            ``rotated``: over each head, behind the rotation and without a scale (Llama 4).
        chunked: `ModelConfig.window` is the length of chunks, and a query sees keys of its own alone.
        activation: of the feed-forward. ``clamped`` is gpt-oss's: gate · sigmoid(1.702 gate) · (up + 1), gate
            at most ``clamp`` and up within ± that.
        rope: which numbers of a head rotation pairs: i with i + h/2 (``halves``), 2i with 2i + 1
            (``neighbours``), or ``none``.
        rope_width: how many of them, from the first; None: all.
        query_scale, query_every: a query is multiplied by 1 + scale · ln(1 + ⌊(position + 1) / every⌋), in
            layers that do not rotate (Llama 4); None: by nothing.
        score_scale: factor of the scores; None: 1/√h.
        score_cap, logit_cap: x becomes cap · tanh(x / cap) (Gemma 2).
        embedding_scale, residual_scale, logit_scale: factors of what is looked up, of what a layer adds to
            the stream, and of logits (Gemma, Granite, Cohere).
    """

    norm: Literal["rms", "layer"] = "rms"
    norm_offset: Rate = 0.0
    qk_norm: Literal["head", "all", "rotated"] = "head"
    chunked: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh", "clamped"] = "silu"
    clamp: _Positive = 7.0
    rope: Literal["halves", "neighbours", "none"] = "halves"
    rope_width: Length = None
    query_scale: _Factor = None
    query_every: _Positive = 8192.0
    score_scale: _Factor = None
    score_cap: _Factor = None
    logit_cap: _Factor = None
    embedding_scale: _Positive = 1.0
    residual_scale: _Positive = 1.0
    logit_scale: _Positive = 1.0


LLAMA = Variant()
"""What Llama's layers compute."""


@dataclass(frozen=True)
class Described(CheckedFields):
    """What a block needs and `ModelConfig` has no field for: its weights, row by row.

    Attributes:
        file: the text of the ``config.json`` that it was read from, which an export writes again.
        rows: the weights of a block, by their paths.
        ends: its weights outside of blocks, besides embedding, last norm and head.
        value_width: of a head's values; None: as wide as its keys.
        cache_width: the numbers that a token leaves in the cache of a layer, where heads share them (latent
            attention); None: keys and values of each KV head.
        further: the layers that predict further tokens (MTP), by the file.
        notes: what a reader of the plan should know, in sentences.
    """

    file: str = ""
    rows: tuple[tuple[str, Weight], ...] = ()
    ends: tuple[tuple[str, Weight], ...] = ()
    value_width: Length = None
    cache_width: Length = None
    further: Count = 0
    notes: tuple[str, ...] = ()


OF_FAMILIES = "mixer", "state_size", "runs", "why_planned", "num_further"
"""Fields of a `ModelConfig` that only a description sets: a Llama has their defaults."""


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-family model: grouped-query attention, RoPE, SwiGLU, RMSNorm; Qwen's biases and norms.

    ``window`` is Mistral's sliding window (None: full causal attention). ``init_scale`` is the standard
    deviation of fresh weights. With ``experts`` every feed-forward is a mixture of them. ``context_length``,
    the longest sequence that its authors made it for, binds nothing here, but exported models carry it.
    With ``lora`` all weights are frozen but the adapters, further rows of `weights`.

    Layers that differ are ``kinds``, each a model of such layers alone; the first layers have those of
    ``lead``, by their index, and the others repeat ``period``. Its own fields are those of the kind with
    most parameters, of those with experts if there are some. ``described`` has the weights of what is no
    Llama, and ``variant`` what its layers compute.

    ``mixer`` is what mixes positions in a layer. A recurrent one leaves a state of ``state_size`` numbers of
    a sequence, in place of a cache. The model's text computes a model that ``runs``; any other is planned
    alone, and ``why_planned`` says what of it is not implemented. The last ``num_further`` layers predict
    further tokens (`predict.parameters.with_further`): each looks the next tokens up, and computes their
    logits, by the model's embedding and head.
    """

    name: str
    vocab_size: Size
    width: Size
    num_layers: Size
    num_heads: Size
    num_kv_heads: Size
    head_width: Size
    ffn_width: Count
    rope_theta: Annotated[float, Allowed(float, 1, 1e15)] = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: Share = 1e-5
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    window: Length = None
    init_scale: Rate = 0.02
    experts: ExpertConfig | None = None
    context_length: Length = None
    lora: LoraConfig | None = None
    # not hashed: a model of many rows is a key of many caches
    kinds: tuple["ModelConfig", ...] = field(default=(), hash=False)
    lead: tuple[int, ...] = ()
    period: tuple[int, ...] = (0,)
    variant: Variant = LLAMA
    described: Described | None = field(default=None, hash=False)
    mixer: Literal["attention", "recurrent", "none"] = "attention"
    state_size: Annotated[int, Allowed(int, 0)] = 0
    runs: bool = True
    why_planned: str = ""
    num_further: Count = 0

    def __post_init__(self):
        check_fields(self)
        given = [x for x in OF_FAMILIES if getattr(self, x) != getattr(ModelConfig, x)]
        rows = dict(self.described.rows) if self.described else {}
        attends = self.runs and self.mixer == "attention"
        rotated = self.variant.rope_width or self.head_width
        what, use = "the rotated part of heads is", "a rotated part of an even width"
        if rotated == self.head_width:
            what, use = "heads are", "an even head width"
        refuse_first(
            (
                given and not self.described,
                f"'{self.name}' is a Llama, with attention in each layer, and sets {', '.join(given)}; leave"
                " these out, or read a model's config.json, which describes what is no Llama",
            ),
            (
                self.runs and "experts.shared.down_bias" in rows,
                f"'{self.name}' has a bias behind its shared expert, and each rank of tp would add it to its"
                " term of an unfinished sum; plan it without running it, or leave the bias out",
            ),
            (
                self.runs and not self.ffn_width,
                f"'{self.name}' has a feed-forward of width 0; use 1 or more",
            ),
            (
                attends and rotated % 2,
                f"{what} {rotated} wide, but rotary embedding rotates pairs; use {use}",
            ),
            (
                attends and self.num_heads % self.num_kv_heads,
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly;"
                f" use a number of KV heads that divides {self.num_heads}",
            ),
        )
        if self.lora:
            kinds = [kind.block_weights() for kind in self.kinds or (self,)]
            fits = [x for x, part in _PARTS.items() if all(f"{part}.{x}" in own for own in kinds)]
            if missing := [name for name in self.lora.targets if name not in fits]:
                why = "experts have no adapters, and it" if self.experts else "a layer of it"
                raise ValueError(
                    f"'{self.name}' cannot be adapted so: {why} has no matrix {' '.join(missing)}; use "
                    + (f"targets of {' '.join(fits)}" if fits else "no LoRA")
                )

    def weights(self, counts: Sequence[int] | None = None) -> dict[str, Weight]:
        """Every weight by its path. The blocks' weights are stacked: ``l`` leads their dims. Those of the
        i-th kind of layers are ``blocks.i.…``. There are ``counts[i]`` of them, by default the model's own.

        >>> preset("tiny").weights()["blocks.ffn.gate"]
        Weight(dims='ffn l d m', shape=(4, 64, 128), std=0.02, fill=1.0, is_vector=False, frozen=False)
        """
        counts = [count for count, _ in self.blocks] if counts is None else counts
        v, d, std = self.vocab_size, self.width, self.init_scale
        weights = {"embedding": Weight("vocab v d", (v, d), std)}
        weights |= (
            dict(self.described.ends)
            if self.described
            else {"norm.scale": Weight("stream d", (d,), is_vector=True)}
        )
        if not self.tied:
            weights.setdefault("head", Weight("vocab v d", (v, d), std))
        for i, (count, (_, block)) in enumerate(zip(counts, self.blocks, strict=True)):
            prefix = f"blocks.{i}." if self.kinds else "blocks."
            for path, weight in block.block_weights().items() if count else ():
                dims, shape = weight.dims.replace(" ", " l ", 1), (count, *weight.shape)
                weights[prefix + path] = dataclasses.replace(weight, dims=dims, shape=shape)
        if self.lora:
            weights = {
                p: dataclasses.replace(w, frozen=".lora." not in p) for p, w in weights.items()
            }
        return weights

    def block_weights(self) -> dict[str, Weight]:
        """The weights of one block, by their paths in it. What ends in the residual stream starts smaller, by
        the root of twice the number of layers (Radford et al. 2019, section 2.3)."""
        weights = dict(self.described.rows if self.described else self._own_rows)
        return weights | (self._adapters(self.lora, weights) if self.lora else {})

    @functools.cached_property
    def _own_rows(self) -> tuple[tuple[str, Weight], ...]:
        """The weights of a Llama's block, by the parts of `families`."""
        fields = dataclasses.asdict(self)
        rows = families.rows_of(_OWN_PARTS, fields, _OWN_SIZES)
        return _weights(running.started(rows, fields, self.num_layers))

    def _adapters(self, lora: LoraConfig, weights: dict[str, Weight]) -> dict[str, Weight]:
        """A and B for each target, such as ``d z`` and ``z n h`` for q, ``d n h``. B starts at zero, A with
        the variance that Hu et al. give it in their code, a third of one over the numbers that it sums."""
        rows = dict[str, Weight]()
        for path, weight in weights.items():
            part, _, name = path.rpartition(".")
            if name in lora.targets and part == _PARTS[name]:
                region, *dims = weight.dims.split()
                cut = 2 if name == "o" else 1  # dims of the input
                into, out = weight.shape[:cut], weight.shape[cut:]
                a, b = (" ".join((region, *x)) for x in ((*dims[:cut], "z"), ("z", *dims[cut:])))
                std = (3 * math.prod(into)) ** -0.5
                rows[f"{part}.lora.{name}_a"] = Weight(a, (*into, lora.rank), std)
                rows[f"{part}.lora.{name}_b"] = Weight(b, (lora.rank, *out), fill=0.0)
        return rows

    @property
    def reads_one_norm(self) -> bool:
        """Whether attention and feed-forward read one norm and are added side by side (Cohere)."""
        return not {"ffn_norm.scale", "ffn_post_norm.scale"} & self.block_weights().keys()

    @functools.cached_property
    def blocks(self) -> tuple[tuple[int, "ModelConfig"], ...]:
        """How many layers there are of each kind, and a model of such layers; itself where all are alike."""
        if not self.kinds:
            return ((self.num_layers, self),)
        counts = self.count_kinds(0, self.num_layers)
        kinds = (dataclasses.replace(kind, lora=self.lora) for kind in self.kinds)
        return tuple(zip(counts, kinds if self.lora else self.kinds, strict=True))

    @property
    def loops(self) -> list[LayerLoop]:
        """The layers as loops over their period."""
        return loops(self.layer_kinds, len(self.lead), len(self.period), self.num_further)

    @property
    def mask(self) -> Mask:
        """Which keys a layer's queries see, and how its scores are capped."""
        return Mask(self.window, self.variant.score_cap, self.variant.chunked)

    @property
    def value_width(self) -> int:
        """The width of a head's values."""
        return self.described and self.described.value_width or self.head_width

    @property
    def has_latent_attention(self) -> bool:
        """Whether a token leaves one latent in the cache, which all heads share (DeepSeek-V2 2024)."""
        return bool(self.described and self.described.cache_width)

    @property
    def cache_width(self) -> int:
        """The numbers that a token leaves in the cache of a layer."""
        if self.mixer != "attention":
            return 0
        own = self.described and self.described.cache_width
        return own or self.num_kv_heads * (self.head_width + self.value_width)

    @property
    def has_long_rope(self) -> bool:
        """Whether a row's length decides between two tables of rotary frequencies (LongRoPE)."""
        scaling = self.rope_scaling if self.variant.rope != "none" else None
        return scaling is not None and scaling.kind == "longrope"

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a recurrent state in place of keys and values."""
        return any(block.mixer == "recurrent" for _, block in self.blocks)

    @property
    def positions_before(self) -> int:
        """How many positions before each a layer's short convolutions read; 0 without them."""
        return max((row.shape[-1] - 1 for row in self.convolutions), default=0)

    @property
    def convolutions(self) -> list[Weight]:
        """The weights of a layer's short convolutions over positions, the last dim of each."""
        return [row for path, row in self.block_weights().items() if path.endswith("_conv")]

    @property
    def convolved(self) -> int:
        """The numbers of a token that a layer's short convolutions take, and give."""
        return sum(math.prod(row.shape[:-1]) for row in self.convolutions)

    def exchanged_heads(self, tp: int) -> tuple[str, int]:
        """Return which heads of a rank of ``tp`` may be exchanged for positions, and how many every layer
        has: ``KV`` heads, or where a layer has fewer than there are ranks, ``query`` heads."""
        blocks = [block for _, block in self.blocks if block.mixer == "attention"]
        if any(block.num_kv_heads < tp for block in blocks):
            return "query", math.gcd(*(block.num_heads for block in blocks)) // tp
        return "KV", math.gcd(*(block.num_kv_heads for block in blocks)) // tp

    def count_kinds(self, start: int, stop: int) -> list[int]:
        """Count the layers of each kind among those from ``start`` on, before ``stop``."""
        return [self.layer_kinds[start:stop].count(i) for i in range(len(self.kinds) or 1)]

    @functools.cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """Of each layer the index of its kind."""
        repeated = itertools.chain(self.lead, itertools.cycle(self.period))
        order = tuple(itertools.islice(repeated, self.num_layers - self.num_further))
        return order + order[-1:] * self.num_further

    @property
    def kinds_of_routed_layers(self) -> list[int]:
        """The kinds of the layers with experts, in the order of these layers."""
        return [kind for kind in self.layer_kinds if self.blocks[kind][1].experts]

    def must_run(self) -> "ModelConfig":
        """Return itself. Refuses a model that is planned, and not implemented."""
        if not self.runs:
            raise ValueError(
                f"'{self.name}' cannot run here: {self.why_planned}; 'llmpar plan' answers about it, and"
                " 'llmpar models' lists models that run"
            )
        return self

    @property
    def num_params(self) -> int:
        """The exact number of parameters; tied embeddings are counted once (`count_params`)."""
        return count_params(self.weights(), self.runs)

    @property
    def active_params(self) -> int:
        """Parameters that take part for one token: all but those of the experts that it does not visit."""
        idle = 0
        for count, block in self.blocks:
            if experts := block.experts:
                rows = block.block_weights().values()
                routed = (math.prod(row.shape) for row in rows if row.dims.startswith("experts "))
                each = sum(routed) // experts.num_experts
                idle += count * each * (experts.num_experts - experts.top_k)
        return self.num_params - idle


def count_params(rows: Mapping[str, Weight], runs: bool) -> int:
    """Count parameters. Biases of routers follow a rule and no gradient, and do not count in families that
    run; a family that is planned alone has the parameters of `transformers`."""
    own = (row for path, row in rows.items() if not (runs and path.endswith("experts.bias")))
    return sum(math.prod(row.shape) for row in own)


def kind_of(path: str) -> int:
    """Return the kind of layers to which the weight with a path belongs; -1: the only one, or none."""
    index = path.split(".")[1:2]
    return int(index[0]) if index and index[0].isdigit() else -1


def from_dict(kept: dict[str, Any]) -> ModelConfig:
    """The model that `dataclasses.asdict` made plain, as checkpoints keep it; refuses unknown fields."""
    parts = {
        "rope_scaling": RopeScaling,
        "experts": ExpertConfig,
        "lora": LoraConfig,
        "variant": Variant,
    }
    made = {
        name: _made(part, kept[name]) for name, part in parts.items() if kept.get(name) is not None
    }
    made["kinds"] = tuple(map(from_dict, kept.get("kinds", ())))
    if kept.get("described"):
        rows = {name: _weights(kept["described"].get(name, ())) for name in ("rows", "ends")}
        made["described"] = _made(Described, kept["described"] | rows)
    return _made(ModelConfig, kept | made)


def _weights(rows: Iterable) -> tuple[tuple[str, Weight], ...]:
    """Return rows of paths and weights, whose shapes JSON has as lists."""
    return tuple((path, Weight(**row | {"shape": tuple(row["shape"])})) for path, row in rows)


def _made(part: type, kept: Any) -> Any:
    if not isinstance(kept, dict):
        raise ValueError(f"{json.dumps(kept):.40} is no {part.__name__}")
    fields = {f.name: f for f in dataclasses.fields(part)}
    if unknown := sorted(name for name in kept.keys() - fields if kept[name]):  # unset is not there
        raise ValueError(
            f"made by another version of llmpar: it has {', '.join(unknown)}; use that version"
        )
    if missing := [
        n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in kept
    ]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    immutable = lambda value: tuple(value) if isinstance(value, list) else value  # JSON has lists
    return part(**{name: immutable(value) for name, value in kept.items() if name in fields})


@dataclass(frozen=True)
class OptimizerConfig(CheckedFields):
    """The optimizer and its rate, which warms up linearly, then decays.

    Attributes:
        optimizer: those that have a name (a `Step` takes any of Optax). Muon leaves all but matrices to Adam.
        learning_rate: the highest.
        warmup: steps of linear warm-up.
        decay: after it the rate falls to a tenth along a cosine or a line, or stays.
        weight_decay: of matrices.
        clip: largest global norm of the gradient.
        local_steps: each rank of dp trains apart for so many steps (DiLoCo), and then an outer optimizer, SGD
            with Nesterov's momentum, takes the mean of what they moved the weights; 0: gradients are averaged
            in every step.
        fragments: each so many of the layers have their outer step at another time (Streaming DiLoCo).
        outer_rate: the outer optimizer's learning rate.
        outer_momentum: the outer optimizer's momentum.
    """

    optimizer: Literal["adamw", "adafactor", "muon", "sgd"] = "adamw"
    learning_rate: _Positive = 3e-3
    warmup: Count = 10
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: Rate = 0.1
    clip: _Positive = 1.0
    local_steps: Count = 0
    fragments: Size = 1
    outer_rate: _Positive = 0.7
    outer_momentum: Share = 0.9
