"""An independent Llama in float64, written from the papers with nothing of llmpar: what all plans are held
against.

Weights are flat: {"embedding", "norm.scale", "head", "blocks.attention.q", …}, blocks stacked over layers.
``c`` is anything with the fields of a model's configuration, read by name. One device, whole rows, no loss of
precision, no cleverness.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np


def frequencies(c):
    """Radians per position of each pair; Llama 3.1's code, wavelength by wavelength."""
    out = []
    for i in range(c.head_width // 2):
        w, s = c.rope_theta ** (-2 * i / c.head_width), c.rope_scaling
        if s is not None and 2 * math.pi / w >= s.original_context / s.high_freq_factor:
            turns = s.original_context * w / (2 * math.pi)
            smooth = max(0.0, (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor))
            w = (1 - smooth) * w / s.factor + smooth * w
        out.append(w)
    return np.array(out)


def norm(x, scale, c):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps) * scale


def swiglu(x, gate, up, down):
    g = x @ gate
    return (g / (1 + jnp.exp(-g)) * (x @ up)) @ down


def attention(x, w, c, batch):
    q, k, v = (jnp.einsum("bsd,dnh->bsnh", x, w[f"attention.{i}"]) for i in "qkv")
    if c.qkv_bias:
        q, k, v = q + w["attention.q_bias"], k + w["attention.k_bias"], v + w["attention.v_bias"]
    if c.qk_norm:
        q, k = norm(q, w["attention.q_norm.scale"], c), norm(k, w["attention.k_norm.scale"], c)
    angles = batch["positions"][..., None, None] * frequencies(c)
    turn = lambda a, b: [a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)]
    q, k = (jnp.concatenate(turn(*jnp.split(x, 2, -1)), -1) for x in (q, k))
    k, v = (jnp.repeat(x, c.num_heads // c.num_kv_heads, 2) for x in (k, v))
    apart = batch["positions"][:, :, None] - batch["positions"][:, None, :]
    seen = (apart >= 0) & (batch["segments"][:, :, None] == batch["segments"][:, None, :])
    seen &= apart < (c.window or math.inf)
    scores = jnp.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(c.head_width)
    p = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), -1)
    return jnp.einsum("bnst,btnh,nhd->bsd", p, v, w["attention.o"])


def experts(x, w, how, pieces):
    """The layer's output; its router's loss per token, load, drops and entropy; and the closest call."""
    b, s, _ = x.shape
    logits = x @ w["experts.router"]
    score = jax.nn.softmax(logits, -1) if how.score == "softmax" else 1 / (1 + jnp.exp(-logits))
    favour = jax.lax.stop_gradient(score + (0 if how.bias_rate is None else w["experts.bias"]))
    gap = lambda x, k: (
        (ranked := -jnp.sort(-x, -1))[..., k - 1] - ranked[..., k] if k < x.shape[-1] else jnp.array(math.inf)
    )
    closest = math.inf
    if how.num_groups > 1:
        grouped = favour.reshape(b, s, how.num_groups, -1)
        worth = jnp.sort(grouped, -1)[..., -2:].sum(-1)
        closest = gap(worth, how.top_groups).min()
        best = jnp.argsort(jnp.argsort(-worth, -1), -1) < how.top_groups
        favour = jnp.where(best[..., None], grouped, -math.inf).reshape(b, s, -1)
    closest = jnp.minimum(closest, gap(favour, how.top_k).min())
    chosen = jnp.argsort(jnp.argsort(-favour, -1), -1) < how.top_k  # b s e
    weight = jnp.where(chosen, score, 0)
    weight = how.scale * (weight / weight.sum(-1, keepdims=True) if how.renormalise else weight)
    share = score / score.sum(-1, keepdims=True)
    loss = how.z_loss * jax.scipy.special.logsumexp(logits, -1) ** 2
    loss += how.aux_loss * how.num_experts / how.top_k / s * (share * chosen.sum(1)[:, None]).sum(-1)
    kept = chosen
    for piece in (
        np.unique(pieces) if how.capacity_factor is not None else ()
    ):  # what one device holds of a row
        here = (pieces == piece)[..., None]
        room = math.ceil(round(how.top_k * here.sum(-2).max() * how.capacity_factor / how.num_experts, 9))
        kept &= ~here | (jnp.cumsum(chosen & here, 1) <= room)
    each = jax.vmap(swiglu, (None, 0, 0, 0), -1)(x, w["experts.gate"], w["experts.up"], w["experts.down"])
    y = (each * jnp.where(kept, weight, 0)[:, :, None]).sum(-1)
    if how.num_shared:
        y += swiglu(x, *(w[f"experts.shared.{n}"] for n in ("gate", "up", "down")))
    entropy = -(share * jnp.log(share)).sum()
    told = {
        "load": chosen.sum((0, 1)),
        "dropped": (chosen & ~kept).sum(),
        "router_entropy": entropy,
        "closest": closest,
    }
    return y, loss, told


