"""Chips and their links as rows of numbers: each with its unit, its date and the place where it was read.

A row describes one *chip* as its maker does; `Chip.per_device` divides it by the JAX devices that the chip
shows as. Rates are peak bf16 without sparsity, bytes are bytes (GB = 1e9, GiB = 2**30), bandwidths are one
way unless named otherwise. Where the published memory and that of the compiler or driver differ, both are
kept: `hbm_bytes` is what is published (some pages print GB where they mean GiB, so it can be the smaller),
`usable_hbm_gib` what the device offers. Of a GPU's memory JAX takes three quarters when it starts, unless it
is told otherwise: `Chip.usable_bytes` is what is left.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from llmpar.files import read_toml
from llmpar.predict.rates import Rates, rates

GIB = 2**30
LINKS = ("torus", "switch")
MEMORY_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variables that tell JAX which share of a GPU's memory to take."""
SHARES = ("products", "grouped", "attention", "memory", "links", "network", "shared")
"""Fields of `Rates` that are shares."""
BOUNDS = {
    "flops_per_s": (1e6, 1e20), "hbm_bytes": (1e6, 1e16), "usable_hbm_gib": (1e-3, 1e7), "hop_s": (1e-12, 1),
    "hbm_bytes_per_s": (1e3, 1e18), "link_bytes_per_s": (1e3, 1e18), "dcn_bytes_per_s": (1e3, 1e18),
    "link_efficiency": (1e-6, 1), "memory_share": (1e-3, 1), "num_axes": (1, 8), "node_size": (1, 1 << 20),
    "devices_per_chip": (1, 64), "wrap_multiple": (1, 1 << 20),
}  # fmt: skip
"""What a chip's file may say: far beyond what is built, near enough to find a wrong unit."""
COUNTS = ("num_axes", "node_size", "devices_per_chip", "wrap_multiple")

BOOK = "Austin et al., How to Scale Your Model, 2025"
CLOUD = "Google Cloud TPU documentation, page of this TPU"
AOT = "RESOURCE_EXHAUSTED text of libtpu 0.0.42.1, compiled without a device"
XLA = "openxla/xla, xla/backends/gpu/target_config/specs"
IB_H100 = f"one 400 Gb/s InfiniBand port per GPU: {BOOK}, GPU chapter"
NVLINK = f"{BOOK}, GPU chapter, table of NVLink generations"
NVLINK_REACHED = (
    f"{BOOK}, GPU chapter: 370 of 450 GB/s is the most seen on H100; assumed for the other generations"
)
ICI_REACHED = f"{BOOK}, TPU chapter counts 90 % of the documented link rate"


