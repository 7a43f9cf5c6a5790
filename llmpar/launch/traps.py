"""Traps of clusters that can be seen before the processes meet: one sentence for each, without starting
JAX."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from llmpar.launch.engines import Place, is_loopback
from llmpar.launch.joined import (
    HEARTBEAT_S,
    WAIT_S,
    asked_ids,
    beyond,
    gpu_files,
    gpus_on_node,
    proxies,
    renumbered,
    resolved,
    visible_gpus,
)

TIMEOUTS = {"NCCL_IB_TIMEOUT"}
"""Variables that look like those below, and that somebody reads."""
_UNREAD = re.compile(r"(JAX|LLMPAR|NCCL|GLOO|TORCH)_\w*(TIMEOUT|HEARTBEAT)\w*")


def traps(
    environ: Mapping[str, str],
    place: Place,
    num_gpus: int | None = None,
    own_addresses: list[str] | None = None,
) -> list[str]:
    """What would go wrong here, or would without this package.

    ``num_gpus`` (device files of the machine) and ``own_addresses`` (what the host's name resolves to) are
    looked up where they are left out.
    """
    files = gpu_files() if num_gpus is None else num_gpus
    addresses = resolved(socket.gethostname()) if own_addresses is None else own_addresses
    found = [*_gpus(environ, place, files), *_network(environ, place, addresses), *_unread(environ)]
    if place.note:
        found.append(place.note)
    if place.num_processes > 1 and place.engine.startswith(("Open MPI 5", "MPICH", "Cray MPICH")):
        found.append(
            f"JAX does not detect {place.engine} by itself, and each of {place.num_processes} processes would"
            " be alone; llmpar passes on what it told"
        )
    if place.joined_by == "engine":
        found.append(
            f"{place.engine} joins the processes: a dead one is noticed after JAX's usual 100 s, not"
            f" {HEARTBEAT_S}, unless the job file says otherwise"
        )
    return found


def _gpus(environ: Mapping[str, str], place: Place, files: int):
    """GPUs that a task does not see, sees under other numbers, or sees beside others that it leaves idle."""
    seen, here = visible_gpus(environ, files), place.num_local
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None and files and not seen:
        yield (
            f"CUDA_VISIBLE_DEVICES is '{shown}', so JAX sees none of the {files} GPUs here and would take"
            " CPUs: an engine sets it where a task asks for none; ask for GPUs, or unset it"
        )
    on_node = gpus_on_node(environ)
    if seen and here > 1 and renumbered(environ, place, seen):
        yield (
            f"each of {here} tasks on this node sees {seen} GPU{'s' * (seen > 1)}, numbered from 0 again: JAX"
            f" would ask for number {place.local_id}; llmpar takes what the task sees"
        )
    elif seen > 1 and here == 1 and place.num_processes > 1:
        yield (
            f"one task on this node sees {seen} GPUs, of which JAX would take one under SLURM or Open MPI;"
            " llmpar takes all"
        )
    if here == 1 and on_node > seen > 0:
        yield (
            f"this node's only task sees {seen} of {on_node} GPUs of the job; ask for --gpus-per-node instead"
            " of --gpus-per-task, or for more tasks"
        )
    if why := beyond(asked_ids(environ), seen):
        yield why


def _network(environ: Mapping[str, str], place: Place, addresses: list[str]):
    """Names that lead nowhere, and proxies."""
    if not addresses or addresses[0].startswith("127.0.1."):
        yield (
            f"this host's name resolves to {addresses[0] if addresses else 'nothing'}: other hosts could not"
            " reach it; mend /etc/hosts first"
        )
    named = proxies(environ)
    if named and place.num_processes > 1:
        yield (
            f"{', '.join(named)} would stand between the processes: llmpar adds the coordinator to no_proxy;"
            " add the hosts of the job to it for other programs"
        )
    if place.coordinator and is_loopback(place.coordinator) and place.num_local and not place.is_one_host:
        yield (
            f"the coordinator is {place.coordinator}, which each host takes for itself, but"
            f" {place.num_processes - place.num_local} processes are on others; set JAX_COORDINATOR_ADDRESS"
        )


def _unread(environ: Mapping[str, str]):
    """Settings of time that change nothing."""
    for name in sorted(environ):
        if _UNREAD.fullmatch(name) and name not in TIMEOUTS:
            yield (
                f"{name} is set, and neither JAX nor llmpar reads it: processes wait {WAIT_S} s for one"
                f" another, and count as dead after {HEARTBEAT_S} s (llmpar.launch.joined.initialize takes"
                " others)"
            )


def describe(place: Place) -> str:
    """Who started this process, in a line."""
    if place.joined_by == "engine":
        return f"started by {place.engine}, which joins its workers"
    if place.num_processes == 1:
        return "one process: no engine started several" + f" ({place.engine})" * (place.engine != "none")
    at = f", coordinator {place.coordinator}" if place.coordinator else ""
    here = f", {place.num_local} on this host" if place.num_local else ""
    return f"process {place.process_id} of {place.num_processes} ({place.engine}){here}{at}"
