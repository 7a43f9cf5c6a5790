"""The exercises of lesson 00: who holds what, and who talks to whom."""

import math

from llmpar.draw import holders
from llmpar.exercises import Exercise
from llmpar.notation import parse_layout, parse_mesh

PUZZLE_MESH = "dp=2 fsdp=2 tp=2"


def held(rows: int = 32, columns: int = 16, dp: int = 2, fsdp: int = 2, tp: int = 2) -> Exercise:
    """Ask for the bytes that a device holds of a float32 array [rows, columns] laid out as `b/dp,fsdp d`."""
    elements = rows * columns
    return Exercise(
        level="core",
        solution=4 * elements // (dp * fsdp),
        wrong=[
            (
                4 * elements,
                "That is the whole array. Two axes cut b here: each device keeps one block of rows.",
            ),
            (
                4 * elements // (dp * fsdp * tp),
                "tp is not in the layout, so it cuts nothing: devices along tp hold copies.",
            ),
            (4 * elements // dp, "dp cuts b first, and fsdp cuts each of those blocks again: `b/dp,fsdp`."),
            (elements // (dp * fsdp), "That is the number of elements; a float32 has 4 bytes."),
            (elements // (dp * fsdp * tp), "Two things: tp cuts nothing here, and a float32 has 4 bytes."),
            (8 * elements, "A float32 has 4 bytes, and two axes cut b: a device keeps one block of rows."),
        ],
        hint="Bytes of the array, over the product of the axes that stand behind a slash.",
        unit="bytes",
        nudges=["Which axes does the layout name, and what do the others do?"],
        because=(
            "dp and fsdp cut b, tp is not named: a device holds the array's bytes over dp · fsdp, and along"
            " tp there are copies."
        ),
    )


def layout_of() -> Exercise:
    """Ask for the layout behind a picture that shows device numbers only."""
    sizes = parse_mesh(PUZZLE_MESH).sizes

    def who_holds_what(text: str) -> list:
        layout = parse_layout(text)
        return [
            [layout.letters, *block, devices] for block, devices in sorted(holders(layout, sizes).items())
        ]

    return Exercise(
        level="core",
        solution="b/tp d/dp",
        observe=who_holds_what,
        wrong=[
            (
                "b/dp d/tp",
                (
                    "That cuts the rows by the slow axis. Here devices 0 and 4, which differ in dp, share"
                    " their rows."
                ),
            ),
            (
                "b/tp d",
                (
                    "That leaves d whole, two shards in four copies each. In the picture each shard has two"
                    " holders."
                ),
            ),
            (
                "b/tp,dp d",
                "That cuts the rows into four. In the picture rows and columns are each cut in two.",
            ),
            ("b/tp d/fsdp", "Nearly: then devices 0 and 4 would hold the same block, and here 0 and 2 do."),
            (
                "b/tp d/dp,fsdp",
                "That leaves one device per shard. Devices 0 and 2 differ in fsdp only, and share a block.",
            ),
            (
                "b/fsdp d/dp",
                (
                    "Then devices 0 and 1, which differ in tp only, would share a block. In the picture 0 and"
                    " 2 do, which differ in fsdp."
                ),
            ),
            (
                "b/tp d/fsdp,dp",
                (
                    "Three axes cut: eight blocks with one device each. In the picture there are four blocks"
                    " of two."
                ),
            ),
            ("b d/dp", "That leaves the rows whole. In the picture both dims are cut in two."),
        ],
        hint=(
            "Device 0 holds the first block. Which devices share its rows, and by how much do their numbers"
            " differ?"
        ),
        nudges=["Which devices stand in the same row, and which in the same column?"],
        because=(
            "Rows differ by 1 in the devices' numbers, which is tp, the innermost axis; columns differ by 4,"
            " which is dp. fsdp cuts nothing: devices 0 and 2 share a block."
        ),
    )


def swap(elements: int = 1024 * 256, devices: int = 8) -> Exercise:
    """Ask which one collective turns `b/dp d` into `b d/dp`, and how many bytes a device sends for it."""
    local = 4 * elements // devices
    return Exercise(
        level="stretch",
        solution={"collective": "all-to-all", "bytes_sent": local * (devices - 1) // devices},
        wrong=[
            (
                {"collective": "all-gather", "bytes_sent": local * (devices - 1)},
                (
                    "Gathering all and keeping a slice ends in the right layout, and sends eight times as"
                    " much on 8 devices."
                ),
            ),
            (
                {"collective": "all-to-all", "bytes_sent": local},
                (
                    "The right collective, but one of the pieces that a device cuts its shard into is for"
                    " itself and stays."
                ),
            ),
            (
                {"collective": "all-to-all", "bytes_sent": local * (devices - 1)},
                (
                    "The right collective; what a device sends comes out of its own shard, not out of the"
                    " whole array."
                ),
            ),
            (
                {"collective": "reduce-scatter", "bytes_sent": local * (devices - 1) // devices},
                (
                    "The right number, but a reduce-scatter adds, and there is no unfinished sum (no +) in"
                    " `b/dp d`."
                ),
            ),
            (
                {"collective": "all-to-all", "bytes_sent": 2 * local},
                (
                    "bytes_sent: no more can leave a device than its own shard, an eighth of the array on 8"
                    " devices."
                ),
            ),
            (
                {"collective": "all-gather", "bytes_sent": local * (devices - 1) // devices},
                "collective: an all-gather leaves no cut behind. Here one cut goes and another one comes.",
            ),
            (
                {"collective": "all-reduce", "bytes_sent": 2 * local * (devices - 1)},
                "collective: an all-reduce adds, and there is nothing to add: no + stands in `b/dp d`.",
            ),
        ],
        hint=(
            "One axis leaves b and appears on d: look for that row in the table of arrows (linked above, in"
            " README.md)."
        ),
        unit="bytes",
        nudges=["In which dim is the cut before, and in which after? Is there a sum to finish?"],
        because=(
            "The cut moves from one dim to another: an all-to-all. A device cuts its own shard into as many"
            " pieces as there are devices, and keeps one."
        ),
    )


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
        return solution(
            {a: n for a, n in sizes.items() if a != axis} | {axis: sizes[axis]}, axis, devices_per_host
        )

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
    return Exercise(
        level="expert",
        solution=solution,
        observe=lambda function: [function(*question) for question in asked],
        wrong=[
            (
                innermost,
                (
                    "You take the axis to be the innermost: partners are 1 apart only if no axis stands"
                    " behind it."
                ),
            ),
            (
                backwards,
                (
                    "You read the sizes from the inside; the first is the outermost, with partners farthest"
                    " apart."
                ),
            ),
            (devices_not_groups, "You count devices; count the groups that they form."),
            (
                by_size,
                (
                    "A group that would fit on a host need not lie on one: it may be spread out, or cross a"
                    " border."
                ),
            ),
            (
                lambda sizes, axis, devices_per_host: len(sizes),
                (
                    "That is the number of axes. Count the groups of one axis that reach over more than one"
                    " host."
                ),
            ),
            (
                lambda sizes, axis, devices_per_host: math.prod(sizes.values()) // sizes[axis],
                (
                    "That is the number of all groups of the axis. Count those whose devices are not all on"
                    " one host."
                ),
            ),
        ],
        hint=(
            "Partners are as far apart as the product of the sizes behind their axis; hosts hold consecutive"
            " devices."
        ),
        nudges=["How far apart are two partners of an axis, counted in devices?"],
        because=(
            "Partners are as far apart as the product of the sizes behind their axis. A group is on one host"
            " if all of its devices have the same number, divided by the devices of a host."
        ),
    )
