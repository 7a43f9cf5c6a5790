"""Meshes: simulated, real and abstract, in link order."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import re

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from llmpar.notation import AXES, Layout, MeshShape, parse_mesh

_COUNT_FLAG = "--xla_force_host_platform_device_count"
POOL_SIZE = ("NPROC", "PJRT_NPROC")
"""Environment variables for the size of XLA's thread pool. JAX 0.10.2 and 0.12 read both, and the second
wins."""
THREADS_PER_DEVICE = 4
MAX_SIMULATED = 1024


def use_devices(simulated: int = 8) -> list[jax.Device]:
    """The accelerators of this machine or, where there is none, ``simulated`` CPU devices. Call it before
    other JAX work.

    Raises ValueError when JAX has started already with fewer CPU devices: the number is fixed from its first
    use on.
    """
    if not 1 <= simulated <= MAX_SIMULATED:
        raise ValueError(
            f"{simulated} simulated devices were asked for; use 1 to {MAX_SIMULATED}, all threads of one"
            " process"
        )
    if _COUNT_FLAG not in os.environ.get("XLA_FLAGS", "") and "JAX_NUM_CPU_DEVICES" not in os.environ:
        try:
            jax.config.update("jax_num_cpu_devices", simulated)
        except RuntimeError:
            pass  # JAX runs already; what it has may be enough
    with _enough_threads(simulated):
        try:
            devices = ordered_devices()
        except (
            RuntimeError,
            AssertionError,
        ) as error:  # JAX asserts where the platform that it was told is not there
            told = os.environ.get("JAX_PLATFORMS", "")
            where = f"JAX_PLATFORMS={told}" if told else "the platform of this machine"
            why = str(error).partition("\n")[0][:200] or "there is no such device"
            what = "unset JAX_PLATFORMS, or install the JAX for it: llmpar[cuda13], llmpar[tpu]"
            raise ValueError(f"JAX cannot start on {where}: {why}; {what}") from error
    if devices[0].platform == "cpu" and len(devices) < simulated:
        raise ValueError(
            f"{simulated} simulated devices were asked for but JAX has started with {len(devices)}, and the"
            f" number is fixed at its first use; ask for {len(devices)} (--devices {len(devices)}), call"
            f" use_devices() first in a fresh process, or set XLA_FLAGS={_COUNT_FLAG}={simulated}"
        )
    return devices


@contextlib.contextmanager
def _enough_threads(simulated: int):
    """While JAX starts, ask XLA for `THREADS_PER_DEVICE` threads per simulated device, unless the user has
    asked for some. ``simulated`` counts if the environment asks for no other number of devices.

    All simulated devices share one pool, by default of as many threads as there are devices or cores. A
    collective blocks a thread until its whole group has come, so two collectives that no data orders can take
    every thread, each waiting for one that finds none. XLA reads the pool's size from the environment once,
    when its CPU client starts.
    """
    told = re.findall(rf"{_COUNT_FLAG}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    devices = int(told[-1] if told else os.environ.get("JAX_NUM_CPU_DEVICES", simulated))
    given = any(name in os.environ for name in POOL_SIZE)
    asked = {} if given else dict.fromkeys(POOL_SIZE, str(THREADS_PER_DEVICE * devices))
    os.environ.update(asked)
    try:
        yield
    finally:
        for name in asked:
            del os.environ[name]


def ordered_devices() -> list[jax.Device]:
    """All devices, host by host. (An id is not a position: process k's ids may start at 2048·k.)"""
    return sorted(jax.devices(), key=lambda d: (d.process_index, d.id))


def make_mesh(shape: str | MeshShape, devices: list | None = None) -> Mesh:
    """A mesh of all six axes over real or simulated devices, slow links outermost; sizes of one cost nothing.

    Uses the first devices when the product is smaller than their number. On a whole accelerator the devices
    are laid out along its links. Several slices (pods of TPUs; every host of GPUs is one) are dealt to the
    axes from the outermost on, to each as many as divide it, so that the slow network carries the slow axes.
    """
    devices = ordered_devices() if devices is None else devices
    shape = parse_mesh(shape, len(devices))
    sizes = tuple(shape.sizes.values())
    if shape.reshape or shape.size < len(devices) or devices[0].platform == "cpu":
        grid = np.array(devices[: shape.size]).reshape(sizes)
    else:
        slices = collections.Counter(getattr(d, "slice_index", 0) for d in devices)
        across, left = [], len(slices)
        for n in sizes:
            across.append(math.gcd(n, left))
            left //= across[-1]
        within = [n // many for n, many in zip(sizes, across, strict=True)]
        try:
            grid = mesh_utils.create_hybrid_device_mesh(
                within, across, devices, allow_split_physical_axes=True
            )
        except (NotImplementedError, AssertionError, ValueError) as error:  # JAX raises all three
            many = " + ".join(map(str, slices.values()))
            raise ValueError(
                f"mesh '{shape}' was asked for on {len(devices)} x {devices[0].device_kind}, but JAX finds no"
                f" layout along their links: the {many} devices of its slices are not equal boxes; try"
                f" '!{shape}' for plain order"
            ) from error
    return Mesh(grid, tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))


def abstract_mesh(shape: str | MeshShape) -> AbstractMesh:
    """A mesh without devices: enough to trace and to lower a program for any number of them."""
    shape = parse_mesh(shape)
    return AbstractMesh(tuple(shape.sizes.values()), tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))


def spec(layout: Layout) -> PartitionSpec:
    """The layout as JAX writes it: per dim the axes that cut it."""
    return PartitionSpec(*[d.axes or None for d in layout.dims])


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """The platform of a mesh's devices: cpu, gpu or tpu. An abstract mesh counts as CPUs."""
    name = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else "cpu"
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


def sharding(mesh: Mesh | AbstractMesh, layout: Layout) -> NamedSharding:
    """The layout on the devices of ``mesh``."""
    return NamedSharding(mesh, spec(layout))


def shard_bytes(layout: Layout, shape: tuple[int, ...], itemsize: int, sizes: dict[str, int]) -> int:
    """Bytes that one device holds of a value of ``shape``."""
    return math.prod(layout.shard_shape(shape, sizes)) * itemsize
