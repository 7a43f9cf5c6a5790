"""Join the processes of a job, and end all of them when one fails, stops answering or is gone.

`initialize` comes before any other use of JAX. Addresses and counts are checked before JAX uses them, because
JAX ends a process that finds no coordinator without an exception, after minutes.
"""

import atexit
import contextlib
import errno
import faulthandler
import glob
import itertools
import json
import os
import socket
import subprocess
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
"""Exit statuses of a process that ends because one failed, or because no step ended. A requested stop has
143."""
WAIT_S, HEARTBEAT_S, _SHUTDOWN_S = 120, 30, 60
"""Seconds until all processes must have come; without a sign of life until a process counts as dead, once
steps run (twice as many before, when JAX alone watches); until all processes must have left."""
LAUNCHER = "LLMPAR_LAUNCHER"
"""The variable by which `local` passes on the number of the process that starts others."""
_KEY, _BEATS, _QUIET, SILENT = "llmpar/failed", "llmpar/beats", "quiet", "gave no sign of life"
_GUARDED, _STEPS, _ANSWERED, _CAME = (threading.Event() for _ in range(4))
_AGREED = "all agree"
GREETING, GREETING_S = b"llmpar: process 0 waits for all\n", 10.0
"""What process 0 sends to a process that connects, and within how many seconds."""
_MEETINGS = itertools.count()
_SED = r"""
/connected peer ranks/d
/preemption_sync_manager[.]cc/d
/coordination_service_agent[.]cc/d
/coordination_service[.]cc.*stopped sending/,/^The tasks have crashed/d
/^Additional GRPC error/d
/^:UN[A-Z]*:/d
/^=== Source Location/d
/^external.xla/d
/^[.] This is only expected/d
/^$/d
/detected fatal errors.*Failed to send RPC to coordination service/{
s/.*/0/
b gone
}
/detected fatal errors.*stopped sending heartbeats/{
:more
N
/The tasks have crashed/!b more
s/.*heartbeats\):.//
s/.The tasks have crashed.*//
s/\n/, /g
b gone
}
p
b
:gone
s/.*/llmpar: ends, because process & is gone or cannot be reached: \
its own output says why; the same command goes on from checkpoints/
s/\n//p
:rest
n
b rest
"""
"""What of native code's lines is shown: not Gloo's about each pair, and one
sentence in place of JAX's words and stack when a process is gone. JAX's callback
for that would end the process, too (0.10.2 and 0.12: std::bad_cast)."""


def initialize(
    environ: MutableMapping[str, str] = os.environ,
    wait_s: float = WAIT_S,
    heartbeat_s: int = HEARTBEAT_S,
    shutdown_s: int = _SHUTDOWN_S,
) -> Place:
    """Join this process with the others that an engine has started; return its place, alone or among them.

    Call it before any other use of JAX. A job on one host listens on loopback only. On a cluster every
    program that reaches the coordinator's port may join or stop the job: the cluster must close the port to
    others. For the seconds see `WAIT_S`. Raises ValueError, in one sentence, for settings that cannot work.
    """
    end_with_launcher(environ)
    place = detect(environ)
    if sys.modules.get("jax") is not None and _client() is not None:  # Ray did it, or the user
        _enter(environ)
        return replace(place, num_processes=_state().num_processes, process_id=_state().process_id)
    if place.note:
        signals.write_sentence(place.note)
    if place.num_processes == 1:
        return place
    import jax

    from llmpar.parallel import _jax

    _filter_native()
    _CAME.set()
    own, bind = check_coordinator(place, wait_s)
    if place.coordinator and place.process_id == 0:
        _gather(place, bind, wait_s)
    without_proxy(place, environ)
    if own:  # Gloo, by which CPU processes exchange data, listens there for the coordinator
        _jax.let_gloo_listen(own)
    # JAX's native code would end the process without a sentence
    timer = threading.Timer(wait_s, signals.end, (_late(place, wait_s), FAILED))
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
        raise ValueError(
            f"{place.num_processes} processes ({place.engine}) cannot be joined: {why};"
            " initialize() comes before JAX's work"
        ) from error
    finally:
        timer.cancel()
    _enter(environ, heartbeat_s)
    return place


def _enter(environ: Mapping[str, str], heartbeat_s: float = HEARTBEAT_S) -> None:
    """Check that all processes run the same.

    It comes before JAX starts a device, which hangs where they do not."""
    barrier({"processes": _state().num_processes} | surroundings(environ))
    if not _GUARDED.is_set():
        _GUARDED.set()
        _guard(0.6 * heartbeat_s)


