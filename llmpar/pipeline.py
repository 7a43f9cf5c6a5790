"""One executor for every pipeline: it walks a `timetable` inside one shard_map program.

A `lax.scan` goes through the lockstep ticks. In each of them a device

1. takes what a neighbour sent it, `messages[read]`: an activation for F, a gradient for B;
2. runs the cell that the table has for its stage: F, B, W, or nothing at all;
3. passes the result one stage on or back, by two ppermutes outside the branches, in which every stage takes
    part.

The devices of a dp, fsdp, sp or tp group belong to one stage, so they take the same branch, and their
collectives may stay inside it. What a cell needs later lies in slots that `timetable.slots` has allocated
from what is alive.

The layers of a stage are its share of the blocks' weights, stored `l/pp`; `layer_order` says which layer lies
where. The embedding, the last norm and the head are whole on every stage, used on the first or the last, and
their gradients are summed over pp at the end of the step (`plan.Life` says so): with tied embeddings
that sum joins the two uses. Where a schedule wants two copies of the model (DualPipe), a stage borrows its
opposite's layers for the step, and returns their gradients.

By default (`Plan.stage_saves`) B recomputes its stage from the input that F saved, and F of the last stage
computes nothing, since its B follows and does. With residuals saved F keeps what B will need instead. In
schedules that split the backward, W gets what is left of B once the input's gradient is out. Both cuts are
made by `split` in the equations of one traced cell, whatever the stage computes.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from llmpar.config import ModelConfig
from llmpar.model import Batch, Llama
from llmpar.par import Manual, scope, vary
from llmpar.plan import Plan
from llmpar.schedules import KINDS, Schedule
from llmpar.split import split, trace
from llmpar.timetable import slots, timetable

Tree = Any
PP = "pp"


def layers_of(schedule: Schedule, num_layers: int) -> dict[tuple[int, int], int]:
    """How many layers each (stage, chunk) has: where they cannot all have the same number, the first have one
    more."""
    n, cells = num_layers, len(schedule.routes[0])
    return {cell: n // cells + (i < n % cells) for route in schedule.routes for i, cell in enumerate(route)}


def layer_order(schedule: Schedule | None, num_layers: int) -> np.ndarray:
    """Which layer lies at each place of the stored stack, so that cutting it by pp gives every stage its
    chunks in order.

    Where a chunk has fewer layers than the others its last place holds none, written `num_layers`: zeros,
    which no stage computes with. The identity where each stage has one chunk and all the same number of
    layers. `llmpar.step.Step` applies it where weights come from or go to a world without pipelines: fresh
    weights, checkpoints, Hugging Face.
    """
    if schedule is None:
        return np.arange(num_layers)
    every = layers_of(schedule, num_layers)
    counts = {cell: every[cell] for cell in schedule.routes[0]}
    ends = dict(zip(counts, np.cumsum(list(counts.values())), strict=True))
    places = [np.arange(max(counts.values())) + ends[cell] - counts[cell] for cell in sorted(counts)]
    return np.concatenate(
        [np.where(p < ends[cell], p, num_layers) for p, cell in zip(places, sorted(counts), strict=True)]
    )


class Stage(Llama):
    """A Llama cut open: its loss is that of a stream that is there already."""

    def hidden_and_head(self, batch: Batch, par):
        """The last norm of the stream that comes with the batch, and the output head. The embedding is looked
        up on another stage."""
        head = par.weight(self.embedding if self.config.tied else self.head)
        return self.norm(batch["stream"], par), head, None


def unrolled(block, x, stack):
    """As `Solo.layers`, layer by layer: every product is then an equation to cut at."""
    for i in range(jax.tree.leaves(stack)[0].shape[0]):
        x, _ = block(x, _at(stack, i))
    return x, None


def gradients(
    config: ModelConfig, plan: Plan, par: Manual, params: Tree, batch: Batch
) -> tuple[jax.Array, Tree]:
    """Loss (summed over tokens) and gradients of this device's part of the batch, inside shard_map. The
    blocks come in `layer_order`.

    ``params`` vary over the sums of `Life.unreduced`, pp among them where a weight is not cut by it.
    Gradients come laid out as `Life.accumulated`, the loss unfinished over pp and the axes of the data.
    """
    return _Executor(config, plan, par, params, batch).run()


class _Executor:
    """What the cells compute, on the weights and the tokens of one device."""

    def __init__(self, config, plan, par, params, batch):
        self.config, self.plan, self.par = config, plan, par
        self.schedule, self.save = (schedule := plan.pipeline), plan.stage_saves == "residuals"
        self.ticks, self.slots = (table := timetable(schedule)).ticks, slots(table)
        cut = lambda x, n: x.reshape(n, -1, *x.shape[1:])
        self.batch = jax.tree.map(lambda x: cut(x, schedule.num_microbatches), batch)
        self.copies = schedule.parameter_copies
        self.chunks = jax.tree.map(lambda w: self.copied(cut(w, schedule.visits)), params["blocks"])
        self.shared = {name: w for name, w in params.items() if name != "blocks"}
        self.shapes = plan.padded(config).weights()
        self.counts = layers_of(schedule, config.num_layers)
        name_of = lambda path, w: jax.tree_util.keystr(path, simple=True, separator=".")
        self.paths = jax.tree_util.tree_map_with_path(name_of, params)
        self.graph, _ = nnx.split(nnx.eval_shape(lambda: Stage(config, nnx.Rngs(0))))

    def opposite(self, x):
        """What the stage at the same distance from the other end has."""
        p = self.schedule.num_stages
        with scope("l -> the opposite stage"):
            return lax.ppermute(x, PP, [(i, p - 1 - i) for i in range(p)])

    def copied(self, w):
        """One's own chunks, and of a schedule with two copies of the model the opposite's."""
        return w if self.copies == 1 else jnp.concatenate([w, self.opposite(w)])

    def model(self, blocks, shared) -> Stage:
        return nnx.merge(self.graph, {"blocks": blocks, **shared})

    def embed(self, embedding, batch):
        """The stream that enters the first stage."""
        model = self.model(self.chunks, self.shared | {"embedding": embedding})
        return model.embed(self.par.weight(model.embedding), batch, self.par)

    def through(self, blocks, x, batch, chunk, kind):
        """The stream after the blocks of one chunk, and for B the losses of its routers, if it has any. Where
        some chunks have a layer less, the last one may be skipped."""
        run = unrolled if self.save or self.schedule.split_backward else self.par.layers
        few, most = min(self.counts.values()), max(self.counts.values())

        def layers(block, x, stack):
            def one(x, w):
                y, told = block(x[0], w)
                return (y, None if x[1] is None else x[1] + told["loss"]), None

            x = x, jnp.zeros_like(x[..., 0], jnp.float32) if self.config.experts and kind == "B" else None
            x = run(one, x, jax.tree.map(lambda w: w[:few], stack))[0]
            if few == most:
                return x
            grid = np.array([self.counts[cell] for cell in sorted(self.counts)]).reshape(
                self.schedule.num_stages, -1
            )
            full = jnp.asarray(grid == most)[lax.axis_index(PP), chunk]
            last = jax.tree.map(lambda w: w[few:], stack)
            return _when(f"full{kind}", full, lambda x, w: run(one, x, w)[0], lambda x, w: x, x, last)

        x, loss = (model := self.model(blocks, self.shared)).run_blocks(x, batch, self.par, layers)
        return x, None if loss is None else model.router_losses(loss, batch, self.par).sum()

    def loss(self, own, x, batch):
        """The last stage's part of the loss, from the stream after its blocks."""
        return (
            self.model(self.chunks, self.shared | own)
            .cross_entropies(batch | {"stream": x}, self.par)[0]
            .sum()
        )

    def cell(self, known, x, later):
        """F, B and W of a chunk: the stream after it; its input's gradient, loss and shared gradients; those
        of its blocks."""
        (blocks, shared, batch, chunk), (done, dy, last, first) = known, later

        def from_loss(y, dy, done):
            own = {name: shared[name] for name in ("norm", "embedding" if self.config.tied else "head")}
            loss, (down, dy) = jax.value_and_grad(self.loss, argnums=(0, 1))(own, y, batch)
            return dy, {"loss": done["loss"] + loss, "shared": self.add(done["shared"], down)}

        def into_embedding(dx, done):  # traced, so that the look-up does not run again for its gradient
            pull = lambda w, dx: jax.vjp(lambda w: self.embed(w, batch), w)[1](dx)
            (down,) = trace(pull, shared["embedding"], dx)[0](shared["embedding"], dx)
            return done | {"shared": self.add(done["shared"], {"embedding": down})}

        (y, routed), pull = jax.vjp(lambda w, x: self.through(w, x, batch, chunk, "B"), blocks, x)
        if routed is not None:  # every stage adds its own routers' losses
            done = done | {"loss": done["loss"] + routed}
        dy, done = _when("leaves", last, from_loss, lambda y, dy, done: (dy, done), y, dy, done)
        d_blocks, dx = pull((dy, jax.tree.map(jnp.ones_like, routed)))
        done = _when("enters", first, into_embedding, lambda dx, done: done, dx, done)
        return y, (dx, done), d_blocks

    def add(self, sums, grads):
        """Gradients added to those of the same name, at ZeRO 2 cut before that (`Life.accumulate`)."""

        def one(done, g, path):
            dims, plan = self.shapes[path].dims, self.plan
            return done + self.par.carry_out(g, plan.life(dims).accumulate, f"gradient {dims}")

        return sums | {name: jax.tree.map(one, sums[name], g, self.paths[name]) for name, g in grads.items()}

    def nothing(self):
        """Loss and gradients of no microbatches, typed as varying like what will be added; those of blocks
        chunk by chunk."""

        def zeros(path):
            dims, shape = self.shapes[path].dims, self.shapes[path].shape
            layout = self.plan.life(dims).accumulated
            return vary(jnp.zeros(layout.shard_shape(shape, self.plan.mesh.sizes)), layout.axes + layout.sums)

        grads = jax.tree.map(zeros, self.paths)
        chunks = lambda g: g.reshape(self.schedule.visits, -1, *g.shape[1:])
        blocks = jax.tree.map(lambda g: jnp.concatenate([chunks(g)] * self.copies), grads.pop("blocks"))
        return {
            "loss": vary(jnp.float32(0), self.plan.live(PP) + self.plan.varying("data")),
            "shared": grads,
        }, blocks

    def trace(self, x, done) -> tuple[list, list]:
        """Trace a cell and cut it into what F, B and W run. Gives the types of what F and of what B keep for
        later."""
        zero = vary(
            jnp.int32(0), self.plan.live(PP)
        )  # stages differ in everything, their tokens of the moment too
        x, known = _at(_buffer([1], x), 0), self.known({"chunk": zero, "u": zero})
        whole, (_, early, late) = trace(self.cell, known, x, (done, x, zero > 0, zero > 0))
        self.early, self.late, self.num_early = (
            *map(jax.tree.structure, (early, late)),
            len(jax.tree.leaves(early)),
        )
        num_known, saved, residual = len(jax.tree.leaves(known)), [jax.typeof(x)], list[Any]()
        if self.save:
            self.f, self.b, saved = split(whole, 1, num_known, num_known + 1)
            num_known += len(saved)
        else:
            self.b, _ = whole.part(whole.jaxpr.outvars[1:], whole.jaxpr.invars)
        if self.schedule.split_backward:
            self.b, self.w, residual = split(self.b, self.num_early, num_known, len(self.b.jaxpr.invars))
        return saved, residual

    def run(self):
        """Scan over the ticks."""
        done, blocks = self.nothing()
        x = jax.eval_shape(self.embed, self.shared["embedding"], _at(self.batch, 0))
        state = {"done": done, "blocks": blocks}
        for name, kept in zip(("saved", "residual"), self.trace(x, done), strict=True):
            state[name] = [_buffer(getattr(self.slots, f"num_{name}"), x) for x in kept]
        cells = {name: jnp.asarray(grid)[:, lax.axis_index(PP)] for name, grid in self.cells().items()}
        sends = {way: jnp.asarray((self.slots.send == way).any(1)) for way in (1, -1)}
        messages = _buffer(self.slots.num_messages + 1, x)
        (state, _), _ = lax.scan(self.tick, (state, messages), (cells, sends))
        mine = lambda g: g if self.copies == 1 else g[:1] + self.opposite(g[1:])
        blocks = jax.tree.map(lambda g: mine(g).reshape(-1, *g.shape[2:]), state["blocks"])
        return state["done"]["loss"], state["done"]["shared"] | {"blocks": blocks}

    def cells(self) -> dict[str, np.ndarray]:
        """The table as integers [tick, stage] by name. What nobody sent goes to a message slot that nobody
        reads, the last."""
        s, num_slots = self.slots, max(self.slots.num_messages) + 1
        kind, u, chunk = np.moveaxis(self.ticks, 2, 0)
        letters = {name: getattr(s, name) % num_slots for name in ("left", "right", "keep", "read")}
        cells = {"kind": kind, "u": u, "chunk": chunk, "saved": s.saved, "residual": s.residual, **letters}
        return cells | {"enters": s.read < 0, "leaves": (s.send == 0) & (s.keep < 0)}

    def tick(self, carry, now):
        """One cell on every stage, then the messages. A branch per kind: XLA updates the state of a
        conditional with two branches in place, but copies it all through a `lax.switch` with more."""
        (state, messages), (cell, sends) = carry, now
        y = _at(messages, cell["read"])
        for i, work in enumerate(
            (self.forward, self.backward, self.weights)[: 2 + self.schedule.split_backward]
        ):
            state, y = _when(
                KINDS[i], cell["kind"] == i, work, lambda state, y, cell: (state, y), state, y, cell
            )
        for name, way in {"left": 1, "right": -1}.items():
            if (self.slots.send == way).any():
                messages = _put(messages, self.pass_on(y, way, sends[way]), cell[name])
        if (self.slots.keep >= 0).any():
            messages = _put(messages, y, cell["keep"])
        return (state, messages), None

    def pass_on(self, y, way: int, somebody_sends):
        """What comes from the neighbour, between stages that ever send this way, in ticks in which one of
        them does."""
        sends, p = self.slots.send == way, self.schedule.num_stages
        pairs = [(int(s), int(s + way) % p) for s in np.flatnonzero(sends.any(0))]
        with scope(f"stream b s d -> the {'next' if way == 1 else 'previous'} stage"):
            return _when(
                "right" if way == 1 else "left",
                somebody_sends,
                lambda y: lax.ppermute(y, PP, pairs),
                lambda y: y,
                y,
            )

    def known(self, cell):
        """What a cell is given besides activations and gradients."""
        return _at(self.chunks, cell["chunk"]), self.shared, _at(self.batch, cell["u"]), cell["chunk"]

    def forward(self, state, x, cell):
        blocks, shared, batch, chunk = known = self.known(cell)
        x = _when("enters", cell["enters"], lambda x: self.embed(shared["embedding"], batch), lambda x: x, x)
        if self.save:
            y, *kept = self.f(*jax.tree.leaves(known), x)
        else:
            forward = lambda x: self.through(blocks, x, batch, chunk, "F")[0]
            y, kept = _when("leaves", cell["leaves"], lambda x: x, forward, x), [x]
        return state | {"saved": _put(state["saved"], kept, cell["saved"])}, y

    def backward(self, state, dy, cell):
        later = state["done"], dy, cell["enters"], cell["leaves"]
        out = self.b(*jax.tree.leaves((self.known(cell), _at(state["saved"], cell["saved"]), later)))
        (dx, done), rest = jax.tree.unflatten(self.early, out[: self.num_early]), out[self.num_early :]
        if self.schedule.split_backward:
            return state | {"done": done, "residual": _put(state["residual"], rest, cell["residual"])}, dx
        return self.grow(state | {"done": done}, rest, cell), dx

    def weights(self, state, x, cell):
        kept = [_at(state[name], cell[name]) for name in ("saved", "residual")[not self.save :]]
        return self.grow(state, self.w(*jax.tree.leaves((self.known(cell), kept))), cell), x

    def grow(self, state, d_blocks, cell):
        d_blocks = {"blocks": jax.tree.unflatten(self.late, d_blocks)}
        blocks = self.add({"blocks": _at(state["blocks"], cell["chunk"])}, d_blocks)["blocks"]
        return state | {"blocks": _put(state["blocks"], blocks, cell["chunk"])}


