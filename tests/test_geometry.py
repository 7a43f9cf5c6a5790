"""Python and JAX agree on who holds what; rounds end as collectives do."""

import json
import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from shared import program_text

from llmpar.draw import geometry
from llmpar.plan.layout import DIMS, Dim, Layout
from llmpar.plan.mesh_shape import AXES, parse_mesh


def cases(num=300, most=64, seed=6):
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


def test_slices_are_where_jax_puts_them_in_300_random_cases():
    """64 simulated devices, so in a process of its own."""
    asked = cases()
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=64", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program_text("slices_of_jax")]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    refused = 0
    for case, told in zip(asked, json.loads(done.stdout), strict=True):
        ours, sizes = held(case), case["sizes"]
        own = [
            geometry.block(layout(case), sizes, geometry.coordinates(sizes, AXES, d))
            for d in range(len(ours))
        ]
        where = {block: [d for d, other in enumerate(own) if other == block] for block in own}
        assert geometry.holders(layout(case), sizes) == where
        if told is None:
            refused += 1
            assert None in ours, case
        else:
            assert [[list(cut) for cut in device] for device in ours] == told, case
    assert 5 < refused < 60


def test_groups_differ_along_their_axes_only_and_cover_the_mesh():
    """Beside numpy's own order of a grid of devices."""
    for text in ("dp=2 fsdp=2 tp=2", "pp=2 dp=3 sp=2", "dp=1"):
        sizes = parse_mesh(text).sizes
        grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        for axes in (("dp",), ("tp",), ("dp", "fsdp"), ("fsdp", "dp", "tp"), ("sp", "pp")):
            last = np.moveaxis(grid, [list(AXES).index(a) for a in axes], range(-len(axes), 0))
            rows = last.reshape(-1, math.prod(sizes[a] for a in axes)).tolist()
            assert geometry.groups(sizes, AXES, axes) == rows


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
        assert [[bool(block) for block in rank] for rank in own] == (np.array(step["held"]) > 0).tolist()
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
        assert step["held"] == [[sum(to == b for _, to in mine) for b in range(g)] for mine in own]
        assert all(sum(row) == g for row in step["held"]), "g pieces before, g after"
    assert own == [{(source, rank) for source in range(g)} for rank in range(g)] and len(steps) == g
    assert steps == geometry.rounds("ragged-all-to-all", g)


def test_a_permute_is_one_hop():
    start, end = geometry.rounds("collective-permute", 4)
    assert [[s, d] for s, d, _ in end["sends"]] == [[0, 1], [1, 2], [2, 3], [3, 0]]
    assert np.array_equal(end["held"], np.roll(start["held"], 1, 0)), "all of what a rank has goes on"
