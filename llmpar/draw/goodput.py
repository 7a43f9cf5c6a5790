"""Goodput against the interval between checkpoints, for jobs of several sizes."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

from llmpar.draw.curves import curves
from llmpar.draw.scene import Scene
from llmpar.predict.goodput import FailingRun, best_interval, goodput


def failures(jobs: Mapping[str, FailingRun], title: str = "What failures leave of a run") -> Scene:
    """Draw the `goodput` of each job over the interval, from 1 minute on and twice as long from tick to tick;
    the dashed curve connects the best intervals."""
    lines, best = list[Any](), dict[float, float]()
    colors = itertools.cycle(f"{axis}-line" for axis in ("dp", "fsdp", "sp", "tp", "ep", "pp"))
    for (name, job), color in zip(jobs.items(), colors, strict=False):
        places = [n / 4 for n in range(4 * 9 + 1) if 60 * 2 ** (n / 4) >= job.write_s]
        shares = {place: goodput(job, 60 * 2**place) for place in places}
        lines.append((name, shares, color, None, False))
        best[max(0.0, math.log2(best_interval(job) / 60))] = goodput(job, best_interval(job))
    lines.append(("best", best, "ink", "o", True))
    axes = [2**i for i in range(10)], "minutes between checkpoints", "goodput"
    return curves(lines, *axes, high=1, percent=True, title=title)
