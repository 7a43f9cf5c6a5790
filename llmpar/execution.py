"""How devices execute a plan: kernels, exchanges of tokens, loops. None of it changes what lies where.

`Plan` has these fields too (it extends `Execution`), and leaves them to the platform: ``auto``.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from llmpar.files import Allowed

SUITS = {
    "attention_kernel": {
        "cpu": ("portable", "xla", "flash"),
        "gpu": ("flash", "cudnn", "portable", "xla"),
        "tpu": ("flash", "portable", "xla"),
    },
    "dispatch": {"cpu": ("padded",), "gpu": ("ragged", "padded"), "tpu": ("ragged", "padded")},
    "grouped": {"cpu": ("blocks", "ragged_dot"), "gpu": ("triton",), "tpu": ("ragged_dot", "blocks")},
}
"""What the devices of a platform can do, or not absurdly slowly; first what ``auto`` stands for."""
UNSUITED = {
    "cudnn": "it is for NVIDIA GPUs",
    "ragged": "XLA has no ragged all-to-all for CPUs",
    "ragged_dot": "XLA for GPUs multiplies every row by every expert",
    "blocks": "a GPU's host would wait for every turn of the loop",
    "triton": "its compiler writes programs for GPUs",
}


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What a platform may decide by itself.

    Attributes:
        attention_kernel: ``portable``, the blocks of :mod:`llmpar.attention`; ``flash``, the kernel of
            :mod:`llmpar.kernels.flash` (on CPUs interpreted, and slow); or `jax.nn.dot_product_attention` by
            ``cudnn`` (NVIDIA GPUs, bfloat16) or ``xla``, with a mask of queries times keys, and not in a
            ring. ``auto`` is flash on GPUs and TPUs, and portable on CPUs or where attention_block asks for
            blocks.
        attention_block: queries and keys per block of blockwise attention; None: halves of what is here, down
            to 256.
        documents: ``whole`` promises that each row is one document: cudnn then needs no mask. A row that
            breaks the promise gives NaN.
        dispatch: how tokens reach the ranks of ep: in all slots of a buffer (``padded``), or in the full ones
            only (``ragged``, which CPUs lack). ``auto``: ragged on GPUs and TPUs.
        grouped: how tokens are multiplied by their experts (Megatron's grouped GEMM): in a loop over
            ``blocks`` (CPUs), by `jax.lax.ragged_dot` (TPUs; a CPU multiplies every token by every expert),
            or by :mod:`llmpar.kernels.products` in ``triton`` (GPUs). ``auto``: what suits the devices.
        hop: how the ranks of a ring hand on what they hold: by a ``permute``; or by an ``exchange``, an
            all-to-all of which all blocks but one are empty, for which no other stage of a pipeline must
            wait. ``auto``: an exchange in a pipeline of simulated devices, a permute elsewhere.
        unroll: how many blocks the scan over layers unrolls at a time; 0 unrolls all.
    """

    attention_kernel: Literal["auto", "portable", "flash", "cudnn", "xla"] = "auto"
    attention_block: int | None = None
    documents: Literal["packed", "whole"] = "packed"
    dispatch: Literal["auto", "padded", "ragged"] = "auto"
    grouped: Literal["auto", "blocks", "ragged_dot", "triton"] = "auto"
    hop: Literal["auto", "permute", "exchange"] = "auto"
    unroll: Annotated[int, Allowed(int, 0)] = 1

    def suited(self, platform: str) -> dict[str, Any]:
        """The fields that say ``auto``, decided for a platform. Refuses what its devices cannot do."""
        decided = {}
        for name, suits in SUITS.items():
            value, first = getattr(self, name), suits[platform][0]
            if name == "attention_kernel" and self.attention_block:
                first = "portable"  # the one whose tiles can be chosen
            if value == "auto":
                decided[name] = first
            elif value not in suits[platform]:
                raise ValueError(
                    f"{name}='{value}' does not suit the {platform.upper()}s of this mesh: {UNSUITED[value]};"
                    f" use {name}='{first}', or 'auto'"
                )
        return decided
