"""``llmpar goodput``: what failures and checkpoints leave of a run's time."""

from dataclasses import asdict, dataclass

from llmpar.cli.options import File, Output, Real, check_picture, check_range, give, save_picture
from llmpar.draw.goodput import failures
from llmpar.predict import goodput

DEVICE_MTBF_H = 54 * 24 * 16_384 / 466
"""Of a GPU in the pre-training of Llama 3 405B: 466 interruptions in 54 days on 16,384 (Llama 3 2024,
section 3.3.4)."""


@dataclass(frozen=True)
class GoodputCommand(Output):
    """Compute what failures leave of a run: the best interval between checkpoints, and the share of time that
    ends up in the weights, by formula and by simulation.

    Attributes:
        devices: whose failure stops the run.
        device_mtbf_hours: mean time between failures of one of them. By default that of Llama 3 405B's GPUs.
        stall_s: seconds for which a checkpoint stops training.
        write_s: seconds after that until it is written; 0 where training waits for it, as `llmpar train`
            does.
        restart_s: seconds from a failure to the next step, where a node is free.
        repair_hours: until a failed node is back; 0: there is always a spare one.
        spares: nodes that stand by.
        interval_s: seconds of training between checkpoints; by default the best.
        svg: also draw goodput over the interval into this SVG (or PNG).
    """

    devices: int = 16_384
    device_mtbf_hours: float = DEVICE_MTBF_H
    stall_s: float = 30.0
    write_s: float = 0.0
    restart_s: float = 600.0
    repair_hours: float = 0.0
    spares: int = 0
    interval_s: Real = None
    svg: File = None

    def run(self) -> None:
        check_range("--devices", self.devices, 1, 1 << 24)
        check_range("--spares", self.spares, 0, 1 << 20)
        check_picture(self.svg)
        sizes = sorted({max(1, int(self.devices * share)) for share in (1 / 8, 1 / 2, 1, 2, 8)})
        jobs = {f"{n:,} devices": self.job(n) for n in sizes}
        save_picture(self.svg, "goodput over the interval", lambda: failures(jobs))
        rows = [self.document(n) for n in sizes]
        document = next(row for row in rows if row["devices"] == self.devices)
        share, error = goodput.simulate(self.job(self.devices), document["interval_s"])
        simulated = {"goodput": share, "standard_error": error}
        seconds = ("mtbf_s", "young_interval_s", "best_interval_s", "interval_s")
        shown = [
            f"{'devices':>9} {' '.join(f'{name:>17}' for name in seconds)}   waiting   goodput"
        ]
        for row in rows:
            times = " ".join(f"{row[name]:17,.0f}" for name in seconds)
            shown.append(
                f"{row['devices']:9,} {times} {row['waiting_share']:9.1%} {row['goodput']:9.1%}"
            )
        shown.append(f"{self.devices:9,} devices, simulated: {share:.2%} ± {error:.2%}")
        give(document | {"sizes": rows, "simulated": simulated}, self.json, shown)

    def job(self, devices: int) -> goodput.FailingRun:
        """Return the job on so many devices."""
        mtbf_s, repair_s = 3600 * self.device_mtbf_hours / devices, 3600 * self.repair_hours
        given = self.stall_s, self.restart_s, self.write_s, repair_s, self.spares
        return goodput.FailingRun(mtbf_s, *given)

    def document(self, devices: int) -> dict:
        """Return what is known of the job on so many devices."""
        job = self.job(devices)
        best = goodput.best_interval(job)
        interval_s = best if self.interval_s is None else self.interval_s
        return {
            "devices": devices,
            **asdict(job),
            "interval_s": interval_s,
            "young_interval_s": goodput.young_interval(job),
            "daly_interval_s": goodput.daly_interval(job),
            "best_interval_s": best,
            "waiting_share": goodput.waiting_share(job),
            "goodput": goodput.goodput(job, interval_s),
        }
