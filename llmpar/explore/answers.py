"""The mesh explorer's answer to a state: all that a page shows, as plain data.

A notebook's kernel and a saved page give the same answers. `look` reads a state, `panels` draws it.
"""

import contextlib
import itertools
import math
from typing import Any

from llmpar.draw.grid import frames
from llmpar.draw.scene import Scene, size_text, time_text, to_svg
from llmpar.explore import panels
from llmpar.explore.look import (
    LIMITS,
    MODELS,
    MOST_DEVICES,
    OFFERED,
    START,
    View,
    own_machine,
    own_model,
    settle,
    view,
    works,
)
from llmpar.explore.words import estimated
from llmpar.files import Allowed
from llmpar.plan import checks
from llmpar.plan.mesh_shape import AXES, MeshShape, divisors, near_meshes, parse_mesh
from llmpar.plan.model_config import from_dict
from llmpar.plan.presets import near_presets, preset
from llmpar.planner import planner
from llmpar.predict import hardware, parameters
from llmpar.predict.digits import about, banded, rounded

Limits = dict[str, Allowed]
"""What values of a state may be, where their kind does not say it."""


def answer(state: dict, seconds: float = 0.0) -> dict:
    """Return all that a page shows of a state, after so many ``seconds`` of work on the meshes around it."""
    out = unanswered(state)
    if wrong := malformed(state, START, LIMITS):
        return out | wrong
    with contextlib.suppress(ValueError):  # of a chip that is none
        own = planner.machine(own_machine(state)[0])  # what an empty control stands for
        usual = {name: f"{round(own[name], 1):g}" for name in hardware.MACHINE}
        out["usual"] = usual | {"pinned": "none"}
    try:
        state, _ = settle(state)
        out["state"] = state
        seen = view(state)
    except ValueError as error:
        why, steps = f"{error}{elsewhere(state)}", remedies(state)
        says = "\n".join([f"refused: {why}", *(step["text"] for step in steps)])
        return out | refused(why, steps) | {"fields": fields(state, None), "says": says}
    done = seen.around.advance(state["mesh"], seen.one, seconds)
    drawn, verdict = panels.panels(seen), headline(seen)
    shown = lambda v: {"svg": to_svg(v, live=True)} if isinstance(v, Scene) else {"html": v}
    pictures = {name: shown(value) for name, value in drawn.items()}
    pictures["grid"]["html"] = panels.tensor_choice(seen)
    with estimated(seen):
        out["frames"] = frames(seen.segments)
    return out | {
        "verdict": verdict,
        "fields": fields(state, seen),
        "panels": pictures,
        "more": not done,
        "numbers": numbers(seen),
        "says": panels.says(seen, verdict, drawn),
    }


def unanswered(state: dict) -> dict[str, Any]:
    """Return an answer with nothing in it but the state."""
    empty: dict[str, Any] = {"fields": [], "panels": {}, "numbers": {}, "frames": [], "usual": {}}
    return {"asked": state, "state": state, "refusal": None, "verdict": None, "more": False} | empty


def refused(why: ValueError | str, steps: list[dict]) -> dict[str, Any]:
    """Return the part of an answer that refuses a state: why, and what would work."""
    return {"refusal": {"why": str(why), "steps": steps}}


def malformed(state: dict, start: dict, limits: Limits | None = None) -> dict[str, Any] | None:
    """Return the refusal of a state that has a value of another type than the start, as in a mistyped
    address, or outside its ``limits``; None if there is none."""
    wrong, why, limits = dict[str, Any](), list[str](), limits or {}
    for name, usual in start.items():
        what = limits.get(name) or Allowed(
            list if usual is None else type(usual), none=usual is None
        )
        try:
            what.check(name, state.get(name))
        except ValueError as error:
            wrong[name] = usual
            why.append(str(error))
    if not wrong:
        return None
    text = f"start with the usual {' and '.join(wrong)}"
    says = f"refused: {'; '.join(why)}\n{text}"
    return refused("; ".join(why), [offer(text, "use it", **wrong)]) | {"says": says}


def offer(text: str, do: str, /, **patch: Any) -> dict:
    """Return a button beside a verdict or a refusal: its text, its verb, and the fields that it sets."""
    return {"text": text, "do": do, "set": patch}


def more(state: dict) -> dict | None:
    """Return the same answer with more of the meshes around it; None where the state is refused."""
    reply = answer(state, 0.3)  # a click waits as long; a redraw takes that much, too
    return None if reply["refusal"] else reply


