"""The commands: each is a dataclass, its fields are its flags, and `run` does it. JAX is imported by those
that need it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from llmpar.config import ModelConfig, OptimizerConfig, OptimizerOptions, preset
from llmpar.notation import parse_mesh
from llmpar.plan import Plan
from llmpar.timetable import timetable

LINE_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""
MAX_SEED, MAX_SEQ_LEN, MAX_TOKENS = 2**32 - 1, 2**31 - 1, 2**40
"""JAX makes keys of 32 bits; positions are int32; sizes of arrays are counted in 64 bits."""
PICTURES = (".svg", ".png")

Words = Annotated[str | None, tyro.conf.arg(metavar="STR")]
File = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
Number = Annotated[int | None, tyro.conf.arg(metavar="INT")]


def speaks() -> bool:
    """Whether this process prints and draws: the first of those that work together. (Without looking for
    devices.)"""
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
class GradientOptions:
    """Gradients: when they are summed.

    Attributes:
        zero: ZeRO stage on the fsdp axis.
        microbatches: per step and device; gradients are summed over them. A pipeline is filled by them.
        reduce: when gradients are summed: at the end, layer by layer, or in buckets.
        bucket_bytes: a bucket of gradients is closed when it has reached this size.
    """

    zero: Literal[0, 1, 2, 3] = 3
    microbatches: int = 1
    reduce: Literal["end", "layer", "bucket"] = "end"
    bucket_bytes: int = 4 << 20


@dataclass(frozen=True)
class MemoryOptions:
    """Memory: what is computed, gathered or held again instead of kept.

    Attributes:
        remat: recompute nothing, or whole blocks, in the backward pass.
        reshard_after_forward: ZeRO-3: let gathered weights go, and gather them again in the backward pass.
        loss_chunks: pieces of the sequence whose logits exist one after the other.
        ffn_chunks: pieces of the sequence that go through a feed-forward one after the other.
    """

    remat: Literal["none", "block"] = "none"
    reshard_after_forward: bool = True
    loss_chunks: int = 1
    ffn_chunks: int = 1


@dataclass(frozen=True)
class SequenceOptions:
    """Long sequences: attention where sp cuts positions.

    Attributes:
        tp_sequence: sequence parallelism: cut the residual stream's sequence by tp.
        context_parallel: pass keys around a ring, exchange positions for heads, or gather all keys.
        sequence_order: how positions are dealt to the ranks of sp.
        attention_block: queries and keys per block of attention; it must divide what a device holds.
        attention_kernel: who computes attention to whole sequences: this package, cuDNN, or plain XLA.
    """

    tp_sequence: bool = False
    context_parallel: Literal["ring", "ulysses", "gather"] = "ring"
    sequence_order: Literal["zigzag", "striped", "contiguous"] = "zigzag"
    attention_block: Number = None
    attention_kernel: Literal["portable", "cudnn", "xla"] = "portable"


@dataclass(frozen=True)
class ExpertOptions:
    """Experts: how tokens reach them.

    Attributes:
        dispatch: send tokens to experts in all slots of a buffer, or in the full ones only (not on CPUs).
        grouped: multiply tokens by their experts in a loop over blocks, or by ragged_dot.
    """

    dispatch: Literal["padded", "ragged"] = "padded"
    grouped: Literal["blocks", "ragged_dot"] = "blocks"


@dataclass(frozen=True)
class PipelineOptions:
    """Pipelines: the order of the stages where pp > 1.

    Attributes:
        schedule: gpipe, 1f1b, interleaved, zb-h1, zb-v, …, or an order written out.
        virtual_stages: pieces of the model per stage, for schedules that let one choose.
        stage_saves: what a stage keeps of a forward pass: its input, to recompute from, or all residuals.
    """

    schedule: str = "1f1b"
    virtual_stages: Number = None
    stage_saves: Literal["input", "residuals"] = "input"


@dataclass(frozen=True)
class StepOptions:
    """What one training step is: a model, a batch and a mesh.

    Attributes:
        model: a preset's name, or the path of a Hugging Face config.json.
        batch_size: sequences per step, over all devices.
        seq_len: tokens per sequence.
        mesh: sizes of the axes, as 'dp=2 fsdp=-1 tp=2' (or 'dp:2,fsdp:-1,tp:2'); one may be -1.
        mesh_dim: the same as numbers dp,fsdp,tp,sp as in LWM, or dp,fsdp,mp as in EasyLM; replaces --mesh.
        devices: CPU devices to simulate where there is no accelerator.
        reading: who writes the collectives: we do (manual) or XLA's partitioner (auto).
        dtype: of weights and activations while computing; master weights are float32.
    """

    model: str = "tiny"
    batch_size: int = 16
    seq_len: int = 128
    mesh: str = "dp=-1"
    mesh_dim: Words = None
    devices: int = 8
    reading: Literal["manual", "auto"] = "manual"
    dtype: Literal["float32", "bfloat16"] = "float32"
    gradients: GradientOptions = GradientOptions()
    memory: MemoryOptions = MemoryOptions()
    sequences: SequenceOptions = SequenceOptions()
    experts: ExpertOptions = ExpertOptions()
    pipeline: PipelineOptions = PipelineOptions()

    def resolve(self) -> tuple[ModelConfig, Plan]:
        """The model and the plan, on the devices that are there (or are simulated now). Refuses before
        compiling."""
        from llmpar.mesh import use_devices

        config = preset(self.model)
        devices = use_devices(self.devices)
        mesh = parse_mesh(self.mesh if self.mesh_dim is None else self.mesh_dim, len(devices))
        parts = (self, self.gradients, self.memory, self.sequences, self.experts, self.pipeline)
        asked = {name: value for part in parts for name, value in vars(part).items()}
        plan = Plan(
            **{f.name: asked[f.name] for f in dataclasses.fields(Plan) if f.name in asked} | {"mesh": mesh}
        )
        if self.seq_len > MAX_SEQ_LEN or self.batch_size * self.seq_len > MAX_TOKENS:
            asked_for = f"a batch of {self.batch_size:,} sequences of {self.seq_len:,} tokens"
            raise ValueError(f"{asked_for}: use at most {MAX_SEQ_LEN:,} positions and {MAX_TOKENS:,} tokens")
        plan.check(config, self.batch_size, self.seq_len)
        return config, plan


@dataclass(frozen=True)
class TextOptions:
    """Text: what is trained on, and what is kept for evaluation.

    Attributes:
        data: files or globs of text or JSONL; left out, the running Python's own library.
        tokenizer: 'bytes', or the path of a Hugging Face tokenizer.json.
        start_token: the token of tokenizer.json that begins a document; left out, what it puts first or a
            usual name.
        limit_bytes: stop reading after so much text.
        held_out: the last 1 of so many parts is never trained on; 0 keeps nothing out.
        eval_every: steps between evaluations on the held-out part, and after the last step; 0 evaluates
            never.
        eval_batches: batches per evaluation, always the same ones.
    """

    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE ...")] = ()
    tokenizer: str = "bytes"
    start_token: Words = None
    limit_bytes: Number = None
    held_out: int = 20
    eval_every: int = 0
    eval_batches: int = 4


@dataclass(frozen=True)
class Train:
    """Train on text: by default the running Python's own library sources, so it works offline.

    llmpar train --mesh "dp=2 fsdp=2 tp=2" --steps 200 --data "texts/*.txt" --checkpoints kept --eval-every 50

    Attributes:
        steps: train to this step.
        seed: of weights and of the order of data.
        checkpoints: folder to save to and to resume from: the same command goes on where it was stopped.
        every: steps between checkpoints.
        anyway: resume although data, seed or batch are not those that the checkpoint was made with.
        log: append a JSON line per step to this file; the first after a resumption has "resumed", and
            replaces older rows from its step on.
        plot: draw the loss into this PNG or SVG.
        json: print one JSON document on stdout.
    """

    steps: int = 50
    seed: int = 0
    checkpoints: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    every: int = 100
    anyway: bool = False
    log: File = None
    plot: File = None
    json: bool = False
    step: StepOptions = StepOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    text: TextOptions = TextOptions()

    def run(self) -> dict:
        """Train, showing progress, and describe the run."""
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed is {self.seed}; use 0 to {MAX_SEED}")
        options = OptimizerConfig(**vars(self.optimizer))
        check_picture(self.plot)
        from llmpar import attention, data
        from llmpar.checkpoint import Checkpoints
        from llmpar.mesh import make_mesh
        from llmpar.train import train

        start()
        keep = Checkpoints(self.checkpoints, self.every) if self.checkpoints is not None else None
        config, plan = self.step.resolve()
        fits_host(config, plan, self.step.batch_size, self.step.seq_len, ("params", "optimizer"))
        text = {
            f.name: getattr(self.text, f.name)
            for f in dataclasses.fields(data.DataConfig)
            if hasattr(self.text, f.name)
        }
        source = data.DataConfig(
            seq_len=self.step.seq_len, batch_size=self.step.batch_size, seed=self.seed, **text
        )
        tokenizer = data.open_tokenizer(source.tokenizer, source.start_token)
        data.check_vocab(tokenizer, config.vocab_size)
        corpus = data.read_corpus(source, tokenizer)
        positions = attention.sequence_permutation(plan.sequence_order, source.seq_len, plan.mesh.sp)
        stream = data.Stream(corpus, source, positions=positions)
        held_out = data.Stream(corpus, source, "held_out", positions) if self.text.eval_every else None
        say(
            f"{config.name}: {config.num_params:,} parameters on {plan.mesh} ({plan.mesh.size} devices);"
            f" {corpus.source}"
        )
        if order := plan.pipeline:
            idle = timetable(order).bubble_fraction
            say(
                f"{order.name}: {order.num_stages} stages, {order.num_microbatches} microbatches, {idle:.0%}"
                " of a step idle"
            )
        mesh = make_mesh(plan.mesh)
        with Stopper() as stopper, progress(self.steps) as show:

            def on_step(number, report):
                stopper.worked = True
                mfu = f", MFU {report.mfu:.1%}" if report.mfu else ""
                held = f", {report.memory_bytes / 2**30:.2f} GiB" if report.memory_bytes else ""
                evaluated = f", held-out {report.eval_losses[-1][1]:.3f}" if report.eval_losses else ""
                rate = f"{report.tokens_per_s:,.0f} tokens/s{mfu}{held}"
                show(number + 1, f"loss {report.losses[-1]:.3f} nats{evaluated}, {rate}")

            _, report = train(
                config,
                plan,
                mesh,
                stream,
                self.steps,
                options,
                self.seed,
                keep,
                self.log,
                on_step,
                anyway=self.anyway,
                held_out=held_out,
                eval_every=self.text.eval_every,
                eval_batches=self.text.eval_batches,
                ideal_step_s=ideal_step_s(config, self.step, mesh),
                tell=say,
                stop=lambda: stopper.number > 0,
            )
        if stopper.number and (done := report.start + len(report.losses)) < self.steps:
            kept = (
                f"kept in {self.checkpoints}: the same command goes on from there"
                if keep
                else "nothing was kept"
            )
            say(f"llmpar: stopped after step {done}; {kept}")
            raise SystemExit(128 + stopper.number)
        if self.plot and report.losses and speaks():
            from llmpar import draw

            draw.loss_curve(report.losses).save(self.plot)
            say(f"drew the loss into {self.plot}")
        if report.losses:
            say(
                f"loss {report.losses[0]:.4f} -> {report.losses[-1]:.4f} nats per token in"
                f" {len(report.losses)} steps"
            )
        document = {
            "model": config.name,
            "mesh": plan.mesh.sizes,
            "losses": report.losses,
            "grad_norms": report.grad_norms,
            "tokens_per_s": report.tokens_per_s,
            "step_s": report.step_s,
            "params": config.num_params,
            "devices": plan.mesh.size,
            "start": report.start,
            "mfu": report.mfu,
            "peak_memory_bytes": report.memory_bytes,
            "eval_losses": report.eval_losses,
        }
        emit(document, self.json)
        return document


@dataclass(frozen=True)
class Inspect:
    """Compile one training step and show predicted beside compiled: bytes and collectives per axis, memory,
    FLOPs.

    llmpar inspect --mesh "dp=2 fsdp=2 tp=2" --zero 3

    Attributes:
        svg: also draw the bytes into this SVG (or PNG).
        json: print one JSON document on stdout.
    """

    svg: File = None
    json: bool = False
    step: StepOptions = StepOptions()

    def run(self) -> dict:
        """Inspect, and print tables unless JSON was asked for."""
        import rich

        check_picture(self.svg)
        from llmpar.inspect.report import inspect, picture, tables

        start()
        config, plan = self.step.resolve()
        say(f"compiling a step of {config.name} on {plan.mesh} …")
        document = inspect(config, plan, self.step.batch_size, self.step.seq_len)
        if self.svg and speaks():
            picture(document).save(self.svg)
            say(f"drew the bytes into {self.svg}")
        if not self.json and speaks():
            for table in tables(document):
                rich.print(table)
        emit(document, self.json)
        return document


class Stopper:
    """While open, the first Ctrl-C or SIGTERM asks for an end after the running step, so that it can be
    saved; the second, or one before any step was done, ends the process. On many hosts all would have to stop
    at one step: not there.
    """

    def __init__(self):
        self.number, self.worked, self._before = 0, False, {}

    def __enter__(self) -> Stopper:
        import jax

        if threading.current_thread() is threading.main_thread() and jax.process_count() == 1:
            self._before = {n: signal.signal(n, self) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def __call__(self, number: int, _frame) -> None:
        again, self.number = self.number > 0, number
        if again or not self.worked:
            os.write(2, b"llmpar: ended at once; checkpoints taken before are intact\n")
            os._exit(128 + number)
        os.write(2, b"llmpar: ends after this step; once more ends at once\n")


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[int, str], None]]:
    """Give a function that shows a step and words: on a bar in a terminal, else as a line every `LINE_S`
    seconds."""
    if sys.stderr.isatty() and speaks():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = [
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
        ]
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("compiling", total=total)
            yield lambda done, words: bar.update(task, completed=done, description=words)
        return
    last = -math.inf

    def line(done: int, words: str) -> None:
        nonlocal last
        if time.monotonic() > last + LINE_S or done == total:
            say(f"step {done}/{total}: {words}")
            last = time.monotonic()

    say("compiling …")
    yield line


def check_picture(path: str | None) -> None:
    """Refuse a path that no drawing can be saved to, before the work that it is to show."""
    if path is None:
        return
    if pathlib.Path(path).suffix not in PICTURES:
        raise ValueError(f"a drawing is saved as .svg or .png, and '{path}' is neither; rename it")
    folder = pathlib.Path(path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or pathlib.Path(path).is_dir():
        raise ValueError(
            f"'{path}' cannot be written; give a file in a folder that is there and can be written"
        )


def fits_host(config: ModelConfig, plan: Plan, batch_size: int, seq_len: int, parts: tuple[str, ...]) -> None:
    """Refuse a model whose simulated devices together hold more than this machine's memory."""
    import jax

    from llmpar.data import host_bytes
    from llmpar.predict import memory

    if jax.devices()[0].platform != "cpu" or not (room := host_bytes()):
        return
    held = memory.argument_bytes(config, plan, batch_size, seq_len)
    need = plan.mesh.size * sum(held[part] for part in parts)
    if need > room:
        what = (
            f"{' and '.join(parts)} of '{config.name}' take {need / 2**30:,.1f} GiB on {plan.mesh.size}"
            " simulated devices"
        )
        raise ValueError(
            f"{what}, and this machine has {room / 2**30:,.1f} GiB; use a smaller model, or cut it more"
        )


def ideal_step_s(config: ModelConfig, step: StepOptions, mesh) -> float | None:
    """What a step's useful FLOPs take at the devices' peak, in seconds; None for simulated and unknown
    devices."""
    from llmpar.predict import hardware, memory

    chip = hardware.guess(mesh.devices.flat[0].device_kind)
    if chip is None or chip.simulated:
        return None
    return sum(memory.flops(config, step.batch_size, step.seq_len).values()) / chip.flops_per_s / mesh.size


def start() -> None:
    """Set JAX up: float32, and compiled programs kept between runs, in the user's cache folder unless JAX was
    told another.

    What threads of Orbax log when a file cannot be read or written is kept back: the exception that follows
    says it.
    """
    import jax

    if not os.environ.get("LLMPAR_TRACEBACK"):
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if sys.unraisablehook is sys.__unraisablehook__:
            sys.unraisablehook = lambda _: None

    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        say("JAX_ENABLE_X64 is ignored: weights are float32, tokens int32")
        jax.config.update("jax_enable_x64", False)
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):  # nobody's home
            jax.config.update(
                "jax_compilation_cache_dir", str(pathlib.Path.home() / ".cache" / "llmpar" / "jax")
            )
