"""One step of a model with a cache: each row takes its next tokens, and learns which one follows.

A row is a slot for a request, at a position of its own. In one step some rows take a piece of their prompt,
others the one token that they chose last (chunked prefill: Agrawal et al. 2023, Sarathi). The cache is cut by
every axis that can: its rows by dp, fsdp and ep, its KV heads by tp, its positions by sp, every sp-th one to
a rank. A token's query goes to all ranks of sp; each looks at its own share, and two small sums per layer
join what they found (`attend_cache`; Pope et al. 2022 describe the cuts). Nothing of the cache
travels. Of layers with a recurrent state a row keeps that, and the last inputs of their convolutions; every
rank of sp has both (`_Cached.resume`). Rows know nothing of one another: a request is answered alike whatever
runs beside it, but for rounding.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt32

from llmpar.kernels.flash import KV, Q
from llmpar.model import attention, gated_delta
from llmpar.model.llama import logits_of
from llmpar.model.weights import Tree, model_graph, weights_tree
from llmpar.parallel.collectives import at, scope, vary
from llmpar.parallel.mesh import platform_of, sharding, spec, split_axes
from llmpar.parallel.modes import Manual
from llmpar.plan.layout import WHOLE
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import Plan
from llmpar.plan.serving import BEST, CHOSEN, LOGITS, Serving, serving_plan


class DecoderInput(NamedTuple):
    """What a step takes: of row i the first ``num[i]`` tokens, to positions from ``start[i]`` on."""

    tokens: Int[np.ndarray, "b c+1"]  # and what follows the last one, where that is known
    start: Int[np.ndarray, " b"]
    num: Int[np.ndarray, " b"]  # 0: the row is idle
    seed: UInt32[np.ndarray, " b"]
    top_k: Int[np.ndarray, " b"]
    top_p: Float[np.ndarray, " b"]
    temperature: Float[np.ndarray, " b"]

    @classmethod
    def idle(cls, num_rows: int, width: int = 1) -> DecoderInput:
        """Return rows of which none takes a token."""
        numbers = (np.zeros(num_rows, dtype) for dtype in "i4 i4 u4 i4 f4 f4".split())
        return cls(np.zeros((num_rows, width + 1), np.int32), *numbers)


class Decoder:
    """A model with a cache of ``num_rows`` rows of ``length`` positions, laid out on a mesh.

    ``run(params, cache, rows, echo) -> (numbers, cache)`` is the step: a pure function that writes its cache
    in place, compiled for each width of rows. Of the plan count mesh, ZeRO stage and dtype.
    """

    def __init__(
        self, config: ModelConfig, plan: Plan, mesh: Mesh, params: Tree, num_rows: int, length: int
    ):
        self.plan = plan = serving_plan(plan, config, num_rows, length, platform_of(mesh))
        place = partial(sharding, split_axes(mesh, plan.mesh))
        stored = weights_tree(config, lambda weight: plan.stored(weight.dims))
        caches = plan.caches(num_rows, length)
        cut = tuple(plan.place(cache.dims) for cache in caches)
        zeros = lambda: tuple(jnp.zeros(x.shape, x.dtype) for x in caches)
        self.empty = jax.jit(zeros, out_shardings=jax.tree.map(place, cut))
        self.cache, self.params = self.empty(), jax.device_put(params, jax.tree.map(place, stored))
        takes, gives = (
            jax.tree.map(spec, x) for x in ((stored, cut, plan.place("data b")), (WHOLE, cut))
        )
        on_mesh = partial(jax.shard_map, mesh=place(WHOLE).mesh, in_specs=takes, out_specs=gives)
        run = lambda params, cache, rows, echo: on_mesh(partial(self._forward, echo))(
            params, cache, rows
        )
        # each host brings all rows, a device takes its own
        come = jax.tree.map(place, (stored, cut, WHOLE))
        self.run = jax.jit(run, static_argnums=3, in_shardings=come, donate_argnums=1)

    def __call__(self, rows: DecoderInput, echo: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Take tokens into the cache. Gives tokens and their log-probabilities, both ``s b n``, behind the
        last token of each row, or with ``echo`` behind each: the one that follows, the target, and the
        likeliest. These are the model's own probabilities, before temperature, top k and top p."""
        numbers, self.cache = self.run(self.params, self.cache, rows, echo)
        tokens, logprobs = np.split(np.asarray(numbers), 2, -1)
        if np.isnan(logprobs := logprobs.view(np.float32))[:, rows.num > 0].any():
            raise ValueError("the weights hold NaN, or overflow; load others, or use float32")
        return tokens, logprobs

    def _forward(self, echo: bool, params: Tree, cache, rows: DecoderInput):
        """Run one step on one device."""
        tokens, targets = rows.tokens[:, :-1], rows.tokens[:, 1:]
        offset = tokens * 0 + jnp.arange(tokens.shape[1])[None]
        par = _Cached(self.plan, cache, offset < rows.num[:, None])
        batch = {
            "tokens": tokens,
            "positions": rows.start[:, None] + offset,
            "segments": tokens * 0,
        }
        x, head, _ = nnx.merge(model_graph(self.plan.config), params).hidden_and_head(batch, par)
        offsets = offset if echo else jnp.maximum(rows.num - 1, 0)[:, None]
        x = par.move(jnp.take_along_axis(x, offsets[..., None], 1), "stream b s d -> vocab b s d")
        known = jnp.take_along_axis(targets, offsets, 1), offsets + rows.start[:, None] + 1

        def follow(each):
            logits_bv = attention.capped(
                logits_of(each[0], head), self.plan.config.variant.logit_cap
            )
            logits_bv = par.carry_out(logits_bv, par.plan.physical(LOGITS), invariant=True)
            return choose_tokens(logits_bv, each[1], each[2], rows)

        numbers = lax.map(follow, tuple(jnp.moveaxis(y, 1, 0) for y in (x, *known)))
        caches = tuple(itertools.chain(*par.caches.values()))
        return par.carry_out(numbers, par.plan.physical(CHOSEN), invariant=True), caches


