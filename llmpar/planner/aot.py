"""Compiles a training step for a cluster that is not here, by its own compiler, and reads the program.

Nothing runs, and no device is needed: `llmpar.planner.targets` describes the devices to the compiler.
"""

import dataclasses
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from llmpar import draw
from llmpar.draw.scene import Scene, time_text
from llmpar.inspect import report
from llmpar.inspect.census import census_hlo, census_table, compiled_memory, read_program
from llmpar.inspect.report import priced_optimizer
from llmpar.inspect.roofline import Roofline, measured, roofline
from llmpar.inspect.tables import rich_table
from llmpar.kernels.tiles import kernel_tiles
from llmpar.parallel.mesh import make_mesh, platform_of
from llmpar.parallel.xla_options import AT_ONCE, compiler_options
from llmpar.plan.backend import fits_cudnn
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import Plan, Resolved
from llmpar.plan.timetable import branch_shares, timetable
from llmpar.planner import planner
from llmpar.planner.targets import Target, need_compiler
from llmpar.predict import memory, ring
from llmpar.predict.hardware import GIB
from llmpar.predict.traffic import full_share
from llmpar.training.step import Step


def compile_step(
    config: ModelConfig, plan: Plan, target: Target, batch_size: int, seq_len: int
) -> dict:
    """Compile one step with AdamW for ``target``, once: the document of ``llmpar compile --json``.

    Bytes and FLOPs are those of one device and step. ``collectives`` and ``arrows`` are read from the program
    as XLA's partitioner left it, ``final`` from what the compiler made of that: it merges, splits and
    rewrites. Times are estimates (`llmpar.inspect.roofline`). A program that is too large for the device, or
    that its compiler refuses for want of memory, gives a document with ``fits`` false and a ``why``.
    """
    mesh = make_mesh(str(plan.mesh), target.devices)
    plan = plan.resolve(config, platform_of(mesh), batch_size, seq_len)
    step = Step(config, plan, mesh, priced_optimizer(plan))
    q = planner.Question(config, target.chip, target.num_devices, batch_size, seq_len)
    mesh = step.mesh
    if plan.attention_kernel == "cudnn":
        need_compiler("cudnn")
        if not fits_cudnn(config.head_width, "gpu") and jax.default_backend() != "gpu":
            why = "JAX asks the GPU at hand whether cuDNN has heads of more than 128, and there is none"
            raise ValueError(f"{why}; use attention_kernel='flash'")
    begin = time.perf_counter()
    need: dict[str, Any] = {
        "predicted_arguments": sum(memory.argument_bytes(plan, batch_size, seq_len).values()),
        "compiled_arguments": None,
        "predicted_temp": memory.temp_bytes(plan, batch_size, seq_len),
        "compiled_temp": None,
        "compiled_total": None,
        "capacity": target.chip.usable_bytes,
    }
    document: dict[str, Any] = {"target": target.text, "devices": target.num_devices}
    try:
        compiled, partitioned = read_program(step.lower(batch_size, seq_len), target.platform)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        match = re.search(r"\((\d[\d.]*)G\) exceeds|Used (\d[\d.]*)G of", str(error))
        if match:  # "HLO temporaries" in libtpu's sentence are all that the program holds, its arguments too
            need["compiled_total"] = round(float(match[1] or match[2]) * GIB)
        needs = f"{match[1] or match[2]} GiB" if match else "more"
        why = _too_large(needs, q, plan.requested, target)
        seconds = time.perf_counter() - begin
        return document | {"fits": False, "why": why, "memory_bytes": need, "compile_s": seconds}
    seconds, text = time.perf_counter() - begin, compiled.as_text() or ""
    program = compiled_memory(compiled)
    need |= {
        "compiled_arguments": program["argument_bytes"],
        "compiled_temp": program["temp_bytes"],
    }
    need |= {"compiled_alias": program["alias_bytes"], "compiled_total": program["peak_bytes"]}
    branches = branch_shares(plan.pipeline, config.layer_kinds)
    document |= report.compare(plan, batch_size, seq_len, partitioned, mesh, branches)
    final = census_table(census_hlo(text, mesh, branches[document["stage"]]))
    walked = _busiest(text, mesh, plan, target, seq_len, branches)
    useful = sum(memory.flops(config, batch_size, seq_len).values()) / plan.mesh.size
    rate = target.chip.per_device().flops_per_s
    band = dict[str, dict[str, float]]()
    if "attention" in walked.terms and not measured(target.chip):
        for share in planner.BAND:
            step_s = _busiest(text, mesh, plan, target, seq_len, branches, share).step_s
            band[f"{share:.0%}"] = {"step_s": step_s, "mfu": useful / (step_s * rate)}
    fits = program["peak_bytes"] <= need["capacity"]
    needs = f"{program['peak_bytes'] / GIB:.1f} GiB"
    why = "" if fits else _too_large(needs, q, plan.requested, target)
    return document | {
        "fits": fits,
        "why": why,
        "memory_bytes": need,
        "final": [
            {"axis": axis, "kind": kind, "count": row["count"], "bytes": row["bytes_sent"]}
            for (axis, kind), row in sorted(final.items(), key=lambda item: -item[1]["bytes_sent"])
        ],
        "overlap": [
            dataclasses.asdict(row)
            | {"count": round(row.count), "asynchronous": round(row.asynchronous)}
            for row in sorted(walked.sent.values(), key=lambda row: -row.exposed_s)
        ],
        "flops": {"useful_per_device": useful, "executed_per_device": walked.flops},
        "roofline": {
            "step_s": walked.step_s,
            "mfu": useful / (walked.step_s * rate),
            "mfu_is": "useful FLOPs (6 per token and active weight, causal attention) / step_s / peak FLOP/s",
            "exposed_s": walked.exposed_s,
            "if_kernels_reach": band,
            "terms": {
                name: s for name, s in sorted(walked.terms.items(), key=lambda t: -t[1]) if s
            },
        },
        "turns": _turns(walked),
        "compile_s": seconds,
    }


