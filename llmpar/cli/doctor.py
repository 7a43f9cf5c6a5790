"""``llmpar doctor``: look at the environment: what is here, what is missing, and how to get it."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
from dataclasses import asdict, dataclass
from types import SimpleNamespace

from llmpar.cli import jax_settings
from llmpar.cli.options import Output, give, installed, speaks
from llmpar.launch.agreed import PACKAGES
from llmpar.plan.mesh_shape import AXES
from llmpar.predict import hardware

OPTIONAL = {
    **dict.fromkeys(("tokenizers", "safetensors", "jinja2"), "hf"),
    **dict.fromkeys(("starlette", "uvicorn"), "serve"),
    **dict.fromkeys(("jupyterlab", "ipywidgets", "anywidget", "matplotlib", "cloudpickle"), "lab"),
}
"""Packages that an extra brings: ``pip install 'llmpar[hf]'``."""


@dataclass(frozen=True)
class Doctor(Output):
    """Check the environment: versions, devices, what is missing and how to get it."""

    def run(self) -> None:
        from llmpar.launch import traps
        from llmpar.launch.engines import detect
        from llmpar.launch.joined import barrier, initialize

        place = detect(os.environ)
        first = [traps.describe(place), *traps.traps(os.environ, place)]
        if not self.json and place.process_id == 0 and speaks():
            print(*first, sep="\n", flush=True)  # JAX may not get further
        if faults := misfits():
            raise ValueError(
                "; ".join(faults)
                + "; if versions are the reason, python -m pip install --upgrade llmpar mends them"
            )
        initialize()  # before any other use of JAX
        barrier({"command": "doctor"})
        document = examine()
        document |= {"launch": asdict(place), "lines": first + document["lines"]}
        from llmpar.inspect.links import links_table

        crossed = {} if document["simulated"] else document["links"]
        tables = [
            links_table(faults, f"links that the axes of '{mesh}' cross")
            for mesh, faults in crossed.items()
        ]
        give(document, self.json, [*document["lines"][len(first) :], *tables])


LIBTPU_FLAGS = (
    "--xla_tpu_enable_async_collective_fusion=true"
    " --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true --xla_enable_async_all_gather=true"
)


def flags_for(platform: str) -> list[dict]:
    """Return the variables that JAX reads when it starts: the value to set (or to add), why, and whether this
    environment sets them."""
    libtpu = os.environ.get("LIBTPU_INIT_ARGS", "")
    of_gpu = {
        "variable": hardware.MEMORY_SHARES[0],
        "value": ".95",
        "why": "JAX takes 75% of a GPU's memory; alone it may have nearly all",
        "is_set": hardware.asked_memory_share() is not None,
    }
    of_tpu = {
        "variable": "LIBTPU_INIT_ARGS",
        "value": LIBTPU_FLAGS,
        "why": "on v5p all-gathers run beside matmuls with all three of"
        " these (v5e does so by itself)",
        "is_set": all(part.partition("=")[0] + "=" in libtpu for part in LIBTPU_FLAGS.split()),
    }
    return {"gpu": [of_gpu], "tpu": [of_tpu]}.get(platform, [])


def misfits() -> list[str]:
    """Return the installed packages that do not fit this one, by its declared bounds and by an import."""
    faults = []
    # a checkout that is not installed
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for text in importlib.metadata.requires("llmpar") or []:
            name, bounds, extra = re.findall(r"^([\w.-]+)[^<>;]*([^;]*)(.*)", text)[0]
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                have = importlib.metadata.version(name)
                limits = re.findall(
                    r"(>=|<)\s*([\d.]+)", bounds if re.search("^$|(lab|hf|serve).$", extra) else ""
                )
                if any(
                    (_number(have) < _number(limit)) == (sign == ">=") for sign, limit in limits
                ):
                    faults.append(f"{name} {have} is here, and llmpar needs {name}{bounds.strip()}")
    try:
        importlib.import_module("flax.nnx")
    except Exception as error:
        faults.append(
            f"flax.nnx cannot be imported ({type(error).__name__}: {str(error).splitlines()[0]}"
            f"{jax_settings()})"
        )
    return faults


def _number(version: str) -> list[int]:
    """Return a version as numbers that compare: 0.12 is 0.12.0, and 0.13.0.dev1 counts as 0.13."""
    return [*map(int, re.findall(r"\d+", re.findall(r"^[\d.]*", version)[0])), 0, 0, 0, 0][:5]


def default_meshes(num_devices: int, num_domains: int) -> list[str]:
    """Return three common meshes: sharded state alone, with tensor parallelism, with a pipeline."""
    inside = num_devices // num_domains
    tp = next((n for n in (8, 4, 2) if inside % n == 0 and num_devices > n), 1)
    pp = num_domains if num_domains > 1 else 2
    meshes = ["fsdp=-1", f"fsdp=-1 tp={tp}"] if tp > 1 else ["fsdp=-1"]
    if num_devices % (pp * tp) == 0 and num_devices > pp * tp:
        meshes.append(f"pp={pp} dp=-1 tp={tp}")
    return meshes


def examine() -> dict:
    """Return the environment as plain data, with ``lines`` for people. Start JAX, on simulated devices if
    there is no accelerator."""
    import jax

    from llmpar.inspect.links import axis_links
    from llmpar.parallel.mesh import use_devices
    from llmpar.parallel.placement import device_grid, domains_of

    devices = use_devices(8, at_least=1)
    first = devices[0]
    fake = first.platform == "cpu"
    chip = hardware.guess(first.device_kind)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    missing = {name: extra for name, extra in OPTIONAL.items() if not installed(name)}
    hosts = len({d.process_index for d in devices})
    num_domains = len(domains_of(devices))
    name_of_devices = "simulated CPU devices" if fake else first.device_kind
    where = (
        f"on {hosts} host{'s' * (hosts > 1)}" if not fake or hosts == 1 else f"of {hosts} processes"
    )
    where += f" in {num_domains} slice{'s' * (num_domains > 1)}" if first.platform == "tpu" else ""
    limits = "; times on them say nothing about links, bytes and counts are exact" if fake else ""
    lines = [
        f"Python {platform.python_version()}, "
        + ", ".join(f"{k} {v}" for k, v in versions.items()),
        f"{len(devices)} {name_of_devices} {where}{limits}",
    ]
    if chip and not fake:
        memory = (first.memory_stats() or {}).get("bytes_limit")
        usable = f", {memory / 2**30:.1f} GiB usable memory" if memory else ""
        lines.append(
            f"taken for a {chip.name}: {chip.flops_per_s / 1e12:.0f} TFLOP/s in bf16, {chip.link}"
            f" links{usable}"
        )
    elif not fake:
        lines.append(
            f"'{first.device_kind}' is not in the table of chips; give plan and train a TOML row"
        )
    if not fake and len(devices) == 1:
        lines.append("lessons simulate 8 devices here; JAX_PLATFORMS=cpu does so for every command")
    flags = flags_for(first.platform)
    for flag in (flag for flag in flags if not flag["is_set"]):
        advice = f"{flag['why']}: set {flag['variable']}={shlex.quote(flag['value'])}"
        lines.append(hardware.memory_left_out(chip) if chip and first.platform == "gpu" else advice)
    crossed = {}
    for mesh in default_meshes(len(devices), num_domains):
        with contextlib.suppress(ValueError):  # slices with holes, or of several sizes
            grid = device_grid(mesh, devices)
            crossed[mesh] = axis_links(SimpleNamespace(devices=grid, axis_names=tuple(AXES)))
    lines += [
        f"{name} is missing: pip install 'llmpar[{extra}]'" for name, extra in missing.items()
    ]
    lines += [
        f"XLA_FLAGS is set: {xla_flags}" for xla_flags in [os.environ.get("XLA_FLAGS")] if xla_flags
    ]
    return {
        "python": platform.python_version(),
        "versions": versions,
        "platform": first.platform,
        "simulated": fake,
        "devices": len(devices),
        "hosts": hosts,
        "domains": num_domains,
        "links": crossed,
        "flags": flags,
        "device_kind": first.device_kind,
        "chip": chip.name if chip else None,
        "missing": missing,
        "jax_backend": jax.default_backend(),
        "lines": lines,
    }
