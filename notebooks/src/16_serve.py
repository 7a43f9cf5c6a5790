# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 30
#     needs: ["01", "05", "06"]
#     question: What does a token cost to serve, who holds what it leaves behind, and why an inference engine?
#     objectives:
#     - Say why a prompt computes and a token reads, and what a batch changes.
#     - Compute what the cache of a model takes, and which cut of it holds a long context.
#     - Write the rule of continuous batching, and say what pages are for.
# ---

# %% [markdown]
# # 16 · 1,000 tokens in, 1,000 tokens out: why is one half so slow?
#
# An assistant takes a prompt of 1,000 tokens in at once. To write 1,000 tokens takes it hundreds of times as long: the same model, the
# same GPU. Why?

# %% tags=["plumbing"]
from llmpar.mesh import use_devices

devices = use_devices()

from dataclasses import replace

import jax
import optax

from llmpar import draw
from llmpar.config import preset
from llmpar.draw.scene import show
from llmpar.exercises import CORRECT, attempt, find, hint, met, say, solution
from llmpar.exercises.lesson import as_table, fresh_state
from llmpar.inspect.census import (
    arrow_text,
    census_hlo,
    census_table,
    compiled_memory,
    executed_flops,
    read_program,
)
from llmpar.mesh import make_mesh, split
from llmpar.plan import CACHE, Plan
from llmpar.predict import serving, traffic
from llmpar.predict.hardware import chip
from llmpar.serve.decode import Decoder, Rows
from llmpar.serve.engine import Engine, Request

N = max(n for n in (1, 2, 4) if n <= len(devices))
LENGTH = 64  # positions of the cache, for each request
HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_width": 16}
TOY = replace(preset("tiny"), width=128, num_layers=2, ffn_width=384, **HEADS)
assert TOY.num_params == 445_056
WEIGHTS = jax.tree.map(
    lambda x: x.astype("bfloat16"), fresh_state(TOY, optax.sgd(1e-3)).params
)
llama, h100 = preset("llama3-8b"), chip("h100")
waits = 1000 * sum(serving.decode(llama, h100, 1, 1500).values())
assert 100 < waits / sum(serving.prefill(llama, h100, 1000).values()) < 900


def compile_pass(mesh, requests, tokens):
    """A pass that takes so many tokens of each request: who runs it, its programs."""
    plan = Plan(mesh, dtype="bfloat16")
    decoder = Decoder(TOY, plan, make_mesh(mesh), WEIGHTS, requests, LENGTH)
    given = decoder.params, decoder.cache, Rows.idle(requests, tokens), False
    return decoder, *read_program(decoder.run.lower(*given))


# %%
show(draw.passes("Who wrote Faust ?".split(), "Goethe , in 1808".split()))

# %% [markdown]
# Attention asks all earlier tokens for their keys and values. A *cache* keeps them, so that each token goes through the model
# once. One pass takes the prompt in: *prefill*. The answer comes by *decode*, a pass for each token, because a token
# must be known before the next one.
#
# ## Predict: what is a byte of weights read for?
#
# In bfloat16 a weight has 2 bytes. A token multiplies by it once and adds the result: 2 FLOPs. A pass reads all weights
# once. **How many FLOPs does it do for each byte of weights:** with a prompt of 64 tokens; with the next token of 1 request; with
# those of 16 requests, in one pass?

# %%
flops_per_byte = {"prompt of 64": ..., "1 request": ..., "16 requests": ...}
attempt("16.flops_per_byte", flops_per_byte)

# %% [markdown]
# We compile the three passes of a small Llama, with a cache of 64 positions for each request, and count FLOPs and
# all bytes that are read: weights, caches, tokens.

# %%
PASSES = {"prompt of 64": (1, 64), "1 request": (1, 1), "16 requests": (16, 1)}
found = {}
for name, (requests, tokens) in PASSES.items():
    _, compiled, text = compile_pass("dp=1", requests, tokens)
    found[name] = executed_flops(text), compiled_memory(compiled)["argument_bytes"]
