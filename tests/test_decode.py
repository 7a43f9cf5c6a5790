"""Generation with a cut cache gives what the whole forward pass gives, and moves nothing of the cache."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parity import LLAMA, MOE, QWEN, logits_of, name, weights

from llmpar.inspect.census import census_table
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.mesh import make_mesh, sharding
from llmpar.notation import parse_layout
from llmpar.par import Manual
from llmpar.plan import Plan
from llmpar.serve.decode import Decoder, generate
from llmpar.step import Step

B, S, MORE = 2, 5, 6
PROMPT = np.random.default_rng(3).integers(0, 256, (B, S)).astype(np.int32)
WINDOW = dataclasses.replace(LLAMA, window=4)
COPIES = dataclasses.replace(QWEN, name="two KV heads, biases, norms", num_heads=8, num_kv_heads=2)


def decoder(config, plan, length=S + MORE, batch=B):
    mesh = make_mesh(plan.mesh)
    stored = Step(config, plan, mesh, optax.sgd(1e-3)).shardings.params
    return Decoder(config, plan, mesh, jax.device_put(weights(config), stored), batch, length)


def whole(config, tokens):
    """Logits after every position of ``tokens``, on one device without a cache."""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "positions": positions, "segments": np.zeros_like(tokens)}
    return np.asarray(logits_of(config)(weights(config), batch))


PLANS = [
    (LLAMA, Plan("dp=1", zero=0)), (LLAMA, Plan("sp=4", zero=0)), (QWEN, Plan("dp=2 sp=2 tp=2", zero=0)),
    (WINDOW, Plan("fsdp=2 sp=4")), (MOE, Plan("ep=2 sp=2 tp=2", zero=0)),
    (COPIES, Plan("sp=2 tp=4", zero=0)),
]  # fmt: skip


@pytest.mark.parametrize("config, plan", PLANS, ids=lambda x: name(x) if isinstance(x, Plan) else x.name)
def test_a_cache_gives_the_logits_of_the_whole_forward_pass(config, plan):
    """Prompt in two calls, then token by token. float32: sums in another order, 1e-5 of the largest logit."""
    tokens = np.random.default_rng(4).integers(0, 256, (B, S + MORE)).astype(np.int32)
    want, run = whole(config, tokens), decoder(config, plan)
    for start, end in [(0, 3), (3, S), *((i, i + 1) for i in range(S, S + MORE))]:
        found = np.asarray(run(tokens[:, start:end]))
        assert np.abs(found - want[:, end - 1]).max() <= 1e-5 * np.abs(want).max()
    heads = max(1, config.num_kv_heads // plan.mesh.tp)
    assert run.cache[0].addressable_shards[0].data.shape[3] == heads, "a head has one copy at most"


def test_the_likeliest_tokens_are_those_of_the_whole_forward_pass_and_a_seed_repeats_itself():
    tokens = PROMPT
    for chosen in generate(decoder(LLAMA, Plan("sp=2 tp=2", zero=0)), PROMPT, MORE):
        np.testing.assert_array_equal(chosen, whole(LLAMA, tokens)[:, -1].argmax(-1))
        tokens = np.concatenate([tokens, chosen[:, None].astype(np.int32)], 1)
    drawn = [
        list(map(tuple, generate(decoder(LLAMA, Plan("sp=2", zero=0)), PROMPT, MORE, 2.0, seed)))
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chosen_tokens_of_rows_that_are_cut_are_taken_from_any_device(monkeypatch, temperature):
    """A host has only some of the rows: what it fetches must be whole on each of its devices."""
    mesh, fetched = make_mesh("dp=4 tp=2"), []
    logits = jax.device_put(np.eye(4, 8, dtype=np.float32) * 1e4, sharding(mesh, parse_layout("b/dp v")))
    fetch = lambda x: fetched.append(x.is_fully_replicated and len(x.sharding.device_set)) or np.array(x)
    monkeypatch.setattr("llmpar.serve.decode.np", SimpleNamespace(asarray=fetch, ndarray=np.ndarray))

    class Decided(Decoder):
        """Takes nothing in and is sure of every row."""

        def __init__(self):
            self.everywhere = sharding(mesh, parse_layout("whole"))

        def __call__(self, tokens):
            return logits

    run = generate(Decided(), np.zeros((4, 1), np.int32), 2, temperature)
    assert [list(x) for x in run] == [[0, 1, 2, 3]] * 2 and fetched == [8, 8]


def test_a_slot_that_is_written_wrongly_is_noticed(monkeypatch):
    """The planted fault: every rank is the first: even positions count twice and odd ones are lost."""
    run = decoder(LLAMA, Plan("sp=2", zero=0))
    index = Manual.index
    monkeypatch.setattr(Manual, "index", lambda par, layout: 0 if layout == "cache t" else index(par, layout))
    wrong = np.asarray(run(PROMPT[:, :2]))
    assert np.abs(wrong - whole(LLAMA, PROMPT)[:, 1]).max() > 1e-2


@pytest.mark.parametrize("length", [64, 4096])
def test_a_token_moves_one_small_sum_per_layer_whatever_the_cache(length):
    """Per layer over sp: the maxima of n heads, then sums of n (h + 1) numbers; the cache is cut."""
    plan = Plan("sp=4", zero=0)
    run = decoder(LLAMA, plan, length)
    assert {s.data.shape[2] for s in run.cache[0].addressable_shards} == {length // 4}
    jaxpr = run.run.trace(run.params, run.cache, PROMPT[:, :1], np.int32(0)).jaxpr
    sent = census_table(census_jaxpr(jaxpr, plan.mesh.sizes))
    row = 4 * B * LLAMA.num_heads
    numbers = 2 * LLAMA.num_layers * row * (1 + LLAMA.head_width + 1) * 3 // 4
    assert sent == {("sp", "all-reduce"): {"count": 2 * LLAMA.num_layers, "bytes_sent": numbers}}


def test_refusals_say_what_would_work():
    with pytest.raises(ValueError, match="has pp=2; use dp, fsdp, ep, sp, tp"):
        decoder(LLAMA, Plan("pp=2", microbatches=2))
    with pytest.raises(ValueError, match="batch 3 is not a multiple of dp·fsdp·ep = 2"):
        decoder(LLAMA, Plan("dp=2", zero=0), batch=3)
    run = decoder(LLAMA, Plan("dp=1", zero=0), length=6)
    run(PROMPT)
    with pytest.raises(ValueError, match="2 tokens more than the 5 here do not fit into 6 positions"):
        run(PROMPT[:, :2])
    with pytest.raises(ValueError, match="temperature -1.0 is negative"):
        next(generate(run, PROMPT, 1, -1.0))
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"temperature {bad} is negative or no number"):
            next(generate(run, PROMPT, 1, bad))
    with pytest.raises(ValueError, match="tokens of shape .* hold no next token"):
        run(PROMPT[:, :0])
    for prompt, num in ((PROMPT[:, :0], 1), ([[1, 2], [1]], 1), (PROMPT, 0)):
        with pytest.raises(ValueError, match="use rows of one length, and 1 token or more"):
            next(generate(run, prompt, num))


class Fixed(Decoder):
    """Always says the same logits."""

    def __init__(self, logits):
        self.logits, self.everywhere = (
            jnp.asarray(logits, jnp.float32),
            sharding(make_mesh("dp=1"), parse_layout("whole")),
        )

    def __call__(self, tokens):
        return self.logits


def test_a_temperature_draws_from_the_softmax_of_the_logits_over_it():
    """Many rows of three logits, at 2: the shares are the softmax's within 4 standard deviations."""
    logits, rows = np.array([0.0, 1.0, 3.0]), 20_000
    (drawn,) = generate(Fixed(np.tile(logits, (rows, 1))), np.zeros((rows, 1), np.int32), 1, 2.0, seed=3)
    share = np.exp(logits / 2) / np.exp(logits / 2).sum()
    found = np.bincount(drawn, minlength=3) / rows
    assert np.all(np.abs(found - share) < 4 * np.sqrt(share * (1 - share) / rows)), (found, share)


def test_a_low_temperature_approaches_the_likeliest():
    logits = np.tile([1.0, 28.0, -5.0, 27.5], (50, 1))
    for temperature in (1e-3, 1e-30, 1e-45):
        (drawn,) = generate(Fixed(logits), np.zeros((50, 1), np.int32), 1, temperature)
        assert set(drawn.tolist()) == {1}, temperature


def test_every_token_is_drawn_anew():
    """From 1,000 equal logits 16 draws are not all the same."""
    drawn = [int(row[0]) for row in generate(Fixed(np.zeros((1, 1000))), [[0]], 16, 1.0)]
    assert len(set(drawn)) > 8
