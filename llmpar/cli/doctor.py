"""``llmpar doctor``: look at the environment: what is here, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from dataclasses import dataclass

from llmpar.cli.options import emit, installed
from llmpar.predict import hardware

REQUIRED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
OPTIONAL = {"tokenizers": "hf", "safetensors": "hf"}
OPTIONAL |= dict.fromkeys(("jupyterlab", "ipywidgets", "anywidget", "matplotlib"), "lab")
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
        document = examine()
        emit(document, self.json)
        for line in [] if self.json else document["lines"]:
            print(line)


def examine(simulated: int = 8) -> dict:
    """Describe the environment as plain data, with ``lines`` for people.

    It starts JAX, with ``simulated`` devices where there is no accelerator.
    """
    import jax

    from llmpar.mesh import use_devices

    devices = use_devices(simulated)
    first = devices[0]
    fake = first.platform == "cpu"
    chip = hardware.guess(first.device_kind)
    versions = {name: importlib.metadata.version(name) for name in REQUIRED}
    missing = {name: extra for name, extra in OPTIONAL.items() if not installed(name)}
    hosts = len({d.process_index for d in devices})
    lines = [
        f"Python {platform.python_version()}, " + ", ".join(f"{k} {v}" for k, v in versions.items()),
        f"{len(devices)} {'simulated CPU devices' if fake else first.device_kind} on {hosts}"
        f" host{'s' * (hosts > 1)}"
        + ("; times on them say nothing about links, bytes and counts are exact" if fake else ""),
    ]
    if chip and not fake:
        memory = (first.memory_stats() or {}).get("bytes_limit")
        lines.append(
            f"taken for a {chip.name}: {chip.flops_per_s / 1e12:.0f} TFLOP/s in bf16, {chip.link} links"
            + (f", {memory / 2**30:.1f} GiB usable memory" if memory else "")
        )
        if chip.memory_share < 1 and hardware.asked_memory_share() is None:
            name = hardware.MEMORY_SHARES[0]
            lines.append(f"JAX takes {chip.memory_share:.0%} of a GPU's memory; alone on it, set {name}=.95")
    elif not fake:
        lines.append(f"'{first.device_kind}' is not in the table of chips; give plan and train a TOML row")
    lines += [f"{name} is missing: pip install 'llmpar[{extra}]'" for name, extra in missing.items()]
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = ""
    if address in ("", "127.0.1.1"):
        found = address or "nothing"
        lines.append(
            f"this host's name resolves to {found}: other hosts could not reach it; mend /etc/hosts first"
        )
    if "XLA_FLAGS" in os.environ:
        lines.append(f"XLA_FLAGS is set: {os.environ['XLA_FLAGS']}")
    return {
        "python": platform.python_version(),
        "versions": versions,
        "platform": first.platform,
        "simulated": fake,
        "devices": len(devices),
        "hosts": hosts,
        "device_kind": first.device_kind,
        "chip": chip.name if chip else None,
        "missing": missing,
        "jax_backend": jax.default_backend(),
        "lines": lines,
    }
