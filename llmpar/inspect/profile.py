"""Read a profile that `jax.profiler.trace` wrote, and set its times beside what each line sends.

Read is ``*.xplane.pb``, the whole profile; without it ``*.trace.json.gz``, which XLA makes of its first
events (openxla/xla, xla/tsl/profiler/convert/xplane_to_trace_events.cc). An operation is known by the stat
``hlo_op``: of threads on CPUs, of kernels in the lines ``Stream …`` of a GPU, where an operation may run
several. A TPU has a line ``XLA Ops`` with an event for each operation, and a line ``XLA Modules`` that says
which program ran when (xla/tsl/profiler/utils/xplane_schema.cc). XProf writes the host before a device.
"""

import bisect
import gzip
import json
import math
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jax.profiler import ProfileData

from llmpar.draw.scene import time_text
from llmpar.inspect.census import Collective, collective
from llmpar.inspect.hlo import Instruction, Module, _groups, parsed
from llmpar.inspect.roofline import alone, collective_role

_GRAPH = "CudaGraph"
_LIBRARY = rf"nccl|rccl|{_GRAPH}"
_LIKE = rf"all-|reduce-scatter|(async-)?collective-|ragged-|send|recv|{_LIBRARY}"
# Files of a profile, the most complete first; JAX writes ``perfetto_trace.json.gz`` when it is asked to.
_FORMS = "*.xplane.pb", "*.trace.json.gz", "*trace.json.gz", "*trace.json"
_PART = (
    "times are of {}, for there is no *.xplane.pb: of a long profile XLA writes only the first events there"
    " (one or five million, by its version)"
)
# How many operations of a profile that are in no row are named.
_MOST = 5
_OTHERWISE = (
    "it may have been compiled otherwise, or for other devices, when it ran: look at it on those, or for them"
    " (llmpar inspect --target)"
)
_HIDDEN = (
    "XLA's CUDA graphs (command buffers) hide which operation ran a kernel; profile once without them:"
    " XLA_FLAGS=--xla_gpu_enable_command_buffer="
)
_SAME = "{} programs named {} are in the profile: times are of {} of them, with most of these collectives"
# What rows that one message carries do not share by their bytes.
_UNSHARED = "executions", "link_bytes_per_s"
Device = tuple[str, int]
"""A file of the profile, which is a host's, and the place of a device in that host."""
Spans = dict[Device, list[tuple[float, float]]]
"""Start and duration of each execution on a device, in nanoseconds."""


def profile_files(folder: str | os.PathLike) -> list[Path]:
    """List the files of the newest profile in a folder, one for each host; or the one file that is given.
    Raises ValueError where there is none."""
    if (given := Path(folder)).is_file():
        return [given]
    paths = [path for form in _FORMS for path in given.rglob(form)]
    if not paths:
        raise ValueError(
            f"'{folder}' has no *.xplane.pb and no *.trace.json.gz; give the folder that"
            " jax.profiler.trace(folder) wrote"
        )
    newest = max(paths, key=lambda path: path.stat().st_mtime).parent
    return next(filter(None, (sorted(newest.glob(form)) for form in _FORMS)))


def read_profile(paths: list[Path]) -> dict[str, dict[str, Spans]]:
    """Return when operations ran on each device, by program and operation, of the files of one profile.
    A program is ``name(id)``, for one function may be compiled several times, or '' where it is not known.
    Raises ValueError where no operation of a device is in them."""
    kernels: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    # JAX's reader warns as it makes its types; where a warning is an error that ends the process
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        events = [(path.name, *event) for path in paths for event in _events(path)]
    for file, host, program, op, ordinal, *kernel in events:
        kernels[program][op][f"{file} {host}", ordinal].append(kernel)
    if not kernels:
        raise ValueError(
            f"the profile in '{paths[0].parent}' names no operation of a device; run the compiled function"
            " inside jax.profiler.trace, and wait for its result there"
        )
    return {
        program: {op: {d: _executions(each) for d, each in of.items()} for op, of in ops.items()}
        for program, ops in kernels.items()
    }


