"""Llama-family models. The text knows dims, never mesh axes: read it as if there were one device.

Four ideas lead from an arrow to a matmul:

    region    a part of a layer in which values have one layout: data, stream, attention, ffn, vocab …
    arrow     ``stream b s d -> ffn b s d``: which value moves, from which region to which
    par       ``par.move`` carries out an arrow, ``par.weight`` gives a weight as it is used (`used_weights`:
              with its adapters, if it has any). A move and the matmuls behind it are one call,
              ``par.move_matmul``, and a matmul and the move behind it are ``par.matmul_move``: a ring may
              then send one block while the next is multiplied
    mode      what ``par`` is (see :mod:`llmpar.parallel.modes`). With `Solo`, one device, nothing moves

With `Solo` the model below is the plain Llama of Touvron et al. 2023 with grouped-query attention, RoPE and
SwiGLU, plus what Qwen 2 and 3 add (biases on q, k and v; a norm on q and k).

A training step needs one number, and the methods of `Llama` lead to it in this order:

    loss                      the sum of the targets' cross-entropies and of the routers' own losses
      cross_entropies         of each target, from what the last block gives and the output head
        hidden_and_head       embed, then run_blocks, then the last norm
          run_blocks          Block after Block: attention and feed-forward (or experts)
      router_losses           of the tokens that have a target
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from llmpar.model import attention, moe
from llmpar.model.lora import adapt, used_weights
from llmpar.parallel.collectives import vary_alike
from llmpar.parallel.modes import STREAM, Solo
from llmpar.plan.model_config import ExpertConfig, LoraConfig, ModelConfig, Weight

Stream = Float[Array, "b s d"]
Batch = dict[str, jax.Array]
"""What a step reads, each ``b s`` int32: tokens, targets (-1: not counted), positions, segments (documents,
from 1). A row in which attention cannot tell who sees whom gives NaN (`nan_in_broken_rows`)."""
# Positions and segments of the queries, then those of the keys. Their regions may cut them otherwise than x.
QueryKeyIds = tuple[Int[Array, "_ q"], Int[Array, "_ q"], Int[Array, "_ t"], Int[Array, "_ t"]]
# Cosines and sines for each of p positions and each pair of a head's numbers.
Rope = tuple[Float[Array, "b p 1 half"], Float[Array, "b p 1 half"]]
# The auxiliary outputs of a router (`moe.route`), and the experts that it chose; None without experts.
Aux = dict[str, Array] | None
# The loss summed over tokens, and the routers' tallies ``l (e+2)`` (`moe.route`); None without experts.
Loss = tuple[Float[Array, ""], Float[Array, "l _"] | None]


def param(rngs: nnx.Rngs, weights: dict[str, Weight], path: str) -> nnx.Param:
    """Start one of the described weights; the parameter has its region and dims."""
    weight = weights[path]
    value = jnp.full(weight.shape, weight.fill)
    if weight.std:
        value = weight.std * jax.random.normal(rngs.params(), weight.shape)
    return nnx.Param(value, dims=weight.dims)


Make = Callable[[str], nnx.Param]
"""Start the weight with a path (`ModelConfig.block_weights`)."""


class RMSNorm(nnx.Module):
    """Divide by the root mean square over the last dim, in float32 (Zhang & Sennrich 2019)."""

    def __init__(self, scale: nnx.Param, eps: float):
        self.scale, self.eps = scale, eps

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "*dims d"], par: Solo) -> Float[Array, "*dims d"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return par.beside(jnp.multiply, x32.astype(x.dtype), self.scale)


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023): n = k·r query heads share k KV heads."""

    def __init__(self, config: ModelConfig, make: Make):
        self.q, self.k, self.v, self.o = (make(f"attention.{x}") for x in "qkvo")
        adapt(self, config.lora, make, "attention")
        if config.qkv_bias:
            self.q_bias, self.k_bias, self.v_bias = (make(f"attention.{x}_bias") for x in "qkv")
        if config.qk_norm:
            norms = (RMSNorm(make(f"attention.{x}_norm.scale"), config.norm_eps) for x in "qk")
            self.q_norm, self.k_norm = norms
        self.config = config

    @jax.named_scope("attention")
    def __call__(self, x: Stream, ids: QueryKeyIds, rope: Rope, par: Solo) -> Stream:
        weights = used_weights(self, par, "q", "k", "v")
        biases = (self.q_bias, self.k_bias, self.v_bias) if self.config.qkv_bias else ()
        arrow = "stream b s d -> attention b s d"
        q_bsnh, k_bskh, v_bskh = par.move_matmul(x, arrow, *weights, biases=biases)
        if self.config.qk_norm:
            q_bsnh, k_bskh = self.q_norm(q_bsnh, par), self.k_norm(k_bskh, par)
        q_bsnh, k_bskh = rotate(q_bsnh, rope), rotate(k_bskh, rope)
        b, s, k, h = k_bskh.shape
        q_bskrh, mask = q_bsnh.reshape(b, s, k, -1, h), attention.Mask(window=self.config.window)
        y_bsnh = attend(q_bskrh, k_bskh, v_bskh, ids, mask, par).reshape(q_bsnh.shape)
        (o_nhd,) = used_weights(self, par, "o")
        return par.matmul_move(y_bsnh, o_nhd, "attention b s d +n -> stream b s d")


