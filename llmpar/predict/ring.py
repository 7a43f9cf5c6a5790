"""How much each rank of ring attention computes, and when."""

from __future__ import annotations

import numpy as np

from llmpar.sequence_order import CAUSAL, Mask, sequence_permutation, tile_length


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
