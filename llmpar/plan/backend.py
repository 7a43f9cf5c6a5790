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
}
"""What a platform can do in reasonable time; first what ``auto`` means."""
AMPERE, SINCE_AMPERE = 8.0, ("flash", "cudnn")
"""NVIDIA's compute capability since which XLA has Triton, and what needs it. (So does JAX's own attention:
older GPUs lack the products of 16 bits that it asks for.)"""
HOPPER = 9.0  # since which cuDNN's attention has heads of up to 256, not 128
UNSUITED = {"cudnn": "it is for NVIDIA GPUs", "ragged": "XLA has no ragged all-to-all for CPUs"}


def able(name: str, devices: str) -> tuple[str, ...]:
    """What devices (`mesh.platform_of`) can do of what a field offers."""
    platform, _, card = devices.partition(" ")
    older = bool(card) and not _since(AMPERE, card)
    lacks = SINCE_AMPERE + ("xla",) * card[0].isdigit() if older else ()
    return tuple(one for one in SUITS[name][platform] if one not in lacks)


def _since(capability: float, card: str) -> bool:
    """Whether what JAX tells of a card is a compute capability of NVIDIA's, this or a later one."""
    return card[:1].isdigit() and float(card) >= capability


def fits_cudnn(head_width: int, devices: str) -> bool:
    """Whether JAX has cuDNN's attention for heads of this width on devices (`mesh.platform_of`)."""
    widest = 256 if _since(HOPPER, devices.partition(" ")[2]) else 128
    return head_width % 8 == 0 and head_width <= widest and "cudnn" in able("attention_kernel", devices)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What a platform may decide by itself.

    Attributes:
        attention_kernel: ``portable``, the blocks of :mod:`llmpar.model.attention`; ``flash``, the kernel of
            :mod:`llmpar.kernels.flash` (on CPUs interpreted, and slow); or `jax.nn.dot_product_attention` by
            ``cudnn`` (NVIDIA GPUs, bfloat16) or ``xla``, with a mask of queries times keys, and not in a
            ring. ``auto`` is flash on TPUs and GPUs since Ampere, there cudnn where it needs no mask
            (`Resolved.takes_cudnn`), and portable elsewhere or where attention_block asks for blocks.
        attention_block: queries and keys per block of blockwise attention; None: halves of what is here, down
            to 256.
        documents: ``whole`` promises that each row is one document: cudnn then needs no mask. A row that
            breaks the promise gives NaN there.
        dispatch: how tokens reach the ranks of ep: in all slots of a buffer (``padded``), or in the full ones
            only (``ragged``, which CPUs lack). ``auto``: ragged on GPUs and TPUs.
        hop: how the ranks of a ring hand on what they hold: by a ``permute``; or by an ``exchange``, an
            all-to-all of which all blocks but one are empty, for which no other stage of a pipeline must
            wait. ``auto``: an exchange in a pipeline of simulated devices, a permute elsewhere.
        unroll: how many blocks the scan over layers unrolls at a time; 0 unrolls all.
    """

    attention_kernel: Literal["auto", "portable", "flash", "cudnn", "xla"] = "auto"
    attention_block: int | None = None
    documents: Literal["packed", "whole"] = "packed"
    dispatch: Literal["auto", "padded", "ragged"] = "auto"
    hop: Literal["auto", "permute", "exchange"] = "auto"
    unroll: Annotated[int, Allowed(int, 0)] = 1

    def suited(self, devices: str) -> dict[str, Any]:
        """The fields that say ``auto``, decided for devices. Refuses what they cannot do."""
        decided, (platform, _, card) = {}, devices.partition(" ")
        for name in SUITS:
            value, first = getattr(self, name), able(name, devices)[0]
            if name == "attention_kernel" and self.attention_block:
                first = "portable"  # the one whose tiles can be chosen
            if value == "auto":
                decided[name] = first
            elif value not in able(name, devices):
                why = f"it wants NVIDIA's compute capability {AMPERE} (Ampere) or newer, and here is {card}"
                why = why if value in SUITS[name][platform] else UNSUITED.get(value, "")
                what = f"{name}='{value}' does not suit the {platform.upper()}s of this mesh"
                raise ValueError(f"{what}: {why}; use {name}='{first}', or 'auto'")
        return decided
