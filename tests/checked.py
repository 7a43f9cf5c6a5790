"""Parallel programs for `llmpar.check`: rows of checked.toml, random ones, and those of `OTHERS`."""

import functools
import re
import textwrap
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

TABLE = Path(__file__).with_suffix(".toml")
PARTS = tomllib.loads(TABLE.read_text())
BLOCKS, ENDS = PARTS["blocks"], PARTS["ends"]
SPECS = {"x": P("dp"), "up": P(None, "tp"), "down": P("tp"), "b": P(), "w": P(), "ids": P("dp"), "n": P()}
SHAPES = {"x": (8, 16), "up": (16, 32), "down": (32, 16), "b": (16,), "w": (16, 16), "ids": (8,), "n": (16,)}
ring = lambda n: [(i, (i + 1) % n) for i in range(n)]


def mesh(**sizes):
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))])
    return Mesh(devices.reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@jax.custom_vjp
def copied(x):
    return x


copied.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "tp"),))


def line_of(kind, name):
    """The line of checked.toml on which a program's body begins."""
    lines = TABLE.read_text().splitlines()
    return lines.index("body = '''", lines.index(f"[{kind}.{name}]")) + 2


def made(kind, name):
    """A program of the table, whose errors name lines there, and its arguments."""
    row, names = PARTS[kind][name], PARTS[kind][name]["args"].split()
    head, begin = f"def {name}({', '.join(names)}):\n", line_of(kind, name)
    text = "\n" * (begin - 2) + head + textwrap.indent(row["body"], "    ")
    space = globals() | {}
    exec(compile(text, str(TABLE), "exec"), space)
    own = {key: eval(text, space) for key, text in row.get("given", {}).items()}
    shapes, specs = zip(*(own.get(x, (SHAPES.get(x), SPECS.get(x))) for x in names), strict=True)
    on, out = mesh(**row.get("sizes", dict(dp=2, tp=4))), eval(row["out"], space)
    f = jax.shard_map(space[name], mesh=on, in_specs=specs, out_specs=out, check_vma=row.get("vma", False))
    rng = np.random.default_rng(len(name))
    integers = lambda shape: rng.integers(0, 16, shape).astype(np.int32)
    numbers = lambda shape: rng.standard_normal(shape).astype(np.float32)
    pairs = zip(names, shapes, strict=True)
    args = [integers(shape) if x.startswith("ids") else numbers(shape) for x, shape in pairs]
    functools.update_wrapper(f, space[name])
    return f, args


def declared(name):
    """The line of a wrong program's mistake, its kind and its axes."""
    for n, line in enumerate(PARTS["wrong"][name]["body"].splitlines(), line_of("wrong", name)):
        if mark := re.search(r"# wrong: (.*) ([\w,]+)$", line):
            return n, *mark.groups()


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
        both = f"lax.psum({{}}, ('{axis}', '{OTHER[axis]}'))"
        yield "over both", both, {"counted", "sum of shards", "wrong axis"}
    if op == "pmean":
        yield "removed", "({})", {"missing mean"}
        yield "sum", call.replace("pmean", "psum"), {"counted"}
    if op == "pmax":
        yield "removed", "({})", {"missing max"}


def program(seed, plant=True):
    """A random program as text; of the mistake that ``plant`` makes its line, name and kinds; the output."""
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
    specs, shapes = SPECS | {"cut": P("dp")}, SHAPES | {"cut": (16, 16)}
    names = ["x", "w", *("up", "down", "b", "cut") * 3]
    f = mapped(space["f"], sizes, tuple(specs[n] for n in names), eval(out, space))
    args = [rng.standard_normal(shapes[n]).astype(np.float32) * 0.4 for n in names]
    return f, args, text, line, what, kinds


OTHERS = {}
"""By name: whether it is right, the program, its reference (None: itself), its arguments."""


