"""Explorers: pictures with controls, in a notebook, in VS Code, and as one HTML page that needs neither.

    MeshExplorer      who holds what, who talks with whom, what a step holds and sends; or an array's sharding
    (llmpar.explore.small: pipelines and experts, on the same machinery)

Each has a ``state`` (a dict), which `set` changes; a static twin, which is what a committed notebook keeps;
and ``rich``, drawn in the browser (an anywidget).
"""

from __future__ import annotations

import base64
import html
import itertools
import json
from pathlib import Path
from typing import Any

try:
    import anywidget
    import traitlets
except ModuleNotFoundError as error:
    lacks = f"explorers need {error.name}, which is not installed"
    raise ImportError(f"{lacks}; pip install 'llmpar[lab]'") from error

from llmpar import __version__
from llmpar.draw.charts import PARTS
from llmpar.draw.scene import DARK, LIGHT, Scene, compose, to_png, to_svg
from llmpar.explore import answers
from llmpar.inspect.shardings import shardings, shardings_scene
from llmpar.notation import AXES

STATIC = Path(__file__).parent / "static"
MODULE = STATIC / "explorer.js"
PAGE = (STATIC / "page.html").read_text(encoding="utf-8")


class _Rich(anywidget.AnyWidget):
    _esm = MODULE
    doc = traitlets.Dict().tag(sync=True)
    state = traitlets.Dict().tag(sync=True)
    answer = traitlets.Dict().tag(sync=True)
    tensors: Any = traitlets.List(allow_none=True, default_value=None).tag(sync=True)


class State(dict):
    """What a reader chose. It is changed with `Explorer.set`, which tells every front end."""

    def __setitem__(self, name, value):
        raise TypeError(
            f"a state is changed with set({name}={value!r}), so that what is on the screen follows"
        )


class Explorer:
    """A picture with controls. The arguments change where the reader starts."""

    title, kind = "", "figure"
    view: tuple[str, ...] = ()
    start: dict[str, Any] = {}
    controls: list[dict] = []

    def __init__(self, **state):
        self.state = State(self.start)
        self._rich: _Rich | None = None
        self.set(**state)

    def set(self, **state) -> None:
        """Change the state, here and in every front end that is open."""
        if unknown := sorted(set(state) - set(self.start)):
            own = f"{type(self).__name__} has no {', '.join(unknown)}"
            raise ValueError(f"{own}; it has {', '.join(self.start)}")
        self.state = State(self.state | state)
        if self._rich:
            self._rich.state = dict(self.state)

    # ----------------------------------------------------------------------------------- what a subclass says

    def draw(self, state: dict) -> Scene:
        """The picture of a state; ValueError where there is none."""
        raise NotImplementedError

    def key(self, state: dict) -> str:
        """What an answer belongs to."""
        return "|".join(map(str, state.values()))

    def answer(self, state: dict) -> dict:
        """What the browser shows for a state, as plain data."""
        found = {"key": self.key(state), "refusal": "", "svg": "", "note": ""}
        try:
            drawn = self.draw(state)
            return found | {"svg": to_svg(drawn), "says": drawn.text}
        except ValueError as error:
            return found | {"refusal": str(error), "says": str(error)}

    def states(self) -> list[dict]:
        """The states that an exported page can answer: this one, each choice of one control, then of two."""
        choices = {c["name"]: self.choices(c) for c in self.controls}
        choices = {name: values for name, values in choices.items() if len(values) > 1}
        out = {self.key(self.state): dict(self.state)}
        for names in [*itertools.combinations(choices, 1), *itertools.combinations(choices, 2)]:
            for values in itertools.product(*(choices[name] for name in names)):
                state = self.state | dict(zip(names, values, strict=True))
                out.setdefault(self.key(state), state)
        return list(out.values())

    def stored(self) -> dict:
        """What makes the document of an exported page: answers by key (all that differ in one control, others
        up to a megabyte of pictures), and for each control the choices that they cover. One without another
        choice does nothing there, and the page says its value instead."""
        answers, states, size = dict[str, dict](), list[dict](), 0
        for state in self.states():
            reply = self.answer(state)
            far = sum(state[name] != value for name, value in self.state.items()) > 1
            if (size := size + len(reply.get("svg", ""))) > 1_000_000 and far:
                break
            answers[reply["key"]] = reply
            states.append(state)
        values = {name: list(dict.fromkeys(state[name] for state in states)) for name in self.state}
        return {"answers": answers, "controls": [c | {"stored": values[c["name"]]} for c in self.controls]}

    def choices(self, control: dict) -> list:
        """The values of a control that an exported page can show."""
        if control["kind"] == "slider":
            return list(range(control["min"], control["max"] + 1, control.get("step", 1)))
        return control.get("options", [False, True] if control["kind"] == "flag" else [])

    # --------------------------------------------------------------------------------------------- front ends

    @property
    def scene(self) -> Scene:
        """The static twin: the picture, or the refusal where there is none."""
        try:
            return self.draw(self.state)
        except ValueError as error:
            return compose(self.title, [], str(error), str(error).splitlines())

    def document(self) -> dict:
        """What the browser needs once: controls, colours, where to start."""
        own: dict[str, Any] = {"kind": self.kind, "title": self.title, "view": list(self.view)}
        own |= {"controls": self.controls, "state": dict(self.state)}
        return own | {"theme": {"light": LIGHT, "dark": DARK}, "parts": PARTS, "version": __version__}

    @property
    def rich(self) -> anywidget.AnyWidget:
        """The front end that is drawn in the browser."""
        if self._rich is None:
            self._rich = _Rich(doc=self.document(), state=dict(self.state), answer=self.answer(self.state))
            self._rich.observe(self._changed, "state")
            self._rich.on_msg(self._message)
        return self._rich

    def _changed(self, change) -> None:
        self.state = State((name, change["new"].get(name, value)) for name, value in self.state.items())
        assert self._rich is not None
        if self.key(self.state) != self._rich.answer["key"]:
            self._rich.answer = self.answer(self.state)

    def _message(self, _, message, __) -> None:
        if isinstance(message, dict) and message.get("export") == "html" and self._rich:
            self._rich.send({"html": self.html()})

    def html(self) -> str:
        """One page that works without a kernel and a network; it knows what `stored` gives, and says so."""
        doc = json.dumps(self.document() | self.stored()).replace("<", "\\u003c")
        module = MODULE.read_text(encoding="utf-8").partition("export default")[0]
        words = {"title": html.escape(self.title), "text": html.escape(self.scene.text)}
        return PAGE.format(**words, doc=doc, module=module, light=LIGHT["paper"], dark=DARK["paper"])

    def save(self, path: str | Path) -> None:
        """Write ``.html`` (interactive), ``.svg`` or ``.png`` (the static twin)."""
        if Path(path).suffix == ".html":
            Path(path).write_text(self.html(), encoding="utf-8")
        else:
            self.scene.save(path)

    def __repr__(self) -> str:
        return self.scene.text

    def _repr_mimebundle_(self, include=None, exclude=None):
        """The live front end, and beside it the PNG and the text that stay in a stored notebook."""
        still = self.scene
        live: Any = self.rich._repr_mimebundle_()
        data = dict(live[0] if isinstance(live, tuple) else live or {})
        data |= {"image/png": base64.b64encode(to_png(still)).decode(), "text/plain": still.text}
        return data, {"image/png": {"width": still.width}}


