"""Join the processes of a job, and see that none outlives the others or waits for one that is dead.

`initialize` comes before any other use of JAX. What can be known before the processes meet is checked first,
because JAX ends a process that finds no coordinator without an exception, after minutes.
"""

import atexit
import contextlib
import errno
import faulthandler
import glob
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from llmpar.launch import signals
from llmpar.launch.agreed import flat, numbers_of, refusal, surroundings
from llmpar.launch.engines import Place, detect, is_loopback, parts_of

FAILED, STUCK = 75, 76
"""Exit statuses of a process that ends because one failed, or no step ended. An asked stop has 143."""
WAIT_S, HEARTBEAT_S, _SHUTDOWN_S = 120, 30, 60
"""Seconds: for all to come; without a sign of life until a process counts as dead, once steps run (before,
when JAX alone watches, twice as many); to leave together."""
LAUNCHER = "LLMPAR_LAUNCHER"
"""The variable by which `local` tells a process who started it."""
_KEY, _BEATS, _QUIET, SILENT = "llmpar/failed", "llmpar/beats", "quiet", "gave no sign of life"
_GUARDED, _STEPS, _ANSWERED = threading.Event(), threading.Event(), threading.Event()
_AGREED = "all agree"
GREETING, GREETING_S = b"llmpar: process 0 waits for all\n", 10.0
"""What process 0 says to who comes, and the seconds in which it does."""
_MEETINGS = itertools.count()


def initialize(
    environ: MutableMapping[str, str] = os.environ,
    wait_s: float = WAIT_S,
    heartbeat_s: int = HEARTBEAT_S,
    shutdown_s: int = _SHUTDOWN_S,
) -> Place:
    """Join this process with the others that an engine has started; alone where there are none.

    Call it before any other use of JAX. A job on one host listens on loopback only. Whoever reaches a
    coordinator's port on a cluster may join or stop the job: it must be closed to others by the cluster.
    What the seconds are says `WAIT_S`. Raises ValueError, in one sentence, for what cannot work.
    """
    end_with_launcher(environ)
    place = detect(environ)
    if sys.modules.get("jax") is not None and _client() is not None:  # Ray did it, or the user
        _enter(environ)
        return replace(place, num_processes=_state().num_processes, process_id=_state().process_id)
    if place.note:
        _tell(place.note)
    if place.num_processes == 1:
        return place
    import jax

    _clear_stdout()
    own, bind = check_coordinator(place, wait_s)
    if place.coordinator and place.process_id == 0:
        _gather(place, bind, wait_s)
    without_proxy(place, environ)
    _listen_on(own)
    many = f"{place.num_processes} processes ({place.engine})"
    late = _late(place, wait_s)
    timer = threading.Timer(wait_s, _end, (FAILED, late))  # native code ends a process without a sentence
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.num_processes,
            place.process_id,
            local_devices(place, environ),
            cluster_detection_method=place.joined_by or "deactivate",
            initialization_timeout=int(wait_s + 30),
            heartbeat_timeout_seconds=2 * heartbeat_s,  # it ends processes without a sentence
            shutdown_timeout_seconds=shutdown_s,
            coordinator_bind_address=bind,
        )
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"{many} cannot be joined: {why}; initialize() comes before JAX's work") from error
    finally:
        timer.cancel()
    _enter(environ, heartbeat_s)
    return place


def _enter(environ: Mapping[str, str], heartbeat_s: float = HEARTBEAT_S) -> None:
    """See that those who have met run the same, before JAX starts a device, which hangs where they do not."""
    barrier({"processes": _state().num_processes} | surroundings(environ))
    if not _GUARDED.is_set():
        _GUARDED.set()
        _guard(0.6 * heartbeat_s)


def end_with_launcher(environ: MutableMapping[str, str]) -> None:
    """From here on end this process when the one that started it here is gone, whatever it waits for."""
    parent = int(environ.pop(LAUNCHER, 0))  # what this process starts is not the launcher's

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(FAILED)

    if parent:
        threading.Thread(target=watch, daemon=True).start()


