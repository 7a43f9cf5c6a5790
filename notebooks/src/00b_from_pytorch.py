# ---
# jupyter:
#   llmpar:
#     teaching: 15
#     exercises: 5
#     needs: ["00"]
#     question: What are DDP, FSDP2 and DTensor in JAX, and who calls NCCL?
#     objectives:
#     - >-
#       Read data parallelism and FSDP in `jit`, `grad` and `shard_map`, and say which
#       line of PyTorch each stands for.
#     - >-
#       Say what `lax.pcast` changes, and read what was compiled with
#       `lower().compile()`.
# ---

# %% [markdown]
# # 00b · You know PyTorch. Who combines the gradients here?
#
# In PyTorch you start a process for each GPU and wrap the model in DDP, which averages the gradients over the processes. In the code below
# nothing is wrapped, and no line calls a collective. But all devices end with the same gradient. Who combines the gradients?

# %% tags=["plumbing"]
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # simulated devices; real ones: On your cluster

from llmpar.parallel.mesh import use_devices

devices = use_devices()

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from llmpar import draw
from llmpar.draw.scene import OTHERS, Rect, Text, compose, show
from llmpar.inspect.census import census_hlo, partitioned_hlo
from llmpar.lessons import attempt, hint, met, opened, solution
from llmpar.parallel.mesh import make_mesh, sharding, spec
from llmpar.plan.layout import parse_arrow, parse_layout
from llmpar.plan.mesh_shape import parse_mesh

N = len(devices)
rng = np.random.default_rng(0)
x = rng.standard_normal((4 * N, 2 * N)).astype(np.float32)  # a batch
w = rng.standard_normal((2 * N, 8)).astype(np.float32)  # a weight


def sent_by(program, *given):
    """The kinds of the collectives in a compiled program."""
    return [c.kind for c in census_hlo(partitioned_hlo(program.lower(*given)), mesh)]


# %% tags=["plumbing"]
items = []
for r in range(4):
    items.append(Rect(92 * r, 0, 84, 92, "cell", "edge", radius=4))
    items.append(Text(92 * r + 42, 14, f"process {r}", "small", "middle"))
    items.append(Text(92 * r + 42, 34, "train.py", "small", "middle", "soft"))
    items.append(Rect(92 * r + 8, 52, 68, 30, OTHERS[r], "edge"))
    items.append(Text(92 * r + 42, 67, f"GPU {r}", "small", "middle", "black"))
    items.append(Rect(440 + 80 * r, 52, 68, 30, OTHERS[r], "edge"))
    items.append(Text(474 + 80 * r, 67, f"GPU {r}", "small", "middle", "black"))
items.append(Rect(432, 0, 324, 92, "", "edge", radius=4))
items.append(Text(594, 14, "process 0", "small", "middle"))
items.append(Text(594, 34, "train.py", "small", "middle", "soft"))
items.append(Text(180, -16, "torchrun train.py", "body", "middle", bold=True))
items.append(Text(594, -16, "python train.py, with JAX", "body", "middle", bold=True))
words = "torchrun starts a process for each of 4 GPUs; JAX has one process for all 4"
show(compose("One node with four GPUs", [items], words))

# %% [markdown]
# A JAX process sees all devices of its host, unless its launcher gives it only some (see the dictionary). It compiles one program, which
# each device runs on its own piece of the data.
#
# ## Predict: how many collectives does this program contain?

# %%
mesh = make_mesh(f"dp={N}")


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


ddp = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(P(), P("dp")), out_specs=P())
ddp = jax.jit(ddp)

# %% [markdown]
# - `jax.grad(loss)` is a function. It returns the gradient with respect to the first argument, here `w`. There is no
#   `.backward()`, and nothing is stored in `w.grad`.
# - `jax.shard_map` runs a function on every device, as each rank runs your script. `P("dp")` cuts the first dim of `x` over the
#   devices along `dp`. `P()` leaves `w` whole: every device has the same copy. `in_specs` are for the arguments, `out_specs`
#   for the result, which is the same on all devices here.
# - `jax.jit` compiles it all, as `torch.compile` does.
#
# A **collective** is a communication in which all devices of a group take part; `broadcast` is one. **How many collectives does the
# compiled program contain?**

# %%
num_collectives = ...  # a number
attempt("00b.collectives", num_collectives)

# %%
met("00b.collectives", len(sent_by(ddp, w, x)), "compiled")
if opened("00b.collectives"):
    print("in the compiled program:", *sent_by(ddp, w, x))

