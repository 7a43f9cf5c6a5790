"""What exists, as JAX has it: arrays, states, programs, shapes, shardings and meshes, read and drawn."""

import html
import json
import math
import random
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from parity import LLAMA
from test_grid import cells_of, ink_in

from llmpar.draw.scene import Rect, flatten
from llmpar.explore.explorer import MeshExplorer
from llmpar.explore.given import GivenExplorer
from llmpar.inspect.census import compiled_memory
from llmpar.inspect.shardings import shardings
from llmpar.parallel.mesh import make_mesh
from llmpar.plan.plan import Plan
from llmpar.training.step import Step


def mesh_of(sizes, *axes, devices=None):
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


def live(spec, shape=(8, 8), mesh=None, kind=jnp.float32):
    where = NamedSharding(mesh or mesh_of((4, 2), "X", "Y"), spec)
    return jax.device_put(jnp.arange(math.prod(shape)).reshape(shape).astype(kind), where)


class AnyName(dict):
    __getattr__ = dict.__getitem__


@jax.tree_util.register_pytree_with_keys_class
class Attributes(AnyName):
    """As training states are often written."""

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.DictKey(k), self[k]) for k in sorted(self)], tuple(sorted(self))

    @classmethod
    def tree_unflatten(cls, names, leaves):
        return cls(zip(names, leaves, strict=True))


class Checked:
    """A node that takes nothing without a shape."""

    def __init__(self, x):
        self.x = x if x.shape is not None else None


jax.tree_util.register_pytree_node(Checked, lambda node: ((node.x,), None), lambda _, x: Checked(*x))


def with_refs(dropped, mutated, untouched, *, scale):
    mutated[...] += scale
    return {"sum": scale.sum(0), "none": None}


def captures():
    held = jax.new_ref(live(P("Y", "X")))

    def f(dropped, x):
        held[...] += x
        return x

    return jax.jit(f).lower(live(P()), live(P("X"))).compile()


def two_of_the_same_devices():
    own = NamedSharding(mesh_of((2, 4), "A", "B"), P("A", "B"))
    return jax.jit(lambda x: x * 2, out_shardings=own).lower(live(P("X", "Y"))).compile()


def of_flax():
    module, x = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0)), live(P("X"))
    return nnx.jit(lambda module, x: module(x)).lower(module, x).compile()


lower = lambda f, *args, **kwargs: jax.jit(f).lower(*args, **kwargs).compile()
donated = jax.jit(lambda x, y, z: (x + 1, z), donate_argnums=(0, 1))
READ, REFUSED = (
    [row.split(" ; ") for row in part.splitlines()[1:]]
    for part in Path(__file__).with_name("given.txt").read_text().split("# ")[1:]
)


@pytest.mark.parametrize("row", READ, ids=lambda row: row[0])
def test_programs_and_states_of_others_are_read(row):
    _, program, rows, skipped = row
    explorer = MeshExplorer.of(value := eval(program, globals()))
    answer = explorer.answer(dict(explorer.state))
    doc = explorer.given
    assert ", ".join(f"{row['name']} {row['layout']}" for row in doc["tensors"]) == rows
    assert (" / ".join(doc["skipped"]) or "-") == skipped and answer["refusal"] is None
    if hasattr(value, "memory_analysis"):  # what the compiler counts, on each device
        taken = [row for row in doc["tensors"] if row["name"].startswith("in ")]
        total = value.memory_analysis().argument_size_in_bytes
        assert {sum(device_bytes(row, i) for row in taken) for i in range(len(doc["devices"]))} == {total}
    if isinstance(value, jax.stages.Compiled):
        assert compiled_memory(value)["argument_bytes"] == total


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_are_read_as_they_run(seed):
    draw = random.Random(seed)
    sizes = draw.choice([(8,), (4, 2), (2, 2, 2), (2, 1, 4), (4,), (1,)])
    axes = draw.sample(["data", "model", "x", "tp"], len(sizes))
    mesh = mesh_of(sizes, *axes, devices=draw.sample(jax.devices(), math.prod(sizes)))

    def array():
        cuts = [[] for _ in range(draw.randrange(3))]
        for axis in draw.sample(axes, len(axes)) if cuts else ():
            draw.choice([*cuts, []]).append(axis)
        kind = draw.choice([jnp.float32, jnp.bfloat16, jnp.int8])
        sizes = [8 * draw.randrange(1, 3) for _ in cuts]
        return live(P(*(tuple(cut) or None for cut in cuts)), sizes, mesh, kind)

    def tree(depth=2):
        if depth and draw.random() < 0.5:
            parts = [tree(depth - 1) for _ in range(draw.randrange(3))]
            return draw.choice([list, tuple, lambda x: Attributes(zip("abc", x, strict=False))])(parts)
        return draw.choice([lambda: None, array, array, lambda: jax.new_ref(array())])()

    args, kwargs = [tree() for _ in range(draw.randrange(1, 4))], {"p": tree(), "q": array()}
    given = jax.tree.leaves((args, kwargs))
    used = [draw.random() < 0.7 for _ in given[1:]] + [True]
    closed = jax.new_ref(array()) if draw.random() < 0.4 else None

    def f(*args, **kwargs):
        results = [None if closed is None else closed[...].T]
        for x, here, use in zip(jax.tree.leaves((args, kwargs)), given, used, strict=True):
            if use and isinstance(here, jax.Ref):
                x[...] = x[...] * 2
            results += [x[...].T, {"twice": x[...] * 2}] * use
        return results

    program = lower(f, *args, **kwargs)
    ran, doc = program(*args, **kwargs), shardings(program)
    where = [one for one, use in zip(given, used, strict=True) if use] + [closed] * (closed is not None)
    where += jax.tree.leaves(ran)
    assert sum("not used" in name for name in doc["skipped"]) == used.count(False)
    assert (doc["sizes"], doc["devices"]) == (dict(mesh.shape), [d.id for d in mesh.devices.flat])
    for row, x in zip(doc["tensors"], where, strict=True):
        assert (row["shape"], row["dtype"]) == (list(x.shape), str(x.dtype))
        assert row["layout"] == str(x.sharding.spec)
        for i, device in enumerate(mesh.devices.flat):
            cuts = zip(x.sharding.devices_indices_map(x.shape)[device], x.shape, strict=True)
            assert held(row, i) == tuple(slice(*cut.indices(n)[:2]) for cut, n in cuts)


