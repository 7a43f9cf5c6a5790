"""Quantized weights of published files, multiplied out as they are read: float8 numbers with a scale for each
block (DeepSeek-V3, Qwen3-FP8), and mxfp4 (gpt-oss). Only the region that is read is ever expanded."""

import json
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from llmpar.files import read_json
from llmpar.plan import families

_Ends = list[tuple[int, int]]  # of each dim where a region begins and ends
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_GROUP = 32  # numbers that share a scale in mxfp4 (OCP Microscaling Formats 1.0, section 6.3)


@dataclass(frozen=True)
class Expanded:
    """A tensor in float32 whose regions ``read`` makes. It gives slices as one of safetensors does."""

    shape: tuple[int, ...]
    read: Callable[[_Ends], np.ndarray]

    def get_shape(self) -> tuple[int, ...]:
        """Return the sizes of the dims."""
        return self.shape

    def get_dtype(self) -> str:
        """Return the kind of numbers, as safetensors calls it."""
        return "F32"

    def __getitem__(self, region: slice | tuple[slice, ...]) -> np.ndarray:
        parts = region if isinstance(region, tuple) else (region,)
        parts += (slice(None),) * (len(self.shape) - len(parts))
        return self.read([part.indices(n)[:2] for part, n in zip(parts, self.shape, strict=True)])


def block_scaled(name: str, numbers: np.ndarray, scales: Any, block: list[int]) -> Expanded:
    """Return a float8 matrix times the scales of its blocks (DeepSeek-V3 2024, section 3.3.2). Refuses scales
    of another number of blocks."""
    given, needed = (
        list(scales.get_shape()),
        [-(-n // size) for n, size in zip(numbers.shape, block, strict=True)],
    )
    if given != needed:
        raise ValueError(
            f"the scales of '{name}' have shape {given}, and blocks of {block} need {needed}; use the"
            " config.json that they came with"
        )

    def read(ends: _Ends) -> np.ndarray:
        rows, columns = (np.arange(*pair) // size for pair, size in zip(ends, block, strict=True))
        own = scales[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        own = own[np.ix_(rows - rows[0], columns - columns[0])]
        return numbers[tuple(slice(*pair) for pair in ends)].astype(np.float32) * own

    return Expanded(numbers.shape, read)


def mxfp4(blocks: Any, scales: Any) -> Expanded:
    """Return matrices ``e c r`` of four-bit numbers, stored as ``e r c``: two in a byte, lower half first,
    and a power of two for each 32."""
    e, r, groups, _ = blocks.get_shape()

    def read(ends: _Ends) -> np.ndarray:
        experts, (start, stop), rows = ends
        first = start // _GROUP
        where = slice(*experts), slice(*rows), slice(first, -(-stop // _GROUP))
        packed, powers = blocks[where], scales[where].astype(np.int32) - 127
        numbers = _FP4[np.stack((packed & 15, packed >> 4), -1)].reshape(*powers.shape, _GROUP)
        numbers = np.ldexp(numbers, powers[..., None]).reshape(*powers.shape[:2], -1)
        return numbers[..., start - first * _GROUP : stop - first * _GROUP].swapaxes(1, 2)

    return Expanded((e, groups * _GROUP, r), read)


def float8_tensors(file: pathlib.Path) -> dict[str, np.ndarray]:
    """Return the float8 tensors of a file by name, mapped into memory: numpy has no such number, and so
    safetensors gives none to it."""
    mapped = np.memmap(file, np.uint8, "r")
    begin = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    tensors = dict[str, np.ndarray]()
    for name, row in json.loads(mapped[8:begin].tobytes()).items():
        if row.get("dtype") == "F8_E4M3":
            start, stop = (begin + end for end in row["data_offsets"])
            tensors[name] = mapped[start:stop].view(jnp.float8_e4m3fn).reshape(row["shape"])
    return tensors


def expanded(tensors: Mapping[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """Return a folder's tensors by name, with the quantized ones `Expanded`. How large blocks are, its
    config.json says."""
    result = dict(tensors)
    for name in tensors:
        if f"{name}_scale_inv" in tensors:
            file = families.text_part(read_json(folder / "config.json", "model configuration"))
            block = file["quantization_config"]["weight_block_size"]
            scales = result.pop(f"{name}_scale_inv")
            result[name] = block_scaled(name, tensors[name], scales, block)
        whole = name.removesuffix("_blocks")
        if f"{whole}_scales" in tensors and name != whole:
            result[whole] = mxfp4(result.pop(name), result.pop(f"{whole}_scales"))
    return result
