"""The explorers without a browser: state, both front ends' traits, static twins, the exported page, live arrays."""

import base64
import html.parser
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmpar import explore
from llmpar.explorers import MemoryExplorer, RingExplorer, RoutingExplorer, TimelineExplorer
from llmpar.mesh import make_mesh, sharding
from llmpar.notation import parse_layout
from llmpar.widget import MODULE, Explorer, MeshExplorer

EXPLORERS = [MeshExplorer, TimelineExplorer, RingExplorer, RoutingExplorer, MemoryExplorer]
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.mark.parametrize("kind", EXPLORERS)
@pytest.mark.parametrize("front", ["rich", "plain"])
def test_an_output_has_a_live_front_and_a_static_twin(kind, front):
    data, metadata = kind(front)._repr_mimebundle_()
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


def test_the_front_end_moves_the_state_and_python_answers():
    explorer = MeshExplorer(model="tiny", seq_len=64)
    widget = explorer.rich
    assert widget.answer["key"] == explore.key(explorer.state) and widget.tensors is None
    widget.state = explorer.state | {"mesh": "dp=4 tp=2"}  # as a slider in the browser does
    assert explorer.state["mesh"] == "dp=4 tp=2" and widget.answer == explore.answer(explorer.state)
    before = widget.answer
    widget.state = explorer.state | {"device": 5, "axis": "tp"}
    assert widget.answer is before, "looking asks for nothing"
    widget.state = explorer.state | {"model": "small"}
    assert widget.tensors == explore.tensors(explorer.state)
    widget.state = explorer.state | {"model": "gpt5"}
    assert widget.tensors == [] and "unknown model" in widget.answer["refusal"]["why"]
    widget.state = explorer.state | {"model": "small"}
    widget.state = explorer.state | {"batch_size": 0}
    assert "from 1 on" in widget.answer["refusal"]["why"]
    explorer.set(batch_size=16, mesh="tp=8")
    assert widget.state["mesh"] == "tp=8" and widget.answer["refusal"] is None


def test_the_plain_front_end_follows_sliders_and_text():
    explorer = MeshExplorer("plain", model="tiny", seq_len=64)
    sliders, (form, picture) = explorer.plain.children[0].children, explorer.plain.children[1].children
    box = explorer.plain
    sliders, form, picture = box.children[0].children, box.children[1].children[0], box.children[1].children[1]
    text = next(field for field in form.children if field.description == "mesh")
    tp = next(slider for slider in sliders if slider.description == "tp")
    assert tp.value == 2 and "<svg" in picture.value
    tp.value = 4
    assert text.value == "dp=2 fsdp=2 tp=4" and explorer.state["mesh"] == text.value
    text.value = "dp=8"
    assert tp.value == 1 and "mesh dp=8" in picture.value
    text.value = "dp=3"
    assert "batch 16 is not a multiple" in picture.value and "nearest mesh that works" in picture.value
    text.value = "dp=oops"
    assert "positive number" in picture.value


@pytest.mark.parametrize("kind", [TimelineExplorer, RingExplorer, RoutingExplorer, MemoryExplorer])
def test_small_explorers_answer_every_choice_of_one_control(kind):
    explorer = kind()
    for control in kind.controls:
        for value in explorer.choices(control)[:4]:
            reply = explorer.answer(explorer.state | {control["name"]: value})
            assert bool(reply["svg"]) != bool(reply["refusal"])
    form, picture = kind("plain").plain.children
    assert "<svg" in picture.value and len(form.children) == len(kind.controls)


def test_a_written_order_is_judged():
    explorer = TimelineExplorer(stages=2, microbatches=2)
    order = explorer.answer(explorer.state)["fill"]["order"]
    explorer.set(order=order)
    same = explorer.answer(explorer.state)
    assert not same["refusal"] and "busy" in same["says"]
    explorer.set(order=order.replace("B1", "F0", 1))
    assert "twice" in explorer.answer(explorer.state)["refusal"]
    explorer.set(order="B0 F0\nF0 B0")
    assert "Cycle" in explorer.answer(explorer.state)["refusal"]
    explorer.set(order="F0 X0")
    assert "^" in explorer.answer(explorer.state)["refusal"] and explorer.scene.text
    assert "Bubble over ideal" in TimelineExplorer().scene.text


