"""Hosts in a box, and a SLURM on them: network namespaces with names, addresses and processes. Needs root.

A host's first process ends with this program, and the kernel then ends all others: nothing is left running.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

NETWORK = "10.77.0"
HEAD = "head"
_FIRST = 'hostname "$0" && mount --bind "$1" /etc/hosts && echo ready && exec sleep infinity'


def missing() -> str:
    """What keeps this machine from having hosts in a box; '' where nothing does."""
    if os.geteuid():
        return "needs root"
    if lacking := [tool for tool in ("ip", "unshare", "nsenter", "setpriv") if not shutil.which(tool)]:
        return f"needs {', '.join(lacking)}"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"])
    return "needs the right to make namespaces" if tried.returncode else ""


class Hosts:
    """Hosts n1, n2, … and ``head``, one Ethernet between them; ``folder`` keeps their list of names."""

    def __init__(self, num: int, folder: Path):
        self.names = [HEAD, *(f"n{i}" for i in range(1, num + 1))]
        self.folder = folder
        self._holders: dict[str, subprocess.Popen] = {}
        self._running: list[tuple[str, subprocess.Popen]] = []

    def __enter__(self) -> Hosts:
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = ["127.0.0.1 localhost", *(f"{self.address(name)} {name}" for name in self.names)]
        (self.folder / "hosts").write_text("\n".join(rows) + "\n")
        try:
            for name in self.names:
                self.start(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for name in list(self._holders):
            self.fail(name)

    def address(self, name: str) -> str:
        """The head's is the last one."""
        return f"{NETWORK}.{254 if name == HEAD else int(name[1:])}"

    def start(self, name: str) -> None:
        """Start a host, or start it again after it has failed."""
        first = ["sh", "-c", _FIRST, name, str(self.folder / "hosts")]
        apart = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = ["setpriv", "--pdeathsig", "KILL", *apart, *first]
        ends = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        holder = subprocess.Popen(command, **ends, start_new_session=True)
        self._holders[name] = holder
        if not holder.stdout or holder.stdout.readline() != b"ready\n":
            raise RuntimeError(f"host {name} did not start: {missing() or 'see above'}")
        self._ip(name, "link set lo up")
        if name == HEAD:
            self._ip(HEAD, "link add eth0 type bridge")
        else:
            self._ip(HEAD, f"link add v{name} type veth peer name eth0 netns {self._first(name)}")
            self._ip(HEAD, f"link set v{name} master eth0 up")
        self._ip(name, f"addr add {self.address(name)}/24 dev eth0")
        self._ip(name, "link set eth0 up")

    def fail(self, name: str) -> None:
        """End a host and all that runs on it at once, as a power cut does."""
        holder = self._holders.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._first(name, holder), 9)
        holder.kill()
        holder.wait()
        if holder.stdout:
            holder.stdout.close()
        for where, process in self._running:
            if where == name:
                process.wait()

    def _first(self, name: str, holder: subprocess.Popen | None = None) -> int:
        """The host's first process, as this machine numbers it."""
        pid = (holder or self._holders[name]).pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        return int(children.read_text().split()[0]) if children.exists() and children.read_text() else pid

    def _ip(self, name: str, words: str) -> None:
        subprocess.run(["nsenter", "-t", str(self._first(name)), "-n", "ip", *words.split()], check=True)

    def inside(self, name: str, command: Sequence[str], folder: Path | str = ".") -> list[str]:
        """The command that runs another one on a host, in a folder."""
        enter = ["nsenter", "-t", str(self._first(name)), "--net", "--uts", "--mount", "--pid"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(Path(folder).resolve()), *command]

    def run(self, name: str, command: Sequence[str], folder: Path | str = ".", timeout_s: float = 60, **more):
        more = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL} | more
        return subprocess.run(self.inside(name, command, folder), timeout=timeout_s, **more)

    def background(self, name: str, command: Sequence[str], log: Path, folder: Path | str = ".", **more):
        """Start a command on a host; it writes into ``log``."""
        with open(log, "ab") as file:
            ends = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT} | more
            process = subprocess.Popen(self.inside(name, command, folder), start_new_session=True, **ends)
        self._running.append((name, process))
        return process


Say = Callable[[], str]


def until(done: Callable[[], object], what: str, timeout_s: float = 300, said: Say = str) -> float:
    """Wait until something is so; give the seconds. Raises TimeoutError, with what ``said`` gives."""
    begin = time.monotonic()
    while not done():
        if time.monotonic() > begin + timeout_s:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s\n{said()}")
        time.sleep(0.05)
    return time.monotonic() - begin


CONFIG = (Path(__file__).parent / "fixtures" / "slurm.conf").read_text()


class Slurm:
    """A SLURM whose controller is on the head and whose daemons are on the other hosts."""

    def __init__(self, hosts: Hosts, folder: Path):
        self.hosts, self.folder = hosts, folder.resolve()
        self.environ = {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> Slurm:
        (self.folder / "state").mkdir(parents=True)
        num = len(self.hosts.names) - 1
        text = CONFIG.format(root=self.folder, num=num, head=self.hosts.address(HEAD))
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munge.key"
        key.touch(0o400)
        key.write_bytes(secrets.token_bytes(128))
        for name in self.hosts.names:
            self.start(name)
        idle = lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(num)
        until(idle, "all nodes idle", 60, self.said)
        return self

    def __exit__(self, *_) -> None:
        """The hosts end what runs on them."""

    def start(self, name: str) -> None:
        """Start what a host runs for SLURM. One munged serves all: they share the folder of its socket."""
        if name != HEAD:
            self._daemon(name, "slurmd", "-D")
            return
        names = {"socket": "munge.socket", "key-file": "munge.key"}
        names |= {"pid-file": "munge.pid", "seed-file": "seed"}
        flags = [f"--{flag}={self.folder / file}" for flag, file in names.items()]
        self._daemon(HEAD, "munged", "--foreground", "--force", *flags, f"--log-file={self.folder}/munge.log")
        until((self.folder / "munge.socket").exists, "munged listens", 20, self.said)
        self._daemon(HEAD, "slurmctld", "-c", "-D")

    def _daemon(self, name: str, *command: str) -> None:
        log = self.folder / f"{command[0]}.{name}.out"
        self.hosts.background(name, command, log, self.folder, env=os.environ | self.environ)

    def ask(self, *command: str, folder: Path | str = ".", **environ: str) -> str:
        """What a command of SLURM writes on the head. Raises RuntimeError where it fails."""
        env = os.environ | self.environ | environ
        done = self.hosts.run(HEAD, command, folder, env=env)
        if done.returncode and command[0] != "sinfo":
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def said(self) -> str:
        logs = sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("*.out"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-700:]}" for log in logs)
