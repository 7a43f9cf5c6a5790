"""One training step: gradients under a plan, then the optimizer on whatever share of the state each device
keeps.

    forward and backward   Manual: in shard_map, collectives by the arrows     Auto: in jit, XLA's choice
                           Explicit: in jit, collectives by the types that the arrows give
    reduce the gradients   `plan.Life.finish`, for what the backward pass has not summed already
    clip, update           any Optax optimizer, on global arrays cut as `plan.Life` says
    restore the weights    ZeRO 1 and 2: the updated shards are gathered again

The optimizer runs on global arrays under jit, so one that looks at whole matrices (Adafactor, Muon) stays
right when its state is cut; for elementwise ones such as AdamW the compiled update holds no collective.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AbstractMesh, Mesh, NamedSharding, use_abstract_mesh

from llmpar import pipeline, schedules
from llmpar.block import vary, varying
from llmpar.config import ModelConfig
from llmpar.mesh import explicit, platform_of, sharding, spec, split
from llmpar.model import Batch
from llmpar.notation import Arrow, Dim, Layout
from llmpar.optimizer import counts_empty_places
from llmpar.par import Manual, Solo
from llmpar.plan import Plan, Resolved
from llmpar.readings import Auto, Explicit
from llmpar.weights import Tree, described, init_params, model_graph, weight_dims

WHOLE = Layout(())


AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"
# The compiler of JAX 0.12 aborts with the second.
EARLY = ("xla_gpu_enable_latency_hiding_scheduler", "xla_gpu_enable_analytical_latency_estimator")[
    : 2 if jax.__version_info__ < (0, 11) else 1
]


def compiler_options(plan: Resolved) -> dict[str, bool | int]:
    """What XLA must be told of a plan to send while it computes. On GPUs it keeps one collective in flight:
    of two hops of a ring the other waits, and weights from other hosts wait while a host's experts exchange
    tokens. And where a program has a ragged all-to-all, whose time its usual estimate lacks, it starts no
    collective early."""
    gpu = plan.platform == "gpu"
    ragged = gpu and plan.mesh.ep > 1 and plan.dispatch == "ragged"
    at_once = {AT_ONCE: 4 if plan.rings else 2} if ragged or (gpu and plan.rings) else {}
    return at_once | dict.fromkeys(EARLY if ragged else (), True)


class State(NamedTuple):
    """What a step changes: float32 master weights, the optimizer's state, and the number of steps done."""

    params: Tree
    optimizer: Tree
    step: Any


@functools.partial(jax.jit, static_argnums=(2, 3))
def _in_order(x, order, axis: int, to: NamedSharding):
    """Layers of a leaf by number, zeros for those that there are not."""
    return lax.with_sharding_constraint(jnp.take(x, order, axis, mode="fill", fill_value=0), to)


