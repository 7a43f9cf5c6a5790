# %% [markdown] tags=["slide"] minutes=2 section="Serving"
# ## A prompt at once, its answer token by token
#
# The prompt is one pass: **prefill**. Every token of the answer is another: **decode**. The keys and values of earlier tokens
# are needed again; they stay in a **cache**.
#
# <footer>Lesson <code>notebooks/16_serve</code> · <code>llmpar generate "Once upon" --tokens 20</code></footer>

# %%
from deck import draw, show

from llmpar.draw.scene import OTHERS

show(draw.passes("Who wrote Faust ?".split(), "Goethe , in 1808".split()))

# %% [markdown] tags=["notes"]
# **Ask:** how often are all weights read for this answer of four tokens? Four times. And for a prompt of 4,000 tokens? Once.
#
# **Misunderstanding:** that the model sees only the new token. Its query looks at the keys and values of all tokens before it.
#
# **Source:** lesson 16 counts the FLOPs and bytes of both compiled programs.

# %% [markdown] tags=["slide"] minutes=2
# ## Prefill computes, decode reads
#
# Prefill keeps the matmuls busy. Decode reads all weights for little computing; many sequences share one read.
#
# <footer>Llama 3 8B on one H100, estimates · <code>llmpar.predict.serving</code> · lesson <code>notebooks/16_serve</code></footer>

# %%
from running import bound

from llmpar.plan.presets import preset
from llmpar.predict import serving
from llmpar.predict.hardware import chip

llama, h100 = preset("llama3-8b"), chip("h100")


def one_pass(tokens, sequences, behind):
    """Seconds of computing, of reading weights, and of reading keys and values."""
    reading = serving.decode_seconds(llama, h100, 1, 1)[
        "matmuls"
    ]  # far below the balance batch: it only reads
    keys = serving.decode_seconds(llama, h100, sequences, behind)["keys and values read"] if behind else 0.0
    return tokens * reading / serving.balance_batch(llama, h100), reading, keys


PASSES = [
    ("Prefill, 1,024 tokens", *one_pass(1024, 1, 0)),
    ("Decode, 1 sequence", *one_pass(1, 1, 1152)),
    ("Decode, 256 sequences", *one_pass(256, 256, 1152)),
]
assert abs(PASSES[0][1] - serving.prefill_seconds(llama, h100, 1024)["matmuls"]) < 1e-4
assert PASSES[0][1] > PASSES[0][2] and all(reads + keys > computes for _, computes, reads, keys in PASSES[1:])
show(bound(PASSES, "The same model, three passes"))

# %% [markdown] tags=["notes"]
# The thick edge is what a pass waits for. Sequences of 1,152 tokens: 1,024 of the prompt, and half of the answer. Kernels take another
# 1.3 ms to start.
#
# **Ask:** 256 sequences, and a token takes not 256 times as long but about three times. Why? The weights are read once for all; only
# keys and values are each one's own.
#
# **Misunderstanding:** that a faster chip makes tokens faster. One sequence computes for 0.03 of its 7 ms: memory must be faster.
#
# **Source:** Pope et al. 2022; Austin et al. 2025, inference chapter. Estimates: no constant is fitted to serving; of 15 published runs of
# an engine half are within 13 %.

# %% [markdown] tags=["slide"] minutes=2
# ## What an inference engine manages
#
# Weights are read by every token; keys and values grow with every sequence: **1 GiB** for 8,192 tokens of Llama 3 8B.
#
# <footer>Kwon et al. 2023 (PagedAttention) · <code>llmpar.predict.serving</code> · lesson <code>notebooks/16_serve</code></footer>

# %%
assert serving.cache_bytes(llama, 8192) == 2**30
weights = 2 * llama.num_params
bars = [
    (f"{n} sequence" + "s" * (n > 1), {"weights": weights, "keys and values": n * 2**30})
    for n in (1, 16, 40, 64)
]
assert sum(bars[2][1].values()) < h100.usable_bytes < sum(bars[3][1].values())
show(draw.memory_bars(bars, h100.usable_bytes, "Memory of one H100"))

# %% [markdown] tags=["notes"]
# **Ask:** a request of 200 tokens in a slot of 8,192: how much is wasted? 98 %. That is why engines cut the cache into pages.
#
# **Misunderstanding:** that a longer prompt only costs time. It holds its cache until the last token is out.
#
# **Source:** computed from the model's dims: 2 (K, V) × layers × KV heads × head width × 2 bytes. Kwon et al. 2023 measured that
# systems before used 20 to 38 % of the memory that they had set aside for it.

