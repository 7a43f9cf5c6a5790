"""Chips and their links as rows of numbers: each with its unit, its date and the place where it was read.

A row describes one *chip* as its maker does; `Chip.per_device` divides it by the JAX devices that it shows
as. Rates are peak bf16 without sparsity, GB = 1e9, GiB = 2**30, bandwidths are one way unless named
otherwise. `hbm_bytes` is what is published (some pages print GB where they mean GiB, so it can be the
smaller), `usable_hbm_gib` what the device offers. Of a GPU's memory JAX takes three quarters when it starts,
unless another share is set: `Chip.usable_bytes`.
"""

import contextlib
import os
import re
import tomllib
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from llmpar.files import Allowed, allowed, read_toml

GIB = 2**30
LINKS = ("torus", "switch")
MEMORY_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variables that tell JAX which share of a GPU's memory to take."""
MACHINE = ("node_link", "network", "node_size", "hbm")  # what `in_machine` takes
_Text = Annotated[str, Allowed(str)]
_Rate = Annotated[float, Allowed(float, 1e3, 1e18)]
_Count = Annotated[int, Allowed(int, 1, 1 << 20)]
"""What a chip's file may say: far beyond what is built, near enough to find a wrong unit."""
_Share = Annotated[float, Allowed(float, 1e-6, 1)]
_Positive = Annotated[float, Allowed(float, 1e-12, 1e12)]


@dataclass(frozen=True)
class Rates:
    """Shares of a chip's published rates that software reaches, and the delays that no rate explains."""

    # of peak, large matmuls; above 1 where a card's clock is above its data sheet's
    matmuls: _Positive = 0.68
    grouped: _Share = 0.45  # of peak, matmuls of experts, each with its own few rows
    attention: _Share = 0.45  # of peak, fused attention, both directions together
    # time of a score's exponentials over that of its matmuls, both at peak
    softmax: _Positive = 0.3
    memory: _Share = 0.80  # of the memory's rate, elementwise work and what matmuls read and write
    # of the fast links' rate, large collectives (`Chip.link_efficiency` is a vendor's)
    links: _Share = 0.80
    network: _Share = 0.80  # of the network's rate, large collectives
    kernel_s: _Positive = 4e-6  # the least time of a kernel on the device
    host_s: _Positive = 20e-6  # of a launch by an eager framework's host
    start_s: _Positive = 4e-6  # of a collective, and again for each doubling of its group
    # of a hidden collective's time, what computing loses to it, to cores and memory
    shared: _Share = 0.2
    eight_bit: _Positive = 1.7  # how much faster 8-bit matmuls are than 16-bit ones
    four_bit: _Positive = 1.7  # and 4-bit ones than those


