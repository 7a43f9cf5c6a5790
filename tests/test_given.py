"""What exists, as JAX has it: arrays, states, programs, shapes, shardings and meshes, read and drawn."""

import html
import json
import math
import random
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from parity import BATCH, LLAMA, SEQ
from shared import chromium, violations

from llmpar.draw.scene import Rect, flatten
from llmpar.explore import page as pages
from llmpar.explore.explorer import MeshExplorer, by_kind
from llmpar.explore.given import GivenExplorer
from llmpar.inspect.census import compiled_memory
from llmpar.inspect.shardings import shardings
from llmpar.mesh import make_mesh
from llmpar.plan import Plan
from llmpar.predict import memory
from llmpar.step import Step


def mesh_of(sizes, *axes, devices=None):
    """A mesh with names of its own."""
    here = np.array(devices or jax.devices()[: math.prod(sizes)])
    return Mesh(here.reshape(sizes), axes, axis_types=(AxisType.Auto,) * len(axes))


def held(row, position):
    """The slices of a row that a device holds."""
    return tuple(slice(*cut) for cut in row["shards"][row["holds"][position]])


def device_bytes(row, position):
    return math.prod(s.stop - s.start for s in held(row, position)) * row["itemsize"]


@pytest.fixture(scope="module")
def step():
    plan = Plan("dp=2 fsdp=2 tp=2")
    return Step(LLAMA, plan, make_mesh(plan.mesh), optax.adamw(1e-3))


@pytest.mark.parametrize("seed", range(12))
def test_every_device_holds_what_the_document_says(seed):
    draw = random.Random(seed)
    sizes = draw.choice([(8,), (4, 2), (2, 2, 2), (2, 1, 4), (3, 2), (1,)])
    names = draw.sample(["data", "model", "x", "tp", "länge"], len(sizes))
    devices = draw.sample(jax.devices(), math.prod(sizes))
    mesh, dims = mesh_of(sizes, *names, devices=devices), draw.randrange(5)
    cuts = [[] for _ in range(dims)]
    for name in names:
        if dims and draw.random() < 0.8:
            draw.choice(cuts).append(name)
    shape = [math.prod(mesh.shape[a] for a in cut) * draw.randrange(1, 4) for cut in cuts]
    whole = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    spec = P(*(tuple(cut) or None for cut in cuts))
    doc = shardings({"w": jax.device_put(whole, NamedSharding(mesh, spec))})
    (row,) = json.loads(json.dumps(doc))["tensors"]
    assert doc["sizes"] == dict(mesh.shape) and doc["devices"] == [d.id for d in devices]
    assert (row["name"], row["shape"], row["dtype"], row["layout"]) == ("w", shape, "int32", str(spec))
    assert len(row["shards"]) == math.prod(mesh.shape[a] for cut in cuts for a in cut)
    array = jax.device_put(whole, NamedSharding(mesh, spec))
    for shard in array.addressable_shards:
        position = devices.index(shard.device)
        np.testing.assert_array_equal(shard.data, whole[held(row, position)])
        assert device_bytes(row, position) == shard.data.nbytes


def test_a_state_has_the_names_of_its_weights(step):
    state, other = step.init(0), {"key": jax.random.key(0), "lr": 0.1, "table": np.ones(3), "none": None}
    doc = shardings({"state": state, **other})
    rows = {row["name"]: row for row in doc["tensors"]}
    assert {"state.params.blocks.ffn.gate", "state.optimizer[0].mu.blocks.ffn.gate", "state.step"} < {*rows}
    assert len(rows) == len(jax.tree.leaves(state)) + 1 and not any("array" in name for name in rows)
    gate = state.params["blocks"]["ffn"]["gate"]
    assert device_bytes(rows["state.params.blocks.ffn.gate"], 3) == gate.addressable_shards[3].data.nbytes
    assert rows["key"]["dtype"] == "key<fry>" and rows["key"]["holds"] == [0] + [None] * 7
    assert doc["skipped"] == ["lr (float, on no device)", "none (None)", "table (ndarray, on no device)"]


