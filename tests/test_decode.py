"""A cut cache gives what the whole forward pass gives; each request is answered as if it were alone."""

import dataclasses
import functools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import LLAMA, MOE, QWEN, by_arrow, family, full_rows, logits_of, name, predicted_by_arrow, weights

from llmpar.inspect.census import census_hlo, compiled_memory, executed_flops, read_program
from llmpar.parallel.mesh import make_mesh, split_axes
from llmpar.plan.model_config import LoraConfig
from llmpar.plan.plan import Plan
from llmpar.plan.serving import BEST
from llmpar.predict import serving, traffic
from llmpar.serve.decode import Decoder, DecoderInput, choose_tokens
from llmpar.serve.engine import Engine, Event, Full, Request, generate

B, S, MORE = 2, 11, 6
PROMPT = np.random.default_rng(3).integers(0, 256, (B, S)).astype(np.int32)
LORA = dataclasses.replace(QWEN, name="tiny-lora", lora=LoraConfig(4, 8.0, ("q", "v", "o", "up", "down")))
COPIES = dataclasses.replace(QWEN, name="copies", num_heads=8, num_kv_heads=2, window=4)
TIGHT = dataclasses.replace(MOE, experts=dataclasses.replace(MOE.experts, capacity_factor=0.25))


def engine(config, plan, slots=B, length=S + MORE, params=None, **sizes) -> Engine:
    return Engine(config, plan, make_mesh(plan.mesh), params or weights(config), slots, length, **sizes)


def answers(run: Engine, *requests: Request) -> list[list[Event]]:
    """The events of each request, all submitted before the first step."""
    found = {run.submit(request): [] for request in requests}
    while run.busy:
        for event in run.step():
            found[event.ticket].append(event)
    return list(found.values())


def whole(config, tokens):
    """Log-probabilities after every position, without a cache."""
    batch = full_rows(np.asarray(tokens, np.int32)[None])
    return np.asarray(jax.nn.log_softmax(logits_of(config)(weights(config), batch)[0]))


def assert_as_whole(request, events, want):
    """An echoed prompt and the likeliest tokens, with these log-probabilities to 1e-5 of the largest."""
    length = len(request.tokens)
    assert tuple(event.token for event in events[:length]) == request.tokens
    assert [event.of_prompt for event in events] == [True] * length + [False] * request.max_tokens
    assert events[0].logprob is None and events[-1].finish == "length"
    for event, row in zip(events[1:], want, strict=False):
        assert abs(event.logprob - row[event.token]) <= 1e-5 * np.abs(row).max()
        assert event.of_prompt or event.token == row.argmax()


late = lambda cases: [pytest.param(*case, marks=pytest.mark.long) for case in cases]
PLANS = [
    (COPIES, Plan("sp=2 tp=4", zero=0)),
    (TIGHT, Plan("ep=2 sp=2", zero=0)),
    (dataclasses.replace(family("deepseek_v2"), num_layers=2), Plan("sp=2 tp=2")),
    (dataclasses.replace(family("llama4_text"), num_layers=4), Plan("sp=2 tp=2")),
    (family("gpt_oss"), Plan("ep=2 tp=2", zero=0)),
]
PLANS[2:] = late(PLANS[2:])


