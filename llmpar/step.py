"""One training step: gradients under a plan, then the optimizer on whatever share of the state each device keeps.

    forward and backward   Manual: in shard_map, collectives by the arrows     Auto: in jit, XLA's choice
    reduce the gradients   `Plan.unreduced`, for what the backward pass has not summed already
    clip, update           any Optax optimizer, on global arrays cut as `Plan.graded` says
    restore the weights    ZeRO 1 and 2: the updated shards are gathered again

The optimizer runs on global arrays under jit, so one that looks at whole matrices (Adafactor, Muon) stays right when its
state is cut; for elementwise ones such as AdamW the compiled update holds no collective.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from llmpar.config import ModelConfig
from llmpar.mesh import sharding, spec
from llmpar.model import Batch, Llama
from llmpar.notation import Arrow, Layout
from llmpar.par import Auto, Entry, Manual, Solo, vary, varying
from llmpar.plan import Plan

Tree = Any
WHOLE = Layout(())


class State(NamedTuple):
    """What a step changes: float32 master weights, the optimizer's state, and the number of steps done."""

    params: Tree
    optimizer: Tree
    step: jax.Array


def weight_dims(config: ModelConfig) -> Tree:
    """The tree of every weight's region and dims, shaped as the parameters are."""
    tree: dict = {}
    for path, (dims, _) in config.param_shapes().items():
        *parents, leaf = path.split(".")
        functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[leaf] = dims
    return tree


@functools.cache
def model_graph(config: ModelConfig):
    """The model without its weights: ``nnx.merge(model_graph(config), params)`` is the model."""
    return nnx.split(nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0))))[0]


def init_params(config: ModelConfig, seed: int | jax.Array = 0) -> Tree:
    """Fresh weights as a plain dict of arrays; under jit each device makes only its own shard."""
    return nnx.to_pure_dict(nnx.state(Llama(config, nnx.Rngs(params=seed)), nnx.Param))


