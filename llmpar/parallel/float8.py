"""Matmuls in 8 bits (`Plan.matmul_dtype`): both operands are rounded to float8, their products are summed in
float32.

    y  = e4m3(x) e4m3(w)        forward
    dx = e5m2(dy) e4m3(w)ᵀ      backward: gradients take the format with more range and one bit less
    dw = e4m3(x)ᵀ e5m2(dy)

(Micikevicius et al. 2022, sections 3 and 4.) An operand has one scale, from its largest magnitude at this
moment (*current scaling*). Where a mesh cuts the operand each device takes that of its own part, so nothing
is sent. Scales are powers of 2, so they move exponents and round nothing: parts with scales of their own are
rounded as the whole is, but for numbers some 2^14 times smaller than the largest (e4m3). Terms of a sum are
not: ranks of tp that have the same KV head (`Plan`: kv) or latent each round their term of its gradient, and
so do ranks of sp that gathered latents.

Of a dot of float8 arrays and its scales XLA makes one call of cuBLASLt, or one kernel of Triton, for GPUs
that multiply 8 bits (Ada, Hopper and later). Operands that are converted back before the dot would not do:
XLA leaves both conversions out. Simulated devices convert them in the dot, which is exact.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from llmpar.parallel.collectives import vary_alike

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
"""The formats of values and weights, and of incoming gradients."""
_EXPONENT, _NEXT = 0x7F80_0000, 0x0080_0000
"""A mask of a float32's exponent, and 1 in that exponent, which doubles a power of 2."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Float8:
    """A weight, as it is used, that multiplies in float8 (`collective_matmul.matmul` calls it). ``dims`` are
    its region and dims; ``par`` is the mode."""

    w: Any
    dims: str = field(metadata={"static": True})
    par: Any = field(metadata={"static": True})

    def matmul(self, x: Float[Array, "b s *inner"], **sharding: Any) -> Array:
        """Return ``x`` times the weight, in the dtype of ``x``. Where arrays are global this is an island,
        so each device takes the scales of its own blocks; ``sharding`` is that of the island's result."""
        if self.par.island is self.par:
            return _matmul_of_blocks(x, self.w)
        region, *letters = self.dims.split()
        inner, outer = letters[: x.ndim - 2], letters[x.ndim - 2 :]
        given = " ".join([region, "b s", *inner])
        result = " ".join([region, "b s", *outer, *(f"+{letter}" for letter in inner)])
        return self.par.local(_matmul_of_blocks, [given, self.dims], result)(x, self.w)


def _matmul_of_blocks(x: Array, w: Array) -> Array:
    # a custom gradient must have the type of its argument, so both vary over the same axes
    return matmul_in_float8(*vary_alike((x, w)))


class Scaled(NamedTuple):
    """A value, as float8 numbers times a scale."""

    values: Array
    scale: Float[Array, ""]


def narrowed(x: Array, dtype: Any) -> Scaled:
    """Round ``x`` to a float8 ``dtype`` with one scale: a power of 2 that brings its largest magnitude into
    the upper half of the range of the dtype. One inf or NaN makes all of the result NaN."""
    least = jnp.abs(x).max().astype(jnp.float32) / float(jnp.finfo(dtype).max)
    exponent = lax.bitcast_convert_type(least, jnp.int32) & _EXPONENT
    scale = lax.bitcast_convert_type(exponent + _NEXT, jnp.float32).astype(x.dtype)
    return Scaled((x / scale).astype(dtype), scale)


def scaled_product(
    x: Scaled,
    y: Scaled,
    of_x: Iterable[int],
    of_y: Iterable[int],
    batch: Sequence[int] = (),
    dtype: Any = None,
) -> Array:
    """Multiply, and sum over these dims, for each index of the dims ``batch``; in a ``dtype``, or that of
    ``x`` before it was rounded. (Below the highest precision Hopper adds up in 14 bits: DeepSeek-V3 2024,
    section 3.3.2.)"""
    dims, dtype = ((tuple(of_x), tuple(of_y)), (batch, batch)), dtype or x.scale.dtype
    total = lax.dot_general(
        x.values, y.values, dims, precision="highest", preferred_element_type=dtype
    )
    return total * (x.scale * y.scale).astype(dtype)


@jax.custom_vjp
def matmul_in_float8(x: Float[Array, "b s *inner"], w: Float[Array, "*weight"]) -> Array:
    """Return ``x`` times ``w``, which has the dims of ``x`` behind s first. The backward pass rounds both
    anew, so what is kept for it is what a matmul in their own dtype keeps."""
    num_inner = x.ndim - 2
    operands = narrowed(x, E4M3), narrowed(w, E4M3)
    return scaled_product(*operands, range(2, x.ndim), range(num_inner))


def _gradients(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = (narrowed(operand, E4M3) for operand in saved)
    outer = range(x.values.ndim - 2, w.values.ndim)
    grad = narrowed(dy, E5M2)
    dx = scaled_product(grad, w, range(2, dy.ndim), outer)
    return dx, scaled_product(x, grad, (0, 1), (0, 1))


matmul_in_float8.defvjp(lambda x, w: (matmul_in_float8(x, w), (x, w)), _gradients)
