"""Compiles the plans of memory_plans.toml for a cluster, and shows what was predicted beside it.

    python tests/compare_memory.py h100:8x8             compile what is not recorded yet, and compare
    python tests/compare_memory.py h100:8x8 fsdp-keep   compile these plans again
    python tests/compare_memory.py                      compare what is recorded

What the compilers say is kept in fixtures/compiled_memory.json, with their versions. `test_liveness.py` holds
the predictions against it, and needs no compiler.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from llmpar.config import ModelConfig, preset
from llmpar.inspect.targets import QUIET, parse_target
from llmpar.notation import parse_mesh
from llmpar.plan import Plan
from llmpar.predict import memory

HERE = Path(__file__).parent
RECORD = HERE / "fixtures" / "compiled_memory.json"
COMMON = {"dtype": "bfloat16", "remat": "block", "attention_kernel": "portable"}
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One plan of one model on a target."""

    name: str
    config: ModelConfig
    plan: Plan
    batch_size: int
    seq_len: int


def cases(target: str, file: Path = HERE / "memory_plans.toml") -> list[Case]:
    """List the file's plans as they are on a target's devices."""
    where, found = parse_target(target), []
    for name, row in tomllib.loads(file.read_text()).items():
        if where.platform not in row.get("only", ("gpu", "tpu")):
            continue
        plan = Plan(parse_mesh(row["mesh"], where.num_devices), **COMMON | row.get("plan", {}))
        sizes = plan.mesh.sizes
        rows = row.get("rows", 1) * sizes["dp"] * sizes["fsdp"] * sizes["ep"]
        found.append(Case(name, preset(row.get("model", "llama3-8b")), plan, rows, row.get("seq", 8192)))
    return found


def compiled(case: Case, target: str) -> dict[str, Any]:
    """Compile a case; bytes per device. A compiler that refuses says what the temporaries would have been."""
    import jax
    import optax

    from llmpar.mesh import make_mesh
    from llmpar.step import Step

    jax.config.update("jax_enable_compilation_cache", False)
    mesh = make_mesh(case.plan.mesh, parse_target(target).devices)
    step = Step(case.config, case.plan, mesh, optax.adamw(1e-3))
    case.plan.check(case.config, case.batch_size, case.seq_len)
    lowered = step.lower(case.batch_size, case.seq_len)
    try:
        held = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        said = re.search(r"HLO temporaries \(([\d.]+)G\)", str(error))
        if not said:
            raise
        return {"refused": True, "temp": round(float(said[1]) * GIB)}
    return {
        "refused": False,
        "arguments": held.argument_size_in_bytes,
        "temp": held.temp_size_in_bytes,
        "alias": held.alias_size_in_bytes,
    }


def traced(case: Case, platform: str, without: str | None = None):
    """The peak of a case by its traced program, by all laws of a platform or less one."""
    import optax

    from llmpar.inspect.liveness import TARGETS, traced_peak
    from llmpar.mesh import abstract_mesh
    from llmpar.step import Step

    step = Step(case.config, case.plan, abstract_mesh(case.plan.mesh), optax.adamw(1e-3))
    return traced_peak(step, case.batch_size, case.seq_len, TARGETS[platform] - {without})


def record(target: str, names: list[str]) -> None:
    """Compile the cases that are named, or those without a record, and keep what their compiler says."""
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    rows = known.setdefault(target, {"versions": {}, "plans": {}})
    library = "jax-cuda12-plugin" if parse_target(target).is_gpu else "libtpu"
    for case in cases(target):
        if case.name in names or not names and case.name not in rows["plans"]:
            found = compiled(case, target)
            rows["versions"] = {name: metadata.version(name) for name in ("jax", library)}
            rows["plans"][case.name] = found
            RECORD.write_text(json.dumps(known, indent=1) + "\n")
            print(case.name, found, flush=True)


def main() -> None:
    """Record if a target is given, then compare."""
    os.environ.update(QUIET)
    target, *names = sys.argv[1:] or [""]
    if target:
        record(target, names)
    for where, kept in json.loads(RECORD.read_text()).items():
        if target not in ("", where):
            continue
        print(f"\n{where}, {kept['versions']}: temporaries in GiB per device")
        errors: dict[str, list[float]] = {"formula": [], "traced": []}
        for case in cases(where):
            if (row := kept["plans"].get(case.name)) is None:
                continue
            try:
                peak = traced(case, parse_target(where).platform)
            except (RuntimeError, ValueError) as error:  # cuDNN's attention can only be traced beside cuDNN
                print(f"  {case.name:26} {error}")
                continue
            guesses = {
                "formula": memory.temp_bytes(case.config, case.plan, case.batch_size, case.seq_len),
                "traced": peak.bytes,
            }
            line = f"  {case.name:26} {row['temp'] / GIB:8.2f}{' refused' * row['refused']:8}"
            for way, guess in guesses.items():
                errors[way].append(guess / row["temp"] - 1)
                line += f"  {way} {guess / GIB:7.2f} {errors[way][-1]:+7.1%}"
            print(line, flush=True)
        for way, found in errors.items():
            size = sorted(map(abs, found))
            near = sum(e <= 0.15 for e in size)
            print(
                f"  {way}: median {statistics.median(size):.1%}, worst {size[-1]:.1%},"
                f" {near} of {len(size)} within 15 %"
            )


if __name__ == "__main__":
    main()
