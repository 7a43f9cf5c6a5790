"""Local steps: workers train apart, and average what they learned every H steps (DiLoCo, Douillard et al.
2023), all of it at once or in fragments (Streaming DiLoCo, Douillard et al. 2025).

The ranks of dp are the workers. Each has a program of its own, without any sum over dp: the `Step` of the
same plan with dp=1, on its part of the batch. Every H steps an *outer* step follows, of each weight

    difference   d/fsdp m/tp +dp -> d/fsdp m/tp    how far the workers moved it since then, summed

An outer optimizer takes the mean for a gradient, and all workers go on from its result, with the states of
their own optimizers. Of P fragments (`places.fragment`: layers that follow one another) fragment p has its
outer step p · H / P steps after fragment 0 has: P times as often a P-th of the bytes.

With H = 1 and ``optax.sgd(1.0)`` for the outer optimizer that is data parallelism, if the inner update is
linear in the gradients (SGD, with momentum and weight decay too, but not Adam, nor with ``clip``), and if
each worker's part of the batch has as many targets.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from llmpar.files import refuse_first
from llmpar.model.weights import Tree, joined, trainable_params
from llmpar.parallel.collectives import vary
from llmpar.parallel.mesh import platform_of, spec
from llmpar.parallel.modes import Manual
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.places import fragment
from llmpar.plan.plan import Plan, WeightLayouts
from llmpar.training.state import State
from llmpar.training.step import Step

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of Douillard et al. 2023, section 3."""

_led = jax.jit(lambda tree: jax.tree.map(lambda x: x[None], tree))
_without_lead = jax.jit(lambda tree: jax.tree.map(lambda x: x[0], tree))
_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


class LocalState(NamedTuple):
    """The state of each worker; and the weights that the outer optimizer made, with its state."""

    workers: tuple[State, ...]
    outer: State
    step: int


