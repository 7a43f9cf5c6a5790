"""Compiles a training step for a cluster that is not here, by that cluster's own compiler, and reads the
program.

Nothing runs, and no device is needed: `llmpar.inspect.targets` gives the compiler's description of the
devices.
"""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

import jax
import optax
from rich.table import Table

from llmpar import draw
from llmpar.config import ModelConfig
from llmpar.draw.scene import Scene, time_text
from llmpar.inspect import report
from llmpar.inspect.census import census_hlo, census_table, compiled_memory, read_program
from llmpar.inspect.roofline import Roofline, Sent, merged_terms, roofline
from llmpar.inspect.targets import Target, need_compiler
from llmpar.mesh import make_mesh
from llmpar.plan import Plan
from llmpar.predict import memory
from llmpar.step import Step
from llmpar.timetable import timetable

GIB = 2**30


def compile_step(
    config: ModelConfig, plan: Plan, target: Target, batch_size: int, seq_len: int, optimizer=None
) -> dict:
    """Compile one training step for ``target``, once, and give the document of ``llmpar compile --json``.

    Bytes and FLOPs are those of one device and step. ``collectives`` and ``arrows`` are read from the program
    as XLA's partitioner left it, ``final`` from what the compiler made of that: it merges, splits and
    rewrites. Times are estimates (`llmpar.inspect.roofline`). A program that its compiler refuses for want of
    memory gives a document with ``fits`` false and what it said in ``why``; so does one that is too large for
    the device.
    """
    plan.check(config, batch_size, seq_len)
    if plan.attention_kernel == "cudnn":
        need_compiler("cudnn")
    mesh = make_mesh(plan.mesh, target.devices)
    step = Step(config, plan, mesh, optimizer or optax.adamw(1e-3))
    begin = time.perf_counter()
    held = memory.argument_bytes(config, plan, batch_size, seq_len)
    need: dict[str, Any] = {
        "predicted_arguments": sum(held.values()),
        "compiled_arguments": None,
        "predicted_temp": memory.temp_bytes(config, plan, batch_size, seq_len),
        "compiled_temp": None,
        "capacity": target.chip.usable_bytes,
    }
    document: dict[str, Any] = {"target": target.text, "devices": target.num_devices}
    try:
        compiled, partitioned = read_program(step.lower(batch_size, seq_len), target.platform)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = re.search(r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm", str(error))
        why = f"its compiler needs {said[1]} of {said[2]}" if said else str(error).partition("\n")[0]
        return document | {
            "fits": False,
            "why": why,
            "memory_bytes": need,
            "compile_s": time.perf_counter() - begin,
        }
    seconds, text = time.perf_counter() - begin, compiled.as_text() or ""
    program = compiled_memory(compiled)
    need |= {"compiled_arguments": program["argument_bytes"], "compiled_temp": program["temp_bytes"]}
    document |= report.compare(config, plan, batch_size, seq_len, partitioned, mesh)
    walked = _busiest(text, mesh, config, plan, target)
    useful = sum(memory.flops(config, batch_size, seq_len).values()) / plan.mesh.size
    rate = target.chip.per_device().flops_per_s
    fits = program["peak_bytes"] <= need["capacity"]
    why = "" if fits else f"it needs {program['peak_bytes'] / GIB:.1f} GiB of {need['capacity'] / GIB:.1f}"
    return document | {
        "fits": fits,
        "why": why,
        "memory_bytes": need,
        "final": _final(text, mesh, config, plan, document["stage"]),
        "overlap": [_overlap(row) for row in sorted(walked.sent.values(), key=lambda s: -s.exposed_s)],
        "flops": {"useful_per_device": useful, "executed_per_device": walked.flops},
        "roofline": {
            "step_s": walked.step_s,
            "mfu": useful / (walked.step_s * rate),
            "exposed_s": walked.exposed_s,
            "terms": merged_terms(walked.terms),
        },
        "turns": _turns(walked),
        "compile_s": seconds,
    }


LONGEST = 3
"""So many loops are drawn: those that take most of the step."""


def _turns(walked: Roofline) -> list[dict]:
    """List the turns of the longest loops, each with its events from its begin on, those of one name in a row
    as one."""
    loops = sorted(walked.turns[1:], key=lambda turn: -turn.count * turn.seconds)[:LONGEST]
    found = []
    for turn in [loop for loop in loops if loop.events] or walked.turns[:1]:
        begin, events = turn.events[0].start_s, list[dict]()
        for event in turn.events:
            last = events[-1] if events else None
            if last and event.lane == "compute" and (last["lane"], last["name"]) == (event.lane, event.name):
                last["end_s"] = event.end_s - begin
            else:
                times = {"start_s": event.start_s - begin, "end_s": event.end_s - begin}
                events.append(dataclasses.asdict(event) | times)
        found.append({"name": turn.name, "count": turn.count, "events": events})
    return found


def picture(document: dict) -> Scene:
    """Draw the schedule of one turn of each of the longest loops: what computes, and what is on the links
    beside it."""
    return draw.two_lanes(document["turns"], f"One turn of each loop on {document['target']}, estimated")


def _busiest(text: str, mesh, config: ModelConfig, plan: Plan, target: Target) -> Roofline:
    """Walk the schedule as every pipeline stage takes its branches, and give the longest walk, with the
    schedule's bubble as one more term."""
    stages = [roofline(text, mesh, target.links, branches) for branches in report.taken(config, plan)]
    longest = max(stages, key=lambda walk: walk.step_s)
    if plan.pipeline:
        bubble = longest.step_s * float(timetable(plan.pipeline).bubble_over_ideal)
        longest.terms["pipeline bubble"] += bubble
        longest.step_s += bubble
    return longest


def _overlap(row: Sent) -> dict:
    return dataclasses.asdict(row) | {"count": round(row.count), "asynchronous": round(row.asynchronous)}


def _final(text: str, mesh, config: ModelConfig, plan: Plan, stage: int) -> list[dict]:
    """List what the final program sends, by axes and kind."""
    table = census_table(census_hlo(text, mesh, report.taken(config, plan)[stage]))
    return [
        {"axis": axis, "kind": kind, "count": row["count"], "bytes": row["bytes_sent"]}
        for (axis, kind), row in sorted(table.items(), key=lambda item: -item[1]["bytes_sent"])
    ]


def tables(document: dict) -> list[Table]:
    """Give the document as tables for a terminal."""
    need = document["memory_bytes"]
    held = Table(title=f"memory per device of {document['target']}", title_justify="left")
    for name in ("", "predicted", "compiled"):
        held.add_column(name, justify="right" if name else "left")
    gib = lambda n: "refused" if n is None else f"{n / GIB:.3f} GiB"
    for name in ("arguments", "temp"):
        held.add_row(name, gib(need[f"predicted_{name}"]), gib(need[f"compiled_{name}"]))
    held.add_row("usable", "", gib(need["capacity"]))
    if "roofline" not in document:
        return [held]
    moves = report.tables(document | {"memory": None})
    waits = Table(
        title="overlap: what lies between a collective's start and its end (estimate)", title_justify="left"
    )
    for name in ("arrow, direction, axes, collective", "products beside", "on links", "exposed"):
        number = not name.startswith("arrow")
        waits.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in document["overlap"]:
        words = row["arrow"] or "(the compiler's)", row["direction"], row["axis"], row["kind"]
        apart = "" if row["asynchronous"] else ", not started apart"
        times = time_text(row["busy_s"]), time_text(row["exposed_s"])
        where = f"{' · '.join(filter(None, words))} ×{row['count']:,}{apart}"
        waits.add_row(where, f"{row['hidden_flops'] / 1e12:,.1f} TFLOP", *times)
    found, flops = document["roofline"], document["flops"]
    figures = Table(
        title=f"a step, estimated: {time_text(found['step_s'])}, MFU {found['mfu']:.1%}", title_justify="left"
    )
    figures.add_column("term")
    figures.add_column("per step", justify="right")
    for name, seconds in found["terms"].items():
        figures.add_row(name, time_text(seconds))
    work = flops["executed_per_device"], flops["useful_per_device"]
    figures.add_row(
        "FLOPs executed (useful) per device", "{:,.1f} ({:,.1f}) TFLOP".format(*(n / 1e12 for n in work))
    )
    return [held, *moves, waits, figures]