@dataclass(frozen=True)
class Chip:
    """One row. `sources` says for every figure where it comes from; a row loaded from a file may leave it
    empty.

    `link` is "torus" (each chip has two links on each of `num_axes` axes) or "switch" (all chips of a node
    reach each other at once; `num_axes` is 1 and `link_bytes_per_s` is what one chip sends in total).
    `node_size` counts chips within reach of the fast links: a node (switch) or the largest slice (torus).
    Beyond it, each chip sends `dcn_bytes_per_s`. A torus axis closes into a ring when its length is a
    multiple of `wrap_multiple`.
    """

    name: str
    aliases: tuple[str, ...]
    flops_per_s: float
    hbm_bytes: float
    usable_hbm_gib: float  # per JAX device, not per chip
    hbm_bytes_per_s: float
    link: str
    link_bytes_per_s: float
    link_efficiency: float  # share of the published link rate that large messages reach
    num_axes: int
    node_size: int
    dcn_bytes_per_s: float
    date: str  # when the source was current, or the chip was announced
    devices_per_chip: int = 1
    wrap_multiple: int = 1
    memory_share: float = (
        1.0  # of the usable memory that JAX takes where the environment does not say another
    )
    hop_s: float = 1e-6  # {BOOK}: about a microsecond per TPU hop; kept for switches too
    reached: Rates | None = None  # measured on the machine at hand, and written by hand into a TOML file
    base: str = ""  # the row that a file started from
    sources: dict[str, str] = field(default_factory=dict, hash=False, repr=False)

    @property
    def usable_bytes(self) -> int:
        """Bytes that a program may use on one JAX device: of a GPU the share that JAX takes here
        (`asked_memory_share`)."""
        share = self.memory_share if self.memory_share == 1 else asked_memory_share() or self.memory_share
        return int(self.usable_hbm_gib * GIB * share)

    @property
    def reached_link_bytes_per_s(self) -> float:
        """One-way link rate that large messages reach: use it for times; published examples often use the
        peak."""
        return self.link_bytes_per_s * self.link_efficiency

    @property
    def axis_bytes_per_s(self) -> float:
        """Peak bytes per second that leave a chip along one axis: both directions of a torus ring, all of a
        switch."""
        return self.link_bytes_per_s * (2 if self.link == "torus" else 1)

    @property
    def family(self) -> str:
        """The row's name, also of a file that started from it."""
        return self.base or self.name

    @property
    def rates(self) -> Rates:
        """What software reaches of these figures: as measured here, else as fitted on published runs."""
        return self.reached or rates(self.family)

    @property
    def simulated(self) -> bool:
        """True where time means nothing: simulated devices share one processor and have no links. Where
        they were measured, it means what was measured."""
        return self.family == "cpu" and self.reached is None

    def wraps(self, axis_size: int) -> bool:
        """Whether a torus axis of this length closes into a ring (a switch always does)."""
        return self.link == "switch" or axis_size % self.wrap_multiple == 0

    def per_device(self) -> Chip:
        """The share of one JAX device: rates, bytes and links divided by `devices_per_chip`, node sizes
        multiplied."""
        n = self.devices_per_chip
        shared = ("flops_per_s", "hbm_bytes", "hbm_bytes_per_s", "link_bytes_per_s", "dcn_bytes_per_s")
        share = {f: getattr(self, f) / n for f in shared}
        return replace(self, **share, node_size=self.node_size * n, devices_per_chip=1)


def asked_memory_share() -> float | None:
    """The share of a GPU's memory that this environment tells JAX to take; None where it says nothing.

    Preallocated or not, JAX takes no more than its share; only the platform's own allocator knows none.
    """
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        return 1.0
    name = next((name for name in MEMORY_SHARES if os.environ.get(name)), None)
    if name is None:
        return None
    with contextlib.suppress(ValueError):
        if (share := float(os.environ[name])) > 0:
            return share
    raise ValueError(f"{name}={os.environ[name]} is no share of a GPU's memory; use one above 0, such as .95")


def memory_left_out(chip: Chip) -> str:
    """A sentence on the memory that JAX leaves out because nobody told it its share; empty where it takes
    all."""
    if chip.memory_share == 1 or asked_memory_share() is not None:
        return ""
    whole = chip.usable_hbm_gib
    taken = f"{chip.memory_share:.0%} of a GPU's memory, {whole * chip.memory_share:.1f} of {whole:.1f} GiB"
    return f"JAX takes {taken}; alone on it, set {MEMORY_SHARES[0]}=.95"


def _tpu(
    name,
    aliases,
    flops,
    hbm,
    usable,
    hbm_rate,
    link,
    axes,
    pod,
    dcn,
    date,
    devices=1,
    wrap=4,
    reach=0.9,
    **own,
):
    source = {
        "flops_per_s": CLOUD,
        "hbm_bytes": CLOUD,
        "hbm_bytes_per_s": CLOUD,
        "usable_hbm_gib": AOT,
        "num_axes": CLOUD,
        "link_bytes_per_s": f"{CLOUD}: bidirectional GB/s per chip / ports / 2",
        "link_efficiency": ICI_REACHED,
        "node_size": f"{CLOUD}: chips per pod",
        "dcn_bytes_per_s": CLOUD,
        "hop_s": f"{BOOK}, TPU chapter, question 5",
        "memory_share": "all of it",
        "devices_per_chip": "jax.experimental.topologies with libtpu 0.0.42.1",
        "wrap_multiple": (
            f"{BOOK}, TPU chapter: rings need whole 4x4x4 cubes (v4, v5p) or the full 16 (v5e, v6e)"
        ),
    }
    return Chip(
        name,
        (f"tpu-{name}", f"tpu{name}", *aliases),
        flops,
        float(hbm),
        usable,
        hbm_rate,
        "torus",
        link,
        reach,
        axes,
        pod,
        dcn,
        date,
        devices,
        wrap,
        sources=source | own,
    )