def _executions(kernels: list[tuple[float, float, str]]) -> list[tuple[float, float]]:
    """Return start and duration of each execution of an operation, of the start, duration and name of its
    kernels: an execution has the one that takes longest in all once, and those around it."""
    total = defaultdict[str, float](float)
    for _, duration, name in kernels:
        total[name] += duration
    main = max(total, key=lambda name: total[name])
    runs, seconds = list[tuple[float, float]](), 0.0
    for start, duration, name in sorted(kernels):
        seconds += duration
        if name == main:
            runs.append((start, seconds))
            seconds = 0.0
    start, before = runs[-1]
    return [*runs[:-1], (start, before + seconds)]


def _events(path: Path) -> Iterator[tuple[str, str, str, int, float, float, str]]:
    """List host, program, operation, device, start, duration and kernel of what ran on devices."""
    is_whole = path.name.endswith(".pb")
    profile = ProfileData.from_file(str(path)) if is_whole else _trace_events(path)
    planes = list(profile.planes)
    on_device = [plane for plane in planes if re.fullmatch(r"(.* )?/device:\w+:\d+", plane.name)]
    for plane in on_device or planes:
        lines = list(plane.lines)
        host = plane.name.rpartition(" ")[0]
        streams = [line for line in lines if line.name.startswith("Stream")]
        ops = [line for line in lines if line.name == "XLA Ops" and not streams]
        modules = [event for line in lines if line.name == "XLA Modules" for event in line.events]
        runs = sorted((event.start_ns, event.name) for event in modules)
        for event in (event for line in streams or ops or lines for event in line.events):
            stats, start, kernel = dict(event.stats), event.start_ns, ""
            name = re.sub(r"^%|[ (].*", "", event.name)
            op = str(stats.get("hlo_op", name if ops else ""))
            if streams:
                kernel = event.name
                is_other = re.match(_LIBRARY, name) and not re.match(_LIKE, op)
                op = f"{name} in {op}".removesuffix(" in ") if is_other else op
            if op:
                ordinal = int(stats.get("device_ordinal", plane.name.rpartition(":")[2]))
                place = bisect.bisect(runs, start, key=lambda run: run[0])
                program = runs[place - 1][1] if place else ""
                if module := stats.get("hlo_module"):
                    program = f"{module}({stats.get('program_id', '')})"
                yield host, program, op, ordinal, start, event.duration_ns, kernel


