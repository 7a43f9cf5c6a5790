"""Start several processes here, on loopback, and end them together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmpar.launch.joined import LAUNCHER, free_port
from llmpar.launch.wire import Wire

GRACE_S = 20.0
"""Seconds that processes have to save and leave when they were asked to, and to end when one failed."""


@dataclass(frozen=True)
class Ended:
    """How the processes ended.

    Attributes:
        statuses: exit statuses by process; negative: the signal that ended it.
        first: the process that failed first; None where none did.
        words: by process, what it wrote on stderr (stdout too, but for process 0's).
        output: process 0's stdout.
    """

    statuses: tuple[int, ...]
    first: int | None
    words: tuple[str, ...]
    output: str = ""

    @property
    def status(self) -> int:
        """The exit status of all: of the first that failed, 0 where none did."""
        found = 0 if self.first is None else self.statuses[self.first]
        return 128 - found if found < 0 else found


def environment(
    num: int, number: int, coordinator: str, devices: int | None, base: Mapping[str, str]
) -> dict:
    """The variables of one of ``num`` processes here; ``devices`` are those that it simulates, or None."""
    told = {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": str(num),
        "JAX_PROCESS_ID": str(number),
        LAUNCHER: str(os.getpid()),
    }
    if devices is not None:
        flags = base.get("XLA_FLAGS", "").split()  # one of them would count devices, too
        left = [flag for flag in flags if not flag.startswith("--xla_force_host_platform_device_count")]
        told |= {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
        told |= {"XLA_FLAGS": " ".join(left)} if flags else {}
    return dict(base) | told


class Processes:
    """Several processes with one command; whatever happens inside ``with``, none is left behind it. If this
    process is killed, those of llmpar end by themselves (`joined.end_with_launcher`).

    Process 0 writes where this process writes (with ``show``); what the others say is kept, and told where
    one of them fails first. With a ``wire`` each is on a host of its own; else all are on loopback.
    """

    def __init__(
        self,
        command: Sequence[str],
        num: int,
        devices: int | None = None,
        base: Mapping[str, str] | None = None,
        show: bool = False,
        wire: Wire | None = None,
    ):
        self.wire = wire
        self.command, self.num, self.devices, self.show = list(command), num, devices, show
        self.base = os.environ if base is None else base
        self.running: list[subprocess.Popen] = []
        self._files: list = []

    def __enter__(self) -> Processes:
        host = self.wire.address(0) if self.wire else "127.0.0.1"
        coordinator = f"{host}:{free_port()}"
        for number in range(self.num):
            files = [tempfile.TemporaryFile() for _ in range(2)]
            self._files.append(files)
            shown = self.show and number == 0
            self.running.append(
                subprocess.Popen(
                    self.wire.command(number, self.command) if self.wire else self.command,
                    env=environment(self.num, number, coordinator, self.devices, self.base),
                    stdin=subprocess.DEVNULL,
                    stdout=None if shown else files[0],
                    stderr=None if shown else files[1],
                    start_new_session=True,  # Ctrl-C is ours: we ask them to stop
                )
            )
        return self

    def __exit__(self, *_) -> None:
        for process in self.running:
            self._end(process, signal.SIGKILL)
        for process in self.running:
            process.wait()
        for files in self._files:
            for file in files:
                file.close()

    @staticmethod
    def _end(process: subprocess.Popen, number: int) -> None:
        """Signal a process that is still running, and what it started."""
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def stop(self) -> None:
        """Ask all to finish the step, save and leave."""
        for process in self.running:
            self._end(process, signal.SIGTERM)

    def wait(self, timeout_s: float | None = None) -> Ended:
        """Wait for all. When one fails the others have `GRACE_S` seconds to say why, and are killed then, as
        all are after ``timeout_s``.

        Raises TimeoutError after ``timeout_s``.
        """
        begin, first, failed_at = time.monotonic(), None, 0.0
        while (statuses := [p.poll() for p in self.running]).count(None):
            now = time.monotonic()
            bad = [i for i, status in enumerate(statuses) if status]
            if bad and first is None:
                first, failed_at = bad[0], now
            if (first is not None and now > failed_at + GRACE_S) or (timeout_s and now > begin + timeout_s):
                for process in self.running:
                    self._end(process, signal.SIGKILL)
                if first is None:
                    said = "\n".join(self._said(i)[-1500:] for i in range(self.num))
                    raise TimeoutError(f"{self.num} processes did not end within {timeout_s} s:\n{said}")
            time.sleep(0.05)
        bad = [i for i, status in enumerate(statuses) if status]
        first = first if first is not None else next(iter(bad), None)
        words = tuple(self._said(i) for i in range(self.num))
        return Ended(tuple(int(s or 0) for s in statuses), first, words, self._text(0, 0))

    def _text(self, number: int, which: int) -> str:
        file = self._files[number][which]
        file.seek(0)
        return file.read().decode(errors="replace")

    def _said(self, number: int) -> str:
        return (self._text(number, 0) if number else "") + self._text(number, 1)


def run(command: Sequence[str], num: int, devices: int | None, wire: Wire | None = None) -> int:
    """Run a command in several processes here, process 0 on this terminal, and give the exit status.

    The first Ctrl-C or SIGTERM asks them to save and leave, the second ends them; afterwards signals do here
    what they did before.
    """
    asked, before = 0, {}
    with Processes(command, num, devices, show=True, wire=wire) as processes:

        def ask(number, frame) -> None:
            nonlocal asked
            asked += 1
            if asked > 1:
                for process in processes.running:
                    processes._end(process, signal.SIGKILL)
            else:
                processes.stop()

        try:
            if threading.current_thread() is threading.main_thread():
                before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
            ended = processes.wait()
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
    if ended.first is not None and ended.statuses[ended.first] < 0 and not asked:
        number = signal.Signals(-ended.statuses[ended.first]).name
        print(f"llmpar: process {ended.first} was ended by {number}", file=sys.stderr, flush=True)
    if ended.first and ended.statuses[0] <= 0:  # else process 0 has said why
        tail = [line for line in ended.words[ended.first].splitlines() if line.strip()][-20:]
        for line in tail:
            print(f"[process {ended.first}] {line}", file=sys.stderr, flush=True)
    return ended.status
