"""Rotary position embeddings (Su et al. 2021): their frequencies, tables of positions, and the rotation."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from llmpar.plan.model_config import ModelConfig

# Cosines and sines for each of p positions and each pair of a head's numbers.
Rope = tuple[Float[Array, "b p 1 half"], Float[Array, "b p 1 half"]]


def rope_table(
    config: ModelConfig, positions_bp: Int[Array, "b p"], of_rows_bs: Int[Array, "b s"] | None
) -> Rope:
    """Return cosines and sines of the rotary embedding at true positions (Su et al. 2021). What else depends
    on a query's position is in them: layers that do not rotate multiply their queries alone. The positions of
    whole rows decide between LongRoPE's factors; None: all rows are short."""
    frequencies = jnp.asarray(rope_frequencies(config), jnp.float32)[None, None]
    scaling = config.rope_scaling if config.variant.rope != "none" else None
    if scaling and config.has_long_rope and of_rows_bs is not None:
        of_long = jnp.asarray(rope_frequencies(config, is_long=True), jnp.float32)
        is_long_b11 = (of_rows_bs.max(1) >= scaling.original_context)[:, None, None]
        frequencies = jnp.where(is_long_b11, of_long, frequencies)
    angles = positions_bp[..., None].astype(jnp.float32) * frequencies
    factor = jnp.asarray(scaling.attention_factor if scaling else 1.0, jnp.float32)
    if growth := config.variant.query_scale:
        times = jnp.floor((positions_bp + 1).astype(jnp.float32) / config.variant.query_every)
        factor = 1 + growth * jnp.log1p(times)[:, :, None, None]
    return factor * jnp.cos(angles)[:, :, None], factor * jnp.sin(angles)[:, :, None]


def rope_frequencies(config: ModelConfig, is_long: bool = False) -> Float[np.ndarray, " half"]:
    """Return radians per position of each pair, with the scaling that is set. Llama 3.1's keeps a frequency
    whose wavelength is at most original_context / high_freq_factor; divides one whose wavelength is at least
    original_context / low_freq_factor by ``factor``; and blends the two between them (reference
    configuration, 2024). YaRN blends linearly in the pair's number (Peng et al. 2023, section 3.2).
    LongRoPE's are those of short rows, or with ``is_long`` of long ones."""
    width = config.variant.rope_width or config.head_width
    frequency = config.rope_theta ** (-np.arange(0, width, 2) / width)
    scaling = config.rope_scaling
    if config.variant.rope == "none":
        return 0 * frequency
    if scaling is None:
        return frequency
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    match scaling.kind:
        case "linear":
            return frequency / scaling.factor
        case "longrope":
            return frequency / np.array(scaling.long_factors if is_long else scaling.short_factors)
        case "llama3":
            num_turns = scaling.original_context * frequency / (2 * np.pi)
            blend = np.clip((num_turns - low) / max(high - low, 1e-9), 0, 1)
            return frequency * (blend + (1 - blend) / scaling.factor)
    # YaRN: the pairs that make so many turns in the original context
    pair_of = lambda turns: (
        width
        * np.log(scaling.original_context / (turns * 2 * np.pi))
        / (2 * np.log(config.rope_theta))
    )
    ends = np.array([pair_of(high), pair_of(low)])
    if scaling.truncate:
        ends = np.array([np.floor(ends[0]), np.ceil(ends[1])])
    first, last = max(ends[0], 0), min(ends[1], width - 1)
    stretched = np.clip((np.arange(width // 2) - first) / max(last - first, 1e-3), 0, 1)
    return frequency * (1 - stretched + stretched / scaling.factor)


def rotate(
    x: Float[Array, "b s heads h"], rope: Rope, pairs: str = "halves"
) -> Float[Array, "b s heads h"]:
    """Rotate the pairs of each head by their angles, in float32: (i, i + h/2), Hugging Face's order, or
    ``neighbours``. Where the table is narrower than a head, its first numbers alone."""
    cos, sin = rope
    width = 2 * cos.shape[-1]
    first, rest = x[..., :width].astype(jnp.float32), x[..., width:]
    if pairs == "neighbours":
        a, b = first[..., ::2], first[..., 1::2]
    else:
        a, b = jnp.split(first, 2, axis=-1)
    turned = [a * cos - b * sin, b * cos + a * sin]
    if pairs == "neighbours":
        y = jnp.stack(turned, axis=-1).reshape(first.shape)
    else:
        y = jnp.concatenate(turned, axis=-1)
    return (
        jnp.concatenate([y.astype(x.dtype), rest], axis=-1) if rest.shape[-1] else y.astype(x.dtype)
    )
