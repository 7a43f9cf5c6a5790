# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 25
#     needs: ["00", "05"]
#     question: If a sum is forgotten, which programs are refused, and which are wrong?
#     objectives:
#     - Say who chooses what is sent in each of three ways to write a program in JAX.
#     - Predict which way refuses a mistake, which repairs it silently, and which gives
#       wrong numbers.
#     - Write the layout of an unfinished sum, and read it in an explicit type.
#     - Choose between the three ways.
# ---

# %% [markdown]
# # 12 · A sum is forgotten. Which program is refused?
#
# Two weight matrices are cut over four devices. The program lacks one line: the sum over the devices. It runs without an error, and every
# shape is right. Here are the first numbers of its result.

# %% tags=["plumbing"]
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # simulated devices; real ones: On your cluster

from llmpar.parallel.mesh import use_devices

devices = use_devices()

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from llmpar import draw, explain, from_type
from llmpar.draw import scene
from llmpar.inspect.census import census_hlo, census_table, read_program
from llmpar.inspect.types import types
from llmpar.lessons import attempt, hint, met, opened, say, solution
from llmpar.lessons.lesson import as_predicted, counting_text, train_on
from llmpar.parallel.mesh import explicit, make_mesh, sharding, spec
from llmpar.plan.layout import parse_layout
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.predict.tolerance import tolerance

# Accelerators round float32 matmuls unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
DP, TP = 2, 4
mesh = make_mesh(f"dp={DP} tp={TP}")

rng = np.random.default_rng(0)
x = rng.standard_normal((4, 8, 16)).astype(np.float32)
up = rng.standard_normal((16, 32)).astype(np.float32) / 4
down = rng.standard_normal((32, 16)).astype(np.float32) / 4
LAYOUTS = ("b/dp s d", "d m/tp", "m/tp d")  # of x, up and down
OUT = {"out_shardings": sharding(mesh, parse_layout("b/dp s d"))}


def feed_forward(x, up, down):
    h = jax.nn.silu(x @ up)  # b s m
    return h @ down  # b s d


def manual(f, layouts=LAYOUTS, **how):
    """Run `f` on every device with its own blocks."""
    places = [spec(parse_layout(text)) for text in layouts]
    out = spec(parse_layout("b/dp s d"))
    return jax.shard_map(f, mesh=mesh, in_specs=tuple(places), out_specs=out, **how)


def run(f, on=mesh, layouts=LAYOUTS, **how):
    """The result, and what the program sends: kinds, counts and bytes."""
    places = [sharding(on, parse_layout(text)) for text in layouts]
    args = [jax.device_put(a, p) for a, p in zip((x, up, down), places, strict=True)]
    with jax.set_mesh(on):
        compiled, text = read_program(jax.jit(f, **how).lower(*args))
        return compiled(*args), census_table(census_hlo(text, on))


want = feed_forward(x, up, down)  # one device


def numbers(result):
    """The first numbers on the devices of one replica, their sum, what is right."""
    shards = [np.asarray(shard.data)[0, 0, :5] for shard in result.addressable_shards]
    rows = [(f"device {r}", shards[r], scene.OTHERS[r]) for r in range(TP)]
    rows += [("their sum, which is right", sum(shards[:TP]), "good-ground")]
    rows += [("the program's answer", np.asarray(result)[0, 0, :5], "bad-ground")]
    assert np.allclose(sum(shards[:TP]), want[0, 0, :5], atol=1e-5)
    cells = [(name, [(f"{n:.2f}", role) for n in row]) for name, row, role in rows]
    title = "The result, as each device has it"
    return draw.table(cells, title=title)


# %%
result, _ = run(manual(feed_forward, check_vma=False))
scene.show(numbers(result))

# %% [markdown]
# Each device multiplied by its part of the weights. So it has a *partial sum* for every number, and the right number is the sum
# over the devices. The program takes one device's partial sums as the answer. The shape does not show the mistake: a partial
# sum has the shape of the sum. (Numbers are rounded.)
#
# ## Predict: what does a device have before the sum?
#
# The program is a feed-forward, `h = silu(x @ up)` and `y = h @ down`. Its letters: `b` rows, `s` positions, `d` width,
# `m` hidden width. The mesh axis `dp` cuts the rows, and `tp` cuts `m`.
#
# A **layout** says how a value is cut over the mesh ([lesson 00](00_setup.ipynb)): `h` is `b/dp s m/tp`, and `down` is `m/tp d`. **What is
# the layout of `y = h @ down` before anything is sent?** (All marks of a layout are in lesson 02.)

# %%
layout_of_y = ...
attempt("12.unfinished", layout_of_y)

