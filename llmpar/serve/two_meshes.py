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
from llmpar.plan.two_meshes import Boxes, TwoMeshes

Step = tuple[int, int, list[tuple[int, int]]]  # round (0: what stays), elements, pairs of places


class Mover:
    """Carries values from the first mesh of a plan to the second; compiled once. Every process that has a
    device of either mesh calls it. While it runs, a device has blocks of both layouts, and two whole numbers
    for each element that it moves or keeps.

    Attributes:
        mesh: all devices of both meshes, along one axis.
        shardings: of the results.
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
        self.shardings = [sharding(meshes[1], arrow.after) for arrow in plan.arrows]
        self.place = NamedSharding(self.mesh, cut := PartitionSpec("devices"))
        self.steps, tables = _tables(plan, sorted(devices))
        make = jax.make_array_from_callback
        self.tables = [make(x.shape, self.place, x.__getitem__) for x in tables]
        self.program = jax.jit(
            jax.shard_map(self._run, mesh=self.mesh, in_specs=cut, out_specs=cut)
        )

    def __call__(self, values: Any) -> Any:
        """Return a tree of values on the second mesh."""
        moved, results = self.program(*self.arguments(values)), list[jax.Array]()
        join = jax.make_array_from_single_device_arrays
        for x, shape, place in zip(moved, self.plan.shapes, self.shardings, strict=True):
            own = [s.data for s in x.addressable_shards if s.device in place.device_set]
            results.append(join(shape, place, own, dtype=x.dtype))
        return jax.tree.unflatten(jax.tree.structure(values), results)

    def arguments(self, values: Any) -> list[jax.Array]:
        """Return what `program` takes, to look at it: tables, and values with their blocks on all devices of
        both meshes, zeros where there are none."""
        leaves, shapes = jax.tree.leaves(values), self.plan.shapes
        given = [(x.shape, x.dtype.itemsize) for x in leaves]
        fits = given == [(shape, self.plan.itemsize) for shape in shapes]
        places = zip(leaves, self.given, strict=False)
        if not fits or not all(x.sharding.is_equivalent_to(to, x.ndim) for x, to in places):
            raise ValueError(
                f"'{self.plan}' takes {shapes} of {self.plan.itemsize} bytes an element, in the layout before"
                f" the arrow; given are {[f'{x.dtype}{x.shape} {x.sharding}' for x in leaves]}"
            )
        arguments, join = self.tables[:], jax.make_array_from_single_device_arrays
        for x, boxes in zip(leaves, self.plan.before, strict=True):
            blocks, shape = {s.device: s.data for s in x.addressable_shards}, _block(boxes)
            parts = [
                blocks[d] if d in blocks else jax.device_put(np.zeros(shape, x.dtype), d)
                for d in self.mesh.local_devices
            ]
            arguments.append(join((shape[0] * self.mesh.size, *shape[1:]), self.place, parts))
        return arguments

    def _run(self, take: jax.Array, put: jax.Array, *had: jax.Array) -> list[jax.Array]:
        """Run the steps on one device, and cut what it has then into blocks."""
        flat, blocks = jnp.concatenate([x.reshape(-1) for x in had]), map(_block, self.plan.after)
        ends, begin = np.cumsum([math.prod(block) for block in blocks]), 0
        out = vary(jnp.zeros(ends[-1], flat.dtype), ["devices"])
        for number, size, pairs in self.steps:
            part = flat[take[0, begin : begin + size]]
            if number:
                with scope(f"{self.plan}, round {number}".replace("@", "on ")):  # XLA stops at @
                    part = lax.ppermute(part, "devices", pairs)
            out = out.at[put[0, begin : begin + size]].set(part, mode="drop")
            begin += size
        parts = zip(jnp.split(out, ends[:-1]), self.plan.after, strict=True)
        return [part.reshape(_block(boxes)) for part, boxes in parts]


def _block(boxes: Boxes) -> tuple[int, ...]:
    """Return the shape of a device's block."""
    return tuple(end - begin for begin, end in next(iter(boxes.values())))


def _tables(plan: TwoMeshes, devices: list[int]) -> tuple[list[Step], list[np.ndarray]]:
    """Return the steps, and two tables with a row for each device, whose blocks lie one behind the other:
    where the elements are that it gives in each step, and where those go that it gets (nowhere: the end)."""
    sizes = map(math.prod, plan.shapes)
    ends = np.cumsum([0, *sizes])
    ids = [n + np.arange(math.prod(x)).reshape(x) for n, x in zip(ends, plan.shapes, strict=False)]
    cut = lambda k, box: ids[k][tuple(slice(*ends) for ends in box)].reshape(-1)
    ids_of = lambda parts: np.concatenate([cut(k, box) for k, box in parts])
    had, gets = (
        {n: ids_of((k, boxes[n]) for k, boxes in enumerate(of)) for n in of[0]}
        for of in (plan.before, plan.after)
    )
    rounds = [{(n, n): np.intersect1d(had[n], gets[n]) for n in had.keys() & gets}]
    rounds += [{pair: ids_of(plan.messages[pair]) for pair in one} for one in plan.rounds]
    steps, columns = list[Step](), []
    for number, one in enumerate(rounds):
        lengths = sorted({0, *map(len, one.values())})
        for begin, end in itertools.pairwise(lengths):
            going = {pair: x[begin:end] for pair, x in one.items() if len(x) >= end}
            column = np.zeros((2, len(devices), end - begin), np.int32)
            column[1] = len(next(iter(gets.values())))
            for (i, j), moved in going.items():
                column[0, devices.index(i)] = _find(had[i], moved)
                column[1, devices.index(j)] = _find(gets[j], moved)
            columns.append(column)
            pairs = [(devices.index(i), devices.index(j)) for i, j in going]
            steps.append((number, end - begin, pairs))
    return steps, [*np.concatenate(columns, 2)]


def _find(ids: np.ndarray, some_ids: np.ndarray) -> np.ndarray:
    order = np.argsort(ids)
    return order[np.searchsorted(ids, some_ids, sorter=order)]
