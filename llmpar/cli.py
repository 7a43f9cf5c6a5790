"""The command line. Flags are the fields of dataclasses; JAX is imported only by commands that need it.

Exit status: 0 done, 1 a refusal or a failure in one sentence, 2 bad usage. With ``--json`` a command prints one JSON
document on stdout and everything else on stderr.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from llmpar.config import PRESETS, ModelConfig, describe, preset
from llmpar.notation import parse_mesh
from llmpar.plan import Plan


def say(*words) -> None:
    """Print for people, on stderr."""
    print(*words, file=sys.stderr, flush=True)


def emit(document: dict, as_json: bool) -> None:
    """Print the document on stdout if it was asked for."""
    if as_json:
        print(json.dumps(document))


@dataclass(frozen=True)
class StepOptions:
    """What one training step is: a model, a mesh, a plan and the size of a batch.

    Attributes:
        model: a preset's name, or the path of a Hugging Face config.json.
        mesh: sizes of the axes, as 'dp=2 fsdp=-1 tp=2' (or 'dp:2,fsdp:-1,tp:2'); one may be -1.
        mesh_dim: the same as numbers dp,fsdp,tp,sp as in LWM, or dp,fsdp,mp as in EasyLM; replaces --mesh.
        devices: CPU devices to simulate where there is no accelerator.
        batch_size: sequences per step, over all devices.
        seq_len: tokens per sequence.
        reading: who writes the collectives: we do (manual) or XLA's partitioner (auto).
        zero: ZeRO stage on the fsdp axis.
        tp_sequence: sequence parallelism: cut the residual stream's sequence by tp.
        reduce: when gradients are summed: at the end, layer by layer, or in buckets.
        accumulate: microbatches per step.
        remat: recompute nothing, or whole blocks, in the backward pass.
        regather: ZeRO-3: gather weights again in the backward pass, or keep them.
        dtype: of weights and activations while computing; master weights are float32.
        loss_chunks: pieces of the sequence whose logits exist one after the other.
    """

    model: str = "tiny"
    mesh: str = "dp=-1"
    mesh_dim: str | None = None
    devices: int = 8
    batch_size: int = 16
    seq_len: int = 128
    reading: Literal["manual", "auto"] = "manual"
    zero: Literal[0, 1, 2, 3] = 3
    tp_sequence: bool = False
    reduce: Literal["end", "layer", "bucket"] = "end"
    accumulate: int = 1
    remat: Literal["none", "block"] = "none"
    regather: Literal["again", "keep"] = "again"
    dtype: Literal["float32", "bfloat16"] = "float32"
    loss_chunks: int = 1

    def resolve(self) -> tuple[ModelConfig, Plan]:
        """The model and the plan, on the devices that are there (or are simulated now). Refuses before compiling."""
        from llmpar.mesh import use_devices

        config = preset(self.model)
        devices = use_devices(self.devices)
        mesh = parse_mesh(self.mesh_dim or self.mesh, len(devices))
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(Plan) if hasattr(self, f.name)}
        plan = Plan(**fields | {"mesh": mesh})
        plan.check(config, self.batch_size, self.seq_len)
        return config, plan


@dataclass(frozen=True)
class Train:
    """Train on text: by default the running Python's own library sources, so it works offline.

    Attributes:
        optimizer: Muon takes the matrices and leaves the rest to Adam.
        learning_rate: the highest, after warm-up; it falls along a cosine to a tenth.
        warmup: steps of linear warm-up.
        weight_decay: of matrices.
        clip: largest global norm of the gradient.
        steps: train to this step.
        data: files or globs of text or JSONL.
        tokenizer: 'bytes', or the path of a Hugging Face tokenizer.json.
        seed: of weights and of the order of data.
        log: append a JSON line per step to this file.
        plot: draw the loss into this PNG or SVG.
        checkpoints: folder to save to and to resume from.
        every: steps between checkpoints.
        json: print one JSON document on stdout.
    """

    step: Annotated[StepOptions, tyro.conf.arg(name="")] = StepOptions()
    optimizer: Literal["adamw", "adafactor", "muon", "sgd"] = "adamw"
    learning_rate: float = 3e-3
    warmup: int = 10
    weight_decay: float = 0.1
    clip: float = 1.0
    steps: int = 50
    data: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    seed: int = 0
    log: str | None = None
    plot: str | None = None
    checkpoints: str | None = None
    every: int = 100
    json: bool = False

    def run(self) -> dict:
        """Train, showing progress, and describe the run."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from llmpar import data
        from llmpar.checkpoint import Checkpoints
        from llmpar.mesh import make_mesh
        from llmpar.train import OptimizerConfig, train

        cache_compilations()
        config, plan = self.step.resolve()
        source = data.DataConfig(
            data=self.data, tokenizer=self.tokenizer, seq_len=self.step.seq_len, batch_size=self.step.batch_size, seed=self.seed
        )
        tokenizer = data.open_tokenizer(self.tokenizer)
        data.check_vocab(tokenizer, config.vocab_size)
        corpus = data.read_corpus(source, tokenizer)
        stream = data.Stream(corpus, source)
        say(f"{config.name}: {config.num_params:,} parameters on {plan.mesh} ({plan.mesh.size} devices); {corpus.source}")
        options = OptimizerConfig(self.optimizer, self.learning_rate, self.warmup, self.weight_decay, self.clip)
        keep = Checkpoints(self.checkpoints, self.every) if self.checkpoints else None
        columns = [TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("compiling", total=self.steps)

            def show(number, report):
                mfu = f", MFU {report.mfu:.1%}" if report.mfu else ""
                words = f"loss {report.losses[-1]:.3f} nats, {report.tokens_per_s:,.0f} tokens/s{mfu}"
                progress.update(task, completed=number + 1, description=words)

            _, report = train(config, plan, make_mesh(plan.mesh), stream, self.steps, options, self.seed, keep, self.log, show)
        if self.plot:
            from llmpar import draw

            draw.loss_curve(report.losses).save(self.plot)
            say(f"drew the loss into {self.plot}")
        if report.losses:
            say(f"loss {report.losses[0]:.4f} -> {report.losses[-1]:.4f} nats per token in {len(report.losses)} steps")
        document = {
            "model": config.name, "mesh": plan.mesh.sizes, "losses": report.losses, "grad_norms": report.grad_norms,
            "tokens_per_s": report.tokens_per_s, "step_s": report.step_s, "params": config.num_params,
            "devices": plan.mesh.size, "start": report.start, "mfu": report.mfu, "peak_memory_bytes": report.memory_bytes,
        }  # fmt: skip
        emit(document, self.json)
        return document


@dataclass(frozen=True)
class Inspect:
    """Compile one training step and show predicted beside compiled: bytes and collectives per axis, memory, FLOPs.

    Attributes:
        svg: also draw the bytes into this SVG (or PNG).
        json: print one JSON document on stdout.
    """

    step: Annotated[StepOptions, tyro.conf.arg(name="")] = StepOptions()
    svg: str | None = None
    json: bool = False

    def run(self) -> dict:
        """Inspect, and print tables unless JSON was asked for."""
        import rich

        from llmpar.inspection import inspect, tables

        cache_compilations()
        config, plan = self.step.resolve()
        document = inspect(config, plan, self.step.batch_size, self.step.seq_len)
        if self.svg:
            from llmpar import draw

            draw.collectives(document["collectives"]).save(self.svg)
            say(f"drew the bytes into {self.svg}")
        if not self.json:
            for table in tables(document):
                rich.print(table)
        emit(document, self.json)
        return document


@dataclass(frozen=True)
class Demo:
    """The main job: train on 8 devices under three kinds of parallelism, read the compiled program, draw, check.

    Attributes:
        out: folder for pictures and the log.
        steps: to train, on the mesh and again on one device.
        json: print one JSON document on stdout.
    """

    out: str = "demo"
    steps: int = 60
    json: bool = False

    def run(self) -> None:
        """Run it."""
        from llmpar.demo import demonstrate

        emit(demonstrate(self.out, self.steps), self.json)


@dataclass(frozen=True)
class Models:
    """List the presets, or describe one model, with exact numbers of parameters.

    Attributes:
        name: a preset's name or the path of a config.json; all presets where it is left out.
        json: print one JSON document on stdout.
    """

    name: Annotated[str | None, tyro.conf.Positional] = None
    json: bool = False

    def run(self) -> None:
        """Print the models."""
        models = [describe(preset(self.name))] if self.name else [describe(c) for c in PRESETS.values()]
        emit({"models": models}, self.json)
        for m in [] if self.json else models:
            print(f"{m['name']:<16}{m['params']:>18,} parameters{m['num_layers']:>5} layers{m['width']:>7} wide")


@dataclass(frozen=True)
class Schedule:
    """Print a pipeline schedule: its timetable, bubble by every definition, makespan, live activations per stage.

    Attributes:
        name: gpipe, 1f1b, interleaved, zb-h1, …; a wrong name lists all.
        stages: pipeline stages p.
        microbatches: m.
        chunks: model chunks per stage, for schedules that have several.
        costs: times of forward, input-gradient and weight-gradient work: F,B,W.
        hop: latency of a send between stages, in the same unit.
        svg: also draw the timetable into this SVG (or PNG).
        json: print one JSON document on stdout.
    """

    name: Annotated[str, tyro.conf.Positional] = "1f1b"
    stages: int = 4
    microbatches: int = 8
    chunks: int | None = None
    costs: str = "1,1,1"
    hop: float = 0.0
    svg: str | None = None
    json: bool = False

    def run(self) -> None:
        """Simulate and print."""
        from llmpar import draw, orders, schedule

        try:
            f, b, w = (float(x) for x in self.costs.split(","))
        except ValueError as error:
            raise ValueError(f"--costs '{self.costs}' is not three numbers F,B,W such as 1,1,1") from error
        made = orders.make(self.name, self.stages, self.microbatches, self.chunks)
        document = schedule.schedule_document(made, (f, b, w), self.hop)
        table = schedule.timetable(made, (f, b, w), self.hop)
        if self.svg:
            draw.timetable(table).save(self.svg)
            say(f"drew the timetable into {self.svg}")
        emit(document, self.json)
        if not self.json:
            print(schedule.text_timeline(table))
            for key in ("makespan", "makespan_lockstep", "bubble_over_ideal", "bubble_fraction", "bubble_rate", "peak_live"):
                print(f"{key:<20}{document[key]}")


@dataclass(frozen=True)
class Doctor:
    """Check the environment: versions, devices, what is missing and how to get it.

    Attributes:
        json: print one JSON document on stdout.
    """

    json: bool = False

    def run(self) -> None:
        """Look, and print."""
        from llmpar.doctor import examine

        document = examine()
        emit(document, self.json)
        for line in [] if self.json else document["lines"]:
            print(line)


@dataclass(frozen=True)
class Lab:
    """Open JupyterLab on the notebooks, with simulated devices unless an accelerator is found.

    Attributes:
        folder: where the notebooks are.
        port: to serve on; loopback only.
        browser: open one.
    """

    folder: str = "notebooks"
    port: int = 8888
    browser: bool = True

    def run(self) -> None:
        """Start JupyterLab and wait until it ends."""
        if not pathlib.Path(self.folder).is_dir():
            raise ValueError(f"there is no folder '{self.folder}' here; run this from the project's root, or give --folder")
        command = [sys.executable, "-m", "jupyter", "lab", self.folder, f"--port={self.port}", "--ip=127.0.0.1"]
        subprocess.run(command + ([] if self.browser else ["--no-browser"]), check=True)


def cache_compilations() -> None:
    """Keep compiled programs between runs, in the user's cache folder unless JAX was told another."""
    import jax

    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path.home() / ".cache" / "llmpar" / "jax"))


COMMANDS = {
    "doctor": Doctor, "lab": Lab, "train": Train, "inspect": Inspect, "models": Models, "schedule": Schedule, "demo": Demo,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run one command and give its exit status."""
    try:
        command = tyro.extras.subcommand_cli_from_dict(COMMANDS, args=argv, prog="llmpar", description=__doc__)  # type: ignore[arg-type]
        command.run()  # type: ignore[attr-defined]
    except (ValueError, FloatingPointError, OSError, subprocess.CalledProcessError) as error:
        say(f"llmpar: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