# %% [markdown]
# ## Three ways to write the sum
#
# | way | in JAX, you write | who chooses what is sent |
# |---|---|---|
# | **Manual** | `jax.shard_map`: what *one device* does | you: each collective is a line |
# | **Auto** | `jax.jit`: the *whole* computation, and the layouts of its arguments and its result | XLA's *partitioner*, which splits it over devices |
# | **Explicit** | `jax.jit` on axes of `AxisType.Explicit`: the whole computation; the layout of a value is part of its *type* | you say what, in types, which JAX checks; XLA chooses how |
#
# Auto takes `feed_forward` without a change. Manual adds a line; Explicit changes one and adds one. In `with_types`, `unreduced={"tp"}` leaves the sum over `tp` open, and
# `reshard` changes the layout: here it finishes the sum.


# %%
def by_hand(x, up, down):  # Manual
    y = feed_forward(x, up, down)  # this device's partial sums
    return lax.psum(y, "tp")  # adds them up over tp


def with_types(x, up, down):  # Explicit
    h = jax.nn.silu(x @ up)
    y = jnp.matmul(h, down, out_sharding=P("dp", None, None, unreduced={"tp"}))
    z = reshard(y, P("dp", None, None))  # adds up over tp
    for name, value, dims in (("h", h, "bsm"), ("y", y, "bsd"), ("z", z, "bsd")):
        seen[name] = str(jax.typeof(value)), str(from_type(value, dims))
    return z


# explicit: the mesh with axes of that kind; run: the result, and what was sent
typed, seen = explicit(mesh), {}
results = {
    "Manual": run(manual(by_hand)),
    "Auto": run(feed_forward, **OUT),
    "Explicit": run(with_types, typed),
}

# %% tags=["plumbing"]
block = 4 // DP * 8 * 16 * 4  # bytes of y on a device


def told(sent):
    """What is sent, in words."""
    line = "{} ×{count}, {bytes_sent:,} B"
    lines = [line.format(kind, **row) for (_, kind), row in sent.items()]
    return "; ".join(lines) or "nothing"


