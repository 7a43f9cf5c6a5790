"""A team: processes that stay, and run one function after another, as a notebook's cells run in its kernel.

The notebook's process is none of them. It hands each the same function with the same arguments, over a socket
in a folder of its own; all run it together, and each gives a result back. A function may be written in the
notebook: its code travels, the modules that it names are imported there, and what else it names is copied.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import io
import marshal
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from llmpar.launch.local import Processes
from llmpar.launch.wire import Count, Wire

ADDRESS, STACKS = "LLMPAR_TEAM", "LLMPAR_STACKS"
"""Variables that tell a process where its team meets, and into which file it writes where it stands."""
OWN = ("_work", "main", "_run_code", "_run_module_as_main", "<module>")
"""Of the functions in which a process stands: those that call what was sent."""
START_S, GRACE_S = 120.0, 4.0
"""Seconds for all to come; and for the others to say something after one of them failed."""


class TeamError(RuntimeError):
    """A function failed, or did not come back, on one of the processes. What each of them did is in ``ends``
    by process: its last words."""

    def __init__(self, ends: Mapping[int, str]):
        self.ends = dict(ends)
        super().__init__("\n".join(f"process {number} {words}" for number, words in self.ends.items()))


class Team:
    """Several processes on this machine that have joined, each with some simulated devices.

    Args:
        num: processes.
        devices: that each of them simulates.
        rate: of the wire between them, which makes each process a host (`wire.Wire`); None: all on loopback.
        base: the environment that they start from; by default this process's.

    Raises ValueError where no wire can be made, RuntimeError where a process does not start.
    """

    def __init__(
        self, num: int, devices: int, rate: str | None = None, base: Mapping[str, str] | None = None
    ):
        self.num, self._over = num, contextlib.ExitStack()
        atexit.register(self.close)
        try:
            self._start(devices, rate, os.environ if base is None else base)
        except BaseException:
            self.close()
            raise

    def _start(self, devices: int, rate: str | None, base: Mapping[str, str]) -> None:
        folder = Path(self._over.enter_context(tempfile.TemporaryDirectory()))
        self._stacks = [folder / f"stacks{number}" for number in range(self.num)]
        self.wire = self._over.enter_context(Wire(self.num, rate)) if rate else None
        told = {ADDRESS: str(folder / "team"), STACKS: str(folder / "stacks")}
        command = [sys.executable, "-m", __spec__.name]
        self._processes = Processes(command, self.num, devices, {**base, **told}, wire=self.wire)
        self._lines: list[Connection] = []
        with Listener(str(folder / "team"), "AF_UNIX", backlog=self.num) as listener:
            self._over.enter_context(self._processes)
            coming = threading.Thread(target=self._meet, args=(listener,), daemon=True)
            coming.start()
            until = time.monotonic() + START_S
            while coming.is_alive() and time.monotonic() < until and not self._ended():
                coming.join(0.1)
        if not self._lines:
            raise RuntimeError("not all processes have come\n" + "\n".join(self._words().values()))

    def _meet(self, listener: Listener) -> None:
        lines: dict[int, Connection] = {}
        with contextlib.suppress(OSError):  # nobody waits for more
            while len(lines) < self.num:
                line = listener.accept()
                lines[line.recv()] = line
            self._lines = [lines[number] for number in range(self.num)]

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, and take the wire away."""
        atexit.unregister(self.close)
        self._over.close()

    def counted(self, host: int) -> Count:
        """What a host has sent to the others so far; nothing without a wire."""
        return self.wire.counted(host) if self.wire else Count(0, 0)

    def _ended(self) -> list[int]:
        """The processes that have ended."""
        return [number for number, one in enumerate(self._processes.running) if one.poll() is not None]

    def run(self, function: Callable, *given: Any, timeout_s: float = 300.0) -> list[Any]:
        """Run a function in all processes, and give what each returns. What it prints is printed here.

        Raises TeamError where one fails, ends, or has not come back after ``timeout_s``; the team is over
        then, because the others may wait for it for ever.
        """
        if self._ended() or not self._lines:
            raise RuntimeError("this team is over; start another")
        task = pickle.dumps((portable(function), [_named(value) for value in given]))
        try:
            for line in self._lines:
                line.send_bytes(task)
            found, failed = self._answers(time.monotonic() + timeout_s)
        except BaseException:  # an interrupted cell: what still comes would be taken for the next answer
            self.close()
            raise
        if len(found) == self.num and not failed:
            return [found[number] for number in range(self.num)]
        ends = self._words(failed | dict.fromkeys(found, "has come back"))
        self.close()
        raise TeamError(ends)

    def _answers(self, until: float) -> tuple[dict[int, Any], dict[int, str]]:
        """What processes gave back, and what failed, until all have answered or it is too late."""
        found: dict[int, Any] = {}
        failed: dict[int, str] = {}
        while (left := until - time.monotonic()) > 0:
            silent = [i for i in range(self.num) if i not in found and i not in failed]
            if not silent:
                break
            for line in wait([self._lines[i] for i in silent], min(left, 0.2)):
                number = self._lines.index(line)  # type: ignore[arg-type]
                try:
                    good, answer, printed = pickle.loads(self._lines[number].recv_bytes())
                    (found if good else failed)[number] = answer
                    for words in printed.splitlines():
                        print(f"[process {number}] {words}")
                except (EOFError, OSError):
                    self._processes.running[number].wait(10)
                    failed[number] = f"was ended by {_status(self._processes.running[number].returncode)}"
            if failed:
                until = min(until, time.monotonic() + GRACE_S)
        return found, failed

    def _words(self, known: Mapping[int, str] | None = None) -> dict[int, str]:
        """What each process did last: as it said, or as its status or its stack says."""
        said = dict(known or {})
        for number, one in enumerate(self._processes.running):
            if number in said:
                continue
            if one.poll() is not None:
                last = [line for line in self._processes._said(number).splitlines() if line.strip()][-3:]
                said[number] = f"was ended by {_status(one.returncode)}: {' | '.join(last)}"
            else:
                stands = self._standing(number)
                late = "recv_bytes" in stands  # it came back meanwhile, and waits for more
                said[number] = "has come back" if late else f"has not come back; it stands in {stands}"
        return dict(sorted(said.items()))

    def _standing(self, number: int) -> str:
        """The function in which a process that does not answer stands, by its stack."""
        file = self._stacks[number]
        if not file.exists():
            return "its start"
        os.kill(self._processes.running[number].pid, signal.SIGUSR1)
        until = time.monotonic() + 2.0
        while not file.stat().st_size and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.1)
        main = file.read_text().rpartition("Current thread")[2] or file.read_text()
        frames = [line.rpartition(" in ")[2] for line in main.splitlines() if line.startswith("  File")]
        ours = [frame for frame in frames if frame not in OWN]
        return " < ".join(ours[:1] + ours[-1:] if len(ours) > 1 else ours) or "native code"


