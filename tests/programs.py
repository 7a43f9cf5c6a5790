"""Programs as the documents of JAX, its training cookbook and the scaling book show them, written for tests.

``build(mesh)`` gives the function, its arguments, and the same in NumPy. What a line must send is counted
by hand beside it, ``# sends KIND AXES COUNT: BYTES`` per device: a ring of g moves (g-1)/g of a message, a
permute all of it. Rows of one line are joined by ``|``; ``a turn`` stands in a loop of unknown turns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P


def on(axes, kind=AxisType.Auto, order=range(8), context=True):
    """Its axes, who decides, the order of devices; whether the mesh is in context (`jax.set_mesh`)."""

    def place(build):
        def mesh():
            names, sizes = zip(*(axis.split("=") for axis in axes.split()), strict=True)
            devices = np.array(jax.devices())[list(order)].reshape([int(n) for n in sizes])
            return Mesh(devices, names, axis_types=(kind,) * len(names))

        build.mesh, build.context = mesh, context
        return build

    return place


def put(mesh, shape, *spec, dtype=jnp.float32):
    """An array of small numbers that lies as ``spec`` says."""
    values = np.sin(np.arange(np.prod(shape))).reshape(shape)
    return jax.device_put(jnp.asarray(values, dtype), NamedSharding(mesh, P(*spec)))


explicit = functools.partial(on, kind=AxisType.Explicit)
square = lambda x: (x**2).sum()
ring = lambda n: [(i, (i + 1) % n) for i in range(n)]


@explicit("X=8")
def left_unfinished(mesh):
    """The result itself is an unfinished sum: nothing is sent, and every device holds all of f32[4, 6]."""
    f = lambda x, w: jnp.einsum("bm,bd->md", x, w, out_sharding=P(unreduced={"X"}))
    return f, (put(mesh, (8, 4), "X"), put(mesh, (8, 6), "X")), None


@explicit("data=8")
def weights_reduced(mesh):
    """The cotangent of reduced is unreduced: of two microbatches' gradients one all-reduce is left."""

    def f(w, x, y):
        loss = lambda w, x: square(jnp.tanh(x @ w))
        w = reshard(w, P(reduced={"data"}))
        g = jax.grad(loss)(w, x) + jax.grad(loss)(w, y)  # sends all-reduce data 1: 2*7/8 * 4*4*6
        return reshard(g, P())

    args = put(mesh, (4, 6)), put(mesh, (8, 4), "data"), put(mesh, (16, 4), "data")
    loss = lambda w, x, y: square(jnp.tanh(x @ w)) + square(jnp.tanh(y @ w))
    return f, args, jax.grad(loss)


@explicit("data=4 model=2")
def cookbook_step(mesh):
    """SGD over two blocks in a scan, whose state is `jax.Ref`s: sums over model, gradients' over data."""
    state = {"a": put(mesh, (2, 6, 8), None, None, "model"), "b": put(mesh, (2, 8, 6), None, "model", None)}
    refs, x = jax.tree.map(jax.new_ref, state), put(mesh, (8, 6), "data")

    def loss(w, x):
        def block(h, w):
            m = jnp.dot(h, w["a"], out_sharding=P("data", "model"))
            # sends all-reduce model 2: 2 * 2*1/2 * 4*2*6 | all-reduce data 2: 2 * 2*3/4 * 4*6*4
            y = jnp.dot(jnp.tanh(m), w["b"], out_sharding=P("data", None))
            # sends all-reduce model 2: 2 * 2*1/2 * 4*2*6 | all-reduce data 2: 2 * 2*3/4 * 4*4*6
            return y, None

        return jnp.mean(lax.scan(block, x, w)[0] ** 2)  # sends all-reduce data 1: 2*3/4 * 4

    def f(refs, x):
        value, grads = jax.value_and_grad(loss)(jax.tree.map(lambda r: r[...], refs), x)
        for name, grad in grads.items():
            refs[name][...] -= 0.1 * grad
        return value

    return f, (refs, x), lambda refs, x: loss_of_two(state, x)


def loss_of_two(w, x):
    for i in range(2):
        x = np.tanh(x @ np.asarray(w["a"][i])) @ np.asarray(w["b"][i])
    return (x**2).mean()


@on("X=4 Y=2")
def partly_manual(mesh):
    """X by hand, Y the partitioner's: its half sums of f32[8/4, 6], and the hand's sum of f32[2, 6]."""

    def f(x, w):
        def body(x, w):
            y = x @ w  # sends all-reduce Y 1: 2*1/2 * 4*2*6
            return lax.psum(y, "X")  # sends all-reduce X 1: 2*3/4 * 4*2*6

        inside = jax.shard_map(body, in_specs=(P("X"), P()), out_specs=P(), axis_names={"X"})
        return inside(x, w)

    args = put(mesh, (8, 4), "X", "Y"), put(mesh, (4, 6), "Y")
    return f, args, lambda x, w: (x @ w).reshape(4, 2, 6).sum(0)


@on("X=4 Y=2")
def nested(mesh):
    """Outside X, inside Y: gather f32[8/4, 6] of halves, then sum the four blocks."""

    def f(x):
        def inner(x):
            return lax.psum(x, "Y")  # sends all-reduce Y 1: 2*1/2 * 4*2*3

        def outer(x):
            y = jax.shard_map(inner, in_specs=P(None, "Y"), out_specs=P(), axis_names={"Y"})(x)
            return lax.psum(y, "X")  # sends all-reduce X 1: 2*3/4 * 4*2*3

        return jax.shard_map(outer, in_specs=P("X"), out_specs=P(), axis_names={"X"})(x)

    return f, (put(mesh, (8, 6), "X", "Y"),), lambda x: x.reshape(4, 2, 2, 3).sum((0, 2))


