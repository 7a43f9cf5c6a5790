"""Predicted beside compiled: what a training step sends and holds, by formula and as the compiler has it."""

from __future__ import annotations

import collections
import math

import jax
import optax
from rich.table import Table

from llmpar import pipeline
from llmpar.config import ModelConfig
from llmpar.draw import layouts
from llmpar.draw.charts import count_noun
from llmpar.draw.geometry import places
from llmpar.draw.scene import Scene, compose, size_text
from llmpar.inspect import hlo
from llmpar.mesh import make_mesh
from llmpar.plan import Plan
from llmpar.predict import memory, traffic
from llmpar.step import Step


def inspect(config: ModelConfig, plan: Plan, batch_size: int, seq_len: int, optimizer=None) -> dict:
    """Compile one training step (nothing runs) and read it.

    Returns the document of ``llmpar inspect --json``: bytes are those that a device sends per step.
    Collectives are read from the program as XLA's partitioner left it, where their dtypes are still true;
    memory and FLOPs from the final one. Predictions are those of the Manual reading with AdamW; under Auto
    they show what the partitioner did differently. Of a pipeline's stages it shows the one that sends most;
    FLOPs are the mean over stages.
    """
    plan.check(config, batch_size, seq_len)
    mesh = make_mesh(plan.mesh)
    step = Step(config, plan, mesh, optimizer or optax.adamw(1e-3))
    lowered = step.lower(batch_size, seq_len)
    compiled, partitioned = hlo.read_program(lowered)
    every = [traffic.step_traffic(config, plan, batch_size, seq_len, stage) for stage in range(plan.mesh.pp)]
    stage = max(range(plan.mesh.pp), key=lambda i: every[i].total_bytes)
    predicted = every[stage]
    taken = [
        pipeline.taken(plan.pipeline, config.num_layers, i) if plan.pipeline else None
        for i in range(plan.mesh.pp)
    ]
    census = hlo.census_hlo(partitioned, mesh, taken[stage])
    found = hlo.census_table(census)
    rows = []
    for key in sorted(
        predicted.keys() | found.keys(), key=lambda k: -max(_bytes(predicted, k), _bytes(found, k))
    ):
        sources, arrows = collections.Counter[str](), collections.Counter[str]()
        for c in census:
            if (",".join(c.axes), c.kind) == key:
                sources[c.source] += c.bytes_sent
                arrows[c.arrow] += c.bytes_sent
        rows.append(
            {
                "axis": key[0],
                "kind": key[1],
                "count": found.get(key, {"count": 0})["count"],
                "predicted_count": predicted[key].count if key in predicted else 0,
                "predicted_bytes": _bytes(predicted, key),
                "compiled_bytes": _bytes(found, key),
                "source": ", ".join(name for name, _ in sources.most_common()),
                "arrow": "; ".join(name for name, _ in arrows.most_common() if name),
            }
        )
    # With experts it depends on the routing: empty blocks are skipped.
    text = compiled.as_text() or ""
    executed = None if config.experts else sum([hlo.executed_flops(text, t) for t in taken]) / plan.mesh.pp
    held = hlo.compiled_memory(compiled)
    useful = memory.flops(config, batch_size, seq_len)
    return {
        "model": config.name,
        "params": config.num_params,
        "mesh": {a: n for a, n in plan.mesh.sizes.items() if n > 1},
        "reading": plan.reading,
        "zero": plan.zero,
        "stage": stage,
        "schedule": plan.schedule if plan.pipeline else None,
        "batch_size": batch_size,
        "seq_len": seq_len,
        "collectives": rows,
        "memory": {
            "predicted_argument_bytes": sum(
                memory.argument_bytes(config, plan, batch_size, seq_len).values()
            ),
            "compiled_argument_bytes": held["argument_bytes"],
            "predicted_temp_bytes": memory.temp_bytes(config, plan, batch_size, seq_len),
            "compiled_temp_bytes": held["temp_bytes"],
        },
        "flops": {
            "predicted_per_device": sum(useful.values()) / plan.mesh.size,
            "executed_per_device": executed,
        },
    }


def _bytes(table, key) -> int:
    row = table.get(key)
    return 0 if row is None else row["bytes_sent"] if isinstance(row, dict) else row.bytes_sent


def tables(document: dict) -> list[Table]:
    """The document as tables for a terminal."""
    mesh = " ".join(f"{a}={n}" for a, n in document["mesh"].items()) or "one device"
    title = f"{document['model']} on {mesh}, {document['reading']} reading, ZeRO {document['zero']}"
    title += f", {document['schedule']}, stage {document['stage']}" if document["schedule"] else ""
    moves = Table(title=title + ": bytes sent per device and step", title_justify="left")
    for name in ("axes", "collective", "count", "predicted", "compiled", "", "from"):
        number = name in (
            "count",
            "predicted",
            "compiled",
        )  # whole even where the terminal is narrow; then sources fold
        moves.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in document["collectives"]:
        same = "=" if row["predicted_bytes"] == row["compiled_bytes"] else "≠"
        moves.add_row(
            row["axis"],
            row["kind"],
            f"{row['count']:,}",
            f"{row['predicted_bytes']:,} B",
            f"{row['compiled_bytes']:,} B",
            same,
            _short(row["source"]),
        )
    figures = Table(title="per device", title_justify="left")
    for name in ("", "predicted", "compiled"):
        figures.add_column(name, justify="right" if name else "left")
    held, flops = document["memory"], document["flops"]
    figures.add_row(
        "arguments", f"{held['predicted_argument_bytes']:,} B", f"{held['compiled_argument_bytes']:,} B"
    )
    temporaries = held["predicted_temp_bytes"], held["compiled_temp_bytes"]
    figures.add_row("temporaries (estimate)", *(f"{n:,} B" for n in temporaries))
    work = flops["predicted_per_device"], flops["executed_per_device"]
    figures.add_row(
        "matmul FLOPs (useful, executed)", *("as routed" if n is None else f"{n:,.0f}" for n in work)
    )
    return [moves, figures]


