"""Draw an arrow between two meshes: who sends how much to whom, and in which round."""

from llmpar.draw.hosts import table
from llmpar.draw.scene import Scene, size_text
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
    loads, nothing = link_loads(plan), ("·", "")
    load = lambda device, verb: (size_text(loads.get((device, verb), 0)), "")
    role = lambda pair: "network" if plan.is_far(pair) else "links"
    cells = {
        pair: (size_text(sent) + "*" * plan.is_far(pair), role(pair))
        for pair, sent in plan.matrix.items()
    }
    rows = [
        (f"from {i}", [*(cells.get((i, j), nothing) for j in receivers), load(i, "sends")])
        for i in senders
    ]
    total = size_text(plan.bound), ""
    rows.append(("receives", [*(load(j, "receives") for j in receivers), total]))
    rows.append(("", []))
    for number, one in enumerate(plan.rounds, 1):
        comes = {j: (f"{i}" + "*" * plan.is_far((i, j)), role((i, j))) for i, j in one}
        together = size_text(sum(one.values())), ""
        rows.append((f"round {number}", [*(comes.get(j, nothing) for j in receivers), together]))
    device, verb = next(iter(loads), (senders[0], "sends"))
    notes = [
        "Each device gets what it lacks, and no more. A cell of a round names the sender."
        + " *: between nodes." * any(map(plan.is_far, plan.matrix))
        + " The busiest link:"
        f" device {device} {verb} {load(device, verb)[0]}."
    ]
    return table(rows, [*(f"to {j}" for j in receivers), "in all"], str(plan), notes)
