"""The tiles of attention's kernels (`llmpar.kernels.flash`), by head width and platform.

No JAX: a prediction counts by whole tiles what the kernel computes.
"""

import re
from typing import NamedTuple

ROOMY = re.compile(r"A100|A800|A30\b|H\d00|H20\b|B\d00")
"""Names of GPUs that have 163 KiB or more of shared memory for a program; others (L4, RTX) have 99 KiB."""


class KernelTiles(NamedTuple):
    """Queries and keys per tile of a kernel, and how many tiles ahead a GPU loads."""

    q: int
    k: int
    num_stages: int


def padded_width(head_width: int) -> int:
    """Return the width of a head inside a kernel: a power of 2, at least 16, as tensor cores want it."""
    return max(16, 1 << (head_width - 1).bit_length())


def kernel_tiles(
    name: str, head_width: int, itemsize: int, s: int, t: int, platform: str = "gpu", chip: str = "H100"
) -> KernelTiles:
    """Return the tiles of a kernel of `llmpar.kernels.flash`.

    A program keeps one tile, and its sums, in registers, and passes the others through shared memory. Chosen
    for H100s, so that few registers are spilled (dK and dV of 16 bits, 128 wide: 100 bytes); heads of more
    bytes get smaller tiles, and so does a chip whose name, as JAX has it, is none of `ROOMY`. Sequences
    shorter than a tile get a shorter one.
    """
    width = padded_width(head_width) * itemsize  # bytes
    own, other = (128, 64) if width <= 256 else (64, 32) if width <= 512 else (32, 32)
    if platform == "tpu":  # vector memory holds more, and its lanes want 128 numbers
        own = other = 512 if width <= 512 else 256
    elif platform == "gpu" and not ROOMY.search(chip):
        other //= 2
    q, k = (other, own) if name == "flash_keys_grad" else (own, other)
    fit = lambda tile, length: min(tile, padded_width(length))
    return KernelTiles(fit(q, s), fit(k, t), 3 if width <= 256 else 2)
