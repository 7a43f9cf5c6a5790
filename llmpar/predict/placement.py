"""Where to put copies of hot experts, and what their tokens send in one hop or two.

A rank that has a popular expert works while others wait. So popular experts get copies, among which their
tokens are dealt evenly, and copies are packed so that devices have equally many and nearly equal loads: the
problem that DeepSeek's EPLB solves (DeepSeek-V3 2024, section 3.4.1; github.com/deepseek-ai/EPLB).

A training step does not run such a placement. To fill s slots on each of n ranks is a reduce-scatter of n s
experts, of which a device sends s (n-1), where c hot experts on all ranks (`moe.copy_hot`, what runs) are an
all-reduce, of which it sends 2 c (n-1)/n: n/2 times fewer for c = s. The same again for gradients. For equal
bytes slots balance better, but the first few copies are cheapest on all ranks (docs/plan.md has both).
"""

from collections.abc import Sequence

from llmpar.predict.formulas import visited_share


def copies_of(loads: Sequence[float], slots: int) -> list[int]:
    """Return how many copies each expert gets of so many ``slots``, at least one: each further one goes to
    the expert whose copies have most load. No other numbers have a smaller largest load of a copy."""
    if slots < len(loads):
        raise ValueError(
            f"{len(loads)} experts do not fit into {slots} slots; use one each or more"
        )
    counts = [1] * len(loads)
    for _ in range(slots - len(loads)):
        counts[max(range(len(loads)), key=lambda e: loads[e] / counts[e])] += 1
    return counts


def place(loads: Sequence[float], devices: int, slots: int, swaps: int = 1000) -> list[list[int]]:
    """Return the experts that each device has, ``slots`` of them: copies in the order of their loads, each
    where there is room and least load (a greedy placement); and then, while it helps and up to so many times,
    the swap of a copy of the fullest device with another's that leaves the two with the least load."""
    counts = copies_of(loads, devices * slots)
    share = [load / count for load, count in zip(loads, counts, strict=True)]
    load_of = lambda own: sum(share[e] for e in own)
    placed: list[list[int]] = [[] for _ in range(devices)]
    copies = [e for e, count in enumerate(counts) for _ in range(count)]
    for e in sorted(copies, key=lambda e: -share[e]):
        min((own for own in placed if len(own) < slots), key=load_of).append(e)
    for _ in range(swaps):
        fullest = max(placed, key=load_of)
        top = load_of(fullest)
        rooms = [(own, load_of(own)) for own in placed if own is not fullest]
        moves = [
            (max(top - share[e] + share[f], load - share[f] + share[e]), i, j, own)
            for own, load in rooms
            for i, e in enumerate(fullest)
            for j, f in enumerate(own)
            if share[e] > share[f]
        ]
        best = min(moves, key=lambda move: move[0], default=None)
        if best is None or best[0] >= top * (1 - 1e-12):
            break
        _, i, j, own = best
        fullest[i], own[j] = own[j], fullest[i]
    return placed


def least_load(loads: Sequence[float], devices: int, slots: int) -> float:
    """Return a load that some device must have: the mean, or the least possible largest load of a copy."""
    counts = copies_of(loads, devices * slots)
    return max(sum(loads) / devices, *(n / count for n, count in zip(loads, counts, strict=True)))


def copies_sent(experts: int, top_k: int, nodes: int, devices: int, limit: int) -> dict[str, float]:
    """Return how many copies of a token leave its device, expected for experts that are equally likely among
    those of ``limit`` nodes of ``devices`` each: between nodes and inside them, in one
    hop, to each device that has one of its experts; in two, to each node, and from there to its devices."""
    among, ranks = experts * limit // nodes, limit * devices
    visited = ranks * visited_share(among, top_k, ranks)
    return {
        "one hop, between nodes": visited * (1 - 1 / nodes),
        "one hop, inside": visited / nodes * (1 - 1 / devices),
        "two hops, between nodes": limit * visited_share(among, top_k, limit) * (1 - 1 / nodes),
        "two hops, inside": visited * (1 - 1 / devices),
    }
