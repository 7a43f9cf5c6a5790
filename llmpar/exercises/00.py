"""The exercises of lesson 00: who holds what, and who talks to whom."""

import math

from llmpar.draw import holders
from llmpar.exercises import Exercise
from llmpar.notation import parse_layout, parse_mesh

PUZZLE_MESH = "dp=2 fsdp=2 tp=2"


def held(rows: int = 32, columns: int = 16, dp: int = 2, fsdp: int = 2, tp: int = 2) -> Exercise:
    """Ask for the bytes that a device holds of a float32 array [rows, columns] laid out as `b/dp,fsdp d`."""
    elements = rows * columns
    wrong = dict(
        whole=4 * elements,
        tp_too=4 * elements // (dp * fsdp * tp),
        dp_only=4 * elements // dp,
        elements=elements // (dp * fsdp),
        elements_tp_too=elements // (dp * fsdp * tp),
        eight_bytes=8 * elements,
    )
    return Exercise("core", 4 * elements // (dp * fsdp), wrong, unit="bytes")


def layout_of() -> Exercise:
    """Ask for the layout behind a picture that shows device numbers only."""
    sizes = parse_mesh(PUZZLE_MESH).sizes

    def who_holds_what(text: str) -> list:
        layout = parse_layout(text)
        found = sorted(holders(layout, sizes).items())
        return [[layout.letters, *block, devices] for block, devices in found]

    return Exercise("core", "b/tp d/dp", observe=who_holds_what)


def swap(elements: int = 1024 * 256, devices: int = 8) -> Exercise:
    """Ask which one collective turns `b/dp d` into `b d/dp`, and how many bytes a device sends for it."""
    local = 4 * elements // devices
    wrong = dict(
        gather_first={"collective": "all-gather", "bytes_sent": local * (devices - 1)},
        own_piece_too={"collective": "all-to-all", "bytes_sent": local},
        of_the_whole={"collective": "all-to-all", "bytes_sent": local * (devices - 1)},
        reduce_scatter={"collective": "reduce-scatter", "bytes_sent": local * (devices - 1) // devices},
        twice_the_shard={"collective": "all-to-all", "bytes_sent": 2 * local},
        gather_leaves_none={"collective": "all-gather", "bytes_sent": local * (devices - 1) // devices},
        nothing_to_add={"collective": "all-reduce", "bytes_sent": 2 * local * (devices - 1)},
    )
    right = {"collective": "all-to-all", "bytes_sent": local * (devices - 1) // devices}
    return Exercise("stretch", right, wrong, unit="bytes")


def groups_across_hosts() -> Exercise:
    """Ask for a function that counts the groups of an axis whose devices are not all on one host."""

    def solution(sizes, axis, devices_per_host):
        names = list(sizes)
        stride = math.prod(sizes[a] for a in names[names.index(axis) + 1 :])
        total = math.prod(sizes.values())
        groups = [
            [i + stride * k for k in range(sizes[axis])]
            for i in range(total)
            if i // stride % sizes[axis] == 0
        ]
        hosts = [{device // devices_per_host for device in group} for group in groups]
        return sum(len(those) > 1 for those in hosts)

    def innermost(sizes, axis, devices_per_host):
        others = {a: n for a, n in sizes.items() if a != axis}
        return solution(others | {axis: sizes[axis]}, axis, devices_per_host)

    def backwards(sizes, axis, devices_per_host):
        return solution(dict(reversed(sizes.items())), axis, devices_per_host)

    def devices_not_groups(sizes, axis, devices_per_host):
        return solution(sizes, axis, devices_per_host) * sizes[axis]

    def by_size(sizes, axis, devices_per_host):
        return math.prod(sizes.values()) // sizes[axis] if sizes[axis] > devices_per_host else 0

    asked = [
        ({"dp": 2, "tp": 4}, "tp", 4),
        ({"tp": 4, "dp": 2}, "tp", 4),
        ({"dp": 2, "fsdp": 2, "tp": 2}, "dp", 4),
        ({"dp": 2, "fsdp": 4, "tp": 2}, "fsdp", 4),
        ({"dp": 4, "tp": 4}, "tp", 2),
        ({"dp": 3, "tp": 4}, "tp", 6),
    ]
    wrong = dict(
        innermost=innermost,
        backwards=backwards,
        devices_not_groups=devices_not_groups,
        by_size=by_size,
        axes=lambda sizes, axis, devices_per_host: len(sizes),
        all_groups=lambda sizes, axis, devices_per_host: math.prod(sizes.values()) // sizes[axis],
    )
    return Exercise("expert", solution, wrong, lambda function: [function(*case) for case in asked])
