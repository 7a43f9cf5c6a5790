"""Deal rows of several documents to ranks, with equal positions and causal work. No JAX: a loader does it."""

import numpy as np

from llmpar.plan.sequence_order import sequence_permutation


def row_orders(name: str, segments_bs: np.ndarray, n: int, window: int | None = None) -> np.ndarray:
    """Return ``b s``: which position of its row each place holds, where rank i of n has the i-th part of the
    places. Only 'balanced' looks at the documents, ``segments_bs`` of the rows as they were written."""
    if name == "balanced":
        return np.stack([balanced_order(row, n, window) for row in segments_bs])
    return np.broadcast_to(sequence_permutation(name, segments_bs.shape[1], n), segments_bs.shape)


def _zigzag(places: np.ndarray, n: int) -> np.ndarray:
    """Return a row for each of n ranks: parts i and 2n-1-i of 2n for rank i, which sees as many keys as any
    other where all places are one document."""
    parts = places.reshape(2 * n, -1)
    return np.concatenate([parts[:n], parts[: n - 1 : -1]], axis=1)


def work(segments_s: np.ndarray, window: int | None = None) -> np.ndarray:
    """Return how many keys each position sees: those of its document up to itself, at most a ``window``."""
    s = np.arange(len(segments_s))
    begins = np.where(np.diff(segments_s, prepend=segments_s[:1] - 1), s, 0)
    return np.minimum(1 + s - np.maximum.accumulate(begins), window or len(s))


def balanced_order(segments_s: np.ndarray, n: int, window: int | None = None) -> np.ndarray:
    """Return the order of a row of documents that gives n ranks equally many positions and the same causal
    work, to about 2n keys.

    Each document is cut like a zigzag, in 2n pieces; its first positions, fewer than 2n, are left over, the
    cheapest that there are (Llama 3 2024 and WLB-LLM, Wang et al. 2025, cut by documents too). A pair of
    pieces, first and last, or a position that was left over, goes to the rank with the least work so far, the
    heaviest first, and each rank gets one of every n. Where a plain zigzag is better, it is taken.
    """
    s, cost = len(segments_s), work(segments_s, window)
    if s % n:
        raise ValueError(f"balanced order deals {s} positions to {n} ranks; use a multiple of {n}")
    lengths = np.diff(starts := np.flatnonzero(work(segments_s) == 1), append=s)
    rank, load = np.empty(s, int), np.zeros(n, int)

    def deal(rows: np.ndarray) -> None:
        sums = cost[rows].sum(1)
        heavy, to = (np.argsort(x, kind="stable") for x in (-sums, load))
        rank[rows[heavy]], load[to] = to[:, None], load[to] + sums[heavy]

    for begin, length in sorted(zip(starts, lengths, strict=True), key=lambda it: -it[1]):
        deal(_zigzag(np.arange(begin + length % (2 * n), begin + length), n))
    left = np.flatnonzero(np.arange(s) < np.repeat(starts + lengths % (2 * n), lengths))
    for rows in left[np.argsort(-cost[left], kind="stable")].reshape(-1, n, 1):
        deal(rows)
    dealt = np.argsort(rank, kind="stable")
    if s % (2 * n):
        return dealt
    busiest = lambda order: cost[order].reshape(n, -1).sum(1).max()
    return min(dealt, _zigzag(np.arange(s), n).ravel(), key=busiest)
