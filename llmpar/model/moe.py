"""Route tokens to experts, on one device or more: choose, send, multiply, send back,
add up.

A layer of experts takes six steps:

1. The router scores every token against every expert, and chooses the token's top-k.
2. All ranks that have experts learn these choices. Each device puts its tokens into a buffer with the same
   number of slots for each of these ranks: a token once for every rank that has one of its experts.
3. One all-to-all, the arrow ``b/ep e c d -> b e/ep c d``: block e of every buffer goes to rank e.
4. Each rank multiplies what arrived by the weights of its experts (`llmpar.kernels.grouped`), and adds up
   each row's results, weighed by the router.
5. The same all-to-all back.
6. A token adds up the results of its ranks. Autodiff turns each all-to-all around: two forward, two backward.

XLA's shapes are static, so the buffer has a slot for every token that may need one:
without a capacity, which drops tokens, every rank's part has one for every token
(`ExpertConfig.slots`). Empty slots of this buffer are left out in step 4, and not sent
with ``dispatch="ragged"`` (`jax.lax.ragged_all_to_all`, which CPUs lack).

Where tp cuts experts along m, all of its ranks multiply the same rows. Either all of
them send the same tokens; or each sends its part (`Plan.tp_dispatch`), and ``c/tp ->
c`` gathers what arrived: more bytes over tp for fewer over ep.

With `Plan.ep_node` steps 2 and 3 run twice, and so do 5 and 6 (`exchanges`): a token
goes once to each node that has one of its experts, and inside it once to each rank that
has one.

A rank with a popular expert works while others wait. With `Plan.expert_copies` the most
popular ones are copied to all ranks, ``c d m +ep -> c d m``, and their tokens are not
sent (`copy_hot`; He et al. 2022, FasterMoE: shadowing).

Dims: b batch, s positions, d width, e experts, k the chosen ones of a token, m an
expert's width. In steps 2 to 6 also t tokens, p pairs of a token and one of its
choices, g ranks that have experts, l the experts of one of them, c slots of its part of
the buffer. (Shazeer et al. 2017; capacity: Lepikhin et al. 2020, Fedus et al. 2021; a
token to a rank once: DeepSeek-V3 2024, section 3.2.2, to a node.)
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from llmpar.kernels import grouped
from llmpar.parallel.collectives import vary_alike
from llmpar.parallel.modes import Solo
from llmpar.plan.model_config import LLAMA, ExpertConfig, Variant

# --------------------------------------------------------------------------------------------------- choosing


def affinities(
    experts: ExpertConfig, logits: Float[Array, "*tokens e"]
) -> Float[Array, "*tokens e"]:
    """Return each token's affinity to each expert, float32."""
    return jax.nn.softmax(logits, axis=-1) if experts.score == "softmax" else jax.nn.sigmoid(logits)


def choose_experts(
    experts: ExpertConfig, scores: Float[Array, "*tokens e"], bias: Float[Array, " e"] | None = None
) -> tuple[Float[Array, "*tokens k"], Int[Array, "*tokens k"]]:
    """Choose the k experts of each token, from affinities: (weights, chosen).

    Mixtral (Jiang et al. 2024) takes a softmax over the k largest logits: a softmax over all, renormalised.
    DeepSeek-V3 (2024, section 2.1.2) chooses by affinity plus bias within the best groups of experts, and
    weighs by affinity alone.
    """
    bias_on_tokens = (
        0 if bias is None else jnp.expand_dims(bias.astype(scores.dtype), range(scores.ndim - 1))
    )
    biased = lax.stop_gradient(scores + bias_on_tokens)
    if experts.num_groups > 1:
        by_group = biased.reshape(*biased.shape[:-1], experts.num_groups, -1)
        best = 1 if experts.group_score == "best" else min(2, by_group.shape[-1])
        group_scores = lax.top_k(by_group, best)[0].sum(-1)
        chosen_groups = lax.top_k(group_scores, experts.top_groups)[1]
        is_open = jax.nn.one_hot(chosen_groups, experts.num_groups, dtype=bool).any(-2)
        biased = jnp.where(is_open[..., None], by_group, -jnp.inf).reshape(biased.shape)
    chosen = lax.top_k(biased, experts.top_k)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if experts.renormalise:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * experts.scale, chosen


