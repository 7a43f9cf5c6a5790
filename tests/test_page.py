"""Python in the page: which part of the package needs nothing else, and what a saved page brings."""

import json
import random
import re
import subprocess
import sys
import types
import zlib

import pytest
import shared
from shared import HERE
from test_cures import on

from llmpar.explore import look, page
from llmpar.explore.explorer import EXPLORERS, by_kind
from llmpar.inspect.shardings import shardings
from llmpar.plan.mesh_shape import AXES

MESH = by_kind("mesh")
# Another process, which sees nothing but the files that a page brings.
ALONE = (HERE / "fixtures" / "page_alone.txt").read_text()


def alone(folder, *args):
    """Run `ALONE` on the files of a page, without any installed package."""
    for path, text in page.sources().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    asked = [sys.executable, "-I", "-S", "-c", ALONE, str(folder), *map(json.dumps, args)]
    return subprocess.run(asked, capture_output=True, text=True, timeout=120)


def modules():
    """Every module that a page brings."""
    names = [path.removesuffix(".py").replace("/", ".") for path in page.sources() if path.endswith(".py")]
    return [name.removesuffix(".__init__") for name in names]


def arrays():
    """What exists, as a page knows it: two arrays on eight devices."""
    return shardings({"w": on((16, 8), "data", "model"), "b": on((8,), "model")})


def questions():
    """A few of each kind: where it starts, and every value of its first control."""
    own = {"given": arrays()}
    for kind in sorted(EXPLORERS):
        figure = by_kind(kind, own.get(kind))
        if kind in ("specs", "hlo"):  # texts
            yield kind, None, figure.state | {"mesh": "X=2 Y=4"}
            continue
        first, *_ = figure.controls or [{"name": "device", "options": [5]}]
        values = first.get("options") or [first["min"], first["max"]]
        for value in [figure.state[first["name"]], *(values if kind != "mesh" else [])]:
            yield kind, own.get(kind), figure.state | {first["name"]: value}


def answered(kind, given, state):
    """What Python answers here, as JSON has it."""
    return json.loads(json.dumps(by_kind(kind, given).answer(state)))


def test_what_a_page_brings_needs_neither_jax_nor_numpy_and_answers_the_same(tmp_path):
    asked = [one for one in questions() if one[0] in ("mesh", "given", "specs", "hlo")]
    asked += [("mesh", None, MESH.state | {"mesh": "pp=4 tp=2", "fields": {"microbatches": 8}})]
    done = alone(tmp_path, modules(), asked)
    assert done.returncode == 0, done.stderr
    look._view.cache_clear()
    look._around.cache_clear()  # another test may have looked at more meshes around such a state
    assert json.loads(done.stdout) == [answered(*one) for one in asked]
    folders = {name.split(".")[1] for name in modules() if name.count(".") == 2}
    assert folders == {*"draw explore inspect kernels lessons plan planner predict".split()}
    assert len(modules()) > 30


def test_a_small_page_knows_what_is_one_click_away(monkeypatch):
    """Of an explorer in miniature: what it advises, then a number, then a field that is set or given back."""
    start, patches = {"a": 1, "fields": {"b": 2}}, [{"a": 2}, {"fields": {"b": 3}}, {"fields": {"b": None}}]
    marks = "".join(f"<g data-set='{json.dumps(patch)}'></g>" for patch in patches)
    own = {"verdict": {"steps": [{"do": "apply", "set": {"a": 10}}]}, "panels": {"one": {"svg": marks}}}
    answer = lambda state: own | {"asked": state, "refusal": None, "more": True}
    two = types.SimpleNamespace(answer=answer, more=lambda state: answer(state) | {"more": False})
    nearby = lambda: page.nearby(two, {"state": start, "answer": answer(start), "stored": []})
    found = nearby()
    near = [(1, {"b": 2}), (10, {"b": 2}), (2, {"b": 2}), (1, {"b": 3}), (1, {})]
    assert [answer["asked"] for answer in found] == [{"a": a, "fields": fields} for a, fields in near]
    assert not found[0]["more"]
    monkeypatch.setattr(page, "STORED_BYTES", 600)
    fewer = nearby()
    room = sum(len(zlib.compress(json.dumps(answer).encode())) for answer in fewer[1:])
    assert 1 < len(fewer) < len(found) and room <= 600


def test_a_small_page_is_one_file_that_mail_takes():
    text = shared.small_page("mesh")
    rest = (page.STORED_BYTES - shared.MOST) * 4 / 3  # what is stored is packed, and written in letters
    assert 100_000 < len(text.encode()) < 2_000_000 - rest and '"live": false' in text
    assert not re.search(r"""(?:src|href|import|from|url)[=(\s]*["']?\s*(?:https?:)?//""", text)


