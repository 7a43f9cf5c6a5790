"""Hear a signal at once, whatever the main thread does.

XLA compiles for seconds to minutes, and Python calls a handler only between two of its own instructions. A
thread hears through the wakeup descriptor of `signal`, to which C writes as the signal comes.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

_STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
"""What asks a process to stop: Ctrl-C, a scheduler, a terminal that is lost."""


_ENDS: list[int] = []
"""Where C writes for those threads that hear, the newest last."""


class _Heard:
    """A handler in whose place a thread acts. The main thread waits for it, so that nothing follows a signal
    before its effect; or acts, where an event loop has taken the descriptor."""

    def __init__(self, act: Callable[[int], None]):
        self.act, self.acted = act, threading.Semaphore(0)

    def __call__(self, number: int, _) -> None:
        if signal.set_wakeup_fd(_ENDS[-1], warn_on_full_buffer=False) in _ENDS:
            self.acted.acquire(timeout=1)
        else:
            self.act(number)


@contextlib.contextmanager
def signals_to(act: Callable[[int], None], numbers: Sequence[int] = _STOPS) -> Iterator[None]:
    """Let a thread call ``act`` with the number of each signal; afterwards they do here what they did before.
    A SIGHUP that is ignored stays so: nohup asks for it."""
    if threading.current_thread() is not threading.main_thread():  # Python gives signals to no other
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    threading.Thread(target=_listen, args=(read,), daemon=True).start()
    outer, heard = signal.set_wakeup_fd(write, warn_on_full_buffer=False), _Heard(act)
    _ENDS.append(write)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    kept = [number for number in numbers if not (ignored and number == signal.SIGHUP)]
    before = {number: signal.signal(number, heard) for number in kept}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
        signal.set_wakeup_fd(outer)
        _ENDS.remove(write)
        os.close(write)


def _listen(read: int) -> None:
    """Act on the signals whose numbers come, until nobody can write any more."""
    with open(read, "rb", buffering=0) as numbers:
        while byte := numbers.read(1):
            heard = signal.getsignal(byte[0])
            if isinstance(heard, _Heard):  # else its handler is another's
                heard.act(byte[0])
                heard.acted.release()


def write_sentence(sentence: str) -> None:
    """Write a sentence on stderr now, if that can be written."""
    with contextlib.suppress(OSError):
        os.write(2, f"llmpar: {sentence}\n".encode())


def end(sentence: str, status: int) -> NoReturn:
    """End this process at once, which may wait in native code, with a sentence."""
    write_sentence(sentence)
    with contextlib.suppress(OSError):
        os.write(2, b"\x1b[?25h" * os.isatty(2))  # the cursor, which a bar of progress hides
    os._exit(status)