def _gpu(
    name, aliases, flops, hbm, usable, hbm_rate, link, node, dcn, date, reach=370 / 450, devices=1, **own
):
    source = {
        "flops_per_s": XLA,
        "hbm_bytes": XLA,
        "hbm_bytes_per_s": XLA,
        "link_bytes_per_s": NVLINK,
        "node_size": NVLINK,
        "usable_hbm_gib": f"{XLA}: device_memory_size",
        "memory_share": "JAX documentation, GPU memory allocation: 75 % by default",
        "link_efficiency": NVLINK_REACHED,
        "dcn_bytes_per_s": IB_H100,
        "num_axes": "one, by definition of a switch",
        "devices_per_chip": "one",
        "wrap_multiple": "one, by definition of a switch",
        "hop_s": "assumed equal to a TPU hop",
    }
    return Chip(
        name,
        aliases,
        flops,
        float(hbm),
        usable,
        hbm_rate,
        "switch",
        link,
        reach,
        1,
        node,
        dcn,
        date,
        devices,
        memory_share=0.75 if name != "cpu" else 1.0,
        sources=source | own,
    )


CHIPS: tuple[Chip, ...] = (
    _tpu(
        "v3",
        (),
        123e12,
        32 * GIB,
        15.48,
        900e9,
        100e9,
        2,
        1024,
        3.125e9,
        "2018-05",
        2,
        32,
        1.0,
        link_bytes_per_s=f"{BOOK}, TPU chapter; not in the Cloud pages",
        link_efficiency="taken as 1: as reached",
        dcn_bytes_per_s=f"{BOOK}, TPU chapter, first edition: 25 GB/s per host of 8",
        wrap_multiple="assumed: the full 32x32 pod",
    ),
    # Cloud runs a v4 as one "megacore" device per chip; the compiler's topology shows two cores, and so does
    # this row.
    _tpu(
        "v4",
        ("v4p",),
        275e12,
        32 * GIB,
        15.25,
        1200e9,
        50e9,
        3,
        4096,
        6.25e9,
        "2021-05",
        2,
        link_bytes_per_s=f"{BOOK}, TPU chapter: 45 GB/s reached, at the 90 % of its successors",
        dcn_bytes_per_s=f"{BOOK}, TPU chapter",
    ),
    _tpu(
        "v5e",
        ("v5litepod", "v5-lite"),
        197e12,
        16e9,
        15.75,
        819e9,
        50e9,
        2,
        256,
        3.125e9,
        "2023-08",
        1,
        16,
        dcn_bytes_per_s=f"{BOOK}, TPU chapter; {CLOUD}: 6.4 Tb/s per pod of 256",
    ),
    _tpu("v5p", (), 459e12, 95 * GIB, 95.74, 2765e9, 100e9, 3, 8960, 6.25e9, "2023-12"),
    _tpu(
        "v6e",
        ("trillium", "v6-lite"),
        918e12,
        32 * GIB,
        31.25,
        1638e9,
        100e9,
        2,
        256,
        12.5e9,
        "2024-10",
        1,
        16,
    ),
    _tpu(
        "7x",
        ("v7x", "tpu-v7x", "ironwood"),
        2307e12,
        192 * GIB,
        94.75,
        7380e9,
        100e9,
        3,
        9216,
        12.5e9,
        "2025-11",
        2,
        wrap_multiple="assumed as v5p, which its page calls similar",
    ),
    _gpu(
        "a100-40",
        ("a100-sxm4-40gb",),
        312e12,
        40e9,
        42331013120 / GIB,
        1555.2e9,
        300e9,
        8,
        25e9,
        "2020-05",
        flops_per_s="NVIDIA A100 data sheet",
        hbm_bytes="NVIDIA A100 data sheet",
        dcn_bytes_per_s="8 x 200 Gb/s per node: Narayanan et al. 2021, section 5 (Selene)",
    ),
    _gpu(
        "a100-80",
        ("a100", "a100-sxm4-80gb"),
        312e12,
        80e9,
        85100068864 / GIB,
        2039.04e9,
        300e9,
        8,
        25e9,
        "2020-11",
        flops_per_s="NVIDIA A100 data sheet; Narayanan et al. 2021",
        hbm_bytes="NVIDIA A100 data sheet",
        dcn_bytes_per_s="8 x 200 Gb/s per node: Narayanan et al. 2021, section 5 (Selene)",
    ),
    _gpu(
        "h100",
        ("h100-sxm", "h100-80", "h100-sxm5"),
        989.4e12,
        84942979072,
        84942979072 / GIB,
        3352.32e9,
        450e9,
        8,
        50e9,
        "2022-09",
        flops_per_s=f"{XLA}: 132 SMs x 4 x 512 x 2 x 1.82952 GHz",
    ),
    _gpu(
        "h200",
        ("h200-sxm",),
        989.4e12,
        151397597184,
        151397597184 / GIB,
        4800e9,
        450e9,
        8,
        50e9,
        "2023-11",
        flops_per_s=f"{XLA}: 132 SMs x 4 x 512 x 2 x 1.82952 GHz",
    ),
    _gpu(
        "b200",
        (),
        2225e12,
        191514411008,
        191514411008 / GIB,
        7672.32e9,
        900e9,
        8,
        50e9,
        "2024-03",
        flops_per_s=f"{XLA}: 148 SMs x 4 x 1024 x 2 x 1.83531 GHz; marketing says 2250",
    ),
    _gpu(
        "gb200",
        ("gb200-nvl72",),
        2398e12,
        197897748480,
        197897748480 / GIB,
        7928.064e9,
        900e9,
        72,
        50e9,
        "2024-03",
        flops_per_s=f"{XLA}: 152 SMs x 4 x 1024 x 2 x 1.92591 GHz; marketing says 2500",
        dcn_bytes_per_s=f"{BOOK}, GPU chapter: 3600 GB/s leave a domain of 72",
    ),
    _gpu(
        "gh200",
        ("gh200-96",),
        989.4e12,
        96e9,
        97871 * 2**20 / GIB,
        4000e9,
        450e9,
        4,
        25e9,
        "2023-05",
        flops_per_s="NVIDIA GH200 data sheet: an H100's",
        hbm_bytes="NVIDIA GH200 data sheet, HBM3 (the HBM3e variant has 144 GB)",
        usable_hbm_gib="nvidia-smi: 97871 MiB",
        hbm_bytes_per_s="NVIDIA GH200 data sheet",
        node_size="quad GH200 nodes: CSCS documentation of Alps",
        dcn_bytes_per_s="one 200 Gb/s Slingshot port per GPU: CSCS documentation of Alps",
    ),
    _gpu(
        "gb300",
        ("gb300-nvl72",),
        2500e12,
        288e9,
        277.5,
        8000e9,
        900e9,
        72,
        100e9,
        "2025-03",
        flops_per_s="NVIDIA GB300 NVL72 page: 180 PFLOP/s in 72, without sparsity",
        hbm_bytes="NVIDIA GB300 NVL72 page: 288 GB per GPU",
        usable_hbm_gib="assumed: the share of its 288 GB that a GB200 offers of 192",
        hbm_bytes_per_s="NVIDIA GB300 NVL72 page: 8 TB/s",
        dcn_bytes_per_s="NVIDIA GB300 NVL72 page: one 800 Gb/s port per GPU",
    ),
    # Two dies per package, each a JAX device. Direct links of 50 GB/s between packages, no switch.
    _gpu(
        "mi250x",
        ("mi250",),
        383e12,
        128e9,
        68702699520 / GIB,
        3276.8e9,
        300e9,
        4,
        25e9,
        "2021-11",
        devices=2,
        reach=0.8,
        flops_per_s="AMD Instinct MI250X data sheet, both dies",
        hbm_bytes="AMD Instinct MI250X data sheet, both dies",
        hbm_bytes_per_s="AMD Instinct MI250X data sheet, both dies",
        usable_hbm_gib="rocm-smi: VRAM Total Memory 68702699520 B per die",
        link_bytes_per_s="LUMI documentation, LUMI-G: links of 50 GB/s, three of each die leave the package",
        link_efficiency="not measured: assumed as for NVLink",
        node_size="LUMI documentation, LUMI-G: four packages a node",
        devices_per_chip="LUMI documentation, LUMI-G: a die is a device",
        dcn_bytes_per_s="LUMI documentation, LUMI-G: one 200 Gb/s port per package",
    ),
    # Seven direct links of 64 GB/s, no switch: a group of g < 8 reaches g - 1 of them, which this row does
    # not model.
    _gpu(
        "mi300x",
        ("mi300",),
        1307.4e12,
        192e9,
        206141652992 / GIB,
        5300e9,
        448e9,
        8,
        50e9,
        "2023-12",
        reach=1.0,
        flops_per_s="AMD Instinct MI300X data sheet",
        hbm_bytes="AMD Instinct MI300X data sheet (prints 192 GB)",
        hbm_bytes_per_s="AMD Instinct MI300X data sheet",
        usable_hbm_gib="rocm-smi: VRAM Total Memory 206141652992 B",
        link_bytes_per_s="AMD Instinct MI300X data sheet: 7 links x 64 GB/s",
        node_size="AMD platform: 8 GPUs",
        link_efficiency="not measured: taken as 1",
        dcn_bytes_per_s="Azure ND MI300X v5 page: 8 x 400 Gb/s",
    ),
    _gpu(
        "cpu",
        ("simulated",),
        85e9,
        4 * GIB,
        4.0,
        10e9,
        5e9,
        8,
        1e9,
        "2026",
        reach=1.0,
        flops_per_s="measured with XLA: about 85 GFLOP per core-second on large float32 products",
        memory_share="all",
        **dict.fromkeys(
            (
                "hbm_bytes",
                "usable_hbm_gib",
                "hbm_bytes_per_s",
                "link_bytes_per_s",
                "link_efficiency",
                "node_size",
                "dcn_bytes_per_s",
            ),
            "placeholder: simulated devices say nothing about it",
        ),
    ),
)