class LocalSteps:
    """The compiled steps of workers, all in this process, and the outer step that joins them. The loop takes
    it in place of a `Step`.

    Args:
        config, plan, mesh, optimizer, clip: as of a `Step`; ``plan.mesh.dp`` is the number of workers.
        every: inner steps between two outer steps.
        outer: any Optax optimizer; with fragments one whose state has the weights' shapes alone.
        fragments: how many parts of the weights have outer steps of their own.

    Attributes:
        whole: the outer weights and optimizer, as a step of all workers has them.
        abstract_in_model_order: shapes and shardings of what is saved: the outer weights; as the optimizer
            the outer one, and the weights and optimizers of the workers, each with a leading dim cut by dp.
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
        fragments: int = 1,
    ):
        self.plan = plan = plan.resolve(config, platform_of(mesh))
        self.config, self.every, self.outer, self.fragments = config, every, outer, fragments
        # its state is cut as weights are stored
        stored = dataclasses.replace(plan.requested, muon="none", zero=3 if plan.zero == 3 else 0)
        self.whole = Step(config, stored, mesh, outer, None)
        self._check()
        self.mesh, self.batch_sharding = self.whole.mesh, self.whole.batch_sharding
        self.evaluate, self.abstract_batch = self.whole.evaluate, self.whole.abstract_batch
        dp, names = mesh.axis_names.index("dp"), mesh.axis_names
        own = (Mesh(np.take(mesh.devices, [i], dp), names) for i in range(plan.mesh.dp))
        self.steps = [Step(config, plan.worker, part, optimizer, clip) for part in own]
        self._programs: list[Any] = [step.run for step in self.steps]
        self.cut = jax.tree.map(lambda layouts: spec(layouts.stored), self.steps[0].weight_layouts)
        self.stacked = jax.tree.map(lambda cut: PartitionSpec("dp", *cut), self.cut)
        shared, worker = self.whole.abstract_in_model_order, self.steps[0].abstract_in_model_order
        kept = {"outer": shared.optimizer, "workers": self._in_all(self._kept(worker))}
        self.abstract_in_model_order = State(shared.params, kept, shared.step)
        self.outer_step = jax.jit(
            self._outer_step,
            static_argnums=0,
            donate_argnums=(1, 2, 3),
            out_shardings=(
                jax.tree.map(partial(NamedSharding, self.mesh), self.stacked),
                jax.tree.map(partial(NamedSharding, self.mesh), self.cut),
                self.whole.shardings.optimizer,
            ),
        )

    def _check(self) -> None:
        """Refuse what are no workers, periods or fragments, and an outer optimizer that counts its steps."""
        plan, every, count, processes = self.plan, self.every, self.fragments, jax.process_count()
        layers, state = self.config.num_layers, self.whole.abstract_state.optimizer
        counters = optax.tree_map_params(self.outer, lambda x: None, state)
        refuse_first(
            (
                plan.mesh.dp < 2 or plan.mode != "manual" or every < 1 or processes > 1,
                f"local steps are of dp={plan.mesh.dp} workers in the mode {plan.mode}, joined every {every}"
                f" steps, in processes: {processes}; use dp=2 or more, mode='manual', 1 step or more, and one"
                " process",
            ),
            (
                every % count or count > layers or (count > 1 and plan.mesh.pp > 1),
                f"fragments={count} of {layers} layers on pp={plan.mesh.pp}, each joined every {every} steps:"
                f" one is due {every}/{count} = {every / count:g} steps after another; use a number that"
                f" divides {every} and is at most {layers}, and pp=1",
            ),
            (
                count > 1 and jax.tree.leaves(counters),
                f"fragments={count} with an outer optimizer that counts its steps: each fragment's"
                " step would count; use one without a schedule, as SGD with momentum, or fragments=1",
            ),
        )

    # ---------------------------------------------------------------------------------------------- the steps

    def run(self, state: LocalState, batch: Tree) -> tuple[LocalState, list[dict]]:
        """Run a step of each worker on its share of the rows of a batch, then the outer steps that are due.
        The metrics are each worker's. It takes over the state's memory."""
        batch = jax.device_put(batch, self.batch_sharding)
        results = [
            program(worker, self._share(i, batch))
            for i, (program, worker) in enumerate(zip(self._programs, state.workers, strict=True))
        ]
        workers, metrics = zip(*results, strict=True)
        state = LocalState(workers, state.outer, state.step + 1)
        for index in range(self.fragments):
            if (state.step - index * self.every // self.fragments) % self.every == 0:
                state = self.join(state, index)
        return state, list(metrics)

    def compiled(self, state: LocalState, batch: Tree) -> Any:
        """Compile the workers' steps, each for its devices; from now on they check nothing. The result is
        called as a compiled `Step` is, and gives the metrics of all workers (`in_all`)."""
        batches = (self._share(i, batch) for i in range(len(self.steps)))
        each = zip(self.steps, state.workers, batches, strict=True)
        self._programs = [step.compiled(worker, own) for step, worker, own in each]
        return self

    def __call__(self, state: LocalState, batch: Tree) -> tuple[LocalState, dict]:
        state, metrics = self.run(state, batch)
        return state, in_all(jax.device_put(metrics, self.mesh.devices.flat[0]))

    def as_text(self) -> str:
        """Return the compiled text of one worker's step."""
        return self._programs[0].as_text()

    def lower(self, index: int = 0) -> Any:
        """Lower the outer step of a fragment, which `jax.stages` then compiles."""
        whole, worker = self.whole.abstract_state, self.steps[0].abstract_state
        shared, own = (trainable_params(x.params, self.config) for x in (whole, worker))
        return self.outer_step.lower(index, self._in_all(own), shared, whole.optimizer)

    def join(self, state: LocalState, index: int = 0) -> LocalState:
        """Run the outer step of a fragment, and give its result to all workers."""
        after = self.stack(
            [trainable_params(worker.params, self.config) for worker in state.workers]
        )
        shared = trainable_params(state.outer.params, self.config)
        after, shared, kept = self.outer_step(index, after, shared, state.outer.optimizer)
        outer = state.outer._replace(params=joined(state.outer.params, shared), optimizer=kept)
        like = lambda step: trainable_params(step.abstract_state.params, self.config)
        own = (self._own(i, after, like(step)) for i, step in enumerate(self.steps))
        pairs = zip(state.workers, own, strict=True)
        workers = [worker._replace(params=joined(worker.params, w)) for worker, w in pairs]
        return LocalState(tuple(workers), outer, state.step)

    def _outer_step(
        self, index: int, after: Tree, shared: Tree, outer: Tree
    ) -> tuple[Tree, Tree, Tree]:
        """Return the workers' weights with those of a fragment replaced, the shared weights after an update
        of it by the mean of what the workers moved it, and the outer optimizer's state."""
        sizes = {path: len(w) for path, w in flatten_dict(shared, sep=".").items()}
        rows = unflatten_dict(fragment(sizes, self.fragments, index), sep=".")
        take = lambda x, row: x[row]
        own = jax.tree.map(take, shared, rows)
        moved = jax.tree.map(lambda x, row: x[:, row], after, rows)
        given = self.cut, self.stacked
        mean = jax.shard_map(
            self._mean_difference, mesh=self.mesh, in_specs=given, out_specs=self.cut
        )
        with jax.numpy_dtype_promotion("standard"):
            kept = optax.tree_map_params(self.outer, take, outer, rows)
            updates, kept = self.outer.update(mean(own, moved), kept, own)
        own = optax.apply_updates(own, updates)
        shared = jax.tree.map(_with_rows, shared, own, rows)
        rows_of_state = optax.tree_map_params(
            self.outer, lambda x, row: row, outer, rows, transform_non_params=lambda x: slice(0)
        )
        outer = jax.tree.map(_with_rows, outer, kept, rows_of_state)
        for_all = jax.tree.map(lambda new, x: jnp.broadcast_to(new, x.shape), own, moved)
        after = jax.tree.map(partial(_with_rows, dim=1), after, for_all, rows)
        return after, shared, outer

    def _mean_difference(self, before: Tree, after: Tree) -> Tree:
        """Return the mean over the workers of what each moved its weights: inside shard_map."""

        def one(old: Array, new: Array, layouts: WeightLayouts) -> Array:
            if not old.size:  # of another fragment
                return old
            own = vary(old, ("dp",)) - new[0]
            return Manual(self.plan).carry_out(own, layouts.difference) / len(self.steps)

        return jax.tree.map(one, before, after, self.steps[0].weight_layouts)

    # ---------------------------------------------------------------------------------------------- the state

    def init(self, seed: int = 0, params: Tree = None) -> LocalState:
        """Make a state in which all workers have the same weights (`Step.init`)."""
        outer = self.whole.init(seed, params)
        weights = self.whole.to_model_order(outer).params
        workers = (
            step.init(seed, self._own_weights(i, weights)) for i, step in enumerate(self.steps)
        )
        return LocalState(tuple(workers), outer, 0)

    def to_model_order(self, state: LocalState, donate: bool = False) -> State:
        """Return what is saved, with the layers in the model's order (``abstract_in_model_order``): a state
        whose weights are the shared ones."""
        outer = self.whole.to_model_order(state.outer, donate)
        pairs = zip(self.steps, state.workers, strict=True)
        kept = [self._kept(step.to_model_order(worker, donate)) for step, worker in pairs]
        step = jax.device_put(jnp.int32(state.step), self.whole.shardings.step)
        return State(outer.params, {"outer": outer.optimizer, "workers": self.stack(kept)}, step)

    def from_model_order(self, state: State, donate: bool = False) -> LocalState:
        """Return the state that `to_model_order` made that of, and so one that was restored."""
        outer = State(state.params, state.optimizer["outer"], state.step)
        workers, done = list[State](), np.int32(state.step)
        for i, step in enumerate(self.steps):
            like = self._kept(step.abstract_in_model_order)
            own = self._own(i, state.optimizer["workers"], like)
            params = joined(self._own_weights(i, state.params), own["params"])
            count = jax.device_put(done, step.shardings.step)
            own = State(params, own["optimizer"], count)
            workers.append(step.from_model_order(own, donate=True))
        return LocalState(tuple(workers), self.whole.from_model_order(outer, donate), int(done))

    def _kept(self, worker: State) -> dict[str, Tree]:
        """Return what a checkpoint has of a worker: its frozen weights are those of all."""
        return {
            "params": trainable_params(worker.params, self.config),
            "optimizer": worker.optimizer,
        }

    def _in_all(self, tree: Tree) -> Tree:
        """Describe the arrays of all workers by those of one."""
        return jax.tree.map(lambda x: _with_lead(x, self.mesh, len(self.steps), "dp"), tree)

    def stack(self, trees: Sequence[Tree]) -> Tree:
        """Return the workers' arrays, each with a leading dim cut by dp. Nothing is sent."""

        def one(like: jax.ShapeDtypeStruct, *copies: Array) -> Array:
            blocks = [block.data for copy in copies for block in copy.addressable_shards]
            return jax.make_array_from_single_device_arrays(like.shape, like.sharding, blocks)

        return jax.tree.map(one, self._in_all(trees[0]), *map(_led, trees))

    def _own(self, i: int, tree: Tree, likes: Tree) -> Tree:
        """Return what worker i has of stacked arrays, copied, and laid out as its own."""
        led = jax.tree.map(lambda x: _with_lead(x, self.steps[i].mesh, 1, None), likes)
        return jax.device_put(
            _without_lead(self._blocks(i, tree, led)), jax.tree.map(lambda x: x.sharding, likes)
        )

    def _own_weights(self, i: int, params: Tree) -> Tree:
        """Return a copy of all weights for worker i."""
        likes = self.steps[i].abstract_in_model_order.params
        return jax.device_put(
            _copied(self._blocks(i, params, likes)), jax.tree.map(lambda x: x.sharding, likes)
        )

    def _share(self, i: int, batch: Tree) -> Tree:
        """Return the rows of worker i, of advantages too."""
        num_rows, length = batch["tokens"].shape
        likes = self.steps[i].abstract_batch(num_rows // len(self.steps), length)
        return self._blocks(i, batch, dict.fromkeys(batch, likes["tokens"]))

    def _blocks(self, i: int, tree: Tree, likes: Tree) -> Tree:
        """Return the blocks of arrays on the devices of worker i, as arrays like these."""

        def one(x: Array, like: jax.ShapeDtypeStruct) -> Array:
            blocks = {block.device: block.data for block in x.addressable_shards}
            own = [blocks[device] for device in self.steps[i].mesh.devices.flat]
            return jax.make_array_from_single_device_arrays(like.shape, like.sharding, own)

        return jax.tree.map(one, tree, likes)


def _with_lead(x: Any, mesh: Mesh, size: int, axis: str | None) -> jax.ShapeDtypeStruct:
    """Describe an array that has one more dim in front, of this size and cut by this axis, on a mesh."""
    cut = NamedSharding(mesh, PartitionSpec(axis, *x.sharding.spec))
    return jax.ShapeDtypeStruct((size, *x.shape), x.dtype, sharding=cut)


def _with_rows(x: Array, rows: Array, row: slice, dim: int = 0) -> Array:
    """Return an array with some of its rows replaced."""
    if not rows.size or rows.shape == x.shape:
        return rows if rows.size else x
    return lax.dynamic_update_slice_in_dim(x, rows, row.start or 0, dim)


@jax.jit
def in_all(metrics: Sequence[dict]) -> dict:
    """Return the workers' metrics as one: the mean loss of all targets, the mean of the gradients' norms, and
    the sums of what is counted."""
    sums = jax.tree.map(lambda *each: sum(each), *metrics)
    loss = sum(one["loss"] * one["tokens"] for one in metrics) / sums["tokens"]
    return sums | {"loss": loss, "grad_norm": sums["grad_norm"] / len(metrics)}
