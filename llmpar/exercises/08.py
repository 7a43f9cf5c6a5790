"""Exercises of lesson 08: what 1F1B holds, and orders written by hand."""

import re

from llmpar.exercises import Exercise
from llmpar.schedules import from_text, make
from llmpar.timetable import timetable


def held(stages: int = 16, microbatches: int = 64, stage: int = 3) -> Exercise:
    """Ask how many microbatches a stage of 1F1B holds at most."""
    return Exercise(
        level="core",
        solution=min(microbatches, stages - stage),
        wrong=[
            (
                microbatches,
                (
                    "That is so if all forwards come first. Here a backward frees its microbatch as soon as"
                    " it can."
                ),
            ),
            (stages, "That is stage 0, which waits longest for its first backward. Later stages wait less."),
            (
                stages - stage - 1,
                "These are the forwards before the first that is paired; that one is held as well: p - i.",
            ),
            (
                stage + 1,
                (
                    "You counted from the other end: the *last* stage holds one, since its backward follows"
                    " at once."
                ),
            ),
            (stage, "You counted the stages before it. What counts is how many come after it."),
            (
                stages - stage + 1,
                (
                    "One less: the microbatch whose backward comes back frees its place before the next"
                    " forward: p - i."
                ),
            ),
        ],
        hint=(
            "In the picture for 4 stages: stage 0 holds 4, the last one 1. How long does microbatch 0 stay"
            " away from stage i?"
        ),
        nudges=["How far away is the last stage, from stage 3?"],
        because=(
            "A microbatch goes down p-i-1 stages and comes up again; meanwhile stage i runs one more forward"
            " for each of them: with its own that is p-i."
        ),
    )


def _rows(text: str, stages: int, microbatches: int) -> list | str:
    """An order as lists of operations, refused if it is illegal or has another size."""
    if re.search(r"\bF\d", text) and not re.search(r"\bF0\b", text):
        raise ValueError("Microbatches count from 0, as stages do: F0 is missing.")
    order = from_text(text)
    found = order.num_stages, order.num_microbatches
    if found != (stages, microbatches):
        asked = f"{stages} stages and {microbatches} microbatches"
        raise ValueError(
            f"{asked} were asked for, but there are {found[0]} lines and {found[1]} microbatches"
        )
    timetable(order)
    return [[str(op) for op in row] for row in order.rows]


def _ahead(stages: int, microbatches: int, more: int = 0, all_alike: int = 0) -> str:
    """1F1B with other numbers of forwards before the first pair."""
    rows = []
    for i in range(stages):
        ahead = min(all_alike or stages - i - 1 + more, microbatches)
        row = [f"F{u}" for u in range(ahead)]
        for u in range(microbatches):
            row += [f"F{ahead + u}"] * (ahead + u < microbatches) + [f"B{u}"]
        rows.append(" ".join(row))
    return "\n".join(rows)


def one_f_one_b(stages: int = 3, microbatches: int = 4) -> Exercise:
    """Ask for 1F1B as text."""
    solution = str(make("1f1b", stages, microbatches))
    serial = "\n".join([" ".join(f"F{u} B{u}" for u in range(microbatches))] * stages)
    return Exercise(
        level="core",
        solution=solution,
        observe=lambda text: _rows(text, stages, microbatches),
        wrong=[
            (
                str(make("gpipe", stages, microbatches)),
                "That is GPipe: all forwards first, and everything is held.",
            ),
            (
                serial,
                (
                    "Legal, but only one stage works at a time: the early stages must run forwards ahead"
                    " while they wait."
                ),
            ),
            (
                _ahead(stages, microbatches, more=1),
                (
                    "Legal, and as fast, but each stage runs one forward too many ahead and holds one more:"
                    " p-i-1 are enough."
                ),
            ),
            (
                _ahead(stages, microbatches, all_alike=stages - 1),
                (
                    "Every stage runs as many forwards ahead. The last one has its backward at once, and"
                    " needs none."
                ),
            ),
        ],
        hint=(
            "Stage i runs p-i-1 forwards, then one forward and one backward in turn, then the backwards that"
            " are left."
        ),
        nudges=[
            "Stage 2 is the last one: what can it do as soon as F0 is done?",
            "Stage 0 waits longest for its first backward. How many forwards can it run until then?",
        ],
        because=(
            "Stages run 2, 1 and 0 forwards ahead, and then alternate: the last stage turns round at once,"
            " and each stage above waits two cells longer."
        ),
    )


