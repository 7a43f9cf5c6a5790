"""Local steps: workers train apart, and average what they learned every H steps (DiLoCo, Douillard et al.
2023).

The ranks of dp are the workers. Their step has no sum over dp: it is the `Step` of the same plan with dp=1,
on each worker's part of the batch. Every H steps an *outer* step follows, of each weight

    difference   d/fsdp m/tp +dp -> d/fsdp m/tp    how far the workers moved it since then, summed

An outer optimizer takes the mean for a gradient, and all workers go on from its result, with the states of
their own optimizers.

With H = 1 and ``optax.sgd(1.0)`` for the outer optimizer that is data parallelism, if the inner update is
linear in the gradients (SGD, with momentum and weight decay too, but not Adam, nor with ``clip``), and if
each worker's part of the batch has as many targets.
"""

import copy
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from llmpar.model.weights import Tree, joined, trained
from llmpar.parallel.collectives import vary
from llmpar.parallel.mesh import platform_of, spec, split_axes
from llmpar.parallel.modes import Manual
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import Plan, WeightLayouts
from llmpar.training.step import Step

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of Douillard et al. 2023, section 3."""


class LocalState(NamedTuple):
    """The states of all workers, each leaf with a leading dim cut by dp; the trained weights that they began
    with; and the outer optimizer's state."""

    workers: Any
    shared: Tree
    outer: Tree


class LocalSteps:
    """The compiled step of workers, and the outer step that joins them.

    Args:
        config, plan, mesh, optimizer, clip: as of a `Step`; ``plan.mesh.dp`` is the number of workers.
        every: inner steps between two outer steps.
        outer: any Optax optimizer.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: Plan,
        mesh: Mesh,
        optimizer: optax.GradientTransformation,
        every: int,
        outer: optax.GradientTransformation = NESTEROV,
        clip: float | None = 1.0,
    ):
        self.plan = plan = plan.resolve(config, platform_of(mesh))
        if plan.mesh.dp < 2 or plan.mode != "manual" or every < 1:
            raise ValueError(
                f"local steps are of dp={plan.mesh.dp} workers in the mode {plan.mode}, joined every {every}"
                " steps; use dp=2 or more, mode='manual', and 1 step or more"
            )
        self.every, self.outer, self.num_workers = every, outer, plan.mesh.dp
        first = np.take(mesh.devices, [0], mesh.axis_names.index("dp"))
        self.step = Step(config, plan.worker, Mesh(first, mesh.axis_names), optimizer, clip)
        # the same on the devices of all: `jax.vmap` cuts its new dim by dp, and sums nothing over it
        on_all, self.mesh = copy.copy(self.step), split_axes(mesh, plan.mesh)
        on_all.mesh = on_all.auto_mesh = self.mesh
        on = lambda *axes: NamedSharding(self.mesh, PartitionSpec(*axes))
        shared = jax.tree.map(lambda layouts: on(*spec(layouts.stored)), self.step.weight_layouts)
        workers = jax.tree.map(lambda x: on("dp", *x.spec), self.step.shardings)
        self.shardings = LocalState(workers, shared, None)
        self.batch_sharding = on("dp", *self.step.batch_sharding.spec)
        self.inner_step = jax.jit(
            jax.vmap(on_all.train_step, spmd_axis_name="dp"),
            in_shardings=(workers, self.batch_sharding),
            out_shardings=(workers, None),
            donate_argnums=0,
        )
        self.outer_step = jax.jit(self._outer_step, out_shardings=self.shardings, donate_argnums=0)

    def init(self, seed: int = 0) -> LocalState:
        """Make a state in which all workers have the same weights, in one process."""
        state = jax.tree.map(np.asarray, self.step.init(seed))
        stack = lambda x: np.broadcast_to(x, (self.num_workers, *x.shape))
        workers = jax.device_put(jax.tree.map(stack, state), self.shardings.workers)
        learned = trained(state.params, self.step.config)
        shared = jax.device_put(learned, self.shardings.shared)
        return LocalState(workers, shared, self.outer.init(shared))

    def place(self, batch: Tree) -> Tree:
        """Deal the rows of a batch to the workers, each the next part."""
        deal = lambda x: x.reshape(self.num_workers, -1, *x.shape[1:])
        return jax.device_put(jax.tree.map(deal, batch), self.batch_sharding)

    def run(self, state: LocalState, batch: Tree, number: int) -> tuple[LocalState, dict]:
        """Run step ``number``, counted from 0, on a batch that `place` dealt, then the outer step if it is
        due. The metrics are each worker's. It takes over the state's memory."""
        workers, metrics = self.inner_step(state.workers, batch)
        state = state._replace(workers=workers)
        if (number + 1) % self.every == 0:
            state = self.outer_step(state)
        return state, metrics

    def _outer_step(self, state: LocalState) -> LocalState:
        """Update the shared weights by the mean of what the workers moved them, and give them to all."""
        params, shared = state.workers.params, state.shared
        cut = jax.tree.map(lambda x: x.spec, self.shardings.shared)
        stacked = jax.tree.map(lambda x: PartitionSpec("dp", *x), cut)
        mean = jax.shard_map(
            self._mean_difference, mesh=self.mesh, in_specs=(cut, stacked), out_specs=cut
        )
        moved = mean(shared, trained(params, self.step.config))
        with jax.numpy_dtype_promotion("standard"):
            updates, outer = self.outer.update(moved, state.outer, shared)
        shared = optax.apply_updates(shared, updates)
        stack = lambda x: jnp.broadcast_to(x, (self.num_workers, *x.shape))
        workers = state.workers._replace(params=joined(params, jax.tree.map(stack, shared)))
        return LocalState(workers, shared, outer)

    def _mean_difference(self, before: Tree, after: Tree) -> Tree:
        """Return the mean over the workers of what each moved its weights: inside shard_map."""

        def one(old: Array, new: Array, layouts: WeightLayouts, dims: str) -> Array:
            own = vary(old, ("dp",)) - new[0]
            summed = Manual(self.plan).carry_out(own, layouts.difference, f"difference {dims}")
            return summed / self.num_workers

        return jax.tree.map(one, before, after, self.step.weight_layouts, self.step.dims)
