"""Reads who holds which block of what exists: arrays, shapes, a program's arguments, a sharding, a mesh."""

from collections import Counter
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, Sharding
from jax.tree_util import FlattenedIndexKey, SequenceKey, keystr


def _named(tree: Any, before: str = "") -> list[tuple[str, Any]]:
    """The leaves of a tree, None too, by their paths: ``params.blocks.ffn.gate``, ``optimizer[0].count``."""

    def step(key) -> str:
        word = keystr((key,), simple=True)
        return f"[{word}]" if isinstance(key, SequenceKey | FlattenedIndexKey) else f".{word}"

    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is None)
    found = [("".join(map(step, path)).removeprefix("."), path, x) for path, x in leaves]
    often = Counter(name for name, *_ in found)  # keys with dots in them can make two names one
    return [(before + (name if often[name] == 1 else keystr(path)), x) for name, path, x in found]


def _leaves(value: Any) -> list[tuple[str, Any, Any]]:
    """What there is to see: names, what has shape and dtype, and shardings."""
    found, given = list[tuple[str, Any, Any]](), _named(value)
    if isinstance(value, jax.stages.Compiled):
        infos = [pair for part in value.args_info for pair in _named(part, "in ")]
        lie = jax.tree.leaves(value.input_shardings, is_leaf=lambda x: x is None)
        found = [(name, x, where) for (name, x), where in zip(infos, lie, strict=True)]
        given = _named(value.out_info, "out ")
    gone = lambda x: isinstance(x, jax.core.Tracer) or isinstance(x, jax.Array) and x.is_deleted()
    lies = lambda x: x if isinstance(x, Sharding) else None if gone(x) else getattr(x, "sharding", None)
    found += [(name, x, lies(x)) for name, x in given]
    return [(name.strip() or "array", x, where) for name, x, where in found]


def _mesh(meshes: list[tuple[str, Any]], leaves: list[tuple[str, Any, Any]]) -> tuple[dict[str, int], list]:
    """The one mesh that all lie on: its axes with their sizes, and its devices in order."""
    found: dict[tuple, str] = {}
    for name, mesh in meshes + [(name, where.mesh) for name, _, where in leaves if hasattr(where, "mesh")]:
        if isinstance(mesh, AbstractMesh) or mesh.empty:
            why = f"{name}: a mesh of axes {dict(mesh.shape)} without devices"
            raise ValueError(f"{why}; make one of devices, as llmpar.mesh.make_mesh does")
        found.setdefault((tuple(mesh.shape.items()), tuple(mesh.devices.flat)), name)
    used = {d: name for name, _, where in reversed(leaves) for d in where.device_set}
    (sizes, devices), *others = found or [((("device", len(used)),), sorted(used, key=lambda d: d.id))]
    away = [f"{found[one]} lies on mesh {dict(one[0])} of its own" for one in others]
    away += [f"{name} lies on {d}" for d, name in used.items() if d not in devices]
    if away:
        why = f"a picture has one mesh, but {away[0]}, and others on mesh {dict(sizes)}"
        raise ValueError(f"{why}; give the arrays of one mesh at a time")
    return dict(sizes), list(devices)


def _row(name: str, x: Any, where: Any, devices: list) -> dict:
    """One array: its blocks, and which of them each device holds, as JAX says it."""
    spec, bare, shape = getattr(where, "spec", None), isinstance(x, Sharding), getattr(x, "shape", ())
    layout = str(where if spec is None else spec)
    try:
        unsaid = bare and spec is None and len(where.device_set) > 1
        if unsaid or "UNCONSTRAINED" in layout or getattr(spec, "unreduced", False):
            raise ValueError("it has no spec, leaves a cut to the compiler, or leaves a sum unfinished")
        if bare:  # as many elements as blocks
            many = (len(devices),) * len(spec or ())
            shape = tuple(n // m for n, m in zip(many, where.shard_shape(many), strict=True))
        held = where.devices_indices_map(shape)
    except (ValueError, IndexError) as error:
        why = str(error).partition("implies that ")[2] or error
        way = "a finished array, or jax.ShapeDtypeStruct(shape, dtype, sharding=…) that the mesh divides"
        raise ValueError(f"JAX cannot say who holds {name} as {layout}: {why}; give {way}") from None
    ends = lambda cut: tuple(c.indices(n)[:2] for c, n in zip(cut, shape, strict=True))
    per_device = [ends(held[d]) if d in held else None for d in devices]
    blocks = [block for block in dict.fromkeys(per_device) if block is not None]
    number = {None: None} | {block: i for i, block in enumerate(blocks)}
    return {
        "name": name,
        "shape": list(shape),
        "dtype": None if bare else str(x.dtype),
        "itemsize": 0 if bare else x.dtype.itemsize,
        "layout": layout + f" in {where.memory_kind}" * (where.memory_kind not in (None, "device")),
        "holds": [number[block] for block in per_device],
        "shards": [[list(cut) for cut in block] for block in blocks],
    }


def shardings(value: Any) -> dict:
    """What exists, as plain data: the devices of a mesh, and which block of every array each of them holds.

    Blocks are what ``devices_indices_map`` says; no rule of this package is applied. Their ends are elements,
    the last one exclusive; ``itemsize`` is bytes. Without a shape ``dtype`` is None, and elements stand for
    blocks. ``skipped`` names what lies on no device. ValueError where one picture cannot show it.

    Args:
        value: a live array or a tree of them (a state), `jax.ShapeDtypeStruct`s with shardings, a
            `jax.stages.Compiled` (its inputs and outputs), a sharding, or a mesh.
    """
    bare = [("this", value)] if isinstance(value, Mesh | AbstractMesh) else []
    leaves = [] if bare else _leaves(value)
    seen = [one for one in leaves if one[2] is not None]
    why = lambda x: "traced or deleted" if isinstance(x, jax.Array) else f"{type(x).__name__}, on no device"
    why_not = {type(None): "None", jax.stages.ArgInfo: "not used"}
    skipped = [f"{name} ({why_not.get(type(x)) or why(x)})" for name, x, where in leaves if where is None]
    if not seen and not bare:
        found = ", ".join(skipped[:3]) + ", …" * (len(skipped) > 3) or f"an empty {type(value).__name__}"
        way = "give an array, a tree of them, shapes with shardings, a compiled program, a Sharding or a Mesh"
        raise ValueError(f"nothing here lies on devices: {found}; {way}")
    sizes, devices = _mesh(bare, seen)
    of = " of live arrays" if any(isinstance(x, jax.Array) for _, x, _ in seen) else ""
    of = " of a compiled program" if isinstance(value, jax.stages.Compiled) else of
    return {
        "title": f"Shardings{of}" if seen else "Devices of a mesh",
        "sizes": sizes,
        "devices": [d.id for d in devices],
        "hosts": [d.process_index for d in devices],
        "tensors": [_row(*one, devices) for one in seen],
        "skipped": skipped,
    }
