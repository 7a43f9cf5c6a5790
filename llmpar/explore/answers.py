"""What the mesh explorer answers to a state: all that a page shows, as plain data.

A notebook's kernel and a saved page give the same answers. `look` reads a state, `panels` draws it.
"""

import contextlib
import itertools
import math
from typing import Any

from llmpar.draw.grid import frames
from llmpar.draw.scene import Scene, size_text, time_text, to_svg
from llmpar.explore import panels
from llmpar.explore.look import MOST, OFFERED, START, Look, look, settle, works
from llmpar.notation import AXES, MeshShape, divisors, near_meshes, parse_mesh
from llmpar.plan import Plan
from llmpar.predict import planner


def answer(state: dict, seconds: float = 0.0) -> dict:
    """All that a page shows of a state. ``seconds``: of work on what lies around it, first."""
    out = unanswered(state)
    try:
        state, _ = settle(state)
        out["state"] = state
        seen = look(state)
    except ValueError as error:
        why = ValueError(f"{error}{elsewhere(state)}")
        out |= refused(why, steps := remedies(state)) | {"fields": fields(state, None)}
        out["says"] = "\n".join([f"refused: {why}", *(step["text"] for step in steps)])
        return out
    done = seen.around.advance(state["mesh"], seen.one, seconds)
    drawn, said = panels.panels(seen), verdict(seen)
    pictures = {k: {"svg": to_svg(v)} if isinstance(v, Scene) else {"html": v} for k, v in drawn.items()}
    pictures["grid"]["html"] = panels.pick(seen)
    out |= {"verdict": said, "fields": fields(state, seen.one.plan), "panels": pictures, "more": not done}
    out |= {"numbers": numbers(seen), "frames": frames(seen.segments), "says": panels.says(seen, said, drawn)}
    return out


def unanswered(state: dict) -> dict[str, Any]:
    """An answer that says nothing yet."""
    out: dict[str, Any] = {"asked": state, "state": state, "refusal": None, "verdict": None, "more": False}
    return out | {"fields": [], "panels": {}, "numbers": {}, "frames": []}


def refused(why: ValueError, steps: list[dict]) -> dict[str, Any]:
    """What an answer says where there is none, with what would work."""
    return {"refusal": {"why": str(why), "steps": steps}}


def step(text: str, do: str, **patch: Any) -> dict:
    """A button beside a verdict or a refusal: what it offers, its verb, and what it sets."""
    return {"text": text, "do": do, "set": patch}


def more(state: dict) -> dict | None:
    """The same answer with more of what lies around it; None where the state is refused."""
    found = answer(state, 0.08)  # a click does not wait much longer
    return None if found["refusal"] else found


def fields(state: dict, plan: Plan | None) -> list[dict]:
    """The plan's other fields as controls: the planner's choices, and those that were set by hand."""
    own = state["fields"]
    values = {name: getattr(plan, name, planner.GPU_SHARE) for name in OFFERED} | own
    shown = [name for name in OFFERED if name in own or plan and matters(plan, name)]
    return [OFFERED[name] | {"value": values[name], "yours": name in own} for name in shown]


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
    rows = [(*where, row.count, row.bytes_sent) for where, row in panels.traffic_of(seen).items()]
    found["traffic"] = [dict(zip(("axes", "kind", "count", "bytes"), row, strict=True)) for row in rows]
    if seen.timed:
        run = q.run(one.plan)
        found |= {"step_s": one.time.step_s, "terms": one.time.terms, "mfu": one.time.mfu(run)}
        found["tokens_per_s"] = run.tokens_per_step / one.time.step_s
    return found


def verdict(seen: Look) -> dict:
    """The answer first: whether it fits, how fast it is, what limits it, and what to do next."""
    q, found, fit = seen.question, numbers(seen), planner.verdict(seen.question, seen.one)
    tone, of = {"fits": "good", "does not fit": "bad"}.get(fit.words, "unsure"), size_text(fit.capacity_bytes)
    head = f"{fit.words.capitalize()}: {size_text(fit.total_bytes)} of {of} a device"
    out: dict[str, Any] = {"tone": tone, "head": f"{': '.join(filter(None, (head, fit.near)))}."}
    if not seen.timed:
        line = "Time is not predicted: simulated devices share one processor and have no links."
        return out | {"rest": "", "line": line, "steps": []}
    rate = f"{found['tokens_per_s']:,.0f} tokens/s · {found['mfu']:.1%} MFU"
    most = sorted(found["terms"].items(), key=lambda term: -term[1])[:2]
    names = ", then to ".join(f"{name} ({time_text(seconds)})" for name, seconds in most)
    line = f"Most time goes to {names}. {q.capacity_words[0].upper()}{q.capacity_words[1:]}."
    return out | {"rest": f"{time_text(found['step_s'])} a step · {rate}", "line": line, "steps": steps(seen)}


