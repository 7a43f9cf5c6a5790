"""Geometry of a mesh for pictures: coordinates, groups and slices of devices; a collective's rounds.

Plain numbers in, plain numbers out; the tests hold them against JAX and numpy.
"""

import itertools
import math

from llmpar.plan.layout import Layout, block
from llmpar.plan.mesh_shape import ORDER
from llmpar.predict.hosts import device_groups


def strides(sizes: dict[str, int], order) -> dict[str, int]:
    """Return how far apart neighbours on each axis are in the list of devices; ``order`` ends with the
    innermost."""
    out, stride = {}, 1
    for axis in reversed(tuple(order)):
        out[axis], stride = stride, stride * sizes[axis]
    return out


def coordinates(sizes: dict[str, int], order, device: int) -> dict[str, int]:
    """Return a device's coordinate on every axis."""
    return {axis: device // stride % sizes[axis] for axis, stride in strides(sizes, order).items()}


def groups(sizes: dict[str, int], order, axes) -> list[list[int]]:
    """Return the devices that talk over ``axes`` (outermost first), group by group; groups by their first
    device."""
    return device_groups({axis: sizes[axis] for axis in order}, axes)


def slices(
    layout: Layout, shape, sizes: dict[str, int], at: dict[str, int]
) -> list[tuple[int, int]] | None:
    """Return, for every dim, the first index that a device holds and the one after the last; None where a dim
    is not divisible."""
    out = []
    for dim, size, index in zip(layout.dims, shape, block(layout, sizes, at), strict=True):
        step, rest = divmod(size, math.prod(sizes[axis] for axis in dim.axes))
        if rest:
            return None
        out.append((index * step, (index + 1) * step))
    return out


def holders(layout: Layout, sizes: dict[str, int]) -> dict[tuple[int, ...], list[int]]:
    """Return which devices of the mesh hold each shard: a block index per dim, to positions in the list of
    devices.

    An axis without a size has size 1. Shards come in the order of their first device.
    """
    sizes = sizes | dict.fromkeys([a for a in layout.axes if a not in sizes], 1)
    order = [a for a in (ORDER if sizes.keys() <= {*ORDER} else sizes) if a in sizes]
    apart = strides(sizes, order)
    shards: dict[tuple[int, ...], list[int]] = {}
    for device in range(math.prod(sizes.values())):
        at = {a: device // apart[a] % sizes[a] for a in layout.axes}
        shards.setdefault(block(layout, sizes, at), []).append(device)
    return shards


def rounds(kind: str, g: int) -> list[dict]:
    """Return a collective among g ranks by rings: in each round what is sent, from which rank to which, and
    what each then holds.

    ``sends`` are [from, to, block]; ``held[rank][block]`` is the set of ranks whose numbers a rank has of a
    block: of a sum those that are added up in it, of a transpose those whose pieces for the rank ``block`` it
    has. Round 0 is the start. Reduce-scatter leaves block r with rank r. A permute is one hop in the ring.
    """
    reduced = kind in ("reduce-scatter", "all-reduce")
    exchanged = kind.endswith("all-to-all")
    everything, each = reduced or exchanged, range(g)
    has = [[{rank} if everything or rank == b else set() for b in each] for rank in each]
    out: list[dict] = [{"sends": [], "held": has}]
    parts = ("reduce-scatter", "all-gather") if kind == "all-reduce" else (kind,)
    hops = 1 if kind == "collective-permute" and g > 1 else g - 1
    for part, t in itertools.product(parts, range(hops)):
        hop = t + 1 if exchanged else 1
        shift = -hop if exchanged else t + (part == "reduce-scatter")
        sends = [[r, (r + hop) % g, (r - shift) % g] for r in each]
        before = has
        has = [row[:] for row in before]
        for source, target, b in sends:
            has[target][b] = has[target][b] | before[source][b]
            if part != "all-gather":
                has[source][b] = has[source][b] - before[source][b]
        out.append({"sends": sends, "held": has})
    return out
