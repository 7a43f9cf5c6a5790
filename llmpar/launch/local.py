"""Start several processes on this machine, and end them together."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from llmpar.launch.jobs import keeps
from llmpar.launch.joined import FAILED, LAUNCHER, STUCK, free_port
from llmpar.launch.signals import signals_to
from llmpar.launch.wire import Wire

_GRACE_S = 20.0
"""Seconds that processes have to save and leave when they were asked to, and to end when one failed."""


@dataclass(frozen=True)
class Ended:
    """State how the processes ended.

    Attributes:
        statuses: exit statuses by process; a negative one is the signal that ended it.
        first: the process that failed first; None where none did.
        words: by process, its stderr (of all but process 0 the stdout too).
        output: process 0's stdout.
    """

    statuses: tuple[int, ...]
    first: int | None
    words: tuple[str, ...]
    output: str = ""

    @property
    def status(self) -> int:
        """Return the exit status of the process that failed first, 0 where none did."""
        status = 0 if self.first is None else self.statuses[self.first]
        return 128 - status if status < 0 else status


def environment(
    num: int, number: int, address: str, devices: int | None, base: Mapping[str, str]
) -> dict:
    """Return the environment of one of ``num`` processes.

    It simulates ``devices`` devices, unless None."""
    variables = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(num),
        "JAX_PROCESS_ID": str(number),
        LAUNCHER: str(os.getpid()),
    }
    if devices is not None:
        flags = base.get("XLA_FLAGS", "").split()  # one of them would count devices, too
        left = [
            flag for flag in flags if not flag.startswith("--xla_force_host_platform_device_count")
        ]
        variables |= {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
        variables |= {"XLA_FLAGS": " ".join(left)} if flags else {}
    return dict(base) | variables


@dataclass
class Processes:
    """Run several processes with one command; leaving ``with`` ends all of them. If this process is killed,
    those of llmpar end by themselves (`joined.end_with_launcher`).

    With ``show`` process 0 writes where this process writes; the output of the others is kept, and printed if
    one of them fails first. With a ``wire`` each is on a host of its own; else all are on loopback. Each
    reads its entry of ``inputs``, or nothing.
    """

    command: Sequence[str]
    num: int
    devices: int | None = None
    base: Mapping[str, str] | None = None
    show: bool = False
    wire: Wire | None = None
    inputs: Sequence[Any] = ()
    running: list[subprocess.Popen] = field(default_factory=list, init=False)
    _files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)
    _out: list[tuple[IO[bytes], IO[bytes]]] = field(default_factory=list, init=False)

    def __enter__(self) -> "Processes":
        host = self.wire.address(0) if self.wire else "127.0.0.1"
        coordinator = f"{host}:{free_port()}"
        for number in range(self.num):
            out, err = (self._files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            self._out.append((out, err))
            shown = self.show and number == 0
            process = subprocess.Popen(
                self.wire.command(number, self.command) if self.wire else self.command,
                env=environment(
                    self.num, number, coordinator, self.devices, self.base or os.environ
                ),
                stdin=self.inputs[number] if self.inputs else subprocess.DEVNULL,
                stdout=None if shown else out,
                stderr=None if shown else err,
                start_new_session=True,  # Ctrl-C reaches this process only, which passes it on
            )
            self.running.append(process)
        return self

    def __exit__(self, *_) -> None:
        self.end()
        for process in self.running:
            process.wait()
        self._files.close()

    def end(self, number: int = signal.SIGKILL) -> None:
        """Signal all that still run, and their children.

        SIGTERM lets them finish a step, save and leave."""
        for process in self.running:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def wait(self, timeout_s: float = float("inf")) -> Ended:
        """Wait for all. When one fails the others have `_GRACE_S` seconds to report why; then they are
        killed.

        Raises TimeoutError after ``timeout_s``.
        """
        until, first = time.monotonic() + timeout_s, None
        while True:
            statuses = [process.poll() for process in self.running]
            if first is None and any(statuses):
                first = next(i for i, status in enumerate(statuses) if status)
                until = min(until, time.monotonic() + _GRACE_S)
            if None not in statuses:
                break
            if time.monotonic() > until:
                self.end()
                if first is None:
                    outputs = "\n".join(self.output_of(i)[-1500:] for i in range(self.num))
                    raise TimeoutError(
                        f"{self.num} processes did not end within {timeout_s} s:\n{outputs}"
                    )
            time.sleep(0.05)
        words = tuple(self.output_of(i) for i in range(self.num))
        return Ended(tuple(int(s or 0) for s in statuses), first, words, self._text(0, 0))

    def _text(self, number: int, which: int) -> str:
        file = self._out[number][which]
        file.seek(0)
        return file.read().decode(errors="replace")

    def output_of(self, number: int) -> str:
        return (self._text(number, 0) if number else "") + self._text(number, 1)


def run_locally(
    command: Sequence[str], num: int, devices: int | None, wire: Wire | None = None
) -> int:
    """Run a command in several processes on this machine, process 0 on this terminal; return the exit status.

    The first Ctrl-C, SIGTERM or SIGHUP lets them save and leave, the second ends them. Ctrl-C reaches them as
    it is, another signal as SIGTERM. The status is then that of the first signal, unless one failed for
    another reason.
    """
    requests = list[int]()
    processes = Processes(command, num, devices, show=True, wire=wire)

    def ask(number: int) -> None:
        requests.append(number)
        # a scheduler's words are for all programs; Ctrl-C ends those that have nothing to save at once
        first = number if number == signal.SIGINT else signal.SIGTERM
        processes.end(signal.SIGKILL if len(requests) > 1 else first)

    with signals_to(ask), processes:
        if requests:  # while they were started
            processes.end(signal.SIGTERM)
        ended = processes.wait()
    lines = list[str]()
    if ended.first and ended.statuses[0] <= 0:  # else process 0 has printed why
        tail = [line for line in ended.words[ended.first].splitlines() if line.strip()][-20:]
        lines = [f"[process {ended.first}] {line}" for line in tail]
    if ended.first is not None and not requests:
        by = -ended.statuses[ended.first]
        name = f"was ended by {signal.Signals(by).name}" if by > 0 else "failed"
        again = "; the same command goes on from checkpoints" if keeps(command) else ""
        if by > 0 or ended.status in (FAILED, STUCK):
            lines += [f"llmpar: process {ended.first} {name} (status {ended.status}){again}"]
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    left = ended.status in {
        128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    }
    return 128 + requests[0] if requests and left else ended.status
