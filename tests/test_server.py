"""`llmpar serve`: what clients may rely on, by an engine that says what it is told to, and by a real one."""

import concurrent.futures
import contextlib
import functools
import gc
import http.client
import itertools
import json
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import shared
import small_cluster
from shared import HERE

from llmpar.serve import server
from llmpar.serve.engine import Event, Full
from llmpar.training.chat import Chat
from llmpar.training.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()


class Script:
    """An engine that answers with what stands behind "say " in the prompt, or else with dots for ever."""

    def __init__(self, slots=2, queue=4, step_s=0.0):
        self.slots, self.queue, self.step_s, self.error = slots, queue, step_s, None
        self.jobs, self.gone, self.cancelled, self.tickets = {}, set(), set(), itertools.count()

    def submit(self, request):
        if len(self.jobs) >= self.slots + self.queue:
            raise Full("4 requests wait already; come back later")
        if max(request.tokens) > 256:
            raise ValueError("token 257 is none of this model's; use 0 to 256")
        said = bytes(x for x in request.tokens if x < 256).partition(b"say ")[2]
        ticket = next(self.tickets)
        self.jobs[ticket] = request, self.events(ticket, request, said)
        return ticket

    def events(self, ticket, request, said):
        best = ((46, -0.25), (65, -1.5), (200, float("-inf")))[: request.logprobs or 0]
        echo = request.tokens if request.echo else ()
        for at, token in enumerate(echo):
            how = {"logprob": -0.5, "best": best} if at else {}
            yield Event(ticket, token, **how, of_prompt=True)
        for made, token in enumerate([*said, 256] if said else itertools.repeat(46), 1):
            if made > request.max_tokens:
                yield Event(ticket, finish="length")
            last = "stop" if token in request.ends else "length" if made == request.max_tokens else None
            yield Event(ticket, token, -0.5, best, finish=last)

    def cancel(self, ticket):
        self.gone.add(ticket)
        self.cancelled.add(ticket)

    @property
    def busy(self):
        return bool(self.jobs)

    @property
    def figures(self):
        return {"slots": self.slots, "running": len(self.jobs)}

    def step(self):
        time.sleep(self.step_s)
        if self.error:
            raise self.error
        found = [Event(ticket, finish="cancelled") for ticket in self.gone if ticket in self.jobs]
        found += [next(self.jobs[x][1]) for x in [x for x in self.jobs if x not in self.gone][: self.slots]]
        for event in found:
            if event.finish:
                del self.jobs[event.ticket]
        self.gone.clear()
        return found


