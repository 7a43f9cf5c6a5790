"""Llama-family models. The code names dims, never mesh axes: read it as if there were
one device.

Six terms are needed to read it:

    region    a part of the model in which each dim is cut in one way: data, stream, attention, ffn, vocab …
    arrow     ``stream b s d -> ffn b s d``: a value with the dims b s d moves from one region to another
    +m        in a layout, a sum over m that is not finished: along each
              mesh axis that cuts m in this region a device has a term.
              With +m on both sides an arrow finishes the sum over those
              axes that cut m before it and not after it: none, some, or all
              (with tp_dispatch tp cuts m in ffn and not in tokens, so that
              ``ffn b s d +m -> tokens b s d +m`` sums over tp)
    par       the object that moves values. ``par.move`` carries out an
              arrow. ``par.weight`` returns a weight ready for a matmul.
              ``par.move_matmul`` is a move and the matmuls after it,
              ``par.matmul_move`` a matmul and the move after it: one call,
              so that a ring may send one block while it multiplies another.
              ``par.summed(f, layouts, arrow)`` and ``par.local(f, …)``
              return functions. The first calls f for a device's term of a
              sum, which the arrow then finishes; the second runs f on each
              device's own blocks. `llmpar.parallel.modes` lists the rest
    used_weights   ``par.weight`` of several weights, in a form that
              `matmul` takes: an array, or an object with LoRA adapters
              or in float8
    mode      the class of ``par`` (see :mod:`llmpar.parallel.modes`). With `Solo`, one device, nothing moves

With `Solo` the model below is the plain Llama of Touvron et al. 2023 with grouped-query
attention, RoPE and SwiGLU. Other families add parts. A block has such a part if
`ModelConfig.block_weights` lists its weights (biases, more norms, experts, latent
attention, sinks) or if a field of `Variant` is set (caps, scales).

The methods of `Llama` compute the loss of a training step. Each calls those that are
indented below it:

    loss                      the sum of the targets' cross-entropies and of the routers' own losses
      cross_entropies         of each target, from the last hidden state and the output head
        hidden_and_head       embed, then run_blocks, then the last norm
          run_blocks          Block after Block: attention and feed-forward (or experts)
      router_losses           summed over the tokens that have a target
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from llmpar.kernels import grouped
from llmpar.model import attention, gated_delta, moe
from llmpar.model.attention import Ids
from llmpar.model.lora import adapt, used_weights
from llmpar.model.rope import Rope, rope_table, rotate
from llmpar.parallel.collective_matmul import matmul
from llmpar.parallel.collectives import at, vary_alike
from llmpar.parallel.modes import Solo
from llmpar.parallel.remat import OUT, PROJECTED, STREAM
from llmpar.plan.model_config import ModelConfig, Variant, Weight
from llmpar.plan.places import LayerLoop

Stream = Float[Array, "b s d"]
Tree = Any
"""A nested dict like the model's, of its arrays or of something for each of them: a layout, a shape."""
Batch = dict[str, jax.Array]
"""The input of a step, each ``b s`` int32: tokens, targets (below 0: not counted), positions, segments
(the number of each token's document). The loss is NaN if positions and segments of a row are not in the order
that attention relies on (`attention.ids_are_valid`). A batch for reinforcement learning has ``advantages``
and ``logprobs``, float32, too (`clipped_surrogate`)."""
# The auxiliary outputs of a router (`moe.route`); None without experts.
Aux = dict[str, Array] | None
# The loss summed over tokens, and the routers' tally, ``l (e+2)``: for each layer with experts how many
# tokens chose each expert, the dropped choices, the sum of entropies (`moe.route`); None without experts.
LossAndTally = tuple[Float[Array, ""], Float[Array, "l _"] | None]


Params = dict[str, nnx.Param]
"""The parameters of a block, from path in the block to parameter (`ModelConfig.block_weights`)."""
MATRICES = "gate", "up", "down"
"""The matrices of a feed-forward."""


def param(rngs: nnx.Rngs, weight: Weight) -> nnx.Param:
    """Make a parameter with initial values. Its ``dims`` are its region and dims, such as ``ffn d m``."""
    value = jnp.full(weight.shape, weight.fill)
    if weight.std:
        value = weight.std * jax.random.normal(rngs.params(), weight.shape)
    return nnx.Param(value, dims=weight.dims)


def scaled_by(x: Array, factor: float) -> Array:
    """Return ``x`` times a factor, in the dtype of ``x``; for the factor 1 return ``x`` itself."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def unit(x: Float[Array, "*dims d"], eps: float) -> Float[Array, "*dims d"]:
    """Divide by the root mean square over the last dim, in float32."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype)


