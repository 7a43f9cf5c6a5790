"""A picture of a tensor on a mesh shows what each device holds, and moves as the collectives do."""

import json
import math
import random
import re

import jax
import numpy as np
import pytest
from counted import calls
from jax.sharding import Mesh, NamedSharding
from test_draw import layer_of, overlaps, tensor

from llmpar import draw
from llmpar.draw import geometry, grid
from llmpar.draw.scene import MOVING, Line, Rect, Text, flatten
from llmpar.parallel.mesh import spec
from llmpar.plan.layout import DIMS, Dim, Layout
from llmpar.plan.mesh_shape import AXES

STILL = [one for one in layer_of("dp=2") if not one.axes][:1]
"""A layer in which nothing is sent: while it is computed, devices are drawn one by one."""


def cells_of(scene, frames=(-1, MOVING)):
    """What can be clicked: what a click sets, and the rectangle."""
    rects = [item for item in flatten(scene.items) if isinstance(item, Rect) and item.act]
    rects = [rect for rect in rects if rect.frame in frames]
    return [(json.loads(rect.act)["device"], rect) for rect in rects]


def ink_in(scene, cell, fill="weights"):
    """The inked rectangles of a cell, as shares of its sides."""
    out = []
    for item in flatten(scene.items):
        seen = isinstance(item, Rect) and item.fill == fill and item.frame == cell.frame
        if seen and cell.x - 0.1 <= item.x < cell.x + cell.w:
            if cell.y - 0.1 <= item.y < cell.y + cell.h:
                ends = (item.y - cell.y, item.h, cell.h), (item.x - cell.x, item.w, cell.w)
                out.append([(low / room, (low + wide) / room) for low, wide, room in ends])
    return out


def cut(rng, most, names="dm"):
    """A mesh of at most ``most`` devices, and a tensor of the dims ``names`` that it cuts evenly."""
    while True:
        sizes = {axis: rng.choice((1, 1, 2, 3, 4, 8)) for axis in AXES}
        order, free = rng.sample(list(AXES), 6), rng.sample(list(AXES), 6)
        dims = []
        for name in names:
            dims.append(Dim(name, tuple(free.pop() for _ in range(rng.randint(0, min(2, len(free)))))))
        shape = [math.prod(sizes[a] for a in dim.axes) * rng.randint(1, 3) for dim in dims]
        if most / 8 < math.prod(sizes.values()) <= most:
            return {a: sizes[a] for a in order}, order, Layout(tuple(dims)), [max(2, n) for n in shape]


@pytest.mark.parametrize("seed", range(10))
def test_a_device_is_inked_where_it_holds_the_tensor(seed):
    sizes, order, layout, shape = cut(random.Random(seed), 64)
    if any(n % math.prod(sizes[a] for a in d.axes) for n, d in zip(shape, layout.dims, strict=True)):
        shape = [math.prod(sizes[a] for a in dim.axes) * 2 for dim in layout.dims]
    n = math.prod(sizes.values())
    scene = draw.tensor_grid(layout, shape, sizes, 8, seed % n, segments=STILL)
    cells = cells_of(scene)
    assert [device for device, _ in cells] == list(range(n))
    for device, cell in cells:
        at = geometry.coordinates(sizes, order, device)
        held = geometry.slices(layout, shape, sizes, at)
        (inked,) = ink_in(scene, cell)
        for (low, high), (a, b), whole, room in zip(inked, held, shape, (cell.h, cell.w), strict=True):
            assert low <= a / whole + 0.01 and high >= b / whole - 0.01
            assert (high - low) * room <= max(2.5, (b - a) / whole * room) + 0.01, "no more than it holds"
        words = [f"{d.name} {a}:{b}" for d, (a, b) in zip(layout.dims, held, strict=True)]
        parts = [math.prod(sizes[a] for a in d.axes) for d in layout.dims]
        assert all(word in cell.tip for word, count in zip(words, parts, strict=True) if count > 1)
        mine = geometry.slices(layout, shape, sizes, geometry.coordinates(sizes, order, seed % n))
        assert cell.width == (2.5 if device == seed % n else 1.25 if held == mine else 0)


