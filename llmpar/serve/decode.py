"""Generate tokens one after the other, with a cache of keys and values that stays where it is.

The cache is cut by every axis that can: its rows by dp and fsdp, its KV heads by tp, its positions by sp,
every sp-th one to a rank. A new token's query goes to all ranks of sp; each looks at its own share, and one
small sum per layer joins what they found (`attention.decode`; Pope et al. 2022 describe the cuts). Nothing of
the cache ever travels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from llmpar import attention, refusals
from llmpar.block import vary
from llmpar.config import ModelConfig
from llmpar.mesh import platform_of, sharding, spec, split
from llmpar.notation import Layout
from llmpar.par import Manual
from llmpar.plan import Plan, Resolved
from llmpar.weights import Tree, model_graph, weight_dims

CACHE = "cache l b t k h"


@dataclasses.dataclass(frozen=True)
class Serving(Resolved):
    """A plan for tokens that come one at a time: no region cuts their positions by sp, which cuts those of
    the cache."""

    @functools.cached_property
    def regions(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Region to dim to the axes that cut it."""
        live, table = self.mesh.live, super().regions
        table = {name: {d: a for d, a in cuts.items() if d != "s"} for name, cuts in table.items()}
        return table | {"cache": {"b": table["data"]["b"], "t": live("sp"), "k": live("tp", "kv")}}


