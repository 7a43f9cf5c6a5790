"""Training: a loop around :class:`llmpar.step.Step` that measures, evaluates, logs, checkpoints and stops
when it should."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from llmpar import moe
from llmpar.checkpoint import Checkpoints
from llmpar.config import ModelConfig, OptimizerConfig, Weight
from llmpar.data import Stream
from llmpar.notation import parse_layout
from llmpar.plan import Plan
from llmpar.step import State, Step
from llmpar.weights import Tree, described

ADAMW = OptimizerConfig()


def make_optimizer(options: OptimizerConfig, steps: int, config: ModelConfig) -> optax.GradientTransformation:
    """The Optax optimizer that ``options`` name, with its schedule. Clipping is the step's (:class:`Step`),
    not here."""
    rate, warmup = options.learning_rate, min(options.warmup, max(steps - 1, 0))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0 if warmup else rate, rate, warmup, max(steps, warmup + 1), rate / 10
    )
    if options.optimizer == "adamw":
        return optax.adamw(schedule, b2=0.95, weight_decay=options.weight_decay, mask=_matrices(config))
    if options.optimizer == "adafactor":
        return optax.adafactor(schedule)
    if options.optimizer == "muon":
        return optax.contrib.muon(
            schedule,
            weight_decay=options.weight_decay,
            muon_weight_dimension_numbers=muon_dims(config),
            adam_weight_decay=0.0,
        )
    return optax.sgd(schedule, momentum=0.9)


def _matrices(config: ModelConfig) -> Tree:
    """True for weights that decay: matrices, not norms' scales and biases."""
    return jax.tree.map(lambda weight: not weight.is_vector, described(config))


def muon_dims(config: ModelConfig) -> Tree:
    """How Muon (Jordan et al. 2024) reads each weight as a matrix: from the dims it sums over to the dims it
    makes.

    Embedding and head, norms and biases are None: those are Adam's.
    """

    def numbers(weight: Weight):
        layout = parse_layout(weight.dims)
        if weight.is_vector or layout.region == "vocab":
            return None
        letters = layout.letters
        into = "d" if not letters.endswith("d") else letters.strip("ld")
        return optax.contrib.MuonDimensionNumbers(
            tuple(letters.index(x) for x in into),
            tuple(i for i, x in enumerate(letters) if x not in into + "l"),
        )

    return jax.tree.map(numbers, described(config))


