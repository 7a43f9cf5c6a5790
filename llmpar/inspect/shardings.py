"""Read which device holds which block: of arrays, shapes, a program's arguments, a sharding, a mesh."""

from collections import Counter
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import FlattenedIndexKey, SequenceKey, keystr

from llmpar.parallel._jax import program_shardings, unreduced_kind


def _named(tree: Any, before: str = "") -> list[tuple[str, Any]]:
    """List the leaves of a tree, None too, by their paths: ``params.blocks.ffn.gate``,
    ``optimizer[0].count``."""

    def step(key) -> str:
        word = keystr((key,), simple=True)
        return f"[{word}]" if isinstance(key, SequenceKey | FlattenedIndexKey) else f".{word}"

    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is None)
    named = [("".join(map(step, path)).removeprefix("."), path, x) for path, x in leaves]
    # keys with dots in them can give two leaves one name
    count = Counter(name for name, *_ in named)
    return [(before + (name if count[name] == 1 else keystr(path)), x) for name, path, x in named]


def _leaves(value: Any) -> list[tuple[str, Any, Any]]:
    """List the leaves of a value: the name, what has shape and dtype, and the sharding."""
    rows, prefix = list[tuple[str, Any, Any]](), ""
    if isinstance(value, jax.stages.Compiled):
        arguments, captured, results = program_shardings(value)
        infos = (pair for part in value.args_info for pair in _named(part, "in "))
        rows = [(name, *((x is not None and arguments.pop(0)) or (x, None))) for name, x in infos]
        rows += [(f"in captured[{i}]", *pair) for i, pair in enumerate(captured)]
        # a token has no shape
        shaped = lambda x, s: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) if hasattr(x, "shape") else None
        )
        value, prefix = (
            cast(Any, value.out_tree).unflatten(shaped(*pair) for pair in results),
            "out ",
        )
    for name, x in _named(value, prefix):
        gone = isinstance(x, jax.core.Tracer) or isinstance(x, jax.Array) and x.is_deleted()
        where = (
            x if isinstance(x, Sharding) or gone or not hasattr(type(x), "sharding") else x.sharding
        )
        where = where if isinstance(where, Sharding) else None
        rows.append((name, x if where is None or hasattr(x, "shape") else where, where))
    return [(name.strip() or "array", x, where) for name, x, where in rows]


PACKED = {"int4": 0.5, "uint4": 0.5, "float4_e2m1fn": 0.5, "int2": 0.25, "uint2": 0.25}
"""Bytes of an element where XLA stores several in a byte; elsewhere they are the dtype's."""
# axes with sizes, devices in order
_Place = tuple[tuple[tuple[str, int], ...], tuple[jax.Device, ...]]


def _place(mesh: Mesh) -> _Place:
    return tuple(mesh.shape.items()), tuple(mesh.devices.flat)


def _mesh(meshes: list[tuple[str, Any]], leaves: list[tuple[str, Any, Any]]) -> _Place:
    """Return the largest mesh, the first of them; raise ValueError if a leaf is on other devices."""
    places = []
    for name, mesh in meshes + [
        (name, where.mesh) for name, _, where in leaves if hasattr(where, "mesh")
    ]:
        if isinstance(mesh, AbstractMesh) or mesh.empty:
            why = f"{name}: a mesh of axes {dict(mesh.shape)} without devices"
            raise ValueError(f"{why}; make one of devices, as llmpar.parallel.mesh.make_mesh does")
        places.append(_place(mesh))
    used = {d: name for name, _, where in reversed(leaves) for d in where.device_set}
    alone = (("device", len(used)),), tuple(sorted(used, key=lambda d: d.id))
    sizes, devices = max(places, key=lambda place: len(place[1]), default=alone)
    for d in (d for d in alone[1] if d not in devices):
        why = f"a picture has one mesh, but {used[d]} is on {d}, and others on mesh {dict(sizes)}"
        raise ValueError(f"{why}; give the arrays of one mesh at a time")
    return sizes, devices