def route(
    experts: ExpertConfig,
    par: Solo,
    logits: Float[Array, "b s e"],
    bias: Float[Array, " e"] | None = None,
) -> tuple[Float[Array, "b s k"], Int[Array, "b s k"], dict[str, Array]]:
    """Return weights, chosen experts (`experts.num_experts` where a token is dropped), and auxiliary outputs.

    These are ``loss``, ``b s``, float32, the token's part of

        balance loss   E/k · sum over e of f_e P_e for each row, f_e the share of the row's tokens that chose
                       e and P_e their mean affinity (DeepSeek-V3 2024, section 2.1.2, sequence-wise: no
                       device needs another's rows)
        z loss         the square of the log of the sum of exponentials (Zoph et al. 2022, eq. 5)

    and ``tally``: tokens per expert, then how many choices were dropped, then the sum of the tokens' router
    entropies in nats, ``E + 2`` numbers of this device.
    """
    scores = affinities(experts, logits)
    weights, chosen = choose_experts(experts, scores, bias)
    hot = jax.nn.one_hot(chosen, experts.num_experts, dtype=jnp.float32).sum(-2)
    share = scores / scores.sum(-1, keepdims=True)
    loss = experts.z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    if experts.aux_loss:
        counts_be = par.move(hot.sum(1), "stream b e +s -> stream b e")
        # E f_e / k: sums to E
        row = counts_be * experts.num_experts / counts_be.sum(-1, keepdims=True)
        loss = loss + experts.aux_loss * (share * row[:, None]).sum(-1)
    if experts.capacity_factor is not None:
        before = jnp.cumsum(hot, axis=1) - hot  # of each expert's tokens, those that came first
        place = jnp.take_along_axis(before, chosen, axis=-1)
        chosen = jnp.where(place < experts.capacity(logits.shape[1]), chosen, experts.num_experts)
    dropped = (chosen == experts.num_experts).sum(dtype=jnp.float32)
    entropy = -(share * jnp.log(share + 1e-20)).sum()
    tally = jnp.concatenate([hot.sum((0, 1)), jnp.stack([dropped, entropy])])
    return weights, chosen, {"loss": loss, "tally": lax.stop_gradient(tally)}


# ------------------------------------------------------------------------ dispatching, multiplying, combining

DIMS_OF_MATRICES = ("c d m", "c d m", "c m d", "c m", "c m", "c d")
"""The dims of a copied expert's `grouped.Weights`; c counts copies."""


