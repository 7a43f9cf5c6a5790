# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 15
#     needs: ["05", "09", "11"]
#     question: Which rules change where 72 GPUs are on fast links, on a torus, or in
#       eight bits?
#     objectives:
#     - Compute for a new machine which numbers of tokens and ranks, and which widths of
#       experts, hide their messages.
#     - Say which decision changes between nodes of 8 and a rack of 72, and which does not.
#     - Say what eight bits do to both sides of an inequality.
# ---

# %% [markdown]
# # 15 · Machines of 2026: is "tp inside a node of 8" still right?
#
# Tensor parallelism and experts belong inside a node, a pipeline between nodes: these rules come from machines in which eight
# GPUs share fast links. In a rack of GB200, 72 GPUs do; in a pod of TPUs, thousands. Which rule changes, and why?

# %% tags=["plumbing"]
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # simulated devices; real ones: On your cluster

from llmpar.parallel.mesh import use_devices

devices = use_devices()

import dataclasses

from llmpar import draw
from llmpar.draw.scene import Rect, Text, compose, show, small_text
from llmpar.lessons import attempt, hint, met, opened, say, solution
from llmpar.plan.mesh_shape import parse_mesh
from llmpar.plan.presets import preset
from llmpar.planner import planner
from llmpar.predict import formulas
from llmpar.predict.hardware import chip
from llmpar.predict.time import step_time

NAMES = {"H100": "h100", "MI355X": "mi355x", "GB200": "gb200", "TPU v5p": "v5p"}
CHIPS = {name: chip(key) for name, key in NAMES.items()}


def rate(c):
    """Bytes per second that leave a chip on its fast links."""
    return c.link_bytes_per_s * (2 * c.num_axes if c.link == "torus" else 1)


def reach(chips):
    """A square for each chip that fast links reach, as many as have room."""
    items, lines, most = [], [], 72
    for i, (name, c) in enumerate(chips.items()):
        y, role = 44 * i, "other3" if c.link == "torus" else "matmuls"
        items.append(Text(-12, y + 8, name, anchor="end"))
        drawn = min(most, c.node_size)
        items += [Rect(9 * k, y, 8, 16, role, "edge", 0.5) for k in range(drawn)]
        more = "" if drawn == c.node_size else "… "
        links = "links to neighbours" if c.link == "torus" else "each joined to each"
        words = (
            f"{more}{c.node_size:,} chips, {links}; {c.flops_per_s / 1e12:,.0f} TFLOP/s"
        )
        words += f" and {rate(c) / 1e9:,.0f} GB/s each"
        items.append(small_text(0, y + 27, words, "start"))
        lines.append(f"{name}: {words}")
    title = "How many chips do fast links reach?"
    return compose(title, [items], "\n".join(lines))


# %% tags=["plumbing"]
show(reach(CHIPS))

# %% [markdown]
# On a *torus* a chip has links only to its neighbours, two along each axis (a TPU v5p has three axes).
#
# ## Predict: with how many tokens does a gather overlap?
#
# A gather of weights overlaps with matmuls (it is *hidden*) if a device computes with more than **C/β** tokens (lesson 03): C are its
# FLOPs per second, β the bytes per second that leave it. Does a newer GPU need fewer tokens, or more? **Compute C/β for the four chips.**
#
# | chip | H100 | MI355X | GB200 | TPU v5p |
# |---|---|---|---|---|
# | C, 1e12 FLOPs per second | 989.4 | 2,516.6 | 2,398 | 459 |
# | β, 1e9 bytes per second | 450 | 537.6 | 900 | 600 |

# %%
tokens = {"H100": ..., "MI355X": ..., "GB200": ..., "TPU v5p": ...}
attempt("15.thresholds", tokens)