@contextlib.contextmanager
def serving(engine, room=0, **how):
    """A server in this process: its port, and what it knows."""
    about, how = {"model": "toy", "mesh": "tp=2"}, {"length": 10_000, "chat": Chat(BYTES)} | how
    api = server.Api(server.EngineThread(engine), BYTES, about=about, **how)
    listening = socket.create_server(("127.0.0.1", 0))
    if room:  # of bytes, so that who does not read is soon noticed
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
    here = server.Server(api, said.append)
    thread = threading.Thread(target=here.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not here.started:
            time.sleep(0.01)
        yield listening.getsockname()[1], here
    finally:
        here.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


said = []


def ask(port, body, path="/v1/completions", **headers):
    """The status and the document, or the events, of one request."""
    headers = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as line:
        line.request("POST" if raw is not None else "GET", path, raw, headers)
        response = line.getresponse()
        text = response.read().decode()
    kind = response.headers["content-type"]
    if kind.startswith("text/event-stream"):
        parts = text.replace("data: ", "").split("\n\n")[:-1]
        return response, [x if x == "[DONE]" else json.loads(x) for x in parts]
    return response, json.loads(text) if kind == "application/json" else text


def told(prompt, tokens, stops=(), echo=False, decode=BYTES.decode):
    """The pieces of text of an answer, and why it ended."""
    choice = server.Choice(decode, prompt, stops, echo)
    before = [Event(0, token, -0.5, of_prompt=True) for token in prompt if echo]
    pieces = ["".join(choice.take(event)[0] for event in before)]
    for at, token in enumerate(tokens, 1):
        ends = "length" if at == len(tokens) else None
        text, _, finish = choice.take(Event(0, token, -0.5, finish=ends))
        pieces.append(text)
        if finish:
            return pieces, finish
    raise AssertionError("no end")


def test_no_part_of_a_stop_string_is_told_and_nothing_else_is_lost():
    """Against `str.find` on the whole text, letter by letter and with stops that begin alike."""
    rng = random.Random(0)
    for _ in range(30):
        text = "".join(rng.choices("ab€", k=40))
        stops = ["".join(rng.choices("ab€", k=rng.randint(1, 5))) for _ in range(3)]
        pieces, finish = told([256], list(text.encode()), stops)
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        first = min(ends, default=None)
        begin = min((text.find(x) for x in stops if x in text[:first]), default=None)
        assert "".join(pieces) == text[: begin if ends else None]
        assert finish == ("stop" if ends else "length")


@pytest.fixture(scope="module")
def port():
    with serving(Script(), length=200) as (port, _):
        yield port


@pytest.mark.parametrize(
    "stop, text", [(None, "é STOP €! 😀"), ("STOP", "é "), (["x", "OP", "€!"], "é ST"), ("P €", "é STO")]
)
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_stream_says_what_the_document_says(port, stop, text, logprobs):
    body = {"prompt": ["say é STOP €! 😀", "say b"], "max_tokens": 30, "stop": stop, "logprobs": logprobs}
    _, whole = ask(port, body)
    _, events = ask(port, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]" and events[-2]["usage"] == whole["usage"] and events[-2]["choices"] == []
    for choice in whole["choices"]:
        mine = [x["choices"][0] for x in events[:-2] if x["choices"][0]["index"] == choice["index"]]
        assert "".join(x["text"] for x in mine) == choice["text"]
        assert [x["finish_reason"] for x in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        for name in choice["logprobs"] or ():
            assert [y for x in mine for y in x["logprobs"][name]] == choice["logprobs"][name]
    assert whole["choices"][0]["text"] == text
    if stop and logprobs:
        assert max(whole["choices"][0]["logprobs"]["text_offset"]) < len(text)


def test_scores_of_a_prompt_are_as_an_evaluation_reads_them(port):
    """lm-eval: greedy where a token has the greatest of the log-probabilities at its place."""
    body = dict(prompt=[list(b"A."), list(b"xyz")], max_tokens=1, echo=True, logprobs=1, temperature=0)
    _, found = ask(port, body)
    first, second = (choice["logprobs"] for choice in found["choices"])
    assert first["tokens"] == ["A", ".", "."] and second["tokens"] == ["x", "y", "z", "."]
    assert second["token_logprobs"] == [None, -0.5, -0.5, -0.5] and second["top_logprobs"][0] is None
    assert second["top_logprobs"][1] == {"y": -0.5, ".": -0.25} and first["top_logprobs"][1] == {".": -0.25}
    assert second["text_offset"] == [0, 1, 2, 3] and found["choices"][1]["text"] == "xyz."
    _, found = ask(port, body | {"max_tokens": 0, "prompt": "é"})
    (choice,) = found["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:256", "token_id:195", "token_id:169"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0] and choice["text"] == "é"
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}


def test_the_client_of_openai_chats(port):
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0)
    (model,) = client.models.list().data
    how = {"model": model.id, "messages": [{"role": "user", "content": "say hi €"}], "stop": ["assistant"]}
    said = client.chat.completions.create(**how, logprobs=True, top_logprobs=3)
    assert said.choices[0].message.content == "hi €" and said.choices[0].finish_reason == "stop"
    content = said.choices[0].logprobs.content
    assert [x.token for x in content][:3] == ["h", "i", " "] and content[0].top_logprobs[2].logprob == -9999
    streamed = [*client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True})]
    assert "".join(x.choices[0].delta.content or "" for x in streamed if x.choices) == "hi €"
    assert streamed[-1].usage == said.usage and streamed[0].choices[0].delta.role == "assistant"
    with pytest.raises(openai.BadRequestError, match="'tools' is .*may change the answer"):
        client.chat.completions.create(**how, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.NotFoundError, match="no model 'other' here, but 'toy'"):
        client.chat.completions.create(**how | {"model": "other"})


