"""Route tokens to experts, on one device or on many: choose, send, multiply, send back, add up.

A layer of experts does six things. (1) The router scores every token against every expert, and the best k are
chosen. (2) Each device lays its tokens, k copies of each, in order of their experts into a buffer with the
same number of slots for each rank that holds experts. (3) One all-to-all, the arrow ``b/ep e c d -> b e/ep c
d``: block e of everyone's buffer goes to the rank of those experts. (4) Each rank multiplies the rows of each
of its experts by that expert's weights. (5) The same all-to-all back. (6) A token adds its k rows up, weighed
by the router. Autodiff turns each all-to-all around, so there are two forward and two backward.

XLA's shapes are static, so the slots of the buffer are as many as could be needed. Without a capacity no
token is dropped: then a rank gets slots for all tokens that could choose it, and most of them travel empty
(`ExpertConfig.slots`). Where XLA has `jax.lax.ragged_all_to_all` (GPU, TPU), ``dispatch="ragged"`` sends the
full slots alone. Empty slots are never multiplied: the rows of an expert fill whole blocks, and the loop runs
over blocks that hold something.

Dims: b batch, s positions, d width, e experts (or the k chosen ones of a token), c slots, m an expert's
width. (Shazeer et al. 2017; capacity: Lepikhin et al. 2020, Fedus et al. 2021; blocks of rows of one expert:
Gale et al. 2022.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llmpar.config import ExpertConfig
from llmpar.par import vary, varying

# --------------------------------------------------------------------------------------------------- choosing


def affinities(how: ExpertConfig, logits):
    """Each token's affinity to each expert, float32."""
    return jax.nn.softmax(logits, axis=-1) if how.score == "softmax" else jax.nn.sigmoid(logits)


def choose(how: ExpertConfig, scores, bias=None):
    """The k experts of each token and their weights, from affinities ``b s e``: (weights, chosen), each ``b s
    k``.

    Mixtral (Jiang et al. 2024) takes a softmax over the k largest logits: a softmax over all, renormalised.
    DeepSeek-V3 (2024, section 2.1.2) chooses by affinity plus bias within the best groups of experts, and
    weighs by affinity alone.
    """
    favour = lax.stop_gradient(scores if bias is None else scores + bias.astype(scores.dtype)[None, None])
    if how.num_groups > 1:
        grouped = favour.reshape(*favour.shape[:-1], how.num_groups, -1)
        worth = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
        best = lax.top_k(worth, how.top_groups)[1]
        is_open = jax.nn.one_hot(best, how.num_groups, dtype=bool).any(-2)
        favour = jnp.where(is_open[..., None], grouped, -jnp.inf).reshape(favour.shape)
    chosen = lax.top_k(favour, how.top_k)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if how.renormalise:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * how.scale, chosen


def route(how: ExpertConfig, here, logits, bias=None):
    """Weights and chosen experts ``b s k`` (`how.num_experts` where a token is dropped), and what is told of
    them.

    Told: ``loss``, ``b s``, float32, the token's part of

        balance loss   E/k · sum over e of f_e P_e for each row, f_e the share of the row's tokens that chose
                       e and P_e their mean affinity (DeepSeek-V3 2024, section 2.1.2, sequence-wise: no
                       device needs another's rows)
        z loss         the square of the log of the sum of exponentials (Zoph et al. 2022, eq. 5)

    and ``tally``: tokens per expert, then how many choices were dropped, then the sum of the tokens' router
    entropies in nats, ``E + 2`` numbers of this device.
    """
    scores = affinities(how, logits)
    weights, chosen = choose(how, scores, bias)
    hot = jax.nn.one_hot(chosen, how.num_experts, dtype=jnp.float32).sum(-2)
    share = scores / scores.sum(-1, keepdims=True)
    loss = how.z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    if how.aux_loss:
        counts = here.move(hot.sum(1), "stream b e +s -> stream b e")
        row = counts * how.num_experts / counts.sum(-1, keepdims=True)  # E f_e / k: sums to E
        loss = loss + how.aux_loss * (share * row[:, None]).sum(-1)
    if how.capacity_factor is not None:
        before = jnp.cumsum(hot, axis=1) - hot  # of each expert's tokens, those that came first
        line = jnp.take_along_axis(before, chosen, axis=-1)
        chosen = jnp.where(line < how.capacity(logits.shape[1]), chosen, how.num_experts)
    dropped = (chosen == how.num_experts).sum(dtype=jnp.float32)
    entropy = -(share * jnp.log(share + 1e-20)).sum()
    tally = jnp.concatenate([hot.sum((0, 1)), jnp.stack([dropped, entropy])])
    return weights, chosen, {"loss": loss, "tally": lax.stop_gradient(tally)}