def visit_experts(
    experts: ExpertConfig,
    par: Solo,
    x: Float[Array, "b s d"],
    weights: Float[Array, "b s k"],
    chosen: Int[Array, "b s k"],
    *matrices: Array,
    variant: Variant = LLAMA,
) -> Float[Array, "b s d"]:
    """Send every token to its experts and back, where each rank has a part of them: steps 2 to 6 above.

    ``matrices`` are `grouped.Weights` of this device's experts. Experts whose width is cut give a term of a
    sum, in which each rank of tp has a part of the last bias.
    """
    (b, s, d), k, num_ranks = x.shape, experts.top_k, par.parts("experts e")
    # An expert's capacity holds for each piece of a row that the router saw: with tp_sequence, tp to a row.
    num_tokens, num_pieces = b * s, b * par.parts("stream s") // par.parts("tokens s")
    split = par.plan.pipeline is not None and par.plan.pipeline.split_backward
    eight_bits = par.plan.matmul_dtype == "float8"
    arrange = functools.partial(grouped.arrange, experts, split=split, eight_bits=eight_bits)
    x_td, weights_tk, chosen_tk = x.reshape(-1, d), weights.reshape(-1, k), chosen.reshape(-1, k)
    if len(matrices) > 3:
        matrices = *matrices[:-1], matrices[-1] / par.parts("experts m")
    visit = functools.partial(multiply, experts, variant)
    # ranks of tp whose tokens are gathered (`Plan.tp_dispatch`), or 1
    senders = par.parts("slots c")
    blocks = arrange(senders * num_tokens, senders * num_pieces, num_ranks)
    if num_ranks == 1:
        return visit(blocks, x_td, weights_tk, chosen_tk, matrices).reshape(x.shape)
    at_copies = None
    if num_copies := par.plan.expert_copies:
        copies, copy_tk, chosen_tk = copy_hot(experts, par, num_copies, chosen_tk, matrices)
        own = arrange(num_tokens, num_pieces, copies=num_copies)
        at_copies = visit(own, x_td, weights_tk, copy_tk, copies)
    arrived, sent = [x_td, weights_tk, chosen_tk], list[tuple[Exchange, SlotTable]]()
    for hop in exchanges(experts, par, num_tokens, num_pieces):
        *arrived, slots = dispatch_tokens(par, hop, *arrived)
        sent.append((hop, slots))
    x_td, weights_tk, chosen_tk = (par.move(z, "slots c d -> experts c d") for z in arrived)
    y_td = visit(blocks, x_td, weights_tk, chosen_tk, matrices)
    y_td = par.move(y_td, "experts c d +m -> slots c d +m")
    for hop, slots in reversed(sent):
        y_td = combine_tokens(par, hop, y_td, slots)
    return (y_td if at_copies is None else y_td + at_copies).reshape(x.shape)


def multiply(
    experts: ExpertConfig,
    variant: Variant,
    blocks: grouped.BlockSizes,
    x: Float[Array, "r d"],
    weights: Float[Array, "r k"],
    chosen: Int[Array, "r k"],
    matrices: grouped.Weights,
) -> Float[Array, "r d"]:
    """Run step 4 for these rows and experts, which are counted from 0: any number past the last is none."""
    if experts.weighs == "input":  # of the one expert that a row has
        x, weights, _ = vary_alike((x, weights, matrices))
        x, weights = x * weights.astype(x.dtype), jnp.ones_like(weights)
    slot_map = grouped.lay_out(blocks, chosen, len(matrices[0]))
    return grouped.feed_forward(blocks, x, weights, matrices, slot_map, variant)


def copy_hot(
    experts: ExpertConfig,
    par: Solo,
    num_copies: int,
    chosen: Int[Array, "t k"],
    matrices: grouped.Weights,
) -> tuple[grouped.Weights, Int[Array, "t k"], Int[Array, "t k"]]:
    """Copy to all ranks of experts the weights of those that most of their tokens chose. Returns them, the
    choices of a copy (``num_copies``: of none), and the others (the number of experts for a copied one).

    A rank that has a copied expert gives it, and others zeros, to a sum over ep; autodiff sums its gradient
    over ep, and gives it to the rank that has the expert."""
    counts = grouped.count(chosen, experts.num_experts)
    hot = lax.top_k(par.move(counts, "experts c +e -> copies c"), num_copies)[1]
    local = hot - par.index("experts e") * len(matrices[0])
    copies = list[Array]()
    for matrix, dims in zip(matrices, DIMS_OF_MATRICES, strict=False):
        is_own = (local >= 0) & (local < len(matrix))
        own = grouped.take_rows(matrix, jnp.where(is_own, local, len(matrix)))
        copies.append(par.move(own, f"experts {dims} +e -> copies {dims}"))
    is_copy = chosen[..., None] == hot[None, None]
    copy = jnp.where(is_copy.any(-1), is_copy.argmax(-1), num_copies)
    return tuple(copies), copy, jnp.where(copy < num_copies, experts.num_experts, chosen)