def steps(seen: Look) -> list[dict]:
    """What to do next: the best change of a field, that of the mesh, and the best of all known meshes, unless
    it is no faster than this one."""
    found, kinds = list[dict](), set[str]()
    for one in sorted(seen.around.steps.get(str(seen.shape), []), key=lambda one: one.sequence_s):
        if kinds.isdisjoint(one.patch):
            found.append(step(one.text, "apply", **one.patch))
            kinds |= {*one.patch}
    best, had = seen.around.best, math.inf if seen.one.why_not else seen.one.time.step_s
    if best and best.time.step_s < had * (1 - planner.SAME) and best.plan.mesh != seen.shape:
        mesh = str(best.plan.mesh)
        words = f"{mesh}: {size_text(best.total_bytes)}, {time_text(best.time.step_s)}"
        found = [one for one in found if one["set"] != {"mesh": mesh}]
        found.append(step(f"Best of {len(seen.around.meshes)}: {words}", "open", mesh=mesh))
    return found


def remedies(state: dict) -> list[dict]:
    """What would work in its place, on as many devices: the nearest mesh, a field given back to the planner,
    another batch."""
    try:
        state, shape = settle(state)
    except ValueError:
        state, shape = legible(state)
        mesh = str(shape) if works(state | {"mesh": str(shape)}) else nearest(state, shape, [shape.size])
        return [step(f"a mesh that works is {mesh}", "use it", mesh=mesh, devices=shape.size)] * bool(mesh)
    found = list[dict]()
    if near := nearest(state, shape, [shape.size]):
        found.append(step(f"the nearest mesh that works is {near}", "use it", mesh=near))
    for name in state["fields"]:
        if works(state | {"fields": {n: v for n, v in state["fields"].items() if n != name}}):
            words = f"it works with {name.replace('_', ' ')} as the planner chooses it"
            found.append(step(words, "use it", fields={name: None}))
    parts = shape.dp * shape.fsdp * shape.ep * max(1, state["fields"].get("microbatches") or 1)
    batch = -(-state["batch_size"] // parts) * parts
    if batch != state["batch_size"] and works(state | {"batch_size": batch}):
        found.append(step(f"this mesh works with {batch} sequences", "use it", batch_size=batch))
    return found


def legible(state: dict) -> tuple[dict, MeshShape]:
    """The number of devices of a state that cannot be read, or the one before where that is none, and its
    mesh: fsdp alone where none of that size is written."""
    right = lambda n: isinstance(n, int) and 1 <= n <= MOST
    num = next(filter(right, (state["devices"], state["agreed"])), START["devices"])
    state, shape = state | {"devices": num, "agreed": num}, MeshShape(fsdp=num)
    with contextlib.suppress(ValueError):
        written = settle(state)[1]
        shape = written if written.size == num else shape
    return state, shape


def elsewhere(state: dict) -> str:
    """In words, how many devices a mesh would work on, where none does on these; no button changes that."""
    try:
        state, shape = settle(state)
    except ValueError:
        state, shape = legible(state)
    n = shape.size
    fewer = sorted({*divisors(n), *(2**i for i in range(n.bit_length()))} - {n}, reverse=True)
    if works(state | {"mesh": str(shape)}) or nearest(state, shape, [n]):
        return ""
    if not (mesh := nearest(state, shape, fewer)):
        return ""
    return f"; no mesh of {n:,} devices that was tried works; on {parse_mesh(mesh).size:,}, {mesh} does"


def nearest(state: dict, shape: MeshShape, counts: list[int]) -> str | None:
    """The mesh that works and changes the asked one least: of as many devices as one of ``counts`` says, over
    the axes that it names or else over all. None where what is wrong is not the mesh."""
    named = shape.named
    every = named | {axis: 1 for axis in AXES if axis not in named}
    if not works(state | {"mesh": "dp=1", "devices": 1}):
        return None
    for axes, n in itertools.product((named, every), counts):
        near = near_meshes(axes, n) if axes and (n > 1 or axes is every) else []
        for mesh in [*near[:200], *(mesh for mesh in near[200:] if len(mesh.named) <= 3)]:
            if mesh != shape and works(state | {"mesh": str(mesh), "devices": n}):
                return str(mesh)
    return None
