"""Names clusters that are not here, and gives their devices for their own compilers.

A target is a chip and how many of them: ``h100:8x8`` is 8 hosts of 8 GPUs, ``v5p:4x4x4`` a TPU slice of 64
chips, ``2*v5e:4x4`` two such slices. XLA's compiler for GPUs needs a description of the GPU, which
`gpu_description` writes from the row of its chip and gpus.toml. The TPU compiler knows its chips.
"""

import functools
import importlib.util
import json
import math
import re
from dataclasses import dataclass, replace
from typing import Any

from llmpar.predict.hardware import Chip, chip, package_table

COMPILER_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # this process computes nothing elsewhere; compilers are asked for by name
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing is opened that two processes could not share
}
"""The environment in which compilers run without a device. It must be set before JAX starts."""
_TABLES = package_table("planner/gpus.toml")
GPUS: dict[str, dict[str, Any]] = _TABLES["gpu"]
TPUS = {"v4": "v4", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "7x": "tpu7x"}
"""Chips, and what the compiler calls them."""
JOINED = ("v4",)
"""Chips whose two cores are one device where they run, but to the compiler only if asked for megacore."""


@dataclass(frozen=True)
class Target:
    """Holds a cluster to compile for."""

    text: str  # as the user wrote it
    chip: Chip
    shape: tuple[int, ...]  # hosts and GPUs per host, or the extents of a TPU slice in chips
    num_slices: int = 1  # of TPUs, joined by the data centre's network

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
        """Gives the chip's row; its fast links reach as many chips as a host of this target has."""
        return (
            replace(self.chip, node_size=self.shape[1])
            if self.is_gpu and self.shape[0] > 1
            else self.chip
        )

    @functools.cached_property
    def devices(self) -> list:
        """The devices, as the compiler describes them. ValueError: it is missing, or knows no such slice."""
        need_compiler(self.platform)
        from jax.experimental import topologies

        settings: dict[str, Any]
        if self.is_gpu:
            hosts, gpus = self.shape
            settings = {
                "platform": "cuda",
                "topology": f"1x{hosts}x{gpus}",
                "target_config": gpu_description(self.chip),
            }
        else:
            extents = "x".join(map(str, self.shape))
            settings = dict(platform="tpu", topology_name=f"{TPUS[self.chip.name]}:{extents}")
            settings |= {"num_slices": self.num_slices} if self.num_slices > 1 else {}
            settings |= {"chip_config_name": "megacore"} if self.chip.name in JOINED else {}
        try:
            return list(topologies.get_topology_desc(**settings).devices)
        except Exception as error:  # each compiler raises its own
            why = str(error).partition("\n")[0][:200]
            raise ValueError(
                f"target '{self.text}' is none that its compiler knows: {why}"
            ) from error


def parse_target(text: str) -> Target:
    """Read a target. Raises ValueError with what is known for what cannot be one."""
    match = re.fullmatch(r"(?:(\d+)\*)?([\w.\-]+):(\d+(?:x\d+)*)", text.strip().lower())
    known = f"{', '.join(GPUS)} (hosts x GPUs, as h100:8x8) and {', '.join(TPUS)} (a slice, as v5p:4x4x4)"
    if not match:
        raise ValueError(f"target '{text}' is not of the form CHIP:SHAPE; known are {known}")
    row, shape, slices = chip(match[2]), tuple(map(int, match[3].split("x"))), int(match[1] or 1)
    is_gpu = row.name in GPUS
    if not is_gpu and row.name not in TPUS:
        raise ValueError(
            f"there is no compiler here for chip '{row.name}' without the device; known are {known}"
        )
    dims = 2 if is_gpu else row.num_axes
    if len(shape) != dims or 0 in shape or not slices:
        what = "hosts x GPUs per host" if is_gpu else f"a slice of {dims} extents"
        raise ValueError(
            f"target '{text}' has shape {match[3]}, but {row.name} wants {what}, all 1 or more"
        )
    if is_gpu and slices > 1:
        raise ValueError(
            f"target '{text}' has several slices of GPUs; use"
            f" {row.name}:{slices * shape[0]}x{shape[1]}"
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
        installed = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        installed = False
    if not installed:
        raise ValueError(
            f"{what} is not installed; pip install 'llmpar[{extra}]' (no device is needed)"
        )


def gpu_description(row: Chip) -> str:
    """Write the description of a GPU that XLA compiles for: its TargetConfig message, as text."""
    info = _TABLES["every"] | GPUS[row.name]
    major, minor = info.pop("capability")
    info["shared_memory_per_block_optin"] = info["shared_memory_per_core"] - 1024
    info["memory_bandwidth"] = int(row.hbm_bytes_per_s)
    info["device_memory_size"] = round(row.usable_hbm_gib * 2**30)
    lines = [f"  {name}: {json.dumps(value)}" for name, value in info.items()]
    accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}")
    dnn = "major: {} minor: {} patch: {}".format(*info["dnn_version"].split("."))
    ends = 'platform_name: "CUDA"', f"dnn_version_info {{ {dnn} }}"
    name = f'device_description_str: "{info["name"]}"'
    return "\n".join(["gpu_device_info {", *lines, "}", *ends, name, ""])