class Norm(nnx.Module):
    """Divide by the root mean square, in float32 (Zhang & Sennrich 2019), or normalise to mean 0 and
    standard deviation 1 (Ba et al. 2016); then multiply by a scale, to which `Variant.norm_offset` is
    added."""

    def __init__(self, scale: nnx.Param, eps: float, variant: Variant):
        self.scale, self.eps, self.variant = scale, eps, variant
        # of the whole scale: when the norm is called, a device may have a part of it
        self.size = math.prod(scale.shape)

    @jax.named_scope("norm")
    def __call__(
        self, x: Float[Array, "*dims d"], par: Solo, heads: str = ""
    ) -> Float[Array, "*dims d"]:
        """Return the normed value. The mean square is over the last dim. If ``heads`` is n or k, it is over
        this dim of heads, too, and ranks that have different heads sum their parts."""
        x32 = x.astype(jnp.float32)
        if self.variant.norm == "layer":
            x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        if heads:
            term = lambda par, x: (x * x).sum((-2, -1)) / self.size
            finish = f"attention b s +{heads} -> attention b s"
            # `summed` returns a function, whose argument is x32
            mean_square_bs = par.summed(term, [f"attention b s {heads} h"], finish)(x32)
            x32 = x32 * jax.lax.rsqrt(mean_square_bs[..., None, None] + self.eps)
        else:
            x32 = unit(x32, self.eps)
        offset = self.variant.norm_offset
        times = lambda x, scale: x * (scale + offset) if offset else x * scale
        return par.with_weight(times, x32.astype(x.dtype), self.scale)


class Part(nnx.Module):
    """A block, or a part of it. Its attributes are the parameters directly under its
    path: in ``attention`` the parameter ``attention.q`` is ``q``, and
    ``attention.q_norm.scale`` is in the `Norm` ``q_norm``. A weight that only some
    models have is None in the others."""

    eps: float | None = None  # the epsilon of its norms; None: ``norm_eps`` of the model

    def __init__(self, config: ModelConfig, params: Params, path: str):
        self.config = config
        # attention.q has the parent attention and the name q; attention.q_norm.scale has the name q_norm
        for weight_path, weight in params.items():
            parent, _, name = weight_path.removesuffix(".scale").rpartition(".")
            if parent != path:
                continue
            if weight_path.endswith(".scale"):
                setattr(self, name, Norm(weight, self.eps or config.norm_eps, config.variant))
            else:
                setattr(self, name, weight)
        adapt(self, params, path)  # its LoRA weights, if it has any

    def bias_of(self, name: str) -> nnx.Param | None:
        """Return what is added to a matmul with the matrix of this name; None in most models."""
        return getattr(self, f"{name}_bias", None)


class Attention(Part):
    """Grouped-query attention (Ainslie et al. 2023): n = k·r query heads share k KV heads."""

    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks: nnx.Param | None = None
    gate: nnx.Param | None = None

    @jax.named_scope("attention")
    def __call__(self, x: Stream, ids: Ids, rope: Rope, par: Solo) -> Stream:
        config, variant = self.config, self.config.variant
        names = ["q", "k", "v"] if self.gate is None else ["q", "k", "v", "gate"]
        biases = [self.bias_of(name) for name in names]
        weights = used_weights(self, par, *names)
        arrow = "stream b s d -> attention b s d"
        q_bsnh, k_bskh, v_bskh, *gates = par.move_matmul(x, arrow, *weights, biases=biases)
        if self.q_norm and self.k_norm:
            over_all = variant.qk_norm == "all"
            q_bsnh = self.q_norm(q_bsnh, par, "n" if over_all else "")
            k_bskh = self.k_norm(k_bskh, par, "k" if over_all else "")
        # With rope "none" nothing is rotated: sin is 0, and cos is 1, or with
        # `Variant.query_scale` a factor that grows with a query's position
        # (`rope_table`). `rotate` multiplies queries by it; keys have none.
        q_bsnh = rotate(q_bsnh, rope, variant.rope)
        k_bskh = k_bskh if variant.rope == "none" else rotate(k_bskh, rope, variant.rope)
        if variant.qk_norm == "rotated":  # a norm without a scale, after the rotation
            q_bsnh, k_bskh = (unit(y, config.norm_eps) for y in (q_bsnh, k_bskh))
        b, s, k, h = k_bskh.shape
        if variant.score_scale:  # every kernel divides scores by the root of h
            q_bsnh = scaled_by(q_bsnh, variant.score_scale * h**0.5)
        q_bskrh = q_bsnh.reshape(b, s, k, -1, h)
        sinks_kr = None if self.sinks is None else par.weight(self.sinks).reshape(k, -1)
        if par.cache:  # when serving, `par` also stores keys and values
            y_bskrh = par.cache.attend(
                q_bskrh, k_bskh, v_bskh, ids.q_positions, config.mask, sinks_kr
            )
        else:
            arrow = "attention b s k h -> keys b s k h"
            k_btkh, v_btkh = par.move(k_bskh, arrow), par.move(v_bskh, arrow)
            y_bskrh = attend_sharded(q_bskrh, k_btkh, v_btkh, ids, config.mask, par, sinks_kr)
        if gates:
            y_bskrh = y_bskrh * jax.nn.sigmoid(gates[0]).reshape(y_bskrh.shape)
        return self.to_stream(y_bskrh, par)

    def to_stream(self, y: Float[Array, "b _ *heads w"], par: Solo) -> Stream:
        """Multiply the heads' results by the output matrix, and finish the sum over heads. The dim `_` has a
        device's positions in the region attention; with tp_sequence the result has 1/tp of them."""
        (o_nhd,) = used_weights(self, par, "o")
        y_bsnh = y.reshape(*y.shape[:2], -1, y.shape[-1])
        y = par.matmul_move(y_bsnh, o_nhd, "attention b s d +n -> stream b s d")
        return par.plus(y, self.bias_of("o"))


