"""Muon (Jordan et al. 2024): momentum whose matrices are made nearly orthogonal, by five iterations of Newton
and Schulz; Adam for all that is no matrix of a block.

An iteration needs whole matrices, and ZeRO and tensor parallelism cut them. So a `Step` moves them, as
`Plan.muon` says, and moves the result back. Of ``ffn l d m`` at ZeRO 3 on ``fsdp=2 tp=2``:

    gather  l d/fsdp m/tp -> l d m           an all-gather over each axis; back: every device keeps its slice
    owner   l d/fsdp m/tp -> l/fsdp,tp d m   an all-to-all over each axis, and another one back
    layer   l/fsdp d m/tp -> l/fsdp,tp d m   the same over tp alone. ZeRO 1 and
                                             2: the gradients' reduce-scatter has cut them by fsdp

The update is that of `optax.contrib.muon` with its defaults, and so is the state: one moment of a matrix, two
of all else.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from llmpar.model.weights import Tree, weights_tree
from llmpar.plan.model_config import ModelConfig, matrix_dims

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of an iteration aX + (bA + cA²)X with A = XXᵀ: they lift small singular values fast, and leave all near 1
(Jordan et al. 2024)."""
ITERATIONS, DECAY, EPSILON = 5, 0.95, 1e-8
"""How many iterations; the momentum's decay; what is added to a matrix's norm."""


def newton_schulz(x: Float[Array, "... r c"]) -> Float[Array, "... r c"]:
    """Return matrices with the same singular vectors and singular values near 1: of USVᵀ nearly UVᵀ. It
    takes about 2 · 5 · (2r²c + r³) FLOPs for r ≤ c, and works on the transposes where r > c."""
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(x.mT).mT
    a, b, c = COEFFICIENTS
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + EPSILON)

    def iterate(_, x: Array) -> Array:
        square = x @ x.mT
        return a * x + (b * square + c * (square @ square)) @ x

    return lax.fori_loop(0, ITERATIONS, iterate, x)


def orthogonalized(x: Float[Array, "..."], dims: str) -> Float[Array, "..."]:
    """Return the nearly orthogonal matrices of a stack with these dims (`matrix_dims`), each times
    √max(1, outputs / inputs), as Optax scales them without ``consistent_rms``."""
    into, made = matrix_dims(dims) or ("", "")
    count = x.ndim - len(into + made)
    rows = math.prod(x.shape[count : count + len(into)])
    matrices = x.reshape(*x.shape[:count], rows, -1)
    scale = math.sqrt(max(1.0, matrices.shape[-1] / rows))
    return (scale * newton_schulz(matrices)).reshape(x.shape)


class Muon(optax.GradientTransformationExtraArgs):
    """An optimizer whose update takes ``on_matrices`` (`scale_by_muon`)."""


def map_unmasked(f: Callable, tree: Tree, *others: Tree) -> Tree:
    """Map ``f`` over a tree in which Optax has masked the leaves of another optimizer."""
    masked = lambda x: isinstance(x, optax.MaskedNode)
    one = lambda x, *rest: x if masked(x) else f(x, *rest)
    return jax.tree.map(one, tree, *others, is_leaf=masked)


def scale_by_muon(config: ModelConfig) -> optax.GradientTransformationExtraArgs:
    """Make the transformation from gradients of matrices to orthogonal updates, with Nesterov's momentum.

    Its update takes ``on_matrices``, which calls a function of a leaf and its dims on whole matrices; without
    it the leaves are taken for whole."""
    dims = weights_tree(config, lambda weight: weight.dims, trainable=True)

    def update(grads, state, params=None, *, on_matrices=None, **_):
        count = state.count + 1
        moment = optax.tree.update_moment(grads, state.mu, DECAY, 1)
        ahead = optax.tree.bias_correction(moment, DECAY, count + 1)
        now = optax.tree.bias_correction(grads, DECAY, count)
        ahead = jax.tree.map(lambda m, g: DECAY * m + (1 - DECAY) * g, ahead, now)
        on_matrices = on_matrices or (lambda f, tree: map_unmasked(f, tree, dims))
        return on_matrices(orthogonalized, ahead), state._replace(count=count, mu=moment)

    return optax.GradientTransformationExtraArgs(optax.contrib.scale_by_muon().init, update)


def muon(rate: optax.ScalarOrSchedule, config: ModelConfig, weight_decay: float = 0.0) -> Muon:
    """Make Muon for a model: the numbers and the state of `optax.contrib.muon`."""
    matrices = optax.chain(
        scale_by_muon(config),
        optax.identity(),  # Optax keeps the scale by shape apart, and checkpoints have its place
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    rest = optax.adamw(rate, eps=EPSILON, weight_decay=0.0, nesterov=True)
    name = lambda weight: "muon" if matrix_dims(weight.dims) else "adam"
    names = weights_tree(config, name, trainable=True)
    return Muon(*optax.partition({"muon": matrices, "adam": rest}, names))
