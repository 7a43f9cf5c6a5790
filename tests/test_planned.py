"""The explorer opened on a planner's answer: the same figures, every plan one click away."""

import json
import re

import pytest
from shared import chromium

from llmpar.cli.commands import parse
from llmpar.config import preset
from llmpar.explore.planned import PlannedExplorer
from llmpar.predict import planner
from llmpar.predict.hardware import chip


@pytest.fixture(scope="module")
def planned():
    q = planner.Question(preset("llama3-8b"), chip("h100"), 16, 16, 8192, {}, "llama3-8b")
    answer = planner.decide(q, keep=5)
    document = planner.document(answer)
    return document, PlannedExplorer(document, [one.plan for one in answer.plans], "llama3-8b", "h100")


def test_it_opens_on_the_winner_and_knows_every_plan(planned):
    document, explorer = planned
    assert explorer.state["mesh"] == document["plans"][0]["mesh"]
    for i, row in enumerate(explorer.rows):
        reply = explorer.answer(explorer.state | row["state"])
        assert reply["planned"] == i and reply["refusal"] is None
        words = reply["code"].partition("Plan(")[2]
        for name, value in row["plan"].items():
            assert f"{name}={value!r}" in words, "the page tells the planner's own plan"
    other = explorer.answer(explorer.state | {"mesh": "dp=16"})
    assert other["planned"] is None


def test_the_page_holds_every_plan(planned, tmp_path):
    document, explorer = planned
    explorer.save(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    doc = json.loads(re.search(r'id="doc">(.*?)</script>', text, re.DOTALL)[1])
    assert [row["step_s"] for row in doc["planned"]["rows"]] == [row["step_s"] for row in document["plans"]]
    found = {reply["planned"] for reply in doc["answers"].values()}
    assert found == {None, *range(len(document["plans"]))}


def test_the_command_writes_a_page(tmp_path, capsys):
    path = tmp_path / "plan.html"
    parse(
        ["plan", "--model", "tiny", "--devices", "8", "--seq-len", "512", "--html", str(path), "--json"]
    ).run()
    assert path.stat().st_size > 100_000 and json.loads(capsys.readouterr().out)["plans"]


@pytest.mark.browser
def test_a_click_shows_another_plan(planned, tmp_path):
    document, explorer = planned
    explorer.save(tmp_path / "plan.html")
    with chromium() as browser:
        page, faults = browser.new_page(viewport={"width": 1280, "height": 900}), []
        page.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto((tmp_path / "plan.html").as_uri())
        for i in (0, 2):
            page.click(f'[data-plan="{i}"]')
            row = document["plans"][i]
            assert page.get_attribute(f'[data-plan="{i}"]', "aria-pressed") == "true"
            assert row["train"] in page.inner_text('[data-part="planned"]')
            shown = page.inner_text('[data-part="memory"]')
            assert "Time per step, by the planner" in shown and "products" in shown
        page.fill('[data-name="mesh"]', "dp=16")
        assert "none of these plans" in page.inner_text('[data-part="planned"]')
        assert faults == []
