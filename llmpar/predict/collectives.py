"""The arithmetic of a ring: which share of its message a collective sends, in whole bytes."""

from __future__ import annotations

import math
from fractions import Fraction


def ring_share(kind: str, group: int) -> Fraction:
    """How much of one collective's message each of ``group`` devices sends on a ring: all but one piece,
    (g-1)/g; twice that for an all-reduce, which is a reduce-scatter and an all-gather; all of it where it is
    permuted, and nothing to `vary`.

    The message is the whole: the gathered result, the unreduced input, the local buffer that all exchange.
    """
    if kind in ("permute", "collective-permute"):
        return Fraction(group > 1)
    laps = {"all-reduce": 2, "maximum": 2, "vary": 0}.get(kind, 1)
    return Fraction(laps * (group - 1), group)


def ring_bytes(kind: str, message_bytes: int, group: int) -> int:
    """`ring_share` of a message in whole bytes. Where ``group`` does not divide the message its pieces
    differ, and so does what the devices send. Their mean is exact, however the ring cuts the message; a
    fraction of a byte counts as one.
    """
    return math.ceil(message_bytes * ring_share(kind, group))