def unreduced():
    """A matmul over a dim that X cuts: each device has multiplied what it has."""
    mesh = jax.make_mesh((4, 2), ("X", "Y"), axis_types=(AxisType.Explicit,) * 2)
    x, w = live(P(None, "X"), mesh=mesh), live(P("X", "Y"), mesh=mesh)
    spec = NamedSharding(mesh, P(None, "Y", unreduced={"X"}))
    return jax.jit(lambda x, w: jnp.einsum("ij,jk->ik", x, w, out_sharding=spec)), x, w


def test_terms_of_a_sum_are_no_copies_of_it():
    f, x, w = unreduced()
    terms, whole = f(x, w), np.asarray(x) @ np.asarray(w)
    (row,) = shardings(terms)["tensors"]
    assert (row["layout"], row["unfinished"], row["blocks"]) == ("P(None, 'Y') +X", "sum over X", 2)
    assert len(row["shards"]) == len({*row["holds"]}) == 8, "no two devices hold the same"
    total = np.zeros((8, 8))
    for shard in terms.addressable_shards:
        total[held(row, shard.device.id)] += np.asarray(shard.data)
    np.testing.assert_array_equal(total, whole)
    explorer = MeshExplorer.of({"y": terms, "x": x})
    explorer.set(tensor="y", device=5)
    boxes, inked = cells(explorer)
    assert all(inked[i] == [pytest.approx((0, 1, i % 2 / 2, i % 2 / 2 + 0.5))] for i in range(8))
    assert [i for i, box in boxes.items() if box.width > 1] == [5]
    assert "one term of the sum over X: [0:8, 0:4]" in boxes[2].tip
    inks = [i for i in flatten(explorer.scene.items) if isinstance(i, Rect) and i.fill == "weights"]
    assert {ink.hatch for ink in inks} == {"/"}
    assert "holds one term of the sum over X: [0:8, 4:8] of y.\nHatched: a term only" in explorer.scene.text
    answer = explorer.answer(dict(explorer.state))
    assert "+X; 2 blocks of 4 terms; 1 copy; one term" in answer["says"] and "x: 8 × 8" in answer["says"]
    explorer.set(tensor="x")
    assert "Hatched" not in explorer.scene.text
    program = MeshExplorer.of(f.lower(x, w).compile()).given["tensors"]
    assert program[-1] == row | {"name": "out"}


def test_another_unfinished_reduction_than_a_sum_is_named():
    mesh = unreduced()[1].sharding.mesh
    if kinds := getattr(jax.sharding, "UnreducedKind", None):  # from JAX 0.12 on
        (row,) = shardings(NamedSharding(mesh, P(unreduced={"X"}, unreduced_kind=kinds.max)))["tensors"]
        assert (row["layout"], row["unfinished"]) == ("P() max over X", "max over X")


def test_shapes_and_bare_shardings_are_seen_without_arrays(step):
    doc = shardings(step.abstract_state)
    live = shardings(step.init(0))
    assert doc["tensors"] == live["tensors"] and live["title"] == "Shardings of live arrays"
    mesh = mesh_of((4, 2), "data", "model")
    (row,) = shardings(NamedSharding(mesh, P("data", None, "model")))["tensors"]
    assert row["dtype"] is None and row["shape"] == [4, 1, 2], "blocks, as no shape is given"
    assert row["shards"][row["holds"][5]] == [[2, 3], [0, 1], [1, 2]]
    assert {r["name"] for r in shardings(step.shardings)["tensors"]} == {r["name"] for r in doc["tensors"]}
    (row,) = shardings(SingleDeviceSharding(jax.devices()[3]))["tensors"]
    assert row["shards"] == [[]] and row["holds"] == [0]
    doc = shardings(mesh)
    assert doc["tensors"] == [] and doc["sizes"] == {"data": 4, "model": 2} and doc["hosts"] == [0] * 8


