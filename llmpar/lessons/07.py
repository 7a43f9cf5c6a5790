"""Exercises of lesson 07 that are computed: what uneven stages cost."""

from llmpar.lessons import Exercise


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
    return Exercise(
        "stretch", solution, wrong, lambda function: [function(*case) for case in cases]
    )
