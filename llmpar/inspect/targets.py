"""Names clusters that are not here, and gives their devices, so that their own compilers can compile for
them.

A target is a chip and how many of them: ``h100:8x8`` is 8 hosts of 8 GPUs, ``v5p:4x4x4`` a TPU slice of 64
chips, ``2*v5e:4x4`` two such slices. XLA's compiler for GPUs needs a description of the GPU, which
`gpu_description` writes from the chip's row and the few figures of `GPUS`. The TPU compiler knows its chips
by name.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from llmpar.predict.hardware import Chip, chip

QUIET = {
    "JAX_PLATFORMS": "cpu",  # this process computes nothing elsewhere; compilers are asked for by name
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing is opened that two processes could not share
}
"""The environment in which compilers run without a device. It must be set before JAX starts."""


class Gpu(NamedTuple):
    """Holds what XLA's cost model and code generator ask about a GPU, beside the figures of its chip's
    row."""

    device_name: str  # as the driver gives it
    capability: tuple[int, int]
    num_cores: int  # streaming multiprocessors
    fpus_per_core: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int  # per core


# NVIDIA's data sheets and CUDA C++ programming guide, "compute capabilities": cores, boost clock, L2, shared
# memory per multiprocessor.
GPUS = {
    "a100-40": Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 64, 1.41, 40 << 20, 164 << 10),
    "a100-80": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 40 << 20, 164 << 10),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 50 << 20, 228 << 10),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 1.98, 50 << 20, 228 << 10),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 128, 1.965, 126 << 20, 228 << 10),
}
CUDA, CUDNN = (12, 8, 0), (9, 10, 0)
"""The versions that a target's driver, toolkit and cuDNN are taken to have."""
TPUS = {"v4": 2, "v5e": 1, "v5p": 1, "v6e": 1, "7x": 2}  # with JAX devices per chip
_TPU_NAMES = {"7x": "tpu7x"}  # what the compiler calls it


@dataclass(frozen=True)
class Target:
    """Holds a cluster to compile for.

    Attributes:
        text: how the user wrote it.
        chip: the row of its chip.
        shape: hosts and GPUs per host, or the extents of a TPU slice in chips.
        num_slices: TPU slices, joined by the data centre's network.
    """

    text: str
    chip: Chip
    shape: tuple[int, ...]
    num_slices: int = 1

    @property
    def is_gpu(self) -> bool:
        """Whether the chip is a GPU."""
        return self.chip.name in GPUS

    @property
    def platform(self) -> str:
        """Gives JAX's name of the platform: gpu or tpu."""
        return "gpu" if self.is_gpu else "tpu"

    @property
    def num_devices(self) -> int:
        """Counts the JAX devices."""
        return math.prod(self.shape) * self.num_slices * self.chip.devices_per_chip

    @property
    def links(self) -> Chip:
        """Gives the chip's row with as many chips within reach of the fast links as a host of this target
        has."""
        return replace(self.chip, node_size=self.shape[1]) if self.is_gpu and self.shape[0] > 1 else self.chip

    @functools.cached_property
    def devices(self) -> list:
        """The devices, as the compiler describes them. Raises ValueError where the compiler is not installed
        or knows no such slice."""
        need_compiler(self.platform)
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        from jax.experimental import topologies

        how: dict[str, Any]
        if self.is_gpu:
            hosts, gpus = self.shape
            how = dict(
                platform="cuda", target_config=gpu_description(self.chip), topology=f"1x{hosts}x{gpus}"
            )
        else:
            name = _TPU_NAMES.get(self.chip.name, self.chip.name)
            how = dict(platform="tpu", topology_name=f"{name}:{'x'.join(map(str, self.shape))}")
            how |= {"num_slices": self.num_slices} if self.num_slices > 1 else {}
        try:
            return list(topologies.get_topology_desc(**how).devices)
        except Exception as error:  # each compiler raises its own
            why = str(error).partition("\n")[0][:200]
            raise ValueError(f"target '{self.text}' is none that its compiler knows: {why}") from error


