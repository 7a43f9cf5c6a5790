"""The census of a program, against closed forms on 8 simulated devices and hand-written HLO text."""

import re
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from jax import lax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from shared import HERE, TABLES

from llmpar.inspect import census as reading
from llmpar.inspect.census import census_hlo, census_table, collective_bytes, partitioned_hlo
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.inspect.look import look

HLO = HERE / "fixtures" / "hlo"
CUBE = {"dp": 2, "fsdp": 2, "tp": 2}
AXES = tuple(CUBE)


@pytest.fixture(scope="module", autouse=True)
def fresh_compilation():
    """The persistent cache would answer with older texts, which name the source lines of their day."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def make_mesh(order=range(8), **sizes):
    devices = np.array([jax.devices()[i] for i in order]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def lower(f, mesh, in_specs, out_specs, *args):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)).trace(*args)


def three_censuses(traced, mesh):
    """The same program as its author wrote it, as it was partitioned, and as the CPU runs it."""
    lowered = traced.lower()
    texts = partitioned_hlo(lowered), lowered.compile().as_text()
    return census_jaxpr(traced.jaxpr, mesh.shape), *(census_hlo(text, mesh) for text in texts)


def table(*rows):
    return {(axes, kind): {"count": count, "bytes_sent": sent} for axes, kind, count, sent in rows}


SHIFT = [(0, 1), (1, 0)]
hop = lambda n: [(i, (i + n) % 8) for i in range(8)]
alone = lambda x: lax.pcast(x, "one", to="varying")  # an axis of one device
X = 32 * 16 * 4  # bytes of what one device holds of a float32 [256, 16]
EACH_KIND = [  # f, the axes that leave the result's layout, kind, axes, group, bytes sent
    (lambda x: lax.psum(alone(x), ("one", "tp")), ("tp",), "all-reduce", ("tp",), 2, X),
    (lambda x: lax.psum(x, ("fsdp", "dp")), ("dp", "fsdp"), "all-reduce", ("dp", "fsdp"), 4, 2 * X * 3 // 4),
    (lambda x: lax.psum(x, AXES), AXES, "all-reduce", AXES, 8, 2 * X * 7 // 8),
    (lambda x: lax.pmin(x, ("dp", "tp")), ("dp", "tp"), "all-reduce", ("dp", "tp"), 4, 2 * X * 3 // 4),
    (lambda x: lax.all_gather(x, ("fsdp", "tp"), tiled=True), (), "all-gather", ("fsdp", "tp"), 4, 3 * X),
    (lambda x: lax.psum_scatter(x, "tp", tiled=True), (), "reduce-scatter", ("tp",), 2, X // 2),
    (lambda x: lax.all_to_all(x, "dp", 1, 0, tiled=True), (), "all-to-all", ("dp",), 2, X // 2),
    (lambda x: lax.ppermute(x, "tp", SHIFT), (), "collective-permute", ("tp",), 2, X),
    (lambda x: lax.ppermute(x, "tp", SHIFT[:1]), (), "collective-permute", ("tp",), 2, X),
    (lambda x: lax.ppermute(x, AXES, hop(4)), (), "collective-permute", ("dp",), 2, X),
    (lambda x: lax.ppermute(x, AXES, hop(2)), (), "collective-permute", ("dp", "fsdp"), 4, X),
]


@pytest.mark.parametrize("f, gone, kind, axes, group_size, sent", EACH_KIND)
def test_each_collective_is_found_once_with_its_axes_and_bytes(f, gone, kind, axes, group_size, sent):
    mesh = make_mesh(**CUBE, one=1)
    traced = lower(f, mesh, P(AXES), P(tuple(a for a in AXES if a not in gone) or None), jnp.ones((256, 16)))
    for census in three_censuses(traced, mesh):
        (c,) = census
        assert (c.kind, c.axes, c.group_size, c.count, c.bytes_sent) == (kind, axes, group_size, 1, sent)
        assert c.dtype == "f32" and not c.conditional
        assert c.source.startswith("tests/test_hlo.py:")


def test_in_a_loop_of_unknown_length_a_turn_is_counted_and_no_sum_takes_it():
    mesh = make_mesh(tp=8)

    def loop(body):
        f = lambda x, n: lax.fori_loop(0, n[0], body, x)
        return lower(f, mesh, (P("tp"), P()), P("tp"), jnp.ones((8, 4)), jnp.array([3]))

    traced = loop(lambda i, x: lax.ppermute(x, "tp", SHIFT))
    for census in three_censuses(traced, mesh):
        (c,) = census
        assert (c.count, c.bytes_sent) == (1, 16) and c.per_turn.startswith("tests/test_hlo.py:")
        for total in (census_table, reading.arrow_text):
            with pytest.raises(ValueError, match=r"the loop at tests/test_hlo.py:\d+.*use lax.scan"):
                total(census)
    assert three_censuses(loop(lambda i, x: 2 * x), mesh) == ([], [], [])


def test_of_a_cond_the_branch_that_sends_most_counts():
    mesh = make_mesh(**CUBE)

    def f(x, flag):
        small = lambda x: lax.psum(x, "dp")
        large = lambda x: small(lax.ppermute(lax.ppermute(x, "tp", SHIFT), "fsdp", SHIFT))
        many = lambda x: small(lax.fori_loop(0, 5, lambda i, x: lax.ppermute(x, "tp", SHIFT), x))
        return lax.cond(flag[0] > 0, small, large, x) + lax.switch(flag[0], [small, large, many], x)

    hops = (("tp", "collective-permute", 6, 6 * X), ("fsdp", "collective-permute", 1, X))
    expected = table(("dp", "all-reduce", 2, 2 * X), *hops)
    traced = lower(f, mesh, (P(AXES), P()), P(("fsdp", "tp")), jnp.ones((256, 16)), jnp.array([1]))
    for census in three_censuses(traced, mesh):
        assert census_table(census) == expected
        assert all(c.conditional for c in census)


ODD = make_mesh(order=(7, 2, 4, 1, 0, 5, 3, 6), **CUBE)
SUBSETS = [tuple(a for i, a in enumerate(AXES) if bits >> i & 1) for bits in range(1, 8)]


@pytest.mark.parametrize("axes", SUBSETS, ids=",".join)
def test_groups_that_the_partitioner_chose_map_back_to_the_axes_of_the_user(axes):
    size = prod(CUBE[a] for a in axes)
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(ODD, P(axes)))
    traced = jax.jit(lambda x: (x.sum(0), 2 * x), out_shardings=NamedSharding(ODD, P())).trace(x)
    assert census_jaxpr(traced.jaxpr, ODD.shape) == []
    want = {("all-reduce", axes, collective_bytes("all-reduce", size, 16 * 4))}
    want |= {("all-gather", axes, collective_bytes("all-gather", size, 64 * 16 * 4))}
    for census in three_censuses(traced, ODD)[1:]:
        assert {(c.kind, c.axes, c.bytes_sent) for c in census} == want and len(census) == 2


# Hand-written text: each spelling that XLA has, on the abstract mesh dp=2 fsdp=2 tp=2.

ABSTRACT = SimpleNamespace(axis_names=AXES, shape=CUBE)


def gather(groups):
    return (HLO / "gather.hlo").read_text().replace("GROUPS, ", groups)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("operation, kind, sent", TABLES["results"])
def test_results_of_every_form_are_sized(operation, kind, sent, short):
    """In XLA's short form, too, whose names have no %, and whose computations no arguments."""
    done = f"%d = f32[4]{{0}} {kind}-done(%c)" if "-start" in operation else ""
    text = (HLO / "results.hlo").read_text().replace("OPERATION", operation).replace("DONE", done)
    text = re.sub(r" \(x: .* \{", " {", text).replace("%", "") if short else text
    (c,) = census_hlo(text, ABSTRACT)
    assert (c.kind, c.count, c.bytes_sent, c.axes, c.source) == (kind, 1, sent, ("tp",), "model/llama.py:88")


