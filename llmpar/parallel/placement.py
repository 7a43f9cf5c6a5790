"""Places a mesh's axes on devices along their links: slow links outermost, a torus of TPUs wound through."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from llmpar.plan.mesh_shape import MeshShape, divisors, parse_mesh

_DESCRIBED = "compile_only_runtime"  # the runtime of devices of `jax.experimental.topologies`


def device_grid(shape: str | MeshShape, devices: list) -> np.ndarray:
    """Arrange devices in a grid of all six axes along their links, domain by domain (`link_domain`).

    A mesh smaller than their number takes neighbours among them: GPUs of few hosts, a box of TPUs. ``!`` in
    front of the shape takes the first devices in plain order instead."""
    shape = parse_mesh(shape, len(devices))
    sizes = tuple(shape.sizes.values())
    plain = shape.reshape or len(devices) == 1
    grid = np.array(devices[: shape.size]).reshape(sizes) if plain else _along_links(sizes, devices)
    if grid is None:
        many = " + ".join(str(len(domain)) for domain in domains_of(devices))
        raise ValueError(
            f"mesh '{shape}' was asked for on {many} x {devices[0].device_kind}, but {shape.size} of them are"
            f" no equal boxes along their links; use sizes that make boxes, or '!{shape}' for plain order"
        )
    return grid


def link_domain(device) -> int:
    """Return the number of a device's domain of fast links, the same in every process.

    TPUs: the slice. GPUs of a running cluster: XLA's slice, which is a host, or all hosts that share NVLink.
    GPUs that a topology describes have one slice for all; their process is the host. CPUs: the process."""
    runtime = getattr(getattr(device, "client", None), "runtime_type", _DESCRIBED)
    slices = device.platform == "tpu" or (device.platform == "gpu" and runtime != _DESCRIBED)
    return getattr(device, "slice_index" if slices else "process_index", None) or 0


def domains_of(devices: list) -> list[list]:
    """Return the devices of each domain, in the order given."""
    domains: dict[int, list] = {}
    for device in devices:
        domains.setdefault(link_domain(device), []).append(device)
    return [domains[number] for number in sorted(domains)]


def _along_links(sizes: tuple[int, ...], devices: list) -> np.ndarray | None:
    """Return the grid whose inner axes cross domains of fast links least; None where TPUs have none.

    Equal parts of several domains are tried, few first, and (but for TPUs, which need boxes) the first
    devices: in units that every domain is a multiple of, and one by one."""
    domains, size = domains_of(devices), math.prod(sizes)
    grids: list[np.ndarray | None] = []
    for count in (n for n in range(1, len(domains) + 1) if size % n == 0):
        parts = [part for domain in domains if (part := _part(domain, size // count))][:count]
        if len(parts) == count:
            grids.append(_deal(sizes, parts))
    if devices[0].platform != "tpu":
        first = [device for domain in domains for device in domain][:size]
        for unit in (math.gcd(*map(len, domains_of(first))), 1):
            grids.append(_deal(sizes, [first[at : at + unit] for at in range(0, size, unit)]))
    spans = lambda grid: domains_per_group(grid)[::-1]
    valid = [grid for grid in grids if grid is not None]
    return min(valid, key=lambda grid: ([n > 1 for n in spans(grid)], spans(grid)), default=None)


def domains_per_group(grid: np.ndarray, domain: Callable[[Any], Any] = link_domain) -> list[int]:
    """Return per axis of a grid of devices over how many domains its groups reach, at most."""
    numbers = np.unique([domain(d) for d in grid.flat], return_inverse=True)[1].reshape(grid.shape)
    lines = [np.sort(numbers, axis) for axis in range(grid.ndim)]
    return [1 + int(np.max((np.diff(x, axis=i) > 0).sum(i))) for i, x in enumerate(lines)]


def _part(domain: list, size: int) -> list:
    """Return ``size`` neighbours of one domain: any GPUs, but a box of TPUs, on as few hosts as possible and
    then as near to a cube. Empty where there is none."""
    if len(domain) <= size or domain[0].platform != "tpu":
        return domain[:size] if len(domain) >= size else []
    places = _places(domain)
    num_cores, boxes = places[:, 3].max() + 1, []
    for box in np.ndindex(*places[:, :3].max(0) + 1):
        if math.prod(n + 1 for n in box) * num_cores == size:
            part = [domain[i] for i in np.flatnonzero((places[:, :3] <= box).all(1))]
            boxes.append((len(part) < size, len({d.process_index for d in part}), max(box), part))
    fewer, *_, part = min(boxes, key=lambda it: it[:3], default=(True, []))
    return [] if fewer else part


def _places(devices: list) -> np.ndarray:
    """Return a row of x, y, z and the core on the chip for each TPU, from their first corner on."""
    places = np.array([(*d.coords, d.core_on_chip or 0) for d in devices])
    return places - places.min(0)


def _deal(sizes: tuple[int, ...], parts: list[list]) -> np.ndarray | None:
    """Deal equal parts to the axes from the outermost on; None where a part of TPUs is no box."""
    across, left = [], len(parts)
    for n in sizes:
        across.append(math.gcd(n, left))
        left //= across[-1]
    within = [n // count for n, count in zip(sizes, across, strict=True)]
    torus = parts[0][0].platform == "tpu"
    inner = [_on_torus(within, part) if torus else np.array(part).reshape(within) for part in parts]
    if any(grid is None for grid in inner):
        return None
    n = len(sizes)
    both = np.array(inner).reshape(*across, *within)
    return both.transpose([i + n * k for i in range(n) for k in (0, 1)]).reshape(sizes)


def _on_torus(sizes: list[int], part: list) -> np.ndarray | None:
    """Arrange a box of TPUs along its links; None where they are no box.

    The innermost axis chooses first: the cores of a chip, then whole dims of the torus (as
    `jax.experimental.mesh_utils` does), then neighbours before devices that lie farther apart. Along an axis
    that takes several dims the order winds through the box, so that a ring's hop is one link."""
    places = _places(part)
    sides = tuple(int(n) for n in places.max(0) + 1)
    lines = np.ravel_multi_index(tuple(places.T), sides)
    if sorted(lines) != [*range(math.prod(sides))]:
        return None
    left = sides
    taken: list[tuple[int, ...]] = []
    for n in reversed(sizes):
        choices = [fs for fs in itertools.product(*map(divisors, left)) if math.prod(fs) == n]
        taken.insert(0, max(choices, key=functools.partial(_worth, sides, left)))
        left = tuple(m // f for m, f in zip(left, taken[0], strict=True))
    num_dims, num_axes = len(sides), len(sizes)
    cut = np.array(part)[np.argsort(lines)].reshape(
        [f[dim] for dim in range(num_dims) for f in taken]
    )
    by_axis = [dim * num_axes + i for i in range(num_axes) for dim in range(num_dims)]
    grid = cut.transpose(by_axis).reshape(sizes)
    for i, factors in enumerate(taken):
        grid = grid.take(
            np.ravel_multi_index(tuple(zip(*_winding(factors), strict=True)), factors), axis=i
        )
    return grid


def _worth(sides: tuple[int, ...], left: tuple[int, ...], factors: tuple[int, ...]) -> tuple:
    """Rank a choice of an axis's ``factors`` of the torus's dims: the weightiest criterion first."""
    whole = [f for f, side in zip(factors, sides, strict=True) if f == side > 1]
    stride = max(side // m if f > 1 else 1 for f, side, m in zip(factors, sides, left, strict=True))
    return factors[-1], math.prod(whole), len(whole), -stride, factors


def _winding(sides: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the places of a box, each touching the next, and the last the first where possible."""

    def there_and_back(sides):
        path: list[tuple[int, ...]] = [()]
        for n in sides:
            path = [(*place, k) for k in range(n) for place in (path[::-1] if k % 2 else path)]
        return path

    for i, n in enumerate(sides):
        rest = there_and_back(sides[:i] + sides[i + 1 :])
        if n > 1 and len(rest) % 2 == 0:  # one side of the box is kept for the way back
            outward = [
                (k, row) for j, row in enumerate(rest) for k in range(1, n)[:: -1 if j % 2 else 1]
            ]
            return [
                (*row[:i], k, *row[i:])
                for k, row in [*outward, *((0, row) for row in reversed(rest))]
            ]
    return there_and_back(sides)
