"""``llmpar launch``: run a command in several processes here, or write the job file that an engine takes."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from llmpar import files
from llmpar.cli.options import (
    MAX_TOKENS,
    File,
    Folder,
    Number,
    OptionalText,
    changed,
    check_free,
    check_range,
    inform,
)
from llmpar.launch import jobs, local
from llmpar.launch.wire import Wire
from llmpar.plan import config_json as hugging_face
from llmpar.plan.presets import PRESETS, folder_of, preset
from llmpar.predict import hardware, serving


@dataclass(frozen=True)
class Launch:
    """Run a command of llmpar in several processes: here, or by the engine of a cluster.

    llmpar launch local --processes 4 --devices 2 -- train --mesh "fsdp=8" --checkpoints kept
    llmpar launch slurm --nodes 2 --site site.toml -- train --mesh "dp=2 fsdp=8" --checkpoints kept
    llmpar launch slurm --nodes 2 --serve vllm --weights EXPORT

    What follows -- is the command. For a cluster the job file is printed; --submit hands it over. A job file
    starts a command with --checkpoints again after a failure. After local run the same line again to resume.

    Attributes:
        engine: what starts the processes; local is this machine.
        nodes: nodes of the cluster.
        min_nodes: torchrun goes on with so few when others are lost.
        site: a TOML file about the cluster: partition, account, gpus_per_node, modules, interface, container
            …
        gpus_per_node: replaces the site's; 8 where there is no site file.
        processes: local: how many.
        devices: local: CPU devices that each of them simulates.
        wire: local: each process is a host, and a wire of this rate, such as 100mbit, joins them (Linux, as
            root or where user namespaces are allowed).
        out: write the file there; with --submit, by default, llmpar-job in this folder.
        submit: hand the job over.
        serve: an inference engine to start in place of a command, on slurm or ray.
        weights: what it serves: a folder that 'llmpar export' wrote, or a preset's name to see the sizes.
        chip: its GPUs: a chip's name, or the path of a TOML file with your own figures (h100).
        cache_tokens: keys and values of so many tokens must fit beside the weights; one whole context.
    """

    engine: Annotated[
        Literal["local", "slurm", "mpi", "jobset", "ray", "torchrun"], tyro.conf.Positional
    ]
    nodes: Annotated[int, files.Allowed(int, 1, 65_536)] = 1
    min_nodes: Number = None
    site: File = None
    gpus_per_node: Annotated[Number, files.Allowed(int, 0)] = None
    processes: Annotated[int, files.Allowed(int, 2, 64)] = 2
    devices: Annotated[int, files.Allowed(int, 1, 1024)] = 4
    wire: Annotated[OptionalText, tyro.conf.arg(metavar="RATE")] = None
    out: File = None
    submit: bool = False
    serve: Literal["vllm", None] = None
    weights: Folder = None
    chip: OptionalText = None
    cache_tokens: Annotated[Number, files.Allowed(int, 1, MAX_TOKENS)] = None
    words: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    command: Annotated[Any, tyro.conf.Suppress] = None

    def run(self) -> None:
        if not self.words and not self.serve:
            raise ValueError(
                "no command follows; write 'llmpar launch local -- train --mesh dp=-1'"
            )
        if self.words and self.words[0] not in LAUNCHABLE:
            raise ValueError(
                f"'{self.words[0]}' runs in one process; launch {' or '.join(LAUNCHABLE)}"
            )
        self.check_options()
        if self.engine == "local":
            raise SystemExit(self.run_here())
        site = jobs.read_site(self.site) if self.site else jobs.Site()
        if self.gpus_per_node is not None:
            site = replace(site, gpus_per_node=self.gpus_per_node)
        engine: str = self.engine
        if self.serve:
            engine, job = f"{engine} {self.serve}", self.server(site)
        else:
            job = jobs.Job(self.words, self.nodes, site, min_nodes=self.min_nodes)
            self.check_command(job.num_devices)
            self.check_fewer(job)
        if not jobs.keeps(job.words) and job.words[0] == "train":
            inform(
                "llmpar: no --checkpoints: nothing is kept, and a failed job is not started again"
            )
        text = jobs.job_file(engine, job)
        path = self.out or (jobs.default_path(engine) if self.submit else None)
        if path is None:
            print(text, end="")
            return
        check_free(path, jobs.MARK.encode())
        Path(path).write_text(text)
        line = jobs.submit_line(engine, path)
        inform(f"wrote {path}; {'runs' if self.submit else 'submit it'}: {' '.join(line)}")
        if not self.submit:
            return
        try:
            raise SystemExit(subprocess.run(line, check=False).returncode)
        except FileNotFoundError as error:
            raise ValueError(
                f"'{line[0]}' is not installed here; submit {path} where it is"
            ) from error

    def check_options(self) -> None:
        """Refuse options that this engine does not read."""
        for_local = ("processes", "devices", "wire")
        for_cluster = ("nodes", "site", "out", "submit", "min_nodes", "gpus_per_node")
        unread = {"local": for_cluster, "torchrun": for_local}.get(
            self.engine, (*for_local, "min_nodes")
        )
        if given := changed(self, unread):
            raise ValueError(
                f"'launch {self.engine}' does not read {', '.join(given)}; leave it out"
            )
        if not self.serve and (given := changed(self, ("weights", "chip", "cache_tokens"))):
            raise ValueError(
                f"{', '.join(given)} is for a server; add --serve vllm, or leave it out"
            )
        if self.serve and (self.words or not self.weights or self.engine not in ("slurm", "ray")):
            raise ValueError(
                "--serve vllm is for slurm and ray, with --weights and no command, not 'launch"
                f" {self.engine}' with {' '.join(self.words) or 'no command'}"
            )

    def server(self, site: jobs.Site) -> jobs.Job:
        """Return the job of an inference engine for the weights, on as many nodes and GPUs as they need."""
        weights = self.weights or ""
        chip = hardware.chip(self.chip or "h100")
        if chip.link == "torus" or chip.simulated:
            raise ValueError(
                f"'{chip.name}' is no GPU, and vllm is started on GPUs; give --chip h100"
            )
        weights = os.path.abspath(weights) if os.path.exists(weights) else weights
        folder = folder_of(weights)
        dtype, quantized, stored = "bfloat16", "", None
        if os.path.exists(folder):
            dtype, quantized, stored = stored_as(folder)
        elif weights in PRESETS:
            inform(
                f"llmpar: '{weights}' is a preset: in the file, put the folder of an export in its place"
            )
        config = preset(weights)
        if dtype not in _BITS:
            raise ValueError(f"'{weights}' is in {dtype}; export it in {', '.join(_BITS)}")
        check_range("gpus-per-node", site.gpus_per_node, 1, 1024)
        bits, context = _BITS[dtype], config.context_length or 8192
        least = LEAST_BITS if quantized else 0.9 * bits
        if stored is not None and 8 * stored < least * config.num_params:
            raise ValueError(
                f"the weights in '{folder}' are {stored:,} bytes, too few for {config.num_params:,}"
                f" parameters in {quantized or dtype}; fetch the files that are missing"
            )
        weight_bits = 8 * (stored or 0) / config.num_params if quantized else bits
        numbers = f"{quantized} (says {hugging_face.QUANTIZED})" if quantized else dtype
        tokens = context if self.cache_tokens is None else self.cache_tokens
        tp, pp, most = serving.cut(
            config, chip, self.nodes, site.gpus_per_node, tokens, weight_bits, bits
        )
        seen = min(context, tokens)
        token_ms = 1e3 * sum(
            serving.decode_seconds(config, chip, 1, seen, tp, weight_bits, bits).values()
        )
        inform(
            f"'{config.name}', {config.num_params * weight_bits / 8e9:,.1f} GB in {numbers}, on"
            f" {tp * pp} {chip.name} of {pp} nodes (tensor parallel {tp}, pipeline parallel {pp})"
            f" leaves room for keys and values of {most:,} tokens, {tokens:,} are asked for; a"
            f" token after {seen:,} takes {token_ms:.2g} ms"
        )
        sizes = f"--tensor-parallel-size {tp} --pipeline-parallel-size {pp}".split()
        sizes += [] if quantized else ["--dtype", dtype]
        sizes += ["--max-model-len", str(seen)] if config.context_length else []
        sizes += ["--distributed-executor-backend", "ray"] if pp > 1 or self.engine == "ray" else []
        words = ("serve", weights, "--served-model-name", config.name, *sizes)
        return jobs.Job(words, pp, replace(site, gpus_per_node=tp))

    def run_here(self) -> int:
        """Run the command in processes of this machine, and return the exit status."""
        self.check_command(self.processes * self.devices)
        command = [sys.executable, "-m", "llmpar", *self.words]
        if self.wire is None:
            return local.run_locally(command, self.processes, self.devices)
        with Wire(self.processes, self.wire) as wire:
            status = local.run_locally(command, self.processes, self.devices, wire)
            sent = ", ".join(f"{wire.sent_bytes(host):,} B" for host in range(self.processes))
            inform(
                f"llmpar: the hosts sent {sent} over the wire of {self.wire}, all connections and steps"
            )
        return status

    def check_fewer(self, job: jobs.Job) -> None:
        """Refuse a command that cannot run on fewer nodes, if torchrun may go on with fewer."""
        for nodes in range(max(1, self.min_nodes or self.nodes), self.nodes):
            try:
                self.check_command(replace(job, nodes=nodes).num_devices)
            except ValueError as error:
                raise ValueError(f"with {nodes} of {self.nodes} nodes: {error}") from error

    def check_command(self, num_devices: int) -> None:
        """Refuse a command that cannot run on that many devices, before it waits in a queue."""
        command = getattr(self.command, "step", self.command)
        if hasattr(command, "settle"):
            command.settle(num_devices)


def stored_as(folder: str) -> tuple[str, str, int]:
    """Return a model folder's dtype, the name of its quantization ('' without), and the bytes of its
    weights."""
    if not list(Path(folder).glob("*.safetensors")):
        raise ValueError(
            f"'{folder}' has no *.safetensors; give a folder that 'llmpar export' wrote"
        )
    card = files.read_json(Path(folder, "config.json"), "model configuration")
    dtype = str(card.get("dtype") or card.get("torch_dtype") or "bfloat16")
    return dtype, hugging_face.quantization(folder), hugging_face.stored_bytes(folder)


LAUNCHABLE = ("train", "rl", "generate", "doctor")
"""Commands that several processes can run together."""
_BITS = {"bfloat16": 16, "float16": 16, "float32": 32}
LEAST_BITS = 2
"""Fewer than any quantization of weights leaves them."""
