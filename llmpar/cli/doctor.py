"""``llmpar doctor``: look at the environment: what is here, what is missing, and how to get it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from dataclasses import asdict, dataclass
from types import SimpleNamespace

from llmpar.cli.options import emit, installed, join, print_tables, speaks
from llmpar.notation import AXES
from llmpar.predict import hardware

REQUIRED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
OPTIONAL = {"tokenizers": "hf", "safetensors": "hf"}
OPTIONAL |= dict.fromkeys(("jupyterlab", "ipywidgets", "anywidget", "matplotlib", "cloudpickle"), "lab")
"""Packages that an extra brings: ``pip install 'llmpar[hf]'``."""


@dataclass(frozen=True)
class Doctor:
    """Check the environment: versions, devices, what is missing and how to get it.

    Attributes:
        json: print one JSON document on stdout.
    """

    json: bool = False

    def run(self) -> None:
        """Examine the environment, and print it."""
        from llmpar.launch import traps
        from llmpar.launch.engines import detect

        place = detect(os.environ)
        first = [traps.describe(place), *traps.traps(os.environ, place)]
        if not self.json and place.process_id == 0 and speaks():
            print(*first, sep="\n", flush=True)  # JAX may not get further
        join()
        document = examine()
        document |= {"launch": asdict(place), "lines": first + document["lines"]}
        emit(document, self.json)
        if self.json or not speaks():
            return
        for line in document["lines"][len(first) :]:
            print(line)
        for mesh, found in {} if document["simulated"] else document["links"].items():
            from llmpar.inspect.links import links_table

            print_tables([links_table(found, f"links that the axes of '{mesh}' cross")])


@dataclass(frozen=True)
class Flag:
    """A setting that XLA reads from an environment variable when JAX starts, and the reason for it.

    Attributes:
        variable: the environment variable.
        value: what to put there; of XLA_FLAGS and LIBTPU_INIT_ARGS, what to add.
        why: what it does, as seen in compiled programs.
    """

    variable: str
    value: str
    why: str

    @property
    def is_set(self) -> bool:
        """Whether this environment says something of it."""
        if self.variable in hardware.MEMORY_SHARES:
            return hardware.asked_memory_share() is not None
        told = os.environ.get(self.variable, "")
        return all(part.partition("=")[0] + "=" in told for part in self.value.split())


FLAGS = {
    "gpu": (
        Flag(
            hardware.MEMORY_SHARES[0],
            ".95",
            "JAX takes 75% of a GPU's memory; alone on it, it may have nearly all",
        ),
    ),
    "tpu": (
        Flag(
            "LIBTPU_INIT_ARGS",
            "--xla_tpu_enable_async_collective_fusion=true"
            " --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true"
            " --xla_enable_async_all_gather=true",
            "on v5p all-gathers run beside products with all three of these (v5e does so by itself)",
        ),
    ),
}
"""Settings that matter, by platform."""


def _say_flag(flag: Flag, chip: hardware.Chip | None) -> str:
    """The flag as a line for people; of a known GPU's memory with its size."""
    if chip and flag.variable in hardware.MEMORY_SHARES:
        return hardware.memory_left_out(chip)
    return f"{flag.why}: set {flag.variable}={_quoted(flag.value)}"


def _quoted(text: str) -> str:
    return f"'{text}'" if " " in text else text


def default_meshes(num_devices: int, num_domains: int) -> list[str]:
    """Three meshes that people begin with: sharded state alone, with tensor parallelism, with a pipeline."""
    inside = num_devices // num_domains
    tp = next((n for n in (8, 4, 2) if inside % n == 0 and num_devices > n), 1)
    pp = num_domains if num_domains > 1 else 2
    meshes = ["fsdp=-1", f"fsdp=-1 tp={tp}"] if tp > 1 else ["fsdp=-1"]
    return meshes + [f"pp={pp} dp=-1 tp={tp}"] * (num_devices % (pp * tp) == 0 and num_devices > pp * tp)


def domains_text(platform: str, num_domains: int) -> str:
    """How many domains of fast links there are, where it is not plain from the hosts."""
    return f" in {num_domains} slice{'s' * (num_domains > 1)}" if platform == "tpu" else ""


def examine(simulated: int = 8) -> dict:
    """Describe the environment as plain data, with ``lines`` for people.

    It starts JAX, with ``simulated`` devices where there is no accelerator.
    """
    import jax

    from llmpar.inspect.links import links
    from llmpar.mesh import device_grid, domains_of, use_devices

    devices = use_devices(simulated, at_least=1)
    first = devices[0]
    fake = first.platform == "cpu"
    chip = hardware.guess(first.device_kind)
    versions = {name: importlib.metadata.version(name) for name in REQUIRED}
    missing = {name: extra for name, extra in OPTIONAL.items() if not installed(name)}
    hosts = len({d.process_index for d in devices})
    num_domains = len(domains_of(devices))
    where = f"on {hosts} host{'s' * (hosts > 1)}" if not fake or hosts == 1 else f"of {hosts} processes"
    lines = [
        f"Python {platform.python_version()}, " + ", ".join(f"{k} {v}" for k, v in versions.items()),
        f"{len(devices)} {'simulated CPU devices' if fake else first.device_kind} {where}"
        f"{domains_text(first.platform, num_domains)}"
        + ("; times on them say nothing about links, bytes and counts are exact" if fake else ""),
    ]
    if chip and not fake:
        memory = (first.memory_stats() or {}).get("bytes_limit")
        lines.append(
            f"taken for a {chip.name}: {chip.flops_per_s / 1e12:.0f} TFLOP/s in bf16, {chip.link} links"
            + (f", {memory / 2**30:.1f} GiB usable memory" if memory else "")
        )
    elif not fake:
        lines.append(f"'{first.device_kind}' is not in the table of chips; give plan and train a TOML row")
    if not fake and len(devices) == 1:
        lines.append(
            "lessons simulate 8 devices beside the one that is here; JAX_PLATFORMS=cpu does so for every"
            " command"
        )
    flags = FLAGS.get(first.platform, ())
    lines += [_say_flag(flag, chip) for flag in flags if not flag.is_set]
    crossed = {}
    for mesh in default_meshes(len(devices), num_domains):
        with contextlib.suppress(ValueError):  # slices with holes, or of several sizes
            grid = device_grid(mesh, devices)
            crossed[mesh] = links(SimpleNamespace(devices=grid, axis_names=tuple(AXES)))
    lines += [f"{name} is missing: pip install 'llmpar[{extra}]'" for name, extra in missing.items()]
    if os.environ.get("XLA_FLAGS"):
        lines.append(f"XLA_FLAGS is set: {os.environ['XLA_FLAGS']}")
    return {
        "python": platform.python_version(),
        "versions": versions,
        "platform": first.platform,
        "simulated": fake,
        "devices": len(devices),
        "hosts": hosts,
        "domains": num_domains,
        "links": crossed,
        "flags": [asdict(flag) | {"is_set": flag.is_set} for flag in flags],
        "device_kind": first.device_kind,
        "chip": chip.name if chip else None,
        "missing": missing,
        "jax_backend": jax.default_backend(),
        "lines": lines,
    }
