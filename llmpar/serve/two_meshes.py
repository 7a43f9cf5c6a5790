"""Send values from one mesh to another in the rounds of a plan, in one compiled program.

The program runs on all devices of both meshes. A message of a round is a `ppermute` of just its elements:
where the messages of a round differ in size, all go as far as the smallest, and the others go on. So what the
compiled program sends is the plan's matrix, to the byte.

`jax.device_put` gives the same values. It takes blocks as they are where both layouts have the same ones;
else JAX (0.10.2 and 0.12) brings the whole value to the host, and from there each device its block. Between
processes it refuses.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmpar.parallel.collectives import scope, vary
from llmpar.parallel.mesh import sharding
from llmpar.plan.two_meshes import TwoMeshes


class Mover:
    """Carries values from the first mesh of a plan to the second; compiled once. Every process that has a
    device of either mesh calls it. While it runs, a device has blocks of both layouts, and two whole numbers
    for each element that it moves or keeps.

    Attributes:
        given, results: the shardings of values before and after.
        mesh: all devices of both meshes, along one axis.
        program: what `arguments` go into.
        sent_bytes: that it sends.
    """

    def __init__(self, plan: TwoMeshes):
        meshes = [side.mesh for side in plan.sides]
        if None in meshes or () in plan.shapes:
            raise ValueError(
                f"'{plan}' is between meshes without devices, or of a value without dims; give JAX's meshes"
                " to two_meshes (make_mesh), and values with dims"
            )
        devices = {d.id: d for mesh in meshes for d in mesh.devices.flat}
        self.plan, self.mesh = plan, Mesh([devices[n] for n in sorted(devices)], ("devices",))
        self.given = [sharding(meshes[0], arrow.before) for arrow in plan.arrows]
        self.results = [sharding(meshes[1], arrow.after) for arrow in plan.arrows]
        self.place = NamedSharding(self.mesh, PartitionSpec("devices"))
        self.steps, tables = _tables(plan, sorted(devices))
        sent = sum(size * len(pairs) for number, size, pairs in self.steps if number)
        self.sent_bytes, cut = sent * plan.itemsize, self.place.spec
        assert self.sent_bytes == plan.bound
        put = jax.make_array_from_callback
        self.tables = [put(x.shape, self.place, x.__getitem__) for x in tables]
        run = jax.shard_map(self._run, mesh=self.mesh, in_specs=cut, out_specs=cut)
        self.program = jax.jit(run)

    def __call__(self, values: Any) -> Any:
        """Return a tree of values on the second mesh."""
        moved, results = self.program(*self.arguments(values)), list[jax.Array]()
        for x, shape, place in zip(moved, self.plan.shapes, self.results, strict=True):
            own = [s.data for s in x.addressable_shards if s.device in place.device_set]
            results.append(jax.make_array_from_single_device_arrays(shape, place, own))
        return jax.tree.unflatten(jax.tree.structure(values), results)

    def arguments(self, values: Any) -> list[jax.Array]:
        """Return tables, and values with a block on each device of both meshes: zeros where there was none."""
        leaves, plan, arguments = jax.tree.leaves(values), self.plan, [*self.tables]
        fits = [(x.shape, x.dtype.itemsize) for x in leaves] == [
            (n, plan.itemsize) for n in plan.shapes
        ]
        places = zip(leaves, self.given, strict=False)
        if not fits or not all(x.sharding.is_equivalent_to(place, x.ndim) for x, place in places):
            raise ValueError(
                f"'{plan}' takes {plan.shapes} of {plan.itemsize} bytes an element, in the layouts before the"
                f" arrow; given are {[f'{x.dtype}{x.shape} {x.sharding}' for x in leaves]}"
            )
        for x in leaves:
            blocks = {s.device: s.data for s in x.addressable_shards}
            zeros = np.zeros(x.sharding.shard_shape(x.shape), x.dtype)
            near = self.mesh.local_devices
            parts = [blocks[d] if d in blocks else jax.device_put(zeros, d) for d in near]
            shape = self.mesh.size * len(zeros), *zeros.shape[1:]
            arguments.append(jax.make_array_from_single_device_arrays(shape, self.place, parts))
        return arguments

    def _run(self, take: jax.Array, put: jax.Array, *had: jax.Array) -> list[jax.Array]:
        """Run the steps on one device, and cut what it has then into blocks."""
        flat, begin = jnp.concatenate([x.reshape(-1) for x in had]), 0
        pairs_of_block = zip(self.results, self.plan.shapes, strict=True)
        blocks = [place.shard_shape(shape) for place, shape in pairs_of_block]
        ends = np.cumsum([*map(math.prod, blocks)])
        out = vary(jnp.zeros(ends[-1], flat.dtype), ["devices"])
        for number, size, pairs in self.steps:
            part = flat[take[0, begin : begin + size]]
            if number:
                with scope(f"{self.plan}, round {number}".replace("@", "on ")):  # XLA stops at @
                    part = lax.ppermute(part, "devices", pairs)
            out = out.at[put[0, begin : begin + size]].set(part, mode="drop")
            begin += size
        return [*map(jnp.reshape, jnp.split(out, ends[:-1]), blocks)]


def _tables(plan: TwoMeshes, devices: list[int]) -> tuple[list, list[np.ndarray]]:
    """Return steps and two tables with a row for each device, whose blocks lie one behind the other.

    A step is a round (0: what stays), a number of elements, and pairs of places in ``devices``. The tables
    tell where the elements are that a device gives in each step, and where those go that it gets (nowhere:
    the end)."""
    ends = np.cumsum([0, *map(math.prod, plan.shapes)])
    ids = [n + np.arange(math.prod(x)).reshape(x) for n, x in zip(ends, plan.shapes, strict=False)]
    cut = lambda k, box: ids[k][tuple(slice(*side) for side in box)].reshape(-1)
    ids_of = lambda parts: np.concatenate([cut(k, box) for k, box in parts])
    had, gets = (
        {n: ids_of((k, boxes[n]) for k, boxes in enumerate(of)) for n in of[0]}
        for of in (plan.before, plan.after)
    )
    find = lambda ids, own: np.argsort(own)[np.searchsorted(own, ids, sorter=np.argsort(own))]
    rounds = [{(n, n): np.intersect1d(had[n], gets[n]) for n in had.keys() & gets}]
    rounds += [{pair: ids_of(plan.messages[pair]) for pair in one} for one in plan.rounds]
    steps, columns, place = [], [], {n: i for i, n in enumerate(devices)}
    for number, one in enumerate(rounds):
        for begin, end in itertools.pairwise(sorted({0, *map(len, one.values())})):
            column = np.zeros((2, len(devices), end - begin), np.int32)
            column[1] = len(next(iter(gets.values())))
            going = {pair: x[begin:end] for pair, x in one.items() if len(x) >= end}
            for (i, j), moved in going.items():
                column[0, place[i]] = find(moved, had[i])
                column[1, place[j]] = find(moved, gets[j])
            columns.append(column)
            steps.append((number, end - begin, [(place[i], place[j]) for i, j in going]))
    return steps, [*np.concatenate(columns, 2)]
