"""Send values from one mesh to another, message by message, in the rounds of a plan.

A sender cuts its blocks into one flat message for each receiver, which puts the parts where they belong and
keeps what it had itself: a program for each device. Between them are the plan's messages and nothing else:
each by `jax.device_put` within one process, all by `Permutes` between processes.

`jax.device_put` of a whole value gives the same values within one process. It takes blocks as they are where
both layouts have the same ones; else JAX (0.10.2 and 0.12) brings the whole value to the host, and from there
each device its block. Between processes it takes such blocks alone, and no CPUs.
"""

import zlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmpar.parallel.collectives import scope
from llmpar.parallel.mesh import sharding
from llmpar.plan.two_meshes import Pair, Ranges, TwoMeshes, common, volume

Messages = dict[int, dict[int, jax.Array]]
"""Flat messages by the numbers of two devices: of the one that has them now, of the other one."""
_Send = Callable[[Messages, np.dtype], tuple[Messages, int]]


class Mover:
    """Carries values from the first mesh of a plan to the second; compiled once.

    In a job of several processes each of them makes the same `Mover` and calls it as often as the others, and
    has devices of one mesh or of both.

    Attributes:
        given, results: the shardings of values before and after.
        sent_bytes: by the devices of this process in the last call, added up as messages left.

    Raises ValueError for meshes without devices, processes without a device of either mesh, and processes
    whose plans differ.
    """

    def __init__(self, plan: TwoMeshes):
        meshes = [side.mesh for side in plan.sides]
        if None in meshes:
            raise ValueError(
                f"'{plan}' is between meshes without devices; give two_meshes JAX's meshes (make_mesh)"
            )
        self.plan = plan
        self.devices = {d.id: d for mesh in meshes for d in mesh.devices.flat}
        own = {n for n, d in self.devices.items() if d.process_index == jax.process_index()}
        self.senders, self.receivers = ([n for n in s.node_of if n in own] for s in plan.sides)
        self.given = [sharding(meshes[0], arrow.before) for arrow in plan.arrows]
        self.results = [sharding(meshes[1], arrow.after) for arrow in plan.arrows]
        self._give = jax.jit(self._messages, static_argnums=0)
        self._take = jax.jit(self._blocks, static_argnums=(0, 3))
        self._send: _Send = self._put
        if jax.process_count() > 1:
            self._send = Permutes(plan, self.devices)

    def __call__(self, values: Any) -> Any:
        """Return a tree of values on the second mesh. A process without devices of the first mesh gives
        `jax.ShapeDtypeStruct`s; one without devices of the second returns arrays of which it has no part."""
        leaves, plan = jax.tree.leaves(values), self.plan
        dtypes = {x.dtype for x in leaves}
        fits = [x.shape for x in leaves] == [*plan.shapes]
        fits &= [dtype.itemsize for dtype in dtypes] == [plan.itemsize]
        lies = lambda x, to: isinstance(x, jax.Array) and x.sharding.is_equivalent_to(to, x.ndim)
        if not fits or (self.senders and not all(map(lies, leaves, self.given))):
            raise ValueError(
                f"'{plan}' takes {plan.shapes} of one dtype of {plan.itemsize} bytes, as jax.device_put(x,"
                " given[i]) lays them; given are"
                f" {[f'{x.dtype}{x.shape} {x.__class__.__name__}' for x in leaves]}"
            )
        (dtype,) = dtypes
        had = defaultdict[int, list[jax.Array | None]](lambda: [None] * len(leaves))
        for k, x in enumerate(leaves if self.senders else []):
            for shard in x.addressable_shards:
                had[shard.device.id][k] = shard.data
        arrived, self.sent_bytes = self._send(
            {i: self._give(i, had[i]) for i in self.senders}, dtype
        )
        blocks = [self._take(j, had[j], arrived[j], dtype) for j in self.receivers]
        results = [
            jax.make_array_from_single_device_arrays(
                shape, place, [of[k] for of in blocks], dtype=dtype
            )
            for k, (shape, place) in enumerate(zip(plan.shapes, self.results, strict=True))
        ]
        return jax.tree.unflatten(jax.tree.structure(values), results)

    def _put(self, messages: Messages, _: Any) -> tuple[Messages, int]:
        """Send messages within one process. Return them by receiver, and their bytes."""
        arrived, sent_bytes = defaultdict[int, dict[int, jax.Array]](dict), 0
        for i, j in (pair for one in self.plan.rounds for pair in one):
            arrived[j][i] = jax.device_put(messages[i][j], self.devices[j])
            sent_bytes += messages[i][j].nbytes
        return arrived, sent_bytes

    def _messages(self, i: int, had: list[jax.Array]) -> dict[int, jax.Array]:
        """Return what device i sends, by receiver."""
        own = [(j, parts) for (n, j), parts in self.plan.messages.items() if n == i]
        part = lambda k, box: _bits(had[k])[_inside(box, self.plan.before[k][i])].reshape(-1)
        return {j: jnp.concatenate([part(*each) for each in parts]) for j, parts in own}

    def _blocks(
        self, j: int, had: list[jax.Array | None], arrived: dict[int, jax.Array], dtype: np.dtype
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
                part = _bits(own)[_inside(box, self.plan.before[k][j])]
                parts[k] += [(box, part)] * (volume(box) > 0)
            block = jnp.zeros([b - a for a, b in after[j]], parts[k][0][1].dtype)
            for box, part in parts[k]:
                block = block.at[_inside(box, after[j])].set(part.reshape([b - a for a, b in box]))
            blocks.append(lax.bitcast_convert_type(block, dtype))
        return blocks


class Permutes:
    """Sends messages between processes: one program on the devices of both meshes.

    Each round is one `jax.lax.ppermute` for each size among its messages, so none is padded: the plan's bytes
    are sent. All devices of a program have arrays of the same shapes, so each has room for one message of
    each size of each round, to send and to receive, whether it does or not.
    """

    def __init__(self, plan: TwoMeshes, devices: dict[int, jax.Device]):
        self.plan, self.order = plan, sorted(devices)
        self.dtype: np.dtype | None = None
        processes = {d.process_index for d in devices.values()}
        if idle := sorted({*range(jax.process_count())} - processes):
            raise ValueError(
                f"'{plan}' is between devices of processes {sorted(processes)}, and of"
                f" {jax.process_count()} processes these have none and could take no part: {idle}; give"
                f" them devices of either mesh, or start {len(processes)}"
            )
        mesh = Mesh([devices[n] for n in self.order], ("device",))
        cut = PartitionSpec("device")
        self.place = NamedSharding(mesh, cut)
        self.own = [d for d in mesh.devices if d.process_index == jax.process_index()]
        self.groups = [group for one in plan.rounds for group in _by_size(one)]
        self.program = jax.jit(jax.shard_map(self.permute, mesh=mesh, in_specs=cut, out_specs=cut))

    def __call__(self, messages: Messages, dtype: np.dtype) -> tuple[Messages, int]:
        """Send messages of this process' devices, while the other processes send theirs. Return those that
        came, by receiver, and the bytes of those that left."""
        self._agree(dtype)
        sent, sent_bytes = list[jax.Array](), 0
        for size, to in self.groups:
            n = size // dtype.itemsize
            leaving = {i: messages[i][to[i]] for i in messages.keys() & to}
            blocks = [
                leaving[d.id] if d.id in leaving else _bits(jnp.zeros(n, dtype, device=d))
                for d in self.own
            ]
            shape = (n * len(self.order),)
            sent.append(jax.make_array_from_single_device_arrays(shape, self.place, blocks))
            sent_bytes += sum(x.nbytes for x in leaving.values())
        arrived = defaultdict[int, dict[int, jax.Array]](dict)
        for (_, to), came in zip(self.groups, self.program(sent), strict=True):
            sender = {j: i for i, j in to.items()}
            for shard in came.addressable_shards:
                if (j := shard.device.id) in sender:
                    arrived[j][sender[j]] = shard.data
        return arrived, sent_bytes

    def permute(self, sent: list[jax.Array]) -> list[jax.Array]:
        """Carry the rounds out, in `jax.shard_map`. A device begins the next when its last one has ended."""
        arrived, last, number = list[jax.Array](), (), self.order.index
        for (_, to), block in zip(self.groups, sent, strict=True):
            _, block = lax.optimization_barrier((last, block))
            with scope(str(self.plan)):
                last = lax.ppermute(
                    block, "device", [(number(i), number(j)) for i, j in to.items()]
                )
            arrived.append(last)
        return arrived

    def _agree(self, dtype: np.dtype) -> None:
        """Refuse a plan or a dtype that is not that of all processes: they would wait for ever."""
        if self.dtype is None:
            words = repr((dtype, str(self.plan), self.plan.shapes, self.plan.messages))
            own = zlib.crc32(words.encode())
            checksums = np.ravel(process_allgather(np.uint32(own))).tolist()
            if len({*checksums}) > 1:
                raise ValueError(
                    f"'{self.plan}' of {dtype} differs between processes, as the checksums of their plans"
                    f" say: {checksums}; give all of them the same arrows, shapes, meshes and dtype"
                )
            self.dtype = dtype
        if dtype != self.dtype:
            raise ValueError(
                f"'{self.plan}' carries {self.dtype} between processes since its first call, not {dtype};"
                " make another Mover"
            )


def _bits(x: jax.Array) -> jax.Array:
    """Return floats as unsigned integers: XLA for CPUs sends bfloat16 as float32."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _by_size(messages: dict[Pair, int]) -> list[tuple[int, dict[int, int]]]:
    """Return the sizes among the messages of a round, each with the receiver of every sender."""
    groups = defaultdict[int, dict[int, int]](dict)
    for (i, j), size in messages.items():
        groups[size][i] = j
    return list(groups.items())


def _inside(box: Ranges, block: Ranges) -> tuple[slice, ...]:
    """Return where a box is in a block, as an index."""
    return tuple(slice(a - begin, b - begin) for (a, b), (begin, _) in zip(box, block, strict=True))
