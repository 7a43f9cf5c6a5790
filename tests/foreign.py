"""Runs programs that others wrote, and looks at each: what was read, what was refused and why, what broke.

    python tests/foreign.py                 # the programs below, of the packages that are installed
    python tests/foreign.py FILE.py ...     # other people's tests or scripts: every jitted call that succeeds

The second way replaces `jax.jit` before a file is imported: each program is looked at once for its shapes.
What was found on which versions stands in foreign.md; the packages go into an environment of their own.
"""

import collections
import contextlib
import functools
import os
import runpy
import sys
import traceback
import types

if "conftest" not in sys.modules:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "32", "PJRT_NPROC": "32"}

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import llmpar

SEEN: dict[tuple, str] = {}  # a program to 'read', or to the sentence or error instead


def seen(name, key, look):
    """Note how a look went: anything but a ValueError that this package raises is a traceback."""
    try:
        found = look()
        found.document(), str(found), found._repr_html_()
        SEEN[name, key] = "read"
        return found
    except Exception as error:
        ours = "/llmpar/" in traceback.extract_tb(error.__traceback__)[-1].filename
        kind = "refused" if ours and type(error) is ValueError else "TRACEBACK"
        SEEN[name, key] = f"{kind}: {type(error).__name__}: {error}"
        if kind == "TRACEBACK" and "-v" in sys.argv:
            traceback.print_exc()


class Watched:
    """A jitted function that is looked at before each first call with some shapes."""

    def __init__(self, jitted):
        self.jitted, self.shapes = jitted, set()
        with contextlib.suppress(AttributeError):
            functools.update_wrapper(self, jitted)

    def __getattr__(self, name):
        return getattr(self.jitted, name)

    def __get__(self, owner, kind=None):
        return self if owner is None else types.MethodType(self, owner)

    def __call__(self, *args, **kwargs):
        leaves = jax.tree.leaves((args, kwargs))
        shapes = str([(getattr(x, "shape", x), getattr(x, "sharding", None)) for x in leaves])
        name = f"{getattr(self.jitted, '__module__', '')}.{getattr(self.jitted, '__qualname__', self.jitted)}"
        new = shapes not in self.shapes and not any(isinstance(x, jax.core.Tracer) for x in leaves)
        self.shapes.add(shapes)
        if new:
            key = len(SEEN), shapes
            seen(name, key, lambda: llmpar.look(self.jitted, *args, **kwargs))
        try:
            return self.jitted(*args, **kwargs)
        except BaseException:
            if new:
                SEEN.pop((name, key), None)  # it fails by itself
            raise


jit = jax.jit


def watched(fun=None, **options):
    return Watched(jit(fun, **options)) if fun is not None else functools.partial(watched, **options)


# ---------------------------------------------------------------------------- programs of installed packages