ODD = [
    (b"\xff", "no JSON"),
    (b"[" * 100_000, "no JSON"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "no JSON"),
    ({"prompt": ["a"] * 65}, "prompt must be"),
    ({"prompt": "a" * 200}, "do not fit into 200 positions"),
    ({"messages": [{"role": "user", "content": ""}] * 201}, "201 messages do not fit into 200 positions"),
    ({"messages": [{"role": "user", "content": "a" * 99}] * 3}, "297 letters do not fit into 200 positions"),
    ({"prompt": ["b", "a" * 201]}, "201 letters do not fit into 200 positions of at most 1 letters"),
    ({"prompt": "a", "\ud800": 1}, "'\ud800' is 1, which is not implemented"),
    ({"messages": [{"role": "user", "content": "a", "\ud800": 1}]}, "a message has '\ud800'"),
]
WRONG = [*ODD, *((body.encode(), words) for body, words in shared.TABLES["server_refuses"])]


@pytest.mark.parametrize("body, words", WRONG)
def test_what_cannot_be_answered_is_refused_in_a_sentence(port, body, words):
    chat = b'"messages"' in body if isinstance(body, bytes) else "messages" in body
    response, said = ask(port, body, "/v1/chat/completions" if chat else "/v1/completions")
    assert response.status == 400 and words in said["error"]["message"]
    assert said["error"]["type"] == "invalid_request_error"


def test_what_asks_for_nothing_is_taken(port):
    body = dict(prompt="say a", n=1, best_of=1, logit_bias={}, suffix=None, user="me", stop=None)
    body |= dict(presence_penalty=0.0, top_k=-1, top_p=1)
    assert ask(port, body)[1]["choices"][0]["text"] == "a"


def test_other_paths_methods_and_kinds_are_refused_as_json(port):
    assert ask(port, None, "/v2")[1]["error"]["code"] == 404
    assert ask(port, None, "/v1/completions")[1]["error"]["code"] == 405
    for kind in ("text/plain", "application/jsonp", "", "text/plain; application/json"):
        assert ask(port, {"prompt": "a"}, Content_Type=kind)[1]["error"]["code"] == 415
    for kind in ("Application/JSON", "application/json; charset=utf-8", "application/json ;x"):
        assert ask(port, {"prompt": "say a"}, Content_Type=kind)[0].status == 200
    assert ask(port, None, "/health/", Host="evil.example")[0].status == 404, "no way to that host"
    assert ask(port, {"prompt": "a"}, Host="evil.example")[1]["error"]["code"] == 403
    assert ask(port, {"prompt": "a"}, Host="localhost.evil.example")[0].status == 403
    assert ask(port, None, "/health", Host=f"localhost:{port}")[1]["status"] == "ok"
    response, page = ask(port, None, "/")
    assert "default-src 'none'" in response.headers["content-security-policy"] and "<textarea" in page
    assert "://" not in page and response.headers["access-control-allow-origin"] is None


def test_a_key_is_asked_for_where_there_is_one():
    with serving(Script(), key="secret") as (port, _):
        for given in ("", "secret", "Bearer", "Bearer secre", "Bearer secret2", "Bearer sécret"):
            response, said = ask(port, {"prompt": "say a"}, Authorization=given.encode("latin-1"))
            assert response.status == 401 and response.headers["www-authenticate"] == "Bearer"
        for scheme in ("Bearer", "bearer", "BEARER ", "bEARER"):
            assert ask(port, {"prompt": "say a"}, Authorization=f"{scheme} secret")[0].status == 200
        assert ask(port, {"prompt": "say a"}, Authorization="Basic secret")[0].status == 401
        assert ask(port, None, "/v1/models")[0].status == 401 and ask(port, None, "/health")[0].status == 200


until = functools.partial(small_cluster.until, what="what must come")
OPEN = []


@pytest.fixture(autouse=True)
def _no_connection_stays_open():
    yield
    while OPEN:
        OPEN.pop().close()


def connect(port):
    """A connection, which ends with the test."""
    OPEN.append(line := socket.socket())
    line.settimeout(60)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.connect(("127.0.0.1", port))
    return line


