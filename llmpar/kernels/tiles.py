"""The tiles of attention's kernels (`llmpar.kernels.flash`), by head width and platform.

No JAX: a prediction counts by whole tiles what the kernel computes.
"""

import re
from typing import NamedTuple

# Names of GPUs that have 163 KiB or more of shared memory for a program; others (L4, RTX) have 99 KiB.
_ROOMY = re.compile(r"A[18]00(?!0)|A30\b|H\d00|H20\b|B\d00")


class KernelTiles(NamedTuple):
    """Queries and keys per tile of a kernel; how many tiles ahead a GPU loads, and warps of a program."""

    q: int
    k: int
    num_stages: int
    num_warps: int


def padded_width(head_width: int) -> int:
    """Return the width of a head inside a kernel: a power of 2, at least 16, as tensor cores want it."""
    return max(16, 1 << (head_width - 1).bit_length())


def kernel_tiles(
    name: str,
    head_width: int,
    itemsize: int,
    s: int,
    t: int,
    platform: str = "gpu",
    chip: str = "H100",
) -> KernelTiles:
    """Return the tiles of a kernel of `llmpar.kernels.flash`.

    A program keeps one tile, and its sums, in registers, and passes the others through shared memory. Of 23
    choices for each kernel and heads of 64 and 128 in bfloat16 these are the fastest on an H100, or within a
    tenth of that; for heads of 256 the fastest for which A100s and B200s have room too. float32 has what
    spills few registers. A chip whose name, as JAX has it, is none of `_ROOMY` gets smaller tiles, and a
    sequence shorter than a tile a shorter one.
    """
    width, of_keys = padded_width(head_width) * itemsize, name == "flash_keys_grad"
    own, other, stages, warps = (
        (128, 64, 3, 8) if width <= 256 else (64 if width <= 512 else 32, 32, 2, 8)
    )
    if itemsize == 2 and width <= 128:
        own, warps = 64, 4
    elif itemsize == 2 and width == 512:
        own, other, stages, warps = (32, 64, 2, 4) if of_keys else (64, 32, 3, 4)
    if platform == "tpu":  # vector memory holds more, and its lanes want 128 numbers
        own = other = 512 if width <= 512 else 256
    elif platform == "gpu" and not _ROOMY.search(chip):
        other //= 2
    q, k = (other, own) if of_keys else (own, other)
    fit = lambda tile, length: min(tile, padded_width(length))
    return KernelTiles(fit(q, s), fit(k, t), stages, warps)
