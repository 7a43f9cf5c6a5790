"""HTTP for an engine: OpenAI's completions and chat completions, ``/health``, and a page to chat.

One thread steps the engine; the event loop does everything else. What happens to an answer comes through its
box: events, the engine's end, a client that left, the end of its time. Text leaves when it is certain: half a
character, or what may become a stop string, waits for the next token. A parameter that may change the answer
and is not implemented is refused by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import math
import os
import pathlib
import re
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as Http
from starlette.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.routing import Route

from llmpar.files import Allowed
from llmpar.plan.serving import BEST
from llmpar.serve.engine import Event, Full, Request
from llmpar.training.chat import check_messages

_PAGE = pathlib.Path(__file__).parent / "chat.html"
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
    "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
MAX_BODY_BYTES = 4 << 20  # of a request
MOST_PROMPTS = 64  # of a request
MOST_STOPS = 16  # stop strings of a request
_MOST_LETTERS = 256  # of a stop string
MOST_CONNECTIONS = 512  # at a time
LIMIT_S = 600.0  # for an answer
READ_S = 20  # for a request to arrive, and for a client that reads nothing
PREPARE_S = 10  # for a request to become tokens, its wait included
STUCK_S = 60  # for a step, before ``/health`` reports the engine as stuck
GRACE_S = 5  # for running answers when the server is stopped
END_S = 9  # until the process ends then, whatever it does
PLACES = 2  # requests of a kind that become tokens at a time; texts do not wait for conversations
MOST_WAITING = 32  # with those that wait for it
_WHOLE, FLAG, LOGPROBS = Allowed(int, 0, 2**31 - 1), Allowed(bool), Allowed(int, 0, BEST)
BOTH = {
    "model": Allowed(str),
    "max_tokens": _WHOLE,
    "stop": None,
    "seed": Allowed(int, 0, 2**32 - 1),
    "temperature": Allowed(float, 0, 100),
    "top_p": Allowed(float, 0, 1),
    "stream": FLAG,
    "top_k": Allowed(int, -1, 2**31 - 1),
    "stream_options": Allowed(dict),
}
CHAT = {
    "messages": Allowed(list),
    "logprobs": FLAG,
    "top_logprobs": LOGPROBS,
    "max_completion_tokens": _WHOLE,
}
KNOWN = {"text": BOTH | {"prompt": None, "echo": FLAG, "logprobs": LOGPROBS}, "chat": BOTH | CHAT}
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "logit_bias": {},
    "tools": [],
    "suffix": "",
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "response_format": {"type": "text"},
}
"""Parameters that are read, those without effect here, and values that mean nothing, as null does."""
LOCAL_HOSTS = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")
_ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
Piece = tuple[str, list[tuple[int, Event]], str | None]


class Document(JSONResponse):
    """JSON of any text: half of a surrogate pair, which a client may have sent, is written as JSON does."""

    def render(self, content: Any) -> bytes:
        """Return the bytes."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode(errors="backslashreplace")


class EngineThread(threading.Thread):
    """An engine and the one thread that steps it; its methods are for the event loop's thread.

    ``error`` is what ended it, if a step raised: every waiting request gets it.
    """

    def __init__(self, engine: Any):
        super().__init__(name="engine", daemon=True)
        self.engine, self.ends = engine, False
        self.error: Exception | None = None
        self.begun = math.inf  # when the running step began
        self._boxes, self._wake = dict[int, asyncio.Queue](), threading.Event()

    def close(self) -> None:
        """End after the running step."""
        self.ends = True
        self._wake.set()
        self.join()

    def submit(self, requests: Sequence[Request], box: asyncio.Queue) -> list[int]:
        """Return the tickets of all requests, whose events go into the box; if it raises, no request is
        left."""
        self._loop, tickets = asyncio.get_running_loop(), list[int]()
        try:
            for request in requests:
                tickets.append(self.engine.submit(request))
                self._boxes[tickets[-1]] = box
        except Exception:
            self.cancel(tickets)
            raise
        self._wake.set()
        self._hand_out([])
        return tickets

    def cancel(self, tickets: Sequence[int]) -> None:
        """Drop tickets that no client waits for."""
        for ticket in tickets:
            if self._boxes.pop(ticket, None):
                self.engine.cancel(ticket)

    def run(self) -> None:
        """Step while there is work, until `close`."""
        while not self.ends:
            if not self.engine.busy:
                self._wake.wait()
                self._wake.clear()
                continue
            self.begun = time.monotonic()
            try:
                events = self.engine.step()
            except Exception as error:
                self.error, self.ends, events = error, True, []
            self.begun = math.inf
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._hand_out, events)

    def _hand_out(self, events: Sequence[Event]) -> None:
        for event in events:
            take = self._boxes.pop if event.finish else self._boxes.get
            if box := take(event.ticket, None):
                box.put_nowait(event)
        for box in set(self._boxes.values()) if self.error else ():
            box.put_nowait(HTTPException(500, f"the engine failed: {self.error}"))


