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

Dims: b batch, s positions, d width, e experts, k the chosen ones of a token, m an expert's width. In steps 2
to 6 also t tokens, p pairs of a token and one of its choices, g ranks that hold experts, l the experts of one
of them, c slots of its part of the buffer, n blocks of slots. (Shazeer et al. 2017; capacity: Lepikhin et al.
2020, Fedus et al. 2021; blocks of rows of one expert: Gale et al. 2022.)
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from llmpar.config import ExpertConfig
from llmpar.par import Solo, vary_alike

# --------------------------------------------------------------------------------------------------- choosing


def affinities(experts: ExpertConfig, logits: Float[Array, "*tokens e"]) -> Float[Array, "*tokens e"]:
    """Each token's affinity to each expert, float32."""
    return jax.nn.softmax(logits, axis=-1) if experts.score == "softmax" else jax.nn.sigmoid(logits)


def choose(
    experts: ExpertConfig, scores: Float[Array, "*tokens e"], bias: Float[Array, " e"] | None = None
) -> tuple[Float[Array, "*tokens k"], Int[Array, "*tokens k"]]:
    """The k experts of each token and their weights, from affinities: (weights, chosen).

    Mixtral (Jiang et al. 2024) takes a softmax over the k largest logits: a softmax over all, renormalised.
    DeepSeek-V3 (2024, section 2.1.2) chooses by affinity plus bias within the best groups of experts, and
    weighs by affinity alone.
    """
    lift = 0 if bias is None else jnp.expand_dims(bias.astype(scores.dtype), range(scores.ndim - 1))
    favour = lax.stop_gradient(scores + lift)
    if experts.num_groups > 1:
        grouped = favour.reshape(*favour.shape[:-1], experts.num_groups, -1)
        worth = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
        best = lax.top_k(worth, experts.top_groups)[1]
        is_open = jax.nn.one_hot(best, experts.num_groups, dtype=bool).any(-2)
        favour = jnp.where(is_open[..., None], grouped, -jnp.inf).reshape(favour.shape)
    chosen = lax.top_k(favour, experts.top_k)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if experts.renormalise:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * experts.scale, chosen


def route(
    experts: ExpertConfig, par: Solo, logits: Float[Array, "b s e"], bias: Float[Array, " e"] | None = None
) -> tuple[Float[Array, "b s k"], Int[Array, "b s k"], dict[str, Array]]:
    """Weights and chosen experts (`experts.num_experts` where a token is dropped), and auxiliary outputs.

    These are ``loss``, ``b s``, float32, the token's part of

        balance loss   E/k · sum over e of f_e P_e for each row, f_e the share of the row's tokens that chose
                       e and P_e their mean affinity (DeepSeek-V3 2024, section 2.1.2, sequence-wise: no
                       device needs another's rows)
        z loss         the square of the log of the sum of exponentials (Zoph et al. 2022, eq. 5)

    and ``tally``: tokens per expert, then how many choices were dropped, then the sum of the tokens' router
    entropies in nats, ``E + 2`` numbers of this device.
    """
    scores = affinities(experts, logits)
    weights, chosen = choose(experts, scores, bias)
    hot = jax.nn.one_hot(chosen, experts.num_experts, dtype=jnp.float32).sum(-2)
    share = scores / scores.sum(-1, keepdims=True)
    loss = experts.z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    if experts.aux_loss:
        counts_be = par.move(hot.sum(1), "stream b e +s -> stream b e")
        row = counts_be * experts.num_experts / counts_be.sum(-1, keepdims=True)  # E f_e / k: sums to E
        loss = loss + experts.aux_loss * (share * row[:, None]).sum(-1)
    if experts.capacity_factor is not None:
        before = jnp.cumsum(hot, axis=1) - hot  # of each expert's tokens, those that came first
        line = jnp.take_along_axis(before, chosen, axis=-1)
        chosen = jnp.where(line < experts.capacity(logits.shape[1]), chosen, experts.num_experts)
    dropped = (chosen == experts.num_experts).sum(dtype=jnp.float32)
    entropy = -(share * jnp.log(share + 1e-20)).sum()
    tally = jnp.concatenate([hot.sum((0, 1)), jnp.stack([dropped, entropy])])
    return weights, chosen, {"loss": loss, "tally": lax.stop_gradient(tally)}


# ------------------------------------------------------------------------ dispatching, multiplying, combining


def visit(
    experts: ExpertConfig,
    par: Solo,
    x: Float[Array, "b s d"],
    weights: Float[Array, "b s k"],
    chosen: Int[Array, "b s k"],
    gate: Float[Array, "l d m"],
    up: Float[Array, "l d m"],
    down: Float[Array, "l m d"],
) -> Float[Array, "b s d"]:
    """Every token's visit to its experts, where each rank holds some of them: steps 2 to 6 above.

    ``gate``, ``up`` and ``down`` are this device's experts. Experts whose width is cut give a part of the
    sum.
    """
    rows, slots = dispatch(experts, par, x, chosen)
    multiply = ragged_dot if par.plan.grouped == "ragged_dot" else multiply_blocks
    rows = multiply(rows, (gate, up, down), slots.owner_n)
    return combine(par, rows, weights, slots).astype(x.dtype)


