"""Long sequences: what is held, documents that do not leak; and balanced order of packed documents."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from parity import LLAMA, dealt, name, weights

from llmpar import Plan, Step
from llmpar.inspect.census import compiled_memory
from llmpar.model import attention
from llmpar.model.weights import model_graph
from llmpar.parallel.mesh import make_mesh, spec
from llmpar.parallel.modes import Manual
from llmpar.plan.sequence_order import sequence_permutation
from llmpar.predict.ring import pairs_by_step
from llmpar.training import balance
from llmpar.training.balance import balanced_order, work


@pytest.mark.long
def test_chunks_of_a_feed_forward_take_less_memory():
    """Three arrays of b·s·m and their gradients, a chunk at a time, of all layers."""
    wide = dataclasses.replace(LLAMA, ffn_width=16 * LLAMA.width)
    plans = [Plan("dp=1", ffn_chunks=chunks) for chunks in (1, 4)]
    steps = [Step(wide, plan, make_mesh(plan.mesh), optax.sgd(1e-3)) for plan in plans]
    programs = [step.lower(8, 256).compile() for step in steps]
    whole, pieces = (compiled_memory(program)["temp_bytes"] for program in programs)
    one = 8 * 256 * wide.ffn_width * 4  # an array of b·s·m
    assert whole - pieces >= 0.75 * (2 + 3 * wide.num_layers) * one


def test_the_model_never_asks_a_ring_for_a_tile_that_joins_zigzags_two_parts(monkeypatch):
    """A tile as long as a rank's positions would make every block live: no causal work would be saved."""
    length, asked = attention.tile_length, []
    monkeypatch.setattr(attention, "tile_length", lambda block, s: asked.append(block) or length(block, s))
    for block in (16, 64):
        plan = Plan("sp=4", sequence_order="zigzag", attention_block=block)
        step = Step(LLAMA, plan, make_mesh(plan.mesh), optax.adamw(1e-3))
        step.run.trace(step.abstract_state, step.abstract_batch(4, 256))  # 64 positions a rank
    assert set(asked) == {16, None}
    joined, apart = (np.sum(pairs_by_step(4, "zigzag", s=256, block=tile)) for tile in (64, 32))
    assert apart < 0.7 * joined


PROBED = [
    Plan("sp=4 fsdp=2"),
    Plan("sp=4 tp=2", context_parallel="ulysses", sequence_order="striped"),
    Plan("sp=2 tp=2", sequence_order="balanced", context_parallel="gather", tp_sequence=True),
]


@pytest.mark.parametrize("plan", PROBED, ids=name)
def test_a_token_changes_its_own_document_and_no_other(plan):
    """Of two equal documents in a row one begins otherwise: exactly half of the losses change."""
    rows, half = 4, 16
    rng = np.random.default_rng(5)
    tokens = np.tile(rng.integers(0, 256, (rows, half + 1)).astype(np.int32), 2).reshape(rows, 2, half + 1)
    known = {"tokens": tokens[..., :-1], "targets": tokens[..., 1:]}
    places = np.arange(2 * half, dtype=np.int32).reshape(1, 2, half)
    known |= {"positions": places % half, "segments": 1 + places // half}
    known = {k: np.array(np.broadcast_to(x, (rows, 2, half)).reshape(rows, -1)) for k, x in known.items()}
    changed = {**known, "tokens": known["tokens"].copy()}
    changed["tokens"][:, 0] = (changed["tokens"][:, 0] + 1) % 256

    step = Step(LLAMA, plan, make_mesh(plan.mesh), optax.sgd(0.1))
    orders = balance.row_orders(plan.sequence_order, known["segments"], plan.mesh.sp)
    data = spec(step.plan.place("data b s"))
    losses = lambda params, batch: nnx.merge(model_graph(LLAMA), params).cross_entropies(batch, mode)[0]
    mode = Manual(step.plan)
    given = jax.tree.map(spec, step.stored), data
    run = jax.jit(jax.shard_map(losses, mesh=step.mesh, in_specs=given, out_specs=data))
    params = jax.device_put(weights(LLAMA), step.shardings.params)
    given = [jax.device_put(dealt(batch, plan), step.batch_sharding) for batch in (known, changed)]
    found = [np.asarray(run(params, batch)) for batch in given]
    differ = np.take_along_axis(found[0] != found[1], np.argsort(orders, 1), 1)
    assert differ.mean() == 0.5 and differ[:, :half].all()


def row(lengths):
    return np.repeat(np.arange(1, len(lengths) + 1), lengths)


def busiest(order, segments, n, window=None):
    """The work of the busiest rank."""
    return work(segments, window)[order].reshape(n, -1).sum(1).max()


def naive_work(segments):
    s = np.arange(len(segments))
    return ((segments[:, None] == segments[None]) & (s[:, None] >= s[None])).sum(1)


def fill(rng, draw, s):
    """Documents drawn until the row is full; the last is cut."""
    lengths = []
    while sum(lengths) < s:
        lengths.append(min(max(1, int(draw(rng))), s - sum(lengths)))
    return row(lengths)


DRAWS = {  # documents as in pretraining corpora
    "log-normal, median 3,000": lambda rng: rng.lognormal(8, 1.2),
    "Pareto, a few very long": lambda rng: 100 * (1 + rng.pareto(1.1)),
    "one long among short": lambda rng: 6000 if rng.random() < 0.02 else rng.integers(5, 60),
}
ADVERSARIAL = [1] * 64, [64], [63, 1], [1, 63], [32, 32], [31, 23, 7, 3], [3] * 20 + [4], [7] * 9 + [1]
ADVERSARIAL += ([20, 15, 10, 8, 5, 3, 2, 1],)


def rows_of_any_kind():
    """Segments, ranks and a window: adverse lengths, real ones, and a thousand random rows."""
    yield from ((row(lengths), n, None) for lengths in ADVERSARIAL for n in (1, 2, 4, 8, 16, 32))
    rng = np.random.default_rng(0)
    yield from ((fill(rng, draw, s), n, None) for draw in DRAWS.values() for s, n in ((4096, 4), (8192, 16)))
    for _ in range(1000):
        n = int(rng.choice([2, 3, 4, 6, 8]))
        s = 2 * n * int(rng.integers(1, 40))
        segments = fill(rng, lambda rng, s=s: rng.integers(1, rng.integers(2, s + 2)), s)
        yield segments, n, None if rng.random() < 0.7 else int(rng.integers(1, s))


def test_whatever_the_lengths_it_is_never_worse_than_zigzag_and_near_the_mean():
    for segments, n, window in rows_of_any_kind():
        order, s = balanced_order(segments, n, window), len(segments)
        assert np.array_equal(np.sort(order), np.arange(s))
        assert np.all(np.diff(order.reshape(n, -1), axis=1) > 0), "a rank's positions rise"
        most = busiest(order, segments, n, window)
        if s % (2 * n) == 0:
            assert most <= busiest(sequence_permutation("zigzag", s, n), segments, n, window)
        if not window:
            np.testing.assert_array_equal(work(segments), naive_work(segments))
            assert most <= work(segments).sum() / n + 2 * n