class Exchange(NamedTuple):
    """One exchange of tokens between the ranks of ep, or some of them.

    Attributes:
        ranks: the layout whose dim these ranks cut.
        routing: the arrow by which each of them learns the choices of all.
        tokens: the arrow of the tokens.
        num_experts, num_slots: of all of these ranks; for each of them.
    """

    ranks: str
    routing: str
    tokens: str
    num_experts: int
    num_slots: int

    @property
    def back(self) -> str:
        """The arrow of the results."""
        before, after = self.tokens.split(" -> ")
        return f"{after} +m -> {before} +m"


def exchanges(experts: ExpertConfig, par: Solo, num_tokens: int, num_pieces: int) -> list[Exchange]:
    """Return the exchanges by which so many tokens of each rank go to their experts: one; or one to nodes and
    one inside them."""
    num_ranks, near = par.parts("experts e"), par.plan.mesh.near
    slots = functools.partial(experts.slots, num_tokens, num_pieces)
    if near == 1:
        routing, tokens = "tokens b s e -> routing b s e", "tokens b e c d -> slots b e c d"
        return [Exchange("experts e", routing, tokens, experts.num_experts, slots(num_ranks))]
    nodes, routing = num_ranks // near, "tokens u c k -> nodes u c k"
    to_node = Exchange(
        "nodes e", routing, "tokens u e c d -> nodes u e c d", experts.num_experts, slots(nodes)
    )
    of_node, routing = experts.num_experts // nodes, "nodes n c k -> slots n c k"
    from_all = nodes * slots(num_ranks)
    return [
        to_node,
        Exchange("nodes n", routing, "nodes n e c d -> slots n e c d", of_node, from_all),
    ]


class SlotTable(NamedTuple):
    """Which token travels in which slot of the buffer, in which every rank has a part."""

    # of each choice, counted through all parts; past the end where none is needed
    slot_tk: Int[Array, "t k"]
    # the choice in each slot, all parts one after the other; t·k in an empty one
    choice_c: Int[Array, " gc"]
    sent_g: Int[Array, " g"]  # how many tokens this rank sends to each rank, and receives from it
    received_g: Int[Array, " g"]