# %% tags=["plumbing"]
limit = {n: formulas.dp_min_tokens(c.flops_per_s, rate(c)) for n, c in CHIPS.items()}
met("15.thresholds", limit, "computed")
assert [round(x) for x in limit.values()] == [2199, 4681, 2664, 765]
TICKS = (1024, 2048, 4096, 8192, 16384)
looks = dict(
    zip(CHIPS, (("dp-line", "o"), ("measured", "s"), ("fsdp-line", "^")), strict=False)
)
looks["TPU v5p"] = ("sp-line", "o")
lines = [
    (name, [limit[name] / t for t in TICKS], *looks[name], False) for name in CHIPS
]
lines += [("hides below", [1] * len(TICKS), "soft", None, True)]
axes = dict(x="tokens on a device", y="gather / matmuls", high=5)
if opened("15.thresholds"):
    show(
        draw.curves(
            lines, TICKS, **axes, title="Time of a gather over time of the matmuls"
        )
    )
more = lambda name, what: what(CHIPS[name]) / what(CHIPS["H100"])
peak = lambda c: c.flops_per_s
assert round(more("GB200", peak), 1) == 2.4 and more("GB200", rate) == 2
assert round(more("MI355X", peak), 1) == 2.5 and round(more("MI355X", rate), 1) == 1.2

# %% [markdown]
# Newer GPUs need **more** tokens. From an H100 to a GB200, C grew 2.4 times and β 2 times; to an MI355X 2.5 and 1.2 times.
#
# The chips that fast links join are a *domain*. At best a gather brings the weights into a domain once, for all its chips, by all
# network ports:
#
# | domain | into the domain, by all ports of 50 GB/s | into one GPU, by fast links | the slower one limits |
# |---|---|---|---|
# | node of 8 H100s | 400 GB/s | 450 GB/s | the ports |
# | rack of 72 GB200s | 3,600 GB/s | 900 GB/s | the fast links |

# %% tags=["plumbing"]
into = {name: c.node_size * c.dcn_bytes_per_s for name, c in CHIPS.items()}
assert (
    into["H100"] == 400e9 < rate(CHIPS["H100"])
    and CHIPS["H100"].dcn_bytes_per_s == 50e9
)
assert into["GB200"] == 3600e9 > rate(CHIPS["GB200"]) == 900e9
GB200 = CHIPS["GB200"]
MACHINES = {"nodes of 8": dataclasses.replace(GB200, node_size=8), "rack of 72": GB200}
BIG, WIDE = preset("llama3.1-405b"), preset("llama3-70b")
assert (WIDE.ffn_width, BIG.ffn_width) == (28_672, 53_248)


def estimated(config, c, devices, rows, seq, mesh=None, **fields):
    """The planner's best settings for a mesh, or its best mesh."""
    fixed = parse_mesh(mesh).sizes if mesh else fields
    asked = planner.Question(config, c, devices, rows, seq, fixed, share=c.memory_share)
    return planner.decide(asked, keep=1).plans[0]


WORDS = {"weights and gradients on links": "fsdp's links"}


def bars(plans, shown, title):
    """Where the time of each step goes: the largest terms, and the rest."""
    rows = []
    for name, plan in plans.items():
        terms = plan.time.terms
        named = {WORDS.get(t, t): terms[t] for t in shown if terms.get(t, 0) > 0}
        rows.append(
            (name, named | {"the rest": plan.time.step_s - sum(named.values())})
        )
    return draw.time_bars(rows, title, {"fsdp's links": "fsdp"})


# %% [markdown]
# ## Predict: how far may tp go?
#
# Messages of `tp` overlap on up to **m/(C/β)** devices (lesson 05), and `tp` must stay on fast links. `m`, the width of the
# feed-forward, is 28,672 in Llama 3 70B and 53,248 in Llama 3.1 405B. For each model and card: **which is the largest power of two
# that both limits allow**, m/(C/β) and the number of chips on fast links?

# %%
tp = {"70B, H100": ..., "405B, H100": ..., "70B, GB200": ..., "405B, GB200": ...}
attempt("15.tp", tp)

# %% tags=["plumbing"]
allowed = {}
for card in ("H100", "GB200"):
    for name, config in (("70B", WIDE), ("405B", BIG)):
        hides = formulas.tp_max_degree(
            config.ffn_width, peak(CHIPS[card]), rate(CHIPS[card])
        )
        most = min(hides, CHIPS[card].node_size)
        allowed[f"{name}, {card}"] = 2 ** (int(most).bit_length() - 1)
        weights = 2 * config.width * config.head_width
        weights *= config.num_heads + config.num_kv_heads
        weights += 3 * config.width * config.ffn_width
        whole = weights / (4 * config.width * config.ffn_width)  # over two all-reduces
        assert 0.9 < whole < 0.92  # "a tenth smaller"
        assert min(hides * whole, CHIPS[card].node_size) >= allowed[f"{name}, {card}"]