met("16.flops_per_byte", {name: flops / size for name, (flops, size) in found.items()})

# %% tags=["plumbing"]
plan = Plan("dp=1", dtype="bfloat16").serving(TOY, 16, LENGTH)
for name, (requests, tokens) in PASSES.items():
    flops, size = found[name]
    assert flops == sum(serving.device_flops(plan, requests, LENGTH, tokens).values())
    cache = serving.device_cache_bytes(plan, requests, LENGTH)
    rows = sum(column.nbytes for column in Rows.idle(requests, tokens))
    assert 2 * TOY.num_params + cache + rows == size, name
    print(f"{name}: {flops:,} FLOPs, {size:,} B, as predicted")

# %% [markdown]
# ## A token reads as much as a prompt
#
# And it computes 1/64 of it. While an H100 reads a byte it could do 295 FLOPs (989 TFLOP/s, 3.35 TB/s). For one
# request it does one, and its matmul units stand still most of the time. With 295 tokens in a pass it computes as long as it reads:
# the *critical batch*. A prompt has so many. In decode as many requests must come together.
#
# ## Requests share weights, not caches
#
# 16 requests do less than 16 FLOPs per byte: each has keys and values of its own, which are read, too. Llama 3 8B, counted alike:

# %% tags=["plumbing"]
BATCHES = [1, 4, 16, 64, 256, 1024]


def per_byte(requests, context):
    """FLOPs of Llama 3 8B for each byte that its matmuls and attention read."""
    rest = llama.num_params - llama.vocab_size * llama.width  # one row of the embedding
    looks = 4 * llama.num_layers * llama.num_heads * llama.head_width * context
    read = 2 * rest + serving.cache_bytes(llama, requests * context)
    return requests * (2 * rest + looks) / read


lines = [
    (words, [per_byte(requests, context) for requests in BATCHES], color, "o", False)
    for words, context, color in (
        ("no cache", 0, "ink"),
        ("1,024 tokens each", 1024, "tp-line"),
        ("8,192 tokens each", 8192, "dp-line"),
    )
]
balance = h100.flops_per_s / h100.hbm_bytes_per_s
assert round(balance) == 295 and max(lines[2][1]) < balance / 3
logarithmic = {"log": True, "levels": (1, 10, 100, 1000), "text": "{:,.0f}".format}
lines.append(("what an H100 can do", [balance] * len(BATCHES), "bad", None, True))

# %%
title = "FLOPs for each byte that a decode pass reads"
axes = "requests in the pass", "FLOPs per byte"
show(draw.curves(lines, BATCHES, *axes, title=title, **logarithmic))

# %% [markdown]
# A batch makes a token cheap until its caches weigh more than the weights. Then a smaller cache helps.
#
# ### Exercise (core): what a token leaves behind
#
# Llama 3 8B: 32 layers, 32 query heads, 8 KV heads of width 128, in bfloat16. How many bytes does a token add to the cache?

# %%
bytes_of_a_token = ...
attempt("16.cache_bytes", bytes_of_a_token)

# %% [markdown]
# ## Fewer KV heads, more requests

# %% tags=["plumbing"]
each_its_own = replace(llama, num_kv_heads=llama.num_heads)
KEPT = {
    "Llama 2 13B: 40 KV heads": (preset("llama2-13b"), 8192),
    "Llama 3 8B, with 32": (each_its_own, 8192),
    "Llama 3 8B: 8 KV heads": (llama, 8192),
    "Mistral 7B: 8, window 4,096": (preset("mistral-7b"), 4096),
}
bars = [
    (
        name,
        {
            "weights": 2 * llama.num_params
            if config is each_its_own
            else 2 * config.num_params,
            "keys and values": serving.cache_bytes(config, 16 * kept),
        },
    )
    for name, (config, kept) in KEPT.items()
]
fits = [sum(parts.values()) < h100.usable_bytes for _, parts in bars]
assert fits == [False, False, True, True]

