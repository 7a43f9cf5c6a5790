"""Programs of other people's kinds: what lies where, what each line sends, and that the values are right."""

import contextlib
import inspect
import math
import random
import re
from collections import Counter
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax.sharding import Mesh
from programs import PROGRAMS

from llmpar import look
from llmpar.parallel.mesh import from_type, sharding

ROW = re.compile(r"(a turn )?([a-z-]+) (\S+) (\d+): ([-+*/\d ]+)")


@pytest.fixture(autouse=True)
def as_people_run(standard_promotion):
    with jax.numpy_rank_promotion("allow"):
        yield


def declared(build) -> Counter:
    """The rows that a program's lines declare: (line, collective, axes, of one turn) to times and bytes."""
    rows, code = Counter(), 0
    lines, first = inspect.getsourcelines(build)
    for number, line in enumerate(lines, first):
        before, _, said = line.partition("# sends ")
        code = number if before.strip() else code
        for row in said.split(" | ") if said else ():
            turn, kind, axes, count, sent = ROW.fullmatch(row.strip()).groups()
            key = f"programs.py:{code}", kind, axes, bool(turn)
            rows[*key, "count"] += int(count)
            rows[*key, "bytes"] += eval(re.sub(r"\d+", r"Fraction(\g<0>)", sent))
    return rows


def found(f, args) -> Counter:
    """The same, as `look` reads the program."""
    rows = Counter()
    for row in look(f, *args).rows:
        key = row["source"].split("/")[-1], row["collective"], ",".join(row["axes"]), bool(row["per_turn"])
        rows[*key, "count"] += row["count"]
        rows[*key, "bytes"] += row["bytes_sent"]
    return rows


