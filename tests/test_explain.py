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
from llmpar.inspect.explain import ERRORS, LONGEST, MissingArrow, explain, layout_from_text
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


CASES = {
    "two dims, one axis": (lambda: put("tp") @ put(None, "tp"), "'b s/tp -> b s' (all-gather over tp on s)"),
    "einsum": (
        lambda: jnp.einsum("bsm,md->bsd", put("dp", None, "tp", shape=(8, 4, 8)), put("tp")),
        "'b/dp s d +tp -> b/dp s d' (all-reduce over tp)",
    ),
    # operands that disagree
    "a loop": (lambda: lax.scan(turn, put("dp"), None, length=2), "'b/tp s -> b/dp s'"),
    # a sum never finished
    "silu": (of_a_sum(jax.nn.silu), "'b s +tp -> b s' (all-reduce over tp)"),
    "a bias": (of_a_sum(lambda y: y + put()), "'b s +tp -> b s' (all-reduce over tp)"),
    "a next product": (of_a_sum(lambda y: y @ put()), "'b s +tp -> b s' (all-reduce over tp)"),
    # a reshape or gather that loses a cut
    "reshape at the end": (lambda: put("tp", "dp", shape=(12, 8)).reshape(3, 4, 8), "'b/tp s/dp -> b s/dp'"),
    # mixing with shard_map
    "out_specs": (inside(lambda x: x.sum(0), out=P(None)), "'+dp -> whole' (all-reduce over dp)"),
    "captured": (captured, "only arguments lead in"),
    "an open sum of none": (
        lambda: jnp.matmul(put(), put(), out_sharding=P(None, None, unreduced={"dp"})),
        "an unfinished sum over 'dp', but the dim that is summed is cut by (None,)",
    ),
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


def test_the_arrow_is_what_the_program_lacked():
    """With the arrows of the sentences, the first product and the addition run, and are right."""
    with jax.set_mesh(MESH):
        y = reshard(unfinished(), P(None, None)) + reshard(put("tp"), P(None, None))
    assert (y == 9).all()


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


WITH, WITHOUT, CURES = (
    [row.split(" ; ") for row in part.splitlines()[1:]]
    for part in Path(__file__).with_name("explained.txt").read_text().split("\n# ")[1:]
)


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


def test_long_texts_are_read_at_their_beginning():
    """What JAX says stands there; patterns with one place to begin read it once."""
    said = "Resource axis: dat of P('dat',) is not found in mesh: ('data',)"
    assert "perhaps this was meant: P('data',)" in explain(ValueError(said + "x" * 10**6))
    assert explain(ValueError("x" * LONGEST + said)) == ""
    lacks = "MLIR translation rule for primitive 'pbroadcast' not found for platform cpu"
    assert "pbroadcast exists, but not for cpu devices" in explain(NotImplementedError(lacks))
    patterns = [says for rows in ERRORS.values() for row in rows for says in row["says"]]
    assert not [says for says in patterns if re.match(r"\(\.|\(\?=\.|\(\\w|\.|\\w", says)]


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
    assert str(layout_from_text(text)) == layout


GRID = jax.make_mesh((4, 2), ("X", "Y"), axis_types=(AxisType.Auto,) * 2)


BY_ROWS = P("X")


def gridded(f, given=BY_ROWS, out=BY_ROWS, shape=(16, 4), **more):
    return lambda: jax.shard_map(f, mesh=GRID, in_specs=given, out_specs=out, **more)(jnp.ones(shape))


def both_cut(out=None):
    def call():
        given = put("dp", "tp"), put("tp", "dp")
        return jnp.einsum("ij,jk->ik", *given, **({"out_sharding": out} if out else {}))

    return call


def blocks_of(block):
    return lambda: jax.make_array_from_callback((8,), NamedSharding(GRID, P("X")), block)


within = lambda **more: jax.shard_map(lambda y: 2 * y, in_specs=P("Y"), out_specs=P("Y"), **more)
CURED = {
    "both factors cut twice": (both_cut(), "out_sharding=P('dp', None)", both_cut(P("dp", None))),
    "all-to-all of whole blocks": (
        gridded(lambda x: lax.all_to_all(x, "X", 1, 0), shape=(32, 8)),
        "wants a dim of exactly 4 blocks, one for each device, and this one has 8; with tiled=True",
        gridded(lambda x: lax.all_to_all(x, "X", 1, 0, tiled=True), shape=(32, 8)),
    ),
    "all-to-all that does not divide": (
        gridded(lambda x: lax.all_to_all(x, "X", 1, 0, tiled=True), shape=(16, 6)),
        "a dim of 6 on each device cannot be dealt out to 4 devices; split another dim, or pad",
        gridded(lambda x: lax.all_to_all(x, "X", 0, 1, tiled=True), shape=(16, 6)),
    ),
    "scattered sum of whole rows": (
        gridded(lambda x: lax.psum_scatter(x, "X"), shape=(32, 4)),
        "takes a dim of exactly 4, one entry for each device, and drops it; this one has 8",
        gridded(lambda x: lax.psum_scatter(x, "X", tiled=True), shape=(32, 4)),
    ),
    "scattered sum that does not divide": (
        gridded(lambda x: lax.psum_scatter(x, "X", tiled=True), given=P(), shape=(6, 4)),
        "a dim of 6 on each device cannot be dealt out to 4 devices",
        gridded(lambda x: lax.psum_scatter(x, "X", scatter_dimension=1, tiled=True), given=P(), shape=(6, 4)),
    ),
    "a permute to two": (
        gridded(lambda x: lax.ppermute(x, "X", [(0, 1), (0, 2)])),
        "((0, 1), (0, 2)) names one twice: use two of them",
        gridded(lambda x: lax.ppermute(x, "X", [(0, 1)]) + lax.ppermute(x, "X", [(0, 2)])),
    ),
    "a callback's block": (
        blocks_of(lambda index: np.ones(8)),
        "its block, of shape (2,), and was given one of (8,); of a callback return whole[index]",
        blocks_of(lambda index: np.ones(8)[index]),
    ),
    "shard_map in shard_map": (
        gridded(lambda x: within(mesh=GRID)(x)),
        "give the outer one fewer axes (axis_names={…}) and leave mesh out of the inner one",
        jax.jit(gridded(lambda x: within(axis_names={"Y"})(x), axis_names={"X"})),
    ),
}
gridded_of = lambda spec: jax.shard_map(lambda x: x, mesh=GRID, in_specs=spec, out_specs=spec)
AUTOS, ABSTRACT = (AxisType.Auto,) * 2, jax.sharding.AbstractMesh((4, 2), ("X", "Y"))
on_grid = lambda *cuts, mesh=GRID: NamedSharding(mesh, P(*cuts))
HALF = jax.make_mesh((4,), ("X",), devices=jax.devices()[:4], axis_types=AUTOS[:1])
jitted = lambda f, *shapes, **more: jax.jit(f, **more).lower(*[jnp.ones(shape) for shape in shapes])
placed = lambda **more: jax.device_put(jnp.ones((16, 4)), **more)
pieces = lambda where, whole: [
    jax.device_put(whole[i], d) for d, i in where.addressable_devices_indices_map(whole.shape).items()
]
from_blocks = lambda blocks: jax.make_array_from_single_device_arrays((8, 4), on_grid("X"), blocks)
compiled = lambda: jax.jit(jnp.sum).lower(jnp.ones((4, 4))).compile()
mapped = lambda spec: jax.vmap(lambda x: lax.with_sharding_constraint(x, on_grid(spec)), spmd_axis_name="X")
within_auto = lambda **more: jax.sharding.auto_axes(lambda x: x @ x.T, **more)(put("dp"))


def set_inside(x):
    with jax.set_mesh(GRID):
        return x


def called(x):
    with jax.set_mesh(GRID):
        return jax.jit(lambda x: x)(x)


CURED |= {
    "a mesh with a name too few": (
        lambda: jax.make_mesh((4, 2), ("X",), axis_types=AUTOS[:1]),
        "a size, a name and a type for each axis",
        lambda: jax.make_mesh((4, 2), ("X", "Y"), axis_types=AUTOS) and 1,
    ),
    "a mesh with a type too few": (
        lambda: jax.make_mesh((4, 2), ("X", "Y"), axis_types=AUTOS[:1]),
        "these are not as many: ('X', 'Y') and (Auto,)",
        lambda: jax.make_mesh((4, 2), ("X", "Y"), axis_types=AUTOS) and 1,
    ),
    "axis types as words": (
        lambda: jax.make_mesh((4, 2), ("X", "Y"), axis_types="auto"),
        "axis_types=(jax.sharding.AxisType.Auto,) * len(axis_names)",
        lambda: jax.make_mesh((4, 2), ("X", "Y"), axis_types=AUTOS) and 1,
    ),
    "a spec as a tuple": (
        lambda: placed(device=(on_grid("X"), None)),
        "all cuts of one value in one P(…)",
        lambda: placed(device=on_grid("X", None)),
    ),
    "two shardings of one result": (
        lambda: jitted(lambda x: x, (16, 4), out_shardings=(on_grid("X"), on_grid("Y"))),
        "pjit out_shardings is a tuple",
        lambda: jitted(lambda x: x, (16, 4), out_shardings=on_grid("X", "Y")),
    ),
    "in_shardings too few": (
        lambda: jitted(lambda x, y: x, (8,), (8,), in_shardings=(on_grid("X"),)),
        "in_shardings has 1 entries for 2 arguments",
        lambda: jitted(lambda x, y: x, (8,), (8,), in_shardings=(on_grid("X"),) * 2),
    ),
    "in_shardings of two meshes": (
        lambda: jitted(jnp.add, (8,), (8,), in_shardings=(on_grid("X"), on_grid("X", mesh=HALF))),
        "make both shardings of one mesh",
        lambda: jitted(jnp.add, (8,), (8,), in_shardings=(on_grid("X"), on_grid())),
    ),
    "in_specs as shardings": (
        gridded(lambda x: x, given=on_grid("X")),
        "not of type NamedSharding; give the .spec of a NamedSharding",
        gridded(lambda x: x, given=on_grid("X").spec),
    ),
    "manual over no axis of the mesh": (
        gridded(lambda x: x, axis_names={"Z"}),
        "of {'Z'} not all are among {'",
        gridded(lambda x: x, axis_names={"X"}),
    ),
    "set_mesh in jit": (
        lambda: jitted(set_inside, (8,)),
        "with jax.set_mesh(mesh): f(x)",
        lambda: called(1.0),
    ),
    "set_mesh of an abstract mesh": (
        lambda: jax.set_mesh(ABSTRACT),
        "takes a mesh of devices, as jax.make_mesh makes it, and this is of type AbstractMesh",
        lambda: called(1.0),
    ),
    "an axis that cuts and sums": (
        lambda: P("X", unreduced={"X"}),
        "one of {'X'} is to do both",
        lambda: P("Y", unreduced={"X"}) and 1,
    ),
    "a tuple in a tuple": (
        lambda: P(("X", ("Y",))),
        "P(('X', 'Y'))",
        lambda: placed(device=on_grid(("X", "Y"))),
    ),
    "one block for all devices": (
        lambda: from_blocks([jnp.ones((2, 4))]),
        "is made of 8 blocks, one on each of its devices that this process has, and 1 are given",
        lambda: from_blocks(pieces(on_grid("X"), np.ones((8, 4)))),
    ),
    "a compiled program and another shape": (
        lambda: compiled()(jnp.ones((8, 4))),
        "of type float32[4,4], and is given float32[8,4]; call the jitted function",
        lambda: jax.jit(jnp.sum)(jnp.ones((8, 4))),
    ),
    "a mapped axis in a constraint": (
        lambda: mapped("X")(jnp.ones((4, 4))),
        "leave it out of the constraint inside",
        lambda: mapped("Y")(jnp.ones((4, 4))),
    ),
    "put on an abstract mesh": (
        lambda: placed(device=on_grid("X", mesh=ABSTRACT)),
        "make it of the mesh itself",
        lambda: placed(device=on_grid("X")),
    ),
    "auto_axes without a layout": (
        within_auto,
        "out_sharding=jax.P()",
        lambda: within_auto(out_sharding=P()),
    ),
}

thunk = lambda text: lambda: eval(text, globals())
CURED |= {name: (thunk(wrong), says, thunk(cured)) for name, wrong, says, cured in CURES}


@pytest.mark.parametrize("wrong, says, cured", CURED.values(), ids=CURED)
def test_a_mistake_is_explained_and_its_cure_runs(wrong, says, cured):
    with jax.set_mesh(MESH) if "dp" in says or "jax.P()" in says else contextlib.nullcontext():
        with pytest.raises(Exception) as raised:
            wrong()
        assert says in (explain(raised.value) or "")
        jax.block_until_ready(cured())
