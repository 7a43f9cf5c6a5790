"""Plans for serving: tokens arrive a few at a time, and a cache of keys and values is cut over devices."""

import dataclasses
import functools
from dataclasses import dataclass

from llmpar.plan import checks
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import BATCH_AXES, Plan, Resolved

CACHE, LOGITS, CHOSEN = "cache l b t k h", "vocab b v -> data b v", "data s b n -> s b n"
"""The cache of keys and values, and the arrows of the logits and of the chosen tokens. The last
dim of these has the chosen token, the likeliest tokens, and the bits of their log-probabilities."""
BEST = 20
"""A step of serving returns at most this many likeliest tokens of a vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Serving(Resolved):
    """A plan for tokens that arrive a few at a time (`serving_plan`): no region cuts their positions by sp,
    which cuts those of the cache."""

    @functools.cached_property
    def regions(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Region to dim to the axes that cut it."""
        live, table = self.mesh.live, super().regions
        table = {name: {d: a for d, a in cuts.items() if d != "s"} for name, cuts in table.items()}
        return table | {"cache": {"b": table["data"]["b"], "t": live("sp"), "k": live("tp", "kv")}}

    @property
    def num_caches(self) -> int:
        """How many caches a layer has: two, of keys and of values, or one of latents, which are both."""
        return 1 if self.config.has_latent_attention else 2

    def cache(self, num_rows: int, length: int) -> tuple[int, ...]:
        """The shape of a cache. A rank of sp has its share of the positions, rounded up. Each copy of a KV
        head has its own cache, and each rank of tp its own copy of the latents."""
        config, mesh = self.config, self.mesh
        if len({(c.num_kv_heads, c.head_width, c.cache_width) for _, c in config.blocks}) > 1:
            raise ValueError(
                f"'{config.name}' has layers whose caches differ, and a cache here is alike in all; use"
                " another model"
            )
        positions, heads = -(-length // mesh.sp) * mesh.sp, max(config.num_kv_heads, mesh.tp)
        one = (
            (mesh.tp, config.cache_width)
            if config.has_latent_attention
            else (heads, config.head_width)
        )
        return config.num_layers, num_rows, positions, *one


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
        config = config.with_experts(capacity_factor=None)
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
    serving.check(num_rows, plan.mesh.sp)  # no region cuts positions: any multiple of sp does
    serving.cache(num_rows, length)  # refuses layers whose caches differ
    return serving
