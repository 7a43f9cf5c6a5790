"""JAX's own sharding errors, raised, and our sentence about each: the arrow that is missing."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import llmpar
from llmpar.inspect.explain import MissingArrow, explain, layout_of
from llmpar.notation import parse_arrow

MESH = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"), axis_types=(AxisType.Explicit,) * 3)


def put(*cuts, shape=(8, 8)):
    return jax.device_put(jnp.ones(shape), NamedSharding(MESH, P(*cuts)))


def unfinished():
    return jnp.matmul(put(None, "tp"), put("tp"), out_sharding=P(None, None, unreduced={"tp"}))


def of_a_sum(f):
    """``f`` of an unfinished sum that has a name: JAX 0.10 does not say which sum it is."""

    def call():
        y = unfinished()
        return f(y)

    return call


def inside(f, given=None, out=None):
    return lambda: jax.shard_map(f, in_specs=given or P("dp"), out_specs=out or P("dp"))(put("dp", None))


def captured():
    y = put("dp", None)
    return jax.shard_map(lambda x: x + y[:4], in_specs=P("dp"), out_specs=P("dp"))(y)


def turn(x, _):
    return reshard(x, P("tp", None)), None


CASES = {  # an ambiguous product of two cuts
    "product": (lambda: put(None, "tp") @ put("tp"), "'+tp -> whole' (all-reduce over tp)"),
    "product of two axes": (lambda: put(None, "tp") @ put("dp"), "'b/dp -> b/tp' (all-gather over dp on b"),
    "two dims, one axis": (lambda: put("tp") @ put(None, "tp"), "'b s/tp -> b s' (all-gather over tp on s)"),
    "einsum": (
        lambda: jnp.einsum("bsm,md->bsd", put("dp", None, "tp", shape=(8, 4, 8)), put("tp")),
        "'+tp -> whole' (all-reduce over tp)",
    ),
    # operands that disagree
    "addition": (lambda: put("dp") + put("tp"), "'b/tp s -> b/dp s' (all-gather over tp on b"),
    "choice": (lambda: jnp.where(put("dp") > 0, put("tp"), 0), "'b/tp s -> b/dp s'"),
    "a loop": (lambda: lax.scan(turn, put("dp"), None, length=2), "'b/tp s -> b/dp s'"),
    # a sum never finished
    "silu": (of_a_sum(jax.nn.silu), "'b s +tp -> b s' (all-reduce over tp)"),
    "tanh": (of_a_sum(jnp.tanh), "'b s +tp -> b s' (all-reduce over tp)"),
    "a bias": (of_a_sum(lambda y: y + put()), "'b s +tp -> b s' (all-reduce over tp)"),
    "a next product": (of_a_sum(lambda y: y @ put()), "'b s +tp -> b s' (all-reduce over tp)"),
    "a scale": (of_a_sum(lambda y: y * put()), "'b s +tp -> b s' (all-reduce over tp)"),
    # a reshape or gather that loses a cut
    "reshape": (lambda: put("dp", None, "tp", shape=(4, 3, 8)).reshape(4, 24), "'b/dp s d/tp -> b/dp s d'"),
    "reshape at the end": (lambda: put("tp", "dp", shape=(12, 8)).reshape(3, 4, 8), "'b/tp s/dp -> b s/dp'"),
    "gather": (lambda: put("tp")[jnp.arange(4)], "'b/tp s -> b s' (all-gather over tp on b)"),
    "constraint": (
        lambda: jax.jit(lambda x: lax.with_sharding_constraint(x, P("tp")))(put("dp")),
        "'b/dp s -> b/tp s'",
    ),
    # mixing with shard_map
    "in_specs": (inside(lambda x: x, given=P(None, "tp")), "'b/dp s -> b s/tp' (all-gather over dp on b"),
    "out_specs": (inside(lambda x: x.sum(0), out=P(None)), "'+dp -> whole' (all-reduce over dp)"),
    "captured": (captured, "no arrow leads in but an argument"),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("case", CASES)
def test_an_error_of_jax_is_answered_by_the_missing_arrow(case, jitted):
    f, says = CASES[case]
    with jax.set_mesh(MESH):
        with pytest.raises(Exception) as raised:
            jax.jit(f)() if jitted else f()
        sentence = explain(raised.value)
        assert says in sentence and "\n" not in sentence and not sentence.endswith(".")
        with pytest.raises(MissingArrow, match=re.escape(says)) as ours, llmpar.explain():
            jax.jit(f)() if jitted else f()
    assert isinstance(ours.value.__cause__, type(raised.value))
    for arrow in re.findall(r"'([^']* -> [^']*)'", sentence):
        assert parse_arrow(arrow).moves


def test_the_arrow_is_what_the_program_lacked():
    """With the arrows of the sentences, the first product and the addition run, and are right."""
    with jax.set_mesh(MESH):
        y = reshard(unfinished(), P(None, None)) + reshard(put("tp"), P(None, None))
    assert (y == 9).all()


ONE = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
TWO = jax.make_mesh((4, 2), ("X", "Y"), axis_types=(AxisType.Auto,) * 2)


def total(x, vary=lambda zero: zero):
    return lax.scan(lambda sum, _: (sum + x.sum(), None), vary(jnp.zeros(())), None, length=2)[0][None]


def counted(x, vary=lambda zero: zero):
    return lax.fori_loop(0, 2, lambda i, sum: sum + x.sum(), vary(jnp.zeros(())))[None]


@pytest.mark.parametrize("mesh, axes", [(ONE, ("i",)), (TWO, ("X",)), (TWO, ("X", "Y"))], ids=str)
@pytest.mark.parametrize("f", [total, counted])
def test_a_loop_whose_value_begins_to_differ_is_told_to_say_so(f, mesh, axes):
    """It moves nothing. Done as told, the program runs."""
    run = lambda f: jax.shard_map(f, mesh=mesh, in_specs=P(axes), out_specs=P(axes))(jnp.ones(8))
    with pytest.raises(TypeError) as raised:
        run(f)
    advice = f"jax.lax.pcast(x, {axes!r}, to='varying')"
    assert explain(raised.value).endswith(advice) and "reshard" not in explain(raised.value)
    follow = lambda zero: eval(advice, {"jax": jax, "x": zero})
    assert (run(lambda x: f(x, follow)) == 2 * 8 / math.prod(mesh.shape[a] for a in axes)).all()


@pytest.mark.parametrize("mesh, axis", [(ONE, "i"), (TWO, "X")], ids=str)
def test_a_result_that_is_not_the_same_everywhere_is_a_sum_to_finish(mesh, axis):
    """JAX has one sentence for one axis, and another where there are more."""
    run = lambda f: jax.shard_map(f, mesh=mesh, in_specs=P(axis), out_specs=P())(jnp.ones(8))
    with pytest.raises(ValueError) as raised:
        run(lambda x: x.sum())
    advice = f"lax.psum(x, ({axis!r},))"
    assert explain(raised.value).endswith(f"'+{axis} -> whole' (all-reduce over {axis}): {advice}")
    assert run(lambda x: eval(advice, {"lax": lax, "x": x.sum()})) == 8


def test_another_error_passes_untouched():
    assert explain(ValueError("batch 6 is not a multiple")) == ""
    with pytest.raises(KeyError), explain():
        {}["a"]
    with explain():
        assert jnp.ones(3).sum() == 3


@pytest.mark.parametrize(
    "text, layout",
    {
        "float32[8@(dp,fsdp),4]{U:tp}": "b/dp,fsdp s +tp",
        "f32[8,4@model]{U:(x,y), R:z}": "b s/model +x +y",
        "bf16[]": "whole",
        "P(('dp', 'fsdp'), None, unreduced={'tp'})": "b/dp,fsdp s +tp",
        "P('dp',)": "b/dp",
        "('dp', None)": "b/dp s",
    }.items(),
)
def test_types_are_read_as_jax_prints_them(text, layout):
    assert str(layout_of(text)) == layout
