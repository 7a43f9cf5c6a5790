"""The three readings in small: what each collective does to a value, what its transpose does, and what the ledger says."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from llmpar import cost, hlo
from llmpar.mesh import make_mesh, sharding, spec
from llmpar.notation import parse_arrow, parse_layout
from llmpar.par import MOVED, WEIGHT, Auto, Entry, Manual, Solo, sent, vary, varying
from llmpar.plan import Plan

MIXED = "dp=2 fsdp=2 tp=2"
PLAN = Plan(MIXED)
MESH = make_mesh(PLAN.mesh)


def value(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def spread(x, layout):
    """Inside shard_map: ``x`` as one term of a sum that is unfinished over ``layout.sums``, all terms unlike."""
    for axis in layout.sums:
        x = vary(x, (axis,)) * jnp.array([3.0, -2.0])[lax.axis_index(axis)]
    return x


def carried(arrow, mesh=MESH, plan=PLAN):
    """The arrow as a function of whole values, and the `Manual` whose ledger it fills."""
    par = Manual(plan)

    def inside(x):
        return par.carry_out(spread(x, arrow.before), arrow, invariant=True)

    return jax.shard_map(inside, mesh=mesh, in_specs=spec(arrow.before), out_specs=spec(arrow.after)), par


ARROWS = {
    "b s +tp -> b s": "all-reduce",
    "b s +dp +tp -> b s": "all-reduce",
    "b s +tp -> b s/tp": "reduce-scatter",
    "b s/tp -> b s": "all-gather",
    "b/dp,fsdp s -> b s": "all-gather",
    "b/tp,dp s -> b s": "all-gather",
    "b/tp s -> b s/tp": "all-to-all",
    "b/dp s/fsdp -> b/dp s": "all-gather",
    "b s -> b s/tp": "slice",
    "b/dp s +tp -> b/dp,tp s": "reduce-scatter",
}


@pytest.mark.parametrize("text", ARROWS)
def test_an_arrow_changes_where_a_value_lives_and_not_what_it_is(text):
    arrow, x = parse_arrow(text), value(8, 8)
    run, par = carried(arrow)
    np.testing.assert_allclose(jax.jit(run)(x), x, rtol=1e-6, atol=1e-6)  # 3x - 2x is not x to the last bit
    assert [m.kind for m in arrow.moves] == [ARROWS[text]]
    assert [e.kind for e in par.ledger] == ([] if ARROWS[text] == "slice" else [ARROWS[text]])


def test_reduce_scatter_comes_before_all_reduce_and_the_shard_is_reduced():
    arrow, x = parse_arrow("d m +dp +fsdp -> d/fsdp m"), value(8, 4)
    run, par = carried(arrow)
    np.testing.assert_allclose(jax.jit(run)(x), x, rtol=1e-5, atol=1e-5)
    assert [(e.kind, e.axes, e.shape) for e in par.ledger] == [
        ("reduce-scatter", ("fsdp",), (8, 4)), ("all-reduce", ("dp",), (4, 4))
    ]  # fmt: skip


LINEAR = ["b s +tp -> b s/tp", "b s/tp -> b s", "b/tp s -> b s/tp", "b/dp s/tp -> b/dp s"]


@pytest.mark.parametrize("text", LINEAR)
def test_the_transpose_of_a_collective_is_the_one_that_the_ledger_names(text):
    """The pullback of every collective, in value (each is one logical identity, so it gives the cotangent back) and in
    kind, axes and bytes (the jaxpr of the pullback alone, beside `Entry.transpose`)."""
    arrow, x, weight = parse_arrow(text), value(8, 8), value(8, 8) + 1
    par = Manual(PLAN)

    def inside(x, w):
        with par.differentiated():
            out = par.carry_out(vary(x, arrow.before.sums), arrow)
        return lax.psum(jnp.sum(out * w), tuple(varying(out)))

    def loss(x, w):
        return jax.shard_map(
            inside, mesh=MESH, in_specs=(spec(arrow.before), spec(arrow.after)), out_specs=spec(parse_layout("whole"))
        )(x, w)

    copies = 1 if arrow.moves[0].kind == "all-to-all" else 2  # both devices of tp hold the same x, or the same result
    grad = jax.jit(jax.grad(loss))(x, weight)
    np.testing.assert_allclose(grad, copies * weight, rtol=1e-6)
    par.ledger.clear()
    step = jax.make_jaxpr(jax.grad(loss))(x, weight)
    [entry] = par.ledger
    both = [(c.kind, c.axes, c.bytes_sent) for c in hlo.census_jaxpr(step.jaxpr, PLAN.mesh.sizes) if c.bytes_sent > 8]
    written = [(e.kind, e.axes, e.bytes_sent) for e in (entry, entry.transpose)]
    assert [b for b in both if b[0] != "all-reduce"] == written


def test_from_here_on_devices_differ_is_free_and_its_transpose_is_an_all_reduce():
    """Megatron's f: the identity forward, an all-reduce backward."""
    plan = Plan("tp=2")
    par, mesh, x, w = Manual(plan), make_mesh("tp=2"), value(4, 6), value(4, 6)

    def inside(x, w):
        with par.differentiated():
            y = par.move(x, "stream b d -> ffn b d")
        return par.carry_out(jnp.sum(y * w * jnp.array([1.0, 2.0])[lax.axis_index("tp")]), parse_arrow("+tp -> whole"))

    whole = spec(parse_layout("whole"))
    loss = jax.shard_map(inside, mesh=mesh, in_specs=(whole, whole), out_specs=whole)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x, w), 3 * w, rtol=1e-6)  # (1 + 2) w, summed over both devices
    assert [(e.kind, e.axes) for e in par.ledger][:2] == [("vary", ("tp",)), ("all-reduce", ("tp",))]
    assert par.ledger[0].bytes_sent == 0 and par.ledger[0].transpose.kind == "all-reduce"
    assert [e.kind for e in par.traffic].count("vary") == 0 and par.ledger[1].transpose is None


