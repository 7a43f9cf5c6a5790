"""Start JAX on the devices of this machine, or on simulated ones."""

import contextlib
import functools
import os
import re
import subprocess
import sys

import jax
import jax.extend

from llmpar.parallel import _jax

_COUNT_FLAG = "--xla_force_host_platform_device_count"
POOL_SIZE = ("NPROC", "PJRT_NPROC")
"""Environment variables for the size of XLA's thread pool. JAX 0.10.2 and 0.12 read both, and the second
wins."""
THREADS_PER_DEVICE = 4
MAX_SIMULATED = 1024


def use_devices(simulate: int = 8, at_least: int = 2) -> list[jax.Device]:
    """Return the accelerators of this machine or, where there are fewer than ``at_least``, ``simulate`` CPU
    devices. Call it before other JAX work: programs on them, yours too, then neither hang nor mix values up
    (docs/simulated-devices.md). JAX's devices are fixed from its first use on.

    A single accelerator is left out, and a line is printed, unless JAX_PLATFORMS names its platform:
    parallelism needs two devices to show anything. ``at_least=1`` takes it.
    """
    if not isinstance(simulate, int) or not 1 <= simulate <= MAX_SIMULATED:
        raise ValueError(f"{simulate!r} simulated devices were asked for; use 1 to {MAX_SIMULATED}")
    fresh = True
    if (
        _COUNT_FLAG not in os.environ.get("XLA_FLAGS", "")
        and "JAX_NUM_CPU_DEVICES" not in os.environ
    ):
        try:
            jax.config.update("jax_num_cpu_devices", simulate)
        except RuntimeError:
            fresh = False  # JAX runs already; its devices may be enough
    devices = ordered_devices()
    few = devices[0].platform != "cpu" and len(devices) < at_least
    if few and not jax.config.jax_platforms:  # type: ignore[attr-defined]
        devices = _simulated_instead(devices, simulate, fresh)
    # of several processes each has the devices that its launcher gave it
    alone = jax.process_count() == 1
    if devices[0].platform == "cpu" and len(devices) < simulate and alone:
        raise ValueError(
            f"{simulate} simulated devices were asked for but JAX has started with {len(devices)}, and the"
            f" number is fixed at its first use; ask for {len(devices)} (--devices {len(devices)}), in"
            f" Python call use_devices() first in a fresh process, or set XLA_FLAGS={_COUNT_FLAG}={simulate}"
        )
    return devices


def _simulated_instead(devices: list[jax.Device], simulate: int, fresh: bool) -> list[jax.Device]:
    """Start JAX again on CPU devices, and print that. Arrays that a program has made before would be lost."""
    present = f"{len(devices)} x {devices[0].device_kind}"
    if not fresh:
        raise ValueError(
            f"{simulate} simulated devices were asked for but JAX has started on {present}; call"
            " use_devices() first in a fresh process, or set JAX_PLATFORMS=cpu"
        )
    jax.extend.backend.clear_backends()
    jax.config.update("jax_platforms", "cpu")
    print(
        f"{present} is too few for parallelism: {simulate} simulated CPU devices are used instead"
        f" (JAX_PLATFORMS={devices[0].platform} takes what is here)"
    )
    return ordered_devices()


def ordered_devices() -> list[jax.Device]:
    """Start JAX and list all devices, host by host (process k's ids may begin at 2048·k)."""
    _jax.install_channels()
    _refuse_flags(os.environ.get("XLA_FLAGS", ""))
    try:
        with _enough_threads():
            return sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    except (RuntimeError, AssertionError) as error:  # the second where JAX lacks a platform
        platforms = os.environ.get("JAX_PLATFORMS", "")
        where = f"JAX_PLATFORMS={platforms}" if platforms else "the platform of this machine"
        why = str(error).partition("\n")[0][:200] or "there is no such device"
        raise ValueError(
            f"JAX cannot start on {where}: {why}; unset JAX_PLATFORMS, or install the JAX for it:"
            " llmpar[cuda13], llmpar[tpu]"
        ) from error


@contextlib.contextmanager
def _enough_threads():
    """While JAX starts, ask XLA for `THREADS_PER_DEVICE` threads per simulated device, unless the user did.

    All simulated devices share one pool, by default of as many threads as there are devices or cores. A
    collective blocks a thread until its whole group has arrived, so two collectives that no data orders can
    take every thread, each waiting for a device that finds none. XLA reads the pool's size once, at start.
    """
    counts = re.findall(rf"{_COUNT_FLAG}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    devices = int(counts[-1]) if counts else jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    sizes = {}
    if devices > 1 and not any(name in os.environ for name in POOL_SIZE):
        threads = max(THREADS_PER_DEVICE * devices, os.cpu_count() or 1)
        sizes = dict.fromkeys(POOL_SIZE, str(threads))
    os.environ.update(sizes)
    try:
        yield
    finally:
        for name in sizes:
            del os.environ[name]


@functools.cache
def _refuse_flags(flags: str) -> None:
    """Raise ValueError for flags that XLA does not know. It would end the process at them, in a notebook
    without a message: another process tries them."""
    if all(flag.startswith(_COUNT_FLAG) for flag in flags.split()) or not sys.executable:
        return
    command = [sys.executable, "-c", _jax.PARSE_FLAGS]
    output = subprocess.run(command, capture_output=True, text=True, errors="replace").stderr
    if unknown := re.search(r"Unknown flags? in XLA_FLAGS: *(.*)", output):
        raise ValueError(
            f"XLA_FLAGS is '{flags}', and XLA, which ends a process for that, knows no"
            f" {unknown[1].strip()}; mend XLA_FLAGS, or unset it"
        )