def _trace_events(path: Path) -> SimpleNamespace:
    """Read a trace in JSON, the Trace Event Format of Chrome, in the form of `ProfileData`.
    Raises ValueError where it is cut off, or is other JSON."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            document = json.load(file)
        events = document if isinstance(document, list) else document["traceEvents"]
        events = [dict(event) for event in events]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"'{path}' is no whole trace with traceEvents ({error}); give the *.xplane.pb or the"
            " *.trace.json.gz that jax.profiler.trace wrote"
        ) from None
    names = dict[tuple, str]()
    lines: Any = defaultdict(lambda: defaultdict(list))
    for event in events:
        pid, tid, args = event.get("pid"), event.get("tid"), event.get("args") or {}
        if event.get("name") in ("process_name", "thread_name"):
            names[(pid, tid) if event["name"] == "thread_name" else (pid,)] = args.get("name", "")
        elif event.get("ph") == "X":
            span = dict(start_ns=1e3 * event["ts"], duration_ns=1e3 * event.get("dur", 0))
            one = SimpleNamespace(name=event["name"], stats=args.items(), **span)
            lines[pid][tid].append(one)
    named = lambda place, **parts: SimpleNamespace(name=names.get(place, ""), **parts)
    return SimpleNamespace(
        planes=[
            named((pid,), lines=[named((pid, tid), events=each) for tid, each in threads.items()])
            for pid, threads in lines.items()
        ]
    )


def measure_rows(
    rows: list[dict[str, Any]],
    text: str,
    mesh: Any,
    folder: str | os.PathLike,
    line_of: Callable[[str], str],
) -> list[str]:
    """Set ``measured`` in the rows of a look, and return notes: what is in the profile and in no row.

    ``text`` is the program as it ran, whose operations have the names of the profile; ``line_of`` returns the
    line for which a line of it stands. ``measured`` has ``executions`` of a device, and of one of them, as a
    mean over devices: ``seconds``; ``waiting_s`` of these, until the last of its group arrives (on TPUs: in
    the operation that awaits it); ``bytes_per_s`` that a device sends, without the waiting for others;
    ``predicted_s`` and ``link_bytes_per_s`` of the mesh's chip. None is what is not known. Raises ValueError
    where the profile is not of this program.
    """
    module, paths = parsed(text), profile_files(folder)
    starts, awaits = _named(module)
    timed, notes = _of_program(read_profile(paths), module.name, starts, str(folder))
    predicted = alone(module, mesh)
    sums = defaultdict[int, defaultdict[str, float]](lambda: defaultdict(float))
    lost, shared = dict[str, tuple[int, float]](), dict[str, None]()
    for name, spans in timed.items():
        place = starts.get(name.rpartition(" in ")[2])
        one = collective(module, *place, mesh) if place else None
        fits = _rows_of(one, rows, line_of(one.source)) if one else []
        if not place or not one or not fits:
            total = sum(seconds for each in spans.values() for _, seconds in each)
            if re.match(_LIKE, name) and name not in awaits.values():
                lost[name] = max(map(len, spans.values())), total / len(spans) / 1e9
            continue
        op = module.computations[place[0]][place[1]]
        facts = _facts(spans, timed.get(awaits.get(name, ""), {}), _members(op, mesh, spans))
        facts |= {key: n * facts["executions"] for key, n in predicted(op).items()}
        facts["bytes"] = facts["executions"] * one.bytes_sent
        whole = sum(map(_each, fits))
        for row in fits:
            for key, value in facts.items():
                sums[id(row)][key] += value if key in _UNSHARED else value * _each(row) / whole
        if len(fits) > 1:
            shared[", ".join(dict.fromkeys(row["source"] for row in fits))] = None
    for row in rows:
        row["measured"] = _means(sums[id(row)]) if id(row) in sums else {}
    notes += [
        f"merged into one message, whose time is shared by bytes: {lines}" for lines in shared
    ]
    notes += [_PART.format(paths[0].name)] * (paths[0].suffix != ".pb")
    return notes + _unmatched(lost, sum(not row["measured"] for row in rows))


def _named(module: Module) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Return the collective, by computation and name, that each operation of a profile starts or runs, and
    the operation that awaits it, if there is one."""
    every = [(comp, *pair) for comp, ops in module.computations.items() for pair in ops.items()]
    places = {id(op): (comp, name) for comp, name, op in every}
    starts, keys, ends = dict[str, tuple[str, str]](), dict[str, tuple[str, str]](), {}
    for comp, name, op in every:
        role, key, inner = collective_role(module, name, op)
        if role == "done":
            ends[comp, key] = name
        elif inner and inner.collective:
            starts[name], keys[name] = places[id(inner)], (comp, key)
    return starts, {name: ends[key] for name, key in keys.items() if key in ends}


def _of_program(
    programs: dict[str, dict[str, Spans]], name: str, starts: Mapping[str, Any], folder: str
) -> tuple[dict[str, Spans], list[str]]:
    """Return the operations of a program in a profile, and a note where several have its name: those count
    that have most of its collectives."""
    names = {one: one.partition("(")[0] for one in programs}
    of_this = {one for one, text in names.items() if text.removeprefix("jit_") == name}
    if not of_this and "" not in programs:
        seen = ", ".join(sorted({*names.values()}))
        raise ValueError(f"the profile in '{folder}' is of {seen}, and this is {name}")
    hits = {one: len(starts.keys() & programs[one]) for one in of_this}
    chosen = [one for one, n in hits.items() if n == max(hits.values())]
    timed: Any = defaultdict(lambda: defaultdict(list))
    for one in (*chosen, "") if "" in programs else chosen:
        for op, spans in programs[one].items():
            for device, runs in spans.items():
                timed[op][device] += runs
    same = [_SAME.format(len(of_this), name, len(chosen))] * (len(of_this) > 1)
    return timed, same


def _each(row: dict[str, Any]) -> float:
    """Return the bytes of one execution of a row."""
    return row["bytes_sent"] / max(row["count"], 1) or 1


