"""What a step will hold and compute, by formula; what it sends is in test_census.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from parity import LLAMA, QWEN

from llmpar import Plan, preset
from llmpar.inspect.census import executed_flops
from llmpar.model.weights import init_params, model_graph
from llmpar.parallel.modes import Solo
from llmpar.predict import memory, traffic

BATCH, SEQ = 4, 32


@functools.cache
def executed(config, batch=BATCH, seq=SEQ, **plan):
    """FLOPs of the matrix products in one compiled forward and backward pass of `Solo`."""
    par = Solo(Plan(**plan).resolve())
    params = jax.eval_shape(lambda: init_params(config))
    one = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    data = dict.fromkeys(("tokens", "targets", "positions", "segments"), one)
    loss = lambda params, data: nnx.merge(model_graph(config), params).cross_entropies(data, par)[0].sum()
    return executed_flops(jax.jit(jax.value_and_grad(loss)).lower(params, data).compile().as_text())


def pieces(config, batch=BATCH, seq=SEQ):
    useful = memory.flops(config, batch, seq)
    logits = 2 * batch * seq * config.vocab_size * config.width
    return useful["weights"], useful["attention"], logits


@pytest.mark.parametrize(
    "config", [dataclasses.replace(LLAMA, num_layers=3, ffn_width=96), QWEN], ids=lambda c: c.name
)
def test_useful_flops_are_those_executed_but_for_what_is_recomputed_or_masked(config):
    """Three of four tiles of attention are live; seven products of s by s where six are useful."""
    weights, attention, _ = pieces(config)
    assert executed(config) == weights + attention * 2 * 7 / 6 * 3 / 4


@pytest.mark.long
def test_chunks_of_the_loss_make_the_logits_twice():
    assert executed(QWEN, loss_chunks=2) == executed(QWEN) + pieces(QWEN)[2]


def test_block_rematerialisation_is_another_forward_pass_of_the_blocks():
    """A third of the blocks' useful FLOPs, less each block's last product: it is the next one's input."""
    weights, attention, logits = pieces(QWEN)
    again = executed(QWEN, remat="block") - executed(QWEN)
    blocks = (weights - 3 * logits) / 3
    assert 0.7 * blocks < again <= blocks + attention * 2 * 2 / 6


@pytest.mark.long
def test_selective_rematerialisation_repeats_no_product():
    """Neither a matrix product nor attention; `ffn` repeats the two into the hidden width alone."""
    config = QWEN
    hidden = 2 * 2 * BATCH * SEQ * config.width * config.ffn_width * config.num_layers
    assert executed(config, remat="selective") == executed(config)
    assert executed(config, remat="ffn") == executed(config) + hidden
    assert executed(config, remat="ffn", ffn_chunks=2) == executed(config, ffn_chunks=2)


def test_slots_are_not_tokens():
    """A padded buffer has room for all tokens; filled are those of whose 8 choices one or more is there."""
    config = preset("qwen3-30b-a3b")
    for ep, share in ((8, "67%"), (16, "41%")):
        row = traffic.step_traffic(Plan(f"ep={ep} fsdp=4").resolve(config), 64, 4096)["ep", "all-to-all"]
        (of,) = {message.value for message in row.messages}
        assert of.endswith(f"{share} of them filled")
