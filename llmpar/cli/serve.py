"""``llmpar serve``: answer requests as OpenAI's API does."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Literal

from llmpar.cli.options import Folder, From, Name, Text, check_range, fits_host, installed, say, start
from llmpar.cli.weights import opened
from llmpar.launch.engines import detect
from llmpar.predict.traffic import ITEMSIZE


@dataclass(frozen=True)
class Serve:
    """Answer many requests at once, as OpenAI's API does.

    llmpar serve --checkpoints kept --mesh "dp=2 sp=2 tp=2"

    A server to learn with: /v1/completions, /v1/chat/completions, /v1/models and /health, and at / a page to
    chat. For load, export the model and take an inference engine.

    Attributes:
        checkpoints: folder that `llmpar train --checkpoints` wrote.
        from_: folder of a Hugging Face model (config.json, safetensors, tokenizer.json), or the name of a
            downloaded one. Without it and checkpoints weights are random.
        best: of the checkpoints the one with the lowest held-out loss.
        model: a preset's name, or the path of a config.json or its folder; left out, the
            checkpoint's, or tiny.
        mesh: sizes of the axes; dp, fsdp and ep cut the slots, sp their positions, tp their heads.
        devices: CPU devices to simulate where there is no accelerator.
        slots: requests that run at a time; others wait.
        length: tokens of a prompt and its answer together.
        host: address to listen on; 0.0.0.0 lets other machines in.
        port: to listen on; 0 takes a free one.
        key: what clients give as their API key; in the variable LLMPAR_KEY no list of processes shows it.
        tokenizer: 'bytes', or the path of a Hugging Face tokenizer.json; left out, the model's, or bytes.
        dtype: of weights and cache.
    """

    checkpoints: Folder = None
    from_: From = None
    best: bool = False
    model: Name = None
    mesh: str = "dp=-1"
    devices: int = 8
    slots: int = 8
    length: int = 512
    host: str = "127.0.0.1"
    port: int = 8000
    key: Text = None
    tokenizer: Name = None
    dtype: Literal["float32", "bfloat16"] = "float32"

    def run(self) -> None:
        """Take the address, load, compile, and answer until a signal says stop."""
        check_range("slots", self.slots, 1, 4096)
        check_range("length", self.length, 2, 2**24)
        check_range("port", self.port, 0, 65535)
        if (place := detect(os.environ)).num_processes > 1:
            use = "on several hosts an inference engine serves: llmpar launch slurm --serve vllm"
            raise ValueError(f"'serve' runs in one process, and {place.engine} has started several; {use}")
        if self.best and not self.checkpoints:
            raise ValueError("--best chooses among checkpoints; give --checkpoints, or leave it out")
        if not installed("starlette") or not installed("uvicorn"):
            raise ValueError("Starlette or Uvicorn is not installed; pip install 'llmpar[serve]'")
        key = os.environ.get("LLMPAR_KEY") if self.key is None else self.key
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
            raise ValueError("a key has letters, digits and signs of ASCII, and no space at its ends")
        with self.listening() as listening:
            self.answer(listening, key)

    def listening(self) -> socket.socket:
        """A socket with the address: whether it is free is known before anything is loaded."""
        try:
            family, kind, *_, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            with contextlib.ExitStack() as fails:
                found = fails.enter_context(socket.socket(family, kind))
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                found.bind(address)
                fails.pop_all()
            return found
        except OSError as error:
            what = f"cannot listen on '{self.host}', port {self.port}: {error.strerror}"
            raise ValueError(f"{what}; give another --host or --port (0: a free one)") from error

    def answer(self, listening: socket.socket, key: str | None) -> None:
        """Load the model and serve it."""
        import jax

        from llmpar.mesh import make_mesh, sharding, use_devices
        from llmpar.notation import parse_mesh
        from llmpar.plan import Plan
        from llmpar.serve import server
        from llmpar.serve.engine import Engine, Request
        from llmpar.training.chat import Chat
        from llmpar.weights import weight_dims

        start()
        devices = use_devices(self.devices, at_least=1)
        found = opened(self.checkpoints, self.from_, self.model, self.tokenizer, best=self.best)
        config, tokenizer, load, said = found
        chat = Chat(tokenizer)
        if (most := config.context_length or self.length) < self.length:
            what = f"'{config.name}' was made for {most:,} tokens, and length is {self.length:,}"
            raise ValueError(f"{what}; use at most {most}")
        plan = Plan(parse_mesh(self.mesh, len(devices)), zero=0, dtype=self.dtype)
        serving = plan.serving(config, self.slots, self.length)
        cache = 2 * ITEMSIZE[self.dtype] * math.prod(serving.cache(self.slots, self.length))
        fits_host(config, plan, self.slots, plan.mesh.sp, ("params",), cache)
        for line in said:
            say(line)
        mesh = make_mesh(plan.mesh)
        place = lambda dims: sharding(mesh, serving.stored(dims))
        params = load(jax.tree.map(place, weight_dims(config)))
        say("compiling …")
        engine = Engine(config, plan, mesh, params, self.slots, self.length)
        engine.submit(Request((tokenizer.start_id,) * 2, 2))
        while engine.busy:
            engine.step()
        host, port, *_ = listening.getsockname()
        only_here = ipaddress.ip_address(host).is_loopback
        if not only_here:
            who = "who has the key" if key else "everybody, since there is no --key,"
            say(f"{who} can ask it from other machines, and nothing is encrypted")
        about = {"model": config.name, "mesh": str(plan.mesh)}
        about |= {} if self.checkpoints or self.from_ else {"weights": "random weights"}
        api = server.Api(server.EngineThread(engine), tokenizer, chat, about, self.length, key, only_here)
        where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        say(f"'{config.name}' on mesh '{plan.mesh}' answers at {where}, {self.slots} requests at a time")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # when Uvicorn is done with it
        try:
            server.Server(api, say).run([listening])
        finally:
            if api.thread.is_alive():  # a second Ctrl-C does not wait
                api.thread.close()
        if api.thread.error:
            raise api.thread.error
