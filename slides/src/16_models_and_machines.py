# %% [markdown] tags=["slide"] minutes=2 section="Models, machines of 2026"
# ## DeepSeek-V3 has nine times the parameters of Llama 3.1 70B
#
# What does it keep of a conversation of 131,072 tokens? **A** nine times as much · **B** as much · **C** a fifth. Raise a hand.
#
# <footer>lesson <code>notebooks/14_models_of_2026</code></footer>

# %%
import dataclasses

from deck import curves, draw, show

from llmpar.plan.mesh_shape import parse_mesh
from llmpar.plan.presets import preset
from llmpar.planner import planner
from llmpar.predict import formulas
from llmpar.predict.hardware import GIB, chip
from llmpar.predict.time import step_time

TOKENS = 131_072
COLOURS = {"full attention": "matmuls", "window": "elementwise"}
COLOURS |= {"latent": "other3", "recurrent state": "other1"}


def kept(config):
    """Bytes of a conversation by kind of layer: caches of 16 bits, states in float32."""
    found = {}
    for count, block in config.blocks:
        kind = "window" if block.window else "full attention"
        kind = "latent" if block.has_latent_attention else kind
        kind = "recurrent state" if block.mixer == "recurrent" else kind
        size = 2 * min(TOKENS, block.window or TOKENS) * block.cache_width + 4 * block.state_size
        found[kind] = found.get(kind, 0) + count * size
    return found


# %% tags=["fragment"]
NAMES = "llama3.1-70b gemma-3-27b gpt-oss-120b deepseek-v3 qwen3.5-397b-a17b".split()
rows = [(name.removesuffix("-a17b"), kept(preset(name))) for name in NAMES]
total = {name: sum(parts.values()) / GIB for name, parts in rows}
assert total["llama3.1-70b"] == 40 and 1 / 5 < total["deepseek-v3"] / 40 < 1 / 4
show(draw.memory_bars(rows, title="What one conversation leaves", roles=COLOURS))

# %% [markdown] tags=["notes"]
# **Ask:** before the bars: hands for A, B, C. Then: what must a layer do to keep less? Share between heads, forget, or sum up.
#
# **Misunderstanding:** that a larger model has a larger cache. What counts is layers × numbers that a token leaves in each.
#
# **Source:** computed from the published sizes of each model: 16-bit caches, float32 states; lesson 14.

# %% [markdown] tags=["slide"] minutes=2
# ## Each kind of layer sends different things
#
# `pp` sends the same for all: the stream between two stages. A latent has no heads: each rank of `tp` keeps all of it.
#
# <footer>DeepSeek-V2 2024; Sun et al. 2024 (LASP) · lesson <code>notebooks/14_models_of_2026</code></footer>

# %%
SENDS = {
    "full": ("sums", "keys, n - 1 hops", "", "keys and values"),
    "window": ("sums", "keys, few hops", "", "the last ones"),
    "latent": ("sums", "latents", "", "one vector"),
    "state": ("sums", "the state", "", "one matrix"),
    "experts": ("sums", "", "tokens", ""),
}
ROLES = "tp", "sp", "ep", "activations"
table = [
    (kind, [(text, role if text else "") for text, role in zip(cells, ROLES, strict=True)])
    for kind, cells in SENDS.items()
]
deepseek = preset("deepseek-v3")
assert deepseek.cache_width == 576 and 2 * 128 * deepseek.num_heads == 32_768
show(draw.table(table, ("tp", "sp", "ep", "kept"), "What a layer sends, and keeps"))

# %% [markdown] tags=["notes"]
# DeepSeek-V3 keeps 576 numbers of a token in a layer: a latent of 512, a rotary key of 64. 128 heads with keys and values of 128 would keep
# 32,768. A dense layer or a shared expert sends no tokens.
#
# **Ask:** a window of 8 and 8 positions on each rank: how many hops do keys need? One: the first query of a rank sees 7 positions back.
#
# **Misunderstanding:** that tp cuts each cache. It cuts heads, and a latent has none.
#
# **Source:** lesson 14 reads the programs of small models of these families: what they send is what was predicted.

# %% [markdown] tags=["slide"] minutes=1
# ## A ring sends more for a longer sequence, a state does not
#
# One head of width 16 on eight ranks.
#
# <footer>Sun et al. 2024 (LASP) · lesson <code>notebooks/14_models_of_2026</code></footer>

