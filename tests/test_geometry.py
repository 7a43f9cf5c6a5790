"""Python, the browser's module and JAX agree on who holds what; rounds end as collectives do."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmpar.draw import geometry
from llmpar.draw.scene import size_text, time_text
from llmpar.explore import answers
from llmpar.notation import AXES, DIMS, Dim, Layout, parse_layout, parse_mesh

ROOT = Path(__file__).resolve().parent.parent
MODULE = ROOT / "llmpar" / "explore" / "static" / "explorer.js"
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def cases(num=1000, most=64, seed=6):
    """Random meshes of all six axes in any order, layouts and shapes; one in ten shapes cannot be cut."""
    rng, out = random.Random(seed), []
    while len(out) < num:
        sizes = {axis: rng.choice((1, 1, 1, 2, 2, 3, 4, 5, 8)) for axis in AXES}
        if math.prod(sizes.values()) > most:
            continue
        order, free = rng.sample(list(AXES), 6), rng.sample(list(AXES), 6)
        dims = []
        for name in rng.sample(list(DIMS), rng.randint(1, 4)):
            dims.append([name, [free.pop() for _ in range(rng.randint(0, min(2, len(free))))]])
        shape = [
            math.prod(sizes[a] for a in axes) * rng.randint(1, 5) + (rng.random() < 0.03) for _, axes in dims
        ]
        out.append({"sizes": sizes, "order": order, "dims": dims, "shape": shape})
    return out


def layout(case):
    """The case's layout."""
    return Layout(tuple(Dim(name, tuple(axes)) for name, axes in case["dims"]))


def held(case):
    """By Python: per device its slices, or None where a dim cannot be cut."""
    sizes, order = case["sizes"], case["order"]
    return [
        geometry.slices(layout(case), case["shape"], sizes, geometry.coordinates(sizes, order, device))
        for device in range(math.prod(sizes.values()))
    ]


ASK_JAX = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices, out = jax.devices(), []
for case in json.load(sys.stdin):
    shape = [case["sizes"][a] for a in case["order"]]
    mesh = Mesh(np.array(devices[: int(np.prod(shape))]).reshape(shape), tuple(case["order"]))
    spec = P(*[tuple(axes) or None for _, axes in case["dims"]])
    try:
        where = NamedSharding(mesh, spec).devices_indices_map(tuple(case["shape"]))
    except ValueError:
        out.append(None)
        continue
    cuts = [[cut.indices(n)[:2] for cut, n in zip(where[d], case["shape"])] for d in mesh.devices.flat]
    out.append(cuts)