def attend(
    q: Float[Array, "b s k r h"],
    k: Float[Array, "b s k h"],
    v: Float[Array, "b s k h"],
    ids: tuple[Array, ...],
    mask: attention.Mask,
    par: Solo,
) -> Float[Array, "b s k r h"]:
    """Move queries and keys to their regions, attend, and move the result back.

    `Plan.context_parallel` decides only how the regions queries and keys are cut; these moves follow. Ring:
    nothing moves here, the keys travel during attention. Ulysses: each rank gets whole sequences of some
    heads. Gather: each gets all keys. usp: heads inside a group of ranks, and a ring of groups.
    """
    if par.cache:
        return par.cache.attend(q, k, v, ids[0], mask)
    q = par.move(q, "attention b s k r h -> queries b s k r h")
    k, v = (par.move(x, "attention b s k h -> keys b s k h") for x in (k, v))
    queries, keys, q_ids, k_ids = "queries b s k r h", "keys b s k h", "queries b s", "ids b s"
    layouts = [queries, keys, keys, q_ids, q_ids, k_ids, k_ids]
    y = par.local(attention.choose_attention(par, mask), layouts, queries)(q, k, v, *ids)
    return par.move(y, "queries b s k r h -> attention b s k r h")


class FeedForward(nnx.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, make: Make, path: str, lora: LoraConfig | None = None):
        self.gate, self.up, self.down = (make(f"{path}.{x}") for x in ("gate", "up", "down"))
        adapt(self, lora, make, path)

    @jax.named_scope("feed_forward")
    def __call__(
        self,
        x: Stream,
        par: Solo,
        before: str = "stream b s d -> ffn b s d",
        after: str = "ffn b s d +m -> stream b s d",
    ) -> Stream:
        """Three matmuls; the arrow ``before`` brings ``x`` to them, ``after`` finishes their sum."""
        gate, up, down = used_weights(self, par, "gate", "up", "down")

        def swiglu(x_bsd):
            gate_bsm, up_bsm = par.move_matmul(x_bsd, before, gate, up)
            return par.matmul_move(jax.nn.silu(gate_bsm) * up_bsm, down, after)

        return par.chunked(swiglu, x, par.plan.ffn_chunks)


