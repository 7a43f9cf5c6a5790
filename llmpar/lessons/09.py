"""Exercises of lesson 09 that are computed: the room of experts, adding rows up."""

import numpy as np

from llmpar.lessons import Exercise

LOADS = (260, 190, 150, 120, 100, 84, 70, 50)
"""Rows that chose each of eight experts, of 512 tokens with two each."""


def capacity() -> Exercise:
    """Ask for the smallest capacity in slots at which at most 1 % of all choices are dropped."""
    allowed = sum(LOADS) // 100
    dropped = lambda rows: sum(max(0, n - max(rows, 0)) for n in LOADS)
    right = next(c for c in range(max(LOADS) + 1) if dropped(c) <= allowed)
    counts = lambda rows: dict(
        rows=rows, dropped=dropped(rows), choices=sum(LOADS), allowed=allowed
    )
    hints = dict(
        factor=lambda rows: counts(rows) if 0 < rows < 10 else None,
        smaller=lambda rows: counts(rows) if rows > right else None,
        larger=counts,
    )
    return Exercise("core", right, tolerance=1e-9, unit="slots", counts=hints)


def combine() -> Exercise:
    """Ask for an expert layer's last step: each token adds its rows up, weighed; dropped ones are missing."""

    def solution(rows, slot, weights):
        padded = np.concatenate([rows, np.zeros_like(rows[:1])])
        return (padded[slot] * weights[..., None]).sum(1)

    clamped = lambda rows, slot, weights: (
        rows[np.minimum(slot, len(rows) - 1)] * weights[..., None]
    ).sum(1)

    def renormalised(rows, slot, weights):
        kept = weights * (slot < len(rows))
        return solution(rows, slot, kept / np.maximum(kept.sum(1, keepdims=True), 1e-9))

    def cases(function):
        draw, out = np.random.default_rng(0), []
        for slots, tokens, k in ((6, 4, 2), (9, 3, 3)):
            slot = draw.permutation(slots + tokens)[: tokens * k].reshape(tokens, k).clip(0, slots)
            rows = draw.standard_normal((slots, 5))
            weights = draw.random((tokens, k))
            try:
                out.append(np.asarray(function(rows, slot, weights), float).tolist())
            except IndexError:
                return ["read past the end"]
        return out

    wrong = dict(
        unweighed=lambda rows, slot, weights: solution(rows, slot, np.ones_like(weights)),
        mean=lambda rows, slot, weights: solution(rows, slot, weights) / slot.shape[1],
        clamped=clamped,
        renormalised=renormalised,
        wrapped=lambda rows, slot, weights: (rows[slot % len(rows)] * weights[..., None]).sum(1),
        two_things=lambda *given: clamped(*given) / given[1].shape[1],
        past_the_end=lambda rows, slot, weights: (rows[slot] * weights[..., None]).sum(1),
    )
    return Exercise("stretch", solution, wrong, observe=cases)
