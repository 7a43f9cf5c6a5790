"""Decide which keys a query sees, which rank has which positions, and in which tiles attention cuts them.

No JAX. The result of attention does not depend on the order: every rank knows the positions of all keys. Rows
of several documents are dealt in `llmpar.training.balance`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mask:
    """Which keys a query may see: none after it, and with a `window` none that many or more positions before
    it. (Positions of different segments never see each other.) With a ``cap`` its scores become
    cap · tanh(score / cap). ``in_chunks``: positions are cut into chunks as long as the window, each of which
    is a segment by itself (`llmpar.model.attention.ids_of`)."""

    window: int | None = None
    cap: float | None = None
    in_chunks: bool = False

    def admits(self, low, high):
        """Return whether some gap (query minus key position) in [low, high] is allowed; exact if low equals
        high."""
        seen = high >= 0
        return seen if self.window is None else seen & (low < self.window)


CAUSAL = Mask()


def ring_hops(mask: Mask, order: str, n: int, keys: int) -> int:
    """Return how many hops the blocks of a ring of n ranks make, of so many keys each: n-1; in contiguous
    order with a window fewer, since a rank's first query sees no more than that many positions back."""
    if mask.window is None or order != "contiguous":
        return n - 1
    return min(n - 1, -(-(mask.window - 1) // keys))


def seen_tiles(mask: Mask, q_ids, k_ids):
    """Compare the extremes of tiles of queries, ids ``i b 2 c`` (positions, then segments), with those of
    tiles of keys, ``j b 2 d``. Return ``i j b`` twice: can some pair of the two tiles be seen; are all seen?

    In every order below a rank's positions rise. So a tile of queries needs an interval of any rank's tiles
    of keys, and a tile of keys an interval of tiles of queries.
    """
    (q_low, q_high), (k_low, k_high) = (
        (x.min(-1), x.max(-1)) for x in (q_ids[:, None], k_ids[None])
    )
    low, high = q_low[..., 0] - k_high[..., 0], q_high[..., 0] - k_low[..., 0]
    live = (
        mask.admits(low, high)
        & (q_high[..., 1] >= k_low[..., 1])
        & (q_low[..., 1] <= k_high[..., 1])
    )
    one_segment = (q_high[..., 1] == k_low[..., 1]) & (q_low[..., 1] == k_high[..., 1])
    return live, mask.admits(low, low) & mask.admits(high, high) & one_segment


def sequence_permutation(name: str, s: int, n: int) -> list[int]:
    """Return the permutation that deals s positions to n ranks, s/n to each; np.argsort undoes it.

    'contiguous' gives the last rank of a causal ring most of the work; 'zigzag' gives rank i the parts i and
    2n-1-i of 2n; 'striped' gives it every n-th position from i on (Brandon et al. 2023); 'balanced' deals
    each document by itself (`training.balance`), and this is the order of a row that is one document: a
    zigzag, after the first n positions if 2n does not divide s.
    """
    if name not in ("contiguous", "zigzag", "striped", "balanced"):
        raise ValueError(
            f"order '{name}' is not known; use contiguous, zigzag, striped or balanced"
        )
    parts = 2 * n if name == "zigzag" else n
    if n > 1 and s % parts:  # one rank takes any number
        raise ValueError(
            f"{name} order cuts {s} positions into {parts} parts for {n} ranks; use a multiple of {parts}"
        )
    if n == 1 or name == "contiguous":
        return list(range(s))
    if name == "striped":
        return [place for rank in range(n) for place in range(rank, s, n)]
    left, piece, order = s % (2 * n), s // (2 * n), list[int]()  # left: n positions or none
    for rank in range(n):
        if left:
            order.append(n - 1 - rank)
        for part in (rank, 2 * n - 1 - rank):
            order += range(left + part * piece, left + (part + 1) * piece)
    return order


FEW_TILES = 8
"""Up to so many tiles of queries the loop over pairs of tiles is unrolled, where queries and keys are the
same positions in order."""
FEW_QUERIES, FEW_KEYS = 2, 4
"""Elsewhere it is unrolled up to so many tiles of queries and of keys."""
CHUNK, CHUNKS = 64, 4
"""Of layers with a state: positions of a chunk, and chunks that are prepared at once."""


def tile_length(block: int | None, length: int) -> int:
    """Return the tile length: `block`, or half the length (so that a tile has one part of a zigzag), halved
    again down to 256."""
    if block is None:
        block = length
        while block % 2 == 0 and (block > 256 or block == length):
            block //= 2
    if block < 1 or length % min(block, length):
        raise ValueError(
            f"block={block} does not divide the {length} positions of a rank; use a divisor"
        )
    return min(block, length)