# %%
title = "16 requests of 8,192 tokens on an H100"
show(draw.memory_bars(bars, h100.usable_bytes, title))

# %% [markdown]
# Query heads that share a KV head (*grouped-query attention*) make the cache smaller. So does a window: a token sees only the
# last 4,096. (The line: JAX takes three quarters of the card's 79.1 GiB, unless told otherwise.)
#
# ## Predict: who can hold a long context?
#
# A context is longer than a device's memory. There are four devices; the model has 2 KV heads. `tp` cuts the cache by heads, `sp` by
# positions. **Which share of the cache does each device hold?**

# %%
shares = {"tp=4": ..., "sp=4": ...}
attempt("16.shares", shares)

# %% [markdown]
# ## tp runs out of heads, sp goes on

# %%
CUT = {
    mesh: Plan(mesh, dtype="bfloat16").serving(TOY, 4, LENGTH)
    for mesh in ("dp=4", "tp=4", "sp=4")
}
show(draw.cache({mesh: (p.place(CACHE), p.mesh.sizes) for mesh, p in CUT.items()}))
whole = serving.cache_bytes(TOY, 4 * LENGTH)
held = {mesh: serving.device_cache_bytes(p, 4, LENGTH) for mesh, p in CUT.items()}
met("16.shares", {mesh: held[mesh] / whole for mesh in ("tp=4", "sp=4")}, "held:")

# %% [markdown]
# Columns are positions 0 to 7, numbers devices. With `b` rows of the batch (requests), `t` positions of
# keys and `k` KV heads the cuts are `b/dp t k`, `b t k/tp` and `b t/sp k`. Four ranks of `tp` have two heads: so each head is there
# twice.
#
# ## Nothing of the cache travels
#
# In a ring (lesson 06) keys travel to queries. Here all ranks of `sp` have the query, which is one token. Each looks at its own
# positions, and two small sums a layer join what they found. A device sends, for the next tokens of four requests:

# %% tags=["plumbing"]
sent, steps = [], {}
for axis in ("tp", "sp"):
    decoder, compiled, text = steps[axis] = compile_pass(f"{axis}={N}", 4, 1)
    predicted = as_table(traffic.serving_traffic(decoder.plan, 4))
    census = census_hlo(text, split(make_mesh(f"{axis}={N}"), decoder.plan.mesh))
    assert census_table(census) == predicted, axis
    flops = serving.device_flops(decoder.plan, 4, LENGTH)
    assert executed_flops(text) == sum(flops.values()), axis
    held = serving.device_cache_bytes(decoder.plan, 4, LENGTH)
    shards = [x for array in decoder.cache for x in array.addressable_shards]
    assert {x.data.nbytes for x in shards} == {held // 2}, axis
    total = sum(row["bytes_sent"] for row in predicted.values())
    weights = sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(decoder.params)
    )
    has = f"holds {held:,} B of cache, {weights:,} B of weights"
    print(f"{axis}={N}: sends {total:,} B, {has}")
    for (axes, kind), row in census_table(census).items():
        guess = predicted[axes, kind]["bytes_sent"]
        sizes = {"predicted_bytes": guess, "compiled_bytes": row["bytes_sent"]}
        sent.append({"axis": axis, "kind": kind, "count": row["count"]} | sizes)
print(f"to gather the cache over sp={N} instead: {(N - 1) * held:,} B")
show(draw.collectives(sent))

# %% [markdown]
# Both send little, however long the context. `tp` cuts the weights as well, so that a device reads less of them; `sp` leaves them
# whole. So take `tp` in a node, up to the KV heads, and `sp` for a context that does not fit otherwise.
#
# ## A slot stands empty while others go on
#
# Eight requests, A to H, want 3, 9, 5, 2, 6, 4, 7 and 3 tokens. A *slot* is a row of the cache: there are four. Batch by batch:

