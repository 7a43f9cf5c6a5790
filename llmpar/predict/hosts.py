"""What hosts send to one another: the part of a step's traffic that leaves a host.

A collective's bytes per device do not depend on where the devices are; those between hosts follow from who
sends what to whom. Gloo, by which CPU processes talk, does it so (a statement about its algorithms, held
against a kernel's counters; no constant in it is fitted):

    all-reduce, all-gather   a ring: each rank to the next in the group
    reduce-scatter           halving: half of the message to the neighbour, a quarter to the one two places
                             on, …; then the pieces, whose order is now that of the reversed bits of their
                             numbers, go to their owners. (In textbooks it goes round a ring; here a device
                             sends up to a piece more.)
    all-to-all               a piece to each rank, directly
    permute                  the whole along each of its pairs

It is payload: headers come on top, about 600 B for each message that crosses.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from llmpar.plan.lockstep import lockstep, slots
from llmpar.plan.plan import Resolved
from llmpar.predict.formulas import ring_share
from llmpar.predict.traffic import NEXT_STAGE, OPPOSITE_STAGE, PREVIOUS_STAGE, step_traffic

_Send = tuple[int, int, Fraction]
"""From, to, and which share of the message."""


def sends(kind: str, group: int, pairs: Sequence[tuple[int, int]] = ()) -> Iterator[_Send]:
    """Enumerate what a collective sends: from which place in the group to which, and which share of it.

    ``pairs`` are those of a permute, by default to the next. A reduce-scatter is refused but among 2, 4, 8, …
    """
    everybody = range(group)
    if kind == "reduce-scatter":
        if group & (group - 1):
            raise ValueError(
                f"Gloo halves for a reduce-scatter, so not among {group}; use 2, 4, 8, …"
            )
        bits = group.bit_length() - 1
        for bit, i in itertools.product(range(bits), everybody):
            yield i, i ^ 1 << bit, Fraction(1, 2 << bit)
        for i in everybody:
            yield i, int(f"{i:0{bits}b}"[::-1], 2) if bits else i, Fraction(1, group)
    elif kind.endswith("all-to-all"):
        for i, j in itertools.product(everybody, everybody):
            yield i, j, Fraction(1, group)
    else:
        for i, j in pairs or [(i, (i + 1) % group) for i in everybody]:
            yield i, j, ring_share(kind, group)


def leaving_bytes(
    plan: Resolved, batch_size: int, seq_len: int, hosts: Sequence[int]
) -> dict[str, dict[int, int]]:
    """Predict the bytes that leave each host in a training step, by axes: ``{"dp": {0: …, 1: …}}``.

    ``hosts`` are those of the mesh's devices, in the mesh's order: its last axis runs fastest.
    """
    sizes = plan.mesh.sizes
    if len(hosts) != plan.mesh.size:
        raise ValueError(f"{len(hosts)} hosts are named for a mesh of {plan.mesh.size} devices")
    stages = [step_traffic(plan, batch_size, seq_len, stage) for stage in range(plan.mesh.pp)]
    leaving: dict[str, dict[int, Fraction]] = {}
    for axes, kind in dict.fromkeys(key for traffic in stages for key in traffic):
        of_axes = leaving.setdefault(axes, dict.fromkeys(sorted(set(hosts)), Fraction(0)))
        for group in device_groups(sizes, axes.split(",")):
            row = stages[group[0] * plan.mesh.pp // plan.mesh.size].get((axes, kind))
            for message, times in row.messages.items() if row else ():
                for one, other, share in sends(kind, len(group), pairs_of(plan, message.arrow)):
                    if hosts[group[one]] != hosts[group[other]]:
                        of_axes[hosts[group[one]]] += share * message.num_bytes * times
    return {
        axes: {host: math.ceil(sent) for host, sent in of.items()} for axes, of in leaving.items()
    }


def pairs_of(plan: Resolved, arrow: str) -> list[tuple[int, int]]:
    """Return the pairs of ranks of a pipeline's permute, by its arrow; none for others, which are rings."""
    p, steps = plan.mesh.pp, {NEXT_STAGE: 1, PREVIOUS_STAGE: -1}
    if arrow == OPPOSITE_STAGE:
        return [(i, p - 1 - i) for i in range(p)]
    if plan.pipeline is None or arrow not in steps:
        return []
    step, send = steps[arrow], slots(lockstep(plan.pipeline)).send
    return [
        (stage, (stage + step) % p) for stage in range(p) if any(row[stage] == step for row in send)
    ]


def device_groups(sizes: Mapping[str, int], axes: Sequence[str]) -> list[list[int]]:
    """List the groups of a mesh along some of its axes, by devices' places in it: in a group the first of the
    axes is the outermost; groups come by their first device."""
    members: dict[tuple, list[tuple]] = {}
    for place, numbers in enumerate(itertools.product(*map(range, sizes.values()))):
        at = dict(zip(sizes, numbers, strict=True))
        others = tuple(i for axis, i in at.items() if axis not in axes)
        members.setdefault(others, []).append((*(at[axis] for axis in axes), place))
    return [[place for *_, place in sorted(group)] for group in members.values()]