# %% [markdown] tags=["slide"] minutes=2
# ## Who holds the cache?
#
# `dp` cuts requests, `tp` KV heads, `sp` positions. With 2 KV heads `tp=4` holds everything **twice**; `sp` can still cut.
#
# <footer>Pope et al. 2022 · lesson <code>notebooks/16_serve</code> · <code>llmpar generate "Once upon" --mesh sp=8</code></footer>

# %%
from dataclasses import replace

from llmpar.plan.plan import Plan
from llmpar.plan.serving import CACHE, serving_plan

two_heads = replace(preset("tiny"), num_kv_heads=2)
cut = {mesh: serving_plan(Plan(mesh), two_heads, 4, 8) for mesh in ("dp=4", "tp=4", "sp=4")}
show(draw.cache({mesh: (plan.place(CACHE), plan.mesh.sizes) for mesh, plan in cut.items()}))

# %% [markdown] tags=["notes"]
# Columns are positions 0 to 7. The layouts are those that `generate` uses.
#
# **Ask:** one request with a million tokens: which of the three can hold it? `sp`: `dp` has one request for four devices, `tp` no more
# KV heads to give away.
#
# **Misunderstanding:** that the cut cache must travel to the query, as in ring attention. For one token the query is smaller: it goes to
# the cache, and a small sum per layer joins what was found.
#
# **Source:** Pope et al. 2022, section 3.3; the sums are counted in lesson 16.

# %% [markdown] tags=["slide"] minutes=2
# ## Pages: memory as it is needed
#
# The length of an answer is not known in advance. Hatched: reserved and not used. A page holds the keys and values of **16
# tokens**.
#
# <footer>Kwon et al. 2023 (PagedAttention) · <code>llmpar.predict.serving</code> · lesson <code>notebooks/16_serve</code></footer>

# %%
from deck import steps

RUN = {"A": 3, "B": 9, "C": 5, "D": 2}  # the pages that each of four requests needs
WAIT = {"E": 8, "F": 12, "G": 6, "H": 10, "I": 7}  # and those that wait for room
SLOT = 16  # pages of the longest request that may come
ROOM = SLOT * len(RUN)
assert 0.20 < sum(RUN.values()) / ROOM < 0.382  # what Kwon et al. found in systems before


def taken(requests):
    """Who owns each page, in the order in which growing requests ask for one."""
    turns = range(max(requests.values()))
    return [name for turn in turns for name, need in requests.items() if turn < need]


def memory(title, owners):
    """All pages, in rows as long as a slot."""
    owners = owners + [""] * (ROOM - len(owners))
    rows = [(f"pages {i} to {i + SLOT - 1}", owners[i : i + SLOT]) for i in range(0, ROOM, SLOT)]
    return draw.slots({"": rows}, f"{title}: {sum(map(str.isalpha, owners))} of {ROOM} used")


more = dict(RUN)
for name, need in WAIT.items():
    more |= {name: need} if sum(more.values()) + need <= ROOM else {}
new = {name: need for name, need in more.items() if name not in RUN}
reserved = [name if k < need else "/" for name, need in RUN.items() for k in range(SLOT)]
steps(
    memory("A slot for each", reserved),
    memory("Pages, as they grow", taken(RUN)),
    memory(f"Pages, and {len(new)} requests more", taken(RUN) + taken(new)),
)

# %% [markdown] tags=["notes"]
# **Ask:** what does this remind you of? Virtual memory: an operating system hands out pages, and a table says where they are.
#
# **Misunderstanding:** that pages make attention cheaper. It reads as many keys and values as before; there is room for more sequences,
# and with them more tokens per second.
#
# **Source:** Kwon et al. 2023: 20 to 38 % of the memory that was set aside held tokens in systems before; under 4 % is wasted in
# pages. The lengths here are made up; who gets which page is computed. `llmpar serve` has slots, no pages: it is for learning.

# %% [markdown] tags=["slide"] minutes=1
# ## Continuous batching: a finished request frees its slot
#
# <footer>Yu et al. 2022 (Orca) · lesson <code>notebooks/16_serve</code></footer>

# %%
TOKENS = {"A": 3, "B": 9, "C": 5, "D": 2, "E": 6, "F": 4, "G": 7, "H": 3}  # that each request must get
lanes = [[], [], [], []]
for first in (0, 4):  # batch by batch
    names = list(TOKENS)[first : first + 4]
    longest = max(TOKENS[name] for name in names)
    for lane, name in zip(lanes, names, strict=True):
        lane += [name] * TOKENS[name] + ["/"] * (longest - TOKENS[name])