met("15.tp", allowed, "computed")
assert allowed == {"70B, H100": 8, "405B, H100": 8, "70B, GB200": 8, "405B, GB200": 16}
found = {}
for where, c in MACHINES.items():
    for mesh in ("fsdp=32 tp=8", "fsdp=16 tp=16"):
        found[f"{where}: {mesh}"] = estimated(BIG, c, 256, 64, 8192, mesh)
shown = (
    "matmuls",
    "attention",
    "tensor-parallel links",
    "weights and gradients on links",
)
title = "A step of Llama 3.1 405B on 256 GB200"
seconds = [plan.time.step_s for plan in found.values()]
assert seconds[1] > 4 * seconds[0] and round(seconds[3] / seconds[2], 2) == 1.07

# %% [markdown]
# ## Predict: does a rack want tp=16?
#
# In the rack both limits allow `tp=16` for 405B. Take 256 GPUs, 64 of each of four racks. **Is a step then `"faster"` than with `tp=8`,
# `"equal"` within the planner's 10 %, or `"slower"`?**

# %%
sixteen = ...
attempt("15.tp16", sixteen)

# %% tags=["plumbing"]
met("15.tp16", "equal", "the planner's")
for where in MACHINES if opened("15.tp16") else ():  # a scale of its own for each
    of_machine = {mesh: plan for mesh, plan in found.items() if where in mesh}
    show(bars(of_machine, shown, title))
assert seconds[3] / seconds[2] < 1 + planner.ERROR

# %% [markdown]
# The same GPU with the same links, but a switch joins 8 GPUs, or 72. In nodes of 8 `tp=16` leaves the node, and a step takes four times as
# long. In the rack it takes 7 % longer, within the error: messages hide, but a group of twice as many ranks has twice the tokens, so each
# rank's messages are twice as long, and slow the matmuls (lesson 11). **`tp=16` gains nothing there.**
#
# ## Predict: how wide must an expert be?
#
# A token goes to an expert and comes back: 4·d bytes in 16 bits. At the expert, three matrices of d × m do 6·d·m FLOPs. The
# messages hide if 6·d·m/C > 4·d/β. Solve that for m. **How wide must experts be in a rack of GB200 (C/β = 2,664)? And over the
# network of H100s (C = 989.4e12, 50 GB/s for each GPU)?** DeepSeek-V3's have m = 2,048. **Where do they hide their messages: `"rack"`,
# `"network"`, `"both"` or `"neither"`?**

# %%
width = {"rack": ..., "network": ..., "hides": ...}
attempt("15.experts", width)

# %% tags=["plumbing"]
wide = {"rack": limit["GB200"] * 2 / 3}
wide["network"] = peak(CHIPS["H100"]) / CHIPS["H100"].dcn_bytes_per_s * 2 / 3
experts = next(b for _, b in preset("deepseek-v3").blocks if b.experts)
assert experts.ffn_width == 2048 and wide["rack"] < 2048 < wide["network"]
met("15.experts", wide | {"hides": "rack"}, "computed")
OSS = preset("gpt-oss-120b")
found = {
    f"{where}: {mesh}": estimated(OSS, c, 64, 128, 8192, mesh)
    for where, c in MACHINES.items()
    for mesh in ("fsdp=8 ep=8", "ep=64")
}
shown = "matmuls", "attention", "expert links", "weights and gradients on links"
if opened("15.experts"):
    show(bars(found, shown, "A step of gpt-oss-120b on 64 GB200"))
seconds = [plan.time.step_s for plan in found.values()]
assert round(seconds[1] / seconds[0], 1) == 1.5
assert abs(seconds[3] / seconds[2] - 1) < 0.02