def mesh(explicit=False, **axes):
    kind = AxisType.Explicit if explicit else AxisType.Auto
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
    return Mesh(devices.reshape(*axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def put(on, shape, *spec, dtype=jnp.float32):
    values = np.cos(np.arange(np.prod(shape))).reshape(shape)
    return jax.device_put(jnp.asarray(values, dtype), NamedSharding(on, P(*spec)))


def _ring(gradient):
    backend = types.SimpleNamespace(get_backend=lambda: jax.local_devices()[0].client)
    jax.lib.xla_bridge = backend  # it asks an old name for the platform
    from ringattention import ringattention_jax

    on, spec = mesh(dp=1, sp=4, tp=2), P("dp", "sp", "tp", None)
    blocks = dict(
        causal_block_size=1, deterministic=True, dropout_rng=None, attn_pdrop=0.0, dtype=jnp.float32
    )
    blocks |= dict(query_chunk_size=4, key_chunk_size=4, policy=jax.checkpoint_policies.nothing_saveable)
    blocks |= dict(precision=None, prevent_cse=True)
    body = lambda q, k, v: ringattention_jax(q, k, v, None, None, None, "sp", True, blocks)
    f = jax.shard_map(body, mesh=on, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    args = [put(on, (2, 32, 4, 8), *spec) for _ in "qkv"]
    return (jax.grad(lambda *a: f(*a).sum(), (0, 1, 2)) if gradient else f), *args


def ringattention_forward():
    return _ring(False)


def ringattention_gradient():
    return _ring(True)


def jaxdecomp_fft():
    from jaxdecomp import pfft3d

    on = mesh(z=2, y=4)
    return pfft3d, put(on, (16, 16, 16), "z", "y", dtype=jnp.complex64)


def jaxdecomp_halo():
    from jaxdecomp import halo_exchange

    on = mesh(z=2, y=4)
    f = lambda x: halo_exchange(x, halo_extents=(1, 1), halo_periods=(True, True))
    return f, put(on, (16, 16, 16), "z", "y")


def jaxdecomp_transpose():
    from jaxdecomp import transposeXtoY, transposeYtoZ

    on = mesh(z=2, y=4)
    return lambda x: transposeYtoZ(transposeXtoY(x)), put(on, (16, 16, 16), "z", "y")


def drjax_rounds():
    import drjax

    on = mesh(clients=8)

    @drjax.program(placements={"clients": 8})
    def f(w, data):
        grads = drjax.map_fn(
            lambda w, x: jax.grad(lambda w: ((x @ w) ** 2).sum())(w), (drjax.broadcast(w), data)
        )
        return w - 0.1 * drjax.reduce_mean(grads)

    return on, f, put(on, (4, 3)), put(on, (8, 5, 4), "clients")


def haliax_mlp():
    import haliax as hax

    on = mesh(data=4, model=2)
    B, D, M = hax.make_axes(batch=8, embed=16, mlp=32)
    net = hax.nn.MLP.init(D, D, M, 2, key=jax.random.key(0))
    rules = {"batch": "data", "mlp": "model"}

    def f(net, x):
        with hax.axis_mapping(rules):
            loss = lambda net: (hax.shard(net(hax.shard(x))) ** 2).mean().scalar()
            return hax.shard(__import__("equinox").filter_grad(loss)(net))

    return on, f, net, hax.random.normal(jax.random.key(1), (B, D))


def equinox_step():
    import equinox as eqx
    import optax

    on = mesh(batch=8)
    whole, cut = NamedSharding(on, P()), NamedSharding(on, P("batch"))
    model = eqx.nn.MLP(4, 3, 16, 2, key=jax.random.key(0))
    optimizer = optax.adam(1e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit(donate="all")
    def f(model, state, x):
        model, state = eqx.filter_shard((model, state), whole)
        x = eqx.filter_shard(x, cut)
        grads = eqx.filter_grad(lambda model: (jax.vmap(model)(x) ** 2).mean())(model)
        updates, state = optimizer.update(grads, state, model)
        return eqx.filter_shard((eqx.apply_updates(model, updates), state), whole)

    return f, *eqx.filter_shard((model, state), whole), put(on, (16, 4), "batch")


def scalax_fsdp():
    from scalax.sharding import FSDPShardingRule, MeshShardingHelper

    helper = MeshShardingHelper([-1, 2], ["fsdp", "tp"])
    rule = FSDPShardingRule(fsdp_axis_size=4, min_fsdp_size=1)
    shardings = dict(in_shardings=(rule, P()), out_shardings=rule, annotation_shardings={"x": P("fsdp")})

    @functools.partial(helper.sjit, **shardings)
    def f(w, x):
        x = MeshShardingHelper.with_sharding_annotation(x, "x")
        return jax.tree.map(lambda w, g: w - g, w, jax.grad(lambda w: ((x @ w["a"]) ** 2).mean())(w))

    return f, {"a": jnp.ones((8, 16))}, jnp.ones((8, 8))


def kfac_pmap():
    import kfac_jax

    f = lambda x: kfac_jax.utils.pmean_if_pmap(x, "i")
    return jax.pmap(f, axis_name="i"), jnp.ones((8, 3))


def haiku_pmap():
    import haiku as hk

    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 3])(x)))
    on = mesh(i=8)
    w = net.init(jax.random.key(0), jnp.ones((2, 4)))
    return jax.grad(lambda w, x: (net.apply(w, x) ** 2).mean()), w, put(on, (16, 4), "i")


def penzai_sharded():
    from penzai import pz
    from penzai.toolshed import sharding_util

    on = mesh(data=4, model=2)
    rules = {"batch": "data", "embed": "model"}
    x = sharding_util.name_to_name_device_put(pz.nx.ones({"batch": 8, "embed": 16}), on, rules)
    return lambda x: pz.nx.nmap(jnp.sum)(x.untag("embed")), x


