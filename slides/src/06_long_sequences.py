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
# Cut the sequence over `sp`. Hand K and V to the neighbour while looking at them: **N − 1 hops**, exact attention, and no device
# holds it all.
#
# <footer>Liu et al. 2023 (Ring Attention) · lesson <code>notebooks/06_long_sequences</code> · <code>llmpar inspect --mesh sp=8</code></footer>

# %%
from llmpar.mesh import abstract_mesh, spec, use_devices
from llmpar.predict.ring import pairs_by_step

use_devices()

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from deck import draw, letters, show, where

from llmpar import attention, sequence_order
from llmpar.config import preset
from llmpar.draw import scene
from llmpar.draw.scene import Group, Text, compose, stack
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.notation import parse_layout
from llmpar.predict import formulas
from llmpar.predict.hardware import chip

N, TOKENS, LLAMA = 8, 131_072, preset("llama3-8b")


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
    run = lambda q, k, v, at: attention.ring(q, k, v, axis="sp", q_positions_bs=at, k_positions_bt=at)[0]
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
show(draw.ring_steps([(i, (i + 1) % 4) for i in range(4)]))

# %% [markdown] tags=["notes"]
# Drawn for 4 devices. Llama 3 8B, 131,072 tokens over 8 devices in bf16: a hop is 64 MiB per layer (8 KV heads; 32 query heads would
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

# %% [markdown] tags=["slide"] minutes=2
# ## Zigzag: nobody waits
#
# In order, the last rank works in every step and the others wait. Give rank $i$ the parts $i$ and $2N-1-i$ of $2N$:
# everybody has the same work.
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


@letters()
def panel(order):
    """The picture of one order under its name, in place of its own title and note."""
    drawn = draw.live_blocks(parts[order].tolist())
    words = [item for item in scene.flatten(drawn.items) if isinstance(item, Text)]
    own = [
        item for item in words if item.text == drawn.title or (item.fill, item.anchor) == ("soft", "start")
    ]
    kept = [item for item in scene.flatten(drawn.items) if item not in own]
    short = lambda item: dataclasses.replace(
        item, text=item.text.removesuffix(" of time").removesuffix(" blocks")
    )
    cells = [short(item) if isinstance(item, Text) else item for item in kept]
    return [
        Group(tuple(cells)),
        Text(20, 22, {"contiguous": "in order", "zigzag": "zigzag"}[order], bold=True),
    ]


said = "\n".join(
    f"{order}: the ring takes {part.max(0).sum():g} blocks of time" for order, part in parts.items()
)
show(
    compose(
        "Live blocks of a causal ring of 4", [stack([panel(order) for order in parts], 40, across=True)], said
    )
)

# %% [markdown] tags=["notes"]
# 3.5 blocks of time against 2: the busiest rank has 2 − 1/N times the mean in order, and exactly the mean in zigzag.
#
# **Ask:** what does it cost? A permutation of the data before the step. Positions travel with the keys, so attention and RoPE notice
# nothing; targets are dealt with their tokens.
#
# **Misunderstanding:** that the causal mask makes a ring twice as fast by itself. In order the last rank computes in every step, and
# all others wait for it; the half that is masked is only idle time.
#
# **Source:** 2 − 1/N: Brandon et al. 2023, whose striped order is nearly as even. A half-filled cell is half a block: on the
# diagonal a triangle, in zigzag after step 0 half of the queries or half of the keys. The shares are counted from the causal
# mask, for N up to 64.
