"""``llmpar serve``: answer requests as OpenAI's API does."""

import contextlib
import ipaddress
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Annotated

from llmpar.cli.options import OptionalText, inform, installed, start_jax
from llmpar.cli.weights import ModelOptions
from llmpar.files import Allowed
from llmpar.launch.engines import detect


@dataclass(frozen=True)
class Serve(ModelOptions):
    """Answer many requests at once, as OpenAI's API does.

    llmpar serve --checkpoints kept --mesh "dp=2 sp=2 tp=2"

    A server to learn with: /v1/completions, /v1/chat/completions, /v1/models and /health, and at / a page to
    chat. For load, export the model and take an inference engine.

    Attributes:
        slots: requests that run at a time; others wait.
        length: tokens of a prompt and its answer together.
        host: address to listen on; 0.0.0.0 lets other machines in.
        port: to listen on; 0 takes a free one.
        key: what clients give as their API key; in the variable LLMPAR_KEY no list of processes shows it.
    """

    mesh: str = "dp=-1"
    slots: Annotated[int, Allowed(int, 1, 4096)] = 8
    length: Annotated[int, Allowed(int, 2, 2**24)] = 512
    host: str = "127.0.0.1"
    port: Annotated[int, Allowed(int, 0, 65535)] = 8000
    key: OptionalText = None

    def run(self) -> None:
        """Bind the address, load, compile, and answer until a signal ends it."""
        if (place := detect(os.environ)).num_processes > 1:
            raise ValueError(
                f"'serve' runs in one process, and {place.engine} has started several; on several"
                " hosts an inference engine serves: llmpar launch slurm --serve vllm"
            )
        if not installed("starlette") or not installed("uvicorn"):
            raise ValueError("Starlette or Uvicorn is not installed; pip install 'llmpar[serve]'")
        key = os.environ.get("LLMPAR_KEY") if self.key is None else self.key
        if key is not None and not (
            key.isascii() and key.isprintable() and key.strip() == key != ""
        ):
            raise ValueError(
                "the API key must be of ASCII letters, digits and signs, without spaces at its ends"
            )
        with self.listening() as listening:
            self.answer(listening, key)

    def listening(self) -> socket.socket:
        """Return a socket bound to the address, so that a taken one is refused before anything is loaded."""
        try:
            family, socket_type, *_, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM
            )[0]
            with contextlib.ExitStack() as fails:
                listener = fails.enter_context(socket.socket(family, socket_type))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                fails.pop_all()
            return listener
        except OSError as error:
            raise ValueError(
                f"cannot listen on '{self.host}', port {self.port}: {error.strerror}; give another"
                " --host or --port (0: a free one)"
            ) from error

    def answer(self, listening: socket.socket, key: str | None) -> None:
        """Load the model and serve it."""
        from llmpar.serve import server
        from llmpar.training.apart import open_chat

        start_jax()
        plan, (config, tokenizer, load, notes) = self.plan(), self.opened()
        chat = open_chat(tokenizer)
        # what does not end is known before the weights are read
        _ = (chat.end_ids, chat.encode_all([""]))
        if (most := config.context_length or self.length) < self.length:
            raise ValueError(
                f"'{config.name}' was made for {most:,} tokens, and length is {self.length:,}; use at"
                f" most {most}"
            )
        engine = self.engine(plan, config, load, notes, self.slots, self.length)
        engine.warm_up()
        host, port, *_ = listening.getsockname()
        only_here = ipaddress.ip_address(host).is_loopback
        if not only_here:
            clients = "clients with the key" if key else "all clients, since there is no --key,"
            inform(f"{clients} can use it from other machines, and nothing is encrypted")
        about = {"model": config.name, "mesh": str(plan.mesh)}
        about |= {} if self.checkpoints or self.from_ else {"weights": "random weights"}
        api = server.Api(
            server.EngineThread(engine), tokenizer, chat, about, self.length, key, only_here
        )
        listening.listen()  # from here on clients wait
        where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        inform(
            f"'{config.name}' on mesh '{plan.mesh}' answers at {where}, {self.slots} requests at a time"
        )
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # when Uvicorn is done with it
        server.Server(api, inform).run([listening])
        if api.thread.error:
            raise api.thread.error
