"""Say which keys a query sees, which rank holds which positions, and in which tiles attention cuts them.

No JAX. Attention itself never asks for the order: positions travel with queries and keys. Rows of several
documents are dealt in `llmpar.training.balance`.
"""

from dataclasses import dataclass


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


def sequence_permutation(name: str, s: int, n: int) -> list[int]:
    """Return the permutation that lays s positions onto n ranks, s/n to each in turn; np.argsort undoes it.

    'contiguous' gives the last rank of a causal ring most of the work; 'zigzag' gives rank i the parts i and
    2n-1-i of 2n; 'striped' gives it every n-th position from i on (Brandon et al. 2023); 'balanced' deals
    each document by itself (`training.balance`), and here is the order of a row that is one document: a
    zigzag, after the first n positions where it cannot cut them all.
    """
    parts = {"contiguous": n, "zigzag": 2 * n, "striped": n}.get(name, n)
    if name not in ("contiguous", "zigzag", "striped", "balanced"):
        raise ValueError(f"order '{name}' is not known; use contiguous, zigzag, striped or balanced")
    if n > 1 and s % parts:  # one rank has them all, of whatever number
        raise ValueError(
            f"{name} order cuts {s} positions into {parts} parts for {n} ranks; use a multiple of {parts}"
        )
    if n == 1 or name == "contiguous":
        return list(range(s))
    if name == "striped":
        return [place for rank in range(n) for place in range(rank, s, n)]
    left, piece, order = s % (2 * n), s // (2 * n), list[int]()
    for rank in range(n):
        order += [n - 1 - rank] * bool(left)
        for part in (rank, 2 * n - 1 - rank):
            order += range(left + part * piece, left + (part + 1) * piece)
    return order


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
