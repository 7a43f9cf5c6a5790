"""Low-rank adapters (Hu et al. 2021): beside a frozen weight W two small trained ones, x W + (x A) B · scale.

The model's text knows two things of them: `adapt`, where a part is made, and `used_weights`, where its
weights are needed. A weight with adapters then multiplies itself (`Adapted.matmul`), wherever `par`
multiplies.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from llmpar.parallel.collective_matmul import matmul
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
        x_bsz = checkpoint_name(self.scale * matmul(x, self.a, **sharding), PROJECTED)
        return matmul(x, self.w, **sharding) + matmul(x_bsz, self.b, **sharding)


def adapt(part: Any, params: dict[str, nnx.Param], path: str) -> None:
    """Give the part of the model at a path its adapters, if it has any."""
    under = f"{path}.lora."
    own = {name: weight for name, weight in params.items() if name.startswith(under)}
    if own:
        part.lora = nnx.Dict({name.removeprefix(under): weight for name, weight in own.items()})


def used_weights(part: Any, par: Solo, *names: str) -> Iterator[Array | Adapted | Float8]:
    """Yield weights of a part as they are used, in float8 if the plan says so, each with its adapters if it
    has any, which are not."""
    adapters = getattr(part, "lora", {})
    for name in names:
        param = getattr(part, name)
        w: Any = par.weight(param)
        w = Float8(w, param.dims, par) if par.plan.matmul_dtype == "float8" else w
        if f"{name}_a" in adapters:
            a, b = (par.weight(adapters[f"{name}_{x}"]) for x in "ab")
            w = Adapted(w, a, b, part.config.lora.scale)
        yield w