json.dump(out, sys.stdout)
"""


def test_slices_are_where_jax_puts_them_in_1000_random_cases():
    """64 simulated devices, so in a process of its own."""
    asked = cases()
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=64", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", ASK_JAX], input=json.dumps(asked), capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    refused = 0
    for case, told in zip(asked, json.loads(done.stdout), strict=True):
        ours = held(case)
        if told is None:
            refused += 1
            assert None in ours, case
        else:
            assert [[list(cut) for cut in device] for device in ours] == told, case
    assert 20 < refused < 200
    # a planted fault: the axes the other way round
    turned = [held(case | {"order": case["order"][::-1]}) for case in asked]
    assert sum(ours != held(case) for ours, case in zip(turned, asked, strict=True)) > 200


@pytest.fixture(scope="module")
def javascript(tmp_path_factory):
    """Call a function of the module under node: name and lists of arguments in, results out."""
    if not shutil.which("node"):
        pytest.skip("node is not installed; it runs the browser's module here")
    module = tmp_path_factory.mktemp("js") / "explorer.mjs"
    module.write_text(MODULE.read_text())
    script = module.with_name("ask.mjs")
    script.write_text(
        "import * as m from './explorer.mjs';\n"
        "let text = ''; for await (const part of process.stdin) text += part;\n"
        "const [name, calls] = JSON.parse(text);\n"
        "process.stdout.write(JSON.stringify(calls.map((c) => m[name](...c) ?? null)));\n"
    )

    def ask(name, calls):
        asked = json.dumps([name, [list(call) for call in calls]])
        done = subprocess.run(["node", str(script)], input=asked, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return ask


def test_the_module_agrees_with_python_in_1000_random_cases(javascript):
    asked = cases()
    calls, ours = [], []
    for case in asked:
        dims = [{"name": name, "axes": axes} for name, axes in case["dims"]]
        for device, cut in enumerate(held(case)):
            at = geometry.coordinates(case["sizes"], case["order"], device)
            calls.append(({"dims": dims}, case["shape"], case["sizes"], at))
            ours.append(cut and [list(c) for c in cut])
    assert javascript("slices", calls) == ours and len(calls) > 10_000
    large = [case for case in asked if math.prod(case["sizes"].values()) > 2]
    placed = [(case["sizes"], case["order"], device) for case in large for device in range(3)]
    assert javascript("coordinates", placed) == [geometry.coordinates(*call) for call in placed]
    rng = random.Random(1)
    teams = [(case["sizes"], case["order"], rng.sample(list(AXES), rng.randint(1, 3))) for case in asked]
    assert javascript("groups", teams) == [geometry.groups(*call) for call in teams]
    row = {"layout": {"3": str(parse_layout("l/pp b/dp,fsdp s/sp d/tp"))}, "shape": [8, 64, 8, 16]}
    state, shards = answers.START, [(case["sizes"], case["order"]) for case in asked]
    numbers = [
        geometry.shard_numbers(parse_layout(row["layout"]["3"]), row["shape"], *call) for call in shards
    ]
    assert javascript("shardNumbers", [(row, state, *call) for call in shards]) == numbers
    cuts = [
        [
            geometry.slices(
                parse_layout(row["layout"]["3"]), row["shape"], sizes, geometry.coordinates(sizes, order, d)
            )
            for d in range(math.prod(sizes.values()))
        ]
        for sizes, order in shards[:100]
    ]
    firsts = [list(dict.fromkeys(map(str, cut))) for cut in cuts]
    want = [
        None if None in cut else [seen.index(str(c)) for c in cut]
        for cut, seen in zip(cuts, firsts, strict=True)
    ]
    assert numbers[:100] == want
    spots = [(case["sizes"], case["order"], node) for case in asked for node in (1, 4, 8, 10**6)]
    spots += [(dict.fromkeys(AXES, 4), list(AXES), 8), (parse_mesh("dp=509").sizes, list(AXES), 8)]
    assert javascript("places", spots) == [geometry.places(*call) for call in spots]
    arrows = [
        (geometry.places(*call), *rng.choices(range(8), k=2))
        for call in spots
        if math.prod(call[0].values()) >= 8
    ]
    assert javascript("lane", arrows) == [geometry.lane(*call) for call in arrows]
    steps = [(kind, g, None) for kind in KINDS for g in range(1, 17)] + [
        ("collective-permute", 4, [[0, 1], [3, 2]])
    ]
    assert javascript("rounds", steps) == [geometry.rounds(*call) for call in steps]


def test_what_a_device_holds_is_equal_in_bytes(javascript):
    """The whole chain of the module: layouts of the model, live axes, padded layers, slices, bytes."""
    rng, calls, ours = random.Random(5), [], []
    rows = answers.tensors(answers.START)
    for _ in range(60):
        zero, tp_sequence, order = rng.randrange(4), rng.random() < 0.5, rng.sample(list(AXES), 6)
        state = answers.START | {
            "zero": zero,
            "tp_sequence": tp_sequence,
            "schedule": rng.choice(list(answers.CHUNKS)),
        }
        sizes = {axis: rng.choice((1, 1, 2, 3, 4)) for axis in AXES}
        if rng.random() < 0.2:
            sizes |= {"tp": rng.choice((16, 24))}  # copies of KV heads, of which there are 8
        state["device"] = rng.randrange(math.prod(sizes.values()))
        calls.append((rows, state, sizes, order, state["device"]))
        ours.append(answers.device_rows(state, rows, sizes, order))
    for got, want in zip(javascript("holdings", calls), ours, strict=True):
        cuts = [x["cut"] and "[" + ", ".join(f"{a}:{b}" for a, b in x["cut"]) + "]" for x in got]
        for x, cut, row in zip(got, cuts, want, strict=True):
            assert [x["row"]["name"], x["text"], cut or "cannot be cut evenly", size_text(x["bytes"])] == row


def test_words_and_layouts_are_read_alike(javascript):
    texts = ["b/dp,fsdp s d +tp", "whole", "l d/fsdp m/tp", "d"]
    parsed = javascript("parseLayout", [(text,) for text in texts])
    for text, got in zip(texts, parsed, strict=True):
        want = parse_layout(text)
        assert got == {
            "dims": [{"name": d.name, "axes": list(d.axes)} for d in want.dims],
            "sums": list(want.sums),
        }
    rng = random.Random(2)
    sizes = [0, 1, 1023, 1024, 1500, 10**9, 2**30 - 1, 123456789, *(rng.randrange(2**50) for _ in range(500))]
    assert javascript("sizeText", [(n,) for n in sizes]) == [size_text(n) for n in sizes]
    seconds = [0, 1e-9, 0.0321, 1, 599.9, 600, 7199, 7200, 18043]
    assert javascript("timeText", [(s,) for s in seconds]) == [time_text(s) for s in seconds]


def test_meshes_are_read_refused_and_spelt_alike(javascript):
    """1,000 random texts: the same sizes, spelling and key, or the same words under the same caret."""
    rng, values = random.Random(8), ("2", "04", "-1", "0", "2.5", "", "9000")
    bits = [*(a + s + n for a in (*AXES, "mp", "xp", "") for s in "=:" for n in values), *"1248", "!"]
    texts = "|  |!|! tp=2 dp=2|1,64,4,1|1,2,4|1,2|fsdp=-1 dp=-1|dp=131072|dp=131072 tp=2".split("|")
    while len(texts) < 1000:
        between, some = rng.choice((" ", ",", ", ")), rng.choices(bits, k=rng.randint(1, 4))
        texts.append(rng.choice(("", "!", " ")) + between.join(some) + "  " * rng.choice((0, 0, 0, 100)))
    names, read = list(AXES), javascript("readMesh", [(text, list(AXES), answers.MOST) for text in texts])
    num_read = 0
    for text, got in zip(texts, read, strict=True):
        try:
            shape = answers.read_mesh(text)
            assert got == {"sizes": shape.sizes, "text": str(shape)}, text
            num_read += 1
        except ValueError as error:
            assert got == {"why": str(error)}, text
    assert 30 < num_read < 900
    states = [
        answers.START | {"mesh": text, "order": rng.choice(("tp,sp,ep  fsdp dp pp", "tp"))} for text in texts
    ]
    ours = [answers.key(state) for state in states]
    assert javascript("key", [(state, list(answers.VIEW), names, answers.MOST) for state in states]) == ours


def test_groups_differ_along_their_axes_only_and_cover_the_mesh():
    """Beside numpy's own order of a grid of devices."""
    for text in ("dp=2 fsdp=2 tp=2", "pp=2 dp=3 sp=2", "dp=1"):
        sizes = parse_mesh(text).sizes
        grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        for axes in (("dp",), ("tp",), ("dp", "fsdp"), ("fsdp", "dp", "tp"), ("sp", "pp")):
            last = np.moveaxis(grid, [list(AXES).index(a) for a in axes], range(-len(axes), 0))
            rows = last.reshape(-1, math.prod(sizes[a] for a in axes)).tolist()
            assert geometry.groups(sizes, AXES, axes) == rows
            assert sorted(sum(rows, [])) == list(range(grid.size))
            for row in rows:
                places = [geometry.coordinates(sizes, AXES, device) for device in row]
                assert len({tuple(n for a, n in place.items() if a not in axes) for place in places}) == 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("all-to-all", "collective-permute")])
