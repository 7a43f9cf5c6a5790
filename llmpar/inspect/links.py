"""Name the links that a mesh's axes cross: inside a host, along a torus, or through the network.

dp=2 fsdp=8 tp=4 on 8 hosts of 8 H100
dp    2   network between 2 hosts
fsdp  8   NVLink within a host (2 each), network between 4 hosts
tp    4   NVLink within a host
"""

import collections
import math
from typing import Any

import numpy as np
from rich.table import Table

from llmpar.inspect.tables import rich_table
from llmpar.parallel.placement import domains_per_group, link_domain
from llmpar.predict.hardware import Chip, guess

# Chip -> the name of a switch's links, where it is not NVLink.
_SWITCHES = {"mi300x": "Infinity Fabric"}


def axis_links(mesh: Any) -> dict[str, dict]:
    """Return which links the groups of every axis longer than one cross.

    ``mesh`` is a `jax.sharding.Mesh`, or anything with a grid of ``devices`` and ``axis_names``. Of a device
    these attributes of JAX and `jax.experimental.topologies` are read: platform, device_kind, process_index,
    slice_index and coords, so recorded stand-ins will do.

    Returns per axis:
        size: devices in a group.
        link: the links in words.
        hosts: the largest number of hosts that a group spans.
        devices_per_host: the smallest number of members of a group on one host.
        domains: the largest number of domains of fast links that a group spans: slices of TPUs; hosts of
            GPUs, or several hosts that NVLink joins.
        dims: in a torus, the number of places that a group spans along x, y, z and the cores of a chip; else
            empty.
        hops: in a torus, the largest number of links from a device to the next one on the axis; else None.
        closed: whether a group is a whole dim of a torus, closed into a ring.
    """
    grid = np.asarray(mesh.devices)
    chip, host = guess(grid.flat[0].device_kind), _hosts(grid)
    spans = zip(domains_per_group(grid, host), domains_per_group(grid), strict=True)
    rows = {}
    for i, (axis, (hosts, domains)) in enumerate(zip(mesh.axis_names, spans, strict=True)):
        if (size := grid.shape[i]) == 1:
            continue
        groups = np.moveaxis(grid, i, -1).reshape(-1, size)
        counts = [min(collections.Counter(map(host, group)).values()) for group in groups]
        row = {"size": size, "hosts": hosts, "devices_per_host": min(counts), "domains": domains}
        none: dict = {"dims": [], "hops": None, "closed": False}
        row |= _on_torus(grid, groups, chip) if grid.flat[0].platform == "tpu" else none
        rows[axis] = {"link": _words(row, grid.flat[0].platform, chip)} | row
    return rows


def _hosts(grid: np.ndarray):
    """Return what devices of a host have in common: the process, or, for GPUs with a process each, the
    domain."""
    processes = {d.process_index for d in grid.flat}
    alone = grid.flat[0].platform == "gpu" and len(processes) == grid.size
    return link_domain if alone else lambda device: device.process_index


def _on_torus(grid: np.ndarray, groups: np.ndarray, chip: Chip | None) -> dict:
    """Return the keys ``dims``, ``hops`` and ``closed`` of `axis_links`."""
    place = lambda d: (*d.coords, getattr(d, "core_on_chip", 0) or 0)
    places = np.array([[place(d) for d in group] for group in groups])  # groups, members, dims
    sides = places.max((0, 1)) + 1
    closes = [chip is not None and chip.wraps(int(n)) for n in sides[:3]]
    if chip and chip.num_axes == 3:  # a torus is made of whole cubes
        closes = [all(closes)] * 3
    steps = np.abs(np.diff(places, axis=1))[..., :3]
    steps = np.where(closes, np.minimum(steps, sides[:3] - steps), steps).sum(-1)
    domains = np.array([[link_domain(d) for d in group] for group in groups])
    near = steps[np.diff(domains, axis=1) == 0]
    dims = [max(len(np.unique(group[:, k])) for group in places) for k in range(4)]
    whole = [k for k in range(3) if dims[k] > 1]
    closed = len(whole) == 1 and dims[whole[0]] == sides[whole[0]] and closes[whole[0]]
    return {"dims": dims, "hops": int(near.max(initial=0)), "closed": bool(closed)}


def _words(row: dict, platform: str, chip: Chip | None) -> str:
    """Describe the links of one axis."""
    domains, within = row["domains"], row["size"] // row["domains"]
    if platform == "cpu":
        return (
            f"simulated: between {domains} processes" if domains > 1 else "simulated: shared memory"
        )
    if platform == "tpu":
        inside, between = _ici(row, within), f"DCN between {domains} slices"
    else:
        name = _SWITCHES.get(chip.name, "NVLink") if chip else "NVLink or PCIe"
        many = row["hosts"] // domains
        where = "within a host" if many <= 1 else f"across {many} hosts"
        inside = f"{name} {where}" + f" ({within} each)" * (domains > 1)
        between = f"network between {domains} " + ("hosts" if many <= 1 else f"domains of {name}")
    return ", ".join([inside] * (within > 1) + [between] * (domains > 1))


def _ici(row: dict, within: int) -> str:
    """Describe the links inside a slice that a group of ``within`` chips (or their cores) uses."""
    dims = [n for n in row["dims"][:3] if n > 1]
    apart = f", {row['hops']} links apart" if row["hops"] > 1 else ""
    if math.prod(row["dims"]) != within:
        return f"ICI, scattered over {' x '.join(map(str, dims))} chips{apart}"
    cores = ", and the cores of a chip" if row["dims"][3] > 1 else ""
    if not dims:
        return "the cores of a chip"
    if len(dims) > 1:
        return f"ICI, {len(dims)} torus dims ({' x '.join(map(str, dims))}){cores}{apart}"
    return f"ICI {'ring' if row['closed'] else 'line'} of {dims[0]} (one torus dim){cores}{apart}"


def links_table(rows: dict[str, dict], title: str) -> Table:
    """Return the rows of `axis_links` as a table for a terminal."""
    cells = ((axis, str(row["size"]), str(row["hosts"]), row["link"]) for axis, row in rows.items())
    return rich_table(title, ("axis", "size", "hosts", "link"), ("size", "hosts"), cells)
