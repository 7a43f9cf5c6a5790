"""One executor for every pipeline: it walks a timetable of `schedule` inside one shard_map program.

A `lax.scan` goes through the lockstep ticks. In each of them a device

1. takes what its neighbour sent, `messages[read]`: an activation for F, a gradient for B;
2. runs the cell that the table has for its stage, by `lax.switch`: F, B, W or nothing at all;
3. passes the result one stage on or back: two ppermutes outside the switch, along which every stage takes part.

The devices of a tp, fsdp or dp group belong to one stage, so they take the same branch and their collectives may stay
inside it. What a cell needs later lies in slots that `schedule.slots` has allocated from what is alive.

The layers of a stage are its share of the blocks' weights, stored `l/pp`; `layer_order` says which layer lies where. The
embedding, the last norm and the head are whole on every stage, used on the first or the last, and their gradients are summed
over pp at the end of the step (`Plan.unreduced` says so): with tied embeddings that sum joins the two uses.

B recomputes its stage from the input that F saved. F of the last stage computes nothing, since its B follows and does. In
schedules that split the backward, `split` cuts the traced B in two: what the input's gradient needs, and the rest, which
is W. Nothing is computed twice for that, and any stage function can be cut.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from llmpar.config import ModelConfig
from llmpar.model import Batch, Llama, rope_table
from llmpar.notation import Arrow
from llmpar.par import Manual, vary
from llmpar.plan import Plan
from llmpar.schedule import Schedule, Slots, Timetable, slots, timetable

Tree = Any
PP = "pp"


def layer_order(schedule: Schedule, num_layers: int) -> np.ndarray:
    """Which layer lies at each place of the stored stack, so that cutting it by pp gives every stage its chunks in order.

    Stored = natural[order], natural = stored[argsort(order)]: apply it where weights come from or go to a world without
    pipelines (fresh weights, checkpoints, Hugging Face). It is the identity where each stage has one chunk.
    """
    cells = schedule.routes[0]
    if num_layers % len(cells) or schedule.parameter_copies > 1:
        raise ValueError(
            f"schedule '{schedule.name}' needs a number of layers that its {len(cells)} chunks divide, in one copy; it has "
            f"{schedule.parameter_copies} and the model {num_layers} layers; use {-(-num_layers // len(cells)) * len(cells)} "
            f"layers{' and dualpipev' if schedule.parameter_copies > 1 else ''}"
        )
    layers = np.arange(num_layers).reshape(len(cells), -1)
    return np.concatenate([layers[cells.index(cell)] for cell in sorted(cells)])


def arrange(params: Tree, order: np.ndarray) -> Tree:
    """The weights (or gradients) with their blocks in another order: `order` to store, its argsort to come back."""
    return params | {"blocks": jax.tree.map(lambda w: w[order], params["blocks"])}


def check(config: ModelConfig, plan: Plan, schedule: Schedule, batch_size: int) -> Timetable:
    """Refuse what the executor cannot run, before any compilation; gives the timetable that proves the order legal."""
    p, m = plan.mesh.pp, schedule.num_microbatches
    if p != schedule.num_stages:
        raise ValueError(f"schedule '{schedule.name}' has {schedule.num_stages} stages but mesh '{plan.mesh}' has pp={p}; make them equal")
    layer_order(schedule, config.num_layers)
    plain = {"reading": "manual", "reduce": "end", "accumulate": 1}
    if other := {k: getattr(plan, k) for k in plain if getattr(plan, k) != plain[k]}:
        raise ValueError(f"pipelines do not go with {other}: microbatches accumulate already; use {plain}")
    parts = m * plan.mesh.dp * plan.mesh.fsdp * plan.mesh.ep
    if batch_size % parts:
        raise ValueError(
            f"batch {batch_size} is not a multiple of microbatches·dp·fsdp·ep = {parts}; use {-(-batch_size // parts) * parts}"
        )
    return timetable(schedule)


class Stage(Llama):
    """A Llama cut open: blocks that take and give the residual stream, and a loss of a stream that is there already."""

    def tables(self, par):
        """The output head alone: the embedding is looked up on another stage."""
        return None, par.weight(self.embedding if self.config.tied else self.head)

    def run(self, x, batch: Batch, par, unroll: bool):
        """The residual stream after the blocks that are here; unrolled, every product is an equation of its own."""
        graph, weights = nnx.split(self.blocks)
        rope = rope_table(self.config, batch["positions"])
        keys = [par.move(batch[name], "data b s -> keys b s") for name in ("positions", "segments")]
        ids = *(par.move(x, "keys b s -> queries b s") for x in keys), *keys
        block = lambda x, w: nnx.merge(graph, w)(x, ids, rope, par)
        if not unroll:
            return par.layers(block, x, weights)
        for i in range(jax.tree.leaves(weights)[0].shape[0]):
            x = block(x, jax.tree.map(lambda w: w[i], weights))  # noqa: B023
        return x

    def hidden(self, embedding, batch: Batch, par):
        """The last norm of the stream that comes with the batch."""
        return self.norm(batch["stream"], par)


@functools.cache
def _graph(config: ModelConfig):
    return nnx.split(nnx.eval_shape(lambda: Stage(config, nnx.Rngs(0))))[0]


def split(traced: Any, num_early: int, num_known: int) -> tuple[Any, Any, list]:
    """Cut a traced function between its outputs: `first` gives the early ones and what `second` needs for the others.

    Of flat inputs i and outputs o, `first(*i) -> (*o[:num_early], *crossing)` and `second(*i[:num_known], *crossing) ->
    o[num_early:]`. No equation runs in both, except those that follow from the known inputs alone (weights and tokens here),
    whose results need not be kept: casts, gathers over fsdp, masks. Both may be empty-handed; the result is always right.
    """
    jaxpr = getattr(traced, "jaxpr", traced)
    is_var = lambda v: not hasattr(v, "val")
    known = {*jaxpr.constvars, *jaxpr.invars[:num_known]}
    for eqn in jaxpr.eqns:
        if all(v in known for v in eqn.invars if is_var(v)):
            known.update(eqn.outvars)

    def needed(outs, skip):
        """The equations behind `outs` that `skip` lets through, and the variables that they and `outs` read."""
        read, eqns = {v for v in outs if is_var(v)}, []
        for eqn in reversed(jaxpr.eqns):
            if read & set(eqn.outvars) and not skip(eqn):
                eqns.append(eqn)
                read.update(v for v in eqn.invars if is_var(v))
        return eqns[::-1], read

    early, late = jaxpr.outvars[:num_early], jaxpr.outvars[num_early:]
    before, _ = needed(early, lambda eqn: False)
    done = {id(eqn) for eqn in before}
    after, read = needed(late, lambda eqn: id(eqn) in done and not known.issuperset(eqn.outvars))
    made = {v for eqn in before for v in eqn.outvars}
    crossing = [v for v in dict.fromkeys([*jaxpr.invars, *(v for e in before for v in e.outvars)]) if v in read - known]
    assert made.union(jaxpr.invars).issuperset(crossing)

    def part(eqns, ins, outs):
        names = jaxpr.debug_info.with_unknown_names()
        cut = jaxpr.replace(eqns=eqns, invars=ins, outvars=outs, debug_info=names)
        return functools.partial(jax.core.eval_jaxpr, cut, traced.consts)

    first = part(before, jaxpr.invars, [*early, *crossing])
    return first, part(after, [*jaxpr.invars[:num_known], *crossing], late), [v.aval for v in crossing]


def gradients(
    config: ModelConfig, plan: Plan, schedule: Schedule, par: Manual, params: Tree, batch: Batch, total
) -> tuple[jax.Array, Tree]:
    """Loss and gradients of this device's part of the batch, inside shard_map; the order of the blocks is `layer_order`'s.

    ``params`` are typed as varying over the sums of `Plan.unreduced`, pp among them where a weight is not cut by it; the
    gradients come laid out as `Plan.accumulated`, the loss unfinished over pp and the axes of the data.
    """
    return _Executor(config, plan, schedule, par, params, batch, total).run()


class _Executor:
    """The branches of the switch, on the weights and the tokens of one device."""

    def __init__(self, config, plan, schedule, par, params, batch, total):
        self.config, self.plan, self.schedule, self.par, self.total = config, plan, schedule, par, total
        self.table = timetable(schedule)
        self.slots = slots(self.table)
        cut = lambda x, n: x.reshape(n, -1, *x.shape[1:])
        self.batch = jax.tree.map(lambda x: cut(x, schedule.num_microbatches), batch)
        self.chunks = jax.tree.map(lambda w: cut(w, schedule.visits), params["blocks"])
        self.shared = {name: w for name, w in params.items() if name != "blocks"}
        self.used_last = ("norm", "embedding" if config.tied else "head")
        self.dims = {path: dims for path, (dims, _) in config.param_shapes().items()}

    # ------------------------------------------------------------------------------------------------ what cells compute

    def embed(self, embedding, batch):
        """The stream that enters the first stage."""
        with self.par.repeated(self.schedule.num_microbatches):
            model = self.model(self.chunks, self.shared | {"embedding": embedding})
            return model.embed(self.par.weight(model.embedding), batch, self.par)

    def through(self, blocks, x, batch):
        """The stream after the blocks of one chunk."""
        with self.par.repeated(self.schedule.num_microbatches * self.schedule.visits):
            model = self.model(blocks, self.shared)
            return model.run(x, batch, self.par, unroll=self.schedule.split_backward)

    def loss(self, own, x, batch):
        """The last stage's part of the loss, from the stream after its blocks."""
        with self.par.repeated(self.schedule.num_microbatches):
            return self.model(self.chunks, self.shared | own).losses(batch | {"stream": x}, self.par).sum() / self.total

    def model(self, blocks, shared):
        return nnx.merge(_graph(self.config), {"blocks": blocks, **shared})

    def backward(self, known, given):
        """B and W of a chunk: the gradient of its input, loss and shared gradients grown; and the blocks' gradients."""
        (blocks, shared, batch), (done, x, dy, last, first) = known, given

        def from_loss(y, dy, done):
            own = {name: shared[name] for name in self.used_last}
            loss, (down, dy) = jax.value_and_grad(self.loss, argnums=(0, 1))(own, y, batch)
            return dy, {"loss": done["loss"] + loss, "shared": self.add(done["shared"], down)}

        def into_embedding(dx, done):
            (down,) = _live(lambda w, dx: jax.vjp(lambda w: self.embed(w, batch), w)[1](dx), shared["embedding"], dx)
            return done | {"shared": self.add(done["shared"], {"embedding": down})}

        with self.par.differentiated():
            y, pull = jax.vjp(lambda w, x: self.through(w, x, batch), blocks, x)
            dy, done = lax.cond(last, from_loss, lambda y, dy, done: (dy, done), y, dy, done)
            d_blocks, dx = pull(dy)
            done = lax.cond(first, into_embedding, lambda dx, done: done, dx, done)
        return (dx, done), d_blocks

    def add(self, sums, grads):
        """Gradients added to those of the same name, at ZeRO 2 cut before that (`Plan.accumulated`)."""

        def one(path, g):
            dims = self.dims[jax.tree_util.keystr(path, simple=True, separator=".")]
            return self.par.carry_out(g, Arrow(self.plan.unreduced(dims), self.plan.accumulated(dims)), f"gradient {dims}")

        grads = jax.tree_util.tree_map_with_path(one, grads)
        return sums | {name: jax.tree.map(jnp.add, sums[name], g) for name, g in grads.items()}

    def nothing(self):
        """Loss and gradients of no microbatches, typed as varying like what will be added."""

        def zeros(path, w):
            path = jax.tree_util.keystr(path, simple=True, separator=".")
            layout = self.plan.accumulated(self.dims[path])
            shape = layout.shard_shape(self.config.param_shapes()[path][1], self.plan.mesh.sizes)
            return vary(jnp.zeros(shape), layout.axes + layout.sums)

        grads = jax.tree_util.tree_map_with_path(zeros, self.shared | {"blocks": self.chunks})
        blocks = jax.tree.map(lambda g: g.reshape(self.schedule.visits, -1, *g.shape[1:]), grads.pop("blocks"))
        loss = vary(jnp.float32(0), self.plan.live(PP) + self.plan.varying("data"))
        return {"loss": loss, "shared": grads}, blocks

    # --------------------------------------------------------------------------------------------------------- the walk

    def run(self):
        """Scan over the ticks."""
        done, d_chunks = self.nothing()
        x = jax.eval_shape(self.embed, self.shared["embedding"], _at(self.batch, 0))
        state = {"done": done, "blocks": d_chunks, "saved": _buffer(self.slots.num_saved, x)}
        if self.schedule.split_backward:
            zero = vary(jnp.int32(0), self.plan.live(PP))
            flag, x0, known = zero > 0, _at(_buffer([1], x), 0), self.known(zero, zero)
            traced, shape = jax.make_jaxpr(self.backward, return_shape=True)(known, (done, x0, x0, flag, flag))
            self.early, self.late = map(jax.tree.structure, shape)
            self.first, self.second, crossing = split(traced, self.early.num_leaves, len(jax.tree.leaves(known)))
            state["residual"] = [_buffer(self.slots.num_residual, r) for r in crossing]
        stage = lax.axis_index(PP)
        cells = {name: jnp.asarray(grid)[:, stage] for name, grid in self.cells().items()}
        sends = {way: jnp.asarray((self.slots.send == way).any(1)) for way in (1, -1)}
        messages = _buffer(self.slots.num_messages + 1, x)
        (state, _), _ = lax.scan(self.tick, (state, messages), (cells, sends))
        blocks = jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), state["blocks"])
        return state["done"]["loss"], state["done"]["shared"] | {"blocks": blocks}

    def cells(self) -> dict[str, np.ndarray]:
        """The table as integers [tick, stage] by name. What nobody sent goes to a message slot that nobody reads, the last."""
        s, trash = self.slots, self.slots.num_messages.max() + 1
        kind, u, chunk = np.moveaxis(self.table.ticks, 2, 0)
        letters = {"left": s.left % trash, "right": s.right % trash, "keep": s.keep % trash}
        ends = {"enters": s.read < 0, "leaves": (s.send == 0) & (s.keep < 0)}
        return {"kind": kind, "u": u, "chunk": chunk, "saved": s.saved, "residual": s.residual, "read": s.read} | letters | ends

    def tick(self, carry, now):
        """One cell on every stage, then the messages."""
        (state, messages), (cell, sends) = carry, now
        x = _at(messages, cell["read"])
        y = x
        idle = lambda state, x, cell: (state, x)
        for kind, work in enumerate((self.run_f, self.run_b, self.run_w)[: 2 + self.schedule.split_backward]):
            state, y = lax.cond(cell["kind"] == kind, work, idle, state, y, cell)
        for name, way in {"left": 1, "right": -1}.items():
            if (self.slots.send == way).any():
                messages = _put(messages, self.pass_on(y, way, sends[way]), cell[name])
        if (self.slots.keep >= 0).any():
            messages = _put(messages, y, cell["keep"])
        return (state, messages), None

    def pass_on(self, y, way: int, somebody_sends):
        """What comes from the stage before (or, for way -1, behind); no device sends in a tick where the table sends nothing."""
        sends, p = self.slots.send == way, self.schedule.num_stages
        pairs = [(int(s), int(s + way) % p) for s in np.flatnonzero(sends.any(0))]
        move = lambda y: lax.ppermute(y, PP, pairs)
        return move(y) if sends.any(1).all() else lax.cond(somebody_sends, move, lambda y: y, y)

    def known(self, chunk, u):
        """What a cell is given besides activations and gradients."""
        return _at(self.chunks, chunk), self.shared, _at(self.batch, u)

    def run_f(self, state, x, cell):
        blocks, shared, batch = self.known(cell["chunk"], cell["u"])
        x = lax.cond(cell["enters"], lambda x: self.embed(shared["embedding"], batch), lambda x: x, x)
        state = state | {"saved": _put(state["saved"], x, cell["saved"])}
        return state, lax.cond(cell["leaves"], lambda x: x, lambda x: self.through(blocks, x, batch), x)

    def run_b(self, state, dy, cell):
        known = self.known(cell["chunk"], cell["u"])
        given = state["done"], _at(state["saved"], cell["saved"]), dy, cell["enters"], cell["leaves"]
        if not self.schedule.split_backward:
            (dx, done), d_blocks = self.backward(known, given)
            return self.grow(state | {"done": done}, d_blocks, cell), dx
        out = self.first(*jax.tree.leaves((known, given)))
        dx, done = jax.tree.unflatten(self.early, out[: self.early.num_leaves])
        kept = [_put(r, x, cell["residual"]) for r, x in zip(state["residual"], out[self.early.num_leaves :], strict=True)]
        return state | {"done": done, "residual": kept}, dx

    def run_w(self, state, x, cell):
        known = self.known(cell["chunk"], cell["u"])
        d_blocks = self.second(*jax.tree.leaves(known), *_at(state["residual"], cell["residual"]))
        return self.grow(state, jax.tree.unflatten(self.late, d_blocks), cell), x

    def grow(self, state, d_blocks, cell):
        chunk = cell["chunk"]
        blocks = self.add({"blocks": _at(state["blocks"], chunk)}, {"blocks": d_blocks})["blocks"]
        return state | {"blocks": jax.tree.map(lambda g, new: _put(g, new, chunk), state["blocks"], blocks)}


def _live(f, *args):
    """What ``f`` gives, by those of its equations alone that it takes: the look-up need not run again for its gradient."""
    traced, shape = jax.make_jaxpr(f, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shape), split(traced, len(traced.out_avals), 0)[0](*jax.tree.leaves(args)))


def _buffer(num_slots, x):
    """Room for the largest stage's number of values like ``x``: every stage runs the same program."""
    kind = x.manual_axis_type
    return vary(jnp.zeros((max(num_slots), *x.shape), x.dtype), kind.varying if kind else ())


def _at(tree: Tree, slot):
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, slot, keepdims=False), tree)


def _put(buffer, x, slot):
    return lax.dynamic_update_index_in_dim(buffer, x, slot, 0)