# %% [markdown]
# JAX knows that `w` is the same on all devices (`P()`). Each device computes a part of its gradient. One all-reduce adds the parts; DDP sends
# the same message (here 4 devices):

# %%
show(draw.replicas())

# %% [markdown]
# ## Predict: how large is this gradient?
#
# One device that has all rows gives `whole_batch`. DDP gives the same. **What is `gradient / whole_batch`, on 8 devices?**

# %%
gradient = ddp(w, x)
whole_batch = jax.grad(loss)(w, x)  # on one device
ratio = ...  # a number
attempt("00b.ratio", ratio)

# %%
met("00b.ratio", round(float(np.median(gradient / whole_batch)), 3), "computed")

# %% tags=["plumbing"]
assert sent_by(ddp, w, x) == ["all-reduce"]
assert np.allclose(gradient, N * whole_batch, rtol=1e-4, atol=1e-5)

# %% [markdown]
# Each device has the gradient of the mean over its own rows. **DDP and FSDP2 average over the devices, JAX adds.** So divide by the number
# of devices yourself. Lesson 03 shows what goes wrong if you forget it.
#
# ## With `pcast` each device keeps a gradient of its own
#
# `lax.pcast(w, "dp", to="varying")` changes no number. It marks `w` as each device's own copy. We differentiate with respect to that copy,
# so each device gets its own gradient, as in a model without DDP. ([Lesson 03](03_data_parallelism.ipynb) has a picture of `pcast`.)


# %%
def own_gradient(w, x):
    own = lax.pcast(w, "dp", to="varying")
    return jax.grad(loss)(own, x)[None]  # [1, 2N, 8]: this device's


no_ddp = jax.shard_map(
    own_gradient, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P("dp")
)
no_ddp = jax.jit(no_ddp)
print("in the compiled program:", sent_by(no_ddp, w, x))
print("shape of the result:", no_ddp(w, x).shape)

# %% tags=["plumbing"]
assert sent_by(no_ddp, w, x) == []
assert np.allclose(no_ddp(w, x).sum(0), gradient, rtol=1e-4, atol=1e-5)


def forgotten(w, x):
    return jax.grad(loss)(lax.pcast(w, "dp", to="varying"), x)


refused = ""
try:
    places = dict(mesh=mesh, in_specs=(P(), P("dp")), out_specs=P())
    jax.jit(jax.shard_map(forgotten, **places)).lower(w, x)
except ValueError as error:
    refused = str(error)
assert "out_specs which require replication" in refused

# %% [markdown]
# In PyTorch, if a sum is forgotten, the copies drift apart without an error. By default JAX refuses that: `out_specs=P()` says that all
# devices have the same result, and with it the program above raises a `ValueError`.
#
# ## FSDP2 needs one more line: gather the weight before its use
#
# `fully_shard` stores a part of each weight on each GPU. By default its hooks gather a layer's weights before the layer runs, and free them
# after it.


# %%
def sharded_loss(part, x):
    return loss(lax.all_gather(part, "dp", tiled=True), x)


fsdp = jax.shard_map(
    jax.grad(sharded_loss), mesh=mesh, in_specs=(P("dp"), P("dp")), out_specs=P("dp")
)
fsdp = jax.jit(fsdp)

# %% [markdown]
# We write one `all_gather`. **How many collectives of each kind does the compiled program contain?**

# %%
kinds = {"all-gather": ..., "reduce-scatter": ..., "all-reduce": ...}
attempt("00b.fsdp", kinds)

# %% tags=["plumbing"]
compiled_kinds = {kind: sent_by(fsdp, w, x).count(kind) for kind in kinds}
met("00b.fsdp", compiled_kinds, "compiled")
assert sent_by(fsdp, w, x) == ["all-gather", "reduce-scatter"]
assert np.allclose(fsdp(w, x), gradient, rtol=1e-4, atol=1e-5)
if opened("00b.fsdp"):
    show(draw.gather_use_forget())

# %% [markdown]
# `grad` wrote the second one: the backward pass of an all-gather sums over the devices, and gives each device its part of the sum. It
# is a sum here, too: divide it. (`x` needs no gradient: one gather is enough. In the picture, of three layers, each is gathered again for the
# backward pass: lesson 04.)
#
# ## You can read a program before it runs
#
# `lower` writes the program for these shapes, `compile` gives it to XLA, JAX's compiler. XLA may join or move collectives; on NVIDIA's GPUs
# it usually calls NCCL for them.

