"""Plans for serving: tokens arrive a few at a time, and a cache of keys and values is cut over devices."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from llmpar.plan import checks
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import BATCH_AXES, Plan, Resolved

CACHE, LOGITS, CHOSEN = "cache l b t k h", "vocab b v -> data b v", "data s b n -> s b n"
"""The cache of keys and values, and the arrows of the logits and of the chosen tokens. The last
dim of these has the chosen token, the likeliest tokens, and the bits of their log-probabilities."""
BEST = 20
"""A step of serving returns at most this many likeliest tokens of a vocabulary."""


class Cache(NamedTuple):
    """One array of a cache: its kind of layers, its region and dims, its shape, and its dtype."""

    kind: int
    dims: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Serving(Resolved):
    """A plan for tokens that arrive a few at a time (`serving_plan`): no region cuts their positions by sp,
    which cuts those of the cache."""

    @functools.cached_property
    def regions(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Region to dim to the axes that cut it."""
        live, table = self.mesh.live, super().regions
        table = {name: {d: a for d, a in cuts.items() if d != "s"} for name, cuts in table.items()}
        return table | {
            "cache": {"b": table["data"]["b"], "t": live("sp"), "k": live("tp", "kv")},
            "state": {"b": table["data"]["b"], "n": live("tp", "kv"), "z": live("tp", "kv")},
        }

    def caches(self, num_rows: int, length: int) -> list[Cache]:
        """Return the arrays of a cache, each of all layers of a kind: keys and values, or latents, which are
        both. A rank of sp has its share of the positions, rounded up. Each copy of a KV head has its own
        cache, and each rank of tp its own copy of latents. A recurrent layer keeps the last inputs of its
        convolutions, side by side as a rank of tp has them, and its state; every rank of sp has both."""
        mesh, result = self.mesh, list[Cache]()
        positions = -(-length // mesh.sp) * mesh.sp
        for kind, (count, block) in enumerate(self.config.blocks):
            rows, n, w = (count, num_rows), block.num_heads, block.head_width
            if block.mixer == "recurrent":
                inputs = *rows, block.positions_before, block.convolved
                state = *rows, n, block.state_size // (n * w), w
                result.append(Cache(kind, "state l b t z", inputs, self.dtype))
                result.append(Cache(kind, "state l b n h u", state, "float32"))
                continue
            latent = block.has_latent_attention
            one = (mesh.tp, block.cache_width) if latent else (block.num_kv_heads * mesh.kv, w)
            kept = Cache(kind, CACHE, (*rows, positions, *one), self.dtype)
            result += [kept] if latent else [kept, kept]
        return result


def with_experts(config: ModelConfig, **fields: Any) -> ModelConfig:
    """Return the model with these fields of its experts, in every kind of layers."""
    experts = config.experts and dataclasses.replace(config.experts, **fields)
    kinds = tuple(with_experts(kind, **fields) for kind in config.kinds)
    return dataclasses.replace(config, experts=experts, kinds=kinds)


def serving_plan(
    plan: Plan, config: ModelConfig, num_rows: int, length: int, devices: str | None = None
) -> Serving:
    """Return a plan as `llmpar.serve` uses it, for ``num_rows`` requests at a time; its mesh, ZeRO stage and
    dtype count. The model's experts drop no token. Refuses what cannot be cut, before any weight is made."""
    if plan.mesh.pp > 1:
        raise ValueError(
            f"generation has no pipeline, and mesh '{plan.mesh}' has pp={plan.mesh.pp};"
            " use dp, fsdp, ep, sp, tp"
        )
    if length < 1:
        raise ValueError(f"a cache of {length} positions holds nothing; use 1 or more")
    scalings = [block.rope_scaling for _, block in config.blocks if block.rope_scaling]
    shortest = min((x.original_context for x in scalings if x.kind == "longrope"), default=length)
    if length > shortest:
        raise ValueError(
            f"'{config.name}' rotates texts of more than {shortest:,} tokens by other factors (longrope), and"
            f" keys in a cache keep theirs; use at most {shortest:,} positions, not {length:,}"
        )
    if config.experts:
        config = with_experts(config, capacity_factor=None)
    resolved = Plan(
        plan.mesh,
        zero=plan.zero,
        dtype=plan.dtype,
        zero_axes="fsdp,ep",
        sequence_order="contiguous",
    ).resolve(config, devices)
    fields = (field.name for field in dataclasses.fields(resolved))
    serving = Serving(**{name: getattr(resolved, name) for name in fields})
    checks.Cut("slots", num_rows, BATCH_AXES).check(serving)
    # no region cuts positions: any multiple of sp does, if a convolution finds its positions in a part
    before = max(block.positions_before for _, block in config.blocks)
    serving.check(num_rows, plan.mesh.sp * max(1, before))
    return serving
