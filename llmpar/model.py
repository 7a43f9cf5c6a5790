"""Llama-family models. The text knows dims, never mesh axes: read it as if there were one device.

Where a value lives is said by arrows. `par` reads them (see :mod:`llmpar.par`); with `Solo` they mean
nothing, and the model below is the plain Llama of Touvron et al. 2023 with grouped-query attention, RoPE and
SwiGLU, plus what Qwen 2 and 3 add (biases on q, k and v; a norm on q and k).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from llmpar import attention, moe
from llmpar.config import ExpertConfig, ModelConfig

Batch = dict[str, jax.Array]
"""What a step reads, each ``b s`` int32: tokens, targets (-1: not counted), positions, segments (documents,
from 1)."""


def param(rngs: nnx.Rngs, dims: str, shape: tuple[int, ...], scale: float) -> nnx.Param:
    """A weight, normally distributed (constant one where ``scale`` is 0), that knows its region and dims."""
    value = scale * jax.random.normal(rngs.params(), shape) if scale else jnp.ones(shape)
    return nnx.Param(value, dims=dims)


class RMSNorm(nnx.Module):
    """Divide by the root mean square over the last dim, in float32 (Zhang & Sennrich 2019)."""

    def __init__(self, dims: str, size: int, eps: float, rngs: nnx.Rngs):
        self.scale, self.eps = param(rngs, dims, (size,), 0), eps

    def __call__(self, x, par):
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return x32.astype(x.dtype) * jnp.expand_dims(par.weight(self.scale), range(x.ndim - 1))


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023): n = k·r query heads share k KV heads."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, n, k, h = config.width, config.num_heads, config.num_kv_heads, config.head_width
        self.q = param(rngs, "attention d n h", (d, n, h), config.init_scale)
        self.k = param(rngs, "attention d k h", (d, k, h), config.init_scale)
        self.v = param(rngs, "attention d k h", (d, k, h), config.init_scale)
        self.o = param(rngs, "attention n h d", (n, h, d), config.init_scale / (2 * config.num_layers) ** 0.5)
        if config.qkv_bias:
            self.q_bias, self.k_bias, self.v_bias = (
                nnx.Param(jnp.zeros((heads, h)), dims=f"attention {dim} h")
                for dim, heads in (("n", n), ("k", k), ("k", k))
            )
        if config.qk_norm:
            self.q_norm = RMSNorm("attention h", h, config.norm_eps, rngs)
            self.k_norm = RMSNorm("attention h", h, config.norm_eps, rngs)
        self.config = config

    def __call__(self, x, ids, rope, par):
        x = par.move(x, "stream b s d -> attention b s d")
        q = jnp.einsum("bsd,dnh->bsnh", x, par.weight(self.q))
        k = jnp.einsum("bsd,dkh->bskh", x, par.weight(self.k))
        v = jnp.einsum("bsd,dkh->bskh", x, par.weight(self.v))
        if self.config.qkv_bias:
            q, k, v = (
                y + par.weight(bias)[None, None]
                for y, bias in ((q, self.q_bias), (k, self.k_bias), (v, self.v_bias))
            )
        if self.config.qk_norm:
            q, k = self.q_norm(q, par), self.k_norm(k, par)
        q, k = rotate(q, rope), rotate(k, rope)
        q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])  # b s k r h, whatever heads are here
        y = attend(q, k, v, ids, attention.Mask(window=self.config.window), par)
        y = jnp.einsum("bsnh,nhd->bsd", y.reshape(*y.shape[:2], -1, y.shape[-1]), par.weight(self.o))
        return par.move(y, "attention b s d +n -> stream b s d")


def attend(q, k, v, ids, mask: attention.Mask, par):
    """Attention ``b s k r h``: queries and keys move to where the plan wants them to meet, and the result
    moves back.

    Three ways to cut a long sequence are three tables of regions. In a ring nothing moves here, and the keys
    that are still cut travel during attention; Ulysses has whole sequences of some heads; gathered keys meet
    the queries at home.
    """
    if par.cache:
        return par.cache.attend(q, k, v, ids[0], mask)
    q = par.move(q, "attention b s k r h -> queries b s k r h")
    k, v = (par.move(x, "attention b s k h -> keys b s k h") for x in (k, v))
    axes, block, kernel = par.axes("keys s"), par.plan.attention_block, par.plan.attention_kernel
    compute = functools.partial(attention.blockwise, contiguous=par.plan.in_order, block=block)
    if kernel != "portable":
        compute = functools.partial(attention.by_kernel, contiguous=par.plan.in_order, kernel=kernel)
    if axes:
        (axis,) = axes
        joins = (
            block and block >= q.shape[1]
        )  # a tile must not join the two parts that zigzag deals to a rank
        compute = functools.partial(attention.ring, axis=axis, block=None if joins else block)

    def here(q, k, v, q_positions, q_segments, k_positions, k_segments):
        ids = dict(
            q_positions_bs=q_positions,
            q_segments_bs=q_segments,
            k_positions_bt=k_positions,
            k_segments_bt=k_segments,
        )
        return compute(q, k, v, mask=mask, **ids)[0]

    queries, keys, q_ids, k_ids = "queries b s k r h", "keys b s k h", "queries b s", "keys b s"
    y = par.local(here, [queries, keys, keys, q_ids, q_ids, k_ids, k_ids], queries)(q, k, v, *ids)
    return par.move(y, "queries b s k r h -> attention b s k r h")


class FeedForward(nnx.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, width: int | None = None):
        d, m = config.width, width or config.ffn_width
        self.gate = param(rngs, "ffn d m", (d, m), config.init_scale)
        self.up = param(rngs, "ffn d m", (d, m), config.init_scale)
        self.down = param(rngs, "ffn m d", (m, d), config.init_scale / (2 * config.num_layers) ** 0.5)

    def __call__(self, x, par):
        x = par.move(x, "stream b s d -> ffn b s d")
        return par.move(self.inside(x, par), "ffn b s d +m -> stream b s d")

    def inside(self, x, par):
        """The three products and what is between them; the sum over m is unfinished."""
        gate, up, down = (par.weight(w) for w in (self.gate, self.up, self.down))
        mix = lambda x: (jax.nn.silu(x @ gate) * (x @ up)) @ down
        chunks = par.plan.ffn_chunks
        return par.chunked(mix, x, chunks) if chunks > 1 else mix(x)


class Experts(nnx.Module):
    """A mixture of experts (Shazeer et al. 2017): each token visits a few of many feed-forwards, as its
    router chooses."""

    def __init__(self, config: ModelConfig, how: ExpertConfig, rngs: nnx.Rngs):
        d, m, e, self.how = config.width, config.ffn_width, how.num_experts, how
        self.router = param(rngs, "stream d e", (d, e), config.init_scale)
        self.gate = param(rngs, "experts e d m", (e, d, m), config.init_scale)
        self.up = param(rngs, "experts e d m", (e, d, m), config.init_scale)
        self.down = param(
            rngs, "experts e m d", (e, m, d), config.init_scale / (2 * config.num_layers) ** 0.5
        )
        if how.bias_rate is not None:
            self.bias = nnx.Param(jnp.zeros(e), dims="stream e")
        if how.num_shared:
            self.shared = FeedForward(config, rngs, how.num_shared * m)

    def __call__(self, x, par):
        """The weighted sum of the chosen experts (and of the shared ones), and what the router tells: whom it
        chose, and the losses and tally of `moe.route`."""
        logits = jnp.einsum("bsd,de->bse", x, par.weight(self.router), preferred_element_type=jnp.float32)
        bias = (
            []
            if self.how.bias_rate is None
            else [par.weight(self.bias.replace(jax.lax.stop_gradient(self.bias[...])))]
        )
        told = {"loss": "stream b s", "tally": "stream e +b +s"}
        route = par.local(
            functools.partial(moe.route, self.how, par.explicit),
            ["stream b s e", *["stream e"] * len(bias)],
            ("stream b s e", "stream b s e", told),
        )
        weights, chosen, told = route(logits, *bias)
        told = told | {"chosen": chosen}
        x = par.move(x, "stream b s d -> ffn b s d")
        weights, chosen = (par.move(y, "stream b s e -> ffn b s e") for y in (weights, chosen))
        visit = par.local(
            functools.partial(moe.visit, self.how, par.explicit),
            ["ffn b s d", "ffn b s e", "ffn b s e", "experts e d m", "experts e d m", "experts e m d"],
            "ffn b s d +m",
        )
        y = visit(x, weights, chosen, *(par.weight(w) for w in (self.gate, self.up, self.down)))
        if self.how.num_shared:
            y = y + self.shared.inside(x, par)
        return par.move(y, "ffn b s d +m -> stream b s d"), told


class Block(nnx.Module):
    """One layer: attention and feed-forward, each normed before and added to the residual stream."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm("stream d", config.width, config.norm_eps, rngs)
        self.attention = Attention(config, rngs)
        self.ffn_norm = RMSNorm("stream d", config.width, config.norm_eps, rngs)
        if config.experts:
            self.experts = Experts(config, config.experts, rngs)
        else:
            self.ffn = FeedForward(config, rngs)
        self.config = config

    def __call__(self, x, ids, rope, par):
        """The stream after the layer, and what its router tells; None without one."""
        x = x + self.attention(self.attention_norm(x, par), ids, rope, par)
        y = self.ffn_norm(x, par)
        y, told = self.experts(y, par) if self.config.experts else (self.ffn(y, par), None)
        return x + y, told


