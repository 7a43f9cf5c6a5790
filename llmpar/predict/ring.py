"""The arithmetic of a ring: what a collective sends, and how much each rank of ring attention computes."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from llmpar.sequence_order import CAUSAL, Mask, sequence_permutation, tile_length


def ring_share(kind: str, group: int) -> Fraction:
    """How much of one collective's message each of ``group`` devices sends on a ring: all but one piece,
    (g-1)/g; twice that for an all-reduce, which is a reduce-scatter and an all-gather; all of it where it is
    permuted, and nothing to `vary`.

    The message is the whole: the gathered result, the unreduced input, the local buffer that all exchange.
    """
    if kind in ("permute", "collective-permute"):
        return Fraction(group > 1)
    laps = {"all-reduce": 2, "maximum": 2, "vary": 0}.get(kind, 1)
    return Fraction(laps * (group - 1), group)


def ring_bytes(kind: str, message_bytes: int, group: int) -> int:
    """`ring_share` of a message in whole bytes. Where ``group`` does not divide the message its pieces
    differ, and so does what the devices send. Their mean is exact, however the ring cuts the message; a
    fraction of a byte counts as one.
    """
    return math.ceil(message_bytes * ring_share(kind, group))


def pairs_by_step(
    n: int, name: str = "zigzag", mask: Mask = CAUSAL, *, s: int = 0, block: int = 1
) -> np.ndarray:
    """Return pairs[rank, step]: how many query-key pairs a ring of n computes, whole tiles of `block`
    positions counted.

    At step j rank i holds the keys of rank i-j. With block 1 these are the pairs that are seen. By default s
    is 16 n.
    """
    s = s or 16 * n
    tiles = sequence_permutation(name, s, n).reshape(-1, tile_length(block, s // n))
    low, high = tiles.min(1), tiles.max(1)
    live = mask.admits(low[:, None] - high, high[:, None] - low) * tiles.shape[1] ** 2
    pairs = live.reshape(n, len(tiles) // n, n, -1).sum((1, 3))
    return np.stack([np.roll(row[::-1], rank + 1) for rank, row in enumerate(pairs)])
