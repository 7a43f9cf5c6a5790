"""An arrow from one mesh to another: who sends what to whom, and in which rounds.

    d/fsdp m/tp @train -> d m/tp @serve

Weights go this way from a trainer to a sampler, a cache from prefill to decode, a checkpoint to any mesh. The
meshes may have any sizes, and may share devices. A device of the second mesh receives what it lacks, once:
that is the lower bound. Of several copies the sender is one on the receiver's node, if there is one, and of
these the one that sends least so far.

Messages go in rounds in which a device sends at most one and receives at most one. Their number is the
largest number of messages that any device sends or receives, and so the least (König 1916, on the edges of
bipartite graphs). No JAX: `llmpar.serve.two_meshes` carries a plan out.
"""

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llmpar.plan.layout import Arrow, Layout, block, parse_arrow
from llmpar.plan.mesh_shape import parse_mesh

Ranges = tuple[tuple[int, int], ...]  # for every dim the first index, and the one after the last
Boxes = dict[int, Ranges]  # what each device has of a value
Pair = tuple[int, int]  # the numbers of a sender and of a receiver


class Side(NamedTuple):
    """A mesh of an arrow: its axes, its devices in row-major order with the node of each, and JAX's mesh
    where one was given."""

    sizes: dict[str, int]
    node_of: dict[int, Any]
    mesh: Any = None


@dataclass(frozen=True, eq=False)
class TwoMeshes:
    """The movement of values from one mesh to another (`two_meshes`): what devices have ``before`` and
    ``after`` of each value, and the ``messages``: for a sender and a receiver, numbers of values and the
    boxes of them that are sent."""

    arrows: tuple[Arrow, ...]
    shapes: tuple[tuple[int, ...], ...]
    itemsize: int
    sides: tuple[Side, Side]
    before: list[Boxes]
    after: list[Boxes]
    messages: dict[Pair, list[tuple[int, Ranges]]]

    def __str__(self) -> str:
        more = f" and {len(self.arrows) - 1} more"
        return f"{self.arrows[0]}" + more * (len(self.arrows) > 1)

    @functools.cached_property
    def matrix(self) -> dict[Pair, int]:
        """The bytes that device i sends to device j, by pair (i, j); pairs that send nothing are left out."""
        return {
            pair: sum(volume(box) for _, box in parts) * self.itemsize
            for pair, parts in self.messages.items()
        }

    @functools.cached_property
    def bound(self) -> int:
        """The bytes that devices of the second mesh lack, in all: no plan sends fewer."""
        lacks = lambda had, box: volume(box) - (volume(common(box, had)) if had else 0)
        values = zip(self.before, self.after, strict=True)
        each = (lacks(had.get(n), box) for had, wanted in values for n, box in wanted.items())
        return sum(each) * self.itemsize

    def is_far(self, pair: Pair) -> bool:
        """Return whether sender and receiver are on different nodes."""
        return self.sides[0].node_of[pair[0]] != self.sides[1].node_of[pair[1]]

    @functools.cached_property
    def rounds(self) -> list[dict[Pair, int]]:
        """The bytes of each pair, round by round: messages between nodes first, then large ones."""
        order = lambda pair: (not self.is_far(pair), -self.matrix[pair], pair)
        pairs = sorted(self.matrix, key=order)
        return [{pair: self.matrix[pair] for pair in one} for one in in_rounds(pairs)]


def two_meshes(
    arrow: str | Sequence[str],
    meshes: Mapping[str, Any],
    shape: Sequence[Any],
    itemsize: int = 4,
    node_size: int = 8,
    uneven: bool = False,
) -> TwoMeshes:
    """Plan an arrow from a layout on one mesh to a layout on another.

    >>> plan = two_meshes("d/fsdp m @train -> d m/tp @serve", {"train": "fsdp=2", "serve": "tp=2"}, (8, 8))
    >>> plan.matrix, len(plan.rounds)
    ({(0, 2): 64, (0, 3): 64, (1, 2): 64, (1, 3): 64}, 2)

    Args:
        arrow: of a value; or several, of values that travel together, and ``shape`` then has one for each.
        meshes: by name: the text of a mesh, which takes the next free devices; (text, numbers of devices); or
            JAX's mesh.
        itemsize: bytes of an element, of all values.
        node_size: devices of a node, which are near one another. Processes do not share a node.
        uneven: cut dims that do not divide as XLA pads them: blocks are rounded up, the last ones shorter.

    Raises:
        ValueError: for unknown meshes, unfinished sums, devices named twice, dims that do not divide, and
            sizes that are no whole numbers.
    """
    single = isinstance(arrow, str)
    arrows = tuple(map(parse_arrow, [arrow] if single else arrow))
    shapes = tuple(map(tuple, [shape] if single else shape))
    numbers = itemsize, node_size, *itertools.chain(*shapes)
    if min(itemsize, node_size) < 1 or any(n < 0 or n % 1 for n in numbers):
        raise ValueError(
            f"shapes {shapes} of elements of {itemsize} bytes, and nodes of {node_size} devices; use whole"
            " numbers, of bytes and devices 1 or more"
        )
    known = _sides(meshes, node_size)
    names = {(a.before.mesh, a.after.mesh) for a in arrows}
    if len(arrows) != len(shapes) or len(names) != 1 or not {*min(names)} <= {*known}:
        raise ValueError(
            f"{len(arrows)} arrows such as '{arrows[:1] and arrows[0]}' and {len(shapes)} shapes, between"
            f" meshes {', '.join(known)}; each arrow needs a shape, and all the same two of these meshes"
        )
    first, second = (known[name] for name in min(names))
    pairs = [*zip(arrows, shapes, strict=True)]
    before = [boxes(arrow.before, shape, first, uneven) for arrow, shape in pairs]
    after = [boxes(arrow.after, shape, second, uneven) for arrow, shape in pairs]
    messages = _messages(before, after, first.node_of | second.node_of)
    return TwoMeshes(arrows, shapes, itemsize, (first, second), before, after, messages)


