# ---
# jupyter:
#   llmpar:
#     teaching: 25
#     exercises: 45
#     needs: ["01", "05", "06"]
#     question: What does a token cost to serve, where is its cache, and why does one use an inference engine?
#     objectives:
#     - Say why computing limits a prompt and reading limits a token, and what a batch changes.
#     - Compute what the cache of a model takes, and which cut of it holds a long context.
#     - Write the rule of continuous batching, and say what pages are for.
# ---

# %% [markdown]
# # 16 · 1,000 tokens in, 1,000 tokens out: why is one half so slow?
#
# A model processes a prompt of 1,000 tokens. Then it generates 1,000 tokens, which takes hundreds of times as long: the same model, on
# the same GPU. Why?

# %% tags=["plumbing"]
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # simulated devices; real ones: On your cluster

from llmpar.parallel.mesh import use_devices

devices = use_devices()

from dataclasses import replace

import jax
import numpy as np
import optax

from llmpar import draw
from llmpar.draw.scene import show
from llmpar.inspect.census import (
    arrow_text,
    census_hlo,
    census_table,
    compiled_memory,
    executed_flops,
    read_program,
)
from llmpar.lessons import CORRECT, attempt, find, hint, met, opened, say, solution
from llmpar.lessons.lesson import as_table, fresh_state
from llmpar.parallel.mesh import make_mesh, split_axes
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.plan.serving import CACHE, serving_plan
from llmpar.planner.service import Service, price
from llmpar.predict import serving, traffic
from llmpar.predict.hardware import chip
from llmpar.serve.decode import Decoder, DecoderInput
from llmpar.serve.engine import Engine, Request

N = 4  # of the eight
LENGTH = 64  # positions of the cache, for each request
HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_width": 16}
TOY = replace(preset("tiny"), width=128, num_layers=2, ffn_width=384, **HEADS)
assert TOY.num_params == 445_056
WEIGHTS = jax.tree.map(
    lambda x: x.astype("bfloat16"), fresh_state(TOY, optax.sgd(1e-3)).params
)
llama, h100 = preset("llama3-8b"), chip("h100")
waits = 1000 * sum(serving.decode_seconds(llama, h100, 1, 1500).values())
assert 100 < waits / sum(serving.prefill_seconds(llama, h100, 1000).values()) < 900


def compile_pass(mesh, requests, tokens):
    """A pass that takes so many tokens of each request: who runs it, its programs."""
    plan = Plan(mesh, dtype="bfloat16")
    decoder = Decoder(TOY, plan, make_mesh(mesh), WEIGHTS, requests, LENGTH)
    given = decoder.params, decoder.cache, DecoderInput.idle(requests, tokens), False
    return decoder, *read_program(decoder.run.lower(*given))


# %%
show(draw.passes("Who wrote Faust ?".split(), "Goethe , in 1808".split()))

# %% [markdown]
# The whole prompt goes through in one pass: *prefill*. The answer needs a pass for each token, *decode*, because a token must be known
# before the next one. A *cache* keeps the keys and values of all earlier tokens for attention.
#
# ## Predict: how many FLOPs per byte of weights?
#
# In bfloat16 a weight has 2 bytes. A pass reads all weights once. **How many FLOPs does a pass do for each byte of weights** with a prompt of
# 64 tokens? With the next token of 1 request? With the next tokens of 16 requests?

# %%
flops_per_byte = {"prompt of 64": ..., "1 request": ..., "16 requests": ...}
attempt("16.flops_per_byte", flops_per_byte)

# %% [markdown]
# We compile the three passes of a small Llama with a cache of 64 positions for each request, and divide FLOPs by the bytes of weights, and by
# all bytes read.

# %%
PASSES = {"prompt of 64": (1, 64), "1 request": (1, 1), "16 requests": (16, 1)}
found = {}
for name, (requests, tokens) in PASSES.items():
    _, compiled, text = compile_pass("dp=1", requests, tokens)
    found[name] = executed_flops(text), compiled_memory(compiled)["argument_bytes"]