# %% tags=["plumbing"]
WANT = dict(zip("ABCDEFGH", (3, 9, 5, 2, 6, 4, 7, 3), strict=True))
SLOTS = 4


def drawn(words, lanes, end):
    """Who has which slot in each pass."""
    rows = [
        (f"slot {i}", lane + [""] * (end - len(lane))) for i, lane in enumerate(lanes)
    ]
    return {f"{words}: {max(map(len, lanes))} passes": rows}


batches = [[] for _ in range(SLOTS)]
for first in range(0, len(WANT), SLOTS):
    names = list(WANT)[first : first + SLOTS]
    longest = max(WANT[name] for name in names)
    for lane, name in zip(batches, names, strict=True):
        lane += [name] * WANT[name] + ["/"] * (longest - WANT[name])
END = len(batches[0])

# %%
waiting = drawn("A batch waits for its longest request", batches, END)
show(draw.slots(waiting, "A column is a pass; hatched: it computes for nobody"))

# %% [markdown]
# ### Exercise (core): who takes a free slot?
#
# Before each pass `slots` has the number of tokens that each slot's request still wants, 0 where it is free; `waiting` those of the requests
# that wait, the oldest first. Return the slots for the pass, and take out of `waiting` who joins.


# %%
def join(slots, waiting): ...


attempt("16.join", join)

# %% [markdown]
# ## Who is through makes room
#
# The engine of `llmpar` tells after each pass who got a token. So who had a slot?

# %%
plan = Plan(f"sp={N}", dtype="bfloat16")
engine = Engine(TOY, plan, make_mesh(f"sp={N}"), WEIGHTS, slots=SLOTS, length=LENGTH)
tickets = {}
for name, tokens in WANT.items():
    prompt = tuple(name.encode())
    tickets[engine.submit(Request(prompt, max_tokens=tokens))] = name
lanes, running = [[] for _ in range(SLOTS)], [None] * SLOTS
answers = {name: [] for name in WANT}
while engine.busy:
    told = {tickets[event.ticket]: event for event in engine.step()}
    for name, event in told.items():  # who is new has the first slot that was free
        slot = running.index(name if name in running else None)
        running[slot] = name
        lanes[slot] += [""] * (engine.figures["steps"] - 1 - len(lanes[slot])) + [name]
        answers[name].append(event.token)
    running = [x if x and not told[x].finish else None for x in running]
joined = drawn("A free slot takes the next request", lanes, END)
show(draw.slots(waiting | joined, "Eight requests in four slots"))

# %% tags=["plumbing"]
for name, tokens in WANT.items():  # each alone
    engine.submit(Request(tuple(name.encode()), max_tokens=tokens))
    alone = []
    while engine.busy:
        alone += [event.token for event in engine.step()]
    assert alone == answers[name] and len(alone) == tokens, name
rule, slots, left, passes = find("16.join").solution, [0] * SLOTS, [*WANT.values()], 0
while left or any(slots):
    slots = rule(slots, left)
    held = [lane[passes] if passes < len(lane) else "" for lane in lanes]
    assert list(map(bool, slots)) == list(map(bool, held)), (passes, slots, held)
    slots, passes = [max(0, n - 1) for n in slots], passes + 1
assert passes == max(map(len, lanes)) < END
print(f"{END} passes become {passes}; each request is answered as if it were alone")

# %% [markdown]
# This is *continuous batching* (Yu et al. 2022): each reading of the weights serves as many as it can.
#
# ## Memory is set aside for answers that never come
#
# A slot has room for the longest answer, and nobody knows how long one will be. vLLM (Kwon et al. 2023) gives out *pages* of 16
# tokens, when they are needed:

