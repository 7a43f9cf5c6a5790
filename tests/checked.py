"""Parallel programs for `llmpar.check`, right ones and wrong ones, each in some ten lines.

A wrong program has a comment ``# wrong: KIND AXIS`` on the line where values part first. The arguments of a
body are ``x`` (8, 16), cut over dp; ``up`` (16, 32), cut over tp by columns, and ``down`` (32, 16) by rows;
``b`` (16,), the same everywhere; or what `over` says.
"""

import functools
import re
import tomllib
from pathlib import Path

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


def over(out, *, sizes=None, vma=False, **given):
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

# ----------------------------------------------------------------------------------------------- right ones


@right(ROWS)
def mlp(x, up, down, b):
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


@right(P("dp"), w=((16, 16), P("dp")))
def gather_and_scatter(x, w):
    loss = lambda w: ((x @ lax.all_gather(w, "dp", tiled=True)) ** 2).sum()
    return jax.grad(loss)(w)


@right(P("sp"), sizes=dict(sp=4), x=((8, 16), P("sp")), n=((16,), P()))
def rotary(x, n):
    at = lax.axis_index("sp") * x.shape[0] + jnp.arange(x.shape[0])
    return x * jnp.cos(at[:, None] * n)


@right((P("dp"), P("dp")), sizes=dict(dp=4), x=((8, 16), P("dp")))
def exchange(x):
    other = lax.all_to_all(x.reshape(4, -1, 16)[:, :0] if False else x, "dp", 1, 0, tiled=True)
    return lax.all_to_all(other, "dp", 0, 1, tiled=True), x.mean(1)


@jax.custom_vjp
def copied(x):
    return x


copied.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "tp"),))


@right(P("dp"))
def megatron_f(x, up):
    loss = lambda x: (jnp.sin(copied(x) @ up) ** 2).sum()
    return jax.grad(loss)(x)


@right(P())
def transposed_psum_divided_again(up, b):
    loss = lambda b: lax.psum((up**2).sum() * (b**2).sum(), "tp")
    return lax.pmean(jax.grad(loss)(b), "tp")


# ----------------------------------------------------------------------------------------------- wrong ones


@wrong(ROWS)
def bias_inside_the_sum(x, up, down, b):
    return lax.psum(jax.nn.relu(x @ up) @ down + b, "tp")  # wrong: counted tp


@wrong(ROWS)
def no_sum_before_tanh(x, up, down, b):
    y = jax.nn.relu(x @ up) @ down
    return jnp.tanh(y) + b  # wrong: missing sum tp


@wrong(ROWS)
def no_sum_at_all(x, up, down, b):
    return jax.nn.relu(x @ up) @ down  # wrong: missing sum tp


@wrong(P())
def norm_counted(up, b):
    squares = (up**2).sum() + (b**2).sum()  # wrong: counted tp
    return jnp.sqrt(lax.psum(squares, "tp"))


@wrong(P())
def mean_of_means(x):
    mask = (x[:, 0] > 0).astype(jnp.float32)
    mean = (x.sum(1) * mask).sum() / mask.sum()  # wrong: mean of means dp
    return lax.pmean(mean, "dp")


@wrong(P(), sizes=dict(dp=2, sp=4), x=((8, 16), P("dp", "sp")))
def mean_of_means_over_two_axes(x):
    mask = (x > 0).astype(jnp.float32)
    mean = (x * mask).sum() / mask.sum()  # wrong: mean of means dp,sp
    return lax.pmean(mean, ("dp", "sp"))


@wrong(P("dp"))
def gradient_without_its_sum(x, up):
    loss = lambda x: (jnp.sin(x @ up) ** 2).sum()  # wrong: missing sum tp
    return jax.grad(loss)(x)


@wrong(P())
def gradients_not_summed(x, w):
    loss = lambda w: ((x @ w) ** 2).sum()  # wrong: missing sum dp
    return jax.grad(loss)(w)


@wrong(P())
def gradients_not_averaged(x, w):
    loss = lambda w: ((x @ w) ** 2).mean()  # wrong: missing mean dp
    return jax.grad(loss)(w)


@wrong(P("dp", "tp"))
def softmax_over_a_shard(x, up):
    return jax.nn.softmax(x @ up, axis=-1)  # wrong: missing max tp


@wrong(ROWS)
def sum_over_the_wrong_axis(x, up, down):
    return lax.psum(jax.nn.relu(x @ up) @ down, "dp")  # wrong: wrong axis dp


@wrong(P(), sizes=dict(sp=4), x=((8, 16), P("sp")))
def ring_one_hop_short(x):
    n, total, block = lax.axis_size("sp"), x.sum(0), x
    for _ in range(n - 2):
        block = lax.ppermute(block, "sp", ring(n))
        total = total + block.sum(0)  # wrong: ring one hop short sp
    return total


@wrong(ROWS)
def same_key_on_every_rank(x):
    return x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)  # wrong: same random key dp


@wrong(ROWS)
def another_key_for_copies(x):
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index("dp") * 4 + lax.axis_index("tp"))
    return lax.pmean(jnp.tanh(x * jax.random.normal(key, x.shape)), "tp")  # wrong: different random keys tp


