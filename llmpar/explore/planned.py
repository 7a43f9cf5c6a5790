"""The mesh explorer opened on what ``llmpar plan`` chose: its plans in order, each one click away."""

from __future__ import annotations

from typing import Any

from llmpar.explore import answers
from llmpar.explore.explorer import MeshExplorer
from llmpar.plan import Plan


class PlannedExplorer(MeshExplorer):
    """A `MeshExplorer` that knows a planner's answer.

    Args:
        document: of `planner.document`.
        plans: the candidates' plans, in the same order: they have fields that a state has not.
        model, chip: as `preset` and `hardware.chip` find them.
    """

    title = "Planned mesh"

    def __init__(self, document: dict[str, Any], plans: list[Plan], model: str, chip: str):
        shared = {"model": model, "chip": chip}
        shared |= {name: document[name] for name in ("batch_size", "seq_len")}
        held = [control["name"] for control in answers.CONTROLS]
        fields = [name for name in held if name in answers.PLAN and name != "mesh"]
        own = [{name: getattr(plan, name) for name in fields} for plan in plans]
        self.rows = [
            row | {"state": shared | more | {"mesh": row["mesh"]}}
            for row, more in zip(document["plans"], own, strict=True)
        ]
        self.about = document
        super().__init__(**self.rows[0]["state"])
        keys = [answers.key(self.state | row["state"]) for row in self.rows]
        self.plans = {key: (i, plans[i]) for i, key in reversed(list(enumerate(keys)))}

    def document(self) -> dict:
        about = self.about
        what = f"{about['model']} on {about['devices']:,} {about['chip']}"
        return super().document() | {
            "planned": {
                "rows": self.rows,
                "title": f"Planned: {what}, {about['tokens_per_step']:,} tokens a step",
                "room": about["room_bytes"],
                "note": f"Memory leaves {about['margin']:.0%} of what a program may take.",
            }
        }

    def answer(self, state: dict) -> dict:
        i, plan = self.plans.get(answers.key(state), (None, None))
        return answers.answer(state, plan) | {"planned": i}

    def states(self) -> list[dict]:
        """The plans' states first, then the winner's neighbours."""
        mine = [self.state | row["state"] for row in self.rows]
        known = set(map(answers.key, mine))
        return [*mine, *(s for s in super().states() if answers.key(s) not in known)]