def test_a_compiled_step_takes_and_gives_what_its_text_says(step):
    program = step.lower(BATCH, SEQ).compile()
    doc = shardings(program)
    assert doc["title"] == "Shardings of a compiled program" and doc["skipped"] == []
    stats = compiled_memory(program)
    for way, size in (("in ", stats["argument_bytes"]), ("out ", stats["output_bytes"])):
        rows = [row for row in doc["tensors"] if row["name"].startswith(way)]
        for position in range(8):
            total = sum(device_bytes(row, position) for row in rows)
            # Results come with a table of pointers to them.
            assert total == size - 8 * len(rows) * (way == "out ")
    assert stats["argument_bytes"] == sum(memory.argument_bytes(step.plan, BATCH, SEQ).values())
    names = {row["name"] for row in doc["tensors"]}
    assert {"in [0].params.blocks.ffn.gate", "in [1].tokens", "out [0].step", "out [1].loss"} < names


def test_arguments_that_a_program_drops_are_said():
    mesh = mesh_of((4, 2), "data", "model")
    along = lambda name: jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=NamedSharding(mesh, P(name)))
    program = jax.jit(lambda a, b, c=None, *, kw: {"x": a, "kw": kw + 1, "no": None})
    doc = shardings(program.lower(along("data"), along("model"), kw=along("model")).compile())
    assert [row["name"] for row in doc["tensors"]] == ["in [0]", "in kw", "out kw", "out x"]
    assert doc["skipped"] == ["in [1] (not used)", "out no (None)"]


def test_shapes_and_bare_shardings_are_seen_without_arrays(step):
    doc = shardings(step.abstract_state)
    live = shardings(step.init(0))
    assert doc["tensors"] == live["tensors"] and (doc["title"], live["title"]) == (
        "Shardings",
        "Shardings of live arrays",
    )
    mesh = mesh_of((4, 2), "data", "model")
    (row,) = shardings(NamedSharding(mesh, P("data", None, "model")))["tensors"]
    assert row["dtype"] is None and row["shape"] == [4, 1, 2], "blocks, as no shape is given"
    assert row["shards"][row["holds"][5]] == [[2, 3], [0, 1], [1, 2]]
    assert {r["name"] for r in shardings(step.shardings)["tensors"]} == {r["name"] for r in doc["tensors"]}
    (row,) = shardings(SingleDeviceSharding(jax.devices()[3]))["tensors"]
    assert row["shards"] == [[]] and row["holds"] == [0]
    doc = shardings(mesh)
    assert doc["tensors"] == [] and doc["sizes"] == {"data": 4, "model": 2} and doc["hosts"] == [0] * 8


def test_arrays_without_a_mesh_lie_where_they_lie():
    one, two = (jax.device_put(jnp.zeros(4), jax.devices()[i]) for i in (5, 2))
    doc = shardings([one, two, jnp.float32(1)])
    assert doc["devices"] == [0, 2, 5] and doc["sizes"] == {"device": 3}
    assert [row["holds"] for row in doc["tensors"]] == [[None, None, 0], [None, 0, None], [0, None, None]]
    assert [row["name"] for row in doc["tensors"]] == ["[0]", "[1]", "[2]"]
    (row,) = shardings(jax.device_put(one, one.sharding.with_memory_kind("pinned_host")))["tensors"]
    assert row["name"] == "array" and "pinned_host" in row["layout"]


def test_names_that_would_be_one_stay_two():
    w = jnp.zeros(4)
    assert {r["name"] for r in shardings({"a.b": w, "a": {"b": w}, "c": w})["tensors"]} == {
        "['a.b']",
        "['a']['b']",
        "c",
    }


MESH = ((4, 2), "data", "model")


def shape_on(spec, shape=(6, 4)):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh_of(*MESH), spec))


def deleted():
    x = jnp.zeros(3)
    x.delete()
    return {"w": x}


def other_mesh():
    one, two = (NamedSharding(mesh_of((n,), "data"), P("data")) for n in (2, 8))
    return {"a": one, "b": two}


def outside():
    mesh = mesh_of((4,), "data")
    return {"a": NamedSharding(mesh, P()), "b": jax.device_put(jnp.zeros(1), jax.devices()[7])}


def swapped():
    devices = jax.devices()[:2]
    meshes = (mesh_of((2,), "data", devices=order) for order in (devices, devices[::-1]))
    return [NamedSharding(mesh, P("data")) for mesh in meshes]