class Choice:
    """One answer, from events to pieces of text that are certain: ``made`` up to ``given``.

    A piece is (text, ``(where its text begins, event)`` for each token, why the answer ends or None). A token
    is decoded behind some before it, at first the prompt's last: many tokenizers drop the space that a text
    begins with. With ``echo`` the prompt's tokens are events too, and in them no stop string is looked for.
    """

    def __init__(self, decode: Callable, prompt: Sequence[int], stops: Sequence[str], echo: bool):
        self.decode, self.stops, self.num_tokens = decode, stops, 0
        self.made, self.given, self.stopped = "", 0, False
        self._ids = list(() if echo else prompt[-8:])
        # the ids between are in ``made``, or the prompt's
        self._from, self._made = (0, len(self._ids))
        self._waiting = list[tuple[int, Event]]()

    def take(self, event: Event) -> Piece:
        """Return what an event adds. A token waits for its text."""
        new, stops = "", [] if event.of_prompt else self.stops
        if event.token is not None:
            self._waiting.append((len(self.made), event))
            self.num_tokens += not event.of_prompt
            new = self._add(event.token, stops)
        if event.finish and not self.stopped:
            new += self._add(None, stops)
        finish = "stop" if self.stopped else event.finish
        ready = [x for x in self._waiting if x[0] < self.given or finish and not self.stopped]
        self._waiting = self._waiting[len(ready) :]
        return new, ready, finish

    def _add(self, token: int | None, stops: Sequence[str]) -> str:
        """Return the text that is certain now and was not before; None: no token follows."""
        self._ids += [] if token is None else [token]
        before, now = (
            self.decode(self._ids[self._from : self._made]),
            self.decode(self._ids[self._from :]),
        )
        if token is None or len(now) > len(before) and not now.endswith("\ufffd"):
            self.made += now[len(before) :]
            self._from, self._made = self._made, len(self._ids)
        if places := [at for stop in stops if (at := self.made.find(stop, self.given)) >= 0]:
            self.made, self.stopped = self.made[: min(places)], True
        certain = len(self.made)
        if token is not None and not self.stopped:
            parts = [stop[:n] for stop in stops for n in range(1, len(stop))]
            certain -= max((len(x) for x in parts if self.made.endswith(x, self.given)), default=0)
        new, self.given = self.made[self.given : certain], certain
        return new