class Experts(nnx.Module):
    """A mixture of experts (Shazeer et al. 2017): a router chooses k of E feed-forwards for each token."""

    def __init__(self, config: ExpertConfig, make: Make):
        self.config, self.router = config, make("experts.router")
        self.gate, self.up, self.down = (make(f"experts.{x}") for x in ("gate", "up", "down"))
        if config.bias_rate is not None:
            self.bias = make("experts.bias")
        if config.num_shared:
            self.shared = FeedForward(make, "experts.shared")

    @jax.named_scope("experts")
    def __call__(self, x: Stream, par: Solo) -> tuple[Stream, Aux]:
        """Return the weighted sum of the chosen and the shared experts, and the router's outputs."""
        logits_bse = jnp.einsum(
            "bsd,de->bse", x, par.weight(self.router), preferred_element_type=jnp.float32
        )
        bias = []
        if self.config.bias_rate is not None:
            bias = [par.weight(self.bias.replace(jax.lax.stop_gradient(self.bias[...])))]
        route = par.local(
            functools.partial(moe.route, self.config, par.island),
            ["stream b s e", *["stream e"] * len(bias)],
            ("stream b s e", "stream b s e", {"loss": "stream b s", "tally": "stream e +b +s"}),
        )
        weights_bsk, chosen_bsk, aux = route(logits_bse, *bias)
        aux = aux | {"chosen": chosen_bsk}
        x = par.move(x, "stream b s d -> ffn b s d")
        # Their last dim is the k choices of a token. Layouts call it e: their k is KV heads.
        choices = (par.move(y, "stream b s e -> ffn b s e") for y in (weights_bsk, chosen_bsk))
        visit = par.local(
            functools.partial(moe.visit_experts, self.config, par.island),
            [
                "ffn b s d",
                "ffn b s e",
                "ffn b s e",
                "experts e d m",
                "experts e d m",
                "experts e m d",
            ],
            "ffn b s d +m",
        )
        y = visit(x, *choices, *(par.weight(w) for w in (self.gate, self.up, self.down)))
        if self.config.num_shared:
            # Its sum stays open: the move below finishes that of routed and shared experts together.
            y = y + self.shared(x, par, "ffn b s d -> ffn b s d", "ffn b s d +m -> ffn b s d +m")
        return par.move(y, "ffn b s d +m -> stream b s d"), aux


class Block(nnx.Module):
    """One layer: attention and feed-forward, each normed before and added to the residual stream."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        make = functools.partial(param, rngs, config.block_weights())
        self.attention_norm = RMSNorm(make("attention_norm.scale"), config.norm_eps)
        self.attention = Attention(config, make)
        self.ffn_norm = RMSNorm(make("ffn_norm.scale"), config.norm_eps)
        if config.experts:
            self.experts = Experts(config.experts, make)
        else:
            self.ffn = FeedForward(make, "ffn", config.lora)
        self.config = config

    def __call__(self, x: Stream, ids: QueryKeyIds, rope: Rope, par: Solo) -> tuple[Stream, Aux]:
        """Return the stream after the layer, and its router's outputs."""
        x = checkpoint_name(x + self.attention(self.attention_norm(x, par), ids, rope, par), STREAM)
        y = self.ffn_norm(x, par)
        y, aux = self.experts(y, par) if self.config.experts else (self.ffn(y, par), None)
        return x + y, aux