SLICE = re.compile(r"(\w) (\d+):(\d+)")
LAYOUTS = [
    cut(random.Random(seed), most, names)
    for seed in range(4)
    for most in (64, 4096)
    for names in ("dm", "ldm")
]
LAYOUTS += [
    ({"fsdp": n, "tp": 2}, ["fsdp", "tp"], Layout((Dim("d", ("fsdp", *down)), Dim("m", across))), [0])
    for n, down, across in ((61, (), ("tp",)), (27, ("tp",), ()))
]


@pytest.mark.parametrize("sizes, order, layout, shape", LAYOUTS)
def test_blocks_tile_the_one_tensor_and_name_the_first_device_that_holds_them(sizes, order, layout, shape):
    n, parts = math.prod(sizes.values()), [math.prod(sizes[a] for a in dim.axes) for dim in layout.dims]
    shape = [count * 2 for count in parts]
    scene = draw.tensor_grid(layout, shape, sizes, 8, n // 3, segments=STILL)
    assert scene.width == 560 and scene.height < 560
    assert not overlaps(scene) or n == 122, "labels stay apart (of 61 x 2 a frame is 8 pixels too wide)"
    blocks, held = cells_of(scene, [0]), dict[int, list]()
    slices = [SLICE.findall(r.tip.split(": ")[1]) for _, r in blocks]
    spans = [{name: (int(a), int(b)) for name, a, b in found} for found in slices]
    for at in range(n):
        own = geometry.slices(layout, shape, sizes, geometry.coordinates(sizes, order, at))
        inside = lambda span, own=own: all(
            span.get(dim.name, (0, whole))[0] <= a and b <= span.get(dim.name, (0, whole))[1]
            for dim, whole, (a, b) in zip(layout.dims, shape, own, strict=True)
        )
        (k,) = [k for k, span in enumerate(spans) if inside(span)]
        held.setdefault(k, []).append(at)
    for k, (owner, rect) in enumerate(blocks):
        num, more = (re.search(text, rect.tip) for text in (r"^(\d+) blocks", r"and (\d+) more"))
        num, copies = int(num[1]) if num else 1, 1 + int(more[1]) if more else 1
        assert held[k][0] == owner and f"device {owner}" in rect.tip and len(held[k]) == num * copies
        assert copies == n // math.prod(parts)
    # They lie as their slices do: rows and columns without a hole, but for gaps around an outer dim's.
    starts = [tuple(a for a, _ in span.values()) for span in spans]
    places = [(r.y, r.x) for _, r in blocks]
    assert starts == sorted(starts) and places == sorted(places)
    counts = []
    for low, long in (("x", "w"), ("y", "h")):
        lines = sorted({(round(getattr(r, low), 3), round(getattr(r, long), 3)) for _, r in blocks})
        gaps = {round(b - a - wide, 2) for (a, wide), (b, _) in zip(lines, lines[1:], strict=False)}
        assert gaps <= ({0, 8} if low == "y" and len(layout.dims) > 2 else {0}) and len(lines) <= 25
        counts.append(len(lines))
    assert math.prod(counts) == len(blocks)


@pytest.mark.parametrize("seed", range(4))
def test_a_cell_of_many_devices_is_inked_where_any_of_them_holds_the_tensor(seed):
    rng = random.Random(seed)
    sizes, order, layout, _ = cut(rng, 512)
    while math.prod(sizes.values()) <= grid.MOST_CELLS:
        sizes, order, layout, _ = cut(rng, 512)
    parts = [math.prod(sizes[a] for a in dim.axes) for dim in layout.dims]
    shape, n = [2 * count for count in parts], math.prod(sizes.values())
    scene = draw.tensor_grid(layout, shape, sizes, 8, device := rng.randrange(n), segments=STILL)
    blocks = [(d, r) for d, r in cells_of(scene) if r.tip.startswith("devices")]
    singles = [(d, r) for d, r in cells_of(scene) if r.tip.startswith("device ")]
    assert device in [d for d, _ in singles] and 2 <= len(blocks) <= grid.MOST_CELLS
    block = n // len(blocks)
    for i, (sets, cell) in enumerate(blocks):
        assert i * block <= sets < (i + 1) * block and sets % block == device % block
        inked = ink_in(scene, cell)
        for other in range(i * block, (i + 1) * block):
            held = geometry.block(layout, sizes, geometry.coordinates(sizes, order, other))
            y, x = ((index + 0.5) / count for index, count in zip(held, parts, strict=True))
            assert any(t - 0.02 <= y <= b + 0.02 and l - 0.02 <= x <= r + 0.02 for (t, b), (l, r) in inked)
        if block < n // 4 and max(parts) <= 8:  # no more than they hold, where that can be seen
            at = (geometry.coordinates(sizes, order, d) for d in range(i * block, (i + 1) * block))
            held = {geometry.block(layout, sizes, place) for place in at}
            area = sum((b - t) * (r - l) for (t, b), (l, r) in inked)
            assert area == pytest.approx(len(held) / math.prod(parts), abs=0.05)


def test_each_segment_of_a_layer_has_a_frame_in_the_grid_and_in_the_lanes():
    segments = layer_of("fsdp=8 tp=8", "llama3-70b")
    scene = tensor("fsdp=8 tp=8", "blocks.ffn.gate", 21, segments=segments)
    lanes, told = draw.layer_lanes(segments, 80), grid.frames(segments)
    assert len(told) == len(segments) + 1 and all(frame["seconds"] >= 0.5 for frame in told)
    for k, one in enumerate(segments, 1):
        now = [item for item in flatten(scene.items) if item.frame == k]
        words = " ".join(item.text for item in now if isinstance(item, Text))
        assert words == told[k]["text"] and one.name.lower() in words.lower()
        group = geometry.groups({"fsdp": 8, "tp": 8}, ("fsdp", "tp"), one.axes) if one.axes else []
        team = next((team for team in group if 21 in team), [21])
        tips = dict(cells_of(scene))
        outlined = [item for item in now if isinstance(item, Rect)]
        spots = {(tips[d].x, tips[d].y) for d in team if d != 21}
        assert {(item.x, item.y) for item in outlined} == spots, "the group of device 21"
        arrows = [item for item in now if isinstance(item, Line) and item.stroke != "paper"]
        assert len(arrows) == (len(team) if one.axes else 0), "once round the ring"
        assert all(item.stroke == f"{one.axes[0]}-line" for item in arrows)
        cursor = [item for item in flatten(lanes.items) if item.frame == k and isinstance(item, Rect)]
        bars = [item for item in flatten(lanes.items) if isinstance(item, Rect) and item.frame < 0]
        bars = [bar for bar in bars if bar.tip.startswith(f"{one.name}: ")]
        (bar,) = [bar for bar in bars if abs(bar.x - cursor[0].x) < 1.5]
        assert cursor[0].w == pytest.approx(bar.w + 2)
    said = [frame["text"] for frame in told]
    gather = next(text for text in said if text.startswith("Next: q, k, v, output"))
    assert "all-gather over fsdp, 8 devices; pieces go round" in gather
    assert "Each sends 31.5 MiB in 6 messages" in gather


def test_tokens_go_to_every_other_expert_rank():
    segments = layer_of("ep=8", "qwen3-30b-a3b")
    layout, sizes = Layout((Dim("e", ("ep",)), Dim("d"))), {"ep": 8}
    scene = draw.tensor_grid(layout, (128, 64), sizes, 8, 5, segments=segments)
    k = next(k for k, one in enumerate(segments, 1) if one.name == "tokens to experts")
    lines = [i for i in flatten(scene.items) if isinstance(i, Line) and i.frame == k and i.stroke != "paper"]
    assert len(lines) == 7 and len({line.points[0][0] for line in lines}) == 2, "from one device, both ways"


def test_a_picture_of_sixteen_thousand_devices_is_small_and_no_more_work_than_one_of_hundreds():
    gate = lambda mesh, device: tensor(mesh, "blocks.ffn.gate", device, segments=STILL)
    gate("pp=16 dp=128 tp=8", 5000)
    few = calls(lambda: gate("pp=16 dp=2 tp=8", 5))
    for mesh in ("pp=16 dp=128 tp=8", "fsdp=2048 tp=8"):
        assert calls(lambda mesh=mesh: gate(mesh, 5000)) < 2 * few
        scene = gate(mesh, 5000)
        assert scene.width == 560 and scene.height < 520 and len(flatten(scene.items)) < 1000
        words = [t.text for t in flatten(scene.items) if isinstance(t, Text) and t.frame == MOVING]
        assert re.search(r"devices 5000–5007 one by one", " ".join(words))


def test_slices_are_where_jax_puts_them_in_300_random_cases():
    """Some shapes cannot be cut."""
    rng, refused = random.Random(6), 0
    for _ in range(300):
        sizes, order, layout, shape = cut(rng, 8, rng.sample(list(DIMS), rng.randint(1, 4)))
        shape = [n + (rng.random() < 0.06) for n in shape]
        devices = np.array(jax.devices()[: math.prod(sizes.values())])
        mesh = Mesh(devices.reshape([sizes[axis] for axis in order]), order)
        places = [geometry.coordinates(sizes, order, device) for device in range(devices.size)]
        ours = [geometry.slices(layout, shape, sizes, place) for place in places]
        own = [
            geometry.block(layout, sizes, geometry.coordinates(sizes, AXES, d)) for d in range(devices.size)
        ]
        where = {block: [d for d, other in enumerate(own) if other == block] for block in own}
        assert geometry.holders(layout, sizes) == where
        try:
            told = NamedSharding(mesh, spec(layout)).devices_indices_map(tuple(shape))
        except ValueError:
            refused += 1
            assert None in ours
            continue
        for device, cuts in zip(devices, ours, strict=True):
            assert [x.indices(n)[:2] for x, n in zip(told[device], shape, strict=True)] == list(cuts)
    assert 5 < refused < 60


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce"])
@pytest.mark.parametrize("g", [1, 2, 3, 5, 8])
def test_rounds_carry_out_the_collective(kind, g):
    """Whose numbers are in each block of each rank, round by round; and `held` counts what arrived."""
    every, reduces = set(range(g)), kind != "all-gather"
    own = [[{rank} if reduces or rank == b else set() for b in range(g)] for rank in range(g)]
    steps = geometry.rounds(kind, g)
    for t, step in enumerate(steps[1:]):
        adds = kind == "reduce-scatter" or kind == "all-reduce" and t < g - 1
        sources, targets, _ = zip(*step["sends"], strict=True)
        assert sorted(sources) == sorted(targets) == [*range(g)]
        sent = [(source, target, b, own[source][b]) for source, target, b in step["sends"]]
        for _, target, b, numbers in sent:
            assert numbers, "a rank sends what it has"
            assert not adds or not numbers & own[target][b], "and adds nothing twice"
            own[target][b] = numbers | own[target][b] if adds else numbers
        for source, _, b, _ in sent if adds else ():
            own[source][b] = set()
        assert step["held"] == own
    scattered = [[every if rank == b else set() for b in range(g)] for rank in range(g)]
    gathered = [[every if reduces else {b} for b in range(g)]] * g
    assert own == (scattered if kind == "reduce-scatter" else gathered)
    assert len(steps) - 1 == (2 if kind == "all-reduce" else 1) * (g - 1), "as many rounds as a ring has"


@pytest.mark.parametrize("g", [1, 2, 3, 5, 8])
def test_an_all_to_all_is_a_transpose_and_gathers_nothing(g):
    own = [{(rank, to) for to in range(g)} for rank in range(g)]  # pieces, from whom and for whom
    steps = geometry.rounds("all-to-all", g)
    for step in steps:
        for source, target, b in step["sends"]:
            assert b == target and (source, target) in own[source], "it goes straight to where it belongs"
            own[source].remove((source, target))
            own[target].add((source, target))
        assert step["held"] == [[{rank for rank, to in mine if to == b} for b in range(g)] for mine in own]
    assert own == [{(source, rank) for source in range(g)} for rank in range(g)] and len(steps) == g
    assert steps == geometry.rounds("ragged-all-to-all", g)
