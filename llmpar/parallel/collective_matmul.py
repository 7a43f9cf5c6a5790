"""Collective matmul: a ring of permutes with the matmuls between its hops, in place of an all-gather before
them or a reduce-scatter behind (Wang et al. 2023). `Plan.tp_comm_overlap` asks for it."""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from llmpar.parallel.collectives import MOVED, after, hop, scope, together


@dataclass(frozen=True)
class Ring:
    """A ring of the ranks along some axes, for values ``b s …`` whose positions they cut.

    Blocks are counted as they come round: block i is that of the rank i before this one, block 0 its own.
    """

    axis: tuple[str, ...]
    arrow: str
    way: str

    def hop(self, x: Array) -> Array:
        """What the rank before sends."""
        with scope(self.arrow):
            return checkpoint_name(hop(x, self.axis, self.way), MOVED)

    def gather(self, x: Array, use: Callable[[int, Array], Any]) -> tuple[list[Array], list]:
        """The blocks of all ranks, in n - 1 hops, and ``use`` of each while the next one travels."""
        blocks, made = [x], []
        for i in range(1, lax.axis_size(self.axis)):
            arrived, done = together((self.hop(blocks[-1]), use(i - 1, blocks[-1])))
            blocks.append(arrived)
            made.append(done)
        return blocks, [*made, use(len(made), blocks[-1])]

    def scatter(self, part: Callable[[int], Array]) -> Array:
        """The sum of all ranks' parts of this rank's block, in n - 1 hops: each block's sum sets out from the
        rank behind its own, and the next part is made while it travels."""
        total = part(1)
        for i in range(2, (n := lax.axis_size(self.axis)) + 1):
            total = operator.add(*together((self.hop(total), part(i % n))))
        return total

    def _places(self) -> Array:
        """Which block lies at each place of the sequence, and at which place each block."""
        n = lax.axis_size(self.axis)
        return (lax.axis_index(self.axis) - jnp.arange(n)) % n

    def join(self, *blocks: Array) -> Array:
        """The whole sequence of blocks."""
        stacked = jnp.stack(blocks, 1).at[:, self._places()].get(mode="promise_in_bounds")
        return stacked.reshape(stacked.shape[0], -1, *stacked.shape[3:])

    def block(self, x: Array, i: int) -> Array:
        """One block of a whole sequence."""
        size = x.shape[1] // lax.axis_size(self.axis)
        return lax.dynamic_slice_in_dim(x, self._places()[i] * size, size, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def enter(multiply, ring: Ring, x, weights):
    """Gather, then multiply, block by block. The backward pass scatters as `leave` does."""
    return _enter_forward(multiply, ring, x, weights)[0]


def _enter_forward(multiply, ring, x, weights):
    blocks, made = ring.gather(x, lambda _, block: multiply(block, *weights))
    return jax.tree.map(ring.join, *made), (blocks, weights)


def _enter_backward(multiply, ring, saved, dy):
    blocks, weights = saved
    cut = lambda i: jax.tree.map(lambda y: ring.block(y, i), dy)
    pull = _Pull(multiply, weights)
    return ring.scatter(lambda i: pull(blocks[i], cut(i))), pull.gradients()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def leave(multiply, ring: Ring, x, weights):
    """Multiply, then reduce and scatter, block by block. The backward pass gathers as `enter` does."""
    return ring.scatter(lambda i: multiply(ring.block(x, i), *weights))


def _leave_forward(multiply, ring, x, weights):
    return leave(multiply, ring, x, weights), (x, weights)


def _leave_backward(multiply, ring, saved, dy):
    x, weights = saved
    pull = _Pull(multiply, weights)
    # To simulated devices all permutes are one channel: where x is computed again, nothing else would order
    # the rings that it takes before this one.
    dy = lax.platform_dependent(x, dy, cpu=after, default=lambda _, dy: dy)
    _, parts = ring.gather(dy, lambda i, block: pull(ring.block(x, i), block))
    return ring.join(*parts), pull.gradients()


enter.defvjp(_enter_forward, _enter_backward)
leave.defvjp(_leave_forward, _leave_backward)


class _Pull:
    """The gradients of ``multiply(x, *weights)`` block by block: a call gives that of a block, and keeps what
    it adds to those of the weights."""

    def __init__(self, multiply, weights):
        self.multiply, self.weights, self.found = multiply, weights, []

    def __call__(self, x, dy):
        dx, *more = jax.vjp(self.multiply, x, *self.weights)[1](dy)
        self.found.append(more)
        return dx

    def gradients(self) -> tuple:
        """Those of the weights, summed over the blocks in float32."""
        add = lambda *parts: sum(x.astype(jnp.float32) for x in parts).astype(parts[0].dtype)
        return tuple(jax.tree.map(add, *self.found))
