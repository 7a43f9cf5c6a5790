# %% [markdown] tags=["slide", "divider"] minutes=1 section="Long sequences"
# ## Where are we: one sequence, many devices
#
# <footer>Lesson <code>notebooks/06_long_sequences</code></footer>

# %%
from deck import where

where("ring attention")

# %% [markdown] tags=["notes"]
# A checkpoint: who is lost says so now. **Ask:** which values does tensor parallelism with a cut sequence still hold whole? (The inputs of attention and feed-forward.)

# %% [markdown] tags=["slide", "short"] minutes=2 section="Long sequences"
# ## Ring attention: queries stay, keys travel
#
# Context parallelism: the sequence is cut over `sp`, and K and V go round. **N − 1 hops.**
#
# <footer>Liu et al. 2023 (Ring Attention) · lesson <code>notebooks/06_long_sequences</code> · <code>llmpar inspect --mesh sp=8</code></footer>

# %%
from llmpar.parallel.mesh import abstract_mesh, spec, use_devices
from llmpar.predict.ring import pairs_by_step

use_devices()

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from deck import draw, show, steps
from IPython.display import Markdown

from llmpar.draw import scene
from llmpar.draw.scene import Group
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.model import attention
from llmpar.plan import sequence_order
from llmpar.plan.layout import parse_arrow, parse_layout
from llmpar.plan.presets import preset
from llmpar.predict import formulas
from llmpar.predict.hardware import chip

N, TOKENS, LLAMA = 8, 131_072, preset("llama3.1-8b")