@pytest.mark.parametrize("config, plan", PLANS, ids=lambda x: name(x) if isinstance(x, Plan) else x.name)
def test_a_cache_gives_the_probabilities_of_the_whole_forward_pass(config, plan):
    """Prompts in pieces of 4, then token by token, to 1e-5 of the largest; experts drop none."""
    experts = config.experts and dataclasses.replace(config.experts, capacity_factor=None)
    run = engine(config, plan, chunk=4)
    asked = [Request(tuple(row), MORE, echo=True, logprobs=BEST) for row in PROMPT.tolist()]
    for request, events in zip(asked, answers(run, *asked), strict=True):
        want = whole(dataclasses.replace(config, experts=experts), [event.token for event in events])
        assert_as_whole(request, events, want)
        for at, event in enumerate(events[1:]):
            allowed = 1e-5 * np.abs(want[at]).max()
            assert all(abs(logprob - want[at, token]) <= allowed for token, logprob in event.best)
            assert [x for _, x in event.best] == sorted((x for _, x in event.best), reverse=True)
            assert abs(event.best[0][1] - want[at].max()) <= allowed
    heads = max(1, config.num_kv_heads // plan.mesh.tp)
    shard = run.decoder.cache[-1].addressable_shards[0].data
    assert shard.shape[3] == heads, "a head has one copy at most"


STEPS = [
    (LLAMA, Plan("tp=2 dp=2 sp=2", zero=0), 1, False, 1 << 16),
    (COPIES, Plan("sp=2 tp=4", zero=0), 4, True, 37),
    (MOE, Plan("dp=2 ep=2 tp=2", zero=0), 1, False, 37),
    (LLAMA, Plan("sp=8", zero=0, dtype="bfloat16"), 4, True, 37),
    (LORA, Plan("fsdp=2 sp=2 tp=2"), 4, False, 37),
    (family("qwen3_5_text"), Plan("fsdp=2 sp=2 tp=2"), 4, False, 37),
]
STEPS[4:] = late(STEPS[4:])


@pytest.mark.parametrize(
    "config, plan, width, echo, length",
    STEPS,
    ids=lambda x: name(x) if isinstance(x, Plan) else getattr(x, "name", str(x)),
)
def test_a_step_sends_holds_and_multiplies_what_is_predicted(config, plan, width, echo, length):
    """A long cache costs no copy of itself."""
    rows = 4
    run = Decoder(config, plan, make_mesh(plan.mesh), weights(config), rows, length)
    mesh = split_axes(make_mesh(plan.mesh), run.plan.mesh)
    lowered = run.run.lower(run.params, run.cache, DecoderInput.idle(rows, width), echo)
    compiled, text = read_program(lowered)
    census = census_hlo(text, mesh)
    assert all(c.arrow for c in census)
    assert by_arrow(census) == predicted_by_arrow(traffic.serving_traffic(run.plan, rows, width, echo))
    held = serving.device_cache_bytes(run.plan, rows, length)
    assert {sum(x.addressable_shards[i].data.nbytes for x in run.cache) for i in range(8)} == {held}
    assert compiled_memory(compiled)["alias_bytes"] == held, "the cache is not written in place"
    assert length == 37 or compiled_memory(compiled)["temp_bytes"] < held
    flops = serving.device_flops(run.plan, rows, length, width, echo)
    if config.experts is None:
        assert executed_flops(text) == sum(flops.values())
    else:  # whose loops no census counts. Routers are not cut by tp
        routers = math.prod(config.weights()["blocks.experts.router"].shape)
        left_out = lambda path, w: w.is_vector or path in ("embedding", "head")
        besides = sum(math.prod(w.shape) for path, w in config.weights().items() if left_out(path, w))
        useful = config.active_params - besides + (plan.mesh.tp - 1) * routers
        assert flops["weights"] * plan.mesh.size == 2 * rows * width * useful


def test_only_tokens_are_written():
    """Not what fills a row up to the step's width, nor an idle row."""
    run = Decoder(LLAMA, Plan("sp=2", zero=0), make_mesh("sp=2"), weights(LLAMA), 3, 8)
    rows = DecoderInput.idle(3, 4)
    rows.start[1], rows.num[:] = 3, (0, 2, 4)
    run(rows)
    for held in run.cache:
        ranks = np.asarray(held).any((0, 3, 4)).reshape(3, 2, 4)  # a rank's share lies side by side
        assert [np.nonzero(row.T.reshape(-1))[0].tolist() for row in ranks] == [[], [3, 4], [0, 1, 2, 3]]


def test_a_prompt_that_cannot_be_continued_is_refused_and_not_kept():
    run = engine(LLAMA, Plan("dp=1"), length=6)
    for tokens in ((), (1,) * 7, (-1,), (LLAMA.vocab_size,), (1.0,), ("a",)):
        with pytest.raises(ValueError, match=f"a prompt of {len(tokens)} tokens cannot be continued here"):
            run.submit(Request(tokens))
    assert not run.busy


chosen = jax.jit(choose_tokens)


def drawn(logits, positions=None, seeds=0, temperature=1.0, top_k=0, top_p=1.0):
    """One token for each row of logits."""
    num = len(logits)
    rows = DecoderInput.idle(num)
    for column, value in zip(rows[3:], (seeds, top_k, top_p, temperature), strict=True):
        column[:] = value
    positions = np.arange(num) if positions is None else positions
    positions = np.asarray(positions, np.int32)
    found = chosen(jnp.asarray(logits, jnp.float32), np.zeros(num, np.int32), positions, rows)
    return np.asarray(found)[:, 0]


LOGITS = np.array([0.0, 1.0, 3.0, -1.0, 2.5])


@pytest.mark.parametrize(
    "top_k, top_p", [(0, 1.0), (3, 1.0), (0, 0.8), (3, 0.6), (1, 1.0), (0, 0.0), (9, 0.01)]
)
def test_shares_are_those_of_the_softmax_over_temperature_of_the_tokens_that_are_left(top_k, top_p):
    """Many rows at temperature 2: within 4 standard deviations."""
    rows = 20_000
    share = np.exp(LOGITS / 2)
    order = np.argsort(-share)
    share[order[top_k or 5 :]] = 0
    share /= share.sum()
    before = np.cumsum(share[order]) - share[order]
    share[order[1:][before[1:] >= top_p]] = 0
    share /= share.sum()
    found = drawn(np.tile(LOGITS, (rows, 1)), seeds=3, temperature=2.0, top_k=top_k, top_p=top_p)
    found = np.bincount(found, minlength=5) / rows
    assert np.all(np.abs(found - share) <= 4 * np.sqrt(share * (1 - share) / rows)), (found, share)


def test_seed_and_position_alone_decide():
    """From 1,000 equal logits: other seeds and positions draw anew; the row and its company are no matter."""
    even = np.zeros((16, 1000))
    at_places, of_seeds = drawn(even), drawn(even, np.zeros(16), np.arange(16))
    assert len(set(at_places)) > 8 and len(set(of_seeds)) > 8
    logits = np.tile([1.0, 28.0, -5.0, 27.5], (50, 1))
    for temperature in (0.0, 1e-3, 1e-30, 1e-45):
        assert set(drawn(logits, temperature=temperature).tolist()) == {1}, "the likeliest"
    assert drawn(even[:1], [5]) == at_places[5] and drawn(even[:1], [0], 7) == of_seeds[7]


EVERYTHING = dataclasses.replace(QWEN, name="tiny-everything", window=7, lora=LORA.lora)
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

    ended = []
    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client, seed) for seed in range(4)]
        while run.busy or not all(one.done() for one in clients):
            ended += [event.ticket for event in run.step() if event.finish]
    assert sorted(ended) == sorted(told) and len(ended) == 160
