"""Meshes: simulated, real and abstract, in link order."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.extend
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from llmpar import channels
from llmpar.notation import Dim, Layout, MeshShape, parse_mesh

_COUNT_FLAG = "--xla_force_host_platform_device_count"
POOL_SIZE = ("NPROC", "PJRT_NPROC")
"""Environment variables for the size of XLA's thread pool. JAX 0.10.2 and 0.12 read both, and the second
wins."""
THREADS_PER_DEVICE = 4
MAX_SIMULATED = 1024
KINDS = {"gpu": "NVIDIA H100 80GB HBM3", "tpu": "TPU v5"}
"""What an abstract mesh says that its devices are, by platform."""
LETTERS = "bsdnkrhmevclut"
"""Names of the dims of a value for which nobody gave any, in order."""
_DESCRIBED = "compile_only_runtime"  # what `jax.experimental.topologies` devices say that they run on


def use_devices(simulate: int = 8, at_least: int = 2) -> list[jax.Device]:
    """The accelerators of this machine or, where there are fewer than ``at_least``, ``simulate`` CPU devices.
    Call it before other JAX work: whatever runs on them, yours too, then neither hangs nor mixes values up
    (docs/simulated-devices.md).

    A single accelerator is thus left alone, and said so, unless JAX_PLATFORMS names its platform:
    parallelism needs two devices to show anything. ``at_least=1`` takes it.

    Raises ValueError when JAX has started already with other devices: they are fixed from its first use on.
    """
    if not 1 <= simulate <= MAX_SIMULATED:
        raise ValueError(
            f"{simulate} simulated devices were asked for; use 1 to {MAX_SIMULATED}, all threads of one"
            " process"
        )
    fresh = True
    if _COUNT_FLAG not in os.environ.get("XLA_FLAGS", "") and "JAX_NUM_CPU_DEVICES" not in os.environ:
        try:
            jax.config.update("jax_num_cpu_devices", simulate)
        except RuntimeError:
            fresh = False  # JAX runs already; what it has may be enough
    devices = _started()
    few = devices[0].platform != "cpu" and len(devices) < at_least
    if few and not jax.config.jax_platforms:  # type: ignore[attr-defined]
        devices = _simulated_instead(devices, simulate, fresh)
    alone = jax.process_count() == 1  # of several processes each has what its launcher gave it
    if devices[0].platform == "cpu" and len(devices) < simulate and alone:
        raise ValueError(
            f"{simulate} simulated devices were asked for but JAX has started with {len(devices)}, and the"
            f" number is fixed at its first use; ask for {len(devices)} (--devices {len(devices)}), call"
            f" use_devices() first in a fresh process, or set XLA_FLAGS={_COUNT_FLAG}={simulate}"
        )
    return devices


def _started() -> list[jax.Device]:
    """Start JAX, if it has not started, and give its devices."""
    try:
        return ordered_devices()
    except (RuntimeError, AssertionError) as error:  # the second where the platform it was told is not there
        told = os.environ.get("JAX_PLATFORMS", "")
        where = f"JAX_PLATFORMS={told}" if told else "the platform of this machine"
        why = str(error).partition("\n")[0][:200] or "there is no such device"
        what = "unset JAX_PLATFORMS, or install the JAX for it: llmpar[cuda13], llmpar[tpu]"
        raise ValueError(f"JAX cannot start on {where}: {why}; {what}") from error


def _simulated_instead(devices: list[jax.Device], simulate: int, fresh: bool) -> list[jax.Device]:
    """Start JAX again on CPU devices, and say so. Arrays that a program has made before would be lost."""
    found = f"{len(devices)} x {devices[0].device_kind}"
    if not fresh:
        raise ValueError(
            f"{simulate} simulated devices were asked for but JAX has started on {found}; call use_devices()"
            " first in a fresh process, or set JAX_PLATFORMS=cpu"
        )
    jax.extend.backend.clear_backends()
    jax.config.update("jax_platforms", "cpu")
    print(
        f"{found} is too few for parallelism: {simulate} simulated CPU devices are used instead"
        f" (JAX_PLATFORMS={devices[0].platform} takes what is here)"
    )
    return _started()


@contextlib.contextmanager
def _enough_threads():
    """While JAX starts, ask XLA for `THREADS_PER_DEVICE` threads per simulated device, unless the user has
    asked for some.

    All simulated devices share one pool, by default of as many threads as there are devices or cores. A
    collective blocks a thread until its whole group has come, so two collectives that no data orders can take
    every thread, each waiting for one that finds none. XLA reads the pool's size from the environment once,
    when its CPU client starts.
    """
    told = re.findall(rf"{_COUNT_FLAG}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    devices = int(told[-1]) if told else jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    threads = max(THREADS_PER_DEVICE * devices, os.cpu_count() or 1)
    given = devices <= 1 or any(name in os.environ for name in POOL_SIZE)
    asked = {} if given else dict.fromkeys(POOL_SIZE, str(threads))
    os.environ.update(asked)
    try:
        yield
    finally:
        for name in asked:
            del os.environ[name]


@functools.cache
def _refuse_flags(flags: str) -> None:
    """Raise ValueError for flags that XLA does not know: when JAX starts, it ends the process at them, in a
    notebook without a word. Another process tries them."""
    if all(flag.startswith(_COUNT_FLAG) for flag in flags.split()) or not sys.executable:
        return
    tried = [sys.executable, "-c", "from jaxlib.xla_client import CompileOptions; CompileOptions()"]
    said = subprocess.run(tried, capture_output=True, text=True, errors="replace").stderr
    if found := re.search(r"Unknown flags? in XLA_FLAGS: *(.*)", said):
        raise ValueError(
            f"XLA_FLAGS is '{flags}', and XLA, which ends a process for that, knows no {found[1].strip()};"
            " mend XLA_FLAGS, or unset it"
        )


def ordered_devices() -> list[jax.Device]:
    """All devices, host by host. (An id is not a position: process k's ids may start at 2048·k.) It starts
    JAX, if that has not started."""
    channels.install()
    _refuse_flags(os.environ.get("XLA_FLAGS", ""))
    with _enough_threads():
        return sorted(jax.devices(), key=lambda d: (d.process_index, d.id))


def make_mesh(shape: str | MeshShape, devices: list | None = None) -> Mesh:
    """A mesh of all six axes over real or simulated devices, slow links outermost; sizes of one cost nothing.

    See `device_grid` for the order of the devices.
    """
    channels.install()
    devices = ordered_devices() if devices is None else devices
    grid = device_grid(shape := parse_mesh(shape, len(devices)), devices)
    idle = {d.process_index for d in devices} - {d.process_index for d in grid.flat}
    if idle and jax.process_count() > 1:
        numbers, many = ", ".join(map(str, sorted(idle))), len({d.process_index for d in devices})
        raise ValueError(
            f"mesh '{shape}' takes {shape.size} of {len(devices)} devices, and of {many} processes these hold"
            f" none of them and could address nothing: {numbers}; use all devices, or start"
            f" {many - len(idle)} process{'es' * (many - len(idle) > 1)}"
        )
    return Mesh(grid, tuple(shape.sizes), axis_types=(AxisType.Auto,) * grid.ndim)


def device_grid(shape: str | MeshShape, devices: list) -> np.ndarray:
    """The devices in a grid of all six axes, laid out along their links, domain by domain (`link_domain`).

    A mesh smaller than their number takes a part of them that lies together: GPUs of few hosts, a box of
    TPUs. ``!`` in front of the shape takes the first devices in plain order instead.

    Raises ValueError where TPUs cannot be taken as equal boxes.
    """
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
    """The number of the domain of fast links that a device is in; between domains lies the slow network.

    TPUs: the slice. GPUs of a running cluster: XLA's slice, which is a host, or all hosts that share NVLink.
    GPUs that a topology describes have one slice for all; their process is the host. CPUs: the process.
    Every process finds the same numbers: it asks for nothing that a device tells only its own process.
    """
    runtime = getattr(getattr(device, "client", None), "runtime_type", _DESCRIBED)
    slices = device.platform == "tpu" or (device.platform == "gpu" and runtime != _DESCRIBED)
    return getattr(device, "slice_index" if slices else "process_index", None) or 0


def domains_of(devices: list) -> list[list]:
    """The devices of each domain, in the order given."""
    found: dict[int, list] = {}
    for device in devices:
        found.setdefault(link_domain(device), []).append(device)
    return [found[number] for number in sorted(found)]


def _along_links(sizes: tuple[int, ...], devices: list) -> np.ndarray | None:
    """The grid whose innermost axes stay within a domain of fast links, or else leave it least, of as few
    domains as that takes; None where TPUs have none.

    Equal parts of several domains are tried, and (but for TPUs, which need boxes) the first devices: in units
    that every domain is a multiple of, and one by one.
    """
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
    found = [grid for grid in grids if grid is not None]
    return min(found, key=lambda grid: ([n > 1 for n in spans(grid)], spans(grid)), default=None)


def domains_per_group(grid: np.ndarray, domain: Callable[[Any], Any] = link_domain) -> list[int]:
    """Per axis of a grid of devices: over how many domains its groups reach, at most."""
    numbers = np.unique([domain(d) for d in grid.flat], return_inverse=True)[1].reshape(grid.shape)
    lines = [np.sort(numbers, axis) for axis in range(grid.ndim)]
    return [1 + int((np.diff(x, axis=i) > 0).sum(i).max()) for i, x in enumerate(lines)]


def _part(domain: list, size: int) -> list:
    """So many devices of one domain that lie together: any GPUs, but a box of TPUs, on as few hosts as can
    be and then as near to a cube. Empty where there is none."""
    if len(domain) <= size or domain[0].platform != "tpu":
        return domain[:size] if len(domain) >= size else []
    places = _places(domain)
    num_cores = np.ptp(places[:, 3]) + 1
    boxes = [
        box
        for box in np.ndindex(*np.ptp(places[:, :3], 0) + 1)
        if math.prod(n + 1 for n in box) * num_cores == size
    ]
    found = []
    for box in boxes:
        part = [domain[i] for i in np.flatnonzero((places[:, :3] - places[:, :3].min(0) <= box).all(1))]
        found.append((len({d.process_index for d in part}), max(box), part))
    whole = [it for it in found if len(it[2]) == size]
    return min(whole, key=lambda it: it[:2], default=(0, 0, []))[2]


def _places(devices: list) -> np.ndarray:
    """Where TPUs are: a row of x, y, z and the core on the chip for each."""
    return np.array([(*d.coords, d.core_on_chip or 0) for d in devices])


def _deal(sizes: tuple[int, ...], parts: list[list]) -> np.ndarray | None:
    """Deal equal parts to the axes from the outermost on, to each as many as divide it; inside a part TPUs
    lie along their torus. None where a part is no box."""
    across, left = [], len(parts)
    for n in sizes:
        across.append(math.gcd(n, left))
        left //= across[-1]
    within = [n // many for n, many in zip(sizes, across, strict=True)]
    torus = parts[0][0].platform == "tpu"
    inner = [_on_torus(within, part) if torus else np.array(part).reshape(within) for part in parts]
    if any(grid is None for grid in inner):
        return None
    n = len(sizes)
    both = np.array(inner).reshape(*across, *within)
    return both.transpose([i + n * k for i in range(n) for k in (0, 1)]).reshape(sizes)


def _on_torus(sizes: list[int], part: list) -> np.ndarray | None:
    """The devices of a box of TPUs, laid out along its links; None where they are no box.

    The innermost axis chooses first: the cores of a chip, then whole dims of the torus, as many as can be,
    then neighbours before devices that lie farther apart. (`jax.experimental.mesh_utils` prefers whole dims
    too.) Along an axis that takes several dims the order winds through the box, so that neighbours on the
    axis are neighbours on the torus: a ring's hop is one link.
    """
    places = _places(part)
    sides = tuple(int(n) for n in np.ptp(places, 0) + 1)
    box = np.full(sides, None, object)
    for device, place in zip(part, places - places.min(0), strict=True):
        box[tuple(place)] = device
    if len(part) != box.size or (box == None).any():  # noqa: E711
        return None
    left = sides
    taken: list[tuple[int, ...]] = []
    for n in reversed(sizes):
        choices = [f for f in itertools.product(*(_divisors(m) for m in left)) if math.prod(f) == n]
        taken.insert(0, max(choices, key=functools.partial(_worth, sides, left)))
        left = tuple(m // f for m, f in zip(left, taken[0], strict=True))
    num_dims, num_axes = len(sides), len(sizes)
    cut = box.reshape([f[dim] for dim in range(num_dims) for f in taken])
    grid = cut.transpose([dim * num_axes + i for i in range(num_axes) for dim in range(num_dims)]).reshape(
        sizes
    )
    for i, factors in enumerate(taken):
        grid = grid.take(np.ravel_multi_index(tuple(zip(*_winding(factors), strict=True)), factors), axis=i)
    return grid


def _worth(sides: tuple[int, ...], left: tuple[int, ...], factors: tuple[int, ...]) -> tuple:
    """What speaks for giving an axis so many places along each dim of a torus, weightiest first; the last dim
    is a chip's cores."""
    whole = [f for f, side in zip(factors, sides, strict=True) if f == side > 1]
    stride = max(side // m if f > 1 else 1 for f, side, m in zip(factors, sides, left, strict=True))
    return factors[-1], math.prod(whole), len(whole), -stride, factors


def _divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


def _winding(sides: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The places of a box in an order in which neighbours touch; the last touches the first where that can
    be."""

    def there_and_back(sides):
        path: list[tuple[int, ...]] = [()]
        for n in sides:
            path = [(*place, k) for k in range(n) for place in (path[::-1] if k % 2 else path)]
        return path

    for i, n in enumerate(sides):
        rest = there_and_back(sides[:i] + sides[i + 1 :])
        if n > 1 and len(rest) % 2 == 0:  # one side of the box is kept for the way back
            out = [
                (k, row)
                for j, row in enumerate(rest)
                for k in (range(n - 1, 0, -1) if j % 2 else range(1, n))
            ]
            return [(*row[:i], k, *row[i:]) for k, row in [*out, *((0, row) for row in reversed(rest))]]
    return there_and_back(sides)


def abstract_mesh(shape: str | MeshShape, platform: str = "cpu") -> AbstractMesh:
    """A mesh without devices: enough to trace and to lower a program for any number of them, as a platform
    (cpu, gpu or tpu) would run it."""
    sizes, device = parse_mesh(shape).sizes, None
    if platform != "cpu":
        known = {"platform": {"gpu": "cuda"}.get(platform, platform), "device_kind": KINDS[platform]}
        names = {field.name for field in dataclasses.fields(AbstractDevice)}  # platform: from JAX 0.10.2 on
        device = AbstractDevice(**{k: v for k, v in known.items() if k in names}, num_cores=None)
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device)


def split(mesh: Any, shape: MeshShape) -> Any:
    """The same devices with two axes for one, where it has an inner part in ``shape`` (`notation.PARTS`)."""
    sizes, kinds = shape.sizes, mesh.axis_types[:1] * len(shape.sizes)
    if tuple(sizes) == tuple(mesh.axis_names):
        return mesh
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices.reshape(*sizes.values()), tuple(sizes), axis_types=kinds)
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=kinds, abstract_device=mesh.abstract_device
    )


def explicit(mesh: Mesh | AbstractMesh) -> Any:
    """The same mesh with explicit axes: what lies on it has its sharding in its type."""
    return mesh.update(axis_types=(AxisType.Explicit,) * len(mesh.axis_names))


def spec(layout: Layout) -> PartitionSpec:
    """The layout as JAX writes it: per dim the axes that cut it."""
    return PartitionSpec(*[d.axes or None for d in layout.dims])


def as_type(layout: Layout, reduced: Iterable[str] = ()) -> PartitionSpec:
    """The layout as JAX's types write it on explicit axes: `spec`, and the sums that are not finished."""
    return PartitionSpec(*spec(layout), unreduced=set(layout.sums), reduced=set(reduced))


def from_type(x: Any, letters: str | None = None) -> Layout:
    """The layout of an array, or of a tracer on explicit axes, as its sharding has it; the axes may have any
    names. ``letters`` name the dims; without them they are named b, s, d and so on, in order.

    Raises ValueError for a value whose type tells no layout: a tracer on automatic axes, or inside shard_map.
    """
    traced = isinstance(x, jax.core.Tracer)
    where = jax.typeof(x).sharding if traced else x.sharding
    mesh: Any = getattr(where, "mesh", None)
    if traced and not mesh.are_all_axes_explicit:
        axes = "inside shard_map" if mesh.manual_axes else "on automatic axes"
        raise ValueError(
            f"the type {jax.typeof(x)} tells no layout {axes}; use a mesh of AxisType.Explicit, under"
            " jax.set_mesh"
        )
    says = where.spec if mesh else PartitionSpec()  # without a mesh: one device
    cuts = [axes_of(cut) for cut in says.partitions]
    cuts += [()] * (x.ndim - len(cuts))
    letters = LETTERS[: x.ndim] if letters is None else letters
    if len(letters) != x.ndim:
        raise ValueError(
            f"{x.ndim} dims cannot be named by the {len(letters)} letters '{letters}'; give {x.ndim}"
        )
    sums = tuple(a for a in (mesh.axis_names if mesh else ()) if a in says.unreduced)
    return Layout(tuple(map(Dim, letters, cuts)), sums)


def axes_of(cut: Any) -> tuple[str, ...]:
    """The axes in one dim's entry of a PartitionSpec."""
    return () if cut is None else (cut,) if isinstance(cut, str) else tuple(cut)


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """The platform of a mesh's devices: cpu, gpu or tpu. An abstract mesh counts as CPUs if it does not say
    otherwise."""
    if isinstance(mesh, AbstractMesh):
        kind = mesh.abstract_device.device_kind if mesh.abstract_device else ""
        return next((platform for platform in KINDS if KINDS[platform] == kind), "cpu")
    name = mesh.devices.flat[0].platform
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


def sharding(mesh: Mesh | AbstractMesh, layout: Layout) -> NamedSharding:
    """The layout on the devices of ``mesh``."""
    return NamedSharding(mesh, spec(layout))


def shard_bytes(layout: Layout, shape: tuple[int, ...], itemsize: int, sizes: dict[str, int]) -> int:
    """Bytes that one device holds of a value of ``shape``."""
    return math.prod(layout.shard_shape(shape, sizes)) * itemsize
