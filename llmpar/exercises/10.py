"""Exercises of lesson 10: shares, links, differences with and without a bug, and the least traffic that
fits."""

import dataclasses

from llmpar.config import preset
from llmpar.exercises import Exercise
from llmpar.notation import divisors, parse_mesh
from llmpar.plan import Plan
from llmpar.predict import memory, traffic

LLAMA = dataclasses.replace(preset("tiny"), num_layers=2)
ROWS, SEQ, DEVICES, MOST_BYTES = 16, 32, 16, 240_000


def share() -> Exercise:
    """Ask which share of a weight `l/pp d/fsdp m/tp` a device of pp=2 dp=2 fsdp=2 tp=2 holds."""
    return Exercise(
        level="core",
        solution=1 / 8,
        wrong=[
            (1 / 3, "Sizes of axes multiply: three halvings are an eighth, not a third."),
            (1 / 16, "dp is not in the layout, so it cuts nothing: devices along dp hold copies."),
            (1 / 4, "Three axes stand behind a slash: pp, fsdp and tp. Each halves."),
            (1 / 2, "That is fsdp alone. pp cuts the layers and tp the hidden width besides."),
            (1 / 6, "Sizes of axes multiply: 2 · 2 · 2 and not 2 + 2 + 2."),
            (8, "That is how many devices share it. A share is a fraction: 1 / 8."),
            (16, "That is the number of devices. Not all axes cut this weight, and a share is a fraction."),
        ],
        nudges=["Which axes does the layout name, and what do the others do?"],
        because=(
            "pp cuts l, fsdp cuts d and tp cuts m, each in two; dp cuts nothing, so two devices hold each"
            " block."
        ),
        hint="Multiply the sizes of the axes behind the slashes; the share is one over that.",
        unit="a fraction of 1",
    )


def links() -> Exercise:
    """Ask which link the groups of each axis use: pp=2 dp=8 tp=4 on nodes of four."""
    right = {"pp": "network", "dp": "network", "tp": "NVLink"}
    return Exercise(
        level="core",
        solution=right,
        wrong=[
            (
                right | {"pp": "NVLink"},
                "Partners along pp are 32 devices apart: half of the machine lies between them.",
            ),
            (
                right | {"dp": "NVLink"},
                "Partners along dp are four apart, and a node has four devices: they are in other nodes.",
            ),
            (
                dict.fromkeys(right, "network"),
                "tp stands last, so its four neighbours are devices 0 to 3: one node.",
            ),
            (
                dict.fromkeys(right, "NVLink"),
                "A node has four GPUs, and tp=4 fills it. Partners along dp are four apart, in another node.",
            ),
            (
                {"pp": "NVLink", "dp": "network", "tp": "network"},
                "The order is from slow to fast links: pp stands first, and its partners are farthest apart.",
            ),
        ],
        nudges=["What are the numbers of the devices in one group of each axis?"],
        because=(
            "Partners along tp are 1 apart, within a node of 4; along dp 4 apart, along pp 32, in other"
            " nodes."
        ),
        hint=(
            "Partners along an axis are as far apart as the product of the sizes behind it; four make a node."
        ),
    )


def causes() -> Exercise:
    """Ask for the cause of each difference in the lesson's five runs."""
    right = {
        "A": "summed twice",
        "B": "norm of one shard",
        "C": "rounding",
        "D": "mean of means",
        "E": "not summed",
    }
    return Exercise(
        level="stretch",
        solution=right,
        wrong=[
            (
                right | {"A": "rounding", "C": "summed twice"},
                "A difference of 1 is no rounding: the gradient is twice what it should be.",
            ),
            (
                right | {"A": "not summed", "E": "summed twice"},
                (
                    "A's gradient is off by 1 and its norm too: it is twice as long. What stays local misses"
                    " a part."
                ),
            ),
            (
                right | {"C": "mean of means", "D": "rounding"},
                (
                    "A loss that is off by per cents is no rounding in float32; one that is off by 1e-7 is"
                    " nothing else."
                ),
            ),
            (
                right | {"B": "not summed", "E": "norm of one shard"},
                (
                    "Where only the norm is off, the gradient itself is right: look for the run whose"
                    " gradient agrees."
                ),
            ),
            (
                right | {"D": "not summed", "E": "mean of means"},
                "Gradients that are not summed leave the loss right. Dividing by one's own targets does not.",
            ),
            (
                right | {"A": "not summed"},
                (
                    "A: its norm is off by exactly 1, since it is doubled. A part that is missing does not do"
                    " that."
                ),
            ),
            (
                right | {"A": "mean of means"},
                "A: its loss is right. Ranks that divide by their own targets get another loss.",
            ),
            (right | {"A": "norm of one shard"}, "A: its gradient is off as well, not the norm alone."),
            (right | {"B": "rounding"}, "B: its norm is off by a fifth. Rounding in float32 is near 1e-7."),
            (
                right | {"B": "not summed"},
                "B: its gradient agrees with one device, so it was summed. The norm alone is off.",
            ),
            (
                right | {"B": "summed twice"},
                "B: its gradient agrees with one device. Added twice, it would be doubled.",
            ),
            (
                right | {"C": "norm of one shard"},
                "C: its norm agrees. Half of the squares would make it smaller.",
            ),
            (right | {"C": "not summed"}, "C: its gradient agrees, so nothing is missing in it."),
            (
                right | {"D": "rounding"},
                "D: its loss is off by more than a third. Rounding in float32 is near 1e-7.",
            ),
            (
                right | {"D": "summed twice"},
                "D: its loss is off, and a second sum of gradients leaves the loss alone.",
            ),
            (
                right | {"E": "summed twice"},
                "E: a gradient that is added twice is off by exactly 1, and this one is not.",
            ),
            (
                right | {"E": "norm of one shard"},
                "E: its gradient is off as well. A norm of one shard leaves the gradient right.",
            ),
            (
                right | {"E": "rounding"},
                "E: its gradient is off by more than a half. Rounding in float32 is near 1e-7.",
            ),
        ],
        nudges=["Which run differs in all three columns, which in two, which in one, and which in none?"],
        because=(
            "A loss is off by a wrong divisor; a gradient by a missing or second sum; a norm alone by its own"
            " sum."
        ),
        hint=(
            "Ask first whether the loss is off, then whether the gradient is, then whether the norm alone is."
        ),
    )


