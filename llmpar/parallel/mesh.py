"""Meshes: simulated, real and abstract, in link order."""

import math
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from llmpar.parallel import _jax
from llmpar.parallel.devices import ordered_devices, use_devices  # noqa: F401 (lessons have it from here)
from llmpar.parallel.placement import device_grid
from llmpar.plan.layout import LETTERS, Dim, Layout, axes_of
from llmpar.plan.mesh_shape import MeshShape, parse_mesh


def make_mesh(shape: str | MeshShape, devices: list | None = None, alone: bool = True) -> Mesh:
    """Make a mesh of all six axes over devices in the order of `device_grid`; sizes of one cost nothing.
    A process that would have none of its devices is refused, if the mesh is ``alone`` in the job."""
    _jax.install_channels()
    devices = ordered_devices() if devices is None else devices
    grid = device_grid(shape := parse_mesh(shape, len(devices)), devices)
    idle = {d.process_index for d in devices} - {d.process_index for d in grid.flat}
    if alone and idle and jax.process_count() > 1:
        numbers, size = ", ".join(map(str, sorted(idle))), len({d.process_index for d in devices})
        raise ValueError(
            f"mesh '{shape}' takes {shape.size} of {len(devices)} devices, and of {size} processes these hold"
            f" none of them and could address nothing: {numbers}; use all devices, or start"
            f" {size - len(idle)} process{'es' * (size - len(idle) > 1)}"
        )
    return Mesh(grid, tuple(shape.sizes), axis_types=(AxisType.Auto,) * grid.ndim)


def abstract_mesh(shape: str | MeshShape) -> AbstractMesh:
    """Make a mesh without devices: enough to trace and lower a program. Of another platform than CPUs it is
    one with JAX's ``update(abstract_device=…)``."""
    sizes = parse_mesh(shape).sizes
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def split_axes(mesh: Any, shape: MeshShape) -> Any:
    """Return a mesh with two axes for each one that has one of `INNER_AXES` in ``shape``."""
    names, sizes = tuple(shape.sizes), tuple(shape.sizes.values())
    if names == tuple(mesh.axis_names):
        return mesh
    kinds = mesh.axis_types[:1] * len(names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices.reshape(sizes), names, axis_types=kinds)
    return AbstractMesh(sizes, names, axis_types=kinds, abstract_device=mesh.abstract_device)


def explicit(mesh: Mesh | AbstractMesh) -> Any:
    """Return the mesh with explicit axes: an array on it has its sharding in its type."""
    return mesh.update(axis_types=(AxisType.Explicit,) * len(mesh.axis_names))


def spec(layout: Layout) -> PartitionSpec:
    """Return the layout as JAX writes it: per dim the axes that cut it."""
    return PartitionSpec(*[d.axes or None for d in layout.dims])


def as_type(layout: Layout, reduced: Iterable[str] = ()) -> PartitionSpec:
    """Return the layout as JAX's types on explicit axes write it: `spec`, and the unfinished sums."""
    return PartitionSpec(*spec(layout), unreduced=set(layout.sums), reduced=set(reduced))


def from_type(x: Any, letters: str | None = None) -> Layout:
    """Return the layout in the sharding of an array, or of a tracer on explicit axes; the axes may have any
    names. ``letters`` name the dims; without them they are b, s, d and so on, in order. Automatic axes, and
    those inside shard_map, are not in a tracer's type."""
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
    if (given := len(letters)) != x.ndim:
        raise ValueError(
            f"{x.ndim} dims cannot be named by the {given} letters '{letters}'; give {x.ndim}"
        )
    sums = tuple(a for a in (mesh.axis_names if mesh else ()) if a in says.unreduced)
    return Layout(tuple(map(Dim, letters, cuts)), sums)


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """Return the platform of a mesh's devices: cpu, tpu, or gpu with its compute capability (``gpu 7.5``, and
    ``gpu gfx942`` of AMD); of an abstract mesh cpu unless it names another."""
    device = mesh.abstract_device if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
    return device_platform(device) if device else "cpu"


def device_platform(device: jax.Device | AbstractDevice) -> str:
    """Return the platform of a device, as `platform_of` names it."""
    if device.platform not in ("gpu", "cuda", "rocm"):
        return device.platform
    return f"gpu {getattr(device, 'compute_capability', '')}".strip()


def sharding(mesh: Mesh | AbstractMesh, layout: Layout) -> NamedSharding:
    """Return the layout on the devices of ``mesh``."""
    return NamedSharding(mesh, spec(layout))


def shard_bytes(
    layout: Layout, shape: tuple[int, ...], itemsize: int, sizes: dict[str, int]
) -> int:
    """Return the bytes of one device's shard of a value of ``shape``."""
    return math.prod(layout.shard_shape(shape, sizes)) * itemsize
