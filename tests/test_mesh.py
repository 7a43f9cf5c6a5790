"""Meshes: which devices, in which order, and how many bytes of a value each of them holds."""

import inspect
import itertools
import json
import math
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from shared import CASES, HERE

from llmpar.parallel.devices import POOL_SIZE
from llmpar.parallel.mesh import (
    abstract_mesh,
    make_mesh,
    ordered_devices,
    shard_bytes,
    sharding,
    spec,
    use_devices,
)
from llmpar.plan.layout import DIMS, Dim, Layout, parse_layout
from llmpar.plan.mesh_shape import AXES, MeshShape

ALL = [MeshShape(*sizes) for sizes in itertools.product((1, 2, 4, 8), repeat=6) if math.prod(sizes) <= 8]


def in_a_fresh_process(code: str, given: str = "", **variables: str) -> subprocess.CompletedProcess:
    """Run Python code without what conftest told JAX."""
    told = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", *POOL_SIZE)
    environment = {k: v for k, v in os.environ.items() if k not in told}
    environment |= {"JAX_PLATFORMS": "cpu"} | variables
    words = [sys.executable, "-c", code]
    return subprocess.run(words, env=environment, input=given, capture_output=True, text=True, timeout=600)


FRESH = CASES["fresh"]
CHILDREN = (HERE / "fixtures" / "mesh_children.txt").read_text()


@pytest.fixture(scope="module")
def fresh():
    """What each of `FRESH` prints, in a child of one process that has imported JAX and not started it."""
    codes = {name: case["code"] for name, case in FRESH.items()}
    done = in_a_fresh_process(CHILDREN, json.dumps(codes))
    return dict(part.split("\n", 1) for part in done.stdout.split("--- ")[1:]), done.stderr


@pytest.mark.parametrize("case", FRESH)
def test_devices_are_chosen_and_simulated_only_before_jax_starts(case, fresh):
    said, errors = fresh
    assert FRESH[case]["says"] in said[case], (said, errors)


MANY_STEPS = (HERE / "fixtures" / "mesh_many_steps.txt").read_text()


def test_a_thousand_steps_that_nobody_waits_for_do_not_deadlock():
    """With XLA's own pool of a thread per device JAX 0.10.2 aborts here."""
    done = in_a_fresh_process(MANY_STEPS, XLA_FLAGS="--xla_force_host_platform_device_count=9")
    assert done.stdout.split() == ["9", "True"], done.stderr[-2000:]


def test_here_there_are_eight():
    assert len(use_devices(8)) == 8 == len(ordered_devices())
    with pytest.raises(ValueError, match="9 simulated devices were asked for but JAX has started with 8"):
        use_devices(9)
    with pytest.raises(ValueError, match="0 simulated devices were asked for; use 1 to 1024"):
        use_devices(0)


def test_every_mesh_has_all_six_axes_and_the_first_devices():
    for shape in ALL:
        mesh = make_mesh(shape)
        assert dict(mesh.shape) == shape.sizes and mesh.axis_names == tuple(AXES)
        assert mesh.devices.ravel().tolist() == jax.devices()[: shape.size]
        assert set(mesh.axis_types) == {AxisType.Auto}


def test_a_mesh_may_be_a_string_a_part_of_the_devices_or_given_devices():
    assert make_mesh("dp=-1 tp=2") == make_mesh(MeshShape(dp=4, tp=2))
    last = jax.devices()[4:]
    assert make_mesh("fsdp=2 tp=2", last).devices.ravel().tolist() == last
    assert make_mesh("dp=-1", last).devices.size == 4
    backwards = last[::-1]
    assert make_mesh("!tp=4", backwards).devices.ravel().tolist() == backwards


def test_an_abstract_mesh_needs_no_devices():
    mesh = abstract_mesh("dp=16 fsdp=512 tp=8")
    assert mesh.size == 65_536 and dict(mesh.shape)["fsdp"] == 512 and mesh.axis_names == tuple(AXES)
    layout = parse_layout("b/dp,fsdp d/tp")
    assert sharding(mesh, layout).shard_shape((65_536, 64)) == (8, 8)
    with pytest.raises(ValueError, match="needs the number of devices"):
        abstract_mesh("dp=-1")


def test_processes_come_before_ids(monkeypatch):
    """Where devices lie in a mesh by their links is for test_links.py."""
    numbers = [(1, 5), (0, 2048), (1, 4), (0, 2049)]
    devices = [SimpleNamespace(process_index=process, id=i) for process, i in numbers]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert [(d.process_index, d.id) for d in inspect.unwrap(ordered_devices)()] == sorted(numbers)


def test_shard_bytes_are_what_jax_gives_every_device():
    """100 random meshes and layouts: every device's block of the value, by its own indices."""
    rng = random.Random(0)
    for _ in range(100):
        shape = rng.choice(ALL)
        letters = rng.sample(list(DIMS), rng.randrange(1, 4))
        axes = rng.sample(list(AXES), rng.randrange(len(AXES) + 1))
        homes = [rng.randrange(len(letters)) for _ in axes]
        cuts = [
            tuple(a for a, home in zip(axes, homes, strict=True) if home == i) for i in range(len(letters))
        ]
        layout = Layout(tuple(map(Dim, letters, cuts)))
        value = tuple(math.prod(shape.sizes[a] for a in cut) * rng.choice([1, 3, 8]) for cut in cuts)
        mesh = make_mesh(shape)
        itemsize = rng.choice([1, 2, 4])
        blocks = NamedSharding(mesh, spec(layout)).devices_indices_map(value)
        held = {
            math.prod(len(range(*i.indices(n))) for i, n in zip(index, value, strict=True))
            for index in blocks.values()
        }
        assert {n * itemsize for n in held} == {shard_bytes(layout, value, itemsize, shape.sizes)}
        assert layout.shard_shape(value, shape.sizes) == sharding(mesh, layout).shard_shape(value)
