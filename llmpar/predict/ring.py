"""How much each rank of ring attention computes, and when."""

import math
from bisect import bisect_right
from collections.abc import Sequence

from llmpar.kernels.tiles import KernelTiles
from llmpar.plan.sequence_order import CAUSAL, Mask, sequence_permutation, tile_length

PRODUCTS = {"flash_forward": 2, "flash_queries_grad": 3, "flash_keys_grad": 4}
"""Matrix products of a head's width for each pair of tiles: scores and output; backward the scores, the
weights' gradient and dQ; or these two, dV and dK."""


def pairs_by_step(
    n: int, name: str = "zigzag", mask: Mask = CAUSAL, *, s: int = 0, block: int = 1
) -> list[list[int]]:
    """Return pairs[rank][step]: query-key pairs that a ring of n computes, in whole tiles of `block`.

    At step j rank i holds the keys of rank i-j. With block 1 these are the pairs seen. Usually s is 16 n.
    """
    s = s or 16 * n
    tile = tile_length(block, s // n)
    tiles = _tiles(sequence_permutation(name, s, n), tile)
    each = len(tiles) // n
    ranks = [tiles[rank * each : (rank + 1) * each] for rank in range(n)]
    return [[_live(ranks[i], ranks[i - j], mask) * tile**2 for j in range(n)] for i in range(n)]


def seen_share(
    tiles: KernelTiles, s: int, n: int = 1, name: str = "zigzag", mask: Mask = CAUSAL
) -> float:
    """Return the share of all pairs of s positions that the kernel of attention computes, mean over ranks and
    hops: whole tiles, of those in which some pair is seen. One document a row; more make it less."""
    at, own = sequence_permutation(name, s, n), s // n
    ranks = [at[begin : begin + own] for begin in range(0, s, own)]
    queries, keys = ([one for rank in ranks for one in _tiles(rank, tile)] for tile in tiles[:2])
    return _live(queries, keys, mask) / (len(queries) * len(keys))


def _tiles(order: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Return the first and the last position of each tile of so many places; the last tile may be shorter."""
    parts = (order[at : at + length] for at in range(0, len(order), length))
    return [(min(part), max(part)) for part in parts]


def _live(queries: list[tuple[int, int]], keys: list[tuple[int, int]], mask: Mask) -> int:
    """Return how many tiles of keys the tiles of queries meet in all: those that begin before the queries
    end, but for those that end before a window begins. What `Mask.admits` says of each pair, counted by
    sorting."""
    begins, ends = (sorted(places) for places in zip(*keys, strict=True))
    met = sum(bisect_right(begins, last) for _, last in queries)
    return met - sum(bisect_right(ends, first - mask.window) for first, _ in queries if mask.window)


def kernel_flops(name: str, shapes: Sequence[tuple[int, ...]], share: float = 1.0) -> float:
    """Return the FLOPs of one call of a kernel of `llmpar.kernels.flash`, in programs a custom call.

    ``shapes``: those of its operands, among which the first of five dims is the queries ``b s k r h`` and the
    first of four the keys ``b t k h``; on TPUs, where spans come before them, ``b k r s h`` and ``b k t h``.
    ``share``: of the pairs of queries and keys those that are computed (`seen_share`).
    """
    if name not in PRODUCTS:
        raise ValueError(
            f"'{name}' is no kernel of llmpar.kernels.flash: {', '.join(sorted(PRODUCTS))}"
        )
    rows, keys = (next(x for x in shapes if len(x) == dims) for dims in (5, 4))
    t = keys[2 if len(shapes[0]) < 4 else 1]
    return PRODUCTS[name] * 2.0 * math.prod(rows) * t * share