class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2 2024, section 2.1). A token has one latent of width c and one
    rotary key of width r, and all heads compute their keys and values from these. So only c + r numbers per
    token are moved between ranks, or kept in a cache. (In this class c and r are these widths.)"""

    kv_norm: Norm
    kv_up: nnx.Param
    eps = 1e-6  # of its own norms; other norms use ``norm_eps``

    @jax.named_scope("attention")
    def __call__(self, x: Stream, ids: Ids, rope: Rope, par: Solo) -> Stream:
        """Return attention's result. Latents are moved to the region of keys, and only then expanded to keys
        and values of each head (`expanded`). A cache stores the latents."""
        config, r = self.config, 2 * rope[0].shape[-1]  # the table has one angle for two numbers
        x = par.move(x, "stream b s d -> attention b s d")
        if self.q_norm:  # queries are computed from a latent, too
            q_latent = self.q_norm(self.projected("q_down", x, par), par)
            q_bsnh = self.projected("q_up", q_latent, par)
        else:
            q_bsnh = self.projected("q", x, par)
        rotated = lambda y: rotate(y, rope, config.variant.rope)
        if scale := config.variant.score_scale:  # every kernel divides scores by the root of h
            q_bsnh = scaled_by(q_bsnh, scale * config.head_width**0.5)
        q_bsnh = jnp.concatenate([q_bsnh[..., :-r], rotated(q_bsnh[..., -r:])], axis=-1)
        down = self.projected("kv_down", x, par)  # b s (c + r)
        latent_bsc = self.kv_norm(down[..., :-r], par)
        shared_bsr = rotated(down[..., None, -r:])[..., 0, :]
        latent = jnp.concatenate([latent_bsc, shared_bsr], axis=-1)  # b s (c + r)
        if par.cache:
            up = par.weight(self.kv_up)
            y_bsnh = par.cache.attend_latents(q_bsnh, latent, up, config, ids.q_positions)
        else:
            y_bsnh = self.expanded(q_bsnh, latent, ids, par)
        return self.to_stream(y_bsnh, par)

    def projected(self, name: str, x: Array, par: Solo) -> Array:
        """Multiply by one of the matrices, and add its bias, if it has one."""
        (weight,) = used_weights(self, par, name)
        y = checkpoint_name(matmul(x, weight), PROJECTED)
        return par.plus(y, self.bias_of(name))

    def expanded(
        self, q: Float[Array, "b s n h"], latent: Float[Array, "b s _"], ids: Ids, par: Solo
    ) -> Float[Array, "b s n w"]:
        """Move the latents to the region of keys, expand them to each head's keys and values, and attend.
        ``latent`` has both parts, c + r numbers; the arrow has one letter for this dim, c."""
        # Every query head has keys of its own: there are n KV heads, each with one query head. So queries
        # are b s n 1 h below.
        num_latent, mask = self.kv_norm.size, self.config.mask  # the norm has a scale for each of c
        # no Ulysses: a latent has no heads (`checks` refuses it)
        latent = par.move(latent, "attention b s c -> keys b s c")
        if par.axes("keys s"):  # a ring, which expands what each rank receives
            # `par.weight` is enough: this matrix never has a bias or adapters (`ADAPTABLE`), and `checks`
            # refuses float8 here
            args = q[..., None, :], latent[:, :, None], par.weight(self.kv_up), ids, mask, par
            kv_layouts = (
                "keys b s z c",  # z: one head for all; c: the latent and the rotary key together
                "attention c n h",  # c: the latent; h: a head's own part of the key, then its value
            )
            return attend_sharded(*args, kv_layouts=kv_layouts)[..., 0, :]
        kv_btnh = self.projected("kv_up", latent[..., :num_latent], par)
        kv = attention.keys_and_values(kv_btnh, latent[..., None, num_latent:], q.shape[-1])
        return attend_sharded(q[..., None, :], *kv, ids, mask, par)[..., 0, :]


class GatedDelta(Attention):
    """A gated delta net: each head has a state in place of keys and values (`llmpar.model.gated_delta`). Of
    `Attention` it uses `to_stream`."""

    out_norm: nnx.Param

    @jax.named_scope("gated_delta")
    def __call__(self, x: Stream, ids: Ids, rope: Rope, par: Solo) -> Stream:
        arrow = "stream b s d -> attention b s d"
        names = "q", "k", "v", "z", "b", "a"  # checkpoints call the gate z, rate b, forget a
        weights = used_weights(self, par, *names)
        # the gate multiplies the result; rate and forget, of each token, are for the update of the state
        q, k, v, gate, rate, forget = par.move_matmul(x, arrow, *weights)
        values = q, k, v, rate, forget
        inner_names = "q_conv", "k_conv", "v_conv", "A_log", "dt_bias"
        inner = [par.weight(getattr(self, name)) for name in inner_names]
        if par.cache:
            y = par.cache.resume(ids.q_positions, values, inner)
        else:
            # n has two sizes, and tp cuts both: key heads in q, k and their
            # convolutions; value heads in the rest and in the result.
            # u is a dim of 1, t counts taps of a convolution (`layout.DIMS`).
            layouts = [
                *["attention b s n h"] * 3,  # q k v
                *["attention b s n"] * 2,  # rate, forget
                *["attention n h u t"] * 3,  # the convolutions
                *["attention n"] * 2,
                *["ids b s"] * 2,  # of whole rows: a document may begin on another rank
            ]
            mix = par.local(functools.partial(gated_delta.mix, par.island), layouts, layouts[0])
            y = mix(*values, *inner, ids.k_positions, ids.k_segments)
        y = unit(checkpoint_name(y, OUT), self.config.norm_eps)
        y = par.with_weight(lambda y, scale: y * scale, y, self.out_norm)
        y = y * jax.nn.silu(gate.astype(jnp.float32)).astype(y.dtype)
        return self.to_stream(y, par)


def attend_sharded(
    q: Float[Array, "b s k r h"],
    k_or_latents: Float[Array, "b t _ h"] | attention.Latents,
    v_or_up: Float[Array, "b t _ w"] | attention.Up,
    ids: Ids,
    mask: attention.Mask,
    par: Solo,
    sinks: Float[Array, "k r"] | None = None,
    kv_layouts: tuple[str, str] = ("keys b s k h",) * 2,
) -> Float[Array, "b s k r w"]:
    """Move queries to the region ``queries``, attend, and move the result back.
    The caller has moved keys and values to the region ``keys``, where with
    Ulysses they have fewer heads (hence ``_``) than ``q`` has before it is
    moved below. For latent attention in a ring the two
    arguments are latents and ``up``, the matrix that makes keys and values
    of them (only the latents travel).
    ``kv_layouts`` are the layouts of these two arguments. ``sinks``: for
    each head the logit of one more key, whose value is 0 (gpt-oss).
    (Layouts write s for the positions of keys, shapes t.)

    `Plan.context_parallel` decides how the regions queries and keys are cut, and so what arrows to these
    regions move (the caller has moved the keys):

        ring       nothing: keys are sent during attention
        ulysses    an all-to-all: each rank gets all positions of some heads, instead of all heads of some
                   positions. (Where ranks of tp have copies of a KV head, a
                   rank has one KV head, which cannot be cut: keys are
                   all-gathered, and query heads are cut)
        gather     keys: each rank gets all of them
        usp        as ulysses within a group of ranks; the groups form a ring
    """
    q = par.move(q, "attention b s k r h -> queries b s k r h")
    q_layout = "queries b s k r h"
    ids_layouts = Ids("queries b s", "queries b s", "ids b s", "ids b s")  # type: ignore[arg-type]
    args, layouts = [q, k_or_latents, v_or_up, ids], [q_layout, *kv_layouts, ids_layouts]
    if sinks is not None:
        args.append(par.move(sinks, "attention k r -> queries k r"))
        layouts.append("queries k r")
    attend_by_plan = functools.partial(attention.attend_by_plan, par, mask)
    y = par.local(attend_by_plan, layouts, q_layout)(*args)
    return par.move(y, "queries b s k r h -> attention b s k r h")


class FeedForward(Part):
    """A gated feed-forward: SwiGLU (Shazeer 2020), or with another activation."""

    @jax.named_scope("feed_forward")
    def __call__(
        self,
        x: Stream,
        par: Solo,
        before: str = "stream b s d -> ffn b s d",
        after: str = "ffn b s d +m -> stream b s d",
    ) -> Stream:
        """Run three matmuls. The arrow ``before`` moves ``x`` to them. The arrow ``after``
        finishes the sum over m, or leaves it to the caller. With a bias of ``down`` it must
        finish it: else each rank of tp would add this bias to its term of the sum. (So
        `ModelConfig` refuses this bias in a shared expert.)"""
        gate, up, down = used_weights(self, par, *MATRICES)
        # Biases are fetched here: `feed_forward` runs for each piece of the sequence (ffn_chunks), and with
        # `reduce="layer"` their gradients would be summed over devices once for each piece.
        given = map(self.bias_of, ("gate", "up"))
        biases = [None if bias is None else par.weight(bias) for bias in given]

        def feed_forward(x_bsd):
            gate_bsm, up_bsm = par.move_matmul(x_bsd, before, gate, up, biases=biases)
            hidden_bsm = grouped.gated(self.config.variant, gate_bsm, up_bsm)
            return par.matmul_move(hidden_bsm, down, after)

        y = par.chunked(feed_forward, x, par.plan.ffn_chunks)
        return par.plus(y, self.bias_of("down"))


class Experts(Part):
    """A mixture of experts (Shazeer et al. 2017): a router chooses k of E feed-forwards for each token."""

    router: nnx.Param
    # the router's own bias (`bias_of`) is learned by gradients; this one balances the load of experts by a
    # rule (`Step._balance_experts`)
    bias: nnx.Param | None = None
    shared_gate: nnx.Param | None = None

    def __init__(self, config: ModelConfig, params: Params):
        super().__init__(config, params, "experts")
        assert config.experts
        if config.experts.num_shared:
            self.shared = FeedForward(config, params, "experts.shared")

    @jax.named_scope("experts")
    def __call__(self, x: Stream, par: Solo) -> tuple[Stream, Aux]:
        """Return the sum of the chosen experts, weighted by the router, and of the shared ones; and the
        router's outputs."""
        assert (experts := self.config.experts)
        logits_bse = jnp.einsum(
            "bsd,de->bse", x, par.weight(self.router), preferred_element_type=jnp.float32
        )
        logits_bse = par.plus(logits_bse, self.bias_of("router"))
        bias = []  # the optional argument of `moe.route`: no bias, or one
        if self.bias is not None:
            constant = self.bias.replace(jax.lax.stop_gradient(self.bias[...]))
            bias = [par.weight(constant)]
        # `moe.route` returns the router's weights and the indices of the k
        # experts of each token. Layouts have no letter for chosen experts (k
        # is KV heads), so the last dim is e throughout: all E experts in the
        # arguments, k in the first two results, E + 2 entries in the tally.
        route = par.local(
            functools.partial(moe.route, experts, par.island),
            ["stream b s e", *["stream e"] * len(bias)],
            ("stream b s e", "stream b s e", {"loss": "stream b s", "tally": "stream e +b +s"}),
        )
        weights_bsk, chosen_bsk, aux = route(logits_bse, *bias)
        x = par.move(x, "stream b s d -> tokens b s d")
        choices = (par.move(y, "stream b s e -> tokens b s e") for y in (weights_bsk, chosen_bsk))
        # in the order of `grouped.Weights`
        biases = map(self.bias_of, MATRICES)
        weights = [getattr(self, name) for name in MATRICES]
        weights += [own for own in biases if own is not None]
        visit = par.local(
            functools.partial(moe.visit_experts, experts, par.island, variant=self.config.variant),
            ["tokens b s d", "tokens b s e", "tokens b s e", *(w.dims for w in weights)],
            "tokens b s d +m",
        )
        y = visit(x, *choices, *map(par.weight, weights))
        if experts.num_shared:
            # The move of ``shared`` to tokens changes nothing, and the last
            # arrow of this method finishes its sum over m together with that
            # of the routed experts. But with tp_dispatch tp cuts m in ffn and
            # not in tokens, and the move is a reduce-scatter over tp.
            x = par.move(x, "tokens b s d -> ffn b s d")
            shared = self.shared(x, par, "ffn b s d -> ffn b s d", "ffn b s d +m -> ffn b s d +m")
            if self.shared_gate is not None:
                shared = shared * jax.nn.sigmoid(matmul(x, par.weight(self.shared_gate)))
            y = y + par.move(shared, "ffn b s d +m -> tokens b s d +m")
        return par.move(y, "tokens b s d +m -> stream b s d"), aux