@wrong(P())
def transposed_psum(x, w):
    loss = lambda w: lax.psum(((x @ w) ** 2).sum(), "dp")  # wrong: counted dp
    return lax.psum(jax.grad(loss)(w), "dp")


@wrong(P())
def a_sum_of_means(x, w):
    return lax.psum(((x @ w) ** 2).mean(), "dp")  # wrong: counted dp


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
    return lax.dynamic_slice_in_dim(whole, at, x.shape[0])  # wrong: other order sp


@wrong(P())
def scale_with_local_norm(x, w):
    grad = jax.grad(lambda w: ((x @ w) ** 2).sum())(w)
    scale = 1.0 / jnp.sqrt((grad**2).sum())  # wrong: missing sum dp
    return lax.psum(grad * scale, "dp")


@wrong(P())
def shard_returned_as_copy(x):
    return x * 2  # wrong: shard for a copy dp


@wrong(P("dp"))
def two_mistakes(x, up, down, b):
    h = jnp.tanh(x @ up)
    y = jnp.tanh(h @ down)  # wrong: missing sum tp
    return lax.psum(y, "tp") + b


# ----------------------------------------------------------------------------------------- planted mistakes

PARTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
BLOCKS, ENDS = PARTS["blocks"], PARTS["ends"]
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
    """A random program, as text: with ``plant`` one of its collectives is wrong. Returns the text, the line
    of the mistake, its name, and the kinds that describe it. The first programs are short."""
    rng = np.random.default_rng(seed)
    lines = []
    for i in range(rng.integers(1, 3 if seed < 40 else 4)):
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


# ------------------------------------------------------ programs with arguments and references of their own

OTHERS = {}
"""By name: whether it is right, the program, its reference (None: itself), its arguments."""


