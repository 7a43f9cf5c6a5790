"""One training step: compute gradients under a plan, then update the sharded optimizer
state and weights.

    gather the weights     at ZeRO 3, each weight when the model uses it (`par.weight`), or all at the start
                           of the step (`Resolved.gather_per`)
    forward and backward   Manual: in shard_map, with the collectives of the arrows
                           Auto: in jit, with collectives that XLA's partitioner chooses
                           Explicit: in jit, with collectives that change one sharding type into the next
    reduce the gradients   `WeightLayouts.finish` completes the sums that the backward pass left unfinished
    divide                 by the number of targets, summed over all devices
    clip, update           any Optax optimizer, on global arrays with the layout `plan.WeightLayouts.reduced`
    restore the weights    at ZeRO 1 and 2, all-gather the updated shards

`Step.train_step` is this list as code. The optimizer runs on global arrays under jit.
So an optimizer that needs whole matrices (Adafactor, Muon) gives the right update
although weights and gradients are sharded, and the compiled update of an elementwise
optimizer such as AdamW has no collective. (With `Plan.muon` the plan's own arrows make
Muon's matrices whole, not XLA's partitioner: `Step._on_whole_matrices`.)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AbstractMesh, Mesh, use_abstract_mesh
from jaxtyping import Array

from llmpar.files import Allowed
from llmpar.model.llama import Batch, LossAndTally
from llmpar.model.weights import (
    Tree,
    init_params,
    joined,
    model_graph,
    trainable_params,
    weights_tree,
)
from llmpar.parallel.collectives import varying
from llmpar.parallel.mesh import explicit, platform_of, sharding, split_axes
from llmpar.parallel.modes import Manual, Solo
from llmpar.parallel.partitioned import Auto, Explicit
from llmpar.parallel.xla_options import compiler_options
from llmpar.pipeline import executor
from llmpar.plan import checks
from llmpar.plan.layout import METRICS, WHOLE, Arrow, Dim, Layout
from llmpar.plan.model_config import ModelConfig, kind_of
from llmpar.plan.plan import Plan, WeightLayouts
from llmpar.training.layer_order import LayerOrder, take_in_order
from llmpar.training.muon import Muon, map_unmasked
from llmpar.training.state import Checked, State, check_mesh, initial_state, placed_weights

# The dims of the routers' tally (`LossAndTally`). Two entries of e come after the
# experts: the dropped choices, and the sum of router entropies.
_TALLY = (Dim("l"), Dim("e"))
_SEED = Allowed(int, 0, 2**32 - 1)  # JAX drops the upper bits of a larger seed
MODES: dict[str, type[Manual | Auto]] = {"manual": Manual, "auto": Auto, "explicit": Explicit}
"""The class of ``par``, by `Plan.mode`."""


class Step(LayerOrder):
    """The compiled training step of a model under a plan on a mesh.

    A pipeline's stages hold the layers in an order of their own, while
    checkpoints have the model's order. The base class, `LayerOrder`, has
    shapes and shardings of the state in both (``abstract_state`` in the
    stages', ``abstract_in_model_order`` in the model's), and moves a state from one order to the
    other. ``layer_orders`` says, for each kind of layers, which layer is in
    which place of the stages. Without a pipeline the two orders are one.

    Args:
        config, plan, mesh: ``mesh`` may be abstract, for tracing and lowering.
        optimizer: any Optax optimizer.
        clip: largest global gradient norm; None leaves gradients as they are.

    Attributes:
        par, mesh: the object that the model calls, of a class of `MODES`, and its mesh.
        stored, reduced: layouts of weights between steps, and of gradients.
        weight_layouts: all layouts of the trained weights.
        shardings, batch_sharding: of the state, and of a batch's arrays.
        run: `train_step`, compiled. It checks its arguments (`state.Checked`), and donates the state: the new
            state takes its memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: Plan,
        mesh: Mesh | AbstractMesh,
        optimizer: optax.GradientTransformation,
        clip: float | None = 1.0,
    ):
        check_mesh(plan, mesh)
        self.config = config
        self.plan = plan = plan.resolve(config, platform_of(mesh))
        if why := checks.why_not_run(plan):
            raise ValueError(why)
        self.optimizer = optax.with_extra_args_support(optimizer)
        self.clip = clip
        # A plan may split axes in two: ep into ep and near, sp into sp and
        # ul, tp into tp and kv. Two meshes of the same devices have these
        # axes: Explicit needs explicit axes, the optimizer automatic ones.
        self._auto_mesh = split_axes(mesh, plan.mesh)
        self.mesh = explicit(self._auto_mesh) if plan.mode == "explicit" else self._auto_mesh
        self.par = MODES[plan.mode](plan, self.mesh)
        self.stored = weights_tree(config, lambda weight: plan.stored(weight.dims))
        # `stored` has all weights, `weight_layouts` and `reduced` only the
        # trainable ones (with LoRA the adapters)
        self.weight_layouts = weights_tree(
            config, lambda w: plan.layouts_of(w.dims), trainable=True
        )
        self.reduced = jax.tree.map(lambda layouts: layouts.reduced, self.weight_layouts)
        super().__init__(config, plan, self.mesh, self.optimizer)
        if plan.muon != "none" and not isinstance(optimizer, Muon):
            raise ValueError(
                f"muon='{plan.muon}' moves whole matrices for Muon, and this optimizer takes none; use"
                " llmpar.training.muon.muon(rate, config), or leave muon out"
            )
        self.shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        self._batch_layout = plan.place("data b s")
        self.batch_sharding = sharding(self.mesh, self._batch_layout)
        run = jax.jit(
            self.train_step,
            in_shardings=(self.shardings, self.batch_sharding),
            out_shardings=(self.shardings, None),
            donate_argnums=0,
            compiler_options=compiler_options(plan),
        )
        self.run = Checked(run, config.vocab_size)

    # ---------------------------------------------------------------------------------------------- the step

    def train_step(self, state: State, batch: Batch) -> tuple[State, dict]:
        """Run one step: the list at the top of this file. `run` is this function, compiled."""
        trainable = trainable_params(state.params, self.config)
        # the types of `Explicit` need the mesh, and kernels read their device from it
        with use_abstract_mesh(self.mesh.abstract_mesh):
            # gather, forward, backward, reduce, divide
            grads, metrics = self.gradients(state.params, batch)
            grads = self._clip(grads, metrics["grad_norm"])
            trainable, optimizer = self._with_automatic_axes(self._update)(
                trainable, grads, state.optimizer, metrics
            )
            trainable = self._restore(trainable)
        return State(joined(state.params, trainable), optimizer, state.step + 1), metrics

    def gradients(self, params: Tree, batch: Batch) -> tuple[Tree, dict]:
        """Return gradients, with the layouts `WeightLayouts.reduced`, and metrics. Update nothing: this is
        what the parity tests compare."""
        self.plan.check(*batch["tokens"].shape)
        # `train_step` sets the mesh, too, but this function is also called alone
        with use_abstract_mesh(self.mesh.abstract_mesh):
            # one layout stands for all arrays of the batch, and for all metrics (a prefix of the tree)
            layouts, results = (self.stored, self._batch_layout), (self.reduced, WHOLE)
            return self.par.over_devices(self._gradients, layouts, results)(params, batch)

    def _gradients(self, params: Tree, batch: Batch) -> tuple[Tree, dict]:
        """Return gradients and metrics. In `Manual` arguments and results are a device's own shards; in the
        other modes they are global arrays."""
        # In shard_map a type says along which mesh axes a value may differ
        # between devices. Where a weight's type says that it is the same,
        # autodiff sums its gradient over the axis at once. So `unfinished`
        # types each weight as different along its replicas: no value
        # changes, each device keeps its own term of the gradient
        # (`WeightLayouts.unreduced`), and `finish` sums it at the end.
        # (With reduce="layer" the backward pass sums. `Explicit` has types
        # of its own for this, and in `Auto` XLA decides.)
        params = jax.tree.map(self.par.unfinished, params, weights_tree(self.config))
        # `Resolved.check` refuses a pipeline in other modes; isinstance tells the type checker
        if self.plan.pipeline and isinstance(self.par, Manual):
            loss_and_tally, grads = executor.gradients(
                self.config, self.par, params, batch, self._zeros()
            )
        elif self.plan.microbatches == 1:
            loss_and_tally, grads = self._backward(params, batch)
        else:

            def add(total, part):
                return jax.tree.map(jnp.add, total, self._backward(params, part)), None

            parts = cut_in_microbatches(batch, self.plan.microbatches)
            (loss_and_tally, grads), _ = lax.scan(add, self._zeros(), parts)
        grads = (
            self._in_buckets(grads)
            if self.plan.reduce == "bucket"
            else self._carry_out(grads, lambda layouts: layouts.finish)
        )
        return self._per_target(loss_and_tally, grads, batch)

    def _backward(self, params: Tree, batch: Batch) -> tuple[LossAndTally, Tree]:
        """Return the sums of loss and tally, and the gradients, of a microbatch. At ZeRO 2 reduce-scatter the
        gradients, before those of microbatches are added (`WeightLayouts.accumulate`)."""

        def loss(trainable: Tree) -> LossAndTally:
            model = nnx.merge(model_graph(self.config), joined(params, trainable))
            return model.loss(batch, self.par)

        loss_and_tally, grads = jax.value_and_grad(loss, has_aux=True)(
            trainable_params(params, self.config)
        )
        return loss_and_tally, self._carry_out(grads, lambda layouts: layouts.accumulate)

    def _clip(self, grads: Tree, norm: Array) -> Tree:
        """Scale gradients so that their global norm is `clip` at most."""
        if self.clip is None:
            return grads
        scale = jnp.minimum(1.0, self.clip / jnp.maximum(norm, 1e-12))
        return jax.tree.map(lambda g: g * scale, grads)

    def _update(
        self, trainable: Tree, grads: Tree, moments: Tree, metrics: dict
    ) -> tuple[Tree, Tree]:
        """Return the updated weights, and the optimizer's new state, the ``moments``. Weights come in their
        stored layout, and are updated in that of the gradients: at ZeRO 1 and 2 each device updates its slice
        of a weight."""
        trainable = self._constrain(trainable)
        # Optax mixes dtypes, which a caller may have forbidden (`jax_numpy_dtype_promotion="strict"`)
        with jax.numpy_dtype_promotion("standard"):
            extra = {"on_matrices": self._on_whole_matrices} if self.plan.muon != "none" else {}
            updates, moments = self.optimizer.update(grads, moments, trainable, **extra)
        updated = self._balance_experts(trainable, optax.apply_updates(trainable, updates), metrics)
        return self._constrain(updated), moments

    def _on_whole_matrices(self, f: Callable, tree: Tree) -> Tree:
        """Apply ``f(matrices, dims)`` to each leaf that Muon updates, a stack of matrices: move it to a
        layout in which its matrices are whole (`Plan.muon`), call ``f``, and move the result back to the
        gradient's layout. In every mode the plan's own collectives move it: XLA's partitioner would hold the
        whole matrices of all layers at once (in one plan 9.0 GiB of temporaries in place of 3.4)."""
        par = Manual(self.plan, self._auto_mesh)

        def one(x: Array, layouts: WeightLayouts) -> Array:
            whole = par.carry_out(x, layouts.assemble)
            return par.carry_out(f(whole, layouts.dims), layouts.take_apart)

        # Optax has masked the leaves that Adam updates
        reduced = map_unmasked(lambda x, layouts: layouts.reduced, tree, self.weight_layouts)
        all_leaves = lambda tree: map_unmasked(one, tree, self.weight_layouts)
        return par.over_devices(all_leaves, (reduced,), reduced)(tree)

    def _restore(self, trainable: Tree) -> Tree:
        """Move updated weights from ``reduced`` to their stored layout: an all-gather at ZeRO 1 and 2."""
        stored = trainable_params(self.stored, self.config)
        if self.reduced == stored:
            return trainable
        restore = lambda trainable: self._carry_out(
            trainable, lambda layouts: layouts.restore, invariant=True
        )
        return self.par.over_devices(restore, (self.reduced,), stored)(trainable)

    # --------------------------------------------------------------------------------- the parts of the step

    def _carry_out(self, tree: Tree, arrow_of: Callable, invariant: bool = False) -> Tree:
        """Carry out for each leaf the arrow that ``arrow_of`` takes from its `WeightLayouts`. ``invariant``
        is that of `Manual.carry_out`."""
        one = lambda x, layouts: self.par.carry_out(x, arrow_of(layouts), invariant=invariant)
        return jax.tree.map(one, tree, self.weight_layouts)

    def _zeros(self) -> tuple[LossAndTally, Tree]:
        """Return zeros for the sums of loss, routers' tally and gradients over microbatches, typed like the
        values that will be added to them."""
        # Each device has its own term of the loss. So this zero is typed as
        # different along all axes that cut tokens, the b and s of the region
        # data: what a scan carries may not change its type.
        loss, tally = self.par.zeros((), Layout((), self.plan.varying("data"))), None
        if self.config.experts:
            # one entry for each layer with experts
            shape = len(self.config.kinds_of_routed_layers), self.config.experts.num_experts + 2
            tally = self.par.zeros(shape, Layout(_TALLY, self.plan.varying("stream")))
        zero = lambda w, layouts: self.par.zeros(w.shape, layouts.accumulated)
        weights = trainable_params(self.abstract_state.params, self.config)
        return (loss, tally), jax.tree.map(zero, weights, self.weight_layouts)

    def _in_buckets(self, grads: Tree) -> Tree:
        """All-reduce gradients in flat buckets (Li et al. 2020): fewer collectives, the same bytes, and the
        first one can run during the backward pass. A bucket has leaves that are summed over the same axes,
        and takes no more once it has `Plan.bucket_bytes`. For ZeRO 0 alone: see `checks.check_plan`."""
        leaves, tree = jax.tree.flatten(grads)
        sum_axes = [layouts.accumulated.sums for layouts in jax.tree.leaves(self.weight_layouts)]
        # Only gradients that vary over the same axes share a bucket. Concatenated with others, each
        # would vary over the axes of all, and shard_map refuses results that are to be the same
        # along such an axis.
        items = [
            ((axes, varying(leaf)), leaf.nbytes)
            for axes, leaf in zip(sum_axes, leaves, strict=True)
        ]
        for (axes, _), members in self.plan.buckets(items):
            flat, restore = ravel_pytree([leaves[j] for j in members])
            text = f"bucket of {len(members)} gradients"
            flat = self.par.carry_out(flat, Arrow(Layout((), axes), WHOLE, text=text))
            for j, piece in zip(members, restore(flat), strict=True):
                leaves[j] = piece
        return jax.tree.unflatten(tree, leaves)

    def _per_target(
        self, loss_and_tally: LossAndTally, grads: Tree, batch: Batch
    ) -> tuple[Tree, dict]:
        """Sum over all devices the loss, the number of targets (negative ones do not
        count), the gradients' squares and the routers' tally. Divide gradients, their norm
        and the loss by the number of targets. Return gradients and metrics. In `Auto` and
        `Explicit` these sums of global arrays are finished already, with one exception: in
        `Explicit` the router leaves the tally an unfinished sum (``stream e +b +s`` in
        `llama.Experts`), and the arrow below finishes it."""
        loss, tally = loss_and_tally
        targets = (batch["targets"] >= 0).sum()
        if isinstance(self.par, Manual):
            # Leaves differ in the axes over which they are replicated. So each leaf's square is counted once
            # here, before they are added up; `sum_over_devices` can do that only for their sum.
            square = sum(self.par.count_once(jnp.sum(g * g)) for g in jax.tree.leaves(grads))
            values = loss, targets.astype(jnp.float32), square, tally
            loss, targets, square, tally = self.par.sum_over_devices(values)
        else:
            square = optax.tree.norm(grads, squared=True)
            if tally is not None:
                unfinished = Layout(_TALLY, self.plan.varying("stream"))
                tally = self.par.carry_out(tally, Arrow(unfinished, Layout(_TALLY), text=METRICS))
        targets = jnp.maximum(targets, 1).astype(jnp.float32)
        grads = jax.tree.map(lambda g: g / targets, grads)
        norm = jnp.sqrt(square) / targets
        # tokens: those that have a target
        metrics = {"loss": loss / targets, "grad_norm": norm, "tokens": targets}
        # choices per expert ``l e``, dropped choices ``l``, sums of tokens' router entropies ``l``
        if tally is not None:
            metrics |= {
                "load": tally[:, :-2],
                "dropped": tally[:, -2],
                "router_entropy": tally[:, -1],
            }
        return grads, metrics

    def _with_automatic_axes(self, update: Callable) -> Callable:
        """Return ``update`` as a function that sees automatic axes. In the mode Explicit arrays have explicit
        sharding types, for which optimizers are not written."""
        if not isinstance(self.par, Explicit):
            return update
        reduced = jax.tree.map(functools.partial(sharding, self.mesh), self.reduced)
        return jax.sharding.auto_axes(update, out_sharding=(reduced, self.shardings.optimizer))

    def _constrain(self, params: Tree) -> Tree:
        """Return the weights, constrained to the layouts of the gradients."""
        cut = lambda x, layout: lax.with_sharding_constraint(x, sharding(self._auto_mesh, layout))
        return jax.tree.map(cut, params, self.reduced)

    def _balance_experts(self, before: Tree, after: Tree, metrics: dict) -> Tree:
        """Return the weights ``after`` an update, but replace each ``experts.bias``: it has no gradient. The
        new bias of an expert is the one ``before``, plus `bias_rate` if its load is less than the mean, minus
        `bias_rate` if it is more (DeepSeek-V3 2024, section 2.1.2)."""
        experts = self.config.experts
        if experts is None or experts.bias_rate is None or self.config.lora:  # LoRA freezes them
            return after
        load_le = metrics["load"]  # l layers, e experts
        # sign(mean - load) = sign(sum - E load). Sum and E load are whole numbers, exact in float32 up to
        # 2**24. With a rounded mean the sign could be wrong for an expert whose load is the mean.
        direction_le = jnp.sign(load_le.sum(1, keepdims=True) - experts.num_experts * load_le)
        kinds = np.array(self.config.kinds_of_routed_layers)
        flat, rate = flatten_dict(after, sep="."), experts.bias_rate
        for path, bias_le in flatten_dict(before, sep=".").items():
            if path.endswith("experts.bias"):
                kind = max(kind_of(path), 0)  # -1: all layers are of one kind
                # own_le is in the model's order, bias_le in that of the stages
                own_le = direction_le[kinds == kind]
                if not self.is_model_order:
                    own_le = take_in_order(own_le, self.layer_orders[kind], 0)
                flat[path] = bias_le + rate * own_le
        return unflatten_dict(flat, sep=".")

    # --------------------------------------------------------------------------------------------- the state

    def init(self, seed: int = 0, params: Tree = None) -> State:
        """Make the initial state. Each device makes only its own shards. A seed gives the same weights on
        every mesh.

        Args:
            params: weights to begin with, in the model's order; weights that this tree lacks are
                initialised. An array that has the dtype and sharding of ``abstract_in_model_order`` is
                donated: the state takes its memory and the caller's array is deleted, so that no weight
                exists twice. Other arrays are copied.
        """
        _SEED.check("seed", seed)
        like = self.abstract_in_model_order.params
        given = placed_weights(params or {}, like, self.config.name)

        def make(key, given):
            params = unflatten_dict(
                flatten_dict(init_params(self.config, key), sep=".") | given, sep="."
            )
            # Frozen weights may have a narrower dtype.
            params = jax.tree.map(lambda w, target: w.astype(target.dtype), params, like)
            return initial_state(params, self.config, self.optimizer)

        in_model_order = jax.tree.map(lambda x: x.sharding, self.abstract_in_model_order)
        make_placed = jax.jit(make, out_shardings=in_model_order, donate_argnums=1)
        return self.from_model_order(make_placed(jax.random.key(seed), given), donate=True)

    # ---------------------------------------------------------------------------------------- beside the step

    def lower(self, batch_size: int, seq_len: int) -> jax.stages.Lowered:
        """Lower the step for batches of this shape, without any array. On an abstract mesh
        use ``run.trace(…).lower(lowering_platforms=…)``."""
        return self.run.lower(self.abstract_state, self.abstract_batch(batch_size, seq_len))

    def compiled(self, state: State, batch: Batch) -> Any:
        """Compile the step for these arrays, without the checks of `run`."""
        return self.run.lower(state, batch).compile()

    def abstract_batch(self, batch_size: int, seq_len: int) -> dict:
        """Return shapes and shardings of one batch."""
        one = jax.ShapeDtypeStruct((batch_size, seq_len), jnp.int32, sharding=self.batch_sharding)
        return dict.fromkeys(("tokens", "targets", "positions", "segments"), one)

    @functools.cached_property
    def evaluate(self) -> Checked:
        """A compiled function (weights, batch) -> (sum of the targets' cross-entropies, number of
        targets): forward only, without the routers' own losses (for a batch with advantages the sum
        of its surrogate). Weights are as in ``abstract_in_model_order`` (`to_model_order`). With a
        pipeline or in the mode Auto it runs under XLA's partitioner, else (in the mode Explicit,
        too) under `Manual`. With a pipeline every stage receives the layers of all others, which
        may need memory for all of them."""
        plan = self.plan

        def loss_and_count(par: Solo, params: Tree, batch: Batch):
            model = nnx.merge(model_graph(self.config), params)
            parts = cut_in_microbatches(batch, plan.microbatches)
            loss = lax.map(lambda part: model.cross_entropies(part, par)[0].sum(), parts).sum()
            return loss, (batch["targets"] >= 0).sum().astype(jnp.float32)

        run: Callable = functools.partial(loss_and_count, Auto(plan, self.mesh))
        if plan.mode != "auto" and not plan.pipeline:
            par = Manual(plan, self.mesh)
            manual = lambda params, batch: par.sum_over_devices(loss_and_count(par, params, batch))
            run = par.over_devices(manual, (self.stored, self._batch_layout), WHOLE)
        return Checked(jax.jit(run), self.config.vocab_size)


def cut_in_microbatches(batch: Batch, count: int) -> Batch:
    """Reshape each array of the batch from ``b …`` to ``count, b / count, …``. Microbatch i has the rows i,
    i + count, …, so that each is sharded over devices as the batch is."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0), batch)
