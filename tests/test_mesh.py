"""Meshes: which devices, in which order, with how many bytes; on recorded topologies, on which links."""

import functools
import inspect
import itertools
import json
import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from shared import CASES, HERE
from test_notation import random_layout

from llmpar.inspect.links import axis_links
from llmpar.parallel.devices import POOL_SIZE
from llmpar.parallel.mesh import make_mesh, ordered_devices, shard_bytes, sharding, spec
from llmpar.parallel.placement import device_grid, link_domain
from llmpar.plan.layout import DIMS
from llmpar.plan.mesh_shape import AXES, MeshShape, near_meshes

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


def test_every_mesh_has_all_six_axes_and_the_first_devices():
    for shape in ALL:
        mesh = make_mesh(shape)
        assert dict(mesh.shape) == shape.sizes and mesh.axis_names == tuple(AXES)
        assert mesh.devices.ravel().tolist() == jax.devices()[: shape.size]
        assert set(mesh.axis_types) == {AxisType.Auto}


def test_processes_come_before_ids(monkeypatch):
    """Where devices lie in a mesh by their links is for test_mesh.py."""
    numbers = [(1, 5), (0, 2048), (1, 4), (0, 2049)]
    devices = [SimpleNamespace(process_index=process, id=i) for process, i in numbers]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert [(d.process_index, d.id) for d in inspect.unwrap(ordered_devices)()] == sorted(numbers)


def test_shard_bytes_are_what_jax_gives_every_device():
    """100 random meshes and layouts: every device's block of the value, by its own indices."""
    rng = random.Random(0)
    for _ in range(100):
        shape = rng.choice(ALL)
        layout = random_layout(rng, rng.sample(list(DIMS), rng.randrange(1, 4)), region=False, sums=False)
        cuts = [dim.axes for dim in layout.dims]
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


RECORDED = json.loads((HERE / "topologies.json").read_text())
"""What `jax.experimental.topologies` gave, a device a row: id, process, slice, x, y, z, core (-1: none)."""


@dataclass(frozen=True, eq=False)
class Device:
    """What a mesh asks of a device."""

    id: int
    process_index: int
    slice_index: int | None
    coords: tuple[int, ...]
    core_on_chip: int | None
    platform: str
    device_kind: str
    client: SimpleNamespace | None = None  # None where nothing runs: of a topology that is described


def recorded(name: str) -> list[Device]:
    """The devices of a recorded topology, in its order."""
    topology = RECORDED[name]
    none = lambda n: None if n < 0 else n
    kind = topology["platform"], topology["device_kind"]
    rows = topology["devices"]
    return [Device(i, of, none(n), (x, y, z), none(core), *kind) for i, of, n, x, y, z, core in rows]


RUNNING = SimpleNamespace(runtime_type=jax.devices()[0].client.runtime_type)


def gpus(kind: str, num_hosts: int, per_host: int, *, processes: int = 1, hosts_per_domain: int = 1) -> list:
    """GPUs of a running cluster as XLA numbers them: a slice is a host (by boot), or what NVLink joins."""
    made = []
    for host, local in itertools.product(range(num_hosts), range(per_host)):
        process, place = host * processes + local * processes // per_host, host // hosts_per_domain
        made.append(Device(len(made), process, place, (0, 0, 0), None, "gpu", kind, RUNNING))
    return made


H100 = "NVIDIA H100 80GB HBM3"
TOPOLOGIES = {name: recorded(name) for name in RECORDED} | {
    "running h100:8x8": gpus(H100, 8, 8),
    "running h100:8x8, a process per GPU": gpus(H100, 8, 8, processes=8),
    "a100:4x4": gpus("NVIDIA A100-SXM4-40GB", 4, 4),
    "gb200:2x18x4": gpus("NVIDIA GB200", 36, 4, hosts_per_domain=18),
    "one h100": gpus(H100, 1, 8),
    "one GPU": gpus("NVIDIA L4", 1, 1),
    "one TPU": recorded("v5e:4x8")[:1],
}


GRID = inspect.unwrap(device_grid)  # types are checked, and stand-ins are no JAX devices


def read(made) -> dict:
    return axis_links(SimpleNamespace(devices=made, axis_names=tuple(AXES)))


@functools.cache
def factorizations(n: int) -> list[MeshShape]:
    """All meshes of n devices."""
    return list(near_meshes(MeshShape().sizes, n))


