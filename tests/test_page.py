"""Python in the page: which part of the package needs nothing else, and what a saved page brings."""

import json
import subprocess
import sys
import types
import zlib

import pytest

from llmpar.draw.scene import DARK, LIGHT
from llmpar.explore import answers, look, page

# Another process, which sees nothing but the files that a page brings.
ALONE = """
import importlib, json, sys
BLOCKED = {"jax", "jaxlib", "flax", "numpy", "matplotlib", "anywidget", "traitlets", "jaxtyping"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
sys.path.insert(0, sys.argv[1])
for name in json.loads(sys.argv[2]):
    module = importlib.import_module(name)
    assert module.__file__.startswith(sys.argv[1]), module.__file__
from llmpar.explore import answers
print(json.dumps([answers.answer(state) for state in json.loads(sys.argv[3])]))
"""


def alone(folder, *args):
    """Run `ALONE` on the files of a page, without any installed package."""
    for path, text in page.rooms().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    asked = [sys.executable, "-I", "-S", "-c", ALONE, str(folder), *map(json.dumps, args)]
    return subprocess.run(asked, capture_output=True, text=True, timeout=120)


def modules():
    """Every module that a page brings, but for those that only a notebook asks for."""
    names = [path.removesuffix(".py").replace("/", ".") for path in page.rooms() if path.endswith(".py")]
    return [name.removesuffix(".__init__") for name in names if name != "llmpar.explore.widget"]


def test_what_a_page_brings_needs_neither_jax_nor_numpy_and_answers_the_same(tmp_path):
    states = [look.START | more for more in ({}, {"mesh": "pp=4 tp=2", "fields": {"microbatches": 8}})]
    look._around.cache_clear()  # what other tests have worked out
    done = alone(tmp_path, modules(), states)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps([answers.answer(state) for state in states]))
    rooms = {name.split(".")[1] for name in modules() if name.count(".") == 2}
    assert rooms == {"draw", "explore", "kernels", "predict"} and len(modules()) > 30


def test_a_module_that_needs_numpy_is_seen(tmp_path, monkeypatch):
    brought = page.rooms() | {"llmpar/draw/new.py": "import numpy"}
    monkeypatch.setattr(page, "rooms", lambda: brought)
    done = alone(tmp_path, ["llmpar.draw.new"], [])
    assert done.returncode and "numpy is blocked" in done.stderr
    del brought["llmpar/notation.py"]
    assert "llmpar.notation" in alone(tmp_path / "less", ["llmpar.plan"], []).stderr


class Two:
    """An explorer in miniature: two numbers, each a click away from its neighbours."""

    title, kind, given = "Two <numbers>", "two", None
    scene = types.SimpleNamespace(text="a & b")

    def answer(self, state):
        patches = [
            {"a": state["a"] + 1},
            {"fields": {"b": state["fields"].get("b", 0) + 1}},
            {"fields": {"b": None}},
        ]
        marks = "".join(f"<g data-set='{json.dumps(patch)}'></g>" for patch in patches)
        step = {"text": "ten", "do": "apply", "set": {"a": 10}}
        return {
            "asked": state,
            "state": state,
            "refusal": None,
            "verdict": {"steps": [step]},
            "panels": {"one": {"svg": marks}},
            "more": True,
        }

    def more(self, state):
        return self.answer(state) | {"more": False, "complete": True}

    def document(self):
        state = {"a": 1, "fields": {"b": 2}}
        own = {"kind": self.kind, "state": state, "answer": self.answer(state), "stored": []}
        return own | {"theme": {"light": LIGHT, "dark": DARK}}


def test_a_small_page_knows_what_is_one_click_away(monkeypatch):
    two = Two()
    found = page.nearby(two, two.document())
    asked = [answer["asked"] for answer in found]
    assert found[0]["complete"] and asked[0] == {"a": 1, "fields": {"b": 2}}
    assert asked[1:] == [
        {"a": 10, "fields": {"b": 2}},
        {"a": 2, "fields": {"b": 2}},
        {"a": 1, "fields": {"b": 3}},
        {"a": 1, "fields": {}},
    ]
    monkeypatch.setattr(page, "MOST", 600)
    fewer = page.nearby(two, two.document())
    room = sum(len(zlib.compress(json.dumps(answer).encode())) for answer in fewer[1:])
    assert 1 < len(fewer) < len(found) and room <= 600


def test_without_python_for_the_browser_a_page_says_what_would_help(monkeypatch, tmp_path):
    monkeypatch.setattr(page, "RUNTIME", tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"not installed here; make it with 'make runtime' .*small=True"):
        page.html(Two())
