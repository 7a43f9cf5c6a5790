"""Model sizes: the configuration of a Llama-family model, its presets, and its exact number of parameters."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import pathlib
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from llmpar.files import read_json


class Allowed(NamedTuple):
    """What a field may be: a kind of value, from the least to the most; None if that says something too."""

    kind: type
    least: float = -math.inf
    most: float = math.inf
    none: bool = False

    def check(self, name: str, value: Any) -> None:
        """Refuse what is not allowed."""
        kinds = {int: numbers.Integral, float: numbers.Real}.get(self.kind, self.kind)
        fine = isinstance(value, kinds) and isinstance(value, bool) == (self.kind is bool)
        if (
            value is None
            and self.none
            or fine
            and (self.kind not in (int, float) or self.least <= value <= self.most)
        ):
            return
        what = {
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            list: "a list",
            dict: "an object",
        }
        bounds = [f"from {self.least:,}"] * (self.least > -math.inf) + [f"to {self.most:,}"] * (
            self.most < math.inf
        )
        words = " ".join([what.get(self.kind, "a text"), *bounds])
        raise ValueError(
            f"{name} is {json.dumps(value, default=repr):.60}; use {words}" + " (or null)" * self.none
        )


_SIZE, _COUNT, _RATE = Allowed(int, 1, 1 << 24), Allowed(int, 0, 1 << 24), Allowed(float, 0, 1e9)
_SOME_RATE = _RATE._replace(none=True)
ALLOWED = {
    "vocab_size": _SIZE,
    "width": _SIZE,
    "num_layers": _SIZE,
    "num_heads": _SIZE,
    "num_kv_heads": _SIZE,
    "head_width": _SIZE,
    "ffn_width": _SIZE,
    "rope_theta": Allowed(float, 1, 1e15),
    "norm_eps": Allowed(float, 0, 1),
    "init_scale": _RATE,
    "tied": Allowed(bool),
    "qkv_bias": Allowed(bool),
    "qk_norm": Allowed(bool),
    "window": Allowed(int, 1, none=True),
    # RopeScaling
    "factor": Allowed(float, 1, 1e9),
    "low_freq_factor": _RATE,
    "high_freq_factor": _RATE,
    "original_context": Allowed(int, 1),
    # ExpertConfig
    "num_experts": _SIZE,
    "top_k": _SIZE,
    "num_shared": _COUNT,
    "renormalise": Allowed(bool),
    "scale": _RATE,
    "bias_rate": _SOME_RATE,
    "num_groups": _SIZE,
    "top_groups": _SIZE,
    "aux_loss": _RATE,
    "z_loss": _RATE,
    "capacity_factor": Allowed(float, 1e-9, 1e9, none=True),
    "dense_layers": _COUNT,
    "dense_width": _COUNT,
    # LatentAttention
    "q_rank": _SIZE,
    "kv_rank": _SIZE,
    "rope_width": _SIZE,
    "value_width": _SIZE,
}
"""What the fields of the configurations below may be."""


def _check(config) -> None:
    for field in dataclasses.fields(config):
        if field.name in ALLOWED:
            ALLOWED[field.name].check(field.name, getattr(config, field.name))


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of low rotary frequencies."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self):
        _check(self)
        if self.low_freq_factor >= self.high_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise ValueError(
                f"low_freq_factor {low} is not below high_freq_factor {high}; Llama 3.1 has 1 and 4"
            )


@dataclass(frozen=True)
class ExpertConfig:
    """A mixture of experts in every layer. `ModelConfig.ffn_width` is the width of one expert.

    Attributes:
        num_experts, top_k: experts of a layer, and how many of them a token visits (the field's E and k).
        num_shared: experts that every token visits besides.
        score: how the router's logits become affinities: a ``softmax`` over all experts, or a ``sigmoid`` of
            each (DeepSeek-V3).
        renormalise: the chosen experts' weights add up to one (Mixtral: the same as a softmax over the chosen
            logits).
        scale: factor on the weights of the chosen.
        bias_rate: None, or the step of a bias that takes part in choosing but not in weighing, and that rises
            for experts with less than the mean load and falls for the others (Wang et al. 2024, balancing
            without a loss).
        num_groups, top_groups: node-limited routing: only the best groups of experts are open to a token, a
            group being worth the sum of its two best affinities (DeepSeek-V3 2024, section 2.1.2).
        aux_loss, z_loss: coefficients of the load-balancing loss (`moe.route`) and of the router's z loss.
        capacity_factor: None drops no token; else an expert takes this times its even share of each piece of
            a row that a device holds, the first to come, and the others go without it.
        dense_layers, dense_width: the first layers with an ordinary feed-forward of that width.
    """

    num_experts: int
    top_k: int
    num_shared: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    bias_rate: float | None = None
    num_groups: int = 1
    top_groups: int = 1
    aux_loss: float = 0.0
    z_loss: float = 0.0
    capacity_factor: float | None = None
    dense_layers: int = 0
    dense_width: int = 0

    def __post_init__(self):
        _check(self)
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"a token cannot visit {self.top_k} of {self.num_experts} experts; choose from 1 to"
                f" {self.num_experts}"
            )
        if self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"{self.num_experts} experts cannot be routed in {self.top_groups} of {self.num_groups} equal"
                " groups"
            )
        if self.top_k > self.num_experts // self.num_groups * self.top_groups:
            raise ValueError(
                f"{self.top_groups} of {self.num_groups} groups hold"
                f" {self.num_experts // self.num_groups * self.top_groups} experts, fewer than the"
                f" {self.top_k} that a token visits; choose more groups"
            )

    def capacity(self, tokens: int) -> int:
        """How many of a piece's ``tokens`` an expert takes (Fedus et al. 2021, eq. 3, with k choices a
        token)."""
        if self.capacity_factor is None:
            return tokens
        return min(tokens, math.ceil(round(self.top_k * tokens * self.capacity_factor / self.num_experts, 9)))

    def slots(self, tokens: int, pieces: int, ranks: int) -> int:
        """How many slots a device with ``tokens`` tokens in ``pieces`` pieces keeps for each of ``ranks``: a
        token travels to a rank once, however many of its experts are there."""
        return min(tokens, self._most(tokens, pieces) * (self.num_experts // ranks))

    def full_share(self, tokens: int, ranks: int) -> float:
        """The share of its `slots` for a rank that a device with ``tokens`` tokens fills, where every choice
        is as likely: those tokens have an expert there that do not have all k elsewhere."""
        elsewhere = self.num_experts - self.num_experts // ranks
        come = tokens * (1 - math.comb(elsewhere, self.top_k) / math.comb(self.num_experts, self.top_k))
        return min(1.0, come / self.slots(tokens, 1, ranks))

    def blocks(
        self, tokens: int, pieces: int, ranks: int, fewest: int = 4, largest: int = 32
    ) -> tuple[int, int]:
        """(blocks, rows of a block) in which one of ``ranks``, each with so many tokens, lays out what its
        experts get.

        Enough for the worst case. The rows of an expert fill whole blocks of ``fewest`` to ``largest`` rows,
        an eighth of an even share or less, so that about a sixteenth is padding, and less where rows are
        many.
        """
        block, here, most = fewest, self.num_experts // ranks, ranks * self._most(tokens, pieces)
        while block < largest and 16 * block * self.num_experts <= ranks * tokens * self.top_k:
            block *= 2
        rows = min(ranks * tokens * min(self.top_k, here), most * here)
        return min((rows + here * (block - 1)) // block, here * -(-most // block)), block

    def _most(self, tokens: int, pieces: int) -> int:
        """How many of a device's tokens one expert takes at most."""
        return pieces * self.capacity(tokens // pieces)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2 2024, section 2.1): counted, but not implemented."""

    q_rank: int
    kv_rank: int
    rope_width: int
    value_width: int

    def __post_init__(self):
        _check(self)


@dataclass(frozen=True)
class Weight:
    """One weight of the model: its region and dims, its shape, and how it starts: normally distributed with
    standard deviation ``std``, or where that is 0 equal to ``fill`` everywhere."""

    dims: str
    shape: tuple[int, ...]
    std: float = 0.0
    fill: float = 1.0

    @property
    def is_vector(self) -> bool:
        """Whether it is a norm's scale or a bias: it scales or shifts, and multiplies no matrix."""
        return self.dims.partition(" ")[2].replace(" ", "").strip("l") in ("d", "h", "nh", "kh", "e")


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-family model: grouped-query attention, RoPE, SwiGLU, RMSNorm; Qwen's biases and norms by
    choice.

    ``window`` is Mistral's sliding window (None: full causal attention). ``init_scale`` is the standard
    deviation of fresh weights. With ``experts`` every feed-forward is a mixture of them.
    """

    name: str
    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    ffn_width: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    init_scale: float = 0.02
    experts: ExpertConfig | None = None
    latent: LatentAttention | None = None

    def __post_init__(self):
        _check(self)
        if self.head_width % 2:
            raise ValueError(
                f"heads are {self.head_width} wide, but rotary embedding turns pairs; use an even head width"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly; "
                f"use a number of KV heads that divides {self.num_heads}"
            )

    def weights(self) -> dict[str, Weight]:
        """Every weight by its path. The blocks' weights are stacked: ``l`` leads their dims. Raises
        ValueError for a model that is counted but not implemented.

        >>> preset("tiny").weights()["blocks.ffn.gate"]
        Weight(dims='ffn l d m', shape=(4, 64, 128), std=0.02, fill=1.0)
        """
        if self.latent or self.experts and self.experts.dense_layers:
            why = "latent attention and leading dense layers are counted but not implemented"
            raise ValueError(
                f"'{self.name}' cannot run here: {why}; use mixtral-8x7b or qwen3-30b-a3b, or a dense model"
            )
        return self._weights()

    def _weights(self) -> dict[str, Weight]:
        v, d, std = self.vocab_size, self.width, self.init_scale
        found = {"embedding": Weight("vocab v d", (v, d), std), "norm.scale": Weight("stream d", (d,))}
        if not self.tied:
            found["head"] = Weight("vocab v d", (v, d), std)
        for path, weight in self.block_weights().items():
            dims, shape = weight.dims.replace(" ", " l ", 1), (self.num_layers, *weight.shape)
            found["blocks." + path] = dataclasses.replace(weight, dims=dims, shape=shape)
        return found

    def block_weights(self) -> dict[str, Weight]:
        """The weights of one block, by their paths in it. What ends in the residual stream starts smaller, by
        the root of twice the number of layers (Radford et al. 2019, section 2.3)."""
        d, n, k, h = self.width, self.num_heads, self.num_kv_heads, self.head_width
        std, last = self.init_scale, self.init_scale / (2 * self.num_layers) ** 0.5
        found = {
            "attention_norm.scale": Weight("stream d", (d,)),
            "attention.q": Weight("attention d n h", (d, n, h), std),
            "attention.k": Weight("attention d k h", (d, k, h), std),
            "attention.v": Weight("attention d k h", (d, k, h), std),
            "attention.o": Weight("attention n h d", (n, h, d), last),
            "ffn_norm.scale": Weight("stream d", (d,)),
        }
        if self.qkv_bias:
            for name, dim, heads in (("q", "n", n), ("k", "k", k), ("v", "k", k)):
                found[f"attention.{name}_bias"] = Weight(f"attention {dim} h", (heads, h), fill=0.0)
        if self.qk_norm:
            found |= {f"attention.{x}_norm.scale": Weight("attention h", (h,)) for x in "qk"}

        def feed_forward(path: str, region: str, width: int, *experts: int) -> None:
            e = "e " * len(experts)
            for name in ("gate", "up"):
                found[f"{path}.{name}"] = Weight(f"{region} {e}d m", (*experts, d, width), std)
            found[f"{path}.down"] = Weight(f"{region} {e}m d", (*experts, width, d), last)

        if experts := self.experts:
            found["experts.router"] = Weight("stream d e", (d, experts.num_experts), std)
            if experts.bias_rate is not None:
                found["experts.bias"] = Weight("stream e", (experts.num_experts,), fill=0.0)
            feed_forward("experts", "experts", self.ffn_width, experts.num_experts)
            if experts.num_shared:
                feed_forward("experts.shared", "ffn", self.ffn_width * experts.num_shared)
        else:
            feed_forward("ffn", "ffn", self.ffn_width)
        return found

    @property
    def num_params(self) -> int:
        """The exact number of parameters; tied embeddings are counted once."""
        sizes = {path: math.prod(weight.shape) for path, weight in self._weights().items()}
        layers, how = self.num_layers, self.experts
        if latent := self.latent:
            sizes = {path: size for path, size in sizes.items() if not path.startswith("blocks.attention.")}
            query, width, n = self.head_width, self.width, self.num_heads
            down = (
                width * (latent.q_rank + latent.kv_rank + latent.rope_width) + latent.q_rank + latent.kv_rank
            )
            up = n * (
                latent.q_rank * query + latent.kv_rank * (query - latent.rope_width + latent.value_width)
            )
            sizes["attention"] = layers * (down + up + n * latent.value_width * width)
        if how and how.dense_layers:
            sparse = sum(size for path, size in sizes.items() if path.startswith("blocks.experts."))
            sizes["dense"] = how.dense_layers * (3 * self.width * how.dense_width - sparse // layers)
        return sum(sizes.values())

    @property
    def active_params(self) -> int:
        """Parameters that take part for one token: all but those of the experts that it does not visit."""
        how = self.experts or ExpertConfig(1, 1)
        idle = (how.num_experts - how.top_k) * 3 * self.width * self.ffn_width
        return self.num_params - (self.num_layers - how.dense_layers) * idle


def _model(name, vocab, width, layers, heads, kv_heads, ffn, head_width=None, **more) -> ModelConfig:
    return ModelConfig(name, vocab, width, layers, heads, kv_heads, head_width or width // heads, ffn, **more)


_LLAMA3 = dict(rope_theta=500_000.0)
_LLAMA31 = dict(rope_theta=500_000.0, rope_scaling=RopeScaling())
_LLAMA32 = dict(rope_theta=500_000.0, rope_scaling=RopeScaling(factor=32.0), tied=True)
_QWEN2 = dict(rope_theta=1e6, norm_eps=1e-6, qkv_bias=True)
_QWEN3 = dict(rope_theta=1e6, norm_eps=1e-6, qk_norm=True, head_width=128)
_MIXTRAL = dict(rope_theta=1e6, experts=ExpertConfig(8, 2, aux_loss=0.02))
_DEEPSEEK = dict(
    head_width=192,
    norm_eps=1e-6,
    latent=LatentAttention(1536, 512, 64, 128),
    experts=ExpertConfig(
        256,
        8,
        num_shared=1,
        score="sigmoid",
        scale=2.5,
        bias_rate=0.001,
        num_groups=8,
        top_groups=4,
        aux_loss=1e-4,
        dense_layers=3,
        dense_width=18_432,
    ),
)

PRESETS: dict[str, ModelConfig] = {
    c.name: c
    for c in (
        # sizes for lessons: every dim divides by 8, so that any mesh of 8 devices can be tried
        _model("tiny", 264, 64, 4, 16, 8, 128),
        _model("tiny-tied", 264, 64, 4, 8, 8, 128, tied=True),
        _model("tiny-moe", 264, 64, 4, 16, 8, 64, experts=ExpertConfig(8, 2, aux_loss=0.01, z_loss=0.001)),
        _model("small", 4096, 256, 8, 8, 8, 768),
        _model("gpt2-scale", 50_304, 768, 12, 12, 12, 2048, tied=True),
        _model("llama2-7b", 32_000, 4096, 32, 32, 32, 11_008),
        _model("llama2-13b", 32_000, 5120, 40, 40, 40, 13_824),
        _model("llama2-70b", 32_000, 8192, 80, 64, 8, 28_672),
        _model("llama3-8b", 128_256, 4096, 32, 32, 8, 14_336, **_LLAMA3),
        _model("llama3-70b", 128_256, 8192, 80, 64, 8, 28_672, **_LLAMA3),
        _model("llama3.1-8b", 128_256, 4096, 32, 32, 8, 14_336, **_LLAMA31),
        _model("llama3.1-70b", 128_256, 8192, 80, 64, 8, 28_672, **_LLAMA31),
        _model("llama3.1-405b", 128_256, 16_384, 126, 128, 8, 53_248, **_LLAMA31),
        _model("llama3.2-1b", 128_256, 2048, 16, 32, 8, 8192, **_LLAMA32),
        _model("llama3.2-3b", 128_256, 3072, 28, 24, 8, 8192, **_LLAMA32),
        _model("mistral-7b", 32_000, 4096, 32, 32, 8, 14_336, window=4096),
        _model("qwen2.5-0.5b", 151_936, 896, 24, 14, 2, 4864, tied=True, **_QWEN2),
        _model("qwen2.5-1.5b", 151_936, 1536, 28, 12, 2, 8960, tied=True, **_QWEN2),
        _model("qwen2.5-3b", 151_936, 2048, 36, 16, 2, 11_008, tied=True, **_QWEN2),
        _model("qwen2.5-7b", 152_064, 3584, 28, 28, 4, 18_944, **_QWEN2),
        _model("qwen2.5-14b", 152_064, 5120, 48, 40, 8, 13_824, **_QWEN2),
        _model("qwen2.5-32b", 152_064, 5120, 64, 40, 8, 27_648, **_QWEN2),
        _model("qwen2.5-72b", 152_064, 8192, 80, 64, 8, 29_568, **_QWEN2),
        _model("qwen3-0.6b", 151_936, 1024, 28, 16, 8, 3072, tied=True, **_QWEN3),
        _model("qwen3-1.7b", 151_936, 2048, 28, 16, 8, 6144, tied=True, **_QWEN3),
        _model("qwen3-4b", 151_936, 2560, 36, 32, 8, 9728, tied=True, **_QWEN3),
        _model("qwen3-8b", 151_936, 4096, 36, 32, 8, 12_288, **_QWEN3),
        _model("qwen3-14b", 151_936, 5120, 40, 40, 8, 17_408, **_QWEN3),
        _model("qwen3-32b", 151_936, 5120, 64, 64, 8, 25_600, **_QWEN3),
        _model(
            "qwen3-30b-a3b",
            151_936,
            2048,
            48,
            32,
            4,
            768,
            experts=ExpertConfig(128, 8, aux_loss=0.001),
            **_QWEN3,
        ),
        _model("mixtral-8x7b", 32_000, 4096, 32, 32, 8, 14_336, **_MIXTRAL),
        _model("mixtral-8x22b", 32_000, 6144, 56, 48, 8, 16_384, **_MIXTRAL),
        _model("deepseek-v3", 129_280, 7168, 61, 128, 128, 2048, **_DEEPSEEK),
    )
}
"""Public models as their authors' published configurations give them (model cards of Meta, Mistral AI, Qwen
and DeepSeek, 2023 to 2025)."""


def preset(name: str) -> ModelConfig:
    """A preset by name, or a Hugging Face ``config.json`` by path."""
    if name.endswith(".json"):
        return from_hugging_face(name)
    if name not in PRESETS:
        raise ValueError(
            f"unknown model '{name}'; the presets are {', '.join(PRESETS)}, or give the path of a config.json"
        )
    return PRESETS[name]


THEIRS = {
    "hidden_size": "width", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
    "head_dim": "head_width", "num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_width",
    "moe_intermediate_size": "ffn_width", "rms_norm_eps": "norm_eps", "tie_word_embeddings": "tied",
    "initializer_range": "init_scale", "sliding_window": "window", "attention_bias": "qkv_bias",
    "mlp_bias": "qkv_bias", "original_max_position_embeddings": "original_context",
    "num_local_experts": "num_experts", "num_experts_per_tok": "top_k", "norm_topk_prob": "renormalise",
    "router_aux_loss_coef": "aux_loss", "router_z_loss_coef": "z_loss",
    "expert_capacity_factor": "capacity_factor",
}  # fmt: skip
"""What Hugging Face calls our fields."""
OPTIONAL = {"num_key_value_heads", "head_dim", "num_experts", "num_local_experts"}
"""Fields of ours that may be null there."""
THEIR_OWN = {
    "model_type": Allowed(str), "hidden_act": Allowed(str), "rope_scaling": Allowed(dict, none=True),
    "rope_parameters": Allowed(dict, none=True), "rope_type": Allowed(str), "type": Allowed(str),
    "partial_rotary_factor": Allowed(float, 1, 1, none=True),
    "quantization_config": Allowed(dict, none=True), "use_sliding_window": Allowed(bool),
    "max_window_layers": Allowed(int, 0), "layer_types": Allowed(list, none=True),
    "decoder_sparse_step": _SIZE, "mlp_only_layers": Allowed(list, none=True),
}  # fmt: skip
"""What fields that only they have may be."""


class _Card(dict):
    """Entries of a ``config.json``. Asking for one that is missing, or not what it may be, is refused by name
    (`get` asks without need)."""

    def __init__(self, entries: dict, path: str):
        super().__init__(entries)
        self.path = path

    def __getitem__(self, key: str):
        if key not in self:
            raise ValueError(f"'{self.path}' lacks '{key}', which its model_type needs")
        allowed = THEIR_OWN[key] if key in THEIR_OWN else ALLOWED[THEIRS.get(key, key)]
        value = super().__getitem__(key)
        allowed._replace(none=allowed.none or key in OPTIONAL).check(f"{key} in '{self.path}'", value)
        return value

    def get(self, key: str, default=None):
        """The entry if it is there."""
        return self[key] if key in self else default


def from_hugging_face(path: str) -> ModelConfig:
    """Read a Llama, Mistral, Mixtral, Qwen2, Qwen3 or Qwen3-MoE ``config.json``; refuse what the model cannot
    do, naming the key."""
    raw = read_json(path, "model configuration", object_hook=lambda entries: _Card(entries, path=path))
    kind = raw.get("model_type")
    kinds = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
    if kind not in kinds:
        raise ValueError(f"model_type '{kind}' in '{path}' is not one of {', '.join(kinds)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act '{raw['hidden_act']}' in '{path}' is not implemented; silu is")
    if raw.get("mlp_bias") or (kind != "qwen2" and raw.get("attention_bias")):
        raise ValueError(
            f"'{path}' asks for biases in the feed-forward or the output projection, which are not"
            " implemented"
        )
    if raw.get("quantization_config") is not None:
        raise ValueError(
            f"'{path}' is of quantized weights (quantization_config), which are not read; use the original"
            " model"
        )
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type", "default")
    if rope_type not in ("default", "llama3"):
        raise ValueError(f"rope type '{rope_type}' in '{path}' is not implemented; default and llama3 are")
    for entries in (raw, rope):
        entries.get("partial_rotary_factor")  # checked by being asked for: only whole heads are turned
    scaling = None
    if rope_type == "llama3":
        scaling = RopeScaling(
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
    ours, num_layers = kind in ("mistral", "mixtral"), raw["num_hidden_layers"]
    window = raw.get("sliding_window") if ours or raw.get("use_sliding_window") else None
    if window and not ours:  # Qwen: only layers from max_window_layers (28 where unsaid) on have the window
        sliding = [t == "sliding_attention" for t in raw.get("layer_types") or []]
        sliding = sliding or [i >= raw.get("max_window_layers", 28) for i in range(num_layers)]
        if any(sliding) and not all(sliding):
            raise ValueError(
                f"'{path}' has a window in {sum(sliding)} of {len(sliding)} layers; use one in all or none"
            )
        window = window if any(sliding) else None
    if kind == "qwen3_moe" and (raw.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers")):
        raise ValueError(
            f"'{path}' has layers without experts (decoder_sparse_step, mlp_only_layers); use experts in all"
        )
    experts = None
    if kind in ("mixtral", "qwen3_moe"):
        experts = ExpertConfig(
            num_experts=raw.get("num_experts") or raw["num_local_experts"],
            top_k=raw["num_experts_per_tok"],
            renormalise=kind == "mixtral" or raw.get("norm_topk_prob", False),
            aux_loss=raw.get("router_aux_loss_coef", 0.001),
            z_loss=raw.get("router_z_loss_coef", 0.0),
            capacity_factor=raw.get("expert_capacity_factor"),
        )
    width, heads, head_width = raw["hidden_size"], raw["num_attention_heads"], raw.get("head_dim")
    if head_width is None and width % heads:
        raise ValueError(
            f"hidden_size {width} in '{path}' is no multiple of its {heads} heads, and no head_dim is given"
        )
    return ModelConfig(
        name=pathlib.Path(path).parent.name or kind,
        vocab_size=raw["vocab_size"],
        width=width,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_width=head_width or width // heads,
        ffn_width=raw["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"],
        rope_theta=rope.get("rope_theta") or raw.get("rope_theta", 10_000.0),
        rope_scaling=scaling,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tied=raw.get("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2",
        qk_norm=kind.startswith("qwen3"),
        experts=experts,
        window=window,
        init_scale=raw.get("initializer_range", 0.02),
    )


def from_dict(kept: dict[str, Any]) -> ModelConfig:
    """The configuration that `dataclasses.asdict` made plain, as checkpoints keep it."""
    parts = {"rope_scaling": RopeScaling, "experts": ExpertConfig, "latent": LatentAttention}
    return ModelConfig(**kept | {name: make(**kept[name]) for name, make in parts.items() if kept.get(name)})


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its rate, which warms up linearly, then falls along a cosine to a tenth at the last
    step.

    Attributes:
        optimizer: Muon takes the matrices and leaves the rest to Adam.
        learning_rate: the highest.
        warmup: steps of linear warm-up.
        weight_decay: of matrices.
        clip: largest global norm of the gradient.
    """

    # any Optax optimizer fits a `Step`; these four have a name
    optimizer: Literal["adamw", "adafactor", "muon", "sgd"] = "adamw"
    learning_rate: float = 3e-3
    warmup: int = 10
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self):
        if not (0 < self.learning_rate < math.inf and self.clip > 0):
            raise ValueError(
                f"learning rate {self.learning_rate}, clip {self.clip}: both must be positive numbers"
            )
        if not (self.warmup >= 0 and 0 <= self.weight_decay < math.inf):
            raise ValueError(f"warmup {self.warmup}, weight decay {self.weight_decay}: use 0 or more")


def describe(config: ModelConfig) -> dict:
    """The configuration as plain data, with its number of parameters."""
    return dataclasses.asdict(config) | {"params": config.num_params, "active_params": config.active_params}