def check(shape: MeshShape, made, devices) -> None:
    """Each device once; fast axes in their domain; on a torus boxes, the innermost by neighbours."""
    assert made.shape == tuple(shape.sizes.values())
    assert len({d.id for d in made.flat}) == shape.size and set(made.flat) <= set(devices)
    found, inner = read(made), 1
    per_domain = shape.size / len({link_domain(d) for d in made.flat})
    for axis in reversed(found):
        row = found[axis]
        inner *= row["size"]
        if per_domain % inner == 0:
            assert row["domains"] == 1, (str(shape), axis, row)
        if made.flat[0].platform == "tpu":
            assert math.prod(row["dims"]) == row["size"] / row["domains"], (str(shape), axis, row)
    if found and made.flat[0].platform == "tpu":
        assert [*found.values()][-1]["hops"] <= 1, (str(shape), found)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_mesh_of_all_devices_follows_their_links(name):
    """Fifteen factorizations of the number of devices, and each axis alone."""
    devices = TOPOLOGIES[name]
    rng = random.Random(name)
    every = factorizations(len(devices))
    shapes = rng.sample(every, min(15, len(every)))
    for shape in shapes + [MeshShape(**{axis: len(devices)}) for axis in AXES]:
        check(shape, GRID(shape, devices), devices)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_smaller_mesh_takes_devices_that_lie_together(name):
    """GPUs: every one is laid out. TPUs: every one that fits a box; others are refused with what works."""
    devices, rng = TOPOLOGIES[name], random.Random(name)
    for _ in range(10):
        size = rng.randint(1, len(devices))
        shape = rng.choice(factorizations(size))
        try:
            made = GRID(shape, devices)
        except ValueError as error:
            assert devices[0].platform == "tpu" and str(error).endswith(f"'!{shape}' for plain order")
            assert GRID(f"!{shape}", devices).ravel().tolist() == devices[: shape.size]
            continue
        assert len({d.id for d in made.flat}) == shape.size
        if made.flat[0].platform == "tpu":
            check(shape, made, devices)


def test_a_hole_in_a_slice_and_slices_of_several_sizes_are_refused_and_the_advice_works():
    v5p, two = TOPOLOGIES["v5p:4x4x4"], TOPOLOGIES["2 x v5e:4x8"]
    uneven = [*two, *(replace(d, id=900 + d.id, slice_index=2) for d in two[:4])]
    for devices, mesh, many in (
        (v5p[:6] + v5p[8:10], "dp=2 tp=4", "8"),
        (uneven, "dp=17 tp=4", r"32 \+ 32 \+ 4"),
    ):
        said = rf"mesh '{mesh}' was asked for on {many} x TPU v5.* no equal boxes .* '!{mesh}'"
        with pytest.raises(ValueError, match=said):
            GRID(mesh, devices)
        assert GRID("!" + mesh, devices).ravel().tolist() == devices


def test_hosts_with_several_numbers_of_gpus_are_used_as_well_as_can_be():
    """2 + 1 + 1 GPUs, and 8 + 8 + 4: the fast axis stays inside a host where it can."""
    few = [d for d in gpus(H100, 3, 2) if d.id not in (3, 5)]
    some = [d for d in gpus(H100, 3, 8) if d.id < 20]
    pairs = GRID("dp=2 tp=2", few).reshape(2, 2)
    assert sorted(len({d.process_index for d in pair}) for pair in pairs) == [1, 2]
    for mesh, domains in {"dp=5 tp=4": {"dp": 3, "tp": 1}, "fsdp=20": {"fsdp": 3}}.items():
        assert {axis: row["domains"] for axis, row in read(GRID(mesh, some)).items()} == domains


@pytest.mark.parametrize("name", ["v5e:2x4", "v5e:4x8", "v5p:2x2x2", "v5p:4x4x4", "v6e:16x16", "v3:4x4"])
def test_a_ring_over_a_whole_slice_goes_round_it_link_by_link(name):
    """Ring attention sends to the next rank: every hop is one link, the last one back to the first, too."""
    devices = TOPOLOGIES[name]
    ring = GRID(f"sp={len(devices)}", devices).ravel()
    for d, e in zip(ring, [*ring[1:], ring[0]], strict=True):
        hops = sum(abs(a - b) for a, b in zip(d.coords, e.coords, strict=True))
        assert hops in (0, 1)  # 0: between the cores of a chip
