"""The gated delta net of Qwen3-Next and Qwen3.5: chunks are the recurrence of `oracle`, documents keep apart,
a cache gives what the whole gives."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from parity import batch, family, full_rows, logits_of, solo, spread, weights
from test_decode import answers, assert_as_whole
from test_hf import fixture, from_tensors, stored

from llmpar.model import gated_delta
from llmpar.parallel.mesh import make_mesh
from llmpar.plan.plan import Plan
from llmpar.plan.serving import with_experts
from llmpar.serve.engine import Engine, Request, generate
from llmpar.training import hugging_face as hf

CONFIG = dataclasses.replace(family("qwen3_next"), num_layers=2)
"""A layer of each kind."""


@pytest.fixture(scope="module")
def several_chunks():
    """Rows of 16 positions in chunks of 5: the last one is filled, and documents end inside of one."""
    logits_of.cache_clear()
    with mock.patch.object(gated_delta, "CHUNK", 5):
        yield logits_of(CONFIG)
    logits_of.cache_clear()


def test_gradients_through_chunks_are_those_of_the_recurrence():
    named = dataclasses.replace(CONFIG, name="in chunks")  # another key of the caches
    with mock.patch.object(gated_delta, "CHUNK", 5):
        grads = flatten_dict(spread(named, Plan("dp=1", zero=0))[2], sep=".")
    for path, want in flatten_dict(solo(CONFIG)[1], sep=".").items():
        assert np.abs(grads[path] - want).max() <= 1e-4 * np.abs(want).max(), path


def test_a_document_is_what_it_is_alone(several_chunks):
    data = batch()
    packed = np.asarray(several_chunks(weights(CONFIG), data))
    first = data["segments"] == data["segments"][:, :1]
    other = data | {"tokens": np.where(first, (data["tokens"] + 1) % 256, data["tokens"])}
    change = np.abs(np.asarray(several_chunks(weights(CONFIG), other)) - packed).max(-1)
    # what was forgotten by a token is read from sums over the chunk
    assert change[first].max() > 0.01 and change[~first].max() < 1e-5


@pytest.mark.parametrize("length", [1, 2])
def test_a_row_shorter_than_the_convolution_is_how_a_longer_one_begins(several_chunks, length):
    data = batch()
    begin = {name: value[:, :length] for name, value in data.items()}
    whole, short = (np.asarray(several_chunks(weights(CONFIG), x)) for x in (data, begin))
    assert np.abs(short - whole[:, :length]).max() < 1e-5


def test_documents_that_are_not_one_after_the_other_give_nan(several_chunks):
    data = batch()
    back = data["segments"].copy()
    back[3, -1] = back[3, 0]
    broken = np.isnan(several_chunks(weights(CONFIG), data | {"segments": back}))
    assert broken[3].all() and not np.delete(broken, 3, 0).any()


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_the_inverse_is_one(size):
    """Also where tokens repeat: then sums of powers of the matrix, which give its inverse too, cancel."""
    below = np.tril(np.ones((2, size, size), np.float32), -1)
    below[1] *= np.random.default_rng(0).normal(0, 0.3, (size, size))
    product = (np.eye(size) + below) @ np.asarray(jax.jit(gated_delta.inverse_of)(below), np.float64)
    assert np.abs(product - np.eye(size)).max() < 1e-4


LENGTHS = {1: 9, 2: 3, 3: 7, 11: 6, 7: 2, 6: 1}
"""Of prompts, and how many tokens are added. A convolution has 4 positions, a piece of a prompt too."""


@pytest.mark.long
def test_slots_with_a_state_begin_anew_and_end_at_different_times():
    """Two slots for six requests, prompts in pieces of 4 positions, in chunks of 3 and of 1; first from a
    cache that is not empty."""
    draw = np.random.default_rng(0)
    asked = [Request(tuple(draw.integers(0, 256, n).tolist()), LENGTHS[n], echo=True) for n in LENGTHS]
    run = Engine(CONFIG, Plan("sp=2 tp=2"), make_mesh("sp=2 tp=2"), weights(CONFIG), 2, 24, chunk=4)
    run.decoder.cache = jax.tree.map(lambda x: x * 0 + 30, run.decoder.cache)
    with mock.patch.object(gated_delta, "CHUNK", 3):
        found = answers(run, *asked)
    every = with_experts(CONFIG, capacity_factor=None)
    tokens = np.zeros((len(asked), max(map(len, found))), np.int32)  # what fills a row comes last
    for row, events in zip(tokens, found, strict=True):
        row[: len(events)] = [event.token for event in events]
    whole = np.asarray(jax.nn.log_softmax(logits_of(every)(weights(CONFIG), full_rows(tokens))))
    for request, events, want in zip(asked, found, whole, strict=True):
        assert_as_whole(request, events, want)


KINDS = ["qwen3_5_moe_text", pytest.param("qwen3_next", marks=pytest.mark.long)]


@pytest.mark.parametrize("kind", [*KINDS, pytest.param("qwen3_5_text", marks=pytest.mark.long)])
def test_a_cache_gives_the_greedy_tokens_of_transformers(kind):
    config, tensors, ids, _ = fixture(kind)
    params, mesh = from_tensors(tensors, config), make_mesh("dp=1")
    run = Engine(config, Plan("dp=1"), mesh, params, 2, 17, chunk=4)
    made = generate(run, [Request(tuple(row[:5]), 12) for row in ids.tolist()])
    assert made == stored(kind)["greedy"].tolist()


def test_a_device_reads_its_part_of_tensors_that_weights_share():
    """Heads of queries and of their gates, or of keys and of values, lie in groups of rows."""
    config, tensors, *_ = fixture("qwen3_next")
    params = flatten_dict(from_tensors(tensors, config), sep=".")
    for path, weight in hf._weights(config).items():
        own = params[path][(0,) * len(weight.stacked)]
        for dim, size in enumerate(own.shape):
            ends = [(0, n) for n in own.shape]
            ends[dim] = size // 2, size
            part = weight.read(tensors[weight.names[0]], np.dtype("float32"), *ends)
            assert np.array_equal(part, own[tuple(slice(*x) for x in ends)]), path