def fields(state: dict, seen: View | None) -> list[dict]:
    """Return the plan's other fields as controls: the planner's choices that decide something here, and
    those that were set by hand."""
    own, plan = state["fields"], seen and seen.one.plan
    values = {name: getattr(plan, name, planner.GPU_SHARE) for name in OFFERED} | own
    idle = checks.unused(seen.plan, OFFERED) if seen else OFFERED
    shown = [name for name in OFFERED if name in own or name not in idle]
    return [OFFERED[name] | {"value": values[name], "yours": name in own} for name in shown]


def numbers(seen: View) -> dict[str, Any]:
    """Return the numbers of an answer, as plain data."""
    q, one = seen.question, seen.one
    rows = [(*where, row.count, row.bytes_sent) for where, row in panels.traffic_of(seen).items()]
    out: dict[str, Any] = {
        "plan": planner.fields_of(one.plan) | {"mesh": str(one.plan.mesh)},
        "memory_bytes": one.memory_bytes,
        "room_bytes": q.capacity_bytes,
        "machine": planner.machine(q.chip),
        "traffic": [
            dict(zip(("axes", "kind", "count", "bytes"), row, strict=True)) for row in rows
        ],
    }
    if seen.timed:
        run = q.run(one.plan)
        out |= {
            "step_s": one.time.step_s,
            "terms": one.time.terms,
            "mfu": one.time.mfu(run),
            "step_s_band": q.band(one.time.step_s),
            "tokens_per_s": run.tokens_per_step / one.time.step_s,
            "versus": {
                name: {key: value for key, value in row.items() if key != "plans"}
                for name, row in panels.compared(seen).items()
            },
        }
    return out


def headline(seen: View) -> dict:
    """Return the verdict: whether it fits, how fast it is, what limits it, and what to do next."""
    q, values, fit = seen.question, numbers(seen), planner.memory_verdict(seen.question, seen.one)
    tone, of = (
        {"fits": "good", "does not fit": "bad"}.get(fit.words, "unsure"),
        size_text(fit.capacity_bytes),
    )
    head = f"{fit.words.capitalize()}: {size_text(fit.total_bytes)} of {of} a device"
    out: dict[str, Any] = {"tone": tone, "head": f"{': '.join(filter(None, (head, fit.near)))}."}
    if not seen.timed:
        line = "Time is not predicted: simulated devices share one processor and have no links."
        return out | {"rest": "", "line": line, "steps": []}
    most = sorted(values["terms"].items(), key=lambda term: -term[1])[:2]
    with estimated(seen):
        rates = f"{rounded(values['tokens_per_s']):,.0f} tokens/s · {100 * rounded(values['mfu']):.0f} % MFU"
        rest = banded(f"{time_text(values['step_s'])} a step · {rates}, each", q.time_error)
        names = ", then to ".join(f"{name} ({time_text(seconds)})" for name, seconds in most)
    line = f"Most time goes to {names}. {q.capacity_sum[0].upper()}{q.capacity_sum[1:]}."
    line += "".join(f" {note[0].upper()}{note[1:]}." for note in parameters.notes_on(q.config))
    return out | {"rest": rest, "line": line, "steps": steps(seen)}


def steps(seen: View) -> list[dict]:
    """Return what to do next: the best change of a field, that of the mesh, and the best of all known meshes,
    unless it is no faster than this one."""
    offers, changed = list[dict](), set[str]()
    for one in sorted(seen.around.steps.get(str(seen.shape), []), key=lambda one: one.sequence_s):
        if changed.isdisjoint(one.patch):
            offers.append(offer(one.text, "apply", **one.patch))
            changed |= {*one.patch}
    best = seen.around.best
    had = math.inf if seen.one.why_not else seen.one.time.step_s
    faster = best and best.time.step_s < had * (1 - planner.SAME) and best.plan.mesh != seen.shape
    if best and faster and seen.around.settled:
        mesh = str(best.plan.mesh)
        words = f"{mesh}: {size_text(best.total_bytes)}, {about(best.time.step_s)}"
        offers = [one for one in offers if one["set"] != {"mesh": mesh}]
        offers.append(
            offer(f"Best of {len(seen.around.meshes):,} meshes: {words}", "open", mesh=mesh)
        )
    if seen.around.complete and seen.around.points and not best:
        offers.append(_more_devices(seen))
    return offers


