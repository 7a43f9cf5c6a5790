"""Answer many requests with one cache: they wait for a slot, join and leave between steps.

Before each step those that wait take free slots, first come, first served (Yu et al. 2022, Orca). A step
takes of every running request what is not in the cache yet: a piece of its prompt, or the token chosen last.
Where all take one a narrow step runs, else one as wide as a chunk: two programs serve all (a third ``echo``).
"""

import functools
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass, replace
from typing import Annotated, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from llmpar.files import Allowed, CheckedFields, check_fields
from llmpar.model.weights import Tree
from llmpar.plan.model_config import Count, ModelConfig, Rate, Share
from llmpar.plan.plan import Plan
from llmpar.plan.serving import BEST
from llmpar.serve.decode import Decoder, DecoderInput


@dataclass(frozen=True)
class Request(CheckedFields):
    """What to continue, and how."""

    tokens: tuple[int, ...]
    max_tokens: Count = 64  # to add, at most
    temperature: Rate = 0.0  # 0: the likeliest token
    top_p: Share = 1.0
    top_k: Count = 0  # 0: all
    seed: Annotated[int | None, Allowed(int, none=True)] = None  # draws the same again; None: any
    ends: frozenset[int] = frozenset()  # tokens that end the answer; they are reported too
    # so many of the likeliest
    logprobs: Annotated[int | None, Allowed(int, 0, BEST, none=True)] = None
    echo: bool = False  # report the prompt's tokens too


@dataclass(frozen=True)
class Event:
    """A token of a request, its end, or both: a token of ``ends`` comes with ``finish="stop"``."""

    ticket: int
    token: int | None = None  # None: cancelled, or nothing was to be added
    # natural; None for a prompt's first token, which nothing comes before
    logprob: float | None = None
    best: tuple[tuple[int, float], ...] = ()
    finish: Literal[None, "stop", "length", "cancelled"] = None
    of_prompt: bool = False


class Full(Exception):
    """The queue is full: come back later."""


@dataclass
class _Job:
    ticket: int
    request: Request
    known: list[int]  # the prompt, and what was chosen
    taken: int = 0  # how many of them the cache holds
    cancelled: bool = False

    def fill(self, rows: DecoderInput, slot: int) -> None:
        """Write the input of the next step."""
        request, width = self.request, rows.tokens.shape[1] - 1
        piece = self.known[self.taken :][: width + 1]
        numbers = (
            self.taken,
            min(len(piece), width),
            request.seed,
            request.top_k,
            request.top_p,
            request.temperature,
        )
        rows.tokens[slot, : len(piece)] = piece
        for column, number in zip(rows[1:], numbers, strict=True):
            column[slot] = number

    def events(
        self, num: int, tokens: np.ndarray, logprobs: np.ndarray, length: int
    ) -> Iterator[Event]:
        """Yield the events of a step that took ``num`` tokens, from the numbers ``s n`` of a `Decoder`."""
        request, prompt = self.request, len(self.request.tokens)

        def event(place: int, which: int) -> Event:
            pairs = [*zip(tokens[place].tolist(), logprobs[place].tolist(), strict=True)]
            best = tuple(pairs[2:][: request.logprobs or 0])
            return Event(self.ticket, *pairs[which], best, of_prompt=which == 1)

        if request.echo and self.taken == 0:
            yield Event(self.ticket, self.known[0], of_prompt=True)
        yield from (
            event(place, 1) for place in range(min(num, prompt - 1 - self.taken) * request.echo)
        )
        self.taken += num
        if self.taken == len(self.known):
            last = event(min(num, len(tokens)) - 1, 0) if request.max_tokens else Event(self.ticket)
            self.known += [last.token] if last.token is not None else []
            full = len(self.known) == prompt + request.max_tokens or len(self.known) > length
            yield replace(
                last, finish="stop" if last.token in request.ends else "length" if full else None
            )


