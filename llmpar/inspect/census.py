"""Reads which collectives a program runs: how often, over which axes, bytes, and for which line of the model.

A program can be read in three places, from the question to the answer:

- its jaxpr (`llmpar.inspect.jaxpr`): what the author wrote, in the author's axes. It is empty where the
  partitioner decides;
- the text just after SPMD partitioning (`partitioned_hlo`, then `census_hlo`): what will be sent, at its true
  width, nothing merged yet. Prefer this one;
- the final text (`compiled.as_text()`, then `census_hlo`): what this back end runs. The CPU widens bf16 to
  f32 and fp8 to f16 (`to_apply=..._promoted` tells). It merges all-reduces of equal groups and, outside
  loops, a rematerialized gather with its first; nothing here undoes that. A cached text may name old lines.

`Compiled.cost_analysis` counts the body of a loop once; here a loop multiplies by its trip count. Not
counted: groups of one device (they send nothing), and what `Module.uncounted` names.
"""

import contextlib
import ctypes
import functools
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from llmpar.inspect.hlo import CALLS, Module, Op, group_axes, held_bytes, moved, parsed, shapes
from llmpar.inspect.shardings import program_shardings
from llmpar.predict import formulas


@dataclass(frozen=True)
class Collective:
    """States what one collective of a program sends in one step."""

    kind: str  # one of `hlo.KINDS`
    axes: tuple[str, ...]  # in mesh order; ('other',) where the groups follow no set of whole axes
    group_size: int
    count: int  # executions per step
    bytes_sent: int  # per device and step
    dtype: str  # as XLA writes it: f32, bf16, s32
    shape: tuple  # of the result of one execution; several shapes if it has several results
    source: str  # 'model/llama.py:88'; '' where the compiler does not say
    conditional: bool = False  # in a branch: counted as if the branch that sends most were always taken
    arrow: str = ""  # what it carries out, as `par.scope` names it; '' where the partitioner chose
    direction: str = ""  # forward, backward or recomputed; '' where it belongs to no pass: gradients' sums
    moves: str = ""  # what it does to its operand, as `hlo.moved` writes it: 'b/X s -> b s'; '' if unclear
    per_turn: str = ""  # where a loop is whose turns nobody knows: then count and bytes are of one turn


def arrow_of(scope: str) -> dict[str, Any]:
    """Reads ``arrow`` (the innermost) and ``direction`` of a `Collective` from an operation's named scopes.

    JAX names the pass: jvp is forward, its transpose backward, and what is rematerialized is forward again.
    A pipeline's F is not differentiated.
    """
    found = re.match(r".*arrow\[(.*?)\]", scope)
    marks = {"rematted_computation": "recomputed", "transpose(": "backward", "jvp(": "forward"}
    marks |= {"when-F/": "forward"}
    direction = next((name for mark, name in marks.items() if mark in scope), "")
    return {"arrow": found[1] if found else "", "direction": direction}


Taken = Mapping[str, Fraction]
"""How often the true branch of a cond under `jax.named_scope("when-NAME")` is taken."""
Work = list[tuple[Collective, Fraction]]
"""Collectives as they are when run once, and how often each is run."""


def ring_bytes(kind: str, group_size: int, result_bytes: int) -> int:
    """Gives the bytes that one of g devices on a ring sends for a result of R bytes.

    All-gather and all-to-all R(g-1)/g, reduce-scatter R(g-1), all-reduce 2R(g-1)/g; collective-permute, send,
    and collective-broadcast, where all but the last pass it on, R.
    """
    message_bytes = result_bytes * (group_size if kind == "reduce-scatter" else 1)
    return formulas.whole_ring_bytes(kind, message_bytes, group_size)


def in_all(collectives: Iterable[Collective]) -> Iterable[Collective]:
    """Passes on what a sum over a program may take. Refuses what is known per turn of a loop only."""
    for c in collectives:
        known(None if c.per_turn else c.count, c.kind, c.per_turn)
        yield c


