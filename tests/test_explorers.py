"""The explorers without a browser: state, traits, static twins, the exported page, live arrays."""

import base64
import html.parser
import json
import re

import jax
import jax.numpy as jnp
import pytest

from llmpar.explore import answers
from llmpar.explore.explorer import MODULE, Explorer, MeshExplorer
from llmpar.explore.small import RoutingExplorer, TimelineExplorer
from llmpar.mesh import make_mesh, sharding
from llmpar.notation import parse_layout

EXPLORERS = [MeshExplorer, TimelineExplorer, RoutingExplorer]
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.mark.parametrize("kind", EXPLORERS)
def test_an_output_has_a_live_front_and_a_static_twin(kind):
    data, metadata = kind()._repr_mimebundle_()
    assert set(data) == {WIDGET_VIEW, "image/png", "text/plain"}
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG") and metadata["image/png"]["width"] > 300
    assert data["text/plain"] == repr(kind()) and len(data["text/plain"].splitlines()) > 3


@pytest.mark.parametrize("kind", EXPLORERS)
def test_a_page_needs_no_network_and_no_kernel(kind):
    page = kind().html()
    addresses = set(re.findall(r"https?://[^\"'`\s)\\]*", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "a namespace is no request"
    found = []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            found.extend(value for name, value in attrs if name in ("src", "href"))

    Reader().feed(page)
    assert found == [] and "import " not in MODULE.read_text()
    doc = json.loads(re.search(r'id="doc">(.*?)</script>', page, re.S)[1])
    assert doc["state"] == kind.start and len(doc["answers"]) > 5 and len(page) < 4_000_000
    assert kind().key(doc["state"]) == next(iter(doc["answers"])), "the page's own state first"
    for control in doc["controls"] if kind is not MeshExplorer else ():
        assert set(control["stored"]) == {*kind().choices(control), kind.start[control["name"]]}, (
            "each choice of one control"
        )


def test_the_front_end_moves_the_state_and_python_answers():
    explorer = MeshExplorer(model="tiny", seq_len=64)
    widget = explorer.rich
    assert widget.answer["key"] == answers.key(explorer.state) and widget.tensors is None
    widget.state = explorer.state | {"mesh": "dp=4 tp=2"}  # as a slider in the browser does
    assert explorer.state["mesh"] == "dp=4 tp=2" and widget.answer == answers.answer(explorer.state)
    before = widget.answer
    widget.state = explorer.state | {"device": 5, "axis": "tp"}
    assert widget.answer is before, "looking asks for nothing"
    widget.state = explorer.state | {"model": "small"}
    assert widget.tensors == answers.tensors(explorer.state)
    widget.state = explorer.state | {"model": "gpt5"}
    assert widget.tensors == [] and "unknown model" in widget.answer["refusal"]["why"]
    widget.state = explorer.state | {"model": "small"}
    widget.state = explorer.state | {"batch_size": 0}
    assert "from 1 on" in widget.answer["refusal"]["why"]
    explorer.set(batch_size=16, mesh="tp=8")
    assert widget.state["mesh"] == "tp=8" and widget.answer["refusal"] is None
    explorer.set(model="tiny")
    assert widget.tensors == answers.tensors(explorer.state), (
        "the tensors follow Python's set as they follow the form"
    )


@pytest.mark.parametrize("kind", [TimelineExplorer, RoutingExplorer])
def test_small_explorers_answer_every_choice_of_one_control(kind):
    explorer = kind()
    for control in kind.controls:
        for value in explorer.choices(control)[:4]:
            reply = explorer.answer(explorer.state | {control["name"]: value})
            assert bool(reply["svg"]) != bool(reply["refusal"])


def test_a_written_order_is_judged():
    explorer = TimelineExplorer(stages=2, microbatches=2)
    order = explorer.answer(explorer.state)["fill"]["order"]
    explorer.set(order=order)
    same = explorer.answer(explorer.state)
    assert not same["refusal"] and "busy" in same["says"]
    explorer.set(order=order.replace("B1", "F0", 1))
    assert "twice" in explorer.answer(explorer.state)["refusal"]
    explorer.set(order="F0 B0 F1 B1\nF1 F0 B0 B1")
    refused = explorer.answer(explorer.state)
    assert "Cycle" in refused["refusal"] and "stuck after 1 time units" in refused["svg"], (
        "no picture of another order"
    )
    assert "stage 1 waits to run F1 for F1 on stage 0" in refused["svg"]
    assert len([line for line in refused["refusal"].splitlines() if "waits at tick" in line]) == 2, (
        "a wait per line"
    )
    explorer.set(order=order.lower().replace(" ", ", "))
    assert explorer.answer(explorer.state)["svg"] == same["svg"], "lower case and commas are read too"
    explorer.set(order="F0 X0")
    assert "^" in explorer.answer(explorer.state)["refusal"] and explorer.scene.text
    assert "Bubble over ideal" in TimelineExplorer().scene.text


def test_both_bubbles_of_zb_h2_are_said():
    """11 % of the whole picture is idle, and nothing from one step to the next (docs/schedules.md: 0)."""
    text = TimelineExplorer(schedule="zb-h2", stages=4, microbatches=8).scene.text
    assert "11.1% of them idle" in text and "first start to its own last end, the bubble is 0:" in text


def test_a_hot_expert_is_busier_the_hotter_it_is_and_no_choice_is_lost():
    busiest, moved = [], []
    for heat in (0, 2, 6):
        text = RoutingExplorer(heat=heat).scene.text
        load = [int(n) for n in re.search(r"load: ([\d ]+),", text)[1].split()]
        assert sum(load) == 4 * 64 * 2 and max(load) == load[0] or not heat
        busiest.append(load[0])
        moved.append(int(re.search(r"(\d+) of 512 rows", text)[1]))
    assert busiest[0] < busiest[1] < busiest[2] == 4 * 64, "every token visits the hot one, once"
    assert "0 of 128 rows" in RoutingExplorer(ranks=1).scene.text and min(moved) > 300


def test_a_state_is_changed_by_set_only():
    explorer = MeshExplorer()
    with pytest.raises(TypeError, match=r"use|set\(mesh='tp=8'\)"):
        explorer.state["mesh"] = "tp=8"
    explorer.set(mesh="tp=8")
    assert explorer.state["mesh"] == "tp=8" and explorer.rich.state["mesh"] == "tp=8"


def test_a_page_offers_only_what_it_stored_and_knows_its_own_state():
    explorer = MeshExplorer(mesh="tp=2, dp=2", order="pp,dp,fsdp,ep,sp,tp", model="tiny", seq_len=64)
    explorer.states = lambda: answers.neighbours(dict(explorer.state), 8)  # fewer, for speed
    doc = explorer.document() | explorer.stored()
    assert doc["answers"][explorer.key(explorer.state)]["refusal"] is None
    offered = {c["name"] for c in doc["controls"] if len(c["stored"]) > 1 or c.get("free")}
    assert offered == {"mesh", "order", "zero"}


def test_a_page_of_what_cannot_run_keeps_the_one_reason():
    stored = MeshExplorer(model="deepseek-v3").stored()["answers"]
    assert len(stored) == 1 and "cannot run here" in next(iter(stored.values()))["refusal"]["why"]


def test_a_live_array_is_drawn_as_jax_placed_it():
    mesh = make_mesh("dp=2 fsdp=2 tp=2")
    w = jax.device_put(jnp.zeros((16, 8)), sharding(mesh, parse_layout("b/dp,fsdp d/tp")))
    explorer = MeshExplorer.of({"w": w, "b": w[0]})
    doc = explorer.document()
    row = next(r for r in doc["tensors"] if r["name"] == "w")
    where = w.sharding.devices_indices_map(w.shape)
    for position, device in enumerate(mesh.devices.flat):
        cut = [list(c.indices(n)[:2]) for c, n in zip(where[device], w.shape, strict=True)]
        assert [list(c) for c in row["shards"][row["holds"][position]]] == cut
    assert "holds [0:4, 0:4], 64 B; 8 shards" in explorer.scene.text
    json.dumps(doc)
    assert explorer.rich.answer["traffic"] is None, "nobody measured what is sent"
    assert explorer.document()["title"] == "Shardings of live arrays"
    explorer.html()


def test_wrong_names_are_refused():
    with pytest.raises(ValueError, match="has no colour; it has mesh, order"):
        MeshExplorer(colour=1)
    with pytest.raises(NotImplementedError):
        Explorer().draw({})
    with pytest.raises(ValueError, match="svg or .png"):
        MeshExplorer().save("x.pdf")


def test_a_page_is_saved(tmp_path):
    explorer = MeshExplorer(model="tiny", seq_len=64)
    explorer.states = lambda: [dict(explorer.state)]
    explorer.save(tmp_path / "mesh.html")
    assert (tmp_path / "mesh.html").read_text().startswith("<!doctype html>")