# %% tags=["plumbing"]
NEED, MOST = {"A": 3, "B": 9, "C": 5, "D": 2}, 16  # pages
MORE = {"E": 8, "F": 12, "G": 6, "H": 10, "I": 7}  # of those that wait
turns = lambda need: [
    n for turn in range(MOST) for n, pages in need.items() if turn < pages
]
reserved = [
    name if k < pages else "/" for name, pages in NEED.items() for k in range(MOST)
]
paged = turns(NEED) + turns(MORE)


def memory(owners):
    """All pages, in rows as long as a slot."""
    owners = owners + [""] * (MOST * len(NEED) - len(owners))
    return [("", owners[i : i + MOST]) for i in range(0, len(owners), MOST)]


used = sum(NEED.values()) / len(reserved)
assert len(paged) <= len(reserved) and 0.2 < used < 0.382  # as Kwon et al. found

# %%
rooms = {
    f"Four slots: {used:.0%} is used": memory(reserved),
    f"Pages: {len(NEED) + len(MORE)} requests in the same memory": memory(paged),
}
show(draw.slots(rooms, "A box is a page; hatched: set aside, not used"))

# %% [markdown]
# `llmpar serve` has slots, no pages: it is there to be read. For load take an *inference engine* such as vLLM.
#
# ## Keep: a prompt computes, a token reads
#
# 1. Prefill takes many tokens for one reading of the weights, decode one. FLOPs per byte are the tokens of a pass, in bfloat16.
# 2. A batch shares the weights, up to the critical batch. Its caches are each request's own.
# 3. A token leaves 2 · layers · KV heads · head width numbers in the cache.
# 4. `dp` cuts the cache by requests, `tp` by KV heads, `sp` by positions; nothing of it travels.
# 5. Continuous batching fills slots, pages fill memory: that is what an inference engine is for.

# %% [markdown]
# ## Further
#
# Which line sends what, prompts in pieces, and how many fit.
#
# ### Which line sends what
#
# The sums of the step on `tp`, and those on `sp`, by the model's arrows:

# %%
for axis, (decoder, _, text) in steps.items():
    mesh = split(make_mesh(f"{axis}={N}"), decoder.plan.mesh)
    print(arrow_text(census_hlo(text, mesh)))

# %% [markdown]
# ### A long prompt comes in pieces
#
# A prompt of 4,096 tokens computes for as long as many passes of decode, and all who have a slot would wait for it. So the engine takes it in
# *chunks* (Agrawal et al. 2023), in passes in which the others get their next token as well. Here the chunk has 32 tokens. While
# a prompt of 60 is taken in, somebody else goes on:

# %%
first = engine.submit(Request(tuple(b"first"), max_tokens=4))
engine.step()
late = engine.submit(Request(tuple(range(60)), max_tokens=1))
while engine.busy:
    told = engine.step()
    print(", ".join("first" if event.ticket == first else "late" for event in told))

# %% [markdown]
# ### Exercise (expert): how many fit?
#
# Llama 3 8B on one H100, in bfloat16: 16.06e9 bytes of weights, and 63.7e9 bytes that a program may use. A request may have up to 8,192
# tokens, and has 1,000 on average, when it ends. **How many requests fit** in slots of 8,192 tokens; and in pages of 16 tokens, if all have
# 1,000?

# %%
requests_that_fit = {"slots": ..., "pages": ...}
attempt("16.fit", requests_that_fit)

# %% tags=["plumbing"]
room = h100.usable_bytes - 2 * llama.num_params
num = {
    name: int(room // serving.cache_bytes(llama, tokens))
    for name, tokens in (("slots", 8192), ("pages", -(-1000 // 16) * 16))
}
right = find("16.fit").solution
assert all(abs(num[name] / right[name] - 1) < 0.01 for name in num), num

# %% [markdown]
# ### A server of your own
#
#     llmpar generate "def " --mesh "sp=4 tp=2"            one answer
#     llmpar serve --checkpoints kept --mesh "tp=2"        a server that OpenAI's clients understand
#     llmpar launch slurm --nodes 2 --serve vllm --weights EXPORT    a production engine's job file