@dataclass
class Engine:
    """Continues many requests at once: `submit`, then `step` from one thread while `busy`. Others may call
    `submit` and `cancel`. Several processes that run one engine make the same calls in the same order."""

    config: ModelConfig
    plan: Plan
    mesh: Mesh
    params: InitVar[Tree]
    slots: int = 8  # requests that run at a time, a multiple of dp·fsdp·ep
    length: int = 512  # positions of each: prompt and answer, but for the last token
    # tokens of a prompt that a step takes: with more it is faster, and others wait longer
    chunk: int = 32
    queue: int = 64  # requests that may wait for a slot

    def __post_init__(self, params: Tree) -> None:
        check_fields(self)
        self.decoder = Decoder(self.config, self.plan, self.mesh, params, self.slots, self.length)
        self._lock, self._waiting, self._running = (
            threading.Lock(),
            deque[_Job](),
            dict[int, _Job](),
        )
        self._counts = Counter(slots=self.slots, submitted=0, steps=0, wide_steps=0, tokens=0)

    @functools.cached_property
    def _seeds(self) -> np.random.Generator:
        """What draws the seeds of requests that have none: the same in all processes of the job, which an
        engine on the devices of a few of them cannot ask."""
        present = len({d.process_index for d in self.mesh.devices.flat})
        if present < (num := jax.process_count()):
            raise ValueError(
                f"a request without a seed, and its engine is on devices of {present} of {num} processes,"
                " which draw none together; give each request a seed"
            )
        luck = multihost_utils.broadcast_one_to_all(
            np.random.default_rng().integers(1 << 31, dtype="i4")
        )
        return np.random.default_rng(int(luck))

    def submit(self, request: Request) -> int:
        """Put a request into the queue and return its ticket; ValueError for a wrong prompt, `Full` for a
        full queue."""
        tokens, size = request.tokens, self.config.vocab_size
        fits = all(isinstance(x, int | np.integer) and 0 <= x < size for x in tokens)
        if not fits or not 1 <= len(tokens) <= self.length:
            raise ValueError(
                f"a prompt of {len(tokens):,} tokens cannot be continued here; use 1 to"
                f" {self.length:,} whole numbers below {size:,}"
            )
        with self._lock:
            if len(self._waiting) >= self.queue + self.slots - len(self._running):
                raise Full(f"{len(self._waiting)} requests wait already; come back later")
            self._counts["submitted"] += 1
            seed = int(self._seeds.integers(1 << 32) if request.seed is None else request.seed)
            request = replace(request, seed=seed % (1 << 32))
            self._waiting.append(_Job(self._counts["submitted"], request, [*map(int, tokens)]))
            return self._counts["submitted"]

    def warm_up(self) -> None:
        """Compile all programs that a step may need, before the first request."""
        # the first step's cache is new: JAX compiles another for it
        for echo in (False, True, False):
            self.submit(Request((0, 0), 2, echo=echo))
            while self.busy:
                self.step()

    def cancel(self, ticket: int) -> None:
        """End a request before the next step, which reports it. A request that has ended stays as it is."""
        with self._lock:
            for job in (*self._waiting, *self._running.values()):
                job.cancelled |= job.ticket == ticket

    @property
    def busy(self) -> bool:
        """Return whether a request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def figures(self) -> dict[str, int]:
        """Return the numbers of slots, running and waiting requests, and the counts since the start."""
        return {**self._counts, "running": len(self._running), "waiting": len(self._waiting)}

    def step(self) -> list[Event]:
        """Let requests leave and join, run one step for those with a slot, and return its events. If anything
        is raised (ValueError if the model gives NaN), all requests are lost."""
        with self._lock:
            present = *self._waiting, *self._running.values()
            events = [Event(job.ticket, finish="cancelled") for job in present if job.cancelled]
            self._waiting = deque(job for job in self._waiting if not job.cancelled)
            self._running = {slot: job for slot, job in self._running.items() if not job.cancelled}
            free = [slot for slot in range(self.slots) if slot not in self._running]
            self._running |= {slot: self._waiting.popleft() for slot in free[: len(self._waiting)]}
            jobs = dict(self._running)
        if not jobs:
            return events
        echo = any(
            job.request.echo and job.taken < len(job.request.tokens) for job in jobs.values()
        )
        wide = echo or any(len(job.known) - job.taken > 1 for job in jobs.values())
        rows = DecoderInput.idle(self.slots, min(self.chunk, self.length) if wide else 1)
        for slot, job in jobs.items():
            job.fill(rows, slot)
        try:
            tokens, logprobs = self.decoder(rows, echo)
        except BaseException:  # the cache may be lost, or hold NaN, which no mask hides
            self.decoder.cache = self.decoder.empty()
            with self._lock:
                self._waiting, self._running = deque(), {}
            raise
        with self._lock:
            for slot, job in jobs.items():
                events_of_job = [
                    *job.events(rows.num[slot], tokens[:, slot], logprobs[:, slot], self.length)
                ]
                if events_of_job and events_of_job[-1].finish:
                    del self._running[slot]
                events += events_of_job
            made = sum(event.token is not None and not event.of_prompt for event in events)
            self._counts.update(steps=1, wide_steps=wide, tokens=made)
        return events


def generate(engine: Engine, requests: Iterable[Request]) -> list[list[int]]:
    """Return the tokens that follow each prompt, without an end token."""
    tokens = lambda events: [e.token for e in events if e.token is not None and e.finish != "stop"]
    return [tokens(events) for events in answer_all(engine, requests)]


def answer_all(engine: Engine, requests: Iterable[Request]) -> list[list[Event]]:
    """Return the events of each answer, without those of its prompt."""
    ask, made = deque(requests), dict[int, list[Event]]()
    while ask or engine.busy:
        while ask and engine.figures["waiting"] < engine.queue:
            made[engine.submit(ask.popleft())] = []
        for event in engine.step():
            if not event.of_prompt:
                made[event.ticket].append(event)
    return list(made.values())
