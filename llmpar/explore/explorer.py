"""Explorers: pictures with controls, in a notebook and as one HTML page that needs none.

    MeshExplorer      train a model on a mesh: what it holds, sends and takes; or an array's sharding
    (llmpar.explore.small: pipelines, experts, rings, memory and overlap, on the same machinery)

Each has a ``state`` (a dict), which `set` changes, and an answer to every state: plain data with pictures in
it, which a browser shows. In a notebook the kernel answers, in a saved page the Python that is in the page.
"""

import base64
import contextlib
import dataclasses
import importlib
import json
import os
from pathlib import Path
from typing import Any

from llmpar import __version__
from llmpar.draw.scene import DARK, LIGHT, Scene, compose, to_png, to_svg
from llmpar.explore import answers, look, panels
from llmpar.files import Allowed
from llmpar.plan.presets import PRESETS
from llmpar.predict import hardware

_SMALL = ("timeline", "routing", "memory", "overlap", "ring", "sum", "transfer")
CALCULATORS = {
    "mesh": "mesh",
    "memory": "memory",
    "sum": "collectives",
    "timeline": "schedules",
    "specs": "layouts",
    "hlo": "hlo",
}
"""The page of the site (LLMPAR_SITE) that shows a kind, whose address a saved page's link has."""
EXPLORERS = {
    "mesh": "explorer",
    "given": "given",
    "specs": "texts",
    "hlo": "texts",
} | dict.fromkeys(_SMALL, "small")
"""Where the explorer of each kind is, what a page asks for: `RingExplorer` is in the file `small`."""


class _State(dict):
    """What a reader chose. It is changed with `Explorer.set`, which tells every front end."""

    def __setitem__(self, name, value):
        raise TypeError(
            f"a state is changed with set({name}={value!r}), so that what is on the screen follows"
        )


class Explorer:
    """A picture with controls. The arguments change where the reader starts."""

    title, kind, sentence = "", "", ""
    start: dict[str, Any] = {}
    controls: list[dict[str, Any]] = []
    areas: list[list[str]] = [["picture", "", "middle"]]
    limits: answers.Limits = {}
    # what `by_kind` makes it of: what was read from an array, the one control; plain data
    given: Any = None

    def __init__(self, **state):
        self.state = _State(self.start)
        self._rich: Any = None
        self.set(**state)

    def set(self, **state) -> None:
        """Change the state, here and in every front end that is open."""
        if unknown := sorted(set(state) - set(self.start)):
            raise ValueError(
                f"{type(self).__name__} has no {', '.join(unknown)}; it has {', '.join(self.start)}"
            )
        self.take(self.state | state)
        if self._rich:
            self._rich.state = dict(self.state)

    def take(self, state: dict) -> None:
        """Take the state that a front end has now."""
        self.state = _State({name: state.get(name, value) for name, value in self.state.items()})

    def draw(self, state: dict) -> Scene:
        """Draw the picture of a state. Raise ValueError where there is none."""
        raise NotImplementedError

    def answer(self, state: dict) -> dict:
        """Return all that a front end shows of a state, as plain data."""
        reply = answers.unanswered(state)
        if wrong := self.malformed(state):
            return reply | wrong
        try:
            drawn = self.draw(state)
        except ValueError as error:
            return reply | answers.refused(error, []) | {"says": str(error)}
        shown = {"panels": {"picture": {"svg": to_svg(drawn)}}, "says": drawn.text}
        return self.completed(state, reply | shown)

    def completed(self, state: dict, reply: dict) -> dict:
        """Return an answer that has the picture with what stands beside that."""
        return reply

    def malformed(self, state: dict) -> dict | None:
        """Return the refusal of a state that cannot be read, as with a word that a choice does not offer;
        None if it can."""
        choices = ((c["name"], tuple(c.get("options", ()))) for c in self.controls)
        known = {
            name: Allowed(str, choices=words) for name, words in choices if str in map(type, words)
        }
        return answers.malformed(state, self.start, known | self.limits)

    def more(self, state: dict) -> dict | None:
        """Return a more complete answer to the same state; None where there is none."""
        return None

    def stored(self) -> list[dict]:
        """Return the states whose answers a document brings along, besides the first: where choices are few,
        all."""
        return []

    @property
    def scene(self) -> Scene:
        """Draw the picture without controls, or the refusal where there is none."""
        try:
            return self.draw(self.state)
        except ValueError as error:
            return compose(self.title, [], str(error), str(error).splitlines())

    def document(self) -> dict:
        """Return all that a browser needs once: the form, colours, the state at the start, and the first
        answer."""
        site = os.environ.get("LLMPAR_SITE", "").rstrip("/")
        page = CALCULATORS.get(self.kind)
        return {
            "kind": self.kind,
            "title": self.title,
            "version": __version__,
            "sentence": self.sentence,
            "site": f"{site}/calculators/{page}.html" if site and page else "",
            "theme": {"light": LIGHT, "dark": DARK},
            "controls": self.controls,
            "panels": self.areas,
            "state": dict(self.state),
            "answer": self.answer(dict(self.state)),
            "live": False,
            "stored": [self.answer(state) for state in self.stored()],
        }

    @property
    def rich(self) -> Any:
        """Return the front end that is drawn in the browser: an anywidget."""
        if self._rich is None:
            from llmpar.explore.widget import Widget

            self._rich = Widget(self)
        return self._rich

    def save(self, path: str | Path, small: bool = False) -> None:
        """Write ``.html`` (a page that answers by itself; ``small``: one for mail, that knows the states one
        click away), ``.svg`` or ``.png`` (the static twin)."""
        from llmpar.explore import page

        if Path(path).suffix == ".html":
            Path(path).write_text(page.html(self, small), encoding="utf-8")
        else:
            self.scene.save(path)

    def __repr__(self) -> str:
        return self.scene.text

    def _repr_mimebundle_(self, include=None, exclude=None):
        """Return the live front end, and beside it what stays in a stored notebook: the PNG, the text, and of
        which explorer they are, so that an export can make it anew (`by_kind`)."""
        still = self.scene
        live: Any = self.rich._repr_mimebundle_()
        data = dict(live[0] if isinstance(live, tuple) else live or {})
        data |= {"image/png": base64.b64encode(to_png(still)).decode(), "text/plain": still.text}
        about = {"kind": self.kind, "given": self.given, "state": dict(self.state)}
        return data, {"image/png": {"width": still.width, "explorer": about}}