def _more_devices(seen: View) -> dict:
    """Offer as many times the devices and sequences as the mesh that holds least, of those of which none
    fits, lacks memory."""
    least = min(seen.around.points.values(), key=lambda one: one.total_bytes)
    times = 2 ** math.ceil(math.log2(least.total_bytes / seen.question.capacity_bytes))
    num = times * seen.shape.size
    batch = times * seen.state["batch_size"]
    of = f"None of {len(seen.around.meshes):,} meshes fits"
    words = f"{of}; {least.plan.mesh} holds least, {size_text(least.total_bytes)}"
    text = f"{words}. {num:,} devices and {batch:,} sequences may do"
    return offer(text, "try them", devices=num, batch_size=batch)


def remedies(state: dict) -> list[dict]:
    """Return what would work on as many devices: another model, the nearest mesh, a field given back to the
    planner, another batch."""
    if state["launch"].strip() and works(state | {"launch": "", "launched": 0}):
        return [offer("without the launch line", "leave it out", launch="")]
    if others := other_models(state):
        words = "without that configuration" if state["config"] else "in its place"
        patch: dict[str, Any] = {"config": ""}
        if not state["config"] and state["model"] in state["own"]:  # its dims are no model's
            patch["own"] = {}
        return [offer(f"{name} {words}", "use it", model=name, **patch) for name in others]
    if state["node_size"] and works(state | {"node_size": 0}):
        return [offer("it works with the chip's own nodes", "use them", node_size=0)]
    use = lambda text, **patch: [offer(text, "use it", **patch)]
    (state, shape), is_read = legible(state)
    near, own = nearest(state, shape, [shape.size]), state["fields"]
    if not is_read:
        mesh = str(shape) if works(state | {"mesh": str(shape)}) else near
        return use(f"a mesh that works is {mesh}", mesh=mesh, devices=shape.size) * bool(mesh)
    offers = use(f"the nearest mesh that works is {near}", mesh=near) * bool(near)
    for name in own:
        words = f"it works with {name.replace('_', ' ')} as the planner chooses it"
        offers += use(words, fields={name: None}) * works(state | {"fields": own | {name: None}})
    if len(own) > 1 and not offers and works(state | {"fields": {}}):
        words = "it works with all fields as the planner chooses them"
        offers += use(words, fields=dict.fromkeys(own))
    parts = shape.dp * shape.fsdp * shape.ep * max(1, own.get("microbatches") or 1)
    batch = -(-state["batch_size"] // parts) * parts
    if batch != state["batch_size"] and works(state | {"batch_size": batch}):
        offers += use(f"this mesh works with {batch} sequences", batch_size=batch)
    return offers


def other_models(state: dict) -> list[str]:
    """Return models to take where the state's model is refused: those of near names, and that of the sentence
    or the usual one."""
    name, text, own = state["model"], state["config"].strip(), state["own"]
    try:
        (
            own_model(text) if text else from_dict(own[name]) if name in own else preset(name)
        ).weights()
        return []
    except ValueError:
        near = [one for one in near_presets(text or name) if one in MODELS]
        kept = name if name in MODELS or text and name in own else START["model"]
        return [*dict.fromkeys([*near, kept])]


def legible(state: dict) -> tuple[tuple[dict, MeshShape], bool]:
    """Return a state in one spelling with its mesh, and whether it can be read. One that cannot has a number
    of devices that can (its own, or the one before), and fsdp alone where no mesh of that size is written."""
    with contextlib.suppress(ValueError):
        return settle(state), True
    right = lambda n: isinstance(n, int) and 1 <= n <= MOST_DEVICES
    num = next(filter(right, (state["devices"], state["agreed"])), START["devices"])
    state = state | {"devices": num, "agreed": num}
    shape = MeshShape(fsdp=num)
    with contextlib.suppress(ValueError):
        written = settle(state)[1]
        shape = written if written.size == num else shape
    return (state, shape), False


def elsewhere(state: dict) -> str:
    """Return in words how many devices a mesh would work on, where none works on these; no button changes
    that."""
    (state, shape), _ = legible(state)
    n = shape.size
    fewer = sorted({*divisors(n), *(2**i for i in range(n.bit_length()))} - {n}, reverse=True)
    if works(state | {"mesh": str(shape)}) or nearest(state, shape, [n]):
        return ""
    if not (mesh := nearest(state, shape, fewer)):
        return ""
    return f"; no mesh of {n:,} devices that was tried works; on {parse_mesh(mesh).size:,}, {mesh} does"


def nearest(state: dict, shape: MeshShape, counts: list[int]) -> str | None:
    """Return the mesh that works and differs least from the one of the state: of as many devices as one of
    ``counts`` says, over the axes that it names or else over all. None where the mesh is not what is
    wrong."""
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