joined = [[], [], [], []]
for name, num in TOKENS.items():
    min(joined, key=len).extend([name] * num)
steps_of = {"batch": len(lanes[0]), "joined": max(map(len, joined))}
assert steps_of == {"batch": 16, "joined": 12}
joined = [lane + [""] * (len(lanes[0]) - len(lane)) for lane in joined]


def served(words, lanes):
    """Who has which slot in each step."""
    return draw.slots({words: [(f"slot {i}", lane) for i, lane in enumerate(lanes)]}, words)


show(served(f"A batch waits for its longest request: {steps_of['batch']} steps", lanes))

# %% tags=["fragment"]
show(served(f"A free slot takes the next request: {steps_of['joined']} steps", joined))

# %% [markdown] tags=["notes"]
# **Ask:** before the second picture: request D is finished after 2 steps. What happens to its slot? It waits for B, 9 steps long.
#
# **Misunderstanding:** that a batch is fixed once it runs. Every step is a new pass: it may have other rows than the one before.
#
# **Source:** Yu et al. 2022. Eight lengths, made up; both schedules are computed from them. In lesson 16 an engine really runs so.

# %% [markdown] tags=["slide"] minutes=1
# ## Prefill on other GPUs
#
# While a prompt is prefilled, answers wait. Apart, they do not; the prompt's **cache travels**: 262 MB, 5 ms at 50 GB/s.
#
# <footer>Zhong et al. 2024 (DistServe) · lesson <code>notebooks/16_serve</code> · <code>llmpar plan --serve 2000+500</code></footer>

# %%
prefill_s = sum(serving.prefill_seconds(llama, h100, 2000).values())
decode_s = sum(serving.decode_seconds(llama, h100, 32, 2250).values())
assert (round(1e3 * prefill_s), round(1e3 * decode_s, 1)) == (54, 11.0)
assert round(serving.cache_bytes(llama, 2000) / 1e6) == 262
prompt = ["P"] * round(prefill_s / decode_s)
busy = ["d"] * 3 + prompt + ["d"] * 7 + prompt + ["d"]
apart = [""] * 3 + prompt + [""] * 7 + prompt + [""]
rows = {
    "One GPU does both": [("one for all", busy)],
    "Apart": [("prefill GPU", apart), ("decode GPU", ["d"] * len(busy))],
}
show(draw.slots(rows, "P: prefill of 2,000 tokens, 54 ms. d: a decode pass for 32 requests, 11 ms"))

# %% [markdown] tags=["notes"]
# P is the prefill of a prompt of 2,000 tokens, 54 ms; d a decode pass for 32 requests, 11.0 ms.
#
# **Ask:** answers have 500 tokens. How many decode GPUs does one prefill GPU serve? A request needs 500 · 11.0 / 32 = 172 ms of one,
# and 54 ms of prefill: three.
#
# **Misunderstanding:** that this makes a token cheaper. As much is computed; answers come evenly, and each side has its own mesh.
#
# **Source:** Zhong et al. 2024; estimates of `llmpar.predict.serving`, which lesson 16 prints for a service.

# %% [markdown] tags=["slide"] minutes=1
# ## Prefix caches and speculative decoding
#
# Keys and values of a shared **prefix** are computed once. A small model **drafts** four tokens, one pass checks them.
#
# <footer>Zheng et al. 2024 (SGLang); Leviathan et al. 2023 · lesson <code>notebooks/16_serve</code></footer>

# %%
shared = [(f"request {n}", ["S" if i == 0 else "/"] * 6 + [n]) for i, n in enumerate("ABCD")]
guesses = [("", ["d"] * n + ["M"] + ["/"] * (4 - n)) for n in (4, 1, 3, 0)]
gives = sum(0.8**n for n in range(5))
assert abs(gives - 3.36) < 0.01
rows = {"S: prefix, computed once": shared, "Four passes, 12 tokens": guesses}
show(draw.slots(rows, "Hatched: not computed again; or drafted, and dropped", across=True))

# %% [markdown] tags=["notes"]
# Left: four requests with the same six pages of instructions; hatched pages are the first one's. Right: a row is a pass, *d* a drafted
# token that was right, *M* the model's own token, hatched what was drafted after the first wrong one.
#
# **Ask:** a date stands in front of the instructions. What is kept? Nothing behind it: keys and values depend on all tokens before.
#
# **Misunderstanding:** that guesses change the answer. The large model checks each. Four guesses that are right with 0.8 give 3.36 tokens
# a pass; with many requests the pass computes as long as it reads, and dropped guesses cost time.
#
# **Source:** Zheng et al. 2024; Leviathan et al. 2023. Lesson 16 compares the keys and values of two requests, position by position.

