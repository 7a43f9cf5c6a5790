"""One training step: gradients under a plan, then the optimizer on whatever share of the state each device keeps.

    forward and backward   Manual: in shard_map, collectives by the arrows     Auto: in jit, XLA's choice
    reduce the gradients   `Plan.unreduced`, for what the backward pass has not summed already
    clip, update           any Optax optimizer, on global arrays cut as `Plan.graded` says
    restore the weights    ZeRO 1 and 2: the updated shards are gathered again

The optimizer runs on global arrays under jit, so one that looks at whole matrices (Adafactor, Muon) stays right when its
state is cut; for elementwise ones such as AdamW the compiled update holds no collective.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from llmpar import pipeline
from llmpar.config import ModelConfig
from llmpar.mesh import sharding, spec
from llmpar.model import Batch, Llama
from llmpar.notation import Arrow, Dim, Layout
from llmpar.par import Auto, Entry, Manual, Solo, vary, varying
from llmpar.plan import Plan

Tree = Any
WHOLE = Layout(())


class State(NamedTuple):
    """What a step changes: float32 master weights, the optimizer's state, and the number of steps done."""

    params: Tree
    optimizer: Tree
    step: Any


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
        layer_order: which of the model's layers lies at each place of the stack that the state holds (see `pipeline`).
        ledger: after tracing, the `Entry` of everything that the Manual reading sends (`Manual.traffic`).
    """

    def __init__(
        self, config: ModelConfig, plan: Plan, mesh: Mesh, optimizer: optax.GradientTransformation, clip: float | None = 1.0
    ):
        self.config, self.plan, self.mesh, self.optimizer, self.clip = config, plan, mesh, optimizer, clip
        if plan.dispatch == "ragged" and isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu":
            raise ValueError("dispatch='ragged' needs a GPU or TPU: XLA has no ragged all-to-all for CPUs; use 'padded'")
        self.dims = weight_dims(config)
        self.ledger: list[Entry] = []
        self.stored, self.graded = (jax.tree.map(place, self.dims) for place in (plan.stored, plan.graded))
        state = self._shapes(plan.padded(config))
        laid_out = lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(mesh, layout))
        self.abstract_state = self.abstract_natural = jax.tree.map(laid_out, state, layouts := self._layouts(state))
        if plan.padded(config) != config:  # layers that pp does not divide
            whole = lambda layout: Layout(tuple(Dim(d.name, d.axes * (d.name != "l")) for d in layout.dims))
            self.abstract_natural = jax.tree.map(laid_out, self._shapes(config), jax.tree.map(whole, layouts))
        self.shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        self.layer_order = pipeline.layer_order(plan.pipeline, config.num_layers)
        self._in_order = self.layer_order.tolist() == list(range(config.num_layers))  # then nothing is ever moved
        self.batch_sharding = sharding(mesh, plan.place("data b s"))
        given, made = (self.shardings, self.batch_sharding), (self.shardings, None)
        self.run = jax.jit(self._step, in_shardings=given, out_shardings=made, donate_argnums=0)

    def _shapes(self, config: ModelConfig) -> State:
        """The state's leaves by shape and dtype."""
        params = jax.eval_shape(lambda: init_params(config))
        return jax.eval_shape(lambda p: State(p, self.optimizer.init(p), jnp.int32(0)), params)

    def _layouts(self, state: State) -> State:
        """Layouts of the whole state. What an optimizer keeps under a weight's path and in its shape (moments, say) is cut
        like the weight's gradient; the rest (counters, Adafactor's row and column sums) is whole."""
        flat, _ = jax.tree_util.tree_flatten_with_path(state.params)
        known = {path: (x.shape, layout) for (path, x), layout in zip(flat, jax.tree.leaves(self.graded), strict=True)}

        def of(path, leaf):
            shape, layout = next((known[path[i:]] for i in range(len(path)) if path[i:] in known), (None, WHOLE))
            return layout if leaf.shape == shape else WHOLE

        return State(self.stored, jax.tree_util.tree_map_with_path(of, state.optimizer), WHOLE)

    def init(self, seed: int = 0) -> State:
        """A fresh state, made in place: no device ever holds more than its share. The same weights on every mesh."""

        def make(key):
            params = init_params(self.config, key)
            return self._take(State(params, self.optimizer.init(params), jnp.int32(0)), self.layer_order)

        return jax.jit(make, out_shardings=self.shardings)(jax.random.key(seed))

    def from_natural(self, state: State) -> State:
        """A state whose layers come in the model's order (a checkpoint's, say) as the pipeline's stages hold it."""
        return self._moved(state, self.layer_order, self.abstract_state)

    def to_natural(self, state: State) -> State:
        """The state with its layers in the model's order again: how it is kept, and given to others."""
        return self._moved(state, np.argsort(self.layer_order, stable=True)[: self.config.num_layers], self.abstract_natural)

    def _moved(self, state: State, order: np.ndarray, like: State) -> State:
        if self._in_order:
            return state
        shardings = jax.tree.map(lambda x: x.sharding, like)
        return jax.jit(lambda state: self._take(state, order), out_shardings=shardings)(state)

    def _take(self, state: State, order: np.ndarray) -> State:
        """Layers by number; zeros for those that the model does not have. Which dim of a leaf counts layers, whatever the
        optimizer keeps, is seen from what one layer more would make longer."""
        if self._in_order:
            return state
        grow = lambda n: self._shapes(dataclasses.replace(self.config, num_layers=self.config.num_layers + n))

        def take(x, one, more):
            axis = next((i for i, (a, b) in enumerate(zip(one.shape, more.shape, strict=True)) if a != b), None)
            return x if axis is None else jnp.take(x, order, axis, mode="fill", fill_value=0)

        return jax.tree.map(take, state, grow(0), grow(1))

    def lower(self, batch_size: int, seq_len: int):
        """The step lowered for batches of this shape, without any array: for compiling and for reading."""
        return self.run.lower(self.abstract_state, self.abstract_batch(batch_size, seq_len))

    def abstract_batch(self, batch_size: int, seq_len: int) -> dict:
        """Shapes and shardings of one batch."""
        one = jax.ShapeDtypeStruct((batch_size, seq_len), jnp.int32, sharding=self.batch_sharding)
        return dict.fromkeys(("tokens", "targets", "positions", "segments"), one)

    # ------------------------------------------------------------------------------------------------------- the step

    def _step(self, state: State, batch: Batch) -> tuple[State, dict]:
        par = self._reading()
        grads, metrics = self._gradients(par, state.params, batch)
        if self.clip is not None:
            scale = jnp.minimum(1.0, self.clip / jnp.maximum(metrics["grad_norm"], 1e-12))
            grads = jax.tree.map(lambda g: g * scale, grads)
        params = self._constrain(state.params, self.graded)
        with jax.numpy_dtype_promotion("standard"):  # Optax raises floats to the power of its integer counters
            updates, optimizer = self.optimizer.update(grads, state.optimizer, params)
        params = self._constrain(self._balanced(params, optax.apply_updates(params, updates), metrics), self.graded)
        params = self._restore(par, params)
        self.ledger = par.traffic if isinstance(par, Manual) else []
        return State(params, optimizer, state.step + 1), metrics

    def _balanced(self, before: Tree, after: Tree, metrics: dict) -> Tree:
        """The routers' biases follow a rule and no gradient: up by `bias_rate` for an expert with less than the mean load, down
        for one with more (DeepSeek-V3 2024, section 2.1.2)."""
        how = self.config.experts
        if how is None or how.bias_rate is None:
            return after
        load = metrics["load"]
        bias = before["blocks"]["experts"]["bias"] + how.bias_rate * jnp.sign(load.mean(1, keepdims=True) - load)
        blocks = after["blocks"]
        return after | {"blocks": blocks | {"experts": blocks["experts"] | {"bias": bias}}}

    def gradients(self, params: Tree, batch: Batch) -> tuple[Tree, dict]:
        """Gradients (cut as `Plan.graded`) and metrics, without an update: what the parity tests compare."""
        return self._gradients(self._reading(), params, batch)

    def _reading(self) -> Manual | Auto:
        """A fresh reading of the model's text, with an empty ledger: one per trace."""
        return Manual(self.plan) if self.plan.reading == "manual" else Auto(self.plan, self.mesh)

    def _gradients(self, par: Manual | Auto, params: Tree, batch: Batch) -> tuple[Tree, dict]:
        if isinstance(par, Auto):
            grads, metrics = self._auto(par, params, batch)
            return grads, metrics | {"grad_norm": optax.tree.norm(grads)}
        specs = lambda layouts: jax.tree.map(spec, layouts)
        data = spec(self.plan.place("data b s"))
        run = functools.partial(self._manual, par)
        out = specs(self.graded), spec(WHOLE)
        return jax.shard_map(run, mesh=self.mesh, in_specs=(specs(self.stored), data), out_specs=out)(params, batch)

    def _loss(self, par: Solo, params: Tree, batch: Batch, total) -> tuple[jax.Array, Any]:
        """The loss, and the routers' tally (None without experts)."""
        with par.differentiated():
            loss, tally = nnx.merge(model_graph(self.config), params).summed(batch, par)
            return loss / total, tally

    def _auto(self, par: Auto, params: Tree, batch: Batch):
        total = jnp.maximum((batch["targets"] >= 0).sum(), 1).astype(jnp.float32)
        (loss, tally), grads = self._accumulate(par, params, batch, total)
        return self._constrain(grads, self.graded), {"loss": loss, "tokens": total} | self._told(tally)

    def _manual(self, par: Manual, params: Tree, batch: Batch):
        """On one device: its part of the batch, its shards of the weights."""
        plan = self.plan
        everywhere = Arrow(Layout((), plan.varying("data")), WHOLE)
        count = (batch["targets"] >= 0).sum().astype(jnp.float32)
        total = jnp.maximum(par.carry_out(count, everywhere, "tokens in the batch"), 1)
        params = jax.tree.map(lambda w, dims: vary(w, plan.unreduced(dims).sums), params, self.dims)
        (loss, tally), grads = self._accumulate(par, params, batch, total)
        grads = self._reduce(par, grads)
        loss = par.carry_out(loss, Arrow(Layout((), plan.live("pp") + plan.varying("data")), WHOLE), "loss")
        stream = Arrow(Layout((), plan.varying("stream")), WHOLE)
        told = self._told(jax.tree.map(lambda x: par.carry_out(x, stream, "tally"), tally))
        return grads, {"loss": loss, "grad_norm": self._norm(par, grads), "tokens": total} | told

    def _told(self, tally) -> dict:
        """The routers' tally as metrics: tokens per expert ``l e``, choices dropped and sum of entropies, each ``l``."""
        if tally is None:
            return {}
        return {"load": tally[:, :-2], "dropped": tally[:, -2], "router_entropy": tally[:, -1]}

    def _accumulate(self, par: Manual | Auto, params: Tree, batch: Batch, total) -> tuple[tuple[jax.Array, Any], Tree]:
        """Loss (with the routers' tally) and gradients, summed over the microbatches; at ZeRO 2 each microbatch's gradients
        are cut before that."""
        plan, parts = self.plan, self.plan.microbatches
        if plan.pipeline and isinstance(par, Manual):
            loss, grads = pipeline.gradients(self.config, plan, par, params, batch, total)
            return (loss, None), grads

        def cut(g, dims):
            if isinstance(par, Auto):
                return par.constrain(g, plan.graded(dims) if plan.zero == 2 else plan.stored(dims))
            return par.carry_out(g, Arrow(plan.unreduced(dims), plan.accumulated(dims)), f"gradient {dims}")

        def one(part: Batch) -> tuple[tuple[jax.Array, Any], Tree]:
            loss, grads = jax.value_and_grad(functools.partial(self._loss, par), has_aux=True)(params, part, total)
            return loss, jax.tree.map(cut, grads, self.dims)

        if parts == 1:
            return one(batch)
        batch = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0), batch)
        with par.repeated(parts):
            return lax.scan(lambda done, part: (jax.tree.map(jnp.add, done, one(part)), None), self._nothing(par), batch)[0]

    def _nothing(self, par: Solo) -> tuple[tuple[jax.Array, Any], Tree]:
        """Loss and gradients of no microbatches: zeros, typed as varying like what will be added."""
        plan, weights, how = self.plan, self.abstract_state.params, self.config.experts
        tally = jnp.zeros((self.config.num_layers, how.num + 2)) if how else None
        if isinstance(par, Auto):
            return (jnp.float32(0), tally), jax.tree.map(lambda w: jnp.zeros(w.shape), weights)

        def zeros(w, dims):
            layout = plan.accumulated(dims)
            return vary(jnp.zeros(layout.shard_shape(w.shape, plan.mesh.sizes)), layout.axes + layout.sums)

        tally = jax.tree.map(lambda x: vary(x, plan.varying("stream")), tally)
        return (vary(jnp.float32(0), plan.varying("data")), tally), jax.tree.map(zeros, weights, self.dims)

    # ------------------------------------------------------------------------------------------- reducing, restoring

    def _reduce(self, par: Manual, grads: Tree) -> Tree:
        """Finish the sums: leaf by leaf, or many leaves concatenated into buckets (`_in_buckets`)."""
        arrows = jax.tree.map(lambda dims: Arrow(self.plan.accumulated(dims), self.plan.graded(dims)), self.dims)
        if self.plan.reduce == "bucket":
            return self._in_buckets(par, grads, arrows)
        return jax.tree.map(lambda g, arrow, dims: par.carry_out(g, arrow, f"gradient {dims}"), grads, arrows, self.dims)

    def _in_buckets(self, par: Manual, grads: Tree, arrows: Tree) -> Tree:
        """All-reduce the leaves that are summed over the same axes in flat buckets of at least `Plan.bucket_bytes`: fewer
        collectives, the same bytes, and the first can leave while the backward pass still runs (Li et al. 2020)."""
        leaves, tree = jax.tree.flatten(grads)
        buckets: dict[tuple, list[list[int]]] = {}
        for i, (leaf, arrow) in enumerate(zip(leaves, jax.tree.leaves(arrows), strict=True)):
            alike = buckets.setdefault((arrow.before.sums, varying(leaf)), [[]])
            if sum(leaves[j].nbytes for j in alike[-1]) >= self.plan.bucket_bytes:
                alike.append([])
            alike[-1].append(i)
        for (sums, _), alike in buckets.items():
            for members in alike:
                flat = jnp.concatenate([leaves[j].reshape(-1) for j in members])
                flat = par.carry_out(flat, Arrow(Layout((), sums), WHOLE), f"bucket of {len(members)} gradients")
                ends = list(itertools.accumulate(leaves[j].size for j in members))
                for j, piece in zip(members, jnp.split(flat, ends[:-1]), strict=True):
                    leaves[j] = piece.reshape(leaves[j].shape)
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
            move = lambda w, before, after, dims: par.carry_out(w, Arrow(before, after), f"updated {dims}", invariant=True)
            return jax.tree.map(move, params, self.graded, self.stored, self.dims)

        specs = [jax.tree.map(spec, layouts) for layouts in (self.graded, self.stored)]
        return jax.shard_map(gather, mesh=self.mesh, in_specs=(specs[0],), out_specs=specs[1])(params)

    def _constrain(self, tree: Tree, layouts: Tree) -> Tree:
        return jax.tree.map(lambda x, layout: lax.with_sharding_constraint(x, sharding(self.mesh, layout)), tree, layouts)

    @functools.cached_property
    def evaluate(self):
        """Compiled: the cross-entropies of a batch's targets summed, and their number, from (weights, batch), forward only and
        without the routers' own losses. Weights come stored, with their layers in the model's order (`to_natural`); where
        stages hold them the reading is Auto's: layers travel to every stage, which may need room for all of them."""
        plan, everywhere = self.plan, Arrow(Layout((), self.plan.varying("data")), WHOLE)

        def sums(par: Solo, params: Tree, batch: Batch):
            model = nnx.merge(model_graph(self.config), params)
            parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, plan.microbatches, *x.shape[1:]), 1, 0), batch)
            loss = lax.map(lambda part: model.losses(part, par).sum(), parts).sum()
            return loss, (batch["targets"] >= 0).sum().astype(jnp.float32)

        def manual(params, batch):
            par = Manual(plan)
            return [par.carry_out(x, everywhere, "held-out loss") for x in sums(par, params, batch)]

        if plan.reading == "auto" or plan.pipeline:
            return jax.jit(functools.partial(sums, Auto(plan, self.mesh)))
        given = jax.tree.map(spec, self.stored), spec(plan.place("data b s"))
        return jax.jit(jax.shard_map(manual, mesh=self.mesh, in_specs=given, out_specs=spec(WHOLE)))
