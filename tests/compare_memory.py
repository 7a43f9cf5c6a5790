"""Compiles the plans of memory_plans.toml for a cluster; compiled.md has the predictions beside it.

python tests/compare_memory.py [h100:8x8 [PLAN ...]]    compile what is not recorded, or these plans
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import other_gpus

from llmpar.plan.mesh_shape import parse_mesh
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.planner.targets import COMPILER_ENVIRONMENT, GPUS, parse_target
from llmpar.predict import memory

HERE = Path(__file__).parent
RECORD = HERE / "fixtures" / "compiled_memory.json"
TABLE = HERE / "compiled.md"
COMMON = {"dtype": "bfloat16", "remat": "block"}
GIB = 2**30


@dataclass(frozen=True)
class Case:
    name: str
    config: ModelConfig
    plan: Plan
    batch_size: int
    seq_len: int


@other_gpus.described()
def devices_of(target: str) -> str:
    """What a plan asks about a target's devices: ``tpu``, or ``gpu 9.0``."""
    row = parse_target(target).chip.name
    return "gpu {}.{}".format(*GPUS[row]["capability"]) if row in GPUS else "tpu"


@other_gpus.described()
def cases(target: str, file: Path = HERE / "memory_plans.toml") -> list[Case]:
    """List the file's plans as they are on a target's devices, without those that ask for what these lack."""
    where, found = parse_target(target), []
    for name, row in tomllib.loads(file.read_text()).items():
        if where.platform not in row.get("only", ("gpu", "tpu")):
            continue
        plan = Plan(parse_mesh(row["mesh"], where.num_devices), **COMMON | row.get("plan", {}))
        sizes = plan.mesh.sizes
        rows = row.get("rows", 1) * sizes["dp"] * sizes["fsdp"] * sizes["ep"]
        case = Case(name, preset(row.get("model", "llama3-8b")), plan, rows, row.get("seq", 8192))
        with contextlib.suppress(ValueError):
            plan.resolve(case.config, devices_of(target))
            found.append(case)
    return found


@other_gpus.described()
def compiled(case: Case, target: str) -> dict[str, Any]:
    """Compile a case, and keep what a row of the table needs; of a refusal what would have been held."""
    from llmpar.planner.aot import compile_step

    found = compile_step(case.config, case.plan, parse_target(target), case.batch_size, case.seq_len)
    held = found["memory_bytes"]
    if "roofline" not in found:
        return {"refused": True, "total": held["compiled_total"]}
    alike = [row["as_predicted"] for row in found["arrows"]]
    alike += [row["predicted_bytes"] == row["compiled_bytes"] for row in found["collectives"]]
    kept = {kind: held[f"compiled_{kind}"] for kind in ("arguments", "temp", "alias")}
    kept |= {name: found["roofline"][name] for name in ("exposed_s", "step_s", "mfu")}
    band = [round(row["mfu"], 4) for row in found["roofline"]["if_kernels_reach"].values()]
    return kept | {"refused": False, "as_predicted": all(alike), "rewritten": rewritten(found), "band": band}


def rewritten(document: dict[str, Any]) -> dict[str, float]:
    """By axis and kind the bytes of the final program over those partitioned, where they differ by 1 %."""
    before = {f"{row['axis']} {row['kind']}": row["compiled_bytes"] for row in document["collectives"]}
    after = {f"{row['axis']} {row['kind']}": row["bytes"] for row in document["final"]}
    largest = max([*before.values(), *after.values(), 1])
    names = [name for name in before | after if max(before.get(name, 0), after.get(name, 0)) > 1e-3 * largest]
    shares = {name: after.get(name, 0) / before[name] if before.get(name) else math.inf for name in names}
    return {name: round(share, 3) for name, share in shares.items() if abs(share - 1) > 0.01}


def argument_bytes(case) -> int:
    plan = case.plan.resolve(case.config, None)
    return sum(memory.argument_bytes(plan, case.batch_size, case.seq_len).values())


def formula(case, target: str) -> int:
    plan = case.plan.resolve(case.config, devices_of(target))
    return memory.temp_bytes(plan, case.batch_size, case.seq_len)


def record(target: str, names: list[str]) -> None:
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    rows = known.setdefault(target, {"versions": {}, "plans": {}})
    library = "libtpu" if devices_of(target) == "tpu" else "jax-cuda12-plugin"
    for case in cases(target):
        if case.name in names or not names and case.name not in rows["plans"]:
            found = compiled(case, target)
            rows["versions"] = {name: metadata.version(name) for name in ("jax", library)}
            rows["plans"][case.name] = found
            RECORD.write_text(json.dumps(known, indent=1) + "\n")
            print(case.name, found, flush=True)


@other_gpus.described()
def compare(where: str, kept: dict[str, Any], lines: list[str]) -> None:
    """Add the target's part of the table."""
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    lines += [f"\n## {where} ({versions})\n"]
    columns = "arguments | temporaries | formula | bytes | rewritten | exposed of step | MFU (20, 40, 60 %)"
    lines += [f"| plan | {columns} |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    errors = []
    for case in cases(where):
        if (row := kept["plans"].get(case.name)) is None:
            continue
        guess = formula(case, where)
        held = argument_bytes(case)
        # A compiler that refuses tells the sum, before it has packed anything.
        true, given = (row["total"], held) if row["refused"] else (row["temp"], 0)
        cell = f"{guess / GIB:.2f} ({(given + guess) / true - 1:+.0%})"
        plan = f"{case.name}: {case.config.name}, {case.plan.mesh}, {case.batch_size} x {case.seq_len:,}"
        if row["refused"]:
            lines.append(f"| {plan} | {held / GIB:.2f} | refused: {true / GIB:.2f} in all | {cell} | | | | |")
            continue
        errors.append(abs(guess / true - 1))
        same = "=" if held == row["arguments"] else f"{row['arguments'] / held:.4f} of"
        words = "; ".join(map(_rewriting, row.get("rewritten", {}).items())) or "no"
        sent = {True: "=", False: "≠", None: ""}[row.get("as_predicted")]
        waits = f"{1e3 * row['exposed_s']:,.0f} of {1e3 * row['step_s']:,.0f} ms" if "step_s" in row else ""
        band = ", ".join(f"{100 * share:.0f}" for share in row.get("band", ()))
        mfu = f"{row['mfu']:.1%}" + f" ({band})" * bool(band) if "mfu" in row else ""
        lines.append(
            f"| {plan} | {same} {held / GIB:.2f} | {true / GIB:.2f} | {cell} | {sent}"
            f" | {words if 'rewritten' in row else ''} | {waits} | {mfu} |"
        )
    near = sum(error <= 0.15 for error in errors)
    lines.append(
        f"\nTemporaries, formula: median {statistics.median(errors):.1%}, worst {max(errors):.1%},"
        f" {near} of {len(errors)} within 15 %."
    )


def _rewriting(item: tuple[str, float]) -> str:
    """A collective whose bytes a compiler changed, in words."""
    name, share = item
    return f"{name} gone" if share == 0 else f"{name} new" if share > 100 else f"{name} × {share}"


def main() -> None:
    os.environ.update(COMPILER_ENVIRONMENT)
    target, *names = sys.argv[1:] or [""]
    if target:
        record(target, names)
    lines = [TABLE.read_text().partition("\n## ")[0].rstrip() + "\n"]  # its words are written there
    for where, kept in json.loads(RECORD.read_text()).items():
        compare(where, kept, lines)
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
