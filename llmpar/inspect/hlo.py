"""Reads out of a program which collectives it runs: how often, over which mesh axes, for how many bytes, by
which line.

A program can be read in three places, from the question to the answer:

1. its jaxpr (`census_jaxpr`): what the author wrote, in the author's axes; empty where the partitioner
decides; 2. the text just after SPMD partitioning (`partitioned_hlo`, then `census_hlo`): what will be sent,
at its true width,
   nothing merged yet. Prefer this one;
3. the final text (`compiled.as_text()`, then `census_hlo`): what this back end runs. The CPU widens bf16 to
   f32 and fp8 to f16 (`to_apply=..._promoted` tells), merges all-reduces of equal groups and, outside loops,
   a rematerialized gather with its first; nothing here undoes that. Out of the persistent cache, its source
   lines may be out of date.

`Compiled.cost_analysis` counts the body of a loop once; here a loop multiplies by its trip count. Not
counted: groups of one device (they send nothing), `collective-broadcast`, `send` and `recv`.
"""

import functools
import math
import operator
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from llmpar import notation


@dataclass(frozen=True)
class Collective:
    """States what one collective of a program sends in one step."""

    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all, ragged-all-to-all or collective-permute
    axes: tuple[str, ...]  # in mesh order; ('other',) where the groups follow no set of whole axes
    group_size: int
    count: int  # executions per step
    bytes_sent: int  # per device and step
    dtype: str  # as XLA writes it: f32, bf16, s32
    shape: tuple  # of the result of one execution; several shapes if it has several results
    source: str  # 'llmpar/model.py:88'; '' where the compiler does not say
    conditional: bool = False  # in a branch: counted as if the branch that sends most were always taken
    arrow: str = (
        ""  # the line of the model or step that it carries out (`par.scope`); '' where the partitioner chose
    )


_ARROW = re.compile(r".*arrow\[(.*?)\]")


def _arrow(scope: str) -> str:
    found = _ARROW.match(scope)
    return found[1] if found else ""


Taken = Mapping[
    str, Fraction
]  # how often the true branch of a cond under `jax.named_scope("when-NAME")` is taken
Work = list[tuple[Collective, Fraction]]  # collectives that run once, and how often they do


def ring_bytes(kind: str, group_size: int, result_bytes: int) -> int:
    """Gives the bytes that one of g devices on a ring sends for a result of R bytes, as `notation.ring_bytes`
    counts them.

    All-gather and all-to-all R(g-1)/g, reduce-scatter R(g-1), all-reduce 2R(g-1)/g, collective-permute R.
    """
    return notation.ring_bytes(
        kind, result_bytes * (group_size if kind == "reduce-scatter" else 1), group_size
    )


def census_table(collectives: Iterable[Collective]) -> dict[tuple[str, str], dict[str, int]]:
    """Sums counts and bytes by axes (written 'dp,fsdp') and kind, to compare two censuses or one with a
    formula."""
    table: dict[tuple[str, str], dict[str, int]] = {}
    for c in collectives:
        row = table.setdefault((",".join(c.axes), c.kind), {"count": 0, "bytes_sent": 0})
        row["count"] += c.count
        row["bytes_sent"] += c.bytes_sent
    return table


def _branches(branches: list[Work], scope: str, taken: Taken | None) -> Work:
    """Weighs two branches, false and true, by how often each is taken; where that is not said, the dearest
    counts."""
    name = re.search(r"when-(\w+)\)*(?:/cond)?$", scope)
    if taken and name and (share := taken.get(name[1])) is not None:
        return _repeat(branches[0], 1 - share) + _repeat(branches[1], share)
    dearest = max(branches, key=lambda work: sum(c.bytes_sent * times for c, times in work))
    return [(replace(c, conditional=True), times) for c, times in dearest]


