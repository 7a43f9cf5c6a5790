"""Experts: who goes where, what it costs, and that many devices give what all experts give densely."""

import dataclasses
import functools
import itertools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import plans
import pytest
from parity import BATCH, MOE, SEQ, assert_same, by_arrow, check, name, predicted, ragged_on_cpus, spread
from plans import DEEPSEEK
from shared import CASES

from llmpar import Plan, Step, make_mesh
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.kernels import grouped
from llmpar.model import moe
from llmpar.parallel.modes import Manual, Solo
from llmpar.plan.model_config import ExpertConfig
from llmpar.predict.traffic import full_share, step_traffic

HERE = Solo()


CONVENTIONS = {
    "not renormalised": ExpertConfig(8, 3, renormalise=False, z_loss=0.01),
    "deepseek": DEEPSEEK,
    "all of them": ExpertConfig(4, 4, aux_loss=0.01),
    "capacity": ExpertConfig(8, 2, aux_loss=0.01, z_loss=0.001, capacity_factor=1.1),
}


def layer(how, tokens=(3, 7), d=8, m=12, seed=0, skew=0.0):
    """Random inputs of a layer: x, router, bias, gate, up, down. ``skew`` prefers the first experts."""
    draw = np.random.default_rng(seed)
    shapes = dict(
        x=(*tokens, d),
        router=(d, how.num_experts),
        gate=(how.num_experts, d, m),
        up=(how.num_experts, d, m),
        down=(how.num_experts, m, d),
    )
    values = {k: draw.standard_normal(shape).astype(np.float32) for k, shape in shapes.items()}
    values["bias"] = draw.normal(0, 0.3, how.num_experts).astype(np.float32)
    values["x"][..., 0] = 1
    values["router"][0] -= skew * np.arange(how.num_experts, dtype=np.float32)
    return values


def run(how, values):
    """Output and aux of a layer on one device."""
    logits = values["x"] @ values["router"]
    weights, chosen, aux = moe.route(how, HERE, logits, values["bias"] if how.bias_rate is not None else None)
    matrices = (values[name] for name in ("gate", "up", "down"))
    y = moe.visit_experts(how, HERE, values["x"], weights, chosen, *matrices)
    return y, aux["loss"], aux["tally"]


def in_float64(how, values):
    """The layer of `oracle`, without its shared experts: output, loss of each token, tally."""
    how, x = dataclasses.replace(how, num_shared=0), values["x"]
    weights = {f"experts.{k}": w for k, w in values.items()}
    config = dataclasses.replace(MOE, experts=how)
    y, loss, told = oracle.experts(x, weights, config, np.zeros(x.shape[1], int))
    tally = jnp.stack([*told["load"], told["dropped"], told["router_entropy"]])
    return y, jnp.broadcast_to(loss, x.shape[:2]), tally


@functools.partial(jax.jit, static_argnums=(0, 1))
def with_gradients(layer, how, values):
    """What a layer gives, and the gradients of all that it reads: one program for any routing."""

    def loss(values):
        y, loss, tally = layer(how, values)
        return (y**2).sum() + loss.sum(), (y, loss, tally)

    grads, given = jax.grad(loss, has_aux=True)(values)
    return *given, grads


def expected(how, values):
    with oracle.in_float64():
        given = {k: np.asarray(x, np.float64) for k, x in values.items()}
        return jax.tree.map(np.asarray, with_gradients(in_float64, how, given))


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_layer_is_what_the_oracle_computes(convention):
    """Whoever the router prefers. The bias takes part in choosing alone."""
    how = CONVENTIONS[convention]
    for skew in (0.0, 0.3, 1.0):
        values = layer(how, skew=skew)
        y, loss, tally, grads = with_gradients(run, how, values)
        want_y, want_loss, want_tally, want = expected(how, values)
        np.testing.assert_allclose(y, want_y, atol=2e-5 * np.abs(want_y).max())
        np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
        np.testing.assert_allclose(tally, want_tally, rtol=1e-5)
        for key in values:
            assert np.abs(grads[key] - want[key]).max() <= 2e-5 * np.abs(want[key]).max(), key
        assert not grads["bias"].any()
    assert how.capacity_factor is None or 0 < want_tally[-2] < 3 * 7 * 2