def _too_large(needs: str, q: planner.Question, plan: Plan, target: Target) -> str:
    """Say what a step needs and has, and which plan near it would fit by prediction:
    with one of the planner's single changes, or with replicas that cut the state (fsdp in place of dp), that
    recompute and cut the loss into pieces."""
    chip, shape = target.chip, plan.mesh
    whole = chip.usable_hbm_gib * GIB
    part = chip.usable_bytes < whole
    rest = f" (of {whole / GIB:.1f}; XLA_PYTHON_CLIENT_MEM_FRACTION=.95 takes more)" if part else ""
    sentence = (
        f"{q.config.name} on mesh '{shape}' needs {needs}, and a device of {target.text} offers JAX"
        f" {chip.usable_bytes / GIB:.1f} GiB{rest}"
    )
    cut = {"mesh": dataclasses.replace(shape, dp=1, fsdp=shape.dp * shape.fsdp), "zero": 3}
    changes = [*planner.single_changes(q, plan), cut, cut | {"remat": "block", "loss_chunks": 8}]
    q = dataclasses.replace(q, share=chip.usable_bytes / whole)  # what JAX takes here
    fit = planner.first_fit(q, plan, changes)
    if fit is None:
        return f"{sentence}; no plan near this one fits: use more devices, or shorter sequences"
    change, need = fit
    new = {name: value for name, value in change.items() if value != getattr(plan, name)}
    flags = (f"--{name.replace('_', '-')}" + f" '{n}'" * (n is not True) for name, n in new.items())
    return f"{sentence}; {' '.join(flags)} would need {need / GIB:.1f} GiB"


def _turns(walked: Roofline) -> list[dict]:
    """List the turns of the three longest loops; of their events those of one name in a row are one."""
    loops = sorted(walked.loops[1:], key=lambda iteration: -iteration.count * iteration.seconds)[:3]
    drawn = []
    for iteration in [loop for loop in loops if loop.events] or walked.loops[:1]:
        begin, events = iteration.events[0].start_s, list[dict]()
        for event in iteration.events:
            last = events[-1] if events else None
            if (
                last
                and event.lane == "compute"
                and (last["lane"], last["name"]) == (event.lane, event.name)
            ):
                last["end_s"] = event.end_s - begin
            else:
                times = {"start_s": event.start_s - begin, "end_s": event.end_s - begin}
                events.append(dataclasses.asdict(event) | times)
        drawn.append({"name": iteration.name, "count": iteration.count, "events": events})
    return drawn


