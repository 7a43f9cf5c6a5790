"""``llmpar goodput``: what failures and checkpoints leave of a run's time."""

from dataclasses import asdict, dataclass
from typing import Annotated

from llmpar.cli.options import File, Output, Real, check_picture, give, save_picture
from llmpar.draw.curves import failures
from llmpar.files import Allowed
from llmpar.predict import goodput

# Of a GPU in the pre-training of Llama 3 405B: 466 interruptions in 54 days on 16,384 (Llama 3 2024, section
# 3.3.4).
DEVICE_MTBF_H = 54 * 24 * 16_384 / 466
_HEAD = "  devices  fails after s  Young's interval s     best s   chosen s  waiting  goodput"
_ROW = (
    "{devices:9,}  {mtbf_s:13,.0f}  {young_interval_s:18,.0f}  {best_interval_s:9,.0f}"
    "  {interval_s:9,.0f}  {waiting_share:7.1%}  {goodput:7.1%}"
)


@dataclass(frozen=True)
class GoodputCommand(Output):
    """Compute what failures leave of a run: the best interval between checkpoints, and the share of time that
    ends up in the weights, by formula and by simulation.

    Attributes:
        devices: whose failure stops the run.
        device_mtbf_hours: mean time between failures of one of them. By default that of Llama 3 405B's GPUs.
        stall_s: seconds for which a checkpoint stops training.
        write_s: seconds after that until it is written; 0 where training waits for it, as llmpar train
            does.
        restart_s: seconds from a failure to the next step, where a node is free.
        repair_hours: until a failed node is back; 0: there is always a spare one.
        spares: nodes that stand by.
        interval_s: seconds of training between checkpoints; by default the best.
        svg: also draw goodput over the interval into this SVG (or PNG).
    """

    devices: Annotated[int, Allowed(int, 1, 1 << 24)] = 16_384
    device_mtbf_hours: Annotated[float, Allowed(float, 1e-3, 1e12)] = DEVICE_MTBF_H
    stall_s: float = 30.0
    write_s: float = 0.0
    restart_s: float = 600.0
    repair_hours: Annotated[float, Allowed(float, 0, 1e12)] = 0.0
    spares: Annotated[int, Allowed(int, 0, 1 << 20)] = 0
    interval_s: Real = None
    svg: File = None

    def run(self) -> None:
        check_picture(self.svg)
        given = self.stall_s, self.restart_s, self.write_s, 3600 * self.repair_hours, self.spares
        sizes = sorted({max(1, int(self.devices * share)) for share in (1 / 8, 1 / 2, 1, 2, 8)})
        runs = {n: goodput.FailingRun(3600 * self.device_mtbf_hours / n, *given) for n in sizes}
        save_picture(
            self.svg,
            "goodput over the interval",
            lambda: failures({f"{n:,} devices": run for n, run in runs.items()}),
        )
        rows = [{"devices": n} | self.document(run) for n, run in runs.items()]
        document = dict(rows[sizes.index(self.devices)])
        share, error = goodput.simulate(runs[self.devices], document["interval_s"])
        document |= {"sizes": rows, "simulated": {"goodput": share, "standard_error": error}}
        end = f"{self.devices:9,} devices, simulated: {share:.2%} ± {error:.2%}"
        give(document, self.json, [_HEAD, *(_ROW.format(**row) for row in rows), end])

    def document(self, run: goodput.FailingRun) -> dict:
        """Return what is known of a run."""
        best = goodput.best_interval(run)
        interval_s = best if self.interval_s is None else self.interval_s
        return {
            **asdict(run),
            "interval_s": interval_s,
            "young_interval_s": goodput.young_interval(run),
            "best_interval_s": best,
            "waiting_share": goodput.waiting_share(run),
            "goodput": goodput.goodput(run, interval_s),
        }
