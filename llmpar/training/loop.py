"""Train: a loop around `llmpar.training.step.Step` that measures, evaluates, logs, saves and resumes."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh

from llmpar.files import Allowed, CheckedFields
from llmpar.model import moe
from llmpar.model.weights import Tree
from llmpar.parallel.mesh import platform_of
from llmpar.plan.model_config import Count, ModelConfig, OptimizerConfig, Size
from llmpar.plan.plan import Plan
from llmpar.training import hugging_face as hf
from llmpar.training.checkpoint import Checkpoints, agreed, kept_in
from llmpar.training.data import Batches
from llmpar.training.local_steps import LocalSteps
from llmpar.training.optimizer import fitted, make_optimizer
from llmpar.training.state import State, check_tokens
from llmpar.training.step import Step
from llmpar.training.trackers import Send, Tracker, profiling, tracking

ADAMW = OptimizerConfig()
# What is meant by it: Chowdhery et al. 2022, appendix B, but with attention halved by causality.
MFU = (
    "a step's useful FLOPs (6 per token and active weight, and causal attention) / its seconds / peak"
    " FLOP/s"
)
# Arguments of `train` in which its processes may differ: whom it tells, and what its own devices are; the
# plan has the mesh's sizes.
APART = "callbacks tracker log mesh ideal_step_s".split()


@dataclass
class Report:
    """What a training run measured. Losses are in nats per target.

    ``eval_losses`` are pairs: the number of steps done, and the loss of held-out text after them.
    """

    start: int = 0
    tokens_per_step: int = 0
    ideal_step_s: float | None = None
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    eval_losses: list[tuple[int, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory_bytes: int = 0

    @property
    def step_s(self) -> float | None:
        """Median seconds per step, without the first two, which compile; None before the first."""
        return statistics.median_high(self.seconds[2:] or self.seconds) if self.seconds else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the whole batch per second."""
        return self.tokens_per_step / self.step_s if self.step_s else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, as `MFU` says; None where the devices' peak is unknown."""
        return self.ideal_step_s / self.step_s if self.ideal_step_s and self.step_s else None

    @property
    def perplexity(self) -> float | None:
        """The exponential of the last held-out loss; None where there is none."""
        return math.exp(min(self.eval_losses[-1][1], 700)) if self.eval_losses else None


def made_of(
    model: ModelConfig, plan: Plan, stream: Batches, steps: int, options: OptimizerConfig, seed: int
) -> dict[str, Any]:
    """Describe a run besides its model, as a checkpoint remembers it (`checkpoint.FIXED`). The mesh is left
    out, and of the plan all that changes no loss."""
    corpus, config = stream.corpus, stream.config
    rounds = "dtype gather_dtype reduce_dtype matmul_dtype attention_kernel documents".split()
    run: dict[str, Any] = {name: getattr(plan, name) for name in rounds}
    if model.experts and model.experts.capacity_factor:  # tokens that fill an expert before others
        run["expert_piece"] = config.seq_len // (
            plan.mesh.sp * (plan.mesh.tp if plan.tp_sequence else 1)
        )
        run["sequence_order"] = plan.sequence_order
    return run | {
        "data": {"name": corpus.source, "fingerprint": corpus.fingerprint},
        "tokenizer": corpus.tokenizer.identity,
        "seed": seed,
        "data_seed": config.seed,
        "steps": steps,
        "held_out": config.held_out,
        "batch_size": config.batch_size,
        "seq_len": config.seq_len,
        "workers": plan.mesh.dp if options.local_steps else 1,
        **dataclasses.asdict(options),
    }


