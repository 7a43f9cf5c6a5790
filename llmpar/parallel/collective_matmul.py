"""Collective matmul: a ring of permutes with the matmuls between its hops, in place of an all-gather before
them or a reduce-scatter behind (Wang et al. 2023). `Plan.tp_comm_overlap` asks for it."""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from llmpar.parallel.collectives import MOVED, after, hop


def matmul(x: Array, weight: Any, **sharding: Any) -> Array:
    """Return a value ``b s …`` times a weight: the sum over all dims of ``x`` behind s, which are the
    weight's first. A weight that is no array multiplies itself (`lora.Adapted`, `float8.Float8`)."""
    if isinstance(weight, jax.Array):
        return jnp.tensordot(x, weight, x.ndim - 2, **sharding)
    return weight.matmul(x, **sharding)


def matmuls(x: Array, *weights: Any) -> list[Array]:
    """Return ``x`` times each of the weights."""
    return [matmul(x, weight) for weight in weights]


@dataclass(frozen=True)
class Ring:
    """A ring of the ranks along some axes, for values ``b s …`` whose positions they cut.

    Blocks are counted as they arrive: block i is that of the rank i before this one, block 0 its own.
    """

    axis: tuple[str, ...]
    arrow: str
    method: str  # `Plan.hop`

    def hop(self, x: Array) -> Array:
        """Return what the rank before sends."""
        return checkpoint_name(hop(x, self.axis, self.method, self.arrow), MOVED)

    def gather(self, x: Array, use: Callable[[int, Array], Any]) -> tuple[list[Array], list]:
        """Return the blocks of all ranks, in n - 1 hops, and ``use`` of each while the next one travels."""
        blocks, made = [x], []
        for i in range(1, lax.axis_size(self.axis)):
            arrived, done = lax.optimization_barrier((self.hop(blocks[-1]), use(i - 1, blocks[-1])))
            blocks.append(arrived)
            made.append(done)
        return blocks, [*made, use(len(made), blocks[-1])]

    def scatter(self, part: Callable[[int], Array]) -> Array:
        """Return the sum of all ranks' parts of this rank's block, in n - 1 hops: each block's sum starts at
        the rank behind its own, and the next part is computed while it travels."""
        total = part(1)
        for i in range(2, (n := lax.axis_size(self.axis)) + 1):
            total = operator.add(*lax.optimization_barrier((self.hop(total), part(i % n))))
        return total

    def _places(self) -> Array:
        """Return which block is at each place of the sequence: also the place of each block."""
        n = lax.axis_size(self.axis)
        return (lax.axis_index(self.axis) - jnp.arange(n)) % n

    def join(self, *blocks: Array) -> Array:
        """Return the whole sequence of blocks."""
        stacked = jnp.stack(blocks, 1).at[:, self._places()].get(mode="promise_in_bounds")
        return stacked.reshape(stacked.shape[0], -1, *stacked.shape[3:])

    def block(self, x: Array, i: int) -> Array:
        """Return one block of a whole sequence."""
        size = x.shape[1] // lax.axis_size(self.axis)
        return lax.dynamic_slice_in_dim(x, self._places()[i] * size, size, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_matmul(ring: Ring, x: Array, weights: Sequence[Any]) -> list[Array]:
    """Gather ``x``, then multiply it by each of the weights, block by block. The backward pass scatters, as
    `matmul_scatter` does."""
    return _gather_matmul(ring, x, weights)[0]


def _gather_matmul(ring, x, weights):
    blocks, products = ring.gather(x, lambda _, block: matmuls(block, *weights))
    return jax.tree.map(ring.join, *products), (blocks, weights)


def _gather_matmul_grad(ring, saved, dy):
    blocks, weights = saved
    cut = lambda i: jax.tree.map(lambda y: ring.block(y, i), dy)
    pull = _Pull(matmuls, weights)
    return ring.scatter(lambda i: pull(blocks[i], cut(i))), pull.gradients()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul_scatter(ring: Ring, x: Array, weight: Any) -> Array:
    """Multiply, then reduce and scatter, block by block. The backward pass gathers, as `gather_matmul`
    does."""
    return ring.scatter(lambda i: matmul(ring.block(x, i), weight))


def _matmul_scatter_grad(ring, saved, dy):
    x, weight = saved
    pull = _Pull(matmul, (weight,))
    # To simulated devices all permutes are one channel: where x is computed again, nothing else would order
    # the rings that it takes before this one.
    dy = lax.platform_dependent(x, dy, cpu=after, default=lambda _, dy: dy)
    _, parts = ring.gather(dy, lambda i, block: pull(ring.block(x, i), block))
    return ring.join(*parts), *pull.gradients()


gather_matmul.defvjp(_gather_matmul, _gather_matmul_grad)
matmul_scatter.defvjp(
    lambda ring, x, weight: (matmul_scatter(ring, x, weight), (x, weight)), _matmul_scatter_grad
)


class _Pull:
    """The gradients of ``f(x, *weights)`` block by block: a call returns that of a block of ``x``, and keeps
    what the block adds to those of the weights."""

    def __init__(self, f: Callable, weights: Sequence[Any]):
        self.f, self.weights, self.terms = f, weights, list[Any]()

    def __call__(self, x: Array, dy: Any) -> Array:
        dx, *of_weights = jax.vjp(self.f, x, *self.weights)[1](dy)
        self.terms.append(of_weights)
        return dx

    def gradients(self) -> tuple:
        """Return those of the weights, summed over the blocks in float32."""
        add = lambda *parts: sum(x.astype(jnp.float32) for x in parts).astype(parts[0].dtype)
        return tuple(jax.tree.map(add, *self.terms))
