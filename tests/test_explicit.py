"""The fourth mode, layouts as JAX's types: they are the plan's, and the traffic is Manual's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, reshard
from parity import BATCH, LLAMA, MOE, SEQ, name

from llmpar.inspect.types import types
from llmpar.parallel.mesh import as_type, explicit, from_type, make_mesh
from llmpar.parallel.partitioned import Explicit
from llmpar.plan.plan import Plan

MIXED = "dp=2 fsdp=2 tp=2"
spread = functools.partial(Plan, mode="explicit")
DENSE = [
    spread("dp=8", zero=0, reduce="layer"),
    spread("fsdp=2 sp=2 tp=2", tp_sequence=True, ffn_chunks=2, loss_chunks=2, remat="block"),
    spread("sp=2 tp=2", context_parallel="ulysses", zero_axes="fsdp", unroll=0),
]
EXPERTS = [spread("dp=2 ep=2 sp=2", zero=2, context_parallel="gather", microbatches=2)]


@pytest.mark.parametrize("plan", DENSE + EXPERTS, ids=name)
def test_every_region_has_its_layout_as_type(plan):
    """Read back from the type (`from_type` is held against types that are written out below)."""
    config = MOE if plan in EXPERTS else LLAMA
    rows = types(config, plan, BATCH, SEQ)
    for row in rows:
        assert row["layout"] == row["type_says"], row
    regions = {row["value"].partition(" ")[0] for row in rows}
    inner = {"tokens", "experts"} if plan in EXPERTS else {"ffn"}
    assert regions >= {"data", "stream", "attention", "queries", "keys", "ids", "vocab", "gradient"} | inner
    assert ("experts" in regions) == (plan in EXPERTS)


def test_a_value_of_another_type_is_refused_by_the_arrow():
    plan = spread(MIXED)
    par = Explicit(plan.resolve(), explicit(make_mesh(plan.mesh)))
    with jax.set_mesh(par.mesh):
        x = jax.device_put(jnp.zeros((8, 4, 4)), NamedSharding(par.mesh, PartitionSpec("dp")))
        with pytest.raises(
            ValueError, match=r"'stream b s d' is 'b/dp,fsdp s d' here, but the type float32\[8@dp,4,4\]"
        ):
            jax.jit(lambda x: par.move(x, "stream b s d -> ffn b s d"))(x)


def test_a_layout_is_read_from_a_tracer_with_its_unfinished_sums():
    seen = []

    def f(x, w):
        y = jnp.matmul(x, w, out_sharding=PartitionSpec("dp", None, unreduced={"tp"}))
        seen.extend([from_type(x, "bm"), from_type(y, "bd")])
        return reshard(y, PartitionSpec("dp", None))

    mesh = explicit(make_mesh(MIXED))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((4, 8)), PartitionSpec("dp", "tp"))
        w = jax.device_put(jnp.ones((8, 4)), PartitionSpec("tp", None))
        np.testing.assert_array_equal(jax.jit(f)(x, w), jnp.full((4, 4), 8.0))
    assert list(map(str, seen)) == ["b/dp m/tp", "b/dp d +tp"]
    specs = PartitionSpec("dp", "tp"), PartitionSpec("dp", None, unreduced={"tp"})
    assert tuple(map(as_type, seen)) == specs


def test_a_type_inside_shard_map_tells_no_layout():
    x = jnp.zeros((8, 8))
    mesh = explicit(make_mesh("dp=2"))
    inside = lambda x: x * len(str(from_type(x)))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="tells no layout inside shard_map"):
        jax.shard_map(inside, in_specs=PartitionSpec("dp"), out_specs=PartitionSpec("dp"))(
            jax.device_put(x, PartitionSpec("dp"))
        )
