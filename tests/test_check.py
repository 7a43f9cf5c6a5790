"""`check`: right programs are silent, and mistakes are found at their line with their kind."""

import contextlib
import dataclasses
import functools
import re
from collections import Counter

import foreign
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checked import OTHERS, PARTS, built, declared, made, mapped, numbers
from counted import calls
from jax.sharding import PartitionSpec as P
from programs import PROGRAMS
from shared import CASES, ROOT
from test_look import EXPLICIT
from test_programs import as_people_run  # noqa: F401 - of each test here, too

import llmpar
from llmpar.inspect.check import check
from llmpar.inspect.twin import cut_of
from llmpar.parallel.mesh import make_mesh
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.training.step import Step

GATE = {"random": 4, "planted": 10}
"""So many programs of each kind by default, and 100 and 200 in the nightly tests."""


@pytest.mark.parametrize("name", PARTS["right"])
def test_a_right_program_is_silent_and_its_bound_small(name):
    f, args = made("right", name)
    checked = check(f, None, *args)
    assert checked, str(checked)
    assert max(row["bound"] for row in checked.results) < 1e-3 and not checked.notes


MORE = [pytest.param(i, marks=pytest.mark.nightly) for i in range(GATE["random"], 100)]


@pytest.mark.parametrize("seed", [*range(GATE["random"]), *MORE])
def test_a_random_right_program_is_silent(seed):
    f, args, text, *_ = built(seed, plant=False)
    checked = check(f, None, *args)
    assert checked, f"{text}\n{checked}"


@pytest.mark.nightly
@pytest.mark.parametrize("build", PROGRAMS, ids=lambda build: build.__name__)
def test_programs_as_documents_show_them_are_silent(build):
    """Beside the same on one device, or themselves; some of these cannot run there, and are refused."""
    mesh = build.mesh()
    with jax.set_mesh(mesh) if build.context else contextlib.nullcontext():
        f, args, want = build(mesh)
        if any(isinstance(x, jax.Ref) for x in jax.tree.leaves(args)):
            return
        try:
            checked = check(f, want, *args)
        except ValueError as error:
            assert "give the function for one device as reference" in str(error)
            return
        assert checked, str(checked)


@pytest.mark.parametrize(
    "name", ["easylm_like_step", pytest.param("linen_scanned", marks=pytest.mark.nightly)]
)
def test_a_program_of_another_package_is_silent(name):
    mesh, (f, *args) = foreign.built(name)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        checked = check(f, None, *args)
    assert checked, str(checked)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["dp=2 tp=2", "fsdp=2 sp=2", "dp=2 ep=2"])
def test_the_model_under_a_plan_is_the_model_on_one_device(mesh):
    config = preset("tiny-moe" if "ep" in mesh else "tiny")
    config = dataclasses.replace(config, num_layers=1, vocab_size=64)
    many, one = (Step(config, Plan(m), make_mesh(m), optax.sgd(0.1)) for m in (mesh, "dp=1"))
    params = jax.device_get(one.init(0).params)
    tokens = np.arange(4 * 17, dtype=np.int32).reshape(4, 17) % 64
    batch = jax.tree.map(lambda x: np.resize(tokens, x.shape).astype(x.dtype), many.abstract_batch(4, 16))
    checked = check(many.gradients, one.gradients, params, batch)
    assert checked, str(checked)


@pytest.mark.parametrize("name", PARTS["wrong"])
def test_a_mistake_is_found_at_its_line_with_its_kind(name):
    f, args = made("wrong", name)
    line, kind, axis = declared(name)
    checked = check(f, None, *args)
    first = checked.findings[0]
    assert not checked and (first["kind"], first["axes"]) == (kind, axis.split(",")), str(checked)
    assert first["line"] == f"tests/checked.toml:{line}", str(checked)
    assert all(name in first["sentence"] for name in axis.split(","))


