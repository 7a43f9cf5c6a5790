"""One training step: gradients under a plan, then the optimizer on whatever share of the state each device
keeps.

    forward and backward   Manual: in shard_map, collectives by the arrows     Auto: in jit, XLA's choice
                           Explicit: in jit, collectives by the types that the arrows give
    reduce the gradients   `plan.WeightLayouts.finish`, for what the backward pass has not summed already
    clip, update           any Optax optimizer, on global arrays cut as `plan.WeightLayouts` says
    restore the weights    ZeRO 1 and 2: the updated shards are gathered again

The optimizer runs on global arrays under jit, so one that looks at whole matrices (Adafactor, Muon) stays
right when its state is cut; for elementwise ones such as AdamW the compiled update holds no collective.
"""

import dataclasses
import functools
import itertools
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AbstractMesh, Mesh, NamedSharding, use_abstract_mesh
from jaxtyping import Array, Int

from llmpar.model.llama import Batch, Loss
from llmpar.model.weights import Tree, described, init_params, joined, model_graph, trained, weight_dims
from llmpar.parallel.auto import Auto
from llmpar.parallel.collectives import vary, varying
from llmpar.parallel.explicit import Explicit
from llmpar.parallel.mesh import explicit, platform_of, sharding, spec, split_axes
from llmpar.parallel.modes import Manual, Solo
from llmpar.pipeline import executor as pipeline
from llmpar.plan import schedules
from llmpar.plan.layout import Arrow, Dim, Layout
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import Plan, Resolved
from llmpar.training.optimizer import counts_empty_places

_WHOLE = Layout(())
_MAX_SEED = 2**32 - 1
"""JAX makes keys of 32 bits."""
TALLY = Dim("l"), Dim("e")  # of tokens per expert; summed over all tokens
AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"
EARLY = "xla_gpu_enable_latency_hiding_scheduler", "xla_gpu_enable_analytical_latency_estimator"


def compiler_options(plan: Resolved) -> dict[str, bool | int]:
    """The options with which XLA sends while it computes. On GPUs it keeps one collective in flight: of two
    hops of a ring one waits, and weights from other hosts wait while a host's experts exchange tokens. And
    with a ragged all-to-all, whose time its usual estimate lacks, it starts no collective early."""
    ragged = plan.mesh.ep > 1 and plan.dispatch == "ragged"
    if plan.platform != "gpu" or not (ragged or plan.rings):
        return {}
    # With that estimate JAX 0.12's compiler aborts, and 0.10's for GPUs since Blackwell (10.0).
    aborts = jax.__version_info__ >= (0, 11) or (plan.devices or "").startswith("gpu 1")
    early = EARLY[: 1 if aborts else 2] if ragged else ()
    return {AT_ONCE: 4 if plan.rings else 2} | dict.fromkeys(early, True)


class State(NamedTuple):
    """What a step changes: float32 master weights, the optimizer's state, and the number of steps done; and
    frozen weights, in the dtype that the plan computes in."""

    params: Tree
    optimizer: Tree
    step: Any


@functools.partial(jax.jit, static_argnums=(2, 3))
def take_layers(x: Array, order: Int[Array, " l"], dim: int, to: NamedSharding) -> Array:
    """The layers of a leaf in this ``order``, along ``dim``; zeros for numbers that no layer has."""
    return lax.with_sharding_constraint(jnp.take(x, order, dim, mode="fill", fill_value=0), to)


def _check_given(plan: Plan, mesh: Any) -> None:
    """Refuse what is no mesh, or another than the plan's, and weights that would not be float32."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh is {mesh!r:.60}, no jax.sharding.Mesh; use make_mesh(plan.mesh)")
    sizes = dict(mesh.shape)
    if sizes not in (plan.mesh.user_sizes, plan.mesh.sizes):
        has = " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"
        raise ValueError(
            f"the plan is for mesh '{plan.mesh}', and the mesh is {has}; use make_mesh(plan.mesh)"
        )
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError("JAX_ENABLE_X64 is on, but master weights are float32; switch it off")


def cut_in_microbatches(batch: Batch, count: int) -> Batch:
    """Give the batch a leading dim of microbatches, each of every ``count``-th row: cut as the batch is."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0), batch)


