"""Writes engines.md: how long engines take to start and to go on, from the runs that engines.json keeps.

LLMPAR_ENGINES=FOLDER python -m pytest tests/test_real_engines.py -m engines -n0 --record-engines
python tests/engines_table.py
"""

import json
from pathlib import Path

HERE = Path(__file__).parent
FILE, TABLE = HERE / "engines.json", HERE / "engines.md"
HEAD = """# Engines: when the first step is done, and when a run goes on

Made by `make engines` from runs of `tests/test_real_engines.py`, each with the file that
`llmpar launch` wrote and the same command: `train --mesh fsdp=-1`, four processes of one CPU device. All
gave the weights of a run under `llmpar launch local` that nothing interrupted: the same bits, or within 1e-5
where torchrun had fewer processes for a while. Hosts are network namespaces of one machine.

Seconds are wall clock on a busy machine of two cores: read them as upper bounds, and compare them with care.
The load is the mean number of processes that wanted a core at the end of the test. Four processes compile the
step in this time, or read it from JAX's cache.

| engine | version | to the first step, s | goes on after, s | load | date |
|---|---|---|---|---|---|
"""
MEANS = {"again_s": "", "less_s": " with one host", "more_s": " with two hosts again"}
NOTES = """
**What goes on, and when the clock starts.** SLURM, four nodes: a task is killed, and the script's next
attempt runs in the same job. Requeued: the job is asked to stop (SIGTERM, as before the time limit), saves
and waits in the queue. A node lost: SLURM's own requeue, from the power cut on; the node comes back as soon
as the job is in the queue, and `SlurmdTimeout` is 10 s here (300 s by default). A requeued job is eligible
after `cred_expire`, 5 s here and 120 s by default. torchrun: from the second host's power cut, and from its
return. Ray: from a worker's end; the cluster itself takes {cluster_s} s to start, and on SLURM the pauses
of the script, 40 s, count as well.

**Machine.** {machine}.
"""


def table(rows: dict) -> str:
    """The document, from what was recorded of each engine."""
    lines = []
    for name, row in rows.items():
        again = "; ".join(f"{row[key]}{words}" for key, words in MEANS.items() if key in row)
        start, load = row.get("start_s", ""), row["load"]
        lines.append(f"| {name} | {row['version']} | {start} | {again} | {load} | {row['date']} |")
    cluster_s = next((row["cluster_s"] for row in rows.values() if "cluster_s" in row), "some")
    machines = "; ".join(dict.fromkeys(row["machine"] for row in rows.values()))
    return HEAD + "\n".join(lines) + "\n" + NOTES.format(cluster_s=cluster_s, machine=machines)


if __name__ == "__main__":
    TABLE.write_text(table(json.loads(FILE.read_text())))
