"""The order of layers in a state: the model's, and the one in which a pipeline's stages hold them.

    model order    0 1 2 3 4           fresh weights, checkpoints, Hugging Face files, evaluation
    stage order    0 1 2 | 3 4 -       the state between steps, cut by pp (`plan.places.layer_orders`)

Stages are cut evenly, so where pp does not divide the layers (126 on 4 stages: 32, 32, 31, 31), or where
stages have layers of different kinds, some places are empty, `-`: zeros that no stage computes with. Each
kind has its own order. Leaves are moved one after the other, since a state is most of the memory.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Int

from llmpar.model.weights import Tree, trainable_params
from llmpar.parallel.mesh import sharding
from llmpar.plan import places
from llmpar.plan.layout import Dim, Layout
from llmpar.plan.model_config import ModelConfig, kind_of
from llmpar.plan.plan import Resolved
from llmpar.training.state import State, check_alive, state_layouts, state_shapes


class LayerOrder:
    """The two orders of the layers in a step's state, and the moves between them.

    Attributes:
        layer_orders: for each kind of layers, which layer is in which place of the
            stacked weights: ``layer_orders[kind][i]`` in place i, counted from 0 among
            the layers of that kind. An empty place has the count of these layers, an
            index that no layer has (`places.layer_orders`).
        is_model_order: whether the two orders are one.
        abstract_state: shapes and shardings of the state in the order of the stages.
        abstract_in_model_order: the same in the model's order.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: Resolved,
        mesh: Mesh | AbstractMesh,
        optimizer: optax.GradientTransformation,
    ):
        """Refuse an optimizer that empty places would mislead."""
        orders = places.layer_orders(plan.pipeline, config.layer_kinds)
        self.layer_orders = [np.array(order) for order in orders]
        self._counts = [count for count, _ in config.blocks]
        self.is_model_order = orders == [list(range(count)) for count in self._counts]
        self._shapes = functools.partial(state_shapes, config, plan, optimizer)
        in_stages, in_model = self._shapes([*map(len, orders)]), self._shapes(self._counts)
        weights = trainable_params(in_model.params, config)
        num_layers, num_places = config.num_layers, sum(map(len, orders))
        if num_layers < num_places and _counts_zeros(optimizer, weights):
            raise ValueError(
                f"{num_layers} layers leave {num_places - num_layers} of the pipeline's places empty, zeros"
                " that this optimizer would count: it looks at a whole stack at once, as Adafactor does; use"
                f" {num_places} layers, or AdamW"
            )
        layouts = state_layouts(in_stages, config, plan)
        model_layouts = jax.tree.map(lambda x, y: model_order_layout(x, y, plan), in_model, layouts)
        abstract = lambda x, layout: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding(mesh, layout)
        )
        self.abstract_state = jax.tree.map(abstract, in_stages, layouts)
        self.abstract_in_model_order = jax.tree.map(abstract, in_model, model_layouts)

    def from_model_order(self, state: State, donate: bool = False) -> State:
        """Reorder the layers of a state from the model's order, which checkpoints have, to the order of the
        pipeline's stages. ``donate``: delete each leaf once it is moved, because two states may not fit into
        memory."""
        return self._reorder(state, self.layer_orders, self.abstract_state, donate)

    def to_model_order(self, state: State, donate: bool = False) -> State:
        """Reorder the layers of a state to the model's order, the inverse of `from_model_order`."""
        pairs = zip(self.layer_orders, self._counts, strict=True)
        # The inverse permutations: argsort says at which place each layer is. Empty places, whose number is
        # larger than any layer's, come last, and are left out.
        orders = [np.argsort(order, stable=True)[:count] for order, count in pairs]
        return self._reorder(state, orders, self.abstract_in_model_order, donate)

    def _reorder(
        self, state: State, orders: Sequence[np.ndarray], like: State, donate: bool
    ) -> State:
        """Return a state with the layers of each kind in its order, placed as ``like``."""
        check_alive(state)
        if self.is_model_order:
            return state
        # the dim of each leaf that counts layers: the one that a layer more makes longer; -1: none does
        one_more = self._shapes([count + 1 for count in self._counts])
        longer = lambda leaf, more: next(
            (i for i, n in enumerate(leaf.shape) if n != more.shape[i]), -1
        )
        dims = jax.tree.map(longer, self.abstract_in_model_order, one_more)

        def reorder_leaf(path, x, dim: int, like):
            if dim < 0:
                return x
            reordered = take_layers(x, order_of(path, orders), dim, like.sharding)
            if donate:
                x.delete()
            return reordered

        return jax.tree_util.tree_map_with_path(reorder_leaf, state, dims, like)


def order_of(path: tuple, orders: Sequence[np.ndarray]) -> np.ndarray:
    """Return the order of the kind of layers that a leaf of a state belongs to, by its path."""
    keys = [getattr(key, "key", None) for key in path]
    return orders[max(0, kind_of(".".join(map(str, keys[keys.index("blocks") :]))))]


@functools.partial(jax.jit, static_argnums=(2, 3))
def take_layers(x: Array, order: Int[Array, " l"], dim: int, to: NamedSharding) -> Array:
    """Take the layers of a leaf in this ``order``, along ``dim``; zeros for numbers that no layer has."""
    return lax.with_sharding_constraint(take_in_order(x, order, dim), to)


def take_in_order(x: Array, order: Any, dim: int) -> Array:
    """Take layers; zeros for numbers that no layer has."""
    return jnp.take(x, order, dim, mode="fill", fill_value=0)


def model_order_layout(leaf: jax.ShapeDtypeStruct, layout: Layout, plan: Resolved) -> Layout:
    """Return a leaf's layout in the model's order: pp cuts the layers, or the first dim that it divides."""
    pp = layout.cut("l")
    dims = [Dim("l") if d.name == "l" else d for d in layout.dims]
    for i, (dim, size) in enumerate(zip(dims, leaf.shape, strict=False)):
        if size % plan.mesh.along(dim.axes + pp) == 0:
            dims[i] = Dim(dim.name, dim.axes + pp)
            break
    return Layout(tuple(dims))


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