def _when(name: str, *args):
    """`lax.cond` with a name by which a census finds how often it is taken (`taken`)."""
    with jax.named_scope(f"when-{name}"):
        return lax.cond(*args)


def taken(schedule: Schedule, num_layers: int, stage: int) -> dict[str, Fraction]:
    """How often a stage takes the named branches of the program, of the times that it comes to them."""
    counts = layers_of(schedule, num_layers)
    full = [n == max(counts.values()) for cell, n in counts.items() if cell[0] == stage]
    last = [route[-1] for route in schedule.routes]
    before = [
        n == max(counts.values()) for cell, n in counts.items() if cell[0] == stage and cell not in last
    ]
    fulls = {"fullB": Fraction(sum(full), len(full)), "fullF": Fraction(sum(before), max(1, len(before)))}
    ticks, send = (table := timetable(schedule)).ticks, slots(table).send
    cells = {kind: Fraction(int((ticks[:, stage, 0] == i).sum()), len(ticks)) for i, kind in enumerate(KINDS)}
    ways = {
        name: Fraction(int((send == way).any(1).sum()), len(ticks))
        for name, way in {"right": 1, "left": -1}.items()
    }
    end = lambda i: Fraction(
        sum(r[i][0] == stage for r in schedule.routes), schedule.visits * schedule.parameter_copies
    )
    return cells | ways | fulls | {"enters": end(0), "leaves": end(-1)}


def _buffer(num_slots, x):
    """Room for the largest stage's number of values like ``x``: every stage runs the same program."""
    axes = x.manual_axis_type.varying if x.manual_axis_type else ()
    return vary(jnp.zeros((max(num_slots), *x.shape), x.dtype), axes)


def _at(tree: Tree, slot):
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, slot, keepdims=False), tree)


def _put(buffers: Tree, values: Tree, slot):
    return jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, slot, 0), buffers, values)
