"""GPUs that llmpar has no row for: described to XLA's compiler, as targets l4 and t4 (NVIDIA's data sheets).

PCIe gives a device 32 (L4) or 16 GB/s one way; 100 Gb/s for each host of eight are assumed."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

from llmpar.planner import targets
from llmpar.predict import hardware

L4 = dict(name="NVIDIA L4", capability=[8, 9], core_count=58, fpus_per_core=128, clock_rate_ghz=2.04)
L4 |= dict(l2_cache_size=48 << 20, shared_memory_per_core=100 << 10, threads_per_core_limit=1536)
T4 = dict(name="Tesla T4", capability=[7, 5], core_count=40, fpus_per_core=64, clock_rate_ghz=1.59)
T4 |= dict(l2_cache_size=4 << 20, shared_memory_per_core=64 << 10, threads_per_core_limit=1024)
ROWS = {
    "l4": dict(flops_per_s=121e12, hbm_bytes=24e9, hbm_bytes_per_s=300e9, link_bytes_per_s=32e9),
    "t4": dict(flops_per_s=65e12, hbm_bytes=16e9, hbm_bytes_per_s=320e9, link_bytes_per_s=16e9),
}
OFFERED = {"l4": 22.0, "t4": 14.7}  # GiB of which JAX may take a part


@contextlib.contextmanager
def described() -> Iterator[None]:
    """`targets.parse_target` knows them inside this block, or in a function with this decorator."""
    rows = dict[str, hardware.Chip]()
    for name in ROWS:
        row = dict(ROWS[name], usable_hbm_gib=OFFERED[name], dcn_bytes_per_s=12.5e9 / 8)
        rows[name] = replace(hardware.chip("a100-40"), name=name, aliases=(), **row)
    with mock.patch.dict(hardware.CHIP_BY_NAME, rows), mock.patch.dict(targets.GPUS, l4=L4, t4=T4):
        yield
