"""Python in the page: which part of the package needs nothing else, and what a saved page brings."""

import itertools
import json
import math
import random
import re
import subprocess
import sys
import types
import zlib

import pytest
import shared

from llmpar.draw.scene import DARK, LIGHT
from llmpar.explore import page
from llmpar.explore.explorer import KINDS, by_kind
from llmpar.notation import AXES

MESH = by_kind("mesh")
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
from llmpar.explore.explorer import by_kind
print(json.dumps([by_kind("mesh").answer(state) for state in json.loads(sys.argv[3])]))
"""


def alone(folder, *args):
    """Run `ALONE` on the files of a page, without any installed package."""
    for path, text in page.rooms().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    asked = [sys.executable, "-I", "-S", "-c", ALONE, str(folder), *map(json.dumps, args)]
    return subprocess.run(asked, capture_output=True, text=True, timeout=120)


def modules():
    """Every module that a page brings."""
    names = [path.removesuffix(".py").replace("/", ".") for path in page.rooms() if path.endswith(".py")]
    return [name.removesuffix(".__init__") for name in names]


def test_what_a_page_brings_needs_neither_jax_nor_numpy_and_answers_the_same(tmp_path):
    start = dict(MESH.state)
    states = [start | more for more in ({}, {"mesh": "pp=4 tp=2", "fields": {"microbatches": 8}})]
    done = alone(tmp_path, modules(), states)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps([MESH.answer(state) for state in states]))
    rooms = {name.split(".")[1] for name in modules() if name.count(".") == 2}
    assert rooms == {"draw", "exercises", "explore", "kernels", "predict"} and len(modules()) > 30


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


def test_a_small_page_is_one_file_that_mail_takes():
    text = page.html(MESH, small=True)
    assert 100_000 < len(text.encode()) < 2_000_000 and '"live": false' in text
    assert not re.search(r"""(?:src|href|import|from|url)[=(\s]*["']?\s*(?:https?:)?//""", text)


def test_without_python_for_the_browser_a_page_says_what_would_help(monkeypatch, tmp_path):
    monkeypatch.setattr(page, "RUNTIME", tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"not installed here \(in the project's sources 'make .*small=True"):
        page.html(Two())


# ---------------------------------------------------------------------------------------------- in a browser

STATES = 200  # a portion; all of them are 50 portions
PORTIONS = [0, *(pytest.param(k, marks=pytest.mark.full) for k in range(1, 50))]
SPLIT = re.compile(r"(-?\d[\d,]*(?:\.\d+)?)")  # numbers in a text


@pytest.fixture(scope="module")
def chromium():
    with shared.chromium("--disable-background-networking", "--disable-dev-shm-usage") as browser:
        yield browser


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Whole pages on this disk, by the explorer's kind."""
    if not page.runtime():
        pytest.skip("Python for the browser is not here; run make runtime")
    folder = tmp_path_factory.mktemp("pages")

    def save(kind):
        path = folder / f"{kind}.html"
        if not path.exists():
            by_kind(kind).save(path)
        return path

    return save


@pytest.fixture
def opened(chromium):
    """Open a page without a network. It may ask for nothing but itself, and say nothing on the console."""
    context = chromium.new_context(offline=True, viewport={"width": 1280, "height": 900})
    shown, faults = context.new_page(), []
    shown.on("console", lambda message: faults.append(message.text))
    shown.on("pageerror", lambda error: faults.append(str(error)))

    def open_page(path, until="awake"):
        own = ("data:", path.as_uri())
        shown.on("request", lambda one: None if one.url.startswith(own) else faults.append(one.url))
        shown.goto(path.as_uri())
        if until:
            asked = f"document.documentElement.dataset.python === '{until}'"
            shown.wait_for_function(asked, timeout=90_000)
        return shown

    yield open_page
    context.close()
    assert faults == []


def ask(shown, states):
    """What the page's Python answers, one state after the other; of an error its text."""
    asked = """async (states) => {
        const found = [];
        for (const state of states) found.push(await llmpar.ask(state).catch((error) => String(error)));
        return found;
    }"""
    return shown.evaluate(asked, states)


def unequal(ours, theirs, at=""):
    """Where two answers differ: numbers by more than 1e-12, or texts, whose numbers may differ in the last
    digit that is shown (Python 3.12 and later sums floats more exactly)."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        return [one for key in ours for one in unequal(ours[key], theirs[key], f"{at}.{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [
            one
            for i, pair in enumerate(zip(ours, theirs, strict=True))
            for one in unequal(*pair, f"{at}.{i}")
        ]
    if isinstance(ours, float) or isinstance(theirs, float):
        return [] if math.isclose(ours, theirs, rel_tol=1e-12, abs_tol=1e-300) else [f"{at}: {ours} {theirs}"]
    if isinstance(ours, str) and isinstance(theirs, str):
        pairs = itertools.zip_longest(SPLIT.split(ours), SPLIT.split(theirs), fillvalue="")
        return [f"{at}: {a!r} {b!r}" for a, b in pairs if a != b and not last_digit(a, b)]
    return [] if ours == theirs else [f"{at}: {ours} {theirs}"]


def last_digit(ours, theirs):
    """Whether two texts are numbers that differ by at most one in the last digit that is shown."""
    if not (SPLIT.fullmatch(ours) and SPLIT.fullmatch(theirs)):
        return False
    digits = max(len(text.partition(".")[2]) for text in (ours, theirs))
    a, b = (float(text.replace(",", "")) for text in (ours, theirs))
    return abs(a - b) <= 1.01 * 10.0**-digits


def test_the_comparison_sees_a_number_and_a_word():
    assert unequal({"a": [1.0, "fits: 3.1 GiB"]}, {"a": [1.0 + 1e-15, "fits: 3.2 GiB"]}) == []
    assert len(unequal({"a": [1.0, "fits: 3.1 GiB"]}, {"a": [1.0 + 1e-11, "fits: 3.4 GiB"]})) == 2
    assert unequal({"a": "fits"}, {"a": "fit"}) and unequal({"a": 1}, {"b": 1}) and unequal([1], [1, 2])


def some_states(seed, count):
    """States as readers reach them: any model, chip, mesh, batch, and fields of the plan set by hand."""
    rng, start = random.Random(seed), dict(MESH.state)
    options = {c["name"]: c["options"] for c in MESH.controls if "options" in c}
    offered = [f for f in MESH.answer(start)["fields"] if f["kind"] in ("choice", "flag", "int")]
    for _ in range(count):
        state = start | {name: rng.choice(values) for name, values in options.items()}
        sizes = {axis: 2 ** rng.choice([0, 0, 0, 1, 1, 2, 3]) for axis in rng.sample(list(AXES), 3)}
        mesh = " ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "dp=1"
        devices = math.prod(sizes.values())
        state |= {"mesh": mesh, "devices": devices, "agreed": devices, "device": rng.randrange(devices)}
        state |= {"batch_size": devices * rng.choice([1, 2, 4, 6])}
        state |= {"seq_len": rng.choice([1024, 4096, 8192, 10_000])}
        by_hand = {}
        for field in rng.sample(offered, rng.choice([0, 0, 1, 2])):
            values = field.get("options") or {"flag": [False, True]}.get(field["kind"], [1, 2, 4, 8])
            by_hand[field["name"]] = rng.choice(values)
        yield state | {"fields": by_hand}


@pytest.mark.browser
@pytest.mark.parametrize("portion", PORTIONS)
def test_the_pages_python_answers_any_state_as_ours_does(saved, opened, portion):
    shown, states = opened(saved("mesh")), list(some_states(portion, STATES))
    theirs = ask(shown, states)
    ours = [json.loads(json.dumps(MESH.answer(state))) for state in states]
    assert sum(not answer["refusal"] for answer in ours) > STATES / 4
    different = [
        (state, *found)
        for state, *pair in zip(states, ours, theirs, strict=True)
        if (found := unequal(*pair))
    ]
    assert not different, different[:3]


def moves():
    """Every single move from where the explorer starts: each value of each control and of each field of the
    plan, numbers halved and doubled, and what can be clicked."""
    start = dict(MESH.state)
    answer = MESH.answer(start)
    found = page.offered(answer)
    for control in MESH.controls:
        name, now = control["name"], start[control["name"]]
        numbers = [now // 2, 2 * now] if control["kind"] == "int" else []
        found += [{name: value} for value in control.get("options", numbers)]
    found += [{"mesh": f"{axis}={n}"} for axis in AXES for n in (2, 4, 8)]
    for field in answer["fields"]:
        values = field.get("options") or {"flag": [False, True], "int": [1, 2, 4]}.get(field["kind"], [])
        found += [{"fields": {field["name"]: value}} for value in values]
    return [start | patch for patch in found]


@pytest.mark.browser
def test_a_whole_page_shows_its_picture_at_once_and_answers_every_single_move_from_one_file(saved, opened):
    path = saved("mesh")
    assert path.stat().st_size < 7_500_000 and [*path.parent.iterdir()] == [path]
    shown = opened(path, until="starts")
    when = "document.querySelector('main svg')?.clientWidth && document.documentElement.dataset.python"
    stage = shown.wait_for_function(when, timeout=5_000).json_value()
    assert stage == "starts", "the first answer is stored"
    states = moves()
    replies = ask(shown, states)
    assert len(states) >= 54 and shown.evaluate("document.documentElement.dataset.python") == "awake"
    for state, reply in zip(states, replies, strict=True):
        assert isinstance(reply, dict) and reply["asked"] == state, (state, reply)
        assert reply["panels"] if not reply["refusal"] else reply["refusal"]["why"], state
    assert sum(not reply["refusal"] for reply in replies) > len(replies) / 2
    later = shown.evaluate("llmpar.more(llmpar.doc.state)")
    assert later is None or later["panels"]


@pytest.mark.browser
@pytest.mark.parametrize("kind", sorted({*KINDS} - {"mesh", "given"}))
def test_a_small_figures_page_answers_as_it_does_here(saved, opened, kind):
    figure = by_kind(kind)
    start, (first, *_) = dict(figure.state), figure.controls
    values = first.get("options") or [first["min"], first["max"]]
    states = [start, *({**start, first["name"]: value} for value in values)]
    ours = [json.loads(json.dumps(figure.answer(state))) for state in states]
    assert [unequal(*pair) for pair in zip(ours, ask(opened(saved(kind)), states), strict=True)] == [
        []
    ] * len(states)


@pytest.mark.browser
def test_a_page_whose_python_does_not_wake_says_why_and_keeps_its_picture(saved, opened, tmp_path):
    whole, broken = saved("mesh").read_text(encoding="utf-8"), tmp_path / "broken.html"
    rooms = page.packed({name: text for name, text in page.rooms().items() if "notation" not in name})
    broken.write_text(re.sub('(id="rooms">)[^<]*', rf"\1{rooms}", whole), encoding="utf-8")
    shown = opened(broken, until="failed")
    assert "No module named 'llmpar.notation'" in shown.evaluate("llmpar.status")
    assert ask(shown, [{}]) == ["Error: ModuleNotFoundError: No module named 'llmpar.notation'"]
    assert shown.locator("main svg").count() > 3


@pytest.mark.browser
def test_a_small_page_needs_no_python_to_show_what_is_one_click_away(opened, tmp_path):
    path = tmp_path / "small.html"
    MESH.save(path, small=True)
    shown = opened(path, until=None)
    shown.wait_for_selector("main svg")
    stored = shown.evaluate("llmpar.doc.stored")
    assert len(stored) > 20 and not any(name in shown.evaluate("llmpar") for name in ("ask", "more"))
    shown.locator("main svg [data-set]").first.click()
    assert shown.locator("main svg").count() > 3


@pytest.mark.browser
def test_an_answer_that_raises_is_told_and_the_next_one_comes(saved, opened):
    """And the verdict of before does not stand above it."""
    shown = opened(saved("mesh"))
    assert shown.locator(".verdict .unsure").count() == 1
    shown.evaluate("llmpar.doc.kind = 'none'")
    assert ask(shown, [dict(MESH.state)])[0].startswith("Error: KeyError")
    shown.locator('[data-name="batch_size"]').fill("32")
    shown.locator(".verdict .refused").wait_for()
    assert "gave no answer: KeyError: 'none'" in shown.locator(".why").inner_text()
    assert shown.locator(".verdict .unsure").count() == 0 and shown.locator(".lpx.kept svg").count() > 3
    shown.evaluate("llmpar.doc.kind = 'mesh'")
    assert ask(shown, [dict(MESH.state)])[0]["asked"] == MESH.state
    shown.evaluate("location.hash = 'fields=[]&own_chips={\"x\":1}'")
    shown.locator(".why", has_text="fields is []; use an object").wait_for()
    shown.locator(".step").click()
    shown.locator(".verdict .unsure").wait_for()