def send(port, body, path="/v1/completions", length=None):
    """A connection on which a request was sent, and no answer was read."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    line = connect(port)
    line.sendall(f"{head}Content-Length: {length or len(raw)}\r\n\r\n".encode() + raw)
    return line


FOREVER = {"prompt": "dots", "max_tokens": 9_000}  # minutes


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(stream):
    engine = Script(step_s=0.02)
    with serving(engine) as (port, _):
        lines = [send(port, FOREVER | {"stream": stream, "prompt": ["a", "b"]}) for _ in range(2)]
        until(lambda: len(engine.jobs) == 4)
        lines[0].close()
        until(lambda: len(engine.jobs) == 2)
        lines[1].close()
        until(lambda: not engine.jobs)
        assert engine.cancelled >= {0, 1, 2, 3}, "answers that nobody reads end by themselves, after minutes"
        assert ask(port, {"prompt": "say a"})[1]["choices"][0]["text"] == "a"


def test_a_stop_string_frees_the_slot():
    engine = Script(step_s=0.02)
    with serving(engine) as (port, _):
        assert ask(port, FOREVER | {"stop": "..."})[1]["usage"]["completion_tokens"] == 3
        until(lambda: not engine.jobs)
        line = send(port, {"prompt": ["dots", "say " + "x" * 900], "max_tokens": 1_000, "stop": "..."})
        until(lambda: 2 in engine.jobs)  # tickets count from 0; both have come
        until(lambda: engine.jobs.keys() == {2})  # and the other, which would end first, goes on
        assert engine.cancelled >= {0, 1}
        line.close()


def test_who_comes_to_a_full_queue_is_told_to_come_back_and_leaves_nothing_behind():
    engine = Script(step_s=0.02)
    with serving(engine) as (port, _):
        lines = [send(port, FOREVER) for _ in range(5)]
        until(lambda: len(engine.jobs) == 5)
        response, said = ask(port, {"prompt": ["say a", "say b", "say c"]})
        assert response.status == 429 and response.headers["retry-after"] == "1"
        assert said["error"]["type"] == "rate_limit_error"
        until(lambda: len(engine.jobs) == 5)
        for line in lines:
            line.close()
        until(lambda: not engine.jobs)


def test_bodies_are_bounded_and_must_come(monkeypatch):
    with serving(Script()) as (port, _):
        assert ask(port, b" " * (server.MAX_BODY_BYTES + 1))[0].status == 413
        monkeypatch.setattr(server, "READ_S", 1)
        assert b" 408 " in send(port, {"prompt": "a"}, length=1000).recv(1000)
        silent, dripping = connect(port), connect(port)
        assert silent.recv(10) == b""  # it was let go of
        with contextlib.suppress(ConnectionError):  # so is a request that comes letter by letter for ever
            dripping.sendall(b"GET / HTTP/1.1\r\n")
            for letter in itertools.cycle("a: b\r\n"):
                dripping.sendall(letter.encode())
                if select.select([dripping], [], [], 0.05)[0] and not dripping.recv(10):
                    break
        monkeypatch.undo()
        assert ask(port, {"prompt": "say a"})[0].status == 200


def test_who_reads_nothing_holds_up_nobody_and_is_let_go_of(monkeypatch):
    engine = Script(step_s=0.0005, slots=4)
    with serving(engine, room=4096) as (port, here):
        send(port, {"prompt": ["a"] * 4, "max_tokens": 9_000, "stream": True, "logprobs": 2})
        unread = lambda: [x.transport.get_write_buffer_size() for x in [*here.server_state.connections]]
        until(lambda: any(unread()))
        assert ask(port, None, "/health")[0].status == 200
        assert any(unread()), "and was answered before the other was let go of"
        monkeypatch.setattr(server, "READ_S", 0)
        until(lambda: not here.server_state.connections and not engine.jobs)
        monkeypatch.undo()
        assert ask(port, {"prompt": "say a"})[1]["choices"][0]["text"] == "a"


def test_an_answer_has_a_time_limit():
    engine = Script(step_s=0.02)
    with serving(engine, limit_s=2) as (port, _):
        response, said = ask(port, FOREVER)
        assert response.status == 503 and "no answer within 2 s" in said["error"]["message"]
        _, events = ask(port, FOREVER | {"stream": True})
        assert events[-1]["error"]["code"] == 503 and events[0]["choices"][0]["text"] == "."
        until(lambda: not engine.jobs)


CHAT, CHATS = {"messages": [{"role": "user", "content": "say a"}]}, "/v1/chat/completions"


def test_conversations_that_do_not_become_tokens_hold_up_no_text(monkeypatch):
    """And /health says so; who waits too long is told to come back, and the end comes all the same."""

    class Stuck(Chat):
        def __init__(self):
            super().__init__(BYTES)
            self.ended = threading.Event()

        def tokens(self, messages, ask=True, most=0):
            self.ended.wait()
            raise ValueError("it was given up")

        def close(self):
            self.ended.set()

    with serving(Script(), chat=(stuck := Stuck())) as (port, _):
        lines = [send(port, CHAT, CHATS) for _ in range(server.PLACES + 1)]
        until(lambda: ask(port, None, "/health")[1]["preparing"] == len(lines))
        assert ask(port, None, "/health")[1]["status"] == "busy"
        assert ask(port, {"prompt": "say a"})[1]["choices"][0]["text"] == "a"
        monkeypatch.setattr(server, "PREPARE_S", 0.1)
        response, said = ask(port, CHAT, CHATS)
        assert response.status == 503 and "did not become tokens within 0.1 s" in said["error"]["message"]
        monkeypatch.setattr(server, "MOST_WAITING", len(lines))
        response, said = ask(port, CHAT, CHATS)
        assert response.status == 429 and "requests wait already to become" in said["error"]["message"]
        stuck.close()
        assert b"it was given up" in lines[0].recv(10_000)
        until(lambda: ask(port, None, "/health")[1]["status"] == "ok")
        stuck.ended.clear()
        send(port, CHAT, CHATS)
        until(lambda: ask(port, None, "/health")[1]["preparing"] == 1)


def test_a_refusal_keeps_nothing_of_what_was_read(port):
    """Without the collector of circles: a kept stack would hold the messages until it comes by."""
    body = b'{"messages": [' + b",".join([b"{}"] * 54_321) + b"]}"
    kept = lambda: [x for x in gc.get_objects() if type(x) is list and len(x) == 54_321]
    gc.disable()
    try:
        assert "54,321 messages do not fit" in ask(port, body, CHATS)[1]["error"]["message"]
        until(lambda: not kept())
    finally:
        gc.enable()


def test_a_step_that_does_not_end_is_seen(monkeypatch):
    engine, ends = Script(), threading.Event()
    monkeypatch.setattr(server, "STUCK_S", 0)
    with serving(engine) as (port, _):
        assert ask(port, None, "/health")[1]["status"] == "ok"
        monkeypatch.setattr(engine, "step", lambda: ends.wait() and Script.step(engine))
        line = send(port, {"prompt": "say a"})
        until(lambda: ask(port, None, "/health")[1]["status"] == "stuck")
        assert ask(port, None, "/health")[0].status == 503
        ends.set()
        assert b'"text":"a"' in line.recv(10_000)


ENDLESS = (HERE / "fixtures" / "server_endless.txt").read_text()


@pytest.mark.processes
def test_a_signal_ends_the_process_though_a_step_never_does():
    root = Path(__file__).parent.parent
    running = subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, text=True, cwd=root)
    with running:
        port = int(running.stdout.readline())
        until(lambda: send(port, {"prompt": "say a"}))
        until(lambda: ask(port, None, "/health")[1]["running"])
        running.send_signal(signal.SIGTERM)
        assert running.wait(300) == 128 + signal.SIGTERM


def test_a_step_that_fails_is_told_to_all_and_ends_the_server():
    engine = Script(step_s=0.05)
    with serving(engine) as (port, here):
        found = []
        one = lambda stream: found.append(ask(port, FOREVER | {"stream": stream}))
        asking = [threading.Thread(target=one, args=(stream,)) for stream in (False, True, False)]
        for thread in asking:
            thread.start()
        until(lambda: len(engine.jobs) == 3)
        engine.error = ValueError("the model gives NaN")
        for thread in asking:
            thread.join(60)
        said = [x if response.status == 500 else x[-1] for response, x in found]
        assert [x["error"]["message"] for x in said] == ["the engine failed: the model gives NaN"] * 3
        until(lambda: here.should_exit)
        assert here.thread.error is engine.error


def test_running_answers_end_when_the_server_stops_and_long_ones_are_cut_off(monkeypatch):
    monkeypatch.setattr(server, "GRACE_S", 3)
    engine = Script(step_s=0.02)
    found = []
    with serving(engine) as (port, here):
        short = threading.Thread(target=lambda: found.append(ask(port, {"prompt": "say 0123456789"})))
        short.start()
        long = send(port, FOREVER | {"stream": True})
        until(lambda: len(engine.jobs) == 2)
        here.should_exit = True
        short.join(60)
        assert found[0][1]["choices"][0]["text"] == "0123456789"
    rest = b"".join(iter(lambda: long.recv(1 << 16), b""))
    assert b"[DONE]" not in rest and "stopping" in said[-1]
    with pytest.raises(ConnectionError):
        ask(port, None, "/health")


def test_garbage_never_ends_the_server(port):
    """Bytes that are no HTTP, bodies that are nearly JSON, values of every kind under every name."""
    rng = random.Random(0)
    good = json.dumps(
        {"prompt": "say a", "stop": ["x"], "temperature": 0.5, "logprobs": 1, "max_tokens": 3}
    ).encode()
    for _ in range(100):
        broken = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        assert ask(port, bytes(broken))[0].status in (200, 400, 404)
    values = [None, True, 0, 1, -1, 1e308, 10**30, "", "a", [], [0], ["a"], {}, {"a": 1}, [[]], [None]]
    for kind, path in (("text", "completions"), ("chat", "chat/completions")):
        for name, value in itertools.product(sorted(server.KNOWN[kind]), values):
            base = {"prompt": "say a"} if kind == "text" else CHAT
            response, found = ask(port, base | {name: value}, f"/v1/{path}")
            assert response.status in (200, 400, 404), (name, value, found)
    for _ in range(50):
        connect(port).sendall(rng.randbytes(rng.randint(1, 2000)))
    until(lambda: ask(port, None, "/health")[1]["running"] == 0)
    assert ask(port, {"prompt": "say a"})[1]["choices"][0]["text"] == "a"


@pytest.fixture(scope="module")
def process():
    """`llmpar serve` on a simulated mesh: the process and its port. It ends as SIGTERM asks."""
    words = [*"-m llmpar serve --port 0 --slots 8 --length 96 --mesh".split(), "dp=2 sp=2 tp=2"]
    with subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True) as running:
        lines = []
        for line in running.stderr:
            lines.append(line)
            if found := re.search(r"answers at http://127\.0\.0\.1:(\d+)", line):
                break
        assert found and any("weights are random" in line for line in lines), lines
        yield running.pid, int(found[1])
        running.terminate()
        assert "stopping" in running.communicate(timeout=300)[1] and running.returncode == 143


@pytest.mark.nightly
@pytest.mark.processes
def test_a_thousand_clients_leave_memory_as_it_was(process):
    """Greedy, and drawn by a seed; some of whom leave."""
    pid, port = process
    resident = lambda: int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) >> 10
    rng = random.Random(0)

    def one(i):
        prompt, temperature = "".join(rng.choices("abc def\n", k=rng.randint(1, 50))), 0.8 * (i % 2)
        how = dict(max_tokens=rng.randint(1, 30), temperature=temperature, seed=i)
        if i % 5 == 0:
            send(port, how | {"prompt": prompt, "stream": True}).close()
        else:
            assert ask(port, how | {"prompt": prompt, "stream": i % 3 == 0})[0].status == 200

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(200)))
        before = resident()
        list(pool.map(one, range(1000)))
    until(lambda: ask(port, None, "/health")[1]["running"] == ask(port, None, "/health")[1]["waiting"] == 0)
    assert resident() < before + 60


@pytest.mark.browser
def test_the_page_asks_for_the_key_chats_stops_and_is_accessible(tab, one_tab):
    width = 390
    tab.emulate_media(color_scheme="dark")
    tab.set_viewport_size({"width": width, "height": 800})
    engine = Script(step_s=0.02)
    with serving(engine, key="secret") as (port, _):
        tab.goto(f"http://127.0.0.1:{port}/")
        tab.wait_for_selector("h1:text-is('toy')")
        assert tab.text_content("#where").startswith("on mesh tp=2")
        tab.fill("#text", "say <b>é</b>\n😀")
        tab.keyboard.press("Enter")
        tab.wait_for_selector("#key:focus")
        assert tab.input_value("#text") == "say <b>é</b>\n😀" and "key" in tab.text_content(".bad")
        assert "401" in one_tab[1].pop()
        tab.fill("#key", "secret")
        tab.click("#send")
        tab.wait_for_selector("#send:visible")
        assert tab.text_content(".assistant span").startswith("<b>é</b>\n😀")
        tab.click("#fresh")
        tab.fill("#most", "9000")  # minutes
        tab.fill("#text", "dots")
        tab.click("#send")
        tab.wait_for_selector(".assistant span:has-text('....')")
        tab.click("#stop")
        tab.wait_for_selector("#text:focus")
        assert "stopped" in tab.text_content(".said")
        until(lambda: not engine.jobs)
        assert shared.violations(tab) == []
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        tab.goto("about:blank")