# --------------------------------------------------------------------------------------------------- the mesh


class MeshExplorer(Explorer):
    """Who holds what, and what moves, on any mesh of the six axes; no hardware and no arrays are needed.

    >>> MeshExplorer(mesh="fsdp=8 tp=8", model="llama3-70b", chip="h100")
    """

    title, kind, view = "Mesh explorer", "mesh", answers.VIEW
    start, controls = answers.START, answers.CONTROLS
    _given: dict[str, Any] | None = None  # what `of` read from an array or a program

    @classmethod
    def of(cls, value) -> MeshExplorer:
        """The shardings of a live array, or of a tree of them."""
        self = cls()
        self._given = shardings(value)
        self.title = self._given["title"]
        self.set(tensor=self._given["tensors"][0]["name"])
        return self

    def document(self) -> dict:
        kinds = {
            "weight": "weights (float32)",
            "moments": "two moments (float32)",
            "batch": "batch (int32)",
            "gradient": "gradients (float32)",
            "activation": "activations, one layer",
        }
        doc = super().document() | {"axes": AXES, "kinds": kinds, "most": answers.MOST}
        return doc | {"shapes": answers.SHAPES} | (self._given or {"tensors": self.tensors(self.state)})

    def tensors(self, state: dict) -> list[dict]:
        """What a step holds; nothing where the state is refused (the answer says why)."""
        try:
            return answers.tensors(state)
        except ValueError:
            return []

    def key(self, state: dict) -> str:
        return answers.key(state)

    def answer(self, state: dict) -> dict:
        if self._given:
            same = {"traffic": None, "memory": [], "node": self._given["node"], "key": answers.key(state)}
            return same | {"refusal": None, "time": None, "code": "", "says": self.scene.text}
        return answers.answer(state)

    def states(self) -> list[dict]:
        return [dict(self.state)] if self._given else answers.neighbours(dict(self.state))

    def draw(self, state: dict) -> Scene:
        return shardings_scene(self._given, state) if self._given else answers.scene(state)

    def _changed(self, change) -> None:
        new = self.state | change["new"]
        others = any(change["old"][name] != new[name] for name in answers.SHAPES)
        if self._rich and not self._given and others:
            self._rich.tensors = self.tensors(new)  # before the answer that speaks of them
        super()._changed(change)
