"""What chips reach of what their data sheets promise: a few constants per generation, fitted on published
runs."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Annotated

from llmpar.files import Allowed

Share = Annotated[float, Allowed(float, 1e-6, 1)]
Positive = Annotated[float, Allowed(float, 1e-12, 1e12)]


@dataclass(frozen=True)
class Rates:
    """Shares of a chip's published rates that software reaches, and the delays that no rate explains.

    ``half`` are elements of a product's result at which it reaches half of its rate: tiles are dealt to cores
    in waves, and the last wave is not full.
    """

    products: Share = 0.70  # of peak, large matrix products
    half: Positive = 2e6
    grouped: Share = 0.45  # of peak, products of experts, each with its own few rows
    attention: Share = 0.45  # of peak, fused attention, both directions together
    memory: Share = 0.80  # of the memory's rate, elementwise work and what products read and write
    links: Share = 0.80  # of the fast links' rate, large collectives (`Chip.link_efficiency` is a vendor's)
    network: Share = 0.80  # of the network's rate, large collectives
    kernel_s: Positive = 4e-6  # the least time of a kernel on the device
    host_s: Positive = 20e-6  # of a launch by an eager framework's host
    start_s: Positive = 4e-6  # of a collective, and again for each doubling of its group
    shared: Share = 0.2  # of a hidden collective's time, what computing loses to it, to cores and memory
    eight_bit: Positive = 1.7  # how much faster 8-bit products are than 16-bit ones, and 4-bit than those


_TEXT = resources.files(__package__).joinpath("rates.toml").read_text(encoding="utf-8")
RATES: dict[str, Rates] = {name: Rates(**row) for name, row in tomllib.loads(_TEXT).items()}
"""What `tests/fit_rates.py` found."""