@dataclass
class Api:
    """The endpoints. ``about`` has ``model``, the name that clients give, and what else ``/health`` tells;
    ``length`` is what a prompt and its answer may have; with ``only_here`` this machine alone is answered."""

    thread: EngineThread
    tokenizer: Any
    chat: Any
    about: dict[str, Any]
    length: int
    key: str | None = None
    only_here: bool = True
    limit_s: float = LIMIT_S

    def __post_init__(self):
        self.lanes = {kind: ThreadPoolExecutor(PLACES, f"{kind} to tokens") for kind in KNOWN}
        self.preparing: dict[str, set[Future]] = {kind: set() for kind in KNOWN}

    def close(self) -> None:
        """Drop requests that are being prepared, and end the threads."""
        for lane in self.lanes.values():
            lane.shutdown(wait=False, cancel_futures=True)
        self.chat.close()
        self.thread.close()

    @functools.cached_property
    def letter(self) -> tuple[list[int], str]:
        """Return a letter's tokens, behind which others are decoded, and their text."""
        ids = [int(x) for x in self.tokenizer.encode_all(["a"])[0]]
        return ids, self.tokenizer.decode(ids)

    def admit(self, request: Http, key: bool = True) -> None:
        """Refuse a request without the key, and a web page whose host name was made to mean this machine."""
        if self.only_here and not LOCAL_HOSTS.fullmatch(request.headers.get("host", "")):
            raise HTTPException(
                403, "this server is for its own machine: ask it as localhost or 127.0.0.1"
            )
        scheme, _, given = (
            request.headers.get("authorization", "").encode("latin-1").partition(b" ")
        )
        fits = (
            hmac.compare_digest(given.strip(), (self.key or "").encode())
            and scheme.lower() == b"bearer"
        )
        if key and self.key and not fits:
            raise HTTPException(
                401,
                "give the server's key, as 'Authorization: Bearer KEY'",
                {"WWW-Authenticate": "Bearer"},
            )

    async def page(self, request: Http) -> HTMLResponse:
        """Return the page to chat."""
        self.admit(request, key=False)
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers=headers)

    async def health(self, request: Http) -> Document:
        """Return whether the engine runs, requests wait to become tokens, and figures of both."""
        self.admit(request, key=False)
        state = {
            **self.about,
            "length": self.length,
            **self.thread.engine.figures,
            "status": "ok",
            "preparing": sum(map(len, self.preparing.values())),
        }
        if any(len(futures) > PLACES for futures in self.preparing.values()):
            state["status"] = "busy"  # one waits for others that become tokens
        if stuck := time.monotonic() - self.thread.begun > STUCK_S:
            state["status"] = "stuck"
        if error := self.thread.error:
            state |= {"status": "failed", "error": str(error)}
        return Document(state, 500 if error else 503 if stuck else 200)

    async def models(self, request: Http) -> Document:
        """Return the one model."""
        self.admit(request)
        model = {"id": self.about["model"], "object": "model", "created": 0, "owned_by": "llmpar"}
        return Document({"object": "list", "data": [model | {"max_model_len": self.length}]})

    async def answer(self, request: Http) -> _Answer:
        """Read a request, and queue it."""
        self.admit(request)
        content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content != "application/json":  # no form of a web page can give this one
            raise HTTPException(415, "give JSON, and say so: 'Content-Type: application/json'")
        body = bytearray()
        kind = "chat" if "chat" in request.url.path else "text"
        try:
            async with asyncio.timeout(READ_S):
                async for piece in request.stream():
                    body += piece
                    if len(body) > MAX_BODY_BYTES:
                        raise HTTPException(
                            413, f"the body has more than {MAX_BODY_BYTES:,} bytes; ask for less"
                        )
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {READ_S} s") from None
        if (waiting := len(self.preparing[kind])) >= MOST_WAITING:
            words = f"{waiting} requests wait already to become tokens; come back later"
            raise HTTPException(429, words, {"Retry-After": "1"})
        future = self.lanes[kind].submit(self.prepared, kind, bytes(body))
        body.clear()
        self.preparing[kind].add(future)
        future.add_done_callback(self.preparing[kind].discard)
        try:
            async with asyncio.timeout(PREPARE_S):
                answer = await asyncio.wrap_future(future)
            if isinstance(answer, HTTPException):
                raise answer
            answer.tickets = self.thread.submit(answer.requests, answer.box)
            return answer
        except TimeoutError:
            words = f"the request did not become tokens within {PREPARE_S} s; come back later"
            raise HTTPException(503, words, {"Retry-After": "1"}) from None
        except Full as error:
            raise HTTPException(429, str(error), {"Retry-After": "1"}) from None
        except ValueError as error:
            raise HTTPException(400, str(error)) from None

    def prepared(self, kind: str, raw: bytes) -> _Answer | HTTPException:
        """Return the answer to give, or a refusal; a raised one would keep the body in its traceback."""
        try:
            return _Answer(self, kind, raw)
        except HTTPException as error:
            return HTTPException(error.status_code, error.detail)
        except ValueError as error:
            return HTTPException(400, str(error))

    def read(self, kind: str, raw: bytes) -> dict[str, Any]:
        """Return what a body asks for; refuse unknown parameters."""
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the body is no JSON: {error}; give an object") from None
        if not isinstance(body, dict):
            raise ValueError(f"the body is {json.dumps(body):.40}; give an object")
        nothing = lambda name, x: (
            x is None or name in IGNORED or name in NEUTRAL and NEUTRAL[name] == x
        )
        body = {name: x for name, x in body.items() if not nothing(name, x)}
        for name, value in body.items():
            if name not in KNOWN[kind]:
                raise ValueError(
                    f"'{name:.40}' is {json.dumps(value):.40}, which is not implemented here and may"
                    " change the answer; leave it out"
                )
            if what := KNOWN[kind][name]:
                what.check(name, value)
        if body.get("model", name := self.about["model"]) != name:
            raise HTTPException(404, f"there is no model '{body['model']:.80}' here, but '{name}'")
        body["stop"] = stops = [x] if isinstance(x := body.get("stop", []), str) else x
        fits = isinstance(stops, list) and len(stops) <= MOST_STOPS
        if not fits or not all(isinstance(x, str) and 0 < len(x) <= _MOST_LETTERS for x in stops):
            raise ValueError(
                f"stop is {json.dumps(stops):.60}; use up to {MOST_STOPS} texts of 1 to"
                f" {_MOST_LETTERS} letters"
            )
        if kind == "chat":
            if "top_logprobs" in body and not body.get("logprobs"):
                raise ValueError('top_logprobs needs logprobs: give "logprobs": true')
            body["logprobs"] = body.get("top_logprobs", 0) if body.get("logprobs") else None
        return body

    def requests(self, kind: str, body: dict[str, Any]) -> list[Request]:
        """Return the engine's requests for a body."""
        most = body.get("max_completion_tokens", body.get("max_tokens"))
        settings = {
            "temperature": body.get("temperature", 1),
            "top_p": body.get("top_p", 1),
            "seed": body.get("seed"),
            "top_k": max(0, body.get("top_k", 0)),
            "logprobs": body.get("logprobs"),
            "echo": body.get("echo", False),
        }
        if kind == "chat":
            usual, prompts, ends = self.length, [self._conversation(body)], self.chat.end_ids
        else:
            usual, prompts, ends = 16, self._prompts(body.get("prompt")), self.tokenizer.end_ids
        for prompt in prompts:
            least = 1 if most is None else most
            if len(prompt) + least > self.length:
                raise ValueError(
                    f"a prompt of {len(prompt):,} tokens and {least:,} more do not fit into"
                    f" {self.length:,} positions; ask for less"
                )
        num = lambda prompt: min(usual, self.length - len(prompt)) if most is None else most
        return [Request(prompt, num(prompt), ends=ends, **settings) for prompt in prompts]

    def _prompts(self, given: Any) -> list[tuple[int, ...]]:
        """Return one or several prompts; a text's tokens begin with the start token."""
        if isinstance(given, str) or isinstance(given, list) and given and type(given[0]) is int:
            given = [given]
        if not isinstance(given, list) or not 1 <= len(given) <= MOST_PROMPTS:
            raise ValueError(
                f"prompt must be a text, a list of tokens, or up to {MOST_PROMPTS} of these"
            )
        is_text = lambda x: isinstance(x, str) and not re.search("[\ud800-\udfff]", x)
        for x in given:
            if not is_text(x) and (
                not isinstance(x, list) or any(type(token) is not int for token in x)
            ):
                raise ValueError(
                    f"prompt {json.dumps(x):.40} is neither a text nor a list of tokens"
                )
        texts = [x for x in given if isinstance(x, str)]
        self._check_letters(max(map(len, texts), default=0))
        made = iter(self.chat.encode_all(texts) if texts else ())
        start = self.tokenizer.start_id
        return [(start, *next(made).tolist()) if isinstance(x, str) else tuple(x) for x in given]

    def _check_letters(self, num: int) -> None:
        """Refuse a text that is too long for any tokens: encoding it takes long."""
        if num > self.length * self.tokenizer.longest:
            raise ValueError(
                f"{num:,} letters do not fit into {self.length:,} positions of at most"
                f" {self.tokenizer.longest:,} letters; ask for less"
            )

    def _conversation(self, body: dict[str, Any]) -> tuple[int, ...]:
        messages = body.get("messages", [])
        for message in messages:
            if isinstance(message, dict) and (more := message.keys() - {"role", "content"}):
                raise ValueError(f"a message has '{min(more):.40}'; only role and content are read")
        if len(messages) > self.length:  # each has a token at least
            raise ValueError(
                f"{len(messages):,} messages do not fit into {self.length:,} positions; ask for less"
            )
        self._check_letters(sum(len(x["content"]) for x in check_messages(messages)))
        return tuple(self.chat.tokens(messages, most=self.length)[0].tolist())