def _short(source: str) -> str:
    """'llmpar/model.py:72, llmpar/model.py:91' as 'model.py:72, 91', which a narrow column can fold."""
    lines: dict[str, list[str]] = {}
    for place in filter(None, source.split(", ")):
        file, _, line = place.rpartition(":")
        lines.setdefault(file.rpartition("/")[2], []).append(line)
    return "; ".join(f"{file}:{', '.join(sorted(numbers, key=int))}" for file, numbers in lines.items())


def shardings(value) -> dict:
    """A live array, a tree of them, or a compiled program as a document: shards and who holds which, as the
    compiler has it.

    Of a program also what it sends and holds. Slices come from ``devices_indices_map``; no rule of this
    package is applied.
    """

    def named(tree, infos, what: str) -> list:
        pairs = zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(infos), strict=True)
        return [(what + jax.tree_util.keystr(path), info, s) for (path, s), info in pairs]

    traffic, rows, memory = list[dict](), list[dict](), list[list]()
    if program := hasattr(value, "input_shardings"):
        leaves = named(value.input_shardings[0], value.args_info[0], "argument")
        leaves += named(value.output_shardings, value.out_info, "result")
    else:
        arrays = {path: x for path, x in jax.tree.leaves_with_path(value) if hasattr(x, "sharding")}
        leaves = [("array" + jax.tree_util.keystr(path), x, x.sharding) for path, x in arrays.items()]
    if not leaves:
        raise ValueError(
            f"found no array in {type(value).__name__}; give an array, a tree of them, or a compiled program"
        )
    meshes = {s.mesh: name for name, _, s in reversed(leaves) if hasattr(s, "mesh")}
    if len(meshes) > 1:
        (one, here), (two, there) = [(dict(m.shape), name) for m, name in meshes.items()][:2]
        why = f"{there} lies on mesh {two} and {here} on mesh {one}" + ", of other devices" * (one == two)
        raise ValueError(f"a picture has one mesh, but {why}; give the arrays of one mesh at a time")
    mesh = next(iter(meshes), None)
    devices = list(mesh.devices.flat) if mesh else sorted(leaves[0][2].device_set, key=lambda d: d.id)
    census = hlo.census_hlo(value.as_text(), mesh) if program and mesh else []
    for (axes, kind), row in hlo.census_table(census).items():
        entry = {
            "axes": axes.split(","),
            "kind": kind,
            "count": row["count"],
            "bytes": row["bytes_sent"],
            "seconds": 0,
        }
        each = {
            c.bytes_sent // c.count for c in census if (",".join(c.axes), c.kind) == (axes, kind) and c.count
        }
        traffic.append(entry | {"what": "as compiled", "largest": max(each, default=0), "sizes": len(each)})
    if program:
        held = hlo.compiled_memory(value)
        fresh = held["output_bytes"] - held["alias_bytes"]
        memory = [
            ["arguments", held["argument_bytes"]],
            ["results beside them", fresh],
            ["temporaries", held["temp_bytes"]],
        ]
    for name, x, sharding in leaves:
        where = sharding.devices_indices_map(tuple(x.shape))
        cuts = {
            d: tuple(c.indices(n)[:2] for c, n in zip(cut, x.shape, strict=True)) for d, cut in where.items()
        }
        on = [cuts.get(d) for d in devices]
        shards = [s for s in dict.fromkeys(on) if s is not None]
        number = {None: None} | {s: i for i, s in enumerate(shards)}
        rows.append(
            {
                "name": name,
                "kind": name.partition("[")[0],
                "shape": list(x.shape),
                "itemsize": x.dtype.itemsize,
                "times": 1,
                "layout": str(getattr(sharding, "spec", sharding)),
                "holds": [number[s] for s in on],
                "shards": [[list(cut) for cut in s] for s in shards],
            }
        )
    sizes = dict(mesh.shape) if mesh else {"device": len(devices)}
    title = "Shardings of a compiled program" if program else "Shardings of live arrays"
    return {
        "fixed": True,
        "title": title,
        "sizes": sizes,
        "axes": dict.fromkeys(sizes, ""),
        "tensors": rows,
        "traffic": traffic if program else None,
        "memory": memory,
        "node": len(devices) // len({d.process_index for d in devices}),
        "kinds": {},
        "controls": [],
    }


def shardings_scene(found: dict, state: dict) -> Scene:
    """The static twin of what `shardings` read: the devices, and the shard of one array that each holds."""
    row = next((r for r in found["tensors"] if r["name"] == state["tensor"]), found["tensors"][0])
    place, device = places(found["sizes"], tuple(found["sizes"]), found["node"]), state["device"]
    said = []
    for r in found["tensors"]:
        words = "nothing"
        if (shard := r["holds"][device]) is not None:
            cut = r["shards"][shard]
            held = size_text(r["itemsize"] * math.prod(b - a for a, b in cut))
            words = f"[{', '.join(f'{a}:{b}' for a, b in cut)}], {held}"
        said.append(
            f"{r['name']} {r['layout']}: device {device} holds {words};"
            f" {count_noun(len(r['shards']), 'shard')}"
        )
    mesh = " ".join(f"{a}={n}" for a, n in found["sizes"].items() if n > 1) or "one device"
    note = f"Filled: the shard of {row['name']} that device {device} holds."
    items = layouts.cells(place, row["holds"], device, "shard", "s1")
    return compose(f"{found['title']} on {mesh}", [items], "\n".join(said), [note, *said[:8]])