@dataclass(frozen=True)
class Chip:
    """One row. `sources` says where every figure comes from; a row that is loaded from a file may have none.

    `link` is "torus" (each chip has two links on each of `num_axes` axes) or "switch" (all chips of a node
    reach each other at once; `num_axes` is 1 and `link_bytes_per_s` is what one chip sends in total).
    `node_size` counts chips within reach of the fast links: a node (switch) or the largest slice (torus).
    Beyond it, each chip sends `dcn_bytes_per_s`. A torus axis of a multiple of `wrap_multiple` is a ring.
    """

    name: _Text
    aliases: Annotated[tuple[str, ...], Allowed(list)]
    flops_per_s: Annotated[float, Allowed(float, 1e6, 1e20)]
    hbm_bytes: Annotated[float, Allowed(float, 1e6, 1e16)]
    usable_hbm_gib: Annotated[float, Allowed(float, 1e-3, 1e7)]  # per JAX device, not per chip
    hbm_bytes_per_s: _Rate
    link: Annotated[str, Allowed(str, choices=LINKS)]
    link_bytes_per_s: _Rate
    link_efficiency: _Share  # share of the link rate, of large messages
    num_axes: Annotated[int, Allowed(int, 1, 8)]
    node_size: _Count
    dcn_bytes_per_s: _Rate
    date: _Text  # when the source was current, or the chip was announced
    devices_per_chip: Annotated[int, Allowed(int, 1, 64)] = 1  # that `jax.devices()` counts
    # to which a GPU deals a matmul's tiles; of TPUs none
    cores: Annotated[int, Allowed(int, 0, 4096)] = 0
    device: _Text = ""  # what of a chip one of them is, where that is not plain
    wrap_multiple: _Count = 1
    # of what is usable, that JAX takes
    memory_share: Annotated[float, Allowed(float, 1e-3, 1)] = 1.0
    # of a TPU (Austin et al. 2025); kept for switches too
    hop_s: Annotated[float, Allowed(float, 1e-12, 1)] = 1e-6
    # of the machine at hand: written into a TOML file, or fitted to steps that were measured
    reached: Rates | None = None
    base: str = ""  # the row that a file started from
    sources: Annotated[dict[str, str], Allowed(dict)] = field(
        default_factory=dict, hash=False, repr=False
    )

    @property
    def usable_bytes(self) -> int:
        """Bytes that a program may use on one JAX device: of a GPU the share that JAX takes here."""
        share = (
            self.memory_share
            if self.memory_share == 1
            else asked_memory_share() or self.memory_share
        )
        return int(self.usable_hbm_gib * GIB * share)

    @property
    def device_words(self) -> str:
        """What a JAX device is, in a clause."""
        share = f"1/{self.devices_per_chip} " * (self.devices_per_chip > 1)
        return f"1 device = {share or '1 '}chip" + f" ({self.device})" * bool(self.device)

    @property
    def reached_link_bytes_per_s(self) -> float:
        """One-way link rate that large messages reach, for times; published examples often use the peak."""
        return self.link_bytes_per_s * self.link_efficiency

    @property
    def family(self) -> str:
        """The row's name, also of a file that started from it."""
        return self.base or self.name

    @property
    def rates(self) -> Rates:
        """What software reaches of these figures: as measured here, as fitted on published runs, or usual."""
        return self.reached or RATES.get(_RATES_OF.get(self.family, self.family), Rates())

    @property
    def simulated(self) -> bool:
        """True where time means nothing: simulated devices share one processor and have no links. Where
        they were measured, it means what was measured."""
        return self.family == "cpu" and self.reached is None

    def reaching(self, rates: Rates | None = None) -> "Chip":
        """Return the chip with the links that large collectives of training runs reach, by its ``rates``."""
        rates = rates or self.rates
        network = self.dcn_bytes_per_s * rates.network
        return replace(self, link_efficiency=rates.links, dcn_bytes_per_s=network)

    def wraps(self, axis_size: int) -> bool:
        """Tell whether a torus axis of this length closes into a ring (a switch always does)."""
        return self.link == "switch" or axis_size % self.wrap_multiple == 0

    def per_device(self) -> "Chip":
        """Return the share of one JAX device: rates, bytes and links divided by `devices_per_chip`."""
        n = self.devices_per_chip
        shared = (
            "flops_per_s",
            "hbm_bytes",
            "hbm_bytes_per_s",
            "link_bytes_per_s",
            "dcn_bytes_per_s",
        )
        share = {f: getattr(self, f) / n for f in shared}
        cores, near = self.cores // n, self.node_size * n
        return replace(self, **share, cores=cores, node_size=near, devices_per_chip=1)


def asked_memory_share() -> float | None:
    """Return the share of a GPU's memory that this environment sets for JAX; None where it sets none."""
    # the only one that knows no share
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        return 1.0
    name = next((name for name in MEMORY_SHARES if os.environ.get(name)), None)
    if name is None:
        return None
    with contextlib.suppress(ValueError):
        if (share := float(os.environ[name])) > 0:
            return share
    raise ValueError(
        f"{name}={os.environ[name]} is no share of a GPU's memory; use one above 0, such as .95"
    )


def memory_left_out(chip: Chip) -> str:
    """Say how much memory JAX leaves out because its share is not set; "" where it leaves none."""
    if chip.memory_share == 1 or asked_memory_share() is not None:
        return ""
    whole = chip.usable_hbm_gib
    return (
        f"JAX takes {chip.memory_share:.0%} of a GPU's memory, {whole * chip.memory_share:.1f} of"
        f" {whole:.1f} GiB; alone on it, set {MEMORY_SHARES[0]}=.95"
    )