class _Answer:
    """What a body asks for, and what is sent: one document, or its pieces as they come.

    A client that leaves ends it. Raises ValueError for a body that cannot be answered.
    """

    def __init__(self, api: Api, kind: str, raw: bytes):
        self.api, self.kind, self.body = api, kind, api.read(kind, raw)
        self.requests, stops = api.requests(kind, self.body), self.body["stop"]
        self.choices = [
            Choice(api.tokenizer.decode, x.tokens, stops, x.echo) for x in self.requests
        ]
        self.tickets, self.box = list[int](), asyncio.Queue[Event | HTTPException]()
        self.streams = self.body.get("stream", False)
        chat = "chat.completion.chunk" if self.streams else "chat.completion"
        self.head = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "object": chat if kind == "chat" else "text_completion",
            "created": int(time.time()),
            "model": api.about["model"],
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def left():
            while (await receive())["type"] != "http.disconnect":
                pass
            self.box.put_nowait(HTTPException(499, "the client left"))

        limit = f"there was no answer within {self.api.limit_s:g} s; ask for fewer tokens, or come back later"
        over = HTTPException(503, limit)
        leaving = asyncio.create_task(left())
        clock = asyncio.get_running_loop().call_later(self.api.limit_s, self.box.put_nowait, over)
        try:
            if self.streams:
                headers = {"Cache-Control": "no-store"}
                stream = StreamingResponse(
                    self._stream(), headers=headers, media_type="text/event-stream"
                )
                await stream.stream_response(send)
            else:
                await Document(await self._document())(scope, receive, send)
        finally:
            clock.cancel()
            leaving.cancel()
            self.api.thread.cancel(self.tickets)

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield the pieces of each choice as they come. Raise HTTPException for what went wrong."""
        running = {ticket: index for index, ticket in enumerate(self.tickets)}
        while running:
            event = await self.box.get()
            if isinstance(event, Exception):
                raise event
            if event.ticket in running:
                try:
                    piece = self.choices[index := running[event.ticket]].take(event)
                except ValueError as error:  # the tokenizer cannot decode it
                    raise HTTPException(500, str(error)) from None
                if piece[2]:
                    del running[event.ticket]
                    # The engine knows nothing of stop strings.
                    self.api.thread.cancel([event.ticket])
                if any(piece):
                    yield index, piece

    async def _document(self) -> dict[str, Any]:
        wholes: list[Piece] = [("", [], None)] * len(self.choices)
        async for index, (text, tokens, finish) in self._pieces():
            before, earlier, _ = wholes[index]
            wholes[index] = before + text, earlier + tokens, finish
        choices = [self._written(*numbered) for numbered in enumerate(wholes)]
        return self.head | {"choices": choices, "usage": self._usage()}

    async def _stream(self) -> AsyncIterator[str]:
        """Yield server-sent events. The last one is [DONE], or an error."""
        usage = self.body.get("stream_options", {}).get("include_usage")
        head = self.head | ({"usage": None} if usage else {})
        line = lambda **more: f"data: {json.dumps(head | more)}\n\n"
        if self.kind == "chat":
            first = {"role": "assistant", "content": ""}
            yield line(choices=[{"index": 0, "delta": first, "finish_reason": None}])
        try:
            async for numbered in self._pieces():
                yield line(choices=[self._written(*numbered)])
        except HTTPException as error:
            yield f"data: {json.dumps(error_document(error))}\n\n"
            return
        if usage:
            yield line(choices=[], usage=self._usage())
        yield "data: [DONE]\n\n"

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(request.tokens) for request in self.requests)
        made = sum(choice.num_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    def _written(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return a piece as OpenAI writes it."""
        text, tokens, finish = piece
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish}
        if self.kind == "text":
            choice["text"] = text
        elif self.streams:
            choice["delta"] = {"content": text} if text else {}
        else:
            choice["message"] = {"role": "assistant", "content": text}
        if self.body.get("logprobs") is None:
            return choice
        named = [
            [self._named(*x) for x in ((y.token, y.logprob), *y.best[::-1])] for _, y in tokens
        ]
        if self.kind == "chat":
            raw = lambda name: None if name.startswith("token_id:") else list(name.encode())
            entry = lambda x: {"token": x[0], "logprob": x[1], "bytes": raw(x[0])}
            content = [entry(x[0]) | {"top_logprobs": [entry(y) for y in x[:0:-1]]} for x in named]
            return choice | {"logprobs": {"content": content}}
        best = [None if x[0][1] is None else dict(x) for x in named]  # alike: the likelier
        scores = {
            "tokens": [x[0][0] for x in named],
            "token_logprobs": [x[0][1] for x in named],
            "top_logprobs": best,
            "text_offset": [begin for begin, _ in tokens],
        }
        return choice | {"logprobs": scores}

    def _named(self, token: Any, logprob: float | None) -> tuple[str, float | None]:
        """Return a token's text behind a letter, or its number if it has none; JSON has no infinity."""
        base, text = self.api.letter
        text = self.api.tokenizer.decode([*base, token])[len(text) :]
        name = text if text and "\ufffd" not in text else f"token_id:{token}"
        return name, None if logprob is None else max(logprob, -9999.0)


