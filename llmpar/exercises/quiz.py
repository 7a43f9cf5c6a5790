"""The quiz before and after a workshop: one question for each lesson, judged as exercises are, and three
self-ratings from 1 to 5.

Results are plain data, so that the effect of a workshop can be computed: `effect`.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmpar.exercises.judge import CORRECT, NOT_ATTEMPTED, Exercise

RATINGS = {
    "explain": "explain data, tensor and pipeline parallelism",
    "choose": "choose a parallel strategy for a model and a machine",
    "run": "train a model on several GPUs or hosts",
}
"""What learners rate from 1 (not at all) to 5 (I could teach it), before and after."""

QUESTIONS: dict[str, tuple[str, Exercise]] = {}
"""The number of a lesson: its question, and the exercise that judges the answer."""


def _ask(
    lesson: str, question: str, solution: float, because: str, wrong: Mapping[float, str], unit: str = ""
) -> None:
    """Add a question whose answer is a number. There is no second try: the reason serves as the hint."""
    exercise = Exercise(
        "core", solution, list(wrong.items()), because, because=because, tolerance=0.01, unit=unit
    )
    QUESTIONS[lesson] = question, exercise


_ask(
    "00",
    "A matrix d m/tp on the mesh dp=2 tp=4: on how many devices does each shard lie?",
    2,
    "tp cuts, dp copies: four shards, each on the two ranks of dp.",
    {
        4: "That is the number of shards.",
        8: "That is the number of devices.",
        1: "dp does not cut it: it copies.",
    },
)
_ask(
    "01",
    "How many bytes per parameter hold weights, gradients and Adam's state in mixed precision?",
    16,
    "2 for the weight, 2 for the gradient, 12 for a float32 copy and two moments.",
    {
        2: "That is the weight alone.",
        4: "That is weight and gradient; Adam's state is missing.",
        12: "That is the optimizer's part alone.",
        8: "Adam has a float32 copy and two float32 moments.",
    },
)
_ask(
    "02",
    "8 GPUs all-reduce 8 MB in a ring. How many MB does each send?",
    14,
    "A reduce-scatter and an all-gather, each 7/8 of 8 MB.",
    {
        8: "That is the size of the result.",
        7: "That is half of it: an all-reduce is two laps.",
        16: "Nobody sends its own part: 7/8 of it, twice.",
        56: "Pieces travel, not whole buffers.",
    },
)
_ask(
    "03",
    'Data parallel, 4 microbatches, reduce="end": how often does each gradient travel in a step?',
    1,
    "The gradients of the microbatches are added up first, and travel once.",
    {4: "That holds where each microbatch sends its own; here they wait for the end."},
)
_ask(
    "04",
    "ZeRO-2 and 4 microbatches: how many times the parameters' number (Ψ) does a device send in a step?",
    5,
    "Each microbatch scatters its gradients, 4Ψ, and the updated weights are gathered, Ψ.",
    {
        2: "That holds for one microbatch.",
        12: "That is ZeRO-3: it gathers twice and scatters once, every time.",
        3: "That is ZeRO-3 with one microbatch.",
        4: "The updated weights must be gathered as well.",
    },
)
_ask(
    "05",
    "How many all-reduces does a layer need in a training step under tensor parallelism?",
    4,
    "Attention and feed-forward, each one forward and one backward.",
    {
        2: "That is the forward pass.",
        1: "That is one of the two halves of a layer, forward.",
        8: "Column then row needs one for each half and direction.",
    },
)
_ask(
    "06",
    "Ring attention on 8 devices: how many hops in the forward pass of a layer?",
    7,
    "After N - 1 hops every block has been everywhere.",
    {
        8: "The last hop would bring everybody's own keys back.",
        14: "That counts the backward pass, or both of K and V.",
    },
)
_ask(
    "07",
    "4 stages, 12 microbatches, 1F1B: which share of the time is idle? A fraction.",
    3 / 15,
    "(p - 1) / (u + p - 1).",
    {0.25: "That is idle over ideal: (p - 1)/u.", 3 / 16: "The time is u + p - 1 = 15 slots."},
    unit="a fraction of 1",
)
_ask(
    "08",
    "16 stages, 64 microbatches, 1F1B: how many microbatches does stage 3 hold at most?",
    13,
    "Stage i holds p - i.",
    {
        64: "That is GPipe.",
        16: "That is stage 0.",
        12: "Stages count from 0: p - i.",
        3: "The first stages hold most.",
    },
)
_ask(
    "09",
    "A layer of experts: how many all-to-alls in a training step, forward and backward together?",
    4,
    "To the experts and back, forward; and the same backward.",
    {
        2: "That is the forward pass.",
        1: "The tokens must come back, too.",
        8: "One there and one back, twice.",
    },
)
_ask(
    "10",
    "A mesh pp=2 dp=2 tp=4 on nodes of 4 GPUs: how many of its axes cross between nodes?",
    2,
    "tp fills a node; dp and pp reach beyond.",
    {
        1: "Count again: both axes outside of tp leave the node.",
        3: "tp has 4 ranks, as many as a node has GPUs.",
    },
)
_ask(
    "11",
    "A step needs 90 GiB a GPU and has 60. The state is 54 of the 90 and dp=4. How many GiB with ZeRO-3?",
    49.5,
    "The state is cut in four, 13.5; what remains, 36, stays.",
    {
        22.5: "ZeRO cuts the state alone, not the activations.",
        13.5: "That is the state; activations are still there.",
        54: "That is the whole state.",
    },
)
_ask(
    "12",
    "b s d +tp as a type of JAX on explicit axes: over how many devices must it still be summed, if tp=4?",
    4,
    "+tp is JAX's U:tp: unreduced over tp, one addend on each of its ranks.",
    {
        1: "An unfinished sum has an addend on each rank.",
        3: "Each of the ranks holds an addend, one's own included.",
    },
)
_ask(
    "17",
    "4 hosts of 8 GPUs, a process on each host, dp=32, 64 rows: how many rows does a process hand over?",
    16,
    "Each process hands over the rows of its own devices: 64 / 4.",
    {
        64: "That is the whole batch: each row would be there four times.",
        2: "That is a device's share; a process has eight devices.",
        8: "That is how many devices a process has.",
        32: "That is how many devices there are.",
    },
)


def score(when: str, answers: Mapping[str, Any], ratings: Mapping[str, int]) -> dict[str, Any]:
    """Judge a quiz: answers by lesson, ratings by name; returns the results as plain data. ``when`` is before
    or after."""
    if when not in ("before", "after"):
        raise ValueError(f"a quiz is taken before or after, not '{when}'")
    for name, rating in ratings.items():
        if name not in RATINGS or rating not in range(1, 6):
            raise ValueError(f"{name}={rating} is no rating; use 1 to 5 for {', '.join(RATINGS)}")
    if unknown := sorted(set(answers) - set(QUESTIONS)):
        raise ValueError(f"there is no question {unknown[0]!r}; they are {', '.join(QUESTIONS)}")
    items = []
    for lesson, (question, exercise) in QUESTIONS.items():
        given = answers.get(lesson)
        verdict = NOT_ATTEMPTED if given is None else exercise.judge(given)
        right = verdict.startswith(CORRECT)
        items.append(
            {"lesson": lesson, "question": question, "answer": given, "correct": right, "verdict": verdict}
        )
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    total = sum(bool(item["correct"]) for item in items)
    return {
        "when": when,
        "at": now,
        "score": total,
        "max_score": len(items),
        "ratings": dict(ratings),
        "items": items,
    }


def effect(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare before and after over all results: how many there are, the mean score as a fraction, and the
    mean of each rating; None where nobody answered."""

    def mean(of: Callable[[Mapping[str, Any]], float | None], when: str) -> float | None:
        values = [value for result in results if result["when"] == when if (value := of(result)) is not None]
        return statistics.fmean(values) if values else None

    both = ("before", "after")
    for number, result in enumerate(results, 1):
        score, most, ratings = (result.get(name) for name in ("score", "max_score", "ratings"))
        if result.get("when") not in both:
            raise ValueError(f"result {number} is of when={result.get('when')!r}, neither before nor after")
        known = isinstance(ratings, dict) and all(rating in range(1, 6) for rating in ratings.values())
        if not (type(score) is type(most) is int and 0 <= score <= most > 0 and known):
            raise ValueError(
                f"result {number} is none of this quiz: it needs score, max_score and ratings of 1 to 5"
            )
    out: dict[str, Any] = {"num": {when: sum(r["when"] == when for r in results) for when in both}}
    out["score"] = {when: mean(lambda r: r["score"] / r["max_score"], when) for when in both}
    for name in RATINGS:
        out[name] = {when: mean(lambda r, name=name: r["ratings"].get(name), when) for when in both}  # type: ignore[misc]
    return out
