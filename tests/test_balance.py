"""Packed documents under context parallelism: every rank has as many positions, and the same causal work."""

import numpy as np
import pytest

from llmpar.plan.sequence_order import sequence_permutation
from llmpar.training.balance import balanced_order, row_orders, work


def row(lengths):
    return np.repeat(np.arange(1, len(lengths) + 1), lengths)


def ratio(order, segments, n, window=None):
    """The busiest rank's work over the mean; and the busiest's."""
    ranks = work(segments, window)[order].reshape(n, -1).sum(1)
    return ranks.max() / ranks.mean(), ranks.max()


def naive_work(segments):
    s = np.arange(len(segments))
    return ((segments[:, None] == segments[None]) & (s[:, None] >= s[None])).sum(1)


def fill(rng, draw, s):
    """Documents drawn until the row is full; the last is cut."""
    lengths = []
    while sum(lengths) < s:
        lengths.append(min(max(1, int(draw(rng))), s - sum(lengths)))
    return row(lengths)


DRAWS = {
    "log-normal, median 400": lambda rng: rng.lognormal(6, 1.3),
    "log-normal, median 3,000": lambda rng: rng.lognormal(8, 1.2),
    "Pareto, a few very long": lambda rng: 100 * (1 + rng.pareto(1.1)),
    "uniform, short": lambda rng: rng.integers(20, 200),
    "one long among short": lambda rng: 6000 if rng.random() < 0.02 else rng.integers(5, 60),
}


@pytest.mark.parametrize("n", [2, 4, 8, 16])
@pytest.mark.parametrize("kind", DRAWS)
def test_the_busiest_rank_has_at_most_a_twentieth_more_than_the_mean(kind, n):
    """Rows of 8,192 and 32,768 positions with documents as in pretraining corpora."""
    rng, zigzag = np.random.default_rng(n), []
    for s in (8192, 8192, 8192, 32768):
        segments = fill(rng, DRAWS[kind], s)
        order = balanced_order(segments, n)
        assert np.array_equal(np.sort(order), np.arange(s))
        assert ratio(order, segments, n)[0] <= 1.05
        zigzag.append(ratio(sequence_permutation("zigzag", s, n), segments, n)[0])
    assert n == 2 or max(zigzag) > 1.05, "and there was something to balance"


ADVERSARIAL = [1] * 64, [64], [63, 1], [1, 63], [32, 32], [31, 23, 7, 3], [3] * 20 + [4], [7] * 9 + [1]
ADVERSARIAL += ([20, 15, 10, 8, 5, 3, 2, 1],)


def rows_of_any_kind():
    """Segments, ranks and a window: adverse lengths, and a thousand random rows."""
    yield from ((row(lengths), n, None) for lengths in ADVERSARIAL for n in (1, 2, 4, 8, 16, 32))
    rng = np.random.default_rng(0)
    for _ in range(1000):
        n = int(rng.choice([2, 3, 4, 6, 8]))
        s = 2 * n * int(rng.integers(1, 40))
        segments = fill(rng, lambda rng, s=s: rng.integers(1, rng.integers(2, s + 2)), s)
        yield segments, n, None if rng.random() < 0.7 else int(rng.integers(1, s))


def test_whatever_the_lengths_it_is_never_worse_than_zigzag_and_near_the_mean():
    for segments, n, window in rows_of_any_kind():
        order, s = balanced_order(segments, n, window), len(segments)
        assert np.array_equal(np.sort(order), np.arange(s))
        assert np.all(np.diff(order.reshape(n, -1), axis=1) > 0), "a rank's positions rise"
        busiest = ratio(order, segments, n, window)[1]
        if s % (2 * n) == 0:
            assert busiest <= ratio(sequence_permutation("zigzag", s, n), segments, n, window)[1]
        if not window:
            np.testing.assert_array_equal(work(segments), naive_work(segments))
            assert busiest <= work(segments).sum() / n + 2 * n


def test_one_document_is_a_zigzag_and_odd_rows_need_only_as_many_positions_on_each_rank():
    assert balanced_order(np.ones(64, int), 4).tolist() == sequence_permutation("zigzag", 64, 4)
    assert sequence_permutation("balanced", 12, 4) == balanced_order(np.ones(12, int), 4).tolist()
    assert ratio(balanced_order(np.ones(12 * 9, int), 12), np.ones(12 * 9, int), 12)[0] <= 1.2
    with pytest.raises(ValueError, match="balanced order deals 10 positions to 4 ranks; use a multiple of 4"):
        balanced_order(np.ones(10, int), 4)


def test_fixed_orders_are_the_same_for_every_row():
    segments = np.stack([row([20, 12]), row([5, 27])])
    for name in ("zigzag", "striped", "contiguous"):
        assert (row_orders(name, segments, 4) == sequence_permutation(name, 32, 4)).all()
    ours = row_orders("balanced", segments, 4)
    assert (ours[0] != ours[1]).any()
