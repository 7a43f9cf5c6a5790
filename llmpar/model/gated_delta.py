"""The gated delta rule: a mixer whose past is a state of fixed size, instead of keys
and values.

Each value head has a state S, a matrix of h rows and w columns. It is a memory: ``k S``
is the value that it has for a key k. A token with key k, value v, query q, decay α and
rate β forgets a part of all, then corrects the value of its key (Yang, Kautz and
Hatamizadeh 2024, Gated Delta Networks, eq. 10; kᵀ is k transposed):

    S = α S + kᵀ β (v - k α S)        out = q S

Keys have length 1, queries 1/√h. Before that, each of their numbers, and of the
values', is SiLU of a weighted sum of its own last few positions (`tokens_of`). Of
documents that share a row each begins with a state of zeros, and with nothing before
its first token.

Tokens are taken in chunks of `CHUNK` positions (`by_chunks`). Inside a chunk everything
is a matmul (Yang et al. 2024, Parallelizing Linear Transformers with the Delta Rule,
section 3.2); a loop over chunks hands the state on. Matrices of positions times
positions are in memory for `CHUNKS` chunks, and are computed again for gradients.

All of it is linear in the state that enters. So where sp cuts the sequence, each rank
runs its own chunks from a state of zeros, together with the matrix by which a state
that enters would leave; then states are handed on from rank to rank, and their results
added (`handed_on`). And a row that is continued, as a cache does, needs no more of its
past than the state, and the last inputs of the convolution (`resume`).

Dims: b batch, s positions, c chunks, i and j positions of a chunk, k heads of keys, r
value heads for each of them, n value heads, h key width, w value width, t taps of the
convolution, z numbers of a position.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from llmpar.parallel.collectives import hop, vary_alike
from llmpar.parallel.modes import Solo
from llmpar.plan.sequence_order import CHUNK, CHUNKS

_POSITIONS = "attention s"
"""The dim that ranks of sp cut."""


def from_rank_before(par: Solo, x: Array, arrow: str) -> Array:
    """Return what the rank with the positions before sends; zeros on the first."""
    arrived = hop(x, par.axes(_POSITIONS), par.plan.hop, arrow)
    return jnp.where(par.index(_POSITIONS) == 0, jnp.zeros_like(x), arrived)


def mix(
    par: Solo,
    q: Float[Array, "b s k h"],
    k: Float[Array, "b s k h"],
    v: Float[Array, "b s n w"],
    rate_logit: Float[Array, "b s n"],
    forget: Float[Array, "b s n"],
    q_conv: Float[Array, "k h 1 t"],
    k_conv: Float[Array, "k h 1 t"],
    v_conv: Float[Array, "n w 1 t"],
    a_log: Float[Array, " n"],
    dt_bias: Float[Array, " n"],
    positions: Int[Array, "b _"],
    segments: Int[Array, "b _"],
) -> Float[Array, "b s n w"]:
    """Return what each head reads from its state, with β = sigmoid(rate_logit), and
    α = exp(-exp(a_log) · softplus(forget + dt_bias)). Its arrays are float32; its matmuls have JAX's default
    precision, but for the inverse in `of_chunks`.

    Positions and segments are those of whole rows. A row whose segments fall, or whose positions do not rise
    within a segment, gives NaN."""
    taps, num, dtype = q_conv.shape[-1], q.shape[1], v.dtype
    padded = jnp.concatenate([jnp.repeat(segments[:, :1] - 1, taps, 1), segments], 1)
    documents = lax.dynamic_slice_in_dim(padded, par.index(_POSITIONS) * num, num + taps, 1)
    x = numbers_of(q, k, v)
    before = jnp.repeat(jnp.zeros_like(x[:, :1]), taps - 1, 1)
    if par.parts(_POSITIONS) > 1:  # in one message
        before = from_rank_before(par, x[:, num - taps + 1 :], "halo b s -> the next rank")
    x = jnp.concatenate([before, x], 1)
    weights = q_conv, k_conv, v_conv, a_log, dt_bias
    tokens = tokens_of(x, (q, k, v, rate_logit, forget), weights, documents)
    out, _ = by_chunks(par, tokens, documents[:, taps - 1 :])
    next_document, next_position = jnp.diff(segments), jnp.diff(positions)
    in_order = (next_document > 0) | (next_document == 0) & (next_position > 0)
    return jnp.where(in_order.all(1)[:, None, None, None], out, jnp.nan).astype(dtype)


def resume(
    par: Solo,
    before: Float[Array, "b _ z"],
    state: Float[Array, "b n h w"],
    is_token: Bool[Array, "b s"],
    inputs: Sequence[Array],
    weights: Sequence[Array],
) -> tuple[Float[Array, "b s n w"], tuple[Float[Array, "b _ z"], Float[Array, "b n h w"]]]:
    """Run `mix` on from what each row kept of earlier tokens: the convolutions' last t - 1 inputs, and the
    state. Return its result, and what the row keeps now. A row's tokens are its first positions; what fills
    the others changes nothing that is kept. ``inputs`` and ``weights`` are those of `mix`, five each."""
    x = jnp.concatenate([before, numbers_of(*inputs[:3])], 1)
    last = is_token.sum(1)[:, None] + jnp.arange(before.shape[1])[None]
    kept = jnp.take_along_axis(x, last[..., None], 1)
    documents = jnp.zeros((len(x), x.shape[1] + 1), int)
    *qkv, log_decay, beta = tokens_of(x, inputs, weights, documents)
    rates = (jnp.where(is_token[..., None], rate, 0) for rate in (log_decay, beta))
    out, state = by_chunks(par, (*qkv, *rates), documents[:, before.shape[1] :], state)
    return out.astype(inputs[2].dtype), (kept, state)


def numbers_of(*inputs: Float[Array, "b s _ _"]) -> Float[Array, "b s z"]:
    """Return all numbers of each position."""
    return jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in inputs], -1)


def tokens_of(
    x: Float[Array, "b _ z"],
    inputs: Sequence[Array],
    weights: Sequence[Array],
    documents: Int[Array, "b _"],
) -> tuple[Array, ...]:
    """Return queries, keys, values, log α and β of each position, in float32. The first three are SiLU of
    each number's weighted sum over its last t positions in its document, itself included. ``x`` has these
    numbers, and of t - 1 positions more before the others; ``documents`` has t more."""
    q, k, v, rate_logit, forget = inputs
    *convs, a_log, dt_bias = weights
    taps, sizes = convs[0].shape[-1], [y[0, 0].size for y in (q, k, v)]
    y = jax.checkpoint(weighted)(
        x, jnp.concatenate([w.reshape(-1, taps) for w in convs]), documents
    )
    parts = jnp.split(y, [*itertools.accumulate(sizes)][:-1], -1)
    q, k, v = (y.reshape(like.shape) for y, like in zip(parts, (q, k, v), strict=True))
    # with an epsilon, as in `transformers`
    q, k = (y * lax.rsqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    forget, a_log, dt_bias, rate_logit = (
        y.astype(jnp.float32) for y in (forget, a_log, dt_bias, rate_logit)
    )
    log_decay = -jnp.exp(a_log)[None, None] * jax.nn.softplus(forget + dt_bias[None, None])
    # exp(-104) is 0: below it nothing changes, but sums of a chunk's would lose digits
    log_decay = jnp.maximum(log_decay, -104.0)
    return q * q.shape[-1] ** -0.5, k, v, log_decay, jax.nn.sigmoid(rate_logit)


def weighted(
    x: Float[Array, "b _ z"], weights: Float[Array, "z t"], documents: Int[Array, "b _"]
) -> Float[Array, "b s z"]:
    """Return the sums of `tokens_of`, behind SiLU. What it makes for each tap is computed again for
    gradients."""
    taps, total = weights.shape[-1], jnp.zeros((), jnp.float32)
    num = documents.shape[1] - taps
    x, weights = x.astype(jnp.float32), weights.astype(jnp.float32)
    for tap in range(taps):
        is_own = documents[:, tap + 1 : tap + 1 + num] == documents[:, taps:]
        own = x[:, tap : tap + num] * weights[None, None, :, tap]
        total += jnp.where(is_own[..., None], own, 0)
    return jax.nn.silu(total)


def by_chunks(
    par: Solo,
    tokens: tuple[Array, ...],
    documents: Int[Array, "b _"],
    entering: Float[Array, "b n h w"] | None = None,
) -> tuple[Float[Array, "b s n w"], Float[Array, "b n h _"]]:
    """Run the rule on queries, keys, values, log α and β of each position, from the state that enters, zeros
    if none is given; return what is read, and the state behind the last. ``documents`` has one position
    more, before the others."""
    (b, num, heads, height), width = tokens[0].shape, tokens[2].shape[-1]
    i = min(CHUNK, num)
    c = min(CHUNKS, -(-num // i))
    # What fills the last group of chunks writes nothing, and forgets nothing.
    fill = [(0, 0), (0, -num % (c * i))]
    # b (_ c i) … -> _ c b i …
    cut = lambda x: jnp.moveaxis(x.reshape(b, -1, c, i, *x.shape[2:]), 0, 2)
    q, k, *of_values = (cut(jnp.pad(x, fill + [(0, 0)] * (x.ndim - 2))) for x in tokens)
    v, log_decay, beta = (x.reshape(*x.shape[:4], heads, -1, *x.shape[5:]) for x in of_values)
    documents = jnp.pad(documents, fill, mode="edge")
    of, of_last = cut(documents[:, 1:]), cut(documents[:, :-1])[..., 0]
    shape = b, *v.shape[4:6], height, width
    state = jnp.zeros(shape, jnp.float32) if entering is None else entering.reshape(shape)
    is_cut = par.parts(_POSITIONS) > 1
    if is_cut:  # further columns, which become the matrix that a state is multiplied by
        eye = jnp.eye(height)
        state = jnp.concatenate([state, jnp.broadcast_to(eye, (*state.shape[:-1], height))], -1)

    def group(state, x):
        loop = of_chunks(*x)
        wider = [(0, 0)] * 5 + [(0, state.shape[-1] - width)]
        return lax.scan(next_chunk, state, loop | {"new": jnp.pad(loop["new"], wider)})

    state, groups = vary_alike((state, (q, k, v, jnp.cumsum(log_decay, 3), beta, of, of_last)))
    state, out = lax.scan(jax.checkpoint(group), state, groups)
    out = out.reshape(-1, *out.shape[2:])
    if is_cut:
        out = handed_on(par, state, out, width)
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # c b k r i w -> b c i k r w
    out = out.reshape(b, -1, heads * v.shape[5], width)[:, :num]
    return out, state.reshape(b, -1, *state.shape[3:])


def of_chunks(q, k, v, sums, beta, of, of_last) -> dict[str, Array]:
    """Return for each chunk what does not depend on the state that enters it.

    With S the state that enters, and G the ``sums`` of log α from the chunk's begin, what tokens add under
    their keys is N: ``(1 + A) N = β v - β exp(G) k S``, with A_ij = β_i k_i k_jᵀ exp(G_i - G_j) below the
    diagonal.

    Arguments: q and k are c b i k h; v is c b i k r w; sums and beta are c b i k r; of is each position's
    document, c b i, and of_last that of the position before the chunk, c b.

    Results: ``new`` is N without its part with S, c b k r i w; ``reads`` is what S is multiplied by in that
    part, c b k r i h; ``inside`` is by how much tokens read each other's N, c b k r i j; ``q`` reads S and
    ``k`` writes into it, c b i k r h; ``kept`` is the share of S that stays, c b k r."""
    same = of[:, :, :, None] == of[:, :, None]  # c b i j
    seen = jnp.tril(same)[:, :, None, None]
    heads_first = lambda x: jnp.moveaxis(x, 2, 4)  # c b i k r -> c b k r i
    g, rates = heads_first(sums), heads_first(beta)
    between = jnp.exp(jnp.where(seen, g[..., None] - g[..., None, :], -jnp.inf))
    product = lambda x: jnp.einsum("cbikh,cbjkh->cbkij", x, k)[:, :, :, None] * between
    corrects = inverse_of(rates[..., None] * jnp.tril(product(k), -1))
    # A token reads the entering state only if it is of the document that the chunk before ended with.
    enters = jnp.where((of == of_last[:, :, None])[..., None, None], jnp.exp(sums), 0)
    left = jnp.where((of == of[:, :, -1:])[..., None, None], sums[:, :, -1:] - sums, -jnp.inf)
    scaled = lambda x, by: by[..., None] * x[:, :, :, :, None]  # c b i k r h
    return {
        "new": jnp.einsum("cbkrij,cbjkrw->cbkriw", corrects, beta[..., None] * v),
        "reads": jnp.einsum("cbkrij,cbjkrh->cbkrih", corrects, scaled(k, beta * enters)),
        "inside": product(q),
        "q": scaled(q, enters),
        "k": scaled(k, jnp.exp(left)),
        "kept": enters[:, :, -1],
    }


def next_chunk(state: Float[Array, "b k r h w"], x: dict[str, Array]) -> tuple[Array, Array]:
    """Return the state behind a chunk, and what its tokens read."""
    new = x["new"] - jnp.einsum("bkrih,bkrhw->bkriw", x["reads"], state)
    read = jnp.einsum("bikrh,bkrhw->bkriw", x["q"], state)
    written = jnp.einsum("bikrh,bkriw->bkrhw", x["k"], new)
    out = read + jnp.einsum("bkrij,bkrjw->bkriw", x["inside"], new)
    return x["kept"][..., None, None] * state + written, out


def inverse_of(below: Float[Array, "*dims i i"]) -> Float[Array, "*dims i i"]:
    """Return the inverse of 1 + ``below``, which is strictly lower triangular. Blocks on the diagonal
    grow from 1 to all: of two neighbours X and Z with Y below them the inverse has -Z⁻¹ Y X⁻¹."""
    n = below.shape[-1]
    inverse, i = jnp.broadcast_to(jnp.eye(n, dtype=below.dtype), below.shape), jnp.arange(n)
    for level in range((n - 1).bit_length()):
        pair, odd = i >> level + 1, i >> level & 1
        is_between = (pair[:, None] == pair[None]) & (odd[:, None] > odd[None])
        joining = jnp.where(jnp.broadcast_to(is_between, below.shape), below, 0)
        inverse -= jnp.einsum(
            "...ij,...jk,...kl->...il", inverse, joining, inverse, precision="highest"
        )
    return inverse


def handed_on(par: Solo, state: Any, out: Array, width: int) -> Float[Array, "c b k r i w"]:
    """Return what tokens read with the state that enters this rank: that of the rank before, behind all of
    its own tokens. There are as many hops as ranks, less one; after i hops the states of the first i + 1
    ranks are right."""
    own, passes = state[..., :width], state[..., width:]
    entering = jnp.zeros_like(own)
    for _ in range(par.parts(_POSITIONS) - 1):
        entering = from_rank_before(par, own + passes @ entering, "state b -> the next rank")
    return out[..., :width] + out[..., width:] @ entering[None]