def _eager(stages: int, microbatches: int) -> str:
    """1F1B in which each W follows its B at once."""
    rows = make("1f1b", stages, microbatches).rows
    return "\n".join(
        " ".join(f"{op} W{op.microbatch}" if op.kind == "B" else str(op) for op in row) for row in rows
    )


def _better(
    level,
    best: str,
    limit: int,
    target: float,
    costs: tuple,
    wrong: list,
    hint: str,
    nudges: list[str],
    because: str,
):
    """An order is judged by its bubble and what it holds; whoever reaches the target within the limit is
    right."""

    def observe(text):
        _rows(text, 3, 5)
        table = timetable(from_text(text), costs)
        return {"bubble": max(table.bubble, target), "held": max(*table.peak_live(), limit)}

    return Exercise(level, best, wrong, hint, nudges, because, observe)


def third_of_the_bubble() -> Exercise:
    """Ask for an order with a third of 1F1B's bubble in its memory: ZB-H1, for one."""
    wrong = [
        (
            str(make("1f1b", 3, 5)),
            "Bubble 6: the backward is whole. Write B and W apart, then the stage before can go on after B.",
        ),
        (
            _eager(3, 5),
            "Bubble 4: B and W are apart, but W still comes before work that others wait for. Put it off.",
        ),
        (
            str(make("zb-h2", 3, 5)),
            "No bubble at all, but stage 0 holds 5 microbatches; the memory is for 3.",
        ),
        (str(make("gpipe", 3, 5)), "That holds all microbatches, and its bubble is 1F1B's."),
        (
            "\n".join([" ".join(f"F{u} B{u} W{u}" for u in range(5))] * 3),
            (
                "That is one microbatch after the other, and the stages wait: early stages must run forwards"
                " ahead."
            ),
        ),
    ]
    hint = (
        "Keep 1F1B's order of F and B. The later the stage, the longer its W can wait: i microbatches on"
        " stage i."
    )
    return _better(
        "stretch",
        str(make("zb-h1", 3, 5)),
        3,
        2.0,
        (1, 1, 1),
        wrong,
        hint,
        nudges=["Which half of a backward does the stage before wait for?"],
        because=(
            "Only B is awaited by another stage. With 1F1B's order of F and B, and W put off by i"
            " microbatches on stage i, W fills what was idle: (p-1)(F+B-W) is left."
        ),
    )


def between_h1_and_h2() -> Exercise:
    """Ask for an order with unequal costs and one more microbatch than 1F1B holds."""
    best = (
        "F0 F1 F2 F3 B0 W0 F4 B1 W1 B2 B3 W2 W3 B4 W4\n"
        "F0 F1 F2 B0 F3 B1 W0 F4 B2 B3 W1 W2 B4 W3 W4\n"
        "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 W2 W3 W4"
    )
    wrong = [
        (
            str(make("zb-h1", 3, 5)),
            "Bubble 2.8, and only 3 held: run one forward more ahead on the first stages.",
        ),
        (str(make("zb-h2", 3, 5)), "Bubble 1.2, but 5 are held; the memory is for 4."),
        (_eager(3, 5), "Bubble 4.4: W comes at once, before work that other stages wait for."),
        (str(make("1f1b", 3, 5)), "Bubble 6: write B and W apart."),
        (
            "\n".join([" ".join(f"F{u} B{u} W{u}" for u in range(5))] * 3),
            (
                "That is one microbatch after the other, and the stages wait: early stages must run forwards"
                " ahead."
            ),
        ),
    ]
    hint = (
        "Start from ZB-H1, let stages 0 and 1 run one more forward ahead, and let W of the last stage wait"
        " longer."
    )
    return _better(
        "expert",
        best,
        4,
        2.0,
        (1, 1.2, 0.8),
        wrong,
        hint,
        nudges=["How many forwards ahead do stages run in ZB-H1, and what does one more cost in memory?"],
        because=(
            "With one more forward ahead, the later stages have work where they would wait, and W fills what"
            " is left. The price is one more microbatch held."
        ),
    )
