"""Copies of hot experts between greedy placement and bound; what one hop and two send, as counted."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from llmpar.predict.placement import copies_of, copies_sent, least_load, place

SIZES = [(64, 8, 10), (32, 8, 5), (16, 8, 3), (64, 16, 5)]  # experts, devices, slots of each


def cases():
    """200 random loads with heavy tails."""
    for seed in range(200):
        dice = random.Random(seed)
        yield [dice.paretovariate(1.2) for _ in range(SIZES[seed % 4][0])], *SIZES[seed % 4][1:]


def fullest(loads, devices, slots, **more):
    """The largest load of a device, counted anew from the placement."""
    placed, counts = place(loads, devices, slots, **more), copies_of(loads, devices * slots)
    assert Counter(itertools.chain(*placed)) == dict(enumerate(counts)) and {*map(len, placed)} == {slots}
    return max(sum(loads[e] / counts[e] for e in own) for own in placed)


def test_no_placement_is_worse_than_the_greedy_one_or_better_than_the_bound():
    bounds = np.array([least_load(*case) for case in cases()])
    greedy = np.array([fullest(*case, swaps=0) for case in cases()]) / bounds
    found = np.array([fullest(*case) for case in cases()]) / bounds
    assert (found <= greedy + 1e-9).all() and (found >= 1 - 1e-9).all()
    assert (found < greedy - 1e-9).sum() > 150, "swaps help in most"
    assert (found - 1).mean() < 0.9 * (greedy - 1).mean()


def test_small_placements_are_the_best_there_are():
    """All of 6 copies on 3 devices, against each way to deal them out."""
    for seed in range(20):
        loads = [random.Random(seed).paretovariate(1) for _ in range(5)]
        counts = copies_of(loads, 6)
        share = [loads[e] / n for e, n in enumerate(counts) for _ in range(n)]
        dealt = ([p[i : i + 2] for i in (0, 2, 4)] for p in itertools.permutations(share))
        best = min(max(map(sum, pairs)) for pairs in dealt)
        assert fullest(loads, 3, 2) == pytest.approx(best)


@pytest.mark.parametrize("limit", [2, 4])
def test_hops_send_as_many_copies_as_counted_choices_do(limit):
    """Of 20,000 tokens, each on a random device, with 8 experts in 2 or 4 of 4 nodes of 4 devices."""
    experts, top_k, nodes, devices, tokens = 64, 8, 4, 4, 20_000
    rng, node, total = np.random.default_rng(0), experts // nodes, Counter()
    for home in rng.integers(nodes * devices, size=tokens):
        open_nodes = rng.permutation(nodes)[:limit]
        allowed = (open_nodes[:, None] * node + np.arange(node)).ravel()
        ranks = {int(e) // (node // devices) for e in rng.permutation(allowed)[:top_k]}
        away = {r for r in ranks if r // devices != home // devices}
        total["one hop, between nodes"] += len(away)
        total["one hop, inside"] += len(ranks - away - {int(home)})
        total["two hops, between nodes"] += len({r // devices for r in away})
        total["two hops, inside"] += sum(r % devices != home % devices for r in ranks)
    for name, copies in copies_sent(experts, top_k, nodes, devices, limit).items():
        assert total[name] / tokens == pytest.approx(copies, rel=0.01), name