def package_table(name: str) -> dict[str, Any]:
    """Read a TOML file of the package. {WORD} stands for the text of that name under ``[text]``."""
    text = resources.files("llmpar").joinpath(name).read_text(encoding="utf-8")
    words = tomllib.loads(text).get("text", {})
    return tomllib.loads(re.sub(r"\{([A-Z]+)\}", lambda match: words.get(match[1], match[0]), text))


RATES: dict[str, Rates] = {
    name: Rates(**row) for name, row in package_table("predict/rates.toml").items()
}
"""What `tests/fit_rates.py` found: a few constants per generation, fitted on published runs."""
_TABLE = package_table("predict/chips.toml")
CLOCK_BY_POWER = 0.5
"""A limit of power lowers the clock f: transistors take C V^2 f, so f goes with the power where the voltage V
is at its least, and with its cube root where V falls as f does. At a maker's own limit it already holds large
matmuls back (H. He, "Strangely, Matrix Multiplications …", 2024). Between the two; not fitted."""
POWER_W: dict[str, float] = {
    n: row.pop("power_w") for n, row in _TABLE["chip"].items() if "power_w" in row
}
"""Watts of one chip."""
MAKERS: dict[str, str] = {
    n: row.pop("maker") for n, row in _TABLE["chip"].items() if "maker" in row
}
"""Who makes a GPU that NVIDIA does not: our kernels are for none of them."""
CAPABILITY: dict[str, float] = {
    n: row.pop("capability") for n, row in _TABLE["chip"].items() if "capability" in row
}
"""NVIDIA's compute capability, of GPUs that lack something of `plan.backend.LEAST`."""
NEXT_CHIP: dict[str, str] = {
    n: row.pop("next") for n, row in _TABLE["chip"].items() if "next" in row
}
"""The chip that one would change to."""
_KINDS = {name: row.pop("device_kind") for name, row in _TABLE["chip"].items()}
_RATES_OF = {name: row.pop("rates", name) for name, row in _TABLE["chip"].items()}


def _chip(name: str, row: dict) -> Chip:
    usual = _TABLE["usual"][row["link"]]
    row = usual | row | {"name": name, "sources": usual["sources"] | row.get("sources", {})}
    return Chip(**checked(Chip, row, name))


def checked(kind: type, row: dict, source: str) -> dict[str, Any]:
    """Return a table with its fields' types. Refuse values that no machine has."""
    if unknown := sorted(set(row) - set(allowed(kind))):
        known = ", ".join(sorted(allowed(kind)))
        raise ValueError(f"{source} has the unknown field {', '.join(unknown)}; known are {known}")
    for name, value in row.items():
        what = allowed(kind)[name]
        what.check(f"{source}: {name}", value)
        row[name] = tuple(value) if what.kind is list else what.kind(value)
    return row


def lacking(kind: type, row: dict) -> str:
    """Name the fields without a default that a table does not have."""
    needed = (f.name for f in fields(kind) if f.default is f.default_factory is MISSING)
    return ", ".join(name for name in needed if name not in row)


CHIPS: tuple[Chip, ...] = tuple(_chip(name, row) for name, row in _TABLE["chip"].items())
CHIP_BY_NAME = {alias: chip for chip in CHIPS for alias in (chip.name, *chip.aliases)}
CLUSTERS: dict[str, dict] = _TABLE["cluster"]
"""Machines and shapes of nodes that people name."""


def cluster(name: str) -> tuple[Chip, int | None]:
    """Return the row of a machine's chip with its nodes and network, and its chips (None: any number)."""
    if name.lower() not in CLUSTERS:
        raise ValueError(
            f"cluster '{name}' is not known; known are {', '.join(CLUSTERS)}; or give --chip"
        )
    row = CLUSTERS[name.lower()]
    nodes = {"node_size": row["chips_per_node"], "dcn_bytes_per_s": row["network_bytes_per_s"]}
    return replace(CHIP_BY_NAME[row["chip"]], **nodes), row.get("num_chips")