def looked_at(*operations):
    lines = "".join(f"  %o{i} = {operation}\n" for i, operation in enumerate(operations))
    header = "HloModule jit_f, num_partitions=8\n\n"
    given = "  %x = f32[4]{0} parameter(0)\n  %y = token[] after-all()\n"
    return look(f"{header}ENTRY %main (x: f32[4]) -> f32[4] {{\n{given}{lines}}}\n", CUBE)


LOOP = (HLO / "loop.hlo").read_text()


@pytest.mark.parametrize("was, becomes, trips", TABLES["trips"])
def test_trips_are_counted_from_constants_in_the_carried_tuple(was, becomes, trips, monkeypatch):
    monkeypatch.setattr("llmpar.inspect.hlo.MAX_TRIPS", 100)
    text = LOOP.replace(was, becomes) if was else LOOP
    assert becomes in text
    if trips < 0:
        assert [(c.count, c.per_turn) for c in census_hlo(text, ABSTRACT)] == [(1, "an unnamed line")]
    else:
        assert [c.count for c in census_hlo(text, ABSTRACT)] == ([trips] if trips else [])


def test_the_source_is_the_line_that_asked():
    mesh = make_mesh(tp=8)

    def helper(x):
        return lax.psum(x, "tp")  # HERE

    with open(__file__) as file:
        (line,) = [i for i, text in enumerate(file, 1) if text.endswith("# HERE\n")]
    f = jax.checkpoint(
        lambda x: lax.scan(lambda x, _: (lax.pcast(helper(x), "tp", to="varying"), None), x, length=3)[0]
    )
    for (c,) in three_censuses(lower(f, mesh, P("tp"), P("tp"), jnp.ones((8,))), mesh):
        assert (c.source, c.count) == (f"tests/test_hlo.py:{line}", 3)
        assert reading.arrow_text([c]).startswith(c.source) and "partitioner" not in reading.arrow_text([c])
    assert reading.arrow_text([replace(c, source="")]).startswith("(the partitioner's)")


