"""Runs programs that others wrote, and looks at each: what was read, what was refused and why, what broke.

    python tests/foreign.py                 # the programs below, of the packages that are installed
    python tests/foreign.py FILE.py ...     # other people's tests or scripts: every jitted call that succeeds

The second way replaces `jax.jit` before a file is imported. What was found stands in foreign.md.
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


def mesh(explicit=False, **axes):
    kind = AxisType.Explicit if explicit else AxisType.Auto
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
    return Mesh(devices.reshape(*axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def put(on, shape, *spec, dtype=jnp.float32):
    values = np.cos(np.arange(np.prod(shape))).reshape(shape)
    return jax.device_put(jnp.asarray(values, dtype), NamedSharding(on, P(*spec)))


def optax_muon():
    import optax

    on = mesh(explicit=False, fsdp=8)
    optimizer = optax.contrib.muon(0.1)
    w = {"a": put(on, (16, 8), "fsdp"), "b": put(on, (8,), "fsdp")}
    return optimizer.update, w, jax.jit(optimizer.init)(w), w


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
    helpers = {seen, watched, mesh, put, built, programs, main}
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
            seen(name, "", functools.partial(llmpar.look, *rest))


def main(files):
    if not files:
        programs()
    else:
        jax.jit = watched
    for file in files:
        if file.endswith("_test.py"):
            import pytest

            jax.config.parse_flags_with_absl()
            options = f"-q -c {os.devnull} -W ignore -p no:cacheprovider --no-header --tb=no"
            pytest.main([*options.split(), file])
        else:
            runpy.run_path(file, run_name="__main__")
    kinds = collections.Counter(what.partition(":")[0] for what in SEEN.values())
    for what, count in collections.Counter(x for x in SEEN.values() if x != "read").most_common():
        where = next(name for (name, _), x in SEEN.items() if x == what)
        print(f"{count} × {what[:400]}   ({where})")
    print(f"{len(SEEN)} programs: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()))
    return "TRACEBACK" in kinds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
