"""What a reader could do next: single changes to a plan, priced by the planner."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from llmpar.plan.mesh_shape import AXES, MeshShape, divisors
from llmpar.planner.planner import SAME, Candidate, Question, on_mesh, unsuited
from llmpar.predict.digits import about
from llmpar.predict.hardware import GIB


@dataclass(frozen=True)
class Change:
    """One change, priced.

    Attributes:
        patch: the change: ``{"mesh": text}``, ``{"batch_size": sequences}``, or ``{"fields": {name: value}}``
            where None gives a field back to the planner, and it chooses what the text says.
        candidate: the plan that is reached.
        sequence_s: its seconds by sequence; of two steps the better has less.
    """

    text: str
    patch: dict[str, Any]
    candidate: Candidate
    sequence_s: float


def advice(
    q: Question,
    mesh: MeshShape,
    one: Candidate | None,
    price: Callable[[Question, MeshShape], Candidate] = on_mesh,
) -> Iterator[Change | None]:
    """Single changes to a mesh that help: each fits, and is faster by more than `SAME` if ``one`` fits too
    (what `planner.on_mesh` answered; None where it refused). Fields given back to the planner, whose choice
    is no slower than any by hand; a prime factor moved to another axis; where it does not fit or cannot be,
    another batch. Lazily, in no order, None for what does not help: the best has least ``sequence_s``.
    ``price`` may remember what it has answered."""
    had = math.inf if one is None or one.why_not else one.time.step_s / q.batch_size * (1 - SAME)
    for patch, other, moved_mesh in _changes(q, mesh, one):
        reached = None
        with contextlib.suppress(ValueError):
            reached = price(other, moved_mesh)
        if reached is None or reached.why_not or reached.time.step_s / other.batch_size >= had:
            yield None
            continue
        names = [
            f"{name}={getattr(reached.plan, name)}"
            for name in patch.get("fields", ())
            if getattr(reached.plan, name) != q.fixed[name]
        ]
        size = f"{other.batch_size} sequences" if "batch_size" in patch else ""
        what = patch.get("mesh") or size or ", ".join(names)
        text = f"{what}: {reached.total_bytes / GIB:.1f} GiB, {about(reached.time.step_s)}"
        yield Change(text, patch, reached, reached.time.step_s / other.batch_size)


def _changes(
    q: Question, mesh: MeshShape, one: Candidate | None
) -> Iterator[tuple[dict[str, Any], Question, MeshShape]]:
    """Each change, the question with it, and its mesh."""
    given = {name: value for name, value in q.fixed.items() if name not in AXES}
    ask = lambda fields: replace(q, fixed=fields)
    for names in [[name] for name in given] + [list(given)] * (len(given) > 1):
        left = {name: value for name, value in given.items() if name not in names}
        yield {"fields": dict.fromkeys(names)}, ask(left), mesh
    ranks = mesh.dp * mesh.fsdp * mesh.ep
    if one is None or one.why_not:
        near = {q.batch_size // ranks * ranks, -(-q.batch_size // ranks) * ranks, q.batch_size // 2}
        for batch_size in sorted(near - {0, q.batch_size}):
            yield ({"batch_size": batch_size}, replace(q, fixed=given, batch_size=batch_size), mesh)
    sizes = mesh.user_sizes
    axes = [axis for axis in AXES if axis != "ep" or q.config.experts]
    for giver in axes:
        for n, taker in itertools.product(divisors(sizes[giver])[1:], axes):
            all_cut = (giver, taker, n) == ("dp", "fsdp", sizes[giver])  # the state of replicas
            if taker == giver or not all_cut and len(divisors(n)) > 2:
                continue
            if not unsuited(q, taker, sizes[taker] * n):
                moved = sizes | {giver: sizes[giver] // n, taker: sizes[taker] * n}
                new = replace(mesh, **moved)  # type: ignore[arg-type]
                yield {"mesh": str(new)}, ask(given), new