def _row(name: str, x: Any, where: Any, place: _Place) -> dict:
    """Return one array's blocks, and the block that each device holds, by JAX's own map."""
    spec, shape = getattr(where, "spec", None), getattr(x, "shape", ())
    bare, devices = isinstance(x, Sharding), place[1]
    layout = str(where if spec is None else spec)
    unfinished, term = "", dict[Any, Any]()
    if spec is not None and spec.unreduced:  # devices with the same slices hold terms of a sum
        mesh, reduction = where.mesh, unreduced_kind(spec)
        sums = tuple(axis for axis in mesh.axis_names if axis in spec.unreduced)
        unfinished = f"{reduction} over {', '.join(sums)}"
        cuts = NamedSharding(mesh, PartitionSpec(sums)).devices_indices_map((mesh.size,))
        term = {d: cut[0].start for d, cut in cuts.items()}
        where = where.update(spec=(spec := PartitionSpec(*spec.partitions, reduced=spec.reduced)))
        layout = (
            f"{spec} {' '.join(f'+{axis}' for axis in sums) if reduction == 'sum' else unfinished}"
        )
    try:
        if "UNCONSTRAINED" in layout or bare and spec is None and len(where.device_set) > 1:
            raise ValueError("it has no spec, or leaves a cut to the compiler")
        if bare:  # as many elements as blocks
            many = (len(where.device_set),) * len(spec or ())
            shape = tuple(n // m for n, m in zip(many, where.shard_shape(many), strict=True))
        slices = where.devices_indices_map(shape)
    except (ValueError, IndexError) as error:
        why = str(error).partition("implies that ")[2] or error
        raise ValueError(
            f"JAX has no map from devices to blocks of {name} as {layout}: {why}; give an array, or"
            " jax.ShapeDtypeStruct(shape, dtype, sharding=…) that the mesh divides"
        ) from None
    ends = lambda cut: tuple(c.indices(n)[:2] for c, n in zip(cut, shape, strict=True))
    per_device = [(ends(slices[d]), term.get(d)) if d in slices else None for d in devices]
    blocks = [block for block in dict.fromkeys(per_device) if block is not None]
    number = {None: None} | {block: i for i, block in enumerate(blocks)}
    layout += f" in {where.memory_kind}" * (where.memory_kind not in (None, "device"))
    if hasattr(where, "mesh") and _place(where.mesh) != place and len(devices) > 1:
        layout += f" of a mesh {dict(where.mesh.shape)} of its own"
    return {
        "name": name,
        "shape": list(shape),
        "dtype": None if bare else str(x.dtype),
        "itemsize": 0 if bare else PACKED.get(str(x.dtype), x.dtype.itemsize),
        "layout": layout,
        "unfinished": unfinished,
        "blocks": len({block for block, _ in blocks}),
        "holds": [number[block] for block in per_device],
        "shards": [[list(cut) for cut in block] for block, _ in blocks],
    }


def shardings(value: Any, shape: Any = None, dtype: Any = "float32") -> dict:
    """Return the devices of a mesh, and the block of every array that each device holds, as plain data.

    Blocks come from ``devices_indices_map``; no rule of this package is applied. Their ends are elements, the
    last one exclusive; ``itemsize`` is bytes. Without a shape ``dtype`` is None, and there is one element for
    each block. A block that is ``unfinished`` ("sum over X") is in ``shards`` once for each partial sum.
    ``skipped`` names what is on no device. Raises ValueError where one picture cannot show the value.

    Args:
        value: a live array or a tree of them (a state), `jax.ShapeDtypeStruct`s with shardings, a
            `jax.stages.Compiled` (its inputs and outputs), a sharding, or a mesh.
        shape: of an array with the sharding that is given as the value; its ``dtype``.
    """
    if shape is not None:
        value = jax.ShapeDtypeStruct(shape, dtype, sharding=value)
    # Flax wraps what its jit compiles
    inner = value.compiled if hasattr(type(value), "compiled") else None
    value = inner if isinstance(inner, jax.stages.Compiled) else value
    program = isinstance(value, jax.stages.Compiled)
    bare = [("this", value)] if isinstance(value, Mesh | AbstractMesh) else []
    leaves = [] if bare else _leaves(value)
    seen = [one for one in leaves if one[2] is not None]
    why = lambda x: (
        "traced or deleted" if isinstance(x, jax.Array) else f"{type(x).__name__}, on no device"
    )
    why_not = {type(None): "None", jax.stages.ArgInfo: "not used"}
    skipped = [
        f"{name} ({why_not.get(type(x)) or why(x)})" for name, x, where in leaves if where is None
    ]
    if not seen and not bare:
        given = (
            ", ".join(skipped[:3]) + ", …" * (len(skipped) > 3)
            or f"an empty {type(value).__name__}"
        )
        remedy = (
            "give an array, a tree of them, shapes with shardings, a compiled program, a Sharding or"
            " a Mesh"
        )
        staged = callable(value) or isinstance(value, jax.stages.Traced | jax.stages.Lowered)
        # else a tree that can be called, or a program
        if staged and leaves and leaves[0][1] is value:
            remedy = "give the compiled program: jax.jit(f).lower(*arguments).compile()"
        raise ValueError(f"nothing in this value is on devices: {given}; {remedy}")
    sizes, devices = place = _mesh(bare, seen)
    of = " of live arrays" if any(isinstance(x, jax.Array) for _, x, _ in seen) else ""
    of = " of a compiled program" if program else of
    return {
        "title": f"Shardings{of}" if seen else "Devices of a mesh",
        "sizes": dict(sizes),
        "devices": [d.id for d in devices],
        "hosts": [d.process_index for d in devices],
        "tensors": [_row(*one, place) for one in seen],
        "skipped": skipped,
    }