@pytest.mark.parametrize("name", OTHERS)
def test_another_right_program_is_silent_and_a_mistake_is_found_or_said_to_be_unknown(name):
    is_right, f, reference, args = OTHERS[name]
    checked = check(f, reference, *args)
    assert bool(checked) == is_right, str(checked)
    assert is_right or CASES["wrong_programs"][name] in str(checked), str(checked)


def verdict(seed) -> str:
    """Check a program with a planted mistake; the text of the program where it is not found."""
    f, args, text, line, what, kinds = built(seed)
    checked = check(f, None, *args)
    if checked or not checked.findings or checked.findings[0]["kind"] == "unknown":
        return f"not found: {what} in line {line}\n{text}\n{checked}"
    at, kind = int(checked.findings[0]["line"].rpartition(":")[2]), checked.findings[0]["kind"]
    if kind not in kinds or not line <= at <= line + 3:
        return f"wrong kind: {what} in line {line}\n{text}\n{checked}"
    return "found"


PLANTED = [range(GATE["planted"]), pytest.param(range(GATE["planted"], 200), marks=pytest.mark.nightly)]


@pytest.mark.parametrize("seeds", PLANTED, ids=str)
def test_planted_mistakes_are_found_and_none_has_a_wrong_kind(seeds):
    verdicts = [verdict(seed) for seed in seeds]
    counts = Counter(text.partition(":")[0] for text in verdicts)
    others = "\n".join(text for text in verdicts if text != "found")
    assert counts["wrong kind"] == 0 and counts["found"] >= 0.95 * len(seeds), others


def test_a_check_is_true_or_raises_with_its_report():
    f, args = made("wrong", "norm_counted")
    checked = check(f, None, *args)
    f, args = made("right", "norm_of_gradients")
    right = check(f, None, *args)
    right.raise_if_different()
    assert right and [x["name"] for x in right.results] == ["result", "gradient of [0]", "gradient of [1]"]
    with pytest.raises(AssertionError, match="counted once per tp"):
        checked.raise_if_different()
    assert "counted once per tp" in checked._repr_html_()
    table = right.table()  # of layouts that no type says
    assert re.search(r"f32\[16,32@tp\] +", table) and re.search(r"f32\[\] +psum", table)
    assert re.search(r"f32\[\], a term of a sum over tp +reduce_sum", table)


def test_a_gradient_alone_can_be_wrong_of_any_scalar():
    @jax.custom_vjp
    def shared(x):
        return x

    shared.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))
    f, args = made("right", "loss")
    for call in (f, lambda *xs: (xs[3].sum(), f(*xs)), lambda *xs: ((xs[0] > 0).sum(), f(*xs))):
        checked = check(lambda *xs: call(shared(xs[0]), *xs[1:]), call, *args)  # noqa: B023
        assert {row["name"] for row in checked.results if not row["equal"]} == {"gradient of [0]"}


def test_what_tells_little_is_said():
    notes = lambda f, x: check(mapped(f, dict(dp=8), P("dp"), P("dp")), f, x).notes
    half, ids = jnp.asarray(numbers(64, 64), "bfloat16"), jax.ShapeDtypeStruct((8, 4), "i4")
    assert notes(jnp.sin, numbers(8, 4)) == []
    assert "result has infinities or NaNs" in notes(jnp.log, numbers(8, 4))[0]
    assert "rounding may move result by" in notes(lambda x: jnp.argmax(x, 1), half)[0]
    assert "is tried with 0 and 1" in notes(jnp.square, ids)[0]


def test_explicit_axes_are_compared_with_a_reference_or_with_a_mesh_of_ones():
    on = lambda x, *cuts: jax.device_put(x, jax.NamedSharding(EXPLICIT, P(*cuts)))
    args = on(numbers(8, 16), "X"), on(numbers(16, 4), None, "Y")
    f = lambda x, w: jnp.tanh(x @ w).sum()
    assert check(f, f, *args)
    size = lambda x: jax.lax.pmean((x**2).mean(), "X")
    inner = jax.shard_map(size, mesh=EXPLICIT, in_specs=P("X", "Y"), out_specs=P(), check_vma=False)
    assert "a missing mean over Y" in str(check(lambda x, w: inner(x @ w), None, *args))


