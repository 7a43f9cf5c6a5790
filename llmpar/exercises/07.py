"""Exercises of lesson 07: how long stages wait, what uneven stages cost, and what a tied embedding sends."""

from llmpar.exercises import Exercise


def idle_share(stages: int = 4, microbatches: int = 8) -> Exercise:
    """Ask which share of the total time a stage of GPipe waits."""
    p, m = stages, microbatches
    return Exercise(
        level="core",
        solution=(p - 1) / (m + p - 1),
        wrong=[
            (
                (p - 1) / m,
                (
                    "That is the idle time over the ideal time. Its share of the total was asked for; the"
                    " total contains it."
                ),
            ),
            (
                (p - 1) / p,
                "That is so with one batch. Eight microbatches keep a stage busy eight times as long.",
            ),
            (m / (m + p - 1), "That is the share of the time in which a stage works."),
            (p / (m + p), "Nearly: the last stage waits for p-1 others, not for p."),
            (
                2 * (p - 1) / (m + p - 1),
                "You counted a wait of p-1 forwards and p-1 backwards, but each over its own time only.",
            ),
        ],
        hint=(
            "Forwards alone take m + p - 1 slots on the way to the end of the last stage. In how many of them"
            " does it work?"
        ),
        tolerance=0.02,  # 0.27 is fine
        unit="a fraction of 1",
    )


def microbatches(stages: int = 8) -> Exercise:
    """Ask for the smallest number of microbatches with at most 10 % of the total time idle."""
    return Exercise(
        level="core",
        solution=9 * (stages - 1),
        wrong=[
            (
                10 * (stages - 1),
                (
                    "That makes the idle time 10 % of the ideal time. Of the total, fewer microbatches are"
                    " enough."
                ),
            ),
            (9 * (stages - 1) + 1, "One less gives exactly 10 %, which is allowed."),
            (9 * stages, "Count the stages that one waits for: p - 1."),
            (stages - 1, "That makes half of the time idle: (p-1)/(2(p-1))."),
        ],
        hint="(p-1)/(m+p-1) <= 1/10; multiply out.",
    )


def uneven() -> Exercise:
    """Ask for the time of m forwards through stages of unequal cost."""

    def solution(costs, m):
        return sum(costs) + (m - 1) * max(costs)

    def lockstep(costs, m):
        return (m + len(costs) - 1) * max(costs)

    def on_average(costs, m):
        return (m + len(costs) - 1) * sum(costs) / len(costs)

    def one_too_many(costs, m):
        return sum(costs) + m * max(costs)

    def one_by_one(costs, m):
        return m * sum(costs)

    def last(costs, m):
        return sum(costs) + (m - 1) * costs[-1]

    return Exercise(
        level="stretch",
        solution=solution,
        observe=lambda function: [
            function([2, 2, 2, 4], 6),
            function([3, 3, 2, 2], 6),
            function([1, 5, 1], 4),
            function([2, 2], 1),
        ],
        wrong=[
            (
                lockstep,
                (
                    "That is the time if all stages tick together. Here the first microbatch passes short"
                    " stages quickly."
                ),
            ),
            (
                on_average,
                (
                    "An average stage does not exist: microbatches leave as seldom as the slowest stage lets"
                    " them."
                ),
            ),
            (one_too_many, "The first microbatch is counted in the sum already; m - 1 others follow it."),
            (one_by_one, "That is one microbatch after the other, without any overlap."),
            (
                last,
                (
                    "Right if the last stage is the slowest. Which stage holds up the others when it is"
                    " another one?"
                ),
            ),
        ],
        hint=(
            "The first microbatch takes the sum of all stages. How much later does each of the others come"
            " out?"
        ),
    )


def tied(rows: int = 128_256, width: int = 2048, stages: int = 4) -> Exercise:
    """Ask what a tied embedding's gradient sends over pp, per device and step, in float32."""
    size = 4 * rows * width
    right = {"all stages": 2 * size * (stages - 1) / stages, "first and last": size, "a middle stage": 0}
    return Exercise(
        level="expert",
        solution=right,
        wrong=[
            (
                right | {"all stages": size},
                "all stages: that is a group of two. A ring of g devices sends 2 V (g-1)/g from each.",
            ),
            (
                right | {"first and last": 2 * size},
                (
                    "first and last: 2 V (g-1)/g with g = 2. Each sends one half to be added, and then its"
                    " finished half."
                ),
            ),
            (
                right | {"first and last": size / 2},
                (
                    "first and last: that is the reduce-scatter; both need the whole sum, so the halves are"
                    " gathered again."
                ),
            ),
            (
                right | {"a middle stage": 2 * size * (stages - 1) / stages},
                "a middle stage: it is in no group, and has no gradient of the embedding to add.",
            ),
            (
                {name: value / 4 for name, value in right.items()},
                "These are numbers of elements; a float32 has 4 bytes.",
            ),
            (
                {name: value / 2 for name, value in right.items()},
                (
                    "Each is half of what is sent. Either you took two bytes for a number (gradients are"
                    " summed in float32: 4 bytes), or only the first half of the all-reduce: sums are"
                    " scattered, then gathered again."
                ),
            ),
        ],
        hint=(
            "A ring all-reduce of V bytes among g devices sends 2 V (g-1)/g from each; g is 4 in one case and"
            " 2 in the other."
        ),
        tolerance=0.01,
        unit="bytes",
    )