def test_ring_and_memory_show_what_the_formulas_say():
    contiguous, zigzag = (RingExplorer(order=order).scene.text for order in ("contiguous", "zigzag"))
    assert "The ring takes 3.5 blocks" in contiguous and "The ring takes 2 blocks" in zigzag
    text = MemoryExplorer(model="llama2-7b", devices=64, chip="a100-80", batch_size=64).scene.text
    rows = re.findall(r"ZeRO (\d): ([\d.]+) GiB", text)
    sizes = [float(size) for _, size in rows]
    assert [stage for stage, _ in rows] == list("0123") and sizes == sorted(sizes, reverse=True)
    assert "multiple of tp" in MemoryExplorer(devices=1, tp=4).scene.text


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


def test_a_live_array_is_drawn_as_jax_placed_it():
    mesh = make_mesh("dp=2 fsdp=2 tp=2")
    w = jax.device_put(jnp.zeros((16, 8)), sharding(mesh, parse_layout("b/dp,fsdp d/tp")))
    explorer = MeshExplorer.of({"w": w, "b": w[0]})
    doc = explorer.document()
    row = next(r for r in doc["tensors"] if "w" in r["name"])
    where = w.sharding.devices_indices_map(w.shape)
    for position, device in enumerate(mesh.devices.flat):
        cut = [list(c.indices(n)[:2]) for c, n in zip(where[device], w.shape, strict=True)]
        assert [list(c) for c in row["shards"][row["holds"][position]]] == cut
    assert "holds [0:4, 0:4], 64 B; 8 shards" in explorer.scene.text
    json.dumps(doc)
    assert explorer.rich.answer["traffic"] == [] and explorer.plain.children[1].value.startswith("<svg")
    explorer.html()


def test_other_axis_names_and_one_device_are_drawn_too():
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "model"))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model", None))
    assert "data=4 model=2" in repr(MeshExplorer.of(jax.device_put(jnp.zeros((4, 4)), spec)))
    assert "1 shards" in repr(MeshExplorer.of(jnp.zeros((4, 4))))
    with pytest.raises(ValueError, match="found no array in str"):
        MeshExplorer.of("w")


def test_a_compiled_program_shows_its_arguments_results_and_what_it_sends():
    mesh = make_mesh("dp=2 fsdp=2 tp=2")
    at = [sharding(mesh, parse_layout(text)) for text in ("b/dp d/tp", "d/tp m", "b/dp m")]
    product = jax.jit(lambda x, w: x @ w, in_shardings=at[:2], out_shardings=at[2])
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 8), (8, 32))]
    doc = MeshExplorer.of(product.lower(*shapes).compile()).document()
    assert [row["name"] for row in doc["tensors"]] == ["argument[0]", "argument[1]", "result"]
    assert [(t["axes"], t["kind"]) for t in doc["traffic"]] == [(["tp"], "all-reduce")]
    assert len(doc["tensors"][2]["shards"]) == 2


def test_wrong_names_are_refused():
    with pytest.raises(ValueError, match="front is 'matplotlib'"):
        MeshExplorer("matplotlib")
    with pytest.raises(ValueError, match="has no colour; it has mesh, order"):
        MeshExplorer(colour=1)
    with pytest.raises(NotImplementedError):
        Explorer().draw({})
    with pytest.raises(ValueError, match="svg or .png"):
        MeshExplorer().save("x.pdf")


def test_compare_is_text(tmp_path):
    lines = MeshExplorer(model="tiny", seq_len=64).compare(mesh="dp=8").splitlines()
    assert len(lines) == 3 and all(" | " in line for line in lines)
    MeshExplorer().save(tmp_path / "mesh.html")
    assert (tmp_path / "mesh.html").read_text().startswith("<!doctype html>")
