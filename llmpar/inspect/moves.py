"""Find the cheapest moves between two layouts of a value. No JAX is needed.

XLA does not always take them: from ``P('X', None)`` to ``P(None, 'Y')`` it gathers whole columns and slices
them; to slice first, and then to gather, sends half. A layout is, for each dim, the axes that cut it; one
entry more than there are dims is the axes of an unfinished sum.
"""

import functools
import heapq
import itertools
import math
import os.path
from collections.abc import Iterator
from typing import NamedTuple

from llmpar.inspect.census import collective_bytes

Cuts = tuple[tuple[str, ...], ...]
Sizes = tuple[tuple[str, int], ...]
"""The axes of a mesh with their sizes."""
MOST_AXES = 4
"""Axes: the layouts on more of them are too many to search."""


class Step(NamedTuple):
    """State one move: its collective (or "slice"), its axes, the layout after it, what a device sends."""

    kind: str
    axes: tuple[str, ...]
    cuts: Cuts
    bytes_sent: int


@functools.cache
def cheapest_moves(
    before: Cuts, after: Cuts, shape: tuple[int, ...], itemsize: float, sizes: Sizes
) -> tuple[Step, ...]:
    """Return the moves from one layout to another that send the fewest bytes, and of those the fewest moves.
    Raises ValueError where dims are not divided evenly, or the layout after has another sum."""
    queue: list[tuple[int, int, Cuts, tuple[Step, ...]]] = [(0, 0, before, ())]
    done = set[Cuts]()
    while queue:
        sent, count, cuts, path = heapq.heappop(queue)
        if cuts == after:
            return path
        for kind, axes, more in _moves(cuts, len(shape), dict(sizes)) if cuts not in done else ():
            step = taken(kind, axes, more, shape, itemsize, dict(sizes))
            if step:
                heapq.heappush(queue, (sent + step.bytes_sent, count + 1, more, (*path, step)))
        done.add(cuts)
    raise ValueError(f"the layouts {before} and {after} do not divide {shape} evenly")


def taken(
    kind: str,
    axes: tuple[str, ...],
    cuts: Cuts,
    shape: tuple[int, ...],
    itemsize: float,
    sizes: dict[str, int],
) -> Step | None:
    """Return a move to a layout with the bytes that a device sends; None where that divides unevenly."""
    if (part := local_elements(shape, cuts, sizes)) is None:
        return None
    group = math.prod(sizes[a] for a in axes)
    sent = 0 if kind == "slice" else collective_bytes(kind, group, int(part * itemsize))
    return Step(kind, axes, cuts, sent)


def local_elements(shape: tuple[int, ...], cuts: Cuts, sizes: dict[str, int]) -> int | None:
    """Return the elements of a device, None where dims are not divided evenly."""
    tiles = [math.prod(sizes[a] for a in axes) for axes in cuts[: len(shape)]]
    even = all(n % m == 0 for n, m in zip(shape, tiles, strict=True))
    return math.prod(shape) // math.prod(tiles) if even else None


def _moves(
    cuts: Cuts, rank: int, sizes: dict[str, int]
) -> Iterator[tuple[str, tuple[str, ...], Cuts]]:
    """List each single move from a layout: its collective, its axes, the layout after it."""
    put = lambda cuts, d, axes: (*cuts[:d], axes, *cuts[d + 1 :])
    flat = sum(cuts, ())
    sums = sum(cuts[rank:], ())
    for some in (p for k in range(len(sums)) for p in itertools.permutations(sums, k + 1)):
        added = put(cuts, rank, tuple(a for a in sums if a not in some))
        yield "all-reduce", some, added
        for d in range(rank):
            yield "reduce-scatter", some, put(added, d, cuts[d] + some)
    for d, axes in enumerate(cuts[:rank]):
        for a in sizes.keys() - flat:
            yield "slice", (a,), put(cuts, d, (*axes, a))
        for k in range(len(axes)):
            rest, inner = put(cuts, d, axes[:k]), axes[k:]
            yield "all-gather", inner, rest
            for e in (e for e in range(rank) if e != d):
                yield "all-to-all", inner, put(rest, e, (*cuts[e], *inner))
    tiles = [math.prod(sizes[a] for a in axes) for axes in cuts[:rank]]
    for other in itertools.permutations(a for a in sizes if a not in sums):
        more, names = list[tuple[str, ...]](), [*other]
        for tile in tiles:
            more.append(())
            while math.prod(sizes[a] for a in more[-1]) < tile and names:
                more[-1] += (names.pop(0),)
        same = tiles == [math.prod(sizes[a] for a in axes) for axes in more]
        if same and tuple(more) != cuts[:rank]:
            yield "collective-permute", other[:1], (*more, *cuts[rank:])


def gather_first(
    before: Cuts, after: Cuts, shape: tuple[int, ...], itemsize: float, sizes: Sizes
) -> tuple[Step, ...]:
    """Return the plain moves between two layouts: finish sums, gather what is cut otherwise, then slice."""
    rank, path, cuts = len(shape), list[Step | None](), [*before]
    now = lambda kind, axes: taken(kind, axes, tuple(cuts), shape, itemsize, dict(sizes))
    if gone := tuple(a for a in sum(before[rank:], ()) if a not in sum(after[rank:], ())):
        cuts[rank:] = after[rank:]
        path.append(now("all-reduce", gone))
    for d in range(rank):
        kept = len(os.path.commonprefix([before[d], after[d]]))
        cuts[d] = before[d][:kept]
        path += [now("all-gather", before[d][kept:])] * (kept < len(before[d]))
    for d in range(rank):
        new, cuts[d] = after[d][len(cuts[d]) :], after[d]
        path += [now("slice", new)] * bool(new)
    return tuple(filter(None, path))