# ---------------------------------------------------------------------------------------------------------------- ledger


@pytest.mark.parametrize("group", [2, 3, 6, 8, 16])
def test_bytes_sent_are_those_of_a_ring(group):
    """Beside `hlo.ring_bytes`, which starts from the result: an all-gather's is larger, a reduce-scatter's is smaller; and
    beside the published formula, which has fractions where the group does not divide the message."""
    for operand in (24 * group, 4):
        results = {"all-gather": operand * group, "all-reduce": operand, "all-to-all": operand}
        results |= {"reduce-scatter": operand // group} if operand % group == 0 else {}
        for kind, result in results.items():
            whole = math.ceil(round(cost.sent_bytes_of_result(kind, result, group), 6))
            assert sent(kind, operand, group) == hlo.ring_bytes(kind, group, result) == whole, kind
        assert sent("maximum", operand, group) == sent("all-reduce", operand, group) and sent("vary", operand, group) == 0
    entry = Entry("b -> b", "all-gather", ("tp",), (6, group), "bfloat16", 5, group)
    assert entry.bytes_sent == 5 * 6 * group * 2 * (group - 1)


def test_transposes_of_entries():
    entry = Entry("x", "all-gather", ("tp",), (3, 4), "float32", 7, 4, differentiated=True)
    back = entry.transpose
    assert (back.kind, back.axes, back.shape, back.times, back.dtype) == ("reduce-scatter", ("tp",), (48,), 7, "float32")
    assert back.bytes_sent == entry.bytes_sent and back.transpose is None, "nothing differentiates twice"
    scatter = dataclasses.replace(entry, kind="reduce-scatter").transpose
    assert (scatter.kind, scatter.shape) == ("all-gather", (3,)) and scatter.bytes_sent == 7 * 3 * 4 * 3
    assert dataclasses.replace(entry, kind="all-to-all").transpose.kind == "all-to-all"
    for kind in ("all-reduce", "maximum"):
        assert dataclasses.replace(entry, kind=kind).transpose is None
    assert dataclasses.replace(entry, differentiated=False).transpose is None


def test_repetitions_multiply_and_end():
    arrow = parse_arrow("b s/tp -> b s")

    def inside(x):
        par.carry_out(x, arrow)
        with par.repeated(3):
            par.carry_out(x, arrow)
            with par.repeated(5), par.differentiated():
                par.carry_out(x, arrow)
        par.carry_out(x, arrow)
        return x

    par = Manual(PLAN)
    jax.eval_shape(
        jax.shard_map(inside, mesh=MESH, in_specs=spec(arrow.before), out_specs=spec(arrow.before)), jnp.zeros((2, 8))
    )
    assert [(e.times, e.differentiated) for e in par.ledger] == [(1, False), (3, False), (15, True), (1, False)]
    assert [(e.kind, e.times) for e in par.traffic if e.times == 15] == [("all-gather", 15), ("reduce-scatter", 15)]


@pytest.mark.parametrize("text", ["b s/tp -> b s", "b s +tp -> b s", "b/dp s +tp -> b s/tp"])
def test_an_arrow_that_starts_cut_where_the_value_is_the_same_is_refused(text):
    arrow = parse_arrow(text)
    run = jax.shard_map(
        lambda x: Manual(PLAN).carry_out(x, arrow), mesh=MESH, in_specs=spec(parse_layout("b s")), out_specs=spec(arrow.after)
    )
    first = (arrow.before.sums + arrow.before.axes)[0]
    with pytest.raises(ValueError, match=f"starts with {first} in its layout, but the value is the same all over {first}"):
        jax.eval_shape(run, jnp.zeros((8, 8)))


# -------------------------------------------------------------------------------------------------------------- readings


def weight(dims, *shape):
    return nnx.Param(jnp.asarray(value(*shape)), dims=dims)


def test_solo_does_nothing_but_cast():
    par, p, x = Solo(Plan(dtype="bfloat16")), weight("ffn d m", 4, 6), jnp.asarray(value(2, 3))
    assert par.weight(p).dtype == jnp.bfloat16 and par.weight(p).shape == (4, 6)
    assert par.move(x, "ffn b d +m -> stream b d") is x and par.index("vocab v") == 0
    assert jax.grad(lambda x: par.max(x * 1, "vocab b s +v -> data b s").sum())(x).any() == False  # noqa: E712
    with par.repeated(3), par.differentiated():
        pass


def reading(kind, plan, f, *dims):
    """``f(par, x, *weights)`` of whole values under a reading, for x in 'data b s' form; the result is whole."""

    def manual(par, x, *values):
        params = [nnx.Param(v, dims=d) for v, d in zip(values, dims, strict=True)]
        return f(par, x, *params)

    if kind == "solo":
        return functools.partial(manual, Solo(plan)), None
    if kind == "auto":
        return jax.jit(functools.partial(manual, Auto(plan, make_mesh(plan.mesh)))), None
    par = Manual(plan)
    batch = spec(plan.place("data b s"))
    specs = (batch, *(spec(plan.stored(d)) for d in dims))
    return jax.jit(
        jax.shard_map(functools.partial(manual, par), mesh=make_mesh(plan.mesh), in_specs=specs, out_specs=batch)
    ), par


def feed_forward(par, x, up, down):
    """A column and a row, with a maximum and a vocabulary's index besides."""
    h = par.move(x @ jnp.ones((x.shape[1], 8)), "stream b d -> ffn b d")
    y = par.move((h @ par.weight(up)) @ par.weight(down), "ffn b d +m -> stream b d")
    first = par.index("vocab v") * 3 + jnp.arange(3)
    top = par.max(jnp.max(first).astype(jnp.float32) + h.sum(1) * 0, "vocab b +v -> data b")
    return par.move(y[:, :3], "stream b d -> data b d") + top[:, None]


@pytest.mark.parametrize(
    "plan", [PLAN, Plan("fsdp=4 tp=2"), Plan("dp=2", zero=0), Plan(MIXED, zero=1)], ids=lambda p: f"{p.mesh} zero={p.zero}"
)
@pytest.mark.parametrize("kind", ["manual", "auto"])
def test_the_three_readings_agree(kind, plan):
    args = value(8, 5), value(8, 16), value(16, 8)
    run, par = reading(kind, plan, feed_forward, "ffn d m", "ffn m d")
    want, _ = reading("solo", plan, feed_forward, "ffn d m", "ffn m d")
    tp = plan.mesh.tp if kind == "manual" else 1
    got = run(*args) - 3 * (tp - 1)  # the largest index of the vocabulary is the last device's
    np.testing.assert_allclose(got, want(*args), rtol=1e-5, atol=1e-5)
    if par:
        kinds = [e.kind for e in par.ledger if e.kind != "vary"]
        gathers = 2 * bool(plan.zero == 3 and plan.mesh.fsdp > 1)
        assert kinds.count("all-gather") == gathers and kinds.count("all-reduce") == kinds.count("maximum") == (
            plan.mesh.tp > 1
        )


def test_without_the_sum_the_readings_do_not_agree():
    """The planted fault: the arrow forgets ``+m``. shard_map's types notice that devices differ."""

    def forgetful(par, x, up, down):
        h = par.move(x @ jnp.ones((x.shape[1], 8)), "stream b d -> ffn b d")
        return par.move((h @ par.weight(up)) @ par.weight(down), "ffn b d -> stream b d")[:, :3]

    run, _ = reading("manual", PLAN, forgetful, "ffn d m", "ffn m d")
    with pytest.raises(ValueError, match="tp"):
        run(value(8, 5), value(8, 16), value(16, 8))


def test_auto_pins_what_an_arrow_ends_in():
    par = Auto(PLAN, MESH)
    out = jax.jit(lambda x: par.move(x, "attention b s d +n -> stream b s d"))(jnp.zeros((8, 4, 4)))
    assert out.sharding.is_equivalent_to(sharding(MESH, PLAN.place("stream b s d")), 3)
    assert par.move(jnp.float32(1), "ffn +m -> data") == 1, "a scalar has nowhere else to be"
    w = jax.jit(lambda p: par.weight(nnx.Param(p, dims="ffn d m")))(jnp.zeros((4, 4)))
    assert w.sharding.shard_shape((4, 4)) == (4, 2)


# ------------------------------------------------------------------------------------------------------ layers and chunks


def stack(plan):
    """Three layers of `move` and a weight, summed: (par) -> loss of (x, weights)."""

    def inside(par, x, ws):
        def block(x, w):
            y = par.move(x, "stream b d -> ffn b d") @ par.weight(nnx.Param(w, dims="ffn d m"))
            return x + par.move(jnp.tanh(y) @ jnp.ones((y.shape[1], 8)), "ffn b d +m -> stream b d"), None

        with par.differentiated():
            return par.layers(block, x, ws)[0]

    return inside


LAYERS = [Plan(MIXED), Plan(MIXED, remat="block"), Plan(MIXED, remat="block", regather="keep"), Plan(MIXED, regather="keep"),
          Plan(MIXED, unroll=0), Plan(MIXED, unroll=2, zero=1)]  # fmt: skip


@pytest.mark.parametrize("plan", LAYERS, ids=lambda p: f"{p.remat} {p.regather} {p.unroll}")
def test_layers_are_a_loop_however_they_are_saved(plan):
    x, ws = value(8, 8), 0.1 * value(3, 8, 16)
    want = x
    for w in ws:
        want = want + np.tanh(want @ w).sum(1, keepdims=True)
    solo = jax.jit(functools.partial(stack(plan), Solo(plan)))
    np.testing.assert_allclose(solo(x, ws), want, rtol=1e-5, atol=1e-5)
    par = Manual(plan)
    specs = (spec(plan.place("data b d")), spec(plan.stored("ffn l d m")))
    run = jax.shard_map(functools.partial(stack(plan), par), mesh=MESH, in_specs=specs, out_specs=specs[0])
    loss = lambda f, x, ws: (f(x, ws) ** 2).sum()
    got, grads = jax.jit(jax.value_and_grad(functools.partial(loss, run), argnums=1))(x, ws)
    expected, want_grads = jax.value_and_grad(functools.partial(loss, solo), argnums=1)(x, ws)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(grads, want_grads, rtol=1e-4, atol=1e-5 * np.abs(want_grads).max())
    times = {e.kind: e.times for e in par.ledger}
    assert set(times.values()) == {3} and ("all-gather" in times) == (plan.zero == 3)
    jaxpr = jax.make_jaxpr(jax.grad(functools.partial(loss, run), argnums=1))(x, ws)
    gathers = hlo.census_table(hlo.census_jaxpr(jaxpr.jaxpr, plan.mesh.sizes)).get(("fsdp", "all-gather"), {"count": 0})[
        "count"
    ]
    assert gathers == 3 * (0 if plan.zero < 3 else 1 if plan.regather == "keep" else 2)


@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_chunks_give_what_the_whole_gives_and_repeat_no_communication(num_chunks):
    plan = Plan("tp=2")
    x, w = value(2, 8, 6), value(6, 4)

    def inside(par, x, w):
        def piece(inputs):
            [x] = inputs
            total = par.move(jnp.tanh(x @ w).sum(-1), "vocab b s +v -> data b s")
            return jnp.cos(total)  # as the loss's logarithm: its derivative needs what was summed

        with par.differentiated():
            return par.chunked(piece, (vary(x, ("tp",)) if isinstance(par, Manual) else x,), num_chunks).sum()

    par, whole = Manual(plan), spec(parse_layout("whole"))
    run = jax.shard_map(
        functools.partial(inside, par),
        mesh=make_mesh(plan.mesh),
        in_specs=(whole, spec(parse_layout("d v/tp"))),
        out_specs=whole,
    )
    solo = functools.partial(inside, Solo(plan))
    (got, grad), (want, want_grad) = jax.jit(jax.value_and_grad(run))(x, w), jax.value_and_grad(solo)(x, w)
    np.testing.assert_allclose(want, np.cos(np.tanh(x @ w).sum(-1)).sum(), rtol=1e-4)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(grad, want_grad, rtol=1e-5, atol=1e-6)
    assert [(e.kind, e.times, e.shape) for e in par.ledger] == [("all-reduce", num_chunks, (2, 8 // num_chunks))]
    jaxpr = jax.make_jaxpr(jax.grad(run))(x, w)
    small = [c for c in hlo.census_jaxpr(jaxpr.jaxpr, plan.mesh.sizes) if c.shape == (2, 8 // num_chunks)]
    assert sum(c.count for c in small) == num_chunks, "the sums are saved, not repeated in the backward pass"


def test_names_that_remat_policies_know_are_written():
    def inside(x, w):
        par = Manual(PLAN)
        h = par.move(x, "stream b d -> ffn b d") @ par.weight(nnx.Param(w, dims="ffn d m"))
        return par.move(h @ jnp.ones((h.shape[1], 8)), "ffn b d +m -> stream b d")

    specs = (spec(PLAN.place("data b d")), spec(PLAN.stored("ffn d m")))
    text = str(
        jax.make_jaxpr(jax.shard_map(inside, mesh=MESH, in_specs=specs, out_specs=specs[0]))(
            jnp.zeros((8, 8)), jnp.zeros((8, 16))
        )
    )
    assert f"name={WEIGHT}" in text and f"name={MOVED}" in text
