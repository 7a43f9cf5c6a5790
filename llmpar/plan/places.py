"""The order of layers of several kinds: as loops, and as places of a pipeline's chunks.

Every stage runs one program. So each chunk has the same places for layers, as few as hold the kinds of every
chunk in their order; which of them hold a layer is a table, and the others are skipped. Their weights, zeros
that no stage computes with, are stored all the same. DeepSeek's dense layer D before layers of experts M, on
two stages:

    places     D  M  M  M  M
    stage 0    0  1  2  3  -
    stage 1    -  4  5  6  7
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from llmpar.plan.schedules import Schedule, deal

Kinds = tuple[int, ...]
"""Of layers that follow one another, the index of each one's kind."""


class LayerPlace(NamedTuple):
    """A place for a layer, which every chunk has."""

    kind: int
    layers: tuple[int, ...]  # of each chunk along a route, the layer that it has there; -1: none


class LayerLoop(NamedTuple):
    """Layers of these kinds, so often."""

    kinds: Kinds
    times: int
    filled: tuple[bool, ...] = (True,)  # which chunks along a route have them


def repeated(order: Kinds) -> tuple[Kinds, Kinds]:
    """Return the shortest lead and period whose repetition gives an order."""
    choices = []
    for n in range(1, len(order) + 1):
        other = (i for i in range(len(order) - n, 0, -1) if order[i - 1] != order[i - 1 + n])
        start = next(other, 0)
        choices.append((order[:start], order[start : start + n]))
    return min(choices, key=lambda choice: (sum(map(len, choice)), len(choice[0])))


def loops(order: Kinds, lead: int, period: int, last: int = 0) -> list[LayerLoop]:
    """Return layers as loops over their period, behind so many others and before the ``last`` ones. These,
    and what remains of a period, are loops over equal layers."""
    times = (len(order) - lead - last) // period
    end = lead + times * period
    alike = lambda kinds: [LayerLoop((k,), len([*group])) for k, group in itertools.groupby(kinds)]
    middle = [LayerLoop(order[lead : lead + period], times)] if times else []
    return [*alike(order[:lead]), *middle, *alike(order[end:])]


@functools.lru_cache(maxsize=256)
def chunk_places(kinds: Kinds, num_chunks: int) -> tuple[LayerPlace, ...]:
    """Return the places of the chunks that a model's layers are dealt to."""
    numbers = iter(range(len(kinds)))
    chunks = [list(itertools.islice(numbers, n)) for n in deal(len(kinds), num_chunks)]
    order: Kinds = ()
    for chunk in chunks:
        order = _with(order, tuple(kinds[i] for i in chunk))
    table = []
    for kind in order:  # the first that a chunk can use
        fits = [bool(chunk) and kinds[chunk[0]] == kind for chunk in chunks]
        taken = (chunk.pop(0) if fit else -1 for chunk, fit in zip(chunks, fits, strict=True))
        table.append(LayerPlace(kind, tuple(taken)))
    return tuple(table)


def _with(order: Kinds, other: Kinds) -> Kinds:
    """Return a short order that has both in it."""
    if order[: len(other)] == other:
        return order
    parts = SequenceMatcher(None, order, other, autojunk=False).get_opcodes()
    both = ((order[a:b], () if same == "equal" else other[c:d]) for same, a, b, c, d in parts)
    return tuple(itertools.chain(*itertools.chain(*both)))


@functools.lru_cache(maxsize=256)
def chunk_loops(kinds: Kinds, num_chunks: int) -> tuple[LayerLoop, ...]:
    """Return the loops of every chunk: of neighbouring places that the same chunks have layers at."""
    filled = lambda place: tuple(layer >= 0 for layer in place.layers)
    parts = list[LayerLoop]()
    for has, group in itertools.groupby(chunk_places(kinds, num_chunks), filled):
        order = tuple(place.kind for place in group)
        lead, period = repeated(order)
        parts += [loop._replace(filled=has) for loop in loops(order, len(lead), len(period))]
    return tuple(parts)


def layer_orders(schedule: Schedule | None, kinds: Kinds) -> list[list[int]]:
    """Return, of each kind, the layer at each place of the stored stack, so that cutting it by pp gives every
    stage its chunks in order. Layers are counted among those of their kind; a place without a layer has their
    number.

    `llmpar.training.layer_order` applies it to what has no stages: fresh weights, checkpoints, Hugging Face.
    """
    ranks: list[dict[int, int]] = [{} for _ in range(max(kinds) + 1)]
    for layer, kind in enumerate(kinds):
        ranks[kind][layer] = len(ranks[kind])
    route = schedule.routes[0] if schedule else [(0, 0)]
    table, stacks = chunk_places(kinds, len(route)), list[list[int]]()
    for kind, rank in enumerate(ranks):
        own = [place.layers for place in table if place.kind == kind]
        numbers = (layers[route.index(cell)] for cell in sorted(route) for layers in own)
        stacks.append([rank.get(layer, len(rank)) for layer in numbers])
    return stacks


def positions(schedule: Schedule) -> list[list[int]]:
    """Return where each chunk of each stage is on its route."""
    numbers = {cell: i for route in schedule.routes for i, cell in enumerate(route)}
    chunks: Sequence[int] = range(len(numbers) // schedule.num_stages)
    return [[numbers[stage, chunk] for chunk in chunks] for stage in range(schedule.num_stages)]


def fragment(sizes: Mapping[str, int], count: int, index: int) -> dict[str, slice]:
    """Return which rows are in one of ``count`` fragments of a model, from the size of each weight's first
    dim: of a stack layers that follow one another; weights without layers are whole, in the fragments in
    turn."""
    whole = sorted(path for path in sizes if not path.startswith("blocks."))
    own = whole[index::count]
    cut = lambda n: slice(n * index // count, n * (index + 1) // count)
    return {
        path: slice(n if path in own else 0) if path in whole else cut(n)
        for path, n in sizes.items()
    }
