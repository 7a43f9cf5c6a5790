"""The order of layers in a state: the model's, and the one in which a pipeline's stages hold them.

    model order    0 1 2 3 4           fresh weights, checkpoints, Hugging Face files, evaluation
    stage order    0 1 2 | 3 4 -       the state between steps, cut by pp (`plan.schedules.layer_order`)

Stages are cut evenly, so where pp does not divide the layers (126 on 4 stages: 32, 32, 31, 31) some places
are empty, `-`: zeros that no stage computes with. Leaves are moved one after the other, since a state is most
of the memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

from llmpar.model.weights import Tree
from llmpar.plan.layout import Dim, Layout
from llmpar.plan.plan import Resolved


def reorder(state: Tree, order: np.ndarray, dims: Tree, like: Tree, donate: bool) -> Tree:
    """Return a state with its layers in this ``order``, along ``dims`` (`layer_dims`), placed as ``like``.
    ``donate``: each leaf is deleted once it is moved."""

    def reorder_leaf(x, dim: int, like):
        if dim < 0:
            return x
        reordered = take_layers(x, order, dim, like.sharding)
        if donate:
            x.delete()
        return reordered

    return jax.tree.map(reorder_leaf, state, dims, like)


@functools.partial(jax.jit, static_argnums=(2, 3))
def take_layers(x: Array, order: Int[Array, " l"], dim: int, to: NamedSharding) -> Array:
    """Take the layers of a leaf in this ``order``, along ``dim``; zeros for numbers that no layer has."""
    return lax.with_sharding_constraint(in_order(x, order, dim), to)


def in_order(x: Array, order: Any, dim: int) -> Array:
    """Take layers, or periods of as many layers each as there are more of them than numbers in ``order``."""
    num_layers = x.shape[dim]
    each = max(1, num_layers // len(order))
    parts = x.reshape(*x.shape[:dim], -1, each, *x.shape[dim + 1 :])
    taken = jnp.take(parts, order, dim, mode="fill", fill_value=0)
    return taken.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def layer_dims(state: Tree, one_more: Tree) -> Tree:
    """Return the dim of each leaf that counts layers: the one that a layer more makes longer; -1 for none."""
    longer = lambda leaf, more: next(
        (i for i, n in enumerate(leaf.shape) if n != more.shape[i]), -1
    )
    return jax.tree.map(longer, state, one_more)


def model_order_layout(leaf: jax.ShapeDtypeStruct, layout: Layout, plan: Resolved) -> Layout:
    """Return a leaf's layout in the model's order: pp cuts the layers, or the first dim that it divides."""
    pp = layout.cut("l")
    dims = [Dim("l") if d.name == "l" else d for d in layout.dims]
    for i, (dim, size) in enumerate(zip(dims, leaf.shape, strict=False)):
        if size % plan.mesh.along(dim.axes + pp) == 0:
            dims[i] = Dim(dim.name, dim.axes + pp)
            break
    return Layout(tuple(dims))


def check_empty_places(
    optimizer: optax.GradientTransformation, weights: Tree, num_layers: int, num_places: int
) -> None:
    """Refuse an optimizer that would count the zeros of empty places."""
    if num_layers < num_places and _counts_zeros(optimizer, weights):
        raise ValueError(
            f"{num_layers} layers leave {num_places - num_layers} of the pipeline's places empty, zeros that"
            " this optimizer would count: it looks at a whole stack at once, as Adafactor does; use"
            f" {num_places} layers, or AdamW"
        )


def _counts_zeros(optimizer: optax.GradientTransformation, weights: Tree) -> bool:
    """Tell whether a layer of zeros in a stack changes the updates of the other layers.

    An optimizer that treats elements or layers alone does not see it; a mean over a whole leaf does
    (Adafactor's root mean square: Shazeer and Stern 2018, section 6). Three updates of small weights show it.
    """

    def small(x):
        shape = [min(4, n) for n in x.shape]
        return np.cos(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)

    def updated(params: Tree) -> list[Array]:
        grads = jax.tree.map(jnp.sin, params)
        state = optimizer.init(params)
        with jax.numpy_dtype_promotion("standard"):
            for _ in range(3):  # the first may have a learning rate of 0
                updates, state = optimizer.update(grads, state, params)
                params = optax.apply_updates(params, updates)
        return jax.tree.leaves(params["blocks"])

    params = jax.tree.map(small, weights)
    with_zeros = lambda x: jnp.concatenate([x, jnp.zeros_like(x[:1])])
    padded = params | {"blocks": jax.tree.map(with_zeros, params["blocks"])}
    before = jax.tree.leaves(params["blocks"])
    results = zip(before, *jax.jit(lambda: (updated(params), updated(padded)))(), strict=True)
    return any(np.abs(a - b[:-1]).max() > 1e-3 * np.abs(a - old).max() for old, a, b in results)