def numbers(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def other(name, is_right, f, reference, *args):
    OTHERS[name] = is_right, f, reference, args


def mapped(body, sizes, given, gives):
    return jax.shard_map(body, mesh=mesh(**sizes), in_specs=given, out_specs=gives, check_vma=False)


def causal(q, k, v):
    at = jnp.arange(q.shape[0])
    scores = jnp.where(at[:, None] >= at[None], q @ k.T / 4, -1e30)
    return jax.nn.softmax(scores, -1) @ v


def ring_attention(from_next=0):
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
        (_, total, out, _, _), _ = lax.scan(hop, first, jnp.arange(n))
        return out / total[:, None]

    return mapped(body, dict(sp=4), (P("sp"),) * 3, P("sp"))


qkv = numbers(16, 8), numbers(16, 8) + 1, numbers(16, 8) - 1
other("ring attention", True, ring_attention(), causal, *qkv)
shifted = mapped(lambda x: x * (x > 0.3 * lax.axis_index("sp")), dict(sp=4), P("sp"), P("sp"))
other("a threshold of its rank", False, shifted, None, numbers(16, 8))
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


def branching(x):
    def body(x):
        s = lax.psum((x**2).sum(), "dp")
        y = lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.sin(c[0]), c[1] + 1), (x, 0))[0]
        return lax.cond(s > 1, lambda y: y * 2, lambda y: y, y), lax.psum((x > 0).sum(), "dp")

    return mapped(body, dict(dp=8), P("dp"), (P("dp"), P()))(x)


def added(inside):
    body = lambda x, b: lax.psum(x.sum(0) + b, "dp") if inside else lax.psum(x.sum(0), "dp") + b
    return mapped(body, dict(dp=8), (P("dp"), P()), P())


def fed(x, up, down):
    return lax.psum(jax.nn.gelu(x @ up) @ down, "tp")


feed = mapped(fed, dict(dp=2, tp=4), (P("dp"), P(None, "tp"), P("tp")), P("dp"))
sized = mapped(lambda x: lax.psum(x.sum() / 8, "dp"), dict(dp=8), P("dp"), P())
other("a size as a number", True, sized, lambda x: x.sum() / 8, numbers(16, 4))
other("loops, branches, counts", True, branching, None, numbers(16, 4))
other("ones and zeros", True, added(False), None, jnp.ones((8, 4)), jnp.zeros((4,)))
other("a bias of zeros in the sum", False, added(True), None, jnp.ones((8, 4)), jnp.zeros((4,)))
alike = jax.ShapeDtypeStruct((8, 4), "f")
apart = mapped(lambda x, y: lax.psum(x - y, "dp"), dict(dp=8), P(), P())
other("two arguments of one shape", False, apart, None, alike, alike)
given = numbers(8, 16), numbers(16, 32), numbers(32, 16)
other("bfloat16", True, feed, None, *(jnp.asarray(x, "bfloat16") for x in given))
stale = mapped(lambda w, g: jnp.where(lax.axis_index("dp") > 0, w, w - g), dict(dp=8), (P(), P()), P())
other("a step of the first rank alone", False, stale, lambda w, g: w - g, numbers(8, 4), numbers(4, 8).T)
drawn = lambda x: x * jax.random.normal(jax.random.key(0), x.shape)
shared = mapped(drawn, dict(dp=8), P(), P())
other("one is another function", False, shared, lambda x: 2 * drawn(x), numbers(8, 16))
count = mapped(lambda x: lax.psum(x.sum(), "dp") + lax.axis_size("dp"), dict(dp=8), P("dp"), P())
other("a count off by seven", False, count, None, np.full((8, 4), 3_000_000, "i4"))


def smoothed(axis=None):
    def body(x, w):
        up = lax.ppermute(x[-1:], "sp", [(i, i + 1) for i in range(3)])
        down = lax.ppermute(x[:1], "sp", [(i + 1, i) for i in range(3)])
        padded = jnp.concatenate([up, x, down])
        h = (padded[:-2] + padded[1:-1] + padded[2:]) @ w
        return jnp.tanh(lax.psum(h, "tp") if axis else h)

    return mapped(body, dict(sp=4, tp=2), (P("sp", "tp"), P("tp")), P("sp"))


def smooth(x, w):
    padded = jnp.pad(x, ((1, 1), (0, 0)))
    return jnp.tanh((padded[:-2] + padded[1:-1] + padded[2:]) @ w)


def within(x, w):
    some = functools.partial(jax.shard_map, out_specs=P(), check_vma=False)
    product = lambda x, w: jnp.tanh(lax.psum(x @ w, "tp"))
    inner = some(product, in_specs=(P(None, "tp"), P("tp")), axis_names={"tp"})
    body = lambda x, w: lax.pmean(inner(x, w).mean(0), "dp")
    return some(body, mesh=mesh(dp=2, tp=4), in_specs=(P("dp"), P()), axis_names={"dp"})(x, w)


other("neighbours' rows", True, smoothed("tp"), smooth, numbers(16, 8), numbers(8, 4))
other("neighbours' rows without a sum", False, smoothed(), smooth, numbers(16, 8), numbers(8, 4))
other("one in another", True, jax.jit(within), None, numbers(8, 16), numbers(16, 8))