def parse_target(text: str) -> Target:
    """Read a target. Raises ValueError with what is known for what cannot be one."""
    found = re.fullmatch(r"(?:(\d+)\*)?([\w.\-]+):(\d+(?:x\d+)*)", text.strip().lower())
    known = f"{', '.join(GPUS)} (hosts x GPUs, as h100:8x8) and {', '.join(TPUS)} (a slice, as v5p:4x4x4)"
    if not found:
        raise ValueError(f"target '{text}' is not of the form CHIP:SHAPE; known are {known}")
    row, shape, slices = chip(found[2]), tuple(map(int, found[3].split("x"))), int(found[1] or 1)
    if row.name not in (*GPUS, *TPUS):
        raise ValueError(
            f"there is no compiler here for chip '{row.name}' without the device; known are {known}"
        )
    dims = 2 if row.name in GPUS else row.num_axes
    if len(shape) != dims or 0 in shape or not slices:
        what = "hosts x GPUs per host" if row.name in GPUS else f"a slice of {dims} extents"
        raise ValueError(f"target '{text}' has shape {found[3]}, but {row.name} wants {what}, all 1 or more")
    if row.name in GPUS and slices > 1:
        raise ValueError(
            f"target '{text}' has several slices of GPUs; use {row.name}:{slices * shape[0]}x{shape[1]}"
        )
    return Target(text, row, shape, slices)


def need_compiler(platform: str) -> None:
    """Refuse, with the extra to install, where the compiler for a platform is missing."""
    package, extra, what = {
        "gpu": ("jax_plugins.xla_cuda12", "aot-gpu", "XLA's compiler for NVIDIA GPUs"),
        "tpu": ("libtpu", "aot-tpu", "the TPU compiler"),
        "cudnn": ("nvidia.cudnn", "aot-gpu-cudnn", "cuDNN"),
    }[platform]
    try:
        there = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        raise ValueError(f"{what} is not installed; pip install 'llmpar[{extra}]' (no device is needed)")


def gpu_description(row: Chip) -> str:
    """Write the description of a GPU that XLA compiles for: its TargetConfig message, as text.

    Limits of threads and blocks are those of every CUDA GPU since compute capability 8.0 (CUDA C++
    programming guide, table of technical specifications).
    """
    gpu = GPUS[row.name]
    version = ".".join(map(str, CUDA))
    major, minor = gpu.capability
    accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_core": gpu.shared_bytes,
        "shared_memory_per_block_optin": gpu.shared_bytes - 1024,  # a kernel's own kilobyte
        "threads_per_core_limit": 2048,
        "core_count": gpu.num_cores,
        "fpus_per_core": gpu.fpus_per_core,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "memory_bandwidth": int(row.hbm_bytes_per_s),
        "l2_cache_size": gpu.l2_bytes,
        "clock_rate_ghz": gpu.clock_ghz,
        "device_memory_size": round(row.usable_hbm_gib * 2**30),
        "device_vendor": '"NVIDIA Corporation"',
        "device_address_bits": 64,
        "ecc_enabled": "true",
        "name": f'"{gpu.device_name}"',
        **dict.fromkeys(
            ("driver_version", "runtime_version", "compile_time_toolkit_version"), f'"{version}"'
        ),
        "dnn_version": '"' + ".".join(map(str, CUDNN)) + '"',
    }
    lines = [f"  {name}: {value}" for name, value in info.items()]
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}")
    dnn = " ".join(f"{name}: {n}" for name, n in zip(("major", "minor", "patch"), CUDNN, strict=True))
    ends = (
        'platform_name: "CUDA"',
        f"dnn_version_info {{ {dnn} }}",
        f'device_description_str: "{gpu.device_name}"',
    )
    return "\n".join(["gpu_device_info {", *lines, "}", *ends, ""])