def test_what_cannot_run_on_one_device_needs_a_reference():
    perm = [(i, (i + 1) % 8) for i in range(8)]
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.shard_map(lambda x: jax.lax.ppermute(x, "i", perm), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    with pytest.raises(ValueError, match="mesh of ones .*; give the function for one device as reference"):
        check(f, None, numbers(8, 2))
    assert check(f, lambda x: jnp.roll(x, 1, 0), numbers(8, 2))
    assert "over i are in another order" in str(check(f, lambda x: x, numbers(8, 2)))


def test_a_program_of_one_row_for_each_rank_is_another_function_on_one_device_and_refused():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    on = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    own = on(lambda w, x: jax.lax.psum(jnp.tanh(x @ w[0]), "i"), in_specs=(P("i"), P()), out_specs=P())
    blocks = on(lambda x: jax.lax.psum(x, "i"), in_specs=P("i"), out_specs=P())
    ours = lambda w: jax.lax.pcast(w, "j", to="varying")[0]
    varying = lambda w, x: jax.lax.psum(jnp.tanh(x @ ours(w)).sum(0), ("i", "j"))
    two = jax.make_mesh((4, 2), ("i", "j"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    typed = jax.shard_map(varying, mesh=two, in_specs=(P("i"), P("j")), out_specs=P())
    for f, rows in ((own, 8), (typed, 4)):
        with pytest.raises(ValueError, match="each rank takes its only row of an argument"):
            check(f, None, numbers(rows, 4, 4), numbers(2, 4))
    with pytest.raises(ValueError, match="has shape .* give the function for one device as reference"):
        check(blocks, None, numbers(16, 3))
    assert check(blocks, lambda x: x.reshape(8, 2, 3).sum(0), numbers(16, 3))


def test_the_mistake_of_the_documents_is_found_from_the_terminal(monkeypatch, call, document):
    monkeypatch.chdir(ROOT / "tests" / "fixtures" / "mine")
    status, out, err = call("check", "norm:program", "norm:one_device", "--layouts")
    assert status == 1 and "mine/norm.py:12: counted once per tp" in out and "f32[16,32@tp]" in out
    assert err.startswith("llmpar: norm:program differs from one device: counted once per tp")
    assert document("check", "norm:mended")["mesh"] == {"dp": 2, "tp": 4}
    assert "norm:missing" in call("check", "norm:missing")[2]


def test_the_page_shows_what_is_printed(monkeypatch):
    text = (ROOT / "docs" / "check.md").read_text()
    (block,) = re.findall(r"It prints\n\n((?:    .*\n)+)", text)
    monkeypatch.syspath_prepend(ROOT / "tests" / "fixtures" / "mine")
    import norm

    f, *args = norm.program(jax.devices())
    printed = str(llmpar.check(f, norm.one_device, *args))
    without_bound = lambda text: re.sub(r"explains \S+", "", text)
    assert without_bound(printed) == without_bound(block.replace("\n    ", "\n").strip())


def test_a_value_on_six_axes_is_read_with_little_work():
    """Dims that are made whole in every order of each other were minutes for one value."""
    sizes = dict.fromkeys("abcdef", 2)
    whole = 1e6 * np.random.default_rng(0).normal(size=(2, 8, 8))
    local = whole.reshape(2, *[2] * 6).transpose(0, *range(6, 0, -1))  # dim 0 by f, e, d, and 1 by c, b, a
    found = []
    work = calls(lambda: found.append(cut_of(local.reshape(2, *[2] * 6, 1, 1), whole, sizes)))
    assert found[0].axes == dict.fromkeys("abc", 1) | dict.fromkeys("def", 0) and work < 100_000