class Decoder:
    """A model with a cache: call it with the tokens that follow, ``b s``, and get float32 logits ``b v`` of
    the next one.

    Args:
        config, plan, mesh: what, how, and where. Of the plan count its mesh, ZeRO stage and dtype.
        params: weights; they are laid out here as a `Serving` plan stores them.
        batch_size: rows.
        length: positions that the cache must hold. A rank holds its share of them, rounded up.

    The first call takes the prompt. It computes scores of the whole prompt at once: cut a long one into
    several calls.
    """

    def __init__(
        self, config: ModelConfig, plan: Plan, mesh: Mesh, params: Tree, batch_size: int, length: int
    ):
        self.config, self.length, self.start = config, length, 0
        self.plan = plan = self.check(config, plan, batch_size, length, platform_of(mesh))
        mesh = split(mesh, plan.mesh)
        slots = -(-length // plan.mesh.sp) * plan.mesh.sp
        heads = max(config.num_kv_heads, plan.mesh.tp)  # the copies of a KV head have each a cache
        shape = (config.num_layers, batch_size, slots, heads, config.head_width)
        self.everywhere = sharding(mesh, Layout(()))
        cut, rows = plan.place(CACHE), plan.place("data b s")
        zeros = jax.jit(lambda: jnp.zeros(shape, plan.dtype), out_shardings=sharding(mesh, cut))
        self.cache = zeros(), zeros()
        stored = jax.tree.map(plan.stored, weight_dims(config))
        self.params = jax.device_put(params, jax.tree.map(functools.partial(sharding, mesh), stored))
        given = jax.tree.map(spec, stored), spec(cut), spec(rows), spec(Layout(()))
        made = spec(plan.place("data b v")), spec(cut)
        run = jax.shard_map(self._forward, mesh=mesh, in_specs=given, out_specs=made)
        self.run = jax.jit(run, donate_argnums=1)

    @staticmethod
    def check(
        config: ModelConfig, plan: Plan, batch_size: int, length: int, platform: str | None = None
    ) -> Serving:
        """The plan as this uses it; refuses what cannot be cut, before any weight is made."""
        if plan.mesh.pp > 1:
            where = f"mesh '{plan.mesh}' has pp={plan.mesh.pp}"
            raise ValueError(f"generation has no pipeline, and {where}; use dp, fsdp, ep, sp, tp")
        if length < 1:
            raise ValueError(f"a cache of {length} positions holds nothing; use 1 or more")
        kept = {name: getattr(plan, name) for name in ("mesh", "zero", "dtype")}
        asked = Plan(**kept, zero_axes="fsdp,ep", sequence_order="contiguous").resolve(config, platform)
        serving = Serving(**{field.name: getattr(asked, field.name) for field in dataclasses.fields(asked)})
        refusals.check(serving, batch_size, plan.mesh.sp)
        return serving

    def __call__(self, tokens) -> jax.Array:
        """Take the next tokens into the cache."""
        if tokens.ndim != 2 or tokens.shape[1] < 1:
            give = "give rows of one length, at least one token"
            raise ValueError(f"tokens of shape {tokens.shape} hold no next token; {give}")
        many = tokens.shape[1]
        if self.start + many > self.length:
            what = f"{many} tokens more than the {self.start} here"
            raise ValueError(f"{what} do not fit into {self.length} positions")
        logits, self.cache = self.run(self.params, self.cache, tokens, jnp.int32(self.start))
        self.start += many
        return logits

    def _forward(self, params: Tree, cache, tokens, start):
        """On one device: logits of the last token, and the cache with all of them."""
        par = Manual(self.plan)
        par.cache = cache_of_layer = _Cache(par)
        model = nnx.merge(model_graph(self.config), params)
        none = tokens * 0  # of shape b s, and cut as tokens are
        positions = none + (start + jnp.arange(tokens.shape[1]))[None]
        batch = {"tokens": tokens, "positions": positions, "segments": none}
        new = cache

        def layers(block, x, weights):
            nonlocal new

            def layer(x, each):
                weights, cache_of_layer.layer = each
                return block(x, weights)[0], cache_of_layer.layer

            x, new = lax.scan(layer, x, (weights, cache))
            return x, None

        embedding = par.weight(model.embedding)
        head = embedding if self.config.tied else par.weight(model.head)
        x, _ = model.run_blocks(model.embed(embedding, batch, par), batch, par, layers)
        x = par.move(model.norm(x[:, -1:], par), "stream b s d -> vocab b s d")[:, 0]
        logits = jnp.einsum("bd,vd->bv", x, head, preferred_element_type=jnp.float32)
        whole = self.plan.physical("vocab b v -> data b v")
        return par.carry_out(logits, whole, "logits", invariant=True), new


class _Cache:
    """What a layer does in place of attention to its own keys: write them into the cache, and attend to
    that."""

    def __init__(self, par: Manual):
        self.axes, self.rank = par.axes("cache t"), par.index("cache t")
        self.size = par.plan.mesh.sp
        self.layer: tuple[jax.Array, ...] = ()

    def attend(self, q, k, v, positions, mask):
        slots = self.layer[0].shape[1]
        at = positions[0]  # the same in all rows
        mine = jnp.where(at % self.size == self.rank, at // self.size, slots)  # one slot too far: dropped
        write = lambda cache, x: cache.at[:, mine].set(vary(x, self.axes), mode="drop")
        self.layer = tuple(write(cache, x) for cache, x in zip(self.layer, (k, v), strict=True))
        # A slot that is not written yet lies after every query.
        seen = {
            "q_positions_bs": positions,
            "k_positions_bt": (jnp.arange(slots) * self.size + self.rank)[None],
        }
        return attention.decode(q, *self.layer, axis=self.axes, mask=mask, **seen)


def check_temperature(temperature: float) -> None:
    """Refuse what is no temperature."""
    if not 0 <= temperature < float("inf"):
        use = "use 0 for the likeliest token, or more"
        raise ValueError(f"temperature {temperature} is negative or no number; {use}")


def generate(
    decoder: Decoder, prompt, num_tokens: int, temperature: float = 0.0, seed: int = 0
) -> Iterator[np.ndarray]:
    """Yield ``num_tokens`` times the next token of each row, ``b``, after a prompt ``b s``, by a `Decoder`:
    the likeliest at temperature 0, else drawn from the softmax of logits over ``temperature``, each time
    anew."""
    check_temperature(temperature)
    lengths = [len(row) for row in prompt]
    if len(set(lengths)) != 1 or min(lengths[0], num_tokens) < 1:
        asked = f"rows of {lengths} tokens, {num_tokens} to add"
        raise ValueError(f"{asked}: use rows of one length, and 1 token or more")
    tokens, keys = jnp.asarray(prompt, jnp.int32), jax.random.split(jax.random.key(seed), num_tokens)

    def draw(key, logits):
        if not temperature:
            return logits.argmax(-1)
        logits = logits - logits.max(-1, keepdims=True)  # a low temperature sends the others to -inf
        return jax.random.categorical(key, jnp.where(logits == 0, 0, logits / temperature))

    # Rows may be cut over hosts, and each host wants them all.
    choose = jax.jit(draw, out_shardings=decoder.everywhere)
    for key in keys:
        chosen = choose(key, decoder(tokens))
        tokens = chosen[:, None].astype(jnp.int32)
        yield np.asarray(chosen)