@dataclass
class Report:
    """What a training run measured. Losses are nats per target; ``step_s`` is the median of steps after the
    first two. ``eval_losses`` are pairs of a number of steps done and the loss of held-out text after
    them."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    eval_losses: list[tuple[int, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    start: int = 0
    tokens_per_step: int = 0
    ideal_step_s: float | None = None
    memory_bytes: int = 0

    @property
    def step_s(self) -> float | None:
        """Median seconds per step, without the compiling ones; None before the first."""
        times = sorted(self.seconds[2:] or self.seconds)
        return times[len(times) // 2] if times else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the whole batch per second."""
        return self.tokens_per_step / self.step_s if self.step_s else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation (Chowdhery et al. 2022, appendix B); None where nobody said what the peak
        is."""
        return self.ideal_step_s / self.step_s if self.ideal_step_s and self.step_s else None


def made_of(stream: Stream, steps: int, options: OptimizerConfig, seed: int) -> dict[str, Any]:
    """What a run is made of besides its model, as a checkpoint remembers it (`checkpoint.FIXED`). No mesh and
    no plan: these change no loss."""
    corpus, config = stream.corpus, stream.config
    return {
        "data": {"name": corpus.source, "fingerprint": corpus.fingerprint},
        "tokenizer": corpus.tokenizer.identity,
        "seed": seed,
        "data_seed": config.seed,
        "held_out": config.held_out,
        "batch_size": config.batch_size,
        "seq_len": config.seq_len,
        "steps": steps,
    } | dataclasses.asdict(options)


def train(
    config: ModelConfig,
    plan: Plan,
    mesh: Mesh,
    stream: Stream,
    steps: int,
    options: OptimizerConfig = ADAMW,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
    log: str | None = None,
    on_step: Callable[[int, Report], None] | None = None,
    anyway: bool = False,
    held_out: Stream | None = None,
    eval_every: int = 0,
    eval_batches: int = 1,
    ideal_step_s: float | None = None,
    tell: Callable[[str], None] = lambda words: None,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[State, Report]:
    """Train to step ``steps``, from the newest checkpoint if there is one.

    Batches are a function of the step's number, so a resumed run repeats nothing and equals one that was
    never stopped. The state comes back, and lies in checkpoints, with its layers in the model's order,
    whatever the pipeline's. Raises FloatingPointError when a loss is not finite, naming the step; checkpoints
    taken before it stay.

    A checkpoint of other data, seeds or sizes is refused, unless ``anyway``; ``tell`` is told what else
    differs. Every ``eval_every`` steps, and after the last, ``eval_batches`` batches of ``held_out`` are
    evaluated (0: never). ``ideal_step_s`` is what a step's useful FLOPs would take at the devices' peak, from
    which the report has the utilisation. When ``stop`` says so after a step, the state is saved, if it is
    ever, and training ends.
    """
    plan.check(config, stream.config.batch_size, stream.config.seq_len)
    if steps < 1:
        raise ValueError(f"training to step {steps} does nothing; use 1 or more")
    if eval_every < 0 or eval_batches < 1:
        raise ValueError(
            f"evaluation every {eval_every} steps of {eval_batches} batches: use 0 (never) or more, and 1 or"
            " more"
        )
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError("JAX_ENABLE_X64 is on, but master weights are float32; switch it off")
    made = made_of(stream, steps, options, seed) if checkpoints else None
    writes = checkpoints is not None and (checkpoints.latest or 0) < steps
    with checkpoints.writing() if checkpoints and writes else contextlib.nullcontext(), _opened(log) as lines:
        step = Step(config, plan, mesh, make_optimizer(options, steps, config), options.clip)
        state = (
            checkpoints.restore(step.abstract_natural, config, made, anyway, tell) if checkpoints else None
        )
        resumed = state is not None
        state = step.init(seed) if state is None else step.from_natural(state)
        shape = stream.config.batch_size, stream.config.seq_len
        report = Report(start=int(state.step), tokens_per_step=shape[0] * shape[1], ideal_step_s=ideal_step_s)
        if resumed:
            tell(
                f"goes on from the checkpoint of step {report.start}"
                + "; nothing is left to do" * (report.start >= steps)
            )
        waiting: list[tuple[int, dict]] = []
        clock = time.perf_counter()

        def note(row: dict) -> None:
            if lines:
                print(json.dumps(row), file=lines, flush=True)

        def read() -> None:
            nonlocal clock
            number, metrics = waiting.pop(0)
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
            if not math.isfinite(loss + norm):
                if checkpoints and not math.isfinite(loss):
                    checkpoints.discard(number)  # its weights have just given this loss
                kept = checkpoints.latest if checkpoints else None
                saved = (
                    f"the checkpoint of step {kept} is intact"
                    if kept is not None
                    else "no checkpoint was taken"
                )
                found = f"the loss of step {number} is {loss}, its gradient's norm {norm}"
                raise FloatingPointError(f"{found}: stopped; {saved}; try a lower learning rate")
            now = time.perf_counter()
            report.seconds.append(now - clock)
            clock = now
            report.losses.append(loss)
            report.memory_bytes = _memory(mesh)
            report.grad_norms.append(norm)
            row = {"step": number, "loss": loss, "grad_norm": norm, "seconds": report.seconds[-1]}
            row |= {"resumed": report.start} if resumed and number == report.start else {}
            row |= (
                moe.summary(config.experts, metrics, plan.mesh.ep)
                if config.experts and "load" in metrics
                else {}
            )
            note(row)
            if on_step:
                on_step(number, report)

        for number in range(report.start, steps):
            state, metrics = step.run(state, _place(step, stream, number))
            waiting.append((number, metrics))
            if len(waiting) > 1:  # devices work on one step while the next is sent
                read()
            done, stopped = number + 1, stop()
            evaluates = held_out is not None and eval_every and (done % eval_every == 0 or done == steps)
            saves = checkpoints is not None and (stopped or checkpoints.due(done, steps))
            while waiting and (evaluates or saves):
                read()  # never keep what a bad step has spoiled
            if evaluates or saves:
                natural = step.to_natural(state)
                if held_out and evaluates:
                    report.eval_losses.append((done, _evaluate(step, natural, held_out, eval_batches)))
                    note({"steps_done": done, "eval_loss": report.eval_losses[-1][1]})
                    if on_step:
                        on_step(number, report)
                if checkpoints and saves:
                    checkpoints.save(done, natural, config, made)
                state = step.from_natural(natural)
                clock = time.perf_counter()
            if stopped:
                break
        while waiting:
            read()
        return step.to_natural(state), report


def _evaluate(step: Step, state: State, held_out: Stream, batches: int) -> float:
    """The mean cross-entropy of the first targets of a text that is not trained on, in nats; without the
    routers' losses."""
    told = [jax.device_get(step.evaluate(state.params, _place(step, held_out, i))) for i in range(batches)]
    loss, tokens = (sum(float(x[i]) for x in told) for i in (0, 1))
    return loss / max(tokens, 1)


def _place(step: Step, stream: Stream, number: int) -> dict:
    """The step's batch on its devices; every process makes only the rows that its own devices hold, and each
    of them once."""
    shape = stream.config.batch_size, stream.config.seq_len
    rows = functools.cache(lambda begin, end: stream.local_batch(number, slice(begin, end)))

    def piece(name: str, index: tuple[slice, ...]) -> np.ndarray:
        return rows(*index[0].indices(shape[0])[:2])[name][:, index[1]]

    on_devices = functools.partial(jax.make_array_from_callback, shape, step.batch_sharding)
    return {name: on_devices(functools.partial(piece, name)) for name in step.abstract_batch(*shape)}


def _memory(mesh: Mesh) -> int:
    """Peak bytes in use on the fullest local device, where the platform counts them; else 0."""
    local = [d.memory_stats() or {} for d in mesh.devices.flat if d.process_index == jax.process_index()]
    return max((stats.get("peak_bytes_in_use", 0) for stats in local), default=0)


@contextlib.contextmanager
def _opened(path: str | None) -> Iterator[Any]:
    """A JSONL log opened for appending (by the first process), or nothing. A line that a killed run left torn
    is ended."""
    if path is None or jax.process_index() != 0:
        yield None
        return
    try:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+")
    except OSError as error:
        raise ValueError(f"cannot write the log '{path}': {error.strerror}; give another file") from error
    with file:
        if file.tell() and file.seek(file.tell() - 1) is not None and file.read(1) != "\n":
            file.write("\n")
        yield file
