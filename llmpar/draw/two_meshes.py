"""Draw an arrow between two meshes: who sends how much to whom, and in which round."""

from llmpar.draw.scene import (
    SMALL,
    Rect,
    Scene,
    Text,
    boxed,
    compose,
    legend,
    size_text,
    small_text,
    text_width,
)
from llmpar.plan.two_meshes import TwoMeshes
from llmpar.predict.two_meshes import link_loads


def traffic(plan: TwoMeshes) -> Scene:
    """Draw what each device of the first mesh sends to each of the second; below, round by round, from which
    device each of them receives. Meshes of up to 32 devices are drawn."""
    senders, receivers = (sorted(side.node_of) for side in plan.sides)
    if max(len(senders), len(receivers)) > 32:
        raise ValueError(
            f"meshes of {len(senders)} and {len(receivers)} devices cannot be drawn one by one, which needs"
            " up to 32; read plan.matrix and plan.rounds"
        )
    loads, role = link_loads(plan), lambda pair: "network" if plan.is_far(pair) else "links"
    load = lambda device, verb: size_text(loads.get((device, verb), 0))
    lines = list[tuple[str, dict[int, tuple[str, str]], str]]()
    for i in senders:
        pairs = [(i, j) for j in receivers if (i, j) in plan.matrix]
        cells = {pair[1]: (size_text(plan.matrix[pair]), role(pair)) for pair in pairs}
        lines.append((f"from {i}", cells, f"sends {load(i, 'sends')}"))
    got = {j: (load(j, "receives"), "") for j in receivers}
    lines.append(("receives", got, f"in all {size_text(plan.bound)}"))
    for number, one in enumerate(plan.rounds, 1):
        cells = {j: (f"{i}", role((i, j))) for i, j in one}
        lines.append((f"round {number}", cells, f"up to {size_text(max(one.values()))}"))
    wide = min(text_width("000 MiB", SMALL) + 12, 560 / len(receivers))
    left, words = text_width("round 00") + 8, list[str]()
    items: list = [Text(left - 8, -12, "to", anchor="end")]
    items += [small_text(left + wide * (k + 0.5), -12, f"{j}") for k, j in enumerate(receivers)]
    for k, (name, cells, end) in enumerate(lines):
        y = 28 * k + 10 * (k > len(senders))
        items.append(Text(left - 8, y + 12, name, anchor="end"))
        items.append(small_text(left + wide * len(receivers) + 8, y + 12, end, "start"))
        for at, j in enumerate(receivers):
            text, fill = cells.get(j, ("", "cell"))
            box = Rect(left + wide * at, y, wide - 3, 24, fill, "edge" if fill else "")
            items += boxed(box, text)
        row = ", ".join(
            f"{text} {'to' if fill else 'for'} {j}" for j, (text, fill) in cells.items()
        )
        words.append(f"{name}: {row or 'nothing'}; {end}")
    device, verb = next(iter(loads), (senders[0], "sends"))
    note = (
        "Every device gets what it lacks, and no more. A cell of a round names the sender. The busiest link:"
        f" device {device} {verb} {load(device, verb)}."
    )
    key = legend([("links", "over links of a node"), ("network", "between nodes")])
    return compose(str(plan), [items, key], "\n".join([*words, note]), [note])