def test_without_python_for_the_browser_a_page_says_what_would_help(monkeypatch, tmp_path):
    monkeypatch.setattr(page, "RUNTIME", tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"not installed here \(in the project's sources 'make .*small=True"):
        page.html(MESH)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A whole page on this disk."""
    if not page.runtime():
        pytest.skip("Python for the browser is not here; run make runtime")
    path = tmp_path_factory.mktemp("pages") / "mesh.html"
    MESH.save(path)
    return path


def opened(shown, path, until):
    shown.goto(path.as_uri())
    shown.wait_for_function(f"document.documentElement.dataset.python === '{until}'", timeout=300_000)
    return shown


@pytest.fixture(scope="module")
def awake(chromium, saved):
    """The page whose Python all tests ask, without a network. Its picture was there before."""
    with shared.tab(chromium, offline=True) as (shown, faults):
        shown.add_init_script("""new MutationObserver(() => {
            if (document.querySelector("main svg")) window.first ??= document.documentElement.dataset.python;
        }).observe(document, { attributes: true, childList: true, subtree: true });""")
        yield opened(shown, saved, "awake")
    assert faults == []


def ask(shown, asked):
    """What the page's Python answers, one question after the other; of an error its text."""
    return shown.evaluate((HERE / "fixtures" / "ask_page.js").read_text(), asked)


def rounded(answer):
    """An answer as text, with nine digits of each number: the page's own Python may differ in the last."""
    text = json.dumps(answer, sort_keys=True)
    return re.sub(r"-?\d+\.\d+(?:e-?\d+)?", lambda number: f"{float(number[0]):.9g}", text)


def compared(shown, asked):
    """Ask the page and Python here; the first answers that differ."""
    ours, theirs = [answered(*one) for one in asked], ask(shown, asked)
    assert sum(not answer["refusal"] for answer in ours) > len(ours) / 4
    pairs = zip(asked, ours, theirs, strict=True)
    return [(one, own, other) for one, own, other in pairs if rounded(own) != rounded(other)][:3]


def moves():
    """Every single move from where the explorer starts: each value of each control and field, each click."""
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
def test_a_whole_page_shows_its_picture_first_and_answers_every_kind_as_ours(awake, saved):
    assert saved.stat().st_size < 7_500_000 and [*saved.parent.iterdir()] == [saved]
    assert awake.evaluate("window.first") == "starts", "the first answer is stored"
    fresh = {"seq_len": 2048}  # advice has already come for where the page starts
    asked = [(kind, given, state | fresh if kind == "mesh" else state) for kind, given, state in questions()]
    asked += [("mesh", None, state | fresh) for state in random.Random(0).sample(moves(), 30)]
    assert {kind for kind, *_ in asked} == {*EXPLORERS}
    assert compared(awake, asked) == []


@pytest.mark.browser
def test_a_page_whose_python_does_not_wake_says_why_and_keeps_its_picture(tab, saved, tmp_path):
    text, broken = saved.read_text(encoding="utf-8"), tmp_path / "broken.html"
    python = json.dumps(json.loads(page.runtime()) | {"start": "AAAA"})
    text = re.sub('(id="python">)[^<]*', lambda found: found[1] + python, text)
    broken.write_text(text, encoding="utf-8")
    shown = opened(tab, broken, "failed")
    assert "Failed to fetch" in shown.evaluate("llmpar.status")
    assert "Failed to fetch" in ask(shown, [["mesh", None, {}]])[0]
    assert shown.locator("main svg").count() > 3


@pytest.mark.browser
def test_an_answer_that_raises_is_told_and_the_next_one_comes(awake):
    """And the verdict of before does not stand above it."""
    assert awake.locator(".verdict .unsure").count() == 1
    assert ask(awake, [("none", None, dict(MESH.state))])[0].startswith("Error: KeyError")
    awake.evaluate("llmpar.doc.kind = 'none'")
    awake.locator('[data-name="batch_size"]').fill("32")
    awake.locator(".verdict .refused").wait_for()
    assert "gave no answer: KeyError: 'none'" in awake.locator(".why").inner_text()
    assert awake.locator(".verdict .unsure").count() == 0 and awake.locator(".lpx.kept svg").count() > 3
    assert ask(awake, [("mesh", None, dict(MESH.state))])[0]["asked"] == MESH.state
    awake.evaluate("location.hash = 'fields=[]&own_chips={\"x\":1}'")
    awake.locator(".why", has_text="fields is []; use an object").wait_for()
    awake.locator(".step").click()
    awake.locator(".verdict .unsure").wait_for()