def census_table(collectives: Iterable[Collective]) -> dict[tuple[str, str], dict[str, int]]:
    """Sums counts and bytes by axes (written 'dp,fsdp') and kind, to compare with another or a formula."""
    table: dict[tuple[str, str], dict[str, int]] = {}
    for c in in_all(collectives):
        row = table.setdefault((",".join(c.axes), c.kind), {"count": 0, "bytes_sent": 0})
        row["count"] += c.count
        row["bytes_sent"] += c.bytes_sent
    return table


def arrow_rows(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    """Sums counts and bytes by arrow, direction, axes and kind, the largest first: which line of the model
    sends what. The rows of one axis and kind add up to its row in `census_table`. What no arrow names is
    summed by ``source``, the line that asked for it ('' for what the partitioner adds by itself)."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for c in in_all(collectives):
        key = {"arrow": c.arrow, "direction": c.direction, "axis": ",".join(c.axes), "kind": c.kind}
        key |= {"source": "" if c.arrow else c.source}
        row = rows.setdefault(tuple(key.values()), key | {"count": 0, "bytes_sent": 0})
        row["count"] += c.count
        row["bytes_sent"] += c.bytes_sent
    return sorted(rows.values(), key=lambda row: -row["bytes_sent"])


def arrow_text(collectives: Iterable[Collective], most: int | None = None) -> str:
    """Writes `arrow_rows` as lines of text, with their sum below; those after the first ``most`` as one."""
    rows = arrow_rows(collectives)
    sent = sum(row["bytes_sent"] for row in rows)
    if rest := rows[most:] if most is not None else []:
        total = {name: sum(row[name] for row in rest) for name in ("count", "bytes_sent")}
        more = {"arrow": f"({len(rest)} more)", "source": "", "direction": "", "axis": "", "kind": ""}
        rows[most:] = [more | total]
    names = [r["arrow"] or r["source"] or "(the partitioner's)" for r in rows]
    cells = [
        (name, r["direction"], f"{r['axis']} {r['kind']}", f"×{r['count']}", f"{r['bytes_sent']:,} B")
        for name, r in zip(names, rows, strict=True)
    ]
    cells.append(("in all", "", "", "", f"{sent:,} B"))
    return columns(cells)


def columns(cells: Sequence[tuple[str, ...]]) -> str:
    """Writes rows of words below one another, the last of them, a number, to the right."""
    *widths, last = [max(map(len, column)) for column in zip(*cells, strict=True)]
    line = "  ".join([*(f"{{:<{width}}}" for width in widths), f"{{:>{last}}}"])
    return "\n".join(line.format(*row) for row in cells)


def share_of(scope: str, taken: Taken | None) -> Fraction | None:
    """Says how often a cond's true branch is taken, by the name of its scope; None where that is not said."""
    name = re.search(r"when-(\w+)\)*(?:/cond)?$", scope)
    return taken.get(name[1]) if taken and name else None


def weigh(branches: list[Work], scope: str, taken: Taken | None) -> Work:
    """Weighs two branches, false and true, by how often each is taken; if that is not said: the dearest."""
    if (share := share_of(scope, taken)) is not None:
        return repeat(branches[0], 1 - share) + repeat(branches[1], share)
    dearest = max(branches, key=lambda work: sum(c.bytes_sent * times for c, times in work))
    return [(replace(c, conditional=True), times) for c, times in dearest]


def repeat(work: Work, times: int | Fraction | None, source: str = "") -> Work:
    """Multiplies the work of a loop's body by its trips; if nobody knows them, marks it as that of a turn."""
    if times is None:
        loop = lambda c: (c.per_turn and f"{c.per_turn} in ") + (source or "an unnamed line")
        return [(replace(c, per_turn=loop(c)), n) for c, n in work]
    return [(c, n * times) for c, n in work if times]


def known(trips: int | Fraction | None, what: str, source: str) -> int | Fraction:
    """Gives the trips of a loop that runs ``what``; refuses one of which nobody knows them."""
    if trips is None and what:
        loop = "the loop" + (source and f" at {source}")
        remedy = "use lax.scan, or lax.fori_loop with bounds that are Python integers"
        why = f"it runs {what}, but the program does not say how often"
        raise ValueError(f"cannot count {loop}: {why}; {remedy}")
    return trips or 0


def counted(work: Work) -> list[Collective]:
    """Gives the collectives with the counts and bytes of all their runs."""
    return [replace(c, count=int(times), bytes_sent=int(c.bytes_sent * times)) for c, times in work]


def census_hlo(text: str, mesh: Any, taken: Taken | None = None) -> list[Collective]:
    """Counts the collectives of HLO text, partitioned or final, by the axes of `mesh` that groups span.

    A mesh is anything with `axis_names` and `shape`. Devices in the text are positions in the mesh in
    row-major order, whatever ids its devices have. Of an asynchronous pair the start is counted. In a loop
    whose trip count is unknown a collective is counted per turn. Refuses groups that do not cover the mesh.
    """
    module = parsed(text)

    def work(comp: str) -> Iterable[tuple[Collective, Fraction]]:
        for name, op in module.computations[comp].items():
            if op.kind == "while":
                inside = [found for callee in op.called(*CALLS[op.kind]) for found in work(callee)]
                yield from repeat(inside, module.trips(comp, op) if inside else 0, module.source(op))
            elif op.kind == "conditional":
                branches = op.called(*CALLS[op.kind])
                yield from weigh([list(work(branch)) for branch in branches], op.scope, taken)
            elif op.kind in CALLS:
                yield from work(op.called(*CALLS[op.kind])[0])
            elif comp not in module.echoes and (found := collective(module, comp, name, mesh)):
                yield found, Fraction(1)

    return counted(list(work(module.entry)))


def collective(module: Module, comp: str, name: str, mesh: Any) -> Collective | None:
    """Reads one operation as a collective that runs once; None if it is none, or sends nothing."""
    op = module.computations[comp][name]
    kind = op.collective
    axes, group_size = group_axes(op.attrs, mesh) if kind else ((), 1)
    if group_size == 1:
        return None
    results = op.results
    dtypes, dims = ",".join(sorted({d for d, _ in results})), tuple(shape for _, shape in results)
    sent = ring_bytes(kind, group_size, held_bytes(results))
    users = (user for user in module.computations[comp].values() if (name, None) in user.operands)
    source = module.source(op)
    if not source or source.startswith("argument "):  # its gather has the line that uses it, if one does
        source = next(filter(None, map(module.source, users)), source)
    shape, moves = dims[0] if len(dims) == 1 else dims, moved(module, comp, name, axes, mesh)
    found = Collective(kind, axes, group_size, 1, sent, dtypes, shape, source, **arrow_of(op.scope))
    return replace(found, moves=moves)


def is_product(op: Op) -> bool:
    """Tells a matrix product: a `dot`, or a call of a GPU's library."""
    return op.kind == "dot" or op.kind == "custom-call" and ("cublas" in op.attrs or "gemm" in op.attrs)


def executed_flops(text: str, taken: Taken | None = None) -> int:
    """Counts the FLOPs of every product that HLO text of CPUs or GPUs executes on a device, 2MNK each, but
    not those of kernels. Refuses loops with traced bounds (over what experts get beyond their slots)."""
    module = Module(text)
    turns = lambda comp, loop: known(module.trips(comp, loop), "dot", module.source(loop))
    leaf = lambda comp, op: dot_flops(module, comp, op) if is_product(op) else 0
    return int(flops_in(module, leaf, turns, taken)(module.entry, None))


def flops_in(module: Module, leaf: Callable, turns: Callable, taken: Taken | None = None) -> Callable:
    """Gives a function that adds up the FLOPs of an operation of a computation, or of all of them (None): its
    own (``leaf``, called like it) or those of what it calls, of a loop ``turns`` times, of a branch as often
    as it is taken (the dearest, where that is not said)."""

    def inside(comp: str, op: Op) -> Any:
        each = [flops(callee) for callee in op.called(*CALLS.get(op.kind, ()))]
        if op.kind == "while":
            return sum(each) * (turns(comp, op) if any(each) else 0)
        if op.kind == "conditional":
            share = share_of(op.scope, taken)
            return max(each) if share is None else each[0] * (1 - share) + each[1] * share
        return each[0] if each else leaf(comp, op)

    @functools.cache
    def flops(comp: str) -> Any:
        return sum(inside(comp, op) for op in module.computations.get(comp, {}).values())

    return lambda comp, op: flops(comp) if op is None else inside(comp, op)


def dot_flops(module: Module, comp: str, op: Op) -> int:
    """Gives the FLOPs of a product, or of a GPU library's call for one: 2MNK."""
    in_library = r'"lhs_contracting_dimensions":\s*\["(\d+)"'
    dims = op.called("lhs_contracting_dims") or re.findall(in_library, op.attrs)
    lhs = module.shape_of(comp, op, 0)
    return 2 * math.prod(shapes(op.type)[0][1]) * math.prod(lhs[int(d)] for d in dims)


_CHEAP: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def partitioned_hlo(lowered: jax.stages.Lowered) -> str:
    """Compiles a program and gives its HLO text just after SPMD partitioning: true dtypes, nothing combined.

    Costs a compilation, away from the persistent cache, which would skip the pass. A program for one device
    is not partitioned: then the text is the one before optimizations.
    """
    return read_program(lowered)[1]


def read_program(lowered: jax.stages.Lowered, platform: str = "") -> tuple[jax.stages.Compiled, str]:
    """Compiles a lowered program once to be read: gives the executable, and the text that `partitioned_hlo`
    gives. ``platform`` is the one that it is compiled for, if not that of JAX's devices here.

    On CPUs the executable's machine code is not optimized, for two thirds of the time; its HLO and memory are
    the same. What the compiler has freed goes back to the system: several programs fit into little memory.
    """
    platform = platform or jax.default_backend()
    _give_back()
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    compilation_cache.reset_cache()  # whether to use the cache is asked once and remembered until a reset
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            dump: dict[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
            compiled = lowered.compile(dump | (_CHEAP if platform == "cpu" else {}))
            wanted = re.compile(r"\.(after_(tpu-)?spmd-partitioning|before_optimizations)\.")
            files = [f for f in Path(folder).glob("*.txt") if wanted.search(f.name)]
            return compiled, max(files, key=lambda f: (".after_" in f.name, f.stat().st_size)).read_text()
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
        _give_back()


def _give_back() -> None:
    """Gives freed memory back to the system. glibc keeps it otherwise: 0.3 GB behind a small Llama."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def compiled_memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Gives a device's bytes as planned; peak is their sum, the alias once.

    Temporaries are those that the compiler reserves. A TPU's compiler reports more than its heap has: there
    they are what is alive at the fullest moment besides arguments and results, a few hundredths less than
    the heap (and what of it lies on the chip). The CPU's own peak lacks temporaries.
    """
    stats: Any = compiled.memory_analysis()
    kinds = "argument", "output", "alias", "temp"
    memory = {f"{kind}_bytes": getattr(stats, f"{kind}_size_in_bytes") for kind in kinds}
    rest = memory["argument_bytes"] + memory["output_bytes"] - memory["alias_bytes"]
    lie = (pair[1] for part in program_shardings(compiled) for pair in part if pair)
    if "tpu" in {device.platform for sharding in lie for device in sharding.device_set}:
        memory["temp_bytes"] = stats.peak_memory_in_bytes - rest
    return memory | {"peak_bytes": rest + memory["temp_bytes"]}