def error_document(error: HTTPException) -> dict[str, Any]:
    """Return an error as OpenAI writes it."""
    error_type = _ERRORS.get(
        error.status_code, "server_error" if error.status_code >= 500 else "invalid_request_error"
    )
    return {
        "error": {
            "message": error.detail,
            "type": error_type,
            "param": None,
            "code": error.status_code,
        }
    }


def app(api: Api) -> Starlette:
    """Return the application."""

    @contextlib.asynccontextmanager
    async def life(_):
        api.thread.start()
        yield
        await asyncio.to_thread(api.close)

    routes = [
        Route("/", api.page),
        Route("/health", api.health),
        Route("/v1/models", api.models),
        Route("/v1/completions", api.answer, methods=["POST"]),
        Route("/v1/chat/completions", api.answer, methods=["POST"]),
    ]
    refused = lambda _, error: Document(error_document(error), error.status_code, error.headers)
    words = "this is a fault of llmpar: {0.__class__.__name__}: {0}"
    fault = lambda _, error: refused(_, HTTPException(500, words.format(error)))
    handlers: dict[Any, Any] = {HTTPException: refused, Exception: fault}
    made = Starlette(routes=routes, lifespan=life, exception_handlers=handlers)
    made.router.redirect_slashes = False  # it would answer before a request is admitted
    return made


