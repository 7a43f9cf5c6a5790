"""Find the cheapest moves between two layouts of a value. No JAX is needed.

XLA does not always take them: from ``P('X', None)`` to ``P(None, 'Y')`` it gathers whole columns and slices
them; to slice first, and then to gather, sends half. A layout is, for each dim, the axes that cut it; one
entry more than there are dims is the axes of an unfinished sum.
"""

import ast
import functools
import heapq
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from llmpar.inspect.census import collective_bytes
from llmpar.plan.layout import LETTERS, Dim, Layout, axes_of

Cuts = tuple[tuple[str, ...], ...]
Sizes = tuple[tuple[str, int], ...]
"""The axes of a mesh with their sizes."""
MOST_AXES = 4
"""Axes: the layouts on more of them are too many to search."""


class Hop(NamedTuple):
    """State one move: its collective (or "slice"), its axes, the layout after it, what a device sends."""

    kind: str
    axes: tuple[str, ...]
    cuts: Cuts
    bytes_sent: int


@functools.cache
def cheapest_moves(
    before: Cuts, after: Cuts, shape: tuple[int, ...], itemsize: float, sizes: Sizes
) -> tuple[Hop, ...]:
    """Return the moves from one layout to another that send the fewest bytes, and of those the fewest moves.
    Raises ValueError where dims are not divided evenly, or the layout after has another sum."""
    queue: list[tuple[int, int, Cuts, tuple[Hop, ...]]] = [(0, 0, before, ())]
    done = set[Cuts]()
    while queue:
        sent, count, cuts, path = heapq.heappop(queue)
        if cuts == after:
            return path
        for kind, axes, more in _moves(cuts, len(shape), dict(sizes)) if cuts not in done else ():
            if (part := local_elements(shape, more, dict(sizes))) is not None:
                group = math.prod(dict(sizes)[a] for a in axes)
                moving = (
                    0 if kind == "slice" else collective_bytes(kind, group, int(part * itemsize))
                )
                step = Hop(kind, axes, more, moving)
                heapq.heappush(queue, (sent + moving, count + 1, more, (*path, step)))
        done.add(cuts)
    raise ValueError(f"the layouts {before} and {after} do not divide {shape} evenly")


def local_elements(shape: tuple[int, ...], cuts: Cuts, sizes: dict[str, int]) -> int | None:
    """Return the elements of a device, None where dims are not divided evenly."""
    tiles = [math.prod(sizes[a] for a in axes) for axes in cuts[: len(shape)]]
    is_even = all(n % m == 0 for n, m in zip(shape, tiles, strict=True))
    return math.prod(shape) // math.prod(tiles) if is_even else None


def _moves(
    cuts: Cuts, rank: int, sizes: dict[str, int]
) -> Iterator[tuple[str, tuple[str, ...], Cuts]]:
    """List each single move from a layout: its collective, its axes, the layout after it."""
    put = lambda cuts, d, axes: (*cuts[:d], axes, *cuts[d + 1 :])
    flat, sums = sum(cuts, ()), sum(cuts[rank:], ())
    for over in (p for k in range(len(sums)) for p in itertools.permutations(sums, k + 1)):
        added = put(cuts, rank, tuple(a for a in sums if a not in over))
        yield "all-reduce", over, added
        for d in range(rank):
            yield "reduce-scatter", over, put(added, d, cuts[d] + over)
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


# ------------------------------------------------------------------------------------------ layouts as texts

SPELLINGS = "P('X', None), [Shard(0), Replicate()] or b/X s"
_SPEC = r"\s*(?:jax\.)?(?:sharding\.)?(?:P|PartitionSpec)\((.*)\)\s*"
_KEYWORDS = r",? ?\w*reduced(=\{[^}]*\}|_kind=\w+)"


def layout_from_text(text: str) -> Layout:
    """Read the layout of a type as JAX prints it, ``float32[8@(dp,fsdp),4]{U:tp}``, or of a spec,
    ``P(('dp', 'fsdp'), None)``, or of a tuple of cuts; dims are named b, s, d and so on."""
    if "[" in text:
        dims = re.sub(
            r"\([^)]*\)", lambda cut: cut[0].replace(",", " "), re.split(r"[\[\]]", text)[1]
        )
        cuts: Any = [dim.partition("@")[2].strip("()").split() for dim in dims.split(",") if dim]
    else:
        cuts = spec_cuts(text)
    axes = [axis for cut in cuts for axis in axes_of(cut)]
    if len(cuts) > len(LETTERS) or not all(str(axis).isidentifier() for axis in axes):
        raise ValueError(f"dims or axes that our notation has no names for: {text}")
    return Layout(
        tuple(map(Dim, LETTERS, map(axes_of, cuts))), tuple(sorted(marked(text, "U:|unreduced=")))
    )


def spec_cuts(spec: str) -> tuple:
    """Read the entries of a spec, or of a tuple of cuts, as JAX prints it or a user writes it."""
    inner = re.sub(_KEYWORDS, "", re.sub(r"^[\w.]*\(|\)$", "", spec.strip())).strip(" ,\n")
    return ast.literal_eval(f"({inner},)") if inner else ()


