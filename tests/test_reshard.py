"""The cheaper way between two layouts: what is promised is what the compiled moves send."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax.sharding import AxisType, Mesh, NamedSharding

from llmpar.inspect.census import census_hlo, partitioned_hlo
from llmpar.inspect.look import look
from llmpar.inspect.moves import cheapest_moves

MESHES = dict(X=4, Y=2), dict(X=2, Y=4), dict(A=2, B=2, C=2)


def mesh(sizes, kind=AxisType.Auto):
    grid = np.array(jax.devices()).reshape(*sizes.values())
    return Mesh(grid, tuple(sizes), axis_types=(kind,) * len(sizes))


def layout(rng, rank, names):
    """Random axes on random dims; some on none."""
    cuts = [[] for _ in range(rank + 1)]
    for axis in rng.sample(sorted(names), len(names)):
        rng.choice(cuts).append(axis)
    return tuple(map(tuple, cuts[:rank]))


def moves(on, before, path, shape):
    """A function by which a value takes these layouts one after another, and its argument."""
    explicit = on.axis_types[0] == AxisType.Explicit
    move = jax.sharding.reshard if explicit else lax.with_sharding_constraint
    first, *rest = (NamedSharding(on, P(*(axes or None for axes in cuts))) for cuts in (before, *path))

    def moved(x):
        for sharding in rest:
            x = move(x, sharding)
        return x

    return moved, jax.ShapeDtypeStruct(shape, jnp.float32, sharding=first)


def sent(on, before, path, shape):
    """The bytes that a device sends then, as compiled."""
    moved, x = moves(on, before, path, shape)
    return sum(c.bytes_sent for c in census_hlo(partitioned_hlo(jax.jit(moved).lower(x)), on))


PAIRS = [*range(12), *(pytest.param(i, marks=pytest.mark.nightly) for i in range(12, 200))]


@pytest.mark.parametrize("seed", PAIRS)
def test_the_cheapest_moves_compile_to_the_promised_bytes_and_look_promises_no_more_than_xla_sends(seed):
    """XLA can also cut an axis in parts, for which a PartitionSpec has no words: then nothing is promised."""
    rng = random.Random(seed)
    sizes, shape = rng.choice(MESHES), (16, 32, 8)[: rng.choice([2, 3])]
    before, after = (layout(rng, len(shape), sizes) for _ in range(2))
    steps = cheapest_moves(before, after, shape, 4, tuple(sizes.items()))
    promised, path = sum(step.bytes_sent for step in steps), tuple(step.cuts for step in steps)
    if before == after:
        assert (promised, path) == (0, ())
        return
    on = mesh(sizes, [AxisType.Auto, AxisType.Explicit][seed % 2])
    moved, x = moves(on, before, [after], shape)
    seen = look(moved, x)
    of_xla = sum(row["bytes_sent"] for row in seen.rows)
    assert sent(on, before, path, shape) == promised and path[-1] == after
    cheaper = [(row["bytes_sent"], row["instead_of"]) for row in seen.cheaper]
    assert cheaper == [(promised, of_xla)] * (promised < of_xla)


def test_look_shows_the_cheaper_way_and_its_expression_sends_what_it_says():
    on = mesh(MESHES[0])
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=NamedSharding(on, P("X")))
    f = lambda x: lax.with_sharding_constraint(x, NamedSharding(on, P(None, "Y")))
    seen = look(f, x)
    (row,) = seen.document()["cheaper"]
    assert (row["bytes_sent"], row["instead_of"], row["count"]) == (192, 384, 1)
    assert "192 B, not 384 B" in str(seen) and row["source"] in str(seen)
    with jax.set_mesh(on):
        cured = look(lambda x: eval(row["expression"], {"jax": jax, "P": P, "x": x}), x)
    assert sum(r["bytes_sent"] for r in cured.rows) == 192 and not cured.cheaper
