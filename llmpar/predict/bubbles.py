"""What an order of pipeline stages costs: the published bubbles and peaks."""

from typing import NamedTuple

from llmpar.plan.timetable import Costs


class ClosedForm(NamedTuple):
    """A published formula's values."""

    bubble: float  # as `Timetable.bubble`, without hops
    peak_live: list[float]
    from_m: int  # it holds from so many microbatches
    source: str


def closed_forms(p: int, m: int, v: int = 2, costs: Costs = (1, 1, 1)) -> dict[str, ClosedForm]:
    """Return the published bubbles and peaks; what a form assumes of the costs stands behind its source."""
    F, B, W = costs
    whole, stages = (p - 1) * (F + B + W), range(p)
    # DualPipe: (p/2-1)(F&B + B - 3W) with the paper's full B, which is B+W here, and F&B = F+B+W
    double = (p / 2 - 1) * (F + 2 * B - W)
    half = (p - 1) * (F + 2 * B - W) / 2  # the same for 2p stages of half the work
    full = 2 * p - 1  # microbatches that are under way when no stage waits
    chunks = [min(m, p + (p - 1 - 2 * i) / v) for i in stages]
    rows: dict[str, tuple[float, list[float], int, str]] = {
        "gpipe": (whole, [m] * p, 1, "Narayanan 2021, sec. 2.2.1"),
        "1f1b": (whole, [min(m, p - i) for i in stages], 1, "Narayanan 2021, sec. 2.2.1"),
        "interleaved": (whole / v, chunks, p, "Narayanan 2021, sec. 2.2.2"),
        "interleaved-zb": (
            (p - 1) * (F + B - W) / v,
            [p] * p,
            p,
            "ZB-H1's (Qi 2023) over v chunks; W <= F",
        ),
        "breadth-first": (whole / v, [m] * p, p, "Lamy-Poirier 2022"),
        "zb-h1": ((p - 1) * (F + B - W), [p] * p, p, "Qi 2023, Table 2; W <= F"),
        "zb-h2": (
            (p - 1) * (F + B - 2 * W),
            [full] * p,
            full,
            "Qi 2023, Table 2; W <= F, 2W <= F+B",
        ),
        "zb-v": (0, [p] * p, full, "Qi 2023, sec. 6; F = B = W"),
        "dualpipe": (double, [p + 1] * p, 2 * p, "DeepSeek-V3 2024, Table 2; F = B"),
        "dualpipev": (half, [p + 0.5] * p, 2 * p, "DualPipe's repository; F = B"),
    }
    return {name: ClosedForm(*row) for name, row in rows.items()}