def resolved(host: str) -> str:
    """The first address of a host; '' where it has none."""
    with contextlib.suppress(OSError, UnicodeError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return ""


def check_coordinator(place: Place, wait_s: float) -> tuple[str | None, str | None]:
    """Check the coordinator's address before JAX uses it: give this host's address towards it, and what
    process 0 binds to (None: where JAX finds it, all interfaces)."""
    if place.coordinator is None:
        return None, None
    host, port = parts_of(place.coordinator)
    address = resolved(host)
    what = f"the coordinator '{host}' ({place.engine})"
    works = "set JAX_COORDINATOR_ADDRESS to an address of process 0 that all hosts reach, as 10.0.0.1:20000"
    if not address:
        raise ValueError(f"{what} has no address on host {_me()}; mend /etc/hosts, or {works}")
    to_itself = is_loopback(address) and not is_loopback(host)  # Debian's 127.0.1.1
    if place.process_id:
        if to_itself and not place.is_one_host:
            why = f"{what} resolves to {address} on host {_me()}: each host would reach itself"
            raise ValueError(f"{why}; mend /etc/hosts, or {works}")
        _reach(place, address, port, wait_s)
        return _towards(address, port), None
    try:
        with _socket(address) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except PermissionError:
        raise ValueError(f"port {port} of {place.coordinator} may not be used; use 1024 to 65535") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            answer = ""
            with (
                contextlib.suppress(OSError, ValueError),
                socket.create_connection((address, port), 2) as line,
            ):
                answer = _greet(place, line, wait_s)  # as another process 0 gives it
            if answer:
                _refuse(answer)
            taken = f"port {port} of {place.coordinator} is taken by another program"
            free = f"JAX_COORDINATOR_ADDRESS={host}:{free_port(address)} for all processes"
            raise ValueError(f"{taken}; set {free}") from error
        if "MPI" in place.engine:
            why = f"{place.engine} names '{host}', where mpirun runs, but process 0 is on {_me()}"
            raise ValueError(f"{why}; {works}") from error
        return _towards(), None  # a service in front of this host
    if to_itself:  # the others resolve another address
        return _towards(), None
    return address, f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _tell(words: str) -> None:
    print(f"llmpar: {words}", file=sys.stderr, flush=True)


def _me() -> str:
    return socket.gethostname()


def _socket(address: str, protocol: int = socket.SOCK_STREAM) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, protocol)


