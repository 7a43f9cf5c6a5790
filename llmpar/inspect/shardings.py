"""Reads who holds which shard of live arrays, and draws it."""

from __future__ import annotations

import math

import jax

from llmpar.draw import layouts
from llmpar.draw.charts import count_noun
from llmpar.draw.geometry import places
from llmpar.draw.scene import Scene, compose, size_text


def shardings(value) -> dict:
    """A live array or a tree of them as a document: shards, and who holds which.

    Slices come from ``devices_indices_map``; no rule of this package is applied.
    """
    arrays = {path: x for path, x in jax.tree.leaves_with_path(value) if hasattr(x, "sharding")}
    leaves = [("array" + jax.tree_util.keystr(path), x, x.sharding) for path, x in arrays.items()]
    if not leaves:
        raise ValueError(f"found no array in {type(value).__name__}; give an array or a tree of them")
    meshes = {s.mesh: name for name, _, s in reversed(leaves) if hasattr(s, "mesh")}
    if len(meshes) > 1:
        (one, here), (two, there) = [(dict(m.shape), name) for m, name in meshes.items()][:2]
        why = f"{there} lies on mesh {two} and {here} on mesh {one}" + ", of other devices" * (one == two)
        raise ValueError(f"a picture has one mesh, but {why}; give the arrays of one mesh at a time")
    mesh = next(iter(meshes), None)
    devices = list(mesh.devices.flat) if mesh else sorted(leaves[0][2].device_set, key=lambda d: d.id)
    rows = []
    for name, x, sharding in leaves:
        where = sharding.devices_indices_map(tuple(x.shape))
        ends = lambda cut, shape=x.shape: tuple(c.indices(n)[:2] for c, n in zip(cut, shape, strict=True))
        per_device = [ends(where[d]) if d in where else None for d in devices]
        shards = [s for s in dict.fromkeys(per_device) if s is not None]
        number = {None: None} | {s: i for i, s in enumerate(shards)}
        rows.append(
            {
                "name": name,
                "kind": name.partition("[")[0],
                "shape": list(x.shape),
                "itemsize": x.dtype.itemsize,
                "times": 1,
                "layout": str(getattr(sharding, "spec", sharding)),
                "holds": [number[s] for s in per_device],
                "shards": [[list(cut) for cut in s] for s in shards],
            }
        )
    sizes = dict(mesh.shape) if mesh else {"device": len(devices)}
    return {
        "fixed": True,
        "title": "Shardings of live arrays",
        "sizes": sizes,
        "axes": dict.fromkeys(sizes, ""),
        "tensors": rows,
        "node": len(devices) // len({d.process_index for d in devices}),
        "kinds": {},
        "controls": [],
    }


def shardings_scene(found: dict, state: dict) -> Scene:
    """The static twin of what `shardings` read: the devices, and the shard of one array that each holds."""
    row = next((r for r in found["tensors"] if r["name"] == state["tensor"]), found["tensors"][0])
    place, device = places(found["sizes"], tuple(found["sizes"]), found["node"]), state["device"]
    lines = []
    for r in found["tensors"]:
        words = "nothing"
        if (shard := r["holds"][device]) is not None:
            cut = r["shards"][shard]
            held = size_text(r["itemsize"] * math.prod(b - a for a, b in cut))
            words = f"[{', '.join(f'{a}:{b}' for a, b in cut)}], {held}"
        lines.append(
            f"{r['name']} {r['layout']}: device {device} holds {words};"
            f" {count_noun(len(r['shards']), 'shard')}"
        )
    mesh = " ".join(f"{a}={n}" for a, n in found["sizes"].items() if n > 1) or "one device"
    note = f"Filled: the shard of {row['name']} that device {device} holds."
    items = layouts.cells(place, row["holds"], device, "shard", "weights")
    return compose(f"{found['title']} on {mesh}", [items], "\n".join(lines), [note, *lines[:8]])
