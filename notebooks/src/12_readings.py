# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 25
#     needs: ["00", "05"]
#     objectives:
#     - Say who chooses what is sent under each of four readings of one text.
#     - Predict which reading refuses a mistake, which repairs it silently, and which
#       gives wrong numbers.
#     - Write unfinished sums and arrows as explicit types.
# ---

# %% [markdown]
# # 12 · Four readings: who chooses what is sent?
#
# A model's text says what is computed. Somebody must still say what is *sent*. JAX has three ways for that, and this
# package can carry out one text in all of them. We call each way a **reading**:
#
# | reading | in JAX | who chooses the collectives |
# |---|---|---|
# | `Solo` | one device | nobody: there are none. It is the reference |
# | `Manual` | `jax.shard_map` | you: each collective is a line of your program |
# | `Auto` | `jax.jit` with shardings | XLA's **partitioner**, the pass that splits a program over devices |
# | `Explicit` | `jax.jit` on axes of `AxisType.Explicit` | you, as types; JAX checks them while it traces |
#
# A **layout** is one line that says where a value lives: `b/dp s d +tp` is cut by the mesh axis `dp` along `b`, and is
# an unfinished sum over `tp`. An **arrow** is a movement between two layouts. A **census** counts what a compiled program
# sends. (All words: [docs/words.md](../docs/words.md#words).)
#
# **Question.** If the text has a mistake, which reading tells you, and which one hides it?
#
# Letters: `b` rows, `s` positions, `d` width, `m` hidden width.
#
# The mesh has the axes `dp` (data parallelism, cuts the batch) and `tp` (tensor parallelism, cuts products). `shard_map` runs a function on
# every device with its own block. The core path ends at *Further*.

# %% tags=["plumbing"]
from llmpar.mesh import use_devices

devices = use_devices()

# %% tags=["plumbing"]
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from llmpar import draw, explain, from_type
from llmpar.config import preset
from llmpar.draw import scene
from llmpar.exercises import attempt, hint, met, say, solution
from llmpar.exercises.lesson import as_predicted, counting_text, trained
from llmpar.inspect.census import census_hlo, census_table, read_program
from llmpar.inspect.types import types
from llmpar.mesh import explicit, make_mesh, sharding, spec
from llmpar.notation import parse_layout
from llmpar.plan import Plan
from llmpar.predict.tolerance import tolerance

