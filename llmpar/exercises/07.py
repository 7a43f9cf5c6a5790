"""Exercises of lesson 07: how long stages wait, what uneven stages cost, and what a tied embedding sends."""

from llmpar.exercises import Exercise


def idle_share(stages: int = 4, microbatches: int = 8) -> Exercise:
    """Ask which share of the total time a stage of GPipe waits."""
    p, u = stages, microbatches
    return Exercise(
        level="core",
        solution=(p - 1) / (u + p - 1),
        wrong=[
            (
                (p - 1) / u,
                (
                    "That is the idle time over the ideal time. Its share of the total was asked for; the"
                    " total contains it."
                ),
            ),
            (
                (p - 1) / p,
                "That is so with one batch. Eight microbatches keep a stage busy eight times as long.",
            ),
            (u / (u + p - 1), "That is the share of the time in which a stage works."),
            (p / (u + p), "Nearly: the last stage waits for p-1 others, not for p."),
            (
                2 * (p - 1) / (u + p - 1),
                "You counted a wait of p-1 forwards and p-1 backwards, but each over its own time only.",
            ),
            (
                p - 1,
                (
                    "That is the number of slots that a stage waits. Over the number of all slots it is the"
                    " share."
                ),
            ),
        ],
        hint=(
            "Forwards alone take u + p - 1 slots on the way to the end of the last stage. In how many of them"
            " does it work?"
        ),
        tolerance=0.02,  # 0.27 is fine
        unit="a fraction of 1",
        nudges=[
            "In how many slots of the last stage is there a forward, and how many slots pass until its last"
            " one ends?"
        ],
        because=(
            "The last stage begins p-1 slots late: u of u+p-1 slots have work, on the way down and on the"
            " way up."
        ),
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
            (8 * (stages - 1), "That leaves one ninth idle, 11.1 %. One tenth of the total is asked for."),
        ],
        hint="(p-1)/(u+p-1) <= 1/10; multiply out.",
        nudges=["Write the idle share of the total for p stages, and set it to one tenth."],
        because="(p-1)/(u+p-1) is at most 1/10 from u = 9(p-1) on.",
    )


def uneven() -> Exercise:
    """Ask for the time of u forwards through stages of unequal cost."""

    def solution(costs, u):
        return sum(costs) + (u - 1) * max(costs)

    def lockstep(costs, u):
        return (u + len(costs) - 1) * max(costs)

    def on_average(costs, u):
        return (u + len(costs) - 1) * sum(costs) / len(costs)

    def one_too_many(costs, u):
        return sum(costs) + u * max(costs)

    def one_by_one(costs, u):
        return u * sum(costs)

    def last(costs, u):
        return sum(costs) + (u - 1) * costs[-1]

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
            (one_too_many, "The first microbatch is counted in the sum already; u - 1 others follow it."),
            (one_by_one, "That is one microbatch after the other, without any overlap."),
            (
                last,
                (
                    "Right if the last stage is the slowest. Which stage holds up the others when it is"
                    " another one?"
                ),
            ),
            (
                lambda costs, u: max(costs) * u,
                (
                    "The slowest stage works that long. But the first microbatch must reach it, and the last"
                    " one must leave the stages behind it."
                ),
            ),
            (
                lambda costs, u: sum(costs) + (u - 1) * costs[0],
                (
                    "Right if the first stage is the slowest. Which stage holds up the others when it is"
                    " another one?"
                ),
            ),
        ],
        hint=(
            "The first microbatch takes the sum of all stages. How much later does each of the others come"
            " out?"
        ),
        nudges=["When does the first microbatch come out? And which stage decides when the next one does?"],
        because=(
            "The first microbatch passes all stages, one after the other; from then on the slowest stage lets"
            " one through per its own time."
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
                "all stages: that is a group of two. A ring of N devices sends 2 V (N-1)/N from each.",
            ),
            (
                right | {"first and last": 2 * size},
                (
                    "first and last: 2 V (N-1)/N with N = 2. Each sends one half to be added, and then its"
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
            (
                right | {"a middle stage": size},
                (
                    "a middle stage: only the first and the last stage use the embedding. Who is in no group"
                    " sends nothing."
                ),
            ),
            (
                right | {"all stages": 2 * size},
                (
                    "all stages: nearly; of N pieces each device need not send one, in each of the two"
                    " rounds: (N-1)/N."
                ),
            ),
        ],
        hint=(
            "A ring all-reduce of V bytes among N devices sends 2 V (N-1)/N from each; N is 4 in one case and"
            " 2 in the other."
        ),
        tolerance=0.01,
        unit="bytes",
        nudges=["How large is the message, how many devices are in the group, and who is in it?"],
        because=(
            "A ring all-reduce of V bytes among N sends 2V(N-1)/N from each: 1.5V among four, V between two,"
            " and nothing from who is in no group."
        ),
    )