class MeshExplorer(Explorer):
    """Train a model on a mesh of the six axes: whether it fits, how long a step takes, which device holds
    what, what moves, and what would be better; no hardware and no arrays are needed.

    Fields of `llmpar.Plan` that are given are set by hand; the planner chooses the others.

    >>> MeshExplorer(mesh="fsdp=8 tp=8", model="llama3-70b", chip="h100", batch_size=64, remat="block")
    """

    title, kind, sentence = "Mesh explorer", "mesh", look.SENTENCE
    start, controls, areas = look.START, look.CONTROLS, panels.AREAS

    def set(self, **state) -> None:
        by_hand = {name: state.pop(name) for name in [*state] if name in look.OFFERED}
        if (
            (model := state.get("model"))
            and model not in PRESETS
            and model not in self.state["own"]
        ):
            state |= {"model": look.START["model"], "config": model}
        elif model:
            state = {"config": ""} | state
        if str(state.get("chip", "")).endswith(".toml"):
            chip = hardware.chip(state["chip"])
            row = json.loads(json.dumps(dataclasses.asdict(chip)))
            state |= {"chip": chip.name, "own_chips": self.state["own_chips"] | {chip.name: row}}
        if by_hand:
            state["fields"] = self.state["fields"] | state.get("fields", {}) | by_hand
        if not set(state) - set(self.start):
            with contextlib.suppress(ValueError):  # `answer` says why
                state = look.settle(self.state | state)[0]
        super().set(**state)

    @classmethod
    def of(cls, value: Any, shape: Any = None, dtype: Any = "float32") -> Explorer:
        """Return an explorer of what exists: how arrays are sharded, what a compiled program takes, a mesh or
        a sharding; of a sharding alone with the ``shape`` and ``dtype`` of an array that has it."""
        from llmpar.inspect.shardings import shardings

        return by_kind("given", shardings(value, shape, dtype))

    def answer(self, state: dict) -> dict:
        return answers.answer(state)

    def more(self, state: dict) -> dict | None:
        return answers.more(state)

    def draw(self, state: dict) -> Scene:
        seen = look.view(look.settle(state)[0])
        return panels.scene(seen, answers.headline(seen), self.areas)


def by_kind(kind: str, given: Any = None, state: dict | None = None) -> Explorer:
    """Return the explorer of a kind, in a ``state``, as a page asks for it."""
    module = importlib.import_module(f"llmpar.explore.{EXPLORERS[kind]}")
    made = getattr(module, f"{kind.capitalize()}Explorer")
    explorer = made(given) if given is not None else made()
    explorer.take(state or explorer.state)
    return explorer