def end_with_launcher(environ: MutableMapping[str, str]) -> None:
    """Start a thread that ends this process when its launcher on this machine is gone."""
    parent = int(environ.pop(LAUNCHER, 0))  # not for the processes that this one starts

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(FAILED)

    if parent:
        threading.Thread(target=watch, daemon=True).start()


def resolved(host: str) -> str:
    """Return the first address of a host; '' where it has none."""
    with contextlib.suppress(OSError, UnicodeError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return ""


def check_coordinator(place: Place, wait_s: float) -> tuple[str | None, str | None]:
    """Check the coordinator's address before JAX uses it. Return this host's address towards it, and the
    address to which process 0 binds (None: JAX's choice, all interfaces)."""
    if place.coordinator is None:
        return None, None
    host, port = parts_of(place.coordinator)
    address = resolved(host)
    what = f"the coordinator '{host}' ({place.engine})"
    works = "set JAX_COORDINATOR_ADDRESS to an address of process 0 that all hosts reach, as 10.0.0.1:20000"
    if not address:
        raise ValueError(
            f"{what} has no address on host {socket.gethostname()}; mend /etc/hosts, or {works}"
        )
    to_itself = is_loopback(address) and not is_loopback(host)  # Debian's 127.0.1.1
    if place.process_id:
        if to_itself and not place.is_one_host:
            why = f"{what} resolves to {address} on host {socket.gethostname()}: each host would reach itself"
            raise ValueError(f"{why}; mend /etc/hosts, or {works}")
        _reach(place, address, port, wait_s)
        return _towards(address, port), None
    try:
        with _socket(address) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except PermissionError:
        raise ValueError(
            f"port {port} of {place.coordinator} may not be used; use 1024 to 65535"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            answer = ""
            with contextlib.suppress(OSError, ValueError):
                with socket.create_connection((address, port), 2) as line:
                    answer = _greet(place, line, wait_s)  # of another process 0
            if answer:
                _refuse(answer)
            raise ValueError(
                f"port {port} of {place.coordinator} is taken by another program; set"
                f" JAX_COORDINATOR_ADDRESS={host}:{free_port(address)} for all processes"
            ) from error
        if "MPI" in place.engine:
            on = socket.gethostname()
            why = f"{place.engine} names '{host}', where mpirun runs, but process 0 is on {on}"
            raise ValueError(f"{why}; {works}") from error
        return _towards(), None  # a service in front of this host
    if to_itself:  # the others resolve another address
        return _towards(), None
    return address, f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _socket(address: str, protocol: int = socket.SOCK_STREAM) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, protocol)


def free_port(address: str = "127.0.0.1") -> int:
    """Return a free port of this address."""
    with _socket(address) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def _towards(address: str = "192.0.2.1", port: int = 9) -> str:
    """Return this host's address on the route to another. Nothing is sent."""
    with _socket(address, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((address, port))
        return probe.getsockname()[0]
    return address


def _refuse(answer: str) -> None:
    """End this process with the status and the sentence that process 0 answered."""
    status, _, sentence = answer.partition(" ")
    if int(status) == FAILED:
        signals.end(sentence, FAILED)
    raise ValueError(sentence)


def decline(environ: Mapping[str, str], sentence: str) -> None:
    """Before this process ends, although it is one of several and has not joined them: let them refuse with
    its sentence. Wait for them no longer than `GREETING_S`."""
    place = detect(environ)
    if _CAME.is_set() or place.num_processes == 1 or not place.coordinator:
        return
    failed = f"process {place.process_id}, {_location()}, ended before it came: {sentence[:900]}"
    if place.process_id == 0:
        _gather(place, check_coordinator(place, GREETING_S)[1], GREETING_S, f"1 {failed}")
    host, port = parts_of(place.coordinator)
    until = time.monotonic() + GREETING_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError):  # process 0 does not listen yet
            with socket.create_connection((resolved(host), port), 2.0) as line:
                _greet(place, line, GREETING_S, failed)
                return
        time.sleep(0.1)


def _gather(place: Place, bind: str | None, wait_s: float, answer: str = "") -> None:
    """In process 0, wait until every other process has come once, with the same number of processes; else
    make all of them refuse, as with an ``answer``. JAX would end such processes without a sentence, or wait
    for minutes."""
    both, (host, port) = bind is None, parts_of(bind or place.coordinator or "")
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    until, places = time.monotonic() + wait_s, {0: _location()}
    lines: list[tuple[int, socket.socket]] = []
    more = False  # than the number of this process' job
    with contextlib.ExitStack() as stack:
        try:
            address = "" if both else host, port
            server = stack.enter_context(
                socket.create_server(address, family=family, dualstack_ipv6=both)
            )
        except OSError:
            check_coordinator(place, wait_s)  # another process 0 was faster
            raise
        while (more or _missing(place, lines)) and (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            # errors are those of a program that only tests the port
            with contextlib.suppress(OSError, ValueError, TypeError):
                line = stack.enter_context(server.accept()[0])
                line.settimeout(GREETING_S / 2)
                line.sendall(GREETING)
                with line.makefile("rb") as words:
                    number, num, location, *failed = json.loads(words.readline(9999))
                line.setblocking(False)
                why = _contradiction(place, places, lines, number, num, location)
                more |= bool(why)
                if failed or why:
                    answer = answer or f"1 {why or failed[0]}"
                    until = min(until, time.monotonic() + GREETING_S / 2)
                places[number] = location
                lines.append((number, line))
        if not answer and (missing := _missing(place, lines)):
            answer = f"{FAILED} {_late(place, wait_s)}; missing: {numbers_of(missing)}"
        for _, line in lines:
            with contextlib.suppress(OSError):
                line.sendall(f"{answer}\n".encode())
    if answer:
        _refuse(answer)


def _contradiction(
    place: Place, places: dict, lines: list, number: int, num: int, location: str
) -> str:
    """Say why a process that connects is not one of this job; '' if it is. After a restart it may connect
    again."""
    if num != place.num_processes:
        return (
            f"the processes of this job do not agree: process 0 is one of {place.num_processes}"
            f" ({places[0]}), process {number} one of {num} ({location}); start all with the same"
            " number"
        )
    if number == 0 or not all(_is_gone(line) for other, line in lines if other == number):
        return (
            f"process {number} has come twice, {places[number]} and {location}; give each its own"
            " number, and each job its own address"
        )
    return ""


def _missing(place: Place, lines: list[tuple[int, socket.socket]]) -> list[int]:
    """List the numbers of the processes that have not come, or have gone again."""
    present = {0} | {number for number, line in lines if not _is_gone(line)}
    return [number for number in range(place.num_processes) if number not in present]


def _is_gone(line: socket.socket) -> bool:
    try:
        return not line.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:  # it was reset
        return True


def _location() -> str:
    return f"on {socket.gethostname()} with pid {os.getpid()}"


def _late(place: Place, wait_s: float) -> str:
    return (
        f"not all of {place.num_processes} processes ({place.engine}) came to {place.coordinator}"
        f" within {wait_s:g} s; look at the other processes' output, and for two jobs with one"
        " address"
    )


def _greet(place: Place, line: socket.socket, wait_s: float, *failed: str) -> str:
    """Introduce this process to process 0, or say why it ``failed``, and return its answer: '' when all have
    come. Raises ConnectionError if process 0 is gone, ValueError if another program listens."""
    line.settimeout(min(GREETING_S, wait_s))
    line.sendall(
        json.dumps([place.process_id, place.num_processes, _location(), *failed]).encode() + b"\n"
    )
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
    raise ValueError(
        f"at {place.coordinator} listens no process 0 that waits for process {place.process_id},"
        " but another program, or a job that is complete; give this job another port"
        " (JAX_COORDINATOR_ADDRESS), and each process its own number"
    )


def _reach(place: Place, address: str, port: int, wait_s: float) -> None:
    """Wait until process 0 listens and all have come; print a sentence after one second, raise ValueError
    after ``wait_s``."""
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
            signals.write_sentence(
                f"process {place.process_id} on {socket.gethostname()} waits for {where}: {why}"
            )
        time.sleep(0.1)
    raise ValueError(
        f"process {place.process_id} of {place.num_processes} ({place.engine}) could not connect to"
        f" {place.coordinator} for {wait_s:g} s ({why}); check that process 0 has not ended and that the port"
        " is open between hosts, or set JAX_COORDINATOR_ADDRESS"
    )


def without_proxy(place: Place, environ: MutableMapping[str, str]) -> None:
    """Exclude the coordinator from a site's proxy.

    gRPC would use it between the processes."""
    named = sorted(
        name for name in environ if name.lower() in ("http_proxy", "https_proxy", "grpc_proxy")
    )
    if not named or place.coordinator is None:
        return
    host, _ = parts_of(place.coordinator)
    for name in ("no_proxy", "no_grpc_proxy"):
        environ[name] = ",".join(filter(None, [environ.get(name), host]))
    if place.process_id == 0:
        signals.write_sentence(
            f"{', '.join(named)} would stand between the processes: {host} is added to no_proxy"
        )


def gpus(environ: Mapping[str, str], files: int | None = None) -> tuple[int, int, int]:
    """Count GPUs without starting JAX: device files of the node (or ``files``), those visible to this
    process, and, by SLURM, those of the job on this node (0: unknown)."""
    files = len(glob.glob("/dev/nvidia[0-9]*")) if files is None else files
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    shown = next((environ[name].split(",") for name in names if name in environ), None)
    seen = (
        files
        if shown is None
        else sum(part.strip() not in ("", "-1", "NoDevFiles") for part in shown)
    )
    return files, seen, int(environ.get("SLURM_GPUS_ON_NODE", "0") or 0)


def local_devices(
    place: Place, environ: Mapping[str, str], files: int | None = None
) -> list[int] | None:
    """Return the visible GPUs that this process takes: its share, where the processes of a host see the same
    GPUs. None: all, unless JAX reads others from JAX_LOCAL_DEVICE_IDS."""
    _, seen, on_node = gpus(environ, files)
    # an engine gave each its own
    num = place.num_local
    renumbered = seen < place.num_local or on_node > seen
    chosen = "JAX_LOCAL_DEVICE_IDS" in environ or environ.get("JAX_PLATFORMS") == "cpu"
    if not seen or num <= 1 or chosen or renumbered:
        return None
    if seen % num:
        raise ValueError(
            f"{num} processes on {socket.gethostname()} cannot share {seen} GPUs equally; use 1"
            " process for all of them, or one for each"
        )
    each = seen // num
    return list(range(place.local_id * each, (place.local_id + 1) * each))


def _filter_native() -> None:
    """Reserve stdout and stderr for Python. What native code writes to them
    goes to stderr through `_SED`, in a process that outlives this one."""
    if sys.stdout is None or sys.stdout is not sys.__stdout__:
        return
    encoding = getattr(sys.stdout, "encoding", "utf-8")
    own = [os.fdopen(os.dup(number), "w", 1, encoding, "replace") for number in (1, 2)]
    sys.stdout, sys.stderr = own[0], signals.ForPeople(own[1])
    os.dup2(2, 1)
    with contextlib.suppress(OSError):  # no sed: everything is shown
        sed: Any = subprocess.Popen(
            ["sed", "-nuE", _SED], stdin=subprocess.PIPE, stdout=2, stderr=2, start_new_session=True
        )
        for number in (1, 2):
            os.dup2(sed.stdin.fileno(), number)


# ----------------------------------------------------------------------------------------------------- guards


def _state() -> Any:
    """Return what JAX knows of the processes before it starts a device.

    Its ``client`` is None where there is one process."""
    from llmpar.parallel import _jax

    return _jax.processes()


def _client() -> Any:
    return _state().client


def _guard(silent_s: float) -> None:
    """From now on end this process within seconds of an exception, Ctrl-C or another process' failure, and
    all processes if one gives no sign of life for ``silent_s`` seconds."""
    import jax

    if jax.process_count() == 1:
        return

    def end(error_type, error, trace) -> None:
        sys.__excepthook__(error_type, error, trace)
        tell_others(f"{error_type.__name__}: {error}", FAILED)
        leave_job(FAILED)

    sys.excepthook = end
    left = threading.Event()
    listener = threading.Thread(target=_listen, args=(left, silent_s), daemon=True)
    listener.start()
    threading.Thread(target=_count, args=(left, silent_s), daemon=True).start()

    def stop() -> None:
        left.set()
        listener.join(5.0)

    atexit.register(stop)  # before JAX leaves, which it registered earlier


def _first_failure() -> str | None:
    """Return status and sentence of the process that failed first, if one did."""
    with contextlib.suppress(Exception):  # there is none, or the coordinator is gone
        return _client().key_value_try_get(_KEY)
    return None


def _listen(left: threading.Event, silent_s: float) -> None:
    """End this process a moment after another one failed, because it may wait for that one in native code.
    Send a sign of life every two seconds."""
    beats: dict[str, str] = {}
    silent: dict[str, int] = {}
    for number in itertools.count():
        if left.wait(0.5):
            break
        failure = _first_failure()
        # JAX will soon see it, too
        late = float(_state().process_id == 0) if SILENT in str(failure) else 3.0
        if failure and not left.wait(late):
            status, _, sentence = failure.partition(" ")
            signals.end(f"ends, because {sentence}", int(status))
        if number % 4 == 0:
            with contextlib.suppress(Exception):  # process 0 does not answer: see `_count`
                _beat(str(number) if _STEPS.is_set() else _QUIET, beats, silent, silent_s)
    with contextlib.suppress(Exception):
        _beat(_QUIET, {}, {}, silent_s)


def _beat(beat: str, beats: dict[str, str], silent: dict[str, int], silent_s: float) -> None:
    """Send a sign of life; in process 0, report a process that sends none. Python's threads are sure to run
    only between steps: a process that imports or compiles may be quiet."""
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
    """End this process when process 0 has not answered for ``silent_s`` seconds. Rounds are counted, because
    this process may have been stopped itself."""
    silent = 0
    while not left.wait(1.0):
        silent = 0 if _ANSWERED.is_set() else silent + 1
        _ANSWERED.clear()
        if silent > silent_s + 2:  # two seconds between two signs
            gone = "it is stopped, or its host is gone or cannot be reached"
            signals.end(f"ends, because process 0 has not answered for {silent} s: {gone}", STUCK)


def is_joined() -> bool:
    """Return whether this process is one of several that have joined. Imports nothing, so that it may be
    called after any error."""
    return (
        sys.modules.get("jax") is not None and _client() is not None and _state().num_processes > 1
    )


def barrier(settings: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Wait for the other processes, however long they take. The end of one of them ends the others.

    Raises ValueError, with the same sentence in all processes, where their ``settings`` differ
    (`agreed.flat`)."""
    if not is_joined():
        return
    state, key, day = _state(), f"llmpar/meet/{next(_MEETINGS)}", 24 * 3600 * 1000  # ms
    state.client.key_value_set(f"{key}/{state.process_id}", json.dumps(flat(settings), default=str))
    state.client.wait_at_barrier(key, day)
    if state.process_id == 0:
        texts = [state.client.key_value_try_get(f"{key}/{i}") for i in range(state.num_processes)]
        differ = len(set(texts)) > 1
        state.client.key_value_set(
            f"{key}/why", refusal(list(map(json.loads, texts))) if differ else _AGREED
        )
    if (why := state.client.blocking_key_value_get(f"{key}/why", day)) != _AGREED:
        raise ValueError(why)


def is_broken(sentence: str) -> bool:
    """Return whether an error is that of a broken collective.

    Another process ended, or came too late."""
    return any(sign in sentence for sign in ("Gloo", "NCCL", "DEADLINE", "UNAVAILABLE"))


def tell_others(sentence: str, status: int) -> int | None:
    """Report to the other processes that this one failed. If another failed first, print that and return its
    status, because this failure may follow from it; else return None."""
    own = f"{status} process {_state().process_id} failed: {sentence}"
    if is_broken(sentence):
        time.sleep(1.0)  # another process has ended, and may still report why
    with contextlib.suppress(Exception):  # another was first
        _client().key_value_set(_KEY, own)
    failure = _first_failure()
    if not failure or failure == own or failure.partition(": ")[2] == sentence:
        return None  # all refuse the same: each prints it
    first, _, why = failure.partition(" ")
    signals.write_sentence(f"ends, because {why}")
    return int(first)


def leave_job(status: int) -> None:
    """End this process, one of several, at once.

    JAX would wait minutes for the others at a barrier."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    if _state().process_id == 0:
        time.sleep(1.0)  # process 0 stores its report, and the others read it twice a second
    os._exit(status)


def asked_to_stop(step: int) -> bool:
    """Return whether all processes end after this step.

    It is equal in all processes: one of them got SIGTERM."""
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)


class Watchdog:
    """End the process, and print every thread's stack, when no step ended for ``limit_s`` seconds.

    Without it a process waits for ever in a collective for one that is alive but stuck: heartbeats continue.
    The first step, which compiles, has ten times as long.
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
        """Note that a step has ended."""
        self.done, self._until = self.done + 1, time.monotonic() + self.limit_s
        _STEPS.set()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.limit_s / 4)):
            if time.monotonic() > self._until:
                faulthandler.dump_traceback(all_threads=True)
                words = (
                    f"no step ended within {self.limit_s:g} s after {self.done}"
                    ": a process is stuck, or left out a collective"
                )
                with contextlib.suppress(Exception):
                    _client().key_value_set(_KEY, f"{STUCK} in a process {words}")
                signals.end(f"{words}; the stacks above show where", STUCK)
