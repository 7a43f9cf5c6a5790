"""What an arrow between two meshes costs: the bytes on each device's link, and the time of its rounds."""

from collections import Counter
from typing import Any

from llmpar.plan.two_meshes import TwoMeshes
from llmpar.predict.hardware import Chip


def link_loads(plan: TwoMeshes) -> dict[tuple[int, str], int]:
    """Return the bytes by device and direction, ``sends`` or ``receives``: the busiest link first."""
    loads = Counter[tuple[int, str]]()
    for (sender, receiver), sent in plan.matrix.items():
        loads[sender, "sends"] += sent
        loads[receiver, "receives"] += sent
    return dict(loads.most_common())


def rounds_seconds(plan: TwoMeshes, chip: Chip) -> list[float]:
    """Return the seconds of each round: a start, and its slowest message, over the links of a node or between
    nodes (the plan's ``node_size``), at the rates that large messages reach. On a torus messages may share a
    link, which is not counted."""
    device = chip.reaching().per_device()
    near, far = device.reached_link_bytes_per_s, device.dcn_bytes_per_s
    seconds = lambda pair, sent: sent / (far if plan.is_far(pair) else near)
    start_s = 2 * chip.rates.start_s  # of a group of two
    return [start_s + max(seconds(*message) for message in one.items()) for one in plan.rounds]


def in_words(plan: TwoMeshes) -> str:
    """Say what is sent in all, in how many rounds, from where to where, and by which device most."""
    devices = (str([*side.node_of]) for side in plan.sides)
    sends = [(n, device) for (device, end), n in link_loads(plan).items() if end == "sends"]
    most, device = max(sends, default=(0, "none"))
    return (
        f"{plan}: {plan.bound:,} B from devices {' to '.join(devices)}, no less is possible, in"
        f" {len(plan.rounds)} rounds; device {device} sends most, {most:,} B"
    )


def as_row(plan: TwoMeshes, source: str) -> dict[str, Any]:
    """Write a plan as a row of `llmpar.look`, with the bytes on the busiest device's link."""
    most = max(link_loads(plan).values(), default=0)
    row: dict[str, Any] = dict.fromkeys(("per_turn", "link", "dtype", "shape", "direction"), "")
    row |= {"source": source, "arrow": str(plan), "collective": "transfer", "axes": ()}
    return row | {"count": 1, "bytes_sent": most, "conditional": False}