def price(text: str) -> tuple[int, int]:
    """Bytes of arguments that a device holds under a mesh, and bytes that it sends per step."""
    plan = Plan(text)
    plan.check(LLAMA, ROWS, SEQ)
    plan = plan.resolve(LLAMA)
    held = memory.argument_bytes(plan, ROWS, SEQ)
    return sum(held.values()), traffic.step_traffic(plan, ROWS, SEQ).total_bytes


def cheapest() -> Exercise:
    """Ask for the mesh of dp, fsdp and tp over 16 devices that fits and sends least."""
    meshes = [
        f"dp={dp} fsdp={fsdp} tp={DEVICES // dp // fsdp}"
        for dp in divisors(DEVICES)
        for fsdp in divisors(DEVICES // dp)
        if DEVICES // dp // fsdp <= 8  # as many as KV heads
    ]
    priced = {text: price(text) for text in meshes}
    fits = {text: sent for text, (held, sent) in priced.items() if held <= MOST_BYTES}
    best = min(fits, key=lambda text: fits[text])

    def observe(text):
        mesh = parse_mesh(text)
        if mesh.size != DEVICES:
            return f"a mesh of {mesh.size} devices"
        held, sent = price(text)
        return f"{'fits' if held <= MOST_BYTES else 'does not fit'}, {held:,} B held, {sent:,} B sent"

    most_cut = min(fits, key=lambda text: priced[text][0])
    return Exercise(
        level="expert",
        solution=best,
        observe=observe,
        wrong=[
            ("dp=8 fsdp=2", "It does not fit: only fsdp and tp cut state, and here they cut it in two."),
            (
                "dp=2 fsdp=8",
                "It fits without tp, and every device gathers whole weights. Let tp cut them too.",
            ),
            ("dp=16", "dp cuts no state: every device would hold all of it, more than 240,000 B."),
            (
                most_cut,
                "It fits with the most room of all. Room is not asked for: send less, up to the limit.",
            ),
            (
                "fsdp=8 tp=2",
                (
                    "It fits, and gathers every weight twice among 8. Copies along dp would make these groups"
                    " smaller."
                ),
            ),
            (
                "dp=4 fsdp=2 tp=2",
                (
                    "It sends less than any that fits, but cuts state by four only: more than 240,000 B are"
                    " held."
                ),
            ),
            ("dp=4 tp=4", "It does not fit: tp alone cuts state here, by four. Eight are needed."),
            (
                "fsdp=2 tp=8",
                "It fits, but sums of activations among eight are most of what it sends. Use less tp.",
            ),
            (
                "dp=2 tp=8",
                "It fits, but nearly all that it sends are activations, summed over tp. Let fsdp cut a part.",
            ),
            (
                "fsdp=4 tp=4",
                "It fits with room to spare. Half of the tp, and copies along dp, would send less.",
            ),
            (
                "dp=2 fsdp=2 tp=4",
                "Nearly: tp sends activations, which costs more here than gathers. Give half of it to fsdp.",
            ),
        ],
        nudges=[
            "Which axes cut state, and how many devices must share it to fit?",
            (
                "dp sums gradients, fsdp gathers weights and tp sums activations. Which of these is largest"
                " here?"
            ),
            "Eight meshes fit. Two of the three axes cut state; neither is best alone.",
        ],
        because=(
            "State must be cut by eight at least. A tp of 2 halves what fsdp gathers, a larger one sends more"
            " activations, and copies along dp make the groups of fsdp smaller."
        ),
        hint=lambda seen: (
            f"Yours: {seen}. The best sends {fits[best]:,} B; {len(fits)} of {len(priced)} meshes fit."
        ),
    )
