"""One step of a model with a cache: each row takes its next tokens, and learns which one follows.

A row is a slot for a request, at a position of its own. In one step some rows take a piece of their prompt,
others the one token that they chose last (chunked prefill: Agrawal et al. 2023, Sarathi). The cache is cut by
every axis that can: its rows by dp, fsdp and ep, its KV heads by tp, its positions by sp, every sp-th one to
a rank. A token's query goes to all ranks of sp; each looks at its own share, and two small sums per layer
join what they found (`attention.decode`; Pope et al. 2022 describe the cuts). Nothing of the cache travels.
Rows know nothing of one another: a request is answered alike whatever runs beside it, but for rounding.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt32

from llmpar import attention
from llmpar.block import at, vary
from llmpar.config import ModelConfig
from llmpar.mesh import platform_of, sharding, spec, split
from llmpar.notation import Layout
from llmpar.par import Manual
from llmpar.plan import BEST, CACHE, CHOSEN, LOGITS, Plan
from llmpar.weights import Tree, model_graph, weight_dims


class Rows(NamedTuple):
    """What a step takes: of row i the first ``num[i]`` tokens, to positions from ``start[i]`` on."""

    tokens: Int[np.ndarray, "b c+1"]  # and what follows the last one, where that is known
    start: Int[np.ndarray, " b"]
    num: Int[np.ndarray, " b"]  # 0: the row is idle
    seed: UInt32[np.ndarray, " b"]
    top_k: Int[np.ndarray, " b"]
    top_p: Float[np.ndarray, " b"]
    temperature: Float[np.ndarray, " b"]

    @classmethod
    def idle(cls, num_rows: int, width: int = 1) -> Rows:
        """None takes a token."""
        numbers = (np.zeros(num_rows, kind) for kind in "i4 i4 u4 i4 f4 f4".split())
        return cls(np.zeros((num_rows, width + 1), np.int32), *numbers)


class Decoder:
    """A model with a cache of ``num_rows`` rows of ``length`` positions, laid out on a mesh.

    ``run(params, cache, rows, echo) -> (numbers, cache)`` is the step: a pure function that writes its cache
    in place, compiled for each width of rows. Of the plan count mesh, ZeRO stage and dtype.
    """

    def __init__(self, config: ModelConfig, plan: Plan, mesh: Mesh, params: Tree, num_rows: int, length: int):
        self.plan = plan = plan.serving(config, num_rows, length, platform_of(mesh))
        self.config, place = plan.config, functools.partial(sharding, split(mesh, plan.mesh))
        stored, cut, whole = jax.tree.map(plan.stored, weight_dims(config)), plan.place(CACHE), Layout(())
        zeros = lambda: (jnp.zeros(plan.cache(num_rows, length), plan.dtype),) * 2
        self.empty = jax.jit(zeros, out_shardings=place(cut))
        self.cache, self.params = self.empty(), jax.device_put(params, jax.tree.map(place, stored))
        specs = [jax.tree.map(spec, x) for x in ((stored, cut, plan.place("data b")), (whole, cut))]

        def run(params, cache, rows, echo):
            step = functools.partial(self._forward, echo)
            step = jax.shard_map(step, mesh=place(cut).mesh, in_specs=specs[0], out_specs=specs[1])
            return step(params, cache, rows)

        # Each host brings all rows, and each device takes its own.
        come = jax.tree.map(place, (stored, cut, whole))
        self.run = jax.jit(run, static_argnums=3, in_shardings=come, donate_argnums=1)

    def __call__(self, rows: Rows, echo: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Take tokens into the cache. Gives tokens and their log-probabilities, both ``s b n``, behind the
        last token of each row, or with ``echo`` behind each: the one that follows, the target, and the
        likeliest. These are the model's own probabilities, before temperature, top k and top p."""
        numbers, self.cache = self.run(self.params, self.cache, rows, echo)
        tokens, logprobs = np.split(np.asarray(numbers), 2, -1)
        if np.isnan(logprobs := logprobs.view(np.float32))[:, rows.num > 0].any():
            what = "the model gives NaN: its weights hold some, or are too large for its dtype"
            raise ValueError(f"{what}; load others, or use float32")
        return tokens, logprobs

    def _forward(self, echo: bool, params: Tree, cache, rows: Rows):
        """On one device."""
        par, (tokens, targets) = Manual(self.plan), (rows.tokens[:, :-1], rows.tokens[:, 1:])
        offset = tokens * 0 + jnp.arange(tokens.shape[1])[None]
        positions = rows.start[:, None] + offset
        par.cache = held = _Cache(par, offset < rows.num[:, None])
        model = nnx.merge(model_graph(self.config), params)
        batch = {"tokens": tokens, "positions": positions, "segments": tokens * 0}

        def layers(block, x, weights):
            def layer(carry, each):
                (x, held.both), (weights, held.layer) = carry, each
                return (block(x, weights)[0], held.both), None

            return lax.scan(layer, (x, cache), (weights, jnp.arange(self.config.num_layers)))[0]

        embedding = par.weight(model.embedding)
        head = embedding if self.config.tied else par.weight(model.head)
        x, cache = model.run_blocks(model.embed(embedding, batch, par), batch, par, layers)
        asked = offset if echo else jnp.maximum(rows.num - 1, 0)[:, None]
        x = model.norm(jnp.take_along_axis(x, asked[..., None], 1), par)
        x = par.move(x, "stream b s d -> vocab b s d")
        known = jnp.take_along_axis(targets, asked, 1), asked + rows.start[:, None] + 1

        def follow(each):
            logits_bv = jnp.einsum("bd,vd->bv", each[0], head, preferred_element_type=jnp.float32)
            logits_bv = par.carry_out(logits_bv, par.plan.physical(LOGITS), LOGITS, invariant=True)
            return choose(logits_bv, each[1], each[2], rows)

        numbers = lax.map(follow, tuple(jnp.moveaxis(y, 1, 0) for y in (x, *known)))
        return par.carry_out(numbers, par.plan.physical(CHOSEN), CHOSEN, invariant=True), cache