# %% [markdown] tags=["slide", "short"] minutes=2
# ## Inference engines
#
# <footer>Kwon et al. 2023; Zheng et al. 2024; Yu et al. 2022 (Orca) · lesson <code>notebooks/16_serve</code></footer>

# %%
from IPython.display import Markdown

KINDS = {"cache": OTHERS[0], "batches": OTHERS[1], "besides": OTHERS[2]}
ENGINES = {
    "vLLM": ("pages", "join at every token", ""),
    "SGLang": ("pages", "join at every token", "prefixes kept in a tree"),
    "TensorRT-LLM": ("", "", "kernels for one NVIDIA chip"),
    "DeepSpeed-MII": ("blocks", "all of one size", ""),
    "JetStream (TPU)": ("", "of fixed shapes", "XLA's programs"),
}
cells = [
    (name, [(text, role if text else "") for text, role in zip(texts, KINDS.values(), strict=True)])
    for name, texts in ENGINES.items()
]
show(draw.table(cells, tuple(KINDS), "What each is known for"))

# %% [markdown]
# All cut heads over `tp`, most layers over `pp`, experts over `ep`, and run replicas.

# %% [markdown] tags=["notes"]
# Empty: not what it is known for. TensorRT-LLM has a server of its own, and runs behind Triton Inference Server. vLLM runs on TPUs, too.
#
# **Ask:** which strategy of today does none of them use? FSDP: a gather of the weights for each token.
#
# **Misunderstanding:** Triton twice. Triton Inference Server serves models; the language Triton writes kernels. They share a name.
#
# **Source:** Kwon et al. 2023 (vLLM); Zheng et al. 2024 (SGLang); Yu et al. 2022 (batches that change at every token); Holmes et al.
# 2024 (DeepSpeed-FastGen); the projects' documentation.

# %% [markdown] tags=["slide"] minutes=1
# ## An inference engine on two nodes: the job file
#
# <footer><code>llmpar launch slurm --nodes 2 --serve vllm --weights EXPORT</code> · <code>docs/serve.md</code></footer>

# %%
import contextlib
import io
import re
import textwrap

from llmpar import preset
from llmpar.cli.commands import parse
from llmpar.predict import serving
from llmpar.predict.hardware import chip

asked = "launch slurm --nodes 2 --serve vllm --weights llama3.1-405b".split()
written = io.StringIO()
with contextlib.redirect_stdout(written), contextlib.redirect_stderr(io.StringIO()):
    parse(asked).run()
wanted = re.compile(r"head=|.*(ray start|vllm serve)")
lines = [line for line in written.getvalue().splitlines() if wanted.match(line)]
short = [line.replace('"${inside[@]}"', "$inside").replace("llama3.1-405b", "$weights", 1) for line in lines]
glued = [re.sub(r"(--[\w-]+) (?=[^-&])", r"\1\0", line) for line in short]  # a flag and its value
fold = {"width": 84, "subsequent_indent": "    ", "break_on_hyphens": False}
folded = [" \\\n".join(textwrap.wrap(line, **fold)).replace("\0", " ") for line in glued]
Markdown("```bash\n" + "\n".join(folded) + "\n```")

# %%
config, tokens = preset("llama3.1-405b"), 131_072
tp, pp, most = serving.cut(config, chip("h100"), 2, 8, tokens)
assert (tp, pp) == (8, 2) and 600_000 < most < 700_000
weights_gb, cache_gb = 2e-9 * config.num_params, 1e-9 * serving.cache_bytes(config, tokens)
Markdown(
    f"Llama 3.1 405B: {weights_gb:.0f} GB, and {cache_gb:.0f} GB for {tokens:,} tokens of cache."
    f" **tp = {tp}** in a node, **pp = {pp}** over nodes."
)

# %% [markdown] tags=["notes"]
# The same three steps as with Ray on SLURM: a head, workers, and the program beside the head. The lines are those that the command
# writes today, with the container's words as `$inside`.
#
# **Ask:** why not tp = 16? Two all-reduces in every layer would cross the network. A stage hands on one row of the stream for each token.
#
# **Misunderstanding:** that the sizes are a matter of taste. Weights and cache must fit: `serving.cut` takes the fewest GPUs of a node
# with which they do, or else the fewest nodes; the command refuses what cannot fit and says what would.
#
# **Source:** vLLM's guide, Parallelism and Scaling: tensor parallel within a node, pipeline parallel over nodes. The file ran on
# SLURM and Ray with a stand-in for vLLM (`tests/test_real_engines.py`); vLLM on GPUs was not tried.