def dispatch_tokens(
    par: Solo,
    hop: Exchange,
    x: Float[Array, "t d"],
    weights: Float[Array, "t k"],
    chosen: Int[Array, "t k"],
) -> tuple[Float[Array, "gc d"], Float[Array, "gc k"], Int[Array, "gc k"], SlotTable]:
    """Run steps 2 and 3: all ranks learn all choices, and each token goes once to every rank that has one of
    its experts. Returns what arrives: rows, their weights, their experts counted among this rank's own (the
    number of those stands for an expert of another rank), and the slots to send them back."""
    (t, k), num_ranks, own_rank = chosen.shape, par.parts(hop.ranks), par.index(hop.ranks)
    num_local, num_slots = hop.num_experts // num_ranks, hop.num_slots
    from_all = [par.move(z[None], hop.routing) for z in (weights, chosen)]
    # Neither is used before both have arrived: so these collectives come before those of step 3.
    weights_gtk, chosen_gtk = lax.optimization_barrier(tuple(from_all))
    rank_gtk = chosen_gtk // num_local  # past the last for a choice that was dropped
    is_repeat_gtk = (jnp.tril(rank_gtk[..., None] == rank_gtk[..., None, :], -1)).any(-1)
    rank_gtk = jnp.where(is_repeat_gtk, num_ranks, rank_gtk)

    size = num_ranks * num_slots

    def arrange(rank_p):
        """Return the slot of each pair, those of a rank side by side, and the pair in each slot."""
        slot_p = rank_p * num_slots + grouped.number(rank_p, num_ranks)
        slot_p = jnp.where(rank_p < num_ranks, slot_p, size)
        return slot_p, grouped.item_in(slot_p, size)

    slot_p, choice_c = arrange(rank_gtk[own_rank].reshape(-1))
    arrives_gtk, number_gtk = (
        rank_gtk == own_rank,
        lax.broadcasted_iota(jnp.int32, rank_gtk.shape, 0),
    )
    slot_q, arrived_c = arrange(jnp.where(arrives_gtk, number_gtk, num_ranks).reshape(-1))
    sent_g = grouped.count(rank_gtk[own_rank], num_ranks)
    received_g = arrives_gtk.sum((1, 2), dtype=jnp.int32)
    slots = SlotTable(slot_p.reshape(t, k), choice_c, sent_g, received_g)

    rows = take_with_inverse(*vary_alike((x, choice_c // k, slots.slot_tk))).reshape(
        1, num_ranks, num_slots, -1
    )
    rows = par.ragged(rows, sent_g, received_g, hop.tokens)
    weights = take_with_inverse(
        *vary_alike((weights_gtk.reshape(-1, k), arrived_c // k, slot_q.reshape(-1, k)))
    )
    expert = (
        chosen_gtk.reshape(-1, k).at[arrived_c // k].get(mode="fill", fill_value=hop.num_experts)
    )
    expert = expert - own_rank * num_local
    expert = jnp.where((expert >= 0) & (expert < num_local), expert, num_local)
    return rows.reshape(size, -1), weights, expert, slots


def combine_tokens(
    par: Solo, hop: Exchange, rows: Float[Array, "gc d"], slots: SlotTable
) -> Float[Array, "t d"]:
    """Run steps 5 and 6: send the rows back, and add up each token's results from its ranks, in float32."""
    num_ranks, (t, k) = len(slots.sent_g), slots.slot_tk.shape
    rows = rows.reshape(num_ranks, 1, -1, rows.shape[-1])
    rows = par.ragged(rows, slots.received_g, slots.sent_g, hop.back)
    rows = rows.reshape(-1, rows.shape[-1])
    rows = take_with_inverse(
        *vary_alike((rows, slots.slot_tk.reshape(-1), slots.choice_c[:, None]))
    )
    return rows.reshape(t, k, -1).astype(jnp.float32).sum(1).astype(rows.dtype)


@jax.custom_vjp
def take_with_inverse(
    x: Float[Array, "n ..."], index: Int[Array, " t"], back: Int[Array, "n k"]
) -> Float[Array, "t ..."]:
    """Return rows ``x[index]``, zeros where an index is past the end. ``back`` has the results that each row
    of ``x`` went to (again past the end for none), so that the gradient is gathered too, and nothing is
    scattered."""
    return grouped.take_rows(x, index)


take_with_inverse.defvjp(
    lambda x, index, back: (take_with_inverse(x, index, back), back),
    lambda back, grad: (grouped.take_rows(grad, back).sum(1), None, None),
)


# -------------------------------------------------------------------------------------------------- reporting


def rank_loads(load: np.ndarray, num_ranks: int, copies: int = 0) -> np.ndarray:
    """Return the tokens of each rank, ``l g``, from those of each expert, ``l e``, where so many of the
    hottest are copied to all ranks (`Plan.expert_copies`), and each rank has its share of their tokens."""
    is_hot = np.argsort(np.argsort(-load, 1, "stable"), 1) < copies
    cold, hot = np.where(is_hot, 0, load), np.where(is_hot, load, 0)
    shared = hot.sum(1, keepdims=True) / num_ranks
    return cold.reshape(len(load), num_ranks, -1).sum(-1) + shared


def summary(
    experts: ExpertConfig, metrics: dict, num_ranks: int = 1, copies: int = 0
) -> dict[str, float]:
    """Return a step's metrics in four numbers: the share of dropped choices, a router's mean entropy in
    nats, and in the worst layer the load of the busiest expert and of the busiest of ``num_ranks`` over the
    mean (`rank_loads`)."""
    load, dropped, entropy = (
        np.asarray(metrics[key]) for key in ("load", "dropped", "router_entropy")
    )
    total, per_rank = float(load.sum()), rank_loads(load, num_ranks, copies)
    busiest = lambda x: float((x.max(1) / x.mean(1)).max())
    return {
        "drop_fraction": float(dropped.sum()) / total,
        "router_entropy": float(entropy.sum()) / total * experts.top_k,
        "expert_imbalance": busiest(load),
        "rank_imbalance": busiest(per_rank),
    }
