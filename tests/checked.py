"""Parallel programs for `llmpar.check`, right ones and wrong ones, each in some ten lines.

A wrong program has a comment ``# wrong: KIND AXIS`` on the line where values part first. The arguments of a
body are ``x`` (8, 16), cut over dp; ``up`` (16, 32), cut over tp by columns, and ``down`` (32, 16) by rows;
``b`` (16,), the same everywhere; or what `over` says.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

RIGHT, WRONG = {}, {}
SPECS = {"x": P("dp"), "up": P(None, "tp"), "down": P("tp"), "b": P(), "w": P(), "ids": P("dp"), "n": P()}
SHAPES = {"x": (8, 16), "up": (16, 32), "down": (32, 16), "b": (16,), "w": (16, 16), "ids": (8,), "n": (16,)}


def mesh(**sizes):
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))])
    return Mesh(devices.reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def over(out=P(), *, sizes=None, vma=False, **given):
    """Makes a program of a body: its mesh, and the shapes and specs of arguments that are no usual ones."""

    def decorate(body):
        names = body.__code__.co_varnames[: body.__code__.co_argcount]
        specs = [given.get(name, (SHAPES.get(name), SPECS.get(name)))[1] for name in names]
        shapes = [given.get(name, (SHAPES.get(name), SPECS.get(name)))[0] for name in names]

        def make():
            on = mesh(**(sizes or dict(dp=2, tp=4)))
            f = jax.shard_map(body, mesh=on, in_specs=tuple(specs), out_specs=out, check_vma=vma)
            rng = np.random.default_rng(len(body.__name__))
            args = [
                rng.integers(0, 16, shape).astype(np.int32)
                if name.startswith("ids")
                else rng.standard_normal(shape).astype(np.float32)
                for name, shape in zip(names, shapes, strict=True)
            ]
            functools.update_wrapper(f, body)
            return f, args

        make.body = body
        return make

    return decorate


def right(*args, **kwargs):
    def add(body):
        RIGHT[body.__name__] = over(*args, **kwargs)(body)
        return body

    return add


def wrong(*args, **kwargs):
    def add(body):
        WRONG[body.__name__] = over(*args, **kwargs)(body)
        return body

    return add


ROWS = P("dp")
ring = lambda n: [(i, (i + 1) % n) for i in range(n)]

# ------------------------------------------------------------------------------------------------ right ones


@right(ROWS)
def mlp(x, up, down, b):
    return lax.psum(jax.nn.relu(x @ up) @ down, "tp") + b


@right(ROWS, vma=True)
def mlp_with_types(x, up, down, b):
    return lax.psum(jax.nn.relu(x @ up) @ down, "tp") + b


@right(P())
def loss(x, up, down, b):
    y = lax.psum(jax.nn.gelu(x @ up) @ down, "tp") + b
    return lax.pmean((y**2).mean(), "dp")


@right(P(), vma=True)
def loss_with_types(x, up, down, b):
    y = lax.psum(jax.nn.gelu(x @ up) @ down, "tp") + b
    return lax.pmean((y**2).mean(), "dp")


@right(P())
def norm_of_gradients(up, b):
    return jnp.sqrt(lax.psum((up**2).sum(), "tp") + (b**2).sum())


@right(P())
def masked_mean(x):
    mask = (x[:, 0] > 0).astype(jnp.float32)
    return lax.psum((x.sum(1) * mask).sum(), "dp") / lax.psum(mask.sum(), "dp")


@right(ROWS)
def softmax_over_ranks(x, up):
    h = x @ up
    top = lax.pmax(h.max(1), "tp")
    e = jnp.exp(h - top[:, None])
    return lax.psum(e.sum(1), "tp") + top


@right(P())
def ring_of_sums(x):
    n, total, block = lax.axis_size("dp"), jnp.zeros((16,)), x
    for _ in range(n):
        total, block = total + block.sum(0), lax.ppermute(block, "dp", ring(n))
    return total


@right(P(), sizes=dict(sp=4), x=((8, 16), P("sp")))
def ring_in_a_scan(x):
    n = lax.axis_size("sp")

    def hop(carry, _):
        total, block = carry
        return (total + jnp.tanh(block).sum(0), lax.ppermute(block, "sp", ring(n))), None

    return lax.scan(hop, (jnp.zeros((16,)), x), None, length=n)[0][0]


@right(ROWS)
def dropout_by_rank(x):
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index("dp"))
    return x * jax.random.bernoulli(key, 0.5, x.shape)


@right(ROWS)
def dropout_of_a_slice(x):
    mask = jax.random.bernoulli(jax.random.key(0), 0.5, (x.shape[0] * lax.axis_size("dp"), x.shape[1]))
    return x * lax.dynamic_slice_in_dim(mask, lax.axis_index("dp") * x.shape[0], x.shape[0])


@right(ROWS, table=((16, 8), P("tp")))
def embedding_by_vocabulary(ids, table):
    local = ids - lax.axis_index("tp") * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    return lax.psum(jnp.where(mine[:, None], table[jnp.where(mine, local, 0)], 0.0), "tp")


@right((P(), P()))
def gradients_inside(x, w):
    loss = lambda w: ((x @ w) ** 2).mean()
    value, grad = jax.value_and_grad(loss)(w)
    return lax.pmean(value, "dp"), lax.pmean(grad, "dp")


@right(P("dp"), w=((16, 16), P("dp")))
def gather_and_scatter(x, w):
    loss = lambda w: ((x @ lax.all_gather(w, "dp", tiled=True)) ** 2).sum()
    return jax.grad(loss)(w)


@right(P(None, "tp"))
def columns(x, up):
    return lax.all_gather(x, "dp", tiled=True) @ up


@right(P("sp"), sizes=dict(sp=4), x=((8, 16), P("sp")), n=((16,), P()))
def rotary(x, n):
    at = lax.axis_index("sp") * x.shape[0] + jnp.arange(x.shape[0])
    return x * jnp.cos(at[:, None] * n)


@right((P("dp"), P("dp")), sizes=dict(dp=4), x=((8, 16), P("dp")))
def exchange(x):
    other = lax.all_to_all(x.reshape(4, -1, 16)[:, :0] if False else x, "dp", 1, 0, tiled=True)
    return lax.all_to_all(other, "dp", 0, 1, tiled=True), x.mean(1)


@right(P("dp"))
def layers_in_a_scan(x, up, down):
    def layer(x, _):
        return x + lax.psum(jnp.tanh(x @ up) @ down, "tp"), (x**2).sum()

    return lax.scan(layer, x, None, length=3)[0]


@right(P())
def remat(x, up, down):
    f = jax.checkpoint(lambda x: lax.psum(jnp.sin(x @ up) @ down, "tp"))
    return lax.psum((f(x) ** 2).sum(), "dp")


@jax.custom_vjp
def copied(x):
    return x


copied.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "tp"),))


@right(P("dp"))
def megatron_f(x, up):
    loss = lambda x: (jnp.sin(copied(x) @ up) ** 2).sum()
    return jax.grad(loss)(x)


@right((P(), P()), norm=((16,), P()))
def gradient_clipping(x, w, norm):
    loss = lambda w: ((x @ w * norm) ** 2).sum()
    grad = lax.psum(jax.grad(loss)(w), "dp")
    scale = jnp.minimum(1.0, 1.0 / jnp.sqrt((grad**2).sum()))
    return grad * scale, scale


@right(P())
def transposed_psum_divided_again(up, b):
    loss = lambda b: lax.psum((up**2).sum() * (b**2).sum(), "tp")
    return lax.pmean(jax.grad(loss)(b), "tp")


# ------------------------------------------------------------------------------------------------ wrong ones


@wrong(ROWS)
def bias_inside_the_sum(x, up, down, b):
    return lax.psum(jax.nn.relu(x @ up) @ down + b, "tp")  # wrong: counted tp


@wrong(ROWS)
def no_sum_before_tanh(x, up, down, b):
    y = jax.nn.relu(x @ up) @ down
    return jnp.tanh(y) + b  # wrong: missing sum tp


@wrong(ROWS)
def no_sum_at_all(x, up, down, b):
    y = jax.nn.relu(x @ up) @ down
    return y  # wrong-at-result: missing sum tp


@wrong(P())
def norm_counted(up, b):
    squares = (up**2).sum() + (b**2).sum()  # wrong: counted tp
    return jnp.sqrt(lax.psum(squares, "tp"))


@wrong(P())
def norm_of_copies(w):
    return jnp.sqrt(lax.psum((w**2).sum(), "tp"))  # wrong: counted tp


@wrong(P())
def mean_of_means(x):
    mask = (x[:, 0] > 0).astype(jnp.float32)
    mean = (x.sum(1) * mask).sum() / mask.sum()  # wrong: mean of means dp
    return lax.pmean(mean, "dp")


@wrong(P("dp"))
def gradient_without_its_sum(x, up):
    loss = lambda x: (jnp.sin(x @ up) ** 2).sum()
    return jax.grad(loss)(x)  # wrong-at-result: missing sum tp


@wrong(P())
def gradients_not_summed(x, w):
    loss = lambda w: ((x @ w) ** 2).sum()
    return jax.grad(loss)(w)  # wrong-at-result: missing sum dp


@wrong(P())
def gradients_not_averaged(x, w):
    loss = lambda w: ((x @ w) ** 2).mean()
    return jax.grad(loss)(w)  # wrong-at-result: missing mean dp


@wrong(P("dp", "tp"))
def softmax_over_a_shard(x, up):
    return jax.nn.softmax(x @ up, axis=-1)  # wrong: missing max tp


@wrong(P("dp", "tp"))
def softmax_without_its_sum(x, up):
    h = x @ up
    e = jnp.exp(h - lax.pmax(h.max(1), "tp")[:, None])
    return e / e.sum(1, keepdims=True)  # wrong: missing sum tp


@wrong(ROWS)
def sum_over_the_wrong_axis(x, up, down):
    return lax.psum(jax.nn.relu(x @ up) @ down, "dp")  # wrong: wrong axis dp


@wrong(P(), sizes=dict(sp=4), x=((8, 16), P("sp")))
def ring_one_hop_short(x):
    n, total, block = lax.axis_size("sp"), x.sum(0), x
    for _ in range(n - 2):
        block = lax.ppermute(block, "sp", ring(n))
        total = total + block.sum(0)
    return total  # wrong-at-result: ring one hop short sp


@wrong(ROWS)
def same_key_on_every_rank(x):
    return x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)  # wrong: same random key dp


@wrong(ROWS)
def another_key_for_copies(x):
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index("dp") * 4 + lax.axis_index("tp"))
    return lax.pmean(jnp.tanh(x * jax.random.normal(key, x.shape)), "tp")  # wrong: different random keys tp


@wrong(P())
def transposed_psum(x, w):
    loss = lambda w: lax.psum(((x @ w) ** 2).sum(), "dp")
    return lax.psum(jax.grad(loss)(w), "dp")  # wrong: counted dp


@wrong(P())
def a_sum_of_means(x, w):
    return lax.psum(((x @ w) ** 2).mean(), "dp")  # wrong: sum of means dp


@wrong(P())
def a_mean_of_sums(x, w):
    return lax.pmean(((x @ w) ** 2).sum(), "dp")  # wrong: mean for a sum dp


@wrong(P("sp"), sizes=dict(sp=4), x=((8, 16), P("sp")), n=((16,), P()))
def positions_from_zero(x, n):
    at = jnp.arange(x.shape[0], dtype=jnp.float32)  # wrong: positions without offset sp
    return x * jnp.cos(at[:, None] * n)


@wrong(ROWS, table=((16, 8), P("tp")))
def look_up_in_a_shard(ids, table):
    return table[ids]  # wrong: over a shard tp


@wrong(P("dp"))
def best_of_a_shard(x, up):
    return jnp.argmax(x @ up, axis=1)  # wrong: over a shard tp


@wrong(P("sp"), sizes=dict(sp=4), x=((8, 16), P("sp")))
def other_part_of_the_sequence(x):
    whole = lax.all_gather(x, "sp", tiled=True)
    at = (lax.axis_index("sp") + 1) % 4 * x.shape[0]
    return lax.dynamic_slice_in_dim(whole, at, x.shape[0])  # wrong-at-result: order sp


@wrong(P())
def sum_done_twice(x, w):
    total = lax.psum(((x @ w) ** 2).sum(), "dp")
    return lax.psum(jnp.sqrt(total), "dp")  # wrong: counted dp


@wrong(P())
def scale_with_local_norm(x, w):
    grad = jax.grad(lambda w: ((x @ w) ** 2).sum())(w)
    scale = 1.0 / jnp.sqrt((grad**2).sum())  # wrong: missing sum dp
    return lax.psum(grad * scale, "dp")


@wrong(P())
def shard_returned_as_copy(x):
    return x * 2  # wrong-at-result: shard for a copy dp


@wrong(P("dp"))
def two_mistakes(x, up, down, b):
    h = jnp.tanh(x @ up)
    y = jnp.tanh(h @ down)  # wrong: missing sum tp
    return lax.psum(y, "tp") + b


# ------------------------------------------------------------------------------------------- planted mistakes

BLOCKS = {
    "mlp": ["h = {act}(x @ up{i})", "y = <psum tp|h @ down{i}>", "x = x + {act}(y + b{i})"],
    "norm": ["r = (x**2).mean(1, keepdims=True)", "x = x * lax.rsqrt(r + 0.1) * (1 + b{i})"],
    "softmax": [
        "h = x @ up{i}",
        "t = <pmax tp|h.max(1, keepdims=True)>",
        "e = jnp.exp(h - t)",
        "z = <psum tp|e.sum(1, keepdims=True)>",
        "y = <psum tp|(e / z) @ down{i}>",
        "x = jnp.sin(x + y)",
    ],
    "centered": ["c = <pmean dp|x.mean(0)>", "x = {act}(x - c)"],
    "weighted": [
        "m = jnp.where(x[:, 0] > 0, 1.0, 0.3)",
        "a = <psum dp|(x * m[:, None]).sum(0)>",
        "k = <psum dp|m.sum()>",
        "x = {act}(x - a / k)",
    ],
    "gathered": ["w = lax.all_gather(cut{i}, 'dp', tiled=True)", "x = {act}(x @ w)"],
    "scaled": ["q = <psum tp|(up{i} ** 2).sum()>", "x = x * lax.rsqrt(q / 512)"],
    "summed columns": [
        "h = jnp.cos(x @ up{i})",
        "s = <psum tp|h.sum(1, keepdims=True)>",
        "x = x + jnp.tanh(s / 32)",
    ],
    "scattered": [
        "h = {act}(x @ up{i}) @ down{i}",
        "y = lax.psum_scatter(h, 'tp', scatter_dimension=1, tiled=True)",
        "x = x + {act}(lax.all_gather(y, 'tp', axis=1, tiled=True))",
    ],
    "remat": ["f = jax.checkpoint(lambda x: <psum tp|{act}(x @ up{i}) @ down{i}>)", "x = x + {act}(f(x))"],
    "loop": [
        "g = lambda x, _: (x + jnp.tanh(<psum tp|jnp.sin(x @ up{i}) @ down{i}>), None)",
        "x = lax.scan(g, x, None, length=2)[0]",
    ],
}
ENDS = {
    "rows": ("P('dp')", ["return {act}(x)"]),
    "loss": ("P()", ["l = (x**2).mean()", "return jnp.sqrt(<pmean dp|l>)"]),
    "total": ("P()", ["l = (x**2).sum()", "return jnp.log(<psum dp|l>)"]),
    "gradient": (
        "P()",
        [
            "g = jax.grad(lambda w: (jnp.sin(x @ w) ** 2).sum())(w)",
            "g = <psum dp|g>",
            "return g * lax.rsqrt((g**2).sum() + 100.0)",
        ],
    ),
}
CALL = re.compile(r"<(\w+) (\w+)\|((?:[^<>]|(?<== )>|> 0)*)>")
OTHER = {"tp": "dp", "dp": "tp"}


def mutations(op, axis):
    """How a collective can be wrong: the text in its place, and the kinds that describe it."""
    call = f"lax.{op}({{}}, '{axis}')"
    if op == "psum":
        yield "removed", "({})", {"missing sum", "mean of means"}
        yield "doubled", f"lax.psum({call}, '{axis}')", {"counted"}
        yield "wrong axis", call.replace(axis, OTHER[axis]), {"wrong axis"}
        yield "mean", call.replace("psum", "pmean"), {"mean for a sum"}
        yield (
            "over both",
            f"lax.psum({{}}, ('{axis}', '{OTHER[axis]}'))",
            {"counted", "sum of shards", "wrong axis"},
        )
    if op == "pmean":
        yield "removed", "({})", {"missing mean"}
        yield "sum", call.replace("pmean", "psum"), {"counted"}
    if op == "pmax":
        yield "removed", "({})", {"missing max"}


def program(seed, plant=True):
    """A random program, as text: with ``plant`` one of its collectives is wrong. Returns the text, the line of
    the mistake, its name, and the kinds that describe it."""
    rng = np.random.default_rng(seed)
    lines = []
    for i in range(rng.integers(1, 4)):
        act = ["jnp.tanh", "jax.nn.gelu", "jnp.sin"][rng.integers(3)]
        block = BLOCKS[list(BLOCKS)[rng.integers(len(BLOCKS))]]
        lines += [line.replace("{act}", act).replace("{i}", str(i)) for line in block]
    out, end = ENDS[list(ENDS)[rng.integers(len(ENDS))]]
    lines += [line.replace("{act}", "jnp.tanh") for line in end]
    sites = [n for n, line in enumerate(lines) if CALL.search(line)]
    if plant and not sites:
        return program(seed + 100_000, plant)
    at, what, kinds = -1, "", set()
    if plant:
        at = sites[rng.integers(len(sites))]
        op, axis, _ = CALL.search(lines[at]).groups()
        choices = list(mutations(op, axis))
        what, text, kinds = choices[rng.integers(len(choices))]
        lines[at] = CALL.sub(lambda m: text.format(m[3]), lines[at])
    lines = [CALL.sub(lambda m: f"lax.{m[1]}({m[3]}, '{m[2]}')", line) for line in lines]
    names = [f"{name}{i}" for i in range(3) for name in ("up", "down", "b", "cut")]
    head = f"def f(x, w, {', '.join(names)}):"
    return "\n".join([head, *("    " + line for line in lines)]), at + 2, what, kinds, out


def built(seed, plant=True):
    """The program of a seed, its arguments, and what `program` says of it."""
    text, line, what, kinds, out = program(seed, plant)
    space = dict(jax=jax, jnp=jnp, lax=lax, P=P)
    exec(compile(text, f"random/{seed}.py", "exec"), space)
    rng = np.random.default_rng(seed)
    sizes = [dict(dp=2, tp=4), dict(dp=4, tp=2)][rng.integers(2)]
    specs = {"x": P("dp"), "w": P(), "up": P(None, "tp"), "down": P("tp"), "b": P(), "cut": P("dp")}
    shapes = {"x": (8, 16), "w": (16, 16), "up": (16, 32), "down": (32, 16), "b": (16,), "cut": (16, 16)}
    names = ["x", "w", *("up", "down", "b", "cut") * 3]
    f = jax.shard_map(
        space["f"], mesh=mesh(**sizes), in_specs=tuple(specs[n] for n in names), out_specs=eval(out, space),
        check_vma=False,
    )  # fmt: skip
    args = [rng.standard_normal(shapes[n]).astype(np.float32) * 0.4 for n in names]
    return f, args, text, line, what, kinds
