"""JAX's own sharding errors, raised, and our sentence about each: the arrow that is missing."""

import contextlib
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import llmpar.inspect.explain
from llmpar.inspect.explain import MissingArrow, explain
from llmpar.plan.layout import parse_arrow

MESH = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"), axis_types=(AxisType.Explicit,) * 3)


@functools.cache
def put(*cuts, shape=(8, 8)):
    with jax.ensure_compile_time_eval():  # the first to ask may be a trace
        return jax.device_put(jnp.ones(shape), NamedSharding(MESH, P(*cuts)))


def unfinished():
    return jnp.matmul(put(None, "tp"), put("tp"), out_sharding=P(None, None, unreduced={"tp"}))


def of_a_sum(f):
    """``f`` of an unfinished sum that has a name: JAX 0.10 does not say which sum it is."""
    y = unfinished()
    return f(y)


def by_rows(f, out):
    return jax.shard_map(f, in_specs=P("dp"), out_specs=out)(put("dp", None))


def captured():
    y = put("dp", None)
    return jax.shard_map(lambda x: x + y[:4], in_specs=P("dp"), out_specs=P("dp"))(y)


def turn(x, _):
    return reshard(x, P("tp", None)), None


WITH, WITHOUT, CURES, CASES = (
    [row.split(" ; ") for row in part.splitlines()[1:]]
    for part in Path(__file__).with_name("explained.txt").read_text().split("\n# ")[1:]
)
thunk = lambda text: lambda: eval(text, globals())


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("case", CASES, ids=lambda row: row[0])
def test_an_error_of_jax_is_answered_by_the_missing_arrow(case, jitted):
    _, program, says = case
    f = thunk(program)
    with jax.set_mesh(MESH):
        with pytest.raises(Exception) as raised:
            jax.jit(f)() if jitted else f()
        sentence = explain(raised.value)
        assert says in sentence and "\n" not in sentence and not sentence.endswith(".")
        if jitted:
            with pytest.raises(MissingArrow, match=re.escape(says)) as ours, llmpar.explain():
                raise raised.value
            assert isinstance(ours.value.__cause__, type(raised.value))
    for arrow in re.findall(r"'([^']* -> [^']*)'", sentence):
        assert parse_arrow(arrow).moves


def test_an_error_that_a_program_raises_itself_is_not_jaxs():
    with jax.set_mesh(MESH), pytest.raises(Exception) as raised:
        put("dp") + put("tp")
    assert explain(raised.value)
    with pytest.raises(ValueError) as own:
        raise ValueError(str(raised.value))
    assert explain(own.value) == ""


def test_no_sharding_of_a_result_is_said_where_the_factors_cannot_be_read():
    """P() would give every device the whole batch."""
    with jax.set_mesh(MESH), pytest.raises(Exception) as raised:
        lax.dot_general(put("dp", None, "tp", shape=(4, 4, 8)), put("tp"), (([2], [0]), ([], [])))
    sentence = explain(raised.value)
    assert "an out_sharding that names none of tp" in sentence and "P()" not in sentence


ALL = ("d", "data", "b")  # names of which one begins another, and one is our letter for a dim
EXPLICIT = jax.make_mesh((2, 2, 2), ALL, axis_types=(AxisType.Explicit,) * 3)
AUTO = jax.make_mesh((2, 2, 2), ALL, axis_types=(AxisType.Auto,) * 3)
ONE = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
MIXED = jax.make_mesh((4, 2), ("d", "b"), axis_types=(AxisType.Explicit, AxisType.Auto))
NUMBERS = np.arange(64, dtype=np.float32).reshape(8, 8) / 8


def lay(mesh, *cuts, of=NUMBERS):
    return jax.device_put(of, NamedSharding(mesh, P(*cuts)))


e, a = functools.partial(lay, EXPLICIT), functools.partial(lay, AUTO)
ROW, IDS = NUMBERS[0], np.arange(8, dtype=np.int32)[::-1].copy()
TALL = NUMBERS + 9 * np.eye(8, dtype=np.float32)
MATRICES = np.arange(64, dtype=np.float32).reshape(4, 4, 4)


def manual(f, given, out, of=ROW, mesh=AUTO, **options):
    return jax.shard_map(f, mesh=mesh, in_specs=given, out_specs=out, **options)(of)


def grads(mend):
    """A product with its own backward rule, in shard_map."""
    product = jax.custom_vjp(lambda w, x: w * x)
    product.defvjp(lambda w, x: (w * x, (w, x)), lambda kept, g: (mend((g * kept[1]).sum()), g * kept[0]))
    return lambda x: jax.grad(lambda w: product(w, x).sum())(2.0)[None]


def ruled(mend):
    """A sum with its own backward rule, whose gradient is made anew."""
    total = jax.custom_vjp(lambda x: x.sum())
    total.defvjp(lambda x: (x.sum(), None), lambda _, g: (mend(g * jnp.ones((8, 8))),))
    return total


