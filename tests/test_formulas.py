"""Checks of `formulas` that no paper has: identities, limits, and small worlds that are played through."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from llmpar.predict import formulas
from llmpar.predict.hardware import chip

GROUPS = (2, 3, 8, 64)
# its default, one part in a million, is loose enough for any order of float operations
exactly = pytest.approx


def tree_seconds(kind, size, levels):
    """One collective over a tree is as slow as its slowest level."""
    return max(formulas.tree_level_seconds(kind, size, levels))


@pytest.mark.parametrize("group", GROUPS)
def test_all_reduce_is_reduce_scatter_then_all_gather_in_bytes_and_time(group):
    v, levels, shape = 1e9, [(8, 450e9), (group, 400e9)], (group, 4)

    def parts(time):
        return time("all-reduce"), time("reduce-scatter") + time("all-gather")

    for time in (
        lambda kind: formulas.sent_bytes(kind, v, group),
        lambda kind: formulas.switch_seconds(kind, v, group, 450e9),
        lambda kind: tree_seconds(kind, v, levels),
        lambda kind: formulas.torus_seconds(kind, v, shape, 45e9),
        lambda kind: formulas.torus_seconds(kind, v, shape, 45e9, wrap=False),
        lambda kind: formulas.torus_seconds(kind, 1.0, shape, 45e9, hop_s=1e-6),
        lambda kind: formulas.collective_seconds(chip("h100"), kind, v, group),
        lambda kind: formulas.collective_seconds(chip("v5p"), kind, v, group),
    ):
        together, apart = parts(time)
        assert together == exactly(apart) and together > 0


def test_nothing_moves_within_a_group_of_one():
    for kind in formulas.COLLECTIVES:
        assert formulas.sent_bytes(kind, 1e9, 1) == 0
        assert formulas.torus_seconds(kind, 1e9, (1,), 45e9, hop_s=1e-6) == 0
        assert tree_seconds(kind, 1e9, [(1, 450e9), (1, 400e9)]) == 0
        for name in ("h100", "v5e", "tpu7x", "cpu"):
            assert formulas.collective_seconds(chip(name), kind, 1e9, 1) == 0
    for stage in range(4):
        assert formulas.zero_elements(1e9, stage, 4, devices=1) == 0
    assert formulas.tp_elements(1, 8, 8, 1) == formulas.moe_elements(8, 8, 2, 1) == 0
    assert formulas.ring_elements(1, 8, 2, 4, 1) == (0, 0)
    for f, group in ((formulas.sent_bytes, 2), (tree_seconds, [(2, 1)])):
        with pytest.raises(AssertionError, match="allgather"):
            f("allgather", 1, group)


def played_all_to_all(size, wrap):
    """Busiest link, in chunks, when each device of a row sends every other one chunk the shortest way."""
    load = Counter()
    for here in range(size):
        for there in range(size):
            steps = there - here
            if wrap and abs(steps) * 2 == size:  # both ways are as short: half on each
                ways = [(steps, 0.5), (-steps, 0.5)]
            elif wrap and abs(steps) * 2 > size:
                ways = [(steps - math.copysign(size, steps), 1.0)]
            else:
                ways = [(steps, 1.0)]
            for way, share in ways:
                direction = 1 if way > 0 else -1
                for hop in range(int(abs(way))):
                    load[(here + direction * hop) % size, direction] += share
    return max(load.values())


@pytest.mark.parametrize(
    ("size", "wrap"), [(4, True), (8, True), (16, True), (2, False), (4, False), (16, False)]
)
def test_torus_all_to_all_is_the_load_of_its_busiest_link(size, wrap):
    seconds = formulas.torus_seconds("all-to-all", size * 1.0, (size,), 1.0, wrap)
    assert seconds == exactly(played_all_to_all(size, wrap))


def test_small_messages_cost_their_hops():
    assert formulas.torus_seconds("all-gather", 1, (16,), 45e9, hop_s=1e-6) == exactly(8e-6)
    assert formulas.torus_seconds("all-gather", 1, (16,), 45e9, wrap=False, hop_s=1e-6) == exactly(15e-6)
    large = formulas.torus_seconds("all-gather", 1e9, (16,), 45e9)
    assert formulas.torus_seconds("all-gather", 1e9, (16,), 45e9, hop_s=1e-6) == large


def test_a_tree_is_as_slow_as_its_slowest_level():
    levels = [(8, 450e9), (32, 400e9), (4, 12.8e12)]
    # printed to 3 digits
    assert formulas.level_bytes_per_s(levels) == exactly([514.29e9, 412.9e9, 17.07e12], rel=1e-3)
    assert tree_seconds("all-gather", 413e9, levels) == exactly(1, rel=1e-3)
    for kind in ("all-gather", "all-to-all"):
        alone = formulas.switch_seconds(kind, 1e9, 8, 450e9)
        assert tree_seconds(kind, 1e9, levels[:1]) == exactly(alone)


def test_all_to_all_loses_the_node_as_soon_as_it_leaves_it():
    """The book: from B/(8 x 450e9) inside a node to B/(2 x 400e9) over two, for an array of B bytes."""
    array = 1e9
    inside = tree_seconds("all-to-all", array / 8, [(8, 450e9)])
    across = tree_seconds("all-to-all", array / 16, [(8, 450e9), (2, 400e9)])
    assert inside == exactly(array * 7 / 64 / 450e9)
    assert across == exactly(array * (2 - 1) / 2**2 / 400e9)
    assert across > 2 * inside


def test_a_collective_over_links_follows_its_group_out_of_the_node():
    h100, v = chip("h100"), 1e9
    node = formulas.collective_seconds(h100, "all-gather", v, 8)
    assert node == exactly(formulas.switch_seconds("all-gather", v, 8, 370e9))
    assert formulas.collective_seconds(h100, "all-gather", v, 64) == exactly(node), "the node still binds"
    assert formulas.collective_seconds(h100, "all-gather", v, 1024) == exactly(v * 127 / 128 / 400e9)
    # One device in each of 8 nodes, as dp has it outside tp=8: a lone port, eight times slower than all ports
    # together.
    assert formulas.collective_seconds(h100, "all-gather", v, 8, inner=8) == exactly(v * 7 / 8 / 50e9)
    assert formulas.collective_seconds(h100, "permute", v, 8, inner=8) == exactly(v / 50e9)
    assert formulas.collective_seconds(h100, "all-to-all", v, 8, inner=8) == exactly(v * 7 / 8 / 50e9)


def test_a_collective_on_a_torus_wraps_where_the_chip_does():
    v5e, v = chip("v5e"), 1e9
    assert formulas.collective_seconds(v5e, "all-gather", v, 16) == exactly(v / 90e9)
    assert formulas.collective_seconds(v5e, "all-gather", v, 8) == exactly(v * 7 / 8 / 45e9)
    beyond = formulas.collective_seconds(v5e, "all-gather", v, 2, inner=256)
    assert beyond == exactly(v / 2 / v5e.dcn_bytes_per_s)
    fast_between = replace(v5e, dcn_bytes_per_s=1e12)
    slices = formulas.collective_seconds(fast_between, "all-gather", v, 512)
    assert slices == exactly(v * 255 / 256 / (2 * 90e9)), "inside a slice, over both of its axes"


def test_two_cores_of_a_chip_share_its_links():
    """Both cores of 4 chips gather as 4 whole chips do; a core in each of 4 chips has half of the links."""
    ironwood, v = chip("tpu7x"), 1e9
    whole = replace(ironwood, devices_per_chip=1)
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        chips = formulas.collective_seconds(whole, kind, v, 4)
        assert formulas.collective_seconds(ironwood, kind, v, 8) == exactly(chips)
        assert formulas.collective_seconds(ironwood, kind, v, 4, inner=2) == exactly(2 * chips)
    local = v / 8
    chips = formulas.collective_seconds(whole, "all-to-all", 2 * local, 4)
    assert formulas.collective_seconds(ironwood, "all-to-all", local, 8) == exactly(chips)
    pair = (formulas.collective_seconds(one, "all-gather", v, 2) for one in (ironwood, whole))
    assert next(pair) < next(pair)


@pytest.mark.parametrize("devices", [2, 8, 1000])
def test_zero_traffic_is_that_of_the_collectives_it_makes(devices):
    """Stage by stage, spelled as collectives over a + 1 of them: the closed forms are their sums."""

    def moved(*kinds):
        return sum(formulas.sent_bytes(kind, 100, devices) for kind in kinds)

    for a in (1, 4):
        made = {
            0: ["all-reduce"],
            1: ["reduce-scatter", "all-gather"],
            2: a * ["reduce-scatter"] + ["all-gather"],
            3: a * ["all-gather", "all-gather", "reduce-scatter"],
        }
        for stage, kinds in made.items():
            assert formulas.zero_elements(100, stage, a, devices) == exactly(moved(*kinds)), (stage, a)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_ring_attention_sends_what_a_played_ring_sends(n):
    b, s, k, h = 2, 64, 2, 16
    block = b * (s // n) * k * h
    forward = sum(2 * block for hop in range(n) if hop < n - 1)  # after the last block nothing need move
    # gradients make the whole round, back to their owner
    backward = forward + sum(2 * block for _ in range(n))
    assert formulas.ring_elements(b, s, k, h, n) == (forward, backward)


def test_capacity_rounds_up_but_not_for_a_float_digit():
    asked = (64, 8, 1.0, 1), (65, 8, 1.0, 1), (1000, 1, 1.1, 1), (64, 8, 1.25, 2), (8, 64, 1.0, 1)
    assert [formulas.expert_capacity(*one) for one in asked] == [8, 9, 1100, 20, 1]
