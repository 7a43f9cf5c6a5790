"""Record the run of lesson 17: training steps of one model on two hosts, placed in several ways on wires of
several rates.

    python notebooks/record_hosts.py    writes llmpar/lessons/two_hosts.json (Linux, as root; ten minutes)

The hosts are made by `llmpar.launch.wire`. Bytes are the kernel's, and the same wherever this is run; seconds
are those of the machine at hand.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import tempfile

import jax

from llmpar.lessons import hosts

RATES = ("10gbit", "1gbit", "200mbit", "100mbit", "20mbit")
"""The first is faster than processors fill it: what a step takes there is the step without a wire."""
STEPS = 3


def main() -> int:
    """Measure every placement at every rate, and write it down; 1 with a sentence where that cannot be."""
    runs = []
    programs = tempfile.mkdtemp()  # each is compiled once
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": programs, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    try:
        for rate in RATES:
            with hosts.start(rate) as team:
                for name in hosts.HOST_PLANS:
                    found = team.run(hosts.measure, name, STEPS)
                    slowest = [
                        max(seconds) for seconds in zip(*(one["seconds"] for one in found), strict=True)
                    ]
                    run = {"placement": name, "rate": rate, "step_s": round(min(slowest), 4)}
                    run |= {"sent": [round(one["sent"]) for one in found], "losses": found[0]["losses"]}
                    runs.append(run)
                    print(rate, name, run["step_s"], run["sent"], hosts.leaving(name), flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    document = {
        "made_by": "python notebooks/record_hosts.py",
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, Linux {platform.release().split('-')[0]}",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "hosts": 2,
        "devices_per_host": 2,
        "model": hosts.TOY.name,
        "params": hosts.TOY.num_params,
        "rows": hosts.ROWS,
        "positions": hosts.SEQ,
        "runs": runs,
    }
    hosts.RECORDED.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {hosts.RECORDED.name}: {len(runs)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