NAMES = {alias: chip for chip in CHIPS for alias in (chip.name, *chip.aliases)}


@dataclass(frozen=True)
class Cluster:
    """A machine that people name: a chip, and what of its row differs there.

    Attributes:
        chips_per_node: within reach of the fast links.
        network_bytes_per_s: one way, of one chip.
        ports: network ports of a node, in words.
        num_chips: of the whole machine; None: as many as are asked for.
    """

    name: str
    chip: str
    chips_per_node: int
    network_bytes_per_s: float
    ports: str
    num_chips: int | None
    date: str
    source: str

    @property
    def row(self) -> Chip:
        """The chip's row as it is in this machine."""
        return replace(
            NAMES[self.chip], node_size=self.chips_per_node, dcn_bytes_per_s=self.network_bytes_per_s
        )


CLUSTERS = {
    c.name: c
    for c in (
        Cluster(
            "a100-node4", "a100-40", 4, 25e9, "4 x 200 Gb/s", None, "2020-11", "JUWELS Booster, Perlmutter"
        ),
        Cluster("juwels-booster", "a100-40", 4, 25e9, "4 x 200 Gb/s", 3744, "2020-11", "JSC documentation"),
        Cluster("perlmutter", "a100-40", 4, 25e9, "4 x 200 Gb/s", 6144, "2021-05", "NERSC documentation"),
        Cluster(
            "selene", "a100-80", 8, 25e9, "8 x 200 Gb/s", 4480, "2020-11", "Narayanan et al. 2021, section 5"
        ),
        Cluster("dgx-h100", "h100", 8, 50e9, "8 x 400 Gb/s", None, "2022-09", "NVIDIA DGX H100 data sheet"),
        Cluster("a3-high", "h100", 8, 12.5e9, "4 x 200 Gb/s", None, "2023-08", "Google Cloud, A3 High"),
        Cluster("alps", "gh200", 4, 25e9, "4 x 200 Gb/s", 10_752, "2024-09", "CSCS documentation"),
        Cluster("nvl72", "gb200", 72, 50e9, "72 x 400 Gb/s", None, "2024-03", "NVIDIA GB200 NVL72 page"),
        Cluster("lumi", "mi250x", 4, 25e9, "4 x 200 Gb/s", 11_912, "2022-06", "LUMI documentation, LUMI-G"),
        Cluster("v5e-256", "v5e", 256, 3.125e9, "6.4 Tb/s a pod", 256, "2023-08", CLOUD),
        Cluster("v6e-256", "v6e", 256, 12.5e9, "25.6 Tb/s a pod", 256, "2024-10", CLOUD),
        Cluster("v5p-pod", "v5p", 8960, 6.25e9, "50 Gb/s a chip", 8960, "2023-12", CLOUD),
        Cluster("v4-pod", "v4", 4096, 6.25e9, "50 Gb/s a chip", 4096, "2021-05", CLOUD),
        Cluster("tpu7x-pod", "7x", 9216, 12.5e9, "100 Gb/s a chip", 9216, "2025-11", CLOUD),
    )
}
"""Machines and shapes of nodes by name. Power is not published alike, and stands in `POWER_W`."""
POWER_W = {
    "a100-40": 400, "a100-80": 400, "h100": 700, "h200": 700, "gh200": 900, "b200": 1000, "gb200": 1200,
    "gb300": 1400, "mi250x": 560, "mi300x": 750, "v4": 192, "v5e": 200, "v5p": 450, "v6e": 300, "7x": 900,
}  # fmt: skip
"""Watts of one chip: GPUs' thermal design power by their data sheets (GH200 with its processor); v4: Jouppi
et al. 2023, table 4, maximum; later TPUs: not published, assumed."""