class Slots(NamedTuple):
    """Which pair of token and choice travels in which slot; the buffer of a rank has a part for each rank."""

    slot_p: Int[Array, " p"]  # of each pair, counted through all parts; g·c for one that was dropped
    pair_c: Int[Array, " gc"]  # the pair in each slot, all parts one after the other; p in an empty one
    rows_gg: Int[Array, "g g"]  # rows of full blocks that rank i has for rank j
    owner_n: Int[Array, " gn"]  # this rank's expert for each block that arrives; l for an empty block


def assign_slots(
    experts: ExpertConfig, par: Solo, expert_p: Int[Array, " p"], blocks: int, block: int
) -> Slots:
    """Lay pairs out in order of their experts, each expert from a new block on, each rank's from a new part
    on, with ``blocks`` blocks of ``block`` slots in a part."""
    num_pairs, num_experts, num_ranks = len(expert_p), experts.num_experts, par.parts("experts e")
    me, num_slots = par.index("experts e"), blocks * block
    counts_e = (expert_p[:, None] == jnp.arange(num_experts)[None]).sum(0, dtype=jnp.int32)
    counts_ge = par.move(counts_e[None], "ffn b e -> counts b e")
    blocks_ggl = -(-counts_ge.reshape(num_ranks, num_ranks, -1) // block)

    # This rank's counts again, but known only when the ranks have met: two collectives never race.
    counts_e, blocks_gl = counts_ge[me], blocks_ggl[me]
    start_gl = (
        block * (jnp.cumsum(blocks_gl, axis=-1) - blocks_gl) + num_slots * jnp.arange(num_ranks)[:, None]
    )
    shift_e = start_gl.reshape(num_experts) - (jnp.cumsum(counts_e) - counts_e)
    order_p = jnp.argsort(expert_p, stable=True)
    line_p = jnp.zeros_like(order_p).at[order_p].set(jnp.arange(num_pairs))
    slot_p = shift_e[jnp.minimum(expert_p, num_experts - 1)] + line_p
    slot_p = jnp.where(expert_p < num_experts, slot_p, num_ranks * num_slots)
    empty_c = jnp.full_like(slot_p, num_pairs, shape=num_ranks * num_slots)
    pair_c = empty_c.at[slot_p].set(jnp.arange(num_pairs), mode="drop")

    ends_gl = jnp.cumsum(blocks_ggl[:, me], axis=-1)
    owner_gn = (jnp.arange(blocks)[None, :, None] >= ends_gl[:, None]).sum(-1, dtype=jnp.int32)
    return Slots(slot_p, pair_c, block * blocks_ggl.sum(-1, dtype=jnp.int32), owner_gn.reshape(-1))


def dispatch(
    experts: ExpertConfig, par: Solo, x: Float[Array, "b s d"], chosen: Int[Array, "b s k"]
) -> tuple[Float[Array, "gn block d"], Slots]:
    """Steps 2 and 3: copy tokens into slots and send each part to its rank, where its blocks arrive."""
    (b, s, d), k, num_ranks = x.shape, experts.top_k, par.parts("experts e")
    blocks, block = experts.slots(b * s, b * par.parts("stream s") // par.parts("ffn s"), num_ranks)
    slots = assign_slots(experts, par, chosen.reshape(-1), blocks, block)
    rows = take(*vary_alike((x.reshape(b * s, d), slots.pair_c // k, slots.slot_p.reshape(b * s, k))))
    rows = rows.reshape(1, num_ranks, blocks * block, d)
    rows = exchange(par, rows, slots.rows_gg, "ffn b e c d -> experts b e c d")
    return rows.reshape(num_ranks * blocks, block, d), slots


def combine(
    par: Solo, rows: Float[Array, "gn block d"], weights: Float[Array, "b s k"], slots: Slots
) -> Float[Array, "b s d"]:
    """Steps 5 and 6: send the rows back, and add up each token's k rows by weight, in float32."""
    (b, s, k), d, num_ranks = weights.shape, rows.shape[-1], len(slots.rows_gg)
    rows = rows.reshape(num_ranks, 1, -1, d)
    rows = exchange(par, rows, slots.rows_gg.T, "experts b e c d +m -> ffn b e c d +m")
    rows = take(*vary_alike((rows.reshape(-1, d), slots.slot_p, slots.pair_c[:, None])))
    rows_bskd = rows.reshape(b, s, k, d).astype(jnp.float32)
    return jnp.einsum("bsk,bskd->bsd", weights, rows_bskd)


def exchange(par: Solo, rows: Array, rows_gg: Int[Array, "g g"], arrow: str) -> Array:
    """Everyone's part for a rank goes to that rank: all slots, or the ``rows_gg`` rows of rank i for rank j
    alone."""
    return par.ragged(rows, rows_gg, arrow) if par.plan.dispatch == "ragged" else par.move(rows, arrow)


@jax.custom_vjp
def take(x: Float[Array, "n ..."], index: Int[Array, " t"], back: Int[Array, "n k"]) -> Float[Array, "t ..."]:
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


# ------------------------------------------------------------------------------------------ grouped products

Weights = tuple[Float[Array, "l d m"], Float[Array, "l d m"], Float[Array, "l m d"]]


def multiply_blocks(
    rows: Float[Array, "gn block d"], weights: Weights, owner_n: Int[Array, " gn"]
) -> Float[Array, "gn block d"]:
    """Step 4: every block of rows through the expert that owns it.

    Blocks without an owner give zeros and cost nothing: the loop runs over the live ones, in order of their
    experts. The derivative does the same twice, so k of E experts cost k/E of all of them, forward and
    backward, and a block's padding.
    """
    order_n = jnp.argsort(owner_n, stable=True)
    num_live = (owner_n < weights[0].shape[0]).sum(dtype=jnp.int32)
    return swiglu(lambda x, w: _grouped(*vary_alike((x, w, owner_n, order_n, num_live))), rows, *weights)


def ragged_dot(
    rows: Float[Array, "gn block d"], weights: Weights, owner_n: Int[Array, " gn"]
) -> Float[Array, "gn block d"]:
    """The same by `jax.lax.ragged_dot`, which wants the rows of an expert side by side. On CPUs it multiplies
    all rows by all experts, and masks."""
    order_n = jnp.argsort(owner_n, stable=True)
    rows, owner_n, order_n, back_n = vary_alike((rows, owner_n, order_n, jnp.argsort(order_n)))
    counts_l = (owner_n[:, None] == jnp.arange(len(weights[0]))[None]).sum(0, dtype=jnp.int32) * rows.shape[1]
    multiply = lambda x, w: lax.ragged_dot(*vary_alike((x, w, counts_l)))
    y = swiglu(multiply, take(rows, order_n, back_n[:, None]).reshape(-1, rows.shape[2]), *weights)
    return take(y.reshape(rows.shape), back_n, order_n[:, None])


def swiglu(multiply, rows: Array, gate: Array, up: Array, down: Array) -> Array:
    """The feed-forward of `model.FeedForward`, for rows of many experts."""
    return multiply(jax.nn.silu(multiply(rows, gate)) * multiply(rows, up), down)


@jax.custom_vjp
def _grouped(rows, w, owner_n, order_n, num_live):
    def multiply(i, out):
        n = order_n[i]
        y = jnp.matmul(rows[n], w[owner_n[n]], preferred_element_type=jnp.float32)
        return lax.dynamic_update_index_in_dim(out, y.astype(rows.dtype), n, 0)

    out = vary_alike(jnp.zeros((*rows.shape[:2], w.shape[2]), rows.dtype), like=rows)
    return lax.fori_loop(0, num_live, multiply, out)


def _grouped_forward(rows, w, *where):
    return _grouped(rows, w, *where), (rows, w, where)


def _grouped_backward(saved, grad):
    rows, w, (owner_n, order_n, num_live) = saved
    drows = _grouped(grad, w.swapaxes(1, 2), owner_n, order_n, num_live)

    def add(i, dw):
        n = order_n[i]
        more = jnp.matmul(rows[n].T, grad[n], preferred_element_type=jnp.float32)
        return lax.dynamic_update_index_in_dim(dw, dw[owner_n[n]] + more, owner_n[n], 0)

    dw = vary_alike(jnp.zeros(w.shape, jnp.float32), like=rows)
    return drows, lax.fori_loop(0, num_live, add, dw).astype(w.dtype), None, None, None


_grouped.defvjp(_grouped_forward, _grouped_backward)


# --------------------------------------------------------------------------------------------------- watching


def summary(experts: ExpertConfig, metrics: dict, num_ranks: int = 1) -> dict[str, float]:
    """A step's metrics in four numbers: the share of choices dropped, the mean entropy of a router in nats,
    and how much more than the mean the busiest expert and the busiest of ``num_ranks`` have, in the worst
    layer."""
    load, dropped, entropy = (np.asarray(metrics[key]) for key in ("load", "dropped", "router_entropy"))
    total, per_rank = float(load.sum()), load.reshape(load.shape[0], num_ranks, -1).sum(-1)
    busiest = lambda x: float((x.max(1) / x.mean(1)).max())
    return {
        "drop_fraction": float(dropped.sum()) / total,
        "router_entropy": float(entropy.sum()) / total * experts.top_k,
        "expert_imbalance": busiest(load),
        "rank_imbalance": busiest(per_rank),
    }
