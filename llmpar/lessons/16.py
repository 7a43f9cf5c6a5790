"""The exercise of lesson 16 that is computed: which request takes a free slot."""

from llmpar.lessons import Exercise


def join() -> Exercise:
    """Ask for the request of each slot in an engine's next pass."""

    def solution(slots, waiting):
        return [left or (waiting.pop(0) if waiting else 0) for left in slots]

    def passes(function, slots=(0, 0, 0, 0)):
        waiting, out = [3, 9, 5, 2, 6, 4, 7, 3], list[list]()
        while (waiting or any(slots)) and len(out) < 40:
            new = list(function(list(slots), waiting))
            stay = all(one == left for one, left in zip(new, slots, strict=False) if left)
            out.append([sorted(new, key=str), stay])  # any free slot will do
            slots = [max(0, left - 1) for left in new]
        return out

    wrong = dict(
        batch=lambda slots, waiting: slots if any(slots) else solution(slots, waiting),
        not_taken=lambda slots, waiting: solution(slots, waiting[:]),
        last_first=lambda slots, waiting: [
            left or (waiting.pop() if waiting else 0) for left in slots
        ],
        thrown_out=lambda slots, waiting: [waiting.pop(0) if waiting else left for left in slots],
    )
    return Exercise("core", solution, wrong, passes)