def cluster(name: str) -> Cluster:
    """Find a machine by name."""
    if name.lower() not in CLUSTERS:
        raise ValueError(f"cluster '{name}' is not known; known are {', '.join(CLUSTERS)}; or give --chip")
    return CLUSTERS[name.lower()]


def chip(name: str | Path) -> Chip:
    """Find a row by name or alias, or load one from a TOML file (any text that ends in `.toml`).

    The file holds fields of `Chip`; with `base = "a100-40"` it needs only those that differ from that row:

        base = "a100-40"
        name = "my-cluster"
        node_size = 4
        dcn_bytes_per_s = 3.125e9

    A table ``[reached]`` holds fields of `Rates`, as measured on the machine at hand.
    """
    return _load(Path(name)) if str(name).endswith(".toml") else _row(str(name))


def _row(name: str) -> Chip:
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    if key not in NAMES:
        raise ValueError(
            f"chip {name!r} is not known; known are {', '.join(c.name for c in CHIPS)}; "
            "or give the path of a .toml file (base = 'h100' and the fields that differ)"
        )
    return NAMES[key]


def _load(path: Path) -> Chip:
    row = read_toml(path, "chip file")
    asked = f"chip file {str(path)!r}"
    base, reached = row.pop("base", None), row.pop("reached", None)
    known = {f.name for f in fields(Chip)} - {"base", "reached"}
    if unknown := sorted(set(row) - known):
        raise ValueError(
            f"{asked} has the unknown field {', '.join(unknown)}; known: base, reached,"
            f" {', '.join(sorted(known))}"
        )
    row.setdefault("name", path.stem)
    row.setdefault("aliases", [])
    types = {"name": str, "link": str, "date": str, "aliases": list, "sources": dict}
    for key, value in row.items():
        if key in types:
            if not isinstance(value, types[key]):
                raise ValueError(f"{asked}: {key} = {value!r} is not a {types[key].__name__}")
        elif isinstance(value, bool) or not (isinstance(value, (int, float)) and 0 < value < float("inf")):
            raise ValueError(f"{asked}: {key} = {value!r} is not a positive number")
        elif not (limits := BOUNDS[key])[0] <= value <= limits[1]:
            raise ValueError(
                f"{asked}: {key} = {value!r} is of no machine; use {limits[0]:g} to {limits[1]:g}"
            )
        elif key not in COUNTS:
            row[key] = float(value)
        elif value != (whole := int(value)):
            raise ValueError(f"{asked}: {key} = {value!r} is not a whole number")
        else:
            row[key] = whole
    if row.get("link", "torus") not in LINKS:
        raise ValueError(f"{asked}: link = {row['link']!r} is neither of {', '.join(LINKS)}")
    row["aliases"] = tuple(row["aliases"])
    if base is not None:
        inherited = _row(str(base))
        row["sources"] = {k: v for k, v in inherited.sources.items() if k not in row} | row.get("sources", {})
        row |= {"base": inherited.name}
        row["reached"] = _reached(reached, inherited.rates, asked)
        return replace(inherited, **row)
    optional = {
        "aliases",
        "devices_per_chip",
        "wrap_multiple",
        "memory_share",
        "hop_s",
        "sources",
        "reached",
        "base",
    }
    if missing := [f.name for f in fields(Chip) if f.name not in row and f.name not in optional]:
        raise ValueError(
            f"{asked} lacks {', '.join(missing)}; add them, or base = 'h100' to take them from a row"
        )
    return Chip(**row, reached=_reached(reached, Rates(), asked))