def check_alive(tree: Tree) -> None:
    """Refuse arrays whose memory was given away. On simulated devices the process would end at them."""
    for x in jax.tree.leaves(tree):
        if not isinstance(x, jax.core.Tracer) and getattr(x, "is_deleted", bool)():
            raise ValueError("this state was used up by the step before; keep the state that run returns")


class Checked:
    """A compiled function of a state (or weights) and a batch, which refuses what it would take for another:
    tokens that the model has not, and a state that is used up. It reads a batch back from its devices, once;
    ``compiled`` does not, and has no checks."""

    def __init__(self, compiled: Any, vocab_size: int):
        self.compiled, self.vocab_size, self._seen = compiled, vocab_size, list[weakref.ref]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)  # lower, trace

    def __call__(self, state: Any, batch: Any) -> Any:
        check_alive((state, batch))
        if isinstance(batch, dict):  # else JAX names what is missing
            self._check({name: batch[name] for name in ("tokens", "targets") if name in batch})
        return self.compiled(state, batch)

    def _check(self, batch: dict[str, Any]) -> None:
        arrays = [x for x in batch.values() if isinstance(x, jax.Array)]
        if arrays and [id(ref()) for ref in self._seen] == [*map(id, arrays)]:
            return
        self._seen = [*map(weakref.ref, arrays)]
        for name, x in batch.items():
            if not isinstance(x, jax.core.Tracer):
                check_tokens(name, x, self.vocab_size)


def check_tokens(name: str, x: Any, vocab_size: int) -> None:
    """Refuse tokens, or targets, that are none of a vocabulary. A target below 0 does not count."""
    parts = [shard.data for shard in x.addressable_shards] if isinstance(x, jax.Array) else [x]
    for part in map(np.asarray, parts):
        least, most = (int(part.min()), int(part.max())) if part.size else (0, 0)
        if not np.issubdtype(part.dtype, np.integer) or most >= vocab_size or name == "tokens" and least < 0:
            what = (
                f"{name} are {part.dtype} from {least:,} to {most:,}, and the vocabulary has {vocab_size:,}"
            )
            raise ValueError(f"{what}; use integers from 0 to {vocab_size - 1:,}, of this model's tokenizer")


