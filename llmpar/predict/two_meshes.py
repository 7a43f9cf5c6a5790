"""What an arrow between two meshes costs: the bytes on each device's link, and the time of its rounds."""

from collections import Counter

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