class Llama(nnx.Module):
    """Embedding, a stack of blocks (their weights have a leading dim of layers), a norm, and the
    vocabulary-parallel loss."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        v, d = config.vocab_size, config.width
        self.embedding = param(rngs, "vocab v d", (v, d), config.init_scale)
        stack = nnx.vmap(lambda keys: Block(config, keys), in_axes=0, out_axes=0)
        self.blocks = nnx.split_rngs(splits=config.num_layers)(stack)(rngs)
        self.norm = RMSNorm("stream d", d, config.norm_eps, rngs)
        if not config.tied:
            self.head = param(rngs, "vocab v d", (v, d), config.init_scale)
        self.config = config

    def tables(self, par):
        """The embedding and the output head, one value used twice where they are tied."""
        embedding = par.weight(self.embedding)
        return embedding, embedding if self.config.tied else par.weight(self.head)

    def embed(self, table, batch: Batch, par):
        """Look tokens up. Each device knows a block of the vocabulary, and contributes zero for all other
        tokens."""
        local = batch["tokens"] - par.index("vocab v") * table.shape[0]
        known = (0 <= local) & (local < table.shape[0])
        x = jnp.where(known[..., None], table[jnp.where(known, local, 0)], 0)
        return par.move(x, "vocab b s d +v -> stream b s d")

    def hidden(self, embedding, batch: Batch, par):
        """The residual stream after the last block and norm, ``b s d``, and what the layers' routers tell."""
        x, told = self.run(self.embed(embedding, batch, par), batch, par, par.layers)
        return self.norm(x, par), told

    def run(self, x, batch: Batch, par, layers):
        """The residual stream after the blocks that are here, run one after the other by ``layers``, and what
        they tell."""
        graph, weights = nnx.split(self.blocks)
        rope = rope_table(self.config, batch["positions"])
        keys = [par.move(batch[name], "data b s -> keys b s") for name in ("positions", "segments")]
        ids = *(par.move(x, "keys b s -> queries b s") for x in keys), *keys

        def block(x, w):
            return nnx.merge(graph, w)(x, ids, rope, par)

        return layers(block, x, weights)

    def losses(self, batch: Batch, par):
        """The cross-entropy of every target in nats, ``b s`` float32, 0 where the target is -1: see
        `observed`."""
        return self.observed(batch, par)[0]

    def summed(self, batch: Batch, par):
        """What training makes small, summed over the tokens here: the cross-entropies and the routers' own
        losses. And the routers' tally, ``l e`` (None without experts)."""
        losses, told = self.observed(batch, par)
        if told is None:
            return losses.sum(), None
        return losses.sum() + self.routed(told["loss"].sum(0), batch, par).sum(), told["tally"]

    def observed(self, batch: Batch, par):
        """The cross-entropies ``b s``, and what the routers tell (None without experts).

        Devices that hold a block of the vocabulary exchange three numbers per token (the maximum, the sum of
        exponentials, the target's logit); logits are never gathered (Shoeybi et al. 2019, section 3).
        """
        embedding, head = self.tables(par)
        x, told = self.hidden(embedding, batch, par)
        x = par.move(x, "stream b s d -> vocab b s d")

        def piece(inputs):
            x, targets = inputs
            logits = jnp.einsum("bsd,vd->bsv", x, head, preferred_element_type=jnp.float32)
            top = par.max(logits.max(-1), "vocab b s +v -> data b s")
            logits = logits - top[..., None]
            local = (targets - par.index("vocab v") * head.shape[0])[..., None]
            hit = jnp.where(jax.lax.broadcasted_iota(jnp.int32, (1, 1, head.shape[0]), 2) == local, logits, 0)
            total = par.move(jnp.exp(logits).sum(-1), "vocab b s +v -> data b s")
            target = par.move(hit.sum(-1), "vocab b s +v -> data b s")
            return jnp.where(targets >= 0, jnp.log(total) - target, 0)

        return par.chunked(piece, (x, batch["targets"]), par.plan.loss_chunks), told

    def routed(self, loss, batch: Batch, par):
        """The routers' own losses ``b`` from those of the tokens ``b s``: of those that have a target."""
        counted = par.move(batch["targets"], "data b s -> stream b s") >= 0
        return par.move(jnp.where(counted, loss, 0).sum(1), "stream b +s -> data b +s")

    def logits(self, batch: Batch, par):
        """All logits, ``b s v`` float32, gathered: for parity tests and sampling, not for training."""
        embedding, head = self.tables(par)
        x = par.move(self.hidden(embedding, batch, par)[0], "stream b s d -> vocab b s d")
        return par.move(
            jnp.einsum("bsd,vd->bsv", x, head, preferred_element_type=jnp.float32),
            "vocab b s v -> data b s v",
        )


# ------------------------------------------------------------------------------------------------------- RoPE


def rope_table(config: ModelConfig, positions_bs) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines ``b s 1 h/2`` of the rotary embedding at true positions (Su et al. 2021)."""
    angles = (
        positions_bs[..., None].astype(jnp.float32)
        * jnp.asarray(rope_frequencies(config), jnp.float32)[None, None]
    )
    return jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each pair, ``h/2``; low frequencies are stretched where Llama 3.1's scaling is
    set.

    Wavelengths up to the original context over ``high_freq_factor`` stay, those beyond it over
    ``low_freq_factor`` are divided by ``factor``, and between them the two are blended (Llama 3.1 reference
    configuration, 2024).
    """
    frequency = config.rope_theta ** (-np.arange(0, config.head_width, 2) / config.head_width)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    turns = scaling.original_context * frequency / (2 * np.pi)
    blend = np.clip(
        (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1
    )
    return frequency * (blend + (1 - blend) / scaling.factor)


def rotate(x, rope):
    """Turn the pairs (i, i + h/2) of each head by their angles, in float32: Hugging Face's order of the
    halves."""
    cos, sin = rope
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