def _repeat(work: Work, times: int | Fraction | None, source: str = "") -> Work:
    if times is None and work:
        loop, what = "the loop" + (source and f" at {source}"), ", ".join(sorted({c.kind for c, _ in work}))
        how = "use lax.scan, or lax.fori_loop with bounds that are Python integers"
        raise ValueError(
            f"cannot count {loop}: it runs {what}, but the program does not say how often; {how}"
        )
    return [(c, n * times) for c, n in work if times]


def _counted(work: Work) -> list[Collective]:
    return [replace(c, count=int(times), bytes_sent=int(c.bytes_sent * times)) for c, times in work]


def _innermost(frames: Iterable[tuple[str, int]]) -> str:
    """Names the innermost frame outside JAX and Flax, and outside `par` too: it only does what another line
    asks."""
    ours = [(f, n) for f, n in frames if not re.search(r"/(?:site|dist)-packages/(?:jax|jaxlib|flax)/", f)]
    asked = [(f, n) for f, n in ours if not f.endswith("/llmpar/par.py")]
    return next(("/".join(Path(f).parts[-2:]) + f":{n}" for f, n in asked + ours), "")


_KINDS = {
    kind.replace("-", "_"): kind
    for kind in ("all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all")
}
_KINDS |= {"ppermute": "collective-permute"} | dict.fromkeys(("psum", "psum2", "pmax", "pmin"), "all-reduce")
_DTYPES = {"bfloat": "bf", "float": "f", "uint": "u", "int": "s", "complex": "c", "bool": "pred", "_": ""}


def census_jaxpr(jaxpr: Any, axis_sizes: dict[str, int], taken: Taken | None = None) -> list[Collective]:
    """Counts the collectives that a jaxpr names. A scan multiplies by its length; of a cond the dearest
    branch counts, unless it is named and `taken` says how often it is true.

    `axis_sizes` is `mesh.shape`, in mesh order. Refuses a `while` (a loop with traced bounds) that holds a
    collective.
    """
    return _counted(_jaxpr_work(jaxpr, axis_sizes, taken))


def _jaxpr_work(jaxpr: Any, axis_sizes: dict[str, int], taken: Taken | None) -> Work:
    work: Work = []
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        kind = _KINDS.get(
            re.sub("^unreduced_|_invariant|_reduced|_start", "", name)
        )  # one collective in many variants
        inside = [_jaxpr_work(x, axis_sizes, taken) for x in jax.tree.leaves(params) if hasattr(x, "eqns")]
        if not kind and not any(inside):
            continue
        frames = getattr(eqn.source_info.traceback, "frames", ())
        source = _innermost((frame.file_name, frame.line_num) for frame in frames)
        if kind:
            arrow = _arrow(str(eqn.source_info.name_stack))
            found = _named_collectives(kind, eqn, axis_sizes, source)
            work += [(replace(one, arrow=arrow), Fraction(1)) for one in found]
        elif name == "cond":
            work += _branches(inside, str(eqn.source_info.name_stack), taken)
        else:
            times = params["length"] if name == "scan" else None if name == "while" else 1
            work += _repeat(sum(inside, []), times, source)
    return work


def _named_collectives(kind: str, eqn: Any, sizes: dict[str, int], source: str) -> Iterable[Collective]:
    """Gives one collective per result: the psum of a tree is several all-reduces, as it is after
    partitioning."""
    named = jax.tree.leaves(eqn.params.get("axes", eqn.params.get("axis_name")))
    if unknown := [a for a in named if isinstance(a, str) and a not in sizes]:
        raise ValueError(
            f"a {kind} runs over axis {unknown[0]!r}, but the sizes given are those of {list(sizes)}"
        )
    axes = tuple(a for a in sizes if a in named and sizes[a] > 1)
    group_size = math.prod(sizes[a] for a in axes)
    if groups := eqn.params.get("axis_index_groups"):
        axes, group_size = ("other",), len(groups[0])
    if group_size == 1 or all(there == here for there, here in eqn.params.get("perm", [(0, 1)])):
        return
    for aval in (
        getattr(v.aval, "inner_aval", v.aval) for v in eqn.outvars
    ):  # psum_start and the like give futures
        dtype = re.sub("|".join(_DTYPES), lambda word: _DTYPES[word[0]], aval.dtype.name)
        sent = ring_bytes(kind, group_size, aval.size * aval.dtype.itemsize)
        yield Collective(kind, axes, group_size, 1, sent, dtype, aval.shape, source)