def explicitly(f):
    with jax.set_mesh(EXPLICIT):
        return f(e("d"))


turned = lambda mend, to: lambda x, _=None: (mend(reshard(x, to)), None)


def constrained(mend, f=lax.with_sharding_constraint):
    with mend(contextlib.nullcontext()):
        return f(jnp.asarray(NUMBERS), P("d"))


@pytest.mark.parametrize("row", WITH + WITHOUT, ids=lambda row: row[0])
def test_the_program_runs_once_the_advice_is_followed(row):
    """As Python text: `mend` is the advice, where it belongs, `say` what it gives as a keyword argument."""
    case, program, says, value = row
    names = globals() | {"mesh": AUTO if row in WITHOUT and "reshard" not in case else EXPLICIT}
    f = eval(f"lambda mend, say: {program}", names)
    with jax.set_mesh(EXPLICIT) if row in WITH else contextlib.nullcontext():
        with pytest.raises(Exception) as raised:
            f(lambda x: x, {})
        sentence = explain(raised.value)
        assert says in sentence and "\n" not in sentence and not sentence.endswith(".")
        advice = sentence.rpartition(": ")[2]
        if re.match(r"\w+=", advice):
            found = f(lambda x: x, eval(f"dict({advice})", names))
        else:
            found = f(lambda x: eval(advice, names | {"x": x}), {})
    np.testing.assert_allclose(np.asarray(found), eval(value, names), rtol=1e-5, atol=1e-5)


class Asked:
    """A factor that counts how often the program asks for it."""

    times = 0

    @property
    def weight(self):
        self.times += 1
        return put("tp")


def test_nothing_of_the_program_runs_again():
    """JAX's own functions still hold what they were given: of any expression the arrow has all its dims."""
    layer, x = Asked(), put("dp", "tp")
    with jax.set_mesh(MESH), pytest.raises(Exception) as raised:
        jax.jit(lambda x: jnp.tanh(x) @ layer.weight)(x)
    assert "'b/dp s +tp -> b/dp s' (all-reduce over tp)" in explain(raised.value) and layer.times == 1
    source = Path(llmpar.inspect.explain.__file__).read_text()
    assert not re.search(r"\b(eval|exec|compile)\(", source.replace("re.compile(", ""))


def test_another_error_passes_untouched():
    with pytest.raises(KeyError), explain():
        {}["a"]
    with explain():
        assert jnp.ones(3).sum() == 3


GRID = jax.make_mesh((4, 2), ("X", "Y"), axis_types=(AxisType.Auto,) * 2)
HALF = jax.make_mesh((4,), ("X",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
AUTOS, ABSTRACT = (AxisType.Auto,) * 2, jax.sharding.AbstractMesh((4, 2), ("X", "Y"))
BY_ROWS = P("X")


def gridded(f, given=BY_ROWS, out=BY_ROWS, shape=(16, 4), **more):
    return lambda: jax.shard_map(f, mesh=GRID, in_specs=given, out_specs=out, **more)(jnp.ones(shape))


def set_inside(x):
    with jax.set_mesh(GRID):
        return x


def called(x):
    with jax.set_mesh(GRID):
        return jax.jit(lambda x: x)(x)


both_cut = lambda **more: jnp.einsum("ij,jk->ik", put("dp", "tp"), put("tp", "dp"), **more)
blocks_of = lambda block: jax.make_array_from_callback((8,), NamedSharding(GRID, P("X")), block)
within = lambda **more: jax.shard_map(lambda y: 2 * y, in_specs=P("Y"), out_specs=P("Y"), **more)
gridded_of = lambda spec: jax.shard_map(lambda x: x, mesh=GRID, in_specs=spec, out_specs=spec)
on_grid = lambda *cuts, mesh=GRID, **more: NamedSharding(mesh, P(*cuts), **more)
jitted = lambda f, *shapes, **more: jax.jit(f, **more).lower(*[jnp.ones(shape) for shape in shapes])
placed = lambda **more: jax.device_put(jnp.ones((16, 4)), **more)
pieces = lambda where, whole: [
    jax.device_put(whole[i], d) for d, i in where.addressable_devices_indices_map(whole.shape).items()
]
from_blocks = lambda blocks: jax.make_array_from_single_device_arrays((8, 4), on_grid("X"), blocks)
mapped = lambda spec: jax.vmap(lambda x: lax.with_sharding_constraint(x, on_grid(spec)), spmd_axis_name="X")
within_auto = lambda **more: jax.sharding.auto_axes(lambda x: x @ x.T, **more)(put("dp"))


@pytest.mark.parametrize("row", CURES, ids=lambda row: row[0])
def test_a_mistake_is_explained_and_its_cure_runs(row):
    _, wrong, says, cured = row
    with jax.set_mesh(MESH) if "dp" in says or "jax.P()" in says else contextlib.nullcontext():
        with pytest.raises(Exception) as raised:
            eval(wrong, globals())
        assert says in (explain(raised.value) or "")
        jax.block_until_ready(eval(cured, globals()))