@dataclass(frozen=True)
class Evaluation(CheckedFields):
    """Held-out text of which ``eval_batches`` batches are evaluated every ``eval_every`` steps (0: never),
    and after the last step."""

    held_out: Batches | None = None
    eval_every: Count = 0
    eval_batches: Size = 1

    def check(self) -> None:
        """Refuse an evaluation of nothing."""
        held_out, batches = self.held_out, self.eval_batches
        if held_out and self.eval_every:
            if not any((held_out.batch(i)["targets"] >= 0).any() for i in range(batches)):
                raise ValueError(
                    f"no answer is in the first {batches} held-out batches; use more --eval-batches, or a"
                    " smaller --held-out"
                )

    def score(self, step: Step | LocalSteps, state: State) -> dict[str, Any]:
        """Return the mean cross-entropy in nats of the batches, without the routers' losses, as ``loss``; and
        what it is ``of``: losses of the same alone can be compared."""
        assert self.held_out
        batches = (_place(step, self.held_out, i) for i in range(self.eval_batches))
        sums = [jax.device_get(step.evaluate.jitted(state.params, batch)) for batch in batches]
        loss, tokens = (sum(float(x[i]) for x in sums) for i in (0, 1))
        config, text = self.held_out.config, self.held_out.corpus.fingerprint
        rows = f"{self.eval_batches} of {config.batch_size} x {config.seq_len}"
        return {"loss": loss / max(tokens, 1), "of": f"{rows} of 1/{config.held_out} of {text}"}


@dataclass(frozen=True)
class Callbacks:
    """What a run calls.

    Attributes:
        on_step: called after each step, with its number and the report so far.
        tell: called with sentences for people, such as how the checkpoint differs from this run.
        stop: called after each step; when it gives True, the state is saved (with checkpoints) and training
            ends. So it does where the log can no longer be written, and on every other way out but a step
            that failed.
        barrier: called where several processes should wait for one another: some compile longer than others.
            At the beginning it is given what they must agree on, `settings_of` (`launch.joined.barrier`).
    """

    on_step: Callable[[int, Report], None] = lambda number, report: None
    tell: Callable[[str], None] = lambda words: None
    stop: Callable[[], bool] = lambda: False
    barrier: Callable[..., None] = lambda settings=None: None