def _sides(meshes: Mapping[str, Any], node_size: int) -> dict[str, Side]:
    """Read the meshes. One that is text alone takes the devices after those of the meshes before it."""
    sides, free = dict[str, Side](), 0
    for name, given in meshes.items():
        if hasattr(given, "axis_names"):
            # process 1 may have the numbers from 2048 on
            nodes = {d.id: (d.process_index, d.id // node_size) for d in given.devices.flat}
            sides[name] = Side(dict(given.shape), nodes, given)
        else:
            text, *numbers = [given] if isinstance(given, str) else given
            mesh = parse_mesh(text)
            devices = [*numbers[0]] if numbers else [*range(free, free + mesh.size)]
            numbered = all(isinstance(n, int) and n >= 0 for n in devices)
            if not numbered or not len({*devices}) == len(devices) == mesh.size:
                raise ValueError(
                    f"mesh {name}, '{mesh}', needs the numbers of {mesh.size} different devices, from 0 on;"
                    f" given are {devices}"
                )
            sides[name] = Side(mesh.sizes, {n: (0, n // node_size) for n in devices})
        free = max(free, 1 + max(sides[name].node_of))
    return sides


def boxes(layout: Layout, shape: Sequence[int], side: Side, uneven: bool = False) -> Boxes:
    """Return what each device of a mesh has of a value of this shape."""
    sizes = side.sizes
    if layout.sums or not {*layout.axes} <= {*sizes}:
        raise ValueError(
            f"layout '{layout}' on a mesh with {', '.join(sizes)}: an axis must be one of the mesh, and a sum"
            " be finished before it is sent"
        )
    if not uneven or len(shape) != len(layout.dims):
        layout.shard_shape(tuple(shape), sizes)  # refuses
    parts = [math.prod(sizes[a] for a in dim.axes) for dim in layout.dims]
    steps = [-(-size // n) for size, n in zip(shape, parts, strict=True)]
    result, places = Boxes(), itertools.product(*map(range, sizes.values()))
    for device, place in zip(side.node_of, places, strict=True):
        index = block(layout, sizes, dict(zip(sizes, place, strict=True)))
        result[device] = tuple(
            (min(size, i * step), min(size, (i + 1) * step))
            for size, i, step in zip(shape, index, steps, strict=True)
        )
    return result


def volume(box: Ranges) -> int:
    """Return the elements of a box."""
    return math.prod(max(0, end - begin) for begin, end in box)


def common(one: Iterable[tuple[int, int]], other: Iterable[tuple[int, int]]) -> Ranges:
    """Return what two boxes have in common, perhaps nothing."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def _messages(
    before: list[Boxes], after: list[Boxes], node_of: Mapping[int, Any]
) -> dict[Pair, list[tuple[int, Ranges]]]:
    """Choose a sender for each part that a device lacks, the largest parts first."""
    lacking = list[tuple[int, Ranges, int, list[int]]]()
    for value, (had, wanted) in enumerate(zip(before, after, strict=True)):
        owners = {box: [n for n in had if had[n] == box] for box in dict.fromkeys(had.values())}
        for (receiver, want), own in itertools.product(wanted.items(), owners):
            box = common(own, want)
            if volume(box) and receiver not in owners[own]:
                lacking.append((value, box, receiver, owners[own]))
    messages, load = defaultdict[Pair, list[tuple[int, Ranges]]](list), Counter[int]()
    for value, box, receiver, owners_of_it in sorted(lacking, key=lambda it: -volume(it[1])):
        cost = lambda i, to=receiver: (node_of[i] != node_of[to], load[i], i)
        sender = min(owners_of_it, key=cost)
        load[sender] += volume(box)
        messages[sender, receiver].append((value, box))
    return dict(messages)


def in_rounds(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Deal pairs to the fewest rounds in which no device sends or receives twice.

    A pair takes the first round in which both are free. Without one it takes a round a in which the sender is
    free; the pair that it displaces takes a round b in which the receiver is free, the next one a, and so on.
    """
    most = max(max(Counter(ends).values()) for ends in zip(*pairs, strict=True)) if pairs else 0
    partner: dict = defaultdict(dict)
    free = lambda *ends: [r for r in range(most) if not any(r in partner[end] for end in ends)]
    for pair in pairs:
        one, other = enumerate(pair)
        a, b = (free(one, other)[:1] * 2) or (free(one)[0], free(other)[0])
        while other:
            displaced = partner[other].get(a)
            partner[one][a], partner[other][a] = other, one
            partner[displaced].pop(a, None)
            one, other, a, b = other, displaced, b, a
    return [
        [(end[1], to[r][1]) for end, to in partner.items() if end and end[0] == 0 and r in to]
        for r in range(most)
    ]
