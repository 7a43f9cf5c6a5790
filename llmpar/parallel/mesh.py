"""Meshes: simulated, real and abstract, in link order."""

import contextlib
import functools
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import jax
import jax.extend
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from llmpar.parallel import _jax
from llmpar.parallel.placement import device_grid
from llmpar.plan.layout import LETTERS, Dim, Layout, axes_of
from llmpar.plan.mesh_shape import MeshShape, parse_mesh

_COUNT_FLAG = "--xla_force_host_platform_device_count"
POOL_SIZE = ("NPROC", "PJRT_NPROC")
"""Environment variables for the size of XLA's thread pool. JAX 0.10.2 and 0.12 read both, and the second
wins."""
THREADS_PER_DEVICE = 4
MAX_SIMULATED = 1024
_KINDS = {"gpu": "NVIDIA H100 80GB HBM3", "tpu": "TPU v5"}
"""The kind of an abstract mesh's devices, by platform."""


def use_devices(simulate: int = 8, at_least: int = 2) -> list[jax.Device]:
    """Return the accelerators of this machine or, where there are fewer than ``at_least``, ``simulate`` CPU
    devices. Call it before other JAX work: programs on them, yours too, then neither hang nor mix values up
    (docs/simulated-devices.md). JAX's devices are fixed from its first use on.

    A single accelerator is left out, and a line is printed, unless JAX_PLATFORMS names its platform:
    parallelism needs two devices to show anything. ``at_least=1`` takes it.
    """
    if not isinstance(simulate, int) or not 1 <= simulate <= MAX_SIMULATED:
        raise ValueError(f"{simulate!r} simulated devices were asked for; use 1 to {MAX_SIMULATED}")
    fresh = True
    if (
        _COUNT_FLAG not in os.environ.get("XLA_FLAGS", "")
        and "JAX_NUM_CPU_DEVICES" not in os.environ
    ):
        try:
            jax.config.update("jax_num_cpu_devices", simulate)
        except RuntimeError:
            fresh = False  # JAX runs already; its devices may be enough
    devices = ordered_devices()
    few = devices[0].platform != "cpu" and len(devices) < at_least
    if few and not jax.config.jax_platforms:  # type: ignore[attr-defined]
        devices = _simulated_instead(devices, simulate, fresh)
    # of several processes each has the devices that its launcher gave it
    alone = jax.process_count() == 1
    if devices[0].platform == "cpu" and len(devices) < simulate and alone:
        raise ValueError(
            f"{simulate} simulated devices were asked for but JAX has started with {len(devices)}, and the"
            f" number is fixed at its first use; ask for {len(devices)} (--devices {len(devices)}), in"
            f" Python call use_devices() first in a fresh process, or set XLA_FLAGS={_COUNT_FLAG}={simulate}"
        )
    return devices


def _simulated_instead(devices: list[jax.Device], simulate: int, fresh: bool) -> list[jax.Device]:
    """Start JAX again on CPU devices, and print that. Arrays that a program has made before would be lost."""
    present = f"{len(devices)} x {devices[0].device_kind}"
    if not fresh:
        raise ValueError(
            f"{simulate} simulated devices were asked for but JAX has started on {present}; call"
            " use_devices() first in a fresh process, or set JAX_PLATFORMS=cpu"
        )
    jax.extend.backend.clear_backends()
    jax.config.update("jax_platforms", "cpu")
    print(
        f"{present} is too few for parallelism: {simulate} simulated CPU devices are used instead"
        f" (JAX_PLATFORMS={devices[0].platform} takes what is here)"
    )
    return ordered_devices()


