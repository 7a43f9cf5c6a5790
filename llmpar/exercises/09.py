"""Exercises of lesson 09: what a dispatch sends, how much room experts need, adding rows up, and nodes that
stay closed."""

import math

import numpy as np

from llmpar.exercises import Exercise

LOADS = (260, 190, 150, 120, 100, 84, 70, 50)
"""Rows that chose each of eight experts, of 512 tokens with two each."""


def dispatch_bytes(ranks: int = 8, tokens: int = 32, width: int = 16, chosen: int = 2) -> Exercise:
    """Ask what a rank sends in the toy's dispatch, without padding, if all experts are equally likely:
    a·tokens·d, (N-1)/N."""
    rows = chosen * tokens * width * 4
    return Exercise(
        level="core",
        solution=rows * (ranks - 1) / ranks,
        wrong=[
            (rows, "That counts the rows whose expert is at home too: of N ranks, one in N stays."),
            (rows / chosen * (ranks - 1) / ranks, "Each token travels a times, once to each of its experts."),
            (2 * rows * (ranks - 1) / ranks, "That is there and back. The way there was asked for."),
            (rows / 4 * (ranks - 1) / ranks, "That is the number of elements; a float32 has 4 bytes."),
            (rows / 2 / ranks, "That is what one of its neighbours gets. All of them were asked for."),
            (
                rows / chosen,
                "Each token travels `a` times, once to each of its experts; and of N ranks one is home.",
            ),
            (rows / ranks, "That is what stays at home. What travels is the rest."),
        ],
        unit="bytes",
        hint=(
            "tokens × a rows of d float32; the share of them whose expert is on another of N ranks is"
            " (N-1)/N."
        ),
        nudges=["How many rows leave a token, and which of them stay on their rank?"],
        because=(
            "32 tokens with 2 choices are 64 rows of 16 float32; of N ranks one is home, so (N-1)/N of the"
            " rows travel."
        ),
    )


def capacity() -> Exercise:
    """Ask for the smallest capacity in rows at which at most 1 % of all choices are dropped."""
    allowed = sum(LOADS) // 100
    dropped = lambda rows: sum(max(0, n - rows) for n in LOADS)
    right = next(c for c in range(max(LOADS) + 1) if dropped(c) <= allowed)

    def counted(rows):
        """What a capacity drops, and which way to go."""
        which = "a smaller one is enough" if rows > right else "a larger one is needed"
        return (
            f"{rows:g} rows drop {dropped(rows):g} of {sum(LOADS):,} choices, and {allowed} may go: {which}."
        )

    return Exercise(
        level="core",
        solution=right,
        wrong=[
            (
                sum(LOADS) // len(LOADS),
                "That is the even share, a capacity factor of 1: here every fourth choice would be dropped.",
            ),
            (max(LOADS), "That drops nobody. One choice in a hundred may go."),
            (
                math.ceil(0.99 * max(LOADS)),
                "One per cent of all 1,024 choices, not of those for the busiest expert.",
            ),
            (right / 128, "That is the capacity factor. The question is the number of rows."),
        ],
        hint=counted,
        tolerance=1e-9,
        nudges=[
            "How many choices may be dropped, of 1,024?",
            "Count what a capacity drops: for each expert, the rows beyond it. Begin at 250.",
        ],
        because=(
            "At most 10 of 1,024 choices may go. Only the busiest expert is above 190 rows, so its 260 may"
            " lose 10."
        ),
    )