bytes_of_weights = 2 * TOY.num_params
of_weights = {name: flops / bytes_of_weights for name, (flops, _) in found.items()}
met("16.flops_per_byte", of_weights)
by_all = (f"{name} {f / size:.4g}" for name, (f, size) in found.items())
print("by all bytes that are read:", ", ".join(by_all))

# %% tags=["plumbing"]
plan = serving_plan(Plan("dp=1", dtype="bfloat16"), TOY, 16, LENGTH)
for name, (requests, tokens) in PASSES.items():
    flops, size = found[name]
    assert flops == sum(serving.device_flops(plan, requests, LENGTH, tokens).values())
    cache = serving.device_cache_bytes(plan, requests, LENGTH)
    rows = sum(column.nbytes for column in DecoderInput.idle(requests, tokens))
    assert 2 * TOY.num_params + cache + rows == size, name
    print(f"{name}: {flops:,} FLOPs, {size:,} B, as predicted")

# %% [markdown]
# ## What the three passes do
#
# A pass for one token reads as much as a pass for a prompt, but computes 1/60 as much. (A prompt has 59, not 64: the embedding is looked up,
# the head runs for the last token only; attention adds FLOPs.) An H100 could do 295 FLOPs while it reads a byte: 989 TFLOP/s divided by 3.35 TB/s.
# With 295 tokens in a pass, computing takes as long as reading the weights: this is the *balance batch*. A decode pass has one token of each
# request, so only with 295 requests (and small caches) is the H100 busy computing.
#
# ## Requests share weights, not caches
#
# By all bytes 16 requests do 12: a pass also reads their caches. For Llama 3 8B (dashed: an H100's 295; at 1 request a cache adds FLOPs per
# byte, since 4 query heads share a key):

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
# Once caches are as large as the weights, more requests can at most double this. Then a smaller cache helps.
#
# ### Exercise (core): what a token adds to the cache
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
    "Llama 3 8B, if it had 32": (each_its_own, 8192),
    "Llama 3 8B: 8 KV heads": (llama, 8192),
    "Mistral 7B: 8, window 4,096": (preset("mistral-7b"), 4096),
}
assert llama.context_length == 8192
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
assert fits == [False, True, True]

# %%
title = "16 requests of 8,192 tokens on an H100"
show(draw.memory_bars(bars, h100.usable_bytes, title))

# %% [markdown]
# Query heads that share a KV head (*grouped-query attention*) make the cache smaller; so does a window.
#
# ## Predict: can four devices hold a long context?
#
# The cache of a long context does not fit on one device. There are four devices; the model has 2 KV heads. `tp` cuts the cache by
# heads, `sp` by positions. **Which share of the cache does each device hold?**

# %%
shares = {"tp=4": ..., "sp=4": ...}
attempt("16.shares", shares)

# %% [markdown]
# ## Four devices, two KV heads

# %%
CUT = {
    mesh: serving_plan(Plan(mesh, dtype="bfloat16"), TOY, 4, LENGTH)
    for mesh in ("dp=4", "tp=4", "sp=4")
}
if opened("16.shares"):
    named = dict(zip(CUT, ("dp=4", "tp=4: 0 with 1, 2 with 3", "sp=4"), strict=True))
    cut = {named[mesh]: (p.place(CACHE), p.mesh.sizes) for mesh, p in CUT.items()}
    show(draw.cache(cut))
whole = serving.cache_bytes(TOY, 4 * LENGTH)
held = {mesh: serving.device_cache_bytes(p, 4, LENGTH) for mesh, p in CUT.items()}
met("16.shares", {mesh: held[mesh] / whole for mesh in ("tp=4", "sp=4")}, "held:")

# %% [markdown]
# Columns are positions, dealt in turn along `sp`; colours are devices. In the middle each row has two colours: with two heads, two
# devices of `tp=4` share one. With `b` requests, `t` positions of keys and `k` KV heads the cuts are `b/dp t k`, `b t k/tp` and
# `b t/sp k`.
#
# ## What is sent for a token
#
# In a ring (lesson 06) keys are sent to queries. Here every device of `sp` has the query, one token. It attends to its own positions; two
# small all-reduces in each layer join the results. For the next tokens of four requests:

# %% tags=["plumbing"]
sent, steps = [], {}
for axis in ("tp", "sp"):
    decoder, compiled, text = steps[axis] = compile_pass(f"{axis}={N}", 4, 1)
    predicted = as_table(traffic.serving_traffic(decoder.plan, 4))
    census = census_hlo(text, split_axes(make_mesh(f"{axis}={N}"), decoder.plan.mesh))
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
# Both send little, and no more for a longer context. `tp` also cuts the weights, so a device reads fewer. So take `tp` within a node;
# beyond the KV heads it cuts only weights. Take `sp` too if the context does not fit.
#
# ## Some slots are idle while others compute
#
# Eight requests, A to H, need 3, 9, 5, 2, 6, 4, 7 and 3 tokens. A *slot* is room in the cache for one request; there are four.
# First A to D run, then E to H:

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
show(
    draw.slots(waiting, "A column is a pass; hatched: the slot computes for no request")
)

# %% [markdown]
# ### Exercise (core): who takes a free slot?
#
# `slots` is a list: how many tokens each slot's request still needs, 0 if the slot is free. `waiting` lists what each waiting request
# needs, the oldest first. Fill the free slots: return the new `slots`, and remove from `waiting` the requests that joined.


# %%
def join(slots, waiting): ...


attempt("16.join", join)

# %% [markdown]
# ## Predict: how many passes are left?
#
# Batch by batch A to H take 16 passes. **How many do they take with your rule?** (Fill the slots again before each pass.)

# %%
num_passes = ...
attempt("16.passes", num_passes)

# %% [markdown]
# Here is who has which slot in the engine of `llmpar serve`:

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
if opened("16.passes"):
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
assert (END, passes) == (16, 12)
met("16.passes", passes, "passes:")
print("each request is answered as if it were alone")

# %% [markdown]
# This is *continuous batching* (Yu et al. 2022).
#
# ## How much reserved memory is used?
#
# The length of an answer is not known in advance, so a slot reserves memory for the longest one. vLLM (Kwon et al. 2023) reserves
# *pages* of 16 tokens when they are needed. A to D now need 3, 9, 5 and 2 pages; a slot has 16.

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
show(draw.slots(rooms, "A box is a page; hatched: reserved, not used"))

# %% [markdown]
# `llmpar serve` has no pages. For many users take an *inference engine* such as vLLM.
#
# ## Keep: prefill computes, decode reads
#
# 1. Prefill reads the weights once for many tokens, decode once for each token. In bfloat16, FLOPs per byte of weights = tokens in a pass.
# 2. Requests of a batch share one read of the weights, but no caches.
# 3. A token adds 2 · layers · KV heads · head width numbers to the cache.
# 4. `dp` cuts the cache by requests, `tp` by KV heads, `sp` by positions; a decode pass sends no part of it.
# 5. Continuous batching leaves a slot empty only if nobody waits; pages leave little memory unused. Inference engines use both.

# %% [markdown]
# ## Further
#
# Which line of the model sends what, how a long prompt is read, and how many requests fit. Before that, three things that large
# services do: prefill apart from decode, a prefix cache, and speculative decoding.
#
# ### Prefill apart from decode
#
# While a GPU prefills a whole prompt in one pass, its other requests get no token. (With chunks, see below, they get tokens, but more
# slowly.) So large services prefill on other GPUs (Zhong et al. 2024), and the cache of the prompt then travels. Llama 3 8B on H100s,
# prompts of 2,000 tokens, 32 requests in a decode pass:

# %% tags=["plumbing"]
PROMPT, ANSWER, BATCH = 2000, 500, 32
prefill_s = sum(serving.prefill_seconds(llama, h100, PROMPT).values())
decode_s = sum(
    serving.decode_seconds(llama, h100, BATCH, PROMPT + ANSWER // 2).values()
)
assert round(1000 * prefill_s) == 54 and round(1000 * decode_s, 1) == 11.0
passes = round(prefill_s / decode_s)  # that a prefill takes the time of
prompt, wait = ["P"] * passes, [""] * 4
busy = ["d"] * 4 + prompt + ["d"] * 8 + prompt + ["d"] * 2
apart = {
    "One GPU does both: answers wait": [("GPU for all", busy)],
    "Apart: only the first token waits": [
        ("prefill GPU", wait + prompt + wait * 2 + prompt + [""] * 2),
        ("decode GPU", ["d"] * len(busy)),
    ],
}

# %%
show(
    draw.slots(apart, "P: prefill, d: a decode pass of 11.0 ms, a token for each of 32")
)

# %% [markdown]
# ### Exercise (stretch): how many GPUs on each side?
#
# Prefill takes 54 ms, a decode pass for 32 requests 11.0 ms. An answer has 500 tokens. **How many decode GPUs does one prefill GPU
# keep busy?** And how many milliseconds does the cache of a prompt need, at 131,072 B for each of 2,000 tokens, over a network of
# 50 GB/s?

# %%
one_prefill_gpu = {"decode GPUs": ..., "cache ms": ...}
attempt("16.apart", one_prefill_gpu)

# %% tags=["plumbing"]
needs = ANSWER * decode_s / BATCH
cache_s = serving.cache_bytes(llama, PROMPT) / 50e9
met(
    "16.apart",
    {"decode GPUs": needs / prefill_s, "cache ms": 1000 * cache_s},
    "by the estimate",
)
right = find("16.apart").solution
assert abs(needs / prefill_s / right["decode GPUs"] - 1) < 0.02
assert abs(1000 * cache_s / right["cache ms"] - 1) < 0.001
service = Service(llama, h100, 8, PROMPT, ANSWER)
row = price(service, tp=1, ep=1, batch=BATCH)
assert row["cache_sent_bytes"] == serving.cache_bytes(llama, PROMPT)
together, alone = row["tokens_per_s_user"], row["tokens_per_s_user_apart"]
say(
    f"a user gets {together:.0f} tokens/s with prefill beside decode, {alone:.0f} apart"
)

# %% [markdown]
# Both are estimates; `llmpar plan --serve` prices all meshes so. The cache can travel layer by layer while later layers are
# computed, so little of its time is seen.
#
# ### A prefix cache
#
# Many requests begin with the same text: a system prompt, a document, the chat so far. A server keeps its pages and uses them again
# (a *prefix cache*; Zheng et al. 2024 keep a tree of them). Keys and values at a position depend on the tokens **up to** it.
#
# ### Exercise (stretch): where does the question stand?
#
# 100 requests share 2,000 tokens of instructions; each has 50 tokens of its own. The cache has room for all. **How many tokens are
# prefilled** in all, if the own tokens come last? And if they come first?

# %%
prefilled = {"own last": ..., "own first": ...}
attempt("16.prefix", prefilled)

# %% [markdown]
# We run two requests of 24 shared tokens and 4 own ones, and compare the keys and values of the first with those of the second,
# position by position:

# %% tags=["plumbing"]
SHARED, OWN = tuple(range(24)), (b"what", b"does")
ORDERS = {
    "own last": [SHARED + tuple(own) for own in OWN],
    "own first": [tuple(own) + SHARED for own in OWN],
}
equal = {}
for name, prompts in ORDERS.items():
    pair = Engine(
        TOY, Plan("dp=1", dtype="bfloat16"), make_mesh("dp=1"), WEIGHTS, 2, 32
    )
    for tokens in prompts:
        pair.submit(Request(tokens, max_tokens=1))
    pair.step()
    kept = np.stack([np.asarray(x, np.float32) for x in pair.decoder.cache])
    same = (kept[:, :, 0] == kept[:, :, 1])[:, :, : len(tokens)]
    equal[name] = same.all((0, 1, 3, 4))
assert equal["own last"].tolist() == [True] * 24 + [False] * 4
assert not equal["own first"].any()
rows = {
    f"{name}: {same.sum()} of {len(same)} positions are equal": [
        (f"request {i}", [("=" if one else f"{i}") for one in same]) for i in (0, 1)
    ]
    for name, same in equal.items()
}

# %%
if opened("16.prefix"):
    show(draw.slots(rows, "Keys and values of two requests; =: equal in all layers"))

# %% [markdown]
# So instructions come first and dates, names and questions last. Many services that charge for tokens charge less for those already in the
# cache.
#
# ### Speculative decoding
#
# A decode pass reads all weights for one token of a request; with few requests a pass for five tokens takes hardly longer. So a small
# *draft* model guesses four tokens, and one pass of the large model checks them all (*speculative decoding*; Leviathan et al. 2023). It
# keeps the guesses before the first wrong one, and adds one token of its own. The answer is that of the large model (if tokens are sampled:
# it has the large model's probabilities).

# %% tags=["plumbing"]
GUESSES, RIGHT = 4, (4, 1, 3)
tokens = [["g"] * n + ["M"] + ["/"] * (GUESSES - n) for n in RIGHT]
count = sum(RIGHT) + len(RIGHT)
title = f"{len(RIGHT)} passes, {count} tokens. g: a guess, M: the model's own"
guessed = {
    "Hatched: guessed, and dropped": [
        (f"pass {i}", row) for i, row in enumerate(tokens)
    ]
}

# %%
show(draw.slots(guessed, title))

# %% [markdown]
# ### Exercise (stretch): how many tokens does a pass give?
#
# Each of four guesses is right with probability 0.8, whatever came before. **How many tokens does a pass give** on average?

# %%
tokens_of_a_pass = ...
attempt("16.guessed", tokens_of_a_pass)

# %% tags=["plumbing"]
draft, gives = preset("llama3.2-1b"), find("16.guessed").solution
chance = [0.8**n * 0.2 for n in range(GUESSES)] + [0.8**GUESSES]
assert abs(gives - sum(p * (n + 1) for n, p in enumerate(chance))) < 0.01
users = BATCHES[:-1]  # requests in the pass, each with 1,000 tokens


def rates(requests):
    """Tokens/s of a user: one token for each pass, and with guesses."""
    one = serving.decode_seconds(llama, h100, requests, 1000)
    wide = serving.decode_seconds(llama, h100, requests * (GUESSES + 1), 1000)
    guess_s = sum(serving.decode_seconds(draft, h100, requests, 1000).values())
    check_s = sum((one | {"matmuls": wide["matmuls"]}).values())
    return 1 / sum(one.values()), gives / (check_s + GUESSES * guess_s)


plain, faster = zip(*map(rates, users), strict=True)
assert faster[0] > 1.5 * plain[0] and faster[-1] < 1.1 * plain[-1]
lines = [
    ("four guesses", faster, "tp-line", "o", False),
    ("no guesses", plain, "ink", "s", False),
]

# %%
title = "Llama 3 8B on an H100, guesses by Llama 3.2 1B"
show(
    draw.curves(lines, users, "requests in the pass", "tokens/s of a user", title=title)
)

# %% [markdown]
# For few requests a pass waits for memory, and checking five tokens costs what one does. For many it waits for matmuls, and dropped
# guesses are paid for.
#
# ### Which line sends what
#
# The sums of the step on `tp`, and those on `sp`, by the model's arrows (`kv` is the inner part of `tp`: devices with copies of one KV head):

# %%
for axis, (decoder, _, text) in steps.items():
    mesh = split_axes(make_mesh(f"{axis}={N}"), decoder.plan.mesh)
    print(arrow_text(census_hlo(text, mesh)))

# %% [markdown]
# ### A long prompt comes in pieces
#
# A prompt of 4,096 tokens takes as long as many passes of decode, and all other requests would wait for it. So the engine cuts it into
# *chunks* (Agrawal et al. 2023), here of 32 tokens. In the same passes the other requests get their next token. While the prompt of
# `late` is read, 60 tokens, `first` goes on:

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
# Llama 3 8B on one H100, in bfloat16: 16.06e9 bytes of weights, and 63.7e9 bytes that a program may use. No request is longer than 8,192
# tokens; when it ends it has 1,000 on average. **How many requests fit** in slots of 8,192 tokens; and in pages of 16 tokens, if all have
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
