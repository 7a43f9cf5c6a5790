"""Every timetable runs: what is computed, what is held, where layers lie, and the tables that are refused."""

import contextlib
import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import schedule_free
from parity import BATCH, LLAMA, SEQ, family, state_of, weights

from llmpar import Plan, Step, make_mesh
from llmpar.pipeline import executor as pipeline
from llmpar.pipeline import stage as stage_file
from llmpar.plan import places
from llmpar.training import layer_order as layer_order_file

DEEP = dataclasses.replace(LLAMA, num_layers=4)


def piped(mesh, schedule, **fields):
    """A plan by the schedule's name, microbatches, and what else it says."""
    name, m, *chunks = schedule.split()
    fields |= {"virtual_stages": int(chunks[0])} if chunks else {}
    return Plan(mesh, schedule=name, microbatches=int(m), **fields)


def step_of(config, plan):
    return Step(config, plan, make_mesh(plan.mesh), optax.sgd(1.0))


def trace(config, plan, rows=BATCH, seq=SEQ):
    """The traced gradients of a step, nothing compiled."""
    step = step_of(config, plan)
    return jax.jit(step.gradients).trace(step.abstract_state.params, step.abstract_batch(rows, seq))


def program_flops(schedule, saves="input"):
    """The FLOPs of the programs F, B and W of a pipeline of four stages and eight microbatches."""
    counts = {}

    def counted(stage, x, sums):
        made, saved, residual = stage_file.programs(stage, x, sums)
        kept = [saved, residual][saves == "input" :]
        args = {"F": [x], "B": [saved, x, sums], "W": kept}
        for kind, given in args.items():
            run = made.get(kind)
            counts[kind] = flops(jax.make_jaxpr(run)(stage, *given).jaxpr) if run else 0
        return made, saved, residual

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "programs", counted)
        trace(DEEP, piped("pp=4", f"{schedule} 8", stage_saves=saves))
    return counts


def inner(eqn):
    return [x for x in jax.tree.leaves(eqn.params) if hasattr(x, "eqns")]


def flops(jaxpr):
    """FLOPs of the matrix products, loops multiplied, of branches the dearest."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * eqn.outvars[0].aval.size * int(np.prod([shape[i] for i in contracted]))
        elif subs := [flops(sub) for sub in inner(eqn)]:
            total += max(subs) if eqn.primitive.name == "cond" else sum(subs) * eqn.params.get("length", 1)
    return total


def test_w_is_the_weights_products_and_nothing_runs_twice():
    """B recomputes F, and B and W together are the joint backward; residuals recompute nothing."""
    whole, zero_bubble = program_flops("1f1b"), program_flops("zb-h1")
    saved, both = program_flops("1f1b", "residuals"), program_flops("zb-h1", "residuals")
    joint = whole["B"]
    layer = sum(int(np.prod(w.shape[1:])) for w in DEEP.weights().values() if len(w.shape) > 2)
    assert zero_bubble["W"] == 2 * BATCH // 8 * SEQ * layer == both["W"]
    assert zero_bubble["B"] + zero_bubble["W"] == joint
    assert saved["F"] + saved["B"] == joint and saved["W"] == 0
    assert both["F"] + both["B"] + both["W"] == joint


def test_places_have_the_layers_of_every_chunk_in_order():
    """DeepSeek's dense layer leads; of any order no chunk lacks a layer, and few places are empty."""
    assert [*places.chunk_places((0, 1, 1, 1, 1, 1, 1, 1), 2)] == [
        places.LayerPlace(0, (0, -1)),
        *(places.LayerPlace(1, (1 + i, 4 + i)) for i in range(3)),
        places.LayerPlace(1, (-1, 7)),
    ]
    rng = random.Random(2)
    for _ in range(200):
        kinds = tuple(rng.choices(range(3), k=rng.randrange(1, 30)))
        chunks = rng.randrange(1, len(kinds) + 1)
        table, loops = places.chunk_places(kinds, chunks), places.chunk_loops(kinds, chunks)
        rows = [[(place.kind, place.layers[i]) for place in table] for i in range(chunks)]
        filled = [[(kind, layer) for kind, layer in row if layer >= 0] for row in rows]
        assert sum(filled, []) == [(kind, layer) for layer, kind in enumerate(kinds)]
        assert max(map(len, filled)) <= len(table) <= sum(map(len, filled))
        written = [(kind, loop.filled) for loop in loops for kind in loop.kinds * loop.times]
        assert written == [(place.kind, tuple(x >= 0 for x in place.layers)) for place in table]


@pytest.mark.long
def test_a_state_of_several_kinds_begins_alike_on_stages_and_comes_back():
    """Each of two stages has an empty place. A checkpoint has the order of the model."""
    config = dataclasses.replace(family("deepseek_v3"), num_layers=4)
    plans = piped("pp=2 ep=2", "1f1b 4"), Plan("fsdp=2 tp=2")
    step, other = (Step(config, plan, make_mesh(plan.mesh), optax.adamw(1.0)) for plan in plans)
    assert [order.tolist() for order in step.layer_orders] == [[0, 1], [0, 3, 1, 2]]
    natural, there = step.to_model_order(step.init(0)), other.init(0)
    jax.tree.map(np.testing.assert_array_equal, natural, there)
    before = jax.tree.map(np.asarray, natural)
    back = step.to_model_order(step.from_model_order(natural))
    jax.tree.map(np.testing.assert_array_equal, back, before)


