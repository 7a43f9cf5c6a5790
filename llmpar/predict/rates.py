"""What chips reach of what their data sheets promise: a few constants per generation, fitted on published
runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Shares of a chip's published rates that software reaches, and the delays that no rate explains.

    Attributes:
        products: of peak, large matrix products.
        half: elements of a product's result at which it reaches half of that: tiles are dealt to cores in
            waves, and the last wave is not full. What is lost falls with the root of the elements, because
            smaller tiles are chosen for smaller results.
        grouped: of peak, products of experts, each with its own few rows.
        attention: of peak, fused attention, both directions together.
        memory: of the memory's rate, elementwise work and what products read and write.
        links: of the fast links' rate, large collectives (`hardware.Chip.link_efficiency` is a vendor's).
        network: of the network's rate, large collectives.
        kernel_s: the least time of a kernel on the device.
        host_s: of a launch by an eager framework's host.
        start_s: of a collective, and again for each doubling of its group.
        shared: the share of a hidden collective's time that computing loses to it, to cores and memory.
        eight_bit: how much faster 8-bit products are than 16-bit ones, and 4-bit ones than those.
    """

    products: float = 0.70
    half: float = 2e6
    grouped: float = 0.45
    attention: float = 0.45
    memory: float = 0.80
    links: float = 0.80
    network: float = 0.80
    kernel_s: float = 4e-6
    host_s: float = 20e-6
    start_s: float = 4e-6
    shared: float = 0.2
    eight_bit: float = 1.7


RATES: dict[str, Rates] = {
    "7x": Rates(
        products=0.871,
        half=3.76e06,
        grouped=0.241,
        attention=0.463,
        memory=0.806,
        kernel_s=3.99e-06,
        shared=0.202,
    ),
    "a100-80": Rates(
        products=0.78,
        half=1.6e06,
        attention=0.324,
        memory=0.95,
        links=0.795,
        network=0.668,
        kernel_s=3.84e-05,
        host_s=3.79e-05,
        start_s=6.24e-06,
        shared=0.235,
    ),
    "b200": Rates(
        products=0.506,
        half=3.07e06,
        grouped=0.485,
        attention=0.384,
        memory=0.749,
        links=0.785,
        kernel_s=6.12e-06,
        start_s=4.42e-06,
        shared=0.212,
    ),
    "h100": Rates(
        products=0.754,
        half=3.44e06,
        grouped=0.632,
        attention=0.503,
        memory=0.95,
        links=0.72,
        network=0.431,
        kernel_s=4.41e-06,
        start_s=4.44e-06,
        shared=0.0878,
        eight_bit=1.83,
    ),
    "h200": Rates(products=0.693, attention=0.449, memory=0.799),
    "v5p": Rates(
        products=0.95,
        half=8.87e06,
        attention=0.398,
        memory=0.72,
        links=0.827,
        network=0.761,
        kernel_s=4.17e-06,
        shared=0.236,
    ),
    "v6e": Rates(products=0.822, half=1.95e06, attention=0.494, memory=0.858, shared=0.193),
}
"""What `tests/fit_rates.py` found; a constant that is not named is the general one, which no run moved."""


GENERATION = {
    "a100-40": "a100-80", "gh200": "h100", "v5e": "v6e", "v4": "v5p",
}  # fmt: skip
"""Chips that nobody's runs here are of, and the chip whose cores or design they share. GB200 and GB300
have the general row: that of B200 is of one machine, and what Megatron-Bridge publishes of them is faster."""


def rates(chip_name: str) -> Rates:
    """The row of a chip or of its generation, or the general one."""
    return RATES.get(GENERATION.get(chip_name, chip_name), Rates())
