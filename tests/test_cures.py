"""A line that fixes a layout: what `look` advises, written into the program, sends what it says."""

import inspect
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from llmpar.inspect.look import look

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def on(shape, *cut, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, P(*cut)))


def looked_up(table, tokens, up):
    x = table[tokens]  # both have the axis data: of rows and of columns
    h = jnp.tanh(x @ up)
    return (h**2).mean()


def one_hot(table, tokens):
    hot = jax.nn.one_hot(tokens, 512)
    return jnp.tanh(hot @ table).mean()


def broadcast(x, bias, w):
    wide = (x @ w)[:, None, :] + bias[None, :, None]
    return jnp.tanh(wide).sum()


def joined(x, y, w):
    both = jnp.concatenate([x, y], axis=1)
    return (both @ w).sum()


def weights_in_a_scan(ws, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]


def attention(x, wq, wo):
    q = jnp.einsum("bsd,dnh->bsnh", x, wq)
    scores = jax.nn.softmax(jnp.einsum("bsnh,btnh->bnst", q, q))
    out = jnp.einsum("bnst,btnh->bsnh", scores, q)
    out = out.reshape(*out.shape[:2], -1)
    return ((out @ wo) ** 2).mean()


TOKENS, HEAD = on((16, 32), "data", dtype=jnp.int32), on((128, 64), "model")
TABLE = on((512, 64), "model", "data"), TOKENS, on((64, 256), "data", "model")
x = on((16, 32, 64), "data")
CASES = [  # a program, the name to which it gives a layout ('' where no line helps), the share that is left
    (looked_up, TABLE, "x", 0.2),
    (one_hot, (on((512, 64), None, "data"), TOKENS), "hot", 0.2),
    (broadcast, (on((64, 64), "data"), on((128,), "data"), on((64, 64), None, "model")), "wide", 0.01),
    (joined, (on((32, 64), "data", "model"), on((32, 96), "data", "model"), on((160, 64), "model")), "", 1),
    (weights_in_a_scan, (on((4, 64, 64), "data"), on((32, 64), "data")), "ws", 0.4),
    (attention, (x, on((64, 8, 16), None, None, "model"), HEAD), "wq", 0.3),
]
CASES[3] = pytest.param(*CASES[3], marks=pytest.mark.long)  # every line is tried
CASES[4:] = [pytest.param(*case, marks=pytest.mark.nightly) for case in CASES[4:]]


def sum_of(seen):
    return sum(row["bytes_sent"] for row in seen.rows)


def with_line(f, cure, **names):
    """The function, compiled from its text with the line that is advised after the line that is named."""
    lines, first = inspect.getsourcelines(f)
    lines = textwrap.dedent("".join(lines)).splitlines(keepends=True)
    at = int(cure["source"].rpartition(":")[2]) - first + 1
    like = lines[at - (not lines[at - 1].lstrip().startswith("def "))]
    lines.insert(at, like[: len(like) - len(like.lstrip())] + cure["expression"] + "\n")
    exec("".join(lines), space := {**f.__globals__, **names})
    return space[f.__name__]


@pytest.mark.parametrize("f, args, name, share", CASES)
def test_a_line_is_advised_only_where_the_program_with_it_sends_what_is_promised(f, args, name, share):
    traced = sys.gettrace()
    with jax.set_mesh(MESH):
        seen = look(f, *args, cure=True)
        assert sys.gettrace() is traced and seen.cure.get("instead_of", sum_of(seen)) == sum_of(seen)
        assert seen.cure.get("expression", "").partition(" ")[0] == name
        assert bool(name) == ("cure: after tests/test_cures.py:" in str(seen)) != ("no line" in str(seen))
        if name:
            cured = look(with_line(f, seen.cure), *args)
            assert sum_of(cured) == seen.cure["bytes_sent"] <= share * seen.cure["instead_of"]
            assert cured.memory["peak_bytes"] == seen.cure["peak_bytes"] and cured.flops <= 1.1 * seen.flops


def for_the_command():
    f, args, *_ = CASES[1]
    return f, *args


def test_the_command_gives_the_line_as_data_and_refuses_a_text(monkeypatch, call, document, tmp_path):
    monkeypatch.chdir(Path(__file__).parent)
    cure = document(*"inspect --program test_cures:for_the_command --cure".split())["cure"]
    assert cure["expression"].startswith("hot = ") and 0 < cure["bytes_sent"] <= 0.2 * cure["instead_of"]
    (tmp_path / "text.hlo").write_text("HloModule text")
    status, _, err = call("inspect", "--hlo", str(tmp_path / "text.hlo"), "--mesh", "X=2", "--cure")
    assert status == 1 and "text.hlo: a cure is for functions of arrays" in err


@pytest.mark.long
def test_a_line_is_advised_inside_functions_that_jax_has_traced_before():
    loss = jax.jit(looked_up)  # the first look leaves it in JAX's caches
    step = lambda *args: jax.value_and_grad(lambda table: loss(table, *args[1:]))(args[0])
    with jax.set_mesh(MESH):
        seen = look(step, *TABLE, cure=True)
        cured = with_line(looked_up, seen.cure)
        again = lambda *args: jax.value_and_grad(lambda table: cured(table, *args[1:]))(args[0])
        assert sum_of(look(again, *TABLE)) == seen.cure["bytes_sent"] < 0.8 * sum_of(seen)


@pytest.mark.nightly
@pytest.mark.parametrize("build", programs.PROGRAMS, ids=lambda build: build.__name__)
def test_other_peoples_programs_get_no_line_that_sends_more_than_is_said(build):
    mesh = build.mesh()
    f, args, _ = build(mesh)
    with jax.set_mesh(mesh):
        if mesh.axis_types[0] != AxisType.Auto or build is programs.until_it_is_small:
            return  # refused, as below
        seen = look(f, *args, cure=True)
        if seen.cure:
            closed = [cell.cell_contents for cell in f.__closure__ or ()]
            space = dict(zip(f.__code__.co_freevars, closed, strict=True))
            assert sum_of(look(with_line(f, seen.cure, **space), *args)) == seen.cure["bytes_sent"]


def test_what_cannot_be_cured_is_refused():
    explicit = Mesh(MESH.devices, MESH.axis_names, axis_types=(AxisType.Explicit,) * 2)
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(explicit, P("data")))
    until = lambda x: lax.while_loop(lambda x: x.sum() > 0, lambda x: x - x.mean(), x)
    whole = jax.jit(until).lower(on((8, 4))).compile()
    for f, *given in ((lambda x: x.sum(), x), (until, on((8, 4), "data")), (whole,)):
        with pytest.raises(ValueError, match="on automatic axes, with loops of known"):
            look(f, *given, cure=True)