def _status(number: int) -> str:
    return signal.Signals(-number).name if number < 0 else f"itself with status {number}"


# -------------------------------------------------------------------------------------- functions that travel


def portable(function: Callable) -> Any:
    """What another process needs to make a function of this one: its name, or its code and what it names."""
    if function.__module__ != "__main__":
        return function  # by its name
    if function.__closure__:
        raise ValueError(f"'{function.__name__}' is written inside another function; give it its values")
    named = {}
    for name in _names(function.__code__):
        if name in function.__globals__:
            named[name] = _named(function.__globals__[name])
    return marshal.dumps(function.__code__), function.__defaults__, function.__kwdefaults__, named


def _names(code: types.CodeType) -> set[str]:
    """What a function names, and the functions inside it."""
    inside = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return set(code.co_names).union(*map(_names, inside))


def _named(value: Any) -> tuple[str, Any]:
    if isinstance(value, types.ModuleType):
        return "module", value.__name__
    if isinstance(value, types.FunctionType) and value.__module__ == "__main__":
        return "function", portable(value)
    return "value", value


def made(told: Any) -> Callable:
    """The function that `portable` took apart."""
    if callable(told):
        return told
    code, defaults, named_defaults, named = told
    world = {name: _value(*one) for name, one in named.items()}
    function = types.FunctionType(
        marshal.loads(code), {"__builtins__": __builtins__, **world}, None, defaults
    )
    function.__kwdefaults__ = named_defaults
    return function


def _value(kind: str, told: Any) -> Any:
    if kind == "module":
        return importlib.import_module(told)
    return made(told) if kind == "function" else told


# ------------------------------------------------------------------------------------------------ one of them


def main() -> None:
    """Join the others, and run what comes until the notebook's process goes."""
    from llmpar.launch.joined import initialize
    from llmpar.mesh import use_devices

    place = initialize()
    use_devices()
    number = place.process_id
    stacks = open(f"{os.environ[STACKS]}{number}", "w")
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    with Client(os.environ[ADDRESS], "AF_UNIX") as line:
        line.send(number)
        while True:
            try:
                task = line.recv_bytes()
            except EOFError:
                os._exit(0)  # JAX would wait for the others
            line.send_bytes(_work(task))


def _work(task: bytes) -> bytes:
    """Run a function; the result, or what went wrong, and what was printed, to be sent."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            told, given = pickle.loads(task)
            return pickle.dumps((True, made(told)(*(_value(*one) for one in given)), printed.getvalue()))
        except Exception as error:
            traceback.print_exc()
            why = f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return pickle.dumps((False, why, printed.getvalue()))


if __name__ == "__main__":
    main()
