"""Say which keys a query sees, which rank holds which positions, and in which tiles attention cuts them.

No JAX. Attention itself never asks for the order: positions travel with queries and keys. A loader deals a
row of several documents to ranks while a step runs: equally many positions each, and the same causal work.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Mask:
    """Say which keys a query may see, whatever the positions: none after it, and with a `window` none that
    many or more positions before it. Two of different segments never see each other."""

    window: int | None = None

    def admits(self, low, high):
        """Tell whether a gap (query minus key position) somewhere in [low, high] can be seen; exact if low is
        high."""
        seen = high >= 0
        return seen if self.window is None else seen & (low < self.window)


CAUSAL = Mask()


def seen_tiles(mask: Mask, q_ids, k_ids):
    """Compare the extremes of tiles of queries, ids ``i b 2 c`` (positions, then segments), with those of
    tiles of keys, ``j b 2 d``. Return ``i j b`` twice: may some pair of two tiles be seen; are all seen?

    In every order below a rank's places rise. So a tile of queries meets an interval of any rank's tiles of
    keys, and a tile of keys an interval of tiles of queries.
    """
    (q_low, q_high), (k_low, k_high) = ((x.min(-1), x.max(-1)) for x in (q_ids[:, None], k_ids[None]))
    low, high = q_low[..., 0] - k_high[..., 0], q_high[..., 0] - k_low[..., 0]
    some = mask.admits(low, high) & (q_high[..., 1] >= k_low[..., 1]) & (q_low[..., 1] <= k_high[..., 1])
    alike = (q_high[..., 1] == k_low[..., 1]) & (q_low[..., 1] == k_high[..., 1])  # one segment, the same
    return some, mask.admits(low, low) & mask.admits(high, high) & alike


def sequence_permutation(name: str, s: int, n: int) -> np.ndarray:
    """Return the permutation that lays s positions onto n ranks, s/n to each in turn; np.argsort undoes it.

    'contiguous' gives the last rank of a causal ring most of the work; 'zigzag' gives rank i the parts i and
    2n-1-i of 2n; 'striped' gives it every n-th position from i on (Brandon et al. 2023); 'balanced' deals
    each document by itself, and here is the order of a row that is one document (`row_orders`).
    """
    if name == "balanced":
        return balanced_order(np.zeros(s, int), n)
    parts = {"contiguous": n, "zigzag": 2 * n, "striped": n}.get(name)
    if parts is None:
        raise ValueError(f"order '{name}' is not known; use contiguous, zigzag, striped or balanced")
    if n == 1:
        return np.arange(s)  # one rank has them all, of whatever number
    if s % parts:
        raise ValueError(
            f"{name} order cuts {s} positions into {parts} parts for {n} ranks; use a multiple of {parts}"
        )
    if name == "zigzag":
        return zigzag(np.arange(s), n).ravel()
    return np.arange(s).reshape(-1, n).T.ravel() if name == "striped" else np.arange(s)


def row_orders(name: str, segments_bs: np.ndarray, n: int, window: int | None = None) -> np.ndarray:
    """Return ``b s``: which position of its row each place holds, where rank i of n has the i-th part of the
    places. Only 'balanced' looks at the documents, ``segments_bs`` of the rows as they were written."""
    if name == "balanced":
        return np.stack([balanced_order(row, n, window) for row in segments_bs])
    return np.broadcast_to(sequence_permutation(name, segments_bs.shape[1], n), segments_bs.shape)


def tile_length(block: int | None, length: int) -> int:
    """Return the tile length: as asked; else a half (which tells a zigzag's two parts apart), halved again
    down to 256."""
    if block is None:
        block = length
        while block % 2 == 0 and (block > 256 or block == length):
            block //= 2
    if block < 1 or length % min(block, length):
        raise ValueError(f"block={block} does not divide the {length} positions held here; use a divisor")
    return min(block, length)


def zigzag(places: np.ndarray, n: int) -> np.ndarray:
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
        deal(zigzag(np.arange(begin + length % (2 * n), begin + length), n))
    left = np.flatnonzero(np.arange(s) < np.repeat(starts + lengths % (2 * n), lengths))
    for rows in left[np.argsort(-cost[left], kind="stable")].reshape(-1, n, 1):
        deal(rows)
    dealt = np.argsort(rank, kind="stable")
    if s % (2 * n):
        return dealt
    busiest = lambda order: cost[order].reshape(n, -1).sum(1).max()
    return min(dealt, zigzag(np.arange(s), n).ravel(), key=busiest)