class _Cache:
    """What a layer does in place of attention: write its keys and values, and attend to all in the cache."""

    both: tuple[jax.Array, ...]  # keys and values
    layer: jax.Array

    def __init__(self, par: Manual, is_token):
        self.axes, self.rank, self.size = par.axes("cache t"), par.index("cache t"), par.plan.mesh.sp
        self.is_token = is_token

    def attend(self, q, k, v, positions, mask):
        (b, _), slots = positions.shape, jnp.arange(self.both[0].shape[2])
        mine = self.is_token & (positions % self.size == self.rank)
        where = self.layer, jnp.arange(b)[:, None], jnp.where(mine, positions // self.size, len(slots))
        write = lambda cache, x: cache.at[where].set(vary(x, self.axes), mode="drop")
        self.both = tuple(map(write, self.both, (k, v)))
        # A slot that the row has not written, but an earlier request perhaps, lies after every query.
        seen = {"q_positions_bs": positions, "k_positions_bt": (slots * self.size + self.rank)[None]}
        return attention.decode(q, *at(self.both, self.layer), axis=self.axes, mask=mask, **seen)


def choose(
    logits: Float[Array, "b v"], targets: Int[Array, " b"], positions: Int[Array, " b"], rows: Rows
) -> Int[Array, "b n"]:
    """The tokens that come to stand at ``positions``, the targets, the likeliest; then the bits of the
    log-probabilities of these: one message."""
    logprobs, best = jax.nn.log_softmax(logits), lax.top_k(logits, min(BEST, logits.shape[1]))[1]
    drawn = lambda: jax.vmap(draw)(logits, positions, *rows[3:])
    token = lax.cond((rows.temperature > 0).any(), drawn, lambda: best[:, 0])
    token = jnp.where(rows.temperature > 0, token, best[:, 0])
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