def combine() -> Exercise:
    """Ask for the last step of a layer of experts: each token adds its rows up, weighed; dropped ones are
    missing."""

    def solution(rows, slot, weights):
        padded = np.concatenate([rows, np.zeros_like(rows[:1])])
        return (padded[slot] * weights[..., None]).sum(1)

    def unweighed(rows, slot, weights):
        return solution(rows, slot, np.ones_like(weights))

    def mean(rows, slot, weights):
        return solution(rows, slot, weights) / slot.shape[1]

    def clamped(rows, slot, weights):
        return (rows[np.minimum(slot, len(rows) - 1)] * weights[..., None]).sum(1)

    def renormalised(rows, slot, weights):
        kept = weights * (slot < len(rows))
        return solution(rows, slot, kept / np.maximum(kept.sum(1, keepdims=True), 1e-9))

    def cases(function):
        draw, out = np.random.default_rng(0), []
        for slots, tokens, k in ((6, 4, 2), (9, 3, 3)):
            slot = draw.permutation(slots + tokens)[: tokens * k].reshape(tokens, k).clip(0, slots)
            rows, weights = draw.standard_normal((slots, 5)), draw.random((tokens, k))
            try:
                out.append(np.asarray(function(rows, slot, weights), float).tolist())
            except IndexError:
                return ["read past the end"]
        return out

    return Exercise(
        level="stretch",
        solution=solution,
        observe=cases,
        wrong=[
            (unweighed, "The rows must be weighed: the router's weights are how it gets its gradient."),
            (mean, "The weights say already how much of each; do not divide by their number as well."),
            (clamped, "A slot past the end means: dropped. You read the last row instead of zero."),
            (
                renormalised,
                (
                    "The weights of what is left are not stretched: a dropped choice leaves the residual"
                    " stream as it was."
                ),
            ),
            (
                lambda rows, slot, weights: (rows[slot % len(rows)] * weights[..., None]).sum(1),
                "A slot past the end means: dropped. With % you read row 0 instead of zero.",
            ),
            (
                lambda rows, slot, weights: (rows[np.minimum(slot, len(rows) - 1)] * weights[..., None]).mean(
                    1
                ),
                (
                    "Two things: a dropped row is zero and not the last one, and the weights say already how"
                    " much of each."
                ),
            ),
            (
                lambda rows, slot, weights: (rows[slot] * weights[..., None]).sum(1),
                "A slot may be len(rows), one past the end: that choice was dropped, and adds nothing.",
            ),
        ],
        hint=(
            "Append a row of zeros: then a slot past the end may be read. Index with slot, weigh, and sum"
            " over a token's choices."
        ),
        nudges=["What does a slot past the end mean for the sum?"],
        because=(
            "A dropped choice adds zero, so its weight is missing: the residual stream carries that part of"
            " the token alone."
        ),
    )


def nodes() -> Exercise:
    """Ask on how many of 8 nodes DeepSeek-V3's 8 of 256 experts lie on average, with all nodes open and with
    4."""

    def mean(experts, n):
        return n * (1 - math.comb(experts - experts // n, 8) / math.comb(experts, 8))

    right = {"free": mean(256, 8), "limited": mean(128, 4)}
    return Exercise(
        level="expert",
        solution=right,
        wrong=[
            (right | {"free": 8}, "free: 8 experts are not 8 nodes. Two of them often lie on the same node."),
            (right | {"limited": 4}, "limited: at most 4. All 8 experts may lie on fewer."),
            (
                right | {"limited": right["free"] / 2},
                "limited: the same 8 experts on half of the nodes: they are denser there.",
            ),
            (
                right | {"free": 8 * (1 - (7 / 8) ** 8)},
                (
                    "free: nearly. That may choose an expert twice; the 8 are different ones, so they spread"
                    " a little more."
                ),
            ),
            (
                {"free": 100 * right["free"] / 8, "limited": 100 * right["limited"] / 4},
                "These are per cent of the nodes. How many nodes are that?",
            ),
        ],
        hint=(
            "A node is missed if all 8 experts lie elsewhere: C(256 - 32, 8) of the C(256, 8) choices. See"
            " `formulas.expert_nodes`."
        ),
        tolerance=0.004,
        nudges=[
            "On how many nodes would one expert lie? Then: how likely is it that a node has none of the 8?"
        ],
        because=(
            "A node is missed if all 8 lie elsewhere: C(256 - 32, 8) of C(256, 8) choices. Eight nodes times"
            " the chance of not being missed; the same with 4 nodes of 128 experts."
        ),
    )