# ---------------------------------------------------------------------------------------------------- sending


@jax.custom_vjp
def take(x, index, back):
    """Rows ``x[index]``, zeros where an index is past the end. ``back`` says which results each row of ``x``
    went to (again past the end for none), so that the gradient is gathered too, and nothing is ever
    scattered."""
    return x.at[index].get(mode="fill", fill_value=0)


def _take_forward(x, index, back):
    return take(x, index, back), back


def _take_backward(back, grad):
    rows = grad.at[back].get(mode="fill", fill_value=0)
    return rows.sum(1), None, None


take.defvjp(_take_forward, _take_backward)


def exchange(here, rows, full, arrow: str):
    """Everyone's block for a rank goes to that rank: all slots, or the ``full`` rows of rank i for rank j
    alone."""
    return here.ragged(rows, full, arrow) if here.plan.dispatch == "ragged" else here.move(rows, arrow)


def visit(how: ExpertConfig, here, x, weights, chosen, gate, up, down):
    """Every token's visit to its experts, ``b s d``, where each rank holds some of them: steps 2 to 6 above.

    ``gate``, ``up`` and ``down`` are this device's experts. Experts whose width is cut give a part of the
    sum.
    """
    b, s, d = x.shape
    k, tokens, ranks = how.top_k, b * s, here.parts("experts e")
    local, pairs = how.num_experts // ranks, tokens * k
    blocks, block = how.slots(tokens, b * here.parts("stream s") // here.parts("ffn s"), ranks)
    slots = blocks * block

    # Pairs of token and choice, in order of their experts. A rank's part of the buffer begins with its first
    # expert.
    expert = chosen.reshape(pairs)
    order = jnp.argsort(expert, stable=True)
    counts = (expert[:, None] == jnp.arange(how.num_experts)[None]).sum(0, dtype=jnp.int32)
    everyone = here.move(counts[None], "ffn b e -> counts b e")  # ranks × experts
    mine = everyone[
        here.index("experts e")
    ]  # `counts`, but known only when the ranks have met: two collectives never race
    in_blocks = -(-everyone.reshape(ranks, ranks, local) // block)  # of rank i for rank j's experts
    full = block * in_blocks.sum(-1, dtype=jnp.int32)
    start = block * (
        jnp.cumsum(in_blocks[here.index("experts e")], axis=-1) - in_blocks[here.index("experts e")]
    )
    start = (start + slots * jnp.arange(ranks)[:, None]).reshape(how.num_experts) - (jnp.cumsum(mine) - mine)
    in_line = jnp.zeros_like(order).at[order].set(jnp.arange(pairs))
    slot = jnp.where(
        expert < how.num_experts, start[jnp.minimum(expert, how.num_experts - 1)] + in_line, ranks * slots
    )
    pair = jnp.full_like(slot, pairs, shape=ranks * slots).at[slot].set(jnp.arange(pairs), mode="drop")

    x, *ints = _alike(x.reshape(tokens, d), pair // k, slot.reshape(tokens, k))
    rows = take(x, *ints).reshape(1, ranks, slots, d)
    rows = exchange(here, rows, full, "ffn b e c d -> experts b e c d").reshape(ranks * blocks, block, d)

    # Which of my experts each arrived block belongs to; `local`: none, the block is empty.
    ends = jnp.cumsum(in_blocks[:, here.index("experts e")], axis=-1)
    owner = (
        (jnp.arange(blocks)[None, :, None] >= ends[:, None]).sum(-1, dtype=jnp.int32).reshape(ranks * blocks)
    )
    multiply = ragged_dot if here.plan.grouped == "ragged_dot" else blockwise
    rows = multiply(rows, (gate, up, down), owner)

    rows = exchange(here, rows.reshape(ranks, 1, slots, d), full.T, "experts b e c d +m -> ffn b e c d +m")
    rows, *ints = _alike(rows.reshape(ranks * slots, d), slot, pair[:, None])
    rows = take(rows, *ints).reshape(tokens, k, d)
    y = jnp.einsum("tk,tkd->td", weights.reshape(tokens, k), rows.astype(jnp.float32))
    return y.astype(x.dtype).reshape(b, s, d)


# ------------------------------------------------------------------------------------------------ multiplying


def swiglu(multiply, rows, gate, up, down):
    """The feed-forward of `model.FeedForward`, for rows of many experts."""
    return multiply(jax.nn.silu(multiply(rows, gate)) * multiply(rows, up), down)


def blockwise(rows, weights, owner):
    """Every block of rows ``[blocks, rows, d]`` through the expert that owns it (weights ``[experts, d, m]``
    and back).

    Blocks without an owner give zeros and cost nothing: the loop runs over the live ones, in order of their
    experts. The derivative does the same twice, so k of E experts cost k/E of all of them, forward and
    backward, and a block's padding.
    """
    line = jnp.argsort(owner, stable=True)
    live = (owner < weights[0].shape[0]).sum(dtype=jnp.int32)
    return swiglu(lambda rows, w: _grouped(*_alike(rows, w, owner, line, live)), rows, *weights)


def ragged_dot(rows, weights, owner):
    """The same by `jax.lax.ragged_dot`, which wants the rows of an expert side by side. On CPUs it multiplies
    all rows by all experts, and masks."""
    line = jnp.argsort(owner, stable=True)
    rows, owner, line, back = _alike(rows, owner, line, jnp.argsort(line))
    counts = (owner[:, None] == jnp.arange(weights[0].shape[0])[None]).sum(0, dtype=jnp.int32) * rows.shape[1]
    multiply = lambda x, w: lax.ragged_dot(*_alike(x, w, counts))
    y = swiglu(multiply, take(rows, line, back[:, None]).reshape(-1, rows.shape[2]), *weights)
    return take(y.reshape(rows.shape), back, line[:, None])


@jax.custom_vjp
def _grouped(rows, w, owner, line, live):
    def one(i, out):
        b = line[i]
        y = jnp.matmul(rows[b], w[owner[b]], preferred_element_type=jnp.float32)
        return lax.dynamic_update_index_in_dim(out, y.astype(rows.dtype), b, 0)

    (out,) = _alike(jnp.zeros((*rows.shape[:2], w.shape[2]), rows.dtype), like=rows)
    return lax.fori_loop(0, live, one, out)


def _grouped_forward(rows, w, *where):
    return _grouped(rows, w, *where), (rows, w, where)


def _grouped_backward(saved, grad):
    rows, w, (owner, line, live) = saved
    drows = _grouped(grad, w.swapaxes(1, 2), owner, line, live)

    def one(i, dw):
        b = line[i]
        more = jnp.matmul(rows[b].T, grad[b], preferred_element_type=jnp.float32)
        return lax.dynamic_update_index_in_dim(dw, dw[owner[b]] + more, owner[b], 0)

    (dw,) = _alike(jnp.zeros(w.shape, jnp.float32), like=rows)
    return drows, lax.fori_loop(0, live, one, dw).astype(w.dtype), None, None, None


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _alike(*values, like=None):
    """The values, all typed as varying over every mesh axis over which one of them does: loops insist."""
    axes = sorted(frozenset().union(*map(varying, jax.tree.leaves((values, like)))))
    return tuple(vary(x, axes) for x in values)


# --------------------------------------------------------------------------------------------------- watching


def flow(chosen, num: int, ranks: int):
    """Rows that rank i sends rank j, ``ranks × ranks``, from the chosen experts of tokens that lie on the
    ranks in equal parts, in order (numpy or JAX). The diagonal stays where it is; dropped choices are not
    counted."""
    chosen = jnp.asarray(chosen).reshape(ranks, -1)
    owner = chosen // (num // ranks)
    return (owner[:, :, None] == jnp.arange(ranks)[None, None]).sum(1)


def summary(how: ExpertConfig, metrics: dict, ranks: int = 1) -> dict[str, float]:
    """A step's metrics in four numbers: the share of choices dropped, the mean entropy of a router in nats,
    and how much more than the mean the busiest expert and the busiest of ``ranks`` have, in the worst
    layer."""
    load, dropped, entropy = (np.asarray(metrics[key]) for key in ("load", "dropped", "router_entropy"))
    total, per_rank = load.sum(), load.reshape(load.shape[0], ranks, -1).sum(-1)
    busiest = lambda x: float((x.max(1) / x.mean(1)).max())
    return {
        "drop_fraction": float(dropped.sum() / total),
        "router_entropy": float(entropy.sum() / total * how.top_k),
        "expert_imbalance": busiest(load),
        "rank_imbalance": busiest(per_rank),
    }