def chip(name: str | Path) -> Chip:
    """Find a row by name or alias, or load one from a TOML file (any text that ends in `.toml`).

    The file holds fields of `Chip`; with `base = "a100-40"` it needs only those that differ from that row:

        base = "a100-40"
        name = "my-cluster"
        node_size = 4
        dcn_bytes_per_s = 3.125e9

    A table ``[reached]`` holds fields of `Rates`, as measured on the machine at hand.
    """
    return (
        from_table(read_toml(name, "chip file"), f"chip file {str(name)!r}", Path(name).stem)
        if str(name).endswith(".toml")
        else _row(str(name))
    )


def in_machine(
    chip: Chip,
    node_link: float | None = None,
    network: float | None = None,
    node_size: int | None = None,
    hbm: float | None = None,
    hbm_rate: float | None = None,
    power: float | None = None,
) -> Chip:
    """Return a chip as it is in another machine: GB/s that one device sends inside a node and beyond it, one
    way; devices of a node; GiB of a device that programs may use, and GB/s of its memory; watts of a chip,
    where they are limited to less than its own (`CLOCK_BY_POWER`)."""
    n = chip.devices_per_chip
    if (node_size or 0) % n:
        raise ValueError(f"a chip of {chip.name} is {n} devices, so no node has {node_size}")
    row: dict[str, Any] = {
        "link_bytes_per_s": (node_link or 0) * 1e9 * n,
        "dcn_bytes_per_s": (network or 0) * 1e9 * n,
        "node_size": (node_size or 0) // n,
        "usable_hbm_gib": hbm,
        "hbm_bytes": (hbm or 0) * GIB * n,
        "hbm_bytes_per_s": (hbm_rate or 0) * 1e9 * n,
    }
    if power and (usual := POWER_W.get(chip.family)):
        row["flops_per_s"] = chip.flops_per_s * min(1.0, power / usual) ** CLOCK_BY_POWER
    return replace(chip, **{name: value for name, value in row.items() if value})


def _row(name: str) -> Chip:
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    if key not in CHIP_BY_NAME:
        known = ", ".join(c.name for c in CHIPS)
        raise ValueError(
            f"chip {name!r} is not known; known are {known}; or give the path of a .toml file (base"
            " = 'h100' and the fields that differ)"
        )
    return CHIP_BY_NAME[key]


def from_table(row: dict[str, Any], source: str, name: str) -> Chip:
    """Return the chip that a file's table describes, or what `dataclasses.asdict` makes of one."""
    base = row.pop("base", None) or None
    reached = row.pop("reached", None)
    row = checked(Chip, {"name": name, "aliases": []} | row, source)
    inherited = None if base is None else _row(str(base))
    if not inherited and (missing := lacking(Chip, row)):
        raise ValueError(
            f"{source} lacks {missing}; add them, or base = 'h100' to take them from a row"
        )
    if reached is not None:
        Allowed(dict).check(f"{source}: reached", reached)
        usual = inherited.rates if inherited else Rates()
        row["reached"] = replace(usual, **checked(Rates, reached, f"{source}, reached"))
    if not inherited:
        return Chip(**row)
    if "devices_per_chip" in row:  # of what, the row that it starts from does not know
        row.setdefault("device", "")
    row["sources"] = {k: v for k, v in inherited.sources.items() if k not in row} | row.get(
        "sources", {}
    )
    return replace(inherited, **{"reached": None} | row, base=inherited.name)


def guess(device_kind: str) -> Chip | None:
    """Return the row for JAX's `device_kind`, or None where no row is right.

    PCIe boards, MIG slices and lite variants have other links, clocks or memory than their namesakes.
    """
    # words are matched whole: "GB200" is not a B200
    fits = lambda pattern: re.fullmatch(pattern, device_kind.strip(), re.IGNORECASE)
    return next((CHIP_BY_NAME[name] for name, pattern in _KINDS.items() if fits(pattern)), None)