def _unmatched(lost: dict[str, tuple[int, float]], rows: int) -> list[str]:
    """Note what is in the profile and in no row, and how many rows are not in the profile. A graph of kernels
    counts only where rows are missing, which may be in it."""
    lost = {name: one for name, one in lost.items() if rows or not name.startswith(_GRAPH)}
    total = time_text(sum(seconds for _, seconds in lost.values()))
    most = sorted(lost.items(), key=lambda item: -item[1][1])
    words = [f"{name} ×{n} {time_text(seconds)}" for name, (n, seconds) in most]
    words[_MOST:] = [f"{len(lost) - _MOST} more"] * (len(lost) > _MOST)
    notes = [f"not in the profile: {rows} of these lines"] * (rows > 0)
    text = f"in the profile, and in no line: {total} of a device: {', '.join(words)}"
    notes += [text] * bool(lost)
    if any(re.match(_LIBRARY, name) for name in lost):
        return [*notes, _HIDDEN]
    return notes + [_OTHERWISE] * bool(lost and rows)


def _rows_of(one: Collective, rows: list[dict[str, Any]], line: str) -> list[dict[str, Any]]:
    """Return the rows that a collective of the final text carries out, one for each of its results. Where the
    compiler made another kind of collective of them, those of its line and axes."""
    on_axes = [row for row in rows if row["axes"] == one.axes]
    several = one.shape and isinstance(one.shape[0], tuple)
    likeness = lambda row: (row["source"] == line, row["direction"] == one.direction)
    chosen = list[dict[str, Any]]()
    for shape in one.shape if several else [one.shape]:
        same = [r for r in on_axes if (r["collective"], r["shape"]) == (one.kind, shape)]
        fits = [r for r in same if r not in chosen and (several or r["source"] == line)]
        chosen += sorted(fits, key=likeness)[-1:]
    return chosen or [row for row in on_axes if row["source"] == line]


def _members(op: Instruction, mesh: Any, spans: Spans) -> list[list[Device]]:
    """Return the groups of a collective as devices of the profile; none where hosts are several."""
    (file, *others), grid = {file for file, _ in spans}, getattr(mesh, "devices", None)
    everyone = list(range(math.prod(mesh.shape.values())))
    ordinals = everyone if grid is None else [d.local_hardware_id for d in grid.flat]
    groups = [] if others or "_pairs=" in op.attrs else _groups(op.attrs) or [everyone]
    return [[(file, ordinals[i]) for i in group] for group in groups]


def _facts(spans: Spans, ends: Spans, groups: list[list[Device]]) -> dict[str, float]:
    """Return the executions of a device, and of all of them, as a mean over devices, the seconds, those of
    waiting, and those until others arrive; nan where that is not known. ``ends`` is what awaits them."""
    takes, per_s, awaited = dict[Device, list[float]](), 1e9 * len(spans), 0.0
    for device, each in spans.items():
        # a profile may begin between a start and its end
        last = [span for span in sorted(ends.get(device, [])) if span >= min(each)]
        awaited += sum(seconds for _, seconds in last) / per_s
        until = [at + seconds for at, seconds in last] or [sum(span) for span in sorted(each)]
        takes[device] = [b - a for (a, _), b in zip(sorted(each), until, strict=False)]
    late = math.nan
    members = {device for group in groups for device in group}
    is_whole = members <= {*takes} and len({len(takes[device]) for device in members}) == 1
    if is_whole and not ends:
        runs = [one for group in groups for one in zip(*map(takes.get, group), strict=False)]
        late = sum(sum(one) - len(one) * min(one) for one in runs) / per_s
    return {
        "executions": max(map(len, takes.values())),
        "seconds": sum(map(sum, takes.values())) / per_s,
        "waiting_s": awaited if ends else late,
        "late_s": late,
    }


def _means(sums: Mapping[str, float]) -> dict[str, Any]:
    """Return what is shown of one execution; None for what is not known."""
    n, of = sums["executions"], lambda key: None if math.isnan(sums[key]) else sums[key] / n
    seconds = sums["seconds"] - n * (of("late_s") or 0)
    known = {key: of(key) for key in ("waiting_s", "predicted_s", "link_bytes_per_s")}
    known["bytes_per_s"] = sums["bytes"] / seconds if seconds > 0 else None
    return {"executions": round(n), "seconds": of("seconds")} | known