# %% [markdown]
# So the rule "experts inside a node" changes. In nodes of 8 `ep=64` takes 1.5 times as long as `ep=8`. In the rack it takes as long. The
# number of tokens does not matter as long as an expert is limited by computing: with twice the tokens both sides double.
#
# ## Predict: does 405B still need a pipeline?
#
# Take 256 GB200 and 64 rows of 8,192 tokens. In nodes of 8 the fastest mesh has 16 stages. **How many times as long does the fastest mesh
# without stages take there: 1.1, 1.4, 2 or 3 times?** (And in racks?)

# %%
without_stages = ...
attempt("15.pipeline", without_stages)

# %%
best = {name: estimated(BIG, c, 256, 64, 8192) for name, c in MACHINES.items()}
without = estimated(BIG, MACHINES["nodes of 8"], 256, 64, 8192, pp=1)

# %% tags=["plumbing"]
has = {name: plan.plan.mesh.pp for name, plan in best.items()}
longer = without.time.step_s / best["nodes of 8"].time.step_s
met("15.pipeline", round(longer, 2), "the planner's")
assert has == {"nodes of 8": 16, "rack of 72": 1} and round(longer, 1) == 1.4
rows = {f"{name}: {plan.plan.mesh}": plan for name, plan in best.items()}
rows |= {f"nodes of 8: {without.plan.mesh}": without}
shown = (
    "matmuls",
    "attention",
    "recomputation",
    "bubble",
    "weights and gradients on links",
)
if opened("15.pipeline"):
    show(bars(rows, shown, title))
eight, rack = (plan.time.step_s for plan in best.values())
assert 1.45 < eight / rack < 1.6

# %% [markdown]
# A pipeline sends little, so it suits slow links: without it the step waits for gathers over the network. In racks gathers hide, and the
# fastest mesh has no stages: with `tp=4` each GPU gathers a quarter of a weight, but its matmuls work on the tokens of all four. A step takes
# a third less than with stages, in nodes of 8.
#
# ## Predict: what do eight bits change?
#
# On a GB200 a matmul in 8 bits is up to twice as fast, in 4 bits up to four times. Links are as fast as before. The threshold of a GB200
# was 2,664 tokens, with matmuls and gathered weights of 16 bits. **What is it now?**

# %%
bits = {
    "matmuls 8, gathers 16": ...,
    "matmuls 8, gathers 8": ...,
    "matmuls 4, gathers 8": ...,
}
attempt("15.bits", bits)

# %% tags=["plumbing"]
now = {
    f"matmuls {m}, gathers {g}": limit["GB200"] * (16 / m) * (g / 16)
    for m, g in ((8, 16), (8, 8), (4, 8))
}
met("15.bits", now, "computed")
asked = planner.Question(WIDE, GB200, 64, 64, 2048, share=GB200.memory_share)
plan = estimated(WIDE, GB200, 64, 64, 2048, "fsdp=64").plan
run = asked.run(plan)
times = {
    f"matmuls in {b} bits": step_time(dataclasses.replace(run, bits=b))
    for b in (16, 8, 4)
}
rows = []
for name, time in times.items():
    links = time.terms["weights and gradients on links"]
    named = {"matmuls": time.terms["matmuls"], "fsdp's links": links}
    rows.append((name, named | {"the rest": time.step_s - sum(named.values())}))
if opened("15.bits"):
    roles = {"fsdp's links": "fsdp"}
    title = "Llama 3 70B, fsdp=64, 2,048 tokens on each GB200"
    show(draw.time_bars(rows, title, roles))
waits = [row["fsdp's links"] for _, row in rows]
took = [time.step_s for time in times.values()]
assert waits[1] / waits[0] > 1.9 and waits[2] > waits[1]
assert round(took[2] / took[0], 2) == 0.92
assert rows[2][1]["matmuls"] < rows[0][1]["matmuls"] / 2
assert run.tokens == 2048 and GB200.rates.eight_bit == 1.7
computes = [row["matmuls"] for _, row in rows]
assert all(1.55 < a / b < 1.68 for a, b in zip(computes, computes[1:], strict=False))

