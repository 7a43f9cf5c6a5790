"""Many requests share one cache: each is answered as if it were alone, and nothing of it stays."""

import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest
from parity import LLAMA, MOE, QWEN, weights
from test_decode import LORA, answers, engine, whole

from llmpar.plan.plan import Plan
from llmpar.serve.engine import Full, Request, generate

EVERYTHING = dataclasses.replace(QWEN, name="tiny-everything", window=7, lora=LORA.lora)
WINDOW = dataclasses.replace(LLAMA, name="tiny-window", window=7)
ALONE = Plan("dp=1", zero=0)
LENGTH = 43


@functools.cache
def kept(config=LLAMA, slots=4, length=LENGTH, chunk=8, queue=400):
    """An engine on one device, which the tests here share with its programs."""
    return engine(config, ALONE, slots, length, chunk=chunk, queue=queue)


def alone(config):
    """An engine for one request at a time, with other pieces of prompts."""
    return kept(config, 1, chunk=9)


def asked(rng, config, **more) -> Request:
    """A random request."""
    tokens = tuple(rng.integers(0, config.vocab_size, rng.integers(1, LENGTH)).tolist())
    return Request(tokens, int(rng.integers(0, 20)), **more)


CASES = [pytest.param(EVERYTHING, "tp=2 dp=2 sp=2", marks=pytest.mark.long)]
CASES += [pytest.param(MOE, "ep=4 sp=2", marks=pytest.mark.long)]
"""Of experts one token to a rank, and fewer slots than experts."""


@pytest.mark.parametrize("config, mesh", CASES, ids=lambda x: getattr(x, "name", x))
def test_answers_at_random_times_among_cancellations_are_those_of_each_alone(config, mesh):
    """Greedy ones, scored prompts, and drawn ones whose seeds are told; ends in the middle of an answer."""
    rng = np.random.default_rng(7)
    run, want, found, cancelled = engine(config, Plan(mesh), 4, LENGTH, chunk=5), {}, {}, set()
    drawn = {"temperature": 1.0, "top_p": 0.9, "top_k": 50}
    while len(want) < 40 or run.busy:
        for _ in range(rng.poisson(0.7) * (len(want) < 40)):
            how = {}, {"echo": True, "logprobs": 2}, drawn | {"seed": int(rng.integers(1 << 40))}
            request = asked(rng, config, **how[rng.integers(3)])
            if len(want) % 3 == 0 and (made := generate(alone(config), [request])[0]):
                ends = frozenset({made[len(made) // 2], request.tokens[0]})
                request = dataclasses.replace(request, ends=ends)
            want[run.submit(request)] = answers(alone(config), request)[0]
        if rng.random() < 0.15 and want:
            cancelled.add(int(rng.choice(list(want))))
            run.cancel(max(cancelled))
        for event in run.step():
            found.setdefault(event.ticket, []).append(event)
    assert found.keys() == want.keys() and run.figures["running"] == run.figures["waiting"] == 0
    assert {events[-1].finish for events in found.values()} == {"stop", "length", "cancelled"}
    for ticket, events in found.items():
        if events[-1].finish == "cancelled":
            assert ticket in cancelled and events.pop().token is None
        else:
            assert len(events) == len(want[ticket])
        for event, other in zip(events, want[ticket], strict=False):
            same = dataclasses.replace(other, ticket=event.ticket, logprob=event.logprob, best=event.best)
            assert event == same and len(event.best) == len(other.best)
            assert event.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_stale_keys_of_earlier_requests_are_never_seen():
    run = engine(WINDOW, Plan("sp=2", zero=0), 2, LENGTH, chunk=4)
    requests = [Request(tuple(range(n)), 9, echo=True) for n in (3, 17)]
    fresh = answers(run, *requests)
    run.decoder.cache = jax.tree.map(lambda x: x * 0 + 30, run.decoder.cache)
    dirty = answers(run, *requests)
    for clean, other in zip(sum(fresh, []), sum(dirty, []), strict=True):
        assert dataclasses.replace(clean, ticket=0) == dataclasses.replace(other, ticket=0)


short = functools.partial(kept, slots=2, length=12, chunk=32, queue=2)


def test_first_come_first_served_and_a_full_queue_says_so():
    run, before = short(), short().figures["submitted"]
    *first, third, fourth = (run.submit(Request((1,), 3)) for _ in range(4))
    with pytest.raises(Full, match="4 requests wait already; come back later"):
        run.submit(Request((1,)))
    assert run.figures | {"waiting": 4, "running": 0, "submitted": before + 4} == run.figures
    order = []
    while run.busy:
        order += [event.ticket for event in run.step()]
    assert order == first * 3 + [third, fourth] * 3


def test_edges_of_a_request():
    run = short()
    run.warm_up()
    prompt, compiled = (5, 6, 7) * 4, run.decoder.run._cache_size()
    ended = Request(prompt[:11], ends=frozenset(prompt))
    full, none, last = answers(run, Request(prompt), Request(prompt[:3], 0), ended)
    assert len(full) == 1 and full[0].finish == "length"
    assert full[0].token == whole(LLAMA, prompt)[-1].argmax()
    assert [(event.token, event.finish) for event in none] == [(None, "length")]
    assert len(last) in (1, 2) and last[-1].finish in ("length", "stop")
    (scored,) = answers(run, Request(prompt, 0, echo=True, logprobs=1))
    assert [event.token for event in scored] == [*prompt, None] and scored[-1].finish == "length"
    assert all(len(event.best) == 1 for event in scored[1:-1]) and not run.busy
    (single,) = answers(run, Request((3,), 1, echo=True))
    assert [(event.of_prompt, event.logprob is None) for event in single] == [(True, True), (False, False)]
    assert run.decoder.run._cache_size() == compiled


def test_cancelling_twice_late_or_while_waiting():
    run = short()
    runs, _, waits, more = (run.submit(Request((1,), 4)) for _ in range(4))
    run.step()
    for ticket in (runs, runs, waits, 99):
        run.cancel(ticket)
    events = run.step()
    ends = [(event.ticket, event.finish) for event in events[:2]]
    assert ends == [(waits, "cancelled"), (runs, "cancelled")]
    assert more in [event.ticket for event in events[2:]], "the slot is free at once"
    while run.busy:
        events = run.step()
    assert events[-1].finish == "length"
    run.cancel(more)
    assert not run.step() and not run.busy


def test_weights_of_nan_are_an_error_and_the_engine_goes_on():
    params = weights(LLAMA)
    bad = params | {"embedding": np.asarray(params["embedding"]).copy()}
    bad["embedding"][9] = np.nan
    run = engine(LLAMA, ALONE, 4, LENGTH, bad, chunk=8)
    run.decoder.run = kept().decoder.run
    good, wrong = Request((1, 2, 3), 3), Request((9, *range(20)), 0)
    want = generate(run, [good])
    run.submit(wrong)
    with pytest.raises(ValueError, match="weights hold NaN, or overflow; load others, or use float32"):
        run.step()
    assert not run.busy and generate(run, [good]) == want, "NaN stays in no slot"


def test_requests_and_cancellations_come_from_other_threads():
    run, told, lock = kept(), {}, threading.Lock()

    def client(seed):
        rng = np.random.default_rng(seed)
        for _ in range(40):
            ticket = run.submit(asked(rng, LLAMA))
            with lock:
                told[ticket] = 0
            if rng.random() < 0.3:
                run.cancel(ticket)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    ended = []
    while run.busy or any(thread.is_alive() for thread in threads):
        ended += [event.ticket for event in run.step() if event.finish]
    assert sorted(ended) == sorted(told) and len(ended) == 160