def tunix_llama():
    from flax import nnx
    from tunix.models.llama3 import model as llama

    on = mesh(fsdp=4, tp=2)
    config = llama.ModelConfig.llama3p2_1b()
    small = dict(
        num_layers=2, vocab_size=64, embed_dim=16, hidden_dim=32, num_heads=4, head_dim=4, num_kv_heads=2
    )
    config = __import__("dataclasses").replace(config, **small)
    with jax.set_mesh(on):
        graph, state = nnx.split(llama.Llama3(config, rngs=nnx.Rngs(0)))
        state = jax.tree.map(jax.device_put, state, nnx.get_named_sharding(state, on))
    tokens = put(on, (8, 16), "fsdp", dtype=jnp.int32)

    def f(state, tokens):
        model, at = nnx.merge(graph, state), jnp.broadcast_to(jnp.arange(16), (8, 16))
        return model(tokens, at, None, jnp.ones((8, 16, 16), bool))[0]

    return on, jax.grad(lambda s, t: f(s, t).astype(jnp.float32).mean()), state, tokens


def tokamax_attention():
    import tokamax

    on = mesh(data=4, heads=2)
    spec = "data", None, "heads"
    f = lambda q, k, v: tokamax.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
    return f, *(put(on, (4, 8, 4, 8), *spec) for _ in "qkv")


def ott_sinkhorn():
    from ott.geometry import pointcloud
    from ott.solvers import linear

    on = mesh(points=8)
    f = lambda x, y: linear.solve(pointcloud.PointCloud(x, y)).matrix
    return f, put(on, (16, 3), "points"), put(on, (24, 3))


def jaxopt_lbfgs():
    import jaxopt

    on = mesh(rows=8)
    solver = jaxopt.LBFGS(lambda w, x: ((x @ w - 1) ** 2).mean(), maxiter=5)
    return lambda w, x: solver.run(w, x).params, put(on, (4,)), put(on, (16, 4), "rows")


def lineax_cg():
    import lineax

    on = mesh(rows=4)

    def f(a, b):
        solver = lineax.CG(rtol=1e-3, atol=1e-3)
        return lineax.linear_solve(
            lineax.MatrixLinearOperator(a, lineax.positive_semidefinite_tag), b, solver
        ).value

    return f, put(on, (8, 8), "rows"), put(on, (8,))


def diffrax_solve():
    import diffrax

    on = mesh(space=8)
    heat = lambda t, y, args: jnp.roll(y, 1) + jnp.roll(y, -1) - 2 * y
    solve = lambda y: diffrax.diffeqsolve(diffrax.ODETerm(heat), diffrax.Tsit5(), 0, 1, 0.1, y)
    return lambda y: solve(y).ys, put(on, (32,), "space")


def qwix_quantized():
    import qwix
    from flax import nnx

    on = mesh(data=4, model=2)
    net = nnx.Linear(
        8, 16, kernel_init=nnx.with_partitioning(nnx.initializers.ones, (None, "model")), rngs=nnx.Rngs(0)
    )
    rules = [qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)]
    x = put(on, (8, 8), "data")
    with jax.set_mesh(on):
        net = qwix.quantize_model(net, qwix.QtProvider(rules), x)
    graph, state = nnx.split(net)
    return on, lambda s, x: nnx.merge(graph, s)(x), state, x


def optax_muon():
    import optax

    on = mesh(explicit=False, fsdp=8)
    optimizer = optax.contrib.muon(0.1)
    w = {"a": put(on, (16, 8), "fsdp"), "b": put(on, (8,), "fsdp")}
    return optimizer.update, w, jax.jit(optimizer.init)(w), w


def optax_linesearch():
    import optax

    on = mesh(data=8)
    optimizer, x = optax.lbfgs(), put(on, (16, 4), "data")
    loss = lambda w, x: ((x @ w - 1) ** 2).mean()

    def f(w, state, x):
        value, grad = optax.value_and_grad_from_state(lambda w: loss(w, x))(w, state=state)
        updates, state = optimizer.update(
            grad, state, w, value=value, grad=grad, value_fn=lambda w: loss(w, x)
        )
        return optax.apply_updates(w, updates), state

    return f, (w := put(on, (4,))), optimizer.init(w), x