def test_a_cell_of_a_notebook_is_known_by_its_number():
    """Its file has a name that differs from run to run."""
    shell = InteractiveShell.instance()
    try:
        shell.run_cell("import jax\ndef added(x):\n    return jax.lax.psum(x, 'a')", store_history=True)
        mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
        program = jax.jit(jax.shard_map(shell.user_ns["added"], mesh=mesh, in_specs=P("a"), out_specs=P()))
        (c,) = census_hlo(partitioned_hlo(program.lower(jnp.ones(4))), mesh)
        assert c.source == "In[1]:3"
    finally:
        InteractiveShell.clear_instance()


def test_executed_flops_of_scanned_matmuls_are_the_closed_form():
    mesh = make_mesh(tp=8)

    def f(ws, x):
        step = lambda x, w: (lax.cond(x[0, 0] > 0, lambda x: x @ w @ w, lambda x: x @ w, x), None)
        x = lax.scan(step, x, ws)[0]
        return jnp.einsum("bsm,bdm->bsd", x[None], ws[:1]), x @ lax.fori_loop(0, 3, lambda i, y: y @ y, ws[0])

    specs = (P(), P("tp"))
    lowered = lower(
        f, mesh, specs, (P(None, "tp"), P("tp")), jnp.ones((5, 16, 16)), jnp.ones((64, 16))
    ).lower()
    rows = 2 * 8 * 16 * 16  # per device
    expected = 5 * 2 * rows + rows + 3 * 2 * 16**3 + rows
    assert reading.executed_flops(partitioned_hlo(lowered)) == expected
    assert reading.executed_flops(lowered.compile().as_text()) == expected
    unknown = jax.jit(lambda x, n: lax.fori_loop(0, n, lambda i, x: x @ x, x)).lower(jnp.ones((8, 8)), 3)
    with pytest.raises(ValueError, match="it runs dot"):
        reading.executed_flops(unknown.compile().as_text())