# Accelerators round float32 products unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
TP = max(n for n in (1, 2, 4) if n <= len(devices))
DP = min(2, len(devices) // TP)
mesh = make_mesh(f"dp={DP} tp={TP}")

# %% [markdown]
# ## One text, three programs
#
# A feed-forward: two products with something between them. The columns of `up` and the rows of `down` are cut by `tp`, so
# each rank of `tp` has some of the hidden values.

# %%
rng = np.random.default_rng(0)
x = rng.standard_normal((4, 8, 16)).astype(np.float32)
up = rng.standard_normal((16, 32)).astype(np.float32) / 4
down = rng.standard_normal((32, 16)).astype(np.float32) / 4
LAYOUTS = ("b/dp s d", "d m/tp", "m/tp d")  # of x, up and down


def feed_forward(x, up, down):
    h = jax.nn.silu(x @ up)  # b s m
    return h @ down  # b s d


want = feed_forward(x, up, down)  # one device

# %% [markdown]
# **Predict.** `h` is laid out as `b/dp s m/tp`, and `down` as `m/tp d`. Each device multiplies what it holds. **What is the
# layout of `y = h @ down` before anything is sent?**

# %%
layout_of_y = ...
attempt("12.unfinished", layout_of_y)

# %% [markdown]
# **Manual.** You write what *one device* does. Its `x` is a block, and `lax.psum` is the arrow `+tp -> whole`.


# %%
def by_hand(x, up, down):
    y = feed_forward(x, up, down)  # this device's terms of the sum
    return lax.psum(y, "tp")  # b s d +tp -> b s d


def manual(f, layouts=LAYOUTS, **how):
    places = [spec(parse_layout(text)) for text in layouts]
    out = spec(parse_layout("b/dp s d"))
    return jax.shard_map(f, mesh=mesh, in_specs=tuple(places), out_specs=out, **how)


# %% [markdown]
# **Auto.** You write the whole computation, and say where arguments and results live. `feed_forward` needs no change.
#
# **Explicit.** You write the whole computation too. On a mesh of explicit axes the layout is part of a value's *type*.
# Where a type would be ambiguous, you say it: `unreduced={"tp"}` is our `+tp`, and `reshard` is the arrow.


# %%
def with_types(x, up, down):
    h = jax.nn.silu(x @ up)
    y = jnp.matmul(h, down, out_sharding=P("dp", None, None, unreduced={"tp"}))
    z = reshard(y, P("dp", None, None))  # b/dp s d +tp -> b/dp s d
    for name, value, dims in (("h", h, "bsm"), ("y", y, "bsd"), ("z", z, "bsd")):
        seen[name] = str(jax.typeof(value)), str(from_type(value, dims))
    return z


typed, seen = explicit(mesh), {}


# %% tags=["plumbing"]
def run(f, on=mesh, layouts=LAYOUTS, **how):
    """The value, and what the program sends: kinds, counts and bytes."""
    places = [sharding(on, parse_layout(text)) for text in layouts]
    args = [jax.device_put(a, p) for a, p in zip((x, up, down), places, strict=True)]
    with jax.set_mesh(on):
        compiled, text = read_program(jax.jit(f, **how).lower(*args))
        value = np.asarray(compiled(*args))
    return value, census_table(census_hlo(text, on))


OUT = {"out_shardings": sharding(mesh, parse_layout("b/dp s d"))}


def told(sent):
    """What is sent, in words."""
    line = "{} ×{count}, {bytes_sent:,} B"
    lines = [line.format(kind, **row) for (_, kind), row in sent.items()]
    return "; ".join(lines) or "nothing"


# %%
results = {
    "manual": run(manual(by_hand)),
    "auto": run(feed_forward, **OUT),
    "explicit": run(with_types, typed),
}

# %% [markdown]
# ## Compare
#
# The same value, and the same collective: one all-reduce of a block of `y`.

# %%
block = 4 // DP * 8 * 16 * 4  # bytes of y on a device
for name, (value, sent) in results.items():
    assert np.allclose(value, want, atol=1e-5), name
    if TP > 1:
        one = {"count": 1, "bytes_sent": 2 * block * (TP - 1) // TP}
        assert sent == {("tp", "all-reduce"): one}, (name, sent)
    print(f"{name:<9} {told(sent)}")

# %% [markdown]
# And what the types say, beside our layout of the same value. `U:tp` reads "unreduced over tp".

# %%
for name, (kind, layout) in seen.items():
    print(f"{name}   {kind:<30} {layout}")
met("12.unfinished", seen["y"][1], "typed")
assert seen["y"][1] == "b/dp s d +tp" and seen["z"][1] == "b/dp s d"
scene.show(draw.arrow("b/dp s d +tp -> b/dp s d", (4, 8, 16), mesh.shape, itemsize=4))

# %% [markdown]
# Every device has whole rows of numbers, and each number is only a part of its sum. A shape alone cannot tell `y` from
# `z`: both are `[4, 8, 16]`. The type can, and so can the layout.
#
# ## One mistake, three fates
#
# **The sum is forgotten.** The programs below lack the arrow `+tp -> whole`. `check_vma=False` switches off the check of
# `shard_map` that asks whether a result is the same on all ranks. Much published code does that.


# %%
def fate(f, *args, **how):
    try:
        value, sent = run(f, *args, **how)
    except Exception as error:
        return f"refused: {type(error).__name__}", error
    off = np.abs(value - want).max()
    verdict = "right" if off < 1e-5 else f"WRONG by {off:.1f}"
    return f"{verdict}, sends {told(sent)}", None


fates = {
    "Manual": fate(manual(feed_forward)),
    "Manual, check off": fate(manual(feed_forward, check_vma=False)),
    "Auto": fate(feed_forward, **OUT),
    "Explicit": fate(feed_forward, typed),
}
for name, (what, _) in fates.items():
    print(f"{name:<18} {what}")
if TP > 1:
    assert all(fates[name][0].startswith("refused") for name in ("Manual", "Explicit"))
    assert "WRONG" in fates["Manual, check off"][0] and "right" in fates["Auto"][0]

# %% [markdown]
# Auto cannot forget a sum: it sees the whole computation and adds what is missing. Explicit refuses *at the line*, and
# `explain` turns JAX's message into the arrow that is missing:

# %%
error = fates["Explicit"][1]
if error:
    say(str(error).partition(". ")[0] + ".\n\n")
    say(explain(error))
    assert "'+tp -> whole' (all-reduce over tp)" in explain(error)

# %% [markdown]
# **A weight is cut along the wrong dim.** Somebody writes `m d/tp` for `down` in place of `m/tp d`.

# %%
WRONG = ("b/dp s d", "d m/tp", "m d/tp")
mistaken = {
    "Manual": fate(manual(by_hand, WRONG), mesh, WRONG),
    "Auto": fate(feed_forward, mesh, WRONG, **OUT),
    "Explicit": fate(with_types, typed, WRONG),
}
for name, (what, _) in mistaken.items():
    print(f"{name:<9} {what}")
auto = run(feed_forward, mesh, WRONG, **OUT)[1]
total = sum(row["bytes_sent"] for row in auto.values())
if TP > 1:
    right = sum(row["bytes_sent"] for row in results["auto"][1].values())
    print(f"Auto sends {total:,} B where {right:,} B are enough")
    assert "right" in mistaken["Auto"][0] and total > right
    assert "right" not in mistaken["Manual"][0] + mistaken["Explicit"][0]

# %% [markdown]
# Here Auto is the one that hides something. The value is right, no test of values fails, and the step sends more than it
# needs. You find out from a profile, or from a census.
#
# ## Five lines
#
# 1. A reading is who carries the arrows out: nobody, you, the partitioner, or you in types.
# 2. `unreduced` is an open sum `+a`; `reshard` is an arrow; `from_type` reads a layout from any array.
# 3. Auto never gives a wrong value for a wrong layout. It sends more, without a word.
# 4. Manual with its check off gives wrong values without a word. Leave the check on.
# 5. Explicit refuses what is ambiguous, at the line; `explain` names the missing arrow.
#
# **One thing to remember: a shape does not say whether a sum is finished. A layout does, and so does an explicit type.**

# %% [markdown]
# ## Further
#
# Two exercises in types, a Llama under the four readings, and when to take which.
#
# ### Exercise (stretch): write the arrow
#
# The next layer wants its positions cut: `b/dp s/tp d`. Write `y = h @ down` in explicit JAX so that it ends there, with as
# little sent as possible. `h` is `b/dp s m/tp`, `down` is `m/tp d`.


# %%
def scattered(h, down): ...


attempt("12.scattered", scattered)

# %% [markdown]
# ### Exercise (expert): a program that is wrong by design
#
# It adds the residual `x` before the sum is finished. In `shard_map` with the check off, `x` would count `tp` times. Run the
# cell, read the sentence, and repair the copy below.


# %%
def broken(x, up, down):
    h = jax.nn.silu(x @ up)
    y = jnp.matmul(h, down, out_sharding=P("dp", None, None, unreduced={"tp"}))
    return reshard(x + y, P("dp", None, None))


_, error = fate(broken, typed)
if error:
    say(explain(error))


def repaired(x, up, down): ...


attempt("12.residual", repaired)

# %% [markdown]
# ## A Llama under four readings
#
# The model's text names no mesh axis; the plan's `reading` says who carries its arrows out. How near must four losses be?
# Sums in another order round otherwise. `tolerance` derives how much: `llmpar inspect --tolerance` shows it sum by sum.

# %%
LLAMA, ROWS, SEQ = preset("tiny"), 8, 32
SIZES = {8: "dp=2 fsdp=2 tp=2", 4: "fsdp=2 tp=2", 2: "fsdp=2", 1: "dp=1"}
MESH = SIZES[max(n for n in SIZES if n <= len(devices))]
TEXT = counting_text(ROWS, SEQ)


adam = optax.adamw(3e-3)
solo = trained(LLAMA, Plan("dp=1"), TEXT, adam, 1).losses[0]
plans = {name: Plan(MESH, reading=name) for name in ("manual", "auto", "explicit")}
runs = {name: trained(LLAMA, plan, TEXT, adam, 1) for name, plan in plans.items()}

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
    told = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
    print(f"{name:<9} loss {loss:.5f}, {total:>9,} B: {told}")
predicted = sum(c.bytes_sent for c in as_predicted(runs["manual"]))
print(f"losses agree within {bound:.0e}")
print(f"Manual sends the predicted {predicted:,} B")

# %% [markdown]
# What Manual sends was predicted by a formula, to the byte. What Auto sends nobody wrote down: on simulated devices its
# partitioner sums whole gradients where a reduce-scatter would do. Explicit asks for the reduce-scatter in a type; XLA for
# CPUs still makes an all-reduce and a slice of it, and XLA for GPUs joins the two again. **Types say what is meant. The
# compiler still chooses how.**
#
# ## What the types say of a whole step
#
# Under Explicit every region of the model has a type. It must equal the layout that the plan promises, or tracing stops.

# %%
rows = types(LLAMA, plans["manual"], ROWS, SEQ)
for row in [r for r in rows if r["value"].split()[0] in ("stream", "ffn", "vocab")][:7]:
    print(f"{row['value']:<17} {row['layout']:<24} {row['type']}")
assert all(row["layout"] == row["type_says"] for row in rows)
print(f"{len(rows)} values of a step: every type says what the plan's layout says")

# %% [markdown]
# ## Who should choose?
#
# * **Manual** where the bytes matter and you want no surprise: rings, pipelines, overlap. You pay in lines.
# * **Auto** for a first version, and for text by others. Take a census before you trust its speed.
# * **Explicit** where the text should stay whole, and a forgotten sum should be an error of types. Orders of messages (a
#   pipeline's schedule) are beyond it: a type knows no time. Islands of `shard_map` go inside.
#
# ## On your cluster
#
#     llmpar inspect --mesh "fsdp=-1" --reading auto
#     llmpar inspect --mesh "dp=2 fsdp=2 tp=2" --reading explicit --types
#     llmpar inspect --mesh "dp=2 fsdp=2 tp=2" --tolerance
