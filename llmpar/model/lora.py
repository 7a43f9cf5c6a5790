"""Low-rank adapters (Hu et al. 2021): beside a frozen weight W two small trained ones, x W + (x A) B · scale.

The model's text knows one thing of them: `used_weights`, where a part's weights are needed. A weight with
adapters then multiplies itself (`Adapted.matmul`), wherever `par` multiplies.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from llmpar.parallel.float8 import Float8
from llmpar.parallel.modes import Solo
from llmpar.parallel.remat import PROJECTED


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A frozen weight W with its adapters A and B, as they are used; the scale is alpha / rank."""

    w: Any
    a: Any
    b: Any
    scale: float = field(metadata={"static": True})

    def matmul(self, x: Float[Array, "b s *inner"], **sharding: Any) -> Array:
        """Return x W + (x A) B · scale; W + A B, as large as W, is never made. Where the inner dims are cut,
        both terms are unfinished sums, and finished together."""
        num_inner = x.ndim - 2
        x_bsz = checkpoint_name(
            self.scale * jnp.tensordot(x, self.a, num_inner, **sharding), PROJECTED
        )
        return jnp.tensordot(x, self.w, num_inner, **sharding) + jnp.tensordot(
            x_bsz, self.b, 1, **sharding
        )


def used_weights(part: Any, par: Solo, *names: str) -> Iterator[Array | Adapted | Float8]:
    """Yield weights of a part of the model (`llama.Module`) as they are used: gathered, each with its
    adapters if it has any, or in float8."""
    lora = part.config.lora
    for name in names:
        w: Any = par.weight(part.params[name])
        if lora and f"lora.{name}_a" in part.params:
            a, b = (par.weight(part.params[f"lora.{name}_{x}"]) for x in "ab")
            w = Adapted(w, a, b, lora.scale)
        yield Float8(w) if par.plan.matmul_dtype == "float8" else w
