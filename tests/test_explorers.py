"""The explorers without a browser: state, traits, static twins, the saved page."""

import base64
import html.parser
import json
import re
from pathlib import Path

import pytest
import shared

from llmpar.draw.scene import Text, flatten
from llmpar.explore import page
from llmpar.explore.explorer import CALCULATORS, EXPLORERS, Explorer, MeshExplorer, by_kind

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
ROOT = Path(__file__).resolve().parent.parent
MADE = [kind for kind in EXPLORERS if kind != "given"]


@pytest.mark.parametrize("kind", MADE)
def test_an_output_has_a_live_front_and_a_static_twin(kind):
    data, metadata = by_kind(kind)._repr_mimebundle_()
    assert set(data) == {WIDGET_VIEW, "image/png", "text/plain"}
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG") and metadata["image/png"]["width"] > 300
    lines = data["text/plain"].splitlines()
    assert data["text/plain"] == repr(by_kind(kind)) and len(lines) > 3
    assert lines[0] != lines[1] and not [line for line in lines if line.startswith(":")]


class Attributes(html.parser.HTMLParser):
    """Every attribute of a text by its tag, and the tags that are open."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len({*names}), (tag, names)
        self.found += [(tag, name, value) for name, value in attrs]
        self.open += [tag] * (tag not in ("input", "br", "meta", "link"))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


STATES = [{}, {"mesh": "fsdp=8", "explain": "fsdp all-gather"}]
STATES += [{"mesh": "pp=2 dp=2 tp=2", "explain": "activations"}]
STATES += [{"model": "tiny-moe", "mesh": "ep=2 tp=2", "devices": 4, "explain": "left out", "device": 1}]


@pytest.mark.parametrize("kind", MADE)
def test_a_page_needs_no_network_and_no_kernel(kind):
    text = shared.small_page(kind)
    addresses = set(re.findall(r"https?://[^\"'`\s)\\]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "https://page.invalid/"}, "names, and no requests"
    read = Attributes(text)
    assert not read.open and {name for _, name, _ in read.found} <= {*shared.TABLES["attributes"]}, read.found
    assert not any(name in ("src", "href") for _, name, _ in read.found)
    assert "import " not in page.MODULE.read_text()
    doc = json.loads(re.search(r'id="doc">(.*?)</script>', text, re.S)[1])
    assert doc["answer"]["asked"] == doc["state"] == dict(by_kind(kind).state) and len(text) < 2_500_000
    assert doc["answer"]["panels"] and not doc["live"]


@pytest.mark.parametrize("kind", MADE)
def test_no_attribute_of_a_panel_ends_early(kind):
    """An apostrophe in a label did: of `label='the optimizer's …'` s, two and moments are attributes."""
    explorer, shown = by_kind(kind), []
    for more in STATES if kind == "mesh" else [{}]:
        for panel in explorer.answer(dict(explorer.state) | more)["panels"].values():
            shown += [panel.get("svg", ""), panel.get("html", "")]
    for text in shown:
        read = Attributes(text)
        assert not read.open and {name for _, name, _ in read.found} <= {*shared.TABLES["attributes"]}, (
            read.found
        )
    labels = [value for text in shown for tag, name, value in Attributes(text).found if tag == "optgroup"]
    assert kind != "mesh" or "the optimizer's two moments (float32)" in labels


@pytest.mark.parametrize("kind", MADE)
def test_an_answer_is_plain_data_and_follows_the_contract(kind):
    explorer = by_kind(kind)
    reply = explorer.answer(dict(explorer.state))
    assert json.loads(json.dumps(reply)) == reply
    names = {"asked", "state", "refusal", "verdict", "fields", "panels", "numbers", "says", "more", "frames"}
    assert names <= {*reply} and reply["refusal"] is None and reply["says"]
    assert {*reply["panels"]} <= {name for name, *_ in explorer.areas}
    assert all({*panel} & {"svg", "html"} for panel in reply["panels"].values())
    places = {place for *_, place in explorer.areas}
    assert places <= {"over", "left", "middle", "right", "below"}


def test_the_front_end_moves_the_state_and_python_answers():
    explorer = MeshExplorer(model="tiny", seq_len=64)
    widget = explorer.rich
    assert widget.answer == explorer.answer(dict(explorer.state))
    widget.state = explorer.state | {"mesh": "dp=4 tp=2"}  # as a click in the browser does
    assert explorer.state["mesh"] == "dp=4 tp=2" and widget.answer["state"]["mesh"] == "dp=4 tp=2"
    widget.state = explorer.state | {"model": "gpt5"}
    assert widget.answer["panels"] == {} and "unknown model" in widget.answer["refusal"]["why"]
    explorer.set(batch_size=16, mesh="tp=8", model="tiny")
    assert widget.state["mesh"] == "tp=8" and widget.answer["refusal"] is None
    before = widget.answer
    while widget.answer["more"]:
        widget._handle_custom_msg({"more": True}, [])
    assert widget.answer != before and widget.answer["asked"] == before["asked"]


def test_fields_of_a_plan_and_own_files_are_set_by_hand(tmp_path):
    explorer = MeshExplorer(mesh="fsdp=8", remat="block", zero=1)
    assert explorer.state["fields"] == {"remat": "block", "zero": 1}
    explorer.set(remat="none")
    assert explorer.state["fields"] == {"remat": "none", "zero": 1}
    chosen = {f["name"]: (f["value"], f["yours"]) for f in explorer.answer(explorer.state)["fields"]}
    assert chosen["zero"] == (1, True) and chosen["microbatches"][1] is False
    (tmp_path / "mine.toml").write_text('base = "h100"\nnode_size = 4\n')
    own = MeshExplorer(chip=str(tmp_path / "mine.toml"), mesh="tp=8")
    (tmp_path / "mine.toml").unlink()
    found, usual = (one.answer(one.state)["numbers"] for one in (own, MeshExplorer(mesh="tp=8")))
    assert found["step_s"] > usual["step_s"], "tp crosses its nodes of four; the file is not read again"


def test_a_state_is_changed_by_set_only_and_wrong_names_are_refused():
    explorer = MeshExplorer()
    with pytest.raises(TypeError, match=r"use|set\(mesh='tp=8'\)"):
        explorer.state["mesh"] = "tp=8"
    explorer.set(mesh="tp=8")
    assert explorer.state["mesh"] == "tp=8" and explorer.rich.state["mesh"] == "tp=8"
    with pytest.raises(ValueError, match="has no colour; it has model, chip"):
        MeshExplorer(colour=1)
    with pytest.raises(NotImplementedError):
        Explorer().draw({})
    with pytest.raises(ValueError, match="svg or .png"):
        MeshExplorer().save("x.pdf")


def test_a_saved_picture_names_its_tensor_and_has_no_buttons(tmp_path):
    explorer = MeshExplorer(mesh="fsdp=4 tp=2", tensor="weight head")
    drawn = {item.text for item in flatten(explorer.scene.items) if isinstance(item, Text)}
    assert {"−", "+"} <= drawn, "those of the form, on a page"
    explorer.save(tmp_path / "mesh.svg")
    texts = re.findall(r"<text[^>]*>([^<]*)", (tmp_path / "mesh.svg").read_text())
    assert "Who holds what of weight head" in texts and not {"−", "+"} & {*texts}


def test_a_page_that_was_saved_knows_the_sites_address(monkeypatch):
    assert by_kind("mesh").document()["site"] == ""
    monkeypatch.setenv("LLMPAR_SITE", "https://a.example/llmpar/")
    assert by_kind("sum").document()["site"] == "https://a.example/llmpar/calculators/collectives.html"
    pages = {path.stem for path in (ROOT / "docs" / "site" / "calculators").glob("*.md")}
    assert {*CALCULATORS.values()} <= pages and by_kind("ring").document()["site"] == ""