def ordered_devices() -> list[jax.Device]:
    """Start JAX and list all devices, host by host (process k's ids may begin at 2048·k)."""
    _jax.install_channels()
    _refuse_flags(os.environ.get("XLA_FLAGS", ""))
    try:
        with _enough_threads():
            return sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    except (RuntimeError, AssertionError) as error:  # the second where JAX lacks a platform
        platforms = os.environ.get("JAX_PLATFORMS", "")
        where = f"JAX_PLATFORMS={platforms}" if platforms else "the platform of this machine"
        why = str(error).partition("\n")[0][:200] or "there is no such device"
        raise ValueError(
            f"JAX cannot start on {where}: {why}; unset JAX_PLATFORMS, or install the JAX for it:"
            " llmpar[cuda13], llmpar[tpu]"
        ) from error


@contextlib.contextmanager
def _enough_threads():
    """While JAX starts, ask XLA for `THREADS_PER_DEVICE` threads per simulated device, unless the user did.

    All simulated devices share one pool, by default of as many threads as there are devices or cores. A
    collective blocks a thread until its whole group has arrived, so two collectives that no data orders can
    take every thread, each waiting for a device that finds none. XLA reads the pool's size once, at start.
    """
    counts = re.findall(rf"{_COUNT_FLAG}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    devices = int(counts[-1]) if counts else jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    sizes = {}
    if devices > 1 and not any(name in os.environ for name in POOL_SIZE):
        threads = max(THREADS_PER_DEVICE * devices, os.cpu_count() or 1)
        sizes = dict.fromkeys(POOL_SIZE, str(threads))
    os.environ.update(sizes)
    try:
        yield
    finally:
        for name in sizes:
            del os.environ[name]


@functools.cache
def _refuse_flags(flags: str) -> None:
    """Raise ValueError for flags that XLA does not know. It would end the process at them, in a notebook
    without a message: another process tries them."""
    if all(flag.startswith(_COUNT_FLAG) for flag in flags.split()) or not sys.executable:
        return
    command = [sys.executable, "-c", _jax.PARSE_FLAGS]
    output = subprocess.run(command, capture_output=True, text=True, errors="replace").stderr
    if unknown := re.search(r"Unknown flags? in XLA_FLAGS: *(.*)", output):
        raise ValueError(
            f"XLA_FLAGS is '{flags}', and XLA, which ends a process for that, knows no"
            f" {unknown[1].strip()}; mend XLA_FLAGS, or unset it"
        )


def make_mesh(shape: str | MeshShape, devices: list | None = None) -> Mesh:
    """Make a mesh of all six axes over devices in the order of `device_grid`; sizes of one cost nothing."""
    _jax.install_channels()
    devices = ordered_devices() if devices is None else devices
    grid = device_grid(shape := parse_mesh(shape, len(devices)), devices)
    idle = {d.process_index for d in devices} - {d.process_index for d in grid.flat}
    if idle and jax.process_count() > 1:
        numbers, size = ", ".join(map(str, sorted(idle))), len({d.process_index for d in devices})
        raise ValueError(
            f"mesh '{shape}' takes {shape.size} of {len(devices)} devices, and of {size} processes these hold"
            f" none of them and could address nothing: {numbers}; use all devices, or start"
            f" {size - len(idle)} process{'es' * (size - len(idle) > 1)}"
        )
    return Mesh(grid, tuple(shape.sizes), axis_types=(AxisType.Auto,) * grid.ndim)


def abstract_mesh(shape: str | MeshShape, platform: str = "cpu") -> AbstractMesh:
    """Make a mesh without devices: enough to trace and lower a program for a platform (cpu, gpu or tpu)."""
    sizes, device = parse_mesh(shape).sizes, None
    if platform != "cpu":
        name = {"gpu": "cuda"}.get(platform, platform)
        device = AbstractDevice(_KINDS[platform], num_cores=None, platform=name)
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device
    )


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
    if isinstance(mesh, AbstractMesh):
        device_kind = mesh.abstract_device.device_kind if mesh.abstract_device else ""
        return next((platform for platform in _KINDS if _KINDS[platform] == device_kind), "cpu")
    return device_platform(mesh.devices.flat[0])


def device_platform(device: jax.Device) -> str:
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
