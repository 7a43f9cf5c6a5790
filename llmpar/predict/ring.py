"""How much each rank of ring attention computes, and when."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmpar.kernels.tiles import KernelTiles, kernel_tiles
from llmpar.sequence_order import CAUSAL, Mask, sequence_permutation, tile_length

PRODUCTS = {"flash_forward": 2, "flash_queries_grad": 3, "flash_keys_grad": 4}
"""Matrix products of a head's width for each pair of tiles: scores and output; backward the scores, the
weights' gradient and dQ; or these two, dV and dK."""


def pairs_by_step(
    n: int, name: str = "zigzag", mask: Mask = CAUSAL, *, s: int = 0, block: int = 1
) -> np.ndarray:
    """Return pairs[rank, step]: how many query-key pairs a ring of n computes, whole tiles of `block`
    positions counted.

    At step j rank i holds the keys of rank i-j. With block 1 these are the pairs seen. Usually s is 16 n.
    """
    s = s or 16 * n
    tiles = sequence_permutation(name, s, n).reshape(-1, tile_length(block, s // n))
    low, high = tiles.min(1), tiles.max(1)
    live = mask.admits(low[:, None] - high, high[:, None] - low) * tiles.shape[1] ** 2
    pairs = live.reshape(n, len(tiles) // n, n, -1).sum((1, 3))
    return np.stack([np.roll(row[::-1], rank + 1) for rank, row in enumerate(pairs)])


def seen_share(
    s: int, n: int = 1, name: str = "zigzag", mask: Mask = CAUSAL, tiles: KernelTiles | None = None
) -> float:
    """Return the share of all pairs of s positions that the kernel of attention computes, mean over ranks and
    hops: whole tiles, of those in which some pair is seen. One document a row; more make it less."""
    tiles = tiles or kernel_tiles("flash_forward", 128, 2, s // n, s // n)
    at = sequence_permutation(name, s, n)
    (q_low, q_high), (k_low, k_high) = (
        (x.min(1), x.max(1)) for x in (at.reshape(-1, tile) for tile in (tiles.q, tiles.k))
    )
    return float(mask.admits(q_low[:, None] - k_high, q_high[:, None] - k_low).mean())


def kernel_flops(name: str, shapes: Sequence[tuple[int, ...]], share: float = 1.0) -> float:
    """Return the FLOPs of one call of a kernel of `llmpar.kernels.flash`, which a compiled program shows as a
    custom call of that name.

    ``shapes``: those of its operands, of which the first is the queries ``b s k r h`` and the second the keys
    ``b t k h``; on TPUs they come behind spans of three dims, as ``b k r s h`` and ``b k t h``.
    ``share``: of the pairs of queries and keys those that are computed (`seen_share`).
    """
    if name not in PRODUCTS:
        raise ValueError(f"'{name}' is no kernel of llmpar.kernels.flash: {', '.join(sorted(PRODUCTS))}")
    if len(shapes[0]) == 3:
        (b, k, r, s, h), (_, _, t, _) = shapes[1:3]
    else:
        (b, s, k, r, h), (_, t, _, _) = shapes[:2]
    return PRODUCTS[name] * 2.0 * b * s * t * k * r * h * share