def settings_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be the same in all processes of a run: the arguments of `train`, but for those of
    `APART`; of texts, checkpoints and weights what is in them."""
    settings = {name: value for name, value in arguments.items() if name not in APART}
    plan, evaluation = settings["plan"], settings["evaluation"]
    if keep := settings["checkpoints"]:
        # Orbax waits for processes that see none
        seen = {"every": keep.every, "exists": keep.folder.is_dir()}
        settings["checkpoints"] = seen | kept_in(keep.folder)
    return settings | {
        "plan": getattr(plan, "requested", plan),
        "stream": _text_of(settings["stream"]),
        "evaluation": vars(evaluation) | {"held_out": _text_of(evaluation.held_out)},
        "begin": settings["begin"] is not None,
        "origin": settings["origin"] and hf.fingerprint(settings["origin"]),
    }


def _text_of(stream: Batches | None) -> dict[str, Any] | None:
    """Describe a text by what is in it, and how it is cut."""
    if stream is None:
        return None
    return {
        "text": f"{stream.corpus.fingerprint} ({len(stream.corpus.tokens):,} tokens)",
        "tokenizer": stream.corpus.tokenizer.identity["fingerprint"],
        "part": stream.part,
        "config": stream.config,
    }


def train(
    config: ModelConfig,
    plan: Plan,
    mesh: Mesh,
    stream: Batches,
    steps: int,
    options: OptimizerConfig = ADAMW,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
    anyway: bool = False,
    begin: Callable[[Tree], Tree] | None = None,
    origin: str | None = None,
    evaluation: Evaluation = Evaluation(),
    log: str | None = None,
    tracker: Tracker | None = None,
    profile: tuple[int, int] | None = None,
    ideal_step_s: float | None = None,
    callbacks: Callbacks = Callbacks(),
) -> tuple[State, Report]:
    """Train to step ``steps``, from the newest checkpoint if there is one.

    The step's number decides its batch, so a resumed run repeats nothing and equals one that was never
    stopped. The state that is given back and saved has its layers in the model's order, whatever the
    pipeline's order is.

    Args:
        anyway: resume from a checkpoint of other data, seeds or sizes, which is refused otherwise.
        begin: gives the weights to begin with (or a part of them), laid out as the tree of shardings that it
            gets says. With a checkpoint it is not called.
        origin: where those are from; a checkpoint remembers it.
        log: a file to which a JSON line per step is appended; a tracker gets the same rows.
        profile: the first and the last step to trace.
        ideal_step_s: seconds that a step's useful FLOPs take at the devices' peak; the report divides by the
            measured seconds.

    Raises:
        ValueError: the run is not possible, or processes that train together differ in it (`settings_of`).
        FloatingPointError: a loss or a gradient is not finite. Checkpoints taken before that step stay.
    """
    callbacks.barrier(settings_of(locals()) if jax.process_count() > 1 else {})
    plan = fitted(plan, options)
    plan = plan.resolve(config, platform_of(mesh), stream.config.batch_size, stream.config.seq_len)
    evaluation.check()
    Allowed(int, 1).check("steps", steps)
    made = dict[str, Any]()
    if checkpoints or tracker:  # its sums read the whole text
        made = made_of(config, plan.requested, stream, steps, options, seed)
    if origin:
        made["from"] = os.path.abspath(origin)
    about = made | {"model": config.name, "mesh": str(plan.mesh), "mfu": MFU}
    # Process 0's number, so that all do the same.
    writes = checkpoints is not None and agreed(checkpoints.latest or 0) < steps
    with (
        checkpoints.writing() if checkpoints and writes else contextlib.nullcontext(),
        _opened(log) as lines,
        tracking(tracker, about, callbacks.tell) as send,
        contextlib.ExitStack() as traced,
    ):
        step = stepper(config, plan, mesh, options, steps, callbacks.tell)
        # There are never two states: no name but the run's is one.
        run = _Run(
            step,
            _first_state(step, checkpoints, made, anyway, seed, begin, callbacks.tell),
            checkpoints,
            made,
            evaluation,
            callbacks,
            Report(0, stream.config.batch_size * stream.config.seq_len, ideal_step_s),
            lines,
            send,
        )
        if start := run.report.start:
            nothing = "; nothing is left to do" if start >= steps else ""
            callbacks.tell(f"goes on from the checkpoint of step {start}{nothing}")
        first, last = profile or (steps, steps)
        program = None
        with run.saved_on_the_way_out():
            for number in range(start, steps):
                batch = _place(step, stream, number)
                if program is None:
                    program = step.compiled(run.state, batch)
                    # On CPUs devices that exchange data for the first time wait 30 s for one another (Gloo),
                    # and one process may compile longer than that.
                    callbacks.barrier()
                if max(first, start) == number <= last:
                    run.read()
                    traced.enter_context(profiling("profile", program.as_text(), callbacks.tell))
                run.state, metrics = program(run.state, batch)
                run.done = number + 1
                run.waiting.append((number, metrics))
                run.read(but=1)
                if number == last:
                    run.read()
                    traced.close()
                    run.clock = time.perf_counter()
                # one of several processes that failed has signalled all, as a scheduler does
                stopped = bool(run.failed and jax.process_count() == 1) or callbacks.stop()
                run.evaluate_and_save(steps, stopped)
                if stopped:
                    break
            run.finish()
            return run.in_order(), run.report


def stepper(
    config: ModelConfig,
    plan: Plan,
    mesh: Mesh,
    options: OptimizerConfig,
    steps: int,
    tell: Callable[[str], None],
) -> Step | LocalSteps:
    """Make the step that these options ask for, and tell what a run of so many steps leaves out."""
    optimizer = make_optimizer(options, steps, config)
    if not options.local_steps:
        names = "fragments", "outer_rate", "outer_momentum"
        if outer := [name for name in names if getattr(options, name) != getattr(ADAMW, name)]:
            raise ValueError(
                f"{', '.join(outer)} of an outer optimizer, and local_steps is 0, without one; use"
                " local_steps=10 (--local-steps 10), say, or leave them out"
            )
        return Step(config, plan, mesh, optimizer, options.clip)
    outer = optax.sgd(options.outer_rate, options.outer_momentum, nesterov=True)
    every, count = options.local_steps, options.fragments
    step = LocalSteps(config, plan, mesh, optimizer, every, outer, options.clip, count)
    # the most that a fragment trains after its last outer step (`LocalSteps.run`)
    if left := max((steps - i * every // count) % every for i in range(count)):
        tell(
            f"after the last outer step{' of some layers' * (count > 1)} workers learn for {min(left, steps)}"
            f" of {steps} steps more: that is resumed, but is not in the weights that are evaluated and"
            " exported"
        )
    return step


def _first_state(
    step: Step | LocalSteps,
    checkpoints: Checkpoints | None,
    made: dict[str, Any],
    anyway: bool,
    seed: int,
    begin: Callable[[Tree], Tree] | None,
    tell: Callable[[str], None],
) -> Any:
    """Restore the newest checkpoint, or make a state."""
    abstract = step.abstract_in_model_order
    if checkpoints and (state := checkpoints.restore(abstract, step.config, made, anyway, tell)):
        return step.from_model_order(state, donate=True)
    shardings = jax.tree.map(lambda x: x.sharding, abstract.params)
    return step.init(seed, begin(shardings) if begin else None)


@dataclass
class _Run:
    """The newest state of a run, which is evaluated and saved, and what its steps measured, which is reported
    and written to the log (``lines``).

    A step is read when the next one has been sent, so that devices do not wait for this process.

    Attributes:
        done: the number of steps that were sent.
        waiting: the steps that were sent and not yet read, each with its metrics.
        clock: the time from which the next step's seconds count.
        failed: why the log can no longer be written: training is to save, and to end with that.
    """

    step: Step | LocalSteps
    state: Any
    checkpoints: Checkpoints | None
    made: dict[str, Any]
    evaluation: Evaluation
    callbacks: Callbacks
    report: Report
    lines: Any
    send: Send
    waiting: list[tuple[int, dict]] = field(default_factory=list)
    failed: ValueError | None = None

    def __post_init__(self):
        self.done = self._saved = self.report.start = int(self.state.step)
        self._in_order = False
        self.clock = time.perf_counter()

    def in_order(self) -> State:
        """Return the state with its layers in the model's order, from now on."""
        if not self._in_order:
            self.state = self.step.to_model_order(self.state, donate=True)
            self._in_order = True
        return self.state

    def evaluate_and_save(self, steps: int, stopped: bool) -> None:
        """Do what is due after this step; then the state has its layers in the stages' order again."""

        def is_due(every: int) -> bool:
            return every > 0 and (self.done % every == 0 or self.done == steps)

        evaluates = self.evaluation.held_out is not None and is_due(self.evaluation.eval_every)
        saves = self.checkpoints is not None and (stopped or is_due(self.checkpoints.every))
        if not evaluates and not saves:
            return
        self.read()  # never keep what a bad step has spoiled
        score = None
        if evaluates:
            score = self.evaluation.score(self.step, self.in_order())
            self.report.eval_losses.append((self.done, score["loss"]))
            row = {"eval_loss": score["loss"], "perplexity": self.report.perplexity}
            self._write(self.done, {"steps_done": self.done} | row)
            self.callbacks.on_step(self.done - 1, self.report)
            if self.checkpoints and not saves:
                saves = bool(agreed(self.checkpoints.best((self.done, score)) == self.done))
        if saves:
            self.save(score)
        self.state = self.step.from_model_order(self.in_order(), donate=True)
        self._in_order = False
        self.clock = time.perf_counter()

    def save(self, score: dict[str, Any] | None = None) -> None:
        """Save it, once: what could not be saved is not tried again on the way out."""
        if self.checkpoints:
            self._saved = self.done
            self.checkpoints.save(self.done, self.in_order(), self.step.config, self.made, score)

    @contextlib.contextmanager
    def saved_on_the_way_out(self) -> Iterator[None]:
        """Save what is not yet saved, whatever ends this, but not what a failed step has spoiled. (One of
        several processes could not save alone.)"""
        try:
            yield
        except BaseException as error:
            spoiled = isinstance(error, FloatingPointError) or jax.process_count() > 1
            with contextlib.suppress(Exception):  # the error that ended it is raised
                went_well = not spoiled and all(_is_finite(m) for _, m in self.waiting)
                if self.checkpoints and self._saved < self.done and went_well:
                    self.save()
                    self.callbacks.tell(f"step {self.done} is kept in {self.checkpoints.folder}")
            raise

    # ------------------------------------------------------------------------------------- what was measured

    def finish(self) -> None:
        """Read all steps, and end with what kept the log from being written, if anything did."""
        self.read()
        if self.failed:
            raise self.failed
        if jax.process_count() > 1:  # of the fullest process; in MiB: JAX sends no 64 bits
            peaks = multihost_utils.process_allgather(np.int32(self.report.memory_bytes >> 20))
            self.report.memory_bytes = int(peaks.max()) << 20

    def read(self, but: int = 0) -> None:
        """Read the steps that were sent and not yet read, ``but`` so many of the last."""
        while len(self.waiting) > but:
            self._read(*self.waiting.pop(0))

    def _read(self, number: int, metrics: dict) -> None:
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        if not _is_finite(metrics):
            self._refuse(number, loss, norm)
        report, config, now = self.report, self.step.config, time.perf_counter()
        report.seconds.append(now - self.clock)
        self.clock = now
        report.losses.append(loss)
        report.grad_norms.append(norm)
        report.memory_bytes = _memory(self.step.mesh)
        seconds, ideal = report.seconds[-1], report.ideal_step_s
        row = {
            "step": number,
            "loss": loss,
            "grad_norm": norm,
            "targets": int(metrics["tokens"]),
            "seconds": seconds,
            "tokens_per_s": report.tokens_per_step / seconds,
        }
        row |= {"mfu": ideal / seconds} if ideal else {}
        if number == report.start > 0:
            row["resumed"] = report.start
        if config.experts and "load" in metrics:
            plan = self.step.plan
            row |= moe.summary(config.experts, metrics, plan.mesh.ep, plan.expert_copies)
        self._write(number, row)
        self.callbacks.on_step(number, report)

    def _refuse(self, number: int, loss: float, norm: float) -> None:
        """Stop at a loss or gradient that is not finite; a checkpoint whose weights gave this loss goes."""
        if self.checkpoints and not math.isfinite(loss):
            self.checkpoints.discard(number)
        kept = self.checkpoints.latest if self.checkpoints else None
        saved = (
            "no checkpoint was taken"
            if kept is None
            else f"the checkpoint of step {kept} is intact"
        )
        raise FloatingPointError(
            f"the loss of step {number} is {loss}, its gradient's norm {norm}: stopped; {saved}; try a lower"
            " learning rate"
        )

    def _write(self, number: int, row: dict) -> None:
        """Write a row to the log, and hand it to the tracker as that of step ``number``."""
        if self.lines and not self.failed:
            try:
                self.lines.write(json.dumps(row).encode() + b"\n")
            except OSError as error:
                self.failed = ValueError(
                    f"cannot write the log '{self.lines.name}': {error.strerror}; free some room, and the"
                    " same command goes on"
                )
                if jax.process_count() > 1:
                    os.kill(os.getpid(), signal.SIGTERM)
        self.send(number, row)


