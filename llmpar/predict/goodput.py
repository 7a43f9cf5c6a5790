"""What failures cost: the share of a run's time that ends up in its weights, exactly and by simulation.

A synchronous run stops when any of its nodes fails. It then waits for a spare node, restarts, and computes
again what came after the last finished checkpoint. Failures are a Poisson process of rate 1/M, M the mean
time between failures; they strike restarts too, which then begin anew. With an interval of t seconds of
training between checkpoints, s seconds for which one stops training, w seconds after that until it is
written, R seconds of restart, D seconds of a node's repair and S spare nodes

    goodput = (1 - B(S + 1, D/M)) · t/M / (exp((R + w)/M) (exp((t + s)/M) - 1))

where B is Erlang's loss formula. For w = 0 the second factor is Daly's exact expectation (Daly 2006, section
3). With w: i checkpoints of a run of length X are kept if X >= i (t + s) + w, and the sum of these
probabilities is a geometric series. An asynchronous write thus costs what as long a restart costs. The first
factor: nodes under repair are Erlang's busy lines, and the run waits while all S + 1 are; it holds for any
distribution of repairs with that mean (Erlang 1917; insensitivity: Sevastyanov 1957).
"""

import math
import random
from dataclasses import asdict, dataclass
from statistics import mean, stdev


@dataclass(frozen=True)
class FailingRun:
    """A synchronous run on a cluster that fails.

    Attributes:
        mtbf_s: mean time between failures that stop the run, over all its nodes.
        stall_s: what a checkpoint stops training for: all of it, or the copy to the host where it is written
            asynchronously.
        write_s: from then until it can be read back; training goes on.
        restart_s: from a failure to the first step after it, where a node is free: detection, scheduling,
            start, compiling, reading.
        repair_s: mean time until a failed node is back.
        spares: nodes that stand by.
    """

    mtbf_s: float
    stall_s: float
    restart_s: float
    write_s: float = 0.0
    repair_s: float = 0.0
    spares: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value < math.inf or value == 0 and name in ("mtbf_s", "stall_s"):
                raise ValueError(
                    f"{name} is {value}; use a positive number, of others than mtbf_s and"
                    " stall_s also 0"
                )


def young_interval(job: FailingRun) -> float:
    """Return Young's interval, sqrt(2 s M) (Young 1974; also called Young/Daly), for s far below M."""
    return math.sqrt(2 * job.stall_s * job.mtbf_s)


def best_interval(job: FailingRun) -> float:
    """Return the interval of the highest `goodput` among those that leave time for a write: with x = t/M the
    root of (1 - x) exp(x) = exp(-s/M), by Newton's method, which falls to it from x = 1; 1 is taken from both
    sides, which are near it. Daly (2006, eq. 37) has a series: sqrt(2 s M) - 2/3 s + …"""
    x = 1.0
    for _ in range(60):
        above = (1 - x) * math.expm1(x) - x - math.expm1(-job.stall_s / job.mtbf_s)
        x += above / (x * math.exp(x))
    return max(x * job.mtbf_s, job.write_s - job.stall_s)


def waiting_share(job: FailingRun) -> float:
    """Return the share of time in which the run waits for a repair: Erlang's B(S + 1, D/M), by recursion."""
    offered, share = job.repair_s / job.mtbf_s, 1.0
    for lines in range(1, job.spares + 2):
        share = offered * share / (lines + offered * share)
    return share


def goodput(job: FailingRun, interval_s: float) -> float:
    """Return the expected share of time that is training which is kept, by the formula above."""
    cycle_s = interval_s + job.stall_s
    if not 0 < interval_s < math.inf or job.write_s > cycle_s * (1 + 1e-12):  # what rounding leaves
        raise ValueError(
            f"an interval of {interval_s:g} s and a stall of {job.stall_s:g} s leave {cycle_s:g} s for a"
            f" write of {job.write_s:g} s; use an interval above {max(0, job.write_s - job.stall_s):g} s"
        )
    cycles = cycle_s / job.mtbf_s
    lost = (job.restart_s + job.write_s) / job.mtbf_s
    kept = interval_s / job.mtbf_s * math.exp(-lost - cycles) / -math.expm1(-cycles)
    return (1 - waiting_share(job)) * kept


def simulate(
    job: FailingRun, interval_s: float, failures: int = 2000, runs: int = 20, seed: int = 0
) -> tuple[float, float]:
    """Play runs of so many failures each; return their mean goodput and its standard error. Repairs take
    exponential times. Nothing of the formula is used: nodes fail, are repaired, and checkpoints are kept."""
    dice, shares = random.Random(seed), []
    for _ in range(runs):
        now, kept, repaired_at = 0.0, 0.0, list[float]()
        for _ in range(failures):
            life_s = dice.expovariate(1 / job.mtbf_s)
            now += life_s
            finished = (life_s - job.restart_s - job.write_s) // (interval_s + job.stall_s)
            kept += interval_s * max(0.0, finished)
            repaired_at = [time for time in repaired_at if time > now]
            if job.repair_s:
                repaired_at.append(now + dice.expovariate(1 / job.repair_s))
            if len(repaired_at) > job.spares:
                now = min(repaired_at)
        shares.append(kept / now)
    return mean(shares), stdev(shares) / math.sqrt(runs)