def lie_as_said(tree) -> int:
    """Compare `from_type` of every array with JAX's own sharding; give their number."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and hasattr(x.sharding, "spec")]
    for x in arrays:
        layout, spec = from_type(x), x.sharding.spec
        assert set(layout.sums) == set(getattr(spec, "unreduced", ())), (str(layout), spec)
        if not layout.sums:
            assert sharding(x.sharding.mesh, layout).is_equivalent_to(x.sharding, x.ndim), (str(layout), spec)
    return len(arrays)


@pytest.mark.parametrize("build", PROGRAMS, ids=lambda build: build.__name__)
def test_a_program_is_read_right(build):
    mesh = build.mesh()
    with jax.set_mesh(mesh) if build.context else contextlib.nullcontext():
        f, args, want = build(mesh)
        assert found(f, args) == declared(build)
        result = jax.jit(f)(*args)
        assert lie_as_said((args, result))
    if want:
        special = lambda x: isinstance(x, jax.Ref) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        on_one = lambda x: x if special(x) else np.asarray(x)
        same = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
        jax.tree.map(same, result, want(*jax.tree.map(on_one, args)))


def random_mesh(rng):
    """2, 4 or 8 devices in any order on up to three axes, of size one too."""
    every = [(8,), (4, 2), (2, 4), (2, 2, 2), (1, 8), (4, 1), (2, 1, 2), (2, 3), (3,), (1, 5), (7,)]
    sizes = rng.choice(every)
    devices = rng.sample(jax.devices(), math.prod(sizes))
    return Mesh(np.array(devices).reshape(sizes), rng.sample(["x", "rows", "Z", "a1", "data"], len(sizes)))


def random_body(rng, mesh, depth, differentiable):
    """A function of a local f32[840, 2] to its shape, and what it sends, counted while it is made."""
    rows = 840
    steps, sent = [], Counter()
    for _ in range(rng.randint(1, 3)):
        kinds = ["sum", "gather", "stack", "scatter", "exchange", "permute"]
        kinds += ["maximum"] * (not differentiable)
        kind = rng.choice(kinds + ["scan", "fori", "cond", "jit"] * (depth > 0))
        if kind in ("scan", "fori", "cond", "jit"):
            bodies = [random_body(rng, mesh, depth - 1, differentiable) for _ in range(1 + (kind == "cond"))]
            (inner, inside), *other = bodies
            times = rng.randint(0, 3) if kind in ("scan", "fori") else 1
            if kind == "cond":
                total = [sum(n for (*_, what), n in s.items() if what == "bytes") for _, s in bodies]
                if total[0] == total[1]:
                    continue  # which one counts would be a matter of taste
                inside = bodies[total.index(max(total))][1]
            steps.append(around(kind, inner, times, other and other[0][0]))
            for key, n in inside.items():
                sent[key] += n * times
            continue
        axes = rng.sample(mesh.axis_names, rng.randint(1, len(mesh.axis_names)))
        group = math.prod(mesh.shape[a] for a in axes)
        dtype = rng.choice([jnp.float32, jnp.bfloat16] + [jnp.int32, jnp.uint8] * (not differentiable))
        if kind == "permute":  # JAX counts its places in the order of the mesh
            axes.sort(key=mesh.axis_names.index)
        pairs = list(zip(range(group), rng.sample(range(group), group), strict=True))
        pairs = rng.sample(pairs, rng.randint(1, group))
        steps.append(one_step(kind, tuple(axes), group, dtype, pairs))
        message = Fraction(jnp.dtype(dtype).itemsize * rows * 2)
        share = Fraction(group - 1, group)
        name, moved = {
            "sum": ("all-reduce", 2 * share * message),
            "maximum": ("all-reduce", 2 * share * message),
            "gather": ("all-gather", share * message * group),
            "stack": ("all-gather", share * message * group),
            "scatter": ("reduce-scatter", share * message),
            "exchange": ("all-to-all", share * message),
            "permute": ("collective-permute", message),
        }[kind]
        over = [a for a in mesh.axis_names if a in axes and mesh.shape[a] > 1]
        if kind == "permute":  # along which axes does a pair differ?
            places = np.array(np.unravel_index(np.array(pairs), [mesh.shape[a] for a in axes]))
            over = [a for a in over if (places[axes.index(a)][:, 0] != places[axes.index(a)][:, 1]).any()]
        if over:
            sent[name, ",".join(over), "count"] += 1
            sent[name, ",".join(over), "bytes"] += math.ceil(moved)
    return (lambda x, flag: run(steps, x, flag)), sent


def run(steps, x, flag):
    for step in steps:
        x = step(jnp.sin(x + 1), flag)
    return x


def one_step(kind, axes, group, dtype, pairs):
    def whole(y):
        every = lax.all_gather(y, axes, tiled=kind == "gather").reshape(group, *y.shape)
        return jnp.sin(every.astype(jnp.float32)).sum(0)

    act = {
        "sum": lambda y: lax.psum(y, axes),
        "maximum": lambda y: lax.pmax(y, axes),
        "scatter": lambda y: jnp.tile(lax.psum_scatter(y, axes, tiled=True), (group, 1)),
        "exchange": lambda y: lax.all_to_all(y, axes, 0, 0, tiled=True),
        "permute": lambda y: lax.ppermute(y, axes, pairs),
    }.get(kind, whole)
    return lambda x, flag: act((x * 3).astype(dtype)).astype(jnp.float32)


def around(kind, inner, times, other):
    turns = jnp.arange(times, dtype=jnp.float32)
    return {
        "scan": lambda x, flag: lax.scan(lambda x, i: (inner(x * i, flag), None), x, turns)[0],
        "fori": lambda x, flag: lax.fori_loop(0, times, lambda i, x: inner(x, flag), x),
        "cond": lambda x, flag: lax.cond(flag, inner, other, x, flag),
        "jit": jax.jit(inner),
    }[kind]


TRANSPOSED = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}


@pytest.mark.parametrize("seed", range(6))
def test_random_bodies_send_what_was_counted_while_they_were_made(seed):
    """Every second one with its gradient, which sends the transposed of each collective."""
    rng = random.Random(seed)
    mesh = random_mesh(rng)
    body, sent = random_body(rng, mesh, 2, differentiable := seed % 2 == 1)
    if differentiable:
        back = Counter({(TRANSPOSED.get(kind, kind), *rest): n for (kind, *rest), n in sent.items()})
        sent = sent + back
        body = lambda x, flag, body=body: jax.value_and_grad(lambda x: jnp.sin(body(x, flag)).sum())(x)[1]
    everywhere = P(mesh.axis_names)
    f = jax.shard_map(body, mesh=mesh, in_specs=(everywhere, P()), out_specs=everywhere, check_vma=False)
    shape = jax.ShapeDtypeStruct((840 * mesh.size, 2), jnp.float32)
    seen = Counter()
    for (_, kind, axes, _, what), n in found(f, (shape, jax.ShapeDtypeStruct((), bool))).items():
        seen[kind, axes, what] += n
    assert seen == +sent, f"seed {seed}"