for name, (value, sent) in results.items():
    assert np.allclose(value, want, atol=1e-5), name
    one = {"count": 1, "bytes_sent": 2 * block * (TP - 1) // TP}
    assert sent == {("tp", "all-reduce"): one}, (name, sent)
    print(f"{name:<9} is right, sends {told(sent)}")

# %% [markdown]
# ## A type can say that a sum is unfinished
#
# Explicit gives each value a type. On the left is the type as JAX writes it, on the right our layout of the same value. `U:tp`
# means "unreduced over tp": each device has a partial sum only. We write `+tp`. The first program lacks this **arrow**, a
# movement from one layout to another:

# %%
met("12.unfinished", seen["y"][1], "the type says")
for name, (kind, layout) in seen.items() if opened("12.unfinished") else ():
    print(f"{name}   {kind:<30} {layout}")
assert seen["y"][1] == "b/dp s d +tp" and seen["z"][1] == "b/dp s d"
scene.show(draw.arrow("b/dp s d +tp -> b/dp s d", (4, 8, 16), mesh.shape, itemsize=4))

# %% [markdown]
# ## Predict: forget the sum in each way
#
# Now the sum is missing everywhere. `shard_map` has a check of what a program declares about its result, `check_vma`. Much published
# code switches it off, so there are four programs. **Is each of them `"refused"`, or is its result `"right"` or `"wrong"`?**

# %%
ends = {"Manual": ..., "Manual, check off": ..., "Auto": ..., "Explicit": ...}
attempt("12.fates", ends)


# %% tags=["plumbing"]
def fate(f, *args, **how):
    """How a program with a mistake ends: a word, a line, the bytes sent, the error."""
    try:
        value, sent = run(f, *args, **how)
    except Exception as error:
        return "refused", f"refused: {type(error).__name__}", 0, error
    off, total = np.abs(value - want).max(), sum(r["bytes_sent"] for r in sent.values())
    if off < 1e-5:
        return "right", f"right, sends {total:,} B", total, None
    return "wrong", f"WRONG by {off:.1f}, sends {total:,} B", total, None


GROUND = {"refused": "good-ground", "right": "good-ground", "wrong": "bad-ground"}


def in_colour(columns, title):
    """The fates, a column for each mistake; what sends too much is yellow."""
    rows = []
    for name in fates:
        cells = []
        for found in columns.values():
            word, line, total, _ = found[name]
            much = total > enough
            cells.append((line, "unsure-ground" if much else GROUND[word]))
        rows.append((name, cells))
    return draw.table(rows, tuple(columns), title)


enough = sum(row["bytes_sent"] for row in results["Auto"][1].values())

# %%
# fate: refused, right or wrong, and what the program sends
fates = {
    "Manual": fate(manual(feed_forward)),
    "Manual, check off": fate(manual(feed_forward, check_vma=False)),
    "Auto": fate(feed_forward, **OUT),
    "Explicit": fate(feed_forward, typed),
}
met("12.fates", {name: word for name, (word, *_) in fates.items()}, "in truth")
if opened("12.fates"):
    title = "One mistake, four programs, three kinds of result"
    scene.show(in_colour({"the sum is forgotten": fates}, title))

# %% tags=["plumbing"]
words = {name: word for name, (word, *_) in fates.items()}
assert words["Manual"] == words["Explicit"] == "refused"
assert words["Manual, check off"] == "wrong" and words["Auto"] == "right"

# %% [markdown]
# ## Who sees the whole computation?
#
# Auto cannot forget a sum: it sees the whole computation, and adds what is missing. Here Manual is wrong only where its check is off, and
# then there is no error. (The check refuses a result that you declare equal on all devices if JAX cannot prove it equal.) Explicit stops
# *at the line* with the mistake. JAX's message is long; `explain` turns it into the arrow that is missing:

# %%
error = fates["Explicit"][-1]
if error:
    with jax.set_mesh(typed):
        say(explain(error))
    assert "(all-reduce over tp)" in explain(error)

# %% [markdown]
# ## Predict: a weight is cut along the wrong dim
#
# Now `down` is cut along its columns, `m d/tp` in place of `m/tp d`. **Is each program `"refused"`, `"right"` or `"wrong"`?**

# %%
ends = {"Manual": ..., "Manual, check off": ..., "Auto": ..., "Explicit": ...}
attempt("12.wrong_cut", ends)

# %%
WRONG = ("b/dp s d", "d m/tp", "m d/tp")
mistaken = {
    "Manual": fate(manual(by_hand, WRONG), mesh, WRONG),
    "Manual, check off": fate(manual(by_hand, WRONG, check_vma=False), mesh, WRONG),
    "Auto": fate(feed_forward, mesh, WRONG, **OUT),
    "Explicit": fate(with_types, typed, WRONG),
}
met("12.wrong_cut", {name: word for name, (word, *_) in mistaken.items()}, "in truth")
both = {"the sum is forgotten": fates, "a wrong cut": mistaken}
if opened("12.wrong_cut"):
    scene.show(in_colour(both, "Two mistakes"))

# %% [markdown]
# ## What Auto does without an error
# Manual without its check is refused now: a device's 8 hidden numbers do not fit 32 rows of `down`. Auto's value is right again, so no test of values fails. But it gathers the hidden values, and then the columns of the result: more
# bytes than one sum needs. You see it only if you count:

# %% tags=["plumbing"]
wrong = run(feed_forward, mesh, WRONG, **OUT)
sent = {"the right cut": results["Auto"][1], "a wrong cut": wrong[1]}
bars = [
    (name, {kind: row["bytes_sent"] for (_, kind), row in rows.items()})
    for name, rows in sent.items()
]
roles = {"all-reduce": "tp", "all-gather": "tp/"}
scene.show(draw.memory_bars(bars, title="Auto: bytes sent by a device", roles=roles))

# %% tags=["plumbing"]
right, much = (sum(parts.values()) for _, parts in bars)
assert mistaken["Auto"][0] == "right" and much > right
assert mistaken["Manual"][0] == mistaken["Explicit"][0] == "refused"

# %% [markdown]
# ## Who should choose?
#
# * **Manual** where the bytes matter and you want no surprise: rings, pipelines, overlap. You pay in lines.
# * **Auto** for a first version, and for code by others. Count what it sends before you trust its speed.
# * **Explicit** where the code should stay whole, and a forgotten sum should be an error of types. A type cannot
#   say which message comes first, as a pipeline's schedule does. Inside explicit code, write parts that need an order with `shard_map`.
#
# ## Keep: leave the check on, and count the bytes
#
# 1. A shape does not say whether a sum is finished. A layout does (`+tp`), and so does an explicit type (`U:tp`).
# 2. Manual with its check off can give wrong values without an error. Leave the check on.
# 3. With Auto a wrong layout does not change the values. It may send more, without an error: count what a compiled program sends.
# 4. Explicit refuses a line where a layout is ambiguous; `explain` names the missing arrow.

# %% [markdown]
# ## Further
#
# Two exercises in types, and a Llama written in three ways.
#
# ### Exercise (stretch): write the arrow
#
# The next layer needs its positions cut: `b/dp s/tp d`. Write `y = h @ down` in explicit JAX so that it ends there, with as little sent
# as possible. `h` is `b/dp s m/tp`, `down` is `m/tp d`. Name layouts by `P(…)` alone, without a mesh.


# %%
def scattered(h, down): ...


attempt("12.scattered", scattered)

# %% [markdown]
# ### Exercise (expert): a program that is wrong by design
#
# It adds the residual `r`, the block's input, before the sum is finished. In `shard_map` with the check off, `r` would count `tp` times. Run
# the cell and read the sentence. In its last part, `reshard(x, …)`, the `x` is the unfinished value, here `y`. Write the repaired function.


# %%
def broken(r, up, down):
    h = jax.nn.silu(r @ up)
    y = jnp.matmul(h, down, out_sharding=P("dp", None, None, unreduced={"tp"}))
    return reshard(r + y, P("dp", None, None))


*_, error = fate(broken, typed)
if error:
    with jax.set_mesh(typed):
        say(explain(error))


def repaired(r, up, down): ...


attempt("12.residual", repaired)

# %% [markdown]
# ### One model, three modes
#
# This package writes a model once. Its code names no mesh axis; a plan's `mode` says who carries its arrows out: `"manual"`,
# `"auto"` or `"explicit"`. How near must the losses be? Sums in another order round otherwise. `tolerance` derives how much:
# `llmpar inspect --tolerance` shows it sum by sum.

# %%
LLAMA, ROWS, SEQ = preset("tiny"), 8, 32
SIZES = {8: "dp=2 fsdp=2 tp=2", 4: "fsdp=2 tp=2", 2: "fsdp=2", 1: "dp=1"}
MESH = SIZES[max(n for n in SIZES if n <= len(devices))]
TEXT = counting_text(ROWS, SEQ)


adam = optax.adamw(3e-3)
solo = train_on(LLAMA, Plan("dp=1"), TEXT, adam, 1).losses[0]
plans = {name: Plan(MESH, mode=name) for name in ("manual", "auto", "explicit")}
runs = {name: train_on(LLAMA, plan, TEXT, adam, 1) for name, plan in plans.items()}

# %%
fresh = {"logits": 0.5, "loss": float(np.log(LLAMA.vocab_size))}
bound = tolerance(plans["manual"].resolve(LLAMA), ROWS, SEQ, **fresh).bound("loss")
for name, one in runs.items():
    loss, sent = one.losses[0], census_table(census_hlo(one.text, one.step.mesh))
    assert abs(loss / solo - 1) <= bound, name
    total = sum(row["bytes_sent"] for row in sent.values())
    kinds = dict.fromkeys(sorted(kind for _, kind in sent), 0)
    for (_, kind), row in sent.items():
        kinds[kind] += row["count"]
    words = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
    print(f"{name:<9} loss {loss:.5f}, {total:>9,} B: {words}")
predicted = sum(c.bytes_sent for c in as_predicted(runs["manual"]))
print(f"losses agree within {bound:.0e}")
print(f"Manual sends the predicted {predicted:,} B")

# %% [markdown]
# What Manual sends was predicted by a formula, to the byte. What Auto sends is in no line of the code: on simulated devices its
# partitioner sums whole gradients where a reduce-scatter would do. Explicit asks for the reduce-scatter in a type; XLA for CPUs still
# makes an all-reduce and a slice of it, and XLA for GPUs joins the two again. **Types say what is meant. The compiler still chooses
# how.**
#
# ### What the types say of a whole step
#
# Under Explicit every value of the model has a type. It must equal the layout that the plan promises, or tracing stops. Two
# marks: `U:tp`, unreduced over tp, is an unfinished sum. `R:(dp,fsdp)`, reduced over dp and fsdp: each device has the
# whole weight. Each will compute only a part of its *gradient*, which must be summed over dp and fsdp.

# %%
rows = types(LLAMA, plans["manual"], ROWS, SEQ)
for row in [r for r in rows if r["value"].split()[0] in ("stream", "ffn", "vocab")][:7]:
    print(f"{row['value']:<17} {row['layout']:<24} {row['type']}")
assert all(row["layout"] == row["type_says"] for row in rows)
print(f"{len(rows)} values of a step: every type says what the plan's layout says")

# %% [markdown]
# ### On your cluster
#
#     llmpar inspect --mesh "fsdp=-1" --mode auto
#     llmpar inspect --mesh "dp=2 fsdp=2 tp=2" --mode explicit --types
#     llmpar inspect --mesh "dp=2 fsdp=2 tp=2" --tolerance