class _Cached(Manual):
    """The mode in which a layer writes its keys and values, where a token is, and attends to the cache; or
    continues its state."""

    def __init__(self, plan: Serving, caches, is_token):
        super().__init__(plan)
        kinds = [cache.kind for cache in plan.caches(1, 1)]
        pairs = [*zip(kinds, caches, strict=True)]
        self.cache, self.is_token = self, is_token
        self.caches = {kind: [x for i, x in pairs if i == kind] for kind in kinds}
        # how many layers are done; of the one that runs the kind, and its number among those of this kind
        self.done = self.kind = 0
        self.layer: Any = 0

    def layers(self, blocks, x, stack):
        times = jax.tree.leaves(stack)[0].shape[0]
        order = self.plan.config.layer_kinds[: self.done + times * len(blocks)]
        numbers = [order[:i].count(kind) for i, kind in enumerate(order)][self.done :]
        kinds, self.done = order[self.done :][: len(blocks)], len(order)

        def layer(carry, each):
            (x, self.caches), (weights, numbers) = carry, each
            for i, block in enumerate(blocks):
                self.kind, self.layer = kinds[i], numbers[i]
                x = block(x, weights)[0]
            return (x, self.caches), None

        stack = stack, jnp.array(numbers).reshape(times, -1)
        (x, self.caches), _ = lax.scan(layer, (x, self.caches), stack)
        return x, None

    def attend(self, q, k, v, positions, mask, sinks=None):
        axes, rank, size = self.axes("cache t"), self.index("cache t"), self.plan.mesh.sp
        own = self.caches[self.kind]
        slots = jnp.arange(own[0].shape[2])
        rows = jnp.arange(len(positions))[:, None]
        is_own = self.is_token & (positions % size == rank)
        # dropped past the end
        where = (self.layer, rows, jnp.where(is_own, positions // size, len(slots)))
        write = lambda cache, x: cache.at[where].set(vary(x, axes), mode="drop")
        own = [*map(write, own, (k, v) if v is not None else (k,))]
        self.caches = self.caches | {self.kind: own}
        # A slot that the row has not written, but an earlier request perhaps, lies after every query.
        ids = attention.Ids(positions, 0, (slots * size + rank)[None], 0)  # a row is one document
        kept = at(own, self.layer)  # keys and values; or latents, which are both
        return attend_cache(q, kept[0], kept[-1], ids, axes, mask, sinks)

    def resume(self, positions, inputs, weights):
        """Continue the rows of a gated delta net (`gated_delta.mix`); a row's first token finds nothing of an
        earlier request."""
        own, begins = self.caches[self.kind], positions[:, 0] == 0
        fresh = lambda x: jnp.where(begins[:, *[None] * (x.ndim - 1)], 0, x)
        before, state = map(fresh, at(own, self.layer))
        y, new = gated_delta.resume(self, before, state, self.is_token, inputs, weights)
        own = [cache.at[self.layer].set(x) for cache, x in zip(own, new, strict=True)]
        self.caches = self.caches | {self.kind: own}
        return y

    def attend_latents(self, q, latent, up_cnh, config: ModelConfig, positions):
        """Attend to the cache of latents, which are keys and values of all heads: the matrix that would make
        keys of them multiplies the queries, the one of values the result (DeepSeek-V2, section 2.1.2)."""
        num_latent, width = up_cnh.shape[0], config.value_width
        r = latent.shape[-1] - num_latent
        to_keys, to_values = up_cnh[..., :-width], up_cnh[..., -width:]
        q_bsnc = jnp.einsum("bsnh,cnh->bsnc", q[..., :-r], to_keys)
        q_bsnc = jnp.concatenate([q_bsnc, q[..., -r:]], axis=-1)
        # The cache divides scores by the root of c + r, and they want that of h.
        q_bsnc = q_bsnc * jnp.asarray((q_bsnc.shape[-1] / q.shape[-1]) ** 0.5, q.dtype)
        y = self.attend(q_bsnc[:, :, None], latent[:, :, None], None, positions, config.mask)
        return jnp.einsum("bsnc,cnh->bsnh", y[:, :, 0, :, :num_latent], to_values)


def attend_cache(
    q: Q,
    k_cache: KV,
    v_cache: attention.V,
    ids: attention.Ids,
    axis: str | tuple[str, ...],
    mask: attention.Mask = attention.CAUSAL,
    sinks: Float[Array, "k r"] | None = None,
) -> attention.Out:
    """Attend from a few queries, the same on every rank, to a cache that is cut along `axis` and stays there.

    Each call sends one maximum of b s k r numbers and one sum of b s k r (h+1). A slot of the cache that is
    not written yet must have a position after every query's. No gradient: a maximum over ranks has none.
    """
    out, lse = attention.full(q, k_cache, v_cache, ids, mask=mask)
    if not axis:
        return out if sinks is None else attention.with_sinks(out, lse, sinks)
    with scope("cache b s k r +t -> attention b s k r"):
        top = jnp.maximum(lax.pmax(lse, axis), jnp.finfo(jnp.float32).min)
        weight = jnp.exp(lse - top)[..., None]
        sums = lax.psum(jnp.concatenate([out.astype(jnp.float32) * weight, weight], -1), axis)
    out, total = sums[..., :-1], sums[..., -1:]
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(jnp.float32)[None, None] - top)[..., None]
    return (out / jnp.where(total > 0, total, 1)).astype(q.dtype)


def choose_tokens(
    logits: Float[Array, "b v"], targets, positions, rows: DecoderInput
) -> Int[Array, "b n"]:
    """Return the tokens that follow, the targets, and the likeliest; then the bits of their
    log-probabilities: one message."""
    logprobs = jax.nn.log_softmax(logits)
    best = lax.top_k(logits, min(BEST, logits.shape[1]))[1]
    drawn = lambda: jnp.where(
        rows.temperature > 0, jax.vmap(draw)(logits, positions, *rows[3:]), best[:, 0]
    )
    token = lax.cond((rows.temperature > 0).any(), drawn, lambda: best[:, 0])
    tokens = jnp.concatenate([jnp.stack([token, targets], 1), best], 1)
    logprobs = jnp.take_along_axis(logprobs, tokens, 1)
    return jnp.concatenate([tokens, lax.bitcast_convert_type(logprobs, jnp.int32)], 1)


def draw(logits: Float[Array, " v"], position, seed, top_k, top_p, temperature) -> Int[Array, ""]:
    """Draw from the softmax of logits over ``temperature``: from the ``top_k`` likeliest (0: all), of these
    from the fewest whose shares reach ``top_p`` (nucleus sampling: Holtzman et al. 2020). Seed and position
    alone decide, by noise for each token of the vocabulary (the Gumbel-max trick)."""
    gap = logits - logits.max()  # a low temperature sends the others to -inf
    scaled = jnp.where(gap == 0, 0, gap / jnp.where(temperature > 0, temperature, 1))
    order = jnp.argsort(-scaled).astype(jnp.int32)
    line = jnp.where((top_k == 0) | (jnp.arange(len(order)) < top_k), scaled[order], -jnp.inf)
    shares = jax.nn.softmax(line)
    line = jnp.where((top_p >= 1) | (jnp.cumsum(shares) - shares < top_p), line, -jnp.inf)
    noise = jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), logits.shape)
    return order[jnp.argmax(line + noise[order])]
