"""Exercises of lesson 00 that are computed: what each device holds, and which devices exchange."""

import math

from llmpar.draw import holders
from llmpar.lessons import Exercise
from llmpar.plan.layout import parse_layout
from llmpar.plan.mesh_shape import parse_mesh

PUZZLE_MESH = "dp=2 fsdp=2 tp=2"


def layout_of() -> Exercise:
    """Ask for the layout behind a picture that shows device numbers only."""
    sizes = parse_mesh(PUZZLE_MESH).sizes

    def who_holds_what(text: str) -> list:
        layout = parse_layout(text)
        blocks = sorted(holders(layout, sizes).items())
        return [[layout.letters, layout.sums, *block, devices] for block, devices in blocks]

    return Exercise("core", "b/tp d/dp", observe=who_holds_what)


def groups_across_hosts() -> Exercise:
    """Ask for a function that counts the groups of an axis whose devices are not all on one host."""

    def solution(sizes, axis, devices_per_host):
        names = list(sizes)
        stride = math.prod(sizes[a] for a in names[names.index(axis) + 1 :])
        total = math.prod(sizes.values())
        firsts = [i for i in range(total) if i // stride % sizes[axis] == 0]
        groups = [[i + stride * k for k in range(sizes[axis])] for i in firsts]
        hosts = [{device // devices_per_host for device in group} for group in groups]
        return sum(len(those) > 1 for those in hosts)

    def innermost(sizes, axis, per):
        others = {a: n for a, n in sizes.items() if a != axis}
        return solution(others | {axis: sizes[axis]}, axis, per)

    groups = lambda sizes, axis: math.prod(sizes.values()) // sizes[axis]
    cases = [
        (dict(dp=2, tp=4), "tp", 4),
        (dict(tp=4, dp=2), "tp", 4),
        (dict(dp=2, fsdp=2, tp=2), "dp", 4),
        (dict(dp=2, fsdp=4, tp=2), "fsdp", 4),
        (dict(dp=4, tp=4), "tp", 2),
        (dict(dp=3, tp=4), "tp", 6),
    ]
    wrong = dict(
        innermost=innermost,
        backwards=lambda sizes, axis, per: solution(dict(reversed(sizes.items())), axis, per),
        devices_not_groups=lambda sizes, axis, per: solution(sizes, axis, per) * sizes[axis],
        by_size=lambda sizes, axis, per: groups(sizes, axis) if sizes[axis] > per else 0,
        axes=lambda sizes, axis, per: len(sizes),
        all_groups=lambda sizes, axis, per: groups(sizes, axis),
    )
    return Exercise("expert", solution, wrong, lambda function: [function(*case) for case in cases])