REFUSED = {
    "text": (lambda: "w", r"array \(str, on no device\); give an array, a tree"),
    "nothing": (dict, "an empty dict"),
    "NumPy": (lambda: {"w": np.ones(3), "b": 1}, r"b \(int, on no device\), w \(ndarray"),
    "no sharding": (lambda: jax.eval_shape(lambda: jnp.zeros(3)), "ShapeDtypeStruct, on no device"),
    "lowered": (lambda: jax.jit(jnp.sin).lower(1.0), "Lowered, on no device.*a compiled program"),
    "deleted": (deleted, r"w \(traced or deleted\)"),
    "abstract mesh": (lambda: AbstractMesh((2,), ("a",)), "{'a': 2} without devices; make one of devices"),
    "abstract sharding": (lambda: NamedSharding(AbstractMesh((2,), ("a",)), P("a")), "array: a mesh of axes"),
    "no mesh": (lambda: Mesh(np.empty((), object), ()), "{} without devices"),
    "two meshes": (other_mesh, "b lies on mesh {'data': 8} of its own.*one mesh at a time"),
    "another order": (swapped, r"\[1\] lies on mesh {'data': 2} of its own"),
    "outside": (outside, "b lies on .*7, and others on mesh {'data': 4}"),
    "uneven": (lambda: shape_on(P("data")), r"array as P.* 4 times, .* is 6 .*that the mesh divides"),
    "unconstrained": (lambda: shape_on(P(P.UNCONSTRAINED)), "leaves a cut to the compiler"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_one_picture_cannot_show_is_refused_with_a_way_out(case):
    make, why = REFUSED[case]
    with pytest.raises(ValueError, match=why) as refusal:
        shardings(make())
    assert "\n" not in str(refusal.value)


def test_a_traced_value_lies_nowhere():
    with pytest.raises(ValueError, match="traced or deleted"):
        jax.jit(shardings)(jnp.zeros(3))


# ----------------------------------------------------------------------------------------------- the explorer


def on(shape, *spec, sizes=(4, 2), names=("data", "model"), devices=None):
    """Shapes on devices of a mesh that need not exist twice."""
    mesh = mesh_of(sizes, *names, devices=devices)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def cells(explorer):
    """The cells of the picture by their device, and what is inked in each, as shares of its sides."""
    rects = [item for item in flatten(explorer.scene.items) if isinstance(item, Rect)]
    boxes = {json.loads(r.act)["device"]: r for r in rects if r.act}
    inside = lambda ink, box: (
        box.x <= ink.x and ink.x + ink.w <= box.x + box.w + 0.01 and box.y <= ink.y < box.y + box.h
    )
    found = {}
    for device, box in boxes.items():
        found[device] = [
            (
                (i.y - box.y) / box.h,
                (i.y + i.h - box.y) / box.h,
                (i.x - box.x) / box.w,
                (i.x + i.w - box.x) / box.w,
            )
            for i in rects
            if i.fill == "weights" and inside(i, box)
        ]
    return boxes, found


@pytest.mark.parametrize(
    "spec", [("data", "model"), ("model", "data"), (None, ("data", "model")), ("model",), ()]
)
def test_a_cell_is_inked_where_its_device_holds(spec):
    array = jax.device_put(jnp.zeros((16, 8)), on((16, 8), *spec).sharding)
    explorer = MeshExplorer.of({"w": array})
    boxes, inked = cells(explorer)
    for position, device in enumerate(array.sharding.mesh.devices.flat):
        down, across = array.sharding.devices_indices_map(array.shape)[device]
        (low, high, _), (left, right, _) = down.indices(16), across.indices(8)
        assert inked[position] == [pytest.approx((low / 16, high / 16, left / 8, right / 8))]
        assert f"device {position}: data {position // 2}, model {position % 2}; " in boxes[position].tip
        if spec:
            assert f"[{low}:{high}, {left}:{right}]" in boxes[position].tip
    thick = {device for device, box in boxes.items() if box.width > 1}
    where = array.sharding.devices_indices_map(array.shape)
    first, *others = array.sharding.mesh.devices.flat
    assert thick == {0} | {i for i, d in enumerate(others, 1) if where[d] == where[first]}


def test_a_third_dim_that_is_cut_is_a_bar_and_a_fourth_is_said():
    cube = on((4, 8, 1, 16), "a", "b", None, "c", sizes=(2, 2, 2), names=("a", "b", "c"))
    explorer = MeshExplorer.of(cube)
    boxes, inked = cells(explorer)
    bars = [i for i in flatten(explorer.scene.items) if isinstance(i, Rect) and i.fill == "other2"]
    for position, box in boxes.items():
        a, b, c = position // 4, position // 2 % 2, position % 2
        (bar,) = (i for i in bars if i.x == box.x and box.y <= i.y < box.y + box.h)
        assert (bar.y - box.y) / box.h == pytest.approx(a / 2) and bar.h == pytest.approx(box.h / 2)
        room = (box.w - 6) / box.w  # beside the bar
        left = 1 - room + room * c / 2
        assert inked[position] == [pytest.approx((b / 2, b / 2 + 1 / 2, left, left + room / 2))]
    assert "dim 1 down, dim 3 across. The bar at its left is dim 0." in " ".join(
        explorer.scene.text.split("\n")
    )
    assert "cut too" not in explorer.scene.text
    doc = shardings(cube)
    doc["tensors"][0]["shards"] = [
        [*block[:2], [0, 1 + i % 2], block[3]] for i, block in enumerate(doc["tensors"][0]["shards"])
    ]
    assert "Dim 1 is cut too, and not drawn." in GivenExplorer(doc).scene.text


def test_clicks_choose_a_device_and_an_array(step):
    explorer = MeshExplorer.of(step.abstract_state)
    answer = explorer.answer(dict(explorer.state))
    patches = [
        json.loads(html.unescape(x))
        for x in re.findall("data-set='(.*?)'", answer["panels"]["holds"]["html"])
    ]
    assert {patch["tensor"] for patch in patches} == set(answer["numbers"]["held"])
    cuts = [
        json.loads(html.unescape(x)) for x in re.findall('data-set="(.*?)"', answer["panels"]["grid"]["svg"])
    ]
    assert [cut["device"] for cut in cuts] == list(range(8))
    for patch in [*patches, *cuts]:
        explorer.set(**patch)
    answer = explorer.answer(dict(explorer.state))
    assert explorer.state == patches[-1] | cuts[-1] and answer["refusal"] is None
    live, position = step.init(0), 7
    bytes_held = sum(x.addressable_shards[position].data.nbytes for x in jax.tree.leaves(live))
    assert sum(row["bytes"] for row in answer["numbers"]["held"].values()) == bytes_held
    assert answer["panels"]["holds"]["html"].count("<tr>") == 1 + len(patches)
    assert (
        f"of {patches[-1]['tensor']}" in answer["says"] and "Device 7 (dp 1, fsdp 1, tp 1)" in answer["says"]
    )


def test_a_compiled_program_is_explored(step):
    explorer = MeshExplorer.of(step.lower(BATCH, SEQ).compile())
    held = explorer.answer(dict(explorer.state))["numbers"]["held"]
    given = sum(memory.argument_bytes(step.plan, BATCH, SEQ).values())
    assert sum(row["bytes"] for name, row in held.items() if name.startswith("in ")) == given


def test_one_device_no_mesh_and_one_number_are_drawn():
    boxes, inked = cells(one := MeshExplorer.of(jnp.float32(1)))
    assert inked == {0: [pytest.approx((0, 1, 0, 1))]} and "Device 0 holds all of array" in repr(one)
    partly = MeshExplorer.of(
        {"w": jax.device_put(jnp.zeros(8), on((8,), "data").sharding), "step": jnp.int32(0)}
    )
    partly.set(tensor="step", device=3)
    assert {device for device, ink in cells(partly)[1].items() if ink} == {0}
    assert "holds nothing of step" in partly.scene.text
    assert partly.answer(dict(partly.state))["numbers"]["held"]["step"]["copies"] == 1


def test_a_bare_mesh_says_who_is_where():
    devices = jax.devices()[::-1]
    explorer = MeshExplorer.of(mesh_of((2, 4), "länge", "tp", devices=devices))
    answer = explorer.answer(dict(explorer.state))
    assert list(answer["panels"]) == ["grid"] and answer["numbers"]["held"] == {}
    shown = re.findall(r">(\d)</text>", answer["panels"]["grid"]["svg"])
    assert shown == [str(d.id) for d in devices]
    explorer.set(device=5)
    assert "Device 5 (länge 1, tp 1, JAX's 2) is chosen" in explorer.scene.text


def test_a_sharding_without_a_shape_is_drawn_in_blocks():
    mesh = mesh_of((4, 2), "data", "model")
    explorer = MeshExplorer.of(NamedSharding(mesh, P("model", None, "data")))
    explorer.set(device=5)
    answer = explorer.answer(dict(explorer.state))
    assert (
        "holds block [1, 0, 2] of array" in answer["says"]
        and "no shape is given" in answer["panels"]["holds"]["html"]
    )
    assert cells(explorer)[1][5] == [pytest.approx((1 / 2, 1, 2 / 4, 3 / 4))]


def many(sizes):
    """A document as of so many devices: of a mesh that is cut along both axes."""
    doc = shardings(on((sizes[0] * 2, sizes[1]), "data", "model", sizes=(1, 1)))
    blocks = [[[2 * i, 2 * i + 2], [j, j + 1]] for i in range(sizes[0]) for j in range(sizes[1])]
    row = doc["tensors"][0] | {"shards": blocks, "holds": list(range(len(blocks)))}
    own = {"devices": row["holds"], "hosts": [i // 8 for i in row["holds"]]}
    return doc | own | {"sizes": dict(zip(("data", "model"), sizes, strict=True)), "tensors": [row]}


@pytest.mark.parametrize("sizes", [(8, 8), (16, 8), (128, 8)])
def test_of_many_devices_blocks_are_drawn_and_the_chosen_ones_neighbours(sizes):
    explorer = GivenExplorer(many(sizes), device=21)
    boxes, inked = cells(explorer)
    assert len(boxes) <= 128 and 21 in boxes and all(inked.values())
    low, high, left, right = inked[21][0]
    assert (low + high) / 2 == pytest.approx(2.5 / sizes[0], abs=0.06), "third row of blocks"
    assert (left + right) / 2 == pytest.approx(5.5 / 8, abs=0.01)
    assert ("One above stands for" in explorer.scene.text) == (sizes[0] > 8)
    assert ("Dashed: a process." in explorer.scene.text) == (sizes[0] == 8)
    assert "Device 21 (data 2, model 5, process 2)" in explorer.scene.text


def test_a_wrong_state_is_refused_and_nothing_else_is_asked():
    explorer = MeshExplorer.of({"w": jnp.zeros(3)})
    for state, why in (
        ({"device": 1}, "device is 1, and there are 1; use"),
        ({"tensor": "v"}, "'v'; there are w"),
    ):
        refused = explorer.answer(dict(explorer.state) | state)
        assert why in refused["refusal"]["why"] and refused["panels"] == {}
    with pytest.raises(ValueError, match="has no mesh; it has device, tensor"):
        explorer.set(mesh="dp=2")


def test_a_page_answers_without_jax(step):
    doc = shardings(step.abstract_state)
    ours = MeshExplorer.of(step.abstract_state).answer({"device": 3, "tensor": "step"})
    code = """
import json, sys
for name in ("jax", "numpy", "matplotlib", "anywidget"):
    sys.modules[name] = None
from llmpar.explore.explorer import by_kind
print(json.dumps(by_kind("given", json.load(sys.stdin)).answer({"device": 3, "tensor": "step"})))
"""
    ran = subprocess.run([sys.executable, "-c", code], input=json.dumps(doc), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == ours
    assert by_kind("given", doc).kind == "given"


@pytest.mark.browser
@pytest.mark.parametrize("small", [True, False], ids=["small", "whole"])
def test_a_saved_page_is_explored_without_a_kernel(tmp_path, small):
    if not small and not pages.runtime():
        pytest.skip("Python for the browser is not here; run make runtime")
    tree = {"w": on((16, 8), "data", "model"), "b": on((8,), "model")}
    explorer, faults = MeshExplorer.of(tree), []
    explorer.save(tmp_path / "page.html", small=small)
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto((tmp_path / "page.html").as_uri())
        told = lambda text: page.locator("svg text", has_text=text).wait_for()
        assert violations(page) == []
        page.get_by_role("button", name="device 5:").click()
        told("Device 5 (data 2, model 1) holds [8:12, 4:8] of w.")
        page.get_by_text("Device 5 (data 2, model 1): 80 B in all.").wait_for()
        page.keyboard.press("ArrowUp")
        page.keyboard.press("Enter")
        told("Device 3 (data 1, model 1) holds [4:8, 4:8] of w.")
        page.get_by_role("button", name="b", exact=True).click()
        if small:  # two clicks from where it starts
            page.get_by_text("none for this choice").wait_for()
        else:
            told("Device 3 (data 1, model 1) holds [4:8] of b.")
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert faults == []