def _reached(table: object, usual: Rates, asked: str) -> Rates | None:
    """The rates of a file, and the usual ones where it names none."""
    if table is None:
        return None
    known = [f.name for f in fields(Rates)]
    if not isinstance(table, dict) or (unknown := sorted(set(table) - set(known))):
        what = f"unknown field {', '.join(unknown)}" if isinstance(table, dict) else "value of reached"
        raise ValueError(f"{asked} has the {what}; a table [reached] may have {', '.join(known)}")
    for key, value in table.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < float("inf") or key in SHARES and value > 1:
            limit = "a share, above 0 and at most 1" if key in SHARES else "a positive number"
            raise ValueError(f"{asked}: reached.{key} = {value!r} is not {limit}")
    return replace(usual, **{key: float(value) for key, value in table.items()})


# What jax.devices()[0].device_kind says, tried in this order. Words are matched whole: "GB200" is not a B200.
KINDS = (
    (r"TPU v3", "v3"),
    (r"TPU v4", "v4"),
    (r"TPU v5 lite|TPU v5e", "v5e"),
    (r"TPU v5p?", "v5p"),
    (r"TPU v6 lite|TPU v6e", "v6e"),
    (r"TPU ?7x?", "7x"),
    (r".*\bA100-SXM\d?-40GB", "a100-40"),
    (r".*\bA100-SXM\d?-80GB", "a100-80"),
    (r".*\bH100 80GB HBM3|.*\bH100 SXM.*", "h100"),
    (r".*\bH200( 141GB.*)?", "h200"),
    (r".*\bB200", "b200"),
    (r".*\bGB200", "gb200"),
    (r".*\bGB300", "gb300"),
    (r".*\bGH200 (96GB HBM3|120GB)", "gh200"),
    (r".*\bMI250X", "mi250x"),
    (r".*\bMI300X( VF| OAM)?", "mi300x"),
    (r"cpu", "cpu"),
)


def guess(device_kind: str) -> Chip | None:
    """The row for JAX's `device_kind`, or None where no row is right.

    PCIe boards, MIG slices and lite variants have other links, clocks or memory than their namesakes: no
    guess is made.
    """
    for pattern, name in KINDS:
        if re.fullmatch(pattern, device_kind.strip(), re.IGNORECASE):
            return NAMES[name]
    return None
