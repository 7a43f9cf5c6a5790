"""One executor for every pipeline: it walks a `timetable` inside one shard_map program.

A `lax.scan` goes through the lockstep ticks. In each of them a device

1. takes what a neighbour sent it, `messages[read]`: an activation for F, a gradient for B;
2. runs the cell that the table has for its stage: F, B, W (`stage.programs`), or nothing at all;
3. passes the result one stage on or back, by two ppermutes outside the branches, which every stage calls.

What a cell needs later lies in slots that `timetable.slots` has allocated from what is alive. 1F1B with
p = 2 stages and m = 2 microbatches has six ticks. Each cell of this table says what runs and what it reads,
the slot that F writes or B reads, and where the result goes:

    tick | stage 0                            | stage 1
       0 | F0 of tokens, saved 0, to stage 1  | -
       1 | F1 of tokens, saved 1, to stage 1  | F0 of message 0, saved 0, unsent
       2 | -                                  | B0 of the loss, saved 0, to stage 0
       3 | B0 of message 0, saved 0, unsent   | F1 of message 0, saved 0, unsent
       4 | -                                  | B1 of the loss, saved 0, to stage 0
       5 | B1 of message 0, saved 1, unsent   | -

Each message travels where its tick ends, in a branch that is taken only where a stage sends: else a third
more would be sent. On GPUs the stages wait for it, 43 of 3,571 ms in a step of Llama 3 8B on 64 H100s
(`llmpar compile`, an estimate). To hide it, it would travel through a tick in which no stage reads it, and in
1F1B 45 of 48 are read in the very next tick: 8 microbatches on 4 stages would take 38 ticks, not 22.

The layers of a stage are its share of the blocks' weights, stored `l/pp`; `schedules.layer_order` says which
layer lies where. All other weights are whole on every stage, and their gradients are summed over pp at the
end of the step (`plan.WeightLayouts` says so). Weights that ZeRO-3 stores cut are gathered for each cell, or
before the walk for all of it (`Plan.gathers`). Where a schedule wants two copies of the model (DualPipe), a
stage borrows its opposite's layers for the step, and returns their gradients.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from llmpar.model.llama import Batch, Loss, Stream
from llmpar.model.weights import Tree, weight_dims
from llmpar.parallel.collectives import at, put, scope, vary, varying
from llmpar.parallel.modes import Manual
from llmpar.pipeline.stage import Stage, add, embed, programs, when
from llmpar.plan import schedules
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.schedules import OP_KINDS
from llmpar.plan.timetable import DIRECTIONS, slots, timetable

_cut = lambda x, n: x.reshape(n, -1, *x.shape[1:])  # in n parts, a new leading dim


def gradients(
    config: ModelConfig, par: Manual, params: Tree, batch: Batch, zeros: tuple[Loss, Tree]
) -> tuple[Loss, Tree]:
    """Loss and gradients of this device's part of the batch, inside shard_map. The blocks come in
    `schedules.layer_order`.

    ``params`` vary over the sums of `WeightLayouts.unreduced`, pp among them where a weight is not cut by it.
    All start as ``zeros``; gradients come laid out as `WeightLayouts.accumulated`, loss and tally unfinished
    over pp too.
    """
    (loss, tally), grads = zeros
    sums = {name: g for name, g in grads.items() if name != "blocks"}
    sums |= jax.tree.map(lambda x: vary(x, ("pp",)), {"loss": loss, "tally": tally})
    walk = _Executor(config, par, params, batch, sums)
    chunks = lambda g: jnp.concatenate([_cut(g, walk.schedule.visits)] * walk.copies)
    state = {
        "sums": sums,
        "blocks": {"blocks": jax.tree.map(chunks, grads["blocks"])},
        "saved": _room(walk.slots.num_saved, walk.saved),
        "residual": _room(walk.slots.num_residual, walk.residual),
    }
    messages = _room(walk.slots.num_messages + 1, walk.stream)
    sends = {name: jnp.asarray((walk.slots.send == way).any(1)) for name, way in DIRECTIONS.items()}
    (state, _), _ = lax.scan(walk.tick, (state, messages), (walk.table, sends))
    add_copies = lambda g: g if walk.copies == 1 else g[:1] + walk.opposite(g[1:])
    blocks = jax.tree.map(lambda g: add_copies(g).reshape(-1, *g.shape[2:]), state["blocks"])
    sums = state["sums"]
    return (sums.pop("loss"), sums.pop("tally")), sums | blocks


class _Executor:
    """What a device does in a tick, with its weights, its tokens and its column of the table."""

    def __init__(self, config: ModelConfig, par: Manual, params: Tree, batch: Batch, sums: Tree):
        assert (schedule := par.plan.pipeline)
        self.schedule, self.recomputes = schedule, par.plan.stage_saves == "input"
        self.copies, found = self.schedule.parameter_copies, slots(timetable(self.schedule))
        self.slots = SimpleNamespace(**{name: np.array(rows) for name, rows in vars(found).items()})
        self.batch = jax.tree.map(lambda x: _cut(x, self.schedule.num_microbatches), batch)
        both = lambda w: w if self.copies == 1 else jnp.concatenate([w, self.opposite(w)])
        shared = params | {"blocks": jax.tree.map(both, params["blocks"])}
        if par.plan.gathers == "step":
            shared = jax.tree.map(par.gather, shared, weight_dims(config))
        chunks = functools.partial(_cut, n=self.copies * self.schedule.visits)
        self.chunks = jax.tree.map(chunks, shared.pop("blocks"))
        self.inputs = functools.partial(Stage, config, par, shared=shared)
        table = self.instructions(config.num_layers)
        self.table = {name: jnp.asarray(column)[:, lax.axis_index("pp")] for name, column in table.items()}
        stage = jax.eval_shape(lambda table: self.stage(at(table, 0)), self.table)
        # Typed by the weights alone: where one does not vary over pp, the loop's messages will not fit.
        cell = {name: column[0, 0] for name, column in table.items()}
        self.stream = jax.eval_shape(lambda now: embed(self.stage(now)), cell)
        self.programs, self.saved, self.residual = programs(stage, self.stream, sums)

    def instructions(self, num_layers: int) -> dict[str, np.ndarray]:
        """The table as numbers [tick, stage] by name: the operation, its slots (`timetable.Slots`), and which
        part of the model its chunk is. A slot of -1 is the last one, a message that is never read.
        ``layers`` has a row of numbers in each cell, `num_layers` where the chunk has a layer less."""
        kind, u, chunk = np.moveaxis(np.array(timetable(self.schedule).ticks), 2, 0)
        names = "saved", "residual", "left", "right", "keep", "read"
        found = {name: getattr(self.slots, name) for name in names} | {"kind": kind, "u": u, "chunk": chunk}
        enters, leaves = found["read"] < 0, (self.slots.send == 0) & (found["keep"] < 0)
        found |= {"first": np.where(kind, leaves, enters), "last": np.where(kind, enters, leaves)}
        p, stack = self.schedule.num_stages, schedules.layer_order(self.schedule, num_layers)
        order = np.reshape(stack, (p, self.schedule.visits, -1))
        both = np.concatenate([order, order[::-1]], 1)  # where there are two copies, as `opposite` has them
        layers = both[np.arange(p), chunk]
        return found | {"layers": layers, "full": (layers < num_layers).all(-1)}

    def opposite(self, x: Array) -> Array:
        """What the stage at the same distance from the other end has."""
        p = self.schedule.num_stages
        with scope("l -> the opposite stage"):
            return lax.ppermute(x, "pp", [(i, p - 1 - i) for i in range(p)])

    def stage(self, now: Tree) -> Stage:
        """The inputs of the cell that this device runs now."""
        part = {name: now[name] for name in ("first", "last", "full", "layers")}
        return self.inputs(blocks=at(self.chunks, now["chunk"]), batch=at(self.batch, now["u"]), **part)

    def tick(self, carry: tuple[Tree, Array], instruction: tuple[Tree, Tree]) -> tuple[Any, None]:
        """One cell on every stage, then the messages. A branch per kind: XLA updates the state of a
        conditional with two branches in place, but copies it all through a `lax.switch` with more."""
        (state, messages), (now, is_sent) = carry, instruction
        y = at(messages, now["read"])
        for kind, run in {"F": self.forward, "B": self.backward, "W": self.weights}.items():
            if self.programs[kind]:
                state, y = when(kind, now["kind"] == OP_KINDS.index(kind), run, (state, y), now)
        for name, slot in {"right": "left", "left": "right"}.items():  # sent right, it comes from left
            if (self.slots.send == DIRECTIONS[name]).any():
                messages = put(messages, now[slot], self.send(y, name, is_sent[name]))
        if (self.slots.keep >= 0).any():
            messages = put(messages, now["keep"], y)
        return (state, messages), None

    def send(self, y: Stream, name: str, is_sent: Array) -> Stream:
        """What comes from the neighbour, where stages ever send this way, in ticks in which one does."""
        way, p = DIRECTIONS[name], self.schedule.num_stages
        pairs = [(int(s), int(s + way) % p) for s in np.flatnonzero((self.slots.send == way).any(0))]
        with scope(f"stream b s d -> the {'next' if way == 1 else 'previous'} stage"):
            return when(name, is_sent, lambda y: lax.ppermute(y, "pp", pairs), y)

    def forward(self, carry: tuple[Tree, Stream], now: Tree) -> tuple[Tree, Stream]:
        """F: the message, or the embedded tokens, through the chunk."""
        (state, x), stage = carry, self.stage(now)
        x = when("enters", stage.first, lambda x: embed(stage), x)
        y, saved = self.programs["F"](stage, x)
        return state | {"saved": put(state["saved"], now["saved"], saved)}, y

    def backward(self, carry: tuple[Tree, Stream], now: Tree) -> tuple[Tree, Stream]:
        """B: the gradient of the chunk's input, and of its weights if there is no W."""
        state, dy = carry
        given = at(state["saved"], now["saved"]), dy, state["sums"]
        (dx, sums), rest = self.programs["B"](self.stage(now), *given)
        if not self.schedule.split_backward:
            return self.add_blocks(state | {"sums": sums}, rest, now), dx
        return state | {"sums": sums, "residual": put(state["residual"], now["residual"], rest)}, dx

    def weights(self, carry: tuple[Tree, Stream], now: Tree) -> tuple[Tree, Stream]:
        """W: the gradients of the chunk's weights. It sends nothing."""
        state, x = carry
        kept = [at(state[name], now[name]) for name in ("saved", "residual")[self.recomputes :]]
        return self.add_blocks(state, self.programs["W"](self.stage(now), *kept), now), x

    def add_blocks(self, state: Tree, grads: Tree, now: Tree) -> Tree:
        """The state with the gradients of one chunk's blocks added."""
        sums = add(self.stage(now), at(state["blocks"], now["chunk"]), grads)
        return state | {"blocks": put(state["blocks"], now["chunk"], sums)}


def _room(num_slots: np.ndarray, like: Tree) -> Tree:
    """Slots for values like these, as many as the largest stage has: every stage runs the same program."""
    zeros = lambda x: vary(jnp.zeros((max(num_slots), *x.shape), x.dtype), varying(x))
    return jax.tree.map(zeros, like)