class Llama(nnx.Module):
    """Embedding, a stack of blocks (a leading dim ``l`` of their weights), a norm, and the loss."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        make = functools.partial(param, rngs, config.must_run().weights())
        self.embedding = make("embedding")
        stack = nnx.vmap(lambda keys: Block(config, keys), in_axes=0, out_axes=0)
        self.blocks = nnx.split_rngs(splits=config.num_layers)(stack)(rngs)
        self.norm = RMSNorm(make("norm.scale"), config.norm_eps)
        if not config.tied:
            self.head = make("head")
        self.config = config

    def loss(self, batch: Batch, par: Solo) -> Loss:
        """Return what training minimises: the sum of the cross-entropies and of the routers' own losses."""
        losses, aux = self.cross_entropies(batch, par)
        loss = par.total(losses, "data b s")
        if aux is None:
            return loss, None
        more = self.router_losses(aux["loss"].sum(0), batch, par)
        return loss + par.total(more, "data b +s"), aux["tally"]

    def cross_entropies(self, batch: Batch, par: Solo) -> tuple[Float[Array, "b s"], Aux]:
        """Return the cross-entropy of every target in nats, float32, 0 where the target is -1; and the
        routers' outputs, layer by layer.

        Devices that have a block of the vocabulary exchange three numbers per token (the maximum, the sum of
        exponentials, the target's logit); logits are never gathered (Shoeybi et al. 2019, section 3).
        """
        x, head_vd, aux = self.hidden_and_head(batch, par)
        x = par.move(x, "stream b s d -> vocab b s d")
        finish = "vocab b s +v -> data b s"

        @jax.named_scope("loss")
        def losses(inputs):
            x_bsd, targets_bs = inputs
            # The second rounds the gradient of the logits to x's dtype before its matmuls, which a TPU does
            # by itself as it reads it: there, rounding before costs memory and saves no time.
            multiply = logits_of if par.platform == "tpu" else logits_with_rounded_grad
            logits_bsv = multiply(*vary_alike((x_bsd, head_vd)))
            logits_bsv = logits_bsv - par.max(logits_bsv.max(-1), finish)[..., None]
            sum_exp = lambda par, x: jnp.exp(x).sum(-1)
            total_bs = par.summed(sum_exp, ["vocab b s v"], finish)(logits_bsv)
            target_bs = par.summed(target_logits, ["vocab b s v", "data b s"], finish)(
                logits_bsv, targets_bs
            )
            return jnp.where(targets_bs >= 0, jnp.log(total_bs) - target_bs, 0)

        return par.chunked(losses, (x, batch["targets"]), par.plan.loss_chunks, recompute=True), aux

    def hidden_and_head(self, batch: Batch, par: Solo) -> tuple[Stream, Array, Aux]:
        """Return the residual stream after the last block and norm, the output head ``v d`` (the embedding
        once more, where they are tied), and the routers' outputs."""
        embedding = par.weight(self.embedding)
        head = embedding if self.config.tied else par.weight(self.head)
        x, aux = self.run_blocks(self.embed(embedding, batch, par), batch, par, par.layers)
        return self.norm(x, par), head, aux

    @jax.named_scope("embed")
    def embed(self, embedding: Float[Array, "v d"], batch: Batch, par: Solo) -> Stream:
        """Look tokens up: each device has a block of the vocabulary, and adds zeros for other tokens."""

        def look_up(par, embedding_vd, tokens_bs):
            local_bs = tokens_bs - par.index("vocab v") * embedding_vd.shape[0]
            known_bs = (0 <= local_bs) & (local_bs < embedding_vd.shape[0])
            return jnp.where(known_bs[..., None], embedding_vd[jnp.where(known_bs, local_bs, 0)], 0)

        look = par.summed(look_up, ["vocab v d", "data b s"], "vocab b s d +v -> stream b s d")
        return look(embedding, batch["tokens"])

    def run_blocks(
        self, x: Stream, batch: Batch, par: Solo, layers: Callable
    ) -> tuple[Stream, Any]:
        """Run the blocks by ``layers``: the stream behind the last one, and the routers' outputs."""
        graph, weights = nnx.split(self.blocks)
        names = "positions", "segments"
        k_positions, k_segments = (par.move(batch[name], "data b s -> ids b s") for name in names)
        mask, rope = attention.Mask(self.config.window), rope_table(self.config, batch["positions"])
        rope = nan_in_broken_rows(rope, attention.as_promised(par, mask, k_positions, k_segments))
        q_positions, q_segments = (
            par.move(x, "ids b s -> queries b s") for x in (k_positions, k_segments)
        )
        ids = q_positions, q_segments, k_positions, k_segments
        block = lambda x, w: nnx.merge(graph, w)(x, ids, rope, par)
        return layers(block, x, weights)

    @jax.named_scope("router_losses")
    def router_losses(
        self, loss: Float[Array, "b s"], batch: Batch, par: Solo
    ) -> Float[Array, " b"]:
        """Sum the routers' own losses of each row over its tokens that have a target. With tp_sequence the
        arrow finishes the sum over tp; the sum over sp stays open, as that of the cross-entropies."""
        counted = par.move(batch["targets"], "data b s -> stream b s") >= 0
        rows = par.summed(lambda par, x: x.sum(1), ["stream b s"], "stream b +s -> data b +s")
        return rows(jnp.where(counted, loss, 0))

    def logits(self, batch: Batch, par: Solo) -> Float[Array, "b s v"]:
        """Return all logits, float32, gathered: for parity tests and sampling, not for training."""
        x, head, _ = self.hidden_and_head(batch, par)
        x = par.move(x, "stream b s d -> vocab b s d")
        return par.move(logits_of(x, head), "vocab b s v -> data b s v")


