"""The modes in small: what a collective and its transpose do to a value, and what a census says."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from shared import TABLES
from test_notation import random_layout

from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.parallel.collectives import vary
from llmpar.parallel.mesh import make_mesh, sharding, spec
from llmpar.parallel.modes import Manual
from llmpar.parallel.partitioned import Auto
from llmpar.plan.layout import Arrow, Layout, parse_arrow, parse_layout
from llmpar.plan.plan import Plan

MIXED = "dp=2 fsdp=2 tp=2"
PLAN = Plan(MIXED).resolve()
MESH = make_mesh(PLAN.mesh)


def value(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def spread(x, layout):
    """Inside shard_map: ``x`` as one term, unlike the others, of a sum unfinished over ``layout.sums``."""
    for axis in layout.sums:
        terms = jnp.array([1.0] if PLAN.mesh.sizes[axis] == 1 else [3.0, -2.0])
        x = vary(x, (axis,)) * terms[lax.axis_index(axis)]
    return x


def carried(arrow):
    """The arrow as a function of whole values."""

    def inside(x):
        out = Manual(PLAN).carry_out(spread(x, arrow.before), arrow, invariant=True)
        return lax.psum(out, arrow.after.sums) if arrow.after.sums else out

    return jax.shard_map(inside, mesh=MESH, in_specs=spec(arrow.before), out_specs=spec(arrow.after))


@pytest.mark.parametrize("text, kinds", TABLES["arrow_kinds"].items())
def test_an_arrow_changes_where_a_value_lives_and_not_what_it_is(text, kinds):
    arrow, x = parse_arrow(text), value(8, 8)
    run = carried(arrow)
    np.testing.assert_allclose(jax.jit(run)(x), x, rtol=1e-5, atol=1e-5)  # 3x - 2x is not x to the last bit
    assert [m.kind for m in arrow.moves] == kinds.split()
    sent = [(c.kind, c.arrow) for c in census_jaxpr(jax.make_jaxpr(run)(x).jaxpr, PLAN.mesh.sizes)]
    assert sent == [(kind, str(arrow)) for kind in kinds.split() if kind != "slice"]


def test_random_arrows_carry_the_value_or_would_reorder_blocks():
    """Of b, s, d, in one program; sums that an arrow leaves are finished behind it."""
    rng, runs, kinds = random.Random(0), [], set()
    while len(runs) < 50:
        before, after = (random_layout(rng, list("bsd"), region=False) for _ in range(2))
        after = Layout(after.dims, tuple(a for a in after.sums if a in before.sums))
        arrow = Arrow(before, after)
        try:
            kinds |= {move.kind for move in arrow.moves}
        except ValueError as error:
            assert "would reorder the blocks" in str(error)
            continue
        runs.append(carried(arrow))
    x = value(8, 8, 8)
    for result in jax.jit(lambda x: [run(x) for run in runs])(x):
        np.testing.assert_allclose(result, x, rtol=1e-5, atol=1e-5)
    assert len(kinds) >= 4


def test_a_maximum_over_devices_is_the_largest():
    """A smaller one is no error in exact arithmetic: only logits that lie far apart would overflow."""
    largest = lambda x: Manual(PLAN).max(x.max(-1), "vocab b s +v -> data b s")
    cut, whole = (spec(PLAN.place(layout)) for layout in ("vocab b s v", "data b s"))
    run = jax.shard_map(largest, mesh=MESH, in_specs=cut, out_specs=whole)
    x = value(4, 3, 8)
    np.testing.assert_array_equal(jax.jit(run)(x), x.max(-1))


@pytest.mark.parametrize("text", ["b s/tp -> b s", "b s +tp -> b s", "b/dp s +tp -> b s/tp"])
def test_an_arrow_that_starts_cut_where_the_value_is_the_same_is_refused(text):
    arrow = parse_arrow(text)
    carry = lambda x: Manual(PLAN).carry_out(x, arrow)
    run = jax.shard_map(carry, mesh=MESH, in_specs=spec(parse_layout("b s")), out_specs=spec(arrow.after))
    first = (arrow.before.sums + arrow.before.axes)[0]
    said = f"starts with {first} in its layout, but the value is the same all over {first}"
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(run, jnp.zeros((8, 8)))


def test_auto_pins_what_an_arrow_ends_in():
    par = Auto(PLAN, MESH)
    out = jax.jit(lambda x: par.move(x, "attention b s d +n -> stream b s d"))(jnp.zeros((8, 4, 4)))
    assert out.sharding.is_equivalent_to(sharding(MESH, PLAN.place("stream b s d")), 3)
    assert par.move(jnp.float32(1), "ffn +m -> data") == 1
    w = jax.jit(lambda p: par.weight(nnx.Param(p, dims="ffn d m")))(jnp.zeros((4, 4)))
    assert w.sharding.shard_shape((4, 4)) == (4, 2)