class Block(Part):
    """One layer: attention, then feed-forward or experts, each added to the residual stream. Each has a norm
    of its input, of its result, or both. If ``attention_norm`` is the only norm, attention and feed-forward
    are parallel: both read the normed input."""

    attention_norm: Norm | None = None
    attention_post_norm: Norm | None = None
    ffn_norm: Norm | None = None
    ffn_post_norm: Norm | None = None

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        params = {path: param(rngs, row) for path, row in config.block_weights().items()}
        super().__init__(config, params, "")
        if config.mixer == "recurrent":
            self.mixer = GatedDelta(config, params, "mixer")
        else:
            kind = LatentAttention if config.has_latent_attention else Attention
            self.attention = kind(config, params, "attention")
        if config.experts:
            self.experts = Experts(config, params)
        else:
            self.ffn = FeedForward(config, params, "ffn")

    def __call__(self, x: Stream, ids: Ids, rope: Rope, par: Solo) -> tuple[Stream, Aux]:
        """Return the stream after the layer, and its router's outputs."""
        normed = lambda norm, x: norm(x, par) if norm else x
        mix = self.mixer if self.config.mixer == "recurrent" else self.attention
        to_mix = normed(self.attention_norm, x)
        x = self.added(x, mix(to_mix, ids, rope, par), self.attention_post_norm, par)
        if self.config.reads_one_norm:
            to_ffn = to_mix
        else:
            # remat saves what is named STREAM: `added` names what goes into a
            # post_norm; a block without an attention_post_norm names x here
            if not self.attention_post_norm:
                x = checkpoint_name(x, STREAM)
            to_ffn = normed(self.ffn_norm, x)
        if self.config.experts:
            y, aux = self.experts(to_ffn, par)
        else:
            y, aux = self.ffn(to_ffn, par), None
        return self.added(x, y, self.ffn_post_norm, par), aux

    def added(self, x: Stream, y: Stream, norm: Norm | None, par: Solo) -> Stream:
        """Return ``x`` plus a result ``y``, which is normed first if the block has this norm, and multiplied
        by `Variant.residual_scale`."""
        if norm:
            y = norm(checkpoint_name(y, STREAM), par)
        return x + scaled_by(y, self.config.variant.residual_scale)