def logits_of(x: Float[Array, "*rows d"], head: Float[Array, "v d"]) -> Float[Array, "*rows v"]:
    """Return logits, in float32 whatever is multiplied."""
    return jnp.einsum("...d,vd->...v", x, head, preferred_element_type=jnp.float32)


@jax.custom_vjp
def logits_with_rounded_grad(x, head):
    """Return `logits_of`, with gradients rounded to the dtype of ``x`` before they are multiplied: a GPU
    takes more than twice as long for matmuls of float32, which were 15 % of a step (`tests/device.md`)."""
    return logits_of(x, head)


def _rounded_grad(saved, grad):
    _, pull = jax.vjp(functools.partial(jnp.einsum, "...d,vd->...v"), *saved)
    return pull(grad.astype(saved[0].dtype))


logits_with_rounded_grad.defvjp(
    lambda *args: (logits_with_rounded_grad(*args), args), _rounded_grad
)


def target_logits(
    par: Solo, logits: Float[Array, "b s v"], targets: Int[Array, "b s"]
) -> Float[Array, "b s"]:
    """Return the targets' logits, 0 where a target is not in this device's part of the vocabulary."""
    local_bs1 = (targets - par.index("vocab v") * logits.shape[-1])[..., None]
    is_target_bsv = jax.lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[-1]), 2) == local_bs1
    return jnp.where(is_target_bsv, logits, 0).sum(-1)


# ------------------------------------------------------------------------------------------------------- RoPE


def rope_table(config: ModelConfig, positions_bp: Int[Array, "b p"]) -> Rope:
    """Return cosines and sines of the rotary embedding at true positions (Su et al. 2021)."""
    frequencies = jnp.asarray(rope_frequencies(config), jnp.float32)[None, None]
    angles = positions_bp[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]


def rope_frequencies(config: ModelConfig) -> Float[np.ndarray, " half"]:
    """Return radians per position of each pair, with Llama 3.1's scaling where it is set. A frequency whose
    wavelength is at most original_context / high_freq_factor stays; one whose wavelength is at least
    original_context / low_freq_factor is divided by ``factor``; between them the two are blended (Llama 3.1
    reference configuration, 2024)."""
    frequency = config.rope_theta ** (-np.arange(0, config.head_width, 2) / config.head_width)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    num_turns = scaling.original_context * frequency / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = np.clip((num_turns - low) / (high - low), 0, 1)
    return frequency * (blend + (1 - blend) / scaling.factor)


def nan_in_broken_rows(rope: Rope, is_right_b: Bool[Array, " b"]) -> Rope:
    """Return the table with NaN for rows that break what attention relies on (`attention.as_promised`). Such
    a row, which only a batch made by hand has, then gives NaN and no plausible number."""
    cos, sin = rope
    return jnp.where(is_right_b[:, None, None, None], cos, jnp.nan), sin


def rotate(x: Float[Array, "b s heads h"], rope: Rope) -> Float[Array, "b s heads h"]:
    """Rotate the pairs (i, i + h/2) of each head by their angles, in float32: Hugging Face's order."""
    cos, sin = rope
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