class Step:
    """The compiled training step of a model under a plan on a mesh.

    Args:
        config, plan, mesh: ``mesh`` may be abstract, for tracing and lowering.
        optimizer: any Optax optimizer.
        clip: largest global gradient norm; None leaves gradients as they are.

    Attributes:
        layer_order: the layer at each place of the stack that the state holds (`schedules.layer_order`).
        abstract_state, abstract_natural: shapes and shardings of the state as stages hold it, and with its
            layers in the model's order.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: Plan,
        mesh: Mesh | AbstractMesh,
        optimizer: optax.GradientTransformation,
        clip: float | None = 1.0,
    ):
        _check_given(plan, mesh)
        plan = plan.resolve(config, platform_of(mesh))
        self.config, self.plan, self.optimizer, self.clip = config, plan, optimizer, clip
        # Sharding constraints need automatic axes; explicit axes are the same devices.
        self._auto_mesh = self.mesh = split_axes(mesh, plan.mesh)
        if plan.mode == "explicit":
            self.mesh = explicit(self._auto_mesh)
        self._live = plan.mesh.live(*plan.mesh.sizes)
        self.stored = jax.tree.map(plan.stored, weight_dims(config))
        self.dims = trained(weight_dims(config), config)  # of what has gradients, as are all trees below
        self.weight_layouts = jax.tree.map(plan.layouts_of, self.dims)
        self.reduced = jax.tree.map(lambda layouts: layouts.reduced, self.weight_layouts)
        self.layer_order = np.array(schedules.layer_order(plan.pipeline, config.num_layers))
        # Where layers lie in the model's order, nothing is ever moved.
        self._keeps_order = self.layer_order.tolist() == list(range(config.num_layers))
        # Where pp does not divide the layers, stages have more places for them.
        places, num_layers = len(self.layer_order), config.num_layers
        held = self._shapes(places)
        natural = held if places == num_layers else self._shapes(num_layers)
        learned = trained(natural.params, config)
        if places > num_layers and counts_empty_places(optimizer, learned, self.layer_order):
            raise ValueError(
                f"{num_layers} layers leave {places - num_layers} of the pipeline's places empty, zeros that"
                " this optimizer would count: it looks at a whole stack at once, as Adafactor does; use"
                f" {places} layers, or AdamW"
            )
        layouts = self._layouts(held)
        in_order = jax.tree.map(self._layout_in_order, natural, layouts) if places > num_layers else layouts
        place = lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(self.mesh, layout))
        self.abstract_state = jax.tree.map(place, held, layouts)
        self.abstract_natural = jax.tree.map(place, natural, in_order)
        self.shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        self.batch_sharding = sharding(self.mesh, plan.tokens)
        run = jax.jit(
            self._step,
            in_shardings=(self.shardings, self.batch_sharding),
            out_shardings=(self.shardings, None),
            donate_argnums=0,
            compiler_options=compiler_options(plan),
        )
        self.run = Checked(run, config.vocab_size)

    # -------------------------------------------------------------------------------------------- the state

    def _shapes(self, num_layers: int) -> State:
        """The state's leaves by shape and dtype, with so many layers."""
        config = dataclasses.replace(self.config, num_layers=num_layers)
        dtype = lambda w: self.plan.dtype if w.frozen else "float32"
        params = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, dtype(w)), described(config))
        return jax.eval_shape(self._fresh, params)

    def _fresh(self, params: Tree) -> State:
        """The state before the first step with these weights."""
        return State(params, self.optimizer.init(trained(params, self.config)), jnp.int32(0))

    def _layouts(self, state: State) -> State:
        """Lay out the state. What an optimizer keeps under a weight's path and in its shape (moments, say) is
        cut like the weight's gradient; the rest (counters, Adafactor's row and column sums) is whole."""
        paths, _ = jax.tree_util.tree_flatten_with_path(trained(state.params, self.config))
        reduced = zip(paths, jax.tree.leaves(self.reduced), strict=True)
        known = {path: (weight.shape, layout) for (path, weight), layout in reduced}

        def layout_of(path, leaf) -> Layout:
            ends = (path[i:] for i in range(len(path)))
            shape, layout = next((known[end] for end in ends if end in known), (None, _WHOLE))
            return layout if leaf.shape == shape else _WHOLE

        return State(self.stored, jax.tree_util.tree_map_with_path(layout_of, state.optimizer), _WHOLE)

    def _layout_in_order(self, leaf: jax.ShapeDtypeStruct, layout: Layout) -> Layout:
        """The layout of as many layers as pp does not divide: pp cuts the next dim that it can."""
        pp = layout.cut("l")
        dims = [Dim("l") if d.name == "l" else d for d in layout.dims]
        for i, (dim, size) in enumerate(zip(dims, leaf.shape, strict=False)):
            if dim.name != "l" and size % self.plan.mesh.along(dim.axes + pp) == 0:
                dims[i] = Dim(dim.name, dim.axes + pp)
                break
        return Layout(tuple(dims))

    def init(self, seed: int = 0, params: Tree = None) -> State:
        """Make a state, each device its own share: the same weights on every mesh.

        Args:
            params: weights to begin with, in the model's order; what this tree lacks is fresh. Arrays that
                lie as ``abstract_natural`` says become the state's own, and so are deleted here: there are
                never two. Others are copied.
        """
        if not 0 <= seed <= _MAX_SEED:
            raise ValueError(f"seed is {seed}; use 0 to {_MAX_SEED:,}")
        given = self._given(params or {})

        def make(key, given):
            params = unflatten_dict(flatten_dict(init_params(self.config, key), sep=".") | given, sep=".")
            like = self.abstract_natural.params  # frozen weights may be narrower
            return self._fresh(jax.tree.map(lambda w, like: w.astype(like.dtype), params, like))

        key = jax.random.key(seed)
        if not given:
            return jax.jit(lambda key: self.from_natural(make(key, {})), out_shardings=self.shardings)(key)
        natural = jax.tree.map(lambda x: x.sharding, self.abstract_natural)
        state = jax.jit(make, out_shardings=natural, donate_argnums=1)(key, given)
        return self.from_natural(state, donate=True)

    def _given(self, params: Tree) -> dict[str, Array]:
        """Weights by path, laid out in the model's order; refuses what does not fit."""
        weights, placed = flatten_dict(self.abstract_natural.params, sep="."), {}
        for path, given in flatten_dict(params, sep=".").items():
            if (weight := weights.get(path)) is None:
                raise ValueError(f"the model has no weight '{path}'; it has {', '.join(weights)}")
            dtype = getattr(given, "dtype", None)  # None, or a number, has none
            if dtype is None or given.shape != weight.shape or not jnp.issubdtype(dtype, jnp.floating):
                found = f"'{path}' of shape {list(np.shape(given))} ({dtype or type(given).__name__})"
                use = f"use {list(weight.shape)} ({weight.dtype}), layers in the model's order"
                raise ValueError(f"{found} is no weight of '{self.config.name}'; {use}")
            given = given.astype(weight.dtype)
            lies = isinstance(given, jax.Array) and given.sharding.is_equivalent_to(
                weight.sharding, given.ndim
            )
            placed[path] = given if lies else jax.device_put(given, weight.sharding, may_alias=False)
        return placed

    def from_natural(self, state: State, donate: bool = False) -> State:
        """A state whose layers come in the model's order (a checkpoint's, say) as the pipeline's stages hold
        it. ``donate``: each leaf is deleted once it is moved, since a state is most of the memory."""
        return self._reorder(state, self.layer_order, self.abstract_state, donate)

    def to_natural(self, state: State, donate: bool = False) -> State:
        """The state with its layers in the model's order, as checkpoints keep it; ``donate`` as above."""
        order = np.argsort(self.layer_order, stable=True)[: self.config.num_layers]
        return self._reorder(state, order, self.abstract_natural, donate)

    def _reorder(self, state: State, order: np.ndarray, like: State, donate: bool) -> State:
        def reorder(x, dim: int, like):
            if dim < 0:
                return x
            reordered = take_layers(x, order, dim, like.sharding)
            if donate:
                x.delete()
            return reordered

        check_alive(state)
        return state if self._keeps_order else jax.tree.map(reorder, state, self._layer_dims, like)

    @functools.cached_property
    def _layer_dims(self) -> State:
        """The dim of each leaf that counts layers: the one that a layer more makes longer; -1 for none."""
        one_more = self._shapes(self.config.num_layers + 1)

        def longer(a, b) -> int:
            grown = [i for i, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]
            return grown[0] if grown else -1

        return jax.tree.map(longer, self.abstract_natural, one_more)

    def lower(self, batch_size: int, seq_len: int) -> jax.stages.Lowered:
        """The step lowered for batches of this shape, without any array: for compiling and for reading."""
        return self.run.lower(self.abstract_state, self.abstract_batch(batch_size, seq_len))

    def abstract_batch(self, batch_size: int, seq_len: int) -> dict:
        """Shapes and shardings of one batch."""
        one = jax.ShapeDtypeStruct((batch_size, seq_len), jnp.int32, sharding=self.batch_sharding)
        return dict.fromkeys(("tokens", "targets", "positions", "segments"), one)

    # ----------------------------------------------------------------------------------------------- the step

    def _step(self, state: State, batch: Batch) -> tuple[State, dict]:
        par = self._reading()
        grads, metrics = self._gradients(par, params := state.params, batch)
        state, update = state._replace(params=trained(params, self.config)), self._update
        with use_abstract_mesh(self.mesh.abstract_mesh):
            if isinstance(par, Explicit):  # optimizers are written by others, and for whole arrays
                reduced = jax.tree.map(functools.partial(sharding, self.mesh), self.reduced)
                out = self.shardings._replace(params=reduced)
                update = jax.sharding.auto_axes(update, out_sharding=out)
            state = update(state, grads, metrics)
            return state._replace(params=joined(params, self._restore(par, state.params))), metrics

    def _update(self, state: State, grads: Tree, metrics: dict) -> State:
        """The state after the optimizer, with weights cut as gradients are; of these it sees the trained."""
        if self.clip is not None:
            scale = jnp.minimum(1.0, self.clip / jnp.maximum(metrics["grad_norm"], 1e-12))
            grads = jax.tree.map(lambda g: g * scale, grads)
        params = self._constrain(state.params)
        with jax.numpy_dtype_promotion("standard"):  # Optax raises floats to powers of whole numbers
            updates, optimizer = self.optimizer.update(grads, state.optimizer, params)
        updated = self._balance_experts(params, optax.apply_updates(params, updates), metrics)
        return State(self._constrain(updated), optimizer, state.step + 1)

    def _constrain(self, params: Tree) -> Tree:
        """The weights, cut as gradients are."""
        cut = lambda x, layout: lax.with_sharding_constraint(x, sharding(self._auto_mesh, layout))
        return jax.tree.map(cut, params, self.reduced)

    def _balance_experts(self, before: Tree, after: Tree, metrics: dict) -> Tree:
        """The weights ``after`` an update, but the routers' biases, which follow a rule and no gradient: up
        by `bias_rate` for an expert with less than the mean load, down for one with more (DeepSeek-V3 2024,
        section 2.1.2)."""
        experts = self.config.experts
        if experts is None or experts.bias_rate is None or self.config.lora:
            return after
        load_le = metrics["load"]
        # Whole numbers: a mean would be rounded, and has a sign then.
        lacking_le = jnp.sign(load_le.sum(1, keepdims=True) - experts.num_experts * load_le)
        if not self._keeps_order:
            lacking_le = jnp.take(lacking_le, self.layer_order, 0, mode="fill", fill_value=0)
        bias_le = before["blocks"]["experts"]["bias"] + experts.bias_rate * lacking_le
        blocks = after["blocks"]
        return after | {"blocks": blocks | {"experts": blocks["experts"] | {"bias": bias_le}}}

    def gradients(self, params: Tree, batch: Batch) -> tuple[Tree, dict]:
        """Gradients (cut as `WeightLayouts.reduced`) and metrics, without an update: what the parity tests
        compare."""
        return self._gradients(self._reading(), params, batch)

    def _reading(self) -> Manual | Auto:
        """The mode that the plan asks for."""
        if self.plan.mode == "manual":
            return Manual(self.plan)
        return (Auto if self.plan.mode == "auto" else Explicit)(self.plan, self.mesh)

    def _gradients(self, par: Manual | Auto, params: Tree, batch: Batch) -> tuple[Tree, dict]:
        if isinstance(par, Auto):
            with use_abstract_mesh(self.mesh.abstract_mesh):
                grads, metrics = self._whole_gradients(par, params, batch)
                return grads, metrics | {"grad_norm": optax.tree.norm(grads)}
        return jax.shard_map(
            functools.partial(self._device_gradients, par),
            mesh=self.mesh,
            in_specs=(jax.tree.map(spec, self.stored), self.batch_sharding.spec),
            out_specs=(jax.tree.map(spec, self.reduced), spec(_WHOLE)),
        )(params, batch)

    def _loss(self, par: Solo, params: Tree, batch: Batch) -> Loss:
        return nnx.merge(model_graph(self.config), params).loss(batch, par)

    def _whole_gradients(self, par: Auto, params: Tree, batch: Batch) -> tuple[Tree, dict]:
        """Gradients of whole values. A sum over a weight's copies stays open until the step finishes it, if
        JAX's types can say so and `Plan.reduce` does not ask for it sooner."""
        if isinstance(par, Explicit) and self.plan.reduce == "end":
            mark = lambda w, layouts, dims: par.lay(w, layouts.stored, dims, marked=True)
            learned = trained(params, self.config)
            params = joined(params, jax.tree.map(mark, learned, self.weight_layouts, self.dims))
        (loss, tally), grads = self._accumulate(par, params, batch)
        tokens = jnp.maximum((batch["targets"] >= 0).sum(), 1).astype(jnp.float32)
        grads = jax.tree.map(lambda g: g / tokens, self._reduce(par, grads))
        summed = Arrow(Layout(TALLY, self.plan.varying("stream")), Layout(TALLY))
        tally = jax.tree.map(lambda x: par.carry_out(x, summed, "loss, tokens and norm"), tally)
        return grads, {"loss": loss / tokens, "tokens": tokens} | self._router_metrics(tally)

    def _device_gradients(self, par: Manual, params: Tree, batch: Batch) -> tuple[Tree, dict]:
        """Gradients on one device, from its part of the batch and its shards of the weights."""
        differ = lambda w, dims: vary(w, self.plan.layouts_of(dims).unreduced.sums)
        params = jax.tree.map(differ, params, weight_dims(self.config))
        (loss, tally), grads = self._accumulate(par, params, batch)
        grads = self._reduce(par, grads)
        square = sum(self._count_once(jnp.sum(g * g)) for g in jax.tree.leaves(grads))
        count = (batch["targets"] >= 0).sum().astype(jnp.float32)
        loss, count, square, tally = self._sum_over_devices(par, (loss, count, square, tally))
        tokens = jnp.maximum(count, 1)
        metrics = {"loss": loss / tokens, "grad_norm": jnp.sqrt(square) / tokens, "tokens": tokens}
        return jax.tree.map(lambda g: g / tokens, grads), metrics | self._router_metrics(tally)

    def _count_once(self, x: Array) -> Array:
        """``x`` on one of the devices that have the same ``x``, and 0 on the others."""
        same = tuple(a for a in self._live if a not in varying(x))
        return vary(jnp.where(lax.axis_index(same) == 0, x, 0) if same else x, self._live)

    def _sum_over_devices(self, par: Manual, values: Tree) -> Tree:
        """Small values summed in one all-reduce, which needs all of them. Had each its own, no data would
        order it against the collectives of the model, and devices may enter unordered ones in different
        orders."""
        flat, restore = ravel_pytree(jax.tree.map(self._count_once, values))
        return restore(par.carry_out(flat, Arrow(Layout((), self._live), _WHOLE), "loss, tokens and norm"))

    def _router_metrics(self, tally: Array | None) -> dict:
        """The routers' tally by name: tokens per expert ``l e``, dropped choices ``l``, entropies ``l``."""
        if tally is None:
            return {}
        return {"load": tally[:, :-2], "dropped": tally[:, -2], "router_entropy": tally[:, -1]}

    def _accumulate(self, par: Manual | Auto, params: Tree, batch: Batch) -> tuple[Loss, Tree]:
        """Sum loss and gradients over the microbatches; at ZeRO 2 gradients are cut before they are added."""
        plan = self.plan
        if plan.pipeline and isinstance(par, Manual):
            return pipeline.gradients(self.config, par, params, batch, self._zeros(par))

        def differentiate(part: Batch) -> tuple[Loss, Tree]:
            of = lambda learned: self._loss(par, joined(params, learned), part)
            loss, grads = jax.value_and_grad(of, has_aux=True)(trained(params, self.config))
            cut = lambda g, layouts, dims: par.carry_out(g, layouts.accumulate, f"gradient {dims}")
            return loss, jax.tree.map(cut, grads, self.weight_layouts, self.dims)

        if plan.microbatches == 1:
            return differentiate(batch)
        add = lambda sums, part: (jax.tree.map(jnp.add, sums, differentiate(part)), None)
        return lax.scan(add, self._zeros(par), cut_in_microbatches(batch, plan.microbatches))[0]

    def _zeros(self, par: Solo) -> tuple[Loss, Tree]:
        """Loss and gradients of no microbatches: zeros, typed as varying like what will be added."""
        plan, experts = self.plan, self.config.experts
        weights = trained(self.abstract_state.params, self.config)
        tally = jnp.zeros((self.config.num_layers, experts.num_experts + 2)) if experts else None
        differ = plan.varying("stream")
        if isinstance(par, Auto):
            place = lambda x, layout: par.carry_out(x, Arrow(_WHOLE, layout))
            tally = jax.tree.map(lambda x: place(x, Layout(TALLY, differ)), tally)
            zeros = lambda w, layouts: place(jnp.zeros(w.shape), layouts.accumulated)
            return (jnp.float32(0), tally), jax.tree.map(zeros, weights, self.weight_layouts)

        def shard_of_zeros(w, layouts):
            layout = layouts.accumulated
            return vary(jnp.zeros(layout.shard_shape(w.shape, plan.mesh.sizes)), layout.axes + layout.sums)

        tally = jax.tree.map(lambda x: vary(x, differ), tally)
        loss = vary(jnp.float32(0), plan.varying("data"))
        return (loss, tally), jax.tree.map(shard_of_zeros, weights, self.weight_layouts)

    # ------------------------------------------------------------------------------------ reducing, restoring

    def _reduce(self, par: Manual | Auto, grads: Tree) -> Tree:
        """Finish the sums: leaf by leaf, or many leaves concatenated into buckets (`_in_buckets`)."""
        if self.plan.reduce == "bucket":
            return self._in_buckets(par, grads)
        finish = lambda g, layouts, dims: par.carry_out(g, layouts.finish, f"gradient {dims}")
        return jax.tree.map(finish, grads, self.weight_layouts, self.dims)

    def _in_buckets(self, par: Manual | Auto, grads: Tree) -> Tree:
        """All-reduce the leaves that are summed over the same axes in flat buckets of at least
        `Plan.bucket_bytes`: fewer collectives, the same bytes, and the first can leave while the backward
        pass still runs (Li et al. 2020)."""
        leaves, tree = jax.tree.flatten(grads)
        summed = [layouts.accumulated.sums for layouts in jax.tree.leaves(self.weight_layouts)]
        sizes = [((sums, varying(leaf)), leaf.nbytes) for sums, leaf in zip(summed, leaves, strict=True)]
        for (sums, _), members in self.plan.buckets(sizes):
            flat = jnp.concatenate([leaves[j].reshape(-1) for j in members])
            finish = Arrow(Layout((), sums), _WHOLE)
            flat = par.carry_out(flat, finish, f"bucket of {len(members)} gradients")
            ends = list(itertools.accumulate(leaves[j].size for j in members))
            for j, piece in zip(members, jnp.split(flat, ends[:-1]), strict=True):
                leaves[j] = piece.reshape(leaves[j].shape)
        return jax.tree.unflatten(tree, leaves)

    def _restore(self, par: Manual | Auto, params: Tree) -> Tree:
        """Move weights from the layout of the update to the stored one: ZeRO 1 and 2 gather."""

        def restore(params):
            equal = {"invariant": True} if isinstance(par, Manual) else {}
            move = lambda w, layouts, dims: par.carry_out(w, layouts.restore, f"updated {dims}", **equal)
            return jax.tree.map(move, params, self.weight_layouts, self.dims)

        if isinstance(par, Auto):
            return restore(params)
        if self.reduced == (stored := trained(self.stored, self.config)):
            return params
        reduced, stored = (jax.tree.map(spec, layouts) for layouts in (self.reduced, stored))
        return jax.shard_map(restore, mesh=self.mesh, in_specs=(reduced,), out_specs=stored)(params)

    @functools.cached_property
    def evaluate(self) -> Checked:
        """Compiled: the cross-entropies of a batch's targets summed, and their number, from (weights, batch),
        forward only and without the routers' own losses. Weights come stored, with their layers in the
        model's order (`to_natural`); where stages hold them the mode is Auto's: layers travel to every
        stage, which may need room for all of them."""
        plan = self.plan

        def sums(par: Solo, params: Tree, batch: Batch):
            model = nnx.merge(model_graph(self.config), params)
            parts = cut_in_microbatches(batch, plan.microbatches)
            loss = lax.map(lambda part: model.cross_entropies(part, par)[0].sum(), parts).sum()
            return loss, (batch["targets"] >= 0).sum().astype(jnp.float32)

        def manual(params, batch):
            par = Manual(plan)
            return self._sum_over_devices(par, sums(par, params, batch))

        if plan.mode == "auto" or plan.pipeline:
            return Checked(jax.jit(functools.partial(sums, Auto(plan, self.mesh))), self.config.vocab_size)
        given = jax.tree.map(spec, self.stored), self.batch_sharding.spec
        mapped = jax.shard_map(manual, mesh=self.mesh, in_specs=given, out_specs=spec(_WHOLE))
        return Checked(jax.jit(mapped), self.config.vocab_size)