def free_port(address: str = "127.0.0.1") -> int:
    """A port of this address that nobody has."""
    with _socket(address) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def _towards(address: str = "192.0.2.1", port: int = 9) -> str:
    """This host's address on the way to another. Nothing is sent."""
    with _socket(address, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((address, port))
        return probe.getsockname()[0]
    return address


def _refuse(answer: str) -> None:
    """End as process 0 answered: a status and a sentence."""
    status, _, sentence = answer.partition(" ")
    if int(status) == FAILED:
        _end(FAILED, sentence)
    raise ValueError(sentence)


def _gather(place: Place, bind: str | None, wait_s: float) -> None:
    """As process 0 wait until the others have come, each once, as one of as many; else refuse, in all.

    JAX ends such processes in native code, without a sentence, or waits for minutes."""
    both, (host, port) = bind is None, parts_of(bind or place.coordinator or "")
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    until, people = time.monotonic() + wait_s, {0: _who()}
    lines: list[tuple[int, socket.socket]] = []
    answer = ""
    with contextlib.ExitStack() as stack:
        try:
            where = "" if both else host, port
            server = socket.create_server(where, family=family, dualstack_ipv6=both)
            stack.enter_context(server)
        except OSError:
            check_coordinator(place, wait_s)  # another process 0 was faster
            raise
        while (answer or _missing(place, lines)) and (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError, ValueError, TypeError):  # who only looks whether one listens
                line = stack.enter_context(server.accept()[0])
                line.settimeout(GREETING_S / 2)
                line.sendall(GREETING)
                with line.makefile("rb") as words:
                    number, num, who = json.loads(words.readline(999))
                line.setblocking(False)
                if why := _contradiction(place, people, lines, number, num, who):
                    answer, until = answer or f"1 {why}", min(until, time.monotonic() + GREETING_S / 2)
                people[number] = who
                lines.append((number, line))
        if not answer and (missing := _missing(place, lines)):
            answer = f"{FAILED} {_late(place, wait_s)}; missing: {numbers_of(missing)}"
        for _, line in lines:
            with contextlib.suppress(OSError):
                line.sendall(f"{answer}\n".encode())
    if answer:
        _refuse(answer)


def _contradiction(place: Place, people: dict, lines: list, number: int, num: int, who: str) -> str:
    """Why who comes is none of this job; '' where it is. It may come again when it was started again."""
    if num != place.num_processes:
        counts = f"process 0 is one of {place.num_processes} ({people[0]})"
        counts += f", process {number} one of {num} ({who})"
        return f"the processes of this job do not agree: {counts}; start all with the same number"
    if number == 0 or not all(_is_gone(line) for other, line in lines if other == number):
        twice = f"process {number} has come twice, {people[number]} and {who}"
        return f"{twice}; give each its own number, and each job its own address"
    return ""


def _missing(place: Place, lines: list[tuple[int, socket.socket]]) -> list[int]:
    """The numbers of the processes that have not come, or have gone again."""
    present = {0} | {number for number, line in lines if not _is_gone(line)}
    return [number for number in range(place.num_processes) if number not in present]


def _is_gone(line: socket.socket) -> bool:
    try:
        return not line.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:  # it was reset
        return True


def _who() -> str:
    return f"on {_me()} with pid {os.getpid()}"


def _late(place: Place, wait_s: float) -> str:
    many = f"{place.num_processes} processes ({place.engine})"
    look = "look at the other processes' output, and for two jobs with one address"
    return f"not all of {many} came to {place.coordinator} within {wait_s:g} s; {look}"


def _greet(place: Place, line: socket.socket, wait_s: float) -> str:
    """Say to process 0 who this is, and give its answer: '' when all have come. Raises ConnectionError where
    it has gone, ValueError where it is somebody else."""
    line.settimeout(min(GREETING_S, wait_s))
    line.sendall(json.dumps([place.process_id, place.num_processes, _who()]).encode() + b"\n")
    greeting = b"?"
    with line.makefile("rb") as words:
        with contextlib.suppress(TimeoutError):
            greeting = words.readline(len(GREETING))
        if greeting == GREETING:
            line.settimeout(wait_s)
            if answer := words.readline(9999):
                return answer.decode().strip()
    if greeting in (b"", GREETING):
        raise ConnectionError("it closed the connection")
    other = f"who listens at {place.coordinator} is no process 0 that waits for process {place.process_id}"
    why = "it is another program, or a job that is complete; give this job another port"
    raise ValueError(f"{other}: {why} (JAX_COORDINATOR_ADDRESS), and each process its own number")


def _reach(place: Place, address: str, port: int, wait_s: float) -> None:
    """Wait until process 0 listens and all have come; a sentence after one second, a refusal after all."""
    begin, announced, why = time.monotonic(), False, ""
    where = f"process 0 at {place.coordinator} ({place.engine})"
    while (passed := time.monotonic() - begin) < wait_s:
        try:
            with socket.create_connection((address, port), min(2.0, wait_s)) as line:
                if answer := _greet(place, line, wait_s - passed):
                    _refuse(answer)
                return
        except OSError as error:
            why = error.strerror or str(error)
        if passed > 1 and not announced:
            announced = True
            _tell(f"process {place.process_id} on {_me()} waits for {where}: {why}")
        time.sleep(0.1)
    raise ValueError(
        f"process {place.process_id} of {place.num_processes} ({place.engine}) found nobody at"
        f" {place.coordinator} for {wait_s:g} s ({why}); look whether process 0 has ended, whether the port"
        " is open between hosts, or set JAX_COORDINATOR_ADDRESS"
    )


def without_proxy(place: Place, environ: MutableMapping[str, str]) -> None:
    """Let the processes reach one another directly where a site sets a proxy: gRPC would ask that."""
    named = sorted(name for name in environ if name.lower() in ("http_proxy", "https_proxy", "grpc_proxy"))
    if not named or place.coordinator is None:
        return
    host, _ = parts_of(place.coordinator)
    for name in ("no_proxy", "no_grpc_proxy"):
        environ[name] = ",".join(filter(None, [environ.get(name), host]))
    if place.process_id == 0:
        _tell(f"{', '.join(named)} would stand between the processes: {host} is added to no_proxy here")


def gpus(environ: Mapping[str, str], files: int | None = None) -> tuple[int, int, int]:
    """Count GPUs without starting JAX: device files of the node (or ``files``), those that this process may
    see, and those of the job on this node, as SLURM says (0: it does not)."""
    files = len(glob.glob("/dev/nvidia[0-9]*")) if files is None else files
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    shown = next((environ[name].split(",") for name in names if name in environ), None)
    seen = files if shown is None else sum(part.strip() not in ("", "-1", "NoDevFiles") for part in shown)
    return files, seen, int(environ.get("SLURM_GPUS_ON_NODE", "0") or 0)


def local_devices(place: Place, environ: Mapping[str, str], files: int | None = None) -> list[int] | None:
    """Which of the visible GPUs this process takes: its share, where the processes of a host see the same.
    None: all, unless JAX reads others from JAX_LOCAL_DEVICE_IDS."""
    _, seen, on_node = gpus(environ, files)
    num, renumbered = place.num_local, seen < place.num_local or on_node > seen  # an engine gave each its own
    chosen = "JAX_LOCAL_DEVICE_IDS" in environ or environ.get("JAX_PLATFORMS") == "cpu"
    if not seen or num <= 1 or chosen or renumbered:
        return None
    if seen % num:
        why = f"{num} processes on {_me()} cannot share {seen} GPUs equally"
        raise ValueError(f"{why}; use 1 process for all of them, or one for each")
    each = seen // num
    return list(range(place.local_id * each, (place.local_id + 1) * each))


def _listen_on(address: str | None) -> None:
    """Let Gloo, by which CPU processes exchange data, listen on this host's address for the coordinator."""
    if address:
        from llmpar.parallel import _jax

        _jax.let_gloo_listen(address)


def _clear_stdout() -> None:
    """Leave stdout to Python, where a command prints its document: what native code writes there goes to
    stderr, but for Gloo's lines about every pair that has met."""
    if sys.stdout is None or sys.stdout is not sys.__stdout__:
        return
    kept = os.dup(1)
    read, write = os.pipe()
    os.dup2(write, 1)
    os.close(write)
    sys.stdout = os.fdopen(kept, "w", encoding=getattr(sys.stdout, "encoding", "utf-8"), errors="replace")

    def pass_on() -> None:
        with os.fdopen(read, "rb") as lines:
            for line in lines:
                if b"connected peer ranks" not in line:  # their beginnings may come apart
                    os.write(2, line)

    threading.Thread(target=pass_on, daemon=True).start()


def _end(status: int, sentence: str) -> None:
    """End this process, which may wait in native code, with a sentence."""
    signals.end(sentence, status)


# ----------------------------------------------------------------------------------------------------- guards


def _state() -> Any:
    """What JAX knows of the processes before it starts a device: ``client`` is None where there is one."""
    from llmpar.parallel import _jax

    return _jax.processes()


def _client() -> Any:
    return _state().client


def _guard(silent_s: float) -> None:
    """From here on an exception, Ctrl-C or a failure of another process ends this process within seconds, and
    one that gives no sign of life for ``silent_s`` seconds ends all."""
    import jax

    if jax.process_count() == 1:
        return

    def end(error_type, error, trace) -> None:
        sys.__excepthook__(error_type, error, trace)
        tell_others(f"{error_type.__name__}: {error}", FAILED)
        leave_job(FAILED)

    sys.excepthook = end
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    left = threading.Event()
    listener = threading.Thread(target=_listen, args=(left, silent_s), daemon=True)
    listener.start()
    threading.Thread(target=_count, args=(left, silent_s), daemon=True).start()

    def stop() -> None:
        left.set()
        listener.join(5.0)

    atexit.register(stop)  # before JAX leaves, which it registered earlier


def _first_failure() -> str | None:
    """The exit status of the process that failed first and what it said, if one did."""
    with contextlib.suppress(Exception):  # there is none, or the coordinator is gone
        return _client().key_value_try_get(_KEY)
    return None


def _listen(left: threading.Event, silent_s: float) -> None:
    """End this process a moment after another one failed: it may wait for that one in native code. Every two
    seconds give a sign of life."""
    beats: dict[str, str] = {}
    silent: dict[str, int] = {}
    for number in itertools.count():
        if left.wait(0.5):
            break
        failure = _first_failure()
        late = float(_state().process_id == 0) if SILENT in str(failure) else 3.0  # JAX will soon see it, too
        if failure and not left.wait(late):
            status, _, sentence = failure.partition(" ")
            _end(int(status), f"ends, because {sentence}")
        if number % 4 == 0:
            with contextlib.suppress(Exception):  # process 0 does not answer: see `_count`
                _beat(str(number) if _STEPS.is_set() else _QUIET, beats, silent, silent_s)
    with contextlib.suppress(Exception):
        _beat(_QUIET, {}, {}, silent_s)


def _beat(beat: str, beats: dict[str, str], silent: dict[str, int], silent_s: float) -> None:
    """Return a sign of life; as process 0 see who gives none. Only between steps Python's threads always run:
    a process that imports or compiles may be quiet."""
    state = _state()
    state.client.key_value_set(f"{_BEATS}/{state.process_id}", beat, allow_overwrite=True)
    _ANSWERED.set()
    for key, now in state.client.key_value_dir_get(_BEATS) if state.process_id == 0 else ():
        silent[key] = silent.get(key, 0) + 1 if now == beats.get(key) != _QUIET else 0
        beats[key] = now
        if 2 * silent[key] > silent_s:
            why = f"{SILENT} for {2 * silent[key]} s: it is stopped, or its host is gone"
            state.client.key_value_set(_KEY, f"{STUCK} process {key.rpartition('/')[2]} {why}")


def _count(left: threading.Event, silent_s: float) -> None:
    """End this process when process 0 has not answered for so long. Rounds are counted, not seconds: this
    process may have been stopped itself."""
    silent = 0
    while not left.wait(1.0):
        silent = 0 if _ANSWERED.is_set() else silent + 1
        _ANSWERED.clear()
        if silent > silent_s + 2:  # two seconds between two signs
            gone = "it is stopped, or its host is gone or cannot be reached"
            _end(STUCK, f"ends, because process 0 has not answered for {silent} s: {gone}")


def is_joined() -> bool:
    """Whether this process is one of several that have met. Imports nothing: an error of JAX asks it."""
    return sys.modules.get("jax") is not None and _client() is not None and _state().num_processes > 1


def barrier(settings: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Wait for the other processes, however long they take. The end of one of them ends the others.

    Raises ValueError, with the same sentence in all, where they come with other ``settings``
    (`agreed.flat`)."""
    if not is_joined():
        return
    state, key, day = _state(), f"llmpar/meet/{next(_MEETINGS)}", 24 * 3600 * 1000  # ms
    state.client.key_value_set(f"{key}/{state.process_id}", json.dumps(flat(settings), default=str))
    state.client.wait_at_barrier(key, day)
    if state.process_id == 0:
        texts = [state.client.key_value_try_get(f"{key}/{i}") for i in range(state.num_processes)]
        differ = len(set(texts)) > 1
        state.client.key_value_set(f"{key}/why", refusal(list(map(json.loads, texts))) if differ else _AGREED)
    if (why := state.client.blocking_key_value_get(f"{key}/why", day)) != _AGREED:
        raise ValueError(why)


def is_broken(sentence: str) -> bool:
    """Whether an error tells of a collective that broke: another process ended, or came too late."""
    return any(sign in sentence for sign in ("Gloo", "NCCL", "DEADLINE", "UNAVAILABLE"))


def tell_others(sentence: str, status: int) -> int | None:
    """Tell the others that this one of several failed; if another failed first, say that; give its status.

    Of several failures the first is told: a process whose collective broke because another died says so.
    """
    mine = f"{status} process {_state().process_id} failed: {sentence}"
    if is_broken(sentence):
        time.sleep(1.0)  # it is somebody else's end, who may be about to say why
    with contextlib.suppress(Exception):  # somebody was first
        _client().key_value_set(_KEY, mine)
    failure = _first_failure()
    if not failure or failure == mine or failure.partition(": ")[2] == sentence:
        return None  # all refuse the same: each says so
    first, _, why = failure.partition(" ")
    _tell(f"ends, because {why}")
    return int(first)


def leave_job(status: int) -> None:
    """End this process, one of several, at once: JAX would wait minutes for the others at a barrier."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    if _state().process_id == 0:
        time.sleep(1.0)  # process 0 holds what it told: the others ask twice a second
    os._exit(status)


def asked_to_stop(step: int) -> bool:
    """Whether all end after this step, because one was asked to (SIGTERM): the same answer for all."""
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)


class Watchdog:
    """End the process, with every thread's stack, when nothing was done for ``limit_s`` seconds.

    A process that waits in a collective for one that is alive but stuck waits for ever otherwise: heartbeats
    go on. The first step, which compiles, has ten times as long.
    """

    def __init__(self, limit_s: float):
        self.limit_s, self.done = limit_s, 0
        self._until = time.monotonic() + 10 * limit_s
        self._over = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self.limit_s:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        _STEPS.clear()

    def feed(self) -> None:
        """A step is done."""
        self.done, self._until = self.done + 1, time.monotonic() + self.limit_s
        _STEPS.set()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.limit_s / 4)):
            if time.monotonic() > self._until:
                faulthandler.dump_traceback(all_threads=True)
                words = f"no step ended within {self.limit_s:g} s after {self.done}"
                words += ": a process is stuck, or left out a collective"
                with contextlib.suppress(Exception):
                    _client().key_value_set(_KEY, f"{STUCK} in a process {words}")
                _end(STUCK, f"{words}; the stacks above show where")