@pytest.mark.parametrize("g", [1, 2, 3, 5, 8])
def test_rounds_carry_out_the_collective(kind, g):
    """Numbers sent along the rounds end as the collective says, and `held` counts what arrived."""
    value = np.arange(g * g, dtype=float).reshape(g, g) + 1  # value[rank, block]
    reduced = kind in ("reduce-scatter", "all-reduce")
    own = value.copy() if reduced else np.diag(np.arange(g) + 1.0)
    steps = geometry.rounds(kind, g)
    gather_from = g - 1 if kind == "all-reduce" else 0
    for t, step in enumerate(steps[1:]):
        before = own.copy()
        assert (
            sorted(s for s, _, _ in step["sends"]) == sorted(d for _, d, _ in step["sends"]) == list(range(g))
        )
        for source, target, b in step["sends"]:
            assert before[source, b], "a rank sends what it has"
            adds = reduced and (kind == "reduce-scatter" or t < gather_from)
            own[target, b] = before[source, b] + (before[target, b] if adds else 0)
        for source, _, b in step["sends"]:
            if reduced and (kind == "reduce-scatter" or t < gather_from):
                own[source, b] = 0
        assert ((own > 0) == (np.array(step["held"]) > 0)).all()
    total = value.sum(0)
    want = {
        "all-gather": np.tile(np.arange(g) + 1.0, (g, 1)),
        "reduce-scatter": np.diag(total),
        "all-reduce": np.tile(total, (g, 1)),
    }[kind]
    assert (own == want).all()
    assert len(steps) - 1 == (2 if kind == "all-reduce" else 1) * (g - 1), "as many rounds as a ring has"


