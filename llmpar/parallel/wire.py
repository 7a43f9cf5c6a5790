"""Collectives whose values travel in fewer bits than they are computed in: the dtype on an arrow.

    d/fsdp:bf16 -> d            an all-gather in bfloat16
    d/fsdp:e4m3 -> d            an all-gather of 8 bits a number, a float32 scale for each `SCALED` of them
    d +fsdp:bf16 -> d/fsdp      an all-to-all of the terms in bfloat16, whose sum is taken in float32
    d +dp:bf16 -> d             the same, then an all-gather of the sums in bfloat16

Bits travel as integers. XLA for CPUs would widen a collective of bfloat16 to float32, and then leave out both
conversions. No sum is rounded on its way from rank to rank, as it is in a reduce-scatter of bfloat16; the
bytes are the same. Through a gather the gradient flows as if nothing were rounded.

Scales are the largest magnitude of a block over 448, the largest number of e4m3 (Micikevicius et al. 2022,
section 3.1). Blocks of 32 are those of OCP MX (2023), which has scales of 8 bits; DeepSeek-V3 (2024, section
3.3.2) has float32 scales of blocks of 128.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from llmpar.parallel.collectives import scope
from llmpar.plan.layout import SCALED, Arrow, Move


def encode(x: Float[Array, "..."], wire: str) -> Array:
    """Return the bits of a value that travel: a vector of 16-bit integers, or of bytes with the scales
    behind. With scales ``x`` has a multiple of `SCALED` numbers."""
    flat = x.astype(jnp.float32).reshape(-1)
    if wire == "bf16":
        return lax.bitcast_convert_type(flat.astype(jnp.bfloat16), jnp.uint16)
    blocks = flat.reshape(-1, SCALED)
    scales = jnp.abs(blocks).max(1, keepdims=True) / 448
    scales = jnp.where(scales == 0, 1, scales)  # of zeros alone
    values = (blocks / scales).astype(jnp.float8_e4m3fn)
    parts = [lax.bitcast_convert_type(part, jnp.uint8).reshape(-1) for part in (values, scales)]
    return jnp.concatenate(parts)


def decode(bits: Array, wire: str) -> Float[Array, " n"]:
    """Return the float32 numbers of what `encode` made of one value."""
    if wire == "bf16":
        return lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)
    num_blocks = len(bits) // (SCALED + 4)
    values, scales = jnp.split(bits, [num_blocks * SCALED])
    values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn).reshape(-1, SCALED)
    scales = lax.bitcast_convert_type(scales.reshape(-1, 4), jnp.float32)
    return (values.astype(jnp.float32) * scales[:, None]).reshape(-1)


def send_narrow(x: Array, move: Move, dim: int, arrow: Arrow, text: str) -> Array:
    """Run a move of an arrow with a dtype (`collectives.send` runs the others). ``dim`` is the index of the
    dim that it gathers or cuts, ``text`` the name of its `scope`."""
    match move.kind:
        case "all-gather":
            return _gather(x, move, dim, arrow, text)
        case "all-reduce":
            size = math.prod(x.shape)
            flat = jnp.pad(x.reshape(-1), (0, -size % lax.axis_size(move.axes)))
            own = encode(scattered_sum(flat, move.axes, 0, arrow.wire), arrow.wire)
            sums = decode(lax.all_gather(own, move.axes, tiled=True, to="invarying"), arrow.wire)
            return sums[:size].reshape(x.shape).astype(x.dtype)
        case _:
            return scattered_sum(x, move.axes, dim, arrow.wire)


def scattered_sum(x: Array, axes: tuple[str, ...], dim: int, wire: str) -> Array:
    """Return this rank's part, along ``dim``, of the sum over ``axes``: what a reduce-scatter gives, of terms
    that are rounded once and added up in float32."""
    n = lax.axis_size(axes)
    parts = jnp.moveaxis(x.reshape(*x.shape[:dim], n, -1, *x.shape[dim + 1 :]), dim, 0)
    bits = jax.vmap(functools.partial(encode, wire=wire))(parts)
    arrived = lax.all_to_all(bits, axes, 0, 0)
    terms = jax.vmap(functools.partial(decode, wire=wire))(arrived)
    return terms.sum(0).reshape(parts.shape[1:]).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(x: Array, move: Move, dim: int, arrow: Arrow, text: str) -> Array:
    """Gather a value along ``dim``. Its gradient is summed and cut by the gradient's own dtype."""
    if not arrow.wire:
        return lax.all_gather(x, move.axes, axis=dim, tiled=True)
    bits = lax.all_gather(encode(x, arrow.wire), move.axes)

    pieces = jax.vmap(functools.partial(decode, wire=arrow.wire))(bits)
    pieces = jnp.moveaxis(pieces.reshape(-1, *x.shape), 0, dim)
    return pieces.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :]).astype(x.dtype)


def _summed(move: Move, dim: int, arrow: Arrow, text: str, _: None, grad: Array) -> tuple[Array]:
    with scope(text):
        if arrow.gradient_wire:
            return (scattered_sum(grad, move.axes, dim, arrow.gradient_wire),)
        return (lax.psum_scatter(grad, move.axes, scatter_dimension=dim, tiled=True),)


_gather.defvjp(lambda x, *rest: (_gather(x, *rest), None), _summed)
