"""Long sequences under a plan: ring, Ulysses and gathered keys give one device's gradients and send what is predicted."""

import numpy as np
import optax
import pytest
from parity import BATCH, LLAMA, SEQ, assert_same, batch, name
from test_census import predicted, table

from llmpar import attention, hlo
from llmpar.config import preset
from llmpar.mesh import make_mesh
from llmpar.plan import Plan
from llmpar.step import Step

PLANS = [
    Plan("sp=4", order="contiguous"), Plan("dp=2 sp=4", zero=0), Plan("sp=8", order="striped"),
    Plan("fsdp=2 sp=2 tp=2", tp_sequence=True), Plan("sp=4 tp=2", sequence="ulysses", order="striped"),
    Plan("fsdp=2 sp=4", sequence="gather", remat="block"), Plan("fsdp=2 sp=4", microbatches=2, zero=2),
]  # fmt: skip
AUTO = [Plan("fsdp=2 sp=2 tp=2", reading="auto"), Plan("dp=2 sp=4", reading="auto", sequence="ulysses")]


@pytest.mark.parametrize("plan", PLANS + AUTO, ids=name)
def test_a_cut_sequence_gives_the_gradients_of_one_device(plan):
    assert_same(LLAMA, plan)


def test_a_batch_dealt_in_another_order_than_the_plan_says_is_another_batch(monkeypatch):
    """The planted fault: zigzag places, read as contiguous ones by a plan that skips what it takes for masked."""
    places = attention.order("zigzag", SEQ, 2)
    monkeypatch.setattr(attention, "order", lambda *_: places)
    with pytest.raises(AssertionError):
        assert_same(LLAMA, Plan("dp=2", zero=0, attention_block=4))


@pytest.mark.parametrize("plan", [*PLANS[1:], Plan("sp=4", dtype="bfloat16", remat="block")], ids=name)
def test_what_attention_sends_is_predicted_to_the_byte(plan):
    step = Step(LLAMA, plan, make_mesh(plan.mesh), optax.adamw(1e-3))
    text = hlo.partitioned_hlo(step.lower(16, 32))
    assert table(hlo.census_hlo(text, step.mesh)) == predicted(LLAMA, plan)


def test_no_activation_is_gathered_over_the_sequence():
    """A ring passes keys on. The only bytes gathered along sp would be a mistake in a region's table."""
    assert not [key for key in predicted(LLAMA, Plan("sp=8")) if key[0] == "sp" and key[1] == "all-gather"]
    gathered = predicted(LLAMA, Plan("sp=8", sequence="gather"))
    assert gathered["sp", "all-gather"][1] > 0


def test_the_ring_for_llama3_heads_sends_a_sixth_of_one_that_turns_all_query_heads_in_float32():
    """At sp = 8 in bfloat16: 7 hops of 8 KV heads against 8 hops of 32 heads, K of them in float32."""
    config, n, tokens = preset("llama3-8b"), 8, 1024
    ours = (n - 1) * 2 * tokens * config.num_kv_heads * config.head_width * 2
    peer = n * tokens * config.num_heads * config.head_width * (4 + 2)
    assert ours <= peer / 6


@pytest.mark.parametrize("places, most", [("zigzag", 1.0), ("striped", 1.1), ("contiguous", 2 - 1 / 8)])
def test_the_busiest_rank_of_a_causal_ring(places, most):
    """Work of the busiest rank over the mean: 2 - 1/n when positions are dealt in order (Brandon et al. 2023)."""
    work = attention.live_blocks(8, places, block=1 if places != "contiguous" else 16, s=128).sum(1)
    assert work.max() / work.mean() <= most + 1e-9
    if places == "contiguous":
        assert work.max() / work.mean() > 1.6


@pytest.mark.parametrize("plan, seq, sentence", [
    (Plan("sp=4"), 12, "order='zigzag' cuts a sequence into 2·sp = 8 parts, and 12 is no multiple; use 8"),
    (Plan("sp=4", order="striped"), 18, "sequence 18 is not a multiple of sp = 4"),
    (Plan("sp=4 tp=4", sequence="ulysses"), 32, "cuts the 2 KV heads of a device by sp = 4"),
    (Plan("sp=2", attention_block=24), 128, "not a multiple of attention_block = 24"),
])  # fmt: skip
def test_what_cannot_be_cut_is_refused(plan, seq, sentence):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(").replace("·", "·")):
        plan.check(LLAMA, BATCH, seq)


def test_positions_travel_with_their_tokens():
    places = attention.order("zigzag", SEQ, 4)
    assert sorted(places) == list(range(SEQ)) and list(places[:4]) == [0, 1, 14, 15]
    np.testing.assert_array_equal(batch()["positions"][0][places], places)


def test_the_model_never_asks_a_ring_for_a_tile_that_joins_zigzags_two_parts(monkeypatch):
    """A tile as long as a rank's positions would make every block live: no causal work would be saved."""
    ring, asked = attention.ring, []
    monkeypatch.setattr(attention, "ring", lambda *args, block, **how: asked.append(block) or ring(*args, block=block, **how))
    for block in (16, 64, 128):
        plan = Plan("sp=4", order="zigzag", attention_block=block)
        step = Step(LLAMA, plan, make_mesh(plan.mesh), optax.adamw(1e-3))
        step.run.trace(step.abstract_state, step.abstract_batch(4, 256))  # 64 positions a rank
    assert set(asked) == {16, None}
    joined, apart = (attention.live_blocks(4, "zigzag", s=256, block=tile).sum() for tile in (64, 32))
    assert apart < 0.7 * joined