def numbers(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def other(name, is_right, f, reference, *args):
    OTHERS[name] = is_right, f, reference, args


def mapped(body, sizes, given, gives):
    return jax.shard_map(body, mesh=mesh(**sizes), in_specs=given, out_specs=gives, check_vma=False)


def causal(q, k, v):
    at = jnp.arange(q.shape[0])
    scores = jnp.where(at[:, None] >= at[None], q @ k.T / 4, -1e30)
    return jax.nn.softmax(scores, -1) @ v


def ring_attention(fewer=0, from_next=0):
    def body(q, k, v):
        n, me, b = lax.axis_size("sp"), lax.axis_index("sp"), q.shape[0]

        def hop(carry, i):
            top, total, out, k, v = carry
            whose = (me - i + from_next) % n
            rows, columns = me * b + jnp.arange(b), whose * b + jnp.arange(b)
            scores = jnp.where(rows[:, None] >= columns[None], q @ k.T / 4, -1e30)
            now = jnp.maximum(top, scores.max(1))
            weights, scale = jnp.exp(scores - now[:, None]), jnp.exp(top - now)
            total, out = total * scale + weights.sum(1), out * scale[:, None] + weights @ v
            k, v = lax.ppermute((k, v), "sp", ring(n))
            return (now, total, out, k, v), None

        first = jnp.full((b,), -1e30), jnp.zeros((b,)), jnp.zeros_like(q), k, v
        (_, total, out, _, _), _ = lax.scan(hop, first, jnp.arange(n - fewer))
        return out / total[:, None]

    return mapped(body, dict(sp=4), (P("sp"),) * 3, P("sp"))


qkv = numbers(16, 8), numbers(16, 8) + 1, numbers(16, 8) - 1
other("ring attention", True, ring_attention(), causal, *qkv)
other("ring attention, one hop short", False, ring_attention(fewer=1), causal, *qkv)
other("ring attention, a neighbour's mask", False, ring_attention(from_next=1), causal, *qkv)


def adam(param, grad, state):
    first, second = 0.9 * state["m"] + 0.1 * grad, 0.99 * state["v"] + 0.01 * grad**2
    return param - 0.01 * first / (jnp.sqrt(second) + 1e-3), {"m": first, "v": second, "none": None}


def error(w, x, y):
    return ((jnp.tanh(x @ w) - y) ** 2).mean()


def zero(mean=True):
    """ZeRO: gradients are scattered, each rank updates its rows, and these are gathered."""

    def body(w, state, x, y):
        loss, grad = jax.value_and_grad(error)(w, x, y)
        grad = lax.psum_scatter(grad, "dp", tiled=True) / (lax.axis_size("dp") if mean else 1)
        own = lax.dynamic_slice_in_dim(w, lax.axis_index("dp") * grad.shape[0], grad.shape[0])
        own, state = adam(own, grad, state)
        return lax.all_gather(own, "dp", tiled=True), state, lax.pmean(loss, "dp")

    return mapped(body, dict(dp=8), (P(), P("dp"), P("dp"), P("dp")), (P(), P("dp"), P()))


def one_step(w, state, x, y):
    loss, grad = jax.value_and_grad(error)(w, x, y)
    return *adam(w, grad, state), loss


state = {"m": np.zeros((16, 16), "f"), "v": np.zeros((16, 16), "f"), "none": None}
given = numbers(16, 16), state, numbers(32, 16), numbers(32, 16) * 0.5
other("ZeRO", True, zero(), one_step, *given)
other("ZeRO, sums for means", False, zero(mean=False), one_step, *given)


def clipped(mean=True):
    @jax.jit
    def step(state, batch):
        def body(state, batch):
            loss, grad = jax.value_and_grad(error)(state["w"], *batch)
            grad = lax.pmean(grad, "dp") if mean else grad
            scale = jnp.minimum(1.0, 0.1 / jnp.sqrt((grad**2).sum()))
            return {"w": state["w"] - grad * scale, "none": None, "n": state["n"] + 1}, lax.pmean(loss, "dp")

        return mapped(body, dict(dp=8), (P(), P("dp")), (P(), P()))(state, batch)

    return step


given = {"w": numbers(16, 16), "none": None, "n": jnp.int32(3)}, (numbers(32, 16), numbers(32, 16) * 0.5)
other("clipping", True, clipped(), None, *given)
other("clipping before the mean", False, clipped(mean=False), None, *given)


def experts(x, router, w):
    return jnp.einsum("td,tdm->tm", x, w[jnp.argmax(x @ router, 1)])


def dispatched(x, router, w):
    def body(x, router, w):
        chosen = jax.nn.one_hot(jnp.argmax(x @ router, 1), router.shape[1])
        sent = jnp.einsum("te,td->etd", chosen, x)
        own = lax.all_to_all(sent, "ep", 0, 1, tiled=True)
        back = lax.all_to_all(jnp.einsum("etd,edm->etm", own, w), "ep", 1, 0, tiled=True)
        return jnp.einsum("te,etm->tm", chosen, back)

    return mapped(body, dict(ep=4), (P("ep"), P(), P("ep")), P("ep"))(x, router, w)


other("experts", True, dispatched, experts, numbers(16, 8), numbers(8, 8), numbers(8, 8, 8))
other("experts, no reference", True, dispatched, None, numbers(16, 8), numbers(8, 8), numbers(8, 8, 8))


def drawn(key, x):
    noise = lambda key, x: jax.random.normal(jax.random.fold_in(key, lax.axis_index("dp")), x.shape)
    return mapped(lambda key, x: x + noise(key, x), dict(dp=8), (P(), P("dp")), P("dp"))(key, x)


def drawn_alike(key, x):
    noisy = lambda key, x: x + jax.random.normal(key, x.shape)
    return mapped(noisy, dict(dp=8), (P(), P("dp")), P("dp"))(key, x)


other("random numbers of a key", True, drawn, None, jax.random.key(3), numbers(16, 4))
other("random numbers, and a reference's", True, drawn, lambda key, x: x, jax.random.key(3), numbers(16, 4))
other("random numbers, the same on each rank", False, drawn_alike, None, jax.random.key(3), numbers(16, 4))


def written(x):
    return lax.psum(x.sum() / 8, "dp")


def branching(x):
    def body(x):
        s = lax.psum((x**2).sum(), "dp")
        y = lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.sin(c[0]), c[1] + 1), (x, 0))[0]
        return lax.cond(s > 1, lambda y: y * 2, lambda y: y, y), lax.psum((x > 0).sum(), "dp")

    return mapped(body, dict(dp=8), P("dp"), (P("dp"), P()))(x)


def added(inside):
    body = lambda x, b: lax.psum(x.sum(0) + b, "dp") if inside else lax.psum(x.sum(0), "dp") + b
    return mapped(body, dict(dp=8), (P("dp"), P()), P())


def constrained(x, w):
    h = lax.with_sharding_constraint(jnp.tanh(x @ w), jax.NamedSharding(mesh(dp=2, tp=4), P("dp", "tp")))
    return (h @ w.T).mean()


def half(*shape):
    return jnp.asarray(numbers(*shape), jnp.bfloat16)


feed = mapped(
    lambda x, up, down: lax.psum(jax.nn.gelu(x @ up) @ down, "tp"),
    dict(dp=2, tp=4),
    (P("dp"), P(None, "tp"), P("tp")),
    P("dp"),
)
sized = mapped(written, dict(dp=8), P("dp"), P())
other("a size as a number", True, sized, lambda x: x.sum() / 8, numbers(16, 4))
other("loops, branches, counts", True, branching, None, numbers(16, 4))
other("ones and zeros", True, added(False), None, jnp.ones((8, 4)), jnp.zeros((4,)))
other("a bias of zeros in the sum", False, added(True), None, jnp.ones((8, 4)), jnp.zeros((4,)))
other("shapes", True, added(False), None, jax.ShapeDtypeStruct((8, 4), "f"), jax.ShapeDtypeStruct((4,), "f"))
other("constraints", True, constrained, None, numbers(8, 16), numbers(16, 32))
other("bfloat16", True, feed, None, half(8, 16), half(16, 32), half(32, 16))
given = numbers(8, 16), numbers(16, 32), numbers(32, 16)
other("one is another function", False, feed, lambda x, up, down: x @ up @ down, *given)
