"""``llmpar train``: train on text, with progress; the same command resumes after a stop."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import tyro

from llmpar import draw
from llmpar.cli.options import (
    File,
    Folder,
    From,
    Output,
    Seed,
    StepOptions,
    changed,
    check_picture,
    fits_host,
    flags_of,
    give,
    inform,
    save_picture,
    speaks,
    start_jax,
)
from llmpar.cli.weights import Load, beside, from_folder
from llmpar.launch import signals
from llmpar.launch.agreed import flat
from llmpar.launch.joined import Watchdog, asked_to_stop, barrier, initialize, tell_others
from llmpar.plan.model_config import Count, ModelConfig, OptimizerConfig, Rate
from llmpar.plan.plan import Plan
from llmpar.plan.presets import folder_of, preset
from llmpar.plan.timetable import timetable
from llmpar.predict import hardware, memory, parameters
from llmpar.training import data, tokenizers
from llmpar.training.balance import row_orders
from llmpar.training.trackers import Tracker

LINE_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""
OptimizerFlags = flags_of(OptimizerConfig)
TextFlags = flags_of(data.DataConfig, "seq_len", "batch_size", "seed")


@dataclass(frozen=True)
class Train(Output):
    """Train on text: by default the running Python's own library sources, so it works offline.

    llmpar train --mesh "dp=2 fsdp=2 tp=2" --steps 200 --data "texts/*.txt" --checkpoints kept --eval-every 50

    Attributes:
        steps: train to this step.
        from_: begin with the weights in this folder of a Hugging Face model (config.json, safetensors,
            tokenizer.json), or in that of a downloaded one by its name.
        seed: of weights and of the order of data.
        checkpoints: folder to save to and to resume from: the same command resumes where it was stopped.
        every: steps between checkpoints.
        anyway: resume although data, seed or batch are not those that the checkpoint was made with.
        log: append a JSON line per step to this file; the first after a resumption has "resumed", and
            replaces older rows from its step on.
        tracker: hand the log's rows to wandb, mlflow, trackio or tensorboard, too.
        profile: trace the steps FIRST to LAST, in the folder 'profile', with arrows for names.
        plot: draw the loss into this PNG or SVG.
        eval_every: steps between evaluations on the held-out part of the text, and after the last step; 0
            evaluates never.
        eval_batches: batches per evaluation, always the same ones.
        stuck_after: of several processes, end all when no step ended for so many seconds (ten times as many
            for the first step, which compiles); 0 waits for ever.
    """

    steps: int = 50
    from_: From = None
    seed: Seed = 0
    checkpoints: Folder = None
    every: int = 100
    anyway: bool = False
    log: File = None
    tracker: Annotated[Tracker | None, tyro.conf.arg(metavar="NAME")] = None
    profile: Annotated[str | None, tyro.conf.arg(metavar="FIRST:LAST")] = None
    plot: File = None
    eval_every: Count = 0
    eval_batches: int = 4
    stuck_after: Rate = 600.0
    step: StepOptions = StepOptions()
    optimizer: Annotated[Any, tyro.conf.arg(constructor=OptimizerFlags)] = OptimizerFlags()
    text: Annotated[Any, tyro.conf.arg(constructor=TextFlags)] = TextFlags()

    def run(self, begin: Load | None = None) -> dict:
        """Train with progress, and return the ``--json`` document. ``begin`` loads the weights of
        ``from_``."""
        if begin is None:
            initialize()
            barrier({"command": "train"} | flat(self))
        if self.from_ is not None and begin is None:
            command, begin = self.taken_from(self.from_)
            return command.run(begin)
        self.check_flags()
        optimizer = OptimizerConfig(**vars(self.optimizer))
        check_picture(self.plot)
        barrier({"model": self.step.adapted(preset(self.step.model))})
        from llmpar.parallel.mesh import make_mesh
        from llmpar.training.checkpoint import Checkpoints, kept_in
        from llmpar.training.loop import Callbacks, Evaluation, train

        start_jax()
        keep = Checkpoints(self.checkpoints, self.every) if self.checkpoints is not None else None
        plan = self.step.resolve()
        config = plan.config
        fits_host(plan, self.step.batch_size, self.step.seq_len, ("params", "optimizer"))
        stream, held_out = self.read_text(config, plan)
        say_plan(config, plan, stream.corpus.source)
        if keep is None or not kept_in(keep.folder):
            own = f"begins with the weights in {self.from_}"
            inform(own if begin else beside(self.step.model))
        mesh = make_mesh(str(plan.mesh))
        say_memory(mesh)
        with (
            Stopper() as stopper,
            progress(self.steps) as show,
            Watchdog(self.stuck_after if stopper.of_many else 0) as watchdog,
        ):

            def on_step(number, report):
                watchdog.feed()
                show(number + 1, newest(report))

            _, report = train(
                config,
                plan,
                mesh,
                stream,
                self.steps,
                optimizer,
                self.seed,
                keep,
                anyway=self.anyway,
                begin=begin,
                origin=self.from_ and folder_of(self.from_),
                evaluation=Evaluation(held_out, self.eval_every, self.eval_batches),
                log=self.log,
                tracker=self.tracker,
                profile=self.profiled_steps(),
                ideal_step_s=ideal_step_s(config, self.step, mesh),
                callbacks=Callbacks(on_step, inform, stopper.requested, barrier),
            )
        if stopper.number and (done := report.start + len(report.losses)) < self.steps:
            resume = f"saved in {self.checkpoints}: run the same command again to resume"
            inform(f"llmpar: stopped after step {done}; {resume if keep else 'nothing was saved'}")
            raise SystemExit(128 + stopper.number)
        return self.finish(report, config, plan)

    def check_flags(self) -> None:
        """Refuse flags that no run can have, before JAX starts."""
        if self.checkpoints is None and changed(self, ("every", "anyway")):
            raise ValueError("--every and --anyway need --checkpoints; give it, or leave them out")
        folder = "profile" if os.path.lexists("profile") else "."
        if self.profiled_steps() and not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(
                "the folder 'profile' cannot be written here; move or remove what has that name"
            )

    def profiled_steps(self) -> tuple[int, int] | None:
        """Return the first and the last step to trace."""
        if self.profile is None:
            return None
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", self.profile)
        first, last = (int(match[1]), int(match[2])) if match else (0, -1)
        if not first <= min(last, self.steps - 1):
            raise ValueError(
                f"profile '{self.profile}' names no steps of 0 to {self.steps - 1}; use FIRST:LAST, as 5:8"
            )
        return first, last

    def finish(self, report: Any, config: ModelConfig, plan: Plan) -> dict:
        """Draw the loss, and return the ``--json`` document of a `training.loop.Report`."""
        from llmpar.training.loop import MFU

        if losses := report.losses:
            save_picture(self.plot, "the loss", lambda: draw.loss_curve(losses))
            inform(
                f"loss {losses[0]:.4f} -> {losses[-1]:.4f} nats per token in {len(losses)} steps"
            )
        document = {
            "model": config.name,
            "mesh": plan.mesh.user_sizes,
            "params": config.num_params,
            "devices": plan.mesh.size,
            "peak_memory_bytes": report.memory_bytes,
            "mfu_is": MFU,
        }
        measured = "losses grad_norms tokens_per_s step_s start mfu eval_losses perplexity".split()
        return give(document | {name: getattr(report, name) for name in measured}, self.json)

    def taken_from(self, name: str) -> tuple[Train, Load]:
        """Return this command with the model and tokenizer of a folder, and the loader of its weights."""
        own = None if self.text.tokenizer == "bytes" else self.text.tokenizer
        model, tokenizer, load, notes = from_folder(name, changed(self.step, ["model"]), own)
        inform(*notes)
        text = replace(self.text, tokenizer=tokenizer)
        return replace(self, step=replace(self.step, model=model), text=text), load

    def read_text(
        self, config: ModelConfig, plan: Plan
    ) -> tuple[data.Batches, data.Batches | None]:
        """Read the text to train on, and its held-out part if it is to be evaluated."""
        batch_size, seq_len = self.step.batch_size, self.step.seq_len
        source = data.DataConfig(
            **vars(self.text), seq_len=seq_len, batch_size=batch_size, seed=self.seed
        )
        tokenizer = tokenizers.open_tokenizer(source.tokenizer, source.start_token)
        tokenizers.check_vocab(tokenizer, config.vocab_size)
        corpus = data.read_corpus(source, tokenizer)
        order = functools.partial(
            row_orders, plan.sequence_order, n=plan.mesh.sp, window=config.window
        )
        held_out = data.Batches(corpus, source, "held_out", order) if self.eval_every else None
        return data.Batches(corpus, source, order=order), held_out


def newest(report: Any) -> str:
    """Return the newest figures of a running training, of its `training.loop.Report`, in a line."""
    mfu = f", MFU {report.mfu:.1%}" if report.mfu else ""
    peak = f", {report.memory_bytes / 2**30:.2f} GiB" if report.memory_bytes else ""
    evaluated = ""
    if report.eval_losses:
        loss = report.eval_losses[-1][1]
        evaluated = f", held-out {loss:.3f} (perplexity {report.perplexity:.4g})"
    return (
        f"loss {report.losses[-1]:.3f} nats{evaluated},"
        f" {report.tokens_per_s:,.0f} tokens/s{mfu}{peak}"
    )


def say_plan(config: ModelConfig, plan: Plan, source: str) -> None:
    """Print which model is trained on which devices and text."""
    of = f" ({parameters.trained_params(config):,} of them trained)" if config.lora else ""
    inform(
        f"{config.name}: {config.num_params:,} parameters{of} on {plan.mesh} ({plan.mesh.size}"
        f" devices); {source}"
    )
    if order := plan.pipeline:
        idle = timetable(order).bubble_fraction
        inform(
            f"{order.name}: {order.num_stages} stages, {order.num_microbatches} microbatches,"
            f" {idle:.0%} of a step idle"
        )


def say_memory(mesh) -> None:
    """Print how much GPU memory JAX leaves unused, unless its share was set."""
    chip = hardware.guess(mesh.devices.flat[0].device_kind)
    inform(hardware.memory_left_out(chip) if chip else None)


_AT_ONCE = "ended at once; checkpoints taken before are intact"


class Stopper(contextlib.ExitStack):
    """Let the first Ctrl-C, SIGTERM or SIGHUP end training after the running step, so that it can be saved.

    The second signal ends the process at once, and so does one before any step was done. Of several processes
    all stop after the same step if one gets a signal; JAX sees it, and the launcher ends processes that stay.
    """

    def __init__(self):
        import jax

        super().__init__()
        self.number, self.worked = 0, False
        self.of_many, self._steps = jax.process_count() > 1, 0

    def requested(self) -> bool:
        """Return whether to stop after this step."""
        self.worked = True
        if self.of_many:
            self._steps += 1
            self.number = signal.SIGTERM if asked_to_stop(self._steps) else 0
        return self.number > 0

    def __enter__(self) -> Stopper:
        # of several processes JAX handles SIGTERM itself
        own = signals.signals_to(self.to_all, [signal.SIGINT, signal.SIGHUP])
        self.enter_context(own if self.of_many else signals.signals_to(self))
        return self

    def to_all(self, number: int) -> None:
        """Let all processes end after the same step, or at once where none was done and Ctrl-C asks."""
        if self.worked or number != signal.SIGINT:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        tell_others("one process was interrupted", 128 + number)
        signals.end(_AT_ONCE, 128 + number)

    def __call__(self, number: int) -> None:
        again, self.number = self.number > 0, number
        if again or not self.worked:
            signals.end(_AT_ONCE, 128 + number)
        signals.write_sentence("ends after this step; once more ends at once")


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[int, str], None]]:
    """Yield a function that shows the steps done: a bar in a terminal, else a line every `LINE_S` seconds."""
    if sys.stderr.isatty() and speaks():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        words = TextColumn("{task.description}")
        columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), words, TimeElapsedColumn()
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("compiling", total=total)
            yield lambda done, words: bar.update(task, completed=done, description=words)
        return
    last = -math.inf

    def line(done: int, words: str) -> None:
        nonlocal last
        if time.monotonic() > last + LINE_S or done == total:
            inform(f"step {done}/{total}: {words}")
            last = time.monotonic()

    inform("compiling …")
    yield line


def ideal_step_s(config: ModelConfig, step: StepOptions, mesh) -> float | None:
    """Return the seconds of a step's useful FLOPs at the devices' peak; None if no peak is known."""
    chip = hardware.guess(mesh.devices.flat[0].device_kind)
    if chip is None or chip.simulated:
        return None
    return (
        sum(memory.flops(config, step.batch_size, step.seq_len).values())
        / chip.flops_per_s
        / mesh.size
    )