# %% [markdown]
# The picture takes reached rates: each halving of bits makes matmuls 1.6 times as fast. Gathers stay at 16 bits. With matmuls of 8 bits links
# cost twice as much time. In 4 bits a step is 8 % shorter. If matmuls have fewer bits, messages need fewer bits too.
#
# ## Keep: the inequalities stay, the numbers change
#
# 1. C/β: compute it again for each machine, and for each kind of its links. Newer GPUs need more tokens.
# 2. `tp` hides its messages up to m/(C/β) devices, even where 72 GPUs share a switch.
# 3. Messages to experts hide if the experts are wide: m > ⅔ · C/β of the links that `ep` crosses. In a rack gpt-oss-120b loses nothing by
#    `ep=64`.
# 4. A pipeline is for slow links. For 405B on 256 GPUs in racks the planner leaves it out.
# 5. Eight bits make C, and so the threshold, up to twice as large. If you have fewer tokens than that, send eight bits, too. Otherwise messages that were
#    hidden become exposed.

# %% [markdown]
# ## Further
#
# ### All chips of the table
#
# *Inside*: C/β on fast links. *Beyond*: C/β if the weights come from another domain. β is then all ports together, if that is less than
# a chip's links. Rates are those of data sheets; the GB200's FLOPs are computed from its clock, 4 % less than the rounded 2,500e12. (Lesson 03 has
# 540 GB/s for a TPU v5p: the rate that its book counts as reached.) Counted over whole layers, the limit of `tp` is a tenth smaller.
# In fewer bits the planner takes a matmul rate that is 1.7 times as high, not 2, and memory is as fast as before.

# %% tags=["plumbing", "nbval-check-output"]
print("chip      chips on fast links   inside   beyond")
for key in "h100 b200 b300 gb200 gb300 mi355x v5p 7x trn2".split():
    c = chip(key)
    inner = peak(c) / rate(c)
    outer = peak(c) / min(rate(c), c.node_size * c.dcn_bytes_per_s)
    print(f"{key:<9} {c.node_size:>19,} {inner:>8,.0f} {outer:>8,.0f}")
    assert outer >= inner

# %% [markdown]
# ### On a torus an axis of the mesh has its own links
#
# Give a mesh axis one, two or three axes of the torus: it gets two links of 100 GB/s for each. Other mesh axes do not share them.

# %%
v5p = CHIPS["TPU v5p"]
for num in (1, 2, 3):
    own = 2 * num * v5p.link_bytes_per_s
    most = formulas.tp_max_degree(WIDE.ffn_width, peak(v5p), own)
    print(
        f"{num} axes: C/β {peak(v5p) / own:>5,.0f} tokens, 70B hides to tp={int(most)}"
    )
assert round(peak(v5p) / (2 * v5p.link_bytes_per_s)) == 2295

# %% [markdown]
# But an all-to-all on a ring goes through all chips between: with as many bytes on each chip, its time grows with the length of the ring. Below a switch it
# grows little: a chip keeps 1/n for itself, so by at most a third from 4 chips on. So experts want short axes of a torus, and a switch can be large.

# %%
ring = [formulas.torus_seconds("all-to-all", 1e9, [n], 100e9) for n in (4, 8, 16)]
switch = [formulas.switch_seconds("all-to-all", 1e9, n, 900e9) for n in (4, 8, 16)]
for n, slow, fast in zip((4, 8, 16), ring, switch, strict=True):
    print(f"1 GB, {n:>2} chips: ring {slow * 1e3:5.1f} ms, switch {fast * 1e3:4.2f} ms")
assert ring[2] == 4 * ring[0] and switch[2] < 1.3 * switch[0]

# %% [markdown]
# ### Where XLA's partitioner differs
#
# These estimates price what this package sends. Under `--mode auto` the partitioner decides; the inequalities hold for both.
#
# ### On your cluster
#
# (The lesson counts with the 75 % of a GPU's memory that JAX takes by default; `llmpar plan` counts 95 %, and its printed lines set that.)
#
# ```
# llmpar plan --model llama3.1-405b --chip gb200 --devices 256 --batch-size 64 --seq-len 8192
# llmpar plan --model gpt-oss-120b --chip mi355x --devices 64 --batch-size 128 --seq-len 8192
# ```