# %%
compiled = fsdp.lower(w, x).compile()
lines = compiled.as_text().splitlines()
sends = [x for x in lines if "all-gather(" in x or "reduce-scatter(" in x]
print(*(line.strip()[:76] for line in sends), sep="\n")
reserved = compiled.memory_analysis().argument_size_in_bytes
print("arguments of a device:", reserved, "bytes")

# %% tags=["plumbing"]
assert reserved == (w.nbytes + x.nbytes) // N
if jax.default_backend() == "cpu" and N == 8:  # as the text says
    assert (w.nbytes, x.nbytes, len(sends)) == (512, 2048, 2)

# %% [markdown]
# The first two lines are the gather and the reduce-scatter. The arguments of a device have 320 bytes: an eighth of `w` (512 bytes) and of
# `x` (2,048).
#
# ## A DTensor has an entry for each mesh axis, JAX for each dim of the array
#
# Take a mesh of 2 × 4 GPUs and cut the rows of an array over its first axis. A DTensor has a placement for each *axis of the mesh*:
# `[Shard(0), Replicate()]`. A `PartitionSpec` has an entry for each *dim of the array*: `P("dp", None)`. Our layout, `b/dp d`, has an
# entry for each dim, too (`b` rows of the batch, `d` width of the model).

# %%
show(draw.layout("b/dp d", (8, 16), "dp=2 tp=4", itemsize=4))

# %% [markdown]
# ## The dictionary
#
# | PyTorch | JAX | our text |
# |---|---|---|
# | `init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))` | `jax.make_mesh((2, 4), ("dp", "tp"))` | `dp=2 tp=4` |
# | `distribute_tensor(w, mesh, [Shard(0), Replicate()])` | `jax.device_put(w, NamedSharding(mesh, P("dp")))` | `b/dp d` |
# | `w.to_local()` | `w.addressable_shards[0].data` | |
# | `dist.get_rank(group)` | `lax.axis_index("tp")` | |
# | `dist.all_gather_into_tensor` | `lax.all_gather(x, "tp", tiled=True)` | `b/tp d -> b d` |
# | `dist.reduce_scatter_tensor` | `lax.psum_scatter(x, "tp", tiled=True)` | `b d +tp -> b/tp d` |
# | `dist.all_reduce` | `lax.psum(x, "tp")` | `b d +tp -> b d` |
# | `dist.all_to_all_single` (dim 0 only) | `lax.all_to_all(x, "tp", 1, 0, tiled=True)` | `b/tp d -> b d/tp` |
# | `Partial()` of a DTensor | a varying value that is still to be added | `+tp` |
# | DDP | `grad` inside `shard_map`, `w` at `P()`; divided by the number of devices | `d m +dp -> d m` |
# | `fully_shard` (FSDP2) | `all_gather` inside the loss; divided, too | `d/dp m -> d m` |
# | NCCL | XLA calls it on GPUs | |
# | `torchrun`, a process per GPU | `jax.distributed.initialize()`, usually a process per host; on GPUs under SLURM or Open MPI one per GPU | |
#
# An arrow `->` is a movement, and `+tp` an unfinished sum. Lesson 02 draws them. (`m` is the width of a feed-forward layer.)


# %% tags=["plumbing"]
# Every row with a collective is run: its arrow, its function and what was compiled
# are of one kind.
mesh = make_mesh(f"tp={N}")
ROWS = {
    "b/tp d -> b d": lambda x: lax.all_gather(x, "tp", tiled=True),
    "b d +tp -> b/tp d": lambda x: lax.psum_scatter(x, "tp", tiled=True),
    "b d +tp -> b d": lambda x: lax.psum(x, "tp"),
    "b/tp d -> b d/tp": lambda x: lax.all_to_all(x, "tp", 1, 0, tiled=True),
}
for text, function in ROWS.items():
    arrow = parse_arrow(text)
    adds = "+" in text  # every device has numbers of its own, here the same ones
    own = lambda x, f=function, adds=adds: f(
        lax.pcast(x, "tp", to="varying") if adds else x
    )
    places = dict(in_specs=spec(arrow.before), out_specs=spec(arrow.after))
    vague = dict(
        check_vma=text != "b/tp d -> b d"
    )  # JAX does not see that a gathered value is whole
    program = jax.jit(jax.shard_map(own, mesh=mesh, **places, **vague))
    kinds = [move.kind for move in arrow.moves]
    assert sent_by(program, x) == kinds
    assert np.allclose(program(x), x * (N if adds else 1), rtol=1e-5)