# %%
LENGTHS = (128, 256, 512, 1024, 2048)
keys = [7 * 4 * (s // 8) * 2 * 16 / 1024 for s in LENGTHS]
state = [7 * 4 * 16 * 16 / 1024] * len(LENGTHS)
assert state[0] == 7 and keys[3] == 112
lines = [("keys and values", keys, "sp-line", "s", False), ("state", state, "measured", "o", False)]
curves(lines, LENGTHS, "positions on eight ranks", "KiB that a rank sends")

# %% [markdown] tags=["notes"]
# **Ask:** what does a state cost, then? It sums up what it has seen: it cannot look back at one token. So models mix both kinds, 3 : 1 in
# Qwen3.5.
#
# **Misunderstanding:** that a recurrent layer cannot be cut along the sequence. A rank needs one matrix of the ranks before it.
#
# **Source:** lesson 14 writes the state's hops by hand, compiles them, and reads 7,168 bytes for any length.

# %% [markdown] tags=["slide"] minutes=2
# ## The same GPU, in nodes of 8 or in a rack of 72
#
# Llama 3.1 405B on 256 GB200, `tp=16` in place of `tp=8`. In nodes of 8, does a step take **A**&nbsp;as long, **B**&nbsp;twice or **C**&nbsp;four times as long? And in racks of 72?
#
# <footer>Estimates · <code>llmpar plan --model llama3.1-405b --chip gb200 --devices 256</code> · lesson <code>notebooks/15_machines_of_2026</code></footer>

# %%
GB200, BIG = chip("gb200"), preset("llama3.1-405b")
MACHINES = {8: dataclasses.replace(GB200, node_size=8), 72: GB200}  # chips on fast links
WORDS = {"tensor-parallel links": "tp's links", "weights and gradients on links": "fsdp's links"}
ROLES_OF = {"tp's links": "tp", "fsdp's links": "fsdp"}


def estimated(config, c, devices, rows, seq, mesh=None, **fields):
    """The planner's best settings for a mesh, or its best mesh."""
    fixed = parse_mesh(mesh).sizes if mesh else fields
    asked = planner.Question(config, c, devices, rows, seq, fixed, share=c.memory_share)
    return planner.decide(asked, keep=1).plans[0]


def bars(plans, shown, title):
    """Where the time of each step goes."""
    rows = []
    for name, plan in plans.items():
        named = {WORDS.get(t, t): plan.time.terms[t] for t in shown if plan.time.terms.get(t, 0) > 0}
        rows.append((name, named | {"the rest": plan.time.step_s - sum(named.values())}))
    show(draw.time_bars(rows, title, ROLES_OF))


# %% tags=["fragment"]
found = {
    f"{where}: {mesh}": estimated(BIG, c, 256, 64, 8192, mesh)
    for where, c in MACHINES.items()
    for mesh in ("fsdp=32 tp=8", "fsdp=16 tp=16")
}
took = [plan.time.step_s for plan in found.values()]
assert took[1] > 4 * took[0] and took[3] < 1.1 * took[2]
LIMITS = [
    formulas.tp_max_degree(BIG.ffn_width, c.flops_per_s, c.link_bytes_per_s) for c in (chip("h100"), GB200)
]
assert [int(x) for x in LIMITS] == [24, 19]
bars(found, ("matmuls", "tensor-parallel links", "weights and gradients on links"), "A step")

# %% [markdown] tags=["notes"]
# **Ask:** hands for A, B, C, then: and in the rack? 7 % longer than `tp=8`, within the error: messages hide, but they are twice as long for
# each rank, and slow the matmuls. Allowed, and no gain. (Of each rack of 72 take 64 GPUs.)
#
# **Misunderstanding:** that 72 GPUs on one switch mean `tp=72`. tp hides up to m/(C/β): nearly 20 for this model on GB200, nearly 11 for 70B.
#
# **Source:** the planner's estimates, ± 10 %; the chip is the same in both, only the number of chips below a switch differs.

# %% [markdown] tags=["slide"] minutes=2
# ## Does 405B still need a pipeline?
#
# In nodes of 8 the fastest mesh of 256 GB200 has 16 stages. Without stages, does a step take **A**&nbsp;1.1, **B**&nbsp;1.4 or **C**&nbsp;3 times as long? And in racks?
#
# <footer>Estimates · <code>llmpar plan --model llama3.1-405b --chip gb200 --devices 256</code> · lesson <code>notebooks/15_machines_of_2026</code></footer>

# %% tags=["fragment"]
best = {where: estimated(BIG, c, 256, 64, 8192) for where, c in MACHINES.items()}
without = estimated(BIG, MACHINES[8], 256, 64, 8192, pp=1)
assert best[8].plan.mesh.pp == 16 and best[72].plan.mesh.pp == 1
assert round(without.time.step_s / best[8].time.step_s, 1) == 1.4
rows = {f"{where}: {plan.plan.mesh}": plan for where, plan in best.items()}
rows |= {f"8: {without.plan.mesh}": without}
bars(rows, ("matmuls", "recomputation", "bubble", "weights and gradients on links"), "A step")

# %% [markdown] tags=["notes"]
# **Ask:** hands for A, B, C, then: what does a pipeline save? It sends least over the network. In racks the network is fast enough: 72 ports bring 3,600 GB/s in.
#
# **Misunderstanding:** that large models need pipelines. Slow networks do.
#
# **Source:** the planner's estimates, ± 10 %. For experts it is alike: `ep=64` in place of
# `ep=8` takes half as long again in nodes of 8, and no longer in a rack (lesson 15).

# %% [markdown] tags=["slide"] minutes=1
# ## Eight bits move both sides
#
# Matmuls are faster, links are not. Hidden messages become exposed, unless they have fewer bits too.
#
# <footer>Llama 3 70B, 64 GB200, 2,048 tokens each, gathers of 16 bits · estimates · lesson <code>notebooks/15_machines_of_2026</code></footer>

# %%
asked = planner.Question(preset("llama3-70b"), GB200, 64, 64, 2048, share=GB200.memory_share)
run = asked.run(estimated(asked.config, GB200, 64, 64, 2048, "fsdp=64").plan)
rows = []
for b in (16, 8, 4):
    time = step_time(dataclasses.replace(run, bits=b))
    named = {WORDS.get(t, t): time.terms[t] for t in ("matmuls", "weights and gradients on links")}
    rows.append((f"{b} bits", named | {"the rest": time.step_s - sum(named.values())}))
waits = [row["fsdp's links"] for _, row in rows]
assert waits[0] < waits[1] < waits[2]
show(draw.time_bars(rows, "A step", ROLES_OF))

# %% [markdown] tags=["notes"]
# **Ask:** from how many tokens on do gathers hide? C/β is 2,664 in 16 bits; 5,329 with 8-bit matmuls and 16-bit gathers; 2,664 again if both
# have 8 bits.
#
# **Misunderstanding:** that twice the FLOPs make a step twice as fast. Only its matmuls become faster.
#
# **Source:** the planner's estimates; 1.7 for each halving of the bits, as reached.

# %%
assert round(GB200.flops_per_s / GB200.link_bytes_per_s) == 2664
