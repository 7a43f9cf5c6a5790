"""An independent model in float64, written from the papers with nothing of llmpar: one device, whole rows.

Weights are flat by path, stacked over layers (of a kind: "blocks.0.attention.q"). ``c`` is anything with the
fields of a model's configuration; what a layer has is seen by its weights' names."""

import collections
import contextlib
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np


def frequencies(c, last=0):
    """Radians per position of each pair; for longrope of a row whose last position is ``last``."""
    width, s = c.variant.rope_width or c.head_width, c.rope_scaling
    w = np.array([c.rope_theta ** (-2 * i / width) for i in range(-(-width // 2))])
    if s is None:
        return w
    if s.kind == "linear":
        return w / s.factor
    if s.kind == "longrope":
        return w / np.array(s.long_factors if last + 1 > s.original_context else s.short_factors)
    if s.kind == "yarn":
        slow = yarn_ramp(width, c.rope_theta, s)
        return w * (1 - slow) + w / s.factor * slow
    turns = s.original_context * w / (2 * math.pi)
    if s.low_freq_factor == s.high_freq_factor:
        smooth = np.where(turns > s.low_freq_factor, 1.0, 0.0)
    else:
        smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    smooth = np.minimum(np.maximum(smooth, 0), 1)
    return (1 - smooth) * w / s.factor + smooth * w


def yarn_ramp(width, theta, s):
    """How much of each pair is slowed down: from 0 for many turns in the original context to 1 for few."""
    per_turn = s.original_context / (2 * math.pi)
    pair_of = lambda turns: width * math.log(per_turn / turns) / (2 * math.log(theta))
    first, last = pair_of(s.high_freq_factor), pair_of(s.low_freq_factor)
    if s.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    last += 0.001 * (first == last)
    return np.clip((np.arange(-(-width // 2)) - first) / (last - first), 0, 1)


def norm(x, scale, c, eps=None, axes=(-1,)):
    """Root mean square norm, or of what is left without the mean."""
    if c.variant.norm == "layer":
        x = x - x.mean(axes, keepdims=True)
    size = jnp.sqrt((x * x).mean(axes, keepdims=True) + (c.norm_eps if eps is None else eps))
    return x / size * (scale + c.variant.norm_offset)


def capped(x, cap):
    return x if cap is None else cap * jnp.tanh(x / cap)


def sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


def gated(gate, up, v):
    """What a feed-forward makes of its two inner products."""
    if v.activation == "clamped":
        gate, up = jnp.minimum(gate, v.clamp), jnp.clip(up, -v.clamp, v.clamp)
        return gate * sigmoid(1.702 * gate) * (up + 1)
    if v.activation == "gelu":
        return 0.5 * gate * (1 + jax.scipy.special.erf(gate / math.sqrt(2))) * up
    if v.activation == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + jnp.tanh(inner)) * up
    return gate * sigmoid(gate) * up


def feed_forward(x, w, c):
    product = lambda x, name: x @ w[name] + w.get(f"{name}_bias", 0)
    return product(gated(product(x, "gate"), product(x, "up"), c.variant), "down")


def matrices(w, part):
    """The weights of one of a layer's feed-forwards."""
    names = "gate", "up", "down", "gate_bias", "up_bias", "down_bias"
    return {name: w[f"{part}.{name}"] for name in names if f"{part}.{name}" in w}


def rotated(x, c, positions):
    """x (b s n h) with its pairs turned: of the first numbers where not all are."""
    if c.variant.rope == "none":
        return x
    angles, size = positions[..., None, None] * frequencies(c), 1.0
    if c.rope_scaling is not None and c.rope_scaling.kind in ("yarn", "longrope"):
        size = c.rope_scaling.attention_factor
    if c.rope_scaling is not None and c.rope_scaling.kind == "longrope":
        is_long = positions.max(-1)[:, None, None, None] >= c.rope_scaling.original_context
        of_long = positions[..., None, None] * frequencies(c, c.rope_scaling.original_context)
        angles = jnp.where(is_long, of_long, angles)
    cos, sin = jnp.cos(angles) * size, jnp.sin(angles) * size
    width = 2 * angles.shape[-1]
    x, rest = x[..., :width], x[..., width:]
    if c.variant.rope == "neighbours":
        a, b = x[..., 0::2], x[..., 1::2]
    else:
        a, b = x[..., : width // 2], x[..., width // 2 :]
    # The order of what comes out is the same for queries and keys, and so their products are.
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def projected(x, w, c, positions):
    """Queries, keys and values of grouped heads."""
    heads = lambda y: jnp.einsum("bsd,dnh->bsnh", x, w[y]) + w.get(f"{y}_bias", 0)
    q, k, v = (heads(f"attention.{i}") for i in "qkv")
    if "attention.q_norm.scale" in w:
        axes = (-2, -1) if c.variant.qk_norm == "all" else (-1,)
        q, k = (norm(y, w[f"attention.{i}_norm.scale"], c, axes=axes) for i, y in (("q", q), ("k", k)))
    q, k = (rotated(y, c, positions) for y in (q, k))
    if c.variant.qk_norm == "rotated":
        q, k = (y / jnp.sqrt((y * y).mean(-1, keepdims=True) + c.norm_eps) for y in (q, k))
    if c.variant.query_scale:
        far = jnp.floor((positions + 1) / c.variant.query_every)
        q = q * (1 + c.variant.query_scale * jnp.log(1 + far))[..., None, None]
    return (q, *(jnp.repeat(y, q.shape[2] // y.shape[2], 2) for y in (k, v)))


def expanded(x, w, c, positions):
    """Queries, keys and values of latent attention, each head's own; of each the last numbers are turned."""
    q = x
    if "attention.q_down" in w:
        q = x @ w["attention.q_down"] + w.get("attention.q_down_bias", 0)
        q = norm(q, w["attention.q_norm.scale"], c, 1e-6)
    q = jnp.einsum("bsc,cnh->bsnh", q, w["attention.q_up" if "attention.q_down" in w else "attention.q"])
    both = x @ w["attention.kv_down"] + w.get("attention.kv_down_bias", 0)
    width = w["attention.kv_norm.scale"].shape[-1]
    latent = norm(both[..., :width], w["attention.kv_norm.scale"], c, 1e-6)
    k, shared = jnp.einsum("bsc,cnh->bsnh", latent, w["attention.kv_up"]), both[..., None, width:]
    plain = q.shape[-1] - shared.shape[-1]
    k, v = k[..., :plain], k[..., plain:]
    q = jnp.concatenate([q[..., :plain], rotated(q[..., plain:], c, positions)], -1)
    shared = jnp.broadcast_to(rotated(shared, c, positions), (*k.shape[:-1], shared.shape[-1]))
    return q, jnp.concatenate([k, shared], -1), v


def seen(c, batch):
    """Which keys (b s t: the last) a query sees."""
    at, of = batch["positions"], batch["segments"]
    apart = at[:, :, None] - at[:, None, :]
    near = apart < (c.window or math.inf)
    if c.variant.chunked:
        near = (at // c.window)[:, :, None] == (at // c.window)[:, None, :]
    return (apart >= 0) & (of[:, :, None] == of[:, None, :]) & near


def attention(x, w, c, batch):
    make = expanded if "attention.kv_down" in w else projected
    q, k, v = make(x, w, c, batch["positions"])
    scale = c.variant.score_scale or 1 / math.sqrt(q.shape[-1])
    scores = capped(jnp.einsum("bsnh,btnh->bnst", q, k) * scale, c.variant.score_cap)
    scores = jnp.where(seen(c, batch)[:, None], scores, -1e30)
    if "attention.sinks" in w:  # a key that has no value
        sinks = jnp.broadcast_to(w["attention.sinks"][:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sinks], -1)
    p = jax.nn.softmax(scores, -1)[..., : k.shape[1]]
    y = jnp.einsum("bnst,btnh->bsnh", p, v)
    if "attention.gate" in w:
        y = y * sigmoid(jnp.einsum("bsd,dnh->bsnh", x, w["attention.gate"]))
    return jnp.einsum("bsnh,nhd->bsd", y, w["attention.o"]) + w.get("attention.o_bias", 0)


def gated_delta(x, w, c, batch):
    """The gated delta rule, position by position; each document from a state of zeros."""
    w = {path.removeprefix("mixer."): own for path, own in w.items()}
    of, repeat = batch["segments"], w["v"].shape[1] // w["q"].shape[1]

    def convolved(name):
        y, conv = jnp.einsum("bsd,dnh->bsnh", x, w[name]), w[f"{name}_conv"][:, :, 0]
        total = 0.0
        for back in range(min(conv.shape[-1], x.shape[1])):
            earlier = jnp.roll(y, back, 1) * conv[..., -1 - back]
            own = (jnp.roll(of, back, 1) == of) & (np.arange(x.shape[1]) >= back)
            total += jnp.where(own[..., None, None], earlier, 0)
        return total * sigmoid(total)

    q, k, v = map(convolved, "qkv")
    q, k = (jnp.repeat(y / jnp.sqrt((y * y).sum(-1, keepdims=True) + 1e-6), repeat, 2) for y in (q, k))
    rate, pace = sigmoid(x @ w["b"]), jnp.log1p(jnp.exp(x @ w["a"] + w["dt_bias"]))
    kept = jnp.exp(-jnp.exp(w["A_log"]) * pace)
    begins = jnp.concatenate([jnp.ones_like(of[:, :1]), of[:, 1:] - of[:, :-1]], 1) != 0

    def token(state, at):
        q, k, v, rate, kept, begins = at
        state = jnp.where(begins[:, None, None, None], 0, state) * kept[..., None, None]
        wrong = v - jnp.einsum("bnh,bnhw->bnw", k, state)
        state += jnp.einsum("bnh,bnw->bnhw", k, rate[..., None] * wrong)
        return state, jnp.einsum("bnh,bnhw->bnw", q, state) / math.sqrt(q.shape[-1])

    state = jnp.zeros((*k.shape[:1], *k.shape[2:], v.shape[-1]), x.dtype)
    inputs = [jnp.moveaxis(y, 1, 0) for y in (q, k, v, rate, kept, begins)]
    y = jnp.moveaxis(jax.lax.scan(token, state, tuple(inputs))[1], 0, 1)
    y = y / jnp.sqrt((y * y).mean(-1, keepdims=True) + c.norm_eps) * w["out_norm"]
    gate = jnp.einsum("bsd,dnh->bsnh", x, w["z"])
    return jnp.einsum("bsnh,nhd->bsd", y * gate * sigmoid(gate), w["o"])


def chosen_of(score, bias, how):
    """Which experts (b s e) a token visits, and how close the closest call was."""
    favour, closest = jax.lax.stop_gradient(score + bias), math.inf
    gap = lambda x, k: (
        (ranked := -jnp.sort(-x, -1))[..., k - 1] - ranked[..., k] if k < x.shape[-1] else jnp.array(math.inf)
    )
    best_of = lambda x, k: jnp.argsort(jnp.argsort(-x, -1), -1) < k
    if how.num_groups > 1:
        grouped = favour.reshape(*favour.shape[:2], how.num_groups, -1)
        ranked = jnp.sort(grouped, -1)
        worth = ranked[..., -1] if how.group_score == "best" else ranked[..., -2:].sum(-1)
        closest = gap(worth, how.top_groups).min()
        is_open = best_of(worth, how.top_groups)[..., None]
        favour = jnp.where(is_open, grouped, -math.inf).reshape(favour.shape)
    return best_of(favour, how.top_k), jnp.minimum(closest, gap(favour, how.top_k).min())


def experts(x, w, c, pieces):
    """The layer's output; its router's loss per token, load, drops and entropy; and the closest call."""
    how, s = c.experts, x.shape[1]
    logits = x @ w["experts.router"] + w.get("experts.router_bias", 0)
    score = jax.nn.softmax(logits, -1) if how.score == "softmax" else sigmoid(logits)
    chosen, closest = chosen_of(score, 0 if how.bias_rate is None else w["experts.bias"], how)
    weight = jnp.where(chosen, score, 0)
    weight = how.scale * (weight / weight.sum(-1, keepdims=True) if how.renormalise else weight)
    share = score / score.sum(-1, keepdims=True)
    loss = how.z_loss * jax.scipy.special.logsumexp(logits, -1) ** 2
    loss += how.aux_loss * how.num_experts / how.top_k / s * (share * chosen.sum(1)[:, None]).sum(-1)
    kept = chosen
    # what one device holds of a row
    for piece in np.unique(pieces) if how.capacity_factor is not None else ():
        here = (pieces == piece)[..., None]
        room = math.ceil(round(how.top_k * here.sum(-2).max() * how.capacity_factor / how.num_experts, 9))
        kept &= ~here | (jnp.cumsum(chosen & here, 1) <= room)
    weight = jnp.where(kept, weight, 0)
    if how.weighs == "input":  # weight and expert go together
        run = lambda own, share: feed_forward(x * share[..., None], own, c)
        each = jax.vmap(run, (0, -1), -1)(matrices(w, "experts"), weight)
        y = each.sum(-1)
    else:
        each = jax.vmap(lambda own: feed_forward(x, own, c), out_axes=-1)(matrices(w, "experts"))
        y = (each * weight[:, :, None]).sum(-1)
    if how.num_shared:
        gate = sigmoid(x @ w["experts.shared_gate"]) if "experts.shared_gate" in w else 1.0
        y += gate * feed_forward(x, matrices(w, "experts.shared"), c)
    told = {
        "load": chosen.sum((0, 1)),
        "dropped": (chosen & ~kept).sum(),
        "router_entropy": -(share * jnp.log(share)).sum(),
        "closest": closest,
    }
    return y, loss, told


def block(c, batch, pieces, x, w):
    """A layer: what it adds to the stream x, before or after norms, or from one norm both at once."""
    extra, told = 0.0, {}
    normed = lambda y, name: norm(y, w[name], c) if name in w else y
    at_once = not {"ffn_norm.scale", "ffn_post_norm.scale"} & w.keys()
    y = normed(x, "attention_norm.scale")
    mix = gated_delta if "mixer.q" in w else attention
    z = c.variant.residual_scale * normed(mix(y, w, c, batch), "attention_post_norm.scale")
    y = y if at_once else normed(x + z, "ffn_norm.scale")
    if c.experts and "experts.router" in w:
        y, extra, told = experts(y, w, c, pieces)
        extra = jnp.where(batch["targets"] >= 0, extra, 0).sum()
    else:
        y = feed_forward(y, matrices(w, "ffn"), c)
    return x + z + c.variant.residual_scale * normed(y, "ffn_post_norm.scale"), extra, told


def kinds_in_order(c):
    """Of each layer the index of its kind."""
    return [*itertools.islice(itertools.chain(c.lead, itertools.cycle(c.period)), c.num_layers)]


def logits_of(weights, batch, c, pieces):
    """The logits, the routers' losses, and what the routers told, in the order of the layers with experts."""
    x, extra, told = weights["embedding"][batch["tokens"]] * c.variant.embedding_scale, 0.0, []
    done = collections.Counter()
    for kind, run in itertools.groupby(kinds_in_order(c)):
        begin, end = done[kind], done[kind] + len([*run])
        done[kind], prefix = end, f"blocks.{kind}." if c.kinds else "blocks."
        own = {path.removeprefix(prefix): w for path, w in weights.items() if path.startswith(prefix)}
        layer = functools.partial(block, c.kinds[kind] if c.kinds else c, batch, pieces)

        def add(carry, w, layer=layer):
            x, more, told = layer(carry[0], w)
            return (x, carry[1] + more), told

        (x, extra), of_run = jax.lax.scan(add, (x, extra), {k: w[begin:end] for k, w in own.items()})
        told += [of_run] * bool(of_run)
    told = jax.tree.map(lambda *runs: jnp.concatenate(runs), *told) if told else {}
    x = norm(x, weights["norm.scale"], c) @ weights["embedding" if c.tied else "head"].T
    return capped(x * c.variant.logit_scale, c.variant.logit_cap), extra, told


def merged(weights, c):
    """The weights with their adapters in them: W + A B alpha / rank."""
    product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1) * c.lora.alpha / c.lora.rank)
    rows = {p[:-2].replace(".lora", ""): p for p in weights if p.endswith("_a")}
    more = {path: weights[path] + product(weights[a], weights[a[:-1] + "b"]) for path, a in rows.items()}
    return weights | more


def loss(weights, batch, c, pieces):
    """The mean over targets (-1: none) of cross-entropies and routers' losses; what the routers told."""
    counted = batch["targets"] >= 0
    logits, extra, told = logits_of(merged(weights, c), batch, c, pieces)
    target = jnp.take_along_axis(logits, jnp.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    nats = jnp.where(counted, jax.scipy.special.logsumexp(logits, -1) - target, 0).sum()
    return (nats + extra) / jnp.maximum(counted.sum(), 1), told


def in_float64():
    """A context in which JAX computes so."""
    stack = contextlib.ExitStack()
    stack.enter_context(jax.enable_x64(True))
    stack.enter_context(jax.numpy_dtype_promotion("standard"))
    stack.enter_context(jax.numpy_rank_promotion("allow"))
    return stack


class Trainer:
    """Clips by the global norm, then SGD with momentum or AdamW, by hand; routers' biases by their rule."""

    def __init__(self, weights, c, rule, clip=None, pieces=None):
        self.weights = {k: np.asarray(w, np.float64) for k, w in weights.items()}
        self.c, self.rule, self.clip, self.pieces, self.steps = c, rule, clip, pieces, 0
        self.first, self.second = ({k: np.zeros_like(w) for k, w in self.weights.items()} for _ in range(2))
        self.run = None

    def gradients(self, batch):
        """Loss, gradients, and what the routers told, at the weights of the moment."""
        with in_float64():
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
            more = g if rule["kind"] == "sgd" else (1 - rule["b1"]) * g
            self.first[k] = rule["b1"] * self.first[k] + more
            move = self.first[k]
            if rule["kind"] == "adamw":
                self.second[k] = rule["b2"] * self.second[k] + (1 - rule["b2"]) * g * g
                corrected = self.second[k] / (1 - rule["b2"] ** self.steps)
                move = move / (1 - rule["b1"] ** self.steps) / (np.sqrt(corrected) + rule["eps"])
                move = move + rule["decay"] * self.weights[k]
            if k.endswith("experts.bias"):
                kinds = self.c.kinds or (self.c,)
                routed = np.array([i for i in kinds_in_order(self.c) if kinds[i].experts])
                load = told["load"][routed == (int(k.split(".")[1]) if self.c.kinds else 0)]
                move = -self.c.experts.bias_rate / rule["rate"] * np.sign(load.mean(1, keepdims=True) - load)
            self.weights[k] = self.weights[k] - rule["rate"] * move
        return value, size, grads, told