def merged(weights, c):
    """The weights with their adapters in them: W + A B alpha / rank."""
    product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1) * c.lora.alpha / c.lora.rank)
    rows = {p[:-2].replace(".lora", ""): p for p in weights if p.endswith("_a")}
    more = {path: weights[path] + product(weights[a], weights[a[:-1] + "b"]) for path, a in rows.items()}
    return weights | more


def loss(weights, batch, c, pieces):
    """The mean over targets (-1: none) of cross-entropies and routers' losses; what the routers told."""
    counted, weights = batch["targets"] >= 0, merged(weights, c)

    def block(carry, w):
        (x, extra), told = carry, {}
        x = x + attention(norm(x, w["attention_norm.scale"], c), w, c, batch)
        y = norm(x, w["ffn_norm.scale"], c)
        if c.experts:
            y, more, told = experts(y, w, c.experts, pieces)
            extra += jnp.where(counted, more, 0).sum()
        else:
            y = swiglu(y, w["ffn.gate"], w["ffn.up"], w["ffn.down"])
        return (x + y, extra), told

    layers = {path.removeprefix("blocks."): w for path, w in weights.items() if path.startswith("blocks.")}
    (x, extra), told = jax.lax.scan(block, (weights["embedding"][batch["tokens"]], 0.0), layers)
    logits = norm(x, weights["norm.scale"], c) @ weights["embedding" if c.tied else "head"].T
    target = jnp.take_along_axis(logits, jnp.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    nats = jnp.where(counted, jax.scipy.special.logsumexp(logits, -1) - target, 0).sum()
    return (nats + extra) / jnp.maximum(counted.sum(), 1), told


class Trainer:
    """Clips by the global norm, then SGD with momentum or AdamW, by hand; routers' biases by their rule."""

    def __init__(self, weights, c, rule, clip=None, pieces=None):
        self.weights = {k: np.asarray(w, np.float64) for k, w in weights.items()}
        self.c, self.rule, self.clip, self.pieces, self.steps = c, rule, clip, pieces, 0
        self.first, self.second = ({k: np.zeros_like(w) for k, w in self.weights.items()} for _ in range(2))
        self.run = None

    def gradients(self, batch):
        """Loss, gradients, and what the routers told, at the weights of the moment."""
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            given = self.weights, {k: np.asarray(x, np.int64) for k, x in batch.items()}
            if self.run is None:
                pieces = np.zeros(batch["tokens"].shape[1], int) if self.pieces is None else self.pieces
                f = jax.value_and_grad(lambda w, batch: loss(w, batch, self.c, pieces), has_aux=True)
                self.run = jax.jit(f).lower(*given).compile()
            (value, told), grads = jax.tree.map(np.asarray, self.run(*given))
        learned = {k: g for k, g in grads.items() if ".lora." in k}
        return float(value), learned if self.c.lora else grads, told

    def step(self, batch):
        """Loss, global norm, clipped gradients, and what the routers told, before the weights change."""
        value, grads, told = self.gradients(batch)
        size = math.sqrt(sum((g * g).sum() for g in grads.values()))
        scale = 1.0 if self.clip is None else min(1.0, self.clip / max(size, 1e-12))
        grads, rule = {k: g * scale for k, g in grads.items()}, self.rule
        self.steps += 1
        for k, g in grads.items():
            self.first[k] = rule["b1"] * self.first[k] + (
                g if rule["kind"] == "sgd" else (1 - rule["b1"]) * g
            )
            move = self.first[k]
            if rule["kind"] == "adamw":
                self.second[k] = rule["b2"] * self.second[k] + (1 - rule["b2"]) * g * g
                corrected = self.second[k] / (1 - rule["b2"] ** self.steps)
                move = move / (1 - rule["b1"] ** self.steps) / (np.sqrt(corrected) + rule["eps"])
                move = move + rule["decay"] * self.weights[k]
            if k == "blocks.experts.bias":
                load = told["load"]
                move = -self.c.experts.bias_rate / rule["rate"] * np.sign(load.mean(1, keepdims=True) - load)
            self.weights[k] = self.weights[k] - rule["rate"] * move
        return value, size, grads, told