class Server(uvicorn.Server):
    """Uvicorn in one process. It drops clients that neither ask nor read, and ends if the engine failed."""

    def __init__(self, api: Api, say: Callable[[str], Any]):
        config = uvicorn.Config(
            app(api),
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=GRACE_S,
            http="h11",
            ws="none",
            log_config=None,
            log_level="critical",
            lifespan="on",
            server_header=False,
        )
        super().__init__(config)
        self.api, self.thread, self.say, self._idle = api, api.thread, say, dict[Any, int]()
        self.last = threading.Timer(END_S, os._exit, [1])

    async def on_tick(self, counter: int) -> bool:
        """Run ten times a second: close idle connections, and end if the engine failed."""
        if counter % 10 == 0:
            connections: Any = self.server_state.connections
            states = [(x, x.cycle, x.transport.get_write_buffer_size()) for x in connections]
            idle = [x for x in states if x[2] or x[1] is None or x[1].response_complete]
            self._idle = {state: self._idle.get(state, 0) + 1 for state in idle}
            for connection, *_ in (
                state for state, seconds in self._idle.items() if seconds > READ_S
            ):
                connection.transport.abort()
        self.should_exit |= self.thread.error is not None
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """End on a signal, whatever threads do."""
        if not self.last.is_alive():
            self.last = threading.Timer(END_S, os._exit, [128 + sig])
            self.last.daemon = True
            self.last.start()
        super().handle_exit(sig, frame)

    def run(self, sockets: Any = None) -> None:
        """Serve until a signal. A second Ctrl-C does not wait."""
        try:
            super().run(sockets)
        finally:
            if self.thread.is_alive():
                self.api.close()
            self.last.cancel()

    async def shutdown(self, sockets: Any = None) -> None:
        """Let running requests end for a while."""
        self.say(
            f"stopping: what is being answered ({len(self.server_state.tasks)}) has {GRACE_S} s to end"
        )
        await super().shutdown(sockets)
