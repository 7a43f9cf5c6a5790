"""The mode `Auto`: an arrow is a sharding constraint, and XLA's partitioner chooses the collectives."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from llmpar.parallel.collectives import WEIGHT
from llmpar.parallel.mesh import sharding, spec
from llmpar.parallel.modes import Manual, Solo
from llmpar.plan.layout import Arrow, Layout
from llmpar.plan.plan import Resolved


class Auto(Solo):
    """Under `jax.jit`: an arrow is a sharding constraint, and XLA's partitioner chooses the collectives."""

    def __init__(self, plan: Resolved, mesh: Mesh | AbstractMesh):
        super().__init__(plan)
        self.mesh = mesh

    def weight(self, param):
        """Return the parameter, constrained to the layout in which it is used."""
        return checkpoint_name(
            self.constrain(super().weight(param), self.plan.place(param.dims)), WEIGHT
        )

    def move(self, x: Array, arrow: str) -> Array:
        """Constrain ``x`` to the arrow's last layout; the partitioner chooses where a sum is finished."""
        return self.constrain(x, self.plan.physical(arrow).after) if x.ndim else x

    axes = Manual.axes

    def local(self, f: Callable, layouts: list[str], result: Any) -> Callable:
        """Run ``f`` inside shard_map, on each device's blocks, and finish its unfinished sums."""
        given = tuple(spec(self.plan.place(x)) for x in layouts)
        ends = jax.tree.map(self.plan.place, result)
        block = self.island.local(f, layouts, result)

        def inside(*args):
            return jax.tree.map(
                lambda y, end: lax.psum(y, end.sums) if end.sums else y, block(*args), ends
            )

        return jax.shard_map(
            inside, mesh=self.mesh, in_specs=given, out_specs=jax.tree.map(spec, ends)
        )

    island = property(
        lambda self: Manual(self.plan), doc="`Manual`: an island is inside shard_map."
    )

    def constrain(self, x: Array, layout: Layout) -> Array:
        """Pin a value's layout."""
        return lax.with_sharding_constraint(x, sharding(self.mesh, layout))

    def carry_out(self, x: Array, arrow: Arrow, text: str = "", invariant: bool = False) -> Array:
        """Constrain ``x`` to a physical arrow's last layout."""
        return self.constrain(x, arrow.after)