def overlap_picture(document: dict) -> Scene:
    """Draw one turn of each of the longest loops: what computes, and what is on the links beside it."""
    return draw.two_lanes(
        document["turns"], f"One turn of each loop on {document['target']}, estimated"
    )


def _busiest(
    text: str, mesh, plan: Resolved, target: Target, seq_len, branches, kernels=None
) -> Roofline:
    """Walk the schedule as every pipeline stage takes its branches, and give the longest walk, with the
    schedule's bubble as one more term."""
    config, beside = plan.config, AT_ONCE in compiler_options(plan)
    ranks = plan.mesh.along(plan.regions["queries"]["s"])
    # Of all pairs of tiles the kernel of attention computes these on this chip, where a row is one document.
    size = jnp.dtype(plan.dtype).itemsize
    own = (target.platform, target.chip.name.upper())
    tiles = kernel_tiles(
        "flash_forward", config.head_width, size, seq_len // ranks, seq_len // ranks, *own
    )
    seen = ring.seen_share(tiles, seq_len, ranks, plan.sequence_order, config.mask)
    full = full_share(config.experts, seq_len, plan.mesh.ep) if config.experts else 1.0
    stages = [
        roofline(text, mesh, target.links, taken, seen, full, beside, kernels) for taken in branches
    ]
    longest = max(stages, key=lambda stage: stage.step_s)
    if plan.pipeline:
        bubble = longest.step_s * float(timetable(plan.pipeline).bubble_over_ideal)
        longest.terms["pipeline bubble"] += bubble
        longest.step_s += bubble
    return longest


def compile_tables(document: dict) -> list[Table]:
    """Give the document as tables for a terminal."""
    need = document["memory_bytes"]
    sides = "predicted", "compiled"
    memory_table = rich_table(f"memory per device of {document['target']}", ("", *sides), sides)
    gib = lambda n: "refused" if n is None else f"{n / GIB:.3f} GiB"
    for key, name in {"arguments": "arguments", "temp": "temporaries, by formula"}.items():
        guess, true = need[f"predicted_{key}"], need[f"compiled_{key}"]
        memory_table.add_row(
            name + (report.off_by(guess, true) if key == "temp" else ""), gib(guess), gib(true)
        )
    memory_table.add_row("usable", "", gib(need["capacity"]))
    if "roofline" not in document:
        return [memory_table]
    moves = report.move_tables(document)
    title = "overlap: what lies between a collective's start and its end (estimate)"
    sizes = "products beside", "on links", "exposed"
    waits = rich_table(title, ("arrow, direction, axes, collective", *sizes), sizes)
    for row in document["overlap"]:
        words = row["arrow"] or "(the compiler's)", row["direction"], row["axis"], row["kind"]
        apart = "" if row["asynchronous"] else ", not started apart"
        times = time_text(row["busy_s"]), time_text(row["exposed_s"])
        where = f"{' · '.join(filter(None, words))} ×{row['count']:,}{apart}"
        waits.add_row(where, f"{row['hidden_flops'] / 1e12:,.1f} TFLOP", *times)
    estimate, flops = document["roofline"], document["flops"]
    band = "; ".join(
        f"{share}: {row['mfu']:.1%}" for share, row in estimate["if_kernels_reach"].items()
    )
    title = f"a step, estimated: {time_text(estimate['step_s'])}, MFU {estimate['mfu']:.1%}"
    figures = rich_table(
        title, ("term", "per step"), ("per step",), caption=band and f"MFU if kernels reach {band}"
    )
    for name, seconds in estimate["terms"].items():
        figures.add_row(name, time_text(seconds))
    executed, useful = (flops[f"{name}_per_device"] / 1e12 for name in ("executed", "useful"))
    figures.add_row("FLOPs executed (useful) per device", f"{executed:,.1f} ({useful:,.1f}) TFLOP")
    return [memory_table, *moves, waits, figures]