def stacked_blocks(config: ModelConfig, count: int, rngs: nnx.Rngs) -> Block:
    """Return ``count`` blocks as one, made with different random keys, their weights stacked along l."""
    make = nnx.vmap(lambda keys: Block(config, keys), in_axes=0, out_axes=0)
    return nnx.split_rngs(splits=count)(make)(rngs)


class Llama(nnx.Module):
    """Embedding, blocks, a norm, an output head, and the loss. The weights of all layers of one kind are
    stacked along a leading dim ``l``."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        weights = config.must_run().weights()  # refuses models that are only planned
        self.embedding = param(rngs, weights["embedding"])
        # for each kind of layers their number and the config of such a layer; `kinds` is empty if all
        # layers are alike
        stacks = [stacked_blocks(kind, count, rngs) for count, kind in config.blocks]
        self.blocks: Any = (
            nnx.Dict({f"{i}": x for i, x in enumerate(stacks)}) if config.kinds else stacks[0]
        )
        self.norm = Norm(param(rngs, weights["norm.scale"]), config.norm_eps, config.variant)
        if not config.tied:
            self.head = param(rngs, weights["head"])
        self.config = config

    def loss(self, batch: Batch, par: Solo) -> LossAndTally:
        """Return the sum of the cross-entropies and of the routers' own losses, which `Step` divides by the
        number of targets; and the routers' tally."""
        losses, aux = self.cross_entropies(batch, par)
        loss = par.total(losses, "data b s")
        if aux is None:
            return loss, None
        of_routers = self.router_losses(aux["loss"].sum(0), batch, par)
        # +s: over sp each device still has a term
        return loss + par.total(of_routers, "data b +s"), aux["tally"]

    def cross_entropies(self, batch: Batch, par: Solo) -> tuple[Float[Array, "b s"], Aux]:
        """Return the cross-entropy of each target, in nats and float32, 0 for a target below 0; and the
        routers' outputs, layer by layer. For a batch with ``advantages`` return its `clipped_surrogate` in
        place of cross-entropies.

        Where tp cuts the vocabulary, devices reduce three numbers per token: the maximum of its logits, the
        sum of exponentials, the target's logit. Logits are never gathered (Shoeybi et al. 2019, section 3).
        """
        x, head_vd, aux = self.hidden_and_head(batch, par)
        x = par.move(x, "stream b s d -> vocab b s d")
        finish = "vocab b s +v -> data b s"

        @jax.named_scope("loss")
        def losses(inputs):
            x_bsd, targets_bs = inputs
            # Rounding the gradient of the logits before the matmuls of the backward pass makes them faster,
            # but not on TPUs: a TPU's matmul rounds its inputs anyway, so a rounded copy only costs memory.
            multiply = logits_of if par.plan.platform == "tpu" else logits_with_rounded_grad
            # The type of a value says along which mesh axes it may differ between devices, and a
            # custom gradient must have the type of its argument. The gradients of x and of head
            # depend on both, so x and head must vary over the same axes. The move above and
            # `par.weight` have cast both to vary over those of the region vocab; the transposes of
            # these casts sum their gradients. One of them may vary over further axes: `vary_alike`
            # gives these to the other.
            logits_bsv = multiply(*vary_alike((x_bsd, head_vd)))
            logits_bsv = attention.capped(logits_bsv, self.config.variant.logit_cap)
            logits_bsv = logits_bsv - par.max(logits_bsv.max(-1), finish)[..., None]
            sum_exp = lambda par, x: jnp.exp(x).sum(-1)
            total_bs = par.summed(sum_exp, ["vocab b s v"], finish)(logits_bsv)
            of_targets = par.summed(target_logits, ["vocab b s v", "data b s"], finish)
            target_logit_bs = of_targets(logits_bsv, targets_bs)
            return jnp.where(targets_bs >= 0, jnp.log(total_bs) - target_logit_bs, 0)

        losses_bs = par.chunked(losses, (x, batch["targets"]), par.plan.loss_chunks, recompute=True)
        if "advantages" in batch:
            losses_bs = clipped_surrogate(losses_bs, batch)
        return losses_bs, aux

    def hidden_and_head(self, batch: Batch, par: Solo) -> tuple[Stream, Array, Aux]:
        """Return the residual stream after the last block and norm, the output head ``v d`` (the embedding
        once more, where they are tied), and the routers' outputs."""
        embedding = par.weight(self.embedding)
        head = embedding if self.config.tied else par.weight(self.head)
        # The model is a few loops over layers. Here `par.layers` runs each;
        # a pipeline gives `run_blocks` other functions to run them.
        loops = [(loop, par.layers) for loop in self.config.loops]
        x, aux = self.run_blocks(self.embed(embedding, batch, par), batch, par, loops)
        return self.before_head(x, par), head, aux

    def before_head(self, x: Stream, par: Solo) -> Stream:
        """Apply the last norm, and multiply by `Variant.logit_scale`."""
        return scaled_by(self.norm(x, par), self.config.variant.logit_scale)

    @jax.named_scope("embed")
    def embed(self, embedding: Float[Array, "v d"], batch: Batch, par: Solo) -> Stream:
        """Look up the embedding of each token. A device that has a block of the vocabulary contributes zeros
        for tokens outside it; the arrow sums over devices."""

        def look_up(par, embedding_vd, tokens_bs):
            local_bs = tokens_bs - par.index("vocab v") * embedding_vd.shape[0]
            known_bs = (0 <= local_bs) & (local_bs < embedding_vd.shape[0])
            return jnp.where(known_bs[..., None], embedding_vd[jnp.where(known_bs, local_bs, 0)], 0)

        summed = par.summed(look_up, ["vocab v d", "data b s"], "vocab b s d +v -> stream b s d")
        return scaled_by(summed(embedding, batch["tokens"]), self.config.variant.embedding_scale)

    def run_blocks(
        self, x: Any, batch: Batch, par: Solo, loops: Iterable[tuple[LayerLoop, Callable]]
    ) -> tuple[Any, Any]:
        """Run all blocks: return the stream after the last one, and the routers' outputs. Each of ``loops``
        is a loop over layers and the function that runs it, such as `par.layers`.

        A loop of ``kinds=(0, 0, 1), times=4`` has 4 iterations and 12 layers: an iteration runs two layers of
        kind 0, then one of kind 1. It uses the next 8 layers of the stack of kind 0, and the next 4 of
        kind 1."""
        blocks, stacks = self.blocks_by_kind(batch, par)
        outputs = list[Any]()
        done = Counter[int]()  # for each kind, how many layers have run
        for loop, run_layers in loops:
            kinds, times = loop.kinds, loop.times
            counts = Counter(kinds * times)  # layers of each kind in this loop
            weights = {kind: some_layers(stacks[kind], done[kind], n) for kind, n in counts.items()}
            if len(kinds) == 1:  # an iteration has the weights of one layer, which are not stacked
                nth: list[int | None] = [None]
            else:
                # the number of each layer among those of its kind: [0, 1, 0] for kinds (0, 0, 1)
                nth = [kinds[:i].count(kind) for i, kind in enumerate(kinds)]
                # l … -> iterations, layers of this kind in one iteration, …
                weights = {kind: par.periods(w, times) for kind, w in weights.items()}
            layers = [of_kind(blocks[kind], kind, n) for kind, n in zip(kinds, nth, strict=True)]
            x, aux = run_layers(layers, x, weights)
            if aux is not None:
                outputs.append(aux)
            done += counts
        joined = lambda *parts: jnp.concatenate(parts)
        return x, jax.tree.map(joined, *outputs) if outputs else None

    def blocks_by_kind(self, batch: Batch, par: Solo) -> tuple[list[Callable], list[Tree]]:
        """Return two lists, each with one item for each kind of layers. The first has its block, a function
        of the stream and of one layer's weights; the second has the stacked weights of its layers."""
        k_ids = [par.move(batch[x], "data b s -> ids b s") for x in ("positions", "segments")]
        # the line above gathers the ids of whole rows; those of the queries are a slice of them
        q_ids = [par.move(of_keys, "ids b s -> queries b s") for of_keys in k_ids]
        stacks = (
            [self.blocks[f"{i}"] for i in range(len(self.config.kinds))]
            if self.config.kinds
            else [self.blocks]
        )
        graphs, weights = zip(*map(nnx.split, stacks), strict=True)

        def block(graph: nnx.GraphDef, config: ModelConfig) -> Callable:
            is_valid_b = attention.ids_are_valid(par, config.mask, *k_ids)
            # LongRoPE chooses its angles by a row's length. None means short rows: when serving, longer ones
            # are refused (`serving_plan`).
            row_positions = None if par.cache else k_ids[0]
            cos, sin = rope_table(config, batch["positions"], row_positions)
            # A compiled step cannot raise: rows whose ids break what attention relies on get NaN angles, so
            # that the loss is NaN.
            rope = jnp.where(is_valid_b[:, None, None, None], cos, jnp.nan), sin
            ids = Ids(*q_ids, *k_ids)
            return lambda x, w: nnx.merge(graph, w)(x, ids, rope, par)

        configs = (config for _, config in self.config.blocks)
        return [*map(block, graphs, configs)], [*weights]

    @jax.named_scope("router_losses")
    def router_losses(
        self, loss: Float[Array, "b s"], batch: Batch, par: Solo
    ) -> Float[Array, " b"]:
        """Sum the routers' own losses of each row over its tokens that have a
        target. With tp_sequence, s is cut by sp and tp in the region stream,
        and by sp alone in data: the arrow finishes the sum over tp. `Step`
        finishes that over sp, as for the loss (`par.total`)."""
        counted = par.move(batch["targets"], "data b s -> stream b s") >= 0
        rows = par.summed(lambda par, x: x.sum(1), ["stream b s"], "stream b +s -> data b +s")
        return rows(jnp.where(counted, loss, 0))


