"""Join the processes of a job, and see that none outlives the others or waits for one that is dead.

`initialize` comes before any other use of JAX. What can be known before the processes meet is checked first,
because JAX ends a process that finds no coordinator without an exception, after minutes.
"""

import atexit
import contextlib
import errno
import faulthandler
import functools
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
from llmpar.launch.agreed import flat, refusal, surroundings
from llmpar.launch.engines import Place, detect, is_loopback, parts_of

FAILED, STUCK = 75, 76
"""Exit statuses of a process that ends because one failed, or no step ended. An asked stop has 143."""
WAIT_S, HEARTBEAT_S, SHUTDOWN_S = 120, 30, 60
"""Seconds: for all to come; without a sign of life until a process counts as dead; to leave together."""
LAUNCHER = "LLMPAR_LAUNCHER"
"""The variable by which `local` tells a process who started it."""
_KEY = "llmpar/failed"
AGREED = "all agree"
_MEETINGS = itertools.count()


def initialize(
    environ: MutableMapping[str, str] = os.environ,
    wait_s: float = WAIT_S,
    heartbeat_s: int = HEARTBEAT_S,
    shutdown_s: int = SHUTDOWN_S,
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
    own, bind = check(place, wait_s)
    without_proxy(place, environ)
    _listen_on(own)
    many = f"{place.num_processes} processes ({place.engine})"
    look = "look at the other processes' output, and for two jobs with one address"
    late = f"not all of {many} came to {place.coordinator} within {wait_s:g} s; {look}"
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
            heartbeat_timeout_seconds=heartbeat_s,
            shutdown_timeout_seconds=shutdown_s,
            coordinator_bind_address=bind,
        )
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"{many} cannot be joined: {why}; initialize() comes before JAX's work") from error
    finally:
        timer.cancel()
    _enter(environ)
    return place


def _enter(environ: Mapping[str, str]) -> None:
    """See that those who have met run the same, before JAX starts a device, which hangs where they do not."""
    meet({"processes": _state().num_processes} | surroundings(environ))
    _guard()


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


def check(place: Place, wait_s: float) -> tuple[str | None, str | None]:
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


def _socket(address: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)


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


def _reach(place: Place, address: str, port: int, wait_s: float) -> None:
    """Wait until the coordinator listens; a sentence after one second, a refusal after all."""
    begin, told, why = time.monotonic(), False, ""
    while (passed := time.monotonic() - begin) < wait_s:
        try:
            socket.create_connection((address, port), min(2.0, wait_s)).close()
            return
        except OSError as error:
            why = error.strerror or str(error)
        if passed > 1 and not told:
            told = True
            where = f"process 0 at {place.coordinator} ({place.engine})"
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
    """Let Gloo, by which CPU processes exchange data, listen on this host's address towards the coordinator.

    By itself it takes what the host's name resolves to, 127.0.1.1 or open to others. JAX has no option."""
    from jax._src import xla_bridge

    library: Any = getattr(xla_bridge, "_jax", None)
    make = getattr(library, "make_gloo_tcp_collectives", None)
    if address and make:
        library.make_gloo_tcp_collectives = functools.partial(make, hostname=address)


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
    from jax._src import distributed

    return distributed.global_state


def _client() -> Any:
    return _state().client


@functools.cache  # once
def _guard() -> None:
    """From here on an exception, Ctrl-C or a failure of another process ends this process within seconds."""
    import jax

    if jax.process_count() == 1:
        return

    def end(kind, error, trace) -> None:
        sys.__excepthook__(kind, error, trace)
        tell_others(f"{kind.__name__}: {error}", FAILED)
        leave(FAILED)

    sys.excepthook = end
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    left = threading.Event()
    atexit.register(left.set)  # before JAX leaves, which it registered earlier
    threading.Thread(target=_listen, args=(left,), daemon=True).start()


def first_failure() -> str | None:
    """The exit status of the process that failed first and what it said, if one did."""
    with contextlib.suppress(Exception):  # there is none, or the coordinator is gone
        return _client().key_value_try_get(_KEY)
    return None


def _listen(left: threading.Event) -> None:
    """End this process a moment after another one failed: it may wait for that one in native code."""
    while not left.wait(0.5):
        if (found := first_failure()) and not left.wait(3.0):
            status, _, sentence = found.partition(" ")
            _end(int(status), f"ends, because {sentence}")


def together() -> bool:
    """Whether this process is one of several that have met. Imports nothing: an error of JAX asks it."""
    return sys.modules.get("jax") is not None and _client() is not None and _state().num_processes > 1


def meet(settings: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Wait for the other processes, however long they take. The end of one of them ends the others.

    Raises ValueError, with the same sentence in all, where they come with other ``settings``
    (`agreed.flat`)."""
    if not together():
        return
    state, key, day = _state(), f"llmpar/meet/{next(_MEETINGS)}", 24 * 3600 * 1000  # ms
    state.client.key_value_set(f"{key}/{state.process_id}", json.dumps(flat(settings), default=str))
    state.client.wait_at_barrier(key, day)
    if state.process_id == 0:
        texts = [state.client.key_value_try_get(f"{key}/{i}") for i in range(state.num_processes)]
        differ = len(set(texts)) > 1
        state.client.key_value_set(f"{key}/why", refusal(list(map(json.loads, texts))) if differ else AGREED)
    if (why := state.client.blocking_key_value_get(f"{key}/why", day)) != AGREED:
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
    told = first_failure()
    if not told or told == mine or told.partition(": ")[2] == sentence:
        return None  # all refuse the same: each says so
    first, _, why = told.partition(" ")
    _tell(f"ends, because {why}")
    return int(first)


def leave(status: int) -> None:
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

    def feed(self) -> None:
        """A step is done."""
        self.done, self._until = self.done + 1, time.monotonic() + self.limit_s

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.limit_s / 4)):
            if time.monotonic() > self._until:
                faulthandler.dump_traceback(all_threads=True)
                words = f"no step ended within {self.limit_s:g} s after {self.done}"
                words += ": a process is stuck, or left out a collective"
                with contextlib.suppress(Exception):
                    _client().key_value_set(_KEY, f"{STUCK} in a process {words}")
                _end(STUCK, f"{words}; the stacks above show where")