_OP = re.compile(r"\s*(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)((?:, .*)?)$")
_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) (?:\(.* )?\{$")
_CALLS = {
    "while": ("condition", "body"),
    "conditional": ("branch_computations", "false_computation", "true_computation"),
}
_CALLS |= dict.fromkeys(("call", "fusion", "async-start"), ("calls", "to_apply"))
_ROOT = ("", None)
_MAX_TRIPS = 1_000_000  # counters are stepped, not solved: more trips than a training step has


class _Op(NamedTuple):
    type: str
    kind: str
    inside: (
        str  # what the parentheses hold: operands, or the value of a constant, or the number of a parameter
    )
    attrs: str

    def operand(
        self, i: int
    ) -> tuple[str, int | None]:  # %x, or %x#1 where JAX 0.12 leaves out the get-tuple-element
        name, index = re.findall(r"%([\w.\-]+)(?:#(\d+))?", self.inside)[i]
        return name, int(index) if index else None

    def called(self, *keys: str) -> list[str]:
        found = [re.search(rf"\b{key}=(\{{[^}}]*\}}|[^,\s]+)", self.attrs) for key in keys]
        return [name for m in found if m for name in re.findall(r"[\w.\-]+", m[1])]


def _integers(text: str, after: str = "") -> list[int]:
    return [int(n) for n in re.findall(rf"{after}(\d+)", text)]


def _shapes(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (dtype, tuple(_integers(dims))) for dtype, dims in re.findall(r"([a-z]\w*)\[([^\]]*)\]", type_text)
    ]


class _Module:
    """Holds a module's computations, with as much of an evaluator as it takes to count the trips of its
    loops."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, _Op]] = {}
        self.roots: dict[str, str] = {}
        self.tables: dict[str, dict[int, str]] = {}  # FileNames, FileLocations, StackFrames
        name = self.entry = ""
        for line in text.splitlines():
            if m := _OP.match(line):
                self.computations[name][m[2]] = _Op(*m.groups()[2:])
                self.roots[name] = m[2] if m[1] else self.roots.get(name, "")
            elif m := _COMPUTATION.match(line):
                name = m[2]
                self.computations[name] = {}
                self.entry = name if m[1] else self.entry
            elif m := re.match(r"(\d+) (.+)", line):
                self.tables.setdefault(name, {})[int(m[1])] = m[2]
            elif re.fullmatch(r"[A-Z]\w+", line):
                name = line
        if not self.entry:
            raise ValueError("expected the text of an HLO module, but no line of it begins with ENTRY")

    def source(self, op: _Op) -> str:
        if m := re.search(r'source_file="(.*?)".*?source_line=(\d+)', op.attrs):  # JAX before stack frames
            return _innermost([(m[1], int(m[2]))])
        frame, frames = next(iter(_integers(op.attrs, "stack_frame_id=")), 0), []
        while frame in self.tables.get("StackFrames", ()):
            location, parent = _integers(self.tables["StackFrames"][frame], "=")
            file, _, line, *_ = _integers(self.tables["FileLocations"][location], "=")
            frames.append((self.tables["FileNames"][file].strip('"'), line))
            frame = parent - 1  # parents are written plus one: an outermost frame says 1
        return _innermost(frames)

    def value(
        self, comp: str, ref: tuple[str, int | None], index: int | None, known: Callable[[int, Any], Any]
    ) -> Any:
        """Evaluates an integer as far as it follows from constants and from what is known of parameters; else
        None."""
        name, at = ref
        op, index = self.computations[comp][name or self.roots[comp]], index if at is None else at
        operand = lambda i, index=None: self.value(comp, op.operand(i), index, known)
        match op.kind:
            case "parameter":
                return known(int(op.inside), index)
            case "constant":
                return int(op.inside) if re.fullmatch(r"-?\d+", op.inside) else None
            case "tuple" if index is not None:
                return operand(index)
            case "get-tuple-element" | "copy" | "convert" | "bitcast" | "reshape" | "opt-barrier":
                return operand(0, next(iter(_integers(op.attrs, ", index=")), index))
            case "fusion" | "call":
                return self.value(op.called("calls", "to_apply")[0], _ROOT, index, operand)
            case "compare" | "add" | "subtract" | "multiply":
                function = getattr(operator, op.attrs.partition("direction=")[2][:2].lower() or op.kind[:3])
                return None if (x := operand(0)) is None or (y := operand(1)) is None else function(x, y)

    def trips(self, comp: str, loop: _Op) -> int | None:
        """Says how often a loop's body runs: what the compiler noted, or else what stepping its counter
        shows."""
        if noted := _integers(loop.attrs, r'"known_trip_count":\{"n":"'):
            return noted[0]
        condition, body = loop.called("condition", "body")
        indices = range(len(_shapes(loop.type)))
        carried = [self.value(comp, loop.operand(0), i, lambda *_: None) for i in indices]
        for trips in range(_MAX_TRIPS):
            if not (go_on := self.value(condition, _ROOT, None, lambda _, i: carried[i])):
                return None if go_on is None else trips
            carried[:] = [self.value(body, _ROOT, i, lambda _, i: carried[i]) for i in indices]
        return None

    def count(
        self,
        leaf: Callable[[str, _Op], Collective | None],
        taken: Taken | None,
        untold: int | Fraction | None = None,
    ) -> list[Collective]:
        """Counts the leaves in everything that the program executes, loops that do not say how often `untold`
        times."""

        def work(comp: str) -> Iterable[tuple[Collective, Fraction]]:
            for op in self.computations[comp].values():
                if op.kind == "while":
                    inside = [found for callee in op.called(*_CALLS[op.kind]) for found in work(callee)]
                    trips = self.trips(comp, op) if inside else 0
                    yield from _repeat(inside, untold if trips is None else trips, self.source(op))
                elif op.kind == "conditional":
                    branches = op.called(*_CALLS[op.kind])
                    name = re.search(r'op_name="(.*?)"', op.attrs)
                    yield from _branches(
                        [list(work(branch)) for branch in branches], name[1] if name else "", taken
                    )
                elif op.kind in _CALLS:
                    yield from work(op.called(*_CALLS[op.kind])[0])
                elif found := leaf(comp, op):
                    yield found, Fraction(1)

        return _counted(list(work(self.entry)))


def census_hlo(text: str, mesh: Any, taken: Taken | None = None) -> list[Collective]:
    """Counts the collectives of HLO text, partitioned or final, and finds the axes of `mesh` that their
    groups span.

    A mesh is anything with `axis_names` and `shape`. Devices in the text are positions in the mesh in
    row-major order, whatever ids its devices have. Of an asynchronous pair the start is counted. Refuses a
    collective in a loop whose trip count is unknown, and groups that do not cover the mesh (the program of
    another mesh).
    """
    module = _Module(text)
    return module.count(lambda _, op: _collective(module, op, mesh), taken)


def _collective(module: _Module, op: _Op, mesh: Any) -> Collective | None:
    kind = op.kind.removesuffix("-start")
    axes, group_size = _axes(op.attrs, mesh) if kind in _KINDS.values() else ((), 1)
    if group_size == 1:
        return None
    shapes = _shapes(op.type)
    if op.kind.endswith("-start") and kind != "all-reduce":  # (operands, results, ...)
        shapes = shapes[(n := op.inside.count("%")) : 2 * n]
    bits = sum(math.prod(shape) * (8 if dtype == "pred" else _integers(dtype)[0]) for dtype, shape in shapes)
    dtypes, dims = ",".join(sorted({d for d, _ in shapes})), tuple(shape for _, shape in shapes)
    sent, source = ring_bytes(kind, group_size, bits // 8), module.source(op)
    shape, scope = dims[0] if len(dims) == 1 else dims, re.search(r'op_name="(.*?)"', op.attrs)
    return Collective(
        kind, axes, group_size, 1, sent, dtypes, shape, source, arrow=_arrow(scope[1] if scope else "")
    )


def unordered(text: str, mesh: Any) -> list[tuple[Collective, Collective]]:
    """Lists the pairs of collectives in HLO text that no path of data orders, those in loops and branches
    too.

    A device may enter such a pair in either order while another does the opposite. Simulated devices block a
    thread in each collective, so many of these want many threads (`llmpar.mesh.THREADS_PER_DEVICE`).
    """
    module, pairs = _Module(text), list[tuple[Collective, Collective]]()

    @functools.cache
    def inside(comp: str) -> list[Collective]:
        """Lists a computation's collectives, and notes its unordered pairs."""
        before, found = (
            dict[str, int](),
            dict[int, list[Collective]](),
        )  # sets of places as bits; place to what is there
        for place, (name, op) in enumerate(
            module.computations[comp].items()
        ):  # an operand stands before its users
            waits = re.findall(r"control-predecessors=\{(.*?)\}", op.attrs)
            needs = [n for n in re.findall(r"%([\w.\-]+)", " ".join((op.inside, *waits))) if n in before]
            before[name] = functools.reduce(operator.or_, (before[n] for n in needs), 0) | 1 << place
            callees = op.called(*_CALLS[op.kind]) if op.kind in _CALLS else []
            here = [c for callee in callees if callee in module.computations for c in inside(callee)]
            here += [one] if (one := _collective(module, op, mesh)) else []
            if not here:
                continue
            loose = [c for other, theirs in found.items() if not before[name] >> other & 1 for c in theirs]
            pairs.extend((a, b) for a in loose for b in here)
            found[place] = here
        return [c for here in found.values() for c in here]

    inside(module.entry)
    return pairs


def executed_flops(text: str, taken: Taken | None = None, trips: int | Fraction | None = None) -> int:
    """Counts the FLOPs of every `dot` that HLO text executes on a device, 2MNK each; GPU library calls are
    not seen.

    Loops with traced bounds (over the blocks of experts) are refused, or run `trips` times: of several, their
    mean.
    """
    module = _Module(text)

    def leaf(comp: str, op: _Op) -> Collective | None:
        if op.kind != "dot":
            return None
        name, index = op.operand(0)
        _, lhs = _shapes(module.computations[comp][name].type)[index or 0]
        dtype, shape = _shapes(op.type)[0]
        flops = 2 * math.prod(shape) * math.prod(lhs[int(d)] for d in op.called("lhs_contracting_dims"))
        return Collective(
            "dot", (), 1, 1, flops, dtype, shape, ""
        )  # walks as a collective, FLOPs in place of bytes

    return sum(c.bytes_sent for c in module.count(leaf, taken, trips))


def _axes(attrs: str, mesh: Any) -> tuple[tuple[str, ...], int]:
    """Names the mesh axes along which the devices of a group (or of a pair of a permute) differ, and a
    group's size."""
    sizes = [mesh.shape[a] for a in mesh.axis_names]
    devices = list(range(math.prod(sizes)))
    pairs = "source_target_pairs=" in attrs
    groups = _groups(attrs) or ([] if pairs else [devices])
    named = sorted(i for group in groups for i in group)
    if not set(named) <= set(devices) if pairs else named != devices:
        raise ValueError(f"groups {groups} are not of the {len(devices)} devices of mesh {dict(mesh.shape)}")
    places = zip(mesh.axis_names, np.unravel_index(devices, sizes), strict=True)
    axes = tuple(a for a, place in places if any(len({*place[g]}) > 1 for g in groups))
    size = math.prod(mesh.shape[a] for a in axes)  # of a group that fills these axes; no group leaves them
    return (
        (axes, size) if pairs or all(len(g) == size for g in groups) else (("other",), max(map(len, groups)))
    )


def _groups(attrs: str) -> list[list[int]]:
    """Reads replica groups in XLA's four spellings (its replica_group.cc, mesh_and_axis.cc); {} gives an
    empty list."""
    if m := re.search(r"replica_groups=\[([\d,]+)\]<=(\[\S+?)(?:, |$)", attrs):
        return _iota(m[2]).reshape(_integers(m[1])).tolist()
    if m := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d, ]*\},? ?)*)\}", attrs):
        return [_integers(g) for g in re.findall(r"\{(.*?)\}", m[1])]
    # mesh['a'=2,'b'=8], device_ids=([4,4]T(1,0)) {'a','b':(2)4}: 'b':(2)4 is the middle of b cut as [2, 4,
    # rest].
    if not (m := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", attrs)):
        return []
    names, sizes = zip(*re.findall(r"([^,=\s]+)=(\d+)", m[1]), strict=True)
    place, size = np.arange(math.prod(map(int, sizes))), 1
    # the place of the group's first device: that of the device, less its digits along the chosen axes
    first = place
    for name, start, n in re.findall(r"([^,:\s]+)(?::\((\d+)\)(\d+))?", m[3]):
        start, n = int(start or 1), int(n or sizes[names.index(name)])
        stride = math.prod(map(int, sizes[names.index(name) :])) // (start * n)
        first, size = first - place // stride % n * stride, size * n
    ids = _iota(m[2]).ravel() if m[2] else place
    return ids[np.argsort(first, kind="stable")].reshape(-1, size).tolist()


def _iota(text: str) -> np.ndarray:
    """Reads [2,4]T(1,0) as the numbers 0 to 7 in two rows, transposed; a plain list as itself."""
    dims, _, order = text.partition("T")
    numbers = _integers(dims)
    ids = np.arange(math.prod(numbers)).reshape(numbers) if text[0] == "[" else np.array(numbers)
    return ids.transpose(_integers(order)) if order else ids


_CHEAP: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def partitioned_hlo(lowered: jax.stages.Lowered) -> str:
    """Compiles a lowered program and gives its HLO text just after SPMD partitioning: true dtypes, nothing
    combined.

    Costs a compilation, away from the persistent cache, which would skip the pass. A program for one device
    is not partitioned: then the text is the one before optimizations.
    """
    return read_program(lowered)[1]


def read_program(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """Compiles a lowered program once to be read: gives the executable, and the text that `partitioned_hlo`
    gives.

    On CPUs the executable's machine code is not optimized, for two thirds of the time; its HLO and memory are
    the same.
    """
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    compilation_cache.reset_cache()  # whether to use the cache is asked once and remembered until a reset
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            dump: dict[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
            compiled = lowered.compile(dump | (_CHEAP if jax.default_backend() == "cpu" else {}))
            wanted = re.compile(r"\.(after_(tpu-)?spmd-partitioning|before_optimizations)\.")
            files = [f for f in Path(folder).glob("*.txt") if wanted.search(f.name)]
            return compiled, max(files, key=lambda f: (".after_" in f.name, f.stat().st_size)).read_text()
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def compiled_memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Gives a device's bytes as planned; peak is their sum, the alias once (the CPU's own peak lacks
    temporaries)."""
    stats = compiled.memory_analysis()
    memory = {
        f"{k}_bytes": getattr(stats, f"{k}_size_in_bytes") for k in ("argument", "output", "alias", "temp")
    }
    return memory | {"peak_bytes": sum(memory.values()) - 2 * memory["alias_bytes"]}