def clipped_surrogate(losses: Float[Array, "b s"], batch: Batch) -> Float[Array, "b s"]:
    """Return -min(r A, clip(r, 0.8, 1.2) A) of each token (PPO, Schulman et al. 2017, eq. 7). A is its
    advantage, and r = exp(-loss - logprob) the ratio of its probability now to that when it was sampled.
    Where a target is below 0 the result is 0, whatever ``batch["advantages"]`` and ``batch["logprobs"]``
    have there."""
    ratio = jnp.exp(-losses - batch["logprobs"])
    return jnp.where(
        batch["targets"] >= 0,
        -jnp.minimum(ratio * batch["advantages"], jnp.clip(ratio, 0.8, 1.2) * batch["advantages"]),
        0,
    )


def of_kind(block: Callable, kind: int, nth: int | None = None) -> Callable:
    """Return a block that takes the weights of a whole iteration, a dict from kind to weights, and uses those
    of its ``kind``. Where an iteration has several layers, the weights of a kind are stacked, and this block
    uses the ``nth``."""
    return lambda x, w: block(x, w[kind] if nth is None else at(w[kind], nth))


def some_layers(stack: Tree, begin: int, length: int) -> Tree:
    """Return the weights of ``length`` layers of a stack, from the layer ``begin`` on."""
    return jax.tree.map(lambda w: lax.slice_in_dim(w, begin, begin + length), stack)


def logits_of(x: Float[Array, "*rows d"], head: Float[Array, "v d"]) -> Float[Array, "*rows v"]:
    """Return logits in float32, whatever the dtype of ``x`` and ``head``."""
    return jnp.einsum("...d,vd->...v", x, head, preferred_element_type=jnp.float32)


@jax.custom_vjp
def logits_with_rounded_grad(x, head):
    """Return `logits_of`, with gradients rounded to the dtype of ``x`` before they are multiplied: a GPU
    takes more than twice as long for matmuls of float32. In float32 the two matmuls of the
    backward pass took 15 % of a step of a 1B model on an H100 (`docs/accelerators.md`)."""
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
