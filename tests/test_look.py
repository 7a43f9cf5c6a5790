"""`look` on programs that are not llmpar's: what they send, hold and lack, against counts by hand."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import llmpar


def make_mesh(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def lying(mesh, shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def test_a_product_over_a_cut_dim_is_one_all_reduce():
    mesh = make_mesh(X=4, Y=2)
    found = llmpar.look(lambda x, w: x @ w, lying(mesh, (64, 32), "Y", "X"), lying(mesh, (32, 16), "X"))
    (row,) = found.rows
    assert row["source"].startswith("tests/test_look.py:") and row["axes"] == ("X",)
    assert (row["arrow"], row["collective"], row["count"]) == ("b s +X -> b s", "all-reduce", 1)
    assert row["bytes_sent"] == 2 * 3 * 4 * 32 * 16 // 4  # 2(g-1)/g of a device's f32[32, 16]
    assert found.flops == 2 * 32 * 8 * 16 and found.mesh == {"X": 4, "Y": 2}
    assert found.memory["argument_bytes"] == 4 * (32 * 8 + 8 * 16)
    assert [(r["name"], r["axes"], r["saved"]) for r in found.replicated] == [
        ("out", ("X",), 4 * 32 * 16 * 3 // 4),
        ("in [1]", ("Y",), 4 * 8 * 16 // 2),
    ]
    assert f"{row['bytes_sent']:,} B" in str(found)
