"""A model for the browser's side alone: fixed answers, as the contract of `llmpar.explore` has them."""

import json
import math

from shared import HERE

from llmpar.draw.scene import DARK, LIGHT, Group, Line, Rect, Scene, Text, to_svg

AXES = ("fsdp", "tp")
TOLD = json.loads((HERE / "fixtures" / "told.json").read_text())
ORDER, START = TOLD["order"], TOLD["start"]


def scene(width, height, title, items):
    return to_svg(Scene(width, height, title, title, tuple(items)), live=True)


def grid(state, sizes):
    items, columns = [], sizes["tp"]
    w = max(12, 480 // columns)
    for i in range(state["devices"]):
        x, y, chosen = w * (i % columns) + 8, 24 * (i // columns) + 8, i == state["device"]
        look, act = ("ink", 3) if chosen else ("edge", 1), json.dumps({"device": i})
        items.append(Rect(x, y, w - 4, 20, "cell", *look, tip=f"device {i}", act=act))
        items += [Rect(x + 2, y + 6, 8, 8, "tp"), Text(x + w / 2, y + 10, str(i), 10, "middle")]
    title = f"{state['devices']} devices, device {state['device']} chosen"
    return scene(500, 24 * (state["devices"] // columns) + 16, title, items)


def layer(state):
    items = []
    for i, name in enumerate(("gather", "compute", "sum")):
        items.append(Rect(8 + 120 * i, 8, 110, 24, "ep", "edge", tip=name))
    for k in range(3):
        now = 16 + 120 * k
        marks = Line(((now, 2), (now, 38)), "ink", 2), Text(now + 4, 48, f"now {k}", 11)
        items.append(Group(marks, frame=k))
    return scene(500, 60, "one layer", items)


def timetable(state):
    """Two rows of operations that can be dragged."""
    rows = [row.split() for row in (state["order"] or ORDER).splitlines()]
    items = [
        Rect(8 + 60 * i, 8 + 32 * s, 56, 26, "cell", "edge", tip=f"stage {s}, {op}", op=f"{s}:{i}")
        for s, row in enumerate(rows)
        for i, op in enumerate(row)
    ]
    return scene(500, 80, "timetable", items)


def ways(state):
    items = []
    for i, f in enumerate((1, 2, 4, 8)):
        mesh = f"fsdp={f} tp={8 // f}"
        act = json.dumps({"mesh": mesh})
        items.append(Rect(20 + 40 * i, 200 - 20 * i, 10, 10, "fsdp", "edge", tip=mesh, act=act))
    return scene(390, 240, "all ways", items)


def answer(state, more=False):
    """The answer to a state; with ``more``, the complete one."""
    out = {"asked": state, "state": state, "refusal": None, "verdict": None, "fields": [], "panels": {}}
    out |= {"frames": [], "numbers": {"order": ORDER}, "says": "", "more": False}
    state = dict(state)
    if state["move"]:
        s, i, j = state["move"]
        rows = [row.split() for row in (state["order"] or ORDER).splitlines()]
        rows[s].insert(j, rows[s].pop(i))
        state |= {"order": "\n".join(map(" ".join, rows)), "move": None}
    try:
        given = [word.split("=") for word in state["mesh"].split()]
        sizes = dict.fromkeys(AXES, 1) | {axis: int(n) for axis, n in given}
        if set(sizes) != set(AXES):
            raise ValueError
    except ValueError:
        why = f"mesh '{state['mesh']}' cannot be read\n  {state['mesh']}\n  ^"
        steps = [{"text": "use fsdp=8", "do": "apply", "set": {"mesh": "fsdp=8", "devices": 8}}]
        return out | {"refusal": {"why": why, "steps": steps}}
    state |= {"mesh": " ".join(f"{a}={n}" for a, n in sizes.items()), "devices": math.prod(sizes.values())}
    fits = sizes["fsdp"] > 2
    steps = [{"text": "fsdp=8: 29.1 GiB, 5.65 s", "do": "apply", "set": {"mesh": "fsdp=8"}}] * (not fits)
    verdict = {"tone": "good" if fits else "bad", "head": "Fits." if fits else "Does not fit."}
    verdict |= {"rest": "6.13 s a step"}
    verdict |= {"line": "Most time goes to matmuls.", "steps": steps}
    zero = {"name": "zero", "label": "ZeRO stage", "kind": "choice", "options": [0, 1, 3]}
    parts = {"name": "microbatches", "label": "microbatches", "kind": "int", "min": 1}
    own = state["fields"]
    fields = [c | {"value": own.get(c["name"], 1), "yours": c["name"] in own} for c in (zero, parts)]
    rows = ""
    for i in range(4):
        button = f"<button type='button' data-set='{json.dumps({'device': i})}'>device {i}</button>"
        rows += f"<tr><th scope='row'>{button}</th><td>{i} GiB</td></tr>"
    act = json.dumps({"mesh": "fsdp=8"})
    more_fsdp = Rect(80, 10, 20, 20, "cell", "edge", tip="fsdp 8", act=act, live=True)
    form = [more_fsdp, Text(86, 20, "+", 13, live=True)]
    axes = scene(330, 60, "axes", [Text(8, 20, "fsdp 4", 13), Text(8, 40, "tp 2", 13), *form])
    tensor = (
        "<label><b>Block of</b> <select><option>gate</option><option selected>up</option></select></label>"
    )
    held = f"<details><summary>formula</summary>2 x 3</details><table><tbody>{rows}</tbody></table>"
    whole = f"{state['devices']} devices"
    panels = {
        "axes": {"svg": axes, "note": "Six axes."},
        "grid": {"svg": grid(state, sizes), "html": tensor, "title": whole, "note": "Dashed: a node."},
        "layer": {"svg": layer(state)},
        "times": {"svg": timetable(state)},
        "holds": {"html": held},
        "code": {"html": f"<pre>Plan('{state['mesh']}')</pre>"},
    }
    if more:
        panels["map"] = {"svg": ways(state)}
    frames = [{"seconds": s, "text": f"instant {k}"} for k, s in enumerate((0.1, 0.5, 0.2))]
    out |= {"state": state, "verdict": verdict, "fields": fields, "panels": panels, "frames": frames}
    return out | {"says": verdict["head"], "more": not more}


def document(**state):
    """What a page or a widget gets once."""
    state = START | state
    doc = {"kind": "told", "title": "A told explorer", "version": "0"}
    doc |= {"theme": {"light": LIGHT, "dark": DARK}}
    doc |= {name: TOLD[name] for name in ("sentence", "controls", "panels")} | {"live": True, "stored": []}
    return doc | {"state": state, "answer": answer(state)}