def marked(text: str, mark: str) -> list[str]:
    """Read the axes after a mark of a type: ``U:tp`` (unfinished sums), ``V:(dp,tp)`` (values that
    differ)."""
    return re.findall(
        r"\w+", "".join(re.findall(rf"\b(?:{mark})(\{{[^}}]*\}}|\([^)]*\)|\w+)", text))
    )


def read_mesh(text: str) -> dict[str, int]:
    """Read the axes of a mesh with their sizes, ``X=4 Y=2``, and nothing else."""
    words = re.split(r"[\s,]+", re.sub(r"\s*([=:])\s*", r"\1", text.strip()))
    pairs = [re.fullmatch(r"([A-Za-z_]\w*)[=:]([1-9]\d{0,5})", word) for word in words]
    sizes = {pair[1]: int(pair[2]) for pair in pairs if pair}
    if len(sizes) != len(words):
        raise ValueError(f"mesh '{text:.80}' is not read; name each axis once, as X=4 Y=2")
    return sizes


def read_layout(text: str, shape: tuple[int, ...], sizes: dict[str, int]) -> Layout:
    """Read a layout of an array of a ``shape``: ``P('X', ('Y', 'Z'))``, a placement of torch's DTensor for
    each axis of the mesh (``[Shard(0), Partial()]``), or ``b/X s/Y,Z +W``. Raises ValueError else."""
    try:
        cuts, sums = _read(text[:500], sizes)
    except (ValueError, SyntaxError, TypeError, LookupError, RecursionError, MemoryError):
        raise ValueError(
            f"'{text:.80}' is not read as a layout; write {SPELLINGS}, with a placement for each of"
            f" {', '.join(sizes)}"
        ) from None
    if len(cuts) > len(shape):
        raise ValueError(f"'{text}' has {len(cuts)} dims, and the shape {list(shape)} {len(shape)}")
    cuts += [()] * (len(shape) - len(cuts))
    used = [*itertools.chain(*cuts), *sums]
    if axis := next((a for a in used if a not in sizes or used.count(a) > 1), None):
        none = f"is none of the mesh's, {', '.join(sizes)}"
        twice = "is used twice; it can cut one dim, or be in a sum"
        raise ValueError(f"'{text}': axis '{axis}' {twice if axis in sizes else none}")
    for i, (n, axes) in enumerate(zip(shape, cuts, strict=True)):
        if n % (parts := math.prod(sizes[a] for a in axes)):
            near = parts * max(1, n // parts)
            raise ValueError(
                f"'{text}' cuts dim {i} of {n} by {','.join(axes)} = {parts}, and {n % parts} are left"
                f" (JAX refuses that, torch cuts unevenly); use {near} or {near + parts}"
            )
    return Layout(tuple(map(Dim, LETTERS, cuts)), tuple(a for a in sizes if a in sums))


def _read(text: str, sizes: dict[str, int]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the axes of each dim, and those of an unfinished sum, in any spelling."""
    if re.fullmatch(_SPEC, text, re.S):
        return [*map(axes_of, spec_cuts(text))], marked(text, "unreduced=")
    words = re.findall(r"\w+\([^()]*\)", text) or [w for w in text.split() if w != "whole"]
    if "(" not in text:  # ours
        part = r"(\+\w+)|[A-Za-z](?:/(\w+(?:,\w+)*))?"
        parts: list[Any] = [re.fullmatch(part, word) for word in words]
        dims = [tuple((part[2] or "").split(",")) for part in parts if not part[1]]
        return [(d if d[0] else ()) for d in dims], [part[1][1:] for part in parts if part[1]]
    cuts: list[Any] = [()] * 9
    sums = list[str]()
    for axis, word in zip(sizes, words, strict=True):
        if word in ("Partial()", "Partial('sum')", 'Partial("sum")'):
            sums.append(axis)
        elif word != "Replicate()":
            cuts[int(re.sub(r"^Shard\((?:dim=)?(\d)\)$", r"\1", word))] += (axis,)
    return cuts[: max((i + 1 for i, axes in enumerate(cuts) if axes), default=0)], sums


def spelled(layout: Layout, sizes: dict[str, int]) -> dict[str, str]:
    """Write a layout in each spelling. torch's has words where the axes of a dim nest as in the mesh."""
    words = [repr(d.axes if len(d.axes) > 1 else next(iter(d.axes), None)) for d in layout.dims]
    words += [f"unreduced={set(layout.sums)}"] * bool(layout.sums)
    placed = {a: f"Shard({i})" for i, d in enumerate(layout.dims) for a in d.axes}
    placed |= dict.fromkeys(layout.sums, "Partial()")
    nested = all([*d.axes] == [a for a in sizes if a in d.axes] for d in layout.dims)
    torch = f"[{', '.join(placed.get(a, 'Replicate()') for a in sizes)}]"
    none = "no words: the axes of a dim nest in another order than in the mesh"
    return {
        "JAX": f"P({', '.join(words)})",
        "torch": torch if nested else none,
        "llmpar": str(layout),
    }