def test_the_rows_of_a_token_are_weighed_and_added_in_float32():
    """Experts without weights: what each gives times the sum of the token's weights, rounded once."""
    how = ExpertConfig(8, 3, renormalise=False)
    values = layer(how, (4, 32))
    x = jnp.asarray(values["x"], jnp.bfloat16)
    weights, chosen, _ = jax.jit(functools.partial(moe.route, how, HERE))(values["x"] @ values["router"])
    chosen = jnp.arange(chosen.size).reshape(chosen.shape) % 8
    with mock.patch.object(grouped, "dot", lambda pair, **_: pair[0]):
        visit = jax.jit(functools.partial(moe.visit_experts, how, HERE))
        y = visit(x, weights, chosen, *(values[n] for n in ("gate", "up", "down")))
    one = np.asarray(jax.jit(lambda x: jax.nn.silu(x) * x)(x), np.float64)
    want = (one * np.asarray(weights, np.float64).sum(-1, keepdims=True)).astype(jnp.bfloat16)
    # the sums in float32 round otherwise once in 2^16
    assert y.dtype == jnp.bfloat16 and (y == want).mean() > 0.99


def test_slots_and_blocks_hold_the_worst_case_and_little_more():
    """From tokens that like the first experts, one rank sends and the first one lays out."""
    cases = itertools.product((1, 5, 64, 1000), (4, 8), (1, 2, 4), (1, 2, 4), ((None, 1), (1.1, 1), (1.1, 4)))
    for tokens, num, k, ranks, (factor, pieces) in cases:
        if tokens % pieces:
            continue
        experts, here = ExpertConfig(num, k, capacity_factor=factor), num // ranks
        slots, draw = experts.slots(tokens, pieces, ranks), np.random.default_rng(0)
        how, rows = grouped.arrange(experts, tokens, pieces, ranks), ranks * tokens
        for skew in (0, 1, 3, 30):
            skewed = draw.random((ranks, tokens, num)) + skew * np.linspace(1, 0, num)
            chosen = np.argsort(-skewed, axis=2)[..., :k]
            counts = np.bincount(chosen.ravel(), minlength=num)[:here]
            if factor is None:
                assert max((chosen // here == rank).any(2).sum(1).max() for rank in range(ranks)) <= slots
            counts = np.minimum(counts, ranks * experts.expert_tokens(tokens, pieces))
            more = np.maximum(-(-counts // how.block) - how.own, 0).sum()
            assert here * how.own + more <= how.num_blocks
        most = max(here * how.own, 1) * how.block + rows * min(k, here) + (here + how.first) * how.block
        assert how.num_blocks * how.block <= most
        assert slots <= tokens and how.own in range(4) and (rows * k >= num or not how.own)


def test_an_empty_slot_is_of_no_expert_of_its_rank():
    """Of few tokens: the number of slots, too, is the number of an expert of a later rank."""
    experts, plan = ExpertConfig(8, 2), Plan("ep=4").resolve(MOE, "cpu")

    def arrived(x, weights, chosen):
        (hop,) = moe.exchanges(experts, par := Manual(plan), len(x), len(x))
        return moe.dispatch_tokens(par, hop._replace(num_slots=1), x, weights, chosen)[2]

    mesh, cut = make_mesh("ep=4"), jax.P("ep")
    run = jax.jit(jax.shard_map(arrived, mesh=mesh, in_specs=cut, out_specs=cut))
    expert = run(jnp.ones((4, 8)), jnp.ones((4, 2)), jnp.tile(jnp.array([0, 1]), (4, 1)))
    assert expert.reshape(4, 4, 2).tolist() == [[[0, 1]] * 4] + [[[2, 2]] * 4] * 3


def test_the_share_of_slots_that_an_even_routing_fills():
    """Against draws of 8 of 128 experts on 8 ranks."""
    how, draw = ExpertConfig(128, 8), np.random.default_rng(0)
    chosen = np.argsort(draw.random((20_000, 128)), axis=1)[:, :8] // 16
    assert full_share(how, 1024, 8) == pytest.approx((chosen == 3).any(1).mean(), abs=0.01)


def executed(how, tokens, chosen=None, d=16, m=32):
    """Products for each visit that a layer and its gradient execute: one that is used calls the counter."""
    values, flops, one = layer(how, (1, tokens), d, m), [], jax.ShapeDtypeStruct((), jnp.float32)

    def counted(f, size):
        def counting(*args, **named):
            def count(_):
                flops.append(2 * size(*args))
                return np.float32(1)

            here = jax.tree.leaves(args)[0][0, 0]  # so that no compiler takes the call out of a loop
            return f(*args, **named) * jax.pure_callback(count, one, here)

        return counting

    dot_size = lambda *pairs: sum(rows.shape[0] * math.prod(w.shape[-2:]) for rows, w in pairs)
    outer_size = lambda a, b: math.prod(a.shape) * b.shape[1]
    weights, drawn, _ = jax.jit(functools.partial(moe.route, how, HERE))(values["x"] @ values["router"])
    chosen = drawn if chosen is None else jnp.asarray(chosen)
    with (
        mock.patch.object(grouped, "dot", counted(grouped.dot, dot_size)),
        mock.patch.object(grouped, "outer", counted(grouped.outer, outer_size)),
    ):
        visit = lambda x, *ws: (moe.visit_experts(how, Solo(), x, weights, chosen, *ws) ** 2).sum()
        given = (values[name] for name in ("x", "gate", "up", "down"))
        jax.block_until_ready(jax.jit(jax.grad(visit, argnums=(0, 1, 2, 3)))(*given))
    return sum(flops) / (2 * tokens * how.top_k * d * m)


@pytest.mark.long
def test_executed_products_are_near_k_of_e_of_all_experts():
    """64 experts, k = 8: 9 products, an eighth more if all get as many rows; more of an untrained router."""
    how, even = ExpertConfig(64, 8), np.arange(2048 * 8).reshape(1, 2048, 8) % 64
    assert executed(how, 2048, even) == 9 * 9 / 8
    assert 9 <= executed(how, 2048) <= 1.6 * 9


def temporary_bytes(tokens, num_layers):
    how = ExpertConfig(16, 4)
    values = layer(how, (1, tokens), 32, 32)
    x = values.pop("x")
    layers = {name: np.broadcast_to(z, (num_layers, *z.shape)) for name, z in values.items()}

    def loss(x, layers):
        run_layer = lambda x, layer: (x + run(how, layer | {"x": x})[0], None)
        return (jax.lax.scan(run_layer, x, layers)[0] ** 2).sum()

    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, layers).compile()
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.long
def test_memory_is_linear_in_the_tokens_and_of_a_layers_slots_two_products_are_held():
    """Nothing is tokens × tokens or tokens × experts × width. A layer more adds its rows, a quarter of an
    array of visits, and its products with gate and up, nine eighths each: no array of slots besides."""
    three, six, many = temporary_bytes(1024, 3), temporary_bytes(1024, 6), temporary_bytes(2048, 3)
    assert many < 2.5 * three
    array = 1024 * 4 * 32 * 4
    assert 2.5 < (six - three) / 3 / array < 3.5


def with_experts(**changes):
    return dataclasses.replace(MOE, experts=dataclasses.replace(MOE.experts, **changes))


@pytest.mark.long
@pytest.mark.parametrize("fields", ({}, {"expert_copies": 2}, {"mesh": "ep=8", "ep_node": 4}), ids=str)
def test_drops_are_those_of_one_device_where_no_row_is_cut(fields):
    assert_same(with_experts(capacity_factor=0.5), Plan(**{"mesh": "fsdp=2 ep=2 tp=2"} | fields))


@pytest.mark.long
def test_drops_are_the_same_whoever_of_tp_sends():
    config, whole = with_experts(capacity_factor=0.5), Plan("fsdp=2 ep=2 tp=2", tp_sequence=True)
    want, got = spread(config, whole), spread(config, dataclasses.replace(whole, tp_dispatch=True))
    for one, other in zip(*map(jax.tree.leaves, (want, got)), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5 * np.abs(one).max())


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    (
        Plan("ep=4 fsdp=2"),
        Plan("ep=4 tp=2", tp_sequence=True, tp_dispatch=True),
        Plan("ep=4 fsdp=2", ep_node=2),
    ),
    ids=name,
)
def test_only_full_slots_travel_where_xla_can(plan):
    """The offsets and sizes that it is given, on an emulation: XLA for CPUs lacks the collective."""
    nothing = lambda x: jnp.full_like(x, jnp.nan)  # what is not sent is not read
    with ragged_on_cpus(), mock.patch("llmpar.parallel.collectives.unwritten", nothing):
        assert_same(MOE, dataclasses.replace(plan, dispatch="ragged"))


def test_the_ragged_all_to_all_is_predicted_as_the_most_it_can_be_and_lowered_for_a_gpu():
    plan = Plan("ep=4 fsdp=2", dispatch="ragged")
    with ragged_on_cpus(jax.lax.ragged_all_to_all):
        step = Step(MOE, plan, make_mesh(plan.mesh), optax.adamw(1e-3))
        ragged = predicted(MOE, plan)
        traced = step.run.trace(step.abstract_state, step.abstract_batch(BATCH, SEQ))
    assert by_arrow(census_jaxpr(traced.jaxpr, plan.mesh.sizes)) == ragged
    rename = {"all-to-all": "ragged-all-to-all"}  # nothing else is sent: offsets follow from the choices
    padded = predicted(MOE, Plan("ep=4 fsdp=2")).items()
    assert ragged == {(axes, rename.get(kind, kind), arrow): row for (axes, kind, arrow), row in padded}
    assert "ragged_all_to_all" in traced.lower(lowering_platforms=("cuda",)).as_text()


@functools.partial(jax.jit, static_argnums=0)
def output_and_gradients(how, expert_rk, x, shares, weights, grad):
    """Of experts laid out like this, or densely (``None``): one program for any routing."""
    num = len(weights[0])

    def dense(x, shares, gate, up, down):
        each = [(jax.nn.silu(x @ gate[i]) * (x @ up[i])) @ down[i] for i in range(num)]
        return jnp.einsum("lrd,rkl,rk->rd", jnp.stack(each), jax.nn.one_hot(expert_rk, num), shares)

    def ours(x, shares, *weights):
        return grouped.feed_forward(how, x, shares, weights, grouped.lay_out(how, expert_rk, num))

    y, pull = jax.vjp(ours if how else dense, x, shares, *weights)
    return [y, *pull(grad)]


WAYS = (2, 8, 1, False), (2, 8, 4, True), (0, 1, 1, True), (0, 3, 3, False)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_layout_gives_the_same_output_and_gradients(way):
    """Also part by part, and with the weights' gradients in a loop of their own."""
    draw, (r, k, num, d, m) = np.random.default_rng(0), (90, 3, 4, 16, 32)
    even = np.argsort(draw.random((r, num)), axis=1)[:, :k]
    all_to_one = np.where(np.arange(k) == 0, 2, num)[None].repeat(r, 0)
    half_to_nobody = np.where(draw.random((r, k)) < 0.5, num, even)
    shapes = (r, d), (r, k), (num, d, m), (num, d, m), (num, m, d), (r, d)
    x, shares, *weights, grad = (draw.standard_normal(s).astype(np.float32) for s in shapes)
    for expert_rk in (even, all_to_one, half_to_nobody):
        given = expert_rk, x, shares, tuple(weights), grad
        results = (output_and_gradients(how, *given) for how in (grouped.BlockSizes(24, 16, *way), None))
        for got, want in zip(*results, strict=True):
            assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("line", plans.by_mark(CASES["experts_sent"]))
def test_two_hops_own_tokens_of_tp_and_copies_give_one_devices_answer(line):
    """Over ep, to the byte: each rank of tp sends its own part; two hops send a buffer for each node."""
    config, plan = plans.build(line)
    check(config, plan, 2.5)
    both = plan, dataclasses.replace(plan, tp_dispatch=False, ep_node=1)
    traffic = (step_traffic(each.resolve(config), BATCH, SEQ) for each in both)
    sent, plain = (rows["ep", "all-to-all"].bytes_sent for rows in traffic)
    parts, ranks, near = (plan.mesh.tp if plan.tp_dispatch else 1), plan.mesh.ep, plan.ep_node
    assert near * parts * sent * (ranks - 1) == plain * (ranks - near)


def test_the_experts_that_most_tokens_of_all_ranks_chose_are_copied_and_their_tokens_stay():
    """Rank r has experts 2r and 2r + 1. All but one rank prefer 5; 2 is second, by one token."""
    chosen = np.array([[5, 2], [5, 2], [5, 2], [2, 0], [5, 7], [5, 1], [3, 2], [7, 0]])
    matrix, plan = np.arange(8.0, dtype=np.float32)[:, None, None], Plan("ep=4", expert_copies=2)
    copy = lambda chosen, w: moe.copy_hot(ExpertConfig(8, 2), Manual(plan.resolve(MOE)), 2, chosen, (w,))
    mesh, cut = make_mesh("ep=4"), jax.P("ep")
    run = jax.jit(jax.shard_map(copy, mesh=mesh, in_specs=(cut, cut), out_specs=((cut,), cut, cut)))
    (copies,), at_copy, left = run(jnp.asarray(chosen), jnp.asarray(matrix))
    assert copies.ravel().tolist() == [2, 5] * 4  # five tokens each: the lower one first
    assert at_copy.tolist() == np.select([chosen == 2, chosen == 5], [0, 1], 2).tolist()
    assert left.tolist() == np.where(np.isin(chosen, (2, 5)), 8, chosen).tolist()


def test_copies_even_out_the_loads_of_ranks():
    """On loads with heavy tails: the busiest rank has less in all but few of 200."""
    tails = np.random.default_rng(0).pareto(1.2, (200, 32))
    before, after = (moe.rank_loads(tails, 8, copies).max(1) for copies in (0, 4))
    assert np.median(after / before) < 0.7 and (after <= before).mean() > 0.9
