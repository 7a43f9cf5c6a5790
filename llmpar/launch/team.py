"""Run one function after another in a team of processes that stay, as a kernel runs a notebook's cells.

The notebook's process is not one of them. It sends each the same function with the same arguments, over the
pair of sockets that is the process' input; all run it together, and each sends a result back. A function may
be written in the notebook: cloudpickle sends its code and what it names.
"""

import atexit
import contextlib
import faulthandler
import io
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from llmpar.launch.local import Processes
from llmpar.launch.wire import Wire

_OWN = ("_work", "_main", "_run_code", "_run_module_as_main", "<module>")
"""The functions of a process' stack that only call what was sent."""
_START_S, _GRACE_S = 120.0, 4.0
"""Seconds for all processes to come; and for the others to answer after one of them failed."""


class TeamError(RuntimeError):
    """Report that a function failed, or did not return, on a process. ``ends`` has the end of each
    process."""

    def __init__(self, ends: Mapping[int, str]):
        self.ends = dict(ends)
        super().__init__(
            "\n".join(f"process {number} {words}" for number, words in self.ends.items())
        )


class Team(contextlib.ExitStack):
    """Start several processes on this machine and join them, each with some simulated devices; leaving
    ``with``, or `close`, ends them and removes the wire.

    Args:
        num: processes.
        devices: simulated by each process.
        rate: of the wire between them, which makes each process a host (`wire.Wire`); None: all on loopback.
        base: their environment; by default this process' own.

    Raises ValueError where no wire can be made or cloudpickle is missing, RuntimeError where none comes."""

    def __init__(
        self, num: int, devices: int, rate: str | None = None, base: Mapping[str, str] | None = None
    ):
        super().__init__()
        try:
            import cloudpickle
        except ImportError:
            raise ValueError(
                "a team needs cloudpickle, which is missing; pip install 'llmpar[lab]'"
            ) from None
        self.num, self._dumps = num, cloudpickle.dumps
        atexit.register(self.close)
        self.callback(atexit.unregister, self.close)
        try:
            wire = self.enter_context(Wire(num, rate)) if rate is not None else None
            self._lines, theirs = zip(*(Pipe() for _ in range(num)), strict=True)
            command = [sys.executable, "-m", __spec__.name]
            self._processes = Processes(command, num, devices, base, wire=wire, inputs=theirs)
            self.enter_context(self._processes)
            for line in theirs:
                line.close()
            if len(self._answers(time.monotonic() + _START_S)[0]) < num:
                raise RuntimeError(
                    "not all processes have come\n" + "\n".join(self._words().values())
                )
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable, *given: Any, timeout_s: float = 300.0) -> list[Any]:
        """Run a function in all processes, and return the result of each. What it prints is printed here.

        Raises TeamError where one fails, ends, or has not returned after ``timeout_s``; the team is over
        then, because the others may wait for that process for ever.
        """
        if any(one.poll() is not None for one in self._processes.running):
            raise RuntimeError("this team is over; start another")
        task = self._dumps((function, given))
        try:
            for line in self._lines:
                line.send_bytes(task)
            results, failed = self._answers(time.monotonic() + timeout_s)
        # an interrupted cell: later answers would be taken for those of the next function
        except BaseException:
            self.close()
            raise
        if len(results) == self.num and not failed:
            return [results[number] for number in range(self.num)]
        ends = self._words(failed | dict.fromkeys(results, "has come back"))
        self.close()
        raise TeamError(ends)

    def _answers(self, until: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Return the results and the failures of processes, when all have answered or it is too late."""
        results: dict[int, Any] = {}
        failed: dict[int, str] = {}
        while (left := until - time.monotonic()) > 0 and len(results | failed) < self.num:
            silent = {line: i for i, line in enumerate(self._lines) if i not in results | failed}
            for line in wait(silent, min(left, 0.2)):
                number = silent[line]  # type: ignore[index]
                try:
                    good, answer, printed = pickle.loads(self._lines[number].recv_bytes())
                    (results if good else failed)[number] = answer
                    for words in printed.splitlines():
                        print(f"[process {number}] {words}")
                except (EOFError, OSError):
                    failed[number] = (
                        f"was ended by {_status(self._processes.running[number].wait(10))}"
                    )
            if failed:
                until = min(until, time.monotonic() + _GRACE_S)
        return results, failed

    def _words(self, known: Mapping[int, str] | None = None) -> dict[int, str]:
        """Describe the end of each process: as ``known``, or by its exit status or its stack."""
        last_words = dict(known or {})
        for number, one in enumerate(self._processes.running):
            if number in last_words:
                continue
            if one.poll() is not None:
                last = [
                    line for line in self._processes.output_of(number).splitlines() if line.strip()
                ][-3:]
                last_words[number] = f"was ended by {_status(one.returncode)}: {' | '.join(last)}"
                continue
            frames = self._frames(number)
            late = "recv_bytes" in frames  # it has returned meanwhile, and waits for more
            stands = " < ".join(dict.fromkeys((frames[0], frames[-1]))) if frames else "native code"
            last_words[number] = (
                "has come back" if late else f"has not come back; it stands in {stands}"
            )
        return dict(sorted(last_words.items()))

    def _frames(self, number: int) -> list[str]:
        """List the functions on the stack of a process that does not answer, the innermost first."""
        before, main = len(self._processes.output_of(number)), ""
        # faulthandler writes the stacks
        os.kill(self._processes.running[number].pid, signal.SIGUSR1)
        until = time.monotonic() + 2.0
        while not main and time.monotonic() < until:
            time.sleep(0.2)
            main = self._processes.output_of(number)[before:].rpartition("Current thread")[2]
        frames = [
            line.rpartition(" in ")[2] for line in main.splitlines() if line.startswith("  File")
        ]
        return [frame for frame in frames if frame not in _OWN]


def _status(number: int) -> str:
    return signal.Signals(-number).name if number < 0 else f"itself with status {number}"


def _main() -> None:
    """Join the others, and run what comes until the notebook's process goes."""
    from llmpar.launch.joined import initialize
    from llmpar.parallel.mesh import use_devices

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with Connection(os.dup(0)) as line, contextlib.suppress(EOFError):
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        initialize()
        use_devices()
        line.send_bytes(pickle.dumps((True, "has come", "")))
        while True:
            line.send_bytes(_work(line.recv_bytes()))
    os._exit(0)  # JAX would wait for the others


def _work(task: bytes) -> bytes:
    """Run a function; return its result or its error, and what it printed, to be sent."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            function, given = pickle.loads(task)
            return pickle.dumps((True, function(*given), printed.getvalue()))
        except Exception as error:
            traceback.print_exc()
            why = f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return pickle.dumps((False, why, printed.getvalue()))


if __name__ == "__main__":
    _main()
