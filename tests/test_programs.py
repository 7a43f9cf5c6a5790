"""Programs of other people's kinds: what lies where, what each line sends, and that the values are right."""

import contextlib
import inspect
import re
from collections import Counter
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
            rows[*key, "bytes"] += eval(re.sub(r"\d+", r"F(\g<0>)", sent), {"F": Fraction})
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
