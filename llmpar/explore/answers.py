"""What the mesh explorer answers to a state: all that a page shows, as plain data.

A notebook's kernel and the Python inside a saved page give the same answers. `look` reads a state, `panels`
draws it.
"""

from __future__ import annotations

import itertools
from typing import Any

from llmpar.draw.scene import size_text, time_text
from llmpar.explore import panels
from llmpar.explore.look import OFFERED, START, Look, look, settle, works
from llmpar.notation import AXES, MeshShape, divisors, near_meshes, parse_mesh
from llmpar.plan import Plan
from llmpar.predict import advice, planner


def answer(state: dict, seconds: float = 0.0) -> dict:
    """All that a page shows of a state. ``seconds``: of work on what lies around it, first."""
    out: dict[str, Any] = {"asked": state, "state": state, "refusal": None, "verdict": None, "more": False}
    out |= {"fields": [], "panels": {}, "numbers": {}, "frames": []}
    try:
        state, _ = settle(state)
        out["state"] = state
        seen = look(state)
    except ValueError as error:
        steps = remedies(state)
        out |= {"refusal": {"why": str(error), "steps": steps}, "fields": fields(state, None)}
        out["says"] = "\n".join([f"refused: {error}", *(step["text"] for step in steps)])
        return out
    done = seen.around.advance(state["mesh"], seen.one, seconds)
    drawn = panels.panels(seen)
    out["panels"] = {name: panels.shown(panel) for name, panel in drawn.items()}
    out["panels"]["grid"]["html"] = panels.pick(seen)
    out |= {"verdict": verdict(seen), "fields": fields(state, seen.one.plan), "numbers": numbers(seen)}
    out |= {"frames": panels.frames(seen), "more": not done}
    out["says"] = panels.says(seen, out["verdict"], drawn)
    return out


def more(state: dict) -> dict | None:
    """The same answer with more of what lies around it; None where the state is refused."""
    found = answer(state, 0.15)
    return None if found["refusal"] else found


def fields(state: dict, plan: Plan | None) -> list[dict]:
    """The plan's other fields as controls: the planner's choices, and those that were set by hand."""
    own = state["fields"]
    values = {name: getattr(plan, name, planner.GPU_SHARE) for name in OFFERED} | own
    return [
        control | {"value": values[name], "yours": name in own}
        for name, control in OFFERED.items()
        if name in own or plan and matters(plan, name)
    ]


def matters(plan: Plan, name: str) -> bool:
    """Whether a field can change anything on this mesh."""
    axis = {"context_parallel": "sp", "sequence_order": "sp", "schedule": "pp", "virtual_stages": "pp"}
    axis |= {"stage_saves": "pp", "tp_sequence": "tp", "tp_comm_overlap": "tp", "dispatch": "ep"}
    return plan.mesh.sizes[axis[name]] > 1 if name in axis else True


def numbers(seen: Look) -> dict[str, Any]:
    """What is shown, as plain numbers."""
    q, one = seen.question, seen.one
    held = {"memory_bytes": one.memory_bytes, "room_bytes": q.room_bytes}
    found: dict[str, Any] = {"plan": planner.fields_of(one.plan) | {"mesh": str(one.plan.mesh)}} | held
    found["traffic"] = [
        {"axes": names, "kind": kind, "count": row.count, "bytes": row.bytes_sent}
        for (names, kind), row in panels.traffic_of(seen).items()
    ]
    if seen.timed:
        run = q.run(one.plan)
        found |= {"step_s": one.time.step_s, "terms": one.time.terms, "mfu": one.time.mfu(run)}
        found["tokens_per_s"] = run.tokens_per_step / one.time.step_s
    return found


def verdict(seen: Look) -> dict:
    """The answer first: whether it fits, how fast it is, what limits it, and what to do next."""
    q, found, fit = seen.question, numbers(seen), advice.verdict(seen.question, seen.one)
    tone = {"fits": "good", "does not fit": "bad"}.get(fit.words, "unsure")
    head = (
        f"{fit.words.capitalize()}: {size_text(fit.total_bytes)} of {size_text(fit.capacity_bytes)} a device."
    )
    capacity = f"{q.capacity_words[0].upper()}{q.capacity_words[1:]}."
    if not seen.timed:
        line = "Time is not predicted: simulated devices share one processor and have no links."
        return {"tone": tone, "head": head, "rest": "", "line": line, "steps": []}
    rate = f"{found['tokens_per_s']:,.0f} tokens/s · {found['mfu']:.1%} MFU"
    most = sorted(found["terms"].items(), key=lambda term: -term[1])[:2]
    names = [f"{name} ({time_text(seconds)})" for name, seconds in most]
    line = f"Most time goes to {', then to '.join(names)}. {capacity}"
    rest = f"{time_text(found['step_s'])} a step · {rate}"
    return {"tone": tone, "head": head, "rest": rest, "line": line, "steps": steps(seen)}


def steps(seen: Look) -> list[dict]:
    """What to do next: the best change of a field and the best of the mesh, and the best mesh of all once all
    are known."""
    found, kinds = list[dict](), set[str]()
    for step in sorted(seen.around.steps.get(str(seen.shape), []), key=lambda step: step.sequence_s):
        if kinds.isdisjoint(step.patch):
            found.append({"text": step.text, "do": "apply", "set": step.patch})
            kinds |= {*step.patch}
    best = seen.around.best
    if best and best.plan.mesh != seen.shape:
        found = [step for step in found if step["set"] != {"mesh": str(best.plan.mesh)}]
        words = f"{best.plan.mesh}: {size_text(best.total_bytes)}, {time_text(best.time.step_s)}"
        text, patch = f"Best of {len(seen.around.meshes)}: {words}", {"mesh": str(best.plan.mesh)}
        found.append({"text": text, "do": "open", "set": patch})
    return found


def remedies(state: dict) -> list[dict]:
    """What would work in place of what was refused: the nearest mesh of as many devices, another batch."""
    found = []
    try:
        state, shape = settle(state)
    except ValueError:
        shape = parse_mesh(START["mesh"])
        if works(state | {"mesh": START["mesh"], "devices": shape.size}):
            found.append(
                {"text": f"a mesh that works is {shape}", "do": "use it", "set": {"mesh": str(shape)}}
            )
        return found
    if near := nearest(state, shape):
        found.append(
            {"text": f"the nearest mesh that works is {near}", "do": "use it", "set": {"mesh": near}}
        )
    step = shape.dp * shape.fsdp * shape.ep * max(1, state["fields"].get("microbatches") or 1)
    batch = -(-state["batch_size"] // step) * step
    if batch != state["batch_size"] and works(state | {"batch_size": batch}):
        words = f"this mesh works with {batch} sequences"
        found.append({"text": words, "do": "use it", "set": {"batch_size": batch}})
    return found


def nearest(state: dict, shape: MeshShape) -> str | None:
    """The mesh that works and changes the asked one least: of as many devices or else fewer, over the axes
    that it names or else over all. None where what is wrong is not the mesh."""
    named = {axis: n for axis, n in shape.asked.items() if n > 1}
    every = named | {axis: 1 for axis in AXES if axis not in named}
    counts = {*divisors(shape.size), *(2**i for i in range(shape.size.bit_length()))}
    if not works(state | {"mesh": "dp=1", "devices": 1}):
        return None
    for axes, n in itertools.product((named, every), sorted(counts, reverse=True)):
        for mesh in near_meshes(axes, n)[:200] if axes else ():
            if mesh != shape and works(state | {"mesh": str(mesh), "devices": n}):
                return str(mesh)
    return None