class Step:
    """The compiled training step of a model under a plan on a mesh.

    Args:
        config, plan, mesh: what, how, and where. ``mesh`` may be abstract for tracing and lowering.
        optimizer: any Optax optimizer.
        clip: largest global gradient norm; None leaves gradients as they are.

    Attributes:
        ledger: after tracing, the `Entry` of every collective that the Manual reading wrote in the forward direction.
    """

    def __init__(
        self, config: ModelConfig, plan: Plan, mesh: Mesh, optimizer: optax.GradientTransformation, clip: float | None = 1.0
    ):
        self.config, self.plan, self.mesh, self.optimizer, self.clip = config, plan, mesh, optimizer, clip
        self.dims = weight_dims(config)
        self.ledger: list[Entry] = []
        self.stored, self.graded = (jax.tree.map(place, self.dims) for place in (plan.stored, plan.graded))
        params = jax.eval_shape(lambda: init_params(config))
        state = jax.eval_shape(lambda p: State(p, optimizer.init(p), jnp.int32(0)), params)
        self.abstract_state = jax.tree.map(
            lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(mesh, layout)), state, self._layouts(state)
        )
        self.shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        self.batch_sharding = sharding(mesh, plan.place("data b s"))
        self.run = jax.jit(
            self._step, in_shardings=(self.shardings, self.batch_sharding), out_shardings=(self.shardings, None), donate_argnums=0
        )

    def _layouts(self, state: State) -> State:
        """Layouts of the whole state. What an optimizer keeps per weight and in its shape is cut like its gradient."""

        def of(leaf, layout, param):
            return layout if leaf.shape == param.shape else WHOLE

        optimizer = optax.tree_map_params(
            self.optimizer, of, state.optimizer, self.graded, state.params, transform_non_params=lambda _: WHOLE
        )
        return State(self.stored, optimizer, WHOLE)

    def init(self, seed: int = 0) -> State:
        """A fresh state, made in place: no device ever holds more than its share."""
        make = lambda key: init_params(self.config, key)  # noqa: E731
        params = jax.jit(make, out_shardings=self.shardings.params)(jax.random.key(seed))
        optimizer = jax.jit(self.optimizer.init, out_shardings=self.shardings.optimizer)(params)
        return State(params, optimizer, jax.device_put(jnp.int32(0), self.shardings.step))

    def lower(self, batch_size: int, seq_len: int):
        """The step lowered for batches of this shape, without any array: for compiling and for reading."""
        return self.run.lower(self.abstract_state, self.abstract_batch(batch_size, seq_len))

    def abstract_batch(self, batch_size: int, seq_len: int) -> Batch:
        """Shapes and shardings of one batch."""
        one = jax.ShapeDtypeStruct((batch_size, seq_len), jnp.int32, sharding=self.batch_sharding)
        return {name: one for name in ("tokens", "targets", "positions", "segments")}

    # ------------------------------------------------------------------------------------------------------- the step

    def _step(self, state: State, batch: Batch) -> tuple[State, dict]:
        par = Manual(self.plan) if self.plan.reading == "manual" else Auto(self.plan, self.mesh)
        grads, metrics = self._gradients(par, state.params, batch)
        if self.clip is not None:
            scale = jnp.minimum(1.0, self.clip / jnp.maximum(metrics["grad_norm"], 1e-12))
            grads = jax.tree.map(lambda g: g * scale, grads)
        params = self._constrain(state.params, self.graded)
        updates, optimizer = self.optimizer.update(grads, state.optimizer, params)
        params = self._constrain(optax.apply_updates(params, updates), self.graded)
        self.ledger = getattr(par, "ledger", [])
        return State(self._restore(par, params), optimizer, state.step + 1), metrics

    def gradients(self, params: Tree, batch: Batch) -> tuple[Tree, dict]:
        """Gradients (cut as `Plan.graded`) and metrics, without an update: what the parity tests compare."""
        par = Manual(self.plan) if self.plan.reading == "manual" else Auto(self.plan, self.mesh)
        return self._gradients(par, params, batch)

    def _gradients(self, par: Solo, params: Tree, batch: Batch) -> tuple[Tree, dict]:
        if isinstance(par, Auto):
            grads, metrics = self._auto(par, params, batch)
            return grads, metrics | {"grad_norm": optax.tree.norm(grads)}
        specs = lambda layouts: jax.tree.map(spec, layouts)  # noqa: E731
        data = spec(self.plan.place("data b s"))
        return jax.shard_map(
            functools.partial(self._manual, par), mesh=self.mesh, in_specs=(specs(self.stored), data), out_specs=(specs(self.graded), spec(WHOLE))
        )(params, batch)

    def _loss(self, par: Solo, params: Tree, batch: Batch, total) -> jax.Array:
        return nnx.merge(model_graph(self.config), params).losses(batch, par).sum() / total

    def _auto(self, par: Auto, params: Tree, batch: Batch):
        total = jnp.maximum((batch["targets"] >= 0).sum(), 1).astype(jnp.float32)
        loss, grads = self._accumulate(par, params, batch, total, lambda g: self._constrain(g, self.graded))
        return self._constrain(grads, self.graded), {"loss": loss, "tokens": total}

    def _manual(self, par: Manual, params: Tree, batch: Batch):
        """On one device: its part of the batch, its shards of the weights."""
        plan = self.plan
        everywhere = Arrow(Layout((), plan.varying("data")), WHOLE)
        count = (batch["targets"] >= 0).sum().astype(jnp.float32)
        total = jnp.maximum(par.carry_out(count, everywhere, "tokens in the batch"), 1)
        late = plan.zero < 3 and plan.reduce != "layer"  # gradients are summed after the backward pass, not during it
        if late:
            params = jax.tree.map(lambda w, d: vary(w, plan.unreduced(d).before.sums), params, self.dims)
        cut = self._reduce_scatter(par) if plan.zero == 2 and plan.accumulate > 1 else None
        loss, grads = self._accumulate(par, params, batch, total, cut)
        if late and not cut:
            grads = self._reduce(par, grads)
        metrics = {"loss": par.carry_out(loss, everywhere, "loss"), "grad_norm": self._norm(par, grads), "tokens": total}
        return grads, metrics

    def _accumulate(self, par: Solo, params: Tree, batch: Batch, total, cut=None):
        """Sum loss and gradients over microbatches; ``cut`` is applied to each microbatch's gradients before summing."""
        loss = functools.partial(self._loss, par)
        parts = self.plan.accumulate
        if parts == 1:
            value, grads = jax.value_and_grad(loss)(params, batch, total)
            return value, cut(grads) if cut else grads
        micro = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0), batch)

        def one(done, part):
            value, grads = jax.value_and_grad(loss)(params, part, total)
            return jax.tree.map(jnp.add, done, (value, cut(grads) if cut else grads)), None

        with par.repeated(parts):
            return lax.scan(one, self._zeros(par, params, cut), micro)[0]

    def _zeros(self, par: Solo, params: Tree, cut):
        """The sum of no microbatches, varying over the axes that each gradient will vary over."""
        if isinstance(par, Auto):
            return jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
        sizes, plan = self.plan.mesh.sizes, self.plan

        def zero(w, dims):
            if not cut:
                return vary(jnp.zeros_like(w), sorted(varying(w)))
            arrow = plan.unreduced(dims)
            shape = list(w.shape)
            for i, dim in enumerate(arrow.after.dims):
                for axis in dim.axes:
                    shape[i] //= sizes[axis] if axis in arrow.before.sums else 1
            return vary(jnp.zeros(shape, w.dtype), arrow.after.axes)

        return vary(jnp.float32(0), plan.varying("data")), jax.tree.map(zero, params, self.dims)

    # ------------------------------------------------------------------------------------------- reducing, restoring

    def _reduce_scatter(self, par: Manual):
        return lambda grads: jax.tree.map(lambda g, d: par.carry_out(g, self.plan.unreduced(d), f"gradient {d}"), grads, self.dims)

    def _reduce(self, par: Manual, grads: Tree) -> Tree:
        """Finish the sums: leaf by leaf, or leaves with the same axes concatenated into buckets (ZeRO 0)."""
        plan = self.plan
        if plan.reduce != "bucket":
            return self._reduce_scatter(par)(grads)
        leaves, tree = jax.tree.flatten(grads)
        arrows = [plan.unreduced(d) for d in jax.tree.leaves(self.dims)]
        bucket: list[int] = []
        for i, (leaf, arrow) in enumerate(zip(leaves, arrows, strict=True)):
            bucket.append(i)
            full = sum(leaves[j].nbytes for j in bucket) >= plan.bucket_bytes
            if full or i + 1 == len(leaves) or arrows[i + 1].before.sums != arrow.before.sums or varying(leaves[i + 1]) != varying(leaf):
                flat = jnp.concatenate([leaves[j].reshape(-1) for j in bucket])
                flat = par.carry_out(flat, Arrow(Layout((), arrow.before.sums), WHOLE), f"bucket of {len(bucket)} gradients")
                at = 0
                for j in bucket:
                    leaves[j] = flat[at : at + leaves[j].size].reshape(leaves[j].shape)
                    at += leaves[j].size
                bucket = []
        return jax.tree.unflatten(tree, leaves)

    def _norm(self, par: Manual, grads: Tree) -> jax.Array:
        """The global norm: every element counted once, one scalar all-reduce per set of axes that cuts some leaf."""
        squares: dict[tuple[str, ...], jax.Array] = {}
        for g, layout in zip(jax.tree.leaves(grads), jax.tree.leaves(self.graded), strict=True):
            axes = tuple(a for a in self.plan.mesh.sizes if a in layout.axes)
            squares[axes] = squares.get(axes, 0) + jnp.sum(g * g)
        sums = [par.carry_out(x, Arrow(Layout((), axes), WHOLE), "gradient norm") for axes, x in squares.items()]
        return jnp.sqrt(sum(sums))

    def _restore(self, par: Solo, params: Tree) -> Tree:
        """From the layout of the update to the stored layout: ZeRO 1 and 2 gather, the others are there already."""
        if not isinstance(par, Manual) or self.plan.zero in (0, 3) or not self.plan.live("fsdp"):
            return self._constrain(params, self.stored)

        def gather(params):
            move = lambda w, before, after, dims: par.carry_out(w, Arrow(before, after), f"updated {dims}", invariant=True)  # noqa: E731
            return jax.tree.map(move, params, self.graded, self.stored, self.dims)

        specs = [jax.tree.map(spec, layouts) for layouts in (self.graded, self.stored)]
        return jax.shard_map(gather, mesh=self.mesh, in_specs=(specs[0],), out_specs=specs[1])(params)

    def _constrain(self, tree: Tree, layouts: Tree) -> Tree:
        return jax.tree.map(lambda x, layout: lax.with_sharding_constraint(x, sharding(self.mesh, layout)), tree, layouts)

