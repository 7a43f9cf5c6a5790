"""React to a signal at once, whatever the main thread does.

XLA compiles for seconds to minutes, and Python calls a handler only between two of its own instructions. So a
thread reads the wakeup descriptor of `signal`, to which C writes when the signal arrives.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

_STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
"""Requests to stop: Ctrl-C, a scheduler's, a lost terminal's."""
_WAKEUPS: list[int] = []
"""Descriptors to which C writes for the threads of `signals_to`, the newest last."""


class _Handler:
    """Let a thread act on a signal, and wait for it, so that the main thread does not go on before the
    effect. Act in the main thread where an event loop has taken the descriptor."""

    def __init__(self, act: Callable[[int], None]):
        self.act, self.acted = act, threading.Semaphore(0)

    def __call__(self, number: int, _) -> None:
        if signal.set_wakeup_fd(_WAKEUPS[-1], warn_on_full_buffer=False) in _WAKEUPS:
            self.acted.acquire(timeout=1)
        else:
            self.act(number)


@contextlib.contextmanager
def signals_to(act: Callable[[int], None], numbers: Sequence[int] = _STOPS) -> Iterator[None]:
    """Let a thread call ``act`` with the number of each signal; restore the handlers afterwards. An ignored
    SIGHUP stays ignored: nohup ignores it."""
    # Python gives signals to no other
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    threading.Thread(target=_listen, args=(read,), daemon=True).start()
    outer = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    handler = _Handler(act)
    _WAKEUPS.append(write)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    kept = [number for number in numbers if not (ignored and number == signal.SIGHUP)]
    before = {number: signal.signal(number, handler) for number in kept}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
        signal.set_wakeup_fd(outer)
        _WAKEUPS.remove(write)
        os.close(write)


def _listen(read: int) -> None:
    """Act on the signals whose numbers arrive, until the other end is closed."""
    with open(read, "rb", buffering=0) as numbers:
        while byte := numbers.read(1):
            handler = signal.getsignal(byte[0])
            if isinstance(handler, _Handler):  # else another handler has been set
                handler.act(byte[0])
                handler.acted.release()


class ForPeople:
    """stderr, but silent once it cannot be written: a closed pipe, a full disk."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write what can be written."""
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Write what is in the buffer."""
        self._try(self._stream.flush)

    def _try(self, call: Callable[..., Any], *given: str) -> None:
        try:
            call(*given)
        except (OSError, ValueError):  # ValueError: it was closed
            silence(self._stream)


def silence(stream: Any) -> None:
    """Drop what a stream has not written yet, and all that follows."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write_sentence(sentence: str) -> None:
    """Write a sentence to stderr at once, if stderr can be written."""
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), f"llmpar: {sentence}\n".encode())


def end(sentence: str, status: int) -> NoReturn:
    """Write a sentence and end this process at once, even if it waits in native code."""
    write_sentence(sentence)
    with contextlib.suppress(OSError, ValueError):
        number = sys.stderr.fileno()
        # the cursor, which a progress bar hides
        os.write(number, b"\x1b[?25h" * os.isatty(number))
    os._exit(status)
