"""Exercises of lesson 07: how long stages wait, what uneven stages cost, and what a tied embedding sends."""

from llmpar.exercises import Exercise


def idle_share() -> Exercise:
    """Ask which share of the total time a stage of GPipe waits: 4 stages, 8 microbatches."""
    return Exercise("core", (4 - 1) / (8 + 4 - 1), tolerance=0.02, unit="a fraction of 1")


def microbatches() -> Exercise:
    """Ask for the smallest number of microbatches with at most 10 % of the total time idle on 8 stages."""
    return Exercise("core", 9 * (8 - 1))


def uneven() -> Exercise:
    """Ask for the time of u forwards through stages of unequal cost."""

    def solution(costs, u):
        return sum(costs) + (u - 1) * max(costs)

    wrong = dict(
        lockstep=lambda costs, u: (u + len(costs) - 1) * max(costs),
        on_average=lambda costs, u: (u + len(costs) - 1) * sum(costs) / len(costs),
        one_too_many=lambda costs, u: sum(costs) + u * max(costs),
        one_by_one=lambda costs, u: u * sum(costs),
        last=lambda costs, u: sum(costs) + (u - 1) * costs[-1],
        slowest_alone=lambda costs, u: max(costs) * u,
        first=lambda costs, u: sum(costs) + (u - 1) * costs[0],
    )
    cases = ([2, 2, 2, 4], 6), ([3, 3, 2, 2], 6), ([1, 5, 1], 4), ([2, 2], 1)
    return Exercise("stretch", solution, wrong, lambda function: [function(*case) for case in cases])


def tied() -> Exercise:
    """Ask what a tied embedding's gradient sends over pp=4, per device and step: 128,256 rows of width 2,048
    in float32."""
    size = 4 * 128_256 * 2048
    right = {"all stages": 2 * size * 3 / 4, "first and last": size, "a middle stage": 0}
    return Exercise("expert", right, tolerance=0.01, unit="bytes")