class Step:
    """The compiled training step of a model under a plan on a mesh.

    Args:
        config, plan, mesh: what, how, and where. ``mesh`` may be abstract for tracing and lowering.
        optimizer: any Optax optimizer.
        clip: largest global gradient norm; None leaves gradients as they are.

    Attributes:
        layer_order: which of the model's layers lies at each place of the stack that the state holds (see
        `schedules.layer_order`).
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: Plan,
        mesh: Mesh | AbstractMesh,
        optimizer: optax.GradientTransformation,
        clip: float | None = 1.0,
    ):
        platform = platform_of(mesh)
        plan = plan.resolve(config, platform)
        self._tally = Layout((Dim("l"), Dim("e")), plan.varying("stream"))  # summed over all tokens
        mesh = split(mesh, plan.mesh)
        self.config, self.plan, self.optimizer, self.clip = config, plan, optimizer, clip
        # What is made by constraints lies on the mesh as given; explicit axes are the same devices.
        self._given, mesh = mesh, explicit(mesh) if plan.reading == "explicit" else mesh
        self.mesh = mesh
        self.dims, self._live = weight_dims(config), plan.mesh.live(*plan.mesh.sizes)
        self.life = jax.tree.map(plan.life, self.dims)
        self.stored = jax.tree.map(lambda life: life.stored, self.life)
        self.graded = jax.tree.map(lambda life: life.graded, self.life)
        self.batch_sharding = sharding(mesh, plan.tokens)
        self.layer_order = schedules.layer_order(plan.pipeline, config.num_layers)
        places = len(self.layer_order)
        state = self._shapes(places)
        laid_out = lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(mesh, layout))
        self.abstract_state = self.abstract_natural = jax.tree.map(
            laid_out, state, layouts := self._layouts(state)
        )
        if places > config.num_layers:  # layers that pp does not divide
            natural = self._shapes(config.num_layers)
            self.abstract_natural = jax.tree.map(
                laid_out, natural, jax.tree.map(self._layout_of_all_layers, natural, layouts)
            )
            if counts_empty_places(optimizer, self.abstract_natural.params, self.layer_order):
                raise ValueError(
                    f"{config.num_layers} layers leave {places - config.num_layers} of the pipeline's places"
                    " empty, zeros that this optimizer would count: it looks at a whole stack at once, as"
                    f" Adafactor does; use {places} layers, or AdamW"
                )
        self.shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        # Where layers lie in the model's order, nothing is ever moved.
        self._keeps_order = self.layer_order.tolist() == list(range(config.num_layers))
        self.run = jax.jit(
            self._step,
            in_shardings=(self.shardings, self.batch_sharding),
            out_shardings=(self.shardings, None),
            donate_argnums=0,
            compiler_options=compiler_options(plan),
        )

    def _shapes(self, num_layers: int) -> State:
        """The state's leaves by shape and dtype, with as many layers."""
        config = dataclasses.replace(self.config, num_layers=num_layers)
        params = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), described(config))
        return jax.eval_shape(lambda p: State(p, self.optimizer.init(p), jnp.int32(0)), params)

    def _layouts(self, state: State) -> State:
        """Layouts of the whole state. What an optimizer keeps under a weight's path and in its shape
        (moments, say) is cut like the weight's gradient; the rest (counters, Adafactor's row and column sums)
        is whole."""
        flat, _ = jax.tree_util.tree_flatten_with_path(state.params)
        known = {
            path: (x.shape, layout)
            for (path, x), layout in zip(flat, jax.tree.leaves(self.graded), strict=True)
        }

        def of(path, leaf):
            shape, layout = next(
                (known[path[i:]] for i in range(len(path)) if path[i:] in known), (None, WHOLE)
            )
            return layout if leaf.shape == shape else WHOLE

        return State(self.stored, jax.tree_util.tree_map_with_path(of, state.optimizer), WHOLE)

    def init(self, seed: int = 0) -> State:
        """A fresh state, made in place: no device ever holds more than its share. The same weights on every
        mesh."""

        def make(key):
            params = init_params(self.config, key)
            state = State(params, self.optimizer.init(params), jnp.int32(0))
            deal = lambda x, axis, to: (
                x if axis < 0 or self._keeps_order else _in_order(x, self.layer_order, axis, to)
            )
            return jax.tree.map(deal, state, self._layer_dims, self.shardings)

        return jax.jit(make, out_shardings=self.shardings)(jax.random.key(seed))

    def _layout_of_all_layers(self, leaf, layout: Layout) -> Layout:
        """The layout of as many layers as pp does not divide: it cuts the next dim that it can."""
        layers, sizes = sum((d.axes for d in layout.dims if d.name == "l"), ()), self.plan.mesh.sizes
        others = [(d, n) for d, n in zip(layout.dims, leaf.shape, strict=False) if d.name != "l"]
        fits = [d for d, n in others if n % math.prod(sizes[a] for a in d.axes + layers) == 0][:1]
        return Layout(
            tuple(Dim(d.name, d.axes * (d.name != "l") + layers * (d in fits)) for d in layout.dims)
        )

    def from_natural(self, state: State, donate: bool = False) -> State:
        """A state whose layers come in the model's order (a checkpoint's, say) as the pipeline's stages hold
        it. ``donate``: each leaf is deleted once it is moved, since a state is most of the memory."""
        return self._moved(state, self.layer_order, self.abstract_state, donate)

    def to_natural(self, state: State, donate: bool = False) -> State:
        """The state with its layers in the model's order again: how it is kept, and given to others.
        ``donate`` as in `from_natural`."""
        order = np.argsort(self.layer_order, stable=True)[: self.config.num_layers]
        return self._moved(state, order, self.abstract_natural, donate)

    def _moved(self, state: State, order: np.ndarray, like: State, donate: bool) -> State:
        def move(x, axis: int, like):
            if axis < 0:
                return x
            moved = _in_order(x, order, axis, like.sharding)
            if donate:
                x.delete()
            return moved

        return state if self._keeps_order else jax.tree.map(move, state, self._layer_dims, like)

    @functools.cached_property
    def _layer_dims(self) -> State:
        """Which dim of a leaf counts layers, whatever the optimizer keeps: what one layer more would make
        longer; -1: none."""
        less, more = (self._shapes(self.config.num_layers + n) for n in (0, 1))
        longer = lambda a, b: next(
            (i for i, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y), -1
        )
        return jax.tree.map(longer, less, more)

    def lower(self, batch_size: int, seq_len: int):
        """The step lowered for batches of this shape, without any array: for compiling and for reading."""
        return self.run.lower(self.abstract_state, self.abstract_batch(batch_size, seq_len))

    def abstract_batch(self, batch_size: int, seq_len: int) -> dict:
        """Shapes and shardings of one batch."""
        one = jax.ShapeDtypeStruct((batch_size, seq_len), jnp.int32, sharding=self.batch_sharding)
        return dict.fromkeys(("tokens", "targets", "positions", "segments"), one)

    # ----------------------------------------------------------------------------------------------- the step

    def _step(self, state: State, batch: Batch) -> tuple[State, dict]:
        par = self._reading()
        grads, metrics = self._gradients(par, state.params, batch)
        update = self._update
        with use_abstract_mesh(self.mesh.abstract_mesh):
            if isinstance(par, Explicit):  # optimizers are written by others, and for whole arrays
                graded = jax.tree.map(functools.partial(sharding, self.mesh), self.graded)
                out = self.shardings._replace(params=graded)
                update = jax.sharding.auto_axes(update, out_sharding=out)
            state = update(state, grads, metrics)
            return state._replace(params=self._restore(par, state.params)), metrics

    def _update(self, state: State, grads: Tree, metrics: dict) -> State:
        """The state after the optimizer, with weights cut as gradients are."""
        if self.clip is not None:
            scale = jnp.minimum(1.0, self.clip / jnp.maximum(metrics["grad_norm"], 1e-12))
            grads = jax.tree.map(lambda g: g * scale, grads)
        params = self._constrain(state.params, self.graded)
        with jax.numpy_dtype_promotion(
            "standard"
        ):  # Optax raises floats to the power of its integer counters
            updates, optimizer = self.optimizer.update(grads, state.optimizer, params)
        params = self._constrain(
            self._balanced(params, optax.apply_updates(params, updates), metrics), self.graded
        )
        return State(params, optimizer, state.step + 1)

    def _balanced(self, before: Tree, after: Tree, metrics: dict) -> Tree:
        """The routers' biases follow a rule and no gradient: up by `bias_rate` for an expert with less than
        the mean load, down for one with more (DeepSeek-V3 2024, section 2.1.2)."""
        how = self.config.experts
        if how is None or how.bias_rate is None:
            return after
        load = metrics["load"]
        # Whole numbers: a mean would be rounded, and has a sign then.
        lacking = jnp.sign(load.sum(1, keepdims=True) - how.num_experts * load)
        if not self._keeps_order:
            lacking = jnp.take(lacking, self.layer_order, 0, mode="fill", fill_value=0)
        bias = before["blocks"]["experts"]["bias"] + how.bias_rate * lacking
        blocks = after["blocks"]
        return after | {"blocks": blocks | {"experts": blocks["experts"] | {"bias": bias}}}

    def gradients(self, params: Tree, batch: Batch) -> tuple[Tree, dict]:
        """Gradients (cut as `Life.graded`) and metrics, without an update: what the parity tests compare."""
        return self._gradients(self._reading(), params, batch)

    def _reading(self) -> Manual | Auto:
        """The reading of the model's text that the plan asks for."""
        if self.plan.reading == "manual":
            return Manual(self.plan)
        return (Auto if self.plan.reading == "auto" else Explicit)(self.plan, self.mesh)

    def _gradients(self, par: Manual | Auto, params: Tree, batch: Batch) -> tuple[Tree, dict]:
        if isinstance(par, Auto):
            with use_abstract_mesh(self.mesh.abstract_mesh):
                grads, metrics = self._global(par, params, batch)
                return grads, metrics | {"grad_norm": optax.tree.norm(grads)}
        specs = lambda layouts: jax.tree.map(spec, layouts)
        given = specs(self.stored), self.batch_sharding.spec
        made = specs(self.graded), spec(WHOLE)
        run = functools.partial(self._manual, par)
        return jax.shard_map(run, mesh=self.mesh, in_specs=given, out_specs=made)(params, batch)

    def _loss(self, par: Solo, params: Tree, batch: Batch) -> tuple[jax.Array, Any]:
        """The loss summed over the tokens, and the routers' tally (None without experts)."""
        return nnx.merge(model_graph(self.config), params).loss(batch, par)

    def _global(self, par: Auto, params: Tree, batch: Batch):
        """On whole values. A sum over a weight's copies stays open until the step finishes it, if JAX's types
        can say so and `Plan.reduce` does not ask for it sooner."""
        if isinstance(par, Explicit) and self.plan.reduce == "end":
            mark = lambda w, life, dims: par.lay(w, life.stored, dims, marked=True)
            params = jax.tree.map(mark, params, self.life, self.dims)
        (loss, tally), grads = self._accumulate(par, params, batch)
        tokens = jnp.maximum((batch["targets"] >= 0).sum(), 1).astype(jnp.float32)
        grads = jax.tree.map(lambda g: g / tokens, self._reduce(par, grads))
        summed = Arrow(self._tally, Layout(self._tally.dims))
        tally = jax.tree.map(lambda x: par.carry_out(x, summed, "loss, tokens and norm"), tally)
        return grads, {"loss": loss / tokens, "tokens": tokens} | self._routing(tally)

    def _manual(self, par: Manual, params: Tree, batch: Batch):
        """On one device: its part of the batch, its shards of the weights."""
        params = jax.tree.map(lambda w, life: vary(w, life.unreduced.sums), params, self.life)
        (loss, tally), grads = self._accumulate(par, params, batch)
        grads = self._reduce(par, grads)
        square = sum(self._count_once(jnp.sum(g * g)) for g in jax.tree.leaves(grads))
        loss, count, square, tally = self._sums(
            par, (loss, (batch["targets"] >= 0).sum().astype(jnp.float32), square, tally)
        )
        tokens = jnp.maximum(count, 1)
        metrics = {"loss": loss / tokens, "grad_norm": jnp.sqrt(square) / tokens, "tokens": tokens}
        return jax.tree.map(lambda g: g / tokens, grads), metrics | self._routing(tally)

    def _count_once(self, x) -> jax.Array:
        """``x``, and 0 where another device along an axis has the same ``x``: a sum over all devices counts
        it once."""
        same = tuple(a for a in self._live if a not in varying(x))
        return vary(jnp.where(lax.axis_index(same) == 0, x, 0) if same else x, self._live)

    def _sums(self, par: Manual, values: Tree) -> Tree:
        """Small values summed over all devices, in one all-reduce that needs all of them. Had each its own,
        no data would order it against the collectives of the model, and devices may enter unordered ones in
        different orders."""
        flat, restore = ravel_pytree(jax.tree.map(self._count_once, values))
        return restore(par.carry_out(flat, Arrow(Layout((), self._live), WHOLE), "loss, tokens and norm"))

    def _routing(self, tally) -> dict:
        """The routers' tally as metrics: tokens per expert ``l e``, choices dropped and sum of entropies,
        each ``l``."""
        if tally is None:
            return {}
        return {"load": tally[:, :-2], "dropped": tally[:, -2], "router_entropy": tally[:, -1]}

    def _accumulate(
        self, par: Manual | Auto, params: Tree, batch: Batch
    ) -> tuple[tuple[jax.Array, Any], Tree]:
        """Loss (with the routers' tally) and gradients, summed over the microbatches; at ZeRO 2 each
        microbatch's gradients are cut before that."""
        plan, parts = self.plan, self.plan.microbatches
        if plan.pipeline and isinstance(par, Manual):
            return pipeline.gradients(self.config, par, params, batch, self._zeros(par))

        def cut(g, life, dims):
            return par.carry_out(g, life.accumulate, f"gradient {dims}")

        def one(part: Batch) -> tuple[tuple[jax.Array, Any], Tree]:
            loss, grads = jax.value_and_grad(functools.partial(self._loss, par), has_aux=True)(params, part)
            return loss, jax.tree.map(cut, grads, self.life, self.dims)

        if parts == 1:
            return one(batch)
        batch = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0), batch)
        return lax.scan(
            lambda done, part: (jax.tree.map(jnp.add, done, one(part)), None), self._zeros(par), batch
        )[0]

    def _zeros(self, par: Solo) -> tuple[tuple[jax.Array, Any], Tree]:
        """Loss and gradients of no microbatches: zeros, typed as varying like what will be added."""
        plan, weights, how = self.plan, self.abstract_state.params, self.config.experts
        tally = jnp.zeros((self.config.num_layers, how.num_experts + 2)) if how else None
        if isinstance(par, Auto):
            whole = lambda w, life: par.carry_out(jnp.zeros(w.shape), Arrow(WHOLE, life.accumulated))
            tally = jax.tree.map(lambda x: par.carry_out(x, Arrow(WHOLE, self._tally)), tally)
            return (jnp.float32(0), tally), jax.tree.map(whole, weights, self.life)

        def zeros(w, life):
            layout = life.accumulated
            return vary(jnp.zeros(layout.shard_shape(w.shape, plan.mesh.sizes)), layout.axes + layout.sums)

        tally = jax.tree.map(lambda x: vary(x, plan.varying("stream")), tally)
        return (vary(jnp.float32(0), plan.varying("data")), tally), jax.tree.map(zeros, weights, self.life)

    # ------------------------------------------------------------------------------------ reducing, restoring

    def _reduce(self, par: Manual | Auto, grads: Tree) -> Tree:
        """Finish the sums: leaf by leaf, or many leaves concatenated into buckets (`_in_buckets`)."""
        if self.plan.reduce == "bucket":
            return self._in_buckets(par, grads)
        finish = lambda g, life, dims: par.carry_out(g, life.finish, f"gradient {dims}")
        return jax.tree.map(finish, grads, self.life, self.dims)

    def _in_buckets(self, par: Manual | Auto, grads: Tree) -> Tree:
        """All-reduce the leaves that are summed over the same axes in flat buckets of at least
        `Plan.bucket_bytes`: fewer collectives, the same bytes, and the first can leave while the backward
        pass still runs (Li et al. 2020).
        """
        leaves, tree = jax.tree.flatten(grads)
        buckets: dict[tuple, list[list[int]]] = {}
        for i, (leaf, life) in enumerate(zip(leaves, jax.tree.leaves(self.life), strict=True)):
            alike = buckets.setdefault((life.accumulated.sums, varying(leaf)), [[]])
            if sum(leaves[j].nbytes for j in alike[-1]) >= self.plan.bucket_bytes:
                alike.append([])
            alike[-1].append(i)
        for (sums, _), alike in buckets.items():
            for members in alike:
                flat = jnp.concatenate([leaves[j].reshape(-1) for j in members])
                flat = par.carry_out(
                    flat, Arrow(Layout((), sums), WHOLE), f"bucket of {len(members)} gradients"
                )
                ends = list(itertools.accumulate(leaves[j].size for j in members))
                for j, piece in zip(members, jnp.split(flat, ends[:-1]), strict=True):
                    leaves[j] = piece.reshape(leaves[j].shape)
        return jax.tree.unflatten(tree, leaves)

    def _restore(self, par: Manual | Auto, params: Tree) -> Tree:
        """From the layout of the update to the stored layout: ZeRO 1 and 2 gather, the others are there
        already."""
        if isinstance(par, Manual) and self.graded == self.stored:
            return params
        if isinstance(par, Auto):
            restore = lambda w, life, dims: par.carry_out(w, life.restore, f"updated {dims}")
            return jax.tree.map(restore, params, self.life, self.dims)

        def gather(params):
            move = lambda w, life, dims: par.carry_out(w, life.restore, f"updated {dims}", invariant=True)
            return jax.tree.map(move, params, self.life, self.dims)

        specs = [jax.tree.map(spec, layouts) for layouts in (self.graded, self.stored)]
        return jax.shard_map(gather, mesh=self.mesh, in_specs=(specs[0],), out_specs=specs[1])(params)

    def _constrain(self, tree: Tree, layouts: Tree) -> Tree:
        return jax.tree.map(
            lambda x, layout: lax.with_sharding_constraint(x, sharding(self._given, layout)), tree, layouts
        )

    @functools.cached_property
    def evaluate(self):
        """Compiled: the cross-entropies of a batch's targets summed, and their number, from (weights, batch),
        forward only and without the routers' own losses. Weights come stored, with their layers in the
        model's order (`to_natural`); where stages hold them the reading is Auto's: layers travel to every
        stage, which may need room for all of them.
        """
        plan = self.plan

        def sums(par: Solo, params: Tree, batch: Batch):
            model = nnx.merge(model_graph(self.config), params)
            parts = jax.tree.map(
                lambda x: jnp.moveaxis(x.reshape(-1, plan.microbatches, *x.shape[1:]), 1, 0), batch
            )
            loss = lax.map(lambda part: model.cross_entropies(part, par)[0].sum(), parts).sum()
            return loss, (batch["targets"] >= 0).sum().astype(jnp.float32)

        def manual(params, batch):
            par = Manual(plan)
            return self._sums(par, sums(par, params, batch))

        if plan.reading == "auto" or plan.pipeline:
            return jax.jit(functools.partial(sums, Auto(plan, self.mesh)))
        given = jax.tree.map(spec, self.stored), self.batch_sharding.spec
        return jax.jit(jax.shard_map(manual, mesh=self.mesh, in_specs=given, out_specs=spec(WHOLE)))
