"""One executor for every pipeline: it runs a schedule, laid out in ticks, inside one
shard_map program.

A `lax.scan` goes through the lockstep ticks. In each of them a device

1. takes what a neighbour sent it, `messages[read]`: an activation for F, a gradient for B;
2. runs the cell that the table has for its stage: F, B, W (`stage.programs`), or nothing at all;
3. passes the result one stage on or back, by two ppermutes outside the branches, which every stage calls.

What a cell needs later is kept in slots that `lockstep.slots` has allocated from what
is alive. 1F1B with p = 2 stages and m = 2 microbatches has six ticks. Each cell of this
table says what runs and what it reads, the slot that F writes or B reads, and where the
result goes:

    tick | stage 0                            | stage 1
       0 | F0 of tokens, saved 0, to stage 1  | -
       1 | F1 of tokens, saved 1, to stage 1  | F0 of message 0, saved 0, unsent
       2 | -                                  | B0 of the loss, saved 0, to stage 0
       3 | B0 of message 0, saved 0, unsent   | F1 of message 0, saved 0, unsent
       4 | -                                  | B1 of the loss, saved 0, to stage 0
       5 | B1 of message 0, saved 1, unsent   | -

Each message travels where its tick ends, in a branch that is taken only where a stage
sends: else a third more would be sent. On GPUs the stages wait for it, 43 of 3,571 ms
in a step of Llama 3 8B on 64 H100s (`llmpar compile`, an estimate). To hide it, it
would travel through a tick in which no stage reads it, and in 1F1B 45 of 48 are read in
the very next tick: 8 microbatches on 4 stages would take 38 ticks, not 22.

The layers of a stage are its share of the blocks' weights, stored `l/pp`;
`places.layer_orders` says which layer is where. All other weights are whole on every
stage, and their gradients are summed over pp at the end of the step
(`plan.WeightLayouts` says so). Weights that ZeRO-3 stores cut are gathered for each
cell, or before the first tick for all of them (`Resolved.gather_per`). Where a schedule
wants two copies of the model (DualPipe), a stage borrows its opposite's layers for the
step, and returns their gradients.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from llmpar.model.llama import Batch, LossAndTally, Stream
from llmpar.model.weights import Tree, weights_tree
from llmpar.parallel.collectives import at, put, scope, vary, zeros_like
from llmpar.parallel.modes import Manual
from llmpar.pipeline.stage import Stage, add, embed, programs, when
from llmpar.plan import places
from llmpar.plan.lockstep import DIRECTIONS, lockstep, slots
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.schedules import OP_KINDS, Schedule

_cut = lambda x, n: x.reshape(n, -1, *x.shape[1:])  # in n parts, a new leading dim


def gradients(
    config: ModelConfig, par: Manual, params: Tree, batch: Batch, zeros: tuple[LossAndTally, Tree]
) -> tuple[LossAndTally, Tree]:
    """Return loss and gradients of this device's part of the batch, inside shard_map. The blocks come in
    `places.layer_orders`.

    ``params`` vary over the sums of `WeightLayouts.unreduced`, pp among them where a weight is not cut by it.
    All start as ``zeros``; gradients come laid out as `WeightLayouts.accumulated`, loss and routers' tally
    unfinished over pp too.
    """
    assert (schedule := par.plan.pipeline)
    (loss, tally), sums = zeros
    sums = sums | jax.tree.map(lambda x: vary(x, ("pp",)), {"loss": loss, "tally": tally})
    run = _run_two_copies if schedule.parameter_copies == 2 else _run
    sums = run(config, par, params, batch, sums)
    return (sums.pop("loss"), sums.pop("tally")), sums


def _run_two_copies(
    config: ModelConfig, par: Manual, params: Tree, batch: Batch, sums: Tree
) -> Tree:
    """As `_run`, with two copies of the model (DualPipe): borrow the layers of the opposite stage, at the
    same distance from the other end, and return their gradients to it."""
    p = par.plan.mesh.pp

    def opposite(x: Array) -> Array:
        with scope("l -> the opposite stage"):
            return lax.ppermute(x, "pp", [(i, p - 1 - i) for i in range(p)])

    params = params | {
        "blocks": jax.tree.map(lambda w: jnp.concatenate([w, opposite(w)]), params["blocks"])
    }
    sums |= {"blocks": jax.tree.map(lambda g: jnp.concatenate([g, g]), sums["blocks"])}
    sums = _run(config, par, params, batch, sums)
    returned = lambda both: both[: len(both) // 2] + opposite(both[len(both) // 2 :])
    return sums | {"blocks": jax.tree.map(returned, sums["blocks"])}


def _run(config: ModelConfig, par: Manual, params: Tree, batch: Batch, sums: Tree) -> Tree:
    """Add loss, tally and gradients of a batch to ``sums``: scan the ticks."""
    assert (schedule := par.plan.pipeline)
    table, alive = _table(schedule, config), slots(lockstep(schedule))
    if par.plan.gather_per == "step":
        dims = weights_tree(config, lambda weight: weight.dims)
        params = jax.tree.map(par.gather, params, dims)
    in_chunks = functools.partial(_cut, n=schedule.visits * schedule.parameter_copies)
    chunks = jax.tree.map(in_chunks, params["blocks"])
    shared = {name: w for name, w in params.items() if name != "blocks"}
    microbatches = jax.tree.map(lambda x: _cut(x, schedule.num_microbatches), batch)

    def stage(now: Tree) -> Stage:
        part = {name: now[name] for name in ("first", "last", "filled", "layers")}
        chunk, microbatch = at(chunks, now["chunk"]), at(microbatches, now["microbatch"])
        return Stage(config, par, blocks=chunk, shared=shared, batch=microbatch, **part)

    cells = {name: jnp.asarray(column)[:, lax.axis_index("pp")] for name, column in table.items()}
    sent = {name: jnp.asarray((table["send"] == step).any(1)) for name, step in DIRECTIONS.items()}
    # The type of a message. It varies over the axes over which weights do, and so over pp.
    stream = jax.eval_shape(lambda: embed(stage({name: x[0, 0] for name, x in table.items()})))
    blocks = sums.pop("blocks")
    parts, saved, residual = programs(
        jax.eval_shape(lambda x: stage(at(x, 0)), cells), stream, sums
    )
    sums = {"shared": sums, "blocks": {"blocks": jax.tree.map(in_chunks, blocks)}}
    # as many slots as the largest stage has: every stage runs one program
    kept = {
        "saved": zeros_like(saved, max(alive.num_saved)),
        "residual": zeros_like(residual, max(alive.num_residual)),
        "nothing": [],
    }
    carry: Tree = sums, kept, zeros_like(stream, max(alive.num_messages) + 1)
    (sums, *_), _ = lax.scan(_Executor(table, stage, parts).tick, carry, (cells, sent))
    return sums["shared"] | jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), sums["blocks"])


def _table(schedule: Schedule, config: ModelConfig) -> dict[str, np.ndarray]:
    """Return a schedule as numbers [tick, stage] by name: the operation (``kind``), its slots and where its
    result goes (`lockstep.Slots`), and which part of the model its chunk is. A slot of -1 is the last one, a
    message that is never read. ``filled`` and ``layers`` have a row in each cell (`stage.Stage`); a place
    without a layer has a number that no layer has."""
    kind, microbatch, chunk = np.moveaxis(np.array(lockstep(schedule).ticks), 2, 0)
    kept = slots(lockstep(schedule))
    names = "saved", "residual", "left", "right", "keep", "read", "send"
    table = {name: np.array(getattr(kept, name)) for name in names}
    enters = table["read"] < 0
    leaves = (table["send"] == 0) & (table["keep"] < 0)
    kinds, positions = config.layer_kinds, np.array(places.positions(schedule))
    on_route = positions[np.arange(schedule.num_stages), chunk]
    filled = np.array([loop.filled for loop in places.chunk_loops(kinds, schedule.cells)])
    has_experts = [bool(block.experts) for _, block in config.blocks]
    routed = [layer for layer, of in enumerate(kinds) if has_experts[of]]
    rank = {layer: number for number, layer in enumerate(routed)}
    own = [place for place in places.chunk_places(kinds, schedule.cells) if has_experts[place.kind]]
    layers = np.array([[rank.get(x, len(rank)) for x in place.layers] for place in own])
    layers = layers.reshape(-1, schedule.cells)
    return table | {
        "first": np.where(kind, leaves, enters),
        "last": np.where(kind, enters, leaves),
        "filled": filled.T[on_route],
        "layers": layers.T[on_route],
        "kind": kind,
        "microbatch": microbatch,
        "chunk": chunk,
    }


@dataclass(frozen=True)
class _Executor:
    """What a device does in a tick. ``stage`` gives the inputs of a cell. A cell takes the sums, what its own
    slot has and the message, and returns them as it leaves them."""

    table: dict[str, np.ndarray]
    stage: Callable[[Tree], Stage]
    programs: dict[str, Callable]

    def tick(self, carry: tuple, instruction: tuple[Tree, Tree]) -> tuple[tuple, None]:
        """Run one cell on every stage, then send the messages. A branch per kind: XLA copies all state
        through a `lax.switch` with more than two. A branch reads slots, and returns what its own slot has
        then: in a branch that updates slots, XLA copies them all."""
        (sums, kept, messages), (now, is_sent) = carry, instruction
        y = at(messages, now["read"])
        cells = {
            "F": (self.forward, "saved"),
            "B": (self.backward, "residual"),
            # W fills no slot: `at` and `put` of an empty tree do nothing, whatever the index
            "W": (self.weights, "nothing"),
        }
        for kind in self.programs:
            run, fills = cells[kind]
            state = sums, at(kept[fills], now.get(fills)), y
            sums, new, y = when(kind, now["kind"] == OP_KINDS.index(kind), run, state, kept, now)
            kept = kept | {fills: put(kept[fills], now.get(fills), new)}
        # sent right, it comes from left
        for name, slot in (("right", "left"), ("left", "right")):
            if (self.table["send"] == DIRECTIONS[name]).any():
                messages = put(messages, now[slot], self.send(y, name, is_sent[name]))
        if (self.table["keep"] >= 0).any():
            messages = put(messages, now["keep"], y)
        return (sums, kept, messages), None

    def send(self, y: Stream, name: str, is_sent: Array) -> Stream:
        """Return what comes from the neighbour, in ticks in which a stage sends in this direction."""
        step, p = DIRECTIONS[name], self.table["send"].shape[1]
        pairs = [
            (int(s), int(s + step) % p) for s in np.flatnonzero((self.table["send"] == step).any(0))
        ]
        with scope(f"stream b s d -> the {'next' if step == 1 else 'previous'} stage"):
            return when(name, is_sent, lambda y: lax.ppermute(y, "pp", pairs), y)

    def forward(self, state: tuple, kept: Tree, now: Tree) -> tuple:
        """F: the message, or the embedded tokens, through the chunk."""
        (sums, _, x), stage = state, self.stage(now)
        x = when("enters", stage.first, lambda x: embed(stage), x)
        y, saved = self.programs["F"](stage, x)
        return sums, saved, y

    def backward(self, state: tuple, kept: Tree, now: Tree) -> tuple:
        """B: the gradient of the chunk's input, and of its weights if there is no W."""
        (sums, new, dy), saved = state, at(kept["saved"], now["saved"])
        (dx, shared), rest = self.programs["B"](self.stage(now), saved, dy, sums["shared"])
        sums = sums | {"shared": shared}
        is_split = "W" in self.programs
        return (sums, rest, dx) if is_split else (self.add_blocks(sums, rest, now), new, dx)

    def weights(self, state: tuple, kept: Tree, now: Tree) -> tuple:
        """W: the gradients of the chunk's weights. It sends nothing."""
        (sums, new, x), stage = state, self.stage(now)
        names = ("residual",) if stage.par.plan.stage_saves == "input" else ("saved", "residual")
        read = [at(kept[name], now[name]) for name in names]
        return self.add_blocks(sums, self.programs["W"](stage, *read), now), new, x

    def add_blocks(self, sums: Tree, grads: Tree, now: Tree) -> Tree:
        """Return the sums with the gradients of one chunk's blocks added."""
        chunk = add(self.stage(now), at(sums["blocks"], now["chunk"]), grads)
        return sums | {"blocks": put(sums["blocks"], now["chunk"], chunk)}