@on("replica=2 fsdp=2 expert=2")
def experts(mesh):
    """Tokens bf16[4, 6] go to their expert and back; the expert's weight is summed over a ring of 4."""

    def f(w, x):
        def loss(w, x):
            sent = lax.all_to_all(x, "expert", 0, 0, tiled=True)  # sends all-to-all expert 1: 1/2 * 2*4*6
            done = jnp.tanh(sent @ w[0].astype(jnp.bfloat16))
            back = lax.all_to_all(done, "expert", 0, 0, tiled=True)
            # sends all-to-all expert 2: 2 * 1/2 * 2*4*6
            return square(back.astype(jnp.float32))

        def body(w, x):
            g = jax.grad(loss)(lax.pcast(w, ("replica", "fsdp"), to="varying"), x)
            return lax.psum(g, ("replica", "fsdp"))  # sends all-reduce replica,fsdp 1: 2*3/4 * 4*6*6

        everywhere = P(("replica", "fsdp", "expert"))
        return jax.shard_map(body, in_specs=(P("expert"), everywhere), out_specs=P("expert"))(w, x)

    x = put(mesh, (32, 6), ("replica", "fsdp", "expert"), dtype=jnp.bfloat16)
    return f, (put(mesh, (2, 6, 6), "expert"), x), None


@on("fsdp=8")
def fsdp_by_hand(mesh):
    """A gather of f32[8, 8] for each of two layers, again in the backward pass (remat), and its transpose."""

    def f(ws, x):
        @jax.checkpoint
        def layer(x, w):
            whole = lax.all_gather(w, "fsdp", tiled=True)
            # sends all-gather fsdp 4: 4 * 7/8 * 4*8*8 | reduce-scatter fsdp 2: 2 * 7/8 * 4*8*8
            return jnp.tanh(x @ whole), None

        def body(ws, x):
            return lax.psum(square(lax.scan(layer, x, ws)[0]), "fsdp")  # sends all-reduce fsdp 1: 2*7/8 * 4

        specs = P(None, "fsdp"), P("fsdp")
        return jax.value_and_grad(jax.shard_map(body, in_specs=specs, out_specs=P()))(ws, x)

    args = put(mesh, (2, 8, 8), None, "fsdp"), put(mesh, (16, 8), "fsdp")
    loss = lambda ws, x: square(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]))
    return f, args, jax.value_and_grad(loss)


@on("i=8")
def until_it_is_small(mesh):
    """Nobody knows how many turns: per turn the average of f32[2], and the scalar that ends the loop."""

    def f(x):
        def body(x):
            def go_on(state):
                return lax.psum(square(state), "i") > 0.1  # sends a turn all-reduce i 1: 2*7/8 * 4

            def halve(state):
                return state / 2 - lax.pmean(state, "i") / 4  # sends a turn all-reduce i 1: 2*7/8 * 4*2

            return lax.while_loop(go_on, halve, x)

        return jax.shard_map(body, in_specs=P("i"), out_specs=P("i"))(x)

    def want(x):
        rows = x.reshape(8, 2)
        while (rows**2).sum() > 0.1:
            rows = rows / 2 - rows.mean(0) / 4
        return rows.ravel()

    return f, (put(mesh, (16,), "i"),), want


@on("i=4 j=2")
def groups_and_trees(mesh):
    """Two pairs among four of i (no axis spans them), and a tree of f32[2] and f32[2, 3] over j."""

    def f(x, y):
        def body(x, y):
            pair = lax.all_gather(x, "i", axis_index_groups=[[0, 1], [2, 3]], tiled=True)
            # sends all-gather other 1: 1/2 * 4*4
            both = lax.psum({"x": x, "y": y}, "j")
            # sends all-reduce j 2: 2*1/2 * 4*2 + 2*1/2 * 4*2*3
            return pair, both["x"], both["y"]

        return jax.shard_map(body, in_specs=P("i"), out_specs=P("i"), check_vma=False)(x, y)

    def want(x, y):
        pairs = x.reshape(2, 1, 4).repeat(2, 1)
        return pairs.ravel(), 2 * x, 2 * y

    return f, (put(mesh, (8,), "i"), put(mesh, (8, 3), "i")), want


@on("data=2 model=4")
def nnx_step(mesh):
    """A module's weights: hidden f32[6, 16/4]; forward over model, two gradients and the loss over data."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(6, 16, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(16, 3, use_bias=False, rngs=rngs)

        def __call__(self, x):
            h = jnp.tanh(self.up(x))  # sends all-reduce data 1: 2*1/2 * 4*6*4
            return self.down(h)
            # sends all-reduce model 1: 2*3/4 * 4*4*3 | all-reduce data 1: 2*1/2 * 4*4*3

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    lie = {"up": P(None, "model"), "down": P("model", None)}
    put_there = lambda path, v: jax.device_put(v, NamedSharding(mesh, lie[path[0].key]))
    state = jax.tree_util.tree_map_with_path(put_there, state)

    @nnx.jit
    def f(state, x):
        loss = lambda s: jnp.mean(nnx.merge(graph, s)(x) ** 2)  # sends all-reduce data 1: 2*1/2 * 4
        return jax.value_and_grad(loss)(state)

    return f, (state, put(mesh, (8, 6), "data")), f


PROGRAMS = [f for f in list(vars().values()) if hasattr(f, "mesh") and hasattr(f, "context")]