two, four = 2, 4
auto = (AxisType.Auto, AxisType.Auto)
theirs = jax.make_mesh((two, four), ("dp", "tp"), axis_types=auto)
placed = jax.device_put(x, NamedSharding(theirs, P("dp")))
ours = sharding(make_mesh(f"dp={two} tp={four}"), parse_layout("b/dp d"))
assert placed.sharding.devices_indices_map(x.shape) == ours.devices_indices_map(x.shape)
assert placed.addressable_shards[0].data.shape == (len(x) // two, 2 * N)
rank = jax.shard_map(
    lambda: lax.axis_index("tp")[None], mesh=theirs, in_specs=(), out_specs=P("tp")
)
assert np.array_equal(jax.jit(rank)(), np.arange(four))

# %% [markdown]
# ## Keep: you write the loss, `grad` writes the sums
#
# 1. One JAX process usually runs all devices of its host; a function in `shard_map` corresponds to a rank's script in PyTorch.
# 2. The gradient of a shared weight is summed over the devices. DDP and FSDP2 take the mean.
# 3. `pcast(…, to="varying")` marks a value as each device's own copy. A gradient with respect to that copy is not summed.
# 4. The gradient of an all-gather is a reduce-scatter: that is FSDP.
# 5. Read what was compiled, with `lower().compile()`; do not guess.

# %% [markdown]
# ## Further
#
# The left sides are those of PyTorch's documentation ([DTensor](https://docs.pytorch.org/docs/stable/distributed.tensor.html),
# [`fully_shard`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)). PyTorch is not needed here, so they are not run.
#
# By default `jax.make_mesh` makes *explicit* axes, on which JAX checks layouts as types (lesson 12). The axes of these lessons are
# `AxisType.Auto`.
#
# Data parallelism in both:
#
# ```python
# # PyTorch: torchrun --nproc-per-node 8 train.py
# dist.init_process_group("nccl")
# local = int(os.environ["LOCAL_RANK"])
# torch.cuda.set_device(local)
# model = Linear(16, 8, bias=False).to(local)
# model = DistributedDataParallel(model, device_ids=[local])
# loss = model(rows_of_this_rank).pow(2).mean()
# loss.backward()                      # hooks: all-reduce, mean, in buckets
#
# # FSDP2
# mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("dp",))
# for layer in model.layers:
#     fully_shard(layer, mesh=mesh)    # parameters become DTensors, Shard(0)
# fully_shard(model, mesh=mesh)
# ```
#
# ### A weight without a wrapper: trees
#
# JAX has no `nn.Module`. Weights are a tree (a dict, say), and `grad` returns a tree of the same form. A step is a function from a
# state to the next one.


# %%
def step(weights, x):
    slope = jax.grad(lambda tree: loss(tree["w"], x) + jnp.sum(tree["b"] ** 2))(weights)
    return jax.tree.map(lambda old, change: old - 0.1 * change, weights, slope)


new = jax.jit(step)({"w": w, "b": jnp.ones(3)}, x)
assert np.allclose(new["b"], 0.8) and new["w"].shape == w.shape
print({name: value.shape for name, value in new.items()})

# %% [markdown]
# ### Exercise (stretch): read a placement
#
# A DTensor `[b, d]` is on a mesh with the axes `("dp", "tp")`. Its placements are `[Replicate(), Shard(1)]`. Write our layout.

# %%
layout_seen = ...  # a text such as "b/dp d"
attempt("00b.placements", layout_seen)

# %% [markdown]
# ### Exercise (expert): what FSDP2 sends
#
# `fully_shard` on 8 GPUs stores an eighth of a float32 weight of 64 MiB on each. The weight is gathered for the forward
# pass, forgotten, and gathered again for the backward pass. How many **MiB** does a GPU send for it in a step?

# %%
mib_sent = ...
attempt("00b.fsdp_bytes", mib_sent)

# %% [markdown]
# ### On your cluster
#
# ```
# torchrun --nproc-per-node 1 train.py       one process per host (lesson 17)
# llmpar doctor                              which devices this process sees
# ```
#
# In `train.py` call `llmpar.launch.joined.initialize()`: it reads torchrun's variables, as `llmpar train` does. JAX alone does not read them:
# give `jax.distributed.initialize` the coordinator's address, the number of processes and the process's own number.