def nnx_train_step():
    import optax
    from flax import nnx

    on = mesh(data=4, model=2)

    class Net(nnx.Module):
        def __init__(self, rngs):
            cut = lambda *axes: nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)
            self.a = nnx.Linear(8, 16, kernel_init=cut(None, "model"), use_bias=False, rngs=rngs)
            self.b = nnx.Linear(16, 8, kernel_init=cut("model", None), use_bias=False, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.b(self.drop(nnx.relu(self.a(x)))))

    with jax.set_mesh(on):
        net = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(net, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def f(net, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda net: (net(x) ** 2).mean())(net)
        optimizer.update(net, grads)
        return loss

    return on, f, net, optimizer, put(on, (8, 8), "data")


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
    layers = nn.scan(
        nn.remat(Block, prevent_cse=False), metadata_params={nn.PARTITION_NAME: "layers"}, **many
    )()
    x = put(on, (8, 4, 16), ("data", "fsdp"))
    with jax.set_mesh(on), nn.logical_axis_rules(rules):
        made = jax.eval_shape(layers.init, jax.random.key(0), x, None)
        lie = nn.logical_to_mesh_sharding(nn.get_partition_spec(made), on, rules)
        w = jax.jit(layers.init, out_shardings=lie)(jax.random.key(0), x, None)

    def f(w, x):
        with nn.logical_axis_rules(rules):
            return jax.grad(lambda w: (layers.apply(w, x, None)[0] ** 2).mean())(w)

    return on, f, w, x


def stax_step():
    from jax.example_libraries import optimizers, stax

    on = mesh(batch=8)
    init, apply = stax.serial(stax.Dense(16), stax.Relu, stax.Dense(4), stax.LogSoftmax)
    start, update, params = optimizers.momentum(0.1, 0.9)
    state = start(init(jax.random.key(0), (-1, 6))[1])
    f = lambda i, s, x: update(i, jax.grad(lambda w: -apply(w, x).mean())(params(s)), s)
    return f, 0, state, put(on, (16, 6), "batch")


def easylm_like_step():
    """As EasyLM: regular expressions say how weights lie, pjit with donated state, accumulation in a scan."""
    on = mesh(dp=2, fsdp=2, mp=2)
    w = {
        "wq": put(on, (16, 16), "fsdp", "mp"),
        "wo": put(on, (16, 16), "mp", "fsdp"),
        "scale": put(on, (16,)),
    }
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


def built(*names):
    """The name, the mesh of the context, and (f, *arguments) of each program that can be made here."""
    helpers = {seen, watched, mesh, put, _ring, built, programs, main}
    builds = [f for f in globals().values() if isinstance(f, types.FunctionType) and f.__module__ == __name__]
    for build in (f for f in builds if f not in helpers and (not names or f.__name__ in names)):
        try:
            made = build()
        except Exception as error:  # not installed, or not of this JAX
            SEEN[build.__name__, ""] = f"skipped: {type(error).__name__}: {error}"
            continue
        on, *rest = made if isinstance(made[0], Mesh) else (None, *made)
        yield build.__name__, on, rest


def programs():
    for name, on, rest in built():
        with jax.set_mesh(on) if on else contextlib.nullcontext():
            found = seen(name, "", functools.partial(llmpar.look, *rest))
        if found and "-v" in sys.argv:
            print(found)


def main(files):
    if not files:
        programs()
    else:
        jax.jit = watched
    for file in files:
        if file.endswith("_test.py"):
            import pytest

            jax.config.parse_flags_with_absl()
            pytest.main(
                [
                    "-q",
                    "-c",
                    os.devnull,
                    "-W",
                    "ignore",
                    "-p",
                    "no:cacheprovider",
                    "--no-header",
                    "--tb=no",
                    file,
                ]
            )
        else:
            runpy.run_path(file, run_name="__main__")
    kinds = collections.Counter(what.partition(":")[0] for what in SEEN.values())
    for what, count in collections.Counter(x for x in SEEN.values() if x != "read").most_common():
        where = next(name for (name, _), x in SEEN.items() if x == what)
        print(f"{count} × {what[:400]}   ({where})")
    print(f"{len(SEEN)} programs: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()))
    return "TRACEBACK" in kinds


if __name__ == "__main__":
    sys.exit(main([a for a in sys.argv[1:] if a != "-v"]))