def hop_census(n, tokens, heads, kv_heads, width, dtype):
    """What a device sends in the forward pass of one layer's ring, K and V alone, from the traced program."""
    queries, keys, ids = (parse_layout(text) for text in ("b s/sp k r h", "b s/sp k h", "b s/sp"))
    shapes = (
        (1, tokens, kv_heads, heads // kv_heads, width),
        (1, tokens, kv_heads, width),
        (1, tokens, kv_heads, width),
        (1, tokens),
    )
    given = [jax.ShapeDtypeStruct(shape, dtype if len(shape) > 2 else jnp.int32) for shape in shapes]
    everywhere = lambda at: jax.lax.all_gather(at, "sp", axis=1, tiled=True)
    one = lambda at: attention.Ids(at, 0, everywhere(at), 0)  # one document a row
    run = lambda q, k, v, at: attention.ring_attention(q, k, v, one(at), axis="sp")[0]
    specs = tuple(map(spec, (queries, keys, keys, ids)))
    traced = jax.make_jaxpr(
        jax.shard_map(run, mesh=abstract_mesh(f"sp={n}"), in_specs=specs, out_specs=spec(queries))
    )(*given)
    return [c for c in census_jaxpr(traced, {"sp": n}) if c.dtype != "s32"]


census = hop_census(N, TOKENS, LLAMA.num_heads, LLAMA.num_kv_heads, LLAMA.head_width, jnp.bfloat16)
assert {c.kind for c in census} == {"collective-permute"} and sum(c.count for c in census) == N - 1
hop = sum(c.bytes_sent for c in census) // (N - 1)
assert (
    hop == 64 * 2**20
    and (N - 1) * hop == 2 * formulas.ring_elements(1, TOKENS, LLAMA.num_kv_heads, LLAMA.head_width, N)[0]
)


def growing(picture, gap=5):
    """The drawing row by row: what stands in a row, and the arrows that lead to it, come with a press."""
    head, body, *notes = picture.items[0].items
    items = scene.flatten([body])
    tops = sorted({item.y for item in items if isinstance(item, scene.Rect)})
    row = lambda item: max(0, sum(top <= item.box[3] + gap for top in tops) - 1)
    shown = [Group(tuple(i for i in items if row(i) <= k), frame=k) for k in range(len(tops))]
    return dataclasses.replace(picture, items=(Group((head, Group(tuple(shown)), *notes)),))


steps(growing(draw.ring_steps([(i, (i + 1) % 4) for i in range(4)])))

# %% [markdown] tags=["notes"]
# Each rank hands K and V to its neighbour while it looks at them. Attention is exact, and no device holds all of it.
#
# Drawn for 4 devices. Llama 3.1 8B, 131,072 tokens over 8 devices in bf16: a hop is 64 MiB per layer (8 KV heads; 32 query heads would
# be four times that), read from the traced program.
#
# **Ask:** how can a device begin its softmax before it has seen all keys? It keeps the output so far and the log of the sum of
# exponentials; two partial results merge exactly.
#
# **Misunderstanding:** that this is an approximation, or that it saves work. It is exact, and all pairs are computed; what is saved is
# memory. The paper's ring makes N hops; the last is not needed.
#
# **Source:** Liu et al. 2023; online softmax: Milakov and Gimelshein 2018. A hop hides behind blocks of C/β tokens, times KV
# heads/heads, twice that if causal: 1.0k for an A100 in a node with neither (table 2).

# %%
a100 = chip("a100-80")
assert round(formulas.ring_min_block(a100.flops_per_s, a100.link_bytes_per_s), -2) == 1000

# %% [markdown] tags=["slide"] minutes=1
# ## Poll: which rank waits most?
#
# Causal attention in a ring of four ranks, with positions in order. A step ends when its slowest rank is done.
#
# | A | B | C |
# |---|---|---|
# | rank 0 | rank 3 | all the same |
#
# <footer>Lesson <code>notebooks/06_long_sequences</code></footer>

# %% place="beside"
quarters = {"ranks 0 to 3, in order": [[0], [1], [2], [3]]}
show(draw.causal(quarters, step=0, counts=False))

# %% [markdown] tags=["notes"]
# The coloured part is what each rank computes before the first hop. **Ask:** raise a hand. (A: the queries of rank 0 see no later key, so
# it has work in the first step only.)
#
# **Misunderstanding:** that equal parts of a sequence are equal work. Under a causal mask late queries see more keys.
#
# **Source:** the next slide counts the pairs.

# %% [markdown] tags=["slide"] minutes=1
# ## Zigzag: the same work on each rank
#
# Rank $i$ gets the parts $i$ and $2N-1-i$. Four ranks take **2 squares of time**, not 3.5.
#
# <footer>Brandon et al. 2023 (Striped Attention) · lesson <code>notebooks/06_long_sequences</code> · <code>llmpar train --mesh sp=8 --sequence-order zigzag</code></footer>

# %%
LOCAL = 64


def shares(n, order):
    """Which part of a block each rank must compute in each step, from the pairs that the causal mask lets
    through."""
    pairs = np.array(pairs_by_step(n, order, s=n * LOCAL))
    at = np.reshape(sequence_order.sequence_permutation(order, n * LOCAL, n), (n, LOCAL))
    by_mask = [[(at[rank][:, None] >= at[rank - step]).sum() for step in range(n)] for rank in range(n)]
    assert (pairs == np.array(by_mask)).all()
    return (
        pairs - (np.arange(n) == 0) * LOCAL / 2
    ) / LOCAL**2  # a query's own key counts half: a triangle is half a block


parts = {order: shares(4, order) for order in ("contiguous", "zigzag")}
for n in (2, 4, 8, 64):
    in_order, zigzag = (shares(n, order).sum(1) for order in parts)
    assert np.isclose(in_order.max() / in_order.mean(), 2 - 1 / n) and np.allclose(zigzag, n / 2)


ORDERS = {"in order": "contiguous", "zigzag": "zigzag"}
dealt = {
    name: [
        [place // 8 for place in rank[::8]]
        for rank in np.reshape(sequence_order.sequence_permutation(order, 64, 4), (4, 16)).tolist()
    ]
    for name, order in ORDERS.items()
}
drawn = [draw.causal(dealt, step, bars=False) for step in range(4)]
for name, order in ORDERS.items():
    assert f"{name}: takes {parts[order].max(0).sum():g} squares" in drawn[-1].text
steps(*drawn)

# %% [markdown] tags=["notes"]
# As long as 3.5 full squares against 2: the busiest rank has 2 − 1/N times the mean in order, and exactly the mean in zigzag.
#
# **Ask:** what does it cost? A permutation of the data before the step. Positions travel with the keys, so attention and RoPE notice
# nothing; targets are dealt with their tokens.
#
# **Misunderstanding:** that the causal mask makes a ring twice as fast by itself. In order the last rank computes in every step, and
# all others wait for it; the half that is masked is only idle time.
#
# **Source:** 2 − 1/N: Brandon et al. 2023, whose striped order is nearly as even. A full square is all queries of a rank with all
# keys of a rank: four small squares. The shares are counted from the causal mask, for N up to 64.

# %% [markdown] tags=["slide"] minutes=2
# ## Two other ways: Ulysses, or gathered keys
#
# The drawing is Ulysses; Llama 3 gathers the keys. For a layer of Llama 3.1 8B, 131,072 tokens, `sp=8`:
#
# <footer>Jacobs et al. 2023 (DeepSpeed-Ulysses) · Llama 3 team 2024, section 3.3.2 · lesson <code>notebooks/06_long_sequences</code></footer>

# %%
sent = lambda text, heads: sum(
    n for _, n in draw.moved(parse_arrow(text), (1, TOKENS, heads, LLAMA.head_width), {"sp": N}, 2)
)
n, k, MIB = LLAMA.num_heads, LLAMA.num_kv_heads, 2**20
ulysses = sent("b s/sp n h -> b s n/sp h", n) + 2 * sent("b s/sp k h -> b s k/sp h", k)
ulysses += sent("b s n/sp h -> b s/sp n h", n)
gathered = 2 * sent("b s/sp k h -> b s k h", k)
assert (7 * hop, ulysses, gathered) == (448 * MIB, 280 * MIB, 448 * MIB)
show(
    draw.matmul(
        "s/sp n h -> s n/sp h -attention-> s n/sp h -> s/sp n h",
        names=("Q, K, V", "all positions", "of its heads", "output"),
    )
)
Markdown(f"""| variant | sent | hidden behind work | holds |
|---|--:|---|---|
| ring | {7 * hop / MIB:.0f} MiB | yes, with long pieces | two pieces of K and V |
| Ulysses | **{ulysses / MIB:.0f} MiB** | no | all positions, of its heads |
| gathered K and V | {gathered / MIB:.0f} MiB | no | K and V of all positions |""")

# %% [markdown] tags=["notes"]
# Ulysses turns the cut before attention, from positions to heads, and back behind it. Llama 3 gathers K and V. Counted is the forward
# pass, in bf16.
#
# **Ask:** Llama 3 8B has 8 KV heads. Over how many ranks can Ulysses go? Over 8, if KV heads are not repeated; others repeat them.
#
# **Misunderstanding:** that fewer bytes are less time. The ring's hops hide behind work; the all-to-alls do not.
#
# **Source:** bytes by our arrows; in a training step the ring's part quadruples (K and V twice, their gradients in float32), the
# others' doubles. Llama 3 gathers because its masks of documents are then simple, and K and V are small with 8 KV heads.