@pytest.mark.parametrize("g", [1, 2, 3, 5, 8])
def test_an_all_to_all_is_a_transpose_and_gathers_nothing(g):
    own = [{(rank, to) for to in range(g)} for rank in range(g)]  # pieces, from whom and for whom
    steps = geometry.rounds("all-to-all", g)
    for step in steps:
        for source, target, b in step["sends"]:
            assert b == target and (source, target) in own[source], (
                "a piece goes straight to where it belongs"
            )
            own[source].remove((source, target))
            own[target].add((source, target))
        assert step["held"] == [[sum(to == b for _, to in mine) for b in range(g)] for mine in own]
        assert all(sum(row) == g for row in step["held"]), "g pieces before, g after"
    assert own == [{(source, rank) for source in range(g)} for rank in range(g)] and len(steps) == g
    assert steps == geometry.rounds("ragged-all-to-all", g)


def test_a_permute_is_one_hop_and_a_pipeline_is_no_ring():
    start, end = geometry.rounds("collective-permute", 4)
    assert [[s, d] for s, d, _ in end["sends"]] == [[0, 1], [1, 2], [2, 3], [3, 0]]
    assert np.array_equal(end["held"], np.roll(start["held"], 1, 0)), "all of what a rank has goes on"
    _, end = geometry.rounds("collective-permute", 4, [(0, 1), (1, 2), (2, 3)])
    assert len(end["sends"]) == 3 and end["held"][0] == [0] * 4 and end["held"][3] == [0, 0, 1, 0]


def test_cells_do_not_overlap_and_frames_hold_their_nodes():
    rng = random.Random(3)
    for case in cases(200, 600, seed=4):
        n, node = math.prod(case["sizes"].values()), rng.choice((1, 2, 4, 8, 16))
        place = geometry.places(case["sizes"], case["order"], node)
        spots = {tuple(xy) for xy in place["cells"]}
        assert len(spots) == len(place["cells"]) == n // place["block"] <= 512
        rows = {}
        for x, y in place["cells"]:
            rows.setdefault(y, []).append(x)
        assert all(b - a >= place["w"] + 4 for xs in rows.values() for a, b in zip(xs, xs[1:], strict=False))
        ys = sorted(rows)
        assert all(b - a >= place["h"] + 4 for a, b in zip(ys, ys[1:], strict=False))
        for i, (x, y, w, h) in enumerate(place["frames"]):
            inside = [k for k, (cx, cy) in enumerate(place["cells"]) if x < cx < x + w and y < cy < y + h]
            size = node // place["block"]
            assert inside == list(range(i * size, (i + 1) * size)), "a frame holds one node, whole"


@pytest.mark.parametrize("n", [8, 64, 512])
def test_arrows_keep_clear_of_the_words_in_cells(n):
    """A cell's words stand in its middle: 20 pixels a number, 54 and two lines where there is room."""
    place = geometry.places(parse_mesh(f"fsdp={n // 4} tp=4").sizes, tuple(AXES), 8)
    wide, tall = (54, 26) if place["h"] > 30 else (24, 10)
    words = [(x + place["w"] / 2, y + place["h"] / 2) for x, y in place["cells"]]
    for i in range(n):
        points = geometry.lane(place, i, (i + 1) % n)
        for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
            low, high, top, end = min(x0, x1), max(x0, x1), min(y0, y1), max(y0, y1)
            assert not any(
                low < x + wide / 2 and high > x - wide / 2 and top < y + tall / 2 and end > y - tall / 2
                for x, y in words
            )


@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=16", "fsdp=64", "fsdp=128", "dp=4 fsdp=8 tp=4"])
def test_arrows_of_a_ring_share_no_line_and_their_heads_have_room(mesh):
    """A head is 7 pixels long: there and back on one line, heads would lie inside the cells."""
    sizes = parse_mesh(mesh).sizes
    place, team = geometry.places(sizes, tuple(AXES), 8), geometry.groups(sizes, tuple(AXES), ("fsdp",))[0]
    lanes = [geometry.lane(place, a, b) for a, b in zip(team, [*team[1:], team[0]], strict=True)]
    between = [lane for lane in lanes if len(lane) == 4]
    assert between
    for *_, (x, y), (x1, y1) in between:
        assert x == x1 and abs(y1 - y) >= 7 + 0.8, "the head ends at the cell's edge and starts outside of it"
    runs = [(y, min(x0, x1), max(x0, x1)) for _, (x0, y), (x1, _), _ in between]
    for i, (y, low, high) in enumerate(runs):
        assert all(abs(y - z) >= 2.4 or high <= a or b <= low for z, a, b in runs[:i]), (
            "two strokes of 1.6 pixels, and air"
        )


def test_more_than_512_devices_are_drawn_in_blocks():
    place = geometry.places(parse_mesh("dp=16 fsdp=32 tp=8").sizes, tuple(AXES), 8)
    assert place["block"] == 8 and len(place["cells"]) == 512
