"""Exercises of lesson 07: how long stages wait, what uneven stages cost, and what a tied embedding sends."""

from llmpar.exercises import Exercise


def idle_share(stages: int = 4, microbatches: int = 8) -> Exercise:
    """Ask which share of the total time a stage of GPipe waits."""
    p, u = stages, microbatches
    wrong = dict(
        over_ideal=(p - 1) / u,
        one_batch=(p - 1) / p,
        working=u / (u + p - 1),
        p_others=p / (u + p),
        slots=p - 1,
    )
    return Exercise("core", (p - 1) / (u + p - 1), wrong, tolerance=0.02, unit="a fraction of 1")


def microbatches(stages: int = 8) -> Exercise:
    """Ask for the smallest number of microbatches with at most 10 % of the total time idle."""
    wrong = dict(
        over_ideal=10 * (stages - 1),
        one_more=9 * (stages - 1) + 1,
        all_stages=9 * stages,
        half=stages - 1,
        a_ninth=8 * (stages - 1),
    )
    return Exercise("core", 9 * (stages - 1), wrong)


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


def tied(rows: int = 128_256, width: int = 2048, stages: int = 4) -> Exercise:
    """Ask what a tied embedding's gradient sends over pp, per device and step, in float32."""
    size = 4 * rows * width
    right = {"all stages": 2 * size * (stages - 1) / stages, "first and last": size, "a middle stage": 0}
    wrong = dict(
        ring_of_two=right | {"all stages": size},
        middle_in_ring=right | {"a middle stage": 2 * size * (stages - 1) / stages},
        middle_in_pair=right | {"a middle stage": size},
        no_share=right | {"all stages": 2 * size},
    )
    return Exercise("expert", right, wrong, tolerance=0.01, unit="bytes")
