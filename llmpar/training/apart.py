"""Run a model's chat template and tokenizer, a stranger's programs, in processes of their own.

They may loop for ever, print without end or fill the memory, in C and in Rust too, where no thread can be
stopped. So a process gets seconds of processor time for a call, and some memory, and the kernel ends it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmpar.training.chat import Chat

# Processor time of a call; what a process may allocate after its start (on Linux), and its status then.
CALL_S, MEMORY_BYTES, FULL = 5.0, 1 << 30, 9


def open_chat(tokenizer: Any, limit_s: float = CALL_S) -> Chat | Apart:
    """Return what turns texts into tokens: in other processes, where a tokenizer is read from a file."""
    return Apart(tokenizer, limit_s) if hasattr(tokenizer, "hub") else Chat(tokenizer)


class Apart:
    """A `Chat` whose calls run in other processes, as many as there are threads that call at a time. One that
    ended is replaced. `close` ends all, and a thread that waits for one gets a refusal."""

    def __init__(self, tokenizer: Any, limit_s: float = CALL_S):
        self._name, self._limit_s = tokenizer.name, limit_s
        self._state = pickle.dumps((Chat(tokenizer), limit_s))
        self._idle, self._all = (list[Any](), list[Any]()), set[Any]()
        self.close = weakref.finalize(self, _end, self._all)

    @functools.cached_property
    def end_ids(self) -> frozenset[int]:
        """See `Chat.end_ids`."""
        return frozenset(self._call("end_ids"))

    def tokens(self, messages: Sequence[Any], ask: bool = True, most: float = math.inf) -> tuple:
        """See `Chat.tokens`."""
        ids, is_answer = self._call("tokens", messages, ask, most)
        return np.array(ids, np.int32), np.array(is_answer, bool)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See `Chat.encode_all`."""
        return [np.array(ids, np.int32) for ids in self._call("encode_all", texts)]

    def _call(self, name: str, *given: Any) -> Any:
        # texts do not wait for a process that a template ended
        idle = self._idle[name == "encode_all"]
        try:
            process = idle.pop()
        except IndexError:
            process = self._start()
        line = b""
        with contextlib.suppress(OSError, ValueError):  # it ended, or was closed
            pickle.dump((name, given), process.stdin)
            process.stdin.flush()
            line = process.stdout.readline()
        if not line.endswith(b"\n"):
            self._all.discard(process)
            _end([process])
            raise self._failed(process.returncode)
        idle.append(process)
        reply = json.loads(line)
        if "refused" in reply:
            raise ValueError(reply["refused"])
        return reply["made"]

    def _start(self) -> Any:
        begin = f"import sys; sys.path[:] = {[*map(str, sys.path)]}"
        line = [
            sys.executable,
            "-c",
            f"{begin}; from llmpar.training import apart; apart._answer()",
        ]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        pipes["stderr"] = None if os.environ.get("LLMPAR_TRACEBACK") else subprocess.DEVNULL
        # Threads of the tokenizer's package would count as memory.
        pipes["env"] = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        process: Any = subprocess.Popen(line, **pipes)
        self._all.add(process)
        with contextlib.suppress(OSError):
            process.stdin.write(self._state)
        return process

    def _failed(self, status: int) -> Exception:
        why = f"ended with status {status}; they may need more than {MEMORY_BYTES >> 30} GiB of memory"
        if status == -signal.SIGPROF:
            why = f"did not end in {self._limit_s:g} s of processor time"
        kind = RuntimeError if status == 1 else ValueError  # an exception of Python: our own fault
        return kind(
            f"the chat template or the tokenizer of '{self._name}' {why}; mend it, or ask for less"
        )


def _end(processes: Any) -> None:
    for process in [*processes]:
        with contextlib.suppress(OSError), process:
            process.kill()


def _answer() -> None:
    """Take a `Chat` and calls of it from standard input, and answer each in a line of JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; this one ends with its input
    chat, limit_s = pickle.load(sys.stdin.buffer)
    with contextlib.suppress(ImportError, OSError):
        import resource

        begun = (
            int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        )
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (begun + MEMORY_BYTES,) * 2)
    plain = lambda x: x.tolist() if isinstance(x, np.ndarray) else sorted(x)
    while call := _read():
        # its signal ends the process, whatever it does
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            value = getattr(chat, call[0])
            value = value(*call[1]) if callable(value) else value
            reply = json.dumps({"made": value}, default=plain)
        except ValueError as error:
            reply = json.dumps({"refused": str(error)})
        except MemoryError:
            os._exit(FULL)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(reply, flush=True)


def _read() -> Any:
    with contextlib.suppress(EOFError):
        return pickle.load(sys.stdin.buffer)
