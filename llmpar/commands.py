"""The two commands that run a training step: their flags are dataclasses, and `demo` calls them too."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from llmpar.config import ModelConfig, preset
from llmpar.notation import parse_mesh
from llmpar.plan import Plan
from llmpar.schedule import timetable


def speaks() -> bool:
    """Whether this process prints and draws: the first of those that work together. (Without looking for devices.)"""
    jax = sys.modules.get("jax")
    return jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0


def say(*words) -> None:
    """Print for people, on stderr."""
    if speaks():
        print(*words, file=sys.stderr, flush=True)


def emit(document: dict, as_json: bool) -> None:
    """Print the document on stdout if it was asked for."""
    if as_json and speaks():
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
        bucket_bytes: a bucket of gradients is closed when it has reached this size.
        microbatches: per step and device; gradients are summed over them. A pipeline wants at least as many as stages.
        remat: recompute nothing, or whole blocks, in the backward pass.
        regather: ZeRO-3: gather weights again in the backward pass, or keep them.
        dtype: of weights and activations while computing; master weights are float32.
        loss_chunks: pieces of the sequence whose logits exist one after the other.
        ffn_chunks: pieces of the sequence that go through a feed-forward one after the other.
        sequence: attention where sp cuts the sequence: pass keys around a ring, exchange positions for heads, or gather.
        dispatch: send tokens to experts in all slots of a buffer, or in the full ones only (not on CPUs).
        grouped: multiply tokens by their experts in a loop over blocks, or by ragged_dot.
        order: how positions are dealt to the ranks of sp.
        attention_block: queries and keys per block of attention; it must divide what a device holds.
        attention_kernel: who computes attention to whole sequences: this package, cuDNN, or plain XLA.
        schedule: order of the pipeline's stages where pp > 1: gpipe, 1f1b, interleaved, zb-h1, zb-v, …
        chunks: pieces of the model per stage, for schedules that let one choose.
        stage_saves: what a stage keeps of a forward pass: its input, to recompute from, or all residuals.
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
    bucket_bytes: int = 4 << 20
    microbatches: int = 1
    remat: Literal["none", "block"] = "none"
    regather: Literal["again", "keep"] = "again"
    dtype: Literal["float32", "bfloat16"] = "float32"
    loss_chunks: int = 1
    ffn_chunks: int = 1
    sequence: Literal["ring", "ulysses", "gather"] = "ring"
    dispatch: Literal["padded", "ragged"] = "padded"
    grouped: Literal["blocks", "ragged_dot"] = "blocks"
    order: Literal["zigzag", "striped", "contiguous"] = "zigzag"
    attention_block: int | None = None
    attention_kernel: Literal["portable", "cudnn", "xla"] = "portable"
    schedule: str = "1f1b"
    chunks: int | None = None
    stage_saves: Literal["input", "residuals"] = "input"

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

        from llmpar import attention, data
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
        stream = data.Stream(corpus, source, order=attention.order(plan.order, self.step.seq_len, plan.mesh.sp))
        say(f"{config.name}: {config.num_params:,} parameters on {plan.mesh} ({plan.mesh.size} devices); {corpus.source}")
        if order := plan.pipeline:
            idle = timetable(order).bubble_fraction
            say(f"{order.name}: {order.num_stages} stages, {order.num_microbatches} microbatches, {idle:.0%} of a step idle")
        options = OptimizerConfig(self.optimizer, self.learning_rate, self.warmup, self.weight_decay, self.clip)
        keep = Checkpoints(self.checkpoints, self.every) if self.checkpoints else None
        columns = [TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
        with Progress(*columns, console=Console(stderr=True), disable=not speaks()) as progress:
            task = progress.add_task("compiling", total=self.steps)

            def show(number, report):
                mfu = f", MFU {report.mfu:.1%}" if report.mfu else ""
                held = f", {report.memory_bytes / 2**30:.2f} GiB" if report.memory_bytes else ""
                words = f"loss {report.losses[-1]:.3f} nats, {report.tokens_per_s:,.0f} tokens/s{mfu}{held}"
                progress.update(task, completed=number + 1, description=words)

            _, report = train(config, plan, make_mesh(plan.mesh), stream, self.steps, options, self.seed, keep, self.log, show)
        if self.plot and speaks():
            from llmpar import draw

            draw.loss_curve(report.losses).save(self.plot)
            say(f"drew the loss into {self.plot}")
        if report.start:
            say(f"resumed from the checkpoint of step {report.start}" + "; nothing was left to do" * (not report.losses))
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
        if self.svg and speaks():
            from llmpar import draw

            draw.collectives(document["collectives"]).save(self.svg)
            say(f"drew the bytes into {self.svg}")
        if not self.json and speaks():
            for table in tables(document):
                rich.print(table)
        emit(document, self.json)
        return document


def cache_compilations() -> None:
    """Keep compiled programs between runs, in the user's cache folder unless JAX was told another."""
    import jax

    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path.home() / ".cache" / "llmpar" / "jax"))