def test_a_state_dealt_to_stages_comes_back_in_order():
    """Layers are found by shape in any optimizer; a seed gives the same weights on any mesh."""
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=16)
    plan, order = piped("pp=2", "interleaved 4"), [0, 2, 1, 3]
    step, one = (Step(DEEP, p, make_mesh(p.mesh), optimizer) for p in (plan, Plan()))
    fresh = jax.tree.map(np.asarray, one.init(0))
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)  # rounding by another program
    jax.tree.map(near, jax.tree.map(np.asarray, step.to_model_order(step.init(0))), fresh)

    def mark(x):  # every layer's moments become its number
        stacked = x.ndim and x.shape[0] == 4
        return x + np.arange(4).reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype) if stacked else x

    marked = jax.tree.map(mark, fresh)
    dealt = step.from_model_order(jax.device_put(marked, step.shardings))
    for leaf, before in zip(jax.tree.leaves(dealt), jax.tree.leaves(marked), strict=True):
        np.testing.assert_array_equal(leaf, before[order] if before.ndim and before.shape[0] == 4 else before)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, step.to_model_order(dealt)), marked)


def test_a_state_changes_order_leaf_by_leaf_and_there_are_never_two(monkeypatch):
    """What is alive while layers move: the state, and one leaf more."""
    plan = piped("pp=2 fsdp=2", "1f1b 4")
    step = Step(dataclasses.replace(LLAMA, num_layers=3), plan, make_mesh(plan.mesh), optax.adamw(1.0))
    state, made, alive = state_of(step), [], []
    leaves, deal = jax.tree.leaves(state), layer_order_file.take_layers
    size = lambda arrays: sum(x.addressable_shards[0].data.nbytes for x in arrays if not x.is_deleted())

    def dealt(*args):
        made.append(deal(*args))
        alive.append(size(leaves) + size(made))
        return made[-1]

    held, largest = size(leaves), max(size([x]) for x in leaves)
    monkeypatch.setattr(layer_order_file, "take_layers", dealt)
    natural = step.to_model_order(state, donate=True)
    assert len(made) == 3 * len(jax.tree.leaves(state.params["blocks"])) and max(alive) <= held + largest
    assert size(jax.tree.leaves(natural)) <= held
    step.from_model_order(natural, donate=True)
    assert all(x.is_deleted() for x in made[: len(made) // 2])


def test_a_state_begins_with_given_weights_in_the_models_order():
    """Three layers on two stages, whose places are four. Schedule-free SGD keeps a copy of the weights."""
    plan = piped("pp=2 fsdp=2", "1f1b 4")
    config = dataclasses.replace(LLAMA, num_layers=3)
    free = schedule_free(optax.sgd(0.1), learning_rate=0.1)
    step, given = Step(config, plan, make_mesh(plan.mesh), free), weights(config)
    equal = functools.partial(jax.tree.map, np.testing.assert_array_equal)
    one = jax.tree.map(jnp.asarray, given)  # on another sharding: copied
    natural = step.to_model_order(step.init(0, one))
    equal(natural.params, given)
    equal(natural.optimizer.z, given)
    equal(one, given)
    taken = jax.device_put(given, jax.tree.map(lambda x: x.sharding, step.abstract_in_model_order.params))
    equal(step.to_model_order(step.init(0, taken)).params, given)
    assert all(x.is_deleted() for x in jax.tree.leaves(taken)), "there were two"
    part, fresh = {"blocks": {"ffn": given["blocks"]["ffn"]}}, step.to_model_order(step.init(0)).params
    found = step.to_model_order(step.init(0, part)).params
    equal(found, fresh | {"blocks": fresh["blocks"] | part["blocks"]})
    for wrong, said in (
        ({"gates": given["norm"]}, "no weight 'gates.scale'; it has .*embedding"),
        ({"head": given["head"][:9]}, r"'head' of shape \[9, 64\] \(float32\) is no weight"),
        ({"head": given["head"].astype(np.int8)}, "int8"),
    ):
        with pytest.raises(ValueError, match=said):
            step.init(0, wrong)


@pytest.mark.parametrize("optimizer, counts", [(optax.adafactor, True), (optax.lamb, False)])
def test_an_optimizer_that_would_count_the_empty_places_of_a_stack_is_refused(optimizer, counts):
    """Adafactor's root mean square is over the whole stack: weights moved 13 % otherwise."""
    three, plan = dataclasses.replace(LLAMA, num_layers=3), Plan("pp=2", microbatches=2)
    said = "3 layers leave 1 of the pipeline's places empty.*use 4 layers, or AdamW"
    with pytest.raises(ValueError, match=said) if counts else contextlib.nullcontext():
        Step(three, plan, make_mesh(plan.mesh), optimizer(1e-3))