def _is_finite(metrics: dict) -> bool:
    """Tell whether a step went well."""
    return math.isfinite(float(metrics["loss"]) + float(metrics["grad_norm"]))


def _place(step: Step | LocalSteps, stream: Batches, number: int) -> dict:
    """Put a step's batch on its devices. Each process makes only the rows that its own hold, each once."""
    shape = stream.config.batch_size, stream.config.seq_len

    @functools.cache
    def rows(begin: int, end: int) -> dict[str, np.ndarray]:
        batch = stream.batch(number, slice(begin, end))
        for name in ("tokens", "targets"):
            check_tokens(name, batch[name], step.config.vocab_size)
        return batch

    def piece(name: str, index: tuple[slice, ...]) -> np.ndarray:
        return rows(*index[0].indices(shape[0])[:2])[name][:, index[1]]

    on_devices = functools.partial(jax.make_array_from_callback, shape, step.batch_sharding)
    return {
        name: on_devices(functools.partial(piece, name)) for name in step.abstract_batch(*shape)
    }


def _memory(mesh: Mesh | AbstractMesh) -> int:
    """Give the peak bytes in use on the fullest local device; 0 where the platform does not count them."""
    local = [
        d.memory_stats() or {} for d in mesh.devices.flat if d.process_index == jax.process_index()
    ]
    return max((stats.get("peak_bytes_in_use", 0) for stats in local), default=0)


@contextlib.contextmanager
def _opened(path: str | None) -> Iterator[Any]:
    """Open a JSONL log for appending, in the first process; give None in the others and without a path.

    A line that a killed run left unfinished is ended first.
    """
    if path is None or jax.process_index() != 0:
        yield None
        return
    try:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
            raise ValueError(
                f"cannot write the log '{path}': it is a pipe or a device; give a file"
            )
        # so that a full disk is known at the line that meets it
        file = open(path, "ab+", buffering=0)
    except OSError as error:
        raise ValueError(
            f"cannot write the log '{path}': {error.strerror}; give another file"
        ) from error
    with file:
        if file.tell() and file.seek(-1, os.SEEK_END) is not None and file.read(1) != b"\n":
            file.write(b"\n")
        yield file
