"""Send values from one mesh to another within a process, message by message, in the rounds of a plan.

A sender cuts its blocks into one flat message for each receiver, which puts the parts where they belong and
keeps what it had itself: a program for each device. Between them are the plan's messages and nothing else.

`jax.device_put` gives the same values. It takes blocks as they are where both layouts have the same ones;
else JAX (0.10.2 and 0.12) brings the whole value to the host, and from there each device its block.
"""

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp

from llmpar.parallel.mesh import sharding
from llmpar.plan.two_meshes import Ranges, TwoMeshes, common, volume


class Mover:
    """Carries values from the first mesh of a plan to the second; compiled once. It needs all devices in one
    process.

    Attributes:
        given, results: the shardings of values before and after.
        sent_bytes: of the last call, added up as messages left.
    """

    def __init__(self, plan: TwoMeshes):
        meshes = [side.mesh for side in plan.sides]
        if None in meshes or jax.process_count() > 1:
            raise ValueError(
                f"'{plan}' is between meshes without devices, or of {jax.process_count()} processes; give"
                " two_meshes JAX's meshes (make_mesh), of one process"
            )
        self.plan = plan
        self.devices = {d.id: d for mesh in meshes for d in mesh.devices.flat}
        self.given = [sharding(meshes[0], arrow.before) for arrow in plan.arrows]
        self.results = [sharding(meshes[1], arrow.after) for arrow in plan.arrows]
        self._give = jax.jit(self._messages, static_argnums=0)
        self._take = jax.jit(self._blocks, static_argnums=0)

    def __call__(self, values: Any) -> Any:
        """Return a tree of values on the second mesh."""
        leaves, plan = jax.tree.leaves(values), self.plan
        sizes = [dtype.itemsize for dtype in {x.dtype for x in leaves}]
        fits = [x.shape for x in leaves] == [*plan.shapes] and sizes == [plan.itemsize]
        lies = lambda x, to: isinstance(x, jax.Array) and x.sharding.is_equivalent_to(to, x.ndim)
        if not fits or not all(map(lies, leaves, self.given)):
            raise ValueError(
                f"'{plan}' takes {plan.shapes} of one dtype of {plan.itemsize} bytes, as jax.device_put(x,"
                " given[i]) lays them; given are"
                f" {[f'{x.dtype}{x.shape} {x.__class__.__name__}' for x in leaves]}"
            )
        shards = [{s.device.id: s.data for s in x.addressable_shards} for x in leaves]
        had = {n: [blocks.get(n) for blocks in shards] for n in self.devices}
        messages = {i: self._give(i, had[i]) for i in plan.sides[0].node_of}
        arrived, self.sent_bytes = defaultdict[int, dict[int, jax.Array]](dict), 0
        for i, j in (pair for one in plan.rounds for pair in one):
            arrived[j][i] = jax.device_put(messages[i][j], self.devices[j])
            self.sent_bytes += messages[i][j].nbytes
        blocks = [self._take(j, had[j], arrived[j]) for j in plan.sides[1].node_of]
        join = jax.make_array_from_single_device_arrays
        results = map(join, plan.shapes, self.results, zip(*blocks, strict=True))
        return jax.tree.unflatten(jax.tree.structure(values), results)

    def _messages(self, i: int, had: list[jax.Array]) -> dict[int, jax.Array]:
        """Return what device i sends, by receiver."""
        own = [(j, parts) for (n, j), parts in self.plan.messages.items() if n == i]
        part = lambda k, box: had[k][_inside(box, self.plan.before[k][i])].reshape(-1)
        return {j: jnp.concatenate([part(*each) for each in parts]) for j, parts in own}

    def _blocks(
        self, j: int, had: list[jax.Array | None], arrived: dict[int, jax.Array]
    ) -> list[jax.Array]:
        """Return the blocks of device j after the arrow."""
        parts = defaultdict[int, list[tuple[Ranges, jax.Array]]](list)
        for i, message in arrived.items():
            for k, box in self.plan.messages[i, j]:
                parts[k].append((box, message[: volume(box)]))
                message = message[volume(box) :]
        blocks = list[jax.Array]()
        for k, after in enumerate(self.plan.after):
            if (own := had[k]) is not None:
                box = common(self.plan.before[k][j], after[j])
                parts[k] += [(box, own[_inside(box, self.plan.before[k][j])])] * (volume(box) > 0)
            block = jnp.zeros([b - a for a, b in after[j]], parts[k][0][1].dtype)
            for box, part in parts[k]:
                block = block.at[_inside(box, after[j])].set(part.reshape([b - a for a, b in box]))
            blocks.append(block)
        return blocks


def _inside(box: Ranges, block: Ranges) -> tuple[slice, ...]:
    """Return where a box is in a block, as an index."""
    return tuple(slice(a - begin, b - begin) for (a, b), (begin, _) in zip(box, block, strict=True))
