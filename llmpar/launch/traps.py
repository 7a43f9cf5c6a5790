"""Warn of mistakes on clusters that can be seen before the processes join, and that `joined` neither mends
nor refuses: one sentence for each, without starting JAX."""

import re
from collections.abc import Mapping

from llmpar.launch.engines import Place, is_loopback
from llmpar.launch.joined import HEARTBEAT_S, WAIT_S, gpus

_UNREAD = re.compile(r"(?!NCCL_IB_TIMEOUT$)(JAX|LLMPAR|NCCL|GLOO|TORCH)_\w*(TIMEOUT|HEARTBEAT)\w*")
"""Variables of time that have no effect; NCCL_IB_TIMEOUT looks like them, but NCCL reads it."""


def traps(environ: Mapping[str, str], place: Place, num_gpus: int | None = None) -> list[str]:
    """List what would go wrong in this process. ``num_gpus``: device files of the machine, counted by
    default."""
    files, seen, on_node = gpus(environ, num_gpus)
    num_local = place.num_local
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    unread = sorted(filter(_UNREAD.fullmatch, environ))
    rows = [
        (
            shown is not None and files and not seen,
            f"CUDA_VISIBLE_DEVICES is '{shown}', so JAX sees none of the {files} GPUs here and would"
            " take CPUs: an engine sets it where a task asks for none; ask for GPUs, or unset it",
        ),
        (
            num_local == 1 and on_node > seen > 0,
            f"this node's only task sees {seen} of {on_node} GPUs of the job; ask for --gpus-per-node"
            " instead of --gpus-per-task, or for more tasks",
        ),
        (
            0 < num_local < place.num_processes and is_loopback(place.coordinator or ""),
            f"the coordinator is {place.coordinator}, which each host takes for itself, but"
            f" {place.num_processes - num_local} processes are on others; set JAX_COORDINATOR_ADDRESS",
        ),
        (
            unread,
            f"{', '.join(unread)}: neither JAX nor llmpar reads this; processes wait {WAIT_S} s for one"
            f" another, and count as dead after {HEARTBEAT_S} s (llmpar.launch.joined.initialize has others)",
        ),
        (
            place.joined_by == "engine",
            f"{place.engine} joins the processes: a dead one is noticed after JAX's usual 100 s, not"
            f" {HEARTBEAT_S}, unless the job file says otherwise",
        ),
    ]
    return [sentence for is_so, sentence in rows if is_so]


def describe(place: Place) -> str:
    """Describe what started this process, in a line."""
    if place.joined_by == "engine":
        return f"started by {place.engine}, which joins its workers"
    if place.num_processes == 1:
        return "one process: no engine started several" + f" ({place.engine})" * (
            place.engine != "none"
        )
    at = f", coordinator {place.coordinator}" if place.coordinator else ""
    on_host = f", {place.num_local} on this host" if place.num_local else ""
    return f"process {place.process_id} of {place.num_processes} ({place.engine}){on_host}{at}"