def deleted():
    x = jnp.zeros(3)
    x.delete()
    return {"w": x}


def other_mesh():
    one, two = (mesh_of((n,), "data", devices=jax.devices()[at:][:n]) for n, at in ((4, 0), (2, 6)))
    return {"a": NamedSharding(one, P("data")), "b": NamedSharding(two, P())}


def outside():
    mesh = mesh_of((4,), "data")
    return {"a": NamedSharding(mesh, P()), "b": jax.device_put(jnp.zeros(1), jax.devices()[7])}


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[0])
def test_what_one_picture_cannot_show_is_refused_with_a_way_out(row):
    _, given, why = row
    with pytest.raises(ValueError, match=why) as refusal:
        shardings(eval(given, globals()))
    assert "\n" not in str(refusal.value)


def on(shape, *spec, sizes=(4, 2), names=("data", "model"), devices=None):
    """Shapes on devices of a mesh that need not exist twice."""
    mesh = mesh_of(sizes, *names, devices=devices)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def cells(explorer):
    """The cells of the picture by their device, and what is inked in each, as shares of its sides."""
    scene = explorer.scene
    boxes = dict(cells_of(scene))
    return boxes, {i: [(*down, *across) for down, across in ink_in(scene, box)] for i, box in boxes.items()}


@pytest.mark.parametrize("spec", [("model", "data"), (None, ("data", "model")), ()])
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
    bars = [i for i in flatten(explorer.scene.items) if isinstance(i, Rect) and i.fill == "links"]
    for position, box in boxes.items():
        a, b, c = position // 4, position // 2 % 2, position % 2
        (bar,) = (i for i in bars if i.x == box.x and box.y <= i.y < box.y + box.h)
        assert (bar.y - box.y) / box.h == pytest.approx(a / 2) and bar.h == pytest.approx(box.h / 2)
        room = (box.w - 6) / box.w  # beside the bar
        left = 1 - room + room * c / 2
        assert inked[position] == [pytest.approx((b / 2, b / 2 + 1 / 2, left, left + room / 2))]
    words = explorer.scene.text.replace("\n", " ")
    assert "dim 1 down, dim 3 across. The bar at its left is dim 0." in words and "cut too" not in words
    doc = shardings(cube)
    for i, block in enumerate(doc["tensors"][0]["shards"]):
        block[2] = [0, 1 + i % 2]
    assert "Dim 1 is cut too, and not drawn." in GivenExplorer(doc).scene.text


def test_clicks_choose_a_device_and_an_array(step):
    explorer = MeshExplorer.of(step.abstract_state)
    answer = explorer.answer(dict(explorer.state))
    sets = lambda text: [json.loads(html.unescape(x)) for x in re.findall('data-set="(.*?)"', text)]
    patches, cuts = sets(answer["panels"]["holds"]["html"]), sets(answer["panels"]["grid"]["svg"])
    assert {patch["tensor"] for patch in patches} == set(answer["numbers"]["held"])
    assert [cut["device"] for cut in cuts] == list(range(8))
    for patch in [*patches, *cuts]:
        explorer.set(**patch)
    answer = explorer.answer(dict(explorer.state))
    assert explorer.state == patches[-1] | cuts[-1] and answer["refusal"] is None
    live, position = step.init(0), 7
    bytes_held = sum(x.addressable_shards[position].data.nbytes for x in jax.tree.leaves(live))
    assert sum(row["bytes"] for row in answer["numbers"]["held"].values()) == bytes_held
    assert answer["panels"]["holds"]["html"].count("<tr>") == 1 + len(patches)
    assert f"of {patches[-1]['tensor']}" in answer["says"]


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


def many(sizes):
    """A document as of so many devices: of a mesh that is cut along both axes."""
    doc = shardings(on((sizes[0] * 2, sizes[1]), "data", "model", sizes=(1, 1)))
    blocks = [[[2 * i, 2 * i + 2], [j, j + 1]] for i in range(sizes[0]) for j in range(sizes[1])]
    row = doc["tensors"][0] | {"shards": blocks, "holds": list(range(len(blocks)))}
    own = {"devices": row["holds"], "hosts": [i // 8 for i in row["holds"]]}
    return doc | own | {"sizes": dict(zip(("data", "model"), sizes, strict=True)), "tensors": [row]}


@pytest.mark.parametrize("sizes", [(8, 8), (128, 8)])
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
