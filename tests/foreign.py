"""Programs in the manner of other packages, which `llmpar.check` reads; foreign.md tells of others."""

import functools

import jax
import jax.numpy as jnp
from checked import mesh
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from programs import put


def linen_scanned():
    """As MaxText: logical axes, rules, remat, and a scan over layers."""
    import flax.linen as nn

    on = mesh(data=2, fsdp=2, tensor=2)
    rules = [("batch", ("data", "fsdp")), ("embed", "fsdp"), ("mlp", "tensor")]

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            cut = lambda *names: nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
            h = nn.Dense(32, use_bias=False, kernel_init=cut("embed", "mlp"))(nn.RMSNorm()(x))
            h = nn.with_logical_constraint(nn.silu(h), ("batch", None, "mlp"))
            h = nn.Dense(16, use_bias=False, kernel_init=cut("mlp", "embed"))(h)
            return nn.with_logical_constraint(x + h, ("batch", None, None)), None

    many = dict(variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    many |= dict(metadata_params={nn.PARTITION_NAME: "layers"})
    layers = nn.scan(nn.remat(Block, prevent_cse=False), **many)()
    x = put(on, (8, 4, 16), ("data", "fsdp"))
    with jax.set_mesh(on), nn.logical_axis_rules(rules):
        made = jax.eval_shape(layers.init, jax.random.key(0), x, None)
        lie = nn.logical_to_mesh_sharding(nn.get_partition_spec(made), on, rules)
        w = jax.jit(layers.init, out_shardings=lie)(jax.random.key(0), x, None)

    def f(w, x):
        with nn.logical_axis_rules(rules):
            return jax.grad(lambda w: (layers.apply(w, x, None)[0] ** 2).mean())(w)

    return on, f, w, x


def easylm_like_step():
    """As EasyLM: regular expressions say how weights lie, pjit with donated state, accumulation in a scan."""
    on = mesh(dp=2, fsdp=2, mp=2)
    w = {"wq": put(on, (16, 16), "fsdp", "mp"), "wo": put(on, (16, 16), "mp", "fsdp")}
    w |= {"scale": put(on, (16,))}
    x = put(on, (2, 8, 4, 16), None, ("dp", "fsdp"))

    @functools.partial(jax.jit, donate_argnums=0)
    def f(w, x):
        def loss(w, x):
            h = x * w["scale"]
            h = jax.lax.with_sharding_constraint(h @ w["wq"], P(("dp", "fsdp"), None, "mp"))
            return jnp.mean(jax.lax.with_sharding_constraint(h @ w["wo"], P(("dp", "fsdp"))) ** 2)

        add = lambda total, x: (jax.tree.map(jnp.add, total, jax.grad(loss)(w, x)), None)
        grads = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, w), x)[0]
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda w, g: w - g / norm, w, grads)

    return on, f, w, x


def built(name):
    """The mesh of the context or None, and (f, *arguments), of a program."""
    made = globals()[name]()
    return (made[0], made[1:]) if isinstance(made[0], Mesh) else (None, made)
