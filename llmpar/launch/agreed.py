"""Compare the settings of a job's processes, which must be the same, and write the sentence where they
differ.

Each process sends its options and what it runs on, and the first compares them (`joined.barrier`). Every
field is compared, future ones too, apart from those of `OWN`.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

OWN = {
    **dict.fromkeys(("json", "log", "plot", "tracker"), "the first process prints, draws and logs"),
    **dict.fromkeys(
        ("data", "tokenizer", "model"), "a path of this host; what is read there is compared"
    ),
    **dict.fromkeys(
        ("jax_compilation_cache_dir", "jax_dump_ir_to", "--xla_dump_to"), "a path to write to"
    ),
    **dict.fromkeys(
        ("jax_num_cpu_devices", "jax_cuda_visible_devices"), "its share of the devices"
    ),
    **dict.fromkeys(
        ("jax_rocm_visible_devices", "jax_oneapi_visible_devices"), "its share of the devices"
    ),
    "--xla_force_host_platform_device_count": "its share of the devices",
    "jax_cross_host_transfer_socket_address": "its own",
    "jax_cross_host_transport_addresses": "its own",
    **dict.fromkeys(
        ("jax_log_compiles", "jax_logging_level", "jax_debug_log_modules"), "its logging"
    ),
    **dict.fromkeys(("jax_explain_cache_misses", "jax_pprint_use_color"), "its logging"),
}
"""Fields in which processes may differ, each with the reason."""
FOLDERS = ("checkpoints", "from_")
"""Fields that name a folder: hosts may call it otherwise, but it is given to all or to none."""
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
SHOWN = 3
"""How many differences, and processes of a kind, a sentence names."""


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Name every part of a value by its place, as ``plan.mesh.tp``: dataclasses by their fields."""
    if dataclasses.is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        parts |= {folder: parts[folder] is not None for folder in FOLDERS if folder in parts}
        value = {part.strip("_"): parts[part] for part in parts if part not in OWN}
    if not isinstance(value, Mapping):
        return {name: value}
    flats = (flat(part, f"{name}.{key}".lstrip(".")) for key, part in value.items())
    return {key: part for one in flats for key, part in one.items()}


def surroundings(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what a process runs: code, versions, and the settings of JAX and its compilers."""
    import jax

    root, code = pathlib.Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(file for suffix in ("*.py", "*.toml") for file in root.rglob(suffix)):
        code.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    runs: dict[str, Any] = {
        "llmpar": f"{sys.modules['llmpar'].__version__} [{code.hexdigest()[:8]}]",
        "Python": platform.python_version().rpartition(".")[0],
    }
    runs |= {name: importlib.metadata.version(name) for name in PACKAGES}
    runs |= {name: value for name, value in jax.config.values.items() if name not in OWN}
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        flags = (flag.partition("=") for flag in environ.get(name, "").split())
        runs[name] = {flag: value for flag, _, value in flags if flag not in OWN}
    return runs


def _words(value: Any) -> str:
    """Write a value in short; a long one is cut off and has a checksum."""
    text = "none" if value is None else json.dumps(value, default=str, sort_keys=True)
    return (
        text
        if len(text) < 80
        else f"{text[:60]}… [{hashlib.sha256(text.encode()).hexdigest()[:8]}]"
    )


def numbers_of(numbers: Sequence[int]) -> str:
    """Write the numbers of processes in short."""
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"process{'es' * (len(numbers) > 1)} {', '.join(map(str, numbers[:SHOWN]))}{more}"


def differences(given: Sequence[Mapping[str, Any]]) -> list[str]:
    """List what differs between processes, given in order: ``seed is 0 on process 0 and 1 on processes 1,
    2``."""
    rows = []
    for name in dict.fromkeys(name for one in given for name in one):
        whose: dict[str, list[int]] = {}
        for number, one in enumerate(given):
            whose.setdefault(_words(one[name]) if name in one else "not there", []).append(number)
        if len(whose) > 1:
            words = (f"{value} on {numbers_of(ids)}" for value, ids in whose.items())
            rows.append(f"{name} is {' and '.join(words)}")
    return rows


def refusal(given: Sequence[Mapping[str, Any]]) -> str:
    """Write the sentence for processes that differ."""
    rows = differences(given)
    more = f"; and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return (
        f"the {len(given)} processes of this job do not agree: {'; '.join(rows[:SHOWN])}{more};"
        " start all with the same command, data and versions"
    )
