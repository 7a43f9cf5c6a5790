"""Local steps: workers train apart, and average what they learned every H steps (DiLoCo, Douillard et al.
2023).

The ranks of dp are the workers. Each has a program of its own, without any sum over dp: the `Step` of the
same plan with dp=1, on its part of the batch. Every H steps an *outer* step follows, of each weight

    difference   d/fsdp m/tp +dp -> d/fsdp m/tp    how far the workers moved it since then, summed

An outer optimizer takes the mean for a gradient, and all workers go on from its result, with the states of
their own optimizers.

With H = 1 and ``optax.sgd(1.0)`` for the outer optimizer that is data parallelism, if the inner update is
linear in the gradients (SGD, with momentum and weight decay too, but not Adam, nor with ``clip``), and if
each worker's part of the batch has as many targets.
"""

from typing import NamedTuple

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
from llmpar.training.state import State
from llmpar.training.step import Step

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of Douillard et al. 2023, section 3."""

_with_one_more_dim = jax.jit(lambda tree: jax.tree.map(lambda x: x[None], tree))


class LocalState(NamedTuple):
    """The state of each worker; the trained weights that they began with; and the outer optimizer's state."""

    workers: tuple[State, ...]
    shared: Tree
    outer: Tree


class LocalSteps:
    """The compiled steps of workers, all in this process, and the outer step that joins them.

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
        self.every, self.outer, self.mesh = every, outer, split_axes(mesh, plan.mesh)
        dp, names = mesh.axis_names.index("dp"), mesh.axis_names
        own = [Mesh(np.take(mesh.devices, [i], dp), names) for i in range(plan.mesh.dp)]
        self.steps = [Step(config, plan.worker, part, optimizer, clip) for part in own]
        self.cut = jax.tree.map(lambda layouts: spec(layouts.stored), self.steps[0].weight_layouts)
        self.stacked = jax.tree.map(lambda cut: PartitionSpec("dp", *cut), self.cut)
        self.outer_step = jax.jit(self._outer_step, donate_argnums=(0, 1, 2))

    def init(self, seed: int = 0) -> LocalState:
        """Make a state in which all workers have the same weights."""
        workers = tuple(step.init(seed) for step in self.steps)
        on = lambda x, cut: jax.device_put(jnp.copy(x), NamedSharding(self.mesh, cut))
        shared = jax.tree.map(on, trained(workers[0].params, self.plan.config), self.cut)
        return LocalState(workers, shared, self.outer.init(shared))

    def run(self, state: LocalState, batch: Tree, number: int) -> tuple[LocalState, list[dict]]:
        """Run step ``number``, counted from 0, of each worker on its share of the rows of a batch, then the
        outer step if it is due. The metrics are each worker's. It takes over the state's memory."""
        rows = {name: np.split(np.asarray(x), len(self.steps)) for name, x in batch.items()}
        results = [
            step.run(
                worker, jax.device_put({k: x[i] for k, x in rows.items()}, step.batch_sharding)
            )
            for i, (step, worker) in enumerate(zip(self.steps, state.workers, strict=True))
        ]
        workers, metrics = zip(*results, strict=True)
        state = state._replace(workers=workers)
        return self.join(state) if (number + 1) % self.every == 0 else state, list(metrics)

    def join(self, state: LocalState) -> LocalState:
        """Run the outer step, and give its result to all workers."""
        shared, copies, outer = self.outer_step(self.stack(state), state.shared, state.outer)
        places = [trained(step.shardings.params, step.config) for step in self.steps]
        workers = (
            worker._replace(params=joined(worker.params, jax.device_put(copies, place)))
            for worker, place in zip(state.workers, places, strict=True)
        )
        return LocalState(tuple(workers), shared, outer)

    def stack(self, state: LocalState) -> Tree:
        """Return the workers' trained weights, each with a leading dim cut by dp. Nothing is sent."""

        def one(cut: PartitionSpec, *copies: Array) -> Array:
            shape, place = (len(copies), *copies[0].shape[1:]), NamedSharding(self.mesh, cut)
            blocks = [block.data for copy in copies for block in copy.addressable_shards]
            return jax.make_array_from_single_device_arrays(shape, place, blocks)

        copies = [
            _with_one_more_dim(trained(worker.params, self.plan.config)) for worker in state.workers
        ]
        return jax.tree.map(one, self.stacked, *copies)

    def _outer_step(self, after: Tree, shared: Tree, outer: Tree) -> tuple[Tree, Tree, Tree]:
        """Return the shared weights after an update by the mean of what the workers moved them; the same for
        the workers, which take over its memory; and the outer optimizer's state."""
        given = self.cut, self.stacked
        mean = jax.shard_map(
            self._mean_difference, mesh=self.mesh, in_specs=given, out_specs=self.cut
        )
        with jax.numpy_dtype_promotion("standard"):
            updates, outer = self.outer.update(mean(shared, after), outer, shared)
        shared = optax.apply_updates(shared, updates)
        return shared, jax.tree.map(jnp.copy, shared), outer

    def _mean_difference(self, before: Tree, after: Tree) -> Tree:
        """Return the mean over the workers of what each moved its weights: inside shard_map."""

        def one(old: Array, new: Array, layouts: WeightLayouts, dims: str) -> Array:
            own = vary(old, ("dp",)) - new[0]
            summed = Manual(self.plan).carry_out(own, layouts.difference, f"difference {dims}")
            return summed / len(self.steps)

        step = self.steps[0]
        return jax.tree.map(one, before, after, step.weight_layouts, step.dims)
